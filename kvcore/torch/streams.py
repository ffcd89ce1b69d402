# SPDX-License-Identifier: Apache-2.0
"""``ns.npu``: streams and events in torch_npu's words, over the runtime's.

What this stand-in promises.  An operator called through an installed namespace has done its work
when it returns, like every other operator of torch on a CPU: running each call at the place where
the program makes it is one of the orders that streams and events allow.  The streams are real
ones of a ``kvcore.Device`` all the same: work put on them by hand is waited for, a captured
stream records calls instead of running them, and a device with a race check, a trace or the model
clock is told of each call, on which stream it was and what it touched.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from kvcore.errors import ParamInvalidError, StreamError, fail

if TYPE_CHECKING:
    from kvcore.runtime import Device
    from kvcore.runtime import Event as RuntimeEvent
    from kvcore.runtime import Stream as RuntimeStream
    from kvcore.torch.vendor import Call

__all__ = ["Event", "ExternalEvent", "Stream", "Streams", "make_namespace"]

_CURRENT: ContextVar[Stream | None] = ContextVar("kvcore_npu_stream", default=None)
#: Packages whose frames are not the caller's program.
_OURS = ("kvcore", "torch")


class Streams:
    """The device under one installation's ``ns.npu``.

    device: one that the caller has opened, or None to open one when it is first needed.
    """

    def __init__(self, device: Device | None) -> None:
        self._device = device
        self._owned = contextlib.ExitStack()
        self._default: Stream | None = None
        self._watched: bool | None = None
        self.closed = False

    @property
    def in_use(self) -> bool:
        """Whether calls have to look at streams at all."""
        return self._device is not None

    @property
    def capturing(self) -> bool:
        """Whether calls are recorded into a graph at the moment."""
        return self.in_use and self.current.raw.is_capturing

    @property
    def device(self) -> Device:
        """The device; opened when there is none yet."""
        if self.closed:
            raise StreamError(
                "stream: expected ns.npu of an installation, got one that was uninstalled",
                argument="stream",
            )
        if self._device is None:
            from kvcore.runtime import Device

            self._device = self._owned.enter_context(Device())
        return self._device

    @property
    def default(self) -> Stream:
        """The default stream."""
        if self._default is None:
            self._default = Stream._around(self, self.device.default_stream)
        return self._default

    @property
    def current(self) -> Stream:
        """The stream in use in this task or thread."""
        found = _CURRENT.get()
        return found if found is not None and found.streams is self else self.default

    def close(self, kind: Any = None, error: Any = None, trace: Any = None) -> None:
        """Leave the device if it was opened here; raises what it has not told anybody yet."""
        self.closed = True
        self._owned.__exit__(kind, error, trace)

    def run(self, call: Call, name: str) -> Any:
        """Run a call on the current stream, or let a captured one record it."""
        stream = self.current
        stream._check_held()
        raw = stream.raw
        if raw.is_capturing:
            raw.launch(_Captured(call, name))
            return None
        if not raw.idle:
            raw.synchronize_blocking()
        result = call.plan.run()
        if self._watched is None:
            self._watched = _is_watched(self.device)
        if self._watched:
            raw.launch(_Done(call.plan, f"{name} at {_place()}"))
        return result


def _is_watched(device: Device) -> bool:
    """Whether anything on the device wants to know what was touched."""
    if device.race_check != "off" or device.clock == "model":
        return True
    try:
        return device.trace is not None
    except ParamInvalidError:
        return False


class _Done:
    """Work that was done already, for those who watch a device.

    No ``reads`` and ``writes``: a modelled device would refuse memory that is not its own.
    """

    def __init__(self, plan: Any, name: str) -> None:
        self.name = name
        self.bytes_moved = plan.bytes_moved
        self.num_descriptors = plan.num_descriptors
        self._touched = plan.touched()

    def run(self) -> None:
        """Nothing is left to do."""

    def touched(self) -> Any:
        """What the call touched."""
        return self._touched


class _Captured:
    """A call recorded into a graph: each replay reads its arguments anew."""

    def __init__(self, call: Call, name: str) -> None:
        self.call = call
        self.name = name
        self.touched = call.plan.touched

    @property
    def bytes_moved(self) -> int:
        return self.call.plan.bytes_moved

    @property
    def num_descriptors(self) -> int:
        return self.call.plan.num_descriptors

    def run(self) -> None:
        deliver(self.call, self.call.plan.run())


def deliver(call: Call, result: Any) -> Any:
    """Put what a plan returned where the call's caller has it; what the operator returns."""
    if call.into is not None and result is not None:
        import torch

        call.into.copy_(torch.from_numpy(result))
    return call.returned


