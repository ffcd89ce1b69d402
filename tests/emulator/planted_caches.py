# SPDX-License-Identifier: Apache-2.0
"""One stream writes a paged cache while another reads it: a race in one block, none in two.

With ``fault`` the second stream names a block that the first writes.  Block tables, slots and
indices lie on the device: what they name is known when the task runs, and only then.
"""

from __future__ import annotations

import functools
from typing import Any

from planted import program, side_stream


def index(torch: Any, *values: Any, dtype: str = "int32") -> Any:
    return torch.tensor(values, dtype=getattr(torch, dtype), device="npu")


def attention(npu: Any, version: int) -> Any:
    """The operator but for query, keys, values, table and lengths."""
    common = {"num_key_value_heads": 2, "input_layout": "BNSD", "block_size": 16}
    if version == 1:
        return functools.partial(npu.npu_fused_infer_attention_score, num_heads=2, **common)
    return functools.partial(npu.npu_fused_infer_attention_score_v2, num_query_heads=2, **common)


@program("racecheck")
def attention_of_a_block(torch: Any, npu: Any, fault: bool) -> None:
    """[blocks, heads, size, D]; the same tensor is given as keys and as values."""
    keys = torch.ones(6, 2, 16, 8, device="npu")
    query, rows = torch.ones(2, 2, 1, 8, device="npu"), torch.ones(1, 2, 16, 8, device="npu")
    written, table = index(torch, 3, dtype="int64"), index(torch, [1, 3 if fault else 2], [4, 0])
    side, attend = side_stream(torch), attention(npu, 1)
    keys.index_copy_(0, written, rows)  # earlier
    with torch.npu.stream(side):
        attend(query, keys, keys, block_table=table, actual_seq_lengths_kv=[20, 16])  # later
    torch.npu.synchronize()


@program("racecheck")
def attention_up_to_a_length(torch: Any, npu: Any, fault: bool) -> None:
    """[blocks, size, H]: the next token is written into the block whose earlier ones are read."""
    keys = torch.ones(6, 16, 16, device="npu")
    query, row = torch.ones(1, 2, 1, 8, device="npu"), torch.ones(1, 16, device="npu")
    slots, table = index(torch, 52, dtype="int64"), index(torch, [1, 3])
    lengths = [21 if fault else 20]
    side, attend = side_stream(torch), attention(npu, 2)
    keys.view(-1, 16).index_copy_(0, slots, row)  # earlier
    with torch.npu.stream(side):
        attend(query, keys, keys, block_table=table, actual_seq_kvlen=lengths)  # later
    torch.npu.synchronize()


@program("racecheck")
def attention_before_the_write(torch: Any, npu: Any, fault: bool) -> None:
    """[blocks, heads, D / lane, size, lane]: what is read may not be written too soon."""
    keys = torch.ones(6, 2, 1, 16, 8, device="npu")
    query = torch.ones(1, 2, 1, 8, device="npu")
    table, lengths = index(torch, [5, 3]), [32 if fault else 16]
    side, attend = side_stream(torch), attention(npu, 1)
    with torch.npu.stream(side):
        attend(query, keys, keys, block_table=table, actual_seq_lengths_kv=lengths)  # earlier
    keys[3].zero_()  # later
    torch.npu.synchronize()


@program("racecheck")
def a_replayed_attention(torch: Any, npu: Any, fault: bool) -> None:
    """Captured with one table and replayed with another: the replay's counts."""
    keys = torch.ones(6, 2, 16, 8, device="npu")
    query = torch.ones(1, 2, 1, 8, device="npu")
    table = index(torch, [3])
    side, attend = side_stream(torch), attention(npu, 1)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        attend(query, keys, keys, block_table=table, actual_seq_lengths_kv=[16])  # later
    table.fill_(5 if fault else 4)
    torch.npu.synchronize()
    keys[5].zero_()  # earlier
    with torch.npu.stream(side):
        graph.replay()
    torch.npu.synchronize()


