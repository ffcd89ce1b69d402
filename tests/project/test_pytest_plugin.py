# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin, in test runs of its own."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvcore.runtime  # loaded once: numpy cannot be loaded again by an inner run

# Nor can torch, which takes seconds to load besides.
if importlib.util.find_spec("torch"):
    import kvcore.torch

pytest_plugins = ["pytester"]

SCATTER = """
import numpy as np
import pytest
import kvcore

def scatter(dtype):
    key, cache = np.ones((2, 1, 16), dtype), np.zeros((2, 4, 1, 16), dtype)
    kvcore.scatter_pa_kv_cache(key, cache, np.array([1, 6]), key, cache.copy())
"""


@pytest.fixture
def torch_inside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inner runs may use kvcore.torch and leave it installed, as a process that ends does."""
    pytest.importorskip("torch", reason="torch is not installed")
    made: list[kvcore.torch.Installation] = []
    install = kvcore.torch.install

    def kept(*arguments: Any, **keywords: Any) -> kvcore.torch.Installation:
        made.append(install(*arguments, **keywords))
        return made[-1]

    monkeypatch.setattr(kvcore.torch, "install", kept)
    yield
    for installation in made:
        installation.uninstall()


def outcomes(result: pytest.RunResult) -> dict[str, int]:
    found = result.parseoutcomes()
    return {name: n for name, n in found.items() if name != "warnings"}


def test_it_is_an_entry_point() -> None:
    (entry,) = importlib.metadata.entry_points(group="pytest11", name="kvcore")
    assert entry.value == "_kvcore_pytest"


def test_unused_it_brings_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_nothing(): pass")
    pytester.makeconftest(
        """
        import sys
        def pytest_unconfigure(config):
            heavy = {"kvcore", "numpy", "torch", "anyio.pytest_plugin"} & set(sys.modules)
            print("loaded:", sorted(heavy - {"anyio.pytest_plugin"}))
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:hypothesispytest", "-p", "no:benchmark")
    result.stdout.fnmatch_lines(["loaded: []"])


def test_it_never_imports_torch() -> None:
    program = "import _kvcore_pytest, sys; print({'torch', 'numpy', 'kvcore'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


# ---------------------------------------------------------------- --kvcore-soc
def test_marked_tests_are_repeated(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        SCATTER
        + """
@pytest.mark.kvcore
def test_half(kvcore_soc):
    current = kvcore.soc.current()
    assert (current and current.name) == kvcore_soc
    scatter(np.float16)

@pytest.mark.kvcore
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_types(dtype):
    scatter(dtype)

def test_unmarked(kvcore_soc):
    assert kvcore_soc is None
    scatter(np.float32)
"""
    )
    result = pytester.runpytest_inprocess("-v", "--kvcore-soc=A2,A3,950,A3")
    # Only the 950 moves float32.
    assert outcomes(result) == {"passed": 3 + 4 + 1, "failed": 2}
    result.stdout.fnmatch_lines_random(
        ["*test_half?A2? PASSED*", "*test_half?950? PASSED*", "*test_unmarked PASSED*"]
    )
    result.stdout.fnmatch_lines_random(["*ParamInvalidError: key: expected*on A2*"])
    assert outcomes(pytester.runpytest_inprocess()) == {"passed": 4}


@pytest.mark.parametrize("option", ["--kvcore-soc=A2", "--kvcore-races"])
def test_an_option_without_effect_is_told(pytester: pytest.Pytester, option: str) -> None:
    pytester.makepyfile("def test_unmarked(): pass")
    name = option.split("=")[0]
    result = pytester.runpytest_inprocess("-q", option)
    result.stdout.fnmatch_lines([f"kvcore: {name} without effect: no test is marked kvcore *"])
    for marked in (["--kvcore-all", option], []):
        pytester.runpytest_inprocess("-q", *marked).stdout.no_fnmatch_line("*without effect*")


