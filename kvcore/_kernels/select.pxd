# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t, uint64_t

cdef enum:
    READ = 0   # select_op.kind: from the full cache
    MOVE = 1   # from another place of the row

cdef enum:     # select_row.swap: what happens to the data before the ops
    NO_SWAP = 0
    EXCHANGE = 1   # both blocks stay held: they change places
    TO_LAST = 2    # the largest is held, the other place is filled by an op
    FROM_LAST = 3  # the largest is brought by an op, the other block is held
    BROUGHT = 4    # ops bring both: nothing to copy

cdef enum:     # select_fault.kind, with at and seen
    NO_FAULT = 0
    ENTRY = 1        # selection table column, entry
    BEYOND = 2       # id, column it needs in the full table
    FULL_ENTRY = 3   # full table column, entry
    LENGTH = 4       # returned length that is no int32

# An index array of rows: value i of row (request, step) at data + request * outer + step * inner
# + i * stride.
ctypedef struct index_rows:
    char* data
    int64_t outer
    int64_t inner
    int64_t stride
    int32_t itemsize

# One block to bring to a place: from slot src (its first token) of the full cache or of the
# selection.
ctypedef struct select_op:
    int64_t src
    int64_t place
    int64_t tokens         # to copy; a row's last block may be partial
    int32_t kind

# What one row does.  All counts are of blocks, except length.
ctypedef struct select_row:
    int32_t n             # blocks it holds afterwards
    int32_t n_ops
    int32_t length        # tokens they hold
    int32_t moved
    int32_t refreshed
    int32_t partial       # the op that brings the block of the row's last token, or -1
    int32_t partial_held  # whether that block was held before
    int32_t swap
    int32_t swap_place    # the largest id changes places with n - 1

# The first row of a chunk whose values are refused.
ctypedef struct select_fault:
    int64_t row
    int64_t kind
    int64_t at
    int64_t seen

# Division by a size that is nearly always a power of two.
ctypedef struct divisor:
    int64_t size
    int32_t shift          # log2(size), or -1

ctypedef struct select_job:
    # The caller's arrays, and private copies of the lengths [batch].
    index_rows topk_ids
    index_rows status
    index_rows table       # [rows, columns]: outer is S rows, inner one
    index_rows full_table  # inner is 0
    const int64_t* kv
    const int64_t* q
    # sizes
    int64_t n_rows
    int64_t steps          # S
    int64_t topk
    int64_t block
    int64_t blocks         # of the selection cache
    int64_t page           # its tokens a block
    int64_t columns        # its blocks that a row can use
    int64_t full_blocks
    int64_t full_page
    int64_t full_columns
    divisor per_page       # top-k blocks in a block of either cache; 0 where it has no tokens
    divisor per_full
    bint ordered           # rule 7: the largest id goes last
    bint wide              # ids and entries take eight bytes, not four
    bint short_places      # places take two bytes, not four
    # How rows are shared out, and the spare elements in front of each chunk's ids and places, and
    # of its entries.
    int64_t chunk_rows
    int64_t n_chunks
    int64_t pad
    int64_t entry_pad
    int64_t n_slots        # of a hash table
    # results
    select_row* rows
    select_fault* faults   # [n_chunks]
    char* used             # [rows, columns] selection table entries that are needed; -1 for others
    # An op: the id it brings, the place it takes, and the full table's entry where it reads, or
    # -1 - place where it moves.  Row r's begin at first_op(r), entries at first_entry(r).
    char* ids
    char* places
    char* entries
    # scratch
    char* free             # [n_chunks][topk] places of a row whose block is not kept
    int64_t free_bytes
    uint64_t* apart        # a hash table that finds equal used entries

cdef divisor divisor_of(int64_t size) noexcept nogil
cdef void plan_rows(select_job* job, int n_threads) noexcept nogil
cdef void write_status(const select_job* job, int64_t r) noexcept nogil


cdef inline int64_t quotient(int64_t value, const divisor* by) noexcept nogil:
    return value >> by.shift if by.shift >= 0 else value // by.size


cdef inline int64_t remainder(int64_t value, const divisor* by) noexcept nogil:
    return value & (by.size - 1) if by.shift >= 0 else value % by.size


cdef inline int64_t first_op(const select_job* job, int64_t r) noexcept nogil:
    return r * job.topk + (r // job.chunk_rows + 1) * job.pad


cdef inline int64_t first_entry(const select_job* job, int64_t r) noexcept nogil:
    return r * job.topk + (r // job.chunk_rows + 1) * job.entry_pad


cdef inline int64_t entry_at(const select_job* job, const char* entries, int64_t i) noexcept nogil:
    return (<const int64_t*>entries)[i] if job.wide else (<const int32_t*>entries)[i]


cdef inline int64_t place_at(const select_job* job, int64_t i) noexcept nogil:
    if job.short_places:
        return (<const uint16_t*>job.places)[i]
    return (<const uint32_t*>job.places)[i]


cdef inline int64_t used_at(const select_job* job, int64_t i) noexcept nogil:
    return entry_at(job, job.used, i)


cdef inline int64_t place_slot(const select_job* job, int64_t r, int64_t place) noexcept nogil:
    # Slot of the first token at a place of a row that the row uses.
    return used_at(job, r * job.columns + quotient(place, &job.per_page)) * job.page \
        + remainder(place, &job.per_page) * job.block


cdef inline void get_op(
    const select_job* job, int64_t r, int64_t op, int64_t entry, select_op* out
) noexcept nogil:
    # op: first_op(r) and more; entry: as many more than first_entry(r).
    cdef int64_t found = entry_at(job, job.entries, entry)
    out.place = place_at(job, op)
    if found >= 0:
        out.kind = READ
        out.src = found * job.full_page \
            + remainder(entry_at(job, job.ids, op), &job.per_full) * job.block
    else:
        out.kind = MOVE
        out.src = place_slot(job, r, -1 - found)


cdef inline int64_t tail_of(const select_job* job, const select_row* row) noexcept nogil:
    # Tokens of the block that op ``partial`` brings.
    if row.partial < 0:
        return job.block
    return row.length - (row.n - <int64_t>1) * job.block
