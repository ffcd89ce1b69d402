# SPDX-License-Identifier: Apache-2.0
"""Legal GatherSelectionKvCache calls, and serving loops of many calls on one selection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cases import Case
from oracle_numbers import Array, bits
from oracle_rules_gather import used_entries
from strategies_arrays import DTYPES, Builder, Draw, content

#: The operator takes any type of 1, 2 or 4 bytes, which is all of them.
ROW_SIZES = st.sampled_from([1, 2, 3, 5, 8, 16, 17, 32])


@dataclass
class Sizes:
    """Everything a call's shapes follow from, in the operator's words.

    tnd: [rows, 1, topk] instead of [B, S, 1, topk].  rope: 0 when there is none.
    """

    batch: int
    steps: int
    topk: int
    block: int
    sbs: int
    fbs: int
    smax: int
    fmax: int
    kv: int
    rope: int
    tnd: bool

    @property
    def rows(self) -> int:
        return self.batch * self.steps

    @property
    def tokens(self) -> int:
        """Tokens a request's full table has room for."""
        return self.fmax * self.fbs

    def topk_shape(self, last: int) -> tuple[int, ...]:
        outer = (self.rows,) if self.tnd else (self.batch, self.steps)
        return (*outer, 1, last)


def draw_sizes(draw: Draw, *, least_batch: int = 0) -> Sizes:
    """Small sizes on both sides of the operator's border of 32 ids."""
    topk = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 32, 33, 40]))
    many = topk > 8
    block = draw(st.sampled_from([1, 1, 2] if many else [1, 2, 3, 4, 8]))
    sbs = block * draw(st.sampled_from([16, 5] if many else [1, 2, 3]))
    fbs = block * draw(st.sampled_from([16, 7] if many else [1, 2, 3]))
    return Sizes(
        batch=draw(st.integers(least_batch, 2 if many else 3)),
        steps=draw(st.integers(1, 3)),
        topk=topk,
        block=block,
        sbs=sbs,
        fbs=fbs,
        smax=-(-topk * block // sbs) + draw(st.integers(0, 1)),
        fmax=draw(st.integers(0 if least_batch == 0 else 1, 5)),
        kv=draw(ROW_SIZES),
        rope=draw(st.sampled_from([0, 1, 2, 4, 8])),
        tnd=draw(st.booleans()),
    )


def place_caches(
    b: Builder,
    arguments: dict[str, Any],
    z: Sizes,
    element: str,
    num_sb: int,
    num_fb: int,
    *,
    rewritten: bool,
) -> None:
    """The four data arrays, or two and an empty rope pair of some form.

    rewritten: the full cache is written between calls, so its strides may not be zero.
    """
    selection, full = (num_sb, z.sbs), (num_fb, z.fbs)
    if z.rope:
        arguments["selection_kv_cache"], arguments["selection_k_rope"] = b.pair(
            ("selection_kv_cache", "selection_k_rope"),
            ((*selection, z.kv), (*selection, z.rope)),
            (element, element),
            output=True,
        )
        arguments["full_kv_cache"], arguments["full_k_rope"] = b.pair(
            ("full_kv_cache", "full_k_rope"),
            ((*full, z.kv), (*full, z.rope)),
            (element, element),
            output=rewritten,
        )
    else:
        for name, shape in (("selection_kv_cache", selection), ("full_kv_cache", full)):
            output = rewritten or name.startswith("selection")
            arguments[name] = b.data(name, (*shape, z.kv), element, output=output)
        empty = b.draw(st.sampled_from(["none", "flat", "row", "other"]))
        forms: dict[str, tuple[Any, Any]] = {
            "none": (None, None),
            "flat": (np.zeros(0, np.float16), np.zeros(0, np.float16)),
            "row": (np.zeros((*selection, 0), np.int8), np.zeros((*full, 0), np.int8)),
            "other": (np.zeros((0, 7), np.float64), np.zeros((3, 0, 2), np.int64)),
        }
        arguments["selection_k_rope"], arguments["full_k_rope"] = forms[empty]
    b.name_type(arguments, "dtype", element)


def _draw_ids(draw: Draw, count: int, low: int, high: int) -> list[int]:
    if count <= 8:
        return list(draw(st.lists(st.integers(low, high), min_size=count, max_size=count)))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    if draw(st.booleans()) or high < count:
        return list(map(int, rng.integers(low, high + 1, count)))
    return list(map(int, rng.permutation(high + 1)[:count]))


def _draw_status(draw: Draw, z: Sizes, highest: int) -> list[int]:
    kind = draw(st.sampled_from(["fresh", "true", "wild", "zero"]))
    if kind == "fresh":
        return [-1] * z.topk + [0]
    if kind == "zero":
        return [0] * (z.topk + 1)
    if kind == "true":
        rng = np.random.default_rng(draw(st.integers(0, 2**16)))
        ids = list(map(int, rng.permutation(highest + 1)[: z.topk]))
        ids = ids[: draw(st.integers(0, len(ids)))]
        length = max(len(ids) * z.block - draw(st.integers(0, z.block - 1)), 0)
        return ids + [-1] * (z.topk - len(ids)) + [length]
    length = draw(
        st.one_of(
            st.integers(-3, z.topk * z.block + 3),
            st.sampled_from([z.topk * z.block, 2**31 - 1, -(2**31)]),
        )
    )
    return [*_draw_ids(draw, z.topk, -2, highest + 2), length]


@st.composite
def gather_selection_cases(draw: Draw, dtypes: Sequence[str] = DTYPES) -> Case:
    """Legal gather_selection_kv_cache calls with any status, true or not."""
    b = Builder.make(draw)
    z = draw_sizes(draw)
    element = draw(st.sampled_from(dtypes))
    blocks = z.tokens // z.block
    kv_lens, q_lens, topk_rows, status_rows = [], [], [], []
    for _ in range(z.batch):
        beyond = draw(st.integers(0, 15)) == 15
        kv = 2**31 - 1 if beyond else draw(st.integers(-2, z.tokens))
        if beyond and b.index == "int64" and draw(st.booleans()):
            kv = 2**62
        kv_lens.append(kv)
        q_lens.append(draw(st.integers(0, z.steps)))
        for _ in range(z.steps):
            highest = blocks - 1 if beyond else blocks + 2
            ids = _draw_ids(draw, z.topk, -2, max(highest, -1))
            if not beyond and draw(st.integers(0, 7)) == 7:
                ids[draw(st.integers(0, z.topk - 1))] = 2**31 - 1
            topk_rows.append(ids)
            status_rows.append(_draw_status(draw, z, max(blocks - 1, 0)))
    cumulative = draw(st.booleans())
    shape = z.topk_shape(z.topk)
    topk = np.array(topk_rows, np.int64).reshape(shape)
    status = np.array(status_rows, np.int64).reshape(z.topk_shape(z.topk + 1))
    q = np.cumsum(q_lens, dtype=np.int64) if cumulative else np.array(q_lens, np.int64)
    arguments: dict[str, Any] = {
        "selection_kv_block_status": b.indices("selection_kv_block_status", status, output=True),
        "selection_topk_indices": b.indices("selection_topk_indices", topk),
        "full_kv_actual_seq": b.indices("full_kv_actual_seq", kv_lens),
        "full_q_actual_seq": b.indices("full_q_actual_seq", q),
        "selection_topk_block_size": z.block,
    }
    if cumulative or draw(st.booleans()):
        arguments["q_lens_cumulative"] = cumulative
    shapes = {
        "selection_kv_cache": np.zeros((0, z.sbs, 1)),
        "full_kv_cache": np.zeros((0, z.fbs, 1)),
    }
    used, needed = used_entries(arguments | shapes)
    # a cache of no blocks would make its rope empty and the other one not
    num_sb = max(len(used) + draw(st.integers(0, 3)), 1)
    num_fb = draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    junk = np.array([0, 0, -1, num_sb, 2**31 - 1])
    table = rng.choice(junk, (z.rows + draw(st.integers(0, 2)), z.smax))
    for entry, number in zip(sorted(used), rng.permutation(num_sb), strict=False):
        table[entry] = number
    full_table = rng.choice(junk, (z.batch, z.fmax))
    for entry in sorted(needed):
        full_table[entry] = rng.integers(num_fb)
    arguments["selection_kv_block_table"] = b.indices("selection_kv_block_table", table)
    arguments["full_kv_block_table"] = b.indices("full_kv_block_table", full_table)
    place_caches(b, arguments, z, element, num_sb, num_fb, rewritten=False)
    return Case("gather_selection_kv_cache", arguments, b.arena, "; ".join([str(z), *b.note]))


@dataclass(repr=False)
class SelectionSequence:
    """Steps of a serving loop that share one selection cache, status and tables.

    Between steps requests grow, stall, lose rejected drafts, shrink or are replaced by new
    ones; the tokens a step writes get new bits in the full cache, whether a block with them is
    held or not; rows change places with what they hold.  The status is only ever what the
    operator wrote, so after each step every row holds exactly the tokens it says it holds.
    """

    z: Sizes
    element: str
    arguments: dict[str, Any]
    case: Case
    seeds: list[int]
    lengths: list[int]
    drafts: list[int]

    def __repr__(self) -> str:
        return f"SelectionSequence({self.z}, {self.element}, seeds={self.seeds})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    def steps(self) -> Iterator[Case]:
        """Change the inputs in place for each step in turn; run the case before going on."""
        for seed in self.seeds:
            rng = np.random.default_rng(seed)
            if rng.random() < 0.3:
                self._permute(rng)
            for request in range(self.z.batch):
                self._advance(rng, request)
            self._choose(rng)
            yield self.case

    def _status(self) -> Array:
        array: Array = self.arguments["selection_kv_block_status"]
        return array

    def _row(self, name: str, row: int) -> Array:
        """Row ``row`` of an array of [rows, ...] or [B, S, ...]."""
        array = self.arguments[name]
        where = (row,) if self.z.tnd else divmod(row, self.z.steps)
        return np.asarray(array[where])

    def _permute(self, rng: np.random.Generator) -> None:
        """Requests change places, and rows within a request."""
        z, order = self.z, rng.permutation(self.z.batch)
        rows = [int(r) * z.steps + int(s) for r in order for s in rng.permutation(z.steps)]
        status = [self._row("selection_kv_block_status", r).copy() for r in rows]
        table = self.arguments["selection_kv_block_table"]
        table[: z.rows] = table[rows].copy()
        for row, held in enumerate(status):
            self._row("selection_kv_block_status", row)[...] = held
        full = self.arguments["full_kv_block_table"]
        full[...] = full[order].copy()
        self.lengths = [self.lengths[r] for r in order]
        self.drafts = [self.drafts[r] for r in order]

    def _advance(self, rng: np.random.Generator, request: int) -> None:
        z, old = self.z, self.lengths[request]
        q = int(rng.integers(0, z.steps + 1))
        event = rng.choice(["grow", "grow", "grow", "reject", "shrink", "restart", "stall"])
        base = old
        if event == "reject":
            base = old - int(rng.integers(0, self.drafts[request] + 1))
        elif event == "shrink":
            base = int(rng.integers(0, old + 1))
        elif event == "restart":
            base = int(rng.integers(0, z.tokens + 1))
        elif event == "stall":
            q = 0
        base = max(min(base, z.tokens - q), 0)
        kv = min(base + q, z.tokens)
        q = kv - base
        first = base
        if event == "restart":
            first = 0
            for s in range(z.steps):
                row = self._row("selection_kv_block_status", request * z.steps + s)
                row[..., -1] = 0
                if rng.random() < 0.5:
                    row[..., :-1] = -1
        self._write_tokens(rng, request, first, kv)
        self.lengths[request], self.drafts[request] = kv, q
        self.arguments["full_kv_actual_seq"][request] = kv
        self.arguments["full_q_actual_seq"][request] = q

    def _write_tokens(self, rng: np.random.Generator, request: int, first: int, end: int) -> None:
        table = self.arguments["full_kv_block_table"]
        for name in ("full_kv_cache", "full_k_rope"):
            array = self.arguments[name]
            if array is None or array.size == 0:
                continue
            for token in range(first, end):
                where = (int(table[request, token // self.z.fbs]), token % self.z.fbs)
                bits(array)[where] = content(rng, array.shape[2:], self.element, "bits")

    def _choose(self, rng: np.random.Generator) -> None:
        """New top-k ids: mostly what is held, in some order, with junk between."""
        z = self.z
        for row in range(z.rows):
            last = -(-self.lengths[row // z.steps] // z.block)
            held = self._row("selection_kv_block_status", row).reshape(-1)[: z.topk]
            keep = [int(x) for x in held if x >= 0 and rng.random() < 0.7]
            ids = keep + rng.permutation(max(last, 1)).tolist()
            ids = [x if rng.random() < 0.9 else int(rng.choice([-1, last, last + 3])) for x in ids]
            if last and rng.random() < 0.5:
                ids.insert(0, last - 1)
            ids = (ids + [-1] * z.topk)[: z.topk]
            if rng.random() < 0.5:
                ids = rng.permutation(ids).tolist()
            self._row("selection_topk_indices", row)[...] = ids


@st.composite
def selection_sequences(draw: Draw, dtypes: Sequence[str] = ("bfloat16", "int8")) -> Any:
    """A :class:`SelectionSequence` of up to six steps from an empty selection."""
    b = Builder.make(draw)
    z = draw_sizes(draw, least_batch=1)
    element = draw(st.sampled_from(dtypes))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    num_sb, num_fb = z.rows * z.smax + 1, z.batch * z.fmax + 1
    table = np.zeros((z.rows + draw(st.integers(0, 1)), z.smax), np.int64)
    table[: z.rows] = rng.permutation(num_sb)[: z.rows * z.smax].reshape(z.rows, z.smax)
    full_table = rng.permutation(num_fb)[: z.batch * z.fmax].reshape(z.batch, z.fmax)
    status = np.full(z.topk_shape(z.topk + 1), -1, np.int64)
    status[..., -1] = 0
    zeros = np.zeros(z.batch, np.int64)

    def plain(name: str, values: Array) -> Array:
        return b.indices(name, values, output=True)  # written between steps: no repeats

    arguments: dict[str, Any] = {
        "selection_kv_block_table": plain("selection_kv_block_table", table),
        "selection_kv_block_status": plain("selection_kv_block_status", status),
        "selection_topk_indices": plain("selection_topk_indices", status[..., :-1]),
        "full_kv_block_table": plain("full_kv_block_table", full_table),
        "full_kv_actual_seq": plain("full_kv_actual_seq", zeros),
        "full_q_actual_seq": plain("full_q_actual_seq", zeros),
        "selection_topk_block_size": z.block,
    }
    place_caches(b, arguments, z, element, num_sb, num_fb, rewritten=True)
    lengths = [draw(st.integers(0, z.tokens)) for _ in range(z.batch)]
    seeds = draw(st.lists(st.integers(0, 2**16), min_size=1, max_size=6))
    case = Case("gather_selection_kv_cache", arguments, b.arena, "; ".join([str(z), *b.note]))
    return SelectionSequence(z, element, arguments, case, seeds, lengths, [0] * z.batch)
