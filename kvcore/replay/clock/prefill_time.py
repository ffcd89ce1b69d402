# SPDX-License-Identifier: Apache-2.0
"""How long prompts compute: the prompt tokens of a step in, microseconds out.

The time follows from a rate of tokens a second, or from a model's own figures: ``sum over tokens of
(prefill_token + prefill_attended * tokens before it)``.  Tokens found in a cache are not computed,
but later tokens attend to them.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcore.replay.models.profile import PREFILL, ModelProfile
from kvcore.replay.options import PREFILL_TOKENS_PER_S

__all__ = ["PrefillTime", "by_figures"]


def by_figures(model: ModelProfile, rate: float | None) -> bool:
    """Whether a model's own figures give the time of prompts: it has them, and no rate is given."""
    return rate == PREFILL_TOKENS_PER_S and all(key in model.figures for key in PREFILL)


class PrefillTime:
    """The compute time of prompt tokens.

    rate: tokens a second; the default rate gives way to the figures of a model that has them.
    """

    def __init__(self, model: ModelProfile, rate: float) -> None:
        self._rate = rate
        self._figures: tuple[float, ...] = ()
        if by_figures(model, rate):
            self._figures = tuple(float(str(model[key].value)) for key in PREFILL)

    def of(self, parts: Iterable[tuple[int, int]]) -> float:
        """Microseconds of the parts of prompts: (tokens before it, its tokens)."""
        tokens = before = 0
        for start, count in parts:
            tokens += count
            before += count * start + count * (count - 1) // 2
        if not self._figures:
            return tokens / self._rate * 1e6
        token, attended = self._figures
        return tokens * token + before * attended
