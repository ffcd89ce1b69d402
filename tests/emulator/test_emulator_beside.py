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


# ---------------------------------------------------------------- vllm-ascend's own library


def test_sparse_operators_under_another_name(npu: ModuleType, torch: Any) -> None:
    """The indexer and the attention of vllm-ascend's library are those of torch_npu."""
    query, weights = torch.randn(2, 3, 64, 128).half().npu(), torch.randn(2, 3, 64).half().npu()
    keys = torch.randn(2, 5, 1, 128).half().npu()
    own = torch.ops._C_ascend.npu_lightning_indexer(query, keys, weights, sparse_count=4)
    other = npu.npu_lightning_indexer(query, keys, weights, sparse_count=4)
    assert torch.equal(own[0].cpu(), other[0].cpu())
    latent, rope = torch.randn(2, 5, 1, 512).half().npu(), torch.randn(2, 5, 1, 64).half().npu()
    asked, turned = torch.randn(2, 3, 4, 512).half().npu(), torch.randn(2, 3, 4, 64).half().npu()
    given = {"query_rope": turned, "key_rope": rope}
    found = torch.ops._C_ascend.npu_sparse_flash_attention(
        asked, latent, latent, own[0], 0.1, **given
    )
    wanted = npu.npu_sparse_flash_attention(
        asked, latent, latent, own[0], 0.1, attention_mode=2, **given
    )
    assert torch.equal(found[0].cpu(), wanted[0].cpu())
    assert bool(found[0].cpu().any())


# ---------------------------------------------------------------- host memory, row by row


@pytest.fixture
def offload(npu: ModuleType, torch: Any, provided: Callable[[str], ModuleType]) -> ModuleType:
    return provided("memfabric_hybrid.offload")


def rows_of(torch: Any, tensor: Any, numbers: list[int]) -> Any:
    return torch.tensor([tensor.data_ptr() + n * 8 for n in numbers]).npu()


def test_rows_from_the_host_and_back(torch: Any, offload: ModuleType) -> None:
    """As many rows as the count says, to the device and to the host; the bytes around them stay."""
    host = offload.empty([10, 8], dtype=torch.uint8, pin_memory=True)
    host.copy_(torch.arange(80, dtype=torch.uint8).view(10, 8))
    there = torch.full((6, 8), 200, dtype=torch.uint8).npu()
    sizes, count = torch.tensor([8, 5, 0, 8]).npu(), torch.tensor([3]).npu()
    config = offload.OffloadConfig()
    config.scene = offload.Scene.SHARED
    assert offload.initialize(config) == 0
    sources, targets = rows_of(torch, host, [7, 2, 4, 1]), rows_of(torch, there, [0, 4, 2, 3])
    torch.npu.synchronize()
    assert offload.sparse_copy(sources, targets, sizes, count, there.device) == 0
    wanted = torch.full((6, 8), 200, dtype=torch.uint8)
    wanted[0], wanted[4, :5] = host[7], host[2, :5]
    assert torch.equal(there.cpu(), wanted)
    before = host.clone()
    offload.sparse_copy(targets, sources, sizes, count + 1)
    torch.npu.synchronize()
    before[1] = wanted[3]
    assert torch.equal(host, before)


def test_rows_in_a_graph(torch: Any, offload: ModuleType) -> None:
    """Addresses and the count are read at each replay."""
    host = offload.empty([4, 8], dtype=torch.uint8)
    host.copy_(torch.arange(32, dtype=torch.uint8).view(4, 8))
    there = torch.zeros(2, 8, dtype=torch.uint8).npu()
    sources, targets = rows_of(torch, host, [0, 1]), rows_of(torch, there, [0, 1])
    sizes, count = torch.tensor([8, 8]).npu(), torch.tensor([1]).npu()
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        offload.sparse_copy(sources, targets, sizes, count)
    graph.replay()
    assert there.cpu().tolist() == [list(range(8)), [0] * 8]
    sources.copy_(rows_of(torch, host, [2, 3]))
    count.fill_(2)
    graph.replay()
    assert torch.equal(there.cpu(), host[2:])


@pytest.mark.parametrize("orders", [True, False])
def test_rows_that_another_stream_writes(torch: Any, offload: ModuleType, orders: bool) -> None:
    """A race is one of the bytes whose addresses the tensors hold; an event between is none."""
    host = offload.empty([4, 8], dtype=torch.uint8)
    there = torch.zeros(4, 8, dtype=torch.uint8).npu()
    given = [rows_of(torch, host, [1]), rows_of(torch, there, [2]), torch.tensor([8]).npu()]
    count, side = torch.tensor([1]).npu(), torch.npu.Stream()
    torch.npu.synchronize()
    with kvcore.emulator.expected() as found:
        offload.sparse_copy(*given, count)
        if orders:
            side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            there[:2].fill_(1)  # other rows
            there[2:3].fill_(1)
        torch.npu.synchronize()
    assert [one.kind for one in found] == ([] if orders else ["racecheck"])
    if not orders:
        assert "sparse_copy" in found[0].text
        assert found[0].start == there.data_ptr() + 16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"count": [9]}, "count: expected 0 to 2 rows, got 9"),
        ({"lengths": [8, -1]}, "lengths: expected bytes >= 0, got -1"),
        ({"sources": [0, 0]}, r"row 0: expected a source in memory of .*, got 8 bytes at 0x0"),
        ({"targets": [1 << 44, 0]}, r"row 0: expected a target in memory of .* at 0x100000000000"),
        ({"lengths": [1 << 40, 8]}, r"row 0: expected a target in memory of .*, got 1099511627776"),
    ],
)
def test_rows_that_are_wrong(
    torch: Any, offload: ModuleType, change: dict[str, list[int]], words: str
) -> None:
    there = torch.zeros(4, 8, dtype=torch.uint8).npu()
    given = {
        "sources": rows_of(torch, there, [0, 1]), "targets": rows_of(torch, there, [2, 3]),
        "lengths": torch.tensor([8, 8]).npu(), "count": torch.tensor([2]).npu(),
    }  # fmt: skip
    given |= {name: torch.tensor(values).npu() for name, values in change.items()}
    offload.sparse_copy(*given.values())
    with pytest.raises(RuntimeError, match=f"sparse_copy: {words}"):
        torch.npu.synchronize()


def test_rows_that_are_refused(torch: Any, offload: ModuleType) -> None:
    one, two = torch.tensor([1]).npu(), torch.tensor([1, 2]).npu()
    with pytest.raises(RuntimeError, match=r"sparse_copy: targets: expected contiguous \[1\]"):
        offload.sparse_copy(one, two, one, one)
    with pytest.raises(RuntimeError, match="sparse_copy: sources: expected int64 addresses"):
        offload.sparse_copy(one.float(), one, one, one)
    config = offload.OffloadConfig()
    config.world_size = 2
    with pytest.raises(RuntimeError, match="one rank, got rank 0 of 2"):
        offload.initialize(config)
