# SPDX-License-Identifier: Apache-2.0
"""gather_pa_kv_cache against the oracle, its errors one by one, and what its plan reports."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvcore
from oracle_numbers import FLOAT4, Array

# ---------------------------------------------------------------- legal calls


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("mode", ["Norm", "PA_NZ", "NHSD"])
def test_many_tokens(mode: str, threads: int) -> None:
    rng = np.random.default_rng(5)
    nb, bs, heads, size, batch = 40, 16, 4, 64, 6
    shape = {
        "Norm": (nb, bs, heads, size),
        "NHSD": (nb, heads, bs, size),
        "PA_NZ": (nb, heads * size // 16, bs, 16),
    }[mode]
    cache = rng.integers(0, 2**16, shape, np.uint16).view(np.float16)
    lengths = rng.integers(0, 5 * bs, batch)
    tables = rng.integers(0, nb, (batch, 5))
    token = (heads * size,) if mode == "PA_NZ" else (heads, size)
    out = np.zeros((lengths.sum(), *token), np.float16)
    kvcore.gather_pa_kv_cache(
        cache, None, tables, lengths, out, None, cache_mode=mode, num_threads=threads
    )
    rows = {
        "Norm": lambda: cache.reshape(nb * bs, *token),
        "NHSD": lambda: cache.transpose(0, 2, 1, 3).reshape(nb * bs, *token),
        "PA_NZ": lambda: kvcore.layout.paged_nz_to_nd(cache, heads).reshape(nb * bs, *token),
    }[mode]()
    j = np.concatenate([np.arange(n) for n in lengths])
    b = np.repeat(np.arange(batch), lengths)
    wanted = rows[tables[b, j // bs] * bs + j % bs]
    np.testing.assert_array_equal(out.view(np.uint16), wanted.view(np.uint16))


# ---------------------------------------------------------------- one call to break


def call(**changes: Any) -> dict[str, Any]:
    """A legal Norm call of two requests, 3 and 5 tokens, with changes."""
    rng = np.random.default_rng(1)
    a: dict[str, Any] = {
        "key_cache": rng.integers(0, 99, (6, 4, 2, 16)).astype(np.float16),
        "value_cache": rng.integers(0, 99, (6, 4, 2, 8)).astype(np.float16),
        "block_tables": np.array([[1, 5, 2], [0, 3, 4]], np.int32),
        "seq_lens": np.array([3, 5], np.int32),
        "key": np.full((8, 2, 16), -1, np.float16),
        "value": np.full((8, 2, 8), -1, np.float16),
    }
    return a | changes


def nz_call(**changes: Any) -> dict[str, Any]:
    return call(
        key_cache=np.ones((6, 2, 4, 16), np.float16),
        value_cache=np.ones((6, 1, 4, 16), np.float16),
        key=np.full((8, 32), -1, np.float16),
        value=np.full((8, 16), -1, np.float16),
        cache_mode="PA_NZ",
        **changes,
    )


def refuse(arguments: dict[str, Any], argument: str, match: str, null: bool = False) -> None:
    """The call raises the right class, names that argument, and writes nothing."""
    outputs = {n: arguments.get(n) for n in ("key", "value")}
    before = {n: np.array(a) for n, a in outputs.items() if isinstance(a, np.ndarray)}
    kind = kvcore.ParamNullError if null else kvcore.ParamInvalidError
    with pytest.raises(kind, match=match) as caught:
        kvcore.gather_pa_kv_cache(**arguments)
    assert caught.value.argument == argument
    assert caught.value.code == (161001 if null else 161002)
    for name, was in before.items():
        np.testing.assert_array_equal(arguments[name], was)


def as_array(*values: int) -> Array:
    return np.array(values, np.int32)


@pytest.mark.parametrize("name", ["value_cache", "value"])
def test_half_a_value_lane(name: str) -> None:
    refuse(
        call(**{name: None}), name, rf"^{name}: expected an array together with value", null=True
    )


BROKEN: list[tuple[str, dict[str, Any], str, str]] = [
    ("a column too many", {"seq_lens": as_array(0, 13), "key": np.zeros((13, 2, 16), np.float16),
      "value": np.zeros((13, 2, 8), np.float16)}, "block_tables", "at least 4 columns .* got 3"),
    ("block past the cache", {"block_tables": np.array([[1, 0, 0], [0, 6, 4]], np.int32)},
     "block_tables", r"block_tables\[1, 1\]: expected 0 <= block < 6, got 6"),
    ("negative block", {"block_tables": np.array([[-1, 0, 0], [0, 3, 4]], np.int32)},
     "block_tables", r"block_tables\[0, 0\]: expected 0 <= block < 6, got -1"),
    ("negative length", {"seq_lens": as_array(-1, 9)}, "seq_lens",
     r"seq_lens\[0\]: expected a length >= 0, got -1"),
    ("too few tokens", {"seq_lens": as_array(3, 4)}, "seq_lens", "sum to 8 .* got 7"),
    ("too many tokens", {"seq_lens": as_array(3, 6)}, "seq_lens", "sum to 8 .* got 9"),
    ("negative offset", {"seq_offset": as_array(0, -1)}, "seq_offset", r"seq_offset\[1\].*got -1"),
    ("offset past the table", {"seq_offset": as_array(0, 8)}, "block_tables", "4 columns"),
    ("offset of no int32", {"seq_offset": np.array([0, 1 << 40])}, "seq_offset", "dtype int32"),
    ("lengths of another shape", {"seq_lens": as_array(3, 5, 0)}, "seq_lens", r"shape \[2\]"),
    ("offsets of another shape", {"seq_offset": as_array(0)}, "seq_offset", r"shape \[2\]"),
    ("table of rank 1", {"block_tables": as_array(1, 2)}, "block_tables", r"shape \[B, M\]"),
    ("mixed index types", {"seq_lens": np.array([3, 5])}, "seq_lens", "dtype int32"),
    ("cache of rank 3", {"key_cache": np.zeros((6, 4, 32), np.float16)}, "key_cache",
     r"shape \[nb, bs, H, D\]"),
    ("key of rank 2", {"key": np.zeros((8, 32), np.float16)}, "key", r"\[sum of lengths, H, D\]"),
    ("heads of key", {"key": np.zeros((8, 1, 16), np.float16)}, "key", r"shape \[8, 2, 16\]"),
    ("head size of value", {"value": np.zeros((8, 2, 9), np.float16)}, "value", r"\[8, 2, 8\]"),
    ("tokens of value", {"value": np.zeros((7, 2, 8), np.float16)}, "value", "8 tokens as key"),
    ("blocks of value", {"value_cache": np.zeros((5, 4, 2, 8), np.float16)}, "value_cache",
     "blocks, block size and heads"),
    ("heads of value", {"value_cache": np.zeros((6, 4, 1, 8), np.float16),
      "value": np.zeros((8, 1, 8), np.float16)}, "value_cache", "blocks, block size and heads"),
    ("dtype of key", {"key": np.zeros((8, 2, 16), np.float32)}, "key", "dtype float16"),
    ("dtype that does not fit", {"dtype": "int8"}, "dtype", "raw unsigned"),
    ("mode", {"cache_mode": "norm"}, "cache_mode", "'Norm', 'PA_NZ', 'NHSD'"),
    ("cumsum flag", {"is_seq_lens_cumsum": 1}, "is_seq_lens_cumsum", "True or False"),
    ("no totals", {"is_seq_lens_cumsum": True}, "seq_lens", r"\[3\] \(\[B \+ 1\]"),
    ("totals that start late", {"is_seq_lens_cumsum": True, "seq_lens": as_array(1, 3, 8)},
     "seq_lens", r"seq_lens\[0\]: expected 0"),
    ("totals that overshoot", {"is_seq_lens_cumsum": True, "seq_lens": as_array(0, 9, 8)},
     "seq_lens", "sum to 8"),
    ("totals that decrease", {"is_seq_lens_cumsum": True, "seq_lens": as_array(0, 3, 2)},
     "seq_lens", r"seq_lens\[2\]: expected at least seq_lens\[1\] = 3"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "argument", "match"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN]
)
def test_refuses(changes: dict[str, Any], argument: str, match: str) -> None:
    refuse(call(**changes), argument, match)


def test_lengths_that_wrap_int64() -> None:
    huge = 2**62
    refuse(
        call(
            seq_lens=np.array([huge, huge, huge, huge + 8]),
            block_tables=np.zeros((4, 3), np.int64),
        ),
        "seq_lens",
        "sum to 8",
    )
    totals = np.array([0, -(2**63), 2**63 - 1, 8, 8])
    refuse(
        call(seq_lens=totals, block_tables=np.zeros((4, 3), np.int64), is_seq_lens_cumsum=True),
        "seq_lens",
        "at least",
    )
    refuse(
        call(
            seq_lens=np.array([3, 5]),
            block_tables=np.zeros((2, 3), np.int64),
            seq_offset=np.array([0, 2**63 - 1]),
        ),
        "block_tables",
        "columns",
    )


def test_nz_shapes() -> None:
    kvcore.gather_pa_kv_cache(**nz_call())
    for changes, argument in (
        ({"key_cache": np.ones((6, 4, 4, 8), np.float16)}, "key_cache"),
        ({"key_cache": np.ones((6, 4, 16), np.float16)}, "key_cache"),
        ({"key": np.ones((8, 2, 16), np.float16)}, "key"),
        ({"key": np.ones((8, 16), np.float16)}, "key"),
        ({"value_cache": np.ones((6, 1, 1, 4, 16), np.float16)}, "value_cache"),
    ):
        refuse(nz_call() | changes, argument, f"^{argument}: expected")


def test_folded_and_overlapping_outputs() -> None:
    folded = np.lib.stride_tricks.as_strided(np.zeros(300, np.float16), (8, 2, 16), (32, 32, 2))
    refuse(call(key=folded), "key", "bytes of their own")
    slab = np.zeros(4000, np.float16)
    shared = call(key_cache=slab[: 6 * 4 * 2 * 16].reshape(6, 4, 2, 16))
    shared["key"] = slab[700 : 700 + 256].reshape(8, 2, 16)
    refuse(shared, "key", "bytes shared with key_cache")
    both = slab[:256].reshape(8, 2, 16)
    refuse(call(key=both, value=both[:, :, :8]), "key", "bytes shared with value")


def test_unneeded_entries_may_be_anything() -> None:
    a = call(block_tables=np.array([[1, 99, -5], [0, 3, 2**31 - 1]], np.int32))
    kvcore.gather_pa_kv_cache(**a)
    np.testing.assert_array_equal(a["key"][3:7], a["key_cache"][0])


def test_requests_without_tokens_need_no_entry() -> None:
    a = call(
        block_tables=np.array([[-1, -1, -1], [0, 3, 4]], np.int32),
        seq_lens=as_array(0, 8),
        seq_offset=as_array(-7, 0),
    )
    kvcore.gather_pa_kv_cache(**a)
    np.testing.assert_array_equal(a["key"][4:], a["key_cache"][3])


def test_no_tokens() -> None:
    a = call(
        seq_lens=as_array(0, 0),
        key=np.zeros((0, 2, 16), np.float16),
        value=np.zeros((0, 2, 8), np.float16),
    )
    plan = kvcore.plan_gather_pa_kv_cache(**a)
    plan.run()
    assert plan.bytes_moved == 0
    assert plan.workspace_size == 0
    refuse(a | {"seq_lens": as_array(0, 1)}, "seq_lens", "sum to 0")


def test_no_bytes_are_still_checked() -> None:
    a = call(key_cache=np.zeros((6, 4, 2, 0), np.float16), key=np.zeros((8, 2, 0), np.float16))
    a |= {"value_cache": None, "value": None}
    kvcore.gather_pa_kv_cache(**a)
    refuse(a | {"block_tables": np.full((2, 3), 6, np.int32)}, "block_tables", "block < 6")
    many = np.lib.stride_tricks.as_strided(np.zeros(0, np.float16), (2**40, 2, 0), (0, 0, 2))
    refuse(a | {"key": many}, "seq_lens", "sum to")


# ---------------------------------------------------------------- plans


def test_plan_rereads_contents_and_reports_what_it_touched() -> None:
    a = call()
    plan = kvcore.plan_gather_pa_kv_cache(**a)
    token_bytes = (2 * 16 + 2 * 8) * 2
    assert plan.bytes_moved == 8 * token_bytes
    assert {x.argument for x in plan.writes} == {"key", "value"}
    plan.run()
    assert plan.bytes_moved == 8 * token_bytes
    assert plan.num_descriptors == 6  # rows of one block that lie side by side are one piece
    reads, writes = plan.touched()
    ranges = {x.argument: x.ranges - a[x.argument].ctypes.data for x in (*reads, *writes)}
    # four rows of block 0, three of block 1, one of block 3, 64 bytes each
    assert ranges["key_cache"].tolist() == [[0, 448], [768, 832]]
    assert ranges["key"].tolist() == [[0, 8 * 64]]
    assert ranges["value"].tolist() == [[0, 8 * 32]]
    assert {x.argument for x in reads} == {"key_cache", "value_cache", "block_tables", "seq_lens"}
    a["block_tables"][...] = 5
    a["seq_lens"][...] = [4, 4]
    plan.run()
    np.testing.assert_array_equal(a["key"][:4], a["key_cache"][5])
    np.testing.assert_array_equal(a["key"][4:], a["key_cache"][5])
    a["seq_lens"][...] = [4, 5]
    with pytest.raises(kvcore.ParamInvalidError, match="sum to 8"):
        plan.run()
    with pytest.raises(kvcore.ParamInvalidError, match="sum to 8"):
        plan.check_values()


# ---------------------------------------------------------------- with a SoC


@pytest.mark.parametrize("soc", ["A2", "A3", "950"])
def test_documented_calls_pass(soc: str) -> None:
    kvcore.gather_pa_kv_cache(**call(), soc=soc)
    kvcore.gather_pa_kv_cache(**nz_call(), soc=soc)


SOC_BROKEN: list[tuple[str, str, dict[str, Any], str]] = [
    ("A2", "no NHSD", {"cache_mode": "NHSD", "key": np.zeros((8, 4, 16), np.float16),
      "value": np.zeros((8, 4, 8), np.float16)}, "cache_mode"),
    ("950", "key only", {"value": None, "value_cache": None}, "value_cache"),
    ("A3", "dtype", {"dtype": "uint16", "key_cache": np.zeros((6, 4, 2, 16), np.uint16),
      "key": np.zeros((8, 2, 16), np.uint16)}, "key_cache"),
    ("A3", "mixed dtypes", {"value_cache": np.zeros((6, 4, 2, 16), np.int8),
      "value": np.zeros((8, 2, 16), np.int8)}, "value_cache"),
    ("950", "mixed dtypes", {"value_cache": np.zeros((6, 4, 2, 8), np.int8),
      "value": np.zeros((8, 2, 8), np.int8)}, "value_cache"),
    ("A2", "index type", {"block_tables": np.zeros((2, 3), np.int64), "seq_lens": np.array([3, 5])},
     "block_tables"),
    ("A2", "token unit", {"value_cache": np.zeros((6, 4, 2, 4), np.float16),
      "value": np.zeros((8, 2, 4), np.float16)}, "value_cache"),
    ("A3", "token size", {"value_cache": np.zeros((6, 4, 2, 37904), np.float16),
      "value": np.zeros((8, 2, 37904), np.float16)}, "value_cache"),
    ("950", "float4", {"dtype": "float4_e2m1", "key_cache": np.zeros((6, 4, 2, 16), np.uint8),
      "value_cache": np.zeros((6, 4, 2, 8), np.uint8), "key": np.zeros((8, 2, 16), np.uint8),
      "value": np.zeros((8, 2, 8), np.uint8)}, "key_cache"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("soc", "changes", "argument"),
    [(b[0], *b[2:]) for b in SOC_BROKEN],
    ids=[f"{b[0]} {b[1]}" for b in SOC_BROKEN],
)
def test_documented_limits(soc: str, changes: dict[str, Any], argument: str) -> None:
    kvcore.gather_pa_kv_cache(**call(**changes))
    refuse(call(**changes) | {"soc": soc}, argument, f"on {soc}")


def test_950_takes_wide_types_and_a_float8_key_with_a_half_value() -> None:
    a = call(
        key_cache=np.ones((6, 4, 2, 16), np.uint8),
        key=np.zeros((8, 2, 16), np.uint8),
        dtype="float8_e4m3fn",
    )
    kvcore.gather_pa_kv_cache(**a, soc="950")
    a["dtype"] = "float8_e5m2"
    refuse(a | {"soc": "950"}, "value_cache", "dtype float8_e5m2")


def test_five_axes_are_this_librarys_own() -> None:
    a = nz_call(is_seq_lens_cumsum=False)
    a |= {
        "key_cache": np.ones((6, 2, 1, 4, 16), np.float16),
        "value_cache": np.ones((6, 2, 1, 4, 16), np.float16),
        "value": np.zeros((8, 32), np.float16),
    }
    kvcore.gather_pa_kv_cache(**a)
    refuse(a | {"soc": "A2"}, "key_cache", "4-D cache on A2")


def test_quirks_are_warnings() -> None:
    offsets = as_array(0, 4)
    for soc in ("A2", "A3"):
        with pytest.warns(kvcore.KVPortabilityWarning, match="seq_offset: in PA_NZ"):
            kvcore.gather_pa_kv_cache(**nz_call(seq_offset=offsets), soc=soc)
    kvcore.gather_pa_kv_cache(**nz_call(seq_offset=offsets), soc="950")
    kvcore.gather_pa_kv_cache(**call(seq_offset=offsets), soc="A2")
    loose = call(key=np.zeros((16, 2, 16), np.float16)[::2])
    with pytest.warns(kvcore.KVPortabilityWarning, match="key: A3 takes contiguous"):
        kvcore.gather_pa_kv_cache(**loose, soc="A3")
    refuse(
        call(block_tables=np.full((2, 3), 9, np.int32), soc="950"),
        "block_tables",
        "a 950 fills those rows with zeros",
    )


def test_float4_is_moved_packed() -> None:
    for element in FLOAT4:
        a = call(
            key_cache=np.arange(6 * 4 * 2 * 16, dtype=np.uint8).reshape(6, 4, 2, 16),
            key=np.zeros((8, 2, 16), np.uint8),
            value_cache=None,
            value=None,
            dtype=element,
        )
        kvcore.gather_pa_kv_cache(**a)
        np.testing.assert_array_equal(a["key"][3:7], a["key_cache"][0])
