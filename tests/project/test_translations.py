# SPDX-License-Identifier: Apache-2.0
"""The Chinese pages have the headings and blocks of the English ones, and say their versions."""

from __future__ import annotations

import re

import pytest

from translations import PAGES, ROOT, Section, lagging, sections


@pytest.mark.parametrize("chinese", PAGES)
def test_headings_and_blocks_are_those_of_the_english_page(chinese: str) -> None:
    own, english = sections(ROOT / chinese), sections(ROOT / PAGES[chinese])
    assert [one.level for one in own] == [one.level for one in english]
    for mine, theirs in zip(own, english, strict=True):
        assert mine.blocks == theirs.blocks, f"the blocks below {theirs.title!r}"
        assert mine.translates, f"no hash below {theirs.title!r}"
        assert re.search(r"[\u4e00-\u9fff]", mine.text), f"not translated: {theirs.title!r}"


@pytest.mark.parametrize("chinese", PAGES)
def test_no_section_lags(chinese: str) -> None:
    """Translate what changed, then ``python tests/support/translations.py --write``."""
    assert lagging(chinese) == []


def test_a_change_of_words_is_seen_and_one_of_line_breaks_is_not() -> None:
    text = "## A\n\nOne two\nthree.\n"
    same = Section(2, "A", text.replace("two\nthree", "two three"))
    assert Section(2, "A", text).hash == same.hash
    assert Section(2, "A", text.replace("two", "2")).hash != same.hash
    assert Section(2, "A", "## 甲\n\n<!-- en: 12ab -->\n").translates == "12ab"
    assert Section(2, "A", "## 甲\n").translates is None
