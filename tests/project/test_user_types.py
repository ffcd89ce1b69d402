# SPDX-License-Identifier: Apache-2.0
"""User programs before a checker of types: right ones pass in strict mode, each mistake is found.

One run of mypy looks at all of them; pyright looks too where it is installed
(``pip install basedpyright``), and says whether every public symbol of the package has a type.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: What a user writes, checked in strict mode without a complaint.
RIGHT = """
from typing import Any, assert_type

import anyio
import numpy as np
import kvcore
from kvcore.offload import DevicePool
from kvcore.replay import Replay, ReplayReport, ModelShape, generate_trace

def operators() -> None:
    key_cache = np.zeros((64, 128, 8, 128), np.float16)
    value_cache = np.zeros_like(key_cache)
    key, slots = np.zeros((3, 8, 128), np.float16), np.array([5, 300, -1])
    kvcore.scatter_pa_kv_cache(key, key_cache, slots, key, value_cache)
    plan = kvcore.plan_scatter_pa_kv_cache(key, key_cache, slots, key, value_cache, soc="A3")
    plan.run()
    assert_type(kvcore.scenario_of(key, key_cache, slots), kvcore.Scenario)
    with kvcore.use_soc("A3") as soc:
        assert_type(soc, kvcore.SoC | None)
    try:
        plan.run()
    except kvcore.SlotRangeError as error:
        assert_type(error.code, int | None)

async def queues() -> None:
    async with kvcore.Device("A3", clock="model", race_check="raise") as device:
        assert_type(device, kvcore.Device)
        compute, h2d = device.stream("compute"), device.stream("h2d")
        assert_type(compute, kvcore.Stream)
        host, cache = device.empty_host((64, 512), "bfloat16"), device.empty((64, 512), "bfloat16")
        assert_type(cache, kvcore.Buffer)
        ready = device.event()
        assert_type(ready, kvcore.Event)
        h2d.copy(cache, host)
        ready.record(h2d)
        compute.wait_event(ready)
        await compute.synchronize()
        async with device.capture(compute) as graph:
            compute.compute(10.0, "layer")
        assert_type(graph, kvcore.Graph)
        graph.replay(compute)
        assert_type(device.now, float)
        assert_type(kvcore.current_stream(device), kvcore.Stream)

def rows() -> None:
    full: dict[int, list[Any]] = {0: [np.zeros((64, 128, 512), np.uint16)]}
    pool = DevicePool(full, capacity=8192, topk=2048, max_tokens=64 * 128, policy="lru")
    selection = pool.plan("a", np.arange(2048), block_table=np.arange(64))
    assert_type(selection.hits, int)

def lab() -> None:
    shape = ModelShape("mine", num_layers=2, num_heads=1, head_size=16, value_head_size=16)
    replay = Replay(list(generate_trace(10, seed=0)), shape, num_blocks=64, block_size=16)
    assert_type(replay.run(), ReplayReport)

