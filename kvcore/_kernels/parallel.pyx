# SPDX-License-Identifier: Apache-2.0
"""The worker pool, and the only module that holds it: kernels reach it through run_chunks."""

from libc.stdint cimport int64_t

cdef extern from "parallel.h" nogil:
    void kv_parallel_run(body_t body, void* context, int64_t n_chunks, int n_threads)
    void kv_pool_start()
    int kv_pool_workers()


cdef void run_chunks(body_t body, void* context, int64_t n_chunks, int n_threads) noexcept nogil:
    kv_parallel_run(body, context, n_chunks, n_threads)


def num_workers() -> int:
    """Worker threads this process has started (they are started on first need)."""
    return kv_pool_workers()


kv_pool_start()
