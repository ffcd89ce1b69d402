# SPDX-License-Identifier: Apache-2.0
"""The command itself: finding sub-commands, refusing what is wrong, ends and exit statuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvcore
from kvcore.cli import commands, main
from kvcore.emulator import installed
from kvcore.errors import ParamInvalidError

PROGRAM = [sys.executable, "-c", "import sys; from kvcore.cli import main; sys.exit(main())"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvcore {kvcore.__version__}\n"


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "info" in out
    assert "replay" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "kvcore: error: expected a command: "),
        (["--jsno"], "kvcore: error: unknown option --jsno; allowed: --help, --version"),
        (["plays"], "invalid choice: 'plays' (choose from "),
        (["info", "--jsno"], "kvcore info: error: unknown option --jsno; did you mean --json?"),
        (["info", "--jsno=3"], "unknown option --jsno; did you mean --json?"),
        (["info", "more"], "kvcore info: error: unexpected argument 'more'"),
        (["info", "--js"], "unknown option --js; did you mean --json? allowed: --help, --json"),
    ],
)
def test_what_is_wrong_is_answered_with_what_is_allowed(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_command_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "greet.py").write_text(
        "def register(subparsers):\n"
        "    parser = subparsers.add_parser('greet')\n"
        "    parser.add_argument('--name')\n"
        "    parser.set_defaults(run=lambda n: print('hello', n.name) or 7, parser=parser)\n"
    )
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])
    assert main(["greet", "--name", "you"]) == 7
    assert capsys.readouterr().out == "hello you\n"
    assert main(["greet", "--nam", "you"]) == 2
    assert "kvcore greet: error: unknown option --nam" in capsys.readouterr().err


def test_info_json_is_what_info_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads(json.dumps(kvcore.info(), default=str))
    assert shown["version"] == kvcore.__version__
    assert shown["emulator"] == json.loads(json.dumps(installed.facts()))


def test_info_to_a_pipe_has_a_line_a_fact(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "/a/path/" + "of many folders/" * 20 + "lib.so"
    monkeypatch.setattr(kvcore, "info", lambda: {"version": "1.2", "aclnn": {"looked_at": path}})
    monkeypatch.setattr(installed, "facts", dict)
    assert main(["info"]) == 0
    assert capsys.readouterr().out == f"version          1.2\naclnn looked_at  {path}\n"


def test_python_m_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvcore", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"kvcore {kvcore.__version__}\n"


def test_info_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {
        "version": "1.2",
        "soc": None,
        "cpu": {"cores": 3, "isa": ["avx2", "fma"], "flags": []},
        "backends": {"cpu": None, "aclnn": "no [bold]libopapi.so[/bold]"},
        "packages": {"torch": None},
    }
    monkeypatch.setattr(kvcore, "info", lambda: facts)
    monkeypatch.setattr(installed, "facts", dict)
    assert main(["info"]) == 0
    lines = [
        line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.strip()
    ]
    assert [[a, " ".join(b.split())] for a, b in lines] == [
        ["version", "1.2"],
        ["soc", "none"],
        ["cpu", "cores 3"],
        ["cpu", "isa avx2, fma"],
        ["cpu", "flags none"],
        ["backends", "cpu usable"],
        ["backends", "aclnn no [bold]libopapi.so[/bold]"],
        ["packages", "torch not installed"],
    ]


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ParamInvalidError("x: expected 1, got 2"), 2, "kvcore info: x: expected 1, got 2\n"),
        (FileNotFoundError(2, "No such file", "a.txt"), 2, "kvcore info: a.txt: No such file\n"),
        (MemoryError(), 2, "kvcore info: more memory was asked for than there is\n"),
        (OSError("disk on fire"), 2, "kvcore info: disk on fire\n"),
        (KeyboardInterrupt(), 130, "kvcore: interrupted\n"),
    ],
)
def test_ends_of_a_command(
    error: BaseException,
    status: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(kvcore, "info", fail)
    assert main(["info"]) == status
    captured = capsys.readouterr()
    assert captured.err == message
    assert captured.out == ""


def test_faults_of_our_own_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvcore, "info", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["info"])


@pytest.mark.parametrize("arguments", [["info"], ["info", "--json"], ["--help"], ["--version"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone_is_no_error(arguments: list[str], unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = [*PROGRAM, *arguments]
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environment)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_without_standard_streams() -> None:
    command = [*PROGRAM, "info"]
    shell = 'exec "$@" >&- 2>&-'
    assert subprocess.run(["sh", "-c", shell, "sh", *command], check=False).returncode == 0


def test_the_installed_script_is_this_program() -> None:
    script = Path(sys.executable).parent / "kvcore"
    if not script.exists():
        pytest.skip("kvcore is not installed in this environment")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"kvcore {kvcore.__version__}\n"


#: One process for all: Python and numpy take longer to start than the commands to answer.
EACH_IN_TURN = """
import contextlib, io, json, sys
from kvcore.cli import main
told = []
for command in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(command)
    told.append((status, out.getvalue(), err.getvalue()))
print(json.dumps(told))
"""


@pytest.mark.parametrize("variable", ["ISA", "STREAM_BYTES", "NUM_THREADS", "SOC", "BACKEND"])
def test_a_setting_that_means_nothing(variable: str) -> None:
    commands = [["info"], ["info", "--json"], ["bench", "norm-1"]]
    done = subprocess.run(
        [sys.executable, "-c", EACH_IN_TURN, json.dumps(commands)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, f"KVCORE_{variable}": "zz"},
    )
    assert done.stderr == ""
    for command, (status, out, err) in zip(commands, json.loads(done.stdout), strict=True):
        assert status == 2
        (line,) = err.splitlines()
        assert line.startswith(f"kvcore {command[0]}: KVCORE_{variable}: expected ")
        assert "zz'" in line
        assert bool(out) == (command[0] == "info")
