# SPDX-License-Identifier: Apache-2.0
"""Recording calls, running them again, and files that are not what they should be."""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcore
from tensors import WITHOUT_TORCH

torch = pytest.importorskip("torch", reason=WITHOUT_TORCH)
from test_vendor_traces import samples  # noqa: E402

import kvcore.torch  # noqa: E402
from kvcore.torch import record, vendor  # noqa: E402


@contextlib.contextmanager
def recording(path: Any) -> Iterator[tuple[Any, Any]]:
    ns = types.ModuleType("torch_npu")
    with kvcore.torch.install(ns, record=path) as handle:
        yield ns, handle.recorder


def call_all() -> int:
    """Every operator once, by torch.ops; how many calls that are recorded."""
    made = 0
    for name, (arguments, keywords) in samples().items():
        space, operator, overload = name.split(".")
        getattr(getattr(getattr(torch.ops, space), operator), overload)(*arguments, **keywords)
        made += 1
    return made


def recorded(tmp_path: Path) -> Path:
    """A file with a call of each operator."""
    with recording(tmp_path / "calls.kvrec") as (_, recorder):
        made = call_all()
        assert (recorder.calls, recorder.dropped) == (made, 0)
        return Path(recorder.path)


def test_every_operator_comes_out_as_recorded(tmp_path: Path) -> None:
    path = recorded(tmp_path)
    assert path == tmp_path / f"calls-{os.getpid()}.kvrec"
    result = kvcore.torch.verify(path)
    assert result.ok
    assert result.where == ("kvcore",)
    assert str(result) == f"{path}: {result.calls} calls by kvcore, as recorded"


def test_a_namespace_runs_them_too(tmp_path: Path) -> None:
    """As torch_npu would on an NPU: here the stand-in, on the CPU."""
    path = recorded(tmp_path)
    ns = types.ModuleType("their_npu")
    with kvcore.torch.install(ns):
        result = kvcore.torch.verify(path, ns=ns, device="cpu")
    assert result.ok, result
    assert result.where == ("kvcore", "their_npu")


def test_what_another_implementation_gets_wrong(tmp_path: Path) -> None:
    with recording(tmp_path / "calls") as (ns, recorder):
        key, cache = torch.ones(3, 1, 8).half(), torch.zeros(2, 4, 1, 8).half()
        ns._npu_reshape_and_cache_siso(key, cache, torch.tensor([6, -1, 1]))
        path = recorder.path

    def wrong(key: Any, key_cache: Any, slot_indices: Any) -> None:
        key_cache.view(8, 1, 8)[[6, 1]] = key[[0, 2]]
        key_cache[1, 2, 0, 3] = 2.0

    ns = types.SimpleNamespace(_npu_reshape_and_cache_siso=wrong)
    result = kvcore.torch.verify(path, ns=ns, device="cpu")
    (found,) = result.differences
    assert not result.ok
    assert (found.call, found.where, found.tensor) == (0, "SimpleNamespace", "key_cache")
    assert found.offset == (6 * 8 + 3) * 2
    assert (found.recorded, found.seen) == ("003c", "0040")
    assert str(result).splitlines()[1].strip() == (
        "call 0, _npu_reshape_and_cache_siso by SimpleNamespace: key_cache differs in 1 byte, "
        "first in the element at byte 102: recorded 003c, now 0040"
    )


def test_a_nan_is_a_nan(tmp_path: Path) -> None:
    with recording(tmp_path / "calls") as (ns, recorder):
        key, cache = torch.full((1, 1, 8), torch.nan), torch.zeros(2, 4, 1, 8)
        ns._npu_reshape_and_cache_siso(key, cache, torch.tensor([6]))
        path = recorder.path

    def other_nan(key: Any, key_cache: Any, slot_indices: Any) -> None:
        bits = torch.full((8,), -1, dtype=torch.int32).view(torch.float32)
        key_cache.view(8, 1, 8)[6, 0] = bits

    ns = types.SimpleNamespace(_npu_reshape_and_cache_siso=other_nan)
    assert kvcore.torch.verify(path, ns=ns, device="cpu").ok


