# SPDX-License-Identifier: Apache-2.0
"""Spaces, buffers, views, capacity."""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import pytest
from fakes import FakePlan, Gate, device

import kvcore
from kvcore.runtime import DeviceProfile

SMALL = DeviceProfile.named("A3").replace(capacity=1 / 1024)  # 1 MiB


def test_out_of_memory_then_free_and_retry(clock: str) -> None:
    with kvcore.Device(SMALL, clock=clock) as dev:
        half = dev.empty(2**19, "uint8")
        with pytest.raises(
            kvcore.DeviceOutOfMemoryError,
            match=r"^device memory: expected 600000 bytes, got 524288 free of 1048576$",
        ) as told:
            dev.empty(600_000, "uint8")
        assert isinstance(told.value, MemoryError)
        assert (told.value.wanted, told.value.free, told.value.total) == (600_000, 2**19, 2**20)
        memory = dev.memory()
        assert (memory.used, memory.allocations, memory.frees) == (2**19, 1, 0)
        half.free()
        whole = dev.empty((1024, 1024), "uint8")
        assert dev.memory() == (
            type(memory)(used=2**20, peak=2**20, capacity=2**20, allocations=2, frees=1)
        )
        assert dev.memory().free == 0
        with pytest.raises(kvcore.DeviceOutOfMemoryError):
            dev.empty(1, "uint8")
        assert dev.empty(0, "uint8").nbytes == 0
        dev.empty_host(2**21, "uint8").free()
        whole.free()
    assert dev.memory().used == 0


@pytest.mark.parametrize("shape", [2**62, (2**31, 2**31, 2**31), (2**40, 2**40), 2**200])
def test_sizes_that_wrap_are_out_of_memory(shape: object) -> None:
    for dev in (device(), kvcore.Device(SMALL)):
        with dev:
            for make in (dev.empty, dev.empty_host, dev.empty_swapped):
                with pytest.raises(kvcore.DeviceOutOfMemoryError):
                    make(shape, "float32")
            assert dev.memory().used == dev.memory().allocations == 0


def test_more_than_this_machine_has() -> None:
    with device() as dev:
        with pytest.raises(kvcore.DeviceOutOfMemoryError, match="of this machine") as told:
            dev.empty(2**55, "uint8")
        assert told.value.total is None
        assert dev.memory().used == 0


@pytest.mark.parametrize("shape", [-1, (2, -1), "3", None, 2.5, (1.5,), (1,) * 33, [[1]]])
def test_shapes_that_are_none(shape: object) -> None:
    with device() as dev, pytest.raises(kvcore.ParamInvalidError, match=r"^shape: expected"):
        dev.empty(shape)


@pytest.mark.parametrize("dtype", ["float17", None, object, "O", "V0", 3, [("a", "i4", 2), 7]])
def test_dtypes_that_are_none(dtype: object) -> None:
    with device() as dev, pytest.raises(kvcore.ParamInvalidError, match=r"^dtype: expected"):
        dev.empty(3, dtype)


@pytest.mark.parametrize("align", [0, -512, 3, 2**22, 2**21 + 1, True, "64", None, 64.0])
def test_alignments_that_are_none(align: object) -> None:
    with device() as dev, pytest.raises(kvcore.ParamInvalidError, match=r"^align: expected"):
        dev.empty(3, align=align)


def test_an_unknown_type_is_answered_with_the_names_there_are() -> None:
    with device() as dev, pytest.raises(kvcore.ParamInvalidError) as refusal:
        dev.empty(3, "floaty")
    said = str(refusal.value)
    assert said.startswith("dtype: expected the name of an element type, one of ")
    assert said.endswith(", got 'floaty'")
    assert {"bfloat16", "float8_e4m3fn", "int8"} <= set(said.replace(",", " ").split())


@pytest.mark.parametrize("align", [1, 64, 512, 4096, 65536, 2**21])
def test_alignment(align: int) -> None:
    with device() as dev:
        for make in (dev.empty, dev.empty_host, dev.empty_swapped):
            assert make((3, 5), "uint8", align=align).address % align == 0


