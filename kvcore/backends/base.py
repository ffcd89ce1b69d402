# SPDX-License-Identifier: Apache-2.0
"""The contract of a backend: what runs the plans of operators.

A backend is registered by ``kvcore.backends.registry.register(name, backend)`` or by an entry
point of the group ``kvcore.backends``, and chosen by ``backend=``, ``use()`` or
``KVCORE_BACKEND``; ``backend=`` takes the object itself too.

What a backend is given
-----------------------
A ``Plan`` whose arguments are checked: shapes, dtypes, strides, modes and overlap.  A backend does
not check these again.  It reads from the plan:

``plan.operator.name``
    Which operator, as its function is named ("scatter_pa_kv_cache").
``plan.request.named()``
    The arrays as the caller gave them, by argument; those not given are left out.
``plan.spec.case``
    What the call amounts to: scenario, modes and sizes, a frozen object of the operator's own kind
    (``kvcore.ops.scatter_case.ScatterCase``, ...).
``plan.infos()``
    Dtype, shape, strides and memory of each array, None for one that is not given.

What it owes
------------
``prepare(plan)`` returns the function that each run of the plan calls; it may be called from any
thread, one run of a plan at a time.  It reads the contents of the arrays anew at each run and
checks what they say before the first byte is written: ``plan.check_values()`` does so on the host
and raises ``SlotRangeError`` or ``ParamInvalidError``.  It writes exactly the bytes that
docs/operators.md says, in place, and returns what the operator returns (None for a scatter).
Whatever ``prepare`` raises, the caller gets; ``why_not(plan)`` is the place to decline a plan, and
the caller gets a ``BackendUnavailableError`` with that reason.
"""

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
        """Why it cannot run (this plan, or at all); None when it can.  Must not raise."""

    def prepare(self, plan: Plan) -> Callable[[], Any]:
        """The function that plan.run() shall call; asked for once per plan."""
