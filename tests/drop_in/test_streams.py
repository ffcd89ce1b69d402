# SPDX-License-Identifier: Apache-2.0
"""ns.npu: streams and events in torch_npu's words, races, captures."""

from __future__ import annotations

import threading
import types
from typing import Any

import pytest

import kvcore
from tensors import WITHOUT_TORCH

torch = pytest.importorskip("torch", reason=WITHOUT_TORCH)
from test_call_forms import selection  # noqa: E402

import kvcore.torch  # noqa: E402


def arguments() -> dict[str, Any]:
    return {
        "key": torch.randn(2, 1, 8),
        "value": torch.randn(2, 1, 8),
        "key_cache": torch.zeros(2, 4, 1, 8),
        "value_cache": torch.zeros(2, 4, 1, 8),
        "slot_indices": torch.tensor([1, 6]),
    }


def load(call: dict[str, Any], ns: Any) -> Any:
    return ns.npu_paged_cache_load(
        call["key_cache"], call["value_cache"], torch.tensor([[0, 1]]), torch.tensor([8])
    )


def test_a_client_with_two_streams(torch_npu: Any) -> None:
    npu = torch_npu.npu
    copy, compute = npu.Stream(), npu.Stream(device="npu:0", priority=-1)
    call = arguments()
    copy.wait_stream(npu.current_stream())
    with npu.stream(copy):
        assert npu.current_stream() == copy
        torch_npu._npu_reshape_and_cache(**call)
        done = copy.record_event()
    assert npu.current_stream() == npu.default_stream()
    with npu.stream(compute):
        done.wait(compute)
        compute.wait_event(done)
        key, _ = load(call, torch_npu)
    assert torch.equal(key[[1, 6]], call["key"])
    npu.synchronize()
    assert done.query()
    assert compute.query()
    compute.synchronize()
    done.synchronize()


def test_events_tell_time(torch_npu: Any) -> None:
    npu = torch_npu.npu
    start, end = npu.Event(enable_timing=True), npu.Event(enable_timing=True)
    start.record()
    torch_npu._npu_reshape_and_cache(**arguments())
    end.record(npu.current_stream())
    end.synchronize()
    assert start.elapsed_time(end) >= 0
    with pytest.raises(kvcore.ParamInvalidError, match="enable_timing=True"):
        npu.Event().elapsed_time(end)


def test_set_stream_is_of_this_thread(torch_npu: Any) -> None:
    npu = torch_npu.npu
    stream, seen = npu.Stream(), []
    npu.set_stream(stream)
    npu.set_stream(None)
    assert npu.current_stream() == stream
    assert hash(npu.current_stream()) == hash(stream)
    thread = threading.Thread(target=lambda: seen.append(npu.current_stream()))
    thread.start()
    thread.join()
    assert seen == [npu.default_stream()]
    npu.set_stream(npu.default_stream())
    with npu.stream(None):
        assert npu.current_stream() == npu.default_stream()


@pytest.mark.parametrize("device", [1, "npu:1", "cuda", 2.0])
def test_there_is_one_device(torch_npu: Any, device: Any) -> None:
    for function in (torch_npu.npu.Stream, torch_npu.npu.current_stream, torch_npu.npu.synchronize):
        with pytest.raises(kvcore.ParamInvalidError, match=r"^device: expected the one there is"):
            function(device)


def test_what_is_no_stream(torch_npu: Any) -> None:
    with pytest.raises(
        kvcore.ParamInvalidError, match=r"^stream: expected an npu\.Stream, got int"
    ):
        torch_npu.npu.Event().record(3)
    with pytest.raises(kvcore.ParamInvalidError, match=r"^stream: expected an npu\.Stream"):
        torch_npu.npu.set_stream("default")


def test_streams_of_an_installation_that_is_gone() -> None:
    ns = types.ModuleType("torch_npu")
    with kvcore.torch.install(ns):
        old = ns.npu.Stream()
    with kvcore.torch.install(ns):
        with pytest.raises(kvcore.ParamInvalidError, match=r"^stream: expected a stream of this"):
            ns.npu.set_stream(old)
        assert ns.npu.current_stream() == ns.npu.default_stream()


# ---------------------------------------------------------------- work of others on the streams
def test_a_call_waits_for_what_is_on_its_stream(torch_npu: Any) -> None:
    npu, call, gate, ran = torch_npu.npu, arguments(), threading.Event(), []

    def last() -> None:
        gate.wait(30)
        ran.append(float(call["key_cache"].abs().sum()))

    stream = npu.Stream()
    stream.raw.call(last)
    with npu.stream(stream):
        threading.Thread(target=gate.set).start()
        torch_npu._npu_reshape_and_cache(**call)
    assert ran == [0.0]
    assert call["key_cache"].any()


def test_failures_of_a_stream_are_raised_at_synchronize() -> None:
    ns = types.ModuleType("torch_npu")
    with kvcore.Device() as device, kvcore.torch.install(ns, device=device):
        assert ns.npu.default_stream().raw is device.default_stream

        def fail() -> None:
            raise ZeroDivisionError

        ns.npu.default_stream().raw.call(fail)
        with pytest.raises(kvcore.StreamError, match="ZeroDivisionError"):
            ns.npu.synchronize()


