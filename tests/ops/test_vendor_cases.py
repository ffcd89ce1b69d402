# SPDX-License-Identifier: Apache-2.0
"""Shapes of the vendor's own test tables, and whether it expects them to run.

Facts (shapes, dtypes, mode, expected verdict) are from ascend-transformer-boost:
tests/apitest/opstest/csv/reshape_and_cache.csv (its row numbers are kept below),
tests/high_level_test/ReshapeAndCacheOperation, and the KvCacheOperation tests in
tests/apitest. Left out are rows about what kvcore has no word for: an output tensor of its own
(21), reserved parameters (32), numbers for kinds of caches that do not exist (28, 29), and
format tags on the same shapes (34).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kvcore
from kvcore.errors import KVCoreError, ParamInvalidError

NUMPY = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "i8": np.int8, "i32": np.int32}
NUMPY |= {"i64": np.int64}
NZ = {"cache_mode": "PA_NZ"}
ALIBI = {"scatter_mode": "Alibi"}
ROPE = {"scatter_mode": "Rope"}
# The vendor's order: key, value, key_cache, value_cache, slots, and for compression lengths of
# windows, lengths of sequences and starts of windows.
ORDER = ("key", "value", "key_cache", "value_cache", "slot_mapping")
WINDOWS = ("compress_lens", "seq_lens", "compress_seq_offset")


def call_of(dtypes: str, shapes: str, modes: dict[str, str]) -> dict[str, Any]:
    """A table's row as pairs; three arrays are a key alone."""
    kinds, sizes = dtypes.split(), shapes.split()
    names: tuple[str, ...] = (*ORDER, *WINDOWS)[: len(kinds)]
    if len(kinds) == 3:
        names = ("key", "key_cache", "slot_mapping")
    call: dict[str, Any] = dict(modes)
    for name, kind, size in zip(names, kinds, sizes, strict=True):
        call[name] = (tuple(map(int, size.split(","))), NUMPY[kind])
    return call


F16, BF16, I8 = ("f16 f16 f16 f16 i32", "bf16 bf16 bf16 bf16 i32", "i8 i8 i8 i8 i32")
KEY_ONLY = "2,32,128 512,128,32,128 2"
BASE = "2,32,128 2,32,128 512,128,32,128 512,128,32,128 2"

