# SPDX-License-Identifier: Apache-2.0
"""What a backend is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from kvcore._core.plan import Plan

__all__ = ["Backend"]


@runtime_checkable
class Backend(Protocol):
    """Runs plans.  Arguments are checked before a backend sees them; it does not check again.

    name:   what users select it by.
    spaces: memory it reaches, of "host" and "device".
    """

    name: str
    spaces: frozenset[str]

    def why_not(self, plan: Plan | None = None) -> str | None:
        """Why it cannot run (this plan, or at all); None when it can."""

    def prepare(self, plan: Plan) -> Callable[[], Any]:
        """What plan.run() shall call; called once per plan."""
