# SPDX-License-Identifier: Apache-2.0
"""The parallel set-up of a deployment, and the options that its replays take by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvcore.errors import fail, shown
from kvcore.offload.checks import check_integer
from kvcore.replay.options import OffloadOptions, options_of

__all__ = ["SERVING", "Parallel", "read_parallel", "read_serving", "read_texts"]

MAX_DEVICES = 2**20
#: Options of a replay for which a deployment may have a default of its own.
SERVING = ("policy", "pool", "batch", "drafts", "accept", "write_policy", "chunk", "block_size")


@dataclass(frozen=True, slots=True)
class Parallel:
    """How the model is spread.

    tp: tensor parallelism within a replica; dp: replicas, each with requests of its own; pp: stages
    of a replica; ep: devices that share the experts, across replicas.
    """

    tp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "ep", "dp", "pp"):
            check_integer(f"parallel.{name}", getattr(self, name), 1, MAX_DEVICES)
        if self.devices > MAX_DEVICES:
            fail("parallel", f"at most {MAX_DEVICES} devices", self.devices)
        if self.ep > self.devices:
            fail("parallel.ep", f"at most the {self.devices} devices of tp * dp * pp", self.ep)

    @property
    def devices(self) -> int:
        """All devices."""
        return self.tp * self.dp * self.pp

    def __str__(self) -> str:
        parts = [f"{name.upper()} {value}" for name, value in asdict(self).items() if value > 1]
        return ", ".join(parts) or "one device"

    def to_dict(self) -> dict[str, int]:
        """By name."""
        return asdict(self)


def read_parallel(data: Any) -> Parallel:
    """From a TOML file's table.  Raises ParamInvalidError."""
    if not isinstance(data, Mapping) or set(data) - {"tp", "ep", "dp", "pp"}:
        fail("parallel", "a table of tp, ep, dp and pp", shown(data)[:80])
    return Parallel(**data)


def read_texts(data: Any, where: str) -> dict[str, str]:
    """A table of texts.  Raises ParamInvalidError."""
    if not isinstance(data, Mapping) or not all(isinstance(x, str) for x in data.values()):
        fail(where, "a table of texts", shown(data)[:80])
    return dict(data)


def read_serving(data: Any) -> dict[str, Any]:
    """Defaults of a replay's options.  Raises ParamInvalidError for one that cannot be."""
    if not isinstance(data, Mapping):
        fail("serving", "a table of " + ", ".join(SERVING), shown(data)[:80])
    declared = dict(options_of(OffloadOptions))
    for key, value in data.items():
        if key not in SERVING:
            fail(f"serving.{key}", "one of " + ", ".join(SERVING), "an unknown option")
        declared[key].check(f"serving.{key}", value)
    return dict(data)
