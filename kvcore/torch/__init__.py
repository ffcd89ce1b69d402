# SPDX-License-Identifier: Apache-2.0
"""The operators for torch: ``torch.ops.kvcore.*``, importable as ``import kvcore.torch``.

Registering happens on import.  Tensors are read by pointer, shape and stride, never copied, and
written in place; schemas mark what is mutated, so that ``torch.compile`` keeps the order.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ImportError as error:  # pragma: no cover - depends on the installation
    raise ImportError(
        "kvcore.torch needs torch; install it with: pip install 'kvcore[torch]'"
    ) from error

from kvcore.torch.library import LIBRARY, OPERATORS

__all__ = ["LIBRARY", "OPERATORS"]
