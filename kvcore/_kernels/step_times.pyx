# SPDX-License-Identifier: Apache-2.0
"""The time line of decode steps: a discrete-event model of their operations.

A step launches six operations in each layer.  An operation keeps compute, device memory, the link
to the device and the link from it for a time of its own each, comes after up to six others of the
step, and is not ready before the host has launched it or what the step before left is over.  Ready
operations are served in the order of their ready times, ties by launch: one starts when all of its
resources are free, and ends after the longest.

Many steps are one call: nothing but sums leaves it for each.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

cdef enum:
    RESOURCES = 4
    BEFORE = 6
    KINDS = 6
    FIGURES = 5

cdef enum:
    WRITE = 0
    MISSES
    HITS
    ATTEND
    INSTALL
    SAVE

cdef enum:
    H2D = 2  # of the resources: compute, device memory, to the device, from it


cdef inline double larger(double a, double b) noexcept nogil:
    return a if a > b else b


cdef inline bint comes_first(double* ready, int32_t a, int32_t b) noexcept nogil:
    return ready[a] < ready[b] or (ready[a] == ready[b] and a < b)


cdef void push(int32_t* heap, int64_t* size, double* ready, int32_t node) noexcept nogil:
    cdef int64_t place = size[0], parent
    size[0] += 1
    while place > 0:
        parent = (place - 1) >> 1
        if not comes_first(ready, node, heap[parent]):
            break
        heap[place] = heap[parent]
        place = parent
    heap[place] = node


cdef int32_t pop(int32_t* heap, int64_t* size, double* ready) noexcept nogil:
    cdef int32_t first = heap[0], last
    cdef int64_t place = 0, child
    size[0] -= 1
    last = heap[size[0]]
    while True:
        child = 2 * place + 1
        if child >= size[0]:
            break
        if child + 1 < size[0] and comes_first(ready, heap[child + 1], heap[child]):
            child += 1
        if not comes_first(ready, heap[child], last):
            break
        heap[place] = heap[child]
        place = child
    heap[place] = last
    return first


cdef class TimeLine:
    """One device's time, and what its last step left.

    order:  int32 [n] the operations (layer * 6 + kind) as they are launched.
    before: int32 [n, 6] places in that order that come before each, -1 for none.
    kind_of: int32 [layers] the row of the prices that a layer has.
    depth:  buffers of the attention's input.
    event:  microseconds of the host for a record or a wait.
    now:    microseconds.
    """

    cdef readonly int64_t layers, operations, depth, rows
    cdef readonly double event
    cdef int64_t turn, size
    cdef int32_t* layer       # [n] of each operation, by launch
    cdef int32_t* kind        # [n]
    cdef int32_t* first       # [n + 1] where the operations that come after it begin in ``after``
    cdef int32_t* after       # [links]
    cdef int32_t* earlier     # [n] how many come before
    cdef int32_t* row_of      # [layers]
    cdef int32_t* pending     # [n] scratch
    cdef int32_t* heap        # [n] scratch
    cdef double* state        # [size] what the last step left
    cdef double* kept         # [size] the same, while a step is only looked at
    cdef double* ready        # [n] scratch
    cdef double* end          # [layers * 6] of the step

    def __cinit__(
        self,
        const int32_t[::1] order,
        const int32_t[:, ::1] before,
        const int32_t[::1] row_of,
        int64_t depth,
        double event,
    ):
        cdef int64_t n = order.shape[0], i, k, place
        self.layers, self.operations, self.depth = row_of.shape[0], n, depth
        self.event, self.turn, self.rows = event, 0, 0
        if (
            depth < 1 or n < 1 or n != self.layers * KINDS
            or before.shape[0] != n or before.shape[1] != BEFORE
        ):
            raise ValueError("expected six operations of each layer, each once")
        self.size = 1 + RESOURCES + KINDS + 2 * depth + 2 * self.layers
        self.layer = <int32_t*>malloc(<size_t>n * 4)
        self.kind = <int32_t*>malloc(<size_t>n * 4)
        self.first = <int32_t*>calloc(<size_t>n + 2, 4)
        self.after = <int32_t*>malloc(<size_t>n * BEFORE * 4)
        self.earlier = <int32_t*>calloc(<size_t>n, 4)
        self.row_of = <int32_t*>malloc(<size_t>self.layers * 4)
        self.pending = <int32_t*>malloc(<size_t>n * 4)
        self.heap = <int32_t*>malloc(<size_t>n * 4)
        self.state = <double*>calloc(<size_t>self.size, 8)
        self.kept = <double*>calloc(<size_t>self.size, 8)
        self.ready = <double*>malloc(<size_t>n * 8)
        self.end = <double*>calloc(<size_t>n, 8)
        if (
            self.layer == NULL or self.kind == NULL or self.first == NULL or self.after == NULL
            or self.earlier == NULL or self.row_of == NULL or self.pending == NULL
            or self.heap == NULL or self.state == NULL or self.kept == NULL or self.ready == NULL
            or self.end == NULL
        ):
            raise MemoryError("the operations of a step do not fit memory")
        for i in range(self.layers):
            if row_of[i] < 0:
                raise ValueError("expected a row of prices for each layer")
            self.row_of[i] = row_of[i]
            self.rows = max(self.rows, <int64_t>row_of[i] + 1)
        for i in range(n):
            if not 0 <= order[i] < n or self.end[order[i]]:
                raise ValueError("expected six operations of each layer, each once")
            self.end[order[i]] = 1
            self.layer[i], self.kind[i] = order[i] // KINDS, order[i] % KINDS
            for k in range(BEFORE):
                if before[i, k] >= n:
                    raise ValueError("expected operations that are there")
                if before[i, k] >= 0:
                    self.first[before[i, k] + 2] += 1
                    self.earlier[i] += 1
        for i in range(n):
            self.first[i + 2] += self.first[i + 1]
        for i in range(n):  # first[x + 1] moves from where x's begin to where they end
            for k in range(BEFORE):
                if before[i, k] >= 0:
                    place = self.first[before[i, k] + 1]
                    self.after[place] = <int32_t>i
                    self.first[before[i, k] + 1] += 1

    def __dealloc__(self):
        free(self.layer)
        free(self.kind)
        free(self.first)
        free(self.after)
        free(self.earlier)
        free(self.row_of)
        free(self.pending)
        free(self.heap)
        free(self.state)
        free(self.kept)
        free(self.ready)
        free(self.end)

    @property
    def now(self):
        return self.state[0]

    def advance(self, double us):
        """Let the device compute something else for so long."""
        self.wait(us)

    cdef void wait(self, double us) noexcept nogil:
        cdef double* tails = self.state + 1 + RESOURCES
        self.state[0] = tails[ATTEND] = larger(self.state[0], tails[ATTEND]) + us

    def run(
        self,
        const double[:, :, :, ::1] shares,
        const double[:, :, ::1] costs,
        const double[::1] waits,
        const uint8_t[::1] looks,
        double until,
        double[:, ::1] out,
    ):
        """Time steps one after the other; returns how many were timed, those looked at included.

        shares: [steps, rows, 6, 4] microseconds of each resource of a layer's operations, by the
                layer's row; negative: not used.
        costs:  [steps, rows, 6] microseconds of the host until it has launched the operation.
        waits:  [steps] microseconds that the device computes something else before each; negative:
                nothing comes before it.
        looks:  [steps] 1 for a step that leaves the time line as it is; the next is the one that
                is looked at, and its wait comes before the look.
        until:  no step but the first begins at that time (ms) or later.
        out:    [steps, 5] microseconds: the step, what its layers waited for their rows, for those
                of the host, the link's, and the time after it.
        """
        cdef int64_t steps = shares.shape[0], step, count = 0
        if (
            shares.shape[1] < self.rows or shares.shape[2] != KINDS
            or shares.shape[3] != RESOURCES or costs.shape[0] != steps
            or costs.shape[1] < self.rows or costs.shape[2] != KINDS or waits.shape[0] != steps
            or looks.shape[0] != steps or out.shape[0] != steps or out.shape[1] != FIGURES
        ):
            raise ValueError("expected prices of every step and row")
        cdef int64_t turn = self.turn
        cdef bint looked = False
        if not steps:
            return 0
        with nogil:
            for step in range(steps):
                if step and not looked and self.state[0] / 1e3 >= until:
                    break
                if waits[step] >= 0:
                    self.wait(waits[step])
                looked = looks[step]
                if looked:
                    memcpy(self.kept, self.state, <size_t>self.size * 8)
                    turn = self.turn
                self.one(
                    &shares[step, 0, 0, 0], &costs[step, 0, 0], &out[step, 0],
                )
                if looked:
                    memcpy(self.state, self.kept, <size_t>self.size * 8)
                    self.turn = turn
                count = step + 1
        return count

    cdef void one(
        self, const double* shares, const double* costs, double* out
    ) noexcept nogil:
        """A step, and its figures."""
        cdef int64_t n = self.operations, depth = self.depth, layers = self.layers, size = 0
        cdef int64_t i, k, layer, row, turn
        cdef int32_t node, other
        cdef double* busy = self.state + 1
        cdef double* tails = busy + RESOURCES
        cdef double* attended = tails + KINDS
        cdef double* drained = attended + depth
        cdef double* installed = drained + depth
        cdef double* saved = installed + layers
        cdef double* ready = self.ready
        cdef double* end = self.end
        cdef const double* share
        cdef double start, longest, at, host = 0, exposed = 0, waited = 0, link = 0
        cdef double begin = larger(self.state[0] + self.event, tails[ATTEND])
        cdef double base = self.state[0] + self.event
        for i in range(n):
            layer, k = self.layer[i], self.kind[i]
            host += costs[self.row_of[layer] * KINDS + k]
            at = base + host
            self.pending[i] = self.earlier[i]
            turn = (self.turn + layer) % depth
            if k == WRITE:
                at = larger(at, saved[layer])
            elif k == MISSES:
                at = larger(at, saved[layer])
                if layer < depth:
                    at = larger(at, larger(attended[turn], drained[turn]))
            elif k == HITS:
                at = larger(at, installed[layer])
                if layer < depth:
                    at = larger(at, drained[turn])
            if layer == 0:  # behind what came before on the same stream
                if k == WRITE:
                    at = larger(at, tails[ATTEND])
                elif k == HITS:
                    at = larger(at, tails[WRITE])
                elif k == ATTEND:
                    at = larger(at, tails[HITS])
                else:
                    at = larger(at, tails[k])
            ready[i] = at
        for i in range(n):
            if not self.pending[i]:
                push(self.heap, &size, ready, <int32_t>i)
        while size:
            node = pop(self.heap, &size, ready)
            layer, k = self.layer[node], self.kind[node]
            share = shares + (self.row_of[layer] * KINDS + k) * RESOURCES
            start = ready[node]
            longest = 0
            for i in range(RESOURCES):
                if share[i] >= 0 and busy[i] > start:
                    start = busy[i]
            for i in range(RESOURCES):
                if share[i] >= 0:
                    busy[i] = start + share[i]
                    longest = larger(longest, share[i])
            at = start + longest
            end[layer * KINDS + k] = at
            for i in range(self.first[node], self.first[node + 1]):
                other = self.after[i]
                ready[other] = larger(ready[other], at)
                self.pending[other] -= 1
                if not self.pending[other]:
                    push(self.heap, &size, ready, other)
        for layer in range(layers):
            row = layer * KINDS
            installed[layer] = end[row + INSTALL]
            exposed += larger(end[row + MISSES] - end[row + HITS], 0)
            waited += end[row + HITS] - end[row + WRITE]
            share = shares + (self.row_of[layer] * KINDS + MISSES) * RESOURCES
            link += larger(share[H2D], 0)
            share = shares + (self.row_of[layer] * KINDS + SAVE) * RESOURCES
            if sends(share):
                saved[layer] = end[row + SAVE]
            if layer >= layers - depth:
                turn = (self.turn + layer) % depth
                attended[turn] = end[row + ATTEND]
                drained[turn] = end[row + INSTALL]
        self.turn = (self.turn + layers) % depth
        row = (layers - 1) * KINDS
        for k in range(KINDS):
            tails[k] = end[row + k]
        # What follows the launch of a save: its record; else the install's two records alone.
        share = shares + (self.row_of[layers - 1] * KINDS + SAVE) * RESOURCES
        at = base + host + (self.event if sends(share) else 0)
        self.state[0] = larger(at + self.event, end[row + ATTEND])
        out[0], out[1], out[2], out[3] = self.state[0] - begin, waited + exposed, exposed, link
        out[4] = self.state[0]


cdef inline bint sends(const double* share) noexcept nogil:
    cdef int64_t i
    for i in range(RESOURCES):
        if share[i] >= 0:
            return True
    return False
