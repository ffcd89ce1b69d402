# SPDX-License-Identifier: Apache-2.0
"""Compression (scatter scenarios 3, 4, 5) and scatter_pa_cache: right bytes, however they lie."""

from __future__ import annotations

import ctypes
import inspect
import platform
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcore
import oracle
import strategies
from cases import Case, check_matches_oracle
from kvcore._kernels import isa
from oracle_numbers import FLOAT4, FLOATS, ITEMSIZE, Array, encode, is_nan, raw_dtype
from oracle_rules import addresses
from oracle_scatter import run_tokens
from strategies_arrays import content

SCENARIOS = [(3, "Alibi"), (3, "Rope"), (3, "Omni"), (4, "Alibi"), (5, "Rope"), (5, "Omni")]
MEAN_TYPES = [name for name in ITEMSIZE if name not in FLOAT4]
FLOAT_TYPES = [name for name in MEAN_TYPES if name in FLOATS]


@pytest.fixture(params=isa.available())
def each_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once for each instruction set."""
    before = isa.current(), isa.path()
    isa.select(request.param, before[1])
    yield request.param
    isa.select(*before)


@pytest.fixture
def streaming() -> Iterator[None]:
    """Store past the caches however little is written."""
    before = isa.stream_bytes()
    isa.set_stream_bytes(0)
    yield
    isa.set_stream_bytes(before)


def windows_call(
    number: int,
    rule: str,
    element: str,
    *,
    lengths: list[int],
    heads: int = 3,
    sizes: tuple[int, int] = (20, 12),
    index: str = "int32",
    key_only: bool = False,
    kind: str = "wide",
    seed: int = 0,
    block_size: int = 4,
    spare_blocks: int = 0,
) -> dict[str, Any]:
    """A legal call whose runs lie one after the other with gaps, windows drawn."""
    rng = np.random.default_rng(seed)
    batch = len(lengths)
    windows, starts, slots, first = [], [], [], 0
    for n in lengths:
        for _ in range(heads):
            o = -1 if rule == "Alibi" else int(rng.integers(-1, n + 1))
            w = int(rng.integers(0, n - max(o, 0) + 1))
            windows.append(w)
            starts.append(o)
            slots.append(first)
            first += len(run_tokens(rule, n, w, o)) + int(rng.integers(0, 3))
    outer = (batch, max(lengths)) if number == 3 else (sum(lengths),)
    blocks = -(-max(first, 1) // block_size) + spare_blocks

    def data(shape: tuple[int, ...]) -> Array:
        return content(rng, shape, element, kind)

    a: dict[str, Any] = {
        "key": data((*outer, heads, sizes[0])),
        "key_cache": data((blocks, block_size, 1, sizes[0])),
        "slot_mapping": np.array(slots, index),
        "compress_lens": np.array(windows, index),
        "seq_lens": np.array(lengths, index),
        "dtype": element,
        "scatter_mode": rule,
    }
    if not key_only:
        a["value"] = data((*outer, heads, sizes[1]))
        a["value_cache"] = data((blocks, block_size, 1, sizes[1]))
        a["value_dtype"] = element
    if rule != "Alibi":
        a["compress_seq_offset"] = np.array(starts, index)
    if number == 3:
        a["slot_mapping"] = a["slot_mapping"].reshape(batch, heads)
    if element.startswith("int"):
        for name in ("key", "key_cache", "value", "value_cache"):
            if name in a:
                a[name] = a[name].view(element)
    return a


def check(arguments: dict[str, Any], operator: str = "scatter_pa_kv_cache", **more: Any) -> None:
    """Run a call; its caches must hold what the oracle says, and nothing else may change."""
    arrays = {n: a for n, a in arguments.items() if isinstance(a, np.ndarray)}
    if sum(a.nbytes for a in arrays.values()) < 1 << 16:  # it lists every byte
        assert oracle.violations(operator, arguments) == []
    want = oracle.run(operator, arguments)
    before = {n: a.tobytes() for n, a in arrays.items()}
    getattr(kvcore, operator)(**arguments, **more)
    for name, bytes_before in before.items():
        array = arguments[name]
        if name in want.outputs:
            expected = oracle.settle(want, name, array, arguments.get("dtype"))
            np.testing.assert_array_equal(oracle.bits(array), expected, err_msg=name)
        else:
            assert array.tobytes() == bytes_before, f"{name} was written"


# ---------------------------------------------------------------- every type
@pytest.mark.parametrize("element", ITEMSIZE)
@pytest.mark.parametrize("number", [3, 4, 5])
@settings(max_examples=12)
@given(st.data(), st.sampled_from([1, 2, 3, 8]))
def test_generated_calls(number: int, element: str, data: st.DataObject, num_threads: int) -> None:
    # float4 has no mean, so a Rope call needs another type to draw.
    dtypes = (element, "uint8") if element in FLOAT4 else (element,)
    case: Case = data.draw(strategies.scatter_cases(scenarios=(number,), dtypes=dtypes))
    check_matches_oracle(case, partial(kvcore.scatter_pa_kv_cache, num_threads=num_threads))


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize(
    ("number", "rule", "element"),
    [
        (number, rule, element)
        for number, rule in SCENARIOS
        for element in (MEAN_TYPES if rule == "Rope" else ITEMSIZE)
    ],
)
def test_every_scenario_type_and_index(number: int, rule: str, element: str, index: str) -> None:
    for seed, key_only in enumerate((False, True)):
        arguments = windows_call(
            number, rule, element, lengths=[7, 0, 12], index=index, key_only=key_only, seed=seed
        )
        check(arguments, num_threads=1 + seed)


# ---------------------------------------------------------------- means
def mean_of(element: str, rows: Array) -> Array:
    """The mean of rows [w, D] (raw bits), as the package makes it."""
    w, size = rows.shape
    cache = np.zeros((1, 1, 1, size), rows.dtype)
    kvcore.scatter_pa_kv_cache(
        rows.reshape(w, 1, size),
        cache,
        np.zeros(1, np.int64),
        compress_lens=np.array([w]),
        compress_seq_offset=np.zeros(1, np.int64),
        seq_lens=np.array([w]),
        scatter_mode="Rope",
        dtype=element,
        num_threads=1,
    )
    return cache[0, 0, 0]


def check_mean(element: str, rows: Array) -> None:
    """The same as the oracle's mean; where that is NaN, any NaN."""
    expected, nans = oracle.mean_of_rows(rows, element)
    seen = mean_of(element, rows)
    assert is_nan(seen[nans], element).all()
    np.testing.assert_array_equal(seen[~nans], expected[~nans])


