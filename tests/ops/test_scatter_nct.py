# SPDX-License-Identifier: Apache-2.0
"""Nct: key and value are views [T, H, D] of a fused buffer, counted from their first element."""

from __future__ import annotations

import gc
import mmap
from typing import Any

import numpy as np
import pytest

import kvcore
import oracle
from kvcore.errors import ParamInvalidError
from oracle_numbers import Array
from soc_calls import NAMES, OLDER
from tensors import WITHOUT_TORCH

T, H, DK, DV, NB, BS = 5, 2, 16, 8, 3, 4
WIDTH = H * (DK + DK + DV)  # of a token's query, key and value
SLOTS = [7, -1, 0, 11, 3]


def fused_tokens() -> Array:
    return np.arange(1, T * WIDTH + 1, dtype=np.float16).reshape(T, WIDTH)


def views(fused: Any) -> tuple[Any, Any]:
    """Key and value as documents have them: slices of each token's row."""
    key = fused[:, H * DK : 2 * H * DK].reshape(T, H, DK)
    value = fused[:, 2 * H * DK :].reshape(T, H, DV)
    return key, value


def call(**changed: Any) -> dict[str, Any]:
    """Legal: the views' own strides, said in elements."""
    key, value = views(fused_tokens())
    found = {
        "key": key,
        "key_cache": np.zeros((NB, BS, H, DK), np.float16),
        "slot_mapping": np.array(SLOTS, np.int32),
        "value": value,
        "value_cache": np.zeros((NB, BS, H, DV), np.float16),
        "scatter_mode": "Nct",
        "strides": (WIDTH, WIDTH),
        "offsets": (0, 0),
    }
    return found | changed


def check(given: dict[str, Any], **more: Any) -> None:
    """It writes what the oracle says."""
    assert oracle.violations("scatter_pa_kv_cache", given) == []
    want = oracle.run("scatter_pa_kv_cache", given).outputs
    kvcore.scatter_pa_kv_cache(**given, **more)
    for name, expected in want.items():
        np.testing.assert_array_equal(given[name], expected)


def check_refused(given: dict[str, Any], argument: str, *words: str, **more: Any) -> None:
    """The error names the argument and holds the words; nothing is written."""
    with pytest.raises(ParamInvalidError) as caught:
        kvcore.scatter_pa_kv_cache(**given, **more)
    assert caught.value.argument == argument, caught.value
    for one in (argument, ": expected ", ", got ", *words):
        assert one in str(caught.value), caught.value
    for name in ("key_cache", "value_cache"):
        if given.get(name) is not None:
            assert not np.asarray(given[name]).any()


def is_right(key_cache: Any, value_cache: Any) -> None:
    """What call() writes, worked out by hand."""
    key, value = views(fused_tokens())
    for cache, tokens in ((key_cache, key), (value_cache, value)):
        want = np.zeros((NB * BS, *tokens.shape[1:]), np.float16)
        for slot, token in zip(SLOTS, tokens, strict=True):
            if slot >= 0:
                want[slot] = token
        np.testing.assert_array_equal(np.asarray(cache).reshape(want.shape), want)


# ---------------------------------------------------------------- what is read
@pytest.mark.parametrize("soc", [None, *OLDER])
def test_views_of_a_fused_buffer(soc: str | None) -> None:
    given = call()
    check(given, soc=soc)
    is_right(given["key_cache"], given["value_cache"])


@pytest.mark.parametrize("soc", [None, *OLDER])
def test_offsets_count_from_the_views_first_element(soc: str | None) -> None:
    # Both begin at the queries; offsets lead to keys and values.
    whole = fused_tokens().reshape(-1)
    key = whole[: T * H * DK].reshape(T, H, DK)
    value = whole[: T * H * DV].reshape(T, H, DV)
    given = call(key=key, value=value, offsets=(H * DK, 2 * H * DK))
    check(given, soc=soc)
    is_right(given["key_cache"], given["value_cache"])


def test_the_views_own_strides_mean_nothing() -> None:
    fused = fused_tokens()
    for key in (
        fused[:, H * DK : 2 * H * DK].reshape(T, DK, H).swapaxes(1, 2),
        np.broadcast_to(fused[0, H * DK : H * DK + 1], (T, H, DK)),
        fused.reshape(-1)[H * DK :][: T * H * DK].reshape(T, H, DK),
    ):
        given = call(key=key, value=None, value_cache=None)
        if isinstance(key.base, np.ndarray):
            check(given)
            is_right_key = np.zeros((NB * BS, H, DK), np.float16)
            for slot, token in zip(SLOTS, views(fused)[0], strict=True):
                if slot >= 0:
                    is_right_key[slot] = token
            np.testing.assert_array_equal(given["key_cache"].reshape(-1, H, DK), is_right_key)


