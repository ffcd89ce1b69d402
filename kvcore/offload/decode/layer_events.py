# SPDX-License-Identifier: Apache-2.0
"""Events by layer: when a layer's rows have been loaded, and when they have been saved.

The names follow vLLM's connector interface (``wait_for_layer_load``, ``wait_for_save``), with
streams instead of a blocked thread: a load or save of a layer is recorded on the stream that does
it, and the stream that needs it waits.  Layer ids may be any integers of at least 0, in any
number: {0, 2, 6} is as good as {0, 1, 2}.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvcore.errors import fail
from kvcore.offload.checks import check_device, check_integer, check_stream, each_of

if TYPE_CHECKING:
    from kvcore.runtime import Device, Event, Stream

__all__ = ["LayerEvents"]


class LayerEvents:
    """Two events a layer.  Waiting for what was never noted holds nothing back.

    layers: the ids.  Raises ParamInvalidError for an id that is none or comes twice.
    """

    def __init__(self, device: Device, layers: Iterable[int]) -> None:
        self._loads: dict[int, Event] = {}
        self._saves: dict[int, Event] = {}
        check_device("device", device)
        for place, layer in enumerate(each_of("layers", layers)):
            check_integer(f"layers[{place}]", layer, 0)
            if layer in self._loads:
                fail(f"layers[{place}]", "each layer once", layer)
            self._loads[layer], self._saves[layer] = device.event(), device.event()

    @property
    def layers(self) -> tuple[int, ...]:
        """The ids, in the order given."""
        return tuple(self._loads)

    def layer_loaded(self, layer: int, stream: Stream) -> None:
        """The layer's rows are there behind what the stream has now."""
        self._of(self._loads, layer).record(check_stream("stream", stream))

    def wait_for_layer_load(self, layer: int, stream: Stream) -> None:
        """The stream goes on when the layer's last noted load is done.  Returns at once."""
        _wait(self._of(self._loads, layer), stream)

    def layer_saved(self, layer: int, stream: Stream) -> None:
        """The layer's rows have left behind what the stream has now."""
        self._of(self._saves, layer).record(check_stream("stream", stream))

    def wait_for_layer_save(self, layer: int, stream: Stream) -> None:
        """The stream goes on when the layer's last noted save is done.  Returns at once."""
        _wait(self._of(self._saves, layer), stream)

    def wait_for_save(self, stream: Stream) -> None:
        """The stream goes on when the last noted save of every layer is done."""
        for event in self._saves.values():
            _wait(event, stream)

    async def synchronize(self) -> None:
        """Wait until every noted load and save is done.  Raises StreamError."""
        for event in (*self._loads.values(), *self._saves.values()):
            await event.synchronize()

    def synchronize_blocking(self) -> None:
        """Wait as `synchronize` does, holding this thread."""
        for event in (*self._loads.values(), *self._saves.values()):
            event.synchronize_blocking()

    def _of(self, events: dict[int, Event], layer: int) -> Event:
        if type(layer) is not int or layer not in events:
            fail("layer", f"one of {', '.join(map(str, events))}", repr(layer))
        return events[layer]


def _wait(event: Event, stream: Stream) -> None:
    # Waiting for nothing is legal, but a race check remarks on it as probably not meant.
    check_stream("stream", stream)
    if event.recorded:
        stream.wait_event(event)
