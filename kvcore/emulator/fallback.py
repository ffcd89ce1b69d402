# SPDX-License-Identifier: Apache-2.0
"""Every operator of torch on the machine: torch's CPU kernel as a task in stream order.

torch_npu registers some 1,500 operators for its device and calls the vendor's kernels, which are
not here.  Each is registered again: at the call the outputs are allocated, with the sizes and
strides that the operator's meta kernel gives, and a task is queued on the current stream that runs
the CPU kernel over the same memory.  So the call returns at once, a graph captures the task, and
nothing is copied but the result.

An operator whose outputs depend on data waits for its stream, and is refused in a capture.  What a
CPU kernel raises becomes a failed task, reported by the next wait.  Views, allocation, copies and
what else is torch_npu's own stay as they are (operators.py has the table).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch_npu  # type: ignore[import-not-found,unused-ignore]
from torch_npu._C import (  # type: ignore[import-not-found,unused-ignore]
    _npu_getCurrentRawStream,
    _npu_getDevice,
    _npu_isCurrentStreamCapturing,
    _npu_setDevice,
)

from kvcore.emulator import _lines, checking, machine, operators, randomness, tasks, touched
from kvcore.emulator.reference import references
from kvcore.emulator.views import Views, span
from kvcore.errors import StreamError

__all__ = ["install"]

_raw_stream: Callable[[int], int] = _npu_getCurrentRawStream
_current_device: Callable[[], int] = _npu_getDevice
_set_device: Callable[[int], None] = _npu_setDevice
_capturing: Callable[[], bool] = _npu_isCurrentStreamCapturing

_ND = 2
#: Formats whose bytes are those of a plain tensor: ND and its names for 3, 4 and 5 axes.
_BASE_FORMATS = frozenset({-1, 0, 1, 2, 16, 27, 30, 47})
_format_of: Callable[[Any], int] = torch.ops.npu.get_npu_format
#: How many casts to a format of the device's own there were: none, and nobody need ask.
_formats: ctypes.c_size_t

#: Keeps the registrations: they end with the object.
_library: Any = None
_own_library: Any = None
#: By overload.
kernels: dict[Any, Kernel] = {}
_views: Views
_REMEMBERED = 4096  # signatures of one operator
_RUNS = 64  # numbers, of the runs that the machine is told of one by one


def install() -> None:
    """Register the kernels, once; torch_npu is imported."""
    global _library, _own_library, _views, _formats
    if _library is not None:
        return
    tasks.prepare()
    _formats = ctypes.c_size_t.in_dll(machine.load().core, "kvdouble_num_formats")
    _views = Views()
    _library = torch.library.Library("aten", "IMPL")
    for name, overload in operators.overloads():
        kernel = Kernel(overload) if operators.has_kernel(name) else _refusal(name)
        _library.impl(name, kernel, "PrivateUse1")
    _own_library = torch.library.Library("npu", "IMPL")
    for name, overload, special in references():
        _own_library.impl(name, Kernel(overload, special), "PrivateUse1")


def _refusal(name: str) -> Callable[..., Any]:
    """For an operator of torch's that only other devices have."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"aten::{name}: torch has no kernel that the emulated machine can run")

    return refuse


def pass_on() -> None:
    """Have torch_npu's queue of this device hand over all that was called."""
    _raw_stream(torch_npu.npu.current_device())


def _tensors(value: Any) -> Iterator[Any]:
    """Tensors of an argument, which may be a list with None in it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _has_mask(args: tuple[Any, ...]) -> bool:
    """Whether one of the indices, the second argument, is a mask."""
    return any(x.dtype in (torch.bool, torch.uint8) for x in _tensors(args[1:2]))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """An argument with each of its tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value


