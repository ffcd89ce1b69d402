# SPDX-License-Identifier: Apache-2.0
"""The backend of an NPU, broken in one place at a time: does its test double notice?

    python -m pytest tests/tools/npu_mutations/*.py

These break private functions by name, so they follow the backend's insides, and are run before a
release.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "npu"))

from double.fixtures import cann, cann_folder, double, loaded_double

__all__ = ["cann", "cann_folder", "double", "loaded_double"]
