# SPDX-License-Identifier: Apache-2.0
"""Predict what is published of two offload deployments, and say how wrong it comes out.

    python examples/predict_offload.py [--steps N]

GLM-5.2 on two A3 nodes: step times (the figures are in published_glm_5_2.toml of
kvcore/replay/clock and in the profiles of model and device).
DeepSeek-V3.2 on 64 A3 cards: what fits.
"""

from __future__ import annotations

import argparse

from kvcore.replay import ModelProfile, hit_rate, score_trace
from kvcore.replay.clock.prediction import (
    Deployment,
    calibrate,
    decode_bytes,
    most_requests,
    predict,
    sensitivity,
)

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200, help="of the trace of ids, after 60")
    options = parser.parse_args()

    ids = score_trace(60 + options.steps, seed=1)
    rates = {pool: hit_rate(ids, "fifo", pool, warmup=60) for pool in (8192, 16_384)}
    steps(Deployment.glm_5_2(), rates)
    capacity()


def steps(deployment: Deployment, rates: dict[int, float]) -> None:
    print(deployment.name)
    for pool, rate in rates.items():
        print(f"  set-associative FIFO, {pool} entries: {rate:.2%} hits (generated ids)")
    _, piece_us = calibrate(deployment, rates)
    print(f"  calibrated: {piece_us:.4f} us a scattered host read")
    print(
        f"\n{'mode':<10} {'pool':>6} {'batch':>5} {'published':>10} {'model':>8} {'error':>7}",
        end="",
    )
    print(f" {'compute':>8} {'plan':>6} {'serve':>6} {'token/s':>8}  use")
    for p in predict(deployment, rates):
        row = p.row
        compute, plan, serve = p.parts
        print(
            f"{row.mode:<10} {row.pool:>6} {row.batch:>5} {row.ms:>7.2f} ms {p.ms:>5.2f} ms"
            f" {p.error:>+7.1%} {compute:>8.2f} {plan:>6.2f} {serve:>6.2f} {p.tokens_per_s:>8,.0f}"
            f"  {row.use}"
        )
    names = [f"{r.mode} {r.pool}" for r in deployment.rows if r.use == "predicted"]
    print("\nHow the predicted rows move with each assumed figure (calibrated anew):")
    print(f"{'':<28} {'times':>6} " + " ".join(f"{name:>15}" for name in names))
    for figure, factor, moved in sensitivity(deployment, rates):
        print(f"{figure:<28} {factor:>6.2f} " + " ".join(f"{x:>+15.2%}" for x in moved))


def capacity() -> None:
    model, dies, drafts = ModelProfile.named("deepseek-v3.2-c8"), 128, 3
    print("\nDeepSeek-V3.2, 64 A3 cards (128 dies), 8-bit caches, MTP3: device memory a die")
    print(
        f"  a token: {model.token_bytes:,} bytes of cache, of indexers {model.token_index_bytes:,}"
    )
    for what, batch, context, larger, longer in (
        ("batch", 1024, 65_536, 2048, 65_536),
        ("length", 128, 262_144, 128, 393_216),
    ):
        budget = decode_bytes(model, batch // dies, context)
        without = decode_bytes(model, larger // dies, longer)
        offload = decode_bytes(model, larger // dies, longer, drafts=drafts, pool=0)
        most = most_requests(model, budget, longer, drafts=drafts, pool=0)
        print(
            f"  {what}: batch {batch} at {context // 1024}K takes {budget / GIB:.1f} GiB;"
            f" batch {larger} at {longer // 1024}K {without / GIB:.1f} GiB without offload,"
            f" {offload / GIB:.1f} GiB with it; the budget holds batch {most * dies}"
        )
    glm = Deployment.glm_5_2()
    context = int(glm.value("context"))
    budget = decode_bytes(glm.model, 2, context)
    print(f"GLM-5.2: batch 64 at 64K takes {budget / GIB:.1f} GiB a die")
    for pool in (8192, 16_384):
        one = decode_bytes(glm.model, 1, context, drafts=drafts, pool=pool)
        most = most_requests(glm.model, budget, context, drafts=drafts, pool=pool)
        print(
            f"  pool of {pool}: {one / GIB:.2f} GiB a request, so batch {most * 32} (published 128)"
        )


if __name__ == "__main__":
    main()
