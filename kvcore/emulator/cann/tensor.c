// SPDX-License-Identifier: Apache-2.0
// aclTensor, aclIntArray, aclTensorList (section 1.9, 5.3).  What is wrong with a tensor is recorded
// when it is made, and phase one refuses it.
#include "machine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct tensor_list {
    struct handle handle;
    uint64_t count;
    struct tensor *members[];
};

static int64_t product(const int64_t *dims, int rank) {
    int64_t n = 1;
    for (int i = 0; i < rank; i++)
        if (__builtin_mul_overflow(n, dims[i], &n)) return INT64_MAX;
    return n;
}

int64_t kvd_elements(const struct tensor *t) { return product(t->dims, t->rank); }
int64_t kvd_storage_elements(const struct tensor *t) { return product(t->storage, t->storage_rank); }

bool kvd_contiguous(const struct tensor *t) {
    int64_t expected = 1;
    if (kvd_elements(t) == 0) return true;
    for (int i = t->rank - 1; i >= 0; i--) {
        if (t->dims[i] != 1 && t->strides[i] != expected) return false;
        expected *= t->dims[i];
    }
    return true;
}

int64_t kvd_extent(const struct tensor *t) {
    int64_t last = 0, step;
    for (int i = 0; i < t->rank; i++) {
        if (t->dims[i] == 0) return 0;
        if (__builtin_mul_overflow(t->dims[i] - 1, t->strides[i], &step) ||
            __builtin_add_overflow(last, step, &last))
            return INT64_MAX;
    }
    return last == INT64_MAX ? last : last + 1;
}

#define FAULT(...) \
    do { \
        snprintf(t->fault, sizeof t->fault, __VA_ARGS__); \
        return; \
    } while (0)

static void fill(struct tensor *t, const int64_t *dims, uint64_t rank, int dtype,
                 const int64_t *strides, int64_t offset, int format, const int64_t *storage,
                 uint64_t storage_rank, void *data) {
    memset((char *)t + sizeof t->handle, 0, sizeof *t - sizeof t->handle);
    t->dtype = dtype;
    t->format = format;
    t->offset = offset;
    t->data = (uint64_t)(uintptr_t)data;
    if (rank > MAX_RANK || storage_rank > MAX_RANK) FAULT("rank %d", (int)rank);
    if ((!dims && rank) || (!storage && storage_rank))  // NULL only with count 0
        FAULT("dims are NULL, count %d", (int)rank);
    t->rank = (int)rank;
    t->storage_rank = (int)storage_rank;
    int64_t expected = 1;
    for (int i = t->rank - 1; i >= 0; i--) {
        t->dims[i] = dims[i];
        t->strides[i] = strides ? strides[i] : expected;  // NULL: contiguous
        if (dims[i] < 0) FAULT("viewDims[%d] is %lld", i, (long long)dims[i]);
        if (t->strides[i] < 0) FAULT("stride[%d] is %lld", i, (long long)t->strides[i]);
        if (__builtin_mul_overflow(expected, dims[i] ? dims[i] : 1, &expected)) FAULT("viewDims overflow");
    }
    for (int i = 0; i < t->storage_rank; i++) {
        t->storage[i] = storage[i];
        if (storage[i] < 0) FAULT("storageDims[%d] is %lld", i, (long long)storage[i]);
    }
    if (!kvd_bits(dtype)) FAULT("dataType %d", dtype);
    if (format < -1 || format > 54) FAULT("format %d", format);
    if (t->data % 32) FAULT("tensorData %p is not 32-byte aligned: a sub-offset goes in offset", data);
    int64_t all = kvd_storage_elements(t), extent = kvd_extent(t);
    if (offset < 0 || offset > all) FAULT("offset %lld, storage of %lld", (long long)offset, (long long)all);
    if (extent > all - offset)
        FAULT("the view needs %lld elements from offset %lld, storageDims describe %lld: they must "
              "describe the whole buffer", (long long)extent, (long long)offset, (long long)all);
}

