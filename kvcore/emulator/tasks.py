# SPDX-License-Identifier: Apache-2.0
"""Python functions as tasks of the machine's streams.

A stream's thread calls :func:`_run` with a task's number, without the machine's lock, and takes the
GIL for it; so a task must not wait for a stream, and nobody waits for a task with the GIL held (see
cann/python.c).  A task that a graph has captured runs at every replay and is kept until the machine
says that it was dropped.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from ctypes import c_bool, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

from kvcore.emulator import checking, machine
from kvcore.errors import StreamError

__all__ = ["failure", "launch", "prepare"]

#: What a failed task leaves on its stream: a fault inside an AI core.
_FAULT = 507015
_NO_DEVICE = 107002

#: Beside "written" in a task's touches: some bytes of the span, and ``late`` says which.
SPAN = 2

#: Says at each run which bytes are used: [(pairs of addresses, written), ...].
Late = Callable[[], list[tuple[Any, bool]]]

_numbers = itertools.count(1)
_tasks: dict[int, tuple[Callable[[], None], str, bool, Late | None]] = {}
_gone = False


def _run(number: int) -> int:
    if number not in _tasks:
        return 0
    function, name, captured, late = _tasks[number]
    if not captured:
        del _tasks[number]
    try:
        if late is not None and checking.races is not None:
            checking.races.tell(number, late())
        function()
    except BaseException as error:
        text = f"{name}: {_words(error)}"
        _core.kvdouble_task_failed(text.encode(errors="replace"))
        return _FAULT
    return 0


def _words(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


_RUN = ctypes.CFUNCTYPE(c_int, c_uint64)(_run)
_core: ctypes.CDLL
_num_dropped: c_size_t
#: How many updates of captured tasks are open; mostly none, and no stream need be asked about.
_num_updates: c_size_t
_DROPPED = (c_uint64 * 1024)()


def prepare() -> None:
    """Make the machine ready for tasks of Python's; at exit it finishes them first."""
    global _core, _num_dropped, _num_updates
    _core = machine.load().core
    _core.kvdouble_launch.argtypes = [c_void_p, c_char_p, type(_RUN), c_uint64, c_void_p, c_size_t]
    _core.kvdouble_dropped.argtypes = [c_void_p, c_size_t]
    _core.kvdouble_dropped.restype = c_size_t
    _core.kvdouble_task_failed.argtypes = [c_char_p]
    _core.aclGetRecentErrMsg.restype = c_char_p
    _core.kvdouble_describe.argtypes = [c_char_p]
    _core.kvdouble_updates.argtypes = [c_void_p]
    _core.kvdouble_updates.restype = c_bool
    _num_dropped = c_size_t.in_dll(_core, "kvdouble_num_dropped")
    _num_updates = c_size_t.in_dll(_core, "kvdouble_num_updates")
    atexit.register(_finish)


def _forget_dropped() -> None:
    while _num_dropped.value:
        for i in range(_core.kvdouble_dropped(_DROPPED, len(_DROPPED))):
            _tasks.pop(_DROPPED[i], None)


def updating(stream: int) -> bool:
    """Whether what is launched on a stream takes the place of tasks that a graph has captured."""
    return bool(_num_updates.value and _core.kvdouble_updates(stream))


def launch(
    stream: int,
    name: str,
    function: Callable[[], None],
    touches: Sequence[int],
    captured: bool = False,
    text: str = "",
    late: Late | None = None,
) -> None:
    """Queue ``function`` on a stream.

    stream:   the address of a stream of the thread's current device.
    name:     what reports and errors call the task.
    touches:  three numbers each: a device address, bytes from there, 1 if they are written; with
              SPAN added it is some of these bytes.
    captured: the stream is being captured, or updates what was: the task may run often, or never.
    text:     of such a task: the operator with shapes and types, which an update does not change.
    late:     called before each run, on the stream's thread: which bytes of the spans it uses.
    Raises StreamError with the machine's words when it refuses.
    """
    if _gone:
        raise StreamError(f"{name}: Python is ending, and the emulated machine has stopped")
    if _num_dropped.value:
        _forget_dropped()
    number = next(_numbers)
    _tasks[number] = (function, name, captured, late)
    count = len(touches)
    given = (c_uint64 * count)(*touches)
    if text:
        _core.kvdouble_describe(text.encode())
    code = _core.kvdouble_launch(stream, name.encode(), _RUN, number, given, count // 3)
    if code:
        _tasks.pop(number, None)
        raise StreamError(f"{name}: {failure(code)}", code=code)


def failure(code: int) -> str:
    """The machine's words for a code that it has just returned in this thread."""
    text: bytes | None = _core.aclGetRecentErrMsg()
    return f"{code}" if text is None else text.decode(errors="replace")


def _finish() -> None:
    """At exit: what is queued is done, and nothing begins any more."""
    global _gone
    if threading.current_thread() is threading.main_thread() and not _core.kvdouble_forked():
        npu = sys.modules.get("torch_npu")
        try:
            if npu is not None and npu.npu.is_initialized():
                npu.npu.synchronize()
        except Exception as error:
            print(f"kvcore.emulator: at exit: {_words(error)}", file=sys.stderr)
    _gone = True
    _core.kvdouble_python_gone()
