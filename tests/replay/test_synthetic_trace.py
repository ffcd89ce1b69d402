# SPDX-License-Identifier: Apache-2.0
"""The generator: the form of a trace, the same for the same seed, the shape of the real one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.replay.traces.reader import TraceRequest, parse_line
from kvcore.replay.traces.synthetic import generate_trace


def as_line(request: TraceRequest) -> bytes:
    return json.dumps(
        {
            "timestamp": request.timestamp_ms,
            "input_length": request.input_length,
            "output_length": request.output_length,
            "hash_ids": request.hash_ids,
        }
    ).encode()


def prefix_hits(requests: Iterable[TraceRequest]) -> float:
    """Share of hash blocks met before, each prompt up to its first new one."""
    seen: set[int] = set()
    hits = total = 0
    for request in requests:
        known = [hash_id in seen for hash_id in request.hash_ids]
        hits += known.index(False) if False in known else len(known)
        total += len(known)
        seen.update(request.hash_ids)
    return hits / total


@given(st.integers(0, 2**64 - 1))
def test_what_is_generated_is_a_trace(seed: int) -> None:
    requests = list(generate_trace(60, seed=seed))
    assert [parse_line(as_line(r), r.index) for r in requests] == requests
    assert [r.timestamp_ms for r in requests] == sorted(r.timestamp_ms for r in requests)


def test_the_same_seed_gives_the_same_trace_and_its_beginnings() -> None:
    whole = list(generate_trace(200, seed=3))
    assert list(generate_trace(200, seed=3)) == whole
    assert list(generate_trace(50, seed=3)) == whole[:50]
    assert list(generate_trace(200, seed=4)) != whole


def test_it_can_be_taken_in_pieces() -> None:
    assert len(list(islice(generate_trace(10**9), 5))) == 5


@pytest.fixture(scope="module", params=[0, 1])
def long_trace(request: pytest.FixtureRequest) -> list[TraceRequest]:
    return list(generate_trace(6000, seed=request.param))


def test_lengths_are_those_of_the_source(long_trace: list[TraceRequest]) -> None:
    inputs = [r.input_length for r in long_trace]
    outputs = [r.output_length for r in long_trace]
    # Quartiles of the real trace: 2306, 6909, 15368 and 156, 350, 472.
    assert np.percentile(inputs, [25, 50, 75]) == pytest.approx([2306, 6909, 15368], rel=0.3)
    assert np.percentile(outputs, [25, 50, 75]) == pytest.approx([156, 350, 472], rel=0.2)
    assert min(inputs) >= 512
    assert max(inputs) <= 126_195
    assert max(outputs) <= 2000


def test_prefixes_are_shared_as_in_the_source(long_trace: list[TraceRequest]) -> None:
    # The real one: 0.21 of the blocks of the first 1,000 requests, 0.37 in all.
    assert 0.15 < prefix_hits(long_trace[:1000]) < 0.33
    assert 0.28 < prefix_hits(long_trace) < 0.45
    assert {r.hash_ids[0] for r in long_trace} == {0}
    prompts = [(r.input_length, r.hash_ids) for r in long_trace]
    assert 0.002 < 1 - len(set(prompts)) / len(prompts) < 0.03


def test_arrivals_are_those_of_the_source(long_trace: list[TraceRequest]) -> None:
    span_ms = long_trace[-1].timestamp_ms
    assert len(long_trace) / span_ms * 3000 == pytest.approx(10.2, rel=0.1)
    assert all(r.timestamp_ms % 3000 == 0 for r in long_trace)