@pytest.mark.parametrize("soc", [None, *OLDER])
def test_strides_and_offsets_default_to_the_documents(soc: str | None) -> None:
    given = call()
    del given["strides"], given["offsets"]
    check(given, soc=soc)
    first = views(fused_tokens())[0].reshape(-1)  # a copy
    flat = fused_tokens().reshape(-1)[H * DK :]
    assert (first[:3] == flat[:3]).all()
    # Token i begins i elements behind the first.
    np.testing.assert_array_equal(given["key_cache"][1, 3].reshape(-1), flat[: H * DK])
    np.testing.assert_array_equal(given["key_cache"][2, 3].reshape(-1), flat[3 : 3 + H * DK])
    given = call(strides=(2, 2))
    del given["offsets"]
    check(given)
    given = call(offsets=(3, 1))
    del given["strides"]
    check(given)


def test_a_flat_buffer_is_taken_without_a_soc() -> None:
    for shape in ((T * WIDTH,), (T, WIDTH), (T, 1, 5, WIDTH // 5)):
        flat = fused_tokens().reshape(shape)
        given = call(key=flat, value=flat, offsets=(H * DK, 2 * H * DK))
        check(given)
        is_right(given["key_cache"], given["value_cache"])


@pytest.mark.parametrize("lane", ["key", "value"])
@pytest.mark.parametrize("soc", NAMES)
def test_a_flat_buffer_is_refused_under_every_soc(soc: str, lane: str) -> None:
    flat = fused_tokens()
    for buffer in (flat, flat.reshape(-1), flat.reshape(T, 2, 2, -1)):
        offsets = (H * DK, 0) if lane == "key" else (0, 2 * H * DK)
        size = DK if lane == "key" else DV
        given = call(**{lane: buffer, "offsets": offsets})
        check_refused(given, lane, f"shape [{T}, {H}, {size}]", f"in Nct on {soc}", soc=soc)


@pytest.mark.parametrize("soc", [None, *NAMES])
@pytest.mark.parametrize(
    "shape", [(T, H + 1, DK), (T + 1, H, DK), (T - 1, H, DK), (T, H, DK - 1), (T, H * DK, 1)]
)
def test_wrong_tokens_heads_and_head_sizes(shape: tuple[int, ...], soc: str | None) -> None:
    given = call(key=np.zeros((64 * WIDTH,), np.float16)[: np.prod(shape)].reshape(shape))
    words = (f"shape [{T}, {H}, {DK}] ([T, H, D] in Nct", f"got {list(shape)}")
    check_refused(given, "key", *words, soc=soc)


@pytest.mark.parametrize("rank", [0, 1, 2, 4])
def test_strided_arrays_of_other_ranks_are_no_buffers(rank: int) -> None:
    shape = (3,) * rank
    array = np.zeros((*shape, 2), np.float16)[..., 0]
    check_refused(call(key=array), "key", "[T, H, D]", "C-contiguous buffer")


def test_the_slots_say_how_many_tokens_there_are() -> None:
    for count in (T - 1, T + 1):
        given = call(slot_mapping=np.zeros(count, np.int32))
        check_refused(given, "key", f"[{count}, {H}, {DK}]", "T of slot_mapping")


# ---------------------------------------------------------------- memory that is known
def test_the_chain_of_ndarrays_is_known_memory() -> None:
    whole = np.arange(T * WIDTH, dtype=np.float16)
    key = whole[H * DK :][: T * H * DK].reshape(T, H, DK)
    last = T * WIDTH - H * DK - (T - 1) * WIDTH - H * DK  # what is left behind the last token
    given = call(key=key, value=None, value_cache=None, offsets=(last, 0))
    check(given)
    given = call(key=key, value=None, value_cache=None, offsets=(last + 1, 0))
    needed = last + 1 + (T - 1) * WIDTH + H * DK
    check_refused(given, "key", f"at least {needed} elements", f"got {needed - 1}")


def test_the_token_of_a_negative_slot_must_lie_in_memory_too() -> None:
    given = call(slot_mapping=np.array([0, 1, 2, 3, -1], np.int32))
    given |= {"key": given["key"].copy(), "strides": (H * DK, WIDTH)}
    check(given)
    given = call(slot_mapping=np.array([0, 1, 2, 3, -1], np.int32))
    given |= {"key": given["key"].copy(), "strides": (H * DK + 1, WIDTH)}
    check_refused(given, "key", "elements")


class Interface:
    """Memory of somebody who says no more of it than __array_interface__ holds."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__


@pytest.mark.parametrize("kind", ["memoryview", "bytes", "mmap", "interface", "copy"])
def test_of_other_memory_the_views_own_extent_is_known(kind: str) -> None:
    tokens = views(fused_tokens())[0]
    raw = np.ascontiguousarray(tokens)
    key: Any
    if kind == "memoryview":
        key = np.ndarray((T, H, DK), np.float16, buffer=bytearray(2 * raw.tobytes()))
    elif kind == "bytes":
        key = np.frombuffer(2 * raw.tobytes(), np.float16, count=raw.size).reshape(T, H, DK)
    elif kind == "mmap":
        room = mmap.mmap(-1, 4 * raw.nbytes)
        room[: raw.nbytes] = raw.tobytes()
        key = np.ndarray((T, H, DK), np.float16, buffer=room)
    elif kind == "interface":
        key = Interface(np.concatenate([raw, raw])[:T])
    else:
        key = raw
    given = call(key=key, value=None, value_cache=None, strides=(H * DK, 1))
    kvcore.scatter_pa_kv_cache(**given)
    np.testing.assert_array_equal(given["key_cache"][1, 3], tokens[0])
    del given["key_cache"]
    cache = np.zeros((NB, BS, H, DK), np.float16)
    check_refused(given | {"offsets": (1, 0), "key_cache": cache}, "key", "elements")
    check_refused(given | {"strides": (H * DK + 1, 1), "key_cache": cache}, "key", "elements")


def test_a_read_only_buffer_is_read() -> None:
    fused = fused_tokens()
    fused.flags.writeable = False
    key, value = views(fused)
    check(call(key=key, value=value))


def test_a_subclass_cannot_make_memory_longer() -> None:
    class Liar(np.ndarray):  # type: ignore[type-arg]
        @property
        def base(self) -> Any:  # type: ignore[override]
            return np.zeros(1 << 20, np.float16)

        def __getattribute__(self, name: str) -> Any:
            if name == "nbytes":
                return 1 << 40
            return super().__getattribute__(name)

    key = np.zeros((T, H, DK), np.float16).view(Liar)
    given = call(key=key, value=None, value_cache=None, strides=(H * DK, 1))
    kvcore.scatter_pa_kv_cache(**given)
    check_refused(given | {"offsets": (1, 0)}, "key", "elements")


def test_numbers_that_no_memory_holds() -> None:
    for big in (2**31, 2**61, 2**62, 2**63 - 1):
        check_refused(call(strides=(big, WIDTH)), "key", "elements")
        check_refused(call(offsets=(0, big)), "value", "elements")
        check_refused(call(key=fused_tokens(), strides=(big, WIDTH)), "key", "elements")


def test_without_tokens_or_bytes_no_memory_is_needed() -> None:
    nothing = np.zeros((0, H, DK), np.float16), np.zeros((0, H, DV), np.float16)
    given = call(key=nothing[0], value=nothing[1], slot_mapping=np.zeros(0, np.int32))
    check(given | {"strides": (2**62, 2**62), "offsets": (2**62, 2**62)})
    empty = np.zeros((T, H, 0), np.float16), np.zeros((NB, BS, H, 0), np.float16)
    lanes = {"key": empty[0], "value": empty[0], "key_cache": empty[1]}
    kvcore.scatter_pa_kv_cache(**call(**lanes, value_cache=empty[1].copy(), offsets=(9, 9)))


# ---------------------------------------------------------------- overlap and plans
def test_a_cache_among_the_tokens_that_are_read_is_refused() -> None:
    cells = NB * BS * H * DK
    slab = np.zeros(T * WIDTH + cells, np.float16)
    for start in (0, WIDTH, (T - 1) * WIDTH + H * DK - 1):
        cache = slab[start : start + cells].reshape(NB, BS, H, DK)
        key = slab[: T * H * DK].reshape(T, H, DK)
        lane = {"value": None, "value_cache": None, "key_cache": cache}
        check_refused(call(key=key, **lane, offsets=(0, 0)), "key_cache", "shared with key")
    # One element behind the last token it shares none.
    cache = slab[(T - 1) * WIDTH + H * DK :][:cells].reshape(NB, BS, H, DK)
    check(call(key=key, value=None, value_cache=None, key_cache=cache))


def test_a_cache_between_the_tokens_is_fine() -> None:
    slab = np.zeros((T, 2 * WIDTH), np.float16)
    slab[:, :WIDTH] = fused_tokens()
    cache = slab[:, WIDTH : WIDTH + H * DK].reshape(T, 1, H, DK)
    given = call(key=slab[:, : H * DK].reshape(T, H, DK), value=None, value_cache=None)
    given |= {"key_cache": cache, "slot_mapping": np.array([4, 3, 2, 1, 0])}
    given["strides"] = (2 * WIDTH, 1)
    want = slab.copy()
    want[:, WIDTH : WIDTH + H * DK] = slab[::-1, : H * DK]
    kvcore.scatter_pa_kv_cache(**given)
    np.testing.assert_array_equal(slab, want)


def test_a_plan_tells_what_it_reads() -> None:
    given = call(offsets=(3, 0), strides=(WIDTH - 2, WIDTH))
    plan = kvcore.plan_scatter_pa_kv_cache(**given)
    first = given["key"].ctypes.data + 2 * 3
    spans = {one.argument: one.ranges.tolist() for one in plan.reads}
    assert spans["key"] == [[first, first + 2 * ((T - 1) * (WIDTH - 2) + H * DK)]]
    plan.run()
    touched = {one.argument: one.ranges.tolist() for one in plan.touched()[0]}
    assert touched["key"] == [
        [first + 2 * i * (WIDTH - 2), first + 2 * (i * (WIDTH - 2) + H * DK)]
        for i, slot in enumerate(SLOTS)
        if slot >= 0
    ]


def test_views_of_one_shape_in_buffers_of_several_lengths() -> None:
    # Their signatures are equal; what lies behind them is not.
    for length, right in ((T * WIDTH, True), (T * WIDTH - 8, False), (T * WIDTH, True)):
        whole = np.zeros(length, np.float16)
        key = whole[: T * H * DK].reshape(T, H, DK)
        given = call(key=key, value=None, value_cache=None, offsets=(WIDTH - H * DK, 0))
        if right:
            check(given)
        else:
            check_refused(given, "key", "elements")


def test_a_plan_keeps_the_buffer() -> None:
    given = call()
    plan = kvcore.plan_scatter_pa_kv_cache(**given)
    caches = given["key_cache"], given["value_cache"]
    del given
    gc.collect()
    plan.run()
    is_right(*caches)


async def test_buffers_of_the_runtime() -> None:
    async with kvcore.Device() as dev:
        wide = dev.empty((T, WIDTH), np.float16)
        flat = dev.empty((T * WIDTH,), np.float16)
        for buffer in (wide, flat):
            buffer.numpy()[...] = fused_tokens().reshape(buffer.shape)
        lane = {"value": None, "value_cache": None}
        # A view of two axes is no [T, H, D], and no buffer that is whole.
        check_refused(call(key=wide[:, H * DK : 2 * H * DK], **lane), "key", "[T, H, D]")
        given = call(key=flat, **lane, offsets=(H * DK, 0))
        kvcore.scatter_pa_kv_cache(**given)
        np.testing.assert_array_equal(given["key_cache"][1, 3], views(fused_tokens())[0][0])
        # An allocation may be somewhat longer than its array.
        check_refused(call(key=flat, **lane, offsets=(4096, 0)), "key", "elements")


# ---------------------------------------------------------------- tensors
@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason=WITHOUT_TORCH)


@pytest.mark.parametrize("soc", [None, *OLDER])
def test_views_of_a_tensors_storage(torch: Any, soc: str | None) -> None:
    fused = torch.from_numpy(fused_tokens())
    key, value = views(fused)
    assert key.data_ptr() != fused.data_ptr()
    given = call(key=key, value=value)
    kvcore.scatter_pa_kv_cache(**given, soc=soc)
    is_right(given["key_cache"], given["value_cache"])
    left = WIDTH - 2 * H * DK
    given = call(key=key, value=None, value_cache=None, offsets=(left, 0))
    kvcore.scatter_pa_kv_cache(**given)
    given = call(key=key, value=None, value_cache=None, offsets=(left + 1, 0))
    check_refused(given, "key", "elements")


def test_a_storage_that_was_shrunk_since_the_plan(torch: Any) -> None:
    fused = torch.from_numpy(fused_tokens()).clone()
    key = fused.reshape(-1)[: T * H * DK].reshape(T, H, DK)
    given = call(key=key, value=None, value_cache=None)
    plan = kvcore.plan_scatter_pa_kv_cache(**given)
    plan.run()
    given["key_cache"][...] = 0
    fused.untyped_storage().resize_(2 * T * H * DK)
    with pytest.raises(ParamInvalidError, match="key: expected"):
        plan.run()
    assert not given["key_cache"].any()
