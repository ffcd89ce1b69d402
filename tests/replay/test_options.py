# SPDX-License-Identifier: Apache-2.0
"""Options of a replay are declared once: parser, sweep, checks and page follow from it."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvcore.cli.commands.replay.parsing import add_options, settle
from kvcore.cli.parser import Parser
from kvcore.errors import ParamInvalidError
from kvcore.replay import options

PAGE = Path(__file__).parents[2] / "docs" / "replay.md"
MARKS = "<!-- options: written by python -m kvcore.replay.options -->\n", "<!-- end of options -->"


def parsed(*words: str) -> argparse.Namespace:
    parser = Parser()
    add_options(parser)
    namespace = parser.parse_args(words)
    settle(namespace)
    return namespace


def test_the_page_has_the_table_of_the_declarations() -> None:
    table = PAGE.read_text().partition(MARKS[0])[2].partition(MARKS[1])[0]
    again = "write it anew: python -m kvcore.replay.options"
    assert table.strip() == options.options_page(), again


def test_what_is_not_written_has_the_declared_default() -> None:
    nothing = parsed()
    assert nothing.written == []
    for name, declared in options.options_of():
        if declared.written:
            assert getattr(nothing, name) == options.default_of(name), name
    # The same defaults as a replay's from Python.
    for one in fields(options.OffloadOptions):
        assert getattr(options.OffloadOptions(), one.name) == options.default_of(one.name)
    some = parsed("trace.jsonl", "--pool", "8192", "--max-batch", "5", "--accept", "0.5")
    assert some.written == ["trace", "pool", "batch", "accept"]
    assert (some.trace, some.pool, some.batch, some.accept) == ("trace.jsonl", 8192, 5, 0.5)


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("batch", [0, 4097, 2.0, True, "4", None], [1, 4096]),
        ("seed", [-1, 2**64, 1.0], [0, 2**64 - 1]),
        ("accept", [-0.1, 1.1, float("nan"), True, "1", None], [0, 1, 0.5]),
        ("pool", [0, 2**28, 1.5], [None, 1]),
        ("prefill_tokens_per_s", [0, float("inf"), "3", True], [None, 1, 3344.0]),
        ("fidelity", ["half", 3, None, ["full"]], ["full", "sampled"]),
        ("policy", ["mru", b"lru", None], ["previous", "lru", "fifo", "arc"]),
        ("device", [3, True], [None, "A3", "mine.toml"]),
    ],
)
def test_values_are_checked_as_declared(name: str, wrong: list[Any], right: list[Any]) -> None:
    for value in right:
        options.OffloadOptions(**{name: value}).check_values()
    for value in wrong:
        with pytest.raises(ParamInvalidError, match=rf"^{name}: expected .*, got "):
            options.OffloadOptions(**{name: value}).check_values()


def test_a_number_is_shown_as_it_is_declared() -> None:
    with pytest.raises(ParamInvalidError, match=r"^seed: expected an integer from 0 to 1844674407"):
        options.OffloadOptions(seed=-1).check_values()


def test_axes_are_read_by_their_kind() -> None:
    found = options.axes()
    assert set(found) == {
        "policy", "pool", "batch", "drafts", "device", "write_policy", "seed", "sample_seed",
        "tier_policy", "node_dies",
    }  # fmt: skip
    assert found["pool"].parse("8192") == 8192
    assert found["policy"].parse("lru") == "lru"
    with pytest.raises(ValueError, match="invalid literal"):
        found["pool"].parse("many")


def test_the_declarations_need_nothing_but_errors() -> None:
    """The command line starts with them."""
    source = Path(options.__file__).read_text()
    imports = re.findall(r"^\s*(?:from|import) (\S+)", source, re.MULTILINE)
    own = [name for name in imports if name.startswith("kvcore")]
    assert own == ["kvcore.errors"]
    assert {name.partition(".")[0] for name in imports} - {"kvcore"} <= sys.stdlib_module_names
    program = "import sys, kvcore.errors; before = set(sys.modules); import kvcore.replay.options\n"
    program += "print(*sorted(m for m in set(sys.modules) - before if m.startswith('kvcore')))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["kvcore.replay", "kvcore.replay.options"], done.stderr
