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

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import kvcore
import kvcore.errors
import oracle
from memory import Arena
from oracle_numbers import Array
from oracle_rules import Violation, share_bytes

Call = Callable[..., Any]

#: The stats an operator must get right; ``swapped`` and the bytes follow from how it swaps.
COUNTED = ("reused", "moved", "refreshed", "read")


@dataclass
class Case:
    """A call: public keyword arguments, and the arena that holds their arrays.

    note: how it was drawn, for a failing example's report.
    """

    operator: str
    arguments: dict[str, Any]
    arena: Arena = field(repr=False)
    note: str = ""

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
        function: Call = getattr(kvcore, self.operator)
        return function


@dataclass
class IllegalCase:
    """A case with one rule broken on purpose.

    blamed: arguments the error may name.
    errors: names of the classes in kvcore.errors that are right.
    broken: what was done, in words.
    """

    case: Case
    blamed: tuple[str, ...]
    errors: tuple[str, ...]
    broken: str


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
    classes = tuple(getattr(kvcore.errors, name) for name in illegal.errors)
    caught: kvcore.errors.KVCoreError | None = None
    try:
        (call or case.public())(**case.arguments)
    except kvcore.errors.KVCoreError as error:
        caught = error
    assert caught is not None, f"{illegal.broken}: not refused"
    # the most exact class: a SlotRangeError is a ParamInvalidError too
    seen = f"{illegal.broken}: {type(caught).__name__}({caught})"
    assert type(caught) in classes, f"{seen}: expected one of {illegal.errors}"
    assert caught.argument in illegal.blamed, (
        f"{seen} blames {caught.argument!r}: expected one of {illegal.blamed}"
    )
    case.arena.assert_untouched(before)
    for name, array in case.arrays().items():
        assert array.tobytes() == others[name], f"{name} was written"
    return caught


def blame(violations: list[Violation]) -> set[str]:
    """Every argument that some violation allows to be named."""
    return {name for violation in violations for name in violation.arguments}


def held_tokens(arguments: Mapping[str, Any], row: int) -> list[tuple[int, Array, Array]]:
    """What a selection row says it holds: (full token, its bits here, its bits in full).

    Judged from the arrays alone, after a call: the property the operator exists for.
    """
    a = arguments
    block = a["selection_topk_block_size"]
    topk = a["selection_topk_indices"].shape[-1]
    status = a["selection_kv_block_status"].reshape(-1, topk + 1)[row].tolist()
    batch = len(a["full_kv_actual_seq"])
    request = row // (int(np.prod(a["selection_topk_indices"].shape[:-1])) // batch)
    here, full = a["selection_kv_cache"], a["full_kv_cache"]
    found = []
    for token in range(status[topk]):
        source = status[token // block] * block + token % block
        block_here = a["selection_kv_block_table"][row, token // here.shape[1]]
        block_full = a["full_kv_block_table"][request, source // full.shape[1]]
        for name, other in (
            ("selection_kv_cache", "full_kv_cache"),
            ("selection_k_rope", "full_k_rope"),
        ):
            if a[name] is not None and a[name].size:
                found.append(
                    (
                        source,
                        oracle.bits(a[name])[block_here, token % here.shape[1]],
                        oracle.bits(a[other])[block_full, source % full.shape[1]],
                    )
                )
    return found


def overlapping(case: Case) -> list[tuple[str, str]]:
    """Pairs of argument arrays that share a byte."""
    arrays = [(n, a) for n, a in case.arrays().items() if a.size]
    return [
        (name, other)
        for i, (name, a) in enumerate(arrays)
        for other, b in arrays[i + 1 :]
        if share_bytes(a, b)
    ]
