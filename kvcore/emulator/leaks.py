# SPDX-License-Identifier: Apache-2.0
"""leakcheck: the tensors that a program never freed, by the line that made them.

Device memory comes in large pieces that torch_npu's allocator divides, and the allocator gives
nothing back by itself; what counts is which of its blocks still belong to a tensor.
"""

from __future__ import annotations

import gc
from typing import Any

from kvcore.emulator import _lines
from kvcore.emulator.reports import Report, at, collector

__all__ = ["made", "report"]

#: Where the memory at an address was made, the newest: (line's number, operator).
_places: dict[int, tuple[int, str]] = {}


def made(address: int, line: int, operator: str) -> None:
    """Note the line of an operator that has returned new device memory."""
    _places[address] = (line, operator)


def report(npu: Any) -> None:
    """At the end of the program: report each line whose tensors are still there."""
    gc.collect()
    for segment in npu.npu.memory_snapshot():
        address = segment["address"]
        for block in segment["blocks"]:
            start = block.get("address", address)
            address = start + block["size"]
            if block["state"] != "active_allocated":
                continue
            number, operator = _places.get(start, (0, "torch_npu"))
            place = _lines.place(number)
            size = block.get("requested_size", block["size"])
            text = f"{operator}{at(place)} made device memory that is still there at the end"
            collector.add(
                ("leak", operator, place),
                Report("leakcheck", operator, text, (place,), (), start, start + size),
                raising=False,
            )
