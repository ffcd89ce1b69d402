# SPDX-License-Identifier: Apache-2.0
"""A seeded trace with the form and the shape of a real chat service's hour.

The figures below were read off the 12,031 requests of Mooncake's conversation trace
(kvcache-ai/Mooncake, FAST25-release/traces): quantiles of lengths, growth and delays, and the
shares of the ways in which prefixes are met again:

- every prompt begins with the same 512-token block (the system prompt);
- 1 of 3 requests continues an earlier conversation: its whole blocks are met again, its last
  partial block is not, because it has been filled up meanwhile (the first minutes have fewer,
  there is nothing to continue yet);
- a few prompts begin with one of some long, popular documents;
- one in a hundred is a prompt seen before, to the last token.

Arrivals come in ticks of three seconds, a Poisson number in each.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from kvcore.offload.checks import check_integer
from kvcore.replay.traces.reader import HASH_BLOCK_TOKENS, TraceRequest

__all__ = ["generate_trace"]

TICK_MS = 3000
REQUESTS_PER_TICK = 10.2
P_CONTINUED = 0.36  # of requests; some of these turns lie beyond the hour
P_REPEATED = 0.01
P_DOCUMENT = 0.05
DOCUMENT_BLOCKS = (12, 20, 33, 61, 9, 15, 27, 48)
# Longest prompt of the source; a conversation that would outgrow it begins anew.
MAX_INPUT = 126_195

# (probability, value) pairs, joined by straight lines in the logarithm of the value.
FIRST_INPUT = (
    (0.0, 891),
    (0.05, 897),
    (0.1, 905),
    (0.25, 1336),
    (0.5, 5264),
    (0.75, 13056),
    (0.9, 25561),
    (0.95, 38538),
    (0.99, 89869),
    (1.0, MAX_INPUT),
)
OUTPUT = (
    (0.0, 1),
    (0.01, 3),
    (0.05, 10),
    (0.1, 24),
    (0.2, 100),
    (0.3, 213),
    (0.5, 350),
    (0.7, 447),
    (0.9, 597),
    (0.95, 698),
    (0.99, 1120),
    (0.999, 2000),
    (1.0, 2000),
)
GROWTH = ((0.0, 20), (0.1, 90), (0.25, 187), (0.5, 454), (0.75, 900), (0.9, 4000), (1.0, 17472))
DELAY_MS = (
    (0.0, 6000),
    (0.05, 30_000),
    (0.1, 42_000),
    (0.25, 66_000),
    (0.5, 123_000),
    (0.75, 264_000),
    (0.9, 483_000),
    (0.99, 1_482_000),
    (1.0, 3_030_000),
)


def _draw(rng: np.random.Generator, curve: Sequence[tuple[float, int]]) -> int:
    probabilities, values = zip(*curve, strict=True)
    return round(math.exp(np.interp(rng.random(), probabilities, np.log(values))))


@dataclass(slots=True)
class _Prompt:
    input_length: int
    hash_ids: tuple[int, ...]

    @property
    def whole_blocks(self) -> tuple[int, ...]:
        return self.hash_ids[: self.input_length // HASH_BLOCK_TOKENS]


def generate_trace(num_requests: int, *, seed: int = 0) -> Iterator[TraceRequest]:
    """Yields ``num_requests`` requests by order of arrival; the same for the same seed."""
    check_integer("num_requests", num_requests, 0)
    check_integer("seed", seed, 0)
    rng = np.random.default_rng([0x6B76, seed])
    ids = count()
    system = next(ids)
    documents = [(system, *(next(ids) for _ in range(n))) for n in DOCUMENT_BLOCKS]
    due: list[tuple[float, int, _Prompt]] = []  # conversations with a next turn, by its time
    past: list[_Prompt] = []
    now, left = 0, int(rng.poisson(REQUESTS_PER_TICK))

    for index in range(num_requests):
        while left == 0:
            now += TICK_MS
            left = int(rng.poisson(REQUESTS_PER_TICK))
        left -= 1
        if past and rng.random() < P_REPEATED:
            prompt = past[int(rng.integers(len(past)))]
        elif due and due[0][0] <= now:
            prompt = _next_turn(rng, heapq.heappop(due)[2], ids)
        else:
            prompt = _first_turn(rng, system, documents, ids)
        past.append(prompt)
        if rng.random() < P_CONTINUED:
            heapq.heappush(due, (now + _draw(rng, DELAY_MS), index, prompt))
        yield TraceRequest(
            index, float(now), prompt.input_length, _draw(rng, OUTPUT), prompt.hash_ids
        )


def _first_turn(
    rng: np.random.Generator,
    system: int,
    documents: list[tuple[int, ...]],
    ids: Iterator[int],
) -> _Prompt:
    length = _draw(rng, FIRST_INPUT)
    prefix: tuple[int, ...] = (system,)
    if rng.random() < P_DOCUMENT:
        prefix = documents[int(rng.integers(len(documents)))]
        length = min(length + len(prefix) * HASH_BLOCK_TOKENS, MAX_INPUT)
    return _extended(prefix, length, ids)


def _next_turn(rng: np.random.Generator, last: _Prompt, ids: Iterator[int]) -> _Prompt:
    length = last.input_length + _draw(rng, GROWTH)
    if length > MAX_INPUT:
        return _extended(last.hash_ids[:1], _draw(rng, FIRST_INPUT), ids)
    return _extended(last.whole_blocks, length, ids)


def _extended(prefix: tuple[int, ...], length: int, ids: Iterator[int]) -> _Prompt:
    total = -(-length // HASH_BLOCK_TOKENS)
    fresh = (next(ids) for _ in range(total - len(prefix)))
    return _Prompt(length, (*prefix, *fresh))
