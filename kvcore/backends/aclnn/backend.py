# SPDX-License-Identifier: Apache-2.0
"""What the registry knows of the NPU: a name, until a call needs more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcore._core.plan import Plan

__all__ = ["AclnnBackend"]


class AclnnBackend:
    """Runs plans on an Ascend NPU; usable where CANN, a driver and a known SoC are."""

    name = "aclnn"
    spaces = frozenset({"device"})

    def why_not(self, plan: Plan | None = None) -> str | None:
        """Why it cannot run here, or this plan; None when it can."""
        from kvcore.backends.aclnn import library

        return library.why_not()

    def prepare(self, plan: Plan) -> Callable[[], Any]:
        """What plan.run() calls."""
        raise NotImplementedError
