# SPDX-License-Identifier: Apache-2.0
"""What a report is of, and how its figures are written so that the same run writes the same ones.

Sums of floating point numbers may differ in their last bits from one CPU to another, by the order
in which its instructions add.  Figures are therefore written with 12 significant digits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore.replay.models.profile import ModelProfile
    from kvcore.replay.traces.reader import TraceRequest
    from kvcore.runtime.profile import DeviceProfile

__all__ = ["DIGITS", "deployment_hash", "hashes_of", "settled", "trace_hash"]

DIGITS = 12


def trace_hash(requests: Iterable[TraceRequest]) -> str:
    """16 hexadecimal digits of what the requests are, in their order."""
    said = [(r.timestamp_ms, r.input_length, r.output_length, r.hash_ids) for r in requests]
    return _hash(repr(said))


def deployment_hash(model: ModelProfile, device: DeviceProfile) -> str:
    """16 hexadecimal digits of every figure of a model and of a device, with its basis."""
    figures = {key: (figure.value, figure.basis) for key, figure in model.figures.items()}
    own = {key: (figure.value, figure.basis) for key, figure in device.figures.items()}
    return _hash(repr((model.name, figures, device.name, own)))


def hashes_of(
    requests: Sequence[TraceRequest], model: ModelProfile, device: DeviceProfile
) -> dict[str, str]:
    """Of the trace and of the deployment: what two reports must have in common to be compared."""
    return {"trace": trace_hash(requests), "deployment": deployment_hash(model, device)}


def settled(value: Any) -> Any:
    """The same value with every float in it of `DIGITS` significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: settled(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [settled(inner) for inner in value]
    return value


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
