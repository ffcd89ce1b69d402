// SPDX-License-Identifier: Apache-2.0
// The older way to call an operator by its name (CANN's acl/acl_op.h, acl/acl_op_compiler.h):
// descriptions, buffers, attributes.  An operator that the machine does not have is an error that
// names it: success without doing anything would leave wrong bytes.
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

struct move {
    struct layout from, to;
    const unsigned char *src;
    unsigned char *dst;
    size_t item, size;  // size: of a plain copy, 0 where formats differ
};

static int run(struct task *t) {
    struct move *m = t->data;
    if (m->size) memmove(m->dst, m->src, m->size);
    else kvd_transfer(&m->to, m->dst, &m->from, m->src, m->item);
    return OK;
}

static void release(struct task *t) { free(t->data); }

static struct layout layout_of(const struct description *d) {
    struct layout l = {d->storage_format, d->rank, d->storage_rank, {0}, {0}};
    memcpy(l.dims, d->dims, sizeof l.dims);
    memcpy(l.storage, d->storage, sizeof l.storage);
    return l;
}

// The bytes of a buffer that lies on the device, or NULL and a refusal.
static unsigned char *bytes_of(const struct buffer *b, size_t size, bool write, struct task *t,
                               int *code) {
    struct block *block;
    if (b && size > b->size)
        *code = error(INVALID_PARAM, "a buffer of %zu bytes, and its description says %zu", b->size, size);
    if (!*code) *code = b ? kvd_touch(t, b->data, size, write, "a buffer") : INVALID_PARAM;
    if (*code) return NULL;
    kvd_find(b->data, &block);
    if (block) return block->bytes + ((uintptr_t)b->data - block->start);
    *code = error(RT_PARAM_INVALID, "%p is no device memory", b->data);
    return NULL;
}

// TransData changes the format, Identity changes nothing.
static int transfer(const char *op, const struct description *in, const struct buffer *input,
                    const struct description *out, const struct buffer *output, void *stream) {
    int code = OK;
    struct stream *s = kvd_stream(stream, &code);
    if (!s) return code;
    if (!in || !out || in->dtype != out->dtype || in->rank != out->rank || kvd_bits(in->dtype) % 8)
        return error(INVALID_PARAM, "%s: the descriptions do not fit", op);
    for (int i = 0; i < in->rank; i++)
        if (in->dims[i] != out->dims[i])
            return error(INVALID_PARAM, "%s: axis %d has %lld and %lld elements", op, i,
                         (long long)in->dims[i], (long long)out->dims[i]);
    struct move *m = calloc(1, sizeof *m);
    if (!m) abort();
    struct task *t = kvd_new_task(run);
    t->data = m;
    t->release = release;
    m->from = layout_of(in);
    m->to = layout_of(out);
    m->item = (size_t)kvd_bits(in->dtype) / 8;
    if (!kvd_known_layout(&m->from) || !kvd_known_layout(&m->to))
        code = error(OP_NOT_FOUND, "%s: the emulated machine casts no format %d to %d", op,
                     m->from.format, m->to.format);
    size_t sizes[2] = {(size_t)kvd_layout_elements(&m->from) * m->item,
                       (size_t)kvd_layout_elements(&m->to) * m->item};
    if (m->from.format == m->to.format) m->size = sizes[0];
    if (!code && sizes[0]) m->src = bytes_of(input, sizes[0], false, t, &code);
    if (!code && sizes[0]) m->dst = bytes_of(output, sizes[1], true, t, &code);
    if (code || !sizes[0]) {
        kvd_drop_task(t);
        return code;
    }
    kvd_note_format(&m->to);
    return kvd_launch(s, t);
}

struct side {  // of a strided copy, in elements
    int64_t dims[MAX_RANK], strides[MAX_RANK], offset, whole;
    int rank;
    unsigned char *bytes;
};

struct strided {
    struct side from, to;
    size_t item;
    int64_t count;
};

static int64_t element_of(const struct side *side, int64_t i) {
    int64_t at = side->offset;
    for (int k = side->rank - 1; k >= 0; k--) {
        at += i % side->dims[k] * side->strides[k];
        i /= side->dims[k];
    }
    return at;
}

static int run_strided(struct task *t) {
    const struct strided *c = t->data;
    for (int64_t i = 0; i < c->count; i++)
        memcpy(c->to.bytes + (size_t)element_of(&c->to, i) * c->item,
               c->from.bytes + (size_t)element_of(&c->from, i) * c->item, c->item);
    return OK;
}

// The numbers of an input that lies in host memory; how many, or -1.
static int numbers(const struct description *d, const struct buffer *b, int64_t *values) {
    struct block *block = NULL;
    int64_t count = 1;
    for (int i = 0; d && i < d->rank; i++) count *= d->dims[i];
    size_t item = d ? (size_t)kvd_bits(d->dtype) / 8 : 0;
    if (!b || (item != 4 && item != 8) || count < 0 || count > MAX_RANK) return -1;
    if (b->size < (size_t)count * item || kvd_find(b->data, &block) == DEVICE) return -1;
    for (int i = 0; i < count; i++) {
        int32_t narrow;
        if (item == 8) memcpy(&values[i], (const char *)b->data + 8 * i, 8);
        else memcpy(&narrow, (const char *)b->data + 4 * i, 4), values[i] = narrow;
    }
    return (int)count;
}

