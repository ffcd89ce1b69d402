# SPDX-License-Identifier: Apache-2.0
"""Traces of top-k ids: files that lie, the generators' promises, the published hit rates."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import KVCoreError, ParamInvalidError
from kvcore.replay.traces.ids import check_ids, hit_rate, read_ids, write_ids
from kvcore.replay.traces.synthetic_ids import ScoreModel, TurnoverIds, _Dropped, score_trace


def npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.asarray(array), allow_pickle=True)
    return buffer.getvalue()


def archive(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(f"{name}.npy", data)
    return path


def test_round_trip(tmp_path: Path) -> None:
    ids = score_trace(3, layers=2, tokens=100, topk=8)
    ids[1, 1, 5:] = -1
    write_ids(tmp_path / "t.npz", ids)
    assert (read_ids(tmp_path / "t.npz") == ids).all()
    assert [p.name for p in tmp_path.iterdir()] == ["t.npz"]
    for form in (np.asfortranarray(ids), ids.astype(">i8"), ids.astype(np.int64)):
        path = archive(tmp_path / "o.npz", ids=npy(form), more=npy(np.zeros(3)))
        found = read_ids(path)
        assert found.dtype == np.int32
        assert (found == ids).all()


def header(shape: str, descr: str = "<i4") -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
    text = text.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


GOOD = npy(np.zeros((1, 1, 1), np.int32))


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ({}, r"expected an array 'ids', got nothing"),
        ({"topk": GOOD}, r"expected an array 'ids', got topk.npy"),
        ({"ids": b""}, r"expected an array in npy form"),
        ({"ids": b"hello world, this is text"}, r"expected an array in npy form"),
        ({"ids": GOOD[:40]}, r"expected an array in npy form"),
        ({"ids": npy(np.array([[["a"]]], object))}, r"expected ids of int32 or int64"),
        ({"ids": npy(np.zeros((1, 1, 1), np.float32))}, r"expected ids of int32 or int64"),
        ({"ids": npy(np.zeros((1, 1, 1), np.uint64))}, r"expected ids of int32 or int64"),
        ({"ids": npy(np.zeros((1, 1), np.int32))}, r"expected \[steps, layers, topk\]"),
        ({"ids": npy(np.zeros((0, 1, 1), np.int32))}, r"three axes"),
        ({"ids": header("(1000000, 1000000, 1000000)")}, r"of at most \d+ bytes"),
        ({"ids": header("(65536, 64, 256)")}, r"expected 4294967296 bytes of ids, got 0"),
        ({"ids": header("(1, 1, -4)")}, r"expected \[steps, layers, topk\] of at most"),
        ({"ids": header("(-2, -2, 1)")}, r"expected \[steps, layers, topk\] of at most"),
        ({"ids": header("(True, 1, 1)") + bytes(4)}, r"expected \[steps, layers, topk\] of"),
        ({"ids": npy(np.array([[[3, -2]]]))}, r"ids\[0, 0, 1\]: expected a position"),
        ({"ids": npy(np.array([[[3, 2**31 - 1]]]))}, r"ids\[0, 0, 1\]: expected a position"),
        ({"ids": npy(np.array([[[3, 2**32 + 3]]]))}, r"ids\[0, 0, 1\]: expected a position"),
        ({"ids": npy(np.array([[[3, -1, 3, -1]]]))}, r"ids\[0, 0\]: expected each id once, got 3"),
    ],
)
def test_files_that_lie_are_refused(tmp_path: Path, members: dict[str, bytes], match: str) -> None:
    path = archive(tmp_path / "bad.npz", **members)
    with pytest.raises(ParamInvalidError, match=match) as caught:
        read_ids(path)
    assert str(path) in str(caught.value)


def test_files_that_are_no_archive_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.npz"
    with pytest.raises(ParamInvalidError, match="expected a readable npz archive"):
        read_ids(path)
    path.write_bytes(GOOD)
    with pytest.raises(ParamInvalidError, match="expected an npz archive"):
        read_ids(path)
    write_ids(path, np.arange(4096).reshape(1, 2, 2048))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ParamInvalidError, match="expected an npz archive"):
        read_ids(path)
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + bytes(64) + whole[middle + 64 :])
    with pytest.raises(ParamInvalidError):
        read_ids(path)
    path.write_bytes(whole)
    with pytest.raises(ParamInvalidError, match="at most 100 bytes"):
        read_ids(path, max_bytes=100)


@given(cut=st.integers(0, 700), value=st.integers(0, 255))
def test_any_byte_may_be_wrong(tmp_path_factory: Any, cut: int, value: int) -> None:
    """It reads or is refused; nothing else comes out."""
    path = tmp_path_factory.getbasetemp() / "flipped.npz"
    ids = np.arange(256).reshape(2, 2, 64)
    write_ids(path, ids)
    data = bytearray(path.read_bytes())
    data[cut % len(data)] = value
    path.write_bytes(data)
    try:
        found = read_ids(path)
    except ParamInvalidError:
        return
    assert found.ndim == 3


@pytest.mark.parametrize("bad", [None, [[[1]]], np.zeros((1, 1, 1)), np.zeros((2, 2), np.int32)])
def test_what_is_no_trace_is_not_written(tmp_path: Path, bad: Any) -> None:
    with pytest.raises(KVCoreError, match="ids: expected"):
        write_ids(tmp_path / "t.npz", bad)
    with pytest.raises(KVCoreError, match="ids: expected"):
        check_ids(bad)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- made-up traces
def test_published_rates() -> None:
    """Fitted: previous selection and LRU 8K.  Predicted: FIFO 8K and 16K."""
    ids = score_trace(150, seed=1)
    assert ids.shape == (150, 1, 2048)

    def rate(policy: str, capacity: int) -> float:
        return 100 * hit_rate(ids, policy, capacity, warmup=50)

    assert rate("previous", 2048) == pytest.approx(58.85, abs=1)
    assert rate("lru", 8192) == pytest.approx(90.50, abs=1)
    assert rate("fifo", 8192) == pytest.approx(85, abs=2)
    assert rate("fifo", 16384) > 90


def test_scores_are_the_same_again_and_layers_differ() -> None:
    ids = score_trace(4, layers=2, tokens=500, topk=20, seed=3)
    assert (score_trace(4, layers=2, tokens=500, topk=20, seed=3) == ids).all()
    assert (score_trace(4, layers=1, tokens=500, topk=20, seed=3)[:, 0] == ids[:, 0]).all()
    assert (ids[:, 0] != ids[:, 1]).any()
    assert (np.diff(ids, axis=2) > 0).all()
    assert (score_trace(2, tokens=7, topk=7) == np.arange(7)).all()
    still = score_trace(5, tokens=500, topk=20, model=ScoreModel(rho=1.0, noise=0.0))
    assert (still == still[0]).all()


@given(
    topk=st.integers(1, 40),
    overlap=st.floats(0, 1),
    reuse=st.floats(0, 1),
    distance=st.floats(1, 5),
    contexts=st.lists(st.integers(0, 300), max_size=12),
)
def test_turnover_keeps_its_promises(
    topk: int, overlap: float, reuse: float, distance: float, contexts: list[int]
) -> None:
    source = TurnoverIds(topk, overlap=overlap, reuse=reuse, distance=distance)
    last: set[int] = set()
    for n in contexts:
        ids = source.next(n).tolist()
        wanted = {i for i in ids if i >= 0}
        assert len(ids) == topk
        assert len(wanted) == min(n, topk) == topk - ids.count(-1)
        assert max(wanted, default=0) < max(n, 1)
        if n > topk:
            before = {i for i in last if i < n}
            stay = max(round(overlap * topk), topk - (n - len(before)))
            assert len(wanted & before) == min(stay, len(before))
        last = wanted
    assert not source._taken.any()


def test_turnover_returns_at_the_distance_asked_for() -> None:
    """Few come back, so that few of those drawn are back already."""
    source = TurnoverIds(64, overlap=0.5, reuse=0.1, distance=3.0, seed=2)
    gone: dict[int, int] = {}
    last: set[int] = set()
    distances, outside = [], 0
    for step in range(600):
        now = set(source.next(1_000_000).tolist())
        for i in now - last:
            outside += 1
            if i in gone:
                distances.append(step - gone.pop(i))
        for i in last - now:
            gone[i] = step
        last = now
    # New ids meet what was dropped long ago, too; draws reach 6 mean distances back.
    distances = [d for d in distances if d <= 18]
    assert len(distances) / outside == pytest.approx(0.1, abs=0.02)
    assert np.mean(distances) == pytest.approx(3.0, abs=0.3)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: score_trace(0), "steps"),
        (lambda: score_trace(1, tokens=10, topk=11), "topk"),
        (lambda: score_trace(1, layers=0), "layers"),
        (lambda: score_trace(1, seed=-1), "seed"),
        (lambda: ScoreModel(rho=1.5), "rho"),
        (lambda: ScoreModel(noise=float("nan")), "noise"),
        (lambda: ScoreModel(freedom=0), "freedom"),
        (lambda: TurnoverIds(0), "topk"),
        (lambda: TurnoverIds(4, overlap=1.1), "overlap"),
        (lambda: TurnoverIds(4, reuse=-0.1), "reuse"),
        (lambda: TurnoverIds(4, distance=0.5), "distance"),
        (lambda: TurnoverIds(4, distance=True), "distance"),
        (lambda: TurnoverIds(4).next(-1), "num_tokens"),
        (lambda: hit_rate(np.zeros((1, 1, 1), np.int32), "lru", 1, warmup=1), "warmup"),
    ],
)
def test_bad_generators_are_refused(make: Any, match: str) -> None:
    with pytest.raises(ParamInvalidError, match=rf"{match}: expected"):
        make()


def test_dropped_ids_by_age_are_those_of_a_list_of_steps() -> None:
    draw = np.random.default_rng(3)
    kept = _Dropped(5)
    steps: list[list[int]] = []
    for n in range(200):
        if n == 120:
            kept.clear()
            steps = []
        ids = draw.integers(0, 1000, int(draw.integers(0, 40)), np.int32)
        kept.add(ids)
        steps = [*steps, ids.tolist()][-5:]
        starts, sizes = kept.by_age()
        assert sizes[0] == 0
        assert len(sizes) == len(starts) == len(steps) + 1
        found = [
            kept.ids[start : start + size].tolist()
            for start, size in zip(starts[1:].tolist(), sizes[1:].tolist(), strict=True)
        ]
        assert found == steps[::-1]
