# SPDX-License-Identifier: Apache-2.0
"""Which block goes where: the planning half of GatherSelectionKvCache.

A row is planned from what it wants and what it holds into a short list of blocks to bring; no
byte of an output is touched.  Work grows with the top-k and with nothing else: ids are looked up
in a hash table of the row's own, which fits the first-level cache however long the full cache
is, and what stays where it is costs no entry in the list.

Each value of the caller's arrays is read once, so that whoever edits them meanwhile cannot
steer a copy.
"""

from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from kvcore._kernels.parallel cimport run_chunks
from kvcore._kernels.scan cimport load_indices

cdef enum:
    NOWHERE = -1          # a wanted id's place: not held (memset makes it)
    TWICE = -2
    SLOTS_AN_ID = 16      # of the hash table: nearly every probe ends at the first look
    MOST_SHORT = 0xFFFF   # positions up to here take two bytes

# Ids as the caller has them, and positions as short as they can be: at a top-k of 2,048 what a
# row needs stays within the first cache levels.
ctypedef fused id_t:
    int32_t
    int64_t

ctypedef fused position_t:
    uint16_t
    uint32_t

# One row's working memory: carved out of a chunk's scratch.
ctypedef struct workspace:
    char* ids          # id_t[topk + 1]: wanted ids, each once, from position 1 on
    char* held         # id_t[topk]: status entries
    char* slots        # position_t[n_slots]: hash table of positions in ids; 0 is free
    char* who          # position_t[topk], by place: the position of what it holds, or 0
    int32_t* places    # [topk + 1], by position: the place that holds the id
    int32_t* todo      # [topk]: positions that need an op
    int32_t* free      # [topk]: places that keep nothing
    int32_t* columns   # [topk], by table column: position in used
    int shift          # from a 64-bit hash to a slot
    int64_t mask


cdef divisor divisor_of(int64_t size) noexcept nogil:
    cdef divisor d
    d.size = size
    d.shift = -1
    if size > 0 and size & (size - 1) == 0:
        d.shift = 0
        while (<int64_t>1 << d.shift) < size:
            d.shift += 1
    return d


cdef inline int table_bits(int64_t topk) noexcept nogil:
    cdef int bits = 4
    while (<int64_t>1 << bits) < SLOTS_AN_ID * topk:
        bits += 1
    return bits


cdef inline int64_t rounded(int64_t nbytes) noexcept nogil:
    return (nbytes + 63) & ~<int64_t>63


cdef int64_t scratch_bytes(int64_t topk) noexcept nogil:
    cdef int64_t position = 2 if topk <= MOST_SHORT else 4
    return (
        2 * rounded(topk * 8 + 8) + rounded(position << table_bits(topk))
        + rounded(topk * position) + 4 * rounded(topk * 4 + 4)
    )


cdef inline char* take(char** memory, int64_t nbytes) noexcept nogil:
    cdef char* taken = memory[0]
    memory[0] += rounded(nbytes)
    return taken


cdef inline workspace carve(char* memory, int64_t topk) noexcept nogil:
    cdef workspace w
    cdef int bits = table_bits(topk)
    cdef int64_t position = 2 if topk <= MOST_SHORT else 4
    w.ids = take(&memory, topk * 8 + 8)
    w.held = take(&memory, topk * 8 + 8)
    w.slots = take(&memory, position << bits)
    w.who = take(&memory, topk * position)
    w.places = <int32_t*>take(&memory, topk * 4 + 4)
    w.todo = <int32_t*>take(&memory, topk * 4 + 4)
    w.free = <int32_t*>take(&memory, topk * 4 + 4)
    w.columns = <int32_t*>take(&memory, topk * 4 + 4)
    w.shift = 64 - bits
    w.mask = (<int64_t>1 << bits) - 1
    return w


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


