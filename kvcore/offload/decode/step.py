# SPDX-License-Identifier: Apache-2.0
"""A decode step that was launched, to be waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcore.errors import StreamError
from kvcore.offload.decode.launch import ran
from kvcore.offload.decode.result import StepResult, decode_failed

if TYPE_CHECKING:
    from kvcore.offload.decode.batch import Batch, LaunchedStep
    from kvcore.offload.decode.launch import Launcher
    from kvcore.offload.decode.settle import Settler

__all__ = ["DecodeStep"]


class DecodeStep:
    """A decode step that was launched.  `DecodeEngine.launch` makes it."""

    def __init__(
        self, launched: LaunchedStep, batch: Batch, run: Launcher, settler: Settler
    ) -> None:
        self._launched, self._batch, self._run, self._settler = launched, batch, run, settler

    async def wait(self) -> StepResult:
        """Wait until the computing stream has done the step.

        Cancelling stops the waiting, not the work.  Raises DecodeFailed when an operation
        failed: every request is out then, and no operation uses its blocks (that is waited for
        through every cancel).  Raises RaceError (``race_check="raise"``).
        """
        try:
            await self._launched.end.synchronize()
        except StreamError as error:
            await self._settler.settle(self._launched, error)
            self._fail(error)
        return self._finish()

    def wait_blocking(self) -> StepResult:
        """Wait as `wait` does, holding this thread, and raise what it raises."""
        try:
            self._launched.end.synchronize_blocking()
        except StreamError as error:
            self._settler.settle_blocking(self._launched, error)
            self._fail(error)
        return self._finish()

    def _fail(self, error: StreamError) -> None:
        self._launched.check()
        raise decode_failed(self._launched.lost, error)

    def _finish(self) -> StepResult:
        launched = self._launched
        launched.check()
        self._batch.steps.discard(launched)
        # The step's layers waited for the copies of the steps before it.
        if ran(launched.copies):
            for request, clean, epoch in launched.before:
                request.confirm(clean, epoch)
        moved = launched.moved
        return StepResult(
            number=launched.number,
            start_us=self._run.time_of(launched.start),
            end_us=self._run.time_of(launched.end),
            requests=launched.requests,
            rows=moved.rows,
            **moved._asdict(),
        )
