# SPDX-License-Identifier: Apache-2.0
"""Whether the real torch_npu can be run on here."""

from __future__ import annotations

import importlib.util

import pytest

from kvcore.emulator import installed


def _why_not() -> str | None:
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed in this environment (pip install '.[npu]')"
    return installed.platform_fault()


WHY_NOT = _why_not()
needs_wheel = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
