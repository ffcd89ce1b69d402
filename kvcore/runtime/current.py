# SPDX-License-Identifier: Apache-2.0
"""Which stream is the current one: of a task, and of a device in that task."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Protocol

from kvcore.errors import ParamInvalidError, StreamError
from kvcore.runtime.stream import Stream

__all__ = ["current_stream", "forget_streams", "set_current_stream", "use_stream"]

#: The streams in use in this task, innermost last.  A context variable: a task that sets it
#: changes no other task's, and a task group's children start with their parent's.
_CURRENT: ContextVar[tuple[Stream, ...]] = ContextVar("kvcore_current_stream", default=())


@contextlib.contextmanager
def use_stream(stream: Stream) -> Iterator[Stream]:
    """Make a stream the current one in this task, inside the block."""
    if not isinstance(stream, Stream):
        raise ParamInvalidError(
            f"stream: expected a Stream, got {type(stream).__name__}",
            argument="stream",
            seen=type(stream).__name__,
        )
    before = _CURRENT.get()
    _CURRENT.set((*before, stream))
    try:
        yield stream
    finally:
        _CURRENT.set(before)


class _HasStreams(Protocol):
    """What a device has for ``current_stream``."""

    @property
    def default_stream(self) -> Stream:
        """The stream used where none is named."""


def current_stream(device: _HasStreams | None = None) -> Stream:
    """The stream in use in this task.

    With a device: the innermost of that device, or its default stream.  Without: the innermost
    of any; StreamError when this task uses none.
    """
    streams = _CURRENT.get()
    if device is None:
        if streams:
            streams[-1].queue.executor.check_process()
            return streams[-1]
        raise StreamError(
            "stream: expected a stream in use, got none; "
            "use `with device.use(stream):` or name the device",
            argument="stream",
        )
    default = getattr(type(device), "default_stream", None)
    if default is None:
        raise ParamInvalidError(
            f"device: expected a Device or None, got {type(device).__name__}",
            argument="device",
            seen=type(device).__name__,
        )
    for stream in reversed(streams):
        if stream.device is device:
            stream.queue.executor.check_process()
            return stream
    return device.default_stream


def set_current_stream(stream: Stream) -> None:
    """Make a stream the current one of its device in this task, until another is.

    The end of a surrounding ``use_stream`` block gives back what was current before that block.
    """
    stream.queue.executor.check_process()
    forget_streams(stream.device)
    _CURRENT.set((*_CURRENT.get(), stream))


def forget_streams(device: Any) -> None:
    """No stream of this device is the current one in this task any more."""
    _CURRENT.set(tuple(stream for stream in _CURRENT.get() if stream.device is not device))
