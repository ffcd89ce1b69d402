# SPDX-License-Identifier: Apache-2.0
"""Every operator of torch on the machine: torch's CPU kernel as a task in stream order.

torch_npu registers some 1,500 operators for its device and calls the vendor's kernels, which are
not here.  Each is registered again: at the call the outputs are allocated, with the sizes and
strides that the operator's meta kernel gives, and a task is queued on the current stream that runs
the CPU kernel over the same memory.  So the call returns at once, a graph captures the task, and
nothing is copied but the result.  What a call costs each time is in _calls; here is what is done
once for a signature, or rarely.

An operator whose outputs depend on data waits for its stream, and is refused in a capture.  What a
CPU kernel raises becomes a failed task, reported by the next wait.  Views, allocation, copies and
what else is torch_npu's own stay as they are (operators.py has the table).
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Collection
from types import BuiltinFunctionType
from typing import Any

import torch
import torch_npu  # type: ignore[import-not-found,unused-ignore]
from torch._C import (
    _dispatch_tls_local_exclude_set,
    _dispatch_tls_local_include_set,
    _len_torch_function_stack,
)
from torch_npu._C import (  # type: ignore[import-not-found,unused-ignore]
    _npu_getCurrentRawStream,
    _npu_getDevice,
    _npu_isCurrentStreamCapturing,
    _npu_setDevice,
)

from kvcore.emulator import _calls, _tasks, machine, operators, randomness, tasks, touched
from kvcore.emulator.arguments import common_device, has_mask, mapped, tensors
from kvcore.emulator.outputs import asked
from kvcore.emulator.reference import references
from kvcore.emulator.views import Views, span

__all__ = ["Kernel", "install", "kernels", "pass_on"]

_ND = 2
#: Formats whose bytes are those of a plain tensor: ND and its names for 3, 4 and 5 axes.
_BASE_FORMATS = frozenset({-1, 0, 1, 2, 16, 27, 30, 47})
_format_of: Callable[[Any], int] = torch.ops.npu.get_npu_format

#: Keeps the registrations: they end with the object.
_libraries: list[Any] = []
#: By the operator's full name, such as aten::add.Tensor, as the dispatcher has them.
kernels: dict[str, Kernel] = {}
_views: Views


def install() -> None:
    """Register the kernels, once; torch_npu is imported."""
    global _views
    if _libraries:
        return
    tasks.prepare()
    _say_what_is_plain()
    _views = Views()
    _calls.bind(
        {
            "Tensor": torch.Tensor,
            "Parameter": torch.nn.Parameter,
            "Generator": torch.Generator,
            "empty_strided": torch.empty_strided,
            "device": torch.device,
            "raw_stream": _npu_getCurrentRawStream,
            "current_device": _npu_getDevice,
            "set_device": _npu_setDevice,
            "capturing": _npu_isCurrentStreamCapturing,
        },
        _views.at,
        machine.load().address("kvdouble_num_formats"),
    )
    aten = torch.library.Library("aten", "IMPL")
    for name in operators.names():
        kernel = kernels[f"aten::{name}"] = Kernel("aten", name)
        aten.impl(name, kernel, "PrivateUse1")
    own = torch.library.Library("npu", "IMPL")
    for name, overload, special in references():
        kernel = kernels[f"npu::{name}"] = Kernel("npu", name, overload, special)
        own.impl(name, kernel, "PrivateUse1")
    _libraries.extend((aten, own))


def _say_what_is_plain() -> None:
    """Have threads that wait run kernels themselves where torch's state is that of a new thread."""

    def ask() -> None:
        _tasks.bind_state(
            machine.load().address("kvdouble_plain"),
            _dispatch_tls_local_exclude_set,
            _dispatch_tls_local_include_set,
            _len_torch_function_stack,
        )

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()


def pass_on() -> None:
    """Wait until torch_npu's queue of this device has launched all that was called."""
    _npu_getCurrentRawStream(torch_npu.npu.current_device())


