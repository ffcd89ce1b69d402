# SPDX-License-Identifier: Apache-2.0
"""Random numbers: the device's generator decides, a generator of the host makes them.

They are repeatable (the same seed gives the same numbers) and not those of the hardware.

In a capture the generator counts from the graph's own beginning, and each replay moves it on by
what the graph draws: that is torch_npu's own doing.  Which numbers a replay draws is known when it
is launched: a task before it gives the host's generators of that graph their seeds.
"""

from __future__ import annotations

import functools
import threading
from array import array
from typing import Any, NamedTuple

import torch
import torch_npu  # type: ignore[import-not-found,unused-ignore]
from torch_npu._C import (  # type: ignore[import-not-found,unused-ignore]
    _npu_getCurrentRawStream,
    _npu_isCurrentStreamCapturing,
)

from kvcore.emulator import _tasks

__all__ = ["continued", "install"]

#: How far a call moves the device's generator on; its offsets are multiples of four.
_STEP = 4

#: Of an instance of torch_npu's class: what its graph has drawn.
_DRAWN = "_kvcore_drawn"


class _Drawn(NamedTuple):
    """A call in a graph: whose numbers, from where on in the graph, and who makes them."""

    own: Any
    offset: int
    made: Any


#: The captures under way, by the thread that began each; newest last.
_under_way: dict[int, list[_Drawn]] = {}


def _mixed(seed: int, offset: int) -> int:
    return (seed * 0x9E3779B97F4A7C15 + offset) & ((1 << 64) - 1)


def continued(generator: Any, device: int) -> Any:
    """A host generator for one call, from where the device's stands; that one moves on.

    generator: the caller's, None for the device's default.
    """
    own = generator
    if own is None:
        if not torch_npu.npu.is_initialized():
            torch_npu.npu.init()
        own = torch_npu.npu.default_generators[device]
    if own.device.type == "cpu":
        return own
    made = torch.Generator()
    if _npu_isCurrentStreamCapturing():
        return _captured(own, made)
    seed, offset = own.initial_seed(), own.get_offset()
    own.set_offset(offset + _STEP)
    made.manual_seed(_mixed(seed, offset))
    return made


def _captured(own: Any, made: Any) -> Any:
    """Within a capture, where the generator's state says how much the graph has drawn."""
    drawn = _under_way.get(threading.get_ident())
    if drawn is None:
        if not _under_way:
            raise RuntimeError(
                "random operators are captured by torch.npu.NPUGraph alone: this capture began "
                "elsewhere"
            )
        drawn = next(reversed(_under_way.values()))
    state = own.get_state()
    numbers = state.view(torch.int64)
    drawn.append(_Drawn(own, int(numbers[1]), made))
    numbers[1] += _STEP
    own.set_state(state)
    return made


def _seed(drawn: list[_Drawn]) -> None:
    """Before a replay, in stream order: its generators continue from where the device's stand."""
    stands = {id(one.own): (one.own.initial_seed(), one.own.get_offset()) for one in drawn}
    seeds = []
    for one in drawn:
        seed, offset = stands[id(one.own)]
        seeds.append((one.made, _mixed(seed, offset + one.offset)))

    def task() -> None:
        for made, number in seeds:
            made.manual_seed(number)

    stream = _npu_getCurrentRawStream(torch_npu.npu.current_device())
    _tasks.queue(stream, _tasks.Name("seeds of a replay"), task, array("Q"))


def install() -> None:
    """Have torch_npu's graphs draw numbers; torch_npu is imported."""
    graph = torch_npu.npu.graphs.NPUGraph
    begin, end, replay = graph.capture_begin, graph.capture_end, graph.replay

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = begin(self, *args, **kwargs)
        drawn: list[_Drawn] = []
        setattr(self, _DRAWN, drawn)
        _under_way.pop(threading.get_ident(), None)
        _under_way[threading.get_ident()] = drawn
        return result

    @functools.wraps(end)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = getattr(self, _DRAWN, None)
        for thread, drawn in list(_under_way.items()):
            if drawn is own:
                del _under_way[thread]
        return end(self, *args, **kwargs)

    @functools.wraps(replay)
    def replayed(self: Any, *args: Any, **kwargs: Any) -> Any:
        drawn = getattr(self, _DRAWN, None)
        if drawn:
            _seed(drawn)
        return replay(self, *args, **kwargs)

    graph.capture_begin, graph.capture_end, graph.replay = capture_begin, capture_end, replayed
