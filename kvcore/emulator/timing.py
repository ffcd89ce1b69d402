# SPDX-License-Identifier: Apache-2.0
"""Model time: when a device of a profile would have done what the machine was asked to do.

The journal's entries come in the order of the calls (_races), so times do not depend on how fast
this computer is, nor on which task ran first.  A task costs its bytes: those of the device over its
memory, those of the host over the link, each with the resource's latency and its cost a contiguous
piece, as in the runtime's model clock.  The links serve one task at a time in the order of the
launches; streams do not slow each other otherwise.  A replay's nodes run one after the other.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from kvcore.runtime.profile import D2H, H2D, HBM, DeviceProfile
from kvcore.runtime.watching.trace import Trace

__all__ = ["Timing"]

#: Tasks that a trace keeps; older ones fall out.
MAX_EVENTS = 1 << 17

_COPIES = "aclrtMemcpy"
_RECORDS = "aclrtRecordEvent"


class _Span(NamedTuple):
    """A task, as the trace wants it: microseconds since the machine began."""

    lane: int
    name: str
    start: float
    end: float
    bytes_moved: int
    number: int


class Timing:
    """The times of one process, in microseconds since the machine began.

    profile:      the device's figures.
    first, end:   addresses of device memory; all others are the host's.
    place:        called with a lane: the name of its stream.
    """

    def __init__(
        self, profile: DeviceProfile, first: int, end: int, place: Callable[[int], str]
    ) -> None:
        self.host: float = 0.0
        self.trace: Trace = Trace(MAX_EVENTS, lambda: self.host, 0.0, modelled=True, ledgers={})
        self._streams: defaultdict[int, float] = defaultdict(float)
        self._marks: dict[int, float] = {}
        self._free: dict[int, float] = {H2D: 0.0, D2H: 0.0}
        self._profile = profile
        self._launch: float = profile.value("launch_cost")
        self._event: float = profile.value("event_cost")
        self._first, self._end = first, end
        self._place = place

    # -- called by the reader of the journal, in the order of the calls

    def task(
        self,
        lane: int,
        name: str,
        reads: array[int] | None,
        writes: array[int] | None,
        number: int,
        of_graph: bool,
    ) -> None:
        """A task of a stream; its bytes as pairs of addresses."""
        if not of_graph:
            self.host += self._launch
        start = max(self._streams[lane], self.host)
        work, moved = self._work(name, reads, writes)
        for resource in (H2D, D2H):
            if work.get(resource):
                start = max(start, self._free[resource])
        end = start + sum(work.values())
        for resource in (H2D, D2H):
            if work.get(resource):
                self._free[resource] = end
                self.trace.link(resource, start, end, moved)
        self._streams[lane] = end
        if lane not in self.trace.names:
            self.trace.names[lane] = self._place(lane)
        self.trace.modelled(_Span(lane, name, start, end, moved, number))  # type: ignore[arg-type]

    def replayed(self) -> None:
        """A replay is launched: its nodes follow."""
        self.host += self._launch

    def waits(self, name: str, reads: array[int] | None, writes: array[int] | None) -> None:
        """A synchronous copy: the host waits for it."""
        if name.startswith(_COPIES):
            self.host += sum(self._work(name, reads, writes)[0].values())

    def mark(self, lane: int, mark: int, name: str) -> None:
        """The end of a stream, as it is now."""
        if name.startswith(_RECORDS):
            self.host += self._event
        self._marks[mark] = max(self._streams[lane], self.host)

    def wait(self, lane: int, mark: int) -> None:
        """The stream waits for a mark."""
        self.host += self._event
        self._streams[lane] = max(self._streams[lane], self._marks.get(mark, 0.0))

    def join(self, mark: int) -> None:
        """The host has waited for a mark."""
        self.host = max(self.host, self._marks.get(mark, 0.0))

    def drop(self, mark: int) -> None:
        """Nobody can ask for the mark any more."""
        self._marks.pop(mark, None)

    # -- asked by the program

    def at(self, mark: int) -> float | None:
        """When a mark was reached; None: its entry has not been read."""
        return self._marks.get(mark)

    # -- what it costs

    def _work(
        self, name: str, reads: array[int] | None, writes: array[int] | None
    ) -> tuple[dict[int, float], int]:
        """Microseconds of each resource, and the bytes that move."""
        read, written = self._bytes(reads), self._bytes(writes)
        share = 1.0
        if name.startswith(_COPIES) and not (read.device and written.device):
            # Of pageable memory the journal knows nothing: the device's side says how much it is.
            if not (read.host or written.host):
                share = self._profile.value("pageable_share")
            resource, side = (H2D, written) if written.device else (D2H, read)
            if not side.device:
                return {}, 0
            return {resource: self._cost(resource, side.pieces, side.device / share)}, side.device
        found = {}
        device = read.device + written.device
        if device:
            found[HBM] = self._cost(HBM, read.pieces + written.pieces, device)
        for resource, side in ((H2D, read), (D2H, written)):
            if side.host:
                found[resource] = self._cost(resource, side.host_pieces, side.host)
        return found, device + read.host + written.host

    def _cost(self, resource: int, pieces: int, size: float) -> float:
        latency, piece, byte = self._profile.service[resource]
        return latency + piece * pieces + byte * size

    def _bytes(self, pairs: array[int] | None) -> _Side:
        device = host = pieces = host_pieces = 0
        for start, end in zip(pairs[::2], pairs[1::2], strict=True) if pairs else ():
            if self._first <= start < self._end:
                device += end - start
                pieces += 1
            else:
                host += end - start
                host_pieces += 1
        return _Side(device, host, pieces, host_pieces)


class _Side(NamedTuple):
    """Bytes and contiguous pieces that a task reads, or writes."""

    device: int
    host: int
    pieces: int
    host_pieces: int
