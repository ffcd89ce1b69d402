# SPDX-License-Identifier: Apache-2.0
"""GatherSelectionKvCache: plan every row, check every row, then move.

What a run plans lies in the plan's scratch memory and stays there, so that touched() can tell
afterwards which rows were read and written.
"""

from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

import numpy

from kvcore._core import selected
from kvcore._core.arrays cimport data_of
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
    entry_at,
    first_entry,
    first_op,
    get_op,
    index_rows,
    place_slot,
    plan_rows,
    quotient,
    select_fault,
    select_job,
    select_op,
    select_row,
    tail_of,
    used_at,
)

cdef enum:
    PLAN_BYTES = 64      # what planning one id is worth, in bytes copied
    CHUNK_IDS = 512      # fewer are not worth a chunk's own memory
    MOST_SHORT = 0xFFFE  # places below fit two bytes, with two values to spare
    # A call may take 64 KiB and 16 bytes an id.  What the plan leaves of that goes to the hash
    # tables, as far as it makes them faster; they work with little.
    SPARE_BYTES = 53248
    ID_BYTES = 16
    MOST_SLOTS = 8       # an id: nearly every probe ends at the first look
    APART_BYTES = 16384  # to see whether used entries differ
    MOST_PASSES = 256    # over the used entries for that
    HEADER_WORDS = 8     # in front: how the last run laid its memory out

cdef dict RULES = {
    ENTRY: "entry",
    BEYOND: "beyond",
    FULL_ENTRY: "full entry",
    LENGTH: "length",
}


