# SPDX-License-Identifier: Apache-2.0
"""The generators of top-k ids by name, and their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import fail, shown
from kvcore.offload.checks import check_choice
from kvcore.replay.models.profile import BASES
from kvcore.replay.traces.synthetic_ids import ScoreIds, ScoreModel, TurnoverIds

__all__ = ["IdSource", "MadeIds"]

DEFAULTS: dict[str, dict[str, float]] = {
    "scores": asdict(ScoreModel()),
    "turnover": {"overlap": 0.5885, "reuse": 1.0, "distance": 6.0},
}


class IdSource(Protocol):
    """The ids of one request in one group of layers."""

    def next(self, num_tokens: int) -> NDArray[np.int32]:
        """int32 [topk] of a step that sees ``num_tokens`` tokens; -1 fills what is not there."""


@dataclass(frozen=True, slots=True)
class MadeIds:
    """A generator of ids: ``scores`` (`ScoreIds`) or ``turnover`` (`TurnoverIds`).

    values: its parameters, by name; those that are missing have their defaults.
    basis, source: as of every figure.
    Raises ParamInvalidError for an unknown generator or parameter, and for a value that it refuses.
    """

    kind: str = "turnover"
    values: Mapping[str, float] = field(default_factory=dict)
    basis: str = "assumed"
    source: str = "the defaults of the generator"

    def __post_init__(self) -> None:
        check_choice("ids.kind", self.kind, DEFAULTS)
        check_choice("ids.basis", self.basis, BASES)
        for name in self.values:
            if name not in DEFAULTS[self.kind]:
                known = ", ".join(DEFAULTS[self.kind])
                fail(f"ids.{name}", f"one of {known} for {self.kind}", "an unknown parameter")
        self.make(1, 0)

    @classmethod
    def of(cls, data: Any) -> MadeIds:
        """Read from a table of a TOML file: kind, basis, source and parameters."""
        if not isinstance(data, Mapping) or not {"kind", "basis", "source"} <= set(data):
            fail("ids", "a table of kind, basis, source and parameters", shown(data)[:80])
        values = {key: data[key] for key in data if key not in ("kind", "basis", "source")}
        for key in ("basis", "source"):
            if not isinstance(data[key], str) or not data[key]:
                fail(f"ids.{key}", "a text", shown(data[key])[:80])
        return cls(data["kind"], values, data["basis"], data["source"])

    def make(self, topk: int, seed: int) -> IdSource:
        """The ids of one request and group, from its first step on."""
        if self.kind == "scores":
            return ScoreIds(topk, model=ScoreModel(**self.values), seed=seed)
        return TurnoverIds(topk, seed=seed, **self.values)

    def of_request(self, context: int, group: int, topk: int, seed: int) -> IdSource:
        """The ids of one request in one group; they go by neither."""
        return self.make(topk, seed)

    def to_dict(self) -> dict[str, Any]:
        """The table of a TOML file, with all parameters."""
        return {
            "kind": self.kind, "basis": self.basis, "source": self.source,
            **DEFAULTS[self.kind], **self.values,
        }  # fmt: skip
