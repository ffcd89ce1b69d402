# SPDX-License-Identifier: Apache-2.0
"""Made-up traces of top-k ids: one that plays an indexer, one whose steps cost top-k alone.

**Scores** (`score_trace`, step by step `ScoreIds`).  A token's score is a static part (Student-t
with 3 degrees of freedom: few tokens matter always), a part that drifts (AR(1)) and white noise;
the top-k highest are chosen.  Two numbers are fitted, rho and the size of the noise, to two
published hit rates of one trace of 2,048 ids a step: previous selection 58.85%, LRU of 8,192
entries 90.50% (cann-recipes-infer, GLM-5.2 offload guide).  The rates of other pools follow
from the model.
A step costs some ten operations a token of the context.

**Turnover** (`TurnoverIds`).  For long runs: each step keeps a given share of the last selection;
of the rest a given share comes back after having been dropped, at a given mean distance, and the
others are new.  A step costs top-k, whatever the context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import fail
from kvcore.offload.checks import check_integer

__all__ = ["ScoreIds", "ScoreModel", "TurnoverIds", "score_trace"]

MAX_TOKENS = 2**31 - 2
NEW_TRIES = 64


def _check_share(name: str, value: object, high: float = 1.0) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not 0 <= value <= high:  # type: ignore[operator]
        fail(name, f"a number from 0 to {high:g}", repr(value))
    return float(value)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class ScoreModel:
    """Sizes of the parts of a score.

    rho:      of the drifting part, from one step to the next (fitted).
    drift:    standard deviation of the drifting part; the static part has scale 1.
    noise:    standard deviation of the white noise (fitted).
    freedom:  degrees of freedom of the static part.
    """

    rho: float = 0.955
    drift: float = 1.0
    noise: float = 0.885
    freedom: float = 3.0

    def __post_init__(self) -> None:
        _check_share("rho", self.rho)
        for name in ("drift", "noise"):
            _check_share(name, getattr(self, name), 1e6)
        _check_share("freedom", self.freedom, 1e6)
        if not self.freedom > 0:
            fail("freedom", "more than 0", self.freedom)


def score_trace(
    steps: int,
    *,
    layers: int = 1,
    tokens: int = 65_536,
    topk: int = 2048,
    seed: int = 0,
    model: ScoreModel | None = None,
) -> NDArray[np.int32]:
    """int32 [steps, layers, topk], ids ascending; layers are independent of one another.

    Equal arguments give equal ids on every machine, as far as numpy's generators do.
    """
    check_integer("steps", steps, 1, 2**31)
    check_integer("layers", layers, 1, 4096)
    check_integer("tokens", tokens, 1, MAX_TOKENS)
    check_integer("topk", topk, 1, tokens)
    check_integer("seed", seed, 0)
    model = ScoreModel() if model is None else model
    if not isinstance(model, ScoreModel):
        fail("model", "a ScoreModel", type(model).__name__)
    ids = np.empty((steps, layers, topk), np.int32)
    fresh_share = np.float32(model.drift * math.sqrt(1 - model.rho**2))
    rho, noise = np.float32(model.rho), np.float32(model.noise)
    white = np.empty(tokens, np.float32)
    score = np.empty(tokens, np.float32)
    for layer in range(layers):
        draw = np.random.default_rng([seed, layer])
        static = draw.standard_t(model.freedom, tokens).astype(np.float32)
        drift = draw.standard_normal(tokens, np.float32) * np.float32(model.drift)
        for step in range(steps):
            draw.standard_normal(dtype=np.float32, out=white)
            drift *= rho
            white *= fresh_share
            drift += white
            draw.standard_normal(dtype=np.float32, out=white)
            np.multiply(white, noise, out=score)
            score += drift
            score += static
            chosen = np.argpartition(score, tokens - topk)[tokens - topk :]
            chosen.sort()
            ids[step, layer] = chosen
    return ids


class ScoreIds:
    """The indexer of `score_trace`, one call a step: the context may grow or shrink between calls.

    topk: ids a step; model: see `ScoreModel`.
    The parts of a token's score are drawn when the token is first seen.
    """

    def __init__(self, topk: int = 2048, *, model: ScoreModel | None = None, seed: int = 0) -> None:
        check_integer("topk", topk, 1, MAX_TOKENS)
        check_integer("seed", seed, 0)
        self.topk = topk
        self.model: ScoreModel = ScoreModel() if model is None else model
        if not isinstance(self.model, ScoreModel):
            fail("model", "a ScoreModel", type(self.model).__name__)
        self._draw = np.random.default_rng(seed)
        self._static, self._drift = np.zeros((2, 0), np.float32)
        self._fresh = np.float32(self.model.drift * math.sqrt(1 - self.model.rho**2))

    def next(self, num_tokens: int) -> NDArray[np.int32]:
        """int32 [topk], ascending, for a context of ``num_tokens``.

        Up to top-k tokens, all of them are wanted, and -1 fills the rest.
        """
        check_integer("num_tokens", num_tokens, 0, MAX_TOKENS)
        if num_tokens <= self.topk:
            ids = np.full(self.topk, -1, np.int32)
            ids[:num_tokens] = np.arange(num_tokens)
            return ids
        self._grow(num_tokens)
        draw, model = self._draw, self.model
        drift = self._drift[:num_tokens]
        drift *= np.float32(model.rho)
        drift += draw.standard_normal(num_tokens, np.float32) * self._fresh
        score = draw.standard_normal(num_tokens, np.float32)
        score *= np.float32(model.noise)
        score += drift
        score += self._static[:num_tokens]
        chosen = np.argpartition(score, num_tokens - self.topk)[num_tokens - self.topk :]
        chosen.sort()
        return chosen.astype(np.int32)

    def _grow(self, num_tokens: int) -> None:
        more = num_tokens - len(self._static)
        if more <= 0:
            return
        # (a little ahead, so that a context that grows by a token a step is not copied each time)
        more += min(1024, MAX_TOKENS - num_tokens)
        draw, model = self._draw, self.model
        static = draw.standard_t(model.freedom, more).astype(np.float32)
        drift = draw.standard_normal(more, np.float32) * np.float32(model.drift)
        self._static = np.concatenate([self._static, static])
        self._drift = np.concatenate([self._drift, drift])


class _Dropped:
    """The ids that each of the last ``depth`` steps dropped, one step behind another in ``ids``."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self.ids: NDArray[np.int32] = np.empty(0, np.int32)
        self._starts: list[int] = []
        self._end = 0

    def add(self, ids: NDArray[np.int32]) -> None:
        """A step has dropped these."""
        if self._end + len(ids) > len(self.ids):
            first = self._starts[0] if self._starts else 0
            kept = self.ids[first : self._end]
            # Twice what is held, so that it is moved once in as many steps as are kept.
            self.ids = np.empty(2 * (len(kept) + len(ids)), np.int32)
            self.ids[: len(kept)] = kept
            self._starts = [start - first for start in self._starts]
            self._end = len(kept)
        self._starts.append(self._end)
        self.ids[self._end : self._end + len(ids)] = ids
        self._end += len(ids)
        del self._starts[: -self._depth]

    def clear(self) -> None:
        """Forget all steps."""
        self._starts.clear()
        self._end = 0

    def by_age(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where in ``ids`` the ids of a step begin and how many there are, the last step at 1."""
        starts = np.array([*self._starts, self._end], np.int64)
        sizes = np.diff(starts, append=self._end)
        return starts[::-1], sizes[::-1]


class TurnoverIds:
    """Selections with a given overlap and reuse, one call a step.

    topk:     ids a step.
    overlap:  share of the last selection that stays, exactly (rounded to whole ids; more where
              the context has no others).
    reuse:    share of the others that are drawn from what was dropped before; fewer come back,
              see ``distance``.
    distance: mean number of steps between being dropped and such a return (geometric, at least
              1).  A drawn id that is wanted already, or was dropped this step, is replaced by a
              new one.
    New ids are uniform over the context and are neither wanted nor dropped this step.

    The defaults give, over 65,536 tokens, the rates of the page on offloading.
    """

    def __init__(
        self,
        topk: int = 2048,
        *,
        overlap: float = 0.5885,
        reuse: float = 1.0,
        distance: float = 6.0,
        seed: int = 0,
    ) -> None:
        check_integer("topk", topk, 1, MAX_TOKENS)
        check_integer("seed", seed, 0)
        self.topk = topk
        self.overlap: float = _check_share("overlap", overlap)
        self.reuse: float = _check_share("reuse", reuse)
        self.distance: float = _check_share("distance", distance, 1e6)
        if self.distance < 1:
            fail("distance", "at least 1 step", distance)
        self._draw = np.random.default_rng(seed)
        self._last = np.empty(0, np.int32)
        # Kept long enough for all but e^-6 of the draws.
        self._dropped = _Dropped(math.ceil(6 * self.distance))
        self._taken = np.zeros(0, bool)

    def next(self, num_tokens: int) -> NDArray[np.int32]:
        """int32 [topk] for a context of ``num_tokens``, which may grow or shrink between calls.

        Up to top-k tokens, all of them are wanted, and -1 fills the rest.
        """
        check_integer("num_tokens", num_tokens, 0, MAX_TOKENS)
        if num_tokens <= self.topk:
            ids = np.full(self.topk, -1, np.int32)
            ids[:num_tokens] = np.arange(num_tokens)
            self._last = ids[:num_tokens].copy()
            self._dropped.clear()
            return ids
        if len(self._taken) < num_tokens:
            self._taken = np.zeros(max(num_tokens, 2 * len(self._taken)), bool)
        last = self._last[self._last < num_tokens]
        order = self._draw.permutation(len(last))
        # Of a context hardly larger than top-k more has to stay.
        stay = max(round(self.overlap * self.topk), self.topk - (num_tokens - len(last)))
        stay = min(stay, len(last))
        kept, gone = last[order[:stay]], last[order[stay:]]
        self._taken[last] = True
        found = [kept, self._returning(self.topk - stay, num_tokens)]
        missing = self.topk - sum(map(len, found))
        found.append(self._new(missing, num_tokens))
        ids = np.concatenate(found)
        self._taken[last] = False
        self._taken[ids] = False
        self._dropped.add(gone)
        self._last = ids
        return ids.copy()

    def go_on_from(self, ids: NDArray[np.int32]) -> None:
        """Take ``ids``, each once, as the last selection: what was in the one before is dropped."""
        gone = np.setdiff1d(self._last, ids)
        if len(gone):
            self._dropped.add(gone)
        self._last = np.asarray(ids, np.int32)

    def _returning(self, count: int, num_tokens: int) -> NDArray[np.int32]:
        draw = self._draw
        count = int(draw.binomial(count, self.reuse))
        ages = draw.geometric(1 / self.distance, count)
        starts, sizes = self._dropped.by_age()
        ages = ages[ages < len(sizes)]
        ages = ages[sizes[ages] > 0]
        if not len(ages):
            return np.empty(0, np.int32)
        picked = self._dropped.ids[starts[ages] + draw.integers(0, sizes[ages])]
        return self._take(picked, num_tokens)

    def _new(self, count: int, num_tokens: int) -> NDArray[np.int32]:
        found: list[NDArray[np.int32]] = []
        # At least half of the context is free: a handful of rounds.
        for _ in range(NEW_TRIES if num_tokens >= 4 * self.topk else 0):
            if not count:
                break
            ids = self._draw.integers(0, num_tokens, count, np.int32)
            found.append(self._take(ids, num_tokens))
            count -= len(found[-1])
        if count:
            # A context of less than four top-k: look at all of it.
            open_ = np.flatnonzero(~self._taken[:num_tokens]).astype(np.int32)
            found.append(self._take(self._draw.permutation(open_)[:count], num_tokens))
        return np.concatenate(found) if found else np.empty(0, np.int32)

    def _take(self, ids: NDArray[np.int32], num_tokens: int) -> NDArray[np.int32]:
        """Those of the ids that are free, each once; taken from now on."""
        ids = ids[ids < num_tokens]
        ids = ids[~self._taken[ids]]
        ids.sort()
        if len(ids):  # (numpy.unique does the same, through a table)
            first = np.empty(len(ids), bool)
            first[0] = True
            np.not_equal(ids[1:], ids[:-1], out=first[1:])
            ids = ids[first]
        self._taken[ids] = True
        return ids
