# SPDX-License-Identifier: Apache-2.0
"""The runtime's own tests once more, on NPUs: the same programs, over the test double.

Left out is what an NPU cannot mean: device memory that the host reads, work that only takes time,
the model's clock, plans over plain arrays, the order in which workers run host functions.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from device_fixtures import clock, npu, npus

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

__all__ = ["clock", "npu", "npus"]

pytestmark = pytest.mark.usefixtures("npus")


@pytest.fixture
def anyio_backend() -> str:
    """One event loop: the tests of devices proper (test_device*.py) run on both."""
    return "asyncio"


ELSEWHERE = {
    "test_stream": {
        # the host looks at device memory
        "test_strided_and_batched_copies",
        "test_overlapping_copy_is_as_if_read_first",
        "test_a_source_dropped_while_its_copy_is_queued",
        "test_plain_arrays_live_until_their_copy_is_done",
        # host functions run on threads of the driver
        "test_an_event_hop_stays_on_its_worker",
        "test_seeds_change_the_order_and_keep_the_promises",
        # plans over plain arrays; work that only takes time
        "test_scatter_reads_its_slots_when_it_runs",
        "test_compute_takes_time_and_no_worker",
        # in test_device_streams.py, with copies
        "test_thousand_streams_on_two_workers",
        "test_chain_through_a_thousand_streams",
    },
    "test_event": {
        "test_one_event_recorded_again_every_layer",
        "test_elapsed_time_on_the_wall_clock",
        "test_elapsed_time_on_the_model_clock",
        # an NPU has reached a record when it says so, be the stream ever so idle
        "test_elapsed_time_asks_for_timing_and_for_records",
    },
    "test_failure": {"test_typed_errors_of_plans_are_the_cause"},
    "test_leave": {"test_a_closed_device_says_so"},
}

for _module, _left_out in ELSEWHERE.items():
    _tests = vars(importlib.import_module(_module))
    _found = {name: test for name, test in _tests.items() if name.startswith("test_")}
    assert not _left_out - _found.keys(), _left_out - _found.keys()
    globals().update({name: test for name, test in _found.items() if name not in _left_out})
