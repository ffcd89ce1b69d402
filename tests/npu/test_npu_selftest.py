# SPDX-License-Identifier: Apache-2.0
"""The self test: on the double it passes, and without a CANN it says why it cannot run."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from double.direct import Double
from npu_fixtures import machine as machine

from kvcore.errors import ParamInvalidError
from kvcore.npu import selftest
from kvcore.npu.call import launch, scatter
from kvcore.npu.cann import library


def test_it_passes(machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest.main([]) == selftest.OK
    said = capsys.readouterr().out
    assert f"soc: {machine}" in said
    assert "usable: yes" in said
    assert "PASS    ScatterPaKvCache, Nct" in said
    assert "0 FAIL, 0 MISSING" in said


def test_it_says_what_differs(
    machine: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = scatter.ScatterCall.phase_one

    def mutant(self: scatter.ScatterCall, *given: object) -> list[object]:
        words = original(self, *given)  # type: ignore[arg-type]
        words[0], words[3] = words[3], words[0]  # the value for the key
        return words

    monkeypatch.setattr(scatter.ScatterCall, "phase_one", mutant)
    assert selftest.main(["--only", "Nct"]) == selftest.DIFFERS
    said = capsys.readouterr().out
    assert "FAIL    ScatterPaKvCache, Nct: key_cache differs in " in said
    assert "0 PASS, 1 FAIL" in said


def test_it_says_what_is_refused(
    machine: str, double: Double, capsys: pytest.CaptureFixture[str]
) -> None:
    double.fail("aclnnGatherPaKvCacheGetWorkspaceSize", 1, 561003)
    assert selftest.main(["--only", "GatherPaKvCache, Norm"]) == selftest.DIFFERS
    said = capsys.readouterr().out
    assert "FAIL    GatherPaKvCache, Norm: BackendUnavailableError: aclnnGather" in said


def test_it_cannot_run_without_cann(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCORE_ACLNN_LIBRARY_PATH", "/nowhere")
    library.forget()
    assert selftest.main([]) == selftest.CANNOT_RUN
    assert "CANNOT RUN: no CANN runtime library found" in capsys.readouterr().out
    library.forget()


@pytest.mark.parametrize("device", ["1", "-1", str(2**32), str(10**20)])
def test_there_is_no_such_device(
    machine: str, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    assert selftest.main(["--device", device]) == selftest.CANNOT_RUN
    said = capsys.readouterr().out
    assert f"CANNOT RUN: --device: expected a device from 0 to 0, got {device}" in said
    with pytest.raises(ParamInvalidError, match="device"):
        library.current().set_device(int(device))


def test_a_case_whose_end_is_refused_leaves_nothing(
    machine: str, double: Double, capsys: pytest.CaptureFixture[str]
) -> None:
    double.fail("aclrtSynchronizeDevice", 0, 507000)
    assert selftest.main(["--only", "GatherPaKvCache, Norm"]) == selftest.DIFFERS
    double.runtime.kvdouble_fail_never()
    assert "0 PASS, 1 FAIL" in capsys.readouterr().out
    library.current().aclrtSynchronizeDevice()
    launch.release(None, 0)
    assert double.live("device_memory") == 0, double.live_text()


def test_what_a_fault_or_a_signal_ends_it_with(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """1 is for what does not agree, and for nothing else."""

    def end(error: BaseException) -> Callable[[], int]:
        def main() -> int:
            raise error

        return main

    out = os.dup(1)
    try:
        for error, code, words in (
            (KeyboardInterrupt(), 130, "kvcore: interrupted\n"),
            (BrokenPipeError(), 141, ""),
            (OSError(28, "No space left"), 2, "kvcore: standard output: No space left\n"),
        ):
            monkeypatch.setattr(selftest, "main", end(error))
            assert selftest._status() == code
            os.dup2(out, 1)
            assert capfd.readouterr().err == words
        monkeypatch.setattr(selftest, "main", end(LookupError("x")))
        assert selftest._status() == 70
        assert "Traceback" in capfd.readouterr().err
        monkeypatch.setattr(selftest, "main", lambda: 1)
        assert selftest._status() == 1
    finally:
        os.close(out)


def test_nothing_it_prints_is_a_command_to_a_terminal() -> None:
    assert selftest._printable("a\\b \x1b[2J é\n") == "a\\b \\x1b[2J \\xe9\\n"
