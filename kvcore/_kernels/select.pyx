# SPDX-License-Identifier: Apache-2.0
"""Which block goes where: the planning half of GatherSelectionKvCache.

A row is planned from what it wants and what it holds into a short list of blocks to bring; no
byte of an output is touched.  Work grows with the top-k and with nothing else: ids are looked up
in a hash table of the row's own, which fits the first cache levels however long the full cache
is, and what stays where it is costs no entry in the list.

Memory is ten bytes an id: every row has to be planned before the first is moved, so what a row
plans cannot be thrown away, but nothing else is kept.  The wanted ids become the list's ids, the
places where they are held become its places, both packed where they lie, and the hash table lies
over the list's third column, which is filled when the table has served: over this row's, and as
far as it is larger over those of the rows before.  So rows are planned from the last to the
first.

A row reads the caller's arrays through small private copies, so that a thread that edits them
meanwhile cannot steer a copy.
"""

from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from kvcore._kernels.parallel cimport run_chunks

cdef extern from *:
    """
    /* The first place from p on that is free; there is one.  free is readable 8 bytes further. */
    static inline int64_t kv_next_free(const char *free, int64_t p)
    {
    #if defined(__GNUC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
        for (;; p += 8) {
            uint64_t word;
            memcpy(&word, free + p, 8);
            if (word)
                return p + (__builtin_ctzll(word) >> 3);
        }
    #else
        while (!free[p])
            p++;
        return p;
    #endif
    }
    """
    int64_t kv_next_free(const char* free, int64_t p) noexcept nogil

cdef enum:
    PRIVATE = 512         # values of the caller's arrays copied at a time

# Ids and table entries; places, and positions of ids in a row.
ctypedef fused entry_t:
    int32_t
    int64_t

ctypedef fused place_t:
    uint16_t
    uint32_t

# One row's working memory.
ctypedef struct workspace:
    char* ids          # entry_t[topk + 1]: wanted ids, each once, from position 1 on
    char* places       # place_t[topk + 1], by position: the place that holds the id
    char* entries      # entry_t[topk]
    char* slots        # place_t[n_slots]: hash table of positions in ids; 0 is free
    char* free         # [topk] by place: whether nothing wanted is held there


cdef divisor divisor_of(int64_t size) noexcept nogil:
    cdef divisor d
    d.size = size
    d.shift = -1
    if size > 0 and size & (size - 1) == 0:
        d.shift = 0
        while (<int64_t>1 << d.shift) < size:
            d.shift += 1
    return d


cdef inline char* row_of(const index_rows* array, int64_t request, int64_t step) noexcept nogil:
    return array.data + request * array.outer + step * array.inner


cdef inline int64_t load_at(const index_rows* array, const char* row, int64_t i) noexcept nogil:
    cdef int64_t wide
    cdef int32_t narrow
    if array.itemsize == 8:
        memcpy(&wide, row + i * array.stride, 8)
        return wide
    memcpy(&narrow, row + i * array.stride, 4)
    return narrow


cdef inline void load_ids(
    const index_rows* array, const char* row, int64_t first, int64_t n, int64_t last, entry_t* out
) noexcept nogil:
    # Ids beyond the last may become -1: they need not fit.
    cdef int64_t i, id
    if array.stride == sizeof(entry_t) and array.itemsize == sizeof(entry_t):
        memcpy(out, row + first * array.stride, <size_t>(n * sizeof(entry_t)))
        return
    for i in range(n):
        id = load_at(array, row, first + i)
        out[i] = <entry_t>(id if <uint64_t>id <= <uint64_t>last else -1)


cdef inline int64_t start_of(int64_t id, int64_t n_slots) noexcept nogil:
    # Fibonacci hashing: neighbouring ids and ids far apart spread alike.
    return <int64_t>(
        ((<uint64_t>id * <uint64_t>0x9E3779B97F4A7C15) >> 32) * <uint64_t>n_slots >> 32
    )


