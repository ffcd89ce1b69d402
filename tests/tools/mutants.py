# SPDX-License-Identifier: Apache-2.0
"""A yardstick for the tests: break one line of the package and see whether a test notices.

    python tests/tools/mutants.py make --seed 1 mutants.json
    python tests/tools/mutants.py run mutants.json results.jsonl --jobs 2
    python tests/tools/mutants.py compare results-before.jsonl results-after.jsonl

``make`` draws mutants: a comparison, a sign, an operator or a bound is changed, or a statement is
left out.  ``run`` applies each in a copy of the tree, builds it where it is compiled, and runs the
tests of its room until the first failure; a result file is continued where it ended.  A mutant is
known by the text of its line and by the function around it, so it is found again after its file
has moved or grown.  ``compare`` names every mutant that was noticed before and is not any more.

Some mutants change nothing that can be seen (a faster path is skipped, a check is made twice), so
the number noticed is compared with an earlier one of the same mutants, never with all of them.
"""

from __future__ import annotations

import argparse
import ast
import collections
import concurrent.futures
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: Room -> its places in the package, newest first; those that exist are taken.
ROOMS = {
    "ops": ["kvcore/ops"],
    "_core": ["kvcore/_core"],
    "_kernels": ["kvcore/_kernels"],
    "runtime": ["kvcore/runtime"],
    "offload": ["kvcore/offload", "kvcore/replay"],
    "npu": ["kvcore/npu", "kvcore/backends/aclnn"],
}
# Cheap tests that are near the line come first: most mutants are noticed there, within seconds.
_OPERATORS = [
    *(f"tests/{part}" for part in ("core", "kernels", "ops", "soc", "backends")),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("test_*.py")),
]
#: Room -> what is run for it, by folders that may be there.
TESTS = {
    "ops": _OPERATORS,
    "_core": _OPERATORS,
    "_kernels": [*_OPERATORS, "tests/offload/test_device_pool.py"],
    "runtime": ["tests/runtime"],
    "offload": ["tests/offload", "tests/replay"],
    "npu": sorted(
        (str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "npu").glob("test_*.py")),
        key=lambda path: "runtime" in path,  # the runtime's whole suite again
    ),
}
SWAPS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "+": "-", "-": "+", "*": "+", "//": "*", "and": "or", "or": "and",
    "is": "is not", "is not": "is", "in": "not in", "not in": "in",
}  # fmt: skip
PATIENCE = 900  # seconds for the tests of one mutant; what takes longer hangs, so it is noticed


@dataclass
class Mutant:
    """One change of one line: what stood there, what stands there instead."""

    room: str
    path: str
    line: int
    scope: str
    kind: str
    before: str
    after: str
    last: int = 0  # the last line of what is replaced, if more than one
    nth: int = 0  # which of the equal lines of this scope
    verdict: str = ""
    by: str = ""
    key: str = field(default="")

    def __post_init__(self) -> None:
        self.last = self.last or self.line
        self.key = self.key or f"{self.scope}|{self.before.strip()}|{self.after.strip()}|{self.nth}"


# ---------------------------------------------------------------- drawing
def scopes(text: str) -> list[str]:
    """For each line the name of the innermost function or class that it lies in."""
    found: list[str] = []
    stack: list[tuple[int, str]] = []
    for line in text.splitlines():
        depth = len(line) - len(line.lstrip())
        if line.strip() and not line.lstrip().startswith((")", "#")):
            while stack and depth <= stack[-1][0]:
                stack.pop()
        heading = re.match(
            r"\s*(?:async def|def|cdef class|class|c?p?def(?:\s+[\w*\[\]:, ]+?)?)\s+(\w+)\s*[(:]",
            line,
        )
        if heading:
            stack.append((depth, heading[1]))
        found.append(".".join(name for _, name in stack[-2:]))
    return found


