# SPDX-License-Identifier: Apache-2.0
"""Rows by index tuples: a slot is worked out of a tuple each time the plan runs.

A slot here is no place in row-major order but a distance from the first byte, counted in units
that divide the strides of all indexed axes.  So any strides will do: sliced, permuted, and the
meaningless ones of axes of size one, which no index can use.
"""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from kvcore._core.arrays cimport MAX_RANK, View
from kvcore._core.paged cimport PagedSpec
from kvcore._core.plan cimport Plan
from kvcore._core.spans cimport Spans, spans_for
from kvcore._kernels.lanes cimport kv_lane
from kvcore._kernels.strided cimport scatter_strided, strided_loop

#: Loops in a token that the kernel of rows.pyx knows.
MAX_LANE_LOOPS = 3

cdef enum:
    KEEP_GIL_BYTES = 32768


cdef int64_t product(const strided_loop* loops, int n) noexcept:
    cdef int64_t found = 1
    cdef int i
    for i in range(n):
        found *= loops[i].n
    return found


cdef void add_token(
    Spans spans, int64_t start, int64_t nbytes, const strided_loop* loops, int n, bint paged
) noexcept:
    cdef int64_t i
    if n == 0:
        spans.add(start, nbytes)
        return
    for i in range(loops.n):
        add_token(
            spans,
            start + i * (loops.page_step if paged else loops.tok_step),
            nbytes, loops + 1, n - 1, paged,
        )


cdef const int64_t* add_tokens(
    Spans spans, const int64_t* slots, int64_t start, const kv_lane* lane,
    const strided_loop* tokens, int n_tokens, const strided_loop* loops, int n_loops, bint paged
) noexcept:
    # Walks as scatter_strided does.
    cdef int64_t i
    if n_tokens == 0:
        if slots[0] >= 0:
            if paged:
                start = <int64_t>lane.page + slots[0] * lane.row_stride
            add_token(spans, start, lane.bytes, loops, n_loops, paged)
        return slots + 1
    for i in range(tokens.n):
        slots = add_tokens(
            spans, slots, start + i * tokens.tok_step, lane, tokens + 1, n_tokens - 1,
            loops, n_loops, paged,
        )
    return slots


