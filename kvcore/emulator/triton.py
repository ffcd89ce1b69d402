# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that serving engines launch, by name.

Triton's compiler for the NPU is not here.  Where Triton is not installed vLLM brings a placeholder
whose decorators return the undecorated function; under the emulated machine they return a launcher
instead.  The few kernels that the paths of a KV cache need have a reference in torch, which runs as
a task in stream order and is captured by graphs; the launch of another one is an error that names
it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch

from kvcore.emulator.operators import Special
from kvcore.emulator.reference.refusals import refuse
from kvcore.emulator.touched import Elements, Used, pieces

__all__ = ["Launcher", "replace"]

_SPACE = "kvcore_emulator"


def replace(module: ModuleType) -> None:
    """Give vLLM's placeholder of Triton a ``jit`` whose functions can be launched."""
    placeholder: Any = module.TritonPlaceholder
    initialise = placeholder.__init__

    @functools.wraps(initialise)
    def extended(self: Any) -> None:
        initialise(self)
        self.jit = jit

    placeholder.__init__ = extended


def jit(function: Any = None, **options: Any) -> Any:
    """A launcher of the decorated function; with options only, the decorator."""
    return Launcher if function is None else Launcher(function)


class Launcher:
    """What ``kernel[grid](arguments)`` launches on the current stream: a reference by name."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__doc__ = function.__doc__
        self.fn = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: Any, *args: Any, **kwargs: Any) -> None:
        name = self.fn.__name__
        kernel = _KERNELS.get(name)
        if kernel is None:
            raise RuntimeError(
                f"the Triton kernel {name} of {self.fn.__module__} has no reference on the "
                f"emulated machine; those that have: {', '.join(sorted(_KERNELS))}"
            )
        programs = grid(kwargs) if callable(grid) else grid
        _defined(name)(tuple(programs), *args, **kwargs)


class _Reference(NamedTuple):
    """A kernel: the schema of the operator behind it, and what that computes."""

    schema: str
    special: Special


@functools.cache
def _defined(name: str) -> Callable[..., None]:
    from kvcore.emulator.fallback import Kernel

    reference = _KERNELS[name]
    library = torch.library.Library(_SPACE, "FRAGMENT")
    library.define(f"{name}{reference.schema}")
    overload = getattr(getattr(torch.ops, _SPACE), name).default
    library.impl(name, Kernel(_SPACE, name, overload, reference.special), "PrivateUse1")
    _libraries.append(library)
    called: Callable[..., None] = overload
    return called


_libraries: list[Any] = []


# -- slots of tokens from positions and a block table ----------------------------------------------

_SLOTS = "_compute_slot_mapping_kernel"


def _tokens(grid: Any, starts: Any) -> list[tuple[int, int]]:
    """(first, end) of each request's tokens; the last program pads."""
    bounds = starts[: grid[0]].tolist()
    return list(itertools.pairwise(bounds))


def _slot_mapping(
    grid: Any, num_tokens: int, max_num_tokens: int, query_start_loc: Any, positions: Any,
    block_table: Any, block_table_stride: int, block_size: int, slot_mapping: Any, *,
    PAD_ID: int, **constants: Any,
) -> None:  # fmt: skip
    """slot = table[request, position // block_size] * block_size + position % block_size."""
    slot_mapping[num_tokens:max_num_tokens] = PAD_ID
    for request, (first, end) in enumerate(_tokens(grid, query_start_loc)):
        at = positions[first:end].long()
        block = at // block_size
        if len(block) and int(block.max()) >= block_table_stride:
            raise RuntimeError(
                f"{_SLOTS}: positions: expected blocks of a table with {block_table_stride} "
                f"columns, got block {int(block.max())} of request {request}"
            )
        numbers = block_table.view(-1)[request * block_table_stride + block].long()
        slot_mapping[first:end] = (numbers * block_size + at % block_size).to(slot_mapping.dtype)


def _check_slot_mapping(
    grid: Any, num_tokens: int, max_num_tokens: int, query_start_loc: Any, positions: Any,
    block_table: Any, block_table_stride: int, block_size: int, slot_mapping: Any, *,
    TOTAL_CP_WORLD_SIZE: int, **constants: Any,
) -> None:  # fmt: skip
    if TOTAL_CP_WORLD_SIZE != 1:
        refuse(_SLOTS, f"TOTAL_CP_WORLD_SIZE: expected 1, got {TOTAL_CP_WORLD_SIZE}")
    if len(query_start_loc) < grid[0]:
        refuse(
            _SLOTS,
            f"query_start_loc: expected {grid[0]} bounds of {grid[0] - 1} requests, got "
            f"{len(query_start_loc)}",
        )
    if not 0 <= num_tokens <= max_num_tokens <= len(slot_mapping) or len(positions) < num_tokens:
        refuse(
            _SLOTS,
            "expected num_tokens <= max_num_tokens slots and as many positions, got "
            f"{num_tokens}, {max_num_tokens}, {len(slot_mapping)} slots, "
            f"{len(positions)} positions",
        )


def _slots_written(
    grid: Any, num_tokens: int, max_num_tokens: int, query_start_loc: Any, positions: Any,
    block_table: Any, block_table_stride: int, block_size: int, slot_mapping: Any,
    **constants: Any,
) -> dict[str, list[Elements]]:  # fmt: skip
    bounds = _tokens(grid, query_start_loc)
    parts = [torch.arange(a, b) for a, b in [*bounds, (num_tokens, max_num_tokens)]]
    return {"slot_mapping": [pieces(slot_mapping, torch.cat(parts) * slot_mapping.stride(0), [])]}


_KERNELS = {
    _SLOTS: _Reference(
        "(int[] grid, int num_tokens, int max_num_tokens, Tensor query_start_loc, "
        "Tensor positions, Tensor block_table, int block_table_stride, int block_size, "
        "Tensor(a!) slot_mapping, *, int KV_CACHE_BLOCK_SIZE, int BLOCKS_PER_KV_BLOCK, "
        "int TOTAL_CP_WORLD_SIZE, int TOTAL_CP_RANK, int CP_KV_CACHE_INTERLEAVE_SIZE, "
        "int PAD_ID, int TILE_BLOCK_SIZE, int BLOCK_TABLE_WINDOW_SIZE) -> ()",
        Special(
            _slot_mapping,
            meta=lambda *args, **constants: None,
            check=_check_slot_mapping,
            used=Used(frozenset(("slot_mapping",)), _slots_written),
        ),
    ),
}