def python_changes(text: str) -> Iterator[tuple[int, int, str, str, str]]:
    """(first line, last line, kind, new text, old text) of each possible change."""
    lines = text.splitlines()
    tree = ast.parse(text)
    skipped: set[int] = set()
    for node in ast.walk(tree):
        # Annotations and defaults of signatures say what is documented, not what is done.
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            skipped.update(
                id(n) for part in [node.args, node.returns] if part for n in ast.walk(part)
            )
        if isinstance(node, ast.AnnAssign):
            skipped.update(id(n) for n in ast.walk(node.annotation))

    def swapped(
        left: ast.expr, right: ast.expr, kind: str
    ) -> Iterator[tuple[int, int, str, str, str]]:
        if left.end_lineno != right.lineno:
            return
        line = lines[right.lineno - 1]
        encoded = line.encode()
        between = encoded[left.end_col_offset : right.col_offset].decode()
        old = between.strip(" ()")
        if old in SWAPS:
            new = encoded[: left.end_col_offset].decode() + between.replace(old, SWAPS[old], 1)
            yield right.lineno, right.lineno, kind, new + encoded[right.col_offset :].decode(), line

    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from swapped(node.left, node.comparators[0], "comparison")
        elif isinstance(node, ast.BinOp) and isinstance(
            node.op, ast.Add | ast.Sub | ast.Mult | ast.FloorDiv
        ):
            yield from swapped(node.left, node.right, "operator")
        elif isinstance(node, ast.BoolOp):
            yield from swapped(node.values[0], node.values[1], "condition")
        elif (
            isinstance(node, ast.Constant)
            and type(node.value) is int
            and node.lineno == node.end_lineno
        ):
            line = lines[node.lineno - 1].encode()
            new = (
                line[: node.col_offset] + str(node.value + 1).encode() + line[node.end_col_offset :]
            )
            yield node.lineno, node.lineno, "bound", new.decode(), lines[node.lineno - 1]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            line = lines[node.lineno - 1].encode()
            if node.lineno == node.operand.lineno:
                new = line[: node.col_offset] + line[node.operand.col_offset :]
                yield node.lineno, node.lineno, "sign", new.decode(), lines[node.lineno - 1]
        elif isinstance(node, ast.Expr | ast.Assign | ast.AugAssign | ast.Raise):
            if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call | ast.Await):
                continue  # a docstring
            if node.col_offset == 0 or ";" in lines[node.lineno - 1]:
                continue
            old = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            indent = lines[node.lineno - 1][: node.col_offset]
            if indent.strip():
                continue
            yield node.lineno, node.end_lineno or node.lineno, "statement", indent + "pass", old


def cython_changes(text: str) -> Iterator[tuple[int, int, str, str, str]]:
    """As python_changes, by patterns: Cython has no parser of statements that keeps places."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        quotes = line.count('"""')
        if inside or quotes:
            inside ^= quotes % 2 == 1
            continue
        code = line.split("#")[0].rstrip()
        if not code.startswith(" ") or re.match(
            r"\s*(cdef|cpdef|def|from|cimport|import|@)\b", code
        ):
            continue
        if '"' in code or "'" in code:
            continue
        for match in re.finditer(r" (<=|>=|==|!=|<|>|\+|-|\*|//|and|or) ", code):
            kind = {"and": "condition", "or": "condition"}.get(match[1], "")
            kind = kind or ("operator" if match[1] in "+-*//" else "comparison")
            new = code[: match.start(1)] + SWAPS[match[1]] + code[match.end(1) :]
            yield number, number, kind, new, line
        for match in re.finditer(r"(?<![\w.\[])(\d+)(?![\w.])", code):
            new = code[: match.start()] + str(int(match[1]) + 1) + code[match.end() :]
            yield number, number, "bound", new, line
        for match in re.finditer(r"\bnot ", code):
            yield number, number, "sign", code[: match.start()] + code[match.end() :], line
        whole = code.count("(") == code.count(")") and code.count("[") == code.count("]")
        if whole and re.match(r"\s+[\w.]+(\[[^=]*\])?\s*([+*|&-]?=[^=]|\()", code):
            yield number, number, "statement", code[: len(code) - len(code.lstrip())] + "pass", line