def test_a_mark_may_name_its_socs(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.kvcore("950", "A2")
        def test_some(kvcore_soc):
            assert kvcore_soc in ("950", "A2")

        @pytest.mark.kvcore("A2")
        class TestOne:
            def test_in_a_class(self, kvcore_soc):
                assert kvcore_soc == "A2"
        """
    )
    result = pytester.runpytest_inprocess("--kvcore-soc=A3,950")
    assert outcomes(result) == {"passed": 1, "skipped": 1}
    result = pytester.runpytest_inprocess("--kvcore-soc=A2")
    assert outcomes(result) == {"passed": 2}


def test_all_tests_may_be_taken_as_marked(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        def test_plain(kvcore_soc):
            assert kvcore_soc in ("A2", "A3")

        @pytest.mark.kvcore("A3")
        def test_of_one(kvcore_soc):
            assert kvcore_soc == "A3"
        """
    )
    result = pytester.runpytest_inprocess("--kvcore-soc=A2,A3", "--kvcore-all")
    assert outcomes(result) == {"passed": 3}


def test_threads_and_tasks_have_the_soc(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os, threading, anyio, pytest, kvcore

        @pytest.mark.kvcore
        def test_thread(kvcore_soc):
            seen = []
            thread = threading.Thread(target=lambda: seen.append(kvcore.soc.current().name))
            thread.start()
            thread.join()
            assert seen == [kvcore_soc]

        @pytest.mark.kvcore
        @pytest.mark.anyio
        async def test_task(kvcore_soc):
            await anyio.lowlevel.checkpoint()
            assert kvcore.soc.current().name == kvcore_soc

        def test_afterwards():
            assert "KVCORE_SOC" not in os.environ
        """
    )
    result = pytester.runpytest_inprocess("--kvcore-soc=A3,A2", "-p", "no:trio")
    assert outcomes(result)["failed" if "failed" in outcomes(result) else "passed"] >= 5
    assert "failed" not in outcomes(result)


def test_the_variable_of_the_caller_comes_back(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCORE_SOC", "950")
    pytester.makepyfile(
        """
        import os, pytest

        @pytest.mark.kvcore
        def test_marked(kvcore_soc):
            assert os.environ["KVCORE_SOC"] == kvcore_soc == "A2"

        def test_unmarked(kvcore_soc):
            assert os.environ["KVCORE_SOC"] == kvcore_soc == "950"
        """
    )
    assert outcomes(pytester.runpytest_inprocess("--kvcore-soc=A2")) == {"passed": 2}


@pytest.mark.parametrize("option", ["A4", "", "a2", "A2;A3"])
def test_a_soc_that_there_is_not(pytester: pytest.Pytester, option: str) -> None:
    pytester.makepyfile("def test_nothing(): pass")
    result = pytester.runpytest_inprocess(f"--kvcore-soc={option}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    message = f"*--kvcore-soc: expected names among A2, A3, 950, got {option!r}*"
    result.stderr.fnmatch_lines([message])


def test_a_mark_with_a_soc_that_there_is_not(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.kvcore('A9')\ndef test_it(): pass")
    result = pytester.runpytest_inprocess()
    assert result.ret != 0
    result.stdout.fnmatch_lines(
        ["*pytest.mark.kvcore: expected names among A2, A3, 950, got 'A9'*"]
    )


# ---------------------------------------------------------------- --kvcore-races
RACES = """
import numpy as np
import pytest
import kvcore

def two_writers():
    with kvcore.Device() as device:
        cache = device.empty((2, 4, 1, 8), "float32")
        tokens = device.empty((1, 1, 8), "float32")
        plan = kvcore.plan_scatter_pa_kv_cache(tokens, cache, np.array([3]))
        other = kvcore.plan_scatter_pa_kv_cache(tokens, cache, np.array([3]))
        device.stream().launch(plan)
        device.stream().launch(other)

@pytest.mark.kvcore
def test_marked():
    two_writers()

def test_unmarked():
    two_writers()

@pytest.mark.kvcore
def test_its_own_choice():
    with kvcore.Device(race_check="off") as device:
        assert device.race_check == "off"
"""


def test_races_fail_marked_tests(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(RACES)
    assert outcomes(pytester.runpytest_inprocess()) == {"passed": 3}
    result = pytester.runpytest_inprocess("--kvcore-races")
    assert outcomes(result) == {"passed": 2, "failed": 1}
    result.stdout.fnmatch_lines(["*RaceError*WAW*"])
    assert outcomes(pytester.runpytest_inprocess()) == {"passed": 3}


# ---------------------------------------------------------------- fixtures
def test_a_failure_draws_the_map(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import numpy as np

        def test_cache(assert_kv_equal):
            want = np.zeros((2, 4, 1, 8), np.int8)
            seen = want.copy()
            seen[1, 2, 0, 5] = 7
            assert_kv_equal(seen, want, layout="Norm", name="key_cache")
        """
    )
    result = pytester.runpytest_inprocess()
    assert outcomes(result) == {"failed": 1}
    result.stdout.fnmatch_lines(
        [
            "E * key_cache differs from what is expected in 1 of 8 slots*",
            "E * first difference: block 1, row 2, head 0, element 5 (slot 6): *",
            "E * block 1 |..#.|",
        ]
    )
    result.stdout.no_fnmatch_line("*testing.py*")


