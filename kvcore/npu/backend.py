# SPDX-License-Identifier: Apache-2.0
"""The backend "aclnn" as the registry holds it; everything else is loaded when a call needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcore._core.plan import Plan
from kvcore.npu.index_arguments import INDEX_ARGUMENTS

__all__ = ["AclnnBackend"]


class AclnnBackend:
    """Runs plans on an Ascend NPU; usable where CANN, a driver and a known SoC are.

    A run queues the operator on a stream and returns: on torch_npu's current stream for its
    tensors, on the buffer's for the runtime's.
    """

    name = "aclnn"
    spaces: frozenset[str] = frozenset({"device"})

    #: Arguments that may lie on the host while others are on the device.
    uploads = INDEX_ARGUMENTS

    @property
    def fallback(self) -> str | None:
        """The backend that serves host arrays where CANN is not usable, if the options name one."""
        from kvcore.npu import options

        return options.fallback()

    def why_not(self, plan: Plan | None = None) -> str | None:
        """Why no plan, or not this plan, can run on this machine; None when it can."""
        from kvcore.npu.cann import library

        proven = library.proven()
        if proven is not None and plan is not None:
            form = plan.spec.form
            if form is not None and form.cann is proven:
                return None  # found before, for a call with such arguments
        if proven is None:
            reason = library.why_not()
            if reason is not None:
                return reason
        if plan is None:
            return None
        from kvcore.npu.call.launch import CALLS

        call = CALLS.get(plan.operator.name)
        if call is None:
            return f"it has no {plan.operator.name}"
        cann = library.current()
        if not cann.has(call.function):
            return f"{call.function} is not in this CANN, nor in a custom operator package"
        return None

    def prepare(self, plan: Plan) -> Callable[[], Any]:
        """Return the function that plan.run() calls."""
        from kvcore.npu.call.launch import prepare

        return prepare(plan)

    def details(self) -> dict[str, Any]:
        """The libraries that were looked for, where, and what was found, for a bug report."""
        from kvcore.npu.cann.report import details

        return details()