@pytest.mark.parametrize(
    ("dtype", "numpy_type"),
    [
        ("bfloat16", ml_dtypes.bfloat16),
        ("float8_e4m3fn", ml_dtypes.float8_e4m3fn),
        ("float4_e2m1", np.uint8),
        ("float32", np.float32),
        ("int64", np.int64),
    ],
)
def test_types(dtype: str, numpy_type: type) -> None:
    with device() as dev:
        buffer = dev.empty((2, 3), dtype)
        assert buffer.dtype == dtype
        assert buffer.numpy().dtype == np.dtype(numpy_type)
        assert buffer.nbytes == 6 * np.dtype(numpy_type).itemsize


def test_slices_and_views_share_memory() -> None:
    with device() as dev:
        buffer = dev.empty((4, 6), "int32")
        with buffer.host("w") as a:
            a[:] = np.arange(24).reshape(4, 6)
        assert buffer[1].numpy().tolist() == [6, 7, 8, 9, 10, 11]
        assert buffer[1:3, ::2].numpy().tolist() == [[6, 8, 10], [12, 14, 16]]
        assert buffer[..., 0].shape == (4,)
        assert buffer[None].shape == (1, 4, 6)
        one = buffer[2, 3]
        assert one.shape == ()
        assert int(one.numpy()) == 15
        flat = buffer.view(24)
        assert flat.view((-1, 8)).shape == (3, 8)
        raw = buffer.view(dtype="uint8")
        assert raw.shape == (4, 24)
        assert raw.view((4, 6, 4)).strides == (24, 4, 1)
        raw.numpy()[0, 0] = 77
        assert int(buffer[0, 0].numpy()) == 77
        assert len({view.storage for view in (buffer, flat, raw, one)}) == 1
        assert (len(buffer), buffer.ndim, buffer.itemsize) == (4, 2, 4)


def test_views_that_would_copy_are_refused() -> None:
    with device() as dev:
        buffer = dev.empty((4, 6), "int32")
        for index in ([0, 1], np.array([0]), True, "a", 1.0):
            with pytest.raises(kvcore.ParamInvalidError, match=r"^index: expected numbers"):
                buffer[index]
        for index in (4, (0, 0, 0), (slice(None), 6)):
            with pytest.raises(kvcore.ParamInvalidError, match=r"^index: expected an index"):
                buffer[index]
        with pytest.raises(kvcore.ParamInvalidError, match=r"^shape: expected a shape of 24"):
            buffer.view(23)
        with pytest.raises(kvcore.ParamInvalidError, match=r"^shape: .* contiguous"):
            buffer[:, :3].view(12)
        with pytest.raises(kvcore.ParamInvalidError, match=r"^dtype: expected a type"):
            buffer[:, :3:2].view(dtype="int8")


def test_double_free_and_use_after_free() -> None:
    with device() as dev:
        stream = dev.stream()
        buffer = dev.empty((4,), "int32")
        view = buffer[1:]
        with pytest.raises(kvcore.ParamInvalidError, match=r"^buffer: .* got a view"):
            view.free()
        buffer.free()
        assert (buffer.freed, view.freed, buffer.shape) == (True, True, (4,))
        plain = np.zeros(4, np.int32)
        for use in (
            buffer.free,
            buffer.numpy,
            view.numpy,
            lambda: buffer[0],
            lambda: buffer.view(4),
            lambda: buffer.host("r").__enter__(),
            lambda: buffer.__array_interface__,
            buffer.__dlpack__,
            lambda: stream.copy(buffer, plain),
            lambda: stream.copy(plain, buffer),
            lambda: stream.fill(view, 0),
        ):
            with pytest.raises(kvcore.ParamInvalidError, match="freed"):
                use()
        assert dev.memory().frees == 1


def test_a_plan_with_a_freed_buffer_is_refused_at_launch() -> None:
    with device() as dev:
        buffer = dev.empty((4,), "int32")
        plan = FakePlan(reads=[buffer])
        dev.stream("s").launch(plan)
        dev.synchronize_blocking()
        buffer.free()
        with pytest.raises(kvcore.ParamInvalidError, match=r"^in0: expected live memory"):
            dev.stream("s").launch(plan)
        assert plan.runs == 1


