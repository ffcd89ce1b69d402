# SPDX-License-Identifier: Apache-2.0
"""How every command ends: statuses, Ctrl-C, full disks, readers that have gone, hostile input."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvcore
from kvcore.cli import main, status
from kvcore.cli.printing import printable

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "command_line.md"
TRACE = {"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [0, 1]}
FULL = pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="no /dev/full, which is always full"
)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(TRACE) + "\n")
    return str(path)


def test_the_table_of_statuses_is_the_program_s() -> None:
    table = re.findall(r"^\| (\d+) \|", DOCUMENT.read_text(), re.MULTILINE)
    known = {value for name, value in vars(status).items() if name.isupper()}
    assert list(map(int, table)) == sorted(known)


# ---------------------------------------------------------------- Ctrl-C
#: SIGINT, as the terminal sends it, when a module is about to be imported (for the nth time, when
#: the name is one of many), or when a function is called.
SITE = """
import _signal as signal, os, sys
if "KVCORE_TEST_AT" in os.environ and "kvcore" in " ".join(sys.orig_argv):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    wanted, times = os.environ["KVCORE_TEST_AT"], int(os.environ["KVCORE_TEST_TIMES"])
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == wanted:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
    sys.meta_path.insert(0, Finder())
"""
MODULES = [
    "signal", "enum", "kvcore.backends", "kvcore.isa", "numpy", "numpy._core.multiarray",
    "numpy._core._multiarray_umath", "numpy.random", "kvcore.about", "kvcore.cli",
    "kvcore.cli.program", "argparse", "kvcore.cli.commands.bench", "kvcore.cli.commands.replay",
    "kvcore.replay.options", "rich", "rich.table", "kvcore.npu.cann.library",
]  # fmt: skip


def interrupted(tmp_path: Path, at: str, times: int, *command: str) -> tuple[int, str, str]:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "KVCORE_TEST_AT": at,
             "KVCORE_TEST_TIMES": str(times)},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("module", MODULES)
def test_ctrl_c_while_something_is_imported(tmp_path: Path, module: str) -> None:
    code, out, err = interrupted(tmp_path, module, 1, sys.executable, "-m", "kvcore", "info")
    if code == 0:  # this numpy has no such module, or has it without an import
        assert module.startswith(("signal", "enum", "numpy.", "argparse", "rich"))
        return
    assert (code, out, err) == (130, "", "kvcore: interrupted\n")


@pytest.mark.parametrize("module", ["numpy", "kvcore.cli.program", "rich.table"])
def test_ctrl_c_twice(tmp_path: Path, module: str) -> None:
    command = [sys.executable, "-Bmkvcore", "info"]
    assert interrupted(tmp_path, module, 2, *command) == (130, "", "kvcore: interrupted\n")


def test_ctrl_c_of_the_script_that_pip_makes(tmp_path: Path) -> None:
    script = tmp_path / "bin" / "kvcore"
    script.parent.mkdir()
    script.write_text(
        f"#!{sys.executable}\nimport sys\nfrom kvcore.cli import main\n"
        "if __name__ == '__main__':\n    sys.exit(main())\n"
    )
    script.chmod(0o755)
    for module in ("kvcore.isa", "numpy", "kvcore.cli.program", "kvcore.cli.commands.info"):
        told = interrupted(tmp_path, module, 1, str(script), "info")
        assert told == (130, "", "kvcore: interrupted\n"), module


def test_another_program_keeps_its_ctrl_c(tmp_path: Path) -> None:
    program = "import sys\ntry:\n    import kvcore\nexcept KeyboardInterrupt:\n    print('own')\n"
    (tmp_path / "kvcore_user.py").write_text(program)
    script = str(tmp_path / "kvcore_user.py")
    assert interrupted(tmp_path, "kvcore.isa", 1, sys.executable, script) == (0, "own\n", "")


def test_ctrl_c_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """As a shell starts what is to run in the background."""
    program = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "os.execv(sys.executable, [sys.executable, '-m', 'kvcore', '--version'])"
    )
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'kvcore.cli.program': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("kvcore ")


# ---------------------------------------------------------------- a fault of our own
def test_a_fault_has_a_status_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'kvcore' in ' '.join(sys.orig_argv):\n"
        "    import kvcore\n"
        "    def fault(): raise LookupError('a \\x1b[31mfault')\n"
        "    kvcore.info = fault\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "kvcore", "info"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (70, "")
    assert "Traceback (most recent call last)" in done.stderr
    assert "LookupError: a \\x1b[31mfault" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("kvcore: this is a fault of kvcore")


# ---------------------------------------------------------------- a full disk
COMMANDS = [
    ["info"], ["info", "--json"], ["--help"], ["--version"], ["bench", "--list"],
    ["check", "key=4,8,16:int8", "key_cache=8,16,8,16:int8", "slot_mapping=4:int32"],
]  # fmt: skip


@FULL
@pytest.mark.parametrize(
    ("command", "unbuffered"),
    [*((command, "") for command in COMMANDS), (COMMANDS[0], "1"), (COMMANDS[-1], "1")],
)
def test_standard_output_on_a_full_disk(command: list[str], unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvcore", *command], stdout=full, stderr=subprocess.PIPE,
            text=True, env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(r"kvcore( \w+)?: standard output: No space left on device", line)


@FULL
@pytest.mark.parametrize(
    ("command", "code"),
    [(["info"], 0), (["info", "more"], 2), (["check", "key=1"], 2), ([], 2)],
)
def test_nobody_can_be_told_on_a_full_disk(command: list[str], code: int) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvcore", *command], stdout=subprocess.DEVNULL, stderr=full
        )
    assert done.returncode == code


@FULL
@pytest.mark.parametrize(
    "options",
    [
        ["--json", "/dev/full"],
        ["--policy", "lru", "--json", "/dev/full"],
        ["--policy", "lru", "--trace", "/dev/full"],
        ["--policy", "lru", "--fidelity", "sampled", "--trace", "/dev/full"],
        ["--policy", "lru", "--html", "/dev/full"],
    ],
    ids=" ".join,
)
def test_a_file_on_a_full_disk(
    trace: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if "--html" in options:
        pytest.importorskip("plotly")
    assert main(["replay", trace, *options]) == 2
    captured = capsys.readouterr()
    assert captured.err == "kvcore replay: /dev/full: No space left on device\n"
    assert "verified" in captured.out  # what was found out is shown all the same


# ---------------------------------------------------------------- what reaches a terminal
HOSTILE = "\x1b]0;x\x07\x9b31m\u202e\r\x00\udcff"


def test_printable() -> None:
    assert printable("plain é 中\t") == "plain é 中\\t"
    assert printable(HOSTILE) == "\\x1b]0;x\\x07\\x9b31m\\u202e\\r\\x00\\udcff"
    assert printable("a\nb") == "a\\nb"
    assert printable("a\nb\x1b", lines=True) == "a\nb\\x1b"


def raw(text: str) -> list[str]:
    return [c for c in text if not c.isprintable() and c != "\n"]


@pytest.mark.parametrize(
    "words",
    [
        ["replay", "{hostile}"],
        ["replay", "{hostile}", "--policy", "lru"],
        ["replay", "keys.jsonl"],
        ["replay", "good{hostile}", "--verify-samples", "1"],
        ["replay", "good{hostile}", "--policy", "lru", "--verify-samples", "1"],
        ["replay", "--model", "{hostile}.toml"],
        ["replay", "--model", "{hostile}"],
        ["replay", "--policy", "lru", "--device", "{hostile}.toml"],
        ["replay", "--sweep", "policy={hostile}"],
        ["replay", "--compare", "a.json", "b.json"],
        ["replay", "--compare", "{hostile}", "b.json"],
        ["replay", "--json", "{hostile}/x"],
        ["check", "{hostile}"],
        ["check", "{hostile}=3"],
        ["check", "key={hostile}"],
        ["check", "--log", "{hostile}"],
        ["check", "--log", "log{hostile}"],
        ["check", "--soc", "{hostile}"],
        ["bench", "{hostile}"],
        ["bench", "--compare", "{hostile}"],
        ["{hostile}"],
        ["--{hostile}"],
    ],
    ids=" ".join,
)
def test_no_input_reaches_the_terminal_as_it_is(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    hostile = HOSTILE.replace("\x00", "")  # no argument of a process can hold one
    (tmp_path / "keys.jsonl").write_text(json.dumps({HOSTILE: 1, "timestamp": 0}))
    (tmp_path / f"good{hostile}").write_text(json.dumps(TRACE))
    for name, value in (("a", 1), ("b", HOSTILE)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"steps": 1, HOSTILE: value}))
    (tmp_path / f"log{hostile}").write_text(
        f"key [4, 8, 128] int8, key_cache [64, 16, 8, 128] int8 slot_mapping [4] int32 "
        f"scatter_mode=a cache_mode='{hostile}'\n{hostile} key [4] int8",
        errors="surrogateescape",
    )
    assert main([word.format(hostile=hostile) for word in words]) in (0, 1, 2)
    captured = capsys.readouterr()
    assert raw(captured.out) == []
    assert raw(captured.err) == []
    assert "\\x1b" in captured.out + captured.err or "log" in "".join(words)


# ---------------------------------------------------------------- files that are none
@pytest.fixture(scope="module")
def everything_imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the commands import, which another user may not be able to read."""
    importlib.import_module("kvcore.replay.sweep")
    trace = tmp_path_factory.mktemp("trace") / "one.jsonl"
    trace.write_text(json.dumps(TRACE) + "\n")
    for more in ([], ["--policy", "lru"]):
        main(["replay", str(trace), "--verify-samples", "1", *more])


