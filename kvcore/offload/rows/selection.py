# SPDX-License-Identifier: Apache-2.0
"""The device-side selection of one layer: what sparse attention reads, kept from step to step.

A batch has ``batch`` places.  A place belongs to one request at a time and has ``steps`` rows,
one for each query token of a step (the newest token and its drafts).  A row keeps the top-k
blocks that ``gather_selection_kv_cache`` fetched for it: ``status`` says which, ``table`` says
where in the buffers.  The next step fetches what it does not find there.

Status and table belong together: `permute` moves both when the batch is re-ordered, the rows of
the buffers stay where they are.  `admit` and `evict` forget by the request's identity, so that a
newcomer never inherits a place's rows.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvcore
from kvcore._core import adopt, arrays
from kvcore.errors import fail
from kvcore.offload.checks import check_device, check_identity, check_integer, each_of

__all__ = ["SelectionCache"]

MAX_ROWS = 2**20
NOBODY = None


class SelectionCache:
    """Selections of one layer for a batch.

    full_kv_cache: [FB, fbs, K], the layer's full cache; host (swapped), a memory map or device.
    full_k_rope:   [FB, fbs, R], or None.
    batch, steps:  places, and query tokens a place at the most.
    topk:          ids a row; each is a block of ``block`` tokens.
    page:          tokens of a block of the selection buffers (a multiple of ``block``).
    device:        a ``kvcore.Device`` for the buffers and the index arrays; None: plain arrays.

    kv, rope: the selection buffers [batch * steps * columns, page, size] (rope None without one);
              without a device torch tensors where the full cache is one, else numpy arrays.
    table:    int32 [batch * steps, columns]; status: int32 [batch, steps, 1, topk + 1].
    Raises ParamInvalidError; DeviceOutOfMemoryError with nothing kept.
    """

    batch: int
    steps: int
    topk: int
    block: int
    full_kv_cache: Any
    full_k_rope: Any

    def __init__(
        self,
        full_kv_cache: Any,
        full_k_rope: Any = None,
        *,
        batch: int,
        steps: int,
        topk: int,
        block: int = 1,
        page: int = 64,
        device: Any = None,
    ) -> None:
        check_integer("batch", batch, 1, MAX_ROWS)
        check_integer("steps", steps, 1, MAX_ROWS // batch)
        check_integer("topk", topk, 1, 2**24)
        check_integer("block", block, 1, 2**24)
        check_integer("page", page, 1, 2**24)
        if device is not None:
            check_device("device", device)
        if page % block:
            fail("page", f"a multiple of block ({block})", page)
        self.batch, self.steps, self.topk, self.block = batch, steps, topk, block
        self.full_kv_cache, self.full_k_rope = full_kv_cache, full_k_rope
        self._requests: list[Hashable] = [NOBODY] * batch
        rows, columns = batch * steps, -(-topk * block // page)
        self._owned: list[Any] = []
        try:
            self.kv: Any = self._like(
                full_kv_cache, "full_kv_cache", (rows * columns, page), device
            )
            self.rope: Any = None
            if full_k_rope is not None:
                self.rope = self._like(full_k_rope, "full_k_rope", (rows * columns, page), device)
            self.table: Any = self._make((rows, columns), "int32", device)
            self.status: Any = self._make((batch, steps, 1, topk + 1), "int32", device)
        except BaseException:
            self.close()
            raise
        with _host(self.table) as table, _host(self.status) as status:
            table[...] = np.arange(rows * columns).reshape(rows, columns)
            _empty(status)

    def _like(self, full: Any, name: str, shape: tuple[int, int], device: Any) -> Any:
        info = arrays.read(full, name)
        if len(info.shape) != 3:
            fail(name, "[blocks, block_size, size]", info.shape)
        # The array's own type, so that the operator sees one type on both sides.
        if device is None:
            return adopt.zeros_like(full, (*shape, info.shape[2]), name)
        return self._make((*shape, info.shape[2]), info.dtype_name, device)

    def _make(self, shape: tuple[int, ...], dtype: str, device: Any) -> Any:
        if device is None:
            return np.zeros(shape, dtype)
        made = device.empty(shape, dtype)
        self._owned.append(made)
        return made

    def close(self) -> None:
        """Give device memory back."""
        owned, self._owned = self._owned, []
        for buffer in owned:
            buffer.free()

    # -- whose places ---------------------------------------------------------------------

    @property
    def requests(self) -> tuple[Hashable, ...]:
        """The request at each place, None where it is free."""
        return tuple(self._requests)

    def place(self, request: Hashable) -> int:
        """Where a request is.  Raises ParamInvalidError when it is not there."""
        if check_identity("request", request) is NOBODY or request not in self._requests:
            fail("request", "a request that was admitted", repr(request))
        return self._requests.index(request)

    def admit(self, request: Hashable, place: int | None = None) -> int:
        """Give a request a free place (the first by default), with nothing selected.

        Raises ParamInvalidError when it has one, or when there is none free.
        """
        if check_identity("request", request) is NOBODY:
            fail("request", "an identity", None)
        if request in self._requests:
            fail("request", "one not admitted yet", repr(request))
        if place is None:
            if NOBODY not in self._requests:
                fail("request", f"at most {self.batch} requests at a time", "one more")
            place = self._requests.index(NOBODY)
        check_integer("place", place, 0, self.batch - 1)
        if self._requests[place] is not NOBODY:
            fail("place", "a free place", f"that of {self._requests[place]!r}")
        with _host(self.status) as status:
            _empty(status[place])
        self._requests[place] = request
        return place

    def evict(self, request: Hashable) -> None:
        """Free a request's place; its rows hold nothing any more."""
        place = self.place(request)
        with _host(self.status) as status:
            _empty(status[place])
        self._requests[place] = NOBODY

    def permute(self, order: Sequence[int]) -> None:
        """Place i is now what place ``order[i]`` was: requests, status and table together.

        order: a permutation of the places.  No row of the buffers moves.
        """
        places = [_whole("order", i, x) for i, x in enumerate(each_of("order", order))]
        if sorted(places) != list(range(self.batch)):
            fail("order", f"each place below {self.batch} once", places)
        with _host(self.table) as table, _host(self.status) as status:
            kvcore.permute_rows(np.array(places), table, status)
        self._requests = [self._requests[place] for place in places]

    def invalidate(self, request: Hashable, from_pos: int) -> int:
        """Forget every selected block of the request that reaches to ``from_pos`` or beyond.

        For drafts that were rejected and tokens that are written again.  (The operator itself
        reads again what may have been written in the very step.)  Returns how many entries.
        """
        place = self.place(request)
        check_integer("from_pos", from_pos, 0)
        rows = place * self.steps + np.arange(self.steps)
        with _host(self.status) as status:
            return kvcore.invalidate(status, rows, from_pos, selection_topk_block_size=self.block)

    def selected(self, request: Hashable) -> list[dict[int, tuple[int, int]]]:
        """For each row of the request: by id, the buffers' (block, row) of its first token."""
        place, found = self.place(request), []
        page = self.kv.shape[1]
        with _host(self.table, "r") as table, _host(self.status, "r") as status:
            for step in range(self.steps):
                entries, row = status[place, step, 0], table[place * self.steps + step]
                whole = min(int(entries[-1]) // self.block, self.topk)
                where = {}
                for at in range(max(whole, 0)):
                    if entries[at] >= 0:
                        token = at * self.block
                        where[int(entries[at])] = (int(row[token // page]), token % page)
                found.append(where)
        return found

    # -- steps ----------------------------------------------------------------------------

    def plan(
        self,
        topk_indices: Any,
        full_block_table: Any,
        kv_lens: Any,
        q_lens: Any,
        **options: Any,
    ) -> Any:
        """The step's plan of ``gather_selection_kv_cache``; may be launched, and run many times.

        topk_indices: int32 [batch, steps, 1, topk]; full_block_table: int32 [batch, columns];
        kv_lens, q_lens: int32 [batch], 0 at places that are free.  All in the order of the places.
        options: of the operator (``stats``, ``soc``, ``q_lens_cumulative``, ...).
        run() returns int32 [batch * steps], the tokens selected for each row.
        """
        return kvcore.plan_gather_selection_kv_cache(
            self.rope,
            self.kv,
            self.table,
            self.status,
            topk_indices,
            self.full_k_rope,
            self.full_kv_cache,
            full_block_table,
            kv_lens,
            q_lens,
            selection_topk_block_size=self.block,
            **options,
        )

    def gather(
        self, topk_indices: Any, full_block_table: Any, kv_lens: Any, q_lens: Any, **options: Any
    ) -> NDArray[np.int32]:
        """``plan`` and run it now."""
        lengths: NDArray[np.int32] = self.plan(
            topk_indices, full_block_table, kv_lens, q_lens, **options
        ).run()
        return lengths


def _whole(name: str, place: int, value: Any) -> int:
    """A whole number, numpy's included."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:  # of an array too, which has an __index__ when it has one element
        pass
    fail(f"{name}[{place}]", "a place", repr(value))


def _empty(status: NDArray[np.int32]) -> None:
    status[...] = -1
    status[..., -1] = 0


@contextmanager
def _host(array: Any, mode: str = "rw") -> Iterator[NDArray[np.int32]]:
    """The memory for the host; a buffer's access is seen by the race check."""
    if isinstance(array, np.ndarray):
        yield array
    else:
        with array.host(mode) as found:
            yield found
