# SPDX-License-Identifier: Apache-2.0
"""An installed stand-in for torch_npu."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def torch_npu() -> Iterator[Any]:
    """A namespace with the vendor's names on it."""
    import kvcore.torch

    ns = types.ModuleType("torch_npu")
    with kvcore.torch.install(ns):
        yield ns
