# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int64_t

from kvcore._kernels.lanes cimport kv_lane

# One loop over pieces: how many there are, and the byte step between them on either side.
ctypedef struct strided_loop:
    int64_t n
    int64_t tok_step
    int64_t page_step

cdef void scatter_strided(
    const kv_lane* lane, const int64_t* slots, const strided_loop* tokens, int n_tokens,
    const strided_loop* loops, int n_loops
) noexcept nogil
