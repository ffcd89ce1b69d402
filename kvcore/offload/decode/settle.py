# SPDX-License-Identifier: Apache-2.0
"""Waiting for the operations of the decode engine, and what becomes of its requests by them.

A place of the batch (its rows of the rings, its pools) and the request's blocks on the host may
be given to another only when no operation uses them any more.  So a call that makes a request
leave waits, through every cancel, for all that was launched until then, and each request that was
leaving when the wait began has left when it ends.  A wait that is broken off (Ctrl-C, or a task
that its loop has dropped) leaves the request where it is, with a mark on every stream; the engine
looks at these when it is next asked for a place.

Streams report a failure once, to one of those that wait.  From that moment nothing more of any
request in the batch counts as being on the host, for concurrent waits too, and all of them leave.
Where the failure was reported outside the engine (to a synchronise of the device), it is found by
counting the operations that ran.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from kvcore.errors import StreamError
from kvcore.runtime.shield import Shield

if TYPE_CHECKING:
    from kvcore.offload.decode.batch import Batch, LaunchedStep
    from kvcore.offload.decode.launch import Launcher
    from kvcore.runtime import Stream

__all__ = ["Settlement", "Settler"]


class Settler:
    """Waits for everything that an engine has launched.  A failure puts every request out."""

    def __init__(self, batch: Batch, run: Launcher) -> None:
        self._batch, self._run = batch, run

    def begin(
        self, step: LaunchedStep | None = None, error: StreamError | None = None
    ) -> Settlement:
        """A wait for all that was launched by now.

        step, error: a step that was seen to have failed, and by what.
        """
        return Settlement(self._batch, self._run, step, error)

    async def settle(
        self, step: LaunchedStep | None = None, error: StreamError | None = None
    ) -> None:
        """Wait until nothing runs that was launched by now.

        Lasts through every cancel and raises it at its end.
        """
        settlement = self.begin(step, error)
        with Shield() as shield, settlement:
            for stream in settlement.to_synchronize:
                with settlement.seeing():
                    await shield(stream.synchronize)
            for stream in settlement.to_drain():
                await shield(stream.drain)
            settlement.end()

    def settle_blocking(
        self, step: LaunchedStep | None = None, error: StreamError | None = None
    ) -> None:
        """Wait as `settle` does, holding this thread."""
        with self.begin(step, error) as settlement:
            for stream in settlement.to_synchronize:
                with settlement.seeing():
                    stream.synchronize_blocking()
            for stream in settlement.to_drain():
                stream.drain_blocking()
            settlement.end()


class Settlement:
    """One wait for everything that was launched by now; a block around the wait itself.

    step, error: a step that was seen to have failed, and by what.

    In the block: synchronise with ``to_synchronize``, each inside ``seeing()``; then drain
    ``to_drain()``; then `end`.
    """

    def __init__(
        self,
        batch: Batch,
        run: Launcher,
        step: LaunchedStep | None = None,
        error: StreamError | None = None,
    ) -> None:
        self._batch, self._run = batch, run
        self._step, self._step_error = step, error
        self._error: Exception | None = None
        self._closing = batch.closing
        self._steps = list(batch.steps)
        self._leaving = [state for state in batch.requests if state.leaving]
        # (of a request that is aborted, copies that have not begun do not run)
        self._clean = [
            (state, state.clean, state.epoch) for state in batch.requests if not state.aborted
        ]
        self._launched = run.launched()
        self._out = self._ended = False
        if step is not None and error is not None and step.cause is None:
            batch.doubt(error)

    @property
    def to_synchronize(self) -> Sequence[Stream]:
        """The streams that can report how their work went: none once the device was left."""
        streams = self._run.streams
        return tuple(streams.values()) if self._run.is_open or not self._closing else ()

    @contextlib.contextmanager
    def seeing(self) -> Iterator[None]:
        """Around a wait for one stream: keep the first error of all streams."""
        try:
            yield
        except Exception as error:
            if isinstance(error, StreamError):
                self._batch.doubt(error)
            self._error = self._error or error

    def to_drain(self) -> Sequence[Stream]:
        """Put the requests out if something failed; the streams that may still run then."""
        if self._error is None and self.to_synchronize and self._run.did_not_run(self._launched):
            self._error = StreamError(
                "operations that did not run, a failure that was reported outside the engine",
                argument="engine",
            )
            self._batch.doubt(self._error)
        if self._error is None and self._step is None and self.to_synchronize:
            return ()
        self._put_out()
        return tuple(self._run.streams.values())

    def _put_out(self) -> None:
        step = self._step
        if self._error is None and step is not None and step.cause is None:
            # It was reported to a wait outside the engine, which did not put the requests out.
            self._error = self._step_error
        if isinstance(self._error, StreamError) and not self._out:
            self._out = True
            self._leaving += self._batch.put_out(self._error)
            if step is not None and step.cause is None:
                step.cause = self._error

    def end(self) -> None:
        """Nothing that was launched runs any more: confirm what was copied, give places back.

        Raises an error that is no failure of the work (RaceError).
        """
        batch = self._batch
        if self._error is None and self._step is None:
            batch.steps.difference_update(self._steps)
            for state, clean, epoch in self._clean:
                state.confirm(clean, epoch)
        for state in self._leaving:
            batch.end_leave(state)
        if self._closing:
            batch.end_close()
        self._ended = True
        if self._error is not None and not isinstance(self._error, StreamError):
            raise self._error

    def __enter__(self) -> Settlement:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._ended:
            self._put_out()
            self._batch.mark_leaving()
