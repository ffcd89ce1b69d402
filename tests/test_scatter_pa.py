# SPDX-License-Identifier: Apache-2.0
"""scatter_pa_kv_cache: scenarios 1, 2, 6 and 7, key only, and every bad argument."""

from __future__ import annotations

import numpy as np
import pytest

import kvcore
import oracle


@pytest.mark.parametrize("rows_apart", [1, 2])
@pytest.mark.parametrize("heads_apart", [16, 40])
def test_nz_heads_of_one_column(heads_apart: int, rows_apart: int) -> None:
    # One column a head: heads of the token, or rows of the cache, need not lie side by side.
    key = np.arange(10 * 3 * heads_apart, dtype=np.uint16).reshape(10, 3, heads_apart)[..., :16]
    cache = np.zeros((2, 3, 8 * rows_apart, 16), np.uint16)[:, :, ::rows_apart]
    arguments = {"key": key, "key_cache": cache, "slot_mapping": np.arange(2, 12)}
    arguments["cache_mode"] = "PA_NZ"
    expected = oracle.run("scatter_pa_kv_cache", arguments).outputs["key_cache"]
    kvcore.scatter_pa_kv_cache(**arguments)
    np.testing.assert_array_equal(cache, expected)
