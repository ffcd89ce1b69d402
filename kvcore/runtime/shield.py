# SPDX-License-Identifier: Apache-2.0
"""Waiting that no cancel cuts short.

Memory, a place in a ring or a thread may be given back only when the last operation that uses it
is over, so some waits must last until then whatever comes.  anyio's shielded scopes hold back the
cancels of anyio's and trio's scopes only.  asyncio's own ``Task.cancel`` (``asyncio.timeout``,
``wait_for``, a sibling that failed in an ``asyncio.TaskGroup``, the first Ctrl-C, the end of
``asyncio.run``) knows nothing of scopes: it raises CancelledError at the await inside them.  A
`Shield` keeps that exception, waits again, and raises it when its block ends.

The exception that is raised is the very one that came, and ``Task.uncancel`` is never called: the
task's count of requests stays what the cancels made it, by which ``asyncio.timeout`` and
``asyncio.TaskGroup`` know their own cancel from another's.

Two things do end the wait at once, and then the operations may still run: a KeyboardInterrupt or
SystemExit that is raised inside it (on asyncio that is the second Ctrl-C at the earliest), and
GeneratorExit, which is raised in a coroutine that will not be resumed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType

import anyio

__all__ = ["Shield", "can_await"]


def can_await() -> bool:
    """False where no event loop runs: in a coroutine that is collected after its loop."""
    try:
        anyio.get_cancelled_exc_class()
    except RuntimeError:
        return False
    return True


class Shield:
    """Awaits to the end what is given to it: ``with Shield() as shield: await shield(wait)``.

    Leaving the block raises the first cancel that was held back, also in the place of an
    ordinary exception, which is then its ``__context__``.
    """

    def __init__(self) -> None:
        self._held: BaseException | None = None

    async def __call__(self, wait: Callable[[], Awaitable[None]]) -> None:
        """Await wait(), again after each cancel, until it returns or raises something else.

        wait: may be called several times; after a cancel it goes on from where things are then.
        """
        cancelled = anyio.get_cancelled_exc_class()
        done = False
        while not done:
            ended: BaseException | None = None
            try:
                with anyio.CancelScope(shield=True):
                    try:
                        await wait()
                        done = True
                    except cancelled as error:
                        self._held = self._held or error
                    except Exception:
                        raise
                    except BaseException as error:
                        ended = error
                        raise
            except RuntimeError:
                # A scope cannot be left once its loop is gone, and says so in the error's place.
                if ended is None:
                    raise
                raise ended from None

    def __enter__(self) -> Shield:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        held, self._held = self._held, None
        # (another cancel, Ctrl-C and GeneratorExit take precedence)
        if held is not None and (kind is None or issubclass(kind, Exception)):
            raise held
