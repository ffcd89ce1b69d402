# SPDX-License-Identifier: Apache-2.0
"""What a SoC would do differently: a KVPortabilityWarning, never an error."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore.errors import KVPortabilityWarning
from soc_calls import NAMES, OLDER, arguments

Array = np.ndarray[Any, Any]


def texts(soc: str, variant: str, dtype: str = "float16", **sizes: Any) -> tuple[str, ...]:
    """What that SoC, which runs the call, warns of; shapes alone."""
    scenario = kvcore.scenario_of(**arguments(variant, dtype, **sizes))
    assert scenario.runs[soc] is None
    found = scenario.warnings.get(soc, ())
    assert all(text.startswith(f"{soc}: ") for text in found)
    return found


def given(call: Callable[[], object]) -> list[str]:
    """The portability warnings of a call, which must point at this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    for one in caught:
        assert one.category is KVPortabilityWarning
        assert one.filename == __file__
    return [str(one.message) for one in caught]


# ---------------------------------------------------------------- usual calls
@pytest.mark.parametrize("variant", ["1", "2", "2 Nct", "4", "5 Rope", "5 Omni", "6", "7"])
@pytest.mark.parametrize("soc", OLDER)
def test_usual_calls_give_no_warning_on_older_socs(soc: str, variant: str) -> None:
    assert texts(soc, variant) == ()


@pytest.mark.parametrize("variant", ["1", "2", "2 Nct", "3 Alibi", "3 Rope", "3 Omni"])
def test_usual_calls_give_no_warning_on_950(variant: str) -> None:
    assert texts("950", variant) == ()


def test_without_a_soc_there_is_no_warning() -> None:
    key = np.ones((2, 4, 16), np.float16)[:, ::2]
    cache = np.zeros((1, 4, 2, 16), np.float16)
    kvcore.scatter_pa_kv_cache(key, cache, np.array([-1, 0]))


# ---------------------------------------------------------------- compression, A2 and A3
@pytest.mark.parametrize("variant", ["4", "5 Rope", "5 Omni"])
@pytest.mark.parametrize("soc", OLDER)
def test_compression_assumes_equal_head_sizes(soc: str, variant: str) -> None:
    assert texts(soc, variant, size=64, value_size=64) == ()
    assert [*texts(soc, variant, size=64, value_size=32)] == [
        f"{soc}: the compression kernels take the key's head size 64 for the value too, "
        "which has 32"
    ]


@pytest.mark.parametrize("size", [16, 33, 48, 65])
@pytest.mark.parametrize("variant", ["4", "5 Rope", "5 Omni"])
@pytest.mark.parametrize("soc", OLDER)
def test_compression_assumes_head_sizes_in_32s(soc: str, variant: str, size: int) -> None:
    assert texts(soc, variant, size=96) == ()
    (text,) = texts(soc, variant, size=size)
    assert text.endswith(f"assume head sizes that are multiples of 32; key has {size}")


@pytest.mark.parametrize("variant", ["4", "5 Rope", "5 Omni"])
@pytest.mark.parametrize("soc", OLDER)
def test_compression_reads_int32(soc: str, variant: str) -> None:
    assert texts(soc, variant, index="int32") == ()
    (text,) = texts(soc, variant, index="int64")
    assert text.endswith("the compression kernels read int32 indices, and these are int64")


@pytest.mark.parametrize("mode", ["Rope", "Omni"])
@pytest.mark.parametrize("soc", OLDER)
def test_means_have_room_for_16384(soc: str, mode: str) -> None:
    assert texts(soc, f"5 {mode}", size=16384) == ()
    (text,) = texts(soc, f"5 {mode}", size=16416)
    assert text == f"{soc}: the {mode} kernel has room for head sizes up to 16384, not 16416"
    assert texts(soc, "4", size=16416) == ()


# ---------------------------------------------------------------- NHSD, A2 and A3
@pytest.mark.parametrize("soc", OLDER)
def test_the_tiling_of_nhsd_keeps_a_kilobyte(soc: str) -> None:
    assert texts(soc, "7", heads=1, size=48896, value_size=48896) == ()  # 195584 bytes
    for value_size in (48912, 49136 + 48):  # 195616 and 196160 bytes
        (text,) = texts(soc, "7", heads=1, size=48896, value_size=value_size)
        total = 2 * (48896 + value_size)
        assert f"refuses {total} bytes in the key and value of a token (most: 195584)" in text


