# SPDX-License-Identifier: Apache-2.0
"""Which libraries are loaded, and which are not since a stranger may have written them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from small_libraries import build

from kvcore.npu.cann import library, search, trust
from kvcore.npu.cann.search import SETTINGS, Search
from kvcore.npu.cann.trust import TRUST

ROOT_ONLY = pytest.mark.skipif(os.getuid() != 0, reason="only root may give a file away")
STRANGER = 12345


@pytest.fixture(autouse=True)
def no_cann(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    library.forget()
    yield
    library.forget()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A CANN's tree with a runtime library in it."""
    path = tmp_path / "tree" / "cann"
    build(path / "lib64" / "libacl_rt.so")
    return path


def outcome(home: Path, **environ: str) -> tuple[bool, str]:
    """Whether the runtime library of a home is loaded, and what is said of it."""
    found = Search({"ASCEND_HOME_PATH": str(home), **environ})
    file = home / "lib64" / "libacl_rt.so"
    loaded = found.open_file(file, 0)
    (told,) = [what for path, what in found.tried if path == str(file)]
    assert (loaded is not None) == (told == "loaded")
    return loaded is not None, told


def all_may_write(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o002)


#: What is made writable for all, from the home.
WRITABLE: dict[str, Callable[[Path], Path]] = {
    "the file": lambda home: home / "lib64" / "libacl_rt.so",
    "its folder": lambda home: home / "lib64",
    "the home": lambda home: home,
    "a folder above": lambda home: home.parent,
}


@pytest.mark.parametrize("what", WRITABLE)
def test_what_everybody_may_write(home: Path, what: str) -> None:
    path = WRITABLE[what](home)
    assert outcome(home) == (True, "loaded")
    all_may_write(path)
    told = f"not used: everybody may write {path}; {TRUST}={path} allows it"
    assert outcome(home) == (False, told)
    assert outcome(home, **{TRUST: str(path)}) == (True, "loaded")
    assert outcome(home, **{TRUST: f"/elsewhere:{path}/"}) == (True, "loaded")
    for other in ("/elsewhere", "", ".", path.name, str(path) + "x"):
        assert outcome(home, **{TRUST: other}) == (False, told)


@pytest.mark.parametrize("what", ["its folder", "the home", "a folder above"])
def test_a_sticky_folder_is_no_fault(home: Path, what: str) -> None:
    path = WRITABLE[what](home)
    path.chmod(0o1777)
    assert outcome(home) == (True, "loaded")


def test_a_group_may_write(home: Path) -> None:
    for find in WRITABLE.values():
        find(home).chmod(0o775)
    assert outcome(home) == (True, "loaded")


@ROOT_ONLY
def test_files_of_others(home: Path) -> None:
    file = home / "lib64" / "libacl_rt.so"
    os.chown(file, STRANGER, STRANGER)
    told = f"not used: it belongs to another user; {TRUST}={file} allows it"
    assert outcome(home) == (False, told)
    assert outcome(home, **{TRUST: str(file)}) == (True, "loaded")
    os.chown(home / "lib64", STRANGER, STRANGER)  # a folder of the stranger does not help
    assert outcome(home) == (False, told)
    os.chown(home, STRANGER, STRANGER)  # whoever owns the tree has installed it
    assert outcome(home) == (True, "loaded")
    os.chown(file, STRANGER + 1, STRANGER)
    assert outcome(home) == (False, told)


