# SPDX-License-Identifier: Apache-2.0
"""torch.ops.kvcore: the right bytes in place, torch's own checks, compiled code, bad tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcore
import strategies
from cases import Case, check_matches_oracle
from tensors import WITHOUT_TORCH, raw_types, tensors

torch = pytest.importorskip("torch", reason=WITHOUT_TORCH)
import kvcore.torch  # noqa: E402

OPS = torch.ops.kvcore
BLOCKS, BLOCK_SIZE, HEADS, SIZE = 4, 4, 2, 16


# ---------------------------------------------------------------- against the oracle
def through_torch(operator: str) -> Callable[..., Any]:
    def call(**arguments: Any) -> Any:
        arguments.pop("stats", None)
        given = {**raw_types(arguments), **tensors(arguments)}
        if isinstance(given.get("layer_id"), int):
            given["layer_id"] = torch.tensor([given["layer_id"]], dtype=given["seq_len"].dtype)
        returned = getattr(OPS, operator)(**given)
        if operator == "kv_cache_update":
            return arguments["past"]
        return None if returned is None else returned.numpy()

    return call


@settings(max_examples=30)
@given(st.data())
@pytest.mark.parametrize("scenario", range(1, 8))
def test_scatter_matches_the_oracle(scenario: int, data: st.DataObject) -> None:
    case = data.draw(strategies.scatter_cases(scenarios=(scenario,)))
    check_matches_oracle(case, through_torch("scatter_pa_kv_cache"))


@settings(max_examples=30)
@given(st.data())
@pytest.mark.parametrize(
    "operator",
    ["scatter_pa_cache", "kv_cache_update", "gather_pa_kv_cache", "gather_selection_kv_cache"],
)
def test_the_others_match_the_oracle(operator: str, data: st.DataObject) -> None:
    strategy = {
        "scatter_pa_cache": strategies.scatter_pa_cache_cases,
        "kv_cache_update": strategies.kv_cache_update_cases,
        "gather_pa_kv_cache": strategies.gather_pa_cases,
        "gather_selection_kv_cache": strategies.gather_selection_cases,
    }[operator]
    case: Case = data.draw(strategy())
    check_matches_oracle(case, through_torch(operator), stats=False)


# ---------------------------------------------------------------- torch's own checks
def caches(shape: tuple[int, ...] = (BLOCKS, BLOCK_SIZE, HEADS, SIZE)) -> tuple[Any, Any]:
    return torch.randn(shape), torch.randn(shape)


def tokens(count: int = 3) -> tuple[Any, Any]:
    return torch.randn(count, HEADS, SIZE), torch.randn(count, HEADS, SIZE)


def slots(count: int = 3) -> Any:
    return torch.tensor([5, -1, 9, 2, 14][:count])


def scatter_arguments() -> tuple[Any, ...]:
    (key, value), (key_cache, value_cache) = tokens(), caches()
    return key, key_cache, slots(), value, value_cache


def selection_arguments() -> tuple[Any, ...]:
    def ints(*values: Any) -> Any:
        return torch.tensor(values, dtype=torch.int32)

    return (
        torch.randn(4, 4, 4),
        torch.randn(4, 4, 8),
        ints([0, 1], [2, 3]),
        torch.full((2, 1, 1, 5), -1, dtype=torch.int32),
        ints([[[3, 1, 0, 9]]], [[[2, 0, 5, -1]]]),
        torch.randn(6, 4, 4),
        torch.randn(6, 4, 8),
        ints([0, 1, 2], [3, 4, 5]),
        ints(10, 7),
        ints(1, 1),
    )


def samples() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    key, key_cache, where, value, value_cache = scatter_arguments()
    lengths, table = torch.tensor([2, 3]), torch.tensor([[0, 1], [3, 2]])
    past = torch.randn(2, 2, 8, 6)
    update = (
        torch.randn(3, 6),
        torch.tensor([1]),
        past,
        torch.tensor([4, 8]),
        torch.tensor([1, 2]),
    )
    gathered = torch.zeros(5, HEADS, SIZE), torch.zeros(5, HEADS, SIZE)
    selection = {"selection_topk_block_size": 1}
    return {
        "scatter_pa_kv_cache": ((key, key_cache, where, value, value_cache), {}),
        "reshape_and_cache": ((key, value, key_cache, value_cache, where), {}),
        "scatter_pa_cache": ((key, key_cache, where), {}),
        "kv_cache_update": (update, {}),
        "gather_pa_kv_cache": ((key_cache, value_cache, table, lengths, *gathered), {}),
        "gather_selection_kv_cache": (selection_arguments(), selection),
    }


def test_every_operator_has_a_sample() -> None:
    assert {f"{name}{twin}" for name in samples() for twin in ("", "_functional")} == set(
        kvcore.torch.OPERATORS
    )


@pytest.mark.parametrize("name", kvcore.torch.OPERATORS)
def test_opcheck(name: str) -> None:
    plain = name.removesuffix("_functional")
    arguments, keywords = samples()[plain]
    torch.library.opcheck(getattr(OPS, name).default, arguments, keywords)


@pytest.mark.parametrize("name", ["scatter_pa_kv_cache", "reshape_and_cache", "gather_pa_kv_cache"])
@pytest.mark.parametrize("twin", ["", "_functional"])
def test_opcheck_key_only(name: str, twin: str) -> None:
    arguments, keywords = samples()[name]
    absent = {
        "scatter_pa_kv_cache": (3, 4),
        "reshape_and_cache": (1, 3),
        "gather_pa_kv_cache": (1, 5),
    }
    given = tuple(None if i in absent[name] else a for i, a in enumerate(arguments))
    torch.library.opcheck(getattr(OPS, name + twin).default, given, keywords)


@pytest.mark.parametrize("name", list(samples()))
def test_the_functional_form_returns_what_the_other_writes(name: str) -> None:
    arguments, keywords = samples()[name]
    own = [a.clone() for a in arguments]
    returned = getattr(OPS, f"{name}_functional")(*own, **keywords)
    returned = returned if isinstance(returned, tuple | list) else [returned]
    for before, after in zip(arguments, own, strict=True):
        assert torch.equal(before, after), "an argument of the functional form was written"
    result = getattr(OPS, name)(*own, **keywords)
    schema = getattr(OPS, name).default._schema
    wanted = [] if result is None else [result]
    wanted += [a for a, s in zip(own, schema.arguments, strict=False) if s.alias_info is not None]
    assert len(returned) == len(wanted)
    for seen, want in zip(returned, wanted, strict=True):
        assert torch.equal(seen, want)


# ---------------------------------------------------------------- memory and dtypes
def test_views_are_written_where_they_lie() -> None:
    slab = torch.zeros(BLOCKS, 2, BLOCK_SIZE, HEADS, SIZE)
    key, value = tokens()
    key_cache, value_cache = slab[:, 0], slab[:, 1]
    place = slab.data_ptr()
    OPS.scatter_pa_kv_cache(key, key_cache, slots(), value, value_cache)
    assert slab.data_ptr() == place
    assert torch.equal(slab[1, 0, 1], key[0])
    assert torch.equal(slab[1, 1, 1], value[0])
    assert torch.equal(slab[2, 0, 1], key[2])
    assert slab.count_nonzero() == 4 * HEADS * SIZE


@pytest.mark.parametrize(
    "name",
    ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2", "int8", "uint16"],
)
def test_dtypes(name: str) -> None:
    kind = getattr(torch, name, None)
    if kind is None:
        pytest.skip(f"this torch has no {name}")

    def raw(*shape: int) -> Any:
        return torch.randint(0, 256, (*shape, SIZE * kind.itemsize), dtype=torch.uint8)

    key, cache = raw(3, HEADS), raw(BLOCKS, BLOCK_SIZE, HEADS)
    want = cache.clone()
    want[1, 1], want[2, 1] = key[0], key[2]
    made = OPS.scatter_pa_kv_cache_functional(key.view(kind), cache.view(kind), slots())[0]
    assert made.dtype == kind
    assert torch.equal(made.view(torch.uint8), want)
    OPS.scatter_pa_kv_cache(key.view(kind), cache.view(kind), slots())
    assert torch.equal(cache, want)


# ---------------------------------------------------------------- compiled code
def step(key: Any, value: Any, key_cache: Any, value_cache: Any, where: Any, out: Any) -> Any:
    """Scatter tokens that are computed, gather them back, and compute on."""
    OPS.scatter_pa_kv_cache(key * 2, key_cache, where, value + 1, value_cache)
    table, lengths = torch.tensor([[0, 1, 2, 3]]), torch.tensor([BLOCKS * BLOCK_SIZE])
    OPS.gather_pa_kv_cache(key_cache, value_cache, table, lengths, out, out_value := out.clone())
    made, _ = OPS.scatter_pa_kv_cache_functional(key, key_cache, where)
    return out.sum() + out_value.amax() + made.view(-1, HEADS, SIZE)[where]


def test_compiled_code_scatters_and_gathers() -> None:
    torch.compiler.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    (key, value), (key_cache, value_cache) = tokens(), caches()
    twins = key_cache.clone(), value_cache.clone()
    places = key_cache.data_ptr(), value_cache.data_ptr()
    for i in range(2):
        where = slots().roll(i)
        out = torch.empty(BLOCKS * BLOCK_SIZE, HEADS, SIZE)
        own = torch.empty_like(out)
        result = compiled(key, value, key_cache, value_cache, where, out)
        torch.testing.assert_close(result, step(key, value, *twins, where, own))
        for seen, want in zip((key_cache, value_cache, out), (*twins, own), strict=True):
            assert torch.equal(seen, want)
    assert places == (key_cache.data_ptr(), value_cache.data_ptr())


@pytest.mark.timeout(600)  # torch compiles C++ for it
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
def test_the_default_compiler() -> None:
    @torch.compile(fullgraph=True)
    def small(key: Any, cache: Any, where: Any, out: Any) -> Any:
        OPS.scatter_pa_kv_cache(key * 2, cache, where)
        OPS.gather_pa_kv_cache(cache, None, torch.tensor([[1]]), torch.tensor([2]), out, None)
        return out + 1

    from torch._inductor import config

    torch.compiler.reset()
    key, cache = tokens(2)[0], caches()[0]
    out = torch.empty(2, HEADS, SIZE)
    # Without trying out which vector instructions torch's own loops could use, in this process.
    with config.patch({"cpp.vec_isa_ok": False, "compile_threads": 1}):
        result = small(key, cache, torch.tensor([5, 4]), out)
    assert torch.equal(cache[1, :2], (key * 2).flip(0))
    assert torch.equal(out, cache[1, :2])
    assert torch.equal(result, out + 1)


def test_compiled_selection() -> None:

    def chosen(*arguments: Any) -> Any:
        lengths = OPS.gather_selection_kv_cache(*arguments, selection_topk_block_size=1)
        return lengths * 2, arguments[1] + 0

    arguments = selection_arguments()
    own = tuple(a.clone() for a in arguments)
    torch.compiler.reset()
    compiled = torch.compile(chosen, backend="aot_eager", fullgraph=True)
    for seen, want in zip(compiled(*arguments), chosen(*own), strict=True):
        assert torch.equal(seen, want)
    for seen, want in zip(arguments, own, strict=True):
        assert torch.equal(seen, want)


# ---------------------------------------------------------------- bad tensors
def quantized(x: Any) -> Any:
    return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


BAD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "sparse": (lambda x: x.to_sparse(), "expected a dense (strided) tensor"),
    "csr": (lambda x: x.to_sparse_csr(), "expected a dense (strided) tensor"),
    "mkldnn": (lambda x: x.to_mkldnn(), "expected a dense (strided) tensor"),
    "requires grad": (lambda x: x.requires_grad_(), "expected a tensor that does not require grad"),
    "meta": (lambda x: x.to("meta"), "expected tensors with memory, got one on device 'meta'"),
    "neg": (lambda x: torch._neg_view(x), "expected a tensor without a conj or neg view"),
    "complex": (lambda x: x.to(torch.complex64), "expected a dtype among"),
    "float64": (lambda x: x.double(), "expected a dtype among"),
    "quantized": (quantized, "expected a tensor that is not quantized"),
}


@pytest.mark.filterwarnings("ignore:.*(Sparse|sparse|quantiz).*:UserWarning")
@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("argument", ["key", "key_cache"])
def test_bad_tensors(kind: str, argument: str) -> None:
    key, cache = tokens()[0], caches()[0]
    given = {"key": key, "key_cache": cache}
    make, message = BAD[kind]
    bad = make(given[argument].clone())
    if bad.layout is torch.sparse_csr and argument == "key_cache":
        pytest.skip("four axes are not a CSR tensor")
    given[argument] = bad
    before = cache.clone()
    with pytest.raises(kvcore.ParamInvalidError, match=re.escape(message)) as caught:
        OPS.scatter_pa_kv_cache(**given, slot_mapping=slots())
    assert kind == "meta" or caught.value.argument == argument
    assert torch.equal(cache, before)


def test_all_on_meta_is_refused_too() -> None:
    key, cache, where = (x.to("meta") for x in (tokens()[0], caches()[0], slots()))
    with pytest.raises(kvcore.ParamInvalidError, match="tensors with memory"):
        OPS.scatter_pa_kv_cache(key, cache, where)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_is_refused() -> None:
    key, cache = tokens()[0], caches()[0]
    with pytest.raises(kvcore.ParamInvalidError, match="device 'cuda'"):
        OPS.scatter_pa_kv_cache(key.cuda(), cache, slots())


def test_none_for_a_tensor() -> None:
    with pytest.raises(kvcore.ParamNullError, match=r"^key: expected an array, got None$"):
        OPS.scatter_pa_kv_cache(None, caches()[0], slots())


def test_a_list_for_a_tensor_is_torch_s_own_error() -> None:
    with pytest.raises(RuntimeError, match="slot_mapping"):
        OPS.scatter_pa_kv_cache(tokens()[0], caches()[0], [1, 2, 3])


def test_values_are_checked_and_nothing_is_written() -> None:
    key, cache = tokens()[0], caches()[0]
    before = cache.clone()
    with pytest.raises(kvcore.SlotRangeError, match=r"^slot_mapping\[1\]: expected slot < 16 "):
        OPS.scatter_pa_kv_cache(key, cache, torch.tensor([0, 16, 1]))
    with pytest.raises(kvcore.ParamInvalidError, match=r"^key_cache: expected shape"):
        OPS.scatter_pa_kv_cache(key, cache, slots(), cache_mode="PA_NZ")
    with pytest.raises(kvcore.ParamInvalidError, match=r"bytes shared with key$"):
        OPS.scatter_pa_kv_cache(cache[0, :3], cache, slots())
    assert torch.equal(cache, before)


def test_outputs_that_overlap_themselves() -> None:
    folded = torch.zeros(HEADS, SIZE).expand(BLOCKS, BLOCK_SIZE, HEADS, SIZE)
    with pytest.raises(kvcore.ParamInvalidError, match="elements with bytes of their own"):
        OPS.scatter_pa_kv_cache(tokens()[0], folded, slots())
