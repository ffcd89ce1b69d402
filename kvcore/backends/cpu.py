# SPDX-License-Identifier: Apache-2.0
"""This library's own kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcore._core.plan import Plan

__all__ = ["CpuBackend"]


class CpuBackend:
    """Host memory, compiled kernels, always there."""

    name = "cpu"
    spaces: frozenset[str] = frozenset({"host"})

    def why_not(self, plan: Plan | None = None) -> str | None:
        """None: it always runs."""
        return None

    def prepare(self, plan: Plan) -> Callable[[], Any]:
        """The plan's own kernels."""
        return plan.run_on_cpu
