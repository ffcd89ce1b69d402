# SPDX-License-Identifier: Apache-2.0
"""Ids of one's own: read, given to the requests that they fit, and refused where they cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvcore.cli.program import main
from kvcore.errors import ParamInvalidError
from kvcore.replay import ModelProfile, OffloadOptions, OffloadReplay, TraceRequest, TurnoverIds
from kvcore.replay.traces.made_ids import MadeIds
from kvcore.replay.traces.recorded_ids import (
    RecordedIds,
    Recording,
    parse_turnover,
    read_recordings,
    turnover_of,
)

MODEL = ModelProfile.named("tiny-sparse").replace(layers=3, index_layers=(0, 1), topk=32)


def made(context: int, steps: int = 10, seed: int = 0, **more: Any) -> NDArray[np.int32]:
    """int32 [steps, 2, 32] ids of one request."""
    layers = [TurnoverIds(32, seed=seed + layer, **more) for layer in range(2)]
    return np.array([[ids.next(context + step) for ids in layers] for step in range(steps)])


def write(path: Path, **arrays: Any) -> str:
    np.savez(path, **arrays)
    return str(path)


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write(
        tmp_path / "ids.npz", ids_0=made(500), context_0=500, ids_7=made(200).astype(np.int64),
        context_7=np.array([200]), other=np.zeros(3),
    )  # fmt: skip


def test_a_file_is_read_and_the_nearest_context_is_taken(file: str) -> None:
    found = read_recordings(file, MODEL)
    assert [recording.context for recording in found.recordings] == [200, 500]
    assert (found.recordings[1].ids == made(500)).all()
    near = {context: found.nearest(context) for context in (182, 181, 222, 223, 455, 454, 900)}
    taken = {context: one.context if one else None for context, one in near.items()}
    assert taken == {182: 200, 181: None, 222: 200, 223: None, 455: 500, 454: None, 900: None}


def test_a_request_is_served_what_was_recorded_then_what_is_made(file: str) -> None:
    found = read_recordings(file, MODEL)
    ids = found.of_request(500, 1, 32, seed=3)
    for step in range(10):
        assert sorted(ids.next(500 + step)) == sorted(made(500)[step, 1])
    last = set(made(500)[9, 1].tolist())
    after = ids.next(510)
    assert len(set(after.tolist())) == 32
    assert len(last & set(after.tolist())) == round(found.turnover.values["overlap"] * 32)
    # Of a shorter context only ids that it has, as many, each once; those that it has stay.
    short = found.of_request(460, 0, 32, seed=3)
    for step in range(10):
        given, recorded = set(short.next(460 + step).tolist()), set(made(500)[step, 0].tolist())
        assert len(given) == 32
        assert max(given) < 460 + step
        assert {x for x in recorded if x < 460 + step} <= given
    assert sorted(found.of_request(500, 0, 32, 0).next(20)) == [-1] * 12 + list(range(20))
    far = found.of_request(9000, 0, 32, seed=3)
    assert isinstance(far, TurnoverIds)


@pytest.mark.parametrize("overlap", [0.25, 0.75])
def test_the_turnover_of_a_file_is_counted(overlap: float) -> None:
    recordings = [
        Recording(4000, made(4000, steps=60, seed=9 * n, overlap=overlap, reuse=0.5, distance=3.0))
        for n in range(3)
    ]
    values = turnover_of(recordings).values
    assert values["overlap"] == pytest.approx(overlap)
    assert 0.3 < values["reuse"] < 0.6
    assert 1 <= values["distance"] < 8
    nothing = turnover_of([Recording(100, made(100, steps=1))])
    assert dict(nothing.values) == {"overlap": 0.5885, "reuse": 1.0, "distance": 6.0}
    by_hand = np.array([[[0, 1]], [[1, 2]], [[2, 0]], [[3, 4]]], np.int32)
    # Of 3 pairs 1, 1, 0 ids stay; 0 returns once, a step after it was dropped; 4 are new.
    values = turnover_of([Recording(50, by_hand)]).values
    assert dict(values) == {"overlap": 2 / 6, "reuse": 1 / 4, "distance": 1.0}


def test_the_report_says_what_share_each_served(file: str) -> None:
    requests = [
        TraceRequest(i, 0.0, n, 5, (i, 9)[: 1 + n // 512]) for i, n in enumerate((199, 499, 800))
    ]
    shares, rates = [], []
    for fidelity in ("full", "sampled"):
        options = OffloadOptions(
            fidelity=fidelity, ids=file, pool=64, batch=3, host_blocks=60, sample_layers=2
        )
        report = OffloadReplay(requests, MODEL, options).run()
        ids = report.to_dict()["ids"]
        shares.append(ids["recorded_share"])
        assert ids["made_share"] == pytest.approx(1 - ids["recorded_share"])
        assert ids["contexts"] == [200, 500]
        assert ids["turnover"]["basis"] == "assumed"
        rates.append(report.hit_rate)
        assert (
            "66.7% of the selections from the file (2 requests)" in dict(report.table("x"))["ids"]
        )
    assert shares == [pytest.approx(2 / 3)] * 2
    assert rates[0] == pytest.approx(rates[1])


def test_rows_are_counted_by_query_and_once() -> None:
    requests = [TraceRequest(i, 0.0, 400, 40, (i,)) for i in range(2)]
    for drafts in (0, 3):
        options = OffloadOptions(pool=32 * 6, batch=2, drafts=drafts, host_blocks=60)
        report = OffloadReplay(requests, MODEL, options).run()
        distinct, queries = report.hit_rate, report.hit_rate_of_queries
        assert distinct is not None
        assert queries is not None
        wanted = report.totals.written * 32 * MODEL.layers
        assert report.totals.wanted == wanted
        assert queries == pytest.approx(1 - report.totals.misses / wanted)
        assert queries > distinct
        rates = report.to_dict()["hit_rates"]
        assert rates == {"of_distinct_rows": distinct, "of_queries": queries}
    plain = OffloadReplay(requests, MODEL, OffloadOptions(policy="none", batch=2)).run().to_dict()
    assert plain["hit_rates"] == {"of_distinct_rows": None, "of_queries": None}
    assert plain["ids"] is None


@pytest.mark.parametrize(
    ("arrays", "match"),
    [
        ({"ids": made(500), "context": 500}, r"expected arrays ids_<n>, .*, got "),
        ({"ids_0": made(500)}, "expected a context_0 for ids_0, got none"),
        ({"ids_0": made(500), "context_0": [1, 2]}, "context_0: expected one number of tokens"),
        ({"ids_0": made(500), "context_0": 0}, "context_0: expected one number of tokens .*got 0"),
        ({"ids_0": made(500), "context_0": -5}, "context_0: expected one number of tokens"),
        ({"ids_0": made(500), "context_0": 5.5}, "expected ids of int32 or int64, got float64"),
        ({"ids_0": made(500)[0], "context_0": 500}, r"expected \[steps, layers, topk\]"),
        ({"ids_0": made(500)[:, :1], "context_0": 500}, r"ids_0: expected \[steps, 2, 32\]"),
        ({"ids_0": made(500)[..., :31], "context_0": 500}, r"ids_0: expected \[steps, 2, 32\]"),
        ({"ids_0": made(500)[:0], "context_0": 500}, "three axes .*none empty"),
        ({"ids_0": made(500) * 0, "context_0": 500}, r"ids_0\[0, 0\]: expected each id once"),
        ({"ids_0": made(500), "context_0": 300}, r"ids_0\[0\]: expected ids below 300, the tokens"),
        ({"ids_0": made(500) - 600, "context_0": 500}, "expected a position of at most"),
        ({"ids_0": made(500).astype(object), "context_0": 500}, "expected ids of int32"),
    ],
)
def test_files_that_cannot_be(tmp_path: Path, arrays: dict[str, Any], match: str) -> None:
    path = write(tmp_path / "ids.npz", **arrays)
    with pytest.raises(ParamInvalidError, match=match) as caught:
        OffloadOptions(ids=path, pool=64).check(MODEL)
    assert "ids" in str(caught.value)


def test_no_file_and_no_archive(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none.npz", "No such file"), (Path(__file__), "npz archive")):
        with pytest.raises(ParamInvalidError, match=words):
            read_recordings(path, MODEL)
    big = write(tmp_path / "ids.npz", ids_0=made(500), context_0=500)
    with pytest.raises(ParamInvalidError, match="of at most 100 bytes"):
        read_recordings(big, MODEL, max_bytes=100)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("overlap=0.4", {"overlap": 0.4}),
        ("overlap=0.4, reuse=0.5,distance=2", {"overlap": 0.4, "reuse": 0.5, "distance": 2.0}),
    ],
)
def test_a_turnover_of_ones_own(text: str, values: dict[str, float]) -> None:
    assert parse_turnover(text) == MadeIds("turnover", values, "assumed", "given by the caller")
    requests = [TraceRequest(0, 0.0, 400, 30, (0,))]
    rates = []
    for turnover in (text, None, "overlap=0"):
        options = OffloadOptions(turnover=turnover, pool=64, batch=1, host_blocks=60)
        report = OffloadReplay(requests, MODEL, options).run()
        rates.append(report.hit_rate or 0.0)
    assert rates[1] > rates[0] > rates[2]


@pytest.mark.parametrize(
    "text", ["", "overlap", "overlap=x", "overlap=1.5", "distance=0", "overlap=1,overlap=1", "a=1"]
)
def test_turnovers_that_cannot_be(text: str) -> None:
    with pytest.raises(ParamInvalidError, match=r"turnover|overlap|distance"):
        OffloadOptions(turnover=text, pool=64).check(MODEL)


def test_the_given_turnover_stands_in_for_that_of_the_file(file: str) -> None:
    options = OffloadOptions(ids=file, turnover="overlap=0.1", pool=64, batch=1, host_blocks=60)
    report = OffloadReplay([TraceRequest(0, 0.0, 800, 5, (0, 1))], MODEL, options).run()
    assert report.to_dict()["ids"]["turnover"]["overlap"] == 0.1
    assert isinstance(report.ids, dict)
    assert RecordedIds([Recording(9, made(9))], MadeIds()).turnover == MadeIds()


def test_the_command_takes_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    ids = np.array([[rng.permutation(590)[:256] for _ in range(3)] for _ in range(4)], np.int32)
    file = write(tmp_path / "ids.npz", ids_0=ids, context_0=600)
    trace, path = tmp_path / "t.jsonl", tmp_path / "a.json"
    size = {"timestamp": 0, "input_length": 600, "output_length": 4}
    trace.write_text(json.dumps(size) + "\n")
    assert main(["replay", str(trace), "--ids", file, "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert figures["ids"]["recorded_share"] == 1
    assert len(figures["hashes"]["ids"]) == 16
    out = " ".join(capsys.readouterr().out.split())
    assert "100.0% of the selections from the file (1 requests)" in out
    assert "1 of 1 requests have no hash_ids" in out
    assert main(["replay", str(trace), "--ids", file, "--model", "glm-5.2"]) == 2
    assert "ids_0: expected [steps, 21, 2048]" in capsys.readouterr().err
    assert main(["replay", str(trace), "--ids", file, "--json", file]) == 2
    assert "a file of its own" in capsys.readouterr().err