# ---------------------------------------------------------------- 950
@pytest.mark.parametrize("variant", ["4", "5 Rope", "5 Omni"])
def test_950_refuses_compression_of_3d_keys(variant: str) -> None:
    assert texts("950", variant) == (
        f"950: the tiling of today refuses compression with a 3-D key (scenario {variant[0]})",
    )


@pytest.mark.parametrize("lane", [0, 1])
def test_950_bounds_the_end_of_nct(lane: int) -> None:
    # T 4, H 2, D 32: T * stride + offset <= (T-1) * H * D = 192.
    call = arguments("2 Nct")  # a pair [T, H, D] may be the view of a buffer of any length

    def found(stride: int, offset: int) -> tuple[str, ...]:
        strides, offsets = [1, 1], [0, 0]
        strides[lane], offsets[lane] = stride, offset
        scenario = kvcore.scenario_of(**call | {"strides": strides, "offsets": offsets})
        assert scenario.runs["950"] is None
        assert "A3" not in scenario.warnings
        return scenario.warnings.get("950", ())

    name = ("key", "value")[lane]
    for stride, offset in ((48, 0), (47, 4)):
        assert found(stride, offset) == ()
    for stride, offset, end in ((48, 1, 193), (49, 0, 196), (64, 0, 256)):
        (text,) = found(stride, offset)
        assert text.endswith(f"for {name} {end} > 192")


