# SPDX-License-Identifier: Apache-2.0
"""Comparing caches in tests: which block, row, head, element and slot differs first, and a map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvcore._core import adopt
from kvcore._core.arrays import ArrayInfo, read
from kvcore._core.lanes import NZ_BYTES
from kvcore.errors import fail, shown

__all__ = ["LAYOUTS", "assert_kv_equal"]

#: What an axis of a cache means, by layout and rank.
LAYOUTS: dict[str, dict[int, tuple[str, ...]]] = {
    "Norm": {4: ("block", "row", "head", "element"), 3: ("block", "row", "element")},
    "NHSD": {4: ("block", "head", "row", "element")},
    "PA_NZ": {
        4: ("block", "column", "row", "element"),
        5: ("block", "head", "column", "row", "element"),
    },
}
MAX_BLOCKS = 8
MAX_WIDTH = 64
MAX_SLOTS = 12

Bits = NDArray[Any]
Wrong = NDArray[np.bool_]


def assert_kv_equal(
    cache: Any,
    expected: Any,
    layout: str = "Norm",
    *,
    num_heads: int | None = None,
    name: str = "cache",
) -> None:
    """Fail unless two caches hold the same bits.

    cache, expected: arrays of one shape and dtype (numpy, torch, runtime buffers, ...).
    layout:    "Norm" [nb, bs, H, D] or [nb, bs, D]; "NHSD" [nb, H, bs, D]; "PA_NZ"
               [nb, H*D // c0, bs, c0] or [nb, H, D // c0, bs, c0].
    num_heads: heads of a 4-D PA_NZ cache, which its shape does not state; for the message.
    name:      what the message calls the cache.

    The AssertionError names the first difference by block, row, head, element and slot, the two
    values with their bits, how many slots are wrong, and draws a map of them; and it says so when
    the wrong row is another slot's.  ParamInvalidError for what is no cache in that layout.
    """
    __tracebackhide__ = True
    if not isinstance(layout, str) or layout not in LAYOUTS:
        fail("layout", "one of " + ", ".join(map(repr, LAYOUTS)), shown(layout))
    info, wanted = read(cache, name), read(expected, "expected")
    rank = len(info.shape)
    if rank not in LAYOUTS[layout]:
        shapes = " or ".join(str(list(axes)) for axes in LAYOUTS[layout].values())
        fail(name, f"axes {shapes} ({layout})", list(info.shape))
    if info.shape != wanted.shape or info.dtype_name != wanted.dtype_name:
        raise AssertionError(f"{name}: expected {_kind(wanted)}, got {_kind(info)}")
    bits, wanted_bits = adopt.as_raw(cache, name), adopt.as_raw(expected, "expected")
    wrong = bits != wanted_bits
    if not wrong.any():
        return
    view = _View(layout, info, LAYOUTS[layout][rank], num_heads)
    _report(view, name, bits, wanted_bits, wrong)


def _kind(info: ArrayInfo) -> str:
    return f"{info.dtype_name} {list(info.shape)}"


@dataclass(frozen=True)
class _View:
    """How to read an index of a cache."""

    layout: str
    info: ArrayInfo
    axes: tuple[str, ...]
    num_heads: int | None

    def size(self, axis: str) -> int:
        """Length of that axis."""
        return int(self.info.shape[self.axes.index(axis)])

    def place(self, index: tuple[int, ...]) -> dict[str, int]:
        """block, row, head, element and slot of one element, as far as they are known."""
        at = dict(zip(self.axes, index, strict=True))
        if self.layout == "PA_NZ":
            c0 = NZ_BYTES // self.info.itemsize
            at["element"] += at.pop("column") * c0
            if "head" not in at and self.num_heads:
                width = self.size("column") * c0 // self.num_heads
                at["head"], at["element"] = divmod(at["element"], max(width, 1))
        at["slot"] = at["block"] * self.size("row") + at["row"]
        return at

    def slots(self, of_elements: NDArray[Any]) -> NDArray[Any]:
        """[nb, bs, what a token has], from an array of the cache's shape."""
        front = (self.axes.index("block"), self.axes.index("row"))
        moved = np.moveaxis(of_elements, front, (0, 1))
        return moved.reshape(*moved.shape[:2], -1)


def _report(view: _View, name: str, bits: Bits, wanted: Bits, wrong: Wrong) -> NoReturn:
    __tracebackhide__ = True
    first = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    by_slot: Wrong = np.any(view.slots(wrong), axis=2)
    at = view.place(tuple(int(i) for i in first))
    slot = at.pop("slot")
    where = ", ".join(
        f"{axis} {at[axis]}" for axis in ("block", "row", "head", "element") if axis in at
    )
    slots = np.flatnonzero(by_slot)
    shown = ", ".join(map(str, slots[:MAX_SLOTS].tolist()))
    more = f", ... ({len(slots) - MAX_SLOTS} more)" if len(slots) > MAX_SLOTS else ""
    lines = [
        f"{name} differs from what is expected in {len(slots)} of {by_slot.size} slots "
        f"({view.layout}, {_kind(view.info)})",
        f"first difference: {where} (slot {slot}): "
        f"expected {_value(view.info, wanted[first])}, got {_value(view.info, bits[first])}",
        *_other_slot(view, bits, wanted, slot),
        f"wrong slots: {shown}{more}",
        *_map(by_slot),
    ]
    raise AssertionError("\n".join(lines))


def _value(info: ArrayInfo, item: Any) -> str:
    """The value, where numpy can say it, and the bits."""
    bits = f"0x{int(item):0{2 * info.itemsize}x}"
    kind = None if info.dtype is None else adopt.numpy_dtype(info.dtype)
    if kind is None or info.dtype is None or info.dtype.kind == "uint":
        return bits
    return f"{np.asarray(item).view(kind).item()} ({bits})"


def _other_slot(view: _View, bits: Bits, wanted: Bits, slot: int) -> list[str]:
    """A line when the wrong row is the one that another slot should hold."""
    tokens = view.slots(wanted)
    tokens = tokens.reshape(-1, tokens.shape[2])
    row = view.slots(bits).reshape(-1, tokens.shape[1])[slot]
    if not row.any():
        return []
    places = np.flatnonzero((tokens == row).all(1))
    return [f"it holds what slot {places[0]} should hold"] if len(places) else []


def _map(by_slot: Wrong) -> list[str]:
    """A line a block that has wrong slots: '.' right, 'x' some wrong, '#' all wrong."""
    _, size = by_slot.shape
    step = -(-size // MAX_WIDTH)
    starts = np.arange(0, size, step)
    blocks = np.flatnonzero(by_slot.any(1))
    legend = "a character is a row" if step == 1 else f"a character is {step} rows"
    lines = [f"blocks with wrong slots ({legend}; . right, x some wrong, # all wrong):"]
    width = len(str(blocks[:MAX_BLOCKS].max()))
    for block in blocks[:MAX_BLOCKS]:
        marks = [by_slot[block, start : start + step] for start in starts]
        drawn = "".join("." if not m.any() else "#" if m.all() else "x" for m in marks)
        lines.append(f"  block {block:>{width}} |{drawn}|")
    if len(blocks) > MAX_BLOCKS:
        lines.append(f"  ... and {len(blocks) - MAX_BLOCKS} more blocks")
    return lines
