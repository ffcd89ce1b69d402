# SPDX-License-Identifier: Apache-2.0
"""A call of an operator: what follows from its signature, and the task that runs it.

Everything that follows from shapes, strides, types and plain values is found at the first call with
them and remembered (``Signature``): the device, how the outputs look, which tensors are the host's,
how many bytes each has.  A later call only needs addresses: its outputs are allocated, and CPU
tensors over the same bytes as the device's tensors are the arguments of the CPU kernel.  Those
tensors are kept by address (``Slot``), since an allocator hands out the same addresses again.
"""

cimport cython
from cpython cimport array
from cpython.object cimport PyObject, PyObject_Call
from cpython.ref cimport Py_INCREF, Py_XDECREF
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from kvcore.emulator._lines cimport current, text_at
from kvcore.emulator._tasks cimport Name, Task, launch, updating, watched

from kvcore.emulator._ranges import runs
from kvcore.errors import StreamError

cdef enum:
    WRITTEN = 1         # flags of what a task touches
    SPAN = 2            # some bytes of it, and the task says which
    REMEMBERED = 4096   # signatures of one operator
    MOST_LOOKS = 1 << 14
    SLOTS = 1 << 12     # views that are kept
    RUNS = 64           # numbers, of the runs of a tensor that the machine gets one by one
    MOST_RUNS = 1 << 16
    FIRST_TOUCHES = 24

# torch's, of which compiled modules import nothing (bind).
cdef object Tensor = None
cdef object Parameter = None
cdef object Generator = None
cdef object stride_of, device_of, address_of, clone, copy, empty_strided, device_called
cdef object view_at = None
cdef object raw_stream, current_device, set_device, capturing
cdef size_t* num_formats = NULL
cdef dict looks = {}


def bind(dict torch, view, uintptr_t formats):
    """Set the functions of torch that calls need, and what makes CPU tensors over device bytes.

    view:    called with (size, strides, dtype, bytes from first to last, address).
    formats: the address of the number of casts to a format of the device's own.
    """
    global Tensor, Parameter, Generator, stride_of, device_of, address_of, clone, copy
    global empty_strided, device_called, view_at, raw_stream, current_device, set_device
    global capturing, num_formats
    Tensor = torch["Tensor"]
    Parameter = torch["Parameter"]
    Generator = torch["Generator"]
    stride_of = Tensor.stride
    device_of = Tensor.get_device
    address_of = Tensor.data_ptr
    clone = Tensor.clone
    copy = Tensor.copy_
    empty_strided = torch["empty_strided"]
    device_called = torch["device"]
    raw_stream = torch["raw_stream"]
    current_device = torch["current_device"]
    set_device = torch["set_device"]
    capturing = torch["capturing"]
    view_at = view
    num_formats = <size_t*>formats


# -- how tensors lie in memory ---------------------------------------------------------------------

@cython.final
cdef class Look:
    """Size, strides and dtype of a tensor, and what follows from them.

    span: bytes from its first to past its last.  pieces: its runs of bytes from its first on, where
    it has gaps; None where there are too many.
    """

    cdef readonly object size, stride, dtype
    cdef readonly int64_t span, itemsize
    cdef bint contiguous, has_pieces
    cdef array.array pieces
    cdef dict options

    def __init__(self, size, stride, dtype, int64_t itemsize):
        cdef int64_t last = 0
        cdef int64_t dense = 1
        cdef bint empty = False
        self.size = size
        self.stride = stride
        self.dtype = dtype
        self.itemsize = itemsize
        self.contiguous = True
        for n, step in zip(reversed(size), reversed(stride)):
            empty = empty or n == 0
            last += (n - 1) * step
            if n != 1:
                self.contiguous = self.contiguous and step == dense
                dense *= n
        self.span = 0 if empty else (last + 1) * itemsize
        self.contiguous = self.contiguous or empty
        self.options = {}

    cdef object made(self, int device):
        """Make a new tensor on a device with this size, strides and dtype."""
        options = self.options.get(device)
        if options is None:
            options = {"dtype": self.dtype, "device": device_called(f"npu:{device}")}
            self.options[device] = options
        return PyObject_Call(empty_strided, (self.size, self.stride), options)

    cdef array.array all_pieces(self):
        if not self.has_pieces:
            self.pieces = runs(0, self.size, self.stride, self.itemsize, MOST_RUNS)
            self.has_pieces = True
        return self.pieces


