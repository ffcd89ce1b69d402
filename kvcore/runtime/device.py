# SPDX-License-Identifier: Apache-2.0
"""A device: its streams, its memory, its workers, and how all of it ends.

Leaving the block
-----------------
*Normally*: nothing more can be launched; a mark is put behind everything on every stream and
waited for; then the workers end, the buffers are given back and, if something failed or raced
that nobody was told of, that is raised.

*By an exception or a cancel*: what has not started is dropped, so that no wait can last; what
runs is waited for through every cancel (``shield``), because a kernel cannot be called back while
it moves bytes; then as above, but the exception that is under way is the one that goes on.

A cancel while leaving normally turns the one into the other.

*Whatever comes*: where a task leaves and something runs still, a thread sees the device to its
end, and the task only waits for that.  So neither a second Ctrl-C, nor a coroutine that is closed,
nor a loop that is gone with the task in it, leaves workers or memory behind.  A device whose block
is never left at all (the generator around it was dropped after its loop) ends its workers when it
is collected.

A forked child has the parent's objects and none of its threads: every device of the parent is
marked, and whatever the child asks of one is an error.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal

import anyio.lowlevel
import numpy as np
import numpy.typing as npt

from kvcore.errors import CaptureError, ParamInvalidError, StreamError
from kvcore.runtime._admission import Admission
from kvcore.runtime._clock import ModelClock
from kvcore.runtime._executor import Executor
from kvcore.runtime._marks import Failure, Mark
from kvcore.runtime._observe import Observer, call_site
from kvcore.runtime._outside import promise, settle
from kvcore.runtime._storage import Ledger, Storage
from kvcore.runtime.copies import ranges_of
from kvcore.runtime.driver import driver_of
from kvcore.runtime.event import Event, failed, unseen
from kvcore.runtime.external import ExternalEvent, Promises, never_recorded
from kvcore.runtime.graph import Capture, Graph, join_or_refuse
from kvcore.runtime.host import Host
from kvcore.runtime.memory import DEFAULT_ALIGNMENT, SPACES, Buffer, MemoryInfo, allocate, refuse
from kvcore.runtime.profile import RESOURCES, DeviceProfile
from kvcore.runtime.race import Race, RaceCheck
from kvcore.runtime.settings import RaceMode, Settings, one_of
from kvcore.runtime.shield import Shield, can_await
from kvcore.runtime.stream import Stream, current_stream, use_stream
from kvcore.runtime.trace import Trace
from kvcore.runtime.workers import Workers

__all__ = ["Device"]

_DEVICES: weakref.WeakSet[Device] = weakref.WeakSet()


class Device:
    """One device, modelled on this machine; use it in an ``async with`` or a ``with`` block.

    profile:    "A2", "A3" (one die), "950", a DeviceProfile, or None: no capacity limit, and
                kernels may use any array.
    clock:      "wall": operations take the time they take here.  "model": they still move their
                bytes, but time comes from the profile, and is the same on every run.
    race_check: "off", "record" (see ``races``) or "raise" (at the next synchronise or exit).
                None: "off", or what ``default_race_check`` says.
    check_host: with a race check, also compare checksums of sources in host memory (arrays,
                torch tensors, pinned and swapped buffers) at launch and at run.
    trace, max_events: keep a trace, of at most so many entries a kind.
    workers:    threads that run operations.
    seed:       a whole number that decides which ready operation runs next; None: in turn.
    backend:    None or "cpu": this machine.  "aclnn" (or "aclnn:1" for the second one): an NPU,
                whose hardware then keeps order and time; BackendUnavailableError without one.
    """

    # A driver has classes of its own in these places.
    _stream_class: type[Stream] = Stream
    _event_class: type[Event] = Event
    _buffer_class: type[Buffer] = Buffer

    # With the arguments of __init__, as an editor shows them.
    def __new__(
        cls,
        profile: str | DeviceProfile | None = None,
        *,
        clock: Literal["wall", "model"] = "wall",
        race_check: RaceMode | None = None,
        trace: bool = False,
        workers: int = 2,
        backend: str | None = None,
        seed: int | None = None,
        check_host: bool = False,
        max_events: int | None = None,
    ) -> Device:
        """A device of the class that drives the backend."""
        return object.__new__(driver_of(backend) or cls if cls is Device else cls)

    def __init__(
        self,
        profile: str | DeviceProfile | None = None,
        *,
        clock: Literal["wall", "model"] = "wall",
        race_check: RaceMode | None = None,
        trace: bool = False,
        workers: int = 2,
        backend: str | None = None,
        seed: int | None = None,
        check_host: bool = False,
        max_events: int | None = None,
    ) -> None:
        asked = Settings.checked(
            profile,
            clock=clock,
            race_check=race_check,
            trace=trace,
            workers=workers,
            backend=backend,
            seed=seed,
            check_host=check_host,
            max_events=max_events,
        )
        self.profile = asked.profile
        self.backend = asked.backend
        self.workers = asked.workers
        self.clock = asked.clock
        self.race_check = asked.race_check
        self._key = object()
        self._lock = threading.RLock()
        admission = Admission(self._key, self.profile is not None)
        admission.refuse = partial(refuse, self._key)
        self._executor = Executor(admission, asked.seed, asked.clock == "model")
        self._executor.graph_wait = join_or_refuse
        self._executor.lock = self._lock
        capacity = -1 if self.profile is None else self.profile.capacity_bytes
        self._ledgers = {space: Ledger(capacity if space == "device" else -1) for space in SPACES}
        self._storages: weakref.WeakSet[Storage] = weakref.WeakSet()
        self._streams: list[Stream] = []
        self._names: dict[str, int] = {}
        self._sides: weakref.WeakKeyDictionary[Stream, list[Stream]] = weakref.WeakKeyDictionary()
        self._default: Stream | None = None
        self._captures: list[Graph] = []
        self._promises = Promises()
        self._entered = False
        # Settled when the device is closed; by which thread, and what that raised.
        self._closed = False
        self._over = promise(None)
        self._closer: threading.Thread | None = None
        self._end_error: BaseException | None = None
        self._abandoned = False
        self._origin = time.monotonic()
        self._trace: Trace | None = None
        self._clock: ModelClock | None = None
        self._race: RaceCheck | None = None
        if asked.max_events:
            self._trace = Trace(
                asked.max_events,
                partial(_now_of, weakref.ref(self)),
                self._origin,
                clock == "model",
                self._ledgers,
            )
        if asked.clock == "model":
            assert self.profile is not None
            self._clock = ModelClock(self.profile, self._lock, self._trace)
        if asked.race_check != "off":
            self._race = RaceCheck(
                raising=asked.race_check == "raise",
                check_host=asked.check_host,
                storages=self._storages,
            )
        if self._race or self._clock or self._trace:
            self._executor.observer = Observer(self._lock, self._race, self._clock, self._trace)
            self._executor.observe_start = asked.check_host
        self._costs = self._clock is not None or self._trace is not None
        self._host = Host(self._clock)
        self._workers = Workers(self._executor, asked.workers)
        _DEVICES.add(self)
        # (what is registered lasts as long as the device, so it must not hold what holds that)
        weakref.finalize(self, _stop, weakref.ref(self._executor)).atexit = False

    # -- streams, events, graphs

    def stream(self, name: str | None = None) -> Stream:
        """A new stream; a name that is taken gets a number behind it."""
        self._executor.check()
        return self._new_stream("stream" if name is None else str(name))

    def _new_stream(self, name: str) -> Stream:
        with self._lock:
            index = len(self._streams) + 1  # 0 is the host
            n = self._names[name] = self._names.get(name, 0) + 1
            unique = name if n == 1 else f"{name}#{n}"
            stream = self._stream_class(self, unique, index)
            self._streams.append(stream)
            if self._race is not None:
                self._race.lane(index, unique)
            if self._trace is not None:
                self._trace.names[index] = unique
        return stream

    def _side_streams(self, stream: Stream, n: int) -> list[Stream]:
        """Hidden streams for the forks of graphs replayed on a stream."""
        sides = self._sides.setdefault(stream, [])
        while len(sides) < n:
            sides.append(self._new_stream(f"{stream.name}/fork{len(sides) + 1}"))
        return sides[:n]

    def _check_process(self) -> None:
        """Raise in a forked child; unlike ``check`` of the executor, at any time before or after.

        Also keeps the child away from locks that a thread of the parent may have held.
        """
        if self._executor.is_forked:
            self._executor.check()

    @property
    def streams(self) -> tuple[Stream, ...]:
        """All streams, in the order they were made."""
        self._check_process()
        return tuple(self._streams)

    @property
    def default_stream(self) -> Stream:
        """The stream used where none is named; it orders nothing but its own work."""
        self._check_process()
        if self._default is None:
            self._executor.check()
            with self._lock:
                if self._default is None:
                    self._default = self._new_stream("default")
        return self._default

    def current_stream(self) -> Stream:
        """The stream of this device in use in this task, or the default stream."""
        return current_stream(self)

    def use(self, stream: Stream) -> contextlib.AbstractContextManager[Stream]:
        """``with device.use(stream):`` makes it the current one in this task."""
        self._check_process()
        return use_stream(self._own(stream))

    def _own(self, stream: object) -> Stream:
        if isinstance(stream, Stream) and stream.device is self:
            return stream
        seen = "one of another device" if isinstance(stream, Stream) else type(stream).__name__
        raise ParamInvalidError(
            f"stream: expected a stream of this device, got {seen}", argument="stream", seen=seen
        )

    def event(self, *, blocking: bool = False, enable_timing: bool = True) -> Event:
        """A new event, not recorded."""
        self._executor.check()
        return self._event_class(self, blocking=blocking, enable_timing=enable_timing)

    def external_event(self) -> ExternalEvent:
        """A new event that streams may wait for before it is recorded."""
        self._executor.check()
        return ExternalEvent(self)

    def _event_call(self) -> None:
        if self._executor.observer is not None:
            self._executor.observer.event_call()

    def capture(self, stream: Stream) -> Capture:
        """``async with device.capture(stream) as graph:`` records launches instead of running.

        A plain ``with`` does the same.  Inside, synchronising, querying, allocating, freeing,
        host access and replaying raise CaptureError and record nothing.
        """
        self._executor.check()
        return Capture(self, self._own(stream))

    # -- memory

    def empty(
        self,
        shape: object,
        dtype: object = "float32",
        *,
        align: int = DEFAULT_ALIGNMENT,
        name: str | None = None,
    ) -> Buffer:
        """Device memory, contents undefined.

        shape: whole numbers >= 0.  dtype: a type's name ("bfloat16").  align: bytes, a power of
        two up to 2 MiB.  name: what reports of races call the buffer and its views.  Raises
        ParamInvalidError, DeviceOutOfMemoryError (``wanted``, ``free``, ``total`` in bytes; then
        nothing was taken), CaptureError inside a capture.
        """
        return self._allocate(shape, dtype, "device", align, name)

    def empty_host(
        self,
        shape: object,
        dtype: object = "float32",
        *,
        align: int = DEFAULT_ALIGNMENT,
        name: str | None = None,
    ) -> Buffer:
        """Pinned host memory: for copies, which then run side by side with everything."""
        return self._allocate(shape, dtype, "host", align, name)

    def empty_swapped(
        self,
        shape: object,
        dtype: object = "float32",
        *,
        align: int = 4096,
        name: str | None = None,
    ) -> Buffer:
        """Host memory that kernels on the device use in place, over the link."""
        return self._allocate(shape, dtype, "swapped", align, name)

    def _allocate(
        self, shape: object, dtype: object, space: str, align: int, name: str | None
    ) -> Buffer:
        self._executor.check()
        self._refuse_in_capture("allocate memory")
        return allocate(self, shape, dtype, space, align, name)

    def _take_bytes(self, space: str, nbytes: int) -> npt.NDArray[np.uint8]:
        """So many bytes of a space; MemoryError when there are none.  A driver has its own."""
        return np.empty(nbytes, np.uint8)

    def memory(self, space: str = "device") -> MemoryInfo:
        """Bytes used, the peak and the capacity of a space."""
        one_of("space", space, SPACES)
        self._check_process()
        ledger = self._ledgers[space]
        capacity = None if ledger.capacity < 0 else ledger.capacity
        return MemoryInfo(ledger.used, ledger.peak, capacity, ledger.allocations, ledger.frees)

    def _memory_changed(self) -> None:
        if self._trace is not None:
            with self._lock:
                self._trace.look_at_memory()

    def _host_access(self, buffer: Buffer, array: npt.NDArray[Any], mode: str, name: str) -> None:
        race = self._race
        if race is None or self._executor.is_forked:
            return
        calling = self._executor.calling()
        site = call_site() if calling is None else None
        with self._lock:
            for write in (False, True):
                if ("w" if write else "r") in mode:
                    if calling is None:
                        race.host_access(buffer, ranges_of(array), write, f"buffer.{name}()", site)
                    else:
                        race.function_access(*calling, buffer, ranges_of(array), write)

    # -- captures

    def _refuse_in_capture(self, what: str, stream: Stream | None = None) -> None:
        # (a host function that runs meanwhile is not the one who captures)
        if self._captures and not self._executor.inside():
            raise self._capture_error("device" if stream is None else "stream", what)

    def _capture_error(self, argument: str, what: str) -> CaptureError:
        return CaptureError(
            f"{argument}: expected launches only while a graph is captured, got a request to "
            f"{what}",
            argument=argument,
            seen=what,
            expected="launches",
        )

    @contextlib.contextmanager
    def _one_launch(self) -> Iterator[None]:
        """Inside, all launches together cost the host one."""
        clock = self._clock
        if clock is None:
            yield
            return
        assert self.profile is not None
        clock.charge(self.profile.value("launch_cost"))
        clock.free_launches = True
        try:
            yield
        finally:
            clock.free_launches = False

    # -- time

    def _now(self) -> float:
        if self._clock is not None:
            return self._clock.host
        return (time.monotonic() - self._origin) * 1e6

    @property
    def now(self) -> float:
        """Microseconds since the device was opened: the host's time line.

        On the model clock launches advance it by their cost, and a synchronise brings it to the
        end of the work.
        """
        self._check_process()
        return self._now()

    def _time_of(self, mark: Mark) -> float | None:
        if mark.graph is not None or mark.pending:
            return None
        if self._clock is not None:
            return self._clock.time_of(mark)
        return (mark.time - self._origin) * 1e6

    @property
    def busy(self) -> dict[str, float]:
        """Model clock: microseconds each resource has served so far."""
        self._check_process()
        if self._clock is None:
            return {}
        return dict(zip(RESOURCES, self._clock.busy, strict=True))

    # -- races

    @property
    def races(self) -> tuple[Race, ...]:
        """The races found so far, with the race check on."""
        self._check_process()
        return () if self._race is None else tuple(self._race.races)

    @property
    def race_remarks(self) -> tuple[tuple[str, str, int], ...]:
        """Legal and probably not meant, as (sentence, file, line)."""
        self._check_process()
        return () if self._race is None else tuple(self._race.remarks)

    @property
    def trace(self) -> Trace:
        """The trace; ParamInvalidError when none is kept."""
        self._check_process()
        if self._trace is None:
            raise ParamInvalidError(
                "trace: expected a device made with trace=True, got one without",
                argument="trace",
                expected="trace=True",
            )
        return self._trace

    def _raise_races(self) -> None:
        if self._race is not None:
            with self._lock:
                error = self._race.error()
            if error is not None:
                raise error

    # -- waiting

    async def synchronize(self) -> None:
        """Wait until everything launched on any stream is done.

        Raises StreamError from the first failure (others are in its notes) for all streams that
        have failed; then they are usable again.  Cancelling stops the waiting, not the work.
        """
        self._may_wait()
        marks = [(stream, stream.mark()) for stream in self.streams]
        await self._host.wait_all([mark for _, mark in marks])
        self._finish(marks)

    def synchronize_blocking(self) -> None:
        """The same, holding this thread."""
        self._may_wait()
        marks = [(stream, stream.mark()) for stream in self.streams]
        for _, mark in marks:
            self._host.wait_blocking(mark)
        self._finish(marks)

    def _may_wait(self) -> None:
        self._executor.check()
        self._refuse_in_capture("synchronise")

    def _finish(self, marks: list[tuple[Stream, Mark]]) -> None:
        errors: list[StreamError] = []
        causes: set[int] = set()
        for stream, mark in marks:
            self._host_reached(mark)
            failure = mark.failure
            if failure is None or not stream._told(failure):
                continue
            if id(failure) not in causes:
                causes.add(id(failure))
                errors.append(failed(failure, f"stream {stream.name!r}"))
        if errors:
            for other in errors[1:]:
                errors[0].add_note(str(other))
            raise errors[0]
        self._raise_races()

    def _host_reached(self, mark: Mark) -> None:
        """The host has waited for a mark: what comes is ordered after it."""
        if mark.dropped:
            raise StreamError(
                "stream: expected work that runs, got work that was dropped because the device "
                "was left by an exception",
                argument="stream",
            )
        if self._race is not None and mark.note is not None:
            with self._lock:
                self._race.host_joined(mark.note)

    # -- life

    @property
    def awaits_external(self) -> bool:
        """Whether a stream waits for an external event that nobody has recorded yet."""
        self._check_process()
        return len(self._promises) > 0

    def _open(self) -> None:
        if self._entered or self._executor.is_forked:
            raise StreamError(
                "device: expected a device that was never entered, got one that was; "
                "make a new one",
                argument="device",
            )
        self._entered = True
        self._origin = time.monotonic()
        if self._trace is not None:
            self._trace._origin = self._origin
        self._executor.open()
        self._workers.start()

    def _break_promises(self, *, fail: bool) -> None:
        """Nobody can record an external event any more: let no stream wait for one."""
        with self._lock:
            for mark in self._promises.take():
                self._break_promise(
                    mark, Failure(never_recorded(), "none", "wait_event") if fail else None
                )

    def _break_promise(self, mark: Mark, failure: Failure | None) -> None:
        """This record will not be made: who waits for it fails, or is dropped (None)."""
        if self._clock is not None:
            self._clock.kept(None, mark.position)
        self._executor.give_up(mark, failure)

    def _drop(self) -> None:
        # All at once, and only then what may wake a stream that waits.
        gone = [(stream, stream._detach()) for stream in self.streams]
        for stream, operations in gone:
            stream._forget(operations)
        self._break_promises(fail=False)
        self._executor.wake_one()

    def _marks(self) -> list[Mark]:
        return [stream.mark() for stream in self.streams]

    def _close(self) -> None:
        """Nothing is queued or running: end the workers and give everything back."""
        self._workers.end()
        for storage in list(self._storages):
            storage.release()

    def _end(self, marks: Sequence[Mark] = ()) -> None:
        """Wait for these, then for what runs, and close; holds this thread.

        marks: where all work is done; where it was dropped meanwhile, only what runs is waited for.
        """
        for mark in marks:
            self._host.wait_blocking(mark)
        for mark in self._marks():
            self._host.block_for_bytes(mark)
        self._close()
        self._closed = True
        settle(self._executor, self._over)
        self._host.close()

    def _end_in_background(self, marks: Sequence[Mark] = ()) -> None:
        """`_end` on a thread of its own; on this one when the system gives none."""
        if self._closed or self._closer is not None:
            return
        closer = threading.Thread(
            target=self._end_on_thread, args=(marks,), name="kvcore-closer", daemon=True
        )
        try:
            closer.start()
        except (RuntimeError, MemoryError):
            self._end(marks)
        else:
            self._closer = closer

    def _end_on_thread(self, marks: Sequence[Mark]) -> None:
        try:
            self._end(marks)
        except BaseException as error:
            self._end_error = error
            settle(self._executor, self._over)

    def _break_off(self) -> None:
        """The leaving cannot go on here: drop what has not started, and end on a thread."""
        if not self._closed:
            self._drop()
            self._end_in_background()

    async def _ended(self) -> None:
        await self._host.wait_for(self._over)

    def _leave_child(self) -> None:
        """In a forked child, or while Python ends, nothing of this device runs."""
        for storage in list(self._storages):
            storage.release()

    def _raise_unseen(self) -> None:
        failures = list(self._executor.failures)
        race = None if self._race is None else self._race.error()
        if failures:
            raise unseen(failures, race)
        if race is not None:
            raise race

    def __enter__(self) -> Device:
        self._open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._executor.is_forked or self._abandoned:
            self._leave_child()
            return
        if self._executor.inside():
            self._executor.check()  # a host function would wait for itself: an error
        try:
            self._executor.closing()
            if kind is not None:
                self._drop()
                self._end()
            else:
                self._break_promises(fail=True)
                try:
                    self._end(self._marks())
                except BaseException:
                    self._drop()
                    self._end()
                    raise
        except BaseException:
            self._break_off()
            raise
        if kind is None:
            self._raise_unseen()

    async def __aenter__(self) -> Device:
        self._open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._executor.is_forked or self._abandoned:
            self._leave_child()
            return
        if self._executor.inside():
            self._executor.check()  # a host function would wait for itself: an error
        try:
            self._executor.closing()
            if kind is None:
                self._break_promises(fail=True)
            else:
                self._drop()
            marks = self._marks()
            if not any(mark.pending for mark in marks):
                self._end(marks if kind is None else ())
                if kind is None:
                    await anyio.lowlevel.checkpoint()
            else:
                self._end_in_background(marks if kind is None else ())
                await self._wait_for_the_end(kind)
        except BaseException:
            self._break_off()
            raise
        if kind is None:
            self._raise_unseen()

    async def _wait_for_the_end(self, kind: type[BaseException] | None) -> None:
        if kind is not None and not can_await():
            return
        try:
            with Shield() as shield:
                if kind is None:
                    try:
                        await self._ended()
                    except GeneratorExit:  # nobody goes on with what is awaited from here
                        raise
                    except BaseException:
                        self._drop()
                        await shield(self._ended)
                        raise
                await shield(self._ended)
        finally:
            if self._closer is not None and not self._over.pending:
                self._closer.join()  # it has nothing left to wait for
        if self._end_error is not None:
            raise self._end_error

    def __repr__(self) -> str:
        name = "no profile" if self.profile is None else self.profile.name
        return f"Device({name}, clock={self.clock!r}, {len(self._streams)} streams)"


def _stop(executor: weakref.ref[Executor]) -> None:
    """End the workers of a device that was collected: they hold their executor themselves."""
    found = executor()
    if found is not None:
        found.stop()


def _now_of(device: weakref.ref[Device]) -> float:
    """``Device.now`` for the trace, which must not keep its device alive."""
    found = device()
    return 0.0 if found is None else found._now()


def _after_fork() -> None:
    """The child has the devices of its parent, but not their threads."""
    for device in list(_DEVICES):
        device._executor.forked()
        device._lock = threading.RLock()
        device._host.abandon()


def _at_exit() -> None:
    """Python ends with devices still entered, and with it their threads: nobody may wait.

    A block that is left later, by a generator that is collected last, could wait for ever.
    """
    for device in list(_DEVICES):
        device._abandoned = True
        device._executor.stop()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
