# SPDX-License-Identifier: Apache-2.0
"""Scans over index arrays.  A scan returns an index, never an exception."""

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy


cdef void load_indices(
    const char* src, int64_t stride, int itemsize, int64_t n, int64_t* out
) noexcept nogil:
    # A private copy: whoever edits the caller's array meanwhile must not steer a memcpy.
    cdef int64_t i
    if itemsize == 8:
        if stride == 8:
            memcpy(out, src, <size_t>(n * 8))
        else:
            for i in range(n):
                memcpy(&out[i], src + i * stride, 8)
    else:
        load_int32(src, stride, n, out)


cdef inline void load_int32(
    const char* src, int64_t stride, int64_t n, int64_t* out
) noexcept nogil:
    cdef int64_t i
    cdef int32_t one
    if stride == 4:  # a constant step, which compilers vectorise
        for i in range(n):
            memcpy(&one, src + i * 4, 4)
            out[i] = one
        return
    for i in range(n):
        memcpy(&one, src + i * stride, 4)
        out[i] = one


cdef int64_t first_at_or_above(const int64_t* values, int64_t n, int64_t bound) noexcept nogil:
    # Two passes: the first has no branch and vectorises, the second runs only on a fault.
    cdef int64_t i
    cdef int bad = 0
    for i in range(n):
        bad |= values[i] >= bound
    if not bad:
        return -1
    for i in range(n):
        if values[i] >= bound:
            return i
    return -1


cdef bint strictly_increasing(const int64_t* values, int64_t n) noexcept nogil:
    cdef int64_t i
    cdef int bad = 0
    for i in range(1, n):
        bad |= values[i] <= values[i - 1]
    return not bad


cdef bint has_repeats(
    const int64_t* values, int64_t n, int64_t bound, unsigned char* bits
) noexcept nogil:
    # bits: (bound + 7) // 8 zeroed bytes. Negative values do not count.
    cdef int64_t i, v
    cdef int repeated = 0, mask
    for i in range(n):
        v = values[i]
        if v >= 0:
            mask = 1 << (v & 7)
            repeated |= bits[v >> 3] & mask
            bits[v >> 3] |= mask
    return repeated != 0


def first_outside(const int64_t[::1] values, int64_t bound):
    """Index of the first value >= bound, or -1.  Negative values mean "skip" and pass."""
    if values.shape[0] == 0:
        return -1
    return first_at_or_above(&values[0], values.shape[0], bound)


def any_repeat(const int64_t[::1] values, int64_t bound):
    """Whether a non-negative value below bound occurs twice."""
    cdef unsigned char* bits
    cdef bint found
    if values.shape[0] == 0:
        return False
    if first_at_or_above(&values[0], values.shape[0], bound) >= 0:
        raise ValueError(f"values: expected each < {bound}")
    bits = <unsigned char*>calloc(bound // 8 + 1, 1)
    if bits == NULL:
        raise MemoryError
    found = has_repeats(&values[0], values.shape[0], bound, bits)
    free(bits)
    return found