cdef Look look_of(object tensor):
    cdef tuple key = (tensor.shape, stride_of(tensor), tensor.dtype)
    cdef Look found = looks.get(key)
    if found is None:
        if len(looks) >= MOST_LOOKS:
            looks.clear()
        found = looks[key] = Look(key[0], key[1], key[2], tensor.itemsize)
    return found


# -- CPU tensors over the device's bytes -----------------------------------------------------------

cdef struct Slot:
    int64_t address
    PyObject* look
    PyObject* view

cdef Slot slots[SLOTS]


cdef object view_of(Look look, int64_t address):
    """A CPU tensor over the bytes at a device address."""
    cdef uint64_t mixed = <uint64_t>address ^ (<uint64_t><uintptr_t><PyObject*>look << 7)
    cdef Slot* slot = &slots[(mixed * <uint64_t>0x9E3779B97F4A7C15) >> 52]
    cdef Slot before
    if slot.view != NULL and slot.address == address and slot.look == <PyObject*>look:
        return <object>slot.view
    view, lasting = view_at(look.size, look.stride, look.dtype, look.span, address)
    if lasting:
        before = slot[0]
        Py_INCREF(look)
        Py_INCREF(view)
        slot.address = address
        slot.look = <PyObject*>look
        slot.view = <PyObject*>view
        Py_XDECREF(before.look)
        Py_XDECREF(before.view)
    return view


# -- what is remembered ----------------------------------------------------------------------------

@cython.final
cdef class Spec:
    """A tensor among the arguments; name: set when the operator uses only some of its elements."""

    cdef Look look
    cdef bint host, written
    cdef str name


@cython.final
cdef class Signature:
    """What is remembered of calls whose arguments have the same shapes, strides, types and values.

    device:  of the tensors among them; -1: there are none, and it is the current one.
    waits:   outputs depend on data, and the call waits for its stream.
    outputs: a Look for each new tensor, None where the kernel gives none.
    resized: (name, size) of out= tensors of another size.
    """

    cdef int device
    cdef bint waits
    cdef list outputs, resized, specs


cdef struct Touches:
    uint64_t* at
    size_t count, room
    uint64_t first[3 * FIRST_TOUCHES]


cdef int touch(Touches* touches, int64_t address, int64_t size, uint64_t flags) except -1:
    cdef uint64_t* more
    if touches.count == touches.room:
        more = <uint64_t*>malloc(6 * touches.room * sizeof(uint64_t))
        if more == NULL:
            raise MemoryError
        memcpy(more, touches.at, 3 * touches.count * sizeof(uint64_t))
        if touches.at != touches.first:
            free(touches.at)
        touches.at = more
        touches.room *= 2
    cdef uint64_t* one = touches.at + 3 * touches.count
    one[0] = <uint64_t>address
    one[1] = <uint64_t>size
    one[2] = flags
    touches.count += 1
    return 0


cdef array.array moved(array.array pieces, int64_t address):
    cdef array.array made = array.clone(pieces, len(pieces), False)
    cdef Py_ssize_t i
    for i in range(len(pieces)):
        made.data.as_longlongs[i] = pieces.data.as_longlongs[i] + address
    return made