@pytest.mark.usefixtures("each_isa")
@pytest.mark.parametrize("size", [1, 7, 8, 15, 16, 31, 33, 64, 130])
@pytest.mark.parametrize("element", MEAN_TYPES)
def test_means_of_any_bits(element: str, size: int) -> None:
    rng = np.random.default_rng(size)
    for w in (1, 2, 3, 10):
        check_mean(element, content(rng, (w, size), element, "bits"))


@pytest.mark.usefixtures("each_isa")
@pytest.mark.parametrize("kind", ["wide", "close", "ties", "zeros"])
@pytest.mark.parametrize("element", FLOAT_TYPES)
def test_long_means(element: str, kind: str) -> None:
    check_mean(element, content(np.random.default_rng(3), (400, 37), element, kind))


@pytest.mark.usefixtures("each_isa")
def test_sums_are_made_in_token_order() -> None:
    rows = content(np.random.default_rng(5), (400, 300), "float32", "close")
    check_mean("float32", rows)
    values = rows.view(np.float32)
    seen = mean_of("float32", rows).view(np.float32)
    # Other orders, and more precision, give other results: this data would show them.
    assert (seen != values[::-1].sum(0, dtype=np.float32) / np.float32(400)).any()
    assert (seen != values.mean(0, dtype=np.float64).astype(np.float32)).any()
    by_fours = [values[i::4].sum(0, dtype=np.float32) for i in range(4)]
    assert (seen != sum(by_fours) / np.float32(400)).any()


def test_a_sum_starts_at_plus_zero() -> None:
    rows = np.full((3, 16), 0x80000000, np.uint32)
    assert (mean_of("float32", rows) == 0).all()


