# SPDX-License-Identifier: Apache-2.0
"""The time line of one decode step: a discrete-event model of its operations.

An operation is a row of four times (microseconds it keeps compute, device memory, the link to the
device and the link from it), of up to six operations before it, and of a time before which it is
not ready.  Ready operations are served in the order of their ready times, ties by row: one starts
when all of its resources are free, keeps each for its own time, and ends after the longest.
"""

from libc.stdint cimport int32_t, int64_t

ctypedef double[:, ::1] times_t
ctypedef int32_t[:, ::1] links_t

cdef enum:
    RESOURCES = 4
    BEFORE = 6


cdef inline bint comes_first(double[::1] ready, int32_t a, int32_t b) noexcept nogil:
    return ready[a] < ready[b] or (ready[a] == ready[b] and a < b)


cdef void push(int32_t[::1] heap, int64_t* size, double[::1] ready, int32_t node) noexcept nogil:
    cdef int64_t place = size[0], parent
    size[0] += 1
    while place > 0:
        parent = (place - 1) >> 1
        if not comes_first(ready, node, heap[parent]):
            break
        heap[place] = heap[parent]
        place = parent
    heap[place] = node


cdef int32_t pop(int32_t[::1] heap, int64_t* size, double[::1] ready) noexcept nogil:
    cdef int32_t first = heap[0], last
    cdef int64_t place = 0, child
    size[0] -= 1
    last = heap[size[0]]
    while True:
        child = 2 * place + 1
        if child >= size[0]:
            break
        if child + 1 < size[0] and comes_first(ready, heap[child + 1], heap[child]):
            child += 1
        if not comes_first(ready, heap[child], last):
            break
        heap[place] = heap[child]
        place = child
    heap[place] = last
    return first


def run(
    times_t shares,
    links_t before,
    double[::1] ready,
    double[::1] free_at,
    double[::1] start,
    double[::1] end,
    int32_t[:, ::1] work,
):
    """Serve all operations; returns how many were served (fewer: they wait for one another).

    shares:   [n, 4] microseconds of each resource; negative: not used.
    before:   [n, 6] rows that come before, -1 for none.
    ready:    [n] in: not ready before; out: when it was ready.
    free_at:  [4] in and out.  start, end: [n] out.
    work:     [3 + 6, n] scratch.
    """
    cdef int64_t n = ready.shape[0], size = 0, served = 0
    cdef int64_t i, k, link
    cdef int32_t node, other
    cdef double begin, longest
    cdef int32_t[::1] heap = work[0], pending = work[1], newest = work[2]
    with nogil:
        for i in range(n):
            newest[i] = -1  # link of the list of those that wait for it
            pending[i] = 0
        for i in range(n):
            for k in range(BEFORE):
                other = before[i, k]
                work[3 + k, i] = -1
                if other >= 0:
                    work[3 + k, i] = newest[other]
                    newest[other] = <int32_t>(i * BEFORE + k)
                    pending[i] += 1
        for i in range(n):
            if not pending[i]:
                push(heap, &size, ready, <int32_t>i)
        while size:
            node = pop(heap, &size, ready)
            served += 1
            begin = ready[node]
            for k in range(RESOURCES):
                if shares[node, k] >= 0 and free_at[k] > begin:
                    begin = free_at[k]
            longest = 0
            for k in range(RESOURCES):
                if shares[node, k] >= 0:
                    free_at[k] = begin + shares[node, k]
                    if shares[node, k] > longest:
                        longest = shares[node, k]
            start[node] = begin
            end[node] = begin + longest
            link = newest[node]
            while link >= 0:
                other = <int32_t>(link // BEFORE)
                if end[node] > ready[other]:
                    ready[other] = end[node]
                pending[other] -= 1
                if not pending[other]:
                    push(heap, &size, ready, other)
                link = work[3 + link % BEFORE, other]
    return served
