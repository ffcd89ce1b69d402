// SPDX-License-Identifier: Apache-2.0
// aclnnInplaceCopy and aclnnCast (CANN's aclnnop/aclnn_copy.h, aclnn_cast.h): strided copies with any
// change of type, rounded as torch's CPU kernels round.
#include "machine.h"

#include <stdlib.h>
#include <string.h>

struct number {
    long double real, imaginary;  // holds every int64 and uint64
};

static float from_half(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023;
    if (exponent == 0) {  // zero, or below the normal numbers
        float value = (float)mantissa / 16777216.0f;
        return sign ? -value : value;
    }
    uint32_t out = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | mantissa << 13;
    float value;
    memcpy(&value, &out, 4);
    return value;
}

static uint16_t to_half(float value) {  // to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    uint32_t rest = bits & 0x7FFFFFFF;
    if (rest > 0x7F800000) return sign | 0x7E00;
    if (rest >= 0x47800000) return sign | 0x7C00;
    if (rest < 0x33000000) return sign;
    uint32_t exponent = rest >> 23, mantissa = (rest & 0x7FFFFF) | 0x800000;
    uint32_t shift = exponent < 113 ? 126 - exponent : 13;
    uint32_t kept = mantissa >> shift, left = mantissa & ((1u << shift) - 1), half = 1u << (shift - 1);
    if (exponent >= 113) kept += ((exponent - 112) << 10) - 1024;
    if (left > half || (left == half && kept & 1)) kept++;
    return (uint16_t)(sign | kept);
}

static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FC0;
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

#define LOAD(type) \
    do { \
        type x; \
        memcpy(&x, at, sizeof x); \
        n.real = x; \
    } while (0)

static struct number load(const unsigned char *at, int dtype) {
    struct number n = {0, 0};
    switch (dtype) {
    case FLOAT32: LOAD(float); break;
    case DOUBLE: LOAD(double); break;
    case INT8: LOAD(int8_t); break;
    case UINT8: case BOOL: LOAD(uint8_t); break;
    case INT16: LOAD(int16_t); break;
    case UINT16: LOAD(uint16_t); break;
    case INT32: LOAD(int32_t); break;
    case UINT32: LOAD(uint32_t); break;
    case INT64: LOAD(int64_t); break;
    case UINT64: LOAD(uint64_t); break;
    case FLOAT16: {
        uint16_t x;
        memcpy(&x, at, 2);
        n.real = from_half(x);
        break;
    }
    case COMPLEX64: {
        float x[2];
        memcpy(x, at, 8);
        n = (struct number){x[0], x[1]};
        break;
    }
    case COMPLEX128: {
        double x[2];
        memcpy(x, at, 16);
        n = (struct number){x[0], x[1]};
        break;
    }
    default: n.real = kvd_decode(at, dtype);
    }
    return n;
}

static int64_t whole(long double value) {  // out of range: what x86-64's own conversion gives
    bool fits = value > -9223372036854775809.0L && value < 9223372036854775808.0L;
    return fits ? (int64_t)value : INT64_MIN;
}

#define STORE(type, value) \
    do { \
        type x = (type)(value); \
        memcpy(at, &x, sizeof x); \
    } while (0)

static void store(struct number n, unsigned char *at, int dtype) {
    switch (dtype) {
    case FLOAT32: STORE(float, n.real); break;
    case DOUBLE: STORE(double, n.real); break;
    case INT8: STORE(int8_t, whole(n.real)); break;
    case UINT8: STORE(uint8_t, whole(n.real)); break;
    case BOOL: STORE(uint8_t, n.real != 0 || n.imaginary != 0); break;
    case INT16: STORE(int16_t, whole(n.real)); break;
    case UINT16: STORE(uint16_t, whole(n.real)); break;
    case INT32: STORE(int32_t, whole(n.real)); break;
    case UINT32: STORE(uint32_t, whole(n.real)); break;
    case INT64: STORE(int64_t, whole(n.real)); break;
    case UINT64: STORE(uint64_t, n.real < 0 ? (uint64_t)whole(n.real) : (uint64_t)n.real); break;
    case FLOAT16: STORE(uint16_t, to_half((float)n.real)); break;
    case BF16: STORE(uint16_t, to_bf16((float)n.real)); break;
    case COMPLEX64: {
        float x[2] = {(float)n.real, (float)n.imaginary};
        memcpy(at, x, 8);
        break;
    }
    case COMPLEX128: {
        double x[2] = {(double)n.real, (double)n.imaginary};
        memcpy(at, x, 16);
        break;
    }
    default: kvd_encode((float)n.real, at, dtype);
    }
}

