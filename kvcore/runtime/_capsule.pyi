# SPDX-License-Identifier: Apache-2.0
from typing import Any

from kvcore._core.dlpack import BEYOND_NUMPY as BEYOND_NUMPY

def retype(capsule: Any, name: str) -> Any: ...
