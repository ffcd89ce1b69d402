// SPDX-License-Identifier: Apache-2.0
// The older way to call an operator by its name (CANN's acl/acl_op.h, acl/acl_op_compiler.h):
// descriptions, buffers, attributes.  An operator that the machine has not is an error that names
// it: one that returned success without doing anything would leave wrong bytes.
#include "machine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// -- descriptions and buffers -----------------------------------------------------------------------

struct buffer {
    void *data;
    size_t size;
};

void *aclCreateDataBuffer(void *data, size_t size) {
    struct buffer *b = calloc(1, sizeof *b);
    if (!b) abort();
    *b = (struct buffer){data, size};
    return b;
}

int aclDestroyDataBuffer(const void *buffer) {
    free((void *)(uintptr_t)buffer);
    return OK;
}

struct description {
    int dtype, rank, storage_rank, format, storage_format, placement;
    int64_t dims[MAX_RANK], storage[MAX_RANK];
    char name[64];
};

void *aclCreateTensorDesc(int dtype, int rank, const int64_t *dims, int format) {
    if (rank < 0 || rank > MAX_RANK || (rank && !dims)) return NULL;
    struct description *d = calloc(1, sizeof *d);
    if (!d) abort();
    d->dtype = dtype;
    d->rank = d->storage_rank = rank;
    d->format = d->storage_format = format;
    for (int i = 0; i < rank; i++) d->dims[i] = d->storage[i] = dims[i];
    return d;
}

void aclDestroyTensorDesc(const void *description) { free((void *)(uintptr_t)description); }

int aclGetTensorDescType(const void *description) {
    const struct description *d = description;
    return d ? d->dtype : -1;
}
int aclGetTensorDescFormat(const void *description) {
    const struct description *d = description;
    return d ? d->format : -1;
}
size_t aclGetTensorDescNumDims(const void *description) {
    const struct description *d = description;
    return d ? (size_t)d->rank : 0;
}
int aclGetTensorDescDimV2(const void *description, size_t index, int64_t *dim) {
    const struct description *d = description;
    if (!d || !dim || index >= (size_t)d->rank) return INVALID_PARAM;
    *dim = d->dims[index];
    return OK;
}
void aclSetTensorDescName(void *description, const char *name) {
    struct description *d = description;
    if (d && name) snprintf(d->name, sizeof d->name, "%s", name);
}
int aclSetTensorFormat(void *description, int format) {
    if (!description) return INVALID_PARAM;
    ((struct description *)description)->storage_format = format;
    return OK;
}
int aclSetTensorShape(void *description, int rank, const int64_t *dims) {
    struct description *d = description;
    if (!d || rank < 0 || rank > MAX_RANK || (rank && !dims)) return INVALID_PARAM;
    d->storage_rank = rank;
    for (int i = 0; i < rank; i++) d->storage[i] = dims[i];
    return OK;
}
int aclSetTensorPlaceMent(void *description, int placement) {
    if (!description) return INVALID_PARAM;
    ((struct description *)description)->placement = placement;
    return OK;
}

// -- attributes: no operator of the machine reads any yet -------------------------------------------

void *aclopCreateAttr(void) { return calloc(1, 1); }
void aclopDestroyAttr(const void *attributes) { free((void *)(uintptr_t)attributes); }

#define SETTER(name, ...) \
    int name(void *attributes, const char *key, __VA_ARGS__) { \
        (void)value; \
        return attributes && key ? OK : INVALID_PARAM; \
    }
SETTER(aclopSetAttrBool, uint8_t value)
SETTER(aclopSetAttrInt, int64_t value)
SETTER(aclopSetAttrFloat, float value)
SETTER(aclopSetAttrString, const char *value)
SETTER(aclopSetAttrDataType, int value)
#define LIST_SETTER(name, type) \
    int name(void *attributes, const char *key, int count, const type *values) { \
        return attributes && key && count >= 0 && (values || !count) ? OK : INVALID_PARAM; \
    }
LIST_SETTER(aclopSetAttrListBool, uint8_t)
LIST_SETTER(aclopSetAttrListInt, int64_t)
LIST_SETTER(aclopSetAttrListFloat, float)
int aclopSetAttrListListInt(void *attributes, const char *key, int count, const int *counts,
                            const int64_t *const values[]) {
    return attributes && key && count >= 0 && ((counts && values) || !count) ? OK : INVALID_PARAM;
}

// -- execution --------------------------------------------------------------------------------------

static int execute(const char *symbol, const char *op) {
    int code = enter(symbol, RUNTIME, "%s", op ? op : "NULL");
    if (code) return leave(code);
    if (!op) return leave(violate(INVALID_PARAM, "acl_op", "opType is NULL"));
    return leave(error(OP_NOT_FOUND, "the emulated machine has no operator %s", op));
}

int aclopCompileAndExecute(const char *op, int num_inputs, const void *const *input_descs,
                           const void *const *inputs, int num_outputs,
                           const void *const *output_descs, void *const *outputs,
                           const void *attributes, int engine, int flag, const char *path,
                           void *stream) {
    (void)num_inputs, (void)input_descs, (void)inputs, (void)num_outputs, (void)output_descs;
    (void)outputs, (void)attributes, (void)engine, (void)flag, (void)path, (void)stream;
    return execute("aclopCompileAndExecute", op);
}

int aclopCompileAndExecuteV2(const char *op, int num_inputs, void **input_descs, void **inputs,
                             int num_outputs, void **output_descs, void **outputs,
                             void *attributes, int engine, int flag, const char *path,
                             void *stream) {
    (void)num_inputs, (void)input_descs, (void)inputs, (void)num_outputs, (void)output_descs;
    (void)outputs, (void)attributes, (void)engine, (void)flag, (void)path, (void)stream;
    return execute("aclopCompileAndExecuteV2", op);
}
