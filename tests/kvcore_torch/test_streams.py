# SPDX-License-Identifier: Apache-2.0
"""ns.npu: streams and events in torch_npu's words, races, captures."""

from __future__ import annotations

import os
import threading
import types
from pathlib import Path
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


# ---------------------------------------------------------------- one current stream
def test_the_current_stream_is_the_devices() -> None:
    ns = types.ModuleType("torch_npu")
    with kvcore.Device() as device, kvcore.torch.install(ns, device=device):
        npu = ns.npu
        one, two = npu.Stream(), npu.Stream()
        assert npu.current_stream().raw is device.current_stream() is device.default_stream
        npu.set_stream(one)
        assert npu.current_stream() is one
        assert kvcore.current_stream() is device.current_stream() is one.raw
        with npu.stream(two):
            assert npu.current_stream() is two
            assert kvcore.current_stream() is device.current_stream() is two.raw
            npu.set_stream(one)
            assert device.current_stream() is one.raw
        assert npu.current_stream() is one
        with device.use(two.raw):
            assert npu.current_stream() is two
            assert npu.is_current_stream_capturing() is False
        raw = device.stream("by hand")
        with device.use(raw):
            assert npu.current_stream().raw is raw
            assert npu.current_stream() is npu.current_stream()
            with device.capture(raw) as graph:
                assert npu.is_current_stream_capturing()
                ns._npu_reshape_and_cache(**arguments())
        assert graph.num_operations == 1
        for _ in range(3):
            npu.set_stream(two)
        npu.set_stream(npu.default_stream())
        assert device.current_stream() is device.default_stream
        with kvcore.Device() as other, other.use(other.default_stream):
            npu.set_stream(one)
            assert kvcore.current_stream() is one.raw
            assert kvcore.current_stream(other) is other.default_stream
        assert device.current_stream() is device.default_stream  # as before the block


def test_work_goes_to_the_stream_that_the_device_says() -> None:
    ns = types.ModuleType("torch_npu")
    with kvcore.Device(race_check="record") as device, kvcore.torch.install(ns, device=device):
        call, stream = arguments(), device.stream("by hand")
        with device.use(stream):
            ns._npu_reshape_and_cache(**call)
        load(call, ns)
        ns.npu.synchronize()
        assert (
            [(race.first.stream, race.second.stream) for race in device.races]
            == [("by hand", "default")] * len(device.races)
            != []
        )


def test_an_installation_takes_its_current_stream_with_it() -> None:
    with kvcore.torch.install(types.ModuleType("torch_npu")) as handle:
        handle.ns.npu.set_stream(handle.ns.npu.Stream())
        assert kvcore.current_stream().name == "npu"
    with pytest.raises(kvcore.StreamError, match="expected a stream in use, got none"):
        kvcore.current_stream()


