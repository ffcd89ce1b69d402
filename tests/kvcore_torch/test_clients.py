# SPDX-License-Identifier: Apache-2.0
"""Small clients in the shapes and call forms of public serving code, on the stand-in.

Each is written here from what such code passes: which operator, positional or by keyword, which
views and slices, which dtypes.  They know ``torch_npu`` and ``torch`` and nothing of kvcore; what
they must compute is said beside them with plain indexing.
"""

from __future__ import annotations

from typing import Any

import pytest

from tensors import WITHOUT_TORCH

torch = pytest.importorskip("torch", reason=WITHOUT_TORCH)

BLOCKS, PAGE, HEADS, SIZE = 8, 16, 2, 32


def rows_of(cache: Any) -> Any:
    return cache.reshape(BLOCKS * PAGE, *cache.shape[2:])


# ---------------------------------------------------------------- vllm-ascend
class PagedAttentionLayer:
    """An attention layer that stores padded batches and reads chunks back (MHA, MLA)."""

    def __init__(self, torch_npu: Any, key_size: int, value_size: int, heads: int) -> None:
        self.npu = torch_npu
        shape = (2, BLOCKS, PAGE, heads)
        self.key_cache = torch.zeros(*shape[1:], key_size, dtype=torch.bfloat16)
        self.value_cache = torch.zeros(*shape[1:], value_size, dtype=torch.bfloat16)

    def store(self, key: Any, value: Any, slot_mapping: Any, num_actual_tokens: int) -> None:
        slots = slot_mapping.to(torch.int32)
        self.npu._npu_reshape_and_cache(
            key=key[:num_actual_tokens],
            value=value[:num_actual_tokens],
            key_cache=self.key_cache,
            value_cache=self.value_cache,
            slot_indices=slots[:num_actual_tokens],
        )

    def load_chunk(self, block_table: Any, lengths: Any, starts: Any) -> tuple[Any, Any]:
        tokens = int(lengths.sum())
        made = [
            torch.empty(tokens, c.size(2), c.size(-1), dtype=c.dtype)
            for c in (self.key_cache, self.value_cache)
        ]
        self.npu.atb.npu_paged_cache_load(
            self.key_cache,
            self.value_cache,
            block_table,
            lengths,
            seq_starts=starts,
            key=made[0],
            value=made[1],
        )
        return made[0], made[1]

    def load_chunk_on_newer_hardware(self, table: Any, lengths: Any, starts: Any) -> Any:
        key = torch.empty(int(lengths.sum()), *self.key_cache.shape[2:], dtype=torch.bfloat16)
        value = torch.empty(int(lengths.sum()), *self.value_cache.shape[2:], dtype=torch.bfloat16)
        self.npu.npu_gather_pa_kv_cache(
            self.key_cache,
            self.value_cache,
            table,
            lengths.contiguous(),
            seq_offset=starts,
            key=key,
            value=value,
        )
        return key, value


@pytest.mark.parametrize(("heads", "sizes"), [(HEADS, (SIZE, SIZE)), (1, (512, 64))])
def test_a_paged_attention_layer(torch_npu: Any, heads: int, sizes: tuple[int, int]) -> None:
    layer = PagedAttentionLayer(torch_npu, *sizes, heads)
    key, value = (torch.randn(12, heads, size).to(torch.bfloat16) for size in sizes)
    slots = torch.tensor([48, 49, 50, 80, 81, -1, -1, 0, 0, 0, 0, 0])
    layer.store(key, value, slots, 7)
    assert torch.equal(rows_of(layer.key_cache)[slots[:5]], key[:5])
    assert torch.equal(rows_of(layer.value_cache)[slots[:5]], value[:5])
    assert not rows_of(layer.key_cache)[0].any(), "neither padding nor the rest was stored"
    table = torch.tensor([[7, 3], [5, 0]], dtype=torch.int32)
    lengths = torch.tensor([3, 9, 2, 9], dtype=torch.int32)[::2]
    starts = torch.tensor([PAGE, 0], dtype=torch.int32)
    for load in (layer.load_chunk, layer.load_chunk_on_newer_hardware):
        for seen, want in zip(load(table, lengths, starts), (key, value), strict=True):
            assert torch.equal(seen, want[:5])


