# SPDX-License-Identifier: Apache-2.0
"""``kvcore replay``: input, output, interruption, exit statuses."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvcore
from kvcore.cli import main
from kvcore.replay import MODELS, ModelProfile

REAL = Path(__file__).parents[3] / "shared" / "data" / "conversation_trace.jsonl"
PROGRAM = [sys.executable, "-c", "import sys; from kvcore.cli import main; sys.exit(main())"]
LINES = [
    {"timestamp": 0, "input_length": 600, "output_length": 20, "hash_ids": [0, 1]},
    {"timestamp": 3000, "input_length": 600, "output_length": 20, "hash_ids": [0, 1]},
    {"timestamp": 6000, "input_length": 1300, "output_length": 5, "hash_ids": [0, 2, 3]},
]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "three.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return str(path)


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["replay", "--json", "-", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    result: dict[str, Any] = json.loads(captured.out)
    return result


def table(text: str) -> dict[str, str]:
    """Rows of the printed table; wrapped lines are joined."""
    rows: dict[str, str] = {}
    last = ""
    for line in text.splitlines():
        found = re.match(r"  (\S.*?)(?:\s{2,}(\S.*))?$", line)
        if found and found[2]:
            last = found[1]
            rows[last] = found[2].strip()
        elif line.strip() and last:
            rows[last] += " " + line.strip()
    return rows


def test_a_trace_ends_with_a_table(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", trace, "--max-batch", "1", "--verify-samples", "50"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    rows = table(captured.out)
    assert rows["trace"].replace(" ", "") == trace
    assert rows["requests"] == "3 of 3 finished"
    # The second prompt is the first again; the third has its first 512 tokens.
    assert rows["prefix hits"] == "1,112 of 2,500 prompt tokens (44.5%)"
    written = 2500 + 45 - 1112
    assert rows["tokens written"] == f"{written:,}: 1,388 prefill, 45 decode, 0 recomputed"
    assert rows["bytes written"].startswith(f"{written * 1024:,} in ")
    assert rows["speed"].endswith(" GB/s in scatter")
    assert rows["preemptions"] == "0"
    assert re.match(r"peak 11 of 2,048 blocks \(1%\), 0 now", rows["pool use"])
    assert rows["verified"] == "50 samples, all right"


def test_json_has_the_same_and_nothing_else_is_printed(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_json(capsys, trace, "--max-batch", "1", "--seed", "9", "--progress", "none")
    assert result["trace"] == trace
    assert result["seed"] == 9
    assert result["requests"] == {"total": 3, "finished": 3}
    assert result["tokens"]["written"] == 1433
    assert result["bytes"] == {"written": 1433 * 1024, "copied": 0}
    assert result["prefix"] == {"prompt_tokens": 2500, "hit_tokens": 1112, "hit_rate": 0.4448}
    assert result["verified"] == {"samples": 1000, "mismatches": []}
    assert result["interrupted"] is False
    assert result["scatter_gb_per_s"] > 0
    assert set(result["seconds"]) == {"schedule", "generate", "scatter", "verify", "elapsed"}


def test_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = "".join(json.dumps(line) + "\n" for line in LINES).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert run_json(capsys, "-", "--requests", "2")["requests"] == {"total": 2, "finished": 2}


def test_without_a_file_a_trace_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    one, two, other = (
        run_json(capsys, "--requests", "3", "--seed", seed) for seed in ("1", "1", "2")
    )
    assert one["trace"] == "generated, seed 1"
    assert one["tokens"] == two["tokens"] != other["tokens"]


@pytest.mark.parametrize("layout", ["Norm", "NHSD", "PA_NZ"])
def test_layouts_and_numbers_for_a_model(
    layout: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--layers 1 --num-heads 3 --head-size 32 --value-head-size 64 --dtype int8"
    sizes = "--blocks 60 --block-size 50 --max-batch 3 --chunk 100 --threads 1"
    result = run_json(capsys, trace, "--layout", layout, *options.split(), *sizes.split())
    assert result["model"]["token_bytes"] == 3 * (32 + 64)
    assert result["model"]["name"] == "tiny, changed"
    assert result["cache"] == {
        "layout": layout,
        "block_size": 50,
        "num_blocks": 60,
        "bytes": 60 * 50 * 288,
    }


@pytest.mark.parametrize("model", sorted(MODELS))
def test_models_by_name(model: str, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = ["--blocks", "11", "--layers", "1", "--verify-samples", "20"]
    result = run_json(capsys, trace, "--model", model, *blocks)
    assert result["model"]["token_bytes"] == ModelProfile.named(model).row_bytes


def test_key_only(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, trace, "--value-head-size", "0")
    assert result["model"]["token_bytes"] == 512
    assert result["verified"]["samples"] == 1000


def test_cache_size_in_mebibytes(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, trace, "--cache-mib", "3", "--block-size", "100")
    assert result["cache"]["num_blocks"] == 3 * 2**20 // (100 * 1024)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modle", "tiny"], "unknown option --modle; did you mean --model? allowed: --help,"),
        (["--model", "gpt"], "model: expected one of tiny, tiny-sparse, llama-3-8b, llama"),
        (["--layout", "ND"], "layout: expected one of Norm, NHSD, PA_NZ, got 'ND'"),
        (["--dtype", "bf16"], "dtype: expected one of float16, "),
        (["--progress", "x"], "invalid choice: 'x' (choose from 'auto', 'bar', 'lines', 'none')"),
        (["--requests", "0"], "--requests: expected an integer from 1 to 10000000, got '0'"),
        (["--requests", "many"], "--requests: expected an integer from 1 to 10000000, got 'many'"),
        (["--seed", "-1"], "--seed: expected an integer from 0 to 18446744073709551615, got '-1'"),
        (["--block-size", "0"], "--block-size: expected an integer from 1 to 65536, got '0'"),
        (["--block-size", "1.5"], "--block-size: expected an integer from 1 to 65536, got '1.5'"),
        (["--blocks", "9" * 5000], "--blocks: expected an integer from 1 to 1099511627776, got '9"),
        (["--blocks", "4", "--cache-mib", "4"], "--cache-mib: not allowed with argument --blocks"),
        (["--threads", "0"], "--threads: expected an integer from 1 to 1024, got '0'"),
        (["--verify-samples", "-3"], "--verify-samples: expected an integer from 0 to 1000000000"),
        (
            ["--max-batch", "nan"],
            "--batch/--max-batch: expected an integer from 1 to 4096, got 'nan'",
        ),
        (["--chunk", ""], "--chunk: expected an integer from 1 to 1048576, got ''"),
        (["a.jsonl", "b.jsonl"], "unexpected argument 'b.jsonl'"),
        (["no such.jsonl"], "kvcore replay: no such.jsonl: No such file or directory"),
        (["."], "kvcore replay: .: Is a directory"),
        (["--layers", "4097"], "--layers: expected an integer from 1 to 4096, got '4097'"),
        (
            ["--head-size", "20", "--layout", "PA_NZ"],
            "--head-size: expected a multiple of 32 bytes",
        ),
        (["--head-size", "3", "--dtype", "float4_e2m1"], "--head-size: expected an even number"),
        (["--blocks", "1099511627776"], "num_blocks: expected caches that fit the machine's mem"),
        (["--cache-mib", "1", "--block-size", "2000"], "--cache-mib: expected at least one block"),
        (["--blocks", "5"], "expected at most 5 blocks of 128 tokens (the pool), got "),
    ],
)
def test_what_is_wrong_is_said_before_any_work(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise AssertionError("work has started")

    monkeypatch.setattr(kvcore, "scatter_pa_kv_cache", unreachable)
    assert main(["replay", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert "Traceback" not in captured.err


def test_a_bad_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(LINES[0]) + "\n" + json.dumps({**LINES[1], "hash_ids": [0]}) + "\n")
    assert main(["replay", str(path)]) == 2
    assert capsys.readouterr().err == (
        "kvcore replay: bad.jsonl:2: hash_ids: "
        "expected 2 ids (input_length 600 / 512, rounded up), got 1\n"
    )


def test_an_empty_trace_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("\n\n")
    assert main(["replay", str(path)]) == 2
    assert "expected at least one request, got none" in capsys.readouterr().err


def test_rows_that_are_wrong_end_with_1(
    trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kvcore, "scatter_pa_kv_cache", lambda *_args, **_options: None)
    assert main(["replay", trace, "--verify-samples", "30"]) == 1
    captured = capsys.readouterr()
    assert table(captured.out)["verified"] == "30 samples, 60 ROWS WRONG"
    lines = captured.err.splitlines()
    assert len(lines) == 5
    assert re.match(r"kvcore replay: request \d, token \d+, layer \d, key: block \d+ row", lines[0])


def interrupting(call: int, times: int = 1) -> Callable[..., None]:
    """The operator, which gets SIGINT in its n-th call."""
    real = kvcore.scatter_pa_kv_cache
    calls = 0

    def scatter(*arguments: Any, **options: Any) -> None:
        nonlocal calls
        real(*arguments, **options)
        calls += 1
        if calls == call:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    return scatter


def test_an_interrupt_ends_with_the_table_so_far(
    trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    # Call 5 is the first layer of step 3; the step is completed, so nothing is half written.
    monkeypatch.setattr(kvcore, "scatter_pa_kv_cache", interrupting(5))
    assert main(["replay", trace, "--chunk", "100"]) == 130
    captured = capsys.readouterr()
    assert captured.err == "kvcore replay: interrupted, what is done is above\n"
    assert "interrupted: so far" in captured.out
    rows = table(captured.out)
    assert rows["requests"] == "0 of 3 finished"
    assert rows["tokens written"] == "300: 300 prefill, 0 decode, 0 recomputed"
    assert rows["verified"] == "nothing"
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_with_json(
    trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kvcore, "scatter_pa_kv_cache", interrupting(1))
    assert main(["replay", trace, "--json", "-", "--chunk", "100"]) == 130
    result = json.loads(capsys.readouterr().out)
    assert result["interrupted"] is True
    assert result["steps"] == 1


def test_a_second_interrupt_does_not_wait(
    trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kvcore, "scatter_pa_kv_cache", interrupting(1, times=2))
    assert main(["replay", trace]) == 130
    captured = capsys.readouterr()
    assert captured.err == "kvcore: interrupted\n"
    assert captured.out == ""


def test_a_process_that_is_interrupted_ends_cleanly() -> None:
    # Far more than it could serve before the signal that follows its first line.
    command = [*PROGRAM, "replay", "--requests", "5000", "--progress", "lines"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        assert re.match(r"replay: \d+ of \d+ tokens, \d+ of 5000 requests", first)
        process.send_signal(signal.SIGINT)
        out, rest = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in rest
    assert "interrupted: so far" in out
    assert table(out)["requests"].endswith(" of 5,000 finished")


def test_a_reader_that_has_gone_is_no_error(trace: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [*PROGRAM, "replay", trace], stdout=writer, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_progress_in_lines(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", trace, "--progress", "lines", "--chunk", "50", "--json", "-"]) == 0
    captured = capsys.readouterr()
    json.loads(captured.out)
    lines = captured.err.splitlines()
    assert 2 <= len(lines) <= 11
    assert lines[-1] == "replay: 2545 of 2545 tokens, 3 of 3 requests"


def test_progress_as_a_bar_leaves_standard_output_alone(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", trace, "--progress", "bar", "--json", "-"]) == 0
    json.loads(capsys.readouterr().out)


@pytest.mark.skipif(not REAL.exists(), reason=f"{REAL.name} is not there")
@pytest.mark.parametrize("layout", ["Norm", "PA_NZ"])
def test_the_real_trace(layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, str(REAL), "--requests", "40", "--layout", layout)
    assert result["requests"] == {"total": 40, "finished": 40}
    assert result["verified"] == {"samples": 1000, "mismatches": []}
    seen = result["tokens"]["prefill"] + result["tokens"]["decode"] + result["prefix"]["hit_tokens"]
    assert seen == result["tokens"]["total"]


def test_only_a_terminal_or_columns_fold_the_table(
    trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["replay", trace, "--verify-samples", "5"]
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(arguments) == 0
    unfolded = capsys.readouterr().out.splitlines()
    model = "tiny: 2 layers, 2 heads of 64 + 64 bfloat16, 1,024 bytes a token"
    assert f"  model            {model}" in unfolded
    assert [line for line in unfolded if line != line.rstrip()] == []

    monkeypatch.setenv("COLUMNS", "50")
    assert main(arguments) == 0
    folded = capsys.readouterr().out
    assert max(map(len, folded.splitlines())) <= 50
    assert table(folded)["model"] == model


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "not-there"], "kvcore replay: --model: expected one of tiny, "),
        (["--model", "llama-3-70b"], "--cache-mib (now 256) makes the pool larger, and with"),
        (["--model", "llama-3-70b", "--blocks", "6"], "; --blocks makes the pool larger"),
        (["--policy", "lru", "--model", "llama-3-8b"], "kvcore replay: --"),
    ],
)
def test_errors_name_the_option_to_change(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", "--requests", "2", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_config_that_lacks_a_figure_says_how_to_give_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    assert main(["replay", "--requests", "1", "--model", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "num_hidden_layers: expected a number, got None; kvcore replay --write-model FILE" in err
