# SPDX-License-Identifier: Apache-2.0
"""The worker processes of a sweep, and of one run.

Each runs one point at a time and sends its report through a pipe.  A worker that is killed is
reported with the point it ran, and not as a point that failed.  Workers end with the process
that started them, however that ends: each watches it, since a worker in the middle of a point reads
no pipe.  Ctrl-C is the starting process's alone to answer.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection, get_context, parent_process, resource_tracker
from typing import Any, Generic, Protocol, TypeVar

from kvcore.errors import KVCoreError

__all__ = ["Workers"]


class Named(Protocol):
    """What a worker is given."""

    @property
    def name(self) -> str:
        """How messages name the point."""


P = TypeVar("P", bound=Named)
Report = dict[str, Any]


class Workers(Generic[P]):
    """``with Workers(function, count, *shared) as workers:`` processes that run ``function``.

    function: called with a point and ``shared``; a function of a module, which a new process finds
              by its name.
    what:     how errors name the whole.
    """

    def __init__(
        self, function: Callable[..., Report], count: int, *shared: Any, what: str = "sweep"
    ) -> None:
        self._function, self._count, self._shared = function, count, shared
        self._what = what
        self._idle: list[_Worker] = []
        self._busy: dict[_Worker, P] = {}
        # Spawned, not forked: the process may have threads of its own.
        self._context = get_context("spawn")

    def __enter__(self) -> Workers[P]:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        workers = [*self._idle, *self._busy]
        for worker in workers:
            worker.pipe.close()  # an idle one ends
            if kind is not None or worker in self._busy:
                worker.process.terminate()
        for worker in workers:
            worker.process.join()

    @property
    def busy(self) -> int:
        """The number of points that are being run."""
        return len(self._busy)

    @property
    def full(self) -> bool:
        """Whether no further point can be begun now."""
        return len(self._busy) >= self._count

    def begin(self, point: P) -> None:
        """Run that point in a process that has none.  Raises KVCoreError."""
        worker = self._idle.pop() if self._idle else self._started()
        self._busy[worker] = point
        with suppress(OSError):  # it has died: ``finished`` tells
            worker.pipe.send(point)

    def finished(self, seconds: float) -> Iterator[tuple[P, Report]]:
        """Yield the points that have a report now; wait for the first so many seconds at most.

        Raises what a point raised, and KVCoreError for a worker that was ended from outside.
        """
        pipes = {worker.pipe: worker for worker in self._busy}
        for ready in connection.wait(list(pipes), seconds):
            worker = pipes[ready]
            point = self._busy[worker]
            try:
                report, error, trace = worker.pipe.recv()
            except (EOFError, OSError):
                raise self._lost(worker, point) from None
            if error is not None:
                if not isinstance(error, KVCoreError):  # a fault: where it is, is wanted
                    error.add_note(trace)
                raise error
            del self._busy[worker]
            self._idle.append(worker)
            yield point, report

    def _started(self) -> _Worker:
        ours, its = self._context.Pipe()
        process = self._context.Process(
            target=_work, args=(its, self._function, self._shared), daemon=True
        )
        try:
            with _without_sigint():
                process.start()
        except OSError as error:
            ours.close()
            raise KVCoreError(
                f"{self._what}: expected a new process, got {error}",
                argument=self._what,
                seen=str(error),
            ) from error
        finally:
            its.close()
        return _Worker(process, ours)

    def _lost(self, worker: _Worker, point: P) -> KVCoreError:
        worker.process.join()
        code = worker.process.exitcode or 0
        ended = f"exit status {code}"
        with suppress(ValueError):
            ended = signal.Signals(-code).name
        kept = "; reports that were written stay" if self._what == "sweep" else ""
        return KVCoreError(
            f"{self._what}: expected the process of {point.name} to report, got one that ended"
            f" ({ended}){kept}",
            argument=self._what,
            seen=ended,
            expected="a report",
        )


class _Worker:
    def __init__(self, process: Any, pipe: Any) -> None:
        self.process, self.pipe = process, pipe


@contextmanager
def _without_sigint() -> Iterator[None]:
    """A process that is started meanwhile has SIGINT blocked from its first instruction on."""
    resource_tracker.ensure_running()  # starting it later would unblock the signal here
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---------------------------------------------------------------- in the worker
def _work(pipe: Any, function: Callable[..., Report], shared: Sequence[Any]) -> None:
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    while True:
        try:
            point = pipe.recv()
        except (EOFError, OSError):
            return
        answer: tuple[Report | None, Exception | None, str]
        try:
            answer = function(point, *shared), None, ""
        except Exception as error:
            answer = None, error, traceback.format_exc()
        try:
            pipe.send(answer)
        except OSError:
            return
        except Exception as error:  # an exception that cannot be pickled
            pipe.send((None, KVCoreError(f"{point.name}: {error!r}"), answer[2]))


def _end_with_the_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
