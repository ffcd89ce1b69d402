# SPDX-License-Identifier: Apache-2.0
"""What the first collection of work leaves out: rarer arguments, refusals, failures, a 950."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from npu_work import BOTH, agrees, values

import kvcore
import npu as calls
from kvcore.dtypes import BY_NAME
from kvcore.npu.call import launch
from kvcore.npu.cann import library

SLOTS = np.array([0, 5, 2, 7], np.int32)


def _plain() -> dict[str, Any]:
    return {
        "key": values(4, 2, 16),
        "value": values(4, 2, 16) + 1,
        "key_cache": values(2, 4, 2, 16),
        "value_cache": values(2, 4, 2, 16),
        "slot_mapping": SLOTS,
    }


def plain() -> bool:
    """Norm, nothing strided."""
    return agrees("scatter_pa_kv_cache", _plain(), BOTH)


def nhsd() -> bool:
    """Scenario 7."""
    arrays = _plain() | {"key_cache": values(2, 2, 4, 16), "value_cache": values(2, 2, 4, 16)}
    return agrees("scatter_pa_kv_cache", arrays, BOTH, scatter_mode="NHSD")


def _gather() -> dict[str, Any]:
    return {
        "key_cache": values(4, 4, 2, 16),
        "value_cache": values(4, 4, 2, 16) + 1,
        "block_tables": np.array([[2, 0, 1], [1, 3, 0]], np.int32),
        "seq_lens": np.array([5, 4], np.int32),
        "key": values(9, 2, 16),
        "value": values(9, 2, 16),
    }


def gather_offset() -> bool:
    """Entries of the table are skipped; lengths that are no totals."""
    arrays = _gather() | {"seq_offset": np.array([4, 0], np.int32)}
    return agrees("gather_pa_kv_cache", arrays, ("key", "value"))


def gather_nz() -> bool:
    """PA_NZ: two axes come out."""
    arrays = _gather() | {
        "key_cache": values(4, 2, 16, 16),
        "value_cache": values(4, 2, 16, 16) + 1,
        "key": values(9, 32),
        "value": values(9, 32),
    }
    return agrees("gather_pa_kv_cache", arrays, ("key", "value"), cache_mode="PA_NZ")


def selection_rope() -> bool:
    """With rope, rows of which some is held; every array another shape or other values."""
    arrays = {
        "selection_k_rope": values(6, 8, 16),
        "selection_kv_cache": values(6, 8, 64),
        "selection_kv_block_table": np.array([[1, 0, 2], [3, 5, 4]], np.int32),
        "selection_kv_block_status": np.full((2, 1, 1, 5), -1, np.int32),
        "selection_topk_indices": np.array([3, 0, 5, 2, 1, 4, 0, 6], np.int32).reshape(2, 1, 1, 4),
        "full_k_rope": values(9, 8, 16),
        "full_kv_cache": values(9, 8, 64),
        "full_kv_block_table": np.arange(8, dtype=np.int32).reshape(2, 4)[::-1].copy(),
        "full_kv_actual_seq": np.array([30, 29], np.int32),
        "full_q_actual_seq": np.ones(2, np.int32),
    }
    outputs = ("selection_k_rope", "selection_kv_cache", "selection_kv_block_status")
    return agrees("gather_selection_kv_cache", arrays, outputs, selection_topk_block_size=4)


def _num_launches() -> int:
    runtime: Any = library.current().runtime.handle
    runtime.kvdouble_num_calls.restype = ctypes.c_uint64
    names = (call.function.encode() for call in launch.CALLS.values())
    return sum(runtime.kvdouble_num_calls(name) for name in set(names))


def _refused(arrays: dict[str, Any], **given: Any) -> bool:
    before = _num_launches()
    try:
        calls.run("scatter_pa_kv_cache", arrays, **given)
    except kvcore.ParamInvalidError:
        return _num_launches() == before
    return False


def what_kernels_do_wrong() -> bool:
    """An int8 NHSD cache stays unwritten on A2 and A3, so it is no call."""
    arrays = {name: a.view(np.int8) if a.dtype == np.float16 else a for name, a in _plain().items()}
    arrays |= {name: arrays[name].transpose(0, 2, 1, 3).copy() for name in BOTH}
    return _refused(arrays, scatter_mode="NHSD")


def caches_strided_within_their_blocks() -> bool:
    """A kernel of A2 or A3 would write elsewhere."""
    wide = {name: np.repeat(_plain()[name], 2, axis=2)[:, :, ::2] for name in BOTH}
    return _refused(_plain() | wide)


def nothing() -> bool:
    """No token: no call."""
    before = _num_launches()
    arrays = _plain()
    arrays |= {name: arrays[name][:0].copy() for name in ("key", "value", "slot_mapping")}
    return agrees("scatter_pa_kv_cache", arrays, BOTH) and _num_launches() == before


@contextmanager
def _failing(symbol: str, nth: int, code: int) -> Iterator[None]:
    runtime: Any = library.current().runtime.handle
    runtime.kvdouble_fail(symbol.encode(), nth, code)
    try:
        yield
    finally:
        runtime.kvdouble_fail_never()


def _fails(symbol: str, nth: int, code: int, kind: type[kvcore.KVCoreError]) -> bool:
    placed = calls.Placed(**_plain())
    try:
        with _failing(symbol, nth, code):
            kvcore.scatter_pa_kv_cache(**placed.arrays)
    except kvcore.KVCoreError as error:
        return type(error) is kind and error.code == code and "ordered to fail" in str(error)
    finally:
        placed.free()
    return False


def failing_phase_one() -> bool:
    """The status, with CANN's own words."""
    name = "aclnnScatterPaKvCacheGetWorkspaceSize"
    return _fails(name, 1, 161002, kvcore.ParamInvalidError)


