# SPDX-License-Identifier: Apache-2.0
"""Serve a tiny transformer from paged caches, and from a dense one: equal to the bit.

Requests of different lengths are prefilled and decoded together; a finished one gives its blocks
to the next.  What the paged caches hold is read back into arrays of the dense cache's shape, so
that both attentions sum the same numbers in the same order.  Blocks start as NaN: a row that
nobody wrote, read by mistake, would show.

    python examples/paged_decode_numpy.py
"""

from __future__ import annotations

import numpy as np

import kvcore

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, SIZE = 61, 48, 2, 4, 2, 16
BLOCK_SIZE, NUM_BLOCKS, MAX_LENGTH = 4, 15, 24
PROMPTS, NEW_TOKENS, BATCH = (5, 12, 1, 8, 3), 7, 3
LAYOUTS = {
    "Norm": (NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, SIZE),
    "PA_NZ": (NUM_BLOCKS, KV_HEADS * SIZE // 8, BLOCK_SIZE, 8),  # 8 float32 are 32 bytes
    "NHSD": (NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, SIZE),
}


class DenseCache:
    """[sequence, position, head, element] for each layer."""

    def __init__(self) -> None:
        shape = (LAYERS, len(PROMPTS), MAX_LENGTH, KV_HEADS, SIZE)
        self.keys, self.values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)

    def grow(self, sequence: int, length: int) -> None:
        pass

    def release(self, sequence: int) -> None:
        pass

    def write(self, layer: int, sequences, positions, key, value) -> None:
        self.keys[layer, sequences, positions] = key
        self.values[layer, sequences, positions] = value

    def read(self, layer: int, sequences, lengths):
        """Keys and values [rows, MAX_LENGTH, KV_HEADS, SIZE], 0 past each row's length."""
        beyond = np.arange(MAX_LENGTH) >= lengths[:, None]
        both = self.keys[layer, sequences], self.values[layer, sequences]
        for rows in both:
            rows[beyond] = 0
        return both


