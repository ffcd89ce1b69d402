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
have a cost from the start, so a host function that is still running holds up no clock.
An operation that is skipped behind a failure keeps the cost it had from the start, or has none.
"""

cimport cython
from libc.stdint cimport int64_t

from kvcore.runtime.queues._marks cimport CALL, TIMER, WORK, Mark, Op
from kvcore.runtime._storage cimport BufferCore, total_bytes

import heapq

from kvcore.runtime.profile import COMPUTE, D2H, H2D, HBM

cdef object heappush = heapq.heappush
cdef object heappop = heapq.heappop
cdef int _COMPUTE = COMPUTE
cdef int _H2D = H2D
cdef int _D2H = D2H
#: The lane of nodes that stand for a record that others wait for before it is made.
cdef int PROMISE = -1
cdef dict SPACE_READ = {"device": HBM, "swapped": H2D}
cdef dict SPACE_WRITE = {"device": HBM, "swapped": D2H}


@cython.final
@cython.freelist(256)
cdef class Node:
    """One operation on the model's time line; all times in microseconds.

    shares: (resource, us) once the cost is known, None before.
    fixed:  us that hold no resource.
    ended:  whether it was served.
    h2d_bytes, d2h_bytes: what it carries over the links, for the trace.
    """

    cdef readonly int64_t number
    cdef readonly int lane
    cdef readonly str name
    cdef readonly double ready, start, end, fixed
    cdef readonly bint ended
    cdef int pending
    cdef readonly tuple shares
    cdef list children
    cdef list waiters
    cdef readonly int64_t bytes_moved, h2d_bytes, d2h_bytes

    def __cinit__(self, int64_t number, int lane, str name, double ready):
        self.number = number
        self.lane = lane
        self.name = name
        self.ready = ready

    def __lt__(self, Node other):
        if self.ready != other.ready:
            return self.ready < other.ready
        return self.number < other.number

    # what Bell.wait asks of a thing to wait for: here, that the cost is known

    def add(self, waiter):
        """Tell the waiter when the cost is known; False when it is."""
        if self.waiters is None:
            self.waiters = []
        self.waiters.append(waiter)
        # The worker sets shares first and looks at the list after, so one of the two sees it.
        if self.shares is None:
            return True
        self.discard(waiter)
        return False

    def discard(self, waiter):
        """Take the waiter off the list: it is not rung when the node has ended."""
        if self.waiters is not None and waiter in self.waiters:
            self.waiters.remove(waiter)


@cython.final
cdef class StreamTail:
    """The tail of one stream: what its next operation must wait for."""

    cdef list tail
    cdef double time

    def __cinit__(self):
        self.tail = []


@cython.final
@cython.freelist(64)
cdef class Position:
    """The model's side of a mark: the nodes before it, and a time it is not before."""

    cdef readonly list nodes
    cdef readonly double time

    def __cinit__(self, list nodes, double time):
        self.nodes = nodes
        self.time = time

    cpdef bint settled(self) except -1:
        """True when all nodes have ended; the time is then final."""
        cdef Node node
        cdef list left
        if self.nodes:
            left = []
            for node in self.nodes:
                if not node.ended:
                    left.append(node)
                elif node.end > self.time:
                    self.time = node.end
            self.nodes = left
            return not left
        return True


