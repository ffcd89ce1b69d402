# SPDX-License-Identifier: Apache-2.0
"""How long a decode step computes, by the figures of a model: contexts in, microseconds out.

``step_fixed + sum over requests of (step_request + step_attended * min(context, top-k)
+ step_indexed * context)``; the parts of a request grow with the tokens that it writes in a step,
when drafts are not as many as the figures are of.  Moving rows is not in it (`StepClock`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcore.replay.models.profile import ModelProfile

__all__ = ["ComputeParts", "ComputeTime"]


class ComputeTime:
    """The compute time of steps of a model with a top-k.

    drafts: draft tokens of each request a step.
    Raises ParamInvalidError naming a figure that the model lacks.
    """

    def __init__(self, model: ModelProfile, drafts: int) -> None:
        model.step_us(1, 1)  # raises the error that names what is missing
        self._topk = model.topk
        self._scale = (1 + drafts) / (1 + int(_number(model, "step_drafts")))
        self._figures = {
            key: (_number(model, key), model[key].basis == "assumed")
            for key in ("step_fixed", "step_request", "step_attended", "step_indexed")
        }

    def of(self, contexts: NDArray[np.int64]) -> ComputeParts:
        """The parts of a step's time.

        contexts: int64 [batch] tokens that each request has.
        """
        scale = self._scale
        times = {
            "step_fixed": 1.0,
            "step_request": len(contexts) * scale,
            "step_attended": float(np.minimum(contexts, self._topk).sum()) * scale,
            "step_indexed": float(contexts.sum()) * scale,
        }
        parts = [(figure * times[key], assumed) for key, (figure, assumed) in self._figures.items()]
        return ComputeParts(parts)


class ComputeParts:
    """Microseconds of a step by figure: (us, whether the figure is assumed)."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[tuple[float, bool]]) -> None:
        self._parts = parts

    @property
    def us(self) -> float:
        """All of them together."""
        total = 0.0  # (one by one, so that the same figures give the same bits on any Python)
        for us, _ in self._parts:
            total += us
        return total

    @property
    def assumed(self) -> tuple[float, ...]:
        """Those that rest on an assumed figure."""
        return tuple(us for us, assumed in self._parts if assumed)


def _number(model: ModelProfile, key: str) -> float:
    value = model[key].value
    assert isinstance(value, int | float)
    return value
