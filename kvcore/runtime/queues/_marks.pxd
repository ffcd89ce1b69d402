# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int64_t

cdef enum Kind:
    WORK
    CALL
    TIMER
    RECORD
    WAIT

cdef enum Outcome:
    PENDING
    DONE
    FAILED
    DROPPED


@cython.final
cdef class Failure:
    cdef readonly object cause
    cdef readonly str stream
    cdef readonly str operation
    cdef public bint seen


@cython.final
cdef class Waiter:
    cdef readonly bint fired
    cdef object ring

    cpdef notify(self)


@cython.final
cdef class Mark:
    cdef int outcome
    cdef readonly Failure failure
    cdef list waiters
    cdef readonly object queue
    cdef readonly double time
    cdef public object note
    cdef public object graph
    cdef public object position
    cdef readonly tuple promises

    cdef int prepare(self) except -1


@cython.final
cdef class Op:
    cdef int kind
    cdef readonly object target
    cdef readonly object args
    cdef readonly Mark mark
    cdef readonly int64_t number
    cdef public object note
    cdef readonly double started
    cdef readonly double ended
    cdef readonly double us

    cdef object touched(self)
