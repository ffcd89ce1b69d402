# SPDX-License-Identifier: Apache-2.0
from typing import Any

TYPES: dict[str, tuple[int, int, int]]

def retype(capsule: Any, name: str) -> Any: ...
