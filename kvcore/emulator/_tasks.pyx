# SPDX-License-Identifier: Apache-2.0
"""Python objects as tasks of the machine's streams.

A stream's thread calls :func:`run` with a task, without the machine's lock, and takes the GIL for
it; so a task must not wait for a stream, and nobody waits for a task with the GIL held (see
cann/python.c).  The machine owns one reference from the launch on.  A task that a graph has
captured runs at every replay, and the machine gives the reference back when it drops the task.
"""

cimport cython
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint64_t, uintptr_t

import traceback

from kvcore.errors import StreamError

ctypedef int (*run_function)(void* task, bint kept) noexcept
ctypedef int (*launch_function)(void* stream, const char* symbol, run_function function, void* task,
                                uint64_t id, const uint64_t* touches, size_t count,
                                const char* text, bint for_waiters) noexcept
ctypedef const char* (*intern_function)(const char* text) noexcept
ctypedef size_t (*dropped_function)(void** tasks, size_t room) noexcept
ctypedef void (*failed_function)(const char* text) noexcept
ctypedef bint (*updates_function)(void* stream) noexcept
ctypedef bint (*plain_function)() noexcept
ctypedef void (*plain_setter)(plain_function function) noexcept

cdef enum:
    FAULT = 507015      # what a failed task leaves on its stream: a fault inside an AI core
    BATCH = 256

cdef launch_function machine_launch = NULL
cdef intern_function machine_intern = NULL
cdef dropped_function machine_dropped = NULL
cdef failed_function machine_failed = NULL
cdef updates_function machine_updates = NULL
cdef size_t* num_dropped = NULL
# How many updates of captured tasks are open; mostly none, and no stream need be asked about.
cdef size_t* num_updates = NULL
cdef object failure = None
# Torch's state of a thread: the kinds of kernel it leaves out and takes in, and modes of functions.
cdef object excluded, included, function_modes
cdef object plain_excluded, plain_included
# The reader of the journal, which wants to know what late tasks use; None with check="off".
cdef object races = None
cdef bint gone = False
cdef uint64_t last_number = 0
cdef Py_ssize_t num_held = 0


def bind(dict addresses, words, reader):
    """Take the machine's functions and counters, by address.

    words:  returns the text for a code that the machine has just returned in this thread.
    reader: the reader of the journal, None if there is none.
    """
    global machine_launch, machine_intern, machine_dropped, machine_failed, machine_updates
    global num_dropped, num_updates, failure, races
    machine_launch = <launch_function><uintptr_t>addresses["kvdouble_launch"]
    machine_intern = <intern_function><uintptr_t>addresses["kvdouble_intern"]
    machine_dropped = <dropped_function><uintptr_t>addresses["kvdouble_dropped"]
    machine_failed = <failed_function><uintptr_t>addresses["kvdouble_task_failed"]
    machine_updates = <updates_function><uintptr_t>addresses["kvdouble_updates"]
    num_dropped = <size_t*><uintptr_t>addresses["kvdouble_num_dropped"]
    num_updates = <size_t*><uintptr_t>addresses["kvdouble_num_updates"]
    failure = words
    races = reader


def stop():
    """Note that Python ends: from now on nothing is launched."""
    global gone
    gone = True


def held():
    """How many tasks the machine holds: queued, or captured by graphs that are there."""
    forget_dropped()
    return num_held


def bind_state(uintptr_t setter, left_out, taken_in, modes):
    """Say how torch's state of a thread is asked; this thread's is that of any new one.

    setter: kvdouble_plain, by address.
    """
    global excluded, included, function_modes, plain_excluded, plain_included
    excluded = left_out
    included = taken_in
    function_modes = modes
    plain_excluded = left_out()
    plain_included = taken_in()
    (<plain_setter>setter)(is_plain)


