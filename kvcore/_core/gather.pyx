# SPDX-License-Identifier: Apache-2.0
"""GatherPaKvCache: the tokens of each request from a paged cache, one after the other."""

from libc.stdint cimport int64_t

from kvcore._core.paged cimport PagedSpec
from kvcore._core.plan cimport Plan
from kvcore._kernels.scan cimport load_indices


cdef class GatherSpec(PagedSpec):
    """One slot per token, expanded from block tables and lengths.

    totals: the lengths are running totals [batch + 1].  words(rule, index, seen, other) makes the
    error of a value.
    """

    cdef int table_arg, length_arg, offset_arg  # offset_arg -1: no offsets
    cdef int64_t batch, columns, blocks, block_size
    cdef bint totals

    def __init__(self, outputs, lanes, dict sizes, index_args, words, warnings=(), soc=None):
        # sizes: tokens, batch, columns, blocks, block_size, totals.  index_args: tables, lengths,
        # offsets; -1 without these.
        blocks, block_size = sizes["blocks"], sizes["block_size"]
        PagedSpec.__init__(
            self, outputs, lanes, sizes["tokens"], max(block_size, 1),
            min(blocks * block_size, 2**63 - 1), words, True, warnings, soc
        )
        self.batch = sizes["batch"]
        self.columns = sizes["columns"]
        self.blocks = blocks
        self.block_size = block_size
        self.totals = sizes["totals"]
        self.table_arg, self.length_arg, self.offset_arg = index_args

    cdef int64_t stored(self) noexcept:
        # Tokens without bytes need no slot; there may be any number of them.
        return self.num_tokens if self.token_bytes else 0

    cdef int load(self, Plan plan) except -1:
        cdef int64_t n_slots = self.stored()
        cdef int64_t n_lengths = self.batch + (1 if self.totals else 0)
        cdef int64_t* slots = plan.reserve(n_slots + n_lengths + self.batch)
        cdef int64_t* lengths = slots + n_slots
        cdef int64_t* offsets = lengths + n_lengths
        cdef int64_t b, n, total = 0
        load_indices(plan.views[self.length_arg].data, plan.views[self.length_arg].strides[0],
                     plan.views[self.length_arg].itemsize, n_lengths, lengths)
        if self.offset_arg >= 0:
            load_indices(plan.views[self.offset_arg].data, plan.views[self.offset_arg].strides[0],
                         plan.views[self.offset_arg].itemsize, self.batch, offsets)
        if self.totals and lengths[0] != 0:
            raise self.words("start", 0, lengths[0], 0)
        for b in range(self.batch):
            if self.totals:
                if lengths[b + 1] < lengths[b]:
                    raise self.words("decrease", b + 1, lengths[b + 1], lengths[b])
                n = lengths[b + 1] - lengths[b]
            else:
                n = lengths[b]
                if n < 0:
                    raise self.words("length", b, n, 0)
            if n > self.num_tokens - total:
                raise self.words("sum", b, n, total)
            if n > 0:
                self.expand(
                    plan, b, 0 if self.offset_arg < 0 else offsets[b], n,
                    slots + total if n_slots else NULL,
                )
            total += n
        if total != self.num_tokens:
            raise self.words("sum", self.batch, 0, total)
        return 0

    cdef int expand(
        self, Plan plan, int64_t b, int64_t offset, int64_t n, int64_t* slots
    ) except -1:
        # slots: n of them, or NULL to check only.
        cdef const char* row = plan.views[self.table_arg].data \
            + b * plan.views[self.table_arg].strides[0]
        cdef int64_t step = plan.views[self.table_arg].strides[1]
        cdef int64_t column, last, block, first, j, count
        if offset < 0:
            raise self.words("offset", b, offset, 0)
        if self.block_size == 0:
            raise self.words("empty", b, n, 0)
        column = offset // self.block_size
        last = column + (n - 1) // self.block_size
        if last >= self.columns:
            raise self.words("column", b, last, self.columns)
        while n > 0:
            load_indices(row + column * step, step, plan.views[self.table_arg].itemsize, 1, &block)
            if block < 0 or block >= self.blocks:
                raise self.words("block", b, block, column)
            count = self.block_size if n > self.block_size else n
            if slots != NULL:
                first = block * self.block_size
                for j in range(count):
                    slots[j] = first + j
                slots += count
            n -= count
            column += 1
        return 0

    cdef object execute(self, Plan plan):
        self.load(plan)
        plan.announce()
        if self.num_tokens == 0 or self.token_bytes == 0:
            plan.copied_bytes = 0
            plan.copied_pieces = 0
            plan.last = True
        else:
            self.run_lanes(plan, 0, 0)
        return None

    cdef object check_values(self, Plan plan):
        self.load(plan)
        plan.announce()

    def accesses(self, Plan plan):
        if self.num_tokens == 0 or self.token_bytes == 0:
            found = [], []
        else:
            found = self.row_accesses(plan, 0)
        self.add_extent(plan, found[0], self.table_arg)
        self.add_extent(plan, found[0], self.length_arg)
        self.add_extent(plan, found[0], self.offset_arg)
        return found
