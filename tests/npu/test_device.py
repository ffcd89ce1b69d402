# SPDX-License-Identifier: Apache-2.0
"""Opening an NPU, its memory and its graphs, over the test double."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_fixtures import anyio_backend, npu
from double import build
from double.direct import Double

import kvcore
from kvcore.npu.cann import library

__all__ = ["anyio_backend", "npu"]


def test_what_a_device_says(npu: Double) -> None:
    npu.runtime.kvdouble_devices(2)
    library.forget()
    with kvcore.Device(backend="aclnn:1", trace=True) as dev:
        assert isinstance(dev, kvcore.Device)
        assert dev.backend == "aclnn"
        assert dev.device_id == 1
        assert dev.profile.name == "A3"
        assert dev.memory().capacity
        assert "aclrtSetDevice(1)" in npu.calls()
        assert isinstance(dev.stream(), kvcore.Stream)
        assert isinstance(dev.event(), kvcore.Event)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"profile": "A2"}, kvcore.ParamInvalidError, r"^profile: expected 'A3'.* got 'A2'$"),
        ({"profile": "A9"}, kvcore.ParamInvalidError, r"^profile: expected one of"),
        ({"clock": "model"}, kvcore.ParamInvalidError, r"^clock: expected 'wall'"),
        ({"workers": 0}, kvcore.ParamInvalidError, r"^workers: "),
        (
            {"backend": "aclnn:1"},
            kvcore.BackendUnavailableError,
            r"^backend: .* from 0 to 0, got 1",
        ),
        ({"backend": "aclnn:"}, kvcore.BackendUnavailableError, r"^backend: expected 'aclnn' or"),
        ({"backend": "aclnn:-1"}, kvcore.BackendUnavailableError, r"^backend: expected 'aclnn' or"),
        ({"backend": "aclnn:¹"}, kvcore.BackendUnavailableError, r"^backend: expected 'aclnn' or"),
    ],
)
def test_devices_that_are_none(
    npu: Double, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        kvcore.Device(**{"backend": "aclnn", **options})


@pytest.mark.parametrize("soc", ["Ascend910B3", "Ascend910_9391", "Ascend950PR_9599"])
def test_a_profile_of_the_soc_that_is_there(npu: Double, soc: str) -> None:
    npu.soc(soc)
    library.forget()
    name = library.current().soc().name
    for profile in (None, name):
        with kvcore.Device(profile, backend="aclnn") as dev:
            assert dev.profile.name == name


def test_an_soc_that_is_not_supported(npu: Double) -> None:
    npu.soc("Ascend310P3")
    library.forget()
    with pytest.raises(kvcore.BackendUnavailableError, match="Ascend310P3"):
        kvcore.Device(backend="aclnn")


def test_several_devices_after_another_and_at_once(npu: Double) -> None:
    for _ in range(3):
        with kvcore.Device(backend="aclnn") as one, kvcore.Device(backend="aclnn") as two:
            for dev in (one, two):
                stream, buffer = dev.stream(), dev.empty(4)
                stream.fill(buffer, 0)
            with pytest.raises(kvcore.ParamInvalidError, match="another device"):
                stream.copy(buffer, one.empty(4))
        with pytest.raises(kvcore.StreamError, match="closed"):
            stream.fill(buffer, 0)
    assert npu.num_calls("aclInit") <= 4
    assert npu.num_calls("aclFinalize") == 0


PROGRAM = """
import os, sys
import kvcore
dev = kvcore.Device(backend="aclnn")
with dev:
    stream, buffer = dev.stream(), dev.empty(4)
    stream.fill(buffer, 0)
    stream.synchronize_blocking()
    {act}
"""


def run(installed: build.Installation, act: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(act=act)],
        env={**os.environ, **installed.environment()},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_child_may_use_nothing(cann: build.Installation) -> None:
    act = """
    if os.fork():
        os.wait()
    else:
        for use in (stream.synchronize_blocking, lambda: dev.empty(3), lambda: stream.query()):
            try:
                use()
            except kvcore.StreamError as error:
                print("forked" in str(error), flush=True)
        del buffer
        os._exit(0)
"""
    assert run(cann, act).split() == ["True"] * 3


WITHOUT = """
    import anyio
    host, side = dev.empty_swapped(4), dev.stream()
    stream.copy_batch([host[1:2], host[3:]], [buffer[:1], buffer[3:]])
    side.wait_stream(stream)
    side.copy(host, buffer)
    side.synchronize_blocking()
    stream.copy(buffer, host)
    anyio.run(stream.synchronize)
    print("not in this CANN, and not needed")
