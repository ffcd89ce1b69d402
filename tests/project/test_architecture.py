# SPDX-License-Identifier: Apache-2.0
"""What the import linter cannot see: compiled sources, lazy imports, what an import loads."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kvcore"


def files(*suffixes: str, below: str = "") -> list[Path]:
    return sorted(p for p in (PACKAGE / below).rglob("*") if p.suffix in suffixes and p.is_file())


def named(paths: list[Path]) -> list[object]:
    return [pytest.param(path, id=str(path.relative_to(ROOT))) for path in paths]


def loaded_by(statement: str) -> set[str]:
    program = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stdout.split())


LOOPS = {"asyncio", "trio"}
CONCURRENT = LOOPS | {"sniffio"}  # anyio brings this one itself
HEAVY = {"rich", "torch", "hypothesis", "pytest"}
UPPER = {"kvcore.runtime", "kvcore.offload", "kvcore.torch", "kvcore.cli", "kvcore.replay"}


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("kvcore", CONCURRENT | HEAVY | UPPER | {"anyio"}),
        ("kvcore.cli", CONCURRENT | HEAVY | {"anyio", "kvcore.runtime", "kvcore.offload"}),
        ("kvcore.runtime", LOOPS | HEAVY | {"kvcore.ops", "kvcore.backends", "kvcore._core"}),
        ("kvcore.offload", LOOPS | HEAVY),
        ("kvcore.emulator", CONCURRENT | HEAVY | UPPER | {"anyio"}),
    ],
)
def test_import_stays_light(module: str, absent: set[str]) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not there yet")
    if module == "kvcore.runtime":
        # The parent package is imported first and brings the operators: look at what is added.
        added = loaded_by(f"import {module}") - loaded_by("import kvcore")
        assert not added & absent
    else:
        assert not loaded_by(f"import {module}") & absent


# ---------------------------------------------------------------- direction of imports
def layers() -> dict[str, int]:
    """Layer of each top-level module, from the import linter's contract: 0 is the highest."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = (c for c in contracts["contracts"] if c["type"] == "layers")
    return {
        name.strip(" ()"): depth
        for depth, layer in enumerate(contract["layers"])
        for name in layer.split("|")
    }


LAYERS = layers()
IMPORT = re.compile(
    r"^\s*(?:from\s+(?P<source>[\w.]+)\s+(?P<kind>c?import)\b(?P<names>\s*\([^)]*\)|[^\n#]*)"
    r"|(?P<plain>c?import)\s+(?P<modules>[\w., ]+))",
    re.MULTILINE,
)


def code_of(path: Path) -> str:
    """The text without long strings: a line of a docstring may well start with 'import'."""
    return re.sub(r'"""[\s\S]*?"""', '""', path.read_text())


def imports_of(path: Path) -> list[tuple[str, str]]:
    """(import or cimport, module) of each; ``from kvcore import x`` counts as kvcore.x."""
    found = []
    for match in IMPORT.finditer(code_of(path)):
        if match["plain"]:
            modules = [part.split(" as ")[0].strip() for part in match["modules"].split(",")]
            found += [(match["plain"], module) for module in modules if module]
        elif match["source"] == "kvcore":
            names = match["names"].strip(" ()\n").split(",")
            found += [
                (match["kind"], f"kvcore.{name.split()[0]}") for name in names if name.strip()
            ]
        else:
            found.append((match["kind"], match["source"]))
    return found


def place(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].split(".")[0]


def test_every_module_has_a_layer() -> None:
    assert {place(path) for path in files(".py", ".pyx")} - {"__init__"} <= set(LAYERS)


@pytest.mark.parametrize("path", named(files(".py", ".pyi", ".pyx", ".pxd")))
def test_imports_point_one_way(path: Path) -> None:
    """As the import linter has it, for compiled modules too, which it cannot see."""
    if path.name == "__init__.py" and path.parent == PACKAGE:
        return
    own = place(path)
    for _, module in imports_of(path):
        if module.split(".")[0] != "kvcore":
            continue
        other = module.partition(".")[2].split(".")[0]
        if other != own:
            # The package itself imports the operators: what lies above them may import it whole.
            depth = LAYERS.get(other, LAYERS["ops"])
            assert depth > LAYERS[own], f"kvcore.{own} is not above {module}"


# ---------------------------------------------------------------- compiled sources
POSIX = {"errno.h", "pthread.h", "sched.h", "stdint.h", "string.h", "time.h", "unistd.h"}
COMPILED = files(".pyx", ".pxd")


