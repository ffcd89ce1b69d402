# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int32_t, int64_t

cdef enum:
    READ = 0   # select_op.kind: from the full cache
    MOVE = 1   # from another place of the row

cdef enum:     # select_row.swap: what happens to the data before the ops
    NO_SWAP = 0
    EXCHANGE = 1   # both blocks stay held: they change places
    TO_LAST = 2    # the largest is held, the other place is filled by an op
    FROM_LAST = 3  # the largest is brought by an op, the other block is held

cdef enum:     # select_row.fault, with fault_at, fault_seen, fault_other
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
# selection.  Small, for a step may have a thousand of them in each row.
ctypedef struct select_op:
    int64_t src
    int32_t place
    int32_t kind

# What one row does.  Counts in tokens, but n, n_ops, n_used and swapped.
ctypedef struct select_row:
    int64_t n            # blocks it holds afterwards
    int64_t length       # tokens they hold
    int64_t tail         # tokens of the block that op ``partial`` brings
    int64_t partial      # the op that brings the block of the row's last token, or -1
    int64_t partial_held  # ... which was held
    int64_t n_ops
    int64_t n_used       # selection table entries it needs
    int64_t reused
    int64_t moved
    int64_t refreshed
    int64_t read
    int64_t swapped
    int64_t swap
    int64_t swap_place   # the largest id changes places with n - 1
    int64_t swap_slot
    int64_t last_slot
    int64_t largest_id
    int64_t other_id
    int64_t fault
    int64_t fault_at
    int64_t fault_seen

# Division by a size, which is a power of two nearly always.
ctypedef struct divisor:
    int64_t size
    int32_t shift          # log2(size), or -1

ctypedef struct select_job:
    # arrays; lengths are private copies [batch], the rest is the caller's
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
    int64_t full_blocks
    int64_t full_page
    int64_t full_columns
    divisor per_page       # top-k blocks in a block of either cache; 0 where it has no tokens
    divisor per_full
    bint ordered           # rule 7: the largest id goes last
    bint has_bytes         # slots are needed
    # results
    select_row* rows
    select_op* ops         # [rows, topk]
    char* ids              # [rows, topk] ids the ops bring, as wide as the caller's
    int64_t* used          # [rows, topk] entries
    # scratch
    char* scratch
    int64_t scratch_bytes  # of one chunk
    int64_t chunk_rows

cdef divisor divisor_of(int64_t size) noexcept nogil
cdef int64_t scratch_bytes(int64_t topk) noexcept nogil
cdef void plan_rows(select_job* job, int n_threads) noexcept nogil
cdef void write_status(const select_job* job, int64_t r) noexcept nogil


cdef inline int64_t quotient(int64_t value, const divisor* by) noexcept nogil:
    return value >> by.shift if by.shift >= 0 else value // by.size


cdef inline int64_t remainder(int64_t value, const divisor* by) noexcept nogil:
    return value & (by.size - 1) if by.shift >= 0 else value % by.size


cdef inline int64_t slot_of(
    const select_job* job, const int64_t* used, int64_t position, int64_t place
) noexcept nogil:
    return used[position] * job.page + remainder(place, &job.per_page) * job.block


cdef inline int64_t place_slot(
    const select_job* job, const int64_t* used, int64_t place
) noexcept nogil:
    # Slot of a place below the row's count; used holds the row's entries.
    return slot_of(job, used, quotient(place, &job.per_page), place)