cdef inline void load(
    const index_rows* array, const char* row, int64_t n, id_t* out
) noexcept nogil:
    # A private copy: the caller's array is read once.
    cdef int64_t i
    if array.stride == sizeof(id_t):
        memcpy(out, row, <size_t>(n * sizeof(id_t)))
        return
    for i in range(n):
        memcpy(&out[i], row + i * array.stride, sizeof(id_t))


cdef inline int64_t start_of(int64_t id, int shift) noexcept nogil:
    # Fibonacci hashing: neighbouring ids and ids far apart spread alike.
    return <int64_t>((<uint64_t>id * <uint64_t>0x9E3779B97F4A7C15) >> shift)


cdef int64_t collect(
    const workspace* w, id_t* ids, position_t* slots, int64_t topk, int64_t last, int64_t* largest
) noexcept nogil:
    # Keep the ids in [0, last], each once, in order from position 1 on; enter them in the hash
    # table.  Position 0 holds what is looked for, so that a free slot ends the search as a match
    # does, and no branch depends on which of the two it was.
    cdef int64_t i, at, n = 0, most = -1
    cdef int64_t mask = w.mask
    cdef int shift = w.shift
    cdef uint32_t found
    cdef id_t id
    memset(slots, 0, <size_t>((mask + 1) * sizeof(position_t)))
    for i in range(1, topk + 1):
        id = ids[i]
        if <uint64_t><int64_t>id > <uint64_t>last:
            continue
        ids[0] = id
        at = start_of(id, shift)
        found = slots[at]
        while ids[found] != id:
            at = (at + 1) & mask
            found = slots[at]
        if found == 0:
            n += 1
            slots[at] = <position_t>n
            ids[n] = id
            most = id if id > most else most
    largest[0] = most
    return n


cdef int64_t find_held(
    const workspace* w, id_t* ids, const position_t* slots, const id_t* held,
    position_t* who, int64_t n, int64_t n_held, int64_t last
) noexcept nogil:
    # Where each wanted block is held; returns how many of the first n places are free.
    cdef int64_t p, at, n_free = 0
    cdef int64_t mask = w.mask
    cdef int shift = w.shift
    cdef int32_t* places = w.places
    cdef int32_t* free = w.free
    cdef uint32_t found
    cdef bint keeps, twice = False
    cdef id_t id
    memset(places, 0xFF, <size_t>(n * 4 + 4))
    for p in range(n_held):
        id = held[p]
        found = 0
        if <uint64_t><int64_t>id <= <uint64_t>last:
            ids[0] = id
            at = start_of(id, shift)
            found = slots[at]
            while ids[found] != id:
                at = (at + 1) & mask
                found = slots[at]
        who[p] = <position_t>found
        places[found] = <int32_t>p
    # What cannot be predicted (which place is free, which id needs an op) is turned into lists
    # without branching on it.  Of an id that is listed twice only the last place is known.
    for p in range(n_held):
        keeps = places[who[p]] == p
        twice |= (who[p] != 0) & (not keeps)
        if p < n:
            free[n_free] = <int32_t>p
            n_free += (who[p] == 0) | (not keeps)
    if twice:
        # It is held nowhere.
        for p in range(n_held):
            if who[p] and places[who[p]] != p:
                places[who[p]] = TWICE
        n_free = 0
        for p in range(n if n < n_held else n_held):
            free[n_free] = <int32_t>p
            n_free += who[p] == 0 or places[who[p]] == TWICE
    for p in range(n_held, n):
        free[n_free] = <int32_t>p
        n_free += 1
    return n_free


