# SPDX-License-Identifier: Apache-2.0
"""Calls a double symbol by symbol, and runs an operator on numpy arrays through it.

For tests of the double itself: it shares nothing with the package's own backend.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from ctypes import byref, c_char_p, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from double.build import Installation

DTYPES = {
    "float32": 0, "float16": 1, "int8": 2, "int32": 3, "uint8": 4, "int16": 6, "uint16": 7,
    "uint32": 8, "int64": 9, "bfloat16": 27, "hifloat8": 34, "float8_e5m2": 35,
    "float8_e4m3fn": 36, "float4_e2m1": 40, "float4_e1m2": 41,
}  # fmt: skip
FLOAT4 = ("float4_e2m1", "float4_e1m2")
ND = 2
#: Arguments whose element type is that of the key's lane, and those of the value's.
KEY_LANE = (
    "key", "key_cache", "selection_k_rope", "selection_kv_cache", "full_k_rope", "full_kv_cache",
)  # fmt: skip
VALUE_LANE = ("value", "value_cache")

Array = np.ndarray[Any, Any]


class Refused(Exception):
    """Phase one or two returned ``code``."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


def pointer(value: int | None) -> c_void_p:
    return c_void_p(value)


def load(path: Path | None) -> ctypes.CDLL:
    """A double's library, bound to its own symbols: another double may be loaded for all to see."""
    # AddressSanitizer takes no such library.
    preloaded = "asan" in os.environ.get("LD_PRELOAD", "")
    return ctypes.CDLL(str(path), mode=0 if preloaded else getattr(os, "RTLD_DEEPBIND", 0))