@pytest.mark.usefixtures("each_isa")
@pytest.mark.parametrize("element", [e for e in FLOAT_TYPES if ITEMSIZE[e] == 1])
def test_means_of_every_pair_of_codes(element: str) -> None:
    """Every code is read, and many a result lies halfway between two codes."""
    pairs = np.stack(np.meshgrid(np.arange(256), np.arange(256))).reshape(2, -1)
    check_mean(element, pairs.astype(np.uint8))


@pytest.mark.usefixtures("each_isa")
@pytest.mark.parametrize("element", ["float16", "bfloat16"])
def test_means_of_every_code(element: str) -> None:
    codes = np.arange(1 << 16, dtype=np.uint16)
    check_mean(element, codes[None])
    check_mean(element, np.stack([codes, codes ^ 1]))  # neighbours: halfway between both
    check_mean(element, np.stack([codes, codes[::-1]]))


@pytest.mark.parametrize("element", FLOAT_TYPES)
def test_results_at_the_edges_of_a_type(element: str) -> None:
    # 4 tokens of which three are zero: quarters of the smallest and largest numbers.
    edge = encode(np.array([1e-45, 2e-38, 1e38, 3e38, np.inf, -np.inf, np.nan]), element)
    largest = encode(np.array([1.0, 60000.0, 448.0, 57344.0, 3.3e38, 32768.0]), element)
    codes = np.concatenate([edge, largest, np.arange(12).astype(edge.dtype)])
    rows = np.zeros((4, len(codes)), raw_dtype(element))
    rows[2] = codes
    check_mean(element, rows)
    check_mean(element, np.stack([codes, codes, codes]))


def test_overflowing_sums_are_infinite() -> None:
    rows = np.full((2, 8), 3e38, np.float32)
    assert (mean_of("float32", rows.view(np.uint32)).view(np.float32) == np.inf).all()
    brain = encode(np.full((2, 8), -3e38), "bfloat16")
    assert (mean_of("bfloat16", brain) == 0xFF80).all()


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ([-7, 0], -3),  # towards zero
        ([7, 0], 3),
        ([-1, 0, 0], 0),
        ([2**31 - 1, 1], -(2**30)),  # the sum wraps to -2**31
        ([-(2**31), -1], (2**31 - 1) // 2),
        ([-(2**31)], -(2**31)),
        ([2**31 - 1] * 3, (3 * (2**31 - 1) - 2**32) // 3),
    ],
)
def test_int32_means(values: list[int], mean: int) -> None:
    rows = np.array(values, np.int32).reshape(-1, 1)
    assert mean_of("int32", rows).tolist() == [mean]


def test_uint32_sums_wrap() -> None:
    rows = np.array([[2**32 - 1], [2**32 - 1], [5]], np.uint32)
    assert mean_of("uint32", rows).tolist() == [1]  # 2 * (2**32 - 1) + 5 is 3 more than 2 * 2**32


@pytest.mark.parametrize("element", ["int8", "int16", "uint8", "uint16"])
def test_narrow_integers_sum_in_32_bits(element: str) -> None:
    limits = np.iinfo(element)
    rows = np.array([[limits.max, limits.min]] * 300, element)
    assert mean_of(element, rows).tolist() == [limits.max, limits.min]


@pytest.mark.skipif(
    platform.machine() != "x86_64" or platform.system() != "Linux",
    reason="sets the x86 control register through glibc",
)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_callers_rounding_mode_and_flushing_do_not_matter(num_threads: int) -> None:
    element, lengths = "float32", [40] * 6
    usual = windows_call(5, "Rope", element, lengths=lengths, kind="close")
    for name in ("key", "value"):
        usual[name] &= 0x80FFFFFF  # denormals
    expected = oracle.run("scatter_pa_kv_cache", usual).outputs
    libm = ctypes.CDLL("libm.so.6")
    state = (ctypes.c_uint32 * 8)()  # fenv_t; the last word is the control register
    found: list[int] = []

    def run() -> None:  # in a thread of its own, whose state ends with it
        libm.fegetenv(state)
        state[7] |= 0x8040 | 0x2000  # flush results, take denormals as zero, round down
        libm.fesetenv(state)
        kvcore.scatter_pa_kv_cache(**usual, num_threads=num_threads)
        libm.fegetenv(state)
        found.append(state[7] & 0xE040)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [0xA040]  # and it is left as it was
    for name, array in expected.items():
        np.testing.assert_array_equal(usual[name], array)


