# SPDX-License-Identifier: Apache-2.0
"""The source archive, the build switches, and the sentence said without a compiler."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import kvcore

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of what a fresh checkout holds."""
    generated = ("build", "dist", ".*_cache", ".git", ".venv*", "*.egg-info", "__pycache__")
    ignore = shutil.ignore_patterns(*generated, ".hypothesis", ".benchmarks", "*.so")
    return Path(shutil.copytree(ROOT, tmp_path / "sources", ignore=ignore))


def run(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("CC", "CFLAGS", "LDSHARED")}
    switches = {"KVCORE_DEBUG": "0", "KVCORE_SANITIZE": "0"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**clean, **switches, **env},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


# ---------------------------------------------------------------- metadata
def test_installed_version_is_the_package_s() -> None:
    assert metadata.version("kvcore") == kvcore.__version__


def test_the_citation_names_this_version() -> None:
    text = (ROOT / "docs/CITATION.cff").read_text()
    assert f"\nversion: {kvcore.__version__}\n" in text


def test_the_changes_of_this_version_are_listed() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (\d+\.\d+\.\d+)\b", text, re.MULTILINE)
    assert versions[0] == kvcore.__version__
    assert versions == sorted(versions, key=lambda one: [*map(int, one.split("."))], reverse=True)


def test_classifiers_name_the_pythons_whose_tests_ran() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    said = re.search(r"The tests run on Python ([\d., and]+);", text)
    assert said
    named = [one.rpartition(" ")[2] for one in PYPROJECT["project"]["classifiers"]]
    assert [one for one in named if re.fullmatch(r"3\.\d+", one)] == re.findall(r"3\.\d+", said[1])


def test_run_time_requirements() -> None:
    names = {re.split(r"[<>=!~ ]", text)[0] for text in PYPROJECT["project"]["dependencies"]}
    assert names == {"numpy", "anyio", "ml_dtypes", "rich"}


def test_build_needs_no_numpy() -> None:
    names = {re.split(r"[<>=!~ ]", text)[0] for text in PYPROJECT["build-system"]["requires"]}
    assert names == {"setuptools", "Cython"}


def test_the_command_is_installed() -> None:
    (entry,) = metadata.entry_points(group="console_scripts", name="kvcore")
    assert entry.value == "kvcore.cli:main"