cdef class SelectSpec(Spec):
    """sizes: those of select_job by name; lanes: selected.Lane; words makes the error of a value.

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
        self.prepares = True  # for what a run returns
        self.n_lanes = len(lanes)
        self.token_bytes = 0
        for i, lane in enumerate(lanes):
            self.token_bytes += lane.pieces * lane.bytes
            self.lane_args[i][0] = lane.here_arg
            self.lane_args[i][1] = lane.full_arg
            fill_lane(&self.lanes[i], lane, self.page, self.full_page)
        each = max(self.block * int(self.token_bytes), PLAN_BYTES)
        self.most = min(self.n_rows * int(self.topk) * each, INT64_MAX)

    cdef void share_out(self, select_job* job, int threads) noexcept:
        """The number of chunks of rows; each has working memory of its own."""
        cdef int64_t n = self.n_rows * self.topk // CHUNK_IDS
        if n > 2 * <int64_t>threads:
            n = 2 * <int64_t>threads
        if n > self.n_rows:
            n = self.n_rows
        if n < 1 or threads <= 1:
            n = 1
        job.chunk_rows = (self.n_rows + n - 1) // n
        job.n_chunks = (self.n_rows + job.chunk_rows - 1) // job.chunk_rows

    cdef int64_t lay_out(self, select_job* job, char* memory) noexcept:
        """Give a run's results and working memory their places; returns the bytes they take.

        The same for the same chunk_rows and wide, so that it can be asked for again after a run.
        """
        cdef int64_t entry_bytes = 8 if job.wide else 4
        cdef int64_t place_bytes = 2 if self.topk < MOST_SHORT else 4
        cdef int64_t entries = self.n_rows * self.topk, more
        cdef char* at = memory
        job.n_rows = self.n_rows
        job.steps = self.steps
        job.topk = self.topk
        job.block = self.block
        job.blocks = self.blocks
        job.page = self.page
        job.columns = 0 if self.topk == 0 else quotient(self.topk - 1, &self.per_page) + 1
        job.full_blocks = self.full_blocks
        job.full_page = self.full_page
        job.full_columns = self.full_columns
        job.per_page = self.per_page
        job.per_full = self.per_full
        job.ordered = self.ordered
        job.short_places = place_bytes == 2
        job.pad = 32
        job.free_bytes = rounded(self.topk + 8)
        job.kv = <const int64_t*>take(&at, self.batch * 8)
        job.q = <const int64_t*>take(&at, self.batch * 8)
        job.rows = <select_row*>take(&at, self.n_rows * <int64_t>sizeof(select_row))
        job.faults = <select_fault*>take(&at, job.n_chunks * <int64_t>sizeof(select_fault))
        job.used = take(&at, self.n_rows * job.columns * entry_bytes)
        job.ids = take(&at, (entries + job.n_chunks * job.pad) * entry_bytes)
        job.places = take(&at, (entries + job.n_chunks * job.pad) * place_bytes)
        job.free = take(&at, job.n_chunks * job.free_bytes)
        job.apart = <uint64_t*>take(&at, self.apart_bytes())
        more = SPARE_BYTES + (ID_BYTES - entry_bytes) * entries - (at - memory)
        job.n_slots = self.slots(more // job.n_chunks + self.topk * entry_bytes, place_bytes)
        # A table lies over the last row's entries, and over the pad as far as they do not do.
        job.entry_pad = (job.n_slots * place_bytes - 1) // entry_bytes + 1 - self.topk
        job.entry_pad = 16 if job.entry_pad < 16 else (job.entry_pad + 15) & ~<int64_t>15
        job.entries = take(&at, (entries + job.n_chunks * job.entry_pad) * entry_bytes)
        return at - memory

    cdef int64_t slots(self, int64_t nbytes, int64_t place_bytes) noexcept:
        """The slots of a hash table that may take about that many bytes."""
        cdef int64_t n = nbytes // place_bytes, least = self.topk + self.topk // 4 + 1
        if n > MOST_SLOTS * self.topk:
            n = MOST_SLOTS * self.topk
        return least if n < least else n

    cdef int64_t apart_bytes(self) noexcept:
        cdef int64_t nbytes = (self.blocks >> 6) * 8 + 8
        return nbytes if nbytes < APART_BYTES else APART_BYTES

    cdef bint is_wide(self, const int64_t* kv) noexcept:
        """Whether an id or an entry needs more than four bytes."""
        cdef int64_t b, most = 0
        for b in range(self.batch):
            most = kv[b] if kv[b] > most else most
        most //= self.block
        most = self.blocks if self.blocks > most else most
        most = self.full_blocks if self.full_blocks > most else most
        return most > INT32_MAX

    cdef int set_up(self, Plan plan, select_job* job, int threads) except -1:
        """Read the lengths, and lay plan.scratch out."""
        cdef int64_t each = rounded(self.batch * 8) // 8
        cdef int64_t* memory = plan.reserve(HEADER_WORDS + 2 * each) + HEADER_WORDS
        cdef int i
        for i in range(2):
            load_indices(
                plan.views[self.args[4 + i]].data, self.length_steps[i],
                plan.views[self.args[4 + i]].itemsize, self.batch, memory + i * each,
            )
        self.read_query_lengths(memory + each)
        job.wide = self.is_wide(memory)
        self.share_out(job, threads)
        memory = plan.reserve(HEADER_WORDS + self.lay_out(job, NULL) // 8)
        memory[0] = job.wide
        memory[1] = job.chunk_rows
        self.find_again(plan, job)
        return 0

    cdef void find_again(self, Plan plan, select_job* job) noexcept:
        """Where everything lies in plan.scratch since set_up()."""
        job.topk_ids = self.arrays[0]
        job.status = self.arrays[1]
        job.table = self.arrays[2]
        job.full_table = self.arrays[3]
        job.topk_ids.data = plan.views[self.args[0]].data
        job.status.data = plan.views[self.args[1]].data
        job.table.data = plan.views[self.args[2]].data
        job.full_table.data = plan.views[self.args[3]].data
        job.wide = plan.scratch[0] != 0
        job.chunk_rows = plan.scratch[1]
        job.n_chunks = (self.n_rows + job.chunk_rows - 1) // job.chunk_rows
        self.lay_out(job, <char*>(plan.scratch + HEADER_WORDS))

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
        cdef int64_t chunk
        self.set_up(plan, job, threads)
        with nogil:
            plan_rows(job, threads)
        for chunk in range(job.n_chunks):
            if job.faults[chunk].kind != NO_FAULT:
                raise self.words(
                    RULES[job.faults[chunk].kind], job.faults[chunk].row, job.faults[chunk].at,
                    job.faults[chunk].seen, 0,
                )
        self.check_apart(job)
        return 0

    cdef int check_apart(self, select_job* job) except -1:
        """Entries in use name a selection block each."""
        cdef int64_t i, used = 0, repeated = -1
        cdef int64_t n = self.n_rows * job.columns, passes = 1 + self.blocks // (8 * APART_BYTES)
        cdef int64_t size
        cdef int64_t* table
        for i in range(n):
            used += used_at(job, i) >= 0
        if used < 2:
            return 0
        if passes == 1:
            repeated = first_repeat_in_bitmap(job, n, 8 * self.apart_bytes())
        elif 16 * used <= APART_BYTES:
            repeated = first_repeat_in_table(job, n, <int64_t*>job.apart, APART_BYTES // 8)
        elif passes <= MOST_PASSES:
            repeated = first_repeat_in_bitmap(job, n, 8 * APART_BYTES)
        else:
            # A cache of more blocks than this has seldom many in use.
            size = 16
            while size < 2 * used:
                size *= 2
            table = <int64_t*>malloc(<size_t>size * 8)
            if table == NULL:
                raise MemoryError(f"gather_selection_kv_cache: {size} numbers do not fit memory")
            repeated = first_repeat_in_table(job, n, table, size)
            free(table)
        if repeated < 0:
            return 0
        raise self.shared_entry(job, repeated)

    cdef object shared_entry(self, select_job* job, int64_t repeated):
        # Says which two rows; slow, for the message only.
        cdef int64_t i, entry = used_at(job, repeated), first = 0
        for i in range(repeated):
            if used_at(job, i) == entry:
                first = i
                break
        return self.words("shared", repeated // job.columns, 0, entry, first // job.columns)

    cdef int prepare(self, Plan plan) except -1:
        plan.result = numpy.zeros(self.table_rows, numpy.int32)
        return 0

    cdef object execute(self, Plan plan):
        cdef select_job job
        cdef blocks_job move
        cdef block_lane lanes[2]
        cdef int64_t r, tokens = 0
        cdef int i, threads
        cdef int32_t* lengths
        returned, plan.result = plan.result, None
        self.check_all(plan, &job)
        if plan.extra is not None:
            # Worked out and handed over before a byte moves, for either may fail.
            plan.extra.update(self.stats(plan))
            plan.verify(False)
        plan.last = True
        if self.n_rows == 0:
            return returned
        for i in range(self.n_lanes):
            lanes[i] = self.lanes[i]
            attach(plan, &lanes[i].here, self.lane_args[i][0])
            attach(plan, &lanes[i].full, self.lane_args[i][1])
        lengths = <int32_t*>data_of(returned)
        for r in range(self.n_rows):
            tokens += copied_tokens(&job, r)
            lengths[r] = <int32_t>job.rows[r].length
        move.plan = &job
        move.lanes = lanes
        move.n_lanes = self.n_lanes
        move.streaming = tokens * self.token_bytes >= streaming_threshold()
        threads = plan.threads_for(tokens * self.token_bytes)
        with nogil:
            run_blocks(&move, threads)
        return returned

    cdef int check_lengths(self, Plan plan) except -1:
        # No rows: lengths are checked all the same.
        cdef int64_t* q = plan.reserve(self.batch)
        load_indices(plan.views[self.args[5]].data, self.length_steps[1],
                     plan.views[self.args[5]].itemsize, self.batch, q)
        return self.read_query_lengths(q)

    cdef int check_all(self, Plan plan, select_job* job) except -1:
        if self.n_rows:
            self.check(plan, job)
        else:
            self.check_lengths(plan)
        return plan.announce()

    cdef object check_values(self, Plan plan):
        cdef select_job job
        self.check_all(plan, &job)

    def stats(self, Plan plan):
        """The stats dict of the last run: per-row int64 arrays."""
        cdef select_job job
        cdef int64_t[:, ::1] table
        cdef int64_t r, missing
        cdef const select_row* row
        found = numpy.zeros((7, self.n_rows), numpy.int64)
        if self.n_rows:
            self.find_again(plan, &job)
            table = found
            for r in range(self.n_rows):
                row = &job.rows[r]
                # Of its last block a row brings the part that there is.
                missing = self.block - tail_of(&job, row)
                table[0, r] = (row.n - row.n_ops) * self.block
                table[1, r] = row.moved * self.block
                table[2, r] = row.refreshed * self.block
                table[3, r] = (row.n_ops - row.moved - row.refreshed) * self.block
                table[2 if row.partial_held else 3, r] -= missing
                table[4, r] = row.swap != NO_SWAP
                table[5, r] = (table[2, r] + table[3, r]) * self.token_bytes
                table[6, r] = table[1, r] * self.token_bytes
        return dict(zip(selected.STATS, found, strict=True))

    def workspace_size(self, Plan plan):
        cdef select_job job
        if not self.n_rows:
            return 8 * self.batch
        job.wide = self.blocks > INT32_MAX or self.full_blocks > INT32_MAX
        plan.settle_threads()
        self.share_out(&job, plan.threads_for(self.n_rows * self.topk * PLAN_BYTES))
        return 8 * HEADER_WORDS + self.lay_out(&job, NULL)

    def most_bytes(self, Plan plan):
        return int(self.n_rows) * self.topk * self.block * self.token_bytes

    def moved(self, Plan plan):
        """(bytes, pieces) of the last run; a block whose tokens lie side by side is one piece."""
        cdef select_job job
        cdef int64_t r, tokens = 0, pieces = 0
        cdef int i
        if self.n_rows:
            self.find_again(plan, &job)
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
            self.find_again(plan, &job)
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
    cdef int64_t r, i, tokens, from_op, from_entry, moved = 0, fetched = 0, swapped = 0
    cdef int64_t place, last
    cdef const select_row* row
    cdef select_op op
    cdef Spans here, full, written
    for r in range(job.n_rows):
        row = &job.rows[r]
        moved += row.moved
        fetched += row.n_ops - row.moved
        swapped += swapped_blocks(row)
    here = spans_for((moved + swapped) * job.block, lane.pieces)
    full = spans_for(fetched * job.block, lane.pieces)
    written = spans_for((moved + fetched + swapped) * job.block, lane.pieces)
    for r in range(job.n_rows):
        row = &job.rows[r]
        from_op = first_op(job, r)
        from_entry = first_entry(job, r)
        for i in range(row.n_ops):
            get_op(job, r, from_op + i, from_entry + i, &op)
            tokens = tail_of(job, row) if i == row.partial else job.block
            if op.kind == READ:
                add_block(full, &lane.full, op.src, tokens, lane)
            else:
                add_block(here, &lane.here, op.src, job.block, lane)
            add_block(written, &lane.here, place_slot(job, r, op.place), tokens, lane)
        if not swapped_blocks(row):
            continue
        # Swapped blocks are whole.
        place = place_slot(job, r, row.swap_place)
        last = place_slot(job, r, row.n - 1)
        if row.swap == EXCHANGE or row.swap == TO_LAST:
            add_block(here, &lane.here, place, job.block, lane)
            add_block(written, &lane.here, last, job.block, lane)
        if row.swap == EXCHANGE or row.swap == FROM_LAST:
            add_block(here, &lane.here, last, job.block, lane)
            add_block(written, &lane.here, place, job.block, lane)
    return here.ranges(), full.ranges(), written.ranges()


cdef int64_t swapped_blocks(const select_row* row) noexcept:
    # A swap copies the blocks that stay held: both, or the one whose place an op takes.
    if row.swap == EXCHANGE:
        return 2
    return row.swap == TO_LAST or row.swap == FROM_LAST


cdef int64_t copied_tokens(const select_job* job, int64_t r) noexcept:
    cdef const select_row* row = &job.rows[r]
    return (row.n_ops + swapped_blocks(row)) * job.block - (job.block - tail_of(job, row))


cdef int64_t copied_pieces(const select_job* job, int64_t r, const block_lane* lane) noexcept:
    cdef const select_row* row = &job.rows[r]
    cdef int64_t from_entry = first_entry(job, r), i, tokens, pieces
    pieces = swapped_blocks(row) * (1 if lane.packed_move else job.block * lane.pieces)
    for i in range(row.n_ops):
        tokens = tail_of(job, row) if i == row.partial else job.block
        if lane.packed_move if entry_at(job, job.entries, from_entry + i) < 0 \
                else lane.packed_read:
            pieces += 1
        else:
            pieces += tokens * lane.pieces
    return pieces


cdef inline int64_t rounded(int64_t nbytes) noexcept:
    return (nbytes + 63) & ~<int64_t>63


cdef inline char* take(char** memory, int64_t nbytes) noexcept:
    cdef char* taken = memory[0]
    memory[0] += rounded(nbytes)
    return taken


cdef int64_t first_repeat_in_bitmap(const select_job* job, int64_t n, int64_t window) noexcept:
    # Position of an entry that an earlier one equals, or -1.  A bit for each of ``window`` blocks:
    # the blocks are looked at so many at a time.
    cdef int64_t i, part, low, entry, first = -1
    cdef uint64_t bit
    for part in range((job.blocks + window - 1) // window):
        low = part * window
        memset(job.apart, 0, <size_t>(window // 8))
        for i in range(n):
            entry = used_at(job, i) - low
            if <uint64_t>entry >= <uint64_t>window:
                continue
            bit = <uint64_t>1 << (entry & 63)
            if job.apart[entry >> 6] & bit:
                first = i if first < 0 or i < first else first
                break
            job.apart[entry >> 6] |= bit
    return first


cdef int64_t first_repeat_in_table(
    const select_job* job, int64_t n, int64_t* table, int64_t size
) noexcept:
    # The same where the cache has far more blocks than are used.
    cdef int64_t i, entry, where, mask = size - 1
    memset(table, 0xFF, <size_t>(size * 8))
    for i in range(n):
        entry = used_at(job, i)
        if entry < 0:
            continue
        where = <int64_t>((<uint64_t>entry * <uint64_t>0x9E3779B97F4A7C15) >> 32) & mask
        while table[where] >= 0:
            if table[where] == entry:
                return i
            where = (where + 1) & mask
        table[where] = entry
    return -1
