# SPDX-License-Identifier: Apache-2.0
"""Which operators of torch get a fallback kernel, and how each behaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch._C import (
    _dispatch_get_all_op_names,
    _dispatch_get_registrations_for_dispatch_key,
    _dispatch_has_kernel_for_dispatch_key,
    _get_schema,
)

from kvcore.emulator.touched import Used

__all__ = [
    "OWN",
    "SPECIAL",
    "Special",
    "behaviours",
    "depends_on_data",
    "has_kernel",
    "is_random",
    "names",
    "overload_of",
    "overloads",
    "schema_of",
    "takes_host_indices",
    "waits_for_masks",
    "with_generator",
]

#: torch_npu's own kernels that work on the machine: memory, copies, views, storage, streams.
OWN = frozenset(
    {
        "_copy_from", "_copy_from_and_resize", "_lazy_clone", "_local_scalar_dense", "_pin_memory",
        "_reshape_alias", "_to_copy", "alias", "as_strided", "as_strided_", "clone", "contiguous",
        "copy_", "empty.memory_format", "empty_like", "empty_strided", "is_pinned", "is_set_to",
        "new_empty_strided", "record_stream", "resize_", "set_", "set_.source_Storage",
        "set_.source_Storage_storage_offset", "set_.source_Tensor", "unfold", "view", "view.dtype",
        "view_as_complex", "view_as_real", "_to_sparse", "_to_sparse.sparse_dim",
        "_fused_sdp_choice",
    }
)  # fmt: skip

#: Their meta kernels cannot say how the output looks, or they return no tensor.
_DEPENDS = frozenset(
    {
        "equal", "nonzero", "nonzero.out", "masked_select", "masked_select.out", "_unique",
        "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "bincount",
        "is_nonzero", "repeat_interleave.Tensor", "histc", "_linalg_check_errors",
        "_pack_padded_sequence",
    }
)  # fmt: skip


def schema_of(overload: Any) -> Any:
    """Arguments, aliases and return values that an overload of torch's declares."""
    return overload._schema  # noqa: SLF001  (torch has no public name for it)


def _registered() -> Iterator[str]:
    """Overloads with a kernel for CPUs, or that torch_npu has registered for its device."""
    registered = set(_dispatch_get_registrations_for_dispatch_key("PrivateUse1"))
    registered |= set(_dispatch_get_registrations_for_dispatch_key("CPU"))
    for name in sorted(registered):
        if name.startswith("aten::"):
            yield name[len("aten::") :]


def overload_of(name: str) -> Any:
    """The overload; made when it is asked for, which takes longer than to know its schema."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _schema_named(name: str) -> Any:
    """The schema of an overload, None for a name that has kernels and that nobody has defined."""
    packet, _, overload = name.partition(".")
    try:
        return _get_schema(f"aten::{packet}", overload)
    except RuntimeError:
        return None


def _is_view(schema: Any) -> bool:
    """Whether the operator returns a view of an argument that it does not write."""
    return any(ret.alias_info and not ret.alias_info.is_write for ret in schema.returns)


def _is_of_memory(name: str, schema: Any) -> bool:
    """Whether the overload takes a storage or a stream, after which torch names it."""
    if "storage" not in name.lower() and "stream" not in name:
        return False
    return any("Storage" in str(a.type) or "Stream" in str(a.type) for a in schema.arguments)


def names() -> Iterator[str]:
    """Every operator that gets a kernel."""
    for name in _registered():
        schema = None if name in OWN else _schema_named(name)
        if schema is not None and not _is_view(schema) and not _is_of_memory(name, schema):
            yield name


def overloads() -> Iterator[tuple[str, Any]]:
    """(name, overload) of each operator."""
    for name in names():
        yield name, overload_of(name)


def _short(overload: Any) -> str:
    return str(overload).removeprefix("aten.").removesuffix(".default")


_COMPOSED = (
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)


def has_kernel(name: str) -> bool:
    """Whether something can run on CPU tensors in the operator's place."""
    has = _dispatch_has_kernel_for_dispatch_key
    return any(has(f"aten::{name}", key) for key in ("CPU", *_COMPOSED)) or (
        str(overload_of(name)) in SPECIAL
    )


