# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int32_t, int64_t

from kvcore._kernels.select cimport select_job

# A paged cache: slot s is row s % page of block s // page.
ctypedef struct paged_side:
    char* base
    int64_t page
    int64_t block_stride
    int64_t row_stride
    int64_t step           # between the pieces of a token
    bint flat              # block_stride == page * row_stride: no division
    int32_t shift          # log2(page), or -1
    const char* lo         # extent, for the debug build
    const char* hi

# One kind of data: the selection cache and the full cache it is read from.
ctypedef struct block_lane:
    paged_side here        # the selection cache
    paged_side full
    int64_t pieces         # of a token
    int64_t bytes          # of a piece
    bint packed_read       # a block's tokens follow each other on both sides
    bint packed_move       # within the selection

ctypedef struct blocks_job:
    select_job* plan
    const block_lane* lanes
    int n_lanes
    bint streaming
    bint plain             # set by run_blocks: blocks of every lane are one piece on both sides
    int64_t chunk_rows     # set by run_blocks

cdef void run_blocks(blocks_job* job, int n_threads) noexcept nogil
