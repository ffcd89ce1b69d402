# SPDX-License-Identifier: Apache-2.0
"""device="npu" on the CPU's memory, for programs that write it out.

Every tensor lives in the CPU's memory, but the two sides are kept apart: a storage remembers that
it belongs to the device.  What crosses is copied, as between a host and a device; what stays is
the tensor itself.  So a snapshot taken with ``.cpu()`` does not change with what it was taken of.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, _register_device_module
from torch._C import _get_privateuse1_backend_name
from torch._C._nn import _parse_to
from torch.overrides import TorchFunctionMode
from torch.utils import _device
from torch.utils._device import _device_constructors

from kvcore.errors import BackendUnavailableError, fail

__all__ = ["DeviceAlias", "is_on_npu", "name_spare_backend", "place"]

NPU = "npu"
TAG = "_kvcore_on_npu"
#: They only name a device, and what they make of it comes back as an argument of other functions.
NAMING = (torch.device, _parse_to)
#: They share memory with what is no tensor, where a device has to copy.
ADOPTING = (torch.as_tensor, torch.asarray, torch.from_dlpack)

_in_force = 0


class DeviceAlias(TorchFunctionMode):  # type: ignore[misc]
    """While entered, in this thread: "npu", as text or torch.device, means the CPU.

    On the device's side are: what functions make that are asked to, what operators make of a
    tensor there, and views of these.
    """

    def __enter__(self) -> Any:
        """Begin."""
        global _in_force
        found = super().__enter__()
        _in_force += 1
        return found

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """End."""
        global _in_force
        _in_force -= 1
        super().__exit__(kind, error, trace)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function with the device replaced, and see to what it returns."""
        keywords = dict(kwargs or {})
        if func in NAMING:
            return func(*args, **keywords)
        target = _target(func, args, keywords)
        given = [(t, _storage(t)) for t in _tensors((*args, *keywords.values()))]
        args = [torch.device("cpu") if _is_npu(value) else value for value in args]
        for name, value in keywords.items():
            if _is_npu(value):
                keywords[name] = torch.device("cpu")
        if target is not None and func in _device_constructors():
            keywords.setdefault("device", torch.device("cpu"))
        result = func(*args, **keywords)
        if target is None or "out" in keywords:
            made_of_npu = any(_is_marked(storage) for _, storage in given)
            _mark(result, made_of_npu, given)
            return result
        return _carried(result, target, given, func in ADOPTING)


def _target(func: Any, args: Any, keywords: dict[str, Any]) -> bool | None:
    """Whether the call names the device's side (True) or another place; None: no place at all."""
    if func is Tensor.cpu:
        return False
    if func is Tensor.to:
        other = args[1] if len(args) > 1 else keywords.get("other")
        if isinstance(other, Tensor):
            return is_on_npu(other) if other.device.type == "cpu" else False
        if isinstance(other, str):
            return _is_npu(other)
    for value in (*args, keywords.get("device")):
        if isinstance(value, torch.device) or _is_npu(value):
            return _is_npu(value)
    if keywords.get("device") is not None:
        return False
    if func in _device_constructors() and _is_npu(_device.CURRENT_DEVICE):
        return True
    return None


def _carried(result: Any, target: bool, given: list[Any], adopts: bool) -> Any:
    """What was asked for on a side: a copy of what lay on the other."""
    if isinstance(result, list | tuple) and type(result) in (list, tuple):
        return type(result)(_carried(one, target, given, adopts) for one in result)
    if not isinstance(result, Tensor) or result.device.type != "cpu":
        return result
    storage = _storage(result)
    shared = [s for _, s in given if s is not None and s is storage]
    if (shared and _is_marked(storage) != target) or (adopts and target and not shared):
        result = result.clone()
        storage = _storage(result)
    if target and storage is not None:
        setattr(storage, TAG, True)
    return result


def _mark(result: Any, on_npu: bool, given: list[Any]) -> None:
    """Note that new tensors among the results are on the device's side."""
    if not on_npu:
        return
    for tensor in _tensors((result,)):
        storage = _storage(tensor)
        if storage is not None and not any(s is storage for _, s in given):
            setattr(storage, TAG, True)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _storage(tensor: Tensor) -> Any:
    """The storage of a dense tensor in the CPU's memory; None of others."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # of no memory: nested, functional, fake
        return None


def _is_marked(storage: Any) -> bool:
    return getattr(storage, TAG, False)


def _is_npu(device: Any) -> bool:
    if isinstance(device, torch.device):
        return bool(device.type == NPU)
    return isinstance(device, str) and device.partition(":")[0] == NPU


def is_on_npu(tensor: Tensor) -> bool:
    """Whether the tensor's memory is on the device's side."""
    return _is_marked(_storage(tensor))


def place(tensor: Tensor, device: Any) -> Tensor:
    """The tensor, on the device's side unless ``device`` is another; for functions of the vendor's.

    Those of them that make memory make it on the device when none is named.
    """
    if _in_force and (device is None or _is_npu(str(device))):
        setattr(_storage(tensor), TAG, True)
    return tensor


# ---------------------------------------------------------------- the device's name
def name_spare_backend() -> None:
    """Let torch.device("npu") exist: torch has one name to give, for the process and for good.

    A process in which it was given already is as good.  ParamInvalidError when it was given to
    another device.
    """
    named = _get_privateuse1_backend_name()
    if named == "privateuseone":
        torch.utils.rename_privateuse1_backend(NPU)
    elif named != NPU:
        fail("device_alias", "a process whose spare backend has no name or 'npu'", repr(named))
    if not hasattr(torch, NPU):
        _register_device_module(NPU, _without_a_device())


def _without_a_device() -> types.ModuleType:
    """What torch asks about a device that has a name: this one is not available.

    Without the module torch.compile fails, in which it looks for streams.
    """
    module = types.ModuleType(f"torch.{NPU}", "A name without a device.")
    members = {
        "is_available": lambda: False,
        "is_initialized": lambda: False,
        "device_count": lambda: 0,
        "manual_seed": _nothing_to_seed,
        "manual_seed_all": _nothing_to_seed,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": _no_device,
    }
    for name, member in members.items():
        setattr(module, name, member)
    return module


def _nothing_to_seed(seed: int) -> None:
    """The CPU's generator is the only one."""


def _no_device() -> NoReturn:
    """Torch starts the device: "npu" came where no alias is in force."""
    raise BackendUnavailableError(
        "device: expected 'npu' in the thread of an installation with device_alias=True, got it "
        "where there is no such device",
        argument="device",
        seen=NPU,
    )
