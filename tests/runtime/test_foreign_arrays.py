# SPDX-License-Identifier: Apache-2.0
"""Copies and fills of torch tensors and of other packages' arrays, on both clocks.

Bytes are compared as unsigned integers in plain numpy, those around the written ones too.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from fakes import device

import kvcore

TYPES = (
    "bfloat16", "float16", "float32", "float8_e5m2", "float8_e4m3fn",
    "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64",
)  # fmt: skip
#: Of no row of the operators' table: copies take them all the same.
OTHERS = ("float64", "bool", "complex64", "complex128", "float8_e5m2fnuz")


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed")


def random_tensor(torch: Any, kind: str, rows: int, columns: int, seed: int = 0) -> Any:
    """A tensor of random bits (of zeros and ones for bool)."""
    dtype = getattr(torch, kind)
    draw = np.random.default_rng(seed)
    raw = draw.integers(0, 2 if kind == "bool" else 256, (rows, columns * dtype.itemsize))
    return torch.from_numpy(raw.astype(np.uint8)).view(dtype)


def bits_of(tensor: Any) -> np.ndarray[Any, Any]:
    """uint8 [..., item size], a copy."""
    import torch

    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().copy()
    return raw.reshape(*tensor.shape, tensor.dtype.itemsize)


@pytest.mark.parametrize("kind", TYPES)
async def test_a_tensor_crosses_a_buffer_and_comes_back(torch: Any, clock: str, kind: str) -> None:
    given = random_tensor(torch, kind, 6, 16)
    back = random_tensor(torch, kind, 8, 20, seed=1)
    around = bits_of(back)
    async with device(clock) as dev:
        stream, buffer = dev.stream(), dev.empty((6, 16), kind)
        stream.copy(buffer, given)
        stream.copy(back[1:7, 2:18], buffer)
        await stream.synchronize()
    wanted = around.copy()
    wanted[1:7, 2:18] = bits_of(given)
    assert (bits_of(back) == wanted).all()


@pytest.mark.parametrize("kind", [*TYPES, *OTHERS])
async def test_a_batch_between_tensors(torch: Any, clock: str, kind: str) -> None:
    """Contiguous ones go as one table of addresses, strided ones one by one: both are right."""
    for step in (1, 2):
        sources = [random_tensor(torch, kind, 4, 6 * step, seed=n)[:, ::step] for n in range(3)]
        targets = [random_tensor(torch, kind, 4, 6 * step, seed=9)[:, ::step] for _ in range(3)]
        async with device(clock) as dev:
            stream = dev.stream()
            stream.copy_batch(targets, sources)
            await stream.synchronize()
        for target, source in zip(targets, sources, strict=True):
            assert (bits_of(target) == bits_of(source)).all()


async def test_packed_float4(torch: Any) -> None:
    kind = getattr(torch, "float4_e2m1fn_x2", None)
    if kind is None:
        pytest.skip("this torch has no float4")
    raw = torch.arange(32, dtype=torch.uint8).reshape(4, 8)
    async with device("wall") as dev:
        stream, buffer = dev.stream(), dev.empty((4, 8), "float4_e2m1")
        stream.copy(buffer, raw.view(kind))
        await stream.synchronize()
        with buffer.host("r") as seen:
            assert (seen == raw.numpy()).all()


@pytest.mark.parametrize("kind", ["bfloat16", "float32", "float8_e5m2", "int32"])
async def test_fills(torch: Any, clock: str, kind: str) -> None:
    """A tensor is filled, and a tensor of one number is a value."""
    tensor = random_tensor(torch, kind, 5, 7)
    wanted = bits_of(tensor).copy()
    three = bits_of(torch.full((1,), 3.0).to(getattr(torch, kind)))[0]
    wanted[1:4, 1:6] = three
    for value in (3, torch.tensor(3), torch.tensor(3.0, dtype=torch.bfloat16)):
        if kind == "int32" and not isinstance(value, int) and value.dtype != torch.int64:
            continue
        now = random_tensor(torch, kind, 5, 7)
        async with device(clock) as dev:
            stream = dev.stream()
            stream.fill(now[1:4, 1:6], value)
            await stream.synchronize()
        assert (bits_of(now) == wanted).all()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda t: t.zeros(4, 8, requires_grad=True), "does not require grad"),
        (lambda t: t.zeros(4, 8).to_sparse(), "a dense"),
        (lambda t: t.zeros(4, 8, device="meta"), "a tensor on 'cpu'"),
        (lambda t: t.zeros(4, 8, dtype=t.complex64).conj(), "conj or neg"),
        (lambda t: t.zeros(4, 8).bfloat16(), "dtype float32 as dst, got .*bfloat16"),
        (lambda t: t.zeros(4, 7), r"shape \(4, 8\) as dst"),
        (lambda t: np.ma.zeros((4, 8), np.float32), "an array without a mask"),
    ],
)
async def test_what_cannot_be_read_is_refused(
    torch: Any, clock: str, make: Any, match: str
) -> None:
    async with device(clock) as dev:
        stream, buffer = dev.stream(), dev.empty((4, 8), "float32")
        with pytest.raises(kvcore.ParamInvalidError, match=f"^src: expected .*{match}"):
            stream.copy(buffer, make(torch))
        with pytest.raises(kvcore.ParamInvalidError, match=rf"^src\[0\]: expected .*{match[:8]}"):
            stream.copy_batch([buffer], [make(torch)])
        stream.copy(buffer, torch.zeros(4, 8))
        await stream.synchronize()


@pytest.mark.parametrize("batch", [False, True])
async def test_a_tensor_that_shrank_before_its_copy_ran(torch: Any, batch: bool) -> None:
    """Its memory is gone when the copy's turn comes: refused then, and nothing is written."""
    for shrink in (True, False):
        source = torch.full((4, 8), 7.0)
        async with device("wall") as dev:
            stream, buffer = dev.stream(), dev.empty((4, 8), "float32")
            stream.fill(buffer, 1.0)
            gate = threading.Event()
            stream.call(gate.wait)
            try:
                if batch:
                    stream.copy_batch([buffer], [source])
                else:
                    stream.copy(buffer, source)
                if shrink:
                    source.resize_(1 << 16)  # moves it
            finally:
                gate.set()
            if shrink:
                with pytest.raises(kvcore.StreamError) as told:
                    await stream.synchronize()
                cause = told.value.__cause__
                assert isinstance(cause, kvcore.ParamInvalidError)
                assert str(cause).startswith("src")
                assert "changed since" in str(cause)
            else:
                await stream.synchronize()
            with buffer.host("r") as seen:
                assert (seen == (1.0 if shrink else 7.0)).all()


