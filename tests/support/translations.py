# SPDX-License-Identifier: Apache-2.0
"""The Chinese pages and the English sections that they translate.

A Chinese page has the headings of its English page, in the same order, each with the same blocks
of code below it, and below each the hash of the English section: ``<!-- en: 1a2b3c4d5e6f -->``.

    python tests/support/translations.py            # sections that lag
    python tests/support/translations.py --write    # after they were brought up to date
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Chinese page to English page.
PAGES = {
    "docs/zh/README.md": "README.md",
    "docs/zh/first_hour.md": "docs/first_hour.md",
    "docs/zh/how_to.md": "docs/how_to.md",
}
MARK = re.compile(r"^<!-- en: (\w+) -->$", re.MULTILINE)
BLOCK = re.compile(r"^```\w*\n.*?^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Section:
    """A heading and what is below it, up to the next heading of any level."""

    level: int
    title: str
    text: str

    @property
    def blocks(self) -> list[str]:
        return BLOCK.findall(self.text)

    @property
    def hash(self) -> str:
        """Of the words, not of how their lines are broken."""
        return sha256(" ".join(self.text.split()).encode()).hexdigest()[:12]

    @property
    def translates(self) -> str | None:
        """The hash that a Chinese section carries."""
        found = MARK.search(self.text)
        return None if found is None else found[1]


def sections(path: Path) -> list[Section]:
    text = path.read_text(encoding="utf-8")
    inside = [range(*found.span()) for found in BLOCK.finditer(text)]
    heads = [
        found
        for found in re.finditer(r"^(#+) (.+)$", text, re.MULTILINE)
        if not any(found.start() in block for block in inside)
    ]
    ends = [found.start() for found in heads[1:]] + [len(text)]
    return [
        Section(len(head[1]), head[2], text[head.start() : end])
        for head, end in zip(heads, ends, strict=True)
    ]


def lagging(chinese: str) -> list[str]:
    """English titles of the sections whose text has changed since they were translated."""
    pairs = zip(sections(ROOT / chinese), sections(ROOT / PAGES[chinese]), strict=True)
    return [english.title for own, english in pairs if own.translates != english.hash]


def write(chinese: str) -> None:
    """Put the present hashes under the headings."""
    made = []
    for own, english in zip(sections(ROOT / chinese), sections(ROOT / PAGES[chinese]), strict=True):
        head, _, rest = MARK.sub("", own.text).partition("\n")
        made.append(f"{head}\n\n<!-- en: {english.hash} -->\n\n{rest.strip()}\n")
    (ROOT / chinese).write_text("\n".join(made), encoding="utf-8")


def main() -> None:
    for page in PAGES:
        if "--write" in sys.argv:
            write(page)
        for title in lagging(page):
            print(f"{page}: behind {PAGES[page]}, {title!r}")


if __name__ == "__main__":
    main()
