# SPDX-License-Identifier: Apache-2.0
"""What the hardware's documents and kernels say of the gathers, beyond the operators' own rules.

A documented limit is an error; what a kernel does beyond its document is the text of a
KVPortabilityWarning.  Numbers: aclnnGatherPaKvCache and GatherSelectionKvCache of CANN's
ops-transformer (documents, tilings and kernels).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore._core.arrays import ArrayInfo
from kvcore._core.portability import Harm, warn
from kvcore.dtypes import BY_NAME, DATA_DTYPES, DType
from kvcore.ops import checks
from kvcore.soc import SoC

__all__ = ["SelectionQuirks", "check_gather_pa", "check_gather_selection", "out_of_range_note"]

Numbers = NDArray[np.int64]

#: Data types of the A2 and A3 kernels of both operators.
NARROW = tuple(BY_NAME[name] for name in ("float16", "bfloat16", "int8"))
#: Data types of the 950's GatherPaKvCache.
WIDE = tuple(row for row in DATA_DTYPES if not row.packed)
INT32 = BY_NAME["int32"]
#: GatherPaKvCache, A2 and A3: a token is whole 32-byte units and fits the unified buffer.
TOKEN_UNIT_BYTES = 32
MAX_TOKEN_BYTES = 148 * 1024


def _one_of(info: ArrayInfo, seen: DType, known: Iterable[DType], soc: SoC) -> None:
    if seen not in known:
        names = ", ".join(row.name for row in known)
        checks.fail(info.name, f"one of {names} on {soc}", seen)


# ---------------------------------------------------------------- gather_pa_kv_cache


def out_of_range_note(soc: SoC | None) -> str:
    """What the error of a block outside the cache adds about that hardware."""
    return " (a 950 fills those rows with zeros)" if soc is not None and soc.name == "950" else ""


def check_gather_pa(case: Any, soc: SoC) -> tuple[str, ...]:
    """Raise where the documents forbid a gather_pa.Case; the texts of its warnings otherwise."""
    wide = soc.name == "950"
    if case.cache_mode == "NHSD":
        checks.fail("cache_mode", f"'Norm' or 'PA_NZ' on {soc}", repr("NHSD"))
    if len(case.lanes) == 1:
        checks.fail("value_cache", f"an array on {soc} (key only is this library's own)", None)
    caches = [case.info(cache) for cache, _ in case.lanes]
    for cache, dtype, token_bytes in zip(caches, case.dtypes, case.token_bytes, strict=True):
        if len(cache.shape) == 5:
            checks.fail(cache.name, f"a 4-D cache on {soc}", list(cache.shape))
        _one_of(cache, dtype, WIDE if wide else NARROW, soc)
        if not wide and token_bytes % TOKEN_UNIT_BYTES:
            checks.fail(
                cache.name,
                f"tokens (H*D) of whole {TOKEN_UNIT_BYTES}-byte units on {soc}",
                f"{token_bytes} bytes",
            )
        if not wide and token_bytes > MAX_TOKEN_BYTES:
            checks.fail(
                cache.name,
                f"tokens (H*D) of at most {MAX_TOKEN_BYTES} bytes on {soc}",
                f"{token_bytes} bytes",
            )
    key_type, value_type = case.dtypes
    mixed = (
        wide
        and key_type.name == "float8_e4m3fn"
        and value_type.name
        in (
            "float16",
            "bfloat16",
        )
    )
    if key_type is not value_type and not mixed:
        expected = f"dtype {key_type} as key_cache on {soc}"
        if wide:
            expected += " (or a float8_e4m3fn key with a float16 or bfloat16 value)"
        checks.fail("value_cache", expected, value_type)
    if not wide and case.index_dtype is not INT32:
        checks.fail("block_tables", f"dtype int32 on {soc}", case.index_dtype)
    warnings: list[str] = []
    if not wide and case.cache_mode == "PA_NZ" and any(i is not None for i in case.infos[6:]):
        warnings.append(
            Harm(f"seq_offset: in PA_NZ, {soc} adds it to the column undivided by the block size")
        )
    loose = [i.name for i in case.infos if i is not None and not checks.is_contiguous(i)]
    if loose:
        warnings.append(f"{', '.join(loose)}: {soc} takes contiguous arrays only")
    return tuple(warnings)


# ---------------------------------------------------------------- gather_selection_kv_cache

#: GatherSelectionKvCache on A3: its document's bounds.
MAX_SELECTION_TOPK = 2048
MAX_TOPK_OF_WIDE_BLOCKS = 32
MAX_STEPS = 7
MAX_ROPE_SIZE = 64
MAX_KV_SIZE = 656
#: The unified buffer that the kernel's row buffers share.
UNIFIED_BUFFER_BYTES = 192 * 1024
# Positions in the operator's argument list.
ROPE, CACHE, TABLE = range(3)


def _padded(nbytes: int) -> int:
    return (nbytes + 31) // 32 * 32


def check_gather_selection(case: Any, soc: SoC) -> tuple[str, ...]:
    """Raise where the document forbids a gather_selection.Case; its warnings' texts otherwise."""
    if soc.name not in ("A2", "A3"):
        checks.fail("soc", "'A3' or 'A2' (no other has GatherSelectionKvCache)", repr(soc.name))
    cache, table = case.info(CACHE), case.info(TABLE)
    rope = case.infos[ROPE]
    _one_of(cache, case.dtype, NARROW, soc)
    if rope is not None and case.dtype.name == "int8":
        checks.fail("selection_k_rope", f"an empty pair of ropes with int8 on {soc}", "an array")
    if case.index_dtype is not INT32:
        checks.fail("selection_kv_block_table", f"dtype int32 on {soc}", case.index_dtype)
    for info in case.infos:
        if info is not None and not checks.is_contiguous(info):
            checks.fail(info.name, f"a contiguous array on {soc}", f"strides {info.strides} bytes")
    ids = "selection_topk_indices"
    if case.topk > MAX_SELECTION_TOPK:
        checks.fail(ids, f"a top-k of at most {MAX_SELECTION_TOPK} on {soc}", case.topk)
    if case.topk > MAX_TOPK_OF_WIDE_BLOCKS and case.block != 1:
        checks.fail(
            "selection_topk_block_size",
            f"1 with a top-k above {MAX_TOPK_OF_WIDE_BLOCKS} on {soc}",
            case.block,
        )
    if case.steps > MAX_STEPS:
        checks.fail(ids, f"at most {MAX_STEPS} rows a request (S) on {soc}", case.steps)
    needed = case.rows * table.shape[1]
    if cache.shape[0] < needed:
        checks.fail(
            "selection_kv_cache", f"at least {needed} blocks (rows * SMAX) on {soc}", cache.shape[0]
        )
    rope_size = 0 if rope is None else rope.shape[2]
    if rope_size > MAX_ROPE_SIZE:
        checks.fail("selection_k_rope", f"R of at most {MAX_ROPE_SIZE} on {soc}", rope_size)
    if cache.shape[2] > MAX_KV_SIZE:
        checks.fail("selection_kv_cache", f"K of at most {MAX_KV_SIZE} on {soc}", cache.shape[2])
    warnings: list[str] = []
    if soc.name == "A2":
        warnings.append(
            "soc: GatherSelectionKvCache is documented for A3 only, though built for A2"
        )
    if case.topk <= MAX_TOPK_OF_WIDE_BLOCKS and case.steps != 1:
        warnings.append(
            Harm(
                f"{ids}: the kernel for a top-k up to {MAX_TOPK_OF_WIDE_BLOCKS} takes one row a "
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
    if needed > UNIFIED_BUFFER_BYTES:
        warnings.append(
            Harm(
                f"selection_topk_block_size: a row's buffers take {needed} bytes on the device, "
                f"whose unified buffer has {UNIFIED_BUFFER_BYTES}"
            )
        )
    return tuple(warnings)


# ---------------------------------------------------------------- warned of, by contents


class SelectionQuirks:
    """What the kernels do with a call's values: a warning where the result is another here.

    Of each kind the first row is named.
    """

    #: The arrays whose values are read, for Plan.values.
    arguments = (
        "selection_kv_block_status",
        "selection_topk_indices",
        "full_kv_actual_seq",
        "full_q_actual_seq",
    )

    def __init__(self, case: Any, soc: SoC) -> None:
        self.case = case
        self.soc = soc.name

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
        if self.case.topk > MAX_TOPK_OF_WIDE_BLOCKS:
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
                    f"{MAX_TOPK_OF_WIDE_BLOCKS} stops at the negative id at place {at} of row "
                    f"{row} and leaves out the {len(lost)} behind it"
                )
        return ""

    def _counted(self, tokens: Numbers, theirs: Numbers, ids: Numbers) -> str:
        """The kernel for a long top-k takes S for the number of new tokens."""
        if self.case.topk <= MAX_TOPK_OF_WIDE_BLOCKS:
            return ""
        differ = self._wanted(tokens, ids) != self._wanted(theirs, ids)
        found = np.flatnonzero((tokens > 0) & differ.any(1))
        if not found.size:
            return ""
        row = found[0]
        return (
            f"full_q_actual_seq: the kernel for a top-k above {MAX_TOPK_OF_WIDE_BLOCKS} takes "
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
