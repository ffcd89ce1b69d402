# SPDX-License-Identifier: Apache-2.0
"""What every backend must do, on the library's own and on one written from the contract's text."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore
import strategies
from cases import Case, check_matches_oracle, check_refused
from kvcore.backends.base import Backend
from kvcore.backends.cpu import CpuBackend
from numpy_backend import NumpyBackend

BACKENDS = (CpuBackend(), NumpyBackend())
every = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
scenarios = pytest.mark.parametrize("scenario", [1, 2, 6, 7])


def runs(backend: Backend, case: Case) -> bool:
    """Whether the backend takes the case; if it does not, the call says so and writes nothing."""
    reason = backend.why_not(kvcore.plan_scatter_pa_kv_cache(**case.arguments))
    if reason is None:
        return True
    before = case.arena.snapshot()
    with pytest.raises(kvcore.BackendUnavailableError, match=reason):
        kvcore.scatter_pa_kv_cache(**case.arguments, backend=backend)
    case.arena.assert_untouched(before)
    return False


@every
@scenarios
@given(data=st.data())
def test_one_call(backend: Backend, scenario: int, data: st.DataObject) -> None:
    case = data.draw(strategies.scatter_cases(scenarios=(scenario,)))
    if runs(backend, case):
        check_matches_oracle(case, partial(kvcore.scatter_pa_kv_cache, backend=backend))


@every
@scenarios
@given(data=st.data())
def test_what_is_refused_reaches_no_byte(
    backend: Backend, scenario: int, data: st.DataObject
) -> None:
    illegal = data.draw(strategies.illegal_scatter_cases(scenarios=(scenario,)))
    call: Any = partial(kvcore.scatter_pa_kv_cache, backend=backend)
    before = illegal.case.arena.snapshot()
    try:
        call(**illegal.case.arguments)
    except kvcore.BackendUnavailableError:
        illegal.case.arena.assert_untouched(before)
    except kvcore.KVCoreError:
        check_refused(illegal, call)
    else:
        pytest.fail(f"{illegal.broken}: not refused")


@every
def test_a_plan_reads_the_contents_anew(backend: Backend) -> None:
    key, cache = np.ones((2, 1, 16), np.int8), np.zeros((2, 4, 1, 16), np.int8)
    slots = np.array([5, -1])
    plan = kvcore.plan_scatter_pa_kv_cache(key, cache, slots, backend=backend)
    plan.run()
    key[1], slots[:] = 2, (6, 0)
    plan.run()
    want = np.zeros_like(cache)
    want[1, 1], want[1, 2], want[0, 0] = 1, 1, 2
    np.testing.assert_array_equal(cache, want)
    slots[0] = 8
    with pytest.raises(kvcore.SlotRangeError, match=r"slot_mapping\[0\]"):
        plan.run()
    np.testing.assert_array_equal(cache, want)


@every
def test_by_name_and_by_task(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcore.backends import registry

    monkeypatch.setitem(registry._backends, backend.name, backend)
    key, slots = np.ones((1, 1, 16), np.int8), np.array([1])
    for way in ("name", "use"):
        cache = np.zeros((1, 2, 1, 16), np.int8)
        if way == "name":
            kvcore.scatter_pa_kv_cache(key, cache, slots, backend=backend.name)
        else:
            with registry.use(backend.name):
                kvcore.scatter_pa_kv_cache(key, cache, slots)
        assert cache[0].any(axis=(1, 2)).tolist() == [False, True]
