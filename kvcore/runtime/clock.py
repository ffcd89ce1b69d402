# SPDX-License-Identifier: Apache-2.0
"""The model clock: a discrete-event model of one device, apart from the real execution.

Operations move their bytes on the workers, in whatever real order; this module decides *when*
they would have happened.  Each launch makes a node with the host's time of its launch and the
nodes it must wait for (its stream's order and its events).  A node is *ready* at the latest of
these.  Ready nodes are served in the order of their ready times, ties by launch number: a node
starts when all of its resources are free, keeps each for that resource's own share (latency +
pieces * cost of a piece + bytes / bandwidth), and ends after the longest share.

Why the numbers do not depend on the real execution
---------------------------------------------------
A node may be served once no later launch can come before it in the order.  Later launches are
ready at the host's present time or after, so nodes that are ready by then may be served; a host
that synchronises gives up its place until the node it waits for has ended, so these may be
served too.  What a plan costs is known only after it ran; if the next node in the order has not
run yet, the host waits for it (really), and asks again.  Copies, ``compute`` and host functions
have a cost from the start, so a host function that is still running holds up nobody's clock.
An operation that is skipped behind a failure keeps the cost it had from the start, or has none.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvcore.runtime._marks import Waiter
from kvcore.runtime._storage import BufferCore, total_bytes
from kvcore.runtime.profile import COMPUTE, D2H, H2D, HBM, RESOURCES, DeviceProfile

if TYPE_CHECKING:
    from threading import RLock

    from kvcore.runtime._marks import Mark, Op
    from kvcore.runtime._queue import Queue
    from kvcore.runtime.trace import Trace

__all__ = ["ModelClock", "Node"]

#: The lane of nodes that stand for a record that others wait for before it is made.
PROMISE = -1

_SPACE_READ = {"device": HBM, "swapped": H2D}
_SPACE_WRITE = {"device": HBM, "swapped": D2H}


class Node:
    """One operation on the model's time line; all times in microseconds.

    shares: (resource, us) once the cost is known, None before.
    fixed:  us that hold no resource.
    end:    None until it was served.
    """

    __slots__ = (
        "bytes_moved",
        "children",
        "end",
        "fixed",
        "lane",
        "name",
        "number",
        "pending",
        "ready",
        "shares",
        "start",
        "waiters",
    )

    def __init__(self, number: int, lane: int, name: str, ready: float) -> None:
        self.number = number
        self.lane = lane
        self.name = name
        self.ready = ready
        self.pending = 0
        self.fixed = 0.0
        self.shares: tuple[tuple[int, float], ...] | None = None
        self.children: list[Node] | None = None
        self.waiters: list[Waiter] | None = None
        self.start = 0.0
        self.end: float | None = None
        self.bytes_moved = 0

    def __lt__(self, other: Node) -> bool:
        if self.ready != other.ready:
            return self.ready < other.ready
        return self.number < other.number

    # what Bell.wait asks of a thing to wait for: here, that the cost is known

    def add(self, waiter: Waiter) -> bool:
        """Tell the waiter when the cost is known; False when it is."""
        if self.waiters is None:
            self.waiters = []
        self.waiters.append(waiter)
        # The worker sets shares first and looks at the list after, so one of the two sees it.
        if self.shares is None:
            return True
        self.discard(waiter)
        return False

    def discard(self, waiter: Waiter) -> None:
        """Do not tell this waiter any more."""
        if self.waiters is not None and waiter in self.waiters:
            self.waiters.remove(waiter)


class _Lane:
    """The tail of one stream: what its next operation must wait for."""

    __slots__ = ("tail", "time")

    def __init__(self) -> None:
        self.tail: list[Node] = []
        self.time = 0.0


class Position:
    """The model's side of a mark: the nodes before it, and a time it is not before."""

    __slots__ = ("nodes", "time")

    def __init__(self, nodes: list[Node], time: float) -> None:
        self.nodes = nodes
        self.time = time

    def settled(self) -> bool:
        """True when all nodes have ended; the time is then final."""
        if self.nodes:
            left = []
            for node in self.nodes:
                if node.end is None:
                    left.append(node)
                elif node.end > self.time:
                    self.time = node.end
            self.nodes = left
        return not self.nodes


