# SPDX-License-Identifier: Apache-2.0
"""The machines: product names, and a table for each operator."""

from __future__ import annotations

from dataclasses import dataclass

from kvcore.soc import gather, scatter, selection, update

__all__ = ["TABLE", "Profile"]


@dataclass(frozen=True, slots=True)
class Profile:
    """What one hardware generation accepts.

    product:   the vendor's name for it.
    names:     what aclrtGetSocName is known to return there.
    pattern:   regular expression that those names, and future ones, match.
    arch:      NpuArch (aclrtGetDeviceInfo, attribute 601).
    scatter, gather, selection, update: a table an operator; None: the operator is not there.
    sources:   where the facts are from.
    """

    product: str
    names: tuple[str, ...]
    pattern: str
    arch: int
    scatter: scatter.Scatter
    gather: gather.Gather
    selection: selection.Selection | None
    update: update.Update | None
    sources: tuple[str, ...]


def _names(prefix: str, *ends: str | int) -> tuple[str, ...]:
    return tuple(f"{prefix}{end}" for end in ends)


_SOURCES_910 = (
    "CANN ops-transformer: aclnnScatterPaKvCache document; "
    "op_host/scatter_pa_kv_cache_tiling.cpp; op_kernel/scatter_pa_kv_cache_*.h",
    "ascend-transformer-boost: kvcache_operation.cpp, kvcache_kernel.cpp",
    "CANN runtime: platform_config file names (product names)",
)

TABLE: dict[str, Profile] = {
    "A2": Profile(
        product="Atlas A2",
        names=_names("Ascend910B", 1, 2, "2C", 3, 4, "4-1"),
        # A bare Ascend910B is the first 910, an older machine.
        pattern=r"^Ascend910B\d",
        arch=2201,
        scatter=scatter.BOARD_910,
        gather=gather.BOARD_910,
        selection=selection.A2,
        update=update.BOARD_910,
        sources=_SOURCES_910,
    ),
    "A3": Profile(
        product="Atlas A3",
        names=_names("Ascend910_", 9361, 9362, 9363, 9372, 9381, 9382, 9391, 9392),
        pattern=r"^Ascend910_93",
        arch=2201,
        scatter=scatter.BOARD_910,
        gather=gather.BOARD_910,
        selection=selection.A3,
        update=update.BOARD_910,
        sources=_SOURCES_910,
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
        scatter=scatter.ARCH35,
        gather=gather.ARCH35,
        selection=None,
        update=None,
        sources=(
            "CANN ops-transformer: aclnnScatterPaKvCache and aclnnScatterPaCache documents; "
            "op_host/scatter_pa_kv_cache_tiling_arch35.cpp; op_kernel/arch35",
            "CANN runtime: platform_config file names (product names)",
        ),
    ),
}
