# SPDX-License-Identifier: Apache-2.0
"""What goes wrong on an NPU: typed errors, nobody waits for ever, nothing is given back twice."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest
from device_fixtures import anyio_backend, npu
from double.direct import Double

import kvcore
from kvcore.errors import KVCoreError
from kvcore.npu.call import launch
from kvcore.npu.cann import library
from kvcore.npu.driver.flight import Flight
from kvcore.npu.driver.handles import Handles
from kvcore.npu.driver.lane import AclLane

__all__ = ["anyio_backend", "npu"]

VECTOR_CORE = 507035


def work(dev: kvcore.Device) -> tuple[kvcore.Stream, kvcore.Buffer, kvcore.Buffer]:
    return dev.stream("s"), dev.empty(64), dev.empty_host(64)


async def awaited(thing: Any) -> None:
    await thing.synchronize()


async def blocked(thing: Any) -> None:
    thing.synchronize_blocking()


async def polled(thing: Any) -> None:
    while not thing.query():
        pass


WAITS = {"await": awaited, "block": blocked, "poll": polled}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("stays", [False, True])
async def test_an_asynchronous_failure(npu: Double, wait: str, stays: bool) -> None:
    """It shows at the next synchronise; what is behind it fails, what was before it is whole."""
    npu.runtime.kvdouble_poison(stays)
    async with kvcore.Device(backend="aclnn") as dev:
        stream, there, host = work(dev)
        dependent, free = dev.stream("d"), dev.stream("f")
        stream.fill(there, 0)
        before = stream.record_event()
        npu.fail_async("aclrtMemcpyAsync", 1, VECTOR_CORE)
        stream.copy(there, host)
        after = stream.record_event()
        dependent.wait_event(after)
        dependent.fill(there, 0)
        free.fill(dev.empty(4), 0)
        await WAITS[wait](before)
        for who in (dependent, stream):
            with pytest.raises(kvcore.StreamError, match=r"copy on stream 's' failed") as told:
                await WAITS[wait](who)
            assert isinstance(told.value.__cause__, kvcore.StreamError)
            assert told.value.__cause__.code == VECTOR_CORE
            await WAITS[wait](who)
        with pytest.raises(kvcore.StreamError, match=r"^event recorded on stream 's'"):
            after.synchronize_blocking()
        await WAITS[wait](free)
        npu.runtime.kvdouble_poison(False)
        stream.fill(there, 2)
        stream.copy(host, there)
        await WAITS[wait](stream)
        assert (host.numpy() == 2).all()


@pytest.mark.parametrize("kind", ["fill", "copy", "call", "record"])
def test_a_failure_that_another_thread_finds_first(
    npu: Double, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The queue has let the work pass, and then the stream is lost: it must not run behind."""
    lost: list[kvcore.Stream] = []
    using = Flight.using

    def meanwhile(self: Flight, losses: int) -> Any:
        if self is stream.queue.lane.flight and not lost:
            lost.append(stream)
            stream.queue.lane.lose(kvcore.StreamError("found by another thread"))
        return using(self, losses)

    with kvcore.Device(backend="aclnn") as dev:
        stream, there, host = work(dev)
        event, ran = dev.event(enable_timing=True), []
        launches: dict[str, Callable[[], object]] = {
            "fill": lambda: stream.fill(there, 1),
            "copy": lambda: stream.copy(there, host),
            "call": lambda: stream.call(ran.append, 1),
            "record": lambda: event.record(stream),
        }
        host.numpy()[...] = 3
        stream.fill(there, 7)
        stream.synchronize_blocking()
        monkeypatch.setattr(Flight, "using", meanwhile)
        launches[kind]()
        with pytest.raises(kvcore.StreamError, match="found by another thread"):
            stream.synchronize_blocking()
        assert lost == [stream]
        assert ran == []
        if kind == "record":
            with pytest.raises(kvcore.StreamError, match="found by another thread"):
                event.synchronize_blocking()
        stream.copy(host, there)
        stream.synchronize_blocking()
        assert (host.numpy() == 7).all()


