# SPDX-License-Identifier: Apache-2.0
"""The race check: happens-before by vector clocks, exact byte ranges.

Every stream is a lane and counts its launches; the host is lane 0 and counts its own
accesses.  Order is known at launch, since everything that orders work is a call of the host:

* an operation comes after what its lane's vector has reached;
* a record keeps the vector of its lane, a wait joins it into the waiting lane;
* a host that synchronised joins the vector into its own, and every launch joins the host's.

*What* was touched is known when an operation runs: a plan reports the rows of that run, so two
writers of different slots of one cache do not meet.  The ranges go to a ``Shadow``, which finds
two unordered accesses to one byte whatever the real execution did; see there.

The host is one lane, whatever tasks and threads it has: how these order their own calls cannot
be seen from here, and a correct program must not be accused.

A vector is an array that is never changed once made, so that operations, marks and lanes share
it; a lane's own count and the host's count are kept beside it.
"""

from __future__ import annotations

import weakref
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvcore.errors import RaceError
from kvcore.runtime._shadow import HIT_WRITE, Shadow
from kvcore.runtime._storage import BufferCore
from kvcore.runtime._vectors import Vector
from kvcore.runtime.copies import ranges_of

if TYPE_CHECKING:
    from kvcore.runtime._marks import Mark, Op
    from kvcore.runtime._queue import Queue
    from kvcore.runtime.observe import Note, Site

__all__ = ["Party", "Race", "RaceCheck"]

MAX_RACES = 1000
FIRST_SWEEP = 1 << 16


@dataclass(frozen=True, slots=True)
class Party:
    """One side of a race: what, on which stream, launched where, reading or writing."""

    operation: str
    stream: str
    file: str
    line: int
    argument: str
    writes: bool

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        what = f"{self.operation} on {self.stream} {verb} {self.argument}"
        return f"{what} ({self.file}:{self.line})" if self.file else what


@dataclass(frozen=True, slots=True)
class Race:
    """Two unordered accesses to a common byte, one of them a write.

    kind:   "RAW", "WAR" or "WAW", taken in the order of the launches.
    first:  the one launched first.  second: the other.
    start, end: the first range of bytes they share; nbytes: all that they share.
    """

    kind: str
    first: Party
    second: Party
    start: int
    end: int
    nbytes: int

    def __str__(self) -> str:
        return (
            f"{self.kind}: {self.first}, and {self.second}, with nothing between them to order "
            f"them; {self.nbytes} bytes shared, first [{self.start:#x}, {self.end:#x})"
        )


class _Lane:
    __slots__ = ("count", "host_version", "late", "name", "vector")

    def __init__(self, name: str) -> None:
        self.name = name
        self.vector = Vector()
        self.count = 0
        self.host_version = 0
        # marks waited for before they were recorded: their clocks are not known yet
        self.late: tuple[Mark, ...] = ()


class Stamp:
    """The clock of a record: its lane, the lane's count, the vector, and what is ``late``.

    host: the host's accesses before it; of interest to who waited for it before it was made.
    """

    __slots__ = ("count", "host", "lane", "late", "vector")

    def __init__(
        self, lane: int, count: int, vector: Vector, host: int, late: tuple[Mark, ...]
    ) -> None:
        self.lane = lane
        self.count = count
        self.vector = vector
        self.host = host
        self.late = late


class _Record:
    """What a report needs to know of one access."""

    __slots__ = ("name", "number", "site", "stream")

    def __init__(self, name: str, stream: str, site: Site | None, number: float) -> None:
        self.name = name
        self.stream = stream
        self.site = site
        self.number = number

    def party(self, argument: str, writes: bool) -> Party:
        return Party(self.name, self.stream, *_place(self.site), argument, writes)


