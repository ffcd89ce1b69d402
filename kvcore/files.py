# SPDX-License-Identifier: Apache-2.0
"""Files that are written whole or not at all, and files that are read no further than a bound.

A new file is written without a name (Linux' ``O_TMPFILE``) and gets its name when all of it is on
the disk, so a full disk, a failure or the end of the process leaves neither half a file nor a file
under another name, and the file that was there stays as it was.  Where the file system has no
nameless files, the new one is called ``.<random>.part`` meanwhile and is removed when writing
fails.  What is no ordinary file (``/dev/stdout``, a pipe) cannot be replaced and is written
directly.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from secrets import token_hex
from typing import IO, Any, Literal

from kvcore.errors import fail

__all__ = ["read_bounded", "whole_file", "write_whole"]

Path = str | os.PathLike[str]


def write_whole(path: Path, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all.  Raises OSError with the file's name."""
    with whole_file(path) as file:
        file.write(text)


@contextmanager
def whole_file(path: Path, mode: Literal["w", "wb"] = "w") -> Iterator[IO[Any]]:
    """``with whole_file(path) as file:`` replaces the file when the block has ended well.

    mode: "w" for UTF-8 text, "wb" for bytes.
    A link is followed, and permissions of a file that is replaced are kept.
    Raises OSError that carries ``path`` as its file name, whatever failed.
    """
    name = os.fspath(path)
    encoding = None if "b" in mode else "utf-8"
    target = os.path.realpath(name)
    with _named(name):
        before = _mode_of(target)
        if before is not None and (not stat.S_ISREG(before) or _is_open_already(name)):
            # (appending: what standard output was redirected to may hold something)
            with open(name, "ab" if mode == "wb" else "a", encoding=encoding) as file:
                yield file
            return
        if before is not None and not os.access(target, os.W_OK):
            raise PermissionError(13, "Permission denied", name)
        folder = os.path.dirname(target)
        part = os.path.join(folder, f".{token_hex(8)}.part")
        handle, nameless = _new(folder, part)
        try:
            with open(handle, mode, encoding=encoding) as file:
                yield file
                file.flush()
                if before is not None:
                    os.fchmod(handle, stat.S_IMODE(before))
                # Some file systems tell only now that the disk is full.
                os.fsync(handle)
                if nameless:
                    _give_name(handle, folder, part)
            os.replace(part, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise


def _mode_of(target: str) -> int | None:
    try:
        return os.stat(target).st_mode
    except FileNotFoundError:
        return None


def _is_open_already(name: str) -> bool:
    """Whether the name stands for an open descriptor: /dev/stdout, /dev/fd/3, a link to one."""
    for _ in range(40):  # as many links as Linux follows
        folder = os.path.realpath(os.path.dirname(os.path.abspath(name)))
        if folder == "/dev" or folder.startswith("/proc/"):
            return True
        if not os.path.islink(name):
            return False
        name = os.path.join(folder, os.readlink(name))
    return False


def _new(folder: str, part: str) -> tuple[int, bool]:
    """A descriptor of a new file, and whether it has no name."""
    with suppress(OSError):
        handle = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        if os.path.exists(f"/proc/self/fd/{handle}"):  # through which it gets one
            return handle, True
        os.close(handle)
    return os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666), False


def _give_name(handle: int, folder: str, part: str) -> None:
    # With a descriptor of a folder Python calls linkat, which follows the link in /proc.
    parent = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(
            f"/proc/self/fd/{handle}", os.path.basename(part),
            src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=True,
        )  # fmt: skip
    finally:
        os.close(parent)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Errors of writing carry no file name or that of the part: give them the file's own."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.strerror is None or _is_of_another(error, name):
            raise
        raise OSError(error.errno, error.strerror, name) from error


def _is_of_another(error: OSError, name: str) -> bool:
    # The block that writes may have read a file of its own, whose error is not ours to rename.
    seen = error.filename
    if not isinstance(seen, str) or seen.startswith("/proc/self/fd/") or seen.endswith(".part"):
        return False
    return os.path.realpath(seen) not in (
        os.path.realpath(name),
        os.path.dirname(os.path.realpath(name)),
    )


def read_bounded(path: Path, most: int, what: str = "a file") -> bytes:
    """All bytes of a file.

    most: its largest size in bytes; a device without end is not read further either.
    Raises ParamInvalidError that names the file when there is more, OSError when it cannot be read.
    """
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        fail(os.fspath(path), f"{what} of at most {most} bytes", "more")
    return data