async def test_work_launched_before_a_free_still_has_its_bytes(clock: str) -> None:
    async with device(clock) as dev:
        stream = dev.stream()
        source, target = dev.empty_host(1000, "int64"), dev.empty(1000, "int64")
        source.numpy()[:] = 5
        gate = Gate(stream)
        stream.copy(target, source)
        source.free()
        gate.open()
        await stream.synchronize()
        assert (target.numpy() == 5).all()


def test_memory_goes_back_with_the_last_reference() -> None:
    with device() as dev:
        buffers = [dev.empty(100, "uint8") for _ in range(3)]
        view = buffers[0][:10]
        del buffers
        gc.collect()
        assert dev.memory().used == 100
        del view
        gc.collect()
        memory = dev.memory()
        assert (memory.used, memory.peak, memory.allocations, memory.frees) == (0, 300, 3, 3)


def test_kernels_and_spaces_on_a_modelled_device(clock: str) -> None:
    plain = np.zeros(4, np.float32)
    with kvcore.Device("A3", clock=clock) as dev, kvcore.Device("A2") as other:
        stream = dev.stream()
        stream.launch(FakePlan(reads=[dev.empty(4), dev.empty_swapped(4)], writes=[dev.empty(4)]))
        stream.copy(dev.empty(4), plain)
        stream.copy(plain, dev.empty_host(4))
        stream.synchronize_blocking()
        cases = [
            ("in0", {"reads": [plain]}, "ndarray in pageable host memory"),
            ("out0", {"writes": [plain]}, "ndarray in pageable host memory"),
            ("in0", {"reads": [dev.empty_host(4)]}, "pinned host memory"),
            ("out0", {"writes": [other.empty(4)]}, "another device's"),
        ]
        for argument, arrays, seen in cases:
            with pytest.raises(kvcore.ParamInvalidError, match=f"^{argument}: .* got {seen}$"):
                stream.launch(FakePlan(**arrays))
        with pytest.raises(kvcore.ParamInvalidError, match=r"^src: .* another device's$"):
            stream.copy(plain, other.empty_host(4))


def test_without_a_profile_everything_goes() -> None:
    with device() as dev:
        stream = dev.stream()
        plain = np.zeros(4, np.float32)
        stream.launch(FakePlan(reads=[plain, dev.empty_host(4)], writes=[plain]))
        stream.synchronize_blocking()
        assert dev.memory().capacity is None
        assert dev.memory().free is None


def test_numpy_and_dlpack() -> None:
    with device() as dev:
        buffer = dev.empty((2, 3), "float32")
        buffer.numpy()[:] = 1.5
        assert np.shares_memory(np.asarray(buffer), buffer.numpy())
        assert np.shares_memory(np.from_dlpack(buffer), buffer.numpy())
        assert buffer.__dlpack_device__() == (1, 0)
        half = dev.empty((2, 3), "bfloat16")
        assert half.__kvcore_array__ is half.__kvcore_array__


def test_host_blocks() -> None:
    with device() as dev:
        buffer = dev.empty(4, "int32")
        with buffer.host("w") as a:
            a[:] = 1
        with buffer.host("r") as a:
            assert not a.flags.writeable
        with buffer.host("rw") as a:
            a += 1
        assert buffer.numpy().tolist() == [2, 2, 2, 2]
        with pytest.raises(kvcore.ParamInvalidError, match=r"^mode: expected 'r', 'w' or 'rw'"):
            buffer.host("x").__enter__()


def test_profiles_set_the_capacity() -> None:
    for name in ("A2", "A3"):
        with kvcore.Device(name) as dev:
            assert dev.memory().capacity == 64 * 2**30
            assert dev.memory("host").capacity is None


def test_an_unknown_space() -> None:
    with device() as dev, pytest.raises(kvcore.ParamInvalidError, match=r"^space: expected one"):
        dev.memory("moon")