@pytest.mark.parametrize("wait", WAITS)
async def test_a_failure_behind_which_nothing_runs(npu: Double, wait: str) -> None:
    """Neither events nor host functions come behind a fault: the wait must end all the same."""
    async with kvcore.Device(backend="aclnn") as dev:
        stream, there, host = work(dev)
        npu.fail_async("aclrtMemcpyAsync", 1, VECTOR_CORE)
        ran: list[int] = []
        stream.copy(there, host)
        stream.call(ran.append, 1)
        stream.copy(host, there)
        with pytest.raises(kvcore.StreamError, match="on stream 's' failed"):
            await WAITS[wait](stream)
        assert ran == []
        await WAITS[wait](stream)


async def test_a_failure_nobody_saw(npu: Double) -> None:
    with pytest.raises(kvcore.StreamError, match="copy failed and was not reported"):  # noqa: PT012
        async with kvcore.Device(backend="aclnn") as dev:
            stream, there, host = work(dev)
            npu.fail_async("aclrtMemcpyAsync", 1, VECTOR_CORE)
            stream.copy(there, host)


LAUNCHES: dict[str, tuple[str, Callable[[Any, Any, Any], object]]] = {
    "copy": ("aclrtMemcpyAsync", lambda s, d, h: s.copy(d, h)),
    "fill": ("aclrtMemsetAsync", lambda s, d, h: s.fill(d, 0)),
    "call": ("aclrtLaunchHostFunc", lambda s, d, h: s.call(int)),
    "thread": ("aclrtSetDevice", lambda s, d, h: s.copy(d, h)),
}


@pytest.mark.parametrize("what", LAUNCHES)
async def test_a_launch_that_acl_refuses(npu: Double, what: str) -> None:
    async with kvcore.Device(backend="aclnn", workers=1) as dev:
        stream, there, host = work(dev)
        symbol, act = LAUNCHES[what]
        npu.fail(symbol, 1, 107002)
        act(stream, there, host)
        with pytest.raises(kvcore.StreamError, match=f"{symbol}: expected status 0, got 107002"):
            await stream.synchronize()
        act(stream, there, host)
        await stream.synchronize()


async def test_records_and_waits_that_acl_refuses(npu: Double) -> None:
    async with kvcore.Device(backend="aclnn") as dev:
        stream, there, _ = work(dev)
        other = dev.stream("o")
        stream.fill(there, 0)
        npu.fail("aclrtRecordEvent", 1, 107003)
        event = stream.record_event()
        with pytest.raises(kvcore.StreamError, match="record_event on stream 's' failed"):
            await event.synchronize()
        with pytest.raises(kvcore.StreamError, match="107003"):
            await stream.synchronize()
        stream.fill(there, 0)
        npu.fail("aclrtStreamWaitEvent", 1, 107003)
        other.wait_stream(stream)
        with pytest.raises(kvcore.StreamError, match="wait_event on stream 'o' failed"):
            other.synchronize_blocking()
        await dev.synchronize()


async def test_a_ring_that_acl_refuses(npu: Double) -> None:
    """The watch sees what no ring tells."""
    async with kvcore.Device(backend="aclnn") as dev:
        stream, there, _ = work(dev)
        stream.fill(there, 0)
        npu.fail("aclrtLaunchHostFunc", 0, 207005)
        await stream.synchronize()
        stream.fill(there, 0)
        npu.fail("aclrtCreateStreamWithConfig", 0, 207008)
        await stream.synchronize()
        with pytest.raises(kvcore.StreamError, match="207008"):
            dev.stream()
        npu.runtime.kvdouble_fail_never()
        await dev.stream().synchronize()


async def test_a_host_function_that_fails(npu: Double) -> None:
    """Nothing behind it reaches the device."""
    async with kvcore.Device(backend="aclnn") as dev:
        stream, there, host = work(dev)
        other = dev.stream("o")
        stream.fill(there, 3)
        stream.copy(host, there)
        await stream.synchronize()
        stream.call(lambda: 1 / 0)
        stream.fill(there, 4)
        other.wait_stream(stream)
        other.copy(host, there)
        for who in (other, stream):
            with pytest.raises(kvcore.StreamError, match="ZeroDivisionError"):
                await who.synchronize()
        stream.copy(host, there)
        await stream.synchronize()
        assert (host.numpy() == 3).all()


