# SPDX-License-Identifier: Apache-2.0
"""Strided arrays, empty ones, and arrays on the host beside those on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from double.direct import Double
from npu_fixtures import a3 as a3
from npu_fixtures import machine as machine

import kvcore
import npu as calls
from kvcore.errors import BackendUnavailableError, ParamInvalidError, SlotRangeError
from kvcore.npu import options
from kvcore.npu.call import copies, launch
from kvcore.npu.call.device_arrays import DeviceArray
from kvcore.npu.cann import library
from kvcore.strides import coalesce

Array = np.ndarray[Any, Any]
T, H, D, NB, BS = 5, 2, 16, 3, 4
SLOTS = np.array([7, 0, -1, 11, 2], np.int32)


def filled(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).integers(-99, 99, shape).astype(np.float16)


def norm(**changed: Any) -> dict[str, Any]:
    arrays = {
        "key": filled(T, H, D),
        "key_cache": filled(NB, BS, H, D),
        "slot_mapping": SLOTS,
        "value": filled(T, H, D),
        "value_cache": filled(NB, BS, H, D),
    }
    return {name: array for name, array in (arrays | changed).items() if array is not None}


def agrees(operator: str, arrays: dict[str, Any], **given: Any) -> None:
    """The device leaves every array as the CPU does."""
    bases: dict[int, Array] = {}
    host = {}
    for name, array in arrays.items():
        base = array if array.base is None else array.base
        copy = bases.setdefault(id(base), base.copy())
        offset = array.ctypes.data - base.ctypes.data
        host[name] = np.ndarray(array.shape, array.dtype, copy, offset, array.strides)
    seen = calls.run(operator, arrays, **given)
    getattr(kvcore, operator)(**host, **given)
    for name, right in host.items():
        np.testing.assert_array_equal(seen[name], right, err_msg=name)


def called(double: Double, name: str) -> list[str]:
    return [call for call in double.calls() if call.startswith(f"{name}(")]


def refused(
    double: Double, operator: str, arrays: dict[str, Any], match: str, **given: Any
) -> None:
    with pytest.raises(ParamInvalidError, match=match):
        calls.run(operator, arrays, **given)
    assert not [call for call in double.calls() if call.startswith("aclnn")]


# ---------------------------------------------------------------- strides


def test_slices_of_a_fused_tensor(machine: str, double: Double) -> None:
    fused = filled(T, 3, H, D)
    agrees("scatter_pa_kv_cache", norm(key=fused[:, 1], value=fused[:, 2]))
    copied = called(double, "aclrtMemcpy2dAsync")
    assert len(copied) == (0 if machine == "950" else 2)  # its kernels honour outer strides


@pytest.mark.parametrize("how", ["refused", "not there", "too wide", "too high"])
def test_a_cann_that_copies_rows_alone(
    a3: Double, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Before 9.0, CANN copies in two dimensions between host and device only."""
    if how == "refused":
        a3.runtime.kvdouble_quirk(b"no_2d_on_device", True)
    elif how == "not there":
        monkeypatch.setitem(library.current()._homes, "aclrtMemcpy2dAsync", None)
    else:
        monkeypatch.setattr(copies, "MAX_WIDTH" if how == "too wide" else "MAX_HEIGHT", 1)
    fused = filled(T, 3, H, D)
    for _ in range(2):
        agrees("scatter_pa_kv_cache", norm(key=fused[:, 1], value=fused[:, 2]))
    assert len(called(a3, "aclrtMemcpyAsync")) == 4 * T
    # That it is refused is found out once.
    assert len(called(a3, "aclrtMemcpy2dAsync")) == (how == "refused")
    a3.runtime.kvdouble_quirk(b"no_2d_on_device", False)


def test_heads_that_lie_apart(machine: str, double: Double) -> None:
    wide = filled(T, 2 * H, D)
    agrees("scatter_pa_kv_cache", norm(key=wide[:, ::2], value=filled(H, T, D).transpose(1, 0, 2)))


