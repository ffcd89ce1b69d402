# SPDX-License-Identifier: Apache-2.0
"""Measured steps of a deployment: which of them figures are fitted to, and which are predicted.

A TOML file (``docs/predicting.md`` describes it)::

    name = "what was measured"
    deployment = "mine.toml"      # one that ships, or a file beside this one
    free = ["step_fixed", "h2d_descriptor"]
    per_mode = ["step_fixed"]     # of the free ones: each mode has one of its own

    [workload]                    # of all rows that do not say otherwise
    input = 65536
    output = 1024

    [[rows]]
    name = "8K pool"
    policy = "fifo"
    pool = 8192
    batch = 4                     # of a replica
    ms = 100.55                   # or tokens_per_s, of a replica
    use = "fit"                   # fit, predict, table or show
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcore.errors import fail, in_words, shown
from kvcore.offload.checks import check_choice, check_integer, check_path
from kvcore.replay.deployments.deployment import DEPLOYMENTS, Deployment
from kvcore.replay.deployments.figures import DeploymentFigure, read_figures
from kvcore.replay.deployments.step_table import StepTable
from kvcore.replay.models.profile import read_text

__all__ = ["PUBLISHED", "USES", "MeasuredRow", "Measurements"]

FOLDER = Path(__file__).parent / "published"
#: Measurements that ship, by name, and their files.
PUBLISHED = {
    "glm-5.2": "glm_5_2.toml",
    "deepseek-v3.2": "deepseek_v3_2.toml",
    "hisparse": "hisparse.toml",
}
#: table: a point of the deployment's table of steps; show: printed, neither fitted nor judged.
USES = ("fit", "predict", "table", "show")
KEYS = (
    "name", "deployment", "source", "free", "per_mode", "workload", "modes", "assumed", "rows",
)  # fmt: skip
ROW_KEYS = (
    "name", "mode", "policy", "pool", "batch", "input", "output", "drafts", "ms", "tokens_per_s",
    "use", "independent", "because", "against", "ratio",
)  # fmt: skip
#: Parameters of a deployment's ids that may be free.
IDS = ("ids.overlap", "ids.reuse", "ids.distance")
MAX_ROWS = 1000
#: Of all requests of a row: its trace is made.
MAX_TOKENS = 2**27


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """One measured step.

    batch:  requests of a replica, each of ``input`` tokens and ``output`` more.
    ms:     of a step; worked out of tokens a second where these were measured.
    against: the name of the row that ``ratio`` (of tokens a second) is to.
    independent: whether nothing that was fitted to follows from this row; because: why, or why not.
    """

    name: str
    mode: str
    policy: str
    pool: int | None
    batch: int
    input: int
    output: int
    drafts: int | None
    ms: float
    measured: str
    use: str
    independent: bool
    because: str
    against: str | None
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Measurements:
    """A file of measured steps, checked.

    free, per_mode: figures that are fitted, and which of them each mode has for itself.
    modes:   figures of modes other than the deployment's own.
    assumed: what the source does not say, and what is taken instead.
    """

    name: str
    deployment: Deployment
    source: str
    free: tuple[str, ...]
    per_mode: tuple[str, ...]
    modes: Mapping[str, Mapping[str, DeploymentFigure]]
    assumed: Mapping[str, str]
    rows: tuple[MeasuredRow, ...]

    @property
    def mode(self) -> str:
        """The mode that the deployment's own figures are of."""
        return self.rows[0].mode

    def of(self, use: str) -> list[MeasuredRow]:
        """The rows of one use."""
        return [row for row in self.rows if row.use == use]

    def deployment_of(self, mode: str, base: Deployment | None = None) -> Deployment:
        """The deployment of a mode."""
        base = self.deployment if base is None else base
        return base.with_figures(self.modes[mode]) if mode in self.modes else base

    def table(self) -> StepTable | None:
        """The table of steps that the rows without offload give; None: there are none."""
        rows = sorted(self.of("table"), key=lambda row: row.batch)
        if not rows:
            return None
        context = rows[0].input + rows[0].output / 2
        us = tuple((row.ms * 1e3,) for row in rows)
        batches = tuple(row.batch for row in rows)
        return StepTable(batches, (context,), us, "measured", self.source or self.name)

    @classmethod
    def find(cls, name: str) -> Measurements:
        """Measurements that ship, or a TOML file by its path.  Raises ParamInvalidError."""
        name = check_path("measurements", name)
        if name in PUBLISHED:
            return cls.load(FOLDER / PUBLISHED[name])
        if name.endswith(".toml"):
            return cls.load(name)
        listed = ", ".join(PUBLISHED)
        fail("measurements", f"one of {listed}, or a .toml file", repr(name))

    @classmethod
    def load(cls, path: str | Path) -> Measurements:
        """Read a TOML file; see the module for its form.  Raises ParamInvalidError."""
        path = Path(check_path("measurements", path))
        text = read_text(path, "measurements")
        try:
            data = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            fail("measurements", "a TOML file", f"{path}: {error}")
        unknown = [key for key in data if key not in KEYS]
        if unknown:
            fail(unknown[0], "one of " + ", ".join(KEYS), "an unknown key")
        name = data.get("name")
        if not isinstance(name, str) or not name:
            fail("name", "what was measured", shown(name)[:80])
        deployment = _deployment(data.get("deployment"), path.parent)
        free, per_mode = (_names(data.get(key, []), key) for key in ("free", "per_mode"))
        for key in free:
            if key not in (*deployment.timing(), *IDS):
                listed = ", ".join((*deployment.timing(), *IDS))
                fail("free", f"figures of {deployment.name} ({listed})", repr(key)[:60])
            if key in IDS and (deployment.ids is None or deployment.ids.kind != "turnover"):
                fail("free", f"ids of the kind turnover in {deployment.name} for {key}", "others")
        for key in per_mode:
            if key not in free or key in IDS:
                fail("per_mode", "figures that are free", repr(key)[:60])
        workload = data.get("workload", {})
        if not isinstance(workload, dict) or set(workload) - {"input", "output"}:
            fail("workload", "a table of input and output", shown(workload)[:80])
        entries = data.get("rows")
        if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_ROWS:
            fail("rows", f"1 to {MAX_ROWS} rows", shown(entries)[:80])
        rows = tuple(
            _row(entry, f"rows[{place}]", workload, deployment)
            for place, entry in enumerate(entries)
        )
        _check_rows(rows)
        modes = data.get("modes", {})
        if not isinstance(modes, dict):
            fail("modes", "tables of figures, by mode", shown(modes)[:80])
        assumed = data.get("assumed", {})
        if not isinstance(assumed, dict) or not all(isinstance(x, str) for x in assumed.values()):
            fail("assumed", "a table of texts", shown(assumed)[:80])
        return cls(
            name, deployment, in_words(data.get("source", "")), free, per_mode,
            {key: read_figures(entry, f"modes.{key}") for key, entry in modes.items()},
            assumed, rows,
        )  # fmt: skip


