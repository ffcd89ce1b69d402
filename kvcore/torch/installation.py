# SPDX-License-Identifier: Apache-2.0
"""The vendor's names on a namespace of the caller's: a stand-in for torch_npu.

There is one installation at a time, since the operators are registered with torch as well, under
``torch.ops.npu``, ``atb``, ``custom`` and ``_C_ascend``, and these are the process's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import sys
import threading
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch._C import _dispatch_get_all_op_names
from torch._ops import OpOverload, OpOverloadPacket

from kvcore import soc as _soc
from kvcore.errors import KVCoreError, ParamInvalidError, fail
from kvcore.torch import formats, vendor
from kvcore.torch.calls import PrivateCopy
from kvcore.torch.device_alias import DeviceAlias, name_spare_backend
from kvcore.torch.launches import renamed
from kvcore.torch.record import Recorder, make_recorder
from kvcore.torch.registration import Arguments, register, register_alias, register_twin
from kvcore.torch.streams import Streams, make_namespace
from kvcore.torch.vendor import Vendor

if TYPE_CHECKING:
    from kvcore.runtime import Device

__all__ = ["Installation", "active", "install"]

NAMESPACES = ("npu", "atb", "custom", "_C_ascend")
#: Names that compute as well as move, which this library leaves to others.
NOT_PLANNED = ("npu_kv_rmsnorm_rope_cache", "npu_kv_rmsnorm_rope_cache_v2")

_LOCK = threading.Lock()
_active: Installation | None = None


def active() -> Installation | None:
    """The installation in force, or None."""
    return _active


class Installation:
    """What ``install`` did, and how to undo it.

    Also a context manager that uninstalls.  soc: applied to every call.  recorder: or None.
    """

    def __init__(self, ns: Any, soc: Any, device: Device | None, recorder: Recorder | None) -> None:
        self.ns = ns
        self.soc = soc
        self.recorder = recorder
        self.streams: Streams = Streams(device)
        self._undo = contextlib.ExitStack()

    # -- calls

    def perform(
        self,
        operator: Vendor,
        read: Arguments,
        args: Any,
        keywords: Any,
        copies: tuple[PrivateCopy, ...] = (),
    ) -> Any:
        """Run one call of one of the vendor's operators, now or in stream order.

        copies: tensors among the arguments that stand for others, to be filled when it runs.
        """
        streams = self.streams
        try:
            call = operator.prepare(self.soc, *args, **keywords)
            if copies:
                call.copies = (*copies, *call.copies)
            in_use = streams.in_use
            if in_use:
                if streams.postponing:
                    streams.postpone(call, operator.name, operator.names)
                    return call.returned
                streams.await_current()
            entry, plan = None, call.begin()
            if self.recorder is not None and operator.recorded:
                given = read(args, keywords)
                entry = self.recorder.before(operator, self.soc, given, plan)
            result = plan.run() if in_use or copies else plan.run_at_once()
        except KVCoreError as error:
            own = renamed(error, operator.names)
            if own is error:
                raise
            raise own from None
        returned = call.deliver(result)
        if in_use:
            streams.show(call, operator.name)
        if entry is not None and self.recorder is not None:
            self.recorder.after(entry, returned)
        return returned

    # -- setting up

    def set_up(self, device_alias: bool) -> None:
        """Register the operators and put them on the namespace; all of it or nothing."""
        try:
            self._register()
            self._fill()
            if device_alias:
                self._undo.enter_context(DeviceAlias())
        except BaseException:
            self._undo.close()
            raise

    def _register(self) -> None:
        libraries = {}
        for name in NAMESPACES:
            library = libraries[name] = torch.library.Library(name, "FRAGMENT")
            # There is no public way to take a library's operators back.
            self._undo.callback(library._destroy)  # noqa: SLF001
        for operator in (*vendor.OPERATORS, vendor.SWAP):
            library = libraries[operator.namespace]
            read = Arguments(operator.schema)
            kernel = functools.partial(_kernel, operator, read)
            if operator.aliases:
                register_alias(library, operator.schema, kernel, operator.aliases)
            else:
                register(library, operator.schema, kernel, operator.shapes)
            if operator.twin:
                on_copies = functools.partial(_kernel_on_copies, operator, read)
                register_twin(library, operator.schema, on_copies, operator.shapes)
        # Last in, so that it comes first: before the libraries go.
        self._undo.callback(_retire)

    def _fill(self) -> None:
        members = _members(_name_of(self.ns))
        present = [name for name in members if name in getattr(self.ns, "__dict__", ())]
        if present:
            fail("ns", f"a namespace without these names ({_name_of(self.ns)})", _some(present))
        for name, value in members.items():
            try:
                setattr(self.ns, name, value)
            except (AttributeError, TypeError):
                fail("ns", "an object that takes attributes, as a module", _name_of(self.ns))
            self._undo.callback(_take_back, self.ns, name, value)
        if sys.modules.get(_name_of(self.ns)) is self.ns:
            # "from torch_npu.npu import Stream" asks for the module by its full name.
            for module in (members["npu"], members["atb"]):
                if sys.modules.setdefault(module.__name__, module) is module:
                    self._undo.callback(sys.modules.pop, module.__name__, None)
            if getattr(self.ns, "__spec__", self) is None:
                # importlib.util.find_spec, by which libraries look for it, refuses one without.
                spec = importlib.machinery.ModuleSpec(_name_of(self.ns), None)
                setattr(self.ns, "__spec__", spec)  # noqa: B010 (a module need not have one)
                self._undo.callback(setattr, self.ns, "__spec__", None)

    # -- undoing

    def uninstall(self) -> None:
        """Take everything back; a second time does nothing.

        Raises what the device of ``ns.npu`` has not reported yet (races, failures), after all else
        was done.
        """
        self._leave(None, None, None)

    def _leave(self, kind: Any, error: Any, trace: Any) -> None:
        global _active
        with _LOCK:
            if _active is not self:
                return
            _active = None
            try:
                self._undo.close()
            finally:
                if self.recorder is not None:
                    self.recorder.close()
        self.streams.close(kind, error, trace)

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._leave(kind, error, trace)

    def __repr__(self) -> str:
        state = "" if _active is self else ", uninstalled"
        return f"<kvcore.torch installation on {_name_of(self.ns)}{state}>"


def install(
    ns: Any,
    soc: Any = None,
    device: Device | None = None,
    record: Any = None,
    device_alias: bool = False,
) -> Installation:
    """Put the vendor's operators on ``ns`` and under torch.ops, as torch_npu has them.

    ns:     an object that takes attributes, such as ``types.ModuleType("torch_npu")``.
    soc:    "A2", "A3" or "950": apply that hardware's documented limits to every call.
    device: an open ``kvcore.Device`` whose streams ``ns.npu`` hands out; None opens one when
            ``ns.npu`` is first used.
    record: a path, or a ``Recording``: keep calls in a file for ``verify``.
    device_alias: let "npu" mean the CPU's memory in torch's functions, in this thread; what goes
            to that device and what comes from it is copied.  Names torch's spare backend 'npu',
            for the process and for good.

    Returns a handle: ``uninstall()``, or use it in a ``with`` block.  ParamInvalidError when
    torch_npu is loaded, kvcore is installed already, or one of the names is taken.
    """
    global _active
    found = _soc.resolve(soc)
    if not isinstance(device_alias, bool):
        fail("device_alias", "True or False", repr(device_alias))
    if device is not None and not hasattr(device, "default_stream"):
        fail("device", "an open kvcore.Device or None", type(device).__name__)
    recorder = make_recorder(record)
    with _LOCK:
        _check_free(ns)
        if device_alias:
            name_spare_backend()
        made = Installation(ns, found, device, recorder)
        made.set_up(device_alias)
        _active = made
    return made


def _retire() -> None:
    """Make kept operators raise: torch crashes when one whose library is gone is called."""
    own = {vendor.SWAP.name}
    for operator in vendor.OPERATORS:
        own |= {operator.name, f"{operator.name}_functional"}
    for space in NAMESPACES:
        for name, packet in list(vars(getattr(torch.ops, space)).items()):
            if name not in own or not isinstance(packet, OpOverloadPacket):
                continue
            refuse = functools.partial(_refuse, name)
            for kept in vars(packet).values():
                if isinstance(kept, OpOverload):
                    # What torch calls for an operator has no public name.
                    kept._op = refuse  # noqa: SLF001
            packet._op = refuse  # noqa: SLF001


def _refuse(name: str, *args: Any, **keywords: Any) -> NoReturn:
    raise ParamInvalidError(
        f"{name}: expected an installed namespace, got one that was uninstalled", argument=name
    )


def _kernel(operator: Vendor, read: Arguments, *args: Any, **keywords: Any) -> Any:
    if _active is None:
        _refuse(operator.name)
    return _active.perform(operator, read, args, keywords)


def _kernel_on_copies(
    operator: Vendor, read: Arguments, copies: tuple[PrivateCopy, ...], *args: Any, **keywords: Any
) -> Any:
    if _active is None:
        _refuse(f"{operator.name}_functional")
    return _active.perform(operator, read, args, keywords, copies)


# ---------------------------------------------------------------- what is on a namespace
def _members(name: str) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for operator in vendor.OPERATORS:
        space = getattr(torch.ops, operator.namespace)
        for found in (operator.name, f"{operator.name}_functional")[: 1 + operator.twin]:
            members[found] = getattr(space, found)
    atb = types.ModuleType(f"{name}.atb", "The operators of torch.ops.atb.")
    for operator in vendor.OPERATORS:
        if operator.namespace == "atb":
            setattr(atb, operator.name, members[operator.name])
    members["atb"] = atb
    members["npu"] = make_namespace(f"{name}.npu")
    members["npu_format_cast"] = formats.npu_format_cast
    members["npu_format_cast_"] = formats.npu_format_cast_
    members["get_npu_format"] = formats.get_npu_format
    members["Format"] = formats.Format
    members["empty_with_format"] = formats.empty_with_format
    members["empty_with_swapped_memory"] = formats.empty_with_swapped_memory
    for absent in NOT_PLANNED:
        members[absent] = _not_planned(absent)
    return members


def _not_planned(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **keywords: Any) -> Any:
        raise NotImplementedError(
            f"{name} is not planned: it computes a norm and a rotary embedding, and kvcore moves "
            "tokens only; compute them with torch and call npu_scatter_pa_kv_cache"
        )

    refuse.__name__ = name
    return refuse


def _take_back(ns: Any, name: str, value: Any) -> None:
    if getattr(ns, "__dict__", {}).get(name) is value:
        delattr(ns, name)


def _name_of(ns: Any) -> str:
    return str(getattr(ns, "__name__", None) or type(ns).__name__)


# ---------------------------------------------------------------- what may be in the way
def _check_free(ns: Any) -> None:
    """Raise, saying what is there, unless there is room for an installation."""
    if _active is not None:
        fail(
            "ns",
            "no installation before this one (uninstall() it first)",
            f"kvcore.torch installed on {_name_of(_active.ns)}",
        )
    real = sys.modules.get("torch_npu")
    if getattr(real, "__file__", None):
        fail("ns", "a process without torch_npu", f"torch_npu loaded from {real.__file__}")  # type: ignore[union-attr]
    known = _dispatch_get_all_op_names()
    own = {operator.name for operator in vendor.OPERATORS} | {vendor.SWAP.name}
    taken = sorted(
        name
        for name in known
        if name.startswith("npu::")
        or (
            name.partition("::")[0] in NAMESPACES
            and name.partition("::")[2].partition(".")[0] in own
        )
    )
    if taken:
        fail("ns", "names that are free under torch.ops", _some(taken))


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
