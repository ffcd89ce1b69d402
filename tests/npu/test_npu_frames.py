# SPDX-License-Identifier: Apache-2.0
"""How much Python a call to the NPU runs: frames, counted by the interpreter itself."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from double.direct import Double
from npu_fixtures import a3

import kvcore
from kvcore._core import settings
from kvcore._kernels import parallel
from kvcore.npu.call.device_arrays import DeviceArray

__all__ = ["a3"]


def frames(call: Callable[[], Any]) -> Counter[str]:
    """Python frames that a call entered, the call's own not counted, by function."""
    seen: Counter[str] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            code = frame.f_code
            seen[f"{code.co_filename.rpartition('kvcore/')[2]}:{code.co_qualname}"] += 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def arguments() -> list[np.ndarray[Any, Any]]:
    """Keys and values of four tokens, and their caches."""
    key = np.ones((4, 2, 64), np.float16)
    return [key, key + 1, *np.zeros((2, 2, 16, 2, 64), np.float16)]


def test_a_second_call_runs_little_more_than_a_run_of_its_plan(a3: Double) -> None:
    """Scatter, Norm, the slots on the host: the first call pays for the rules, no other does."""
    arrays = [DeviceArray.of(one) for one in arguments()]
    key, value, key_cache, value_cache = arrays
    slots = np.array([3, 0, -1, 20], np.int32)
    given = (key, key_cache, slots, value, value_cache)
    call = partial(kvcore.scatter_pa_kv_cache, *given, backend="aclnn")
    plan = kvcore.plan_scatter_pa_kv_cache(*given, backend="aclnn")
    call()
    plan.run()
    once, again = frames(call), frames(plan.run)
    found = key_cache.to_host().reshape(-1, 2, 64)
    assert sorted(np.flatnonzero(found.any((1, 2)))) == [0, 3, 20]
    for one in arrays:
        one.free()
    assert again.total() <= 130, again
    assert once.total() <= again.total() + 20, once - again


def test_other_memory_of_the_same_shape_is_used_where_it_is(a3: Double) -> None:
    """What is kept between calls says nothing of where arrays are."""
    first, second = ([DeviceArray.of(one) for one in arguments()] for _ in range(2))
    for (key, value, key_cache, value_cache), slot in ((first, 5), (second, 7)):
        slots = np.array([slot, -1, -1, -1], np.int32)
        kvcore.scatter_pa_kv_cache(key, key_cache, slots, value, value_cache, backend="aclnn")
    for (_, _, key_cache, value_cache), slot in ((first, 5), (second, 7)):
        for cache, item in ((key_cache, 1), (value_cache, 2)):
            rows = cache.to_host().reshape(-1, 128)
            assert np.flatnonzero(rows.any(1)).tolist() == [slot]
            assert (rows[slot] == item).all()
    for one in first + second:
        one.free()


def test_values_are_checked_at_each_call(a3: Double) -> None:
    arrays = [DeviceArray.of(one) for one in arguments()]
    key, value, key_cache, value_cache = arrays
    call = partial(kvcore.scatter_pa_kv_cache, key, key_cache, backend="aclnn")
    for slot in (3, 31):
        call(np.array([slot] * 4, np.int32), value, value_cache)
        with pytest.raises(kvcore.SlotRangeError, match=r"slot_mapping\[2\]: expected slot < 32"):
            call(np.array([0, 1, 32, 2], np.int32), value, value_cache)
    rows = key_cache.to_host().reshape(-1, 128)
    assert np.flatnonzero(rows.any(1)).tolist() == [3, 31]
    for one in arrays:
        one.free()


def test_a_call_on_the_cpu_is_one_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    # Once a process has called kvcore.backends.use(), each call asks for the backend; a test that
    # ran before this one may have.
    monkeypatch.setattr(settings, "active", False)
    key, value, key_cache, value_cache = arguments()
    slots = np.arange(4, dtype=np.int32)
    call = partial(kvcore.scatter_pa_kv_cache, key, key_cache, slots, value, value_cache)
    call()
    before = parallel.parallel_bytes()
    parallel.set_parallel_bytes()  # as it is without the tests' own setting
    try:
        assert frames(call).total() == 1
    finally:
        parallel.set_parallel_bytes(before)
