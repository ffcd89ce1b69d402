# SPDX-License-Identifier: Apache-2.0
"""What may be given as an array: numpy of every kind, buffers, interfaces, DLPack, torch."""

from __future__ import annotations

import array as array_module
import ctypes
import gc
import mmap
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import fake_dlpack as dl
import kvcore
from kvcore._core import arrays
from refusal import NO_ARRAYS

SLOTS = np.array([5, 0])


def tokens(dtype: Any = np.uint16) -> np.ndarray:
    return np.arange(1, 33).astype(dtype).reshape(2, 2, 8)


def check_written(cache: np.ndarray, key: np.ndarray) -> None:
    """Slots 5 and 0 of [2, 4, 2, 8] hold the two tokens; everything else is zero."""
    rows = cache.reshape(8, 2, 8)
    np.testing.assert_array_equal(rows[[5, 0]], key)
    assert not rows[[1, 2, 3, 4, 6, 7]].view(np.uint8).any()


def refused(match: str, error: type[Exception] = kvcore.ParamInvalidError, **changed: Any) -> None:
    """The call is refused for the changed argument, and its cache is left alone."""
    cache = np.zeros((2, 4, 2, 8), np.uint16)
    given: dict[str, Any] = {"key": tokens(), "key_cache": cache, "slot_mapping": SLOTS} | changed
    with pytest.raises(error, match=match) as caught:
        kvcore.scatter_pa_kv_cache(**given)
    assert isinstance(caught.value, kvcore.KVCoreError)
    assert caught.value.argument in changed
    assert not cache.any()


# ---------------------------------------------------------------- numpy


@pytest.mark.parametrize(
    "dtype",
    ["float16", "float32", "int8", "uint8", "int16", "uint16", "int32", "uint32",
     ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn],
)  # fmt: skip
def test_numpy_dtypes(dtype: Any) -> None:
    cache = np.zeros((2, 4, 2, 8), dtype)
    kvcore.scatter_pa_kv_cache(tokens(dtype), cache, SLOTS)
    check_written(cache, tokens(dtype))


def test_hifloat8_of_en_dtypes() -> None:
    en_dtypes = pytest.importorskip("en_dtypes")
    kind = np.dtype(en_dtypes.hifloat8)
    key = tokens(np.uint8).view(kind)
    cache = np.zeros((2, 4, 2, 8), np.uint8).view(kind)
    plan = kvcore.plan_scatter_pa_kv_cache(key, cache, SLOTS, dtype="hifloat8")
    for _ in range(3):  # met once by the slow door, then known
        kvcore.scatter_pa_kv_cache(key, cache, SLOTS)
        plan.run()
    check_written(cache.view(np.uint8), key.view(np.uint8))
    assert arrays.read(cache).dtype_name == "hifloat8"
    raw = {"key": key.view(np.uint8), "key_cache": cache.view(np.uint8)}
    kvcore.scatter_pa_kv_cache(**raw, slot_mapping=SLOTS, dtype="hifloat8")


@pytest.mark.parametrize("name", ["float4_e2m1fn"])
def test_unpacked_float4_says_how_to_pack(name: str) -> None:
    kind = getattr(ml_dtypes, name)
    for argument in ("key", "key_cache"):
        shape = (2, 2, 8) if argument == "key" else (2, 4, 2, 8)
        refused("pack_float4", **{argument: np.zeros(shape, kind)})


def test_unpacked_float4_of_en_dtypes() -> None:
    en_dtypes = pytest.importorskip("en_dtypes")
    found = [getattr(en_dtypes, n) for n in dir(en_dtypes) if n.startswith("float4_e")]
    assert found
    for kind in found:
        refused("pack_float4", key=np.zeros((2, 2, 8), kind))


@pytest.mark.parametrize("dtype", [">u2", ">f2", ">i4", ">f4"])
def test_big_endian(dtype: str) -> None:
    refused("native byte order", key=tokens(dtype))
    cache = np.zeros((2, 4, 2, 8), dtype)
    refused("native byte order", key_cache=cache)
    refused("native byte order", slot_mapping=SLOTS.astype(">i8"))


