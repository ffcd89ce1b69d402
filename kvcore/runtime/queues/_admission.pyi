# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from typing import Any, final

from typing_extensions import disjoint_base

@final
@disjoint_base
class Admission:
    key: object
    modelled: bool
    refuse: Callable[[str, object], None]
    def __init__(self, key: object, modelled: bool) -> None: ...
    def check(self, plan: Any) -> None: ...
