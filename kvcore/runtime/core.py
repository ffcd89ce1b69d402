# SPDX-License-Identifier: Apache-2.0
"""What the parts of one device share, and the few verbs they need of it.

Streams, events, buffers and graphs get this, and never the ``Device`` that a program holds: what
they may ask is written down here, and a part can be read without the whole.  ``stream.device``,
``event.device`` and ``buffer.device`` are for programs alone.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvcore.errors import ParamInvalidError, StreamError
from kvcore.runtime._storage import Ledger, Storage
from kvcore.runtime.accesses import ranges_of
from kvcore.runtime.failures import not_in_a_capture
from kvcore.runtime.memory import SPACES, Buffer, MemoryInfo
from kvcore.runtime.queues._admission import Admission
from kvcore.runtime.queues._executor import Executor
from kvcore.runtime.queues._queue import Queue, StreamCore
from kvcore.runtime.waiting import Waiting
from kvcore.runtime.watching._observe import Observer, call_site
from kvcore.runtime.watching.race import RaceCheck
from kvcore.runtime.watching.trace import Trace

if TYPE_CHECKING:
    from kvcore.runtime.abc import Driver
    from kvcore.runtime.model._clock import ModelClock
    from kvcore.runtime.profile import DeviceProfile
    from kvcore.runtime.queues._marks import Failure, Mark
    from kvcore.runtime.settings import Settings

__all__ = ["Core", "Promises"]

_CORES: weakref.WeakSet[Core] = weakref.WeakSet()


class Promises:
    """Marks that streams wait for and that are not recorded yet; the device's lock is held."""

    def __init__(self) -> None:
        self._marks: dict[int, Mark] = {}

    def __len__(self) -> int:
        return len(self._marks)

    def made(self, mark: Mark) -> None:
        """A stream waits for it."""
        self._marks[id(mark)] = mark

    def kept(self, mark: Mark) -> bool:
        """It is being recorded; whether a stream waits for it."""
        return self._marks.pop(id(mark), None) is not None

    def take(self) -> list[Mark]:
        """All of them, to be broken."""
        marks = list(self._marks.values())
        self._marks.clear()
        return marks


