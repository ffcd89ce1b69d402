# SPDX-License-Identifier: Apache-2.0
"""Models as data: what ships is whole, what lies is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcore.errors import ParamInvalidError
from kvcore.replay import OffloadOptions, models
from kvcore.replay.models.profile import (
    MODEL_FIGURES,
    MODELS,
    ModelFigure,
    ModelProfile,
)
from kvcore.runtime import profile

STEP = {"step_drafts", "step_fixed", "step_request", "step_attended", "step_indexed"}
PROMPTS = {"prefill_token", "prefill_attended"}
GLM = {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 192,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_head_dim": 128,
    "num_nextn_predict_layers": 1,
    "dtype": "bfloat16",
}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


def config(folder: Path, data: Any) -> Path:
    path = folder / "config.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


@pytest.mark.parametrize("name", MODELS)
def test_what_ships_is_whole(name: str) -> None:
    model = ModelProfile.named(name)
    assert model.name == name
    # (what weights take is of one machine, and published of none)
    assert set(model.figures) | PROMPTS | {"weights"} == set(MODEL_FIGURES)
    real = not name.startswith("tiny")
    assert (model.figures.keys() >= PROMPTS) == (real and not model.topk)
    assert model.note
    assert {"step_request", "step_attended"} <= set(model.assumed())
    short, long = model.step_us(2, 1000), model.step_us(2, 100_000)
    assert 0 < model.step_us(0, 0) < model.step_us(1, 1000) < short < long


def test_sizes() -> None:
    glm, deepseek = ModelProfile.named("glm-5.2"), ModelProfile.named("deepseek-v3.2")
    assert glm.groups[:4] == ((0,), (1,), (2, 3, 4, 5), (6, 7, 8, 9))
    assert len(glm.groups) == 21
    assert glm.groups[-1] == (74, 75, 76, 77)
    assert sum(glm.groups, ()) == tuple(range(78))
    assert glm.token_bytes == 79 * 1152
    assert glm.token_index_bytes == 21 * 256
    # The split between the parts is assumed; their sum is the published step.
    assert glm.step_us(2, 65_536) == pytest.approx(71_210, rel=1e-4)
    assert deepseek.groups == tuple((n,) for n in range(61))
    assert ModelProfile.named("llama-3-8b").token_bytes == 131_072
    assert ModelProfile.named("qwen3-8b").token_bytes == 147_456
    assert ModelProfile.named("llama-3-8b").groups == ()
    assert ModelProfile.named("llama-3-8b").shape.row_bytes == (2048, 2048)


def test_configs(tmp_path: Path) -> None:
    glm = ModelProfile.from_config(config(tmp_path, GLM))
    shipped = ModelProfile.named("glm-5.2")
    for key in set(MODEL_FIGURES) - STEP - PROMPTS - {"weights"}:
        assert glm[key].value == shipped[key].value, key
    listed = {**GLM, "indexer_types": ["full", "full"] + ["shared"] * 76}
    assert ModelProfile.from_config(config(tmp_path, listed)).index_layers == (0, 1)
    llama = ModelProfile.from_config(config(tmp_path, {"text_config": LLAMA, "other": 1}))
    assert (llama.name, llama.token_bytes, llama.topk) == ("llama", 131_072, 0)
    assert str(tmp_path) in llama["layers"].source
    mixed = {**LLAMA, "layer_types": ["linear_attention", "full_attention"] * 16}
    assert ModelProfile.from_config(config(tmp_path, mixed)).layers == 16
    with pytest.raises(ParamInvalidError, match=r"step_fixed: expected a figure of llama") as told:
        llama.step_us(1, 1)
    assert "step_request, step_attended, step_indexed, which are missing too" in str(told.value)
    last = llama.replace(step_fixed=1.0, step_request=1.0, step_attended=1.0)
    with pytest.raises(ParamInvalidError, match=r"nothing; give it in a TOML profile$"):
        last.step_us(1, 1)
    assert last.replace(step_indexed=1.0).step_us(1, 1) == 3


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ("", "expected a JSON file"),
        ("{", "expected a JSON file"),
        ("[" * 100_000, "expected a JSON file"),
        ([1], r"expected a config.json, got .*: list"),
        ({}, "num_hidden_layers: expected a number, got None"),
        ({**LLAMA, "num_hidden_layers": "32"}, "num_hidden_layers: expected a number, got '32'"),
        ({**LLAMA, "num_hidden_layers": True}, "num_hidden_layers: expected a number"),
        ({**LLAMA, "num_hidden_layers": 10**30}, "num_hidden_layers: expected a number"),
        ({**LLAMA, "num_hidden_layers": 5000}, "layers: expected"),
        ({**LLAMA, "num_key_value_heads": -1}, "num_key_value_heads: expected"),
        ({**LLAMA, "num_attention_heads": 0, "head_dim": None}, "num_attention_heads: expected"),
        ({**LLAMA, "torch_dtype": "int3"}, "dtype: expected one of"),
        ({**LLAMA, "layer_types": ["full_attention"]}, "layer_types: expected 32 names"),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 32}, "layer_types: expected full_att"),
        ({**LLAMA, "layer_types": ["linear_attention"] * 32}, "layers: expected"),
        ({**GLM, "indexer_types": ["full"]}, "indexer_types: expected 78 times"),
        ({**GLM, "indexer_types": ["shared"] * 78}, "index_layers: expected layer 0"),
        ({**GLM, "kv_lora_rank": None, "index_topk": float("nan")}, "index_topk: expected"),
    ],
)
def test_bad_configs_are_refused(tmp_path: Path, data: Any, match: str) -> None:
    with pytest.raises(ParamInvalidError, match=match):
        ModelProfile.from_config(config(tmp_path, data))


def test_own_files(tmp_path: Path) -> None:
    source = Path(str(ModelProfile.__module__).replace(".", "/")).with_name("glm_5_2.toml")
    text = (Path(__file__).parents[2] / source).read_text()
    path = tmp_path / "own.toml"
    path.write_text(text.replace('name = "glm-5.2"', 'name = "mine"'))
    assert ModelProfile.load(path).name == "mine"
    for change, match in (
        (("value = 78", 'value = "78"'), r"layers: expected .* got '78'"),
        (("value = 78", "value = true"), r"layers: expected"),
        (("value = 78", "value = 78.5"), r"layers: expected"),
        (("value = 64954.0", "value = nan"), r"step_fixed: expected"),
        (("value = 64954.0", "value = -1.0"), r"step_fixed: expected"),
        (("[layers]", "[layer]"), r"layer: expected one of"),
        (("basis = ", "bases = "), r"expected a table of value, basis and source"),
        (('basis = "published"', 'basis = "heard"'), r"layers.basis: expected one of measured"),
        (("value = [0, 1", "value = [1, 0"), r"index_layers: expected layers in ascending"),
        (("value = [0, 1", "value = [1"), r"index_layers: expected layer 0"),
        (("74]", "78]"), r"index_layers: expected layers below 78, got 78"),
        (('name = "glm-5.2"', "name = 3"), r"name: expected the model's name, got 3"),
        (('name = "glm-5.2"', "name = "), r"model: expected a TOML file"),
        (('value = "bfloat16"', 'value = "bf16"'), r"dtype: expected one of"),
    ):
        assert change[0] in text
        path.write_text(text.replace(*change))
        with pytest.raises(ParamInvalidError, match=match):
            ModelProfile.load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ParamInvalidError, match="expected a readable text file"):
        ModelProfile.load(path)
    with pytest.raises(ParamInvalidError, match="expected a readable text file"):
        ModelProfile.load(tmp_path / "none.toml")
    with pytest.raises(ParamInvalidError, match=r"model: expected one of tiny, tiny-sparse"):
        ModelProfile.named("gpt")


def test_figures_that_lack() -> None:
    figures = dict(ModelProfile.named("llama-3-8b").figures)
    del figures["heads"]
    with pytest.raises(ParamInvalidError, match=r"heads: expected a figure: key-value heads"):
        ModelProfile("mine", figures)
    figures["heads"] = ModelFigure(8, "assumed", "")
    with pytest.raises(ParamInvalidError, match=r"heads.source: expected where the figure"):
        ModelProfile("mine", figures)
    model = ModelProfile.named("llama-3-8b")
    with pytest.raises(ParamInvalidError, match=r"batch: expected an integer"):
        model.step_us(-1, 5)
    with pytest.raises(ParamInvalidError, match=r"context: expected an integer"):
        model.step_us(1, 5.5)  # type: ignore[arg-type]


def test_a_step_belongs_to_a_device(tmp_path: Path) -> None:
    """A model of an A3 is refused elsewhere; by a profile that is like an A3 it is served."""
    model = ModelProfile.named("glm-5.2")
    assert model.device == model.replace(step_fixed=1.0).device == "A3"
    for device in ("A2", "950"):
        with pytest.raises(
            ParamInvalidError,
            match=rf"^device: expected A3, of which glm-5.2's step is: .* 32\), .*, got {device}$",
        ):
            OffloadOptions(device=device).check(model)
    assert OffloadOptions(device="A3").check(model)[0].name == "A3"
    # Of no hardware, so of any.
    assert ModelProfile.named("tiny-sparse").device == ""
    for device in ("A2", "A3", "950"):
        assert OffloadOptions(device=device).check(ModelProfile.named("tiny-sparse"))[0]

    text = Path(profile.__file__).with_name("a3.toml").read_text()
    path = tmp_path / "mine.toml"
    path.write_text(text.replace('name = "A3"', 'name = "mine"'))
    with pytest.raises(ParamInvalidError, match=r"^device: expected A3, .*, got mine$"):
        OffloadOptions(device=str(path)).check(model)
    path.write_text(text.replace('name = "A3"', 'name = "mine"\nlike = "A3"'))
    found = OffloadOptions(device=str(path)).check(model)[0]
    assert (found.like, found.replace(h2d_bandwidth=1.0).like) == ("A3", "A3")
    path.write_text(text.replace('name = "A3"', 'name = "mine"\nlike = 3'))
    with pytest.raises(ParamInvalidError, match=r"^like: expected the name of a device"):
        OffloadOptions(device=str(path)).check(model)

    own = tmp_path / "model.toml"
    shipped = (Path(models.__file__).with_name("glm_5_2.toml")).read_text()
    own.write_text(shipped.replace('device = "A3"', 'device = "950"'))
    assert OffloadOptions(device="950").check(ModelProfile.find(str(own)))[0].name == "950"
    own.write_text(shipped.replace('device = "A3"', "device = 950"))
    with pytest.raises(ParamInvalidError, match=r"^device: expected the name of the device whose"):
        ModelProfile.find(str(own))


@pytest.mark.parametrize("name", ["deepseek-v3.2", "deepseek-v3.2-c8"])
def test_what_was_fitted_is_not_called_published(name: str) -> None:
    model = ModelProfile.named(name)
    assert {model[key].basis for key in ("step_fixed", "step_indexed")} == {"fitted"}
    for key, figure in model.figures.items():
        assert figure.basis == "fitted" or "least squares" not in figure.source, key
