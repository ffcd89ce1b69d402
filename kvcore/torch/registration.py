# SPDX-License-Identifier: Apache-2.0
"""Registering one operator: schema, kernels, shape function, and its functional form.

torch.library.Library's define/impl is used rather than the custom_op decorator, which costs some
40 us a call.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import parse_schema
from torch._subclasses import FakeTensor

from kvcore._core.arrays import read
from kvcore.errors import ParamNullError, fail
from kvcore.torch.calls import PrivateCopy

__all__ = ["Arguments", "register", "register_alias", "register_pair", "register_twin"]

Kernel = Callable[..., Any]

#: Dispatch keys of dense memory that kvcore may reach, and of tensors that it refuses with its own
#: typed error: without a kernel, torch would say "could not run" and list every backend it has.
KEYS = (
    "CPU",
    "PrivateUse1",
    "CUDA",
    "XPU",
    "MPS",
    "SparseCPU",
    "SparseCsrCPU",
    "QuantizedCPU",
    "MkldnnCPU",
    "Conjugate",
    "Negative",
)


def register(
    library: torch.library.Library, schema: str, kernel: Kernel, shapes: Kernel | None = None
) -> str:
    """Define one operator; its name.

    schema: what is mutated is marked in it.  kernel: takes the arguments as the schema has them.
    shapes: the shape function of what the kernel returns; None where it returns nothing.
    """
    return _define(library, schema, kernel, shapes or _nothing)


def register_pair(
    library: torch.library.Library, schema: str, kernel: Kernel, shapes: Kernel | None = None
) -> list[str]:
    """Define one operator and its ``_functional`` form, both of which run at once; the names."""

    def on_copies(copies: tuple[PrivateCopy, ...], *args: Any, **keywords: Any) -> Any:
        for copy in copies:
            copy.into.copy_(copy.source)
        return kernel(*args, **keywords)

    return [
        register(library, schema, kernel, shapes),
        register_twin(library, schema, on_copies, shapes),
    ]


def register_alias(
    library: torch.library.Library, schema: str, kernel: Kernel, aliases: tuple[str, ...]
) -> list[str]:
    """Define an operator that returns arguments which it mutates; the names defined.

    Traces cannot keep such an operator.  It is made of two: one that mutates and returns nothing,
    and one above it, which a trace takes apart, that calls it and hands the arguments back.
    """
    head = schema.rpartition(" -> ")[0]
    name, _, arguments = head.partition("(")
    inner = f"_kvcore_{name.replace('.', '_')}"
    names = _define(library, f"{inner}({arguments} -> ()", kernel, _nothing)
    library.define(schema)
    read = Arguments(schema)

    def outer(*args: Any, **keywords: Any) -> Any:
        getattr(getattr(torch.ops, library.ns), inner)(*args, **keywords)
        given = read(args, keywords)
        found = [given[alias] for alias in aliases]
        return found[0] if len(found) == 1 else tuple(found)

    library.impl(name, outer, "CompositeImplicitAutograd")
    return [names, name]


class Arguments:
    """Reads the arguments of a call by a schema's names."""

    def __init__(self, schema: str) -> None:
        self.schema: Any = parse_schema(schema)
        self.names: list[str] = [argument.name for argument in self.schema.arguments]
        self.written: set[str] = {
            argument.name for argument in self.schema.arguments if _is_written(argument)
        }

    def __call__(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
        """Every argument that was given, by name."""
        return {**dict(zip(self.names, args, strict=False)), **keywords}


def register_twin(
    library: torch.library.Library, schema: str, on_copies: Kernel, shapes: Kernel | None
) -> str:
    """Define the functional form of a mutating operator; its name.

    It leaves its arguments alone and returns what the operator returns, then copies of what the
    operator would have mutated, in the order of the schema; for None an empty tensor.

    on_copies: called with the copies, which it has to fill before it works on them, then with the
    arguments, in which they stand for what the operator mutates.
    """
    head, _, returned = schema.rpartition(" -> ")
    name, _, arguments = head.partition("(")
    returns = [] if returned == "()" else [returned]
    returns += ["Tensor"] * len(re.findall(r"\(\w!\)", arguments))
    result = returns[0] if len(returns) == 1 else f"({', '.join(returns)})"
    plain = re.sub(r"\(\w!\)", "", arguments)
    mutated = _mutated(schema)

    def functional(*args: Any, **keywords: Any) -> Any:
        args, keywords, copies, made = _with_copies(mutated, args, keywords)
        return _together(on_copies(copies, *args, **keywords), made)

    def functional_shapes(*args: Any, **keywords: Any) -> Any:
        args, keywords, _, made = _with_copies(mutated, args, keywords)
        return _together(None if shapes is None else shapes(*args, **keywords), made)

    return _define(library, f"{name}_functional({plain} -> {result}", functional, functional_shapes)


def _define(library: torch.library.Library, schema: str, kernel: Kernel, shapes: Kernel) -> str:
    name = schema.partition("(")[0]
    qualified = f"{library.ns}::{name}"
    # Pointers are read and bytes written in the kernel, in the strides they have.
    library.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
    for key in KEYS:
        library.impl(name, kernel, key)
    # The kernels refuse tensors that want a gradient; torch's own kernel, which looks for them
    # among the arguments too, is passed over.
    library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    library.impl(name, partial(_refuse_nested, Arguments(schema)), "AutogradNestedTensor")

    # torch calls a shape function for the fake tensors of a trace, and also for a call made by
    # hand with meta tensors, which would do nothing and say nothing.
    def checked(*args: Any, **keywords: Any) -> Any:
        for value in (*args, *keywords.values()):
            if isinstance(value, Tensor) and value.device.type == "meta":
                fail(qualified, "tensors with memory", "one on device 'meta'")
        return shapes(*args, **keywords)

    torch.library.register_fake(qualified, checked, lib=library)
    return name


def _refuse_nested(read: Arguments, *args: Any, **keywords: Any) -> NoReturn:
    """The kernel for nested tensors, whose shape torch does not tell."""
    for argument, value in read(args, keywords).items():
        if isinstance(value, Tensor) and value.is_nested:
            fail(argument, "a dense (strided) tensor", "a nested tensor")
    raise AssertionError("torch chose the kernel of nested tensors without one")


def _nothing(*args: Any, **keywords: Any) -> None:
    """The shape function of an operator that only mutates."""


def _mutated(schema: str) -> list[tuple[int, str]]:
    """(position or -1 for keyword-only, name) of the mutated arguments."""
    return [
        (-1 if argument.kwarg_only else i, argument.name)
        for i, argument in enumerate(Arguments(schema).schema.arguments)
        if _is_written(argument)
    ]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _with_copies(
    mutated: list[tuple[int, str]], args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[PrivateCopy, ...], list[Tensor]]:
    """The arguments with new tensors for the mutated ones, these pairs, and what is returned."""
    positional, named = list(args), dict(keywords)
    copies: list[PrivateCopy] = []
    made: list[Tensor | None] = []
    for i, name in mutated:
        here = 0 <= i < len(positional)
        tensor = positional[i] if here else named.get(name)
        if tensor is None:
            made.append(None)
            continue
        copy = _like(tensor, name)
        copies.append(PrivateCopy(copy, tensor, name))
        made.append(copy)
        if here:
            positional[i] = copy
        else:
            named[name] = copy
    if not copies:
        raise ParamNullError(
            f"{mutated[0][1]}: expected an array, got None", argument=mutated[0][1], seen=None
        )
    empty = copies[0].into
    return (
        tuple(positional),
        named,
        tuple(copies),
        [empty.new_empty(0) if t is None else t for t in made],
    )


def _like(tensor: Any, name: str) -> Tensor:
    """A new tensor of the same shape and dtype."""
    if not isinstance(tensor, FakeTensor) and tensor.device.type != "meta":
        read(tensor, name)  # the typed error of one that no operator can read
    return torch.empty_like(tensor)


def _together(result: Any, made: list[Tensor]) -> Any:
    found = [*([] if result is None else [result]), *made]
    return found[0] if len(found) == 1 else tuple(found)