# ---------------------------------------------------------------- strided views
def lane_arrays(kind: str, number: int) -> tuple[Array, Array, Array, Array]:
    """(key, key_cache, value, value_cache) of 3 tokens, 2 heads of 16, with one kind of stride."""
    tokens, heads, size, blocks, rows = 3, 2, 16, 4, 8
    shape = (blocks, heads * size // 16, rows, 16) if number == 1 else (blocks, rows, heads, size)
    key, value = np.ones((2, tokens, heads, size), np.float16)
    key_cache, value_cache = np.zeros((2, *shape), np.float16)
    if kind == "packed key":  # a slice of fused q, k and v
        key = np.ones((tokens, 3 * heads, size), np.float16)[:, heads : 2 * heads]
    elif kind == "wide value rows":
        value = np.ones((tokens, heads, size + 4), np.float16)[..., :size]
    elif kind == "reversed key":
        key = key[::-1]
    elif kind == "one key for all":
        key = np.broadcast_to(key[:1], key.shape)
    elif kind == "blocks in a slab":  # kv[:, 0] and kv[:, 1]
        both = np.zeros((blocks, 2, *shape[1:]), np.float16)
        key_cache, value_cache = both[:, 0], both[:, 1]
    elif kind == "wide cache rows":
        key_cache = np.zeros((*shape[:-1], 20), np.float16)[..., :16]
    elif kind == "every second cache row":
        value_cache = np.zeros((blocks, 2 * shape[1], *shape[2:]), np.float16)[:, ::2]
    elif kind == "every second item":  # copied by the vendor's call, and so right
        key = np.ones((tokens, heads, 2 * size), np.float16)[..., ::2]
        value_cache = np.zeros((*shape[:-1], 20), np.float16)[..., :16]
    else:
        assert kind == "contiguous"
    return key, key_cache, value, value_cache


KINDS = {
    "contiguous": None,
    "packed key": "key",
    "wide value rows": "value",
    "reversed key": "key",
    "one key for all": "key",
    "wide cache rows": "key_cache",
    "every second cache row": "value_cache",
    "every second item": None,
}
MODES = {1: {"cache_mode": "PA_NZ"}, 2: {}, 6: {}}


def strided_call(soc: str, kind: str, number: int, **modes: Any) -> list[str]:
    key, key_cache, value, value_cache = lane_arrays(kind, number)
    values = () if number == 6 else (value, value_cache)
    return given(
        lambda: kvcore.scatter_pa_kv_cache(
            key, key_cache, np.array([0, 5, 9]), *values, soc=soc, **MODES[number], **modes
        )
    )


@pytest.mark.parametrize("number", [1, 2, 6])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("soc", OLDER)
def test_older_socs_ignore_most_strides(soc: str, kind: str, number: int) -> None:
    found = strided_call(soc, kind, number)
    argument = KINDS[kind]
    if argument is None or (number == 6 and argument.startswith("value")):
        assert found == []
    elif "cache" in argument:
        (text,) = found
        honoured = "only the first axis' stride" if number == 2 else "no stride"
        assert text.startswith(
            f"{soc}: the kernel honours {honoured} of {argument} in scenario {number} "
        )
    else:
        (text,) = found
        assert text.startswith(f"{soc}: the kernel ignores the strides of {argument} ")


@pytest.mark.parametrize("soc", OLDER)
def test_older_socs_honour_the_first_axis_of_caches_in_scenario_2_only(soc: str) -> None:
    assert strided_call(soc, "blocks in a slab", 2) == []
    assert len(strided_call(soc, "blocks in a slab", 6)) == 1
    assert len(strided_call(soc, "blocks in a slab", 1)) == 2  # both caches


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("kind", [*KINDS, "blocks in a slab"])
def test_950_honours_strides(kind: str, number: int) -> None:
    assert strided_call("950", kind, number) == []


@pytest.mark.parametrize("soc", OLDER)
def test_modes_that_copy_to_dense_arrays_first_ignore_no_stride(soc: str) -> None:
    # A named mode under PA_NZ means nothing to the operator, but decides how views are passed.
    assert strided_call(soc, "packed key", 1, scatter_mode="Alibi") == []
    key, cache = np.ones((3, 4, 16), np.float16)[:, ::2], np.zeros((4, 2, 8, 16), np.float16)
    values = (np.ones((3, 2, 16), np.float16), cache.copy())
    slots = np.array([0, 5, 9])
    call = lambda: kvcore.scatter_pa_kv_cache(  # noqa: E731
        key, cache, slots, *values, scatter_mode="NHSD", soc=soc
    )
    assert given(call) == []


@pytest.mark.parametrize("soc", OLDER)
def test_axes_of_one_have_no_stride_that_counts(soc: str) -> None:
    key = np.ones((1, 4, 2, 16), np.float16)[:, 0]
    cache = np.zeros((4, 1, 3, 2, 16), np.float16)[:, :, 1]
    assert key.shape == (1, 2, 16)
    assert (
        given(
            lambda: kvcore.scatter_pa_kv_cache(
                key, cache, np.array([0]), key, cache.copy(), soc=soc
            )
        )
        == []
    )


# ---------------------------------------------------------------- contents: NHSD
def nhsd_arrays() -> tuple[Array, ...]:
    key, value = np.ones((2, 3, 2, 16), np.float16)
    key_cache, value_cache = np.zeros((2, 4, 2, 8, 16), np.float16)
    return key, key_cache, np.array([0, 5, 9]), value, value_cache


@pytest.mark.parametrize("soc", OLDER)
def test_a_negative_slot_in_nhsd(soc: str) -> None:
    key, key_cache, slots, value, value_cache = nhsd_arrays()

    def call() -> None:
        kvcore.scatter_pa_kv_cache(
            key, key_cache, slots, value, value_cache, scatter_mode="NHSD", soc=soc
        )

    assert given(call) == []
    slots[1:] = (-7, -1)
    assert given(call) == [
        f"{soc}: slot_mapping[1] = -7 is not skipped: it writes in front of the cache (scenario 7)"
    ]
    assert key_cache[0, :, 0].all()
    assert key_cache.sum() == 3 * 2 * 16  # three slots were written by the two calls


@pytest.mark.parametrize(
    ("soc", "variant"), [(s, v) for s in NAMES for v in "126" if (s, v) != ("950", "6")]
)
def test_a_negative_slot_is_skipped_by_every_kernel_elsewhere(soc: str, variant: str) -> None:
    key, key_cache, value, value_cache = lane_arrays("contiguous", int(variant))
    values = () if variant == "6" else (value, value_cache)
    mode = MODES[int(variant)]
    slots = np.array([-1, 5, -9])
    assert (
        given(lambda: kvcore.scatter_pa_kv_cache(key, key_cache, slots, *values, soc=soc, **mode))
        == []
    )


# ---------------------------------------------------------------- contents: compression
class Windows:
    """Two requests of 4 tokens, two heads of 32, one run for each (batch, head)."""

    def __init__(self, variant: str) -> None:
        number, _, self.mode = variant.partition(" ")
        self.mode = self.mode or "Alibi"
        shape = (2, 4, 2, 32) if number == "3" else (8, 2, 32)
        runs = (2, 2) if number == "3" else (4,)
        self.lanes = [np.ones(shape, np.float16), np.zeros((8, 8, 1, 32), np.float16)]
        self.lanes += [array.copy() for array in self.lanes]
        self.slots = np.array([0, 8, 16, 24], np.int32).reshape(runs)
        self.windows = np.full(4, 2, np.int32)
        self.starts = np.full(4, 1, np.int32)
        self.lengths = np.full(2, 4, np.int32)

    def warned(self, soc: str | None, **lists: tuple[int, ...]) -> list[str]:
        """The warnings of a call with other contents, but for those that shapes decide."""
        for name, values in lists.items():
            array = getattr(self, name)
            array.reshape(-1)[:] = values
        found = given(
            lambda: kvcore.scatter_pa_kv_cache(
                self.lanes[0],
                self.lanes[1],
                self.slots,
                self.lanes[2],
                self.lanes[3],
                compress_lens=self.windows,
                compress_seq_offset=None if self.mode == "Alibi" else self.starts,
                seq_lens=self.lengths,
                scatter_mode=self.mode,
                soc=soc,
            )
        )
        return [text for text in found if "tiling of today" not in text]


@pytest.mark.parametrize("variant", ["4", "5 Rope", "5 Omni"])
@pytest.mark.parametrize("soc", OLDER)
def test_a_negative_slot_in_compression_of_older_socs(soc: str, variant: str) -> None:
    call = Windows(variant)
    assert call.warned(soc) == []
    assert call.warned(None, slots=(0, 8, -3, -1)) == []
    assert call.warned(soc) == [
        f"{soc}: slot_mapping[2] = -3 is not skipped: it writes in front of the cache "
        f"(scenario {variant[0]})"
    ]


@pytest.mark.parametrize("variant", ["3 Alibi", "3 Rope", "3 Omni"])
def test_a_negative_slot_in_scenario_3_of_the_950(variant: str) -> None:
    call = Windows(variant)
    assert call.warned("950") == []
    assert call.warned("950", slots=(0, -1, 8, -1)) == [
        "950: slot_mapping[1] = -1 skips single rows of its run, not the run (scenario 3)"
    ]


@pytest.mark.parametrize(
    ("variant", "soc", "empty"),
    [
        ("4", "A2", {"windows": (2, 0, 2, 2)}),
        ("5 Omni", "A3", {"windows": (2, 3, 2, 2), "starts": (1, 0, 0, 1), "lengths": (3, 4)}),
        ("3 Alibi", "950", {"windows": (2, 0, 2, 2)}),
        ("3 Omni", "950", {"windows": (2, 4, 2, 2), "starts": (1, 0, 1, 1)}),
    ],
)
def test_a_negative_slot_of_a_run_without_rows(
    variant: str, soc: str, empty: dict[str, tuple[int, ...]]
) -> None:
    call = Windows(variant)
    if variant == "5 Omni":
        call.lanes[0], call.lanes[2] = call.lanes[0][:7], call.lanes[2][:7]
    assert call.warned(soc, slots=(0, -1, 8, 16), **empty) == []


@pytest.mark.parametrize("mode", ["Rope", "Omni"])
def test_the_950_expects_windows_and_their_starts(mode: str) -> None:
    call = Windows(f"3 {mode}")
    assert call.warned("950", windows=(1, 4, 1, 2), starts=(0, 0, 3, 2)) == []
    assert call.warned("950", windows=(1, 1, 0, 0)) == [
        f"950: compress_lens[2] = 0, and the {mode} kernel expects it >= 1"
    ]
    assert call.warned("950", windows=(1, 1, 1, 1), starts=(0, -1, -1, 0)) == [
        f"950: compress_seq_offset[1] = -1, and the {mode} kernel expects it >= 0"
    ]


@pytest.mark.parametrize("mode", ["Rope", "Omni"])
@pytest.mark.parametrize("soc", OLDER)
def test_older_socs_know_empty_windows_and_no_compression(soc: str, mode: str) -> None:
    call = Windows(f"5 {mode}")
    assert call.warned(soc, windows=(0, 0, 1, 4), starts=(0, 4, -1, 0)) == []


def test_windows_of_alibi_may_be_empty() -> None:
    assert Windows("3 Alibi").warned("950", windows=(0, 0, 0, 0)) == []


def test_a_quirk_changes_no_byte() -> None:
    call, plain = Windows("3 Rope"), Windows("3 Rope")
    contents = {"slots": (0, -1, 8, 16), "windows": (0, 1, 2, 4), "starts": (1, 0, -1, 0)}
    assert len(call.warned("950", **contents)) == 3
    assert plain.warned(None, **contents) == []
    np.testing.assert_array_equal(call.lanes[1], plain.lanes[1])
    np.testing.assert_array_equal(call.lanes[3], plain.lanes[3])
    assert call.lanes[1].any()


# ---------------------------------------------------------------- how they are given
def test_shapes_warn_when_the_plan_is_made_and_contents_when_it_runs() -> None:
    key, key_cache, slots, value, value_cache = nhsd_arrays()
    wide = np.ones((3, 4, 16), np.float16)[:, ::2]
    arrays = (wide, key_cache.swapaxes(1, 2).copy(), slots, value, value_cache)
    plan = kvcore.plan_scatter_pa_kv_cache
    with pytest.warns(KVPortabilityWarning, match="ignores the strides of key"):
        made = plan(arrays[0], np.zeros((4, 8, 2, 16), np.float16), slots, soc="A3")
    assert given(made.run) == []

    nhsd = plan(key, key_cache, slots, value, value_cache, scatter_mode="NHSD", soc="A3")
    assert given(nhsd.run) == []
    slots[0] = -1
    assert len(given(nhsd.run)) == 1
    assert len(given(nhsd.run)) == 1  # each run anew


def test_one_warning_a_call_even_for_a_remembered_signature() -> None:
    for _ in range(3):
        assert len(strided_call("A3", "packed key", 2)) == 1


@pytest.mark.parametrize("made", [kvcore.scatter_pa_kv_cache, kvcore.plan_scatter_pa_kv_cache])
def test_a_warning_points_at_the_line_of_the_caller(made: Callable[..., object]) -> None:
    key, key_cache, _, _ = lane_arrays("packed key", 6)
    call = lambda: made(key, key_cache, np.array([0, 1, 2]), soc="A2")  # noqa: E731
    with pytest.warns(KVPortabilityWarning) as caught:
        call()
    line = call.__code__.co_firstlineno
    assert [(one.filename, one.lineno) for one in caught] == [(__file__, line)]


@pytest.mark.parametrize("name", [{}, {"__name__": 3}, {"__name__": "theirs"}])
def test_a_warning_points_at_code_of_any_module(name: dict[str, object]) -> None:
    key, key_cache, _, _ = lane_arrays("packed key", 6)
    text = "\ncall(key, cache, slots, soc='A2')"
    scope = {"call": kvcore.scatter_pa_kv_cache, "key": key, "cache": key_cache, **name}
    with pytest.warns(KVPortabilityWarning) as caught:
        exec(compile(text, "executed", "exec"), {**scope, "slots": np.array([0, 1, 2])})
    assert [(one.filename, one.lineno) for one in caught] == [("executed", 2)]


@pytest.mark.parametrize("by", ["shape", "value"])
def test_a_warning_made_an_error_writes_nothing(by: str) -> None:
    key, key_cache, slots, value, value_cache = nhsd_arrays()
    mode = "NHSD"
    if by == "shape":
        key, key_cache, value, value_cache = lane_arrays("packed key", 2)
        mode = "None"
    slots[2] = -1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KVPortabilityWarning):
            kvcore.scatter_pa_kv_cache(
                key, key_cache, slots, value, value_cache, scatter_mode=mode, soc="A2"
            )
    assert not key_cache.any()
    assert not value_cache.any()


def test_values_that_are_wrong_raise_and_do_not_warn() -> None:
    key, key_cache, slots, value, value_cache = nhsd_arrays()
    slots[:] = (-1, 32, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(kvcore.SlotRangeError):
            kvcore.scatter_pa_kv_cache(
                key, key_cache, slots, value, value_cache, scatter_mode="NHSD", soc="A2"
            )


def test_use_soc_and_the_environment_warn_too(monkeypatch: pytest.MonkeyPatch) -> None:
    key, key_cache, _, _ = lane_arrays("packed key", 6)
    call = lambda: kvcore.scatter_pa_kv_cache(key, key_cache, np.array([0, 1, 2]))  # noqa: E731
    assert given(call) == []
    with kvcore.use_soc("A3"):
        (text,) = given(call)
    assert text.startswith("A3: ")
    monkeypatch.setenv("KVCORE_SOC", "A2")
    (text,) = given(call)
    assert text.startswith("A2: ")
