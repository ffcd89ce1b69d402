# SPDX-License-Identifier: Apache-2.0
"""The process's CANN: found, loaded and initialised when first asked for.

There is one per process, as CANN itself has one state per process.  aclInit is called once (by
another party before us is fine); aclFinalize never, since it would end CANN for everybody.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

from kvcore import soc as socs
from kvcore.errors import BackendUnavailableError, KVCoreError, StreamError, fail
from kvcore.npu.cann import prototypes, status
from kvcore.npu.cann.constants import (
    ACL_DEV_ATTR_NPU_ARCH,
    ACL_ERROR_REPEAT_INITIALIZE,
    ACL_SUCCESS,
)
from kvcore.npu.cann.search import ENVIRONMENT, SETTINGS, LoadedLibrary, Search

__all__ = ["Cann", "OnDevice", "current", "forget", "last_search", "thread", "why_not"]

PHASE_ONE = "GetWorkspaceSize"


class _Thread(threading.local):
    in_host_function = False


#: Of this OS thread: whether it runs a host function, in which no call of CANN may be made.
thread: _Thread = _Thread()


class Cann:
    """CANN's functions by their C names, as attributes, each bound when first used.

    A status other than 0 raises the typed error with CANN's own text.  ``status(name)`` is the
    same function with the status returned.  A function that this CANN lacks is a
    BackendUnavailableError; one that kvcore does not know, an AttributeError.
    """

    def __init__(self, search: Search, runtime: LoadedLibrary) -> None:
        self.search = search
        self.runtime = runtime
        self.pid: int = os.getpid()
        self._lock = threading.RLock()
        self._operators: list[LoadedLibrary] | None = None
        self._meta: LoadedLibrary | None = None
        self._homes: dict[str, LoadedLibrary | None] = {}
        self._unchecked: dict[str, Callable[..., int]] = {}
        self._soc: socs.SoC | None = None
        #: Whether copies within a device may have two dimensions; False once CANN refused one.
        self.copies_in_two_dimensions = True

    def __repr__(self) -> str:
        return f"<Cann {self.runtime.path}>"

    def __getattr__(self, name: str) -> Any:
        if not prototypes.is_known(name):
            raise AttributeError(f"kvcore knows no function {name!r} of CANN")
        function = self._bind(name, checked=True)
        setattr(self, name, function)
        return function

    def status(self, name: str) -> Callable[..., int]:
        """The C function of that name, unchecked: it returns its status instead of raising."""
        found = self._unchecked.get(name)
        if found is None:
            found = self._unchecked[name] = self._bind(name, checked=False)
        return found

    def has(self, name: str) -> bool:
        """Whether this CANN has a C function of that name."""
        return self._home(name) is not None

    def operators(self) -> list[LoadedLibrary]:
        """The operator libraries; the first call loads them."""
        with self._lock:
            if self._operators is None:
                self._meta = self.search.meta(self.runtime)
                self._operators = self.search.operators(self.runtime)
            return self._operators

    def home_of(self, name: str) -> str | None:
        """The path of the library that a function comes from; None: not in this CANN."""
        found = self._home(name)
        return None if found is None else found.path

    def _home(self, name: str) -> LoadedLibrary | None:
        if name not in self._homes:
            self._homes[name] = self._look(name)
        return self._homes[name]

    def _candidates(self, name: str) -> list[LoadedLibrary]:
        group = prototypes.group_of(name)
        if group == "runtime":
            return [self.runtime]
        libraries = self.operators()
        if group == "meta":
            # From the operators' own libnnopbase, whichever way it is reached.
            meta = [] if self._meta is None else [self._meta]
            return [*meta, *libraries, self.runtime]
        return [*libraries, self.runtime]

    def _look(self, name: str) -> LoadedLibrary | None:
        names = [name]
        if prototypes.group_of(name) == "operators":
            # Both phases of one operator come from one library.
            stem = name.removesuffix(PHASE_ONE)
            names = [stem, stem + PHASE_ONE]
        for library in self._candidates(name):
            if all(library.has(one) for one in names):
                return library
        return None

    def _bind(self, name: str, checked: bool) -> Any:
        result, arguments, is_status = prototypes.argument_types(name)
        home = self._home(name)
        if home is None:
            paths = ", ".join(found.path for found in self._candidates(name))
            raise BackendUnavailableError(
                f"{name} is not in this CANN ({paths})", argument=None, seen=name
            )
        function: Any = home.handle[name]  # a new object each time, unlike an attribute
        function.restype = result
        function.argtypes = arguments
        if checked and is_status:

            def check(code: int, _: Any, __: Any, name: str = name) -> int:
                if code != ACL_SUCCESS:
                    raise status.error(code, name, self.recent_error())
                return code

            function.errcheck = check
        return function

    def recent_error(self) -> str:
        """CANN's text about the last failure in this thread; reading it clears it."""
        if self._home("aclGetRecentErrMsg") is None:
            return ""
        # The pointer is valid until the next call only: ctypes copies the bytes at once.
        text: Any = self.status("aclGetRecentErrMsg")()
        return "" if not text else text.decode(errors="replace").strip()

    def on_device(self, device_id: int, *, giving_back: bool = False) -> OnDevice:
        """``with cann.on_device(0):`` gives this OS thread the device for the block.

        Every call needs it.  Afterwards the thread is where it was: the caller's other work, by
        torch_npu or anybody, may be on another device.  A thread that had none keeps this one.
        giving_back: for blocks that free things.  Setting the device is tried twice, and the block
        runs even when it fails, since what it frees would be lost otherwise.
        """
        return OnDevice(self, device_id, giving_back)

    def set_device(self, device_id: int) -> None:
        """Give this OS thread the device for good: for threads of one's own."""
        self.refuse_to_call()
        if not 0 <= device_id < 2**31:  # ctypes would cut it
            fail("device_id", "a device's number", device_id)
        self.aclrtSetDevice(device_id)

    def context(self) -> int:
        """The context of this OS thread; 0 where it has none."""
        found = ctypes.c_void_p()
        if self.status("aclrtGetCurrentContext")(ctypes.byref(found)) != ACL_SUCCESS:
            self.recent_error()  # clear the text, or the next failure would show it
            return 0
        return found.value or 0

    def refuse_to_call(self) -> None:
        """Raise where CANN must not be called: in a host function, in a forked child."""
        if thread.in_host_function:
            # The stream would wait for this function, which would wait for the stream.
            raise StreamError(
                "fn: expected a host function that does nothing on an NPU, got one that does: it "
                "must not launch, wait, allocate or free on any device",
                argument="fn",
                expected="a host function that does nothing on an NPU",
            )
        if self.pid != os.getpid():
            self.refuse_a_fork()

    def refuse_a_fork(self) -> None:
        """Raise in a child of the process that CANN was started in."""
        if self.pid != os.getpid():
            raise BackendUnavailableError(
                "CANN does not survive a fork: use the NPU in the process that started it, or "
                "start others with 'spawn'"
            )

    def device_count(self) -> int:
        """The number of devices this process may use."""
        count = ctypes.c_uint32(0)
        self.aclrtGetDeviceCount(ctypes.byref(count))
        return count.value

    def soc_name(self) -> str:
        """The SoC's name as aclrtGetSocName returns it: that of device 0."""
        text: Any = self.aclrtGetSocName()
        return text.decode(errors="replace") if text else ""

    def arch(self, device_id: int = 0) -> int | None:
        """The device's NpuArch number; None where the runtime has no way to ask for it."""
        value = ctypes.c_int64(0)
        if not self.has("aclrtGetDeviceInfo"):
            return None
        ask = self.status("aclrtGetDeviceInfo")
        if ask(device_id, ACL_DEV_ATTR_NPU_ARCH, ctypes.byref(value)) != ACL_SUCCESS:
            self.recent_error()  # clear the text, or the next failure would show it
            return None
        return value.value

    def soc(self) -> socs.SoC:
        """The SoC of this machine; BackendUnavailableError for one that is not in the table."""
        if self._soc is None:
            self._soc = self._recognise()
        return self._soc

    def _recognise(self) -> socs.SoC:
        name = self.soc_name()
        found = socs.from_product(name)
        if found is None:
            rows = socs.PROFILES.values()
            known = ", ".join(f"{row.name} ({row.profile.pattern})" for row in rows)
            raise BackendUnavailableError(
                f"SoC {name!r} is not supported; supported: {known}", seen=name, expected=known
            )
        arch = self.arch()
        if arch is not None and arch != found.profile.arch:
            raise BackendUnavailableError(
                f"SoC {name!r}: expected NpuArch {found.profile.arch} of {found.name}, got {arch}",
                seen=arch,
                expected=found.profile.arch,
            )
        return found


