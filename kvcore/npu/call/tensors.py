# SPDX-License-Identifier: Apache-2.0
"""aclTensor and aclIntArray handles of one call, each destroyed exactly once.

A tensor copies its dims and strides when made and borrows the memory.  Offset and strides count
elements; a packed 4-bit type counts two to a byte.  The address given is the storage's own, and
the storage's dims are the whole allocation's: CANN checks a view against them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import TracebackType

from kvcore.dtypes import DType
from kvcore.errors import KVCoreError
from kvcore.npu.call.arrays import Argument, dims_of
from kvcore.npu.cann.constants import ACL_FORMAT_ND, ACL_SUCCESS
from kvcore.npu.cann.library import Cann

__all__ = ["TensorHandles"]


class TensorHandles:
    """The handles that a call has made; leaving the block destroys them, last one first."""

    def __init__(self, cann: Cann) -> None:
        self._cann = cann
        self._made: list[tuple[str, int]] = []

    def __enter__(self) -> TensorHandles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        made, self._made = self._made, []
        failed: KVCoreError | None = None
        for destroy, handle in reversed(made):
            code = self._cann.status(destroy)(handle)
            if code != ACL_SUCCESS and failed is None:
                failed = _refused(self._cann, destroy, f"status {code}")
        if failed is not None and error is None:
            raise failed

    def tensor(self, argument: Argument) -> int:
        """The aclTensor of an array on the device."""
        kind, shape, strides, scale = argument.dims or dims_of(argument)
        item = argument.itemsize
        offset = (argument.address - argument.base) // item * scale if argument.size else 0
        storage = [argument.storage_bytes // item * scale]
        return self._tensor(kind, shape, strides, offset, storage, argument.base)

    def scalar(self, kind: DType, address: int) -> int:
        """A 0-dim tensor, which says to a kernel that there is no value."""
        return self._tensor(kind, [], [], 0, [], address)

    def empty(self, kind: DType, address: int) -> int:
        """A tensor of dims {0}, which says to GatherSelectionKvCache that there is no rope."""
        return self._tensor(kind, [0], [1], 0, [0], address)

    def integers(self, values: Sequence[int]) -> int:
        """The aclIntArray of these values."""
        array = (ctypes.c_int64 * len(values))(*values)
        handle = self._cann.aclCreateIntArray(array, len(values))
        if not handle:
            raise _refused(self._cann, "aclCreateIntArray", "NULL")
        self._made.append(("aclDestroyIntArray", handle))
        return int(handle)

    def _tensor(
        self,
        kind: DType,
        shape: Sequence[int],
        strides: Sequence[int],
        offset: int,
        storage: Sequence[int],
        address: int,
    ) -> int:
        dims = (ctypes.c_int64 * len(shape))(*shape) if shape else None
        steps = (ctypes.c_int64 * len(strides))(*strides) if strides else None
        whole = (ctypes.c_int64 * len(storage))(*storage) if storage else None
        handle = self._cann.aclCreateTensor(
            dims,
            len(shape),
            kind.acl,
            steps,
            offset,
            ACL_FORMAT_ND,
            whole,
            len(storage),
            address,
        )
        if not handle:
            raise _refused(self._cann, "aclCreateTensor", "NULL")
        self._made.append(("aclDestroyTensor", handle))
        return int(handle)


def _refused(cann: Cann, function: str, seen: str) -> KVCoreError:
    text = cann.recent_error()
    wanted = "a handle" if seen == "NULL" else "status 0"
    message = f"{function}: expected {wanted}, got {seen}"
    return KVCoreError(f"{message}: {text}" if text else message, seen=seen, expected=wanted)