# ---------------------------------------------------------------- where things lie
@pytest.mark.parametrize("element", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize(("number", "rule"), [(3, "Alibi"), (5, "Rope"), (5, "Omni")])
@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 9000])
def test_rows_of_any_length(number: int, rule: str, element: str, size: int) -> None:
    """Rows longer than what the kernel sums at a time, key and value of unlike sizes."""
    for sizes in ((size, 5), (3, size)):
        arguments = windows_call(number, rule, element, lengths=[3, 5], heads=2, sizes=sizes)
        check(arguments, num_threads=2)


@pytest.mark.usefixtures("each_isa", "streaming")
@pytest.mark.parametrize("shift", [0, 1, 4, 16, 48])
@pytest.mark.parametrize("sizes", [(64, 8), (24, 40), (33, 100)])
def test_streaming_stores(sizes: tuple[int, int], shift: int) -> None:
    arguments = windows_call(5, "Rope", "bfloat16", lengths=[30, 20], heads=4, sizes=sizes)
    for name in ("key_cache", "value_cache"):
        array = arguments[name]
        room = np.full(array.nbytes + 128, 0xA5, np.uint8)
        start = -room.ctypes.data % 64 + shift
        inside = room[start : start + array.nbytes].view(np.uint16).reshape(array.shape)
        inside[...] = array
        arguments[name] = inside
        arguments["room of " + name] = room
    rooms = {n: arguments.pop("room of " + n) for n in ("key_cache", "value_cache")}
    check(arguments, num_threads=2)
    for name, room in rooms.items():
        start = -room.ctypes.data % 64 + shift
        assert (room[:start] == 0xA5).all(), name
        assert (room[start + arguments[name].nbytes :] == 0xA5).all(), name


@pytest.mark.parametrize("element", ["float16", "hifloat8", "int32"])
def test_last_axes_that_are_not_contiguous(element: str) -> None:
    """Longer than what the kernel gathers at a time; reversed, every third, transposed."""
    plain = windows_call(5, "Rope", element, lengths=[4, 9], heads=2, sizes=(1300, 1300))
    views = dict(plain)
    views["key"] = plain["key"][..., ::-1].copy()[..., ::-1]
    wide = np.repeat(plain["value"], 3, axis=-1)
    views["value"] = wide[..., ::3]
    cache = np.zeros((*plain["key_cache"].shape[:-1], 2600), plain["key_cache"].dtype)
    views["key_cache"] = cache[..., ::2]
    views["key_cache"][...] = plain["key_cache"]
    views["value_cache"] = np.asfortranarray(plain["value_cache"])
    check(views, num_threads=2)
    assert (cache[..., 1::2] == 0).all()


def test_strides_of_axes_of_one_mean_nothing() -> None:
    arguments = windows_call(3, "Rope", "float32", lengths=[5], heads=1, sizes=(8, 8))
    for name in ("key", "value"):
        array = arguments[name]
        odd = (2**40 + 1, array.strides[1], -(2**40), array.strides[3])
        arguments[name] = np.lib.stride_tricks.as_strided(array, array.shape, odd)
    check(arguments)
    one = windows_call(4, "Alibi", "int16", lengths=[1], heads=1, sizes=(1, 1), block_size=1)
    one["key_cache"] = np.lib.stride_tricks.as_strided(one["key_cache"], strides=(2, 7, 2**41, -9))
    check(one)


@pytest.mark.parametrize("rule", ["Rope", "Omni"])
def test_sources_may_repeat_items(rule: str) -> None:
    arguments = windows_call(5, rule, "int8", lengths=[9, 3], heads=2, sizes=(16, 16))
    arguments["key"] = np.broadcast_to(arguments["key"][:1, :, :1], arguments["key"].shape)
    check(arguments, num_threads=2)


