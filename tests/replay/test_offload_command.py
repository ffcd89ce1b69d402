# SPDX-License-Identifier: Apache-2.0
"""``kvcore replay`` with offload: tables, files, comparison, sweeps, what is refused."""

from __future__ import annotations

import json
import re
import signal
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from kvcore.cli import main
from kvcore.replay import OffloadReplay

LINES = [
    {"timestamp": 0, "input_length": 600, "output_length": 12, "hash_ids": [0, 1]},
    {"timestamp": 3000, "input_length": 600, "output_length": 9, "hash_ids": [0, 1]},
    {"timestamp": 6000, "input_length": 1300, "output_length": 5, "hash_ids": [0, 2, 3]},
]
MODEL = Path(__file__).parents[2] / "kvcore" / "replay" / "models" / "tiny_sparse.toml"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "three.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return str(path)


def test_the_table_and_the_files(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, spans = tmp_path / "a.json", tmp_path / "t.json"
    files = ["--json", str(figures), "--trace", str(spans)]
    arguments = ["replay", trace, "--policy", "lru", "--pool", "512", "--device", "A3"]
    assert main([*arguments, "--drafts", "1", *files]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    for words in (
        "full: ", "rows were real", "(100.00%)", "lru, 512 entries", "3 of 3 finished",
        "hit rate", "to the device", "peak memory", "token/s", "overlap", "assumed", "all right",
        "3,344 tokens/s",
    ):  # fmt: skip
        assert words in captured.out, words
    report = json.loads(figures.read_text())
    assert report["kind"] == "offload"
    assert report["requests"]["finished"] == 3
    assert report["tokens"]["generated"] == 26
    assert report["rows"]["real_share"] == 1.0
    assert {e["ph"] for e in json.loads(spans.read_text())["traceEvents"]} >= {"X", "M"}


def test_sampled_with_a_model_of_ones_own(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.toml"
    own.write_text(MODEL.read_text().replace('name = "tiny-sparse"', 'name = "mine"'))
    spans = tmp_path / "t.json"
    options = ["--fidelity", "sampled", "--prefill", "none", "--sample-requests", "1"]
    assert main(["replay", trace, *options, "--model", str(own), "--trace", str(spans)]) == 0
    out = capsys.readouterr().out
    assert "mine: 6 layers in 3 groups" in out
    assert "none: prompts come from another device" in " ".join(out.split())
    assert re.search(r"sampled: [\d,]+ of [\d,]+ rows were real", out)
    assert "decode step" in spans.read_text()


def test_one_page_with_plots(trace: str, tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="plotly is not installed")
    page = tmp_path / "page.html"
    assert main(["replay", trace, "--policy", "lru", "--html", str(page)]) == 0
    text = page.read_text()
    assert "Plotly.newPlot" in text
    assert "<td>hit rate</td>" in text
    assert not re.search(r'<(script|link)[^>]+(src|href)="http', text)


def test_without_plotly_it_says_what_to_install(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert main(["replay", trace, "--policy", "lru", "--html", str(tmp_path / "p.html")]) == 2
    assert "pip install plotly" in capsys.readouterr().err


def test_comparison(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / name) for name in ("a.json", "b.json", "c.json")]
    for file, pool in zip(files, ("512", "512", "256"), strict=True):
        assert main(["replay", trace, "--pool", pool, "--json", file]) == 0
    capsys.readouterr()
    assert main(["replay", "--compare", *files[:2]]) == 0
    assert capsys.readouterr().out == "0 values differ, 0 by more than 5.00%\n"
    assert main(["replay", "--compare", files[0], files[2], "--tolerance", "0"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"! +50\.00% +options\.pool +512 +256 *$", out, re.M)
    assert main(["replay", "--compare", files[0], files[2], "--tolerance", "1000"]) == 0
    capsys.readouterr()
    Path(files[1]).write_text("[1]")
    Path(files[2]).write_text("{")
    for bad, words in (
        (files[1], "expected a report of kvcore replay"),
        (files[2], "expected a report in JSON"),
        (str(tmp_path / "none.json"), "No such file"),
    ):
        assert main(["replay", "--compare", files[0], bad]) == 2
        assert words in capsys.readouterr().err


def test_a_sweep_runs_each_point_once(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "results"
    grid = ["--sweep", "policy=lru,fifo", "pool=512", "--results", str(folder), "--jobs", "2"]
    assert main(["replay", trace, *grid]) == 0
    out = capsys.readouterr().out
    assert "policy=lru,pool=512" in out
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["policy=fifo,pool=512.json", "policy=lru,pool=512.json"]
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    (folder / files[0]).write_text("torn")
    assert main(["replay", trace, *grid, "--json", "-"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert list(points) == ["policy=lru,pool=512", "policy=fifo,pool=512"]
    after = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert [path.name for path in before if before[path] == after[path]] == [files[1]]


class _Reference(types.SimpleNamespace):
    __hash__ = object.__hash__


class _Ray(types.ModuleType):
    """What a sweep asks of ray, in this process."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.calls: list[str] = []

    def init(self, address: str, **_: Any) -> None:
        self.calls.append(f"init {address}")

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def put(self, value: Any) -> Any:
        return value

    def remote(self, function: Any) -> Any:
        return types.SimpleNamespace(remote=lambda *args: _Reference(value=function(*args)))

    def wait(self, references: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return references[:1], references[1:]

    def get(self, reference: Any) -> Any:
        return reference.value


def test_a_sweep_on_ray(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a module in ray's place; how a cluster behaves is not tested here."""
    ray = _Ray()
    monkeypatch.setitem(sys.modules, "ray", ray)
    grid = ["--sweep", "pool=256,512", "--results", str(tmp_path / "r"), "--ray", "auto"]
    assert main(["replay", trace, *grid]) == 0
    assert ray.calls == ["init auto", "shutdown"]
    assert main(["replay", trace, *grid]) == 0  # all done: no cluster is needed
    assert len(ray.calls) == 2
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "ray", None)
    grid[3] = str(tmp_path / "other")
    assert main(["replay", trace, *grid]) == 2
    assert "pip install ray" in capsys.readouterr().err


def test_an_interrupt_writes_what_is_done(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, calls = OffloadReplay.step, 0

    def step(self: OffloadReplay) -> bool:
        nonlocal calls
        calls += 1
        if calls == 3:
            signal.raise_signal(signal.SIGINT)
        return real(self)

    monkeypatch.setattr(OffloadReplay, "step", step)
    figures = tmp_path / "part.json"
    assert main(["replay", trace, "--policy", "lru", "--json", str(figures)]) == 130
    captured = capsys.readouterr()
    assert "interrupted: so far" in captured.out
    assert f"written so far: {figures}" in captured.err
    assert json.loads(figures.read_text())["interrupted"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "mru"], "policy: expected one of previous, lru, fifo, arc, none, got 'mru'"),
        (["--policy", "lru", "--model", "gpt"], "model: expected one of tiny, tiny-sparse"),
        (["--policy", "lru", "--model", "qwen3-8b"], "model: expected one with a top-k"),
        (["--policy", "lru", "--model", "none.toml"], "model: expected a readable text file"),
        (
            ["--pool", "100"],
            "pool: expected at least 256 entries: top-k 256, a token a step, got 100",
        ),
        (["--drafts", "3", "--pool", "512"], "pool: expected at least 1024 entries"),
        (["--drafts", "64"], "--drafts: expected an integer from 0 to 63, got '64'"),
        (["--device", "H100"], "device: expected one of A2, A3, 950, or a .toml file"),
        (["--batch", "4096", "--pool", "1000000"], "batch: expected at most "),
        (["--policy", "lru", "--layout", "NHSD"], "--layout: expected no option of caches"),
        (["--prefill", "none", "--prefill-tokens-per-s", "9"], "--prefill: expected no"),
        (["--prefill-tokens-per-s", "nan"], "--prefill-tokens-per-s: expected a number"),
        (["--policy", "lru", "--blocks", "4"], "expected at most 4 blocks of 128 tokens"),
        (["--policy", "lru", "--blocks", "99999999999"], "--blocks: expected an integer"),
        (["--policy", "lru", "--json", "none/a.json"], "none/a.json: expected a file in a folder"),
        (["--sweep", "layers=1,2"], "sweep: expected axes like policy=lru,fifo"),
        (["--sweep", "pool=many"], "sweep: expected pool=1,2,..."),
        (["--sweep", "policy=lru,mru"], "sweep: expected points that can be run, policy=mru"),
        (["--ray", "auto"], "--ray: expected a sweep to run there"),
    ],
)
def test_what_is_wrong_is_said_before_any_work(
    arguments: list[str],
    message: str,
    trace: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise AssertionError("work has started")

    monkeypatch.setattr(OffloadReplay, "step", unreachable)
    assert main(["replay", trace, *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert "Traceback" not in captured.err


def test_a_config_says_nothing_of_time(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "dsa",
                "num_hidden_layers": 4,
                "num_attention_heads": 8,
                "kv_lora_rank": 64,
                "qk_rope_head_dim": 16,
                "index_topk": 64,
                "index_head_dim": 32,
            }
        )
    )
    assert main(["replay", trace, "--policy", "lru", "--model", str(config)]) == 2
    err = capsys.readouterr().err
    assert "step_fixed: expected a figure of dsa: us a step" in err
    assert "give it in a TOML profile" in err
    # Without offload nobody asks for a time.
    assert main(["replay", trace, "--model", str(config)]) == 0
