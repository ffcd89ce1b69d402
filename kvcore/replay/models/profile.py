# SPDX-License-Identifier: Apache-2.0
"""Models as data: a token's cache entry, which layers choose the top-k, how long a step computes.

A profile is a set of figures, each with its basis and its source.  The basis is ``measured`` (by
whom and how), ``published`` (it stands in the source), ``fitted`` (computed from the source's rows;
the source says from how many, and with what residual) or ``assumed``.

Those that ship are TOML files in this folder; one's own has the same form::

    name = "my model"
    device = "A3"           # whose step the figures describe; left out: no hardware's

    [layers]
    value = 61
    basis = "published"
    source = "config.json: num_hidden_layers"

The figures of a step may be missing: asking for its time is then an error that names them.
"""

from __future__ import annotations

import os
import reprlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvcore import dtypes
from kvcore.errors import fail, in_words, shown
from kvcore.offload.checks import check_choice, check_integer, check_path
from kvcore.replay.options import MAX_HEAD_SIZE, MAX_HEADS, MAX_LAYERS

__all__ = [
    "BASES",
    "DTYPE_NAMES",
    "MODELS",
    "MODEL_FIGURES",
    "REAL",
    "STEP",
    "ModelFigure",
    "ModelProfile",
    "ModelShape",
]

BASES = ("measured", "published", "fitted", "assumed")
MAX_FILE_BYTES = 16 * 2**20

DTYPE_NAMES: tuple[str, ...] = tuple(t.name for t in dtypes.DATA_DTYPES)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The cache entry of one token.

    num_layers:      layers, each with caches of its own.
    num_heads:       key-value heads.
    head_size:       elements of a key head.
    value_head_size: elements of a value head; 0 when there is no value lane.
    dtype:           name of the element type, as in ``kvcore.dtypes``.
    """

    name: str
    num_layers: int
    num_heads: int
    head_size: int
    value_head_size: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for field, low, high in (
            ("num_layers", 1, MAX_LAYERS),
            ("num_heads", 1, MAX_HEADS),
            ("head_size", 1, MAX_HEAD_SIZE),
            ("value_head_size", 0, MAX_HEAD_SIZE),
        ):
            check_integer(field, getattr(self, field), low, high)
        check_choice("dtype", self.dtype, DTYPE_NAMES)
        for field in ("head_size", "value_head_size"):
            if dtypes.get(self.dtype).packed and getattr(self, field) % 2:
                fail(field, f"an even number for {self.dtype}", getattr(self, field))

    @property
    def raw(self) -> str:
        """numpy name of the unsigned array that carries the elements' bits."""
        return dtypes.get(self.dtype).raw

    @property
    def stored_head_sizes(self) -> tuple[int, int]:
        """Stored items of a key head and of a value head (float4: two elements an item)."""
        pair = 2 if dtypes.get(self.dtype).packed else 1
        return self.head_size // pair, self.value_head_size // pair

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of one token in one layer: key lane, value lane."""
        item = dtypes.get(self.dtype).itemsize
        key, value = self.stored_head_sizes
        return self.num_heads * key * item, self.num_heads * value * item

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers and both lanes."""
        return self.num_layers * sum(self.row_bytes)


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
    "step_drafts": ("draft tokens of a request in the step that the figures below are of", 0, 1023),
    "step_fixed": ("us a step, whatever the batch", 0, 1e9),
    "step_request": ("us a request in the batch", 0, 1e9),
    "step_attended": ("us a token attended to, of each request", 0, 1e6),
    "step_indexed": ("us a token of context an indexer scores, of each request", 0, 1e6),
    "prefill_token": ("us a token of a prompt that is computed", 0, 1e9),
    "prefill_attended": ("us a token of a prompt, for each token before it", 0, 1e6),
    "weights": ("GiB of weights and activations on one device", 0, 1e6),
}
STEP = ("step_fixed", "step_request", "step_attended", "step_indexed")
#: Figures of prompts, for dense models alone; other models take a rate of tokens a second.
PREFILL = ("prefill_token", "prefill_attended")
REAL = frozenset((*STEP, *PREFILL, "weights"))  # may be missing, and need not be whole numbers