@cython.final
cdef class Call(Task):
    """An operator's CPU kernel over the bytes of its arguments, as a task.

    target:  where its one result goes.  targets: where several go; None where nothing is new.
    keeps:   the result is kept for the caller, who waits for it.
    late:    runs of tensors with gaps, which were not given to the machine one by one.
    spans:   (argument, address) of tensors of which it uses some elements.
    """

    cdef Kernel kernel
    cdef tuple args
    cdef dict kwargs
    cdef object target
    cdef list targets, late, spans
    cdef bint keeps
    cdef readonly object result

    cdef int work(self) except -1:
        cdef object result = PyObject_Call(self.kernel.run, self.args, self.kwargs)
        if self.keeps:
            self.result = result
        elif self.target is not None:
            copy(self.target, result)
        elif self.targets is not None:
            self.give(result)
        return 0

    cdef int give(self, object result) except -1:
        cdef list results = []
        for value, source in zip((result,) if self.kernel.single else result, self.kernel.returns):
            if source is None:
                if isinstance(value, (list, tuple)):
                    results.extend(value)
                else:
                    results.append(value)
        for target, value in zip(self.targets, results, strict=True):
            if target is not None:
                copy(target, value)
        return 0

    cdef object used(self):
        if self.spans is None:
            return self.late
        found = self.kernel.used_elements(self.spans, self.args, self.kwargs or {})
        return [*(self.late or ()), *found]


