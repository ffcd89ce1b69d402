# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int64_t, uint64_t

from kvcore.runtime.queues._admission cimport Admission
from kvcore.runtime.queues._marks cimport Failure, Mark, Op

cdef enum State:
    IDLE
    READY
    RUNNING
    WAITING
    TIMED

cdef enum Life:
    NEW
    OPEN
    CLOSING
    CLOSED
    FORKED

cdef enum:
    MAX_WORKERS = 256


cdef double now() noexcept


cdef class Line:
    cdef readonly str name
    cdef readonly int index
    cdef object pending
    cdef int state
    cdef Op running
    cdef Mark blocked
    cdef readonly Failure failure
    cdef Failure last
    cdef int64_t skip_until
    cdef int64_t over
    cdef tuple promises
    cdef object __weakref__


@cython.final
cdef class Executor:
    cdef readonly int life
    cdef readonly int64_t launches
    cdef readonly Admission admission
    cdef object ready
    cdef list parked
    cdef list timers
    cdef bint stopping
    cdef public object observer
    cdef public bint observe_start
    cdef public object lock
    cdef public list failures
    cdef public object graph_wait
    cdef bint modelled_time
    cdef bint seeded
    cdef uint64_t random
    cdef dict calls
    cdef long[MAX_WORKERS] workers
    cdef list lines
    cdef int num_workers
    cdef object __weakref__

    cdef int worker(self) noexcept
    cdef bint in_worker(self) noexcept
    cdef int refuse(self, Line line) except -1
    cdef int wake(self) except -1
    cdef int forget(self, Line line, Op op) except -1
    cdef Line take(self)
    cdef Py_ssize_t draw(self, Py_ssize_t n) noexcept
    cdef int advance(self, Line line) except -1
    cdef int execute(self, Line line, Op op) except -1
    cdef int broke(self, Line line, Op op, object error) except -1
    cdef int after_wait(self, Line line, Mark mark) except -1
    cdef int pass_over(self, Line line, Op op) except -1
    cdef int resolve(self, Mark mark, int outcome, Failure failure) except -1