class Double:
    """The symbols of one installed double: ``double.rt("aclrtMalloc", ...)`` and so on."""

    def __init__(self, installed: Installation) -> None:
        self.installed = installed
        self.runtime = load(installed.runtime)
        self.base = load(installed.lib / "libnnopbase.so")
        self.opapi = load(installed.opapi) if installed.opapi else None
        self.custom = load(installed.custom) if installed.custom else None
        for library, name in (
            (self.runtime, "kvdouble_violations"),
            (self.runtime, "kvdouble_calls"),
            (self.runtime, "kvdouble_live_text"),
            (self.runtime, "aclGetRecentErrMsg"),
            (self.runtime, "aclrtGetSocName"),
        ):
            getattr(library, name).restype = c_char_p
        self.runtime.kvdouble_live_handles.restype = c_size_t
        self.runtime.kvdouble_num_calls.restype = c_uint64
        self.runtime.kvdouble_num_blocking.restype = c_size_t
        self.runtime.kvdouble_capacity.argtypes = [c_uint64]
        self.runtime.kvdouble_workspace.argtypes = [c_uint64]
        for name in ("aclCreateTensor", "aclCreateIntArray", "aclCreateTensorList"):
            getattr(self.base, name).restype = c_void_p
        self.soc("Ascend910_9391")

    # -- control ------------------------------------------------------------------------------

    def soc(self, name: str) -> None:
        self.runtime.kvdouble_soc(name.encode())

    def reset(self) -> None:
        self.runtime.kvdouble_reset()

    def fail(self, symbol: str, nth: int, code: int) -> None:
        self.runtime.kvdouble_fail(symbol.encode(), nth, code)

    def fail_async(self, symbol: str, nth: int, code: int) -> None:
        self.runtime.kvdouble_fail_async(symbol.encode(), nth, code)

    def violations(self) -> list[str]:
        """What was broken since the last call."""
        text: str = self.runtime.kvdouble_violations().decode()
        self.runtime.kvdouble_forgive()
        return text.splitlines()

    def num_blocking(self) -> int:
        """Asynchronous copies since the last call that had to be synchronous."""
        return int(self.runtime.kvdouble_num_blocking())

    def live(self, kind: str | None = None) -> int:
        return int(self.runtime.kvdouble_live_handles(kind.encode() if kind else None))

    def live_text(self) -> str:
        text: str = self.runtime.kvdouble_live_text().decode()
        return text

    def calls(self) -> list[str]:
        text: str = self.runtime.kvdouble_calls().decode()
        return text.splitlines()

    def num_calls(self, symbol: str | None = None) -> int:
        return int(self.runtime.kvdouble_num_calls(symbol.encode() if symbol else None))

    # -- runtime --------------------------------------------------------------------------------

    def rt(self, symbol: str, *arguments: Any) -> int:
        code: int = getattr(self.runtime, symbol)(*arguments)
        return code

    def made(self, symbol: str, *arguments: Any) -> int:
        """A call whose first argument receives a pointer."""
        out = c_void_p()
        self.ok(self.rt(symbol, byref(out), *arguments))
        assert out.value is not None
        return out.value

    def ok(self, code: int) -> None:
        if code:
            raise Refused(code, self.message() or "")

    def message(self) -> str | None:
        text = self.runtime.aclGetRecentErrMsg()
        return None if text is None else text.decode()

    def start(self, device: int = 0) -> None:
        code = self.rt("aclInit", None)
        assert code in (0, 100002)
        self.ok(self.rt("aclrtSetDevice", device))

    def malloc(self, size: int) -> int:
        return self.made("aclrtMalloc", c_size_t(size), 0)

    def free(self, address: int) -> int:
        return self.rt("aclrtFree", pointer(address))

    def stream(self) -> int:
        return self.made("aclrtCreateStream")

    def sync(self, stream: int | None = None) -> int:
        return self.rt("aclrtSynchronizeStream", pointer(stream))

    def copy(self, dst: Any, src: Any, size: int, kind: int) -> int:
        return self.rt("aclrtMemcpy", dst, c_size_t(size), src, c_size_t(size), kind)

    def copy_async(self, dst: Any, src: Any, size: int, kind: int, stream: int | None) -> int:
        count = c_size_t(size)
        return self.rt("aclrtMemcpyAsync", dst, count, src, count, kind, pointer(stream))

    def upload(self, array: Array) -> int:
        data = np.ascontiguousarray(array)
        address = self.malloc(max(data.nbytes, 32))
        if data.nbytes:
            self.ok(self.copy(pointer(address), data.ctypes.data_as(c_void_p), data.nbytes, 1))
        return address

    def download(self, address: int, like: Array) -> Array:
        out = np.empty(like.shape, like.dtype)
        if out.nbytes:
            self.ok(self.copy(out.ctypes.data_as(c_void_p), pointer(address), out.nbytes, 2))
        return out

    def peek(self, address: int, like: Array) -> Array:
        """What is there now, whatever streams still do with it."""
        out = np.empty(like.shape, like.dtype)
        size = c_size_t(out.nbytes)
        found = self.runtime.kvdouble_peek(c_void_p(address), out.ctypes.data_as(c_void_p), size)
        assert found == 0
        return out

    # -- tensors ----------------------------------------------------------------------------------

    def tensor(
        self,
        address: int | None,
        dims: Sequence[int],
        dtype: int,
        *,
        strides: Sequence[int] | None = None,
        offset: int = 0,
        storage: Sequence[int] | None = None,
        form: int = ND,
    ) -> int:
        storage = dims if storage is None else storage
        handle: int | None = self.base.aclCreateTensor(
            (c_int64 * len(dims))(*dims), c_uint64(len(dims)), dtype,
            None if strides is None else (c_int64 * len(strides))(*strides),
            c_int64(offset), form, (c_int64 * len(storage))(*storage), c_uint64(len(storage)),
            pointer(address),
        )  # fmt: skip
        assert handle
        return handle

    def int_array(self, values: Sequence[int]) -> int:
        handle: int | None = self.base.aclCreateIntArray(
            (c_int64 * len(values))(*values), c_uint64(len(values))
        )
        assert handle
        return handle

    def destroy_tensor(self, handle: int) -> int:
        code: int = self.base.aclDestroyTensor(pointer(handle))
        return code

    def phase_one(self, operator: str, *arguments: Any) -> tuple[int, int]:
        library = self.custom if "Selection" in operator else self.opapi
        size, executor = c_uint64(), c_void_p()
        function = getattr(library, f"{operator}GetWorkspaceSize")
        self.ok(function(*arguments, byref(size), byref(executor)))
        assert executor.value is not None
        return size.value, executor.value

    def phase_two(
        self, operator: str, workspace: int | None, size: int, executor: int,
        stream: int | None = None,
    ) -> int:  # fmt: skip
        library = self.custom if "Selection" in operator else self.opapi
        code: int = getattr(library, operator)(
            pointer(workspace), c_uint64(size), pointer(executor), pointer(stream)
        )
        return code

    # -- operators ------------------------------------------------------------------------------

    def run(self, operator: str, arguments: Mapping[str, Any]) -> dict[str, Array]:
        """An operator on host arrays; what every array holds afterwards, by name.

        arguments: those of the public function.  Raises :class:`Refused`.
        """
        call = _Call(self, operator, dict(arguments))
        try:
            return call.run()
        finally:
            call.close()


def _symbol(operator: str) -> str:
    return {
        "scatter_pa_kv_cache": "aclnnScatterPaKvCache",
        "scatter_pa_cache": "aclnnScatterPaCache",
        "gather_pa_kv_cache": "aclnnGatherPaKvCache",
        "gather_selection_kv_cache": "aclnnGatherSelectionKvCache",
    }[operator]


