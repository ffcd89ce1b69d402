# SPDX-License-Identifier: Apache-2.0
"""A step before anything is launched: who writes what, and what each group attends to.

All that can be wrong is found here.  The plans of the pools are made last, and are taken back when
a later request's ids are refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import fail
from kvcore.offload.checks import check_integer, read_indices
from kvcore.offload.decode.block_writers import BlockWriters
from kvcore.offload.decode.request import DecodeRequest
from kvcore.offload.decode.write_policy import make_write_policy

if TYPE_CHECKING:
    from kvcore.offload.decode.options import EngineSettings
    from kvcore.offload.rows.device_pool import DevicePool, Selection

__all__ = ["Chooser", "Chosen", "Part", "Rows"]

#: Rows of a selection: (hits, misses, recent).
Rows = tuple[int, int, int]


@dataclass(slots=True)
class Chosen:
    """What one request attends to in one group.

    ids: int64 [n]; index: int64 [queries, k] rows of ids, or None; in_ring: int32 [n] row of the
    ring, or -1; rows: (hits, misses, recent).
    """

    ids: NDArray[np.int64]
    index: NDArray[np.int64] | None
    in_ring: NDArray[np.int32]
    selection: Selection
    rows: Rows


@dataclass(slots=True)
class Part:
    """One request's part of a step: positions [context, context + tokens).

    send:   positions [send[0], send[1]) go to the host; host_rows: where.
    chosen: by group that has rows.
    """

    request: DecodeRequest
    tokens: int
    send: tuple[int, int]
    host_rows: NDArray[np.int64]
    chosen: dict[int, Chosen]

    def rows(self, group: int) -> Rows:
        """(hits, misses, recent) of a group; nothing of a group without rows."""
        return self.chosen[group].rows if group in self.chosen else (0, 0, 0)


class Chooser:
    """Plans steps over full caches of ``num_blocks`` blocks of ``block_size`` rows."""

    def __init__(self, settings: EngineSettings, block_size: int, num_blocks: int) -> None:
        self._select, self._policy = settings.select, make_write_policy(settings.write_policy)
        self._topk, self._max_tokens = settings.topk, settings.max_tokens
        self._recent, self._most = settings.ring_rows, settings.most_tokens
        self._block_size, self._num_blocks = block_size, num_blocks
        self._writers = BlockWriters(block_size, num_blocks)

    def host_rows(self, request: DecodeRequest, first: int, end: int) -> NDArray[np.int64]:
        """Rows of the full cache of a request's positions; see `DecodeRequest.host_rows`."""
        return request.host_rows(first, end, self._block_size, self._num_blocks)

    def plan(
        self,
        states: Sequence[DecodeRequest],
        drafts: int | Mapping[Hashable, int],
        admitted: Iterable[DecodeRequest],
    ) -> tuple[list[Part], list[DecodeRequest], int]:
        """(parts, requests without a block for their next token, drafts cut).

        admitted: whose accepted rows must not be written over.
        Raises ParamInvalidError with nothing changed.
        """
        parts: list[Part] = []
        exhausted: list[DecodeRequest] = []
        cut = 0
        for state in states:
            more = drafts.get(state.name, 0) if isinstance(drafts, Mapping) else drafts
            check_integer("drafts", more, 0, self._most - 1)
            tokens = state.room(1 + more, self._block_size, self._num_blocks, self._max_tokens)
            if not tokens:
                exhausted.append(state)
                continue
            cut += 1 + more - tokens
            clean, context = min(state.clean, state.context), state.context
            due = self._policy.due(clean, context, context + tokens, self._recent, self._most)
            rows = self.host_rows(state, clean, due)
            parts.append(Part(state, tokens, (clean, due), rows, {}))
        writes = [(part.request, part.tokens) for part in parts]
        self._writers.check(writes, (one for one in admitted if not one.aborted))
        self._choose(parts)
        return parts, exhausted, cut

    def take_back(self, parts: Sequence[Part]) -> None:
        """Give up a plan that was not launched: the pools hold none of it."""
        for part in parts:
            for group, chosen in part.chosen.items():
                part.request.pools[group].abandon(chosen.selection)

    def _choose(self, parts: list[Part]) -> None:
        try:
            for part in parts:
                for group, pool in part.request.pools.items():
                    part.chosen[group] = self._choose_one(part, group, pool)
        except BaseException:
            self.take_back(parts)
            raise

    def _choose_one(self, part: Part, group: int, pool: DevicePool) -> Chosen:
        request = part.request
        end = request.context + part.tokens
        ids, index = _read_ids(self._select(request.name, group, end), end, self._topk)
        window = max(request.window, end - self._recent)
        recent = ids >= window
        newest = ids[recent]
        if len(newest) > 1 and len(np.unique(newest)) != len(newest):
            fail("ids", "each id once", "a repeat among the newest tokens")
        in_ring = np.where(recent, ids % self._recent, -1).astype(np.int32)
        selection = pool.plan(request.name, np.where(recent, -1, ids), request.table)
        rows = (selection.hits, selection.misses, len(newest))
        return Chosen(ids, index, in_ring, selection, rows)


def _read_ids(ids: Any, end: int, topk: int) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """The union of the ids, and each query's rows in it when there are several queries."""
    if ids is None:
        fail("ids", "an int32 or int64 array", "NoneType")
    array = read_indices("ids", ids, None)
    if array.ndim not in (1, 2):
        fail("ids", "[n] or [queries, n]", f"shape {array.shape}")
    index: NDArray[np.int64] | None = None
    wide = array.astype(np.int64)
    if array.ndim == 2:
        union, inverse = np.unique(wide, return_inverse=True)
        negative = int(np.count_nonzero(union < 0))
        index = np.maximum(inverse.reshape(array.shape) - negative, -1).astype(np.int64)
        wide = union[negative:]
    if len(wide) > topk:
        fail("ids", f"at most topk ({topk}) ids", len(wide))
    if len(wide) and int(wide.max()) >= end:
        place = int(wide.argmax())
        fail(f"ids[{place}]", f"positions below {end}", int(wide[place]))
    return wide, index
