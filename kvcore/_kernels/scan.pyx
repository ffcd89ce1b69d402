# SPDX-License-Identifier: Apache-2.0
"""Scans over index arrays.  A scan returns an index, never an exception."""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free, qsort
from libc.string cimport memcpy

cdef enum:
    ASCENDING_STEP = 64  # values compared between two tests whether they ascend
    # A map of a bit a slot is used up to this many bytes, and these many more a value.  Past it
    # slots are so many that most values would touch a page of their own in the map.
    MAP_BYTES = 65536
    MAP_BYTES_A_VALUE = 64
    PROBES_A_VALUE = 32  # looks into the table that are still better than sorting


cdef void load_indices(
    const char* src, int64_t stride, int itemsize, int64_t n, int64_t* out
) noexcept nogil:
    # A private copy: a thread that edits the caller's array meanwhile must not steer a memcpy.
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


cdef bint ascending(const int64_t* values, int64_t n) noexcept nogil:
    # As strictly_increasing, but soon done where the values are in no order.
    cdef int64_t i = 1, end
    cdef int bad = 0
    while i < n:
        end = n if n - i < ASCENDING_STEP else i + ASCENDING_STEP
        while i < end:
            bad |= values[i] <= values[i - 1]
            i += 1
        if bad:
            return False
    return True


cdef bint map_fits(int64_t n, int64_t bound) noexcept nogil:
    return bound // 8 <= MAP_BYTES + MAP_BYTES_A_VALUE * n


cdef int distinct_in_map(
    const int64_t* values, int64_t n, int64_t bound, uint64_t* words, int64_t* at
) noexcept nogil:
    # The range is looked at in the same pass, which is then the only one.
    cdef int64_t i
    cdef uint64_t v, word, bit
    for i in range(n):
        v = <uint64_t>values[i]
        if v < <uint64_t>bound:
            bit = <uint64_t>1 << (v & 63)
            word = words[v >> 6]
            if word & bit:
                at[0] = i
                return REPEATED
            words[v >> 6] = word | bit
        elif values[i] >= 0:
            return OUTSIDE
    return DISTINCT


cdef int by_value(const void* a, const void* b) noexcept nogil:
    # Equal values by their place.
    cdef const int64_t* x = <const int64_t*>a
    cdef const int64_t* y = <const int64_t*>b
    if x[0] != y[0]:
        return 1 if x[0] > y[0] else -1
    return (x[1] > y[1]) - (x[1] < y[1])


cdef int distinct_by_sorting(const int64_t* values, int64_t n, int64_t* at) noexcept nogil:
    cdef int64_t* pairs
    cdef int64_t i
    if n < 2:  # which also tells the compiler that n is not negative
        return DISTINCT
    pairs = <int64_t*>calloc(<size_t>n, 16)
    if pairs == NULL:
        return NO_MEMORY
    for i in range(n):
        pairs[2 * i] = values[i]
        pairs[2 * i + 1] = i
    qsort(pairs, <size_t>n, 16, by_value)
    at[0] = n
    for i in range(1, n):
        if pairs[2 * i] >= 0 and pairs[2 * i] == pairs[2 * i - 2] and pairs[2 * i + 1] < at[0]:
            at[0] = pairs[2 * i + 1]
    free(pairs)
    return DISTINCT if at[0] == n else REPEATED


cdef int distinct_in_table(const int64_t* values, int64_t n, int64_t* at) noexcept nogil:
    # Open addressing.  Values that were chosen to collide are sorted instead.
    cdef int64_t size = 16, i, looks = PROBES_A_VALUE * n
    cdef int shift = 60, found = DISTINCT
    cdef uint64_t place
    cdef int64_t* table
    while size < 2 * n:
        size *= 2
        shift -= 1
    table = <int64_t*>calloc(<size_t>size, 8)
    if table == NULL:
        return NO_MEMORY
    for i in range(n):
        if values[i] < 0:
            continue
        place = (<uint64_t>values[i] * <uint64_t>0x9E3779B97F4A7C15) >> shift
        while table[place] != 0 and table[place] != values[i] + 1:
            place = (place + 1) & <uint64_t>(size - 1)
            looks -= 1
        if looks < 0:
            found = NO_MEMORY  # to be sorted
            break
        if table[place] != 0:
            at[0] = i
            found = REPEATED
            break
        table[place] = values[i] + 1
    free(table)
    return distinct_by_sorting(values, n, at) if looks < 0 else found


cdef int distinct(
    const int64_t* values, int64_t n, int64_t bound, int64_t* at, int64_t* before
) noexcept nogil:
    """Whether values from 0 on occur once each and are below bound: DISTINCT, REPEATED, OUTSIDE.

    Negative values do not count.  When REPEATED, at is the first place whose value stands before
    it too, and before the first of those places; that a value is outside is then not known.
    NO_MEMORY when there is none.
    """
    cdef uint64_t* words
    cdef int64_t i
    cdef int found
    if n == 0:
        return DISTINCT
    if ascending(values, n):
        return OUTSIDE if values[n - 1] >= bound else DISTINCT
    if map_fits(n, bound):
        words = <uint64_t*>calloc(<size_t>(bound // 64 + 1), 8)
        if words == NULL:
            return NO_MEMORY
        found = distinct_in_map(values, n, bound, words, at)
        free(words)
    else:
        if first_at_or_above(values, n, bound) >= 0:
            return OUTSIDE
        found = distinct_in_table(values, n, at)
    if found == REPEATED:
        for i in range(at[0]):
            if values[i] == values[at[0]]:
                before[0] = i
                break
    return found


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


def repeat(const int64_t[::1] values, int64_t bound):
    """(first place whose value >= 0 stands before it too, the first such place), or None.

    Raises ValueError where a value is not below bound.
    """
    cdef int64_t at = -1, before = -1
    cdef int found
    if values.shape[0] == 0:
        return None
    if first_at_or_above(&values[0], values.shape[0], bound) >= 0:
        raise ValueError(f"values: expected each < {bound}")
    with nogil:
        found = distinct(&values[0], values.shape[0], bound, &at, &before)
    if found == NO_MEMORY:
        raise MemoryError
    return (at, before) if found == REPEATED else None
