# SPDX-License-Identifier: Apache-2.0
"""Real plans on streams: buffers as arrays, exact rows, replay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakes import device

import kvcore


def caches(dev: kvcore.Device) -> dict[str, Any]:
    arrays = {
        "key": dev.empty((4, 2, 64), "bfloat16"),
        "value": dev.empty((4, 2, 64), "bfloat16"),
        "key_cache": dev.empty((8, 16, 2, 64), "bfloat16"),
        "value_cache": dev.empty((8, 16, 2, 64), "bfloat16"),
        "slots": dev.empty((4,), "int32"),
    }
    for array in arrays.values():
        array.numpy()[...] = 0
    arrays["key"].numpy()[...] = np.arange(1, 5).reshape(4, 1, 1)
    return arrays


def scatter(a: dict[str, Any], slots: Any) -> Any:
    return kvcore.plan_scatter_pa_kv_cache(
        a["key"], a["key_cache"], slots, a["value"], a["value_cache"]
    )


async def test_a_scatter_on_a_stream(clock: str) -> None:
    async with kvcore.Device("A3", clock=clock, race_check="raise") as dev:
        arrays = caches(dev)
        stream = dev.stream()
        plan = scatter(arrays, arrays["slots"])
        with arrays["slots"].host("w") as slots:
            slots[:] = [127, 0, -1, 17]
        stream.launch(plan)
        await stream.synchronize()
        flat = arrays["key_cache"].numpy().reshape(128, 128)[:, 0].astype(int)
        assert {i: flat[i] for i in flat.nonzero()[0].tolist()} == {127: 1, 0: 2, 17: 4}


async def test_a_bad_slot_is_the_cause(clock: str) -> None:
    async with kvcore.Device("A3", clock=clock) as dev:
        arrays = caches(dev)
        arrays["slots"].numpy()[:] = 128
        stream = dev.stream("s")
        stream.launch(scatter(arrays, arrays["slots"]))
        with pytest.raises(kvcore.StreamError, match=r"^stream 's': scatter_pa_kv_cache") as told:
            await stream.synchronize()
        assert isinstance(told.value.__cause__, kvcore.SlotRangeError)


@pytest.mark.parametrize("common", [False, True])
async def test_writers_of_one_cache_race_by_slot(clock: str, common: bool) -> None:
    async with kvcore.Device("A3", clock=clock, race_check="record") as dev:
        arrays = caches(dev)
        others = dev.empty((4,), "int32")
        with arrays["slots"].host("w") as a, others.host("w") as b:
            a[:] = [0, 2, 4, 6]
            b[:] = [1, 3, 5, 6 if common else 7]
        dev.stream("a").launch(scatter(arrays, arrays["slots"]))
        dev.stream("b").launch(scatter(arrays, others))
    if common:
        assert {(r.kind, r.first.argument, r.nbytes) for r in dev.races} == {
            ("WAW", "key_cache", 256),
            ("WAW", "value_cache", 256),
        }
    else:
        assert dev.races == ()


async def test_a_captured_scatter_reads_its_slots_at_replay(clock: str) -> None:
    async with kvcore.Device("A3", clock=clock) as dev:
        arrays = caches(dev)
        stream = dev.stream()
        async with dev.capture(stream) as graph:
            stream.launch(scatter(arrays, arrays["slots"]))
        cache = arrays["key_cache"].numpy().reshape(128, 128)
        for slots in ([5, 6, 7, 8], [9, -1, -1, 10], [-1] * 4):
            arrays["slots"].numpy()[:] = slots
            cache[...] = 0
            graph.replay(stream)
            await stream.synchronize()
            wanted = {slot: i + 1 for i, slot in enumerate(slots) if slot >= 0}
            flat = cache[:, 0].astype(int)
            assert {i: flat[i] for i in flat.nonzero()[0].tolist()} == wanted


def test_plain_arrays_need_a_device_without_a_profile() -> None:
    key, cache = np.zeros((2, 1, 32), np.float16), np.zeros((4, 8, 1, 32), np.float16)
    slots = np.array([1, 2], np.int32)
    plan = kvcore.plan_scatter_pa_kv_cache(key, cache, slots, key.copy(), cache.copy())
    with device() as dev:
        dev.stream().launch(plan)
    with (
        kvcore.Device("A3") as dev,
        pytest.raises(kvcore.ParamInvalidError, match=r"^key: .* in pageable host memory$"),
    ):
        dev.stream().launch(plan)