void kvd_convert(const unsigned char *from, int from_dtype, unsigned char *to, int to_dtype) {
    store(load(from, from_dtype), to, to_dtype);
}

enum { TO, FROM, NUM };

static const char *const copy_names[NUM] = {"selfRef", "src"};
static const char *const cast_names[NUM] = {"outOut", "self"};

// Strides of the source along the destination's axes: 0 where it is repeated.
static bool broadcast(const struct tensor *to, const struct tensor *from, int64_t *strides) {
    int skipped = to->rank - from->rank;
    if (skipped < 0) return false;
    for (int i = 0; i < to->rank; i++) {
        int64_t n = i < skipped ? 1 : from->dims[i - skipped];
        if (n != to->dims[i] && n != 1) return false;
        strides[i] = n == 1 ? 0 : from->strides[i - skipped];
    }
    return true;
}

static void row(struct call *c, int64_t to, int64_t to_step, int64_t from, int64_t from_step,
                int64_t n) {
    struct view *dst = &c->v[TO], *src = &c->v[FROM];
    if (dst->t.dtype == src->t.dtype) {
        kvd_copy(c, dst, to, to_step, src, from, from_step, n);
        return;
    }
    int64_t to_bytes = kvd_bits(dst->t.dtype) / 8, from_bytes = kvd_bits(src->t.dtype) / 8;
    if (to_step != 1 || (from_step != 1 && from_step != 0)) {  // what lies between is not touched
        for (int64_t i = 0; n > 1 && i < n && !c->fault; i++)
            row(c, to + i * to_step, 1, from + i * from_step, 1, 1);
        if (n > 1) return;
    }
    unsigned char *write = kvd_at(c, dst, to, n * to_bytes);
    unsigned char *read = write ? kvd_at(c, src, from, ((n - 1) * from_step + 1) * from_bytes) : NULL;
    for (int64_t i = 0; read && i < n; i++)
        store(load(read + i * from_step * from_bytes, src->t.dtype), write + i * to_bytes, dst->t.dtype);
}

static int kernel(struct call *c) {
    const struct tensor *to = &c->v[TO].t, *from = &c->v[FROM].t;
    int64_t strides[MAX_RANK + 1] = {0}, index[MAX_RANK] = {0};
    broadcast(to, from, strides);
    int last = to->rank - 1;
    if (to->rank == 0) row(c, 0, 1, 0, 1, 1);
    if (to->rank == 0 || kvd_elements(to) == 0) return c->fault;
    int64_t at = 0, source = 0;
    for (;;) {
        row(c, at, to->strides[last], source, strides[last], to->dims[last]);
        int axis = last - 1;
        for (; axis >= 0; axis--) {
            at += to->strides[axis], source += strides[axis];
            if (++index[axis] < to->dims[axis]) break;
            at -= index[axis] * to->strides[axis], source -= index[axis] * strides[axis];
            index[axis] = 0;
        }
        if (axis < 0 || c->fault) return c->fault;
    }
}

static const struct op copy = {"aclnnInplaceCopy", "aclnnInplaceCopyGetWorkspaceSize", NUM, copy_names,
                               kernel, false, false};
static const struct op cast = {"aclnnCast", "aclnnCastGetWorkspaceSize", NUM, cast_names, kernel, false, false};

static int phase_one(const struct op *op, const void *to, const void *from, int wanted,
                     uint64_t *size, void **executor) {
    struct phase_one p;
    int64_t strides[MAX_RANK];
    int code = kvd_open_phase_one(&p, op, LIBRARY, size, executor);
    if (!code) code = kvd_view(&p, TO, to, NN_PARAM_NULLPTR);
    if (!code) code = kvd_view(&p, FROM, from, NN_PARAM_NULLPTR);
    if (code) return leave(code);
    const struct tensor *out = &p.call.v[TO].t, *in = &p.call.v[FROM].t;
    if (wanted >= 0 && out->dtype != wanted)
        return leave(error(NN_PARAM_INVALID, "out has dtype %d, and %d is asked for", out->dtype, wanted));
    if (kvd_bits(out->dtype) % 8 || kvd_bits(in->dtype) % 8)
        return leave(error(NN_PARAM_INVALID, "dtypes %d and %d", in->dtype, out->dtype));
    if (out->format != in->format && (out->format == FORMAT_FRACTAL_NZ || in->format == FORMAT_FRACTAL_NZ))
        return leave(error(NN_PARAM_INVALID, "formats %d and %d", in->format, out->format));
    if (!broadcast(out, in, strides))
        return leave(error(NN_PARAM_INVALID, "the shapes of %s and %s do not fit", op->names[FROM],
                           op->names[TO]));
    p.call.empty = kvd_elements(out) == 0;
    return leave(kvd_finish(&p, 0, true, size, executor));
}

