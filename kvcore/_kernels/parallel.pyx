# SPDX-License-Identifier: Apache-2.0
"""The worker pool, and the only module that holds it: kernels reach it through run_chunks.

A call that moves fewer than parallel_bytes() bytes stays on its caller, whatever number of threads
it may use, so that it needs no second core on a busy machine.  The default is the size of the
second-level cache, and at least 2 MiB.
"""

from libc.stdint cimport int64_t

from kvcore._kernels.isa cimport second_level_bytes

cdef extern from "parallel.h" nogil:
    void kv_parallel_run(body_t body, void* context, int64_t n_chunks, int n_threads)
    void kv_pool_start()
    int kv_pool_workers()

cdef enum:
    LEAST_BYTES = 2097152

cdef int64_t threshold = 0


cdef int64_t parallel_threshold() noexcept nogil:
    return threshold


cdef void run_chunks(body_t body, void* context, int64_t n_chunks, int n_threads) noexcept nogil:
    kv_parallel_run(body, context, n_chunks, n_threads)


def num_workers() -> int:
    """Worker threads this process has started (they are started on first need)."""
    return kv_pool_workers()


def parallel_bytes():
    """Bytes a call must move to use a second thread."""
    return threshold


def set_parallel_bytes(count=None):
    """Move the border between one thread and several; None is the default again."""
    global threshold
    if count is None:
        count = max(LEAST_BYTES, second_level_bytes())
    elif isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < 1 << 62:
        raise ValueError(f"expected a number of bytes from 0 to 2**62, got {count!r}")
    threshold = count


set_parallel_bytes()
kv_pool_start()
