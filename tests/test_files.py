# SPDX-License-Identifier: Apache-2.0
"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcore import files
from kvcore.errors import ParamInvalidError
from kvcore.files import read_bounded, whole_file, write_whole

#: A file of a file system that has none without a name is called .part meanwhile.
NAMED = pytest.mark.parametrize("nameless", [True, False])


@pytest.fixture(autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "nameless" in request.fixturenames and not request.getfixturevalue("nameless"):
        monkeypatch.delattr(os, "O_TMPFILE")
        monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY, raising=False)


@NAMED
@pytest.mark.parametrize("before", [None, "what was there"])
def test_a_file_is_written(tmp_path: Path, nameless: bool, before: str | None) -> None:
    path = tmp_path / "é.json"
    if before is not None:
        path.write_text(before)
    write_whole(path, "né\n")
    assert path.read_bytes() == "né\n".encode()
    with whole_file(path, "wb") as file:
        file.write(b"\xff\x00")
        file.seek(0)
        file.write(b"\xfe")
    assert path.read_bytes() == b"\xfe\x00"
    assert os.listdir(tmp_path) == ["é.json"]


@NAMED
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("no"), OSError(28, "full")])
@pytest.mark.parametrize("before", [None, "what was there"])
def test_what_fails_leaves_nothing(
    tmp_path: Path, nameless: bool, error: BaseException, before: str | None
) -> None:
    path = tmp_path / "out"
    if before is not None:
        path.write_text(before)

    def write() -> None:
        with whole_file(path) as file:
            file.write("half")
            raise error

    with pytest.raises(type(error)) as caught:
        write()
    assert not isinstance(error, OSError) or caught.value.filename == str(path)
    assert os.listdir(tmp_path) == ([] if before is None else ["out"])
    assert before is None or path.read_text() == before


@NAMED
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failing_call_leaves_nothing(
    tmp_path: Path, nameless: bool, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "out"
    path.write_text("before")
    monkeypatch.setattr(files.os, call, fail)
    with pytest.raises(OSError, match="No space left") as caught:
        write_whole(path, "after")
    assert caught.value.filename == str(path)
    assert os.listdir(tmp_path) == ["out"]
    assert path.read_text() == "before"


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    """A limit on the size of files stands for it: writing fails in the middle."""
    program = (
        "import resource, signal, sys\n"
        "from kvcore.files import write_whole\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n    write_whole('out', 'x' * 100_000)\n"
        "except OSError as error:\n    print(error.filename, error.errno)\n"
    )
    (tmp_path / "out").write_text("before")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout == f"out {errno.EFBIG}\n"
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out").read_text() == "before"


def test_permissions_are_kept_and_new_files_follow_the_mask(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.touch()
    old.chmod(0o640)
    before = os.umask(0o027)
    try:
        write_whole(old, "x")
        write_whole(new, "x")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (old, new)] == [0o640, 0o640]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("before")
    link = tmp_path / "link"
    link.symlink_to("real")
    write_whole(link, "after")
    assert link.is_symlink()
    assert (tmp_path / "real").read_text() == "after"


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda path: path.mkdir(), IsADirectoryError),
        (lambda path: path.symlink_to(path.name), OSError),
        (lambda path: path.symlink_to("none/there"), FileNotFoundError),
    ],
)
def test_what_cannot_be_a_file(
    tmp_path: Path, make: Callable[[Path], None], kind: type[OSError]
) -> None:
    path = tmp_path / "out"
    make(path)
    with pytest.raises(kind) as caught:
        write_whole(path, "x")
    assert caught.value.filename == str(path)
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full, which is always full")
def test_a_device_is_written_directly() -> None:
    with pytest.raises(OSError, match="No space left") as caught:
        write_whole("/dev/full", "x")
    assert caught.value.filename == "/dev/full"
    write_whole("/dev/null", "x")


def test_a_pipe_is_written_directly(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(path.read_text()))
    reader.start()
    write_whole(path, "through")
    reader.join()
    assert read == ["through"]
    assert path.is_fifo()


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"])
def test_an_open_descriptor_is_no_file_to_replace(tmp_path: Path, name: str) -> None:
    """Standard output may be a file; it is not exchanged under the shell that has opened it."""
    (tmp_path / "link").symlink_to("/dev/stdout")
    program = f"from kvcore.files import write_whole; write_whole({name!r}, 'new')"
    path = tmp_path / "out"
    with path.open("w") as out:
        out.write("old, ")
        out.flush()
        inode = path.stat().st_ino
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True, cwd=tmp_path)
    assert path.stat().st_ino == inode
    assert path.read_text() == "old, new"


def test_reading_stops_at_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"1234")
    assert read_bounded(path, 4) == b"1234"
    with pytest.raises(ParamInvalidError, match="in: expected a file of at most 3 bytes, got more"):
        read_bounded(path, 3)
    with pytest.raises(ParamInvalidError, match="/dev/zero: expected a report of at most 9 bytes"):
        read_bounded("/dev/zero", 9, "a report")
