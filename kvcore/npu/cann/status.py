# SPDX-License-Identifier: Apache-2.0
"""Statuses of ACL and aclnn as typed errors.

Where documents and code disagree (a required null: 161001 or 561103) both count.  A status of
5070xx comes from the device, later than the call that caused it, and mostly leaves the context
unusable.
Sources: CANN's table of aclnn return codes; runtime, error_codes/rt_error_codes.h; opbase,
op_errno.h.
"""

from __future__ import annotations

from typing import TypeVar

from kvcore.errors import (
    BackendUnavailableError,
    CaptureError,
    DeviceOutOfMemoryError,
    KVCoreError,
    ParamInvalidError,
    ParamNullError,
    StreamError,
)

__all__ = ["MEANINGS", "bare", "error", "error_class", "is_sticky", "meaning"]

E = TypeVar("E", bound=BaseException)

#: code: (class, what it means).
MEANINGS: dict[int, tuple[type[KVCoreError], str]] = {}


def _are(kind: type[KVCoreError], **words: str) -> None:
    for name, text in words.items():
        MEANINGS[int(name.removeprefix("c"))] = (kind, text)


_are(ParamNullError, c161001="a required argument is null")
_are(
    ParamInvalidError,
    c161002="an argument is invalid",
    c561001="the output's shape cannot be inferred",
    c561002="the tiling refuses this combination of shapes and attributes",
    c100000="an argument is invalid",
    c100003="invalid file",
    c100026="data type not supported",
    c107000="an argument is invalid",
    c107001="no device of that number",
    c107008="the address is not aligned",
    c107016="wrong kind of memory",
    c107017="invalid handle",
    c507910="the host memory is registered already",
    c507911="the host memory is not registered",
)
_are(
    DeviceOutOfMemoryError,
    c200000="memory is exhausted",
    c207001="device memory is exhausted",
    c207018="device memory is exhausted",
    c300000="storage over its limit",
)
_are(
    BackendUnavailableError,
    c100001="CANN is not initialised, or another part of this process has finalised it",
    c100037="CANN was finalised already",
    c100024="no such operator",
    c100039="a stub library (devlib) is loaded: there is no NPU driver",
    c148049="invalid ASCEND_OPP_PATH",
    c200001="not supported by this CANN",
    c200006="not supported by this CANN",
    c207000="not supported by this CANN, driver or device",
    c207004="no device",
    c207006="no permission",
    c507008="this SoC is not the one the software is for",
    c561003="no kernel found (the operators' binary package is missing)",
    c561107="ASCEND_OPP_PATH is not set",
    c561112="no kernel package for this SoC",
    c561113="a kernel's binary is invalid",
)
_are(
    CaptureError,
    c107024="a capture depends on work outside of it",
    c107025="a captured stream was not joined",
    c107026="the graph is being captured",
    c107027="the stream is being captured",
    c107028="the event is being captured",
    c107029="the stream is not being captured",
    c107030="not allowed during a capture in this mode",
    c107031="a capture would reach the default stream",
    c107036="the capture was begun on another stream",
    c107037="the graph is running",
    c107038="a capture must end in the thread that began it",
    c107041="a blocking copy during a capture",
    c507903="the capture was made invalid by an earlier error",
)
_are(
    StreamError,
    c107002="this thread has no device",
    c107003="the stream belongs to another context",
    c107015="the stream has no thread for callbacks",
    c107019="waited too long",
    c107020="a task took too long",
    c107022="the device's tasks were aborted",
    c107023="the stream was aborted",
    c207005="resources are exhausted",
    c207007="no event is left",
    c207008="no stream is left",
    c207012="over a limit",
    c207020="the driver took too long",
    c361001="a call of the runtime failed",
    c507000="internal error of the runtime",
    c507001="error of the task scheduler",
    c507004="the stream is not complete",
    c507006="the event is not complete",
    c507010="the device's heartbeat is lost",
    c507011="a model failed",
    c507012="no report in time",
    c507014="a kernel took too long",
    c507015="a kernel failed (typically a bad slot or address)",
    c507034="a vector kernel took too long",
    c507035="a vector kernel failed (typically a bad slot or address)",
    c507042="a read overflow was trapped",
    c507043="an overflow was trapped",
    c507044="an overflow was trapped",
    c507045="a write overflow was trapped",
    c507046="the stream took longer than the given time",
    c507047="the event took longer than the given time",
    c507053="device memory error",
    c507054="device memory error that cannot be corrected",
    c507056="link error",
    c507899="internal error of the driver",
    c507901="connection to the driver lost",
)
_are(
    KVCoreError,
    c100002="initialised already",
    c207002="memory could not be freed",
    c500000="internal error",
    c500001="failure",
    c500003="the runtime failed",
    c500004="the driver failed",
    c561000="internal error",
    c561101="no executor could be made",
    c561102="the executor is of another kind",
    c561103="an inner pointer is null (a null argument, or shapes that do not go together)",
    c561104="wrong size of an attribute",
    c561105="a key twice",
    c561106="invalid implementation mode",
    c561108="a kernel's description cannot be loaded",
    c561109="a kernel's description has a wrong value",
    c561110="a kernel's description has a wrong format",
    c561111="a kernel's description has a wrong data type",
    c561114="an attribute's number is out of bounds",
    c561115="an attribute's length is out of bounds",
    c561116="more than 32 inputs",
    c561117="no description of the inputs",
    c561118="invalid static workspace",
    c561119="invalid static block dimension",
)

# Timeouts and refusals that say nothing about the context.
_HARMLESS = {507000, 507004, 507006, 507008, 507046, 507047, 507903, 507910, 507911}


def error_class(code: int) -> type[KVCoreError]:
    """The class of a status; of one that is in no table, by its range."""
    if code in MEANINGS:
        return MEANINGS[code][0]
    if 507000 <= code <= 507999 or 107000 <= code <= 107999:
        return StreamError
    return KVCoreError


def meaning(code: int) -> str:
    """The meaning of a status, as a sentence of an error has it."""
    return MEANINGS[code][1] if code in MEANINGS else "a status this library does not know"


def error(code: int, function: str, text: str = "") -> KVCoreError:
    """The error of a status; text is what aclGetRecentErrMsg said."""
    message = f"{function}: expected status 0, got {code} ({meaning(code)})"
    if text:
        message += f": {text}"
    return error_class(code)(message, seen=code, expected=0, code=code)


def is_sticky(code: int) -> bool:
    """Whether the context is unusable from now on (a failure on the device)."""
    return 507000 <= code <= 507999 and code not in _HARMLESS


def bare(error: E) -> E:
    """An error of CANN to keep, without its frames and without what it came upon.

    They say nothing that its text does not, and would keep the program's own frames alive, back
    to the one that made the device.  The program's errors stay as they are.
    """
    if isinstance(error, KVCoreError) and "code" in vars(error):
        error.__context__ = None
        error.__traceback__ = None
    return error