# ---------------------------------------------------------------- what is kept
def test_only_touched_rows_are_kept(tmp_path: Path) -> None:
    with recording(tmp_path / "calls") as (ns, recorder):
        cache = torch.randn(128, 8, 128).half().expand(1024, -1, -1, -1).clone()
        before = cache.clone()
        key = torch.randn(2, 8, 128).half()
        ns._npu_reshape_and_cache_siso(key, cache, torch.tensor([77_777, 5]))
        size = recorder.path.stat().st_size
    assert size < 5 * key.numel() * 2, "rows before, rows after, tokens, and little else"
    assert torch.equal(cache[0, 5], key[1])
    cache[0, 5], cache[607, 81] = before[0, 5], before[607, 81]
    assert torch.equal(cache, before)
    assert kvcore.torch.verify(recorder.path).ok


def test_views_of_one_slab(tmp_path: Path) -> None:
    with recording(tmp_path / "calls") as (ns, recorder):
        slab = torch.zeros(4, 2, 8, 2, 16)
        key, value = torch.randn(3, 2, 16), torch.randn(3, 2, 16)
        slots = torch.tensor([31, 2, 9])
        ns._npu_reshape_and_cache(key, value, slab[:, 0], slab[:, 1], slots)
    assert kvcore.torch.verify(recorder.path).ok


def test_failed_calls_are_not_recorded(tmp_path: Path) -> None:
    with recording(tmp_path / "calls") as (ns, recorder):
        key, cache = torch.ones(1, 1, 8), torch.zeros(2, 4, 1, 8)
        with pytest.raises(kvcore.SlotRangeError, match=r"^slot_indices\[0\]"):
            ns._npu_reshape_and_cache_siso(key, cache, torch.tensor([8]))
        assert (recorder.calls, recorder.path) == (0, None)
    assert list(tmp_path.iterdir()) == []


def test_the_soc_is_part_of_a_call(tmp_path: Path) -> None:
    ns = types.ModuleType("torch_npu")
    with kvcore.torch.install(ns, soc="A3", record=tmp_path / "calls") as handle:
        key, cache = torch.ones(1, 1, 16).half(), torch.zeros(2, 4, 1, 16).half()
        ns._npu_reshape_and_cache_siso(key, cache, torch.tensor([3]).int())
    assert b'"soc": "A3"' in handle.recorder.path.read_bytes()
    assert kvcore.torch.verify(handle.recorder.path).ok


def test_captured_calls_are_not_recorded(tmp_path: Path) -> None:
    ns = types.ModuleType("torch_npu")
    with (
        kvcore.Device() as device,
        kvcore.torch.install(ns, device=device, record=tmp_path / "calls") as handle,
    ):
        stream = ns.npu.current_stream()
        key, cache, slots = torch.ones(1, 1, 8), torch.zeros(2, 4, 1, 8), torch.tensor([3])
        with device.capture(stream.raw):
            ns._npu_reshape_and_cache_siso(key, cache, slots)
        assert handle.recorder.calls == 0
        ns._npu_reshape_and_cache_siso(key, cache, slots)
        assert handle.recorder.calls == 1


# ---------------------------------------------------------------- limits and files
def siso(ns: Any, times: int) -> None:
    for _ in range(times):
        key, cache = torch.ones(1, 1, 8), torch.zeros(2, 4, 1, 8)
        ns._npu_reshape_and_cache_siso(key, cache, torch.tensor([3]))


def test_at_most_so_many_calls(tmp_path: Path) -> None:
    with recording(kvcore.torch.Recording(tmp_path / "calls", max_calls=3)) as (ns, recorder):
        siso(ns, 5)
        assert (recorder.calls, recorder.dropped) == (3, 2)
    assert kvcore.torch.verify(recorder.path).calls == 3


def test_at_most_so_many_bytes(tmp_path: Path) -> None:
    with recording(kvcore.torch.Recording(tmp_path / "calls", max_bytes=2000)) as (ns, recorder):
        siso(ns, 50)
        assert 0 < recorder.calls < 50
        assert recorder.calls + recorder.dropped == 50
    assert recorder.path.stat().st_size <= 2000 + len(record.MAGIC)
    assert kvcore.torch.verify(recorder.path).calls == recorder.calls