def _place() -> str:
    """File and line of the caller's program."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _OURS:
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


# ---------------------------------------------------------------- streams
class Stream:
    """A stream; ``raw`` is the runtime's.  device and priority are accepted and mean nothing."""

    streams: Streams
    raw: RuntimeStream
    held_by: ExternalEvent | None = None

    def __new__(cls, device: Any = None, priority: int = 0, **keywords: Any) -> Stream:
        """A new stream of the installation's device."""
        streams = _active()
        _check_device(device)
        return cls._around(streams, streams.device.stream("npu"))

    @classmethod
    def _around(cls, streams: Streams, raw: RuntimeStream) -> Stream:
        made = object.__new__(cls)
        made.streams, made.raw = streams, raw
        return made

    def wait_stream(self, stream: Stream) -> None:
        """Order what comes here behind what the other stream has."""
        other = _stream(stream, self.streams)
        other._check_held()
        self.raw.wait_stream(other.raw)

    def wait_event(self, event: Event | ExternalEvent) -> None:
        """Order what comes here behind the event's last record."""
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event (a new one by default) behind what this stream has."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether everything on this stream is done."""
        return self.held_by is None and self.raw.query()

    def synchronize(self) -> None:
        """Wait for this stream; raises what went wrong on it."""
        self._check_held()
        self.raw.synchronize_blocking()

    def _check_held(self) -> None:
        if self.held_by is not None:
            raise StreamError(
                f"stream {self.raw.name!r}: expected the ExternalEvent it waits for to be "
                "recorded, got more work first; here a call is done when it returns, so record "
                "the event before what waits for it",
                argument="stream",
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.raw is self.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def __repr__(self) -> str:
        return f"<npu.Stream {self.raw.name!r}>"


class Event:
    """An event; blocking and interprocess are accepted and mean nothing."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self.streams = _active()
        self.raw: RuntimeEvent = self.streams.device.event(
            blocking=bool(blocking), enable_timing=bool(enable_timing)
        )

    def record(self, stream: Stream | None = None) -> None:
        """Record behind what the stream (the current one by default) has."""
        found = _stream(stream, self.streams)
        found._check_held()
        self.raw.record(found.raw)

    def wait(self, stream: Stream | None = None) -> None:
        """Order what comes on the stream (the current one by default) behind the last record."""
        self.raw.wait(_stream(stream, self.streams).raw)

    def query(self) -> bool:
        """Whether the last record was reached."""
        return self.raw.query()

    def synchronize(self) -> None:
        """Wait for the last record."""
        self.raw.synchronize_blocking()

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds to another event."""
        return self.raw.elapsed_time(getattr(end_event, "raw", end_event))

    def __repr__(self) -> str:
        return f"<npu.Event {self.raw!r}>"


class ExternalEvent:
    """An event for graphs, which others record: ``wait`` may come before ``record``.

    A stream that waits for it takes no more work until it is recorded.  In a capture, wait and
    reset become part of the graph: a replay whose wait is reached before the event was recorded
    fails, since here nobody could record it meanwhile.
    """

    def __init__(self) -> None:
        self.streams = _active()
        self._raw: RuntimeEvent | None = None
        self._set = False
        self._held: list[Stream] = []
        self._reset_once_reached = False

    def record(self, stream: Stream | None = None) -> None:
        """Record behind what the stream (the current one by default) has."""
        found = _stream(stream, self.streams)
        found._check_held()
        self._raw = self.streams.device.event()
        self._raw.record(found.raw)
        if not found.raw.idle:
            found.raw.synchronize_blocking()
        self._set = True
        for held in self._held:
            held.held_by = None
            self._raw.wait(held.raw)
        self._held.clear()
        if self._reset_once_reached:
            self._reset_once_reached = self._set = False

    def wait(self, stream: Stream | None = None) -> None:
        """Hold the stream (the current one by default) until the event is recorded."""
        found = _stream(stream, self.streams)
        found._check_held()
        if found.raw.is_capturing:
            found.raw.call(self._reach)
        elif self._set and self._raw is not None:
            self._raw.wait(found.raw)
        else:
            found.held_by = self
            self._held.append(found)

    def reset(self, stream: Stream | None = None) -> None:
        """Take the record back: whoever waits from here on waits for the next one."""
        found = _stream(stream, self.streams)
        if found.raw.is_capturing:
            found.raw.call(self._clear)
        elif found.held_by is self:
            self._reset_once_reached = True
        else:
            self._clear()

    def _reach(self) -> None:
        if not self._set:
            raise StreamError(
                "event: expected an ExternalEvent that was recorded before the graph was "
                "replayed, got one that is not",
                argument="event",
            )

    def _clear(self) -> None:
        self._set = False


# ---------------------------------------------------------------- what ns.npu has
def _active() -> Streams:
    from kvcore.torch import installation

    found = installation.active()
    if found is None:
        raise StreamError(
            "stream: expected an installed namespace (kvcore.torch.install), got none",
            argument="stream",
        )
    return found.streams


def _stream(stream: Any, streams: Streams) -> Stream:
    if stream is None:
        return streams.current
    if not isinstance(stream, Stream):
        fail("stream", "an npu.Stream", type(stream).__name__)
    if stream.streams is not streams:
        fail("stream", "a stream of this installation", "one of another")
    return stream


def _check_device(device: Any) -> None:
    """There is one device: None, 0, "npu", "npu:0", "cpu" and their torch.device name it."""
    text = str(device)
    if device is not None and text not in ("0", "npu", "npu:0", "cpu", "cpu:0"):
        raise ParamInvalidError(
            f"device: expected the one there is (None, 0, 'npu', 'npu:0' or 'cpu'), got {text!r}",
            argument="device",
            seen=text,
        )


def _current_stream(device: Any = None) -> Stream:
    """The stream in use in this task or thread, or the default stream."""
    _check_device(device)
    return _active().current


def _default_stream(device: Any = None) -> Stream:
    """The default stream."""
    _check_device(device)
    return _active().default


def _set_stream(stream: Stream) -> None:
    """Make a stream the current one of this task or thread; None changes nothing."""
    if stream is not None:
        _CURRENT.set(_stream(stream, _active()))


@contextlib.contextmanager
def _use_stream(stream: Stream | None) -> Iterator[None]:
    """Make a stream the current one inside the block; None changes nothing."""
    if stream is None:
        yield
        return
    found = _stream(stream, _active())
    token = _CURRENT.set(found)
    try:
        with found.streams.device.use(found.raw):
            yield
    finally:
        _CURRENT.reset(token)


def _synchronize(device: Any = None) -> None:
    """Wait for every stream; raises what went wrong on one, and races not told of yet."""
    _check_device(device)
    _active().device.synchronize_blocking()


def _is_current_stream_capturing() -> bool:
    """Whether calls are recorded into a graph at the moment."""
    return _active().capturing


def make_namespace(name: str) -> types.ModuleType:
    """The module that goes on a namespace as ``npu``."""
    module = types.ModuleType(name, "Streams and events of kvcore.runtime, in torch_npu's words.")
    members = {
        "Stream": Stream,
        "Event": Event,
        "ExternalEvent": ExternalEvent,
        "stream": _use_stream,
        "current_stream": _current_stream,
        "default_stream": _default_stream,
        "set_stream": _set_stream,
        "synchronize": _synchronize,
        "is_current_stream_capturing": _is_current_stream_capturing,
    }
    for member, value in members.items():
        setattr(module, member, value)
    return module
