# SPDX-License-Identifier: Apache-2.0
"""The tests of other modules, for a module that runs them once more over the test double."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from typing import Any

__all__ = ["taken_over"]


def taken_over(
    suite: str, left_out: Collection[str], chosen: Collection[str] = ()
) -> dict[str, Any]:
    """``test_<suite>__<test>``: those of ``test_<suite>.py`` that are not left out.

    chosen: the only ones, where not all the rest are wanted.
    """
    found = {}
    for name, test in vars(importlib.import_module(f"test_{suite}")).items():
        short = name.removeprefix("test_")
        if short != name and short not in left_out and (not chosen or short in chosen):
            found[f"test_{suite}__{short}"] = test
    return found
