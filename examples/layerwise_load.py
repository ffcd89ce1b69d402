# SPDX-License-Identifier: Apache-2.0
"""Layer by layer: load the next layer's cache while the last one is used, with a ring of two.

Captured once as a graph, with the load on a fork, and replayed for every step.

    python examples/layerwise_load.py
"""

from __future__ import annotations

import kvcore

LAYERS = 8
ROWS, ROW = 2048, 576  # of one layer: tokens, elements of bfloat16


def main() -> None:
    with kvcore.Device("A3", clock="model", race_check="raise") as dev:
        compute, load = dev.stream("compute"), dev.stream("load")
        full = dev.empty_host((LAYERS, ROWS, ROW), "bfloat16")
        ring = [dev.empty((ROWS, ROW), "bfloat16") for _ in range(2)]
        loaded = [dev.event() for _ in ring]
        used = [dev.event() for _ in ring]
        with dev.capture(compute) as graph:
            load.wait_stream(compute)  # the fork
            for layer in range(LAYERS):
                slot = layer % 2
                if layer >= 2:
                    load.wait_event(used[slot])
                load.copy(ring[slot], full[layer])
                loaded[slot].record(load)
                compute.wait_event(loaded[slot])
                compute.compute(50, f"layer {layer}")
                used[slot].record(compute)
            compute.wait_stream(load)  # the join
        for step in range(3):
            before = dev.now
            graph.replay(compute)
            compute.synchronize_blocking()
            print(f"step {step}: {dev.now - before:.1f} us")
        alone = LAYERS * (50 + ROWS * ROW * 2 / 1e3 / dev.profile.value("h2d_bandwidth"))
        print(f"one after the other it would take about {alone:.0f} us")


if __name__ == "__main__":
    main()
