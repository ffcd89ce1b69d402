# SPDX-License-Identifier: Apache-2.0
"""One call of an operator with the memory round it, and the two questions tests ask of it.

    @given(strategies.scatter_cases())
    def test_scatter(case):
        check_matches_oracle(case)

    @given(strategies.illegal_scatter_cases())
    def test_scatter_refuses(illegal):
        check_refused(illegal)

``call`` is what is tested: by default the public function of the case's operator.  Pass
``functools.partial(kvcore.scatter_pa_kv_cache, num_threads=3)``, or a function that makes a plan
and runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import kvcore
import kvcore.errors
import kvcore.layout
import oracle
from memory import Arena
from oracle_gather import empty, row_length
from oracle_numbers import Array
from oracle_rules import Violation
from oracle_update import LAYOUT_FUNCTIONS

Call = Callable[..., Any]

#: The stats an operator must get right; ``swapped`` and the bytes follow from how it swaps.
COUNTED = ("reused", "moved", "refreshed", "read")


def _show(value: Any) -> str:
    """Index arrays in full, data arrays by shape and place."""
    if not isinstance(value, np.ndarray):
        return repr(value)
    known = f"{value.dtype}{list(value.shape)} strides {list(value.strides)}"
    return f"{known} {value.tolist()}" if value.dtype.name in ("int32", "int64") else known


@dataclass(repr=False)
class Case:
    """A call: public keyword arguments, and the arena that holds their arrays.

    note: how it was drawn, for a failing example's report.
    """

    operator: str
    arguments: dict[str, Any]
    arena: Arena
    note: str = ""

    def __repr__(self) -> str:
        shown = "".join(f"\n    {n}={_show(v)}" for n, v in self.arguments.items())
        return f"{self.operator} ({self.note}){shown}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """For hypothesis, which would print every guard byte."""
        printer.text(repr(self))

    def arrays(self) -> dict[str, Array]:
        """The arguments that are numpy arrays."""
        return {n: a for n, a in self.arguments.items() if isinstance(a, np.ndarray)}

    def element(self, argument: str) -> str | None:
        """The keyword's word on a raw array's element type, or None."""
        keyword = "value_dtype" if argument.startswith("value") else "dtype"
        named: str | None = self.arguments.get(keyword)
        return named

    def public(self) -> Call:
        """The package's function for this operator."""
        home = kvcore.layout if self.operator in LAYOUT_FUNCTIONS else kvcore
        function: Call = getattr(home, self.operator)
        return function


@dataclass(repr=False)
class IllegalCase:
    """A case with one rule broken on purpose.

    blamed: arguments the error may name.
    errors: names of the classes in kvcore.errors that are right.
    broken: what was done, in words.
    by_the_rules: what the oracle finds wrong.
    """

    case: Case
    blamed: tuple[str, ...]
    errors: tuple[str, ...]
    broken: str
    by_the_rules: list[Violation] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"{self.broken}: blames {self.may_blame()}, raises {self.may_raise()}: {self.case}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    def may_blame(self) -> set[str]:
        """Arguments the error may name: those meant, and what else is at fault."""
        return {*self.blamed, *blame(self.by_the_rules)}

    def may_raise(self) -> set[str]:
        """Class names that are right."""
        return {*self.errors, *(v.error for v in self.by_the_rules)}


def check_matches_oracle(case: Case, call: Call | None = None, *, stats: bool = True) -> Any:
    """Run the call; every byte of every buffer must then be what the oracle says.

    Returns what the call returned.
    """
    want = oracle.run(case.operator, case.arguments)
    before = case.arena.snapshot()
    free_standing = {n: np.array(a) for n, a in case.arrays().items() if n not in case.arena.places}
    more: dict[str, Any] = {}
    if want.stats is not None and stats:
        more["stats"] = {}
    returned = (call or case.public())(**case.arguments, **more)
    check_returned(case, want, returned)
    case.arena.assert_written(
        before,
        {
            name: oracle.settle(want, name, case.arguments[name], case.element(name))
            for name in want.outputs
        },
    )
    for name, then in free_standing.items():
        assert case.arguments[name].tobytes() == then.tobytes(), f"{name} was written"
    if want.stats is not None and stats:
        for name in COUNTED:
            np.testing.assert_array_equal(more["stats"][name], want.stats[name], err_msg=name)
            assert np.asarray(more["stats"][name]).dtype == np.int64
    return returned