class PagedCache:
    """Blocks, and a table of them for each sequence."""

    def __init__(self, layout: str, seed: int = 0) -> None:
        shape = (LAYERS, *LAYOUTS[layout])
        self.layout = layout
        self.keys = np.full(shape, np.nan, np.float32)
        self.values = np.full(shape, np.nan, np.float32)
        self.free = np.random.default_rng(seed).permutation(NUM_BLOCKS).tolist()
        self.owned: dict[int, list[int]] = {}
        self.tables = np.zeros((len(PROMPTS), MAX_LENGTH // BLOCK_SIZE), np.int64)

    def grow(self, sequence: int, length: int) -> None:
        owned = self.owned.setdefault(sequence, [])
        while len(owned) * BLOCK_SIZE < length:
            owned.append(self.free.pop())
            self.tables[sequence, len(owned) - 1] = owned[-1]

    def release(self, sequence: int) -> None:
        self.free += self.owned.pop(sequence)

    def write(self, layer: int, sequences, positions, key, value) -> None:
        slots = kvcore.slots.from_positions(self.tables, sequences, positions, BLOCK_SIZE)
        kvcore.scatter_pa_kv_cache(
            key,
            self.keys[layer],
            slots,
            value,
            self.values[layer],
            cache_mode="PA_NZ" if self.layout == "PA_NZ" else "Norm",
            scatter_mode="NHSD" if self.layout == "NHSD" else "None",
        )

    def read(self, layer: int, sequences, lengths):
        """As DenseCache.read."""
        tokens = int(lengths.sum())
        axes = (KV_HEADS * SIZE,) if self.layout == "PA_NZ" else (KV_HEADS, SIZE)
        packed = [np.empty((tokens, *axes), np.float32) for _ in range(2)]
        kvcore.gather_pa_kv_cache(
            self.keys[layer],
            self.values[layer],
            self.tables[sequences],
            lengths,
            *packed,
            cache_mode=self.layout,
        )
        within = np.arange(MAX_LENGTH) < lengths[:, None]
        both = [np.zeros((len(lengths), MAX_LENGTH, KV_HEADS, SIZE), np.float32) for _ in range(2)]
        for rows, some in zip(both, packed, strict=True):
            rows[within] = some.reshape(tokens, KV_HEADS, SIZE)
        return both


class Transformer:
    """Random weights; pre-norm blocks with grouped-query attention."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)

        def weight(*shape: int):
            return (rng.standard_normal(shape) / shape[-2] ** 0.5).astype(np.float32)

        self.embedding, self.place = weight(VOCAB, HIDDEN), weight(MAX_LENGTH, HIDDEN)
        self.project = weight(LAYERS, HIDDEN, (HEADS + 2 * KV_HEADS) * SIZE)
        self.out = weight(LAYERS, HEADS * SIZE, HIDDEN)
        self.up, self.down = weight(LAYERS, HIDDEN, 96), weight(LAYERS, 96, HIDDEN)
        self.head = weight(HIDDEN, VOCAB)

    def step(self, cache, sequences, positions, tokens):
        """Logits [rows, VOCAB] of one token a row; every row sees its sequence up to itself."""
        x = self.embedding[tokens] + self.place[positions]
        for layer in range(LAYERS):
            heads = (norm(x) @ self.project[layer]).reshape(len(x), -1, SIZE)
            query, key, value = np.split(heads, [HEADS, HEADS + KV_HEADS], axis=1)
            cache.write(layer, sequences, positions, key, value)
            lengths = positions + 1
            read = cache.read(layer, sequences, lengths)
            x = x + attend(query, *read, lengths) @ self.out[layer]
            x = x + np.maximum(norm(x) @ self.up[layer], 0) @ self.down[layer]
        return norm(x) @ self.head


def norm(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-6))


def attend(query, keys, values, lengths):
    """query [rows, HEADS, SIZE]; keys, values [rows, MAX_LENGTH, KV_HEADS, SIZE]."""
    rows = len(query)
    beyond = np.arange(MAX_LENGTH) >= lengths[:, None]
    grouped = query.reshape(rows, KV_HEADS, HEADS // KV_HEADS, SIZE)
    scores = grouped @ keys.transpose(0, 2, 3, 1) / np.float32(SIZE**0.5)
    scores = np.where(beyond[:, None, None], np.float32(-np.inf), scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return (weights @ values.transpose(0, 2, 1, 3)).reshape(rows, HEADS * SIZE)


def serve(model: Transformer, cache) -> list[np.ndarray]:
    """Decode every prompt greedily, BATCH at a time; the logits of each step."""
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, VOCAB, length).tolist() for length in PROMPTS]
    waiting, running, steps = list(range(len(PROMPTS))), [], []

    def step(sequences: list[int], positions: list[int]) -> None:
        for sequence in set(sequences):
            cache.grow(sequence, len(texts[sequence]))
        tokens = [texts[s][p] for s, p in zip(sequences, positions, strict=True)]
        steps.append(model.step(cache, *map(np.array, (sequences, positions, tokens))))
        for sequence, logits in zip(sequences, steps[-1], strict=True):
            chosen[sequence] = int(logits.argmax())  # of a prompt's tokens the last one stays

    while waiting or running:
        chosen: dict[int, int] = {}
        if running:
            step(running, [len(texts[sequence]) - 1 for sequence in running])
        while waiting and len(running) < BATCH:
            sequence = waiting.pop(0)
            running.append(sequence)
            length = len(texts[sequence])
            step([sequence] * length, list(range(length)))
        for sequence, token in chosen.items():
            texts[sequence].append(token)
            if len(texts[sequence]) == PROMPTS[sequence] + NEW_TOKENS:
                running.remove(sequence)
                cache.release(sequence)
    return steps


def main() -> None:
    model = Transformer()
    dense = serve(model, DenseCache())
    for layout in LAYOUTS:
        paged = serve(model, PagedCache(layout))
        assert len(paged) == len(dense)
        for seen, want in zip(paged, dense, strict=True):
            assert np.array_equal(seen.view(np.uint32), want.view(np.uint32))
        rows = sum(len(logits) for logits in paged)
        print(f"{layout}: {rows} rows of logits in {len(paged)} steps, equal to the bit")


if __name__ == "__main__":
    main()
