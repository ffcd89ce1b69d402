# SPDX-License-Identifier: Apache-2.0
"""The sentences that report failures of a device's work to a host, all in one place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcore.errors import CaptureError, ParamInvalidError, StreamError

if TYPE_CHECKING:
    from kvcore.errors import RaceError
    from kvcore.runtime.queues._marks import Failure

__all__ = [
    "behind_its_wait",
    "failed",
    "never_recorded",
    "not_in_a_capture",
    "took_too_long",
    "unseen",
]


def _text(failure: Failure) -> str:
    # Reporting a failure must not fail: what was raised may have no text.
    kind = type(failure.cause).__name__
    try:
        return f"{kind}: {failure.cause}"
    except Exception:
        return kind


def failed(failure: Failure, what: str) -> StreamError:
    """The error that reports a failure to a host, caused by the first exception."""
    error = StreamError(
        f"{what}: {failure.operation} on stream {failure.stream!r} failed: {_text(failure)}",
        argument="stream",
        seen=failure.operation,
    )
    error.__cause__ = failure.cause
    return error


def unseen(failures: Sequence[Failure], race: RaceError | None) -> StreamError:
    """The error for failures that were not reported to any host before the device is left."""
    first = failures[0]
    error = StreamError(
        f"stream {first.stream!r}: {first.operation} failed and was not reported: {_text(first)}",
        argument="stream",
        seen=first.operation,
    )
    for failure in failures[1:10]:
        error.add_note(f"stream {failure.stream!r}: {failure.operation}: {_text(failure)}")
    if race is not None:
        error.add_note(str(race))
    error.__cause__ = first.cause
    return error


def took_too_long(stream: str, seconds: float, code: int | None = None) -> StreamError:
    """A host has waited for as long as it wanted to; the work goes on."""
    return StreamError(
        f"stream {stream!r}: expected its work to be done in {seconds} s, got work that goes on",
        argument="timeout_s",
        seen=seconds,
        code=code,
    )


def not_in_a_capture(argument: str, what: str) -> CaptureError:
    """While a graph is captured, only launches are accepted."""
    return CaptureError(
        f"{argument}: expected launches only while a graph is captured, got a request to {what}",
        argument=argument,
        seen=what,
        expected="launches",
    )


def behind_its_wait(stream: str) -> ParamInvalidError:
    """Why an external event cannot be recorded on that stream."""
    return ParamInvalidError(
        "event: expected an external event that is recorded on a stream that does not wait for "
        f"that record, got stream {stream!r}, whose work waits for it",
        argument="event",
        seen=stream,
        expected="a stream that does not wait for the record",
    )


def never_recorded() -> ParamInvalidError:
    """Why a stream that waits for an external event cannot go on."""
    return ParamInvalidError(
        "event: expected an external event that is recorded, got one that nobody recorded before "
        "the device was left",
        argument="event",
        seen="not recorded",
    )
