# SPDX-License-Identifier: Apache-2.0
"""A call is atomic when memory runs out too: one allocation fails, at each place in turn.

tests/tools/starve.py does the same with malloc failing, with several threads, and for leaks.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import pytest

import kvcore
from hostile_calls import CASES
from starved import Python, Starving, hows, is_foreign

pytest.importorskip("_testcapi", reason="CPython was built without its test modules")


@pytest.mark.parametrize(
    ("name", "how"), [(name, how) for name, case in CASES.items() for how in hows(case)]
)
def test_one_allocation_fails(name: str, how: str) -> None:
    found = Starving(CASES[name], how).round(Python())
    assert not found.faults
    if how in ("plan", "first call"):
        assert found.refused > 0  # else nothing was put to the test


def test_a_system_error_of_the_package_is_a_fault() -> None:
    def raised(where: str) -> Exception:
        try:
            exec(compile("raise SystemError", where, "exec"))
        except SystemError as error:
            return error
        raise AssertionError

    assert is_foreign(raised(str(Path(np.__file__).parent / "_core" / "numeric.py")))
    assert is_foreign(raised(str(Path(sysconfig.get_path("stdlib"), "functools.py"))))
    assert is_foreign(raised("<frozen _collections_abc>"))
    for where in ("kvcore/_core/plan.pyx", str(Path(kvcore.__file__).parent / "soc.py"), __file__):
        assert not is_foreign(raised(where))
    assert not is_foreign(MemoryError())


def test_slots_that_no_memory_holds() -> None:
    # A broadcast array of 2**50 slots: its private copy cannot be had.
    slots = np.broadcast_to(np.int64(1), (2**50,))
    key = np.broadcast_to(np.uint8(7), (2**50, 1, 1))
    cache = np.zeros((1, 4, 1, 1), np.uint8)
    plan = kvcore.plan_scatter_pa_kv_cache(key, cache, slots)
    for attempt in (plan.run, plan.check_values):
        with pytest.raises(MemoryError, match="scatter_pa_kv_cache: 1125899906842624 index values"):
            attempt()
    assert not cache.any()
    kvcore.scatter_pa_kv_cache(key[:3], cache, slots[:3])
    assert cache.reshape(-1).tolist() == [0, 7, 0, 0]