NAMESPACE = """
import pytest
torch = pytest.importorskip("torch")

@pytest.mark.kvcore
def test_store(kvcore_namespace):
    key, cache = torch.ones(1, 1, 16), torch.zeros(2, 4, 1, 16)
    kvcore_namespace._npu_reshape_and_cache_siso(key, cache, torch.tensor([3], dtype=torch.int32))
    assert cache[0, 3].sum() == 16

@pytest.mark.kvcore
def test_two_streams(kvcore_namespace):
    npu = kvcore_namespace.npu
    key, cache = torch.ones(1, 1, 16).half(), torch.zeros(2, 4, 1, 16).half()
    for _ in range(2):
        with npu.stream(npu.Stream()):
            slots = torch.tensor([3], dtype=torch.int32)
            kvcore_namespace._npu_reshape_and_cache_siso(key, cache, slots)
    npu.synchronize()
"""


@pytest.mark.usefixtures("torch_inside")
def test_a_namespace(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(NAMESPACE)
    assert outcomes(pytester.runpytest_inprocess()) == {"passed": 2}
    result = pytester.runpytest_inprocess("--kvcore-soc=A3", "--kvcore-races")
    assert outcomes(result) == {"failed": 2}
    result.stdout.fnmatch_lines(["*ParamInvalidError: key: expected * on A3*", "*RaceError*"])


RECIPE = """
import sys, types, kvcore.torch
torch_npu = sys.modules["torch_npu"] = types.ModuleType("torch_npu")
kvcore.torch.install(torch_npu)
"""
RACING = """
import torch
import torch_npu
from torch_npu.npu import Stream, stream

COMM = Stream()
KEY, CACHE = torch.ones(1, 1, 16).half(), torch.zeros(2, 4, 1, 16).half()

def write():
    torch_npu._npu_reshape_and_cache_siso(KEY, CACHE, torch.tensor([3]).int())

def test_left_on_a_stream():
    with stream(COMM):
        write()

def test_after_it():
    write()

def test_racing():
    with stream(COMM):
        write()
    write()

def test_fails_and_races():
    test_racing()
    assert 0, "its own failure"

def test_ordered():
    write()
    COMM.wait_stream(torch_npu.npu.current_stream())
    with stream(COMM):
        write()
"""


@pytest.mark.usefixtures("torch_inside")
def test_an_installation_for_all_tests_tells_each_its_races(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(RECIPE)
    pytester.makepyfile(RACING)
    result = pytester.runpytest_inprocess("--kvcore-races", "--kvcore-all", "-rA")
    assert outcomes(result) == {"passed": 3, "failed": 2}
    result.stdout.fnmatch_lines(["*_ test_racing _*", "*RaceError*WAW*"])
    result.stdout.fnmatch_lines(["*_ test_fails_and_races _*", "*AssertionError: its own failure*"])


UNITTESTS = """
import unittest
import numpy as np
import pytest
import kvcore

class TestCache(unittest.TestCase):
    def setUp(self):
        self.key, self.cache = np.ones((2, 1, 16), "f4"), np.zeros((2, 4, 1, 16), "f4")

    def scatter(self):
        slots = np.array([1, 6])
        kvcore.scatter_pa_kv_cache(self.key, self.cache, slots, self.key, self.cache.copy())

    def test_plain(self):
        self.scatter()

    @pytest.mark.kvcore
    def test_marked(self):
        self.scatter()

    @pytest.mark.kvcore("A3")
    def test_of_one(self):
        self.scatter()
"""


def test_unittest_classes_are_repeated_too(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(UNITTESTS)
    assert outcomes(pytester.runpytest_inprocess()) == {"passed": 3}
    result = pytester.runpytest_inprocess("--kvcore-soc=A2,950", "-rA")
    assert outcomes(result) == {"passed": 2, "failed": 1, "skipped": 1}
    result.stdout.fnmatch_lines(["*_ TestCache.test_marked _*", "*under the limits of A2*"])
    result = pytester.runpytest_inprocess("--kvcore-soc=A2,950", "--kvcore-all")
    assert outcomes(result) == {"passed": 2, "failed": 2, "skipped": 1}


def test_a_namespace_without_torch(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("import sys\nsys.modules['torch'] = None")
    pytester.makepyfile("def test_it(kvcore_namespace): pass")
    result = pytester.runpytest_inprocess("-rs")
    assert outcomes(result) == {"skipped": 1}
    result.stdout.fnmatch_lines(["*torch is not installed*"])


CLIENT = """
import torch
import torch_npu

def test_step():
    key, cache = torch.ones(1, 1, 16, dtype=torch.float32), torch.zeros(2, 4, 1, 16)
    torch_npu._npu_reshape_and_cache(key, key, cache, cache.clone(), torch.tensor([3]))
    assert cache[0, 3].sum() == 16
"""


@pytest.mark.usefixtures("torch_inside")
def test_the_recipe_of_the_readme(pytester: pytest.Pytester) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"^```python\n(# conftest.py\n.*?)^```$", readme, re.M | re.S)
    (command,) = re.findall(r"^pytest (--kvcore.*)$", readme, re.M)
    pytester.makeconftest(recipe)
    pytester.makepyfile(CLIENT)
    assert outcomes(pytester.runpytest_inprocess()) == {"passed": 1}
    result = pytester.runpytest_subprocess(*command.split("#")[0].split())
    assert outcomes(result) == {"passed": 1, "failed": 2}  # only the 950 moves float32
    result.stdout.fnmatch_lines(["*ParamInvalidError: key: expected * on A2*"])


# ---------------------------------------------------------------- tracebacks
FAILING = """
import numpy as np
import pytest
import kvcore

def test_an_operator():
    key, cache = np.ones((2, 1, 16), "f4"), np.zeros((2, 4, 1, 16), "f4")
    kvcore.scatter_pa_kv_cache(key, cache, np.array([1, 99]), key, cache.copy())

def test_a_race():
    with kvcore.Device(race_check="raise") as dev:
        a, b, block = dev.stream("a"), dev.stream("b"), dev.empty((4, 8), name="block")
        a.fill(block, 1)
        b.fill(block, 2)
        dev.synchronize_blocking()

def divide():
    return 1 // 0

def test_a_host_function():
    with kvcore.Device() as dev:
        dev.stream().call(divide)
        dev.synchronize_blocking()

def test_the_programs_own_error():
    class Shape:
        def __index__(self):
            raise ZeroDivisionError("mine")
    with kvcore.Device() as dev:
        dev.empty(Shape())
"""


@pytest.mark.parametrize("style", ["auto", "long", "short"])
def test_own_frames_are_hidden(pytester: pytest.Pytester, style: str) -> None:
    pytester.makepyfile(FAILING)
    result = pytester.runpytest_inprocess(f"--tb={style}")
    assert outcomes(result) == {"failed": 4}
    text = result.stdout.str()
    for own in ("device.py", "_executor.pyx", "_queue.pyx", "plan.pyx", "memory.py"):
        assert f"{own}:" not in text
    for words in (
        "SlotRangeError: slot_mapping[1]: expected",
        "RaceError: stream: expected accesses in order",
        "ZeroDivisionError: integer division",  # the cause, at the test's own line
        "return 1 // 0",
        "ZeroDivisionError: mine",
    ):
        assert words in text
    shown = pytester.runpytest_inprocess("--full-trace").stdout.str()
    assert "device.py" in shown
    assert "_executor.pyx" in shown


def test_frames_of_a_fault_of_the_package_are_shown(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import kvcore
        from kvcore.runtime import allocation

        def test_it(monkeypatch):
            monkeypatch.setattr(allocation, "_dims", None)
            with kvcore.Device() as dev:
                dev.empty(3)
        """
    )
    result = pytester.runpytest_inprocess()
    text = result.stdout.str()
    assert "'NoneType' object is not callable" in text
    assert "allocation.py" in text
