# SPDX-License-Identifier: Apache-2.0
"""What a device and its streams are doing, in numbers: for looking at, not for deciding by.

Taken while other threads go on, so that each number was true at some moment of the call and two
of them need not be of the same moment.  Asking costs the model's host no time, waits for nothing,
and may be done anywhere: inside a capture, in a host function, before and after the block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcore.runtime.core import Core
    from kvcore.runtime.memory import MemoryInfo
    from kvcore.runtime.queues._queue import Queue

__all__ = ["DeviceStatistics", "StreamStatistics", "of_device", "of_stream"]


@dataclass(frozen=True, slots=True)
class StreamStatistics:
    """One stream.  Operations are plans, copies, fills, host functions and ``compute``.

    name:      the stream's.
    queued:    operations that were launched and that no worker has come to.
    running:   operations that run, or that an NPU was given and is not known to have done.
    done:      operations that are over, failed ones included; those that were skipped behind a
               failure, or dropped with the device, never count.
    waiting:   True while the stream waits for another's event, or for a host function of its own.
    failed:    True from a failure until it was reported to a host.
    capturing: True while launches are recorded into a graph.
    """

    name: str
    queued: int
    running: int
    done: int
    waiting: bool
    failed: bool
    capturing: bool


@dataclass(frozen=True, slots=True)
class DeviceStatistics:
    """A device and all of its streams.

    streams:         in the order they were made, hidden ones of graphs with forks included.
    queued, running, done: sums over the streams.
    memory:          by space ("device", "host", "swapped"); see ``MemoryInfo``.
    tasks_waiting:   tasks, of all event loops, that await the device now.
    external_events: external events that streams wait for and that are not recorded.
    captures:        graphs whose blocks are open.
    unseen_failures: failures not reported to any host yet; leaving the device raises them.
    races:           races found so far; 0 without a race check.
    """

    streams: tuple[StreamStatistics, ...]
    queued: int
    running: int
    done: int
    memory: Mapping[str, MemoryInfo]
    tasks_waiting: int
    external_events: int
    captures: int
    unseen_failures: int
    races: int


def of_stream(queue: Queue) -> StreamStatistics:
    """The numbers of one stream."""
    lane = queue.lane
    in_flight = 0 if lane is None else lane.num_in_flight
    return StreamStatistics(
        name=queue.name,
        queued=queue.num_queued,
        running=queue.num_running + in_flight,
        done=max(0, queue.num_over - in_flight),
        waiting=queue.waits,
        failed=queue.failure is not None,
        capturing=queue.capture is not None,
    )


def of_device(core: Core) -> DeviceStatistics:
    """The numbers of a device."""
    streams = tuple([of_stream(queue) for queue in list(core.queues)])
    return DeviceStatistics(
        streams=streams,
        queued=sum(stream.queued for stream in streams),
        running=sum(stream.running for stream in streams),
        done=sum(stream.done for stream in streams),
        memory={space: core.memory(space) for space in core.ledgers},
        tasks_waiting=core.waiting.num_waiting,
        external_events=len(core.promises),
        captures=len(core.captures),
        unseen_failures=len(core.executor.failures),
        races=0 if core.race is None else len(core.race.races),
    )