"""

MISSING: dict[str, tuple[tuple[str, ...], str]] = {
    "graphs": (
        ("aclmdlRICaptureBegin",),
        "try: dev.capture(stream).__enter__()\n"
        "    except kvcore.BackendUnavailableError as e: print(e)",
    ),
    "waits": (
        ("aclrtSynchronizeEventWithTimeout", "aclrtSynchronizeStreamWithTimeout"),
        WITHOUT,
    ),
    "memory": (("aclrtMallocHostWithCfg", "aclrtMemcpyBatchAsync"), WITHOUT),
    "streams": (
        ("aclrtSetStreamFailureMode", "aclrtStreamAbort", "aclrtDestroyStreamForce"),
        WITHOUT,
    ),
}


@pytest.mark.parametrize("what", MISSING)
def test_an_older_cann(cann_folder: Path, what: str) -> None:
    names, act = MISSING[what]
    found = run(build.build(cann_folder, missing=names), act)
    assert "not in this CANN" in found


HOST_USES: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda b: b.numpy(),
    "host": lambda b: b.host("r").__enter__(),
    "asarray": np.asarray,
    "dlpack": np.from_dlpack,
}


@pytest.mark.parametrize("use", HOST_USES)
def test_device_memory_is_not_the_host_s(npu: Double, use: str) -> None:
    with kvcore.Device(backend="aclnn") as dev:
        buffer = dev.empty((4, 4), "float32")[1:]
        with pytest.raises(
            kvcore.ParamInvalidError, match=r"^buffer: .* copy it to dev.empty_host"
        ):
            HOST_USES[use](buffer)
        assert buffer.view(-1).shape == (12,)
        assert buffer.address % 4 == 0
        host = dev.empty_swapped((4, 4))
        host.numpy()[...] = 1
        assert np.asarray(host).sum() == 16


def test_alignment(npu: Double) -> None:
    with kvcore.Device(backend="aclnn") as dev:
        for make in (dev.empty, dev.empty_host, dev.empty_swapped):
            for align in (1, 64, 512, 4096, 65536):
                assert make(3, "uint8", align=align).address % align == 0
            assert make((0, 3)).nbytes == 0


@pytest.mark.parametrize("use", HOST_USES)
def test_arrays_of_pinned_memory_outlive_their_device(npu: Double, use: str) -> None:
    with kvcore.Device(backend="aclnn") as dev:
        buffer = dev.empty_host(1000, "int32")
        array = HOST_USES[use](buffer)
        array = array if array.flags.writeable else buffer.host("w").__enter__()
    array[:] = 5
    assert npu.live("host_memory") == 1
    del buffer, array, dev
    gc.collect()
    assert npu.live("host_memory") == 0


def test_swapped_memory_has_two_addresses(npu: Double) -> None:
    with kvcore.Device(backend="aclnn") as dev:
        buffer = dev.empty_swapped((8, 16), "float16")
        view = buffer[2:]
        seen = view.__kvcore_device_array__
        assert seen.address - seen.base == view.address - buffer.address + (
            buffer.__kvcore_device_array__.address - seen.base
        )
        assert dev.empty_host(4).__kvcore_device_array__ is None
        assert npu.live("registration") == 1
        buffer.free()
        del view, seen
        gc.collect()
        dev.empty(1)
        assert npu.live("registration") == 0


def graphs(dev: Any) -> tuple[Any, Any, Any, Any]:
    return dev.stream("s"), dev.stream("t"), dev.empty(64, "int32"), dev.empty_host(64, "int32")


async def test_a_graph_reads_contents_at_replay(npu: Double) -> None:
    async with kvcore.Device(backend="aclnn") as dev:
        stream, side, there, host = graphs(dev)
        out = dev.empty_host(64, "int32")
        async with dev.capture(stream) as graph:
            stream.copy(there, host)
            side.wait_stream(stream)
            side.copy(out, there)
            stream.wait_stream(side)
        assert npu.live("graph") == 1
        for value in range(3):
            host.numpy()[:] = value
            graph.replay(stream)
            await stream.synchronize()
            assert (out.numpy() == value).all()
        other = dev.stream("other")
        for target in (stream, other, stream):
            graph.replay(target)
        await dev.synchronize()
        del graph
        gc.collect()
        async with dev.capture(stream):
            stream.fill(there, 0)
        assert npu.live("graph") == 1


async def test_a_captured_plan(npu: Double) -> None:
    async with kvcore.Device(backend="aclnn") as dev:
        stream = dev.stream()
        host = dev.empty_host((4, 2, 32), "float16")
        host.numpy()[...] = np.arange(4).reshape(4, 1, 1)
        key, value = dev.empty((4, 2, 32), "float16"), dev.empty((4, 2, 32), "float16")
        caches = [dev.empty((2, 16, 2, 32), "float16") for _ in range(2)]
        slots, where = dev.empty(4, "int32"), dev.empty_host(4, "int32")
        plan = kvcore.plan_scatter_pa_kv_cache(key, caches[0], slots, value, caches[1])
        for buffer in (key, value):
            stream.copy(buffer, host)
        await stream.synchronize()
        async with dev.capture(stream) as graph:
            stream.copy(slots, where)
            stream.launch(plan)
        out = dev.empty_host((32, 2, 32), "float16")
        for mapping in ([5, 6, 7, 8], [31, 0, 2, 9]):
            where.numpy()[:] = mapping
            stream.fill(caches[1], 0)
            graph.replay(stream)
            stream.copy(out, caches[1].view((32, 2, 32)))
            await stream.synchronize()
            assert np.array_equal(out.numpy()[mapping], host.numpy())
            assert np.count_nonzero(out.numpy()[:, 0, 0]) == 3


async def test_what_a_graph_of_the_npu_refuses(npu: Double) -> None:
    async with kvcore.Device(backend="aclnn") as dev:
        stream, side, there, host = graphs(dev)
        acts: dict[str, Callable[[], object]] = {
            "host function": lambda: stream.call(int),
            "pageable": lambda: stream.copy(there, np.zeros(64, np.int32)),
            "within host": lambda: stream.copy(host, host),
            "synchronise": stream.synchronize_blocking,
            "allocate": lambda: dev.empty(3),
        }
        async with dev.capture(stream) as graph:
            for act in acts.values():
                with pytest.raises(kvcore.CaptureError):
                    act()
            stream.fill(there, 7)
        graph.replay(stream)
        stream.copy(host, there)
        await stream.synchronize()
        assert (host.numpy() == 7).all()
        with pytest.raises(kvcore.CaptureError, match="'t': expected a fork"):  # noqa: PT012
            async with dev.capture(stream):
                side.wait_stream(stream)
                side.fill(there, 1)


@pytest.mark.parametrize(
    "symbol",
    [
        "aclmdlRICaptureBegin",
        "aclmdlRICaptureEnd",
        "aclrtMemcpyAsync",
        "aclrtCreateStreamWithConfig",
    ],
)
async def test_a_capture_that_cann_refuses(npu: Double, symbol: str) -> None:
    async with kvcore.Device(backend="aclnn") as dev:
        stream, _, there, host = graphs(dev)
        npu.fail(symbol, 1, 107030)
        with pytest.raises(kvcore.CaptureError):
            async with dev.capture(stream) as graph:
                stream.fill(there, 3)
        with pytest.raises(kvcore.CaptureError):
            graph.replay(stream)
        async with dev.capture(stream) as graph:
            stream.fill(there, 3)
        graph.replay(stream)
        stream.copy(host, there)
        await stream.synchronize()
        assert (host.numpy() == 3).all()


@pytest.mark.parametrize("stays", [False, True])
async def test_a_replay_that_the_device_fails(npu: Double, stays: bool) -> None:
    """A fork's copy fails: the replay's stream tells it, what is behind waits no longer."""
    async with kvcore.Device(backend="aclnn") as dev:
        stream, side, there, host = graphs(dev)
        other, out = dev.stream("other"), dev.empty_host(64, "int32")
        host.numpy()[:] = 5
        async with dev.capture(stream) as graph:
            side.wait_stream(stream)
            side.copy(there, host)
            stream.wait_stream(side)
        npu.runtime.kvdouble_poison(stays)
        npu.fail_async("aclmdlRIExecuteAsync", 1, 507035)
        graph.replay(stream)
        other.wait_stream(stream)
        other.copy(out, there)
        for who in (other, stream):
            with pytest.raises(kvcore.StreamError, match="replay on stream 's' failed"):
                await who.synchronize()
        npu.runtime.kvdouble_poison(False)
        await side.synchronize()
        graph.replay(stream)
        stream.copy(out, there)
        await stream.synchronize()
        assert (out.numpy() == 5).all()
        await dev.synchronize()


def test_what_a_kernel_may_touch(npu: Double) -> None:
    plain = np.zeros((4, 2, 32), np.float16)
    with kvcore.Device(backend="aclnn") as dev, kvcore.Device(backend="aclnn") as two:
        caches = [dev.empty((2, 16, 2, 32), "float16") for _ in range(2)]
        slots, swapped = dev.empty(4, "int32"), dev.empty_swapped(plain.shape, "float16")
        stream = dev.stream()
        stream.fill(slots, 0)
        freed = dev.empty(plain.shape, "float16")
        plan = kvcore.plan_scatter_pa_kv_cache(freed, caches[0], slots, swapped, caches[1])
        stream.launch(plan)
        stream.synchronize_blocking()
        freed.free()
        with pytest.raises(kvcore.ParamInvalidError, match=r"^key: expected live memory"):
            stream.launch(plan)
        theirs = two.empty(plain.shape, "float16")
        with pytest.raises(kvcore.ParamInvalidError, match=r"^key_cache: .* another Device's$"):
            kvcore.plan_scatter_pa_kv_cache(theirs, caches[0], slots, swapped, caches[1])
        plan = kvcore.plan_scatter_pa_kv_cache(swapped, caches[0], slots, swapped, caches[1])
        with pytest.raises(kvcore.ParamInvalidError, match=r"another device's$"):
            two.stream().launch(plan)
        for key in (plain, dev.empty_host(plain.shape, "float16")):
            with pytest.raises(kvcore.KVCoreError, match=r"^backend: .* got a mixture$"):
                kvcore.plan_scatter_pa_kv_cache(key, caches[0], slots, swapped, caches[1]).run()
