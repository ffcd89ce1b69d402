# SPDX-License-Identifier: Apache-2.0
"""A machine's tables as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcore.soc.profiles import Profile
from kvcore.soc.scatter import SCENARIOS, Accepted
from kvcore.soc.types import printed_types

__all__ = ["EVERYWHERE", "lines", "quirks"]

_RULES = {"rows": "mode None", "Nct": "Nct", "Alibi": "Alibi", "Rope": "Rope", "Omni": "Omni"}

#: Warned of on every machine.
EVERYWHERE = (
    ("all", "repeated slots are forbidden by the documents: which token they hold is open"),
    ("3, 4, Alibi", "the documents bound the sum of seq_lens - compress_lens by the slots"),
)


def quirks(profile: Profile) -> list[tuple[str, str]]:
    """(scenario or operator, what the kernels do beyond their documents)."""
    found = profile.scatter.quirks()
    for operator, table in (
        ("GatherPaKvCache", profile.gather),
        ("GatherSelectionKvCache", profile.selection),
        ("KVCacheOperation", profile.update),
    ):
        found += [(operator, text) for text in (table.quirks() if table is not None else ())]
    if profile.update is not None:
        found.append(("ATB through torch", "int64 slots, tables and lengths are not theirs"))
    return found


def lines(name: str, profile: Profile) -> Iterator[str]:
    """Everything that a profile says."""
    yield (
        f"{name}: {profile.product}, NpuArch {profile.arch}, "
        f"product names matching {profile.pattern}"
    )
    scatter = profile.scatter
    yield from _scenarios("ScatterPaKvCache", scatter.key_value)
    only = ", ".join(map(str, scatter.key_only))
    yield "  key only: " + (f"scenario {only}" if only else "not in this operator")
    yield from _columns([("scenario", "limit"), *scatter.limits()])
    yield from _scenarios("ScatterPaCache", scatter.key_alone)
    for operator, table in (
        ("KVCacheOperation", profile.update),
        ("GatherPaKvCache", profile.gather),
        ("GatherSelectionKvCache", profile.selection),
    ):
        yield f"{operator}: " + ("not supported" if table is None else table.sentence())
    yield "Warned of:"
    yield from _columns([("scenario", "what the machine does"), *EVERYWHERE, *quirks(profile)])
    yield "Sources:"
    yield from (f"  {source}" for source in profile.sources)


def _scenarios(operator: str, accepted: tuple[Accepted, ...]) -> Iterator[str]:
    if not accepted:
        yield f"{operator}: not supported"
        return
    yield f"{operator}:"
    rows = [("scenario", "what", "modes", "dtypes")]
    for row in accepted:
        modes = "-" if row.scenario in (1, 7) else ", ".join(_RULES[rule] for rule in row.rules)
        what = SCENARIOS[row.scenario]
        rows.append((str(row.scenario), what, modes, printed_types(row.dtypes)))
    yield from _columns(rows)


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
