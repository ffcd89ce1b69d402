# SPDX-License-Identifier: Apache-2.0
"""``ns.npu``: streams and events in torch_npu's words, over the runtime's.

What this stand-in promises.  An operator called through an installed namespace has done its work
when it returns, like every other operator of torch on a CPU: running each call at the place where
the program makes it is one of the orders that streams and events allow.  The streams are real
ones of a ``kvcore.Device`` all the same: work put on them by hand is waited for, a captured
stream records calls instead of running them, and a device with a race check, a trace or the model
clock learns of each call, on which stream it was and what it touched.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvcore.errors import ParamInvalidError, StreamError, fail
from kvcore.torch.launches import Done, Later, call_site, is_watched

if TYPE_CHECKING:
    from kvcore.runtime import Device
    from kvcore.runtime import Stream as RuntimeStream
    from kvcore.torch.calls import Call
    from kvcore.torch.events import Event, ExternalEvent

__all__ = ["Stream", "Streams", "active", "make_namespace", "the_stream"]

#: A host waits no longer for streams that wait for an external event which nobody has recorded.
WAIT_LIMIT_S = 30.0
LOOK_EVERY_S = 0.002


class Streams:
    """The device under one installation's ``ns.npu``.

    device: one that the caller has opened, or None to open one when it is first needed.
    """

    def __init__(self, device: Device | None) -> None:
        self._device = device
        self._owned = contextlib.ExitStack()
        #: A stream was made the current one for good, by ``set_stream``.
        self.was_set = False
        self._known: dict[RuntimeStream, Stream] = {}
        if device is not None:
            _pass_over_torch()
        self._watched: bool | None = None
        self.closed: bool = False

    @property
    def in_use(self) -> bool:
        """Whether calls have to look at streams at all."""
        return self._device is not None

    @property
    def capturing(self) -> bool:
        """Whether calls are recorded into a graph at the moment."""
        return self.in_use and self._raw.is_capturing

    @property
    def postponing(self) -> bool:
        """Whether a call made now runs later: captured, or behind an event not recorded yet."""
        if not self.in_use:
            return False
        raw = self._raw
        return raw.is_capturing or (not raw.idle and self.device.awaits_external)

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

            _pass_over_torch()
            self._device = self._owned.enter_context(Device())
        return self._device

    @property
    def default(self) -> Stream:
        """The default stream."""
        return self.of(self.device.default_stream)

    @property
    def _raw(self) -> RuntimeStream:
        """The runtime's current stream: what is current is kept there alone."""
        return self.device.current_stream()

    @property
    def current(self) -> Stream:
        """The stream in use in this task or thread, by ``ns.npu`` or by the device itself."""
        return self.of(self._raw)

    def of(self, raw: RuntimeStream) -> Stream:
        """``ns.npu``'s object for a stream of the runtime, the same one each time."""
        found = self._known.get(raw)
        return self.made_of(raw, Stream) if found is None else found

    def made_of(self, raw: RuntimeStream, kind: type[Stream]) -> Stream:
        """A new object of that class for a stream of the runtime, or the one that it has."""
        made = object.__new__(kind)
        made.streams, made.raw = self, raw
        return self._known.setdefault(raw, made)

    def close(self, kind: Any = None, error: Any = None, trace: Any = None) -> None:
        """Leave the device if it was opened here; raises what it has not reported yet."""
        self.closed = True
        if self.was_set and self._device is not None:
            from kvcore.runtime.current import forget_streams

            forget_streams(self._device)
        self._owned.__exit__(kind, error, trace)

    def settle(self) -> None:
        """Wait for all that can end, so that what comes is ordered behind it; raises races."""
        if self._device is None or self.closed:
            return
        if self._device.awaits_external:
            self._device.driver.core.raise_races()
        else:
            self._device.synchronize_blocking()

    def await_current(self) -> None:
        """Wait for what the current stream has, so that a call made now comes behind it."""
        raw = self._raw
        if not raw.idle:
            raw.synchronize_blocking()

    def show(self, call: Call, name: str) -> None:
        """Let those who watch the device see a call that has just run at its place."""
        if self._watched is None:
            self._watched = is_watched(self.device)
        if self._watched:
            self._raw.launch(Done(call, f"{name} at {call_site()}"))

    def postpone(self, call: Call, name: str, names: Mapping[str, str]) -> None:
        """Leave a call to the current stream, or to the graph that is captured on it.

        names: the operator's names of the core's arguments, for errors.
        """
        self._raw.launch(Later(call, f"{name} at {call_site()}", names))

    def be_patient(self, done: Callable[[], bool]) -> None:
        """Before a host waits: see that it can end, as far as external events matter."""
        waited = 0.0
        while self.device.awaits_external and not done():
            if waited >= WAIT_LIMIT_S:
                raise StreamError(
                    "event: expected an ExternalEvent that streams wait for to be recorded before "
                    f"the host waits for these, got no record in {WAIT_LIMIT_S:.0f} s",
                    argument="event",
                )
            time.sleep(LOOK_EVERY_S)
            waited += LOOK_EVERY_S


# ---------------------------------------------------------------- streams
class Stream:
    """A stream; ``raw`` is the runtime's.  device and priority are accepted and mean nothing."""

    streams: Streams
    raw: RuntimeStream

    def __new__(cls, device: Any = None, priority: int = 0, **keywords: Any) -> Stream:
        """A new stream of the installation's device."""
        streams = active()
        _check_device(device)
        return streams.made_of(streams.device.stream("npu"), cls)

    def wait_stream(self, stream: Stream) -> None:
        """Order what comes here behind what the other stream has."""
        self.raw.wait_stream(the_stream(stream, self.streams).raw)

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
        return self.raw.query()

    def synchronize(self) -> None:
        """Wait for this stream; raises what went wrong on it."""
        self.streams.be_patient(lambda: self.raw.idle)
        self.raw.synchronize_blocking()

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


def _pass_over_torch() -> None:
    """Let reports of races name the program's lines, not those of torch on the way from there."""
    from kvcore.runtime.watching._observe import pass_over

    torch = sys.modules.get("torch")
    if torch is not None and torch.__file__:
        pass_over(os.path.dirname(torch.__file__))


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
    """Make a stream the current one of this task or thread; None changes nothing.

    The device has it from then on: ``kvcore.current_stream`` and ``device.current_stream`` too.
    """
    if stream is not None:
        from kvcore.runtime.current import set_current_stream

        streams = active()
        set_current_stream(the_stream(stream, streams).raw)
        streams.was_set = True


@contextlib.contextmanager
def _use_stream(stream: Stream | None) -> Iterator[None]:
    """Make a stream the current one inside the block; None changes nothing."""
    if stream is None:
        yield
        return
    found = the_stream(stream, active())
    with found.streams.device.use(found.raw):
        yield


def _synchronize(device: Any = None) -> None:
    """Wait for every stream; raises what went wrong on one, and races not reported yet."""
    _check_device(device)
    streams = active()
    device = streams.device
    streams.be_patient(lambda: all(stream.idle for stream in device.streams))
    device.synchronize_blocking()


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