@program("racecheck")
def latent_rows(torch: Any, npu: Any, fault: bool) -> None:
    """npu_kv_rmsnorm_rope_cache writes the rows that its index names."""
    kv, gamma = torch.ones(2, 1, 1, 24, device="npu"), torch.ones(16, device="npu")
    angle = torch.ones(2, 1, 1, 8, device="npu")
    slots, blocks = index(torch, 17, 40, dtype="int64"), index(torch, 2 if fault else 3)
    ropes, latents = (torch.zeros(4, 16, 1, n, device="npu") for n in (8, 16))
    side = side_stream(torch)
    npu.npu_kv_rmsnorm_rope_cache(  # earlier
        kv, gamma, angle, angle, slots, ropes, latents, cache_mode="PA"
    )
    with torch.npu.stream(side):
        latents.index_select(0, blocks)  # later
    torch.npu.synchronize()


@program("racecheck")
def latent_rows_in_columns(torch: Any, npu: Any, fault: bool) -> None:
    """The same in PA_NZ: a slot is a column of each page's tiles."""
    kv, gamma = torch.ones(1, 1, 1, 24, device="npu"), torch.ones(16, device="npu")
    angle = torch.ones(1, 1, 1, 8, device="npu")
    slots = index(torch, 17, dtype="int64")
    ropes, latents = (torch.zeros(4, 16, 1, n, device="npu") for n in (8, 16))
    tiles = latents.view(4, 2, 16, 8)  # 32-byte lanes of float32
    side = side_stream(torch)
    npu.npu_kv_rmsnorm_rope_cache_v2(  # earlier
        kv, gamma, angle, angle, slots, ropes, latents, cache_mode="PA_NZ"
    )
    with torch.npu.stream(side):
        tiles[1, 1, 1 if fault else 2].sum()  # later
    torch.npu.synchronize()


@program("racecheck")
def rows_by_index(torch: Any, npu: Any, fault: bool) -> None:
    """npu_scatter_nd_update_ beside an embedding, which reads the rows that it looks up."""
    table, rows = torch.zeros(8, 16, device="npu"), torch.ones(2, 16, device="npu")
    places, tokens = index(torch, [2], [5]), index(torch, 5 if fault else 4, 1)
    side = side_stream(torch)
    npu.npu_scatter_nd_update_(table, places, rows)  # earlier
    with torch.npu.stream(side):
        torch.nn.functional.embedding(tokens, table)  # later
    torch.npu.synchronize()


@program("racecheck")
def rows_of_one_cache(torch: Any, npu: Any, fault: bool) -> None:
    """ATB's write; padding writes nothing, not even the first row."""
    cache, key = torch.zeros(4, 16, 2, 8, device="npu"), torch.ones(2, 2, 8, device="npu")
    slots, places = index(torch, -1, 20), index(torch, 0, 20 * 16 if fault else 19 * 16)
    side = side_stream(torch)
    npu._npu_reshape_and_cache_siso(key, cache, slots)  # earlier
    with torch.npu.stream(side):
        cache.take(places.long())  # later
    torch.npu.synchronize()


@program("racecheck")
def a_selection(torch: Any, npu: Any, fault: bool) -> None:
    """The full cache is read where the tokens that were chosen lie."""
    half = torch.float16
    chosen, full = (torch.zeros(n, 16, 8, dtype=half, device="npu") for n in (1, 4))
    empty = torch.zeros(0, dtype=half, device="npu")
    status = index(torch, [[-1, -1, 0]])
    tokens, table = index(torch, [[2, 33]]), index(torch, [1, 2, 3])
    lengths = index(torch, 48), index(torch, 1)
    block, rows = (
        index(torch, 3 if fault else 2, dtype="int64"),
        torch.ones(1, 16, 8, dtype=half, device="npu"),
    )
    own = index(torch, [0])
    side = side_stream(torch)
    full.index_copy_(0, block, rows)  # earlier
    with torch.npu.stream(side):
        torch.ops.custom.npu_gather_selection_kv_cache(  # later
            empty, chosen, own, status, tokens, empty, full, table, *lengths,
            selection_topk_block_size=1,
        )  # fmt: skip
    torch.npu.synchronize()
