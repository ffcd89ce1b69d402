# SPDX-License-Identifier: Apache-2.0
"""Programs with one fault each, and for each its twin that does the same without the fault.

A program is a function of (torch, npu, fault): with ``fault`` it plants it.  The lines that a
report must name carry the comments ``# earlier`` and ``# later``.
"""

from __future__ import annotations

import ctypes
import inspect
import threading
from collections.abc import Callable
from typing import Any

Program = Callable[[Any, Any, bool], None]

PROGRAMS: dict[str, tuple[str, Program]] = {}


def program(kind: str) -> Callable[[Program], Program]:
    """Enter a program under its name, with the kind of its report."""

    def enter(function: Program) -> Program:
        PROGRAMS[function.__name__.replace("_", " ")] = (kind, function)
        return function

    return enter


def marked(function: Program) -> list[int]:
    """Numbers of the lines with the comments, the earlier launch first."""
    lines, start = inspect.getsourcelines(function)
    found = []
    for mark in ("# earlier", "# later"):
        found += [start + i for i, line in enumerate(lines) if line.rstrip().endswith(mark)]
    return found


def side_stream(torch: Any) -> Any:
    """A stream that is not the current one, with nothing queued on either.

    A device has 32 streams: two objects may be one, and the current one is one of them where a
    capture has failed.
    """
    torch.npu.synchronize()
    side = torch.npu.Stream()
    while side == torch.npu.current_stream():
        side = torch.npu.Stream()
    return side


@program("racecheck")
def a_read_beside_a_write(torch: Any, npu: Any, fault: bool) -> None:
    x = torch.ones(256, device="npu")
    side = side_stream(torch)
    x.add_(1)  # earlier
    if not fault:
        side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        x * 2  # later
    torch.npu.synchronize()


@program("racecheck")
def a_write_beside_a_read(torch: Any, npu: Any, fault: bool) -> None:
    x, y = torch.ones(256, device="npu"), torch.zeros(256, device="npu")
    side = side_stream(torch)
    with torch.npu.stream(side):
        torch.mul(x, 2, out=y)  # earlier
        done = torch.npu.Event()
        done.record()
    if not fault:
        torch.npu.current_stream().wait_event(done)
    x.zero_()  # later
    torch.npu.synchronize()


@program("racecheck")
def two_copies_to_one_place(torch: Any, npu: Any, fault: bool) -> None:
    x = torch.zeros(256, device="npu")
    host = [torch.ones(256).pin_memory() for _ in range(2)]
    side = side_stream(torch)
    with torch.npu.stream(side):
        x.copy_(host[0], non_blocking=True)  # earlier
    if not fault:
        torch.npu.current_stream().wait_stream(side)
    x.copy_(host[1], non_blocking=True)  # later
    torch.npu.synchronize()


@program("racecheck")
def the_host_reads_before_the_copy_is_done(torch: Any, npu: Any, fault: bool) -> None:
    x = torch.ones(256, device="npu")
    host = torch.zeros(256).pin_memory()
    side_stream(torch)
    host.copy_(x, non_blocking=True)  # earlier
    if not fault:
        torch.npu.current_stream().synchronize()
    host.sum()  # later
    torch.npu.synchronize()


@program("racecheck")
def the_host_writes_a_source_too_soon(torch: Any, npu: Any, fault: bool) -> None:
    x = torch.zeros(256, device="npu")
    host = torch.ones(256).pin_memory()
    side_stream(torch)
    x.copy_(host, non_blocking=True)  # earlier
    done = torch.npu.Event()
    done.record()
    if not fault:
        done.synchronize()
    host[3:5].fill_(2)  # later
    torch.npu.synchronize()


@program("racecheck")
def a_copy_to_the_host_waits_for_one_stream(torch: Any, npu: Any, fault: bool) -> None:
    x = torch.zeros(256, device="npu")
    side = side_stream(torch)
    with torch.npu.stream(side):
        x.add_(1)  # earlier
    if not fault:
        side.synchronize()
    x.cpu()  # later
    torch.npu.synchronize()


@program("racecheck")
def memory_that_is_handed_on(torch: Any, npu: Any, fault: bool) -> None:
    torch.npu.empty_cache()
    side = side_stream(torch)
    x = torch.ones(1 << 20, device="npu")
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        x.sum()  # earlier
    if not fault:
        x.record_stream(side)
    del x
    y = torch.empty(1 << 20, device="npu")
    y.fill_(3)  # later
    torch.npu.synchronize()


