# SPDX-License-Identifier: Apache-2.0
"""Modules that clients import beside torch_npu and that come with a CANN or a package of its own.

They are found behind everything else, so that a module which is installed is the one that is
imported, and only in a process that is an emulated machine.  Each has what clients of a KV cache
call; another name of it is an error that says so.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["provide"]

#: A module's name among clients, and the module here that has its contents.
_MODULES = {
    "acl": "pyacl",
    "acl.rt": "pyacl_rt",
    "memfabric_hybrid": "memfabric",
    "memfabric_hybrid.offload": "memfabric_offload",
}


def provide() -> None:
    """Have the modules found where nothing else finds them; once."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        contents = _MODULES.get(name)
        if contents is None:
            return None
        parent = sys.modules.get(name.rpartition(".")[0])
        if parent is not None and not isinstance(parent.__loader__, _Loader):
            return None  # a part of a module that is installed
        package = any(other.startswith(f"{name}.") for other in _MODULES)
        loader = _Loader(f"{__name__}.{contents}")
        return importlib.util.spec_from_loader(name, loader, is_package=package)


class _Loader(importlib.abc.Loader):
    """A module under the clients' name, with what a module here defines."""

    def __init__(self, contents: str) -> None:
        self._contents = contents

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        source = importlib.import_module(self._contents)
        module.__doc__ = source.__doc__
        for name in source.__all__:
            setattr(module, name, getattr(source, name))

        def missing(name: str) -> object:
            raise AttributeError(
                f"the emulated machine's module {module.__name__} has "
                f"{', '.join(source.__all__) or 'no names'}, and no {name}"
            )

        module.__dict__["__getattr__"] = missing
