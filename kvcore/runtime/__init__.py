# SPDX-License-Identifier: Apache-2.0
"""Devices, memory, streams, events and graphs: queues that behave like an NPU's.

The package knows nothing of operators: it runs plans (anything with ``run``, ``reads``,
``writes`` and ``touched``), copies and host functions.  ``docs/runtime.md`` compares its
semantics with those of torch.cuda and torch_npu.
"""

from __future__ import annotations

from kvcore.runtime.accesses import Access
from kvcore.runtime.current import current_stream
from kvcore.runtime.device import Device
from kvcore.runtime.event import Event
from kvcore.runtime.external import ExternalEvent
from kvcore.runtime.graph import Graph
from kvcore.runtime.memory import Buffer, MemoryInfo
from kvcore.runtime.profile import DeviceProfile, Figure
from kvcore.runtime.settings import default_race_check
from kvcore.runtime.statistics import DeviceStatistics, StreamStatistics
from kvcore.runtime.stream import Stream
from kvcore.runtime.watching.race import Party, Race
from kvcore.runtime.watching.trace import Span, StreamUse, Summary, Trace

__all__ = [
    "Access",
    "Buffer",
    "Device",
    "DeviceProfile",
    "DeviceStatistics",
    "Event",
    "ExternalEvent",
    "Figure",
    "Graph",
    "MemoryInfo",
    "Party",
    "Race",
    "Span",
    "Stream",
    "StreamStatistics",
    "StreamUse",
    "Summary",
    "Trace",
    "current_stream",
    "default_race_check",
]
