# SPDX-License-Identifier: Apache-2.0
"""One loop, any strategy: what a strategy of one's own is asked, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvcore.errors import ParamInvalidError
from kvcore.offload import BlockPool
from kvcore.replay import (
    ModelProfile,
    OffloadedInFull,
    OffloadedSampled,
    OffloadOptions,
    OffloadReplay,
    Replay,
    Resident,
    Scheduler,
    Strategy,
    TraceRequest,
)
from kvcore.replay.report.report import Outcome
from kvcore.replay.serving.strategy import Timings

SHAPE = ModelProfile.named("tiny").shape
#: Two that share a prompt of one and a half blocks, and a third.
REQUESTS = [
    TraceRequest(0, 0.0, 24, 6, (1,)),
    TraceRequest(1, 0.0, 24, 6, (1,)),
    TraceRequest(2, 50.0, 10, 3, (2,)),
]


class Noting(Strategy[Any]):
    """No bytes: it notes what it is asked.  A step takes 10 ms."""

    def __init__(self, *, timed: bool = False, abort: int = -1) -> None:
        self.times, self.verify_samples, self.verified = Timings(), 30, 0
        self.mismatches = []
        self.notes: list[tuple[str, int]] = []
        self.now, self.timed, self.abort = 0.0, timed, abort

    def begin(self, requests: Sequence[TraceRequest]) -> Scheduler:
        return Scheduler(requests, BlockPool(20), block_size=16, max_batch=2, chunk_tokens=24)

    @property
    def now_ms(self) -> float | None:
        return self.now if self.timed else None

    def idle_until(self, ms: float) -> None:
        self.notes.append(("idle", int(ms)))
        self.now = ms

    def admitted(self, running: Any) -> None:
        self.notes.append(("admitted", running.request.index))

    def copy_block(self, source: int, target: int) -> int:
        self.notes.append(("copy", source))
        return 100

    def serve(self, step: Any) -> None:
        self.now += 10
        self.notes.append(("serve", len(step.prefill) + len(step.decode)))

    def is_aborted(self, running: Any) -> bool:
        return running.request.index == self.abort and running.written > 25

    def leaving(self, running: Any, *, finished: bool) -> None:
        self.notes.append(("leaving", running.request.index))
        assert running.blocks

    def verify(self, running: Any, count: int) -> None:
        self.notes.append(("verify", count))
        self.verified += count

    def left(self, running: Any, *, finished: bool) -> None:
        self.notes.append(("left" if finished else "aborted", running.request.index))
        assert running.blocks, "they are given back only now"

    def report(self, outcome: Outcome) -> Outcome:
        return outcome


def test_a_strategy_is_asked_in_the_order_of_a_step() -> None:
    strategy = Noting()
    outcome = Replay(REQUESTS, strategy).run()
    notes = strategy.notes
    # (a step computes one of the prompts, and the second one is found whole)
    assert notes[:3] == [("admitted", 0), ("serve", 1), ("admitted", 1)]
    # Its last, partial block is shared, and copied before the step that writes it.
    copy = next(place for place, note in enumerate(notes) if note[0] == "copy")
    assert "serve" in (notes[copy + 1][0], notes[copy + 2][0])
    assert outcome.copied_bytes == 100 * sum(note[0] == "copy" for note in notes)
    for index in range(3):
        place = notes.index(("leaving", index))
        assert notes[place : place + 3] == [("leaving", index), ("verify", 10), ("left", index)]
    assert (outcome.finished_requests, outcome.aborted_requests) == (3, 0)
    assert (outcome.verified_samples, outcome.interrupted, outcome.ok) == (30, False, True)


def test_an_aborted_request_is_not_verified() -> None:
    strategy = Noting(abort=1)
    outcome = Replay(REQUESTS, strategy).run()
    place = strategy.notes.index(("leaving", 1))
    assert strategy.notes[place + 1] == ("aborted", 1)
    assert (outcome.finished_requests, outcome.aborted_requests) == (2, 1)
    assert outcome.verified_samples == 20, "a share for each that has finished"


def test_a_strategy_with_a_clock_waits_for_arrivals() -> None:
    late = [TraceRequest(0, 0.0, 10, 2, (1,)), TraceRequest(1, 500.0, 10, 2, (2,))]
    strategy = Noting(timed=True)
    Replay(late, strategy).run()
    idle = strategy.notes.index(("idle", 500))
    assert strategy.notes.index(("left", 0)) < idle < strategy.notes.index(("admitted", 1))
    at_once = Noting()
    Replay(late, at_once).run()
    assert at_once.notes[:2] == [("admitted", 0), ("admitted", 1)]


def test_a_shape_is_short_for_real_caches() -> None:
    options: Any = {"num_blocks": 8, "block_size": 16, "layout": "NHSD", "verify_samples": 9}
    one = Replay(REQUESTS, SHAPE, **options).run().to_dict()
    two = Replay(REQUESTS, Resident(SHAPE, **options)).run().to_dict()
    for figures in (one, two):
        del figures["seconds"], figures["scatter_gb_per_s"]
    assert one == two
    with pytest.raises(ParamInvalidError, match=r"^num_blocks: expected no option together with"):
        Replay(REQUESTS, Noting(), num_blocks=3)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("fidelity", "kind"), [("full", OffloadedInFull), ("sampled", OffloadedSampled)]
)
def test_the_fidelity_is_the_strategy(fidelity: str, kind: Any) -> None:
    model = ModelProfile.named("tiny-sparse")
    options = OffloadOptions(fidelity=fidelity, host_blocks=20)
    by_name = OffloadReplay(REQUESTS, model, options)
    assert type(by_name.serving) is kind
    one = by_name.run().to_dict()
    two = Replay(REQUESTS, kind(model, options)).run().to_dict()
    del one["seconds"], two["seconds"]
    assert one == two
