# SPDX-License-Identifier: Apache-2.0
"""The arguments of `DecodeEngine`: their types, their defaults, and what each may be."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

from kvcore.errors import fail
from kvcore.offload.checks import check_device, check_integer, check_stream
from kvcore.offload.decode.write_policy import make_write_policy

if TYPE_CHECKING:
    from kvcore.offload.decode.moves import AttentionInput, MakeRows
    from kvcore.runtime import Device, Stream

__all__ = ["EngineOptions", "EngineSettings", "Select", "read_settings"]

#: select(request, group index, tokens): positions below ``tokens``.
Select = Callable[[Hashable, int, int], Any]
MAX_BATCH = 65_536


class EngineOptions(TypedDict, total=False):
    """The options of `DecodeEngine` that have a default; its docstring says what each means."""

    attend: Callable[[AttentionInput], object] | None
    layer_us: float | Callable[[int, int, int], float]
    policy: str
    capacity: int | None
    ways: int | None
    write_policy: str
    max_drafts: int
    recent_rows: int | None
    depth: int
    compute: Stream | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """All arguments of `DecodeEngine` but the device, the full caches and the groups.

    `read_settings` makes checked ones, where ``recent_rows`` is a number.
    """

    max_batch: int
    max_tokens: int
    topk: int
    select: Select
    rows: MakeRows
    attend: Callable[[AttentionInput], object] | None = None
    layer_us: float | Callable[[int, int, int], float] = 0.0
    policy: str = "lru"
    capacity: int | None = None
    ways: int | None = None
    write_policy: str = "write_through"
    max_drafts: int = 0
    recent_rows: int | None = None
    depth: int = 2
    compute: Stream | None = None

    @property
    def most_tokens(self) -> int:
        """The most tokens that a request writes in a step: the newest and its drafts."""
        return 1 + self.max_drafts

    @property
    def ring_rows(self) -> int:
        """Rows on the device for a request's newest tokens."""
        assert self.recent_rows is not None
        return self.recent_rows

    @property
    def pool_capacity(self) -> int:
        """Places of a device pool."""
        if self.capacity is not None:
            return self.capacity
        return self.topk if self.policy == "previous" else 4 * self.topk


def read_settings(
    device: Device,
    *,
    max_batch: int,
    max_tokens: int,
    topk: int,
    select: Select,
    rows: MakeRows,
    options: EngineOptions,
) -> EngineSettings:
    """Check the arguments and fill in what was left open.

    Raises TypeError for an option that does not exist, as a call does, and ParamInvalidError.
    The pools check policy, capacity and ways.
    """
    for name in options:
        if name not in EngineOptions.__annotations__:
            raise TypeError(f"DecodeEngine() got an unexpected keyword argument {name!r}")
    given = EngineSettings(
        max_batch=max_batch, max_tokens=max_tokens, topk=topk, select=select, rows=rows, **options
    )
    check_device("device", device)
    compute = given.compute
    if compute is not None and check_stream("compute", compute).device is not device:
        fail("compute", "a stream of the same device", repr(compute))
    check_integer("max_batch", max_batch, 1, MAX_BATCH)
    check_integer("max_tokens", max_tokens, 1)
    check_integer("topk", topk, 1)
    check_integer("max_drafts", given.max_drafts, 0, 2**16)
    check_integer("depth", given.depth, 1, 1024)
    for name, value in (("select", select), ("rows", rows), ("attend", given.attend)):
        if not callable(value) and not (name == "attend" and value is None):
            fail(name, "a callable", type(value).__name__)
    writes, most = make_write_policy(given.write_policy), given.most_tokens
    recent = writes.default_rows(most) if given.recent_rows is None else given.recent_rows
    check_integer("recent_rows", recent, 1, 2**24)
    least = writes.rows_needed(most)
    if recent < least:
        what = f"at least {least} rows for {given.max_drafts} drafts a step ({writes.name})"
        fail("recent_rows", what, recent)
    return replace(given, recent_rows=recent)
