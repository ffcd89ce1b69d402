# SPDX-License-Identifier: Apache-2.0
"""Fused attention of inference: dense and paged keys, grouped heads, masks, rotary parts, lse.

Layouts name the axes: B requests, N heads, S tokens of a request, D elements, T tokens of all
requests, H = N * D.  "X_Y" takes the query as X and gives the result as Y.  Lengths of T layouts
are running totals; of keys that a block table names they are each request's own.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kvcore.emulator.operators import Special
from kvcore.emulator.reference.refusals import none_of, one_of, refuse
from kvcore.emulator.touched import Elements, Used, pages

__all__ = ["TABLE", "attended", "paged"]

_LAYOUTS = {
    "BSH": ("BSH", "BSH"),
    "BSND": ("BSND", "BSND"),
    "BNSD": ("BNSD", "BNSD"),
    "TND": ("TND", "TND"),
    "NTD": ("NTD", "NTD"),
    "BNSD_BSND": ("BNSD", "BSND"),
    "BSH_BNSD": ("BSH", "BNSD"),
    "BSND_BNSD": ("BSND", "BNSD"),
    "BSH_NBSD": ("BSH", "NBSD"),
    "BSND_NBSD": ("BSND", "NBSD"),
    "BNSD_NBSD": ("BNSD", "NBSD"),
    "TND_NTD": ("TND", "NTD"),
    "NTD_TND": ("NTD", "TND"),
}
_KNOWN = ("atten_mask", "block_table", "query_rope", "key_rope")


def _requests(x: Any, layout: str, heads: int, ends: Sequence[int] | None) -> list[Any]:
    """Each request's [S, N, D]; views.  ends: running totals of T layouts."""
    if layout in ("TND", "NTD"):
        tokens = x if layout == "TND" else x.transpose(0, 1)
        totals = [0, *(ends if ends is not None else [tokens.shape[0]])]
        return [tokens[a:b] for a, b in itertools.pairwise(totals)]
    if layout == "BSH":
        return list(x.view(x.shape[0], x.shape[1], heads, -1).unbind(0))
    return list((x.transpose(1, 2) if layout == "BNSD" else x).unbind(0))


def _token_axis(cache: Any) -> int:
    """Of a paged cache [blocks, size, H], [blocks, heads, size, D] or [blocks, heads, D / lane,
    size, lane]."""
    return int(cache.dim()) - 2


