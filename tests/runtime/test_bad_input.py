# SPDX-License-Identifier: Apache-2.0
"""Hostile arguments: a typed error at the call, nothing queued, nothing hangs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fakes import FakePlan, device

import kvcore
from kvcore.runtime import DeviceProfile


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"profile": "A9"}, "profile"),
        ({"profile": 3}, "profile"),
        ({"clock": "sun"}, "clock"),
        ({"clock": None}, "clock"),
        ({"clock": "model"}, "clock"),
        ({"race_check": True}, "race_check"),
        ({"workers": 0}, "workers"),
        ({"workers": -1}, "workers"),
        ({"workers": 1000}, "workers"),
        ({"workers": True}, "workers"),
        ({"workers": 2.0}, "workers"),
        ({"seed": 1.5}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"seed": 2**70}, "seed"),
        ({"max_events": 0}, "max_events"),
        ({"check_host": True}, "check_host"),
    ],
)
def test_devices(options: dict[str, Any], argument: str) -> None:
    with pytest.raises(kvcore.ParamInvalidError, match=f"^{argument}: expected") as told:
        kvcore.Device(**options)
    assert told.value.argument == argument


def test_backends() -> None:
    with device(backend="cpu") as dev:
        assert dev.backend == "cpu"
    for name in ("gpu", "", 3, "cpu:1"):
        with pytest.raises(
            kvcore.BackendUnavailableError, match=r"^backend: expected None, 'cpu' or"
        ):
            kvcore.Device(backend=name)
    with pytest.raises(kvcore.BackendUnavailableError, match=r"^backend: expected 'aclnn' or 'acl"):
        kvcore.Device(backend="aclnn:x")


@pytest.mark.parametrize(
    ("act", "error", "match"),
    [
        (lambda s: s.launch(None), kvcore.ParamInvalidError, "^plan: expected .* got NoneType$"),
        (lambda s: s.launch(print), kvcore.ParamInvalidError, "^plan: "),
        (lambda s: s.launch(FakePlan), kvcore.ParamInvalidError, "^plan: "),
        (lambda s: s.call(None), kvcore.ParamInvalidError, "^fn: expected a callable"),
        (lambda s: s.compute(-1), kvcore.ParamInvalidError, "^us: expected .* got -1$"),
        (lambda s: s.compute(math.nan), kvcore.ParamInvalidError, "^us: "),
        (lambda s: s.compute(math.inf), kvcore.ParamInvalidError, "^us: "),
        (lambda s: s.compute("3"), kvcore.ParamInvalidError, "^us: "),
        (lambda s: s.compute(None), kvcore.ParamInvalidError, "^us: "),
        (lambda s: s.compute(True), kvcore.ParamInvalidError, "^us: "),
        (lambda s: s.compute(10**400), kvcore.ParamInvalidError, "^us: "),
        (lambda s: s.wait_event(None), kvcore.ParamInvalidError, "^event: expected an Event"),
        (lambda s: s.record_event(3), kvcore.ParamInvalidError, "^event: expected an Event"),
        (lambda s: s.wait_stream(None), kvcore.ParamInvalidError, "^stream: expected a Stream"),
        (lambda s: s.device.use(None), kvcore.ParamInvalidError, "^stream: expected a stream of"),
        (lambda s: s.device.capture(3), kvcore.ParamInvalidError, "^stream: expected a stream of"),
    ],
)
async def test_streams(
    clock: str, act: Callable[[Any], object], error: type[Exception], match: str
) -> None:
    async with device(clock) as dev:
        stream = dev.stream()
        with pytest.raises(error, match=match):
            act(stream)
        assert stream.query()
        await stream.run(FakePlan())


@pytest.mark.parametrize(
    ("dst", "src", "match"),
    [
        (np.zeros(4), np.zeros(5), r"^src: expected shape \(4,\) as dst, got \(5,\)$"),
        (np.zeros(4), np.zeros((2, 2)), r"^src: expected shape"),
        (np.zeros(4), np.zeros(4, np.float32), r"^src: expected dtype float64 as dst, got float32"),
        (np.zeros(4), np.zeros(4, ">f8"), r"^src: expected dtype"),
        (np.broadcast_to(np.zeros(1), 4), np.zeros(4), r"^dst: .* read-only"),
        (None, np.zeros(4), r"^dst: expected a buffer or an array, got NoneType$"),
        (np.zeros(4), None, r"^src: expected a buffer or an array, got NoneType$"),
        (np.zeros(4), [0, 0, 0, 0], r"^src: expected a buffer or an array, got list$"),
        (np.zeros(4), "abcd", r"^src: expected a buffer or an array, got str$"),
        (np.zeros(1, object), np.zeros(1, object), r"^dst: .* dtype object$"),
    ],
)
async def test_copies(clock: str, dst: Any, src: Any, match: str) -> None:
    async with device(clock) as dev:
        stream = dev.stream()
        with pytest.raises(kvcore.ParamInvalidError, match=match):
            stream.copy(dst, src)
        at = match.replace("dst:", r"dst\[1\]:").replace("src:", r"src\[1\]:")
        with pytest.raises(kvcore.ParamInvalidError, match=at.replace("as dst,", r"as dst\[1\],")):
            stream.copy_batch([np.zeros(4), dst], [np.zeros(4), src])
        assert stream.query()


async def test_batches(clock: str) -> None:
    async with device(clock) as dev:
        stream = dev.stream()
        with pytest.raises(kvcore.ParamInvalidError, match=r"^srcs: .* of 1 sources .* got 2$"):
            stream.copy_batch([np.zeros(4)], [np.zeros(4)] * 2)
        with pytest.raises(kvcore.ParamInvalidError, match=r"^srcs: .* got no sequence$"):
            stream.copy_batch(3, 4)
        stream.copy_batch([], [])
        stream.copy(np.zeros((0, 4)), np.zeros((0, 4)))
        await stream.synchronize()


async def test_anything_with_a_buffer_can_be_copied(clock: str) -> None:
    async with device(clock) as dev:
        stream = dev.stream()
        target = bytearray(4)
        stream.copy(target, memoryview(b"abcd"))
        await stream.synchronize()
        assert target == b"abcd"
        with pytest.raises(kvcore.ParamInvalidError, match=r"^dst: .* read-only"):
            stream.copy(b"abcd", target)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("int8", 300), ("uint8", -1), ("int32", 1.5), ("int32", "x"), ("int32", None),
     ("float32", [1, 2]), ("int64", 2**63), ("float32", "nan?"), ("int32", math.nan)],
)  # fmt: skip
def test_fill_values(dtype: str, value: Any) -> None:
    with device() as dev:
        buffer = dev.empty(4, dtype)
        with pytest.raises(kvcore.ParamInvalidError, match=r"^value: expected one value"):
            dev.stream().fill(buffer, value)


def test_fill_takes_every_type() -> None:
    with device() as dev:
        stream = dev.stream()
        values = {"bfloat16": 1.5, "float16": -2, "int8": -128, "uint64": 2**64 - 1, "bool": True}
        for dtype, value in values.items():
            buffer = dev.empty((3, 2), dtype)
            stream.fill(buffer, value)
            stream.synchronize_blocking()
            assert (buffer.numpy() == value).all()


async def test_events_and_streams_of_another_device(clock: str) -> None:
    async with device(clock) as one, device(clock) as two:
        mine, theirs = one.stream("mine"), two.stream("theirs")
        event = theirs.record_event()
        for act in (
            lambda: mine.wait_event(event),
            lambda: mine.record_event(event),
            lambda: mine.wait_stream(theirs),
            lambda: event.record(mine),
            lambda: event.wait(mine),
        ):
            with pytest.raises(kvcore.ParamInvalidError, match=r"^event: .* of another device$"):
                act()
        for act in (lambda: one.use(theirs), lambda: one.capture(theirs)):
            with pytest.raises(kvcore.ParamInvalidError, match=r"^stream: .* of another device$"):
                act()
        async with one.capture(mine) as graph:
            mine.compute(1)
        with pytest.raises(kvcore.ParamInvalidError, match=r"^stream: .* of another device$"):
            graph.replay(theirs)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"h2d_bandwidth": 0}, r"^h2d_bandwidth: expected a finite number > 0, .* got 0$"),
        ({"hbm_bandwidth": -1}, r"^hbm_bandwidth: "),
        ({"capacity": 0}, r"^capacity: "),
        ({"launch_cost": -0.5}, r"^launch_cost: expected a finite number >= 0"),
        ({"d2h_latency": math.nan}, r"^d2h_latency: "),
        ({"d2h_latency": math.inf}, r"^d2h_latency: "),
        ({"query_cost": 0}, r"^query_cost: "),
        ({"pageable_share": 1.5}, r"^pageable_share: expected a share"),
        ({"capacity": "64"}, r"^capacity: expected a number"),
        ({"capacity": True}, r"^capacity: expected a number"),
        ({"speed": 3}, r"^speed: expected one of"),
    ],
)
def test_profiles(values: dict[str, Any], match: str) -> None:
    with pytest.raises(kvcore.ParamInvalidError, match=match):
        DeviceProfile.named("A3").replace(**values)
