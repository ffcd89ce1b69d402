# SPDX-License-Identifier: Apache-2.0
"""The bytes of a device pool: serve a selection, install what was read, store new rows.

Addresses come from the caller, who has checked every extent; the numbers in ``source``,
``target`` and ``host_rows`` come from the pool's state (pool_books) and from ``resolve``.
"""

from libc.stdint cimport int32_t, int64_t, uintptr_t

from kvcore._kernels.parallel cimport run_chunks
from kvcore._kernels.lanes cimport kv_copy, kv_inside

cdef enum:
    NONE = -1

ctypedef struct rows_of:
    char* base
    int64_t stride
    const char* low
    const char* high

ctypedef struct move_job:
    rows_of out
    rows_of pool
    const char* host
    int64_t host_block
    int64_t host_row
    int64_t block_size
    const char* host_low
    const char* host_high
    int64_t row_bytes
    const int32_t* place      # source of a serve, target of an install
    const int64_t* host_rows
    int64_t n
    int64_t chunk
    bint install


cdef void move_chunk(void* context, int64_t chunk) noexcept nogil:
    cdef move_job* job = <move_job*>context
    cdef int64_t i, row, end = (chunk + 1) * job.chunk
    cdef char* out
    cdef char* held
    cdef const char* full
    if end > job.n:
        end = job.n
    for i in range(chunk * job.chunk, end):
        if job.place[i] < NONE or (job.install and job.place[i] < 0):
            continue
        out = job.out.base + i * job.out.stride
        kv_inside(job.out.low, job.out.high, out, job.row_bytes, "out")
        if job.place[i] >= 0:
            held = job.pool.base + job.place[i] * job.pool.stride
            kv_inside(job.pool.low, job.pool.high, held, job.row_bytes, "pool")
            if job.install:
                kv_copy(held, out, job.row_bytes)
            else:
                kv_copy(out, held, job.row_bytes)
        else:
            row = job.host_rows[i]
            full = (
                job.host + row // job.block_size * job.host_block
                + row % job.block_size * job.host_row
            )
            kv_inside(job.host_low, job.host_high, full, job.row_bytes, "full")
            kv_copy(out, full, job.row_bytes)


cdef void run(move_job* job, int n_threads) noexcept nogil:
    if n_threads <= 1:
        job.chunk = job.n
        move_chunk(job, 0)
    else:
        job.chunk = (job.n + 4 * n_threads - 1) // (4 * n_threads)
        run_chunks(move_chunk, job, (job.n + job.chunk - 1) // job.chunk, n_threads)


cdef void extent(rows_of* rows, int64_t count, int64_t row_bytes) noexcept nogil:
    rows.low = rows.base
    rows.high = rows.base + (count - 1) * rows.stride + row_bytes


def serve(
    uintptr_t out, int64_t out_stride, uintptr_t pool, int64_t pool_stride, int64_t capacity,
    uintptr_t full, int64_t num_blocks, int64_t block_size, int64_t block_stride,
    int64_t row_stride, int64_t row_bytes, const int32_t[::1] source,
    const int64_t[::1] host_rows, int n_threads=1,
):
    """Copy row i from the pool's place source[i], or from the full cache where that is -1.

    Strides are bytes, never negative; the full cache's row r is row r % block_size of block
    r // block_size.  Positions whose source is below -1 are not written.
    """
    cdef move_job job
    job.n = source.shape[0]
    if job.n == 0 or row_bytes == 0:
        return
    job.out.base, job.out.stride = <char*>out, out_stride
    job.pool.base, job.pool.stride = <char*>pool, pool_stride
    job.row_bytes = row_bytes
    extent(&job.out, job.n, row_bytes)
    extent(&job.pool, capacity, row_bytes)
    job.host = <const char*>full
    job.block_size = block_size
    job.host_block = block_stride
    job.host_row = row_stride
    job.host_low = job.host
    job.host_high = (
        job.host + (num_blocks - 1) * block_stride + (block_size - 1) * row_stride + row_bytes
    )
    job.place = &source[0]
    job.host_rows = &host_rows[0]
    job.install = False
    with nogil:
        run(&job, n_threads)


def install(
    uintptr_t out, int64_t out_stride, uintptr_t pool, int64_t pool_stride, int64_t capacity,
    int64_t row_bytes, const int32_t[::1] target, int n_threads=1,
):
    """Copy served row i to the pool's place target[i]; not where that is negative."""
    cdef move_job job
    job.n = target.shape[0]
    if job.n == 0 or row_bytes == 0:
        return
    job.out.base, job.out.stride = <char*>out, out_stride
    job.pool.base, job.pool.stride = <char*>pool, pool_stride
    job.row_bytes = row_bytes
    extent(&job.out, job.n, row_bytes)
    extent(&job.pool, capacity, row_bytes)
    job.host = NULL
    job.host_rows = NULL
    job.block_size = 1
    job.place = &target[0]
    job.install = True
    with nogil:
        run(&job, n_threads)


def store(
    uintptr_t rows, int64_t stride, int64_t capacity, uintptr_t full, int64_t num_blocks,
    int64_t block_size, int64_t block_stride, int64_t row_stride, int64_t row_bytes,
    const int32_t[::1] source, const int64_t[::1] host_rows,
):
    """Copy row source[i] of the rows on the device over the full cache's row host_rows[i]."""
    cdef int64_t i, row
    cdef const char* held
    cdef char* there
    cdef rows_of held_rows, full_rows
    full_rows.base, full_rows.low = <char*>full, <const char*>full
    full_rows.high = (
        full_rows.low + (num_blocks - 1) * block_stride + (block_size - 1) * row_stride + row_bytes
    )
    held_rows.base, held_rows.stride = <char*>rows, stride
    extent(&held_rows, capacity, row_bytes)
    with nogil:
        for i in range(source.shape[0]):
            row = host_rows[i]
            held = held_rows.base + source[i] * stride
            there = (
                full_rows.base + row // block_size * block_stride + row % block_size * row_stride
            )
            kv_inside(held_rows.low, held_rows.high, held, row_bytes, "rows")
            kv_inside(full_rows.low, full_rows.high, there, row_bytes, "full")
            kv_copy(there, held, row_bytes)
