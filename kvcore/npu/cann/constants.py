# SPDX-License-Identifier: Apache-2.0
"""Numbers of CANN's headers under their own names.

Sources: CANN runtime, include/external/acl/acl_base_rt.h and acl_rt.h; opbase, op_errno.h.
"""

from __future__ import annotations

# aclFormat
ACL_FORMAT_ND = 2

# aclrtMemcpyKind; the runtime goes by the addresses and ignores it
ACL_MEMCPY_HOST_TO_DEVICE = 1
ACL_MEMCPY_DEVICE_TO_HOST = 2
ACL_MEMCPY_DEVICE_TO_DEVICE = 3

# aclrtMemMallocPolicy
ACL_MEM_MALLOC_HUGE_FIRST = 0

# aclrtMallocAttrType
ACL_RT_MEM_ATTR_VA_FLAG = 3

# aclrtMemAttr
ACL_HBM_MEM = 1

# aclrtHostRegisterType; the flags of HostRegisterV2 are others
ACL_HOST_REGISTER_MAPPED = 0
ACL_HOST_REG_MAPPED = 0x2

# aclrtMemLocationType
ACL_MEM_LOCATION_TYPE_HOST = 0
ACL_MEM_LOCATION_TYPE_DEVICE = 1

# Events: flags, and an answer of aclrtQueryEventStatus (aclrtQueryEvent has the opposite encoding)
ACL_EVENT_SYNC = 0x1
ACL_EVENT_TIME_LINE = 0x8
ACL_EVENT_RECORDED_STATUS_COMPLETE = 1

# Streams
ACL_STREAM_FAST_LAUNCH = 0x1
ACL_STREAM_FAST_SYNC = 0x2
ACL_STOP_ON_FAILURE = 1

# Capture
ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL = 1

# aclrtDevAttr
ACL_DEV_ATTR_NPU_ARCH = 601

# Statuses that code looks for; status.py has the meaning of every one
ACL_SUCCESS = 0
ACL_ERROR_REPEAT_INITIALIZE = 100002
ACL_ERROR_RT_FEATURE_NOT_SUPPORT = 207000
ACL_ERROR_RT_STREAM_SYNC_TIMEOUT = 507046
ACL_ERROR_RT_EVENT_SYNC_TIMEOUT = 507047
