# SPDX-License-Identifier: Apache-2.0
"""Every call of CANN fails once, with every status: a typed error, nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from double import build
from double.direct import Double
from npu_fixtures import a3 as a3

import kvcore
import npu as calls
from kvcore.errors import (
    BackendUnavailableError,
    DeviceOutOfMemoryError,
    KVCoreError,
    ParamInvalidError,
    StreamError,
)
from kvcore.npu import options
from kvcore.npu.call import launch
from kvcore.npu.cann import library, status
from kvcore.npu.cann.library import PHASE_ONE

CODES = sorted(code for code in status.MEANINGS if code != 100002)


def arrays() -> dict[str, Any]:
    fused = np.arange(4 * 3 * 2 * 16, dtype=np.float16).reshape(4, 3, 2, 16)
    return {
        "key": fused[:, 1],
        "value": fused[:, 2],
        "key_cache": np.zeros((2, 4, 2, 16), np.float16),
        "value_cache": np.zeros((2, 4, 2, 16), np.float16),
        "slot_mapping": np.array([0, 3, 5, 6], np.int32),
    }


def update() -> dict[str, Any]:
    return {
        "new_kv": np.ones((3, 32), np.float16),
        "past": np.zeros((2, 2, 8, 32), np.float16),
        "token_offset": np.array([4, 7], np.int32),
        "seq_len": np.array([2, 1], np.int32),
    }


def fill(placed: calls.Placed) -> None:
    kvcore.scatter_pa_kv_cache(**placed.arrays)


def symbols_of_a_call(double: Double, run: Any) -> list[tuple[str, int]]:
    """(symbol, which of its calls) of everything a call asks of CANN."""
    before = len(double.calls())
    run()
    names = [call.partition("(")[0] for call in double.calls()[before:]]
    return [(name, names[: i + 1].count(name)) for i, name in enumerate(names)]


def settle() -> None:
    """Wait for the device and give the pooled memory back, so that it is taken anew."""
    library.current().aclrtSynchronizeDevice()
    launch.release(None, 0)


def test_each_call_may_fail(a3: Double) -> None:
    placed, appended = calls.Placed(**arrays()), calls.Placed(**update())
    plans = (
        kvcore.plan_scatter_pa_kv_cache(**placed.arrays),
        kvcore.plan_kv_cache_update(**appended.arrays, layer_id=1),
    )
    seen = set()
    for plan in plans:
        settle()
        with options.use_options(check="device"):
            steps = symbols_of_a_call(a3, plan.run)
        settle()
        live = a3.live()
        for name, nth in steps:
            if (plan, name, min(nth, 3)) in seen or "Event" in name or "Context" in name:
                # Without an event memory is held until the stream's end, no more; a thread whose
                # context is not told stays on the device.
                continue
            seen.add((plan, name, min(nth, 3)))
            a3.fail(name, nth, 500000)
            with options.use_options(check="device"), pytest.raises(KVCoreError) as caught:
                plan.run()
            typed = not name.startswith(("aclCreate", "aclDestroy", "aclnn"))
            assert caught.value.code == (500000 if typed else caught.value.code), name
            settle()
            if name.startswith("aclDestroy"):
                live = a3.live()  # what refuses its end is all that may be left
            assert a3.live() == live, (name, a3.live_text())
        plan.run()
        settle()
        assert a3.live() == live
    assert {name for _, name, _ in seen} >= {
        *("aclrtSetDevice", "aclrtMalloc", "aclCreateTensor", "aclDestroyTensor"),
        *("aclrtMemcpy2dAsync", "aclrtSynchronizeStream", "aclrtMemcpy"),
        *("aclnnScatterPaKvCacheGetWorkspaceSize", "aclnnScatterPaKvCache"),
    }
    placed.free()
    appended.free()
    # The tensors whose end was refused are the double's to forget.
    a3.reset()
    a3.start()
    launch.memory._pools.clear()
    library.forget()


@pytest.mark.parametrize("phase", ["_phase_one", "_phase_two"])
def test_an_interrupt_as_soon_as_a_phase_is_back(
    a3: Double, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    placed = calls.Placed(**arrays())
    plan = kvcore.plan_scatter_pa_kv_cache(**placed.arrays)
    plan.run()
    settle()
    live = a3.live()
    bind = library.Cann._bind
    name = "aclnnScatterPaKvCache" + (PHASE_ONE if phase == "_phase_one" else "")

    def interrupted(self: library.Cann, called: str, checked: bool) -> Any:
        function = bind(self, called, checked)
        if called != name:
            return function

        def call(*given: Any) -> None:
            function(*given)
            raise KeyboardInterrupt

        return call

    with monkeypatch.context() as patch:
        patch.setattr(library.Cann, "_bind", interrupted)
        vars(library.current()).pop(name)
        again = kvcore.plan_scatter_pa_kv_cache(**placed.arrays)
        with pytest.raises(KeyboardInterrupt):
            again.run()
    vars(library.current()).pop(name)
    settle()
    assert a3.live() == live, a3.live_text()
    placed.free()


@pytest.mark.parametrize("code", [code for code in CODES if code not in range(100000, 161001)])
def test_each_status_of_phase_one_is_its_own_error(a3: Double, code: int) -> None:
    name = "aclnnScatterPaKvCacheGetWorkspaceSize"
    placed = calls.Placed(**arrays())
    a3.fail(name, 1, code)
    with pytest.raises(KVCoreError) as caught:
        fill(placed)
    if code // 1000 in (161, 361, 561):  # those of the runtime do not come through as they are
        assert type(caught.value) is status.error_class(code)
        assert caught.value.code == code
        assert f"{name}: expected status 0, got {code} ({status.meaning(code)})" in str(
            caught.value
        )
    fill(placed)
    placed.free()


def test_each_status_of_the_runtime_is_its_own_error(a3: Double) -> None:
    placed = calls.Placed(**arrays())
    plan = kvcore.plan_scatter_pa_kv_cache(**placed.arrays)
    for code in CODES:
        if code // 1000 in (161, 361, 561):
            continue
        a3.fail("aclrtSetDevice", 1, code)
        with pytest.raises(status.error_class(code), match=f"got {code} ") as caught:
            plan.run()
        assert caught.value.code == code
    plan.run()
    placed.free()


# ---------------------------------------------------------------- memory


def test_no_memory_for_the_workspace(a3: Double) -> None:
    placed = calls.Placed(**arrays())
    plan = kvcore.plan_scatter_pa_kv_cache(**placed.arrays)
    settle()
    names = [name for name, _ in symbols_of_a_call(a3, plan.run)]
    settle()
    before = a3.live()
    a3.runtime.kvdouble_workspace(1 << 16)  # no more than the pool likes to take
    a3.fail("aclrtMalloc", names.count("aclrtMalloc"), 207001)
    executors = a3.num_calls("aclDestroyAclOpExecutor")
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        plan.run()
    assert caught.value.code == 207001
    assert caught.value.wanted
    assert caught.value.total
    assert caught.value.free is not None
    # Phase two was never called, so that the executor is ours to destroy: once.
    assert a3.num_calls("aclDestroyAclOpExecutor") == executors + 1
    a3.runtime.kvdouble_workspace(0)
    settle()
    assert a3.live() == before
    plan.run()
    placed.free()


def test_no_memory_in_phase_one(a3: Double) -> None:
    placed = calls.Placed(**arrays())
    executors = a3.num_calls("aclDestroyAclOpExecutor")
    a3.fail("aclnnScatterPaKvCacheGetWorkspaceSize", 1, 207001)
    with pytest.raises(DeviceOutOfMemoryError):
        fill(placed)
    assert a3.num_calls("aclDestroyAclOpExecutor") == executors
    fill(placed)
    placed.free()


def test_memory_in_use_is_freed_behind_its_stream_only(a3: Double) -> None:
    small = calls.Placed(**arrays())
    fill(small)
    settle()
    fill(small)
    large = calls.Placed(
        key=np.ones((3000, 3, 2, 16), np.float16)[:, 1],
        key_cache=np.zeros((1500, 4, 2, 16), np.float16),
        slot_mapping=np.arange(3000, dtype=np.int32),
    )
    a3.runtime.kvdouble_hold(True)
    fill(small)
    fill(large)
    fill(large)
    pool = launch.memory.pool_of(library.current(), 0, 0)
    pool.collect()
    held = [block for _, blocks in pool._retired for block in blocks]
    assert sum(isinstance(block, launch.memory.DeviceMemory) for block in held) == 1
    a3.runtime.kvdouble_hold(False)
    library.current().aclrtSynchronizeDevice()
    pool.collect()
    assert not pool._retired
    for placed in (small, large):
        placed.free()


# ---------------------------------------------------------------- later failures


def test_a_failure_on_the_device_shows_at_the_next_synchronise(a3: Double) -> None:
    placed = calls.Placed(**arrays())
    a3.fail_async("aclnnScatterPaKvCache", 1, 507015)
    fill(placed)  # queued without an error
    cann = library.current()
    with pytest.raises(StreamError, match=r"507015 .*bad slot or address") as caught:
        cann.aclrtSynchronizeStream(0)
    assert caught.value.code == 507015
    assert status.is_sticky(507015)
    placed.free()
    a3.reset()
    a3.start()
    launch.memory._pools.clear()
    library.forget()


def test_another_party_s_finalize(a3: Double) -> None:
    placed = calls.Placed(**arrays())
    fill(placed)
    a3.rt("aclFinalize")
    with pytest.raises(KVCoreError) as caught:
        fill(placed)
    assert isinstance(caught.value, (BackendUnavailableError, StreamError))
    assert caught.value.code in (100001, 107002)
    a3.violations()
    a3.reset()
    a3.start()
    launch.memory._pools.clear()
    library.forget()


def test_a_thread_without_a_device(a3: Double) -> None:
    placed = calls.Placed(**arrays())
    plan = kvcore.plan_scatter_pa_kv_cache(**placed.arrays)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            plan.run()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
        thread.join()
    assert not failures
    want = arrays()
    kvcore.scatter_pa_kv_cache(**want)
    np.testing.assert_array_equal(placed.host("key_cache"), want["key_cache"])
    placed.free()


def test_two_threads_on_one_stream(a3: Double) -> None:
    many = [calls.Placed(**arrays()) for _ in range(4)]
    failures: list[BaseException] = []

    def run(placed: calls.Placed) -> None:
        try:
            for _ in range(10):
                fill(placed)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(placed,)) for placed in many]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    want = arrays()
    kvcore.scatter_pa_kv_cache(**want)
    for placed in many:
        np.testing.assert_array_equal(placed.host("key_cache"), want["key_cache"])
        placed.free()


# ---------------------------------------------------------------- what is installed

# One process can hold one CANN, so each installation is tried in a process of its own.
PROGRAM = """
import json, sys
sys.path[:0] = {path!r}
import numpy as np, kvcore
from kvcore.npu.cann import library
import test_npu_faults as here, npu
said = dict(reason=library.why_not(), details=kvcore.info()["details"]["aclnn"])
try:
    want = here.arrays()
    seen = npu.run("scatter_pa_kv_cache", want)
    kvcore.scatter_pa_kv_cache(**want)
    said["right"] = bool((seen["key_cache"] == want["key_cache"]).all())
