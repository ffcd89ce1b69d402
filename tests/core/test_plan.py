# SPDX-License-Identifier: Apache-2.0
"""Plans: they run many times, read contents again, and know what they read and write."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

import kvcore
import oracle
from kvcore._core.plan import Plan

T, H, D, NB, BS = 4, 2, 16, 3, 4


def filled(*shape: int, dtype: Any = np.uint16) -> np.ndarray:
    return (np.arange(np.prod(shape)) % 251 + 1).astype(dtype).reshape(shape)


def scatter(**changed: Any) -> dict[str, Any]:
    return {
        "key": filled(T, H, D),
        "key_cache": np.zeros((NB, BS, H, D), np.uint16),
        "slot_mapping": np.array([7, -1, 0, 11]),
        "value": filled(T, H, D),
        "value_cache": np.zeros((NB, BS, H, D), np.uint16),
        **changed,
    }


def update(**changed: Any) -> dict[str, Any]:
    return {
        "new_kv": filled(5, 8),
        "layer_id": np.array([1]),
        "past": np.zeros((2, 3, 6, 8), np.uint16),
        "token_offset": np.array([2, 0, 6]),
        "seq_len": np.array([2, 0, 3]),
        **changed,
    }


CALLS: dict[str, tuple[Callable[..., Plan], Callable[..., dict[str, Any]], tuple[str, ...]]] = {
    "scatter_pa_kv_cache": (
        kvcore.plan_scatter_pa_kv_cache,
        scatter,
        ("key_cache", "value_cache"),
    ),
    "kv_cache_update": (kvcore.plan_kv_cache_update, update, ("past",)),
}
operators = pytest.mark.parametrize("name", CALLS)


# ---------------------------------------------------------------- running


@operators
def test_runs_many_times_and_reads_contents_again(name: str) -> None:
    make, arguments, outputs = CALLS[name]
    given = arguments()
    plan = make(**given)
    rng = np.random.default_rng(3)
    for _ in range(50):
        for key, array in given.items():
            if key in ("key", "value", "new_kv", *outputs):
                array[...] = rng.integers(0, 2**16, array.shape)
        if name == "scatter_pa_kv_cache":
            given["slot_mapping"][...] = rng.integers(-2, NB * BS, T)
        else:
            given["layer_id"][...] = rng.integers(0, 2)
            given["token_offset"][...] = rng.integers(3, 7, 3)
            given["seq_len"][...] = rng.permutation([2, 0, 3])
        want = oracle.run(name, given).outputs
        returned = plan.run()
        for output in outputs:
            np.testing.assert_array_equal(given[output], want[output])
        assert returned is (given["past"] if name == "kv_cache_update" else None)


@operators
def test_bad_contents_are_refused_at_each_run(name: str) -> None:
    make, arguments, outputs = CALLS[name]
    given = arguments()
    plan = make(**given)
    index = "slot_mapping" if name == "scatter_pa_kv_cache" else "token_offset"
    good = given[index].copy()
    for _ in range(3):
        plan.run()
        before = {output: given[output].copy() for output in outputs}
        given["key" if name == "scatter_pa_kv_cache" else "new_kv"] += 1
        given[index][-1] = 100
        for attempt in (plan.run, plan.check_values, plan.run_on_cpu):
            with pytest.raises(kvcore.ParamInvalidError, match=index):
                attempt()
        for output in outputs:
            np.testing.assert_array_equal(given[output], before[output])
        given[index][...] = good


def test_a_plan_is_made_without_looking_at_values() -> None:
    given = scatter(slot_mapping=np.array([10**6, 0, 0, 0]))
    plan = kvcore.plan_scatter_pa_kv_cache(**given)
    with pytest.raises(kvcore.SlotRangeError):
        plan.run()
    given["slot_mapping"][0] = 1
    plan.run()
    with pytest.raises(kvcore.ParamInvalidError, match=r"shape"):
        kvcore.plan_scatter_pa_kv_cache(**scatter(key=filled(T, D)))


def test_check_values_moves_nothing() -> None:
    given = scatter()
    plan = kvcore.plan_scatter_pa_kv_cache(**given)
    plan.check_values()
    assert not given["key_cache"].any()
    assert plan.bytes_moved == 2 * T * H * D * 2  # the most: nothing ran


# ---------------------------------------------------------------- arrays that change


def reshaped(array: np.ndarray) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        array.shape = (array.size, 1)


def retyped(array: np.ndarray) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        array.dtype = np.dtype(f"i{array.itemsize}" if array.dtype.kind == "u" else "f8")


def restrided(array: np.ndarray) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        array.strides = (*(0,) * (array.ndim - 1), array.itemsize)


def resized(array: np.ndarray) -> None:
    array.resize(
        (1000,) * array.ndim if array.ndim == 1 else (100, *array.shape[1:]), refcheck=False
    )


def frozen(array: np.ndarray) -> None:
    array.flags.writeable = False


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("change", [reshaped, retyped, restrided, resized, frozen])
@pytest.mark.parametrize("argument", ["key", "key_cache", "slot_mapping", "value"])
def test_an_array_that_changed_needs_a_new_plan(
    argument: str, change: Callable[[np.ndarray], None], ran: bool
) -> None:
    given = {name: np.array(array) for name, array in scatter().items()}
    plan = kvcore.plan_scatter_pa_kv_cache(**given)
    if ran:
        plan.run()
    if change is restrided and argument == "slot_mapping":
        change = resized
    change(given[argument])
    others = {n: a.copy() for n, a in given.items() if n.endswith("cache") and n != argument}
    for attempt in (plan.run, plan.check_values, plan.run_on_cpu):
        with pytest.raises(
            kvcore.ParamInvalidError, match=rf"^{argument}: .* changed since; make a new plan$"
        ):
            attempt()
    for name, then in others.items():
        np.testing.assert_array_equal(given[name], then)


def test_a_plan_keeps_its_arrays() -> None:
    cache = np.zeros((NB, BS, H, D), np.uint16)
    plan = kvcore.plan_scatter_pa_kv_cache(
        filled(T, H, D), cache, np.arange(T), np.full((T, H, D), 7, np.uint16), cache.copy()
    )
    gc.collect()
    churn = [np.full((T, H, D), 9, np.uint16) for _ in range(100)]
    plan.run()
    np.testing.assert_array_equal(cache.reshape(-1, H, D)[:T], filled(T, H, D))
    assert len(churn) == 100


class Meddler:
    """An array whose own code runs whenever the array is looked at."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.act: Callable[[], Any] = lambda: None

    @property
    def __array_interface__(self) -> Any:
        self.act()
        return self.array.__array_interface__


