// SPDX-License-Identifier: Apache-2.0
// aclnnConstantPadNd (CANN's aclnnop/aclnn_constant_pad_nd.h): torch_npu's collectives call it below
// torch's dispatcher, so that no fallback could take its place.
#include "machine.h"

#include <string.h>

enum { OUT, SELF, NUM };

static const char *const names[NUM] = {"outOut", "self"};

// Elements of padding before and after an axis, from a list of pairs, the last axis first.
static int64_t before(const struct call *c, int axis) { return c->pads[2 * (c->v[OUT].t.rank - 1 - axis)]; }
static int64_t after(const struct call *c, int axis) {
    return c->pads[2 * (c->v[OUT].t.rank - 1 - axis) + 1];
}

static int kernel(struct call *c) {
    struct view *out = &c->v[OUT], *in = &c->v[SELF];
    int64_t bytes = kvd_bits(out->t.dtype) / 8, count = kvd_elements(&out->t);
    for (int64_t n = 0; n < count && !c->fault; n++) {
        int64_t rest = n, to = 0, from = 0;
        bool inside = true;
        for (int i = out->t.rank - 1; i >= 0; i--) {
            int64_t index = rest % out->t.dims[i], source = index - before(c, i);
            rest /= out->t.dims[i];
            to += index * out->t.strides[i];
            inside = inside && source >= 0 && source < in->t.dims[i];
            if (inside) from += source * in->t.strides[i];
        }
        unsigned char *write = kvd_at(c, out, to, bytes);
        const unsigned char *read = inside && write ? kvd_at(c, in, from, bytes) : c->value;
        if (write && read) memcpy(write, read, (size_t)bytes);
    }
    return c->fault;
}

static const struct op pad = {"aclnnConstantPadNd", "aclnnConstantPadNdGetWorkspaceSize", NUM, names,
                              kernel, false, false};

int aclnnConstantPadNdGetWorkspaceSize(const void *self, const void *pads, const void *value, void *out,
                                       uint64_t *size, void **executor) {
    struct phase_one p;
    struct call *c = &p.call;
    int code = kvd_open_phase_one(&p, &pad, LIBRARY, size, executor);
    if (!code) code = kvd_view(&p, OUT, out, NN_PARAM_NULLPTR);
    if (!code) code = kvd_view(&p, SELF, self, NN_PARAM_NULLPTR);
    const struct int_array *given = code ? NULL : kvd_check(pads, H_INT_ARRAY, "pad");
    const struct scalar *scalar = given ? kvd_check(value, H_SCALAR, "value") : NULL;
    if (!scalar) return leave(code ? code : NN_PARAM_INVALID);
    const struct tensor *to = &c->v[OUT].t, *from = &c->v[SELF].t;
    if (given->size % 2 || given->size > 2 * (uint64_t)from->rank || to->rank != from->rank ||
        to->dtype != from->dtype || kvd_bits(to->dtype) % 8)
        return leave(error(NN_PARAM_INVALID, "%d pads of %d axes", (int)given->size, from->rank));
    memcpy(c->pads, given->values, given->size * sizeof *c->pads);
    for (int i = 0; i < to->rank; i++)
        if (to->dims[i] != from->dims[i] + before(c, i) + after(c, i))
            return leave(error(NN_PARAM_INVALID, "out: %lld along axis %d", (long long)to->dims[i], i));
    kvd_convert(scalar->value, scalar->dtype, c->value, to->dtype);
    c->empty = kvd_elements(to) == 0;
    return leave(kvd_finish(&p, 0, true, size, executor));
}

int aclnnConstantPadNd(void *workspace, uint64_t size, void *executor, void *stream) {
    return kvd_phase_two(&pad, LIBRARY, "aclnnConstantPadNd", workspace, size, executor, stream);
}
