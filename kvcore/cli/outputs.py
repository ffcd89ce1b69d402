# SPDX-License-Identifier: Apache-2.0
"""Files that commands write."""

from __future__ import annotations

import os
from pathlib import Path

from kvcore.errors import fail

__all__ = ["refuse_unwritable"]


def refuse_unwritable(*paths: str | Path | None) -> None:
    """Refuse files that cannot be written, before the work is done that they are for."""
    for path in paths:
        if path is None or path == "-":
            continue
        target = Path(path)
        if not target.parent.is_dir():
            fail(str(path), "a file in a folder that is there", f"no folder {target.parent}")
        if target.is_dir():
            fail(str(path), "a file", "a folder")
        if not os.access(target if target.exists() else target.parent, os.W_OK):
            fail(str(path), "a file that can be written", "no permission")
