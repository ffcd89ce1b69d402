// SPDX-License-Identifier: Apache-2.0
// The interface's constants (page section 2) and structs (1.4), as the double sees them.
#ifndef KVDOUBLE_ABI_H
#define KVDOUBLE_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {  // acl and runtime codes (2)
    OK = 0,
    INVALID_PARAM = 100000,
    UNINITIALIZE = 100001,
    REPEAT_INITIALIZE = 100002,
    OP_NOT_FOUND = 100024,
    REPEAT_FINALIZE = 100037,
    RT_PARAM_INVALID = 107000,
    RT_INVALID_DEVICEID = 107001,
    RT_CONTEXT_NULL = 107002,
    RT_STREAM_CONTEXT = 107003,
    RT_ADDR_UNALIGNED = 107008,
    RT_STREAM_NO_CB_REG = 107015,
    RT_INVALID_MEMORY_TYPE = 107016,
    RT_INVALID_HANDLE = 107017,
    RT_STREAM_ABORT = 107023,
    RT_CAPTURE_DEPENDENCY = 107024,
    RT_STREAM_UNJOINED = 107025,
    RT_STREAM_CAPTURED = 107027,
    RT_EVENT_CAPTURED = 107028,
    RT_STREAM_NOT_CAPTURED = 107029,
    RT_CAPTURE_MODE = 107030,
    RT_CAPTURE_UNMATCHED = 107036,
    RT_MODEL_RUNNING = 107037,
    RT_CAPTURE_WRONG_THREAD = 107038,
    RT_CAPTURE_BLOCK_ASYNC = 107041,
    RT_FEATURE_NOT_SUPPORT = 207000,
    RT_MEMORY_ALLOCATION = 207001,
    RT_NO_DEVICE = 207004,
    RT_NO_EVENT = 207007,
    RT_NO_STREAM = 207008,
    RT_INTERNAL = 507000,
    RT_EVENT_NOT_COMPLETE = 507006,
    RT_REPORT_TIMEOUT = 507012,
    RT_TASK_TIMEOUT = 507014,
    RT_AICORE_EXCEPTION = 507015,
    RT_VECTOR_CORE_EXCEPTION = 507035,
    RT_STREAM_SYNC_TIMEOUT = 507046,
    RT_EVENT_SYNC_TIMEOUT = 507047,
    RT_CAPTURE_INVALIDATED = 507903,
    RT_HOST_ALREADY_REGISTERED = 507910,
    RT_HOST_NOT_REGISTERED = 507911,
};

enum {  // aclnn codes (2)
    NN_PARAM_NULLPTR = 161001,
    NN_PARAM_INVALID = 161002,
    NN_RUNTIME_ERROR = 361001,
    NN_INNER_ERROR = 561000,
    NN_TILING_ERROR = 561002,
    NN_FIND_KERNEL_ERROR = 561003,
    NN_INNER_NULLPTR = 561103,
    NN_OPP_PATH_NOT_FOUND = 561107,
    NN_NO_KERNEL_PACKAGE = 561112,
};

enum {  // aclDataType (2)
    FLOAT32 = 0, FLOAT16 = 1, INT8 = 2, INT32 = 3, UINT8 = 4, INT16 = 6, UINT16 = 7, UINT32 = 8,
    INT64 = 9, UINT64 = 10, DOUBLE = 11, BOOL = 12, STRING = 13, COMPLEX64 = 16, COMPLEX128 = 17,
    BF16 = 27, INT4 = 29, UINT1 = 30, COMPLEX32 = 33, HIFLOAT8 = 34, FLOAT8_E5M2 = 35,
    FLOAT8_E4M3FN = 36, FLOAT8_E8M0 = 37, FLOAT6_E3M2 = 38, FLOAT6_E2M3 = 39, FLOAT4_E2M1 = 40,
    FLOAT4_E1M2 = 41,
};

enum { FORMAT_ND = 2, FORMAT_FRACTAL_NZ = 29 };  // aclFormat (2)
enum { H2H = 0, H2D = 1, D2H = 2, D2D = 3, KIND_LAST = 7 };  // aclrtMemcpyKind (2)
enum { LOCATION_HOST = 0, LOCATION_DEVICE = 1, LOCATION_UNREGISTERED = 2 };  // MemLocationType (2)
enum { ATTR_MODULE_ID = 1, ATTR_DEVICE_ID = 2, ATTR_VA_FLAG = 3 };  // MallocAttr (2)
enum {  // Event flags (2)
    EVENT_SYNC = 0x1, EVENT_CAPTURE_PROGRESS = 0x2, EVENT_TIME_LINE = 0x8,
    EVENT_DEVICE_USE_ONLY = 0x10, EVENT_EXTERNAL = 0x20, EVENT_IPC = 0x40,
};
enum { HOST_MAPPED = 0x2, HOST_IOMEMORY = 0x4, HOST_READONLY = 0x8, HOST_PINNED = 0x10000000 };
enum { MODE_GLOBAL = 0, MODE_THREAD_LOCAL = 1, MODE_RELAXED = 2 };  // Capture mode (2)
enum { CAPTURE_NONE = 0, CAPTURE_ACTIVE = 1, CAPTURE_INVALIDATED = 2 };  // Capture status (2)

// 1.4: 12 bytes, the union at offset 4, not 8-aligned.
typedef struct {
    int attr;
    union {
        uint16_t module_id;
        uint32_t device_id;
        uint32_t va_flag;
        uint8_t bytes[8];
    } value;
} malloc_attribute;
_Static_assert(sizeof(malloc_attribute) == 12, "1.4: aclrtMallocAttribute is 12 bytes");
_Static_assert(offsetof(malloc_attribute, value) == 4, "1.4: the union is at offset 4");

typedef struct {
    malloc_attribute *attrs;
    size_t count;
} malloc_config;
_Static_assert(sizeof(malloc_config) == 16, "1.4: aclrtMallocConfig is 16 bytes");

typedef struct {
    uint32_t id;
    int type;
} mem_location;

typedef struct {
    mem_location location;
    uint32_t page_size;
    uint32_t reserved[4];
} pointer_attributes;
_Static_assert(sizeof(pointer_attributes) == 28, "1.4: aclrtPtrAttributes is 28 bytes");

typedef struct {
    mem_location dst, src;
    uint8_t reserved[16];
} batch_attribute;
_Static_assert(sizeof(batch_attribute) == 32, "1.4: aclrtMemcpyBatchAttr is 32 bytes");

#endif
