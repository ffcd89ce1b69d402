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
    cdef public tuple reaches          # reach.Reach of arguments not read as views, or None
    # (place, place before, slot there) -> text of a warning, where repeated slots are warned of
    cdef public object repeat_text
    cdef public object case            # what the operator's rules made of the arguments
    cdef public object form            # what a backend made of that
    cdef tuple noted                   # indices of the arrays whose numbers value_quirks reads
    cdef bint prepares                 # a run needs prepare() whatever its size
    cdef int64_t most                  # bytes by which a run chooses its threads, at the most
    cdef unsigned int output_mask
    cdef set disjoint                  # (i, j, distance) proven to share no byte

    cdef int prepare(self, Plan plan) except -1
    cdef object execute(self, Plan plan)
    cdef object check_values(self, Plan plan)
    cdef int add_extent(self, Plan plan, list side, int i) except -1

cdef class Plan:
    cdef readonly Operator operator
    cdef readonly Spec spec
    cdef readonly tuple arrays
    cdef readonly tuple params
    cdef readonly object backend       # None: this library's own kernels
    cdef object prepared
    cdef list keep
    cdef list owners                   # what each argument's owner of device memory is, or None
    cdef View* views                   # of each argument; rank -1 until it is read
    cdef int num_threads               # 0: automatic
    cdef int most_threads              # how many a run may use; 0: not looked up yet
    cdef int state                     # IDLE, BUSY or LENT
    cdef unsigned long runner          # the thread that a run is in
    cdef bint opaque                   # only an array's own Python code says what it is
    cdef bint asks                     # the same, or unchanged() cannot see all of some array
    cdef bint unproven                 # Python code may have run since the views were read
    cdef dict numbers                  # private copies of the arrays in spec.noted
    cdef object result                 # what a run returns, made before the last look
    cdef bint beyond                   # a reach goes past its view: its owner is asked for bounds
    cdef int64_t* scratch              # private copies of index arrays
    cdef int64_t scratch_size
    cdef int order                     # of the last slots: DISTINCT, REPEATED or 0, not known
    cdef int64_t repeat_at             # where REPEATED: a place, and one before with its slot
    cdef int64_t repeat_before
    cdef int64_t copied_bytes
    cdef int64_t copied_pieces
    cdef readonly object last          # not None once a run came to its end: touched() is exact
    cdef readonly object extra         # what else a call asked for, set by the operator

    cdef int64_t* reserve(self, int64_t count) except NULL
    cdef int settle_threads(self) except -1
    cdef int threads_for(self, int64_t nbytes) noexcept
    cdef int prepare(self) except -1
    cdef int verify(self, bint everything) except -1
    cdef int announce(self) except -1
    cdef int reach(self) except -1
    cdef int reach_again(self) except -1
    cdef object changed(self, int i)
    cdef int enter(self) except -1
    cdef object at_once(self)
    cdef int occupy(self) except -1
    cdef int look(self, int state) except -1
    cdef tuple named_accesses(self, bint exact)

cdef class Operator:
    cdef readonly str name
    cdef readonly tuple arguments
    cdef object resolver
    cdef object specify
    cdef dict specs                    # (params, soc) -> signature of the arrays -> Spec
    cdef int n_specs
    cdef int n_arrays

    cdef Plan make(
        self, tuple arrays, tuple params, object soc, object backend, object num_threads,
        object extra
    )
    cdef int make_views(self, Plan plan) except -1
    cdef Spec resolve(self, Plan plan, object soc, object rules, bytes signature)
    cdef Spec settle(self, object infos, object params, object soc)
    cdef Spec complete(self, Spec spec, object case)
    cdef int keep_apart(self, Plan plan, Spec spec) except -1
