# SPDX-License-Identifier: Apache-2.0
"""How a host learns that the hardware has reached a record.

A *ring*: a hardware stream of the host's own waits for the record's event, and behind
that comes a host function that rings.  Put on the work's stream, the function would have to be
behind what was launched meanwhile, and would hold the stream up.  There is a ring for each record
that is waited for at a moment, up to a limit.

The *watch*: a thread that is there from the first ``await`` on and sleeps unless a task waits.
It asks for the events that got no ring, and looks whether a stream that is waited for has failed:
behind a failure no host function runs, so nothing would ring.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from functools import partial
from threading import Condition, Thread
from typing import TYPE_CHECKING

from kvcore.errors import KVCoreError
from kvcore.npu.driver import hostcalls
from kvcore.npu.driver.records import TIMEOUTS, HardwareRecord
from kvcore.runtime.failures import took_too_long
from kvcore.runtime.queues._marks import Mark
from kvcore.runtime.queues._outside import promise, settle
from kvcore.runtime.waiting import hold

if TYPE_CHECKING:
    from kvcore.npu.driver.parts import Hardware, OnHardware

__all__ = ["HardwareWatch"]

MAX_RINGS = 32
#: Seconds between two looks of the watch: where nothing rings, and the longest otherwise.
SHORT_S, LONG_S = 0.001, 0.05
#: Milliseconds that a thread waits in one call, before it looks for failures and signals.
SLICE_MS = 50


class _Watched:
    """Records that a task waits for, the mark that wakes it, and whether a ring settles that."""

    __slots__ = ("records", "rings", "rung")

    def __init__(self, records: list[HardwareRecord], rung: Mark, rings: bool) -> None:
        self.records = list(records)
        self.rung = rung
        self.rings = rings


class HardwareWatch:
    """Rings and the watch of one device; the driver's verbs of completion are here."""

    def __init__(self, driver: Hardware) -> None:
        self._driver = driver
        self._idle_rings: list[int] = []
        self._num_rings = 0
        self._calls: dict[int, hostcalls.Action] = {}
        self._condition = Condition()
        self._watched: list[_Watched] = []
        self._thread: Thread | None = None
        self._over = False

    # -- waiting

    def until(self, marks: Sequence[Mark]) -> Iterator[Mark]:
        """What to wait for until all of them are settled: one ring behind all, and again."""
        marks = [mark for mark in marks if mark.pending]
        for mark in marks:
            record: HardwareRecord = mark.position
            if record.ready.pending and not record.handle:
                self._watch(_Watched([record], record.ready, True))
                yield record.ready
        while marks := [mark for mark in marks if mark.pending]:
            records: list[HardwareRecord] = [mark.position for mark in marks]
            yield self._ring_for(records)
            with self._driver.bind():
                for record in records:
                    record.look()

    def wait_for(self, mark: Mark, seconds: float | None = None) -> None:
        """Wait for a mark, holding this thread; StreamError when that takes too long."""
        if not mark.pending:
            return
        end = None if seconds is None else time.monotonic() + seconds
        record: HardwareRecord = mark.position
        driver = self._driver
        while (
            record.ready.pending and not record.handle and (end is None or time.monotonic() < end)
        ):
            next_look = time.monotonic() + LONG_S
            hold(record.ready, next_look if end is None else min(end, next_look))
            if record.ready.pending and not record.handle:
                with driver.bind():
                    self._look_at_held(set())
        while mark.pending:
            if seconds is not None and end is not None and time.monotonic() >= end:
                raise took_too_long(record.lane.name, seconds, TIMEOUTS[0])
            with driver.bind():
                if not record.handle:
                    continue  # a mark that resolves in this moment
                left = SLICE_MS if end is None else 1e3 * (end - time.monotonic())
                try:
                    if record.happens_within(max(1, min(SLICE_MS, int(left)))):
                        record.confirm()
                    else:
                        record.lane.look_for_failure(set())
                except KVCoreError as error:
                    record.lane.lose(error, losses=record.losses)

    def look(self, mark: Mark) -> bool:
        """Whether the host, asking now, finds the mark settled."""
        if mark.pending:
            record: HardwareRecord = mark.position
            with self._driver.bind():
                if not record.handle:
                    self._look_at_held(set(), polling=True)
                elif not record.look():
                    record.lane.look_for_failure(set(), polling=True)
        return not mark.pending

    # -- rings

    def _ring_for(self, records: list[HardwareRecord]) -> Mark:
        """A mark that resolves when it is time to look at the records: all done, or one failed."""
        driver = self._driver
        with driver.bind():
            rung = promise(None)
            if all(record.look() for record in records):
                settle(driver.core.executor, rung)
                return rung
            records = [record for record in records if record.mark is not None]
            for record in records:
                record.rungs.append(rung)
            rings = False
            with contextlib.suppress(KVCoreError):  # then the watch does it
                rings = self._ring(records, rung)
            self._watch(_Watched(records, rung, rings))
            return rung

    def _ring(self, records: list[HardwareRecord], rung: Mark) -> bool:
        driver = self._driver
        cann = driver.cann
        if not cann.has("aclrtLaunchHostFunc"):
            return False
        with self._condition:
            if self._idle_rings:
                ring = self._idle_rings.pop()
            elif self._num_rings < MAX_RINGS:
                self._num_rings += 1
                ring = 0
            else:
                return False
        ring = ring or driver.rings.make()
        for record in records:
            cann.aclrtStreamWaitEvent(ring, record.handle)
        self._calls[ring] = hostcalls.launch(cann, ring, partial(self._rang, ring, records, rung))
        return True

    def _rang(self, ring: int, records: list[HardwareRecord], rung: Mark) -> None:
        # On a thread of the driver: no ACL, and never an exception.  The records are held until
        # now, so that their events are not recorded again before the ring's stream has seen them.
        records.clear()
        self._idle_rings.append(ring)
        settle(self._driver.core.executor, rung)

    # -- the watch

    def _watch(self, watched: _Watched) -> None:
        with self._condition:
            self._watched.append(watched)
            if self._thread is None and not self._over:
                self._thread = Thread(target=self._look, name="kvcore-watch", daemon=True)
                self._thread.start()
            self._condition.notify()

    def _look(self) -> None:
        while True:
            with self._condition:
                if self._over:
                    return
                if not self._watched:
                    self._condition.wait()
                    continue
                pause = LONG_S if all(watched.rings for watched in self._watched) else SHORT_S
                end = time.monotonic() + pause
                while not self._over and (left := end - time.monotonic()) > 0:
                    self._condition.wait(left)
                    if not self._watched or not self._watched[-1].rings:
                        break
                watched, self._watched = self._watched, []
            seen: set[OnHardware] = set()
            busy = [one for one in watched if not self._sees(one, seen)]
            with self._condition:
                self._watched += busy

    def _sees(self, watched: _Watched, seen: set[OnHardware]) -> bool:
        """Whether these need not be looked at any more."""
        if not watched.rung.pending:
            return True
        records = [record for record in watched.records if record.mark is not None]
        for record in records:
            try:
                with self._driver.bind():
                    if not record.handle:
                        self._look_at_held(seen)
                    elif not record.look():
                        record.lane.look_for_failure(seen)
            except BaseException as error:  # any error must reach the tasks that wait
                record.lane.lose(error, losses=record.losses)
        return not watched.rung.pending

    def _look_at_held(self, seen: set[OnHardware], *, polling: bool = False) -> None:
        """A record waits in its queue, so somewhere a queue waits for a host function.

        Behind a failure of the hardware, that will not come.  Or it waits for another that will
        fail when the hardware has come to it.
        """
        for record in list(self._driver.doomed):
            if not record.look():
                record.lane.look_for_failure(seen, polling=polling)
        for lane in list(self._driver.held):
            lane.look_for_failure(seen, polling=polling)

    # -- the end

    def stop(self) -> None:
        """End the watch, when no task waits any more."""
        with self._condition:
            self._over = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._calls.clear()  # behind a failure, a ring does not ring

    def abandon(self) -> None:
        """In a forked child: the watch is not here."""
        self._condition = Condition()
        self._thread = None
        self._over = True
