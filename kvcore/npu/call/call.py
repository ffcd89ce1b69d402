# SPDX-License-Identifier: Apache-2.0
"""What every operator's call to the NPU has in common, and which strided arrays it may pass.

A kernel may ignore the strides it is handed, and read or write elsewhere without an error.  So a
view is passed only where the kernels are known to honour it; an input that is none of these is
copied to contiguous memory first, a cache or an output is refused.
Source: ops-transformer, op_api and tilings of each operator (read, not run).
"""

from __future__ import annotations

from typing import Any

from kvcore._core.plan import Operator, Plan, Spec
from kvcore._core.portability import Harm
from kvcore.dtypes import DType
from kvcore.errors import fail
from kvcore.npu import options
from kvcore.npu.call.arrays import Argument, is_dense_from
from kvcore.npu.call.memory import Room
from kvcore.npu.call.tensors import TensorHandles
from kvcore.npu.cann.library import Cann
from kvcore.npu.index_arguments import INDEX_ARGUMENTS
from kvcore.soc import SoC

__all__ = ["INDEX_ARGUMENTS", "PLACEHOLDER_BYTES", "OperatorCall", "Placed", "optional", "required"]

#: Device memory for a tensor that stands for an argument that was not given.
PLACEHOLDER_BYTES = 64
#: The arguments of a run, with the copies in place of the arrays that had to be copied.
Placed = list[Argument | None]


class OperatorCall:
    """One operator's call to the NPU; making it raises for arguments that this SoC cannot take.

    It is made once for a Spec, from descriptions of the arguments, and reads the Spec's Case; each
    plan of that Spec takes a copy, with its own arrays (``bound``).

    arguments: in the operator's order.  copied: indices of those that go to contiguous memory.
    spec:      the Spec under this machine's SoC, for arguments that are contiguous where copied.
    harm:      what the machine would do wrong without an error, or None.
    """

    operator: Operator
    params: tuple[Any, ...]

    #: The C function, without GetWorkspaceSize.
    function: str
    #: Arguments that the kernel writes.
    outputs: frozenset[str]
    #: Arguments whose values the call needs on the host in any case.
    host_values: tuple[str, ...] = ()
    #: Whether the operator does its own address arithmetic; see ``counts_itself``.
    counts = False

    def __init__(self, plan: Plan, arguments: list[Argument | None], soc: SoC) -> None:
        # The plan is not kept: it holds this object, and its arrays must be freed with it.
        self.operator, _, self.params, _ = plan.request
        self.case: Any = plan.spec.case
        self.spec: Spec = plan.spec
        self.soc = soc
        self.arguments = arguments
        self.copied: set[int] = set()
        self.harm: str | None = None

    def bound(self, arguments: list[Argument | None]) -> OperatorCall:
        """This call over the arrays of one plan."""
        if self.counts:
            self.check_room(arguments)
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.arguments = arguments
        return made

    def take_for(self, positions: tuple[int, ...], kind: DType) -> None:
        """Give arguments the element type that the operator takes their items for."""
        for i in positions:
            one = self.arguments[i]
            if one is not None:
                self.arguments[i] = one._replace(element=kind)

    def index_of(self, name: str) -> int:
        """Position of an argument among those of the operator, by its name."""
        return self.operator.arguments.index(name)

    def argument(self, name: str) -> Argument:
        """An argument by its name; this call must have it."""
        found = self.arguments[self.index_of(name)]
        assert found is not None
        return found

    def settle_strides(self, free_axes: dict[str, int]) -> None:
        """Say which arguments are passed as views, copied, or refused.

        free_axes: outer axes of an argument whose strides the kernel honours; 0 where not named.
        """
        for i, one in enumerate(self.arguments):
            if one is None:
                continue
            free = free_axes.get(one.name, 0)
            if not one.on_device:
                self.copied.add(i)
            elif self.counts_itself(one):
                continue
            elif not is_dense_from(one, free):
                if one.name in self.outputs or not self.may_copy(one):
                    self._refuse_strides(one, free)
                self.copied.add(i)

    def counts_itself(self, argument: Argument) -> bool:
        """Whether the operator goes by the memory behind an argument, whatever its strides say."""
        return False

    def check_room(self, arguments: list[Argument | None]) -> None:
        """Raise where the memory behind arguments that the operator counts in itself ends early."""

    def may_copy(self, argument: Argument) -> bool:
        """Whether an input may be copied to contiguous memory at each call."""
        return True

    def _refuse_strides(self, one: Argument, free: int) -> None:
        wanted = "a contiguous array"
        if free:
            axes = "axis" if free == 1 else f"{free} axes"
            wanted = f"an array of which only the first {axes} may be strided, by whole elements,"
        seen = f"shape {list(one.shape)}, strides {list(one.strides)} bytes"
        fail(one.name, f"{wanted} on {self.soc.name}", seen)

    def ask_the_table(self) -> None:
        """Raise for what the SoC's table refuses; note what the machine would do wrong."""
        infos: list[Any] = []
        same = True
        for i, (one, known) in enumerate(zip(self.arguments, self.case.infos, strict=True)):
            if one is not None and i in self.copied:
                same &= one.strides == one.dense
                one = one._replace(strides=one.dense)
            same &= (one is None) == (known is None)
            infos.append(one)
        if not same:
            self.spec = self.operator.spec_for(tuple(infos), self.params, self.soc)
        elif self.spec.soc is not self.soc:
            # The operator's own rules were checked with the Case.
            self.spec = self.operator.spec_of(self.case, self.soc)
        self.harm = next((text for text in self.spec.warnings if isinstance(text, Harm)), None)

    def refuse_harm(self) -> None:
        """Raise for what the machine would do wrong, unless the options let it pass."""
        if self.harm is not None and options.quirks() == "refuse":
            expected = f"a call that the kernels of {self.soc.name} do right"
            seen = self.harm
            fail("backend", expected + " (or options.use_options(quirks='pass'))", seen)

    def is_empty(self) -> bool:
        """Whether there is nothing to do; CANN's documents exclude empty tensors."""
        raise NotImplementedError

    def leave_empty(self, cann: Cann, stream: int) -> None:
        """Queue the writes of a call that has no tokens, where the operator has any."""

    def values(self, found: dict[str, Any]) -> None:
        """Take the host values that ``host_values`` asked for, as numpy arrays."""

    def phase_one(
        self, handles: TensorHandles, placed: Placed, room: Room, answer: Argument | None
    ) -> list[Any]:
        """The arguments of GetWorkspaceSize but for its two results."""
        raise NotImplementedError

    def answer_rows(self) -> int | None:
        """Length of the int32 array that the operator returns; None when it returns none."""
        return None

    def returned(self) -> Any:
        """The return value of an operator that returns no new array."""
        return None


def optional(handles: TensorHandles, argument: Argument | None) -> int | None:
    """The tensor of an optional argument; NULL without one."""
    return None if argument is None else handles.tensor(argument)


def required(placed: Placed, index: int) -> Argument:
    """An argument that the operator's rules require, so it is not None."""
    found = placed[index]
    assert found is not None
    return found
