# SPDX-License-Identifier: Apache-2.0
"""Which arguments of the operators are index arrays, by name."""

from __future__ import annotations

__all__ = ["INDEX_ARGUMENTS"]

#: Index arrays: small, and accepted on the host where the backend is named.
INDEX_ARGUMENTS = frozenset(
    {
        *("slot_mapping", "compress_lens", "compress_seq_offset", "seq_lens"),
        *("block_tables", "seq_offset", "layer_id", "token_offset", "seq_len"),
        *("selection_topk_indices", "full_kv_block_table"),
        *("full_kv_actual_seq", "full_q_actual_seq"),
    }
)
