# SPDX-License-Identifier: Apache-2.0
"""GatherSelectionKvCache on A2 and A3: a warning where the kernels' result is another one."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import kvcore
import oracle
from kvcore.errors import KVPortabilityWarning
from oracle_numbers import Array

BOTH = pytest.mark.parametrize("soc", ["A2", "A3"])
KINDS = ("stops at the negative id", "sees no token", "takes S = ", "serves it as it is held")


def call(
    ids: list[list[int]],
    *,
    kv: tuple[int, ...] = (64,),
    q: tuple[int, ...] = (1,),
    block: int = 1,
    status: list[list[int]] | None = None,
) -> dict[str, Any]:
    """rows of a top-k each, a request a kv; 128 full tokens in blocks of 8 for each request."""
    rows, topk, batch = len(ids), len(ids[0]), len(kv)
    pages = -(-topk * block // 8)
    held = [[-1] * topk + [0]] * rows if status is None else status
    return {
        "selection_k_rope": None,
        "selection_kv_cache": np.zeros((rows * pages, 8, 16), np.float16),
        "selection_kv_block_table": np.arange(rows * pages, dtype=np.int32).reshape(rows, pages),
        "selection_kv_block_status": np.array(held, np.int32).reshape(batch, -1, 1, topk + 1),
        "selection_topk_indices": np.array(ids, np.int32).reshape(batch, -1, 1, topk),
        "full_k_rope": None,
        "full_kv_cache": np.random.default_rng(0).random((16 * batch, 8, 16)).astype(np.float16),
        "full_kv_block_table": np.arange(16 * batch, dtype=np.int32).reshape(batch, 16),
        "full_kv_actual_seq": np.array(kv, np.int32),
        "full_q_actual_seq": np.array(q, np.int32),
        "selection_topk_block_size": block,
    }


def warned(given: dict[str, Any], soc: str | None) -> list[str]:
    """The warnings about values; afterwards every output is what the oracle says."""
    want = oracle.run("gather_selection_kv_cache", given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        returned = kvcore.gather_selection_kv_cache(**given, soc=soc)
    np.testing.assert_array_equal(returned, want.returned)
    for name, expected in want.outputs.items():
        free = want.unspecified.get(name, np.zeros(expected.shape, bool))
        np.testing.assert_array_equal(
            np.where(free, 0, oracle.bits(given[name])), np.where(free, 0, oracle.bits(expected))
        )
    assert {one.category for one in caught} <= {KVPortabilityWarning}
    assert all(one.filename == __file__ for one in caught)
    texts = [str(one.message) for one in caught]
    return [text for text in texts if any(kind in text for kind in KINDS)]


# ---------------------------------------------------------------- a negative id
@BOTH
def test_the_kernel_stops_at_a_negative_id(soc: str) -> None:
    assert warned(call([[2, -1, 1, 0]]), soc) == [
        f"{soc}: selection_topk_indices: the kernel for a top-k up to 32 stops at the negative id "
        "at place 1 of row 0 and leaves out the 2 behind it"
    ]
    (text,) = warned(call([[0, 1, 2], [4, 5, 6], [-7, 3, -1]], kv=(64, 64, 64), q=(1, 1, 1)), soc)
    assert "at place 0 of row 2 and leaves out the 1 behind it" in text


@BOTH
@pytest.mark.parametrize(
    "ids",
    [
        [2, 1, 0, -1],  # at the end
        [2, 1, -1, -1],
        [-1, -1, -1, -1],
        [2, 1, -1, 2],  # only a repeat is behind it
        [2, 1, -1, 64],  # only an id past the end
        [2, 64, 1, 0],
        [3, 2, 1, 0],
    ],
)
def test_where_it_changes_nothing_it_says_nothing(soc: str, ids: list[int]) -> None:
    assert warned(call([ids]), soc) == []


def test_without_a_soc_nothing_is_said() -> None:
    assert warned(call([[2, -1, 1, 0]]), None) == []


@BOTH
def test_a_long_top_k_skips_negative_ids(soc: str) -> None:
    assert warned(call([[5, -1, *range(6, 37)]]), soc) == []
    assert len(warned(call([[5, -1, *range(6, 36)]]), soc)) == 1  # 32 ids


# ---------------------------------------------------------------- rows that see nothing
@BOTH
def test_a_row_without_tokens_is_emptied_here(soc: str) -> None:
    held = [[4, 5, -1, -1, 2]]
    assert warned(call([[0, 1, 2, 3]], kv=(0,), status=held), soc) == [
        f"{soc}: full_kv_actual_seq: row 0 sees no token, and the kernel leaves its selection and "
        "status as they were where they are emptied here"
    ]
    assert warned(call([[0, 1, 2, 3]], kv=(0,)), soc) == []  # it holds nothing
    assert warned(call([[0, 1, 2, 3]], kv=(4,), status=[[4, 5, -1, -1, 0]]), soc) == []


# ---------------------------------------------------------------- S for q
@BOTH
def test_a_long_top_k_takes_s_for_the_new_tokens(soc: str) -> None:
    ids = [[*range(64)], [*range(64)]]
    assert warned(call(ids, kv=(64,), q=(2,)), soc) == []
    assert warned(call(ids, kv=(64,), q=(1,)), soc) == [
        f"{soc}: full_q_actual_seq: the kernel for a top-k above 32 takes S = 2 for the number of "
        "new tokens, so that row 0 sees 63 tokens and not 64"
    ]
    ids = [[*range(63), -1], [*range(64)]]  # the token that it would not see is not wanted
    assert warned(call(ids, kv=(64,), q=(1,)), soc) == []
    assert warned(call([[0, 1, 2], [0, 1, 2]], kv=(3,), q=(1,)), soc) == []  # a short one


# ---------------------------------------------------------------- rewritten tokens
@BOTH
def test_a_held_block_with_new_tokens_is_read_again_here(soc: str) -> None:
    held = [[7, 6, 5, 4, 4]]
    assert warned(call([[4, 5, 6, 7]], kv=(8,), q=(1,), status=held), soc) == [
        f"{soc}: selection_kv_block_status: row 0 holds block 7, into which the newest tokens "
        "reach, and the kernel serves it as it is held where it is read again here"
    ]
    assert warned(call([[4, 5, 6, 7]], kv=(9,), q=(1,), status=held), soc) == []  # 7 is old
    assert warned(call([[4, 5, 6, 3]], kv=(8,), q=(1,), status=held), soc) == []  # not wanted
    held = [[7, 6, 7, 4, 4]]  # listed twice, it is not held
    assert warned(call([[4, 6, 0, 7]], kv=(8,), q=(1,), status=held), soc) == []
    held = [[6, 5, 4, 7, 3]]  # behind what is valid
    assert warned(call([[4, 5, 6, 7]], kv=(8,), q=(1,), status=held), soc) == []


@BOTH
def test_blocks_of_several_tokens(soc: str) -> None:
    held = [[0, 1, 8]]
    assert len(warned(call([[0, 1]], kv=(8,), q=(1,), block=4, status=held), soc)) == 1
    assert warned(call([[0, 1]], kv=(9,), q=(1,), block=4, status=held), soc) == []
    held = [[0, 1, 7]]  # a partial last place holds nothing
    assert warned(call([[0, 1]], kv=(8,), q=(1,), block=4, status=held), soc) == []


# ---------------------------------------------------------------- against loops
def expected_kinds(given: dict[str, Any]) -> set[str]:
    """What the vendor's kernels would do otherwise, id by id."""
    block = given["selection_topk_block_size"]
    ids, status = given["selection_topk_indices"], given["selection_kv_block_status"]
    batch, steps, _, topk = ids.shape
    found = set()
    for b in range(batch):
        kv, q = int(given["full_kv_actual_seq"][b]), int(given["full_q_actual_seq"][b])
        for s in range(steps):
            row, held = ids[b, s, 0].tolist(), status[b, s, 0].tolist()
            n = kv - (q - 1 - s) if s < q else kv

            def wanted(tokens: int, row: list[int] = row) -> list[int]:
                return [i for i in dict.fromkeys(row) if i >= 0 and i * block < tokens]

            if n <= 0:
                if held != [-1] * topk + [0]:
                    found.add(KINDS[1])
                continue
            if topk <= 32:
                first = next((i for i, x in enumerate(row) if x < 0), topk)
                if wanted(n, row[:first]) != wanted(n):
                    found.add(KINDS[0])
            elif wanted(kv - (steps - 1 - s)) != wanted(n):
                found.add(KINDS[2])
            places = held[: max(0, min(held[-1] // block, topk))]
            for one in places:
                if places.count(one) == 1 and one in wanted(n) and (one + 1) * block > kv - q:
                    found.add(KINDS[3])
    return found


@pytest.mark.parametrize("seed", range(60))
def test_against_loops(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch = int(rng.integers(1, 4))
    topk = int(rng.choice([1, 3, 6, 32, 40]))
    steps = int(rng.integers(1, 4))
    block = 1 if topk > 8 else int(rng.choice([1, 2, 4]))
    rows = batch * steps
    kv = rng.integers(0, 60, batch)
    ids: Array = rng.integers(-1 if rng.random() < 0.5 else 0, 64 // block, (rows, topk))
    ids.sort(axis=1)
    if rng.random() < 0.5:
        ids = ids[:, ::-1]
    status = np.full((rows, topk + 1), -1)
    status[:, -1] = 0
    if rng.random() < 0.7:
        status[:, :-1] = rng.integers(-1, 60 // block, (rows, topk))
        status[:, -1] = rng.integers(0, topk * block + 1, rows)
    given = call(
        ids.tolist(),
        kv=tuple(kv.tolist()),
        q=tuple(rng.integers(0, steps + 1, batch).tolist()),
        block=block,
        status=status.tolist(),
    )
    kinds = expected_kinds(given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kvcore.gather_selection_kv_cache(**given, soc="A3")
    texts = [str(one.message) for one in caught]
    assert {kind for kind in KINDS if any(kind in text for text in texts)} == kinds


# ---------------------------------------------------------------- how they are given
def test_a_warning_made_an_error_writes_nothing() -> None:
    given = call([[2, -1, 1, 0]])
    before = {n: a.copy() for n, a in given.items() if isinstance(a, np.ndarray)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KVPortabilityWarning, match="stops at the negative id"):
            kvcore.gather_selection_kv_cache(**given, soc="A3")
    for name, then in before.items():
        np.testing.assert_array_equal(given[name], then)


def test_running_totals_are_lengths_too() -> None:
    ids = [[*range(64)]] * 4
    given = call(ids, kv=(64, 64), q=(2, 3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kvcore.gather_selection_kv_cache(**given, q_lens_cumulative=True, soc="A3")
    (text,) = [str(one.message) for one in caught]
    assert "takes S = 2" in text
    assert "row 2 sees 63 tokens and not 64" in text
