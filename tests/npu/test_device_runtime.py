# SPDX-License-Identifier: Apache-2.0
"""The runtime's own tests once more, on NPUs: the same programs, over the test double.

Every suite runs whole, but for the tests in ``ELSEWHERE``, each with the reason.  ``USES`` says
what stands in for what an NPU has not (``stand_ins``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import stand_ins
import test_race
from device_fixtures import clock, npu, npus
from double.direct import Double
from reruns import taken_over
from stand_ins import addresses

import kvcore

__all__ = ["addresses", "clock", "npu", "npus"]

pytestmark = pytest.mark.usefixtures("npus", "addresses", "stand_ins_of_a_test")

MODEL = "times of the model's clock, and an NPU keeps its own"
NO_PROFILE = "a device without a profile, and an NPU has one"
PLAIN = "plans over plain arrays, and an NPU's kernels cannot reach them"
ROWS = "which rows a kernel wrote, the host does not know: it counts as all of its argument"

#: Suite, then test: why it is not run here.
ELSEWHERE: dict[str, dict[str, str]] = {
    "stream": {
        "an_event_hop_stays_on_its_worker": "host functions run on threads of the driver",
        "seeds_change_the_order_and_keep_the_promises": "the driver orders streams, no seed",
        "scatter_reads_its_slots_when_it_runs": NO_PROFILE,
        "compute_takes_time_and_no_worker": "an NPU refuses work that only takes time",
        "thousand_streams_on_two_workers": "in test_device_streams.py, with copies",
        "chain_through_a_thousand_streams": "in test_device_streams.py, with copies",
    },
    "event": {
        "elapsed_time_on_the_wall_clock": "an NPU's idle stream may not have reached its record",
        "elapsed_time_on_the_model_clock": MODEL,
        "elapsed_time_asks_for_timing_and_for_records": (
            "an NPU has reached a record when it says so, be the stream ever so idle"
        ),
    },
    "failure": {"typed_errors_of_plans_are_the_cause": PLAIN},
    "leave": {},
    "graph": {
        "a_failure_in_a_fork_fails_the_replay_and_nothing_else": (
            "a kernel raises nothing: test_device.py has a replay that the device fails"
        ),
        "a_replay_costs_one_launch": MODEL,
        "forks_overlap_on_the_model_clock": MODEL,
    },
    "memory": {
        "more_than_this_machine_has": NO_PROFILE,
        "without_a_profile_everything_goes": NO_PROFILE,
        "kernels_and_spaces_on_a_modelled_device": "an A2 beside an A3: test_device.py has two A3",
        "profiles_set_the_capacity": "an A2 and an A3, and an NPU is one of them",
    },
    "race": {
        "unwaited_memory_that_is_dropped_and_used_again": PLAIN,
        "views_of_one_array_are_one_memory": PLAIN,
        "repaired_programs_are_left_alone_on_every_seed[two_writers_of_one_slot]": ROWS,
    },
    "trace": {
        "a_modelled_trace": MODEL,
        "overlap_is_counted_exactly": MODEL,
        "a_measured_trace": "a span is the time of handing over",
        "failed_work_is_not_in_a_measured_trace": "a span is the handing over, which did not fail",
    },
    "bad_input": {"backends": "asks for the CPU by name"},
    "external": {
        "a_graph_waits_for_work_outside": "CANN captures no external events: refused",
        "a_graph_records_for_those_outside": "CANN captures no external events: refused",
        "a_circle_through_a_graph_is_refused": "CANN captures no external events: refused",
        "a_circle_through_a_graph_fails_when_the_device_is_left": (
            "CANN captures no external events: refused"
        ),
        "a_graph_that_records_behind_its_own_wait_fails_when_it_is_replayed": (
            "CANN captures no external events: refused"
        ),
        "a_graph_in_a_circle_with_others_is_told_when_the_device_is_left": (
            "CANN captures no external events: refused"
        ),
        "the_model_waits_for_the_record": MODEL,
    },
    "hostile": {
        "python_ends_inside_a_block_of_a_generator": "a process of its own, on the CPU",
        "values_that_make_no_sense": MODEL,
        "an_external_query_takes_the_time_of_the_model": MODEL,
        "a_child_is_told_no_times": MODEL,
    },
    "operators": {
        "a_bad_slot_is_the_cause": "slots on the device are checked by nobody: 507035",
        "writers_of_one_cache_race_by_slot": ROWS,
        "plain_arrays_need_a_device_without_a_profile": NO_PROFILE,
    },
    "enter": {},
    "driver": {
        "a_driver_opens_and_closes_once_and_gets_its_memory_back": "of the driver in memory",
        "what_closing_complains_of_is_raised": "of the driver in memory",
        "what_only_the_model_has_is_refused": "of the driver in memory",
    },
    "native_cancel": {
        "ctrl_c": "a process of its own, on the CPU",
        "a_device_that_is_never_left_goes_with_its_workers": "handles of the driver are left open",
        "a_generator_dropped_when_its_loop_is_gone": "handles of the driver are left open",
    },
    "shield": {},
}

#: Suite: its stand-ins.
USES = {
    "stream": "sight",
    "event": "sight times",
    "failure": "sight",
    "leave": "sight times",
    "graph": "plans scatters times calls sight",
    "memory": "sight",
    "race": "scatters times sight",
    "trace": "plans times sight",
    "bad_input": "plans times sight",
    "external": "times sight",
    "hostile": "times sight",
    "operators": "sight",
    "enter": "",
    "driver": "sight",
    "native_cancel": "plans sight",
    "shield": "",
}


@pytest.fixture
def make() -> Callable[[], kvcore.Device]:
    """What the tests of every driver take as a parameter."""
    return lambda: kvcore.Device(backend="aclnn")


@pytest.fixture
def anyio_backend() -> str:
    """One event loop: the tests of devices proper (test_device*.py) run on both."""
    return "asyncio"


@pytest.fixture
def stand_ins_of_a_test(
    npus: Double, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """What the test's suite uses."""
    suite, _, test = request.node.name.removeprefix("test_").partition("__")
    if suite not in ELSEWHERE:
        return
    if test in ELSEWHERE[suite]:
        pytest.skip(ELSEWHERE[suite][test])
    for use in USES[suite].split():
        stand_ins.STAND_INS[use](npus, monkeypatch)
    monkeypatch.setattr(test_race, "SEEDS", range(6))


for _suite, _left_out in ELSEWHERE.items():
    globals().update(taken_over(_suite, _left_out))


@pytest.mark.parametrize("suite", ELSEWHERE)
def test_what_is_left_out_is_there(suite: str) -> None:
    there = vars(importlib.import_module(f"test_{suite}"))
    for name, reason in ELSEWHERE[suite].items():
        test, _, parameter = name.partition("[")
        assert f"test_{test}" in there
        assert not parameter or parameter[:-1] in there
        assert reason
