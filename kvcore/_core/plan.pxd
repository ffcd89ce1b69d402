# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int64_t

from kvcore._core.arrays cimport View

cdef enum:
    MAX_ARRAYS = 12

cdef class Spec:
    cdef readonly tuple outputs        # indices of the arrays written
    cdef public tuple warnings         # KVPortabilityWarning texts, given at each call
    cdef readonly object soc
    cdef public object value_quirks    # called with the plan once its values are checked, or None
    # (place, place before, slot there) -> text of a warning, where repeated slots are warned of
    cdef public object repeat_text
    cdef unsigned int output_mask
    cdef set disjoint                  # (i, j, distance) proven to share no byte

    cdef object execute(self, Plan plan)
    cdef object check_values(self, Plan plan)
    cdef int warn_of_values(self, Plan plan) except -1
    cdef int add_extent(self, Plan plan, list side, int i) except -1

cdef class Plan:
    cdef readonly Operator operator
    cdef readonly Spec spec
    cdef readonly tuple arrays
    cdef readonly tuple params
    cdef readonly object backend       # None: this library's own kernels
    cdef object prepared
    cdef list keep
    cdef View views[MAX_ARRAYS]
    cdef int num_threads               # 0: automatic
    cdef int state                     # IDLE, BUSY or LENT
    cdef unsigned long runner          # the thread that a run is in
    cdef bint unproven                 # foreign code ran since the views were read
    cdef int64_t* scratch              # private copies of index arrays
    cdef int64_t scratch_size
    cdef int order                     # of the last slots: DISTINCT, REPEATED or 0, not known
    cdef int64_t repeat_at             # where REPEATED: a place, and one before with its slot
    cdef int64_t repeat_before
    cdef int64_t copied_bytes
    cdef int64_t copied_pieces
    cdef readonly object last          # not None once a run came to its end: touched() is exact
    cdef readonly object extra         # where the operator puts what a call asked for besides

    cdef int64_t* reserve(self, int64_t count) except NULL
    cdef int verify(self) except -1
    cdef object changed(self, int i)
    cdef int enter(self) except -1
    cdef object borrow(self, bint execute)
    cdef int threads_for(self, int64_t nbytes) except -1

cdef class Operator:
    cdef readonly str name
    cdef readonly tuple arguments
    cdef object resolver
    cdef dict specs
    cdef int n_arrays

    cdef Plan make(
        self, tuple arrays, tuple params, object soc, object backend, object num_threads,
        object extra
    )
    cdef int keep_apart(self, Plan plan, Spec spec) except -1
