# SPDX-License-Identifier: Apache-2.0
"""swap_blocks_batch: copies by address, and addresses that are nobody's."""

from __future__ import annotations

import mmap
import re
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