def test_one_byte_has_no_order() -> None:
    cache = np.zeros((2, 4, 2, 8), "|u1")
    kvcore.scatter_pa_kv_cache(tokens(">u1"), cache, SLOTS)
    check_written(cache, tokens("u1"))


@pytest.mark.parametrize(
    "dtype", ["u2,u2", "(2,)u1", "V2", "S2", "U1", "M8[s]", "?", "O", "g", "D"]
)
def test_other_dtypes(dtype: str) -> None:
    made = np.zeros((2, 2, 8), dtype)
    if made.ndim == 3:
        refused("dtype among", key=made)


def test_enormous_items() -> None:
    giant = np.dtype((np.void, 2**31 - 1))
    refused("dtype among", key=as_strided(np.zeros(1, "V1"), (2, 2, 8)).view("V1"))
    refused("dtype among|bytes", key=np.empty(0, giant).reshape(0, 2, 8))


def test_descriptors_that_are_not_the_common_ones() -> None:
    kind = np.dtype(np.uint16, metadata={"from": "elsewhere"})
    cache = np.zeros((2, 4, 2, 8), kind)
    kvcore.scatter_pa_kv_cache(tokens(kind), cache, SLOTS)
    check_written(cache, tokens())
    longlong = SLOTS.astype(np.longlong)
    cache[...] = 0
    kvcore.scatter_pa_kv_cache(tokens(), cache, longlong)
    check_written(cache, tokens())


