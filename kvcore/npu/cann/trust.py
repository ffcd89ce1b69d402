# SPDX-License-Identifier: Apache-2.0
"""Which files may be loaded into this process: those that no stranger can have written.

A library runs with the rights of the user who loads it.  So a file that everybody may write is
refused, one below a folder in which everybody may exchange it (a folder that all may write, but for
``/tmp`` and its like, whose sticky bit keeps others' files), and one that belongs to anybody but
root, this user or the owner of the CANN it is part of.

What is looked at is what is loaded: the file is opened first, its owner and permissions are those
of the descriptor, and behind loading the path must still lead to it.  Where a folder on the way
belongs to another user, who could exchange the file meanwhile, it is loaded through the descriptor,
by a path in ``/proc`` (else not: a library that looks for others in its own folder would not find
them).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["TRUST", "Opened", "Refused", "opened"]

#: The variable that names trusted files and folders, separated by colons.
TRUST = "KVCORE_ACLNN_TRUST"


class Refused(Exception):
    """Why a file is not used."""


@dataclass(slots=True)
class Opened:
    """A file that may be loaded.

    handle: its descriptor; path: its real path; stable: no stranger can exchange it.
    keep:   set to True to leave the descriptor open for the life of the process.
    """

    handle: int
    path: Path
    stable: bool
    keep: bool = False

    @property
    def loadable(self) -> str:
        """The path to load it by, while ``handle`` is open."""
        return str(self.path) if self.stable else f"/proc/self/fd/{self.handle}"

    def is_still_there(self) -> bool:
        """Whether the real path leads to the very file that was looked at."""
        try:
            return not self.stable or os.path.samestat(os.fstat(self.handle), os.stat(self.path))
        except OSError:
            return False


@contextmanager
def opened(
    path: Path, environ: Mapping[str, str], owners: Collection[int] = ()
) -> Iterator[Opened]:
    """Open a file that may be loaded.

    owners: user ids that count as one's own, besides root's.
    Raises Refused with the reason, OSError or ValueError when there is no such file.
    """
    if not path.is_absolute():
        raise Refused("not used: a relative path")
    # Links first: what is opened then is no link, nor can it become one unseen.
    real = Path(os.path.realpath(path, strict=True))
    # Opening a pipe for reading would wait for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
    try:
        handle = os.open(real, flags)
    except PermissionError:
        raise Refused("not used: it cannot be read") from None
    file = Opened(handle, real, stable=True)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise Refused("not a file")
        if not _is_trusted(path, real, environ):
            own = {0, os.getuid(), *owners}
            _refuse(real, found, own)
            folders = dict.fromkeys((*path.parents, *real.parents))
            stable = [_look_at_folder(folder, own) for folder in folders]  # every one of them
            file.stable = all(stable)
        yield file
    finally:
        if not file.keep:
            os.close(handle)


def _is_trusted(path: Path, real: Path, environ: Mapping[str, str]) -> bool:
    named = [Path(text) for text in environ.get(TRUST, "").split(os.pathsep) if text.strip()]
    return any(
        trusted.is_absolute()
        and (path.is_relative_to(trusted) or real.is_relative_to(os.path.realpath(trusted)))
        for trusted in named
    )


def _refuse(real: Path, found: os.stat_result, own: Collection[int]) -> None:
    if found.st_mode & stat.S_IWOTH:
        raise Refused(_advice(f"everybody may write {real}", real))
    if found.st_uid not in own:
        raise Refused(_advice("it belongs to another user", real))


def _look_at_folder(folder: Path, own: Collection[int]) -> bool:
    """Whether no other user can exchange what is in it.  Raises Refused when every user can."""
    handle = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
    finally:
        os.close(handle)
    sticky = bool(found.st_mode & stat.S_ISVTX)
    if found.st_mode & stat.S_IWOTH and not sticky:
        raise Refused(_advice(f"everybody may write {folder}", folder))
    return found.st_uid in own


def _advice(reason: str, path: Path) -> str:
    return f"not used: {reason}; {TRUST}={path} allows it"
