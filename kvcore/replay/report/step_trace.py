# SPDX-License-Identifier: Apache-2.0
"""A trace of steps whose operations were not launched, for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvcore.files import write_whole

__all__ = ["StepTrace"]


class StepTrace:
    """A trace of at most ``max_events`` events; later steps are counted and not kept."""

    def __init__(self, max_events: int) -> None:
        self._max_events = max_events
        self._events: list[dict[str, Any]] = []
        self.dropped: int = 0

    def add(self, name: str, end_us: float, us: float, **values: float) -> None:
        """Add a span that ends at ``end_us``; its values become counters."""
        if len(self._events) + 1 + len(values) > self._max_events:
            self.dropped += 1
            return
        start = round(end_us - us, 3)
        span = {"ph": "X", "pid": 1, "tid": 1, "name": name, "ts": start, "dur": round(us, 3)}
        self._events.append(span)
        for key, value in values.items():
            counter = {"ph": "C", "pid": 1, "name": key, "ts": start, "args": {key: value}}
            self._events.append(counter)

    def save(self, path: str | Path, name: str) -> None:
        """Write it, whole or not at all; ``name`` is the process's."""
        head = {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": name}}
        events = {"traceEvents": [head, *self._events], "displayTimeUnit": "ms"}
        write_whole(path, json.dumps(events))
