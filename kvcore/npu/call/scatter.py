# SPDX-License-Identifier: Apache-2.0
"""aclnnScatterPaKvCache and aclnnScatterPaCache."""

from __future__ import annotations

from typing import Any

from kvcore._core.plan import Plan
from kvcore.errors import fail
from kvcore.npu.call.arrays import Argument
from kvcore.npu.call.call import PLACEHOLDER_BYTES, OperatorCall, Placed, optional, required
from kvcore.npu.call.memory import Room
from kvcore.npu.call.tensors import TensorHandles
from kvcore.soc import SoC
from kvcore.strides import dense_strides

__all__ = ["KeyScatterCall", "ScatterCall"]

KEY, KEY_CACHE, SLOTS, VALUE, VALUE_CACHE, LENS, OFFSETS, SEQ_LENS = range(8)


class ScatterCall(OperatorCall):
    """ScatterPaKvCache: every scenario that the SoC has.

    Key only (scenario 6, A2 and A3) passes 0-dim tensors for the value and its cache: the tiling
    goes by the rank and reads the tensor without looking whether there is one.
    """

    function = "aclnnScatterPaKvCache"
    outputs: frozenset[str] = frozenset({"key_cache", "value_cache"})

    def __init__(self, plan: Plan, arguments: list[Argument | None], soc: SoC) -> None:
        super().__init__(plan, arguments, soc)
        case = self.case
        self.cache_mode: Any = case.cache_mode
        # Under PA_NZ a scatter mode means nothing, and CANN's tiling wants none.
        self.scatter_mode = case.scatter_mode if case.cache_mode == "Norm" else "None"
        self.counts: bool = self.scatter_mode == "Nct"
        self.key_only: Any = case.key_only
        self.four_d: Any = case.number == 3
        self.take_for((KEY, KEY_CACHE), case.dtype)
        if self.key_only:
            self.arguments[VALUE] = self.arguments[VALUE_CACHE] = None
        else:
            self.take_for((VALUE, VALUE_CACHE), case.value_dtype)
        self.settle_strides(self._free_axes())
        self.ask_the_table()
        self.prepare()

    def _free_axes(self) -> dict[str, int]:
        if self.scatter_mode != "None" or self.four_d:
            return {}
        if self.soc.profile.scatter.outer_strides:
            return {
                one.name: len(one.shape) - 1
                for one in self.arguments[: VALUE_CACHE + 1]
                if one is not None and one.name != "slot_mapping"
            }
        if self.cache_mode == "Norm" and not self.key_only:
            return {"key_cache": 1, "value_cache": 1}
        return {}

    def counts_itself(self, argument: Argument) -> bool:
        """Nct's sources: tokens are counted in elements from the first one of the view."""
        return self.counts and argument.name in ("key", "value")

    def prepare(self) -> None:
        """What follows from the arguments after they were accepted."""
        sources = [self.arguments[KEY], self.arguments[VALUE]]
        sizes = [one.size for one in sources if one is not None]
        if 0 in sizes and any(sizes):
            fail("key", "tokens with bytes in both key and value, or in none, on an NPU", sizes)
        if self.counts:
            self.arguments[KEY] = self._rows(KEY, KEY_CACHE)
            if not self.key_only:
                self.arguments[VALUE] = self._rows(VALUE, VALUE_CACHE)

    def _rows(self, source: int, cache: int) -> Argument:
        """A view of a fused buffer as CANN expects it: contiguous [T, H, D] from its first element.

        Nct's strides and offsets count from there, whatever strides the view has.
        """
        flat, pages = self.arguments[source], self.arguments[cache]
        assert flat is not None
        assert pages is not None
        tokens = self.argument("slot_mapping").shape[0]
        shape = (tokens, *pages.shape[-2:])
        if source in self.copied:
            fail(flat.name, "device memory with Nct", "host memory")
        return flat.seen_as(shape, dense_strides(shape, flat.itemsize))

    def check_room(self, arguments: list[Argument | None]) -> None:
        """In Nct the storage must hold the rows that the tensor given to CANN spans."""
        for found in (arguments[KEY], arguments[VALUE]):
            if found is None:
                continue
            room = found.base + found.storage_bytes - found.address
            if found.nbytes > room:
                shape = list(found.shape)
                fail(
                    found.name,
                    f"a storage that holds [T, H, D] = {shape} from its first element on",
                    f"{room} bytes",
                )

    def _lens(self, placed: Placed) -> Argument | None:
        """CANN's table has [B, H] in scenario 3, where kvcore takes it flat too."""
        lens = placed[LENS]
        if lens is None or not self.four_d:
            return lens
        shape = self.argument("slot_mapping").shape
        return lens.seen_as(shape, dense_strides(shape, lens.itemsize))

    def is_empty(self) -> bool:
        """Whether no bytes move: no tokens, empty tokens, or caches without a slot."""
        return 0 in [self.argument(name).size for name in ("slot_mapping", "key", "key_cache")]

    def phase_one(
        self, handles: TensorHandles, placed: Placed, room: Room, answer: Argument | None
    ) -> list[Any]:
        """The arguments in the operator's order, in which the value follows the slots."""
        key = required(placed, KEY)
        if self.key_only:
            place = room.take("no value", PLACEHOLDER_BYTES)
            assert key.element is not None
            value = handles.scalar(key.element, place)
            value_cache = handles.scalar(key.element, place)
        else:
            value = handles.tensor(required(placed, VALUE))
            value_cache = handles.tensor(required(placed, VALUE_CACHE))
        nct = self.counts
        return [
            handles.tensor(key),
            handles.tensor(required(placed, KEY_CACHE)),
            handles.tensor(required(placed, SLOTS)),
            value,
            value_cache,
            optional(handles, self._lens(placed)),
            optional(handles, placed[OFFSETS]),
            optional(handles, placed[SEQ_LENS]),
            self.cache_mode.encode(),
            self.scatter_mode.encode(),
            handles.integers(self.case.strides) if nct else None,
            handles.integers(self.case.offsets) if nct else None,
        ]


class KeyScatterCall(ScatterCall):
    """ScatterPaCache, on the 950: the key alone."""

    function = "aclnnScatterPaCache"
    outputs: frozenset[str] = frozenset({"key_cache"})

    def _free_axes(self) -> dict[str, int]:
        return {}  # which strides its kernels honour is not known

    def phase_one(
        self, handles: TensorHandles, placed: Placed, room: Room, answer: Argument | None
    ) -> list[Any]:
        """The arguments in the operator's order: key, cache, slots, compression, mode."""
        return [
            handles.tensor(required(placed, KEY)),
            handles.tensor(required(placed, KEY_CACHE)),
            handles.tensor(required(placed, SLOTS)),
            optional(handles, self._lens(placed)),
            optional(handles, placed[OFFSETS]),
            optional(handles, placed[SEQ_LENS]),
            self.cache_mode.encode(),
        ]