def _key(value: Any, by_value: bool) -> Any:
    """What of an argument decides how the outputs look."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype, value.is_cpu)
    if isinstance(value, list | tuple):
        return tuple(_key(item, by_value) for item in value)
    if isinstance(value, float | complex) and not by_value:
        return type(value)
    return value


def _touch(
    tensor: Any, address: int, size: int, written: bool, touches: list[int], late: list[Any]
) -> None:
    """Say what a task touches: each run of a tensor with gaps, which are not its own."""
    if checking.races is None or tensor.is_contiguous():
        touches.extend((address, size, written))
        return
    numbers = touched.whole(address, tensor)
    if numbers is None or len(numbers) > _RUNS:
        touches.extend((address, size, written | tasks.SPAN))
        if numbers is not None:
            late.append((numbers, written))
        return
    for i in range(0, len(numbers), 2):
        touches.extend((numbers[i], numbers[i + 1] - numbers[i], written))


class Output:
    """How one output looks: size, strides, dtype; or None where a kernel gives no tensor."""

    __slots__ = ("dtype", "size", "stride")

    def __init__(self, tensor: Any) -> None:
        self.size, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype


class Kernel:
    """The kernel of one overload for the emulated device."""

    def __init__(self, overload: Any, special: operators.Special | None = None) -> None:
        self.overload = overload
        kernels[overload] = self
        self.name = str(overload)
        schema = operators.schema_of(overload)
        self.names = [argument.name for argument in schema.arguments]
        self.written = {
            argument.name
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        self.out_names = [
            a.name for a in schema.arguments if a.kwarg_only and a.name in self.written
        ]
        self.special = special or operators.SPECIAL.get(self.name)
        if self.special:
            self.written.update(self.special.writes)
        told = self.special.returns if self.special else None
        self.returns = list(told or (self._source(ret) for ret in schema.returns))
        self.lists = [str(ret.type).startswith("List") for ret in schema.returns]
        self.single = len(self.returns) == 1
        #: One new tensor, as most operators return.
        self.plain = self.single and self.returns[0] is None and not self.lists[0]
        self.masks_wait = operators.waits_for_masks(overload)
        self.waits = operators.depends_on_data(overload) and not self.masks_wait
        self.random = operators.is_random(overload)
        self.seeded = operators.with_generator(overload) if self.random else None
        self.by_value = not any("Tensor" in str(a.type) for a in schema.arguments)
        self.index_lists = operators.takes_host_indices(overload)
        self.indexed = touched.indexed(self.name)
        self.signatures: dict[Any, Any] = {}

    def _source(self, ret: Any) -> str | None:
        """The argument that a return value is, None if it is new."""
        if ret.alias_info is None:
            return None
        for argument in operators.schema_of(self.overload).arguments:
            if argument.alias_info and argument.alias_info.before_set & ret.alias_info.before_set:
                return str(argument.name)
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        where = _lines.where(self.name)
        device = self._device(args, kwargs)
        current = _current_device()
        if device == current:
            return self._call(args, kwargs, device, where)
        _set_device(device)  # streams and memory are those of the tensors' device
        try:
            return self._call(args, kwargs, device, where)
        finally:
            _set_device(current)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], device: int, where: str) -> Any:
        if _formats.value:
            args, kwargs, private = self._in_base_format(args, kwargs)
            if private:
                return self._with_private(args, kwargs, private)
        stream = _raw_stream(device)
        if self.random:
            args, kwargs = self._with_generator(args, kwargs, device)
        if self.waits or (self.masks_wait and _has_mask(args)):
            return self._wait(args, kwargs, device, where)
        outputs = self._outputs(args, kwargs, device)
        new = [
            None if o is None else torch.empty_strided(
                o.size, o.stride, dtype=o.dtype, device=f"npu:{device}"
            )
            for o in outputs
        ]  # fmt: skip
        self._queue(stream, where, args, kwargs, new)
        return self._result(args, kwargs, new)

    # -- formats -------------------------------------------------------------------------------

    def _in_base_format(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[tuple[Any, Any]]]:
        """The call with tensors of the device's own formats cast, and each with what it became."""
        private: list[tuple[Any, Any]] = []

        def base(tensor: Any) -> Any:
            if tensor.is_cpu or _format_of(tensor) in _BASE_FORMATS:
                return tensor
            private.append((tensor, torch_npu.npu_format_cast(tensor, _ND)))
            return private[-1][1]

        there = tuple(_mapped(value, base) for value in args)
        return there, {name: _mapped(value, base) for name, value in kwargs.items()}, private

    def _with_private(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], private: list[tuple[Any, Any]]
    ) -> Any:
        """The call on the cast tensors; what it writes goes back where it came from."""
        result = self(*args, **kwargs)
        given = dict(zip(self.names, args, strict=False)) | kwargs
        written = [t for name in self.written for t in _tensors(given.get(name))]
        for own, cast in private:
            if any(tensor is cast for tensor in written):
                own.copy_(cast)
        back = {id(cast): own for own, cast in private}
        return _mapped(result, lambda tensor: back.get(id(tensor), tensor))

    # -- what is asked -------------------------------------------------------------------------

    def _device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The device of the call; tensors of others are refused as torch refuses them."""
        device: int | None = None
        host = None
        for position, value in enumerate((*args, *kwargs.values())):
            for tensor in _tensors(value):
                if tensor.is_cpu:
                    if tensor.dim() and not (self.index_lists and position > 0):
                        host = tensor
                    continue
                if device is None:
                    device = tensor.device.index
                elif device != tensor.device.index:
                    raise RuntimeError(
                        "Expected all tensors to be on the same device, but found at least two "
                        f"devices, npu:{device} and {tensor.device}!"
                    )
        if device is None:
            asked = kwargs.get("device")
            index = None if asked is None else torch.device(asked).index
            return int(torch_npu.npu.current_device() if index is None else index)
        if host is not None:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"npu:{device} and cpu!"
            )
        return device

    def _with_generator(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], device: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call with a generator of the host that continues the device's."""
        given = kwargs.get("generator")
        position = self.names.index("generator") if "generator" in self.names else -1
        if 0 <= position < len(args):
            given = args[position]
        host = randomness.continued(given, device)
        if position < 0:  # of what runs in its place
            taken = self.special is not None or self.seeded is not None
            return args, {**kwargs, "generator": host} if taken else kwargs
        if position < len(args):
            return (*args[:position], host, *args[position + 1 :]), kwargs
        return args, {**kwargs, "generator": host}

    # -- outputs -------------------------------------------------------------------------------

    def _outputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], device: int
    ) -> list[Output | None]:
        key = tuple(_key(value, self.by_value) for value in args)
        if kwargs:
            named = ((n, _key(v, self.by_value)) for n, v in kwargs.items() if n != "generator")
            key = (key, tuple(named))
        remembered = True
        try:
            found = self.signatures.get(key)
        except TypeError:  # something that cannot be hashed: ask anew
            found, remembered = None, False
        if found is None:
            found = self._ask(args, kwargs)
            if remembered:
                if len(self.signatures) >= _REMEMBERED:
                    self.signatures.clear()
                self.signatures[key] = found
        outputs, resized = found
        for name, output in resized:
            kwargs[name].resize_(output.size)
        return list(outputs)

    def _ask(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The meta kernel's answer: new outputs, and out= tensors that must be resized."""

        def meta(tensor: Any) -> Any:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
            )

        asked = {name: _mapped(value, meta) for name, value in kwargs.items()}
        if "device" in asked:
            asked["device"] = "meta"
        if "pin_memory" in asked:
            asked["pin_memory"] = False
        if "generator" not in self.names:
            asked.pop("generator", None)
        for name in self.out_names:
            given = kwargs[name]
            if isinstance(given, torch.Tensor):
                asked[name] = torch.empty(0, dtype=given.dtype, device="meta")
        run = self.special.meta if self.special and self.special.meta else self.overload
        result = run(*(_mapped(value, meta) for value in args), **asked)
        if self.special and self.special.check:
            self.special.check(*args, **kwargs)
        resized = [
            (name, Output(asked[name]))
            for name in self.out_names
            if isinstance(kwargs[name], torch.Tensor) and asked[name].shape != kwargs[name].shape
        ]
        if len(self.returns) == 1:
            result = (result,)
        flat: list[Output | None] = []
        for source, value in zip(self.returns, result or (), strict=False):
            if source is not None:
                continue
            members = value if isinstance(value, list | tuple) else (value,)
            flat += [Output(m) if isinstance(m, torch.Tensor) else None for m in members]
        return flat, resized

    def _result(self, args: tuple[Any, ...], kwargs: dict[str, Any], new: list[Any]) -> Any:
        """What the call returns: its own arguments where the schema says so, else the new ones."""
        if self.plain:
            return new[0]
        if not self.returns:
            return None
        rest = iter(new)
        made = []
        for source, is_list in zip(self.returns, self.lists, strict=True):
            if source is not None:
                name, _, member = source.partition("[")
                position = self.names.index(name)
                value = args[position] if position < len(args) else kwargs[name]
                made.append(value[int(member[:-1])] if member else value)
            elif is_list:
                made.append(list(rest))
            else:
                made.append(next(rest))
        return made[0] if len(made) == 1 else tuple(made)

    # -- the task ------------------------------------------------------------------------------

    def _host_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], touches: list[int]
    ) -> tuple[Callable[[], Any], tasks.Late | None]:
        """The CPU kernel over the call's memory; host tensors count as they are now.

        touches: gets what the machine is to know of the memory.  Second: what says at each run
        which bytes of a span are used, where that is not known before.
        """
        late: list[tuple[Any, bool]] = []
        first = args[0] if self.indexed is not None and args else None

        def host(tensor: Any, written: bool) -> Any:
            if tensor.is_cpu:
                return tensor if written else tensor.clone()
            size = span(tensor)
            if size:
                address = tensor.data_ptr()
                if tensor is first and checking.races is not None:
                    touches.extend((address, size, written | tasks.SPAN))
                else:
                    _touch(tensor, address, size, written, touches, late)
            return _views.of(tensor)

        names = self.names

        def read(tensor: Any) -> Any:
            return host(tensor, False)

        def write(tensor: Any) -> Any:
            return host(tensor, True)

        there = [
            _mapped(value, write if names[i] in self.written else read)
            for i, value in enumerate(args)
        ]
        named = {
            name: _mapped(value, write if name in self.written else read)
            for name, value in kwargs.items()
        }
        if "device" in named:
            named["device"] = "cpu"
        if "pin_memory" in named:
            named["pin_memory"] = False
        run = self.special.run if self.special else self.seeded or self.overload
        if not late and (first is None or checking.races is None):
            return lambda: run(*there, **named), None
        where = first.data_ptr() if first is not None else 0

        def told() -> list[tuple[Any, bool]]:
            if first is None or self.indexed is None:
                return late
            one = touched.ranges(where, there[0], self.indexed(*there, **named))
            return late if one is None else [*late, (one, names[0] in self.written)]

        return lambda: run(*there, **named), told

    def _text(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The operator with shapes and types of its tensors, by which an update is judged."""
        seen = [
            f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            for value in (*args, *kwargs.values())
            for tensor in _tensors(value)
        ]
        return f"{self.name}({', '.join(seen)})"

    def _queue(self, stream: int, where: str, args: Any, kwargs: Any, new: list[Any]) -> None:
        touches: list[int] = []
        call, late = self._host_call(args, kwargs, touches)
        targets: list[Any] = [None if tensor is None else _views.of(tensor) for tensor in new]
        for tensor in new:
            if tensor is not None and tensor.numel():
                touches.extend((tensor.data_ptr(), span(tensor), 1))
        sources, single = self.returns, self.single
        if not new:
            task = call
        elif self.plain and targets[0] is not None:
            (target,) = targets

            def task() -> None:
                target.copy_(call())
        else:

            def task() -> None:
                result = call()
                results: list[Any] = []
                for value, source in zip((result,) if single else result, sources, strict=False):
                    if source is None:
                        results += value if isinstance(value, list | tuple) else (value,)
                for target, value in zip(targets, results, strict=True):
                    if target is not None:
                        target.copy_(value)

        kept = _capturing() or tasks.updating(stream)
        text = self._text(args, kwargs) if kept else ""
        try:
            tasks.launch(stream, where, task, touches, kept, text, late)
        except StreamError as error:
            raise RuntimeError(str(error)) from None

    def _wait(self, args: tuple[Any, ...], kwargs: dict[str, Any], device: int, where: str) -> Any:
        """For outputs that depend on data: the stream passes first."""
        if _capturing() or tasks.updating(_raw_stream(device)):
            raise RuntimeError(
                f"{where}: the output depends on data, which no capture has; the device refuses it "
                "too"
            )
        touches: list[int] = []
        call, late = self._host_call(args, kwargs, touches)
        found: list[Any] = []
        tasks.launch(_raw_stream(device), where, lambda: found.append(call()), touches, late=late)
        torch_npu.npu.current_stream(device).synchronize()
        (result,) = found
        if self.out_names:
            for name in self.out_names:
                value = kwargs[name]
                if isinstance(value, torch.Tensor) and value.shape != result.shape:
                    value.resize_(result.shape)
        if not isinstance(result, torch.Tensor | list | tuple):
            return result
        results = list(result) if isinstance(result, list | tuple) else [result]
        made = [
            torch.empty_strided(r.shape, r.stride(), dtype=r.dtype, device=f"npu:{device}")
            if isinstance(r, torch.Tensor)
            else r
            for r in results
        ]
        self._fill(device, where, results, made)
        return made[0] if isinstance(result, torch.Tensor) else tuple(made)

    def _fill(self, device: int, where: str, results: list[Any], made: list[Any]) -> None:
        """Write what a waiting call found into its new tensors."""
        pairs = [
            (_views.of(target), source)
            for source, target in zip(results, made, strict=True)
            if isinstance(source, torch.Tensor) and source.numel()
        ]
        touches = [
            number
            for target in made
            if isinstance(target, torch.Tensor) and target.numel()
            for number in (target.data_ptr(), span(target), 1)
        ]

        def task() -> None:
            for target, source in pairs:
                target.copy_(source)

        if pairs:
            tasks.launch(_raw_stream(device), where, task, touches)