def test_one_file_a_process_and_an_installation(tmp_path: Path) -> None:
    paths = []
    for name in ("calls.kvrec", "calls.kvrec", "own-{pid}"):
        with recording(str(tmp_path / name)) as (ns, recorder):
            siso(ns, 1)
            paths.append(recorder.path.name)
    pid = os.getpid()
    assert paths == [f"calls-{pid}.kvrec", f"calls-{pid}-2.kvrec", f"own-{pid}"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_writes_its_own(tmp_path: Path) -> None:
    with recording(tmp_path / "calls") as (ns, recorder):
        siso(ns, 2)
        child = os.fork()
        if not child:
            status = 1
            with contextlib.suppress(BaseException):
                siso(ns, 3)
                status = 0 if recorder.calls == 3 else 2
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        siso(ns, 1)
    assert kvcore.torch.verify(recorder.path).calls == 3
    assert kvcore.torch.verify(tmp_path / f"calls-{child}").calls == 3


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"max_calls": -1}, "max_calls"),
        ({"max_calls": 1.5}, "max_calls"),
        ({"max_bytes": True}, "max_bytes"),
        ({"max_bytes": None}, "max_bytes"),
    ],
)
def test_limits_that_are_none(arguments: dict[str, Any], argument: str) -> None:
    with pytest.raises(kvcore.ParamInvalidError, match=f"^{argument}: expected a whole number"):
        kvcore.torch.Recording("calls", **arguments)


# ---------------------------------------------------------------- files that were tampered with
@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return recorded(tmp_path_factory.mktemp("record")).read_bytes()


def verify_bytes(tmp_path: Path, content: bytes) -> Any:
    path = tmp_path / "tampered"
    path.write_bytes(content)
    return kvcore.torch.verify(path)


def test_a_file_that_ends_early(good: bytes, tmp_path: Path) -> None:
    whole = verify_bytes(tmp_path, good)
    assert not whole.cut_off
    for cut in (1, 7, 100, len(good) - len(record.MAGIC) - 3):
        result = verify_bytes(tmp_path, good[:-cut])
        assert result.cut_off
        assert result.ok == (result.calls > 0)
        assert result.calls < whole.calls
        assert str(result).endswith("(the file ends inside a record)")
    assert (result.ok, result.calls) == (False, 0)
    assert "0 calls by kvcore, so nothing was compared (the" in str(result)


def test_a_file_without_a_call(tmp_path: Path) -> None:
    result = verify_bytes(tmp_path, record.MAGIC)
    assert (result.ok, result.calls, result.cut_off) == (False, 0, False)
    assert str(result).endswith("0 calls by kvcore, so nothing was compared")


def test_what_is_no_recording(tmp_path: Path) -> None:
    for content in (b"", b"PK\x03\x04", record.MAGIC[:-1]):
        with pytest.raises(kvcore.ParamInvalidError, match=r"^path: expected a file of kvcore's"):
            verify_bytes(tmp_path, content)
    with pytest.raises(FileNotFoundError):
        kvcore.torch.verify(tmp_path / "nowhere")


def first_record(good: bytes) -> tuple[dict[str, Any], bytes]:
    at = len(record.MAGIC)
    (length,) = struct.unpack_from("<Q", good, at)
    return json.loads(good[at + 8 : at + 8 + length]), good[at + 8 + length :]


def with_head(head: Any, rest: bytes) -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return record.MAGIC + struct.pack("<Q", len(text)) + text + rest