# ---------------------------------------------------------------- races
def two_streams(ns: Any, ordered: bool) -> None:
    npu, call = ns.npu, arguments()
    writer, reader = npu.Stream(), npu.Stream()
    with npu.stream(writer):
        ns._npu_reshape_and_cache(**call)
        event = writer.record_event()
    with npu.stream(reader):
        if ordered:
            reader.wait_event(event)
        load(call, ns)


def test_a_missing_wait_is_a_race() -> None:
    ns = types.ModuleType("torch_npu")
    with kvcore.Device(race_check="raise") as device, kvcore.torch.install(ns, device=device):
        two_streams(ns, ordered=False)
        with pytest.raises(kvcore.RaceError) as caught:
            ns.npu.synchronize()
    message = str(caught.value)
    assert "RAW" in message
    assert "_npu_reshape_and_cache at test_streams.py:" in message
    assert "npu_paged_cache_load at test_streams.py:" in message
    assert "key_cache" in message


def test_ordered_streams_do_not_race() -> None:
    ns = types.ModuleType("torch_npu")
    with kvcore.Device(race_check="raise") as device, kvcore.torch.install(ns, device=device):
        two_streams(ns, ordered=True)
        ns.npu.synchronize()
    assert device.races == ()


def test_disjoint_slots_do_not_race() -> None:
    ns = types.ModuleType("torch_npu")
    with kvcore.Device(race_check="raise") as device, kvcore.torch.install(ns, device=device):
        call = arguments()
        for slots in ([1, 6], [2, 5]):
            with ns.npu.stream(ns.npu.Stream()):
                call["slot_indices"] = torch.tensor(slots)
                ns._npu_reshape_and_cache(**call)
        ns.npu.synchronize()


def test_a_traced_device_sees_the_calls() -> None:
    ns = types.ModuleType("torch_npu")
    with kvcore.Device("A3", clock="model", trace=True) as device:
        with kvcore.torch.install(ns, device=device):
            ns._npu_reshape_and_cache(**arguments())
            ns.npu.synchronize()
        names = [span.name for span in device.trace.spans]
    assert any("_npu_reshape_and_cache at test_streams.py:" in name for name in names)


# ---------------------------------------------------------------- captures
def test_a_captured_stream_records_calls() -> None:
    ns = types.ModuleType("torch_npu")
    with kvcore.Device() as device, kvcore.torch.install(ns, device=device):
        npu, call = ns.npu, arguments()
        stream = npu.Stream()
        assert not npu.is_current_stream_capturing()
        with npu.stream(stream), device.capture(stream.raw) as graph:
            assert npu.is_current_stream_capturing()
            ns._npu_reshape_and_cache(**call)
            key, _ = load(call, ns)
        assert not npu.is_current_stream_capturing()
        assert not call["key_cache"].any()
        assert graph.num_operations == 2
        for slots in ([1, 6], [0, 7]):
            call["slot_indices"].copy_(torch.tensor(slots))
            graph.replay(stream.raw)
            stream.synchronize()
            assert torch.equal(key[slots], call["key"])


def test_captured_lengths_are_there_after_a_replay() -> None:
    ns = types.ModuleType("torch_npu")
    with kvcore.Device() as device, kvcore.torch.install(ns, device=device):
        stream = ns.npu.Stream()
        with ns.npu.stream(stream), device.capture(stream.raw) as graph:
            lengths = ns.npu_gather_selection_kv_cache(**selection(2, 1, [1, 1], False))
        lengths.zero_()
        graph.replay(stream.raw)
        stream.synchronize()
        assert lengths.tolist() == [8, 8]


# ---------------------------------------------------------------- external events
def test_an_external_event_may_be_waited_for_first(torch_npu: Any) -> None:
    npu = torch_npu.npu
    event, stream, default = npu.ExternalEvent(), npu.Stream(), npu.current_stream()
    event.wait(default)
    event.reset(default)
    assert not default.query()
    event.record(stream)
    torch_npu._npu_reshape_and_cache(**arguments())
    npu.synchronize()
    event.wait(default)  # the reset took the record back
    assert not default.query()
    event.record(stream)
    assert default.query()


def test_work_behind_an_event_that_nobody_recorded(torch_npu: Any) -> None:
    npu, call = torch_npu.npu, arguments()
    event = npu.ExternalEvent()
    event.wait()
    message = "expected the ExternalEvent it waits for to be recorded, got more work first"
    for act in (
        lambda: torch_npu._npu_reshape_and_cache(**call),
        npu.current_stream().synchronize,
        lambda: npu.Event().record(),
        event.wait,
    ):
        with pytest.raises(kvcore.StreamError, match=message):
            act()
    assert not call["key_cache"].any()
    event.record(npu.Stream())
    torch_npu._npu_reshape_and_cache(**call)


def test_an_external_event_in_a_graph() -> None:
    ns = types.ModuleType("torch_npu")
    with kvcore.Device() as device, kvcore.torch.install(ns, device=device):
        npu, call = ns.npu, arguments()
        stream, other, event = npu.Stream(), npu.Stream(), npu.ExternalEvent()
        with npu.stream(stream), device.capture(stream.raw) as graph:
            event.wait(stream)
            event.reset(stream)
            ns._npu_reshape_and_cache(**call)
        event.record(other)
        graph.replay(stream.raw)
        stream.synchronize()
        assert call["key_cache"].any()
        graph.replay(stream.raw)  # the graph has reset it
        with pytest.raises(kvcore.StreamError, match="recorded before the graph was replayed"):
            stream.synchronize()
