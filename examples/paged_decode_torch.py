# SPDX-License-Identifier: Apache-2.0
"""Decode in torch from paged caches, and from a dense one: logits equal to the bit.

The attention of a tiny transformer knows a cache by two operators of torch.ops.kvcore.  What paged
caches hold is read back into tensors of the dense cache's shape, so that both attentions sum the
same numbers in the same order.  Blocks start as NaN: a row that nobody wrote would show.

    python examples/paged_decode_torch.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import kvcore.torch  # noqa: F401 - registers torch.ops.kvcore

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, SIZE = 61, 48, 2, 4, 2, 16
BLOCK_SIZE, NUM_BLOCKS, MAX_LENGTH = 4, 18, 24
PROMPTS, NEW_TOKENS = (5, 12, 1), 10
LAYOUTS = {
    "Norm": (NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, SIZE),
    "PA_NZ": (NUM_BLOCKS, KV_HEADS * SIZE // 8, BLOCK_SIZE, 8),  # 8 float32 are 32 bytes
    "NHSD": (NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, SIZE),
}


class DenseCache:
    """One layer's keys and values, [sequence, position, head, element]."""

    def __init__(self) -> None:
        shape = (len(PROMPTS), MAX_LENGTH, KV_HEADS, SIZE)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)

    def write(self, sequences: Tensor, positions: Tensor, key: Tensor, value: Tensor) -> None:
        self.keys[sequences, positions] = key
        self.values[sequences, positions] = value

    def read(self, sequences: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, MAX_LENGTH, KV_HEADS, SIZE], 0 past each row's length."""
        beyond = (torch.arange(MAX_LENGTH) >= lengths[:, None])[..., None, None]
        keys, values = self.keys[sequences], self.values[sequences]
        return keys.masked_fill(beyond, 0), values.masked_fill(beyond, 0)


class PagedCache:
    """One layer's blocks; the table of blocks is the same for all layers."""

    def __init__(self, layout: str, tables: Tensor) -> None:
        self.layout, self.tables = layout, tables
        self.keys, self.values = (torch.full(LAYOUTS[layout], torch.nan) for _ in range(2))

    def write(self, sequences: Tensor, positions: Tensor, key: Tensor, value: Tensor) -> None:
        blocks = self.tables[sequences, positions // BLOCK_SIZE]
        torch.ops.kvcore.scatter_pa_kv_cache(
            key,
            self.keys,
            blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
            value,
            self.values,
            cache_mode="PA_NZ" if self.layout == "PA_NZ" else "Norm",
            scatter_mode="NHSD" if self.layout == "NHSD" else "None",
        )

    def read(self, sequences: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """As DenseCache.read."""
        tokens = int(lengths.sum())
        axes = (KV_HEADS * SIZE,) if self.layout == "PA_NZ" else (KV_HEADS, SIZE)
        key, value = (torch.empty(tokens, *axes) for _ in range(2))
        torch.ops.kvcore.gather_pa_kv_cache(
            self.keys,
            self.values,
            self.tables[sequences],
            lengths,
            key,
            value,
            cache_mode=self.layout,
        )
        within = torch.arange(MAX_LENGTH) < lengths[:, None]
        keys, values = torch.zeros(2, len(lengths), MAX_LENGTH, KV_HEADS, SIZE)
        keys[within] = key.view(-1, KV_HEADS, SIZE)
        values[within] = value.view(-1, KV_HEADS, SIZE)
        return keys, values


class Block(nn.Module):
    """Grouped-query attention and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.project = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * SIZE)
        self.out = nn.Linear(HEADS * SIZE, HIDDEN)
        self.feed = nn.Sequential(nn.Linear(HIDDEN, 96), nn.GELU(), nn.Linear(96, HIDDEN))

    def forward(self, x: Tensor, cache, sequences: Tensor, positions: Tensor) -> Tensor:
        heads = self.project(self.before(x)).view(len(x), -1, SIZE)
        query, key, value = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)  # views with gaps
        cache.write(sequences, positions, key, value)
        keys, values = cache.read(sequences, positions + 1)
        within = torch.arange(MAX_LENGTH) <= positions[:, None]
        seen = scaled_dot_product_attention(
            query[:, :, None],
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=within[:, None, None],
            enable_gqa=True,
        )
        x = x + self.out(seen.reshape(len(x), -1))
        return x + self.feed(self.between(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(MAX_LENGTH, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor, caches, sequences: Tensor, positions: Tensor) -> Tensor:
        """Logits [rows, VOCAB] of one token a row; every row sees its sequence up to itself."""
        x = self.embedding(tokens) + self.place(positions)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache, sequences, positions)
        return self.head(x)


@torch.inference_mode()
def serve(model: Transformer, caches) -> list[Tensor]:
    """Prefill the prompts in one step, then decode greedily; the logits of each step."""
    lengths = torch.tensor(PROMPTS)
    sequences = torch.arange(len(PROMPTS)).repeat_interleave(lengths)
    positions = torch.cat([torch.arange(length) for length in PROMPTS])
    tokens = torch.randint(VOCAB, (len(positions),), generator=torch.Generator().manual_seed(1))
    steps = [model(tokens, caches, sequences, positions)]
    newest = steps[0][lengths.cumsum(0) - 1]
    for _ in range(NEW_TOKENS):
        sequences, positions = torch.arange(len(PROMPTS)), lengths
        newest = model(newest.argmax(1), caches, sequences, positions)
        steps.append(newest)
        lengths = lengths + 1
    return steps


def main() -> None:
    torch.manual_seed(0)
    model = Transformer()
    dense = serve(model, [DenseCache() for _ in range(LAYERS)])
    tables = torch.randperm(NUM_BLOCKS).view(len(PROMPTS), -1)
    for layout in LAYOUTS:
        paged = serve(model, [PagedCache(layout, tables) for _ in range(LAYERS)])
        for seen, want in zip(paged, dense, strict=True):
            assert torch.equal(seen.view(torch.int32), want.view(torch.int32))
        print(f"{layout}: prefill and {NEW_TOKENS} decode steps, logits equal to the bit")


if __name__ == "__main__":
    main()
