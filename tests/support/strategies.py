# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for whole calls, legal by construction or broken on purpose.

Each legal strategy draws a :class:`cases.Case`; each illegal one a :class:`cases.IllegalCase`
made from a legal case by breaking one rule.  Shapes are small; dtypes, index types, strides,
interleaving, offsets, repeated and negative slots, and the bits of the data vary.
"""

from __future__ import annotations

from mutations_gather import illegal_gather_pa_cases, illegal_gather_selection_cases
from mutations_scatter import illegal_scatter_cases, illegal_scatter_pa_cache_cases
from mutations_update import illegal_kv_cache_update_cases
from strategies_paged import gather_pa_cases, kv_cache_update_cases, layout_cases
from strategies_scatter import scatter_cases, scatter_pa_cache_cases
from strategies_selection import gather_selection_cases, selection_sequences

__all__ = [
    "gather_pa_cases",
    "gather_selection_cases",
    "illegal_gather_pa_cases",
    "illegal_gather_selection_cases",
    "illegal_kv_cache_update_cases",
    "illegal_scatter_cases",
    "illegal_scatter_pa_cache_cases",
    "kv_cache_update_cases",
    "layout_cases",
    "scatter_cases",
    "scatter_pa_cache_cases",
    "selection_sequences",
]
