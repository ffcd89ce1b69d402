# SPDX-License-Identifier: Apache-2.0
"""scatter_pa_kv_cache: scenarios 1, 2, 6 and 7, key only, and every bad argument."""

from __future__ import annotations

import enum
import itertools
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import kvcore
import oracle
from kvcore._core import overlap
from refusal import BadIndex, Call, Index

T, H, DK, DV, NB, BS = 5, 2, 16, 32, 3, 4
SCENARIOS = ["nz4", "nz5", "norm", "nct", "nhsd"]
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
ARRAYS = ("key", "key_cache", "slot_mapping", "value", "value_cache")
OPTIONAL = ("compress_lens", "compress_seq_offset", "seq_lens")


def filled(*shape: int, dtype: str = "uint16") -> np.ndarray:
    return (np.arange(np.prod(shape)) % 251 + 1).astype(dtype).reshape(shape)


def cache_shape(scenario: str, size: int, c0: int = 16) -> tuple[int, ...]:
    return {
        "nz4": (NB, H * size // c0, BS, c0),
        "nz5": (NB, H, size // c0, BS, c0),
        "norm": (NB, BS, H, size),
        "nct": (NB, BS, H, size),
        "nhsd": (NB, H, BS, size),
    }[scenario]


def call(scenario: str = "norm", key_only: bool = False) -> Call:
    arrays = {
        "key": filled(T, H, DK),
        "key_cache": filled(*cache_shape(scenario, DK)) * 0,
        "slot_mapping": np.array([7, -1, 0, 11, 7], np.int64),
        "value": filled(T, H, DV),
        "value_cache": filled(*cache_shape(scenario, DV)) * 0,
    }
    if key_only:
        del arrays["value"], arrays["value_cache"]
    options: dict[str, Any] = {}
    if scenario.startswith("nz"):
        options["cache_mode"] = "PA_NZ"
    elif scenario == "nhsd":
        options["scatter_mode"] = "NHSD"
    elif scenario == "nct":
        options |= {"scatter_mode": "Nct", "strides": (H * DK, H * DV), "offsets": (0, 0)}
    return Call(kvcore.scatter_pa_kv_cache, arrays, **options)


def check(made: Call, **changed: Any) -> None:
    """The call writes what the oracle says, and nothing else."""
    given = made.arguments(**changed)
    before = made.arena.snapshot()
    want = oracle.run("scatter_pa_kv_cache", given).outputs
    assert kvcore.scatter_pa_kv_cache(**given) is None
    placed = {n: a for n, a in want.items() if given[n] is made.arrays.get(n)}
    made.arena.assert_written(before, {n: oracle.bits(a) for n, a in placed.items()})
    for name in want.keys() - placed:
        np.testing.assert_array_equal(given[name], want[name])


# ---------------------------------------------------------------- legal calls


@pytest.mark.parametrize("key_only", [False, True])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_writes_what_the_oracle_says(scenario: str, key_only: bool) -> None:
    """On the NPU's test double too, where tests/npu/test_npu_operators.py takes it over."""
    check(call(scenario, key_only))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_zero_dimensional_values_mean_key_only(scenario: str) -> None:
    check(call(scenario, key_only=True), value=np.array(1.5), value_cache=np.array(2.5))


@pytest.mark.parametrize("none", [None, "", "None"])
def test_mode_none_has_three_names(none: str | None) -> None:
    check(call("norm"), scatter_mode=none)
    check(call("norm"), cache_mode=None if none is None else "Norm", scatter_mode=none)
    check(call("norm"), cache_mode="", scatter_mode=none)


@pytest.mark.parametrize("mode", [None, "", "None", "Alibi", "Rope", "Omni", "Nct", "NHSD"])
def test_nz_ignores_the_scatter_mode(mode: str | None) -> None:
    check(call("nz4"), scatter_mode=mode)


class Mode(str, enum.Enum):  # noqa: UP042 (a StrEnum prints as its value)
    NZ = "PA_NZ"
    NHSD = "NHSD"


def test_modes_may_be_string_enums() -> None:
    made = call("nz4")
    made.options["cache_mode"] = Mode.NZ
    made.run()
    want = oracle.run("scatter_pa_kv_cache", call("nz4").arguments()).outputs["key_cache"]
    np.testing.assert_array_equal(made.arrays["key_cache"], want)
    made = call("nhsd")
    made.run(scatter_mode=Mode.NHSD)
    want = oracle.run("scatter_pa_kv_cache", call("nhsd").arguments()).outputs["key_cache"]
    np.testing.assert_array_equal(made.arrays["key_cache"], want)


@pytest.mark.parametrize("rows_apart", [1, 2])
@pytest.mark.parametrize("heads_apart", [16, 40])
def test_nz_heads_of_one_column(heads_apart: int, rows_apart: int) -> None:
    # One column a head: heads of the token, or rows of the cache, need not lie side by side.
    key = filled(10, 3, heads_apart)[..., :16]
    cache = np.zeros((2, 3, 8 * rows_apart, 16), np.uint16)[:, :, ::rows_apart]
    arguments = {"key": key, "key_cache": cache, "slot_mapping": np.arange(2, 12)}
    arguments["cache_mode"] = "PA_NZ"
    expected = oracle.run("scatter_pa_kv_cache", arguments).outputs["key_cache"]
    kvcore.scatter_pa_kv_cache(**arguments)
    np.testing.assert_array_equal(cache, expected)


def test_nz_value_of_another_dtype() -> None:
    made = call("nz4")
    cache = np.zeros(cache_shape("nz4", DV, 32), np.uint8)
    check(made, value=filled(T, H, DV, dtype="uint8"), value_cache=cache)
    assert cache.any()


@pytest.mark.parametrize(
    "numbers",
    [
        [H * DK, H * DV],
        np.array([H * DK, H * DV]),
        np.array([H * DK, H * DV], np.int32),
        (np.int64(H * DK), Index(H * DV)),
        range(H * DK, H * DV + 1, H * (DV - DK)),
    ],
)
def test_strides_may_be_any_sequence_of_integers(numbers: Any) -> None:
    made = call("nct")
    made.run(strides=numbers)
    want = oracle.run("scatter_pa_kv_cache", call("nct").arguments()).outputs
    for name, expected in want.items():
        np.testing.assert_array_equal(made.arrays[name], expected)


@pytest.mark.parametrize("numbers", [5, "text", [1.5, True], object(), itertools.count()])
def test_strides_and_offsets_are_ignored_in_other_modes(numbers: Any) -> None:
    check(call("norm"), strides=numbers)
    check(call("nz4"), offsets=numbers)


def test_no_tokens() -> None:
    for scenario in SCENARIOS:
        made = call(scenario)
        empty = {"key": filled(0, H, DK), "value": filled(0, H, DV)}
        slots = np.zeros(0, np.int32)
        before = made.arena.snapshot()
        made.run(slot_mapping=slots, **empty)
        plan = kvcore.plan_scatter_pa_kv_cache(**made.arguments(slot_mapping=slots, **empty))
        assert plan.workspace_size == 0
        plan.run()
        assert plan.bytes_moved == plan.num_descriptors == 0
        made.arena.assert_untouched(before)
        made.refused("slot_mapping", slot_mapping=slots.astype(np.int16), **empty)
        if scenario in ("norm", "nhsd"):
            made.refused("key", key=filled(0, H, DK + 16), value=empty["value"],
                         slot_mapping=slots)  # fmt: skip


def test_tokens_without_bytes() -> None:
    for shape in ((T, 0, DK), (T, H, 0)):
        cache = np.zeros((NB, BS, *shape[1:]), np.uint16)
        slots = np.full(T, 10**6)
        kvcore.scatter_pa_kv_cache(np.zeros(shape, np.uint16), cache, slots)
        plan = kvcore.plan_scatter_pa_kv_cache(np.zeros(shape, np.uint16), cache, slots)
        plan.run()
        assert plan.workspace_size == plan.bytes_moved == 0
        assert plan.touched() == ((), ())


@pytest.mark.parametrize("shape", [(0, BS, H, DK), (NB, 0, H, DK)])
def test_caches_without_slots(shape: tuple[int, ...]) -> None:
    cache = np.zeros(shape, np.uint16)
    kvcore.scatter_pa_kv_cache(filled(2, H, DK), cache, np.array([-1, INT64_MIN]))
    with pytest.raises(
        kvcore.SlotRangeError, match=r"slot_mapping\[1\]: expected slot < 0 .* got 0"
    ):
        kvcore.scatter_pa_kv_cache(filled(2, H, DK), cache, np.array([-1, 0]))


# ---------------------------------------------------------------- slots


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(
    "slot", [NB * BS, NB * BS + 1, 2**31 - 1, 2**31, 2**32, 2**32 + 5, 2**63 - 1]
)
def test_slot_past_the_cache(scenario: str, slot: int, num_threads: int) -> None:
    made = call(scenario)
    for place in (0, T - 1):
        slots = np.array([1, 2, 3, 4, 5])
        slots[place] = slot
        found = made.refused(
            "slot_mapping",
            rf"^slot_mapping\[{place}\]: expected slot < 12 \(num_blocks 3 \* block_size 4\), "
            rf"got {slot}$",
            kvcore.SlotRangeError,
            slot_mapping=slots,
            num_threads=num_threads,
        )
        assert found.seen == slot
        assert isinstance(found, IndexError)
        if slot < 2**31:
            made.refused("slot_mapping", "", kvcore.SlotRangeError,
                         slot_mapping=slots.astype(np.int32))  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_negative_slots_write_nothing(scenario: str, dtype: type) -> None:
    made = call(scenario)
    least = np.iinfo(dtype).min
    before = made.arena.snapshot()
    made.run(slot_mapping=np.array([-1, -5, least, least + 1, -(2**31)], dtype))
    made.arena.assert_untouched(before)


def test_of_repeated_slots_the_last_token_wins() -> None:
    for scenario in SCENARIOS:
        for num_threads in (1, 2, 3):
            made = call(scenario)
            made.arrays["slot_mapping"][...] = 3
            want = oracle.run("scatter_pa_kv_cache", made.arguments()).outputs
            made.run(num_threads=num_threads)
            for name, expected in want.items():
                np.testing.assert_array_equal(made.arrays[name], expected)


# ---------------------------------------------------------------- each array argument


@pytest.mark.parametrize("name", OPTIONAL)
@pytest.mark.parametrize("thing", [3, [1], "text", object()], ids=lambda x: type(x).__name__)
def test_no_optional_array(name: str, thing: Any) -> None:
    call().refused(name, "array", **{name: thing})


def test_one_value_absent_and_one_not() -> None:
    made = call()
    made.refused("value", "0-d", value=np.array(1))
    made.refused("value_cache", "0-d", value_cache=np.array(1))
    made.refused("value", "got None", kvcore.ParamNullError, value=None, value_cache=np.array(1))


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("name", ARRAYS)
def test_rank(name: str, scenario: str) -> None:
    made = call(scenario)
    own = made.arrays[name]
    if scenario == "nct" and name in ("key", "value"):
        made.refused(name, r"\[T, H, D\]|0-d", **{name: np.array(3, own.dtype)})
        return
    for array in (own[..., 0], own[None, None], np.zeros((), own.dtype)):
        if name.endswith("cache"):
            # One cache has the rank that the other lacks: either may be named.
            with pytest.raises(kvcore.ParamInvalidError, match=r"shape|rank|0-d") as caught:
                made.run(**{name: array})
            assert caught.value.argument in ("key_cache", "value_cache")
        elif name != "slot_mapping" or array.ndim != 1:
            made.refused(name, "shape|rank|0-d|array", **{name: array})


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("name", ["key", "key_cache", "value", "value_cache"])
def test_sizes(name: str, scenario: str) -> None:
    made = call(scenario)
    own = made.arrays[name]
    if scenario == "nct" and name in ("key", "value"):
        made.refused(name, "elements", **{name: own.reshape(-1)[:-1].copy()})
    for axis in range(own.ndim):
        for size in {0, own.shape[axis] - 1, own.shape[axis] + 1}:
            shape = list(own.shape)
            shape[axis] = size
            changed = np.zeros(shape, own.dtype)
            with pytest.raises(kvcore.ParamInvalidError) as caught:
                made.run(**{name: changed})
            assert caught.value.argument in ARRAYS, caught.value


@pytest.mark.parametrize("name", ["key_cache", "value", "value_cache"])
def test_mixed_dtypes(name: str) -> None:
    made = call()
    blames = "value_cache" if name.startswith("value") else name
    found = made.refused(blames, "dtype", **{name: made.arrays[name].astype(np.float16)})
    assert {str(found.seen), str(found.expected).split()[1]} == {"float16", "uint16"}
    made.refused("key_cache", "dtype float16", key=made.arrays["key"].astype(np.float16))


def test_value_lane_of_another_dtype() -> None:
    made = call("norm")
    half = {n: made.arrays[n].astype(np.float16) for n in ("value", "value_cache")}
    made.refused("value", "PA_NZ", **half)


@pytest.mark.parametrize("shape", [(NB, BS, H, 1), (NB, BS, 1, DK), (NB, 1, H, DK), (1, BS, H, DK)])
def test_output_with_zero_strides(shape: tuple[int, ...]) -> None:
    cache = np.zeros(shape, np.uint16)
    wide = as_strided(cache, (NB, BS, H, DK), tuple(
        0 if size == 1 else step for size, step in zip(shape, cache.strides, strict=True)
    ))  # fmt: skip
    call(key_only=True).refused("key_cache", "bytes of their own", key_cache=wide)
    assert not cache.any()


@pytest.mark.parametrize(
    "strides",
    [(8, 4, 2, 2), (256, 64, 30, 2), (256, 62, 32, 2), (200, 64, 32, 2), (256, 64, 32, 1),
     (-200, 64, 32, 2), (256, 64, -30, 2)],
)  # fmt: skip
def test_output_with_folded_strides(strides: tuple[int, ...]) -> None:
    memory = np.zeros(4096, np.uint16)
    cache = as_strided(memory[1024:], (NB, BS, H, DK), strides)
    call(key_only=True).refused("key_cache", "bytes of their own", key_cache=cache)
    assert not memory.any()


def test_output_with_strides_that_interleave() -> None:
    # Axes out of order, backwards and with gaps fold nothing.
    memory = np.zeros(8192, np.uint16)
    for strides in [(32, 96, 576, 2), (-256, 64, 32, 2), (2, 6, 24, 48), (1024, 256, 128, 4)]:
        cache = as_strided(memory[4096:], (NB, BS, H, DK), strides)
        made = call(key_only=True)
        arguments = made.arguments(key_cache=cache)
        want = oracle.run("scatter_pa_kv_cache", arguments).outputs["key_cache"]
        made.function(**arguments)
        np.testing.assert_array_equal(cache, want)
        memory[:] = 0


# ---------------------------------------------------------------- overlap


def over(made: Call, name: str, dtype: str, shape: tuple[int, ...], offset: int = 0) -> np.ndarray:
    """An array over the first bytes of argument ``name``."""
    raw = made.arrays[name].reshape(-1).view(np.uint8)
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return raw[offset : offset + count].view(dtype).reshape(shape)


@pytest.mark.parametrize("cache", ["key_cache", "value_cache"])
@pytest.mark.parametrize("name", ["key", "value"])
def test_input_over_output(name: str, cache: str) -> None:
    for scenario in SCENARIOS:
        made = call(scenario)
        size = {"key": DK, "value": DV}[name]
        large = made.arrays[cache].nbytes
        for offset in (0, large - T * H * size * 2):
            if offset < 0:
                continue
            bad = over(made, cache, "uint16", (T, H, size), offset)
            found = made.refused(cache, f"shared with {name}", **{name: bad})
            assert found.code == 161002


@pytest.mark.parametrize("cache", ["key_cache", "value_cache"])
def test_slots_over_output(cache: str) -> None:
    for dtype in ("int32", "int64"):
        made = call()
        bad = over(made, cache, dtype, (T,), 64)
        made.refused(cache, "shared with slot_mapping", slot_mapping=bad)


def test_output_over_output() -> None:
    made = call()
    wide = made.arrays["value_cache"]
    made.refused("key_cache", "shared with value_cache", key_cache=wide[..., :DK])
    made.refused("key_cache", "shared with value_cache", key_cache=wide[..., DV - DK :])
    same = {"value": made.arrays["key"], "value_cache": made.arrays["key_cache"]}
    made.refused("key_cache", "shared with value_cache", **same)
    # one byte is enough
    memory = np.zeros(4096, np.uint8)
    size = NB * BS * H * DK * 2
    first = memory[:size].view(np.uint16).reshape(NB, BS, H, DK)
    second = memory[size - 1 : 2 * size - 1].view(np.uint16).reshape(NB, BS, H, DK)
    made.refused("key_cache", "shared", key_cache=first, value=made.arrays["key"],
                 value_cache=second)  # fmt: skip


def test_views_that_share_no_byte_may_interleave() -> None:
    made = call()
    slab = np.zeros((NB, 2, BS, H, DK), np.uint16)
    packed = np.zeros((NB, BS, H, DK + DV), np.uint16)
    columns = np.zeros((NB, BS, H, DK, 2), np.uint16)
    fused = filled(T, H, DK + DV)
    for caches, sizes in (
        ((slab[:, 0], slab[:, 1]), (DK, DK)),
        ((packed[..., :DK], packed[..., DK:]), (DK, DV)),
        ((columns[..., 0], columns[..., 1]), (DK, DK)),
        ((slab[:, 0, :, :], slab[::-1, 1]), (DK, DK)),
    ):
        key, value = fused[..., : sizes[0]], fused[..., DK : DK + sizes[1]]
        arguments = made.arguments(key=key, value=value, key_cache=caches[0], value_cache=caches[1])
        want = oracle.run("scatter_pa_kv_cache", arguments).outputs
        made.function(**arguments)
        np.testing.assert_array_equal(caches[0], want["key_cache"])
        np.testing.assert_array_equal(caches[1], want["value_cache"])
    # tokens between the rows of the cache
    rows = np.zeros((NB, 2 * BS, H, DK), np.uint16)
    rows[:, 1::2] = 7
    tokens = rows.reshape(-1, H, DK)[1:10:2]
    kvcore.scatter_pa_kv_cache(tokens, rows[:, ::2], np.arange(T))
    assert (rows.reshape(-1, H, DK)[0:10:2] == 7).all()
    assert not rows[2, ::2].any()


def test_overlap_that_cannot_be_decided_counts_as_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = np.zeros(2**16, np.uint16)
    strides = (9496, 2721, 86, 2)
    cache = as_strided(memory, (3, 4, 2, 16), strides)
    other = as_strided(memory[3693:], (3, 4, 2, 16), strides)
    made = Call(kvcore.scatter_pa_kv_cache, {})
    key = filled(1, 2, 16)
    given = {"key": key, "key_cache": cache, "slot_mapping": np.array([3]), "value": key}
    monkeypatch.setattr(overlap, "MAX_WORK", 1)
    made.refused("key_cache", "shared with value_cache", value_cache=other, **given)
    assert not memory.any()
    monkeypatch.undo()  # with work enough it is proven that they share no byte
    made.run(value_cache=other, **given)
    assert (cache[0, 3] == key[0]).all()
    assert (other[0, 3] == key[0]).all()


def test_inputs_may_overlap_themselves_and_each_other() -> None:
    made = call()
    row = filled(DV)
    key = as_strided(row, (T, H, DK), (0, 0, 2))
    value = as_strided(row, (T, H, DV), (0, 0, 2))
    slots = as_strided(np.array([5]), (T,), (0,))
    check(made, key=key, value=value, slot_mapping=slots)


# ---------------------------------------------------------------- NZ


@pytest.mark.parametrize("scenario", ["nz4", "nz5"])
@pytest.mark.parametrize("size", [1, 8, 15, 17, 24])
def test_nz_head_that_is_no_whole_column(scenario: str, size: int) -> None:
    made = call(scenario, key_only=True)
    cache = np.zeros(cache_shape(scenario, 32), np.uint16)
    made.refused("key", "multiple of 16", key=filled(T, H, size), key_cache=cache)
    # 2 * 8 = 16 elements are one column, but each head has half of it
    half = np.zeros((NB, 1, BS, 16), np.uint16)
    made.refused("key", "multiple of 16", key=filled(T, 2, 8), key_cache=half)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_nz_column_is_32_bytes(dtype: str) -> None:
    c0 = 32 // np.dtype(dtype).itemsize
    key = filled(T, H, 64, dtype=dtype)
    for wrong in (c0 // 2, c0 * 2):
        cache = np.zeros((NB, H * 64 // wrong, BS, wrong), dtype)
        call("nz4", key_only=True).refused("key_cache", "PA_NZ", key=key, key_cache=cache)


# ---------------------------------------------------------------- modes and numbers


@pytest.mark.parametrize("name", ["cache_mode", "scatter_mode"])
@pytest.mark.parametrize(
    "mode",
    ["norm", "NORM", "pa_nz", "PA_NZ ", "ND", "nct", "alibi", 0, 1, True, 2.5, b"Norm", b"None",
     ["Norm"], ("None",), {"Norm"}, ..., np.array(["Norm"]), np.array("Norm"), float],
    ids=repr,
)  # fmt: skip
def test_unknown_mode(name: str, mode: Any) -> None:
    found = call().refused(name, "one of '", **{name: mode})
    assert repr(mode) in str(found)


@pytest.mark.parametrize("name", ["strides", "offsets"])
@pytest.mark.parametrize(
    "numbers",
    [5, 2.5, "12", "ab", b"ab", bytearray(b"ab"), [], [32], [32, 64, 96], [32.0, 64], [True, 64],
     [None, 64], ["32", 64], [[32], [64]], {32, 64}, {32: 64, 64: 32}, np.array([32.0, 64.0]),
     np.array([True, False]), np.array(32), np.array([[32, 64]]), object(), itertools.count(),
     range(10**12), (BadIndex(), 1), (32, 64j), np.zeros(10**6, np.int64)],
    ids=lambda x: type(x).__name__,
)  # fmt: skip
def test_strides_that_are_not_two_integers(name: str, numbers: Any) -> None:
    call("nct").refused(name, "2 integers", **{name: numbers})


def test_strides_out_of_range() -> None:
    made = call("nct")
    for name in ("key", "value"):  # of which no more is known than themselves
        made.arrays[name] = made.arrays[name].copy()
    for bad in (0, -1, -(2**63), 2**63, 2**64 + 32, 10**30):
        for lane in (0, 1):
            numbers = [H * DK, H * DV]
            numbers[lane] = bad
            made.refused("strides", rf"^strides\[{lane}\]: .* got {bad}$", strides=numbers)
    for bad in (-1, -(2**63), 2**63, 2**64, 10**30):
        for lane in (0, 1):
            numbers = [0, 0]
            numbers[lane] = bad
            made.refused("offsets", rf"^offsets\[{lane}\]: .* got {bad}$", offsets=numbers)
    # in range, but past the buffer, also where the product passes 2**63
    for big in (H * DK + 1, 2**31, 2**61, 2**62, 2**63 - 1):
        made.refused("key", "elements", strides=(big, H * DV))
        made.refused("value", "elements", strides=(H * DK, H * DV), offsets=(0, big))
    # one token has no stride
    one = {"slot_mapping": np.array([3]), "value": None, "value_cache": None}
    one["key"] = made.arrays["key"][:1]
    made.run(strides=(2**63 - 1, 1), **one)


def test_dtype_names_raw_arrays_only() -> None:
    made = call()
    kvcore.scatter_pa_kv_cache(**made.arguments(dtype="bfloat16"))
    kvcore.scatter_pa_kv_cache(**made.arguments(dtype=np.dtype(np.float16)))
    kvcore.scatter_pa_kv_cache(**made.arguments(dtype=np.float16))
    made.refused("dtype", "raw unsigned", dtype="float32")
    made.refused("dtype", "raw unsigned", dtype="hifloat8")
    half = {
        n: made.arrays[n].astype(np.float16) for n in ("key", "key_cache", "value", "value_cache")
    }
    made.refused("dtype", "raw unsigned", dtype="bfloat16", **half)
    made.refused("value_dtype", "raw unsigned", value_dtype="float32")
    made.refused("value", "dtype", value_dtype="bfloat16", dtype="float16")


def test_reshape_and_cache_is_the_same_in_another_order() -> None:
    made = call()
    arguments = made.arguments()
    want = oracle.run("scatter_pa_kv_cache", arguments).outputs
    order = ("key", "value", "key_cache", "value_cache", "slot_mapping")
    kvcore.reshape_and_cache(*[made.arrays[n] for n in order], num_threads=2)
    for name, expected in want.items():
        np.testing.assert_array_equal(made.arrays[name], expected)
    with pytest.raises(TypeError, match="nonsense"):
        kvcore.reshape_and_cache(*[made.arrays[n] for n in order], nonsense=1)


# ---------------------------------------------------------------- sizes beyond any memory


def test_sizes_that_no_memory_holds() -> None:
    row = filled(DK)
    many = 2**40
    slots = as_strided(np.array([-1]), (many,), (0,))
    with pytest.raises(MemoryError):
        kvcore.scatter_pa_kv_cache(
            as_strided(row, (many, 1, DK), (0, 0, 2)), np.zeros((1, 1, 1, DK), np.uint16), slots
        )
    # as many as an index array can have
    most = 2**60 - 1
    slots = as_strided(np.array([-1]), (most,), (0,))
    cache = np.zeros((1, 1, 1, 1), np.uint8)
    with pytest.raises(MemoryError):
        kvcore.scatter_pa_kv_cache(
            as_strided(np.zeros(1, np.uint8), (most, 1, 1), (0, 0, 0)), cache, slots
        )


def test_strides_that_leave_the_address_space() -> None:
    made = call(key_only=True)
    for strides in ((2**62, 32, 2), (-(2**62), 32, 2), (2**63 - 1, 32, 2)):
        far = as_strided(filled(DK), (T, H, DK), strides)
        made.refused("key", "address space", key=far, unreadable=True)
        cache = as_strided(np.zeros(DK, np.uint16), (NB, BS, H, DK), (2**62, *strides[:1], 32, 2))
        made.refused("key_cache", "address space", key_cache=cache, unreadable=True)
    # of an axis of one, or of an array without elements, a stride means nothing
    key = as_strided(filled(H, DK), (1, H, DK), (2**63 - 1, 32, 2))
    cache = as_strided(np.zeros((BS, H, DK), np.uint16), (1, BS, H, DK), (-(2**62), 64, 32, 2))
    kvcore.scatter_pa_kv_cache(key, cache, as_strided(np.array([2]), (1,), (2**62,)))
    assert (cache[0, 2] == key[0]).all()
    empty = as_strided(np.zeros(0, np.uint16), (0, BS, H, DK), (2**62, 2**62, 2**62, 2**62))
    kvcore.scatter_pa_kv_cache(key, empty, np.array([-1]))
    nothing = as_strided(np.zeros(0, np.uint16), (0, H, DK), (2**62, 2**62, 2**62))
    kvcore.scatter_pa_kv_cache(nothing, cache, np.zeros(0, np.int32))


def test_more_than_eight_axes() -> None:
    made = call("nct")
    deep = made.arrays["key"].reshape((1,) * 6 + (T, H, DK))
    made.refused("key", "8 axes", key=deep)
    made.run(key=made.arrays["key"].reshape((1,) * 5 + (T, H, DK)))
