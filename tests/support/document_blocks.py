# SPDX-License-Identifier: Apache-2.0
"""The blocks of Python and shell in the documents, and why some of them are not run.

A block that no test can run has a comment above it: ``<!-- needs: a network -->``.  The list:

    python tests/support/document_blocks.py
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Pages with tests of their own for their Python, since what they print is looked at too.
RUN_BY = {
    "README.md": "tests/project/test_readme.py",
    "docs/gather.md": "tests/project/test_documents.py",
    "docs/runtime.md": "tests/project/test_documents.py",
    "docs/soc.md": "tests/project/test_documents.py",
    "docs/offload.md": "tests/offload/test_offload_documents.py",
    "docs/replay.md": "tests/replay/test_replay_documents.py",
    "docs/torch.md": "tests/kvcore_torch/test_torch_page.py",
}
FENCE = re.compile(
    r"(?:<!-- needs: (?P<needs>[^\n]+?) -->\n+)?^```(?P<language>python|sh)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One block: the page, the line on which it begins, what it is in, its text, what it needs."""

    page: str
    line: int
    language: str
    text: str
    needs: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def documents() -> list[Path]:
    """The documents whose blocks are run; those in Chinese have the same ones."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page for page in pages if page.is_file()]


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    name = str(page.relative_to(ROOT))
    return [
        Block(
            name,
            text[: found.start("text")].count("\n"),
            found["language"],
            found["text"],
            found["needs"] or "",
        )
        for found in FENCE.finditer(text)
    ]


def main() -> None:
    found = [block for page in documents() for block in blocks_of(page)]
    left = [block for block in found if block.needs]
    for block in left:
        first = block.text.splitlines()[0]
        print(f"{block!s:28} needs {block.needs}: {first[:60]}")
    print(f"{len(found)} blocks, {len(left)} of them need what a test may not have")


if __name__ == "__main__":
    main()
