# SPDX-License-Identifier: Apache-2.0
"""Every conformance case through the backend and the double, on each SoC that has it."""

from __future__ import annotations

import numpy as np
import pytest
from double.direct import Double
from npu_fixtures import a3 as a3
from npu_fixtures import machine as machine

import conformance_cases
import npu as calls
import oracle
from kvcore.errors import ParamInvalidError
from kvcore.npu import options

NAMES = conformance_cases.NAMES
#: What the SoC table refuses, by the beginning of a name.
REFUSED = {
    "A2": ("s1_nz4_fp4", "s2_norm_fp32", "s2_norm_fp4", "s2_norm_fp8", "s3_"),
    "950": ("g_", "kv_", "s6_", "s7_"),
}
#: What its kernels are known to do wrong silently: refused unless that is passed over.
QUIRKS = {
    "A2": ("g_bsnd_", "g_int8_", "p_nz_fp16_offset", "s4_", "s5_"),
    "950": (),
}
REFUSED["A3"], QUIRKS["A3"] = REFUSED["A2"], QUIRKS["A2"]


def check(name: str, check_values: str = "host") -> None:
    case = conformance_cases.as_documented(conformance_cases.load(name))
    words = ("strides", "offsets", "dtype", "value_dtype", *conformance_cases.OPTIONS)
    arrays = {k: v for k, v in case.arguments.items() if k not in words}
    given = {k: v for k, v in case.arguments.items() if k in words}
    want = oracle.run(case.operator, case.arguments)
    before = {k: np.array(v) for k, v in arrays.items() if v is not None}
    with options.use_options(quirks="pass", check=check_values):
        seen = calls.run(case.operator, arrays, **given)
    expected = dict(case.expected)
    if case.operator == "gather_selection_kv_cache":
        expected["returned"] = expected.pop("selection_kv_actual_seq")
    for argument, right in expected.items():
        bits = oracle.bits(seen[argument])
        free = want.unspecified.get(argument, np.zeros(bits.shape, bool))
        np.testing.assert_array_equal(
            np.where(free, 0, bits), np.where(free, 0, oracle.bits(right)), err_msg=argument
        )
    for argument, array in before.items():
        if argument not in expected:
            np.testing.assert_array_equal(oracle.bits(seen[argument]), oracle.bits(array))


@pytest.mark.parametrize("name", NAMES)
def test_case(machine: str, double: Double, name: str) -> None:
    if name.startswith(REFUSED[machine]):
        with pytest.raises(ParamInvalidError, match=machine):
            check(name)
        assert not [call for call in double.calls() if call.startswith("aclnn")]
        return
    if name.startswith(QUIRKS[machine]):
        case = conformance_cases.as_documented(conformance_cases.load(name))
        arrays = {k: v for k, v in case.arguments.items() if isinstance(v, np.ndarray)}
        with pytest.raises(ParamInvalidError, match=f"kernels of {machine} do right"):
            calls.run(case.operator, arrays, **_words(case))
        assert not [call for call in double.calls() if call.startswith("aclnn")]
    check(name)


def _words(case: conformance_cases.ConformanceCase) -> dict[str, object]:
    return {
        k: v for k, v in case.arguments.items() if not isinstance(v, np.ndarray) and v is not None
    }


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(REFUSED["A2"])])
def test_case_with_values_checked_on_the_device(a3: Double, name: str) -> None:
    check(name, check_values="device")