class Kernel(_calls.Kernel):
    """The kernel of one overload for the emulated device: what it does once, or rarely."""

    def __init__(
        self,
        space: str,
        name: str,
        overload: Any = None,
        special: operators.Special | None = None,
    ) -> None:
        packet, _, last = name.partition(".")
        super().__init__(f"{space}.{packet}.{last or 'default'}")
        self.short = name
        self.overload: Any = overload
        self.special = special

    def prepare(self) -> None:
        """Set the attributes at the first call: most operators are never called."""
        if self.overload is None:
            if not operators.has_kernel(self.short):  # only other devices have it
                raise RuntimeError(
                    f"aten::{self.short}: torch has no kernel that the emulated machine can run"
                )
            self.overload = operators.overload_of(self.short)
        overload = self.overload
        schema = operators.schema_of(overload)
        self.names: list[str] = [argument.name for argument in schema.arguments]
        self.written: set[str] = {
            argument.name
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        self.out_names: list[Any] = [
            a.name for a in schema.arguments if a.kwarg_only and a.name in self.written
        ]
        self.special = self.special or operators.SPECIAL.get(self.name)
        if self.special:
            self.written.update(self.special.writes)
        told = self.special.returns if self.special else None
        self.returns: list[str | None] = list(told or (self._source(ret) for ret in schema.returns))
        self.lists: list[bool] = [str(ret.type).startswith("List") for ret in schema.returns]
        self.single: bool = len(self.returns) == 1
        self.plain: bool = self.single and self.returns[0] is None and not self.lists[0]
        self.masks_wait: bool = operators.waits_for_masks(overload)
        self.waits: bool = operators.depends_on_data(overload) and not self.masks_wait
        self.random: bool = operators.is_random(overload)
        self.seeded: Any | None = operators.with_generator(overload) if self.random else None
        self.by_value: bool = not any("Tensor" in str(a.type) for a in schema.arguments)
        self.index_lists: bool = operators.takes_host_indices(overload)
        self.used: touched.Used | None = (
            self.special.used if self.special else touched.indexed(self.name, self.names)
        )
        run = self.special.run if self.special else self.seeded or overload
        self.run: Any = getattr(run, "_op", run)  # without OpOverload's own frame of Python
        self.compiled: bool = isinstance(self.run, BuiltinFunctionType)

    def _source(self, ret: Any) -> str | None:
        """The argument that a return value is, None if it is new."""
        if ret.alias_info is None:
            return None
        for argument in operators.schema_of(self.overload).arguments:
            if argument.alias_info and argument.alias_info.before_set & ret.alias_info.before_set:
                return str(argument.name)
        return None

    # -- once for a signature ------------------------------------------------------------------

    def learn(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, bool, list[Any], list[tuple[str, Any]]]:
        """See _calls.Kernel."""
        device = common_device(args, kwargs, self.index_lists)
        if self.waits or (self.masks_wait and has_mask(args)):
            return device, True, [], []
        special = self.special
        run = special.meta if special and special.meta else self.overload
        if "generator" not in self.names:
            kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        # Where numbers alone say how large outputs are, they may be as large as they like.
        on_zeros = not (special or self.random or self.by_value)
        outputs, resized = asked(run, args, kwargs, self.out_names, self.returns, on_zeros=on_zeros)
        if special and special.check:
            special.check(*args, **kwargs)
        return device, False, outputs, resized

    def chosen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Collection[str]:
        """See _calls.Kernel."""
        used = self.used
        if used is None or (used.when is not None and not used.when(*args, **kwargs)):
            return ()
        return used.names

    def used_elements(
        self, spans: list[tuple[str, int]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[Any, bool]]:
        """See _calls.Kernel."""
        assert self.used is not None
        given = dict(zip(self.names, args, strict=False)) | kwargs
        found = self.used.elements(*args, **kwargs)
        made = {}  # keys and values may be one tensor
        for name, address in spans:
            for one in found[name]:
                numbers = touched.ranges(address, given[name], one)
                if numbers is not None:
                    made[numbers.tobytes(), name in self.written] = numbers
        return [(numbers, written) for (_, written), numbers in made.items()]

    def text(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The operator with shapes and types of its tensors, by which an update is judged."""
        seen = [
            f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            for value in (*args, *kwargs.values())
            for tensor in tensors(value)
        ]
        return f"{self.name}({', '.join(seen)})"

    # -- formats -------------------------------------------------------------------------------

    def in_base_format(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | None:
        """The call on tensors that were cast; what it writes goes back where it came from."""
        private: list[tuple[Any, Any]] = []

        def base(tensor: Any) -> Any:
            if tensor.is_cpu or _format_of(tensor) in _BASE_FORMATS:
                return tensor
            private.append((tensor, torch_npu.npu_format_cast(tensor, _ND)))
            return private[-1][1]

        there = tuple(mapped(value, base) for value in args)
        named = {name: mapped(value, base) for name, value in kwargs.items()}
        if not private:
            return None
        result = self(*there, **named)
        given = dict(zip(self.names, there, strict=False)) | named
        written = [t for name in self.written for t in tensors(given.get(name))]
        for own, cast in private:
            if any(tensor is cast for tensor in written):
                own.copy_(cast)
        back = {id(cast): own for own, cast in private}
        return (mapped(result, lambda tensor: back.get(id(tensor), tensor)),)

    # -- random numbers ------------------------------------------------------------------------

    def with_generator(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], device: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call, with a generator of the host that continues the device's."""
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

    # -- several results -----------------------------------------------------------------------

    def results(self, args: tuple[Any, ...], kwargs: dict[str, Any], new: list[Any]) -> Any:
        """What the call returns: its own arguments where the schema says so, else the new ones."""
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

    # -- outputs that depend on data -----------------------------------------------------------

    def waited(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: int,
        stream: int,
        name: _tasks.Name,
    ) -> Any:
        """Make a call that waits for its stream, and put its results into new tensors."""
        if self.refused_now(stream):
            raise RuntimeError(
                f"{name.text}: the output depends on data, which no capture has; the device "
                "refuses it too"
            )
        task = self.kept(args, kwargs, stream, name)
        torch_npu.npu.current_stream(device).synchronize()
        result = task.result
        for out in self.out_names:
            value = kwargs[out]
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
        _fill(stream, name, results, made)
        return made[0] if isinstance(result, torch.Tensor) else tuple(made)


def _fill(stream: int, name: _tasks.Name, results: list[Any], made: list[Any]) -> None:
    """Write what a waiting call found into its new tensors."""
    pairs = [
        (_views.of(target), source)
        for source, target in zip(results, made, strict=True)
        if isinstance(source, torch.Tensor) and source.numel()
    ]
    touches = array("Q")
    for target in made:
        if isinstance(target, torch.Tensor) and target.numel():
            touches.extend((target.data_ptr(), span(target), 1))

    def task() -> None:
        for target, source in pairs:
            target.copy_(source)

    if pairs:
        _tasks.queue(stream, name, task, touches)
