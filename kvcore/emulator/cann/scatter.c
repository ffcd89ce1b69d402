// SPDX-License-Identifier: Apache-2.0
// aclnnScatterPaKvCache and aclnnScatterPaCache (section 1.10, 5.4-5.7): every scenario, and what the
// kernels of each SoC make of views.
#include "machine.h"

#include <stdlib.h>
#include <string.h>

enum { KEY, KEY_CACHE, SLOTS, VALUE, VALUE_CACHE, LENS, OFFSETS, SEQ_LENS, NUM };

static const char *const names[NUM] = {
    "key", "keyCacheRef", "slotMapping", "value", "valueCacheRef", "compressLens",
    "compressSeqOffset", "seqLens",
};

static bool is(const char *text, const char *wanted) { return !strcmp(text, wanted); }
static bool member(int x, const int *list) {
    while (*list != -1 && *list != x) list++;
    return *list == x;
}

static const int A2_TYPES[] = {FLOAT16, BF16, INT8, -1};
static const int ALL_TYPES[] = {
    FLOAT16, BF16, FLOAT32, INT8, UINT8, INT16, UINT16, INT32, UINT32, HIFLOAT8, FLOAT8_E5M2,
    FLOAT8_E4M3FN, FLOAT4_E2M1, FLOAT4_E1M2, -1,
};
static const int HALF_TYPES[] = {FLOAT16, BF16, -1};

static bool float4(int dtype) { return dtype == FLOAT4_E2M1 || dtype == FLOAT4_E1M2; }

// -- phase one ------------------------------------------------------------------------------------------------

static int check_types(struct call *c, bool key_only) {
    const int *types = c->soc == SOC_950 ? ALL_TYPES : A2_TYPES;
    bool nz = is(c->cache_mode, "PA_NZ");
    int key = c->v[KEY].t.dtype, value = key_only ? key : c->v[VALUE].t.dtype;
    if (!member(key, types) || !member(value, types))
        return error(NN_PARAM_INVALID, "dtypes %d and %d", key, value);
    if (c->v[KEY_CACHE].t.dtype != key || (!key_only && c->v[VALUE_CACHE].t.dtype != value))
        return error(NN_PARAM_INVALID, "a cache and its source differ in dtype");
    if (key != value && !nz) return error(NN_PARAM_INVALID, "key and value differ in dtype");
    // 5.5: PA_NZ on A2/A3: an int8 key with a fp16/bf16 value, not the reverse
    if (key != value && c->soc != SOC_950 && value == INT8)
        return error(NN_PARAM_INVALID, "key dtype %d with value dtype %d", key, value);
    int slots = c->v[SLOTS].t.dtype;
    if (slots != INT32 && slots != INT64) return error(NN_PARAM_INVALID, "slotMapping dtype %d", slots);
    for (int i = LENS; i < NUM; i++)  // 5.5
        if (c->v[i].present && c->v[i].t.dtype != slots)
            return error(NN_PARAM_INVALID, "%s and slotMapping differ in dtype", names[i]);
    return OK;
}

static int number(struct call *c, bool key_only) {  // 5.5's scenario, 0: none
    if (is(c->cache_mode, "PA_NZ")) return key_only ? 0 : 1;
    if (is(c->scatter_mode, "NHSD")) return key_only || c->v[KEY].t.rank != 3 ? 0 : 7;
    if (is(c->scatter_mode, "Nct")) return c->v[KEY].t.rank != 3 ? 0 : key_only ? 6 : 2;
    if (c->v[KEY].t.rank == 4) return 3;
    if (is(c->scatter_mode, "Alibi")) return key_only ? 0 : 4;
    if (is(c->scatter_mode, "Rope") || is(c->scatter_mode, "Omni")) return key_only ? 0 : 5;
    return key_only ? 6 : 2;
}