def test_out_of_device_memory(npu: Double) -> None:
    npu.runtime.kvdouble_capacity(1 << 20)
    with kvcore.Device(backend="aclnn") as dev:
        assert dev.memory().capacity == 1 << 20
        half = dev.empty(1 << 19, "uint8")
        with pytest.raises(kvcore.DeviceOutOfMemoryError, match=r"^device memory: ") as told:
            dev.empty(600_000, "uint8")
        assert told.value.wanted == 600_000
        assert told.value.free is not None
        assert told.value.free < 600_000
        assert told.value.total == 1 << 20
        assert dev.memory().used == 1 << 19
        stream = dev.stream()
        stream.fill(half, 0)
        half.free()
        assert dev.memory().used == 0
        # the bytes are held by work that is done: they are found when they are needed
        assert dev.empty(900_000, "uint8").nbytes == 900_000


@pytest.mark.parametrize("code", [207001, 207018, 200000])
def test_memory_that_cann_refuses(npu: Double, code: int) -> None:
    makers: dict[str, Callable[[Any], Any]] = {
        "aclrtMalloc": lambda dev: dev.empty(8),
        "aclrtMallocHost": lambda dev: dev.empty_host(8),
        "aclrtMallocHostWithCfg": lambda dev: dev.empty_swapped(8),
    }
    with kvcore.Device(backend="aclnn") as dev:
        for symbol, make in makers.items():
            npu.fail(symbol, 0, code)
            with pytest.raises(kvcore.DeviceOutOfMemoryError) as told:
                make(dev)
            assert told.value.code == code
            npu.runtime.kvdouble_fail_never()
            make(dev).free()
        for space in ("device", "host", "swapped"):
            info = dev.memory(space)
            assert info.used == 0
            assert info.allocations == info.frees


def test_swapped_memory_that_cannot_be_registered(npu: Double) -> None:
    with kvcore.Device(backend="aclnn") as dev:
        npu.fail("aclrtHostRegister", 0, 207000)
        npu.fail("aclrtHostRegisterV2", 0, 207000)
        with pytest.raises(kvcore.BackendUnavailableError, match="207000"):
            dev.empty_swapped(8)
        assert npu.live("host_memory") == 0
        assert dev.memory("swapped").used == 0


async def test_another_party_finalises(npu: Double) -> None:
    """Typed errors, no wait that lasts, and nothing is given back a second time."""
    dev = kvcore.Device(backend="aclnn")
    with pytest.raises(KVCoreError):  # noqa: PT012  (whichever call is first)
        async with dev:
            stream, there, host = work(dev)
            stream.fill(there, 0)
            await stream.synchronize()
            npu.runtime.kvdouble_foreign_finalize()
            stream.copy(there, host)
            with pytest.raises(kvcore.StreamError):
                await stream.synchronize()
            dev.empty(4)
    del stream, there, host, dev
    gc.collect()
    npu.reset()  # what the other party took away, nobody can give back


async def test_faults_while_closing(npu: Double) -> None:
    for symbol in ("aclrtDestroyStream", "aclrtDestroyEvent", "aclrtFree", "aclrtFreeHost"):
        with pytest.raises(kvcore.StreamError, match=f"^device: .* {symbol}: "):  # noqa: PT012
            async with kvcore.Device(backend="aclnn") as dev:
                stream, there, host = work(dev)
                stream.copy(host, there)
                stream.record_event()
                npu.fail(symbol, 1, 500003)
        del dev, stream, there, host
        gc.collect()


def test_a_thread_that_never_saw_the_device(npu: Double) -> None:
    with kvcore.Device(backend="aclnn") as dev:
        errors: list[BaseException] = []

        def program() -> None:
            try:
                stream, there, host = work(dev)
                stream.copy(there, host)
                stream.synchronize_blocking()
                dev.empty(8).free()
                assert stream.record_event().query() in (True, False)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=program) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []


async def program(dev: kvcore.Device, seed: int) -> None:
    """Many things in an order that the seed decides; errors of the library are expected."""
    draw = random.Random(seed)
    streams = [dev.stream() for _ in range(3)]
    events = [dev.event() for _ in range(3)]
    host = [dev.empty_host(256) for _ in range(2)]
    device = [dev.empty(256) for _ in range(2)]
    plain = np.zeros(256, np.float32)
    for _ in range(40):
        stream, event = draw.choice(streams), draw.choice(events)
        a, b = draw.choice(host), draw.choice(device)
        acts: list[Callable[[], Any]] = [
            lambda s=stream, a=a, b=b: s.copy(b, a),
            lambda s=stream, a=a, b=b: s.copy(a, b),
            lambda s=stream, b=b: s.copy(plain, b),
            lambda s=stream, b=b: s.fill(b, 1.5),
            lambda s=stream: s.call(len, ()),
            lambda s=stream, e=event: e.record(s),
            lambda s=stream, e=event: s.wait_event(e),
            lambda e=event: e.query(),
            lambda s=stream: s.synchronize_blocking(50),
            lambda: dev.empty(64).free(),
            lambda: dev.empty_swapped(64),
        ]
        try:
            if draw.random() < 0.15:
                await stream.synchronize()
            else:
                draw.choice(acts)()
        except KVCoreError:
            pass


