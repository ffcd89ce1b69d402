# SPDX-License-Identifier: Apache-2.0
"""Each of the vendor's operators in every form that clients call it, and its errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import kvcore
from tensors import WITHOUT_TORCH

torch = pytest.importorskip("torch", reason=WITHOUT_TORCH)

NB, BS, H, D, DV = 4, 8, 2, 16, 32
SLOTS = [9, 0, -1, 31]


def ints(*values: Any, dtype: Any = None) -> Any:
    return torch.tensor(values, dtype=dtype or torch.int32)


def tokens(size: int = D, count: int = len(SLOTS), heads: int = H) -> Any:
    return torch.randn(count, heads, size).half()


def cache(size: int = D, heads: int = H) -> Any:
    return torch.randn(NB, BS, heads, size).half()


def written(old: Any, rows: Any, slots: list[int]) -> Any:
    """What an ND cache holds after the rows went to the slots, by plain indexing."""
    made = old.clone().view(NB * BS, *old.shape[2:])
    for row, slot in zip(rows, slots, strict=True):
        if slot >= 0:
            made[slot] = row
    return made.view(old.shape)


def to_nz(x: Any) -> Any:
    return kvcore.layout.paged_nd_to_nz(x)


def same(*pairs: tuple[Any, Any]) -> None:
    for seen, want in pairs:
        assert seen.dtype == want.dtype
        assert torch.equal(seen, want)


# ---------------------------------------------------------------- npu_scatter_pa_kv_cache
Form = Callable[[Any, Any, Any, Any, Any, Any], Any]
FORMS: dict[str, Form] = {
    "positional": lambda op, k, v, kc, vc, s: op(k, v, kc, vc, s),
    "keywords": lambda op, k, v, kc, vc, s: op(
        key=k, value=v, key_cache=kc, value_cache=vc, slot_mapping=s
    ),
    "all keywords": lambda op, k, v, kc, vc, s: op(
        slot_mapping=s,
        value_cache=vc,
        key_cache=kc,
        value=v,
        key=k,
        compress_lens=None,
        compress_seq_offsets=None,
        seq_lens=None,
        cache_mode="PA_NZ",
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("where", ["namespace", "torch.ops"])
def test_scatter_writes_pa_nz(torch_npu: Any, form: str, dtype: Any, where: str) -> None:
    home = torch_npu if where == "namespace" else torch.ops.npu
    key, value, key_cache, value_cache = tokens(), tokens(DV), cache(), cache(DV)
    nz = to_nz(key_cache), to_nz(value_cache)
    slots = ints(*SLOTS, dtype=dtype)
    assert FORMS[form](home.npu_scatter_pa_kv_cache, key, value, *nz, slots) is None
    same(
        (nz[0], to_nz(written(key_cache, key, SLOTS))),
        (nz[1], to_nz(written(value_cache, value, SLOTS))),
    )


def test_scatter_norm(torch_npu: Any) -> None:
    key, value, key_cache, value_cache = tokens(), tokens(DV), cache(), cache(DV)
    want = written(key_cache, key, SLOTS), written(value_cache, value, SLOTS)
    torch_npu.npu_scatter_pa_kv_cache(
        key, value, key_cache, value_cache, ints(*SLOTS), cache_mode="Norm"
    )
    same((key_cache, want[0]), (value_cache, want[1]))


def test_scatter_latent_512_and_rope_64(torch_npu: Any) -> None:
    """MLA: one head, K 512 wide and V 64, in the 4-D view of a 5-D NZ cache and in itself."""
    latent, rope = tokens(512, heads=1), tokens(64, heads=1)
    caches = cache(512, 1), cache(64, 1)
    want = [to_nz(written(c, x, SLOTS)) for c, x in zip(caches, (latent, rope), strict=True)]
    five = [to_nz(c).view(NB, 1, -1, BS, 16) for c in caches]
    torch_npu.npu_scatter_pa_kv_cache(latent, rope, *five, ints(*SLOTS))
    same(*((c.view(w.shape), w) for c, w in zip(five, want, strict=True)))
    four = [to_nz(c) for c in caches]
    torch_npu.npu_scatter_pa_kv_cache(latent, rope, *four, ints(*SLOTS))
    same(*zip(four, want, strict=True))


def test_scatter_takes_slices_of_padded_batches(torch_npu: Any) -> None:
    padded, value, key_cache, value_cache = tokens(count=9), tokens(DV, 9), cache(), cache(DV)
    fused = torch.cat([padded, value], -1)
    key, value = fused.split([D, DV], -1)  # views with gaps between the heads
    n = len(SLOTS)
    want = written(key_cache, key[:n], SLOTS), written(value_cache, value[:n], SLOTS)
    slots = ints(*SLOTS, 5, 5, 5, 5, 5)
    torch_npu.npu_scatter_pa_kv_cache(
        key[:n], value[:n], key_cache, value_cache, slots[:n], cache_mode="Norm"
    )
    same((key_cache, want[0]), (value_cache, want[1]))


def test_scatter_key_only(torch_npu: Any) -> None:
    key, key_cache = tokens(), cache()
    nz = to_nz(key_cache)
    torch_npu.npu_scatter_pa_kv_cache(key, None, nz, None, ints(*SLOTS))
    torch_npu.npu_scatter_pa_kv_cache(
        key=key, value=None, key_cache=nz, value_cache=None, slot_mapping=ints(*SLOTS)
    )
    same((nz, to_nz(written(key_cache, key, SLOTS))))


def test_scatter_compresses(torch_npu: Any) -> None:
    """Four axes of key and compress_lens: the last tokens of each (batch, head)."""
    key, key_cache = torch.randn(2, 4, H, D).half(), cache(heads=1)
    value, value_cache = torch.randn(2, 4, H, D).half(), cache(heads=1)
    windows = {"compress_lens": ints([1, 2], [3, 1]), "seq_lens": ints(4, 3)}
    own = key_cache.clone(), value_cache.clone()
    slots = ints([0, 4], [8, 16])
    torch_npu.npu_scatter_pa_kv_cache(
        key, value, key_cache, value_cache, slots, **windows, cache_mode="Norm"
    )
    kvcore.scatter_pa_kv_cache(key, own[0], slots, value, own[1], **windows)
    same((key_cache, own[0]), (value_cache, own[1]))
    offsets = {"compress_seq_offsets": ints(0, 1, 0, 1), "compress_lens": ints(1, 2, 3, 1)}
    torch_npu.npu_scatter_pa_kv_cache(
        key, value, key_cache, value_cache, slots, **windows | offsets, cache_mode="Norm"
    )
    named = {"compress_seq_offset": offsets["compress_seq_offsets"]}
    kvcore.scatter_pa_kv_cache(
        key, own[0], slots, value, own[1], **windows | {"compress_lens": ints(1, 2, 3, 1)} | named
    )
    same((key_cache, own[0]), (value_cache, own[1]))


def test_scatter_functional(torch_npu: Any) -> None:
    key, value, nz_key, nz_value = tokens(), tokens(DV), to_nz(cache()), to_nz(cache(DV))
    before = nz_key.clone(), nz_value.clone()
    made = torch_npu.npu_scatter_pa_kv_cache_functional(key, value, nz_key, nz_value, ints(*SLOTS))
    same((nz_key, before[0]), (nz_value, before[1]))
    torch_npu.npu_scatter_pa_kv_cache(key, value, nz_key, nz_value, ints(*SLOTS))
    same((made[0], nz_key), (made[1], nz_value))


def test_an_nd_cache_under_the_default_says_so(torch_npu: Any) -> None:
    key, value, key_cache, value_cache = tokens(), tokens(DV), cache(), cache(DV)
    before = key_cache.clone()
    message = (
        "key_cache: expected shape [4, 2, 2, 16] (PA_NZ), got [4, 8, 2, 16]; this operator takes "
        "PA_NZ caches unless the call says otherwise: pass cache_mode='Norm' for a cache "
        "[nb, bs, H, D]"
    )
    with pytest.raises(kvcore.ParamInvalidError, match=f"^{re.escape(message)}$") as caught:
        torch_npu.npu_scatter_pa_kv_cache(key, value, key_cache, value_cache, ints(*SLOTS))
    assert caught.value.argument == "key_cache"
    with pytest.raises(kvcore.ParamInvalidError, match="pass cache_mode='Norm'"):
        torch_npu.npu_scatter_pa_kv_cache(
            tokens(20), tokens(20), cache(20), cache(20), ints(*SLOTS)
        )
    with pytest.raises(kvcore.ParamInvalidError) as caught:
        torch_npu.npu_scatter_pa_kv_cache(key, value, cache(DV), value_cache, ints(*SLOTS))
    assert "cache_mode='Norm'" not in str(caught.value), "that cache would not fit Norm either"
    same((key_cache, before))


@pytest.mark.parametrize("mode", ["NHSD", "ND", "pa_nz"])
def test_unknown_cache_modes(torch_npu: Any, mode: str) -> None:
    with pytest.raises(kvcore.ParamInvalidError, match=r"^cache_mode: expected one of"):
        torch_npu.npu_scatter_pa_kv_cache(
            tokens(), tokens(), cache(), cache(), ints(*SLOTS), cache_mode=mode
        )


# ---------------------------------------------------------------- npu_scatter_pa_cache
def test_scatter_pa_cache(torch_npu: Any) -> None:
    key, key_cache = tokens(), cache()
    want = written(key_cache, key, SLOTS)
    assert torch_npu.npu_scatter_pa_cache(key, ints(*SLOTS), key_cache=key_cache) is key_cache
    same((key_cache, want))
    made = torch_npu.npu_scatter_pa_cache(
        key=key,
        slot_mapping=ints(*SLOTS),
        compress_lens=None,
        compress_seq_offsets=None,
        seq_lens=None,
        key_cache=key_cache,
    )
    assert made.data_ptr() == key_cache.data_ptr()
    with pytest.raises(kvcore.ParamInvalidError, match=r"^compress_seq_offsets: expected None"):
        torch_npu.npu_scatter_pa_cache(
            key, ints(*SLOTS), compress_seq_offsets=ints(1), key_cache=key_cache
        )


# ---------------------------------------------------------------- atb
@pytest.mark.parametrize("home", ["namespace", "atb module", "torch.ops"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_reshape_and_cache(torch_npu: Any, home: str, dtype: Any) -> None:
    space = {"namespace": torch_npu, "atb module": torch_npu.atb, "torch.ops": torch.ops.atb}[home]
    key, value, key_cache, value_cache = tokens(), tokens(DV), cache(), cache(DV)
    want = written(key_cache, key, SLOTS), written(value_cache, value, SLOTS)
    slots = ints(*SLOTS, dtype=dtype)
    space._npu_reshape_and_cache(
        key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_indices=slots
    )
    same((key_cache, want[0]), (value_cache, want[1]))
    key, value = tokens(), tokens(DV)
    space._npu_reshape_and_cache(key, value, key_cache, value_cache, slots)
    same((key_cache, written(want[0], key, SLOTS)), (value_cache, written(want[1], value, SLOTS)))


def test_reshape_and_cache_siso(torch_npu: Any) -> None:
    key, key_cache = tokens(576, heads=1), cache(576, 1)
    want = written(key_cache, key, SLOTS)
    torch_npu._npu_reshape_and_cache_siso(
        key=key, key_cache=key_cache, slot_indices=ints(*SLOTS).view(2, 2).flatten()
    )
    same((key_cache, want))
    torch_npu._npu_reshape_and_cache_siso(key, key_cache, ints(*SLOTS))
    same((key_cache, want))


def test_errors_name_the_argument_as_it_is_called(torch_npu: Any) -> None:
    key, value, key_cache, value_cache = tokens(), tokens(), cache(), cache()
    with pytest.raises(kvcore.SlotRangeError, match=r"^slot_indices\[1\]: expected") as caught:
        torch_npu._npu_reshape_and_cache(key, value, key_cache, value_cache, ints(0, 32, 1, 2))
    assert (caught.value.argument, caught.value.seen) == ("slot_indices", 32)
    with pytest.raises(kvcore.ParamInvalidError, match=r"^slot_indices: expected shape"):
        torch_npu._npu_reshape_and_cache_siso(key, key_cache, ints(0))
    with pytest.raises(kvcore.ParamInvalidError, match=r"^context_lens\[0\]: expected") as caught:
        torch_npu.npu_paged_cache_load(key_cache, value_cache, ints([0]), ints(-1))
    assert caught.value.argument == "context_lens"
    with pytest.raises(kvcore.ParamInvalidError, match=r"^block_table\[0, 0\]: expected"):
        torch_npu.npu_paged_cache_load(key_cache, value_cache, ints([9]), ints(1))
    with pytest.raises(kvcore.ParamInvalidError, match=r"^seq_starts"):
        torch_npu.npu_paged_cache_load(
            key_cache, value_cache, ints([0]), ints(1), seq_starts=ints(1, 2)
        )


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        ("npu_scatter_pa_kv_cache", {"slot_indices": 1}),
        ("_npu_reshape_and_cache", {"slot_mapping": 1}),
        ("npu_gather_pa_kv_cache", {"cache_mode": "Norm"}),
        ("npu_scatter_pa_kv_cache", {"scatter_mode": "None"}),
    ],
)
def test_words_that_the_operator_does_not_have(
    torch_npu: Any, operator: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises((RuntimeError, TypeError), match=operator):
        getattr(torch_npu, operator)(**arguments)


TABLE, LENGTHS = [[2, 1], [3, 0]], [11, 8]


def gathered(old: Any, starts: tuple[int, int] = (0, 0)) -> Any:
    """The tokens of both requests, by plain indexing."""
    rows = [
        old[table[start // BS + j // BS], j % BS]
        for table, length, start in zip(TABLE, LENGTHS, starts, strict=True)
        for j in range(length)
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("home", ["namespace", "atb module", "torch.ops"])
def test_paged_cache_load(torch_npu: Any, home: str) -> None:
    space = {"namespace": torch_npu, "atb module": torch_npu.atb, "torch.ops": torch.ops.atb}[home]
    caches = cache(), cache(DV)
    want = [gathered(c) for c in caches]
    made = space.npu_paged_cache_load(*caches, ints(*TABLE), ints(*LENGTHS))
    same(*zip(made, want, strict=True))
    made = space.npu_paged_cache_load(*caches, ints(*TABLE), ints(0, 11, 19), cumsum=True)
    same(*zip(made, want, strict=True))
    out = [torch.empty_like(w) for w in want]
    returned = space.npu_paged_cache_load(
        *caches, ints(*TABLE), ints(*LENGTHS), seq_starts=ints(0, 0), key=out[0], value=out[1]
    )
    assert [r is o for r, o in zip(returned, out, strict=True)] == [True, True]
    same(*zip(out, want, strict=True))


def test_paged_cache_load_starts_at_a_block(torch_npu: Any) -> None:
    caches = cache(), cache()
    made = torch_npu.npu_paged_cache_load(
        *caches, ints(*TABLE), ints(3, 8), seq_starts=ints(BS + 1, 0)
    )
    same((made[0][:3], caches[0][1, :3]), (made[1][3:], caches[1][3]))


def test_paged_cache_load_of_nothing(torch_npu: Any) -> None:
    key, value = torch_npu.npu_paged_cache_load(cache(), cache(DV), ints(*TABLE), ints(0, 0))
    assert (key.shape, value.shape) == ((0, H, D), (0, H, DV))
    with pytest.raises(kvcore.ParamInvalidError, match=r"^context_lens: expected dtype int32"):
        torch_npu.npu_paged_cache_load(cache(), cache(), ints(*TABLE), torch.tensor([1.0, 2.0]))
    with pytest.raises(kvcore.ParamInvalidError, match=r"^value_cache: expected shape \[nb, bs"):
        torch_npu.npu_paged_cache_load(cache(), cache()[0], ints(*TABLE), ints(0, 0))


# ---------------------------------------------------------------- npu_gather_pa_kv_cache
def test_gather(torch_npu: Any) -> None:
    caches = cache(), cache(DV)
    want = [gathered(c) for c in caches]
    out = [torch.empty_like(w) for w in want]
    torch_npu.npu_gather_pa_kv_cache(*caches, ints(*TABLE), ints(*LENGTHS), *out)
    same(*zip(out, want, strict=True))
    out = [torch.empty_like(w) for w in want]
    torch_npu.npu_gather_pa_kv_cache(
        key_cache=caches[0],
        value_cache=caches[1],
        block_tables=ints(*TABLE),
        seq_lens=ints(0, 11, 19),
        key=out[0],
        value=out[1],
        seq_offset=ints(0, 0),
        is_seq_lens_cumsum=True,
    )
    same(*zip(out, want, strict=True))
    zeros = [torch.zeros_like(w) for w in want]
    made = torch_npu.npu_gather_pa_kv_cache_functional(
        *caches, ints(*TABLE), ints(*LENGTHS), *zeros, seq_offset=None
    )
    same(*zip(made, want, strict=True))
    assert not zeros[0].any()


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("tagged", [False, True])
def test_gather_from_pa_nz(torch_npu: Any, axes: int, tagged: bool) -> None:
    """By the rank of key, or by the tag of the cache."""
    if axes == 3 and not tagged:
        pytest.skip("nothing says that this cache is PA_NZ")
    caches = cache(), cache(DV)
    want = [gathered(c) for c in caches]
    nz = [to_nz(c) for c in caches]
    if tagged:
        nz = [torch_npu.npu_format_cast(c, 29) for c in nz]
    out = [torch.empty_like(w) if axes == 3 else torch.empty_like(w).flatten(1) for w in want]
    torch_npu.npu_gather_pa_kv_cache(*nz, ints(*TABLE), ints(*LENGTHS), *out)
    same(*((o.view(w.shape), w) for o, w in zip(out, want, strict=True)))
    torch_npu.npu_paged_cache_load(*nz, ints(*TABLE), ints(*LENGTHS), key=out[0], value=out[1])
    same(*((o.view(w.shape), w) for o, w in zip(out, want, strict=True)))


def test_gather_into_what_cannot_be_flattened(torch_npu: Any) -> None:
    nz = [torch_npu.npu_format_cast(to_nz(cache()), 29) for _ in range(2)]
    out = torch.empty(19, H, 2 * D).half()[..., :D]
    with pytest.raises(kvcore.ParamInvalidError, match=r"^key: expected tokens of one piece each"):
        torch_npu.npu_gather_pa_kv_cache(*nz, ints(*TABLE), ints(*LENGTHS), out, out.clone())


def test_loading_nz_needs_the_outputs(torch_npu: Any) -> None:
    nz = [torch_npu.npu_format_cast(to_nz(cache()), 29) for _ in range(2)]
    with pytest.raises(
        kvcore.ParamInvalidError, match=r"^key_cache: expected an ND cache, or key="
    ):
        torch_npu.npu_paged_cache_load(*nz, ints(*TABLE), ints(*LENGTHS))


# ---------------------------------------------------------------- npu_format_cast
def test_a_tag_survives_views(torch_npu: Any) -> None:
    key, value, key_cache, value_cache = tokens(), tokens(), cache(), cache()
    both = torch.stack([to_nz(key_cache), to_nz(value_cache)])
    tagged = torch_npu.npu_format_cast(both, torch_npu.Format.FRACTAL_NZ)
    for view in (tagged[0], tagged[:, 1:3], tagged.view(-1), tagged.view(torch.int16)):
        assert torch_npu.get_npu_format(view) == 29
    for own in (both, tagged.clone(), tagged + 0, torch.zeros(3)):
        assert torch_npu.get_npu_format(own) == 2
    torch_npu._npu_reshape_and_cache(key, value, tagged[0], tagged[1], ints(*SLOTS))
    same(
        (tagged[0], to_nz(written(key_cache, key, SLOTS))),
        (tagged[1], to_nz(written(value_cache, value, SLOTS))),
        (both[0], to_nz(key_cache)),
    )
    torch_npu._npu_reshape_and_cache_siso(key, tagged[1], ints(*SLOTS))
    same((tagged[1], to_nz(written(value_cache, key, SLOTS))))


def test_a_cast_makes_a_tensor_of_its_own(torch_npu: Any) -> None:
    plain = torch.randn(2, 3, 4)[:, 1:].transpose(0, 1)
    assert torch_npu.npu_format_cast(plain, 2) is plain
    assert torch_npu.npu_format_cast(plain, 0) is plain
    nz = torch_npu.npu_format_cast(plain, 29)
    assert torch_npu.npu_format_cast(nz, 29) is nz
    nd = torch_npu.npu_format_cast(nz, 2)
    assert [torch_npu.get_npu_format(x) for x in (plain, nz, nd)] == [2, 29, 2]
    assert len({x.data_ptr() for x in (plain, nz, nd)}) == 3
    same((plain, nz), (nd, nz))


def test_a_tensor_stands_for_its_format(torch_npu: Any) -> None:
    plain, other = torch.randn(3, 4), torch.zeros(1)
    nz = torch_npu.npu_format_cast(plain, 29)
    like = torch_npu.npu_format_cast(plain, nz)
    assert torch_npu.get_npu_format(like) == 29
    assert like.data_ptr() not in (plain.data_ptr(), nz.data_ptr())
    assert torch_npu.npu_format_cast(plain, other) is plain
    assert torch_npu.get_npu_format(torch_npu.npu_format_cast(nz, other)) == 2


def test_a_cast_in_place(torch_npu: Any) -> None:
    x = torch.randn(3, 4)
    view, before = x[1:], x.clone()
    for acl_format in (29, 29, 2, 0, 29):
        assert torch_npu.npu_format_cast_(x, acl_format) is x
        assert torch_npu.get_npu_format(view) == (29 if acl_format == 29 else 2)
        same((x, before))
    source = torch.randn(3, 4)
    assert torch_npu.npu_format_cast_(x, source) is x  # copied over, in the format it has
    assert [torch_npu.get_npu_format(t) for t in (x, source)] == [29, 2]
    same((x, source))
    with pytest.raises(kvcore.ParamInvalidError, match=r"^acl_format: expected a tensor of shape"):
        torch_npu.npu_format_cast_(x, source[:2])
    same((x, source))


def test_the_width_of_a_cast_is_taken(torch_npu: Any) -> None:
    for dtype in (torch.int8, 1, None):
        for cast in (torch_npu.npu_format_cast, torch_npu.npu_format_cast_):
            made = cast(torch.ones(2, 2), 29, customize_dtype=dtype, input_dtype=dtype)
            assert torch_npu.get_npu_format(made) == 29
            for wrong in ({"customize_dtype": "int8"}, {"input_dtype": True}):
                message = rf"^{next(iter(wrong))}: expected a torch.dtype, a number or None"
                with pytest.raises(kvcore.ParamInvalidError, match=message):
                    cast(torch.ones(2, 2), 29, **wrong)


@pytest.mark.parametrize("cache_mode", ["Norm", None, ""])
def test_a_mode_that_the_tag_contradicts(torch_npu: Any, cache_mode: str | None) -> None:
    key, plain = tokens(), cache()
    nz = torch_npu.npu_format_cast(to_nz(cache()), 29)
    for caches in ((nz, plain), (plain, nz)):
        before = [c.clone() for c in caches]
        with pytest.raises(kvcore.ParamInvalidError, match=r"^cache_mode: expected 'PA_NZ' for a"):
            torch_npu.npu_scatter_pa_kv_cache(
                key, key, *caches, ints(*SLOTS), cache_mode=cache_mode
            )
        same(*zip(caches, before, strict=True))
    with pytest.raises(kvcore.ParamInvalidError, match=r"^key_cache: expected an ND cache"):
        torch_npu.npu_scatter_pa_cache(key, ints(*SLOTS), key_cache=nz)


@pytest.mark.parametrize("tagged", [False, True])
def test_pa_nz_needs_no_tag(torch_npu: Any, tagged: bool) -> None:
    key, plain = tokens(), [cache() for _ in range(2)]
    caches = [to_nz(c) for c in plain]
    want = [to_nz(written(c, key, SLOTS)) for c in plain]
    if tagged:
        caches = [torch_npu.npu_format_cast_(c, 29) for c in caches]
    torch_npu.npu_scatter_pa_kv_cache(key, key, *caches, ints(*SLOTS))
    same(*zip(caches, want, strict=True))


@pytest.mark.parametrize("cache_mode", ["Norm", None, ""])
def test_modes_of_an_nd_cache(torch_npu: Any, cache_mode: str | None) -> None:
    """None is ND, although the default is PA_NZ."""
    key, value, key_cache, value_cache = tokens(), tokens(), cache(), cache()
    want = written(key_cache, key, SLOTS), written(value_cache, value, SLOTS)
    torch_npu.npu_scatter_pa_kv_cache(
        key, value, key_cache, value_cache, ints(*SLOTS), cache_mode=cache_mode
    )
    same((key_cache, want[0]), (value_cache, want[1]))


def test_a_tagged_selection(torch_npu: Any) -> None:
    given = selection(2, 1, [1, 1], tnd=False)
    for name in ("selection_k_rope", "selection_kv_cache", "full_k_rope", "full_kv_cache"):
        with pytest.raises(kvcore.ParamInvalidError, match=rf"^{name}: expected an ND cache"):
            torch_npu.npu_gather_selection_kv_cache(
                **{**given, name: torch_npu.npu_format_cast(given[name], 29)}
            )
    torch_npu.npu_gather_selection_kv_cache(**given)


@pytest.mark.parametrize("acl_format", [3, "NZ", None, True, 2.5])
def test_formats_that_there_are_not(torch_npu: Any, acl_format: Any) -> None:
    with pytest.raises(kvcore.ParamInvalidError, match=r"^acl_format: expected one of 0"):
        torch_npu.npu_format_cast(torch.zeros(2), acl_format)


def test_one_cache_tagged_and_one_not(torch_npu: Any) -> None:
    tagged = torch_npu.npu_format_cast(to_nz(cache()), 29)
    with pytest.raises(kvcore.ParamInvalidError, match=r"^value_cache: expected the format of key"):
        torch_npu._npu_reshape_and_cache(tokens(), tokens(), tagged, to_nz(cache()), ints(*SLOTS))


# ---------------------------------------------------------------- npu_scatter_nd_update_
@pytest.mark.parametrize("dtype", [torch.float16, torch.int64, torch.float64, torch.bool])
def test_rows_by_index(torch_npu: Any, dtype: Any) -> None:
    target = torch.randint(0, 2, (5, 3, 4)).to(dtype)
    updates = torch.randint(0, 2, (3, 3, 4)).to(dtype)
    want = target.clone()
    want[3], want[0] = updates[2], updates[1]
    indices = ints([3], [0], [3])  # the last one wins
    made = torch_npu.npu_scatter_nd_update(target, indices, updates)
    same((made, want))
    assert torch_npu.npu_scatter_nd_update_(target, indices.long(), updates) is target
    same((target, want))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_rows_by_several_indices(torch_npu: Any, depth: int) -> None:
    target = torch.randn(4, 3, 5, 2)
    slab = torch.zeros(4, 3, 5, 6)
    slab[..., 1:3] = target
    rows = torch.stack([torch.randint(0, n, (2, 7)) for n in target.shape[:depth]], -1)
    rows[1, 3, 0] = -1  # writes nothing
    updates = torch.randn(2, 7, *target.shape[depth:])
    want = target.clone()
    for i in range(2):
        for j in range(7):
            if (rows[i, j] >= 0).all():
                want[tuple(rows[i, j])] = updates[i, j]
    same((torch_npu.npu_scatter_nd_update(target, rows, updates), want))
    torch_npu.npu_scatter_nd_update_(slab[..., 1:3], rows, updates)
    same((slab[..., 1:3], want))
    assert not slab[..., 3:].any()


def test_one_value_an_index(torch_npu: Any) -> None:
    mapping = torch.zeros(6, dtype=torch.int64)
    torch_npu.npu_scatter_nd_update_(mapping, ints([5], [2]), torch.tensor([7, 8]))
    assert mapping.tolist() == [0, 0, 8, 0, 0, 7]


@pytest.mark.parametrize(
    ("target", "indices", "updates", "message"),
    [
        ((4, 3), [[4]], (1, 3), "indices[0, 0]: expected an index < 4 (axis 0 of self), got 4"),
        ((4, 3), [[1, 3]], (1,), "indices[0, 1]: expected an index < 3 (axis 1 of self), got 3"),
        ((4, 3), [[1]], (1, 2), "updates: expected shape [1, 3], got [1, 2]"),
        ((4, 3), [[1, 2, 0]], (1,), "indices: expected shape [..., a] with 1 <= a <= 2"),
        ((4, 3), [[1.5]], (1, 3), "indices: expected dtype int32 or int64, got float32"),
    ],
)
def test_rows_that_there_are_not(
    torch_npu: Any, target: Any, indices: Any, updates: Any, message: str
) -> None:
    before = torch.randn(target)
    now = before.clone()
    with pytest.raises(kvcore.ParamInvalidError, match=r"^" + re.escape(message)):
        torch_npu.npu_scatter_nd_update_(now, torch.tensor(indices), torch.ones(updates))
    same((now, before))


def test_updates_of_another_dtype(torch_npu: Any) -> None:
    with pytest.raises(kvcore.ParamInvalidError, match=r"^updates: expected dtype torch.float32"):
        torch_npu.npu_scatter_nd_update_(torch.zeros(4, 3), ints([1]), torch.ones(1, 3).half())


# ---------------------------------------------------------------- npu_gather_selection_kv_cache
def selection(batch: int, steps: int, q_lens: list[int], tnd: bool) -> dict[str, Any]:
    rows, topk, block, blocks = batch * steps, 4, 2, 6
    outer = (rows,) if tnd else (batch, steps)
    full = (
        torch.randn(batch * blocks, block, 8).half(),
        torch.randn(batch * blocks, block, 4).half(),
    )
    return {
        "selection_k_rope": torch.zeros(rows * topk, block, 4).half(),
        "selection_kv_cache": torch.zeros(rows * topk, block, 8).half(),
        "selection_kv_block_table": torch.arange(rows * topk, dtype=torch.int32).view(rows, topk),
        "selection_kv_block_status": torch.full((*outer, 1, topk + 1), -1, dtype=torch.int32),
        "selection_topk_indices": ints(4, 1, 0, 3).expand(*outer, 1, topk).contiguous(),
        "full_k_rope": full[1],
        "full_kv_cache": full[0],
        "full_kv_block_table": torch.arange(batch * blocks, dtype=torch.int32).view(batch, blocks),
        "full_kv_actual_seq": ints(*[11] * batch),
        "full_q_actual_seq": ints(*q_lens),
        "selection_topk_block_size": block,
    }


def clones(given: dict[str, Any]) -> dict[str, Any]:
    return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in given.items()}


@pytest.mark.parametrize("tnd", [False, True])
@pytest.mark.parametrize(
    ("q_lens", "totals"),
    [
        ([1, 1, 1], False),
        ([2, 1, 2], False),
        ([2, 4, 6], True),
        ([1, 2, 4], True),
        ([2, 2, 3], True),
        ([0, 1, 2], False),  # may be either: lengths, as the operator has it
    ],
)
def test_query_lengths_are_lengths_or_totals(
    torch_npu: Any, tnd: bool, q_lens: list[int], totals: bool
) -> None:
    given = selection(3, 2, q_lens, tnd)
    own = clones(given)
    lengths = torch_npu.npu_gather_selection_kv_cache(**given)
    want = kvcore.gather_selection_kv_cache(**own, q_lens_cumulative=totals)
    assert (lengths.dtype, lengths.tolist()) == (torch.int32, want.tolist())
    same(*((given[n], own[n]) for n in own if n != "selection_topk_block_size"))


@pytest.mark.parametrize("q_lens", [[3, 1, 1], [3, 5, 4], [2, 4, 7], [-1, 1, 3]])
def test_query_lengths_that_are_neither(torch_npu: Any, q_lens: list[int]) -> None:
    with pytest.raises(kvcore.ParamInvalidError, match=r"^full_q_actual_seq"):
        torch_npu.npu_gather_selection_kv_cache(**selection(3, 2, q_lens, False))


def test_selection_positional_and_functional(torch_npu: Any) -> None:
    given = selection(2, 1, [1, 1], False)
    del given["selection_topk_block_size"]
    values = list(clones(given).values())
    made = torch.ops.custom.npu_gather_selection_kv_cache_functional(
        *values, selection_topk_block_size=2
    )
    same(*zip(values, given.values(), strict=True))
    lengths = torch.ops.custom.npu_gather_selection_kv_cache(*values, selection_topk_block_size=2)
    same(*zip(made, [lengths, *values[:4]], strict=True))


def test_selection_without_rope(torch_npu: Any) -> None:
    given = selection(2, 1, [1, 1], False)
    for name in ("selection_k_rope", "full_k_rope"):
        given[name] = torch.empty(0).half()
    assert torch_npu.npu_gather_selection_kv_cache(**given).tolist() == [8, 8]
