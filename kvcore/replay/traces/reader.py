# SPDX-License-Identifier: Apache-2.0
"""Request traces: Mooncake's JSON lines, read strictly.

One JSON object a line: ``timestamp`` (ms from the start), ``input_length`` and
``output_length`` (tokens) and ``hash_ids`` (one id per 512-token block of the input; equal ids
mean equal blocks).  Other keys are ignored, blank lines are skipped.  A line without ``hash_ids``
shares no block with another.
Source of the form: kvcache-ai/Mooncake, FAST25-release/traces.

A trace steers the size of everything that follows, so nothing is guessed: a line that is not
exactly of this form is an error that names the line.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NoReturn

from kvcore.errors import fail
from kvcore.json_files import unique_keys
from kvcore.offload.checks import check_integer, check_path, each_of

__all__ = [
    "HASH_BLOCK_TOKENS", "TraceRequest", "bounded_lines", "check_requests", "parse_line",
    "read_trace",
]  # fmt: skip

#: Tokens per entry of ``hash_ids``.
HASH_BLOCK_TOKENS = 512

MAX_TOKENS = 2**31 - 1
MAX_HASH_ID = 2**63 - 1
#: From here on are the ids of lines that have none, so many for each of them.
OWN_IDS = 2**62
OWN_IDS_EACH = 2**23
MAX_TIMESTAMP_MS = 2**53
# A line is held in memory whole; the longest of the public traces has a few kilobytes.
MAX_LINE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    index:         its place in the trace, from 0; also the identity of the tokens it generates.
    timestamp_ms:  arrival.
    input_length:  prompt tokens, at least 1.
    output_length: generated tokens.
    hash_ids:      one id per 512 prompt tokens, the last one may cover fewer.
    shares:        whether its line had ids; else they are its own, and it shares no block.
    """

    index: int
    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] | range
    shares: bool = True

    @property
    def total_tokens(self) -> int:
        """Prompt and output tokens together."""
        return self.input_length + self.output_length