# ---------------------------------------------------------------- order and threads
@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
@pytest.mark.parametrize(("number", "rule"), SCENARIOS)
def test_of_overlapping_runs_the_later_wins(number: int, rule: str, num_threads: int) -> None:
    for seed in range(6):
        arguments = windows_call(
            number,
            rule,
            "bfloat16",
            lengths=[20, 35, 1, 30],
            heads=4,
            seed=seed,
            sizes=(32, 48),
            spare_blocks=9,
        )
        slots = arguments["slot_mapping"]
        rng = np.random.default_rng(seed)
        if seed % 2:
            slots[...] = rng.integers(0, 5, slots.shape)
        else:  # backwards, and each run over the end of the one before it
            flat = slots.reshape(-1)
            flat[...] = np.maximum(np.sort(flat)[::-1] - rng.integers(0, 3, flat.size), 0)
        check(arguments, num_threads=num_threads)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_runs_in_any_order(num_threads: int) -> None:
    arguments = windows_call(5, "Rope", "float16", lengths=[50] * 5, heads=6, sizes=(64, 64))
    batch, heads = 5, 6
    order = np.random.default_rng(1).permutation(batch * heads)
    slots, nb = np.zeros(batch * heads, np.int32), 0
    for i in order:
        n, w, o = 50, int(arguments["compress_lens"][i]), int(arguments["compress_seq_offset"][i])
        slots[i], nb = nb, nb + len(run_tokens("Rope", n, w, o))
    arguments["slot_mapping"] = slots
    slots[order[3]] = -5
    check(arguments, num_threads=num_threads)


def test_large_calls_use_threads_by_themselves() -> None:
    sizes = (128, 128)
    arguments = windows_call(5, "Rope", "bfloat16", lengths=[90] * 4, heads=8, sizes=sizes)
    check(arguments)
    one = windows_call(5, "Rope", "bfloat16", lengths=[900], heads=1, sizes=sizes)
    check(one)


def test_a_negative_slot_skips_its_whole_run() -> None:
    arguments = windows_call(3, "Rope", "float32", lengths=[6, 8], heads=2, seed=4)
    arguments["slot_mapping"][1, 0] = -(2**31)
    check(arguments)
    arguments["slot_mapping"][...] = -1
    before = arguments["key_cache"].copy()
    check(arguments)
    np.testing.assert_array_equal(arguments["key_cache"], before)


# ---------------------------------------------------------------- plans
def rows_touched(arguments: dict[str, Any]) -> tuple[dict[str, set[int]], dict[str, set[int]]]:
    """Byte addresses read from sources and written to caches, worked out from the arguments."""
    key, rule = arguments["key"], arguments["scatter_mode"]
    heads, read, written = key.shape[-2], {}, {}
    slots = arguments["slot_mapping"].reshape(-1)
    windows = arguments["compress_lens"].reshape(-1)
    for source, cache in (("key", "key_cache"), ("value", "value_cache")):
        x, c = arguments[source], arguments[cache]
        at = addresses(x).reshape(*x.shape, -1)
        to = addresses(c).reshape(-1, c.shape[-1], c.itemsize)
        read[source], written[cache] = set(), set()
        for b, n in enumerate(arguments["seq_lens"].tolist()):
            before = sum(arguments["seq_lens"][:b].tolist())
            tokens = at[b] if x.ndim == 4 else at[before : before + n]
            for h in range(heads):
                i = b * heads + h
                o = -1 if rule == "Alibi" else int(arguments["compress_seq_offset"][i])
                if slots[i] < 0:
                    continue
                what = run_tokens(rule, n, int(windows[i]), o)
                for j, token in enumerate(what):
                    first, past = token if isinstance(token, tuple) else (token, token + 1)
                    read[source] |= set(tokens[first:past, h].reshape(-1).tolist())
                    written[cache] |= set(to[slots[i] + j].reshape(-1).tolist())
    return read, written


def as_sets(accesses: Any) -> dict[str, set[int]]:
    return {a.argument: {x for lo, hi in a.ranges for x in range(lo, hi)} for a in accesses}


