# SPDX-License-Identifier: Apache-2.0
"""Python's tasks of the machine's streams: made ready at the start, finished at exit.

``_tasks`` launches and runs them.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
import traceback

from kvcore.emulator import _tasks, checking, machine

__all__ = ["failure", "prepare"]

_FUNCTIONS = (
    "kvdouble_launch",
    "kvdouble_intern",
    "kvdouble_dropped",
    "kvdouble_task_failed",
    "kvdouble_updates",
)
_COUNTERS = ("kvdouble_num_dropped", "kvdouble_num_updates")


def prepare() -> None:
    """Make the machine ready for tasks of Python's; at exit it finishes them first."""
    loaded = machine.load()
    loaded.core.aclGetRecentErrMsg.restype = ctypes.c_char_p
    addresses = {name: loaded.address(name) for name in (*_FUNCTIONS, *_COUNTERS)}
    _tasks.bind(addresses, failure, checking.races)
    atexit.register(_finish)


def failure(code: int) -> str:
    """The machine's text for a code that it has just returned in this thread."""
    text: bytes | None = machine.load().core.aclGetRecentErrMsg()
    return f"{code}" if text is None else text.decode(errors="replace")


def _finish() -> None:
    """At exit: what is queued is done, and nothing begins any more."""
    core = machine.load().core
    if threading.current_thread() is threading.main_thread() and not core.kvdouble_forked():
        npu = sys.modules.get("torch_npu")
        try:
            if npu is not None and npu.npu.is_initialized():
                npu.npu.synchronize()
        except Exception as error:
            words = "".join(traceback.format_exception_only(error)).strip()
            print(f"kvcore.emulator: at exit: {words}", file=sys.stderr)
    _tasks.stop()
    core.kvdouble_python_gone()