RUNS = [
    (1, "A2", F16, BASE, {}),
    (1, "950", F16, BASE, {}),
    (10, "A2", F16, "2,32,64 2,32,128 512,128,32,64 512,128,32,128 2", {}),
    (16, "A2", "f16 f16 i32", KEY_ONLY, {}),
    (17, "A2", "i8 i8 i32", KEY_ONLY, {}),
    (18, "A2", "bf16 bf16 i32", KEY_ONLY, {}),
    (33, None, F16, "3,4,128 3,4,128 3,32,128,16 3,32,128,16 3", NZ),
    (37, None, F16, "4,5,128 4,5,128 4,40,128,16 4,40,128,16 4", NZ),
    (38, None, F16, "4,6,128 4,6,128 4,48,128,16 4,48,128,16 4", NZ),
    (39, None, F16, "8192,1,128 8192,1,128 96,8,128,16 96,8,128,16 8192", NZ),
    (41, "A2", "i8 f16 i8 f16 i32", "4,6,128 4,6,128 4,24,128,32 4,48,128,16 4", NZ),
    (42, "A2", F16, "4,6,128 4,6,128 4,48,128,16 4,48,128,16 4", NZ),
    (43, "A2", "bf16 f16 bf16 f16 i32", "4,6,128 4,6,128 4,48,128,16 4,48,128,16 4", NZ),
    (44, "A2", BF16, "4,6,128 4,6,128 4,48,128,16 4,48,128,16 4", NZ),
    (45, "A2", BF16, "4,6,64 4,6,128 4,24,64,16 4,48,64,16 4", NZ),
    (46, "A2", "i8 bf16 i8 bf16 i32", "4,6,64 4,6,128 4,12,64,32 4,48,64,16 4", NZ),
    (47, "A2", F16, "8192,10,128 8192,10,128 128,80,128,16 128,80,128,16 8192", NZ),
    (49, "A2", "i8 f16 i8 f16 i32", "4096,1,512 4096,1,64 34,16,128,32 34,4,128,16 4096", NZ),
    (50, "A2", F16, "3072,1,512 3072,1,64 801,128,1,512 801,128,1,64 3072", {}),
    (50, "950", F16, "3072,1,512 3072,1,64 801,128,1,512 801,128,1,64 3072", {}),
    (52, "950", BF16, BASE, {}),
    (53, "950", I8, BASE, {}),
    (54, "950", F16 + " i32 i32", "16,1,128 16,1,128 512,128,1,128 512,128,1,128 1 1 1", ALIBI),
    (55, "950", BF16 + " i32 i32", "10,1,128 10,1,128 512,128,1,128 512,128,1,128 1 1 1", ALIBI),
    (56, "950", I8 + " i32 i32", "10,1,128 10,1,128 512,128,1,128 512,128,1,128 1 1 1", ALIBI),
    (57, "950", F16 + " i32" * 3, "10,1,128 10,1,128 512,128,1,128 512,128,1,128 1 1 1 1", ROPE),
    (58, "950", BF16 + " i32" * 3, "10,1,128 10,1,128 512,128,1,128 512,128,1,128 1 1 1 1", ROPE),
    # The smoke table: of its 403 rows, which repeat a few shapes, one of each shape seen.
    ("smoke 1", "A2", F16, "2,32,128 2,32,128 64,16,32,128 64,16,32,128 2", {}),
    ("smoke 5", "A2", F16, "2,32,128 2,32,128 64,32,32,128 64,32,32,128 2", {}),
    ("smoke 9", "A2", F16, "2,32,128 2,32,128 2,64,32,128 2,64,32,128 2", {}),
    ("smoke 21", "A2", F16, "2,32,128 2,32,128 128,64,32,128 128,64,32,128 2", {}),
    ("smoke 25", "A2", F16, "128,64,16 128,64,16 64,16,64,16 64,16,64,16 128", {}),
    ("smoke 34", "A2", F16, "64,2,128 64,2,128 64,16,2,128 64,16,2,128 64", {}),
    ("smoke 117", "A2", F16, "128,32,32 128,32,32 64,16,32,32 64,16,32,32 128", {}),
    ("smoke 129", "A2", F16, "2,32,128 2,32,128 128,2,32,128 128,2,32,128 2", {}),
    ("smoke 131", "A2", F16, "2,32,64 2,32,64 64,16,32,64 64,16,32,64 2", {}),
    ("smoke 226", None, F16, "2,32,128 2,32,128 32,256,32,16 32,256,32,16 2", NZ),
    ("smoke 229", None, F16, "2,64,128 2,64,128 64,512,64,16 64,512,64,16 2", NZ),
    ("smoke 255", None, F16, "2,32,128 2,32,128 2,256,32,16 2,256,32,16 2", NZ),
    ("smoke 258", None, F16, "128,16,32 128,16,32 64,32,16,16 64,32,16,16 128", NZ),
    ("smoke 365", None, F16, "2,32,128 2,32,128 64,256,32,16 64,256,32,16 2", NZ),
    ("smoke 370", None, F16, "64,128,64 64,128,64 64,512,128,16 64,512,128,16 64", NZ),
    ("smoke 380", None, F16, "32,16,128 32,16,128 64,128,16,16 64,128,16,16 32", NZ),
    ("smoke 392", None, F16, "2,32,16 2,32,16 64,32,32,16 64,32,32,16 2", NZ),
    ("smoke 397", None, F16, "16,64,16 16,64,16 64,64,64,16 64,64,64,16 16", NZ),
    ("smoke 401", "A2", "f16 f16 i32", KEY_ONLY, {}),
    ("smoke 402", "A2", "i8 i8 i32", KEY_ONLY, {}),
    ("smoke 403", "A2", "bf16 bf16 i32", KEY_ONLY, {}),
]