def behaviours() -> dict[str, str]:
    """How the machine runs each overload of torch's.

    "deferred": torch's CPU kernel as a task in stream order.  "waits": the call waits for its
    stream; a capture refuses it.  "own": torch_npu's own code on the machine's runtime, or a view.
    "composed": torch makes it of other operators.  "refused": nobody has a kernel; an error at the
    call that names it.
    """
    has = _dispatch_has_kernel_for_dispatch_key
    ours = dict(overloads())
    found = {}
    for full in _dispatch_get_all_op_names():
        name = full.removeprefix("aten::")
        if name == full or _schema_named(name) is None:
            continue
        if name in ours:
            waits = depends_on_data(ours[name]) and not waits_for_masks(ours[name])
            kind = ("waits" if waits else "deferred") if has_kernel(name) else "refused"
        elif has(full, "PrivateUse1"):
            kind = "own"
        else:
            kind = "composed" if any(has(full, key) for key in _COMPOSED) else "refused"
        found[name] = kind
    return found


def depends_on_data(overload: Any) -> bool:
    """Whether the call must wait for its stream before it can return."""
    tags = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
    returns = [str(ret.type) for ret in schema_of(overload).returns]
    return (
        _short(overload) in _DEPENDS
        or any(tag in overload.tags for tag in tags)
        or any("Tensor" not in kind for kind in returns)
    )


def waits_for_masks(overload: Any) -> bool:
    """Whether the call waits only if there is a mask among its indices: the mask gives the size."""
    return _short(overload) in ("index.Tensor", "index.Tensor_out", "_unsafe_index.Tensor")


def is_random(overload: Any) -> bool:
    """Whether the operator draws numbers from a generator."""
    return torch.Tag.nondeterministic_seeded in overload.tags or any(
        argument.name == "generator" for argument in schema_of(overload).arguments
    )


def with_generator(overload: Any) -> Any:
    """The overload that also takes a generator, None if this one does or none is there."""
    if any(argument.name == "generator" for argument in schema_of(overload).arguments):
        return None
    packet, _, name = _short(overload).partition(".")
    wanted = f"{name}_generator" if name else "generator"
    return getattr(getattr(torch.ops.aten, packet), wanted, None)


def takes_host_indices(overload: Any) -> bool:
    """Whether its index tensors may be on the host, as in torch."""
    return _short(overload).partition(".")[0] in (
        "index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index",
        "_unsafe_index_put",
    )  # fmt: skip


# -- operators without a CPU kernel, or that draw from torch's global generator --------------------


class Special(NamedTuple):
    """What runs in an operator's place, with the operator's own arguments.

    run:     on CPU tensors.
    meta:    on meta tensors, for what is returned; None: the operator's own meta kernel.
    check:   of the arguments, for refusals at the call; asked once for each signature.
    writes:  arguments that are written and that the schema does not mark.
    returns: where the schema does not say so: what each return value is, an argument's name (or
             ``name[0]``, of a list), or None for a new tensor.
    used:    arguments of which it uses some elements; None: all of all.
    """

    run: Callable[..., Any]
    meta: Callable[..., Any] | None = None
    check: Callable[..., None] | None = None
    writes: tuple[str, ...] = ()
    returns: tuple[str | None, ...] | None = None
    used: Used | None = None


def _native_dropout(value: Any, p: float, train: bool | None, *, generator: Any = None) -> Any:
    if train is False or p == 0:
        return value.clone(), torch.ones_like(value, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(value), torch.zeros_like(value, dtype=torch.bool)
    drawn = torch.empty_like(value, dtype=torch.float32).uniform_(generator=generator)
    mask = drawn >= p
    return value * mask / (1 - p), mask


def _matmul_backward(grad: Any, left: Any, right: Any, mask: list[bool]) -> Any:
    with torch.enable_grad():
        left, right = left.detach().requires_grad_(), right.detach().requires_grad_()
        out = torch.matmul(left, right)
    got = torch.autograd.grad(out, (left, right), grad)
    return tuple(value if wanted else None for value, wanted in zip(got, mask, strict=True))


def _matmul_backward_meta(grad: Any, left: Any, right: Any, mask: list[bool]) -> Any:
    both = (torch.empty_like(left), torch.empty_like(right))
    return tuple(value if wanted else None for value, wanted in zip(both, mask, strict=True))


def _linear_backward(value: Any, grad: Any, weight: Any, mask: list[bool]) -> Any:
    rows, columns = grad.reshape(-1, grad.shape[-1]), value.reshape(-1, value.shape[-1])
    return (
        grad.matmul(weight) if mask[0] else None,
        rows.t().matmul(columns) if mask[1] else None,
        rows.sum(0) if mask[2] else None,
    )


SPECIAL: dict[str, Special] = {
    "aten.native_dropout.default": Special(_native_dropout),
    "aten.matmul_backward.default": Special(_matmul_backward, _matmul_backward_meta),
    "aten.linear_backward.default": Special(_linear_backward, _linear_backward),
}
