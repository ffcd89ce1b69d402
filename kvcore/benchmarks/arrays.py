# SPDX-License-Identifier: Apache-2.0
"""Arrays and the plain copy that the cases share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Functions", "copies", "random_slots", "rows", "torch_if_installed", "warm"]

#: The functions of a case by name.
Functions = dict[str, Callable[[], Any]]


def torch_if_installed() -> Any:
    """torch where it is loaded or can be; measured with the rest only then."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(1)
    return torch


def warm(array: NDArray[Any]) -> NDArray[Any]:
    """The array, each page of it touched: no case shall pay for the kernel's zeroing."""
    array.view(np.uint8).reshape(-1)[:] = 1
    return array


def rows(tokens: int, heads: int, size: int, seed: int) -> NDArray[np.uint16]:
    """[tokens, heads, size] of any bits."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, 1 << 16, (tokens, heads, size), dtype=np.uint16)


def random_slots(tokens: int, slots: int) -> NDArray[np.int64]:
    """[tokens] different slots below that bound."""
    return np.random.default_rng(7).permutation(slots)[:tokens].astype(np.int64)


def copies(*sources: NDArray[Any]) -> Callable[[], None]:
    """np.copyto of each source into an array of its own."""
    targets = [warm(np.empty_like(source)) for source in sources]

    def copyto() -> None:
        for target, source in zip(targets, sources, strict=True):
            np.copyto(target, source)

    return copyto
