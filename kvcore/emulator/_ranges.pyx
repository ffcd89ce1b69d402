# SPDX-License-Identifier: Apache-2.0
"""Which bytes a strided tensor has: runs of addresses, and nothing of what lies between them."""

from cpython cimport array
from libc.stdint cimport int64_t

import array

cdef enum:
    MAX_RANK = 64

cdef array.array NUMBERS = array.array("q")


cdef struct Strided:
    int rank                # of the axes that leave gaps
    int64_t run             # bytes without a gap
    int64_t count           # how many such runs
    int64_t sizes[MAX_RANK]
    int64_t steps[MAX_RANK]  # bytes


cdef int read(Strided* out, sizes, strides, int64_t itemsize) except -1:
    """Fold the axes that lie close together into one run; the others stay, widest step last."""
    cdef int64_t size[MAX_RANK]
    cdef int64_t step[MAX_RANK]
    cdef int rank = 0
    cdef int i, k
    cdef int64_t n, s
    if len(sizes) > MAX_RANK:
        raise ValueError("too many axes")
    out.rank = 0
    out.count = 1
    out.run = itemsize
    for i in range(len(sizes)):
        n = sizes[i]
        s = strides[i] * itemsize
        if n == 0:
            out.count = 0
            return 0
        if n == 1 or s == 0:
            continue
        k = rank
        while k > 0 and step[k - 1] > s:
            size[k] = size[k - 1]
            step[k] = step[k - 1]
            k -= 1
        size[k] = n
        step[k] = s
        rank += 1
    for i in range(rank):
        if out.rank == 0 and step[i] <= out.run:
            out.run += (size[i] - 1) * step[i]
        else:
            out.sizes[out.rank] = size[i]
            out.steps[out.rank] = step[i]
            out.count *= size[i]
            out.rank += 1
    return 0


cdef int64_t* write(Strided* layout, int64_t start, int64_t* out) noexcept:
    """The runs from one start on; returns where the next belong."""
    cdef int64_t index[MAX_RANK]
    cdef int i
    for i in range(layout.rank):
        index[i] = 0
    for _ in range(layout.count):
        out[0] = start
        out[1] = start + layout.run
        out += 2
        for i in range(layout.rank):
            index[i] += 1
            start += layout.steps[i]
            if index[i] < layout.sizes[i]:
                break
            start -= index[i] * layout.steps[i]
            index[i] = 0
    return out


def runs(int64_t address, sizes, strides, int64_t itemsize, int64_t limit):
    """Runs of a tensor as an array of pairs (first byte, past the last), one after the other.

    None when there are more than ``limit``.
    """
    cdef Strided layout
    cdef array.array made
    read(&layout, sizes, strides, itemsize)
    if layout.count > limit:
        return None
    made = array.clone(NUMBERS, 2 * layout.count, False)
    if layout.count:
        write(&layout, address, <int64_t*>made.data.as_longlongs)
    return made


def spread(int64_t address, offsets, sizes, strides, int64_t itemsize, int64_t limit):
    """Runs of the pieces of a tensor that begin at some of its elements.

    offsets: an array of int64, in elements from the tensor's first.  sizes, strides: of a piece.
    None when there are more than ``limit`` runs.
    """
    cdef const int64_t[:] starts = offsets
    cdef Strided layout
    cdef array.array made
    cdef int64_t* at
    cdef Py_ssize_t i
    read(&layout, sizes, strides, itemsize)
    if layout.count * starts.shape[0] > limit:
        return None
    made = array.clone(NUMBERS, 2 * layout.count * starts.shape[0], False)
    at = <int64_t*>made.data.as_longlongs
    if layout.count:
        for i in range(starts.shape[0]):
            at = write(&layout, address + starts[i] * itemsize, at)
    return made
