# SPDX-License-Identifier: Apache-2.0
"""Sets of element types that the machines' documents name, and how they are printed."""

from __future__ import annotations

from kvcore.dtypes import DATA_DTYPES

__all__ = ["ALL", "HALF", "NO_FLOAT4", "NO_FLOAT8", "SHORT", "printed_types"]

#: Names of kvcore.dtypes, as every table here holds them.
Types = tuple[str, ...]

ALL: Types = tuple(row.name for row in DATA_DTYPES)
NO_FLOAT4: Types = tuple(row.name for row in DATA_DTYPES if not row.packed)
NO_FLOAT8: Types = tuple(name for name in NO_FLOAT4 if "float8" not in name)
SHORT: Types = ("float16", "bfloat16", "int8")
HALF: Types = ("float16", "bfloat16")


def printed_types(names: Types) -> str:
    """The names, or "all" and what is left out of it."""
    for all_but, known in (("float4", NO_FLOAT4), ("float8, hifloat8 and float4", NO_FLOAT8)):
        if names == known:
            return f"all but {all_but}"
    return "all" if names == ALL else " ".join(names)
