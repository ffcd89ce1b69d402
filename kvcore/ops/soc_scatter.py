# SPDX-License-Identifier: Apache-2.0
"""What the hardware refuses of ScatterPaKvCache and ScatterPaCache, and what it would warn of.

Rules about shapes, dtypes and modes raise when a plan is made. Quirks, what kernels do beyond
their documents, are texts for a KVPortabilityWarning: those that shapes decide come back from
check_scatter, those that contents decide from value_quirks.
Source: the vendor's documents, tilings and kernels that SoC.profile.sources names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore._core.arrays import ArrayInfo
from kvcore._core.lanes import NZ_BYTES
from kvcore._core.plan import Spec
from kvcore._core.portability import Harm, warn
from kvcore.errors import fail
from kvcore.ops import compress
from kvcore.ops.scatter_case import KEY, SLOT_MAPPING, VALUE, VALUE_CACHE
from kvcore.soc import PROFILES, Accepted, SoC
from kvcore.soc.scatter import Scatter, WindowKernels
from kvcore.strides import is_dense

__all__ = ["KEY_ONLY", "KEY_VALUE", "apply", "check_scatter", "value_quirks"]

KEY_VALUE = "scatter_pa_kv_cache"
KEY_ONLY = "scatter_pa_cache"
_DOCUMENT = {KEY_VALUE: "ScatterPaKvCache", KEY_ONLY: "ScatterPaCache"}
_COMPRESSION = (3, 4, 5)
_MEANS_OR_DROPS = ("Rope", "Omni")


def apply(spec: Spec, case: Any, soc: SoC, operator: str = KEY_VALUE) -> Spec:
    """Check a Case against a SoC and give its Spec the warnings; returns the Spec."""
    spec.warnings = check_scatter(case, soc, operator)
    spec.value_quirks = value_quirks(case, soc)
    spec.repeat_text = _RepeatText(case, soc.name)
    return spec


def check_scatter(case: Any, soc: SoC, operator: str = KEY_VALUE) -> tuple[str, ...]:
    """Raise ParamInvalidError for what that SoC refuses of a Case; texts of what it warns of.

    operator: "scatter_pa_kv_cache" or "scatter_pa_cache". The error names the argument, what was
    expected on that SoC and what was seen.
    """
    _check_scenario(case, soc, operator)
    if case.number == 1:
        _check_nz(case, soc)
    elif case.rule == "Nct":
        _check_nct(case, soc)
    elif case.number == 7:
        _check_nhsd(case, soc)
    slots = case.blocks * case.block_size
    if case.number != 3 and slots < case.tokens:
        # Scenario 3 has B * S padded places and no T.
        fail(
            "key_cache",
            f"num_blocks * block_size >= T = {case.tokens} on {soc.name}",
            f"{case.blocks} * {case.block_size} = {slots}",
        )
    if case.tokens == 0:
        return ()
    found = _quirks(case, soc.profile.scatter)
    return tuple(type(text)(f"{soc.name}: {text}") for text in found)


# ---------------------------------------------------------------- refused
def _check_scenario(case: Any, soc: SoC, operator: str) -> None:
    table = soc.profile.scatter
    rows = table.key_value if operator == KEY_VALUE else table.key_alone
    if not rows:
        others = [s.name for s in PROFILES.values() if s.profile.scatter.key_alone]
        fail("soc", f"{' or '.join(map(repr, others))} for {operator}", repr(soc.name))
    here = f"on {soc.name} ({_DOCUMENT[operator]})"
    if case.number not in {row.scenario for row in rows} and not case.key_only:
        _refuse_scenario(case, rows, here)
    if operator == KEY_VALUE and case.key_only and case.number not in table.key_only:
        _refuse_key_only(case, soc, here)
    if case.key_only:
        _check_scalars(case, here)
    accepted = [r for r in rows if r.scenario == case.number and case.rule in r.rules]
    if not accepted:
        _refuse_scenario(case, rows, here)
    names = accepted[0].dtypes
    for argument, dtype in (("key", case.dtype), ("value", case.value_dtype)):
        if dtype.name not in names:
            fail(argument, f"dtype {_either(names)} in scenario {_label(case)} {here}", dtype)


def _label(case: Any) -> str:
    """The scenario's number, with the mode where it has several."""
    modes = {"rows": "", "Nct": " with Nct"}
    return f"{case.number}{modes.get(case.rule, f' with {case.rule}')}"


