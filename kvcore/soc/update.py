# SPDX-License-Identifier: Apache-2.0
"""What A2 and A3 accept of KVCacheOperation (ATB), and what its kernel does beyond its checks.

The rules that read this table are in kvcore/ops/soc_update.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcore.soc.types import Types, printed_types

__all__ = ["BOARD_910", "Update"]


@dataclass(frozen=True, slots=True)
class Update:
    """One machine's table.

    token_unit_bytes, token_bytes: hidden * itemsize is whole units, at most so many bytes.
    """

    dtypes: Types
    index_dtypes: Types
    token_unit_bytes: int
    token_bytes: int

    def sentence(self) -> str:
        """What is accepted."""
        return (
            f"{printed_types(self.dtypes)}; {' or '.join(self.index_dtypes)} indices; "
            f"hidden * itemsize a multiple of {self.token_unit_bytes} and <= {self.token_bytes}; "
            "seq_len > 0; token_offset < max_seq"
        )

    def quirks(self) -> list[str]:
        """What the kernel does beyond its checks."""
        return ["strided arrays are taken for contiguous"]


#: A2 and A3.
BOARD_910 = Update(
    dtypes=("float16", "int8"),
    index_dtypes=("int32",),
    token_unit_bytes=32,
    token_bytes=196608,
)
