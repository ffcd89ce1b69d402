# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int64_t

ctypedef void (*body_t)(void* context, int64_t chunk) noexcept nogil

cdef int64_t parallel_threshold() noexcept nogil
cdef void run_chunks(body_t body, void* context, int64_t n_chunks, int n_threads) noexcept nogil