def test_pages_pulled_from_several_ranks(torch_npu: Any) -> None:
    """A connector reorders the heads of pages it has received: load, transpose, store."""
    pulls = 2
    caches = [torch.randn(BLOCKS, PAGE, HEADS, SIZE).half() for _ in range(2)]
    before = [c.clone() for c in caches]
    blocks = torch.tensor([6, 1, 4], dtype=torch.int32)
    tokens = len(blocks) * PAGE
    buffers = [torch.empty(tokens, HEADS, SIZE).half() for _ in range(2)]
    torch_npu.atb.npu_paged_cache_load(
        *caches,
        blocks.view(1, -1),
        torch.tensor([tokens], dtype=torch.int32),
        seq_starts=torch.tensor([0], dtype=torch.int32),
        key=buffers[0],
        value=buffers[1],
    )
    offsets = torch.arange(PAGE, dtype=torch.int32)
    slots = (offsets.reshape(1, PAGE) + blocks.reshape(-1, 1) * PAGE).flatten()
    for i, buffer in enumerate(buffers):
        paged = buffer.view(len(blocks), pulls, PAGE, -1)
        paged.transpose_(1, 2)
        buffers[i] = paged.contiguous().view(tokens, HEADS, -1)
    torch_npu._npu_reshape_and_cache(
        key=buffers[0],
        value=buffers[1],
        key_cache=caches[0],
        value_cache=caches[1],
        slot_indices=slots,
    )
    for cache, old in zip(caches, before, strict=True):
        pages = old[blocks].view(len(blocks), pulls, PAGE, -1).transpose(1, 2)
        assert torch.equal(cache[blocks], pages.reshape(len(blocks), PAGE, HEADS, SIZE))
        untouched = [b for b in range(BLOCKS) if b not in blocks.tolist()]
        assert torch.equal(cache[untouched], old[untouched])


def test_an_index_cache_by_rows(torch_npu: Any) -> None:
    """The indexer's key cache is written as rows, with a column of slots."""
    index_cache = torch.zeros(BLOCKS, PAGE, 1, 128).half()
    key = torch.randn(5, 1, 128).half()
    slots = torch.tensor([100, 3, 17, 64, 127])
    torch_npu.npu_scatter_nd_update_(
        index_cache.view(-1, key.shape[-1]), slots.view(-1, 1), key.view(-1, key.shape[-1])
    )
    assert torch.equal(rows_of(index_cache)[slots], key)
    newer = torch.zeros(BLOCKS, PAGE, 128).half()
    torch_npu.npu_scatter_pa_cache(key, slots.contiguous(), key_cache=newer.unsqueeze(2))
    assert torch.equal(newer.view(-1, 1, 128), index_cache.view(-1, 1, 128))


class OffloadWorker:
    """Blocks between a device cache and a host pool, by addresses, on a stream of its own."""

    def __init__(self, torch_npu: Any, device: Any, host: Any) -> None:
        self.npu, self.device, self.host = torch_npu.npu, device, host
        self.stream = self.npu.Stream()
        self.events: list[Any] = []

    def move(self, blocks: Any, places: Any, to_host: bool) -> Any:
        size = self.device.stride(0) * self.device.element_size()
        inside = self.device.data_ptr() + blocks * size
        outside = self.host.data_ptr() + places * size
        sizes = torch.full((len(blocks),), size, dtype=torch.int64)
        self.stream.wait_stream(self.npu.current_stream())
        if self.events:
            self.stream.wait_event(self.events[-1])
        with self.npu.stream(self.stream):
            done = self.npu.Event()
            pair = (inside, outside) if to_host else (outside, inside)
            torch.ops._C_ascend.swap_blocks_batch(*pair, sizes, 1 if to_host else 0)
            done.record(self.stream)
        self.events.append(done)
        return done