def failing_phase_two() -> bool:
    """The same; the executor has gone all the same."""
    return _fails("aclnnScatterPaKvCache", 1, 561000, kvcore.KVCoreError)


def no_workspace() -> bool:
    """The executor must go when there is nothing to run it with."""
    cann = library.current()
    cann.set_device(0)
    cann.aclrtSynchronizeDevice()
    launch.release(None, 0)  # the workspace that there may be
    return _fails("aclrtMalloc", 0, 207001, kvcore.DeviceOutOfMemoryError)


def two_streams() -> bool:
    """Work of two streams that nothing orders."""
    cann = library.current()
    cann.set_device(0)
    streams = [ctypes.c_void_p(), ctypes.c_void_p()]
    right = []
    for stream in streams:
        cann.aclrtCreateStream(ctypes.byref(stream))
    placed = [calls.Placed(**_plain()) for _ in streams]
    try:
        for stream, arrays in zip(streams, placed, strict=True):
            with launch.onto(stream=stream.value or 0, device_id=0):
                kvcore.scatter_pa_kv_cache(**arrays.arrays)
        want = _plain()
        kvcore.scatter_pa_kv_cache(**want)
        for stream, arrays in zip(streams, placed, strict=True):
            cann.aclrtSynchronizeStream(stream)
            right.append(np.array_equal(arrays.host("key_cache"), want["key_cache"]))
    finally:
        for stream, arrays in zip(streams, placed, strict=True):
            arrays.free()
            launch.release(stream.value, 0)
            cann.aclrtDestroyStream(stream)
    return all(right)


def growing_in_use() -> bool:
    """A place for copies is outgrown while work that nobody waits for uses it."""
    cann, both = library.current(), []
    for tokens in (4, 2000):
        arrays = _plain() | {
            name: values(tokens, 3, 2, 16)[:, which] for which, name in enumerate(("key", "value"))
        }
        arrays["slot_mapping"] = np.arange(tokens, dtype=np.int32)
        arrays |= {name: values(tokens, 4, 2, 16) for name in BOTH}
        both.append(calls.Placed(**arrays))
    try:
        for placed in both:
            kvcore.scatter_pa_kv_cache(**placed.arrays)
        pool = launch.memory.pool_of(cann, 0, 0)
        waits = len(pool._retired)
        cann.aclrtSynchronizeStream(0)
        pool.collect()
        return waits > 0 and not pool._retired
    finally:
        for placed in both:
            placed.free()


RARE: tuple[Callable[[], bool], ...] = (
    *(plain, nhsd, gather_offset, gather_nz, selection_rope, what_kernels_do_wrong),
    *(caches_strided_within_their_blocks, nothing, failing_phase_one, failing_phase_two),
    *(no_workspace, two_streams, growing_in_use),
)


# ---------------------------------------------------------------- what a 950 has


def key_cache_alone() -> bool:
    """ScatterPaCache."""
    arrays = _plain()
    arrays = {name: arrays[name] for name in ("key", "key_cache", "slot_mapping")}
    return agrees("scatter_pa_cache", arrays, ("key_cache",))


def key_cache_compressed() -> bool:
    """ScatterPaCache with all that it takes."""
    arrays = {
        "key": values(2, 7, 2, 32),
        "key_cache": values(8, 16, 1, 32),
        "slot_mapping": np.array([[0, 32], [64, 96]], np.int32),
        "compress_lens": np.array([2, 3, 1, 2], np.int32),
        "compress_seq_offset": np.array([1, 2, 0, 3], np.int32),
        "seq_lens": np.array([5, 7], np.int32),
    }
    return agrees("scatter_pa_cache", arrays, ("key_cache",))


def packed() -> bool:
    """Two elements to a byte, in caches that are parts of one slab."""
    slab = values(2, 2, 4, 2, 32).astype(np.int8).view(np.uint8)
    arrays: dict[str, Any] = {
        "key": values(4, 2, 32).astype(np.int8).view(np.uint8),
        "value": values(4, 2, 32).astype(np.int8).view(np.uint8) + 1,
        "key_cache": slab[:, 0],
        "value_cache": slab[:, 1],
        "slot_mapping": SLOTS,
    }
    assert BY_NAME["float4_e2m1"].packed
    return agrees("scatter_pa_kv_cache", arrays, BOTH, dtype="float4_e2m1")


def strided() -> bool:
    """Its kernels honour strides."""
    fused, slab = values(4, 3, 2, 16), values(2, 4, 2, 2, 16)
    arrays = {
        "key": fused[:, 1],
        "value": fused[:, 2],
        "key_cache": slab[:, :, 0],
        "value_cache": slab[:, :, 1],
        "slot_mapping": SLOTS,
    }
    return agrees("scatter_pa_kv_cache", arrays, BOTH)


ON_950: tuple[Callable[[], bool], ...] = (key_cache_alone, key_cache_compressed, packed, strided)
