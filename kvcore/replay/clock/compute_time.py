# SPDX-License-Identifier: Apache-2.0
"""How long a decode step computes, by a deployment's figures: contexts in, microseconds out.

By the linear figures of its model ``step_fixed + sum over requests of (step_request
+ step_attended * min(context, top-k) + step_indexed * context)``; the parts of a request grow with
the tokens that it writes in a step, where the drafts differ from those of the figures.  A
deployment with a table of measured steps takes the table's time at the batch and the mean context
instead; its steps include the drafts of the figures.  The time of moving rows is not in either
(`StepClock`, `InOrderClock`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcore.replay.deployments.deployment import Deployment
from kvcore.replay.deployments.step_table import StepTable
from kvcore.replay.models.profile import STEP, ModelProfile

__all__ = ["ComputeParts", "ComputeTime", "RunParts"]


class ComputeTime:
    """The compute time of steps of a model; one without a top-k attends to all its tokens.

    deployment: a deployment, or a model alone for its linear figures.
    drafts: draft tokens of each request a step.
    beyond: how far outside the table the steps were so far, as the largest ratio to its nearest
            end in batch and in context; (1, 1): all of them inside.
    Raises ParamInvalidError naming a figure that the model lacks.
    """

    def __init__(self, deployment: Deployment | ModelProfile, drafts: int) -> None:
        model = deployment.model if isinstance(deployment, Deployment) else deployment
        self.table: StepTable | None = (
            deployment.table if isinstance(deployment, Deployment) else None
        )
        self.beyond: tuple[float, float] = (1.0, 1.0)
        self._topk = model.topk
        # A table holds whole steps, so more drafts scale its batch as they scale a request's part.
        self._scale = (1 + drafts) / (1 + int(_number(model, "step_drafts")))
        if self.table is not None:
            return
        model.step_us(1, 1)  # raises the error that names what is missing
        self._figures = {key: (_number(model, key), model[key].basis == "assumed") for key in STEP}

    def of(self, contexts: NDArray[np.int64]) -> ComputeParts:
        """The parts of a step's time.

        contexts: int64 [batch] tokens that each request has.
        """
        if self.table is not None:
            return self._of_table(contexts)
        scale = self._scale
        attended = np.minimum(contexts, self._topk) if self._topk else contexts
        times = {
            "step_fixed": 1.0,
            "step_request": len(contexts) * scale,
            "step_attended": float(attended.sum()) * scale,
            "step_indexed": float(contexts.sum()) * scale if self._topk else 0.0,
        }
        parts = [(figure * times[key], assumed) for key, (figure, assumed) in self._figures.items()]
        return ComputeParts(parts)

    def of_steps(self, contexts: NDArray[np.int64]) -> RunParts:
        """The parts of many steps' times; `beyond` does not move (see `note`).

        contexts: int64 [steps, batch].
        """
        count, batch = contexts.shape
        if self.table is not None:
            means = contexts.sum(axis=1) / max(1, batch)
            at = [self.table.at(batch * self._scale, context) for context in means.tolist()]
            return RunParts([(np.array(at), self.table.basis == "assumed")])
        scale = self._scale
        attended = np.minimum(contexts, self._topk) if self._topk else contexts
        indexed = contexts.sum(axis=1) * scale if self._topk else np.zeros(count)
        times = {
            "step_fixed": np.ones(count),
            "step_request": np.full(count, batch * scale),
            "step_attended": attended.sum(axis=1) * scale,
            "step_indexed": indexed,
        }
        parts = [(figure * times[key], assumed) for key, (figure, assumed) in self._figures.items()]
        return RunParts(parts)

    def note(self, contexts: NDArray[np.int64]) -> None:
        """Note how far outside the table a run of steps is, by its first and its last step.

        contexts: int64 [steps, batch] tokens of each request, which only grow.
        """
        if self.table is not None:
            for each in contexts[[0, -1]]:
                self._of_table(each)

    def _of_table(self, contexts: NDArray[np.int64]) -> ComputeParts:
        assert self.table is not None
        batch = len(contexts)
        context = float(contexts.sum()) / batch if batch else 0.0
        batches, lengths = self.table.beyond(batch, context)
        self.beyond = max(self.beyond[0], batches), max(self.beyond[1], lengths)
        us = self.table.at(batch * self._scale, context)
        return ComputeParts([(us, self.table.basis == "assumed")])


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


class RunParts:
    """Microseconds of many steps by figure: (us [steps], whether the figure is assumed)."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[tuple[NDArray[np.float64], bool]]) -> None:
        self._parts = parts

    @property
    def us(self) -> NDArray[np.float64]:
        """All of them together, in the order of `ComputeParts.us`."""
        total = np.zeros(len(self._parts[0][0]))
        for us, _ in self._parts:
            total += us
        return total

    @property
    def assumed(self) -> list[NDArray[np.float64]]:
        """Those that rest on an assumed figure."""
        return [us for us, assumed in self._parts if assumed]


def _number(model: ModelProfile, key: str) -> float:
    value = model[key].value
    assert isinstance(value, int | float)
    return value
