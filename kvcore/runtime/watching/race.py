# SPDX-License-Identifier: Apache-2.0
"""The race check's reports.  The clocks are in ``_order``, the accesses in ``_watch``."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvcore.errors import RaceError
from kvcore.runtime._storage import BufferCore
from kvcore.runtime.arguments import host_memory
from kvcore.runtime.memory import Buffer
from kvcore.runtime.watching._shadow import HIT_WRITE
from kvcore.runtime.watching._watch import Accessor, Watch

if TYPE_CHECKING:
    from kvcore.runtime._storage import Storage
    from kvcore.runtime.accesses import Access
    from kvcore.runtime.memory import Origin
    from kvcore.runtime.queues._executor import Line
    from kvcore.runtime.queues._marks import Op
    from kvcore.runtime.queues._queue import Queue
    from kvcore.runtime.watching._observe import _Site as Site
    from kvcore.runtime.watching._order import Note, Stamp

__all__ = ["Party", "Race", "RaceCheck"]

MAX_RACES = 1000
#: Runs of rows that a race keeps, and how many of them its text names.
MAX_ROWS, MAX_NAMED = 64, 4
Ranges = Sequence[tuple[int, int]]


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
    buffer: what the memory was made as, name (or space), shape and dtype; "" for memory that is
            no buffer's.  rows: runs [first, one past the last) of elements of that buffer's first
            dimension in which the bytes lie, at most the first MAX_ROWS of them.
    times:  how often these two places have met without order; all else is of the first time.
    """

    kind: str
    first: Party
    second: Party
    start: int
    end: int
    nbytes: int
    buffer: str = ""
    rows: tuple[tuple[int, int], ...] = ()
    times: int = 1

    def __str__(self) -> str:
        text = (
            f"{self.kind}: {self.first}, and {self.second}, with nothing between them to order "
            f"them; {self.nbytes} bytes shared, "
        )
        if self.rows:
            runs = [f"[{first}, {end})" for first, end in self.rows[:MAX_NAMED]]
            more = " and more" if len(self.rows) > MAX_NAMED else ""
            text += f"in rows {', '.join(runs)}{more} of {self.buffer}"
        else:
            text += f"first [{self.start:#x}, {self.end:#x})"
        return text if self.times == 1 else f"{text}; {self.times} times so far"


