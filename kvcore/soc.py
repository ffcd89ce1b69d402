# SPDX-License-Identifier: Apache-2.0
"""The hardware whose limits a call can be checked against, as data.

A SoC is a name; its Profile holds what the operators' rules read: scenarios, dtypes and limits.
The rules themselves stand beside the operators (kvcore/ops/soc_*.py).  A limit is the greatest
value that is accepted; None means that the operator, or the scenario, does not exist there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from kvcore.dtypes import DATA_DTYPES
from kvcore.errors import fail, shown

__all__ = [
    "A2",
    "A3",
    "A950",
    "PROFILES",
    "Accepted",
    "Profile",
    "SoC",
    "current",
    "from_product",
    "resolve",
    "use_soc",
]

ENVIRONMENT = "KVCORE_SOC"

_ALL = tuple(row.name for row in DATA_DTYPES)
_NO_FLOAT4 = tuple(row.name for row in DATA_DTYPES if not row.packed)
_NO_FLOAT8 = tuple(name for name in _NO_FLOAT4 if "float8" not in name)
_SHORT = ("float16", "bfloat16", "int8")
_HALF = ("float16", "bfloat16")

_PLAIN = ("rows",)
_ANY_ROWS = ("rows", "Nct")
_ALIBI = ("Alibi",)
_OFFSET = ("Rope", "Omni")

#: What the scenarios of ScatterPaKvCache are, for tables: operators.md has them in full.
SCENARIOS: dict[int, str] = {
    1: "PA_NZ cache",
    2: "Norm cache",
    3: "compression, 4-D key",
    4: "compression, 3-D key",
    5: "compression, 3-D key",
    6: "Norm cache, key only",
    7: "NHSD cache",
}


@dataclass(frozen=True, slots=True)
class Accepted:
    """One scenario that an operator has, under these rules, with these dtypes.

    rules: "rows" (a token to its slot), "Nct", "Alibi", "Rope", "Omni".
    """

    scenario: int
    rules: tuple[str, ...]
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """What one hardware generation accepts.

    product:      the vendor's words for it.
    names:        what aclrtGetSocName is known to return there.
    pattern:      regular expression that those names, and future ones, match.
    arch:         NpuArch (aclrtGetDeviceInfo, attribute 601).
    scatter_kv:   scenarios of ScatterPaKvCache.
    scatter_key:  scenarios of ScatterPaCache; empty: not there.
    key_only:     scenarios of ScatterPaKvCache without a value.
    update:       dtypes of KVCacheOperation; empty: not there.
    gathers:      what the gathers accept, as (operator, sentence); ops/soc_gather.py has the rules.
    The rest are limits, each the greatest value accepted:
    nz_block_size:      rows of a block in PA_NZ.
    nhsd_heads, nhsd_block_items (block_size * head size), nhsd_token_bytes (key and value of one
                        token): scenario 7; nhsd_tiling_bytes is what its tiling leaves of the last.
    mean_head_size:     head size of scenario 5 that the kernels can hold.
    update_token_bytes: bytes of a token of KVCacheOperation.
    quirks:       what the kernels do beyond their documents, as (where, what).
    sources:      where the facts are from.
    """

    product: str
    names: tuple[str, ...]
    pattern: str
    arch: int
    scatter_kv: tuple[Accepted, ...]
    scatter_key: tuple[Accepted, ...]
    key_only: tuple[int, ...]
    update: tuple[str, ...]
    gathers: tuple[tuple[str, str], ...]
    nz_block_size: int
    nhsd_heads: int | None
    nhsd_block_items: int | None
    nhsd_token_bytes: int | None
    nhsd_tiling_bytes: int | None
    mean_head_size: int | None
    update_token_bytes: int | None
    quirks: tuple[tuple[str, str], ...]
    sources: tuple[str, ...]


def _names(prefix: str, *ends: str | int) -> tuple[str, ...]:
    return tuple(f"{prefix}{end}" for end in ends)


def _a2_or_a3(product: str, names: tuple[str, ...], pattern: str) -> Profile:
    # One architecture and one set of kernels; only the product names differ.
    return Profile(
        product=product,
        names=names,
        pattern=pattern,
        arch=2201,
        scatter_kv=(
            Accepted(1, _PLAIN, _SHORT),
            Accepted(2, _ANY_ROWS, _SHORT),
            Accepted(4, _ALIBI, _SHORT),
            Accepted(5, _OFFSET, _HALF),
            Accepted(6, _ANY_ROWS, _SHORT),
            Accepted(7, _PLAIN, _HALF),
        ),
        scatter_key=(),
        key_only=(6,),
        update=("float16", "int8"),
        gathers=(
            (
                "GatherPaKvCache",
                "float16 bfloat16 int8; int32 indices; 4-D caches, key and value of one dtype; "
                "H * D * itemsize a multiple of 32 and <= 151552",
            ),
            (
                "GatherSelectionKvCache",
                "float16 bfloat16 int8 (int8 without rope); int32 indices; contiguous arrays; "
                "topk <= 2048, above 32 with blocks of one token; S <= 7; R <= 64; K <= 656; "
                "SB >= rows * SMAX",
            ),
        ),
        nz_block_size=65534,
        nhsd_heads=4094,
        nhsd_block_items=2**32 - 2,
        nhsd_token_bytes=196607,
        nhsd_tiling_bytes=195584,
        mean_head_size=16384,
        update_token_bytes=196608,
        quirks=(
            ("4, 5", "kernels assume equal head sizes, a multiple of 32, and int32 indices"),
            ("5", "kernels hold head sizes up to 16384"),
            ("4, 5, 7", "a negative slot writes in front of the cache"),
            ("7", "the tiling keeps 1 KiB: key and value of a token may have 195584 bytes"),
            (
                "1, 2, 6, mode None",
                "of strided views only the caches' first axis in scenario 2 is honoured",
            ),
            ("GatherPaKvCache", "seq_offset counts columns, not tokens, in PA_NZ"),
            ("GatherSelectionKvCache", "topk up to 32 needs S == 1; a row must fit 196608 bytes"),
            ("GatherSelectionKvCache", "topk up to 32 stops at the first negative id of a row"),
            ("GatherSelectionKvCache", "topk above 32 takes S for the number of new tokens"),
            ("GatherSelectionKvCache", "a row that sees no token is left as it was"),
            ("GatherSelectionKvCache", "held blocks with rewritten tokens are served as they are"),
            ("KVCacheOperation", "strided arrays are taken for contiguous"),
            ("ATB through torch", "int64 slots, tables and lengths are not theirs"),
        ),
        sources=(
            "CANN ops-transformer: aclnnScatterPaKvCache document; "
            "op_host/scatter_pa_kv_cache_tiling.cpp; op_kernel/scatter_pa_kv_cache_*.h",
            "ascend-transformer-boost: kvcache_operation.cpp, kvcache_kernel.cpp",
            "CANN runtime: platform_config file names (product names)",
        ),
    )


_TABLE: dict[str, Profile] = {
    "A2": _a2_or_a3(
        "Atlas A2",
        _names("Ascend910B", 1, 2, "2C", 3, 4, "4-1"),
        # A bare Ascend910B is the first 910, an older machine.
        r"^Ascend910B\d",
    ),
    "A3": _a2_or_a3(
        "Atlas A3",
        _names("Ascend910_", 9361, 9362, 9363, 9372, 9381, 9382, 9391, 9392),
        r"^Ascend910_93",
    ),
    "950": Profile(
        product="Ascend 950",
        names=_names("Ascend950PR_", "950z", 9579, "957b", "957bx", "957c", "957d")
        + _names("Ascend950PR_", 9589, "958b", 9599)
        + _names("Ascend950DT_", "950x", "950y", *range(9571, 9579), 9581, "9581x", 9582, "9582x")
        + _names("Ascend950DT_", *range(9583, 9589), 9591, 9592, 9595, 9596, "95A1", "95A2"),
        # Ascend910_95xx: what machines before its release say.
        pattern=r"^Ascend950|^Ascend910_95",
        arch=3510,
        scatter_kv=(
            Accepted(1, _PLAIN, _ALL),
            Accepted(2, _PLAIN, _ALL),
            Accepted(2, ("Nct",), _NO_FLOAT4),
            Accepted(3, _ALIBI + _OFFSET, _NO_FLOAT4),
            Accepted(4, _ALIBI, _NO_FLOAT4),
            Accepted(5, _OFFSET, _HALF),
        ),
        # Scenario 6 is scenario 2 with the key alone.
        scatter_key=(
            Accepted(6, _PLAIN, _ALL),
            Accepted(3, _ALIBI + _OFFSET, _NO_FLOAT8),
        ),
        key_only=(),
        update=(),
        gathers=(
            (
                "GatherPaKvCache",
                "all but float4; int32 or int64 indices; 4-D caches, key and value of one dtype "
                "but for a float8_e4m3fn key with a float16 or bfloat16 value",
            ),
            ("GatherSelectionKvCache", "not supported"),
        ),
        nz_block_size=65534,
        nhsd_heads=None,
        nhsd_block_items=None,
        nhsd_token_bytes=None,
        nhsd_tiling_bytes=None,
        mean_head_size=None,
        update_token_bytes=None,
        quirks=(
            ("4, 5", "the tiling of today refuses compression with 3-D keys"),
            ("3, 5, Rope and Omni", "compress_lens must be >= 1, compress_seq_offset >= 0"),
            ("3", "a negative slot skips single rows of a run, not the run"),
            ("2, Nct", "the tiling refuses T * stride + offset > (T-1) * H * D"),
            ("GatherPaKvCache", "rows of a block out of range are filled with zeros"),
        ),
        sources=(
            "CANN ops-transformer: aclnnScatterPaKvCache and aclnnScatterPaCache documents; "
            "op_host/scatter_pa_kv_cache_tiling_arch35.cpp; op_kernel/arch35",
            "CANN runtime: platform_config file names (product names)",
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class SoC:
    """One hardware generation by name: "A2", "A3" or "950".

    Equal names are equal.  str and print give its table, an f-string its name.
    ParamInvalidError for other names.
    """

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name not in _TABLE:
            fail("name", "one of " + ", ".join(map(repr, _TABLE)), _unknown(self.name))

    @property
    def profile(self) -> Profile:
        """What it accepts."""
        return _TABLE[self.name]

    def __repr__(self) -> str:
        return f"SoC({self.name!r})"

    def __str__(self) -> str:
        return "\n".join(_lines(self.name, self.profile))

    def __format__(self, spec: str) -> str:
        # Inside a sentence the name is meant: f"on {soc}".
        return format(self.name, spec)


#: Products that the documents name and on which they support none of the operators.
_WITHOUT_PROFILE = {
    "Atlas inference products": r"(ascend)?310P\d?",
    "Atlas 200I/500 A2": r"(ascend)?310B\d?",
    "Ascend 310": r"(ascend)?310",
    # A bare Ascend910B is this old one; "910B" may mean an A2 too and is left unknown.
    "the first Ascend 910": r"(ascend)?910(A|ProA|ProB|PremiumA)?|ascend910B",
    "Ascend 350": r"(ascend|atlas ?)?350(_\w+)?",
}

A2 = SoC("A2")
A3 = SoC("A3")
A950 = SoC("950")
PROFILES: dict[str, SoC] = {s.name: s for s in (A2, A3, A950)}

#: Set by use_soc, per task. The compiled path reads it at each call.
CURRENT: ContextVar[SoC | None] = ContextVar("kvcore_soc", default=None)


def resolve(soc: object, name: str = "soc") -> SoC | None:
    """The SoC of a name; None stays None. ParamInvalidError lists the known names."""
    if soc is None or isinstance(soc, SoC):
        return soc
    found = PROFILES.get(soc) if isinstance(soc, str) else None
    if found is None:
        fail(name, "one of " + ", ".join(map(repr, PROFILES)) + " or None", _unknown(soc))
    return found


def _unknown(soc: object) -> str:
    """A name that has no profile, as an error says it: products that exist are no misspellings."""
    if isinstance(soc, str):
        for product, pattern in _WITHOUT_PROFILE.items():
            if re.fullmatch(pattern, soc, re.IGNORECASE):
                return f"{soc!r} ({product}): the operators are not supported there"
    return shown(soc)


def from_product(name: str) -> SoC | None:
    """The SoC whose pattern matches a name of aclrtGetSocName; None: a machine not in the table."""
    for soc in PROFILES.values():
        if re.search(soc.profile.pattern, name):
            return soc
    return None


def from_environment() -> SoC | None:
    """What KVCORE_SOC says; unset or empty is None."""
    text = os.environ.get(ENVIRONMENT, "").strip()
    return resolve(text, ENVIRONMENT) if text else None


def current() -> SoC | None:
    """The SoC in force for calls without soc=: use_soc before KVCORE_SOC."""
    return CURRENT.get() or from_environment()


@contextmanager
def use_soc(soc: SoC | str | None) -> Iterator[SoC | None]:
    """Check every call of this task in the block against that hardware's documented limits.

    Other tasks and threads keep theirs; None leaves the choice to KVCORE_SOC.
    """
    found = resolve(soc)
    token = CURRENT.set(found)
    try:
        yield found
    finally:
        CURRENT.reset(token)


# ---------------------------------------------------------------- printing
_RULES = {"rows": "mode None", "Nct": "Nct", "Alibi": "Alibi", "Rope": "Rope", "Omni": "Omni"}


#: Warned of on every machine.
_EVERYWHERE = (
    ("all", "repeated slots are forbidden by the documents: which token they hold is open"),
    ("3, 4, Alibi", "the documents bound the sum of seq_lens - compress_lens by the slots"),
)


def _dtypes_text(names: tuple[str, ...]) -> str:
    for all_but, known in (("float4", _NO_FLOAT4), ("float8, hifloat8 and float4", _NO_FLOAT8)):
        if names == known:
            return f"all but {all_but}"
    return "all" if names == _ALL else " ".join(names)


def _scatter_rows(accepted: tuple[Accepted, ...]) -> list[tuple[str, str, str, str]]:
    rows = []
    for row in accepted:
        modes = "-" if row.scenario in (1, 7) else ", ".join(_RULES[rule] for rule in row.rules)
        rows.append((str(row.scenario), SCENARIOS[row.scenario], modes, _dtypes_text(row.dtypes)))
    return rows


def _limits(p: Profile) -> list[tuple[str, str]]:
    found = [
        ("2, 6, Nct" if p.nhsd_heads else "2, Nct", "key and value are [T, H, D]"),
        ("1", f"block_size <= {p.nz_block_size}"),
        ("1, 7" if p.nhsd_heads else "1", "head size * itemsize a multiple of 32"),
        ("all but 3", "num_blocks * block_size >= T"),
        ("3, 4, 5" if p.nhsd_heads is None else "4, 5", "num_blocks * block_size >= rows written"),
    ]
    if p.nhsd_heads is not None:
        found += [
            ("7", f"heads <= {p.nhsd_heads}"),
            ("7", f"block_size * head size <= {p.nhsd_block_items}"),
            ("7", f"key and value bytes of a token <= {p.nhsd_token_bytes}"),
            ("1", "an int8 value needs an int8 key"),
        ]
    return found


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _lines(name: str, p: Profile) -> Iterator[str]:
    yield f"{name}: {p.product}, NpuArch {p.arch}, product names matching {p.pattern}"
    head = ("scenario", "what", "modes", "dtypes")
    for operator, accepted in (
        ("ScatterPaKvCache", p.scatter_kv),
        ("ScatterPaCache", p.scatter_key),
    ):
        if not accepted:
            yield f"{operator}: not supported"
            continue
        yield f"{operator}:"
        yield from _columns([head, *_scatter_rows(accepted)])
        if operator == "ScatterPaKvCache":
            only = ", ".join(map(str, p.key_only))
            yield "  key only: " + (f"scenario {only}" if only else "not in this operator")
            yield from _columns([("scenario", "limit"), *_limits(p)])
    if p.update:
        yield (
            f"KVCacheOperation: {' '.join(p.update)}; int32 indices; hidden * itemsize a multiple "
            f"of 32 and <= {p.update_token_bytes}; seq_len > 0; token_offset < max_seq"
        )
    else:
        yield "KVCacheOperation: not supported"
    yield from (f"{operator}: {sentence}" for operator, sentence in p.gathers)
    yield "Warned of:"
    yield from _columns([("scenario", "what the machine does"), *_EVERYWHERE, *p.quirks])
    yield "Sources:"
    yield from (f"  {source}" for source in p.sources)
