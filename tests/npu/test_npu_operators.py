# SPDX-License-Identifier: Apache-2.0
"""The operators' own tests once more, on NPUs: the same calls, over the test double.

Each suite runs whole but for what ``ELSEWHERE`` names, each with the reason.  Half of the tests
have their index arrays on the host.  Not here: test_selection_steps.py (its checks are of stats;
test_npu_oracle.py runs steps on one selection); tests of shapes alone (most of test_soc_scatter.py
and test_soc_scatter_key.py, test_soc_quirks.py, test_scenario.py), of host arrays
(test_float4.py, test_arrays.py) and of the CPU's plans (test_plan.py); and of test_compress.py
what is about means, which are the kernel's.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Iterator
from fnmatch import fnmatchcase

import pytest
import test_kv_cache_update
import test_scatter_pa
from double import build
from double.direct import Double
from npu_calls import NpuCalls
from reruns import taken_over

import kvcore

UNSEEN = "told before it is asked where an array is"
KEY_ONLY = "key only in a scenario that no SoC has without a value"
OWN = "a call that is this library's own: no SoC has it"
STRIDES = "strides that the SoC's kernels do not take"
PLAN = "what the CPU's plan tells of its pieces"
INT64 = "int64 indices, which A2 and A3 have not"
ROOM = "caches with fewer slots than tokens, which no SoC takes"
HIDDEN = "written for a hidden size of 8 items, which A2 and A3 have not"
LENGTHS = "lengths of 0 or tokens at the end of max_seq, which A2 and A3 have not"
COUNTS = "stats, which kernels do not fill"
TOTALS = "q_lens_cumulative, which an NPU has not"
TYPES = "a type that no SoC has there"
LARGE = "larger than a SoC allows"

#: Suite, then test, or test[pattern of its parameters]: why it is not run here.
ELSEWHERE: dict[str, dict[str, str]] = {
    "scatter_pa": {
        "no_optional_array": UNSEEN,
        "unknown_mode": UNSEEN,
        "strides_that_are_not_two_integers": UNSEEN,
        "slot_past_the_cache[*-3]": "threads are the CPU's",
        "writes_what_the_oracle_says[n[zh]*-True]": KEY_ONLY,
        "zero_dimensional_values_mean_key_only[n[zh]*]": KEY_ONLY,
        "zero_dimensional_values_mean_key_only[*]": "scalars of another type than key",
        "more_than_eight_axes": "a flat buffer in Nct, which no SoC takes",
        "nz_heads_of_one_column": KEY_ONLY,
        "tokens_without_bytes": PLAN,
        "caches_without_slots": ROOM,
        "output_with_strides_that_interleave": STRIDES,
        "views_that_share_no_byte_may_interleave": STRIDES,
        "overlap_that_cannot_be_decided_counts_as_overlap": STRIDES,
        "sizes_that_no_memory_holds": ROOM,
        "strides_that_leave_the_address_space": ROOM,
    },
    "kv_cache_update": {
        "layer_that_is_no_integer": UNSEEN,
        "appends[*-int64]": INT64,
        "layer_out_of_range[int64]": INT64,
        "lengths_and_offsets": LENGTHS,
        "sum_that_wraps": INT64,
        "layers_of_an_odd_stride": INT64,
        "caches_without_room": INT64,
        "four_axes_are_tokens_by_hidden": HIDDEN,
        "four_axes_of_any_strides": HIDDEN,
        "hidden_size[shape6]": HIDDEN,
        "no_tokens": LENGTHS,
        "tokens_between_the_rows_of_the_cache": STRIDES,
    },
    "gather_pa": {
        "many_tokens": OWN,
        "no_bytes_are_still_checked": OWN,
        "five_axes_are_this_librarys_own": OWN,
        "float4_is_moved_packed": OWN,
        "lengths_that_wrap_int64": INT64,
        "plan_rereads_contents_and_reports_what_it_touched": PLAN,
        "quirks_are_warnings": STRIDES,
    },
    "gather_selection": {
        "a_chain_of_moves_and_a_swap_loses_nothing": "blocks of 2 with a top-k above 32",
        "poisoned_copies_of_held_blocks_are_not_read": PLAN,
        "exactly_the_missing_tokens_are_read": PLAN,
        "more_ids_than_sixteen_bits_count": LARGE,
        "ids_past_32_bits_stay_when_held": INT64,
        "a_cache_of_many_more_blocks_than_are_used": "30 MB to the device and back, ten times",
        "threads_do_not_matter": "threads are the CPU's",
        "a_memory_map_that_cannot_be_written": "a file, mapped on the host",
        "a_sparse_file_larger_than_memory": "a file, mapped on the host",
        "plan_reports": PLAN,
        "touched_covers_swaps": PLAN,
        "stats_are_filled_anew_and_only_on_success": COUNTS,
        "places_and_ids_of_every_width": LARGE,
        "one_block_for_two_rows_is_found_among_few_and_many": TYPES,
    },
    "gather_selection_refusals": {
        "refuses[rope types]": "raw items, which have another name here",
        "refuses[totals*]": TOTALS,
        "overlap": STRIDES,
        "totals_are_lengths": TOTALS,
        "a_length_that_fits_no_int32": INT64,
    },
    "compress": {},
    "compress_rules": {
        "a_cache_without_slots[[45]-*]": ROOM,
        "float4_has_no_mean[*-Alibi-*]": TYPES,
        "float4_has_no_mean[*-Omni-*]": TYPES,
        "shapes_no_memory_holds_are_refused_without_a_wrap": KEY_ONLY,
    },
    "soc_scatter": {},
    "soc_scatter_key": {},
    "soc_update": {"strided_arrays_are_warned_of": "whose warnings point at the caller's own line"},
}
#: The tests of a suite of which few are of use here.
CHOSEN = {
    "compress": (
        "a_negative_slot_skips_its_whole_run",
        "a_plan_reads_contents_at_each_run",
        "checking_values_moves_nothing",
        "runs_in_any_order",
        "scatter_pa_cache_refuses_what_rows_do_not_have",
        "strides_of_axes_of_one_mean_nothing",
    ),
    "soc_scatter": (
        "a_refusal_names_everything_and_writes_nothing",
        "a_refusal_comes_when_the_plan_is_made",
    ),
    "soc_scatter_key": ("a_refused_call_writes_nothing",),
}
#: Index arrays of these share memory with others, so they are on the device too.
SHARED = ("input_over_output", "slots_over_output", "an_input_may_not_lie_in_a_cache")
#: Calls without soc= stay on the CPU: such a call stands beside one with a SoC.
BESIDE = ("soc_scatter", "soc_update", "documented_limits")


@pytest.fixture(scope="module")
def npu_calls(loaded_double: Double, cann: build.Installation) -> Iterator[NpuCalls]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cann.environment().items():
            patch.setenv(name, value)
        calls = NpuCalls(loaded_double)
        calls.restart()
        yield calls
        calls.restart()


@pytest.fixture(autouse=True)
def on_the_npu(
    npu_calls: NpuCalls, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[None]:
    """The stand-ins; afterwards nothing is lost and no rule was broken."""
    suite, test, parameters = _parts(request.node.name)
    for left_out, reason in ELSEWHERE.get(suite, {}).items():
        if _matches(left_out, test, parameters):
            pytest.skip(reason)
    npu_calls.host = test not in SHARED and zlib.crc32(request.node.name.encode()) % 2 == 0
    npu_calls.only_soc = suite in BESIDE or test in BESIDE
    # Sizes that A2 and A3 have.
    for name, value in {"HIDDEN": 16, "SEQ_LEN": [2, 1, 2], "TOKEN_OFFSET": [2, 1, 5]}.items():
        monkeypatch.setattr(test_kv_cache_update, name, value)
    npu_calls.patch(monkeypatch)
    yield
    try:
        npu_calls.close()
    except BaseException:
        npu_calls.restart()  # the next test is not to suffer for it
        raise


def _parts(name: str) -> tuple[str, str, str]:
    """Suite, test, parameters."""
    whole, _, parameters = name.removeprefix("test_").partition("[")
    suite, _, test = whole.partition("__")
    return suite, test, parameters.removesuffix("]")


def _matches(left_out: str, test: str, parameters: str) -> bool:
    name, _, pattern = left_out.partition("[")
    return name == test and (not pattern or fnmatchcase(parameters, pattern.removesuffix("]")))


for _suite, _left_out in ELSEWHERE.items():
    globals().update(taken_over(_suite, _left_out, CHOSEN.get(_suite, ())))


def test_what_is_left_out_is_there(request: pytest.FixtureRequest) -> None:
    module = request.node.getparent(pytest.Module)
    here = [_parts(item.name) for item in module.collect()]
    for suite, left_out in ELSEWHERE.items():
        there = vars(importlib.import_module(f"test_{suite}"))
        for name, reason in left_out.items():
            assert reason
            test, _, pattern = name.partition("[")
            assert f"test_{test}" in there, name
            assert not pattern or any(_matches(name, *one[1:]) for one in here if one[0] == suite)
        for test in CHOSEN.get(suite, ()):
            assert f"test_{test}" in there, test


@pytest.mark.parametrize("host", [False, True])
def test_a_plan_checks_values_wherever_they_are(npu_calls: NpuCalls, host: bool) -> None:
    """The host's own kernels stay away from memory that it cannot read."""
    npu_calls.host = host
    made = test_scatter_pa.call("norm")
    before = made.arena.snapshot()
    plan = kvcore.plan_scatter_pa_kv_cache(**made.arguments())
    plan.check_values()
    made.arena.assert_untouched(before)
    made.arrays["slot_mapping"][3] = 12
    with pytest.raises(kvcore.SlotRangeError, match=r"slot_mapping\[3\]: .* got 12"):
        plan.check_values()
    with pytest.raises(kvcore.BackendUnavailableError, match="cannot reach device memory"):
        plan.run_on_cpu()
