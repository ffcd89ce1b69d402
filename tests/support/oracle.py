# SPDX-License-Identifier: Apache-2.0
"""What every operator must do, worked out the slow way from the raw arguments.

The oracle shares nothing with the package: plain loops and indexing, one module a noun.  Each
function has the public signature without ``soc``, ``backend`` and ``num_threads``, leaves its
arguments alone and returns new arrays.  Legal arguments are assumed: ``violations`` tells.

    result = oracle.run("scatter_pa_kv_cache", arguments)
    result.outputs                             {argument: array it must hold afterwards}
    oracle.settle(result, "key_cache", seen)   the bits ``seen`` must have
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oracle_gather import (
    GatherPaResult,
    SelectionResult,
    gather_pa_kv_cache,
    gather_selection_kv_cache,
)
from oracle_numbers import (
    Array,
    bits,
    decode,
    encode,
    is_nan,
    logical_name,
    mean_of_rows,
    pack_float4,
    unpack_float4,
)
from oracle_rules import Violation
from oracle_rules_gather import gather_pa_violations, selection_violations
from oracle_rules_scatter import scatter_pa_cache_violations, scatter_violations
from oracle_rules_update import update_violations
from oracle_scatter import ScatterResult, scatter_pa_cache, scatter_pa_kv_cache
from oracle_update import (
    LAYOUT_FUNCTIONS,
    kv_cache_update,
    nd_to_nz,
    nz_to_nd,
    paged_nd_to_nz,
    paged_nz_to_nd,
)

__all__ = [
    "GatherPaResult",
    "Result",
    "ScatterResult",
    "SelectionResult",
    "Violation",
    "apply",
    "bits",
    "decode",
    "encode",
    "gather_pa_kv_cache",
    "gather_selection_kv_cache",
    "is_nan",
    "kv_cache_update",
    "logical_name",
    "mean_of_rows",
    "nd_to_nz",
    "nz_to_nd",
    "pack_float4",
    "paged_nd_to_nz",
    "paged_nz_to_nd",
    "run",
    "scatter_pa_cache",
    "scatter_pa_kv_cache",
    "settle",
    "unpack_float4",
    "violations",
]


@dataclass
class Result:
    """Outputs of one call, in one form for every operator.

    any_nan:     {argument: mask}; there any NaN of the type will do.
    unspecified: {argument: mask}; there anything will do.
    """

    outputs: dict[str, Array]
    returned: Array | None = None
    any_nan: dict[str, Array] = field(default_factory=dict)
    unspecified: dict[str, Array] = field(default_factory=dict)
    stats: dict[str, Array] | None = None


def run(operator: str, arguments: Mapping[str, Any]) -> Result:
    """Work out one call; ``arguments`` are those of the public function, by name."""
    if operator in ("scatter_pa_kv_cache", "scatter_pa_cache"):
        function = scatter_pa_kv_cache if operator == "scatter_pa_kv_cache" else scatter_pa_cache
        scattered = function(**arguments)
        result = Result({"key_cache": scattered.key_cache})
        result.any_nan["key_cache"] = scattered.key_any_nan
        if scattered.value_cache is not None:
            assert scattered.value_any_nan is not None
            result.outputs["value_cache"] = scattered.value_cache
            result.any_nan["value_cache"] = scattered.value_any_nan
        return result
    if operator == "kv_cache_update":
        past = kv_cache_update(**arguments)
        return Result({"past": past}, returned=past)
    if operator == "gather_pa_kv_cache":
        gathered = gather_pa_kv_cache(**arguments)
        outputs = {"key": gathered.key}
        if gathered.value is not None:
            outputs["value"] = gathered.value
        return Result(outputs)
    if operator == "gather_selection_kv_cache":
        selected = gather_selection_kv_cache(**arguments)
        outputs = {
            "selection_kv_cache": selected.selection_kv_cache,
            "selection_kv_block_status": selected.selection_kv_block_status,
        }
        if selected.selection_k_rope is not None:
            outputs["selection_k_rope"] = selected.selection_k_rope
        loose: dict[str, Array] = {
            name: np.broadcast_to(~selected.specified[:, :, None], outputs[name].shape)
            for name in ("selection_kv_cache", "selection_k_rope")
            if name in outputs
        }
        return Result(
            outputs,
            selected.selection_kv_actual_seq,
            unspecified=loose,
            stats=selected.stats,
        )
    if operator in LAYOUT_FUNCTIONS:
        rest = {n: v for n, v in arguments.items() if n != "out"}
        converted = LAYOUT_FUNCTIONS[operator](**rest)
        given = arguments.get("out") is not None
        return Result({"out": converted} if given else {}, returned=converted)
    raise ValueError(f"operator: no oracle for {operator!r}")


def settle(result: Result, argument: str, actual: Array, element: str | None = None) -> Array:
    """Raw bits ``actual`` must have, after letting it choose where nothing is promised.

    element: the type's name where the array itself does not say it.
    """
    expected = np.array(bits(result.outputs[argument]))
    seen = bits(actual)
    free = np.zeros(expected.shape, bool)
    if argument in result.unspecified:
        free |= result.unspecified[argument]
    nans = result.any_nan.get(argument)
    if nans is not None and nans.any():
        name = logical_name(actual, element)
        assert name is not None
        free |= nans & is_nan(seen, name)
    expected[free] = seen[free]
    return expected


def apply(operator: str, arguments: Mapping[str, Any]) -> Array | None:
    """Do what the public function does: write the outputs in place and return its result."""
    result = run(operator, arguments)
    for name, array in result.outputs.items():
        bits(arguments[name])[...] = bits(array)
    inplace = {"kv_cache_update": "past"} | dict.fromkeys(LAYOUT_FUNCTIONS, "out")
    given: Array | None = arguments.get(inplace.get(operator, ""))
    return result.returned if given is None else given


def violations(operator: str, arguments: Mapping[str, Any]) -> list[Violation]:
    """Every rule of sections 1 to 6 that the arguments break; an empty list: legal."""
    return VIOLATIONS[operator](arguments)


VIOLATIONS = {
    "scatter_pa_kv_cache": scatter_violations,
    "scatter_pa_cache": scatter_pa_cache_violations,
    "kv_cache_update": update_violations,
    "gather_pa_kv_cache": gather_pa_violations,
    "gather_selection_kv_cache": selection_violations,
}
