# SPDX-License-Identifier: Apache-2.0
"""Operator, Spec and Plan: the compiled call path.

A call reads its arrays into views and packs ranks, shapes, strides, dtypes and flags into a
signature.  The first call with a signature asks the operator's resolver (kvcore/ops, Python)
for a Spec: every rule about shapes, dtypes, strides and modes is checked and worded there, once.
Later calls with the same signature find the Spec in a dict, so that they pay for pointers and
values only.  What depends on addresses (shared bytes) is tested at each call here; what depends
on contents is tested by Spec.execute at each run.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.contextvars cimport PyContextVar_Get
from cpython.object cimport PyObject
from cpython.pythread cimport PyThread_get_thread_ident
from libc.stdint cimport int64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, strncmp

import numpy

from kvcore import isa as _isa, soc as _soc, threads as _threads
from kvcore._core import overlap, portability, settings
from kvcore._core.arrays cimport CHANGED, FOREIGN, ON_DEVICE, View, compare, info_of, read_view
from kvcore._core.spans cimport one_range
from kvcore._kernels.parallel cimport parallel_threshold
from kvcore._kernels.scan cimport REPEATED
from kvcore.errors import BackendUnavailableError, ParamInvalidError, StreamError

cdef extern from "unistd.h":
    char** environ  # declared with _GNU_SOURCE, which Python.h defines

cdef enum:
    MAX_SPECS = 4096       # signatures remembered by one operator
    HEAD_BYTES = 16
    MAX_DISJOINT = 128     # distances remembered by one spec
    AUTOMATIC_BYTES = 262144  # below it a second thread always costs more than it gains

cdef enum:  # Plan.state
    IDLE
    BUSY
    LENT    # the backend is running: it may call the plan's own methods

cdef object NDARRAY = numpy.ndarray
cdef object ACCESS = overlap.Access
cdef object SOC_VAR = _soc.CURRENT
cdef object BACKEND_VAR = settings.BACKEND
cdef int usable_cores = _threads.usable_cores()
cdef int64_t MAX_SCRATCH = <int64_t>1 << 59
cdef bint making = False  # true inside Operator.make, the only maker of plans


cdef bint has_environment() noexcept:
    # One walk over the environment instead of three getenv calls; os.environ writes through to it.
    cdef char** entry = environ
    if entry == NULL:
        return False
    while entry[0] != NULL:
        if entry[0][0] == b"K" and strncmp(entry[0], b"KVCORE_", 7) == 0:
            return True
        entry += 1
    return False


cdef inline object context_value(object var):
    cdef PyObject* found = NULL
    PyContextVar_Get(var, NULL, &found)
    if found == NULL:
        return None
    value = <object>found
    release(found)
    return value


cdef extern from *:
    """
    static inline void kv_release(PyObject *o) { Py_DECREF(o); }
    """
    void release "kv_release"(PyObject* o)


cdef object named(Plan plan, list side):
    """Access tuples by argument from (argument index, ranges) pairs."""
    cdef list ranges = [None] * plan.operator.n_arrays
    cdef int i
    for i, found in side:
        if not len(found):
            continue
        if ranges[i] is not None:
            return overlap.named(plan, side)
        ranges[i] = found
    return tuple([
        tuple.__new__(ACCESS, (plan.operator.arguments[i], plan.arrays[i], ranges[i]))
        for i in range(plan.operator.n_arrays)
        if ranges[i] is not None
    ])


cdef class Spec:
    """What a signature resolves to: kernels and their numbers, no arrays."""

    def __init__(self, tuple outputs, tuple warnings=(), soc=None):
        cdef int i
        self.outputs = outputs
        self.warnings = warnings
        self.soc = soc
        self.output_mask = 0
        for i in outputs:
            self.output_mask |= 1u << i
        self.disjoint = set()

    cdef object execute(self, Plan plan):
        raise NotImplementedError

    cdef object check_values(self, Plan plan):
        """Read and check the contents without moving a byte."""
        raise NotImplementedError

    cdef int warn_of_values(self, Plan plan) except -1:
        """What a load ends with: the contents are checked, and may be fine here but not there."""
        if plan.order == REPEATED and self.repeat_text is not None:
            portability.warn(
                self.repeat_text(
                    plan.repeat_at, plan.repeat_before, plan.scratch[plan.repeat_at]
                )
            )
        if self.value_quirks is not None:
            self.value_quirks(plan)
        return 0

    cdef int add_extent(self, Plan plan, list side, int i) except -1:
        """Add the whole of argument i to what accesses() returns; nothing when i is below 0."""
        if i >= 0 and plan.views[i].rank >= 0 and plan.views[i].high != plan.views[i].low:
            side.append((i, one_range(
                <int64_t>plan.views[i].data + plan.views[i].low,
                <int64_t>plan.views[i].data + plan.views[i].high,
            )))
        return 0

    def workspace_size(self, Plan plan):
        """Bytes of scratch memory a run needs."""
        return 0

    def accesses(self, Plan plan):
        """((argument index, ranges) read, the same written) of the last run; None before one."""
        return None

    def most_bytes(self, Plan plan):
        """Payload bytes a run copies at the most."""
        return 0

    def moved(self, Plan plan):
        """(payload bytes, contiguous pieces) of the last run."""
        return plan.copied_bytes, plan.copied_pieces


cdef class Plan:
    """One prepared call.  Made by the plan_* functions; may run many times.

    run() re-reads the contents of the arrays, checks the values and moves the bytes.  It may be
    called from any thread, one run at a time.
    """

    def __cinit__(self):
        if not making:
            raise TypeError("a Plan is made by the plan_* functions")

    def __dealloc__(self):
        free(self.scratch)

    def __repr__(self):
        shown = ", ".join(
            f"{name}{list(self._shape(i))}"
            for i, name in enumerate(self.operator.arguments)
            if self.views[i].rank >= 0
        )
        return f"<Plan {self.operator.name}({shown})>"

    def _shape(self, int i):
        cdef int axis
        return tuple([self.views[i].shape[axis] for axis in range(self.views[i].rank)])

    cdef int64_t* reserve(self, int64_t count) except NULL:
        cdef int64_t* grown = NULL
        if count < 1:
            count = 1
        if count > self.scratch_size:
            if count <= MAX_SCRATCH:
                grown = <int64_t*>realloc(self.scratch, <size_t>(count * 8))
            if grown == NULL:
                raise MemoryError(f"{self.operator.name}: {count} index values do not fit memory")
            self.scratch = grown
            self.scratch_size = count
        return self.scratch

    cdef int threads_for(self, int64_t nbytes) except -1:
        # num_threads is what the call may use at most.
        if nbytes < parallel_threshold():
            return 1
        if self.num_threads > 0:
            return self.num_threads
        if nbytes < AUTOMATIC_BYTES:  # where the border was moved
            return 1
        count = _threads.default_threads()
        return count if count > 0 else usable_cores

    cdef int verify(self) except -1:
        """Raise unless every array is what was planned."""
        cdef int i, found, seen = 0
        for i in range(self.operator.n_arrays):
            found = compare(self.arrays[i], self.operator.arguments[i], &self.views[i])
            if found & CHANGED:
                raise self.changed(i)
            seen |= found
        if seen & FOREIGN:
            # An array's own code ran: look again at those that have none.
            for i in range(self.operator.n_arrays):
                if type(self.arrays[i]) is NDARRAY and compare(
                    self.arrays[i], self.operator.arguments[i], &self.views[i]
                ) & CHANGED:
                    raise self.changed(i)
        return 0

    cdef object changed(self, int i):
        """The error for an array that is no longer what was planned."""
        name = self.operator.arguments[i]
        expected = "the memory, shape and dtype it was planned with"
        return ParamInvalidError(
            f"{name}: expected {expected}, got an array that changed since; make a new plan",
            argument=name,
            seen="an array that changed since",
            expected=expected,
        )

    cdef int enter(self) except -1:
        """Take the plan for a run; 1 when this thread's run lent it to a backend, else 0."""
        if self.state == LENT and self.runner == PyThread_get_thread_ident():
            return 1
        if self.state != IDLE:
            raise StreamError(
                f"{self.operator.name}: expected one run of a plan at a time, "
                "got a second while the first is running"
            )
        return 0

    def run(self):
        """Check the contents and move the bytes; returns what the operator returns.

        Raises StreamError when the plan is running already, ParamInvalidError when an array's
        memory or shape is no longer what was planned, and the operator's errors about values.
        An error leaves every array as it was.
        """
        if self.enter():
            raise StreamError(
                f"{self.operator.name}: expected a backend to call run_on_cpu(), got run()"
            )
        self.state = BUSY
        try:
            self.verify()
            self.last = None
            if self.backend is None:
                return self.spec.execute(self)
            self.runner = PyThread_get_thread_ident()
            self.state = LENT
            return self.prepared()
        finally:
            self.state = IDLE

    def run_at_once(self):
        """run() by who has just made the plan: no array can have changed since."""
        if self.unproven or self.backend is not None:
            return self.run()
        return self.spec.execute(self)

    def check_values(self):
        """Check the contents as run() does, and move nothing.

        What the backend prepared does so itself where it has a check_values(), as for arrays that
        the host cannot read.
        """
        self.borrow(False)

    def run_on_cpu(self):
        """Run this library's own kernels whatever the backend; for backends to call.

        Raises BackendUnavailableError for arrays on a device.
        """
        return self.borrow(True)

    cdef object borrow(self, bint execute):
        cdef int i, state = LENT if self.enter() else IDLE
        if execute and self.backend is not None:
            for i in range(self.operator.n_arrays):
                if self.views[i].rank >= 0 and self.views[i].flags & ON_DEVICE:
                    raise BackendUnavailableError(
                        "backend 'cpu' cannot reach device memory", argument="backend", seen="cpu"
                    )
        self.state = BUSY
        try:
            if state == IDLE:
                self.verify()
            self.last = None
            if execute:
                return self.spec.execute(self)
            check = getattr(self.prepared, "check_values", None) if state == IDLE else None
            if check is None:
                self.spec.check_values(self)
            else:
                check()
        finally:
            self.state = state

    def infos(self):
        """ArrayInfo of each argument, None for those not given."""
        return tuple([
            None if self.views[i].rank < 0
            else info_of(self.arrays[i], self.operator.arguments[i], &self.views[i])
            for i in range(self.operator.n_arrays)
        ])

    @property
    def soc(self):
        """The SoC whose limits were applied, or None."""
        return self.spec.soc

    @property
    def workspace_size(self):
        """Bytes of scratch memory a run needs besides the arrays."""
        return self.spec.workspace_size(self)

    @property
    def bytes_moved(self):
        """Payload bytes the last run copied; before a run, the most one can copy."""
        return self.spec.most_bytes(self) if self.last is None else self.spec.moved(self)[0]

    @property
    def num_descriptors(self):
        """Contiguous pieces the last run copied; before a run, 0."""
        return 0 if self.last is None else self.spec.moved(self)[1]

    @property
    def reads(self):
        """Everything a run may read: a tuple of Access."""
        return overlap.extents(self, False)

    @property
    def writes(self):
        """Everything a run may write: a tuple of Access."""
        return overlap.extents(self, True)

    def touched(self):
        """(reads, writes) of the last run, exact to the row; before a run, (reads, writes)."""
        found = self.spec.accesses(self) if self.last is not None else None
        if found is None:
            return self.reads, self.writes
        return named(self, found[0]), named(self, found[1])

    def extent(self, int i):
        """(first, one past the last) byte address of argument i, or None."""
        if self.views[i].rank < 0 or self.views[i].high == self.views[i].low:
            return None
        return (
            <size_t>self.views[i].data + self.views[i].low,
            <size_t>self.views[i].data + self.views[i].high,
        )


