# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int64_t

from kvcore._core.plan cimport Plan, Spec
from kvcore._kernels.lanes cimport kv_lane

ctypedef struct lane_plan:
    int tok_arg
    int page_arg
    int64_t tok_offset
    kv_lane lane

cdef class PagedSpec(Spec):
    cdef lane_plan lanes[2]
    cdef int n_lanes
    cdef readonly int64_t num_tokens
    cdef readonly int64_t num_slots
    cdef readonly int64_t token_bytes
    cdef int64_t total_bytes           # of all tokens
    cdef bint gathers
    cdef object words

    cdef int load(self, Plan plan) except -1
    cdef void run_lanes(self, Plan plan, int64_t tok_offset, int64_t page_offset) noexcept
    cdef bint may_repeat(self, Plan plan) noexcept nogil

cdef class SlotSpec(PagedSpec):
    cdef int slot_arg

    cdef int look_for_repeats(self, Plan plan, const int64_t* slots) except -1
