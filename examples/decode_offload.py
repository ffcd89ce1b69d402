# SPDX-License-Identifier: Apache-2.0
"""Sparse decode with the full cache on the host: one id trace, four policies of the device pool.

Two requests of 16,384 tokens decode 24 steps with two drafts each, some of which are rejected.
The attention checks that every row it is given is the one that was written.  Times are the
model clock's, for one die of an A3; what a layer computes is made up (60 us).

    python examples/decode_offload.py
"""

from __future__ import annotations

import numpy as np

import kvcore
from kvcore.offload import AttentionInput, DecodeEngine
from kvcore.replay import TurnoverIds

GROUPS = ((0,), (1, 2), (3, 4, 5))  # layers that share one choice of top-k ids
PROMPT, STEPS, DRAFTS, TOPK, BLOCK = 16_384, 24, 2, 512, 128
SIZES = (64, 8)  # bytes of a token in each lane, far below a real model's 1,024 and 128


def run(policy: str, write_policy: str) -> str:
    draw = np.random.default_rng(0)
    columns = -(-(PROMPT + STEPS * (1 + DRAFTS)) // BLOCK)
    with kvcore.Device("A3", clock="model", race_check="raise") as device:
        full, written = {}, {}
        for layer in range(6):
            full[layer] = [
                device.empty_swapped((2 * columns, BLOCK, size), "uint8") for size in SIZES
            ]
            # The same rows, by request and position: what there would be without offload.
            written[layer] = [
                draw.integers(0, 256, (2, columns * BLOCK, size), np.uint8) for size in SIZES
            ]
            for lane, rows in zip(full[layer], written[layer], strict=True):
                with lane.host("w") as blocks:
                    blocks[...] = rows.reshape(blocks.shape)
        ids = {(r, g): TurnoverIds(TOPK, seed=3 * r + g) for r in range(2) for g in range(3)}

        def rows_of(request: int, layer: int, first: int, count: int) -> list[np.ndarray]:
            return [rows[request, first : first + count] for rows in written[layer]]

        def attend(given: AttentionInput) -> None:
            for request in given.requests:
                for got, rows in zip(given.rows(request), written[given.layer], strict=True):
                    assert (got == rows[request, given.ids(request)]).all()

        engine = DecodeEngine(
            device,
            full,
            groups=GROUPS,
            max_batch=2,
            max_tokens=columns * BLOCK,
            topk=TOPK,
            select=lambda request, group, tokens: ids[request, group].next(tokens),
            rows=rows_of,
            attend=attend,
            layer_us=60.0,
            policy=policy,
            write_policy=write_policy,
            max_drafts=DRAFTS,
        )
        for request in range(2):
            table = np.arange(columns) + columns * request
            engine.admit(request, table, PROMPT)
        us = 0.0
        for step in range(STEPS):
            result = engine.step_blocking([0, 1], drafts=DRAFTS)
            for request in range(2):
                engine.accept(request, int(draw.integers(1, 2 + DRAFTS)))
            us += result.us if step >= STEPS // 2 else 0
        for request in range(2):
            engine.evict_blocking(request)
        total = engine.totals
        engine.close()
    rate = total.hits / (total.hits + total.misses)
    return (
        f"{policy:9} {write_policy:14} {rate:6.1%} {us / (STEPS - STEPS // 2):9.0f} us"
        f" {total.h2d_bytes / 1e6:8.1f} MB in {total.d2h_bytes / 1e3:7.1f} kB out"
    )


def main() -> None:
    print("policy    writes           hits        step        read         written")
    for policy in ("previous", "lru", "fifo", "arc"):
        print(run(policy, "write_through"))
    print(run("lru", "write_back"))


if __name__ == "__main__":
    main()
