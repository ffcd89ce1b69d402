# SPDX-License-Identifier: Apache-2.0
"""A device's figures, for the model clock and the count of its memory.

A profile is a set of figures.  Every figure says where it comes from: ``measured`` (by whom and
how), ``published`` (with its source), ``fitted`` (to which rows, and what they leave) or
``assumed`` (with the reasoning), so that a prediction can say how much of it rests on what.  A2, A3
and 950 ship as TOML files in this folder; ``DeviceProfile.load`` reads one's own in the same
form::

    name = "A3"
    note = "one die"

    [h2d_bandwidth]
    value = 40            # in the unit that FIGURES gives
    basis = "assumed"
    source = "640 GB/s of four CPUs over 16 dies"

A profile with ``like = "A3"`` computes as fast as that device and differs in what the figures say:
a model's step times of an A3 may be used with it.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcore.errors import ParamInvalidError, in_words, shown
from kvcore.files import read_bounded

__all__ = ["FIGURES", "RESOURCES", "DeviceProfile", "Figure"]

#: Beyond these no figure means anything, and sums of times would lose their order.
LEAST, MOST = 1e-9, 1e9
#: A profile has some thousand bytes.
MAX_FILE_BYTES = 16 * 2**20

BASES = ("measured", "published", "fitted", "assumed")

#: Every figure of a profile: its unit, and whether zero is allowed.
FIGURES: dict[str, tuple[str, bool]] = {
    "capacity": ("GiB of device memory", False),
    "launch_cost": ("us of the host's time a launch takes", True),
    "event_cost": ("us of the host's time a record or a wait takes", True),
    "query_cost": ("us of the host's time a query takes", False),
    "call_time": ("us a host function takes", True),
    "host_copy_bandwidth": ("GB/s of a copy from host memory to host memory", False),
    "pageable_share": ("share of a link's bandwidth that pageable memory reaches", False),
    "compute_latency": ("us", True),
    "compute_descriptor": ("us a contiguous piece", True),
    "hbm_bandwidth": ("GB/s", False),
    "hbm_latency": ("us", True),
    "hbm_descriptor": ("us a contiguous piece", True),
    "h2d_bandwidth": ("GB/s", False),
    "h2d_latency": ("us", True),
    "h2d_descriptor": ("us a contiguous piece", True),
    "d2h_bandwidth": ("GB/s", False),
    "d2h_latency": ("us", True),
    "d2h_descriptor": ("us a contiguous piece", True),
}
#: What serves one operation at a time, in the order of the numbers below.
RESOURCES = ("compute", "hbm", "h2d", "d2h")
COMPUTE, HBM, H2D, D2H = range(4)


@dataclass(frozen=True, slots=True)
class Figure:
    """One number: its value (unit in FIGURES), its basis and where it comes from."""

    value: float
    basis: str
    source: str


class DeviceProfile:
    """The figures of one device; one A3 profile is one die, not a card.

    ``profile["h2d_bandwidth"]`` is a :class:`Figure`.  Raises ParamInvalidError for a figure
    that is missing, unknown, not finite, negative, or zero where that makes no sense, and for
    one without a basis or a source.
    """

    def __init__(
        self, name: str, figures: dict[str, Figure], note: str = "", like: str = ""
    ) -> None:
        self.name = name
        self.note = note
        if not isinstance(like, str):
            raise _invalid("like", "the name of a device that computes as fast", shown(like))
        self.like = like
        if not isinstance(figures, dict):
            raise _invalid("figures", "a dict of figures", type(figures).__name__)
        for key in figures:
            if key not in FIGURES:
                raise _invalid(key, "one of " + ", ".join(FIGURES), "an unknown figure")
        for key, (unit, zero_allowed) in FIGURES.items():
            if key not in figures:
                raise _invalid(key, f"a figure in {unit}", "nothing")
            figure = figures[key]
            if not isinstance(figure, Figure):
                raise _invalid(key, "a Figure", type(figure).__name__)
            value = figure.value
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise _invalid(key, f"a number, in {unit}", shown(value))
            if not value >= 0 or value == math.inf or (value == 0 and not zero_allowed):
                bound = "a finite number >= 0" if zero_allowed else "a finite number > 0"
                raise _invalid(key, f"{bound}, in {unit}", shown(value))
            if value and not LEAST <= value <= MOST:
                raise _invalid(key, f"{LEAST:.0e} to {MOST:.0e}, in {unit}", shown(value))
            if not isinstance(figure.basis, str) or figure.basis not in BASES:
                raise _invalid(f"{key}.basis", "one of " + ", ".join(BASES), shown(figure.basis))
            if not isinstance(figure.source, str) or not figure.source:
                raise _invalid(f"{key}.source", "where the figure comes from", "nothing")
        if figures["pageable_share"].value > 1:
            seen = shown(figures["pageable_share"].value)
            raise _invalid("pageable_share", "a share from 0 to 1", seen)
        self.figures: dict[str, Figure] = {key: figures[key] for key in FIGURES}
        self.capacity_bytes: int = int(self.value("capacity") * 2**30)
        # (us, us a piece, us a byte) of each resource, in RESOURCES' order
        self.service: tuple[tuple[float, float, float], ...] = tuple(
            (
                self.value(f"{resource}_latency"),
                self.value(f"{resource}_descriptor"),
                0.0 if resource == "compute" else 1e-3 / self.value(f"{resource}_bandwidth"),
            )
            for resource in RESOURCES
        )

    def value(self, key: str) -> float:
        """The number alone, in the unit that FIGURES gives."""
        return float(self.figures[key].value)

    def __getitem__(self, key: str) -> Figure:
        return self.figures[key]

    def replace(
        self, *, basis: str = "assumed", source: str = "given by the caller", **values: float
    ) -> DeviceProfile:
        """A profile with other values for some figures, all of one basis and source."""
        figures = dict(self.figures)
        for key, value in values.items():
            figures[key] = Figure(value, basis, source)
        return DeviceProfile(self.name, figures, self.note, self.like)

    @classmethod
    def load(cls, path: str | Path) -> DeviceProfile:
        """Read a TOML file; see the module for its form."""
        if not isinstance(path, str | Path):
            raise _invalid("path", "the path of a TOML file", type(path).__name__)
        try:
            data = tomllib.loads(read_bounded(path, MAX_FILE_BYTES, "a TOML file").decode())
        except ParamInvalidError:
            raise
        except OSError as error:
            raise _invalid("profile", "a readable TOML file", f"{path}: {error}") from error
        # not TOML, not UTF-8, no path at all; or values within each other without end
        except (ValueError, RecursionError) as error:
            raise _invalid("profile", "a TOML file", f"{path}: {error}") from error
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> DeviceProfile:
        """A profile from a mapping of the form that a profile's file has."""
        if not isinstance(data, dict):
            raise _invalid("profile", "a dict, as a TOML file gives", type(data).__name__)
        name = data.get("name")
        if not isinstance(name, str) or not name:
            raise _invalid("name", "the profile's name", shown(name))
        figures: dict[str, Figure] = {}
        for key, entry in data.items():
            if key in ("name", "note", "like"):
                continue
            if not isinstance(entry, dict):
                raise _invalid(key, "a table with value, basis and source", shown(entry))
            extra = set(entry) - {"value", "basis", "source"}
            if extra:
                raise _invalid(key, "value, basis and source alone", ", ".join(sorted(extra)))
            figures[key] = Figure(
                entry.get("value", math.nan),
                in_words(entry.get("basis", "")),
                in_words(entry.get("source", "")),
            )
        return cls(name, figures, in_words(data.get("note", "")), data.get("like", ""))

    @classmethod
    def named(cls, name: str) -> DeviceProfile:
        """A profile that ships: "A2", "A3" (one die) or "950"."""
        if not isinstance(name, str) or name not in SHIPPED:
            raise ParamInvalidError(
                f"profile: expected one of {', '.join(SHIPPED)}, a DeviceProfile or None, "
                f"got {name!r}",
                argument="profile",
                seen=name,
                expected=tuple(SHIPPED),
            )
        return cls.load(Path(__file__).with_name(SHIPPED[name]))

    def __repr__(self) -> str:
        return f"DeviceProfile({self.name!r})"


SHIPPED = {"A2": "a2.toml", "A3": "a3.toml", "950": "a950.toml"}


def _invalid(key: str, expected: str, seen: str) -> ParamInvalidError:
    return ParamInvalidError(
        f"{key}: expected {expected}, got {seen}", argument=key, seen=seen, expected=expected
    )