def test_an_array_that_runs_its_own_plan() -> None:
    key = Meddler(filled(T, H, D))
    given = scatter(key=key)
    plan = kvcore.plan_scatter_pa_kv_cache(**given)
    for attempt in (plan.run, plan.check_values, plan.run_on_cpu):
        key.act = attempt
        with pytest.raises(kvcore.StreamError, match="one run of a plan at a time"):
            plan.run()
    assert not given["key_cache"].any()
    key.act = lambda: None
    plan.run()
    assert given["key_cache"].any()


@pytest.mark.parametrize("position", ["key", "slot_mapping", "value"])
@pytest.mark.parametrize("planned", [False, True])
def test_an_array_that_changes_the_others(position: str, planned: bool) -> None:
    # It changes what was read before it, and what is read after it.
    given = scatter()
    meddler = Meddler(given[position])
    given[position] = meddler
    if planned:
        plan = kvcore.plan_scatter_pa_kv_cache(**given)
        call: Callable[[], Any] = plan.run
    else:
        kvcore.scatter_pa_kv_cache(**given)

        def call() -> None:
            kvcore.scatter_pa_kv_cache(**given)

    rest = [n for n in ("key_cache", "value_cache") if n != position]
    for name in rest:
        meddler.act = lambda name=name: given[name].resize((1, 1, 1, 1), refcheck=False)
        with pytest.raises(kvcore.ParamInvalidError):
            call()
        given[name].resize((NB, BS, H, D), refcheck=False)


