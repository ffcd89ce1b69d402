# SPDX-License-Identifier: Apache-2.0
"""Copies between the host and memory that streams use, as the double judges them."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_size_t, c_uint64, c_void_p

import numpy as np
import pytest
from double.asking import D2H, H2D, OUT, noticed
from double.direct import Double, pointer

SIZE = c_size_t(64)


@pytest.mark.parametrize("call", ["read", "write", "fill"])
def test_synchronous_copies_wait_for_no_stream(double: Double, call: str) -> None:
    address, stream = double.malloc(64), double.stream()
    host = (ctypes.c_char * 64)()
    calls = {
        "read": lambda: double.copy(host, pointer(address), 64, D2H),
        "write": lambda: double.copy(pointer(address), host, 64, H2D),
        "fill": lambda: double.rt("aclrtMemset", pointer(address), SIZE, 1, SIZE),
    }
    assert calls[call]() == 0
    double.ok(double.rt("aclrtMemsetAsync", pointer(address), SIZE, 2, SIZE, pointer(stream)))
    assert calls[call]() == 0
    noticed(double, "[5.8]", "a launched aclrtMemsetAsync still uses this memory")
    assert double.sync(stream) == 0
    assert calls[call]() == 0
    double.free(address)


def test_a_synchronous_copy_beside_tasks_that_do_not_mind(double: Double) -> None:
    """Other bytes of the same allocation, and readers beside a reader, are no fault."""
    address, stream = double.malloc(128), double.stream()
    pinned = double.made("aclrtMallocHost", SIZE)
    host = (ctypes.c_char * 64)()
    double.ok(double.rt("aclrtMemsetAsync", pointer(address), SIZE, 2, SIZE, pointer(stream)))
    assert double.copy(pointer(address + 64), host, 64, H2D) == 0
    assert double.copy(host, pointer(address + 64), 64, D2H) == 0
    assert double.sync(stream) == 0
    assert double.copy_async(pointer(pinned), pointer(address), 64, D2H, stream) == 0
    assert double.copy(host, pointer(address), 64, D2H) == 0
    assert double.copy(pointer(address), host, 64, H2D) == 0
    noticed(double, "[5.8]", "dst: a launched aclrtMemcpyAsync still uses this memory")
    assert double.sync(stream) == 0
    assert double.rt("aclrtFreeHost", pointer(pinned)) == 0
    double.free(address)


def test_pageable_memory_blocks(double: Double) -> None:
    address, stream = double.malloc(64), double.stream()
    pinned = double.made("aclrtMallocHost", SIZE)
    assert double.copy_async(pointer(address), pointer(pinned), 64, H2D, stream) == 0
    assert double.num_blocking() == 0
    host = (ctypes.c_char * 64)()
    assert double.copy_async(pointer(address), host, 64, H2D, stream) == 0
    assert double.copy_async(host, pointer(address), 64, D2H, stream) == 0
    assert double.num_blocking() == 2
    assert double.num_blocking() == 0
    assert double.rt("aclrtFreeHost", pointer(pinned)) == 0
    double.free(address)


def test_whole_pages_are_registered(double: Double) -> None:
    memory = np.empty(3 * 4096, np.uint8)
    aligned = pointer(-(-memory.ctypes.data // 4096) * 4096)
    given = c_uint64(4000), 0, byref(OUT)
    assert double.rt("aclrtHostRegister", aligned, *given) == 107000
    noticed(double, "[5.9]", "4000 bytes are no whole pages")
    found = c_void_p()
    assert double.rt("aclrtHostRegister", aligned, c_uint64(4096), 0, byref(found)) == 0
    assert double.rt("aclrtHostUnregister", aligned) == 0
