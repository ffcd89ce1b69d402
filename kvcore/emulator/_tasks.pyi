# SPDX-License-Identifier: Apache-2.0
from array import array
from collections.abc import Callable
from typing import Any, final

from typing_extensions import disjoint_base

def bind(addresses: dict[str, int], words: Callable[[int], str], reader: Any) -> None: ...
def bind_state(
    setter: int,
    left_out: Callable[[], Any],
    taken_in: Callable[[], Any],
    modes: Callable[[], int],
) -> None: ...
def stop() -> None: ...
def held() -> int: ...
def queue(stream: int, name: Name, function: Callable[[], object], numbers: array[int]) -> None: ...

@final
@disjoint_base
class Name:
    text: str
    def __init__(self, text: str) -> None: ...

@disjoint_base
class Task: ...

@final
@disjoint_base
class Function(Task): ...
