# SPDX-License-Identifier: Apache-2.0
"""Every block of Python and shell in the documents runs, or says what it needs.

The blocks of a page run one after the other, in a folder of their own; Python in one namespace.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from document_blocks import ROOT, RUN_BY, Block, blocks_of, documents, main
from tensors import WITHOUT_TORCH

#: What a block may need that this run may have: the module that it is found by.
OPTIONAL = {"torch": "torch"}


def may_run(block: Block) -> bool:
    module = OPTIONAL.get(block.needs)
    return not block.needs or (module is not None and importlib.util.find_spec(module) is not None)


def to_run(page: Path) -> list[Block]:
    elsewhere = str(page.relative_to(ROOT)) in RUN_BY
    return [
        block
        for block in blocks_of(page)
        if not (block.language == "python" and elsewhere) and may_run(block)
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.name) for page in documents() if to_run(page)],
)
def test_blocks_run(page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, object] = {"__name__": page.stem}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    for block in to_run(page):
        if block.language == "python":
            exec(compile(block.text, str(block), "exec"), scope)
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=tmp_path, env=env, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
    if page.name == "first_hour.md":
        said = capsys.readouterr().out
        shown = re.search(r"^```text\n(RAW.*?)$", page.read_text(), re.MULTILINE)
        assert shown
        assert places_left_out(said.strip()) == places_left_out(shown[1])


def places_left_out(report: str) -> str:
    return re.sub(r"\([^ ()]*:\d+\)", "(place)", report)


def test_what_another_test_runs_is_there() -> None:
    for page, test in RUN_BY.items():
        assert any(block.language == "python" for block in blocks_of(ROOT / page))
        assert (ROOT / page).name in (ROOT / test).read_text(encoding="utf-8")


def test_the_list_of_what_needs_more(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    said = capsys.readouterr().out
    assert re.search(r"^docs/first_hour\.md:\d+ +needs a network: python3 -m venv", said, re.M)
    assert re.search(r"^\d+ blocks, \d+ of them need", said, re.M)


def test_a_drop_in_that_needs_torch_is_not_run_without_it() -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip(WITHOUT_TORCH)
    (block,) = [b for b in blocks_of(ROOT / "docs/first_hour.md") if b.needs == "torch"]
    assert may_run(block)
