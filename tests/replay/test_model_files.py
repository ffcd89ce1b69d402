# SPDX-License-Identifier: Apache-2.0
"""Models as files: written to be edited, read from a folder, and what a host's memory holds."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from kvcore.cli.program import main
from kvcore.errors import ParamInvalidError
from kvcore.replay import MODELS, ModelFigure, ModelProfile, OffloadOptions
from kvcore.replay.models.writing import missing_figures, model_toml
from kvcore.replay.serving.fit import host_blocks_of

CONFIG = {
    "num_hidden_layers": 12, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 2048,
    "index_head_dim": 128, "num_attention_heads": 64, "dtype": "bfloat16",
}  # fmt: skip
GIB = 2**30


def same(a: ModelProfile, b: ModelProfile) -> bool:
    return (a.name, a.note, a.device, a.figures) == (b.name, b.note, b.device, b.figures)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_what_is_written_is_read_as_the_same_model(name: str, tmp_path: Path) -> None:
    model, path = ModelProfile.named(name), tmp_path / "m.toml"
    path.write_text(model_toml(model), encoding="utf-8")
    assert same(ModelProfile.load(path), model)


def test_any_words_survive(tmp_path: Path) -> None:
    model = ModelProfile.named("tiny-sparse")
    words = 'a "quoted" \\path\\ \n\t\x7f\x01 日本 # [not a table]'
    figures = {**model.figures, "topk": ModelFigure(256, "measured", words)}
    path = tmp_path / "m.toml"
    path.write_text(model_toml(ModelProfile(words, figures, "", "A3")), encoding="utf-8")
    found = ModelProfile.load(path)
    assert found.name == words
    assert found["topk"].source == words
    assert "\ufffd" not in model_toml(model)
    lost = ModelProfile("half \udcff", model.figures)
    assert tomllib.loads(model_toml(lost))["name"] == "half ?"


def test_what_is_missing_is_shown_and_can_be_given(tmp_path: Path) -> None:
    folder = tmp_path / "a-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    model = ModelProfile.find(str(folder))
    lacks = ("step_fixed", "step_request", "step_attended", "step_indexed", "weights")
    assert missing_figures(model) == lacks
    text = model_toml(model)
    assert set(tomllib.loads(text)) == {"name", *model.figures}
    for key in lacks:
        text = text.replace(
            f'# [{key}]\n# value = \n# basis = "measured"\n# source = ""',
            f'[{key}]\nvalue = 7\nbasis = "measured"\nsource = "a stopwatch"',
        )
    path = tmp_path / "mine.toml"
    path.write_text(text)
    assert missing_figures(ModelProfile.load(path)) == ()
    assert OffloadOptions(batch=1).check(ModelProfile.load(path))


def test_the_command_writes_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "mine.toml"
    assert main(["replay", "--model", str(tmp_path), "--write-model", str(path)]) == 0
    assert "missing: step_fixed, step_request" in " ".join(capsys.readouterr().out.split())
    assert ModelProfile.load(path).topk == 2048
    assert main(["replay", "--write-model", str(path)]) == 0
    assert same(ModelProfile.load(path), ModelProfile.named("tiny-sparse"))
    capsys.readouterr()
    for more, words in (
        (["--policy", "lru"], "no other option but --model, got --policy"),
        (["trace.jsonl"], "no other option but --model, got a trace"),
        (["--model", str(path)], "a file of its own"),
        (["--model", str(tmp_path / "nothing")], "a folder with a config.json"),
    ):
        assert main(["replay", "--write-model", str(path), *more]) == 2
        assert words in capsys.readouterr().err
    assert main(["replay", "--write-model", str(tmp_path / "config.json")]) == 2
    assert "a file called .toml" in capsys.readouterr().err
    assert main(["replay", "--compare", "a", "b", "--write-model", str(path)]) == 2
    assert "together with --compare" in capsys.readouterr().err


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParamInvalidError, match=r"model: expected a folder with a config\.json"):
        ModelProfile.find(str(tmp_path))


def test_the_hosts_memory_limits_its_blocks() -> None:
    glm, tiny = ModelProfile.named("glm-5.2"), ModelProfile.named("tiny-sparse")
    block = 128 * 78 * 1152
    assert host_blocks_of(glm, 128, None) == 128 * GIB // block == 11_949
    assert host_blocks_of(glm, 128, 40.0) == 40 * GIB // block
    assert host_blocks_of(glm, 128, 0.0) == 1
    assert host_blocks_of(tiny, 128, None) == 65_536
    most = 2048 * GIB // block
    assert OffloadOptions(batch=2, host_blocks=most).check(glm)
    with pytest.raises(ParamInvalidError, match=r"host_blocks: expected at most 191,193 blocks .*"):
        OffloadOptions(batch=2, host_blocks=most + 1).check(glm)
    assert OffloadOptions(batch=2, host_blocks=most + 1, host_gib=2100.0).check(glm)
    with pytest.raises(ParamInvalidError, match=r"in 10 GiB \(host_gib\), got 1,000, which"):
        OffloadOptions(batch=2, host_blocks=1000, host_gib=10.0).check(glm)
    # Without offload the host has no blocks.
    plain = OffloadOptions(batch=2, policy="none", weights_gib=40.0, host_blocks=2**24)
    assert plain.check(glm)


def test_the_default_of_the_command_is_what_a_host_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, path = tmp_path / "t.jsonl", tmp_path / "a.json"
    trace.write_text('{"timestamp": 0, "input_length": 4000, "output_length": 2}\n')
    command = ["replay", str(trace), "--model", "glm-5.2", "--batch", "1", "--sample-layers", "1"]
    more = ["--fidelity", "sampled", "--verify-samples", "1", "--json", str(path)]
    assert main([*command, *more]) == 0
    assert json.loads(path.read_text())["options"]["host_blocks"] == 11_949
    out = " ".join(capsys.readouterr().out.split())
    assert "of 11,949 blocks" in out
    assert "128 GiB of host memory a device are assumed" in out