def check_returned(case: Case, want: oracle.Result, returned: Any) -> None:
    """The result is of the right kind and value."""
    if case.operator == "kv_cache_update":
        assert returned is case.arguments["past"]
    elif case.operator in LAYOUT_FUNCTIONS:
        assert want.returned is not None
        assert "out" not in case.arguments or returned is case.arguments["out"]
        assert returned.dtype == want.returned.dtype
        np.testing.assert_array_equal(oracle.bits(returned), oracle.bits(want.returned))
    elif case.operator == "gather_selection_kv_cache":
        assert want.returned is not None
        assert returned.dtype == np.int32
        np.testing.assert_array_equal(returned, want.returned)
    else:
        assert returned is None


def check_refused(illegal: IllegalCase, call: Call | None = None) -> kvcore.errors.KVCoreError:
    """The call raises a right error that names a right argument, and writes nothing.

    Returns the error.
    """
    case = illegal.case
    before = case.arena.snapshot()
    others = {n: a.tobytes() for n, a in case.arrays().items()}
    caught: kvcore.errors.KVCoreError | None = None
    try:
        (call or case.public())(**case.arguments)
    except kvcore.errors.KVCoreError as error:
        caught = error
    assert caught is not None, f"{illegal.broken}: not refused"
    # the most exact class: a SlotRangeError is a ParamInvalidError too
    seen = f"{illegal.broken}: {type(caught).__name__}({caught})"
    assert type(caught).__name__ in illegal.may_raise(), f"{seen}: expected {illegal.may_raise()}"
    assert caught.argument in illegal.may_blame(), (
        f"{seen} blames {caught.argument!r}: expected one of {illegal.may_blame()}"
    )
    case.arena.assert_untouched(before)
    for name, array in case.arrays().items():
        assert array.tobytes() == others[name], f"{name} was written"
    return caught


def blame(violations: list[Violation]) -> set[str]:
    """Every argument that some violation allows to be named."""
    return {name for violation in violations for name in violation.arguments}


def check_rows_hold_their_tokens(case: Case) -> None:
    """After a gather_selection call of a true status: every row's tokens are those it lists.

    Judged from the arrays alone, however the operator placed them: the top-k ids that exist,
    each once, and under each the bytes of the full cache.
    """
    a = case.arguments
    block, topk = a["selection_topk_block_size"], a["selection_topk_indices"].shape[-1]
    statuses = np.array(a["selection_kv_block_status"]).reshape(-1, topk + 1).tolist()
    wanted = np.array(a["selection_topk_indices"]).reshape(-1, topk).tolist()
    steps = len(statuses) // len(a["full_kv_actual_seq"])
    pairs = [("selection_kv_cache", "full_kv_cache")]
    if not empty(a["selection_k_rope"]):
        pairs.append(("selection_k_rope", "full_k_rope"))
    for row, status in enumerate(statuses):
        b, s = divmod(row, steps)
        visible = row_length(int(a["full_kv_actual_seq"][b]), int(a["full_q_actual_seq"][b]), s)
        ids = [x for x in status[:topk] if x >= 0]
        assert sorted(ids) == sorted({x for x in wanted[row] if 0 <= x * block < visible})
        tokens = [x * block + j for x in ids for j in range(block) if x * block + j < visible]
        assert status[topk] == len(tokens)
        for place, token in enumerate(tokens):
            for here, full in pairs:
                at = _token(a[here], a["selection_kv_block_table"][row], place)
                of = _token(a[full], a["full_kv_block_table"][b], token)
                np.testing.assert_array_equal(at, of, err_msg=f"row {row}, token {token}")


def _token(cache: Array, table: Array, token: int) -> Array:
    block, row = divmod(token, cache.shape[1])
    found: Array = oracle.bits(cache)[int(table[block]), row]
    return found
