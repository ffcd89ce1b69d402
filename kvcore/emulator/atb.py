# SPDX-License-Identifier: Apache-2.0
"""What stands for ATB's library where it is absent: its registration, and operators of no cache.

torch_npu's own module for ATB loads a C++ library of another package.  A client that asks for the
registration, as engines do when they start, finds it done; vendor.py has the operators of caches.
An operator that has no reference fails with an error that names it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch_npu  # type: ignore[import-not-found,unused-ignore]
from torch_npu.op_plugin.atb import _atb_ops  # type: ignore[import-not-found,unused-ignore]

from kvcore.emulator.fallback import Kernel
from kvcore.emulator.operators import Special
from kvcore.emulator.reference.refusals import refuse

__all__ = ["register"]

_MATMUL = "_npu_matmul_add_fp32"

_libraries: list[Any] = []


def _matmul_add(x: Any, weight: Any, C: Any) -> None:
    C.add_(x.t().float() @ weight.float())


def _check_matmul_add(x: Any, weight: Any, C: Any) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[0] != weight.shape[0]:
        refuse(
            _MATMUL,
            f"expected x [K, M] and weight [K, N], got {list(x.shape)}, {list(weight.shape)}",
        )
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dtype not in (torch.float16, torch.bfloat16):
            refuse(_MATMUL, f"{name}: expected float16 or bfloat16, got {tensor.dtype}")
    wanted = [x.shape[1], weight.shape[1]]
    if list(C.shape) != wanted or C.dtype != torch.float32 or not C.is_contiguous():
        refuse(_MATMUL, f"C: expected contiguous float32 {wanted}, got {C.dtype} {list(C.shape)}")


def register() -> None:
    """Do what the library's registration does, unless the library is there."""
    if getattr(_atb_ops, "NNAL_EX", None) is None:
        return
    library = torch.library.Library("atb", "FRAGMENT")
    library.define(f"{_MATMUL}(Tensor x, Tensor weight, Tensor(a!) C) -> ()")
    overload = getattr(torch.ops.atb, _MATMUL).default
    special = Special(_matmul_add, meta=lambda *args: None, check=_check_matmul_add)
    library.impl(_MATMUL, Kernel("atb", _MATMUL, overload, special), "PrivateUse1")
    _libraries.append(library)
    for names, place in (
        (_atb_ops.API_LIST, torch_npu),
        (getattr(_atb_ops, "ATB_API_LIST", ()), getattr(torch_npu, "atb", None)),
    ):
        for name in names:
            found = getattr(torch.ops.atb, name, None)
            setattr(place, name, found or functools.partial(_absent, name))
    _atb_ops._register_atb_extensions = lambda: None  # noqa: SLF001  (clients import it from there)


def _absent(name: str, *args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        f"{name}: ATB's library has it; the emulated machine, where that is absent, has no "
        "reference of it"
    )
