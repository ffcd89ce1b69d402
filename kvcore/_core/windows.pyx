# SPDX-License-Identifier: Apache-2.0
"""The Spec of compression: ScatterPaKvCache scenarios 3, 4 and 5.

A run is one head of one batch.  Its slot, window w and offset o, and its batch's length n, are
copied, checked and turned into what the kernel takes: the tokens before the window, the window, and
the tokens after it.  All rules have that form:

    rule                   tokens before  window                tokens after
    Alibi                  none           [0, n-w) is dropped   [n-w, n)
    Omni                   [0, o)         [o, o+w) is dropped   [o+w, n)
    Rope                   [0, o)         [o, o+w): its mean    [o+w, n)
    Rope, Omni at o == -1  none           empty                 [0, n)
"""

from libc.stdint cimport INT64_MAX, int64_t
from libc.string cimport memset

from kvcore._core.plan cimport Plan, Spec
from kvcore._core.spans cimport Spans, spans_for
from kvcore._kernels.isa cimport streaming_threshold
from kvcore._kernels.lanes cimport kv_page
from kvcore._kernels.scan cimport NO_MEMORY, load_indices
from kvcore._kernels.windows cimport (
    pick_mean,
    run_windows,
    runs_apart,
    window_lane,
    windows_job,
)

cdef enum:
    KEEP_GIL_BYTES = 32768  # below it, giving up the GIL costs more than the copy


cdef int64_t MAX_RUNS = <int64_t>1 << 56


cdef int fill(window_lane* out, object lane, int64_t block_size) except -1:
    memset(out, 0, sizeof(window_lane))
    out.lane.tok_stride = lane.tok_stride
    out.lane.block_size = block_size
    out.lane.block_stride = lane.block_stride
    out.lane.row_stride = lane.row_stride
    out.lane.flat = lane.block_stride == block_size * lane.row_stride
    out.lane.shift = block_size.bit_length() - 1 if block_size & (block_size - 1) == 0 else -1
    out.start_stride = lane.start_stride
    out.head_stride = lane.head_stride
    out.items = lane.items
    out.item_bytes = lane.item_bytes
    out.tok_step = lane.tok_step
    out.page_step = lane.page_step
    return 0


