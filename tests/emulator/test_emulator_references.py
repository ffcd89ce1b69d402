# SPDX-License-Identifier: Apache-2.0
"""torch_npu's own operators by their references: against plain loops on the host, and refusals."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest

import kvcore.emulator


def rows(torch: Any, *shape: int, dtype: str = "float32", seed: int = 3) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(getattr(torch, dtype))


def near(torch: Any, found: Any, wanted: Any, dtype: str = "float32") -> None:
    assert found.device.type == "npu"
    assert found.dtype == getattr(torch, dtype)
    tolerance = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    wanted = torch.as_tensor(wanted, dtype=torch.float64)
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------- norms, activations, rotation
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rms_norm(npu: ModuleType, torch: Any, dtype: str) -> None:
    x, gamma = rows(torch, 3, 5, 8, dtype=dtype), rows(torch, 8, dtype=dtype, seed=4)
    y, rstd = npu.npu_rms_norm(x.npu(), gamma.npu(), 1e-5)
    plain = [
        [1 / math.sqrt(sum(float(v) ** 2 for v in row) / 8 + 1e-5) for row in page]
        for page in x.tolist()
    ]
    near(torch, rstd, torch.tensor(plain).unsqueeze(-1))
    near(torch, y, x.double() * torch.tensor(plain).unsqueeze(-1) * gamma.double(), dtype)


def test_add_rms_norm(npu: ModuleType, torch: Any) -> None:
    a, b, gamma = rows(torch, 4, 8), rows(torch, 4, 8, seed=5), rows(torch, 8, seed=6)
    y, rstd, total = npu.npu_add_rms_norm(a.npu(), b.npu(), gamma.npu())
    near(torch, total, a + b)
    wanted, root = npu.npu_rms_norm((a + b).npu(), gamma.npu())
    assert torch.equal(y.cpu(), wanted.cpu())
    assert torch.equal(rstd.cpu(), root.cpu())


def test_swiglu(npu: ModuleType, torch: Any) -> None:
    x = rows(torch, 3, 8)
    wanted = [[r[i] / (1 + math.exp(-r[i])) * r[i + 4] for i in range(4)] for r in x.tolist()]
    near(torch, npu.npu_swiglu(x.npu()), wanted)


def turned(torch: Any, x: Any, cos: Any, sin: Any, mode: str) -> Any:
    """Element by element, in the order of the pairs."""
    out = torch.zeros_like(x, dtype=torch.float64)
    half = x.shape[-1] // 2
    for i in range(half):
        a, b = (i, i + half) if mode == "half" else (2 * i, 2 * i + 1)
        out[..., a] = x[..., a] * cos[..., a] - x[..., b] * sin[..., a]
        out[..., b] = x[..., b] * cos[..., b] + x[..., a] * sin[..., b]
    return out


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul(npu: ModuleType, torch: Any, mode: str) -> None:
    x, cos, sin = rows(torch, 2, 5, 3, 8), rows(torch, 1, 5, 1, 8, seed=7), rows(torch, 1, 5, 1, 8)
    near(
        torch, npu.npu_rotary_mul(x.npu(), cos.npu(), sin.npu(), mode),
        turned(torch, x, cos.expand_as(x), sin.expand_as(x), mode),
    )  # fmt: skip


def test_rotary_mul_with_a_matrix(npu: ModuleType, torch: Any) -> None:
    """The matrix of "half", given: the same result."""
    x, cos, sin = rows(torch, 2, 5, 3, 8), rows(torch, 1, 5, 1, 8, seed=7), rows(torch, 1, 5, 1, 8)
    rotate = torch.zeros(8, 8)
    for i in range(4):
        rotate[i + 4, i], rotate[i, i + 4] = -1, 1
    found = npu.npu_rotary_mul(x.npu(), cos.npu(), sin.npu(), rotate=rotate.npu())
    near(torch, found, turned(torch, x, cos.expand_as(x), sin.expand_as(x), "half"))


def test_interleave_rope(npu: ModuleType, torch: Any) -> None:
    x, cos, sin = (rows(torch, 2, 1, 3, 8, seed=s) for s in (1, 2, 3))
    apart = x[..., [0, 2, 4, 6, 1, 3, 5, 7]]
    near(
        torch, npu.npu_interleave_rope(x.npu(), cos.npu(), sin.npu()),
        turned(torch, apart, cos, sin, "half"),
    )  # fmt: skip


def test_rotary_in_place(npu: ModuleType, torch: Any) -> None:
    query, key = rows(torch, 2, 3, 2, 8), rows(torch, 2, 3, 1, 8, seed=9)
    cos, sin = rows(torch, 2, 3, 1, 8, seed=7), rows(torch, 2, 3, 1, 8, seed=8)
    there = query.npu(), key.npu()
    made = npu.npu_apply_rotary_pos_emb(*there, cos.npu(), sin.npu())
    for x, given, found in zip((query, key), there, made, strict=True):
        assert found.data_ptr() == given.data_ptr()
        near(torch, given, turned(torch, x, cos.expand_as(x), sin.expand_as(x), "half"))


@pytest.mark.parametrize("sections", [None, [2, 1, 1]])
def test_mrope(npu: ModuleType, torch: Any, sections: list[int] | None) -> None:
    query, key, table = rows(torch, 3, 2 * 12), rows(torch, 3, 12, seed=5), rows(torch, 10, 8)
    places = torch.tensor([[1, 7, 3], [2, 0, 9], [4, 4, 5]] if sections else [1, 7, 3])
    made = npu.npu_mrope(
        places.npu(), query.npu(), key.npu(), table.npu(), 12, mrope_section=sections
    )
    axis = [0, 0, 1, 2] if sections else [0, 0, 0, 0]
    for x, found in zip((query, key), made, strict=True):
        wanted = x.double().view(3, -1, 12).clone()
        for token in range(3):
            for i in range(4):
                place = int(places[axis[i], token] if sections else places[token])
                cos, sin = float(table[place, i]), float(table[place, i + 4])
                a, b = x.view(3, -1, 12)[token, :, i], x.view(3, -1, 12)[token, :, i + 4]
                wanted[token, :, i] = a * cos - b * sin
                wanted[token, :, i + 4] = b * cos + a * sin
        near(torch, found, wanted.view(x.shape))


# ---------------------------------------------------------------- quantisation, products
def test_quantize(npu: ModuleType, torch: Any) -> None:
    x, scales = rows(torch, 3, 4) * 50, torch.tensor([0.5, 1.0, 2.0, 0.25])
    zeros = torch.tensor([1.0, 0.0, -3.0, 2.0])
    found = npu.npu_quantize(x.npu(), scales.npu(), zeros.npu(), torch.qint8, 1)
    wanted = [
        [
            max(-128, min(127, round(v / s) + z))
            for v, s, z in zip(row, scales.tolist(), zeros.tolist(), strict=True)
        ]
        for row in x.tolist()
    ]
    assert found.cpu().tolist() == wanted


def test_dynamic_quant(npu: ModuleType, torch: Any) -> None:
    x = rows(torch, 3, 4)
    x[1] = 0
    found, scale = npu.npu_dynamic_quant(x.npu())
    for row, values, one in zip(
        x.tolist(), found.cpu().tolist(), scale.cpu().tolist(), strict=True
    ):
        assert one == pytest.approx(max(map(abs, row)) / 127)
        assert values == [round(v / one) if one else 0 for v in row]


def test_transpose_batchmatmul(npu: ModuleType, torch: Any) -> None:
    x, weight = rows(torch, 5, 2, 4), rows(torch, 2, 4, 3, seed=5)
    found = npu.npu_transpose_batchmatmul(x.npu(), weight.npu(), perm_x1=[1, 0, 2])
    wanted = torch.stack([x[:, b].double() @ weight[b].double() for b in range(2)], 1)
    near(torch, found, wanted)


# ---------------------------------------------------------------- attention
def attended(torch: Any, q: Any, k: Any, v: Any, sees: Any, scale: float) -> tuple[Any, Any]:
    """[S, N, D] and lse [S, N] by loops; ``sees(i, j)``."""
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    lse = torch.full(q.shape[:2], math.inf, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for i in range(q.shape[0]):
        for n in range(q.shape[1]):
            seen = [j for j in range(k.shape[0]) if sees(i, j)]
            if not seen:
                continue
            scores = [float(q[i, n].double() @ k[j, n // group].double()) * scale for j in seen]
            total = math.log(sum(map(math.exp, scores)))
            lse[i, n] = total
            for score, j in zip(scores, seen, strict=True):
                out[i, n] += math.exp(score - total) * v[j, n // group].double()
    return out, lse


def test_attention_of_packed_tokens(npu: ModuleType, torch: Any) -> None:
    """TND, grouped heads, causal from the right end, running totals of both."""
    q, k, v = rows(torch, 5, 4, 8), rows(torch, 9, 2, 8, seed=4), rows(torch, 9, 2, 8, seed=5)
    mask = torch.triu(torch.ones(2048, 2048, dtype=torch.int8), 1).npu()
    out, lse = npu.npu_fused_infer_attention_score(
        q.npu(), k.npu(), v.npu(), atten_mask=mask, actual_seq_lengths=[2, 5],
        actual_seq_lengths_kv=[4, 9], num_heads=4, num_key_value_heads=2, input_layout="TND",
        scale=0.3, sparse_mode=3, softmax_lse_flag=True,
    )  # fmt: skip
    parts = [
        attended(torch, q[a:b], k[c:d], v[c:d], lambda i, j, s=(d - c) - (b - a): j <= i + s, 0.3)
        for a, b, c, d in ((0, 2, 0, 4), (2, 5, 4, 9))
    ]
    near(torch, out, torch.cat([part[0] for part in parts]))
    near(torch, lse, torch.cat([part[1] for part in parts]).unsqueeze(-1))


@pytest.mark.parametrize("shape", ["blocks", "heads", "nz"])
@pytest.mark.parametrize("version", [1, 2])
def test_attention_of_paged_keys(npu: ModuleType, torch: Any, shape: str, version: int) -> None:
    """One query token a request; caches of three, four and five axes; a rotary part beside them."""
    heads, size, width = 2, 4, 16
    q, rope = rows(torch, 2, 1, 4, width), rows(torch, 2, 1, 4, 8, seed=2)
    pages = {
        name: rows(torch, 6, size, heads, columns, seed=seed)
        for name, columns, seed in (("k", width, 4), ("v", width, 5), ("r", 8, 6))
    }
    table = torch.tensor([[5, 0, 1], [2, 3, 0]], dtype=torch.int32)
    lengths = [9, 5]

    def cache(x: Any) -> Any:
        if shape == "blocks":
            return x.reshape(6, size, -1).npu()
        if shape == "heads":
            return x.transpose(1, 2).contiguous().npu()
        lane = 8
        return x.view(6, size, heads, -1, lane).permute(0, 2, 3, 1, 4).contiguous().npu()

    names = (
        {"num_heads": 4, "scale": 0.2, "actual_seq_lengths_kv": lengths, "softmax_lse_flag": True}
        if version == 1
        else {"num_query_heads": 4, "softmax_scale": 0.2, "actual_seq_kvlen": lengths,
              "return_softmax_lse": True}
    )  # fmt: skip
    call = (
        npu.npu_fused_infer_attention_score
        if version == 1
        else npu.npu_fused_infer_attention_score_v2
    )
    out, lse = call(
        q.npu(), cache(pages["k"]), cache(pages["v"]), query_rope=rope.npu(),
        key_rope=cache(pages["r"]), block_table=table.npu(), num_key_value_heads=heads,
        block_size=size, input_layout="BSND", **names,
    )  # fmt: skip
    for b in range(2):
        own = {
            name: x[table[b].long()].reshape(-1, heads, x.shape[-1])[: lengths[b]]
            for name, x in pages.items()
        }
        wanted, sums = attended(
            torch, torch.cat((q[b], rope[b]), -1), torch.cat((own["k"], own["r"]), -1), own["v"],
            lambda i, j: True, 0.2,
        )  # fmt: skip
        near(torch, out[b], wanted)
        near(torch, lse[b, :, :, 0], sums.t())


def test_attention_with_a_mask(npu: ModuleType, torch: Any) -> None:
    """BNSD, a mask of each request; a row that sees nothing is zero, its sum infinite."""
    q, k, v = (rows(torch, 2, 2, 3, 8, seed=s) for s in (1, 2, 3))
    mask = torch.tensor([[[0, 1, 0], [1, 1, 1], [0, 0, 0]], [[1, 0, 0], [0, 0, 1], [0, 1, 1]]])
    out, lse = npu.npu_fused_infer_attention_score(
        q.npu(), k.npu(), v.npu(), atten_mask=mask.bool().npu(), num_heads=2, input_layout="BNSD",
        scale=1.0, softmax_lse_flag=True,
    )  # fmt: skip
    for b in range(2):
        wanted, sums = attended(
            torch, *(x[b].transpose(0, 1) for x in (q, k, v)),
            lambda i, j, b=b: not mask[b, i, j], 1.0,
        )  # fmt: skip
        near(torch, out[b].transpose(0, 1), wanted)
        near(torch, lse[b, :, :, 0].t(), sums)


def test_attention_layouts_agree(npu: ModuleType, torch: Any) -> None:
    q, k, v = (rows(torch, 2, 3, 2, 8, seed=s).npu() for s in (1, 2, 3))

    def run(layout: str, *given: Any) -> Any:
        return npu.npu_fused_infer_attention_score(*given, num_heads=2, input_layout=layout)[0]

    wanted = run("BSND", q, k, v).cpu()
    turned_round = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    flat = [x.reshape(2, 3, 16) for x in (q, k, v)]
    assert torch.equal(run("BNSD", *turned_round).cpu().transpose(1, 2), wanted)
    assert torch.equal(run("BNSD_BSND", *turned_round).cpu(), wanted)
    assert torch.equal(run("BSH", *flat).cpu().view(wanted.shape), wanted)
    assert torch.equal(run("BNSD_NBSD", *turned_round).cpu().permute(1, 2, 0, 3), wanted)


def test_attention_update(npu: ModuleType, torch: Any) -> None:
    """Two halves of the keys, put together, are the whole."""
    q, k, v = (rows(torch, 1, n, 1, 8, seed=s).npu() for n, s in ((3, 1), (4, 2), (4, 3)))

    def run(keys: Any, values: Any) -> Any:
        out, lse = npu.npu_fused_infer_attention_score(
            q, keys, values, num_heads=1, input_layout="BSND", softmax_lse_flag=True
        )
        return out.view(3, 8), lse.view(3)

    parts = [run(k[:, :2], v[:, :2]), run(k[:, 2:], v[:, 2:])]
    out, lse = npu.npu_attention_update([p[1] for p in parts], [p[0] for p in parts], 1)
    whole, sums = run(k, v)
    near(torch, out, whole.cpu())
    near(torch, lse, sums.cpu())


def test_attention_update_of_rows_that_saw_nothing(npu: ModuleType, torch: Any) -> None:
    """A part whose request has no keys counts for nothing, as its infinite sum says."""
    q, k, v = (rows(torch, n, 2, 8, seed=s).npu() for n, s in ((5, 1), (4, 2), (4, 3)))

    def run(ends: list[int]) -> Any:
        out, lse = npu.npu_fused_infer_attention_score(
            q, k, v, num_heads=2, input_layout="TND", actual_seq_lengths=[2, 5],
            actual_seq_lengths_kv=ends, softmax_lse_flag=True,
        )  # fmt: skip
        return out.view(10, 8), lse.view(10)

    parts = [run([0, 4]), run([4, 4])]  # each request sees keys in one of the two
    assert int(torch.isinf(parts[0][1]).sum()) == 4
    out, _ = npu.npu_attention_update([p[1] for p in parts], [p[0] for p in parts], 0)
    assert torch.equal(out[4:].cpu(), parts[0][0][4:].cpu())
    assert torch.equal(out[:4].cpu(), parts[1][0][:4].cpu())


@pytest.mark.parametrize("reads", [False, True])
def test_a_workspace_is_asked_for_by_shapes(npu: ModuleType, torch: Any, reads: bool) -> None:
    """Nothing is read then, of keys that another stream is writing; the attention reads them."""
    q, k, v = (rows(torch, 2, 2, 8, seed=s).npu() for s in (1, 2, 3))
    given = {"num_heads": 2, "input_layout": "TND", "scale": 0.5}
    side = torch.npu.Stream()
    torch.npu.synchronize()
    with kvcore.emulator.expected() as found:
        with torch.npu.stream(side):
            k.fill_(1)
        if reads:
            npu.npu_fused_infer_attention_score(q, k, v, **given)
        else:
            npu._npu_fused_infer_attention_score_get_max_workspace(q, k, v, **given)
        torch.npu.synchronize()
    assert [one.kind for one in found] == (["racecheck"] if reads else [])


def test_captured_with_out(npu: ModuleType, torch: Any) -> None:
    """As a client's graph has it: a workspace, results that are given, contents that change."""
    q, k, v = (rows(torch, 2, 2, 8, seed=s).npu() for s in (1, 2, 3))
    given = {"num_heads": 2, "input_layout": "TND", "scale": 0.5}
    workspace = npu._npu_fused_infer_attention_score_get_max_workspace(q, k, v, **given)
    outs = [torch.zeros(2, 2, 8).npu(), torch.zeros(0).npu()]
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        npu.npu_fused_infer_attention_score.out(q, k, v, workspace=workspace, out=outs, **given)
        doubled = outs[0] * 2
    for seed in (7, 8):
        q.copy_(rows(torch, 2, 2, 8, seed=seed))
        graph.replay()
        wanted = npu.npu_fused_infer_attention_score(q, k, v, **given)[0]
        assert torch.equal(doubled.cpu(), wanted.cpu() * 2)


