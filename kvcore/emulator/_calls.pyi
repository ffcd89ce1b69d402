# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable, Collection
from typing import Any, final

from typing_extensions import disjoint_base

from kvcore.emulator._tasks import Name, Task

def bind(
    torch: dict[str, Any],
    view: Callable[[Any, tuple[int, ...], Any, int, int], tuple[Any, bool]],
    formats: int,
) -> None: ...

@final
@disjoint_base
class Look:
    size: Any
    stride: Any
    dtype: Any
    span: int
    itemsize: int
    def __init__(self, size: Any, stride: Any, dtype: Any, itemsize: int) -> None: ...

@final
@disjoint_base
class Spec: ...

@final
@disjoint_base
class Signature: ...

@final
@disjoint_base
class Call(Task):
    result: Any

@disjoint_base
class Kernel:
    name: str
    run: Any
    names: list[str]
    returns: list[str | None]
    written: set[str]
    single: bool
    plain: bool
    random: bool
    by_value: bool
    compiled: bool
    def __init__(self, name: str) -> None: ...
    def prepare(self) -> None: ...
    def learn(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, bool, list[Any], list[tuple[str, Any]]]: ...
    def in_base_format(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any] | None: ...
    def with_generator(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], device: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]: ...
    def waited(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], device: int, stream: int, name: Name
    ) -> Any: ...
    def results(self, args: tuple[Any, ...], kwargs: dict[str, Any], new: list[Any]) -> Any: ...
    def chosen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Collection[str]: ...
    def used_elements(
        self, spans: list[tuple[str, int]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[Any, bool]]: ...
    def text(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str: ...
    def refused_now(self, stream: int) -> bool: ...
    def kept(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], stream: int, name: Name
    ) -> Call: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