int aclnnInplaceCopyGetWorkspaceSize(void *self, const void *src, uint64_t *size, void **executor) {
    return phase_one(&copy, self, src, -1, size, executor);
}
int aclnnInplaceCopy(void *workspace, uint64_t size, void *executor, void *stream) {
    return kvd_phase_two(&copy, LIBRARY, "aclnnInplaceCopy", workspace, size, executor, stream);
}
int aclnnCastGetWorkspaceSize(const void *self, int dtype, void *out, uint64_t *size, void **executor) {
    return phase_one(&cast, out, self, dtype, size, executor);
}
int aclnnCast(void *workspace, uint64_t size, void *executor, void *stream) {
    return kvd_phase_two(&cast, LIBRARY, "aclnnCast", workspace, size, executor, stream);
}

// -- aclnnNpuFormatCast -----------------------------------------------------------------------------

static const char *const format_names[NUM] = {"dstOut", "src"};

static struct layout layout_of(const struct tensor *t) {
    struct layout l = {t->format, t->rank, t->storage_rank, {0}, {0}};
    memcpy(l.dims, t->dims, sizeof l.dims);
    memcpy(l.storage, t->storage, sizeof l.storage);
    return l;
}

static int change_format(struct call *c) {
    struct layout to = layout_of(&c->v[TO].t), from = layout_of(&c->v[FROM].t);
    kvd_transfer(&to, c->v[TO].base, &from, c->v[FROM].base, (size_t)kvd_bits(c->v[TO].t.dtype) / 8);
    return OK;
}

static const struct op format_cast = {"aclnnNpuFormatCast", "aclnnNpuFormatCastGetWorkspaceSize", NUM,
                                      format_names, change_format, false, true};

int aclnnNpuFormatCastCalculateSizeAndFormat(const void *src, int format, int dtype, int64_t **shape,
                                             uint64_t *rank, int *actual) {
    int code = enter("aclnnNpuFormatCastCalculateSizeAndFormat", CALLABLE, "%d, %d", format, dtype);
    const struct tensor *t = code ? NULL : kvd_check(src, H_TENSOR, "srcTensor");
    if (!t) return leave(code ? code : NN_PARAM_INVALID);
    if (!shape || !rank || !actual) return leave(violate(NN_PARAM_NULLPTR, "1.9", "NULL"));
    struct layout l = layout_of(t);
    if (!kvd_storage_of(&l, format, (size_t)kvd_bits(t->dtype) / 8))
        return leave(error(NN_PARAM_INVALID, "the emulated machine casts nothing to format %d", format));
    *shape = malloc(sizeof l.storage);  // the caller's, who deletes it
    if (!*shape) abort();
    memcpy(*shape, l.storage, sizeof l.storage);
    *rank = (uint64_t)l.storage_rank;
    *actual = format;
    return leave(OK);
}

int aclnnNpuFormatCastGetWorkspaceSize(const void *src, void *dst, uint64_t *size, void **executor) {
    struct phase_one p;
    int code = kvd_open_phase_one(&p, &format_cast, LIBRARY, size, executor);
    if (!code) code = kvd_view(&p, TO, dst, NN_PARAM_NULLPTR);
    if (!code) code = kvd_view(&p, FROM, src, NN_PARAM_NULLPTR);
    if (code) return leave(code);
    const struct tensor *out = &p.call.v[TO].t, *in = &p.call.v[FROM].t;
    struct layout to = layout_of(out), from = layout_of(in);
    bool same = out->dtype == in->dtype && out->rank == in->rank && kvd_bits(in->dtype) % 8 == 0;
    for (int i = 0; same && i < in->rank; i++) same = in->dims[i] == out->dims[i];
    if (!same || !kvd_contiguous(in) || !kvd_contiguous(out) || in->offset || out->offset)
        return leave(error(NN_PARAM_INVALID, "src and dst do not fit, or are no whole tensors"));
    if (!kvd_known_layout(&to) || !kvd_known_layout(&from))
        return leave(error(NN_PARAM_INVALID, "formats %d and %d", in->format, out->format));
    p.call.empty = kvd_elements(out) == 0;
    kvd_note_format(&to);
    return leave(kvd_finish(&p, 0, true, size, executor));
}
int aclnnNpuFormatCast(void *workspace, uint64_t size, void *executor, void *stream) {
    return kvd_phase_two(&format_cast, LIBRARY, "aclnnNpuFormatCast", workspace, size, executor, stream);
}