cdef class Kernel:
    """The kernel of one overload for the emulated device.

    run:       what runs in its place on CPU tensors.
    names:     of its arguments; written: those that it writes.
    returns:   of each return value the argument that it is, None if it is new.
    single, plain: there is one return value; and that is one new tensor.
    random:    it draws from a generator.
    compiled:  what runs in its place runs no code of Python's.
    by_value:  it has no tensors among its arguments, and every number decides how outputs look.
    """

    cdef readonly str name
    cdef public object run
    cdef public list names, returns
    cdef public set written
    cdef public bint single, plain, random, by_value, compiled
    cdef dict signatures, labels
    cdef str backward
    cdef int given      # the argument that is the one return value, -1
    cdef bint ready

    def __init__(self, str name):
        self.name = name
        self.backward = f"backward of {name}"
        self.signatures = {}
        self.labels = {}
        self.given = -1

    # -- what a subclass does, once for a signature or in rare cases

    def prepare(self):
        """At the first call: set the attributes above."""
        raise NotImplementedError

    def learn(self, args, kwargs):
        """(device or -1, waits, outputs, resized) of a call; refuses what the operator refuses.

        outputs: meta tensors, None where the kernel gives none.
        """
        raise NotImplementedError

    def in_base_format(self, args, kwargs):
        """The result of a call with tensors in formats of the device's own; None: none has one."""
        raise NotImplementedError

    def with_generator(self, args, kwargs, device):
        """The call, with a generator of the host in place of the device's."""
        raise NotImplementedError

    def waited(self, args, kwargs, device, stream, name):
        """The result of a call that waits for its stream."""
        raise NotImplementedError

    def results(self, args, kwargs, new):
        """The return value of a call, where that is not one tensor."""
        raise NotImplementedError

    def chosen(self, args, kwargs):
        """Names of the arguments of which such a call uses some elements, known when it runs."""
        raise NotImplementedError

    def used_elements(self, spans, args, kwargs):
        """(pairs of addresses, written) of each (argument, address), unless they are too many."""
        raise NotImplementedError

    def text(self, args, kwargs):
        """The operator's name with the shapes and types of its tensors, for reports."""
        raise NotImplementedError

    # -- a call

    def __call__(self, *args, **kwargs):
        cdef list flat = []
        cdef Signature signature
        cdef Name name
        cdef int now, device
        if not self.ready:
            self.prepare()
            if self.single and self.returns[0] in self.names:
                self.given = self.names.index(self.returns[0])
            self.ready = True
        signature = self.signature_of(args, kwargs, flat)
        name = self.label()
        now = current_device()
        device = signature.device if signature.device >= 0 else now
        if signature.device < 0:
            asked = kwargs.get("device")
            if asked is not None:
                index = device_called(asked).index
                device = now if index is None else index
        if device == now:
            return self.do(args, kwargs, flat, signature, device, name)
        set_device(device)  # streams and memory are those of the tensors' device
        try:
            return self.do(args, kwargs, flat, signature, device, name)
        finally:
            set_device(now)

    cdef Name label(self):
        cdef uint64_t line = current(self.backward)
        cdef object key = line
        cdef object found = self.labels.get(key)
        if found is None:
            found = self.labels[key] = Name(text_at(line, self.name))
        return found

    cdef Signature signature_of(self, tuple args, dict kwargs, list flat):
        cdef list key = []
        cdef Signature found = None
        cdef bint remembered = True
        for value in args:
            self.look_at(value, key, flat, self.by_value)
        for name, value in kwargs.items():
            key.append(name)
            self.look_at(value, key, flat, self.by_value)
        cdef tuple hashed = tuple(key)
        try:
            found = self.signatures.get(hashed)
        except TypeError:  # an argument that cannot be hashed: nothing is remembered
            remembered = False
        if found is None:
            found = self.learned(args, kwargs, flat)
            if remembered:
                if len(self.signatures) >= REMEMBERED:
                    self.signatures.clear()
                self.signatures[hashed] = found
        return found

    cdef int look_at(self, object value, list key, list flat, bint by_value) except -1:
        """Add to the key what an argument contributes; tensors are collected one by one."""
        cdef object kind = type(value)
        if kind is Tensor or kind is Parameter or isinstance(value, Tensor):
            key.append(value.shape)
            key.append(stride_of(value))
            key.append(value.dtype)
            key.append(device_of(value))
            flat.append(value)
        elif value is None or kind is Generator:
            key.append(kind)
        elif kind is list or kind is tuple:
            key.append(len(value))
            for item in value:
                self.look_at(item, key, flat, True)
        else:
            # As keys True, 1 and 1.0 are equal; to torch they are not.
            key.append(kind)
            if by_value or not (kind is float or kind is complex):
                key.append(value)
        return 0

    cdef Signature learned(self, tuple args, dict kwargs, list flat):
        cdef Signature made = Signature.__new__(Signature)
        made.device, made.waits, outputs, made.resized = self.learn(args, kwargs)
        made.outputs = [None if o is None else look_of(o) for o in outputs]
        made.specs = []
        chosen = self.chosen(args, kwargs)
        for i, value in enumerate(args):
            self.specify(value, self.names[i], chosen, made.specs)
        for name, value in kwargs.items():
            self.specify(value, name, chosen, made.specs)
        return made

    cdef int specify(self, object value, str name, object chosen, list specs) except -1:
        cdef Spec spec
        if isinstance(value, Tensor):
            spec = Spec.__new__(Spec)
            spec.look = look_of(value)
            spec.host = device_of(value) < 0
            spec.written = name in self.written
            spec.name = name if name in chosen else None
            specs.append(spec)
        elif isinstance(value, (list, tuple)):
            for item in value:
                self.specify(item, name, (), specs)
        return 0

    cdef object do(self, tuple args, dict kwargs, list flat, Signature signature, int device,
                   Name name):
        cdef list new
        cdef Look look
        cdef uintptr_t stream
        if num_formats[0]:
            result = self.in_base_format(args, kwargs)
            if result is not None:
                return result[0]
        if signature.resized:
            for out, size in signature.resized:
                kwargs[out].resize_(size)
            return self(*args, **kwargs)
        stream = raw_stream(device)
        if self.random:
            args, kwargs = self.with_generator(args, kwargs, device)
        if signature.waits:
            return self.waited(args, kwargs, device, stream, name)
        new = []
        for output in signature.outputs:
            if output is None:
                new.append(None)
            else:
                look = output
                new.append(look.made(device))
        self.queue(args, kwargs, flat, signature, new, stream, name, False)
        if self.plain:
            return new[0]
        if 0 <= self.given < len(args):
            return args[self.given]
        return self.results(args, kwargs, new)

    def refused_now(self, uintptr_t stream):
        """Whether the stream is being captured, or updates a capture: then no call may wait."""
        return capturing() or updating(stream)

    def kept(self, tuple args, dict kwargs, uintptr_t stream, Name name):
        """Queue the call and return its task, which has the result when it has run."""
        cdef list flat = []
        cdef Signature signature = self.signature_of(args, kwargs, flat)
        return self.queue(args, kwargs, flat, signature, [], stream, name, True)

    cdef Call queue(self, tuple args, dict kwargs, list flat, Signature signature, list new,
                    uintptr_t stream, Name name, bint keeps):
        cdef Touches touches
        cdef Call task = Call.__new__(Call)
        cdef Py_ssize_t taken = 0
        cdef bytes text = None
        cdef const char* chars = NULL
        cdef list there = []
        task.kernel = self
        task.keeps = keeps
        touches.at = touches.first
        touches.count = 0
        touches.room = FIRST_TOUCHES
        try:
            for value in args:
                there.append(self.host(value, task, flat, signature.specs, &taken, &touches))
            task.args = tuple(there)
            if kwargs:
                task.kwargs = {}
                for key, value in kwargs.items():
                    task.kwargs[key] = self.host(value, task, flat, signature.specs, &taken,
                                                 &touches)
                if "device" in task.kwargs:
                    task.kwargs["device"] = "cpu"
                if "pin_memory" in task.kwargs:
                    task.kwargs["pin_memory"] = False
            self.aim(task, new, signature, &touches)
            if capturing() or updating(stream):
                text = self.text(args, kwargs).encode()
                chars = text
            launch(stream, name, task, touches.at, touches.count, chars,
                   self.compiled and task.spans is None)
        except StreamError as error:
            raise RuntimeError(str(error)) from None
        finally:
            if touches.at != touches.first:
                free(touches.at)
        return task

    cdef int aim(self, Call task, list new, Signature signature, Touches* touches) except -1:
        """Enter the new tensors as what the task writes."""
        cdef Look look
        cdef int64_t address
        cdef Py_ssize_t i
        if not new:
            return 0
        task.targets = []
        for i in range(len(new)):
            if new[i] is None:
                task.targets.append(None)
                continue
            look = signature.outputs[i]
            address = address_of(new[i])
            task.targets.append(view_of(look, address))
            if look.span:
                touch(touches, address, look.span, WRITTEN)
        if self.plain:
            task.target = task.targets[0]
            if task.target is not None:
                task.targets = None
        return 0

    cdef object host(self, object value, Call task, list flat, list specs, Py_ssize_t* taken,
                     Touches* touches):
        """An argument as the CPU kernel gets it; a tensor of the host counts as it is now."""
        cdef Spec spec
        cdef int64_t address
        if taken[0] < len(flat) and value is flat[taken[0]]:
            spec = specs[taken[0]]
            taken[0] += 1
            if spec.host:
                return value if spec.written else clone(value)
            address = address_of(value)
            if spec.look.span:
                self.note(task, spec, address, touches)
            return view_of(spec.look, address)
        if isinstance(value, (list, tuple)):
            return [self.host(item, task, flat, specs, taken, touches) for item in value]
        return value

    cdef int note(self, Call task, Spec spec, int64_t address, Touches* touches) except -1:
        """Enter what the task touches: each run of a tensor with gaps, without the gaps."""
        cdef array.array pieces
        cdef Py_ssize_t i
        if not watched():
            touch(touches, address, spec.look.span, spec.written)
        elif spec.name is not None:
            if task.spans is None:
                task.spans = []
            task.spans.append((spec.name, address))
            touch(touches, address, spec.look.span, spec.written | SPAN)
        elif spec.look.contiguous:
            touch(touches, address, spec.look.span, spec.written)
        else:
            pieces = spec.look.all_pieces()
            if pieces is not None and len(pieces) <= RUNS:
                for i in range(0, len(pieces), 2):
                    touch(touches, address + pieces.data.as_longlongs[i],
                          pieces.data.as_longlongs[i + 1] - pieces.data.as_longlongs[i],
                          spec.written)
            else:
                touch(touches, address, spec.look.span, spec.written | SPAN)
                if pieces is not None:
                    if task.late is None:
                        task.late = []
                    task.late.append((moved(pieces, address), spec.written))
        return 0
