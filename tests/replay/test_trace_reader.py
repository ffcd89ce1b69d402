# SPDX-License-Identifier: Apache-2.0
"""Reading traces: what is taken, and what every bad line is answered with."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import ParamInvalidError
from kvcore.replay.traces.content import block_keys
from kvcore.replay.traces.reader import MAX_LINE_BYTES, TraceRequest, parse_line, read_trace

REAL = Path(__file__).parents[3] / "shared" / "data" / "conversation_trace.jsonl"
GOOD = {"timestamp": 27, "input_length": 700, "output_length": 9, "hash_ids": [0, 5]}


def line(**changes: object) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


def test_a_good_line() -> None:
    assert parse_line(line(), 4) == TraceRequest(4, 27.0, 700, 9, (0, 5))
    assert parse_line(line()).total_tokens == 709


def test_other_keys_and_blank_lines_are_no_matter() -> None:
    lines = [b"\n", line(kind="chat"), b"  \r\n", line(timestamp=28), b"\n"]
    assert [r.index for r in read_trace(lines)] == [0, 1]


def test_requests_are_ordered_by_arrival_and_ties_keep_their_order() -> None:
    lines = [line(timestamp=t) for t in (5, 1.5, 5, 0)]
    assert [(r.timestamp_ms, r.index) for r in read_trace(lines)] == [
        (0, 3),
        (1.5, 1),
        (5, 0),
        (5, 2),
    ]


def test_limit_reads_no_further() -> None:
    assert len(read_trace([line(), line(), b"{broken"], limit=2)) == 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"{oops", "line: expected a JSON object, got b'{oops'"),
        (b"[1, 2]", r"line: expected a JSON object, got \[1, 2\]"),
        (b"17", "line: expected a JSON object, got 17"),
        (b"null", "line: expected a JSON object, got None"),
        (b"\xff\xfe{}", "line: expected UTF-8 text, got byte 0xff at 0"),
        (b"[" * 200_000, "line: expected a JSON object, got nesting too deep"),
        (line(timestamp=float("nan")), "NaN is not JSON"),
        (line(timestamp=float("inf")), "Infinity is not JSON"),
        (line(input_length=float("nan")), "NaN is not JSON"),
        (b'{"timestamp": 1e999, ' + line()[17:], "timestamp: expected milliseconds from 0"),
        (line(timestamp=-1), "timestamp: expected milliseconds from 0 to .*, got -1"),
        (line(timestamp=2**60), "timestamp: expected milliseconds from 0"),
        (line(timestamp="3"), r"timestamp: expected a number of milliseconds from .*, got '3'"),
        (
            line(timestamp="2026-05-01T00:00:07+02:00"),
            r"milliseconds from the start of the trace \(of dates: .*\), got '2026-05-01T",
        ),
        (line(timestamp=True), "timestamp: expected a number of milliseconds .*, got True"),
        (line(timestamp=None), "timestamp: expected a number of milliseconds .*, got None"),
        (line(input_length=0), "input_length: expected an integer from 1 to 2147483647, got 0"),
        (line(input_length=-700), "input_length: expected .*, got -700"),
        (line(input_length=700.0), "input_length: expected .*, got 700.0"),
        (line(input_length=True), "input_length: expected .*, got True"),
        (line(input_length="700"), "input_length: expected .*, got '700'"),
        (line(input_length=None), "input_length: expected .*, got None"),
        (line(input_length=[700]), r"input_length: expected .*, got \[700\]"),
        (line(input_length=2**63), "input_length: expected .*, got 9223372036854775808"),
        (line(output_length=-1), "output_length: expected an integer from 0 to .*, got -1"),
        (line(output_length=2**31), "output_length: expected .*, got 2147483648"),
        (line(output_length=False), "output_length: expected .*, got False"),
        (line(hash_ids=[0]), r"hash_ids: expected 2 ids \(input_length 700 / 512.*\), got 1"),
        (line(hash_ids=[]), "hash_ids: expected 2 ids .*, got 0"),
        (line(hash_ids=[0, 1, 2]), "hash_ids: expected 2 ids .*, got 3"),
        (line(hash_ids="01"), "hash_ids: expected a list of integers, got '01'"),
        (line(hash_ids=None), "hash_ids: expected a list of integers, got None"),
        (line(hash_ids={"0": 1, "1": 2}), "hash_ids: expected a list of integers, got {"),
        (line(hash_ids=[0, -1]), r"hash_ids\[1\]: expected an integer from 0 to .*, got -1"),
        (line(hash_ids=[0.0, 1]), r"hash_ids\[0\]: expected .*, got 0.0"),
        (line(hash_ids=[True, 1]), r"hash_ids\[0\]: expected .*, got True"),
        (line(hash_ids=[0, 2**63]), r"hash_ids\[1\]: expected .*, got 9223372036854775808"),
        (line(hash_ids=[0, [1]]), r"hash_ids\[1\]: expected .*, got \[1\]"),
        (b'{"timestamp": ' + b"9" * 5000 + b"}", "line: expected a JSON object"),
    ],
)
def test_bad_lines(bad: bytes, message: str) -> None:
    with pytest.raises(ParamInvalidError, match=message) as caught:
        read_trace([line(), b"", bad])
    assert str(caught.value).startswith("line:3: ")


@pytest.mark.parametrize("key", sorted(set(GOOD) - {"hash_ids"}))
def test_missing_keys(key: str) -> None:
    bad = json.dumps({k: v for k, v in GOOD.items() if k != key}).encode()
    with pytest.raises(ParamInvalidError, match=f"^here: {key}: expected this key on every line"):
        parse_line(bad, where="here")


def test_a_line_without_ids_shares_no_block(tmp_path: Path) -> None:
    bare = json.dumps({k: v for k, v in GOOD.items() if k != "hash_ids"}).encode()
    requests = read_trace([bare, line(), bare, line()])
    assert [r.shares for r in requests] == [False, True, False, True]
    keys = [block_keys(r, 128, r.input_length) for r in requests]
    assert keys[1] == keys[3]
    assert len(set(keys[0]) | set(keys[1]) | set(keys[2])) == 3 * 6
    assert all(len(r.hash_ids) == 2 for r in requests)
    # A line of its own is not a long list, however long its prompt is.
    long = json.dumps({"timestamp": 0, "input_length": 2**31 - 1, "output_length": 1}).encode()
    assert len(parse_line(long, 10**7 - 1).hash_ids) == 2**22
    with pytest.raises(ParamInvalidError, match=r"^request 1: hash_ids: expected ids below"):
        read_trace([bare, line(hash_ids=[0, 2**62])])
    assert read_trace([line(hash_ids=[0, 2**62])])[0].shares


def test_a_file_is_named_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(line() + b"\n\n" + line(input_length=-1) + b"\n")
    message = "mine.jsonl:3: input_length: expected an integer from 1 to 2147483647, got -1"
    with pytest.raises(ParamInvalidError, match=f"^{re.escape(message)}$"):
        read_trace(path)


def test_a_line_without_end_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    with path.open("wb") as handle:
        handle.truncate(3 * MAX_LINE_BYTES)  # zeros, of which the disk has none
    with pytest.raises(ParamInvalidError, match=r"long.jsonl:1: line: expected at most \d+ bytes"):
        read_trace(path)


def test_no_file() -> None:
    with pytest.raises(FileNotFoundError):
        read_trace("there is no such trace.jsonl")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(sorted(GOOD)), x),
        max_leaves=8,
    )
)
def test_any_json_is_a_request_or_an_error(value: object) -> None:
    is_request = False
    with suppress(ParamInvalidError):  # any other error fails the test
        request = parse_line(json.dumps(value).encode())
        is_request = len(request.hash_ids) == -(-request.input_length // 512)
    assert is_request is False or isinstance(value, dict)


@given(st.binary(max_size=60))
def test_any_bytes_are_an_error(data: bytes) -> None:
    with pytest.raises(ParamInvalidError, match=r"^x: "):
        parse_line(data, where="x")


@pytest.mark.skipif(not REAL.exists(), reason=f"{REAL.name} is not there")
def test_the_real_trace() -> None:
    requests = read_trace(REAL)
    assert len(requests) == 12_031
    assert requests[0].input_length == 6758
    assert sum(request.input_length for request in requests) == 144_793_823
