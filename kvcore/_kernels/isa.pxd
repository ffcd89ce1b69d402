# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int64_t

cdef extern from "isa.h" nogil:
    ctypedef struct kv_isa:
        const char* name
        void (*stream)(char* dst, const char* src, int64_t n) noexcept nogil
        void (*tile)(
            char* page, int64_t column_step, const char* tok, int64_t tok_stride,
            int64_t n_tokens, int64_t n_columns
        ) noexcept nogil
        void (*fence)() noexcept nogil

cdef const kv_isa* active() noexcept nogil
cdef const kv_isa* portable() noexcept nogil
cdef int64_t streaming_threshold() noexcept nogil
