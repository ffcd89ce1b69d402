# SPDX-License-Identifier: Apache-2.0
"""Arguments of an operator's call: the tensors among them, and on which device they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["common_device", "has_mask", "mapped", "tensors"]


def tensors(value: Any) -> Iterator[Any]:
    """Tensors of an argument, which may be a list with None in it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """An argument with each of its tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return [mapped(item, change) for item in value]
    return value


def has_mask(args: tuple[Any, ...]) -> bool:
    """Whether one of the indices, the second argument, is a mask."""
    return any(x.dtype in (torch.bool, torch.uint8) for x in tensors(args[1:2]))


def common_device(args: tuple[Any, ...], kwargs: dict[str, Any], host_indices: bool) -> int:
    """The device of all tensors, -1 where none is on a device; others are refused as torch does.

    host_indices: all but the first argument may be the host's.
    """
    device = -1
    host = False
    for position, value in enumerate((*args, *kwargs.values())):
        for tensor in tensors(value):
            if tensor.is_cpu:
                host = host or (tensor.dim() > 0 and not (host_indices and position > 0))
            elif device < 0:
                device = tensor.device.index
            elif device != tensor.device.index:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two "
                    f"devices, npu:{device} and {tensor.device}!"
                )
    if host and device >= 0:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"npu:{device} and cpu!"
        )
    return device
