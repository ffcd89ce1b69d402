# SPDX-License-Identifier: Apache-2.0
"""The state of a device pool: which token is held at which place, and which gives way.

A plan is made in passes over the wanted ids: ``mark`` finds faults and changes nothing that
lasts, ``classify`` says where each id is held, ``settle`` gives places to those that are not.
All hits of a plan are counted as used before the first miss takes a place.  When a place is
given away twice in one plan (small sets, ARC's young entries), the last one has it.

No bytes are moved here.  Four policies: Previous, Lru, Fifo (set-associative), Arc.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

cdef enum:
    NONE = -1
    NOTHING = -2      # of a negative id: no row is served
    FAULT_RANGE = 1
    FAULT_REPEAT = 2
    FAULT_BLOCK = 3
    MAX_CAPACITY = 268435455  # a place and a list share 32 bits
    MAX_IDS = 2147483647

cdef enum:  # which list an entry of Arc is on
    FREE = 0
    T1
    T2
    B1
    B2

ctypedef struct node:
    int32_t prev
    int32_t next
    int32_t id
    int32_t extra   # Arc: place * 8 + list


cdef class Books:
    """Places 0 .. capacity - 1 for tokens 0 .. num_ids - 1; at most max_wanted a plan.

    used: places that hold a token; hits, misses: of the last plan; fault_index: of its fault.
    """

    cdef readonly int64_t capacity, num_ids, max_wanted, used, hits, misses, fault_index
    cdef uint8_t* seen        # a bit per id: wanted by the plan being made; all zero between plans
    cdef int32_t* wanted      # [max_wanted] the plan's ids
    cdef int32_t* of_place    # [capacity] position in the plan that is installed there; or -1
    cdef int32_t* missing     # [max_wanted] positions that are not held, in order
    cdef int32_t* held_at     # [max_wanted] positions that are held, in order

    def __cinit__(self, int64_t capacity, int64_t num_ids, int64_t max_wanted, *rest):
        if not 1 <= capacity <= MAX_CAPACITY:
            raise ValueError(f"capacity: expected 1 .. {MAX_CAPACITY}, got {capacity}")
        if not 1 <= num_ids <= MAX_IDS:
            raise ValueError(f"num_ids: expected 1 .. {MAX_IDS}, got {num_ids}")
        if not 1 <= max_wanted <= capacity:
            raise ValueError(f"max_wanted: expected 1 .. {capacity}, got {max_wanted}")
        self.capacity, self.num_ids, self.max_wanted = capacity, num_ids, max_wanted
        self.fault_index = NONE
        self.seen = <uint8_t*>calloc(<size_t>(num_ids // 8 + 1), 1)
        self.wanted = <int32_t*>malloc(<size_t>max_wanted * 4)
        self.missing = <int32_t*>malloc(<size_t>max_wanted * 4)
        self.held_at = <int32_t*>malloc(<size_t>max_wanted * 4)
        self.of_place = <int32_t*>malloc(<size_t>capacity * 4)
        if (
            self.seen == NULL or self.wanted == NULL or self.missing == NULL
            or self.held_at == NULL or self.of_place == NULL
        ):
            raise MemoryError("the state of a pool does not fit memory")
        memset(self.of_place, 0xff, <size_t>capacity * 4)

    def __dealloc__(self):
        free(self.seen)
        free(self.wanted)
        free(self.missing)
        free(self.held_at)
        free(self.of_place)

    # ---------------------------------------------------------------- for the policies
    cdef void classify(self, int64_t n, int32_t* source) noexcept nogil:
        pass

    cdef void settle(self, int64_t n, int32_t* source, int32_t* target) noexcept nogil:
        pass

    cdef void drop(self, int32_t id) noexcept nogil:
        pass

    cdef int32_t find(self, int32_t id) noexcept nogil:
        return NONE

    cdef void clear(self) noexcept nogil:
        pass

    cdef int32_t id_at(self, int64_t place) noexcept nogil:
        return NONE

    # ---------------------------------------------------------------- one plan
    cdef int load(self, ids) except -1:
        # A private copy in 32 bits; what does not fit becomes an id that is out of range.
        cdef const int32_t[:] narrow
        cdef const int64_t[:] wide
        cdef int64_t i, n, bound = self.num_ids
        cdef int64_t one
        if ids.itemsize == 4:
            narrow = ids
            n = narrow.shape[0]
            if n > self.max_wanted:
                raise ValueError(f"ids: expected at most {self.max_wanted}, got {n}")
            for i in range(n):
                self.wanted[i] = narrow[i]
        else:
            wide = ids
            n = wide.shape[0]
            if n > self.max_wanted:
                raise ValueError(f"ids: expected at most {self.max_wanted}, got {n}")
            for i in range(n):
                one = wide[i]
                # num_ids itself fits 32 bits and is out of range.
                self.wanted[i] = <int32_t>(NONE if one < 0 else bound if one >= bound else one)
        return 0

    cdef int mark(self, int64_t n) noexcept nogil:
        cdef int64_t i, bound = self.num_ids
        cdef int32_t id
        cdef int fault = 0
        cdef uint8_t bit
        self.fault_index = NONE
        for i in range(n):
            id = self.wanted[i]
            if id < 0:
                continue
            if id >= bound:
                fault = FAULT_RANGE
                break
            bit = <uint8_t>(1 << (id & 7))
            if self.seen[id >> 3] & bit:
                fault = FAULT_REPEAT
                break
            self.seen[id >> 3] |= bit
        else:
            return 0
        self.fault_index = i
        self.unmark(i)
        return fault

    cdef void unmark(self, int64_t n) noexcept nogil:
        cdef int64_t i
        for i in range(n):
            if self.wanted[i] >= 0:
                self.seen[self.wanted[i] >> 3] = 0

    def plan_rows(
        self, ids, const int64_t[::1] table, int64_t block_size, int64_t num_blocks,
        int64_t[::1] wide, int64_t[::1] rows, int32_t[::1] source, int32_t[::1] target,
    ):
        """Do what ``plan`` does and find the rows of a paged full cache; 3: a block is missing.

        table: [columns] block of each block_size tokens, below num_blocks where needed.
        wide:  [n] written: the ids in 64 bits; rows: [n] written: block * block_size + row, or -1.
        """
        cdef int64_t i, n = wide.shape[0]
        cdef int fault
        if ids.shape[0] != n or rows.shape[0] != n:
            raise ValueError(f"expected {n} ids and rows")
        self.load(ids)
        for i in range(n):
            wide[i] = self.wanted[i]
        if n:
            with nogil:
                fault = self.locate(n, table, block_size, num_blocks, &rows[0])
            if fault:
                return fault
        return self.plan(ids, source, target)

    cdef int locate(
        self, int64_t n, const int64_t[::1] table, int64_t block_size, int64_t num_blocks,
        int64_t* rows,
    ) noexcept nogil:
        cdef int64_t i, id, block, column, columns = table.shape[0]
        cdef int shift = -1
        if block_size & (block_size - 1) == 0:
            shift = 0
            while (<int64_t>1 << shift) < block_size:
                shift += 1
        for i in range(n):
            id = self.wanted[i]
            if id < 0:
                rows[i] = NONE
                continue
            # A division costs more than all the rest.
            column = id >> shift if shift >= 0 else id // block_size
            self.fault_index = i
            if id >= self.num_ids:
                return FAULT_RANGE
            if column >= columns:
                return FAULT_BLOCK
            block = table[column]
            if block < 0 or block >= num_blocks:
                return FAULT_BLOCK
            rows[i] = block * block_size + (id - column * block_size)
        return 0

    def plan(self, ids, int32_t[::1] source, int32_t[::1] target):
        """Decide one selection; 0, or 1 (an id out of range) or 2 (an id twice) at fault_index.

        ids:    [n] int32 or int64; negative ids ask for nothing.
        source: [n] written: place that holds ids[i], -1 where it must be read, -2 for nothing.
        target: [n] written: place the row is to be put in, or -1.
        On a fault nothing has changed.
        """
        cdef int fault
        cdef int64_t n = source.shape[0]
        if ids.shape[0] != n or target.shape[0] != n:
            raise ValueError(f"expected {n} ids and targets")
        self.load(ids)
        if n == 0:
            self.hits = 0
            self.misses = 0
            self.fault_index = NONE
            with nogil:
                self.settle(0, NULL, NULL)
            return 0
        with nogil:
            fault = self.mark(n)
            if fault == 0:
                self.decide(n, &source[0], &target[0])
        return fault

    cdef void decide(self, int64_t n, int32_t* source, int32_t* target) noexcept nogil:
        cdef int64_t i, hits = 0, misses = 0
        cdef int32_t place
        self.classify(n, source)
        for i in range(n):
            place = source[i]
            target[i] = NONE
            # Both are written, one counts: no branch to mispredict.
            self.held_at[hits] = <int32_t>i
            self.missing[misses] = <int32_t>i
            hits += place >= 0
            misses += place == NONE
        self.hits = hits
        self.misses = misses
        self.settle(n, source, target)
        self.unmark(n)

    cdef inline void give(self, int64_t i, int32_t place, int32_t* target) noexcept nogil:
        # The place may have been given away in this very plan: the last one has it.
        cdef int32_t before = self.of_place[place]
        if before >= 0:
            target[before] = NONE
        self.of_place[place] = <int32_t>i
        target[i] = place

    cdef inline void forget_gifts(self, const int32_t* target) noexcept nogil:
        cdef int64_t i
        for i in range(self.misses):
            if target[self.missing[i]] >= 0:
                self.of_place[target[self.missing[i]]] = NONE

    # ---------------------------------------------------------------- asked from outside
    def place_of(self, int64_t id):
        """The place that holds the token, or -1."""
        if not 0 <= id < self.num_ids:
            return NONE
        return self.find(<int32_t>id)

    def forget(self, int64_t first, int64_t end):
        """Hold no token in [first, end) any more; returns how many were."""
        cdef int64_t place, before = self.used
        cdef int32_t id
        first = max(first, 0)
        end = min(end, self.num_ids)
        if end - first <= self.capacity:
            for id in range(<int32_t>first, <int32_t>max(end, first)):
                self.drop(id)
        else:
            for place in range(self.capacity):
                id = self.id_at(place)
                if first <= id < end:
                    self.drop(id)
            self.drop_ghosts(first, end)
        return before - self.used

    cdef void drop_ghosts(self, int64_t first, int64_t end) noexcept nogil:
        pass

    def reset(self):
        """Hold nothing."""
        self.clear()

    def tokens(self, int32_t[::1] out):
        """out: [capacity] written: the token at each place, or -1."""
        cdef int64_t place
        if out.shape[0] != self.capacity:
            raise ValueError(f"out: expected {self.capacity} entries")
        for place in range(self.capacity):
            out[place] = self.id_at(place)


cdef class Mapped(Books):
    """Finds a token by a table over all ids; free places are on a stack."""

    cdef int32_t* table     # [num_ids] place (Arc: entry), or -1
    cdef int32_t* stack     # [capacity] free places, the next on top
    cdef int64_t n_free

    def __cinit__(self, int64_t capacity, int64_t num_ids, int64_t max_wanted, *rest):
        self.table = <int32_t*>malloc(<size_t>num_ids * 4)
        self.stack = <int32_t*>malloc(<size_t>capacity * 4)
        if self.table == NULL or self.stack == NULL:
            raise MemoryError("the state of a pool does not fit memory")

    def __dealloc__(self):
        free(self.table)
        free(self.stack)

    cdef void clear(self) noexcept nogil:
        cdef int64_t i
        memset(self.table, 0xff, <size_t>self.num_ids * 4)
        for i in range(self.capacity):
            self.stack[i] = <int32_t>(self.capacity - 1 - i)
        self.n_free = self.capacity
        self.used = 0

    cdef int32_t find(self, int32_t id) noexcept nogil:
        return self.table[id]

    cdef void classify(self, int64_t n, int32_t* source) noexcept nogil:
        cdef int64_t i
        cdef int32_t id
        for i in range(n):
            id = self.wanted[i]
            source[i] = NOTHING if id < 0 else self.table[id]


cdef class Previous(Mapped):
    """Holds what the last plan wanted, and nothing else."""

    cdef int32_t* ids       # [capacity] token at a place, or -1

    def __cinit__(self, int64_t capacity, int64_t num_ids, int64_t max_wanted, *rest):
        self.ids = <int32_t*>malloc(<size_t>capacity * 4)
        if self.ids == NULL:
            raise MemoryError("the state of a pool does not fit memory")
        self.clear()

    def __dealloc__(self):
        free(self.ids)

    cdef void clear(self) noexcept nogil:
        Mapped.clear(self)
        memset(self.ids, 0xff, <size_t>self.capacity * 4)

    cdef int32_t id_at(self, int64_t place) noexcept nogil:
        return self.ids[place]

    cdef void drop(self, int32_t id) noexcept nogil:
        cdef int32_t place = self.table[id]
        if place < 0:
            return
        self.table[id] = NONE
        self.ids[place] = NONE
        self.stack[self.n_free] = place
        self.n_free += 1
        self.used -= 1

    cdef void settle(self, int64_t n, int32_t* source, int32_t* target) noexcept nogil:
        cdef int64_t place, i
        cdef int32_t id
        cdef bint gone
        cdef int64_t n_free = self.n_free
        for place in range(self.capacity):
            id = self.ids[place]
            if id < 0:
                continue
            # As often as not: without a branch.  The stack has room: free places are not held.
            gone = not (self.seen[id >> 3] >> (id & 7)) & 1
            self.stack[n_free] = <int32_t>place
            n_free += gone
            self.ids[place] = id | -<int32_t>gone
            self.table[id] = <int32_t>place | -<int32_t>gone
        self.used -= n_free - self.n_free
        self.n_free = n_free
        for i in range(self.misses):
            self.n_free -= 1
            place = self.stack[self.n_free]
            id = self.wanted[self.missing[i]]
            self.ids[place] = id
            self.table[id] = <int32_t>place
            target[self.missing[i]] = <int32_t>place
        self.used += self.misses


cdef class Lru(Mapped):
    """Replaces the token that was wanted least recently."""

    cdef node* nodes        # [capacity + 1]: a ring; the last is its head (next: the oldest)

    def __cinit__(self, int64_t capacity, int64_t num_ids, int64_t max_wanted, *rest):
        self.nodes = <node*>malloc(<size_t>(capacity + 1) * sizeof(node))
        if self.nodes == NULL:
            raise MemoryError("the state of a pool does not fit memory")
        self.clear()

    def __dealloc__(self):
        free(self.nodes)

    cdef void clear(self) noexcept nogil:
        cdef int64_t i
        Mapped.clear(self)
        for i in range(self.capacity):
            self.nodes[i].id = NONE
        self.nodes[self.capacity].id = NONE
        self.nodes[self.capacity].prev = <int32_t>self.capacity
        self.nodes[self.capacity].next = <int32_t>self.capacity

    cdef int32_t id_at(self, int64_t place) noexcept nogil:
        return self.nodes[place].id

    cdef void drop(self, int32_t id) noexcept nogil:
        cdef int32_t place = self.table[id]
        if place < 0:
            return
        unlink(self.nodes, place)
        self.table[id] = NONE
        self.nodes[place].id = NONE
        self.stack[self.n_free] = place
        self.n_free += 1
        self.used -= 1

    cdef void settle(self, int64_t n, int32_t* source, int32_t* target) noexcept nogil:
        cdef int64_t i
        cdef int32_t place, id, head = <int32_t>self.capacity
        cdef node* nodes = self.nodes
        for i in range(self.hits):
            place = source[self.held_at[i]]
            unlink(nodes, place)
            append(nodes, head, place)
        for i in range(self.misses):
            if self.n_free:
                self.n_free -= 1
                self.used += 1
                place = self.stack[self.n_free]
            else:
                # Never one that this plan wants: those are the newest, and at most capacity.
                place = nodes[head].next
                self.table[nodes[place].id] = NONE
                unlink(nodes, place)
            id = self.wanted[self.missing[i]]
            nodes[place].id = id
            self.table[id] = place
            append(nodes, head, place)
            target[self.missing[i]] = place


cdef inline void unlink(node* nodes, int32_t i) noexcept nogil:
    nodes[nodes[i].prev].next = nodes[i].next
    nodes[nodes[i].next].prev = nodes[i].prev


cdef inline void append(node* nodes, int32_t head, int32_t i) noexcept nogil:
    cdef int32_t last = nodes[head].prev
    nodes[i].prev = last
    nodes[i].next = head
    nodes[last].next = i
    nodes[head].prev = i


cdef class Fifo(Books):
    """Set-associative: a token hashes to a set of ``ways`` places; the oldest there gives way.

    A set's pointer moves when a token is installed and at no other time.
    Set of a token: the upper half of id * 2654435769 (mod 2^32), scaled to the sets.
    """

    cdef readonly int64_t ways, sets
    cdef int32_t* tags      # [capacity] token at a place, or -1
    cdef int32_t* pointers  # [sets]

    def __cinit__(self, int64_t capacity, int64_t num_ids, int64_t max_wanted, int64_t ways):
        if not 1 <= ways <= capacity or capacity % ways:
            raise ValueError(f"ways: expected a divisor of {capacity}, got {ways}")
        self.ways = ways
        self.sets = capacity // ways
        self.tags = <int32_t*>malloc(<size_t>capacity * 4)
        self.pointers = <int32_t*>malloc(<size_t>self.sets * 4)
        if self.tags == NULL or self.pointers == NULL:
            raise MemoryError("the state of a pool does not fit memory")
        self.clear()

    def __dealloc__(self):
        free(self.tags)
        free(self.pointers)

    cdef void clear(self) noexcept nogil:
        memset(self.tags, 0xff, <size_t>self.capacity * 4)
        memset(self.pointers, 0, <size_t>self.sets * 4)
        self.used = 0

    cdef inline int64_t set_of(self, int32_t id) noexcept nogil:
        cdef uint64_t hashed = <uint32_t>(<uint32_t>id * <uint32_t>2654435769)
        return <int64_t>((hashed * <uint64_t>self.sets) >> 32)

    cdef int32_t id_at(self, int64_t place) noexcept nogil:
        return self.tags[place]

    cdef int32_t find(self, int32_t id) noexcept nogil:
        cdef int64_t first = self.set_of(id) * self.ways
        return in_set(self.tags + first, self.ways, id, <int32_t>first)

    cdef void drop(self, int32_t id) noexcept nogil:
        cdef int32_t place = self.find(id)
        if place >= 0:
            self.tags[place] = NONE
            self.used -= 1

    cdef void classify(self, int64_t n, int32_t* source) noexcept nogil:
        cdef int64_t i, first, ways = self.ways
        cdef int32_t id
        for i in range(n):
            id = self.wanted[i]
            if id < 0:
                source[i] = NOTHING
                continue
            first = self.set_of(id) * ways
            source[i] = in_set(self.tags + first, ways, id, <int32_t>first)

    cdef void settle(self, int64_t n, int32_t* source, int32_t* target) noexcept nogil:
        cdef int64_t i, which
        cdef int32_t id, place
        for i in range(self.misses):
            id = self.wanted[self.missing[i]]
            which = self.set_of(id)
            place = <int32_t>(which * self.ways) + self.pointers[which]
            self.pointers[which] += 1
            if self.pointers[which] == self.ways:
                self.pointers[which] = 0
            self.used += self.tags[place] < 0
            self.tags[place] = id
            self.give(self.missing[i], place, target)
        self.forget_gifts(target)


cdef inline int32_t in_set(
    const int32_t* tags, int64_t ways, int32_t id, int32_t first
) noexcept nogil:
    # No way out of the middle: the compiler turns it into comparisons of whole vectors.  At most
    # one way matches; its number plus one is all that is not masked out.
    cdef int32_t way
    cdef int32_t found = 0
    for way in range(<int32_t>ways):
        found |= -<int32_t>(tags[way] == id) & (way + 1)
    return (first + found - 1) | -<int32_t>(found == 0)


cdef class Arc(Mapped):
    """Megiddo and Modha's adaptive replacement cache (FAST 2003), integers only.

    ``t1``, ``t2``: tokens held, wanted once and more often; ``b1``, ``b2``: tokens remembered
    that gave way from either; ``target``: how many places t1 is meant to have.
    The steps of ``target`` are max(1, |b2| // |b1|) and max(1, |b1| // |b2|).  A token gives way
    only when no place is free (places are freed by forgetting, which the paper does not have).
    """

    cdef node* nodes        # [2 * capacity + 5]; the last five are heads, by list
    cdef int32_t* at_place  # [capacity] entry that has the place, or -1
    cdef int32_t* spare     # [2 * capacity] entries not in use
    cdef int64_t n_spare
    cdef int64_t sizes[5]
    cdef readonly int64_t target

    def __cinit__(self, int64_t capacity, int64_t num_ids, int64_t max_wanted, *rest):
        self.nodes = <node*>malloc(<size_t>(2 * capacity + 5) * sizeof(node))
        self.at_place = <int32_t*>malloc(<size_t>capacity * 4)
        self.spare = <int32_t*>malloc(<size_t>capacity * 8)
        if self.nodes == NULL or self.at_place == NULL or self.spare == NULL:
            raise MemoryError("the state of a pool does not fit memory")
        self.clear()

    def __dealloc__(self):
        free(self.nodes)
        free(self.at_place)
        free(self.spare)

    def sizes_of_lists(self):
        """The sizes of the lists, as (t1, t2, b1, b2)."""
        return self.sizes[T1], self.sizes[T2], self.sizes[B1], self.sizes[B2]

    cdef void clear(self) noexcept nogil:
        cdef int64_t i
        cdef int32_t head
        Mapped.clear(self)
        memset(self.at_place, 0xff, <size_t>self.capacity * 4)
        self.n_spare = 2 * self.capacity
        for i in range(self.n_spare):
            self.spare[i] = <int32_t>(self.n_spare - 1 - i)
        for i in range(5):
            head = self.head(<int32_t>i)
            self.nodes[head].prev = head
            self.nodes[head].next = head
            self.nodes[head].id = NONE
            self.sizes[i] = 0
        self.target = 0

    cdef inline int32_t head(self, int32_t which) noexcept nogil:
        return <int32_t>(2 * self.capacity) + which

    cdef inline int32_t list_of(self, int32_t entry) noexcept nogil:
        return self.nodes[entry].extra & 7

    cdef inline int32_t place_in(self, int32_t entry) noexcept nogil:
        return self.nodes[entry].extra >> 3

    cdef inline void move(self, int32_t entry, int32_t to) noexcept nogil:
        cdef int32_t which = self.list_of(entry)
        unlink(self.nodes, entry)
        self.sizes[which] -= 1
        append(self.nodes, self.head(to), entry)
        self.sizes[to] += 1
        self.nodes[entry].extra += to - which

    cdef inline void remove(self, int32_t entry) noexcept nogil:
        # The entry holds no place.
        unlink(self.nodes, entry)
        self.sizes[self.list_of(entry)] -= 1
        self.table[self.nodes[entry].id] = NONE
        self.spare[self.n_spare] = entry
        self.n_spare += 1

    cdef inline int32_t oldest(self, int32_t which) noexcept nogil:
        return self.nodes[self.head(which)].next

    cdef inline void free_place(self, int32_t entry) noexcept nogil:
        cdef int32_t place = self.place_in(entry)
        self.at_place[place] = NONE
        self.stack[self.n_free] = place
        self.n_free += 1
        self.used -= 1

    cdef int32_t find(self, int32_t id) noexcept nogil:
        cdef int32_t entry = self.table[id]
        if entry < 0 or self.list_of(entry) >= B1:
            return NONE
        return self.place_in(entry)

    cdef int32_t id_at(self, int64_t place) noexcept nogil:
        cdef int32_t entry = self.at_place[place]
        return NONE if entry < 0 else self.nodes[entry].id

    cdef void drop(self, int32_t id) noexcept nogil:
        # Ghosts too: what is rewritten is another token.
        cdef int32_t entry = self.table[id]
        if entry < 0:
            return
        if self.list_of(entry) < B1:
            self.free_place(entry)
        self.remove(entry)

    cdef void drop_ghosts(self, int64_t first, int64_t end) noexcept nogil:
        cdef int32_t which, entry, after
        for which in range(B1, B2 + 1):
            entry = self.oldest(which)
            while entry != self.head(which):
                after = self.nodes[entry].next
                if first <= self.nodes[entry].id < end:
                    self.remove(entry)
                entry = after

    cdef void classify(self, int64_t n, int32_t* source) noexcept nogil:
        cdef int64_t i
        cdef int32_t id
        for i in range(n):
            id = self.wanted[i]
            source[i] = NOTHING if id < 0 else self.find(id)

    cdef inline void replace(self, bint in_b2) noexcept nogil:
        cdef int64_t young = self.sizes[T1]
        cdef int32_t entry
        if self.n_free:
            return
        if young and (
            young > self.target or (in_b2 and young == self.target) or not self.sizes[T2]
        ):
            entry = self.oldest(T1)
            self.free_place(entry)
            self.move(entry, B1)
        else:
            entry = self.oldest(T2)
            self.free_place(entry)
            self.move(entry, B2)

    cdef inline int32_t make_room(self, int32_t id) noexcept nogil:
        # An entry for the token, on the list it goes to; a place is free afterwards.
        cdef int64_t step
        cdef int32_t entry = self.table[id]
        if entry >= 0 and self.list_of(entry) == B1:
            step = max(self.sizes[B2] // self.sizes[B1], 1)
            self.target = min(self.target + step, self.capacity)
            self.replace(False)
            self.move(entry, T2)
            return entry
        if entry >= 0:
            step = max(self.sizes[B1] // self.sizes[B2], 1)
            self.target = max(self.target - step, 0)
            self.replace(True)
            self.move(entry, T2)
            return entry
        if self.sizes[T1] + self.sizes[B1] == self.capacity:
            if self.sizes[T1] < self.capacity:
                self.remove(self.oldest(B1))
                self.replace(False)
            else:
                entry = self.oldest(T1)
                self.free_place(entry)
                self.remove(entry)
        else:
            if self.n_spare == 0:
                self.remove(self.oldest(B2))
            self.replace(False)
        self.n_spare -= 1
        entry = self.spare[self.n_spare]
        self.nodes[entry].id = id
        self.nodes[entry].extra = T1
        self.table[id] = entry
        append(self.nodes, self.head(T1), entry)
        self.sizes[T1] += 1
        return entry

    cdef void settle(self, int64_t n, int32_t* source, int32_t* target) noexcept nogil:
        cdef int64_t i
        cdef int32_t place, entry
        for i in range(self.hits):
            self.move(self.table[self.wanted[self.held_at[i]]], T2)
        for i in range(self.misses):
            entry = self.make_room(self.wanted[self.missing[i]])
            self.n_free -= 1
            self.used += 1
            place = self.stack[self.n_free]
            self.at_place[place] = entry
            self.nodes[entry].extra = place * 8 + self.list_of(entry)
            self.give(self.missing[i], place, target)
        self.forget_gifts(target)
