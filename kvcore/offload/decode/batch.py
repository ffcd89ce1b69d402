# SPDX-License-Identifier: Apache-2.0
"""The requests that a decode engine serves, its steps under way, and what becomes of both.

A request has a place of the batch (its rows of the rings, its pools) from `Batch.admit` until no
operation uses the place any more.  Between the two it may be *leaving*: no step takes it, and its
place is not free yet.  `kvcore.offload.decode.settle` waits for the operations and calls
`Batch.end_leave`; when nobody waits, marks on the streams tell that they are over, and
`Batch.free_places` looks at them whenever the engine is asked for a place.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcore.errors import ParamNullError, StreamError, fail
from kvcore.offload.checks import check_identity, check_integer, read_indices
from kvcore.offload.decode.request import DecodeRequest
from kvcore.offload.decode.result import DecodeTotals, RequestStep, decode_failed

if TYPE_CHECKING:
    from kvcore.offload.decode.choice import Part
    from kvcore.offload.decode.launch import Launched, Launcher
    from kvcore.offload.decode.options import EngineSettings
    from kvcore.offload.decode.places import Places
    from kvcore.offload.decode.result import Moved
    from kvcore.runtime import Event

__all__ = ["Batch", "LaunchedStep"]


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A step that was launched and has not been seen to end.

    start, end: events of the computing stream.
    before:     (request, rows that the host had, epoch) of each request when it was launched.
    copies:     what had been launched before it to the host.
    cause:      why it failed, once that is known; lost: leading tokens that the host has then.
    """

    number: int
    moved: Moved
    requests: Mapping[Hashable, RequestStep]
    start: Event
    end: Event
    before: list[tuple[DecodeRequest, int, int]]
    copies: Launched
    cause: BaseException | None = None
    lost: Mapping[Hashable, int] = field(default_factory=dict)

    def check(self) -> None:
        """Raise DecodeFailed when the step is known to have failed."""
        if self.cause is not None:
            raise decode_failed(self.lost, self.cause)


