# SPDX-License-Identifier: Apache-2.0
"""What was asked of an operator, for what makes its own of it: records, other backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from kvcore._core.plan import Operator

__all__ = ["Request"]


class Request(NamedTuple):
    """One call's arguments.

    arrays: one an argument of the operator, None for those not given.  params: what the operator
    made of the other arguments.  extra: where it puts what the call asked for besides, or None.
    """

    operator: Operator
    arrays: tuple[Any, ...]
    params: tuple[Any, ...]
    extra: Any

    def named(self) -> dict[str, Any]:
        """The arrays that were given, by argument."""
        names = self.operator.arguments
        pairs = zip(names, self.arrays, strict=True)
        return {name: array for name, array in pairs if array is not None}
