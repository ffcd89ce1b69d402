# SPDX-License-Identifier: Apache-2.0
"""What a model keeps per token, as data.

The figures are those of the models' published ``config.json``: ``num_hidden_layers``,
``num_key_value_heads`` and ``head_dim``; for latent attention (MLA) the two lanes are
``kv_lora_rank`` (512) and ``qk_rope_head_dim`` (64) of one head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvcore import dtypes
from kvcore.errors import fail
from kvcore.offload.checks import check_integer

__all__ = ["DTYPE_NAMES", "MODELS", "ModelShape", "model_shape"]

DTYPE_NAMES: tuple[str, ...] = tuple(t.name for t in dtypes.DATA_DTYPES)

MAX_LAYERS = 4096
MAX_HEADS = 65_536
MAX_HEAD_SIZE = 65_536


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
        if self.dtype not in DTYPE_NAMES:
            fail("dtype", f"one of {', '.join(DTYPE_NAMES)}", repr(self.dtype))
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


#: Models by name.  ``tiny`` is nobody's: two layers of a kibibyte a token, for quick runs.
MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("tiny", 2, 2, 64, 64),
        ModelShape("llama-3-8b", 32, 8, 128, 128),
        ModelShape("llama-3-70b", 80, 8, 128, 128),
        ModelShape("qwen2.5-7b", 28, 4, 128, 128),
        ModelShape("qwen3-8b", 36, 8, 128, 128),
        ModelShape("qwen3-32b", 64, 8, 128, 128),
        ModelShape("deepseek-mla", 61, 1, 512, 64),  # DeepSeek-V3, -R1 and -V3.2
    )
}


def model_shape(name: str, **changes: Any) -> ModelShape:
    """The named model with some of its figures replaced; None leaves a figure as it is."""
    if name not in MODELS:
        fail("model", f"one of {', '.join(MODELS)}", repr(name))
    given = {field: value for field, value in changes.items() if value is not None}
    if not given:
        return MODELS[name]
    return replace(MODELS[name], name=f"{name}, changed", **given)
