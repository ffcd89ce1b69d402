# SPDX-License-Identifier: Apache-2.0
"""Marks and lines for callers that are no workers: drivers of devices with queues of their own.

There, a worker only hands work over, and that a record was reached is known later and elsewhere.
These functions give a driver a mark to settle itself, and operations that the observers (race
check, trace) do not see, since they are no launches of the program.  As everywhere in the queues,
nothing between a read and a write runs Python code, so the GIL is the lock.
"""

from cpython.pythread cimport PyThread_get_thread_ident

from kvcore.runtime.queues._executor cimport IDLE, READY, Executor, Line, now
from kvcore.runtime.queues._marks cimport (
    DONE, DROPPED, FAILED, PENDING, RECORD, WAIT, Failure, Mark, Op,
)


def promise(Line line):
    """A mark of a line that ``settle`` resolves, and no worker."""
    cdef Mark mark = Mark.__new__(Mark)
    mark.queue = line
    return mark


def owned(Mark mark, Line line):
    """The mark is one of this line from now on."""
    mark.queue = line
    mark.promises = line.promises


def settle(Executor executor, Mark mark, Failure failure=None, bint dropped=False):
    """Resolve a mark as done, as failed or as dropped; False when it was resolved before."""
    if mark.outcome != PENDING:
        return False
    mark.time = now()
    executor.resolve(
        mark, FAILED if failure is not None else DROPPED if dropped else DONE, failure
    )
    if executor.ready:
        executor.wake()
    return True


def place(Executor executor, Line line, Mark mark):
    """Queue a record of the mark behind everything on the line, never reached at once."""
    cdef Op op = Op.__new__(Op)
    op.kind = RECORD
    op.mark = mark
    _push(executor, line, op)


def hold(Executor executor, Line line, Mark mark):
    """Hold the line back until the mark is resolved; it takes over the mark's failure."""
    cdef Op op = Op.__new__(Op)
    op.kind = WAIT
    op.mark = mark
    _push(executor, line, op)


cdef int _push(Executor executor, Line line, Op op) except -1:
    op.number = executor.launches
    executor.launches += 1
    line.pending.append(op)
    if line.state == IDLE:
        line.state = READY
        executor.ready.append(line)
        executor.wake()
    return 0


def fail(Executor executor, Line line, Failure failure):
    """The line has failed, though none of its operations did here; kept when it had before."""
    if line.failure is None:
        line.failure = failure
        line.last = failure
    if not failure.seen and failure not in executor.failures:
        executor.failures.append(failure)


def enter(Executor executor, object calling):
    """This thread is inside a host function of the device, as ``Executor.calling`` had it."""
    executor.calls[PyThread_get_thread_ident()] = calling


def leave(Executor executor):
    """This thread has left its host function."""
    executor.calls.pop(PyThread_get_thread_ident(), None)