cdef bint is_plain() noexcept with gil:
    """Whether a kernel of torch's does on this thread what it does on a stream's: no modes, no
    autocast, no transforms, and not within another operator's kernel.
    """
    try:
        return (not function_modes() and excluded() == plain_excluded
                and included() == plain_included)
    except BaseException:  # none that could be raised: the stream's thread does it then
        return False


cdef bint watched() noexcept:
    """Whether a reader of the journal wants to know what tasks touch."""
    return races is not None


@cython.final
cdef class Name:
    """The address of a task's name for reports and errors; the machine keeps the text for ever."""

    def __init__(self, str text):
        self.text = text
        self.symbol = machine_intern(text.encode("utf-8", "replace"))


cdef class Task:
    """An operation in stream order, run on the stream's thread."""

    cdef int work(self) except -1:
        """Run the operation; an exception becomes a failed task."""
        return 0

    cdef object used(self):
        """Before each run, which bytes of its spans it uses: [(pairs of addresses, written), ...].

        None: all that it touches was known at the launch.
        """
        return None


@cython.final
cdef class Function(Task):
    """A task that calls a function without arguments."""

    cdef object function

    cdef int work(self) except -1:
        self.function()
        return 0


cdef int run(void* data, bint kept) noexcept with gil:
    global num_held
    cdef Task task = <Task>data
    cdef int code = 0
    try:
        if races is not None:
            used = task.used()
            if used is not None:
                races.tell(task.number, used)
        task.work()
    except BaseException as error:
        words = "".join(traceback.format_exception_only(error)).strip()
        machine_failed(f"{task.name.text}: {words}".encode("utf-8", "replace"))
        code = FAULT
    if not kept:
        num_held -= 1
        Py_DECREF(task)
    return code


cdef int forget_dropped() except -1:
    global num_held
    cdef void* tasks[BATCH]
    cdef size_t n, i
    while num_dropped != NULL and num_dropped[0]:
        n = machine_dropped(tasks, BATCH)
        for i in range(n):
            num_held -= 1
            Py_DECREF(<object>tasks[i])
    return 0


cdef bint updating(uintptr_t stream) noexcept:
    """Whether what is launched on a stream takes the place of tasks that a graph has captured."""
    return num_updates[0] != 0 and machine_updates(<void*>stream)


cdef int launch(uintptr_t stream, Name name, Task task, const uint64_t* touches, size_t count,
                const char* text, bint for_waiters) except -1:
    """Queue a task on a stream of the thread's current device.

    touches: three numbers each: a device address, bytes from there, and flags: 1 if they are
             written; 2 if it is some of these bytes, and ``used`` says which.
    text:    if a graph captures it: the operator with shapes and types, which an update does not
             change; NULL: its name.
    for_waiters: a thread that waits for it may run it: it runs no code of Python's.
    Raises StreamError with the machine's text when it refuses.
    """
    global last_number, num_held
    cdef int code
    if gone:
        raise StreamError(
            f"{name.text}: Python is ending, and the emulated machine has stopped"
        )
    if num_dropped[0]:
        forget_dropped()
    if races is not None and not last_number & 1023:
        races.read()  # with the model clock alone nobody else does for long
    last_number += 1
    task.number = last_number
    task.name = name
    num_held += 1
    Py_INCREF(task)  # the machine's from here on, also where it refuses
    code = machine_launch(<void*>stream, name.symbol, run, <void*>task, task.number, touches, count,
                          text, for_waiters)
    if code:
        words = failure(code)
        forget_dropped()
        raise StreamError(f"{name.text}: {words}", code=code)
    return 0


def queue(uintptr_t stream, Name name, function, numbers):
    """Queue a function without arguments.

    numbers: addresses, sizes and flags of what it touches, one after the other.
    Raises StreamError with the machine's text when it refuses.
    """
    cdef Function task = Function.__new__(Function)
    cdef uint64_t[:] touches
    task.function = function
    if not numbers:
        return launch(stream, name, task, NULL, 0, NULL, False)
    touches = numbers
    launch(stream, name, task, &touches[0], len(numbers) // 3, NULL, False)
