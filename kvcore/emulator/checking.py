# SPDX-License-Identifier: Apache-2.0
"""The checks: reports of what the machine's journal shows, and what the host does by itself.

``begin`` starts with the machine: broken rules, frees, order and reads of fresh memory are found by
``_races`` from the journal, and become reports here.  ``watch`` follows when torch_npu has been
imported: every operator that a thread calls passes through a dispatch mode, which says the line of
Python that it comes from, sees what torch's own operators do to pinned memory, and raises with
check="raise".  The functions of ``torch.npu`` that make no operator say their line too.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvcore.emulator import _lines, machine
from kvcore.emulator._races import Races
from kvcore.emulator.environment import STATUS, Settings
from kvcore.emulator.reports import Report, at, collector
from kvcore.runtime.watching._watch import Accessor

__all__ = ["Races", "begin", "races", "settle", "watch"]

Place = tuple[str, int]

#: The reader of the journal, None with check="off".
races: Races | None = None
_tools: frozenset[str] = frozenset()
#: A file for the model clock's trace.
_trace: Path | None = None
#: Whether leakcheck wants to know where tensors are made.
leaking: bool = False

#: What reports say in place of a line for a call that torch_npu makes by itself.
ITSELF = ("torch_npu's own call", 0)

_SYNC = re.compile(
    r"synchronous call during a capture|is being captured|called from a host function"
    r"|pageable memory (on|during) a capture|never recorded"
    r"|queue can never run"
)
_MEMORY = re.compile(
    r"not allocated|leaves? the(ir)? memory|not the start of its memory|memory of another kind"
    r"|not of this interface|still registered|memory used by a captured|is still mapped"
    r"|somebody else wrote to the workspace|workspace is in use"
)


def begin(settings: Settings) -> None:
    """Turn the journal on, as the settings want it; nothing with check="off"."""
    global races, _tools, leaking
    collector.check = settings.check
    checked = settings.check != "off"
    if not checked and settings.clock == "wall":
        return
    loaded = machine.load()
    core = loaded.core
    _tools = frozenset(settings.tools) if checked else frozenset()
    leaking = "leakcheck" in _tools
    start, size, _, _ = loaded.ranges()

    races = Races(
        "racecheck",
        _race,
        _rule if checked else _nothing,
        _freed,
        _unwritten,
        loaded.address("kvdouble_read_journal"),
        loaded.address("kvdouble_task"),
        start,
        start + size,
    )
    races.check_order = bool(_tools & {"racecheck", "memcheck"})
    races.check_memory = "memcheck" in _tools
    races.check_reads = "initcheck" in _tools
    if settings.clock == "model":
        races.timing = _timing(settings, start, start + size)
    _lines.bind(loaded.address("kvdouble_line"))
    core.kvdouble_journal(True)
    if settings.report is not None:
        collector.file = own_file(settings.report)
    atexit.register(_end)
    os.register_at_fork(after_in_child=_in_child)


def _nothing(section: str, text: str, place: Place) -> None:
    """Broken rules with check="off"."""


def _timing(settings: Settings, first: int, end: int) -> Any:
    from kvcore.emulator.timing import Timing
    from kvcore.runtime.profile import DeviceProfile

    global _trace
    if settings.profile is None:
        profile = DeviceProfile.named(settings.soc)
    else:
        profile = DeviceProfile.load(settings.profile)
    _trace = None if settings.trace is None else own_file(settings.trace)
    return Timing(profile, first, end, lambda lane: races.stream_name(lane) if races else "")


def own_file(name: str) -> Path:
    """A file for each process: ``%p`` is its number, which else stands before the suffix."""
    if "%p" in name:
        return Path(name.replace("%p", str(os.getpid()))).absolute()
    path = Path(name).absolute()
    return path.with_name(f"{path.stem}.{os.getpid()}{path.suffix}")


def _in_child() -> None:
    collector.begin()
    global _trace
    collector.file = _trace = None  # of a process that was forked, and not what its parent did
    if races is not None:
        races.begin()


def settle() -> None:
    """Read what the machine has entered so far."""
    if races is not None:
        races.read()
        collector.tasks = races.tasks


def settled() -> list[Report]:
    """What was found once all queued work is done; failed tasks are still to be reported."""
    machine.load().core.kvdouble_drain()
    settle()
    return collector.all()


# -- texts --------------------------------------------------------------------------------


def _race(
    one: Accessor,
    one_writes: bool,
    two: Accessor,
    two_writes: bool,
    argument: str,
    shared: Sequence[tuple[int, int]],
    kind: str,
) -> None:
    if "racecheck" not in _tools:
        return
    if two.number < one.number:
        one, one_writes, two, two_writes = two, two_writes, one, one_writes
    name = "WAW" if one_writes and two_writes else "RAW" if one_writes else "WAR"
    first, second = _line(one), _line(two)
    start, end = shared[0]
    count = sum(e - s for s, e in shared)
    text = (
        f"{name}: {one.name} on {one.stream} {'writes' if one_writes else 'reads'}{at(first)}, and "
        f"{two.name} on {two.stream} {'writes' if two_writes else 'reads'}{at(second)}, with no "
        f"event or wait between them; {count} bytes shared, first [{start:#x}, {end:#x})"
    )
    key = (name, one.name, one.stream, first, two.name, two.stream, second)
    collector.add(
        key,
        Report(kind, two.name, text, (first, second), (one.stream, two.stream), start, end),
    )


def _line(record: Accessor) -> Place:
    return _lines.place(record.site) if record.site else ITSELF


def _freed(
    one: Accessor,
    one_writes: bool,
    two: Accessor,
    two_writes: bool,
    argument: str,
    shared: Sequence[tuple[int, int]],
    kind: str,
) -> None:
    first, second = _line(one), _line(two)
    start, end = shared[0]
    text = (
        f"{two.name}{at(second)} gives memory back that {one.name} on {one.stream} "
        f"{'writes' if one_writes else 'reads'}{at(first)}, and nobody has waited for that; "
        f"first [{start:#x}, {end:#x})"
    )
    collector.add(
        ("freed", one.name, first, two.name, second),
        Report("memcheck", two.name, text, (first, second), (one.stream, two.stream), start, end),
    )


_RULE = re.compile(r"(?P<symbol>\w*): (?P<text>.*?)( \((?P<code>-?\d+)\))?$", re.DOTALL)


def _rule(section: str, text: str, place: Place) -> None:
    parts = _RULE.match(text)
    symbol, words = (parts["symbol"], parts["text"]) if parts else ("", text)
    kind = "rule"
    if _SYNC.search(words):
        kind = "synccheck"
    elif _MEMORY.search(words):
        kind = "memcheck"
    if kind != "rule" and kind not in _tools:
        return
    failed = parts is not None and parts["code"] not in (None, "0")
    where = place if any(place) else ITSELF
    collector.add(
        (kind, symbol, re.sub(r"0x[0-9a-f]+", "", words), where),
        Report(kind, symbol, f"{symbol}: {words}{at(where)}", (where,)),
        raising=not failed,
    )


def _unwritten(name: str, stream: str, place: Place, start: int, end: int) -> None:
    where = place if any(place) else ITSELF
    text = (
        f"{name} on {stream} reads device memory that nothing has written{at(where)}: "
        f"{end - start} bytes, [{start:#x}, {end:#x})"
    )
    collector.add(
        ("init", name, where), Report("initcheck", name, text, (where,), (stream,), start, end)
    )


def remark(kind: str, symbol: str, text: str) -> None:
    """Report something that only Python sees, at this thread's line."""
    if kind in _tools:
        _add(kind, symbol, text, _here(symbol), raising=True)