def test_readme_opens_with_the_two_commands() -> None:
    commands = re.search(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert commands
    install_and_run, install_and_test = commands[1].strip().splitlines()
    assert install_and_run.startswith("pip install . && kvcore replay")
    assert install_and_test.startswith("pip install -e '.[test]' && python -m pytest")


def test_sources_that_are_not_compiled_say_so(sources: Path) -> None:
    done = run(sources, "-c", "import kvcore")
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert said.startswith("ModuleNotFoundError: kvcore._")
    assert f"not compiled for this Python in {sources / 'kvcore'}; run `pip install -e .`" in said


# ---------------------------------------------------------------- source archive
def test_source_archive_is_made_without_cython_and_is_complete(sources: Path) -> None:
    program = (
        "import sys; sys.modules['Cython'] = None\n"
        "from setuptools import build_meta\n"
        "build_meta.build_sdist('made')"
    )
    done = run(sources, "-c", program)
    assert done.returncode == 0, done.stderr
    (archive,) = (sources / "made").iterdir()
    with tarfile.open(archive) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames() if "/" in name}
    folders = ("kvcore", "tests", "bench", "docs", "examples", ".ci")
    wanted = {
        str(path.relative_to(sources))
        for folder in folders
        for path in (sources / folder).rglob("*")
        if path.is_file()
    }
    wanted |= {"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "MANIFEST.in"}
    wanted |= {"pyproject.toml", "setup.py", ".ci/run", ".ci/sanitize"}
    assert wanted - packed == set()
    generated = (".so", ".pyc", ".o")
    assert [name for name in packed if name.endswith(generated)] == []


# ---------------------------------------------------------------- build switches
def extensions(folder: Path, **env: str) -> dict[str, dict[str, object]]:
    program = (
        "import json, sys; sys.modules['Cython'] = None\n"
        "import setuptools\n"
        "from distutils.core import run_setup\n"
        "made = run_setup('setup.py', stop_after='init').ext_modules\n"
        "print(json.dumps({e.name: e.__dict__ for e in made}, default=str))"
    )
    done = run(folder, "-c", program, **env)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_every_compiled_source_is_found(sources: Path) -> None:
    found = set(extensions(sources)) - {"kvcore._cython_shared"}
    written = {path.relative_to(sources) for path in (sources / "kvcore").rglob("*.pyx")}
    assert found == {".".join(path.with_suffix("").parts) for path in written}


def test_a_new_source_is_found(sources: Path) -> None:
    (sources / "kvcore/_kernels/brand_new.pyx").touch()
    assert "kvcore._kernels.brand_new" in extensions(sources)


@pytest.mark.parametrize("switch", ["", "KVCORE_DEBUG", "KVCORE_SANITIZE"])
def test_switches_choose_the_flags(sources: Path, switch: str) -> None:
    (sources / "kvcore/_kernels/brand_new.pyx").touch()
    made = extensions(sources, **({switch: "1"} if switch else {}))["kvcore._kernels.brand_new"]
    flags = [*made["extra_compile_args"], *made["extra_link_args"]]  # type: ignore[misc]
    assert (["KVCORE_DEBUG", "1"] in made["define_macros"]) == (switch == "KVCORE_DEBUG")  # type: ignore[operator]
    assert any("-fsanitize" in flag for flag in flags) == (switch == "KVCORE_SANITIZE")
    # Whatever CPU builds a wheel, any CPU of the platform runs it.
    assert [flag for flag in flags if flag.startswith("-m")] == []


@pytest.mark.parametrize(
    ("value", "sanitizers"), [("1", "address,undefined"), ("thread", "thread")]
)
def test_the_sanitizers_by_name(sources: Path, value: str, sanitizers: str) -> None:
    (sources / "kvcore/_kernels/brand_new.pyx").touch()
    made = extensions(sources, KVCORE_SANITIZE=value)["kvcore._kernels.brand_new"]
    assert f"-fsanitize={sanitizers}" in made["extra_compile_args"]  # type: ignore[operator]
    assert f"-fsanitize={sanitizers}" in made["extra_link_args"]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("switch", "values"), [("KVCORE_DEBUG", "0 or 1"), ("KVCORE_SANITIZE", "0, 1 or thread")]
)
def test_a_switch_has_its_values(sources: Path, switch: str, values: str) -> None:
    done = run(sources, "setup.py", "--version", **{switch: "yes"})
    assert done.returncode == 1
    assert done.stderr == f"{switch}: expected {values}, got 'yes'\n"


def test_compiled_objects_are_not_pickled_by_generated_code(sources: Path) -> None:
    # Cython's own pickling copies an object without what is in C.
    text = (sources / "setup.py").read_text()
    assert '"auto_pickle": False' in text


# ---------------------------------------------------------------- no compiler
SENTENCE = re.compile(
    r"kvcore: no working C compiler was found \('[^']+' cannot build a small library\); "
    r"install one and try again: 'apt-get install gcc [^\n]+\.\n"
)


def build(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "kvcore/_kernels/brand_new.pyx").touch()
    return run(folder, "setup.py", "-q", "build_ext", **env)


def test_compiler_that_is_not_there(sources: Path) -> None:
    done = build(sources, CC="no-such-compiler")
    assert done.returncode == 1
    assert SENTENCE.fullmatch(done.stderr), done.stderr
    assert "'no-such-compiler'" in done.stderr


def test_no_compiler_on_the_path(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    done = build(sources, PATH=str(tmp_path / "bin"))
    assert done.returncode == 1
    assert SENTENCE.fullmatch(done.stderr), done.stderr


def test_compiler_that_fails(sources: Path) -> None:
    done = build(sources, CC="false")
    assert done.returncode == 1
    assert SENTENCE.fullmatch(done.stderr), done.stderr


def test_compiler_without_python_headers(sources: Path, tmp_path: Path) -> None:
    real = shutil.which("gcc") or shutil.which("cc")
    if real is None:
        pytest.skip("needs a C compiler")
    fake = tmp_path / "cc-without-headers"
    fake.write_text(
        '#!/bin/sh\nfor f in "$@"; do case "$f" in *.c) grep -q Python.h "$f" && exit 1;; esac; '
        f'done\nexec {real} "$@"\n'
    )
    fake.chmod(0o755)
    done = build(sources, CC=str(fake))
    assert done.returncode == 1
    assert re.fullmatch(
        r"kvcore: the C compiler works, but Python\.h was not found; install the headers of "
        r"Python \d\.\d+ and try again: 'apt-get install [^\n]+\.\n",
        done.stderr,
    ), done.stderr
