# SPDX-License-Identifier: Apache-2.0
"""Predict what is published of two offload deployments, and say how wrong it comes out.

    python examples/predict_offload.py [MEASUREMENTS]

GLM-5.2 on two A3 nodes: step times, as `kvcore predict` has them (each a run of the replay).
DeepSeek-V3.2 on 64 A3 cards: what fits.
"""

from __future__ import annotations

import argparse

from kvcore.replay import ModelProfile
from kvcore.replay.clock.capacity import decode_bytes, most_requests
from kvcore.replay.prediction.measurements import Measurements
from kvcore.replay.prediction.predict import predict

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("measurements", nargs="?", default="glm-5.2", help="a name or a .toml file")
    options = parser.parse_args()

    steps(Measurements.find(options.measurements))
    capacity()


def steps(measurements: Measurements) -> None:
    found = predict(measurements)
    print(measurements.name)
    print(f"{'row':<20} {'batch':>5} {'measured':>11} {'replay':>11} {'error':>7}  use")
    for one in found.rows:
        row = one.row
        print(
            f"{row.name:<20} {row.batch:>5} {row.ms:>8.2f} ms {one.ms:>8.2f} ms"
            f" {one.error:>+7.1%}  {row.use}"
        )
    print(found.verdict)
    for one in found.of("predict"):
        print(f"\n{one.row.name} moves with each assumed figure, fitted anew:")
        for figure, (low, high) in one.moved.items():
            print(f"  {figure:<20} {low:+.2%} {high:+.2%}")


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
    glm, context = ModelProfile.named("glm-5.2"), 65_536
    budget = decode_bytes(glm, 2, context)
    print(f"GLM-5.2: batch 64 at 64K takes {budget / GIB:.1f} GiB a die")
    for pool in (8192, 16_384):
        one = decode_bytes(glm, 1, context, drafts=drafts, pool=pool)
        most = most_requests(glm, budget, context, drafts=drafts, pool=pool)
        print(
            f"  pool of {pool}: {one / GIB:.2f} GiB a request, so batch {most * 32} (published 128)"
        )


if __name__ == "__main__":
    main()
