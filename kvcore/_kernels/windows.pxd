# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int64_t

from kvcore._kernels.lanes cimport kv_lane

# kv_add and kv_mean of means.h, which only windows.pyx may include: it holds tables.
ctypedef void (*add_t)(
    float* sums, const char* src, int64_t step, int64_t n_tokens, int64_t items, int64_t ahead
) noexcept nogil
ctypedef void (*mean_t)(char* out, const float* sums, int64_t items, int64_t count) noexcept nogil

# One cache with its source. Of kv_lane: tok (batch 0, token 0, head 0, item 0), tok_stride, the
# page side, extents.
ctypedef struct window_lane:
    kv_lane lane
    int64_t start_stride  # bytes from one start to the next
    int64_t head_stride
    int64_t items         # of one row
    int64_t item_bytes
    int64_t tok_step      # bytes from item to item on either side
    int64_t page_step

# Run i = b * num_heads + h writes tokens [0, heads[i]), then one mean of [heads[i], tails[i]) where
# means are made and that is not empty, then [tails[i], lengths[b]), to consecutive slots from
# slots[i] on; a negative slot writes nothing. Token t of batch b lies at start starts[b].
ctypedef struct windows_job:
    window_lane lanes[2]
    int n_lanes
    int64_t batch
    int64_t num_heads
    const int64_t* slots
    const int64_t* heads
    const int64_t* tails
    const int64_t* lengths
    const int64_t* starts
    add_t add             # NULL: no means
    mean_t mean
    bint stream           # store past the CPU's caches
    # set by run_windows: how the work is divided
    int64_t group         # heads that go through the tokens together
    int64_t tile          # tokens of one head before the next head's turn
    int64_t n_groups
    int64_t n_parts       # parts of a row, each of at most MAX_SUMS items

cdef void pick_mean(windows_job* job, int kind) noexcept nogil
cdef int runs_apart(
    const windows_job* job, int64_t num_slots, int64_t* pairs, int64_t* at, int64_t* before
) noexcept nogil
cdef void run_windows(windows_job* job, int n_threads, int64_t* pairs) noexcept nogil
