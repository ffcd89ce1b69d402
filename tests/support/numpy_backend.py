# SPDX-License-Identifier: Apache-2.0
"""A backend as somebody else would write it: tokens written by numpy, one row at a time.

Written from the text of kvcore.backends.base alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvcore._core.plan import Plan

Array = np.ndarray[Any, Any]


def bits(array: Any) -> Array:
    """The same memory as unsigned integers: tokens are moved bit for bit."""
    view = np.asarray(array)
    return view.view(f"u{view.itemsize}")


def norm(cache: Array, slot: int, row: Array) -> None:
    cache[slot // cache.shape[1], slot % cache.shape[1]] = row


def nhsd(cache: Array, slot: int, row: Array) -> None:
    cache[slot // cache.shape[2], :, slot % cache.shape[2]] = row


def pa_nz(cache: Array, slot: int, row: Array) -> None:
    """A row [H, D] as columns of c0 elements, of a cache [nb, H*D//c0, bs, c0] or [nb, H, ...]."""
    block_size, c0 = cache.shape[-2:]
    column = cache[slot // block_size, ..., slot % block_size, :]
    column[...] = row.reshape(*cache.shape[1:-2], c0)


class NumpyBackend:
    """Scatters of single tokens: scenarios 1, 2 (but for Nct), 6 and 7."""

    name = "numpy"
    spaces = frozenset({"host"})

    def why_not(self, plan: Plan | None = None) -> str | None:
        if plan is None:
            return None
        if plan.operator.name != "scatter_pa_kv_cache":
            return f"{plan.operator.name} is not written"
        if plan.spec.case.rule != "rows":
            return f"{plan.spec.case.rule} is not written"
        return None

    def prepare(self, plan: Plan) -> Callable[[], Any]:
        arrays = plan.request.named()
        case = plan.spec.case
        put = {1: pa_nz, 7: nhsd}.get(case.number, norm)
        lanes = [("key", "key_cache")] if case.key_only else [
            ("key", "key_cache"), ("value", "value_cache"),
        ]  # fmt: skip

        def run() -> None:
            plan.check_values()
            for source, target in lanes:
                tokens, cache = bits(arrays[source]), bits(arrays[target])
                for token, slot in enumerate(np.asarray(arrays["slot_mapping"]).tolist()):
                    if slot >= 0:
                        put(cache, slot, tokens[token])

        return run
