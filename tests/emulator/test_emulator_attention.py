# SPDX-License-Identifier: Apache-2.0
"""Sparse, incremental, prompt and ATB's paged attention against formulas written with loops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


def rows(torch: Any, *shape: int, seed: int = 1) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole_numbers(torch: Any, *shape: int, seed: int = 1) -> Any:
    """Small integers, of which sums are exact in every order."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def near(torch: Any, found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found.cpu().double(), wanted.double(), rtol=1e-4, atol=1e-5)


def weighed(
    q: Any, keys: list[Any], values: list[Any], scale: float
) -> tuple[list[float], float, float]:
    """Softmax attention of one vector: the result, the largest score, the sum below it."""
    scores = [float(q.double() @ k.double()) * scale for k in keys]
    top = max(scores)
    parts = [math.exp(score - top) for score in scores]
    out = sum((p / sum(parts) * v.double() for p, v in zip(parts, values, strict=True)))
    return out, top, sum(parts)


def packed(torch: Any, tokens: list[Any], table: list[list[int]], blocks: int, size: int) -> Any:
    """[blocks, size, ...]: the tokens of each request where its table says, 9 elsewhere."""
    cache = torch.full((blocks, size, *tokens[0].shape[1:]), 9.0)
    for own, row in zip(tokens, table, strict=True):
        for i, token in enumerate(own):
            cache[row[i // size], i % size] = token
    return cache


TABLE = [[4, 0, 2], [1, 5, 3]]


# ---------------------------------------------------------------- the indexer
def best(q: Any, k: Any, w: Any, seen: int, count: int) -> list[int]:
    """Tokens by their sums, largest first and the earlier of two that are equal; -1 behind."""
    sums = [
        sum(float(w[n]) * max(0.0, float(q[n] @ k[t])) for n in range(len(q))) for t in range(seen)
    ]
    found = sorted(range(seen), key=lambda t: (-sums[t], t))[:count]
    return found + [-1] * (count - len(found))


@pytest.mark.parametrize("mode", [0, 3])
@pytest.mark.parametrize("count", [1, 4, 12])
def test_indexer(npu: ModuleType, torch: Any, mode: int, count: int) -> None:
    q, k = whole_numbers(torch, 2, 3, 4, 8), whole_numbers(torch, 2, 7, 1, 8, seed=2)
    w = whole_numbers(torch, 2, 3, 4, seed=3)
    lengths = torch.tensor([7, 5], dtype=torch.int32)
    found, values = npu.npu_lightning_indexer(
        q.npu(), k.npu(), w.npu(), actual_seq_lengths_key=lengths.npu(), sparse_count=count,
        sparse_mode=mode, return_value=True,
    )  # fmt: skip
    assert found.dtype == torch.int32
    assert found.shape == values.shape == (2, 3, 1, count)
    for b, i in itertools.product(range(2), range(3)):
        length = int(lengths[b])
        seen = length - 3 + i + 1 if mode == 3 else length
        wanted = best(q[b, i], k[b, :, 0], w[b, i], seen, count)
        assert found[b, i, 0].tolist() == wanted
        sums = [
            sum(float(w[b, i, n]) * max(0.0, float(q[b, i, n] @ k[b, t, 0])) for n in range(4))
            for t in wanted
            if t >= 0
        ]
        assert values[b, i, 0, : len(sums)].tolist() == sums


@pytest.mark.parametrize("paged", [False, True])
def test_indexer_of_packed_tokens(npu: ModuleType, torch: Any, paged: bool) -> None:
    """Queries of requests one behind the other; keys likewise, or in blocks of a cache."""
    q, w = whole_numbers(torch, 5, 4, 8), whole_numbers(torch, 5, 4, seed=3)
    own = [whole_numbers(torch, n, 1, 8, seed=s) for n, s in ((9, 2), (6, 7))]
    ends, lengths = [2, 5], [9, 6]
    given = {"actual_seq_lengths_query": torch.tensor(ends, dtype=torch.int32).npu()}
    if paged:
        keys = packed(torch, own, TABLE, 6, 4)
        given["block_table"] = torch.tensor(TABLE, dtype=torch.int32).npu()
    else:
        keys = torch.cat(own)
        lengths = [9, 15]
    given["actual_seq_lengths_key"] = torch.tensor(lengths, dtype=torch.int32).npu()
    found, _ = npu.npu_lightning_indexer(
        q.npu(), keys.npu(), w.npu(), layout_query="TND",
        layout_key="PA_BSND" if paged else "TND", sparse_count=3, **given,
    )  # fmt: skip
    for b, (start, end) in enumerate(((0, 2), (2, 5))):
        for i in range(end - start):
            seen = len(own[b]) - (end - start) + i + 1
            wanted = best(q[start + i], own[b][:, 0], w[start + i], seen, 3)
            assert found[start + i, 0].tolist() == wanted


# ---------------------------------------------------------------- attention over chosen tokens
CHOSEN = [[[0, 3, -1], [4, 1, 2], [6, 5, -1]], [[-1, 0, 0], [2, 0, -1], [1, 3, 4]]]


@pytest.mark.parametrize("mode", [0, 3])
@pytest.mark.parametrize("size", [1, 2])
def test_sparse_attention(npu: ModuleType, torch: Any, mode: int, size: int) -> None:
    length, count = (7, 3) if size == 1 else (13, 3)
    q, rope = rows(torch, 2, 3, 4, 8), rows(torch, 2, 3, 4, 2, seed=2)
    k, key_rope = rows(torch, 2, length, 1, 8, seed=3), rows(torch, 2, length, 1, 2, seed=4)
    indices = torch.tensor(CHOSEN, dtype=torch.int32).unsqueeze(2)
    out, top, total = npu.npu_sparse_flash_attention(
        q.npu(), k.npu(), k.npu(), indices.npu(), 0.3, query_rope=rope.npu(),
        key_rope=key_rope.npu(), sparse_block_size=size, sparse_mode=mode, attention_mode=2,
        return_softmax_lse=True,
    )  # fmt: skip
    assert out.shape == q.shape
    assert top.shape == total.shape == (2, 1, 3, 4)
    whole = torch.cat((k, key_rope), -1)
    for b, i, n in itertools.product(range(2), range(3), range(4)):
        blocks = list(itertools.takewhile(lambda x: x >= 0, CHOSEN[b][i][:count]))
        tokens = [t for x in blocks for t in range(x * size, x * size + size) if t < length]
        if mode == 3:
            tokens = [t for t in tokens if t <= length - 3 + i]
        if not tokens:
            assert out[b, i, n].tolist() == [0.0] * 8
            continue
        wanted, most, below = weighed(
            torch.cat((q[b, i, n], rope[b, i, n])), [whole[b, t, 0] for t in tokens],
            [k[b, t, 0] for t in tokens], 0.3,
        )  # fmt: skip
        near(torch, out[b, i, n], wanted)
        assert top[b, 0, i, n].item() == pytest.approx(most, rel=1e-4, abs=1e-5)
        assert total[b, 0, i, n].item() == pytest.approx(below, rel=1e-4)


def paged_call(npu: ModuleType, torch: Any, indices: Any) -> tuple[Callable[[], Any], list[Any]]:
    """A call on paged keys of two requests with 9 and 6 tokens; and what it is made of."""
    q, rope = rows(torch, 3, 4, 8), rows(torch, 3, 4, 2, seed=2)
    own = [rows(torch, n, 1, 10, seed=s) for n, s in ((9, 3), (6, 4))]
    caches = [
        packed(torch, [x[..., a:b] for x in own], TABLE, 6, 4).npu() for a, b in ((0, 8), (8, 10))
    ]
    given = {
        "query_rope": rope.npu(), "key_rope": caches[1], "attention_mode": 2,
        "layout_query": "TND", "layout_kv": "PA_BSND",
        "block_table": torch.tensor(TABLE, dtype=torch.int32).npu(),
        "actual_seq_lengths_query": torch.tensor([1, 3], dtype=torch.int32).npu(),
        "actual_seq_lengths_kv": torch.tensor([9, 6], dtype=torch.int32).npu(),
    }  # fmt: skip
    there = q.npu(), indices.npu()

    def call() -> Any:
        return npu.npu_sparse_flash_attention(
            there[0], caches[0], caches[0], there[1], 0.3, **given
        )[0]

    return call, [q, rope, own, caches]


def test_sparse_attention_of_paged_keys(npu: ModuleType, torch: Any) -> None:
    """What the indices leave out may be written by another stream meanwhile."""
    chosen = [[8, 0, 3], [1, 4, -1], [5, 2, 0]]
    indices = torch.tensor(chosen, dtype=torch.int32).unsqueeze(1)
    call, (q, rope, own, caches) = paged_call(npu, torch, indices)
    side = torch.npu.Stream()
    torch.npu.synchronize()
    out = call()
    with torch.npu.stream(side):
        caches[0][4, 1] = 7.0  # token 1 of the first request
    torch.npu.synchronize()
    for t, (b, row) in enumerate(zip((0, 1, 1), chosen, strict=True)):
        tokens = [x for x in row if x >= 0]
        limit = 6 - 2 + t - 1 if b else 8
        tokens = [x for x in tokens if x <= limit]
        for n in range(4):
            wanted, _, _ = weighed(
                torch.cat((q[t, n], rope[t, n])), [own[b][x, 0] for x in tokens],
                [own[b][x, 0, :8] for x in tokens], 0.3,
            )  # fmt: skip
            near(torch, out[t, n], wanted)


def test_a_chosen_token_that_is_not_there(npu: ModuleType, torch: Any) -> None:
    indices = torch.tensor([[[9]], [[0]], [[0]]], dtype=torch.int32)
    call, _ = paged_call(npu, torch, indices)
    call()
    with pytest.raises(RuntimeError, match="sparse_indices: expected blocks of 1 tokens"):
        torch.npu.synchronize()


# ---------------------------------------------------------------- one token, and a prompt
def attend(torch: Any, q: Any, k: Any, v: Any, sees: Callable[[int, int], bool]) -> Any:
    """[S, N, D] of one request; rows that see nothing are 0."""
    out, group = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64), len(q[0]) // len(k[0])
    for i, n in itertools.product(range(q.shape[0]), range(q.shape[1])):
        seen = [j for j in range(k.shape[0]) if sees(i, j)]
        if seen:
            keys, values = ([x[j, n // group] for j in seen] for x in (k, v))
            out[i, n] = weighed(q[i, n], keys, values, 0.4)[0]
    return out


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
def test_incremental_attention(npu: ModuleType, torch: Any, layout: str) -> None:
    q, k, v = (
        rows(torch, 2, 1, 4, 8),
        rows(torch, 2, 5, 2, 8, seed=2),
        rows(torch, 2, 5, 2, 8, seed=3),
    )
    mask = torch.tensor([[0, 1, 0, 0, 0], [1, 0, 0, 0, 0]], dtype=torch.bool)

    def put(x: Any) -> Any:
        return x.flatten(2) if layout == "BSH" else x.transpose(1, 2) if layout == "BNSD" else x

    def there(x: Any) -> Any:
        return put(x).contiguous().npu()

    out = npu.npu_incre_flash_attention(
        there(q), there(k), there(v), num_heads=4, num_key_value_heads=2, input_layout=layout,
        scale_value=0.4, atten_mask=mask.view(2, 1, 1, 5).npu(), actual_seq_lengths=[5, 3],
    )  # fmt: skip
    wanted = torch.stack(
        [
            attend(torch, q[b], k[b], v[b], lambda i, j, b=b: j < (5, 3)[b] and not mask[b, j])
            for b in range(2)
        ]
    )
    near(torch, out, put(wanted))


def test_incremental_attention_of_paged_keys(npu: ModuleType, torch: Any) -> None:
    q = rows(torch, 2, 1, 32)
    own = [rows(torch, n, 2, 8, seed=s) for n, s in ((9, 3), (6, 4))]
    cache = packed(torch, own, TABLE, 6, 4).flatten(2).npu()
    out = npu.npu_incre_flash_attention(
        q.npu(), cache, cache, num_heads=4, num_key_value_heads=2, scale_value=0.4, block_size=4,
        block_table=torch.tensor(TABLE, dtype=torch.int32).npu(), actual_seq_lengths=[9, 6],
    )  # fmt: skip
    for b in range(2):
        wanted = attend(torch, q[b].view(1, 4, 8), own[b], own[b], lambda i, j: True)
        near(torch, out[b].view(1, 4, 8), wanted)


@pytest.mark.parametrize("mode", [0, 2, 3])
def test_prompt_attention(npu: ModuleType, torch: Any, mode: int) -> None:
    """Without next_tokens a mask of mode 0 hides what is behind a token, too."""
    q, k, v = (
        rows(torch, 2, 4, 3, 8),
        rows(torch, 2, 4, 5, 8, seed=2),
        rows(torch, 2, 4, 5, 8, seed=3),
    )
    shape = (3, 5) if mode == 0 else (2048, 2048)
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[1, 0] = mode == 0
    out = npu.npu_prompt_flash_attention(
        q.npu(), k.npu(), v.npu(), num_heads=4, input_layout="BNSD_BSND", scale_value=0.4,
        atten_mask=mask.npu(), sparse_mode=mode, actual_seq_lengths=[3, 2],
        actual_seq_lengths_kv=[5, 4],
    )  # fmt: skip
    assert out.shape == (2, 3, 4, 8)
    for b, (own, other) in enumerate(((3, 5), (2, 4))):
        shift = other - own if mode == 3 else 0
        wanted = attend(
            torch, q[b].transpose(0, 1)[:own], k[b].transpose(0, 1)[:other],
            v[b].transpose(0, 1)[:other], lambda i, j, s=shift: j <= i + s and not mask[i, j],
        )  # fmt: skip
        near(torch, out[b, :own], wanted)


def test_prompt_attention_without_a_mask_sees_everything(npu: ModuleType, torch: Any) -> None:
    q, k = rows(torch, 1, 3, 2, 8), rows(torch, 1, 4, 2, 8, seed=2)
    out = npu.npu_prompt_flash_attention(
        q.npu(), k.npu(), k.npu(), num_heads=2, input_layout="BSND", scale_value=0.4
    )
    near(torch, out[0], attend(torch, q[0], k[0], k[0], lambda i, j: True))


# ---------------------------------------------------------------- ATB's
@pytest.mark.parametrize("on_host", [True, False])
def test_paged_attention(npu: ModuleType, torch: Any, on_host: bool) -> None:
    """Clients have the lengths on the host; they count as they are at the call."""
    q = rows(torch, 2, 4, 8)
    own = [rows(torch, n, 2, 8, seed=s) for n, s in ((9, 3), (6, 4))]
    cache = packed(torch, own, TABLE, 6, 4).npu()
    table = torch.tensor(TABLE, dtype=torch.int32).npu()
    lengths = torch.tensor([9, 6], dtype=torch.int32)
    out = torch.full((2, 4, 8), 5.0).npu()
    there = lengths if on_host else lengths.npu()
    result = npu._npu_paged_attention(
        query=q.npu(), key_cache=cache, value_cache=cache, num_kv_heads=2, num_heads=4,
        scale_value=0.4, block_table=table, context_lens=there, out=out,
    )  # fmt: skip
    assert result is None
    lengths.zero_()
    for b in range(2):
        near(torch, out[b : b + 1], attend(torch, q[b : b + 1], own[b], own[b], lambda i, j: True))


def test_paged_attention_in_a_graph(npu: ModuleType, torch: Any) -> None:
    q, cache = rows(torch, 1, 2, 8).npu(), rows(torch, 4, 4, 1, 8, seed=2)
    there, out = cache.npu(), torch.zeros(1, 2, 8).npu()
    table, lengths = torch.tensor([[2, 1]], dtype=torch.int32).npu(), torch.tensor([3])
    given = there, there, 1, 2, 0.4, table, lengths
    workspace = npu._npu_paged_attention_get_workspace(q, *given, out)
    graph = torch.npu.NPUGraph()
    torch.npu.synchronize()
    with torch.npu.graph(graph):
        npu._npu_paged_attention(q, *given, out, workspace=workspace)
    for seed in (5, 6):
        new = rows(torch, 1, 2, 8, seed=seed)
        q.copy_(new)
        graph.replay()
        keys = cache[2, :3]
        near(torch, out, attend(torch, new, keys, keys, lambda i, j: True))


# ---------------------------------------------------------------- refusals
def refused(text: str) -> Any:
    return pytest.raises(RuntimeError, match=text)


def test_what_the_references_refuse(npu: ModuleType, torch: Any) -> None:
    q, k, w = (rows(torch, *s).npu() for s in ((1, 1, 2, 8), (1, 4, 1, 8), (1, 1, 2)))
    index, lens = npu.npu_lightning_indexer, torch.tensor([4], dtype=torch.int32).npu()
    table = torch.zeros(1, 1, dtype=torch.int32).npu()
    with refused("layout_key: expected 'BSND' or 'PA_BSND', got 'TND'"):
        index(q, k[0], w, layout_key="TND", actual_seq_lengths_key=lens)
    with refused("block_table goes with layout_key 'PA_BSND', got 'BSND'"):
        index(q, k, w, block_table=table)
    with refused("actual_seq_lengths_key: needed with layout_key 'PA_BSND'"):
        index(q, k, w, layout_key="PA_BSND", block_table=table)
    with refused("key: expected one head, got 2"):
        index(q, k.view(1, 2, 2, 8), w)
    with refused("sparse_count: expected 1 to 2048, got 4096"):
        index(q, k, w, sparse_count=4096)
    with refused("pre_tokens: expected one of 9223372036854775807, got 5"):
        index(q, k, w, pre_tokens=5)
    chosen = torch.zeros(1, 1, 1, 1, dtype=torch.int32).npu()
    attend_sparse = npu.npu_sparse_flash_attention
    with refused("attention_mode: expected one of 2, got 0"):
        attend_sparse(q, k, k, chosen, 1.0)
    with refused("query_rope: needed with attention_mode 2"):
        attend_sparse(q, k, k, chosen, 1.0, attention_mode=2)
    given = {"query_rope": q[..., :2], "key_rope": k[..., :2], "attention_mode": 2}
    with refused("sparse_block_size: expected one of 1, 2, .*, got 3"):
        attend_sparse(q, k, k, chosen, 1.0, sparse_block_size=3, **given)
    with refused("the emulated machine's reference has no sinks"):
        attend_sparse(q, k, k, chosen, 1.0, sinks=w, **given)
    with refused("sparse_indices: expected int32"):
        attend_sparse(q, k, k, chosen.long(), 1.0, **given)
    with refused("query: expected one token of each request, got 4"):
        npu.npu_incre_flash_attention(k, k, k, input_layout="BSND")
    with refused("the emulated machine's reference has no pse_shift"):
        npu.npu_incre_flash_attention(q, k, k, num_heads=2, num_key_value_heads=1,
                                      input_layout="BSND", pse_shift=w)  # fmt: skip
    with refused("input_layout: expected one of 'BSH', 'BSND', 'BNSD'"):
        npu.npu_prompt_flash_attention(q[0], k[0], k[0], input_layout="TND")
    with refused("actual_seq_lengths_kv: expected lengths of 3 requests or one for all, got 2"):
        three = k.expand(3, -1, -1, -1).contiguous()
        npu.npu_prompt_flash_attention(
            three, three, three, input_layout="BSND", actual_seq_lengths_kv=[1, 2]
        )
    out = torch.zeros(1, 2, 8).npu()
    paged = npu._npu_paged_attention
    with refused("block_table: expected a tensor of the device, got one of the host"):
        paged(q[0], k, k, 1, 2, 1.0, table.cpu(), lens, out)
    with refused(r"context_lens: expected \[1\], got \[2\]"):
        paged(q[0], k, k, 1, 2, 1.0, table, torch.tensor([1, 1]), out)
    with refused("out: expected .* got"):
        paged(q[0], k, k, 1, 2, 1.0, table, lens, out[:, :1])
