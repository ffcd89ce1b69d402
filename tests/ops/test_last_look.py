# SPDX-License-Identifier: Apache-2.0
"""Nothing is read or written that Python code freed in the middle of a call.

Each test lets code of a caller run wherever a call lets any run (a warning's hook, the collector,
a parameter's hash, an array's attributes, a profiler, ...) and has it shrink one array there, whose
memory is then taken by canaries.  The call must refuse the array, or be over, or not have begun;
no canary changes, and what the other arrays hold is what an undisturbed call leaves.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import kvcore
from hostile_calls import CASES, Case
from kvcore._kernels import parallel

Array = np.ndarray[Any, Any]
WARNING = ("NHSD with a warning", "Omni with a warning")


class Thief:
    """Shrinks one array at the ``turn``-th opportunity, and puts canaries where it was."""

    def __init__(self, turn: int = 0) -> None:
        self.turn = turn
        self.seen = 0
        self.victim: Array | None = None
        self.canaries: list[Array] = []
        self.acted = False
        self.armed = False

    def __call__(self, *_: Any, **__: Any) -> None:
        if not self.armed:
            return
        self.seen += 1
        if self.seen - 1 == self.turn and self.victim is not None:
            self.armed = False
            self.acted = True
            self.victim.resize((1,) * self.victim.ndim, refcheck=False)
            sizes = [2**n for n in range(5, 14)] * 2
            self.canaries = [np.full(size, 0xA5, np.uint8) for size in sizes]

    def check(self) -> None:
        assert all((canary == 0xA5).all() for canary in self.canaries)


def own(case: Case) -> dict[str, Array]:
    """The arrays of a case, each with memory that it can be parted from."""
    return {name: np.array(array) for name, array in case.make().items()}


def disturb(case: Case, planned: bool, victim: str, thief: Thief, **changed: Any) -> None:
    """One call with the thief at large; what it left is compared."""
    expected = case.expected()
    arrays = own(case)
    options = case.options | changed
    plan = None
    if planned:
        assert case.plan is not None
        plan = case.plan(**arrays, **options)
    before = {name: array.copy() for name, array in arrays.items()}
    thief.victim, thief.armed = arrays[victim], True
    error = None
    try:
        if plan is None:
            case.call(**arrays, **options)
        else:
            plan.run()
    except kvcore.KVCoreError as caught:
        error = caught
    finally:
        thief.armed = False
        others = {name: a.copy() for name, a in arrays.items() if name != victim}
        thief.check()
    if error is not None:
        assert thief.acted
        for name in others:
            np.testing.assert_array_equal(others[name], before[name])
    else:
        for name, array in expected.items():
            if name != victim:
                np.testing.assert_array_equal(others[name], array)
            elif not thief.acted:
                np.testing.assert_array_equal(arrays[name], array)


def victims(case: Case) -> list[str]:
    """The outputs, and the largest of the inputs."""
    arrays = case.make()
    inputs = sorted((n for n in arrays if n not in case.outputs), key=lambda n: -arrays[n].nbytes)
    return [*case.outputs, inputs[0]]


def paths(names: list[str]) -> list[tuple[str, bool]]:
    return [(n, planned) for n in names for planned in (False, True)
            if not planned or CASES[n].plan is not None]  # fmt: skip


def sweep(
    name: str, planned: bool, hooked: Callable[[Thief], Any], least: int, **changed: Any
) -> None:
    """Act at the first opportunity, at the second, and so on until a call offers no more."""
    case = CASES[name]
    expected = quietly(case.expected)
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr(Case, "expected", lambda _self: expected)
        for victim in victims(case):
            disturb(case, planned, victim, Thief(-1), **changed)  # warm
            for turn in range(5000):
                thief = Thief(turn)
                with hooked(thief):
                    disturb(case, planned, victim, thief, **changed)
                if not thief.acted:
                    break
            assert turn >= least, "the hook was never reached"


# ---------------------------------------------------------------- wherever Python code runs


@contextmanager
def collecting(thief: Thief) -> Iterator[None]:
    old = gc.get_threshold()
    gc.callbacks.append(thief)
    gc.set_threshold(1)
    try:
        yield
    finally:
        gc.set_threshold(*old)
        gc.callbacks.remove(thief)


@contextmanager
def profiling(thief: Thief) -> Iterator[None]:
    old = sys.getprofile()
    sys.setprofile(thief)
    try:
        yield
    finally:
        sys.setprofile(old)


@contextmanager
def tracing(thief: Thief) -> Iterator[None]:
    def trace(*_: Any) -> Any:
        thief()
        return trace

    old = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(old)


@pytest.mark.parametrize(("name", "planned"), paths(list(CASES)))
def test_the_collector(name: str, planned: bool) -> None:
    sweep(name, planned, collecting, 0)


@pytest.mark.parametrize(("name", "planned"), paths(list(CASES)))
def test_a_profiler(name: str, planned: bool) -> None:
    sweep(name, planned, profiling, 0 if planned else 1)


@pytest.mark.parametrize(("name", "planned"), paths(["Norm", "NHSD with a warning", "selection"]))
def test_a_tracer(name: str, planned: bool) -> None:
    sweep(name, planned, tracing, 1)


@pytest.mark.parametrize("hook", [collecting, profiling])
@pytest.mark.parametrize(("name", "planned"), paths(["Norm", "Rope", "update", "selection"]))
def test_large_work_that_asks_for_threads(
    name: str, planned: bool, hook: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCORE_NUM_THREADS", "2")
    assert parallel.parallel_bytes() == 0  # so that the small calls of tests use threads
    sweep(name, planned, hook, 0)


# ---------------------------------------------------------------- warnings


def to_stderr(message: Any, *_: Any, **__: Any) -> None:
    sys.stderr.write(str(message))


@pytest.mark.parametrize(("name", "planned"), paths(list(WARNING)))
@pytest.mark.parametrize("hook", ["showwarning", "stderr"])
def test_the_hook_of_a_warning(
    name: str, planned: bool, hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    for victim in victims(case):
        expected = quietly(case.expected)
        thief = Thief()

        def write(_text: str, thief: Thief = thief) -> None:
            # Another thread, which runs while this one writes.
            thread = threading.Thread(target=thief)
            thread.start()
            thread.join()

        with warnings.catch_warnings(), monkeypatch.context() as patch:
            warnings.simplefilter("always")
            patch.setattr(Case, "expected", lambda _self, found=expected: found)
            if hook == "showwarning":
                patch.setattr(warnings, "showwarning", thief)
            else:
                patch.setattr(warnings, "showwarning", to_stderr)
                patch.setattr(sys, "stderr", type("Stderr", (), {"write": staticmethod(write)})())
            disturb(case, planned, victim, thief)
        assert thief.acted


def quietly(call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


@pytest.mark.parametrize("name", WARNING)
def test_a_warning_alone_changes_nothing(name: str) -> None:
    case = CASES[name]
    expected = quietly(case.expected)
    arrays = case.make()
    with pytest.warns(kvcore.KVPortabilityWarning):
        case.call(**arrays, **case.options)
    for output, array in expected.items():
        np.testing.assert_array_equal(arrays[output], array)


def test_warned_of_is_what_was_checked() -> None:
    # The hook rewrites the slots: what is moved is what was checked before it ran.
    case = CASES["NHSD with a warning"]
    expected = quietly(case.expected)
    arrays = case.make()

    def rewrite(*_: Any, **__: Any) -> None:
        arrays["slot_mapping"][...] = 2**31 - 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = rewrite
        case.call(**arrays, **case.options)
    for output, array in expected.items():
        np.testing.assert_array_equal(arrays[output], array)


def test_a_hook_that_runs_the_plan_it_was_called_from() -> None:
    case = CASES["NHSD with a warning"]
    assert case.plan is not None
    arrays = case.make()
    plan = quietly(lambda: case.plan(**arrays, **case.options))
    caught = []

    def again(*_: Any, **__: Any) -> None:
        with pytest.raises(kvcore.StreamError, match="one run of a plan at a time") as error:
            plan.run()
        caught.append(error)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = again
        plan.run()
    assert caught
    assert arrays["key_cache"].any()


# ---------------------------------------------------------------- code of arguments


class Odd(str):
    """A mode whose hash and comparison run what they are given."""

    act: Callable[[], Any] = staticmethod(lambda: None)

    def __hash__(self) -> int:
        type(self).act()
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        type(self).act()
        return str.__eq__(self, other)


@pytest.mark.parametrize("name", ["Norm", "gather"])
@pytest.mark.parametrize("planned", [False, True])
def test_the_hash_of_a_parameter(name: str, planned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def hashing(thief: Thief) -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(Odd, "act", staticmethod(thief))
            yield

    sweep(name, planned, hashing, 0 if planned else 2, cache_mode=Odd("Norm"))


class Number:
    def __init__(self, value: int, act: Callable[[], Any]) -> None:
        self.value = value
        self.act = act

    def __index__(self) -> int:
        self.act()
        return self.value


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [("Norm", "num_threads", 1), ("update", "layer_id", 1), ("update", "num_threads", 2),
     ("selection", "selection_topk_block_size", 4), ("selection", "num_threads", 1),
     ("paged_nz_to_nd", "num_heads", 2)],
)  # fmt: skip
def test_an_index_of_a_number(name: str, argument: str, value: int) -> None:
    case = CASES[name]
    for victim in victims(case):
        thief = Thief()
        disturb(case, False, victim, thief, **{argument: Number(value, thief)})
        assert thief.acted


class Described:
    """An array with nothing but an interface, whose property runs what it is given."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self.act: Callable[[], Any] = lambda: None

    @property
    def __array_interface__(self) -> Any:
        self.act()
        return self.array.__array_interface__


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("name", ["Norm", "NHSD with a warning", "update", "gather", "selection"])
def test_the_attribute_of_an_array(name: str, planned: bool) -> None:
    case = CASES[name]
    arrays = case.make()
    for described in arrays:
        for victim in victims(case):
            if victim == described:
                continue
            for turn in range(8):
                thief = Thief(turn)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    disturb_described(case, planned, described, victim, thief)
                if not thief.acted:
                    break