cdef void assign(
    select_row* row, select_op* ops, id_t* op_ids, const workspace* w, const id_t* ids,
    int64_t last, int64_t fresh_blocks
) noexcept nogil:
    # Rules 5 and 6: who stays, who moves, who is read.
    cdef int64_t i, k, place, n = row.n, n_todo = 0, n_taken = 0
    cdef int64_t moved = 0, refreshed = 0
    cdef int32_t* places = w.places
    cdef int32_t* todo = w.todo
    cdef const int32_t* free = w.free
    cdef bint held, stale
    for i in range(1, n + 1):
        todo[n_todo] = <int32_t>i
        n_todo += (<uint64_t><int64_t>places[i] >= <uint64_t>n) | (ids[i] >= fresh_blocks)
    for k in range(n_todo):
        i = todo[k]
        place = places[i]
        held = place >= 0
        stale = ids[i] >= fresh_blocks
        ops[k].kind = READ
        if held and not stale:
            ops[k].kind = MOVE
            ops[k].src = place
            moved += 1
        elif held:
            refreshed += 1
        if not 0 <= place < n:
            place = free[n_taken]
            n_taken += 1
            places[i] = <int32_t>place
        ops[k].place = <int32_t>place
        op_ids[k] = ids[i]
        if ids[i] == last:
            row.partial = k
            row.partial_held = held
    row.n_ops = n_todo
    row.moved = moved
    row.refreshed = refreshed


cdef void put_largest_last(
    select_row* row, select_op* ops, const id_t* op_ids, const workspace* w, const id_t* ids,
    int64_t largest
) noexcept nogil:
    # Rule 7.  A block that stays is copied; one that an op brings is brought elsewhere.
    cdef int64_t i, n = row.n, largest_place = -1, other_id = -1
    cdef int64_t largest_op = -1, other_op = -1
    for i in range(1, n + 1):
        if ids[i] == largest:
            largest_place = w.places[i]
        if w.places[i] == n - 1:
            other_id = ids[i]
    if largest_place == n - 1:
        return
    for i in range(row.n_ops):
        if op_ids[i] == largest:
            largest_op = i
        elif op_ids[i] == other_id:
            other_op = i
    row.swapped = 1
    row.largest_id = largest
    row.other_id = other_id
    row.swap_place = largest_place
    if largest_op >= 0:
        ops[largest_op].place = <int32_t>(n - 1)
    if other_op >= 0:
        ops[other_op].place = <int32_t>largest_place
    if largest_op < 0 and other_op < 0:
        row.swap = EXCHANGE
    elif largest_op < 0:
        row.swap = TO_LAST
    elif other_op < 0:
        row.swap = FROM_LAST


cdef void place_blocks(
    const select_job* job, int64_t r, const workspace* w, id_t* ids, position_t* slots,
    id_t* held, position_t* who, int64_t last, int64_t fresh_blocks
) noexcept nogil:
    # Rules 3 to 7 for one row.
    cdef select_row* row = &job.rows[r]
    cdef select_op* ops = job.ops + r * job.topk
    cdef id_t* op_ids = <id_t*>job.ids + r * job.topk
    cdef int64_t request = r // job.steps, step = r % job.steps
    cdef const char* status = row_of(&job.status, request, step)
    cdef int64_t n_held, n_free, largest = -1
    load(&job.topk_ids, row_of(&job.topk_ids, request, step), job.topk, ids + 1)
    row.n = collect(w, ids, slots, job.topk, last, &largest)
    if row.n == 0:
        return
    n_held = load_at(&job.status, status, job.topk) // job.block
    n_held = 0 if n_held < 0 else job.topk if n_held > job.topk else n_held
    load(&job.status, status, n_held, held)
    n_free = find_held(w, ids, slots, held, who, row.n, n_held, last)
    if n_free == 0 and largest < fresh_blocks and not job.ordered:
        return
    assign(row, ops, op_ids, w, ids, last, fresh_blocks)
    if job.ordered:
        put_largest_last(row, ops, op_ids, w, ids, largest)


