# SPDX-License-Identifier: Apache-2.0
"""docs/soc.md says what the package says."""

from __future__ import annotations

import re

import pytest

import kvcore
import soc_table


@pytest.mark.parametrize("name", soc_table.PARTS)
def test_the_tables_are_what_the_package_says(name: str) -> None:
    _, written, _ = soc_table.split(soc_table.PAGE.read_text(), name)
    again = "write it anew: python tests/support/soc_table.py"
    assert written.strip() == soc_table.PARTS[name]().strip(), again


def test_the_example_prints_what_the_page_says() -> None:
    page = soc_table.PAGE.read_text()
    example = re.search(r">>> print\((kvcore[^`]*?)\)\n(scenario 6\n[^`]*)```", page)
    assert example is not None
    call = example[1].replace("\n...", "\n")
    assert str(eval(call, {"kvcore": kvcore})) == example[2].strip()
