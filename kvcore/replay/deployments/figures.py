# SPDX-License-Identifier: Apache-2.0
"""The figures that a deployment's file may have: of the model, of the device, and its own.

A figure of a deployment takes the place of the model's or the device's of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcore.errors import fail, shown
from kvcore.offload.checks import check_choice
from kvcore.replay.models.profile import BASES, MODEL_FIGURES, ModelFigure
from kvcore.runtime.profile import FIGURES, Figure

__all__ = ["OWN_FIGURES", "SERVES", "DeploymentFigure", "meaning_of", "read_figures"]

#: How a layer gets its rows.
SERVES = ("ahead", "in order")
#: Figures of a deployment's own: what each is, least, most.
OWN_FIGURES: dict[str, tuple[str, float, float]] = {
    "serve": (
        "ahead: rows are read while the layer before computes, as the decode engine launches it;"
        " in order: a layer waits for one kernel that reads them from both memories", 0, 0,
    ),
    "serve_overlap": (
        "in order: the share of the shorter of the reads of either memory that runs beside the"
        " longer", 0, 1,
    ),
    "plan_group": ("us of planning the rows of a group of layers, a step", 0, 1e6),
    "draft_misses": (
        "share of their rows that the layers that make drafts read from the host", 0, 1,
    ),
    "selection_layers": (
        "in order: layers whose selection takes device memory beside the pools; all where it is"
        " missing, none where attention reads the pools", 0, 4096,
    ),
    "prefill": ("prompt tokens a second of a replica", 1e-3, 1e12),
}  # fmt: skip
NAMES = ", ".join((*OWN_FIGURES, *MODEL_FIGURES, *FIGURES))
KEYS = {"value", "basis", "source"}
FITTED_KEYS = {"rows", "residuals"}
MAX_ROWS = 10_000


@dataclass(frozen=True, slots=True)
class DeploymentFigure:
    """A figure, its basis and source.

    rows, residuals: of a fitted one: to how many rows, and what the fit leaves of each, relatively.
    """

    value: float | str | tuple[int, ...]
    basis: str
    source: str
    rows: int | None = None
    residuals: tuple[float, ...] = ()

    @property
    def number(self) -> float:
        """The value of a figure that is a number."""
        assert isinstance(self.value, int | float)
        return float(self.value)

    def of_model(self) -> ModelFigure:
        """As a model's profile has it."""
        return ModelFigure(self.value, self.basis, self.source)

    def of_device(self) -> Figure:
        """As a device's profile has it."""
        # (the value as it is: a whole number may be beyond any float, which the profile refuses)
        return Figure(self.value, self.basis, self.source)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """As a TOML file has it."""
        value = list(self.value) if isinstance(self.value, tuple) else self.value
        found: dict[str, Any] = {"value": value, "basis": self.basis, "source": self.source}
        if self.rows is not None:
            found |= {"rows": self.rows, "residuals": list(self.residuals)}
        return found


def meaning_of(key: str) -> str:
    """What a figure is, and its unit."""
    if key in FIGURES:
        return f"{key} of the device, {FIGURES[key][0]}"
    return (OWN_FIGURES | MODEL_FIGURES)[key][0]


def read_figures(data: Any, where: str) -> dict[str, DeploymentFigure]:
    """The figures of a table of a TOML file.

    Raises ParamInvalidError for one that is unknown or of another form.  Values of the model's and
    the device's figures are checked where these are made.
    """
    if not isinstance(data, Mapping):
        fail(where, "tables of value, basis and source", shown(data)[:80])
    return {key: _figure(key, entry, f"{where}.{key}") for key, entry in data.items()}


def _figure(key: str, entry: Any, where: str) -> DeploymentFigure:
    if key not in OWN_FIGURES and key not in MODEL_FIGURES and key not in FIGURES:
        fail(where, f"one of {NAMES}", "an unknown figure")
    if not isinstance(entry, dict) or not set(entry) >= KEYS or set(entry) - KEYS - FITTED_KEYS:
        fail(where, "a table of value, basis and source", shown(entry)[:80])
    value, basis, source = (entry[name] for name in ("value", "basis", "source"))
    check_choice(f"{where}.basis", basis, BASES)
    if not isinstance(source, str) or not source:
        fail(f"{where}.source", "where the figure comes from", shown(source)[:80])
    rows, residuals = entry.get("rows"), entry.get("residuals", [])
    fitted = basis == "fitted"
    if fitted != (rows is not None) or fitted != ("residuals" in entry):
        fail(where, "rows and residuals of a fitted figure, and of no other", basis)
    if rows is not None:
        if type(rows) is not int or not 1 <= rows <= MAX_ROWS:
            fail(f"{where}.rows", f"to how many rows it is fitted, 1 to {MAX_ROWS}", shown(rows))
        good = isinstance(residuals, list) and len(residuals) <= MAX_ROWS
        if not good or not all(type(x) in (int, float) and -1e9 < x < 1e9 for x in residuals):
            fail(f"{where}.residuals", "a list of numbers", shown(residuals)[:80])
    if isinstance(value, list):
        value = tuple(value)
    if key == "serve":
        check_choice(f"{where}.value", value, SERVES)
    elif key in OWN_FIGURES:
        what, low, high = OWN_FIGURES[key]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not low <= value <= high:
            fail(f"{where}.value", f"{what}: a number from {low:g} to {high:g}", shown(value)[:80])
    elif key in FIGURES and (not isinstance(value, int | float) or isinstance(value, bool)):
        fail(f"{where}.value", f"a number, {FIGURES[key][0]}", shown(value)[:80])
    return DeploymentFigure(value, basis, source, rows, tuple(residuals))
