# SPDX-License-Identifier: Apache-2.0
"""What the runtime's tests have on a modelled device and an NPU has not, for the test double.

A *kernel* is a function of the test that a driver's thread runs in stream order, whenever its
stream (or a replay) comes to it: a fake plan puts one on the stream it is handed over to, as an
operator's plan puts the vendor's.  *Work that only takes time* is such a kernel that sleeps.
*Seen* device memory is at its address, and the host may follow it.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import fakes
import pytest
from double.direct import Double

import kvcore
from kvcore.npu.call import launch
from kvcore.npu.cann import library
from kvcore.npu.driver.buffers import AclBuffer
from kvcore.runtime.memory import live_array

__all__ = ["STAND_INS", "addresses"]

_bodies: dict[int, Callable[[], object]] = {}
_numbers = itertools.count(1)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _entry(number: int | None) -> None:
    _bodies[number or 0]()


def _kernel(body: Callable[[], object]) -> None:
    target = launch._target.get()
    assert target is not None
    number = next(_numbers)
    _bodies[number] = body
    library.current().aclrtLaunchHostFunc(target.stream, _entry, number)


def _kernels(kind: Any, patch: pytest.MonkeyPatch) -> None:
    _bodies.clear()
    body = kind.run
    patch.setattr(kind, "run", lambda plan: _kernel(partial(body, plan)))


def plans(_: Double, patch: pytest.MonkeyPatch) -> None:
    """Fake plans are operators: what they do is a kernel's to do, replayed or not."""
    _kernels(fakes.FakePlan, patch)
    arrays = property(lambda plan: tuple(a.owner for a in (*plan.reads, *plan.writes)))
    patch.setattr(fakes.FakePlan, "arrays", arrays, raising=False)


def scatters(_: Double, patch: pytest.MonkeyPatch) -> None:
    """Fake scatters are operators; like those, they know of all that they may touch, no rows."""
    _kernels(fakes.Scatter, patch)
    patch.setattr(fakes.Scatter, "touched", lambda plan: (plan.reads, plan.writes))


def times(_: Double, patch: pytest.MonkeyPatch) -> None:
    """``stream.compute`` is a plan that takes the time."""

    original = kvcore.Stream.compute

    def compute(stream: kvcore.Stream, us: Any, name: str = "compute", **accesses: Any) -> None:
        try:
            original(stream, us, name, **accesses)  # which refuses what is no time at all
        except kvcore.BackendUnavailableError:
            pause = partial(threading.Event().wait, us * 1e-6)
            stream.launch(fakes.FakePlan(pause, name=str(name)))

    patch.setattr(kvcore.Stream, "compute", compute)


def calls(_: Double, patch: pytest.MonkeyPatch) -> None:
    """Host functions are plans, which can be captured."""

    def call(stream: kvcore.Stream, fn: Any, *args: object) -> None:
        stream.launch(fakes.FakePlan(partial(fn, *args)))

    patch.setattr(kvcore.Stream, "call", call)


def sight(double: Double, patch: pytest.MonkeyPatch) -> None:
    """``numpy()`` and the like show device memory, which the double has put there."""
    double.runtime.kvdouble_open()
    patch.setattr(AclBuffer, "_refuse_host", lambda buffer: None)
    patch.setattr(AclBuffer, "__array_interface__", kvcore.Buffer.__array_interface__)
    patch.setattr(AclBuffer, "__kvcore_array__", property(live_array))


STAND_INS: dict[str, Callable[[Double, pytest.MonkeyPatch], None]] = {
    use.__name__: use for use in (plans, scatters, times, calls, sight)
}


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake plans take buffers in device memory for what they are: addresses."""

    def array(x: Any) -> Any:
        return live_array(x) if isinstance(x, kvcore.Buffer) else x

    monkeypatch.setattr(fakes, "array", array)
