# SPDX-License-Identifier: Apache-2.0
"""KV-cache operators of the real torch_npu against plain torch on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


def rows(torch: Any, *shape: int, dtype: Any = None, seed: int = 3) -> Any:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 20
    return made.to(torch.float16 if dtype is None else dtype)


@pytest.fixture
def internal_formats(torch: Any) -> Iterator[None]:
    torch.npu.config.allow_internal_format = True
    yield
    torch.npu.config.allow_internal_format = False


@pytest.mark.parametrize("name", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_scatter_norm(npu: Any, torch: Any, name: str, index: str) -> None:
    dtype = getattr(torch, name)
    key, value = rows(torch, 4, 2, 32, dtype=dtype), rows(torch, 4, 2, 32, dtype=dtype, seed=5)
    caches = [rows(torch, 3, 16, 2, 32, dtype=dtype, seed=s) for s in (7, 8)]
    slots = torch.tensor([47, 0, 17, 5], dtype=getattr(torch, index))
    there = [x.npu() for x in (key, value, *caches, slots)]
    npu.npu_scatter_pa_kv_cache(*there, cache_mode="Norm")
    for source, cache, result in zip((key, value), caches, there[2:4], strict=True):
        expected = cache.clone().view(-1, 2, 32)
        expected[slots.long()] = source
        assert torch.equal(result.cpu().view(-1, 2, 32), expected)


def nz(torch: Any, cache: Any, heads: int, head_size: int, lane: int) -> Any:
    """A Norm cache [nb, bs, H, D] as the pages of PA_NZ: [nb, H*D/lane, bs, lane]."""
    nb, bs = cache.shape[:2]
    return cache.reshape(nb, bs, heads * head_size // lane, lane).transpose(1, 2).contiguous()


@pytest.mark.parametrize(("name", "lane"), [("float16", 16), ("bfloat16", 16), ("int8", 32)])
@pytest.mark.parametrize("cast", [False, True])
def test_scatter_nz(
    npu: Any, torch: Any, internal_formats: None, name: str, lane: int, cast: bool
) -> None:
    """Pages as they lie, and caches that were cast to NZ: the same bytes."""
    dtype = getattr(torch, name)
    key, value = rows(torch, 4, 2, 32, dtype=dtype), rows(torch, 4, 2, 32, dtype=dtype, seed=5)
    caches = [rows(torch, 3, 16, 2, 32, dtype=dtype, seed=s) for s in (7, 8)]
    slots = torch.tensor([47, 0, 17, 5], dtype=torch.int32)
    there = [nz(torch, cache, 2, 32, lane).npu() for cache in caches]
    if cast:
        there = [npu.npu_format_cast(cache, 29) for cache in there]
        assert [npu.get_npu_format(cache) for cache in there] == [29, 29]
    npu.npu_scatter_pa_kv_cache(key.npu(), value.npu(), *there, slots.npu(), cache_mode="PA_NZ")
    for source, cache, result in zip((key, value), caches, there, strict=True):
        expected = cache.clone().view(-1, 2, 32)
        expected[slots.long()] = source
        wanted = nz(torch, expected.view(3, 16, 2, 32), 2, 32, lane)
        assert torch.equal(result.cpu(), wanted)


@pytest.mark.parametrize("cumulative", [False, True])
@pytest.mark.parametrize("offset", [False, True])
def test_gather(npu: Any, torch: Any, cumulative: bool, offset: bool) -> None:
    keys, values = rows(torch, 5, 16, 2, 32), rows(torch, 5, 16, 2, 32, seed=9)
    tables = torch.tensor([[4, 1, 0], [2, 3, 1]], dtype=torch.int32)
    lengths = [20, 7]
    starts = [16, 0] if offset else [0, 0]
    told = [0, 20, 27] if cumulative else lengths
    outs = [torch.zeros(27, 2, 32, dtype=torch.float16).npu() for _ in range(2)]
    npu.npu_gather_pa_kv_cache(
        keys.npu(), values.npu(), tables.npu(), torch.tensor(told, dtype=torch.int32).npu(), *outs,
        seq_offset=torch.tensor(starts, dtype=torch.int32).npu() if offset else None,
        is_seq_lens_cumsum=cumulative,
    )  # fmt: skip
    for cache, out in zip((keys, values), outs, strict=True):
        expected = [
            cache[tables[b].long()].reshape(-1, 2, 32)[starts[b] : starts[b] + lengths[b]]
            for b in range(2)
        ]
        assert torch.equal(out.cpu(), torch.cat(expected))


def test_a_slot_that_is_not_there(npu: Any, torch: Any) -> None:
    """As on the device: the stream fails, and the next call works."""
    cache = torch.zeros(2, 16, 1, 32, dtype=torch.float16).npu()
    key = rows(torch, 1, 1, 32).npu()
    bad, good = (torch.tensor([slot], dtype=torch.int32).npu() for slot in (32, 31))
    npu.npu_scatter_pa_kv_cache(key, key, cache, cache.clone(), bad, cache_mode="Norm")
    with pytest.raises(RuntimeError, match="507035"):
        torch.npu.synchronize()
    npu.npu_scatter_pa_kv_cache(key, key, cache, cache.clone(), good, cache_mode="Norm")
    assert torch.equal(cache.cpu().view(32, 32)[31], key.cpu().view(32))


# ---------------------------------------------------------------- other operators
def test_scatter_nd_update(npu: Any, torch: Any) -> None:
    var = rows(torch, 6, 3, 8)
    for index, shape in (([[1], [4]], (2, 3, 8)), ([[1, 2], [0, 0], [5, 1]], (3, 8))):
        indices, updates = torch.tensor(index), rows(torch, *shape, seed=11)
        expected = var.clone()
        for at, row in zip(index, updates, strict=True):
            expected[tuple(at)] = row
        there = var.npu()
        npu.npu_scatter_nd_update_(there, indices.npu(), updates.npu())
        assert torch.equal(there.cpu(), expected)
        made = npu.npu_scatter_nd_update(var.npu(), indices.npu(), updates.npu())
        assert torch.equal(made.cpu(), expected)


def test_reshape_and_cache(npu: Any, torch: Any) -> None:
    key, value = rows(torch, 3, 2, 32), rows(torch, 3, 2, 32, seed=5)
    caches = [rows(torch, 2, 16, 2, 32, seed=s) for s in (7, 8)]
    slots = torch.tensor([31, 0, 17], dtype=torch.int32)
    there = [cache.npu() for cache in caches]
    npu._npu_reshape_and_cache(
        key=key.npu(), value=value.npu(), key_cache=there[0], value_cache=there[1],
        slot_indices=slots.npu(),
    )  # fmt: skip
    alone = caches[0].npu()
    npu._npu_reshape_and_cache_siso(key=key.npu(), key_cache=alone, slot_indices=slots.npu())
    for source, cache, result in (
        (key, caches[0], there[0]), (value, caches[1], there[1]), (key, caches[0], alone),
    ):  # fmt: skip
        expected = cache.clone().view(-1, 2, 32)
        expected[slots.long()] = source
        assert torch.equal(result.cpu().view(-1, 2, 32), expected)


def test_reshape_and_cache_skips_padding(npu: Any, torch: Any) -> None:
    """Also where the first slot, which no padding stands for, is written."""
    key, cache = rows(torch, 4, 2, 32), rows(torch, 2, 16, 2, 32, seed=7)
    slots = torch.tensor([0, -1, 4, -1], dtype=torch.int32)
    there = cache.npu()
    npu._npu_reshape_and_cache_siso(key.npu(), there, slots.npu())
    expected = cache.clone().view(-1, 2, 32)
    expected[0], expected[4] = key[0], key[2]
    assert torch.equal(there.cpu().view(-1, 2, 32), expected)


def test_paged_cache_load(npu: Any, torch: Any) -> None:
    keys, values = rows(torch, 5, 16, 2, 32), rows(torch, 5, 16, 2, 32, seed=9)
    tables = torch.tensor([[4, 1], [2, 3]], dtype=torch.int32).npu()
    lengths = torch.tensor([20, 7], dtype=torch.int32).npu()
    got = npu.atb.npu_paged_cache_load(keys.npu(), values.npu(), tables, lengths)
    for cache, out in zip((keys, values), got, strict=True):
        expected = torch.cat([cache[4], cache[1][:4], cache[2][:7]])
        assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("cumulative", [False, True])
def test_paged_cache_load_of_views(npu: Any, torch: Any, cumulative: bool) -> None:
    """Both caches are parts of one, as an MLA cache is; requests begin at a block of their own."""
    both = rows(torch, 5, 16, 1, 96)
    tables = torch.tensor([[4, 1, 0], [2, 3, 1]], dtype=torch.int32)
    lengths = torch.tensor([0, 20, 27] if cumulative else [20, 7], dtype=torch.int32)
    starts = torch.tensor([17, 32], dtype=torch.int32)
    keys, values = both.npu().split([64, 32], dim=-1)
    given = (keys, values, tables.npu(), lengths.npu())
    got = npu.atb.npu_paged_cache_load(*given, seq_starts=starts.npu(), cumsum=cumulative)
    outs = [torch.zeros(27, 1, n, dtype=torch.float16).npu() for n in (64, 32)]
    npu.atb.npu_paged_cache_load(
        *given, seq_starts=starts.npu(), cumsum=cumulative, key=outs[0], value=outs[1]
    )
    expected = torch.cat([both[1], both[0][:4], both[1][:7]])
    for found in (got, outs):
        assert torch.equal(torch.cat(list(found), dim=-1).cpu(), expected)


def test_what_atb_does_not_write(npu: Any, torch: Any) -> None:
    """Strided caches and outputs, which ATB refuses as well; nothing is written."""
    whole = torch.zeros(2, 16, 2, 64, dtype=torch.float16).npu()
    part, good = whole[..., :32], torch.zeros(2, 16, 2, 32, dtype=torch.float16).npu()
    key, slot = rows(torch, 1, 2, 32).npu(), torch.zeros(1, dtype=torch.int32).npu()
    with pytest.raises(RuntimeError, match="value_cache: expected a contiguous tensor"):
        npu._npu_reshape_and_cache(key, key, good, part, slot)
    with pytest.raises(RuntimeError, match="key_cache: expected a contiguous tensor"):
        npu._npu_reshape_and_cache_siso(key, part, slot)
    table = torch.zeros(1, 1, dtype=torch.int32).npu()
    out = torch.zeros(16, 2, 64, dtype=torch.float16).npu()[..., :32]
    lengths = torch.tensor([16], dtype=torch.int32).npu()
    with pytest.raises(RuntimeError, match="key: expected a contiguous tensor"):
        npu.atb.npu_paged_cache_load(good, good, table, lengths, key=out, value=out)
    with pytest.raises(RuntimeError, match="context_lens: expected no negative value, got -16"):
        npu.atb.npu_paged_cache_load(good, good, table, -lengths)
    assert not whole.cpu().any()
    assert not good.cpu().any()
    npu._npu_reshape_and_cache(key.transpose(0, 1).reshape(1, 2, 32), key, good, good.clone(), slot)
    assert torch.equal(good[0, 0].cpu(), key[0].cpu())


def test_gather_selection(npu: Any, torch: Any) -> None:
    k_rope, kv = rows(torch, 4, 4, 16), rows(torch, 4, 4, 32, seed=4)
    arrays = {
        "selection_k_rope": torch.zeros(8, 4, 16, dtype=torch.float16),
        "selection_kv_cache": torch.zeros(8, 4, 32, dtype=torch.float16),
        "selection_kv_block_table": torch.arange(2, dtype=torch.int32).view(2, 1),
        "selection_kv_block_status": torch.full((2, 1, 1, 5), -1, dtype=torch.int32),
        "selection_topk_indices": torch.tensor(
            [[[[0, 2, 1, 3]]], [[[3, 0, 1, 2]]]], dtype=torch.int32
        ),
        "full_k_rope": k_rope,
        "full_kv_cache": kv,
        "full_kv_block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "full_kv_actual_seq": torch.tensor([6, 6], dtype=torch.int32),
        "full_q_actual_seq": torch.tensor([1, 1], dtype=torch.int32),
    }
    there = [x.npu() for x in arrays.values()]
    lengths = torch.ops.custom.npu_gather_selection_kv_cache(*there, selection_topk_block_size=1)
    assert lengths.cpu().tolist() == [4, 4]
    for full, selected in ((k_rope, there[0]), (kv, there[1])):
        for request, first in ((0, 0), (1, 2)):
            found = {tuple(row) for row in selected.cpu()[request].tolist()}
            assert found == {tuple(row) for row in full[first].tolist()}


def addresses(torch: Any, *tensors: Any) -> Any:
    return torch.tensor([tensor.data_ptr() for tensor in tensors])


def test_swap_blocks(npu: Any, torch: Any) -> None:
    """To the host, within the device and back, in stream order; nothing beside the blocks."""
    host = torch.zeros(4, 64, dtype=torch.float16).pin_memory()
    there = rows(torch, 4, 64).npu()
    wanted = there.cpu()
    sizes = torch.tensor([128, 128])
    swap = torch.ops._C_ascend.swap_blocks_batch
    there.mul_(2)  # before the copies
    swap(addresses(torch, there[0], there[3]), addresses(torch, host[2], host[1]), sizes, 1)
    swap(addresses(torch, there[1]), addresses(torch, there[2]), sizes[:1], 2)
    swap(addresses(torch, host[2]), addresses(torch, there[1]), sizes[:1], 0)
    torch.npu.synchronize()
    assert torch.equal(host, torch.stack([wanted[0] * 0, wanted[3] * 2, wanted[0] * 2, host[3]]))
    assert torch.equal(there.cpu(), wanted[[0, 0, 1, 3]] * 2)


def test_swap_blocks_in_a_graph(npu: Any, torch: Any) -> None:
    host, there = torch.zeros(64).pin_memory(), torch.zeros(64).npu()
    size = torch.tensor([256])
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        there.add_(1)
        torch.ops._C_ascend.swap_blocks_batch(
            addresses(torch, there), addresses(torch, host), size, 1
        )
    for n in (1.0, 2.0):
        graph.replay()
        torch.npu.synchronize()
        assert host.tolist() == [n] * 64


def test_swap_blocks_refuses(npu: Any, torch: Any) -> None:
    swap, there = torch.ops._C_ascend.swap_blocks_batch, torch.zeros(64).npu()
    at, size = addresses(torch, there), torch.tensor([256])
    for arguments, words in (
        ((at, at, size.int(), 2), "z: expected int64"),
        ((at, at, torch.tensor([256, 1]), 2), r"z: expected int64 \[1\]"),
        ((at, at, size, 3), "direction: expected 0"),
        ((at, at, -size, 2), "sizes >= 0"),
    ):
        with pytest.raises(RuntimeError, match=words):
            swap(*arguments)
    swap(at[:0], at[:0], size[:0], 2)


# ---------------------------------------------------------------- formats and swapped memory
@pytest.mark.parametrize("shape", [(16, 16), (2, 32, 48), (3, 17, 5), (2, 3, 20, 33)])
@pytest.mark.parametrize("name", ["float16", "float32", "int8", "bfloat16"])
def test_casts_to_nz_and_back(
    npu: Any, torch: Any, internal_formats: None, shape: tuple[int, ...], name: str
) -> None:
    host = rows(torch, *shape, dtype=getattr(torch, name))
    cast = npu.npu_format_cast(host.npu(), 29)
    assert npu.get_npu_format(cast) == 29
    assert cast.shape == host.shape
    assert torch.equal(npu.npu_format_cast(cast, 2).cpu(), host)
    assert torch.equal(cast.cpu(), host)


def test_operators_on_a_tensor_in_nz(npu: Any, torch: Any, internal_formats: None) -> None:
    host = rows(torch, 20, 33)
    cast = npu.npu_format_cast(host.npu(), 29)
    assert torch.equal((cast + 1).cpu(), host + 1)
    assert torch.equal((cast @ torch.eye(33).half().npu()).cpu(), host)
    cast.add_(1)
    assert npu.get_npu_format(cast) == 29
    assert torch.equal(cast.cpu(), host + 1)


def test_swapped_memory(npu: Any, torch: Any) -> None:
    """Host memory that the device sees: operators read and write it."""
    there = npu.empty_with_swapped_memory((4, 1024), dtype=torch.float16, device="npu")
    there.fill_(1.5)
    there[2].mul_(2)
    expected = torch.full((4, 1024), 1.5, dtype=torch.float16)
    expected[2] = 3
    assert torch.equal((there + 0).cpu(), expected)
    assert torch.equal((there * 2).sum(1).cpu(), (expected * 2).sum(1))