@program("racecheck")
def an_event_that_is_recorded_too_early(torch: Any, npu: Any, fault: bool) -> None:
    x = torch.ones(256, device="npu")
    side = side_stream(torch)
    done = torch.npu.Event()
    if fault:
        done.record()
    x.add_(1)  # earlier
    if not fault:
        done.record()
    side.wait_event(done)
    with torch.npu.stream(side):
        x * 2  # later
    torch.npu.synchronize()


@program("racecheck")
def a_query_that_is_asked_too_early(torch: Any, npu: Any, fault: bool) -> None:
    x = torch.ones(256, device="npu")
    side = side_stream(torch)
    done = torch.npu.Event()
    done.record()
    while fault and not done.query():
        pass
    x.add_(1)  # earlier
    if not fault:
        done.record()
    while not fault and not done.query():
        pass
    with torch.npu.stream(side):
        x * 2  # later
    torch.npu.synchronize()


@program("racecheck")
def blocks_of_a_cache(torch: Any, npu: Any, fault: bool) -> None:
    """One stream fills a block of a cache, another reads a block: the same or not."""
    cache = torch.zeros(8, 16, 32, device="npu")
    slots = torch.tensor([2, 3], device="npu")
    blocks = torch.tensor([3 if fault else 5, 6], device="npu")
    rows = torch.ones(2, 16, 32, device="npu")
    side = side_stream(torch)
    cache.index_copy_(0, slots, rows)  # earlier
    with torch.npu.stream(side):
        cache.index_select(0, blocks)  # later
    torch.npu.synchronize()


@program("racecheck")
def slots_of_a_cache(torch: Any, npu: Any, fault: bool) -> None:
    """The vendor's operators: what is written and gathered is known when they run."""
    key, value = (torch.ones(2, 2, 16, dtype=torch.float16, device="npu") for _ in range(2))
    keys, values = (torch.zeros(4, 16, 2, 16, dtype=torch.float16, device="npu") for _ in range(2))
    slots = torch.tensor([17, 20], dtype=torch.int32, device="npu")
    table = torch.tensor([[1 if fault else 2]], dtype=torch.int32, device="npu")
    lengths = torch.tensor([16], dtype=torch.int32, device="npu")
    outs = [torch.zeros(16, 2, 16, dtype=torch.float16, device="npu") for _ in range(2)]
    side = side_stream(torch)
    npu.npu_scatter_pa_kv_cache(key, value, keys, values, slots, cache_mode="Norm")  # earlier
    with torch.npu.stream(side):
        npu.npu_gather_pa_kv_cache(keys, values, table, lengths, *outs)  # later
    torch.npu.synchronize()


@program("racecheck")
def columns_of_a_tensor(torch: Any, npu: Any, fault: bool) -> None:
    x = torch.zeros(8, 8, device="npu")
    side = side_stream(torch)
    x[:, :4].add_(1)  # earlier
    with torch.npu.stream(side):
        x[:, 3 if fault else 4 :].add_(1)  # later
    torch.npu.synchronize()


@program("racecheck")
def a_copy_of_columns(torch: Any, npu: Any, fault: bool) -> None:
    x, y = torch.zeros(8, 8, device="npu"), torch.ones(8, 4, device="npu")
    side = side_stream(torch)
    x[:, :4].copy_(y)  # earlier
    with torch.npu.stream(side):
        x[:, 3 if fault else 4 :].mul_(2)  # later
    torch.npu.synchronize()


@program("racecheck")
def two_threads(torch: Any, npu: Any, fault: bool) -> None:
    x = torch.zeros(256, device="npu")
    streams = [side_stream(torch) for _ in range(2)]
    done = torch.npu.Event()

    def first() -> None:
        with torch.npu.stream(streams[0]):
            x.add_(1)  # earlier
            done.record()

    def second() -> None:
        with torch.npu.stream(streams[1]):
            if not fault:
                done.wait()
            x.mul_(2)  # later

    for work in (first, second):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    torch.npu.synchronize()


@program("racecheck")
def a_replay_on_another_stream(torch: Any, npu: Any, fault: bool) -> None:
    x = torch.zeros(256, device="npu")
    side = side_stream(torch)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        x.add_(1)  # later
    x.fill_(2)  # earlier
    if not fault:
        side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        graph.replay()
    torch.npu.synchronize()


@program("racecheck")
def two_branches_of_a_graph(torch: Any, npu: Any, fault: bool) -> None:
    x, y, z = (torch.zeros(256, device="npu") for _ in range(3))
    side = side_stream(torch)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        main = torch.npu.current_stream()
        while side == main:  # the capture's own
            side = torch.npu.Stream()
        side.wait_stream(main)
        x.add_(1)  # earlier
        if not fault:
            side.wait_stream(main)
        with torch.npu.stream(side):
            torch.mul(x, 2, out=y)  # later
        z.add_(1)
        main.wait_stream(side)
    graph.replay()
    torch.npu.synchronize()