device: kvcore.runtime.Device = kvcore.Device("A3")
kvcore.offload.BlockPool(3)
kvcore.testing.assert_kv_equal(0, 1)
profile: kvcore.DeviceProfile = kvcore.DeviceProfile.named(kvcore.soc.A3.name)
count: int | None = kvcore.threads.get_num_threads()
anyio.run(queues)
"""

#: A line, and what mypy and pyright call its fault.
WRONG = {
    "kvcore.Devise()": ("attr-defined", "reportAttributeAccessIssue"),
    "kvcore.scatter_pa_kv_cach": ("attr-defined", "reportAttributeAccessIssue"),
    "kvcore.ofload": ("attr-defined", "reportAttributeAccessIssue"),
    "kvcore.offload.BlockPol": ("attr-defined", "reportAttributeAccessIssue"),
    "kvcore.runtime.Buffers": ("attr-defined", "reportAttributeAccessIssue"),
    "kvcore.replay.Repla": ("attr-defined", "reportAttributeAccessIssue"),
    "kvcore.Device(clok='wall')": ("call-arg", "reportCallIssue"),
    "kvcore.Device(clock='wal')": ("arg-type", "reportArgumentType"),
    "kvcore.Device().streamed()": ("attr-defined", "reportAttributeAccessIssue"),
    "kvcore.current_stream(1)": ("arg-type", "reportArgumentType"),
    "kvcore.reshape_and_cache()": ("call-arg", "reportCallIssue"),
    "kvcore.plan_kv_cache_update()": ("call-arg", "reportCallIssue"),
    "kvcore.plan_kv_cache_update(1, 1, 1, 1, 1, sock='A3')": ("call-arg", "reportCallIssue"),
    "kvcore.Device().stream('h2d').copi(1, 2)": ("attr-defined", "reportAttributeAccessIssue"),
}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "user.py"
    path.write_text(RIGHT + "".join(f"{line}\n" for line in WRONG))
    return path


def wanted(of: int) -> dict[int, str]:
    first = len(RIGHT.splitlines()) + 1
    return {first + number: faults[of] for number, faults in enumerate(WRONG.values())}


@pytest.mark.timeout(400)
def test_mypy_sees_every_name(program: Path) -> None:
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    # With the settings of the package, so that what .ci/check has found of its modules is used.
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-color-output", "--no-error-summary", str(program)],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "MYPYPATH": str(ROOT)},
    )  # fmt: skip
    said = {}
    for line in done.stdout.splitlines():
        where, _, text = line.partition(": error: ")
        if text:
            said[int(where.rpartition(":")[2])] = text.rpartition("[")[2].rstrip("]")
    assert said == wanted(0), done.stdout


def pyright(folder: Path, *arguments: str) -> dict[str, object]:
    """What it says as JSON, with this interpreter's packages and a copy of the package's text."""
    if importlib.util.find_spec("basedpyright") is None:
        pytest.skip("basedpyright is not installed")
    site = folder / "packages"
    for path in (ROOT / "kvcore").rglob("*"):
        if path.suffix in {".py", ".pyi", ".typed"}:
            copy = site / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", *arguments],
        capture_output=True, text=True, cwd=folder,
        env={**os.environ, "PYTHONPATH": str(site)},
    )  # fmt: skip
    assert done.stdout, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.timeout(400)
def test_pyright_sees_every_name(program: Path) -> None:
    (program.parent / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    said = {}
    for found in pyright(program.parent, str(program))["generalDiagnostics"]:  # type: ignore[attr-defined]
        if found["severity"] == "error":
            said[found["range"]["start"]["line"] + 1] = found["rule"]
    assert said == wanted(1)


@pytest.mark.timeout(400)
def test_pyright_knows_the_type_of_every_public_symbol(tmp_path: Path) -> None:
    answer = pyright(tmp_path, "--verifytypes", "kvcore", "--ignoreexternal")
    found = answer["typeCompleteness"]
    assert isinstance(found, dict)
    assert found["exportedSymbolCounts"]["withKnownType"] > 4000, answer["generalDiagnostics"]
    unknown = [s["name"] for s in found["symbols"] if s["isExported"] and not s["isTypeKnown"]]
    assert unknown == []


def test_the_stub_of_what_is_made_has_the_operators_parameters() -> None:
    """kvcore/ops/derived.pyi is what .ci/stub_of_derived.py writes."""
    written = runpy.run_path(str(ROOT / ".ci/stub_of_derived.py"))
    text = written["STUB"].read_text(encoding="utf-8")
    assert ast.dump(ast.parse(text)) == ast.dump(ast.parse(written["stub"]()))


@pytest.mark.parametrize("name", ["plan_scatter_pa_kv_cache", "scenario_of", "Device", "replay"])
def test_jedi_shows_names_and_parameters(name: str) -> None:
    jedi = pytest.importorskip("jedi", reason="jedi is not installed")
    project = jedi.Project(str(ROOT), sys_path=[str(ROOT)])
    text = f"import kvcore\nkvcore.{name}"
    (found,) = jedi.Script(text, project=project).goto(2, len(f"kvcore.{name}"))
    assert found.name == name
    if name != "replay":
        (shown, *_) = jedi.Script(f"{text}(", project=project).get_signatures()
        parameter = "clock" if name == "Device" else "slot_mapping"
        assert re.search(rf"\b{parameter}\b", shown.to_string())
