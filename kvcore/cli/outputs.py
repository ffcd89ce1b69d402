# SPDX-License-Identifier: Apache-2.0
"""Files that commands write."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvcore.cli.printing import say
from kvcore.errors import fail
from kvcore.files import write_whole

__all__ = ["refuse_shared", "refuse_unwritable", "refuse_unwritable_folder", "write_json"]


def refuse_unwritable(*paths: str | Path | None, reads: Iterable[str | Path | None] = ()) -> None:
    """Refuse files that cannot be written, before the work is done that they are for.

    Nor may one be a regular file that the command reads (``reads``), or that it writes already:
    the second would take the place of the first.  Links are followed, and a hard link is the same
    file.
    """
    written = [Path(path) for path in paths if path is not None and path != "-"]
    for target in written:
        if not target.parent.is_dir():
            fail(str(target), "a file in a folder that is there", f"no folder {target.parent}")
        if target.is_dir():
            fail(str(target), "a file", "a folder")
        # A file is replaced as a whole, so its folder must take the new one.
        needed = [target] if target.exists() else [target.parent]
        if target.is_file():
            needed.append(Path(os.path.realpath(target)).parent)
        if not all(os.access(each, os.W_OK) for each in needed):
            fail(str(target), "a file that can be written", "no permission")
    refuse_shared(written, reads)


def refuse_shared(paths: Iterable[Path], reads: Iterable[str | Path | None]) -> None:
    """Refuse a file to be written that is among ``reads`` or comes twice; devices may."""
    taken: set[object] = set()
    for each in reads:
        if each is not None and each != "-":
            taken |= _identity(Path(each))
    for path in paths:
        if path.exists() and not path.is_file():
            continue
        own = _identity(path)
        if taken & own:
            fail(str(path), "a file of its own", "one that this command reads or writes too")
        taken |= own


def _identity(path: Path) -> set[object]:
    """Two names that have one of these in common are one file, there already or to be made."""
    found: set[object] = {os.path.realpath(path)}
    try:
        status = path.stat()
    except OSError:  # it is not there, or its folder cannot be read
        return found
    return found | {(status.st_dev, status.st_ino)}


def refuse_unwritable_folder(path: str | Path) -> None:
    """Refuse a folder that cannot be made, or cannot take files.  Raises OSError as well."""
    target = Path(path).absolute()
    while not _is_there(target):
        target = target.parent
    if not target.is_dir():
        fail(str(path), "a folder", f"{target}, which is none")
    if not os.access(target, os.W_OK | os.X_OK):
        fail(str(path), "a folder that can be written", f"no permission in {target}")


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def write_json(path: str, figures: dict[str, Any]) -> None:
    """Print the figures for "-", else write them to the file, whole or not at all."""
    text = json.dumps(figures, indent=2)
    if path == "-":
        say(text, lines=True)
    else:
        write_whole(path, text + "\n")
