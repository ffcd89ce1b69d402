# SPDX-License-Identifier: Apache-2.0
"""The generated calls of test_against_oracle.py on the NPU: right bytes, or a refusal with reason.

Legal calls end in the oracle's bytes, unless the SoC's table refuses them (as the same table of
the CPU's ``soc=`` does), or they need what NPUs do not have (``BEYOND``).  Illegal calls raise a
typed error and reach no kernel.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from double.direct import Double
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from npu_oracle import nct_sources, on_npu

import kvcore
import strategies
from cases import Case, IllegalCase, check_matches_oracle
from kvcore.errors import KVCoreError, KVPortabilityWarning, ParamInvalidError
from kvcore.npu.call import launch
from kvcore.npu.cann import library
from npu import MACHINES
from strategies_selection import SelectionSequence

few = settings(max_examples=15, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
ways = st.fixed_dictionaries(
    {
        "check": st.sampled_from(["host", "device"]),
        "planned": st.booleans(),
        "host": st.booleans(),
        "dense": st.sampled_from([True, True, False]),
    }
)
SHORT = ("float16", "bfloat16", "int8")

#: Refusals of legal calls that are the NPU's alone: docs/aclnn.md has them.
BEYOND = re.compile(
    "contiguous array|may be strided|few strided pieces"  # strides that kernels ignore
    "|whole elements|begins on 32 bytes"  # views that begin within an element
    "|in both key and value, or in none"
    "|that holds \\[T, H, D\\]|device memory with Nct"
    "|a dtype that ACL has|on an NPU"
)


@pytest.fixture(scope="module")
def ends() -> Iterator[Counter[str]]:
    """How the legal calls ended: many must have run."""
    found: Counter[str] = Counter()
    yield found
    assert found["right"] >= 25, found


@pytest.fixture
def npu(double: Double) -> Iterator[Double]:
    library.forget()
    yield double
    launch.release(None, 0)
    library.forget()
    assert double.live() == 0, double.live_text()


def soc(double: Double, name: str) -> None:
    double.soc(MACHINES[name])
    launch.release(None, 0)
    library.forget()


def check(case: Case, name: str, ends: Counter[str], **way: Any) -> None:
    before = case.arena.snapshot()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KVPortabilityWarning)
        try:
            check_matches_oracle(case, on_npu(case.operator, **way), stats=False)
            ends["right"] += 1
            return
        except ParamInvalidError as error:
            refused = error
        case.arena.assert_untouched(before)
        ends["refused"] += 1
        if BEYOND.search(str(refused)):
            return
        arguments = dict(case.arguments)
        if way["dense"]:
            kept = nct_sources(arguments)
            arguments |= {
                n: np.array(array, order="C") for n, array in case.arrays().items() if n not in kept
            }
        with pytest.raises(ParamInvalidError) as told:
            getattr(kvcore, f"plan_{case.operator}")(**arguments, soc=name).check_values()
    seen = [(error.argument, error.expected) for error in (refused, told.value)]
    assert seen[0] == seen[1]


@pytest.mark.parametrize("scenario", range(1, 8))
@few
@given(data=st.data(), way=ways)
def test_scatter(
    npu: Double, ends: Counter[str], scenario: int, data: st.DataObject, way: dict[str, Any]
) -> None:
    name = (
        "950"
        if scenario == 3
        else "A3"
        if scenario > 5
        else data.draw(st.sampled_from(["A2", "950"]))
    )
    soc(npu, name)
    given: dict[str, Any] = {"scenarios": (scenario,)}
    if name != "950":
        given["dtypes"] = SHORT[: 3 if scenario not in (5, 7) else 2]
    check(data.draw(strategies.scatter_cases(**given)), name, ends, **way)


@few
@given(case=strategies.scatter_pa_cache_cases(), way=ways)
def test_scatter_pa_cache(npu: Double, ends: Counter[str], case: Case, way: dict[str, Any]) -> None:
    soc(npu, "950")
    check(case, "950", ends, **way)


@few
@given(case=strategies.kv_cache_update_cases(), way=ways)
def test_kv_cache_update(npu: Double, ends: Counter[str], case: Case, way: dict[str, Any]) -> None:
    soc(npu, "A2")
    check(case, "A2", ends, **way)


@few
@given(data=st.data(), name=st.sampled_from(["A3", "950"]), way=ways)
def test_gather_pa(
    npu: Double, ends: Counter[str], data: st.DataObject, name: str, way: dict[str, Any]
) -> None:
    soc(npu, name)
    given: dict[str, Any] = {} if name == "950" else {"dtypes": SHORT}
    check(data.draw(strategies.gather_pa_cases(**given)), name, ends, **way)


@few
@given(sequence=strategies.selection_sequences(), way=ways)
def test_gather_selection(
    npu: Double, ends: Counter[str], sequence: SelectionSequence, way: dict[str, Any]
) -> None:
    soc(npu, "A3")
    for case in sequence.steps():
        check(case, "A3", ends, **way)


def test_the_mode_of_a_4d_key_is_passed_on(npu: Double) -> None:
    """Omni drops the window that Rope folds; both have the same arrays."""
    soc(npu, "950")
    for mode in ("Omni", "Rope", None):
        arrays = {
            "key": np.arange(6 * 16, dtype=np.float16).reshape(1, 6, 1, 16),
            "value": np.arange(6 * 16, dtype=np.float16).reshape(1, 6, 1, 16),
            "key_cache": np.zeros((2, 4, 1, 16), np.float16),
            "value_cache": np.zeros((2, 4, 1, 16), np.float16),
            "slot_mapping": np.zeros((1, 1), np.int32),
            "compress_lens": np.full((1, 1), 3, np.int32),
            "compress_seq_offset": np.ones(1, np.int32),
            "seq_lens": np.full(1, 6, np.int32),
        }
        want = {name: array.copy() for name, array in arrays.items()}
        kvcore.scatter_pa_kv_cache(**want, scatter_mode=mode)
        on_npu("scatter_pa_kv_cache")(**arrays, scatter_mode=mode)
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, want[name])


def test_strides_of_axes_of_one_mean_nothing(npu: Double) -> None:
    soc(npu, "A3")
    pages = np.zeros((2, 4, 1, 16), np.float16)
    odd = np.lib.stride_tricks.as_strided(pages, pages.shape, (128, 32, -6, 2))
    on_npu("scatter_pa_kv_cache")(
        key=np.ones((1, 1, 16), np.float16),
        key_cache=odd,
        slot_mapping=np.array([5], np.int32),
    )
    assert pages.reshape(8, 16)[5].all()


def test_strides_of_half_an_element_are_copied_or_refused(npu: Double) -> None:
    soc(npu, "950")
    keys = np.ndarray((2, 1, 16), np.float16, np.arange(66, dtype=np.uint8), 0, (33, 33, 2))
    pages = np.zeros((2, 4, 1, 16), np.float16)
    given = {"slot_mapping": np.array([5, 0], np.int32), "value": keys.copy()}
    given["value_cache"] = pages.copy()
    want = pages.copy()
    kvcore.scatter_pa_kv_cache(key=keys, key_cache=want, **given)
    on_npu("scatter_pa_kv_cache")(key=keys, key_cache=pages, **given)
    np.testing.assert_array_equal(pages.view(np.uint16), want.view(np.uint16))
    odd = np.ndarray(
        (2, 4, 1, 16), np.float16, np.zeros(2 * 129 + 2, np.uint8), 0, (129, 32, 32, 2)
    )
    with pytest.raises(ParamInvalidError, match=r"key_cache: .* by whole elements, on 950"):
        on_npu("scatter_pa_kv_cache")(key=keys, key_cache=odd, **given)


def test_caches_without_slots_are_no_call(npu: Double) -> None:
    soc(npu, "A3")
    on_npu("scatter_pa_kv_cache")(
        key=np.ones((0, 1, 16), np.float16),
        key_cache=np.zeros((0, 4, 1, 16), np.float16),
        slot_mapping=np.zeros(0, np.int32),
    )
    assert npu.num_calls("aclCreateTensor") == 0


ILLEGAL = {
    "scatter": strategies.illegal_scatter_cases(),
    "scatter_pa_cache": strategies.illegal_scatter_pa_cache_cases(),
    "kv_cache_update": strategies.illegal_kv_cache_update_cases(),
    "gather_pa": strategies.illegal_gather_pa_cases(),
    "gather_selection": strategies.illegal_gather_selection_cases(),
}


@pytest.mark.parametrize("operator", ILLEGAL)
@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(data=st.data(), planned=st.booleans(), host=st.booleans())
def test_what_is_refused(
    npu: Double, operator: str, data: st.DataObject, planned: bool, host: bool
) -> None:
    soc(npu, "950" if operator == "scatter_pa_cache" else "A3")
    illegal: IllegalCase = data.draw(ILLEGAL[operator])
    case = illegal.case
    before, launched = case.arena.snapshot(), npu.num_calls("aclCreateTensor")
    with pytest.raises(KVCoreError) as caught:
        on_npu(case.operator, planned=planned, host=host)(**case.arguments)
    error = caught.value
    case.arena.assert_untouched(before)
    assert npu.num_calls("aclCreateTensor") == launched
    assert error.argument
    assert ": expected " in str(error)
    if error.argument not in illegal.may_blame():
        assert re.search(" on (A3|950)", str(error)) or BEYOND.search(str(error)), error
