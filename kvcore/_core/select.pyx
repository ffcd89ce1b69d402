# SPDX-License-Identifier: Apache-2.0
"""GatherSelectionKvCache: plan every row, check every row, then move.

What a run plans lies in the plan's scratch memory and stays there, so that touched() can tell
afterwards which rows were read and written.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memset

import numpy

from kvcore._core import selected
from kvcore._core.plan cimport Plan, Spec
from kvcore._core.spans cimport Spans, spans_for
from kvcore._kernels.blocks cimport block_lane, blocks_job, paged_side, run_blocks
from kvcore._kernels.isa cimport streaming_threshold
from kvcore._kernels.scan cimport load_indices
from kvcore._kernels.select cimport (
    BEYOND,
    ENTRY,
    FULL_ENTRY,
    LENGTH,
    NO_FAULT,
    EXCHANGE,
    FROM_LAST,
    NO_SWAP,
    READ,
    TO_LAST,
    divisor,
    divisor_of,
    index_rows,
    place_slot,
    plan_rows,
    scratch_bytes,
    select_job,
    select_op,
    select_row,
)

cdef enum:
    PLAN_BYTES = 64      # what planning one id is worth, in bytes copied
    BITMAP_WORDS = 64    # a bitmap of the selection's blocks may have so many bytes an entry

cdef dict RULES = {
    ENTRY: "entry",
    BEYOND: "beyond",
    FULL_ENTRY: "full entry",
    LENGTH: "length",
}


cdef class SelectSpec(Spec):
    """sizes: those of select_job by name; lanes: selected.Lane; words words the error of a value.

    index_args: topk ids, status, table, full table, kv lengths, q lengths, in this order, each
    with (argument, byte stride of a request, of a step, of an entry).
    words(rule, row or request, index, seen, other) makes the exception.
    """

    cdef int64_t n_rows, batch, steps, topk, block, table_rows
    cdef int64_t blocks, page, full_blocks, full_page, full_columns, token_bytes
    cdef divisor per_page, per_full
    cdef bint ordered, cumulative
    cdef int args[6]
    cdef index_rows arrays[4]
    cdef int64_t length_steps[2]
    cdef block_lane lanes[2]
    cdef int lane_args[2][2]
    cdef int n_lanes
    cdef object words

    def __init__(self, outputs, dict sizes, lanes, index_args, words, warnings=(), soc=None):
        Spec.__init__(self, outputs, warnings, soc)
        self.n_rows = sizes["rows"]
        self.batch = sizes["batch"]
        self.steps = sizes["steps"]
        self.topk = sizes["topk"]
        self.block = sizes["block"]
        self.table_rows = sizes["table_rows"]
        self.blocks = sizes["blocks"]
        self.page = sizes["page"]
        self.full_blocks = sizes["full_blocks"]
        self.full_page = sizes["full_page"]
        self.full_columns = sizes["full_columns"]
        self.per_page = divisor_of(self.page // self.block)
        self.per_full = divisor_of(self.full_page // self.block)
        self.ordered = self.block > 1 or self.topk <= 32
        self.cumulative = sizes["cumulative"]
        self.words = words
        for i, (argument, outer, inner, stride, itemsize) in enumerate(index_args):
            self.args[i] = argument
            if i < 4:
                self.arrays[i].outer = outer
                self.arrays[i].inner = inner
                self.arrays[i].stride = stride
                self.arrays[i].itemsize = itemsize
            else:
                self.length_steps[i - 4] = stride
        self.n_lanes = len(lanes)
        self.token_bytes = 0
        for i, lane in enumerate(lanes):
            self.token_bytes += lane.pieces * lane.bytes
            self.lane_args[i][0] = lane.here_arg
            self.lane_args[i][1] = lane.full_arg
            fill_lane(&self.lanes[i], lane, self.page, self.full_page)

    cdef int64_t chunks(self, int threads) noexcept:
        # Each chunk of rows has working memory of its own.
        if threads <= 1 or self.n_rows <= 1:
            return 1
        return self.n_rows if self.n_rows < 2 * threads else 2 * threads

    cdef int64_t words_needed(self, int64_t n_chunks) noexcept:
        cdef int64_t entries = self.n_rows * self.topk
        return (
            2 * self.batch
            + self.n_rows * <int64_t>(sizeof(select_row) // 8)
            + entries * <int64_t>(sizeof(select_op) // 8)
            + 2 * entries
            + n_chunks * (scratch_bytes(self.topk) // 8) + 8
        )

    cdef int set_up(self, Plan plan, select_job* job, int threads) except -1:
        """Carve plan.scratch and read the lengths."""
        cdef int64_t n_chunks = self.chunks(threads)
        cdef int64_t* memory = plan.reserve(self.words_needed(n_chunks))
        cdef int64_t* kv = memory
        cdef int64_t* q = memory + self.batch
        cdef int i
        self.lay_out(plan, job)
        job.chunk_rows = (self.n_rows + n_chunks - 1) // n_chunks
        job.scratch_bytes = scratch_bytes(self.topk)
        for i in range(2):
            load_indices(
                plan.views[self.args[4 + i]].data, self.length_steps[i],
                plan.views[self.args[4 + i]].itemsize, self.batch, kv if i == 0 else q,
            )
        job.kv = kv
        job.q = q
        self.read_query_lengths(q)
        return 0

    cdef void lay_out(self, Plan plan, select_job* job) noexcept:
        # Where everything lies in plan.scratch; the same before and after a run.
        cdef int64_t entries = self.n_rows * self.topk
        cdef char* memory = <char*>(plan.scratch + 2 * self.batch)
        job.topk_ids = self.arrays[0]
        job.status = self.arrays[1]
        job.table = self.arrays[2]
        job.full_table = self.arrays[3]
        job.topk_ids.data = plan.views[self.args[0]].data
        job.status.data = plan.views[self.args[1]].data
        job.table.data = plan.views[self.args[2]].data
        job.full_table.data = plan.views[self.args[3]].data
        job.n_rows = self.n_rows
        job.steps = self.steps
        job.topk = self.topk
        job.block = self.block
        job.blocks = self.blocks
        job.page = self.page
        job.full_blocks = self.full_blocks
        job.full_page = self.full_page
        job.full_columns = self.full_columns
        job.per_page = self.per_page
        job.per_full = self.per_full
        job.ordered = self.ordered
        job.has_bytes = self.token_bytes > 0
        job.rows = <select_row*>memory
        memory += self.n_rows * <int64_t>sizeof(select_row)
        job.ops = <select_op*>memory
        memory += entries * <int64_t>sizeof(select_op)
        job.used = <int64_t*>memory
        memory += entries * 8
        job.ids = memory
        memory += entries * 8
        # Whole lines, so that two chunks never write one.
        job.scratch = <char*>((<size_t>memory + 63) & ~<size_t>63)

    cdef int read_query_lengths(self, int64_t* q) except -1:
        cdef int64_t b, total, before = 0
        for b in range(self.batch):
            if self.cumulative:
                total = q[b]
                if total < before:
                    raise self.words("decrease" if b else "negative", b, 0, total, before)
                q[b] = total - before
                before = total
            elif q[b] < 0:
                raise self.words("negative", b, 0, q[b], 0)
            if q[b] > self.steps:
                raise self.words("long", b, 0, q[b], self.steps)
        return 0

    cdef int check(self, Plan plan, select_job* job) except -1:
        """Plan every row, and raise the first fault in row order."""
        cdef int threads = plan.threads_for(self.n_rows * self.topk * PLAN_BYTES)
        cdef int64_t r
        self.set_up(plan, job, threads)
        with nogil:
            plan_rows(job, threads)
        for r in range(self.n_rows):
            if job.rows[r].fault != NO_FAULT:
                raise self.words(
                    RULES[job.rows[r].fault], r, job.rows[r].fault_at, job.rows[r].fault_seen, 0
                )
        self.check_apart(job)
        return 0

    cdef int check_apart(self, select_job* job) except -1:
        """Entries in use name a selection block each."""
        cdef int64_t r, used = 0, repeated = -1
        for r in range(self.n_rows):
            used += job.rows[r].n_used
        if used < 2:
            return 0
        if self.blocks // 8 <= BITMAP_WORDS * used:
            bits = bytearray(self.blocks // 8 + 1)
            repeated = first_repeat_in_bitmap(job, bits)
        else:
            size = 16
            while size < 2 * used:
                size *= 2
            table = numpy.full(size, -1, numpy.int64)
            repeated = first_repeat_in_table(job, table)
        if repeated < 0:
            return 0
        raise self.shared_entry(job, repeated)

    cdef object shared_entry(self, select_job* job, int64_t repeated):
        # Says which two rows; slow, for the message only.
        cdef int64_t r, i, entry, first = -1
        entry = job.used[repeated]
        for r in range(self.n_rows):
            for i in range(job.rows[r].n_used):
                if job.used[r * self.topk + i] == entry:
                    first = r
                    break
            if first >= 0:
                break
        return self.words("shared", repeated // self.topk, 0, entry, first)

    cdef object execute(self, Plan plan):
        cdef select_job job
        cdef blocks_job move
        cdef block_lane lanes[2]
        cdef int64_t r, i, tokens = 0
        cdef int used = 0
        cdef int threads
        cdef int32_t[::1] lengths
        returned = numpy.zeros(self.table_rows, numpy.int32)
        if self.n_rows:
            self.check(plan, &job)
            for i in range(self.n_lanes):
                lanes[used] = self.lanes[i]
                attach(plan, &lanes[used].here, self.lane_args[i][0])
                attach(plan, &lanes[used].full, self.lane_args[i][1])
                used += 1
            lengths = returned
            for r in range(self.n_rows):
                tokens += copied_tokens(&job, r)
                lengths[r] = <int32_t>job.rows[r].length
            move.plan = &job
            move.lanes = lanes
            move.n_lanes = used
            move.streaming = tokens * self.token_bytes >= streaming_threshold()
            threads = plan.threads_for(tokens * self.token_bytes)
            with nogil:
                run_blocks(&move, threads)
        else:
            self.check_lengths(plan)
        plan.last = True
        if plan.extra is not None:
            plan.extra.update(self.stats(plan))
        return returned

    cdef int check_lengths(self, Plan plan) except -1:
        # No rows: lengths are checked all the same.
        cdef int64_t* q = plan.reserve(self.batch)
        load_indices(plan.views[self.args[5]].data, self.length_steps[1],
                     plan.views[self.args[5]].itemsize, self.batch, q)
        return self.read_query_lengths(q)

    cdef object check_values(self, Plan plan):
        cdef select_job job
        if self.n_rows:
            self.check(plan, &job)
        else:
            self.check_lengths(plan)

    def stats(self, Plan plan):
        """The stats dict of the last run: per-row int64 arrays."""
        cdef select_job job
        cdef int64_t[:, ::1] table
        cdef int64_t r
        found = numpy.zeros((7, self.n_rows), numpy.int64)
        if self.n_rows:
            self.lay_out(plan, &job)
            table = found
            for r in range(self.n_rows):
                table[0, r] = job.rows[r].reused
                table[1, r] = job.rows[r].moved
                table[2, r] = job.rows[r].refreshed
                table[3, r] = job.rows[r].read
                table[4, r] = job.rows[r].swapped
                table[5, r] = (job.rows[r].read + job.rows[r].refreshed) * self.token_bytes
                table[6, r] = job.rows[r].moved * self.token_bytes
        return dict(zip(selected.STATS, found, strict=True))

    def workspace_size(self, Plan plan):
        if not self.n_rows:
            return 8 * self.batch
        threads = plan.threads_for(self.n_rows * self.topk * PLAN_BYTES)
        return 8 * self.words_needed(self.chunks(threads))

    def most_bytes(self, Plan plan):
        return int(self.n_rows) * self.topk * self.block * self.token_bytes

    def moved(self, Plan plan):
        """(bytes, pieces) of the last run; a block whose tokens lie side by side is one piece."""
        cdef select_job job
        cdef int64_t r, tokens = 0, pieces = 0
        cdef int i
        if self.n_rows:
            self.lay_out(plan, &job)
            for r in range(self.n_rows):
                tokens += copied_tokens(&job, r)
                for i in range(self.n_lanes):
                    pieces += copied_pieces(&job, r, &self.lanes[i])
        return tokens * self.token_bytes, pieces

    def accesses(self, Plan plan):
        cdef select_job job
        cdef block_lane lane
        cdef int i
        reads, writes = [], []
        if self.n_rows:
            self.lay_out(plan, &job)
            for i in range(self.n_lanes):
                lane = self.lanes[i]
                if lane.pieces == 0 or lane.bytes == 0:
                    continue
                attach(plan, &lane.here, self.lane_args[i][0])
                attach(plan, &lane.full, self.lane_args[i][1])
                read_here, read_full, written = lane_ranges(&job, &lane)
                reads += [(self.lane_args[i][0], read_here), (self.lane_args[i][1], read_full)]
                writes.append((self.lane_args[i][0], written))
        for i in range(6):
            self.add_extent(plan, reads, self.args[i])
        self.add_extent(plan, writes, self.args[1])
        return reads, writes


cdef int fill_lane(block_lane* out, object lane, int64_t page, int64_t full_page) except -1:
    memset(out, 0, sizeof(block_lane))
    fill_side(&out.here, lane.here_strides, page)
    fill_side(&out.full, lane.full_strides, full_page)
    out.pieces = lane.pieces
    out.bytes = lane.bytes
    out.packed_move = lane.pieces == 1 and out.here.row_stride == lane.bytes
    out.packed_read = out.packed_move and out.full.row_stride == lane.bytes
    return 0


cdef int fill_side(paged_side* side, tuple strides, int64_t page) except -1:
    side.page = page
    side.block_stride, side.row_stride, side.step = strides
    side.flat = strides[0] == page * strides[1]
    side.shift = page.bit_length() - 1 if page > 0 and page & (page - 1) == 0 else -1
    return 0


cdef void attach(Plan plan, paged_side* side, int argument) noexcept:
    side.base = plan.views[argument].data
    side.lo = side.base + plan.views[argument].low
    side.hi = side.base + plan.views[argument].high


cdef void add_block(
    Spans spans, const paged_side* side, int64_t slot, int64_t tokens, const block_lane* lane
) noexcept:
    cdef int64_t t, i, start
    for t in range(slot, slot + tokens):
        start = <int64_t>side.base + t // side.page * side.block_stride \
            + t % side.page * side.row_stride
        for i in range(lane.pieces):
            spans.add(start + i * side.step, lane.bytes)


cdef tuple lane_ranges(const select_job* job, const block_lane* lane):
    """Ranges (read in the selection, read in the full cache, written in the selection)."""
    cdef int64_t r, i, tokens, moved = 0, fetched = 0, swapped = 0
    cdef const select_row* row
    cdef const select_op* op
    cdef const int64_t* used
    cdef Spans here, full, written
    for r in range(job.n_rows):
        row = &job.rows[r]
        for i in range(row.n_ops):
            fetched += job.ops[r * job.topk + i].kind == READ
            moved += job.ops[r * job.topk + i].kind != READ
        swapped += 0 if row.swap == NO_SWAP else 2 if row.swap == EXCHANGE else 1
    here = spans_for((moved + swapped) * job.block, lane.pieces)
    full = spans_for(fetched * job.block, lane.pieces)
    written = spans_for((moved + fetched + swapped) * job.block, lane.pieces)
    for r in range(job.n_rows):
        row = &job.rows[r]
        used = job.used + r * job.topk
        for i in range(row.n_ops):
            op = job.ops + r * job.topk + i
            tokens = row.tail if i == row.partial else job.block
            if op.kind == READ:
                add_block(full, &lane.full, op.src, tokens, lane)
            else:
                add_block(here, &lane.here, op.src, job.block, lane)
            add_block(written, &lane.here, place_slot(job, used, op.place), tokens, lane)
        # Swapped blocks are whole.
        if row.swap == EXCHANGE or row.swap == TO_LAST:
            add_block(here, &lane.here, row.swap_slot, job.block, lane)
            add_block(written, &lane.here, row.last_slot, job.block, lane)
        if row.swap == EXCHANGE or row.swap == FROM_LAST:
            add_block(here, &lane.here, row.last_slot, job.block, lane)
            add_block(written, &lane.here, row.swap_slot, job.block, lane)
    return here.ranges(), full.ranges(), written.ranges()


cdef int64_t copied_tokens(const select_job* job, int64_t r) noexcept:
    # A swap copies the blocks that stay held: both, or the one whose place an op takes.
    cdef const select_row* row = &job.rows[r]
    cdef int64_t swapped = 0 if row.swap == NO_SWAP else 2 if row.swap == EXCHANGE else 1
    return row.moved + row.refreshed + row.read + swapped * job.block


cdef int64_t copied_pieces(const select_job* job, int64_t r, const block_lane* lane) noexcept:
    cdef const select_row* row = &job.rows[r]
    cdef const select_op* ops = job.ops + r * job.topk
    cdef int64_t swapped = 0 if row.swap == NO_SWAP else 2 if row.swap == EXCHANGE else 1
    cdef int64_t i, tokens, pieces = swapped * (1 if lane.packed_move else job.block * lane.pieces)
    for i in range(row.n_ops):
        tokens = row.tail if i == row.partial else job.block
        if lane.packed_read if ops[i].kind == READ else lane.packed_move:
            pieces += 1
        else:
            pieces += tokens * lane.pieces
    return pieces


cdef int64_t first_repeat_in_bitmap(const select_job* job, unsigned char[::1] bits) noexcept:
    # Position of an entry that an earlier one equals, or -1.
    cdef int64_t r, i, entry
    cdef int mask
    for r in range(job.n_rows):
        for i in range(job.rows[r].n_used):
            entry = job.used[r * job.topk + i]
            mask = 1 << (entry & 7)
            if bits[entry >> 3] & mask:
                return r * job.topk + i
            bits[entry >> 3] |= mask
    return -1


cdef int64_t first_repeat_in_table(const select_job* job, int64_t[::1] table) noexcept:
    # The same where the cache has far more blocks than are used.
    cdef int64_t r, i, entry, where, mask = table.shape[0] - 1
    for r in range(job.n_rows):
        for i in range(job.rows[r].n_used):
            entry = job.used[r * job.topk + i]
            where = <int64_t>((<uint64_t>entry * <uint64_t>0x9E3779B97F4A7C15) >> 32) & mask
            while table[where] >= 0:
                if table[where] == entry:
                    return r * job.topk + i
                where = (where + 1) & mask
            table[where] = entry
    return -1
