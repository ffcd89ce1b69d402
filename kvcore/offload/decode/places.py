# SPDX-License-Identifier: Apache-2.0
"""The device pools of the real requests, a place each; and what full caches and groups must be."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvcore._core import overlap
from kvcore.errors import fail
from kvcore.offload.checks import check_integer
from kvcore.offload.rows.device_pool import DevicePool
from kvcore.offload.rows.full_lanes import FullLane
from kvcore.offload.rows.policy import check_books

if TYPE_CHECKING:
    from kvcore.offload.decode.request import DecodeRequest
    from kvcore.runtime import Device

__all__ = ["Places", "check_full", "read_groups"]


class Places:
    """``count`` places, each with a pool for every group that has a layer in ``full``.

    options: of `DevicePool`, capacity None for 4 * topk (topk for the previous selection).
    """

    def __init__(
        self,
        device: Device,
        full: Mapping[int, Sequence[Any]],
        groups: Sequence[Sequence[int]],
        count: int,
        *,
        policy: str,
        capacity: int | None,
        topk: int,
        max_tokens: int,
        ways: int | None,
    ) -> None:
        if capacity is None:
            capacity = topk if policy == "previous" else 4 * topk
        check_books(policy, capacity, max_tokens, topk, ways)
        self._pools: list[dict[int, DevicePool]] = []
        self._free = list(range(count - 1, -1, -1))
        try:
            for _ in range(count):
                pools: dict[int, DevicePool] = {}
                self._pools.append(pools)
                for index, group in enumerate(groups):
                    own = {layer: full[layer] for layer in group if layer in full}
                    if own:
                        pools[index] = DevicePool(
                            own, capacity=capacity, topk=topk, max_tokens=max_tokens,
                            policy=policy, ways=ways, device=device,
                        )  # fmt: skip
        except BaseException:
            self.close()
            raise

    def take(self, request: Hashable) -> tuple[int, dict[int, DevicePool]]:
        """A place for a request, and its pools, which hold nothing."""
        if not self._free:
            fail("real", f"at most {len(self._pools)} real requests at a time", "one more")
        place = self._free.pop()
        for pool in self._pools[place].values():
            pool.admit(request)
        return place, self._pools[place]

    def give_back(self, state: DecodeRequest) -> None:
        """Take a request's place, if it has one."""
        for pool in state.pools.values():
            if pool.request is not None:
                pool.evict(state.name)
        if state.place >= 0:
            self._free.append(state.place)
            state.place, state.pools = -1, {}

    def close(self) -> None:
        """Give the memory back."""
        for pools in self._pools:
            for pool in pools.values():
                pool.close()


def read_groups(
    groups: Sequence[Sequence[int]], lanes: Mapping[int, Any]
) -> tuple[tuple[int, ...], ...]:
    """Layer ids by group: each once, and every layer of ``lanes`` in one."""
    if isinstance(groups, str | bytes) or not isinstance(groups, Sequence) or not groups:
        fail("groups", "a sequence of layer ids for each group", repr(groups))
    seen: set[int] = set()
    read: list[tuple[int, ...]] = []
    for i, group in enumerate(groups):
        if isinstance(group, str | bytes) or not isinstance(group, Sequence) or not group:
            fail(f"groups[{i}]", "layer ids", repr(group))
        for layer in group:
            check_integer(f"groups[{i}]", layer, 0)
            if layer in seen:
                fail(f"groups[{i}]", "each layer once", layer)
            seen.add(layer)
        read.append(tuple(group))
    for layer in lanes:
        if layer not in seen:
            fail("groups", f"a group with layer {layer} of full", "none")
    return tuple(read)


def check_full(device: Device, layers: Mapping[int, Sequence[FullLane]]) -> None:
    """Raise for full caches that the engine cannot write, or kernels on the device not reach."""
    first = next(iter(layers.values()))
    for layer, lanes in layers.items():
        for lane in lanes:
            if lane.flat:
                fail(f"full[{layer}]", "lanes [blocks, block_size, size]", "a flat one")
            if lane.read_only:
                fail(f"full[{layer}]", "arrays that can be written", "a read-only one")
            overlap.check_self(lane.given.info)
            space = getattr(lane.owner, "space", None)
            if device.profile is not None and space not in ("swapped", "device"):
                seen = f"{space or 'pageable host'} memory"
                fail(f"full[{layer}]", "swapped or device memory on a modelled device", seen)
        if [lane.row_bytes for lane in lanes] != [lane.row_bytes for lane in first]:
            seen = str([lane.row_bytes for lane in lanes])
            fail(f"full[{layer}]", f"rows of {[lane.row_bytes for lane in first]} bytes", seen)
    overlap.check_all_apart(lane.given.info for lanes in layers.values() for lane in lanes)
