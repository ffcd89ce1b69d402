# SPDX-License-Identifier: Apache-2.0
"""A little of everything the backend does, and what was amiss about it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from double.direct import Double

import kvcore
import npu as calls
from kvcore.npu.call import launch
from kvcore.npu.cann import library

Arrays = dict[str, Any]


def values(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).integers(-99, 99, shape).astype(np.float16)


def host(arrays: Arrays) -> Arrays:
    bases: dict[int, Any] = {}
    found = {}
    for name, array in arrays.items():
        base = array if array.base is None else array.base
        copy = bases.setdefault(id(base), base.copy())
        offset = array.ctypes.data - base.ctypes.data
        found[name] = np.ndarray(array.shape, array.dtype, copy, offset, array.strides)
    return found


def agrees(operator: str, arrays: Arrays, outputs: tuple[str, ...], **given: Any) -> bool:
    want = host(arrays)
    answer = getattr(kvcore, operator)(**want, **given)
    seen = calls.run(operator, arrays, **given)
    right = all(np.array_equal(seen[name], want[name]) for name in outputs)
    if operator == "gather_selection_kv_cache":
        right = right and np.array_equal(seen["returned"], answer)
    return right


BOTH = ("key_cache", "value_cache")


def scatter(tokens: int = 4) -> bool:
    """Views of a fused tensor and of a slab, bfloat16-free; an offset for the second cache."""
    fused, slab = values(tokens, 3, 2, 16), values(tokens, 2, 4, 2, 16)
    arrays = {
        "key": fused[:, 1],
        "value": fused[:, 2],
        "key_cache": slab[:, 0],
        "value_cache": slab[:, 1],
        "slot_mapping": np.arange(tokens, dtype=np.int32)[::-1].copy(),
    }
    return agrees("scatter_pa_kv_cache", arrays, BOTH)


def scatter_nz() -> bool:
    """PA_NZ."""
    arrays = {
        "key": values(4, 2, 32),
        "value": values(4, 2, 16),
        "key_cache": values(2, 4, 4, 16),
        "value_cache": values(2, 2, 4, 16),
        "slot_mapping": np.array([0, 5, 2, 7], np.int32),
    }
    return agrees("scatter_pa_kv_cache", arrays, BOTH, cache_mode="PA_NZ")


def nct() -> bool:
    """A fused buffer."""
    arrays = {
        "key": values(4, 2, 16),
        "value": values(4, 2, 16),
        "key_cache": values(2, 4, 2, 16),
        "value_cache": values(2, 4, 2, 16),
        "slot_mapping": np.array([0, 5, 2, 7], np.int32),
    }
    given = {"scatter_mode": "Nct", "strides": (20, 16), "offsets": (32, 0)}
    return agrees("scatter_pa_kv_cache", arrays, BOTH, **given)


def rope() -> bool:
    """Compression."""
    arrays = {
        "key": values(12, 2, 32),
        "value": values(12, 2, 32),
        "key_cache": values(8, 16, 1, 32),
        "value_cache": values(8, 16, 1, 32),
        "slot_mapping": np.array([0, 32, 64, 96], np.int32),
        "compress_lens": np.array([2, 3, 1, 2], np.int32),
        "compress_seq_offset": np.array([1, 2, 0, 3], np.int32),
        "seq_lens": np.array([5, 7], np.int32),
    }
    return agrees("scatter_pa_kv_cache", arrays, BOTH, scatter_mode="Rope")


def key_only() -> bool:
    """Scenario 6."""
    arrays = {
        "key": values(4, 2, 16),
        "key_cache": values(2, 4, 2, 16),
        "slot_mapping": np.array([0, 5, -1, 7], np.int64),
    }
    return agrees("scatter_pa_kv_cache", arrays, ("key_cache",))


def update() -> bool:
    """A layer's slice; the lengths are still on their way when the call is made."""
    arrays = {
        "new_kv": values(3, 32),
        "past": values(3, 2, 8, 32),
        "token_offset": np.array([4, 7], np.int32),
        "seq_len": np.array([2, 1], np.int32),
    }
    want = host(arrays)
    kvcore.kv_cache_update(**want, layer_id=1)
    late = calls.Placed(values=arrays["token_offset"])
    placed = calls.Placed(**arrays | {"token_offset": np.array([2, 2], np.int32)})
    target, source = placed["token_offset"], late["values"]
    library.current().aclrtMemcpyAsync(target.address, 8, source.address, 8, 3, 0)
    try:
        kvcore.kv_cache_update(**placed.arrays, layer_id=1)
        return bool(np.array_equal(placed.host("past"), want["past"]))
    finally:
        placed.free()
        late.free()


