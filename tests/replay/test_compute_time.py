# SPDX-License-Identifier: Apache-2.0
"""The compute time of a step, against the sum worked out request by request."""

from __future__ import annotations

import numpy as np
import pytest

from kvcore.errors import ParamInvalidError
from kvcore.replay import ModelProfile
from kvcore.replay.clock.compute_time import ComputeTime


@pytest.mark.parametrize("name", ["glm-5.2", "deepseek-v3.2", "tiny-sparse"])
@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_it_is_the_sum_over_the_requests(name: str, drafts: int) -> None:
    model = ModelProfile.named(name)
    contexts = [1, 100, model.topk - 1, model.topk, 65_536]
    parts = ComputeTime(model, drafts).of(np.array(contexts))
    us, assumed = parts.us, sum(parts.assumed)
    each = [model.step_us(1, context, drafts) - model.step_us(0, 0, drafts) for context in contexts]
    assert us == pytest.approx(model.step_us(0, 0, drafts) + sum(each), rel=1e-12)
    assert 0 <= assumed <= us
    alone = ComputeTime(model, drafts).of(np.array([], np.int64)).us
    assert alone == model.step_fixed_us()


def test_what_is_assumed_is_counted_by_figure() -> None:
    model = ModelProfile.named("tiny-sparse")
    keys = ("step_fixed", "step_request", "step_attended", "step_indexed")
    given = model.replace(basis="measured", **dict.fromkeys(keys, 2.0))
    contexts = np.array([10, 1000])
    step = ComputeTime(given, 0).of(contexts)
    assert step.assumed == ()
    attended = 10 + min(1000, model.topk)
    parts = dict(zip(keys, (2.0, 4.0, 2.0 * attended, 2.0 * 1010), strict=True))
    assert step.us == pytest.approx(sum(parts.values()))
    for key in keys:
        one = given.replace(**{key: 2.0})  # assumed
        assert ComputeTime(one, 0).of(contexts).assumed == (pytest.approx(parts[key]),)


def test_a_figure_that_is_missing_is_named() -> None:
    model = ModelProfile.named("tiny-sparse")
    figures = {key: figure for key, figure in model.figures.items() if key != "step_request"}
    with pytest.raises(ParamInvalidError, match=r"step_request: expected a figure of mine"):
        ComputeTime(ModelProfile("mine", figures), 0)
