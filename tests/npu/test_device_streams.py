# SPDX-License-Identifier: Apache-2.0
"""Copies, fills, order and waiting on an NPU's streams, over the test double."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest
from device_fixtures import anyio_backend, npu
from double.direct import Double

import kvcore
from kvcore.npu.driver import watch

__all__ = ["anyio_backend", "npu"]

Array = np.ndarray[Any, Any]


def pinned(dev: kvcore.Device, values: Array) -> kvcore.Buffer:
    buffer = dev.empty_host(values.shape, str(values.dtype))
    buffer.numpy()[...] = values
    return buffer


def seen(stream: kvcore.Stream, buffer: kvcore.Buffer) -> Array:
    """What is in a buffer, behind everything on the stream."""
    out = stream.device.empty_host(buffer.shape, buffer.dtype)
    stream.copy(out, buffer)
    stream.synchronize_blocking()
    return out.numpy().copy()


WAYS: dict[str, Callable[[kvcore.Device], Any]] = {
    "device": lambda dev: dev.empty((6, 8), "int32"),
    "pinned": lambda dev: dev.empty_host((6, 8), "int32"),
    "swapped": lambda dev: dev.empty_swapped((6, 8), "int32"),
    "pageable": lambda dev: np.zeros((6, 8), np.int32),
    "strided": lambda dev: dev.empty((6, 16), "int32")[:, ::2],
}


@pytest.mark.parametrize("to", WAYS)
@pytest.mark.parametrize("source", WAYS)
def test_copies_of_all_ways(npu: Double, to: str, source: str) -> None:
    with kvcore.Device(backend="aclnn") as dev:
        stream = dev.stream()
        dst, src = WAYS[to](dev), WAYS[source](dev)
        values = np.arange(48, dtype=np.int32).reshape(6, 8)
        stream.copy(src, values)
        stream.fill(dst, -1)
        stream.copy(dst, src)
        back = np.zeros_like(values)
        stream.copy(back, dst)
        stream.synchronize_blocking()
        assert np.array_equal(back, values)
        del dst, src


@pytest.mark.parametrize("batch", [True, False])
def test_a_batch_of_pieces(npu: Double, monkeypatch: pytest.MonkeyPatch, batch: bool) -> None:
    with kvcore.Device(backend="aclnn") as dev:
        dev.driver.batches = batch
        stream = dev.stream()
        cache = dev.empty((8, 10, 4), "float32")
        rows = pinned(dev, np.arange(32, dtype=np.float32).reshape(8, 4))
        stream.fill(cache, -1)
        stream.copy(cache[:, 3], rows)
        backs = [dev.empty_host(4) for _ in range(8)]
        stream.copy_batch(backs, [cache[i, 3] for i in range(8)])
        stream.synchronize_blocking()
        assert np.array_equal(np.stack([b.numpy() for b in backs]), rows.numpy())
        assert bool(npu.num_calls("aclrtMemcpyBatchAsync")) is batch
        assert (seen(stream, cache)[:, 4] == -1).all()


def test_a_batch_that_the_driver_refuses_goes_piece_by_piece(npu: Double) -> None:
    with kvcore.Device(backend="aclnn") as dev:
        stream = dev.stream()
        cache, rows = dev.empty((8, 3, 4)), pinned(dev, np.ones((8, 4), np.float32))
        npu.fail("aclrtMemcpyBatchAsync", 1, 207000)
        for _ in range(2):
            stream.copy(cache[:, 1], rows)
        assert (seen(stream, cache)[:, 1] == 1).all()
        assert npu.num_calls("aclrtMemcpyBatchAsync") == 1


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("float32", 1.5), ("int8", -3), ("bfloat16", 2), ("int64", -1), ("uint16", 0), ("bool", True)],
)
def test_fills(npu: Double, dtype: str, value: Any) -> None:
    with kvcore.Device(backend="aclnn") as dev:
        stream = dev.stream()
        buffer = dev.empty((3, 70_001), dtype)
        stream.fill(buffer, 0)
        stream.fill(buffer[1:, 5:], value)
        found = seen(stream, buffer)
        assert (found[1:, 5:] == value).all()
        assert not found[0].any()
        assert not found[:, :5].any()


def test_a_copy_onto_itself_is_as_if_read_first(npu: Double) -> None:
    with kvcore.Device(backend="aclnn") as dev:
        stream = dev.stream()
        buffer = dev.empty(100, "int32")
        stream.copy(buffer, np.arange(100, dtype=np.int32))
        stream.copy(buffer[10:], buffer[:-10])
        assert seen(stream, buffer).tolist() == [*range(10), *range(90)]


def test_pageable_sources_are_read_in_stream_order(npu: Double) -> None:
    with kvcore.Device(backend="aclnn") as dev:
        stream = dev.stream()
        source, buffer = np.zeros(8, np.int32), dev.empty(8, "int32")
        stream.call(source.fill, 7)
        stream.copy(buffer, source)
        assert seen(stream, buffer).tolist() == [7] * 8


def test_what_was_launched_holds_its_memory(npu: Double) -> None:
    """The double counts memory that is freed under a task as a broken rule."""
    with kvcore.Device(backend="aclnn") as dev:
        stream, buffer = dev.stream(), dev.empty(1000, "int64")
        for i in range(20):
            source = pinned(dev, np.full(1000, i))
            between = dev.empty(1000, "int64")
            stream.copy(between, source)
            stream.copy(buffer, between)
            between.free()
            del source, between
        assert (seen(stream, buffer) == 19).all()
        del stream


def test_a_program_that_never_waits_holds_little(npu: Double) -> None:
    with kvcore.Device(backend="aclnn", workers=1) as dev:
        npu.runtime.kvdouble_eager(True)
        stream, a, b = dev.stream(), dev.empty(4), dev.empty(4)
        for _ in range(3000):
            stream.copy(a, b)
        while not stream.query():
            pass
        assert npu.num_calls("aclrtRecordEvent") > 5
        assert not stream.queue.lane.flight


@pytest.mark.parametrize("anyio_backend", ["trio"])  # (the double has a thread a stream)
async def test_a_thousand_streams(npu: Double) -> None:
    """More awaited at once than there are rings."""
    async with kvcore.Device(backend="aclnn") as dev:
        source = pinned(dev, np.arange(1000))
        target = dev.empty_host(1000, "int64")
        first, ready = dev.stream("first"), dev.event(enable_timing=False)
        gate = threading.Event()
        first.call(gate.wait, 50)
        ready.record(first)
        streams = [dev.stream() for _ in range(1000)]
        for i, stream in enumerate(streams):
            stream.wait_event(ready)
            stream.copy(target[i : i + 1], source[i : i + 1])
        assert not streams[500].query()
        async with anyio.create_task_group() as group:
            for stream in streams[: watch.MAX_RINGS + 8]:
                group.start_soon(stream.synchronize)
            await anyio.wait_all_tasks_blocked()
            gate.set()
        await dev.synchronize()
        assert np.array_equal(target.numpy(), source.numpy())


async def test_a_cancel_in_the_middle_of_a_copy(npu: Double) -> None:
    async with kvcore.Device(backend="aclnn") as dev:
        stream, buffer = dev.stream(), dev.empty(1 << 16, "int32")
        source = pinned(dev, np.arange(1 << 16, dtype=np.int32))
        gate = threading.Event()
        stream.call(gate.wait, 50)
        stream.copy(buffer, source)
        async with anyio.create_task_group() as group:
            group.start_soon(stream.synchronize)
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
        del source
        gate.set()
        await stream.synchronize()
        assert np.array_equal(seen(stream, buffer), np.arange(1 << 16))


def test_a_timeout_of_a_blocking_wait(npu: Double) -> None:
    with kvcore.Device(backend="aclnn") as dev:
        stream, gate = dev.stream("s"), threading.Event()
        stream.call(gate.wait, 50)
        with pytest.raises(kvcore.StreamError, match=r"^stream 's': .* in 0.001 s") as told:
            stream.synchronize_blocking(0.001)
        assert told.value.code == 507046
        gate.set()
        stream.synchronize_blocking(50)


def test_work_that_only_takes_time_is_refused(npu: Double) -> None:
    with kvcore.Device(backend="aclnn") as dev:
        stream = dev.stream()
        with pytest.raises(kvcore.BackendUnavailableError, match=r"^compute: expected a plan"):
            stream.compute(5)
        assert stream.query()


def test_events_have_the_device_s_time(npu: Double) -> None:
    with kvcore.Device(backend="aclnn") as dev:
        stream, start, end = dev.stream(), dev.event(), dev.event()
        a, b = dev.empty(1 << 18), dev.empty(1 << 18)
        start.record(stream)
        stream.copy(a, b)
        end.record(stream)
        end.synchronize_blocking()
        assert end.query()
        assert 0 < start.elapsed_time(end) < 1e5
        plain = dev.event(enable_timing=False)
        with pytest.raises(kvcore.ParamInvalidError, match=r"^other: .*enable_timing=True"):
            start.elapsed_time(plain)
        with pytest.raises(kvcore.StreamError, match=r"^other: .*not recorded$"):
            start.elapsed_time(dev.event())


def test_events_recorded_again_while_somebody_waits(npu: Double) -> None:
    with kvcore.Device(backend="aclnn") as dev:
        load, use = dev.stream("load"), dev.stream("use")
        buffer, out = dev.empty(64, "int64"), dev.empty_host((50, 64), "int64")
        loaded, used = dev.event(), dev.event()
        for layer in range(50):
            load.wait_event(used)
            load.fill(buffer, layer)
            loaded.record(load)
            use.wait_event(loaded)
            use.copy(out[layer], buffer)
            used.record(use)
        use.synchronize_blocking()
        assert np.array_equal(out.numpy()[:, 63], np.arange(50))


def test_external_events(npu: Double) -> None:
    with kvcore.Device(backend="aclnn") as dev:
        early, late = dev.stream("early"), dev.stream("late")
        buffer, out = dev.empty(8, "int32"), dev.empty_host(8, "int32")
        event = dev.external_event()
        event.wait(early)
        early.copy(out, buffer)
        late.fill(buffer, 5)
        event.record(late)
        early.synchronize_blocking()
        assert (out.numpy() == 5).all()
        unmade = dev.external_event()
        unmade.wait(early)
        with pytest.raises(kvcore.CaptureError, match="external event"), dev.capture(late):
            unmade.record(late)
        unmade.record(late)
    with (
        pytest.raises(kvcore.StreamError, match="nobody recorded"),
        kvcore.Device(backend="aclnn") as dev,
    ):
        dev.external_event().wait(dev.stream())


def test_a_plan_on_a_stream(npu: Double) -> None:
    with kvcore.Device(backend="aclnn", race_check="raise", trace=True) as dev:
        stream = dev.stream()
        key = pinned(dev, np.arange(4 * 2 * 32, dtype=np.float16).reshape(4, 2, 32))
        slots = pinned(dev, np.array([3, 0, 17, 9], np.int32))
        there = [dev.empty(key.shape, "float16") for _ in range(2)]
        caches = [dev.empty((2, 16, 2, 32), "float16") for _ in range(2)]
        where = dev.empty(4, "int32")
        for cache, copied in zip(caches, there, strict=True):
            stream.fill(cache, 0)
            stream.copy(copied, key)
        stream.copy(where, slots)
        plan = kvcore.plan_scatter_pa_kv_cache(there[0], caches[0], where, there[1], caches[1])
        for _ in range(3):
            stream.launch(plan)
        found = seen(stream, caches[1]).reshape(32, 2, 32)
        assert np.array_equal(found[[3, 0, 17, 9]], key.numpy())
        assert npu.num_calls("aclnnScatterPaKvCache") == 3
        assert dev.races == ()
        (use,) = dev.trace.summary().streams
        assert use.name == stream.name


def test_queues_hand_one_plan_over_in_turn(npu: Double) -> None:
    """On two streams and into a graph, with nobody waiting in between."""
    with kvcore.Device(backend="aclnn") as dev:
        one, two = dev.stream(), dev.stream()
        key, slots = dev.empty((2, 2, 16), "float16"), dev.empty(2, "int32")
        cache = dev.empty((2, 4, 2, 16), "float16")
        for buffer, value in ((key, 1), (slots, 5), (cache, 0)):
            one.fill(buffer, value)
        one.synchronize_blocking()
        plan = kvcore.plan_scatter_pa_kv_cache(key, cache, slots)
        for _ in range(20):
            one.launch(plan)
            two.launch(plan)
            with dev.capture(one) as graph:
                one.launch(plan)
            graph.replay(two)
        two.wait_event(one.record_event())
        assert (seen(two, cache).reshape(8, 32)[5] == 1).all()