except kvcore.KVCoreError as error:
    said["error"] = f"{{type(error).__name__}}: {{error}}"
print(json.dumps(said))
"""


def installed(folder: Path, **options: Any) -> dict[str, Any]:
    made = build.build(folder, **options)
    here = Path(__file__).parent
    program = PROGRAM.format(path=[str(here), str(here.parent / "support")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | made.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_an_umbrella_without_the_custom_operator(cann_folder: Path) -> None:
    said = installed(cann_folder, split=False, custom=False)
    assert said["reason"] is None
    assert said["right"]
    assert Path(said["details"]["runtime"]).name == "libascendcl.so"
    operators = said["details"]["operators"]
    assert Path(operators["aclnnScatterPaKvCache"]).name == "libopapi.so"
    assert operators["aclnnGatherSelectionKvCache"] == "not in this CANN"
    assert said["details"]["soc"] == "A3"
    assert said["details"]["usable"] == "yes"


@pytest.mark.parametrize("phase", ["", "GetWorkspaceSize"])
def test_an_operator_without_one_of_its_phases(cann_folder: Path, phase: str) -> None:
    said = installed(cann_folder, umbrella=False, missing=(f"aclnnScatterPaKvCache{phase}",))
    assert said["reason"] is None
    assert said["error"].startswith("BackendUnavailableError: backend 'aclnn' is not available")
    assert "aclnnScatterPaKvCache is not in this CANN" in said["error"]


def test_a_runtime_without_a_symbol(cann_folder: Path) -> None:
    said = installed(cann_folder, split=False, missing=("aclrtMemcpy",))
    assert said["reason"] is None
    assert said["error"].startswith("BackendUnavailableError: aclrtMemcpy is not in this")


def test_no_device(cann_folder: Path) -> None:
    said = installed(cann_folder, devices=0)
    assert "no device" in said["reason"]
    assert "no device" in said["details"]["devices"]


def test_what_kernels_do_not_count(a3: Double) -> None:
    rows = calls.Placed(
        selection_k_rope=np.zeros((4, 64, 64), np.float16),
        selection_kv_cache=np.zeros((4, 64, 512), np.float16),
        selection_kv_block_table=np.arange(4, dtype=np.int32).reshape(2, 2),
        selection_kv_block_status=np.full((2, 1, 1, 3), -1, np.int32),
        selection_topk_indices=np.zeros((2, 1, 1, 2), np.int32),
        full_k_rope=np.zeros((4, 64, 64), np.float16),
        full_kv_cache=np.zeros((4, 64, 512), np.float16),
        full_kv_block_table=np.arange(4, dtype=np.int32).reshape(2, 2),
        full_kv_actual_seq=np.full(2, 100, np.int32),
        full_q_actual_seq=np.ones(2, np.int32),
    )
    for given, match in (({"stats": {}}, "stats: "), ({"q_lens_cumulative": True}, "q_lens_cum")):
        with pytest.raises(ParamInvalidError, match=match):
            kvcore.gather_selection_kv_cache(**rows.arrays, **given)
    rows.free()