TAMPERED: dict[str, Any] = {
    "an unknown operator": lambda h: h.update(schema="system"),
    "an unknown namespace": lambda h: h.update(namespace="os"),
    "no tensors": lambda h: h.pop("tensors"),
    "a dtype that is a function": lambda h: h["tensors"]["key"].update(dtype="load"),
    "a negative shape": lambda h: h["tensors"]["key"].update(shape=[-1, 2, 16]),
    "a negative stride": lambda h: h["tensors"]["key_cache"].update(strides=[1, 1, 1, -1]),
    "another rank": lambda h: h["tensors"]["key"].update(strides=[1]),
    "a shape beyond memory": lambda h: h["tensors"]["key_cache"].update(shape=[2**40, 2**20, 4, 8]),
    "a shape beyond 64 bits": lambda h: h["tensors"]["key_cache"].update(shape=[2**70, 8, 4, 8]),
    "a span beyond the file": lambda h: h["tensors"]["key"].update(before=[0, 2**60]),
    "a negative span": lambda h: h["tensors"]["key"].update(before=[-5, 10]),
    "ranges outside": lambda h: h["tensors"]["key"].update(ranges=h["tensors"]["key"]["before"]),
    "a span of words": lambda h: h["tensors"]["key"].update(before="ab"),
    "an argument too many": lambda h: h["arguments"].update(path="/etc/passwd"),
    "a tensor too few": lambda h: h["tensors"].pop("slot_mapping"),
    "fewer bytes than the shape has": lambda h: h["tensors"]["slot_mapping"].update(before=[0, 0]),
    "more bytes than the ranges have": lambda h: h["tensors"]["key"].update(before=[0, 8]),
    "fewer bytes left than written": lambda h: h["tensors"]["key_cache"].update(after=[0, 0]),
    "an output without what was left": lambda h: h["tensors"]["key_cache"].pop("after"),
    "a tensor too many returned": lambda h: h["returned"].append(h["tensors"]["key"]),
    "a wrong value": lambda h: h["arguments"].update(cache_mode=["PA_NZ"]),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_tampered_records(good: bytes, tmp_path: Path, what: str) -> None:
    head, rest = first_record(good)
    TAMPERED[what](head)
    try:
        result = verify_bytes(tmp_path, with_head(head, rest))
    except kvcore.ParamInvalidError:
        return
    assert result.cut_off or not result.ok


SIZES = {
    "slot_mapping": ("before", r"slot_mapping: 0 bytes before the call, where \d+ belong"),
    "key": ("before", r"key: 0 bytes before the call, where \d+ belong"),
    "key_cache": ("after", r"key_cache: 0 bytes after it, where \d+ belong"),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_the_bytes_do_not_bear_out(good: bytes, tmp_path: Path, name: str) -> None:
    key, message = SIZES[name]
    head, rest = first_record(good)
    assert verify_bytes(tmp_path, with_head(head, rest)).ok
    head["tensors"][name][key] = [0, 0]
    with pytest.raises(kvcore.ParamInvalidError, match=message):
        verify_bytes(tmp_path, with_head(head, rest))


def test_an_output_that_was_not_written(tmp_path: Path) -> None:
    """A call that wrote nothing is recorded without what it left; it has to write nothing again."""
    with recording(tmp_path / "calls.kvrec") as (ns, recorder):
        key, cache = torch.ones(1, 1, 16).half(), torch.zeros(2, 4, 1, 16).half()
        ns._npu_reshape_and_cache_siso(key, cache, torch.tensor([-1]))
    good = recorder.path.read_bytes()
    assert verify_bytes(tmp_path, good).ok
    head, rest = first_record(good)
    at, size = head["tensors"]["slot_indices"]["before"]
    assert "after" not in head["tensors"]["key_cache"]
    head["tensors"]["key_cache"]["before"], head["tensors"]["key_cache"]["ranges"] = (
        [len(rest), 256],
        [len(rest) + 256, 16],
    )
    rest = rest[:at] + bytes(size) + rest[at + size :]  # slot 0
    rest += b"\1" * 256 + struct.pack("<qq", 0, 256)
    result = verify_bytes(tmp_path, with_head(head, rest))
    assert [d.tensor for d in result.differences] == ["key_cache"]


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"null", b"{", b'"' * 10, b"[" * 100_000])
def test_text_that_is_no_record(good: bytes, tmp_path: Path, text: bytes) -> None:
    with pytest.raises(kvcore.ParamInvalidError, match=r"^path: expected a whole record \(call 0"):
        verify_bytes(tmp_path, with_head(text, b""))


@settings(max_examples=40)
@given(at=st.integers(0, 5999), flip=st.integers(1, 255))
def test_flipped_bytes(good: bytes, tmp_path_factory: Any, at: int, flip: int) -> None:
    """Whatever a byte is changed to: a result or a typed error, no crash."""
    changed = bytearray(good)
    changed[at % len(good)] ^= flip
    with contextlib.suppress(kvcore.KVCoreError):
        verify_bytes(tmp_path_factory.mktemp("flipped"), bytes(changed))