def host_slots() -> bool:
    """Two calls in a row with slots of the host's."""
    arrays = {
        "key": values(4, 2, 16),
        "value": values(4, 2, 16),
        "key_cache": values(4, 4, 2, 16),
        "value_cache": values(4, 4, 2, 16),
    }
    want, placed = host(arrays), calls.Placed(**arrays)
    try:
        for start in (0, 8):
            slots = np.arange(start, start + 4, dtype=np.int32)
            kvcore.scatter_pa_kv_cache(**placed.arrays, slot_mapping=slots, backend="aclnn")
            kvcore.scatter_pa_kv_cache(**want, slot_mapping=slots)
        try:
            slots = np.array([0, 1, 2, 16], np.int32)
            kvcore.scatter_pa_kv_cache(**placed.arrays, slot_mapping=slots, backend="aclnn")
            return False
        except kvcore.SlotRangeError:
            pass
        return all(np.array_equal(placed.host(name), want[name]) for name in BOTH)
    finally:
        placed.free()


def gather() -> bool:
    """Lengths that could be taken for totals."""
    arrays = {
        "key_cache": values(4, 4, 2, 16),
        "value_cache": values(4, 4, 2, 16),
        "block_tables": np.array([[2, 0], [1, 3]], np.int32),
        "seq_lens": np.array([0, 6, 9], np.int32),
        "key": values(9, 2, 16),
        "value": values(9, 2, 16),
    }
    return agrees("gather_pa_kv_cache", arrays, ("key", "value"), is_seq_lens_cumsum=True)


def selection() -> bool:
    """Without rope."""
    arrays = {
        "selection_k_rope": np.zeros(0, np.int8),
        "selection_kv_cache": np.zeros((4, 8, 64), np.int8),
        "selection_kv_block_table": np.arange(4, dtype=np.int32).reshape(2, 2),
        "selection_kv_block_status": np.full((2, 1, 1, 5), -1, np.int32),
        "selection_topk_indices": np.array([3, 0, 5, 2, 1, 4, 0, 6], np.int32).reshape(2, 1, 1, 4),
        "full_k_rope": np.zeros(0, np.int8),
        "full_kv_cache": values(8, 8, 64).astype(np.int8),
        "full_kv_block_table": np.arange(8, dtype=np.int32).reshape(2, 4)[::-1].copy(),
        "full_kv_actual_seq": np.array([30, 29], np.int32),
        "full_q_actual_seq": np.ones(2, np.int32),
    }
    outputs = ("selection_kv_cache", "selection_kv_block_status")
    given = {"selection_topk_block_size": 4}
    return agrees("gather_selection_kv_cache", arrays, outputs, **given)


def in_a_thread() -> bool:
    """A thread that never had a device."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(key_only())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return bool(found[0])


def growing() -> bool:
    """A workspace and copies that must grow while the smaller ones are in use."""
    right = all([scatter(4), scatter(2000), scatter(4)])
    cann = library.current()
    cann.aclrtSynchronizeStream(0)
    pool = launch.memory.pool_of(cann, 0, 0)
    pool.collect()
    return right and not pool._retired


Work = tuple[Callable[[], bool], ...]
WORK: Work = (
    *(scatter, scatter_nz, nct, rope, key_only, update, host_slots, gather, selection),
    *(in_a_thread, growing),
)


def amiss(double: Double, works: Work = WORK) -> list[str]:
    """Run it all; what went wrong, by whoever noticed."""
    found = []
    for work in works:
        try:
            if not work():
                found.append(f"{work.__name__}: wrong bytes")
        except Exception as error:
            found.append(f"{work.__name__}: {type(error).__name__}: {error}")
    try:
        cann = library.current()
        cann.set_device(0)
        cann.aclrtSynchronizeDevice()
        launch.release(None, 0)
    except kvcore.KVCoreError as error:
        found.append(str(error))
    found += double.violations()
    if double.live():
        found.append(f"left behind: {double.live_text()}")
    return found
