# SPDX-License-Identifier: Apache-2.0
"""What the dispatch mode of a thread does at every call of an operator (see modes.py).

A call says its line, goes on to its kernel, and what the machine entered meanwhile is read.  All
else happens to few calls, and is Python's: what torch's operators do to pinned memory, the lines of
what torch_npu's own thread will do, tensors that are fresh or may leak.
"""

from cpython.object cimport PyObject, PyObject_Call
from cpython.ref cimport Py_INCREF
from libc.stdint cimport uint64_t, uintptr_t

from kvcore.emulator._lines cimport here, set_line

from kvcore.emulator import _lines as lines

cdef object Tensor = None
cdef object Overload = None
cdef object strided = None
cdef object device_of = None
cdef object describe = None
cdef object on_host = None
cdef object read = None
cdef object has_pinned = None
cdef object collector = None
# By the address of the overload, which is kept: its own hash is a function of Python's.
cdef dict known = {}


def bind(torch, make, host, races, found):
    """Take what calls need.

    torch: (Tensor, OpOverload, strided).  make: the Known of an overload that is called first.
    host:  called with (known, line, args, kwargs) where there are tensors of the host.
    races: the reader of the journal.  found: what was found, see reports.py.
    """
    global Tensor, Overload, strided, device_of, describe, on_host, read, has_pinned, collector
    Tensor, Overload, strided = torch
    device_of = Tensor.get_device
    describe = make
    on_host = host
    read = races.read
    has_pinned = races.has_pinned
    collector = found


cdef class Known:
    """What is known of an overload beforehand.

    kernel: what the dispatcher would call next for tensors of the device; None: ask it.
    copies: what it does to memory of the host is the machine's task.
    after:  called with (line, args, kwargs, result) behind the call; None: there is nothing to do.
    """

    cdef readonly str name
    cdef str backward
    cdef object kernel
    cdef readonly bint copies
    cdef object after

    def __init__(self, str name, kernel, bint copies, after):
        self.name = name
        self.backward = f"backward of {name}"
        self.kernel = kernel
        self.copies = copies
        self.after = after


cdef enum:
    OF_DEVICE = 1
    OF_HOST = 2


cdef int where(object args) except -1:
    """Whether there are tensors of the device among the arguments, and whether of the host."""
    cdef int found = 0
    cdef object kind
    for value in args:
        kind = type(value)
        if kind is list or kind is tuple:
            if value:
                found |= where(value)
        elif kind is Tensor or isinstance(value, Tensor):
            if value.is_cpu:
                found |= OF_HOST
            elif device_of(value) >= 0 and value.layout is strided:
                found |= OF_DEVICE
    return found


cdef Known of(object overload):
    cdef object key = <uintptr_t><PyObject*>overload
    cdef object found = known.get(key)
    if found is None:
        found = known[key] = describe(overload)
        Py_INCREF(overload)
    return <Known>found


def dispatch(self, func, types, args=(), kwargs=None):
    """``__torch_dispatch__`` of the mode."""
    cdef Known call
    cdef uint64_t line, before
    cdef int tensors
    if kwargs is None:
        kwargs = {}
    if types or not isinstance(func, Overload):
        return func(*args, **kwargs)
    call = of(func)
    line = here(call.backward)
    before = set_line(line)
    try:
        tensors = where(args)
        if tensors & OF_HOST and not call.copies and has_pinned():
            on_host(call, line, args, kwargs)
        if tensors & OF_DEVICE and call.kernel is not None:
            result = PyObject_Call(call.kernel, args, kwargs)
        else:
            result = PyObject_Call(func, args, kwargs)
    finally:
        set_line(before)
    if call.after is not None:
        call.after(line, args, kwargs, result)
    waited = read()
    if collector.raises:
        collector.raise_found(None if waited else lines.place(line))
    return result
