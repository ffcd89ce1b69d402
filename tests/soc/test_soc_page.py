# SPDX-License-Identifier: Apache-2.0
"""docs/soc.md says what the package says."""

from __future__ import annotations

import re

import kvcore
import soc_table


def test_the_table_is_what_the_package_answers() -> None:
    page = soc_table.PAGE.read_text()
    _, written, _ = soc_table.split(page)
    again = "write it anew: python tests/support/soc_table.py"
    assert written.strip() == soc_table.generated().strip(), again


def test_the_example_prints_what_the_page_says() -> None:
    page = soc_table.PAGE.read_text()
    example = re.search(r">>> print\((kvcore[^`]*?)\)\n(scenario 6\n[^`]*)```", page)
    assert example is not None
    call = example[1].replace("\n...", "\n")
    assert str(eval(call, {"kvcore": kvcore})) == example[2].strip()


def test_limits_of_the_page_are_those_of_the_profiles() -> None:
    page = soc_table.PAGE.read_text()
    for name in ("A2", "A3"):
        profile = kvcore.SoC(name).profile
        assert profile.nhsd_heads is not None
        assert profile.nhsd_token_bytes is not None
        assert f"| 1 | block size | < {profile.nz_block_size + 1} |" in page
        assert f"| 7 | heads | < {profile.nhsd_heads + 1} |" in page
        token = f"| 7 | bytes of a token's key and value | < {profile.nhsd_token_bytes + 1} |"
        assert token in page
        assert f"may have {profile.nhsd_tiling_bytes} bytes only" in page
        assert f"head sizes up to {profile.mean_head_size}" in page
        assert f"a multiple of 32, <= {profile.update_token_bytes}" in page
