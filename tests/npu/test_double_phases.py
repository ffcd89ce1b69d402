# SPDX-License-Identifier: Apache-2.0
"""The double's rules of tensors, executors, workspaces, views and graphs."""

from __future__ import annotations

import ctypes
import threading
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

import numpy as np
import pytest
from double.asking import FLOAT16, H2D, INT32, OUT, SYNC, Scatter, get, in_thread, noticed
from double.direct import Double, Refused, pointer

A2, A3, A950 = "Ascend910B3", "Ascend910_9391", "Ascend950PR_9599"


def refused(code: int, scatter: Scatter) -> None:
    with pytest.raises(Refused) as error:
        scatter.one()
    assert error.value.code == code, error.value


# -- the whole way --------------------------------------------------------------------------------


def test_both_phases(double: Double) -> None:
    scatter = Scatter(double)
    stream = double.stream()
    workspace = scatter.launch(stream)
    scatter.destroy()
    before = double.peek(scatter.memory[1], scatter.cache)
    np.testing.assert_array_equal(before, scatter.cache)  # nobody waited yet
    assert double.sync(stream) == 0
    for i in (1, 4):
        np.testing.assert_array_equal(
            double.download(scatter.memory[i], scatter.cache), scatter.expected()
        )
    scatter.free(workspace)
    assert double.rt("aclrtDestroyStream", pointer(stream)) == 0
    assert double.live() == 0, double.live_text()


def test_phases_in_two_threads(double: Double) -> None:
    scatter = Scatter(double)

    def one() -> Any:
        double.start()
        return scatter.one()

    size, executor = in_thread(one)
    workspace = double.malloc(size)
    assert scatter.two(workspace, size, executor) == 0
    assert double.sync() == 0


# -- executors ------------------------------------------------------------------------------------


def test_an_executor_runs_once(double: Double) -> None:
    scatter = Scatter(double)
    size, executor = scatter.one()
    workspace = double.malloc(size)
    assert scatter.two(workspace, size, executor) == 0
    assert scatter.two(workspace, size, executor) == 561000
    noticed(double, "executor that was destroyed")
    assert double.base.aclDestroyAclOpExecutor(pointer(executor)) != 0
    noticed(double, "executor that was destroyed")
    assert double.sync() == 0


def test_an_executor_that_never_ran_is_destroyed(double: Double) -> None:
    scatter = Scatter(double)
    _, executor = scatter.one()
    assert double.live("executor") == 1
    assert double.base.aclDestroyAclOpExecutor(pointer(executor)) == 0
    assert double.live("executor") == 0


def test_a_failing_phase_two_takes_the_executor(double: Double) -> None:
    scatter = Scatter(double)
    size, executor = scatter.one()
    workspace = double.malloc(size)
    double.fail("aclnnScatterPaKvCache", 1, 361001)
    assert scatter.two(workspace, size, executor) == 361001
    assert double.live("executor") == 0
    assert double.sync() == 0
    np.testing.assert_array_equal(double.download(scatter.memory[1], scatter.cache), scatter.cache)


def test_scatter_does_not_repeat(double: Double) -> None:
    scatter = Scatter(double)
    _, executor = scatter.one()
    assert double.base.aclSetAclOpExecutorRepeatable(pointer(executor)) == 561000
    assert double.base.aclDestroyAclOpExecutor(pointer(executor)) == 0


def test_phase_two_of_another_operator(double: Double) -> None:
    scatter = Scatter(double)
    size, executor = scatter.one()
    workspace = double.malloc(size)
    assert double.phase_two("aclnnGatherPaKvCache", workspace, size, executor) == 161002
    noticed(double, "[1.10]", "aclnnScatterPaKvCache")
    assert double.live("executor") == 0


def test_phases_from_one_library(double: Double) -> None:
    scatter = Scatter(double)
    size, executor = scatter.one()
    workspace = double.malloc(size)
    other = ctypes.CDLL(str(double.installed.lib / "libopapi.so"))
    code = other.aclnnScatterPaKvCache(
        pointer(workspace), c_uint64(size), pointer(executor), pointer(None)
    )
    assert code == 0
    noticed(double, "[4]", "libopapi_transformer.so")
    assert double.sync() == 0