class Batch:
    """Up to ``max_batch`` requests in the places of an engine.

    run:     launches the operations; places: pools and places.
    totals:  sums over all steps.
    steps:   those that were launched and not seen to end.
    closing: no request is taken any more; closed: and the memory was given back.
    """

    closing: bool
    closed: bool

    def __init__(self, settings: EngineSettings, places: Places, run: Launcher) -> None:
        self._max_batch, self._max_tokens = settings.max_batch, settings.max_tokens
        self._places, self._run = places, run
        self._requests: dict[Hashable, DecodeRequest] = {}  # those that are leaving included
        self.totals: DecodeTotals = DecodeTotals()
        self.steps: set[LaunchedStep] = set()
        self.closing = self.closed = False
        self._failure: BaseException | None = None  # found while closing

    # -- who is in it ---------------------------------------------------------------------

    @property
    def requests(self) -> tuple[DecodeRequest, ...]:
        """All that have a place, those that are leaving included, in the order they came."""
        return tuple(self._requests.values())

    @property
    def num_free(self) -> int:
        """Places that can be given to a request."""
        return self._places.num_free

    def find(self, request: Hashable, argument: str, *, leaving: bool = False) -> DecodeRequest:
        """The request of that name.  Raises ParamInvalidError for one that has left.

        leaving: whether it may be one that is leaving.
        """
        self.check_open()
        state = self._requests.get(check_identity(argument, request))
        if state is None:
            fail(argument, "a request that was admitted", repr(request))
        if state.leaving and not leaving:
            fail(argument, "a request that is not leaving", repr(request))
        return state

    def admit(self, request: Hashable, table: Any, context: int) -> None:
        """Give a place to a request, of which the full cache has ``context`` tokens."""
        if request is None:
            raise ParamNullError("request: expected an identity, got None", argument="request")
        check_identity("request", request)
        self.free_places()
        if request in self._requests:
            leaves = ", which is leaving" if self._requests[request].leaving else ""
            fail("request", "one not admitted yet", f"{request!r}{leaves}")
        if len(self._requests) >= self._max_batch:
            fail("request", f"at most max_batch ({self._max_batch}) requests at a time", "one more")
        read_indices("table", table)
        check_integer("context", context, 0, self._max_tokens)
        place, pools = self._places.take(request)
        self._requests[request] = DecodeRequest(request, table, context, place, pools)

    def check_open(self) -> None:
        """Raise StreamError once the engine was closed."""
        if self.closing:
            raise StreamError("engine: expected an open one, got one that was closed")

    # -- steps ----------------------------------------------------------------------------

    def begin_step(
        self, parts: Sequence[Part], exhausted: Sequence[DecodeRequest], cut: int
    ) -> list[tuple[DecodeRequest, int, int]]:
        """A step is about to be launched; returns its `LaunchedStep.before`.

        exhausted: requests without a block for their next token; cut: drafts not made for want of
        room.
        """
        for part in parts:
            part.request.forget_tail()
        self.totals.steps += 1
        self.totals.exhausted += len(exhausted)
        self.totals.cut_drafts += cut
        return [(part.request, part.request.clean, part.request.epoch) for part in parts]

    def wrote(
        self, parts: Sequence[Part], exhausted: Sequence[DecodeRequest], groups: int, rows: int
    ) -> dict[Hashable, RequestStep]:
        """The step was launched: its tokens are in rings of ``rows``.  What it did, by request."""
        outcomes: dict[Hashable, RequestStep] = {}
        for part in parts:
            request = part.request
            request.wrote(part.tokens, rows)
            request.clean = max(request.clean, part.send[1])
            self.totals.tokens += part.tokens
            moved = [part.rows(group) for group in range(groups)]
            outcomes[request.name] = RequestStep(
                "stepped", request.context, part.tokens,
                *(tuple(of[i] for of in moved) for i in range(3)),
            )  # fmt: skip
        nothing = (0,) * groups
        for request in exhausted:
            outcomes[request.name] = RequestStep(
                "exhausted", request.context, 0, nothing, nothing, nothing
            )
        return outcomes

    def add_step(self, step: LaunchedStep) -> None:
        """Count what the step moves, and keep it until it is seen to end."""
        self.totals.add(step.moved)
        self.steps.add(step)

    # -- leaving --------------------------------------------------------------------------

    def begin_leave(self, state: DecodeRequest, how: str) -> None:
        """From now on no step takes the request.

        how: "preempted", "evicted" or "aborted"; what has not begun for an aborted one does not
             run.
        """
        if not state.leaving:
            state.leaving = True
            setattr(self.totals, how, getattr(self.totals, how) + 1)
        if how == "aborted" and not state.aborted:
            state.aborted = True
            for pool in state.pools.values():
                pool.evict(state.name)

    def end_leave(self, state: DecodeRequest) -> None:
        """No operation uses the request's place any more: it is free."""
        if self._requests.get(state.name) is state:
            del self._requests[state.name]
        self._places.give_back(state)

    def mark_leaving(self) -> None:
        """Note how far the streams must come before those that leave now have left."""
        for state in self._requests.values():
            if state.leaving and self._run.is_open:
                state.last = self._run.marks()

    def free_places(self) -> None:
        """End the leaving of requests whose operations are over, where no call waits for them."""
        for state in self.requests:
            if state.last and self._run.over(state.last):
                self.end_leave(state)

    # -- failures -------------------------------------------------------------------------

    def doubt(self, cause: BaseException) -> None:
        """From now on no further row of the requests counts as being on the host."""
        for state in self._requests.values():
            state.failed = state.failed or cause

    def put_out(self, cause: BaseException) -> list[DecodeRequest]:
        """An operation failed: every request leaves, every step has failed.

        What is not certainly on the host must be computed again.  Returns the requests that leave
        by this.
        """
        lost = [state for state in self._requests.values() if not state.leaving]
        for step in self.steps:
            step.lost = {state.name: state.confirmed for state in lost}
            step.cause = cause
        self.steps.clear()
        self.doubt(cause)
        for state in lost:
            state.leaving = state.aborted = True
            for pool in state.pools.values():
                pool.evict(state.name)
        self.totals.failed += len(lost)
        if self.closing:
            self._failure = self._failure or cause
        elif self._run.is_open:
            self._run.start_again()
        return lost

    # -- the end --------------------------------------------------------------------------

    def begin_close(self) -> None:
        """Drop every request, as an abort does."""
        self.closing = True
        for state in self._requests.values():
            state.aborted = state.leaving = True

    def end_close(self) -> None:
        """Nothing runs any more: give the memory back."""
        self.closed = True
        self._requests.clear()
        self._places.close()
        self._run.close()

    def raise_failure(self) -> None:
        """Raise DecodeFailed, once, when something was found to have failed while closing."""
        cause, self._failure = self._failure, None
        if cause is not None:
            raise decode_failed({}, cause)