class RaceCheck:
    """Watches one device.  Everything is called with the device's lock held.

    races:    what was found, at most MAX_RACES; the same pair of places is reported once.
    remarks:  things that are legal and probably not meant, as (sentence, file, line).
    """

    def __init__(self, *, raising: bool, check_host: bool) -> None:
        self.raising = raising
        self.races: list[Race] = []
        self.remarks: list[tuple[str, str, int]] = []
        self._reported = 0
        self._check_host = check_host
        self._shadow = Shadow()
        self._records: list[tuple[_Record, str]] = []
        self._lanes: dict[int, _Lane] = {}
        self._host_count = 0
        self._host_version = 0
        self._host_vector = Vector()
        self._in_flight: dict[int, Vector] = {}
        self._seen: set[tuple[object, ...]] = set()
        self._next_sweep = FIRST_SWEEP
        # memory that has gone back: entered by finalisers, so nothing but an append happens there
        self._gone: deque[tuple[int, int, int]] = deque()
        self._roots: dict[int, weakref.ref[Any]] = {}
        self._kept: dict[int, object] = {}
        self._plain_writes: dict[int, list[tuple[int, int]]] = {}

    # -- order

    def lane(self, index: int, name: str) -> None:
        """A stream was made."""
        self._lanes[index] = _Lane(name)

    def _refresh(self, lane: _Lane) -> None:
        if lane.host_version != self._host_version:
            lane.vector = lane.vector.join(self._host_vector, 0, 0)
            lane.host_version = self._host_version

    def launched(self, index: int, note: Note, op: Op) -> None:
        """Give an operation its place in the order."""
        lane = self._lanes[index]
        if lane.host_version != self._host_version:
            self._refresh(lane)
        if lane.late:
            self._settle(lane)
        lane.count += 1
        note.count = lane.count
        note.lane = index
        note.vector = lane.vector
        note.late = lane.late
        note.host = self._host_count
        self._in_flight[op.number] = lane.vector
        if self._check_host:
            self._sum_sources(op, note)

    def marked(self, index: int) -> Stamp:
        """The clock of a record."""
        lane = self._lanes[index]
        self._refresh(lane)
        if lane.late:
            self._settle(lane)
        return Stamp(index, lane.count, lane.vector, self._host_count, lane.late)

    def waited(self, index: int, stamp: Stamp) -> None:
        """A lane waits for a record."""
        lane = self._lanes[index]
        self._refresh(lane)
        self._join(lane, stamp)

    def _join(self, lane: _Lane, stamp: Stamp) -> None:
        if not lane.vector.reached(stamp.vector, stamp.lane, stamp.count):
            lane.vector = lane.vector.join(stamp.vector, stamp.lane, stamp.count)
        if stamp.late:
            lane.late += tuple(mark for mark in stamp.late if mark not in lane.late)

    def promised(self, index: int, mark: Mark) -> None:
        """A lane waits for a record that has yet to be made."""
        lane = self._lanes[index]
        if mark not in lane.late:
            lane.late += (mark,)

    def _settle(self, lane: _Lane) -> None:
        """Take over the clocks of late marks that have been recorded by now."""
        while known := [mark for mark in lane.late if mark.note is not None]:
            lane.late = tuple(mark for mark in lane.late if mark.note is None)
            for mark in known:
                self._join(lane, mark.note)

    def _fold(self, vector: Vector, host: int, late: tuple[Mark, ...]) -> tuple[Vector, int]:
        """A clock and the late marks behind it, now that these have been recorded."""
        pending, done = list(late), set()
        while pending:
            mark = pending.pop()
            stamp = mark.note
            if stamp is not None and id(mark) not in done:
                done.add(id(mark))
                host = max(host, stamp.host)
                if not vector.reached(stamp.vector, stamp.lane, stamp.count):
                    vector = vector.join(stamp.vector, stamp.lane, stamp.count)
                pending += stamp.late
        return vector, host

    def host_joined(self, stamp: Stamp) -> None:
        """The host has waited for a record."""
        vector = self._host_vector
        if stamp.late:
            reached, _ = self._fold(stamp.vector, 0, stamp.late)
            stamp = Stamp(stamp.lane, stamp.count, reached, stamp.host, ())
        if not vector.reached(stamp.vector, stamp.lane, stamp.count):
            self._host_vector = vector.join(stamp.vector, stamp.lane, stamp.count)
            self._host_version += 1
        if self._records and not self._in_flight and self._host_knows_all():
            # Whatever comes is launched by this host, so it is ordered after all there was.
            self._forget()

    def _host_knows_all(self) -> bool:
        vector = self._host_vector
        return all(vector[index] >= lane.count for index, lane in self._lanes.items())

    def _forget(self) -> None:
        self._shadow.reset()
        self._records.clear()
        self._gone.clear()
        self._kept.clear()
        self._roots = {key: ref for key, ref in self._roots.items() if ref() is not None}

    # -- accesses

    def starting(self, queue: Queue, op: Op) -> None:
        """An operation is about to run: are its plain sources what they were at launch?"""
        sums = op.note.checksums
        if sums is None:
            return
        for access, before in sums:
            array = access.owner
            if _checksum(array) != before:
                start, end = _extent(array)
                earlier = Party(op.name, queue.name, *_place(op.note.site), access.argument, False)
                later = Party("a change by the host", "the host", "", 0, access.argument, True)
                self._report(
                    Race("WAR", earlier, later, start, end, end - start),
                    ("sum", op.note.site, access.argument),
                )

    def ran(self, queue: Queue, op: Op) -> None:
        """An operation has run: enter what it touched."""
        note = op.note
        self._in_flight.pop(op.number, None)
        if self._plain_writes:
            self._plain_writes.pop(op.number, None)
        if note.late:
            note.vector, note.host = self._fold(note.vector, note.host, note.late)
        if not op.is_work or not hasattr(op.target, "touched"):
            return
        reads, writes = op.target.touched()
        record = _Record(op.name, queue.name, note.site, op.number)
        for access in reads:
            self._enter(access, False, note, record)
        for access in writes:
            self._enter(access, True, note, record)

    def skipped(self, op: Op) -> None:
        """An operation will not run, or failed and (plans being atomic) wrote nothing."""
        self._in_flight.pop(op.number, None)
        if self._plain_writes:
            self._plain_writes.pop(op.number, None)

    def _enter(self, access: Any, write: bool, note: Note, record: _Record) -> None:
        ranges = access.ranges
        if not len(ranges):
            return
        self._hold(access.owner)
        what = (record, access.argument)
        self._access(ranges, write, note.lane, note.count, note.host, note.vector, what)

    def host_access(
        self, owner: object, array: npt.NDArray[Any], write: bool, name: str, site: Site | None
    ) -> None:
        """The host touches an array, here and now."""
        self._host_count += 1
        self._hold(owner)
        what = (_Record(name, "the host", site, np.inf), "the buffer")
        count = self._host_count
        self._access(ranges_of(array), write, 0, count, count, self._host_vector, what)

    def function_access(
        self,
        queue: Queue,
        op: Op,
        owner: object,
        array: npt.NDArray[Any],
        write: bool,
        site: Site | None,
    ) -> None:
        """A host function touches an array: an access of its stream."""
        note = op.note
        if note.late:
            note.vector, note.host = self._fold(note.vector, note.host, note.late)
        self._hold(owner)
        what = (_Record(op.name, queue.name, site, op.number), "the buffer")
        ranges = ranges_of(array)
        self._access(ranges, write, note.lane, note.count, note.host, note.vector, what)

    def _access(
        self,
        ranges: npt.NDArray[np.int64],
        write: bool,
        lane: int,
        count: int,
        host: int,
        vector: Vector,
        what: tuple[_Record, str],
    ) -> None:
        shadow = self._shadow
        if self._gone:
            self._clear_gone()
        if shadow.num_live >= self._next_sweep:
            self._sweep()
        self._records.append(what)
        hits = shadow.access(ranges, write, lane, count, host, vector)
        if hits is not None:
            self._found(hits, what, write)

    def _found(
        self, hits: Sequence[tuple[int, int, int, int]], what: tuple[_Record, str], write: bool
    ) -> None:
        groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for other, start, end, flag in hits:
            groups.setdefault((other, flag), []).append((start, end))
        for (number, flag), shared in groups.items():
            met = self._records[number]
            met_writes = flag == HIT_WRITE
            # By launch.  The host's accesses count as last: an operation launched after one
            # would be ordered after it.
            pair = [(met, met_writes), (what, write)]
            if what[0].number < met[0].number:
                pair.reverse()
            ((one, one_argument), one_writes), ((two, two_argument), two_writes) = pair
            kind = "WAW" if one_writes and two_writes else "RAW" if one_writes else "WAR"
            start, end = shared[0]
            race = Race(
                kind,
                one.party(one_argument, one_writes),
                two.party(two_argument, two_writes),
                start,
                end,
                sum(e - s for s, e in shared),
            )
            key = (one.name, one.site, one.stream, one_argument)
            self._report(race, (kind, *key, two.name, two.site, two.stream, two_argument))

    def _report(self, race: Race, key: tuple[object, ...]) -> None:
        if key not in self._seen and len(self.races) < MAX_RACES:
            self._seen.add(key)
            self.races.append(race)

    def remark(self, sentence: str, site: Site | None) -> None:
        """Note something legal that was probably not meant."""
        if len(self.remarks) < MAX_RACES:
            self.remarks.append((sentence, *_place(site)))

    def error(self) -> RaceError | None:
        """What the next synchronise must raise: races not raised yet; None in "record" mode."""
        fresh = self.races[self._reported :]
        self._reported = len(self.races)
        if not fresh or not self.raising:
            return None
        more = f" (and {len(fresh) - 1} more)" if len(fresh) > 1 else ""
        error = RaceError(
            f"stream: expected accesses in order, got a race{more}: {fresh[0]}",
            argument="stream",
            seen=tuple(fresh),
        )
        for race in fresh[1:10]:
            error.add_note(str(race))
        return error

    # -- memory that comes and goes

    def _hold(self, owner: object) -> None:
        """See to it that an address given to new memory is not taken for the old."""
        root = owner.storage.array if isinstance(owner, BufferCore) else owner
        while type(root) is np.ndarray and root.base is not None:
            root = root.base
        key = id(root)
        held = self._roots.get(key)
        if held is not None and held() is root:
            return
        if isinstance(root, np.ndarray):
            start, end = _extent(root)
            gone = self._gone
            self._roots[key] = weakref.ref(root, lambda _: gone.append((key, start, end)))
        elif root is not None:
            # Not numpy's: keep it alive until the host has waited for everything.
            self._kept[key] = root

    def _clear_gone(self) -> None:
        while self._gone:
            key, start, end = self._gone.popleft()
            self._shadow.clear(start, end)
            held = self._roots.get(key)
            if held is not None and held() is None:
                del self._roots[key]

    def _sweep(self) -> None:
        vector = self._host_vector
        floor = vector
        host = self._host_count
        for flying in list(self._in_flight.values()):
            if flying is not floor:
                floor = floor.meet(flying)
                host = 0
        self._records = [self._records[old] for old in self._shadow.sweep(host, floor)]
        self._next_sweep = max(FIRST_SWEEP, 2 * len(self._records))

    # -- plain sources

    def _sum_sources(self, op: Op, note: Note) -> None:
        """Checksums of plain numpy sources, unless work in flight is to write them first."""
        plan = op.target
        if not op.is_work or not hasattr(plan, "reads"):
            return
        sums = []
        for access in plan.reads:
            array = access.owner
            if isinstance(array, np.ndarray):
                start, end = _extent(array)
                if not any(
                    start < e and s < end
                    for ranges in self._plain_writes.values()
                    for s, e in ranges
                ):
                    sums.append((access, _checksum(array)))
        writes = [_extent(a.owner) for a in plan.writes if isinstance(a.owner, np.ndarray)]
        if writes:
            self._plain_writes[op.number] = writes
        note.checksums = sums or None


def _place(site: Site | None) -> tuple[str, int]:
    return ("", 0) if site is None else (site[0].co_filename, site[1])


def _extent(array: npt.NDArray[Any]) -> tuple[int, int]:
    low, high = np.lib.array_utils.byte_bounds(array)
    return int(low), int(high)


def _checksum(array: npt.NDArray[Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)
