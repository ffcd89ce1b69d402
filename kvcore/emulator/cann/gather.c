// SPDX-License-Identifier: Apache-2.0
// aclnnGatherPaKvCache (section 1.10, 5.4, 5.7).
#include "machine.h"

#include <string.h>

enum { KEY_CACHE, VALUE_CACHE, TABLES, SEQ_LENS, KEY, VALUE, SEQ_OFFSET, NUM };

static const char *const names[NUM] = {
    "keyCache", "valueCache", "blockTables", "seqLens", "keyRef", "valueRef", "seqOffset",
};

static bool nz(const struct call *c) { return !strcmp(c->cache_mode, "PA_NZ"); }
static bool float8_16(int dtype) { return dtype == FLOAT16 || dtype == BF16; }

#define NEED(condition) \
    if (!(condition)) return error(NN_TILING_ERROR, "%s", #condition)

static int check_types(struct call *c) {
    int key = c->v[KEY].t.dtype, value = c->v[VALUE].t.dtype, tables = c->v[TABLES].t.dtype;
    if (c->v[KEY_CACHE].t.dtype != key || c->v[VALUE_CACHE].t.dtype != value)
        return error(NN_PARAM_INVALID, "a cache and its output differ in dtype");
    bool mixed = c->soc == SOC_950 && key == FLOAT8_E4M3FN && float8_16(value);
    if (key != value && !mixed) return error(NN_PARAM_INVALID, "dtypes %d and %d", key, value);
    bool narrow = float8_16(key) || key == INT8;
    bool wide = kvd_is_float(key) || (key >= INT8 && key <= UINT32 && key != 5);
    if (!(c->soc == SOC_950 ? wide : narrow)) return error(NN_PARAM_INVALID, "dtype %d", key);
    if (tables != INT32 && (tables != INT64 || c->soc != SOC_950))  // 5.4: A2/A3 int32 only
        return error(NN_PARAM_INVALID, "blockTables dtype %d", tables);
    if (c->v[SEQ_LENS].t.dtype != tables || (c->v[SEQ_OFFSET].present && c->v[SEQ_OFFSET].t.dtype != tables))
        return error(NN_PARAM_INVALID, "the index tensors differ in dtype");
    return OK;
}

static int check_lane(struct call *c, int source, int out) {
    const struct tensor *k = &c->v[source].t, *t = &c->v[out].t;
    int64_t item = kvd_bits(t->dtype) / 8, width;
    NEED(k->rank == 4);
    NEED(k->dims[0] == c->v[KEY_CACHE].t.dims[0]);
    if (nz(c)) {
        width = k->dims[1] * k->dims[3];
        NEED(k->dims[3] == 32 / item);
        NEED(k->dims[2] == c->v[KEY_CACHE].t.dims[2] && k->dims[2] > 0);
        NEED(kvd_same_dims(t, 2, c->v[KEY].t.dims[0], width));  // 5.4: 2-D for PA_NZ
    } else {
        width = k->dims[2] * k->dims[3];
        NEED(k->dims[1] == c->v[KEY_CACHE].t.dims[1] && k->dims[1] > 0);
        NEED(k->dims[2] == c->v[KEY_CACHE].t.dims[2]);
        NEED(kvd_same_dims(t, 3, c->v[KEY].t.dims[0], k->dims[2], k->dims[3]));
    }
    if (c->soc != SOC_950) NEED(width * item % 32 == 0 && width * item <= 148 * 1024);
    return OK;
}

static int check(struct call *c) {
    int code = check_types(c);
    if (code) return code;
    if (strcmp(c->cache_mode, "") && strcmp(c->cache_mode, "Norm") && !nz(c))
        return error(NN_TILING_ERROR, "cacheMode %s", c->cache_mode);
    code = check_lane(c, KEY_CACHE, KEY);
    if (!code) code = check_lane(c, VALUE_CACHE, VALUE);
    if (code) return code;
    NEED(c->v[TABLES].t.rank == 2);
    NEED(kvd_same_dims(&c->v[SEQ_LENS].t, 1, c->v[TABLES].t.dims[0] + c->flag));
    if (c->v[SEQ_OFFSET].present)
        NEED(kvd_same_dims(&c->v[SEQ_OFFSET].t, 1, c->v[TABLES].t.dims[0]));
    for (int i = 0; i < NUM; i++) {  // 5.7: outer strides are passed on, others are copied
        const struct tensor *t = &c->v[i].t;
        if (i == TABLES || i == SEQ_LENS || i == SEQ_OFFSET) continue;
        if (t->dims[t->rank - 1] > 1 && t->strides[t->rank - 1] != 1) c->copies = true;
    }
    return OK;
}

static void as_contiguous(struct tensor *t, bool keep_first) {
    int64_t expected = 1;
    for (int i = t->rank - 1; i >= 0; i--) {
        if (i || !keep_first) t->strides[i] = expected;
        expected *= t->dims[i];
    }
}

static void token(struct call *c, int lane, int64_t block, int64_t row, int64_t to) {
    struct view *cache = &c->v[lane ? VALUE_CACHE : KEY_CACHE], *out = &c->v[lane ? VALUE : KEY];
    const int64_t *ks = cache->t.strides, *os = out->t.strides, *kd = cache->t.dims;
    if (block < 0 || block >= kd[0]) {  // the 950 fills such rows with zeros
        for (int64_t i = 0; i < out->t.dims[1] * (nz(c) ? 1 : out->t.dims[2]) && !c->fault; i++) {
            int64_t place = nz(c) ? i * os[1] : i / out->t.dims[2] * os[1] + i % out->t.dims[2] * os[2];
            int64_t bytes = kvd_bits(out->t.dtype) / 8;
            unsigned char *at = kvd_at(c, out, to * os[0] + place, bytes);
            if (at) memset(at, 0, (size_t)bytes);
        }
        return;
    }
    if (nz(c)) {
        for (int64_t column = 0; column < kd[1] && !c->fault; column++)
            kvd_copy(c, out, to * os[0] + column * kd[3] * os[1], os[1], cache,
                       block * ks[0] + column * ks[1] + row * ks[2], ks[3], kd[3]);
        return;
    }
    for (int64_t h = 0; h < kd[2] && !c->fault; h++)
        kvd_copy(c, out, to * os[0] + h * os[1], os[2], cache,
                   block * ks[0] + row * ks[1] + h * ks[2], ks[3], kd[3]);
}

static int kernel(struct call *c) {
    if (c->soc != SOC_950 && !c->copies) {  // 5.7: A2/A3 honour the caches' axis 0, in ND only
        as_contiguous(&c->v[KEY].t, false);
        as_contiguous(&c->v[VALUE].t, false);
        as_contiguous(&c->v[KEY_CACHE].t, !nz(c));
        as_contiguous(&c->v[VALUE_CACHE].t, !nz(c));
    }
    const struct tensor *k = &c->v[KEY_CACHE].t, *tables = &c->v[TABLES].t;
    int64_t bs = k->dims[nz(c) ? 2 : 1], to = 0;
    for (int64_t b = 0; b < tables->dims[0] && !c->fault; b++) {
        int64_t n = kvd_index(c, &c->v[SEQ_LENS], b + c->flag);
        if (c->flag) n -= kvd_index(c, &c->v[SEQ_LENS], b);
        int64_t skip = c->v[SEQ_OFFSET].present ? kvd_index(c, &c->v[SEQ_OFFSET], b) : 0;
        bool undivided = c->settings.quirk_offset_nz && nz(c) && c->soc != SOC_950;
        int64_t first = undivided ? skip : skip / bs;
        // The kernels read no entry for a request without tokens, wherever its offset points.
        if (n < 0 || (n && skip < 0) || to + n > c->v[KEY].t.dims[0]) {
            kvd_kernel_fault(c, RT_AICORE_EXCEPTION);
            break;
        }
        for (int64_t j = 0; j < n && !c->fault; j++, to++) {
            int64_t column = first + j / bs;
            int64_t block = column < tables->dims[1]
                ? kvd_index(c, &c->v[TABLES], b * tables->dims[1] + column) : -1;
            if ((block < 0 || block >= k->dims[0]) && c->soc != SOC_950) {
                kvd_kernel_fault(c, RT_AICORE_EXCEPTION);
                break;
            }
            token(c, 0, block, j % bs, to);
            token(c, 1, block, j % bs, to);
        }
    }
    return c->fault;
}

static const struct op gather = {"aclnnGatherPaKvCache", "aclnnGatherPaKvCacheGetWorkspaceSize", NUM,
                                 names, kernel, false, false};

int aclnnGatherPaKvCacheGetWorkspaceSize(const void *key_cache, const void *value_cache,
                                         const void *tables, const void *seq_lens, void *key,
                                         void *value, const void *seq_offset, char *cache_mode,
                                         bool cumulative, uint64_t *size, void **executor) {
    struct phase_one p;
    struct call *c = &p.call;
    int code = kvd_open_phase_one(&p, &gather, LIBRARY, size, executor);
    const void *given[NUM] = {key_cache, value_cache, tables, seq_lens, key, value, seq_offset};
    for (int i = 0; i < NUM && !code; i++)  // 5.7: a required NULL is a true 161001 here
        code = kvd_view(&p, i, given[i], i == SEQ_OFFSET ? 0 : NN_PARAM_NULLPTR);
    if (!code) code = kvd_text(&p, 0, cache_mode, c->cache_mode, "cacheMode");
    if (!code && c->soc > SOC_950) code = error(NN_NO_KERNEL_PACKAGE, "not on this SoC");
    c->flag = cumulative;
    for (int i = 0; i < NUM && !code; i++)  // 5.7: an empty cache or output: success, ws 0
        if (i != TABLES && i != SEQ_LENS && i != SEQ_OFFSET && kvd_elements(&c->v[i].t) == 0)
            c->empty = true;
    if (!code && !c->empty) code = check(c);
    if (code) return leave(code);
    uint64_t copied = 0;
    for (int i = KEY_CACHE; c->copies && i <= VALUE_CACHE; i++)
        copied += (uint64_t)kvd_elements(&c->v[i].t) * (uint64_t)kvd_bits(c->v[i].t.dtype) / 8;
    return leave(kvd_finish(&p, copied, !c->copies, size, executor));
}

int aclnnGatherPaKvCache(void *workspace, uint64_t size, void *executor, void *stream) {
    return kvd_phase_two(&gather, LIBRARY, "aclnnGatherPaKvCache", workspace, size, executor, stream);
}