cdef inline int64_t following(int64_t at, int64_t n_slots) noexcept nogil:
    return at + 1 if at + 1 < n_slots else 0


cdef int64_t collect(
    const select_job* job, const char* row, entry_t* ids, place_t* slots, int64_t last,
    int64_t* largest
) noexcept nogil:
    # Keep the ids in [0, last], each once, in order from position 1 on; enter them in the hash
    # table.  Position 0 holds what is looked for, so that a free slot ends the search as a match
    # does, and no branch depends on which of the two it was.
    cdef entry_t wanted[PRIVATE]
    cdef int64_t i, part, first, some, at, n = 0, most = -1
    cdef int64_t topk = job.topk, n_slots = job.n_slots
    cdef uint32_t found
    cdef entry_t id
    memset(slots, 0, <size_t>(n_slots * sizeof(place_t)))
    for part in range((topk + PRIVATE - 1) // PRIVATE):
        first = part * PRIVATE
        some = topk - first if topk - first < PRIVATE else PRIVATE
        load_ids(&job.topk_ids, row, first, some, last, wanted)
        for i in range(some):
            id = wanted[i]
            if <uint64_t><int64_t>id > <uint64_t>last:
                continue
            ids[0] = id
            at = start_of(id, n_slots)
            found = slots[at]
            while ids[found] != id:
                at = following(at, n_slots)
                found = slots[at]
            if found == 0:
                n += 1
                slots[at] = <place_t>n
                ids[n] = id
                most = id if id > most else most
    largest[0] = most
    return n


cdef int64_t find_held(
    const select_job* job, const char* row, entry_t* ids, const place_t* slots, place_t* places,
    char* free, int64_t n, int64_t n_held, int64_t last, bint repeats
) noexcept nogil:
    # Where each wanted block is held, and which places hold none; returns how many hold one.
    # repeats: an id listed twice is held nowhere; else one of its places is given.
    cdef entry_t held[PRIVATE]
    cdef int64_t i, p, part, first, some, at, n_found = 0
    cdef int64_t n_slots = job.n_slots
    cdef place_t nowhere = <place_t>~<place_t>0
    cdef uint32_t found
    cdef entry_t id
    memset(places, 0xFF, <size_t>((n + 1) * sizeof(place_t)))
    for part in range((n_held + PRIVATE - 1) // PRIVATE):
        first = part * PRIVATE
        some = n_held - first if n_held - first < PRIVATE else PRIVATE
        load_ids(&job.status, row, first, some, last, held)
        for i in range(some):
            p = first + i
            id = held[i]
            found = 0
            if <uint64_t><int64_t>id <= <uint64_t>last:
                ids[0] = id
                at = start_of(id, n_slots)
                found = slots[at]
                while ids[found] != id:
                    at = following(at, n_slots)
                    found = slots[at]
            n_found += found != 0
            free[p] = found == 0
            if repeats and places[found] != nowhere:
                p = nowhere - 1
            places[found] = <place_t>p
    if n_held < n:
        memset(free + n_held, 1, <size_t>(n - n_held))
    return n_found


cdef void free_again(const place_t* places, char* free, int64_t n) noexcept nogil:
    # Where an id is listed twice: places that hold one which is held nowhere are free.
    cdef int64_t i
    memset(free, 1, <size_t>n)
    for i in range(1, n + 1):
        if places[i] < n:
            free[places[i]] = 0


cdef int64_t pack(
    entry_t* ids, place_t* places, int64_t n, int64_t fresh_blocks, int64_t* n_placed
) noexcept nogil:
    # Keep the ids that an op has to bring, at positions from 1 on, with the places that hold
    # them.  Which those are cannot be predicted, so nothing branches on it.  n_placed: how many
    # ids have a place.
    cdef int64_t i, n_ops = 0, placed = 0
    cdef place_t nowhere = <place_t>~<place_t>0
    cdef place_t place
    cdef entry_t id
    for i in range(1, n + 1):
        id = ids[i]
        place = places[i]
        ids[n_ops + 1] = id
        places[n_ops + 1] = place
        placed += place != nowhere
        n_ops += (place >= n) | (id >= fresh_blocks)
    n_placed[0] = placed
    return n_ops


cdef inline void note(select_fault* fault, int64_t kind, int64_t at, int64_t seen) noexcept nogil:
    if fault.kind == NO_FAULT:
        fault.kind = kind
        fault.at = at
        fault.seen = seen


cdef void assign(
    const select_job* job, select_row* row, select_fault* fault, const char* full_table,
    const entry_t* ids, place_t* places, entry_t* entries, const char* free, int64_t last,
    int64_t fresh_blocks
) noexcept nogil:
    # Steps 4 and 5 of docs/gather.md: what moves, what is read, and where to.
    cdef int64_t i, place, id, column, entry, spot = 0, n = row.n
    cdef int64_t moved = 0, refreshed = 0
    cdef int64_t elsewhere = <place_t>~<place_t>0 - 1
    cdef int64_t columns = job.full_columns, blocks = job.full_blocks
    cdef divisor per_full = job.per_full
    cdef index_rows table = job.full_table
    cdef bint held
    for i in range(1, row.n_ops + 1):
        place = places[i]
        id = ids[i]
        held = place < elsewhere
        if held and id < fresh_blocks:
            moved += 1
            entry = -1 - place
        else:
            refreshed += held
            # A full cache may have blocks of no tokens.
            column = quotient(id, &per_full) if per_full.size > 0 else columns
            entry = 0
            if column >= columns:
                note(fault, BEYOND, id, column)
            else:
                entry = load_at(&table, full_table, column)
                if <uint64_t>entry >= <uint64_t>blocks:
                    note(fault, FULL_ENTRY, column, entry)
                    entry = 0
        entries[i - 1] = <entry_t>entry
        if id == last:
            row.partial = <int32_t>(i - 1)
            row.partial_held = held
        if place >= n:
            spot = kv_next_free(free, spot)
            places[i] = <place_t>spot
            spot += 1
    row.moved = <int32_t>moved
    row.refreshed = <int32_t>refreshed


cdef int64_t staying_place(
    const entry_t* ids, const place_t* places, int64_t n, int64_t id
) noexcept nogil:
    cdef int64_t i
    for i in range(1, n + 1):
        if ids[i] == id:
            return places[i]
    return -1


cdef void put_largest_last(
    select_row* row, const entry_t* ids, place_t* places, int64_t largest, int64_t largest_place
) noexcept nogil:
    # Step 6.  A block that stays is copied; one that an op brings is brought elsewhere.
    # largest_place: where the largest stays, if it does.
    cdef int64_t i, largest_op = 0, other_op = 0
    for i in range(1, row.n_ops + 1):
        if ids[i] == largest:
            largest_op = i
            largest_place = places[i]
        if <int64_t>places[i] == row.n - 1:
            other_op = i
    if largest_place == row.n - 1:
        return
    row.swap_place = <int32_t>largest_place
    if largest_op:
        places[largest_op] = <place_t>(row.n - 1)
    if other_op:
        places[other_op] = <place_t>largest_place
    if largest_op and other_op:
        row.swap = BROUGHT
    elif largest_op:
        row.swap = FROM_LAST
    else:
        row.swap = TO_LAST if other_op else EXCHANGE


cdef void place_blocks(
    const select_job* job, int64_t r, const workspace* w, select_fault* fault, int64_t last,
    int64_t fresh_blocks, entry_t* ids, place_t* places
) noexcept nogil:
    # Steps 2 to 6 of docs/gather.md for one row.
    cdef select_row* row = &job.rows[r]
    cdef entry_t* entries = <entry_t*>w.entries
    cdef place_t* slots = <place_t*>w.slots
    cdef int64_t request = r // job.steps, step = r % job.steps
    cdef const char* status = row_of(&job.status, request, step)
    cdef int64_t n, n_held, n_ops, n_found, n_placed, largest = -1, largest_place = -1
    cdef bint repeats = False
    n_held = load_at(&job.status, status, job.topk) // job.block
    n_held = 0 if n_held < 0 else job.topk if n_held > job.topk else n_held
    while True:
        n = collect(job, row_of(&job.topk_ids, request, step), ids, slots, last, &largest)
        row.n = <int32_t>n
        if n == 0:
            return
        n_found = find_held(job, status, ids, slots, places, w.free, n, n_held, last, repeats)
        if repeats:
            free_again(places, w.free, n)
        if job.ordered:
            largest_place = staying_place(ids, places, n, largest)
        n_ops = pack(ids, places, n, fresh_blocks, &n_placed)
        if repeats or n_found == n_placed:
            break
        # An id is listed twice: seldom enough to begin again.
        repeats = True
    row.n_ops = <int32_t>n_ops
    assign(
        job, row, fault, row_of(&job.full_table, request, 0), ids, places, entries, w.free, last,
        fresh_blocks
    )
    if job.ordered:
        put_largest_last(row, ids, places, largest, largest_place)


cdef void place_any(
    const select_job* job, int64_t r, const workspace* w, select_fault* fault, int64_t last,
    int64_t fresh_blocks
) noexcept nogil:
    if job.wide:
        if job.short_places:
            place_blocks(job, r, w, fault, last, fresh_blocks,
                         <int64_t*>w.ids, <uint16_t*>w.places)
        else:
            place_blocks(job, r, w, fault, last, fresh_blocks,
                         <int64_t*>w.ids, <uint32_t*>w.places)
    elif job.short_places:
        place_blocks(job, r, w, fault, last, fresh_blocks, <int32_t*>w.ids, <uint16_t*>w.places)
    else:
        place_blocks(job, r, w, fault, last, fresh_blocks, <int32_t*>w.ids, <uint32_t*>w.places)


cdef int64_t length_of(const select_job* job, const select_row* row, int64_t tail) noexcept nogil:
    # A block that ends past the row's length is always read: nothing final ends there.
    if row.partial < 0:
        return row.n * job.block
    return (row.n - <int64_t>1) * job.block + tail


cdef inline void put_used(const select_job* job, int64_t i, int64_t entry) noexcept nogil:
    if job.wide:
        (<int64_t*>job.used)[i] = entry
    else:
        (<int32_t*>job.used)[i] = <int32_t>entry


cdef inline int need_column(
    const select_job* job, select_fault* fault, const char* table, int64_t first, int64_t column
) noexcept nogil:
    cdef int64_t entry = load_at(&job.table, table, column)
    if <uint64_t>entry >= <uint64_t>job.blocks:
        note(fault, ENTRY, column, entry)
        return 0
    put_used(job, first + column, entry)
    return 1


cdef void load_columns(
    const select_job* job, int64_t r, select_fault* fault, const char* table
) noexcept nogil:
    # The selection table's entries: all that hold places below n, then those that movers leave.
    cdef const select_row* row = &job.rows[r]
    cdef int64_t n = quotient(row.n - 1, &job.per_page) + 1
    cdef int64_t first = r * job.columns, from_entry = first_entry(job, r)
    cdef int64_t i, entry, column
    for column in range(n):
        if not need_column(job, fault, table, first, column):
            return
    for column in range(n, job.columns):
        put_used(job, first + column, -1)
    if row.moved == 0:
        return
    for i in range(row.n_ops):
        entry = entry_at(job, job.entries, from_entry + i)
        if entry < 0:
            column = quotient(-1 - entry, &job.per_page)
            if used_at(job, first + column) < 0:
                if not need_column(job, fault, table, first, column):
                    return


cdef void plan_row(
    const select_job* job, int64_t r, const workspace* w, select_fault* fault
) noexcept nogil:
    cdef select_row* row = &job.rows[r]
    cdef int64_t b = r // job.steps, s = r % job.steps, column
    cdef int64_t kv = job.kv[b] if job.kv[b] > 0 else 0
    cdef int64_t q = job.q[b]
    cdef int64_t tokens = kv - (q - 1 - s) if s < q else kv
    cdef int64_t length, last = 0
    cdef select_fault source
    memset(row, 0, sizeof(select_row))
    row.partial = -1
    source.kind = NO_FAULT
    if tokens > 0:
        last = (tokens - 1) // job.block
        place_any(job, r, w, &source, last, (kv - q) // job.block if kv > q else 0)
    if row.n == 0:
        for column in range(job.columns):
            put_used(job, r * job.columns + column, -1)
        return
    # Of a row's faults the one at the selection's side is reported first.
    length = length_of(job, row, tokens - last * job.block)
    fault.row = r
    fault.kind = NO_FAULT
    if length > 0x7FFFFFFF:
        note(fault, LENGTH, 0, length)
    else:
        row.length = <int32_t>length
        load_columns(job, r, fault, row_of(&job.table, b, s))
    if source.kind != NO_FAULT:
        note(fault, source.kind, source.at, source.seen)


cdef void plan_chunk(void* context, int64_t chunk) noexcept nogil:
    cdef const select_job* job = <const select_job*>context
    cdef int64_t entry_bytes = 8 if job.wide else 4
    cdef int64_t place_bytes = 2 if job.short_places else 4
    cdef int64_t r, begin = chunk * job.chunk_rows
    cdef int64_t end = begin + job.chunk_rows
    cdef select_fault* first = &job.faults[chunk]
    cdef select_fault fault
    cdef workspace w
    first.kind = NO_FAULT
    if end > job.n_rows:
        end = job.n_rows
    w.free = job.free + chunk * job.free_bytes
    for r in range(end - 1, begin - 1, -1):
        w.ids = job.ids + (first_op(job, r) - 1) * entry_bytes
        w.places = job.places + (first_op(job, r) - 1) * place_bytes
        w.entries = job.entries + first_entry(job, r) * entry_bytes
        w.slots = w.entries + job.topk * entry_bytes - job.n_slots * place_bytes
        fault.kind = NO_FAULT
        plan_row(job, r, &w, &fault)
        if fault.kind != NO_FAULT:
            first[0] = fault


cdef void plan_rows(select_job* job, int n_threads) noexcept nogil:
    run_chunks(plan_chunk, job, job.n_chunks, n_threads)


cdef inline void store_at(
    const index_rows* array, char* row, int64_t i, int64_t value
) noexcept nogil:
    cdef int32_t narrow = <int32_t>value
    if array.itemsize == 8:
        memcpy(row + i * array.stride, &value, 8)
    else:
        memcpy(row + i * array.stride, &narrow, 4)


cdef void write_status(const select_job* job, int64_t r) noexcept nogil:
    # Entries of blocks that stay are right already.
    cdef const select_row* row = &job.rows[r]
    cdef char* status = row_of(&job.status, r // job.steps, r % job.steps)
    cdef int64_t i, first = first_op(job, r), last = row.n - 1
    cdef int64_t largest
    if row.swap == EXCHANGE or row.swap == TO_LAST:
        largest = load_at(&job.status, status, row.swap_place)
        if row.swap == EXCHANGE:
            store_at(&job.status, status, row.swap_place, load_at(&job.status, status, last))
        store_at(&job.status, status, last, largest)
    elif row.swap == FROM_LAST:
        store_at(&job.status, status, row.swap_place, load_at(&job.status, status, last))
    for i in range(first, first + row.n_ops):
        store_at(&job.status, status, place_at(job, i), entry_at(job, job.ids, i))
    if job.status.stride == job.status.itemsize:
        memset(status + row.n * job.status.stride, 0xFF,
               <size_t>((job.topk - row.n) * job.status.stride))
    else:
        for i in range(row.n, job.topk):
            store_at(&job.status, status, i, -1)
    store_at(&job.status, status, job.topk, row.length)
