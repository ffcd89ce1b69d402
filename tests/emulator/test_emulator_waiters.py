# SPDX-License-Identifier: Apache-2.0
"""Who waits for a stream runs its tasks, where torch's state of that thread is a new thread's."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvcore.emulator import machine

TICK = 3_600_000_000_000


@pytest.fixture
def run_by_waiters(npu: Any, torch: Any) -> Iterator[Callable[[], int]]:
    """How many tasks waiting threads have run since the last call; streams begin nothing."""
    core = machine.load().core
    counter = ctypes.c_uint64.in_dll(core, "kvdouble_num_helped")
    torch.npu.synchronize()
    core.kvdouble_patience(ctypes.c_uint64(TICK))
    before = counter.value

    def since() -> int:
        nonlocal before
        number, before = counter.value - before, counter.value
        return number

    yield since
    core.kvdouble_patience(ctypes.c_uint64(machine.PATIENCE_NS))
    torch.npu.synchronize()


WAITS: dict[str, Callable[[Any, Any], None]] = {
    "device": lambda torch, event: torch.npu.synchronize(),
    "stream": lambda torch, event: torch.npu.current_stream().synchronize(),
    "event": lambda torch, event: event.synchronize(),
}


def plain(torch: Any) -> Any:
    """This thread without the mode by which calls are checked."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


@pytest.mark.parametrize("wait", WAITS)
def test_a_waiting_thread_runs_what_it_waits_for(
    run_by_waiters: Callable[[], int], torch: Any, wait: str
) -> None:
    with plain(torch):
        event = torch.npu.Event()
        x = torch.zeros(8, device="npu")
        torch.npu.synchronize()
        run_by_waiters()
        for _ in range(3):
            x.add_(1)
        event.record()
        WAITS[wait](torch, event)
        assert run_by_waiters() >= 3
        assert x.cpu().tolist() == [3.0] * 8


def test_in_other_states_the_stream_s_thread_runs_it(
    run_by_waiters: Callable[[], int], torch: Any
) -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Functions(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            seen.append(args)
            return func(*args, **(kwargs or {}))

    class Dispatch(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            seen.append(args)
            return func(*args, **(kwargs or {}))

    x = torch.zeros(8, device="npu")
    torch.npu.synchronize()
    for state in (Functions(), Dispatch(), torch.inference_mode(), torch.autocast("cpu")):
        with plain(torch):
            x.add_(1)
            run_by_waiters()
            with state:
                torch.npu.synchronize()
            assert run_by_waiters() == 0, state
    assert x.cpu().tolist() == [4.0] * 8
    assert not any(isinstance(a, torch.Tensor) and a.is_cpu for args in seen for a in args)


def test_references_and_host_functions_run_on_the_stream_s_thread(
    run_by_waiters: Callable[[], int], npu: Any, torch: Any
) -> None:
    x = torch.randn(2, 8).npu()
    with plain(torch):
        torch.npu.synchronize()
        run_by_waiters()
        npu.npu_swiglu(x)
        torch.npu.synchronize()
        assert run_by_waiters() == 0


def test_a_fault_is_raised_by_the_wait_that_ran_it(
    run_by_waiters: Callable[[], int], torch: Any
) -> None:
    x, far = torch.zeros(8, device="npu"), torch.tensor([99]).npu()
    with plain(torch):
        torch.index_select(x, 0, far)
        with pytest.raises(RuntimeError, match="index_select"):
            torch.npu.synchronize()
        x.add_(1)
        assert x.cpu().tolist() == [1.0] * 8


def test_threads_that_wait_for_one_stream(run_by_waiters: Callable[[], int], torch: Any) -> None:
    x = torch.zeros(8, device="npu")
    threads = [threading.Thread(target=torch.npu.synchronize) for _ in range(4)]
    with plain(torch):
        for _ in range(200):
            x.add_(1)
        for thread in threads:
            thread.start()
        torch.npu.synchronize()
    for thread in threads:
        thread.join()
    assert x.cpu().tolist() == [200.0] * 8
