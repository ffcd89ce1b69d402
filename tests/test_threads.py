# SPDX-License-Identifier: Apache-2.0
"""Threads: the same bytes at any count, calls from many threads, forked children."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import conformance_cases
import kvcore
import oracle
from kvcore import threads
from kvcore._kernels import parallel, rows, scan
from refusal import BadIndex, Index

COUNTS = [1, 2, 3, 8]


@pytest.fixture(autouse=True)
def automatic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("KVCORE_NUM_THREADS", raising=False)
    kvcore.set_num_threads(None)
    yield
    kvcore.set_num_threads(None)


# ---------------------------------------------------------------- the same bytes


def call(layout: str, slots: np.ndarray, rng: np.random.Generator) -> dict[str, Any]:
    tokens, heads, size, blocks, block_size = len(slots), 2, 32, 16, 8
    shapes = {
        "norm": (blocks, block_size, heads, size),
        "nhsd": (blocks, heads, block_size, size),
        "nz": (blocks, heads * size // 16, block_size, 16),
    }
    options: dict[str, dict[str, Any]] = {
        "norm": {},
        "nhsd": {"scatter_mode": "NHSD"},
        "nz": {"cache_mode": "PA_NZ"},
    }
    return {
        "key": rng.integers(0, 2**16, (tokens, heads, size), dtype=np.uint16),
        "value": rng.integers(0, 2**16, (tokens, heads, size), dtype=np.uint16),
        "key_cache": np.zeros(shapes[layout], np.uint16),
        "value_cache": np.zeros(shapes[layout], np.uint16),
        "slot_mapping": slots,
    } | options[layout]


def slot_patterns(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "repeated": rng.integers(-1, 16, 500),
        "all the same": np.full(100, 77),
        "random": rng.permutation(128)[:100],
        "ascending": np.arange(20, 120),
        "descending": np.arange(120, 20, -1),
        "skipped": np.where(rng.random(128) < 0.5, -1, np.arange(128)),
        "one": np.array([5]),
    }


@pytest.mark.parametrize("layout", ["norm", "nhsd", "nz"])
@pytest.mark.parametrize("pattern", list(slot_patterns(np.random.default_rng(0))))
def test_any_count_gives_the_same_bytes(layout: str, pattern: str) -> None:
    rng = np.random.default_rng(7)
    given = call(layout, slot_patterns(rng)[pattern], rng)
    want = oracle.run("scatter_pa_kv_cache", given).outputs
    plans = [kvcore.plan_scatter_pa_kv_cache(**given, num_threads=count) for count in COUNTS]
    for plan in plans:
        for _ in range(200):
            given["key_cache"][...] = given["value_cache"][...] = 0
            plan.run()
            assert given["key_cache"].tobytes() == want["key_cache"].tobytes()
            assert given["value_cache"].tobytes() == want["value_cache"].tobytes()


@pytest.mark.parametrize("count", COUNTS)
def test_kv_cache_update_at_any_count(count: int) -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(0, 40, 16)
    given = {
        "new_kv": rng.integers(0, 2**16, (int(lengths.sum()), 64), dtype=np.uint16),
        "layer_id": 1,
        "past": np.zeros((2, 16, 64, 64), np.uint16),
        "token_offset": lengths + rng.integers(0, 20, 16),
        "seq_len": lengths,
    }
    want = oracle.run("kv_cache_update", given).outputs["past"]
    for _ in range(50):
        given["past"][...] = 0
        kvcore.kv_cache_update(**given, num_threads=count)
        assert given["past"].tobytes() == want.tobytes()


def test_large_work_takes_threads_by_itself() -> None:
    rng = np.random.default_rng(2)
    slots = rng.integers(0, 4096, 6000)
    key = rng.integers(0, 2**16, (6000, 4, 64), dtype=np.uint16)
    cache = np.zeros((512, 8, 4, 64), np.uint16)
    want = np.zeros((4096, 4, 64), np.uint16)
    for token, slot in zip(key, slots, strict=True):
        want[slot] = token
    for count in (None, 1, 2):
        cache[...] = 0
        kvcore.scatter_pa_kv_cache(key, cache, slots, num_threads=count)
        assert cache.tobytes() == want.tobytes()


WORKERS = """
import numpy as np, kvcore
from kvcore._kernels import parallel
size = parallel.parallel_bytes() // 2
for bytes_moved in (2 * size - 4, 2 * size):
    key = np.ones((bytes_moved // 4, 1, 2), np.uint16)
    cache = np.zeros((len(key), 1, 1, 2), np.uint16)
    kvcore.scatter_pa_cache(key, cache, np.arange(len(key)), num_threads=3)
    assert cache.all()
    print(parallel.num_workers())
"""


def test_small_work_stays_on_the_caller() -> None:
    # In a process of its own: here the border is 0, so that small tests get their threads.
    assert parallel.parallel_bytes() == 0
    done = subprocess.run(
        [sys.executable, "-c", WORKERS], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["0", "2"]


@pytest.mark.parametrize("wrong", [-1, 1 << 62, True, 1.5, "1"])
def test_the_border_is_a_number_of_bytes(wrong: Any) -> None:
    with pytest.raises(ValueError, match="expected a number of bytes"):
        parallel.set_parallel_bytes(wrong)
    assert parallel.parallel_bytes() == 0


def test_many_threads_and_few_pieces() -> None:
    # Workers still on their way to the last call are not woken again; the caller does without.
    rng = np.random.default_rng(4)
    given = call("norm", rng.permutation(128)[:40], rng)
    want = oracle.run("scatter_pa_kv_cache", given).outputs["key_cache"].tobytes()
    plan = kvcore.plan_scatter_pa_kv_cache(**given, num_threads=64)
    for _ in range(500):
        given["key_cache"][...] = 0
        plan.run()
        assert given["key_cache"].tobytes() == want


# ---------------------------------------------------------------- many callers


def all_cases() -> list[str]:
    names = [
        n for n in conformance_cases.NAMES if hasattr(kvcore, conformance_cases.load(n).operator)
    ]
    assert len(names) > 20
    return names


def run_case(name: str, num_threads: int | None) -> None:
    """One conformance case; AssertionError when a byte is wrong."""
    case = conformance_cases.load(name)
    returned = getattr(kvcore, case.operator)(**case.arguments, num_threads=num_threads)
    want = (
        oracle.run(case.operator, case.arguments)
        if case.operator.startswith("gather_sel")
        else None
    )
    for argument, expected in case.expected.items():
        seen = case.arguments.get(argument, returned)
        free = None if want is None else want.unspecified.get(argument)
        same = oracle.bits(seen) == oracle.bits(expected)
        assert (same if free is None else same | free).all(), (name, argument)


def run_every_case(num_threads: int | None) -> None:
    for name in all_cases():
        run_case(name, num_threads)


def test_eight_threads_call_at_once() -> None:
    faults: list[str] = []
    start = threading.Barrier(8)

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        given = call(["norm", "nhsd", "nz"][number % 3], rng.integers(-1, 128, 200), rng)
        want = oracle.run("scatter_pa_kv_cache", given).outputs["key_cache"].tobytes()
        start.wait(30)
        try:
            for i in range(100):
                given["key_cache"][...] = 0
                kvcore.scatter_pa_kv_cache(**given, num_threads=COUNTS[i % 4])
                assert given["key_cache"].tobytes() == want
            run_every_case(2)
        except BaseException:
            faults.append(traceback.format_exc())

    workers = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not faults, faults[0]


def test_the_pool_is_shared_and_bounded() -> None:
    rng = np.random.default_rng(3)
    given = call("norm", rng.integers(0, 128, 300), rng)
    for count in (2, 8, 3):
        kvcore.scatter_pa_kv_cache(**given, num_threads=count)
    assert parallel.num_workers() >= 7
    before = parallel.num_workers()
    workers = [
        threading.Thread(target=kvcore.scatter_pa_kv_cache, kwargs={**given, "num_threads": 8})
        for _ in range(8)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert parallel.num_workers() == before


# ---------------------------------------------------------------- fork


def in_child(work: Callable[[], None]) -> None:
    """Run work in a forked child; its traceback, or its silence, fails the test here."""
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 and later warn of any fork of a process that has threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        text = "done"
        try:
            os.close(read_end)
            work()
        except BaseException:
            text = traceback.format_exc()
        finally:
            os.write(write_end, text.encode()[-4000:])
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    assert said == "done", f"{said!r}, status {status}"


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


@needs_fork
def test_a_child_calls_every_operator() -> None:
    run_every_case(8)  # the parent's pool has workers now; the child's has none

    def work() -> None:
        assert parallel.num_workers() == 0
        run_every_case(None)
        run_every_case(3)
        assert parallel.num_workers() >= 2

    in_child(work)
    run_every_case(2)  # and the parent goes on


@needs_fork
def test_a_child_of_a_child() -> None:
    run_every_case(2)
    in_child(lambda: (run_case(all_cases()[0], 2), in_child(lambda: run_every_case(2))))  # type: ignore[arg-type,return-value]


@needs_fork
def test_fork_while_other_threads_are_inside_calls() -> None:
    rng = np.random.default_rng(5)
    stop = threading.Event()
    busy = [threading.Event() for _ in range(3)]

    def work(number: int) -> None:
        given = call("norm", rng.integers(0, 128, 3000), np.random.default_rng(number))
        while not stop.is_set():
            kvcore.scatter_pa_kv_cache(**given, num_threads=3)
            busy[number].set()

    workers = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for worker in workers:
        worker.start()
    try:
        for event in busy:
            assert event.wait(30)
        for _ in range(10):
            in_child(lambda: run_case(all_cases()[-1], 3))
    finally:
        stop.set()
        for worker in workers:
            worker.join()


@needs_fork
def test_a_plan_runs_in_a_child() -> None:
    rng = np.random.default_rng(6)
    given = call("norm", rng.integers(0, 128, 300), rng)
    plan = kvcore.plan_scatter_pa_kv_cache(**given, num_threads=4)
    plan.run()
    want = given["key_cache"].tobytes()

    def work() -> None:
        given["key_cache"][...] = 0
        plan.run()
        assert given["key_cache"].tobytes() == want

    in_child(work)


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize("count", [1, 2, 1024, Index(3), np.int64(4)])
def test_set_num_threads(count: Any) -> None:
    kvcore.set_num_threads(count)
    assert kvcore.get_num_threads() == (count.value if isinstance(count, Index) else int(count))
    run_every_case(None)
    kvcore.set_num_threads(None)
    assert kvcore.get_num_threads() is None


@pytest.mark.parametrize(
    "count",
    [0, -1, 1025, 2**70, True, False, 2.0, "2", b"2", [2], {}, object(), BadIndex(), np.arange(2)],
)
def test_bad_counts(count: Any) -> None:
    kvcore.set_num_threads(5)
    with pytest.raises(
        kvcore.ParamInvalidError,
        match=r"^num_threads: expected an int from 1 to 1024, or None, got ",
    ) as caught:
        kvcore.set_num_threads(count)
    assert caught.value.argument == "num_threads"
    assert kvcore.get_num_threads() == 5


@pytest.mark.parametrize(
    ("text", "count"), [("1", 1), (" 3 ", 3), ("1024", 1024), ("", None), ("  ", None)]
)
def test_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, count: int | None) -> None:
    monkeypatch.setenv("KVCORE_NUM_THREADS", text)
    assert kvcore.get_num_threads() == count
    run_case(all_cases()[0], None)
    kvcore.set_num_threads(7)  # what the program says comes first
    assert kvcore.get_num_threads() == 7


@pytest.mark.parametrize("text", ["0", "-1", "1025", "many", "2.5", "0x2", "1e1", "9" * 5000])
def test_nonsense_in_the_environment(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("KVCORE_NUM_THREADS", text)
    given = call("norm", np.array([1, 2]), np.random.default_rng(0))
    for attempt in (
        kvcore.get_num_threads,
        lambda: kvcore.scatter_pa_kv_cache(**given),
        lambda: kvcore.plan_scatter_pa_kv_cache(**given),
    ):
        with pytest.raises(
            kvcore.ParamInvalidError, match=r"^KVCORE_NUM_THREADS: expected"
        ) as caught:
            attempt()
        assert caught.value.argument == "KVCORE_NUM_THREADS"
    assert not given["key_cache"].any()
    kvcore.scatter_pa_kv_cache(**given, num_threads=1)  # said by the call
    kvcore.set_num_threads(2)
    kvcore.scatter_pa_kv_cache(**given)  # or by the program


def test_import_survives_nonsense_in_the_environment() -> None:
    program = "import kvcore; print(kvcore.info()['threads']['num_threads'])"
    environment = {
        **os.environ,
        "KVCORE_NUM_THREADS": "many",
        "KVCORE_SOC": "A9",
        "KVCORE_BACKEND": "?",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
    )
    assert "KVCORE_NUM_THREADS: expected an int from 1 to 1024, or None, got" in done.stdout


def test_usable_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= threads.usable_cores() <= threads.MAX_THREADS
    for quota, cores, expected in (
        (float("inf"), 6, 6), (2.0, 6, 2), (0.5, 6, 1), (2.5, 6, 3), (8.0, 6, 6), (1e9, 5000, 1024),
    ):  # fmt: skip
        monkeypatch.setattr(threads, "_cgroup_quota", lambda quota=quota: quota)
        monkeypatch.setattr(
            os, "sched_getaffinity", lambda _pid, cores=cores: set(range(cores)), raising=False
        )
        assert threads._count_cores() == expected


# ---------------------------------------------------------------- kernels by hand


@pytest.mark.parametrize("count", COUNTS)
def test_byte_rows(count: int) -> None:
    rng = np.random.default_rng(8)
    tokens = rng.integers(0, 256, (300, 24), dtype=np.uint8)
    cache = np.zeros((8, 6, 24), np.uint8)
    slots = rng.integers(-1, 48, 300)
    want = cache.copy().reshape(48, 24)
    for token, slot in zip(tokens, slots, strict=True):
        if slot >= 0:
            want[slot] = token
    rows.scatter(tokens, cache, slots, count)
    np.testing.assert_array_equal(cache.reshape(48, 24), want)
    back = np.zeros_like(tokens)
    rows.gather(back, cache, slots, count)
    np.testing.assert_array_equal(back, np.where((slots >= 0)[:, None], want[slots], 0))


def test_byte_rows_refuse() -> None:
    tokens, cache, slots = (
        np.zeros((2, 4), np.uint8),
        np.zeros((1, 2, 4), np.uint8),
        np.zeros(2, np.int64),
    )
    for bad in (np.array([0, 2]), np.array([2**63 - 1, 0])):
        with pytest.raises(IndexError, match="expected < 2"):
            rows.scatter(tokens, cache, bad)
    for changed in (
        (tokens[:1], cache, slots),
        (tokens, np.zeros((1, 2, 5), np.uint8), slots),
        (tokens, cache, slots[:1]),
    ):
        with pytest.raises(ValueError, match="expected"):
            rows.scatter(*changed)
    for count in (0, -1, 1025, 2**31 - 1):
        with pytest.raises(ValueError, match="n_threads"):
            rows.scatter(tokens, cache, slots, count)
    for empty in (
        (tokens[:0], cache, slots[:0]), (tokens[:, :0].copy(), cache[..., :0].copy(), slots),
        (tokens, cache[:0], slots - 1),
    ):  # fmt: skip
        rows.scatter(*empty)
        rows.gather(*empty)


def test_scans() -> None:
    values = np.array([3, -1, 7, 2**40, 7])
    assert scan.first_outside(values, 8) == 3
    assert scan.first_outside(values, 7) == 2
    assert scan.first_outside(values, 2**41) == -1
    assert scan.first_outside(values[:0], 0) == -1
    assert scan.first_outside(np.array([-1, -(2**63)]), 0) == -1
    assert scan.any_repeat(np.array([3, -1, 7, -1, 8]), 9) is False
    assert scan.any_repeat(np.array([3, -1, 7, 3]), 9) is True
    assert scan.any_repeat(values[:0], 9) is False
    with pytest.raises(ValueError, match="each < 7"):
        scan.any_repeat(np.array([7]), 7)
