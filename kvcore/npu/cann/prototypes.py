# SPDX-License-Identifier: Apache-2.0
"""The C functions, one line each: the type of the result, then those of the arguments.

    s status (int32)   i int32    u uint32   q int64    Q uint64   z size_t    h uint16
    f float            b bool     p pointer or handle    c char*    v nothing   H host function
    A malloc config    B memory location attributes of a pointer    C attributes of a batch copy

A star makes a pointer to the type.  Without these, ctypes would cut 64-bit handles to 32 bits.
Sources: CANN runtime acl_rt.h, acl_base_rt.h; opbase acl_meta.h, aclnn_base.h; ops-transformer
aclnn_scatter_pa_kv_cache.h, aclnn_gather_pa_kv_cache.h, aclnnScatterPaCache.md; the operator
definition of GatherSelectionKvCache in cann-recipes-infer, whose header no repository has.
"""

from __future__ import annotations

import ctypes
from typing import Any

from kvcore.npu.cann import structs

__all__ = ["META", "OPERATORS", "RUNTIME", "argument_types", "group_of", "is_known"]

#: acl*, aclrt*, aclmdlRI*: libacl_rt.so or libascendcl.so.
RUNTIME: dict[str, str] = {
    # initialisation, errors, version
    "aclInit": "s c",
    "aclFinalize": "s",
    "aclFinalizeReference": "s Q*",
    "aclGetRecentErrMsg": "c",
    "aclrtPeekAtLastError": "s i",
    "aclrtGetLastError": "s i",
    "aclsysGetVersionStr": "s c c",
    "aclsysGetVersionNum": "s c i*",
    "aclrtGetVersion": "s i* i* i*",
    # device and context
    "aclrtSetDevice": "s i",
    "aclrtResetDevice": "s i",
    "aclrtGetDevice": "s i*",
    "aclrtGetDeviceCount": "s u*",
    "aclrtGetRunMode": "s i*",
    "aclrtSynchronizeDevice": "s",
    "aclrtSynchronizeDeviceWithTimeout": "s i",
    "aclrtGetSocName": "c",
    "aclrtGetDeviceInfo": "s u i q*",
    "aclrtQueryDeviceStatus": "s i i*",
    "aclrtCreateContext": "s p* i",
    "aclrtDestroyContext": "s p",
    "aclrtSetCurrentContext": "s p",
    "aclrtGetCurrentContext": "s p*",
    "aclrtCtxGetCurrentDefaultStream": "s p*",
    "aclDataTypeSize": "z i",
    # memory
    "aclrtMalloc": "s p* z i",
    "aclrtMallocAlign32": "s p* z i",
    "aclrtMallocCached": "s p* z i",
    "aclrtMallocWithCfg": "s p* z i A*",
    "aclrtFree": "s p",
    "aclrtFreeWithDevSync": "s p",
    "aclrtMallocHost": "s p* z",
    "aclrtMallocHostWithCfg": "s p* Q A*",
    "aclrtFreeHost": "s p",
    "aclrtFreeHostWithDevSync": "s p",
    "aclrtGetMemInfo": "s i z* z*",
    "aclrtPointerGetAttributes": "s p B*",
    "aclrtMemcpy": "s p z p z i",
    "aclrtMemcpyAsync": "s p z p z i p",
    "aclrtMemcpy2d": "s p z p z z z i",
    "aclrtMemcpy2dAsync": "s p z p z z z i p",
    "aclrtMemset": "s p z i z",
    "aclrtMemsetAsync": "s p z i z p",
    "aclrtMemcpyBatchAsync": "s p* z* p* z* z C* z* z z* p",
    "aclrtHostRegister": "s p Q i p*",
    "aclrtHostRegisterV2": "s p Q u",
    "aclrtHostGetDevicePointer": "s p p* u",
    "aclrtHostUnregister": "s p",
    "aclrtHostMemMapCapabilities": "s u i i*",
    # streams
    "aclrtCreateStream": "s p*",
    "aclrtCreateStreamWithConfig": "s p* u u",
    "aclrtCreateStreamConfigHandle": "p",
    "aclrtSetStreamConfigOpt": "s p i p z",
    "aclrtCreateStreamV2": "s p* p",
    "aclrtDestroyStreamConfigHandle": "s p",
    "aclrtDestroyStream": "s p",
    "aclrtDestroyStreamForce": "s p",
    "aclrtSynchronizeStream": "s p",
    "aclrtSynchronizeStreamWithTimeout": "s p i",
    "aclrtStreamQuery": "s p i*",
    "aclrtStreamGetPriority": "s p u*",
    "aclrtStreamGetFlags": "s p u*",
    "aclrtStreamAbort": "s p",
    "aclrtSetStreamFailureMode": "s p Q",
    "aclrtDeviceGetStreamPriorityRange": "s i* i*",
    "aclrtGetStreamAvailableNum": "s u*",
    # events: Record takes the event first, Wait the stream
    "aclrtCreateEvent": "s p*",
    "aclrtCreateEventWithFlag": "s p* u",
    "aclrtCreateEventExWithFlag": "s p* u",
    "aclrtDestroyEvent": "s p",
    "aclrtRecordEvent": "s p p",
    "aclrtRecordEventWithFlag": "s p p u",
    "aclrtResetEvent": "s p p",
    "aclrtStreamWaitEvent": "s p p",
    "aclrtStreamWaitEventWithTimeout": "s p p i",
    "aclrtStreamWaitEventWithFlag": "s p p u u",
    "aclrtQueryEventStatus": "s p i*",
    "aclrtQueryEvent": "s p i*",
    "aclrtQueryEventWaitStatus": "s p i*",
    "aclrtSynchronizeEvent": "s p",
    "aclrtSynchronizeEventWithTimeout": "s p i",
    "aclrtEventElapsedTime": "s f* p p",
    "aclrtEventGetTimestamp": "s p Q*",
    "aclrtSetOpWaitTimeout": "s u",
    "aclrtGetEventAvailNum": "s u*",
    # host functions
    "aclrtLaunchHostFunc": "s p H p",
    "aclrtLaunchCallback": "s H p i p",
    "aclrtSubscribeReport": "s Q p",
    "aclrtProcessReport": "s i",
    "aclrtUnSubscribeReport": "s Q p",
    # capture
    "aclmdlRICaptureBegin": "s p i",
    "aclmdlRICaptureEnd": "s p p*",
    "aclmdlRICaptureGetInfo": "s p i* p*",
    "aclmdlRICaptureThreadExchangeMode": "s i*",
    "aclmdlRIExecuteAsync": "s p p",
    "aclmdlRIExecute": "s p i",
    "aclmdlRIDestroy": "s p",
    "aclmdlRIAbort": "s p",
    "aclmdlRICaptureTaskGrpBegin": "s p",
    "aclmdlRICaptureTaskGrpEnd": "s p p*",
    "aclmdlRICaptureTaskUpdateBegin": "s p p",
    "aclmdlRICaptureTaskUpdateEnd": "s p",
    "aclmdlRIDebugJsonPrint": "s p c u",
}