@pytest.fixture
def nobody(everything_imported: None) -> Iterator[None]:
    """As a user who may read nothing of root's."""
    if os.geteuid() != 0:
        pytest.skip("only root may become another user")
    os.seteuid(65534)
    try:
        if not all(os.access(path, os.R_OK, effective_ids=True) for path in kvcore.__path__):
            pytest.skip(f"another user may not read {kvcore.__path__[0]}")
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(
    "words",
    [
        ["replay", "{file}"],
        ["replay", "--compare", "{file}", "{file}"],
        ["replay", "--model", "{file}.toml"],
        ["replay", "--model", "{file}.json"],
        ["replay", "--policy", "lru", "--device", "{file}.toml"],
        ["replay", "--requests", "1", "--json", "{file}"],
        ["replay", "--requests", "1", "--json", "{folder}/new"],
        ["replay", "--requests", "1", "--sweep", "pool=512", "--results", "{folder}/new"],
        ["check", "--log", "{file}"],
        ["bench", "--compare", "{file}"],
        ["bench", "norm-1", "--save", "{file}"],
    ],
    ids=" ".join,
)
def test_files_without_permission(
    words: list[str], tmp_path: Path, nobody: None, capfd: pytest.CaptureFixture[str]
) -> None:
    os.seteuid(0)
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    for suffix in ("", ".toml", ".json"):
        (folder / f"file{suffix}").write_text("x")
        (folder / f"file{suffix}").chmod(0o600)
    os.seteuid(65534)
    names = {"file": folder / "file", "folder": folder}
    assert main([word.format(**names) for word in words]) == 2
    captured = capfd.readouterr()
    assert str(folder) in captured.err
    assert "Traceback" not in captured.err


