# SPDX-License-Identifier: Apache-2.0
"""The stream handles of one device: made as torch_npu makes its own, destroyed once."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

from kvcore.errors import KVCoreError
from kvcore.npu.call import launch as operators
from kvcore.npu.cann import constants
from kvcore.npu.cann.status import bare

__all__ = ["Handles"]


class Handles:
    """aclrtStreams; the device is set on the thread that calls."""

    def __init__(self, cann: Any, device_id: int) -> None:
        self._cann = cann
        self._device_id = device_id
        self._live: set[int] = set()

    def make(self) -> int:
        """A new stream that stops at a failure; StreamError when none is left."""
        cann = self._cann
        with cann.on_device(self._device_id):
            found = ctypes.c_void_p()
            flags = constants.ACL_STREAM_FAST_LAUNCH | constants.ACL_STREAM_FAST_SYNC
            cann.aclrtCreateStreamWithConfig(ctypes.byref(found), 0, flags)
            handle = found.value or 0
            self._live.add(handle)
            if cann.has("aclrtSetStreamFailureMode"):
                # Work queued behind a fault must not run on the bytes that the fault left.
                try:
                    cann.aclrtSetStreamFailureMode(handle, constants.ACL_STOP_ON_FAILURE)
                except BaseException:
                    self.discard(handle)
                    raise
            return handle

    def discard(self, handle: int) -> list[KVCoreError]:
        """Destroy a stream whose work is not needed any more; returns the errors met."""
        cann = self._cann
        if handle not in self._live:
            return []
        self._live.discard(handle)
        errors: list[KVCoreError] = []
        with cann.on_device(self._device_id, giving_back=True):
            if cann.has("aclrtStreamAbort"):
                with contextlib.suppress(KVCoreError):
                    cann.aclrtStreamAbort(handle)
            force = cann.has("aclrtDestroyStreamForce")
            try:
                (cann.aclrtDestroyStreamForce if force else cann.aclrtDestroyStream)(handle)
            except KVCoreError as error:
                errors.append(bare(error))
            self._release(handle, errors)
        return errors

    def _release(self, handle: int, errors: list[KVCoreError]) -> None:
        try:
            operators.release(handle, self._device_id)
        except KVCoreError as error:
            errors.append(bare(error))

    def settle(self) -> list[KVCoreError]:
        """Wait until every stream has done its work; returns the errors met."""
        errors: list[KVCoreError] = []
        for handle in sorted(self._live):
            try:
                self._cann.aclrtSynchronizeStream(handle)
            except KVCoreError as error:
                errors.append(bare(error))
        return errors

    def close(self, *, forced: bool = False) -> list[KVCoreError]:
        """Destroy every stream; forced: give up their work first.  Returns the errors met."""
        errors: list[KVCoreError] = []
        if forced:
            for handle in sorted(self._live):
                errors += self.discard(handle)
        live, self._live = self._live, set()
        for handle in sorted(live):
            self._release(handle, errors)
            try:
                self._cann.aclrtDestroyStream(handle)
            except KVCoreError as error:
                errors.append(bare(error))
        return errors
