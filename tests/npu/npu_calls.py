# SPDX-License-Identifier: Apache-2.0
"""The public operators as the CPU's tests call them, with every array on an NPU of the double."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from double.direct import Double
from npu_oracle import Placed

import kvcore
import oracle
from kvcore._core.plan import Plan
from kvcore.npu import options
from kvcore.npu.call import launch
from kvcore.npu.call.call import INDEX_ARGUMENTS
from kvcore.npu.call.device_arrays import DeviceArray
from kvcore.npu.cann import library
from npu import MACHINES

__all__ = ["NpuCalls"]

#: The SoC that has most of an operator.
OPERATORS = {
    "scatter_pa_kv_cache": "950",
    "scatter_pa_cache": "950",
    "kv_cache_update": "A2",
    "gather_pa_kv_cache": "A3",
    "gather_selection_kv_cache": "A3",
}
#: Arguments that are no arrays, whatever a test gives for them.
OTHERS = frozenset({"strides", "offsets", "cache_mode", "scatter_mode", "dtype", "value_dtype"})
#: Tests take raw uint16 for 16-bit numbers; kernels of A2 and A3 take them by name alone.
NAMES = {"A2": {"uint16": "float16"}, "A3": {"uint16": "float16"}, "950": {}}


class NpuCalls:
    """Stand-ins for kvcore's operators and plans.

    host:      index arrays stay on the host.
    only_soc:  calls without soc= stay on the CPU: the test sets one beside the other.
    """

    def __init__(self, double: Double) -> None:
        self._double = double
        self._soc = ""
        self._plans: list[NpuPlan] = []
        self.host = self.only_soc = False

    def restart(self) -> None:
        """The double as if just loaded."""
        self._double.reset()
        self._double.start()
        self._soc = ""
        launch.memory._pools.clear()
        library.forget()

    def close(self) -> None:
        """Give everything back; raises for what was lost and for rules that were broken."""
        for plan in self._plans:
            plan.placed.free()
        self._plans.clear()
        launch.release(None, 0)
        violations = self._double.violations()
        assert not violations
        assert self._double.live() == 0, self._double.live_text()

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the stand-ins in place."""
        for operator in OPERATORS:
            for name in (operator, f"plan_{operator}"):
                stand_in = self._stand_in(operator, getattr(kvcore, name), name != operator)
                monkeypatch.setattr(kvcore, name, stand_in)

    def _stand_in(
        self, operator: str, function: Callable[..., Any], planned: bool
    ) -> Callable[..., Any]:
        names = list(inspect.signature(function).parameters)

        def call(*positional: Any, **named: Any) -> Any:
            given = dict(zip(names, positional, strict=False)) | named
            beside = self.only_soc and given.get("soc") is None
            if beside or len(positional) > len(names) or not given.keys() <= set(names):
                return function(*positional, **named)
            stats, counted = given.get("stats"), None
            if isinstance(stats, dict) and not planned:
                # The kernels count nothing: what the right answer counts.
                given = {k: v for k, v in given.items() if k not in ("stats", "num_threads")}
                counted = oracle.run(operator, given).stats
            plan = NpuPlan(self, operator, function, given, planned)
            if planned:
                self._plans.append(plan)
                return plan
            answer = plan.answer
            if counted is not None:
                stats.update(counted)
            return answer

        return call

    def settle(self, operator: str, given: dict[str, Any]) -> dict[str, str]:
        """Be the SoC that a call is for; what it calls raw items."""
        soc = given.get("soc")
        if not isinstance(soc, str) or soc not in MACHINES:
            soc = "A3" if _is_older(operator, given) else OPERATORS[operator]
        if soc != self._soc:
            launch.release(None, 0)
            self._double.soc(MACHINES[soc])
            library.forget()
            self._soc = soc
        types = {array.dtype.name for array in given.values() if isinstance(array, np.ndarray)}
        named = any(given.get(name) is not None for name in ("dtype", "value_dtype"))
        return {} if named or "float16" in types else NAMES[soc]


class NpuPlan:
    """A plan on the NPU whose arrays are the host's before and after each run.

    Unless ``planned`` the one-shot function has run already: ``answer`` is what it returned.
    """

    def __init__(
        self,
        calls: NpuCalls,
        operator: str,
        function: Callable[..., Any],
        given: dict[str, Any],
        planned: bool,
    ) -> None:
        self._given = given
        here = OTHERS | INDEX_ARGUMENTS if calls.host else OTHERS
        self.placed = Placed(given, False, here, calls.settle(operator, given))
        more = {"backend": "aclnn"} if calls.host and given.get("backend") is None else {}
        made = None
        try:
            with options.use_options(check="device", quirks="pass"):
                made = function(**self.placed.arguments | more)
            if not planned:
                self.placed.fetch()
                self.answer = self._here(made)
        finally:
            if not planned or made is None:
                self.placed.fetch()
                self.placed.free()
        self._plan: Plan = made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def run(self) -> Any:
        """With what the arrays hold now."""
        self.placed.send()
        try:
            with options.use_options(check="device", quirks="pass"):
                answer = self._plan.run()
        finally:
            self.placed.fetch()
        return self._here(answer)

    def check_values(self) -> None:
        """Of what the arrays hold now."""
        self.placed.send()
        with options.use_options(quirks="pass"):
            self._plan.check_values()
        self.placed.fetch()

    def _here(self, answer: Any) -> Any:
        if isinstance(answer, DeviceArray):
            return answer.to_host()
        if answer is not None:
            assert answer is self.placed.arguments["past"]
            return self._given["past"]
        return answer


def _is_older(operator: str, given: dict[str, Any]) -> bool:
    """Whether a scatter is one that A2 and A3 have and the 950 has not."""
    if operator != "scatter_pa_kv_cache" or given.get("cache_mode") == "PA_NZ":
        return False
    mode, value = given.get("scatter_mode"), given.get("value")
    alone = value is None or (isinstance(value, np.ndarray) and not value.ndim)
    return (isinstance(mode, str) and mode == "NHSD") or (
        alone and given.get("compress_lens") is None
    )
