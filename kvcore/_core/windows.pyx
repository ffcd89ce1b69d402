# SPDX-License-Identifier: Apache-2.0
"""The Spec of compression: ScatterPaKvCache scenarios 3, 4 and 5.

A run's slot, window and offset and a batch's length are copied, checked and turned into what the
kernel knows: tokens before the window, tokens after it, the window between them.  All rules (Alibi,
Rope, Omni) have that form:

    Alibi                  [nothing)  window dropped [0, n-w)   tokens [n-w, n)
    Omni                   [0, o)     window dropped [o, o+w)   tokens [o+w, n)
    Rope                   [0, o)     mean of [o, o+w)          tokens [o+w, n)
    Rope, Omni at o == -1  [nothing)  window is empty           tokens [0, n)
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport INT64_MAX, int64_t
from libc.string cimport memset

import numpy

from kvcore._core import window_ranges
from kvcore._core.plan cimport Plan, Spec
from kvcore._kernels.isa cimport streaming_threshold
from kvcore._kernels.scan cimport load_indices
from kvcore._kernels.windows cimport pick_mean, run_windows, window_lane, windows_job

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
    """lanes: one or two lanes.WindowLane; kind: the kernel's number of the items' type, or -1;
    longest: S where batches are padded, -1 where they lie end to end.

    words(rule, index, seen, other) makes the error of a value.
    """

    def __init__(
        self, outputs, lanes, *, batch, num_heads, num_tokens, longest, block_size, num_slots,
        kind, slot_arg, window_arg, offset_arg, length_arg, words, warnings=(), soc=None,
    ):
        Spec.__init__(self, outputs, warnings, soc)
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
        self.batch = batch
        self.num_heads = num_heads
        self.num_tokens = num_tokens
        self.longest = longest
        self.num_slots = num_slots
        self.kind = kind
        self.slot_arg = slot_arg
        self.window_arg = window_arg
        self.offset_arg = offset_arg
        self.length_arg = length_arg
        self.words = words

    cdef bint empty(self) noexcept:
        return self.num_tokens == 0 or self.token_bytes == 0

    cdef void point(self, Plan plan, windows_job* job) noexcept:
        # plan.scratch: slots, heads, tails (one a run), lengths, starts (one a batch), then two
        # numbers a run for the kernel's overlap test
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
        """Copy the index arrays into plan.scratch, check them, and put them as the kernel wants."""
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
            totals.rows += rows
            totals.tokens += heads[i] + mean + n - tails[i]
        return self.warn_of_values(plan)

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

    cdef int64_t scratch_numbers(self) noexcept:
        # What no memory holds is for Plan.reserve to refuse, so it must not wrap here.
        cdef int64_t runs = self.batch * self.num_heads
        if runs > MAX_RUNS or self.batch > MAX_RUNS:
            return INT64_MAX
        return 5 * runs + 2 * self.batch

    def workspace_size(self, Plan plan):
        return 0 if self.empty() else 8 * int(self.scratch_numbers())

    def most_bytes(self, Plan plan):
        # No run writes more rows than its batch has tokens: a mean stands for at least one.
        return self.num_tokens * int(self.token_bytes)

    def moved(self, Plan plan):
        cdef int k
        pieces = 0
        if not self.empty():
            for k in range(self.n_lanes):
                pieces += window_ranges.count_pieces(side_of(&self.lanes[k]), self.runs_of(plan))
        return plan.copied_bytes, pieces

    cdef object runs_of(self, Plan plan):
        """A copy of what the last run did."""
        cdef int64_t runs = self.batch * self.num_heads
        numbers = numpy.frombuffer(
            PyBytes_FromStringAndSize(<char*>plan.scratch, (3 * runs + 2 * self.batch) * 8),
            numpy.int64,
        )
        return window_ranges.Runs(
            slots=numbers[:runs],
            heads=numbers[runs : 2 * runs],
            tails=numbers[2 * runs : 3 * runs],
            lengths=numpy.repeat(numbers[3 * runs : 3 * runs + self.batch], self.num_heads),
            starts=numpy.repeat(numbers[3 * runs + self.batch :], self.num_heads),
            columns=numpy.arange(runs, dtype=numpy.int64) % max(self.num_heads, 1),
            means=self.kind >= 0,
        )

    def accesses(self, Plan plan):
        cdef int k
        if self.empty():
            return [], []
        found = self.runs_of(plan)
        read, written = [], []
        for k in range(self.n_lanes):
            side = side_of(&self.lanes[k])
            tok = <size_t>plan.views[self.tok_arg[k]].data
            page = <size_t>plan.views[self.page_arg[k]].data
            read.append((self.tok_arg[k], window_ranges.tokens(side, tok, found)))
            written.append((self.page_arg[k], window_ranges.rows(side, page, found)))
        for i in (self.slot_arg, self.window_arg, self.offset_arg, self.length_arg):
            extent = plan.extent(i) if i >= 0 else None
            if extent is not None:
                read.append((i, numpy.array([extent], numpy.int64)))
        return read, written


cdef void load_all(Plan plan, int i, int64_t* out) noexcept:
    # An index array of one or two axes.
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


cdef object side_of(const window_lane* side):
    return window_ranges.Side(
        tok_stride=side.lane.tok_stride,
        start_stride=side.start_stride,
        head_stride=side.head_stride,
        tok_step=side.tok_step,
        block_size=side.lane.block_size,
        block_stride=side.lane.block_stride,
        row_stride=side.lane.row_stride,
        page_step=side.page_step,
        flat=bool(side.lane.flat),
        items=side.items,
        item_bytes=side.item_bytes,
    )
