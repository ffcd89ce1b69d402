# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from typing import Any, Protocol, final

KIND_WORK: int
KIND_CALL: int
KIND_TIMER: int

class _Line(Protocol):
    name: str
    index: int

@final
class Failure:
    cause: BaseException
    stream: str
    operation: str
    seen: bool
    def __init__(self, cause: BaseException, stream: str, operation: str) -> None: ...

@final
class Waiter:
    fired: bool
    def __init__(self, ring: Callable[[], object]) -> None: ...
    def notify(self) -> None: ...

@final
class Mark:
    failure: Failure | None
    queue: _Line
    time: float
    note: Any
    graph: Any
    position: Any
    promises: tuple[Mark, ...] | None
    @property
    def pending(self) -> bool: ...
    @property
    def failed(self) -> bool: ...
    @property
    def dropped(self) -> bool: ...
    def add(self, waiter: Waiter) -> bool: ...
    def discard(self, waiter: Waiter) -> None: ...

@final
class Op:
    target: Any
    args: Any
    mark: Mark | None
    number: int
    note: Any
    started: float
    ended: float
    us: float
    @property
    def is_call(self) -> bool: ...
    @property
    def is_timer(self) -> bool: ...
    @property
    def is_work(self) -> bool: ...
    @property
    def name(self) -> str: ...