cdef void place_any(
    const select_job* job, int64_t r, const workspace* w, int64_t last, int64_t fresh_blocks
) noexcept nogil:
    cdef bint short_ids = job.topk_ids.itemsize == 4
    if job.topk <= MOST_SHORT:
        if short_ids:
            place_blocks[int32_t, uint16_t](
                job, r, w, <int32_t*>w.ids, <uint16_t*>w.slots, <int32_t*>w.held,
                <uint16_t*>w.who, last, fresh_blocks
            )
        else:
            place_blocks[int64_t, uint16_t](
                job, r, w, <int64_t*>w.ids, <uint16_t*>w.slots, <int64_t*>w.held,
                <uint16_t*>w.who, last, fresh_blocks
            )
    elif short_ids:
        place_blocks[int32_t, uint32_t](
            job, r, w, <int32_t*>w.ids, <uint32_t*>w.slots, <int32_t*>w.held,
            <uint32_t*>w.who, last, fresh_blocks
        )
    else:
        place_blocks[int64_t, uint32_t](
            job, r, w, <int64_t*>w.ids, <uint32_t*>w.slots, <int64_t*>w.held,
            <uint32_t*>w.who, last, fresh_blocks
        )


cdef void count(const select_job* job, select_row* row) noexcept nogil:
    # From blocks to tokens.  A block that ends past the row's length is always read: nothing
    # final ends there.
    cdef int64_t missing = job.block - row.tail if row.partial >= 0 else 0
    row.length = (row.n - (row.partial >= 0)) * job.block
    if row.partial >= 0:
        row.length += row.tail
    row.read = (row.n_ops - row.moved - row.refreshed) * job.block
    row.reused = (row.n - row.n_ops) * job.block
    row.moved *= job.block
    row.refreshed *= job.block
    if row.partial_held:
        row.refreshed -= missing
    else:
        row.read -= missing


cdef inline int fault(select_row* row, int64_t kind, int64_t at, int64_t seen) noexcept nogil:
    row.fault = kind
    row.fault_at = at
    row.fault_seen = seen
    return 0


cdef int load_columns(
    const select_job* job, select_row* row, const select_op* ops, int64_t* used,
    const workspace* w, const char* table
) noexcept nogil:
    # The selection table's entries: all that hold places below n, then those that movers leave.
    cdef int64_t n = quotient(row.n - 1, &job.per_page) + 1
    cdef int64_t i, column
    cdef bint bad = False
    load_indices(table, job.table.stride, job.table.itemsize, n, used)
    for i in range(n):
        bad |= <uint64_t>used[i] >= <uint64_t>job.blocks
    if bad:
        for i in range(n):
            if <uint64_t>used[i] >= <uint64_t>job.blocks:
                return fault(row, ENTRY, i, used[i])
    row.n_used = n
    if row.moved == 0:
        return 1
    memset(w.columns, 0xFF, <size_t>((quotient(job.topk - 1, &job.per_page) + 1) * 4))
    for i in range(n):
        w.columns[i] = <int32_t>i
    for i in range(row.n_ops):
        if ops[i].kind == MOVE:
            column = quotient(ops[i].src, &job.per_page)
            if w.columns[column] < 0:
                used[n] = load_at(&job.table, table, column)
                if <uint64_t>used[n] >= <uint64_t>job.blocks:
                    return fault(row, ENTRY, column, used[n])
                w.columns[column] = <int32_t>n
                n += 1
    row.n_used = n
    return 1


cdef int64_t read_id(const select_job* job, int64_t r, int64_t i) noexcept nogil:
    cdef int64_t wide
    cdef int32_t narrow
    if job.status.itemsize == 8:
        memcpy(&wide, job.ids + (r * job.topk + i) * 8, 8)
        return wide
    memcpy(&narrow, job.ids + (r * job.topk + i) * 4, 4)
    return narrow


