# SPDX-License-Identifier: Apache-2.0
"""gather_selection_kv_cache: each rule by example, odd status, sizes the oracle does not reach.

Generated calls against the oracle are in test_against_oracle.py, refusals in
test_gather_selection_refusals.py, long serving loops in test_selection_steps.py.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcore
import oracle
from oracle_numbers import Array
from selection_calls import OUTPUTS, call, counts, held_tokens, refuse, run, status_of

# ---------------------------------------------------------------- the rules, one by one


def test_a_first_step_reads_everything_in_order() -> None:
    a = call(topk=33, ids=[[7, 3, 11]])
    returned, stats = run(a)
    assert returned.tolist() == [3]
    assert status_of(a)[:4] == [7, 3, 11, -1]
    assert status_of(a)[-1] == 3
    assert counts(stats) == (0, 0, 0, 3)
    assert stats["bytes_read"].tolist() == [3 * (3 + 2) * 2]


def test_what_is_held_stays_and_the_rest_takes_free_places_in_order() -> None:
    # 5 and 9 stay; 1 is held behind the count and moves; 2, 4 are read
    a = call(topk=33, ids=[[4, 9, 1, 5, 2]], held=[[6, 5, 8, 9, 7, 1]])
    _, stats = run(a)
    assert status_of(a)[:6] == [4, 5, 1, 9, 2, -1]
    assert counts(stats) == (2, 1, 0, 2)
    assert stats["bytes_moved"].tolist() == [10]


def test_the_largest_goes_last_when_few_ids_are_wanted() -> None:
    a = call(topk=4, ids=[[9, 1, 5]])
    _, stats = run(a)
    assert status_of(a) == [5, 1, 9, -1, 3]
    assert stats["swapped"].tolist() == [1]
    a = call(topk=4, ids=[[1, 5, 9]])
    _, stats = run(a)
    assert stats["swapped"].tolist() == [0]


@pytest.mark.parametrize(
    ("held", "wanted", "after", "kinds"),
    [
        # both stay: they change places
        ([9, 1, 5], [1, 5, 9], [5, 1, 9], (3, 0, 0, 0)),
        # the largest stays, an id that is read takes its place
        ([9, 1], [9, 1, 4], [4, 1, 9], (2, 0, 0, 1)),
        # the largest stays, an id that moves takes its place
        ([9, 1, 7, 4], [9, 1, 4], [4, 1, 9], (2, 1, 0, 0)),
        # the largest is read, what stays at the end takes its place
        ([7, 1, 4], [1, 4, 9], [4, 1, 9], (2, 0, 0, 1)),
        # the largest moves from behind, what stays at the end takes its place
        ([7, 1, 4, 9], [1, 4, 9], [4, 1, 9], (2, 1, 0, 0)),
        # neither stays: each is brought to where it belongs
        ([7, 8, 6, 9], [9, 2], [2, 9], (0, 1, 0, 1)),
        # the largest moves from behind onto a place that another left
        ([5, 7, 8, 9], [9, 5], [5, 9], (1, 1, 0, 0)),
        # held and rewritten: both are read again, in each other's place
        ([39, 38], [39, 38], [38, 39], (0, 0, 2, 0)),
        # the largest is read again where the other stays
        ([39, 2], [39, 2], [2, 39], (1, 0, 1, 0)),
    ],
)
@pytest.mark.parametrize("block", [1, 3])
def test_every_kind_of_swap(
    held: list[int], wanted: list[int], after: list[int], kinds: tuple[int, ...], block: int
) -> None:
    # with all S rows of drafts the newest tokens reach into the last two blocks
    steps = 2 * block if kinds[2] else 1
    rows = {"ids": [wanted] * steps, "held": [held] * steps}
    a = call(topk=4, block=block, kv=40 * block, q=steps, steps=steps, **rows)
    _, stats = run(a)
    row = len(stats["read"]) - 1
    assert status_of(a, row)[: len(after)] == after
    assert counts(stats, row) == tuple(n * block for n in kinds)


def test_a_chain_of_moves_and_a_swap_loses_nothing() -> None:
    # every held block leaves its place, the largest among them
    rng = np.random.default_rng(0)
    for topk in (8, 20, 33, 64):
        for _ in range(40):
            held = rng.permutation(200)[:topk]
            n = int(rng.integers(1, topk + 1))
            wanted = rng.permutation(np.concatenate([held, rng.integers(0, 250, 4)]))[:n]
            block = int(rng.choice([1, 2])) if topk != 33 else 1
            run(call(topk=topk, ids=[wanted], held=[held], kv=300 * block, block=block, pages=2))


def test_ids_that_count_for_nothing() -> None:
    a = call(topk=40, ids=[[-1, 5, 40, 5, 2**31 - 1, -(2**31), 39, 5, 3, 39]])
    returned, _ = run(a)
    assert returned.tolist() == [3]
    assert status_of(a)[:4] == [5, 39, 3, -1]


def test_only_the_last_block_is_partial_and_only_its_tokens_are_read() -> None:
    a = call(topk=3, block=4, kv=18, ids=[[4, 0]])  # block 4 holds tokens 16 and 17
    returned, stats = run(a)
    assert returned.tolist() == [6]
    assert status_of(a) == [0, 4, -1, 6]
    assert counts(stats) == (0, 0, 0, 6)
    spare = a["selection_kv_cache"][a["selection_kv_block_table"][0, 1], 2:]
    assert (spare == 0xEEEE).all()


def test_a_row_sees_its_own_tokens() -> None:
    # three drafts: row 0 ends at token 37, row 1 at 38, row 2 at 39; ids are the newest three
    a = call(topk=33, steps=3, q=3, ids=[[37, 38, 39]] * 3)
    returned, _ = run(a)
    assert returned.tolist() == [1, 2, 3]
    # fewer drafts than rows: the rows behind see everything
    a = call(topk=33, steps=3, q=2, ids=[[38, 39]] * 3)
    assert run(a)[0].tolist() == [1, 2, 2]


def test_rewritten_blocks_are_read_again() -> None:
    # q = 2: tokens 38 and 39 are new; block 19 of two tokens holds them, 18 does not
    a = call(topk=4, steps=2, block=2, q=2, ids=[[18, 19]] * 2, held=[[18, 19]] * 2)
    a["selection_kv_cache"][...] = 0
    _, stats = run(a)
    assert counts(stats, 1) == (2, 0, 2, 0)
    # one more new token reaches into block 18
    a = call(topk=4, steps=3, block=2, q=3, ids=[[18, 19]] * 3, held=[[18, 19]] * 3)
    _, stats = run(a)
    assert counts(stats, 2) == (0, 0, 4, 0)


def test_a_request_without_query_tokens_holds_its_last_block() -> None:
    a = call(topk=4, block=2, q=0, ids=[[19, 3]], held=[[3, 19]])
    _, stats = run(a)
    assert counts(stats) == (4, 0, 0, 0)


@pytest.mark.parametrize("kv", [0, -5, 1])
def test_a_row_of_no_length_is_emptied(kv: int) -> None:
    a = call(topk=3, steps=2, q=2, kv=kv, ids=[[0]] * 2, held=[[1, 0]] * 2)
    returned, _ = run(a)
    assert status_of(a, 0) == [-1, -1, -1, 0]
    assert returned.tolist() == [0, 1 if kv == 1 else 0]


def test_nothing_wanted() -> None:
    a = call(topk=3, ids=[[-1, -1]], held=[[4, 5]])
    assert run(a)[0].tolist() == [0]
    assert status_of(a) == [-1, -1, -1, 0]
    a = call(topk=0, ids=[[]])
    a |= {"selection_k_rope": None, "full_k_rope": None}
    a["selection_kv_block_status"][...] = 7
    assert kvcore.gather_selection_kv_cache(**a).tolist() == [0]
    assert status_of(a) == [0]


# ---------------------------------------------------------------- what status may say

ODD_STATUS = [
    ("negative entries", [-7, 5, -1, 9], 4),
    ("past the end", [5, 400, 2**31 - 1, 9], 4),
    ("repeated", [5, 5, 9, 9], 4),
    ("three times", [5, 5, 5, 9], 4),
    ("length negative", [5, 9, 2, 3], -4),
    ("length of int32's least", [5, 9, 2, 3], -(2**31)),
    ("length too large", [5, 9, 2, 3], 2**31 - 1),
    ("length short", [5, 9, 2, 3], 1),
]


@pytest.mark.parametrize("topk", [4, 33])
@pytest.mark.parametrize(
    ("entries", "length"), [s[1:] for s in ODD_STATUS], ids=[s[0] for s in ODD_STATUS]
)
def test_odd_status_gives_right_bytes(entries: list[int], length: int, topk: int) -> None:
    held = [e if 0 <= e < 40 else 0 for e in entries]
    a = call(topk=topk, ids=[[5, 9, 1, 2]], held=[held])
    a["selection_kv_block_status"][0, 0, 0, :4] = entries
    a["selection_kv_block_status"][0, 0, 0, topk] = length
    run(a)
    tokens = held_tokens(a, 0)
    assert len(tokens) == 8
    for here, full in tokens:
        np.testing.assert_array_equal(here, full)


def test_a_false_status_harms_its_own_row_only() -> None:
    ids = [[5, 9, 1], [5, 9, 1], [2, 3, 4]]
    held = [[5, 9, 8], [6, 7, 8], [2, 3, 4]]
    a = call(topk=33, batch=3, ids=ids, held=held)
    a["selection_kv_block_status"][1, 0, 0, :3] = [9, 1, 5]  # it holds 6, 7, 8
    run(a)
    for row in (0, 2):
        for here, full in held_tokens(a, row):
            np.testing.assert_array_equal(here, full)
    assert any((here != full).any() for here, full in held_tokens(a, 1))


def test_poisoned_copies_of_held_blocks_are_not_read() -> None:
    ids = [[5, 9, 1, 30]]
    a = call(topk=33, ids=ids)
    run(a)
    kept = {n: a[n].copy() for n in OUTPUTS[:2]}
    a["full_kv_cache"][...] = 0xDEAD
    a["full_k_rope"][...] = 0xDEAD
    a["selection_topk_indices"][0, 0, 0, :4] = [9, 30, 1, 5]
    plan = kvcore.plan_gather_selection_kv_cache(**a)
    plan.run()
    for name, was in kept.items():
        np.testing.assert_array_equal(a[name], was)
    assert plan.bytes_moved == 0
    assert plan.num_descriptors == 0
    assert "full_kv_cache" not in {x.argument for x in plan.touched()[0]}


def test_exactly_the_missing_tokens_are_read() -> None:
    rng = np.random.default_rng(3)
    for topk, block in ((33, 1), (6, 4), (40, 2)):
        held = rng.permutation(80)[:topk]
        wanted = rng.permutation(np.concatenate([held[: topk // 2], np.arange(80, 100)]))[:topk]
        a = call(topk=topk, block=block, kv=100 * block - 1, ids=[wanted], held=[held], pages=2)
        stats: dict[str, Array] = {}
        plan = kvcore.plan_gather_selection_kv_cache(**a, stats=stats)
        twin = {n: x.copy() if isinstance(x, np.ndarray) else x for n, x in a.items()}
        plan.run()
        reads = {x.argument: x for x in plan.touched()[0]}
        read = sum(reads[n].nbytes for n in ("full_kv_cache", "full_k_rope"))
        assert read == stats["bytes_read"].sum() > 0
        # whatever lies outside of those ranges, the result is the same
        for name in ("full_kv_cache", "full_k_rope"):
            flat = twin[name].reshape(-1).view(np.uint8)
            outside = np.ones(flat.shape, bool)
            for start, end in reads[name].ranges - a[name].ctypes.data:
                outside[start:end] = False
            flat[outside] ^= 0x5A
        kvcore.gather_selection_kv_cache(**twin)
        for name in OUTPUTS:
            np.testing.assert_array_equal(twin[name], a[name])


# ---------------------------------------------------------------- sizes the oracle is slow for


def test_more_ids_than_sixteen_bits_count() -> None:
    topk, tokens = 70000, 90000
    rng = np.random.default_rng(4)
    for index in ("int32", "int64"):
        full = rng.integers(0, 255, (tokens // 1000, 1000, 1), np.uint8)
        cache = np.zeros((70, 1000, 1), np.uint8)
        status = np.full((1, 1, topk + 1), -1, index)
        table, full_table = (np.arange(n, dtype=index)[None] for n in (70, 90))
        lengths, new = np.array([tokens], index), np.array([1], index)
        for step in range(3):
            ids = rng.permutation(tokens)[:topk].astype(index)[None, None]
            stats: dict[str, Array] = {}
            returned = kvcore.gather_selection_kv_cache(
                None, cache, table, status, ids, None, full, full_table, lengths, new,
                selection_topk_block_size=1, stats=stats,
            )  # fmt: skip
            assert returned.tolist() == [topk]
            held = status[0, 0, :topk]
            assert np.array_equal(np.sort(held), np.sort(ids[0, 0]))
            np.testing.assert_array_equal(cache.reshape(-1), full.reshape(-1)[held])
            assert stats["reused"][0] > 0 or step == 0


def test_ids_past_32_bits_stay_when_held() -> None:
    base = 2**40
    a = call(topk=33, index="int64")
    a["full_kv_actual_seq"][...] = base + 100
    a["selection_topk_indices"][0, 0, 0, :3] = [base + 1, base + 7, base]
    a["selection_kv_block_status"][0, 0, 0, :3] = [base, base + 1, base + 7]
    a["selection_kv_block_status"][0, 0, 0, 33] = 3
    before = a["selection_kv_cache"].copy()
    assert kvcore.gather_selection_kv_cache(**a).tolist() == [3]
    assert status_of(a)[:3] == [base, base + 1, base + 7]
    np.testing.assert_array_equal(a["selection_kv_cache"], before)
    a["selection_topk_indices"][0, 0, 0, 3] = base + 2
    refuse(a, "full_kv_block_table", f"for id {base + 2} of row 0")


def test_a_cache_of_many_more_blocks_than_are_used() -> None:
    # so many that repeated entries are found in a hash table instead of a bitmap
    a = call(topk=5, ids=[[3, 1, 4, 9, 8]])
    for name in OUTPUTS[:2]:
        a[name] = np.zeros((3_000_000, 1, a[name].shape[2]), np.uint16)
    a["selection_kv_block_table"][0] = [2_999_999, 5, 1_234_567, 8, 0]
    run(a)
    a["selection_kv_block_table"][0, 3] = 2_999_999
    refuse(a, "selection_kv_block_table", "got block 2999999 twice")


def test_threads_do_not_matter() -> None:
    rng = np.random.default_rng(6)
    rows, topk = 23, 300
    held = [rng.permutation(900)[:topk] for _ in range(rows)]
    wanted = [rng.permutation(1000)[:topk] for _ in range(rows)]
    results = []
    for threads in (1, 2, 3, 7, 64):
        a = call(topk=topk, batch=rows, ids=wanted, held=held, kv=1000, pages=4)
        stats: dict[str, Array] = {}
        returned = kvcore.gather_selection_kv_cache(**a, stats=stats, num_threads=threads)
        everything = [returned, *(a[n] for n in OUTPUTS), *stats.values()]
        results.append([x.tobytes() for x in everything])
    assert all(r == results[0] for r in results)


def test_many_plans_at_once() -> None:
    calls = [call(topk=64, ids=[np.arange(k, k + 60)], kv=200) for k in range(8)]
    wanted = [oracle.run("gather_selection_kv_cache", a) for a in calls]
    plans = [kvcore.plan_gather_selection_kv_cache(**a, num_threads=2) for a in calls]
    workers = [threading.Thread(target=plan.run) for plan in plans]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for a, want in zip(calls, wanted, strict=True):
        np.testing.assert_array_equal(a["selection_kv_cache"], want.outputs["selection_kv_cache"])


def test_a_memory_map_that_cannot_be_written(tmp_path: Path) -> None:
    a = call(topk=6, block=2, ids=[[3, 1, 19]], kv=40)
    for name in ("full_kv_cache", "full_k_rope"):
        path = tmp_path / name
        a[name].tofile(path)
        mapped = np.memmap(path, a[name].dtype, "r", shape=a[name].shape)
        assert not mapped.flags.writeable
        a[name] = mapped
    run(a)


def test_a_sparse_file_larger_than_memory(tmp_path: Path) -> None:
    pages, page, size = 1 << 20, 1 << 12, 576  # 2.2 TiB
    path = tmp_path / "full"
    try:
        with path.open("wb") as file:
            file.truncate(pages * page * size)
    except OSError as error:
        pytest.skip(f"no sparse file of 2 TiB here: {error}")
    last = pages * page - 1
    ids = np.array([[[last, 5, page * 77 + 3]]], np.int64)
    with path.open("r+b") as file:
        for i, token in enumerate(ids.reshape(-1).tolist()):
            file.seek(token * size)
            file.write(bytes([i + 1]) * size)
    try:
        full = np.memmap(path, np.uint8, "r", shape=(pages, page, size))
    except OSError as error:
        pytest.skip(f"no map of 2 TiB here: {error}")
    cache = np.zeros((1, 4, size), np.uint8)
    status = np.full((1, 1, 4), -1)
    returned = kvcore.gather_selection_kv_cache(
        None, cache, np.zeros((1, 1), int), status, ids, None, full, np.arange(pages)[None],
        np.array([pages * page]), np.array([1]), selection_topk_block_size=1,
    )  # fmt: skip
    assert returned.tolist() == [3]
    assert status.tolist() == [[[page * 77 + 3, 5, last, 3]]]
    assert cache[0, :3, 0].tolist() == [3, 2, 1]


# ---------------------------------------------------------------- plans


def test_plan_reports() -> None:
    a = call(topk=33, ids=[[5, 9, 1]], held=[[5, 8, 7, 9]])
    plan = kvcore.plan_gather_selection_kv_cache(**a)
    token = (3 + 2) * 2
    assert plan.bytes_moved == 33 * token
    assert plan.num_descriptors == 0
    assert plan.workspace_size > 0
    assert {x.argument for x in plan.writes} == set(OUTPUTS)
    before = {n: a[n].copy() for n in OUTPUTS}
    first = plan.run()
    # 5 stays, 9 moves, 1 is read: two tokens of two lanes
    assert plan.bytes_moved == 2 * token
    assert plan.num_descriptors == 4
    reads, writes = plan.touched()
    ranges = {x.argument: x for x in writes}
    for name in OUTPUTS:
        changed = np.flatnonzero(
            a[name].reshape(-1).view(np.uint8) != before[name].reshape(-1).view(np.uint8)
        )
        covered = np.zeros(a[name].nbytes, bool)
        for start, end in ranges[name].ranges - a[name].ctypes.data:
            covered[start:end] = True
        assert covered[changed].all()
        if name != "selection_kv_block_status":
            assert covered.sum() == 2 * a[name].shape[2] * 2
    by_name = {x.argument: x for x in reads}
    assert by_name["selection_kv_cache"].nbytes == 3 * 2  # the one that moved
    assert by_name["full_kv_cache"].nbytes == 3 * 2
    assert by_name["full_k_rope"].nbytes == 2 * 2
    second = plan.run()
    assert second is not first
    assert second.tolist() == first.tolist()
    assert plan.bytes_moved == 0


def test_touched_covers_swaps() -> None:
    for held, wanted, moved in (([9, 1, 5], [1, 5, 9], 2), ([9, 1], [9, 1, 4], 2)):
        a = call(topk=4, ids=[wanted], held=[held], block=2, kv=80)
        plan = kvcore.plan_gather_selection_kv_cache(**a)
        before = a["selection_kv_cache"].copy()
        plan.run()
        writes = {x.argument: x for x in plan.touched()[1]}
        assert writes["selection_kv_cache"].nbytes == moved * 2 * 3 * 2
        flat = a["selection_kv_cache"].reshape(-1).view(np.uint8)
        outside = np.ones(flat.shape, bool)
        for start, end in writes["selection_kv_cache"].ranges - a["selection_kv_cache"].ctypes.data:
            outside[start:end] = False
        assert (flat[outside] == before.reshape(-1).view(np.uint8)[outside]).all()
        assert plan.bytes_moved == moved * 2 * (3 + 2) * 2


def test_stats_are_filled_anew_and_only_on_success() -> None:
    stats: dict[str, Any] = {"mine": 1}
    a = call(topk=33, ids=[[5, 9]])
    plan = kvcore.plan_gather_selection_kv_cache(**a, stats=stats)
    plan.run()
    first = stats["read"]
    assert first.tolist() == [2]
    assert stats["mine"] == 1
    plan.run()
    assert first.tolist() == [2]
    assert stats["read"].tolist() == [0]
    assert stats["reused"].tolist() == [2]
    a["full_q_actual_seq"][...] = 9
    with pytest.raises(kvcore.ParamInvalidError):
        plan.run()
    assert stats["reused"].tolist() == [2]


def test_check_values_moves_nothing() -> None:
    a = call(topk=33, ids=[[5, 9]])
    before = {n: a[n].copy() for n in OUTPUTS}
    plan = kvcore.plan_gather_selection_kv_cache(**a)
    plan.check_values()
    for name, was in before.items():
        np.testing.assert_array_equal(a[name], was)
    a["full_kv_block_table"][...] = -1
    with pytest.raises(kvcore.ParamInvalidError):
        plan.check_values()


# ---------------------------------------------------------------- how ids and places are kept


@pytest.mark.parametrize("topk", [65533, 65534, 65535])
@pytest.mark.parametrize("length", [100_000, 2**40])
def test_places_and_ids_of_every_width(topk: int, length: int) -> None:
    """Places take two or four bytes from a top-k of 65,534 on, ids four or eight by the length."""
    rng = np.random.default_rng(topk)
    tokens, page = 100_000, 50
    full = rng.integers(0, 60_000, (tokens // page, page, 1)).astype(np.uint16)
    here = np.zeros((topk // page + 1, page, 1), np.uint16)
    table = rng.permutation(len(here)).reshape(1, -1)
    full_table = rng.permutation(len(full)).reshape(1, -1)
    status = np.full((1, 1, 1, topk + 1), -1)
    status[..., -1] = 0
    for number in range(3):
        ids = rng.permutation(tokens)[:topk]
        if number == 1:
            ids[:100] = ids[200:300]  # repeats: places past the count hold movers
        stats: dict[str, Any] = {}
        kvcore.gather_selection_kv_cache(
            None, here, table, status, ids.reshape(1, 1, 1, -1), None, full, full_table,
            np.array([length]), np.array([1]), selection_topk_block_size=1, stats=stats,
        )  # fmt: skip
        books = status[0, 0, 0]
        held = books[: books[-1]]
        assert sorted(held) == sorted(set(ids))
        assert (books[len(held) : -1] == -1).all()
        mine = here[table[0]].reshape(-1)[: len(held)]
        np.testing.assert_array_equal(mine, full[full_table[0]].reshape(-1)[held])
    assert stats["reused"][0] > 0
    assert stats["moved"][0] == 0 < stats["read"][0]


@pytest.mark.parametrize(("rows", "blocks"), [(2, 100), (2, 300_000), (1500, 300_000)])
def test_one_block_for_two_rows_is_found_among_few_and_many(rows: int, blocks: int) -> None:
    """Entries are compared by bits, by a table, and by bits over a part of the blocks at a time."""
    table = np.arange(blocks - rows, blocks).reshape(rows, 1)
    arrays: tuple[Any, ...] = (
        None, np.zeros((blocks, 1, 1), np.uint8), table, np.full((rows, 1, 1, 2), -1),
        np.zeros((rows, 1, 1, 1), np.int64), None, np.ones((1, 1, 1), np.uint8),
        np.zeros((rows, 1), np.int64), np.ones(rows, np.int64), np.zeros(rows, np.int64),
    )  # fmt: skip
    lengths = kvcore.gather_selection_kv_cache(*arrays, selection_topk_block_size=1)
    assert lengths.tolist() == [1] * rows
    assert arrays[1].sum() == rows
    table[-1] = table[0]
    with pytest.raises(kvcore.ParamInvalidError, match=rf"\[{rows - 1}\].*of row 0 again"):
        kvcore.gather_selection_kv_cache(*arrays, selection_topk_block_size=1)
