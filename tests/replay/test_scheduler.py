# SPDX-License-Identifier: Apache-2.0
"""The schedule against a memory that knows which token lies in which row of which block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import ParamInvalidError
from kvcore.offload.blocks.pool import BlockPool
from kvcore.replay.serving.scheduler import Running, Scheduler, Step
from kvcore.replay.traces.reader import TraceRequest

Token = tuple[object, ...]


def identity(request: TraceRequest, position: int) -> Token:
    """What a token is: equal for equal prompts, and of its request alone once generated."""
    if position < request.input_length:
        return ("prompt", request.hash_ids[: position // 512 + 1], position)
    return ("generated", request.index, position)


class Served:
    """Runs a scheduler to its end on a memory of identities, checking each step."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        *,
        capacity: int,
        block_size: int = 16,
        max_batch: int = 4,
        chunk_tokens: int = 64,
    ) -> None:
        self.requests = list(requests)
        self.pool = BlockPool(capacity)
        self.scheduler = Scheduler(
            requests,
            self.pool,
            block_size=block_size,
            max_batch=max_batch,
            chunk_tokens=chunk_tokens,
        )
        self.block_size = block_size
        self.memory: dict[tuple[int, int], Token] = {}
        self.steps: list[Step] = []
        self.finished: list[Running] = []
        self.writes = 0

    def run(self, max_steps: int = 100_000) -> Served:
        while (step := self.scheduler.plan()) is not None:
            assert len(self.steps) < max_steps
            self.steps.append(step)
            self.check_plan(step)
            self.execute(step)
            for running in self.scheduler.commit(step):
                self.check_context(running)
                self.scheduler.retire(running)
                self.finished.append(running)
            self.check_books()
        assert sorted(r.request.index for r in self.finished) == sorted(
            r.index for r in self.requests
        )
        assert self.pool.used == 0
        assert (self.scheduler.tables == -1).all()
        return self

    def check_plan(self, step: Step) -> None:
        running = self.scheduler.running
        assert len(running) <= self.scheduler.max_batch
        order = [self.requests.index(r.request) for r in running]
        assert order == sorted(order), "older requests come first"
        assert sum(count for _, _, count in step.prefill) <= self.scheduler.chunk_tokens
        assert not set(map(id, step.preempted)) & set(map(id, step.admitted))
        assert len({id(r) for r in step.decode}) == len(step.decode)
        assert set(map(id, step.decode)).isdisjoint(id(r) for r, _, _ in step.prefill)
        for one in step.preempted:
            assert self.requests.index(one.request) > max(order), "the youngest gives way"
        waiting = [self.requests.index(w.request) for w in self.scheduler.waiting]
        assert waiting == sorted(waiting), "the queue is by arrival"

    def execute(self, step: Step) -> None:
        for source, target in step.copies:
            for row in range(self.block_size):
                self.memory.pop((target, row), None)
                if (source, row) in self.memory:
                    self.memory[target, row] = self.memory[source, row]
        for running, start, count in step.prefill:
            for position in range(start, start + count):
                self.write(running, position)
        for running in step.decode:
            self.write(running, running.written)

    def write(self, running: Running, position: int) -> None:
        place, row = divmod(position, self.block_size)
        block = int(self.scheduler.tables[running.row, place])
        assert block == running.blocks[place]
        assert self.pool.references(block) == 1, "a shared block is written"
        self.memory[block, row] = identity(running.request, position)
        self.writes += 1

    def check_context(self, running: Running) -> None:
        request = running.request
        assert running.written == request.total_tokens
        for position in range(request.total_tokens):
            place, row = divmod(position, self.block_size)
            block = int(self.scheduler.tables[running.row, place])
            assert self.memory[block, row] == identity(request, position)

    def check_books(self) -> None:
        owners = np.zeros(self.pool.capacity, np.int64)
        for running in self.scheduler.running:
            assert len(set(running.blocks)) == len(running.blocks)
            owners[running.blocks] += 1
            table = self.scheduler.tables[running.row]
            assert table[: len(running.blocks)].tolist() == running.blocks
            assert (table[len(running.blocks) :] == -1).all()
        assert [self.pool.references(b) for b in range(self.pool.capacity)] == owners.tolist()
        assert self.pool.used == (owners > 0).sum()
        assert self.pool.used + self.pool.free == self.pool.capacity
        counters = self.scheduler.counters
        assert counters.steps == len(self.steps)
        assert self.writes == (
            counters.prefill_tokens + counters.decode_tokens + counters.recomputed_tokens
        )
        assert counters.preemptions == sum(len(s.preempted) for s in self.steps)
        assert counters.copies == sum(len(s.copies) for s in self.steps)


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    """Few ids and few lengths, so that prefixes and whole prompts come again."""
    found = []
    for index in range(draw(st.integers(1, 7))):
        length = draw(st.sampled_from([1, 15, 16, 40, 100, 512, 530, 700]) | st.integers(1, 700))
        blocks = -(-length // 512)
        ids = draw(st.lists(st.integers(0, 1), min_size=blocks, max_size=blocks))
        # An id stands for its whole block: a tail of another length is another block.
        if length % 512:
            ids[-1] = ids[-1] * 1000 + length
        found.append(TraceRequest(index, 0.0, length, draw(st.integers(0, 60)), tuple(ids)))
    return found


@given(
    traces(),
    st.sampled_from([1, 7, 16, 40, 128, 600]),
    st.integers(1, 5),
    st.sampled_from([1, 5, 64, 1000]) | st.integers(1, 100),
    st.integers(0, 12),
)
def test_every_schedule_ends_and_every_context_is_whole(
    requests: list[TraceRequest], block_size: int, max_batch: int, chunk: int, spare: int
) -> None:
    if block_size == 1:  # keep the number of blocks small
        requests = [r for r in requests if r.total_tokens < 200] or requests[:1]
    needed = max(-(-r.total_tokens // block_size) for r in requests)
    served = Served(
        requests,
        capacity=needed + spare,
        block_size=block_size,
        max_batch=max_batch,
        chunk_tokens=max(chunk, 5),
    ).run()
    counters = served.scheduler.counters
    assert counters.seen_tokens == sum(r.total_tokens for r in requests)
    assert counters.prompt_tokens == sum(r.input_length for r in requests)
    assert counters.prefix_hit_tokens <= counters.prompt_tokens
    if not counters.preemptions:
        assert counters.recomputed_tokens == counters.recovered_tokens == 0


@given(traces(), st.sampled_from([16, 100, 128, 512]))
def test_prefix_hits_of_one_at_a_time_are_those_of_a_set_of_prefixes(
    requests: list[TraceRequest], block_size: int
) -> None:
    """With room for everything, a hit is a block whose whole prefix was seen before."""
    seen: set[object] = set()
    expected = 0
    for request in requests:
        length = request.input_length
        # The identity of a prompt token names all blocks up to its own, so the last token of
        # a prefix stands for the whole of it.
        ends = [*range(block_size, length, block_size), length]
        prefixes = [identity(request, end - 1) for end in ends]
        known = [prefix in seen for prefix in prefixes]
        hits = known.index(False) if False in known else len(known)
        expected += ends[hits - 1] if hits else 0
        seen.update(prefixes)
    served = Served(requests, capacity=400, block_size=block_size, max_batch=1).run()
    assert served.scheduler.counters.prefix_hit_tokens == expected


def request(
    index: int, length: int, output: int = 0, ids: tuple[int, ...] | None = None
) -> TraceRequest:
    blocks = -(-length // 512)
    unique = tuple(1000 * (index + 1) + i for i in range(blocks))
    return TraceRequest(index, float(index), length, output, unique if ids is None else ids)


def test_a_prompt_is_cut_into_chunks_and_then_decoded() -> None:
    served = Served([request(0, 150, 3)], capacity=10, chunk_tokens=64).run()
    prefill = [[(start, count) for _, start, count in step.prefill] for step in served.steps]
    assert prefill == [[(0, 64)], [(64, 64)], [(128, 22)], [], [], []]
    assert [len(step.decode) for step in served.steps] == [0, 0, 0, 1, 1, 1]


def test_a_chunk_is_shared_by_order_of_arrival() -> None:
    served = Served([request(i, 40) for i in range(3)], capacity=20, chunk_tokens=64).run()
    first, second = (
        [(r.request.index, start, count) for r, start, count in step.prefill]
        for step in served.steps
    )
    assert first == [(0, 0, 40), (1, 0, 24)]
    assert second == [(1, 24, 16), (2, 0, 40)]


def test_the_batch_is_limited_and_filled_up_as_requests_leave() -> None:
    served = Served([request(i, 8, 2) for i in range(5)], capacity=20, max_batch=2).run()
    admitted = [[r.request.index for r in step.admitted] for step in served.steps]
    assert [a for a in admitted if a] == [[0, 1], [2, 3], [4]]


def test_the_youngest_is_preempted_and_computed_again() -> None:
    # Two that grow from 2 to 4 blocks each, in 6: both ask for the fourth in the same step.
    served = Served([request(0, 30, 30), request(1, 30, 30)], capacity=6, max_batch=2).run()
    preempted = [r.request.index for step in served.steps for r in step.preempted]
    assert preempted == [1]
    counters = served.scheduler.counters
    assert counters.preemptions == 1
    # It had 48 tokens in three blocks; the other one took the last of them.
    assert (counters.recomputed_tokens, counters.recovered_tokens) == (16, 32)
    assert counters.decode_tokens == 60
    assert [r.request.index for r in served.finished] == [0, 1]


def test_an_equal_prompt_shares_the_partial_tail_and_copies_it_before_writing() -> None:
    same = (7,)
    served = Served(
        [request(0, 40, 30, same), request(1, 40, 30, same)],
        capacity=20,
        max_batch=2,
        chunk_tokens=40,
    )
    served.run()
    counters = served.scheduler.counters
    assert counters.prefix_hit_tokens == 40, "all of the second prompt"
    assert counters.copies == 1, "one copies, the other is then alone and does not"
    assert counters.prefill_tokens == 40


def test_a_tail_of_another_length_is_not_shared() -> None:
    served = Served(
        [request(0, 40, 3, (7,)), request(1, 44, 3, (7,))], capacity=20, max_batch=1
    ).run()
    assert served.scheduler.counters.prefix_hit_tokens == 0


def test_an_equal_prompt_that_comes_late_finds_the_prompt_but_not_the_answer() -> None:
    same = (7,)
    requests = [request(i, 40, 30, same) for i in range(3)]
    served = Served(requests, capacity=20, max_batch=1).run()
    counters = served.scheduler.counters
    assert counters.prefix_hit_tokens == 80
    assert counters.copies == 0, "nobody else holds it, so it is written in place"


def test_prompts_without_output_that_are_known_take_a_step_and_no_write() -> None:
    served = Served([request(i, 40, 0, (7,)) for i in range(2)], capacity=9, max_batch=1).run()
    assert served.writes == 40
    assert len(served.steps) == 2


def test_nobody_overtakes_a_request_that_does_not_fit_yet() -> None:
    requests = [request(0, 100, 20), request(1, 100, 1), request(2, 10, 1)]
    served = Served(requests, capacity=9, max_batch=3, chunk_tokens=500).run()
    admitted = [r.request.index for step in served.steps for r in step.admitted]
    assert admitted == [0, 1, 2]
    assert [r.request.index for r in served.steps[0].admitted] == [0]


def test_no_requests_no_steps() -> None:
    assert Scheduler([], BlockPool(1), block_size=4, max_batch=1, chunk_tokens=1).plan() is None


def test_what_cannot_fit_is_refused_before_any_work() -> None:
    pool = BlockPool(4)
    with pytest.raises(
        ParamInvalidError,
        match=r"^request 1: expected at most 4 blocks of 16 tokens \(the pool\), got 5: "
        r"a prompt of 60 tokens and 5 to generate$",
    ):
        Scheduler(
            [request(0, 64), request(1, 60, 5)],
            pool,
            block_size=16,
            max_batch=2,
            chunk_tokens=16,
        )
    assert pool.used == 0


@pytest.mark.parametrize("argument", ["block_size", "max_batch", "chunk_tokens"])
@pytest.mark.parametrize("bad", [0, -1, True, 1.0, None, "2"])
def test_bad_figures(argument: str, bad: object) -> None:
    figures: dict[str, object] = {"block_size": 16, "max_batch": 2, "chunk_tokens": 8}
    with pytest.raises(ParamInvalidError, match=f"^{argument}: expected an integer of at least 1"):
        Scheduler([], BlockPool(4), **{**figures, argument: bad})  # type: ignore[arg-type]
