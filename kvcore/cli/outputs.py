# SPDX-License-Identifier: Apache-2.0
"""Files that commands write."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from kvcore.cli.printing import say
from kvcore.errors import fail
from kvcore.files import write_whole

__all__ = ["refuse_unwritable", "refuse_unwritable_folder", "write_json"]


def refuse_unwritable(*paths: str | Path | None, reads: tuple[str | Path | None, ...] = ()) -> None:
    """Refuse files that cannot be written, before the work is done that they are for.

    Nor may one be a regular file that the command reads (``reads``), or that it writes already:
    the second would take the place of the first.
    """
    taken = [Path(each) for each in reads if each is not None and each != "-"]
    for path in paths:
        if path is None or path == "-":
            continue
        target = Path(path)
        if not target.parent.is_dir():
            fail(str(path), "a file in a folder that is there", f"no folder {target.parent}")
        if target.is_dir():
            fail(str(path), "a file", "a folder")
        # A file is replaced as a whole, so its folder must take the new one.
        needed = [target] if target.exists() else [target.parent]
        if target.is_file():
            needed.append(Path(os.path.realpath(target)).parent)
        if not all(os.access(each, os.W_OK) for each in needed):
            fail(str(path), "a file that can be written", "no permission")
        if not target.exists() or target.is_file():
            place = os.path.realpath(target)
            if any(os.path.realpath(each) == place for each in taken):
                fail(str(path), "a file of its own", "one that this command reads or writes too")
            taken.append(target)


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
