# SPDX-License-Identifier: Apache-2.0
"""What the hardware's documents and kernels say of the gathers, beyond the operators' own rules.

A documented limit is an error; what a kernel does beyond its document is the text of a
KVPortabilityWarning.  Numbers: aclnnGatherPaKvCache and GatherSelectionKvCache of CANN's
ops-transformer (documents, tilings and kernels).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore._core.arrays import ArrayInfo
from kvcore._core.portability import Harm, warn
from kvcore.dtypes import DType
from kvcore.ops import checks
from kvcore.soc import PROFILES, SoC

__all__ = ["SelectionQuirks", "check_gather_pa", "check_gather_selection", "out_of_range_note"]

Numbers = NDArray[np.int64]

#: Position in the argument list of gather_pa_kv_cache.
SEQ_OFFSET = 6


def _one_of(info: ArrayInfo, seen: DType, known: tuple[str, ...], soc: SoC) -> None:
    if seen.name not in known:
        checks.fail(info.name, f"one of {', '.join(known)} on {soc}", seen)


def _indices(argument: str, seen: DType, known: tuple[str, ...], soc: SoC) -> None:
    if seen.name not in known:
        checks.fail(argument, f"dtype {' or '.join(known)} on {soc}", seen)


# ---------------------------------------------------------------- gather_pa_kv_cache


def out_of_range_note(soc: SoC | None) -> str:
    """What the error of a block outside the cache adds about that hardware."""
    if soc is None or not soc.profile.gather.zeros_out_of_range:
        return ""
    return f" (a {soc} fills those rows with zeros)"


def check_gather_pa(case: Any, soc: SoC) -> tuple[str, ...]:
    """Raise where the documents forbid a GatherCase; the texts of its warnings otherwise."""
    table = soc.profile.gather
    if case.cache_mode == "NHSD":
        checks.fail("cache_mode", f"'Norm' or 'PA_NZ' on {soc}", repr("NHSD"))
    if len(case.lanes) == 1:
        checks.fail("value_cache", f"an array on {soc} (key only is this library's own)", None)
    caches = [case.info(cache) for cache, _ in case.lanes]
    for cache, dtype, token_bytes in zip(caches, case.dtypes, case.token_bytes, strict=True):
        if len(cache.shape) == 5:
            checks.fail(cache.name, f"a 4-D cache on {soc}", list(cache.shape))
        _one_of(cache, dtype, table.dtypes, soc)
        if table.token_unit_bytes is not None and token_bytes % table.token_unit_bytes:
            checks.fail(
                cache.name,
                f"tokens (H*D) of whole {table.token_unit_bytes}-byte units on {soc}",
                f"{token_bytes} bytes",
            )
        if table.token_bytes is not None and token_bytes > table.token_bytes:
            checks.fail(
                cache.name,
                f"tokens (H*D) of at most {table.token_bytes} bytes on {soc}",
                f"{token_bytes} bytes",
            )
    _one_dtype(case, table.mixed, soc)
    _indices("block_tables", case.index_dtype, table.index_dtypes, soc)
    warnings: list[str] = []
    offset = case.infos[SEQ_OFFSET]
    if table.offset_in_columns and case.cache_mode == "PA_NZ" and offset is not None:
        warnings.append(
            Harm(f"seq_offset: in PA_NZ, {soc} adds it to the column undivided by the block size")
        )
    loose = [i.name for i in case.infos if i is not None and not checks.is_contiguous(i)]
    if loose:
        warnings.append(f"{', '.join(loose)}: {soc} takes contiguous arrays only")
    return tuple(warnings)


def _one_dtype(case: Any, mixed: tuple[str, tuple[str, ...]] | None, soc: SoC) -> None:
    """Key and value have one dtype, but for the pairs that a machine may mix."""
    key, value = case.dtypes
    if key is value or (mixed is not None and key.name == mixed[0] and value.name in mixed[1]):
        return
    expected = f"dtype {key} as key_cache on {soc}"
    if mixed is not None:
        expected += f" (or a {mixed[0]} key with a {' or '.join(mixed[1])} value)"
    checks.fail("value_cache", expected, value)


# ---------------------------------------------------------------- gather_selection_kv_cache

# Positions in the operator's argument list.
ROPE, CACHE, TABLE = range(3)


def _padded(nbytes: int) -> int:
    return (nbytes + 31) // 32 * 32


def check_gather_selection(case: Any, soc: SoC) -> tuple[str, ...]:
    """Raise where the document forbids a SelectionCase; the texts of its warnings otherwise."""
    most = soc.profile.selection
    if most is None:
        checks.fail(
            "soc", f"{_who_selects()} (no other has GatherSelectionKvCache)", repr(soc.name)
        )
    cache, table = case.info(CACHE), case.info(TABLE)
    rope = case.infos[ROPE]
    _one_of(cache, case.dtype, most.dtypes, soc)
    if rope is not None and case.dtype.name in most.without_rope:
        expected = f"an empty pair of ropes with {case.dtype} on {soc}"
        checks.fail("selection_k_rope", expected, "an array")
    _indices("selection_kv_block_table", case.index_dtype, most.index_dtypes, soc)
    for info in case.infos:
        if info is not None and not checks.is_contiguous(info):
            checks.fail(info.name, f"a contiguous array on {soc}", f"strides {info.strides} bytes")
    ids = "selection_topk_indices"
    if case.topk > most.topk:
        checks.fail(ids, f"a top-k of at most {most.topk} on {soc}", case.topk)
    if case.topk > most.topk_of_blocks and case.block != 1:
        checks.fail(
            "selection_topk_block_size",
            f"1 with a top-k above {most.topk_of_blocks} on {soc}",
            case.block,
        )
    if case.steps > most.steps:
        checks.fail(ids, f"at most {most.steps} rows a request (S) on {soc}", case.steps)
    needed = case.rows * table.shape[1]
    if cache.shape[0] < needed:
        checks.fail(
            "selection_kv_cache", f"at least {needed} blocks (rows * SMAX) on {soc}", cache.shape[0]
        )
    rope_size = 0 if rope is None else rope.shape[2]
    if rope_size > most.rope_size:
        checks.fail("selection_k_rope", f"R of at most {most.rope_size} on {soc}", rope_size)
    if cache.shape[2] > most.kv_size:
        checks.fail("selection_kv_cache", f"K of at most {most.kv_size} on {soc}", cache.shape[2])
    warnings: list[str] = []
    if not most.documented:
        documented = " and ".join(_documented())
        warnings.append(
            f"soc: GatherSelectionKvCache is documented for {documented} only, though built for "
            f"{soc}"
        )
    if case.topk <= most.topk_of_blocks and case.steps != 1:
        warnings.append(
            Harm(
                f"{ids}: the kernel for a top-k up to {most.topk_of_blocks} takes one row a "
                f"request, got S = {case.steps}"
            )
        )
    item = cache.itemsize
    needed = (
        2 * (_padded(case.block * rope_size * item) + _padded(case.block * cache.shape[2] * item))
        + _padded(4 * case.topk)
        + _padded(4 * case.topk + 4)
        + _padded(4 * table.shape[1])
        + 32
    )
    if needed > most.buffer_bytes:
        warnings.append(
            Harm(
                f"selection_topk_block_size: a row's buffers take {needed} bytes on the device, "
                f"whose unified buffer has {most.buffer_bytes}"
            )
        )
    return tuple(warnings)


def _documented() -> list[str]:
    """The machines that the document names."""
    tables = {name: soc.profile.selection for name, soc in PROFILES.items()}
    return [name for name, table in tables.items() if table is not None and table.documented]


def _who_selects() -> str:
    """The machines that have the operator, those of its document first."""
    names = _documented()
    names += [n for n, soc in PROFILES.items() if soc.profile.selection and n not in names]
    return " or ".join(map(repr, names))


# ---------------------------------------------------------------- warned of, by contents


class SelectionQuirks:
    """What the kernels do with a call's values: a warning where the result is another here.

    Of each kind the first row is named.
    """

    #: The arrays whose values are read, for Plan.values.
    arguments: tuple[str, ...] = (
        "selection_kv_block_status",
        "selection_topk_indices",
        "full_kv_actual_seq",
        "full_q_actual_seq",
    )

    def __init__(self, case: Any, soc: SoC) -> None:
        table = soc.profile.selection
        assert table is not None
        self.case = case
        self.soc: str = soc.name
        self.short: int = table.topk_of_blocks

    def __call__(self, plan: Any) -> None:
        """Warn of what a plan's values, which are right by the operator's rules, lead to."""
        case = self.case
        status = plan.values("selection_kv_block_status").reshape(case.rows, case.topk + 1)
        ids = plan.values("selection_topk_indices").reshape(case.rows, case.topk)
        kv = np.maximum(plan.values("full_kv_actual_seq"), 0)
        q = plan.values("full_q_actual_seq")
        if case.cumulative:
            q = np.diff(q, prepend=0)
        step = np.tile(np.arange(case.steps), case.batch)
        kv, q = np.repeat(kv, case.steps), np.repeat(q, case.steps)
        tokens = np.where(step < q, kv - (q - 1 - step), kv)
        for text in (
            self._emptied(tokens, status),
            self._stopped(tokens, ids),
            self._counted(tokens, kv - (case.steps - 1 - step), ids),
            self._stale(tokens, kv - q, ids, status),
        ):
            if text:
                warn(Harm(f"{self.soc}: {text}"))

    def _wanted(self, tokens: Numbers, ids: Numbers) -> NDArray[np.bool_]:
        last = -(-np.maximum(tokens, 0) // self.case.block) - 1
        wanted: NDArray[np.bool_] = (ids >= 0) & (ids <= last[:, None])
        return wanted

    def _emptied(self, tokens: Numbers, status: Numbers) -> str:
        """Rows that see no token are emptied; the kernels leave them."""
        holds = (status[:, :-1] != -1).any(1) | (status[:, -1] != 0)
        found = np.flatnonzero((tokens <= 0) & holds)
        if not found.size:
            return ""
        return (
            f"full_kv_actual_seq: row {found[0]} sees no token, and the kernel leaves its "
            "selection and status as they were where they are emptied here"
        )

    def _stopped(self, tokens: Numbers, ids: Numbers) -> str:
        """The kernel for a short top-k stops at a row's first negative id."""
        if self.case.topk > self.short:
            return ""
        wanted = self._wanted(tokens, ids)
        behind = np.logical_or.accumulate(ids < 0, axis=1)
        for row in np.flatnonzero((wanted & behind).any(1)):
            lost = set(ids[row, wanted[row] & behind[row]]) - set(
                ids[row, wanted[row] & ~behind[row]]
            )
            if lost:
                at = int(np.flatnonzero(ids[row] < 0)[0])
                return (
                    f"selection_topk_indices: the kernel for a top-k up to "
                    f"{self.short} stops at the negative id at place {at} of row "
                    f"{row} and leaves out the {len(lost)} behind it"
                )
        return ""

    def _counted(self, tokens: Numbers, theirs: Numbers, ids: Numbers) -> str:
        """The kernel for a long top-k takes S for the number of new tokens."""
        if self.case.topk <= self.short:
            return ""
        differ = self._wanted(tokens, ids) != self._wanted(theirs, ids)
        found = np.flatnonzero((tokens > 0) & differ.any(1))
        if not found.size:
            return ""
        row = found[0]
        return (
            f"full_q_actual_seq: the kernel for a top-k above {self.short} takes "
            f"S = {self.case.steps} for the number of new tokens, so that row {row} sees "
            f"{theirs[row]} tokens and not {tokens[row]}"
        )

    def _stale(self, tokens: Numbers, fresh: Numbers, ids: Numbers, status: Numbers) -> str:
        """Held blocks into which the newest tokens reach are read again; the kernels serve them."""
        block, topk = self.case.block, self.case.topk
        places = np.clip(status[:, -1] // block, 0, topk)
        held = np.where(np.arange(topk) < places[:, None], status[:, :-1], -1)
        # Only a row in which such a block is held and wanted is looked at closely.
        reached = (held >= 0) & (held >= fresh[:, None] // block)
        for row in np.flatnonzero(reached.any(1)):
            wanted = set(ids[row][self._wanted(tokens[row : row + 1], ids[row : row + 1])[0]])
            for block_id in held[row][reached[row]]:
                if block_id in wanted and (held[row] == block_id).sum() == 1:
                    return (
                        f"selection_kv_block_status: row {row} holds block {block_id}, into which "
                        "the newest tokens reach, and the kernel serves it as it is held where it "
                        "is read again here"
                    )
        return ""