async def test_a_numpy_array_that_was_resized_before_its_copy_ran() -> None:
    source = np.full((64, 64), 7.0)
    async with device("wall") as dev:
        stream, buffer = dev.stream(), dev.empty((64, 64), "float64")
        stream.fill(buffer, 1.0)
        gate = threading.Event()
        stream.call(gate.wait)
        try:
            stream.copy_batch([buffer], [source])
            source.resize((1, 1), refcheck=False)
        finally:
            gate.set()
        with pytest.raises(kvcore.StreamError, match="changed since"):
            await stream.synchronize()
        with buffer.host("r") as seen:
            assert (seen == 1.0).all()


def test_the_runtime_does_not_bring_torch() -> None:
    program = (
        "import sys, numpy as np, kvcore\n"
        "with kvcore.Device() as d:\n"
        "    s, b = d.stream(), d.empty((16,), 'uint8')\n"
        "    s.copy(b, np.zeros(16, np.uint8)); s.copy(b, bytearray(16)); s.fill(b, 1)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("batch", [False, True])
async def test_a_target_whose_elements_share_bytes(torch: Any, clock: str, batch: bool) -> None:
    """A copy into it is refused, and nothing is written; it may be read, and filled."""
    storage = torch.zeros(64, dtype=torch.bfloat16)
    source = random_tensor(torch, "bfloat16", 4, 6)
    folded = [storage.as_strided((4, 6), strides) for strides in ((0, 1), (3, 1), (6, 0))]
    apart = storage.as_strided((4, 6), (1, 9))

    def copy(stream: Any, buffer: Any, target: Any) -> None:
        if batch:
            stream.copy_batch([buffer, target], [source, source])
        else:
            stream.copy(target, source)

    async with device(clock) as dev:
        stream, buffer = dev.stream(), dev.empty((4, 6), "bfloat16")
        for target in folded:
            match = r"^dst.*: expected elements with bytes of their own"
            with pytest.raises(kvcore.ParamInvalidError, match=match):
                copy(stream, buffer, target)
        await stream.synchronize()
        assert not bits_of(storage).any()
        stream.copy(apart, source)
        stream.copy(buffer, folded[1])
        await stream.synchronize()
        assert (bits_of(apart) == bits_of(source)).all()
        shown = np.asarray(buffer).view(np.uint8).reshape(4, 6, 2)
        assert (shown == bits_of(folded[1])).all()
        stream.fill(folded[0], 1.5)
        await stream.synchronize()
    assert (storage[:6] == 1.5).all()


@pytest.mark.parametrize("kind", ["int4", "uint4"])
async def test_values_that_integers_of_four_bits_do_not_have(clock: str, kind: str) -> None:
    low, high = (-8, 7) if kind == "int4" else (0, 15)
    async with device(clock) as dev:
        stream, buffer = dev.stream(), dev.empty((3,), kind)
        for value in (low, high, float(high), True):
            stream.fill(buffer, value)
            await stream.synchronize()
            assert np.asarray(buffer).astype(np.int64).tolist() == [int(value)] * 3
        for bad in (low - 1, high + 1, 1.5, float("nan"), float("inf"), 300):
            with pytest.raises(kvcore.ParamInvalidError, match=f"value: .* type {kind}, got"):
                stream.fill(buffer, bad)
        await stream.synchronize()
        assert np.asarray(buffer).astype(np.int64).tolist() == [1, 1, 1]