# -- workspaces -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "section", "text"),
    [
        (lambda d, w, n: (None, n), "[5.2]", "NULL"),
        (lambda d, w, n: (w, n - 1), "[5.1]", "phase one said"),
        (lambda d, w, n: (w + 32, n), "[5.3]", "64-byte"),
        (lambda d, w, n: (d.malloc(64), n), "[5.3]", "leaves its memory"),
        (lambda d, w, n: (d.made("aclrtMallocHost", c_size_t(4096)), n), "[5.3]", "device memory"),
    ],
)
def test_workspace(double: Double, spoil: Any, section: str, text: str) -> None:
    scatter = Scatter(double)
    size, executor = scatter.one()
    assert scatter.two(*spoil(double, double.malloc(size + 64), size), executor) == 561000
    noticed(double, section, text)
    assert double.live("executor") == 0


@pytest.mark.parametrize("what", ["workspace", "key", "slots"])
def test_memory_freed_while_a_kernel_needs_it(double: Double, what: str) -> None:
    scatter = Scatter(double)
    workspace = scatter.launch()
    address = {"workspace": workspace, "key": scatter.memory[0], "slots": scatter.memory[2]}[what]
    assert double.free(address) == 0
    noticed(double, "[5.1]", "freed before its stream passed")
    assert double.sync() == 507015


# -- tensors and texts ----------------------------------------------------------------------------


def test_a_tensor_lives_until_phase_two(double: Double) -> None:
    scatter = Scatter(double)
    size, executor = scatter.one()
    workspace = double.malloc(size)
    key = scatter.tensors[0]
    assert key is not None
    assert double.destroy_tensor(key) == 0
    noticed(double, "[5.1]", "before phase two of aclnnScatterPaKvCache")
    assert scatter.two(workspace, size, executor) == 561000
    scatter.tensors[0] = None


@pytest.mark.parametrize("freed", [False, True])
def test_a_text_lives_until_phase_two(double: Double, freed: bool) -> None:
    scatter = Scatter(double)
    size, executor = scatter.one()
    workspace = double.malloc(size)
    scatter.mode.value = b"NoNo" if freed else b"Nor"
    assert scatter.two(workspace, size, executor) == 561000
    noticed(double, "[5.3]", "text was freed or changed")


@pytest.mark.parametrize(
    ("dims", "more", "text"),
    [
        ([8], {"offset": 1}, "whole buffer"),
        ([2, 8], {"strides": [16, 1], "storage": [16]}, "whole buffer"),
        ([8], {"strides": [-1]}, "stride[0] is -1"),
        ([-8], {}, "viewDims[0] is -8"),
        ([8], {"form": 99}, "format 99"),
    ],
)
def test_tensors(double: Double, dims: list[int], more: dict[str, Any], text: str) -> None:
    address = double.malloc(256)
    double.tensor(address, dims, FLOAT16, **more)
    noticed(double, "[5.3]", text)


def test_tensor_addresses(double: Double) -> None:
    scatter = Scatter(double)
    double.tensor(scatter.memory[0] + 16, [8], FLOAT16)
    noticed(double, "[5.3]", "32-byte aligned")
    double.tensor(scatter.memory[0], [8], 5)
    noticed(double, "[5.3]", "dataType 5")
    shape = list(scatter.key.shape)
    scatter.replace[0] = double.tensor(double.malloc(64), shape, FLOAT16)
    refused(561103, scatter)
    noticed(double, "[5.3]", "storageDims describe 192 bytes, 64 are allocated")
    host = double.made("aclrtMallocHost", c_size_t(4096))
    scatter.replace[0] = double.tensor(host, shape, FLOAT16)
    refused(561103, scatter)
    noticed(double, "[5.3]", "host memory")
    gone = double.malloc(4096)
    scatter.replace[0] = double.tensor(gone, shape, FLOAT16)
    double.free(gone)
    refused(561103, scatter)
    noticed(double, "[5.1]", "not allocated")
    scatter.replace[0] = double.tensor(None, shape, FLOAT16)
    size, executor = scatter.one()
    assert scatter.two(double.malloc(size), size, executor) == 561000
    noticed(double, "[5.3]", "tensorData is NULL")
    scatter.replace[0] = double.tensor(scatter.memory[0], shape, FLOAT16, form=29)
    refused(161002, scatter)
    noticed(double, "[5.4]", "expected ND")


