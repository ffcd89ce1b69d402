# SPDX-License-Identifier: Apache-2.0
"""Every name and command that users know can be imported and started where it has always been.

A line is added here with each new public name, and taken out only with a release that says so in
the changelog.  A name that has moved may warn that its old place is deprecated.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings

import pytest

NAMES = {
    "kvcore": """
        BackendUnavailableError CaptureError DeviceOutOfMemoryError KVCoreError
        KVPortabilityWarning ParamInvalidError ParamNullError RaceError SlotRangeError StreamError
        Buffer Device DeviceProfile Event Graph Stream current_stream
        Scenario SoC backends errors info layout offload runtime slots
        gather_pa_kv_cache gather_selection_kv_cache kv_cache_update reshape_and_cache
        scatter_pa_cache scatter_pa_kv_cache scenario_of
        plan_gather_pa_kv_cache plan_gather_selection_kv_cache plan_kv_cache_update
        plan_scatter_pa_cache plan_scatter_pa_kv_cache
        invalidate permute_rows pack_float4 unpack_float4
        get_num_threads set_num_threads use_soc __version__
    """,
    "kvcore.errors": """
        ACLNN_ERR_PARAM_INVALID ACLNN_ERR_PARAM_NULLPTR
        BackendUnavailableError CaptureError DeviceOutOfMemoryError KVCoreError
        KVPortabilityWarning ParamInvalidError ParamNullError RaceError SlotRangeError StreamError
    """,
    "kvcore.layout": "nd_to_nz nz_to_nd paged_nd_to_nz paged_nz_to_nd",
    "kvcore.ops.slots": "decode from_positions prefill speculative",
    "kvcore.backends": "Backend available get load_errors names register use why_not",
    "kvcore.soc": """
        A2 A3 A950 PROFILES Accepted Profile SoC current from_product resolve use_soc
    """,
    "kvcore.threads": "get_num_threads set_num_threads usable_cores",
    "kvcore.float4": "pack_float4 unpack_float4",
    "kvcore.hifloat8": "CODES LIMITS VALUES decode encode",
    "kvcore.dtypes": "BY_NAME INDEX_DTYPES TABLE DType get",
    "kvcore.testing": "LAYOUTS assert_kv_equal",
    "kvcore.benchmarks": "CASES Case Measurement history measure",
    "kvcore.runtime": """
        Buffer Device DeviceProfile Event ExternalEvent Figure Graph MemoryInfo Party Race Span
        Stream StreamUse Summary Trace current_stream default_race_check
    """,
    "kvcore.offload": """
        LAYOUTS MODELS WRITE_POLICIES AttentionInput BlockPool DecodeEngine DecodeFailed
        DecodeStatistics DecodeStep DecodeTotals DevicePool DevicePoolStatistics LayerEvents
        Mismatch ModelFigure ModelProfile ModelShape OffloadEvent OffloadManager
        OffloadManagerStatistics OffloadOptions OffloadReplay OffloadReport OffloadStats PagedCaches
        PrefillOffloader Replay ReplayReport RequestStep Scheduler ScoreModel Selection
        SelectionCache StepResult StorePlan TraceRequest TurnoverIds generate_trace hit_rate
        read_ids read_trace score_trace slot_mapping write_ids
    """,
    "kvcore.replay": """
        LAYOUTS MODELS Mismatch ModelFigure ModelProfile ModelShape OffloadOptions OffloadReplay
        OffloadReport OffloadedInFull OffloadedSampled PagedCaches Replay ReplayReport Resident
        Scheduler ScoreModel Strategy TraceRequest TurnoverIds generate_trace hit_rate read_ids
        read_trace score_trace slot_mapping write_ids
    """,
    "kvcore.torch": """
        LIBRARY OPERATORS Difference Installation Recording Verification install verify
    """,
}

COMMANDS = [
    ("kvcore",),
    ("kvcore", "info"),
    ("kvcore", "check"),
    ("kvcore", "bench"),
    ("kvcore", "replay"),
    ("kvcore.npu.selftest",),
    ("kvcore.backends.aclnn.selftest",),
]


@pytest.mark.parametrize("module", NAMES)
def test_public_names_stay_importable(module: str) -> None:
    if module == "kvcore.torch":
        pytest.importorskip("torch", reason="kvcore.torch needs torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found = importlib.import_module(module)
        assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_stay_startable(command: tuple[str, ...]) -> None:
    module, *words = command
    done = subprocess.run(
        [sys.executable, "-m", module, *words, "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


def test_names_that_moved_warn_and_are_the_same_objects() -> None:
    import kvcore.offload
    import kvcore.replay

    for name in kvcore.replay.__all__:
        if name in NAMES["kvcore.offload"].split():
            with pytest.warns(DeprecationWarning, match=rf"kvcore\.replay\.{name} now"):
                found = getattr(kvcore.offload, name)
            assert found is getattr(kvcore.replay, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in kvcore.offload.__all__:
            assert getattr(kvcore.offload, name) is not None