REFUSED = [
    (2, "A2", "f16 f16 f16 f16 f16", "4,32,32 4,32,32 16,128,32,32 16,128,32,32 4", {}),
    (3, "A2", F16, "3,32,32 4,32,32 16,128,32,32 16,128,32,32 4", {}),
    (4, "A2", F16, "4,32,32 3,32,32 16,128,32,32 16,128,32,32 4", {}),
    (5, "A2", F16, "4,32,32 4,32,64 16,128,32,32 16,128,32,32 4", {}),
    (6, "A2", F16, "4,32,32 4,32,32 16,128,32,64 16,128,32,32 4", {}),
    (7, "A2", F16, "4,32,32 4,32,32 16,128,32,32 16,128,32,64 4", {}),
    (8, "A2", F16, "4,32,32 4,32,32 16,128,32,32 17,128,32,32 4", {}),
    (9, "A2", F16, "4,32,32 4,32,32 16,128,32,32 16,129,32,32 4", {}),
    (11, None, F16, "2,32,128 2,32,128 64,16,512,16 64,16,256,16 2", NZ),
    (12, None, F16, "2,32,128 2,32,128 64,16,256,17 64,16,256,16 2", NZ),
    (13, "A2", F16 + " i32 i32 i64", "4,32,32 4,32,32 16,128,32,32 16,128,32,32 4 4 4 4", ROPE),
    (14, "A2", F16 + " i32" * 3, "4,32,32 4,32,32 16,128,1,33 16,128,1,32 4 4 4 4", ROPE),
    (15, "A2", F16 + " i32" * 3, "4,32,32 4,32,32 16,128,32,32 16,128,32,32 4 4 4 4", ROPE),
    (20, "A2", "f16 f16 f16", "4,32,128 64,16,32,128 4", {}),
    (22, "A2", "f16 f16 i32", "4,32,128 64,128,32,128 4", ALIBI),
    (23, None, "f16 f16 i32", "4,32,128 64,16,64,128 4", {}),
    (24, "A2", "f16 f16 i32", "4,32,128 64,16,64,128 5", {}),
    (25, "A2", "f16 f16 i32", "4,32,128 64,16,32,64 4", {}),
    (26, "A2", "f16 f16 i32", "4,32,64 64,16,32,128 4", {}),
    (27, "A2", "f16 f16 i32", "4,32,128 64,16,16,128 4", {}),
    (30, "A2", F16, "128,2,32 128,16,32 64,16,2,32 64,16,16,32 128", {}),
    (31, None, F16, "2,16,64 2,2,64 64,16,16,64 64,16,2,64 2", {}),
    (35, None, F16, "3,4,128 3,4,128 3,32,128,32 3,32,128,32 3", NZ),
    (36, None, F16, "3,4,128 3,4,64 3,32,128,16 3,32,128,16 3", NZ),
    (40, "A2", "i8 f16 i8 f16 i32", "4,6,128 4,6,128 4,48,128,16 4,48,128,16 4", NZ),
]


def same_machine(soc: str | None) -> tuple[str, ...]:
    """A3 has A2's architecture and kernels. None: a machine that kvcore does not know."""
    return {"A2": ("A2", "A3"), "950": ("950",), None: ()}[soc]


@pytest.mark.parametrize(("row", "soc", "dtypes", "shapes", "modes"), RUNS)
def test_what_the_vendor_runs_is_accepted(
    row: int | str, soc: str | None, dtypes: str, shapes: str, modes: dict[str, str]
) -> None:
    scenario = kvcore.scenario_of(**call_of(dtypes, shapes, modes))
    assert [scenario.runs[name] for name in same_machine(soc)] == [None] * len(same_machine(soc))