def blocks_of(table: Any, length: int, block_size: int, num_blocks: int) -> Any:
    """The blocks of one request's tokens by its row of the table; they must lie in the cache."""
    columns = -(-length // block_size)
    blocks = table[:columns].long()
    if len(blocks) < columns:
        raise RuntimeError(
            f"block_table: expected {columns} blocks for {length} tokens, got {len(blocks)}"
        )
    bad = (blocks < 0) | (blocks >= num_blocks)
    if bad.any():
        raise RuntimeError(
            f"block_table: expected blocks from 0 to {num_blocks - 1}, got {blocks[bad][0]}"
        )
    return blocks


def paged(cache: Any, table: Any, length: int, heads: int) -> Any:
    """[length, heads, D] of one request from a paged cache of three, four or five axes."""
    blocks = blocks_of(table, length, cache.shape[_token_axis(cache)], cache.shape[0])
    found = cache[blocks]
    if cache.dim() == 3:
        found = found.reshape(-1, heads, cache.shape[2] // heads)
    elif cache.dim() == 4:
        found = found.transpose(1, 2).reshape(-1, heads, cache.shape[3])
    else:
        found = found.permute(0, 3, 1, 2, 4).reshape(-1, heads, cache.shape[2] * cache.shape[4])
    return found[:length]


def _hidden(rows: int, columns: int, mask: Any, mode: int, before: int, after: int) -> Any:
    """What a request's queries do not see, [rows, columns], or None."""
    if mode in (0, 1) and mask is None:
        return None
    i, j = torch.arange(rows).unsqueeze(1), torch.arange(columns).unsqueeze(0)
    shift = columns - rows
    if mode == 2:
        return j > i
    if mode == 3:
        return j > i + shift
    if mode == 4:
        return (j > i + shift + after) | (j < i + shift - before)
    hidden = mask.reshape(*mask.shape[-2:])[:rows, :columns].bool()
    if mode == 0:
        hidden = hidden | (j > i + after) | (j < i - before)
    return hidden


def attended(q: Any, k: Any, v: Any, hidden: Any, scale: float, sink: Any) -> tuple[Any, Any]:
    """Float32 result [S, N, D] and lse [S, N]; rows that see nothing are 0 and inf."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("snd,tnd->nst", q.float(), k) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    everything = scores
    if sink is not None:
        column = sink.float().view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        everything = torch.cat((scores, column), -1)
    lse = torch.logsumexp(everything, -1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).nan_to_num(0.0)
    out = torch.einsum("nst,tnd->snd", weights, v)
    nothing = lse == -torch.inf
    return out, lse.masked_fill(nothing, torch.inf).t()


def _lengths(given: Any, count: int, whole: int) -> list[int]:
    """A length for each request; one alone holds for all."""
    if given is None:
        return [whole] * count
    found = [int(n) for n in given]
    if len(found) == 1:
        return found * count
    if len(found) < count:
        raise RuntimeError(f"expected lengths of {count} requests or one for all, got {len(found)}")
    return found[:count]


def _cut(
    query: Any,
    key: Any,
    value: Any,
    layout: str,
    heads: tuple[int, int],
    lengths: tuple[Any, Any],
    table: Any,
    ropes: tuple[Any, Any],
) -> Iterator[tuple[Any, Any, Any]]:
    """Each request's query, keys and values, [S, N, D]."""
    told, told_kv = lengths
    flat = layout in ("TND", "NTD")

    def queries(x: Any) -> list[Any]:
        return _requests(x, layout, heads[0], told if flat else None)

    parts = queries(query)
    if ropes[0] is not None:
        parts = [torch.cat(pair, -1) for pair in zip(parts, queries(ropes[0]), strict=True)]
    if not flat:
        seen = _lengths(told, len(parts), query.shape[2 if layout == "BNSD" else 1])
        parts = [part[:n] for part, n in zip(parts, seen, strict=True)]

    def cached(x: Any) -> list[Any]:
        if table is not None:
            seen = _lengths(told_kv, len(parts), 0)
            return [paged(x, table[b], n, heads[1]) for b, n in enumerate(seen[: len(parts)])]
        found = _requests(x, layout, heads[1], told_kv if flat else None)
        if flat:
            return found
        seen = _lengths(told_kv, len(found), x.shape[2 if layout == "BNSD" else 1])
        return [part[:n] for part, n in zip(found, seen, strict=True)]

    keys, values = cached(key), cached(value)
    if ropes[1] is not None:
        keys = [torch.cat(pair, -1) for pair in zip(keys, cached(ropes[1]), strict=True)]
    yield from zip(parts, keys, values, strict=True)


def _put(out: Any, lse: Any, b: int, at: int, layout: str, made: tuple[Any, Any]) -> None:
    """One request's result into its place; at: its first token of a T layout."""
    found, sums = made
    rows, heads = found.shape[:2]
    if layout in ("TND", "NTD"):
        tokens = out if layout == "TND" else out.transpose(0, 1)
        tokens[at : at + rows] = found.to(out.dtype)
        if lse is not None:
            lse[at : at + rows, :, 0] = sums
        return
    if layout == "BSH":
        out[b, :rows] = found.reshape(rows, -1).to(out.dtype)
    else:
        place = {"BSND": out, "BNSD": out.transpose(1, 2) if layout == "BNSD" else out}.get(layout)
        if place is None:  # NBSD
            place = out.permute(1, 2, 0, 3)
        place[b, :rows] = found.to(out.dtype)
    if lse is not None:
        lse[b, :heads, :rows, 0] = sums.t()


def _attend(out: Any, lse: Any, a: dict[str, Any]) -> None:
    """Fills the result, and the logarithms of the sums where they are asked for."""
    layout, result = _LAYOUTS[a["input_layout"]]
    heads = a["heads"], a["kv_heads"] or a["heads"]
    requests = _cut(
        a["query"], a["key"], a["value"], layout, heads, (a["lengths"], a["kv_lengths"]),
        a["block_table"], (a["query_rope"], a["key_rope"]),
    )  # fmt: skip
    at = 0
    mask = a["atten_mask"]
    out.zero_()
    if lse is not None:
        lse.fill_(torch.inf)
    for b, (q, k, v) in enumerate(requests):
        own = mask[b] if mask is not None and mask.dim() > 2 and mask.shape[0] > 1 else mask
        if own is not None:
            own = own.reshape(*own.shape[-2:])
        hidden = _hidden(
            q.shape[0], k.shape[0], own, a["sparse_mode"], a["pre_tokens"], a["next_tokens"]
        )
        _put(out, lse, b, at, result, attended(q, k, v, hidden, a["scale"], a["sink"]))
        at += q.shape[0]


# -- the operators' own names ----------------------------------------------------------------------

#: What the reference knows of an argument, and what the two versions call it.
_NAMES = (
    {
        "lengths": ("actual_seq_lengths", None), "kv_lengths": ("actual_seq_lengths_kv", None),
        "heads": ("num_heads", 1), "kv_heads": ("num_key_value_heads", 0), "scale": ("scale", 1.0),
        "sink": ("learnable_sink", None), "lse": ("softmax_lse_flag", False),
    },
    {
        "lengths": ("actual_seq_qlen", None), "kv_lengths": ("actual_seq_kvlen", None),
        "heads": ("num_query_heads", 1), "kv_heads": ("num_key_value_heads", 0),
        "scale": ("softmax_scale", 1.0), "sink": ("learnable_sink", None),
        "lse": ("return_softmax_lse", False),
    },
)  # fmt: skip
#: The older operators, of one token a request and of whole prompts; they return one tensor.
_INCREMENT, _PROMPT = "npu_incre_flash_attention", "npu_prompt_flash_attention"
_OLDER = {
    _INCREMENT: {
        "lengths": ("", None), "kv_lengths": ("actual_seq_lengths", None),
        "heads": ("num_heads", 1), "kv_heads": ("num_key_value_heads", 0),
        "scale": ("scale_value", 1.0), "sink": ("", None), "lse": ("", False),
    },
    _PROMPT: {
        "lengths": ("actual_seq_lengths", None), "kv_lengths": ("actual_seq_lengths_kv", None),
        "heads": ("num_heads", 1), "kv_heads": ("num_key_value_heads", 0),
        "scale": ("scale_value", 1.0), "sink": ("", None), "lse": ("", False),
        "next_tokens": ("next_tokens", 0),
    },
}  # fmt: skip
_OLDER_LAYOUTS = {
    _INCREMENT: ("BSH", "BSND", "BNSD"),
    _PROMPT: ("BSH", "BSND", "BNSD", "BNSD_BSND"),
}
_BOTH = {
    "atten_mask": None, "block_table": None, "query_rope": None, "key_rope": None,
    "pre_tokens": 2147483647, "next_tokens": 2147483647, "input_layout": "BSH", "sparse_mode": 0,
}  # fmt: skip
#: They change how the hardware computes, and not what; block_size is read off the cache.
_FREE = ("inner_precise", "block_size", "workspace", "out")


def _arguments(names: dict[str, Any], args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """The arguments under the reference's names, and those that it does not know."""
    rest = dict(given)
    found: dict[str, Any] = dict(zip(("query", "key", "value"), args, strict=False))
    for name in ("query", "key", "value"):
        if name in rest:
            found[name] = rest.pop(name)
    for own, (name, default) in names.items():
        found[own] = rest.pop(name, default)
    for name, default in _BOTH.items():
        if name not in found:
            found[name] = rest.pop(name, default)
    for name in _FREE:
        rest.pop(name, None)
    return found, rest


def _check(operator: str, names: dict[str, Any], *args: Any, **given: Any) -> None:
    a, rest = _arguments(names, args, given)
    none_of(operator, rest)
    one_of(operator, "input_layout", a["input_layout"], tuple(_LAYOUTS))
    one_of(operator, "sparse_mode", a["sparse_mode"], (0, 1, 2, 3, 4))
    layout = _LAYOUTS[a["input_layout"]][0]
    if a["query"].dim() != (3 if layout in ("BSH", "TND", "NTD") else 4):
        refuse(operator, f"query: expected axes {layout}, got {list(a['query'].shape)}")
    heads, kv_heads = a["heads"], a["kv_heads"] or a["heads"]
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        refuse(operator, f"expected query heads in whole groups, got {heads} of {kv_heads}")
    if a["block_table"] is not None and a["kv_lengths"] is None:
        refuse(operator, f"{names['kv_lengths'][0]}: needed with a block_table")
    if (a["query_rope"] is None) != (a["key_rope"] is None):
        refuse(operator, "query_rope and key_rope go together")
    for name in ("query", "key", "value"):
        if not a[name].is_floating_point():
            refuse(operator, f"{name}: the emulated machine's reference has no {a[name].dtype}")
    if a["sparse_mode"] in (1, 2, 3, 4) and a["atten_mask"] is None:
        refuse(operator, f"atten_mask: needed with sparse_mode {a['sparse_mode']}")


def _used(names: dict[str, Any], *args: Any, **given: Any) -> dict[str, list[Elements]]:
    """The tokens that the block table names, of each cache."""
    a, _ = _arguments(names, args, given)
    table = a["block_table"]
    lengths = _lengths(a["kv_lengths"], len(table), 0)
    return {
        name: pages(a[name], _token_axis(a[name]), table, lengths)
        for name in ("key", "value", "key_rope")
        if a[name] is not None
    }


def _is_paged(*args: Any, block_table: Any = None, **given: Any) -> bool:
    return block_table is not None


_CACHES = frozenset(("key", "value", "key_rope"))


def _functional(names: dict[str, Any], overload: str, *args: Any, **given: Any) -> Any:
    a, _ = _arguments(names, args, given)
    looks = _looks(overload, args, given)
    out, lse = (torch.empty(one.shape, dtype=one.dtype) for one in looks)
    _attend(out, lse if a["lse"] else None, a)
    return out, lse


def _looks(overload: str, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """What the operator returns, as meta tensors."""

    def meta(value: Any) -> Any:
        return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value

    known = {k: meta(v) for k, v in given.items() if k not in ("workspace", "out")}
    return getattr(torch.ops.npu, overload)(*(meta(value) for value in args), **known)


def _into(names: dict[str, Any], overload: str, *args: Any, **given: Any) -> Any:
    a, _ = _arguments(names, args, given)
    out, lse = given["out"]
    _attend(out, lse if a["lse"] else None, a)
    return ()


def _check_into(names: dict[str, Any], overload: str, *args: Any, **given: Any) -> None:
    _check(overload, names, *args, **given)
    outs = given["out"]
    if len(outs) != 2:
        refuse(overload, f"out: expected two tensors, got {len(outs)}")
    wanted = _looks(overload, args, given)
    known, _ = _arguments(names, args, given)
    for position, (out, one) in enumerate(zip(outs, wanted, strict=True)):
        if position and not known["lse"]:
            continue
        if out.shape != one.shape or out.dtype != one.dtype:
            refuse(
                overload,
                f"out[{position}]: expected {list(one.shape)} {one.dtype}, got "
                f"{list(out.shape)} {out.dtype}",
            )


def _workspace(*args: Any, **given: Any) -> Any:
    """The reference needs none; the smallest that the device would give."""
    return torch.zeros(32, dtype=torch.uint8)


#: Shapes decide how large it is: no element of any tensor is read.
_SHAPES_ONLY = Used(
    frozenset(("query", "key", "value", "atten_mask", "block_table", "query_rope", "key_rope")),
    lambda *args, **given: defaultdict(list),
)


def _workspace_meta(*args: Any, **given: Any) -> Any:
    return torch.empty(32, dtype=torch.uint8, device="meta")


# -- the older operators ---------------------------------------------------------------------------


def _one_result(overload: str, *args: Any, **given: Any) -> Any:
    a, _ = _arguments(_OLDER[overload], args, given)
    mask = a["atten_mask"]
    if overload == _INCREMENT and mask is not None:
        a["atten_mask"] = mask.reshape(-1, 1, mask.shape[-1])  # of each request, or one for all
    look = _looks(overload, args, given)
    out = torch.empty(look.shape, dtype=look.dtype)
    _attend(out, None, a)
    return out


def _check_older(overload: str, *args: Any, **given: Any) -> None:
    names = _OLDER[overload]
    _check(overload, names, *args, **given)
    a, _ = _arguments(names, args, given)
    one_of(overload, "input_layout", a["input_layout"], _OLDER_LAYOUTS[overload])
    query, mask = a["query"], a["atten_mask"]
    tokens = query.shape[2 if a["input_layout"].startswith("BNSD") else 1]
    if overload == _INCREMENT:
        if tokens != 1:
            refuse(overload, f"query: expected one token of each request, got {tokens}")
        if mask is not None and mask.numel() // mask.shape[-1] not in (1, len(query)):
            refuse(
                overload,
                f"atten_mask: expected a row of each of {len(query)} requests, got "
                f"{list(mask.shape)}",
            )
    for name in ("lengths", "kv_lengths"):
        if a[name] is not None and len(a[name]) != 1 and len(a[name]) < len(query):
            refuse(
                overload,
                f"{names[name][0]}: expected lengths of {len(query)} requests or one for all, got "
                f"{len(a[name])}",
            )


def _update(lse: list[Any], local_out: list[Any], update_type: int) -> Any:
    """Parts of one attention put together by their sums.

    The attention's sum of a row that saw nothing is infinite, and such a part weighs nothing.
    """
    sums = torch.stack([one.float() for one in lse])
    sums = sums.masked_fill(sums == math.inf, -math.inf)
    total = torch.logsumexp(sums, 0)
    weights = torch.exp(sums - total).unsqueeze(-1)
    parts = torch.stack([one.float() for one in local_out])
    out = (parts * weights).nan_to_num(0.0).sum(0).to(local_out[0].dtype)
    return out, total.to(lse[0].dtype)


def _check_update(lse: list[Any], local_out: list[Any], update_type: int) -> None:
    operator = "npu_attention_update"
    one_of(operator, "update_type", update_type, (0, 1))
    if not lse or len(lse) != len(local_out):
        refuse(operator, f"expected as many lse as local_out, got {len(lse)}, {len(local_out)}")
    for one, out in zip(lse, local_out, strict=True):
        if out.dim() != 2 or tuple(one.shape) != (out.shape[0],) or out.shape != local_out[0].shape:
            refuse(
                operator,
                f"expected lse [N] and local_out [N, H], got {list(one.shape)}, {list(out.shape)}",
            )


def _table() -> dict[str, Special]:
    made = {"npu_attention_update": Special(_update, check=_check_update)}
    for overload, names in zip(
        ("npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"),
        _NAMES,
        strict=True,
    ):
        used = Used(_CACHES, functools.partial(_used, names), _is_paged)
        made[overload] = Special(
            functools.partial(_functional, names, overload),
            check=functools.partial(_check, overload, names),
            used=used,
        )
        made[f"{overload}.out"] = Special(
            functools.partial(_into, names, overload),
            meta=lambda *args, **given: (),
            check=functools.partial(_check_into, names, overload),
            writes=("out",),
            returns=("out[0]", "out[1]"),
            used=used,
        )
        made[f"_{overload}_get_max_workspace"] = Special(
            _workspace, meta=_workspace_meta, used=_SHAPES_ONLY
        )
    for overload, names in _OLDER.items():
        made[overload] = Special(
            functools.partial(_one_result, overload),
            check=functools.partial(_check_older, overload),
            used=Used(_CACHES, functools.partial(_used, names), _is_paged),
        )
    return made


TABLE = _table()
