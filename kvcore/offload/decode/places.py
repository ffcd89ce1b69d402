# SPDX-License-Identifier: Apache-2.0
"""The device pools of the requests, a place each; and what full caches and groups must be."""

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
    from kvcore.offload.decode.options import EngineSettings
    from kvcore.offload.decode.request import DecodeRequest
    from kvcore.runtime import Device

__all__ = ["Places", "check_full", "read_groups"]


class Places:
    """A place for each request of a full batch, with a pool for every group that has rows.

    A group has rows when one of its layers is in ``full``.
    """

    def __init__(
        self,
        device: Device,
        full: Mapping[int, Sequence[Any]],
        groups: Sequence[Sequence[int]],
        settings: EngineSettings,
    ) -> None:
        policy, capacity, ways = settings.policy, settings.pool_capacity, settings.ways
        topk, max_tokens = settings.topk, settings.max_tokens
        check_books(policy, capacity, max_tokens, topk, ways)
        self._pools: list[dict[int, DevicePool]] = []
        self._free = list(range(settings.max_batch - 1, -1, -1))
        try:
            for _ in range(settings.max_batch):
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

    @property
    def num_free(self) -> int:
        """Places that no request has."""
        return len(self._free)

    def take(self, request: Hashable) -> tuple[int, dict[int, DevicePool]]:
        """A place for a request, and its pools, which hold nothing.  One must be free."""
        place = self._free.pop()
        for pool in self._pools[place].values():
            pool.admit(request)
        return place, self._pools[place]

    def give_back(self, state: DecodeRequest) -> None:
        """Free the place of a request, if it still has one."""
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
