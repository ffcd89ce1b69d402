# SPDX-License-Identifier: Apache-2.0
"""The CANNs that a double can be: which libraries, symbols and devices there are."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from double import build
from double.direct import Double, load


def test_compiled_once(cann_folder: Path, cann: build.Installation) -> None:
    before = cann.runtime.stat().st_mtime_ns
    assert build.build(cann_folder) == cann
    assert cann.runtime.stat().st_mtime_ns == before


@pytest.mark.parametrize(("umbrella", "split"), [(True, False), (False, True)])
def test_one_set_of_libraries(cann_folder: Path, umbrella: bool, split: bool) -> None:
    installed = build.build(cann_folder, umbrella=umbrella, split=split, custom=False)
    names = {path.name for path in installed.lib.iterdir()}
    assert {"libascendcl.so", "libopapi.so"} <= names if umbrella else "libopapi.so" not in names
    assert ("libacl_rt.so" in names) == ("libopapi_transformer.so" in names) == split
    assert installed.custom is None
    double = Double(installed)
    double.start()
    double.free(double.malloc(64))
    assert not double.violations()


def test_symbols_are_where_they_belong(cann: build.Installation) -> None:
    runtime = load(cann.lib / "libascendcl.so")
    opapi = load(cann.opapi)
    custom = load(cann.custom)
    assert hasattr(runtime, "aclrtMalloc")
    assert not hasattr(runtime, "aclCreateTensor")
    assert hasattr(opapi, "aclCreateTensor")  # dlsym follows what it needs
    assert hasattr(opapi, "aclnnScatterPaCache")
    assert not hasattr(opapi, "aclnnGatherSelectionKvCache")
    assert hasattr(custom, "aclnnGatherSelectionKvCache")
    config = cann.home / "opp" / "vendors" / "config.ini"
    assert config.read_text() == "load_priority=customize\n"


def test_both_fronts_share_their_state(cann: build.Installation, double: Double) -> None:
    other = load(cann.lib / "libascendcl.so")
    assert other.aclInit(None) == 100002


def test_missing_symbols(cann_folder: Path) -> None:
    gone = ("aclFinalizeReference", "aclnnScatterPaCache")
    installed = build.build(cann_folder, missing=gone)
    double = Double(installed)
    assert not hasattr(double.runtime, gone[0])
    assert not hasattr(double.opapi, gone[1])
    assert hasattr(double.runtime, "aclFinalize")
    double.start()


def test_no_device_and_another_soc(cann_folder: Path) -> None:
    installed = build.build(cann_folder, soc="Ascend950PR_9599", devices=0)
    runtime = load(installed.runtime)
    runtime.aclrtGetSocName.restype = ctypes.c_char_p
    assert runtime.aclInit(None) == 0
    count = ctypes.c_uint32(5)
    assert runtime.aclrtGetDeviceCount(ctypes.byref(count)) == 207004
    assert count.value == 0
    assert runtime.aclrtSetDevice(0) == 207004
    runtime.kvdouble_devices(1)
    assert runtime.aclrtGetSocName() == b"Ascend950PR_9599"


def test_stub(cann_folder: Path) -> None:
    installed = build.build(cann_folder, stub=True)
    assert installed.lib.name == "devlib"
    runtime = load(installed.runtime)
    assert runtime.aclInit(None) == 100039
    assert runtime.aclrtSetDevice(0) == 100039
    runtime.aclrtGetSocName.restype = ctypes.c_char_p
    assert runtime.aclrtGetSocName() is None
    base = load(installed.lib / "libnnopbase.so")
    base.aclCreateTensor.restype = ctypes.c_void_p
    assert base.aclCreateTensor() is None
    assert load(installed.opapi).aclnnScatterPaKvCache() == 100039