def test_a_parameter_whose_hash_fails() -> None:
    class Odd(str):
        def __hash__(self) -> int:
            raise RuntimeError("no hash")

    given = scatter(cache_mode=Odd("Norm"))
    kvcore.scatter_pa_kv_cache(**given)
    assert given["key_cache"].any()
    with pytest.raises(kvcore.ParamInvalidError, match="cache_mode"):
        kvcore.scatter_pa_kv_cache(**scatter(cache_mode=Odd("Abnormal")))


def test_parameters_that_are_equal_but_not_alike() -> None:
    # 1 == 1.0 == True: what one call may be given must not answer for another.
    given = update(layer_id=1)
    kvcore.kv_cache_update(**given)
    for odd in (1.0, True):
        with pytest.raises(kvcore.ParamInvalidError, match="layer_id"):
            kvcore.kv_cache_update(**update(layer_id=odd))
    nct = scatter(scatter_mode="Nct", strides=(H * D, H * D), offsets=(0, 0))
    kvcore.scatter_pa_kv_cache(**nct)
    for odd in ((float(H * D), H * D), [H * D, float(H * D)]):
        with pytest.raises(kvcore.ParamInvalidError, match="strides"):
            kvcore.scatter_pa_kv_cache(**nct | {"strides": odd})
    for odd in ((False, 0), (0.0, 0)):
        with pytest.raises(kvcore.ParamInvalidError, match="offsets"):
            kvcore.scatter_pa_kv_cache(**nct | {"offsets": odd})


def test_signatures_tell_every_difference() -> None:
    # Calls that differ in one property only; each must be judged on its own.
    made = scatter()
    kvcore.scatter_pa_kv_cache(**made)
    read_only = made["key_cache"].view()
    read_only.flags.writeable = False
    bad: list[dict[str, Any]] = [
        {"key_cache": read_only},
        {"key": made["key"].view(np.int16)},
        {"key": as_strided(made["key"], (T, H, D + 1))},
        {"key_cache": as_strided(made["key_cache"], strides=(256, 64, 0, 2))},
        {"slot_mapping": made["slot_mapping"].view(np.uint64)},
        {"slot_mapping": made["slot_mapping"][:, None]},
        {"value": None},
        {"value_cache": None},
        {"seq_lens": np.zeros(2, np.int64)},
        {"compress_lens": np.zeros(2, np.int64)},
    ]
    for changed in bad:
        for _ in range(2):
            with pytest.raises(kvcore.KVCoreError):
                kvcore.scatter_pa_kv_cache(**made | changed)
        kvcore.scatter_pa_kv_cache(**made)


# ---------------------------------------------------------------- one run at a time


class Gate:
    """A backend whose run waits until the test lets it go."""

    name = "gate"
    spaces = frozenset({"host"})

    def __init__(self) -> None:
        self.inside = threading.Event()
        self.leave = threading.Event()

    def why_not(self, plan: Plan | None = None) -> str | None:
        return None

    def prepare(self, plan: Plan) -> Callable[[], Any]:
        def run() -> Any:
            self.inside.set()
            assert self.leave.wait(30)
            plan.check_values()
            return plan.run_on_cpu()

        return run


@pytest.fixture
def running() -> Iterator[tuple[Plan, dict[str, Any], Gate, threading.Thread]]:
    gate = Gate()
    given = update()
    plan = kvcore.plan_kv_cache_update(**given, backend=gate)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(plan.run()))
    thread.start()
    assert gate.inside.wait(30)
    yield plan, given, gate, thread
    gate.leave.set()
    thread.join()
    assert results[0] is given["past"]


def test_two_runs_at_once(running: tuple[Plan, dict[str, Any], Gate, threading.Thread]) -> None:
    plan, given, gate, thread = running
    for attempt in (plan.run, plan.check_values, plan.run_on_cpu):
        with pytest.raises(
            kvcore.StreamError, match="a second while the first is running"
        ) as caught:
            attempt()
        assert isinstance(caught.value, RuntimeError)
    assert not given["past"].any()
    assert plan.bytes_moved == 5 * 16
    assert repr(plan.touched()) == repr((plan.reads, plan.writes))
    gate.leave.set()
    thread.join()
    assert given["past"].any()
    plan.run()  # free again


