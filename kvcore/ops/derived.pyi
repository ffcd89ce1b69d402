# SPDX-License-Identifier: Apache-2.0
# Written by .ci/stub_of_derived.py from the operators' own parameters; not to be edited.

from typing import Any

from kvcore._core.plan import Plan
from kvcore.ops.scenario import Scenario

def plan_gather_pa_kv_cache(
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    key: Any,
    value: Any,
    *,
    seq_offset: Any = None,
    cache_mode: str | None = "Norm",
    is_seq_lens_cumsum: bool = False,
    dtype: Any = None,
    value_dtype: Any = None,
    soc: Any = None,
    backend: Any = None,
    num_threads: int | None = None,
) -> Plan:
    """A Plan of gather_pa_kv_cache with the same arguments: run() it any number of times."""

def plan_gather_selection_kv_cache(
    selection_k_rope: Any,
    selection_kv_cache: Any,
    selection_kv_block_table: Any,
    selection_kv_block_status: Any,
    selection_topk_indices: Any,
    full_k_rope: Any,
    full_kv_cache: Any,
    full_kv_block_table: Any,
    full_kv_actual_seq: Any,
    full_q_actual_seq: Any,
    *,
    selection_topk_block_size: int = 64,
    q_lens_cumulative: bool = False,
    stats: dict[str, Any] | None = None,
    dtype: Any = None,
    soc: Any = None,
    backend: Any = None,
    num_threads: int | None = None,
) -> Plan:
    """A Plan of gather_selection_kv_cache with the same arguments: run() it any number of times.

    Each run returns a new array and fills stats anew.
    """

def plan_kv_cache_update(
    new_kv: Any,
    layer_id: Any,
    past: Any,
    token_offset: Any,
    seq_len: Any,
    *,
    dtype: Any = None,
    soc: Any = None,
    backend: Any = None,
    num_threads: int | None = None,
) -> Plan:
    """A Plan of kv_cache_update with the same arguments: run() it any number of times."""

def plan_scatter_pa_cache(
    key: Any,
    key_cache: Any,
    slot_mapping: Any,
    *,
    compress_lens: Any = None,
    compress_seq_offset: Any = None,
    seq_lens: Any = None,
    dtype: Any = None,
    soc: Any = None,
    backend: Any = None,
    num_threads: int | None = None,
) -> Plan:
    """A Plan of scatter_pa_cache with the same arguments: run() it any number of times."""

def plan_scatter_pa_kv_cache(
    key: Any,
    key_cache: Any,
    slot_mapping: Any,
    value: Any = None,
    value_cache: Any = None,
    *,
    compress_lens: Any = None,
    compress_seq_offset: Any = None,
    seq_lens: Any = None,
    cache_mode: str | None = "Norm",
    scatter_mode: str | None = "None",
    strides: Any = None,
    offsets: Any = None,
    dtype: Any = None,
    value_dtype: Any = None,
    soc: Any = None,
    backend: Any = None,
    num_threads: int | None = None,
) -> Plan:
    """A Plan of scatter_pa_kv_cache with the same arguments: run() it any number of times."""

def scenario_of(
    key: Any,
    key_cache: Any,
    slot_mapping: Any,
    value: Any = None,
    value_cache: Any = None,
    *,
    compress_lens: Any = None,
    compress_seq_offset: Any = None,
    seq_lens: Any = None,
    cache_mode: str | None = "Norm",
    scatter_mode: str | None = "None",
    strides: Any = None,
    offsets: Any = None,
    dtype: Any = None,
    value_dtype: Any = None,
    soc: Any = None,
    backend: Any = None,
    num_threads: int | None = None,
) -> Scenario:
    """Say which scenario these arguments are, and which SoC would run them.

    Takes the arguments of scatter_pa_kv_cache; each array may be a pair (shape, dtype) in its
    place, which stands for a contiguous array of that shape (in elements, also of float4).
    soc, backend and num_threads change nothing here.  Nothing is read but shapes, strides and
    dtypes, and nothing is written.

    Raises what scatter_pa_kv_cache raises, without a SoC, for arguments that are wrong anywhere.

    >>> import kvcore
    >>> found = kvcore.scenario_of(
    ...     ((4, 8, 128), "float16"), ((64, 8, 16, 128), "float16"), ((4,), "int32"),
    ...     ((4, 8, 128), "float16"), ((64, 8, 16, 128), "float16"), scatter_mode="NHSD",
    ... )
    >>> found.number, found.runs["A3"], found.runs["950"] is None
    (7, None, False)
    """
