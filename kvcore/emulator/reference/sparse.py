# SPDX-License-Identifier: Apache-2.0
"""Sparse attention of inference: the indexer that chooses tokens, and the attention over them.

Axes: B requests, S tokens of a request, T tokens of all requests, N heads, D elements.  Keys have
one head.  Lengths of TND are running totals; of BSND, and of keys that a block table names
(PA_BSND, [blocks, size, 1, D]), they are each request's own.
"""

from __future__ import annotations

from typing import Any

import torch

from kvcore.emulator.operators import Special
from kvcore.emulator.reference.attention import blocks_of
from kvcore.emulator.reference.refusals import none_of, one_of, refuse
from kvcore.emulator.touched import Elements, Used, pages, pieces

__all__ = ["TABLE"]

_INDEXER = "npu_lightning_indexer"
_ATTENTION = "npu_sparse_flash_attention"
_EVERYTHING = (1 << 63) - 1
_NONE = -1


def _meta(overload: str, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """What the operator returns, as meta tensors."""

    def meta(value: Any) -> Any:
        return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value

    named = {name: meta(value) for name, value in given.items()}
    return getattr(torch.ops.npu, overload)(*(meta(value) for value in args), **named)


def _spans(x: Any, layout: str, lengths: Any) -> list[tuple[int, int]]:
    """(first, end) of each request's tokens on the axis of a TND tensor; of BSND within its row."""
    if layout == "TND":
        ends = lengths.tolist()
        return list(zip([0, *ends], ends, strict=False))
    whole = [x.shape[1]] * x.shape[0] if lengths is None else lengths.tolist()
    return [(0, n) for n in whole]


def _rows(x: Any, layout: str, spans: list[tuple[int, int]]) -> list[Any]:
    """Each request's tokens; views."""
    if layout == "TND":
        return [x[a:b] for a, b in spans]
    return [x[b, :n] for b, (_, n) in enumerate(spans)]


def _keys(x: Any, layout: str, lengths: Any, table: Any) -> list[Any]:
    """Each request's [tokens, D] of keys or values with one head."""
    if layout == "PA_BSND":
        found = []
        for row, length in zip(table, lengths.tolist(), strict=True):
            tokens = x[blocks_of(row, length, x.shape[1], x.shape[0])].reshape(-1, *x.shape[2:])
            found.append(tokens[:length, 0])
        return found
    return [part[:, 0] for part in _rows(x, layout, _spans(x, layout, lengths))]


# -- the indexer -----------------------------------------------------------------------------------


def _index(query: Any, key: Any, weights: Any, **given: Any) -> tuple[Any, Any]:
    """The tokens with the largest sums over heads of weight * relu(query . key), best first."""
    layout, mode = given.get("layout_query", "BSND"), given.get("sparse_mode", 3)
    count = given.get("sparse_count", 2048)
    indices, values = (
        torch.empty(one.shape, dtype=one.dtype)
        for one in _meta(_INDEXER, (query, key, weights), given)
    )
    indices.fill_(_NONE)
    values.zero_()
    spans = _spans(query, layout, given.get("actual_seq_lengths_query"))
    keys = _keys(
        key, given.get("layout_key", "BSND"), given.get("actual_seq_lengths_key"),
        given.get("block_table"),
    )  # fmt: skip
    parts = (_rows(x, layout, spans) for x in (query, weights, indices))
    kept = _rows(values, layout, spans) if given.get("return_value") else [None] * len(spans)
    for q, w, out, value, k in zip(*parts, kept, keys, strict=True):
        k = k.float()
        for i in range(len(q)):
            seen = len(k) - len(q) + i + 1 if mode == 3 else len(k)
            scores = w[i].float() @ torch.relu(q[i].float() @ k[: max(0, seen)].t())
            best, places = scores.sort(descending=True, stable=True)
            found = min(count, len(places))
            out[i, 0, :found] = places[:found].int()
            if value is not None:
                value[i, 0, :found] = best[:found].to(value.dtype)
    return indices, values


def _check_lengths(operator: str, query: Any, key: Any, given: dict[str, Any], kv: str) -> None:
    """Layouts, and lengths and tables that they need.  kv: what the operator calls its keys."""
    layout = given.get("layout_query", "BSND")
    layout_kv = given.get(f"layout_{kv}", "BSND")
    one_of(operator, "layout_query", layout, ("BSND", "TND"))
    one_of(operator, f"layout_{kv}", layout_kv, ("BSND", "TND", "PA_BSND"))
    if layout_kv != "PA_BSND" and layout_kv != layout:
        refuse(operator, f"layout_{kv}: expected {layout!r} or 'PA_BSND', got {layout_kv!r}")
    for name, x, own in (("query", query, layout), (kv, key, layout_kv)):
        if x.dim() != (3 if own == "TND" else 4):
            refuse(operator, f"{name}: expected axes {own}, got {list(x.shape)}")
    heads = key.shape[1] if layout_kv == "TND" else key.shape[2]
    if heads != 1:
        refuse(operator, f"{kv}: expected one head, got {heads}")
    own, other = given.get("actual_seq_lengths_query"), given.get(f"actual_seq_lengths_{kv}")
    if layout == "TND" and own is None:
        refuse(operator, "actual_seq_lengths_query: needed with layout_query 'TND'")
    if layout_kv != "BSND" and other is None:
        refuse(operator, f"actual_seq_lengths_{kv}: needed with layout_{kv} {layout_kv!r}")
    requests = len(own) if layout == "TND" and own is not None else query.shape[0]
    for name, x in (("actual_seq_lengths_query", own), (f"actual_seq_lengths_{kv}", other)):
        if x is not None and tuple(x.shape) != (requests,):
            refuse(operator, f"{name}: expected [{requests}], got {list(x.shape)}")
    table = given.get("block_table")
    if (table is None) != (layout_kv != "PA_BSND"):
        refuse(operator, f"block_table goes with layout_{kv} 'PA_BSND', got {layout_kv!r}")
    if table is not None and (table.dim() != 2 or len(table) != requests):
        refuse(operator, f"block_table: expected [{requests}, columns], got {list(table.shape)}")
    one_of(operator, "sparse_mode", given.get("sparse_mode", 3), (0, 3))
    for name in ("pre_tokens", "next_tokens"):
        one_of(operator, name, given.get(name, _EVERYTHING), (_EVERYTHING,))


def _check_index(query: Any, key: Any, weights: Any, **given: Any) -> None:
    _check_lengths(_INDEXER, query, key, given, "key")
    if key.shape[-1] != query.shape[-1]:
        refuse(_INDEXER, f"key: expected D {query.shape[-1]} as query, got {key.shape[-1]}")
    if weights.shape != query.shape[:-1]:
        refuse(_INDEXER, f"weights: expected {list(query.shape[:-1])}, got {list(weights.shape)}")
    if not 1 <= given.get("sparse_count", 2048) <= 2048:
        refuse(_INDEXER, f"sparse_count: expected 1 to 2048, got {given['sparse_count']}")
    if given.get("return_value") and given.get("layout_key") == "PA_BSND":
        refuse(_INDEXER, "return_value: not with layout_key 'PA_BSND'")
    for name, x in (("query", query), ("key", key), ("weights", weights)):
        if not x.is_floating_point():
            refuse(_INDEXER, f"{name}: the emulated machine's reference has no {x.dtype}")


def _is_paged(*args: Any, block_table: Any = None, **given: Any) -> bool:
    return block_table is not None


def _indexed(query: Any, key: Any, weights: Any, **given: Any) -> dict[str, list[Elements]]:
    """Every token of each request: all of them are compared."""
    lengths = given["actual_seq_lengths_key"].tolist()
    return {"key": pages(key, 1, given["block_table"], lengths)}


# -- attention over chosen tokens ------------------------------------------------------------------


def _chosen(row: Any, size: int, length: int) -> Any:
    """The tokens that one row of indices names: whole blocks of ``size``, up to the first -1."""
    ends = (row < 0).nonzero()
    blocks = row[: int(ends[0])] if len(ends) else row
    if len(blocks) and int(blocks.max()) * size >= length:
        raise RuntimeError(
            f"sparse_indices: expected blocks of {size} tokens that begin below {length}, or -1 "
            f"behind the last, got {int(blocks.max())}"
        )
    tokens = (blocks.long().unsqueeze(1) * size + torch.arange(size)).reshape(-1)
    return tokens[tokens < length]


def _attend(
    query: Any, key: Any, value: Any, sparse_indices: Any, scale_value: float, **given: Any
) -> tuple[Any, Any, Any]:
    """Attention of each token over the tokens that its row of indices names."""
    layout, layout_kv = given.get("layout_query", "BSND"), given.get("layout_kv", "BSND")
    size, mode = given.get("sparse_block_size", 1), given.get("sparse_mode", 3)
    looks = _meta(_ATTENTION, (query, key, value, sparse_indices, scale_value), given)
    out, top, total = (torch.zeros(one.shape, dtype=one.dtype) for one in looks)
    lengths, table = given.get("actual_seq_lengths_kv"), given.get("block_table")
    spans = _spans(query, layout, given.get("actual_seq_lengths_query"))
    queries = [
        torch.cat(pair, -1).float()
        for pair in zip(
            _rows(query, layout, spans), _rows(given["query_rope"], layout, spans), strict=True
        )
    ]
    keys, ropes = (_keys(x, layout_kv, lengths, table) for x in (key, given["key_rope"]))
    values = keys if value is None else _keys(value, layout_kv, lengths, table)
    indices, outs = (_rows(x, layout, spans) for x in (sparse_indices, out))
    for b, (q, k, rope, v) in enumerate(zip(queries, keys, ropes, values, strict=True)):
        whole = torch.cat((k, rope), -1).float()
        for i in range(len(q)):
            tokens = _chosen(indices[b][i, 0], size, len(whole))
            if mode == 3:
                tokens = tokens[tokens <= len(whole) - len(q) + i]
            if not len(tokens):
                continue  # a row that sees nothing is 0
            scores = q[i] @ whole[tokens].t() * scale_value
            most = scores.amax(-1, keepdim=True)
            weights = torch.exp(scores - most)
            sums = weights.sum(-1, keepdim=True)
            outs[b][i] = (weights / sums @ v[tokens].float()).to(out.dtype)
            if given.get("return_softmax_lse"):
                place = (b, 0, i) if layout == "BSND" else (0, spans[b][0] + i)
                top[place], total[place] = most[:, 0], sums[:, 0]
    return out, top, total


def _check_attend(
    query: Any, key: Any, value: Any, sparse_indices: Any, scale_value: float, **given: Any
) -> None:
    _check_lengths(_ATTENTION, query, key, given, "kv")
    none_of(_ATTENTION, {"sinks": given.get("sinks")})
    one_of(_ATTENTION, "attention_mode", given.get("attention_mode", 0), (2,))
    for name in ("query_rope", "key_rope"):
        if given.get(name) is None:
            refuse(_ATTENTION, f"{name}: needed with attention_mode 2")
    size = given.get("sparse_block_size", 1)
    one_of(_ATTENTION, "sparse_block_size", size, tuple(1 << n for n in range(8)))
    if given.get("block_table") is not None:
        if key.shape[1] % size:
            refuse(
                _ATTENTION, f"sparse_block_size: expected a divisor of {key.shape[1]}, got {size}"
            )
        if given.get("return_softmax_lse"):
            refuse(_ATTENTION, "return_softmax_lse: not with layout_kv 'PA_BSND'")
    if value is not None and value.shape != key.shape:
        refuse(_ATTENTION, f"value: expected {list(key.shape)} as key, got {list(value.shape)}")
    if key.shape[-1] != query.shape[-1]:
        refuse(_ATTENTION, f"key: expected D {query.shape[-1]} as query, got {key.shape[-1]}")
    for name, x in (("query_rope", query), ("key_rope", key)):
        if given[name].shape[:-1] != x.shape[:-1]:
            refuse(
                _ATTENTION,
                f"{name}: expected {list(x.shape[:-1])} and D, got {list(given[name].shape)}",
            )
    rows = (*query.shape[:-2], 1)
    if sparse_indices.dtype != torch.int32 or tuple(sparse_indices.shape[:-1]) != rows:
        refuse(
            _ATTENTION,
            f"sparse_indices: expected int32 {list(rows)} and a count, got "
            f"{sparse_indices.dtype} {list(sparse_indices.shape)}",
        )
    for name, x in (("query", query), ("key", key)):
        if not x.is_floating_point():
            refuse(_ATTENTION, f"{name}: the emulated machine's reference has no {x.dtype}")


def _attended(
    query: Any, key: Any, value: Any, sparse_indices: Any, scale_value: float, **given: Any
) -> dict[str, list[Elements]]:
    """The tokens that the indices name, of each cache."""
    layout, size = given.get("layout_query", "BSND"), given.get("sparse_block_size", 1)
    lengths = given["actual_seq_lengths_kv"].tolist()
    spans = _spans(query, layout, given.get("actual_seq_lengths_query"))
    found = []
    for b, rows in enumerate(_rows(sparse_indices, layout, spans)):
        blocks = blocks_of(given["block_table"][b], lengths[b], key.shape[1], key.shape[0])
        tokens = [_chosen(row[0], size, lengths[b]) for row in rows]
        if given.get("sparse_mode", 3) == 3:
            tokens = [t[t <= lengths[b] - len(rows) + i] for i, t in enumerate(tokens)]
        if tokens:
            seen = torch.unique(torch.cat(tokens))
            found.append(blocks[seen // key.shape[1]] * key.shape[1] + seen % key.shape[1])
    places = torch.unique(torch.cat(found)) if found else torch.zeros(0, dtype=torch.int64)
    made = {}
    for name, cache in (("key", key), ("value", value), ("key_rope", given["key_rope"])):
        if cache is not None:
            offsets = (places // cache.shape[1]) * cache.stride(0)
            offsets = offsets + places % cache.shape[1] * cache.stride(1)
            made[name] = [pieces(cache, offsets, range(2, cache.dim()))]
    return made


TABLE: dict[str, Special] = {
    _INDEXER: Special(
        _index, check=_check_index, used=Used(frozenset(("key",)), _indexed, _is_paged)
    ),
    _ATTENTION: Special(
        _attend,
        check=_check_attend,
        used=Used(frozenset(("key", "value", "key_rope")), _attended, _is_paged),
    ),
}