def _deployment(name: Any, folder: Path) -> Deployment:
    text = check_path("deployment", name)
    beside = folder / text
    return Deployment.load(beside) if text not in DEPLOYMENTS and beside.is_file() else (
        Deployment.find(text)
    )  # fmt: skip


def _names(data: Any, key: str) -> tuple[str, ...]:
    if not isinstance(data, list) or not all(isinstance(name, str) for name in data):
        fail(key, "a list of figures", shown(data)[:80])
    if len(set(data)) != len(data):
        fail(key, "each figure once", shown(data)[:80])
    return tuple(data)


def _row(entry: Any, where: str, workload: Mapping[str, Any], of: Deployment) -> MeasuredRow:
    if not isinstance(entry, dict):
        fail(where, "a table", shown(entry)[:80])
    unknown = [key for key in entry if key not in ROW_KEYS]
    if unknown:
        fail(f"{where}.{unknown[0]}", "one of " + ", ".join(ROW_KEYS), "an unknown key")
    found = {"mode": "", "use": "predict", "because": "", "independent": False, **workload, **entry}
    for key in ("name", "mode", "because"):
        if not isinstance(found.get(key), str) or (key == "name" and not found[key]):
            fail(f"{where}.{key}", "a text", shown(found.get(key))[:80])
    check_choice(f"{where}.use", found["use"], USES)
    policies = ("previous", "lru", "fifo", "arc", "none")
    named = found.get("policy", of.serving.get("policy"))
    policy = check_choice(f"{where}.policy", named, policies)
    for key, low, high in (("batch", 1, 4096), ("input", 1, 2**24), ("output", 2, 2**20)):
        check_integer(f"{where}.{key}", found.get(key), low, high)
    tokens = found["batch"] * (found["input"] + found["output"])
    if tokens > MAX_TOKENS:
        fail(f"{where}.batch", f"at most {MAX_TOKENS} tokens of all requests", tokens)
    pool = found.get("pool")
    if pool is not None:
        check_integer(f"{where}.pool", pool, 1, 2**28 - 1)
    drafts = found.get("drafts")
    if drafts is not None:
        check_integer(f"{where}.drafts", drafts, 0, 63)
    if type(found["independent"]) is not bool:
        fail(f"{where}.independent", "true or false", shown(found["independent"])[:80])
    given = [key for key in ("ms", "tokens_per_s") if key in found]
    if len(given) != 1:
        fail(where, "either ms or tokens_per_s", " and ".join(given) or "neither")
    value = _number(found[given[0]], f"{where}.{given[0]}")
    ms = value
    if given[0] == "tokens_per_s":
        if drafts or (drafts is None and of.serving.get("drafts")):
            fail(f"{where}.tokens_per_s", "ms where there are drafts", "tokens a second")
        ms = found["batch"] / value * 1e3
    ratio, against = found.get("ratio"), found.get("against")
    if (ratio is None) != (against is None) or not isinstance(against, str | None):
        fail(f"{where}.ratio", "together with the row that it is against", "one of them")
    if ratio is not None:
        _number(ratio, f"{where}.ratio")
    if found["use"] == "table" and policy != "none":
        fail(f"{where}.policy", "none in a row of the table", repr(policy))
    return MeasuredRow(
        found["name"], found["mode"], policy, pool, found["batch"], found["input"],
        found["output"], drafts, ms, given[0], found["use"], found["independent"],
        found["because"], against, ratio,
    )  # fmt: skip


def _number(value: Any, where: str) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not 0 < value < 1e9 or not math.isfinite(value):
        fail(where, "a number above 0", shown(value)[:80])
    return float(value)


def _check_rows(rows: tuple[MeasuredRow, ...]) -> None:
    names = [row.name for row in rows]
    for place, row in enumerate(rows):
        if row.name in names[:place]:
            fail(f"rows[{place}].name", "each name once", repr(row.name)[:60])
        if row.against is not None and row.against not in names:
            fail(f"rows[{place}].against", "the name of a row", repr(row.against)[:60])
    table = [row for row in rows if row.use == "table"]
    if len({row.input + row.output for row in table}) > 1:
        fail("rows", "rows of the table with one input and output", "several")
    if len({row.batch for row in table}) != len(table):
        fail("rows", "rows of the table with a batch each", "one twice")
