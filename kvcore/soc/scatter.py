# SPDX-License-Identifier: Apache-2.0
"""What each machine accepts of ScatterPaKvCache and ScatterPaCache, and what its kernels do
beyond their documents.

A limit is the greatest value that is accepted.  The rules that read these tables are in
kvcore/ops/soc_scatter.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcore.soc.types import ALL, HALF, NO_FLOAT4, NO_FLOAT8, SHORT, Types

__all__ = ["ARCH35", "BOARD_910", "SCENARIOS", "Accepted", "Nhsd", "Scatter", "WindowKernels"]

#: What the scenarios of ScatterPaKvCache are; docs/operators.md has them in full.
SCENARIOS: dict[int, str] = {
    1: "PA_NZ cache",
    2: "Norm cache",
    3: "compression, 4-D key",
    4: "compression, 3-D key",
    5: "compression, 3-D key",
    6: "Norm cache, key only",
    7: "NHSD cache",
}

_PLAIN = ("rows",)
_ANY_ROWS = ("rows", "Nct")
_ALIBI = ("Alibi",)
_OFFSET = ("Rope", "Omni")


@dataclass(frozen=True, slots=True)
class Accepted:
    """One scenario that an operator has, under these rules, with these dtypes.

    rules: "rows" (a token to its slot), "Nct", "Alibi", "Rope", "Omni".
    """

    scenario: int
    rules: tuple[str, ...]
    dtypes: Types


@dataclass(frozen=True, slots=True)
class Nhsd:
    """Limits of scenario 7.

    block_items:  block_size * head size.
    token_bytes:  key and value of one token; tiling_bytes is what the tiling leaves of that.
    """

    heads: int
    block_items: int
    token_bytes: int
    tiling_bytes: int


@dataclass(frozen=True, slots=True)
class WindowKernels:
    """The kernels of scenarios 4 and 5, which take the key's head size for the value too.

    head_size_multiple, mean_head_size (scenario 5 alone), index_dtype: what they can do.
    """

    head_size_multiple: int
    mean_head_size: int
    index_dtype: str


@dataclass(frozen=True, slots=True)
class Scatter:
    """One machine's table.

    key_value: scenarios of ScatterPaKvCache.  key_alone: of ScatterPaCache; empty: not there.
    key_only:  scenarios of ScatterPaKvCache without a value.
    nz_block_size: rows of a block in PA_NZ.
    int8_value:    whether, in PA_NZ, an int8 value may go with a key of another type.
    nhsd:      limits of scenario 7; None: no such scenario.
    Beyond the documents:
    windows:   the kernels of 4 and 5; None: the tiling refuses these scenarios.
    outer_strides: whether the strides of all axes but the last are honoured with mode None; where
               not, only those of the caches' first axis in scenario 2 are.
    negative_slots: (scenarios whose kernels do not skip a negative slot's run, what they do).
    whole_windows:  whether Rope and Omni expect compress_lens >= 1 and compress_seq_offset >= 0.
    short_nct:      whether the tiling of Nct refuses T * stride + offset > (T-1) * H * D.
    """

    key_value: tuple[Accepted, ...]
    key_alone: tuple[Accepted, ...]
    key_only: tuple[int, ...]
    nz_block_size: int
    int8_value: bool
    nhsd: Nhsd | None
    windows: WindowKernels | None
    outer_strides: bool
    negative_slots: tuple[tuple[int, ...], str]
    whole_windows: bool
    short_nct: bool

    @property
    def scenarios(self) -> frozenset[int]:
        """Those of ScatterPaKvCache."""
        return frozenset(row.scenario for row in self.key_value)

    def limits(self) -> list[tuple[str, str]]:
        """(scenarios, limit) of ScatterPaKvCache, as printed."""
        compresses = ", ".join(str(n) for n in (3, 4, 5) if n in self.scenarios)
        found = [
            ("2, 6, Nct" if 6 in self.scenarios else "2, Nct", "key and value are [T, H, D]"),
            ("1", f"block_size <= {self.nz_block_size}"),
            ("1, 7" if self.nhsd else "1", "head size * itemsize a multiple of 32"),
            ("all but 3", "num_blocks * block_size >= T"),
            (compresses, "num_blocks * block_size >= rows written"),
        ]
        if self.nhsd is not None:
            found += [
                ("7", f"heads <= {self.nhsd.heads}"),
                ("7", f"block_size * head size <= {self.nhsd.block_items}"),
                ("7", f"key and value bytes of a token <= {self.nhsd.token_bytes}"),
            ]
        if not self.int8_value:
            found.append(("1", "an int8 value needs an int8 key"))
        return found

    def quirks(self) -> list[tuple[str, str]]:
        """(scenarios, what the kernels do beyond their documents), as printed."""
        found = []
        if self.windows is None:
            found.append(("4, 5", "the tiling of today refuses compression with 3-D keys"))
        else:
            kernels = self.windows
            assumed = (
                f"kernels assume equal head sizes, a multiple of {kernels.head_size_multiple}, "
                f"and {kernels.index_dtype} indices"
            )
            found.append(("4, 5", assumed))
            found.append(("5", f"kernels hold head sizes up to {kernels.mean_head_size}"))
        if self.whole_windows:
            expected = "compress_lens must be >= 1, compress_seq_offset >= 0"
            found.append(("3, 5, Rope and Omni", expected))
        scenarios, effect = self.negative_slots
        found.append((", ".join(map(str, scenarios)), f"a negative slot {effect}"))
        if self.nhsd is not None:
            most = self.nhsd.tiling_bytes
            left = f"the tiling keeps 1 KiB: key and value of a token may have {most} bytes"
            found.append(("7", left))
        if not self.outer_strides:
            honoured = "of strided views only the caches' first axis in scenario 2 is honoured"
            found.append(("1, 2, 6, mode None", honoured))
        if self.short_nct:
            found.append(("2, Nct", "the tiling refuses T * stride + offset > (T-1) * H * D"))
        return found


#: A2 and A3: one architecture and one set of kernels.
BOARD_910 = Scatter(
    key_value=(
        Accepted(1, _PLAIN, SHORT),
        Accepted(2, _ANY_ROWS, SHORT),
        Accepted(4, _ALIBI, SHORT),
        Accepted(5, _OFFSET, HALF),
        Accepted(6, _ANY_ROWS, SHORT),
        Accepted(7, _PLAIN, HALF),
    ),
    key_alone=(),
    key_only=(6,),
    nz_block_size=65534,
    int8_value=False,
    nhsd=Nhsd(heads=4094, block_items=2**32 - 2, token_bytes=196607, tiling_bytes=195584),
    windows=WindowKernels(head_size_multiple=32, mean_head_size=16384, index_dtype="int32"),
    outer_strides=False,
    negative_slots=((4, 5, 7), "writes in front of the cache"),
    whole_windows=False,
    short_nct=False,
)

#: The 950.
ARCH35 = Scatter(
    key_value=(
        Accepted(1, _PLAIN, ALL),
        Accepted(2, _PLAIN, ALL),
        Accepted(2, ("Nct",), NO_FLOAT4),
        Accepted(3, _ALIBI + _OFFSET, NO_FLOAT4),
        Accepted(4, _ALIBI, NO_FLOAT4),
        Accepted(5, _OFFSET, HALF),
    ),
    # Scenario 6 is scenario 2 with the key alone.
    key_alone=(
        Accepted(6, _PLAIN, ALL),
        Accepted(3, _ALIBI + _OFFSET, NO_FLOAT8),
    ),
    key_only=(),
    nz_block_size=65534,
    int8_value=True,
    nhsd=None,
    windows=None,
    outer_strides=True,
    negative_slots=((3,), "skips single rows of its run, not the run"),
    whole_windows=True,
    short_nct=True,
)
