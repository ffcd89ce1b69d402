# SPDX-License-Identifier: Apache-2.0
"""What happened when, for a trace viewer (Perfetto, chrome://tracing) and as numbers.

Times are those of the device's clock: measured on the wall clock, computed on the model clock.
Kept in rings of ``max_events`` entries; what fell out at the old end is counted, not forgotten
in silence.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcore.files import whole_file
from kvcore.runtime._storage import BufferCore, total_bytes
from kvcore.runtime.profile import D2H, H2D, RESOURCES

if TYPE_CHECKING:
    from kvcore.files import whole_file
    from kvcore.runtime.model._clock import Node
    from kvcore.runtime.queues._marks import Mark, Op
    from kvcore.runtime.queues._queue import Queue
from kvcore.runtime._storage import Ledger

__all__ = ["Span", "StreamUse", "Summary", "Trace"]


class Span(NamedTuple):
    """One operation: microseconds since the device was opened, and payload bytes."""

    stream: int
    name: str
    start: float
    end: float
    bytes_moved: int
    number: int


class StreamUse(NamedTuple):
    """One stream of a summary, times in microseconds.

    busy:    time with an operation of this stream under way.
    overlap: the part of it with an operation of another stream under way too.
    """

    name: str
    operations: int
    busy: float
    overlap: float
    bytes_moved: int


class Summary(NamedTuple):
    """Microseconds of a trace as a whole.

    ``elapsed``: from the first start to the last end; ``busy``: with anything under way;
    ``overlap``: with two streams or more under way.
    """

    elapsed: float
    busy: float
    overlap: float
    streams: tuple[StreamUse, ...]
    dropped_events: int


class Trace:
    """The record of one device; made by ``Device(trace=True)`` or ``max_events=``."""

    def __init__(
        self,
        max_events: int,
        now: Callable[[], float],
        origin: float,
        modelled: bool,
        ledgers: Mapping[str, Ledger],
    ) -> None:
        self.max_events = max_events
        self.names: dict[int, str] = {}
        self.seen: int = 0
        self._spans: deque[Span] = deque(maxlen=max_events)
        self._flows: deque[tuple[Mark, int, float]] = deque(maxlen=max_events)
        self._memory: deque[tuple[float, str, int]] = deque(maxlen=max_events)
        self._links: deque[tuple[int, float, float, int]] = deque(maxlen=max_events)
        self._memory_seen = 0
        self._links_seen = 0
        self._flows_seen = 0
        self._ledgers = ledgers
        self._used = dict.fromkeys(ledgers, 0)
        self._now = now
        self._origin = origin
        self._modelled = modelled

    @property
    def spans(self) -> tuple[Span, ...]:
        """All operations kept, by the time they were over."""
        return tuple(self._spans)

    @property
    def dropped_events(self) -> int:
        """Entries that fell out at the old end."""
        kept = len(self._spans) + len(self._flows) + len(self._memory) + len(self._links)
        return self.seen + self._flows_seen + self._memory_seen + self._links_seen - kept

    # -- called by the device, which holds its lock

    def opened(self, origin: float) -> None:
        """Times count from here on: seconds of ``time.monotonic``."""
        self._origin = origin

    def ran(self, queue: Queue, op: Op) -> None:
        """An operation on the wall clock."""
        nbytes = getattr(op.target, "bytes_moved", 0) if op.is_work else 0
        start = (op.started - self._origin) * 1e6
        end = (op.ended - self._origin) * 1e6
        self.seen += 1
        self._spans.append(Span(queue.index, op.name, start, end, int(nbytes), op.number))
        if op.is_work:
            for link, over in zip((H2D, D2H), _over_links(op.target), strict=True):
                if over:
                    self.link(link, start, end, over)
        self.look_at_memory()

    def modelled(self, node: Node) -> None:
        """An operation on the model clock."""
        self.seen += 1
        self.look_at_memory()
        self._spans.append(
            Span(node.lane, node.name, node.start, node.end, node.bytes_moved, node.number)
        )

    def link(self, resource: int, start: float, end: float, nbytes: int) -> None:
        """Bytes went over a link in this time."""
        self._links_seen += 1
        self._links.append((resource, start, end, nbytes))

    def waited(self, queue: Queue, mark: Mark) -> None:
        """A stream waits for a mark of another: an arrow."""
        self._flows_seen += 1
        self._flows.append((mark, queue.index, self._now()))

    def look_at_memory(self) -> None:
        """Note what is used of each space, where that has changed.

        Memory may go back with a last reference, when nothing can be called; so it is also
        looked at whenever an operation is over.
        """
        for space, ledger in self._ledgers.items():
            if ledger.used != self._used[space]:
                self._used[space] = used = ledger.used
                self._memory_seen += 1
                self._memory.append((self._now(), space, used))

    # -- what the user asks

    def save(self, path: str | Path) -> None:
        """Write Chrome trace JSON: a row a stream, arrows for events, counters.

        Counters: bytes used of each memory space, and MB/s over each link and direction.
        The file is there whole or not at all.  Raises OSError that names it.
        """
        self.look_at_memory()
        with whole_file(path) as file:
            json.dump({"displayTimeUnit": "ms", "traceEvents": list(self._events())}, file)

    def _events(self) -> Iterator[dict[str, Any]]:
        yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "kvcore device"}}
        for index, name in self.names.items():
            yield {
                "ph": "M",
                "pid": 0,
                "tid": index,
                "name": "thread_name",
                "args": {"name": name},
            }
            yield {
                "ph": "M",
                "pid": 0,
                "tid": index,
                "name": "thread_sort_index",
                "args": {"sort_index": index},
            }
        for span in self._spans:
            yield {
                "ph": "X",
                "pid": 0,
                "tid": span.stream,
                "name": span.name,
                "cat": "operation",
                "ts": span.start,
                "dur": span.end - span.start,
                "args": {"bytes": span.bytes_moved, "launch": span.number},
            }
        yield from self._arrows()
        for time, space, used in self._memory:
            yield {
                "ph": "C",
                "pid": 0,
                "name": f"{space} memory",
                "ts": time,
                "args": {"bytes": used},
            }
        yield from self._rates()

    def _arrows(self) -> Iterator[dict[str, Any]]:
        for number, (mark, to, launched) in enumerate(self._flows):
            if mark.pending or mark.queue is None:
                continue
            if self._modelled:
                position = mark.position
                if position is None or not position.settled():
                    continue
                time = position.time
            else:
                time = (mark.time - self._origin) * 1e6
            common = {"pid": 0, "name": "event", "cat": "event", "id": number}
            yield {"ph": "s", "tid": mark.queue.index, "ts": time, **common}
            yield {"ph": "f", "bp": "e", "tid": to, "ts": max(time, launched), **common}

    def _rates(self) -> Iterator[dict[str, Any]]:
        """The use of each link: bytes a microsecond (MB/s), where it changes."""
        for resource in (H2D, D2H):
            steps: dict[float, list[float]] = {}
            for link, start, end, nbytes in self._links:
                if link == resource and end > start and nbytes:
                    rate = nbytes / (end - start)
                    steps.setdefault(start, []).append(rate)
                    steps.setdefault(end, []).append(-rate)
            under_way: list[float] = []
            for time in sorted(steps):
                # Summed anew each time: what is left of rates that were added and taken away
                # again would be a use of its own.
                for rate in steps[time]:
                    if rate > 0:
                        under_way.append(rate)
                    else:
                        under_way.remove(-rate)
                yield {
                    "ph": "C",
                    "pid": 0,
                    "name": f"link {RESOURCES[resource]}",
                    "ts": time,
                    "args": {"MB/s": sum(under_way)},
                }

    def summary(self) -> Summary:
        """Busy time and overlap, in all and per stream."""
        steps: list[tuple[float, int, int]] = []
        counts: dict[int, list[int]] = {index: [0, 0] for index in self.names}
        for span in self._spans:
            entry = counts.setdefault(span.stream, [0, 0])
            entry[0] += 1
            entry[1] += span.bytes_moved
            if span.end > span.start:
                steps += [(span.start, 1, span.stream), (span.end, -1, span.stream)]
        steps.sort()
        busy = dict.fromkeys(counts, 0.0)
        overlap = dict.fromkeys(counts, 0.0)
        all_busy = all_overlap = 0.0
        active: dict[int, int] = {}
        last = steps[0][0] if steps else 0.0
        for time, step, stream in steps:
            passed = time - last
            last = time
            if passed and active:
                all_busy += passed
                if len(active) > 1:
                    all_overlap += passed
                for index in active:
                    busy[index] += passed
                    if len(active) > 1:
                        overlap[index] += passed
            left = active.get(stream, 0) + step
            if left:
                active[stream] = left
            else:
                active.pop(stream, None)
        elapsed = steps[-1][0] - steps[0][0] if steps else 0.0
        streams = tuple(
            StreamUse(self.names.get(i, str(i)), n, busy[i], overlap[i], nbytes)
            for i, (n, nbytes) in sorted(counts.items())
            if n
        )
        return Summary(elapsed, all_busy, all_overlap, streams, self.dropped_events)


def _over_links(plan: Any) -> tuple[int, int]:
    """Bytes that the plan's last run carried to the device and from it."""
    known = getattr(plan, "h2d_bytes", None)
    if known is not None:
        return known, plan.d2h_bytes
    # Accesses may be dear to make: only for plans that have something in swapped memory.
    owners = getattr(plan, "arrays", None)
    if not isinstance(owners, tuple):
        accesses = (*getattr(plan, "reads", ()), *getattr(plan, "writes", ()))
        owners = tuple(access.owner for access in accesses)
    if not any(_swapped(owner) for owner in owners) or not hasattr(plan, "touched"):
        return 0, 0
    reads, writes = plan.touched()
    return tuple(
        sum(total_bytes(access.ranges) for access in accesses if _swapped(access.owner))
        for accesses in (reads, writes)
    )  # type: ignore[return-value]


def _swapped(owner: object) -> bool:
    return isinstance(owner, BufferCore) and owner.storage.space == "swapped"
