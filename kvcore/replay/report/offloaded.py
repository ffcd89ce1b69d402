# SPDX-License-Identifier: Apache-2.0
"""The figures of a replay with the full cache on the host."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kvcore import __version__
from kvcore.replay.clock.capacity import decode_bytes
from kvcore.replay.clock.step_clock import StepTimes
from kvcore.replay.metrics.latency import Latencies
from kvcore.replay.models.profile import STEP, ModelProfile
from kvcore.replay.options import (
    PREFILL_PROMPT_TOKENS,
    PREFILL_SOURCE,
    PREFILL_TOKENS_PER_S,
    OffloadOptions,
)
from kvcore.replay.report.report import Report
from kvcore.replay.serving.fit import weight_bytes
from kvcore.replay.serving.interval import FEWEST, Interval
from kvcore.runtime.profile import DeviceProfile

__all__ = ["OffloadReport", "OffloadTotals", "Timeline"]

#: Figures of a device that a step's transfers rest on.
TRANSFER_FIGURES = (
    "hbm_bandwidth", "hbm_latency", "hbm_descriptor", "h2d_bandwidth", "h2d_latency",
    "h2d_descriptor", "launch_cost", "event_cost",
)  # fmt: skip
POINTS = 512
#: Of `OffloadReport.to_dict`; reports of 0.1 before it said have none.
SCHEMA = 2
GIB = 2**30


class Timeline:
    """Steps over time, in at most ``2 * POINTS`` points: as they fill up, two become one.

    A point: end in us, steps, us a step, hit rate, batch, host blocks in use.
    """

    def __init__(self) -> None:
        self._points: list[list[float]] = []
        self._each = 1

    def add(self, now_us: float, us: float, hit_rate: float, batch: int, blocks: int) -> None:
        """Add one step to the line."""
        new = [now_us, 1.0, us, hit_rate, float(batch), float(blocks)]
        if self._points and self._points[-1][1] < self._each:
            self._points[-1] = _joined(self._points[-1], new)
            return
        if len(self._points) == 2 * POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [_joined(a, b) for a, b in pairs]
            self._each *= 2
        self._points.append(new)

    def to_dict(self) -> dict[str, list[float]]:
        """The points as columns, a list each."""
        names = ("end_us", "steps", "step_us", "hit_rate", "batch", "host_blocks")
        return {name: [p[i] for p in self._points] for i, name in enumerate(names)}


def _joined(a: list[float], b: list[float]) -> list[float]:
    n = a[1] + b[1]
    return [b[0], n, *((x * a[1] + y * b[1]) / n for x, y in zip(a[2:], b[2:], strict=True))]


@dataclass(slots=True)
class OffloadTotals:
    """Sums over a run; rows are a token in a layer; times are microseconds of the model.

    decode_us:   of the steps that decode; compute_us, serve_us, exposed_us, link_us: see
                 `StepTimes`; assumed_compute_us: the part of compute that is assumed.
    accepted:    tokens generated; written: drafts that did not stand included.
    """

    steps: int = 0
    request_steps: int = 0
    accepted: int = 0
    written: int = 0
    hits: float = 0.0
    misses: float = 0.0
    recent: float = 0.0
    real_rows: int = 0
    decode_us: float = 0.0
    compute_us: float = 0.0
    assumed_compute_us: float = 0.0
    serve_us: float = 0.0
    exposed_us: float = 0.0
    link_us: float = 0.0
    prefill_us: float = 0.0
    idle_us: float = 0.0
    end_us: float = 0.0
    h2d_bytes: float = 0.0
    d2h_bytes: float = 0.0
    hit_bytes: float = 0.0
    prefill_bytes: int = 0
    received_bytes: int = 0
    peak_device_bytes: int = 0
    peak_host_blocks: int = 0
    busy: dict[str, float] = field(default_factory=dict)

    def add_step(
        self,
        us: float,
        times: StepTimes,
        batch: int,
        accepted: int,
        written: int,
        rows: tuple[float, float, float],
        row_bytes: int,
        num_layers: int,
        compute_us: float,
        *,
        sends: bool = True,
    ) -> None:
        """Add one step; rows: hits, misses, recent, over all layers; sends: to the host."""
        self.steps += 1
        self.request_steps += batch
        self.accepted += accepted
        self.written += written
        self.hits += rows[0]
        self.misses += rows[1]
        self.recent += rows[2]
        self.decode_us += us
        self.compute_us += compute_us
        self.serve_us += times.serve_us
        self.exposed_us += times.exposed_us
        self.link_us += times.link_us
        self.hit_bytes += rows[0] * row_bytes
        self.h2d_bytes += rows[1] * row_bytes
        self.d2h_bytes += sends * written * row_bytes * num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadReport(Report):
    """What an offloaded replay did and what it would have taken."""

    model: ModelProfile
    device: DeviceProfile
    options: OffloadOptions
    pool_entries: int
    host_capacity: int
    totals: OffloadTotals
    timeline: Timeline
    elapsed_ns: int
    interval: Interval | None = None
    latencies: Latencies = field(default_factory=Latencies)

    @property
    def rows(self) -> float:
        """Rows of all selections, real or not."""
        return self.totals.hits + self.totals.misses + self.totals.recent

    @property
    def real_share(self) -> float:
        """Share of the rows that were really moved."""
        return self.totals.real_rows / self.rows if self.rows else 0.0

    @property
    def hit_rate(self) -> float | None:
        """Share of the rows asked of the pools that they held; None before any."""
        asked = self.totals.hits + self.totals.misses
        return self.totals.hits / asked if asked else None

    @property
    def step_us(self) -> float | None:
        """Mean microseconds of a step that decodes."""
        return self.totals.decode_us / self.totals.steps if self.totals.steps else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens generated by second of decoding, of the device."""
        us = self.totals.decode_us
        return self.totals.accepted / us * 1e6 if us else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens generated by second of the whole run, prefill and idle time included."""
        return self.totals.accepted / self.totals.end_us * 1e6 if self.totals.end_us else None

    @property
    def overlap(self) -> float | None:
        """Share of the link's busy time in decode that no layer waited for; None when idle."""
        totals = self.totals
        if not totals.link_us:
            return None
        return max(0.0, 1 - totals.exposed_us / totals.link_us)

    @property
    def assumed_share(self) -> float | None:
        """Share of a step's time that rests on assumed figures of model or device."""
        totals = self.totals
        if not totals.decode_us:
            return None
        us = totals.assumed_compute_us
        if any(self.device[key].basis == "assumed" for key in TRANSFER_FIGURES):
            us += max(0.0, totals.decode_us - totals.compute_us)
        return min(1.0, us / totals.decode_us)

    @property
    def prefill_basis(self) -> str:
        """Where the prefill's speed comes from."""
        rate = self.options.prefill_tokens_per_s
        if rate is None:
            return "none: prompts come from another device"
        return PREFILL_SOURCE if rate == PREFILL_TOKENS_PER_S else "given"

    def to_dict(self) -> dict[str, Any]:
        """Everything, of types that JSON has."""
        totals, counters, shape = self.totals, self.counters, self.model.shape
        figures = {key: f.basis for key, f in self.model.figures.items()}
        return {
            "kind": "offload",
            "schema": SCHEMA,
            "version": __version__,
            "fidelity": self.options.fidelity,
            "model": {
                "name": self.model.name,
                "layers": self.model.layers,
                "groups": len(self.model.groups),
                "topk": self.model.topk,
                "row_bytes": self.model.row_bytes,
                "dtype": shape.dtype,
                "note": self.model.note,
                "basis": figures,
            },
            "device": self.device.name,
            "options": {**asdict(self.options), "pool": self.pool_entries},
            "prefill_basis": self.prefill_basis,
            "requests": {
                "total": self.total_requests,
                "finished": self.finished_requests,
                "aborted": self.aborted_requests,
                "preempted": counters.preemptions,
            },
            "tokens": {
                "total": self.total_tokens,
                "prefill": counters.prefill_tokens,
                "generated": totals.accepted,
                "written_in_decode": totals.written,
                "recomputed": counters.recomputed_tokens,
                "prompt": counters.prompt_tokens,
                "prefix_hit": counters.prefix_hit_tokens,
            },
            "hit_rate": self.hit_rate,
            "interval": self.interval_dict(),
            "rows": {
                "hits": totals.hits,
                "misses": totals.misses,
                "recent": totals.recent,
                "real": totals.real_rows,
                "real_share": self.real_share,
            },
            "bytes": {
                "h2d": totals.h2d_bytes,
                "d2h_decode": totals.d2h_bytes,
                "d2h_prefill": totals.prefill_bytes,
                "received": totals.received_bytes,
                "served_from_pools": totals.hit_bytes,
                "copied_on_host": self.copied_bytes,
            },
            "memory": self.memory_dict(),
            "steps": totals.steps,
            "batch": totals.request_steps / totals.steps if totals.steps else 0.0,
            "model_time_us": {
                "all": totals.end_us,
                "decode": totals.decode_us,
                "prefill": totals.prefill_us,
                "idle": totals.idle_us,
                "step": self.step_us,
                "compute": totals.compute_us,
                "serve": totals.serve_us,
                "exposed": totals.exposed_us,
                "link": totals.link_us,
            },
            "tokens_per_s": {"decode": self.decode_tokens_per_s, "all": self.tokens_per_s},
            "latency_ms": self.latencies.to_dict(),
            "slo": self.slo_dict(),
            "overlap": self.overlap,
            "assumed_share": self.assumed_share,
            "timeline": self.timeline.to_dict(),
            "verified": self.verified_dict(),
            "seconds": self.elapsed_ns / 1e9,
            "interrupted": self.interrupted,
        }

    def interval_dict(self) -> dict[str, Any] | None:
        """The 95% intervals of a sampled replay: [low, high], None where they cannot be said."""
        found = self.interval
        if found is None:
            return None
        hit, step = self.hit_rate, self.step_us
        rate = us = None
        if found.hit_rate is not None and hit is not None:
            rate = [max(0.0, hit - found.hit_rate), min(1.0, hit + found.hit_rate)]
        if found.step_us is not None and step is not None:
            us = [max(0.0, step - found.step_us), step + found.step_us]
        return {
            "level": 0.95, "sampled": found.requests, "of": found.of, "hit_rate": rate,
            "step_us": us,
        }  # fmt: skip

    @property
    def on_device(self) -> bool:
        """Whether this is the baseline: all caches on the device, nothing offloaded."""
        return self.options.policy == "none"

    def memory_dict(self) -> dict[str, Any]:
        """Peaks; without offload the pool's blocks are the device's, and the host has none."""
        totals, options = self.totals, self.options
        weights = weight_bytes(self.model, options)
        found: dict[str, Any] = {"weight_bytes": weights}
        blocks, capacity = totals.peak_host_blocks, self.host_capacity
        if self.on_device:
            found["peak_device_bytes"] = blocks * decode_bytes(self.model, 1, options.block_size)
            found["peak_device_blocks"], found["device_blocks"] = blocks, capacity
            blocks = capacity = 0
        else:
            found["peak_device_bytes"] = totals.peak_device_bytes
        found["peak_host_blocks"], found["host_blocks"] = blocks, capacity
        block_bytes = options.block_size * self.model.row_bytes * self.model.layers
        found["peak_host_bytes"] = blocks * block_bytes
        return found

    def slo_dict(self) -> dict[str, Any] | None:
        """Limits in ms, the share of good requests and whether that is enough; None: no limits."""
        felt, slo = self.latencies, self.latencies.slo
        if slo is None:
            return None
        us = self.totals.end_us
        return {
            "limits_ms": {name: limit / 1e3 for name, limit in slo.limits.items()},
            "attain": self.options.attain,
            "attained": felt.attained,
            "holds": None if felt.attained is None else felt.attained >= self.options.attain,
            "good_requests_per_s": felt.good / us * 1e6 if us else None,
        }

    @property
    def title(self) -> str:
        """The title of the table."""
        return "kvcore replay, offload"

    def table(self, source: str) -> list[tuple[str, str]]:
        """The table's rows, as names and values; ``source`` says where the trace is from."""
        totals, counters, options, model = self.totals, self.counters, self.options, self.model
        steps = max(1, totals.steps)
        return [
            ("trace", source),
            (
                "model",
                f"{model.name}: {model.layers} layers in {len(model.groups)} groups, top-k"
                f" {model.topk}, {model.row_bytes:,} bytes a row",
            ),
            ("device", f"{self.device.name} ({self.device.note})"),
            ("figures of a step", self._figures_of_a_step()),
            (
                "fidelity",
                (
                    "the steps' arithmetic alone: no row is moved"
                    if self.on_device
                    else f"{options.fidelity}: {totals.real_rows:,} of {self.rows:,.0f} rows were"
                    f" real ({self.real_share:.2%})"
                ),
            ),
            (
                "pool",
                (
                    "none: all caches on the device, nothing offloaded"
                    if self.on_device
                    else f"{options.policy}, {self.pool_entries:,} entries a request and group;"
                    f" {options.write_policy}"
                ),
            ),
            (
                "requests",
                f"{self.finished_requests:,} of {self.total_requests:,} finished,"
                f" {self.aborted_requests:,} aborted, {counters.preemptions:,} preemptions;"
                f" batch {totals.request_steps / steps:.1f} of {options.batch} on average",
            ),
            (
                "prefill",
                (
                    f"{options.prefill_tokens_per_s:,.0f} tokens/s"
                    f" ({self.prefill_basis}){self._beyond_its_prompts()}"
                    if options.prefill_tokens_per_s is not None
                    else self.prefill_basis
                ),
            ),
            (
                "prefix hits",
                _share(counters.prefix_hit_tokens, counters.prompt_tokens, "prompt tokens"),
            ),
            (
                "hit rate",
                f"{_percent(self.hit_rate)}{self._within('hit_rate')} of the rows asked of the"
                " pools;"
                f" {totals.recent:,.0f} rows were newest tokens",
            ),
            (
                "bytes",
                f"to the device {_gigabytes(totals.h2d_bytes)}; to the host"
                f" {_gigabytes(totals.d2h_bytes)} in decode, {_gigabytes(totals.prefill_bytes)} in"
                f" prefill; received {_gigabytes(totals.received_bytes)}; served from pools"
                f" {_gigabytes(totals.hit_bytes)}",
            ),
            (
                "peak memory",
                self._peaks(),
            ),
            (
                "step",
                f"{_milliseconds(self.step_us)}{self._within('step_us')} on average over"
                f" {totals.steps:,}; compute"
                f" {totals.compute_us / steps / 1e3:.3f}, waiting for rows"
                f" {totals.serve_us / steps / 1e3:.3f}",
            ),
            (
                "token/s",
                f"{_number(self.decode_tokens_per_s)} in decode, {_number(self.tokens_per_s)}"
                f" in all ({totals.end_us / 1e6:,.1f} s of the model)",
            ),
            *self._felt(),
            *self._sampling(),
            ("overlap", f"{_percent(self.overlap)} of the link's time in decode held nobody up"),
            ("assumed", f"{_percent(self.assumed_share)} of a step rests on assumed figures"),
            ("verified", self.verdict),
            ("time", f"{self.elapsed_ns / 1e9:.1f} s here"),
        ]  # fmt: skip

    def _figures_of_a_step(self) -> str:
        """Whose step it is, and what its figures rest on."""
        model = self.model
        bases: dict[str, list[str]] = {}
        for key in STEP:
            bases.setdefault(model[key].basis, []).append(key)
        rests = "; ".join(f"{basis}: {', '.join(keys)}" for basis, keys in bases.items())
        return f"{model.note or 'whose is not said'}; {rests}"

    def _beyond_its_prompts(self) -> str:
        """Whether the default rate of prefill is used for longer prompts than it is of."""
        admitted = max(1, self.finished_requests + self.aborted_requests)
        mean = self.counters.prompt_tokens / admitted
        given = self.options.prefill_tokens_per_s != PREFILL_TOKENS_PER_S
        if given or mean <= PREFILL_PROMPT_TOKENS:
            return ""
        times = mean / PREFILL_PROMPT_TOKENS
        return f"; extrapolated: these prompts have {mean:,.0f} tokens, {times:.1f} times as many"

    def _within(self, figure: str) -> str:
        """The half-width of a figure's interval, for the table."""
        half = getattr(self.interval, figure, None)
        if half is None:
            return ""
        return f" ± {half:.2%}" if figure == "hit_rate" else f" ± {half / 1e3:.3f} ms"

    def _peaks(self) -> str:
        memory, device = self.memory_dict(), self.device
        weights = memory["weight_bytes"]
        beside = "without weights" if weights is None else f"beside {weights / GIB:.1f} of weights"
        said = (
            f"device {memory['peak_device_bytes'] / GIB:.2f} of"
            f" {device.capacity_bytes / GIB:.0f} GiB {beside}"
        )
        if self.on_device:
            blocks, capacity = memory["peak_device_blocks"], memory["device_blocks"]
            return f"{said}; {blocks:,} of the {capacity:,} blocks that fit there"
        return (
            f"{said}; host {memory['peak_host_blocks']:,} of {self.host_capacity:,} blocks,"
            f" {memory['peak_host_bytes'] / GIB:.2f} GiB"
        )

    def _felt(self) -> list[tuple[str, str]]:
        """Latencies, and whether the limits hold."""
        felt = self.latencies
        queued = "queueing in it"
        if self.options.arrivals == "order":
            queued = "all requests are there at once, and wait for the whole trace's turn"
        labels = {
            "ttft": ("first token", f" ({queued})"),
            "queue": ("queueing", " of it before admission"),
            "itl": ("between tokens", ", the prompts computed in between in it"),
            "tpot": ("a token", " after the first, a request's mean"),
            "e2e": ("last token", " after arrival"),
        }
        found = felt.summaries()
        rows = []
        for name, (label, note) in labels.items():
            one = found[name]
            if one is not None:
                rows.append((label, f"{one}{note}"))
        slo = self.slo_dict()
        if slo is not None and felt.attained is not None:
            holds = "the limits hold" if slo["holds"] else "the limits do not hold"
            rows.append((
                "SLO",
                f"{felt.slo}: {felt.attained:.1%} of {felt.finished:,} requests are good, of"
                f" {self.options.attain:.0%} asked for: {holds};"
                f" {slo['good_requests_per_s'] or 0:,.3f} good requests/s",
            ))  # fmt: skip
        return rows

    def _sampling(self) -> list[tuple[str, str]]:
        found = self.interval
        if found is None:
            return []
        said = (
            f"{found.requests:,} of {found.of:,} requests, sample seed {self.options.sample_seed}"
        )
        if found.hit_rate is None:
            said += f": too few to say how sure the figures are ({FEWEST} are the least)"
        else:
            said += "; ± is the half of a 95% interval over samples of as many, the workload fixed"
        return [("sample", said)]


def _share(part: float, whole: float, what: str) -> str:
    rate = f" ({part / whole:.1%})" if whole else ""
    return f"{part:,} of {whole:,} {what}{rate}"


def _gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.3f} GB"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _milliseconds(us: float | None) -> str:
    return "-" if us is None else f"{us / 1e3:.3f} ms"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