# ---------------------------------------------------------------- the latent cache
@pytest.mark.parametrize("mode", ["PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ", "Norm"])
@pytest.mark.parametrize("quantised", [False, True])
def test_kv_rmsnorm_rope_cache(npu: ModuleType, torch: Any, mode: str, quantised: bool) -> None:
    batch, length, size, latent, rotary = 2, 3, 4, 32, 64
    kv, gamma = rows(torch, batch, 1, length, latent + rotary), rows(torch, latent, seed=4)
    cos, sin = (rows(torch, batch, 1, length, rotary, seed=s) for s in (5, 6))
    dtype = torch.int8 if quantised else torch.float32
    lane = 32 if quantised else 8
    widths = (rotary, latent)
    shapes = [(batch, 1, 8, w) if mode == "Norm" else (4, size, 1, w) for w in widths]
    caches = [torch.full(shape, 9, dtype=dtype) for shape in shapes]
    scales = [torch.full((w,), 20.0) for w in widths]
    if mode == "Norm":
        index = torch.tensor([[5, -1, 0], [7, 2, 3]])
        places = index.view(-1).tolist()
    elif "BLK" in mode:
        index = torch.tensor([8, -4])
        places = [8, 9, 10, -1, -1, -1]
    else:
        index = torch.tensor([15, 3, -1, 4, 0, 9])
        places = index.tolist()
    there = [cache.npu() for cache in caches]
    given = {"k_rope_scale": scales[0].npu(), "c_kv_scale": scales[1].npu()} if quantised else {}
    made = npu.npu_kv_rmsnorm_rope_cache(
        kv.npu(), gamma.npu(), cos.npu(), sin.npu(), index.npu(), *there, cache_mode=mode,
        is_output_kv=True, **given,
    )  # fmt: skip
    plain = kv[:, 0].double()
    apart = torch.cat((plain[..., latent::2], plain[..., latent + 1 :: 2]), -1)
    rope = turned(torch, apart, cos[:, 0], sin[:, 0], "half")
    root = (plain[..., :latent].square().mean(-1, keepdim=True) + 1e-5).sqrt()
    normal = plain[..., :latent] / root * gamma
    near(torch, made[2][:, 0], rope)
    near(torch, made[3][:, 0], normal)
    for given_cache, before, found, values in zip(
        there, caches, made, (rope, normal), strict=False
    ):
        assert found.data_ptr() == given_cache.data_ptr()
        wanted = before.double()
        flat = wanted.view(4, -1, size, lane) if mode.endswith("NZ") else wanted
        for token, place in enumerate(places):
            value = values.reshape(-1, values.shape[-1])[token]
            if quantised:
                value = (value * 20).round().clamp(-128, 127)
            if place < 0:
                continue
            if mode == "Norm":
                flat[token // length, 0, place] = value
            elif mode.endswith("NZ"):
                flat[place // size, :, place % size] = value.view(-1, lane)
            else:
                flat[place // size, place % size, 0] = value
        tolerance = 1 if quantised else 1e-5
        torch.testing.assert_close(found.cpu().double(), wanted, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize("mode", ["PA", "PA_NZ"])
def test_kv_rmsnorm_rope_cache_functional(npu: ModuleType, torch: Any, mode: str) -> None:
    """New caches with what the other writes into its own; those that are given stay."""
    kv, gamma = rows(torch, 2, 1, 1, 96).npu(), rows(torch, 32, seed=4).npu()
    cos, sin = (rows(torch, 2, 1, 1, 64, seed=s).npu() for s in (5, 6))
    index = torch.tensor([6, 1]).npu()
    caches = [torch.full((2, 4, 1, width), 9.0).npu() for width in (64, 32)]
    rope, latent, *made = npu.npu_kv_rmsnorm_rope_cache_v2_functional(
        kv, gamma, cos, sin, index, *caches, cache_mode=mode, is_output_kv=True
    )
    assert all((cache == 9).all() for cache in caches)
    wanted = npu.npu_kv_rmsnorm_rope_cache_v2(
        kv, gamma, cos, sin, index, *caches, cache_mode=mode, is_output_kv=True
    )
    for found, one in zip((rope, latent, *made), (*wanted, *caches), strict=True):
        assert torch.equal(found.cpu(), one.cpu())
    assert not any((cache == 9).all() for cache in caches)


@pytest.mark.parametrize(
    ("table", "length", "words"),
    [
        ([[1, 2]], 3, r"blocks from 0 to 1, got 2"),
        ([[-1, 0]], 4, r"blocks from 0 to 1, got -1"),
        ([[1]], 3, r"expected 2 blocks for 3 tokens, got 1"),
    ],
)
def test_a_block_that_is_not_there(
    npu: ModuleType, torch: Any, table: list[list[int]], length: int, words: str
) -> None:
    keys, query = rows(torch, 2, 1, 2, 8).npu(), rows(torch, 1, 1, 1, 8).npu()
    npu.npu_fused_infer_attention_score(
        query, keys, keys, num_heads=1, input_layout="BNSD", block_size=2,
        block_table=torch.tensor(table, dtype=torch.int32).npu(), actual_seq_lengths_kv=[length],
    )  # fmt: skip
    with pytest.raises(RuntimeError, match=f"fused_infer_attention.*block_table: .*{words}"):
        torch.npu.synchronize()


def test_an_index_that_is_not_there(npu: ModuleType, torch: Any) -> None:
    kv, gamma, one = rows(torch, 1, 1, 1, 96).npu(), rows(torch, 32).npu(), rows(torch, 1, 1, 1, 64)
    caches = [torch.zeros(2, 4, 1, w).npu() for w in (64, 32)]
    npu.npu_kv_rmsnorm_rope_cache(
        kv, gamma, one.npu(), one.npu(), torch.tensor([8]).npu(), *caches, cache_mode="PA"
    )
    with pytest.raises(RuntimeError, match=r"npu_kv_rmsnorm_rope_cache.*slots below 8, got 8"):
        torch.npu.synchronize()
    assert not any(cache.cpu().any() for cache in caches)


# ---------------------------------------------------------------- order and refusals
def test_in_stream_order(npu: ModuleType, torch: Any) -> None:
    """Behind a copy that does not wait, and before the next."""
    gamma, there = torch.ones(8).npu(), torch.zeros(4, 8).npu()
    hosts = [torch.full((4, 8), float(i + 1)).pin_memory() for i in range(10)]
    found = []
    for host in hosts:
        there.copy_(host, non_blocking=True)
        found.append(npu.npu_rms_norm(there, gamma, 0.0)[1])
    assert [round(1 / float(one[0, 0])) for one in found] == list(range(1, 11))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda n, x: n.npu_rms_norm(x, x[0, :3]), "gamma: expected the last axes of"),
        (lambda n, x: n.npu_swiglu(x[:, :7]), "dim: expected an even axis"),
        (lambda n, x: n.npu_rotary_mul(x, x, x, "quarter"), "rotary_mode: expected one of"),
        (lambda n, x: n.npu_quantize(x, x[0], None, 16), "dtype: expected one of"),
        (
            lambda n, x: n.npu_fused_infer_attention_score(
                x[None], x[None], x[None], quant_scale2=x
            ),
            "no quant_scale2",
        ),
        (
            lambda n, x: n.npu_fused_infer_attention_score(
                x[None], x[None], x[None], sparse_mode=3
            ),
            "atten_mask: needed with sparse_mode 3",
        ),
    ],
)
def test_what_a_reference_does_not_know(npu: ModuleType, torch: Any, call: Any, words: str) -> None:
    """An error at the call, and the stream goes on."""
    x = rows(torch, 4, 8).npu()
    with pytest.raises(RuntimeError, match=words):
        call(npu, x)
    assert torch.equal((x + 1).cpu(), x.cpu() + 1)


def test_an_operator_without_a_reference_is_named(npu: ModuleType, torch: Any) -> None:
    x = rows(torch, 4, 8, dtype="float16").npu()
    with pytest.raises(RuntimeError, match="GeGlu"):
        npu.npu_geglu(x)