def disturb_described(case: Case, planned: bool, described: str, victim: str, thief: Thief) -> None:
    expected = case.expected()
    arrays = own(case)
    given: dict[str, Any] = dict(arrays)
    holder = given[described] = Described(arrays[described])
    before = {name: array.copy() for name, array in arrays.items()}
    thief.victim = arrays[victim]
    error = None
    try:
        if planned:
            assert case.plan is not None
            run = case.plan(**given, **case.options).run
            thief.armed, holder.act = True, thief
            run()
        else:
            thief.armed, holder.act = True, thief
            case.call(**given, **case.options)
    except kvcore.KVCoreError as caught:
        error = caught
    thief.armed = False
    thief.check()
    wanted = before if error is not None else before | expected
    for name, array in arrays.items():
        if name != victim:
            np.testing.assert_array_equal(array, wanted[name])


# ---------------------------------------------------------------- stats=


class Filled(dict[str, Any]):
    """A dict whose filling runs what it is given."""

    act: Callable[[], Any] = staticmethod(lambda: None)

    def update(self, *arguments: Any, **keywords: Any) -> None:
        type(self).act()
        super().update(*arguments, **keywords)

    __setitem__ = update


@pytest.mark.parametrize("planned", [False, True])
def test_a_dict_that_frees_an_array(planned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["selection"]
    for victim in victims(case):
        thief = Thief()
        monkeypatch.setattr(Filled, "act", staticmethod(thief))
        disturb(case, planned, victim, thief, stats=Filled())
        assert thief.acted


def run(case: Case, planned: bool, arrays: dict[str, Array], options: dict[str, Any]) -> None:
    if planned:
        assert case.plan is not None
        case.plan(**arrays, **options).run()
    else:
        case.call(**arrays, **options)


@pytest.mark.parametrize("planned", [False, True])
def test_a_dict_that_refuses_leaves_every_array(
    planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RuntimeError("refused")

    case = CASES["selection"]
    arrays = case.make()
    before = {name: array.copy() for name, array in arrays.items()}
    monkeypatch.setattr(Filled, "act", staticmethod(refuse))
    options = case.options | {"stats": Filled()}
    for _ in range(2):
        with pytest.raises(RuntimeError, match="refused"):
            run(case, planned, arrays, options)
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, before[name])
    # The same dict, willing again.
    monkeypatch.setattr(Filled, "act", staticmethod(lambda: None))
    case.call(**arrays, **options)
    assert set(options["stats"]) == {
        "reused", "moved", "refreshed", "read", "swapped", "bytes_read", "bytes_moved"
    }  # fmt: skip
    for name, array in case.expected().items():
        np.testing.assert_array_equal(arrays[name], array)


# ---------------------------------------------------------------- backends and torch


@pytest.mark.parametrize("name", ["Norm", "update", "gather", "selection"])
def test_a_backend_that_frees_an_array(name: str) -> None:
    class Own:
        name = "own"
        spaces = frozenset({"host"})

        def __init__(self, act: Callable[[], Any]) -> None:
            self.act = act

        def why_not(self, plan: Any = None) -> str | None:
            return None

        def prepare(self, plan: Any) -> Callable[[], Any]:
            def run() -> Any:
                self.act()
                return plan.run_on_cpu()

            return run

    case = CASES[name]
    for planned in (False, True):
        for victim in victims(case):
            thief = Thief()
            disturb(case, planned, victim, thief, backend=Own(thief))
            assert thief.acted
        disturb(case, planned, victim, Thief(-1), backend=Own(lambda: None))


def storage_that_goes(planned: bool) -> int:
    """Take a cache's storage while a function mode sees what a call asks; how often it saw one."""
    torch = pytest.importorskip("torch")
    overrides = pytest.importorskip("torch.overrides")

    class Mode(overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal seen
            if armed:
                seen += 1
                if seen == turn:
                    with torch._C.DisableTorchFunction():
                        cache.untyped_storage().resize_(0)
                        canaries.extend(torch.full((512,), 7, dtype=torch.int16) for _ in range(64))
            return func(*args, **(kwargs or {}))

    for turn in (1, 2, 3, 4, 7, 12, 20, 60):
        seen, armed = 0, False
        canaries: list[Any] = []
        key = torch.ones((2, 2, 16), dtype=torch.int16)
        cache = torch.zeros((4, 8, 2, 16), dtype=torch.int16)
        slots = torch.tensor([3, 30])
        with Mode():
            if planned:
                call = kvcore.plan_scatter_pa_kv_cache(key, cache, slots).run
            else:

                def call(key: Any = key, cache: Any = cache, slots: Any = slots) -> None:
                    kvcore.scatter_pa_kv_cache(key, cache, slots)

            armed = True
            try:
                call()
            except kvcore.ParamInvalidError:
                assert seen >= turn
            armed = False
        assert all((canary == 7).all() for canary in canaries)
        if seen < turn:
            assert cache.any()
            return seen
    raise AssertionError("there is no end to what a call asks")


ASKED_IN_PYTHON = """
import os
import subprocess
import sys
from kvcore._core import torch_questions
torch_questions.questions = lambda: None
from test_last_look import storage_that_goes
print(storage_that_goes(sys.argv[1] == "True") > 1)
"""


@pytest.mark.parametrize("planned", [False, True])
def test_torch_storage_that_goes_in_a_function_mode(planned: bool) -> None:
    """A call that asks in C runs no code of the mode; where torch is asked in Python, it does."""
    pytest.importorskip("torch")
    assert storage_that_goes(planned) == 0
    done = subprocess.run(
        [sys.executable, "-c", ASKED_IN_PYTHON, str(planned)],
        capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.stdout == "True\n", done.stderr