class ModelClock:
    """The time of one device's model; guarded by the device's lock."""

    def __init__(self, profile: DeviceProfile, lock: RLock, trace: Trace | None) -> None:
        self.profile = profile
        self.host = 0.0
        self.free_launches = False
        self.calls_under_way = 0
        self._lock = lock
        self._trace = trace
        self._service = profile.service
        self._launch_cost = profile.value("launch_cost")
        self._event_cost = profile.value("event_cost")
        self._query_cost = profile.value("query_cost")
        self._call_time = profile.value("call_time")
        self._host_us_a_byte = 1e-3 / profile.value("host_copy_bandwidth")
        self._served_to = 0.0
        self._free_at = [0.0] * len(RESOURCES)
        self.busy = [0.0] * len(RESOURCES)
        self.link_bytes = [0.0] * len(RESOURCES)
        self._heap: list[Node] = []
        self._lanes: dict[int, _Lane] = {}

    # -- the host's side; the device's lock is held

    def charge(self, us: float) -> None:
        """Advance the host's time line."""
        if not self.free_launches:
            self.host += us

    def launched(self, queue: Queue, op: Op) -> Node:
        """A node for an operation that is being launched."""
        self.charge(self._launch_cost)
        lane = self._lanes.get(queue.index)
        if lane is None:
            lane = self._lanes[queue.index] = _Lane()
        # (served_to is ahead of the host only while another task is in the middle of `reach`)
        node = Node(op.number, queue.index, "", max(self.host, lane.time, self._served_to))
        target = op.target
        if op.is_work:
            demands = getattr(target, "demands", None)
            if demands is not None:
                node.fixed = target.host_bytes * self._host_us_a_byte
                node.bytes_moved = target.bytes_moved
                node.shares = self._shares(demands)
        elif op.is_timer:
            node.shares = ((COMPUTE, op.us),)
        else:
            node.fixed = self._call_time
            node.shares = ()
            self.calls_under_way += 1
        if self._trace is not None:
            node.name = op.name
        self._after(node, lane.tail)
        lane.tail = [node]
        if not node.pending:
            heapq.heappush(self._heap, node)
        self._serve_until(self.host)
        return node

    def _after(self, node: Node, before: Iterable[Node]) -> None:
        for earlier in before:
            if earlier.end is None:
                node.pending += 1
                if earlier.children is None:
                    earlier.children = []
                earlier.children.append(node)
            elif earlier.end > node.ready:
                node.ready = earlier.end

    def marked(self, queue: Queue) -> Position:
        """The position of a record that is being launched."""
        lane = self._lanes.get(queue.index)
        if lane is None:
            return Position([], self.host)
        return Position(list(lane.tail), max(lane.time, self.host))

    def waited(self, queue: Queue, position: Position) -> None:
        """What is launched on the queue from here on comes after the position."""
        lane = self._lanes.get(queue.index)
        if lane is None:
            lane = self._lanes[queue.index] = _Lane()
        position.settled()
        lane.time = max(lane.time, position.time)
        lane.tail = [node for node in lane.tail if node.end is None or node.end > lane.time]
        lane.tail += [node for node in position.nodes if node not in lane.tail]

    def promise(self) -> Position:
        """The position of a record that has yet to be made."""
        gate = Node(-1, PROMISE, "", 0.0)
        gate.shares = ()
        gate.pending = 1
        return Position([gate], 0.0)

    def kept(self, queue: Queue | None, position: Position) -> None:
        """The record of a promise is being launched, or (None) will never be."""
        gate = position.nodes[0]
        lane = None if queue is None else self._lanes.get(queue.index)
        gate.ready = max(self.host, self._served_to, 0.0 if lane is None else lane.time)
        if lane is not None:
            self._after(gate, lane.tail)
        gate.pending -= 1
        if not gate.pending:
            heapq.heappush(self._heap, gate)
        self._serve_until(self.host)

    def event_call(self) -> None:
        """The host calls record or wait."""
        self.charge(self._event_cost)

    # -- the workers' side

    def ran(self, node: Node, op: Op) -> None:
        """A plan has run: now its cost is known."""
        if op.is_call:
            self.calls_under_way -= 1
        if node.shares is None:
            plan = op.target
            if hasattr(plan, "touched"):
                shares = self._shares(self._demands(plan))
            else:
                shares = self._shares([(COMPUTE, 0, 0)])
            node.bytes_moved = getattr(plan, "bytes_moved", 0)
            self._known(node, shares)

    def skipped(self, node: Node, op: Op) -> None:
        """An operation will not run; what had no cost yet has none."""
        if op.is_call:
            self.calls_under_way -= 1
        if node.shares is None:
            self._known(node, ())

    def _known(self, node: Node, shares: tuple[tuple[int, float], ...]) -> None:
        node.shares = shares
        waiters = node.waiters
        if waiters is not None:
            for waiter in list(waiters):
                waiter.notify()

    def _demands(self, plan: Any) -> list[tuple[int, float, int]]:
        reads, writes = plan.touched()
        sums: dict[int, int] = {COMPUTE: 0}
        for accesses, spaces in ((reads, _SPACE_READ), (writes, _SPACE_WRITE)):
            for access in accesses:
                owner = access.owner
                if isinstance(owner, BufferCore):
                    resource = spaces.get(owner.storage.space)
                    if resource is not None:
                        sums[resource] = sums.get(resource, 0) + total_bytes(access.ranges)
        pieces = int(plan.num_descriptors)
        return [(resource, nbytes, pieces) for resource, nbytes in sums.items()]

    def _shares(self, demands: Iterable[tuple[int, float, int]]) -> tuple[tuple[int, float], ...]:
        shares = []
        for resource, nbytes, pieces in demands:
            latency, piece, byte = self._service[resource]
            shares.append((resource, latency + pieces * piece + nbytes * byte))
            self.link_bytes[resource] += nbytes
        return tuple(shares)

    # -- the model; the device's lock is held

    def _serve_until(self, time: float) -> Node | None:
        """Serve what is ready by then; the node whose cost is missing, or None."""
        heap = self._heap
        while heap and heap[0].ready <= time:
            if heap[0].shares is None:
                return heap[0]
            self._serve(heapq.heappop(heap))
        return None

    def _serve(self, node: Node) -> None:
        self._served_to = start = node.ready
        free_at = self._free_at
        shares = node.shares or ()
        for resource, _ in shares:
            if free_at[resource] > start:
                start = free_at[resource]
        longest = node.fixed
        for resource, share in shares:
            free_at[resource] = start + share
            self.busy[resource] += share
            if share > longest:
                longest = share
        node.start = start
        node.end = end = start + longest
        if self._trace is not None and node.lane != PROMISE:
            self._trace.modelled(node)
        children = node.children
        if children is not None:
            node.children = None
            for child in children:
                if end > child.ready:
                    child.ready = end
                child.pending -= 1
                if not child.pending:
                    heapq.heappush(self._heap, child)

    def reach(self, position: Position) -> Node | None:
        """Serve in order until the position is settled and bring the host there.

        None when done; otherwise the node whose cost must be waited for first.
        """
        with self._lock:
            while not position.settled():
                if self._heap[0].shares is None:
                    return self._heap[0]
                self._serve(heapq.heappop(self._heap))
            if position.time > self.host:
                self.host = position.time
            self._serve_until(self.host)
            return None

    def look(self, position: Position, *, charge: bool) -> tuple[bool, Node | None]:
        """Whether the host, asking now, finds the position reached.

        The second value is a node whose cost must be waited for before that can be said.
        """
        with self._lock:
            if charge:
                self.charge(self._query_cost)
            blocked = self._serve_until(self.host)
            if position.settled():
                return position.time <= self.host, None
            return False, blocked

    def time_of(self, mark: Mark) -> float | None:
        """Microseconds of a mark the host may know of, or None."""
        position: Position = mark.position
        with self._lock:
            self._serve_until(self.host)
            if position.settled() and position.time <= self.host:
                return position.time
            return None
