# SPDX-License-Identifier: Apache-2.0
"""Operator, Spec and Plan: the compiled call path.

A call reads its arrays into views and packs ranks, shapes, strides, dtypes and flags into a
signature.  The first call with a signature asks the operator's resolver (kvcore/ops, Python)
for a Spec: every rule about shapes, dtypes, strides and modes is checked there, once.
Later calls with the same signature find the Spec in a dict, so that they pay for pointers and
values only.  What depends on addresses (shared bytes) is tested at each call here; what depends
on contents is tested by Spec.execute at each run.

A kernel takes addresses, and any Python code that runs between the look at the arrays and the
kernel may free what lies there: a warning's hook, the hash of a parameter, an array's own
attributes, a finalizer that the collector calls because an object was made.  The rule for
everything in this folder is therefore:

    Between the last look at the arrays and the end of the kernel no Python code runs, and no
    Python object is made that the collector knows.

So whatever needs Python comes first: a call prepares its objects and numbers (Plan.prepare), then
looks (Operator.make, Plan.verify), then loads and checks the index arrays and moves the bytes
(Spec.execute), in C.  What must be said of the values in between, a warning about them or stats=,
is reported by Plan.announce and Spec code that look again afterwards (Plan.verify(False)).  Loaded
index values are private copies, so that code cannot steer the kernel either.  A call whose arrays
are all plain needs no second look, because nothing but C ran since the first; ``Plan.unproven``
says where that is not so.

Two things are the caller's to keep: no other thread may free an array during a call, and an object
that describes memory of its own (__array_interface__) must keep what it described.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.contextvars cimport PyContextVar_Get
from cpython.object cimport PyObject
from cpython.pythread cimport PyThread_get_thread_ident
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, strncmp

import numpy

from kvcore import isa as _isa, soc as _soc, threads as _threads
from kvcore._core import overlap, portability, reach as _reach, settings
from kvcore._core.request import Request
from kvcore._core.arrays cimport (
    ON_DEVICE,
    OPAQUE,
    PLAIN,
    View,
    ask,
    check_tensor,
    data_of,
    info_of,
    read_view,
    unchanged,
)
from kvcore._core.spans cimport one_range
from kvcore._kernels.parallel cimport parallel_threshold
from kvcore._kernels.scan cimport REPEATED, load_indices
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

cdef object EMPTY = numpy.empty
cdef object NDARRAY = numpy.ndarray
cdef object INT64 = numpy.dtype(numpy.int64)
cdef object ACCESS = overlap.Access
cdef object SOC_VAR = _soc.CURRENT
cdef object SOC = _soc.SoC
cdef dict SOCS = _soc.PROFILES
cdef object BACKEND_VAR = settings.BACKEND
cdef int usable_cores = _threads.usable_cores()
cdef int64_t MAX_SCRATCH = <int64_t>1 << 59


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
    static PyObject *kv_no_new(PyTypeObject *kind, PyObject *arguments, PyObject *keywords)
    {
        (void)kind, (void)arguments, (void)keywords;
        PyErr_SetString(PyExc_TypeError, "a Plan is made by the plan_* functions");
        return NULL;
    }
    static void kv_refuse_new(PyObject *kind) { ((PyTypeObject *)kind)->tp_new = kv_no_new; }
    """
    void release "kv_release"(PyObject* o)
    void refuse_new "kv_refuse_new"(object kind)


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
        self.noted = ()

    cdef int prepare(self, Plan plan) except -1:
        """Make what a run needs of Python objects; any Python code may run here."""
        return 0

    cdef object execute(self, Plan plan):
        """Load and check the contents, announce(), move the bytes.

        Called right after a look at the arrays: see the top of this module for what may not run.
        """
        raise NotImplementedError

    cdef object check_values(self, Plan plan):
        """Load and check the contents and announce() without moving a byte."""
        raise NotImplementedError

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

    def __dealloc__(self):
        free(self.views)
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

    cdef int settle_threads(self) except -1:
        """Find out how many threads a run may use; runs Python code, so before the last look."""
        count = self.num_threads
        if count <= 0:
            count = _threads.default_threads()
        self.most_threads = count if count > 0 else usable_cores
        return 0

    cdef int threads_for(self, int64_t nbytes) noexcept:
        # num_threads is what the call may use at most.
        if nbytes < parallel_threshold() or self.most_threads < 1:
            return 1
        if self.num_threads <= 0 and nbytes < AUTOMATIC_BYTES:  # where the border was moved
            return 1
        return self.most_threads

    cdef int prepare(self) except -1:
        """Make and find out what a run needs of Python, where it does; before the last look."""
        cdef int axis
        if self.spec.most >= parallel_threshold():
            self.settle_threads()
        if not self.spec.prepares:
            return 0
        self.numbers = {}
        for i in self.spec.noted:
            count = 1
            for axis in range(self.views[<int>i].rank):
                count *= self.views[<int>i].shape[axis]
            self.numbers[i] = EMPTY(count, INT64)
        self.spec.prepare(self)
        return 0

    cdef int verify(self, bint everything) except -1:
        """Raise unless every array is what was planned: the last look.

        everything: also what matters for the meaning of the bytes only, not for their place.
        """
        cdef int i
        if self.beyond:
            self.reach_again()
        if self.asks if everything else self.opaque:
            for i in range(self.operator.n_arrays):
                if everything or self.views[i].way == OPAQUE:
                    if not ask(self.arrays[i], self.operator.arguments[i], &self.views[i]):
                        raise self.changed(i)
        for i in range(self.operator.n_arrays):
            if not unchanged(&self.views[i]):
                raise self.changed(i)
        return 0

    cdef int announce(self) except -1:
        """Give the warnings about values that were just checked, and look again."""
        cdef int state = self.state
        cdef bint repeats = self.order == REPEATED and self.spec.repeat_text is not None
        if self.spec.value_quirks is None and not repeats:
            return 0
        for i in self.spec.noted:
            load_all(&self.views[<int>i], <int64_t*>data_of(self.numbers[i]))
        self.state = BUSY
        try:
            if repeats:
                portability.warn(
                    self.spec.repeat_text(
                        self.repeat_at, self.repeat_before, self.scratch[self.repeat_at]
                    )
                )
            if self.spec.value_quirks is not None:
                self.spec.value_quirks(self)
        finally:
            self.state = state
            self.numbers = None
        self.verify(False)
        return 0

    def values(self, str argument):
        """int64 [n], in C order: the private copy of an index array whose values were checked.

        For Spec.value_quirks while it runs, and for what its ``arguments`` name.
        """
        i = self.operator.arguments.index(argument)
        if self.numbers is None or i not in self.numbers:
            raise ValueError(f"{argument}: expected an argument that value_quirks names, and then")
        return self.numbers[i]

    cdef int reach(self) except -1:
        """Take the extents of what is read in place of the views'; raise where that is no memory.

        The signature does not know what lies behind a view, so each plan looks.  Numbers alone are
        compared unless a read leaves its view.
        """
        for one in self.spec.reaches:
            view = &self.views[<int>one.argument]
            if one.start < view.low or one.end > view.high:
                self.beyond = True
        if self.beyond:
            self.unproven = True
            self.reach_again()
        for one in self.spec.reaches:
            view = &self.views[<int>one.argument]
            view.low = one.start
            view.high = one.end
        return 0

    cdef int reach_again(self) except -1:
        infos = self.infos()
        for one in self.spec.reaches:
            _reach.check(one, infos[one.argument], self.arrays[one.argument])
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
            self.last = None
            if self.backend is None:
                if self.spec.prepares or self.spec.most >= parallel_threshold():
                    self.prepare()
                self.verify(True)
                return self.spec.execute(self)
            self.verify(True)
            self.runner = PyThread_get_thread_ident()
            self.state = LENT
            return self.prepared()
        finally:
            self.state = IDLE

    def run_at_once(self):
        """run() for the maker of the plan: only what Python code can have changed is looked at."""
        if self.enter():
            raise StreamError(
                f"{self.operator.name}: expected a backend to call run_on_cpu(), got run_at_once()"
            )
        self.unproven = True
        return self.at_once()

    cdef object at_once(self):
        if self.backend is not None:
            return self.run()
        if self.spec.prepares or self.spec.most >= parallel_threshold():
            self.prepare()
            self.unproven = True
        if self.unproven:
            self.verify(False)
        return self.spec.execute(self)

    def check_values(self):
        """Check the contents as run() does, and move nothing.

        What the backend prepared does so itself where it has a check_values(), as for arrays that
        the host cannot read.
        """
        cdef int state = self.occupy()
        try:
            check = None
            if state == IDLE:
                check = getattr(self.prepared, "check_values", None)
            self.look(state)
            if check is None:
                self.spec.check_values(self)
            else:
                check()
        finally:
            self.state = state

    def run_on_cpu(self):
        """Run this library's own kernels whatever the backend; for backends to call.

        Raises BackendUnavailableError for arrays on a device.
        """
        cdef int i, state = self.occupy()
        try:
            if self.backend is not None:
                for i in range(self.operator.n_arrays):
                    if self.views[i].rank >= 0 and self.views[i].flags & ON_DEVICE:
                        raise BackendUnavailableError(
                            "backend 'cpu' cannot reach device memory",
                            argument="backend", seen="cpu",
                        )
            self.look(state)
            return self.spec.execute(self)
        finally:
            self.state = state

    cdef int occupy(self) except -1:
        """Take the plan, from its backend where a run lent it; the state to go back to."""
        cdef int state = LENT if self.enter() else IDLE
        self.state = BUSY
        return state

    cdef int look(self, int state) except -1:
        """Prepare a run and look at the arrays."""
        if self.spec.prepares or self.spec.most >= parallel_threshold():
            self.prepare()
        self.last = None
        # A run that lent the plan has verified the arrays; the backend's own code ran since.
        self.verify(state == IDLE)
        return 0

    def infos(self):
        """ArrayInfo of each argument, None for those not given."""
        return tuple([
            None if self.views[i].rank < 0
            else info_of(self.arrays[i], self.operator.arguments[i], &self.views[i])
            for i in range(self.operator.n_arrays)
        ])

    def memory(self):
        """Per argument None, or (address of element 0, its first and one past its last byte, what
        the owner of device memory said of it or None), as they were when the plan was made."""
        return tuple([
            None if self.views[i].rank < 0 else (
                <size_t>self.views[i].data,
                <size_t>self.views[i].data + self.views[i].low,
                <size_t>self.views[i].data + self.views[i].high,
                None if self.owners is None else self.owners[i],
            )
            for i in range(self.operator.n_arrays)
        ])

    def places(self):
        """(names of the arrays that lie on the host, whether one lies on a device)."""
        cdef int i
        cdef bint device = False
        here = []
        for i in range(self.operator.n_arrays):
            if self.views[i].rank >= 0:
                if self.views[i].flags & ON_DEVICE:
                    device = True
                else:
                    here.append(self.operator.arguments[i])
        return here, device

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
        return self.named_accesses(self.last is not None)

    def touches(self):
        """(reads, writes) of a run that were made now, exact to the row where the operator knows
        them from the contents.

        Checks the contents as run() does, and moves nothing.
        """
        self.check_values()
        return self.named_accesses(True)

    cdef tuple named_accesses(self, bint exact):
        found = self.spec.accesses(self) if exact else None
        if found is None:
            return self.reads, self.writes
        return named(self, found[0]), named(self, found[1])

    @property
    def request(self):
        """What was asked for: a Request of operator, arrays, params and extra."""
        return Request(self.operator, self.arrays, self.params, self.extra)

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

    resolver(infos, params, soc) -> Spec, infos being ArrayInfo or None per argument.  With specify
    the two halves of that: resolver(infos, params) -> Case checks the operator's own rules, and
    specify(case, soc) -> Spec the SoC's.
    """

    def __init__(self, str name, tuple arguments, resolver, specify=None):
        self.name = name
        self.arguments = arguments
        self.resolver = resolver
        self.specify = specify
        self.specs = {}
        self.n_arrays = len(arguments)
        if self.n_arrays > MAX_ARRAYS:
            raise ValueError(f"{name}: at most {MAX_ARRAYS} arrays")

    cdef Plan make(
        self, tuple arrays, tuple params, object soc, object backend, object num_threads,
        object extra
    ):
        cdef Plan plan = Plan.__new__(Plan)
        cdef char packed[MAX_ARRAYS * (HEAD_BYTES + 128)]
        cdef int64_t used = 0
        cdef int i, axes
        cdef Py_ssize_t kept
        cdef bint on_device = False, outside = False
        cdef bint environment = has_environment()
        cdef bytes signature
        cdef Spec spec
        plan.operator = self
        plan.arrays = arrays
        plan.params = params
        plan.extra = extra
        plan.keep = []
        self.make_views(plan)
        if environment:
            _isa.require()
        if soc is None:
            soc = context_value(SOC_VAR)
            if soc is None and environment:
                soc = _soc.from_environment()
        elif type(soc) is str and soc in SOCS:
            soc = SOCS[soc]
        elif type(soc) is not SOC:
            soc = _soc.resolve(soc)
        if num_threads is not None:
            plan.num_threads = _threads.check(num_threads)
        elif environment:
            plan.num_threads = _threads.default_threads()
        # (the hash of a name is made once, that of a SoC in each call)
        rules = (params, soc.name if type(soc) is SOC else soc)
        try:
            known = self.specs.get(rules)
        except MemoryError:
            raise
        except Exception:  # a parameter without a hash: the resolver raises the error
            known = rules = None
        for i in range(self.n_arrays):
            if type(arrays[i]) is not NDARRAY and arrays[i] is not None:
                check_tensor(arrays[i], self.arguments[i])
        # From here on the arrays are known: see the top of this module.
        for i in range(self.n_arrays):
            kept = len(plan.keep)
            if read_view(arrays[i], self.arguments[i], &plan.views[i], plan.keep):
                plan.unproven = True
            memcpy(packed + used, &plan.views[i].rank, HEAD_BYTES)
            used += HEAD_BYTES
            if plan.views[i].way > PLAIN or plan.views[i].way == OPAQUE:
                plan.asks = True
                plan.opaque |= plan.views[i].way == OPAQUE
            if plan.views[i].flags & ON_DEVICE:
                if plan.owners is None:
                    plan.owners = [None] * self.n_arrays
                if len(plan.keep) > kept:  # a tensor says nothing besides
                    plan.owners[i] = plan.keep[kept]
            if plan.views[i].rank > 0:
                axes = plan.views[i].rank * 8
                memcpy(packed + used, plan.views[i].shape, axes)
                memcpy(packed + used + axes, plan.views[i].strides, axes)
                used += 2 * axes
                on_device |= plan.views[i].flags & ON_DEVICE
            # The signature does not hold the name of a dtype outside the table.
            outside |= plan.views[i].dtype < 0 and plan.views[i].rank >= 0
        signature = PyBytes_FromStringAndSize(packed, used)
        found = None if outside or known is None else (<dict>known).get(signature)
        if found is None:
            spec = self.resolve(plan, soc, rules, None if outside else signature)
        else:
            spec = <Spec>found
        plan.spec = spec
        if spec.reaches is not None:
            plan.reach()
        self.keep_apart(plan, spec)
        if spec.warnings:
            plan.unproven = True
            for text in spec.warnings:
                portability.warn(text)
        if on_device or environment or backend is not None or settings.active:
            plan.unproven = True
            plan.backend, plan.prepared = settings.choose(plan, backend, on_device)
        return plan

    cdef int make_views(self, Plan plan) except -1:
        cdef int i
        plan.views = <View*>malloc(self.n_arrays * sizeof(View))
        if plan.views == NULL:
            raise MemoryError(f"{self.name}: a call does not fit memory")
        for i in range(self.n_arrays):
            plan.views[i].rank = -1
        return 0

    cdef Spec resolve(self, Plan plan, object soc, object rules, bytes signature):
        """Have the rules checked; the Spec is remembered unless there is nothing to know it by."""
        cdef Spec spec
        plan.unproven = True
        spec = self.settle(plan.infos(), plan.params, soc)
        if rules is not None and signature is not None:
            if self.n_specs >= MAX_SPECS:
                self.specs.clear()
                self.n_specs = 0
            self.specs.setdefault(rules, {})[signature] = spec
            self.n_specs += 1
        return spec

    cdef Spec settle(self, object infos, object params, object soc):
        """The Spec of checked rules, with its Case where the operator has one."""
        if self.specify is None:
            return self.complete(<Spec?>self.resolver(infos, params, soc), None)
        case = self.resolver(infos, params)
        return self.complete(<Spec?>self.specify(case, soc), case)

    cdef Spec complete(self, Spec spec, object case):
        spec.case = case
        if spec.value_quirks is not None:
            names = getattr(spec.value_quirks, "arguments", ())
            spec.noted = tuple([self.arguments.index(name) for name in names])
            spec.prepares = True
        return spec

    cdef int keep_apart(self, Plan plan, Spec spec) except -1:
        # No output may share a byte with another argument. Bounds first; where they meet, the
        # answer depends on the distance alone and is remembered.
        cdef int i, j
        cdef int64_t[2] where
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
                where[0] = i * MAX_ARRAYS + j
                where[1] = b.data - a.data
                meeting = PyBytes_FromStringAndSize(<char*>where, sizeof(where))
                if meeting not in spec.disjoint:
                    plan.unproven = True
                    infos = plan.infos()
                    if spec.reaches is not None:
                        infos = _reach.as_read(infos, spec.reaches)
                    overlap.check_apart(infos, i, j)
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
        return plan.at_once()

    def spec_for(self, tuple infos, tuple params, soc=None):
        """Resolve ready-made infos (arrays or stand-ins with name, shape, strides, dtype)."""
        return self.settle(infos, params, soc)

    def spec_of(self, case, soc=None):
        """The Spec of a Case whose rules were checked before, under another SoC."""
        return self.complete(<Spec?>self.specify(case, soc), case)

    def plan_of_values(self, Spec spec, tuple arrays, tuple params):
        """A Plan of a Spec that is known, for check_values() alone.

        arrays: the index arrays, of the shapes and strides that the Spec was resolved for, and None
        for all others.
        """
        cdef Plan plan = Plan.__new__(Plan)
        cdef int i
        plan.operator = self
        plan.arrays = arrays
        plan.params = params
        plan.keep = []
        self.make_views(plan)
        for i in range(self.n_arrays):
            check_tensor(arrays[i], self.arguments[i])
            read_view(arrays[i], self.arguments[i], &plan.views[i], plan.keep)
            plan.asks |= plan.views[i].way > PLAIN or plan.views[i].way == OPAQUE
            plan.opaque |= plan.views[i].way == OPAQUE
        plan.spec = spec
        return plan


cdef void load_all(const View* view, int64_t* out) noexcept:
    """The numbers of an index array of any axes, as int64 in C order."""
    cdef int64_t[8] at
    cdef int64_t n = 1, rows = 1, row
    cdef int axis, last = view.rank - 1
    cdef const char* src = view.data
    if last >= 0:
        n = view.shape[last]
    for axis in range(last):
        rows *= view.shape[axis]
        at[axis] = 0
    if n == 0:
        return
    for row in range(rows):
        load_indices(src, view.strides[last] if last >= 0 else 0, view.itemsize, n, out + row * n)
        axis = last - 1
        while axis >= 0:
            at[axis] += 1
            src += view.strides[axis]
            if at[axis] < view.shape[axis]:
                break
            src -= view.shape[axis] * view.strides[axis]
            at[axis] = 0
            axis -= 1


# Operator.make calls what Cython made of Plan.__new__; everybody else is refused.
refuse_new(Plan)
