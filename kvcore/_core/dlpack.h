/* SPDX-License-Identifier: Apache-2.0
 *
 * The parts of DLPack 1.3 that kvcore reads: tensors, both kinds of capsule, and the exchange table
 * that a type offers as __dlpack_c_exchange_api__.
 */
#ifndef KVCORE_DLPACK_H
#define KVCORE_DLPACK_H

#include <Python.h>
#include <stdint.h>

typedef struct { int32_t device_type, device_id; } kv_dl_device;
typedef struct { uint8_t code, bits; uint16_t lanes; } kv_dl_type;
typedef struct {
    void *data;
    kv_dl_device device;
    int32_t ndim;
    kv_dl_type dtype;
    int64_t *shape, *strides; /* strides in elements; NULL: C-contiguous */
    uint64_t byte_offset;
} kv_dl_tensor;

typedef struct kv_dl_managed {
    kv_dl_tensor dl_tensor;
    void *manager_ctx;
    void (*deleter)(struct kv_dl_managed *);
} kv_dl_managed;

typedef struct kv_dl_versioned {
    uint32_t major, minor;
    void *manager_ctx;
    void (*deleter)(struct kv_dl_versioned *);
    uint64_t flags; /* bit 0: read-only */
    kv_dl_tensor dl_tensor;
} kv_dl_versioned;

typedef struct kv_dl_exchange {
    uint32_t major, minor;
    struct kv_dl_exchange *previous;
    void *allocator, *managed_from_object, *managed_to_object;
    int (*tensor_from_object)(void *object, kv_dl_tensor *out); /* may be NULL; borrows */
    void *current_stream;
} kv_dl_exchange;

/* 0 when the table could describe the object; no exception is left set. */
static inline int kv_peek(kv_dl_exchange *table, void *object, kv_dl_tensor *out)
{
    int failed = table->tensor_from_object(object, out);
    if (failed)
        PyErr_Clear();
    return failed;
}

#endif
