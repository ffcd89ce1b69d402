# SPDX-License-Identifier: Apache-2.0
"""What each machine accepts of GatherPaKvCache, and what its kernels do beyond their document.

The rules that read these tables are in kvcore/ops/soc_gather.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcore.soc.types import NO_FLOAT4, SHORT, Types, printed_types

__all__ = ["ARCH35", "BOARD_910", "Gather"]


@dataclass(frozen=True, slots=True)
class Gather:
    """One machine's table.

    dtypes, index_dtypes: accepted types.
    mixed:       (key dtype, value dtypes) that may differ; else key and value have one dtype.
    token_unit_bytes, token_bytes: a token (H*D) is whole units, at most so many bytes; None: any.
    Beyond the document:
    outer_strides: whether the strides of all axes but the last are honoured; where not, only
                 those of the caches' first axis with a Norm cache are.
    offset_in_columns: whether, in PA_NZ, seq_offset is added to the column as it is.
    zeros_out_of_range: whether rows of a block outside the cache are filled with zeros.
    """

    dtypes: Types
    index_dtypes: Types
    mixed: tuple[str, Types] | None
    token_unit_bytes: int | None
    token_bytes: int | None
    outer_strides: bool
    offset_in_columns: bool
    zeros_out_of_range: bool

    def sentence(self) -> str:
        """What is accepted."""
        one_dtype = "4-D caches, key and value of one dtype"
        if self.mixed is not None:
            key, values = self.mixed
            one_dtype += f" but for a {key} key with a {' or '.join(values)} value"
        parts = [printed_types(self.dtypes), f"{' or '.join(self.index_dtypes)} indices", one_dtype]
        if self.token_unit_bytes is not None:
            parts.append(
                f"H * D * itemsize a multiple of {self.token_unit_bytes} and <= {self.token_bytes}"
            )
        return "; ".join(parts)

    def quirks(self) -> list[str]:
        """What the kernels do beyond their document."""
        found = []
        if self.offset_in_columns:
            found.append("seq_offset counts columns, not tokens, in PA_NZ")
        if self.zeros_out_of_range:
            found.append("rows of a block out of range are filled with zeros")
        return found


#: A2 and A3.
BOARD_910 = Gather(
    dtypes=SHORT,
    index_dtypes=("int32",),
    mixed=None,
    token_unit_bytes=32,
    token_bytes=148 * 1024,
    outer_strides=False,
    offset_in_columns=True,
    zeros_out_of_range=False,
)

#: The 950.
ARCH35 = Gather(
    dtypes=NO_FLOAT4,
    index_dtypes=("int32", "int64"),
    mixed=("float8_e4m3fn", ("float16", "bfloat16")),
    token_unit_bytes=None,
    token_bytes=None,
    outer_strides=True,
    offset_in_columns=False,
    zeros_out_of_range=True,
)
