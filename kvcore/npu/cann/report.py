# SPDX-License-Identifier: Apache-2.0
"""A report of this machine's CANN: the libraries looked for, where, and what was found."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

from kvcore.errors import KVCoreError
from kvcore.npu.cann import library
from kvcore.npu.cann.library import PHASE_ONE, Cann
from kvcore.npu.cann.prototypes import OPERATORS
from kvcore.npu.cann.search import SETTINGS

__all__ = ["details"]

NOT_THERE = "not there"
#: Functions that older CANNs lack, and what is not possible without them.
OPTIONAL = {
    "aclrtMallocHostWithCfg": "swapped memory by the newer way",
    "aclrtHostRegister": "swapped memory",
    "aclmdlRICaptureBegin": "graphs",
    "aclrtLaunchHostFunc": "host functions",
    "aclrtCreateEventExWithFlag": "events that can be recorded anew",
    "aclrtMemcpyBatchAsync": "batches of copies",
}


def details() -> dict[str, Any]:
    """The report as a dict of plain values; never raises. Loads CANN if there is one."""
    reason = library.why_not()
    search = library.last_search()
    found: dict[str, Any] = {
        "settings": {name: os.environ[name] for name in SETTINGS if os.environ.get(name)},
        "torch_npu": "loaded" if "torch_npu" in sys.modules else "not loaded",
    }
    try:
        cann = library.current()
    except KVCoreError:
        cann = None
    if cann is not None:
        found |= _of_library(cann)
    if search is not None:
        seen = dict(search.tried)
        found["looked_at"] = [f"{path}: {what}" for path, what in seen.items() if what != NOT_THERE]
        found["not_there"] = [path for path, what in seen.items() if what == NOT_THERE]
    found["usable"] = "yes" if reason is None else f"no: {reason}"
    return found


def _of_library(cann: Cann) -> dict[str, Any]:
    names = [name for name in OPERATORS if not name.endswith(PHASE_ONE)]
    found: dict[str, Any] = {
        "runtime": cann.runtime.path,
        "version": _version(cann),
        "soc_name": _said(cann.soc_name),
        "soc": _said(lambda: cann.soc().name),
        "arch": _said(cann.arch),
        "devices": _said(cann.device_count),
        "operators": {name: cann.home_of(name) or "not in this CANN" for name in names},
    }
    missing = {name: text for name, text in OPTIONAL.items() if not cann.has(name)}
    if missing:
        found["missing"] = {name: f"no {text}" for name, text in missing.items()}
    return found


def _said(ask: Any) -> Any:
    try:
        return ask()
    except KVCoreError as error:
        return str(error)


def _version(cann: Cann) -> str:
    """The runtime's version, where this CANN has a function for it."""
    if cann.has("aclsysGetVersionStr"):
        text = ctypes.create_string_buffer(256)
        for package in (b"CANN", b"runtime"):
            if cann.status("aclsysGetVersionStr")(package, text) == 0 and text.value:
                return f"{package.decode()} {text.value.decode(errors='replace')}"
    if cann.has("aclrtGetVersion"):
        numbers = [ctypes.c_int32() for _ in range(3)]
        if cann.status("aclrtGetVersion")(*map(ctypes.byref, numbers)) == 0:
            return "ACL " + ".".join(str(number.value) for number in numbers)
    return "unknown"
