# SPDX-License-Identifier: Apache-2.0
"""More rules of the C interface, each broken in the backend for the calls that it matters to."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import npu_work
import npu_work_rare as rare
import pytest
from double.direct import Double
from mutating import Break, Patch, instead, put, seen_under, swap, tensor, words, wrap
from npu_fixtures import clean as clean
from npu_work import Work, amiss

from kvcore.npu.call import call, gather, launch, memory, scatter, selection, update
from kvcore.npu.call.tensors import TensorHandles
from kvcore.npu.cann import library, prototypes, search
from npu import MACHINES

#: By name: how the rule is broken, the work that must notice, and the machine.
MUTATIONS: dict[str, tuple[Break, Work, str]] = {}


def mutation(*works: Callable[[], bool], on: str = "A3") -> Callable[[Break], Break]:
    def add(function: Break) -> Break:
        MUTATIONS[function.__name__] = function, works, on
        return function

    return add


# ---------------------------------------------------------------- ABI conventions, 1.1, 1.2, 4


@mutation(rare.plain)
def handles_are_cut_to_32_bits(patch: Patch) -> None:
    line = prototypes.META["aclCreateTensor"]
    patch.setitem(prototypes.META, "aclCreateTensor", line.replace("p ", "u ", 1))


@mutation(rare.plain)
def the_phases_come_from_two_libraries(patch: Patch) -> None:
    def around(original: Any, self: Any, name: str) -> Any:
        if not name.endswith("GetWorkspaceSize"):
            return original(self, name)
        return self.search.open(str(Path(self.runtime.path).with_name("libopapi.so")), 0)

    wrap(patch, library.Cann, "_look", around)


@mutation(rare.plain)
def a_first_aclinit_that_was_another_s_is_an_error(patch: Patch) -> None:
    patch.setattr(library, "ACL_ERROR_REPEAT_INITIALIZE", -1)


@mutation(rare.plain)
def the_path_of_kernels_is_not_set(patch: Patch) -> None:
    patch.delenv("ASCEND_OPP_PATH")
    patch.setattr(search.Search, "opp_path", lambda self, runtime: None)


@mutation(rare.failing_phase_one)
def the_text_is_asked_for_in_another_thread(patch: Patch) -> None:
    def around(original: Any, self: Any) -> str:
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(original(self)))
        thread.start()
        thread.join()
        return found[0]

    wrap(patch, library.Cann, "recent_error", around)


@mutation(rare.failing_phase_one)
def the_text_is_read_behind_another_call(patch: Patch) -> None:
    patch.setitem(prototypes.RUNTIME, "aclGetRecentErrMsg", "p")

    def late(self: Any) -> str:
        address = self.status("aclGetRecentErrMsg")()
        self.device_count()
        return ctypes.string_at(address).decode() if address else ""

    patch.setattr(library.Cann, "recent_error", late)


# ---------------------------------------------------------------- 1.3, 1.4, 5.8: device, memory


@mutation(rare.two_streams)
def every_call_has_a_context_of_its_own(patch: Patch) -> None:
    def around(self: Any, device_id: int) -> None:
        self.aclrtCreateContext(ctypes.byref(ctypes.c_void_p()), device_id)

    patch.setattr(library.Cann, "set_device", around)


@mutation(npu_work.selection)
def nothing_at_all_is_allocated(patch: Patch) -> None:
    patch.setattr(memory, "max", lambda size, _: size, raising=False)


@mutation(rare.no_workspace)
def free_memory_is_asked_of_another_kind(patch: Patch) -> None:
    patch.setattr(memory, "ACL_HBM_MEM", 0)


@mutation(rare.plain)
def nothing_is_freed_first(patch: Patch) -> None:
    instead(patch, "aclrtFree", lambda _, original, address: (original(0), original(address)))


@mutation(rare.growing_in_use)
def what_was_outgrown_is_judged_by_the_older_encoding(patch: Patch) -> None:
    patch.setattr(memory, "ACL_EVENT_RECORDED_STATUS_COMPLETE", 0)


@mutation(rare.growing_in_use)
def what_was_outgrown_is_judged_by_the_older_function(patch: Patch) -> None:
    instead(patch, "aclrtQueryEventStatus", lambda cann, _, *given: cann.aclrtQueryEvent(*given))


# ---------------------------------------------------------------- 5.2, 5.3: executors, workspaces


def running(act: Callable[[Any, int, Callable[..., None]], None]) -> Break:
    """Phase two is ``act(cann, executor, run)``; run(address) goes on."""

    def around(self: Any, words: Any, room: Any, stream: int) -> None:
        size, executor = ctypes.c_uint64(0), ctypes.c_void_p()
        self._phase_one(*words, ctypes.byref(size), ctypes.byref(executor))

        def run(address: int | None = None) -> None:
            workspace = room.take("workspace", size.value) if address is None else address
            self._phase_two(workspace, size.value, executor, stream)

        act(self._cann, executor.value or 0, run)

    return lambda patch: patch.setattr(launch.PreparedCall, "_run", around)


def _and_destroy(cann: Any, executor: int, run: Callable[..., None]) -> None:
    try:
        run()
    except BaseException:
        cann.aclDestroyAclOpExecutor(executor)
        raise


def _repeatably(cann: Any, executor: int, run: Callable[..., None]) -> None:
    cann.aclSetAclOpExecutorRepeatable(executor)
    run()


_HOST = ctypes.create_string_buffer(1 << 20)
_HOST_ADDRESS = -(-ctypes.addressof(_HOST) // 64) * 64

MUTATIONS |= {
    "an executor is left when there is no workspace": (
        running(lambda cann, executor, run: run()),
        (rare.no_workspace,),
        "A3",
    ),
    "an executor is destroyed behind a failing phase two": (
        running(_and_destroy),
        (rare.failing_phase_two,),
        "A3",
    ),
    "an executor with a copy onto itself is made repeatable": (
        running(_repeatably),
        (rare.plain,),
        "A3",
    ),
    "a workspace is host memory": (
        running(lambda cann, executor, run: run(_HOST_ADDRESS)),
        (rare.plain,),
        "A3",
    ),
}


@mutation(rare.plain)
def a_workspace_begins_anywhere(patch: Patch) -> None:
    def around(original: Any, self: Any, purpose: str, nbytes: int) -> Any:
        return int(original(self, purpose, nbytes + 64)) + 32

    wrap(patch, memory.Room, "take", around)


@mutation(rare.two_streams)
def streams_share_a_workspace(patch: Patch) -> None:
    wrap(
        patch, memory, "pool_of", lambda original, cann, device_id, _: original(cann, device_id, 0)
    )


@mutation(npu_work.scatter)
def an_address_has_the_offset_in_it_already(patch: Patch) -> None:
    tensor(
        patch,
        lambda k, dims, steps, at, whole, p: (k, dims, steps, at, whole, p + at * k.itemsize),
    )


@mutation(rare.packed, on="950")
def packed_elements_are_counted_in_bytes(patch: Patch) -> None:
    def change(k: Any, dims: Any, steps: Any, *rest: Any) -> tuple[Any, ...]:
        if k.packed:
            dims = [*dims[:-1], dims[-1] // 2]
        return (k, dims, steps, *rest)

    tensor(patch, change)


@mutation(rare.packed, on="950")
def packed_strides_are_counted_in_bytes(patch: Patch) -> None:
    def change(k: Any, dims: Any, steps: Any, *rest: Any) -> tuple[Any, ...]:
        return (k, dims, [-(-n // 2) for n in steps] if k.packed else steps, *rest)

    tensor(patch, change)


# ---------------------------------------------------------------- 1.10: the order of arguments


def _swapped(kind: Any, work: Callable[[], bool], *pairs: tuple[int, int], on: str = "A3") -> None:
    for i, j in pairs:
        name = f"{kind.__name__}, arguments {i} and {j} change places"
        MUTATIONS[name] = lambda p, i=i, j=j: words(p, kind, swap(i, j)), (work,), on


_swapped(scatter.ScatterCall, rare.plain, (0, 1), (1, 2), (0, 3), (1, 4), (3, 4))
_swapped(scatter.ScatterCall, npu_work.rope, (5, 7), (6, 7))
_swapped(gather.GatherCall, rare.gather_offset, (0, 1), (1, 2), (3, 6), (4, 5))
_swapped(
    selection.SelectionCall, rare.selection_rope, *itertools.pairwise(range(10)), (0, 5), (9, 11)
)
_swapped(update.UpdateCall, npu_work.update, (0, 1), (1, 2))
_swapped(scatter.KeyScatterCall, rare.key_cache_alone, (0, 1), (1, 2), on="950")
_swapped(scatter.KeyScatterCall, rare.key_cache_compressed, (3, 4), (4, 5), (3, 5), on="950")


# ---------------------------------------------------------------- 5.4 to 5.7, 5.10


@mutation(rare.gather_nz)
def a_gather_is_always_norm(patch: Patch) -> None:
    words(patch, gather.GatherCall, put(7, b"Norm"))


@mutation(rare.nhsd)
def heads_first_is_left_out(patch: Patch) -> None:
    words(patch, scatter.ScatterCall, put(9, b"None"))


@mutation(npu_work.nct)
def the_scatter_mode_is_in_lower_case(patch: Patch) -> None:
    words(patch, scatter.ScatterCall, put(9, b"nct"))


@mutation(npu_work.key_only)
def a_scatter_s_value_is_null(patch: Patch) -> None:
    words(patch, scatter.ScatterCall, lambda found: (put(3, None)(found), put(4, None)(found)))


@mutation(rare.nothing)
def empty_calls_are_made(patch: Patch) -> None:
    patch.setattr(scatter.ScatterCall, "is_empty", lambda self: False)


@mutation(rare.what_kernels_do_wrong)
def the_table_is_not_asked(patch: Patch) -> None:
    patch.setattr(call.OperatorCall, "ask_the_table", lambda self: None)


@mutation(rare.caches_strided_within_their_blocks)
def inner_strides_of_caches_are_passed(patch: Patch) -> None:
    the_table_is_not_asked(patch)  # which would refuse them too
    wrap(
        patch,
        call.OperatorCall,
        "settle_strides",
        lambda original, self, free: original(self, free | {"key_cache": 3, "value_cache": 3}),
    )


@mutation(rare.strided, on="950")
def a_950_is_given_the_strides_of_contiguous_arrays(patch: Patch) -> None:
    def change(k: Any, dims: Any, steps: Any, *rest: Any) -> tuple[Any, ...]:
        dense = [1] * len(dims)
        for i in range(len(dims) - 1, 0, -1):
            dense[i - 1] = dense[i] * dims[i]
        return (k, dims, dense, *rest)

    tensor(patch, change)


@mutation(rare.key_cache_alone, on="950")
def a_950_is_given_scenario_6(patch: Patch) -> None:
    patch.setitem(launch.CALLS, "scatter_pa_cache", scatter.ScatterCall)
    patch.setattr(scatter.ScatterCall, "ask_the_table", lambda self: None)


@mutation(rare.selection_rope)
def the_lengths_have_a_row_too_few(patch: Patch) -> None:
    wrap(patch, selection.SelectionCall, "answer_rows", lambda original, self: original(self) - 1)


@mutation(npu_work.selection)
def no_rope_is_a_scalar(patch: Patch) -> None:
    patch.setattr(TensorHandles, "empty", TensorHandles.scalar)


# ---------------------------------------------------------------- the tests


@pytest.mark.parametrize("machine", ["A3", "950"])
def test_nothing_is_amiss_without_a_mutation(clean: Double, machine: str) -> None:
    clean.soc(MACHINES[machine])
    assert amiss(clean, rare.RARE if machine == "A3" else rare.ON_950) == []


@pytest.mark.parametrize("name", MUTATIONS)
def test_it_is_noticed(clean: Double, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    act, works, machine = MUTATIONS[name]
    clean.soc(MACHINES[machine])
    found = seen_under(monkeypatch, act, lambda: amiss(clean, works))
    assert found, f"{name} went unnoticed"


def test_a_process_in_which_nobody_else_starts_cann(
    clean: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean.reset()
    assert amiss(clean, (rare.plain,)) == []
    library.forget()
    clean.reset()
    with monkeypatch.context() as patch:
        instead(patch, "aclInit", lambda *_: 0)
        found = amiss(clean, (rare.plain,))
    assert "before aclInit" in "".join(found)
