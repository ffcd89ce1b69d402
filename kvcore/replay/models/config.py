# SPDX-License-Identifier: Apache-2.0
"""A model's figures out of a Hugging Face config.json.

Such a file describes the cache entry of a token and says nothing about time: the figures of a step
are then missing, and asking for them is an error that names them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NoReturn

from kvcore.errors import fail, in_words
from kvcore.json_files import unique_keys
from kvcore.replay.models.config_layers import cached_layers, index_layers
from kvcore.replay.models.profile import ModelFigure, ModelProfile, read_text

__all__ = ["Config", "read_config"]

INDEX_FIELDS = "indexer_types, index_topk_pattern, index_topk_freq, index_skip_topk_offset"
#: Where figures can be given that such a file does not have, or has in another way.
INSTEAD = "kvcore replay --write-model FILE.toml writes a model to edit instead"
CONFIG_DTYPES = ("bfloat16", "float16", "float32")


def read_config(path: str | os.PathLike[str]) -> ModelProfile:
    """The model of a config.json (of the ``text_config`` inside it, where there is one).

    Raises ParamInvalidError naming the file and the field.
    """
    text = read_text(path)
    try:
        # NaN and Infinity are read: transformers writes them, in fields that say nothing here.
        config = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:  # integers of thousands of digits among them
        fail("model", "a JSON file", f"{os.fspath(path)}: {error}")
    return _from_config(os.fspath(path), config)


class Config:
    """Fields of a config.json, each read with its name for the error and the source."""

    path: str
    data: dict[str, Any]

    def __init__(self, path: str, data: dict[str, Any]) -> None:
        self.path, self.data = path, data

    def shown(self, field: str) -> str:
        """The field's value for a message, cut."""
        return repr(self.data.get(field))[:60]

    def refuse(self, field: str, expected: str, seen: object) -> NoReturn:
        """Raise ParamInvalidError naming the file and the field."""
        fail(f"{self.path}: {field}", expected, f"{in_words(seen)}; {INSTEAD}")

    def number(self, field: str, default: int | None = None) -> int:
        """A whole number from 0 on; the default where it is missing or null."""
        value = self.data.get(field, default)
        if value is None:
            value = default
        if type(value) is not int or not 0 <= value < 2**31:
            self.refuse(field, "a number", repr(self.data.get(field)))
        return value

    def flag(self, field: str, default: bool) -> bool:
        """A field of true or false; the default where it is missing or null."""
        value = self.data.get(field)
        if value is None:
            return default
        if type(value) is not bool:
            self.refuse(field, "true or false", self.shown(field))
        return value

    def figure(self, value: Any, fields: str) -> ModelFigure:
        """A figure with the basis "published", whose source names these fields."""
        return ModelFigure(value, "published", f"{self.path}: {fields}")


def _from_config(path: str, data: Any) -> ModelProfile:
    if isinstance(data, dict) and isinstance(data.get("text_config"), dict):
        data = data["text_config"]
    if not isinstance(data, dict):
        fail("model", "a config.json", f"{path}: {type(data).__name__}")
    config = Config(path, data)
    layers = cached_layers(config)
    if data.get("kv_lora_rank") is not None:
        fields = "kv_lora_rank, qk_rope_head_dim"
        sizes = 1, config.number("kv_lora_rank"), config.number("qk_rope_head_dim")
    else:
        fields = "num_key_value_heads, head_dim"
        attention = config.number("num_attention_heads")
        if not attention:
            config.refuse("num_attention_heads", "at least 1", attention)
        heads = config.number("num_key_value_heads", attention)
        whole = config.number("hidden_size", 0) // attention
        size = config.number("head_dim", whole)
        sizes = heads, size, size
    dtype = data.get("dtype", data.get("torch_dtype", "bfloat16"))
    if dtype not in CONFIG_DTYPES:
        config.refuse("dtype", "one of " + ", ".join(CONFIG_DTYPES), repr(dtype))
    topk = config.number("index_topk", 0)
    choosing = index_layers(config, layers) if topk else ()
    # One key of the indexer a token, in the model's type.
    index_bytes = config.number("index_head_dim", 0) * (4 if dtype == "float32" else 2)
    figures = {
        "layers": config.figure(layers, "num_hidden_layers, layer_types"),
        "draft_layers": config.figure(
            config.number("num_nextn_predict_layers", 0), "num_nextn_predict_layers"
        ),
        "dtype": config.figure(dtype, "dtype; a cache of another type is the server's choice"),
        "topk": config.figure(topk, "index_topk"),
        "step_drafts": ModelFigure(0, "assumed", "a config.json says nothing of a step"),
        "index_layers": config.figure(choosing, INDEX_FIELDS),
        "index_bytes": config.figure(index_bytes, "index_head_dim"),
    }
    for key, size in zip(("heads", "head_size", "value_head_size"), sizes, strict=True):
        figures[key] = config.figure(size, fields)
    name = data.get("model_type")
    return ModelProfile(name if isinstance(name, str) and name else Path(path).stem, figures)