@pytest.mark.parametrize(("number", "rule"), SCENARIOS)
@pytest.mark.parametrize("loose", [False, True])
def test_touched_is_exact(number: int, rule: str, loose: bool) -> None:
    a = windows_call(number, rule, "int16", lengths=[5, 0, 9], heads=2, sizes=(6, 3), seed=2)
    if loose:
        a["key"] = np.repeat(a["key"], 2, axis=-1)[..., ::2]
        a["value_cache"] = np.repeat(a["value_cache"], 2, axis=1)[:, ::2]
    a["slot_mapping"].reshape(-1)[1] = -1
    plan = kvcore.plan_scatter_pa_kv_cache(**a)
    assert plan.num_descriptors == 0
    most = plan.bytes_moved
    plan.run()
    reads, writes = map(as_sets, plan.touched())
    read, written = rows_touched(a)
    for name in ("slot_mapping", "compress_lens", "seq_lens", "compress_seq_offset"):
        assert (name in reads) == (name in a)
        if name in a:
            assert reads.pop(name) == set(addresses(a[name]).tolist())
    assert reads == {name: found for name, found in read.items() if found}
    assert writes == {name: found for name, found in written.items() if found}
    assert plan.bytes_moved == sum(map(len, written.values())) <= most
    row = {"key_cache": 6 if loose else 1, "value_cache": 1}
    rows = {name: len(found) // (2 * a[name].shape[3]) for name, found in written.items()}
    assert plan.num_descriptors == sum(rows[name] * row[name] for name in rows)
    for whole, exact in ((plan.reads, read), (plan.writes, written)):
        every = as_sets(whole)
        assert all(found <= every[name] for name, found in exact.items())


def test_neighbouring_rows_of_one_head_are_one_piece() -> None:
    a = windows_call(5, "Rope", "bfloat16", lengths=[20], heads=1, key_only=True)
    a["compress_lens"][0], a["compress_seq_offset"][0] = 5, 10
    plan = kvcore.plan_scatter_pa_kv_cache(**a)
    plan.run()
    assert plan.num_descriptors == 3
    assert plan.bytes_moved == 16 * 40


def test_workspace_holds_the_indices() -> None:
    a = windows_call(5, "Rope", "bfloat16", lengths=[20, 3], heads=4)
    assert kvcore.plan_scatter_pa_kv_cache(**a).workspace_size == 8 * (5 * 8 + 2 * 2)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_plan_reads_contents_at_each_run(num_threads: int) -> None:
    a = windows_call(5, "Rope", "float16", lengths=[12, 9], heads=2, sizes=(32, 32))
    plan = kvcore.plan_scatter_pa_kv_cache(**a, num_threads=num_threads)
    for seed in range(5):
        other = windows_call(
            5, "Rope", "float16", lengths=[12 - seed, 9 + seed], heads=2, seed=seed
        )
        for name in ("slot_mapping", "compress_lens", "compress_seq_offset", "seq_lens"):
            a[name][...] = other[name]
        a["slot_mapping"] %= 4
        rng = np.random.default_rng(seed)
        for name in ("key", "value", "key_cache", "value_cache"):
            a[name][...] = content(rng, a[name].shape, "float16", "close")
        want = oracle.run("scatter_pa_kv_cache", a)
        plan.run()
        for name, expected in want.outputs.items():
            np.testing.assert_array_equal(a[name], expected)


def test_a_failed_run_leaves_the_caches_and_the_plan() -> None:
    a = windows_call(5, "Rope", "float16", lengths=[12, 9], heads=2)
    plan = kvcore.plan_scatter_pa_kv_cache(**a)
    plan.run()
    before = a["key_cache"].tobytes(), a["value_cache"].tobytes()
    a["seq_lens"][0] = 13
    with pytest.raises(kvcore.ParamInvalidError, match="seq_lens"):
        plan.run()
    assert (a["key_cache"].tobytes(), a["value_cache"].tobytes()) == before
    assert plan.num_descriptors == 0
    assert as_sets(plan.touched()[1]) == as_sets(plan.writes)
    a["seq_lens"][0] = 12
    plan.run()
    assert plan.num_descriptors > 0


def test_checking_values_moves_nothing() -> None:
    a = windows_call(5, "Rope", "float16", lengths=[12, 9], heads=2)
    before = a["key_cache"].tobytes()
    plan = kvcore.plan_scatter_pa_kv_cache(**a)
    plan.check_values()
    a["compress_lens"][0] = 13
    with pytest.raises(kvcore.ParamInvalidError, match="compress_lens"):
        plan.check_values()
    assert a["key_cache"].tobytes() == before


# ---------------------------------------------------------------- nothing to do
@pytest.mark.parametrize(("number", "rule"), SCENARIOS)
def test_without_tokens_values_do_not_matter(number: int, rule: str) -> None:
    a = windows_call(number, rule, "float16", lengths=[0, 0], heads=2)
    a["seq_lens"][...] = 7
    a["compress_lens"][...] = -4
    a["slot_mapping"][...] = 2**30
    before = a["key_cache"].tobytes()
    plan = kvcore.plan_scatter_pa_kv_cache(**a)
    plan.run()
    assert plan.workspace_size == plan.bytes_moved == plan.num_descriptors == 0
    assert plan.touched() == ((), ())
    assert a["key_cache"].tobytes() == before


@pytest.mark.parametrize(("number", "rule"), SCENARIOS)
def test_one_lane_may_have_no_bytes(number: int, rule: str) -> None:
    check(windows_call(number, rule, "float16", lengths=[4, 6], sizes=(5, 0)), num_threads=2)
    nothing = windows_call(number, rule, "float16", lengths=[4, 6], sizes=(0, 0))
    nothing["slot_mapping"][...] = 2**30
    plan = kvcore.plan_scatter_pa_kv_cache(**nothing)
    plan.run()
    assert plan.workspace_size == 0


# ---------------------------------------------------------------- scatter_pa_cache
def test_scatter_pa_cache_is_the_key_lane_alone() -> None:
    a = windows_call(3, "Rope", "float16", lengths=[9, 4], key_only=True)
    del a["scatter_mode"]
    check(a, "scatter_pa_cache", num_threads=2)
    alibi = windows_call(3, "Alibi", "float16", lengths=[9, 4], key_only=True)
    del alibi["scatter_mode"]
    check(alibi, "scatter_pa_cache")
    rng = np.random.default_rng(0)
    rows = {
        "key": content(rng, (5, 2, 8), "float16", "bits"),
        "key_cache": content(rng, (2, 4, 2, 8), "float16", "bits"),
        "slot_mapping": np.array([3, -1, 7, 0, 3]),
        "dtype": "float16",
    }
    check(rows, "scatter_pa_cache")
    plan = kvcore.plan_scatter_pa_cache(**rows)
    plan.run()
    assert {access.argument for access in plan.writes} == {"key_cache"}
    assert "scatter_pa_cache" in repr(plan)


def test_scatter_pa_cache_refuses_what_rows_do_not_have() -> None:
    key, cache = np.zeros((2, 1, 8), np.float16), np.zeros((1, 4, 1, 8), np.float16)
    with pytest.raises(kvcore.ParamInvalidError, match=r"^compress_lens: expected None"):
        kvcore.scatter_pa_cache(key, cache, np.zeros(2, int), compress_lens=np.zeros(2, int))
    with pytest.raises(kvcore.ParamNullError, match=r"^compress_lens: expected an array"):
        kvcore.scatter_pa_cache(key[None], cache, np.zeros((1, 1), int))
    with pytest.raises(kvcore.ParamInvalidError, match=r"^key: expected shape"):
        kvcore.scatter_pa_cache(key[0], cache, np.zeros(2, int))


def test_both_functions_of_scatter_pa_cache_have_one_signature() -> None:
    function = inspect.signature(kvcore.scatter_pa_cache).parameters
    assert function == inspect.signature(kvcore.plan_scatter_pa_cache).parameters
    assert list(function)[:3] == ["key", "key_cache", "slot_mapping"]
    assert {p.kind for p in list(function.values())[3:]} == {inspect.Parameter.KEYWORD_ONLY}