class _Call:
    def __init__(self, double: Double, operator: str, arguments: dict[str, Any]) -> None:
        self.double, self.operator, self.arguments = double, operator, arguments
        self.memory: dict[str, int] = {}
        self.tensors: list[int] = []
        self.int_arrays: list[int] = []

    def element(self, name: str, array: Array) -> str:
        lane = "value_dtype" if name in VALUE_LANE else "dtype" if name in KEY_LANE else ""
        return str(self.arguments.get(lane) or array.dtype.name)

    def give(self, name: str, dims: Sequence[int] | None = None) -> c_void_p:
        """The argument as a tensor; dims: in place of its own."""
        array = self.arguments.get(name)
        if array is None:
            return pointer(None)
        element = self.element(name, array)
        if name not in self.memory:
            self.memory[name] = self.double.upload(array)
        if dims is None:
            dims = list(array.shape)
            if element in FLOAT4:
                dims[-1] *= 2
        handle = self.double.tensor(self.memory[name], dims, DTYPES[element])
        self.tensors.append(handle)
        return pointer(handle)

    def pair(self, name: str) -> c_void_p:
        values = self.arguments.get(name)
        if values is None:
            return pointer(None)
        self.int_arrays.append(self.double.int_array([int(x) for x in values]))
        return pointer(self.int_arrays[-1])

    def text(self, name: str) -> c_char_p:
        value = self.arguments.get(name)
        return c_char_p(None if value is None else value.encode())

    def scatter(self) -> list[Any]:
        a = self.arguments
        dims: dict[str, list[int]] = {}
        if a.get("scatter_mode") == "Nct" and a.get("cache_mode") != "PA_NZ":
            for name in ("key", "value"):
                if a.get(name) is not None and np.ndim(a[name]):
                    dims[name] = [len(a["slot_mapping"]), *a[f"{name}_cache"].shape[2:]]
        if a["key"].ndim == 4:
            dims["compress_lens"] = list(a["slot_mapping"].shape)
            if a.get("compress_seq_offset") is not None:
                dims["compress_seq_offset"] = [a["slot_mapping"].size]
        names = ["key", "key_cache", "slot_mapping"]
        if self.operator == "scatter_pa_kv_cache":
            names += ["value", "value_cache"]
            if all(a.get(n) is None or np.ndim(a[n]) == 0 for n in ("value", "value_cache")):
                for n in ("value", "value_cache"):
                    a[n] = np.zeros((), a["key"].dtype)
                a["value_dtype"] = self.element("key", a["key"])
        names += ["compress_lens", "compress_seq_offset", "seq_lens"]
        given: list[Any] = [self.give(n, dims.get(n)) for n in names]
        given.append(self.text("cache_mode"))
        if self.operator == "scatter_pa_kv_cache":
            given += [self.text("scatter_mode"), self.pair("strides"), self.pair("offsets")]
        return given

    def gather(self) -> list[Any]:
        names = ("key_cache", "value_cache", "block_tables", "seq_lens", "key", "value")
        given: list[Any] = [self.give(n) for n in (*names, "seq_offset")]
        cumulative = bool(self.arguments.get("is_seq_lens_cumsum", False))
        return [*given, self.text("cache_mode"), ctypes.c_bool(cumulative)]

    def selection(self) -> list[Any]:
        names = (
            "selection_k_rope", "selection_kv_cache", "selection_kv_block_table",
            "selection_kv_block_status", "selection_topk_indices", "full_k_rope", "full_kv_cache",
            "full_kv_block_table", "full_kv_actual_seq", "full_q_actual_seq",
        )  # fmt: skip
        a = self.arguments
        for name in ("selection_k_rope", "full_k_rope"):
            if a.get(name) is None or a[name].size == 0:
                a[name] = np.zeros(0, a["selection_kv_cache"].dtype)
        given: list[Any] = [self.give(n) for n in names]
        given.append(c_int64(a.get("selection_topk_block_size", 64)))
        a["returned"] = np.full(len(a["selection_kv_block_table"]), -7, np.int32)
        return [*given, self.give("returned")]

    def run(self) -> dict[str, Array]:
        d, symbol = self.double, _symbol(self.operator)
        make = {"scatter_pa_kv_cache": self.scatter, "scatter_pa_cache": self.scatter}
        make |= {"gather_pa_kv_cache": self.gather, "gather_selection_kv_cache": self.selection}
        given = make[self.operator]()  # kept: it holds the modes' texts
        size, executor = d.phase_one(symbol, *given)
        if size:
            self.memory["a workspace"] = d.malloc(size)
        d.ok(d.phase_two(symbol, self.memory.get("a workspace"), size, executor))
        self.close_tensors()
        d.ok(d.sync())
        names = [n for n in self.memory if n != "a workspace"]
        return {n: d.download(self.memory[n], self.arguments[n]) for n in names}

    def close_tensors(self) -> None:
        for handle in self.tensors:
            assert self.double.destroy_tensor(handle) == 0
        for handle in self.int_arrays:
            assert self.double.base.aclDestroyIntArray(pointer(handle)) == 0
        self.tensors, self.int_arrays = [], []

    def close(self) -> None:
        self.close_tensors()
        self.double.sync()
        for address in self.memory.values():
            assert self.double.free(address) == 0


def sanitizer(name: str) -> Path:
    """The runtime library that a sanitized double needs preloaded."""
    import subprocess

    found = subprocess.run(
        ["cc", f"-print-file-name=lib{name}.so"], capture_output=True, text=True, check=True
    )
    return Path(found.stdout.strip())


__all__ = ["DTYPES", "ND", "Double", "Refused", "c_int32", "pointer", "sanitizer"]