def test_memory_map(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    cache = np.memmap(path, np.uint16, "w+", shape=(2, 4, 2, 8))
    kvcore.scatter_pa_kv_cache(tokens(), cache, SLOTS)
    cache.flush()
    check_written(np.fromfile(path, np.uint16).reshape(2, 4, 2, 8), tokens())
    refused("writable", key_cache=np.memmap(path, np.uint16, "r", shape=(2, 4, 2, 8)))


class Liar(np.ndarray):
    """Answers for its looks what it likes; its memory is what it is."""

    shape = property(lambda _self: (10**6, 2, 8))  # type: ignore[assignment]
    strides = property(lambda _self: (10**6, 10**5, 7))  # type: ignore[assignment]
    dtype = property(lambda _self: np.dtype(np.float64))  # type: ignore[assignment]
    ctypes = None  # type: ignore[assignment]
    __array_interface__ = None  # type: ignore[assignment]


def test_subclasses() -> None:
    cache = np.zeros((2, 4, 2, 8), np.uint16)
    kvcore.scatter_pa_kv_cache(tokens().view(Liar), cache.view(Liar), SLOTS.view(Liar))
    check_written(cache, tokens())
    matrix = np.zeros((2, 16), np.uint16).view(np.matrix)
    new = kvcore.kv_cache_update(matrix, 0, np.zeros((1, 1, 2, 16), np.uint16),
                                 np.array([2]), np.array([2]))  # fmt: skip
    assert new.shape == (1, 1, 2, 16)


@pytest.mark.parametrize("name", ["key", "key_cache", "slot_mapping"])
def test_masked_arrays(name: str) -> None:
    arguments = {
        "key": tokens(),
        "key_cache": np.zeros((2, 4, 2, 8), np.uint16),
        "slot_mapping": SLOTS,
    }
    refused("without a mask", **{name: np.ma.masked_array(arguments[name])})


def test_unaligned_views() -> None:
    memory = np.zeros(1 + 2 * 4 * 2 * 8 * 2 + 1 + 17, np.uint8)
    cache = memory[1:257].view(np.uint16).reshape(2, 4, 2, 8)
    slots = np.zeros(17, np.uint8)[1:].view(np.int64)
    slots[...] = SLOTS
    key = np.zeros(65, np.uint8)[1:].view(np.uint16).reshape(2, 2, 8)
    key[...] = tokens()
    assert not cache.flags.aligned
    kvcore.scatter_pa_kv_cache(key, cache, slots)
    check_written(cache, tokens())
    assert memory[0] == 0
    assert not memory[257:].any()


@pytest.mark.parametrize("step", [-3, -1, 0, 1, 2, 3])
def test_strided_slots(step: int) -> None:
    for dtype in (np.int32, np.int64):
        base = np.array([1, 3, 5, 7, 2, 4, 6], dtype)
        slots = as_strided(base[3:], (2,), (step * base.itemsize,))
        cache = np.zeros((2, 4, 2, 8), np.uint16)
        kvcore.scatter_pa_kv_cache(tokens(), cache, slots)
        expected = np.zeros((8, 2, 8), np.uint16)
        for token, slot in zip(tokens(), slots, strict=True):
            expected[slot] = token
        np.testing.assert_array_equal(cache.reshape(8, 2, 8), expected)


@pytest.mark.parametrize("thing", NO_ARRAYS, ids=lambda thing: type(thing).__name__)
def test_no_array(thing: Any) -> None:
    with pytest.raises(kvcore.ParamInvalidError, match=r"^x: expected") as caught:
        arrays.read(thing, "x")
    assert caught.value.argument == "x"


def test_reading_says_what_an_array_is() -> None:
    base = np.zeros((4, 6, 2), np.int16)
    info = arrays.read(base[1:, ::-2], "x")
    assert (info.name, info.shape, info.strides) == ("x", (3, 3, 2), (24, -8, 2))
    assert (info.dtype_name, info.itemsize) == ("int16", 2)
    assert info.address == base[1:, ::-2].ctypes.data
    assert (info.read_only, info.on_device) == (False, False)
    assert repr(info) == "<x: int16 (3, 3, 2)>"
    with pytest.raises(kvcore.ParamNullError, match="x: expected an array, got None"):
        arrays.read(None, "x")


# ---------------------------------------------------------------- the buffer protocol


def test_buffers() -> None:
    cache = bytearray(2 * 4 * 2 * 8)
    view = memoryview(cache).cast("B", (2, 4, 2, 8))
    key = memoryview(tokens(np.uint8).tobytes()).cast("B", (2, 2, 8))
    slots = array_module.array("q", [5, 0])
    plan = kvcore.plan_scatter_pa_kv_cache(key, view, slots)
    plan.run()
    check_written(np.frombuffer(cache, np.uint8).reshape(2, 4, 2, 8), tokens(np.uint8))
    with pytest.raises(BufferError):
        slots.append(3)  # a plan holds its buffers where they are
    del plan
    gc.collect()
    slots.append(3)
    assert len(slots) == 3


def test_read_only_buffers() -> None:
    key = memoryview(tokens(np.uint8).tobytes()).cast("B", (2, 2, 8))
    assert key.readonly
    refused("writable", key=key, key_cache=memoryview(bytes(128)).cast("B", (2, 4, 2, 8)))


def test_flat_buffers_have_one_axis() -> None:
    refused(r"\[T, H, D\]", key=bytes(32))
    refused(r"\[T, H, D\]", key=bytearray(32))
    refused("int32 or int64, got uint8", slot_mapping=b"\x05\x00")
    refused("int32 or int64, got float64", slot_mapping=array_module.array("d", [5, 0]))


def test_ctypes_arrays() -> None:
    slots = (ctypes.c_int64 * 2)(5, 0)
    cache = np.zeros((2, 4, 2, 8), np.uint16)
    kvcore.scatter_pa_kv_cache(tokens(), cache, slots)
    check_written(cache, tokens())

    class Pair(ctypes.Structure):
        _fields_ = (("a", ctypes.c_int32), ("b", ctypes.c_int32))

    refused("int32 or int64", slot_mapping=(Pair * 2)())
    swapped = (ctypes.c_int64.__ctype_be__ * 2)(5, 0)
    refused("native byte order", slot_mapping=swapped)


def test_buffers_that_are_gone() -> None:
    view = memoryview(bytearray(32))
    view.release()
    refused("readable buffer", key=view)
    mapped = mmap.mmap(-1, 64)
    mapped.close()
    refused("readable buffer", key=mapped)


# ---------------------------------------------------------------- __array_interface__


class Interface:
    """An object with nothing but an __array_interface__."""

    def __init__(self, array: np.ndarray, **changed: Any) -> None:
        self.array = array
        self.interface = {**array.__array_interface__, **changed}

    @property
    def __array_interface__(self) -> Any:
        return self.interface


def test_interfaces() -> None:
    cache = np.zeros((2, 4, 2, 8), np.uint16)
    kvcore.scatter_pa_kv_cache(Interface(tokens()), Interface(cache), Interface(SLOTS))
    check_written(cache, tokens())


def test_interface_is_read_again_at_every_run() -> None:
    holder = Interface(np.zeros((2, 4, 2, 8), np.uint16))
    plan = kvcore.plan_scatter_pa_kv_cache(tokens(), holder, SLOTS)
    plan.run()
    check_written(holder.array, tokens())
    other = np.zeros((2, 4, 2, 8), np.uint16)
    holder.interface = other.__array_interface__
    with pytest.raises(kvcore.ParamInvalidError, match=r"key_cache.*changed since"):
        plan.run()
    assert not other.any()


def test_read_only_interface() -> None:
    frozen = np.zeros((2, 4, 2, 8), np.uint16)
    frozen.flags.writeable = False
    refused("writable", key_cache=Interface(frozen))


@pytest.mark.parametrize(
    "changed",
    [
        {"data": (0, False)},
        {"data": None},
        {"data": 7},
        {"data": ("address", False)},
        {"data": (-8, False)},
        {"data": (2**64, False)},
        {"data": (2**63, False)},
        {"shape": (2, 2)},
        {"shape": (-2, 2, 8)},
        {"shape": (2, 2, 2**62)},
        {"shape": "text"},
        {"shape": None},
        {"shape": (1,) * 9 + (2, 2, 8)},
        {"shape": (1,) * 70},
        {"strides": (2,)},
        {"strides": (2**62, 32, 2)},
        {"strides": "text"},
        {"typestr": ">u2"},
        {"typestr": "<f8"},
        {"typestr": "|O"},
        {"typestr": "nonsense"},
        {"typestr": None},
        {"version": 2, "data": None},
    ],
    ids=repr,
)
def test_broken_interface(changed: dict[str, Any]) -> None:
    refused("key", key=Interface(tokens(), **changed))


@pytest.mark.parametrize("interface", [None, 7, "text", {}, {"version": 3}, [1, 2], object()])
def test_no_interface(interface: Any) -> None:
    made = Interface(tokens())
    made.interface = interface
    refused("key", key=made)


class Raises:
    """Every door leads to an exception."""

    def __init__(self, error: Exception, *doors: str) -> None:
        self.error = error
        self.doors = doors

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("doors", ()):
            raise self.error
        raise AttributeError(name)


@pytest.mark.parametrize("door", ["__array_interface__", "__kvcore_array__"])
@pytest.mark.parametrize(
    "error", [RuntimeError("no"), ValueError("no"), OSError("no"), Warning("no")]
)
def test_attributes_that_raise(door: str, error: Exception) -> None:
    refused(f"readable {door}, got {type(error).__name__}: no", key=Raises(error, door))


def test_kvcore_errors_of_an_array_pass_as_they_are() -> None:
    class Freed:
        @property
        def __kvcore_array__(self) -> Any:
            raise kvcore.StreamError("the buffer was freed")

    with pytest.raises(kvcore.StreamError, match="freed"):
        kvcore.scatter_pa_kv_cache(Freed(), np.zeros((2, 4, 2, 8), np.uint16), SLOTS)


class Buffer:
    """A runtime buffer, as far as the operators see it."""

    def __init__(self, array: Any) -> None:
        self.array = array

    @property
    def __kvcore_array__(self) -> Any:
        return self.array


def test_kvcore_arrays() -> None:
    cache = Buffer(np.zeros((2, 4, 2, 8), np.uint16))
    plan = kvcore.plan_scatter_pa_kv_cache(Buffer(tokens()), cache, Buffer(SLOTS))
    plan.run()
    check_written(cache.array, tokens())
    assert plan.writes[0].owner is cache
    cache.array = np.zeros((2, 4, 2, 8), np.uint16)
    with pytest.raises(kvcore.ParamInvalidError, match="changed since"):
        plan.run()
    assert not cache.array.any()
    for nothing in (None, 7, [1], "text", object()):
        refused("array", key=Buffer(nothing))


# ---------------------------------------------------------------- DLPack


@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack(versioned: bool) -> None:
    cache = np.zeros((2, 4, 2, 8), np.uint16)
    made = [
        dl.Producer(tokens(), versioned=versioned),
        dl.Producer(cache, versioned=versioned, strides=(64, 16, 8, 1)),
        dl.Producer(SLOTS, dl.INT, versioned=versioned),
    ]
    plan = kvcore.plan_scatter_pa_kv_cache(*made)
    for _ in range(3):
        cache[...] = 0
        plan.run()
        check_written(cache, tokens())
    assert [(p.exported, p.released) for p in made] == [(1, 0)] * 3  # held, and held once
    del plan
    gc.collect()
    assert [p.released for p in made] == [1, 1, 1]


@pytest.mark.parametrize(
    ("code", "bits", "lanes", "name"),
    [
        (dl.INT, 8, 1, "int8"), (dl.INT, 16, 1, "int16"), (dl.INT, 32, 1, "int32"),
        (dl.UINT, 8, 1, "uint8"), (dl.UINT, 16, 1, "uint16"), (dl.UINT, 32, 1, "uint32"),
        (dl.FLOAT, 16, 1, "float16"), (dl.FLOAT, 32, 1, "float32"), (dl.BFLOAT, 16, 1, "bfloat16"),
        (dl.E4M3FN, 8, 1, "float8_e4m3fn"), (dl.E5M2, 8, 1, "float8_e5m2"),
        (dl.FLOAT4_E2M1, 4, 2, "float4_e2m1"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack_dtypes(code: int, bits: int, lanes: int, name: str, versioned: bool) -> None:
    raw = tokens(f"u{max(bits // 8, 1)}")
    cache = np.zeros((2, 4, 2, 8), raw.dtype)
    producer = dl.Producer(cache, code, bits, lanes, versioned=versioned)
    assert arrays.read(producer).dtype_name == name
    kvcore.scatter_pa_kv_cache(dl.Producer(raw, code, bits, lanes), producer, SLOTS)
    check_written(cache, raw)


def test_dlpack_strides_and_offsets() -> None:
    base = np.zeros((2, 4, 3, 2, 10), np.uint16)
    producer = dl.Producer(
        base, shape=(2, 4, 2, 8), strides=(240, 60, 10, 1), byte_offset=2 * (20 + 1)
    )
    kvcore.scatter_pa_kv_cache(tokens(), producer, SLOTS)
    check_written(np.ascontiguousarray(base[:, :, 1, :, 1:9]), tokens())
    assert base.sum() == tokens().sum()


def test_dlpack_read_only_flag() -> None:
    frozen = dl.Producer(np.zeros((2, 4, 2, 8), np.uint16), flags=dl.READ_ONLY)
    refused("writable", key_cache=frozen)
    cache = np.zeros((2, 4, 2, 8), np.uint16)
    kvcore.scatter_pa_kv_cache(dl.Producer(tokens(), flags=dl.READ_ONLY), cache, SLOTS)
    check_written(cache, tokens())
    refused("a copy", key=dl.Producer(tokens(), flags=dl.IS_COPIED))


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize(
    "changed",
    [
        {"device_type": dl.CUDA},
        {"device_type": 0},
        {"device_type": -1},
        {"lanes": 2},
        {"lanes": 0},
        {"bits": 4},
        {"bits": 12},
        {"bits": 0},
        {"code": dl.FLOAT, "bits": 64},
        {"code": dl.BOOL, "bits": 8},
        {"code": 200},
        {"ndim": -1},
        {"ndim": 2},
        {"ndim": 2**31 - 1},
        {"shape": (-2, 2, 8)},
        {"shape": (2**62, 2, 8)},
        {"shape": (2**62, 2**62, 2**62)},
        {"shape": (1,) * 9},
        {"no_shape": True},
        {"data": 0},
        {"data": 0, "byte_offset": 64},
        {"data": 2**64 - 64},
        {"byte_offset": 2**63},
        {"byte_offset": 2**64 - 2},  # address and offset add up past 64 bits, to two bytes before
        {"byte_offset": 2**64 - 2, "shape": (2, 0, 8)},
        {"strides": (2**62, 8, 1)},
        {"strides": (-(2**63), 8, 1)},
        {"strides": (2**63 - 1, 2**63 - 1, 2**63 - 1)},
    ],
    ids=repr,
)
def test_broken_dlpack(changed: dict[str, Any], versioned: bool) -> None:
    producer = dl.Producer(tokens(), versioned=versioned, **changed)
    refused("key", key=producer)
    gc.collect()
    assert producer.released == producer.exported == 1 or producer.exported == 2


def test_a_dlpack_offset_that_wraps_is_refused_and_one_that_does_not_is_right() -> None:
    base = np.zeros(2 * 4 * 2 * 8 + 2, np.uint16)
    for back in (2, 2**63, base.ctypes.data):
        offset = 2**64 - back
        for versioned in (False, True):
            producer = dl.Producer(
                base, shape=(2, 4, 2, 8), versioned=versioned, byte_offset=offset
            )
            refused("key_cache: .*byte offset|address space", key_cache=producer)
    assert not base.any()
    kvcore.scatter_pa_kv_cache(
        tokens(), dl.Producer(base, shape=(2, 4, 2, 8), byte_offset=2), SLOTS
    )
    check_written(base[1:-1].reshape(2, 4, 2, 8), tokens())
    assert base[0] == base[-1] == 0


class DeviceArray:
    """What ``__kvcore_device_array__`` may give, one field at a time wrong."""

    def __init__(self, **changed: Any) -> None:
        self.address, self.shape, self.strides = 4096, (2, 2, 8), (32, 16, 2)
        self.dtype, self.itemsize, self.read_only = "float16", 2, False
        self.__dict__.update(changed)

    @property
    def __kvcore_device_array__(self) -> Any:
        return self


@pytest.mark.parametrize(
    "changed",
    [
        {"address": "here"},
        {"address": 2**64},
        {"address": -4096},
        {"shape": 7},
        {"shape": (2, "2", 8)},
        {"shape": (2, 2**64, 8)},
        {"shape": (2, -1, 8)},
        {"strides": (32, 16)},
        {"strides": (2**64, 16, 2)},
        {"strides": None},
        {"itemsize": 2**40},
        {"itemsize": -1},
        {"itemsize": 2.0},
        {"dtype": []},
    ],
    ids=repr,
)
def test_broken_device_arrays(changed: dict[str, Any]) -> None:
    assert arrays.read(DeviceArray(), "key").on_device
    with pytest.raises(kvcore.ParamInvalidError, match=r"^key: expected"):
        arrays.read(DeviceArray(**changed), "key")


def test_dlpack_of_another_major_version() -> None:
    producer = dl.Producer(tokens(), major=2)
    refused("version 2", key=producer)
    gc.collect()
    assert producer.released == producer.exported == 1


class NoCapsule:
    """__dlpack__ gives this."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def __dlpack__(self, **_keywords: Any) -> Any:
        if isinstance(self.given, Exception):
            raise self.given
        return self.given

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


@pytest.mark.parametrize(
    "given",
    [
        None,
        7,
        "text",
        ...,
        TypeError("no"),
        RuntimeError("no"),
        KeyError("no"),
        AssertionError(),
    ],
    ids=repr,
)
def test_no_capsule(given: Any) -> None:
    refused("readable DLPack tensor", key=NoCapsule(given))


def test_a_capsule_is_used_once() -> None:
    producer = dl.Producer(tokens())
    capsule = producer.__dlpack__()
    cache = np.zeros((2, 4, 2, 8), np.uint16)
    kvcore.scatter_pa_kv_cache(NoCapsule(capsule), cache, SLOTS)
    check_written(cache, tokens())
    refused("no unused DLPack capsule", key=NoCapsule(capsule))


# ---------------------------------------------------------------- nothing leaks or dangles


def test_arrays_live_as_long_as_their_plan() -> None:
    class Owned(np.ndarray):
        pass

    key, cache = tokens().view(Owned), np.zeros((2, 4, 2, 8), np.uint16)
    gone = weakref.ref(key)
    plan = kvcore.plan_scatter_pa_kv_cache(key, cache, SLOTS)
    del key
    gc.collect()
    assert gone() is not None
    plan.run()
    check_written(cache, tokens())
    del plan
    gc.collect()
    assert gone() is None


def test_an_error_keeps_no_array() -> None:
    class Owned(np.ndarray):
        pass

    key = tokens().view(Owned)
    gone = weakref.ref(key)
    for slots in (np.array([8, 0]), np.array([1.5, 2.5])):
        with pytest.raises(kvcore.KVCoreError):
            kvcore.scatter_pa_kv_cache(key, np.zeros((2, 4, 2, 8), np.uint16), slots)
    del key
    gc.collect()
    assert gone() is None


# ---------------------------------------------------------------- torch


# torch warns of half of the odd tensors that are made here.
torch_may_warn = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.mark.parametrize(
    "name",
    ["float16", "bfloat16", "float32", "int8", "uint8", "int16", "uint16", "int32", "uint32",
     "float8_e5m2", "float8_e4m3fn"],
)  # fmt: skip
def test_torch_dtypes(torch: Any, name: str) -> None:
    kind = getattr(torch, name)
    bits = tokens(f"u{kind.itemsize}")
    key = torch.from_numpy(bits.view(np.uint8).copy()).view(kind)
    cache = torch.zeros((2, 4, 2, 8 * kind.itemsize), dtype=torch.uint8).view(kind)
    assert arrays.read(cache).dtype_name == name
    slots = torch.tensor([5, 0])
    plan = kvcore.plan_scatter_pa_kv_cache(key, cache, slots)
    for _ in range(2):
        cache.view(torch.uint8).zero_()
        plan.run()
        check_written(cache.view(torch.uint8).numpy().view(bits.dtype), bits)
    assert plan.writes[0].owner is cache
    kvcore.scatter_pa_kv_cache(key, cache, slots.to(torch.int32), num_threads=2)


def test_torch_packed_float4(torch: Any) -> None:
    kind = getattr(torch, "float4_e2m1fn_x2", None)
    if kind is None:
        pytest.skip("this torch has no float4")
    key = torch.from_numpy(tokens(np.uint8)).view(kind)
    cache = torch.zeros((2, 4, 2, 8), dtype=torch.uint8)
    assert arrays.read(key).dtype_name == "float4_e2m1"
    kvcore.scatter_pa_kv_cache(key, cache.view(kind), torch.tensor([5, 0]))
    check_written(cache.numpy(), tokens(np.uint8))


def test_torch_strides(torch: Any) -> None:
    slab = torch.zeros((4, 2, 2, 2, 8), dtype=torch.int16)
    cache = slab.permute(1, 0, 2, 3, 4)[:, :, 1]
    key = torch.from_numpy(tokens(np.int16)).permute(1, 0, 2).contiguous().permute(1, 0, 2)
    kvcore.scatter_pa_kv_cache(key, cache, torch.tensor([9, 5, 9, 0])[1::2])
    check_written(cache.contiguous().numpy(), tokens(np.int16))
    row = torch.arange(8, dtype=torch.int16).expand(2, 2, 8)
    kvcore.scatter_pa_kv_cache(row, cache, torch.tensor(0).expand(2))
    refused("bytes of their own", key_cache=torch.zeros(8, dtype=torch.uint16).expand(2, 4, 2, 8))


@torch_may_warn
def test_torch_tensors_that_are_refused(torch: Any) -> None:
    half = torch.zeros((2, 2, 8), dtype=torch.float16)
    refused("detach", key=half.clone().requires_grad_())
    refused("detach", key=torch.nn.Parameter(half))
    refused("detach", key=half.clone().requires_grad_() * 2)
    refused("dense", key=half.to_sparse())
    refused("'meta'", key=half.to("meta"))
    pair = torch.zeros((2, 2, 8), dtype=torch.complex64)
    refused("conj", key=pair.conj())
    refused("neg", key=pair.conj().imag)
    refused("dtype among", key=pair)
    refused("dtype among", key=half.double())
    refused("dtype among", key=half.bool())
    refused("quantized", key=torch.quantize_per_tensor(half.float(), 1.0, 0, torch.qint8))
    refused("8 axes", key=half.reshape((1,) * 6 + (2, 2, 8)))
    refused("array", key=torch.Tensor)
    refused("array|readable", key=torch.float16)


@torch_may_warn
def test_torch_tensors_without_memory(torch: Any) -> None:
    emptied = torch.zeros((2, 2, 8), dtype=torch.uint16)
    emptied.untyped_storage().resize_(0)
    refused("null pointer", key=emptied)
    fake = pytest.importorskip("torch._subclasses.fake_tensor")
    with fake.FakeTensorMode():
        tensor = torch.zeros((2, 2, 8), dtype=torch.float16)
    refused("key", key=tensor)
    nested = torch.nested.nested_tensor(
        [torch.zeros(2, 8), torch.zeros(3, 8)], layout=torch.strided
    )
    refused("key", key=nested)
    jagged = torch.nested.nested_tensor([torch.zeros(2, 8), torch.zeros(3, 8)], layout=torch.jagged)
    refused("key", key=jagged)


def test_the_first_tensors_of_a_process_are_looked_at(torch: Any) -> None:
    """What a process knows of torch after its first call, it knows for all tensors of that call."""
    program = """
import torch, kvcore
cache = torch.zeros(2, 4, 1, 8, requires_grad=True)
try:
    kvcore.scatter_pa_kv_cache(torch.ones(2, 1, 8), cache, torch.tensor([5, 0]))
except kvcore.ParamInvalidError as error:
    print(error.argument)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.returncode) == ("key_cache\n", 0), done.stderr


def test_torch_parameters_without_grad(torch: Any) -> None:
    cache = torch.nn.Parameter(torch.zeros((2, 4, 2, 8), dtype=torch.float16), requires_grad=False)
    key = torch.from_numpy(tokens(np.float16))
    kvcore.scatter_pa_kv_cache(key, cache, torch.tensor([5, 0]))
    check_written(cache.numpy(), tokens(np.float16))


def test_torch_tensors_that_change_under_a_plan(torch: Any) -> None:
    cache = torch.zeros((2, 4, 2, 8), dtype=torch.float16)
    key = torch.from_numpy(tokens(np.float16))
    plan = kvcore.plan_scatter_pa_kv_cache(key, cache, torch.tensor([5, 0]))
    plan.run()
    cache.set_(torch.zeros((2, 4, 2, 8), dtype=torch.float16))
    with pytest.raises(kvcore.ParamInvalidError, match=r"key_cache.*changed since"):
        plan.run()
    key.requires_grad_()
    with pytest.raises(kvcore.ParamInvalidError, match=r"key: .*detach"):
        plan.run()
    assert not cache.any()
