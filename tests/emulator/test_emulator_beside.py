# SPDX-License-Identifier: Apache-2.0
"""What clients find beside torch_npu: Triton kernels by name, modules of a CANN, ATB's library."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from wheel import needs_wheel

import kvcore.emulator
from kvcore.emulator import modules

# ---------------------------------------------------------------- Triton kernels by name


class Placeholder:
    """As vLLM's, where Triton is not installed: ``jit`` returns the function."""

    def __init__(self) -> None:
        self.jit = self._dummy
        self.cdiv = lambda a, b: -(-a // b)

    def _dummy(self, function: Any) -> Any:
        return function


@pytest.fixture
def triton(torch: Any) -> Any:
    """An instance of the placeholder, as a client has it under the machine."""
    from kvcore.emulator import triton as ours

    there = ModuleType("there")
    there.TritonPlaceholder = type("TritonPlaceholder", (Placeholder,), {})  # type: ignore[attr-defined]
    ours.replace(there)
    return there.TritonPlaceholder()


def kernel(triton: Any) -> Any:
    @triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
    def _compute_slot_mapping_kernel() -> None:
        raise AssertionError("the text of a kernel is not run")

    return _compute_slot_mapping_kernel


def slots(torch: Any, triton: Any, given: dict[str, Any] | None = None) -> tuple[Any, list[int]]:
    """Launch the kernel for two requests of 3 and 2 tokens; also what a loop makes of them."""
    starts, positions = [0, 3, 5, 5], [6, 7, 8, 0, 1, 99, 99]
    table = [[4, 2, 7], [9, 1, 3], [5, 5, 5]]
    mapping = torch.full((9,), 77, dtype=torch.int32).npu()
    call = {
        "num_tokens": 5, "max_num_tokens": 7, "block_size": 4, "TOTAL_CP_WORLD_SIZE": 1,
        "starts": torch.tensor(starts, dtype=torch.int32).npu(),
        "positions": torch.tensor(positions).npu(),
        "programs": 3,
    } | (given or {})  # fmt: skip
    rows = torch.tensor(table, dtype=torch.int32).npu()
    kernel(triton)[(call["programs"],)](
        call["num_tokens"], call["max_num_tokens"], call["starts"], call["positions"], rows,
        rows.stride(0), call["block_size"], mapping, KV_CACHE_BLOCK_SIZE=4, BLOCKS_PER_KV_BLOCK=1,
        TOTAL_CP_WORLD_SIZE=call["TOTAL_CP_WORLD_SIZE"], TOTAL_CP_RANK=0,
        CP_KV_CACHE_INTERLEAVE_SIZE=1, PAD_ID=-1, TILE_BLOCK_SIZE=1024, BLOCK_TABLE_WINDOW_SIZE=512,
    )  # fmt: skip
    wanted = [77] * 9
    wanted[5:7] = [-1, -1]
    for request in range(2):
        for token in range(starts[request], starts[request + 1]):
            block, rest = divmod(positions[token], 4)
            wanted[token] = table[request][block] * 4 + rest
    return mapping, wanted


def test_slots_of_tokens(npu: ModuleType, torch: Any, triton: Any) -> None:
    """Slots of each request's tokens, padding behind them, and nothing else."""
    mapping, wanted = slots(torch, triton)
    assert mapping.cpu().tolist() == wanted


def test_slots_in_a_graph(npu: ModuleType, torch: Any, triton: Any) -> None:
    """The launch is captured, and reads at each replay what is there then."""
    positions = torch.tensor([0, 0, 0, 0, 0]).npu()
    starts = torch.tensor([0, 3, 5], dtype=torch.int32).npu()
    table = torch.tensor([[4, 2, 7], [9, 1, 3]], dtype=torch.int32).npu()
    mapping = torch.full((9,), 77, dtype=torch.int32).npu()
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        kernel(triton)[lambda constants: (3 * constants["TOTAL_CP_WORLD_SIZE"],)](
            5, 6, starts, positions, table, 3, 4, mapping, KV_CACHE_BLOCK_SIZE=4,
            BLOCKS_PER_KV_BLOCK=1, TOTAL_CP_WORLD_SIZE=1, TOTAL_CP_RANK=0,
            CP_KV_CACHE_INTERLEAVE_SIZE=1, PAD_ID=-1, TILE_BLOCK_SIZE=8, BLOCK_TABLE_WINDOW_SIZE=4,
        )  # fmt: skip
    positions.copy_(torch.tensor([5, 6, 11, 2, 4]))
    graph.replay()
    assert mapping.cpu().tolist() == [9, 10, 31, 38, 4, -1, 77, 77, 77]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"TOTAL_CP_WORLD_SIZE": 2}, "TOTAL_CP_WORLD_SIZE: expected 1, got 2"),
        ({"programs": 5}, "query_start_loc: expected 5 bounds of 4 requests, got 4"),
        ({"num_tokens": 8}, "expected num_tokens <= max_num_tokens"),
        ({"max_num_tokens": 10}, "expected num_tokens <= max_num_tokens"),
    ],
)
def test_a_launch_that_is_refused(
    npu: ModuleType, torch: Any, triton: Any, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(RuntimeError, match=f"_compute_slot_mapping_kernel: {words}"):
        slots(torch, triton, given)


def test_a_position_behind_the_table(npu: ModuleType, torch: Any, triton: Any) -> None:
    slots(torch, triton, {"positions": torch.tensor([0, 1, 12, 0, 0]).npu()})
    with pytest.raises(RuntimeError, match="blocks of a table with 3 columns, got block 3"):
        torch.npu.synchronize()


def test_another_kernel_is_named(npu: ModuleType, torch: Any, triton: Any) -> None:
    @triton.jit  # type: ignore[untyped-decorator]
    def _unheard_of_kernel(x: Any) -> None:
        pass

    with pytest.raises(RuntimeError, match=r"_unheard_of_kernel of .*_compute_slot_mapping_kernel"):
        _unheard_of_kernel[(1,)](torch.zeros(1).npu())


@needs_wheel
def test_the_placeholder_of_a_client_is_found(program: Any, tmp_path: Path) -> None:
    """A module with vLLM's name for it is changed when it is imported, and others are not."""
    package = tmp_path / "vllm" / "triton_utils"
    package.mkdir(parents=True)
    for place in (package.parent, package):
        (place / "__init__.py").write_text("")
    (package / "importing.py").write_text(
        "class TritonPlaceholder:\n    def __init__(self):\n        self.jit = lambda f: f\n"
    )
    text = (
        "import sys; import kvcore.emulator; kvcore.emulator.start(memory=1 << 28)\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from vllm.triton_utils.importing import TritonPlaceholder\n"
        "def lonely(): pass\n"
        "print(type(TritonPlaceholder().jit(lonely)).__name__)\n"
    )
    done = program(text)
    assert done.stdout == "Launcher\n", done.stderr


# ---------------------------------------------------------------- modules of a CANN


@pytest.fixture
def provided() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module as the machine's processes do."""
    before, finders = dict(sys.modules), list(sys.meta_path)
    modules.provide()
    yield importlib.import_module
    sys.meta_path[:] = finders
    for name in set(sys.modules) - set(before):
        if name.partition(".")[0] in ("acl", "memfabric_hybrid"):
            del sys.modules[name]


def test_bytes_by_the_module_acl(
    npu: ModuleType, torch: Any, provided: Callable[[str], ModuleType]
) -> None:
    """To the device, within it and back; a size beyond the target's room is a code."""
    rt = provided("acl.rt")
    host, back = torch.arange(12, dtype=torch.uint8), torch.full((12,), 9, dtype=torch.uint8)
    there, other = (
        torch.zeros(12, dtype=torch.uint8).npu(),
        torch.zeros(12, dtype=torch.uint8).npu(),
    )
    torch.npu.synchronize()
    assert rt.memcpy(there.data_ptr(), 12, host.data_ptr(), 12, 1) == 0
    assert rt.memcpy(other.data_ptr() + 2, 10, there.data_ptr(), 8, 3) == 0
    assert rt.memcpy(back.data_ptr(), 12, other.data_ptr(), 11, 2) == 0
    assert back.tolist() == [0, 0, *range(8), 0, 9]
    with kvcore.emulator.expected() as found:
        assert rt.memcpy(back.data_ptr(), 4, other.data_ptr(), 5, 2) != 0
    assert [report.kind for report in found] == ["rule"]
    assert back.tolist() == [0, 0, *range(8), 0, 9]


def test_a_name_that_a_module_does_not_have(provided: Callable[[str], ModuleType]) -> None:
    acl = provided("acl")
    with pytest.raises(AttributeError, match="module acl has no names, and no init"):
        acl.init  # noqa: B018
    with pytest.raises(AttributeError, match=r"module acl\.rt has memcpy, and no malloc"):
        provided("acl.rt").malloc  # noqa: B018


def test_an_installed_module_is_the_one_that_is_imported(
    provided: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "acl"
    package.mkdir()
    (package / "__init__.py").write_text("installed = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert provided("acl").installed
    with pytest.raises(ModuleNotFoundError, match=r"acl\.rt"):  # and no part of it is made up
        provided("acl.rt")


def test_nothing_is_found_outside_of_the_machine() -> None:
    if kvcore.emulator.running() is None:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("acl")


# ---------------------------------------------------------------- ATB's library


def test_registering_atb(npu: ModuleType, torch: Any) -> None:
    """It is done, and the names that it gives torch_npu are there."""
    from torch_npu.op_plugin.atb._atb_ops import (  # type: ignore[import-not-found,unused-ignore]
        _register_atb_extensions,
    )

    _register_atb_extensions()
    assert npu._npu_reshape_and_cache is torch.ops.atb._npu_reshape_and_cache
    with pytest.raises(RuntimeError, match="_npu_group_topk: ATB's library has it"):
        npu._npu_group_topk(torch.zeros(2, 4).npu(), group_num=2, k=1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_matmul_add(npu: ModuleType, torch: Any, dtype: str) -> None:
    """C gains x transposed times weight, in float32."""
    x, weight = (torch.randn(5, n).to(getattr(torch, dtype)) for n in (3, 4))
    total = torch.randn(3, 4)
    there = total.npu()
    npu._npu_matmul_add_fp32(x.npu(), weight.npu(), there)
    wanted = total.double() + x.double().t() @ weight.double()
    torch.testing.assert_close(there.cpu().double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shapes", "dtype", "words"),
    [
        (((5, 3), (4, 4), (3, 4)), "float16", r"expected x \[K, M\] and weight \[K, N\]"),
        (((5, 3), (5, 4), (3, 5)), "float16", r"C: expected contiguous float32 \[3, 4\]"),
        (((5, 3), (5, 4), (3, 4)), "float32", "x: expected float16 or bfloat16"),
    ],
)
def test_matmul_add_refuses(
    npu: ModuleType, torch: Any, shapes: tuple[tuple[int, int], ...], dtype: str, words: str
) -> None:
    x, weight = (torch.zeros(s, dtype=getattr(torch, dtype)).npu() for s in shapes[:2])
    with pytest.raises(RuntimeError, match=f"_npu_matmul_add_fp32: {words}"):
        npu._npu_matmul_add_fp32(x, weight, torch.zeros(shapes[2]).npu())


# ---------------------------------------------------------------- an event before its first record


@needs_wheel
@pytest.mark.parametrize(("records", "reports"), [(True, 0), (False, 1)])
def test_waiting_at_the_head_of_a_loop(program: Any, records: bool, reports: int) -> None:
    """The first wait of such a loop waits for nothing, and is right if the event is recorded."""
    text = (
        "import kvcore.emulator; kvcore.emulator.start(memory=1 << 28)\n"
        "import torch\n"
        "done = torch.npu.Event()\n"
        "for _ in range(2):\n"
        "    done.synchronize()\n"
        "    torch.ones(3).npu()\n"
        f"    if {records}: done.record()\n"
        "del done\n"
    )
    done = program(text)
    assert done.returncode == 0, done.stderr
    words = "Event.synchronize waits for an event that was never recorded (<string>:5)"
    assert done.stderr.count(words) == reports, done.stderr
