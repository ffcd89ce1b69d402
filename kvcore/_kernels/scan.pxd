# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int64_t

# Results of scans for repeats.
cdef enum:
    NO_MEMORY = -1
    DISTINCT = 1
    REPEATED = 2
    OUTSIDE = 3

cdef void load_indices(
    const char* src, int64_t stride, int itemsize, int64_t n, int64_t* out
) noexcept nogil
cdef int64_t first_at_or_above(const int64_t* values, int64_t n, int64_t bound) noexcept nogil
cdef bint strictly_increasing(const int64_t* values, int64_t n) noexcept nogil
cdef bint has_repeats(
    const int64_t* values, int64_t n, int64_t bound, unsigned char* bits
) noexcept nogil
cdef bint map_fits(int64_t n, int64_t bound) noexcept nogil
cdef int distinct(
    const int64_t* values, int64_t n, int64_t bound, int64_t* at, int64_t* before
) noexcept nogil
