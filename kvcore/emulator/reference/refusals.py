# SPDX-License-Identifier: Apache-2.0
"""One way to refuse what a reference does not compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import torch

__all__ = ["none_of", "one_of", "refuse"]


def refuse(operator: str, text: str) -> NoReturn:
    """RuntimeError, as torch_npu's own checks raise."""
    raise RuntimeError(f"{operator}: {text}")


def none_of(operator: str, given: Mapping[str, object]) -> None:
    """Refuse arguments that are present and that the reference does not know."""
    for name, value in given.items():
        if isinstance(value, torch.Tensor) or value:
            refuse(operator, f"the emulated machine's reference has no {name}")


def one_of(operator: str, name: str, value: object, known: tuple[object, ...]) -> None:
    """Refuse a mode that is not among the known ones."""
    if value not in known:
        words = ", ".join(repr(one) for one in known)
        refuse(operator, f"{name}: expected one of {words}, got {value!r}")
