# SPDX-License-Identifier: Apache-2.0
"""Which arguments of kv_cache_update are legal, without a SoC."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from oracle_rules import (
    Arguments,
    Violation,
    check_arrays,
    check_data_dtypes,
    check_index_dtypes,
    check_outputs,
    first_stage,
    invalid,
    is_integer,
    null,
)


def update_violations(arguments: Arguments) -> list[Violation]:
    """Every broken rule of a kv_cache_update call."""
    return first_stage((_u_presence, _u_types, _u_shapes, _u_outputs, _u_values), arguments)


def _u_presence(a: Arguments) -> Iterator[Violation]:
    yield from check_arrays(a, ("new_kv", "past", "token_offset", "seq_len"))
    layer = a.get("layer_id")
    if layer is None:
        yield null("layer_id")
    elif not isinstance(layer, np.ndarray) and not is_integer(layer):
        yield invalid("is neither an array nor an integer", "layer_id")


def _u_types(a: Arguments) -> Iterator[Violation]:
    yield from check_data_dtypes(a, {"dtype": ("new_kv", "past")})
    yield from check_index_dtypes(a, ("layer_id", "token_offset", "seq_len"))


def _u_shapes(a: Arguments) -> Iterator[Violation]:
    if a["past"].ndim != 4:
        yield invalid("is not 4-D", "past")
    if a["new_kv"].ndim not in (2, 4):
        yield invalid("is neither 2-D nor 4-D", "new_kv")
    if isinstance(a["layer_id"], np.ndarray) and a["layer_id"].shape != (1,):
        yield invalid("is not of shape [1]", "layer_id")
    for name in ("token_offset", "seq_len"):
        if a[name].ndim != 1:
            yield invalid("is not 1-D", name)
        elif a["past"].ndim == 4 and len(a[name]) != a["past"].shape[1]:
            yield invalid("has not one entry a batch", name, "past")
    if a["past"].ndim == 4 and a["new_kv"].ndim in (2, 4):
        hidden = int(np.prod(a["new_kv"].shape[-1 if a["new_kv"].ndim == 2 else -2 :]))
        if hidden != a["past"].shape[3]:
            yield invalid("hidden sizes disagree", "new_kv", "past")


def _u_outputs(a: Arguments) -> Iterator[Violation]:
    yield from check_outputs(a, ["past"], ["new_kv", "layer_id", "token_offset", "seq_len"])


def _u_values(a: Arguments) -> Iterator[Violation]:
    layers, _, max_seq, _ = a["past"].shape
    layer = int(np.asarray(a["layer_id"]).reshape(-1)[0])
    if not 0 <= layer < layers:
        yield invalid("is not a layer", "layer_id")
    lengths = [int(x) for x in a["seq_len"]]
    for b, (n, end) in enumerate(zip(lengths, a["token_offset"].tolist(), strict=True)):
        if n < 0:
            yield invalid(f"[{b}] is negative", "seq_len")
        elif end < n:
            yield invalid(f"[{b}] is less than seq_len", "token_offset", "seq_len")
        elif end > max_seq:
            yield invalid(f"[{b}] is past max_seq", "token_offset")
    if min(lengths, default=0) >= 0:
        shape = a["new_kv"].shape
        if sum(lengths) != int(np.prod(shape[: len(shape) // 2])):
            yield invalid("does not add up to the tokens", "seq_len", "new_kv")