@cython.final
cdef class ModelClock:
    """The time of one device's model; guarded by the device's lock.

    host: the host's time line.  busy: us each resource has served.
    """

    cdef readonly object profile
    cdef readonly double host
    cdef public bint free_launches
    cdef readonly int calls_under_way
    cdef readonly list busy
    cdef readonly list heap
    cdef object lock, trace
    cdef list service, free_at
    cdef double launch_cost, event_cost, query_cost, call_time, host_us_a_byte, served_to
    cdef dict lanes

    def __init__(self, profile, lock, trace):
        self.profile = profile
        self.lock = lock
        self.trace = trace
        self.service = list(profile.service)
        self.launch_cost = profile.value("launch_cost")
        self.event_cost = profile.value("event_cost")
        self.query_cost = profile.value("query_cost")
        self.call_time = profile.value("call_time")
        self.host_us_a_byte = 1e-3 / profile.value("host_copy_bandwidth")
        self.free_at = [0.0] * len(self.service)
        self.busy = [0.0] * len(self.service)
        self.heap = []
        self.lanes = {}

    # -- the host's side; the device's lock is held

    cpdef charge(self, double us):
        """Advance the host's time line."""
        if not self.free_launches:
            self.host += us

    cdef StreamTail lane(self, int index):
        cdef StreamTail lane = self.lanes.get(index)
        if lane is None:
            lane = self.lanes[index] = StreamTail()
        return lane

    def launched(self, queue, Op op):
        """A node for an operation that is being launched."""
        cdef StreamTail lane
        cdef Node node
        cdef int index = queue.index
        self.charge(self.launch_cost)
        lane = self.lane(index)
        # (served_to is ahead of the host only while another task is in the middle of `reach`)
        node = Node(op.number, index, None, max(self.host, lane.time, self.served_to))
        if op.kind == WORK:
            demands = getattr(op.target, "demands", None)
            if demands is not None:
                node.fixed = <double>op.target.host_bytes * self.host_us_a_byte
                node.bytes_moved = op.target.bytes_moved
                node.h2d_bytes = getattr(op.target, "h2d_bytes", 0)
                node.d2h_bytes = getattr(op.target, "d2h_bytes", 0)
                node.shares = self.shares(demands)
        elif op.kind == TIMER:
            node.shares = ((_COMPUTE, op.us),)
        else:
            node.fixed = self.call_time
            node.shares = ()
            self.calls_under_way += 1
        if self.trace is not None:
            node.name = op.name
        self.after(node, lane.tail)
        lane.tail = [node]
        if not node.pending:
            heappush(self.heap, node)
        self.serve_until(self.host)
        return node

    cdef int after(self, Node node, list before) except -1:
        cdef Node earlier
        for earlier in before:
            if not earlier.ended:
                node.pending += 1
                if earlier.children is None:
                    earlier.children = []
                earlier.children.append(node)
            elif earlier.end > node.ready:
                node.ready = earlier.end
        return 0

    def marked(self, queue):
        """The position of a record that is being launched."""
        cdef StreamTail lane = self.lanes.get(queue.index)
        if lane is None:
            return Position([], self.host)
        return Position(lane.tail[:], max(lane.time, self.host))

    def waited(self, queue, Position position):
        """What is launched on the queue from here on comes after the position."""
        cdef StreamTail lane = self.lane(queue.index)
        cdef Node node
        cdef list tail = []
        position.settled()
        lane.time = max(lane.time, position.time)
        for node in lane.tail:
            if not node.ended or node.end > lane.time:
                tail.append(node)
        for node in position.nodes:
            if node not in tail:
                tail.append(node)
        lane.tail = tail

    def promise(self):
        """The position of a record that has yet to be made."""
        cdef Node gate = Node(-1, PROMISE, None, 0.0)
        gate.shares = ()
        gate.pending = 1
        return Position([gate], 0.0)

    def kept(self, queue, Position position):
        """The record of a promise is being launched, or (None) will never be."""
        cdef Node gate = position.nodes[0]
        cdef StreamTail lane = None if queue is None else self.lanes.get(queue.index)
        gate.ready = max(self.host, self.served_to)
        if lane is not None:
            gate.ready = max(gate.ready, lane.time)
            self.after(gate, lane.tail)
        gate.pending -= 1
        if not gate.pending:
            heappush(self.heap, gate)
        self.serve_until(self.host)

    def event_call(self):
        """The host calls record or wait."""
        self.charge(self.event_cost)

    # -- the workers' side

    def ran(self, Node node, Op op):
        """A plan has run: now its cost is known."""
        cdef tuple shares
        if op.kind == CALL:
            self.calls_under_way -= 1
        if node.shares is None:
            touched = op.touched()
            if touched is not None:
                demands = self.demands(op.target, touched)
                for resource, nbytes, _pieces in demands:
                    if resource == _H2D:
                        node.h2d_bytes = nbytes
                    elif resource == _D2H:
                        node.d2h_bytes = nbytes
                shares = self.shares(demands)
            else:
                shares = self.shares([(COMPUTE, 0, 0)])
            node.bytes_moved = getattr(op.target, "bytes_moved", 0)
            self.known(node, shares)

    def skipped(self, Node node, Op op):
        """An operation will not run; what had no cost yet has none."""
        if op.kind == CALL:
            self.calls_under_way -= 1
        if node.shares is None:
            self.known(node, ())

    cdef int known(self, Node node, tuple shares) except -1:
        node.shares = shares
        if node.waiters is not None:
            for waiter in list(node.waiters):
                waiter.notify()
        return 0

    cdef list demands(self, plan, touched):
        cdef dict sums = {COMPUTE: 0}
        cdef int64_t pieces = getattr(plan, "num_descriptors", 1)
        reads, writes = touched
        for accesses, spaces in ((reads, SPACE_READ), (writes, SPACE_WRITE)):
            for access in accesses:
                owner = access.owner
                if isinstance(owner, BufferCore):
                    resource = (<dict>spaces).get((<BufferCore>owner).storage.space)
                    if resource is not None:
                        sums[resource] = sums.get(resource, 0) + total_bytes(access.ranges)
        return [(resource, nbytes, pieces) for resource, nbytes in sums.items()]

    cdef tuple shares(self, demands):
        cdef list shares = []
        cdef double latency, piece, byte, pieces, nbytes
        for resource, size, count in demands:
            latency, piece, byte = self.service[resource]
            nbytes = size
            pieces = count
            shares.append((resource, latency + pieces * piece + nbytes * byte))
        return tuple(shares)

    # -- the model; the device's lock is held

    cdef Node serve_until(self, double time):
        """Serve what is ready by then; the node whose cost is missing, or None."""
        cdef list heap = self.heap
        cdef Node first
        while heap:
            first = heap[0]
            if first.ready > time:
                break
            if first.shares is None:
                return first
            heappop(heap)
            self.serve(first)
        return None

    cdef int serve(self, Node node) except -1:
        cdef double start = node.ready
        cdef double longest = node.fixed
        cdef double share, free_at
        cdef Node child
        cdef list children
        self.served_to = start
        for resource, _us in node.shares:
            free_at = self.free_at[resource]
            if free_at > start:
                start = free_at
        for resource, us in node.shares:
            share = us
            self.free_at[resource] = start + share
            if self.trace is not None and (resource == _H2D or resource == _D2H):
                self.trace.link(resource, start, start + share,
                                node.h2d_bytes if resource == _H2D else node.d2h_bytes)
            self.busy[resource] += share
            if share > longest:
                longest = share
        node.start = start
        node.end = start + longest
        node.ended = True
        if self.trace is not None and node.lane != PROMISE:
            self.trace.modelled(node)
        if node.children is not None:
            children = node.children
            node.children = None
            for child in children:
                if node.end > child.ready:
                    child.ready = node.end
                child.pending -= 1
                if not child.pending:
                    heappush(self.heap, child)
        return 0

    def reach(self, Position position):
        """Serve in order until the position is settled and bring the host there.

        None when done; otherwise the node whose cost must be waited for first.
        """
        cdef Node first
        with self.lock:
            while not position.settled():
                first = self.heap[0]
                if first.shares is None:
                    return first
                heappop(self.heap)
                self.serve(first)
            if position.time > self.host:
                self.host = position.time
            self.serve_until(self.host)
            return None

    def look(self, Position position, *, bint charge):
        """Whether the host, asking now, finds the position reached.

        The second value is a node whose cost must be waited for before that can be said.
        """
        with self.lock:
            if charge:
                self.charge(self.query_cost)
            blocked = self.serve_until(self.host)
            if position.settled():
                return position.time <= self.host, None
            return False, blocked

    def time_of(self, Mark mark):
        """Microseconds of a mark the host may know of, or None."""
        cdef Position position = mark.position
        with self.lock:
            self.serve_until(self.host)
            if position.settled() and position.time <= self.host:
                return position.time
            return None
