# SPDX-License-Identifier: Apache-2.0
"""swap_blocks_batch: copies by address, and addresses that are nobody's."""

from __future__ import annotations

import mmap
import re
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore
from tensors import WITHOUT_TORCH

torch = pytest.importorskip("torch", reason=WITHOUT_TORCH)
from kvcore.torch.swap import swap_blocks_batch  # noqa: E402


def numbers(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int64)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 24))),
    st.integers(0, 2),
)
def test_copies_in_order(pieces: list[tuple[int, int, int]], direction: int) -> None:
    source, target = bytearray(range(64)), bytearray(64)
    want = bytearray(64)
    for start, end, size in pieces:
        want[end : end + size] = source[start : start + size]
    src = np.frombuffer(source, np.uint8)
    dst = np.frombuffer(target, np.uint8)
    swap_blocks_batch(
        numbers(*(src.ctypes.data + start for start, _, _ in pieces)),
        numbers(*(dst.ctypes.data + end for _, end, _ in pieces)),
        numbers(*(size for _, _, size in pieces)),
        direction,
    )
    assert target == want


def test_through_torch_ops(torch_npu: Any) -> None:
    """Blocks of a device cache out to a host pool and back, as an offload worker does it."""
    device = torch.randint(0, 256, (8, 512), dtype=torch.uint8)
    host = torch.zeros(4, 512, dtype=torch.uint8)
    want = device.clone()
    blocks, places = torch.tensor([6, 1, 3]), torch.tensor([0, 2, 3])
    sizes = torch.full((3,), 512)
    inside, outside = device.data_ptr() + blocks * 512, host.data_ptr() + places * 512
    torch.ops._C_ascend.swap_blocks_batch(inside, outside, sizes, 1)
    assert torch.equal(host[places], want[blocks])
    device.zero_()
    torch.ops._C_ascend.swap_blocks_batch(x=outside, y=inside, z=sizes, direction=0)
    assert torch.equal(device[blocks], want[blocks])
    assert int(device.count_nonzero()) == int(want[blocks].count_nonzero())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": numbers(0)}, "x[0]: expected 16 bytes of readable memory of this process, got"),
        ({"x": numbers(-8)}, "x[0]: expected 16 bytes of readable memory"),
        ({"x": numbers(2**63 - 1)}, "x[0]: expected 16 bytes of readable memory"),
        ({"y": numbers(64)}, "y[0]: expected 16 bytes of writable memory"),
        ({"z": numbers(2**62)}, f"x[0]: expected {2**62} bytes of readable memory"),
        ({"z": numbers(-1)}, "z[0]: expected a size >= 0, got -1"),
        ({"z": numbers(1, 2)}, "z: expected shape [1] as x, got [2]"),
        ({"y": numbers()}, "y: expected shape [1] as x, got [0]"),
        ({"x": torch.zeros(1, dtype=torch.int32)}, "x: expected int64 [n], got int32 [1]"),
        ({"x": torch.zeros(1, 1, dtype=torch.int64)}, "x: expected int64 [n]"),
        ({"x": None}, "x: expected an array, got None"),
        ({"direction": 3}, "direction: expected one of 0 (host to device)"),
        ({"direction": -1}, "direction: expected one of"),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    source, target = np.arange(16, dtype=np.uint8), np.zeros(16, np.uint8)
    arguments = {
        "x": numbers(source.ctypes.data),
        "y": numbers(target.ctypes.data),
        "z": numbers(16),
        "direction": 2,
        **change,
    }
    with pytest.raises(kvcore.KVCoreError, match="^" + re.escape(message)):
        swap_blocks_batch(**arguments)
    assert not target.any()


def test_nothing_is_copied_when_one_range_is_bad() -> None:
    source, target = np.ones(8, np.uint8), np.zeros(8, np.uint8)
    with pytest.raises(kvcore.ParamInvalidError, match=r"^y\[1\]"):
        swap_blocks_batch(
            numbers(source.ctypes.data, source.ctypes.data),
            numbers(target.ctypes.data, 4096),
            numbers(8, 8),
            0,
        )
    assert not target.any()


def test_the_lists_are_read_before_the_first_byte_moves() -> None:
    """A copy that lands on the lists changes nothing of the call."""
    numbers_ = np.arange(1, 9, dtype=np.int64)
    base = numbers_.ctypes.data
    out = np.zeros(4, np.int64)
    x = numbers(base, base + 8, base + 16)
    y = numbers(0, 0, out.ctypes.data)
    z = numbers(8, 8, 8)
    y[0], y[1] = y.data_ptr() + 16, z.data_ptr() + 16  # over y[2] and z[2]
    swap_blocks_batch(x, y, z, 2)
    assert (y[2], z[2]) == (1, 2)
    assert out.tolist() == [3, 0, 0, 0]


def test_lists_with_strides_are_read() -> None:
    source, target = np.arange(4, dtype=np.uint8), np.zeros(4, np.uint8)
    pairs = torch.tensor([[source.ctypes.data, 0], [source.ctypes.data + 3, 0]])
    swap_blocks_batch(
        pairs[:, 0], numbers(target.ctypes.data + 2, target.ctypes.data), numbers(1, 1), 0
    )
    assert target.tolist() == [3, 0, 0, 0]