def candidates(room: str, suffix: str) -> list[Mutant]:
    found = []
    for folder in ROOMS[room]:
        for path in sorted((ROOT / folder).rglob(f"*{suffix}")):
            text = path.read_text()
            around = scopes(text)
            changes = cython_changes(text) if suffix == ".pyx" else python_changes(text)
            seen: collections.Counter[tuple[str, str, str]] = collections.Counter()
            for first, last, kind, after, before in changes:
                if after == before:
                    continue
                scope = around[first - 1]
                same = (scope, before.strip(), after.strip())
                found.append(
                    Mutant(
                        room,
                        str(path.relative_to(ROOT)),
                        first,
                        scope,
                        kind,
                        before,
                        after,
                        last=last,
                        nth=seen[same],
                    )
                )
                seen[same] += 1
    return found


def make(seed: int, count: int, compiled: int) -> list[Mutant]:
    """`count` mutants over all rooms, `compiled` of them in .pyx files; kinds take turns."""
    source = random.Random(seed)
    drawn: list[Mutant] = []
    for suffix, wanted in ((".pyx", compiled), (".py", count - compiled)):
        pools = {room: candidates(room, suffix) for room in ROOMS}
        rooms = [room for room, pool in pools.items() if len(pool) > 20]
        taken: set[tuple[str, int]] = set()
        while wanted:
            for room in rooms:
                kinds = sorted({m.kind for m in pools[room]})
                kind = source.choice(kinds)
                mutant = source.choice([m for m in pools[room] if m.kind == kind])
                if wanted and (mutant.path, mutant.line) not in taken:
                    taken.add((mutant.path, mutant.line))
                    drawn.append(mutant)
                    wanted -= 1
    return drawn


# ---------------------------------------------------------------- running
def place(mutant: Mutant, tree: Path) -> tuple[Path, int] | None:
    """The file and the line (from 0) where this mutant's text stands now."""
    wanted = mutant.before.splitlines()
    suffix = Path(mutant.path).suffix
    own = tree / mutant.path
    others = [
        p for folder in ROOMS[mutant.room] for p in sorted((tree / folder).rglob(f"*{suffix}"))
    ]
    anywhere = sorted((tree / "kvcore").rglob(f"*{suffix}"))
    for paths in ([own] if own.exists() else [], others, anywhere):
        for path in paths:
            text = path.read_text()
            lines, around = text.splitlines(), scopes(text)
            places = [
                i
                for i in range(len(lines) - len(wanted) + 1)
                if [x.strip() for x in lines[i : i + len(wanted)]] == [x.strip() for x in wanted]
                and around[i].split(".")[-1] == mutant.scope.split(".")[-1]
            ]
            if places:
                nearest = min(places, key=lambda i: abs(i + 1 - mutant.line))
                return path, places[mutant.nth] if mutant.nth < len(places) else nearest
    return None


