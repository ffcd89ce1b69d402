# SPDX-License-Identifier: Apache-2.0
"""Every option of a replay, declared once.

A field of one of the classes below is an option: its type and default, and with `option` what it
may be, what it means, where it belongs and whether a sweep may vary it.  The parser of the command
line, the axes of a sweep, the checks of `OffloadOptions` and the table in ``docs/replay.md`` are
made from these fields.  So an option is added here and used where it matters, and nowhere else.

This module imports the standard library and `kvcore.errors` only: the command line starts with it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal

from kvcore.errors import fail, shown

__all__ = [
    "GROUPS", "MAX_HEADS", "MAX_HEAD_SIZE", "MAX_LAYERS", "PREFILL_PROMPT_TOKENS", "PREFILL_SOURCE",
    "PREFILL_TOKENS_PER_S", "CacheOptions", "CommandOptions", "OffloadOptions", "Option", "axes",
    "default_of", "flags_of", "option", "options_of", "options_page",
]  # fmt: skip

#: Prompt tokens a second of one die.
PREFILL_TOKENS_PER_S = 3344.0
#: Of the prompts for which that rate was published.
PREFILL_PROMPT_TOKENS = 4096
PREFILL_SOURCE = (
    "6,688 tokens/s a package of two dies, DeepSeek-R1, 4K prompts: Zuo et al., Serving Large"
    " Language Models on Huawei CloudMatrix384, arXiv:2506.12708; for other models an assumption"
)
MAX_LAYERS = 4096
MAX_HEADS = 65_536
MAX_HEAD_SIZE = 65_536

#: Groups of the command line's help, in its order: name -> what stands above the options.
GROUPS = {
    "": "",
    "model": "",
    "cache": "",
    "serving": "",
    "offload": "Any of these, and the full cache is on the host: docs/replay.md, Offload.",
    "output": "",
    "several runs": "",
}
Kind = Literal["integer", "number", "text"]
#: Where options are held against a model and a device.
FIT = "kvcore.replay.serving.fit"


@dataclass(frozen=True, slots=True)
class Option:
    """What a field's type and default do not say of an option.

    group:   of `GROUPS`; meaning: for the help.
    kind:    of its values; low, high: of numbers; limit: the highest number that the command line
             takes, where that is more than ``high`` (None), which is then refused by name later.
    choices: the values that there are, or "module:NAME" of where they are listed.
    flags:   as it is written, where that is not the field's name; empty for an argument.
    said:    how the default is described, where it is not the field's.
    only:    the kind of replay that it makes or belongs to: "caches", "offload", "" for both.
    axis:    whether a sweep may vary it.
    written: whether it can be written on the command line at all.
    exclusive: a name that it shares with the options of which only one can be written.
    several: how many values it takes there: a number, or "+".
    nullable: whether None is a value too.
    """

    group: str
    meaning: str
    kind: Kind = "text"
    low: float = -math.inf
    high: float = math.inf
    limit: float | None = None
    choices: Sequence[str] | str = ()
    flags: tuple[str, ...] | None = None
    metavar: str | tuple[str, ...] = ""
    said: str | None = None
    only: Literal["caches", "offload", ""] = ""
    axis: bool = False
    written: bool = True
    exclusive: str = ""
    several: int | str | None = None
    nullable: bool = False

    def listed(self) -> Sequence[str]:
        """The choices; those that are listed elsewhere are imported now."""
        if not isinstance(self.choices, str):
            return self.choices
        module, _, name = self.choices.partition(":")
        found: Sequence[str] = tuple(getattr(importlib.import_module(module), name))
        return found

    def parse(self, text: str) -> Any:
        """A value from its text.  Raises ValueError for no number."""
        return {"integer": int, "number": float, "text": str}[self.kind](text)

    def check(self, name: str, value: object) -> None:
        """Raise ParamInvalidError for a value that the option cannot have."""
        if self.kind == "integer":
            good = type(value) is int and self.low <= value <= self.high
            what = f"an integer from {self.low} to {self.high}"
        elif self.kind == "number":
            number = isinstance(value, int | float) and not isinstance(value, bool)
            good = number and self.low <= value <= self.high and math.isfinite(value)  # type: ignore[operator, arg-type]
            what = f"a number from {self.low:g} to {self.high:g}"
            if self.low > 0:
                what = "a number above 0, or none"
        else:
            listed = self.listed()
            good = isinstance(value, str) and (not listed or value in listed)
            what = f"one of {', '.join(listed)}" if listed else "a text"
        if not good:
            fail(name, what, shown(value))


def option(default: Any, group: str, meaning: str, **more: Any) -> Any:
    """A field of an options class; ``more`` are the fields of `Option`."""
    return field(default=default, metadata={"option": Option(group, meaning, **more)})


@dataclass(frozen=True, slots=True)
class OffloadOptions:
    """Options of a replay with the full cache on the host; ``docs/replay.md`` says what each does.

    pool:       entries of a request and group on the device; None: four times the top-k.
    device:     "A2", "A3", "950", or the path of a profile; None: the deployment's, else "A3".
    batch:      requests at a time; drafts: draft tokens of each a step.
    accept:     the chance that a draft stands, when those before it do.
    prefill_tokens_per_s: of the device; None: another device computes prompts.
    host_blocks, block_size: the host's pool of blocks of tokens.
    chunk:      prompt tokens computed in a step.
    sample_requests, sample_layers: of the sampled fidelity, most that are real; sample_seed: of
                which they are.
    abort_share: share of requests that are aborted somewhere in their output.
    arrivals:   "order": all are there at once; "time": each at its timestamp.
    weights_gib: what weights and activations take on the device; None: as the model says.
    host_gib:   of host memory for the blocks; None: at most what a whole node has.
    slo, attain: limits of a request's latencies, and the share of requests that must meet them.
    ids:        path of a file of ids that requests chose; turnover: of the ids that are made.
    search:     "rate": find the highest rate of arrivals that holds the limits.
    baseline:   "auto": a run with offload is held against one without; "off": it is not.
    tiers:      where the prefixes of prompts are kept, with ``policy="none"``; None: on the device.
    tier_policy: which block of a full tier goes first; node_dies: dies that share the lower tiers.
    max_trace_events: kept for Perfetto.
    """

    fidelity: str = option(
        "sampled", "offload",
        "full: every row planned, every byte moved; sampled: those of some requests and layers",
        choices=("full", "sampled"), said="full when it is short", only="offload",
    )  # fmt: skip
    policy: str = option(
        "lru", "offload",
        "of the pool on the device: previous, lru, fifo, arc; none: no offload, all caches on it",
        choices="kvcore.replay.serving.fit:POLICIES", only="offload", axis=True,
    )  # fmt: skip
    pool: int | None = option(
        None, "offload", "entries of a request and indexer group", kind="integer", low=1,
        high=2**28 - 1, said="4 times what a step selects", only="offload", axis=True,
        nullable=True,
    )  # fmt: skip
    device: str | None = option(
        None, "offload", "A2, A3, 950 or a .toml", only="offload", axis=True, nullable=True,
        said="A3, or the deployment's",
    )  # fmt: skip
    batch: int = option(
        32, "serving", "requests that run at a time", kind="integer", low=1, high=4096,
        flags=("--batch", "--max-batch"), axis=True,
    )  # fmt: skip
    drafts: int = option(
        0, "offload", "draft tokens a step", kind="integer", low=0, high=63, only="offload",
        axis=True,
    )  # fmt: skip
    accept: float = option(
        0.8, "offload", "chance that a draft stands when those before it do", kind="number",
        low=0, high=1, metavar="P", only="offload",
    )  # fmt: skip
    prefill_tokens_per_s: float | None = option(
        PREFILL_TOKENS_PER_S, "offload", "of the device", kind="number", low=1e-3, high=1e12,
        only="offload", nullable=True,
    )  # fmt: skip
    host_blocks: int = option(
        65_536, "cache", "blocks of the pool; with offload the host's", kind="integer", low=1,
        high=2**24, limit=2**40, flags=("--blocks",), exclusive="size",
        said="with offload 65536, or what --host-gib holds; full 8192",
    )  # fmt: skip
    block_size: int = option(128, "cache", "tokens of a block", kind="integer", low=1, high=65_536)
    chunk: int = option(
        2048, "serving", "prompt tokens computed in one step", kind="integer", low=1, high=2**20
    )
    write_policy: str = option(
        "write_through", "offload", "when new rows go to the host: write_through, write_back",
        choices="kvcore.offload.decode.write_policy:WRITE_POLICIES", only="offload", axis=True,
    )  # fmt: skip
    seed: int = option(
        0, "", "of the workload: the generators, the tokens' bytes and ids, the drafts",
        kind="integer", low=0, high=2**64 - 1, axis=True,
    )  # fmt: skip
    sample_requests: int = option(
        64, "offload", "real requests of a sampled replay", kind="integer", low=1, high=2**31,
        only="offload",
    )  # fmt: skip
    sample_seed: int = option(
        0, "offload", "of the choice of the sample, with the workload fixed", kind="integer",
        low=0, high=2**64 - 1, only="offload", axis=True,
    )  # fmt: skip
    sample_layers: int = option(
        2, "offload", "real layers of a sampled replay", kind="integer", low=1, high=2**31,
        only="offload",
    )  # fmt: skip
    verify_samples: int = option(
        1000, "output", "tokens to read back and compare", kind="integer", low=0, high=10**9
    )
    abort_share: float = option(
        0.0, "offload", "share of requests aborted somewhere in their output", kind="number",
        low=0, high=1, metavar="P", only="offload",
    )  # fmt: skip
    arrivals: str = option(
        "order", "offload",
        "order: all requests are there at once; time: each at its timestamp",
        choices=("order", "time"), metavar="HOW", only="offload",
    )  # fmt: skip
    weights_gib: float | None = option(
        None, "offload", "GiB that weights and activations take on the device", kind="number",
        low=0, high=1e6, metavar="N", said="the model's figure", only="offload", nullable=True,
    )  # fmt: skip
    host_gib: float | None = option(
        None, "offload", "GiB of host memory for the blocks of one device", kind="number", low=0,
        high=1e6, metavar="N", said="128, of the default --blocks", only="offload", nullable=True,
    )  # fmt: skip
    slo: str | None = option(
        None, "offload", "limits that a good request meets, like ttft=2s,tpot=50ms (and e2e); a"
        " bare number is seconds", metavar="LIMITS", only="offload", nullable=True,
    )  # fmt: skip
    attain: float = option(
        0.9, "offload", "share of the requests that must be good for the limits to hold",
        kind="number", low=0, high=1, metavar="P", only="offload",
    )  # fmt: skip
    ids: str | None = option(
        None, "offload", "an .npz of ids that requests chose: ids_<n> [steps, layers, top-k] and"
        " context_<n> (docs/replay.md)", metavar="FILE", said="made", only="offload", nullable=True,
    )  # fmt: skip
    turnover: str | None = option(
        None, "offload", "of the ids that are made, like overlap=0.6,reuse=1,distance=6",
        metavar="VALUES", said="the deployment's, or the generator's", only="offload",
        nullable=True,
    )  # fmt: skip
    search: str | None = option(
        None, "offload", "rate: find the highest rate of arrivals at which the limits hold, with"
        " offload and without", choices=("rate",), metavar="WHAT", only="offload", nullable=True,
    )  # fmt: skip
    baseline: str = option(
        "auto", "offload",
        "auto: serve the trace without offload too, and say which is ahead; off: do not",
        choices=("auto", "off"), metavar="HOW", only="offload",
    )  # fmt: skip
    tiers: str | None = option(
        None, "offload",
        "keep the prefixes of prompts in tiers, like hbm=40GiB,dram=200GiB@50GB/s,ssd=2TiB@6GB/s:"
        " what a request finds there is loaded, not computed (docs/tiers.md)",
        metavar="TIERS", only="offload", nullable=True,
    )  # fmt: skip
    tier_policy: str = option(
        "lru", "offload",
        "which block of a full tier goes first: lru, lfu, length, arc or fifo, of all tiers or like"
        " hbm=lru,dram=arc", metavar="NAME", only="offload", axis=True,
    )  # fmt: skip
    node_dies: int = option(
        1, "offload", "dies of a node that share the tiers below the device, each an equal part",
        kind="integer", low=1, high=1024, only="offload", axis=True,
    )  # fmt: skip
    max_trace_events: int = option(
        0, "output", "events kept for Perfetto", kind="integer", low=0, high=10**8, written=False
    )

    def check(self, model: Any) -> tuple[Any, int]:
        """The device's profile and the pool's entries, for a `ModelProfile`.

        Raises ParamInvalidError for a value that cannot be, and for a model that does not fit.
        """
        # (imported when it is asked for: it needs models and devices)
        found: tuple[Any, int] = importlib.import_module(FIT).fit(model, self)
        return found

    def check_values(self) -> None:
        """Raise ParamInvalidError for a value that no model and device could make good."""
        for name, declared in options_of(OffloadOptions):
            value = getattr(self, name)
            if value is not None or not declared.nullable:
                declared.check(name, value)


_AXES = [f.name for f in fields(OffloadOptions) if f.metadata["option"].axis]


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Options of a replay into real caches that offload does not have."""

    layers: int | None = option(
        None, "model", "layers, each with caches of its own", kind="integer", low=1,
        high=MAX_LAYERS, only="caches",
    )  # fmt: skip
    num_heads: int | None = option(
        None, "model", "key-value heads", kind="integer", low=1, high=MAX_HEADS, only="caches"
    )
    head_size: int | None = option(
        None, "model", "elements of a key head", kind="integer", low=1, high=MAX_HEAD_SIZE,
        only="caches",
    )  # fmt: skip
    value_head_size: int | None = option(
        None, "model", "elements of a value head; 0: no value lane", kind="integer", low=0,
        high=MAX_HEAD_SIZE, only="caches",
    )  # fmt: skip
    dtype: str | None = option(
        None, "model", "type of the elements", choices="kvcore.replay.models.profile:DTYPE_NAMES",
        only="caches",
    )  # fmt: skip
    cache_mib: int = option(
        256, "cache", "MiB of all caches together", kind="integer", low=1, high=2**40,
        only="caches", exclusive="size",
    )  # fmt: skip
    layout: str = option(
        "Norm", "cache", "of the caches: Norm, NHSD, PA_NZ",
        choices="kvcore.replay.serving.caches:LAYOUTS", only="caches",
    )  # fmt: skip
    threads: int | None = option(
        None, "serving", "threads of the operator", kind="integer", low=1, high=1024,
        only="caches",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class CommandOptions:
    """Options of the command ``kvcore replay`` itself: what it reads, writes and runs."""

    trace: str | None = option(
        None, "", "a trace, or - for standard input", flags=(), metavar="TRACE",
        said="a seeded generator of similar shape",
    )  # fmt: skip
    requests: int | None = option(
        None, "", "the first N only", kind="integer", low=1, high=10**7,
        said="all of a trace, 100 generated",
    )  # fmt: skip
    model: str | None = option(
        None, "model",
        "a model's name (docs/replay.md lists them), or a .toml or config.json file, or the folder"
        " of a config.json; the figures below replace the model's",
        said="tiny; tiny-sparse with offload",
    )  # fmt: skip
    write_model: str | None = option(
        None, "model", "write the model's figures to a .toml to edit, and do nothing else",
        metavar="FILE",
    )  # fmt: skip
    deployment: str | None = option(
        None, "offload",
        "where all times come from: a deployment's name (docs/predicting.md lists them) or .toml"
        " file, which says the model and the device",
        metavar="NAME", said="what model and device say", only="offload",
    )  # fmt: skip
    prefill: str = option(
        "device", "offload", "none: another device computes the prompts",
        choices=("none", "device"), metavar="HOW", only="offload",
    )  # fmt: skip
    json: str | None = option(
        None, "output", "write the figures as JSON; - prints them, and no table", metavar="FILE"
    )
    perfetto: str | None = option(
        None, "output", "write a trace for Perfetto", flags=("--trace",),
        metavar="FILE", only="offload",
    )  # fmt: skip
    html: str | None = option(
        None, "output", "write one page with plots (the extra 'report')",
        metavar="FILE", only="offload",
    )  # fmt: skip
    progress: str = option(
        "auto", "output",
        "auto, bar, lines or none, on standard error; auto: a bar on a terminal, else none",
        choices=("auto", "bar", "lines", "none"), metavar="HOW",
    )  # fmt: skip
    compare: Sequence[str] | None = option(
        None, "several runs",
        "print where two JSON reports differ; status 1 beyond the tolerance", several=2,
        metavar=("A", "B"),
    )  # fmt: skip
    expect: str | None = option(
        None, "output", "status 1 when the answer is another: yes or no",
        choices=("yes", "no"), metavar="ANSWER", only="offload",
    )  # fmt: skip
    tolerance: float = option(
        0.05, "several runs", "largest relative difference", kind="number", low=0, high=1e9,
        metavar="P",
    )  # fmt: skip
    sweep: Sequence[str] | None = option(
        None, "several runs",
        "run a grid: policy=lru,fifo pool=8192,16384; of the axes " + ", ".join(_AXES),
        several="+", metavar="NAME=A,B", only="offload",
    )  # fmt: skip
    results: str = option(
        "kvcore-sweep", "several runs",
        "where a sweep keeps its reports, and finds those it has", metavar="DIR",
    )  # fmt: skip
    jobs: int | None = option(
        None, "several runs", "processes of a sweep, or of one long run (at most 2)",
        kind="integer", low=1, high=1024, said="cores",
    )  # fmt: skip
    ray: str | None = option(
        None, "several runs", "run the sweep on this Ray cluster instead", metavar="ADDRESS"
    )


CLASSES = (CommandOptions, CacheOptions, OffloadOptions)


def options_of(*classes: type) -> Iterator[tuple[str, Option]]:
    """The options of these classes by name (of all of them, when none is named)."""
    for one in classes or CLASSES:
        for declared in fields(one):
            yield declared.name, declared.metadata["option"]


def default_of(name: str) -> Any:
    """The value of an option that is not given."""
    found: Field[Any] = next(f for one in CLASSES for f in fields(one) if f.name == name)
    assert found.default is not MISSING
    return found.default


def axes() -> dict[str, Option]:
    """The options that a sweep may vary."""
    return {name: declared for name, declared in options_of(OffloadOptions) if declared.axis}


def flags_of(name: str, declared: Option) -> tuple[str, ...]:
    """As it is written; empty for an argument that has no name."""
    return ("--" + name.replace("_", "-"),) if declared.flags is None else declared.flags


def options_page() -> str:
    """The table of the options for ``docs/replay.md``."""
    lines = ["| option | default | values | meaning |", "| --- | --- | --- | --- |"]
    for group in GROUPS:
        for name, declared in options_of():
            if declared.group == group and declared.written:
                lines.append(_line(name, declared))
    return "\n".join(lines)


def _line(name: str, declared: Option) -> str:
    written = ", ".join(f"`{flag}`" for flag in flags_of(name, declared)) or f"`{name.upper()}`"
    default = default_of(name)
    said = declared.said or ("" if default is None else f"{default}")
    if declared.kind == "text":
        values = ", ".join(f"`{choice}`" for choice in declared.listed())
    else:
        values = f"{declared.low:,} to {declared.high:,}"
    notes: list[str] = [declared.only] if declared.only else []
    if declared.axis:
        notes.append("axis of a sweep")
    meaning = declared.meaning + (f" ({', '.join(notes)})" if notes else "")
    return f"| {written} | {said} | {values} | {meaning} |"


if __name__ == "__main__":
    print(options_page())
