# SPDX-License-Identifier: Apache-2.0
"""Scenarios 3, 4 and 5 of ScatterPaKvCache: compression per (batch, head)."""

from __future__ import annotations

from typing import Any

from kvcore._core.plan import Spec
from kvcore.ops import checks
from kvcore.soc import SoC

__all__ = ["resolve"]


def resolve(case: Any, soc: SoC | None) -> Spec:
    """The Spec of a compression case."""
    checks.fail("scatter_mode", "a mode this version has (None, Nct, NHSD)", case.rule)