def _here(symbol: str) -> Place:
    before = _lines.begin(symbol)
    place = _lines.place(_lines.last())
    _lines.end(before)
    return place


def _add(kind: str, symbol: str, text: str, place: Place, *, raising: bool) -> None:
    collector.add(
        (kind, symbol, text, place),
        Report(kind, symbol, text + at(place), (place,)),
        raising=raising,
    )


# -- the end --------------------------------------------------------------------------------


def _end() -> None:
    """At exit, after the machine has done what was queued."""
    for _, place in _unrecorded.values():
        _add("synccheck", _SYNCHRONIZE, _never(_SYNCHRONIZE), place, raising=False)
    if "leakcheck" in _tools:
        _leaks()
    settle()
    collector.write()
    if _trace is not None and races is not None and races.tasks:
        try:
            races.timing.trace.save(_trace)
        except OSError as error:
            print(f"kvcore.emulator: {error}", file=sys.stderr)
    if races is None or collector.check == "off" or (not races.tasks and not collector.all()):
        return
    number = sum(report.count for report in collector.all())
    try:
        with open(os.environ.get(STATUS, ""), "a") as file:
            file.write(f"{number} {races.tasks}\n")
    except OSError:  # not started by `kvcore emulate`, so nobody reads the count
        print(collector.summary(), file=sys.stderr)


def _leaks() -> None:
    npu = sys.modules.get("torch_npu")
    if npu is None or not npu.npu.is_initialized():
        return
    from kvcore.emulator import leaks

    leaks.report(npu)


# -- torch --------------------------------------------------------------------------------


def settle_call(place: Place | None, *, waits: bool = False) -> None:
    """After a call: read the journal, and raise what was found where check="raise" wants it."""
    if races is None:
        return
    waited = races.read()
    if collector.raises:
        collector.raise_found(None if waited or waits else place)


