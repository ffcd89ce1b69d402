# SPDX-License-Identifier: Apache-2.0
"""What torch_npu's own operators compute, in torch: those that clients of a KV cache call first.

Each reference is a function on CPU tensors with the operator's own signature.  It runs as a task
of the stream, is captured by graphs, and reads and writes the tensors' own memory, as torch's
operators do (fallback.py).  Shapes and types of what it returns are those of torch_npu's own meta
kernels.  Results are computed in float32 and rounded once: near the hardware's, and not its bits.

An argument that a reference does not know is refused by name, at the call.  An operator without a
reference fails with torch_npu's own error, which names the kernel that is missing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvcore.emulator.operators import Special
from kvcore.emulator.reference import (
    activation,
    attention,
    kv_write,
    matmul,
    normalization,
    quantise,
    rotary,
    sparse,
)

__all__ = ["references"]

_TABLES = (
    activation.TABLE,
    attention.TABLE,
    kv_write.TABLE,
    matmul.TABLE,
    normalization.TABLE,
    quantise.TABLE,
    rotary.TABLE,
    sparse.TABLE,
)


def references() -> Iterator[tuple[str, object, Special]]:
    """(name, overload, reference) of each operator that this torch_npu has and that has one."""
    for table in _TABLES:
        for name, special in table.items():
            packet, _, overload = name.partition(".")
            found = getattr(getattr(torch.ops.npu, packet, None), overload or "default", None)
            if found is not None:
                yield name, found, special
