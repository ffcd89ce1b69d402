# SPDX-License-Identifier: Apache-2.0
"""Passes a device's operations on to the race check, the model clock and the trace.

A device that has none of them has no observer at all, so the launch path pays nothing.  The
first three calls come from the host with the device's lock held and give each operation a
``Note``; the others come from the workers.
"""

cimport cython

from kvcore.runtime.queues._marks cimport Mark, Op
from kvcore.runtime.watching._order cimport Note

import contextlib
import os

cdef extern from *:
    """
    #include <frameobject.h>
    """
    ctypedef struct PyFrameObject:
        pass
    ctypedef struct PyCodeObject:
        pass
    ctypedef struct PyThreadState:
        pass
    PyThreadState* PyThreadState_Get()
    PyFrameObject* PyThreadState_GetFrame(PyThreadState*)
    PyFrameObject* PyFrame_GetBack(PyFrameObject*)
    PyCodeObject* PyFrame_GetCode(PyFrameObject*)
    int PyFrame_GetLineNumber(PyFrameObject*)
    void Py_XDECREF(void*)

#: The package's folder: what its torch calls or its engine launch is placed at their caller.
cdef str HERE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
#: Files and folders between the package and the program: with statements of this package go
#: through contextlib, operators on torch's tensors through torch.
cdef tuple BETWEEN = (HERE, contextlib.contextmanager.__code__.co_filename)


def pass_over(str folder):
    """Frames of this folder's files are not the caller's program from now on."""
    global BETWEEN
    folder = os.path.join(folder, "")
    if folder not in BETWEEN:
        BETWEEN += (folder,)


cpdef object call_site():
    """(code, line) of the caller's program: the nearest frame that is no library's on the way.

    Where the whole stack is of libraries, as in a thread of torch's, the nearest frame outside
    this package.
    """
    cdef PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get())
    cdef PyFrameObject* back
    cdef PyCodeObject* code
    cdef str name
    cdef tuple site = None
    while frame != NULL:
        code = PyFrame_GetCode(frame)
        name = (<object>code).co_filename
        if not name.startswith(BETWEEN):
            site = (<object>code, PyFrame_GetLineNumber(frame))
            Py_XDECREF(code)
            break
        if site is None and not name.startswith(HERE):
            site = (<object>code, PyFrame_GetLineNumber(frame))
        Py_XDECREF(code)
        back = PyFrame_GetBack(frame)
        Py_XDECREF(frame)
        frame = back
    Py_XDECREF(frame)
    return site


@cython.final
cdef class Observer:
    """Passes on what happens; made only for a device that wants to know."""

    cdef object lock, race, clock, trace, wall_trace
    cdef bint check_host

    def __init__(self, lock, race, clock, trace):
        self.lock = lock
        self.race = race
        self.clock = clock
        self.trace = trace
        self.wall_trace = trace if clock is None else None
        self.check_host = race is not None and race.check_host

    # -- from the host, the device's lock held

    def launched(self, queue, Op op):
        """An operation is about to be queued."""
        # a graph's operations bring the place where they were captured
        cdef object site = op.note
        cdef Note note
        if site is None and self.race is not None:
            site = call_site()
        note = Note(site)
        op.note = note
        if self.race is not None:
            self.race.launched(queue.index, note, op.number)
            if self.check_host:
                self.race.sum_sources(op, note)
        if self.clock is not None:
            note.node = self.clock.launched(queue, op)

    def marked(self, queue, Mark mark):
        """A record is about to be queued."""
        if self.race is not None:
            mark.note = self.race.marked(queue.index)
        if self.clock is not None:
            if mark.position is None:
                mark.position = self.clock.marked(queue)
            else:
                self.clock.kept(queue, mark.position)

    def waited(self, queue, Mark mark):
        """A wait for the mark is about to be queued."""
        if self.race is not None:
            self.race.waited(queue.index, mark)
        if self.clock is not None:
            if mark.position is None:
                mark.position = self.clock.promise()
            self.clock.waited(queue, mark.position)
        if self.trace is not None:
            self.trace.waited(queue, mark)

    def event_call(self):
        """The host calls record or wait."""
        if self.clock is not None:
            with self.lock:
                self.clock.event_call()

    def waited_for_nothing(self, queue):
        """A wait for an event that was never recorded."""
        if self.race is not None:
            self.race.remark(
                f"stream {queue.name!r} waits for an event that was never recorded", call_site()
            )

    # -- from the workers

    def starting(self, queue, Op op):
        """An operation is about to run."""
        if self.race is not None:
            self.race.starting(queue, op)

    def ran(self, queue, Op op):
        """An operation has run."""
        with self.lock:
            if self.race is not None:
                if self.check_host:
                    self.race.over(op)
                self.race.ran(queue, op)
            if self.clock is not None:
                self.clock.ran(op.note.node, op)
            if self.wall_trace is not None:
                self.wall_trace.ran(queue, op)

    def skipped(self, queue, Op op):
        """An operation failed, or will not run."""
        with self.lock:
            if self.race is not None:
                if self.check_host:
                    self.race.over(op)
                self.race.dropped(op)
            if self.clock is not None:
                self.clock.skipped(op.note.node, op)
