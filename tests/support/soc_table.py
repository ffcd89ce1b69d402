# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/soc.md: scenario x dtype x SoC from the package's own answers, and the
machines' limits and quirks from the tables of kvcore.soc.

``python tests/support/soc_table.py`` writes it into the page; a test compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import kvcore
from kvcore.errors import ParamInvalidError
from kvcore.soc import printing
from kvcore.soc.types import printed_types
from soc_calls import ALL, NAMES, VARIANTS, arguments

PAGE = Path(__file__).parents[2] / "docs" / "soc.md"
HEADS = {"1": "1 PA_NZ", "2": "2 None", "4": "4 Alibi", "6": "6 None", "7": "7 NHSD"}
T = TypeVar("T")
Cell = tuple[str, str]  # yes, warned or no; and why


def cell(soc: str, variant: str, dtype: str) -> Cell:
    """The answer for a usual call: 4 tokens, 2 heads of 32, int32 indices."""
    call = arguments(variant, dtype)
    if variant.endswith("Nct"):
        # Keys and values in one fused buffer of queries, keys and values, as clients pass them.
        call |= {"strides": (192, 192), "offsets": (64, 128)}
    try:
        scenario = kvcore.scenario_of(**call)
    except ParamInvalidError as error:
        return "no", f"on every machine, {error}".rpartition(", got ")[0]
    reason = scenario.runs[soc]
    if reason is not None:
        return "no", reason.rpartition(", got ")[0]
    texts = [text.partition(": ")[2] for text in scenario.warnings.get(soc, ())]
    return ("warned", "; ".join(texts)) if texts else ("yes", "")


def part(names: tuple[str, ...]) -> str:
    """One table, for SoCs that answer alike."""
    notes: dict[str, int] = {}
    rows = []
    for dtype in ALL:
        row = [dtype]
        for variant in VARIANTS:
            answer, why = cell(names[0], variant, dtype)
            for other in names[1:]:
                alike = cell(other, variant, dtype)
                assert (alike[0], alike[1].replace(other, names[0])) == (answer, why)
            why = why.replace(f" on {names[0]}", f" on {' and '.join(names)}")
            row.append(f"{answer} {notes.setdefault(why, len(notes) + 1)}" if why else answer)
        rows.append(row)
    head = ["dtype", *(HEADS.get(variant, variant) for variant in VARIANTS)]
    table = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    reasons = [f"{number}. {why}" for why, number in notes.items()]
    return "\n".join([f"### {' and '.join(names)}", "", *table, "", *reasons, ""])


def answers() -> str:
    """What each machine says of a usual call."""
    assert set(NAMES) == {"A2", "A3", "950"}
    return part(("A2", "A3")) + "\n" + part(("950",))


def alike(of: Callable[[Any], T]) -> dict[str, T]:
    """What a function says of each profile, by the names of those of which it says the same."""
    found: dict[str, T] = {}
    for name, soc in kvcore.soc.PROFILES.items():
        said = of(soc.profile)
        same = next((names for names, other in found.items() if other == said), None)
        if same is None:
            found[name] = said
        else:
            found = {f"{k}, {name}" if k == same else k: v for k, v in found.items()}
    return found


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines) + "\n"


def limits() -> str:
    """Limits of the scatters; the scenarios they are for may differ by machine."""
    found = alike(lambda profile: profile.scatter.limits())
    texts = list(dict.fromkeys(text for rows in found.values() for _, text in rows))
    rows = []
    for text in texts:
        cells = [", ".join(s for s, one in said if one == text) or "-" for said in found.values()]
        rows.append([text, *cells])
    only = alike(lambda profile: (profile.scatter.key_only, profile.scatter.key_alone))
    assert list(only) == list(found)
    cells = []
    for here, alone in only.values():
        parts = [f"{row.scenario} ({printed_types(row.dtypes)})" for row in alone]
        there = ["`scatter_pa_cache`: " + ", ".join(parts)] if alone else []
        cells.append("; ".join([", ".join(map(str, here))] * bool(here) + there) or "-")
    rows.append(["key only", *cells])
    return table(["limit, in scenario", *found], rows)


def quirks() -> str:
    """What the machines' kernels do beyond their documents."""
    rows = [
        [names, where, text]
        for names, found in alike(printing.quirks).items()
        for where, text in found
    ]
    return table(["machine", "scenario or operator", "what it does"], rows)


def operators() -> str:
    """What the machines accept of the other operators."""
    rows = []
    for operator, name in (
        ("KVCacheOperation", "update"),
        ("GatherPaKvCache", "gather"),
        ("GatherSelectionKvCache", "selection"),
    ):
        said = alike(lambda p, n=name: p and (t := getattr(p, n)) and t.sentence())  # type: ignore[misc]
        rows += [[operator, names, text or "not supported"] for names, text in said.items()]
    return table(["operator", "machine", "accepted"], rows)


def products() -> str:
    """Product names."""
    rows = []
    for name, soc in kvcore.soc.PROFILES.items():
        pattern = soc.profile.pattern.replace("|", "\\|")
        rows.append([name, soc.profile.product, str(soc.profile.arch), f"`{pattern}`"])
    return table(["SoC", "product", "NpuArch", "aclrtGetSocName matches"], rows)


PARTS = {f.__name__: f for f in (answers, limits, quirks, operators, products)}


def split(page: str, name: str) -> tuple[str, str, str]:
    """(before, generated, after) of one part of the page."""
    begin = f"<!-- {name}: generated by tests/support/soc_table.py -->\n"
    before, found, rest = page.partition(begin)
    assert found, name
    end = f"<!-- end of {name} -->\n"
    middle, found, after = rest.partition(end)
    assert found, name
    return before + begin, middle, end + after


if __name__ == "__main__":
    page = PAGE.read_text()
    for name, make in PARTS.items():
        before, _, after = split(page, name)
        page = f"{before}\n{make()}\n{after}"
    PAGE.write_text(page)
