# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int32_t, int64_t

from kvcore._kernels.isa cimport kv_isa
from kvcore._kernels.lanes cimport kv_lane

ctypedef struct rows_job:
    const kv_lane* lanes
    int n_lanes
    const int64_t* slots
    int64_t n_tokens
    int64_t num_slots
    bint gather            # copy from the paged side to the linear side
    const kv_isa* isa      # NULL: ordinary stores
    const int32_t* order   # tokens by slot, or NULL: as they come
    int64_t n_ordered      # tokens in the order
    int64_t chunk_tokens   # unordered: tokens a chunk
    int64_t n_parts        # repeated slots: chunk p takes the slots that hash to p

cdef void copy_tokens(
    const kv_lane* lane, const int64_t* slots, int64_t begin, int64_t end, bint gather,
    const kv_isa* isa
) noexcept nogil
cdef void run_rows(rows_job* job, int n_threads, bint repeats) noexcept nogil