def _either(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " or " + names[-1]


def _refuse_scenario(case: Any, rows: tuple[Accepted, ...], here: str) -> None:
    known = _either(tuple(map(str, sorted({row.scenario for row in rows}))))
    expected = f"a call of scenario {known} {here}"
    if case.number == 7:
        fail("scatter_mode", expected, "'NHSD' (scenario 7)")
    fail("key", expected, f"scenario {_label(case)}, shape {list(case.infos[KEY].shape)}")


def _refuse_key_only(case: Any, soc: SoC, here: str) -> None:
    seen = "None" if case.infos[VALUE] is None else "a 0-d array"
    key_only = soc.profile.scatter.key_only
    only = _either(tuple(map(str, key_only))) if key_only else ""
    hint = f"key only is scenario {only}" if only else "key only is scatter_pa_cache"
    fail("value", f"an array in scenario {case.number} {here}; {hint}", seen)


def _check_scalars(case: Any, here: str) -> None:
    """The 0-d tensors that stand for no value have the key's dtype: the tiling asks them."""
    for i in (VALUE, VALUE_CACHE):
        info = case.infos[i]
        if info is None or info.dtype is case.dtype:
            continue
        raw = info.dtype is not None and info.dtype.kind == "uint"
        if not raw or info.dtype.itemsize != case.dtype.itemsize:
            expected = f"dtype {case.dtype} as key, of a 0-d array too, {here}"
            fail(info.name, expected, info.dtype_name)


def _check_nz(case: Any, soc: SoC) -> None:
    table = soc.profile.scatter
    most = table.nz_block_size
    if case.block_size > most:
        fail("key_cache", f"block_size < {most + 1} in PA_NZ on {soc.name}", case.block_size)
    mixed = case.value_dtype.name == "int8" and case.dtype.name != "int8"
    if mixed and not table.int8_value:
        fail("value", f"int8 only with an int8 key on {soc.name}", f"int8 with {case.dtype}")


def _check_nct(case: Any, soc: SoC) -> None:
    for source_arg, _, head_size in case.lanes():
        source = case.infos[source_arg]
        if len(source.shape) != 3:
            wanted = [case.tokens, case.heads, head_size]
            fail(
                source.name,
                f"shape {wanted} ([T, H, D], a view of the fused buffer) in Nct on {soc.name}",
                list(source.shape),
            )


def _check_nhsd(case: Any, soc: SoC) -> None:
    most = soc.profile.scatter.nhsd
    assert most is not None  # else the scenario was refused
    where = f"in NHSD on {soc.name}"
    if case.heads > most.heads:
        fail("key", f"fewer than {most.heads + 1} heads {where}", case.heads)
    total = 0
    for source_arg, cache_arg, head_size in case.lanes():
        source, cache = case.infos[source_arg], case.infos[cache_arg]
        size = head_size * source.itemsize
        if size % NZ_BYTES:
            multiple = NZ_BYTES // source.itemsize
            fail(source.name, f"a head size that is a multiple of {multiple} {where}", head_size)
        if case.block_size * head_size > most.block_items:
            fail(
                cache.name,
                f"block_size * head_size < {most.block_items + 1} {where}",
                f"{case.block_size} * {head_size} = {case.block_size * head_size}",
            )
        total += case.heads * size
    if total > most.token_bytes:
        fail(
            "key",
            f"fewer than {most.token_bytes + 1} bytes in the key and value of a token {where}",
            total,
        )


# ---------------------------------------------------------------- warned of
def _quirks(case: Any, table: Scatter) -> Iterator[str]:
    if case.number in (4, 5):
        if table.windows is None:
            yield f"the tiling of today refuses compression with a 3-D key (scenario {case.number})"
        else:
            yield from _quirks_of_windows(case, table.windows)
    elif case.number == 7:
        assert table.nhsd is not None
        most = table.nhsd.tiling_bytes
        total = sum(case.heads * d * case.infos[i].itemsize for i, _, d in case.lanes())
        if total > most:
            yield (
                f"the tiling keeps 1 KiB for itself and refuses {total} bytes in the key and "
                f"value of a token (most: {most})"
            )
    elif case.rule == "Nct":
        if table.short_nct:
            yield from _quirks_of_short_nct(case)
    elif case.rule == "rows" and case.scatter_mode == "None" and not table.outer_strides:
        yield from _quirks_of_strides(case)


def _quirks_of_short_nct(case: Any) -> Iterator[str]:
    for lane, (source_arg, _, head_size) in enumerate(case.lanes()):
        end = case.tokens * case.strides[lane] + case.offsets[lane]
        most = (case.tokens - 1) * case.heads * head_size
        if end > most:
            yield (
                f"the tiling refuses T * stride + offset > (T-1) * H * D, for "
                f"{case.infos[source_arg].name} {end} > {most}"
            )


def _quirks_of_windows(case: Any, kernels: WindowKernels) -> Iterator[str]:
    key, value = case.head_size, case.value_head_size
    if key != value:
        yield Harm(
            f"the compression kernels take the key's head size {key} for the value too, "
            f"which has {value}"
        )
    multiple = kernels.head_size_multiple
    for name, size in (("key", key), ("value", value)):
        if size % multiple and (name == "key" or size != key):
            yield Harm(
                f"the compression kernels assume head sizes that are multiples of {multiple}; "
                f"{name} has {size}"
            )
    most = kernels.mean_head_size
    if case.number == 5 and max(key, value) > most:
        yield Harm(
            f"the {case.rule} kernel has room for head sizes up to {most}, not {max(key, value)}"
        )
    if case.index_dtype.name != kernels.index_dtype:
        yield Harm(
            f"the compression kernels read {kernels.index_dtype} indices, and these are "
            f"{case.index_dtype}"
        )


def _quirks_of_strides(case: Any) -> Iterator[str]:
    # A call with every last axis dense is handed to the kernel as views; any other is copied to
    # dense arrays first, and right.
    arrays = [case.infos[i] for lane in case.lanes() for i in lane[:2]]
    if not all(_dense_from(info, len(info.shape) - 1) for info in arrays):
        return
    for source_arg, cache_arg, _ in case.lanes():
        source, cache = case.infos[source_arg], case.infos[cache_arg]
        if not _dense_from(source, 0):
            yield Harm(
                f"the kernel ignores the strides of {source.name} and reads it as if it were "
                "contiguous; make it contiguous first (or use Nct)"
            )
        if not _dense_from(cache, 1 if case.number == 2 else 0):
            honoured = "only the first axis' stride" if case.number == 2 else "no stride"
            yield Harm(
                f"the kernel honours {honoured} of {cache.name} in scenario {case.number} and "
                "would write other bytes"
            )


def _dense_from(info: ArrayInfo, axis: int) -> bool:
    """Whether the axes from ``axis`` on are C-contiguous."""
    return is_dense(info.shape, info.strides, info.itemsize, axis)


# ---------------------------------------------------------------- warned of, by contents
def value_quirks(case: Any, soc: SoC) -> Callable[[Any], None] | None:
    """What a plan calls with itself, its values checked, to warn of them; None: no such quirk."""
    if case.tokens == 0:
        return None
    if case.number in _COMPRESSION:
        return _Windows(soc, case)
    if case.number in soc.profile.scatter.negative_slots[0]:
        return _NegativeSlots(soc, case.number)
    return None


class _RepeatText:
    """The text for a place of slot_mapping whose slots are written from a place before it too.

    No Harm: which token such a slot holds is what the document leaves open, not a wrong byte.
    """

    def __init__(self, case: Any, soc: str) -> None:
        self.case = case
        self.soc = soc

    def __call__(self, at: int, before: int, slot: int) -> str:
        here = compress.place(self.case, SLOT_MAPPING, at)
        there = compress.place(self.case, SLOT_MAPPING, before)
        compresses = self.case.number in _COMPRESSION
        how = "begins a run that overlaps that of" if compresses else "repeats"
        return (
            f"{self.soc}: {here} = {slot} {how} {there}; the operator's document forbids repeated "
            "slots and promises nothing of what they hold (here the last token wins)"
        )


class _NegativeSlots:
    """Scenario 7: one row a slot."""

    #: The arrays whose values are read, for Plan.values.
    arguments: tuple[str, ...] = ("slot_mapping",)

    def __init__(self, soc: SoC, number: int) -> None:
        scenarios, effect = soc.profile.scatter.negative_slots
        self.soc = soc.name
        self.number = number
        self.writes_them = number in scenarios
        self.effect = f"is not skipped: it {effect}" if effect.startswith("writes") else effect

    def __call__(self, plan: Any) -> None:
        slots = plan.values("slot_mapping")
        self.warn_of(slots, np.ones(slots.size, np.int64))

    def warn_of(self, slots: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Warn of the first negative slot whose run has rows."""
        found = np.flatnonzero((slots < 0) & (rows > 0))
        if found.size:
            warn(
                Harm(
                    f"{self.soc}: slot_mapping[{found[0]}] = {slots[found[0]]} {self.effect} "
                    f"(scenario {self.number})"
                )
            )


class _Windows(_NegativeSlots):
    """Scenarios 3, 4, 5: a run per (batch, head)."""

    def __init__(self, soc: SoC, case: Any) -> None:
        super().__init__(soc, case.number)
        self.whole_windows = soc.profile.scatter.whole_windows
        self.rule = case.rule
        self.heads = case.heads
        self.blocks = case.blocks
        self.block_size = case.block_size
        self.arguments = ("slot_mapping", "compress_lens", "seq_lens")
        if self.rule in _MEANS_OR_DROPS:
            self.arguments += ("compress_seq_offset",)

    def __call__(self, plan: Any) -> None:
        windows = plan.values("compress_lens")
        rows = windows
        if self.rule == "Alibi":
            self.warn_of_sum(plan, windows)
        if self.rule in _MEANS_OR_DROPS:
            starts = plan.values("compress_seq_offset")
            if self.whole_windows:
                self.warn_of_windows(windows, starts)
            tokens = np.repeat(plan.values("seq_lens"), self.heads)
            kept = tokens - windows + ((windows > 0) if self.rule == "Rope" else 0)
            rows = kept
            np.copyto(rows, tokens, where=starts == -1)
        # Where the tiling refuses a scenario, no slot counts.
        if self.writes_them:
            self.warn_of(plan.values("slot_mapping"), rows)

    def warn_of_sum(self, plan: Any, windows: NDArray[np.int64]) -> None:
        """Warn of a call that breaks the document's bound on rows, which is Omni's, alone."""
        tokens = np.repeat(plan.values("seq_lens"), self.heads)
        left = (tokens - windows)[plan.values("slot_mapping") >= 0]
        total = int(left.sum())
        if total > self.blocks * self.block_size:
            warn(
                f"{self.soc}: the document bounds the sum of seq_lens - compress_lens by "
                f"num_blocks * block_size = {self.blocks} * {self.block_size} in Alibi too, which "
                f"writes compress_lens rows of a run; it is {total}"
            )

    def warn_of_windows(self, windows: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        """Warn of the first empty window and of the first head without compression."""
        for argument, values, least in (
            ("compress_lens", windows, 1),
            ("compress_seq_offset", starts, 0),
        ):
            found = np.flatnonzero(values < least)
            if found.size:
                warn(
                    Harm(
                        f"{self.soc}: {argument}[{found[0]}] = {values[found[0]]}, and the "
                        f"{self.rule} kernel expects it >= {least}"
                    )
                )
