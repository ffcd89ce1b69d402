# SPDX-License-Identifier: Apache-2.0
"""Buffers as arrays: what numpy and torch see of each type."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fakes import FakePlan, device

import kvcore

#: Types that numpy's array interface and DLPack as numpy has it have no words for.
SMALL = [
    "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float6_e2m3fn",
    "float6_e3m2fn", "float4_e2m1fn",
]  # fmt: skip


@pytest.mark.parametrize("dtype", SMALL)
def test_numpy_shows_every_small_float(clock: str, dtype: str) -> None:
    with device(clock) as dev:
        buffer = dev.empty((4, 8), dtype)
        shown = np.asarray(buffer)
        assert shown.dtype == np.dtype(getattr(ml_dtypes, dtype))
        assert shown.shape == (4, 8)
        assert np.shares_memory(shown, buffer.numpy())
        assert np.asarray(buffer[1:3, ::2]).strides == buffer[1:3, ::2].strides
        assert not np.shares_memory(np.array(buffer), shown)
        assert np.asarray(buffer, dtype="float32").dtype == np.float32
        assert np.array(buffer, copy=True, dtype=shown.dtype).dtype == shown.dtype
        with pytest.raises(ValueError, match="copy"):
            np.asarray(buffer, dtype="float32", copy=False)
        assert not hasattr(buffer, "__array_interface__")


@pytest.mark.parametrize("dtype", SMALL)
def test_copies_and_fills_of_small_floats(dtype: str) -> None:
    with device() as dev:
        stream = dev.stream()
        here, there = dev.empty_host((6, 8), dtype), dev.empty((6, 8), dtype)
        bits = here.numpy().view(np.uint8)
        bits[...] = np.arange(bits.size, dtype=np.uint8).reshape(bits.shape) % 16
        stream.fill(there, 1)
        stream.copy(there[1:3], here[2:4])
        stream.copy(there[4, ::2], here[5, 1::2])
        stream.synchronize_blocking()
        want = np.full((6, 8), 1, np.asarray(here).dtype)
        want[1:3] = np.asarray(here)[2:4]
        want[4, ::2] = np.asarray(here)[5, 1::2]
        assert np.asarray(there).tobytes() == want.tobytes()


def test_the_interface_stays_where_numpy_has_the_type() -> None:
    with device() as dev:
        for dtype in ("float16", "float32", "int8", "uint8", "int64", "bool", "hifloat8"):
            buffer = dev.empty((3, 2), dtype)
            if buffer.numpy().dtype.isbuiltin != 1:
                continue  # a package brings hifloat8
            interface = buffer.__array_interface__
            assert interface["data"] == (buffer.address, False)
            assert np.shares_memory(np.asarray(buffer), buffer.numpy())


def test_a_look_through_numpy_is_an_access_of_the_host() -> None:
    for look in (np.asarray, lambda buffer: buffer.__dlpack__()):
        with device(race_check="record") as dev:
            buffer = dev.empty(8, "bfloat16")
            dev.stream().launch(FakePlan(writes=[buffer]))
            look(buffer)
        assert [race.second.operation for race in dev.races] == ["buffer.numpy()"]
        with device(race_check="raise") as dev:
            buffer = dev.empty(8, "bfloat16")
            dev.stream().launch(FakePlan(writes=[buffer]))
            dev.synchronize_blocking()
            look(buffer)


# ---------------------------------------------------------------- torch
@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed")


TORCH_NAMES = {"float4_e2m1": "float4_e2m1fn_x2", "float4_e1m2": "uint8", "hifloat8": "uint8"}
CROSSING = [
    "float16", "float32", "int8", "uint8", "int32", "int64", "bfloat16", "float8_e5m2",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1",
    "float4_e1m2", "hifloat8",
]  # fmt: skip


@pytest.mark.parametrize("dtype", CROSSING)
def test_torch_gets_the_type_of_a_buffer(torch: Any, dtype: str) -> None:
    with device() as dev:
        buffer = dev.empty((6, 8), dtype)
        raw = buffer.numpy().view(np.uint8)
        raw[...] = np.arange(raw.size, dtype=np.uint8).reshape(raw.shape)
        for part, want in ((buffer, raw), (buffer[1:5:2], raw[1:5:2]), (buffer[:0], raw[:0])):
            tensor = torch.from_dlpack(part)
            assert tensor.dtype == getattr(torch, TORCH_NAMES.get(dtype, dtype))
            assert tuple(tensor.shape) == part.shape
            assert tensor.contiguous().view(torch.uint8).numpy().tobytes() == want.tobytes()
        tensor = torch.from_dlpack(buffer[2])
        tensor.view(torch.uint8)[0] = 99
        assert raw[2, 0] == 99
        apart = torch.from_dlpack(buffer, copy=True)
        raw[...] = 0
        assert apart.view(torch.uint8).numpy().any()
        del buffer, raw, tensor, part, want
        assert apart.shape == (6, 8)


def test_tensors_keep_the_bytes_of_a_buffer_that_is_freed(torch: Any) -> None:
    with device() as dev:
        buffer = dev.empty((1000, 8), "bfloat16")
        tensor = torch.from_dlpack(buffer)
        tensor.fill_(3)
        dev.synchronize_blocking()
        buffer.free()
        assert dev.memory().used == 0
        with pytest.raises(kvcore.ParamInvalidError, match="freed"):
            torch.from_dlpack(buffer)
    assert (tensor == 3).all()


@pytest.mark.parametrize("version", [None, (0, 8), (1, 0), (1, 1), (2, 0)])
def test_capsules_of_both_kinds_that_nobody_takes(version: tuple[int, int] | None) -> None:
    with device() as dev:
        for dtype in ("bfloat16", "float32", "float8_e5m2"):
            buffer = dev.empty(4, dtype)
            capsule = buffer.__dlpack__(max_version=version)
            new = version is not None and version[0] >= 1
            assert ('"dltensor_versioned"' if new else '"dltensor"') in repr(capsule)
            del capsule
        with pytest.raises(BufferError):
            buffer.__dlpack__(dl_device=(2, 0))
        assert buffer.__dlpack_device__() == (1, 0)