DEEP = "[" * 20_000 + "]" * 20_000


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("d.toml", "x = " + DEEP, ["replay", "--requests", "1", "--device", "d.toml"]),
        ("d.toml", "x = " + "9" * 5000, ["replay", "--requests", "1", "--device", "d.toml"]),
        ("d.toml", "name = 0x" + "f" * 9000, ["replay", "--requests", "1", "--device", "d.toml"]),
        ("m.toml", "x = " + DEEP, ["replay", "--model", "m.toml"]),
        ("m.toml", "name = 0x" + "f" * 9000, ["replay", "--model", "m.toml"]),
        (
            "m.toml",
            "name = 'x'\n[layers]\nbasis = 'assumed'\nsource = 's'\nvalue = 0x" + "f" * 9000,
            ["replay", "--model", "m.toml"],
        ),
        ("m.json", DEEP, ["replay", "--model", "m.json"]),
        ("m.json", '{"a": ' * 9000, ["replay", "--model", "m.json"]),
        ("t.jsonl", DEEP, ["replay", "t.jsonl"]),
        ("t.jsonl", '{"timestamp": ' + "9" * 5000 + "}", ["replay", "t.jsonl"]),
        ("t.jsonl", '{"timestamp": 1e999}', ["replay", "t.jsonl"]),
        ("t.jsonl", json.dumps(TRACE)[:-1] + ', "timestamp": 0}', ["replay", "t.jsonl"]),
        ("a.json", DEEP, ["replay", "--compare", "a.json", "a.json"]),
        ("a.json", '{"steps": 1' + "0" * 400 + "}", ["replay", "--compare", "a.json", "a.json"]),
        ("a.json", '{"steps": 1e999}', ["replay", "--compare", "a.json", "a.json"]),
        ("a.json", '{"steps": NaN}', ["replay", "--compare", "a.json", "a.json"]),
        ("a.json", '{"steps": 1, "steps": 2}', ["replay", "--compare", "a.json", "a.json"]),
        ("a.json", "[" * 70 + "]" * 70, ["replay", "--compare", "a.json", "a.json"]),
        ("a.json", "[1]", ["replay", "--compare", "a.json", "a.json"]),
        ("a.json", '{"stepz": 1}', ["replay", "--compare", "a.json", "a.json"]),
    ],
)  # fmt: skip
def test_files_that_python_s_readers_stumble_over(
    name: str,
    text: str,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert len(line) < 1000
    assert line.startswith("kvcore replay: ")


@pytest.mark.parametrize("value", ["1" + "0" * 300, "-1" + "0" * 300, "1e308", "-1e308", "0"])
def test_large_numbers_that_can_be_compared(
    value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "a.json", tmp_path / "b.json"
    one.write_text('{"steps": 1, "x": 2.5}')
    two.write_text(f'{{"steps": 1, "x": {value}}}')
    assert main(["replay", "--compare", str(one), str(two)]) == 1
    assert main(["replay", "--compare", str(two), str(two)]) == 0
    assert main(["replay", "--compare", str(two), str(one), "--tolerance", "3"]) == 0
    assert "1 values differ, 0 by more than 300.00%" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["check", "--log", "-"], ["replay", "-"]])
