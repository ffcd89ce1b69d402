# SPDX-License-Identifier: Apache-2.0
"""Modules and files that the documents, the gate and the package's own text name do exist."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(p for p in (ROOT / ".ci").rglob("*") if p.is_file() and p.suffix != ".pyc"),
    *sorted(p for p in (ROOT / "kvcore").rglob("*") if p.suffix in {".py", ".pyx", ".pxd", ".h"}),
]
#: kvcore.name.name, not as a part of a longer word or of an address.
DOTTED = re.compile(r"(?<![\w./-])kvcore(?:\.[A-Za-z_]\w*)+")
#: A path below one of the repository's folders; * and {a,b} as a shell has them.  Not one of a
#: repository that is named before it.
PATH = re.compile(
    r"(?<!cann-recipes-infer, )(?<![\w./<-])"
    r"(?:kvcore|tests|docs|bench|examples|\.ci)/[\w./*{},-]*[\w*}]"
)
#: Made by the build or by a test's reader, so in no checkout.
MADE = {"kvcore/_cython_shared"}


@cache
def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute reached from one."""
    parts = name.split(".")
    if ROOT.joinpath(*parts).with_suffix(".pxd").exists():  # declarations alone: nothing to import
        return True
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError as missing:
            if not (missing.name or "").startswith("kvcore"):
                pytest.skip(f"{missing.name} is not installed, so {name} cannot be looked up")
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def alternatives(path: str) -> list[str]:
    """The paths that a{b,c}d stands for."""
    braces = re.search(r"\{([^{}]*)\}", path)
    if braces is None:
        return [path]
    before, after = path[: braces.start()], path[braces.end() :]
    return [p for part in braces[1].split(",") for p in alternatives(before + part + after)]


def exists(path: str) -> bool:
    if path in MADE:
        return True
    if "{" in path and "}" not in path:  # the beginning of a formatted string
        path = path.partition("{")[0]
    return all(
        next(ROOT.glob(one.rstrip("/")), None) is not None for one in alternatives(path) if one
    )


@pytest.mark.parametrize("text", [pytest.param(t, id=str(t.relative_to(ROOT))) for t in TEXTS])
def test_named_modules_and_files_exist(text: Path) -> None:
    content = text.read_text(encoding="utf-8")
    assert [name for name in set(DOTTED.findall(content)) if not resolves(name)] == []
    assert [path for path in set(PATH.findall(content)) if not exists(path)] == []


def imported(source: str) -> list[str]:
    """The dotted names that a module imports from the package."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvcore"):
            found += [f"{node.module}.{name.name}" for name in node.names]
    return found


@pytest.mark.parametrize(
    "tool", sorted((ROOT / "tests" / "tools").rglob("*.py")), ids=lambda path: str(path.stem)
)
def test_names_that_the_tools_import_exist(tool: Path) -> None:
    # The tools are not run with the tests, so nothing else notices when such a name has moved.
    assert [name for name in imported(tool.read_text(encoding="utf-8")) if not resolves(name)] == []


def test_the_check_sees_what_is_missing() -> None:
    assert imported("import os\nfrom kvcore.errors import KVCoreError as E") == [
        "kvcore.errors.KVCoreError"
    ]
    assert not resolves("kvcore.no_such_thing")
    assert not resolves("kvcore.errors.NoSuchError")
    assert not exists("tests/no_such_file.py")
    assert not exists("tests/project/test_{architecture,no_such_file}.py")
    assert resolves("kvcore.errors.KVCoreError")
    assert exists("tests/project/test_{architecture,named_things}.py")
    assert exists("kvcore/_kernels/*.pyx")