def lined(name: str, function: Callable[..., Any], *, waits: bool = False) -> Callable[..., Any]:
    """A function of torch_npu that says which line its calls come from."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = _lines.begin(name)
        place = _lines.place(_lines.last())
        try:
            result = function(*args, **kwargs)
        finally:
            _lines.end(before)
        settle_call(place, waits=waits)
        return result

    return call


#: Functions of the extension module that torch.npu's call, and whether they wait.
_FUNCTIONS = {
    "_npu_synchronize": True,
    "_npu_emptyCache": False,
    "_npu_setDevice": False,
}
_METHODS = {
    "Stream": {"query": False, "synchronize": True},
    "Event": {"record": False, "wait": False, "query": False, "synchronize": True},
    "ExternalEvent": {"record": False, "wait": False, "reset": False},
}
_GRAPH = {"capture_begin": False, "capture_end": False, "replay": False, "reset": False}


def watch() -> None:
    """Watch torch_npu's calls, in this thread and in threads that start from now on."""
    if races is None:
        return
    import torch_npu  # type: ignore[import-not-found,unused-ignore]
    from torch_npu import _C as extension

    from kvcore.emulator import modes

    for name, waits in _FUNCTIONS.items():
        function = getattr(extension, name, None)
        if function is not None:
            setattr(extension, name, lined(name.removeprefix("_"), function, waits=waits))
    streams = torch_npu.npu.streams
    for class_name, methods in _METHODS.items():
        one = getattr(streams, class_name, None)
        for name, waits in methods.items() if one is not None else ():
            symbol = f"torch.npu.{class_name}.{name}"
            setattr(one, name, lined(symbol, getattr(one, name), waits=waits))
    for name in ("wait", "synchronize"):
        setattr(streams.Event, name, _recorded(name, getattr(streams.Event, name)))
    streams.Event.record = _records(streams.Event.record)
    for name in ("_launch_host_func", "_launch_host_func_pending"):
        function = getattr(extension, name, None)
        if function is not None:
            setattr(extension, name, _launching(name, function))
    graph = torch_npu.npu.graphs.NPUGraph
    for name, waits in _GRAPH.items():
        setattr(graph, name, lined(f"torch.npu.NPUGraph.{name}", getattr(graph, name), waits=waits))
    if races.timing is not None:
        timed = streams.Event.elapsed_time
        streams.Event.elapsed_time = functools.wraps(timed)(_elapsed(timed))
    if collector.check != "off":
        modes.install(races)


def _elapsed(measured: Callable[[Any, Any], float]) -> Callable[[Any, Any], float]:
    """Milliseconds from one event to another, on the model clock."""

    def elapsed_time(self: Any, end_event: Any) -> float:
        found = measured(self, end_event)  # and what the device refuses
        core = machine.load().core
        core.kvdouble_event_mark.restype = ctypes.c_uint64
        assert races is not None
        marks = [
            core.kvdouble_event_mark(ctypes.c_void_p(event.npu_event))
            for event in (self, end_event)
        ]
        races.read()
        times = [races.timing.at(mark) for mark in marks]
        if None in times:  # behind tasks of other streams, which are not done
            core.kvdouble_drain()
            races.read()
            times = [races.timing.at(mark) for mark in marks]
        if None in times:
            return found
        return float(times[1] - times[0]) / 1e3

    return elapsed_time


_SYNCHRONIZE = "torch.npu.Event.synchronize"
#: By identity, events for which the host waited before they were recorded, and where.  A loop that
#: waits for its last round at its head does so once, and waits for nothing then; what is reported
#: is an event that nobody ever records.
_unrecorded: dict[int, tuple[Any, Place]] = {}


def _never(symbol: str) -> str:
    return f"{symbol} waits for an event that was never recorded"


def _recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A wait for an event, which must have been recorded: otherwise it waits for nothing."""

    @functools.wraps(function)
    def call(self: Any, *args: Any) -> Any:
        if not self.npu_event:
            symbol = f"torch.npu.Event.{name}"
            if symbol == _SYNCHRONIZE:
                if "synccheck" in _tools and id(self) not in _unrecorded:
                    _unrecorded[id(self)] = (self, _here(symbol))  # which keeps its identity
            else:
                remark("synccheck", symbol, _never(symbol))
        return function(self, *args)

    return call


def _records(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(self: Any, *args: Any) -> Any:
        _unrecorded.pop(id(self), None)
        return function(self, *args)

    return call


def _launching(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Launch a host function whose operators are watched when it runs."""
    from kvcore.emulator import modes

    def launch(stream: Any, host_function: Callable[..., Any], data: Any) -> Any:
        return function(stream, modes.in_host_function(host_function), data)

    return lined(f"torch.npu.{name}", launch)


def in_new_threads(enter: Callable[[], Any]) -> None:
    """Have every thread that starts from now on begin inside this context."""
    # threading.settrace and setprofile, the public ways into a new thread, slow every call there.
    original = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]  # noqa: SLF001

    @functools.wraps(original)
    def bootstrap(self: threading.Thread) -> None:
        with enter():
            original(self)

    threading.Thread._bootstrap_inner = bootstrap  # type: ignore[attr-defined]  # noqa: SLF001
