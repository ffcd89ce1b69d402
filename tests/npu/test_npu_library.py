# SPDX-License-Identifier: Apache-2.0
"""Finding, loading and calling CANN's libraries."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_libraries import build

import kvcore
from kvcore.errors import (
    BackendUnavailableError,
    CaptureError,
    DeviceOutOfMemoryError,
    KVCoreError,
    ParamInvalidError,
    ParamNullError,
    StreamError,
)
from kvcore.npu.cann import library, prototypes, status, structs
from kvcore.npu.cann.search import SETTINGS, Search


@pytest.fixture(autouse=True)
def no_cann(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    library.forget()
    yield
    library.forget()


def use(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("KVCORE_ACLNN_LIBRARY_PATH", str(folder))


# ---------------------------------------------------------------- the tables


def test_structures_have_the_sizes_of_the_headers() -> None:
    sizes = {
        structs.MallocAttribute: 12,
        structs.MallocConfig: 16,
        structs.MemLocation: 8,
        structs.PtrAttributes: 28,
        structs.MemcpyBatchAttr: 32,
    }
    assert {kind: ctypes.sizeof(kind) for kind in sizes} == sizes
    assert structs.MallocAttribute.value.offset == 4


def test_every_prototype_can_be_read() -> None:
    for table in (prototypes.RUNTIME, prototypes.META, prototypes.OPERATORS):
        for name in table:
            result, arguments, is_status = prototypes.argument_types(name)
            assert is_status == (table[name][0] == "s")
            assert all(argument is not None for argument in arguments)
            # 64-bit handles must not come back as C ints
            if not is_status:
                assert ctypes.sizeof(result) == 8


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (161001, ParamNullError),
        (161002, ParamInvalidError),
        (561002, ParamInvalidError),
        (207001, DeviceOutOfMemoryError),
        (107002, StreamError),
        (107003, StreamError),
        (107030, CaptureError),
        (507015, StreamError),
        (507777, StreamError),
        (561003, BackendUnavailableError),
        (100001, BackendUnavailableError),
        (561103, KVCoreError),
        (31415, KVCoreError),
    ],
)
def test_statuses_are_typed(code: int, kind: type[KVCoreError]) -> None:
    error = status.error(code, "aclrtX", "EZ9999: why")
    assert type(error) is kind
    assert error.code == error.seen == code
    assert str(error).startswith(f"aclrtX: expected status 0, got {code} (")
    assert str(error).endswith("): EZ9999: why")


def test_every_status_has_a_class_and_words() -> None:
    for code, (kind, text) in status.MEANINGS.items():
        assert issubclass(kind, KVCoreError)
        assert text
        assert type(status.error(code, "f")) is kind
    assert status.is_sticky(507015)
    assert not status.is_sticky(507046)
    assert not status.is_sticky(107000)


# ---------------------------------------------------------------- not usable


def test_without_cann_the_reason_names_where_it_was_looked_for() -> None:
    reason = kvcore.backends.why_not("aclnn")
    assert reason is not None
    assert "no CANN runtime library found" in reason
    assert "/usr/local/Ascend/ascend-toolkit/latest" in reason
    assert "ASCEND_HOME_PATH" in reason
    with pytest.raises(BackendUnavailableError, match="no CANN runtime library"):
        library.current()


def test_only_the_given_folders_are_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, tmp_path)
    monkeypatch.setenv("ASCEND_HOME_PATH", "/elsewhere")
    assert library.why_not() == (
        f"no CANN runtime library found: looked in {tmp_path} (KVCORE_ACLNN_LIBRARY_PATH)"
    )
    search = library.last_search()
    assert search is not None
    assert {Path(path).parent for path, _ in search.tried} == {tmp_path}


def test_a_new_setting_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.why_not() is not None
    build(tmp_path / "libacl_rt.so")
    use(monkeypatch, tmp_path)
    assert library.current().device_count() == 1


@pytest.mark.parametrize(
    ("defines", "reason"),
    [
        ({"STATUS": "100039"}, "a stub library (devlib) is loaded"),
        ({"COUNT_STATUS": "100039"}, "a stub library (devlib) is loaded"),
        ({"STATUS": "507899"}, "internal error of the driver"),
        ({"DEVICES": "0"}, "no device"),
        ({"COUNT_STATUS": "207004"}, "no device"),
        ({"SOC": '"Ascend910B"'}, "SoC 'Ascend910B' is not supported"),
        ({"SOC": '"Ascend310P3"'}, "SoC 'Ascend310P3' is not supported"),
        ({"SOC": '"Ascend350_354f"'}, "SoC 'Ascend350_354f' is not supported"),
        ({"SOC": "NULL"}, "SoC '' is not supported"),
        ({}, "no operator library"),
    ],
)
def test_what_is_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defines: dict[str, str], reason: str
) -> None:
    build(tmp_path / "libascendcl.so", **defines)
    use(monkeypatch, tmp_path)
    seen = library.why_not()
    assert seen is not None
    assert reason in seen
    assert kvcore.info()["backends"]["aclnn"] == seen
    assert "aclnn" not in kvcore.backends.available()


def test_a_file_that_is_no_library_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "cann"
    (home / "lib64").mkdir(parents=True)
    (home / "lib64" / "libacl_rt.so").write_text("not ELF")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(home))
    assert str(home / "lib64" / "libacl_rt.so") in str(library.why_not())


@pytest.mark.parametrize("what", ["text", "folder", "another user's"])
def test_why_a_given_file_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    path = tmp_path / "libascendcl.so"
    if what == "folder":
        path.mkdir()
    else:
        path.write_text("x")
    if what == "another user's":
        if os.getuid() != 0:
            pytest.skip("only root may give a file away")
        os.chown(path, 12345, 12345)
    use(monkeypatch, tmp_path)
    reason = library.why_not()
    advice = f"belongs to another user; KVCORE_ACLNN_TRUST={path} allows it"
    said = {"text": "file too short", "folder": "not a file"}.get(what, advice)
    assert reason is not None
    assert f"looked in {tmp_path} (KVCORE_ACLNN_LIBRARY_PATH); {path}: " in reason
    assert reason.endswith(said)
    assert reason.count(f"{path}: ") == 1
    assert kvcore.info()["backends"]["aclnn"] == reason


def test_devlib_is_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / "devlib" / "libacl_rt.so")
    use(monkeypatch, tmp_path / "devlib")
    assert "no CANN runtime library" in str(library.why_not())


# ---------------------------------------------------------------- the search


def test_homes_and_folders_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search({"ASCEND_HOME_PATH": "/a", "ASCEND_TOOLKIT_HOME": "/a"})
    homes = [str(home) for home in search.homes()]
    assert homes[:3] == [
        "/a",
        "/usr/local/Ascend/cann",
        "/usr/local/Ascend/ascend-toolkit/latest",
    ]
    folders = [str(folder) for folder in search.folders()]
    assert folders[0] == "/a/lib64"
    assert folders[1].startswith("/a/")
    assert folders[1].endswith("-linux/lib64")


def test_custom_libraries_by_path_then_by_priority(tmp_path: Path) -> None:
    vendors = tmp_path / "opp" / "vendors"
    vendors.mkdir(parents=True)
    (vendors / "config.ini").write_text("load_priority=second, first\n")
    search = Search(
        {"ASCEND_CUSTOM_OPP_PATH": "/x/vendors/own:", "ASCEND_OPP_PATH": str(tmp_path / "opp")}
    )
    tail = "op_api/lib/libcust_opapi.so"
    assert [str(path) for path in search.custom_paths()] == [
        f"/x/vendors/own/{tail}",
        f"{vendors}/second/{tail}",
        f"{vendors}/first/{tail}",
    ]


def test_a_home_finds_its_operators_and_sets_the_path_of_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "cann"
    (home / "opp").mkdir(parents=True)
    build(home / "lib64" / "libascendcl.so")
    build(home / "lib64" / "libopapi.so", MARKER="2")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(home))
    monkeypatch.setenv("ASCEND_OPP_PATH", "")
    cann = library.current()
    assert cann.runtime.path == str(home / "lib64" / "libascendcl.so")
    assert [found.path for found in cann.operators()] == [str(home / "lib64" / "libopapi.so")]
    assert os.environ["ASCEND_OPP_PATH"] == str(home / "opp")


def test_the_split_library_goes_before_the_umbrella(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("libacl_rt.so", "libascendcl.so", "libopapi.so", "libopapi_transformer.so"):
        build(tmp_path / name)
    use(monkeypatch, tmp_path)
    cann = library.current()
    assert Path(cann.runtime.path).name == "libacl_rt.so"
    assert [Path(found.path).name for found in cann.operators()] == ["libopapi_transformer.so"]


# ---------------------------------------------------------------- functions


@pytest.fixture
def cann(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> library.Cann:
    build(tmp_path / "libacl_rt.so", TEXT='"EE1001: no\\xff memory "')
    use(monkeypatch, tmp_path)
    return library.current()


def test_a_status_raises_with_cann_s_text(cann: library.Cann) -> None:
    pointer = ctypes.c_void_p()
    assert cann.aclrtMalloc(ctypes.byref(pointer), 1, 0) == 0
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        cann.aclrtMalloc(ctypes.byref(pointer), 101, 0)
    assert caught.value.code == 207001
    assert str(caught.value) == (
        "aclrtMalloc: expected status 0, got 207001 (device memory is exhausted): "
        "EE1001: no\N{REPLACEMENT CHARACTER} memory"
    )
    assert cann.status("aclrtMalloc")(ctypes.byref(pointer), 101, 0) == 207001


def test_a_function_that_is_not_there(cann: library.Cann) -> None:
    assert not cann.has("aclmdlRICaptureBegin")
    with pytest.raises(BackendUnavailableError, match=r"aclmdlRICaptureBegin is not in this CANN"):
        cann.aclmdlRICaptureBegin(None, 0)
    with pytest.raises(BackendUnavailableError, match=r"aclrtFree is not in this CANN \(.*acl_rt"):
        cann.status("aclrtFree")
    with pytest.raises(AttributeError, match="kvcore knows no function 'aclrtOfTheFuture'"):
        cann.aclrtOfTheFuture()


def test_the_soc(cann: library.Cann) -> None:
    assert cann.soc_name() == "Ascend910B1"
    assert cann.soc() is kvcore.soc.A2
    assert cann.arch() is None


def test_a_forked_child_is_refused(cann: library.Cann) -> None:
    cann.pid += 1
    with pytest.raises(BackendUnavailableError, match="does not survive a fork"):
        library.current()


def test_importing_kvcore_loads_none_of_it() -> None:
    code = "import sys, kvcore; print(*(n for n in sys.modules if n.startswith('kvcore.npu')))"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    what_the_registry_knows = {"kvcore.npu", "kvcore.npu.backend", "kvcore.npu.index_arguments"}
    assert set(seen.stdout.split()) == what_the_registry_knows
