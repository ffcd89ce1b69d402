# SPDX-License-Identifier: Apache-2.0
"""The search for CANN's libraries: where they may be, and what was found in each place.

Order: the environment's homes, the usual installation folders, then the linker's own path; in a
home ``lib64`` and ``<arch>-linux/lib64``.  ``devlib`` is never looked at: its libraries have the
same names, load, and answer 100039 to everything.  ``KVCORE_ACLNN_LIBRARY_PATH`` names folders to
use instead of all that.  Nothing is loaded by a relative path, nor what a stranger may have written
(see ``trust``).

Changing LD_LIBRARY_PATH in a running process does nothing, so files are opened by absolute path
and what they need is loaded before them, for all to see (RTLD_GLOBAL).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvcore.npu.cann.trust import TRUST, Opened, Refused, opened

__all__ = ["ENVIRONMENT", "SETTINGS", "LoadedLibrary", "Search"]

ENVIRONMENT = "KVCORE_ACLNN_LIBRARY_PATH"
#: Environment variables that decide where libraries are found.
SETTINGS = (
    ENVIRONMENT,
    "ASCEND_HOME_PATH",
    "ASCEND_TOOLKIT_HOME",
    "ASCEND_OPP_PATH",
    "ASCEND_CUSTOM_OPP_PATH",
    TRUST,
)
RUNTIME_NAMES = ("libacl_rt.so", "libascendcl.so")
META_NAME = "libnnopbase.so"
#: The split library first: the umbrella must not be mixed with it.
OPERATOR_NAMES = ("libopapi_transformer.so", "libopapi.so")
CUSTOM_NAME = "libcust_opapi.so"
DRIVER_NAME = "libascend_hal.so"
DRIVER_FOLDER = "/usr/local/Ascend/driver/lib64"
#: Bytes of a vendors' config.ini that are read.
MAX_CONFIG = 2**16
USUAL_HOMES = (
    "/usr/local/Ascend/cann",
    "/usr/local/Ascend/ascend-toolkit/latest",
    "~/Ascend/cann",
    "~/Ascend/ascend-toolkit/latest",
)


@dataclass(frozen=True, slots=True)
class LoadedLibrary:
    """A library that was loaded."""

    path: str
    handle: ctypes.CDLL

    def has(self, name: str) -> bool:
        """Whether the library, or one that it was linked with, exports the name."""
        return hasattr(self.handle, name)


@dataclass
class Search:
    """One search; ``tried`` lists what was looked at, in order, and the outcome of each."""

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    tried: list[tuple[str, str]] = field(default_factory=list)

    @property
    def given(self) -> list[Path]:
        """The folders of KVCORE_ACLNN_LIBRARY_PATH, which stand for all others."""
        parts = self.environ.get(ENVIRONMENT, "").split(os.pathsep)
        return [Path(part) for part in parts if part.strip()]

    def homes(self) -> Iterator[Path]:
        """Where a CANN may be installed, each once."""
        named = [self.environ.get(name, "").strip() for name in SETTINGS[1:3]]
        seen = set()
        for text in (*named, *USUAL_HOMES):
            if text:
                home = Path(text)
                with contextlib.suppress(RuntimeError):  # "~" without a user: a folder like another
                    home = home.expanduser()
                if home not in seen:
                    seen.add(home)
                    yield home

    def folders(self) -> Iterator[Path]:
        """The folders that are searched for libraries, in order."""
        if self.given:
            yield from self.given
            return
        for home in self.homes():
            yield home / "lib64"
            yield home / f"{platform.machine()}-linux" / "lib64"

    def runtime(self) -> LoadedLibrary | None:
        """The library of the ACL runtime, loaded; None when there is none."""
        names = RUNTIME_NAMES
        if "torch_npu" in sys.modules and not self.given:
            # Use the very library that it has loaded.
            names = RUNTIME_NAMES[::-1]
            for name in names:
                found = self.open(name, os.RTLD_NOLOAD | os.RTLD_GLOBAL)
                if found is not None:
                    return found
        self._preload_driver()
        for folder in self.folders():
            for name in names:
                found = self.open_file(folder / name, os.RTLD_GLOBAL)
                if found is not None:
                    return found
        if self.given:
            return None
        return next(filter(None, (self.open(name, os.RTLD_GLOBAL) for name in names)), None)

    def meta(self, runtime: LoadedLibrary) -> LoadedLibrary | None:
        """libnnopbase.so from the folder of the runtime library."""
        return self._beside(runtime, META_NAME, os.RTLD_GLOBAL)

    def operators(self, runtime: LoadedLibrary) -> list[LoadedLibrary]:
        """Operator libraries in the order in which a symbol is looked for."""
        found = [self.open_file(path, 0) for path in self.custom_paths()]
        if not self.given:
            self._beside(runtime, "libopapi_math.so", os.RTLD_GLOBAL)
        for name in OPERATOR_NAMES:
            built_in = self._beside(runtime, name, 0)
            if built_in is not None:
                found.append(built_in)
                break
        return [library for library in found if library is not None]

    def custom_paths(self) -> Iterator[Path]:
        """libcust_opapi.so of each vendor, by priority; a vendor's operator overrides CANN's."""
        if self.given:
            yield from (folder / CUSTOM_NAME for folder in self.given)
            return
        for text in self.environ.get("ASCEND_CUSTOM_OPP_PATH", "").split(os.pathsep):
            if text.strip():
                yield Path(text.strip()) / "op_api" / "lib" / CUSTOM_NAME
        root = self.environ.get("ASCEND_OPP_PATH", "").strip()
        if root:
            vendors = Path(root) / "vendors"
            for vendor in self._priorities(vendors / "config.ini"):
                yield vendors / vendor / "op_api" / "lib" / CUSTOM_NAME

    def open_file(self, path: Path, mode: int) -> LoadedLibrary | None:
        """Load a file if it is there and no stranger can have written it."""
        found, outcome = None, "loaded"
        try:
            if "devlib" in path.parts:
                outcome = "not used: devlib holds stubs"
            else:
                with opened(path, self.environ, self._owners(path)) as file:
                    found = LoadedLibrary(str(path), _load(file, mode, str(path)))
        except Refused as refused:
            outcome = str(refused)
        except (OSError, RuntimeError, ValueError):  # a loop of links; a null byte
            outcome = "not there"
        self.tried.append((str(path), outcome))
        return found

    def _owners(self, path: Path) -> set[int]:
        """The owners of the CANN installations that the path lies in."""
        roots = self.given or [*self.homes(), *self._opp()]
        with_it = (root for root in roots if path.is_relative_to(root))
        owners = set()
        for root in with_it:
            with contextlib.suppress(OSError, ValueError):
                owners.add(os.stat(root).st_uid)
        return owners

    def _opp(self) -> list[Path]:
        text = self.environ.get("ASCEND_OPP_PATH", "").strip()
        return [Path(text)] if text else []

    def open(self, name: str, mode: int) -> LoadedLibrary | None:
        """Load by path or, without a slash, by the linker's rules, as far as those are safe."""
        if not mode & os.RTLD_NOLOAD and os.sep not in name:
            for folder in _linker_folders():
                if os.path.lexists(folder / name):
                    # What the linker would take: looked at like any other, or not taken at all.
                    return self.open_file(folder / name, mode)
        try:
            found = LoadedLibrary(name, ctypes.CDLL(name, mode=mode))
        except OSError as error:
            self.tried.append((name, str(error)))
            return None
        self.tried.append((name, "loaded"))
        return found

    def _beside(self, runtime: LoadedLibrary, name: str, mode: int) -> LoadedLibrary | None:
        if self.given:
            for folder in self.given:
                found = self.open_file(folder / name, mode)
                if found is not None:
                    return found
            return None
        found = None
        if os.sep in runtime.path:
            found = self.open_file(Path(runtime.path).parent / name, mode)
        return self.open(name, mode) if found is None else found

    def _preload_driver(self) -> None:
        # The runtime library needs it, and without a sourced environment the linker cannot see it.
        if self.given or self.open(DRIVER_NAME, os.RTLD_GLOBAL) is not None:
            return
        for part in ("", "common", "driver"):
            path = Path(DRIVER_FOLDER, part, DRIVER_NAME)
            if self.open_file(path, os.RTLD_GLOBAL) is not None:
                return

    def opp_path(self, runtime: LoadedLibrary) -> str | None:
        """The value that ASCEND_OPP_PATH must have; None when it is set or cannot be found out."""
        named = self.environ.get("ASCEND_OPP_PATH", "").strip()
        if self.given or named or os.sep not in runtime.path:
            return None
        for parent in list(Path(runtime.path).parents)[1:3]:
            if os.path.isdir(parent / "opp"):  # which never raises
                return str(parent / "opp")
        return None

    def _priorities(self, path: Path) -> list[str]:
        try:
            with opened(path, self.environ, self._owners(path)) as file:
                lines = os.read(file.handle, MAX_CONFIG).decode(errors="replace").splitlines()
        except Refused as refused:
            self.tried.append((str(path), str(refused)))
            return []
        except (OSError, ValueError):
            return []
        for line in lines:
            key, _, value = line.partition("=")
            if key.strip() == "load_priority":
                names = [name.strip() for name in value.split(",")]
                # Only the name of a folder next to the file: a path could lead elsewhere.
                return [n for n in names if n and os.sep not in n and n not in (".", "..")]
        return []


def _load(file: Opened, mode: int, name: str) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(file.loadable, mode=mode)
    except OSError as error:
        raise Refused(str(error).replace(file.loadable, name)) from error
    if not file.is_still_there():
        raise Refused("not used: it was exchanged while it was looked at")
    # The linker finds loaded libraries by path, so this path must keep meaning this file.
    file.keep = not file.stable
    return library


@functools.cache
def _linker_folders() -> tuple[Path, ...]:
    """The folders of LD_LIBRARY_PATH, as it was when the process began: the linker's."""
    try:
        pairs = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        pairs = []
    for pair in pairs:
        name, _, value = os.fsdecode(pair).partition("=")
        if name == "LD_LIBRARY_PATH" and value:
            return tuple(map(Path, re.split("[:;]", value)))  # "": the working folder
    return ()
