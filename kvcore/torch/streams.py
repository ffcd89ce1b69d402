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
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from kvcore.errors import ParamInvalidError, StreamError, fail
from kvcore.torch.launches import Done, Later, call_site, is_watched

if TYPE_CHECKING:
    from kvcore.runtime import Device
    from kvcore.runtime import Stream as RuntimeStream
    from kvcore.torch.events import Event, ExternalEvent, Record
    from kvcore.torch.vendor import Call

__all__ = ["Stream", "Streams", "active", "make_namespace", "the_stream"]

_CURRENT: ContextVar[Stream | None] = ContextVar("kvcore_npu_stream", default=None)


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
        #: Held by whoever changes what is kept back for streams.
        self.lock = threading.RLock()
        self.held: set[Stream] = set()

    @property
    def in_use(self) -> bool:
        """Whether calls have to look at streams at all."""
        return self._device is not None

    @property
    def capturing(self) -> bool:
        """Whether calls are recorded into a graph at the moment."""
        return self.in_use and self.current.raw.is_capturing

    @property
    def postponing(self) -> bool:
        """Whether a call made now runs later: captured, or behind an event not recorded yet."""
        return self.in_use and (self.current.raw.is_capturing or self.current.held)

    @property
    def usable(self) -> bool:
        """Whether the device still takes work."""
        return not self.closed and (self._device is None or self._device.is_open)

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

    def check_none_held(self) -> None:
        """Raise when a stream waits for an event that nobody has recorded."""
        for stream in self.held:
            raise StreamError(
                f"stream {stream.raw.name!r}: expected the ExternalEvent it waits for to be "
                "recorded, got none",
                argument="stream",
            )

    def close(self, kind: Any = None, error: Any = None, trace: Any = None) -> None:
        """Leave the device if it was opened here; raises what it has not told anybody yet."""
        self.closed = True
        self._owned.__exit__(kind, error, trace)
        if kind is None and any(stream._kept for stream in self.held):
            self.check_none_held()

    def run(self, call: Call, name: str) -> Any:
        """Run a call on the current stream, or leave it to the stream to run it later."""
        stream = self.current
        raw = stream.raw
        if raw.is_capturing:
            raw.launch(Later(call, name))
            return None
        if stream.held:
            later = Later(call, f"{name} at {call_site()}")
            stream._do(lambda: raw.launch(later))
            return None
        if not raw.idle:
            raw.synchronize_blocking()
        result = call.plan.run()
        if self._watched is None:
            self._watched = is_watched(self.device)
        if self._watched:
            raw.launch(Done(call.plan, f"{name} at {call_site()}"))
        return result


# ---------------------------------------------------------------- streams
class Stream:
    """A stream; ``raw`` is the runtime's.  device and priority are accepted and mean nothing."""

    streams: Streams
    raw: RuntimeStream
    #: What came behind a wait for an event that is not recorded yet; None: nothing holds it.
    _kept: deque[Callable[[], None]] | None

    def __new__(cls, device: Any = None, priority: int = 0, **keywords: Any) -> Stream:
        """A new stream of the installation's device."""
        streams = active()
        _check_device(device)
        return cls._around(streams, streams.device.stream("npu"))

    @classmethod
    def _around(cls, streams: Streams, raw: RuntimeStream) -> Stream:
        made = object.__new__(cls)
        made.streams, made.raw, made._kept = streams, raw, None
        return made

    def wait_stream(self, stream: Stream) -> None:
        """Order what comes here behind what the other stream has."""
        from kvcore.torch.events import Record

        other = the_stream(stream, self.streams)
        if not self.held and not other.held:
            self.raw.wait_stream(other.raw)
            return
        record = Record(self.streams.device.event())
        other._do(lambda: record.make(other.raw))
        self._wait_for(record)

    def wait_event(self, event: Event | ExternalEvent) -> None:
        """Order what comes here behind the event's last record."""
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event (a new one by default) behind what this stream has."""
        from kvcore.torch.events import Event

        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether everything on this stream is done."""
        return not self.held and self.raw.query()

    def synchronize(self) -> None:
        """Wait for this stream; raises what went wrong on it.

        StreamError at once when it waits for an ExternalEvent that is not recorded yet: here
        nobody but the caller would do so.
        """
        if self.held:
            self.streams.check_none_held()
        self.raw.synchronize_blocking()

    # -- behind events that are not recorded yet

    @property
    def held(self) -> bool:
        """Whether it waits for an event that is not recorded yet."""
        return self._kept is not None

    def _do(self, act: Callable[[], None]) -> None:
        """Do it now, or when the stream goes on."""
        with self.streams.lock:
            if self._kept is None:
                act()
            else:
                self._kept.append(act)

    def _wait_for(self, record: Record) -> None:
        with self.streams.lock:
            if self._kept is not None:
                self._kept.append(lambda: self._wait_for(record))
            elif record.made:
                record.raw.wait(self.raw)
            else:
                self._kept = deque()
                self.streams.held.add(self)
                record.waiting.append(self)

    def _go_on(self, record: Record) -> None:
        """The record was made: put on the stream what was kept, up to the next such wait."""
        kept, self._kept = self._kept, None
        self.streams.held.discard(self)
        record.raw.wait(self.raw)
        assert kept is not None
        while kept:
            kept.popleft()()
            if self._kept is not None:
                self._kept.extend(kept)
                return

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.raw is self.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def __repr__(self) -> str:
        return f"<npu.Stream {self.raw.name!r}>"


# ---------------------------------------------------------------- what ns.npu has
def active() -> Streams:
    """The streams of the installation in force; StreamError without one."""
    from kvcore.torch import installation

    found = installation.active()
    if found is None:
        raise StreamError(
            "stream: expected an installed namespace (kvcore.torch.install), got none",
            argument="stream",
        )
    return found.streams


def the_stream(stream: Any, streams: Streams) -> Stream:
    """That stream, checked; the current one for None."""
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
    return active().current


def _default_stream(device: Any = None) -> Stream:
    """The default stream."""
    _check_device(device)
    return active().default


def _set_stream(stream: Stream) -> None:
    """Make a stream the current one of this task or thread; None changes nothing."""
    if stream is not None:
        _CURRENT.set(the_stream(stream, active()))


@contextlib.contextmanager
def _use_stream(stream: Stream | None) -> Iterator[None]:
    """Make a stream the current one inside the block; None changes nothing."""
    if stream is None:
        yield
        return
    found = the_stream(stream, active())
    token = _CURRENT.set(found)
    try:
        with found.streams.device.use(found.raw):
            yield
    finally:
        _CURRENT.reset(token)


def _synchronize(device: Any = None) -> None:
    """Wait for every stream; raises what went wrong on one, and races not told of yet."""
    _check_device(device)
    streams = active()
    streams.check_none_held()
    streams.device.synchronize_blocking()


def _is_current_stream_capturing() -> bool:
    """Whether calls are recorded into a graph at the moment."""
    return active().capturing


def make_namespace(name: str) -> types.ModuleType:
    """The module that goes on a namespace as ``npu``."""
    from kvcore.torch.events import Event, ExternalEvent

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
