# SPDX-License-Identifier: Apache-2.0
"""Specs that move token rows between linear arrays and a paged cache.

A PagedSpec knows its lanes (where tokens and slots lie) and gets one slot per token from
load(); the rest, loading, range check, threads, kernel, is the same for every operator.
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free

from kvcore._core.plan cimport Plan, Spec
from kvcore._core.spans cimport Spans, spans_for
from kvcore._kernels.lanes cimport kv_lane, kv_page, kv_tok
from kvcore._kernels.rows cimport rows_job, run_rows
from kvcore._kernels.scan cimport (
    DISTINCT,
    NO_MEMORY,
    REPEATED,
    distinct,
    first_at_or_above,
    has_repeats,
    load_indices,
    strictly_increasing,
)

INT64_MAX = 2**63 - 1

cdef enum:
    KEEP_GIL_BYTES = 32768   # below it, giving up the GIL costs more than the copy
    REPEAT_MAP_BYTES = 65536


cdef int fill_lane(lane_plan* out, object lane, object block_size, object num_slots) except -1:
    cdef int i = 0
    out.tok_arg = lane.tok_arg
    out.page_arg = lane.page_arg
    out.tok_offset = lane.tok_offset
    out.lane.tok_inner = lane.tok_inner
    out.lane.tok_outer_stride = lane.tok_outer_stride
    out.lane.tok_stride = lane.tok_stride
    out.lane.block_size = block_size
    out.lane.block_stride = lane.block_stride
    out.lane.row_stride = lane.row_stride
    out.lane.flat = num_slots <= block_size or lane.block_stride == block_size * lane.row_stride
    out.lane.shift = block_size.bit_length() - 1 if block_size & (block_size - 1) == 0 else -1
    out.lane.tiled = lane.tiled
    out.lane.bytes = lane.piece_bytes
    out.lane.token_bytes = lane.token_bytes
    out.lane.levels = len(lane.levels)
    for n, tok_step, page_step in lane.levels:
        out.lane.n[i] = n
        out.lane.tok_step[i] = tok_step
        out.lane.page_step[i] = page_step
        i += 1
    return 0


cdef int64_t pieces_of(const kv_lane* lane) noexcept:
    # Pieces of one token.
    cdef int64_t pieces = 1
    cdef int i
    for i in range(lane.levels):
        pieces *= lane.n[i]
    return pieces


cdef void add_pieces(
    Spans spans, const kv_lane* lane, const int64_t* steps, int64_t start
) noexcept:
    cdef int64_t i, j, k, at
    if lane.levels == 0:
        spans.add(start, lane.bytes)
        return
    for i in range(lane.n[0]):
        at = start + i * steps[0]
        if lane.levels == 1:
            spans.add(at, lane.bytes)
            continue
        for j in range(lane.n[1]):
            if lane.levels == 2:
                spans.add(at + j * steps[1], lane.bytes)
                continue
            for k in range(lane.n[2]):
                spans.add(at + j * steps[1] + k * steps[2], lane.bytes)


cdef object lane_ranges(
    const kv_lane* lane, const int64_t* slots, int64_t n_tokens, int64_t used, bint paged
):
    """Ranges of the tokens that have a slot, on either side."""
    cdef Spans spans = spans_for(used, pieces_of(lane))
    cdef int64_t i
    for i in range(n_tokens):
        if slots[i] < 0:
            continue
        if paged:
            add_pieces(spans, lane, lane.page_step, <int64_t>kv_page(lane, slots[i]))
        else:
            add_pieces(spans, lane, lane.tok_step, <int64_t>kv_tok(lane, i))
    return spans.ranges()


cdef int64_t count_pieces(
    const kv_lane* lane, const int64_t* slots, int64_t n_tokens, int64_t used
) noexcept:
    # Contiguous pieces that a run copies in one lane, neighbours joined as the kernel does.
    cdef int64_t i, joined = 0
    if lane.levels:
        return used * pieces_of(lane)
    if lane.tok_inner or lane.tok_stride != lane.bytes or lane.row_stride != lane.bytes:
        return used
    for i in range(1, n_tokens):
        if slots[i] > 0 and slots[i] == slots[i - 1] + 1:
            if lane.flat or slots[i] % lane.block_size != 0:
                joined += 1
    return used - joined


cdef int64_t count_used(const int64_t* slots, int64_t n_tokens) noexcept:
    cdef int64_t i, used = 0
    for i in range(n_tokens):
        used += slots[i] >= 0
    return used


cdef class PagedSpec(Spec):
    """lanes: one or two layout.Lane; num_slots: the bound of a slot; gathers: cache to linear."""

    def __init__(
        self, outputs, lanes, num_tokens, block_size, num_slots, words,
        gathers=False, warnings=(), soc=None,
    ):
        Spec.__init__(self, outputs, warnings, soc)
        self.n_lanes = len(lanes)
        self.num_tokens = num_tokens
        self.num_slots = num_slots
        self.words = words
        self.gathers = gathers
        self.token_bytes = 0
        for i, lane in enumerate(lanes):
            fill_lane(&self.lanes[i], lane, block_size, num_slots)
            self.token_bytes += lane.token_bytes
        self.total_bytes = min(num_tokens * int(self.token_bytes), INT64_MAX)
        self.most = self.total_bytes

    cdef int load(self, Plan plan) except -1:
        """Put num_tokens slots into plan.scratch, each below num_slots; negative ones skip."""
        raise NotImplementedError

    cdef void run_lanes(self, Plan plan, int64_t tok_offset, int64_t page_offset) noexcept:
        cdef kv_lane lanes[2]
        cdef rows_job job
        cdef int i, threads, used = 0
        cdef bint ordered = False
        cdef int64_t total = self.total_bytes
        for i in range(self.n_lanes):
            if self.lanes[i].lane.token_bytes == 0:
                continue
            lanes[used] = self.lanes[i].lane
            lanes[used].tok = plan.views[self.lanes[i].tok_arg].data \
                + self.lanes[i].tok_offset + tok_offset
            lanes[used].page = plan.views[self.lanes[i].page_arg].data + page_offset
            lanes[used].tok_lo = plan.views[self.lanes[i].tok_arg].data \
                + plan.views[self.lanes[i].tok_arg].low
            lanes[used].tok_hi = plan.views[self.lanes[i].tok_arg].data \
                + plan.views[self.lanes[i].tok_arg].high
            lanes[used].page_lo = plan.views[self.lanes[i].page_arg].data \
                + plan.views[self.lanes[i].page_arg].low
            lanes[used].page_hi = plan.views[self.lanes[i].page_arg].data \
                + plan.views[self.lanes[i].page_arg].high
            used += 1
        job.lanes = lanes
        job.n_lanes = used
        job.slots = plan.scratch
        job.n_tokens = self.num_tokens
        job.num_slots = self.num_slots
        job.gather = self.gathers
        plan.last = True
        threads = plan.threads_for(total)
        if threads == 1 and total < KEEP_GIL_BYTES:
            run_rows(&job, 1, False)
            return
        with nogil:
            if threads > 1 and not self.gathers:
                ordered = plan.order == REPEATED if plan.order != 0 else self.may_repeat(plan)
            run_rows(&job, threads, ordered)

    cdef bint may_repeat(self, Plan plan) noexcept nogil:
        cdef unsigned char* bits
        cdef bint found = True
        if strictly_increasing(plan.scratch, self.num_tokens):
            return False
        if self.num_slots // 8 <= REPEAT_MAP_BYTES + 8 * self.num_tokens:
            bits = <unsigned char*>calloc(self.num_slots // 8 + 1, 1)
            if bits != NULL:
                found = has_repeats(plan.scratch, self.num_tokens, self.num_slots, bits)
                free(bits)
        return found

    cdef object execute(self, Plan plan):
        if self.num_tokens == 0 or self.token_bytes == 0:
            plan.last = True
            return None
        self.load(plan)
        plan.announce()
        self.run_lanes(plan, 0, 0)
        return None

    cdef object check_values(self, Plan plan):
        if self.num_tokens > 0 and self.token_bytes > 0:
            self.load(plan)
            plan.announce()

    def workspace_size(self, Plan plan):
        return 8 * self.num_tokens if self.token_bytes else 0

    def most_bytes(self, Plan plan):
        return self.total_bytes

    def moved(self, Plan plan):
        cdef int i
        cdef int64_t used
        if self.num_tokens == 0 or self.token_bytes == 0:
            return 0, 0
        used = count_used(plan.scratch, self.num_tokens)
        pieces = 0
        for i in range(self.n_lanes):
            if self.lanes[i].lane.token_bytes:
                pieces += count_pieces(&self.lanes[i].lane, plan.scratch, self.num_tokens, used)
        return int(used) * int(self.token_bytes), pieces

    def accesses(self, Plan plan):
        if self.num_tokens == 0 or self.token_bytes == 0:
            return [], []
        return self.row_accesses(plan, 0)

    def row_accesses(self, Plan plan, int64_t page_offset):
        cdef int i, tok, page
        cdef int64_t used = count_used(plan.scratch, self.num_tokens)
        linear, paged = [], []
        cdef kv_lane lane
        for i in range(self.n_lanes):
            lane = self.lanes[i].lane
            if lane.token_bytes == 0:
                continue
            tok = self.lanes[i].tok_arg
            page = self.lanes[i].page_arg
            lane.tok = plan.views[tok].data + self.lanes[i].tok_offset
            lane.page = plan.views[page].data + page_offset
            linear.append(
                (tok, lane_ranges(&lane, plan.scratch, self.num_tokens, used, False))
            )
            paged.append((page, lane_ranges(&lane, plan.scratch, self.num_tokens, used, True)))
        return (paged, linear) if self.gathers else (linear, paged)


cdef class SlotSpec(PagedSpec):
    """One slot per token from an index array: ScatterPaKvCache scenarios 1, 2, 6, 7."""

    def __init__(self, outputs, lanes, num_tokens, block_size, num_slots, words, slot_arg,
                 warnings=(), soc=None):
        PagedSpec.__init__(
            self, outputs, lanes, num_tokens, block_size, num_slots, words, False, warnings, soc
        )
        self.slot_arg = slot_arg

    cdef int load(self, Plan plan) except -1:
        cdef int64_t* slots = plan.reserve(self.num_tokens)
        cdef int64_t bad
        load_indices(
            plan.views[self.slot_arg].data,
            plan.views[self.slot_arg].strides[0],
            plan.views[self.slot_arg].itemsize,
            self.num_tokens,
            slots,
        )
        plan.order = 0
        if self.repeat_text is not None:
            self.look_for_repeats(plan, slots)
        if plan.order != DISTINCT:
            bad = first_at_or_above(slots, self.num_tokens, self.num_slots)
            if bad >= 0:
                raise self.words(bad, slots[bad])
        return 0

    cdef int look_for_repeats(self, Plan plan, const int64_t* slots) except -1:
        # DISTINCT says that all are in range too, so that the second pass can be left out.
        cdef int found = distinct(
            slots, self.num_tokens, self.num_slots, &plan.repeat_at, &plan.repeat_before
        )
        if found == NO_MEMORY:
            raise MemoryError(f"{self.num_tokens} slots do not fit memory twice")
        if found == DISTINCT or found == REPEATED:
            plan.order = found
        return 0

    def accesses(self, Plan plan):
        found = PagedSpec.accesses(self, plan)
        if self.token_bytes:  # without bytes a token the slots are not read
            self.add_extent(plan, found[0], self.slot_arg)
        return found


cdef class RangeSpec(PagedSpec):
    """Token i has slot i: whole caches from one layout to another.

    outer: (count, byte step on the linear side, byte step on the paged side) of loops around all
    of that, outermost first, at most four.
    """

    cdef int n_outer
    cdef int64_t[4][3] outer

    def __init__(self, outputs, lanes, num_tokens, block_size, gathers, outer=()):
        cdef int i
        PagedSpec.__init__(
            self, outputs, lanes, num_tokens, block_size, num_tokens, None, gathers
        )
        if len(outer) > 4:
            raise ValueError(f"outer: at most four loops, got {len(outer)}")
        self.n_outer = len(outer)
        for i in range(self.n_outer):
            self.outer[i][0], self.outer[i][1], self.outer[i][2] = outer[i]

    cdef int load(self, Plan plan) except -1:
        cdef int64_t i
        cdef int64_t* slots = plan.reserve(self.num_tokens)
        for i in range(self.num_tokens):
            slots[i] = i
        return 0

    cdef object execute(self, Plan plan):
        cdef int64_t[4] at
        cdef int64_t tok_offset = 0, page_offset = 0
        cdef int axis
        for axis in range(self.n_outer):
            at[axis] = 0
            if self.outer[axis][0] == 0:
                return None
        if self.num_tokens == 0 or self.token_bytes == 0:
            return None
        self.load(plan)
        plan.announce()
        while True:
            self.run_lanes(plan, tok_offset, page_offset)
            axis = self.n_outer - 1
            while axis >= 0:
                at[axis] += 1
                tok_offset += self.outer[axis][1]
                page_offset += self.outer[axis][2]
                if at[axis] < self.outer[axis][0]:
                    break
                tok_offset -= at[axis] * self.outer[axis][1]
                page_offset -= at[axis] * self.outer[axis][2]
                at[axis] = 0
                axis -= 1
            if axis < 0:
                return None

    def accesses(self, Plan plan):
        return None  # before a run: everything


cdef class AppendSpec(PagedSpec):
    """KVCacheOperation: the slots follow from token_offset and seq_len, layer from layer_id."""

    cdef int64_t layers, layer_stride, batch, max_seq
    cdef object layer
    cdef int layer_arg, offset_arg, length_arg

    def __init__(self, outputs, lanes, dict sizes, layer, index_args, words, warnings=(), soc=None):
        # sizes: tokens, batch, max_seq, layers, layer_stride.  layer: a number, or None where
        # index_args[0] is the array that holds it; behind that offsets and lengths.
        max_seq = sizes["max_seq"]
        PagedSpec.__init__(
            self, outputs, lanes, sizes["tokens"], max_seq if max_seq > 0 else 1,
            sizes["batch"] * max_seq, words, False, warnings, soc
        )
        self.batch = sizes["batch"]
        self.max_seq = max_seq
        self.layers = sizes["layers"]
        self.layer_stride = sizes["layer_stride"]
        self.layer_arg, self.offset_arg, self.length_arg = index_args
        self.layer = layer

    cdef int64_t layer_of(self, Plan plan) except -1:
        cdef int64_t layer
        if self.layer is not None:
            layer = self.layer
        else:
            load_indices(plan.views[self.layer_arg].data, 8, plan.views[self.layer_arg].itemsize,
                         1, &layer)
        if layer < 0 or layer >= self.layers:
            raise self.words("layer_id", 0, layer, 0)
        return layer

    cdef int load(self, Plan plan) except -1:
        # scratch: the slots, the two index arrays, the layer
        cdef int64_t* slots = plan.reserve(self.num_tokens + 2 * self.batch + 1)
        cdef int64_t* offsets = slots + self.num_tokens
        cdef int64_t* lengths = offsets + self.batch
        cdef int64_t b, j, first, total = 0
        lengths[self.batch] = self.layer_of(plan)
        load_indices(plan.views[self.offset_arg].data, plan.views[self.offset_arg].strides[0],
                     plan.views[self.offset_arg].itemsize, self.batch, offsets)
        load_indices(plan.views[self.length_arg].data, plan.views[self.length_arg].strides[0],
                     plan.views[self.length_arg].itemsize, self.batch, lengths)
        for b in range(self.batch):
            if lengths[b] < 0:
                raise self.words("seq_len", b, lengths[b], 0)
            if lengths[b] > self.num_tokens - total:
                raise self.words("sum", b, lengths[b], total)
            total += lengths[b]
            if offsets[b] < lengths[b]:
                raise self.words("token_offset", b, offsets[b], lengths[b])
            if offsets[b] > self.max_seq:
                raise self.words("max_seq", b, offsets[b], self.max_seq)
            self.check_for_soc(b, offsets[b], lengths[b])
        if total != self.num_tokens:
            raise self.words("sum", self.batch, -1, total)
        total = 0
        for b in range(self.batch):
            first = b * self.max_seq + offsets[b] - lengths[b]
            for j in range(lengths[b]):
                slots[total] = first + j
                total += 1
        return 0

    cdef int check_for_soc(self, int64_t b, int64_t offset, int64_t length) except -1:
        if self.soc is not None:
            if length == 0:
                raise self.words("soc seq_len", b, length, 0)
            if offset >= self.max_seq:
                raise self.words("soc token_offset", b, offset, self.max_seq)
        return 0

    cdef int64_t page_offset(self, Plan plan) noexcept:
        return plan.scratch[self.num_tokens + 2 * self.batch] * self.layer_stride

    cdef object execute(self, Plan plan):
        self.load(plan)
        plan.announce()
        if self.num_tokens == 0 or self.token_bytes == 0:
            plan.last = True
        else:
            self.run_lanes(plan, 0, self.page_offset(plan))
        return plan.arrays[self.lanes[0].page_arg]

    cdef object check_values(self, Plan plan):
        self.load(plan)
        plan.announce()

    def workspace_size(self, Plan plan):
        return 8 * (self.num_tokens + 2 * self.batch + 1)

    def accesses(self, Plan plan):
        if self.num_tokens == 0 or self.token_bytes == 0:
            found = [], []
        else:
            found = self.row_accesses(plan, self.page_offset(plan))
        self.add_extent(plan, found[0], self.layer_arg)
        self.add_extent(plan, found[0], self.offset_arg)
        self.add_extent(plan, found[0], self.length_arg)
        return found
