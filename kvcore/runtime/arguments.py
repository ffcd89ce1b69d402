# SPDX-License-Identifier: Apache-2.0
"""The memory behind an argument: a buffer's, an array's or a tensor's, and who may touch it."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy.typing as npt

from kvcore._core import adopt
from kvcore.errors import KVCoreError, ParamInvalidError
from kvcore.runtime._storage import BufferCore
from kvcore.runtime.memory import Buffer, live_array

__all__ = ["PAGEABLE", "array_of", "host_memory", "refuse", "space_of"]

#: The space of memory that is no buffer's.
PAGEABLE = "pageable"


def space_of(x: object) -> str:
    """The space of an argument: a buffer's own, "pageable" for anything else."""
    return x.storage.space if isinstance(x, BufferCore) else PAGEABLE


def array_of(x: object, argument: str, key: object) -> npt.NDArray[Any]:
    """The numpy array that shares the argument's memory; never a copy.

    key: of the device whose memory a buffer must be.
    """
    if isinstance(x, Buffer):
        if x.storage.owner is not key:
            raise ParamInvalidError(
                f"{argument}: expected memory of the stream's own device, got another device's",
                argument=argument,
            )
        return live_array(x)
    try:
        found = adopt.as_numpy(x, argument)
    except KVCoreError as error:
        if error.expected != "an array":
            raise
        raise ParamInvalidError(
            f"{argument}: expected a buffer or an array, got {type(x).__name__}",
            argument=argument,
            seen=type(x).__name__,
            expected="a buffer or an array",
        ) from None
    if found.dtype.hasobject:
        raise ParamInvalidError(
            f"{argument}: expected elements of fixed bytes, got dtype object",
            argument=argument,
            seen=str(found.dtype),
        )
    return found


def refuse(key: object, argument: str, owner: object) -> None:
    """Raise for an argument that a kernel of the device with this key must not touch."""
    if isinstance(owner, Buffer):
        if owner.storage.freed:
            seen, expected = "a buffer that was freed", "live memory"
        elif owner.storage.owner is not key:
            seen, expected = "another device's", "memory of the stream's own device"
        else:
            seen = "pinned host memory"
            expected = "device or swapped memory for a kernel (copies may use pinned memory)"
    else:
        seen = f"{type(owner).__name__} in pageable host memory"
        expected = "device or swapped memory for a kernel on a modelled device"
    raise ParamInvalidError(
        f"{argument}: expected {expected}, got {seen}",
        argument=argument,
        seen=seen,
        expected=expected,
    )


def host_memory(owner: object) -> npt.NDArray[Any] | None:
    """What the host may change behind the back of a device: arrays, tensors, buffers of host and
    swapped memory.  None of device memory, of a buffer that was freed, and of other objects."""
    if isinstance(owner, Buffer):
        live = owner.space != "device" and not owner.freed
        return owner.__kvcore_array__ if live else None
    with contextlib.suppress(KVCoreError):
        return adopt.as_numpy(owner, "source")
    return None