def test_keys_backwards_or_all_the_same(machine: str, double: Double) -> None:
    agrees("scatter_pa_kv_cache", norm(key=filled(T, H, D)[::-1]))
    same = np.broadcast_to(filled(1, H, D), (T, H, D))
    placed = calls.Placed(**norm())
    first = placed["key"]
    placed.arrays["key"] = DeviceArray(first.memory, (T, H, D), "float16", (0, 2 * D, 2))
    kvcore.scatter_pa_kv_cache(**placed.arrays)
    want = norm(key=np.broadcast_to(norm()["key"][:1], same.shape))
    kvcore.scatter_pa_kv_cache(**want)
    np.testing.assert_array_equal(placed.host("key_cache"), want["key_cache"])
    placed.free()


def test_a_last_axis_with_gaps(machine: str, double: Double) -> None:
    agrees("scatter_pa_kv_cache", norm(key=filled(T, H, 2 * D)[:, :, ::2]))


def test_the_caches_of_one_slab(machine: str, double: Double) -> None:
    slab = filled(NB, 2, BS, H, D)
    agrees("scatter_pa_kv_cache", norm(key_cache=slab[:, 0], value_cache=slab[:, 1]))


def test_a_slab_without_a_kernel_that_honours_it(a3: Double) -> None:
    slab = filled(NB, 2, BS, H, D)
    key_only = norm(key_cache=slab[:, 0], value=None, value_cache=None)
    refused(a3, "scatter_pa_kv_cache", key_only, "key_cache: expected a contiguous array on A3")
    nz = filled(NB, 2, H * D // 16, BS, 16)
    arrays = norm(key_cache=nz[:, 0], value_cache=nz[:, 1])
    refused(a3, "scatter_pa_kv_cache", arrays, "key_cache: .* contiguous", cache_mode="PA_NZ")


def test_a_cache_strided_within_its_blocks(machine: str, double: Double) -> None:
    arrays = norm(key_cache=filled(NB, BS, 2 * H, D)[:, :, ::2])
    if machine == "950":
        agrees("scatter_pa_kv_cache", arrays)
        return
    refused(double, "scatter_pa_kv_cache", arrays, "key_cache: .* only the first axis .* strided")
    arrays = norm(value_cache=filled(NB, H, BS, D).transpose(0, 2, 1, 3))
    refused(double, "scatter_pa_kv_cache", arrays, "value_cache: .* only the first axis")


def test_a_cache_with_gaps_in_its_last_axis(machine: str, double: Double) -> None:
    arrays = norm(key_cache=filled(NB, BS, H, 2 * D)[..., ::2])
    refused(double, "scatter_pa_kv_cache", arrays, "key_cache: ")


def gathered(**changed: Any) -> dict[str, Any]:
    arrays = {
        "key_cache": filled(NB, BS, H, D),
        "value_cache": filled(NB, BS, H, D),
        "block_tables": np.array([[2, 0], [1, 1]], np.int32),
        "seq_lens": np.array([6, 3], np.int32),
        "key": filled(9, H, D),
        "value": filled(9, H, D),
    }
    return arrays | changed


def test_gathers_of_strided_arrays(machine: str) -> None:
    slab = filled(NB, 2, BS, H, D)
    agrees("gather_pa_kv_cache", gathered(key_cache=slab[:, 0], value_cache=slab[:, 1]))
    tables = np.array([[2, 9, 0, 9], [1, 9, 1, 9]], np.int32)[:, ::2]
    agrees("gather_pa_kv_cache", gathered(block_tables=tables))


def test_a_strided_output(machine: str, double: Double) -> None:
    out = gathered(key=filled(9, 2 * H, D)[:, ::2])
    if machine == "950":
        agrees("gather_pa_kv_cache", out)
    else:
        refused(double, "gather_pa_kv_cache", out, "key: expected a contiguous array")


@pytest.mark.parametrize(
    ("shape", "strides", "run", "axes"),
    [
        ((4, 8), (16, 2), 64, []),
        ((4, 8), (20, 2), 16, [(4, 20)]),
        ((3, 4, 8), (64, 16, 2), 192, []),
        ((3, 4, 8), (128, 16, 2), 64, [(3, 128)]),
        ((3, 4, 8), (80, 20, 2), 16, [(12, 20)]),
        ((3, 4, 8), (16, 64, 2), 16, [(3, 16), (4, 64)]),
        ((5, 1, 2), (4, 999, 2), 20, []),
        ((5, 2), (4, 4), 2, [(5, 4), (2, 4)]),
        ((), (), 2, []),
    ],
)
def test_axes_are_joined(
    shape: tuple[int, ...], strides: tuple[int, ...], run: int, axes: list[tuple[int, int]]
) -> None:
    assert coalesce(zip(shape, strides, strict=True), 2) == (axes, run)


# ---------------------------------------------------------------- empty calls, storage


def test_nothing_to_do_calls_nothing(machine: str, double: Double) -> None:
    none = norm(key=filled(0, H, D), value=filled(0, H, D), slot_mapping=SLOTS[:0])
    agrees("scatter_pa_kv_cache", none)
    lengths = np.zeros(2, np.int32)
    empty = gathered(key=filled(0, H, D), value=filled(0, H, D), seq_lens=lengths)
    agrees("gather_pa_kv_cache", empty)
    assert not [call for call in double.calls() if call.startswith(("aclnn", "aclCreate"))]


def test_an_array_that_leaves_its_storage(a3: Double) -> None:
    placed = calls.Placed(**norm())
    whole = placed["key"]
    placed.arrays["key"] = DeviceArray(whole.memory, (T, H, D), "float16", None, 2)
    with pytest.raises(ParamInvalidError, match="key: expected elements inside its storage"):
        kvcore.scatter_pa_kv_cache(**placed.arrays)
    placed.arrays["key"] = DeviceArray(whole.memory, (T, H, D // 2), "float16", None, 1)
    with pytest.raises(ParamInvalidError, match="key"):
        kvcore.scatter_pa_kv_cache(**placed.arrays)
    placed.free()


def test_views_behind_an_offset(machine: str, double: Double) -> None:
    rows = filled(T + 2, H, D)
    agrees("scatter_pa_kv_cache", norm(key=rows[1 : T + 1]))


# ---------------------------------------------------------------- host values


def on_device(arrays: dict[str, Any], *host: str) -> tuple[calls.Placed, dict[str, Any]]:
    placed = calls.Placed(**{k: v for k, v in arrays.items() if k not in host})
    return placed, placed.arrays | {name: arrays[name] for name in host}


def test_slots_on_the_host_are_checked_and_copied(a3: Double) -> None:
    arrays = norm(slot_mapping=np.repeat(SLOTS, 2)[::2])
    placed, given = on_device(arrays, "slot_mapping")
    kvcore.scatter_pa_kv_cache(**given, backend="aclnn")
    want = norm()
    kvcore.scatter_pa_kv_cache(**want)
    np.testing.assert_array_equal(placed.host("key_cache"), want["key_cache"])
    given["slot_mapping"] = np.array([0, 1, 2, 12, 3], np.int32)
    before = len(a3.calls())
    with pytest.raises(SlotRangeError, match=r"slot_mapping\[3\]: expected slot < 12"):
        kvcore.scatter_pa_kv_cache(**given, backend="aclnn")
    assert not [call for call in a3.calls()[before:] if call.startswith("acl") and "nn" in call]
    placed.free()


def test_a_mixture_needs_the_backend_s_name(a3: Double) -> None:
    placed, given = on_device(norm(), "slot_mapping")
    with pytest.raises(ParamInvalidError, match=r"backend: .* a mixture"):
        kvcore.scatter_pa_kv_cache(**given)
    placed.free()
    placed, given = on_device(norm(), "key")
    with pytest.raises(ParamInvalidError, match=r"backend: .* a mixture"):
        kvcore.scatter_pa_kv_cache(**given, backend="aclnn")
    placed.free()


def test_a_plan_reads_host_values_anew(a3: Double) -> None:
    slots = SLOTS.copy()
    placed, given = on_device(norm(slot_mapping=slots), "slot_mapping")
    plan = kvcore.plan_scatter_pa_kv_cache(**given, backend="aclnn")
    plan.run()
    slots[:] = [5, 4, 3, -1, 1]
    plan.run()
    want = norm()
    kvcore.scatter_pa_kv_cache(**want)
    kvcore.scatter_pa_kv_cache(**want | {"slot_mapping": slots})
    np.testing.assert_array_equal(placed.host("value_cache"), want["value_cache"])
    slots[2] = 99
    with pytest.raises(SlotRangeError):
        plan.run()
    placed.free()


def test_values_on_the_device_are_checked_when_asked(a3: Double) -> None:
    placed = calls.Placed(**norm(slot_mapping=np.array([0, 1, 2, 12, 3], np.int32)))
    with options.use_options(check="device"), pytest.raises(SlotRangeError):
        kvcore.scatter_pa_kv_cache(**placed.arrays)
    assert not called(a3, "aclnnScatterPaKvCache")
    placed.free()
    table = gathered(block_tables=np.array([[2, 3], [1, 1]], np.int32))
    placed = calls.Placed(**table)
    with (
        options.use_options(check="device"),
        pytest.raises(ParamInvalidError, match=r"block_tables\[0, 1\]"),
    ):
        kvcore.gather_pa_kv_cache(**placed.arrays)
    placed.free()


def test_a_negative_slot_that_would_write_in_front_of_the_cache(a3: Double) -> None:
    arrays = norm(key_cache=filled(NB, H, BS, D), value_cache=filled(NB, H, BS, D))
    placed, given = on_device(arrays, "slot_mapping")
    with pytest.raises(ParamInvalidError, match="writes in front of the cache"):
        kvcore.scatter_pa_kv_cache(**given, scatter_mode="NHSD", backend="aclnn")
    assert not called(a3, "aclnnScatterPaKvCache")
    placed.free()


@pytest.mark.parametrize("host", [(), ("token_offset", "seq_len"), ("seq_len",)])
def test_an_update_s_values_from_either_side(a3: Double, host: tuple[str, ...]) -> None:
    arrays = {
        "new_kv": filled(5, 32),
        "past": filled(2, 2, 8, 32),
        "token_offset": np.array([4, 7], np.int32),
        "seq_len": np.array([2, 3], np.int32),
    }
    placed, given = on_device(arrays, *host)
    answer = kvcore.kv_cache_update(**given, layer_id=1, backend="aclnn")
    assert answer is placed["past"]
    kvcore.kv_cache_update(**arrays, layer_id=1)
    np.testing.assert_array_equal(placed.host("past"), arrays["past"])
    placed.free()
    for name, value in (("token_offset", [4, 9]), ("seq_len", [2, 2])):
        placed, given = on_device(arrays | {name: np.array(value, np.int32)}, *host)
        before = len(called(a3, "aclnnScatterPaKvCache"))
        with pytest.raises(ParamInvalidError):
            kvcore.kv_cache_update(**given, layer_id=1, backend="aclnn")
        assert len(called(a3, "aclnnScatterPaKvCache")) == before
        placed.free()


# ---------------------------------------------------------------- host arrays


def test_host_arrays_need_the_cpu(a3: Double) -> None:
    with pytest.raises(BackendUnavailableError, match="'aclnn' cannot reach host memory"):
        kvcore.scatter_pa_kv_cache(**norm(), backend="aclnn")


def test_the_cpu_stands_in_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCORE_ACLNN_LIBRARY_PATH", "/nowhere")
    library.forget()
    arrays, want = norm(), norm()
    with pytest.raises(BackendUnavailableError, match="no CANN runtime library"):
        kvcore.scatter_pa_kv_cache(**arrays, backend="aclnn")
    with options.use_options(fallback="cpu"):
        kvcore.scatter_pa_kv_cache(**arrays, backend="aclnn")
    kvcore.scatter_pa_kv_cache(**want)
    np.testing.assert_array_equal(arrays["key_cache"], want["key_cache"])
    library.forget()


@pytest.mark.parametrize("option", ["check", "quirks", "fallback"])
def test_options_are_checked(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(ParamInvalidError, match=f"{option}: expected one of"),
        options.use_options(**{option: "nonsense"}),
    ):
        pass
    monkeypatch.setenv(f"KVCORE_ACLNN_{option.upper()}", "nonsense")
    with pytest.raises(ParamInvalidError, match=f"KVCORE_ACLNN_{option.upper()}: expected one of"):
        getattr(options, option)()


# ---------------------------------------------------------------- streams


def test_onto_a_stream_with_memory_of_the_caller_s_own(a3: Double) -> None:
    cann = library.current()
    stream = a3.stream()
    fused = filled(T, 3, H, D)
    arrays = norm(key=fused[:, 1], value=fused[:, 2])
    placed = calls.Placed(**arrays)
    kept: list[Any] = []
    with launch.onto(stream=stream, device_id=0, keep=kept.append):
        kvcore.scatter_pa_kv_cache(**placed.arrays)
    assert [memory.nbytes for memory in kept[:2]] == [2 * T * H * D] * 2
    cann.aclrtSynchronizeStream(stream)
    kvcore.scatter_pa_kv_cache(**arrays)
    np.testing.assert_array_equal(placed.host("key_cache"), arrays["key_cache"])
    for memory in kept:
        memory.free()
        memory.free()
    placed.free()
    assert called(a3, "aclnnScatterPaKvCache")[0].endswith(f"{stream:#x})")
    cann.aclrtDestroyStream(stream)


def test_a_stream_of_another_device(a3: Double) -> None:
    placed = calls.Placed(**norm())
    with (
        launch.onto(stream=0, device_id=3),
        pytest.raises(ParamInvalidError, match="stream: expected one of device 0"),
    ):
        kvcore.scatter_pa_kv_cache(**placed.arrays)
    placed.free()


def test_a_workspace_grows_and_the_old_one_is_freed(a3: Double) -> None:
    for tokens in (4, 3000, 4, 9000):
        arrays = norm(
            key=filled(2 * tokens, H, D)[::2],
            value=filled(2 * tokens, H, D)[::2],
            slot_mapping=np.arange(tokens, dtype=np.int32),
            key_cache=filled(tokens, BS, H, D),
            value_cache=filled(tokens, BS, H, D),
        )
        agrees("scatter_pa_kv_cache", arrays)
    pool = launch.memory.pool_of(library.current(), 0, 0)
    pool.collect()
    assert not pool._retired


class HostileToTheHost(DeviceArray):
    """Device memory that refuses to be read by the host, as the runtime's buffers do."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        raise ParamInvalidError("no host may read this")

    __kvcore_array__ = __array_interface__


def test_a_plan_never_asks_for_the_host_s_view(a3: Double) -> None:
    placed = calls.Placed(**norm())
    for name, array in placed.arrays.items():
        assert array is not None
        placed.arrays[name] = HostileToTheHost(array.memory, array.shape, array.dtype)
    plan = kvcore.plan_scatter_pa_kv_cache(**placed.arrays)
    plan.run()
    plan.run()
    want = norm()
    kvcore.scatter_pa_kv_cache(**want)
    np.testing.assert_array_equal(placed.host("key_cache"), want["key_cache"])
    placed.free()
