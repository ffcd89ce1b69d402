# SPDX-License-Identifier: Apache-2.0
"""torch's own checks of the vendor's operators, and compiled code that calls them."""

from __future__ import annotations

from typing import Any

import pytest

import kvcore
from tensors import WITHOUT_TORCH

torch = pytest.importorskip("torch", reason=WITHOUT_TORCH)
from test_library import selection_arguments  # noqa: E402

NB, BS, H, D = 4, 4, 2, 16


def ints(*values: Any) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def tokens() -> Any:
    return torch.randn(3, H, D)


def cache() -> Any:
    return torch.randn(NB, BS, H, D)


def samples() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    slots, table, lengths = ints(5, -1, 9), ints([0, 1], [3, 2]), ints(5, 2)
    nz = kvcore.layout.paged_nd_to_nz(cache()), kvcore.layout.paged_nd_to_nz(cache())
    out = {"key": torch.zeros(7, H, D), "value": torch.zeros(7, H, D)}
    scatter = tokens(), tokens(), *nz, slots
    gather = cache(), cache(), table, lengths
    select = selection_arguments()
    block = {"selection_topk_block_size": 1}
    rows = torch.randn(6, 5), ints([2], [0]), torch.randn(2, 5)
    return {
        "npu.npu_scatter_pa_kv_cache.default": (scatter, {}),
        "npu.npu_scatter_pa_kv_cache_functional.default": (scatter, {}),
        "npu.npu_scatter_pa_cache.value": ((tokens(), slots), {"key_cache": cache()}),
        "npu.npu_gather_pa_kv_cache.default": ((*gather, *out.values()), {}),
        "npu.npu_gather_pa_kv_cache_functional.default": ((*gather, *out.values()), {}),
        "npu.npu_scatter_nd_update_.default": (rows, {}),
        "npu.npu_scatter_nd_update.default": (rows, {}),
        "atb._npu_reshape_and_cache.default": ((tokens(), tokens(), cache(), cache(), slots), {}),
        "atb._npu_reshape_and_cache_siso.default": ((tokens(), cache(), slots), {}),
        "atb.npu_paged_cache_load.default": (gather, {}),
        "atb.npu_paged_cache_load.out": (gather, out),
        "custom.npu_gather_selection_kv_cache.default": (select, block),
        "custom.npu_gather_selection_kv_cache_functional.default": (select, block),
    }


@pytest.mark.parametrize("name", list(samples()))
def test_opcheck(torch_npu: Any, name: str) -> None:
    space, operator, overload = name.split(".")
    arguments, keywords = samples()[name]
    found = getattr(getattr(getattr(torch.ops, space), operator), overload)
    torch.library.opcheck(found, arguments, keywords)


def test_every_operator_has_a_sample(torch_npu: Any) -> None:
    names = torch._C._dispatch_get_all_op_names()
    spaces = ("npu::", "atb::", "custom::")
    public = {
        n.replace("::", ".") + ("" if "." in n else ".default")
        for n in names
        if n.startswith(spaces) and "::_kvcore_" not in n
    }
    assert public == set(samples())


def test_a_compiled_step(torch_npu: Any) -> None:
    """All of them in one graph, as an attention layer would call them."""

    def step(key: Any, value: Any, caches: Any, nz: Any, slots: Any, table: Any) -> Any:
        torch_npu._npu_reshape_and_cache(
            key=key * 2, value=value, key_cache=caches[0], value_cache=caches[1], slot_indices=slots
        )
        torch_npu.npu_scatter_pa_kv_cache(key, value, *nz, slots)
        index = torch_npu.npu_scatter_pa_cache(key + 1, slots, key_cache=caches[2])
        lengths = torch.tensor([7], dtype=torch.int32)
        out = torch.zeros(7, H, D), torch.zeros(7, H, D)
        torch_npu.atb.npu_paged_cache_load(
            *caches[:2], table, lengths, seq_starts=None, key=out[0], value=out[1]
        )
        torch_npu.npu_scatter_nd_update_(caches[3].view(-1, D), slots.abs().view(-1, 1), key[:, 0])
        loaded = torch_npu.npu_paged_cache_load(*caches[:2], table, lengths)
        return out[0] + out[1], index.sum(), caches[3] * 2, loaded[0].sum()

    caches = [cache() for _ in range(4)]
    nz = [kvcore.layout.paged_nd_to_nz(cache()) for _ in range(2)]
    own = [[c.clone() for c in caches], [c.clone() for c in nz]]
    key, value, slots, table = tokens(), tokens(), ints(5, -1, 9), ints([1, 2])
    torch.compiler.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    seen = compiled(key, value, caches, nz, slots, table)
    want = step(key, value, *own, slots, table)
    torch.testing.assert_close(seen, want)
    for group, twins in zip((caches, nz), own, strict=True):
        for one, other in zip(group, twins, strict=True):
            assert torch.equal(one, other)
    torch.compiler.reset()