#: Models that ship, by name, and their files in this folder.
MODELS: dict[str, str] = {
    name: name.replace(".", "_").replace("-", "_") + ".toml"
    for name in (
        "tiny", "tiny-sparse", "llama-3-8b", "llama-3-70b", "qwen2.5-7b", "qwen3-8b", "qwen3-14b",
        "qwen3-32b", "deepseek-v3.2", "deepseek-v3.2-c8", "glm-5.2",
    )
}  # fmt: skip


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
    note:    what the step's figures stand for (how many devices, which parallel set-up).
    device:  the name of the device whose step they are; "" for figures of no hardware.

    Raises ParamInvalidError naming the figure.
    """

    name: str
    note: str
    device: str

    def __init__(
        self, name: str, figures: Mapping[str, ModelFigure], note: str = "", device: str = ""
    ) -> None:
        if not isinstance(name, str) or not name:
            fail("name", "the model's name", shown(name))
        if not isinstance(device, str):
            fail("device", "the name of the device whose step the figures are of", shown(device))
        self.name, self.note, self.device = name, note, device
        if not isinstance(figures, Mapping) or not all(isinstance(key, str) for key in figures):
            fail("figures", "figures by name", type(figures).__name__)
        unknown = sorted(set(figures) - set(MODEL_FIGURES))
        if unknown:
            fail(unknown[0], "one of " + ", ".join(MODEL_FIGURES), "an unknown figure")
        missing = [key for key in MODEL_FIGURES if key not in figures and key not in REAL]
        if missing:
            # One message names all of them, so that the author of the file need not try again.
            too = f"; {', '.join(missing[1:])} are missing too" if missing[1:] else ""
            fail(missing[0], f"a figure: {MODEL_FIGURES[missing[0]][0]}", f"nothing{too}")
        for key, figure in figures.items():
            _check_figure(key, figure)
        self.figures: dict[str, ModelFigure] = {
            key: figures[key] for key in MODEL_FIGURES if key in figures
        }
        for layer in self.index_layers:
            if layer >= self.layers:
                fail("index_layers", f"layers below {self.layers}", layer)
        if self.topk and (not self.index_layers or self.index_layers[0] != 0):
            fail("index_layers", "layer 0 among those that choose", self.index_layers)
        if not self.topk and self.index_layers:
            fail("index_layers", "none where topk is 0", self.index_layers)
        # ModelShape checks the sizes against one another.
        self.shape: ModelShape = ModelShape(
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
            # A step needs all of these figures, so one message names all that are missing.
            others = [name for name in STEP if name != key and name not in self.figures]
            too = f", with {', '.join(others)}, which are missing too" if others else ""
            fail(key, expected, f"nothing; give it in a TOML profile{too}")
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
    def row_bytes(self) -> int:
        """Bytes of a token in one layer, both lanes."""
        return sum(self.shape.row_bytes)

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
        """For each layer that chooses a top-k, the layers that use its choice: itself first."""
        ends = (*self.index_layers[1:], self.layers)
        return tuple(tuple(range(a, b)) for a, b in zip(self.index_layers, ends, strict=False))

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers, drafts' included."""
        return self.row_bytes * (self.layers + self.draft_layers)

    @property
    def token_index_bytes(self) -> int:
        """Bytes of a token in the caches of the indexers, which stay on the device."""
        return int(self._number("index_bytes")) * len(self.index_layers)

    @property
    def weights_gib(self) -> float | None:
        """GiB of weights and activations on one device; None: the profile does not say."""
        return self._number("weights") if "weights" in self.figures else None

    # -- how long a step computes

    def step_us(self, batch: int, context: int, drafts: int | None = None) -> float:
        """Microseconds of one decode step, transfers not counted.

        batch:   requests on the device; context: tokens each has.
        drafts:  draft tokens each makes; the parts of a request grow with its tokens.  None: as
                 many as the figures are of.
        Raises ParamInvalidError naming a figure that is missing.
        """
        check_integer("batch", batch, 0)
        return self.step_fixed_us() + batch * self.request_us(context, drafts)

    def step_fixed_us(self) -> float:
        """The part of a step that does not depend on the batch."""
        return self._number("step_fixed")

    def request_us(self, context: int, drafts: int | None = None) -> float:
        """The part of one request with ``context`` tokens."""
        check_integer("context", context, 0)
        if drafts is not None:
            check_integer("drafts", drafts, 0)
        attended = min(context, self.topk) if self.topk else context
        _, request, attend, index = (self._number(key) for key in STEP)
        us = request + attend * attended + index * (context if self.topk else 0)
        measured = int(self._number("step_drafts"))
        return us if drafts is None else us * (1 + drafts) / (1 + measured)

    def assumed(self) -> tuple[str, ...]:
        """The figures that are assumed."""
        return tuple(key for key, figure in self.figures.items() if figure.basis == "assumed")

    def replace(
        self, *, basis: str = "assumed", source: str = "given by the caller", **values: Any
    ) -> ModelProfile:
        """The same model with other values, all of one basis and source."""
        figures = dict(self.figures)
        for key, value in values.items():
            figures[key] = ModelFigure(value, basis, source)
        return ModelProfile(self.name, figures, self.note, self.device)

    # -- where it comes from

    @classmethod
    def named(cls, name: str) -> ModelProfile:
        """A model that ships."""
        check_choice("model", name, MODELS)
        return cls.load(Path(__file__).with_name(MODELS[name]))

    @classmethod
    def find(cls, name: str) -> ModelProfile:
        """A model that ships, or a TOML file, a config.json or its folder by the path."""
        name = check_path("model", name)
        if name in MODELS:
            return cls.named(name)
        if name.endswith(".toml"):
            return cls.load(name)
        if name.endswith(".json"):
            return cls.from_config(name)
        if Path(name).is_dir():
            inside = Path(name) / "config.json"
            if not inside.is_file():
                fail("model", "a folder with a config.json", repr(name))
            return cls.from_config(inside)
        known = ", ".join(MODELS)
        expected = f"one of {known}, or a .toml or .json file, or a folder with a config.json"
        fail("model", expected, repr(name))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ModelProfile:
        """Read a TOML file; see the module for its form."""
        text = read_text(path)
        try:
            data = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # integers of thousands of digits too
            fail("model", "a TOML file", f"{os.fspath(path)}: {error}")
        name, note = data.pop("name", None), data.pop("note", "")
        device = data.pop("device", "")
        figures: dict[str, ModelFigure] = {}
        for key, entry in data.items():
            if not isinstance(entry, dict) or set(entry) != {"value", "basis", "source"}:
                fail(key, "a table of value, basis and source", reprlib.repr(entry))
            value = entry["value"]
            if isinstance(value, list):
                value = tuple(value)
            figures[key] = ModelFigure(value, entry["basis"], entry["source"])
        return cls(name, figures, in_words(note), device)

    @classmethod
    def from_config(cls, path: str | os.PathLike[str]) -> ModelProfile:
        """Read a Hugging Face config.json (a ``text_config`` inside it, where there is one)."""
        from kvcore.replay.models.config import read_config

        return read_config(path)


