# SPDX-License-Identifier: Apache-2.0
"""What the caches hold after a replay, against a dense model of each request.

The dense model knows no blocks, slots or layouts: a request's context is an array of tokens.
The caches are read with the layouts' definitions, written here once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import kvcore
from kvcore.errors import DeviceOutOfMemoryError, ParamInvalidError
from kvcore.replay import (
    ModelProfile,
    ModelShape,
    Replay,
    TraceRequest,
    generate_trace,
    slot_mapping,
)
from kvcore.replay.serving.scheduler import Running
from kvcore.replay.traces.content import expected_row

MASK = 2**64 - 1


def dense_context(
    request: TraceRequest, layer: int, lane: int, row_bytes: int, seed: int
) -> NDArray[np.uint8]:
    """[tokens, row_bytes] of the whole request."""
    rows = [
        expected_row(request, position, layer, lane, row_bytes, seed)
        for position in range(request.total_tokens)
    ]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), row_bytes)


def context_in(replay: Replay, running: Running, layer: int, lane: int) -> NDArray[np.uint8]:
    """[tokens, row_bytes] of the whole request, as its block table says where."""
    caches = replay.serving.caches
    cache = (caches.keys, caches.values)[lane][layer]
    assert cache is not None
    table = replay.scheduler.tables[running.row]
    blocks = cache[table[: len(running.blocks)]]
    if caches.layout != "Norm":  # [blocks, heads or columns, rows, ...]
        blocks = np.moveaxis(blocks, 1, 2)
    rows = np.ascontiguousarray(blocks).view(np.uint8)
    rows = rows.reshape(len(blocks) * caches.block_size, -1)
    return rows[: running.request.total_tokens]


def serve(requests: Sequence[TraceRequest], shape: ModelShape, **options: Any) -> Replay:
    """Replays to the end and compares every byte of every request."""
    seed = options.setdefault("seed", 7)
    checked = []

    def compare(running: Running) -> None:
        for layer in range(shape.num_layers):
            for lane, row_bytes in enumerate(shape.row_bytes):
                if row_bytes:
                    np.testing.assert_array_equal(
                        context_in(replay, running, layer, lane),
                        dense_context(running.request, layer, lane, row_bytes, seed),
                    )
        checked.append(running.request.index)

    replay = Replay(requests, shape, on_finished=compare, **options)
    report = replay.run()
    assert sorted(checked) == sorted(r.index for r in requests)
    assert report.ok
    assert report.finished_requests == len(requests)
    assert not report.interrupted
    assert replay.serving.pool.used == 0
    return replay


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    found = []
    for index in range(draw(st.integers(1, 5))):
        length = draw(st.sampled_from([1, 16, 40, 512, 530]) | st.integers(1, 600))
        ids = draw(
            st.lists(st.integers(0, 1), min_size=-(-length // 512), max_size=-(-length // 512))
        )
        found.append(TraceRequest(index, 0.0, length, draw(st.integers(0, 40)), tuple(ids)))
    return found


@st.composite
def shapes(draw: st.DrawFn, layout: str) -> ModelShape:
    dtype = draw(st.sampled_from(["bfloat16", "int8", "float32", "float4_e2m1", "hifloat8"]))
    heads = draw(st.integers(1, 2))
    if layout == "PA_NZ":  # 64 elements are at least 32 bytes of any type
        sizes = st.sampled_from([64, 128])
        key, value = draw(sizes), draw(st.just(0) | sizes)
    else:
        key = 2 * draw(st.integers(1, 9))
        value = 2 * draw(st.integers(0, 9))
    return ModelShape("drawn", draw(st.integers(1, 2)), heads, key, value, dtype)


@pytest.mark.parametrize("layout", ["Norm", "NHSD", "PA_NZ"])
@settings(max_examples=25)  # each of them is some hundreds of tokens, one by one
@given(data=st.data())
def test_every_byte_of_every_request_is_right(layout: str, data: st.DataObject) -> None:
    requests = data.draw(traces())
    block_size = data.draw(st.sampled_from([7, 16, 100, 128, 600]))
    needed = max(-(-r.total_tokens // block_size) for r in requests)
    serve(
        requests,
        data.draw(shapes(layout)),
        layout=layout,
        num_blocks=needed + data.draw(st.integers(0, 6)),
        block_size=block_size,
        max_batch=data.draw(st.integers(1, 4)),
        chunk_tokens=data.draw(st.sampled_from([3, 64, 1000])),
        seed=data.draw(st.integers(0, MASK)),
        verify_samples=data.draw(st.integers(0, 20)),
        num_threads=data.draw(st.sampled_from([None, 1, 2])),
    )


SMALL = ModelShape("small", 2, 2, 16, 32)
TINY = ModelProfile.named("tiny").shape


@pytest.mark.parametrize("layout", ["Norm", "NHSD", "PA_NZ"])
def test_preemption_and_copy_on_write_lose_nothing(layout: str) -> None:
    same, other = (7,), (8,)
    requests = [
        TraceRequest(0, 0.0, 40, 60, same),
        TraceRequest(1, 1.0, 40, 60, same),
        TraceRequest(2, 2.0, 40, 60, other),
        TraceRequest(3, 3.0, 40, 60, same),
    ]
    replay = serve(
        requests,
        SMALL,
        layout=layout,
        num_blocks=14,
        block_size=16,
        max_batch=4,
        chunk_tokens=40,
    )
    counters = replay.scheduler.counters
    assert counters.preemptions > 0
    assert counters.recomputed_tokens > 0
    assert counters.copies > 0
    report = replay.report()
    assert report.copied_bytes == counters.copies * 16 * SMALL.token_bytes
    assert report.written_tokens == 100 * 4 - counters.prefix_hit_tokens + (
        counters.recomputed_tokens
    )
    assert report.written_bytes == report.written_tokens * 2 * (2 * 16 * 2 + 2 * 32 * 2)


def test_a_generated_trace_is_served_whole_and_the_same_way_twice() -> None:
    requests = list(generate_trace(12, seed=5))
    one, two = (Replay(requests, TINY, num_blocks=1100, seed=5).run().to_dict() for _ in range(2))
    for result in (one, two):
        assert result["verified"] == {"samples": 1000, "mismatches": []}
        assert result["requests"] == {"total": 12, "finished": 12}
        for timing in ("seconds", "scatter_gb_per_s"):
            del result[timing]
    assert one == two


def test_the_operator_is_the_default_and_takes_what_the_model_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    real = kvcore.scatter_pa_kv_cache

    def spy(key: Any, key_cache: Any, slots: Any, *rest: Any, **keywords: Any) -> None:
        calls.append((key.shape, key_cache.shape, slots.dtype, keywords))
        real(key, key_cache, slots, *rest, **keywords)

    monkeypatch.setattr(kvcore, "scatter_pa_kv_cache", spy)
    shape = ModelShape("x", 3, 2, 32, 64, "float8_e5m2")
    requests = [TraceRequest(0, 0.0, 5, 1, (0,))]
    Replay(requests, shape, num_blocks=2, block_size=8, layout="PA_NZ", num_threads=1).run()
    keywords = {
        "cache_mode": "PA_NZ",
        "scatter_mode": "None",
        "dtype": "float8_e5m2",
        "value_dtype": "float8_e5m2",
        "num_threads": 1,
    }
    assert calls == [
        ((tokens, 2, 32), (2, 2, 8, 32), np.dtype(np.int64), keywords)
        for tokens in (5, 1)
        for _layer in range(3)
    ]


def test_wrong_bytes_are_found() -> None:
    def forgetful(key: Any, key_cache: Any, slots: Any, value: Any, cache: Any, **_: Any) -> None:
        kvcore.scatter_pa_kv_cache(key, key_cache, slots, value, cache)
        value_rows = cache.reshape(-1, *cache.shape[2:])
        value_rows[slots[slots % 16 == 3]] ^= 1  # one bit of an element, now and then

    requests = [TraceRequest(4, 0.0, 160, 0, (0,))]
    replay = Replay(
        requests, SMALL, num_blocks=10, block_size=16, verify_samples=400, write=forgetful
    )
    report = replay.run()
    assert not report.ok
    assert {m.row for m in report.mismatches} == {3}
    assert {m.lane for m in report.mismatches} == {"value"}
    assert {m.layer for m in report.mismatches} == {0, 1}
    first = report.mismatches[0]
    assert str(first) == (
        f"request 4, token {first.position}, layer {first.layer}, value: "
        f"block {first.block} row 3 does not hold what was written"
    )


def test_slots_off_by_one_are_found() -> None:
    def shifted(key: Any, key_cache: Any, slots: Any, value: Any, cache: Any, **_: Any) -> None:
        kvcore.scatter_pa_kv_cache(key, key_cache, (slots + 1) % 160, value, cache)

    requests = [TraceRequest(0, 0.0, 100, 20, (0,))]
    replay = Replay(requests, SMALL, num_blocks=10, block_size=16, verify_samples=50, write=shifted)
    assert len(replay.run().mismatches) == 100


@pytest.mark.parametrize(("samples", "requests"), [(0, 3), (1, 3), (10, 3), (3, 7)])
def test_samples_come_out_even(samples: int, requests: int) -> None:
    trace = [TraceRequest(i, 0.0, 20, 3, (i,)) for i in range(requests)]
    replay = Replay(trace, SMALL, num_blocks=20, block_size=16, verify_samples=samples)
    assert replay.run().verified_samples == samples


def test_it_stops_between_two_steps_when_told() -> None:
    trace = [TraceRequest(i, 0.0, 20, 30, (i,)) for i in range(4)]
    replay = Replay(trace, SMALL, num_blocks=20, block_size=16, max_batch=2)
    seen: list[int] = []
    report = replay.run(stop=lambda: len(seen) == 3, progress=lambda r: seen.append(r.seen_tokens))
    assert report.interrupted
    assert report.counters.steps == 3
    assert report.finished_requests == 0
    assert report.pool_used > 0
    assert seen == sorted(seen)
    assert replay.run().finished_requests == 4, "and goes on from there"
    assert replay.seen_tokens == replay.total_tokens == 200


def test_stopping_after_the_last_step_is_no_interruption() -> None:
    replay = Replay([TraceRequest(0, 0.0, 5, 0, (0,))], SMALL, num_blocks=1, block_size=16)
    report = replay.run(stop=lambda: True)
    assert (report.finished_requests, report.interrupted) == (1, False)


def test_slot_mapping_is_block_times_size_plus_row() -> None:
    tables = np.array([[5, 0, 9], [2, 7, -1]])
    rows = np.array([0, 0, 1, 0, 1])
    positions = np.array([0, 11, 4, 8, 3])
    slots = slot_mapping(tables, rows, positions, 4)
    assert slots.tolist() == [20, 39, 28, 36, 11]
    assert slots.dtype == np.int64


def test_slots_do_not_wrap() -> None:
    tables = np.array([[2**40]])
    zero = np.array([0])
    assert slot_mapping(tables, zero, zero + 3, 4).tolist() == [2**42 + 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 0}, "num_blocks: expected an integer of at least 1, got 0"),
        ({"num_blocks": True}, "num_blocks: expected an integer"),
        ({"block_size": -1}, "block_size: expected an integer of at least 1, got -1"),
        ({"layout": "ND"}, "layout: expected one of Norm, NHSD, PA_NZ, got 'ND'"),
        ({"layout": None}, "layout: expected one of"),
        ({"max_batch": 0}, "max_batch: expected an integer of at least 1, got 0"),
        ({"chunk_tokens": 2.0}, "chunk_tokens: expected an integer of at least 1, got 2.0"),
        ({"verify_samples": -1}, "verify_samples: expected an integer of at least 0, got -1"),
        ({"num_blocks": 2, "block_size": 16}, "request 0: expected at most 2 blocks of 16"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    requests = [TraceRequest(0, 0.0, 40, 9, (0,))]
    with pytest.raises(ParamInvalidError, match=f"^{message}"):
        Replay(requests, SMALL, **{"num_blocks": 9, "block_size": 16, **options})


def test_more_cache_than_memory_is_refused_before_it_is_taken() -> None:
    with pytest.raises(DeviceOutOfMemoryError, match=r"^num_blocks: expected caches that fit"):
        Replay([], SMALL, num_blocks=10**15)


def test_nz_needs_whole_columns() -> None:
    shape = ModelShape("x", 1, 2, 32, 20)
    with pytest.raises(
        ParamInvalidError,
        match=r"^value_head_size: expected a multiple of 32 bytes for PA_NZ, got 40",
    ):
        Replay([], shape, num_blocks=1, layout="PA_NZ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers: expected an integer from 1 to 4096, got 0"),
        ({"num_heads": 2.0}, "num_heads: expected an integer from 1 to 65536, got 2.0"),
        ({"head_size": True}, "head_size: expected an integer"),
        ({"value_head_size": -1}, "value_head_size: expected an integer from 0 to 65536, got -1"),
        ({"dtype": "bf16"}, "dtype: expected one of float16, bfloat16, .*, got 'bf16'"),
        ({"dtype": None}, "dtype: expected one of"),
        ({"dtype": "float4_e2m1", "head_size": 3}, "head_size: expected an even number for float4"),
    ],
)
def test_bad_shapes(change: dict[str, Any], message: str) -> None:
    figures = {
        "num_layers": 1,
        "num_heads": 1,
        "head_size": 2,
        "value_head_size": 2,
        "dtype": "int8",
    }
    with pytest.raises(ParamInvalidError, match=f"^{message}"):
        ModelShape("x", **{**figures, **change})


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [("tiny", 1024), ("llama-3-8b", 131_072), ("deepseek-v3.2", 61 * 576 * 2)],
)
def test_bytes_of_a_token(name: str, token_bytes: int) -> None:
    assert ModelProfile.named(name).shape.token_bytes == token_bytes
