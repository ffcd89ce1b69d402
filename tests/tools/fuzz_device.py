# SPDX-License-Identifier: Apache-2.0
"""The runtime on an NPU with random faults: nothing lost, no endless wait, results that are right.

    python tests/tools/fuzz_device.py 100000 [seed]

An episode is a device with streams, buffers of all spaces, events, graphs, and 150 operations in an
order that the seed decides, by one thread or two.  Any call of CANN and any task fails with a
probability that the episode draws.  ``fuzz_model`` says what every row may hold then: the one right
value where waiting said that all was well, and one of those written so far where it raised.
"""

from __future__ import annotations

import faulthandler
import gc
import random
import sys
import threading
from collections import Counter
from pathlib import Path

import anyio
import anyio.lowlevel

sys.path.insert(0, str(Path(__file__).parents[1] / "npu"))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from double.direct import Double
from fuzz_npu import main
from fuzz_program import PATIENCE_S, Program

import kvcore
from kvcore.errors import KVCoreError
from kvcore.npu.call import launch

#: Operations of an episode.
LENGTH = 150
#: Faults in a million calls or tasks.
RATES = (0, 300, 3_000, 20_000, 100_000)
#: A fault met a fork's join after another had ended the capture: it can only be ended.
UNAVOIDABLE = ("[1.8] aclmdlRICaptureEnd: a forked stream was not joined (107025)",)


class Left(Exception):
    """A program that leaves its device in the middle."""


def _faults(double: Double, draw: random.Random, seed: int, rate: int) -> None:
    double.runtime.kvdouble_poison(draw.random() < 0.2)
    double.runtime.kvdouble_eager(draw.random() < 0.3)
    double.runtime.kvdouble_fail_at_random(seed, rate)
    if rate and draw.random() < 0.3:
        double.fail("aclrtSetDevice", draw.randint(1, 400), 107002)


async def _episode(double: Double, seed: int, length: int) -> Counter[str]:
    draw = random.Random(seed)
    rate = draw.choice(RATES)
    two = draw.random() < 0.3
    early, leaves = draw.random() < 0.1, draw.choice(["", "", "error", "cancel"])
    errors: list[BaseException] = []
    programs: list[Program] = []
    thread: threading.Thread | None = None

    def beside(program: Program) -> None:
        try:
            program.run_blocking(length // 2)
            program.check_all()
        except BaseException as error:
            errors.append(error)

    ends: Counter[str] = Counter()
    if early:
        _faults(double, draw, seed, rate)
    try:
        with anyio.CancelScope() as scope:
            async with kvcore.Device(backend="aclnn", workers=draw.choice([1, 2, 4])) as dev:
                try:
                    programs.append(Program(dev, double, 2 * seed, alone=not two))
                    if two:
                        programs.append(Program(dev, double, 2 * seed + 1, alone=False))
                    if not early:
                        _faults(double, draw, seed, rate)
                    if two:
                        thread = threading.Thread(target=beside, args=(programs[1],))
                        thread.start()
                    await programs[0].run(length // (1 + two))
                finally:
                    if thread is not None:
                        await anyio.to_thread.run_sync(thread.join, abandon_on_cancel=False)
                if leaves == "error":
                    raise Left
                if leaves == "cancel":
                    scope.cancel()
                    await anyio.lowlevel.checkpoint()
                programs[0].check_all()
    except KVCoreError as error:
        ends[type(error).__name__] += 1
        if not rate and not any(program.ends for program in programs):
            raise AssertionError("a failure without a fault") from error
    except Left:
        pass
    for program in programs:
        ends += program.ends
        ends["rows right"] += program.world.checked
    if errors:
        raise errors[0]
    if not rate:
        # While one thread captures, the other's allocations and replays are refused.
        expected = {"StreamError", "rows right"} | ({"CaptureError"} if two else set())
        assert ends.keys() <= expected, ends
    return ends


def fuzz(double: Double, count: int, seed: int) -> dict[str, int]:
    """Make ``count`` operations; AssertionError when something is wrong.

    Returns how many rows were looked at, and how many errors of which type there were.
    """
    ends: Counter[str] = Counter()
    strange: list[str] = []
    gc.collect()
    # What was there before need not be looked at after each episode, nor in whatever runs next.
    gc.freeze()
    hooks = threading.excepthook, sys.unraisablehook
    threading.excepthook = lambda told: strange.append(repr(told.exc_value))
    sys.unraisablehook = lambda told: strange.append(f"{told.exc_value!r} in {told.object!r}")
    try:
        for number in range(-(-count // LENGTH)):
            this = seed * 1_000_003 + number
            backend = ("asyncio", "trio")[number % 2]
            faulthandler.dump_traceback_later(3 * PATIENCE_S, exit=True, file=sys.__stderr__)
            try:
                ends += anyio.run(_timed, double, this, min(LENGTH, count), backend=backend)
                _left(double, strange)
            except BaseException as error:
                error.add_note(f"episode {this} on {backend}")
                raise
    finally:
        faulthandler.cancel_dump_traceback_later()
        threading.excepthook, sys.unraisablehook = hooks
    return dict(ends)


async def _timed(double: Double, seed: int, length: int) -> Counter[str]:
    with anyio.fail_after(PATIENCE_S):
        return await _episode(double, seed, length)


def _left(double: Double, strange: list[str]) -> None:
    """After an episode: no handle, no memory, no thread, no broken rule."""
    double.runtime.kvdouble_fail_never()
    double.runtime.kvdouble_poison(False)
    double.runtime.kvdouble_eager(False)
    for _ in range(3):  # what a finalizer had in its hand goes in the next round
        gc.collect()
    double.start()
    launch.release(None, 0)
    threads = [t.name for t in threading.enumerate() if t.name.startswith("kvcore-")]
    assert not threads
    assert not strange, strange
    broken = [one for one in double.violations() if one not in UNAVOIDABLE]
    assert not broken, broken[:5]
    assert double.live() == 0, double.live_text()


if __name__ == "__main__":
    main(fuzz, "operations")