@pytest.mark.parametrize(("row", "soc", "dtypes", "shapes", "modes"), REFUSED)
def test_what_the_vendor_refuses_is_refused(
    row: int, soc: str | None, dtypes: str, shapes: str, modes: dict[str, str]
) -> None:
    with pytest.raises(KVCoreError) as caught:
        kvcore.scenario_of(**call_of(dtypes, shapes, modes))
    assert caught.value.code in (161001, 161002)


def test_a_mode_that_does_not_exist_is_refused() -> None:
    # Row 15 gives a number of compression beside the known ones.
    call = call_of(F16, "4,32,32 4,32,32 16,128,32,32 16,128,32,32 4", {"scatter_mode": "Ropes"})
    with pytest.raises(ParamInvalidError, match=r"^scatter_mode: "):
        kvcore.scenario_of(**call)


def test_fewer_slots_than_tokens_are_the_exception() -> None:
    # Row 19 has 64 tokens for 16 * 2 slots. ATB's own kernel takes it on an A2, aclnn's tiling does
    # not, and the rules of a SoC here are aclnn's.
    scenario = kvcore.scenario_of(**call_of("f16 f16 i32", "64,32,128 16,2,32,128 64", {}))
    for soc in ("A2", "A3"):
        reason = scenario.runs[soc]
        assert reason is not None
        assert reason.startswith("key_cache: expected num_blocks * block_size >= T = 64")


# ---------------------------------------------------------------- KvCacheOperation
# 28 layers, 16 requests of at most 384 tokens, hidden 1024; as many layers less here as memory is
# worth, which no rule looks at.
LAYERS, BATCH, MAX_SEQ, HIDDEN = 2, 16, 384, 1024


def append(
    dtype: Any,
    *,
    hidden: int = HIDDEN,
    past_hidden: int | None = None,
    batch: int = BATCH,
    soc: str | None = None,
) -> np.ndarray[Any, Any]:
    """The calls of the vendor's tests: lengths below 192, offsets equal to them."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, MAX_SEQ // 2, BATCH, dtype=np.int32)
    tokens = rng.integers(-5, 5, (int(lengths.sum()), hidden)).astype(dtype)
    past = np.zeros((LAYERS, batch, MAX_SEQ, past_hidden or hidden), dtype)
    layer = np.array([0], np.int32)
    kvcore.kv_cache_update(tokens, layer, past, lengths, lengths, soc=soc)
    done = 0
    for b, n in enumerate(lengths):
        np.testing.assert_array_equal(past[0, b, :n], tokens[done : done + n])
        assert not past[0, b, n:].any()
        done += n
    assert not past[1].any()
    return past


@pytest.mark.parametrize("dtype", [np.float16, np.int8])
@pytest.mark.parametrize("soc", [None, "A2", "A3"])
def test_the_vendors_updates_run(soc: str | None, dtype: Any) -> None:
    append(dtype, soc=soc)


def test_the_kernels_own_bfloat16_is_not_the_operations() -> None:
    # The kernel's test has bfloat16, which the operation that calls it does not let through.
    append(ml_dtypes.bfloat16)
    with pytest.raises(ParamInvalidError, match=r"^new_kv: expected dtype float16 or int8 on A2"):
        append(ml_dtypes.bfloat16, soc="A2")


@pytest.mark.parametrize(("dtype", "hidden"), [(np.float16, 1016), (np.int8, 1008)])
def test_what_the_updates_checks_refuse(dtype: Any, hidden: int) -> None:
    # Rules of the operation's own shape check: 16 and 32 elements, equal hidden sizes and batches.
    with pytest.raises(ParamInvalidError, match="hidden size that is a multiple of"):
        append(dtype, hidden=hidden, soc="A2")
    with pytest.raises(ParamInvalidError, match="tokens of hidden size"):
        append(dtype, past_hidden=HIDDEN + 32, soc="A2")
    with pytest.raises(ParamInvalidError, match=r"^token_offset"):
        append(dtype, batch=BATCH + 1, soc="A2")
