# SPDX-License-Identifier: Apache-2.0
"""Which layers of a config.json keep every token, and which choose the top-k.

Each refused file has its neighbour that loads: the same model without a layer that has a window.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcore.errors import ParamInvalidError
from kvcore.replay import ModelProfile

DENSE = {
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}
SPARSE = {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 12,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_topk": 2048,
    "index_head_dim": 128,
    "num_attention_heads": 64,
}


def load(folder: Path, data: dict[str, Any]) -> ModelProfile:
    path = folder / "config.json"
    path.write_text(json.dumps(data))
    return ModelProfile.from_config(path)


@pytest.mark.parametrize(
    ("kind", "windowed", "seen", "full"),
    [
        ("mistral", {"sliding_window": 4096}, "4096 in 12 of 12", {"sliding_window": None}),
        ("mistral", {}, "4096 in 12 of 12", {"sliding_window": None, "max_window_layers": None}),
        (
            "mistral",
            {"sliding_window": 64, "layer_types": ["full_attention"] * 12},
            "64 in 12 of 12",
            {"sliding_window": None, "layer_types": ["full_attention"] * 12},
        ),
        ("mixtral", {"sliding_window": 4096}, "4096 in 12 of 12", {}),
        ("gemma2", {}, "4096 in 6 of 12", {"layer_types": ["full_attention"] * 12}),
        ("gemma3", {"sliding_window_pattern": 6}, "4096 in 10", {"sliding_window_pattern": 1}),
        ("gemma3_text", {"sliding_window": 512}, "512 in 10 of 12", {"sliding_window": None}),
        ("gemma3_text", {"_sliding_window_pattern": 4}, "4096 in 9 of 12", {"sliding_window": 0}),
        ("cohere2", {}, "4096 in 9 of 12", {"sliding_window": None}),
        ("exaone4", {"sliding_window": 64, "sliding_window_pattern": "LLLG"}, "64 in 9 of 12",
         {"sliding_window": 64, "sliding_window_pattern": "G"}),
        ("gpt_oss", {"sliding_window": 128}, "128 in 6 of 12", {"sliding_window": None}),
        ("new", {"sliding_window": 128}, "128 in 12 of 12", {"sliding_window": None}),
        ("new", {"sliding_window": 128, "use_sliding_window": True}, "128 in 12 of 12",
         {"sliding_window": 128, "use_sliding_window": False}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, "4096 in 12 of 12",
         {"sliding_window": 4096, "max_window_layers": 0}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 11},
         "64 in 1 of 12",
         {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 12}),
        ("qwen3_moe", {"use_sliding_window": True, "max_window_layers": 4}, "4096 in 8 of 12",
         {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 4}),
    ],
)  # fmt: skip
def test_windows(
    tmp_path: Path, kind: str, windowed: dict[str, Any], seen: str, full: dict[str, Any]
) -> None:
    with pytest.raises(ParamInvalidError, match=rf"sliding_window: expected no window .* {seen}"):
        load(tmp_path, {**DENSE, "model_type": kind, **windowed})
    assert load(tmp_path, {**DENSE, "model_type": kind, **full}).layers == 12


@pytest.mark.parametrize(
    ("kind", "chunked", "seen", "full"),
    [
        (
            "llama4_text",
            {"attention_chunk_size": 8192},
            "8192 in 9",
            {"attention_chunk_size": None},
        ),
        ("llama4_text", {}, "8192 in 9 of 12", {"no_rope_layers": [0] * 12}),
        ("llama4_text", {"no_rope_layers": [1, 0] * 6}, "8192 in 6", {"no_rope_layer_interval": 1}),
        ("new", {"attention_chunk_size": 64}, "64 in 12 of 12", {"attention_chunk_size": 0}),
    ],
)
def test_chunks(
    tmp_path: Path, kind: str, chunked: dict[str, Any], seen: str, full: dict[str, Any]
) -> None:
    with pytest.raises(ParamInvalidError, match=rf"attention_chunk_size: expected .* {seen}"):
        load(tmp_path, {**DENSE, "model_type": kind, **chunked})
    assert load(tmp_path, {**DENSE, "model_type": kind, **full}).layers == 12


def test_windows_inside_a_text_config(tmp_path: Path) -> None:
    inner = {**DENSE, "model_type": "gemma3_text", "sliding_window": 1024}
    with pytest.raises(ParamInvalidError, match=r"sliding_window: .* 1024 in 10 of 12 layers"):
        load(tmp_path, {"model_type": "gemma3", "text_config": inner})
    inner["sliding_window"] = None
    assert load(tmp_path, {"model_type": "gemma3", "text_config": inner}).layers == 12


def test_layer_types(tmp_path: Path) -> None:
    """What the file says of each layer decides over what its type would have."""
    for name in ("full_attention", "deepseek_sparse_attention"):
        data = {**DENSE, "model_type": "gemma2", "sliding_window": 64, "layer_types": [name] * 12}
        assert load(tmp_path, data).layers == 12
    for name in ("sliding_attention", "chunked_attention", "mamba", 3, None):
        with pytest.raises(ParamInvalidError, match="layer_types: expected full_attention or"):
            load(tmp_path, {**DENSE, "layer_types": [name] + ["full_attention"] * 11})


def test_layers_without_a_cache(tmp_path: Path) -> None:
    assert load(tmp_path, {**DENSE, "model_type": "qwen3_next"}).layers == 3
    data = {**DENSE, "full_attention_interval": 3}
    assert load(tmp_path, data).layers == 4
    with pytest.raises(ParamInvalidError, match="full_attention_interval: expected at least 1"):
        load(tmp_path, {**data, "full_attention_interval": 0})
    for field in ("attn_layer_period", "hybrid_override_pattern", "num_kv_shared_layers"):
        with pytest.raises(ParamInvalidError, match=f"{field}: expected null: .* got 4"):
            load(tmp_path, {**DENSE, field: 4})
        assert load(tmp_path, {**DENSE, field: None}).layers == 12


@pytest.mark.parametrize(
    ("extra", "right"),
    [
        ({}, range(12)),
        ({"index_topk_freq": 1}, range(12)),
        ({"index_topk_freq": 0}, range(12)),
        ({"index_topk_freq": 4}, (0, 1, 5, 9)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, (0, 1, 2, 6, 10)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 1}, (0, 4, 8)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": None}, (0, 1, 5, 9)),
        ({"index_topk_freq": 5, "index_skip_topk_offset": 12}, range(12)),
        ({"index_topk_pattern": "FSSSFSSSFSSS"}, (0, 4, 8)),
        ({"index_topk_pattern": "FSSSFSSSFSSSF"}, (0, 4, 8)),  # the last is of drafts
        ({"index_topk_pattern": ["full"] + ["shared"] * 11}, (0,)),
        ({"index_topk_pattern": None, "index_topk_freq": 6}, (0, 1, 7)),
        ({"indexer_types": ["full", "shared"] * 6, "index_topk_freq": 4}, range(0, 12, 2)),
        ({"indexer_types": ["full"] * 12, "index_topk_pattern": "F" + "S" * 11}, range(12)),
    ],
)
def test_who_chooses_the_top_k(tmp_path: Path, extra: dict[str, Any], right: Any) -> None:
    model = load(tmp_path, {**SPARSE, **extra})
    assert model.index_layers == tuple(right)
    assert sum(map(len, model.groups)) == 12


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"index_topk_pattern": "FSX" + "S" * 9}, r"index_topk_pattern\[2\]: expected full or"),
        ({"index_topk_pattern": "FSS"}, "index_topk_pattern: expected 12 times"),
        ({"index_topk_pattern": 3}, "index_topk_pattern: expected 12 times"),
        ({"index_topk_pattern": "S" * 12}, "index_layers: expected layer 0"),
        ({"indexer_types": ["full"] * 11 + [[]]}, r"indexer_types\[11\]: expected full or shared"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 0}, "index_layers: expected layer 0"),
        ({"index_topk_freq": -1}, "index_topk_freq: expected a number"),
        ({"use_sliding_window": "no"}, "use_sliding_window: expected true or false, got 'no'"),
        ({"sliding_window": "4k"}, "sliding_window: expected a number, got '4k'"),
        ({"sliding_window": -1}, "sliding_window: expected a number, got -1"),
    ],
)
def test_bad_fields_are_refused(tmp_path: Path, extra: dict[str, Any], match: str) -> None:
    with pytest.raises(ParamInvalidError, match=match):
        load(tmp_path, {**SPARSE, **extra})


def test_a_field_that_comes_twice(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    once = json.dumps(DENSE)
    path.write_text(once[:-1] + ', "num_hidden_layers": 24}')
    with pytest.raises(
        ParamInvalidError, match=r"config.json: key 'num_hidden_layers' comes twice"
    ):
        ModelProfile.from_config(path)
    # Of the whole file as well as of its parts; the number that no float holds says nothing.
    path.write_text('{"rope_scaling": {"factor": 2, "factor": 3}, ' + once[1:])
    with pytest.raises(ParamInvalidError, match=r"config.json: key 'factor' comes twice"):
        ModelProfile.from_config(path)
    path.write_text('{"time_step_limit": [0.0, Infinity], ' + once[1:])
    assert ModelProfile.from_config(path).layers == 12