cdef class NdSpec(PagedSpec):
    """One lane whose slots come from index tuples [..., len(sizes)].

    lane: from updates to self, its row_stride the unit of a slot; loops of any number.
    sizes, steps: of the indexed axes; a step is in slots.  tokens: (count, byte step in updates)
    of the loops over tokens, outermost first, as few as strides allow.  num_slots: one more than
    the highest slot.  words(token, axis, seen): the error of an index that is not below its size.
    """

    cdef int index_arg
    cdef int n_axes
    cdef int64_t sizes[MAX_RANK]
    cdef int64_t steps[MAX_RANK]
    cdef int n_loops
    cdef strided_loop loops[MAX_RANK]
    cdef int n_token_loops
    cdef strided_loop token_loops[MAX_RANK]
    cdef bint general   # more loops than rows.pyx has

    def __init__(self, lane, sizes, steps, tokens, num_tokens, num_slots, index_arg, words):
        cdef int i
        self.general = len(lane.levels) > MAX_LANE_LOOPS or len(tokens) > 2
        PagedSpec.__init__(
            self, (lane.page_arg,), [lane._replace(levels=()) if self.general else lane],
            num_tokens, max(num_slots, 1), num_slots, words,
        )
        self.index_arg = index_arg
        self.n_axes = len(sizes)
        for i in range(self.n_axes):
            self.sizes[i] = sizes[i]
            self.steps[i] = steps[i]
        self.n_loops = len(lane.levels)
        for i in range(self.n_loops):
            self.loops[i].n, self.loops[i].tok_step, self.loops[i].page_step = lane.levels[i]
        self.n_token_loops = len(tokens)
        for i in range(self.n_token_loops):
            self.token_loops[i].n, self.token_loops[i].tok_step = tokens[i]
            self.token_loops[i].page_step = 0

    cdef int load(self, Plan plan) except -1:
        cdef int64_t* slots = plan.reserve(self.num_tokens)
        cdef View* view = &plan.views[self.index_arg]
        cdef int64_t at[MAX_RANK]
        cdef int64_t i, value, slot, bad_token = -1, seen = 0
        cdef int k, axis, bad_axis = 0
        cdef int32_t narrow
        cdef const char* tuple_ = view.data
        cdef const char* one
        for k in range(MAX_RANK):
            at[k] = 0
        for i in range(self.num_tokens):
            slot = 0
            for k in range(self.n_axes):
                # Read once: a thread that edits the array meanwhile must not steer a copy.
                one = tuple_ + k * view.strides[view.rank - 1]
                if view.itemsize == 8:
                    memcpy(&value, one, 8)
                else:
                    memcpy(&narrow, one, 4)
                    value = narrow
                if value >= self.sizes[k]:
                    bad_token, bad_axis, seen = i, k, value
                    break
                if value < 0:
                    slot = -1
                elif slot >= 0:
                    slot += value * self.steps[k]
            if bad_token >= 0:
                break
            slots[i] = slot
            axis = view.rank - 2
            while axis >= 0:
                at[axis] += 1
                tuple_ += view.strides[axis]
                if at[axis] < view.shape[axis]:
                    break
                tuple_ -= at[axis] * view.strides[axis]
                at[axis] = 0
                axis -= 1
        if bad_token >= 0:
            raise self.words(bad_token, bad_axis, seen)
        return 0

    cdef void aim(self, Plan plan, kv_lane* lane) noexcept:
        cdef View* tok = &plan.views[self.lanes[0].tok_arg]
        cdef View* page = &plan.views[self.lanes[0].page_arg]
        lane[0] = self.lanes[0].lane
        lane.tok = tok.data
        lane.tok_lo = tok.data + tok.low
        lane.tok_hi = tok.data + tok.high
        lane.page = page.data
        lane.page_lo = page.data + page.low
        lane.page_hi = page.data + page.high

    cdef object execute(self, Plan plan):
        cdef kv_lane lane
        if not self.general or self.num_tokens == 0 or self.token_bytes == 0:
            return PagedSpec.execute(self, plan)
        self.load(plan)
        plan.announce()
        self.aim(plan, &lane)
        plan.last = True
        if self.total_bytes < KEEP_GIL_BYTES:
            self.scatter(plan, &lane)
        else:
            with nogil:
                self.scatter(plan, &lane)
        return None

    cdef void scatter(self, Plan plan, const kv_lane* lane) noexcept nogil:
        scatter_strided(
            lane, plan.scratch, self.token_loops, self.n_token_loops, self.loops, self.n_loops
        )

    cdef int64_t count_used(self, Plan plan) noexcept:
        cdef int64_t i, used = 0
        for i in range(self.num_tokens):
            used += plan.scratch[i] >= 0
        return used

    def moved(self, Plan plan):
        if not self.general or self.num_tokens == 0 or self.token_bytes == 0:
            return PagedSpec.moved(self, plan)
        used = self.count_used(plan)
        return used * int(self.token_bytes), used * int(product(self.loops, self.n_loops))

    def accesses(self, Plan plan):
        cdef kv_lane lane
        cdef Spans spans
        cdef int64_t used, pieces
        cdef bint paged
        if not self.general or self.num_tokens == 0 or self.token_bytes == 0:
            found = PagedSpec.accesses(self, plan)
        else:
            self.aim(plan, &lane)
            used = self.count_used(plan)
            pieces = product(self.loops, self.n_loops)
            found = [], []
            for paged in (False, True):
                spans = spans_for(used, pieces)
                add_tokens(
                    spans, plan.scratch, <int64_t>lane.tok, &lane, self.token_loops,
                    self.n_token_loops, self.loops, self.n_loops, paged,
                )
                found[paged].append((
                    self.lanes[0].page_arg if paged else self.lanes[0].tok_arg, spans.ranges()
                ))
        if self.num_tokens and self.token_bytes:  # else the indices are not read
            self.add_extent(plan, found[0], self.index_arg)
        return found