class OnDevice:
    """This OS thread on a device, then back in the context that it had.

    The context, not the device: setting a device counts a use of it, and would put a thread that
    has made a context of its own into the device's default one.
    """

    __slots__ = ("_before", "_cann", "_device_id", "_giving_back")

    def __init__(self, cann: Cann, device_id: int, giving_back: bool) -> None:
        self._cann = cann
        self._device_id = device_id
        self._giving_back = giving_back
        self._before = 0

    def __enter__(self) -> None:
        cann = self._cann
        cann.refuse_to_call()
        self._before = cann.context()
        if not self._giving_back:
            cann.set_device(self._device_id)
            return
        for _ in range(2):
            with contextlib.suppress(KVCoreError):
                cann.set_device(self._device_id)
                return

    def __exit__(self, *_: object) -> None:
        cann, before = self._cann, self._before
        # An error of the block is the one to report; a context that is lost shows at the next call.
        if (
            before
            and cann.context() != before
            and cann.status("aclrtSetCurrentContext")(before) != ACL_SUCCESS
        ):
            cann.recent_error()


_lock = threading.RLock()
_cann: Cann | None = None
_proven: Cann | None = None
_key: tuple[str | None, ...] | None = None
_reason: str | None = None
_search: Search | None = None


def _settings() -> tuple[str | None, ...]:
    return tuple([os.environ.get(name) for name in SETTINGS])


