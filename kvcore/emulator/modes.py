# SPDX-License-Identifier: Apache-2.0
"""What torch's operators say as they are called: their line, and what they do to pinned memory."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from kvcore.emulator import _dispatch, checking, fallback, leaks, operators
from kvcore.emulator._races import Races
from kvcore.emulator._ranges import runs
from kvcore.emulator.reports import collector
from kvcore.runtime.watching._observe import pass_over

__all__ = ["Calls", "install"]

_MOST = 1 << 16  # runs of one tensor; of more it is not said what is touched

#: They take a tensor for its size, or its place, and touch no byte of it.
_UNTOUCHED = frozenset(
    {
        "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
        "randint_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided",
        "is_pinned", "record_stream", "set_", "resize_", "is_same_size", "sym_size", "sym_stride",
        "sym_numel", "sym_storage_offset", "is_set_to", "resize_as_",
    }
)  # fmt: skip
#: Copies: what they do to memory of the host is a task of the stream, or waited for by the machine.
_COPIES = frozenset({"copy_", "_copy_from", "_to_copy", "_pin_memory", "_copy_from_and_resize"})
#: Made by torch_npu's own thread, which has no line: they write to their result or first argument.
_CALLED_LATER = frozenset({"clone", "npu_format_cast", "npu_format_cast_", "_npu_format_cast"})
_FRESH = frozenset(
    {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "resize_"}
)


class Call(_dispatch.Known):
    """What is known of an overload beforehand.

    touched: of each argument that may be a tensor, whether it is written; views are left out.
    """

    def __init__(self, func: Any) -> None:
        schema = operators.schema_of(func)
        packet = schema.name.rpartition("::")[2]
        copies = packet in _COPIES
        self.noted: bool = (copies and packet != "_pin_memory") or packet in _CALLED_LATER
        self.fresh: bool = packet in _FRESH and _races.check_reads
        self.makes: bool = checking.leaking and any(
            ret.alias_info is None for ret in schema.returns
        )
        behind = self.noted or self.fresh or self.makes
        super().__init__(
            str(func), fallback.kernels.get(func.name()), copies, self.behind if behind else None
        )
        self.touched: list[tuple[int, str, bool]] = []
        self.written: list[tuple[int, str]] = []
        for position, argument in enumerate(schema.arguments):
            if "Tensor" not in str(argument.type):
                continue
            alias = argument.alias_info
            if alias is not None and alias.is_write:
                self.written.append((position, argument.name))
            if packet in _UNTOUCHED or (alias is not None and not alias.is_write):
                continue
            self.touched.append((position, argument.name, alias is not None))

    def behind(self, line: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """What is said of the call when it has returned."""
        if self.noted:
            _note(self, line, args, kwargs, result)
        elif self.fresh:
            _fresh(result)
        if self.makes:
            _made(self, line, result)


_races: Races


def install(reader: Races) -> None:
    """Watch this thread, and those that start from now on."""
    global _races
    _races = reader
    for module in (torch, __import__("torch_npu")):
        pass_over(str(module.__path__[0]))
    bound = (torch.Tensor, OpOverload, torch.strided)
    _dispatch.bind(bound, Call, _host, reader, collector)
    Calls().__enter__()
    checking.in_new_threads(Calls)


def in_host_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """A host function whose operators are seen: the thread that runs it is not Python's own."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        with Calls():
            return function(*args)

    return run


def _given(position: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[position] if position < len(args) else kwargs.get(name)


class Calls(TorchDispatchMode):  # type: ignore[misc]
    """The dispatch mode of one thread."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compilers are to work beneath it as if it were not there."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    __torch_dispatch__: Callable[..., Any] = _dispatch.dispatch


def _host(call: Any, line: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What an operator does to pinned memory by itself."""
    for position, name, write in call.touched:
        value = _given(position, name, args, kwargs)
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if not isinstance(tensor, torch.Tensor) or not tensor.is_cpu or not tensor.numel():
                continue
            touch(call.name, line, tensor, write)


def touch(name: str, line: int, tensor: Any, write: bool) -> None:
    """The host reads or writes a tensor of the host, if that is pinned."""
    if tensor.layout is not torch.strided or type(tensor) not in _PLAIN:
        return
    address = tensor.data_ptr()
    if not _races.is_pinned(address):
        return
    if tensor.is_contiguous():
        numbers: array[int] | None = array("q", (address, address + tensor.nbytes))
    else:
        numbers = runs(address, tensor.shape, tensor.stride(), tensor.itemsize, _MOST)
    if not _races.in_task():
        # What was called before must have been entered: torch_npu's queue has passed it on by then.
        fallback.pass_on()
    if numbers is not None:
        _races.host_touches(name, line, numbers, write)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _note(
    call: Call, line: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> None:
    """For torch_npu's own operators: its queue's thread will write there, from this line."""
    for value in result if isinstance(result, list | tuple) else (result,):
        if type(value) in _PLAIN and value.layout is torch.strided:
            _note_one(value, line)
    for position, name in call.written:
        value = _given(position, name, args, kwargs)
        if isinstance(value, torch.Tensor) and value is not result:
            _note_one(value, line)


def _note_one(tensor: Any, line: int) -> None:
    """Memory that the machine does not know is in no entry, and its note would stay for ever."""
    if tensor.numel():
        address = tensor.data_ptr()
        if not tensor.is_cpu or _races.is_pinned(address):
            _races.note(address, line)


def _fresh(tensor: Any) -> None:
    """Memory that was handed out: what was written there before is nobody's."""
    if type(tensor) in _PLAIN and tensor.device.type == "npu" and tensor.numel():
        address = tensor.data_ptr()
        _races.fresh(address, address + tensor.untyped_storage().nbytes())


def _made(call: Call, line: int, result: Any) -> None:
    for value in result if isinstance(result, list | tuple) else (result,):
        if type(value) not in _PLAIN or value.device.type != "npu":
            continue
        if not value._is_view():  # noqa: SLF001  (torch has no public name for it)
            leaks.made(value.data_ptr(), line, call.name)