#: Tensors and executors: libnnopbase.so, reached through the operator library that uses it.
META: dict[str, str] = {
    "aclCreateTensor": "p q* Q i q* q i q* Q p",
    "aclDestroyTensor": "s p",
    "aclCreateIntArray": "p q* Q",
    "aclDestroyIntArray": "s p",
    "aclSetAclOpExecutorRepeatable": "s p",
    "aclDestroyAclOpExecutor": "s p",
}

#: The second phase of every operator.
_RUN = "s p Q p p"
#: Both phases of each operator, from one library always.
OPERATORS: dict[str, str] = {
    "aclnnScatterPaKvCacheGetWorkspaceSize": "s p p p p p p p p c c p p Q* p*",
    "aclnnScatterPaKvCache": _RUN,
    "aclnnScatterPaCacheGetWorkspaceSize": "s p p p p p p c Q* p*",
    "aclnnScatterPaCache": _RUN,
    "aclnnGatherPaKvCacheGetWorkspaceSize": "s p p p p p p p c b Q* p*",
    "aclnnGatherPaKvCache": _RUN,
    "aclnnGatherSelectionKvCacheGetWorkspaceSize": "s p p p p p p p p p p q p Q* p*",
    "aclnnGatherSelectionKvCache": _RUN,
}

_TYPES: dict[str, Any] = {
    "s": ctypes.c_int32,
    "i": ctypes.c_int32,
    "u": ctypes.c_uint32,
    "q": ctypes.c_int64,
    "Q": ctypes.c_uint64,
    "z": ctypes.c_size_t,
    "h": ctypes.c_uint16,
    "f": ctypes.c_float,
    "b": ctypes.c_bool,
    "p": ctypes.c_void_p,
    "c": ctypes.c_char_p,
    "v": None,
    "H": structs.HOST_FUNC,
    "A": structs.MallocConfig,
    "B": structs.PtrAttributes,
    "C": structs.MemcpyBatchAttr,
}


def _type(word: str) -> Any:
    return ctypes.POINTER(_TYPES[word[0]]) if word.endswith("*") else _TYPES[word]


def argument_types(name: str) -> tuple[Any, list[Any], bool]:
    """(result type, argument types, whether the result is a status); KeyError: not in a table."""
    words = _line(name).split()
    return _type(words[0]), [_type(word) for word in words[1:]], words[0] == "s"


def _line(name: str) -> str:
    for table in (RUNTIME, META, OPERATORS):
        if name in table:
            return table[name]
    raise KeyError(name)


def is_known(name: str) -> bool:
    """Whether a table here has the function."""
    return name in RUNTIME or name in META or name in OPERATORS


def group_of(name: str) -> str:
    """ "runtime", "meta" or "operators": which libraries may have it."""
    if name in RUNTIME:
        return "runtime"
    return "meta" if name in META else "operators"
