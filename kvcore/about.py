# SPDX-License-Identifier: Apache-2.0
"""What this installation has: kvcore.info()."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from kvcore import backends, cpus, dtypes, soc, threads
from kvcore import isa as isa_settings
from kvcore._core import adopt
from kvcore._kernels import isa, parallel
from kvcore.errors import KVCoreError, ParamInvalidError, fail

__all__ = ["info", "unusable_settings"]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _dtype_row(row: dtypes.DType) -> str:
    if row.packed:
        return "packed two a byte in uint8 arrays; kvcore.pack_float4"
    if row.name == "hifloat8":
        found = importlib.util.find_spec("en_dtypes") is not None
        return "en_dtypes, or raw uint8" if found else "raw uint8 (en_dtypes is not installed)"
    kind = adopt.numpy_dtype(row)
    assert kind is not None
    return "numpy" if kind.isbuiltin == 1 else "ml_dtypes, or raw " + row.raw


def _setting(read: Callable[[], Any]) -> Any:
    # What is wrong with the environment is part of the answer.
    try:
        return read()
    except ParamInvalidError as error:
        return str(error)


def _soc_name() -> str | None:
    current = soc.current()
    return None if current is None else current.name


def _backend_name() -> str | None:
    name = os.environ.get("KVCORE_BACKEND", "").strip()
    if name and name not in backends.names():
        fail("KVCORE_BACKEND", "one of " + ", ".join(backends.names()), repr(name))
    return name or None


def unusable_settings() -> list[str]:
    """What is wrong with the values of KVCORE_... variables, a sentence each."""
    readers = (threads.get_num_threads, _soc_name, _backend_name)
    faults = isa_settings.faults()
    for read in readers:
        try:
            read()
        except KVCoreError as error:
            faults.append(str(error))
    return faults


def _has_details(name: str) -> bool:
    return hasattr(backends.get(name), "details")


def _details(name: str) -> Any:
    found: Any = backends.get(name)
    try:
        return found.details()
    except Exception as error:  # a broken backend is part of the answer too
        return f"{type(error).__name__}: {error}"


def _cpu() -> dict[str, Any]:
    found = cpus.chosen()
    return {
        "name": found.cpu,
        "row": found.row.name,
        "row_comes_from": found.how,
        "row_rests_on": found.row.basis,
        "path": isa.path(),
        "second_level_bytes": isa.second_level()[1],
        "third_level_bytes": cpus.third_level(),
        "passed_over": found.words(),
    }


def info() -> dict[str, Any]:
    """A nested dict: version, cpu, threads, soc, backends (None: usable, else why not), details
    (of backends that have any: libraries looked for, device, operators), dtypes, packages, emulator
    (what there is of the emulated machine for torch_npu; "usable" is None, or why it is not).

    Takes milliseconds; it asks each backend whether it can run here.
    A setting that the environment gives a value it cannot have is the sentence that says so;
    unusable_settings lists all of these.
    """
    import kvcore
    from kvcore.emulator import installed

    return {
        "version": kvcore.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "unusable_settings": unusable_settings(),
        "cpu": {
            "machine": platform.machine(),
            "usable_cores": threads.usable_cores(),
            "instruction_set": isa.current(),
            "instruction_sets": list(isa.available()),
            "stream_bytes": isa.stream_bytes(),
            **_cpu(),
        },
        "threads": {
            "num_threads": _setting(threads.get_num_threads) or "automatic",
            "parallel_bytes": parallel.parallel_bytes(),
            "environment": threads.ENVIRONMENT,
        },
        "soc": _setting(_soc_name),
        "backends": {name: backends.why_not(name) for name in backends.names()}
        | backends.load_errors(),
        "details": {name: _details(name) for name in backends.names() if _has_details(name)},
        "dtypes": {row.name: _dtype_row(row) for row in dtypes.DATA_DTYPES},
        "packages": {
            "numpy": np.__version__,
            **{name: _version(name) for name in ("ml_dtypes", "en_dtypes", "anyio", "torch")},
        },
        "emulator": installed.facts(),
    }