def judge(mutant: Mutant, tree: Path, python: str, patience: int = PATIENCE) -> Mutant:
    """Apply one mutant in its own copy of the tree, build, run its room's tests, take it back."""
    found = place(mutant, tree)
    if found is None:
        mutant.verdict = "gone"
        return mutant
    path, start = found
    original = path.read_text()
    lines = original.splitlines()
    indent = lines[start][: len(lines[start]) - len(lines[start].lstrip())]
    lines[start : start + len(mutant.before.splitlines())] = [indent + mutant.after.strip()]
    path.write_text("\n".join(lines) + "\n")
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)}
    environment["HYPOTHESIS_PROFILE"] = "brief"
    build = [python, "setup.py", "-q", "build_ext", "--inplace"]
    compiled = path.suffix == ".pyx"
    try:
        if compiled:
            built = subprocess.run(build, cwd=tree, capture_output=True, text=True, env=environment)
            if built.returncode:
                mutant.verdict, mutant.by = "noticed", "the compiler"
                return mutant
        tests = [t for t in TESTS[mutant.room] if t.startswith("--") or (tree / t).exists()]
        command = [
            python,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-o",
            f"timeout={patience // 8}",
            "-o",
            "timeout_method=thread",  # the other one waits for compiled code to return
        ]
        try:
            done = subprocess.run(
                [*command, *tests], cwd=tree, capture_output=True, text=True, timeout=patience,
                env=environment,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            mutant.verdict, mutant.by = "noticed", "no end"
            return mutant
        mutant.verdict = "noticed" if done.returncode else "missed"
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        mutant.by = failed[0] if failed else f"status {done.returncode}" if done.returncode else ""
        return mutant
    finally:
        path.write_text(original)
        if compiled:
            subprocess.run(build, cwd=tree, capture_output=True, env=environment)


def copied_tree(folder: Path) -> Path:
    """A copy of the working tree with its build products."""
    return Path(
        shutil.copytree(
            ROOT, folder, ignore=shutil.ignore_patterns(".git", ".venv*", ".hypothesis", "dist"),
            copy_function=shutil.copy2, symlinks=True,
        )
    )  # fmt: skip


def run(mutants: list[Mutant], out: Path, jobs: int, patience: int = PATIENCE) -> None:
    done = (
        {json.loads(line)["key"] for line in out.read_text().splitlines()}
        if out.exists()
        else set()
    )
    waiting = [m for m in mutants if m.key not in done]
    with tempfile.TemporaryDirectory(prefix="kvcore-mutants-") as scratch:
        trees = [copied_tree(Path(scratch) / f"tree{i}") for i in range(jobs)]
        free = list(trees)

        def one(mutant: Mutant) -> Mutant:
            tree = free.pop()
            try:
                return judge(mutant, tree, sys.executable, patience)
            finally:
                free.append(tree)

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool, out.open("a") as file:
            for number, mutant in enumerate(pool.map(one, waiting), 1):
                file.write(json.dumps(asdict(mutant)) + "\n")
                file.flush()
                where = f"{mutant.path}:{mutant.line} {mutant.kind}"
                print(f"{number}/{len(waiting)} {mutant.verdict:8} {where} {mutant.by}", flush=True)


def load(path: Path) -> dict[str, Mutant]:
    return {
        m.key: m for m in (Mutant(**json.loads(line)) for line in path.read_text().splitlines())
    }


def table(results: dict[str, Mutant]) -> str:
    rows = collections.Counter((m.room, m.verdict) for m in results.values())
    verdicts = ("noticed", "missed", "gone")
    lines = [f"{'room':10}" + "".join(f"{v:>9}" for v in verdicts)]
    lines += [f"{room:10}" + "".join(f"{rows[room, v]:9}" for v in verdicts) for room in ROOMS]
    lines += [f"{'all':10}" + "".join(f"{sum(rows[r, v] for r in ROOMS):9}" for v in verdicts)]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    making = verbs.add_parser("make", help="draw mutants")
    making.add_argument("mutants", type=Path)
    making.add_argument("--seed", type=int, default=1)
    making.add_argument("--count", type=int, default=200)
    making.add_argument("--compiled", type=int, default=50, help="how many of them in .pyx files")
    running = verbs.add_parser("run", help="see which are noticed")
    running.add_argument("mutants", type=Path)
    running.add_argument("results", type=Path)
    running.add_argument("--jobs", type=int, default=1)
    running.add_argument(
        "--patience",
        type=int,
        default=PATIENCE,
        metavar="SECONDS",
        help="for the tests of one mutant; a longer time is wanted on a busy machine",
    )
    comparing = verbs.add_parser("compare", help="what was noticed before and is not any more")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.verb == "make":
        drawn = make(options.seed, options.count, options.compiled)
        options.mutants.write_text(json.dumps([asdict(m) for m in drawn], indent=1))
        print(f"{len(drawn)} mutants in {len({m.path for m in drawn})} files")
        return 0
    if options.verb == "run":
        run(
            [Mutant(**m) for m in json.loads(options.mutants.read_text())],
            options.results,
            options.jobs,
            options.patience,
        )
        print(table(load(options.results)))
        return 0
    before, after = load(options.before), load(options.after)
    print("before\n" + table(before) + "\n\nafter\n" + table(after))
    lost = [
        m
        for k, m in before.items()
        if m.verdict == "noticed" and k in after and after[k].verdict == "missed"
    ]
    for mutant in lost:
        print(
            f"lost: {mutant.path}:{mutant.line} {mutant.before.strip()} -> {mutant.after.strip()}"
        )
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
