# SPDX-License-Identifier: Apache-2.0
"""What A2 and A3 accept of GatherSelectionKvCache, and what its kernels do beyond its document.

The rules that read this table are in kvcore/ops/soc_gather.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcore.soc.types import SHORT, Types, printed_types

__all__ = ["A2", "A3", "Selection"]


@dataclass(frozen=True, slots=True)
class Selection:
    """One machine's table; each limit is the greatest value accepted.

    documented:  whether the document names this machine.
    without_rope: types that take no rope.
    topk; topk_of_blocks: above it, blocks have one token; steps: rows of a request (S).
    rope_size, kv_size: R and K.  buffer_bytes: what the buffers of one row share.
    """

    documented: bool
    dtypes: Types
    without_rope: Types
    index_dtypes: Types
    topk: int
    topk_of_blocks: int
    steps: int
    rope_size: int
    kv_size: int
    buffer_bytes: int

    def sentence(self) -> str:
        """What is accepted."""
        return (
            f"{printed_types(self.dtypes)} ({' and '.join(self.without_rope)} without rope); "
            f"{' or '.join(self.index_dtypes)} indices; contiguous arrays; topk <= {self.topk}, "
            f"above {self.topk_of_blocks} with blocks of one token; S <= {self.steps}; "
            f"R <= {self.rope_size}; K <= {self.kv_size}; SB >= rows * SMAX"
        )

    def quirks(self) -> list[str]:
        """What the kernels do beyond their document."""
        short = self.topk_of_blocks
        return [
            f"topk up to {short} needs S == 1; a row must fit {self.buffer_bytes} bytes",
            f"topk up to {short} stops at the first negative id of a row",
            f"topk above {short} takes S for the number of new tokens",
            "a row that sees no token is left as it was",
            "held blocks with rewritten tokens are served as they are",
        ]


def _table(documented: bool) -> Selection:
    return Selection(
        documented=documented,
        dtypes=SHORT,
        without_rope=("int8",),
        index_dtypes=("int32",),
        topk=2048,
        topk_of_blocks=32,
        steps=7,
        rope_size=64,
        kv_size=656,
        buffer_bytes=192 * 1024,
    )


A3 = _table(documented=True)
#: Built for the A2 too.
A2 = _table(documented=False)