def read_text(path: str | os.PathLike[str], what: str = "model") -> str:
    """The text of a file of figures.  Raises ParamInvalidError for an argument named ``what``."""
    path = check_path(what, path)
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            fail(what, f"a file of at most {MAX_FILE_BYTES} bytes", os.fspath(path))
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        fail(what, "a readable text file", f"{os.fspath(path)}: {error}")


def _check_figure(key: str, figure: ModelFigure) -> None:
    if not isinstance(figure, ModelFigure):
        fail(key, "a ModelFigure", type(figure).__name__)
    what, low, high = MODEL_FIGURES[key]
    value = figure.value
    if key == "dtype":
        if not isinstance(value, str):
            fail(key, "the name of a type", shown(value))
    elif key == "index_layers":
        if not isinstance(value, tuple) or any(type(x) is not int or x < 0 for x in value):
            fail(key, "a list of layers", shown(value))
        if any(a >= b for a, b in pairwise(value)):
            fail(key, "layers in ascending order", shown(value))
    else:
        number = isinstance(value, int | float) if key in REAL else isinstance(value, int)
        if not number or isinstance(value, bool) or not low <= value <= high:  # type: ignore[operator]
            fail(key, f"{what}: a number from {low:g} to {high:g}", shown(value))
    check_choice(f"{key}.basis", figure.basis, BASES)
    if not isinstance(figure.source, str) or not figure.source:
        fail(f"{key}.source", "where the figure comes from", shown(figure.source))
