# SPDX-License-Identifier: Apache-2.0
"""Checks that a wheel holds what runs and nothing else: ``python .ci/check_wheel.py WHEEL``."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path, PurePosixPath

ALLOWED = {".py", ".pyi", ".so", ".typed"}


def main(wheel: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [PurePosixPath(name) for name in archive.namelist()]
    inside = [name for name in names if name.parts[0] == "kvcore"]
    outside = {name.parts[0] for name in names} - {"kvcore"}
    wrong = [str(name) for name in inside if name.suffix not in ALLOWED]
    wrong += [name for name in outside if not name.endswith(".dist-info")]
    sources = {path.with_suffix("") for path in Path("kvcore").rglob("*.pyx")}
    compiled = {name.parent / name.name.split(".")[0] for name in inside if name.suffix == ".so"}
    wrong += [f"{path} is not compiled" for path in sources if PurePosixPath(path) not in compiled]
    wrong += [
        f"{path} is absent"
        for path in Path("kvcore").rglob("*.py*")
        if path.suffix in (".py", ".pyi") and PurePosixPath(path) not in inside
    ]
    if PurePosixPath("kvcore/py.typed") not in inside:
        wrong.append("py.typed is absent")
    if wrong:
        sys.exit(f"{wheel}:\n  " + "\n  ".join(sorted(wrong)))
    print(f"{Path(wheel).name}: {Path(wheel).stat().st_size // 1024} KiB, {len(inside)} files")


if __name__ == "__main__":
    main(sys.argv[1])