@program("racecheck")
def a_host_function(torch: Any, npu: Any, fault: bool) -> None:
    """It writes pinned memory on one stream that a copy on another reads."""
    x = torch.zeros(256, device="npu")
    host = torch.zeros(256).pin_memory()
    side = side_stream(torch)

    def write(_: Any) -> None:
        host.fill_(7)

    npu.npu._subscribe_report(side)
    npu.npu._launch_host_func(side, write, None)  # earlier
    if not fault:
        torch.npu.current_stream().wait_stream(side)
    x.copy_(host, non_blocking=True)  # later
    torch.npu.synchronize()
    npu.npu._unsubscribe_report(side)


@program("racecheck")
def a_gradient_on_another_stream(torch: Any, npu: Any, fault: bool) -> None:
    """The backward runs in a thread of autograd's, on the stream of the forward."""
    weight = torch.ones(16, 16, device="npu", requires_grad=True)
    x = torch.ones(4, 16, device="npu")
    side = side_stream(torch)
    loss = (x @ weight).sum()
    loss.backward()
    grad = weight.grad
    if not fault:
        side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        grad.mul_(2)  # later
    torch.npu.synchronize()


def acl() -> Any:
    """The runtime's interface, as a client beside torch_npu calls it."""
    return ctypes.CDLL("libascendcl.so")


@program("memcheck")
def freed_while_a_task_needs_it(torch: Any, npu: Any, fault: bool) -> None:
    address = ctypes.c_void_p()
    x = torch.ones(256, device="npu")
    torch.npu.synchronize()
    assert acl().aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(1024), 0) == 0
    stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
    size, kind = ctypes.c_size_t(1024), 3
    source = ctypes.c_void_p(x.data_ptr())
    assert acl().aclrtMemcpyAsync(address, size, source, size, kind, stream) == 0
    if not fault:
        torch.npu.synchronize()
    assert acl().aclrtFree(address) == 0
    try:
        torch.npu.synchronize()
    except RuntimeError:  # the task finds its memory gone
        assert fault


@program("memcheck")
def used_after_it_was_freed(torch: Any, npu: Any, fault: bool) -> None:
    address = ctypes.c_void_p()
    torch.npu.synchronize()
    assert acl().aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(1024), 0) == 0
    if fault:
        assert acl().aclrtFree(address) == 0
    code = acl().aclrtMemset(address, ctypes.c_size_t(1024), 0, ctypes.c_size_t(1024))
    assert (code != 0) == fault
    if not fault:
        assert acl().aclrtFree(address) == 0


@program("memcheck")
def past_the_end_of_an_allocation(torch: Any, npu: Any, fault: bool) -> None:
    address = ctypes.c_void_p()
    torch.npu.synchronize()
    assert acl().aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(1024), 0) == 0
    size = ctypes.c_size_t(1025 if fault else 1024)
    code = acl().aclrtMemset(address, size, 0, size)
    assert (code != 0) == fault
    assert acl().aclrtFree(address) == 0


@program("synccheck")
def a_wait_inside_a_capture(torch: Any, npu: Any, fault: bool) -> None:
    x = torch.ones(4, device="npu")
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    try:
        with torch.npu.graph(graph):
            x.add_(1)
            if fault:
                torch.npu.synchronize()  # later
    except RuntimeError:
        assert fault
    torch.npu.synchronize()


@program("synccheck")
def waiting_for_an_event_that_was_never_recorded(torch: Any, npu: Any, fault: bool) -> None:
    done = torch.npu.Event()
    if not fault:
        done.record()
    side_stream(torch).wait_event(done)  # later
    torch.npu.synchronize()


@program("synccheck")
def a_replay_that_waits_for_what_comes_behind_it(torch: Any, npu: Any, fault: bool) -> None:
    x, event = torch.zeros(4, device="npu"), torch.npu.ExternalEvent()
    side = side_stream(torch)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        stream = torch.npu.current_stream()
        event.wait(stream)
        event.reset(stream)
        x.add_(1)
    with torch.npu.stream(side):
        if not fault:
            event.record(side)
        graph.replay()
        if fault:
            event.record(side)
    try:
        torch.npu.synchronize()
    except RuntimeError:  # the wait was given up
        assert fault
    assert x.cpu().tolist() == [0.0 if fault else 1.0] * 4
