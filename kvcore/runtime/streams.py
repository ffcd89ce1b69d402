# SPDX-License-Identifier: Apache-2.0
"""The streams of one device: names, queues and lanes of new ones, and the default stream."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from kvcore.runtime.queues._queue import Queue
from kvcore.runtime.stream import Stream

if TYPE_CHECKING:
    from kvcore.runtime.core import Core

__all__ = ["Streams"]


class Streams:
    """The streams of one device."""

    def __init__(self, core: Core, device: Any) -> None:
        self._core = core
        # (what makes a device's streams must not keep the device; each stream does)
        self._device = weakref.ref(device)
        self.all: list[Stream] = []
        self._names: dict[str, int] = {}
        self._sides: weakref.WeakKeyDictionary[Queue, list[Stream]] = weakref.WeakKeyDictionary()
        self._default: Stream | None = None
        core.default_queue = self._default_queue

    def new(self, name: str) -> Stream:
        """A new stream; a name that is taken gets a number behind it."""
        core = self._core
        with core.lock:
            index = len(self.all) + 1  # 0 is the host
            n = self._names[name] = self._names.get(name, 0) + 1
            unique = name if n == 1 else f"{name}#{n}"
            device = self._device()
            queue = Queue(core.executor, unique, index, device)
            queue.attach(core.driver.lane(queue))
            core.queues.append(queue)
            stream = Stream(core, device, queue)
            self.all.append(stream)
            if core.race is not None:
                core.race.lane(index, unique)
            if core.trace is not None:
                core.trace.names[index] = unique
        return stream

    @property
    def default(self) -> Stream:
        """The stream used where none is named, made when it is first asked for."""
        if self._default is None:
            with self._core.lock:
                if self._default is None:
                    self._default = self.new("default")
        return self._default

    @property
    def has_default(self) -> bool:
        """Whether the default stream was ever asked for."""
        return self._default is not None

    def _default_queue(self) -> Queue:
        return self.default.queue

    def sides(self, queue: Queue, n: int) -> list[Queue]:
        """Queues of hidden streams, for the forks of graphs replayed on a stream."""
        sides = self._sides.setdefault(queue, [])
        while len(sides) < n:
            sides.append(self.new(f"{queue.name}/fork{len(sides) + 1}"))
        return [side.queue for side in sides[:n]]
