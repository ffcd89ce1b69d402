# SPDX-License-Identifier: Apache-2.0
"""Rows of a selection's table and status that change places, and entries that expire.

numpy's own assignments may run out of memory between two arrays, and Python code may free one of
them between two.  Here all memory is taken before the arrays are looked at, and nothing but C runs
from there on (see plan.pyx), so that everything is written or nothing.
"""

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from kvcore._core import adopt
from kvcore._core.arrays cimport View, ask, check_tensor, data_of, read_view, unchanged

cdef enum:
    MAX_ARRAYS = 2


cdef int look(View* view, object obj, str name, tuple shape, list keep) except -1:
    """Read an array that was checked before, and refuse it if it has another shape now."""
    check_tensor(obj, name)
    read_view(obj, name, view, keep)
    if shape != tuple([view.shape[axis] for axis in range(view.rank)]):
        raise adopt.changed(name)
    return 0


cdef int look_again(View* views, list given) except -1:
    # Reading one array may have run code that changed another.
    cdef int i, n = len(given)
    for i in range(n):
        if not ask(given[i][0], given[i][1], &views[i]):
            raise adopt.changed(given[i][1])
    for i in range(n):
        if not unchanged(&views[i]):
            raise adopt.changed(given[i][1])
    return 0


cdef char* row_at(const View* view, int64_t row) noexcept:
    """Where a row begins: an index over all axes but the last, in C order."""
    cdef char* place = view.data
    cdef int axis = view.rank - 2
    while axis >= 0:
        place += row % view.shape[axis] * view.strides[axis]
        row = row // view.shape[axis]
        axis -= 1
    return place


cdef void take_row(const View* view, int64_t row, char* out) noexcept:
    cdef const char* place = row_at(view, row)
    cdef int64_t k, step = view.strides[view.rank - 1]
    for k in range(view.shape[view.rank - 1]):
        memcpy(out + k * view.itemsize, place + k * step, <size_t>view.itemsize)


cdef void put_row(const View* view, int64_t row, const char* values) noexcept:
    cdef char* place = row_at(view, row)
    cdef int64_t k, step = view.strides[view.rank - 1]
    for k in range(view.shape[view.rank - 1]):
        memcpy(place + k * step, values + k * view.itemsize, <size_t>view.itemsize)


def move_rows(list given, object old):
    """Row i of each array becomes what row old[i] was, all arrays or none.

    given: (array, its argument's name, the shape it was checked with), one or two; old: int64 [n],
    a numpy array of the caller's, with the row each of the first n rows comes from.
    """
    cdef View[MAX_ARRAYS] views
    cdef int64_t[MAX_ARRAYS] row_bytes
    cdef char* held
    cdef char* at
    cdef const int64_t* rows = <const int64_t*>data_of(old)
    cdef int64_t i, n = old.size, total = 0
    cdef int k, count = len(given)
    cdef list keep = []
    if not 0 < count <= MAX_ARRAYS:
        raise ValueError(f"given: expected one or two arrays, got {count}")
    for k in range(count):
        obj, name, shape = given[k]
        look(&views[k], obj, name, shape, keep)
        row_bytes[k] = views[k].shape[views[k].rank - 1] * views[k].itemsize
        total += n * row_bytes[k]
    held = <char*>malloc(<size_t>(total if total > 0 else 1))
    if held == NULL:
        raise MemoryError(f"{n} rows do not fit memory")
    try:
        look_again(views, given)
        at = held
        for k in range(count):
            for i in range(n):
                take_row(&views[k], rows[i], at)
                at += row_bytes[k]
        at = held
        for k in range(count):
            for i in range(n):
                put_row(&views[k], i, at)
                at += row_bytes[k]
    finally:
        free(held)


def expire_rows(object status, str name, tuple shape, object rows, object limits):
    """Put -1 for every id from limits[i] on in row rows[i] of a status; returns how many.

    shape: which the status had when it was checked; rows, limits: int64 [n], numpy arrays of the
    caller's.  The last item of a row is no id.
    """
    cdef View view
    cdef const int64_t* at = <const int64_t*>data_of(rows)
    cdef const int64_t* limit = <const int64_t*>data_of(limits)
    cdef int64_t i, _k, value, minus = -1, expired = 0
    cdef int32_t narrow
    cdef char* place
    cdef list keep = []
    look(&view, status, name, shape, keep)
    look_again(&view, [(status, name)])
    for i in range(rows.size):
        place = row_at(&view, at[i])
        for _k in range(view.shape[view.rank - 1] - 1):
            if view.itemsize == 8:
                memcpy(&value, place, 8)
            else:
                memcpy(&narrow, place, 4)
                value = narrow
            if value >= limit[i]:
                # -1 of either size is all ones.
                memcpy(place, &minus, <size_t>view.itemsize)
                expired += 1
            place += view.strides[view.rank - 1]
    return expired