@pytest.mark.parametrize("per_million", [2_000, 30_000, 200_000])
async def test_random_faults(npu: Double, per_million: int) -> None:
    """Whatever call or task fails: typed errors, an end, and no handle left."""
    for seed in range(6):
        npu.runtime.kvdouble_fail_at_random(seed, per_million)
        try:
            with anyio.fail_after(20):
                async with kvcore.Device(backend="aclnn") as dev:
                    await program(dev, seed)
        except KVCoreError:
            pass
        finally:
            npu.runtime.kvdouble_fail_never()
        gc.collect()


@pytest.mark.parametrize("wait", WAITS)
async def test_who_is_told_of_a_failure_finds_the_stream_at_rest(npu: Double, wait: str) -> None:
    """What the hardware had before the failure is done then: its memory may be used again."""
    async with kvcore.Device(backend="aclnn") as dev:
        stream, there, host = work(dev)
        other, third, seen = dev.stream("o"), dev.stream("t"), dev.empty_host(64)
        host.numpy()[...] = 7
        seen.numpy()[...] = 0
        stream.copy(there, host)
        stream.synchronize_blocking()
        other.call(lambda: 1 / 0)
        stream.copy(seen, there)
        stream.wait_stream(other)
        stream.fill(there, 0)
        third.wait_stream(stream)
        for who in (third, stream, other):
            with pytest.raises(kvcore.StreamError, match="ZeroDivisionError"):
                await WAITS[wait](who)
            assert (seen.numpy() == 7).all()
        stream.copy(seen, there)
        await WAITS[wait](stream)
        assert (seen.numpy() == 7).all()


@pytest.mark.parametrize("wait", WAITS)
async def test_a_stream_at_rest_behind_a_failure_that_no_event_can_tell(
    npu: Double, wait: str
) -> None:
    """Then what the hardware had is taken from it."""
    async with kvcore.Device(backend="aclnn") as dev:
        stream, there, host = work(dev)
        other = dev.stream("o")
        other.call(lambda: 1 / 0)
        stream.copy(there, host)
        stream.wait_stream(other)
        npu.fail("aclrtRecordEvent", 0, 507000)
        with pytest.raises(kvcore.StreamError):
            await WAITS[wait](stream)
        npu.runtime.kvdouble_fail_never()
        assert stream.idle
        with pytest.raises(kvcore.StreamError):
            await WAITS[wait](other)
        await WAITS[wait](stream)


@pytest.mark.parametrize("refused", [True, False])
@pytest.mark.parametrize("wait", WAITS)
async def test_nothing_runs_on_behind_a_wait_that_no_event_can_tell(
    npu: Double, wait: str, refused: bool
) -> None:
    """Whoever was told that the stream has failed may use its arrays for something else."""
    async with kvcore.Device(backend="aclnn") as dev:
        stream, there, host = work(dev)
        stream.fill(there, 0)
        await stream.synchronize()
        with host.host("w") as rows:
            rows[...] = 1
        npu.runtime.kvdouble_hold(True)
        stream.copy(there, host)
        if refused:
            npu.fail("aclrtRecordEvent", 1, 507000)
            with pytest.raises(kvcore.StreamError, match="507000"):
                await WAITS[wait](stream)
            with host.host("w") as rows:
                rows[...] = 2
        npu.runtime.kvdouble_hold(False)
        await WAITS[wait](stream)
        seen = dev.empty_host(64)
        stream.copy(seen, there)
        await stream.synchronize()
        assert (seen.numpy() == (0 if refused else 1)).all()


