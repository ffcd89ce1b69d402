# SPDX-License-Identifier: Apache-2.0
"""Links between the documents lead to files, and the Python of some pages runs as it stands."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

import kvcore

DOCS = Path(__file__).parents[2] / "docs"
LINKS = [
    (str(page.relative_to(DOCS)), link)
    for page in sorted(DOCS.rglob("*.md"))
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    if not link.startswith("http")
]


@pytest.mark.parametrize(("page", "link"), LINKS)
def test_links_lead_to_files(page: str, link: str) -> None:
    assert (DOCS / page).parent.joinpath(link).is_file()


@pytest.mark.parametrize("page", ["gather.md", "runtime.md", "soc.md"])
def test_each_block_of_python_is_a_whole_program(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        scope: dict[str, object] = {}
        if block.startswith(">>> "):
            test = doctest.DocTestParser().get_doctest(block, {"kvcore": kvcore}, page, page, 0)
            printed: list[str] = []
            doctest.DocTestRunner().run(test, out=printed.append)
            assert not printed, "".join(printed)
        else:
            exec(compile(block, f"docs/{page}", "exec"), scope)
        if page == "gather.md":
            assert scope["lengths"].tolist() == [4, 4]  # type: ignore[attr-defined]
