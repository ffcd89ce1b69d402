# SPDX-License-Identifier: Apache-2.0
"""What rows of buffers hold, if all goes well and if not, and who is ordered behind whom.

A row is filled with one value always, so its state is a set of values.  ``sure`` is what it holds
if everything launched so far is done; ``maybe`` is what it may hold if any of that is not.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from double.direct import Double

import kvcore

ROWS = 4
SHAPE = (ROWS, 2, 16)

Values = frozenset[float]


class Spot:
    """A buffer, or a plain array."""

    def __init__(self, target: Any) -> None:
        self.target = target
        in_sight = not isinstance(target, kvcore.Buffer) or target.space != "device"
        self.array = np.asarray(target) if in_sight else None
        self.sure: list[Values] = [frozenset({0.0})] * ROWS
        self.maybe: list[Values] = [frozenset({0.0})] * ROWS
        self.writer: list[Lane | None] = [None] * ROWS
        self.used: dict[Lane, int] = {}

    def rows(self, double: Double) -> np.ndarray[Any, Any]:
        """What is there now."""
        if self.array is not None:
            return self.array
        found = np.zeros(SHAPE, np.float16)
        address = ctypes.c_void_p(self.target.address)
        there = ctypes.c_void_p(found.ctypes.data)
        assert double.runtime.kvdouble_peek(address, there, ctypes.c_size_t(found.nbytes)) == 0
        return found


@dataclass
class Op:
    """Rows of dst get a value, or those of a source."""

    dst: Spot
    rows: Sequence[int]
    src: Spot | float
    source_rows: Sequence[int] = ()

    @property
    def spots(self) -> Iterable[Spot]:
        """All that it touches."""
        return (self.dst, self.src) if isinstance(self.src, Spot) else (self.dst,)


class Call:
    """A host function: fills an array, and remembers that it ran."""

    def __init__(self, lane: Lane, number: int, array: Any, value: float) -> None:
        self.lane, self.number, self.array, self.value = lane, number, array, value
        self.over = False

    def __call__(self) -> None:
        assert not self.over, "a host function ran after its stream told of a failure"
        self.lane.ran.append(self.number)
        self.array[...] = self.value


class Lane:
    """A stream, and what was launched there since it was last waited for."""

    _numbers = itertools.count()

    def __init__(self, stream: kvcore.Stream) -> None:
        self.stream = stream
        self.launched = self.done = 0
        self.known: dict[Lane, int] = {}
        self.log: set[tuple[Spot, int]] = set()
        self.calls: list[Call] = []
        self.ran: list[int] = []
        self.must_fail = False

    def new_call(self, array: Any, value: float) -> Call:
        return Call(self, next(self._numbers), array, value)

    def knows(self, seen: dict[Lane, int]) -> None:
        """What is launched here from now on comes after those."""
        for lane, number in seen.items():
            self.known[lane] = max(number, self.known.get(lane, 0))


class World:
    """The rules."""

    def __init__(self, double: Double) -> None:
        self.double = double
        self.checked = 0

    def seen_from(self, lane: Lane) -> dict[Lane, int]:
        """What has happened when the lane has come as far as now."""
        return {**lane.known, lane: lane.launched}

    def join(self, lane: Lane, other: Lane, draw: random.Random) -> None:
        """The lane waits for the other."""
        if draw.random() < 0.5:
            lane.stream.wait_stream(other.stream)
        else:
            lane.stream.wait_event(other.stream.record_event())
        lane.must_fail |= other.must_fail
        lane.knows(self.seen_from(other))

    def order(self, lane: Lane, ops: list[Op], draw: random.Random) -> None:
        """Let the lane wait for whoever uses what these use."""
        for spot in {spot for op in ops for spot in op.spots}:
            for other, number in spot.used.items():
                if other is not lane and number > max(other.done, lane.known.get(other, 0)):
                    self.join(lane, other, draw)

    def launched(self, lane: Lane, op: Op) -> None:
        """The operation is on the lane."""
        lane.launched += 1
        for spot in op.spots:
            spot.used[lane] = lane.launched
        dst, src = op.dst, op.src
        if isinstance(src, Spot):
            sure = [src.sure[row] for row in op.source_rows]
            maybe = [src.maybe[row] for row in op.source_rows]
        else:
            sure = maybe = [frozenset({float(src)})] * len(op.rows)
        for row, one, many in zip(op.rows, sure, maybe, strict=True):
            dst.sure[row] = one
            dst.maybe[row] |= many
            dst.writer[row] = lane
            lane.log.add((dst, row))

    def passed(self, lane: Lane) -> None:
        """The host has waited, and all was well."""
        assert not lane.must_fail, "a failure was not told"
        expected = [call.number for call in lane.calls]
        assert lane.ran == expected, f"ran {lane.ran}, launched {expected}"
        for spot, row in lane.log:
            if spot.writer[row] is lane:
                spot.maybe[row] = spot.sure[row]
        self._over(lane)

    def failed(self, lane: Lane) -> None:
        """The host has waited, and was told of a failure."""
        lane.must_fail = False
        lane.known.clear()  # what it waited for may be what failed: it must ask again
        for call in lane.calls:
            call.over = True
        numbers = iter([call.number for call in lane.calls])
        assert all(number in numbers for number in lane.ran), f"ran out of order: {lane.ran}"
        for spot, row in lane.log:
            if spot.writer[row] is lane:
                spot.sure[row] = spot.maybe[row]
        self._over(lane)

    def _over(self, lane: Lane) -> None:
        lane.done = lane.launched
        lane.calls.clear()
        lane.ran.clear()
        found = {spot: spot.rows(self.double) for spot, _ in lane.log}
        for spot, row in lane.log:
            if spot.writer[row] is lane:
                self.checked += 1
                seen, wanted = set(found[spot][row].ravel().tolist()), spot.sure[row]
                assert seen <= wanted, f"{spot.target!r}, row {row}: {seen}, expected of {wanted}"
        lane.log.clear()