cdef int resolve(
    const select_job* job, int64_t r, const int64_t* used, const workspace* w,
    const char* full_table
) noexcept nogil:
    # Source slots of every op, and slots of a swap.
    cdef select_row* row = &job.rows[r]
    cdef select_op* ops = job.ops + r * job.topk
    cdef divisor per_full = job.per_full
    cdef index_rows table = job.full_table
    cdef int64_t columns = job.full_columns, blocks = job.full_blocks
    cdef int64_t page = job.full_page if job.has_bytes else 0
    cdef int64_t block = job.block if job.has_bytes else 0
    cdef int64_t i, column, entry, id
    for i in range(row.n_ops):
        if ops[i].kind == READ:
            id = read_id(job, r, i)
            # A full cache may have blocks of no tokens.
            column = quotient(id, &per_full) if per_full.size > 0 else columns
            if column >= columns:
                return fault(row, BEYOND, id, column)
            entry = load_at(&table, full_table, column)
            if <uint64_t>entry >= <uint64_t>blocks:
                return fault(row, FULL_ENTRY, column, entry)
            ops[i].src = entry * page + remainder(id, &per_full) * block
        elif job.has_bytes:
            ops[i].src = slot_of(
                job, used, w.columns[quotient(ops[i].src, &job.per_page)], ops[i].src
            )
    if row.swap != NO_SWAP and job.has_bytes:
        row.swap_slot = place_slot(job, used, row.swap_place)
        row.last_slot = place_slot(job, used, row.n - 1)
    return 1


cdef void plan_row(const select_job* job, int64_t r, const workspace* w) noexcept nogil:
    cdef select_row* row = &job.rows[r]
    cdef select_op* ops = job.ops + r * job.topk
    cdef int64_t* used = job.used + r * job.topk
    cdef int64_t b = r // job.steps, s = r % job.steps
    cdef int64_t kv = job.kv[b] if job.kv[b] > 0 else 0
    cdef int64_t q = job.q[b]
    cdef int64_t tokens = kv - (q - 1 - s) if s < q else kv
    cdef int64_t last
    memset(row, 0, sizeof(select_row))
    row.partial = -1
    if tokens <= 0:
        return
    last = (tokens - 1) // job.block
    row.tail = tokens - last * job.block
    place_any(job, r, w, last, (kv - q) // job.block if kv > q else 0)
    if row.n == 0:
        return
    count(job, row)
    if row.length > 0x7FFFFFFF:
        fault(row, LENGTH, 0, row.length)
    elif load_columns(job, row, ops, used, w, row_of(&job.table, b, s)):
        resolve(job, r, used, w, row_of(&job.full_table, b, s))


cdef void plan_chunk(void* context, int64_t chunk) noexcept nogil:
    cdef const select_job* job = <const select_job*>context
    cdef int64_t r, begin = chunk * job.chunk_rows
    cdef int64_t end = begin + job.chunk_rows
    cdef workspace w = carve(job.scratch + chunk * job.scratch_bytes, job.topk)
    if end > job.n_rows:
        end = job.n_rows
    for r in range(begin, end):
        plan_row(job, r, &w)


cdef void plan_rows(select_job* job, int n_threads) noexcept nogil:
    # job.scratch holds one workspace for each chunk of job.chunk_rows rows.
    run_chunks(
        plan_chunk, job, (job.n_rows + job.chunk_rows - 1) // job.chunk_rows, n_threads
    )


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
    cdef const select_op* ops = job.ops + r * job.topk
    cdef char* status = row_of(&job.status, r // job.steps, r % job.steps)
    cdef size_t size = job.status.itemsize
    cdef const char* ids = job.ids + r * job.topk * size
    cdef int64_t i
    if row.swapped:
        store_at(&job.status, status, row.swap_place, row.other_id)
        store_at(&job.status, status, row.n - 1, row.largest_id)
    for i in range(row.n_ops):
        memcpy(status + ops[i].place * job.status.stride, ids + i * size, size)
    if job.status.stride == job.status.itemsize:
        memset(status + row.n * job.status.stride, 0xFF,
               <size_t>((job.topk - row.n) * job.status.stride))
    else:
        for i in range(row.n, job.topk):
            store_at(&job.status, status, i, -1)
    store_at(&job.status, status, job.topk, row.length)