def test_a_stream_that_waits_for_one_that_is_aborted(
    npu: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The events of an aborted stream are complete: whoever looks at once must see the failure."""
    discard = Handles.discard
    looked: list[str] = []

    def meanwhile(self: Handles, handle: int) -> Any:
        found = discard(self, handle)
        npu.runtime.kvdouble_hold(False)

        def look() -> None:
            try:
                while not seen.query():
                    pass
                looked.append("reached")
            except kvcore.StreamError:
                looked.append("failed")

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return found

    with kvcore.Device(backend="aclnn") as dev:
        stream, there, host = work(dev)
        other, target = dev.stream("o"), dev.empty(64)
        npu.runtime.kvdouble_hold(True)
        stream.copy(there, host)
        other.wait_stream(stream)
        other.copy(target, there)
        seen = other.record_event()
        while not other.queue.lane.flight.records():  # until the hardware has it
            pass
        npu.fail("aclrtRecordEvent", 1, 507000)
        with monkeypatch.context() as patched:
            patched.setattr(Handles, "discard", meanwhile)
            with pytest.raises(kvcore.StreamError, match="507000"):
                stream.synchronize_blocking()
        assert set(looked) == {"failed"}  # of this stream, and of the one that waits for it
        with pytest.raises(kvcore.StreamError, match="507000"):
            other.synchronize_blocking()
        other.copy(target, there)
        other.synchronize_blocking()


def test_two_failures_that_meet_on_a_stream(npu: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the hardware, which one thread finds while a launch is refused: a wait tells."""
    using = Flight.using
    lanes: list[AclLane] = []

    def meanwhile(self: Flight, losses: int) -> Any:
        if lanes and self is lanes[0].flight and not self.losses:
            lanes.pop().lose(kvcore.StreamError("found by another thread"))
            raise kvcore.StreamError("refused")
        return using(self, losses)

    with kvcore.Device(backend="aclnn") as dev:
        stream, there, host = work(dev)
        stream.copy(there, host)
        before = stream.queue.mark()
        while before.position.ready.pending:
            pass
        lanes.append(stream.queue.lane)
        monkeypatch.setattr(Flight, "using", meanwhile)
        stream.copy(there, host)
        while not stream.queue.lane.rests:
            pass
        assert before.failed
        with pytest.raises(kvcore.StreamError, match="found by another thread"):
            stream._finish(before, always=False)
        stream._finish(before, always=False)
        stream.copy(there, host)
        stream.synchronize_blocking()


def test_memory_given_back_where_the_device_cannot_be_set(npu: Double) -> None:
    for act in ("free", "close"):
        memory = library.current()
        with memory.on_device(0):
            block = launch.memory.allocate(memory, 0, 100)
            pool = launch.memory.pool_of(memory, 0, 0)
            pool.take("workspace", 100)
        npu.fail("aclrtSetDevice", 1, 107002)
        give = block.free if act == "free" else pool.release
        thread = threading.Thread(target=give)
        thread.start()
        thread.join()
        pool.release()
        block.free()
        assert npu.live("device_memory") == 0


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_capture_that_fails_between_fork_and_join(npu: Double, nth: int) -> None:
    with kvcore.Device(backend="aclnn") as dev:
        stream, there, host = work(dev)
        side = dev.stream("side")
        npu.fail("aclrtMemcpyAsync", nth, 507000)
        with pytest.raises(kvcore.CaptureError, match="507000"), dev.capture(stream):  # noqa: PT012
            stream.copy(there, host)
            side.wait_stream(stream)
            side.copy(there, host)
            side.copy(host, there)
            stream.wait_stream(side)
        assert npu.live("graph") == 0


@pytest.mark.parametrize(
    "symbol", ["aclrtSynchronizeEventWithTimeout", "aclrtLaunchHostFunc", "aclrtDestroyEvent"]
)
def test_what_went_wrong_keeps_nothing_alive(npu: Double, symbol: str) -> None:
    """Errors that a device has kept hold the frames neither of the program nor of the driver."""

    def program() -> None:
        with kvcore.Device(backend="aclnn") as dev:
            stream, there, host = work(dev)
            array = np.asarray(host)
            npu.fail(symbol, 1, 507000)
            stream.copy(there, host)
            stream.call(array.fill, 3)
            stream.synchronize_blocking()

    with pytest.raises(kvcore.StreamError, match="507000"):
        program()
    gc.collect()
    assert npu.live("host_memory") == 0
