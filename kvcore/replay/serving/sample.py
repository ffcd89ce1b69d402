# SPDX-License-Identifier: Apache-2.0
"""Drawing the sample: requests of all lengths, and some groups of layers of each.

The sample has a seed of its own (``sample_seed``): with another one, another sample of the same
workload is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvcore.replay.options import OffloadOptions
from kvcore.replay.traces.reader import TraceRequest

__all__ = ["GroupSample", "draw_groups", "draw_requests"]


def draw_requests(requests: Sequence[TraceRequest], options: OffloadOptions) -> list[TraceRequest]:
    """One request from each of as many classes of length as the sample has requests.

    The classes have equal sizes, to one request, so each drawn request stands for equally many.
    """
    count = min(options.sample_requests, len(requests))
    draw = np.random.default_rng([0x7361, options.sample_seed])
    ordered = sorted(requests, key=lambda request: (request.total_tokens, request.index))
    ends = np.arange(count + 1) * len(ordered) // count
    return [ordered[int(draw.integers(a, b))] for a, b in pairwise(ends.tolist())]


@dataclass(frozen=True, slots=True)
class GroupSample:
    """The sampled groups of layers of one request: their numbers, and their weights in a mean."""

    numbers: tuple[int, ...]
    weights: NDArray[np.float64]

    def mean(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """The weighted mean over the groups of rows [kinds, groups]: the mean rows of a layer."""
        found: NDArray[np.float64] = rows @ self.weights
        return found


def draw_groups(
    sizes: Sequence[int], count: int, options: OffloadOptions, index: int
) -> GroupSample:
    """Draw ``count`` groups of a request, with chances in proportion to the layers of each.

    sizes: layers of each group.  The weights undo the chances, so that the mean over the groups
    stands for the mean over the layers.
    """
    count = min(count, len(sizes))
    layers = np.array(sizes, np.float64)
    draw = np.random.default_rng([0x6C61, options.sample_seed, index])
    chance = _chances(layers, count)
    certain = np.flatnonzero(chance == 1)
    others = draw.permutation(np.flatnonzero(chance < 1))
    # Systematic sampling: take the group that each mark falls into; marks lie 1 apart.
    marks = draw.random() + np.arange(count - len(certain))
    fallen = np.searchsorted(np.cumsum(chance[others])[:-1], marks, side="right")
    chosen = np.sort(np.concatenate([certain, others[fallen]]))
    weights = layers[chosen] / chance[chosen]
    return GroupSample(tuple(chosen.tolist()), weights / weights.sum())


def _chances(layers: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Chances in proportion to the layers, none above 1, that add up to ``count``."""
    chance = np.zeros(len(layers))
    left = np.ones(len(layers), bool)
    while count:
        share = np.where(left, layers, 0.0) * count / layers[left].sum()
        certain = left & (share >= 1)
        if not certain.any():
            chance += share
            break
        chance[certain] = 1.0
        left &= ~certain
        count -= int(certain.sum())
    return chance
