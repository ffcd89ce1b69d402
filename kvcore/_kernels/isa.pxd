# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int32_t, int64_t

cdef extern from "isa.h" nogil:
    ctypedef struct kv_isa:
        const char* name
        const char* path
        void (*stream)(char* dst, const char* src, int64_t n) noexcept nogil
        void (*row)(char* dst, const char* src, int64_t n) noexcept nogil
        void (*copy)(char* dst, const char* src, int64_t n) noexcept nogil
        void (*join)(
            char* dst, const char** toks, int64_t at, int64_t n, int64_t bytes
        ) noexcept nogil
        void (*run)(
            char* page, int64_t column_step, const char** toks, int64_t at, int64_t n,
            int64_t n_columns
        ) noexcept nogil
        void (*cells)(
            char** pages, int64_t page_at, int64_t column_step, const char** toks,
            const char** later, int64_t at, int64_t n, int64_t n_later, int64_t n_columns
        ) noexcept nogil
        void (*fence)() noexcept nogil
        int asks
        bint by_token

    void kv_will_write(const char* p)
    void kv_will_read(const char* p)
    void kv_cells(
        char** pages, int64_t page_at, int64_t column_step, const char** toks, int64_t at,
        int64_t n, int64_t n_columns
    )
    int64_t kv_order_by_slot(
        const int64_t* slots, int64_t n, int64_t num_slots, int32_t* order, int32_t* spare
    )

cdef const kv_isa* active() noexcept nogil
cdef const kv_isa* portable() noexcept nogil
cdef int64_t second_level_bytes() noexcept nogil
cdef int64_t streaming_threshold() noexcept nogil
