# SPDX-License-Identifier: Apache-2.0
"""``kvcore emulate`` and ``pytest --kvcore-emulate``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from wheel import WHY_NOT, needs_wheel

from kvcore import cli
from kvcore.emulator import environment, installed

# Some of these processes import torch, some one below another.
pytestmark = pytest.mark.timeout(300)


def emulate(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ASCEND_", "KVCORE_EMULATE"))
    }
    return subprocess.run(
        [sys.executable, "-m", "kvcore", "emulate", *arguments],
        env={**clean, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )


def test_without_a_command_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["emulate", "--soc", "A2", "--devices", "2", "--memory", "512"])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "soc        A2 (Ascend910B3)"
    assert said[1] == "devices    2, 512 MiB each"
    assert f"cann       {installed.CANN_VERSION}, for which they stand" in said
    assert "tested     torch 2.13.0 with torch_npu 2.13.0" in said
    versions = installed.wheels()
    assert f"torch_npu  {versions.torch_npu or 'not installed'}" in said
    if versions.fault() is None:
        assert code == 0
        assert said[-1] == "start it with: kvcore emulate [options] -- COMMAND"
    else:
        assert code == 1
        assert said[-1] == f"missing    {versions.fault()}"


@pytest.mark.skipif(WHY_NOT is None, reason="the wheel is installed")
def test_without_the_wheel_no_command_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["emulate", "--", sys.executable, "-c", "print('ran')"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "torch_npu is not installed" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--soc", "A5"], "invalid choice: 'A5'"),
        (["--devices", "17"], "expected an integer from 1 to 16, got '17'"),
        (["--memory", "0"], "expected an integer from 1 to 1048576, got '0'"),
        (["--shell", "--", "ls"], "--shell prints the environment"),
        (["--chek", "off"], "unknown option --chek; did you mean --check?"),
    ],
)
def test_wrong_options(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert cli.main(["emulate", *arguments]) == 2
    assert said in capsys.readouterr().err


@needs_wheel
def test_a_command_runs_on_the_machine() -> None:
    text = (
        "import sys, torch, torch_npu; x = torch.ones(3).npu(); print(x.device, x.cpu());"
        "print(torch.npu.get_device_name(), torch.npu.device_count(), sys.argv[1:]);"
        "sys.exit(7)"
    )
    done = emulate(
        *("--soc", "A2", "--devices", "2", "--memory", "256", "--"),
        *(sys.executable, "-c", text, "--devices", "--", "x"),
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout.splitlines() == [
        "npu:0 tensor([1., 1., 1.])",
        "Ascend910B3 2 ['--devices', '--', 'x']",
    ]


@needs_wheel
def test_a_command_that_is_not_there() -> None:
    done = emulate("--", "no-such-command")
    assert done.returncode == 2
    assert done.stderr == "kvcore emulate: no-such-command: command not found\n"


@needs_wheel
def test_a_command_that_a_signal_ends() -> None:
    done = emulate("--", sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    assert done.returncode == 137


@needs_wheel
def test_the_environment_for_a_shell(tmp_path: Path) -> None:
    real = "/usr/local/Ascend/ascend-toolkit/latest"
    done = emulate("--soc", "950", "--shell", ATB_HOME_PATH="/opt/atb", ASCEND_HOME_PATH=real)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert "unset ATB_HOME_PATH" in lines
    assert f"export ASCEND_HOME_PATH={installed.HOME}" in lines
    assert "export KVCORE_EMULATE=950" in lines
    script = tmp_path / "script"
    script.write_text("\n".join([*lines, f'"{sys.executable}" -c "$1"\n']))
    text = "import torch; print(torch.npu.get_device_name())"
    ran = subprocess.run(["sh", script, text], capture_output=True, text=True, check=False)
    assert ran.stdout == "Ascend950PR_9599\n", ran.stderr


@needs_wheel
def test_a_real_cann_is_named() -> None:
    done = emulate(
        "--", sys.executable, "-c", "pass", ASCEND_TOOLKIT_HOME="/usr/local/Ascend/latest"
    )
    assert done.returncode == 0
    assert "ASCEND_TOOLKIT_HOME=/usr/local/Ascend/latest of an installed CANN is set aside" in (
        done.stderr
    )


# ---------------------------------------------------------------- pytest
TEST = """
import torch

def test_it():
    import conftest
    assert torch.npu.get_device_name() == "Ascend910B3"
    assert (conftest.x + 1).sum().item() == 6
"""


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ASCEND_", "KVCORE_EMULATE", "LD_LIBRARY_PATH", "PYTEST"))
    }
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, str(folder)],
        env=clean,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )


def suite(folder: Path) -> None:
    (folder / "conftest.py").write_text("import torch\nx = torch.ones(3, device='npu')\n")
    (folder / "test_it.py").write_text(TEST)


@needs_wheel
def test_a_suite_of_several_processes_whose_conftest_imports_torch(tmp_path: Path) -> None:
    """In one process: test_emulator_reports.py."""
    suite(tmp_path)
    done = run_pytest(tmp_path, "--kvcore-emulate=A2", "-n", "1")
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_an_unknown_soc_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n")
    done = run_pytest(tmp_path, "--kvcore-emulate=A5")
    assert done.returncode == 4
    assert "--kvcore-emulate: expected names among A2, A3, 950, got 'A5'" in done.stderr


@pytest.mark.skipif(WHY_NOT is None, reason="the wheel is installed")
def test_a_suite_without_the_wheel(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n")
    done = run_pytest(tmp_path, "--kvcore-emulate=A3")
    assert done.returncode == 4
    assert "--kvcore-emulate: the emulated machine cannot start: torch_npu is not" in done.stderr


def test_the_settings_of_a_process_are_its_children_s() -> None:
    made: dict[str, str] = {"LD_LIBRARY_PATH": "/opt/mine"}
    environment.apply(environment.Settings("A2", 3), made)
    environment.apply(environment.Settings("A2", 3), made)
    assert made["LD_LIBRARY_PATH"].endswith(":/opt/mine")
    assert made["LD_LIBRARY_PATH"].count("lib64") == 1
