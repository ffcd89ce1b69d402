# SPDX-License-Identifier: Apache-2.0
"""Which way of writing past the cache each kind of CPU takes, and from how many bytes on.

One table, a row a kind.  A row is found when kvcore is imported, by the vendor and family that the
CPU names; ``KVCORE_CPU`` takes another.  All rows write the same bytes.

A row changes only by measurements on its own kind: on Zen 3 a 16-byte store past the cache costs
twice an ordinary one, on Zen 5 it costs less (docs/performance.md), so what is good for one AMD is
not good for all.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from kvcore._kernels import isa
from kvcore.errors import fail

__all__ = ["ROWS", "CpuRow", "Found", "chosen", "row_of", "third_level", "use"]

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
MIB = 1 << 20
#: Sizes that a third-level cache may have; others are taken for a wrong answer of the system.
THIRD_LEVEL = (MIB, 4096 * MIB)


@dataclass(frozen=True, slots=True)
class CpuRow:
    """A kind of CPU.

    path:   "lines", "near" or "all", see ``_kernels/isa.h``; on an instruction set that has no such
            path, its usual one.
    thirds: the border of streaming is max(5/8 of the second-level cache, 1/5 of the third-level
            one); without it the first of the two.
    parallel_mib: the border of a second thread where there are at most two CPUs; None: the kernels'
            own.
    basis:  what the row rests on.
    """

    name: str
    path: str
    basis: str
    vendors: tuple[str, ...] = ()
    families: tuple[int, ...] = ()
    models: tuple[range, ...] = ()
    thirds: bool = False
    parallel_mib: int | None = None

    def is_of(self, vendor: str, family: int, model: int) -> bool:
        """Whether that CPU is of this kind."""
        return (
            vendor in self.vendors
            and (not self.families or family in self.families)
            and (not self.models or any(model in models for models in self.models))
        )


_AMD, _HYGON = "AuthenticAMD", "HygonGenuine"

#: The first row that fits is taken; the last fits all.
ROWS = (
    CpuRow("intel", "lines", "measured on Xeon, Sapphire Rapids", ("GenuineIntel",)),
    CpuRow(
        "zen3", "near", "measured on EPYC 7003, a guest of 2 CPUs",
        (_AMD,), (25,), (range(0x00, 0x10), range(0x20, 0x60)),
    ),
    CpuRow(
        "zen5", "all", "stores and borders measured in C on a Zen 5 guest of 2 CPUs; kvcore's own "
        "time with this row was not measured", (_AMD,), (26,), thirds=True, parallel_mib=32,
    ),
    CpuRow("amd", "near", "by analogy with zen3, not measured", (_AMD, _HYGON)),
    CpuRow("arm", "lines", "not measured; the bytes are checked under emulation"),
    CpuRow("generic", "lines", "not measured; what is best on Intel"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Found:
    """What is in force.

    how: "found" or "KVCORE_CPU"; cpu: vendor, family and model as the CPU says them.
    The system is asked for its caches only where something rests on them.
    """

    row: CpuRow
    how: str
    cpu: str

    @property
    def least_stream_bytes(self) -> int:
        """The border of streaming is no lower: 0 where the second-level cache alone decides."""
        return (third_level() or 0) // 5 if self.row.thirds else 0

    @property
    def parallel_bytes(self) -> int | None:
        """The row's border of a second thread; None: the kernels' own default."""
        if self.row.parallel_mib is None or (os.cpu_count() or 1) > 2:
            return None
        return self.row.parallel_mib * MIB

    def words(self) -> list[str]:
        """What the system says of its caches and is passed over, a sentence each."""
        found = []
        said, assumed = isa.second_level()
        for level, size, is_taken in (
            ("second-level", said, said == assumed),
            ("third-level", _said_of_third_level(), third_level() is not None),
        ):
            if size > 0 and not is_taken:
                found.append(f"the system says {size} bytes of {level} cache, which is passed over")
        if self.row.thirds and third_level() is None:
            found.append("the border of streaming rests on the second-level cache alone")
        return found


_chosen: Found | None = None


def row_of(vendor: str, family: int, model: int) -> CpuRow:
    """The row of a CPU; of a vendor that has none, "arm" or "generic"."""
    for row in ROWS:
        if row.is_of(vendor, family, model):
            return row
    name = "arm" if platform.machine() in ("aarch64", "arm64") else "generic"
    return next(row for row in ROWS if row.name == name)


def use(name: str | None = None) -> Found:
    """Find the row, or take the one of that name, and note it as chosen; see ``chosen``.

    The instruction set and the borders are set by ``kvcore.isa``.  Raises ParamInvalidError for a
    name that no row has.
    """
    global _chosen
    vendor, family, model = isa.cpu()
    row = row_of(vendor, family, model)
    if name is not None:
        named = [row for row in ROWS if row.name == name]
        if not named:
            fail("KVCORE_CPU", "one of " + ", ".join(row.name for row in ROWS), repr(name))
        row = named[0]
    cpu = f"{vendor} family {family} model {model}" if vendor else platform.machine()
    _chosen = Found(row, "KVCORE_CPU" if name else "found", cpu)
    return _chosen


def chosen() -> Found:
    """What ``use`` found last."""
    return _chosen or use()


def third_level() -> int | None:
    """Bytes of the third-level cache; None where the system does not say or says an absurd size."""
    size = _said_of_third_level()
    return size if THIRD_LEVEL[0] <= size <= THIRD_LEVEL[1] else None


def _said_of_third_level() -> int:
    """Bytes as the kernel shows them; 0 where it does not."""
    try:
        for index in sorted(CACHES.glob("index*")):
            if (index / "level").read_text().strip() == "3":
                size = (index / "size").read_text().strip()
                units = {"K": 1 << 10, "M": MIB, "G": 1 << 30}
                return int(size[:-1]) * units[size[-1]] if size[-1] in units else int(size)
    except (OSError, ValueError, IndexError):
        pass
    return 0
