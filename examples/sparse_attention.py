# SPDX-License-Identifier: Apache-2.0
"""Sparse attention over a selection cache, against full attention restricted to the chosen ids.

Each decode step appends a token of latent KV (one head: K and rope) to the full cache, scores all
tokens with a small indexer, and attends to the best of them.  gather_selection_kv_cache brings the
selection cache from the last step's choice to this step's: only what is new is read from the full
cache, which on the device may be host memory.

    python examples/sparse_attention.py
"""

from __future__ import annotations

import numpy as np

import kvcore

BATCH, HEADS, LATENT, ROPE, INDEX = 3, 4, 32, 8, 16
BLOCK_SIZE, NUM_BLOCKS, COLUMNS = 16, 30, 10
TOPK, STEPS = 24, 8
PROMPTS = np.array([57, 19, 130], np.int32)  # the second sees fewer tokens than TOPK at first


def attend(query, latent, rope, only=None):
    """query [HEADS, LATENT + ROPE] over tokens of a request (those in only): [HEADS, LATENT]."""
    keys = np.concatenate((latent, rope), 1).astype(np.float32)
    scores = query @ keys.T / np.float32((LATENT + ROPE) ** 0.5)
    if only is not None:
        scores = np.where(np.isin(np.arange(len(keys)), only), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ latent.astype(np.float32)


class Full:
    """Every token of every request in blocks: latent, rope, and the indexer's keys."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.latent = np.zeros((NUM_BLOCKS, BLOCK_SIZE, LATENT), np.float16)
        self.rope = np.zeros((NUM_BLOCKS, BLOCK_SIZE, ROPE), np.float16)
        self.index = np.zeros((NUM_BLOCKS, BLOCK_SIZE, INDEX), np.float16)
        self.table = rng.permutation(NUM_BLOCKS).astype(np.int32).reshape(BATCH, COLUMNS)
        self.lengths = np.zeros(BATCH, np.int32)

    def append(self, counts, rng: np.random.Generator) -> None:
        """counts[b] new tokens for each request."""
        slots = kvcore.slots.prefill(self.table, self.lengths, counts, BLOCK_SIZE)
        for cache in (self.latent, self.rope, self.index):
            tokens = rng.standard_normal((len(slots), 1, cache.shape[2])).astype(np.float16)
            kvcore.scatter_pa_kv_cache(tokens, cache[:, :, None], slots)
        self.lengths += counts

    def rows(self, b: int, cache):
        """One request's tokens, [length, width]."""
        return cache[self.table[b]].reshape(-1, cache.shape[2])[: self.lengths[b]]


def main() -> None:
    rng = np.random.default_rng(0)
    full = Full(rng)
    full.append(PROMPTS, rng)

    selected = np.zeros((BATCH, TOPK, LATENT), np.float16)  # a block of TOPK rows for each request
    selected_rope = np.zeros((BATCH, TOPK, ROPE), np.float16)
    table = np.arange(BATCH, dtype=np.int32)[:, None]
    status = np.full((BATCH, 1, 1, TOPK + 1), -1, np.int32)
    status[..., -1] = 0

    wish = rng.standard_normal((BATCH, INDEX))  # what the indexer looks for; drifts slowly
    total = dict.fromkeys(("reused", "moved", "refreshed", "read"), 0)
    for step in range(STEPS):
        full.append(np.ones(BATCH, np.int32), rng)
        wish += 0.2 * rng.standard_normal(wish.shape)
        ids = np.full((BATCH, 1, 1, TOPK), -1, np.int32)
        for b in range(BATCH):
            scores = full.rows(b, full.index) @ wish[b]
            best = np.argsort(-scores)[:TOPK]
            ids[b, 0, 0, : len(best)] = best

        stats: dict[str, np.ndarray] = {}
        lengths = kvcore.gather_selection_kv_cache(
            selected_rope,
            selected,
            table,
            status,
            ids,
            full.rope,
            full.latent,
            full.table,
            full.lengths,
            np.ones(BATCH, np.int32),
            selection_topk_block_size=1,
            stats=stats,
        )
        for b in range(BATCH):
            query = rng.standard_normal((HEADS, LATENT + ROPE)).astype(np.float32)
            n = lengths[b]
            seen = attend(query, selected[b, :n], selected_rope[b, :n])
            # From all tokens: the same ids in the order in which the selection holds them.
            held = status[b, 0, 0, :n]
            assert set(held.tolist()) == {i for i in ids[b, 0, 0].tolist() if i >= 0}
            latent, rope = full.rows(b, full.latent), full.rows(b, full.rope)
            want = attend(query, latent[held], rope[held])
            assert np.array_equal(seen.view(np.uint32), want.view(np.uint32))
            # Over all tokens with a mask; sums in another order differ in the last bits.
            np.testing.assert_allclose(seen, attend(query, latent, rope, held), atol=1e-5)
        counts = {name: int(stats[name].sum()) for name in total}
        total = {name: total[name] + n for name, n in counts.items()}
        print(f"step {step}: " + ", ".join(f"{n} {name}" for name, n in counts.items()))
    chosen = sum(total.values())
    far_reads = total["read"] + total["refreshed"]
    assert 0 < far_reads < chosen
    print(f"attention equal to the bit; {far_reads} of {chosen} tokens came from the full cache")


if __name__ == "__main__":
    main()