def test_tensor_lists_destroy_their_members(double: Double) -> None:
    members = [double.tensor(double.malloc(64), [8], FLOAT16) for _ in range(2)]
    made = double.base.aclCreateTensorList((c_void_p * 2)(*members), c_uint64(2))
    assert double.live("tensor") == 2
    assert double.base.aclDestroyTensorList(pointer(made)) == 0
    assert double.live("tensor") == double.live("tensor_list") == 0
    assert double.base.aclDestroyTensor(pointer(None)) == 0
    assert double.destroy_tensor(members[0]) == 161002
    noticed(double, "tensor that was destroyed")


# -- arguments of phase one -----------------------------------------------------------------------


def test_nulls(double: Double) -> None:
    scatter = Scatter(double)
    scatter.replace[2] = None
    refused(561103, scatter)
    noticed(double, "[5.6]", "slotMapping is NULL")
    scatter = Scatter(double)
    scatter.replace |= {3: None, 4: None}
    refused(561103, scatter)
    noticed(double, "[5.5]", "not 0-dim")
    scatter.replace[4] = double.tensor(scatter.memory[4], scatter.cache.shape, FLOAT16)
    refused(161002, scatter)


def test_environment(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_OPP_PATH")
    refused(561107, Scatter(double))


def test_nct_needs_its_arrays(double: Double) -> None:
    scatter = Scatter(double)
    scatter.scatter_mode.value = b"Nct"
    refused(561002, scatter)
    noticed(double, "[5.5]", "NULL")
    scatter.strides, scatter.offsets = double.int_array([32]), double.int_array([0, 0])
    refused(561002, scatter)
    noticed(double, "[5.5]", "Nct needs 2")


def test_modes_are_case_sensitive(double: Double) -> None:
    scatter = Scatter(double)
    scatter.mode.value = b"norm"
    refused(561002, scatter)


def scatter_arguments(**more: Any) -> dict[str, Any]:
    rng = np.random.default_rng(2)
    bits = {"dtype": np.uint16, "size": (3, 2, 16)}
    return {
        "key": rng.integers(0, 1 << 16, **bits), "value": rng.integers(0, 1 << 16, **bits),
        "key_cache": np.zeros((2, 4, 2, 16), np.uint16),
        "value_cache": np.zeros((2, 4, 2, 16), np.uint16),
        "slot_mapping": np.array([1, 4, 2], np.int32),
        "dtype": "float16", "value_dtype": "float16",
    } | more  # fmt: skip


@pytest.mark.parametrize(
    ("soc", "more", "code"),
    [
        ("Ascend310P3", {}, 561112),
        ("Ascend910B", {}, 561112),
        (A2, {"dtype": "float8_e5m2"}, 161002),
        (A2, {"dtype": "uint16", "value_dtype": "uint16"}, 161002),
        (A950, {"dtype": "uint16", "value_dtype": "uint16"}, 0),
        (A950, {"value": None, "value_cache": None}, 561002),
        (A3, {"value": None, "value_cache": None}, 0),
        (A950, {"scatter_mode": "NHSD"}, 561002),
        (A3, {"slot_mapping": np.array([1, 2], np.int32)}, 561002),
        (A3, {"slot_mapping": np.array([1, 2, 3], np.float32)}, 161002),
        (A3, {"key_cache": np.zeros((2, 1, 2, 16), np.uint16)}, 561002),
        (A3, {"cache_mode": "PA_NZ"}, 561002),
        (A3, {"scatter_mode": "Alibi"}, 561002),
    ],
)
def test_what_a_soc_refuses(double: Double, soc: str, more: dict[str, Any], code: int) -> None:
    double.soc(soc)
    arguments = scatter_arguments(**more)
    if arguments["dtype"] == "float8_e5m2":
        for name in ("key", "value", "key_cache", "value_cache"):
            arguments[name] = arguments[name].view(np.uint8)
        arguments["value_dtype"] = "float8_e5m2"
    try:
        double.run("scatter_pa_kv_cache", arguments)
        seen = 0
    except Refused as error:
        seen = error.code
    assert seen == code
    double.violations()  # a dtype of no operator is one, too


@pytest.mark.parametrize("slot", [8, 1 << 20])
def test_a_slot_past_the_cache(double: Double, slot: int) -> None:
    with pytest.raises(Refused) as error:
        double.run("scatter_pa_kv_cache", scatter_arguments(slot_mapping=np.array([0, slot, 1])))
    assert error.value.code == 507035


def test_negative_slots_are_skipped_unless_the_quirk_is_on(double: Double) -> None:
    cache = np.zeros((2, 2, 4, 16), np.uint16)
    arguments = scatter_arguments(key_cache=cache, value_cache=cache.copy(), scatter_mode="NHSD")
    arguments["slot_mapping"] = np.array([-1, -5, 0], np.int32)
    seen = double.run("scatter_pa_kv_cache", arguments)
    assert np.count_nonzero(seen["key_cache"].any(-1)) == 2
    double.runtime.kvdouble_quirk(b"negative_slots", True)
    with pytest.raises(Refused) as error:
        double.run("scatter_pa_kv_cache", arguments)
    assert error.value.code == 507035


def test_nhsd_of_int8_writes_nothing(double: Double) -> None:
    arguments = scatter_arguments(scatter_mode="NHSD")
    for name in ("key", "value"):
        arguments[name] = np.ones((3, 2, 32), np.int8)
    for name in ("key_cache", "value_cache"):
        arguments[name] = np.zeros((2, 2, 4, 32), np.int8)
    del arguments["dtype"], arguments["value_dtype"]
    assert not double.run("scatter_pa_kv_cache", arguments)["key_cache"].any()


def test_custom_operator(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: dict[str, Any] = dict(
        selection_k_rope=None, selection_kv_cache=np.zeros((2, 2, 4), np.uint16),
        selection_kv_block_table=np.array([[0, 1]], np.int32),
        selection_kv_block_status=np.full((1, 1, 1, 3), -1, np.int32),
        selection_topk_indices=np.array([[[[2, 0]]]], np.int32), full_k_rope=None,
        full_kv_cache=np.arange(16, dtype=np.uint16).reshape(2, 2, 4),
        full_kv_block_table=np.array([[1, 0]], np.int32),
        full_kv_actual_seq=np.array([4], np.int32), full_q_actual_seq=np.array([1], np.int32),
        selection_topk_block_size=1, dtype="float16",
    )  # fmt: skip
    seen = double.run("gather_selection_kv_cache", arguments)
    assert seen["returned"].tolist() == [2]
    double.soc(A950)
    with pytest.raises(Refused) as error:
        double.run("gather_selection_kv_cache", arguments)
    assert error.value.code == 561112
    monkeypatch.setenv("ASCEND_OPP_PATH", "/nowhere")
    with pytest.raises(Refused) as error:
        double.run("gather_selection_kv_cache", arguments)
    assert error.value.code == 561003


# -- views (5.7) ----------------------------------------------------------------------------------


def strided_scatter(double: Double, soc: str, what: str) -> bool:
    """Whether the bytes are those that the views ask for."""
    double.soc(soc)
    scatter = Scatter(double)
    wide_cache = np.zeros((2, 2, 4, 2, 16), np.uint16)  # K and V halves of each block
    wide_key = np.zeros((3, 2, 2, 16), np.uint16)
    wide_key[:, 0], wide_cache[:, 0] = scatter.key, scatter.cache
    addresses = [double.upload(wide_key), double.upload(wide_cache)]
    if what == "key":
        scatter.replace[0] = double.tensor(
            addresses[0], [3, 2, 16], FLOAT16, strides=[64, 16, 1], storage=wide_key.shape
        )
    elif what == "cache":
        scatter.replace[1] = double.tensor(
            addresses[1], [2, 4, 2, 16], FLOAT16, strides=[256, 32, 16, 1], storage=[512]
        )
    elif what == "cache rows":  # [2, 2, 4, 2, 16] as [2, 2, 4 of 8 rows, ...]: axis 1 strided
        scatter.replace[1] = double.tensor(
            addresses[1], [2, 4, 2, 16], FLOAT16, strides=[256, 64, 16, 1], storage=[512]
        )
    workspace = scatter.launch()
    assert double.sync() == 0
    seen_wide = double.download(addresses[1], wide_cache)
    expected = scatter.expected()
    if what == "key":
        seen: Any = double.download(scatter.memory[1], scatter.cache)
    elif what == "cache":
        seen = seen_wide[:, 0]
    else:
        seen = seen_wide.reshape(2, 4, 64)[:, :, :32].reshape(2, 4, 2, 16)
        expected = wide_cache.reshape(2, 4, 64)[:, :, :32].reshape(2, 4, 2, 16).copy()
        for i, slot in enumerate(scatter.slots):
            expected[slot // 4, slot % 4] = scatter.key[i]
    double.free(workspace)
    return bool(np.array_equal(seen, expected))


@pytest.mark.parametrize(
    ("soc", "what", "right"),
    [(A950, what, True) for what in ("key", "cache", "cache rows")]
    + [(soc, what, what == "cache") for soc in (A2, A3) for what in ("key", "cache", "cache rows")],
)
def test_views(double: Double, soc: str, what: str, right: bool) -> None:
    assert strided_scatter(double, soc, what) is right


def test_a_strided_last_axis_is_copied(double: Double) -> None:
    scatter = Scatter(double)
    wide = np.zeros((3, 2, 16, 2), np.uint16)
    wide[..., 0] = scatter.key
    scatter.replace[0] = double.tensor(
        double.upload(wide), [3, 2, 16], FLOAT16, strides=[64, 32, 2], storage=wide.shape
    )
    scatter.launch()
    assert double.sync() == 0
    np.testing.assert_array_equal(
        double.download(scatter.memory[1], scatter.cache), scatter.expected()
    )


# -- graphs (1.8) ---------------------------------------------------------------------------------


def test_capture_and_replay(double: Double) -> None:
    scatter = Scatter(double)
    stream = double.stream()
    assert double.rt("aclmdlRICaptureBegin", pointer(stream), 0) == 0
    size, executor = scatter.one()
    room = double.malloc(size)
    assert scatter.two(room, size, executor, stream) == 0
    scatter.destroy()
    status = c_int()
    assert double.rt("aclmdlRICaptureGetInfo", pointer(stream), byref(status), None) == 0
    assert status.value == 1
    graph = get(double, "aclmdlRICaptureEnd", c_void_p, pointer(stream))
    assert double.sync(stream) == 0
    np.testing.assert_array_equal(double.download(scatter.memory[1], scatter.cache), scatter.cache)
    scatter.slots[:] = [1, 2, 3]  # contents are read at replay
    double.ok(
        double.copy(pointer(scatter.memory[2]), scatter.slots.ctypes.data_as(c_void_p), 12, H2D)
    )
    for _ in range(2):
        assert double.rt("aclmdlRIExecuteAsync", pointer(graph), pointer(stream)) == 0
    assert double.rt("aclmdlRIDestroy", pointer(graph)) == 107037
    noticed(double, "[1.8]", "running")
    assert double.sync(stream) == 0
    np.testing.assert_array_equal(
        double.download(scatter.memory[1], scatter.cache), scatter.expected()
    )
    double.free(scatter.memory[0])
    assert double.rt("aclmdlRIExecuteAsync", pointer(graph), pointer(stream)) == 107000
    noticed(double, "[1.8]", "was freed")
    assert double.rt("aclmdlRIDestroy", pointer(graph)) == 0


def begin(double: Double, mode: int = 0) -> int:
    stream = double.stream()
    assert double.rt("aclmdlRICaptureBegin", pointer(stream), mode) == 0
    return stream


def end(double: Double, stream: int) -> int:
    return double.rt("aclmdlRICaptureEnd", pointer(stream), byref(OUT))


def test_no_synchronous_calls_in_a_capture(double: Double) -> None:
    address, host = double.malloc(64), (ctypes.c_char * 64)()
    for mode, code in ((0, 107030), (1, 107030), (2, 0)):
        stream = begin(double, mode)
        assert double.copy(pointer(address), host, 64, H2D) == code
        if code:
            noticed(double, "[1.8]", "synchronous")
        assert end(double, stream) == (507903 if code else 0)
    stream = begin(double)
    assert double.copy_async(pointer(address), host, 64, H2D, stream) == 107000
    noticed(double, "[1.8]", "pageable")
    assert double.copy_async(pointer(address), host, 64, H2D, None) == 107041
    assert len(double.violations()) == 2
    end(double, stream)


def test_a_captured_stream_is_not_waited_for(double: Double) -> None:
    stream = begin(double)
    assert double.sync(stream) == 107027
    noticed(double, "[1.8]", "being captured")
    assert end(double, stream) == 507903
    assert end(double, stream) == 107029
    noticed(double, "[1.8]", "not captured")


def test_the_thread_that_began_ends(double: Double) -> None:
    def other() -> int:
        double.start()
        return end(double, stream)

    stream = begin(double)
    assert in_thread(other) == 107038
    noticed(double, "[1.8]", "another thread")
    assert end(double, stream) == 0
    stream = begin(double, mode=2)
    assert in_thread(other) == 0


@pytest.mark.parametrize("joined", [True, False])
def test_forks_are_joined(double: Double, joined: bool) -> None:
    one, two = begin(double), double.stream()
    fork, join = (double.made("aclrtCreateEventExWithFlag", SYNC) for _ in range(2))
    address, size = double.malloc(64), c_size_t(64)
    assert double.rt("aclrtRecordEvent", pointer(fork), pointer(one)) == 0
    assert double.rt("aclrtStreamWaitEvent", pointer(two), pointer(fork)) == 0
    assert double.rt("aclrtMemsetAsync", pointer(address), size, 9, size, pointer(two)) == 0
    if joined:
        assert double.rt("aclrtRecordEvent", pointer(join), pointer(two)) == 0
        assert double.rt("aclrtStreamWaitEvent", pointer(one), pointer(join)) == 0
        graph = get(double, "aclmdlRICaptureEnd", c_void_p, pointer(one))
        assert double.rt("aclmdlRIExecute", pointer(graph), -1) == 0
        assert double.download(address, np.empty(64, np.uint8))[0] == 9
        assert double.rt("aclrtSynchronizeEvent", pointer(fork)) == 107028
        noticed(double, "[1.8]", "recorded in a capture")
    else:
        assert end(double, one) == 107025
        noticed(double, "[1.8]", "not joined")
    assert double.sync(two) == 0


def test_outside_events_do_not_reach_in(double: Double) -> None:
    event, other = double.made("aclrtCreateEventExWithFlag", SYNC), double.stream()
    assert double.rt("aclrtRecordEvent", pointer(event), pointer(other)) == 0
    stream = begin(double)
    assert double.rt("aclrtStreamWaitEvent", pointer(stream), pointer(event)) == 107024
    noticed(double, "[1.8]", "outside")
    assert end(double, stream) == 507903
    stream = begin(double)
    assert double.rt("aclrtStreamWaitEventWithFlag", pointer(stream), pointer(event), 0, 1) == 0
    assert end(double, stream) == 0


# -- many threads ---------------------------------------------------------------------------------


def test_threads_side_by_side(double: Double) -> None:
    failures: list[Any] = []

    def work() -> None:
        double.start()
        try:
            stream = double.stream()
            for _ in range(5):
                scatter = Scatter(double)
                workspace = scatter.launch(stream)
                scatter.destroy()
                double.ok(double.sync(stream))
                seen = double.download(scatter.memory[4], scatter.cache)
                np.testing.assert_array_equal(seen, scatter.expected())
                scatter.free(workspace)
            double.ok(double.rt("aclrtDestroyStream", pointer(stream)))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert double.live() == 0, double.live_text()


@pytest.mark.parametrize("ordered", [True, False])
def test_a_workspace_of_two_streams(double: Double, ordered: bool) -> None:
    one, two, scatter = double.stream(), double.stream(), Scatter(double)
    workspace = scatter.launch(one)
    if ordered:
        event = double.made("aclrtCreateEventExWithFlag", SYNC)
        assert double.rt("aclrtRecordEvent", pointer(event), pointer(one)) == 0
        assert double.rt("aclrtStreamWaitEvent", pointer(two), pointer(event)) == 0
    size, executor = scatter.one()
    assert scatter.two(workspace, size, executor, two) == 0
    if not ordered:
        noticed(double, "[5.3]", "another stream")
    for stream in (two, one):
        assert double.sync(stream) == 0


def test_a_kernel_reads_swapped_memory(double: Double) -> None:
    scatter = Scatter(double)
    page = double.made("aclrtMallocHost", c_size_t(2 * 4096))
    aligned = (page + 4095) // 4096 * 4096
    ctypes.memmove(aligned, scatter.key.tobytes(), scatter.key.nbytes)
    double.ok(double.rt("aclrtHostRegister", pointer(aligned), c_uint64(4096), 0, byref(OUT)))
    scatter.replace[0] = double.tensor(OUT.value, scatter.key.shape, FLOAT16)
    scatter.launch()
    assert double.rt("aclrtHostUnregister", pointer(aligned)) == 0
    noticed(double, "[5.9]", "before its stream passed")
    assert double.sync() == 507015
    double.ok(double.rt("aclrtHostRegister", pointer(aligned), c_uint64(4096), 0, byref(OUT)))
    scatter.destroy()
    scatter.replace[0] = double.tensor(OUT.value, scatter.key.shape, FLOAT16)
    scatter.launch()
    assert double.sync() == 0
    np.testing.assert_array_equal(
        double.download(scatter.memory[1], scatter.cache), scatter.expected()
    )
    assert double.rt("aclrtHostUnregister", pointer(aligned)) == 0


def test_a_repeatable_executor_is_the_callers(double: Double) -> None:
    cache = np.arange(2 * 4 * 16, dtype=np.uint16).reshape(2, 4, 1, 16)
    memory = [double.upload(x) for x in (cache, np.array([[1]], np.int32), np.array([2], np.int32))]
    outs = [double.upload(np.zeros((2, 1, 16), np.uint16)) for _ in range(3)]
    tensors = [double.tensor(memory[0], cache.shape, FLOAT16) for _ in range(2)]
    tensors += [double.tensor(memory[1], [1, 1], INT32), double.tensor(memory[2], [1], INT32)]
    tensors += [double.tensor(outs[i], [2, 1, 16], FLOAT16) for i in range(2)]
    size, executor = double.phase_one(
        "aclnnGatherPaKvCache", *map(pointer, tensors), None, None, ctypes.c_bool(False)
    )
    workspace = double.malloc(size)
    assert double.base.aclSetAclOpExecutorRepeatable(pointer(executor)) == 0
    assert double.phase_two("aclnnGatherPaKvCache", workspace, size, executor) == 0
    assert double.base.aclSetOutputTensorAddr(
        pointer(executor), c_size_t(0), pointer(tensors[4]), pointer(outs[2])
    ) == 0  # fmt: skip
    assert double.phase_two("aclnnGatherPaKvCache", workspace, size, executor) == 0
    assert double.base.aclSetAclOpExecutorRepeatable(pointer(executor)) == 561000
    noticed(double, "[5.2]", "directly after phase one")
    assert double.base.aclDestroyAclOpExecutor(pointer(executor)) == 0
    assert double.sync() == 0
    for out in (outs[0], outs[2]):
        seen = double.download(out, np.empty((2, 1, 16), np.uint16))
        np.testing.assert_array_equal(seen, cache[1, :2])


def test_task_groups_go_with_their_graph(double: Double) -> None:
    stream = begin(double)
    assert double.rt("aclmdlRICaptureTaskGrpBegin", pointer(stream)) == 0
    assert double.rt("aclmdlRICaptureTaskGrpEnd", pointer(stream), byref(OUT)) == 0
    graph = get(double, "aclmdlRICaptureEnd", c_void_p, pointer(stream))
    assert double.live("task_group") == 1
    assert double.rt("aclmdlRIDestroy", pointer(graph)) == 0
    assert double.live("task_group") == 0
