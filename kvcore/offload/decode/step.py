# SPDX-License-Identifier: Apache-2.0
"""A step that was launched, and what becomes of it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

from kvcore.errors import StreamError
from kvcore.offload.decode.result import DecodeFailed, StepResult

if TYPE_CHECKING:
    from kvcore.offload.decode.engine import DecodeEngine
    from kvcore.offload.decode.launch import Launched
    from kvcore.offload.decode.request import DecodeRequest
    from kvcore.runtime import Event

__all__ = ["DecodeStep", "decode_failed"]


class DecodeStep:
    """A step that was launched."""

    def __init__(
        self,
        engine: DecodeEngine,
        result: dict[str, Any],
        start: Event,
        end: Event,
        before: list[tuple[DecodeRequest, int, int]],
        copies: Launched,
    ) -> None:
        self._engine, self._result, self._start, self._end = engine, result, start, end
        self._before, self._copies = before, copies
        self._lost: Mapping[Hashable, int] = {}
        self._cause: BaseException | None = None

    async def wait(self) -> StepResult:
        """Wait until the computing stream has done the step.

        Cancelling stops the waiting, not the work.  Raises DecodeFailed when an operation
        failed: every request is out then, and no operation uses its blocks (that is waited for
        through every cancel).  Raises RaceError (``race_check="raise"``).
        """
        try:
            await self._end.synchronize()
        except StreamError as error:
            await self._engine._settle(self, error)
            self._fail(error)
        return self._finish()

    def wait_blocking(self) -> StepResult:
        """The same, holding this thread."""
        try:
            self._end.synchronize_blocking()
        except StreamError as error:
            self._engine._settle_blocking(self, error)
            self._fail(error)
        return self._finish()

    def _fail(self, error: StreamError) -> None:
        raise decode_failed(self._lost, self._cause or error)

    def _finish(self) -> StepResult:
        if self._cause is not None:
            raise decode_failed(self._lost, self._cause)
        self._engine._finished(self)
        start, end = (self._engine._run.time_of(event) for event in (self._start, self._end))
        return StepResult(start_us=start, end_us=end, **self._result)


def decode_failed(lost: Mapping[Hashable, int], cause: BaseException) -> DecodeFailed:
    """The error for requests that are out, from the first cause."""
    error = DecodeFailed(
        f"engine: expected every operation to run, got {cause}; its requests are out",
        argument="engine",
        seen=str(cause),
    )
    error.lost = dict(lost)
    error.__cause__ = cause
    return error
