# SPDX-License-Identifier: Apache-2.0
"""A deployment: one model, on one device, in one parallel set-up and software, with its figures.

Every time of a replay comes from one: what a step computes, how a layer gets its rows, what
planning and the host's memory cost.  Those that ship are TOML files in this folder; one's own has
the same form (all parts but the name may be missing; ``docs/predicting.md`` describes each)::

    name = "my deployment"
    model = "glm-5.2"       # what `ModelProfile.find` takes, or a file beside this one
    device = "A3"           # a device that ships, or a file beside this one: the figures are of it

    [parallel]              # of a replica, which has its own requests
    tp = 1
    ep = 32
    dp = 32                 # replicas
    pp = 1

    [figures.step_fixed]
    value = 65000.0
    basis = "measured"      # measured, published, fitted (with rows and residuals) or assumed
    source = "where it comes from"

A figure takes the place of the model's or the device's of the same name.  Without a file a
deployment is what the model and the device say (`Deployment.of`).
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcore.errors import fail, in_words, shown
from kvcore.offload.checks import check_path
from kvcore.replay.deployments.figures import (
    OWN_FIGURES,
    DeploymentFigure,
    meaning_of,
    read_figures,
)
from kvcore.replay.deployments.setup import Parallel, read_parallel, read_serving, read_texts
from kvcore.replay.deployments.step_table import StepTable
from kvcore.replay.models.profile import (
    MODEL_FIGURES,
    REAL,
    STEP,
    ModelFigure,
    ModelProfile,
    read_text,
)
from kvcore.replay.traces.made_ids import MadeIds
from kvcore.runtime.profile import FIGURES, SHIPPED, DeviceProfile, Figure

__all__ = ["DEPLOYMENTS", "Deployment"]

#: Deployments that ship, by name, and their files in this folder.
DEPLOYMENTS: dict[str, str] = {
    "glm-5.2": "glm_5_2.toml",
    "deepseek-v3.2": "deepseek_v3_2.toml",
    "hisparse": "hisparse.toml",
}
FOLDER = Path(__file__).parent
KEYS = (
    "name", "model", "device", "note", "source", "parallel", "quantisation", "serving", "ids",
    "figures", "step_table", "on",
)  # fmt: skip
IN_ORDER = ("serve_overlap", "plan_group")


@dataclass(frozen=True, slots=True)
class Deployment:
    """What a replay's times come from.

    model:    what a token keeps, on one device of a replica (heads are divided by TP).
    device:   its figures; of a pipeline, all stages' memory together.
    figures:  those that the deployment's file gives, by name.
    table:    of a step's compute time; None: the linear figures of the model.
    ids:      which ids a replay makes; None: the generator's defaults.
    serving:  defaults of the replay's options.
    from_file: whether there is a file, or model and device alone.
    """

    name: str
    model: ModelProfile
    device: DeviceProfile
    figures: Mapping[str, DeploymentFigure] = field(default_factory=dict)
    table: StepTable | None = None
    ids: MadeIds | None = None
    parallel: Parallel = field(default_factory=Parallel)
    quantisation: Mapping[str, str] = field(default_factory=dict)
    serving: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    source: str = ""
    from_file: bool = False
    base: tuple[ModelProfile | None, DeviceProfile | None] = (None, None)
    others: Mapping[str, Any] = field(default_factory=dict)
    model_named: str = ""
    device_named: str = ""

    # -- its figures

    @property
    def serve(self) -> str:
        """How a layer gets its rows: ``ahead`` or ``in order``."""
        found = self.figures.get("serve")
        return "ahead" if found is None else str(found.value)

    def own(self, key: str, default: float = 0.0) -> float:
        """A figure of the deployment's own that is a number; the default where it is missing."""
        found = self.figures.get(key)
        return default if found is None else found.number

    def number(self, key: str) -> float:
        """A figure that is a number, wherever it is."""
        if key in OWN_FIGURES:
            return self.own(key)
        value = self.model[key].value if key in MODEL_FIGURES else self.device.value(key)
        assert isinstance(value, int | float)
        return float(value)

    def basis(self, key: str) -> str:
        """What a figure rests on."""
        if key in self.figures:
            return self.figures[key].basis
        return self.model[key].basis if key in MODEL_FIGURES else self.device[key].basis

    def timing(self) -> tuple[str, ...]:
        """The figures that the time of a step depends on, as numbers, in a fixed order."""
        keys = [] if self.table is not None else list(STEP)
        if self.serve == "in order":
            keys += ["serve_overlap", "plan_group"]
        keys += [key for key in ("plan_group", "draft_misses") if key in self.figures]
        keys += ["hbm_bandwidth", "hbm_latency", "hbm_descriptor", "h2d_bandwidth", "h2d_latency"]
        keys += ["h2d_descriptor", "compute_latency"]
        if self.serve == "ahead":
            keys += ["launch_cost", "event_cost"]
        return tuple(dict.fromkeys(keys))

    def assumed(self) -> tuple[str, ...]:
        """Of `timing` those that are assumed."""
        return tuple(key for key in self.timing() if self.basis(key) == "assumed")

    @property
    def digest(self) -> str:
        """16 hex digits of all that times and memory come from: equal ones give equal times."""
        said = {
            "model": {key: [f.value, f.basis] for key, f in self.model.figures.items()},
            "device": {key: [f.value, f.basis] for key, f in self.device.figures.items()},
            "own": {
                key: [f.value, f.basis]
                for key, f in sorted(self.figures.items())
                if key in OWN_FIGURES
            },
            "table": None if self.table is None else self.table.to_dict(),
            "ids": None if self.ids is None else self.ids.to_dict(),
            "parallel": self.parallel.to_dict(),
        }
        text = json.dumps(said, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    # -- others made of it

    def replace(
        self, *, basis: str = "assumed", source: str = "given by the caller", **values: float
    ) -> Deployment:
        """The same deployment with other numbers, all of one basis and source."""
        figures = {key: DeploymentFigure(value, basis, source) for key, value in values.items()}
        return self.with_figures(figures)

    def with_figures(
        self,
        figures: Mapping[str, DeploymentFigure],
        *,
        table: StepTable | None = None,
        ids: MadeIds | None = None,
    ) -> Deployment:
        """The same deployment with other figures, another table or other ids.

        Raises ParamInvalidError for figures that cannot be.
        """
        merged = {**self.figures, **figures}
        return _composed(
            self, self.base, merged, table or self.table, self.others,
            ids=ids or self.ids, device_named=self.device_named,
        )  # fmt: skip

    def on(self, name: str | None) -> Deployment:
        """The deployment on a device, by its name or file; None: the one that its figures are of.

        Raises ParamInvalidError for a device that it has no figures for.
        """
        if name is None:
            return self
        device = find_device(name, Path())
        own = self.base[1] if self.from_file else None
        names = (device.name, device.like)
        if not self.from_file:
            if self.model.device and self.model.device not in names:
                # Half of a prediction would be another device's.
                note = f": {self.model.note}" if self.model.note else ""
                expected = f"{self.model.device}, of which {self.model.name}'s step is{note}"
                fail("device", expected, device.name)
            return Deployment.of(self.model, device)
        if own is not None and own.name in names:
            kept = {
                key: figure
                for key, figure in self.figures.items()
                # What the profile changes is what is asked for.
                if key not in FIGURES or device.value(key) == own.value(key)
            }
            return _composed(
                self, (self.base[0], device), kept, self.table, self.others,
                ids=self.ids, device_named=name,
            )  # fmt: skip
        other = self.others.get(device.name, self.others.get(device.like))
        if other is None:
            has = ", ".join(([own.name] if own is not None else []) + list(self.others)) or "none"
            fail("device", f"a device that {self.name} has figures for ({has})", device.name)
        kept = {key: f for key, f in self.figures.items() if not _is_of_device(key)}
        # Nothing of a step's time is taken over from the other device.
        base = self.base[0]
        if base is not None:
            step = {key: f for key, f in base.figures.items() if key not in STEP}
            base = ModelProfile(base.name, step, base.note, "")
        return _composed(
            self, (base, device), {**kept, **other["figures"]}, other["table"], {},
            ids=self.ids, device_named=name,
        )  # fmt: skip

    # -- where it comes from

    @classmethod
    def of(cls, model: ModelProfile, device: DeviceProfile) -> Deployment:
        """What a model and a device say by themselves.

        Raises ParamInvalidError naming all figures of a step that are missing.
        """
        model.step_us(1, 1)  # raises the error that names what is missing
        return cls(model.name, model, device, base=(model, device))

    @classmethod
    def named(cls, name: str) -> Deployment:
        """A deployment that ships."""
        if not isinstance(name, str) or name not in DEPLOYMENTS:
            fail("deployment", "one of " + ", ".join(DEPLOYMENTS), shown(name)[:80])
        return cls.load(FOLDER / DEPLOYMENTS[name])

    @classmethod
    def find(cls, name: str) -> Deployment:
        """A deployment that ships, or a TOML file by its path."""
        name = check_path("deployment", name)
        if name in DEPLOYMENTS:
            return cls.named(name)
        if name.endswith(".toml"):
            return cls.load(name)
        fail("deployment", "one of " + ", ".join(DEPLOYMENTS) + ", or a .toml file", repr(name))

    @classmethod
    def load(cls, path: str | Path) -> Deployment:
        """Read a TOML file; see the module for its form.

        Raises ParamInvalidError naming what is wrong; figures that are missing are named together.
        """
        path = Path(check_path("deployment", path))
        text = read_text(path, "deployment")
        try:
            data = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # integers of thousands of digits too
            fail("deployment", "a TOML file", f"{path}: {error}")
        return cls.from_dict(data, path.parent)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], folder: Path) -> Deployment:
        """A deployment from a mapping of the form that a file has.

        folder: of the files that it names.
        """
        unknown = [key for key in data if key not in KEYS]
        if unknown:
            fail(unknown[0], "one of " + ", ".join(KEYS), "an unknown key")
        name = data.get("name")
        if not isinstance(name, str) or not name:
            fail("name", "the deployment's name", shown(name)[:80])
        for key in ("note", "source"):
            if not isinstance(data.get(key, ""), str):
                fail(key, "a text", shown(data[key])[:80])
        model = device = None
        if "model" in data:
            model = _find_model(data["model"], folder)
        if "device" in data:
            device = find_device(data["device"], folder)
        others = {}
        for key, entry in _mapping(data, "on").items():
            if not isinstance(entry, dict) or set(entry) - {"figures", "step_table"}:
                fail(f"on.{key}", "figures and a step_table", shown(entry)[:80])
            table = entry.get("step_table")
            others[key] = {
                "figures": read_figures(entry.get("figures", {}), f"on.{key}.figures"),
                "table": None if table is None else StepTable.of(table),
            }
        table, ids = data.get("step_table"), data.get("ids")
        bare = cls(
            name, ModelProfile.named("tiny"), DeviceProfile.named("A3"),
            parallel=read_parallel(data.get("parallel", {})),
            quantisation=read_texts(data.get("quantisation", {}), "quantisation"),
            serving=read_serving(data.get("serving", {})),
            note=in_words(data.get("note", "")), source=in_words(data.get("source", "")),
            from_file=True, model_named=_wherever(data.get("model", ""), folder),
        )  # fmt: skip
        return _composed(
            bare, (model, device), read_figures(data.get("figures", {}), "figures"),
            None if table is None else StepTable.of(table), others,
            ids=None if ids is None else MadeIds.of(ids),
            device_named=_wherever(data.get("device", ""), folder),
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """As a TOML file has it."""
        parts: dict[str, Any] = {
            "name": self.name, "model": self.model_named, "device": self.device_named,
            "note": self.note, "source": self.source, "parallel": self.parallel.to_dict(),
            "quantisation": dict(self.quantisation), "serving": dict(self.serving),
        }  # fmt: skip
        found = {key: value for key, value in parts.items() if value}
        if self.ids is not None:
            found["ids"] = self.ids.to_dict()
        found["figures"] = {key: f.to_dict() for key, f in self.figures.items()}
        if self.table is not None:
            found["step_table"] = self.table.to_dict()
        if self.others:
            found["on"] = {
                key: {
                    "figures": {name: f.to_dict() for name, f in entry["figures"].items()},
                    **({} if entry["table"] is None else {"step_table": entry["table"].to_dict()}),
                }
                for key, entry in self.others.items()
            }
        return found


def _mapping(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key, {})
    if not isinstance(value, Mapping):
        fail(key, "a table", shown(value)[:80])
    return value


def _is_of_device(key: str) -> bool:
    return key in FIGURES or key in STEP or key in ("plan_group", "serve", "serve_overlap")


def _wherever(name: Any, folder: Path) -> str:
    """How a file beside the deployment's is named from anywhere else."""
    text = in_words(name)
    beside = folder / text
    return str(beside.resolve()) if "." in text and beside.is_file() else text


def _find_model(name: Any, folder: Path) -> ModelProfile:
    text = check_path("model", name)
    beside = folder / text
    if text.endswith((".toml", ".json")) and beside.is_file():
        return ModelProfile.find(str(beside))
    return ModelProfile.find(text)


def find_device(name: Any, folder: Path) -> DeviceProfile:
    """A device that ships, or the profile in a TOML file (in ``folder`` first)."""
    text = check_path("device", name)
    if text.endswith(".toml"):
        beside = folder / text
        return DeviceProfile.load(beside if beside.is_file() else text)
    if text in SHIPPED:
        return DeviceProfile.named(text)
    fail("device", f"one of {', '.join(SHIPPED)}, or a .toml file", repr(text))


def _composed(
    like: Deployment,
    base: tuple[ModelProfile | None, DeviceProfile | None],
    figures: Mapping[str, DeploymentFigure],
    table: StepTable | None,
    others: Mapping[str, Any],
    *,
    ids: MadeIds | None,
    device_named: str,
) -> Deployment:
    """The deployment of a model, a device and figures that take the place of theirs."""
    model, device = base
    named_model = {} if model is None else dict(model.figures)
    named_device: dict[str, Figure] = {} if device is None else dict(device.figures)
    if model is not None and device is not None:
        names = (device.name, device.like)
        if model.device and model.device not in names:
            # The step of another device is none of this one's.
            named_model = {key: f for key, f in named_model.items() if key not in STEP}
    _refuse_missing(like.name, figures, {*named_model, *named_device}, table)
    for key, figure in figures.items():
        if key in MODEL_FIGURES:
            named_model[key] = figure.of_model()
        elif key in FIGURES:
            named_device[key] = figure.of_device()
    parallel = like.parallel
    _divide(named_model, named_device, parallel)
    model_name = like.name if model is None else model.name
    device_name = like.name if device is None else device.name
    made_model = ModelProfile(
        model_name, named_model, like.note or (model.note if model else ""), device_name
    )
    made_device = DeviceProfile(
        device_name, named_device, device.note if device else "", device.like if device else ""
    )
    return Deployment(
        like.name, made_model, made_device, dict(figures), table, ids, parallel,
        like.quantisation, like.serving, like.note, like.source, True, base, others,
        like.model_named, device_named,
    )  # fmt: skip


def _refuse_missing(
    name: str,
    figures: Mapping[str, DeploymentFigure],
    there: set[str],
    table: StepTable | None,
) -> None:
    """Raise for what no file gives: all of it at once."""
    needed = [key for key in MODEL_FIGURES if key not in REAL]
    needed += [] if table is not None else STEP
    if "serve" in figures and figures["serve"].value == "in order":
        needed += IN_ORDER
    needed += FIGURES
    missing = [key for key in needed if key not in figures and key not in there]
    if missing:
        listed = "; ".join(f"{key} ({meaning_of(key)})" for key in missing)
        more = f"{len(missing)} figures" if len(missing) > 1 else "a figure"
        fail("figures", f"{more} more of {name}: {listed}", "none of them")


def _divide(model: dict[str, ModelFigure], device: dict[str, Figure], parallel: Parallel) -> None:
    """What one device of a replica has: its heads, and all stages' memory."""
    heads = model["heads"].value
    if parallel.tp > 1 and type(heads) is int and heads > 1:
        if heads % parallel.tp and parallel.tp % heads:
            fail("parallel.tp", f"a divisor or a multiple of {heads} heads", parallel.tp)
        said = f"{heads} heads over tp {parallel.tp}: {model['heads'].source}"
        model["heads"] = ModelFigure(max(1, heads // parallel.tp), model["heads"].basis, said)
    if parallel.pp > 1:
        # The stages run one after the other: as one device with the memory of all.
        for figures, key in ((model, "weights"), (device, "capacity")):
            if key in figures:
                one: Any = figures[key]
                said = f"of {parallel.pp} stages: {one.source}"
                figures[key] = type(one)(one.value * parallel.pp, one.basis, said)
