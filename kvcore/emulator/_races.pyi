# SPDX-License-Identifier: Apache-2.0
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeAlias, final

from typing_extensions import disjoint_base

from kvcore.runtime.watching._watch import Accessor, Watch

_Place: TypeAlias = tuple[str, int]
_Race: TypeAlias = Callable[
    [Accessor, bool, Accessor, bool, str, Sequence[tuple[int, int]], Any], None
]
_Pairs: TypeAlias = array[int]

@final
@disjoint_base
class Item: ...

@final
@disjoint_base
class Known:
    note: Any
    def __new__(cls, note: Any) -> Self: ...

@disjoint_base
class Found(Watch):
    def __init__(self, report: Any, race: _Race, *more: Any) -> None: ...

@final
@disjoint_base
class Branches(Found):
    count: int
    def __init__(
        self, shape: list[tuple[int, int]], number: int, report: Any, race: _Race
    ) -> None: ...

@final
@disjoint_base
class Races(Found):
    check_order: bool
    check_memory: bool
    check_reads: bool
    tasks: int
    timing: Any
    def __init__(
        self,
        report: Any,
        race: _Race,
        rule: Callable[[str, str, _Place], None],
        free_found: _Race,
        unwritten: Callable[[str, str, _Place, int, int], None],
        fetch: int,
        current: int,
        device_start: int,
        device_end: int,
    ) -> None: ...
    def begin(self) -> None: ...
    def read(self) -> bool: ...
    def pending(self) -> int: ...
    def stream_name(self, lane: int) -> str: ...
    def tables(self) -> dict[str, int]: ...
    def note(self, address: int, line: int) -> None: ...
    def has_pinned(self) -> bool: ...
    def in_task(self) -> bool: ...
    def is_pinned(self, address: int) -> bool: ...
    def host_touches(self, name: str, line: int, numbers: _Pairs, write: bool) -> None: ...
    def tell(self, number: int, ranges: list[tuple[_Pairs, bool]]) -> None: ...
    def fresh(self, start: int, end: int) -> None: ...