def current() -> Cann:
    """The process's CANN, initialised; BackendUnavailableError says why there is none."""
    cann = _cann
    if cann is not None:
        cann.refuse_to_call()
        return cann
    return _load()


def _load() -> Cann:
    global _cann, _key, _reason, _search
    with _lock:
        if _cann is not None:
            return _cann
        key = _settings()
        if _reason is not None and key == _key:
            raise BackendUnavailableError(_reason)
        search, _key = Search(), key
        _search = search
        try:
            _cann = _open(search)
            _reason = None
        except KVCoreError as error:
            _reason = str(error)
            raise
        return _cann


def _open(search: Search) -> Cann:
    runtime = search.runtime()
    if runtime is None:
        raise BackendUnavailableError(f"no CANN runtime library found: {_looked(search)}")
    opp = search.opp_path(runtime)
    if opp is not None:
        # The operators' library finds its kernels by this variable alone (561107 without).
        os.environ["ASCEND_OPP_PATH"] = opp
        search.environ = dict(os.environ)
    cann = Cann(search, runtime)
    code = cann.status("aclInit")(None)
    if code not in (ACL_SUCCESS, ACL_ERROR_REPEAT_INITIALIZE):
        raise BackendUnavailableError(
            f"{runtime.path}: {status.error(code, 'aclInit', cann.recent_error())}",
            seen=code,
            expected=0,
            code=code,
        )
    return cann


def _looked(search: Search) -> str:
    broken = [
        f"{path}: {outcome.removeprefix(f'{path}: ')}"  # the linker begins with the path too
        for path, outcome in search.tried
        if outcome not in ("not there", "loaded") and os.sep in path
    ]
    if search.given:
        folders = ", ".join(map(str, search.given))
        return "; ".join([f"looked in {folders} ({ENVIRONMENT})", *broken])
    if broken:
        return "; ".join(broken)
    unset = [name for name in SETTINGS[1:3] if not os.environ.get(name)]
    looked = f"looked in {', '.join(map(str, search.homes()))} and on the linker's path"
    return looked + (f"; {' and '.join(unset)} not set" if unset else "")


def proven() -> Cann | None:
    """The CANN that ``why_not`` has found usable in this process; None before that."""
    found = _proven
    return found if found is not None and found is _cann and found.pid == os.getpid() else None


def why_not() -> str | None:
    """Why CANN cannot be used here; None when it can."""
    global _proven
    try:
        cann = current()
        if cann.device_count() == 0:
            return "no device (aclrtGetDeviceCount says 0)"
        cann.soc()
        if not cann.operators():
            return "no operator library (libopapi_transformer.so or libopapi.so) next to " + (
                cann.runtime.path
            )
        for name in ("aclCreateTensor", "aclDestroyTensor"):
            if not cann.has(name):
                return f"{name} is not in this CANN"
    except KVCoreError as error:
        return str(error)
    _proven = cann
    return None


def last_search() -> Search | None:
    """The last search for libraries; None before the first."""
    return _search


def forget() -> None:
    """For tests: search again at the next use. Unloads nothing and finalises nothing."""
    global _cann, _key, _reason, _search, _proven
    with _lock:
        _cann = _key = _reason = _search = _proven = None
