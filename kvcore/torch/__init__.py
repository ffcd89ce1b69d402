# SPDX-License-Identifier: Apache-2.0
"""The operators for torch: ``torch.ops.kvcore.*``, and a stand-in for torch_npu.

The operators are registered on import.  Tensors are read by pointer, shape and stride, never
copied, and written in place; schemas mark what is mutated, so that ``torch.compile`` keeps the
order.  ``install`` puts the vendor's names on a namespace of the caller's; ``verify`` runs calls
again that an installation has recorded.  docs/torch.md shows both.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ImportError as _error:  # pragma: no cover - depends on the installation
    raise ImportError(
        "kvcore.torch needs torch; install it with: pip install 'torch>=2.6'"
    ) from _error

from kvcore.torch.installation import Installation, install
from kvcore.torch.library import LIBRARY, OPERATORS
from kvcore.torch.record import Recording
from kvcore.torch.verification import Difference, Verification, verify

__all__ = [
    "LIBRARY",
    "OPERATORS",
    "Difference",
    "Installation",
    "Recording",
    "Verification",
    "install",
    "verify",
]