def check_requests(requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    """The requests as a list.  Raises ParamInvalidError for anything else among them."""
    found = list(each_of("requests", requests))
    for place, request in enumerate(found):
        if not isinstance(request, TraceRequest):
            fail(f"requests[{place}]", "a TraceRequest", type(request).__name__)
    return found


def read_trace(
    source: str | os.PathLike[str] | Iterable[bytes], *, limit: int | None = None
) -> list[TraceRequest]:
    """The requests of a trace by order of arrival (ties keep the order of the file).

    source: a path, or the lines themselves.
    limit:  read no more than this many requests; lines behind them are not looked at.
    Raises ParamInvalidError naming file and line; OSError when the file cannot be read.
    """
    if limit is not None:
        check_integer("limit", limit, 0, sys.maxsize)
    if isinstance(source, str | os.PathLike):
        check_path("source", source)
        name = os.path.basename(os.fspath(source))
        with open(source, "rb") as handle:
            requests = list(islice(_parse(bounded_lines(handle.readline), name), limit))
    else:
        requests = list(islice(_parse(each_of("source", source), "line"), limit))
    if any(not request.shares for request in requests):
        _refuse_own_ids(requests)
    requests.sort(key=lambda request: request.timestamp_ms)
    return requests


def _refuse_own_ids(requests: Iterable[TraceRequest]) -> None:
    """Raise for ids of the file that are those of lines without any."""
    for request in requests:
        most = max(request.hash_ids, default=0)
        if request.shares and most >= OWN_IDS:
            expected = f"ids below {OWN_IDS} where other lines have no hash_ids"
            fail(f"request {request.index}: hash_ids", expected, most)


def bounded_lines(readline: Callable[[int], bytes]) -> Iterator[bytes]:
    """The lines of a file, none held in memory that is longer than a trace's may be."""
    # One byte more than is allowed, so that a line too long is seen and not cut in two.
    return iter(lambda: readline(MAX_LINE_BYTES + 1), b"")


def _parse(lines: Iterable[bytes], name: str) -> Iterator[TraceRequest]:
    index = 0
    for number, line in enumerate(lines, start=1):
        if not isinstance(line, bytes):
            _fail(f"{name}:{number}", "line", "bytes", type(line).__name__)
        if line.strip():
            yield parse_line(line, index, where=f"{name}:{number}")
            index += 1


def parse_line(line: bytes, index: int = 0, *, where: str = "line") -> TraceRequest:
    """One line as a request; ``where`` opens the error message."""
    record = _load(line, where)
    timestamp = _timestamp(_field(record, "timestamp", where), where)
    input_length = _integer(_field(record, "input_length", where), "input_length", where, 1)
    output_length = _integer(_field(record, "output_length", where), "output_length", where, 0)
    if "hash_ids" not in record:
        first = OWN_IDS + index * OWN_IDS_EACH
        own = range(first, first - (-input_length // HASH_BLOCK_TOKENS))
        return TraceRequest(index, timestamp, input_length, output_length, own, shares=False)
    hash_ids = _hash_ids(record["hash_ids"], input_length, where)
    return TraceRequest(index, timestamp, input_length, output_length, hash_ids)


def _load(line: bytes, where: str) -> dict[str, object]:
    if len(line) > MAX_LINE_BYTES:
        _fail(where, "line", f"at most {MAX_LINE_BYTES} bytes", "more")
    try:
        record = json.loads(
            line.decode("utf-8"), parse_constant=_constant, object_pairs_hook=unique_keys
        )
    except UnicodeDecodeError as error:
        _fail(where, "line", "UTF-8 text", f"byte {line[error.start]:#04x} at {error.start}")
    except RecursionError:
        _fail(where, "line", "a JSON object", "nesting too deep to read")
    except ValueError as error:  # JSONDecodeError, constants, integers of thousands of digits
        _fail(where, "line", "a JSON object", f"{_shown(line)} ({error})")
    if not isinstance(record, dict):
        _fail(where, "line", "a JSON object", _shown(record))
    return record


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _field(record: dict[str, object], key: str, where: str) -> object:
    if key not in record:
        keys = ", ".join(map(_shown, sorted(record)[:8])) or "none"
        _fail(where, key, "this key on every line", f"the keys: {keys}")
    return record[key]


def _integer(value: object, name: str, where: str, low: int, high: int = MAX_TOKENS) -> int:
    # bool is an int to isinstance, and 1.0 equals 1: neither is a count of tokens.
    if type(value) is not int or not low <= value <= high:
        _fail(where, name, f"an integer from {low} to {high}", _shown(value))
    return value


def _timestamp(value: object, where: str) -> float:
    if type(value) not in (int, float):
        expected = "a number of milliseconds from the start of the trace"
        if isinstance(value, str):
            expected += " (of dates: (date - first date) / timedelta(milliseconds=1))"
        _fail(where, "timestamp", expected, _shown(value))
    assert isinstance(value, int | float)
    if not (math.isfinite(value) and 0 <= value <= MAX_TIMESTAMP_MS):
        _fail(where, "timestamp", f"milliseconds from 0 to {MAX_TIMESTAMP_MS}", _shown(value))
    return float(value)


def _hash_ids(value: object, input_length: int, where: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        _fail(where, "hash_ids", "a list of integers", _shown(value))
    wanted = -(-input_length // HASH_BLOCK_TOKENS)
    if len(value) != wanted:
        _fail(
            where,
            "hash_ids",
            f"{wanted} ids (input_length {input_length} / {HASH_BLOCK_TOKENS}, rounded up)",
            str(len(value)),
        )
    return tuple(
        _integer(item, f"hash_ids[{place}]", where, 0, MAX_HASH_ID)
        for place, item in enumerate(value)
    )


def _shown(value: object) -> str:
    return reprlib.repr(value)


def _fail(where: str, argument: str, expected: str, seen: str) -> NoReturn:
    fail(f"{where}: {argument}", expected, seen)