def test_every_compiled_source_is_in_a_folder_that_is_built() -> None:
    assert {place(path) for path in COMPILED} <= {"_kernels", "_core", "runtime", "emulator"}


@pytest.mark.parametrize("path", named(COMPILED))
def test_compiled_sources_import_what_their_place_allows(path: Path) -> None:
    imports = [module for kind, module in imports_of(path) if kind == "import"]
    cimports = [module for kind, module in imports_of(path) if kind == "cimport"]
    # Not numpy's C API above all: it would tie a build to one numpy.
    assert {name.split(".")[0] for name in cimports} <= {"libc", "cpython", "cython", "kvcore"}
    assert not {name.split(".")[0] for name in imports} & (CONCURRENT | HEAVY | {"anyio"})
    if place(path) == "_kernels":
        assert imports == [], "a kernel moves bytes and knows no Python"
    for header in re.findall(r'cdef extern from "<?([^">]+)', code_of(path)):
        own = (path.parent / header, PACKAGE / "_kernels" / header)
        assert header in POSIX or any(candidate.exists() for candidate in own), header


@pytest.mark.parametrize("path", named(COMPILED))
def test_directives_stand_in_setup_only(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"^#\s*cython\s*:", text, re.MULTILINE)
    assert not re.search(r"cython\.(boundscheck|wraparound|initializedcheck|cdivision)", text)


def test_every_compiled_module_has_a_stub() -> None:
    assert [str(path) for path in files(".pyx") if not path.with_suffix(".pyi").exists()] == []


def test_every_stub_has_a_compiled_module() -> None:
    stubs = set(files(".pyi")) - {
        PACKAGE / "ops/derived.pyi"
    }  # of what is made when it is imported
    assert [str(path) for path in stubs if not path.with_suffix(".pyx").exists()] == []


# ---------------------------------------------------------------- circles
def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_within(room: str) -> dict[str, set[str]]:
    """Module by module what it imports of its room, for checkers of types and in functions too."""
    paths = {module_of(path): path for path in files(".py", ".pyi", below=room)}
    found: dict[str, set[str]] = {}
    for module, path in paths.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                # (a name of a package may be a module of it)
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= whole & set(paths) or {node.module}
        found[module] = names & set(paths) - {module}
    return found


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Modules that reach each other, in groups of two and more."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        path = [start]
        while path:
            for other in imports[path.pop()] - seen:
                seen.add(other)
                path.append(other)
        return seen

    reach = {module: reached(module) for module in imports}
    groups = {
        frozenset({module} | {other for other in reach[module] if module in reach[other]})
        for module in imports
    }
    return [set(group) for group in groups if len(group) > 1]


def test_circles_are_found() -> None:
    chain = {"a": {"b"}, "b": {"c"}, "c": set()}
    assert circles(chain) == []
    assert circles({**chain, "c": {"a"}}) == [{"a", "b", "c"}]


@pytest.mark.parametrize("room", ["runtime", "npu"])
def test_no_circle_of_more_than_two_modules(room: str) -> None:
    """A part is read without the whole: what it needs of it is in a contract (abc, parts)."""
    assert [group for group in circles(imports_within(room)) if len(group) > 2] == []


def test_no_part_names_the_device() -> None:
    """Nor the class of a driver: streams, events, buffers and graphs get verbs."""
    device = {"kvcore.runtime.device", "kvcore.npu.driver.device"}
    for room in ("runtime", "npu"):
        users = {module for module, names in imports_within(room).items() if names & device}
        assert users <= {"kvcore.runtime"}, "the package hands Device on, and nobody else"


# ---------------------------------------------------------------- Python sources
def imports_in(tree: ast.AST) -> set[str]:
    """Top-level packages a Python source imports anywhere, import_module("x") included."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            callee = node.func.attr if isinstance(node.func, ast.Attribute) else None
            callee = node.func.id if isinstance(node.func, ast.Name) else callee
            if callee in ("import_module", "__import__"):
                found.add(str(node.args[0].value))
    return {name.split(".")[0] for name in found}


def executed_at_import(tree: ast.Module) -> ast.Module:
    """The module without the bodies of its functions and of ``if TYPE_CHECKING``."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | None:
            if "TYPE_CHECKING" in ast.unparse(node.test):
                return None
            return self.generic_visit(node)

    return Strip().visit(tree)


