# SPDX-License-Identifier: Apache-2.0
"""What gather_selection_kv_cache refuses, rule by rule, and what a SoC adds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvcore
from oracle_rules_gather import used_entries
from selection_calls import OUTPUTS, call, data, refuse, run, zeros

# ---------------------------------------------------------------- refusals


#: A call of two requests, S = 2, top-k 4, blocks of two tokens.
TWO: dict[str, Any] = {"topk": 4, "batch": 2, "steps": 2, "block": 2, "ids": [[1, 2, 3]] * 4}
BROKEN: list[tuple[str, dict[str, Any], str, str]] = [
    ("one rope empty", {"full_k_rope": data(0)}, "full_k_rope", "together with selection_k_rope"),
    ("rope of no size", {"selection_k_rope": data(16, 2, 0)}, "selection_k_rope",
     "together with full_k_rope"),
    ("topk rank", {"selection_topk_indices": zeros(2, 4)}, "selection_topk_indices", r"\[B, S, 1"),
    ("head axis", {"selection_topk_indices": zeros(2, 2, 2, 4)}, "selection_topk_indices",
     "head axis of 1"),
    ("status shape", {"selection_kv_block_status": zeros(2, 2, 1, 4)}, "selection_kv_block_status",
     r"\[2, 2, 1, 5\]"),
    ("status of TND", {"selection_kv_block_status": zeros(4, 1, 5)}, "selection_kv_block_status",
     r"\[2, 2, 1, 5\]"),
    ("lengths rank", {"full_kv_actual_seq": zeros(2, 1)}, "full_kv_actual_seq", r"\[B\]"),
    ("lengths disagree", {"full_q_actual_seq": zeros(3)}, "full_q_actual_seq", r"\[2\]"),
    ("requests", {"full_kv_actual_seq": zeros(3), "full_q_actual_seq": zeros(3)},
     "selection_topk_indices", r"\[3, S, 1, topk\]"),
    ("rows of the table", {"selection_kv_block_table": zeros(3, 8)}, "selection_kv_block_table",
     "at least 4 rows"),
    ("rank of the table", {"selection_kv_block_table": zeros(8)}, "selection_kv_block_table",
     r"\[N, SMAX\]"),
    ("columns", {"selection_kv_block_table": zeros(4, 3)}, "selection_kv_block_table",
     "columns for 4 blocks of 2 tokens"),
    ("full table rows", {"full_kv_block_table": zeros(1, 3)}, "full_kv_block_table", "2 rows"),
    ("full table rank", {"full_kv_block_table": zeros(2)}, "full_kv_block_table", "FMAX"),
    ("cache rank", {"selection_kv_cache": data(16, 6)}, "selection_kv_cache", r"\[SB, sbs, K\]"),
    ("full cache rank", {"full_kv_cache": data(6, 16, 1, 3)}, "full_kv_cache", r"\[FB, fbs, K\]"),
    ("K", {"selection_kv_cache": data(16, 2, 4)}, "selection_kv_cache", "K = 3"),
    ("R", {"selection_k_rope": data(16, 2, 1)}, "selection_k_rope", r"\[16, 2, 2\]"),
    ("blocks of rope", {"selection_k_rope": data(15, 2, 2)}, "selection_k_rope", r"\[16, 2, 2\]"),
    ("blocks of full rope", {"full_k_rope": data(7, 16, 2)}, "full_k_rope", r"\[6, 16, 2\]"),
    ("rope rank", {"full_k_rope": data(6, 32)}, "full_k_rope", r"\[FB, fbs, R\]"),
    ("sbs", {"selection_topk_block_size": 4}, "selection_kv_cache", "whole multiple of 4"),
    ("fbs", {"selection_topk_block_size": 1, "full_kv_cache": data(6, 16, 3)}, "", ""),
    ("block zero", {"selection_topk_block_size": 0}, "selection_topk_block_size", "an int > 0"),
    ("block negative", {"selection_topk_block_size": -1}, "selection_topk_block_size", "int > 0"),
    ("block huge", {"selection_topk_block_size": 2**70}, "selection_topk_block_size", "int > 0"),
    ("block float", {"selection_topk_block_size": 2.0}, "selection_topk_block_size", "int > 0"),
    ("block bool", {"selection_topk_block_size": True}, "selection_topk_block_size", "int > 0"),
    ("block None", {"selection_topk_block_size": None}, "selection_topk_block_size", "int > 0"),
    ("cumulative", {"q_lens_cumulative": 1}, "q_lens_cumulative", "True or False"),
    ("stats", {"stats": []}, "stats", "a dict to fill"),
    ("index types", {"full_q_actual_seq": zeros(2, dtype="int64")}, "full_q_actual_seq",
     "dtype int32"),
    ("data types", {"full_kv_cache": np.zeros((6, 16, 3), np.float16)}, "selection_kv_cache",
     "dtype float16"),
    ("rope types", {"full_k_rope": np.zeros((6, 16, 2), np.int16)}, "full_k_rope", "dtype uint16"),
    ("q negative", {"full_q_actual_seq": np.array([1, -1], np.int32)}, "full_q_actual_seq",
     r"full_q_actual_seq\[1\]: expected a length >= 0, got -1"),
    ("q long", {"full_q_actual_seq": np.array([2, 4], np.int32)}, "full_q_actual_seq",
     r"full_q_actual_seq\[1\]: .*S = 2.*q_lens_cumulative=True"),
    ("totals decrease", {"q_lens_cumulative": True,
      "full_q_actual_seq": np.array([2, 1], np.int32)}, "full_q_actual_seq",
     r"full_q_actual_seq\[1\]: expected at least 2"),
    ("totals start below 0", {"q_lens_cumulative": True,
      "full_q_actual_seq": np.array([-1, 1], np.int32)}, "full_q_actual_seq", ">= 0, got -1"),
    ("totals rise by more than S", {"q_lens_cumulative": True,
      "full_q_actual_seq": np.array([1, 4], np.int32)}, "full_q_actual_seq", "S = 2"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "argument", "match"),
    [b[1:] for b in BROKEN if b[2]],
    ids=[b[0] for b in BROKEN if b[2]],
)
def test_refuses(changes: dict[str, Any], argument: str, match: str) -> None:
    a = call(**TWO)
    assert a["full_kv_cache"].shape == (6, 16, 3)
    assert a["selection_kv_cache"].shape == (16, 2, 3)
    refuse(a | changes, argument, match)


def test_full_blocks_of_another_multiple() -> None:
    a = call(**TWO) | {"full_kv_cache": data(6, 15, 3), "full_k_rope": data(6, 15, 2)}
    refuse(a, "full_kv_cache", "whole multiple of 2")


def test_rows_that_are_no_multiple_of_the_requests() -> None:
    a = call(**TWO)
    a["selection_topk_indices"] = zeros(3, 1, 4)
    a["selection_kv_block_status"] = zeros(3, 1, 5)
    refuse(a, "selection_topk_indices", "a whole multiple of B = 2")


def test_totals_are_lengths() -> None:
    for totals, lengths in (([1, 3], [1, 2]), ([0, 2], [0, 2]), ([2, 2], [2, 0])):
        a = call(**TWO) | {"full_q_actual_seq": np.array(totals, np.int32)}
        b = call(**TWO) | {"full_q_actual_seq": np.array(lengths, np.int32)}
        run(a | {"q_lens_cumulative": True})
        run(b)
        for name in OUTPUTS:
            np.testing.assert_array_equal(a[name], b[name])


def test_entries_matter_only_when_they_are_used() -> None:
    a = call(topk=6, ids=[[3, 1]], held=[[9, 8, 7, 1]])
    table, full_table = a["selection_kv_block_table"], a["full_kv_block_table"]
    used, full_used = used_entries(a)
    columns = {column for _, column in used}
    assert columns == {0, 1, 3}  # two places, and the one that 1 leaves
    for column in range(6):
        for bad in (-1, 6, 2**31 - 1, -(2**31)):
            b = {n: x.copy() if isinstance(x, np.ndarray) else x for n, x in a.items()}
            b["selection_kv_block_table"][0, column] = bad
            if column in columns:
                refuse(
                    b,
                    "selection_kv_block_table",
                    rf"\[0, {column}\]: expected 0 <= block < 6 .*got {bad}",
                )
            else:
                kvcore.gather_selection_kv_cache(**b)
    assert table.shape == (1, 6)
    for column in range(full_table.shape[1]):
        for bad in (-1, len(a["full_kv_cache"]), -(2**31)):
            b = {n: x.copy() if isinstance(x, np.ndarray) else x for n, x in a.items()}
            b["full_kv_block_table"][0, column] = bad
            if (0, column) in full_used:
                refuse(b, "full_kv_block_table", rf"\[0, {column}\]: .*got {bad}")
            else:
                kvcore.gather_selection_kv_cache(**b)


def test_one_block_for_two_rows_or_twice_in_one() -> None:
    a = call(topk=33, batch=2, ids=[[3, 1], [5, 6]])
    table = a["selection_kv_block_table"]
    table[1, 1] = table[0, 0]
    refuse(a, "selection_kv_block_table", rf"\[1\]: .*got block {table[0, 0]} of row 0 again")
    table[1, 1] = table[1, 0]
    refuse(a, "selection_kv_block_table", rf"\[1\]: .*got block {table[1, 0]} twice")
    table[:, 2:] = 0  # padding that nobody uses
    table[1, :2] = [1, 2]
    table[0, :2] = [0, 3]
    run(a)


def test_ids_beyond_the_full_table() -> None:
    a = call(topk=4, ids=[[3, 39]])
    a["full_kv_block_table"] = a["full_kv_block_table"][:, :4].copy()
    refuse(a, "full_kv_block_table", "expected more than 4 columns for id 39 of row 0, got 4")
    # held and final: its column is not needed
    a = call(topk=4, ids=[[3, 38]], held=[[3, 38]])
    a["full_kv_block_table"] = a["full_kv_block_table"][:, :4].copy()
    run(a)


def test_full_caches_of_no_tokens() -> None:
    a = call(topk=4, ids=[[3]])
    a |= {"full_kv_cache": data(5, 0, 3), "full_k_rope": None, "selection_k_rope": None}
    refuse(a, "full_kv_block_table", "columns for id 3")


def test_the_first_fault_is_the_one_of_the_first_row() -> None:
    a = call(topk=33, batch=4, ids=[[3]] * 4)
    a["full_kv_block_table"][1:] = -5
    for threads in (1, 2, 4):
        refuse(a | {"num_threads": threads}, "full_kv_block_table", r"\[1, 0\]")


def test_outputs_that_cannot_be_written() -> None:
    for name in OUTPUTS:
        a = call(**TWO)
        a[name].flags.writeable = False
        refuse(a, name, "a writable array")
    # an empty rope is none: it may be read-only
    empty = data(0)
    empty.flags.writeable = False
    run(call(**TWO) | {"selection_k_rope": empty, "full_k_rope": empty})


def test_overlap() -> None:
    a = call(**TWO)
    a["full_kv_cache"] = a["selection_kv_cache"].reshape(2, 16, 3)
    a["full_k_rope"] = data(2, 16, 2)
    refuse(a, "selection_kv_cache", "bytes shared with full_kv_cache")
    a = call(**TWO)
    slab = np.zeros(60, np.int32)
    a["selection_kv_block_status"] = slab[:20].reshape(2, 2, 1, 5)
    a["selection_topk_indices"] = slab[19:35].reshape(2, 2, 1, 4)
    refuse(a, "selection_kv_block_status", "bytes shared with selection_topk_indices")
    a = call(**TWO)
    a["selection_kv_cache"] = np.lib.stride_tricks.as_strided(data(99), (16, 2, 3), (6, 6, 2))
    refuse(a, "selection_kv_cache", "bytes of their own")
    # K and rope of one packed row share no byte
    a = call(**TWO)
    packed = data(16, 2, 5)
    a["selection_kv_cache"], a["selection_k_rope"] = packed[..., :3], packed[..., 3:]
    run(a)


def test_a_length_that_fits_no_int32() -> None:
    a = call(topk=2, index="int64", ids=[[0, 1]], sizes=(0, 0))
    block = 2**31
    a |= {
        "selection_topk_block_size": block,
        "selection_k_rope": None,
        "full_k_rope": None,
        "selection_kv_cache": np.zeros((2, block, 0), np.uint16),
        "full_kv_cache": np.zeros((2, 2 * block, 0), np.uint16),
        "selection_kv_block_table": np.array([[0, 1]]),
        "full_kv_block_table": np.array([[0, 1]]),
        "full_kv_actual_seq": np.array([2 * block]),
    }
    refuse(a, "full_kv_actual_seq", "a selection whose length fits int32")
    a["full_kv_actual_seq"][...] = block // 2
    assert kvcore.gather_selection_kv_cache(**a).tolist() == [block // 2]


def test_no_rows() -> None:
    a = call(batch=0, ids=[])
    a["selection_kv_block_table"] = zeros(3, 4)
    returned, stats = run(a)
    assert returned.tolist() == [0, 0, 0]
    assert stats["read"].shape == (0,)
    plan = kvcore.plan_gather_selection_kv_cache(**a)
    plan.run()
    assert plan.bytes_moved == 0
    assert plan.touched() == ((), ()) or plan.touched()[1] == ()
    # no rows a request: the lengths are checked all the same
    a = call(**TWO)
    a["selection_topk_indices"] = zeros(2, 0, 1, 4)
    a["selection_kv_block_status"] = zeros(2, 0, 1, 5)
    refuse(a, "full_q_actual_seq", "S = 0")


# ---------------------------------------------------------------- with a SoC


def soc_call(**more: Any) -> dict[str, Any]:
    """What the A3's document allows."""
    arguments = {"topk": 64, "ids": [[1, 5, 30]], "dtype": "float16"} | more
    return call(**arguments)


