// SPDX-License-Identifier: Apache-2.0
// aclnnGatherSelectionKvCache (section 1.10, 5.10; the steps by number are those of docs/gather.md).
#include "machine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    SEL_ROPE, SEL_KV, SEL_TABLE, STATUS, TOPK, FULL_ROPE, FULL_KV, FULL_TABLE, KV_LENS, Q_LENS, OUT, NUM,
};

static const char *const names[NUM] = {
    "selectionKRopeRef", "selectionKvCacheRef", "selectionKvBlockTableRef",
    "selectionKvBlockStatusRef", "selectionTopkIndices", "fullKRope", "fullKvCache",
    "fullKvBlockTable", "fullKvActualSeq", "fullQActualSeq", "selectionKvActualSeqOut",
};

#define NEED(condition) \
    if (!(condition)) return error(NN_TILING_ERROR, "%s", #condition)

static int64_t num_rows(const struct call *c) {
    const struct tensor *t = &c->v[TOPK].t;
    return t->rank == 4 ? t->dims[0] * t->dims[1] : t->dims[0];
}

static int check_types(struct call *c) {
    int dtype = c->v[SEL_KV].t.dtype;
    if (dtype != FLOAT16 && dtype != BF16 && dtype != INT8)
        return error(NN_PARAM_INVALID, "selectionKvCache dtype %d", dtype);
    for (int i = 0; i < NUM; i++) {
        bool cache = i == SEL_ROPE || i == SEL_KV || i == FULL_ROPE || i == FULL_KV;
        if (c->v[i].t.dtype != (cache ? dtype : INT32))
            return error(NN_PARAM_INVALID, "%s: dtype %d", names[i], c->v[i].t.dtype);
        if (c->v[i].t.format != FORMAT_ND)  // 5.10: all tensors ND, contiguous
            return violate(NN_PARAM_INVALID, "5.10", "%s: format %d", names[i], c->v[i].t.format);
        if (!kvd_contiguous(&c->v[i].t))
            return violate(NN_PARAM_INVALID, "5.10", "%s is not contiguous", names[i]);
    }
    return OK;
}

static int check(struct call *c) {
    int code = check_types(c);
    if (code) return code;
    const struct tensor *kv = &c->v[SEL_KV].t, *full = &c->v[FULL_KV].t, *topk = &c->v[TOPK].t;
    const struct tensor *status = &c->v[STATUS].t, *table = &c->v[SEL_TABLE].t;
    const struct tensor *rope = &c->v[SEL_ROPE].t, *full_rope = &c->v[FULL_ROPE].t;
    NEED(kv->rank == 3 && full->rank == 3 && kv->dims[2] == full->dims[2] && kv->dims[2] <= 656);
    if (kvd_elements(rope) == 0 || kvd_elements(full_rope) == 0) {
        // 5.10: an empty rope is 1-D [0], both of them
        NEED(kvd_same_dims(rope, 1, (int64_t)0) && kvd_same_dims(full_rope, 1, (int64_t)0));
    } else {
        NEED(kvd_same_dims(rope, 3, kv->dims[0], kv->dims[1], (int64_t)-1) && rope->dims[2] <= 64);
        NEED(kvd_same_dims(full_rope, 3, full->dims[0], full->dims[1], rope->dims[2]));
        NEED(kv->dtype != INT8);
    }
    NEED(topk->rank == 4 || topk->rank == 3);
    NEED(status->rank == topk->rank && topk->dims[topk->rank - 2] == 1);
    for (int i = 0; i + 1 < topk->rank; i++) NEED(status->dims[i] == topk->dims[i]);
    int64_t k = topk->dims[topk->rank - 1], rows = num_rows(c), batch = c->v[KV_LENS].t.dims[0];
    NEED(status->dims[topk->rank - 1] == k + 1 && k > 0 && k <= 2048);
    NEED(c->v[KV_LENS].t.rank == 1 && batch > 0 && kvd_same_dims(&c->v[Q_LENS].t, 1, batch));
    NEED(kvd_same_dims(&c->v[FULL_TABLE].t, 2, batch, (int64_t)-1));
    NEED(rows % batch == 0 && rows / batch <= 7 && (topk->rank == 3 || topk->dims[0] == batch));
    NEED(c->block > 0 && (k <= 32 || c->block == 1));
    NEED(kv->dims[1] % c->block == 0 && full->dims[1] % c->block == 0 && kv->dims[1] && full->dims[1]);
    NEED(table->rank == 2 && table->dims[0] >= rows);
    NEED(table->dims[1] >= (k * c->block + kv->dims[1] - 1) / kv->dims[1]);
    NEED(kv->dims[0] >= rows * table->dims[1]);
    NEED(kvd_same_dims(&c->v[OUT].t, 1, table->dims[0]));  // 7: block_table.size(0)
    return OK;
}

// -- the kernel -------------------------------------------------------------------------------------------------

struct row {
    int64_t *wanted, *held, *place_of, *id_at;  // ids in order, place by its place, place by wanted
    int64_t n, last, tail;
};

static void put(struct call *c, struct view *v, int64_t element, int32_t x) {
    unsigned char *at = kvd_at(c, v, element, 4);
    if (at) memcpy(at, &x, 4);
}

// The first element of token t in the selection (row >= 0) or the full cache of batch b.
static int64_t locate(struct call *c, struct view *cache, struct view *table, int64_t line, int64_t t) {
    int64_t bs = cache->t.dims[1], column = t / bs;
    int64_t block = column < table->t.dims[1] ? kvd_index(c, table, line * table->t.dims[1] + column) : -1;
    if (block < 0 || block >= cache->t.dims[0]) {
        kvd_kernel_fault(c, RT_AICORE_EXCEPTION);
        return -1;
    }
    return (block * bs + t % bs) * cache->t.dims[2];
}

// Reads (or writes) `count` tokens from token `first` on.
static void tokens(struct call *c, struct view *cache, struct view *table, int64_t line, int64_t first,
                   int64_t count, unsigned char *bytes, bool write) {
    int64_t width = cache->t.dims[2] * kvd_bits(cache->t.dtype) / 8;
    for (int64_t j = 0; j < count && !c->fault; j++) {
        int64_t element = locate(c, cache, table, line, first + j);
        unsigned char *at = c->fault ? NULL : kvd_at(c, cache, element, width);
        if (at && write) memcpy(at, bytes + j * width, (size_t)width);
        else if (at) memcpy(bytes + j * width, at, (size_t)width);
    }
}

static int64_t find(const int64_t *list, int64_t n, int64_t x) {
    for (int64_t i = 0; i < n; i++)
        if (list[i] == x) return i;
    return -1;
}

static void plan(struct call *c, int64_t r, struct row *row) {
    int64_t k = c->v[TOPK].t.dims[c->v[TOPK].t.rank - 1];
    row->n = 0;
    for (int64_t i = 0; i < k; i++) {  // step 2
        int64_t id = kvd_index(c, &c->v[TOPK], r * k + i);
        if (id >= 0 && id <= row->last && find(row->wanted, row->n, id) < 0) row->wanted[row->n++] = id;
    }
    int64_t length = kvd_index(c, &c->v[STATUS], r * (k + 1) + k);  // step 3
    int64_t places = length <= 0 ? 0 : length / c->block < k ? length / c->block : k;
    for (int64_t p = 0; p < k; p++)
        row->held[p] = p < places ? kvd_index(c, &c->v[STATUS], r * (k + 1) + p) : -1;
    for (int64_t p = 0; p < k; p++) {  // an id listed twice holds nothing at either place
        bool twice = false;
        for (int64_t q = p + 1; q < k; q++) {
            if (row->held[p] < 0 || row->held[q] != row->held[p]) continue;
            row->held[q] = -1;
            twice = true;
        }
        if (twice) row->held[p] = -1;
    }
    for (int64_t p = 0; p < row->n; p++) row->id_at[p] = -1;
    for (int64_t i = 0; i < row->n; i++) {  // step 4
        int64_t p = find(row->held, k, row->wanted[i]);
        if (p >= 0 && p < row->n) row->id_at[p] = row->wanted[i];
    }
    for (int64_t i = 0; i < row->n; i++) {
        if (find(row->id_at, row->n, row->wanted[i]) >= 0) continue;
        row->id_at[find(row->id_at, row->n, -1)] = row->wanted[i];
    }
    if (row->n && (c->block > 1 || k <= 32)) {  // step 6
        int64_t greatest = 0;
        for (int64_t p = 1; p < row->n; p++)
            if (row->id_at[p] > row->id_at[greatest]) greatest = p;
        int64_t id = row->id_at[greatest];
        row->id_at[greatest] = row->id_at[row->n - 1];
        row->id_at[row->n - 1] = id;
    }
}

static void fetch(struct call *c, int64_t r, int64_t b, int64_t fresh, struct row *row, int pair) {
    struct view *sel = &c->v[pair ? SEL_ROPE : SEL_KV], *full = &c->v[pair ? FULL_ROPE : FULL_KV];
    struct view *table = &c->v[SEL_TABLE], *full_table = &c->v[FULL_TABLE];
    if (kvd_elements(&sel->t) == 0) return;
    int64_t width = sel->t.dims[2] * kvd_bits(sel->t.dtype) / 8, k = c->v[TOPK].t.dims[c->v[TOPK].t.rank - 1];
    unsigned char *all = malloc((size_t)(row->n * c->block * width) + 1);
    bool *write = calloc((size_t)row->n + 1, sizeof *write);
    if (!all || !write) abort();
    for (int64_t p = 0; p < row->n && !c->fault; p++) {  // everything is read before anything is written
        int64_t id = row->id_at[p], from = find(row->held, k, id);
        int64_t count = id == row->last ? row->tail : c->block;
        unsigned char *bytes = all + p * c->block * width;
        bool again = (id + 1) * c->block > fresh;  // step 5
        write[p] = from != p || again;
        if (from < 0 || again) tokens(c, full, full_table, b, id * c->block, count, bytes, false);
        else if (from != p) tokens(c, sel, table, r, from * c->block, count, bytes, false);
    }
    for (int64_t p = 0; p < row->n && !c->fault; p++) {
        int64_t count = row->id_at[p] == row->last ? row->tail : c->block;
        if (write[p]) tokens(c, sel, table, r, p * c->block, count, all + p * c->block * width, true);
    }
    free(all);
    free(write);
}

static void one_row(struct call *c, int64_t r, struct row *row) {
    int64_t k = c->v[TOPK].t.dims[c->v[TOPK].t.rank - 1], batch = c->v[KV_LENS].t.dims[0];
    int64_t steps = num_rows(c) / batch, b = r / steps, s = r % steps, total = 0;
    int64_t kv = kvd_index(c, &c->v[KV_LENS], b), q = kvd_index(c, &c->v[Q_LENS], b);
    if (kv < 0) kv = 0;
    int64_t length = s < q ? kv - (q - 1 - s) : kv;  // step 1
    row->n = 0;
    if (length > 0) {
        row->last = (length + c->block - 1) / c->block - 1;  // the row's last block
        row->tail = length - row->last * c->block;
        plan(c, r, row);
        fetch(c, r, b, kv - q, row, 0);
        fetch(c, r, b, kv - q, row, 1);
    }
    for (int64_t p = 0; p < row->n; p++) total += row->id_at[p] == row->last ? row->tail : c->block;
    for (int64_t p = 0; p < k && !c->fault; p++)  // the length that is returned
        put(c, &c->v[STATUS], r * (k + 1) + p, p < row->n ? (int32_t)row->id_at[p] : -1);
    if (c->fault) return;
    put(c, &c->v[STATUS], r * (k + 1) + k, (int32_t)total);
    put(c, &c->v[OUT], r, (int32_t)total);
}

static int kernel(struct call *c) {
    int64_t k = c->v[TOPK].t.dims[c->v[TOPK].t.rank - 1], rows = num_rows(c);
    int64_t *room = calloc((size_t)(3 * k) + 1, sizeof *room);
    if (!room) abort();
    struct row row = {.wanted = room, .held = room + k, .id_at = room + 2 * k};
    for (int64_t r = 0; r < rows && !c->fault; r++) one_row(c, r, &row);
    for (int64_t r = rows; r < c->v[OUT].t.dims[0] && !c->fault; r++) put(c, &c->v[OUT], r, 0);
    free(room);
    return c->fault;
}

static const struct op selection = {"aclnnGatherSelectionKvCache",
                                    "aclnnGatherSelectionKvCacheGetWorkspaceSize", NUM, names, kernel,
                                    false, false};

static bool in_list(const char *list, const char *format) {
    char path[4096];
    for (const char *p = list; p && *p; p += strcspn(p, ":"), p += *p == ':') {
        snprintf(path, sizeof path, format, (int)strcspn(p, ":"), p);
        if (access(path, R_OK) == 0) return true;
    }
    return false;
}

// 4: kernels are found through the environment; loading the library by path is not enough.
static bool kernels_found(void) {
    const char *opp = getenv("ASCEND_OPP_PATH");
    return in_list(getenv("ASCEND_CUSTOM_OPP_PATH"), "%.*s/op_api/lib/libcust_opapi.so") ||
           in_list(opp, "%.*s/vendors/customize/op_api/lib/libcust_opapi.so");
}

int aclnnGatherSelectionKvCacheGetWorkspaceSize(
    void *sel_rope, void *sel_kv, void *sel_table, void *status, const void *topk,
    const void *full_rope, const void *full_kv, const void *full_table, const void *kv_lens,
    const void *q_lens, int64_t block, const void *out, uint64_t *size, void **executor) {
    struct phase_one p;
    struct call *c = &p.call;
    int code = kvd_open_phase_one(&p, &selection, LIBRARY, size, executor);
    const void *given[NUM] = {sel_rope, sel_kv, sel_table, status, topk, full_rope, full_kv,
                              full_table, kv_lens, q_lens, out};
    if (!code && !kernels_found())
        code = error(NN_FIND_KERNEL_ERROR, "the custom kernels are not in ASCEND_CUSTOM_OPP_PATH");
    if (!code && c->soc != SOC_A2 && c->soc != SOC_A3)  // 5.10
        code = error(NN_NO_KERNEL_PACKAGE, "built for ascend910_93 and ascend910b");
    for (int i = 0; i < NUM && !code; i++) code = kvd_view(&p, i, given[i], NN_PARAM_NULLPTR);
    c->block = block;
    if (!code) code = check(c);
    if (code) return leave(code);
    return leave(kvd_finish(&p, 0, true, size, executor));
}

int aclnnGatherSelectionKvCache(void *workspace, uint64_t size, void *executor, void *stream) {
    return kvd_phase_two(&selection, LIBRARY, "aclnnGatherSelectionKvCache", workspace, size, executor,
                           stream);
}
