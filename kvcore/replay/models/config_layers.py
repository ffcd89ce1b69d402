# SPDX-License-Identifier: Apache-2.0
"""Which layers of a config.json keep every token, and which of them choose the top-k.

A profile's figures describe layers whose cache grows with the context.  Layers with linear
attention keep no cache and are left out.  Layers that keep a window or a chunk are refused,
however the file says so; a file that mentions a window which no layer uses loads.

Source: huggingface/transformers, src/transformers/models/*/configuration_*.py at 008e574:

- ``layer_types`` names each layer's attention.  Where it is missing, the model's type decides:
- mistral: ``sliding_window`` (4096 when missing, none when null) in every layer, and
  ``layer_types`` is not read; mixtral, phi3 and starcoder2 the same, none when missing;
- qwen2, qwen3 and their kin: ``sliding_window`` counts only with ``use_sliding_window`` (false
  when missing), from layer ``max_window_layers`` (28 when missing) on;
- gemma2 and gpt_oss: every other layer; gemma3 and cohere2: all but each
  ``sliding_window_pattern``-th (6 and 4 when missing);
- llama4_text: chunks of ``attention_chunk_size`` (8192 when missing, none when null) in layers
  whose ``no_rope_layers`` is not 0 (when missing all but each ``no_rope_layer_interval``-th);
- qwen3_next: linear attention in all but each ``full_attention_interval``-th (4 when missing);
- glm_moe_dsa: ``indexer_types``, else ``index_topk_pattern`` of F and S, else layer i chooses when
  ``max(i - index_skip_topk_offset + 1, 0) % index_topk_freq == 0`` (offset 2 and frequency 1 when
  missing).  vllm/model_executor/models/deepseek_v2.py reads the last two alike for every model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcore.replay.options import MAX_LAYERS

if TYPE_CHECKING:
    from kvcore.replay.models.config import Config

__all__ = ["cached_layers", "index_layers"]

#: Of ``layer_types``: whether the layer has a cache.
LAYER_TYPES = {
    "full_attention": True,
    "attention": True,
    "deepseek_sparse_attention": True,  # all tokens are kept, the top-k of them read
    "linear_attention": False,
}
#: Types of models with one window for all layers, which do not read ``layer_types``.
UNIFORM = ("mistral", "mixtral", "phi3", "starcoder2")
#: ``sliding_window`` where the file has none; 0: no window.
WINDOWS = {"mistral": 4096, "gemma2": 4096, "gemma3": 4096, "gemma3_text": 4096, "cohere2": 4096,
           "gemma3n": 512, "gemma3n_text": 512, "gpt_oss": 128}  # fmt: skip
#: ``sliding_window_pattern`` where the file has none: each so many-th layer keeps every token.
PATTERNS = {"gemma2": 2, "gpt_oss": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
INTERVALS = {"qwen3_next": 4}
#: Other ways to say that some layers do not keep every token, or have no cache of their own.
OTHERS = (
    "interleaved_sliding_window", "attention_types", "attn_layer_period", "layers_block_type",
    "hybrid_override_pattern", "hybrid_layer_pattern", "block_types", "linear_attn_config",
    "attn_type_list", "compress_ratios", "num_kv_shared_layers",
)  # fmt: skip
KEEPS_ALL = "layers that keep every token"


def cached_layers(config: Config) -> int:
    """How many layers have a cache, all of which keep every token.

    Raises ParamInvalidError naming the file and the field.
    """
    layers = config.number("num_hidden_layers")
    # (before a list of them is made)
    if not 1 <= layers <= MAX_LAYERS:
        config.refuse("num_hidden_layers", f"layers from 1 to {MAX_LAYERS}", layers)
    for field in OTHERS:
        if config.data.get(field):
            config.refuse(field, f"null: only {KEEPS_ALL} can be modelled", config.shown(field))
    types = config.data.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            config.refuse("layer_types", f"{layers} names", config.shown("layer_types"))
        for name in types:
            if not isinstance(name, str) or name not in LAYER_TYPES:
                # A window's cache does not grow with the context: no figure here says so.
                config.refuse("layer_types", " or ".join(LAYER_TYPES), repr(name)[:60])
    kind = config.data.get("model_type")
    if types is None or kind in UNIFORM:
        windowed = _windowed(config, kind, layers)
        if windowed is not None:
            field, size, count = windowed
            seen = f"{size} in {count} of {layers} layers"
            config.refuse(field, f"no window or chunk, or {KEEPS_ALL}", seen)
    if types is not None:
        return sum(LAYER_TYPES[name] for name in types)
    interval = config.number("full_attention_interval", INTERVALS.get(str(kind), 1))
    if interval < 1:
        config.refuse("full_attention_interval", "at least 1", interval)
    return layers // interval


def _windowed(config: Config, kind: Any, layers: int) -> tuple[str, int, int] | None:
    """(field, window or chunk, layers that have it), or None when no layer has one."""
    chunk = _size(config, "attention_chunk_size", 8192 if kind == "llama4_text" else 0)
    if chunk:
        count = _chunked(config, kind, layers)
        if count:
            return "attention_chunk_size", chunk, count
    qwen = str(kind).startswith("qwen")
    window = _size(config, "sliding_window", 4096 if qwen else WINDOWS.get(str(kind), 0))
    used = config.flag("use_sliding_window", not qwen)
    if not window or not used:
        return None
    # A file without a pattern: from max_window_layers on where it is read at all, else everywhere.
    if "max_window_layers" in config.data or qwen:
        count = layers - min(config.number("max_window_layers", 28), layers)
        return ("sliding_window", window, count) if count else None
    for field in ("sliding_window_pattern", "_sliding_window_pattern"):
        pattern = config.data.get(field)
        if isinstance(pattern, str):  # L for local, G for global, from the first layer on again
            count = sum(pattern[i % len(pattern)] == "L" for i in range(layers)) if pattern else 0
            return ("sliding_window", window, count) if count else None
        if pattern is not None:
            every = config.number(field)
            break
    else:
        every = 0 if kind in UNIFORM else PATTERNS.get(str(kind), 0)
    count = layers - (layers // every if every else 0)
    return ("sliding_window", window, count) if count else None


def _chunked(config: Config, kind: Any, layers: int) -> int:
    given = config.data.get("no_rope_layers")
    if kind != "llama4_text":
        return layers
    if given:
        if not isinstance(given, list) or len(given) < layers:
            config.refuse("no_rope_layers", f"{layers} of 0 or 1", config.shown("no_rope_layers"))
        return sum(bool(one) for one in given[:layers])
    every = config.number("no_rope_layer_interval", 4)
    if every < 1:
        config.refuse("no_rope_layer_interval", "at least 1", every)
    return layers - layers // every


def _size(config: Config, field: str, missing: int) -> int:
    """A window's or a chunk's tokens; 0 when the file has null, ``missing`` when it has nothing."""
    if field in config.data and config.data[field] is None:
        return 0
    return config.number(field, missing)


def index_layers(config: Config, layers: int) -> tuple[int, ...]:
    """The layers that choose the top-k, ascending; the others use the choice before them.

    Raises ParamInvalidError naming the file and the field.
    """
    types = config.data.get("indexer_types")
    pattern = config.data.get("index_topk_pattern")
    if types is not None:
        return _choosing(config, "indexer_types", types, layers)
    if isinstance(pattern, str):
        names = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
        return _choosing(config, "index_topk_pattern", names, layers)
    if pattern is not None:
        return _choosing(config, "index_topk_pattern", pattern, layers)
    every = max(config.number("index_topk_freq", 1), 1)
    offset = config.number("index_skip_topk_offset", 2)
    return tuple(n for n in range(layers) if max(n - offset + 1, 0) % every == 0)


def _choosing(config: Config, field: str, types: Any, layers: int) -> tuple[int, ...]:
    # (those behind num_hidden_layers are of layers that make drafts)
    if not isinstance(types, list) or len(types) < layers:
        config.refuse(field, f"{layers} times full or shared", config.shown(field))
    for n, name in enumerate(types[:layers]):
        if name not in ("full", "shared"):
            letters = " (or F or S)" if field == "index_topk_pattern" else ""
            config.refuse(f"{field}[{n}]", f"full or shared{letters}", repr(name)[:60])
    return tuple(n for n, name in enumerate(types[:layers]) if name == "full")
