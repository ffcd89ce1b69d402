# SPDX-License-Identifier: Apache-2.0
"""What is done when a module has been imported: torch_npu's kernels are registered.

The machine starts before torch, so a finder stands first in ``sys.meta_path`` until the module is
looked for, and its loader does the rest after the module's own code has run.  torch_npu is one such
module; the stand-in for Triton that vLLM brings is another.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from kvcore.emulator import machine

__all__ = ["when_imported"]

_NAME = "torch_npu"
#: Where vLLM keeps what stands in for Triton when that is not installed.
_PLACEHOLDER = "vllm.triton_utils.importing"


def when_imported() -> None:
    """Finish the machine once torch_npu is there: at once, or after it is imported."""
    if _NAME in sys.modules and hasattr(sys.modules[_NAME], "npu"):
        _complete()
    else:
        sys.meta_path.insert(0, _Finder(_NAME, lambda module: _complete()))
    if _PLACEHOLDER not in sys.modules:
        sys.meta_path.insert(0, _Finder(_PLACEHOLDER, _launchable))


def _launchable(module: ModuleType) -> None:
    from kvcore.emulator import triton

    triton.replace(module)


def _complete() -> None:
    # A thread that waits for a mutex inside torch_npu must not hold the GIL: cann/python.c.
    machine.load().core.kvdouble_patch(b"libtorch_npu.so")
    from kvcore.emulator import atb, checking, custom, fallback, randomness, vendor

    fallback.install()
    randomness.install()
    vendor.define()
    atb.register()
    custom.define()
    checking.watch()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, once; ``then`` is called with it when its own code has run."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._then)
        return spec


class _Loader(importlib.abc.Loader):
    """A module's own loader, followed by the machine's part of the import."""

    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then(module)

    def __getattr__(self, name: str) -> Any:  # is_package, get_source and their like
        return getattr(self._loader, name)