# ---------------------------------------------------------------- an operation of its stream
@pytest.fixture
def installed() -> Iterator[Any]:
    ns = types.ModuleType("torch_npu")
    with kvcore.Device(race_check="record") as device, kvcore.torch.install(ns, device=device):
        yield ns, device


def swap(source: Any, target: Any, direction: int = 1) -> None:
    torch.ops._C_ascend.swap_blocks_batch(
        numbers(source.data_ptr()), numbers(target.data_ptr()), numbers(source.nbytes), direction
    )


def test_it_waits_for_what_its_stream_waits_for(installed: Any) -> None:
    ns, device = installed
    stream, event = ns.npu.Stream(), ns.npu.ExternalEvent()
    cache, host, key = torch.zeros(2, 4, 1, 16), torch.zeros(4, 1, 16), torch.ones(4, 1, 16)
    with ns.npu.stream(stream):
        event.wait(stream)
        ns._npu_reshape_and_cache_siso(key.half(), cache.half(), torch.arange(4).int())
        swap(key, host)
        key.fill_(3)  # the bytes are read when it runs
    assert not host.any()
    event.record(ns.npu.default_stream())
    ns.npu.synchronize()
    assert (host == 3).all()
    assert not device.races


def test_a_graph_keeps_the_lists_and_reads_the_bytes(installed: Any) -> None:
    ns, device = installed
    stream = ns.npu.Stream()
    source, target = torch.zeros(8), torch.zeros(8)
    x, y, z = numbers(source.data_ptr()), numbers(target.data_ptr()), numbers(source.nbytes)
    with ns.npu.stream(stream), device.capture(stream.raw) as graph:
        torch.ops._C_ascend.swap_blocks_batch(x, y, z, 2)
    for tensor in (x, y, z):
        tensor.zero_()  # taken at the call
    for value in (1, 2):
        source.fill_(value)
        graph.replay(stream.raw)
        stream.synchronize()
        assert (target == value).all()


def test_memory_that_is_gone_when_it_runs(installed: Any) -> None:
    ns, device = installed
    stream, target = ns.npu.Stream(), torch.zeros(8)
    page = mmap.mmap(-1, 1 << 16)
    frozen = np.frombuffer(page, np.uint8)
    address = frozen.ctypes.data
    with ns.npu.stream(stream), device.capture(stream.raw) as graph:
        torch.ops._C_ascend.swap_blocks_batch(
            numbers(address), numbers(target.data_ptr()), numbers(32), 2
        )
    graph.replay(stream.raw)
    stream.synchronize()
    del frozen
    page.close()
    graph.replay(stream.raw)
    with pytest.raises(kvcore.StreamError) as caught:
        stream.synchronize()
    assert str(caught.value.__cause__).startswith("x[0]: expected 32 bytes of readable memory")


@pytest.mark.parametrize("ordered", [True, False])
def test_the_race_check_sees_it(installed: Any, ordered: bool) -> None:
    ns, device = installed
    first, second = ns.npu.Stream(), ns.npu.Stream()
    source, target = torch.ones(2, 64), torch.zeros(2, 64)
    with ns.npu.stream(first):
        swap(source[0], target[0])
    if ordered:
        second.wait_stream(first)
    with ns.npu.stream(second):
        swap(target[1], source[1])  # other bytes of the same memory
        swap(target[0], source[1])
    ns.npu.synchronize()
    assert len(device.races) == (0 if ordered else 1)
    assert all("swap_blocks_batch at test_swap.py:" in str(race) for race in device.races)


@pytest.mark.parametrize("direction", [0, 1, 2])
def test_it_takes_the_time_of_a_copy(direction: int) -> None:
    """On the model clock: what the runtime's own copy of as many bytes that way takes."""
    ns = types.ModuleType("torch_npu")
    source, target = torch.ones(1 << 20), torch.zeros(1 << 20)
    with (
        kvcore.Device("A3", clock="model", trace=True) as device,
        kvcore.torch.install(ns, device=device),
    ):
        make = (device.empty_host, device.empty) if direction < 2 else (device.empty, device.empty)
        ends = [one(1 << 20) for one in (make if direction == 0 else make[::-1])]
        device.default_stream.copy(ends[1], ends[0])
        ns.npu.synchronize()
        swap(source, target, direction)
        ns.npu.synchronize()
        copy, swapped = device.trace.spans
    assert swapped.name.startswith("swap_blocks_batch at test_swap.py:")
    assert swapped.bytes_moved == source.nbytes
    assert copy.end > copy.start
    assert swapped.end - swapped.start == pytest.approx(copy.end - copy.start)
    assert (target == 1).all()


def test_memory_that_may_only_be_read() -> None:
    source = np.ones(8, np.uint8)
    with mmap.mmap(-1, 4096, prot=mmap.PROT_READ) as page:
        frozen = np.frombuffer(page, np.uint8)
        address = frozen.ctypes.data
        swap_blocks_batch(numbers(address), numbers(source.ctypes.data), numbers(8), 1)
        assert not source.any()
        with pytest.raises(
            kvcore.ParamInvalidError, match=r"^y\[0\]: expected 8 bytes of writable"
        ):
            swap_blocks_batch(numbers(source.ctypes.data), numbers(address), numbers(8), 0)
        del frozen
