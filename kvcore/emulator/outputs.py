# SPDX-License-Identifier: Apache-2.0
"""How the outputs of an operator's call look, before it runs: its meta kernel's answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvcore.emulator.arguments import mapped

__all__ = ["asked"]


def _meta(tensor: Any) -> Any:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def asked(
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out_names: list[str],
    returns: list[str | None],
) -> tuple[list[Any], list[tuple[str, Any]]]:
    """Ask a kernel on meta tensors.

    out_names: arguments that it resizes.
    returns:   of each return value, which argument it is; None if it is new.
    Returns the new outputs, as meta tensors or None, and (name, size) of each out= tensor that has
    another size.
    """
    there = {name: mapped(value, _meta) for name, value in kwargs.items()}
    if "device" in there:
        there["device"] = "meta"
    if "pin_memory" in there:
        there["pin_memory"] = False
    # Numbers are not drawn here.
    if "generator" in there:
        there["generator"] = None
    for name in out_names:
        if isinstance(kwargs[name], torch.Tensor):
            there[name] = torch.empty(0, dtype=kwargs[name].dtype, device="meta")
    result = run(
        *(None if isinstance(v, torch.Generator) else mapped(v, _meta) for v in args), **there
    )
    resized = [
        (name, there[name].shape)
        for name in out_names
        if isinstance(kwargs[name], torch.Tensor) and there[name].shape != kwargs[name].shape
    ]
    if len(returns) == 1:
        result = (result,)
    new: list[Any] = []
    for source, value in zip(returns, result or (), strict=False):
        if source is None:
            members = value if isinstance(value, list | tuple) else (value,)
            new += [member if isinstance(member, torch.Tensor) else None for member in members]
    return new, resized