// A side from four inputs: the tensor, and sizes, strides and offset of the view of it.
static bool side_of(struct side *side, const void *const *descriptions, const void *const *buffers) {
    const struct description *d = descriptions[0];
    int64_t offset[MAX_RANK] = {0};
    side->rank = numbers(descriptions[1], buffers[1], side->dims);
    if (!d || side->rank < 0 || side->rank != numbers(descriptions[2], buffers[2], side->strides) ||
        numbers(descriptions[3], buffers[3], offset) != 1)
        return false;
    int64_t last = side->offset = offset[0];
    bool empty = false;
    side->whole = 1;
    for (int i = 0; i < d->rank; i++) side->whole *= d->dims[i];
    for (int i = 0; i < side->rank; i++) {
        if (side->dims[i] < 0 || side->strides[i] < 0) return false;
        if (!side->dims[i]) empty = true;
        last += (side->dims[i] - 1) * side->strides[i];
    }
    return empty || (side->offset >= 0 && last < side->whole);
}

// AsStrided and ViewCopy: torch_npu copies strided tensors to and from another device by them.
static int copy_strided(const char *op, const void *const *descriptions, const void *const *buffers,
                        const struct buffer *output, void *stream) {
    int code = OK;
    bool into = !strcmp(op, "ViewCopy");  // the view is of the target; of the source else
    struct stream *s = kvd_stream(stream, &code);
    if (!s) return code;
    const struct description *in = descriptions[into ? 4 : 0];
    struct strided c = {.item = in ? (size_t)kvd_bits(in->dtype) / 8 : 0, .count = 1};
    bool fits = c.item && side_of(&c.from, descriptions + (into ? 4 : 0), buffers + (into ? 4 : 0));
    if (fits && into) fits = side_of(&c.to, descriptions, buffers) && c.to.rank == c.from.rank;
    for (int i = c.from.rank - 1; fits && i >= 0; i--) {
        if (into) fits = c.to.dims[i] == c.from.dims[i];
        else c.to.dims[i] = c.from.dims[i], c.to.strides[i] = c.count;
        c.count *= c.from.dims[i];
    }
    if (!fits) return error(INVALID_PARAM, "%s: the descriptions do not fit", op);
    if (!into) c.to.rank = c.from.rank, c.to.whole = c.count;
    if (!c.count) return OK;
    struct task *t = kvd_new_task(run_strided);
    c.from.bytes = bytes_of(buffers[into ? 4 : 0], (size_t)c.from.whole * c.item, false, t, &code);
    if (!code) c.to.bytes = bytes_of(output, (size_t)c.to.whole * c.item, true, t, &code);
    if (code) {
        kvd_drop_task(t);
        return code;
    }
    struct strided *own = malloc(sizeof *own);
    if (!own) abort();
    *own = c;
    t->data = own;
    t->release = release;
    return kvd_launch(s, t);
}

static int execute(const char *symbol, const char *op, int num_inputs, const void *const *input_descs,
                   const void *const *inputs, int num_outputs, const void *const *output_descs,
                   void *const *outputs, void *stream) {
    int code = enter(symbol, RUNTIME, "%s", op ? op : "NULL");
    if (code) return leave(code);
    if (!op) return leave(violate(INVALID_PARAM, "acl_op", "opType is NULL"));
    bool strided = !strcmp(op, "AsStrided") || !strcmp(op, "ViewCopy");
    if (!strided && strcmp(op, "TransData") && strcmp(op, "Identity"))
        return leave(error(OP_NOT_FOUND, "the emulated machine has no operator %s", op));
    if (num_inputs < 1 || num_outputs < 1 || !input_descs || !inputs || !output_descs || !outputs)
        return leave(violate(INVALID_PARAM, "acl_op", "%s: an input or output is missing", op));
    if (strided && num_inputs < (op[0] == 'V' ? 8 : 4))
        return leave(violate(INVALID_PARAM, "acl_op", "%s: only %d inputs", op, num_inputs));
    if (strided) return leave(copy_strided(op, input_descs, inputs, outputs[0], stream));
    return leave(transfer(op, input_descs[0], inputs[0], output_descs[0], outputs[0], stream));
}

int aclopCompileAndExecute(const char *op, int num_inputs, const void *const *input_descs,
                           const void *const *inputs, int num_outputs,
                           const void *const *output_descs, void *const *outputs,
                           const void *attributes, int engine, int flag, const char *path,
                           void *stream) {
    (void)attributes, (void)engine, (void)flag, (void)path;
    return execute("aclopCompileAndExecute", op, num_inputs, input_descs, inputs, num_outputs,
                   output_descs, outputs, stream);
}

int aclopCompileAndExecuteV2(const char *op, int num_inputs, void **input_descs, void **inputs,
                             int num_outputs, void **output_descs, void **outputs,
                             void *attributes, int engine, int flag, const char *path,
                             void *stream) {
    (void)attributes, (void)engine, (void)flag, (void)path;
    return execute("aclopCompileAndExecuteV2", op, num_inputs, (const void *const *)input_descs,
                   (const void *const *)inputs, num_outputs, (const void *const *)output_descs,
                   outputs, stream);
}
