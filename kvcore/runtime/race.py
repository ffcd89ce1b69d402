# SPDX-License-Identifier: Apache-2.0
"""The race check: what it reports.  ``_order`` has the clocks, ``_watch`` the accesses."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvcore.errors import RaceError
from kvcore.runtime._shadow import HIT_WRITE
from kvcore.runtime._watch import Record, Watch

if TYPE_CHECKING:
    from kvcore.runtime._marks import Op
    from kvcore.runtime._observe import _Site as Site
    from kvcore.runtime._order import Note, Stamp
    from kvcore.runtime._queue import Queue

__all__ = ["Party", "Race", "RaceCheck"]

MAX_RACES = 1000


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


class RaceCheck(Watch):
    """Watches one device.  Everything is called with the device's lock held.

    races:   what was found, at most MAX_RACES; the same pair of places is reported once.
    remarks: things that are legal and probably not meant, as (sentence, file, line).
    """

    def __init__(self, *, raising: bool, check_host: bool) -> None:
        self.raising = raising
        self.check_host = check_host
        self.races: list[Race] = []
        self.remarks: list[tuple[str, str, int]] = []
        self._reported = 0
        self._seen: set[tuple[object, ...]] = set()
        self._plain_writes: dict[int, list[tuple[int, int]]] = {}

    def host_joined(self, stamp: Stamp) -> None:
        """The host has waited for a record."""
        if self.joined(stamp) and self.records:
            # Whatever comes is launched by this host, so it is ordered after all there was.
            self.forget()

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

    def over(self, op: Op) -> None:
        """An operation has run, failed or been skipped: its plain targets are free."""
        self._plain_writes.pop(op.number, None)

    def found(
        self,
        hits: Sequence[tuple[int, int, int, int]],
        record: Record,
        argument: str,
        write: bool,
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
            start, end = shared[0]
            race = Race(
                kind,
                _party(one, one_argument, one_writes),
                _party(two, two_argument, two_writes),
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

    # -- plain sources

    def sum_sources(self, op: Op, note: Note) -> None:
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
        # (of buffers and tensors too: a plain array may share their memory)
        writes = [(int(a.ranges[0, 0]), int(a.ranges[-1, 1])) for a in plan.writes if len(a.ranges)]
        if writes:
            self._plain_writes[op.number] = writes
        note.checksums = sums or None


def _party(record: Record, argument: str, writes: bool) -> Party:
    return Party(record.name, record.stream, *_place(record.site), argument, writes)


def _place(site: Site | None) -> tuple[str, int]:
    return ("", 0) if site is None else (site[0].co_filename, site[1])


def _extent(array: npt.NDArray[Any]) -> tuple[int, int]:
    low, high = np.lib.array_utils.byte_bounds(array)
    return int(low), int(high)


def _checksum(array: npt.NDArray[Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)
