# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int32_t, int64_t

from kvcore._kernels.isa cimport kv_isa
from kvcore._kernels.lanes cimport kv_lane

cdef void copy_tiles(
    const kv_lane* lane, const int64_t* slots, const int32_t* order, int64_t begin, int64_t end,
    const kv_isa* isa
) noexcept nogil