def test_a_backend_may_not_run_the_plan_again() -> None:
    class Again(Gate):
        def prepare(self, plan: Plan) -> Callable[[], Any]:
            return plan.run

    plan = kvcore.plan_kv_cache_update(**update(), backend=Again())
    with pytest.raises(kvcore.StreamError, match="run_on_cpu"):
        plan.run()


def test_a_failed_run_frees_the_plan() -> None:
    class Breaks(Gate):
        def prepare(self, plan: Plan) -> Callable[[], Any]:
            def run() -> None:
                raise OSError("no")

            return run

    plan = kvcore.plan_kv_cache_update(**update(), backend=Breaks())
    for _ in range(2):
        with pytest.raises(OSError, match="no"):
            plan.run()
    plan.run_on_cpu()


def test_runs_from_other_threads() -> None:
    given = update()
    plan = kvcore.plan_kv_cache_update(**given)
    seen = []
    for value in range(1, 9):
        given["new_kv"][...] = value
        thread = threading.Thread(target=plan.run)
        thread.start()
        thread.join()
        seen.append(int(given["past"].max()))
    assert seen == list(range(1, 9))


def test_many_threads_on_one_plan() -> None:
    # Whatever the interleaving: each attempt runs to its end or is refused.
    given = scatter(num_threads=2)
    plan = kvcore.plan_scatter_pa_kv_cache(**given)
    outcomes: list[str] = []
    start = threading.Barrier(8)

    def work() -> None:
        start.wait(30)
        for _ in range(200):
            try:
                plan.run()
                outcomes.append("ran")
            except kvcore.StreamError:
                outcomes.append("refused")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 1600
    assert "ran" in outcomes
    want = oracle.run("scatter_pa_kv_cache", scatter()).outputs["key_cache"]
    np.testing.assert_array_equal(given["key_cache"], want)


# ---------------------------------------------------------------- what is read and written


def byte_set(accesses: Any) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for access in accesses:
        assert access.argument not in found
        ranges = access.ranges
        assert ranges.dtype == np.int64
        assert ranges.shape == (len(ranges), 2)
        assert (ranges[:, 0] < ranges[:, 1]).all()
        assert (ranges[1:, 0] > ranges[:-1, 1]).all()  # ascending, and touching ones are merged
        assert access.nbytes == sum(end - start for start, end in ranges.tolist())
        found[access.argument] = {x for start, end in ranges.tolist() for x in range(start, end)}
    return found


def addresses(array: np.ndarray) -> list[int]:
    """Where every byte of every item lies, in C order."""
    places = np.full((*array.shape, array.itemsize), array.ctypes.data, np.int64)
    for axis, (size, step) in enumerate(zip(array.shape, array.strides, strict=True)):
        shape = [1] * (array.ndim + 1)
        shape[axis] = size
        places += (np.arange(size) * step).reshape(shape)
    return (places + np.arange(array.itemsize)).ravel().tolist()


def every_byte(array: np.ndarray) -> set[int]:
    return set(addresses(array))


def written_bytes(array: np.ndarray, run: Callable[[], Any]) -> set[int]:
    """Addresses of the bytes that a run writes, whatever it writes: two runs over two grounds."""
    found: set[int] = set()
    places = addresses(array)
    for ground in (0x00, 0xFF):
        array[...] = np.frombuffer(bytes([ground] * array.itemsize), array.dtype)[0]
        run()
        found |= {x for x, b in zip(places, array.tobytes(), strict=True) if b != ground}
    return found


LAYOUTS = ["norm", "nz4", "nz5", "nhsd", "nct", "strided", "interleaved"]