def test_documented_calls_pass() -> None:
    kvcore.gather_selection_kv_cache(**soc_call(), soc="A3")
    kvcore.gather_selection_kv_cache(**soc_call(topk=8, block=4, kv=160), soc="A3")
    a = soc_call(dtype="int8", sizes=(656, 0))
    kvcore.gather_selection_kv_cache(**a, soc="A3")
    a = soc_call(dtype="uint16") | {"dtype": "bfloat16"}
    kvcore.gather_selection_kv_cache(**a, soc="A3")


def test_only_a3_is_documented() -> None:
    refuse(soc_call(soc="950"), "soc", "'A3' or 'A2'")
    with pytest.warns(kvcore.KVPortabilityWarning, match="documented for A3 only"):
        kvcore.gather_selection_kv_cache(**soc_call(), soc="A2")


SOC_BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("dtype", {"dtype": "float32"}, "selection_kv_cache"),
    ("int8 with rope", {"dtype": "int8"}, "selection_k_rope"),
    ("indices", {"index": "int64"}, "selection_kv_block_table"),
    ("topk", {"topk": 2049}, "selection_topk_indices"),
    ("wide blocks", {"topk": 33, "block": 2, "kv": 80}, "selection_topk_block_size"),
    ("S", {"steps": 8, "ids": [[1]] * 8}, "selection_topk_indices"),
    ("R", {"sizes": (3, 65)}, "selection_k_rope"),
    ("K", {"sizes": (657, 2)}, "selection_kv_cache"),
]


