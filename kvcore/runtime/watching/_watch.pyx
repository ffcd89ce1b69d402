# SPDX-License-Identifier: Apache-2.0
"""Accesses as they happen: who touched which bytes, entered in the shadow in the order's clocks.

*What* was touched is known when an operation runs: a plan reports the rows of that run, so two
writers of different slots of one cache do not meet.  The ranges go to a ``Shadow``, which finds
two unordered accesses to one byte whatever the real execution did; see there.
"""

cimport cython
from libc.math cimport INFINITY
from libc.stdint cimport int64_t

from kvcore.runtime.queues._executor cimport Line
from kvcore.runtime.queues._marks cimport Op
from kvcore.runtime.watching._order cimport Note, Order
from kvcore.runtime.watching._shadow cimport Shadow
from kvcore.runtime._storage cimport BufferCore
from kvcore.runtime.watching._vectors cimport Vector

import weakref
from collections import deque

import numpy as np

cdef object ndarray = np.ndarray
cdef object reference = weakref.ref
cdef int64_t FIRST_SWEEP = 1 << 16


@cython.final
@cython.freelist(64)
cdef class Accessor:
    """What a report needs to know of one access; number is infinite for the host's."""

    def __cinit__(self, str name, str stream, site, double number):
        self.name = name
        self.stream = stream
        self.site = site
        self.number = number


cdef class Watch(Order):
    """The order of one device and the shadow of its memory.

    records: (Accessor, argument) by the shadow's number.
    gone:    memory that has gone back, as (id, start, end): finalisers only append here.
    roots:   weak references to the arrays that own the memory met so far, by id.
    kept:    owners that are not numpy's, kept alive until the host has waited for everything.
    """

    def __cinit__(self, *args, **options):
        self.shadow = Shadow()
        self.records = []
        self.gone = deque()
        self.roots = {}
        self.kept = {}
        self.next_sweep = FIRST_SWEEP

    def found(self, hits, record, argument, write, owner):
        """Unordered accesses were met; for who reports them."""
        raise NotImplementedError

    def forget(self):
        """Whatever comes is ordered after all there was."""
        self.shadow.reset()
        self.records.clear()
        self.gone.clear()
        self.kept.clear()
        self.roots = {key: ref for key, ref in self.roots.items() if ref() is not None}

    cpdef ran(self, Line line, Op op):
        """An operation has run: enter what it touched."""
        cdef Note note = op.note
        cdef Accessor record
        self.in_flight.pop(op.number, None)
        if note.late:
            self.fold(note)
        touched = op.touched()
        if touched is None:
            return
        reads, writes = touched
        record = Accessor(op.name, line.name, note.site, <double>op.number)
        for access in reads:
            self.enter(access, False, note, record)
        for access in writes:
            self.enter(access, True, note, record)

    def dropped(self, Op op):
        """An operation will not run, or failed and (plans being atomic) wrote nothing."""
        self.in_flight.pop(op.number, None)

    cdef int enter(self, object access, bint write, Note note, Accessor record) except -1:
        cdef const int64_t[:, :] ranges = access.ranges
        if ranges.shape[0] == 0:
            return 0
        self.hold(access.owner)
        self.access(ranges, write, note.lane, note.count, note.host, note.vector, record,
                    access.argument, access.owner)
        return 0

    def host_access(self, owner, const int64_t[:, :] ranges, bint write, str name, site):
        """The host touches memory, here and now."""
        self.host_count += 1
        self.hold(owner)
        self.access(ranges, write, 0, self.host_count, self.host_count, self.host_vector,
                    Accessor(name, "the host", site, INFINITY), "the buffer", owner)

    def function_access(self, Line line, Op op, owner, const int64_t[:, :] ranges, bint write):
        """A host function or a plan looks at memory while it runs: an access of its stream."""
        cdef Note note = op.note
        if note.late:
            self.fold(note)
        self.hold(owner)
        self.access(ranges, write, note.lane, note.count, note.host, note.vector,
                    Accessor(op.name, line.name, note.site, <double>op.number), "the buffer", owner)

    cdef int access(self, const int64_t[:, :] ranges, bint write, int lane, int64_t count,
                    int64_t host, Vector vector, Accessor record, object argument,
                    object owner) except -1:
        cdef list hits
        if self.gone:
            self.clear_gone()
        if self.shadow.num_records >= self.next_sweep:
            self.sweep()
        self.records.append((record, argument))
        hits = self.shadow.access(ranges, write, lane, count, host, vector)
        if hits is not None:
            self.found(hits, record, argument, write, owner)
        return 0

    cdef int hold(self, object owner) except -1:
        """See to it that an address given to new memory is not taken for the old."""
        cdef object root = owner
        cdef object held
        if isinstance(owner, BufferCore):
            root = (<BufferCore>owner).storage.array
        while isinstance(root, ndarray) and root.base is not None:
            root = root.base
        if root is None:
            return 0
        key = id(root)
        held = self.roots.get(key)
        if held is not None and held() is root:
            return 0
        if isinstance(root, ndarray):
            low, high = np.lib.array_utils.byte_bounds(root)
            self.roots[key] = reference(root, Gone(self.gone, (key, int(low), int(high))))
        else:
            self.kept[key] = root
        return 0

    cdef int clear_gone(self) except -1:
        while self.gone:
            key, start, end = self.gone.popleft()
            self.shadow.clear(start, end)
            held = self.roots.get(key)
            if held is not None and held() is None:
                del self.roots[key]
        return 0

    cdef int sweep(self) except -1:
        cdef list records = self.records
        host, floor = self.floor()
        self.records = [records[old] for old in self.shadow.sweep(host, floor)]
        self.next_sweep = max(FIRST_SWEEP, 2 * <int64_t>len(self.records))
        return 0


@cython.final
cdef class Gone:
    """Called when an array is no more: notes its memory, and nothing else."""

    cdef object gone
    cdef tuple entry

    def __init__(self, gone, tuple entry):
        self.gone = gone
        self.entry = entry

    def __call__(self, reference):
        self.gone.append(self.entry)
