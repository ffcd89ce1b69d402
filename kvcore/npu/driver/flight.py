# SPDX-License-Identifier: Apache-2.0
"""What one lane's hardware stream was given and is not known to have done, and how that ends.

Three ways: a later record is known to have passed (``passed``); a host function says itself that
it is over (``ran``); or the hardware has failed, and all of it counts as not done (``cut``).  The
stream's handle ends with a failure too: it is parted with when the flight is cut, destroyed once
the last call that uses it has returned, and made anew when it is next asked for.

Many threads meet here: workers that hand over, hosts that look, the watch, threads of the driver
that run host functions.  One lock guards everything, and is never held during a call of ACL.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kvcore.npu.driver.records import Dependency, HardwareRecord

if TYPE_CHECKING:
    from kvcore.npu.driver.handles import Handles
    from kvcore.runtime.queues._marks import Failure

__all__ = ["Flight"]


class Flight:
    """The items in flight on one lane, oldest first, and the handle they went by.

    losses: failures of the hardware so far.  What was launched before one may not be handed over
            behind it, and a worker can be about to while another thread finds out; so the
            thread that hands over says how many there were when it was launched.
    lock:   guards everything here, and what a lane says of failures with it.
    """

    def __init__(self, handles: Handles) -> None:
        self._handles = handles
        self._items: deque[Any] = deque()
        self.lock: threading.Lock = threading.Lock()
        self._handle = handles.make()
        self.losses: int = 0
        self._last_loss: Failure | None = None
        #: Calls that use the handle now; a lost one is destroyed behind the last of them.
        self._users = 0
        self._doomed: list[int] = []

    def __len__(self) -> int:
        return len(self._items)

    # -- the handle

    @property
    def has_handle(self) -> bool:
        """False from a failure until the stream is used again."""
        return bool(self._handle)

    @property
    def handle(self) -> int:
        """The aclrtStream; a new one after a failure."""
        if not self._handle:
            self._handle = self._handles.make()
        return self._handle

    @contextlib.contextmanager
    def using(self, losses: int) -> Iterator[int]:
        """The handle, kept until the block ends; 0 when there was a failure since ``losses``."""
        handle = 0
        while not handle and self.losses == losses:
            made = self.handle
            with self.lock:
                if self.losses == losses and self._handle == made:
                    handle = made
                    self._users += 1
        try:
            yield handle
        finally:
            if handle:
                with self.lock:
                    self._users -= 1
                    doomed: list[int] = []
                    if not self._users:
                        doomed, self._doomed = self._doomed, doomed
                for lost in doomed:
                    self._handles.discard(lost)

    # -- handing over

    def took(self, item: object, losses: int | None = None) -> bool:
        """Remember what the hardware has; False when there was a failure since ``losses``."""
        with self.lock:
            if losses is not None and self.losses != losses:
                return False
            self._items.append(item)
            if isinstance(item, HardwareRecord):
                item.in_flight = True
            return True

    # -- the end of items

    def ran(self, call: object) -> None:
        """A host function is over: with nothing before it, that is all there is to know."""
        with self.lock:
            if self._items and self._items[0] is call:
                self._items.popleft()

    def passed(self, record: HardwareRecord) -> None:
        """The hardware is past a record: everything before it is done."""
        gone = []
        with self.lock:
            while record.in_flight and self._items:
                item = self._items.popleft()
                gone.append(item)
                if isinstance(item, HardwareRecord):
                    item.in_flight = False
        for item in gone:
            if isinstance(item, HardwareRecord):
                item.resolve()
        record.resolve()

    def cut(
        self,
        failure: Failure,
        losses: int | None = None,
        *,
        tell: Callable[[Failure], object] | None = None,
    ) -> list[Any] | None:
        """Part with the handle and with what is in flight, which is returned.

        losses: how many failures there had been when this one was met; if there are more, another
        thread was faster, this is no other, and None is returned.  tell: called with the failure
        before it counts; from then on what was launched earlier is not handed over, and a mark
        behind it must not be reached.
        """
        with self.lock:
            if losses is not None and self.losses != losses:
                return None
            if tell is not None:
                tell(failure)
            self.losses += 1
            self._last_loss = failure
            items = list(self._items)
            self._items.clear()
            handle, self._handle = self._handle, 0
            for item in items:
                if isinstance(item, HardwareRecord):
                    item.in_flight = False
                    # Before the handle goes: the events of a stream that is aborted are complete,
                    # and a thread that sees one of them must see this too.
                    item.failure = failure
            if handle and self._users:
                self._doomed.append(handle)
                handle = 0
        if handle:
            self._handles.discard(handle)
        return items

    def end(self) -> None:
        """The device is left: nothing is in flight, and the driver destroys the handle."""
        self._items.clear()
        self._handle = 0

    # -- what is in flight

    def loss_since(self, losses: int) -> Failure | None:
        """The last failure of the hardware, if there was one since."""
        with self.lock:
            return None if self.losses == losses else self._last_loss

    def ends_with(self, record: HardwareRecord) -> bool:
        """Whether the record is the last thing that the hardware was given."""
        with self.lock:
            return bool(self._items) and self._items[-1] is record

    def records(self) -> list[HardwareRecord]:
        """The records in flight."""
        with self.lock:
            return [item for item in self._items if isinstance(item, HardwareRecord)]

    def records_until(self, last: HardwareRecord) -> list[HardwareRecord]:
        """The records in flight up to this one; it alone when it is not."""
        found = []
        with self.lock:
            for item in self._items:
                if isinstance(item, HardwareRecord):
                    found.append(item)
                    if item is last:
                        return found
        return [last]

    def waited_for(self, record: HardwareRecord | None = None) -> list[HardwareRecord]:
        """The records of other lanes that the hardware waits for here, before the given record.

        The last one of each lane, which says as much as those before it.
        """
        last: dict[object, HardwareRecord] = {}
        with self.lock:
            for item in self._items:
                if isinstance(item, Dependency):
                    last[item.record.lane] = item.record
                elif item is record:
                    break
            else:
                if record is not None:
                    return []  # the hardware is past it
        return list(last.values())

    def operations(self) -> list[Any]:
        """What is in flight but records and waits."""
        with self.lock:
            items = list(self._items)
        return [item for item in items if not isinstance(item, HardwareRecord | Dependency)]