@ROOT_ONLY
def test_a_folder_of_another_is_no_way_to_exchange_the_file(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is loaded is what was looked at, though the file's name leads elsewhere by then."""
    file = home / "lib64" / "libacl_rt.so"
    other = build(home.parent / "other.so", MARKER="2")
    os.chown(home / "lib64", STRANGER, STRANGER)
    real = ctypes.CDLL

    def exchanged(path: str, mode: int) -> ctypes.CDLL:
        os.replace(other, file)
        return real(path, mode=mode)

    monkeypatch.setattr(search.ctypes, "CDLL", exchanged)
    found = Search({"ASCEND_HOME_PATH": str(home)}).open_file(file, 0)
    assert found is not None
    assert found.handle.marker() == 1


def test_an_exchange_by_oneself_is_noticed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = home / "lib64" / "libacl_rt.so"
    other = build(home.parent / "other.so", MARKER="2")
    real = ctypes.CDLL

    def exchanged(path: str, mode: int) -> ctypes.CDLL:
        os.replace(other, file)
        return real(path, mode=mode)

    monkeypatch.setattr(search.ctypes, "CDLL", exchanged)
    assert outcome(home) == (False, "not used: it was exchanged while it was looked at")


def test_no_descriptor_is_left(home: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    outcome(home)
    all_may_write(home)
    outcome(home)
    outcome(home / "none") if (home / "none").exists() else None
    assert len(os.listdir("/proc/self/fd")) == before


def test_links_count_as_what_they_lead_to(home: Path, tmp_path: Path) -> None:
    link = tmp_path / "latest"
    link.symlink_to(home)
    assert outcome(link) == (True, "loaded")
    all_may_write(home.parent)
    loaded, told = outcome(link)
    assert not loaded
    assert told.endswith(f"{TRUST}={home.parent} allows it")
    assert outcome(link, **{TRUST: str(link)}) == (True, "loaded")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["libacl_rt.so", "vendors/config.ini"])
def test_a_pipe_stops_nobody(tmp_path: Path, name: str) -> None:
    pipe = tmp_path / name
    pipe.parent.mkdir(exist_ok=True)
    os.mkfifo(pipe)
    found = Search({"ASCEND_OPP_PATH": str(tmp_path)})
    assert found.open_file(pipe, 0) is None
    assert list(found.custom_paths()) == []
    assert (str(pipe), "not a file") in found.tried


def test_vendors_are_names_and_no_paths(tmp_path: Path) -> None:
    vendors = tmp_path / "vendors"
    vendors.mkdir()
    config = vendors / "config.ini"
    config.write_text("load_priority=../../elsewhere,/elsewhere,..,.,good\n")
    found = Search({"ASCEND_OPP_PATH": str(tmp_path)})
    assert list(found.custom_paths()) == [vendors / "good/op_api/lib/libcust_opapi.so"]
    all_may_write(config)
    assert list(found.custom_paths()) == []
    assert found.tried[-1][1].startswith(f"not used: everybody may write {config}; {TRUST}=")


@pytest.mark.parametrize(
    "name", ["KVCORE_ACLNN_LIBRARY_PATH", "ASCEND_HOME_PATH", "ASCEND_CUSTOM_OPP_PATH"]
)
def test_nothing_relative_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for folder in ("", "lib64", "op_api/lib"):
        for file in ("libacl_rt.so", "libcust_opapi.so", "libopapi.so"):
            build(tmp_path / folder / file)
    monkeypatch.chdir(tmp_path)
    for text in (".", "./", "../" + tmp_path.name):
        found = Search({name: text})
        paths = [folder / "libacl_rt.so" for folder in found.folders()]
        for path in [*paths, *found.custom_paths()]:
            if not path.is_absolute():
                assert found.open_file(path, 0) is None
                assert found.tried[-1] == (str(path), "not used: a relative path")


@pytest.mark.parametrize("listed", ["", ".", "lib", "/nowhere::/nothing", "/nowhere:lib"])
def test_the_linker_loads_nothing_relative_either(tmp_path: Path, listed: str) -> None:
    for folder in ("", "lib"):
        build(tmp_path / folder / "libacl_rt.so")
    program = (
        "from kvcore.npu.cann.search import Search\n"
        "found = Search({})\n"
        "print(found.open('libacl_rt.so', 0) is None, found.tried[-1][1])"
    )
    environ = {**os.environ, "LD_LIBRARY_PATH": listed}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, check=True, cwd=tmp_path, env=environ,
    )  # fmt: skip
    told = "not used: a relative path" if listed else "libacl_rt.so: cannot open shared object file"
    assert done.stdout.startswith(f"True {told}")
    environ["LD_LIBRARY_PATH"] = str(tmp_path / "lib")
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, check=True, cwd=tmp_path, env=environ,
    )  # fmt: skip
    assert done.stdout == "False loaded\n"


def test_a_refusal_is_part_of_the_reason(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    all_may_write(home)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(home))
    reason = library.why_not()
    assert reason is not None
    assert f"{home / 'lib64' / 'libacl_rt.so'}: not used: everybody may write {home}" in reason
    monkeypatch.setenv(TRUST, str(home))
    assert library.current().device_count() == 1
    assert trust.TRUST in SETTINGS