cdef class WindowsSpec(Spec):
    """What a compression of given shapes and types does at each run.

    lanes:      one or two lanes.WindowLane.
    sizes:      batch, heads, tokens, block_size, slots, and longest: the length S that batches are
                padded to, -1 where they lie end to end.
    kind:       the item type's row in the kernel's table of means; -1: no means are made.
    index_args: argument indices of slots, windows, offsets (-1: the rule has none) and lengths.
    words:      words(rule, index, seen, other) returns the exception for a value that is refused.
    """

    def __init__(
        self, outputs, lanes, dict sizes, int kind, index_args, words, warnings=(), soc=None,
    ):
        Spec.__init__(self, outputs, warnings, soc)
        num_heads, num_tokens, block_size = sizes["heads"], sizes["tokens"], sizes["block_size"]
        self.n_lanes = 0
        total = 0
        for lane in lanes:
            if lane.items == 0:
                continue
            fill(&self.lanes[self.n_lanes], lane, block_size)
            self.tok_arg[self.n_lanes] = lane.tok_arg
            self.page_arg[self.n_lanes] = lane.page_arg
            total += num_heads * lane.items * lane.item_bytes
            self.n_lanes += 1
        self.token_bytes = min(total, INT64_MAX)
        self.batch = sizes["batch"]
        self.num_heads = num_heads
        self.num_tokens = num_tokens
        self.most = min(num_tokens * int(self.token_bytes), INT64_MAX)
        self.longest = sizes["longest"]
        self.num_slots = sizes["slots"]
        self.kind = kind
        self.slot_arg, self.window_arg, self.offset_arg, self.length_arg = index_args
        self.words = words

    cdef bint empty(self) noexcept:
        return self.num_tokens == 0 or self.token_bytes == 0

    cdef void point(self, Plan plan, windows_job* job) noexcept:
        # plan.scratch holds slots, heads and tails (one of each a run), lengths and starts (one of
        # each a batch), then two numbers a run for the kernel's overlap test.
        cdef int64_t runs = self.batch * self.num_heads
        job.batch = self.batch
        job.num_heads = self.num_heads
        job.slots = plan.scratch
        job.heads = job.slots + runs
        job.tails = job.heads + runs
        job.lengths = job.tails + runs
        job.starts = job.lengths + self.batch
        pick_mean(job, self.kind)

    cdef int load(self, Plan plan, totals_t* totals) except -1:
        """Copy the index arrays into plan.scratch, check them, and convert them for the kernel."""
        cdef int64_t runs = self.batch * self.num_heads
        cdef int64_t* slots = plan.reserve(self.scratch_numbers())
        cdef int64_t* heads = slots + runs
        cdef int64_t* tails = heads + runs
        cdef int64_t* lengths = tails + runs
        cdef int64_t* starts = lengths + self.batch
        cdef int64_t b, i, n, w, o, rows, mean, total = 0
        load_all(plan, self.slot_arg, slots)
        load_all(plan, self.window_arg, tails)
        if self.offset_arg >= 0:
            load_all(plan, self.offset_arg, heads)
        load_all(plan, self.length_arg, lengths)
        for b in range(self.batch):
            n = lengths[b]
            if n < 0:
                raise self.words("length", b, n, 0)
            if self.longest >= 0:
                if n > self.longest:
                    raise self.words("longest", b, n, self.longest)
                starts[b] = b
            else:
                if n > self.num_tokens - total:
                    raise self.words("sum", b, n, total)
                starts[b] = total
                total += n
        if self.longest < 0 and total != self.num_tokens:
            raise self.words("sum", -1, 0, total)
        totals.rows = 0
        totals.tokens = 0
        for i in range(runs):
            n = lengths[i // self.num_heads]
            w = tails[i]
            mean = 0
            if w < 0:
                raise self.words("window", i, w, 0)
            if self.offset_arg < 0:
                if w > n:
                    raise self.words("alibi", i, w, n)
                heads[i] = 0
                tails[i] = n - w
            else:
                o = heads[i]
                if o < -1:
                    raise self.words("offset", i, o, 0)
                if o == -1:
                    heads[i] = 0
                    tails[i] = 0
                else:
                    if o > n:
                        raise self.words("start", i, o, n)
                    if w > n - o:
                        raise self.words("end", i, w, n - o)
                    tails[i] = o + w
                    mean = w if self.kind >= 0 else 0
            if slots[i] < 0:
                continue
            rows = heads[i] + (mean > 0) + n - tails[i]
            if slots[i] >= self.num_slots or rows > self.num_slots - slots[i]:
                raise self.words("slot", i, slots[i], rows)
            if rows > INT64_MAX - totals.rows:
                rows = INT64_MAX - totals.rows
            totals.rows += rows
            totals.tokens += heads[i] + mean + n - tails[i]
        plan.order = 0
        if self.soc is not None and totals.rows > self.num_slots:
            raise self.words("rows", -1, totals.rows, self.num_slots)
        if self.repeat_text is not None:
            self.look_for_repeats(plan)
        return 0

    cdef int look_for_repeats(self, Plan plan) except -1:
        cdef windows_job job
        memset(&job, 0, sizeof(windows_job))
        self.point(plan, &job)
        plan.order = runs_apart(
            &job,
            self.num_slots,
            plan.scratch + 3 * self.batch * self.num_heads + 2 * self.batch,
            &plan.repeat_at,
            &plan.repeat_before,
        )
        if plan.order == NO_MEMORY:
            raise MemoryError(f"a map of {self.num_slots} slots does not fit memory")
        return 0

    cdef object execute(self, Plan plan):
        cdef windows_job job
        cdef totals_t totals
        cdef int64_t row_bytes = 0
        cdef int64_t* pairs
        cdef int threads, k
        plan.copied_bytes = 0
        if self.empty():
            plan.last = True
            return None
        self.load(plan, &totals)
        plan.announce()
        memset(&job, 0, sizeof(windows_job))
        self.point(plan, &job)
        pairs = plan.scratch + 3 * self.batch * self.num_heads + 2 * self.batch
        job.n_lanes = self.n_lanes
        for k in range(self.n_lanes):
            job.lanes[k] = self.lanes[k]
            place(plan, self.tok_arg[k], self.page_arg[k], &job.lanes[k])
            row_bytes += self.lanes[k].items * self.lanes[k].item_bytes
        plan.copied_bytes = totals.rows * row_bytes
        job.stream = plan.copied_bytes >= streaming_threshold()
        threads = plan.threads_for(totals.tokens * row_bytes)
        if threads == 1 and totals.tokens * row_bytes < KEEP_GIL_BYTES:
            run_windows(&job, 1, pairs)
        else:
            with nogil:
                run_windows(&job, threads, pairs)
        plan.last = True
        return None

    cdef object check_values(self, Plan plan):
        cdef totals_t totals
        if not self.empty():
            self.load(plan, &totals)
            plan.announce()

    cdef int64_t scratch_numbers(self) noexcept:
        # Plan.reserve refuses a size that no memory holds, so the product must not wrap here.
        cdef int64_t runs = self.batch * self.num_heads
        if runs > MAX_RUNS or self.batch > MAX_RUNS:
            return INT64_MAX
        return 5 * runs + 2 * self.batch

    def workspace_size(self, Plan plan):
        return 0 if self.empty() else 8 * int(self.scratch_numbers())

    def most_bytes(self, Plan plan):
        # No run writes more rows than its batch has tokens: a mean stands for at least one.
        return self.num_tokens * int(self.token_bytes)

    cdef void last_run(self, Plan plan, windows_job* job) noexcept:
        """Fill job with the last run's lanes and with what it left in plan.scratch."""
        cdef int k
        memset(job, 0, sizeof(windows_job))
        self.point(plan, job)
        job.n_lanes = self.n_lanes
        for k in range(self.n_lanes):
            job.lanes[k] = self.lanes[k]
            place(plan, self.tok_arg[k], self.page_arg[k], &job.lanes[k])

    def moved(self, Plan plan):
        cdef windows_job job
        cdef int k
        pieces = 0
        if not self.empty():
            self.last_run(plan, &job)
            for k in range(self.n_lanes):
                pieces += pieces_of(&job, &job.lanes[k])
        return plan.copied_bytes, pieces

    def accesses(self, Plan plan):
        cdef windows_job job
        cdef int k
        if self.empty():
            return [], []
        self.last_run(plan, &job)
        read, written = [], []
        for k in range(self.n_lanes):
            read.append((self.tok_arg[k], tokens_of(&job, &job.lanes[k])))
            written.append((self.page_arg[k], rows_of(&job, &job.lanes[k])))
        self.add_extent(plan, read, self.slot_arg)
        self.add_extent(plan, read, self.window_arg)
        self.add_extent(plan, read, self.offset_arg)
        self.add_extent(plan, read, self.length_arg)
        return read, written


# What run i of a job did: it read the tokens [0, front) and the last ``rest`` tokens of its batch.
# Where a mean was made, the window's tokens were read too and are part of the front.
cdef inline int64_t front_of(const windows_job* job, int64_t i) noexcept:
    return job.heads[i] if job.add == NULL else job.tails[i]


cdef inline int64_t rest_of(const windows_job* job, int64_t i) noexcept:
    return job.lengths[i // job.num_heads] - job.tails[i]


cdef inline bint has_mean(const windows_job* job, int64_t i) noexcept:
    return job.add != NULL and job.tails[i] > job.heads[i]


cdef inline bint whole_rows(int64_t step, const window_lane* side) noexcept:
    return step == side.item_bytes or side.items == 1


cdef object tokens_of(const windows_job* job, const window_lane* side):
    """Byte ranges of the rows of tokens that were read."""
    cdef int64_t i, t, e, n, length, count = 0, runs = job.batch * job.num_heads
    cdef int64_t items = 1 if whole_rows(side.tok_step, side) else side.items
    cdef int64_t start, nbytes = side.items // items * side.item_bytes
    cdef Spans spans
    for i in range(runs):
        if job.slots[i] >= 0:
            count += front_of(job, i) + rest_of(job, i)
    spans = spans_for(count, items)
    for i in range(runs):
        if job.slots[i] < 0:
            continue
        length = job.lengths[i // job.num_heads]
        n = front_of(job, i)
        t = 0
        while t < length:
            if t == n:
                t = job.tails[i]
                n = length
                continue
            start = <int64_t>side.lane.tok + t * side.lane.tok_stride \
                + job.starts[i // job.num_heads] * side.start_stride \
                + i % job.num_heads * side.head_stride
            for e in range(items):
                spans.add(start + e * side.tok_step, nbytes)
            t += 1
    return spans.ranges()


cdef object rows_of(const windows_job* job, const window_lane* side):
    """Byte ranges of the cache rows that were written."""
    cdef int64_t i, r, e, count = 0, runs = job.batch * job.num_heads
    cdef int64_t items = 1 if whole_rows(side.page_step, side) else side.items
    cdef int64_t start, nbytes = side.items // items * side.item_bytes
    cdef Spans spans
    for i in range(runs):
        if job.slots[i] >= 0:
            count += job.heads[i] + has_mean(job, i) + rest_of(job, i)
    spans = spans_for(count, items)
    for i in range(runs):
        if job.slots[i] < 0:
            continue
        for r in range(job.heads[i] + has_mean(job, i) + rest_of(job, i)):
            start = <int64_t>kv_page(&side.lane, job.slots[i] + r)
            for e in range(items):
                spans.add(start + e * side.page_step, nbytes)
    return spans.ranges()


cdef object pieces_of(const windows_job* job, const window_lane* side):
    """The number of contiguous pieces written; neighbours that the kernel joins count as one."""
    cdef int64_t i, copied = 0, runs = 0, means = 0
    cdef int64_t row_bytes = side.items * side.item_bytes
    for i in range(job.batch * job.num_heads):
        if job.slots[i] < 0:
            continue
        copied += job.heads[i] + rest_of(job, i)
        runs += (job.heads[i] > 0) + (rest_of(job, i) > 0)
        means += has_mean(job, i)
    if side.tok_step != side.item_bytes or side.page_step != side.item_bytes:
        return int(copied + means) * int(side.items)
    if side.lane.flat and side.lane.tok_stride == row_bytes and side.lane.row_stride == row_bytes:
        return runs + means
    return copied + means


cdef void load_all(Plan plan, int i, int64_t* out) noexcept:
    # Copy an index array of one or two axes, int32 or int64, to out.
    cdef int64_t row, rows = 1, n, stride
    cdef int last = plan.views[i].rank - 1
    n = plan.views[i].shape[last]
    if last == 1:
        rows = plan.views[i].shape[0]
    for row in range(rows):
        stride = plan.views[i].strides[0] * row if last == 1 else 0
        load_indices(plan.views[i].data + stride, plan.views[i].strides[last],
                     plan.views[i].itemsize, n, out + row * n)


cdef void place(Plan plan, int tok, int page, window_lane* side) noexcept:
    side.lane.tok = plan.views[tok].data
    side.lane.tok_lo = plan.views[tok].data + plan.views[tok].low
    side.lane.tok_hi = plan.views[tok].data + plan.views[tok].high
    side.lane.page = plan.views[page].data
    side.lane.page_lo = plan.views[page].data + plan.views[page].low
    side.lane.page_hi = plan.views[page].data + plan.views[page].high
