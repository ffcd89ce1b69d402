# SPDX-License-Identifier: Apache-2.0
"""What the parts of one NPU's driver need of each other, so that none imports another's maker.

``AclDriver`` and ``AclLane`` are these; records, transfers, host functions, graphs and the watch
see no more of them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kvcore.errors import KVCoreError
    from kvcore.npu.driver.handles import Handles
    from kvcore.npu.driver.turns import Turns
    from kvcore.runtime.core import Core
    from kvcore.runtime.queues._marks import Failure
    from kvcore.runtime.queues._queue import Queue

__all__ = ["Flying", "Hardware", "OnHardware"]


class Hardware(Protocol):
    """One NPU; see ``AclDriver`` for what each of these is."""

    core: Core
    cann: Any
    device_id: int
    handles: Handles
    rings: Handles
    events: Any
    models: Any
    turns: Turns
    batches: bool
    held: set[Any]
    doomed: set[Any]
    failed: bool
    complaints: list[KVCoreError]
    buffers: Any

    def direct_stream(self) -> int:
        """The handle for an operator that is called, not launched."""

    def bind(self) -> AbstractContextManager[None]:
        """Give this thread the device for the block."""

    def scratch(self, space: str, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory of an operation under way: it goes with its last array."""


class Flying(Protocol):
    """What a lane's hardware was given; see ``Flight``."""

    losses: int

    def using(self, losses: int) -> AbstractContextManager[int]:
        """The stream's handle for the block; 0 when there was a failure since."""

    def took(self, item: object, losses: int | None = None) -> bool:
        """Remember what the hardware has; False when there was a failure since."""

    def ran(self, call: object) -> None:
        """A host function is over."""

    def loss_since(self, losses: int) -> Failure | None:
        """The last failure of the hardware, if there was one since."""

    def ends_with(self, record: Any) -> bool:
        """Whether the record is the last thing that the hardware was given."""

    def records_until(self, last: Any) -> list[Any]:
        """The records in flight up to this one; it alone when it is not."""

    def waited_for(self, record: Any = None) -> list[Any]:
        """The records of other lanes that come before a record of this one."""


class OnHardware(Protocol):
    """One stream of an NPU; see ``AclLane``."""

    queue: Queue

    @property
    def npu(self) -> Hardware:
        """The driver of the NPU that the lane is of."""

    @property
    def flight(self) -> Flying:
        """What its hardware was given."""

    @property
    def name(self) -> str:
        """The stream's name."""

    @property
    def is_quiet(self) -> bool:
        """True when the hardware has nothing that is not known to be done."""

    def passed(self, record: Any) -> None:
        """The hardware is past a record: everything before it is done."""

    def synchronize_briefly(self) -> None:
        """Have CANN report a failure, if there is one.  Raises KVCoreError."""

    def look_around(self) -> None:
        """Ask how far the hardware is, when it has been given much."""

    def look_for_failure(self, seen: set[Any], *, polling: bool = False) -> None:
        """Find out whether this lane, or one that it waits for, has failed."""

    def lose(
        self, cause: BaseException, failure: Failure | None = None, losses: int | None = None
    ) -> None:
        """The hardware has failed here."""

    def give_up(self, failure: Failure) -> None:
        """Count what is in flight as not done."""
