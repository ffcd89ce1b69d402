# SPDX-License-Identifier: Apache-2.0
"""Models as data: what a token keeps, who chooses the top-k, how long a step computes.

A profile is a set of figures, each with its basis (``measured``, ``published`` or ``assumed``) and
its source.  Those that ship are TOML files beside this module; one's own has the same form::

    name = "my model"

    [layers]
    value = 61
    basis = "published"
    source = "config.json: num_hidden_layers"

``from_config`` reads a Hugging Face config.json, which says what a token keeps and nothing about
time: the figures of a step are then missing, and asking for them is an error that names them.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from kvcore.errors import fail
from kvcore.offload.models import MAX_HEAD_SIZE, MAX_HEADS, MAX_LAYERS, ModelShape

__all__ = ["MODEL_FIGURES", "MODEL_PROFILES", "ModelFigure", "ModelProfile"]

BASES = ("measured", "published", "assumed")
MAX_FILE_BYTES = 16 * 2**20

#: Figure -> (what it is, least, most); the step's figures may be missing.
MODEL_FIGURES: dict[str, tuple[str, float, float]] = {
    "layers": ("layers with a cache, those for drafts not counted", 1, MAX_LAYERS),
    "draft_layers": ("layers with a cache that make draft tokens", 0, MAX_LAYERS),
    "heads": ("key-value heads; 1 for latent attention", 1, MAX_HEADS),
    "head_size": ("elements of a key head, or of the latent", 1, MAX_HEAD_SIZE),
    "value_head_size": ("elements of a value head, or of the rotary part", 0, MAX_HEAD_SIZE),
    "dtype": ("type of the cache's elements", 0, 0),
    "topk": ("tokens a step attends to; 0: all", 0, 2**31 - 1),
    "index_layers": ("layers that choose the top-k; the others use the last choice", 0, 0),
    "index_bytes": ("bytes a token of an indexer's own cache, in a layer that chooses", 0, 2**20),
    "step_fixed": ("us a step, whatever the batch", 0, 1e9),
    "step_request": ("us a request in the batch", 0, 1e9),
    "step_attended": ("us a token attended to, of each request", 0, 1e6),
    "step_indexed": ("us a token of context an indexer scores, of each request", 0, 1e6),
}
STEP = ("step_fixed", "step_request", "step_attended", "step_indexed")
REAL = frozenset(STEP)

#: Models that ship, by name, and their files.
MODEL_PROFILES: dict[str, str] = {
    "deepseek-v3.2": "model_deepseek_v3_2.toml",
    "glm-5.2": "model_glm_5_2.toml",
    "llama-3-8b": "model_llama_3_8b.toml",
    "qwen3-8b": "model_qwen3_8b.toml",
}


@dataclass(frozen=True, slots=True)
class ModelFigure:
    """One figure: a number, a dtype's name or a tuple of layers; its basis and source."""

    value: float | str | tuple[int, ...]
    basis: str
    source: str


