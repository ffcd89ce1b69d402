# SPDX-License-Identifier: Apache-2.0
from typing import Any, Self, final

from typing_extensions import disjoint_base

from kvcore.runtime.queues._marks import Mark
from kvcore.runtime.watching._vectors import Vector

@final
@disjoint_base
class Note:
    site: Any
    node: Any
    checksums: Any
    vector: Vector
    lane: int
    count: int
    host: int
    late: tuple[Mark, ...]
    def __new__(cls, site: Any) -> Self: ...

@final
@disjoint_base
class Stamp:
    lane: int
    count: int
    vector: Vector
    host: int
    late: tuple[Mark, ...]
    def __new__(
        cls, lane: int, count: int, vector: Vector, host: int, late: tuple[Mark, ...]
    ) -> Self: ...

@final
@disjoint_base
class StreamClock:
    name: str
    vector: Vector
    count: int
    late: tuple[Mark, ...]
    def __new__(cls, name: str) -> Self: ...

@disjoint_base
class Order:
    lanes: list[StreamClock]
    in_flight: dict[int, Vector]
    def lane(self, index: int, name: str) -> None: ...
    def launched(self, index: int, note: Note, number: int) -> None: ...
    def marked(self, index: int) -> Stamp: ...
    def waited(self, index: int, mark: Mark) -> None: ...
    def reached(self, vector: Vector, host: int, late: tuple[Mark, ...]) -> tuple[Vector, int]: ...
    def joined(self, stamp: Stamp) -> bool: ...
    def floor(self) -> tuple[int, Vector]: ...