#define REFUSE(...) return error(NN_TILING_ERROR, __VA_ARGS__)
#define NEED(condition) \
    if (!(condition)) REFUSE("scenario %d: %s", c->scenario, #condition)

static int64_t lane_width(int dtype) { return 32 * 8 / kvd_bits(dtype); }  // C0

static int check_lane(struct call *c, int source, int cache) {
    const struct tensor *t = &c->v[source].t, *k = &c->v[cache].t, *key = &c->v[KEY].t;
    int64_t h = t->dims[t->rank - 2], d = t->dims[t->rank - 1], c0 = lane_width(t->dtype);
    for (int i = 0; i + 1 < t->rank; i++) NEED(t->rank == key->rank && t->dims[i] == key->dims[i]);
    NEED(k->rank == c->v[KEY_CACHE].t.rank);
    NEED(t->rank == 3 || (t->rank == 4 && c->scenario == 3));
    switch (c->scenario) {
    case 1:
        NEED(d % c0 == 0);  // 5.4: head_size * itemsize % 32 == 0
        NEED(kvd_same_dims(k, 4, (int64_t)-1, h * d / c0, (int64_t)-1, c0) ||
             kvd_same_dims(k, 5, (int64_t)-1, h, d / c0, (int64_t)-1, c0));
        NEED(k->dims[k->rank - 2] < 65535);
        NEED(k->dims[k->rank - 2] == c->v[KEY_CACHE].t.dims[k->rank - 2]);
        break;
    case 7:
        NEED(kvd_same_dims(k, 4, (int64_t)-1, h, (int64_t)-1, d));
        NEED(k->dims[2] == c->v[KEY_CACHE].t.dims[2]);
        NEED(d % c0 == 0 && h < 4095);
        break;
    case 2: case 6:
        NEED(kvd_same_dims(k, 4, (int64_t)-1, (int64_t)-1, h, d));
        NEED(k->dims[1] == c->v[KEY_CACHE].t.dims[1]);
        break;
    default:
        NEED(kvd_same_dims(k, 4, (int64_t)-1, (int64_t)-1, (int64_t)1, d));
        NEED(k->dims[1] == c->v[KEY_CACHE].t.dims[1]);
    }
    NEED(k->dims[0] == c->v[KEY_CACHE].t.dims[0]);
    return OK;
}

static int64_t block_size(struct call *c) {
    const struct tensor *k = &c->v[KEY_CACHE].t;
    return c->scenario == 1 ? k->dims[k->rank - 2] : c->scenario == 7 ? k->dims[2] : k->dims[1];
}

static int check_indices(struct call *c) {
    const struct tensor *key = &c->v[KEY].t, *slots = &c->v[SLOTS].t;
    int64_t h = key->dims[key->rank - 2], b = c->v[SEQ_LENS].present ? c->v[SEQ_LENS].t.dims[0] : 0;
    if (c->scenario == 1 || c->scenario == 2 || c->scenario == 6 || c->scenario == 7) {
        if (slots->rank != 1) return error(NN_PARAM_INVALID, "slotMapping: rank %d", slots->rank);
        NEED(slots->dims[0] == key->dims[0]);
        return OK;
    }
    NEED(c->v[LENS].present && c->v[SEQ_LENS].present);
    NEED(c->v[SEQ_LENS].t.rank == 1);
    const struct tensor *lens = &c->v[LENS].t;
    if (c->scenario == 3) {
        NEED(b == key->dims[0]);
        NEED(kvd_same_dims(slots, 2, b, h));
        NEED(kvd_same_dims(lens, 2, b, h));
    } else {
        NEED(kvd_same_dims(slots, 1, b * h));
        NEED(kvd_same_dims(lens, 1, b * h));
        if (c->scenario == 5) NEED(c->v[OFFSETS].present);
    }
    if (c->v[OFFSETS].present) NEED(kvd_same_dims(&c->v[OFFSETS].t, 1, b * h));
    return OK;
}

static int check_soc(struct call *c, bool key_only, bool cache_op) {
    int dtype = c->v[KEY].t.dtype, value = key_only ? dtype : c->v[VALUE].t.dtype;
    const struct tensor *key = &c->v[KEY].t;
    int64_t h = key->dims[key->rank - 2], tokens = key->dims[0];
    if (cache_op) {
        NEED(c->scenario == 6 || c->scenario == 3);
        NEED(c->scenario == 6 || kvd_bits(dtype) > 8 || dtype == INT8 || dtype == UINT8);
        return OK;
    }
    if (c->soc == SOC_950) {
        NEED(c->scenario != 6 && c->scenario != 7 && !key_only);
        bool none = !is(c->scatter_mode, "Nct");
        if (float4(dtype) || float4(value)) NEED(c->scenario == 1 || (c->scenario == 2 && none));
        if (c->scenario == 5) NEED(member(dtype, HALF_TYPES));
        if (c->settings.quirk_no_nct_950) NEED(none);
    } else {
        NEED(c->scenario != 3);
        if (c->scenario == 5) NEED(member(dtype, HALF_TYPES));  // tiling refuses int8
        if (c->scenario == 7) {
            int64_t width = h * (key->dims[2] + c->v[VALUE].t.dims[2]) * kvd_bits(dtype) / 8;
            NEED(width < 196608);
        }
    }
    if (c->scenario != 3) NEED(c->v[KEY_CACHE].t.dims[0] * block_size(c) >= tokens);
    return OK;
}

// 5.7: when the aclnn layer passes views on, without a copy.
static bool inner_contiguous(const struct tensor *t) {
    int64_t expected = 1;
    for (int i = t->rank - 1; i > 0; i--) {
        if (t->dims[i] != 1 && t->strides[i] != expected) return false;
        expected *= t->dims[i];
    }
    return true;
}

static bool last_is_one(const struct tensor *t) {
    return t->rank == 0 || t->dims[t->rank - 1] <= 1 || t->strides[t->rank - 1] == 1;
}

static bool passes_views(struct call *c, bool key_only) {
    if (c->v[KEY].t.rank != 3) return false;
    if (!is(c->scatter_mode, "") && !is(c->scatter_mode, "None")) return false;
    bool a = true, b = true;
    for (int lane = 0; lane < (key_only ? 1 : 2); lane++) {
        const struct tensor *source = &c->v[lane ? VALUE : KEY].t;
        const struct tensor *cache = &c->v[lane ? VALUE_CACHE : KEY_CACHE].t;
        a = a && kvd_contiguous(source) && inner_contiguous(cache);
        b = b && last_is_one(source) && last_is_one(cache);
    }
    return a || b;
}

static uint64_t copied_bytes(struct call *c, bool key_only) {
    uint64_t total = 0;
    for (int i = KEY_CACHE; i <= (key_only ? KEY_CACHE : VALUE_CACHE); i += VALUE_CACHE - KEY_CACHE)
        if (!kvd_contiguous(&c->v[i].t))
            total += (uint64_t)kvd_elements(&c->v[i].t) * (uint64_t)kvd_bits(c->v[i].t.dtype) / 8;
    return total;
}

static int check_modes(struct call *c) {
    static const char *const scatter[] = {"", "None", "Nct", "Alibi", "Rope", "Omni", "NHSD"};
    if (!is(c->cache_mode, "") && !is(c->cache_mode, "Norm") && !is(c->cache_mode, "PA_NZ"))
        REFUSE("cacheMode %s", c->cache_mode);
    for (size_t i = 0; i < sizeof scatter / sizeof *scatter; i++)
        if (is(c->scatter_mode, scatter[i])) return OK;
    REFUSE("scatterMode %s", c->scatter_mode);
}

static int copy_pair(struct call *c, const void *array, int64_t *pair, const char *name) {
    if (!array || is(c->cache_mode, "PA_NZ")) return OK;
    const struct int_array *a = kvd_check(array, H_INT_ARRAY, name);
    if (!a) return NN_PARAM_INVALID;
    if (is(c->scatter_mode, "Nct") && a->size != 2)
        return violate(NN_TILING_ERROR, "5.5", "%s: %d values, Nct needs 2", name, (int)a->size);
    for (uint64_t i = 0; i < a->size && i < 2; i++) pair[i] = a->values[i];
    return OK;
}

static int check(struct call *c, bool cache_op, bool key_only) {
    const struct tensor *key = &c->v[KEY].t;
    int code = check_types(c, key_only);
    if (!code) code = check_modes(c);
    if (code) return code;
    if (key->rank != 3 && key->rank != 4) return error(NN_PARAM_INVALID, "key: rank %d", key->rank);
    c->scenario = number(c, key_only);
    if (cache_op && key->rank == 4) c->scenario = 3;
    NEED(c->scenario != 0);
    if (!key_only) {
        code = check_lane(c, VALUE, VALUE_CACHE);
        if (code) return code;
    }
    code = check_lane(c, KEY, KEY_CACHE);
    if (!code) code = check_indices(c);
    if (!code) code = check_soc(c, key_only, cache_op);
    if (code) return code;
    if (is(c->scatter_mode, "Nct") && c->scenario != 1) {
        for (int lane = 0; lane < (key_only ? 1 : 2); lane++) {
            NEED(c->strides[lane] > 0 && c->offsets[lane] >= 0);
            if (!kvd_contiguous(&c->v[lane ? VALUE : KEY].t))
                return violate(NN_INNER_NULLPTR, "5.7", "Nct: the source must be described as contiguous");
        }
    }
    c->copies = !passes_views(c, key_only);
    return OK;
}

static bool empty(const struct view *v) { return v->present && kvd_elements(&v->t) == 0; }

// -- kernels --------------------------------------------------------------------------------------------------

// 5.7: strides that a kernel of A2/A3 ignores when it is handed a view.
static void as_contiguous(struct tensor *t, bool keep_first) {
    int64_t expected = 1;
    for (int i = t->rank - 1; i >= 0; i--) {
        if (i || !keep_first) t->strides[i] = expected;
        expected *= t->dims[i];
    }
}

static void ignore_strides(struct call *c) {
    if (c->soc == SOC_950 || c->copies) return;
    bool honoured = c->scenario == 2;  // scatter_pa_kv_cache_normal.h alone, the caches' axis 0
    as_contiguous(&c->v[KEY].t, false);
    as_contiguous(&c->v[VALUE].t, false);
    as_contiguous(&c->v[KEY_CACHE].t, honoured);
    as_contiguous(&c->v[VALUE_CACHE].t, honoured);
}

// -1: skip.  5.5: negative slots are skipped, others are not bounds-checked: a fault.
static int64_t slot(struct call *c, int64_t i) {
    int64_t s = kvd_index(c, &c->v[SLOTS], i);
    bool dives = c->settings.quirk_negative && c->soc != SOC_950 && c->scenario >= 4 && c->scenario != 6;
    if (s < 0 && !dives) return -1;
    if (s < 0 || s >= c->v[KEY_CACHE].t.dims[0] * block_size(c)) {
        kvd_kernel_fault(c, RT_VECTOR_CORE_EXCEPTION);
        return -1;
    }
    return s;
}

static void tokens(struct call *c, struct view *source, struct view *cache, int lane) {
    const struct tensor *s = &source->t, *k = &cache->t;
    const int64_t *ss = s->strides, *ks = k->strides;
    int64_t bs = block_size(c), heads = s->dims[1], d = s->dims[2], c0 = lane_width(s->dtype);
    for (int64_t i = 0; i < s->dims[0] && !c->fault; i++) {
        int64_t to = slot(c, i);
        if (to < 0) continue;
        int64_t block = to / bs * ks[0], row = to % bs;
        for (int64_t h = 0; h < heads; h++) {
            if (c->scenario == 1) {
                for (int64_t column = 0; column < d / c0; column++) {
                    int64_t n = h * (d / c0) + column;
                    int64_t place = k->rank == 4 ? n * ks[1] + row * ks[2]
                                                 : h * ks[1] + column * ks[2] + row * ks[3];
                    kvd_copy(c, cache, block + place, ks[k->rank - 1], source,
                               i * ss[0] + h * ss[1] + column * c0 * ss[2], ss[2], c0);
                }
            } else if (c->scenario == 7) {
                if (s->dtype == INT8) continue;  // 5.5: the int8 kernel has no NHSD branch
                kvd_copy(c, cache, block + h * ks[1] + row * ks[2], ks[3], source,
                           i * ss[0] + h * ss[1], ss[2], d);
            } else {
                bool nct = is(c->scatter_mode, "Nct");
                int64_t from = nct ? i * c->strides[lane] + c->offsets[lane] + h * d
                                   : i * ss[0] + h * ss[1];
                kvd_copy(c, cache, block + row * ks[1] + h * ks[2], ks[3], source, from,
                           nct ? 1 : ss[2], d);
            }
        }
    }
}

struct window {
    struct view *source, *cache;
    int64_t first, step;  // of token j: element first + j * step
};

static unsigned char *cache_row(struct call *c, struct view *cache, int64_t row, int64_t x) {
    const struct tensor *k = &cache->t;
    int64_t element = row / k->dims[1] * k->strides[0] + row % k->dims[1] * k->strides[1];
    return kvd_at(c, cache, element + x * k->strides[3], kvd_bits(k->dtype) / 8);
}

static int64_t load(const unsigned char *p, int dtype) {
    switch (dtype) {
    case INT8: return (int8_t)*p;
    case UINT8: return *p;
    case INT16: { int16_t x; memcpy(&x, p, 2); return x; }
    case UINT16: { uint16_t x; memcpy(&x, p, 2); return x; }
    case INT32: { int32_t x; memcpy(&x, p, 4); return x; }
    default: { uint32_t x; memcpy(&x, p, 4); return x; }
    }
}

static void mean(struct call *c, struct window *w, int64_t from, int64_t count, int64_t row) {
    const struct tensor *s = &w->source->t;
    int dtype = s->dtype;
    int64_t bytes = kvd_bits(dtype) / 8;
    for (int64_t x = 0; x < s->dims[s->rank - 1] && !c->fault; x++) {
        float sum = 0;
        uint32_t total = 0;
        for (int64_t j = 0; j < count; j++) {
            int64_t element = w->first + (from + j) * w->step + x * s->strides[s->rank - 1];
            unsigned char *p = kvd_at(c, w->source, element, bytes);
            if (!p) return;
            if (kvd_is_float(dtype)) sum += kvd_decode(p, dtype);
            else total += (uint32_t)load(p, dtype);
        }
        unsigned char *out = cache_row(c, w->cache, row, x);
        if (!out) return;
        if (kvd_is_float(dtype)) {
            kvd_encode(sum / (float)count, out, dtype);
            continue;
        }
        bool is_signed = dtype == INT8 || dtype == INT16 || dtype == INT32;
        int64_t number = is_signed ? (int64_t)(int32_t)total : (int64_t)total;
        uint32_t result = (uint32_t)(number / count);
        memcpy(out, &result, (size_t)bytes);  // little end first, as everywhere in CANN
    }
}

static void runs(struct call *c, struct view *source, struct view *cache) {
    const struct tensor *s = &source->t, *k = &cache->t;
    bool padded = s->rank == 4, omni = is(c->scatter_mode, "Omni");
    bool alibi = is(c->scatter_mode, "Alibi") || (!c->v[OFFSETS].present && c->scenario == 3);
    int64_t heads = s->dims[s->rank - 2], d = s->dims[s->rank - 1], before = 0;
    int64_t rows = k->dims[0] * k->dims[1];
    for (int64_t b = 0; b < c->v[SEQ_LENS].t.dims[0] && !c->fault; b++) {
        int64_t n = kvd_index(c, &c->v[SEQ_LENS], b);
        if (n < 0 || n > (padded ? s->dims[1] : s->dims[0] - before)) {
            kvd_kernel_fault(c, RT_AICORE_EXCEPTION);
            return;
        }
        for (int64_t h = 0; h < heads && !c->fault; h++) {
            int64_t i = b * heads + h, to = slot(c, i), w = kvd_index(c, &c->v[LENS], i), o = -1;
            if (!alibi) o = kvd_index(c, &c->v[OFFSETS], i);
            if (to < 0) continue;
            struct window from = {source, cache, 0, s->strides[padded ? 1 : 0]};
            from.first = h * s->strides[s->rank - 2] +
                         (padded ? b * s->strides[0] : before * s->strides[0]);
            int64_t head = 0, tail = 0;  // tokens 0..head-1, a window, tokens tail..n-1
            if (alibi) tail = n - w;
            else if (o == -1) w = 0;
            else head = o, tail = o + w;
            bool folded = !alibi && !omni && o != -1 && w > 0;
            int64_t length = head + folded + n - tail;
            if (w < 0 || o < -1 || tail < 0 || tail > n || head > n || to + length > rows) {
                kvd_kernel_fault(c, RT_AICORE_EXCEPTION);
                return;
            }
            for (int64_t j = 0; j < length && !c->fault; j++) {
                int64_t row = to + j, token = j < head ? j : tail + j - head - folded;
                if (folded && j == head) {
                    mean(c, &from, o, w, row);
                    continue;
                }
                int64_t element = row / k->dims[1] * k->strides[0] + row % k->dims[1] * k->strides[1];
                kvd_copy(c, cache, element, k->strides[3], source, from.first + token * from.step,
                           s->strides[s->rank - 1], d);
            }
        }
        before += padded ? 0 : n;
    }
}

static int kernel(struct call *c) {
    ignore_strides(c);
    int lanes = c->v[VALUE].present && c->v[VALUE].t.rank ? 2 : 1;
    for (int lane = 0; lane < lanes && !c->fault; lane++) {
        struct view *source = &c->v[lane ? VALUE : KEY], *cache = &c->v[lane ? VALUE_CACHE : KEY_CACHE];
        if (c->scenario == 3 || c->scenario == 4 || c->scenario == 5) runs(c, source, cache);
        else tokens(c, source, cache, lane);
    }
    return c->fault;
}

// -- the interface ----------------------------------------------------------------------------------------------

static const struct op scatter = {"aclnnScatterPaKvCache", "aclnnScatterPaKvCacheGetWorkspaceSize", NUM,
                                  names, kernel, true, false};
static const struct op cache_op = {"aclnnScatterPaCache", "aclnnScatterPaCacheGetWorkspaceSize", NUM,
                                   names, kernel, false, false};

static int key_only_code(struct call *c, bool *key_only) {
    struct view *value = &c->v[VALUE], *cache = &c->v[VALUE_CACHE];
    *key_only = (!value->present || !value->t.rank) && (!cache->present || !cache->t.rank);
    if (empty(&c->v[KEY]) || empty(&c->v[KEY_CACHE])) {
        // 5.6: success only together with value NULL or empty; else it goes on to tiling
        c->empty = !value->present || empty(value) || *key_only;
        return c->empty ? OK : error(NN_TILING_ERROR, "key is empty and value is not");
    }
    if (!*key_only) {
        if (value->present && cache->present && value->t.rank && cache->t.rank) return OK;
        return error(NN_PARAM_INVALID, "one of value and valueCache is there, the other is not");
    }
    if (c->soc == SOC_950) return error(NN_TILING_ERROR, "key only: use aclnnScatterPaCache");
    if (!value->present || !cache->present)  // 5.5: tiling reads them without a check
        return violate(NN_INNER_NULLPTR, "5.5", "key only: value and valueCache are NULL, not 0-dim");
    if (value->t.dtype != c->v[KEY].t.dtype || cache->t.dtype != c->v[KEY].t.dtype)
        return violate(NN_PARAM_INVALID, "5.5", "key only: the 0-dim tensors have another dtype");
    return OK;
}

int aclnnScatterPaKvCacheGetWorkspaceSize(
    const void *key, void *key_cache, const void *slots, const void *value, void *value_cache,
    const void *lens, const void *seq_offset, const void *seq_lens, char *cache_mode,
    char *scatter_mode, const void *strides, const void *offsets, uint64_t *size, void **executor) {
    struct phase_one p;
    struct call *c = &p.call;
    bool key_only = false;
    int code = kvd_open_phase_one(&p, &scatter, LIBRARY, size, executor);
    const void *given[NUM] = {key, key_cache, slots, value, value_cache, lens, seq_offset, seq_lens};
    for (int i = 0; i < NUM && !code; i++)  // 7: a NULL required one; the code says 561103
        code = kvd_view(&p, i, given[i], i <= SLOTS ? NN_INNER_NULLPTR : 0);
    if (!code) code = kvd_text(&p, 0, cache_mode, c->cache_mode, "cacheMode");
    if (!code) code = kvd_text(&p, 1, scatter_mode, c->scatter_mode, "scatterMode");
    if (!code && c->soc > SOC_950) code = error(NN_NO_KERNEL_PACKAGE, "not on this SoC");
    if (!code) code = copy_pair(c, strides, c->strides, "strides");
    if (!code) code = copy_pair(c, offsets, c->offsets, "offsets");
    bool nct = is(c->scatter_mode, "Nct") && !is(c->cache_mode, "PA_NZ");
    if (!code && nct && (!strides || !offsets))
        code = violate(NN_TILING_ERROR, "5.5", "Nct: strides or offsets are NULL: tiling reads them");
    if (!code) code = key_only_code(c, &key_only);
    if (!code && !c->empty) code = check(c, false, key_only);
    if (code) return leave(code);
    // 5.2: the contiguous path ends in a copy onto the same address: not repeatable
    return leave(kvd_finish(&p, c->copies ? copied_bytes(c, key_only) : 0, false, size, executor));
}

int aclnnScatterPaKvCache(void *workspace, uint64_t size, void *executor, void *stream) {
    return kvd_phase_two(&scatter, LIBRARY, "aclnnScatterPaKvCache", workspace, size, executor, stream);
}

int aclnnScatterPaCacheGetWorkspaceSize(const void *key, void *key_cache, const void *slots,
                                        const void *lens, const void *seq_offset,
                                        const void *seq_lens, char *cache_mode, uint64_t *size,
                                        void **executor) {
    struct phase_one p;
    struct call *c = &p.call;
    int code = kvd_open_phase_one(&p, &cache_op, LIBRARY, size, executor);
    const void *given[NUM] = {key, key_cache, slots, NULL, NULL, lens, seq_offset, seq_lens};
    for (int i = 0; i < NUM && !code; i++)
        code = kvd_view(&p, i, given[i], i <= SLOTS ? NN_PARAM_NULLPTR : 0);
    if (!code) code = kvd_text(&p, 0, cache_mode, c->cache_mode, "cacheMode");
    if (!code && c->soc != SOC_950) code = error(NN_NO_KERNEL_PACKAGE, "950 only");  // 1.10
    if (!code && !is(c->cache_mode, "") && !is(c->cache_mode, "Norm"))
        code = error(NN_TILING_ERROR, "cacheMode %s", c->cache_mode);
    c->empty = !code && (empty(&c->v[KEY]) || empty(&c->v[KEY_CACHE]));
    if (!code && !c->empty) code = check(c, true, true);
    if (code) return leave(code);
    return leave(kvd_finish(&p, c->copies ? copied_bytes(c, true) : 0, !c->copies, size, executor));
}

int aclnnScatterPaCache(void *workspace, uint64_t size, void *executor, void *stream) {
    return kvd_phase_two(&cache_op, LIBRARY, "aclnnScatterPaCache", workspace, size, executor, stream);
}
