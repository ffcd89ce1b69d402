# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int64_t

from kvcore._core.plan cimport Plan, Spec
from kvcore._kernels.windows cimport window_lane, windows_job

# What one execution of the plan moves, counted in rows and tokens of one lane.
ctypedef struct totals_t:
    int64_t rows     # written, means included
    int64_t tokens   # read

cdef class WindowsSpec(Spec):
    cdef window_lane lanes[2]
    cdef int tok_arg[2]
    cdef int page_arg[2]
    cdef int n_lanes
    cdef int slot_arg
    cdef int window_arg
    cdef int offset_arg          # below 0: none is given, as the Alibi rule has no offsets
    cdef int length_arg
    cdef int kind                # below 0: no means are made
    cdef readonly int64_t batch
    cdef readonly int64_t num_heads
    cdef readonly int64_t num_tokens
    cdef readonly int64_t longest     # S of padded batches; below 0: batches lie end to end
    cdef readonly int64_t num_slots
    cdef readonly int64_t token_bytes
    cdef object words

    cdef bint empty(self) noexcept
    cdef void point(self, Plan plan, windows_job* job) noexcept
    cdef int64_t scratch_numbers(self) noexcept
    cdef void last_run(self, Plan plan, windows_job* job) noexcept
    cdef int load(self, Plan plan, totals_t* totals) except -1
    cdef int look_for_repeats(self, Plan plan) except -1