def layout_call(layout: str, slots: list[int]) -> dict[str, Any]:
    given = scatter(slot_mapping=np.array(slots), key=filled(len(slots), H, D),
                    value=filled(len(slots), H, D))  # fmt: skip
    if layout == "nhsd":
        shape, mode = (NB, H, BS, D), {"scatter_mode": "NHSD"}
    elif layout == "nz4":
        shape, mode = (NB, H * D // 16, BS, 16), {"cache_mode": "PA_NZ"}
    elif layout == "nz5":
        shape, mode = (NB, H, D // 16, BS, 16), {"cache_mode": "PA_NZ"}
    elif layout == "nct":
        shape = (NB, BS, H, D)
        mode = {"scatter_mode": "Nct", "strides": (H * D, H * D), "offsets": (0, 0)}
    else:
        shape, mode = (NB, BS, H, D), {}
    given |= {"key_cache": np.zeros(shape, np.uint16), "value_cache": np.zeros(shape, np.uint16)}
    if layout == "strided":
        given["key_cache"] = np.zeros((NB, 2 * BS, H + 1, D + 8), np.uint16)[::-1, ::2, 1:, 4:-4]
        given["key"] = np.ascontiguousarray(filled(D, H, len(slots))).transpose(2, 1, 0)
    if layout == "interleaved":
        slab = np.zeros((NB, BS, H, 2 * D), np.uint16)
        given |= {"key_cache": slab[..., :D], "value_cache": slab[..., D:]}
    return given | mode


@pytest.mark.parametrize("layout", LAYOUTS)
@given(slots=st.lists(st.integers(-2, NB * BS - 1), min_size=1, max_size=9))
def test_touched_is_exact(layout: str, slots: list[int]) -> None:
    given = layout_call(layout, slots)
    plan = kvcore.plan_scatter_pa_kv_cache(**given)
    written = {}
    for name in ("key_cache", "value_cache"):
        written[name] = written_bytes(given[name], plan.run)
    reads, writes = plan.touched()
    assert byte_set(writes) == {n: b for n, b in written.items() if b}
    used = [i for i, slot in enumerate(slots) if slot >= 0]
    seen = byte_set(reads)
    assert seen.pop("slot_mapping") == every_byte(given["slot_mapping"])
    tokens = {n: {x for i in used for x in every_byte(given[n][i])} for n in ("key", "value")}
    assert seen == {n: b for n, b in tokens.items() if b}
    assert plan.bytes_moved == len(used) * 2 * H * D * 2
    assert all(access.owner is given[access.argument] for access in (*reads, *writes))
    # and all of it lies in what the plan said it may touch
    for now, ever in ((reads, plan.reads), (writes, plan.writes)):
        whole = byte_set(ever)
        assert all(bytes_ <= whole[name] for name, bytes_ in byte_set(now).items())


@given(
    lengths=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    layer=st.integers(0, 1),
    late=st.integers(0, 2),
)
def test_touched_of_an_append_is_exact(lengths: list[int], layer: int, late: int) -> None:
    given = update(
        new_kv=filled(sum(lengths), 8),
        layer_id=np.array([layer]),
        seq_len=np.array(lengths),
        token_offset=np.array(lengths) + late,
    )
    plan = kvcore.plan_kv_cache_update(**given)
    written = written_bytes(given["past"], plan.run)
    given["layer_id"][0] = 1 - layer  # what is said of the last run does not follow
    reads, writes = plan.touched()
    assert byte_set(writes) == ({"past": written} if written else {})
    seen = byte_set(reads)
    assert seen.pop("new_kv", set()) == every_byte(given["new_kv"])
    assert seen == {n: every_byte(given[n]) for n in ("layer_id", "token_offset", "seq_len")}
    assert plan.bytes_moved == sum(lengths) * 16


def test_extents() -> None:
    given = scatter(key_cache=np.zeros((NB, 2 * BS, H, D), np.uint16)[::-1, ::2])
    plan = kvcore.plan_scatter_pa_kv_cache(**given)
    base = given["key_cache"].base
    whole = {a.argument: a.ranges.tolist() for a in (*plan.reads, *plan.writes)}
    start = base.ctypes.data
    assert whole["key_cache"] == [[start, start + base.nbytes - 64]]
    assert [a.argument for a in plan.reads] == ["key", "slot_mapping", "value"]
    assert [a.argument for a in plan.writes] == ["key_cache", "value_cache"]
    # before a run, what may be touched is everything
    assert repr(plan.touched()) == repr((plan.reads, plan.writes))
    assert plan.bytes_moved == 2 * T * H * D * 2
    assert plan.num_descriptors == 0


def test_a_refused_run_says_nothing_of_rows() -> None:
    given = scatter()
    plan = kvcore.plan_scatter_pa_kv_cache(**given)
    plan.run()
    assert len(plan.touched()[1][0].ranges) == 3
    given["slot_mapping"][0] = NB * BS
    with pytest.raises(kvcore.SlotRangeError):
        plan.run()
    # the extents: nothing was touched, and no row of the bad slot is made up
    assert repr(plan.touched()) == repr((plan.reads, plan.writes))
    assert plan.num_descriptors == 0


@pytest.mark.parametrize(
    ("layout", "slots", "pieces"),
    [
        ("norm", [0, 1, 2, 3, 4, 5], 2),  # one piece a lane: rows and tokens lie side by side
        ("norm", [0, 2, 4], 6),
        ("norm", [-1, 0, -1, 1], 4),
        ("norm", [3, 3, 3], 6),
        ("nz4", [0, 1], 8),  # a column of 32 bytes each
        ("nhsd", [0, 1], 8),  # a head each
        ("norm", [-1, -1], 0),
    ],
)
def test_descriptors(layout: str, slots: list[int], pieces: int) -> None:
    plan = kvcore.plan_scatter_pa_kv_cache(**layout_call(layout, slots))
    plan.run()
    assert plan.num_descriptors == pieces


@operators
def test_workspace(name: str) -> None:
    make, arguments, _ = CALLS[name]
    plan = make(**arguments())
    wanted = 8 * T if name == "scatter_pa_kv_cache" else 8 * (5 + 2 * 3 + 1)
    assert plan.workspace_size == wanted


# ---------------------------------------------------------------- as objects


def test_a_plan_is_made_by_its_function_only() -> None:
    plan = kvcore.plan_scatter_pa_kv_cache(**scatter())
    for attempt in (Plan, lambda: Plan.__new__(Plan), lambda: copy.copy(plan),
                    lambda: copy.deepcopy(plan), lambda: pickle.dumps(plan)):  # fmt: skip
        with pytest.raises(TypeError):
            attempt()


def test_what_a_plan_shows_is_not_copied_without_its_insides() -> None:
    plan = kvcore.plan_scatter_pa_kv_cache(**scatter())
    plan.run()
    whole = oracle.run("scatter_pa_kv_cache", scatter()).outputs["key_cache"]
    for inner in (plan.spec, plan.operator, plan.infos()[0]):
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=type(inner).__name__):
                attempt(inner)
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            with pytest.raises(TypeError, match=type(inner).__name__):
                inner.__reduce_ex__(protocol)
    plan.run()
    np.testing.assert_array_equal(plan.arrays[1], whole)


def test_a_plan_shows_its_shapes() -> None:
    text = repr(kvcore.plan_scatter_pa_kv_cache(**scatter(value=None, value_cache=None)))
    assert text == (
        "<Plan scatter_pa_kv_cache(key[4, 2, 16], key_cache[3, 4, 2, 16], slot_mapping[4])>"
    )


def test_infos() -> None:
    given = scatter(value=None, value_cache=None)
    plan = kvcore.plan_scatter_pa_kv_cache(**given)
    infos = plan.infos()
    assert [None if i is None else i.name for i in infos] == [
        "key", "key_cache", "slot_mapping", None, None, None, None, None,
    ]  # fmt: skip
    assert infos[1].address == given["key_cache"].ctypes.data
    assert plan.operator.name == "scatter_pa_kv_cache"
    assert plan.arrays[0] is given["key"]
    assert plan.soc is None
    assert plan.backend is None


# ---------------------------------------------------------------- memory


def test_more_signatures_than_are_remembered() -> None:
    cache = np.zeros((1, 1, 1, 1), np.uint8)
    slots = np.full(5000, -1)
    key = np.zeros((5000, 1, 1), np.uint8)
    for n in range(1, 4500):
        kvcore.scatter_pa_kv_cache(key[:n], cache, slots[:n])
    slots[0] = 0
    key[0] = 7
    kvcore.scatter_pa_kv_cache(key[:3], cache, slots[:3])
    assert cache[0, 0, 0, 0] == 7


def grows(call: Callable[[int], Any], calls: int) -> int:
    """Bytes of Python objects that stay, beyond those of the first calls."""
    for i in range(300):
        call(i)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for i in range(calls):
            call(i)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def resident() -> int:
    """Bytes of memory this process holds; skips where that says nothing."""
    if "asan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("the sanitizer keeps what was freed")
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        pytest.skip("no /proc here")


def test_memory_stays_flat() -> None:
    made, single = scatter(), update(layer_id=1)
    plan = kvcore.plan_scatter_pa_kv_cache(**made)
    bad = scatter(slot_mapping=np.array([99, 0, 0, 0]))
    meddler = Meddler(made["key"])

    def call(i: int) -> None:
        kvcore.scatter_pa_kv_cache(**made)
        kvcore.kv_cache_update(**single)
        plan.run()
        if i % 10 == 0:
            plan.touched()
            kvcore.scatter_pa_kv_cache(**made | {"key": meddler})
            with suppress(kvcore.SlotRangeError):
                kvcore.scatter_pa_kv_cache(**bad)
            with suppress(kvcore.ParamNullError):
                kvcore.scatter_pa_kv_cache(**made | {"value": None})

    assert grows(call, 10_000) < 150_000  # an object a call would be 500,000 at the least
    # what lies outside of Python's allocator
    before = resident()
    for i in range(30_000):
        call(i)
    assert resident() - before < 8 * 2**20


def test_scratch_memory_is_reused_and_freed() -> None:
    slots = np.arange(2**16)
    cache = np.zeros((2**16, 1, 1, 1), np.uint8)
    ones = np.ones((2**16, 1, 1), np.uint8)
    plan = kvcore.plan_scatter_pa_kv_cache(ones, cache, slots)
    plan.run()
    before = resident()
    for _ in range(300):
        plan.run()
        kvcore.scatter_pa_kv_cache(ones, cache, slots)
    assert resident() - before < 16 * 2**20  # 300 copies of the slots would be 150 MiB
    assert cache.all()


def test_overlaps_that_are_remembered_are_bounded() -> None:
    # One shape at ever new distances inside one slab.
    slab = np.zeros((4000, 2, 8), np.uint16)

    def call(i: int) -> None:
        at = i % 1500
        halves = slab[at : at + 8].reshape(2, 4, 2, 8), slab[2000 : 2000 + 2]
        kvcore.scatter_pa_kv_cache(halves[1], halves[0], np.array([0, 1]))
        rows = slab[at : at + 16].reshape(8, 2, 2, 8)
        kvcore.scatter_pa_kv_cache(rows[:, 1][:2].copy(), rows[:, 0].reshape(8, 1, 2, 8),
                                   np.array([0, 1]))  # fmt: skip
        packed = slab.reshape(-1)[at : at + 8 * 32].reshape(2, 4, 2, 16)
        kvcore.scatter_pa_kv_cache(slab[3000:3002], packed[..., :8], np.array([0, 1]),
                                   slab[3000:3002], packed[..., 8:])  # fmt: skip

    assert grows(call, 3000) < 200_000


# ---------------------------------------------------------------- warnings as errors


def test_a_warning_that_is_an_error_writes_nothing() -> None:
    key = filled(T, H, D, dtype=np.float16)
    wide = np.zeros((NB, BS, 2 * H, D), np.float16)[:, :, ::2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(kvcore.KVPortabilityWarning):
            kvcore.scatter_pa_kv_cache(key, wide, np.arange(T), soc="A2")
    assert not wide.any()