class ModelProfile:
    """A model's figures, checked; see ``MODEL_FIGURES`` for units.

    name:    for tables.
    figures: by name; all but those of the step are required.
    note:    what the step's figures stand for (which device, how many).

    Raises ParamInvalidError naming the figure.
    """

    def __init__(self, name: str, figures: Mapping[str, ModelFigure], note: str = "") -> None:
        if not isinstance(name, str) or not name:
            fail("name", "the model's name", repr(name))
        self.name, self.note = name, note
        unknown = sorted(set(figures) - set(MODEL_FIGURES))
        if unknown:
            fail(unknown[0], "one of " + ", ".join(MODEL_FIGURES), "an unknown figure")
        for key in MODEL_FIGURES:
            if key in figures:
                _check_figure(key, figures[key])
            elif key not in REAL:
                fail(key, f"a figure: {MODEL_FIGURES[key][0]}", "nothing")
        self.figures = {key: figures[key] for key in MODEL_FIGURES if key in figures}
        for layer in self.index_layers:
            if layer >= self.layers:
                fail("index_layers", f"layers below {self.layers}", layer)
        if self.topk and (not self.index_layers or self.index_layers[0] != 0):
            fail("index_layers", "layer 0 among those that choose", self.index_layers)
        if not self.topk and self.index_layers:
            fail("index_layers", "none where topk is 0", self.index_layers)
        # What ModelShape asks of the sizes together.
        self.shape = ModelShape(
            name, self.layers, int(self._number("heads")), int(self._number("head_size")),
            int(self._number("value_head_size")), self.dtype,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"ModelProfile({self.name!r})"

    def __getitem__(self, key: str) -> ModelFigure:
        return self.figures[key]

    def _number(self, key: str) -> float:
        if key not in self.figures:
            expected = f"a figure of {self.name}: {MODEL_FIGURES[key][0]}"
            fail(key, expected, "nothing; give it in a TOML profile")
        value = self.figures[key].value
        assert isinstance(value, int | float)
        return value

    # -- what a token keeps

    @property
    def layers(self) -> int:
        """Layers with a cache, without those for drafts."""
        return int(self._number("layers"))

    @property
    def draft_layers(self) -> int:
        """Layers with a cache that make draft tokens."""
        return int(self._number("draft_layers"))

    @property
    def topk(self) -> int:
        """Tokens a step attends to; 0: all."""
        return int(self._number("topk"))

    @property
    def dtype(self) -> str:
        """The cache's element type, by its public name."""
        return str(self.figures["dtype"].value)

    @property
    def index_layers(self) -> tuple[int, ...]:
        """Layers that choose the top-k, ascending."""
        value = self.figures["index_layers"].value
        assert isinstance(value, tuple)
        return value

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Layers that share one choice of top-k, for each that chooses."""
        ends = (*self.index_layers[1:], self.layers)
        return tuple(tuple(range(a, b)) for a, b in zip(self.index_layers, ends, strict=False))

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers, drafts' included."""
        return sum(self.shape.row_bytes) * (self.layers + self.draft_layers)

    @property
    def token_index_bytes(self) -> int:
        """Bytes of a token in the caches of the indexers, which stay on the device."""
        return int(self._number("index_bytes")) * len(self.index_layers)

    # -- how long a step computes

    def step_us(self, batch: int, context: int) -> float:
        """Microseconds of one decode step, transfers not counted.

        batch: requests on the device; context: tokens each has.
        """
        for name, value in (("batch", batch), ("context", context)):
            if type(value) is not int or value < 0:
                fail(name, "an integer of at least 0", repr(value))
        attended = min(context, self.topk) if self.topk else context
        fixed, request, attend, index = (self._number(key) for key in STEP)
        indexed = context if self.topk else 0
        return fixed + batch * (request + attend * attended + index * indexed)

    def assumed(self) -> tuple[str, ...]:
        """The figures that are assumed."""
        return tuple(key for key, figure in self.figures.items() if figure.basis == "assumed")

    # -- where it comes from

    @classmethod
    def named(cls, name: str) -> ModelProfile:
        """A model that ships."""
        if name not in MODEL_PROFILES:
            fail("model", "one of " + ", ".join(MODEL_PROFILES), repr(name))
        return cls.load(Path(__file__).with_name(MODEL_PROFILES[name]))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ModelProfile:
        """Read a TOML file; see the module for its form."""
        try:
            data = tomllib.loads(_read_text(path))
        except tomllib.TOMLDecodeError as error:
            fail("model", "a TOML file", f"{os.fspath(path)}: {error}")
        name, note = data.pop("name", None), data.pop("note", "")
        figures: dict[str, ModelFigure] = {}
        for key, entry in data.items():
            if not isinstance(entry, dict) or set(entry) != {"value", "basis", "source"}:
                fail(key, "a table of value, basis and source", repr(entry))
            value = entry["value"]
            if isinstance(value, list):
                value = tuple(value)
            figures[key] = ModelFigure(value, entry["basis"], entry["source"])
        return cls(name, figures, str(note))

    @classmethod
    def from_config(cls, path: str | os.PathLike[str]) -> ModelProfile:
        """Read a Hugging Face config.json (a ``text_config`` inside it, where there is one)."""
        try:
            config = json.loads(_read_text(path))
        except (json.JSONDecodeError, RecursionError) as error:
            fail("model", "a JSON file", f"{os.fspath(path)}: {error}")
        return _from_config(os.fspath(path), config)


def _read_text(path: str | os.PathLike[str]) -> str:
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            fail("model", f"a file of at most {MAX_FILE_BYTES} bytes", os.fspath(path))
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        fail("model", "a readable text file", f"{os.fspath(path)}: {error}")


def _check_figure(key: str, figure: ModelFigure) -> None:
    what, low, high = MODEL_FIGURES[key]
    value = figure.value
    if key == "dtype":
        if not isinstance(value, str):
            fail(key, "the name of a type", repr(value))
    elif key == "index_layers":
        if not isinstance(value, tuple) or any(type(x) is not int or x < 0 for x in value):
            fail(key, "a list of layers", repr(value))
        if any(a >= b for a, b in pairwise(value)):
            fail(key, "layers in ascending order", repr(value))
    else:
        number = isinstance(value, int | float) if key in REAL else isinstance(value, int)
        if not number or isinstance(value, bool) or not low <= value <= high:  # type: ignore[operator]
            fail(key, f"{what}: a number from {low:g} to {high:g}", repr(value))
    if figure.basis not in BASES:
        fail(f"{key}.basis", "one of " + ", ".join(BASES), repr(figure.basis))
    if not isinstance(figure.source, str) or not figure.source:
        fail(f"{key}.source", "where the figure comes from", repr(figure.source))


# -- config.json --------------------------------------------------------------------------

_CONFIG_DTYPES = ("bfloat16", "float16", "float32")


class _Config:
    """Fields of a config.json, each read with its name for the error and the source."""

    def __init__(self, path: str, data: dict[str, Any]) -> None:
        self.path, self.data = path, data

    def refuse(self, field: str, expected: str, seen: object) -> NoReturn:
        fail(f"{self.path}: {field}", expected, seen)

    def number(self, field: str, default: int | None = None) -> int:
        value = self.data.get(field, default)
        if value is None:
            value = default
        if type(value) is not int or not 0 <= value < 2**31:
            self.refuse(field, "a number", repr(self.data.get(field)))
        return value

    def figure(self, value: Any, fields: str) -> ModelFigure:
        return ModelFigure(value, "published", f"{self.path}: {fields}")


def _from_config(path: str, data: Any) -> ModelProfile:
    if isinstance(data, dict) and isinstance(data.get("text_config"), dict):
        data = data["text_config"]
    if not isinstance(data, dict):
        fail("model", "a config.json", f"{path}: {type(data).__name__}")
    config = _Config(path, data)
    layers = _cached_layers(config)
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
    if dtype not in _CONFIG_DTYPES:
        config.refuse("dtype", "one of " + ", ".join(_CONFIG_DTYPES), repr(dtype))
    topk = config.number("index_topk", 0)
    index_layers = _index_layers(config, layers) if topk else ()
    # One key of the indexer a token, in the model's type.
    index_bytes = config.number("index_head_dim", 0) * (4 if dtype == "float32" else 2)
    figures = {
        "layers": config.figure(layers, "num_hidden_layers, layer_types"),
        "draft_layers": config.figure(
            config.number("num_nextn_predict_layers", 0), "num_nextn_predict_layers"
        ),
        "dtype": config.figure(dtype, "dtype; a cache of another type is the server's choice"),
        "topk": config.figure(topk, "index_topk"),
        "index_layers": config.figure(index_layers, "indexer_types, index_topk_freq"),
        "index_bytes": config.figure(index_bytes, "index_head_dim"),
    }
    for key, size in zip(("heads", "head_size", "value_head_size"), sizes, strict=True):
        figures[key] = config.figure(size, fields)
    name = data.get("model_type")
    return ModelProfile(name if isinstance(name, str) and name else Path(path).stem, figures)


def _cached_layers(config: _Config) -> int:
    layers = config.number("num_hidden_layers")
    types = config.data.get("layer_types")
    if types is None:
        return layers
    if not isinstance(types, list) or len(types) != layers:
        config.refuse("layer_types", f"{layers} names", repr(types)[:60])
    other = [t for t in types if t not in ("full_attention", "linear_attention")]
    if other:
        # A window's cache does not grow with the context: no figure here says so.
        config.refuse("layer_types", "full_attention or linear_attention", repr(other[0]))
    return types.count("full_attention")


def _index_layers(config: _Config, layers: int) -> tuple[int, ...]:
    types = config.data.get("indexer_types")
    if types is None:
        every = max(config.number("index_topk_freq", 1), 1)
        first = config.number("index_skip_topk_offset", 1)
        # The first ones choose, each for itself; from the last of them on, every so many.
        return tuple(n for n in range(layers) if n < first or (n - first + 1) % every == 0)
    if not isinstance(types, list) or len(types) != layers or set(types) - {"full", "shared"}:
        config.refuse("indexer_types", f"{layers} times full or shared", repr(types)[:60])
    return tuple(n for n, kind in enumerate(types) if kind == "full")
