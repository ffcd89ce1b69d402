# SPDX-License-Identifier: Apache-2.0
"""What is done when torch_npu has been imported: the machine's kernels are registered.

The machine starts before torch, so a finder stands first in ``sys.meta_path`` until torch_npu is
looked for, and its loader does the rest after torch_npu's own code has run.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from kvcore.emulator import machine

__all__ = ["when_imported"]

_NAME = "torch_npu"


def when_imported() -> None:
    """Finish the machine once torch_npu is there: at once, or after it is imported."""
    if _NAME in sys.modules and hasattr(sys.modules[_NAME], "npu"):
        _complete()
    else:
        sys.meta_path.insert(0, _Finder())


def _complete() -> None:
    # A thread that waits for a mutex inside torch_npu must not hold the GIL: cann/python.c.
    machine.load().core.kvdouble_patch(b"libtorch_npu.so")
    from kvcore.emulator import checking, fallback, randomness, vendor

    fallback.install()
    randomness.install()
    vendor.define()
    checking.watch()


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """torch_npu's own loader, followed by the machine's part of the import."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _complete()

    def __getattr__(self, name: str) -> Any:  # is_package, get_source and their like
        return getattr(self._loader, name)
