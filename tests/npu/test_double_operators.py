# SPDX-License-Identifier: Apache-2.0
"""The double's operators, called by hand, against the conformance cases and the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from double.direct import Double, Refused
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import conformance_cases
import oracle
import strategies
from oracle_scatter import memory_behind

A2, A3, A950 = "Ascend910B3", "Ascend910_9391", "Ascend950PR_9599"
few = settings(max_examples=20, suppress_health_check=list(HealthCheck))

#: Which SoC has a conformance case; of the others' refusals test_double.py tells.
ONLY_950 = ("fp32", "fp4", "fp8", "s3_")
NOT_950 = ("s6_", "s7_", "g_")
CASES = [
    (name, soc)
    for name in conformance_cases.NAMES
    for soc in (A2, A3, A950)
    if not name.startswith("kv_")
    and not (soc == A950 and name.startswith(NOT_950))
    and not (soc != A950 and any(part in name for part in ONLY_950))
]


def check(double: Double, operator: str, arguments: dict[str, Any]) -> None:
    want = oracle.run(operator, arguments)
    plain = {
        k: np.array(v) if isinstance(v, np.ndarray) and np.ndim(v) else v
        for k, v in arguments.items()
    }
    if arguments.get("scatter_mode") == "Nct" and arguments.get("cache_mode") != "PA_NZ":
        # The fused buffer from its first element on, and what is passed for None.
        for name in ("key", "value"):
            if np.ndim(plain.get(name)):
                plain[name] = np.array(memory_behind(arguments[name]))
        plain = {"strides": (1, 1), "offsets": (0, 0)} | plain
    seen = double.run(operator, plain)
    for name, array in want.outputs.items():
        free = want.unspecified.get(name, np.zeros(array.shape, bool))
        any_nan = want.any_nan.get(name)
        if any_nan is not None:
            free = free | any_nan
        np.testing.assert_array_equal(
            np.where(free, 0, oracle.bits(seen[name])), np.where(free, 0, oracle.bits(array)), name
        )
    if operator == "gather_selection_kv_cache":
        np.testing.assert_array_equal(seen["returned"], want.returned)
    for name in set(seen) - set(want.outputs) - {"returned"}:
        if (
            isinstance(plain.get(name), np.ndarray)
            and np.size(plain[name])
            and np.ndim(plain[name])
        ):
            np.testing.assert_array_equal(
                oracle.bits(seen[name]), oracle.bits(plain[name]), f"{name} was written"
            )


@pytest.mark.parametrize(("name", "soc"), CASES)
def test_conformance(double: Double, name: str, soc: str) -> None:
    double.soc(soc)
    case = conformance_cases.load(name)
    want = oracle.run(case.operator, case.arguments)
    seen = double.run(case.operator, case.arguments)
    for argument, expected in case.expected.items():
        key = "returned" if argument == "selection_kv_actual_seq" else argument
        free = want.unspecified.get(argument, np.zeros(expected.shape, bool))
        np.testing.assert_array_equal(
            np.where(free, 0, oracle.bits(seen[key])),
            np.where(free, 0, oracle.bits(expected)),
            argument,
        )
    assert double.live() == 0


def is_describable(arguments: dict[str, Any]) -> bool:
    """False for a fused buffer too short to hold the [T, H, D] that Nct wants described."""
    if arguments.get("scatter_mode") != "Nct" or arguments.get("cache_mode") == "PA_NZ":
        return True
    tokens = len(arguments["slot_mapping"])
    lanes = [n for n in ("key", "value") if np.ndim(arguments.get(n)) > 0]
    return all(
        memory_behind(arguments[n]).size >= tokens * int(np.prod(arguments[f"{n}_cache"].shape[2:]))
        for n in lanes
    )


def drawn(double: Double, case: Any, soc: str) -> None:
    double.soc(soc)
    assume(case.operator != "scatter_pa_kv_cache" or is_describable(case.arguments))
    try:
        check(double, case.operator, case.arguments)
    except Refused as refused:
        if refused.code not in (161002, 561002):
            raise
        assume(False)  # a rule of that SoC, not of the operator


@pytest.mark.parametrize("scenario", range(1, 8))
@few
@given(data=st.data())
def test_scatter(double: Double, scenario: int, data: st.DataObject) -> None:
    soc = A950 if scenario == 3 else A3 if scenario > 5 else data.draw(st.sampled_from([A2, A950]))
    dtypes = ("float16", "bfloat16") + (() if scenario in (5, 7) else ("int8",))
    if soc == A950 and scenario in (1, 2, 3):
        dtypes += ("float32", "hifloat8", "float8_e5m2", "float8_e4m3fn", "uint8", "int32")
    drawn(double, data.draw(strategies.scatter_cases(scenarios=(scenario,), dtypes=dtypes)), soc)


@few
@given(data=st.data())
def test_scatter_pa_cache(double: Double, data: st.DataObject) -> None:
    drawn(double, data.draw(strategies.scatter_pa_cache_cases()), A950)


@pytest.mark.parametrize("soc", [A3, A950])
@few
@given(data=st.data())
def test_gather_pa(double: Double, soc: str, data: st.DataObject) -> None:
    case = data.draw(strategies.gather_pa_cases(dtypes=("float16", "bfloat16", "int8")))
    assume(case.arguments.get("value") is not None and case.arguments.get("cache_mode") != "NHSD")
    drawn(double, case, soc)


@pytest.mark.parametrize("seed", range(16))
def test_gather_selection(double: Double, seed: int) -> None:
    """Three steps of one selection, so that ids stay, move, come and are read again."""
    rng = np.random.default_rng(seed)
    batch, steps, topk = (int(x) for x in rng.integers(1, [4, 4, 9]))
    block = int(rng.choice([1, 2, 4]))
    selection_size, full_size, rope = block * int(rng.integers(1, 4)), block * 4, seed % 2 * 3
    rows, columns = batch * steps, -(-topk * block // selection_size)
    blocks = rows * columns
    shape = (batch, steps, 1) if seed % 3 else (rows, 1)

    def bits(*dims: int) -> Any:
        return rng.integers(0, 1 << 16, dims, dtype=np.uint16)

    state: dict[str, Any] = dict(
        selection_k_rope=bits(blocks, selection_size, rope) if rope else None,
        selection_kv_cache=bits(blocks, selection_size, 5),
        selection_kv_block_table=rng.permutation(blocks).astype(np.int32).reshape(rows, columns),
        selection_kv_block_status=np.full((*shape, topk + 1), -1, np.int32),
    )
    full: dict[str, Any] = dict(
        full_k_rope=bits(9, full_size, rope) if rope else None,
        full_kv_cache=bits(9, full_size, 5),
        full_kv_block_table=rng.integers(0, 9, (batch, 6)).astype(np.int32),
        full_q_actual_seq=rng.integers(0, steps + 1, batch).astype(np.int32),
    )
    for step in range(3):
        arguments = state | full
        arguments |= dict(
            selection_topk_indices=rng.integers(-1, 20, (*shape, topk)).astype(np.int32),
            full_kv_actual_seq=rng.integers(0, full_size * 6 - 8, batch).astype(np.int32) + step,
            selection_topk_block_size=block,
            dtype="float16",
        )
        check(double, "gather_selection_kv_cache", arguments)
        want = oracle.run("gather_selection_kv_cache", arguments)
        state |= {k: v for k, v in want.outputs.items() if rope or k != "selection_k_rope"}
