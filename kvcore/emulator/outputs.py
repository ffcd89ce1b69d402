# SPDX-License-Identifier: Apache-2.0
"""How the outputs of an operator's call look, before it runs.

The operator's meta kernel says it.  Many of those are written in Python, and the first that runs
imports torch's compiler, which takes longer than the machine takes to start.  Until the program
has imported that, small calls run the CPU kernel itself on zeros instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from kvcore.emulator.arguments import mapped, tensors

__all__ = ["asked"]

#: Elements of all tensors of a call that is small.
_SMALL = 1 << 16

#: New outputs, None where a kernel gives no tensor; name and size of out= tensors to resize.
Answer = tuple[list[Any], list[tuple[str, Any]]]


def asked(
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out_names: list[str],
    returns: list[str | None],
    *,
    on_zeros: bool = False,
) -> Answer:
    """Ask a kernel how its outputs look.

    out_names: arguments that it resizes.
    returns:   of each return value, which argument it is; None if it is new.
    on_zeros:  the kernel may be run: it draws no numbers, and its outputs are no larger than what
               its tensors and numbers say.
    Returns the new outputs as tensors that look like them, and (name, size) of each out= tensor
    that has another size.
    """
    if on_zeros and "torch._dynamo" not in sys.modules:
        given = [t for value in (*args, *kwargs.values()) for t in tensors(value)]
        if sum(t.numel() for t in given) <= _SMALL:
            try:
                return _asked_on("cpu", run, args, kwargs, out_names, returns)
            except Exception:  # zeros may be wrong arguments for it; the meta kernel then decides
                pass
    return _asked_on("meta", run, args, kwargs, out_names, returns)


def _asked_on(
    device: str,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out_names: list[str],
    returns: list[str | None],
) -> Answer:
    def stand_in(tensor: Any) -> Any:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return made if device == "meta" else made.zero_()

    there = {name: mapped(value, stand_in) for name, value in kwargs.items()}
    if "device" in there:
        there["device"] = device
    if "pin_memory" in there:
        there["pin_memory"] = False
    # Numbers are not drawn here.
    if "generator" in there:
        there["generator"] = None
    for name in out_names:
        if isinstance(kwargs[name], torch.Tensor):
            there[name] = torch.empty(0, dtype=kwargs[name].dtype, device=device)
    given = (None if isinstance(v, torch.Generator) else mapped(v, stand_in) for v in args)
    result = run(*given, **there)
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
