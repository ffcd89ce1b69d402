# SPDX-License-Identifier: Apache-2.0
"""How a device is entered, and how all of it ends.

Leaving the block
-----------------
*Normally*: nothing more can be launched; a mark is put behind everything on every stream and
waited for; then the workers end, the buffers are given back and, if something failed or raced
without being reported, that is raised.

*By an exception or a cancel*: what has not started is dropped, so that no wait can last; what
runs is waited for through every cancel (``shield``), because a kernel cannot be called back while
it moves bytes; then as above, but the exception that is under way is the one that goes on.

A cancel while leaving normally turns the one into the other.

*Whatever comes*: where a task leaves and something runs still, a thread sees the device to its
end, and the task only waits for that.  So neither a second Ctrl-C, nor a coroutine that is closed,
nor a loop that is gone with the task in it, leaves workers or memory behind.  A device whose block
is never left at all (the generator around it was dropped after its loop) ends its workers when it
is collected.

A forked child has the parent's objects and none of its threads: every device of the parent is
marked, and whatever the child asks of one is an error.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio.lowlevel

from kvcore.errors import KVCoreError, StreamError
from kvcore.runtime.failures import never_recorded, unseen
from kvcore.runtime.queues._marks import Failure, Mark
from kvcore.runtime.queues._outside import promise, settle
from kvcore.runtime.queues.workers import Workers
from kvcore.runtime.shield import Shield, can_await

if TYPE_CHECKING:
    from kvcore.runtime.core import Core

__all__ = ["Life"]


class Life:
    """The opening and the end of one device; each happens once."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._workers = Workers(core.executor, core.settings.workers)
        self._entered = False
        # Settled when the device is closed; by which thread, and what that raised.
        self._over = promise(None)
        # Taken by the one thread that sees the device to its end in the background.
        self._closing = threading.Lock()
        self._closer: threading.Thread | None = None
        self._end_error: BaseException | None = None
        #: What went wrong when things were given back.
        self._complaints: Sequence[KVCoreError] = ()

    # -- entering

    def begin(self) -> None:
        """Open the driver and start the workers; StreamError for a device entered before."""
        core = self._core
        if self._entered or core.executor.is_forked:
            raise StreamError(
                "device: expected a device that was never entered, got one that was; "
                "make a new one",
                argument="device",
            )
        core.driver.open()
        core.limit_memory()
        self._entered = True
        core.begin_time()
        core.executor.open()
        self._workers.start()

    # -- parts of the end

    def _break_promises(self, *, fail: bool) -> None:
        """Settle the external events that cannot be recorded any more: no stream waits for them."""
        core = self._core
        with core.lock:
            marks = core.promises.take()
        for mark in marks:
            core.break_promise(
                mark, Failure(never_recorded(), "none", "wait_event") if fail else None
            )

    def drop(self) -> None:
        """Drop what has not begun, and what waits for it."""
        # All at once, and only then what may wake a stream that waits.
        gone = [(queue, queue.detach()) for queue in list(self._core.queues)]
        for queue, operations in gone:
            queue.forget(operations)
        self._break_promises(fail=False)
        self._core.executor.wake_one()

    def marks(self) -> list[Mark]:
        """Place a mark behind everything on each stream; returns the marks."""
        return [queue.mark() for queue in list(self._core.queues)]

    def _close(self) -> None:
        """Nothing is queued or running: end the workers and give everything back."""
        self._workers.end()
        self._complaints = self._core.driver.close()
        self._core.release_memory()

    def _end(self, marks: Sequence[Mark] = ()) -> None:
        """Wait for these, then for what runs, and close; holds this thread.

        marks: where all work is done; where it was dropped meanwhile, only what runs is waited for.
        """
        core = self._core
        for mark in marks:
            core.driver.wait_for(mark)
        for mark in self.marks():
            core.driver.wait_for(mark, timed=False)
        self._close()
        core.closed = True
        settle(core.executor, self._over)
        core.waiting.close()

    def _end_in_background(self, marks: Sequence[Mark] = ()) -> None:
        """Do what `_end` does on a thread of its own; on this one when the system gives none."""
        if self._core.closed or self._closer is not None:
            return
        closer = threading.Thread(
            target=self._end_on_thread, args=(marks,), name="kvcore-closer", daemon=True
        )
        try:
            closer.start()
        except (RuntimeError, MemoryError):
            if self._closing.acquire(blocking=False):
                try:
                    self._end(marks)
                except BaseException:
                    self._closing.release()
                    raise

    def _end_on_thread(self, marks: Sequence[Mark]) -> None:
        # Ctrl-C may interrupt the start of a thread that runs nevertheless; then there is a second.
        if not self._closing.acquire(blocking=False):
            return
        self._closer = threading.current_thread()
        try:
            self._end(marks)
        except BaseException as error:
            self._end_error = error
            settle(self._core.executor, self._over)

    def _break_off(self) -> None:
        """The leaving cannot go on here: drop what has not started, and end on a thread."""
        if not self._core.closed:
            self.drop()
            self._end_in_background()

    async def _ended(self) -> None:
        await self._core.waiting.happened(self._over)

    def _raise_unseen(self) -> None:
        """Raise what went wrong and was not reported to any host."""
        core = self._core
        failures = list(core.executor.failures)
        race = None if core.race is None else core.race.error()
        if failures:
            raise unseen(failures, race)
        if race is not None:
            raise race
        if self._complaints:
            first = self._complaints[0]
            error = StreamError(
                f"device: expected to give everything back, got: {first}",
                argument="device",
                seen=str(first),
                code=first.code,
            )
            for other in self._complaints[1:10]:
                error.add_note(str(other))
            raise error from first

    def _may_leave(self) -> bool:
        """False in a forked child and while Python ends: there, nothing of this device runs."""
        executor = self._core.executor
        if executor.is_forked or self._core.abandoned:
            self._core.release_memory()
            return False
        if executor.inside():
            executor.check()  # a host function would wait for itself: an error
        return True

    # -- leaving

    def end(self, kind: type[BaseException] | None) -> None:
        """Leave a plain block; kind: of the exception that is under way."""
        if not self._may_leave():
            return
        try:
            self._core.executor.closing()
            if kind is not None:
                self.drop()
                self._end()
            else:
                self._break_promises(fail=True)
                try:
                    self._end(self.marks())
                except BaseException:
                    self.drop()
                    self._end()
                    raise
        except BaseException:
            self._break_off()
            raise
        if kind is None:
            self._raise_unseen()

    async def end_awaited(self, kind: type[BaseException] | None) -> None:
        """Leave an async block; kind: of the exception that is under way."""
        if not self._may_leave():
            return
        try:
            self._core.executor.closing()
            if kind is None:
                self._break_promises(fail=True)
            else:
                self.drop()
            marks = self.marks()
            if not any(mark.pending for mark in marks):
                self._end(marks if kind is None else ())
                if kind is None:
                    await anyio.lowlevel.checkpoint()
            else:
                self._end_in_background(marks if kind is None else ())
                await self._wait_for_the_end(kind)
        except BaseException:
            self._break_off()
            raise
        if kind is None:
            self._raise_unseen()

    async def _wait_for_the_end(self, kind: type[BaseException] | None) -> None:
        if kind is not None and not can_await():
            return
        try:
            with Shield() as shield:
                if kind is None:
                    try:
                        await self._ended()
                    except GeneratorExit:  # the coroutine is not resumed after this await
                        raise
                    except BaseException:
                        self.drop()
                        await shield(self._ended)
                        raise
                await shield(self._ended)
        finally:
            if self._closer is not None and not self._over.pending:
                self._closer.join()  # it has nothing left to wait for
        if self._end_error is not None:
            raise self._end_error