class Core:
    """The inside of one device.

    driver:   who does the work.  executor: the workers' queues.  queues: one a stream, in the
              order they were made.  waiting: the tasks that wait.
    lock:     of launches that clocks, the race check and the trace observe; a thread may hold it
              while it asks the driver for memory or marks, never while it waits.
    check:    raises StreamError unless the device is open and this is none of its workers.
    check_process: raises StreamError in a process that was forked from the device's.
    key:      what the device's memory carries.  ledgers: bytes by space.
    captures: graphs whose blocks are open.  promises: external events that are waited for.
    race, trace, clock: None where the device has none.  costs: whether copies note theirs.
    origin:   ``time.monotonic`` of the opening.
    closed:   everything was given back.  abandoned: Python ends, and no thread may wait.
    """

    def __init__(self, settings: Settings, driver: Driver) -> None:
        self.settings = settings
        self.driver = driver
        self.profile: DeviceProfile | None = settings.profile
        self.key: object = object()
        self.lock: threading.RLock = threading.RLock()
        admission = Admission(self.key, self.profile is not None)
        # (the workers hold their executor, which must not hold the device)
        admission.refuse = partial(_refuse, weakref.ref(driver))
        self.executor: Executor = Executor(admission, settings.seed, settings.clock == "model")
        self.executor.lock = self.lock
        # (no methods: every call of a program begins with one of these)
        self.check: Callable[[], None] = self.executor.check
        self.check_process: Callable[[], None] = self.executor.check_process
        self.waiting: Waiting = Waiting(driver)
        self.ledgers: dict[str, Ledger] = {space: Ledger(-1) for space in SPACES}
        self.storages: weakref.WeakSet[Storage] = weakref.WeakSet()
        self.queues: list[Queue] = []
        self.captures: list[Any] = []
        self.promises: Promises = Promises()
        self.origin: float = time.monotonic()
        #: The queue of the device's default stream, made when it is first asked for.
        self.default_queue: Callable[[], Queue]
        self.closed = False
        self.abandoned = False
        self.buffer_class: type[Buffer] = driver.buffer_class
        self.trace: Trace | None = None
        self.race: RaceCheck | None = None
        if settings.max_events:
            self.trace = Trace(
                settings.max_events,
                partial(_now_of, weakref.ref(self)),
                self.origin,
                settings.clock == "model",
                self.ledgers,
            )
        driver.attach(self)
        self.clock: ModelClock | None = driver.clock
        self.limit_memory()
        if settings.race_check != "off":
            self.race = RaceCheck(
                raising=settings.race_check == "raise",
                check_host=settings.check_host,
                storages=self.storages,
            )
        if self.race or self.clock or self.trace:
            self.executor.observer = Observer(self.lock, self.race, self.clock, self.trace)
            self.executor.observe_start = settings.check_host
        self.costs: bool = self.clock is not None or self.trace is not None
        _CORES.add(self)

    # -- may I?

    def own(self, stream: object) -> StreamCore:
        """The stream, when it is one of this device; ParamInvalidError otherwise."""
        if isinstance(stream, StreamCore):
            if stream.queue.executor is self.executor:
                return stream
            seen = "one of another device"
        else:
            seen = type(stream).__name__
        raise ParamInvalidError(
            f"stream: expected a stream of this device, got {seen}", argument="stream", seen=seen
        )

    def refuse_in_capture(self, what: str, argument: str = "device") -> None:
        """Raise CaptureError while a graph is captured; ``what``: what was asked for."""
        # (a host function that runs meanwhile is not the one who captures)
        if self.captures and not self.executor.inside():
            raise not_in_a_capture(argument, what)

    # -- memory

    def limit_memory(self) -> None:
        """Keep to what the driver has, and to the profile where that is less."""
        for space, ledger in self.ledgers.items():
            limits = [self.driver.capacity(space)]
            if space == "device" and self.profile is not None:
                limits.append(self.profile.capacity_bytes)
            ledger.capacity = min([n for n in limits if n is not None], default=-1)

    def take(self, space: str, nbytes: int) -> npt.NDArray[np.uint8]:
        """New memory as bytes; MemoryError or DeviceOutOfMemoryError when there is none."""
        return self.driver.take(space, nbytes)

    def keep(self, storage: Storage) -> None:
        """The storage is the device's, which gives it back when it is left."""
        self.storages.add(storage)

    def release_memory(self) -> None:
        """Give back all that is the device's; a storage is given back once."""
        for storage in list(self.storages):
            storage.release()

    def memory(self, space: str) -> MemoryInfo:
        """Bytes used, the peak and the capacity of a space."""
        ledger = self.ledgers[space]
        capacity = None if ledger.capacity < 0 else ledger.capacity
        return MemoryInfo(ledger.used, ledger.peak, capacity, ledger.allocations, ledger.frees)

    def memory_changed(self) -> None:
        """Bytes were taken or given back."""
        if self.trace is not None:
            with self.lock:
                self.trace.look_at_memory()

    def host_access(self, buffer: Buffer, array: npt.NDArray[Any], mode: str, name: str) -> None:
        """The host uses these bytes now: "r", "w" or "rw"; name: by which method."""
        race = self.race
        if race is None or self.executor.is_forked:
            return
        calling = self.executor.calling()
        site = call_site() if calling is None else None
        with self.lock:
            for write in (False, True):
                if ("w" if write else "r") in mode:
                    if calling is None:
                        race.host_access(buffer, ranges_of(array), write, f"buffer.{name}()", site)
                    else:
                        race.function_access(*calling, buffer, ranges_of(array), write)

    # -- time

    def now(self) -> float:
        """Microseconds since the device was opened: the host's time line."""
        return self.since_opening(time.monotonic()) if self.clock is None else self.clock.host

    def since_opening(self, seconds: float) -> float:
        """Microseconds from the opening to a time of ``time.monotonic``."""
        return (seconds - self.origin) * 1e6

    def begin_time(self) -> None:
        """The device is opened now."""
        self.origin = time.monotonic()
        if self.trace is not None:
            self.trace.opened(self.origin)

    @contextlib.contextmanager
    def one_launch(self) -> Iterator[None]:
        """Inside, all launches together cost the host one."""
        clock = self.clock
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

    # -- order

    def event_call(self) -> None:
        """The host calls record or wait, which takes some of the model's time."""
        if self.executor.observer is not None:
            self.executor.observer.event_call()

    def host_reached(self, mark: Mark) -> None:
        """The host has waited for a mark: what comes is ordered after it.

        Raises StreamError for a mark that was dropped.
        """
        if mark.dropped:
            raise StreamError(
                "stream: expected work that runs, got work that was dropped because the device "
                "was left by an exception",
                argument="stream",
            )
        if self.race is not None and mark.note is not None:
            with self.lock:
                self.race.host_joined(mark.note)
        if self.driver.tidies:
            self.driver.reached()

    def raise_races(self) -> None:
        """Raise the races that were found since the last time, if that was asked for."""
        if self.race is not None:
            with self.lock:
                error = self.race.error()
            if error is not None:
                raise error

    def break_promise(self, mark: Mark, failure: Failure | None) -> None:
        """This record will not be made: who waits for it fails, or is dropped (None)."""
        self.driver.give_up(mark, failure)

    # -- other processes, and none

    def forked(self) -> None:
        """This process is a copy of the device's: none of its threads is here."""
        self.executor.forked()
        self.lock = threading.RLock()
        self.waiting.abandon()
        self.driver.forked()


def _refuse(driver: weakref.ref[Driver], argument: str, owner: object) -> None:
    """``Driver.refuse`` for the admission, which must not keep its device alive."""
    found = driver()
    if found is not None:
        found.refuse(argument, owner)


def _now_of(core: weakref.ref[Core]) -> float:
    """``Core.now`` for the trace, which must not keep its device alive."""
    found = core()
    return 0.0 if found is None else found.now()


def _after_fork() -> None:
    """The child has the devices of its parent, but not their threads."""
    for core in list(_CORES):
        core.forked()


def _at_exit() -> None:
    """Python ends with devices still entered, and with it their threads: no thread may wait.

    A block that is left later, by a generator that is collected last, could wait for ever.
    """
    for core in list(_CORES):
        core.abandoned = True
        core.executor.stop()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
