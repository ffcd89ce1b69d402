# SPDX-License-Identifier: Apache-2.0
"""Rows of one or two arrays written in place, all or none.

numpy's own assignments may run out of memory between two arrays, and between two of them Python
code may free what the next one writes.  Here the new rows are ready before the arrays are looked
at, and nothing but C runs from there on (see plan.pyx).
"""

from libc.stdint cimport int64_t
from libc.string cimport memcpy

from kvcore._core.arrays cimport (
    ON_DEVICE,
    READ_ONLY,
    View,
    ask,
    check_tensor,
    data_of,
    read_view,
    unchanged,
)
from kvcore._core import adopt
from kvcore.errors import fail

cdef enum:
    MAX_JOBS = 2

ctypedef struct rows_job:
    View view
    const int64_t* rows
    const char* values
    int64_t n_rows
    int64_t n_items


cdef int prepare(rows_job* job, str name, tuple shape, object rows, object values) except -1:
    cdef int64_t i, count = 1
    cdef int axis
    if shape != tuple([job.view.shape[axis] for axis in range(job.view.rank)]):
        raise adopt.changed(name)
    job.rows = <const int64_t*>data_of(rows)
    job.values = data_of(values)
    job.n_rows, job.n_items = values.shape
    for axis in range(job.view.rank - 1):
        count *= job.view.shape[axis]
    if job.view.rank < 1 or job.view.flags & (READ_ONLY | ON_DEVICE):
        fail(name, "an array of the host to write in place", "another one")
    if values.itemsize != job.view.itemsize or job.n_items > job.view.shape[job.view.rank - 1]:
        raise adopt.changed(name)
    for i in range(job.n_rows):
        if not 0 <= job.rows[i] < count:
            raise adopt.changed(name)
    return 0


cdef void write(const rows_job* job) noexcept nogil:
    cdef int last = job.view.rank - 1, axis
    cdef int64_t i, k, row, itemsize = job.view.itemsize
    cdef const char* value = job.values
    cdef char* place
    for i in range(job.n_rows):
        row = job.rows[i]
        place = job.view.data
        axis = last - 1
        while axis >= 0:
            place += row % job.view.shape[axis] * job.view.strides[axis]
            row = row // job.view.shape[axis]
            axis -= 1
        for k in range(job.n_items):
            memcpy(place + k * job.view.strides[last], value, <size_t>itemsize)
            value += itemsize


def write_rows(list jobs):
    """Write rows of arrays, each job (array, its argument's name, shape, rows, values).

    shape: which the array had when it was checked; one that has another now is refused.
    rows: int64 [n], indices over all axes but the last, in C order; values: [n, k], C-contiguous,
    of the array's item size; they become the first k items of those rows.  The last of a row that
    is named twice wins.  An error writes nothing.
    """
    cdef rows_job[MAX_JOBS] made
    cdef list keep = []
    cdef int i, n = len(jobs)
    if n > MAX_JOBS:
        raise ValueError(f"jobs: at most {MAX_JOBS}, got {n}")
    for i in range(n):
        obj, name, shape, rows, values = jobs[i]
        check_tensor(obj, name)
        read_view(obj, name, &made[i].view, keep)
        prepare(&made[i], name, shape, rows, values)
    # What was just read may have run code that changed what was read before.
    for i in range(n):
        if not ask(jobs[i][0], jobs[i][1], &made[i].view):
            raise adopt.changed(jobs[i][1])
    for i in range(n):
        if not unchanged(&made[i].view):
            raise adopt.changed(jobs[i][1])
    for i in range(n):
        write(&made[i])
