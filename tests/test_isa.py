# SPDX-License-Identifier: Apache-2.0
"""Every instruction set gives the same bytes, streaming or not, at any alignment.

Tokens of hundreds of bytes, so that whole lines, runs and windows occur; the bytes around every
row are compared too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore
from kvcore._kernels import isa

STREAM_ALL, STREAM_NONE = 0, 1 << 60
#: Every way of writing that this CPU has: instruction sets and their paths.
WAYS = [(name, path) for name in isa.available() for path in isa.paths(name)]


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    name, path, count = isa.current(), isa.path(), isa.stream_bytes()
    yield
    isa.select(name, path)
    isa.set_stream_bytes(count)


@st.composite
def slots_of(draw: st.DrawFn, num_slots: int) -> np.ndarray[Any, Any]:
    """Runs, random ones, repeats and skips, mixed."""
    slots: list[int] = []
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["run", "random", "repeat", "skip", "sparse"]))
        count = draw(st.integers(1, 70))
        start = draw(st.integers(0, num_slots - 1))
        if kind == "run":
            slots += range(start, min(start + count, num_slots))
        elif kind == "sparse":
            slots += range(start, min(start + 2 * count, num_slots), 2)
        elif kind == "random":
            seed = draw(st.integers(0, 1 << 30))
            slots += np.random.default_rng(seed).integers(0, num_slots, count).tolist()
        elif kind == "repeat":
            slots += [start] * min(count, 5)
        else:
            slots += [-1 - start] * min(count, 5)
    return np.array(slots, draw(st.sampled_from([np.int32, np.int64])))


def placed(shape: tuple[int, ...], offset: int, seed: int) -> np.ndarray[Any, Any]:
    """Random bytes beginning ``offset`` bytes after a line."""
    size = int(np.prod(shape))
    buffer = np.random.default_rng(seed).integers(0, 256, size + 256, dtype=np.uint8)
    begin = -buffer.ctypes.data % 64 + offset
    return buffer[begin : begin + size].reshape(shape)


@given(
    st.data(),
    st.sampled_from(["Norm", "NHSD", "PA_NZ", "PA_NZ 5-D"]),
    st.sampled_from([(1, 32), (1, 640), (1, 656), (2, 96), (3, 160), (8, 256), (4, 33)]),
    st.sampled_from([1, 3, 16, 128]),
    st.sampled_from([0, 1, 8, 16, 32, 48]),
    st.sampled_from([0, 4, 16]),
    st.sampled_from([1, 2, 3]),
)
def test_every_instruction_set_writes_the_same(
    data: st.DataObject,
    layout: str,
    size: tuple[int, int],
    block_size: int,
    cache_offset: int,
    key_offset: int,
    num_threads: int,
) -> None:
    heads, width = size
    if layout.startswith("PA_NZ"):
        width = -(-width // 32) * 32
    blocks = data.draw(st.integers(1, 3)) + 200 // block_size
    slots = data.draw(slots_of(blocks * block_size))
    key = placed((len(slots), heads, width), key_offset, 1)
    shape = {
        "Norm": (blocks, block_size, heads, width),
        "NHSD": (blocks, heads, block_size, width),
        "PA_NZ": (blocks, heads * width // 32, block_size, 32),
        "PA_NZ 5-D": (blocks, heads, width // 32, block_size, 32),
    }[layout]
    before = placed(shape, cache_offset, 2)
    want = before.copy()
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        block, row = divmod(slot, block_size)
        if layout == "Norm":
            want[block, row] = key[token]
        elif layout == "NHSD":
            want[block, :, row] = key[token]
        elif layout == "PA_NZ":
            want[block, :, row] = key[token].reshape(-1, 32)
        else:
            want[block, :, :, row] = key[token].reshape(heads, -1, 32)
    modes: dict[str, str] = {}
    if layout.startswith("PA_NZ"):
        modes["cache_mode"] = "PA_NZ"
    elif layout == "NHSD":
        modes["scatter_mode"] = "NHSD"
    for name, path in WAYS:
        isa.select(name, path)
        for count in (STREAM_ALL, STREAM_NONE):
            isa.set_stream_bytes(count)
            cache = placed(shape, cache_offset, 3)
            cache[...] = before
            buffer = cache.base
            assert isinstance(buffer, np.ndarray)
            begin = cache.ctypes.data - buffer.ctypes.data
            front, back = buffer[:begin].copy(), buffer[begin + cache.size :].copy()
            kvcore.scatter_pa_kv_cache(key, cache, slots, num_threads=num_threads, **modes)
            assert (cache == want).all(), (name, path, count)
            assert (buffer[:begin] == front).all()
            assert (buffer[begin + cache.size :] == back).all()


@pytest.mark.parametrize("pad", [0, 1, 8, 16, 24, 32, 48, 72])
def test_columns_any_number_of_bytes_apart(pad: int) -> None:
    blocks, columns, rows = 3, 5, 40
    step = rows * 32 + pad
    key = placed((rows, 1, columns * 32), 4, 1)
    for name, path in WAYS:
        isa.select(name, path)
        isa.set_stream_bytes(STREAM_ALL)
        pages = placed((blocks, columns, step), 16, 2)
        want = pages.copy()
        want[1, :, : rows * 32] = key.reshape(rows, columns, 32).swapaxes(0, 1).reshape(columns, -1)
        cache = pages[:, :, : rows * 32].reshape(blocks, columns, rows, 32)
        assert np.shares_memory(cache, pages)
        kvcore.scatter_pa_kv_cache(key, cache, np.arange(rows, 2 * rows), cache_mode="PA_NZ")
        assert (pages == want).all(), (name, path)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", isa.available())
def test_the_variable_selects(name: str) -> None:
    code = "import kvcore; print(kvcore.info()['cpu']['instruction_set'])"
    assert run_python(code, KVCORE_ISA=name).stdout.strip() == name


@pytest.mark.parametrize(
    ("variable", "shown"),
    [
        ("KVCORE_STREAM_BYTES", "['cpu']['stream_bytes']"),
        ("KVCORE_PARALLEL_BYTES", "['threads']['parallel_bytes']"),
    ],
)
def test_a_border_comes_from_its_variable(variable: str, shown: str) -> None:
    code = f"import kvcore; print(kvcore.info(){shown})"
    assert run_python(code, **{variable: "12345"}).stdout.strip() == "12345"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("KVCORE_ISA", "avx1024"),
        ("KVCORE_ISA", "AVX2"),
        ("KVCORE_STREAM_BYTES", "-1"),
        ("KVCORE_STREAM_BYTES", "many"),
        ("KVCORE_STREAM_BYTES", str(1 << 70)),
        ("KVCORE_STREAM_BYTES", "9" * 5000),
        ("KVCORE_PARALLEL_BYTES", "1.5"),
    ],
)
def test_nonsense_is_refused_with_what_is_allowed(variable: str, value: str) -> None:
    # The import survives it: kvcore.info() and the command line shall be able to say it.
    code = "import kvcore; assert {0!r} in kvcore.info()['unusable_settings'][0]; {1}"
    call = "kvcore.reshape_and_cache(None, None, None, None, None)"
    done = run_python(code.format(variable, call), **{variable: value})
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("kvcore.errors.ParamInvalidError")
    assert variable in last
    assert value in last


def test_each_wrong_variable_is_told_and_the_others_hold() -> None:
    code = "import kvcore; found = kvcore.info(); print(found['cpu']['stream_bytes'])"
    told = "; print(*found['unusable_settings'], sep='\\n')"
    done = run_python(
        code + told, KVCORE_ISA="none", KVCORE_STREAM_BYTES="77", KVCORE_PARALLEL_BYTES="x"
    )
    held, *faults = done.stdout.splitlines()
    assert held == "77"
    assert [fault.partition(":")[0] for fault in faults] == ["KVCORE_ISA", "KVCORE_PARALLEL_BYTES"]


@pytest.mark.parametrize("wrong", [-1, 1 << 62, True, 1.5, "1"])
def test_the_border_is_a_number_of_bytes(wrong: Any) -> None:
    with pytest.raises(ValueError, match="expected a number of bytes"):
        isa.set_stream_bytes(wrong)


def test_an_unknown_set_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of"):
        isa.select("none")