class RaceCheck(Watch):
    """Watches one device.  Everything is called with the device's lock held.

    races:   what was found, at most MAX_RACES; the same pair of places is reported once, with
             how often it was found.
    remarks: things that are legal and probably not meant, as (sentence, file, line).
    storages: the device's memory, to name the buffer of an address.

    Sources by checksum (``check_host``)
    ------------------------------------
    A source in host memory is summed at launch and again when its operation starts.  What the
    check sees for itself must not count: writes that operations declare and accesses through
    ``Buffer.host`` are compared by their order, exactly, so these take away the sums of what they
    overlap.  What a host function does to memory behind the check's back cannot be seen; pinned
    and swapped memory, which correct programs fill in host functions, is not summed while one is
    under way.
    """

    def __init__(
        self, *, raising: bool, check_host: bool, storages: Iterable[Storage] = ()
    ) -> None:
        self.raising = raising
        self.check_host = check_host
        self.remarks: list[tuple[str, str, int]] = []
        self._storages = storages
        self._races: list[Race] = []
        self._times: list[int] = []
        self._reported = 0
        self._seen: dict[tuple[object, ...], int] = {}
        self._host_writes: dict[int, list[tuple[int, int]]] = {}
        self._unknown: set[int] = set()
        self._summed: dict[int, Note] = {}

    @property
    def races(self) -> list[Race]:
        """What was found so far."""
        return [
            race if times == 1 else replace(race, times=times)
            for race, times in zip(self._races, self._times, strict=True)
        ]

    def host_joined(self, stamp: Stamp) -> None:
        """The host has waited for a record."""
        if self.joined(stamp) and self.records:
            # Whatever comes is launched by this host, so it is ordered after all there was.
            self.forget()

    # -- accesses

    def starting(self, queue: Queue, op: Op) -> None:
        """An operation is about to run: are its plain sources what they were at launch?"""
        self._summed.pop(op.number, None)
        sums, op.note.checksums = op.note.checksums, None
        for access, before in sums or ():
            array = host_memory(access.owner)
            if array is not None and _checksum(array) != before:
                start, end = _extent(array)
                earlier = Party(op.name, queue.name, *_place(op.note.site), access.argument, False)
                later = Party("a change by the host", "the host", "", 0, access.argument, True)
                self._report(
                    self._placed("WAR", earlier, later, [(start, end)], access.owner),
                    ("sum", op.note.site, access.argument),
                )
        if self._summed:
            if op.number in self._unknown:
                self._forget_sums(None)
            for start, end in self._host_writes.get(op.number, ()):
                self._forget_sums((start, end))

    def _forget_sums(self, extent: tuple[int, int] | None) -> None:
        """Do not compare sources that meet these bytes, or (None) those of buffers."""
        for note in list(self._summed.values()):
            note.checksums = [
                (access, before)
                for access, before in note.checksums or ()
                if (
                    not isinstance(access.owner, Buffer)
                    if extent is None
                    else not _meet(access, extent)
                )
            ]

    def over(self, op: Op) -> None:
        """An operation has run, failed or been skipped: what it wrote is settled."""
        self._host_writes.pop(op.number, None)
        self._summed.pop(op.number, None)
        self._unknown.discard(op.number)

    def host_access(
        self, owner: object, ranges: Any, write: bool, name: str, site: Site | None
    ) -> None:
        """The host touches memory, here and now."""
        if write and self._summed and len(ranges):
            self._forget_sums((int(ranges[0, 0]), int(ranges[-1, 1])))
        super().host_access(owner, ranges, write, name, site)

    def function_access(self, line: Line, op: Op, owner: object, ranges: Any, write: bool) -> None:
        """A host function or a plan looks at memory while it runs: an access of its stream."""
        if write and self._summed and len(ranges):
            self._forget_sums((int(ranges[0, 0]), int(ranges[-1, 1])))
        super().function_access(line, op, owner, ranges, write)

    def found(
        self,
        hits: Sequence[tuple[int, int, int, int]],
        record: Accessor,
        argument: str,
        write: bool,
        owner: object,
    ) -> None:
        """Two unordered accesses or more: report them."""
        groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for other, start, end, flag in hits:
            groups.setdefault((other, flag), []).append((start, end))
        for (number, flag), shared in groups.items():
            met, met_argument = self.records[number]
            # By launch.  The host's accesses count as last: an operation launched after one
            # would be ordered after it.
            one, one_argument, one_writes = met, met_argument, flag == HIT_WRITE
            two, two_argument, two_writes = record, argument, write
            if two.number < one.number:
                one, two = two, one
                one_argument, two_argument = two_argument, one_argument
                one_writes, two_writes = two_writes, one_writes
            kind = "WAW" if one_writes and two_writes else "RAW" if one_writes else "WAR"
            key = (
                kind,
                *(one.name, one.site, one.stream, one_argument),
                *(two.name, two.site, two.stream, two_argument),
            )
            place = self._seen.get(key)
            if place is not None:
                self._times[place] += 1
                continue
            first = _party(one, one_argument, one_writes)
            second = _party(two, two_argument, two_writes)
            self._report(self._placed(kind, first, second, shared, owner), key)

    def _placed(
        self, kind: str, first: Party, second: Party, shared: Ranges, owner: object
    ) -> Race:
        """A race over these bytes, reported as rows of the buffer that they are of."""
        start, end = shared[0]
        origin = self._origin(start, owner)
        return Race(
            kind,
            first,
            second,
            start,
            end,
            sum(e - s for s, e in shared),
            "" if origin is None else str(origin),
            () if origin is None else _rows(origin, shared),
        )

    def _origin(self, address: int, owner: object) -> Origin | None:
        """The buffer of an address; a plain array may share a buffer's memory."""
        if isinstance(owner, BufferCore):
            found: Origin = owner.storage.origin
            return found
        for storage in self._storages:
            made: Origin = storage.origin
            if made is not None and made.address <= address < made.address + storage.nbytes:
                return made
        return None

    def _report(self, race: Race, key: tuple[object, ...]) -> None:
        place = self._seen.get(key)
        if place is not None:
            self._times[place] += 1
        elif len(self._races) < MAX_RACES:
            self._seen[key] = len(self._races)
            self._races.append(race)
            self._times.append(1)

    def remark(self, sentence: str, site: Site | None) -> None:
        """Note something legal that was probably not meant."""
        if len(self.remarks) < MAX_RACES:
            self.remarks.append((sentence, *_place(site)))

    def error(self) -> RaceError | None:
        """What the next synchronise must raise: races not raised yet; None in "record" mode."""
        fresh = self.races[self._reported :] if self._reported < len(self._races) else []
        self._reported = len(self._races)
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

    # -- plain sources

    def sum_sources(self, op: Op, note: Note) -> None:
        """Checksums of sources in host memory, unless work in flight is to write them first."""
        plan = op.target
        if op.is_call or not (hasattr(plan, "reads") and hasattr(plan, "writes")):
            if not op.is_timer:
                self._unknown.add(op.number)
            return
        sums = []
        for access in plan.reads:
            array = host_memory(access.owner)
            if array is None or (self._unknown and isinstance(access.owner, Buffer)):
                continue
            extent = _extent(array)
            if not any(
                extent[0] < e and s < extent[1]
                for ranges in self._host_writes.values()
                for s, e in ranges
            ):
                sums.append((access, _checksum(array)))
        # (of device memory too: a plain array may share it)
        writes = [(int(a.ranges[0, 0]), int(a.ranges[-1, 1])) for a in plan.writes if len(a.ranges)]
        if writes:
            self._host_writes[op.number] = writes
        if sums:
            note.checksums = sums
            self._summed[op.number] = note


def _party(record: Accessor, argument: str, writes: bool) -> Party:
    return Party(record.name, record.stream, *_place(record.site), argument, writes)


def _place(site: Site | None) -> tuple[str, int]:
    return ("", 0) if site is None else (site[0].co_filename, site[1])


def _rows(origin: Origin, shared: Ranges) -> tuple[tuple[int, int], ...]:
    """The rows of a buffer in which bytes lie, runs that meet joined; none where it has no rows."""
    rows: list[tuple[int, int]] = []
    if not origin.shape or not origin.row_bytes:
        return ()
    for start, end in sorted(shared):
        first = (start - origin.address) // origin.row_bytes
        last = -((origin.address - end) // origin.row_bytes)
        if rows and first <= rows[-1][1]:
            rows[-1] = (rows[-1][0], max(last, rows[-1][1]))
        elif len(rows) == MAX_ROWS:
            break
        else:
            rows.append((first, last))
    return tuple(rows)


def _meet(access: Access, extent: tuple[int, int]) -> bool:
    """Whether a source lies among these bytes, taken whole."""
    array = host_memory(access.owner)
    if array is None:
        return True
    start, end = _extent(array)
    return start < extent[1] and extent[0] < end


def _extent(array: npt.NDArray[Any]) -> tuple[int, int]:
    low, high = np.lib.array_utils.byte_bounds(array)
    return int(low), int(high)


def _checksum(array: npt.NDArray[Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)
