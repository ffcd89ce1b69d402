// SPDX-License-Identifier: Apache-2.0
// aclnnScatterNdUpdate (CANN's aclnnop/aclnn_scatter_nd_update.h): rows of a tensor, named by the
// indices of their first axes, take new values.
#include "machine.h"

#include <string.h>

enum { VAR, INDICES, UPDATES, NUM };

static const char *const names[NUM] = {"varRef", "indices", "updates"};

static int check(struct call *c) {
    const struct tensor *var = &c->v[VAR].t, *at = &c->v[INDICES].t, *rows = &c->v[UPDATES].t;
    if (at->dtype != INT32 && at->dtype != INT64)
        return error(NN_PARAM_INVALID, "indices: dtype %d", at->dtype);
    if (var->dtype != rows->dtype || kvd_bits(var->dtype) % 8)
        return error(NN_PARAM_INVALID, "varRef and updates: dtypes %d and %d", var->dtype, rows->dtype);
    int depth = at->rank ? (int)at->dims[at->rank - 1] : 0;
    if (depth < 1 || depth > var->rank)
        return error(NN_PARAM_INVALID, "indices name %d axes of %d", depth, var->rank);
    if (rows->rank != at->rank - 1 + var->rank - depth)
        return error(NN_PARAM_INVALID, "updates: rank %d", rows->rank);
    for (int i = 0; i < rows->rank; i++) {
        int64_t wanted = i < at->rank - 1 ? at->dims[i] : var->dims[i - at->rank + 1 + depth];
        if (rows->dims[i] != wanted)
            return error(NN_PARAM_INVALID, "updates: %lld along axis %d, expected %lld",
                         (long long)rows->dims[i], i, (long long)wanted);
    }
    return OK;
}

// Where the n-th element of these axes lies, counted row by row.
static int64_t place(const struct tensor *t, int first, int past, int64_t n) {
    int64_t element = 0;
    for (int i = past - 1; i >= first; i--) {
        element += n % t->dims[i] * t->strides[i];
        n /= t->dims[i];
    }
    return element;
}

static int kernel(struct call *c) {
    struct view *var = &c->v[VAR], *at = &c->v[INDICES], *rows = &c->v[UPDATES];
    int outer = at->t.rank - 1, depth = (int)at->t.dims[outer];
    int64_t count = 1, width = 1;
    for (int i = 0; i < outer; i++) count *= at->t.dims[i];
    for (int i = depth; i < var->t.rank; i++) width *= var->t.dims[i];
    for (int64_t row = 0; row < count && !c->fault; row++) {
        int64_t start = 0;
        for (int k = 0; k < depth; k++) {
            int64_t index = kvd_index(c, at, row * depth + k);
            if (index < 0 || index >= var->t.dims[k]) kvd_kernel_fault(c, RT_VECTOR_CORE_EXCEPTION);
            start += index * var->t.strides[k];
        }
        int64_t from = place(&rows->t, 0, outer, row);
        for (int64_t i = 0; i < width && !c->fault; i++)
            kvd_copy(c, var, start + place(&var->t, depth, var->t.rank, i), 1, rows,
                     from + place(&rows->t, outer, rows->t.rank, i), 1, 1);
    }
    return c->fault;
}

static const struct op update = {"aclnnScatterNdUpdate", "aclnnScatterNdUpdateGetWorkspaceSize", NUM,
                                 names, kernel, false, false};

int aclnnScatterNdUpdateGetWorkspaceSize(void *var, const void *indices, const void *updates,
                                         uint64_t *size, void **executor) {
    struct phase_one p;
    int code = kvd_open_phase_one(&p, &update, LIBRARY, size, executor);
    const void *given[NUM] = {var, indices, updates};
    for (int i = 0; i < NUM && !code; i++) code = kvd_view(&p, i, given[i], NN_PARAM_NULLPTR);
    if (!code) code = check(&p.call);
    if (code) return leave(code);
    p.call.empty = kvd_elements(&p.call.v[UPDATES].t) == 0;
    return leave(kvd_finish(&p, 0, true, size, executor));
}

int aclnnScatterNdUpdate(void *workspace, uint64_t size, void *executor, void *stream) {
    return kvd_phase_two(&update, LIBRARY, "aclnnScatterNdUpdate", workspace, size, executor, stream);
}
