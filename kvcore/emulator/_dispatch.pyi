# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from typing import Any

from typing_extensions import disjoint_base

def bind(
    torch: tuple[Any, Any, Any],
    make: Callable[[Any], Known],
    host: Callable[[Known, int, tuple[Any, ...], dict[str, Any]], None],
    races: Any,
    found: Any,
) -> None: ...

@disjoint_base
class Known:
    name: str
    copies: bool
    def __init__(
        self,
        name: str,
        kernel: Any,
        copies: bool,
        after: Callable[[int, tuple[Any, ...], dict[str, Any], Any], None] | None,
    ) -> None: ...

def dispatch(
    self: Any,
    func: Any,
    types: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any: ...
