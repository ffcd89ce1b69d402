# SPDX-License-Identifier: Apache-2.0
"""Bytes: who has them, how many there are, and moving them without the GIL."""

cimport cython
from libc.stdint cimport int64_t
from libc.string cimport memmove


@cython.final
cdef class Ledger:
    """Bytes of one memory space: C integers only, so that a finaliser may change them."""

    def __init__(self, int64_t capacity):
        self.capacity = capacity          # -1: without limit

    def take(self, int64_t nbytes):
        """Count an allocation; False, and nothing counted, when it does not fit."""
        if self.capacity >= 0 and nbytes > self.capacity - self.used:
            return False
        self.used += nbytes
        self.allocations += 1
        if self.used > self.peak:
            self.peak = self.used
        return True

    def untake(self, int64_t nbytes):
        """Undo ``take``: the allocation did not happen."""
        self.used -= nbytes
        self.allocations -= 1

    cdef void give_back(self, int64_t nbytes) noexcept:
        self.used -= nbytes
        self.frees += 1


@cython.final
@cython.no_gc
cdef class Storage:
    """One allocation.  It is given back once: by ``release`` or with its last reference.

    No cycle can go through it (it refers to a ledger, an executor's key and a numpy array), so
    it is not tracked, and its finaliser always finds its ledger.

    origin: what the buffer was made as, for reports (a ``memory.Origin``).
    """

    def __init__(self, Ledger ledger, object owner, str space, int64_t nbytes, object array):
        self.ledger = ledger
        self.owner = owner
        self.space = space
        self.nbytes = nbytes
        self.array = array
        self.freed = False

    def release(self):
        """Give the bytes back; False when that was done before."""
        if self.freed:
            return False
        self.freed = True
        self.ledger.give_back(self.nbytes)
        self.array = None
        return True

    def __dealloc__(self):
        if not self.freed and self.ledger is not None:
            self.freed = True
            self.ledger.give_back(self.nbytes)


cdef class BufferCore:
    """What the launch path must see of a buffer."""

    def _bind(self, Storage storage):
        self.storage = storage


cpdef int64_t total_bytes(const int64_t[:, :] ranges) except -1:
    """Bytes of ranges given as rows (start, end)."""
    cdef Py_ssize_t i
    cdef int64_t total = 0
    for i in range(ranges.shape[0]):
        total += ranges[i, 1] - ranges[i, 0]
    return total


def move(const int64_t[:, ::1] pieces):
    """Copy bytes: each row is (destination address, source address, bytes); no GIL held."""
    cdef Py_ssize_t i
    with nogil:
        for i in range(pieces.shape[0]):
            memmove(<void*><size_t>pieces[i, 0], <void*><size_t>pieces[i, 1],
                    <size_t>pieces[i, 2])
