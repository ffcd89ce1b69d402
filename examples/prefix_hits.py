# SPDX-License-Identifier: Apache-2.0
"""How much prefix reuse does a pool of a given size give?  Bookkeeping only, no bytes.

    python examples/prefix_hits.py [TRACE] [--requests N]

The scheduler decides and the pool keeps track of blocks, as in `kvcore replay`; nothing is written,
so a pool may be larger than this machine's memory.
"""

from __future__ import annotations

import argparse

from kvcore.offload import BlockPool
from kvcore.replay import Scheduler, TraceRequest, generate_trace, read_trace

BLOCK_SIZE = 128


def serve(requests: list[TraceRequest], num_blocks: int) -> Scheduler:
    scheduler = Scheduler(
        requests, BlockPool(num_blocks), block_size=BLOCK_SIZE, max_batch=32, chunk_tokens=8192
    )
    while (step := scheduler.plan()) is not None:
        for finished in scheduler.commit(step):
            scheduler.retire(finished)
    return scheduler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trace", nargs="?")
    parser.add_argument("--requests", type=int, default=200)
    options = parser.parse_args()
    if options.trace is None:
        requests = list(generate_trace(options.requests))
    else:
        requests = read_trace(options.trace, limit=options.requests)

    print(f"{'blocks':>8} {'hits':>6} {'preemptions':>12} {'evictions':>10} {'peak':>8}")
    for num_blocks in (1024, 4096, 16_384, 65_536):
        scheduler = serve(requests, num_blocks)
        counters, pool = scheduler.counters, scheduler.pool
        rate = counters.prefix_hit_tokens / counters.prompt_tokens
        print(
            f"{num_blocks:>8} {rate:>6.1%} {counters.preemptions:>12} {pool.evictions:>10}"
            f" {pool.peak_used:>8}"
        )


if __name__ == "__main__":
    main()
