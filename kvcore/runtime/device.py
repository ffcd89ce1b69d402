# SPDX-License-Identifier: Apache-2.0
"""A device: what a program calls; ``core`` has its inside, ``leaving`` how all of it ends."""

from __future__ import annotations

import contextlib
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from kvcore.errors import ParamInvalidError, StreamError
from kvcore.runtime.allocation import DEFAULT_ALIGNMENT, allocate
from kvcore.runtime.core import Core
from kvcore.runtime.current import current_stream, use_stream
from kvcore.runtime.driver import driver_of
from kvcore.runtime.event import Event
from kvcore.runtime.external import ExternalEvent
from kvcore.runtime.failures import failed
from kvcore.runtime.graph import Capture, join_or_refuse
from kvcore.runtime.leaving import Life
from kvcore.runtime.memory import SPACES, Buffer, MemoryInfo
from kvcore.runtime.profile import RESOURCES, DeviceProfile
from kvcore.runtime.settings import RaceMode, Settings, one_of
from kvcore.runtime.statistics import DeviceStatistics, of_device
from kvcore.runtime.stream import Stream
from kvcore.runtime.streams import Streams
from kvcore.runtime.watching.race import Race
from kvcore.runtime.watching.trace import Trace

if TYPE_CHECKING:
    from kvcore.runtime.abc import Driver
    from kvcore.runtime.queues._executor import Executor
    from kvcore.runtime.queues._marks import Mark

