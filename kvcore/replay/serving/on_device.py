# SPDX-License-Identifier: Apache-2.0
"""The baseline: no offload, all caches in device memory beside the weights.

A step is the model's computation and the writing of its new rows; nothing is served from a pool
or read from the host.  What limits it is capacity: as many blocks as the device has room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.offload.decode.result import StepResult
from kvcore.replay.report.report import Mismatch
from kvcore.replay.serving.accounted import Accounted, Clocked, RunLoad
from kvcore.replay.serving.decoding import Decoding
from kvcore.replay.serving.fit import device_blocks
from kvcore.replay.serving.offloaded import StepLoad
from kvcore.replay.traces.reader import TraceRequest

__all__ = ["OnDevice"]


class OnDevice(Accounted):
    """The full caches are on the device (``policy="none"``); requests wait for room there."""

    how = "without offload"
    sends_to_host = False

    def _num_blocks(self) -> int:
        return device_blocks(self.model, self.options, self.profile)

    def _take(self, requests: Sequence[TraceRequest]) -> None:
        pass

    def _move(
        self, load: StepLoad, states: Sequence[Decoding]
    ) -> tuple[NDArray[np.float64], StepResult | None]:
        return np.zeros((len(self.groups), 3)), None

    def _move_run(self, load: RunLoad) -> NDArray[np.float64]:
        return np.zeros((len(load.compute_us), len(self.groups), 3))

    def _clocked_run(
        self, rows: NDArray[np.float64], load: RunLoad, of: NDArray[np.int64]
    ) -> Clocked:
        nothing = np.zeros(len(of))
        written = np.full(len(of), float(len(load.who)))
        return rows, written, nothing, nothing, load.compute_us[of] / self.model.layers

    def _held(self, load: StepLoad) -> int:
        return 0  # all of it is in blocks

    def _clocked(
        self, rows: NDArray[np.float64], load: StepLoad
    ) -> tuple[NDArray[np.float64], float, float, float, float]:
        return rows, int(load.tokens.sum()), 0, 0, load.compute_us / self.model.layers

    @property
    def verified(self) -> int:  # type: ignore[override]
        """Zero: nothing is moved, so nothing is verified."""
        return 0

    @property
    def mismatches(self) -> list[Mismatch]:  # type: ignore[override]
        """Empty, since nothing is verified."""
        return []

    def _ids_report(self) -> dict[str, Any] | None:
        return None

    def close(self) -> None:
        """Note the last figures; there is nothing to give back."""
        if not self._closed:
            self._closed = True
            self._last_look()
