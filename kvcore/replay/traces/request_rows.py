# SPDX-License-Identifier: Apache-2.0
"""The bytes and the ids of a trace's requests, as the decode engine asks for them.

Everything is a function of the seed and of the request alone, not of the other requests: a run
that moves the bytes of only some requests sees the same ids and bytes as one that moves all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.replay.models.profile import ModelProfile
from kvcore.replay.traces.content import TokenRows, content_words, expected_row, token_words
from kvcore.replay.traces.made_ids import IdSource, MadeIds
from kvcore.replay.traces.reader import HASH_BLOCK_TOKENS, TraceRequest
from kvcore.replay.traces.recorded_ids import RecordedIds

__all__ = ["RequestRows"]

#: What a draft that will be rejected holds instead of its token.
REJECTED = np.uint64(0xA5A5_5A5A_0F0F_F0F0)


class _Request:
    __slots__ = ("ids", "request", "words", "wrong_from")

    def __init__(self, request: TraceRequest, seed: int) -> None:
        self.request = request
        self.words = content_words(request, seed)
        self.ids: dict[int, IdSource] = {}
        self.wrong_from = request.total_tokens


class RequestRows:
    """Rows and ids of the requests whose bytes are really moved.

    ids: where the ids come from: a generator, or a file of them; None: `TurnoverIds` with its
         defaults.
    recorded, made: selections served so far from a file, and by a generator.
    """

    def __init__(
        self,
        model: ModelProfile,
        seed: int,
        max_tokens: int,
        ids: MadeIds | RecordedIds | None = None,
    ) -> None:
        self._model, self._seed = model, seed
        self._made_ids = MadeIds() if ids is None else ids
        self._rows = TokenRows(model.layers, *model.shape.row_bytes, 1, seed)
        self._requests: dict[int, _Request] = {}
        self.recorded: int = 0
        self.made: int = 0
        self._lane_bytes = [n for n in model.shape.row_bytes if n]

    def add(self, request: TraceRequest) -> None:
        """Make rows and ids of this request from now on; no effect when they are made already."""
        if request.index not in self._requests:
            self._requests[request.index] = _Request(request, self._seed)

    def drop(self, index: int) -> None:
        """Forget a request that has left."""
        self._requests.pop(index, None)

    def reject_from(self, index: int, position: int) -> None:
        """What is written at or past ``position`` in the next step will not stand."""
        self._requests[index].wrong_from = position

    def make(self, index: Any, layer: int, first: int, count: int) -> Sequence[NDArray[np.uint8]]:
        """Rows of positions [first, first + count): a lane each, [count, row bytes]."""
        of = self._requests[index]
        positions = np.arange(first, first + count)
        prompt = of.request.input_length
        block = np.where(positions < prompt, positions // HASH_BLOCK_TOKENS, len(of.words) - 1)
        words = token_words(of.words[block], positions)
        words[positions >= of.wrong_from] ^= REJECTED
        lanes = self._rows.make(layer, words)
        return [lane for lane in lanes if lane.shape[1]]

    def expected(self, index: int, layer: int, lane: int, position: int) -> bytes:
        """What a token's row must hold, worked out one by one."""
        request = self._requests[index].request
        size = self._lane_bytes[lane]
        return expected_row(request, position, layer, lane, size, self._seed)

    def select(self, index: Any, group: int, tokens: int, queries: int) -> NDArray[np.int32]:
        """int32 [queries, top-k] the ids of a step's queries in one group: the newest last."""
        of = self._requests[index]
        ids = of.ids.get(group)
        if ids is None:
            ids = of.ids[group] = self.ids_of(index, group)
        found = np.empty((queries, self._model.topk), np.int32)
        for query in range(queries):
            found[query] = ids.next(tokens - queries + 1 + query)
            recorded = getattr(ids, "recorded", False)
            self.recorded += recorded
            self.made += not recorded
        return found

    def ids_of(self, index: Any, group: int) -> IdSource:
        """A generator of a request's ids in one group, from its first step on."""
        seed = int(np.random.SeedSequence([self._seed, index, group]).generate_state(1)[0])
        context = self._requests[index].request.input_length + 1
        return self._made_ids.of_request(context, group, self._model.topk, seed)