@pytest.mark.parametrize("path", named(files(".py", ".pyi")))
def test_python_sources_import_what_their_place_allows(path: Path) -> None:
    own = place(path)
    tree = ast.parse(path.read_text())
    everywhere = imports_in(tree)
    at_import = imports_in(executed_at_import(tree))  # the last to see the whole tree
    assert not everywhere & CONCURRENT, "kvcore runs on any event loop: use anyio"
    assert "rich" not in at_import, "rich is imported where it is used"
    if own != "cli":
        assert "rich" not in everywhere, "only the command line prints"
    if own not in ("torch", "emulator", "benchmarks"):  # benchmarks measure beside it
        assert "torch" not in everywhere, "only kvcore.torch knows torch, and the machine below it"
    if own not in ("runtime", "offload"):
        assert "anyio" not in at_import


@pytest.mark.parametrize("path", named(files(".py", ".pyi", ".pyx", ".pxd", ".h", ".c")))
def test_every_source_names_its_license(path: Path) -> None:
    head = path.read_text().splitlines()[:2]
    assert any("SPDX-License-Identifier: Apache-2.0" in line for line in head)


@pytest.mark.parametrize("path", named(files(".py", ".pyx")))
def test_no_rule_compares_the_name_of_a_machine(path: Path) -> None:
    """What sets one machine apart is a field of its table in kvcore/soc."""
    compared = re.findall(r"""(?:[!=]=|\bin \() *["'](?:A2|A3|950)["']""", path.read_text())
    assert place(path) == "cli" or not compared


def test_compiled_modules_of_one_folder_import_each_other_in_no_circle() -> None:
    """A declaration that two modules need stands in a third."""
    needs: dict[str, set[str]] = {}
    for path in COMPILED:
        own = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found = {module for kind, module in imports_of(path) if kind == "cimport"}
        needs.setdefault(own, set()).update(found - {own})
    while needs:
        free = {name for name, others in needs.items() if not others & set(needs)}
        assert free, f"a circle among {sorted(needs)}"
        needs = {name: others for name, others in needs.items() if name not in free}


def classes_of(path: Path) -> list[str]:
    if path.suffix == ".pyx":
        return re.findall(r"^(?:cdef )?class (\w+)", path.read_text(), re.MULTILINE)
    return [one.name for one in ast.parse(path.read_text()).body if isinstance(one, ast.ClassDef)]


def test_a_class_of_the_runtime_and_what_stands_on_it_is_known_by_its_name() -> None:
    """A Record is one thing, in whatever room of these a reader meets it."""
    places: dict[str, list[str]] = {}
    for room in ("runtime", "npu", "offload"):
        for path in files(".py", ".pyx", below=room):
            for name in classes_of(path):
                places.setdefault(name, []).append(str(path.relative_to(PACKAGE)))
    assert places["Driver"] == ["runtime/abc.py"]
    assert places["Queue"] == ["runtime/queues/_queue.pyx"]
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


#: Functions of more parameters than a reader holds in mind; the operators have the vendor's.
MANY_PARAMETERS = {
    "scatter_pa_kv_cache",
    "gather_pa_kv_cache",
    "gather_selection_kv_cache",
    # Until they are cut: the kernel behind the device pools, and two references of the emulator.
    "kvcore/_kernels/pool_rows.pyi:serve",
    "kvcore/emulator/reference/kv_write.py:_run",
    "kvcore/emulator/reference/kv_write.py:_check",
}
MOST_PARAMETERS = 12


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    names += [one.arg for one in (given.vararg, given.kwarg) if one is not None]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def test_no_function_takes_many_parameters() -> None:
    """Plan functions, questions and scenario_of have their operators' by themselves."""
    found = set()
    made = {PACKAGE / "ops/derived.pyi"}  # of the operators' parameters
    for path in set(files(".py", ".pyi")) - made:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if len(parameters_of(node)) > MOST_PARAMETERS:
                place_ = f"{path.relative_to(ROOT)}:{node.name}"
                found.add(node.name if node.name in MANY_PARAMETERS else place_)
    assert found == MANY_PARAMETERS


@pytest.mark.parametrize("path", named(COMPILED))
def test_compiled_sources_reach_into_no_other_object(path: Path) -> None:
    """What ruff's SLF001 says of Python sources."""
    text = IMPORT.sub("", re.sub(r"#[^\n]*", "", code_of(path)))
    text = re.sub(r"(?<![\w.])(?:self|cls)\._", "", text)
    assert re.findall(r"[\w)\]]\._(?!_|replace\b)\w+", text) == []