@pytest.mark.parametrize(
    ("more", "argument"), [b[1:] for b in SOC_BROKEN], ids=[b[0] for b in SOC_BROKEN]
)
def test_documented_limits(more: dict[str, Any], argument: str) -> None:
    kvcore.gather_selection_kv_cache(**soc_call(**more))
    refuse(soc_call(**more) | {"soc": "A3"}, argument, "on A3")


def test_blocks_for_every_column_and_contiguous_arrays() -> None:
    a = soc_call()
    a["selection_kv_block_table"] = np.concatenate([a["selection_kv_block_table"]] * 2, axis=1)
    refuse(a | {"soc": "A3"}, "selection_kv_cache", r"at least 128 blocks \(rows \* SMAX\)")
    a = soc_call()
    a["full_kv_cache"] = np.concatenate([a["full_kv_cache"]] * 2, axis=2)[..., :3]
    refuse(a | {"soc": "A3"}, "full_kv_cache", "a contiguous array on A3")


def test_quirks_are_warnings() -> None:
    with pytest.warns(kvcore.KVPortabilityWarning, match="one row a request, got S = 2"):
        kvcore.gather_selection_kv_cache(**soc_call(topk=4, steps=2, ids=[[1]] * 2), soc="A3")
    wide = soc_call(topk=4, block=64, kv=640, sizes=(512, 64))
    kvcore.gather_selection_kv_cache(**wide, soc="A3")
    wide = soc_call(topk=4, block=128, kv=1280, sizes=(512, 64), ids=[[1]])
    with pytest.warns(kvcore.KVPortabilityWarning, match="a row's buffers take 295040 bytes"):
        kvcore.gather_selection_kv_cache(**wide, soc="A3")
