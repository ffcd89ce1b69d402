# SPDX-License-Identifier: Apache-2.0
"""A copy and a kernel at once: order by an event, modelled time, and the race without it.

python examples/streams.py
"""

from __future__ import annotations

import anyio

import kvcore


async def step(dev: kvcore.Device, *, wait: bool) -> None:
    """Load a cache on one stream and use it on another."""
    compute, h2d = dev.stream("compute"), dev.stream("h2d")
    host = dev.empty_host((4096, 512), "bfloat16")
    cache = dev.empty((4096, 512), "bfloat16")
    result = dev.empty_host((512,), "bfloat16")
    with host.host("w") as rows:
        rows[:] = 1
    compute.compute(60, "projection")  # while the load runs
    h2d.copy(cache, host)
    if wait:
        compute.wait_stream(h2d)
    compute.compute(40, "attention")
    compute.copy(result, cache[4095])
    await compute.synchronize()
    with result.host("r") as row:
        print(f"  last row starts with {float(row[0])}, after {dev.now:.1f} us")


async def main() -> None:
    print("With the event:")
    async with kvcore.Device("A3", clock="model", race_check="raise", trace=True) as dev:
        await step(dev, wait=True)
        for use in dev.trace.summary().streams:
            print(f"  {use.name}: {use.busy:.1f} us busy, {use.overlap:.1f} us while another ran")
    print("Without it:")
    async with kvcore.Device("A3", clock="model", race_check="record") as dev:
        await step(dev, wait=False)
    for race in dev.races:
        print(f"  {race.kind}: {race.first.operation} on {race.first.stream}", end=", ")
        print(f"{race.second.operation} on {race.second.stream}: {race.nbytes} bytes")


if __name__ == "__main__":
    anyio.run(main)