void *aclCreateTensor(const int64_t *dims, uint64_t rank, int dtype, const int64_t *strides,
                      int64_t offset, int format, const int64_t *storage, uint64_t storage_rank,
                      void *data) {
    int code = enter("aclCreateTensor", CALLABLE, "%d dims, dtype %d, offset %lld, format %d, %p",
                     (int)rank, dtype, (long long)offset, format, data);
    if (code) {
        leave(code);
        return NULL;
    }
    struct tensor *t = kvd_create(H_TENSOR, sizeof *t);
    fill(t, dims, rank, dtype, strides, offset, format, storage, storage_rank, data);
    if (t->fault[0]) violate(NN_PARAM_INVALID, "5.3", "%s", t->fault);
    leave(OK);
    return t;
}

int aclInitTensor(void *tensor, const int64_t *dims, uint64_t rank, int dtype, const int64_t *strides,
                  int64_t offset, int format, const int64_t *storage, uint64_t storage_rank,
                  void *data) {
    int code = enter("aclInitTensor", CALLABLE, "%p", tensor);
    struct tensor *t = code ? NULL : kvd_check(tensor, H_TENSOR, "tensor");
    if (!t) return leave(code ? code : NN_PARAM_INVALID);
    fill(t, dims, rank, dtype, strides, offset, format, storage, storage_rank, data);
    return leave(t->fault[0] ? violate(NN_PARAM_INVALID, "5.3", "%s", t->fault) : OK);
}

struct use {
    const void *argument;
    struct executor *by;
};

static void uses(void *executor, void *data) {
    struct executor *e = executor;
    struct use *use = data;
    for (int i = 0; i < e->call.num_views && !e->ran; i++)
        if (e->call.v[i].present && e->call.v[i].handle == use->argument) use->by = e;
}

static void destroy_tensor(const void *tensor) {
    struct use use = {tensor, NULL};
    kvd_each(H_EXECUTOR, uses, &use);
    if (use.by)
        violate(OK, "5.1", "a tensor is destroyed before phase two of %s", use.by->op->name);
    kvd_destroy((void *)(uintptr_t)tensor);
}

int aclDestroyTensor(const void *tensor) {
    int code = enter("aclDestroyTensor", CALLABLE | AFTER, "%p", tensor);
    if (code || !tensor) return leave(code);  // 1.9: NULL -> 0
    if (!kvd_check(tensor, H_TENSOR, "tensor")) return leave(NN_PARAM_INVALID);
    destroy_tensor(tensor);
    return leave(OK);
}

void *aclCreateIntArray(const int64_t *values, uint64_t size) {
    int code = enter("aclCreateIntArray", CALLABLE, "%d values", (int)size);
    if (!code && ((!values && size) || size > 1 << 20))
        code = violate(NN_PARAM_NULLPTR, "1.9", "value is NULL, size %d", (int)size);
    struct int_array *a = NULL;
    if (!code) {
        a = kvd_create(H_INT_ARRAY, sizeof *a + size * sizeof *values);
        a->size = size;
        if (size) memcpy(a->values, values, size * sizeof *values);
    }
    leave(code);
    return a;
}

int aclDestroyIntArray(const void *array) {
    int code = enter("aclDestroyIntArray", CALLABLE | AFTER, "%p", array);
    if (code || !array) return leave(code);
    if (!kvd_check(array, H_INT_ARRAY, "array")) return leave(NN_PARAM_INVALID);
    kvd_destroy((void *)(uintptr_t)array);
    return leave(OK);
}

void *aclCreateScalar(const void *value, int dtype) {
    int code = enter("aclCreateScalar", CALLABLE, "dtype %d", dtype);
    int bits = kvd_bits(dtype);
    if (!code && (!value || bits < 8 || bits > 128))
        code = violate(NN_PARAM_INVALID, "1.9", "value is %p, dtype %d", value, dtype);
    struct scalar *s = NULL;
    if (!code) {
        s = kvd_create(H_SCALAR, sizeof *s);
        s->dtype = dtype;
        memcpy(s->value, value, (size_t)bits / 8);
    }
    leave(code);
    return s;
}

