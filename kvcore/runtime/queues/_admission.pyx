# SPDX-License-Identifier: Apache-2.0
"""Who may touch what: the look at a plan's memory before it is queued.

On a device with a profile a kernel reaches device and swapped memory of that device only; without
one it reaches any array.  What plans of a type declare of their memory is found out once, for the
type.
"""

cimport cython

from kvcore.runtime._storage cimport BufferCore, Storage

from kvcore.errors import ParamInvalidError


@cython.final
cdef class Admission:
    """The memory rules of one device.

    key:      what the device's own storages carry.
    modelled: whether the device has a profile.
    refuse:   called with (argument, owner) of memory that a kernel must not touch; raises.
    """

    def __init__(self, object key, bint modelled):
        self.key = key
        self.modelled = modelled
        self.types = {}

    cdef int learn(self, object plan) except -1:
        """What plans of this type declare: 0 is nothing, 1 is accesses, 2 is `arrays` too."""
        cdef int declared = 0
        kind = type(plan)
        if kind is type or not callable(getattr(plan, "run", None)):
            raise ParamInvalidError(
                f"plan: expected an object with run(), got {kind.__name__}",
                argument="plan", seen=kind.__name__, expected="a plan",
            )
        if hasattr(plan, "reads") and hasattr(plan, "writes"):
            declared = 2 if isinstance(getattr(plan, "arrays", None), tuple) else 1
        self.types[kind] = declared
        return declared

    cdef int admit(self, object plan) except -1:
        """Raise when the plan touches memory that it must not."""
        cdef object found = self.types.get(type(plan))
        cdef int declared = self.learn(plan) if found is None else found
        if declared == 2:
            # Accesses may be dear to make; only the owners matter here.
            for owner in plan.arrays:
                if owner is not None and not self.reachable(owner):
                    break
            else:
                return 0
        if declared:
            self.admit_all(plan.reads)
            self.admit_all(plan.writes)
        return 0

    cdef bint reachable(self, object owner) noexcept:
        cdef Storage storage
        if isinstance(owner, BufferCore):
            storage = (<BufferCore>owner).storage
            return (not storage.freed and storage.owner is self.key
                    and not (self.modelled and storage.space == "host"))
        return not self.modelled

    cdef int admit_all(self, object accesses) except -1:
        try:
            for access in accesses:
                if not self.reachable(access.owner):
                    self.refuse(access.argument, access.owner)
        except (TypeError, AttributeError) as error:
            raise ParamInvalidError(
                "plan: expected reads and writes that are sequences of accesses (argument, owner, "
                f"ranges), got {error}",
                argument="plan", expected="sequences of accesses",
            ) from error
        return 0

    def check(self, plan):
        """Raise when the accesses of a plan are of memory that a kernel must not touch."""
        self.admit_all(plan.reads)
        self.admit_all(plan.writes)
