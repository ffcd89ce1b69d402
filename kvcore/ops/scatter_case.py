# SPDX-License-Identifier: Apache-2.0
"""The arguments of ScatterPaKvCache, and what a call of it amounts to."""

from __future__ import annotations

from dataclasses import dataclass

from kvcore._core.arrays import ArrayInfo
from kvcore.dtypes import DType

__all__ = ["ARGUMENTS", "Infos", "ScatterCase"]

ARGUMENTS = (
    "key",
    "key_cache",
    "slot_mapping",
    "value",
    "value_cache",
    "compress_lens",
    "compress_seq_offset",
    "seq_lens",
)
(
    KEY,
    KEY_CACHE,
    SLOT_MAPPING,
    VALUE,
    VALUE_CACHE,
    COMPRESS_LENS,
    COMPRESS_SEQ_OFFSET,
    SEQ_LENS,
) = range(8)
Infos = tuple[ArrayInfo | None, ...]


@dataclass(frozen=True, slots=True)
class ScatterCase:
    """What a call's shapes, dtypes and modes amount to, every rule about them checked.

    number: scenario 1 to 7. rule: "rows", "Nct", "Alibi", "Rope" or "Omni".
    tokens: T (scenario 3: B * S). Sizes count stored items (float4: pairs).
    """

    number: int
    rule: str
    cache_mode: str
    scatter_mode: str
    infos: Infos
    key_only: bool
    tokens: int
    heads: int
    head_size: int
    value_head_size: int
    blocks: int
    block_size: int
    dtype: DType
    value_dtype: DType
    index_dtype: DType
    strides: tuple[int, ...]
    offsets: tuple[int, ...]

    def nct_items(self, lane: int) -> int:
        """Items from a lane's first one to the end of its last token in Nct; 0 without tokens."""
        if self.tokens == 0:
            return 0
        size = self.value_head_size if lane else self.head_size
        before = (self.tokens - 1) * self.strides[lane] + self.offsets[lane]
        return before + self.heads * size

    def lanes(self) -> list[tuple[int, int, int]]:
        """(source argument, cache argument, head size) per lane."""
        both = [
            (KEY, KEY_CACHE, self.head_size),
            (VALUE, VALUE_CACHE, self.value_head_size),
        ]
        return both[:1] if self.key_only else both
