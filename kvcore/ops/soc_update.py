# SPDX-License-Identifier: Apache-2.0
"""What the hardware refuses of KVCacheOperation (ATB)."""

from __future__ import annotations

from kvcore._core.arrays import ArrayInfo
from kvcore.dtypes import DType
from kvcore.errors import fail
from kvcore.ops.checks import is_contiguous
from kvcore.soc import PROFILES, SoC

__all__ = ["check_update"]


def check_update(
    new_kv: ArrayInfo,
    past: ArrayInfo,
    dtype: DType,
    hidden: int,
    indices: tuple[ArrayInfo | None, ...],
    soc: SoC,
) -> tuple[str, ...]:
    """Raise ParamInvalidError for what that SoC refuses; rules about values are the run's.

    Returns the text of a warning where arrays are strided.
    hidden: elements of a token; indices: layer_id (None for a Python int), token_offset, seq_len.
    Source: ascend-transformer-boost, kvcache_operation.cpp and kvcache_kernel.cpp.
    """
    table = soc.profile.update
    if table is None:
        others = [repr(s.name) for s in PROFILES.values() if s.profile.update]
        fail("soc", f"{' or '.join(others)} for kv_cache_update", repr(soc.name))
    if dtype.name not in table.dtypes:
        fail("new_kv", f"dtype {' or '.join(table.dtypes)} on {soc.name}", dtype)
    for info in indices:
        if (
            info is not None
            and info.dtype is not None
            and info.dtype.name not in table.index_dtypes
        ):
            fail(info.name, f"dtype {' or '.join(table.index_dtypes)} on {soc.name}", info.dtype)
    size = hidden * dtype.itemsize
    if size % table.token_unit_bytes:
        multiple = table.token_unit_bytes // dtype.itemsize
        fail("past", f"a hidden size that is a multiple of {multiple} on {soc.name}", hidden)
    if size > table.token_bytes:
        fail("past", f"at most {table.token_bytes} bytes a token on {soc.name}", size)
    loose = [info.name for info in (new_kv, past, *indices) if info and not is_contiguous(info)]
    if not loose:
        return ()
    # No Harm: the aclnn backend does this operator by another, which has strides.
    return (
        f"{soc.name}: ATB's tensors have a shape and no strides, so its kernel takes "
        f"{' and '.join(loose)} for contiguous and reads or writes other bytes",
    )
