# SPDX-License-Identifier: Apache-2.0
"""Checks that a wheel holds what runs and nothing else: ``python .ci/check_wheel.py WHEEL``."""

from __future__ import annotations

import sys
import tomllib
import zipfile
from pathlib import Path

SOURCES = {".pyx", ".pxd", ".h", ".c"}
GENERATED = {".so", ".pyc"}
# What pytest and torch load by themselves stands beside the package (pyproject.toml, py-modules).
MODULES = {"_kvcore_pytest.py", "_kvcore_torch.py"}
# The emulated machine: C sources, what they are compiled to, and a page for their readers.
MACHINE = Path("kvcore/emulator/cann")
NOT_SHIPPED = {MACHINE / "README.md"}


def main(wheel: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    kept = [p for p in Path("kvcore").rglob("*") if p.is_file() and p.suffix not in GENERATED]
    libraries = {
        f"kvcore/emulator/installation/{made['file']}"
        for made in tomllib.loads((MACHINE / "libraries.toml").read_text())["library"]
        if sys.platform == "linux"
    }
    shipped = {p for p in kept if p.suffix not in SOURCES} - NOT_SHIPPED
    wanted = {str(path) for path in shipped} | MODULES | libraries
    compiled = {str(path.with_suffix("")) for path in kept if path.suffix == ".pyx"}
    modules = {name for name in names if name.endswith(".so")} - libraries
    built = {name.partition(".")[0] for name in modules} - {"kvcore/_cython_shared"}
    wrong = [f"{name}: not in the wheel" for name in wanted - names]
    wrong += [f"{name}: has no place in a wheel" for name in names - wanted - modules]
    wrong += [f"{name}: not compiled" for name in compiled - built]
    wrong += [f"{name}: compiled from nothing" for name in built - compiled]
    if wrong:
        sys.exit(f"{wheel}:\n  " + "\n  ".join(sorted(wrong)))
    print(f"{Path(wheel).name}: {Path(wheel).stat().st_size // 1024} KiB, {len(names)} files")


if __name__ == "__main__":
    main(sys.argv[1])