def test_an_offload_worker(torch_npu: Any) -> None:
    device = torch.randint(-128, 128, (BLOCKS, 512), dtype=torch.int8)
    host = torch.zeros(4, 512, dtype=torch.int8)
    want = device.clone()
    worker = OffloadWorker(torch_npu, device, host)
    blocks, places = torch.tensor([1, 6]), torch.tensor([3, 0])
    assert worker.move(blocks, places, to_host=True).query()
    device[blocks] = 0
    event = worker.move(blocks, places, to_host=False)
    event.synchronize()
    torch_npu.npu.current_stream().wait_event(event)
    assert torch.equal(device, want)


# ---------------------------------------------------------------- SGLang
class TokenPool:
    """A token pool whose buffers are one tensor, with a page of its own for padding."""

    def __init__(self, torch_npu: Any, use_rows: bool) -> None:
        self.npu, self.use_rows = torch_npu, use_rows
        self.kv_buffer = torch.zeros(2, 1, BLOCKS, PAGE, HEADS, SIZE, dtype=torch.bfloat16)
        self.k_buffer, self.v_buffer = self.kv_buffer[0], self.kv_buffer[1]

    def set_kv_buffer(self, layer: int, loc: Any, cache_k: Any, cache_v: Any) -> None:
        if self.use_rows:
            for buffer, rows in ((self.k_buffer, cache_k), (self.v_buffer, cache_v)):
                self.npu.npu_scatter_nd_update_(
                    buffer[layer].view(-1, 1, HEADS, SIZE),
                    loc.view(-1, 1),
                    rows.view(-1, 1, HEADS, SIZE),
                )
            return
        self.npu._npu_reshape_and_cache(
            key=cache_k,
            value=cache_v,
            key_cache=self.k_buffer[layer].view(-1, PAGE, HEADS, SIZE),
            value_cache=self.v_buffer[layer].view(-1, PAGE, HEADS, SIZE),
            slot_indices=loc.to(torch.int32),
        )


@pytest.mark.parametrize("use_rows", [False, True])
def test_a_token_pool(torch_npu: Any, use_rows: bool) -> None:
    pool = TokenPool(torch_npu, use_rows)
    loc = torch.tensor([17, 18, 99])
    key, value = (torch.randn(3, HEADS, SIZE).to(torch.bfloat16) for _ in range(2))
    pool.set_kv_buffer(0, loc, key, value)
    assert torch.equal(rows_of(pool.k_buffer[0])[loc], key)
    assert torch.equal(rows_of(pool.v_buffer[0])[loc], value)
    assert pool.kv_buffer.count_nonzero() == 2 * key.numel()


def test_a_latent_pool_of_pages_of_one(torch_npu: Any) -> None:
    pool = torch.zeros(1, 40, 1, 576, dtype=torch.bfloat16)
    latent, loc = torch.randn(3, 576).to(torch.bfloat16), torch.tensor([4, 39, 1])
    torch_npu._npu_reshape_and_cache_siso(
        key=latent.view(-1, 1, 576), key_cache=pool[0].view(-1, 1, 1, 576), slot_indices=loc
    )
    assert torch.equal(pool[0, loc, 0], latent)


def test_a_table_of_slots(torch_npu: Any) -> None:
    """Not a cache at all: int64 numbers, one a row."""
    mapping = torch.zeros(50, dtype=torch.int64)
    full, window = torch.tensor([7, 30, 31]), torch.tensor([2, 0, 9])
    torch_npu.npu_scatter_nd_update_(
        mapping, full.to(torch.int64).unsqueeze(-1), window.to(torch.int64)
    )
    assert mapping[full].tolist() == [2, 0, 9]