cdef class Operator:
    """One operator: its array arguments by name, and the resolver that checks a signature.

    resolver(infos, params, soc) -> Spec, infos being ArrayInfo or None per argument.
    """

    def __init__(self, str name, tuple arguments, resolver):
        self.name = name
        self.arguments = arguments
        self.resolver = resolver
        self.specs = {}
        self.n_arrays = len(arguments)
        if self.n_arrays > MAX_ARRAYS:
            raise ValueError(f"{name}: at most {MAX_ARRAYS} arrays")

    cdef Plan make(
        self, tuple arrays, tuple params, object soc, object backend, object num_threads,
        object extra
    ):
        global making
        making = True
        cdef Plan plan = Plan.__new__(Plan)
        making = False
        cdef char packed[MAX_ARRAYS * (HEAD_BYTES + 128)]
        cdef int64_t used = 0
        cdef int i, axes
        cdef bint on_device = False, outside = False
        cdef bint environment = has_environment()
        cdef Spec spec
        plan.operator = self
        plan.arrays = arrays
        plan.params = params
        plan.extra = extra
        plan.keep = []
        for i in range(self.n_arrays):
            if read_view(arrays[i], self.arguments[i], &plan.views[i], plan.keep):
                plan.unproven = True
            memcpy(packed + used, &plan.views[i].rank, HEAD_BYTES)
            used += HEAD_BYTES
            if plan.views[i].rank > 0:
                axes = plan.views[i].rank * 8
                memcpy(packed + used, plan.views[i].shape, axes)
                memcpy(packed + used + axes, plan.views[i].strides, axes)
                used += 2 * axes
                on_device |= plan.views[i].flags & ON_DEVICE
            # The signature does not hold the name of a dtype outside the table.
            outside |= plan.views[i].dtype < 0 and plan.views[i].rank >= 0
        if environment:
            _isa.require()
        if soc is not None:
            soc = _soc.resolve(soc)
        else:
            soc = context_value(SOC_VAR)
            if soc is None and environment:
                soc = _soc.from_environment()
        if num_threads is not None:
            plan.num_threads = _threads.check(num_threads)
        elif environment:
            plan.num_threads = _threads.default_threads()
        signature = (PyBytes_FromStringAndSize(packed, used), params, soc)
        try:
            found = None if outside else self.specs.get(signature)
        except Exception:  # a parameter without a hash: the resolver words the error
            found, signature = None, None
        if found is None:
            plan.unproven = True
            found = self.resolver(plan.infos(), params, soc)
            if signature is not None and not outside:
                if len(self.specs) >= MAX_SPECS:
                    self.specs.clear()
                self.specs[signature] = found
        spec = <Spec?>found
        plan.spec = spec
        self.keep_apart(plan, spec)
        if spec.warnings:
            plan.unproven = True
            for text in spec.warnings:
                portability.warn(text)
        if on_device or environment or backend is not None or settings.active:
            plan.backend, plan.prepared = settings.choose(plan, backend, on_device)
        return plan

    cdef int keep_apart(self, Plan plan, Spec spec) except -1:
        # No output may share a byte with another argument. Bounds first; where they meet, the
        # answer depends on the distance alone and is remembered.
        cdef int i, j
        cdef View* a
        cdef View* b
        for i in range(self.n_arrays):
            if not (spec.output_mask >> i) & 1:
                continue
            a = &plan.views[i]
            if a.rank < 0 or a.low == a.high:
                continue
            for j in range(self.n_arrays):
                b = &plan.views[j]
                if j == i or b.rank < 0 or b.low == b.high:
                    continue
                if a.data + a.low >= b.data + b.high or b.data + b.low >= a.data + a.high:
                    continue
                if (spec.output_mask >> j) & 1 and j < i:
                    continue
                meeting = (i, j, <int64_t>(b.data - a.data))
                if meeting not in spec.disjoint:
                    plan.unproven = True
                    overlap.check_apart(plan.infos(), i, j)
                    if len(spec.disjoint) >= MAX_DISJOINT:
                        spec.disjoint.clear()
                    spec.disjoint.add(meeting)
        return 0

    def plan(
        self, tuple arrays, tuple params, soc=None, backend=None, num_threads=None, extra=None
    ):
        """A Plan for these arrays, or the typed error of the first rule they break."""
        return self.make(arrays, params, soc, backend, num_threads, extra)

    def call(
        self, tuple arrays, tuple params, soc=None, backend=None, num_threads=None, extra=None
    ):
        """plan(...).run()"""
        cdef Plan plan = self.make(arrays, params, soc, backend, num_threads, extra)
        return plan.run_at_once()

    def spec_for(self, tuple infos, tuple params, soc=None):
        """Resolve ready-made infos (arrays or stand-ins with name, shape, strides, dtype)."""
        return self.resolver(infos, params, soc)