def test_every_operator_but_swaps_is_recorded() -> None:
    """A new operator must come with a sample here."""
    known = {re.sub(r"\.default$", "", name.partition(".")[2]) for name in samples()}
    own = {o.schema.partition("(")[0] for o in vendor.OPERATORS}
    twins = {f"{o.name}_functional" for o in vendor.OPERATORS if o.twin}
    assert own | twins == known


def scatter(ns: Any, key: Any = None) -> None:
    key = torch.randn(3, 2, 16).half() if key is None else key
    cache = torch.zeros(4, 8, 2, 16).half()
    ns._npu_reshape_and_cache_siso(key, cache, torch.arange(key.shape[0]).int())


def test_threads_write_whole_records(tmp_path: Path) -> None:
    with recording(tmp_path / "calls.kvrec") as (ns, recorder):
        start = threading.Barrier(4)

        def work() -> None:
            start.wait()
            for _ in range(40):
                scatter(ns)

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(work) for _ in range(4)]:
                done.result()
        assert recorder.calls == 160
    result = kvcore.torch.verify(recorder.path)
    assert (result.ok, result.calls, result.cut_off) == (True, 160, False)


@pytest.mark.parametrize("soc", ["A2", "A3", "950"])
def test_calls_under_a_soc_are_verified_under_it(soc: str, tmp_path: Path) -> None:
    with kvcore.torch.install(
        types.ModuleType("torch_npu"), soc=soc, record=tmp_path / "c"
    ) as handle:
        scatter(handle.ns)
    assert kvcore.torch.verify(handle.recorder.path).ok


def test_calls_with_no_token_and_with_steps_of_nothing(tmp_path: Path) -> None:
    with recording(tmp_path / "calls.kvrec") as (ns, recorder):
        scatter(ns, torch.randn(3, 2, 16).half()[:0])
        target = torch.zeros(3, dtype=torch.int64)
        one = torch.ones((), dtype=torch.int64).expand(1)  # one element, with a stride of 0
        ns.npu_scatter_nd_update_(target, one.expand(1, 1), one)
    result = kvcore.torch.verify(recorder.path)
    assert (result.ok, result.calls) == (True, 2), result


@pytest.mark.parametrize("path", ["", ".", "/", b"calls", "a\0b", None, 7])
def test_paths_that_are_none(path: Any) -> None:
    with pytest.raises(kvcore.ParamInvalidError, match=r"^path: expected a path"):
        kvcore.torch.Recording(path)


def test_a_folder_that_is_not_there_is_told_before_any_call(tmp_path: Path) -> None:
    with pytest.raises(kvcore.ParamInvalidError, match=r"^record: expected a path in a folder"):
        kvcore.torch.install(types.ModuleType("torch_npu"), record=tmp_path / "no" / "c.kvrec")


def test_a_write_that_fails_ends_the_recording_and_not_the_call(tmp_path: Path) -> None:
    with recording(tmp_path / "calls.kvrec") as (ns, recorder):
        scatter(ns)
        recorder._file.close()
        recorder._file = open("/dev/full", "wb")  # noqa: SIM115
        with pytest.warns(RuntimeWarning, match=r"^recording of calls ended: .*No space left"):
            scatter(ns)
        scatter(ns)
        assert (recorder.calls, recorder.dropped) == (1, 2)
    result = kvcore.torch.verify(recorder.path)
    assert (result.ok, result.calls) == (True, 1)


def test_numbers_beyond_all_bounds(tmp_path: Path) -> None:
    text = b'{"namespace": "atb", "schema": "_npu_reshape_and_cache_siso", "soc": null, '
    text += b'"arguments": {}, "returned": [], "tensors": {"key": {"before": [0, 1e400]}}}'
    path = tmp_path / "tampered"
    path.write_bytes(record.MAGIC + record.HEAD.pack(len(text)) + text)
    with pytest.raises(kvcore.ParamInvalidError, match=r"^path: expected a whole record"):
        kvcore.torch.verify(path)
