# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int64_t

from kvcore.runtime.queues._executor cimport Line
from kvcore.runtime.queues._marks cimport Op
from kvcore.runtime.watching._order cimport Note, Order
from kvcore.runtime.watching._shadow cimport Shadow
from kvcore.runtime.watching._vectors cimport Vector


@cython.final
cdef class Accessor:
    cdef readonly str name
    cdef readonly str stream
    cdef readonly object site
    cdef readonly double number


cdef class Watch(Order):
    cdef readonly Shadow shadow
    cdef readonly list records
    cdef readonly object gone
    cdef readonly dict roots
    cdef readonly dict kept
    cdef public int64_t next_sweep

    cdef int enter(self, object access, bint write, Note note, Accessor record) except -1
    cdef int access(self, const int64_t[:, :] ranges, bint write, int lane, int64_t count,
                    int64_t host, Vector vector, Accessor record, object argument,
                    object owner) except -1
    cdef int hold(self, object owner) except -1
    cdef int clear_gone(self) except -1
    cdef int sweep(self) except -1
    cpdef ran(self, Line line, Op op)