int aclDestroyScalar(const void *scalar) {
    int code = enter("aclDestroyScalar", CALLABLE | AFTER, "%p", scalar);
    if (code || !scalar) return leave(code);
    if (!kvd_check(scalar, H_SCALAR, "scalar")) return leave(NN_PARAM_INVALID);
    kvd_destroy((void *)(uintptr_t)scalar);
    return leave(OK);
}

void *aclCreateTensorList(const void *const *members, uint64_t count) {
    int code = enter("aclCreateTensorList", CALLABLE, "%d members", (int)count);
    struct tensor_list *list = NULL;
    if (!code && ((!members && count) || count > 1 << 16))
        code = violate(NN_PARAM_NULLPTR, "1.9", "value is NULL, n %d", (int)count);
    for (uint64_t i = 0; !code && i < count; i++)
        if (!kvd_check(members[i], H_TENSOR, "member")) code = NN_PARAM_INVALID;
    if (!code) {
        list = kvd_create(H_TENSOR_LIST, sizeof *list + count * sizeof *members);
        list->count = count;
        if (count) memcpy(list->members, members, count * sizeof *members);
    }
    leave(code);
    return list;
}

int aclDestroyTensorList(const void *list) {
    int code = enter("aclDestroyTensorList", CALLABLE | AFTER, "%p", list);
    if (code || !list) return leave(code);
    struct tensor_list *l = kvd_check(list, H_TENSOR_LIST, "list");
    if (!l) return leave(NN_PARAM_INVALID);
    for (uint64_t i = 0; i < l->count; i++)  // 1.9: also destroys the members
        if (kvd_check(l->members[i], H_TENSOR, "member")) destroy_tensor(l->members[i]);
    kvd_destroy(l);
    return leave(OK);
}

static struct tensor *get(const char *symbol, const void *tensor, const void *answer, int *code) {
    *code = enter(symbol, CALLABLE, "%p", tensor);
    if (*code) return NULL;
    struct tensor *t = kvd_check(tensor, H_TENSOR, "tensor");
    if (!t) *code = NN_PARAM_INVALID;
    else if (!answer) *code = violate(NN_PARAM_NULLPTR, "1.9", "the answer is NULL");
    return *code ? NULL : t;
}

int aclGetViewShape(const void *tensor, int64_t **dims, uint64_t *count) {
    int code;
    struct tensor *t = get("aclGetViewShape", tensor, dims && count ? dims : NULL, &code);
    if (!t) return leave(code);
    violate(OK, "1.9", "the caller must C++ delete[] the dims: avoid");
    *dims = malloc(sizeof t->dims);
    if (!*dims) abort();
    memcpy(*dims, t->dims, sizeof t->dims);
    *count = (uint64_t)t->rank;
    return leave(OK);
}

int aclGetFormat(const void *tensor, int *format) {
    int code;
    struct tensor *t = get("aclGetFormat", tensor, format, &code);
    if (t) *format = t->format;
    return leave(code);
}

int aclGetDataType(const void *tensor, int *dtype) {
    int code;
    struct tensor *t = get("aclGetDataType", tensor, dtype, &code);
    if (t) *dtype = t->dtype;
    return leave(code);
}

int aclSetRawTensorAddr(void *tensor, void *address) {
    int code;
    struct tensor *t = get("aclSetRawTensorAddr", tensor, tensor, &code);
    if (t) t->data = (uint64_t)(uintptr_t)address;
    return leave(code);
}

int aclGetRawTensorAddr(const void *tensor, void **address) {
    int code;
    struct tensor *t = get("aclGetRawTensorAddr", tensor, address, &code);
    if (t) *address = (void *)(uintptr_t)t->data;
    return leave(code);
}
