# SPDX-License-Identifier: Apache-2.0
"""The small objects of the queues: operations, marks, those who wait for marks, failures."""

cimport cython


@cython.final
cdef class Failure:
    """Why a queue does not go on: the first cause, and whether it was reported."""

    def __init__(self, object cause, str stream, str operation):
        self.cause = cause
        self.stream = stream
        self.operation = operation
        self.seen = False


@cython.final
cdef class Waiter:
    """A thread or task outside the queues that waits: ``ring`` is called once, to wake it."""

    def __init__(self, object ring):
        self.ring = ring
        self.fired = False

    cpdef notify(self):
        if not self.fired:
            self.fired = True
            self.ring()


@cython.final
@cython.freelist(64)
cdef class Mark:
    """One record of an event.

    note:  what the observers attached when it was recorded (clocks).
    time:  seconds on the monotonic clock when it was reached.
    graph: the capture it belongs to, or None.
    promises: while it is pending, the marks of external events that its stream waited for before
           any of them was recorded; None without any.
    """

    @property
    def pending(self):
        return self.outcome == PENDING

    @property
    def failed(self):
        return self.outcome == FAILED

    @property
    def dropped(self):
        return self.outcome == DROPPED

    def add(self, Waiter waiter):
        """Put a host on the list; False when the mark is resolved already."""
        self.prepare()
        if self.outcome != PENDING:
            return False
        self.waiters.append(waiter)
        return True

    cdef int prepare(self) except -1:
        # Making a list may run the collector, and that anything: so it is made before the
        # outcome is looked at, never between the look and the append.
        cdef list fresh
        if self.waiters is None:
            fresh = []
            if self.waiters is None:
                self.waiters = fresh
        return 0

    def discard(self, Waiter waiter):
        cdef Py_ssize_t i
        if self.waiters is not None:
            for i in range(len(self.waiters)):
                if self.waiters[i] is waiter:
                    del self.waiters[i]
                    return


@cython.final
@cython.freelist(256)
cdef class Op:
    """One queued thing; keeps what it works on alive until it is done.

    number:  place in the device's order of launches.
    note:    what the observers attached at launch.
    """

    @property
    def is_call(self):
        return self.kind == CALL

    @property
    def is_timer(self):
        return self.kind == TIMER

    @property
    def is_work(self):
        return self.kind == WORK

    cdef object touched(self):
        """(reads, writes) of the run that is over; None of an operation that does not say."""
        if self.kind == CALL:
            return None
        found = getattr(self.target, "touched", None)
        if found is not None:
            return found()
        reads = getattr(self.target, "reads", None)
        writes = getattr(self.target, "writes", None)
        return None if reads is None or writes is None else (reads, writes)

    @property
    def name(self):
        # A worker asks, also for the report of a failure: so whatever the target is, there is one.
        if self.kind == TIMER:
            return str(self.target)
        try:
            name = getattr(self.target, "name", None)
            if name is None:
                name = getattr(getattr(self.target, "operator", None), "name", None)
            if not isinstance(name, str):
                name = getattr(self.target, "__qualname__", None)
        except BaseException:
            name = None
        return name if type(name) is str else type(self.target).__name__


KIND_WORK = WORK
KIND_CALL = CALL
KIND_TIMER = TIMER