# ---------------------------------------------------------------- small engines
def test_nz_views_of_an_nd_buffer(torch_npu: Any) -> None:
    """A buffer of no shape of its own, seen as PA_NZ by whoever writes and reads it."""
    column = 16
    buffers = [torch.zeros(BLOCKS, PAGE, HEADS, SIZE).half() for _ in range(2)]
    views = [b.view(BLOCKS, HEADS * SIZE // column, PAGE, column) for b in buffers]
    key, value = torch.randn(4, HEADS, 2 * SIZE).half().chunk(2, -1)
    slots = torch.tensor([5, 20, 21, 127], dtype=torch.int32)
    torch_npu.npu_scatter_pa_kv_cache(key.contiguous(), value.contiguous(), *views, slots)
    for view, rows in zip(views, (key, value), strict=True):
        for i, slot in enumerate(slots.tolist()):
            seen = view[slot // PAGE, :, slot % PAGE].reshape(HEADS, SIZE)
            assert torch.equal(seen, rows[i])


def test_caches_that_are_made_in_nz(torch_npu: Any) -> None:
    """A kernel's test: FRACTAL_NZ caches made as such, filled by an operator that has no mode."""
    shape = (BLOCKS, HEADS * SIZE // 16, PAGE, 16)
    caches = [
        torch_npu.empty_with_format(size=shape, dtype=torch.float16, device="npu", acl_format=29)
        for _ in range(2)
    ]
    assert [torch_npu.get_npu_format(cache) for cache in caches] == [29, 29]
    key, value = torch.randn(2, 3, HEADS, SIZE).half()
    torch_npu._npu_reshape_and_cache(
        key=key,
        value=value,
        key_cache=caches[0],
        value_cache=caches[1],
        slot_indices=torch.tensor([PAGE + 3, 0, 5], dtype=torch.int32),
    )
    for cache, rows in zip(caches, (key, value), strict=True):
        assert torch.equal(cache[1, :, 3].reshape(HEADS, SIZE), rows[0])


def test_a_pool_that_writes_the_views_of_a_fused_projection(torch_npu: Any) -> None:
    """Columns of one projection as K and V, one scatter into pages; float8 kept as int8."""
    buffers = torch.zeros(2, 3, BLOCKS * PAGE, 1, HEADS, SIZE, dtype=torch.uint8)
    qkv = torch.randn(4, 5 * HEADS * SIZE).to(torch.float8_e4m3fn)
    width, loc = HEADS * SIZE, torch.tensor([1, 5, 11, 100])
    key, value = (qkv[:, i * width : (i + 1) * width].view(-1, HEADS, SIZE) for i in (1, 3))
    pages = [buffer[1].view(torch.int8).view(-1, PAGE, HEADS, SIZE) for buffer in buffers]
    torch_npu.npu_scatter_pa_kv_cache(
        key.view(torch.int8), value.view(torch.int8), *pages, loc, cache_mode="Norm"
    )
    for buffer, rows in zip(buffers, (key, value), strict=True):
        assert torch.equal(buffer[1, loc, 0], rows.view(torch.uint8))
        assert not buffer[0].any()
        assert not buffer[2].any()


def test_a_layer_whose_device_adaptor_makes_everything_contiguous(torch_npu: Any) -> None:
    """One class for every device: slots by another name, copies made before the operator."""

    class Adaptor:
        @classmethod
        def reshape_and_cache(
            cls, key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any
        ) -> None:
            torch_npu.npu_scatter_pa_kv_cache(
                key=key.contiguous(),
                value=value.contiguous(),
                key_cache=key_cache,
                value_cache=value_cache,
                slot_mapping=slot_mapping.contiguous(),
                cache_mode="Norm",
            )

        @classmethod
        def kv_cache_load(cls, caches: Any, table: Any, lengths: Any, starts: Any) -> Any:
            made = [torch.empty(int(lengths.sum()), *c.shape[2:], dtype=c.dtype) for c in caches]
            torch_npu.npu_gather_pa_kv_cache(
                *caches, table, lengths.contiguous(), seq_offset=starts, key=made[0], value=made[1]
            )
            return made

    caches = torch.zeros(2, BLOCKS, PAGE, 1, 512, dtype=torch.bfloat16)[..., :512].split(1)
    caches = caches[0][0], torch.zeros(BLOCKS, PAGE, 1, 64, dtype=torch.bfloat16)
    latent = torch.randn(2, 576).bfloat16()
    parts = [part.view(2, 1, -1) for part in latent.split([512, 64], -1)]
    slots = torch.tensor([[3 * PAGE, -1], [3 * PAGE + 1, -1]])[:, 0]
    Adaptor.reshape_and_cache(*parts, *caches, slots)
    table, starts = torch.tensor([[0, 3]], dtype=torch.int32), torch.tensor([PAGE]).int()
    loaded = Adaptor.kv_cache_load(caches, table, torch.tensor([2]).int(), starts)
    for seen, want in zip(loaded, parts, strict=True):
        assert torch.equal(seen, want)


def test_caches_that_are_cast_to_nz(torch_npu: Any) -> None:
    """int8 keys and bfloat16 values, each cast once; the operator goes by the format."""
    key_cache = torch_npu.npu_format_cast(torch.zeros(4, 16, 128, 32, dtype=torch.int8), 29)
    value_cache = torch_npu.npu_format_cast(torch.zeros(4, 4, 128, 16, dtype=torch.bfloat16), 29)
    key = torch.randint(-128, 128, (3, 1, 512), dtype=torch.int8)
    value = torch.randn(3, 1, 64).to(torch.bfloat16)
    slots = torch.tensor([130, 0, 511], dtype=torch.int32)
    torch_npu._npu_reshape_and_cache(key, value, key_cache, value_cache, slots)
    for i, slot in enumerate(slots.tolist()):
        assert torch.equal(key_cache[slot // 128, :, slot % 128].flatten(), key[i, 0])
        assert torch.equal(value_cache[slot // 128, :, slot % 128].flatten(), value[i, 0])


# ---------------------------------------------------------------- cann-recipes-infer
def test_sparse_offload_step_by_step(torch_npu: Any) -> None:
    """The full cache is swapped memory; each step selects again and keeps what it has."""
    batch, topk, page, latent, rope = 2, 8, 16, 512, 64
    full = torch_npu.empty_with_swapped_memory(
        (16, page, 1, latent), dtype=torch.bfloat16, device="npu"
    )
    full_rope = torch_npu.empty_with_swapped_memory((16, page, 1, rope), dtype=torch.bfloat16)
    full.copy_(torch.randn(full.shape))
    full_rope.copy_(torch.randn(full_rope.shape))
    table = torch.randperm(16, dtype=torch.int32).view(batch, 8)
    selected = torch.zeros(batch, page, latent, dtype=torch.bfloat16)
    selected_rope = torch.zeros(batch, page, rope, dtype=torch.bfloat16)
    own_table = torch.arange(batch, dtype=torch.int32).view(batch, 1)
    status = torch.full((batch, 1, topk + 1), -1, dtype=torch.int32)
    lengths = torch.tensor([100, 60], dtype=torch.int32)
    for step in range(3):
        ids = torch.stack([torch.randperm(60)[:topk] for _ in range(batch)]).to(torch.int32)
        ids[0, 5:] = -1
        valid = torch_npu.npu_gather_selection_kv_cache(
            selection_k_rope=selected_rope,
            selection_kv_cache=selected,
            selection_kv_block_table=own_table,
            selection_kv_block_status=status,
            selection_topk_indices=ids.view(batch, 1, topk),
            full_k_rope=full_rope.squeeze(2),
            full_kv_cache=full.squeeze(2),
            full_kv_block_table=table,
            full_kv_actual_seq=lengths + step,
            full_q_actual_seq=torch.arange(1, batch + 1, dtype=torch.int32),  # running totals
            selection_topk_block_size=1,
        )
        assert valid.tolist() == [5, topk]
        for b in range(batch):
            held = status[b, 0, : valid[b]]
            assert sorted(held.tolist()) == sorted(i for i in ids[b].tolist() if i >= 0)
            blocks, rows = table[b][held // page], held % page
            assert torch.equal(selected[b, : valid[b]], full[blocks, rows, 0])
            assert torch.equal(selected_rope[b, : valid[b]], full_rope[blocks, rows, 0])