def test_an_installation_on_a_device_takes_its_current_stream_with_it() -> None:
    ns = types.ModuleType("torch_npu")
    with kvcore.Device() as device:
        with kvcore.torch.install(ns, device=device):
            ns.npu.set_stream(ns.npu.Stream())
        assert device.current_stream() is device.default_stream


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_calls_in_a_forked_child_write_nothing(torch_npu: Any) -> None:
    call = arguments()
    torch_npu.npu.current_stream()
    child = os.fork()
    if not child:
        try:
            torch_npu._npu_reshape_and_cache(**call)
        except kvcore.StreamError:
            os._exit(2 if call["key_cache"].any() else 0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    torch_npu._npu_reshape_and_cache(**call)
    assert call["key_cache"].any()


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
    places = (two_streams.__code__.co_firstlineno + 4, load.__code__.co_firstlineno + 1)
    for race in caught.value.seen:  # type: ignore[attr-defined]
        assert (race.first.file, race.second.file) == (__file__, __file__)
        assert (race.first.line, race.second.line) == places
    assert "_ops.py" not in message
    assert "kvcore/torch" not in message.replace(os.sep, "/")  # the places are the caller's


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
    default.synchronize()
    assert default.query()


def test_work_behind_an_event_that_is_recorded_later(torch_npu: Any) -> None:
    """Calls, events and other streams' waits keep their order behind it."""
    npu, call = torch_npu.npu, arguments()
    event, stream, third, recorder = npu.ExternalEvent(), npu.Stream(), npu.Stream(), npu.Stream()
    event.wait(stream)
    event.reset(stream)
    with npu.stream(stream):
        torch_npu._npu_reshape_and_cache(**call)
        key, _ = load(call, torch_npu)
        done = npu.Event()
        done.record()
        call["slot_indices"].copy_(torch.tensor([0, 7]))  # read when the call runs
    third.wait_event(done)
    with npu.stream(third):
        again, _ = load(call, torch_npu)
    follower = npu.Stream()
    follower.wait_stream(third)
    assert not call["key_cache"].any()
    assert [s.query() for s in (stream, third, follower, recorder)] == [False] * 3 + [True]
    assert not done.query()
    event.record(recorder)
    npu.synchronize()
    assert done.query()
    for found in (key, again):
        assert torch.equal(found[[0, 7]], call["key"])
    assert all(s.query() for s in (stream, third, follower))
    with npu.stream(stream):  # and the stream is as before
        torch_npu._npu_reshape_and_cache(**call)


def test_two_external_events_one_after_the_other(torch_npu: Any) -> None:
    npu, call = torch_npu.npu, arguments()
    first, second, stream, other = (
        npu.ExternalEvent(),
        npu.ExternalEvent(),
        *(npu.Stream() for _ in range(2)),
    )
    first.wait(stream)
    second.wait(stream)
    with npu.stream(stream):
        torch_npu._npu_reshape_and_cache(**call)
    first.record(other)
    assert not stream.query()
    assert not call["key_cache"].any()
    second.record(other)
    stream.synchronize()
    assert call["key_cache"].any()


def test_waiting_for_what_nobody_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore.torch.streams.WAIT_LIMIT_S", 0.0)
    ns = types.ModuleType("torch_npu")
    handle = kvcore.torch.install(ns)
    npu, call = ns.npu, arguments()
    npu.ExternalEvent().wait()
    done = npu.Event()
    done.record()
    ns._npu_reshape_and_cache(**call)
    for wait in (npu.synchronize, npu.current_stream().synchronize, done.synchronize):
        with pytest.raises(kvcore.StreamError, match=r"expected an ExternalEvent .* no record in"):
            wait()
    npu.Stream().synchronize()  # that one waits for nothing
    with pytest.raises(kvcore.StreamError, match="that nobody recorded before the device was left"):
        handle.uninstall()
    assert not call["key_cache"].any()


def test_another_thread_may_record_it(torch_npu: Any) -> None:
    npu, call = torch_npu.npu, arguments()
    event, stream, recorder = npu.ExternalEvent(), npu.Stream(), npu.Stream()
    event.wait(stream)
    with npu.stream(stream):
        torch_npu._npu_reshape_and_cache(**call)
    thread = threading.Thread(target=event.record, args=(recorder,))
    thread.start()
    stream.synchronize()
    thread.join()
    assert call["key_cache"].any()


def test_postponed_calls_are_not_recorded_in_a_file(tmp_path: Path) -> None:
    ns = types.ModuleType("torch_npu")
    with kvcore.torch.install(ns, record=tmp_path / "calls") as handle:
        npu, call = ns.npu, arguments()
        event, stream = npu.ExternalEvent(), npu.Stream()
        event.wait(stream)
        with npu.stream(stream):
            ns._npu_reshape_and_cache(**call)
        event.record(npu.default_stream())
        npu.synchronize()
        assert handle.recorder is not None
        assert handle.recorder.calls == 0
        ns._npu_reshape_and_cache(**call)
        assert handle.recorder.calls == 1


def test_calls_behind_an_external_event_do_not_race_with_what_was_recorded() -> None:
    ns = types.ModuleType("torch_npu")
    with (
        kvcore.Device(race_check="raise") as device,
        kvcore.torch.install(ns, device=device),
    ):
        npu, call = ns.npu, arguments()
        event, reader, writer = npu.ExternalEvent(), npu.Stream(), npu.Stream()
        event.wait(reader)
        with npu.stream(reader):
            key, _ = load(call, ns)
        with npu.stream(writer):
            ns._npu_reshape_and_cache(**call)
        event.record(writer)
        npu.synchronize()
        assert torch.equal(key[[1, 6]], call["key"])


def captured_wait(ns: Any, device: Any, call: dict[str, Any]) -> tuple[Any, Any, Any]:
    """(graph, its stream, the event it waits for and resets)."""
    stream, event = ns.npu.Stream(), ns.npu.ExternalEvent()
    with ns.npu.stream(stream), device.capture(stream.raw) as graph:
        event.wait(stream)
        event.reset(stream)
        ns._npu_reshape_and_cache(**call)
    return graph, stream, event


@pytest.mark.parametrize("first", ["record", "replay"])
def test_an_external_event_in_a_graph(first: str) -> None:
    """Serving code replays, updates the parameters of the graph, and then records."""
    ns = types.ModuleType("torch_npu")
    with kvcore.Device() as device, kvcore.torch.install(ns, device=device):
        call = arguments()
        graph, stream, event = captured_wait(ns, device, call)
        update = ns.npu.Stream()
        for slots in ([1, 6], [3, 4]):  # the graph has reset it the second time
            if first == "replay":
                graph.replay(stream.raw)
            call["key_cache"].zero_()
            call["slot_indices"].copy_(torch.tensor(slots))
            event.record(update)
            if first == "record":
                graph.replay(stream.raw)
            stream.synchronize()
            assert torch.equal(call["key_cache"].view(8, 1, 8)[slots], call["key"])


def test_a_graph_waits_for_work_of_the_recording_stream() -> None:
    ns = types.ModuleType("torch_npu")
    with kvcore.Device() as device, kvcore.torch.install(ns, device=device):
        call = arguments()
        graph, stream, event = captured_wait(ns, device, call)
        update, gate = ns.npu.Stream(), threading.Event()
        graph.replay(stream.raw)
        update.raw.call(gate.wait)
        update.raw.call(lambda: call["slot_indices"].copy_(torch.tensor([3, 4])))
        event.record(update)
        assert not stream.query()
        gate.set()
        stream.synchronize()
        assert torch.equal(call["key_cache"].view(8, 1, 8)[[3, 4]], call["key"])


def test_a_graph_whose_event_is_recorded_by_a_graph() -> None:
    ns = types.ModuleType("torch_npu")
    with kvcore.Device() as device, kvcore.torch.install(ns, device=device):
        call = arguments()
        graph, stream, event = captured_wait(ns, device, call)
        update = ns.npu.Stream()
        with ns.npu.stream(update), device.capture(update.raw) as other:
            event.record()
        graph.replay(stream.raw)
        other.replay(update.raw)
        stream.synchronize()
        assert call["key_cache"].any()


@pytest.mark.parametrize("own", [False, True])
def test_a_graph_that_waits_when_its_device_is_left(own: bool) -> None:
    ns, call = types.ModuleType("torch_npu"), arguments()
    device = kvcore.Device().__enter__() if own else None
    handle = kvcore.torch.install(ns, device=device)
    graph, stream, _ = captured_wait(ns, handle.streams.device, call)
    graph.replay(stream.raw)
    leave = handle.uninstall if device is None else lambda: device.__exit__(None, None, None)
    with pytest.raises(kvcore.StreamError, match="that nobody recorded before the device was left"):
        leave()
    handle.uninstall()
    assert not call["key_cache"].any()