__all__ = ["Device"]


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
                Or an object of a class derived from ``kvcore.runtime.abc.Driver``.
    """

    def __init__(
        self,
        profile: str | DeviceProfile | None = None,
        *,
        clock: Literal["wall", "model"] = "wall",
        race_check: RaceMode | None = None,
        trace: bool = False,
        workers: int = 2,
        backend: str | Driver | None = None,
        seed: int | None = None,
        check_host: bool = False,
        max_events: int | None = None,
    ) -> None:
        driver = driver_of(backend)
        asked = Settings.checked(
            driver.accept(profile, clock),
            clock=clock,
            race_check=race_check,
            trace=trace,
            workers=workers,
            seed=seed,
            check_host=check_host,
            max_events=max_events,
        )
        self.profile: DeviceProfile | None = asked.profile
        self.backend: str = driver.name
        self.workers: int = asked.workers
        self.clock: str = asked.clock
        self.race_check: str = asked.race_check
        self._core = core = Core(asked, driver)
        core.executor.graph_wait = join_or_refuse
        self._streams = Streams(core, self)
        self._life = Life(core)
        # (what is registered lasts as long as the device, so it must not hold what holds that)
        weakref.finalize(self, _stop, weakref.ref(core.executor)).atexit = False

    @property
    def driver(self) -> Driver:
        """The driver that does the device's work, a ``kvcore.runtime.abc.Driver``."""
        return self._core.driver

    @property
    def device_id(self) -> int:
        """The device's number among those of its backend; 0 on this machine."""
        return self._core.driver.device_id

    # -- streams, events, graphs

    def stream(self, name: str | None = None) -> Stream:
        """Make a stream; a name that is taken gets a number behind it."""
        self._core.check()
        return self._streams.new("stream" if name is None else str(name))

    @property
    def streams(self) -> tuple[Stream, ...]:
        """All streams, in the order they were made."""
        self._core.check_process()
        return tuple(self._streams.all)

    @property
    def default_stream(self) -> Stream:
        """The stream used where none is named; it orders nothing but its own work."""
        self._core.check_process()
        if not self._streams.has_default:
            self._core.check()
        return self._streams.default

    def current_stream(self) -> Stream:
        """The stream of this device in use in this task, or the default stream."""
        return current_stream(self)

    def use(self, stream: Stream) -> contextlib.AbstractContextManager[Stream]:
        """Make a stream the current one in this task for a block: ``with device.use(stream):``."""
        self._core.check_process()
        self._core.own(stream)
        return use_stream(stream)

    def event(self, *, blocking: bool = False, enable_timing: bool = True) -> Event:
        """Make an event that is not recorded yet."""
        self._core.check()
        return Event(self._core, self, blocking=blocking, enable_timing=enable_timing)

    def external_event(self) -> ExternalEvent:
        """Make an event that streams may wait for before it is recorded."""
        self._core.check()
        return ExternalEvent(self._core, self)

    def capture(self, stream: Stream) -> Capture:
        """Record launches instead of running them: ``async with device.capture(stream) as graph:``.

        A plain ``with`` works too.  Inside, synchronising, querying, allocating, freeing,
        host access and replaying raise CaptureError and record nothing.  On an NPU the graph
        becomes one of its own when the block ends: BackendUnavailableError ("not in this CANN")
        at its begin where aclmdlRI* is missing, and CaptureError for host functions.
        """
        self._core.check()
        return Capture(self._core, self._core.own(stream), self._streams, self)

    # -- memory

    def empty(
        self,
        shape: object,
        dtype: object = "float32",
        *,
        align: int = DEFAULT_ALIGNMENT,
        name: str | None = None,
    ) -> Buffer:
        """Allocate device memory; its contents are undefined.

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
        """Allocate pinned host memory, whose copies run side by side with everything.

        Arguments and errors are those of ``empty``.
        """
        return self._allocate(shape, dtype, "host", align, name)

    def empty_swapped(
        self,
        shape: object,
        dtype: object = "float32",
        *,
        align: int = 4096,
        name: str | None = None,
    ) -> Buffer:
        """Allocate host memory that kernels on the device use in place, over the link.

        Arguments and errors are those of ``empty``.
        """
        return self._allocate(shape, dtype, "swapped", align, name)

    def _allocate(
        self, shape: object, dtype: object, space: str, align: int, name: str | None
    ) -> Buffer:
        self._core.check()
        self._core.refuse_in_capture("allocate memory")
        return allocate(self._core, self, shape, dtype, space, align, name)

    def memory(self, space: str = "device") -> MemoryInfo:
        """Bytes of a space ("device", "host", "swapped"): used, the peak, the capacity."""
        one_of("space", space, SPACES)
        self._core.check_process()
        return self._core.memory(space)

    # -- time

    @property
    def now(self) -> float:
        """Microseconds since the device was opened: the host's time line.

        On the model clock launches advance it by their cost, and a synchronise brings it to the
        end of the work.
        """
        self._core.check_process()
        return self._core.now()

    @property
    def busy(self) -> dict[str, float]:
        """Microseconds that each resource has served so far; empty without the model clock."""
        self._core.check_process()
        clock = self._core.clock
        return {} if clock is None else dict(zip(RESOURCES, clock.busy, strict=True))

    def statistics(self) -> DeviceStatistics:
        """What the device and its streams are doing, in numbers; for logs and for debugging.

        Waits for nothing and never raises, in host functions and outside of the block too.
        """
        return of_device(self._core)

    # -- races

    @property
    def races(self) -> tuple[Race, ...]:
        """The races found so far, with the race check on."""
        self._core.check_process()
        race = self._core.race
        return () if race is None else tuple(race.races)

    @property
    def race_remarks(self) -> tuple[tuple[str, str, int], ...]:
        """Remarks on what is legal and probably not meant, each as (sentence, file, line)."""
        self._core.check_process()
        race = self._core.race
        return () if race is None else tuple(race.remarks)

    @property
    def trace(self) -> Trace:
        """The trace; ParamInvalidError when none is kept."""
        self._core.check_process()
        trace = self._core.trace
        if trace is None:
            raise ParamInvalidError(
                "trace: expected a device made with trace=True, got one without",
                argument="trace",
                expected="trace=True",
            )
        return trace

    # -- waiting

    async def synchronize(self) -> None:
        """Wait until everything launched on any stream is done.

        Raises StreamError from the first failure (others are in its notes) for all streams that
        have failed; then they are usable again.  Cancelling stops the waiting, not the work.
        """
        self._may_wait()
        marks = [(stream, stream.queue.mark()) for stream in self.streams]
        await self._core.waiting.until([mark for _, mark in marks])
        self._finish(marks)

    def synchronize_blocking(self) -> None:
        """Do what ``synchronize`` does, holding this thread.

        Works on an event loop's own thread, and without a loop.
        """
        self._may_wait()
        marks = [(stream, stream.queue.mark()) for stream in self.streams]
        for _, mark in marks:
            self._core.driver.wait_for(mark)
        self._finish(marks)

    def _may_wait(self) -> None:
        self._core.check()
        self._core.refuse_in_capture("synchronise")

    def _finish(self, marks: list[tuple[Stream, Mark]]) -> None:
        errors: list[StreamError] = []
        causes: set[int] = set()
        for stream, mark in marks:
            self._core.host_reached(mark)
            failure = mark.failure
            if failure is None or not stream.queue.told(failure):
                continue
            if id(failure) not in causes:
                causes.add(id(failure))
                errors.append(failed(failure, f"stream {stream.name!r}"))
        if errors:
            for other in errors[1:]:
                errors[0].add_note(str(other))
            raise errors[0]
        self._core.raise_races()

    @property
    def awaits_external(self) -> bool:
        """Whether a stream waits for an external event that is not recorded yet."""
        self._core.check_process()
        return len(self._core.promises) > 0

    # -- life

    def __enter__(self) -> Device:
        self._life.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._life.end(kind)

    async def __aenter__(self) -> Device:
        self._life.begin()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._life.end_awaited(kind)

    def __repr__(self) -> str:
        name = "no profile" if self.profile is None else self.profile.name
        return f"Device({name}, clock={self.clock!r}, {len(self._streams.all)} streams)"


def _stop(executor: weakref.ref[Executor]) -> None:
    """End the workers of a device that was collected: they hold their executor themselves."""
    found = executor()
    if found is not None:
        found.stop()
