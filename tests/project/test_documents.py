# SPDX-License-Identifier: Apache-2.0
"""Links between the documents lead to files, and the Python of docs/gather.md runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
LINKS = [
    (page.name, link)
    for page in sorted(DOCS.glob("*.md"))
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    if not link.startswith("http")
]


@pytest.mark.parametrize(("page", "link"), LINKS)
def test_links_lead_to_files(page: str, link: str) -> None:
    assert (DOCS / link).is_file()


def test_the_python_of_the_gather_page_runs() -> None:
    text = (DOCS / "gather.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert blocks
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/gather.md", "exec"), scope)
    assert scope["lengths"].tolist() == [4, 4]  # type: ignore[attr-defined]