def test_without_standard_input(words: list[str]) -> None:
    command = [sys.executable, "-m", "kvcore", *words]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *command], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"kvcore {words[0]}: -: expected standard input, got none\n"


def test_standard_input_is_bytes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvcore", "check", "--log", "-"],
        input=b"\xff\xfe key [4, 8, 16] int8 key_cache [8, 16, 8, 16] int8 slot_mapping [4] int32",
        capture_output=True,
    )
    assert done.returncode in (0, 1)
    assert done.stderr == b""


@pytest.mark.parametrize("size", ["0", "1", "9" * 10, "9" * 5000, "x" * 5000])
def test_a_terminal_of_any_size(size: str) -> None:
    """As far as the environment says so."""
    without_torch = "import sys; sys.modules['torch'] = None"  # the tables are what is looked at
    measured = ["bench", "norm-1", "--seconds", "0.001"]
    commands = [["info"], ["--help"], measured if size == "1" else ["bench", "--list"]]
    program = f"{without_torch}; from kvcore.cli import main; print([main(c) for c in {commands}])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True,
        env={**os.environ, "COLUMNS": size, "LINES": size},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "[0, 0, 0]"


def test_a_command_below_emulate_has_its_own_ctrl_c(capfd: pytest.CaptureFixture[str]) -> None:
    """It is neither ignored there nor answered here."""
    from kvcore.cli.commands import emulate

    own = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    pressed = (
        "import os, signal\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "try:\n    signal.raise_signal(signal.SIGINT)\n"
        "except KeyboardInterrupt:\n    raise SystemExit(7)\n"
    )
    ended = "import os; os.kill(os.getpid(), 15)"
    outer = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        for program, code in ((own, 0), (pressed, 7), (ended, 143)):
            assert emulate._run([sys.executable, "-c", program], dict(os.environ)) == code
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    finally:
        signal.signal(signal.SIGINT, outer)
    assert capfd.readouterr().out == "True\n"
