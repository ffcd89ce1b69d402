// SPDX-License-Identifier: Apache-2.0
// The two phases and what lies between them (section 5.1, 5.2, 5.6).
#include "machine.h"

#include <sys/uio.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// -- phase one --------------------------------------------------------------------------------------------------

// 5.1: both phases need the device.  The aclnn code for it is read as RUNTIME_ERROR: "runtime call
// failed".
static int as_aclnn(int code) {
    return code == RT_CONTEXT_NULL || code == UNINITIALIZE ? NN_RUNTIME_ERROR : code;
}

int kvd_open_phase_one(struct phase_one *p, const struct op *op, const char *library,
                         uint64_t *size, void **executor) {
    int code = enter(op->phase_one, RUNTIME, "%s", library);
    memset(p, 0, sizeof *p);
    p->op = op;
    p->library = library;
    p->call.op = op->name;
    p->call.num_views = op->num_tensors;
    p->call.soc = kvd_settings.soc;
    p->call.settings = kvd_settings;
    if (code) return as_aclnn(code);
    if (!size || !executor) return violate(NN_PARAM_NULLPTR, "1.10", "workspaceSize or executor is NULL");
    if (!getenv("ASCEND_OPP_PATH"))  // 4
        return error(NN_OPP_PATH_NOT_FOUND, "ASCEND_OPP_PATH is not in the environment");
    return OK;
}

static bool known_format(int format) {  // 5.3: ND, or op-plugin's base formats of rank 3, 4, 5
    return format == FORMAT_ND || format == 47 || format == 0 || format == 30;
}

// The whole storage must be allocated device memory.
static int check_memory(const struct tensor *t, const char *name) {
    int64_t all = kvd_storage_elements(t), bits = kvd_bits(t->dtype), total;
    if (__builtin_mul_overflow(all, bits, &total)) return violate(NN_INNER_NULLPTR, "5.3", "%s: too big", name);
    size_t size = ((size_t)total + 7) / 8;
    struct block *b;
    const void *address = (const void *)(uintptr_t)t->data;
    enum place place = kvd_find(address, &b);
    if (!size) return OK;
    if (place == PAGEABLE || place == PINNED)
        return violate(NN_INNER_NULLPTR, "5.3", "%s: %p is host memory", name, address);
    if (!b)
        return violate(NN_INNER_NULLPTR, "5.1", "%s: device address %p is not allocated (any more)",
                       name, address);
    size_t offset = t->data - b->start;
    if (!kvd_fits(b, offset, size))
        return violate(NN_INNER_NULLPTR, "5.3", "%s: storageDims describe %zu bytes, %zu are allocated",
                       name, size, b->size - offset);
    return OK;
}

int kvd_view(struct phase_one *p, int index, const void *tensor, int null_code) {
    const char *name = p->op->names[index];
    struct view *v = &p->call.v[index];
    if (!tensor) return null_code ? violate(null_code, "5.6", "%s is NULL", name) : OK;
    const struct tensor *t = kvd_check(tensor, H_TENSOR, name);
    if (!t) return NN_PARAM_INVALID;
    if (t->fault[0]) return error(NN_INNER_NULLPTR, "%s: %s", name, t->fault);
    bool nz = t->format == FORMAT_FRACTAL_NZ && p->call.soc == SOC_950 &&
              !strcmp(p->op->name, "aclnnGatherPaKvCache") && index < 2;  // 5.4
    // Caches that torch_npu cast to NZ come with that format, and with the sizes of the pages.
    nz = nz || (t->format == FORMAT_FRACTAL_NZ && strstr(name, "CacheRef"));
    if (!known_format(t->format) && !nz && !p->op->formats)
        return violate(NN_PARAM_INVALID, "5.4", "%s: format %d, expected ND", name, t->format);
    if (t->dtype >= HIFLOAT8 && p->call.soc != SOC_950)  // 2: 34-41 on 950 only
        return error(NN_PARAM_INVALID, "%s: dtype %d is of 950 only", name, t->dtype);
    int code = t->data ? check_memory(t, name) : OK;  // an address may be set later
    if (code) return code;
    v->present = true;
    v->t = *t;
    v->handle = t;
    v->serial = t->handle.serial;
    return OK;
}

// Reads a text that the caller may have freed, without dying of it.
static bool peek(const char *text, char *copy, size_t size) {
    for (size_t i = 0; i < size; i++) {
        struct iovec to = {copy + i, 1}, from = {(void *)(uintptr_t)(text + i), 1};
        if (process_vm_readv(getpid(), &to, 1, &from, 1, 0) != 1) return false;
        if (!copy[i]) return true;
    }
    copy[size - 1] = 0;
    return true;
}

int kvd_text(struct phase_one *p, int index, const char *text, char *copy, const char *argument) {
    p->strings[index] = text;
    copy[0] = 0;
    if (text && !peek(text, copy, 16))
        return violate(NN_PARAM_INVALID, "5.3", "%s is no readable text", argument);
    return OK;
}

int kvd_finish(struct phase_one *p, uint64_t workspace, bool may_repeat, uint64_t *size,
                 void **executor) {
    struct executor *e = kvd_create(H_EXECUTOR, sizeof *e);
    e->op = p->op;
    e->library = p->library;
    e->call = p->call;
    e->workspace = p->call.empty ? 0 : workspace + kvd_settings.workspace_extra;
    e->may_repeat = may_repeat;
    e->line = kvd_line();
    for (int i = 0; i < 2; i++) {
        e->strings[i] = p->strings[i];
        memcpy(e->copies[i], i ? p->call.scatter_mode : p->call.cache_mode, 16);
    }
    *size = e->workspace;
    *executor = e;
    return OK;
}

// -- executors ----------------------------------------------------------------------------------------------------

int aclSetAclOpExecutorRepeatable(void *executor) {
    int code = enter("aclSetAclOpExecutorRepeatable", CALLABLE, "%p", executor);
    struct executor *e = code ? NULL : kvd_check(executor, H_EXECUTOR, "executor");
    if (!e) return leave(code ? code : NN_PARAM_INVALID);
    if (e->ran) return leave(violate(NN_INNER_ERROR, "5.2", "directly after phase one, not later"));
    if (!e->may_repeat) return leave(error(NN_INNER_ERROR, "this executor cannot repeat"));
    e->repeatable = true;
    return leave(OK);
}

int aclDestroyAclOpExecutor(void *executor) {
    int code = enter("aclDestroyAclOpExecutor", CALLABLE | AFTER, "%p", executor);
    if (code) return leave(code);
    // 5.2: after phase two an executor that is not repeatable is gone: this would be a use after free
    if (!kvd_check(executor, H_EXECUTOR, "executor")) return leave(NN_PARAM_INVALID);
    kvd_destroy(executor);
    return leave(OK);
}

static int set_address(const char *symbol, void *executor, size_t index, void *tensor, void *address,
                       bool output) {
    int code = enter(symbol, CALLABLE, "%p, %zu, %p", executor, index, address);
    struct executor *e = code ? NULL : kvd_check(executor, H_EXECUTOR, "executor");
    struct tensor *t = e ? kvd_check(tensor, H_TENSOR, "tensor") : NULL;
    if (!t) return leave(code ? code : NN_PARAM_INVALID);
    if ((uintptr_t)address % 32) return leave(violate(NN_PARAM_INVALID, "5.3", "%p: alignment", address));
    size_t seen = 0;
    for (int i = 0; i < e->call.num_views; i++) {
        struct view *v = &e->call.v[i];
        if (!v->present) continue;
        bool ref = strstr(e->op->names[i], "Ref") != NULL;
        if (ref != output) continue;
        if (seen++ != index) continue;
        if (v->handle != t) return leave(violate(NN_PARAM_INVALID, "1.9", "tensor %zu is another", index));
        v->t.data = t->data = (uint64_t)(uintptr_t)address;
        return leave(OK);
    }
    return leave(violate(NN_PARAM_INVALID, "1.9", "no tensor %zu", index));
}

int aclSetInputTensorAddr(void *executor, const size_t index, void *tensor, void *address) {
    return set_address("aclSetInputTensorAddr", executor, index, tensor, address, false);
}

int aclSetOutputTensorAddr(void *executor, const size_t index, void *tensor, void *address) {
    return set_address("aclSetOutputTensorAddr", executor, index, tensor, address, true);
}

int aclSetTensorAddr(void *executor, const size_t index, void *tensor, void *address) {
    return set_address("aclSetTensorAddr", executor, index, tensor, address, true);
}

int aclnnInit(const char *config) { return leave(enter("aclnnInit", 0, "%s", config ? config : "NULL")); }
int aclnnFinalize(void) { return leave(enter("aclnnFinalize", 0, "%s", "")); }

// -- phase two ----------------------------------------------------------------------------------------------------

struct launch {
    struct call call;
    const struct op *op;
    unsigned char *workspace;
    uint64_t size;
};

static int run(struct task *t) {
    struct launch *l = t->data;
    struct call call = l->call;  // a graph runs it again
    kvd_set_symbol(t->symbol);
    if (l->workspace) memset(l->workspace, 0x5A, l->size);
    if (!call.empty) l->op->kernel(&call);
    for (uint64_t i = 0; l->workspace && i < l->size; i++) {
        if (l->workspace[i] == 0x5A) continue;
        pthread_mutex_lock(&kvd_lock);
        violate(OK, "5.3", "somebody else wrote to the workspace meanwhile");
        pthread_mutex_unlock(&kvd_lock);
        break;
    }
    return call.fault;
}

static void release(struct task *t) { free(t->data); }

static void describe(const struct task *t, char *text, size_t size) {
    const struct launch *l = t->data;
    int n = snprintf(text, size, "%s", l->op->name);
    for (int i = 0; i < l->call.num_views && n < (int)size; i++) {
        const struct view *v = &l->call.v[i];
        if (!v->present) continue;
        n += snprintf(text + n, size - (size_t)n, " %s[", l->op->names[i]);
        for (int k = 0; k < v->t.rank && n < (int)size; k++)
            n += snprintf(text + n, size - (size_t)n, "%s%lld", k ? ", " : "", (long long)v->t.dims[k]);
        if (n < (int)size) n += snprintf(text + n, size - (size_t)n, "] of type %d", v->t.dtype);
    }
}

static int check_workspace(struct executor *e, const void *workspace, uint64_t size) {
    if (size < e->workspace)
        return violate(NN_PARAM_INVALID, "5.1", "workspaceSize %llu, phase one said %llu",
                       (unsigned long long)size, (unsigned long long)e->workspace);
    if (!e->workspace) return OK;
    if (!workspace) return violate(NN_PARAM_NULLPTR, "5.2", "workspace is NULL, %llu bytes are needed",
                                   (unsigned long long)e->workspace);
    if ((uintptr_t)workspace % 64)
        return violate(NN_PARAM_INVALID, "5.3", "workspace %p is not 64-byte aligned", workspace);
    struct block *b;
    if (kvd_find(workspace, &b) != DEVICE)
        return violate(NN_PARAM_INVALID, "5.3", "workspace %p is no allocated device memory", workspace);
    if (!kvd_fits(b, (uintptr_t)workspace - b->start, size))
        return violate(NN_PARAM_INVALID, "5.3", "workspace of %llu bytes leaves its memory",
                       (unsigned long long)size);
    return OK;
}

static int check_strings(struct executor *e) {
    if (kvd_settings.lenient_texts) return OK;  // phase one took a copy
    for (int i = 0; i < 2; i++) {
        char seen[16];
        if (e->strings[i] && (!peek(e->strings[i], seen, 16) || strcmp(seen, e->copies[i])))
            return violate(NN_PARAM_INVALID, "5.3", "a mode's text was freed or changed before phase two");
    }
    return OK;
}

static int resolve(struct executor *e, struct task *t) {
    struct launch *l = t->data;
    for (int i = 0; i < l->call.num_views; i++) {
        struct view *v = &l->call.v[i];
        const char *name = e->op->names[i];
        if (!v->present) continue;
        if (!kvd_is_live(v->handle, H_TENSOR, v->serial))  // recorded when it was destroyed
            return error(NN_INNER_ERROR, "%s was destroyed before phase two", name);
        v->t.data = v->handle->data;
        size_t bits = (size_t)kvd_bits(v->t.dtype);
        size_t size = ((size_t)kvd_storage_elements(&v->t) * bits + 7) / 8;
        if (!size) continue;
        if (!v->t.data) return violate(NN_PARAM_NULLPTR, "5.3", "%s: tensorData is NULL", name);
        int code = check_memory(&v->t, name);
        if (code) return code;
        bool written = strstr(name, "Ref") || strstr(name, "Out");
        kvd_touch(t, (const void *)(uintptr_t)v->t.data, size, written, name);
        v->written = written;
        if (t->late) t->touches[t->num_touches - 1].flags |= RANGE_SPAN;
        kvd_find((const void *)(uintptr_t)v->t.data, &v->block);
        v->base = v->block->bytes + (v->t.data - v->block->start) + (size_t)v->t.offset * bits / 8;
    }
    return OK;
}

static int start(struct executor *e, void *workspace, uint64_t size, const void *stream) {
    int code = check_workspace(e, workspace, size);
    if (!code) code = check_strings(e);
    struct stream *s = code ? NULL : kvd_stream(stream, &code);
    if (!s) return code;
    if (kvd_forced()) return kvd_forced();
    struct task *t = kvd_new_task(run);
    t->runs = BY_WAITERS;
    struct launch *l = calloc(1, sizeof *l);
    if (!l) abort();
    t->data = l;
    t->release = release;
    t->describe = describe;
    l->call = e->call;
    l->op = e->op;
    if (!t->line) t->line = e->line;  // torch_npu calls phase two in a thread without Python
    t->late = !e->op->formats && !e->call.empty;  // kvd_at says what it uses
    code = resolve(e, t);
    if (!code && e->workspace) {
        struct block *b;
        kvd_touch(t, workspace, e->workspace, true, "workspace");
        kvd_find(workspace, &b);
        l->workspace = b->bytes + ((uintptr_t)workspace - b->start);
        l->size = e->workspace;
        t->workspace = b;
        t->workspace_start = (uintptr_t)workspace - b->start;
        t->workspace_size = e->workspace;
    }
    if (code) {
        kvd_drop_task(t);
        return code;
    }
    return kvd_launch(s, t);
}

int kvd_phase_two(const struct op *op, const char *library, const char *symbol, void *workspace,
                    uint64_t size, void *executor, const void *stream) {
    int code = as_aclnn(enter(symbol, RUNTIME | AFTER, "%p, %llu, %p, %p", workspace,
                              (unsigned long long)size, executor, stream));
    struct executor *e = kvd_check(executor, H_EXECUTOR, "executor");
    if (!e) return leave(op->folds ? NN_INNER_ERROR : NN_PARAM_INVALID);
    if (!code && e->op != op && strcmp(e->op->name, op->name))
        code = violate(NN_PARAM_INVALID, "1.10", "the executor is of %s", e->op->name);
    if (!code && strcmp(e->library, library))
        violate(OK, "4", "phase one came from %s, phase two from %s", e->library, library);
    if (!code) code = start(e, workspace, size, stream);
    e->ran = true;
    if (!e->repeatable) kvd_destroy(e);  // 5.2: on success and on error
    if (code && op->folds && !kvd_forced()) code = NN_INNER_ERROR;  // 5.6
    return leave(code);
}

// -- what kernels use -----------------------------------------------------------------------------------------------

void kvd_kernel_fault(struct call *c, int code) {
    if (!c->fault) c->fault = code;
}

unsigned char *kvd_at(struct call *c, struct view *v, int64_t element, int64_t bytes) {
    int64_t offset = element * kvd_bits(v->t.dtype) / 8;
    int64_t start = v->base ? v->base - v->block->bytes + offset : -1;
    if (start < 0 || start + bytes > (int64_t)(v->block ? v->block->size : 0)) {
        if (!c->fault) {
            pthread_mutex_lock(&kvd_lock);
            violate(OK, "5.7", "the kernel leaves the memory of %s",
                    v->handle && v - c->v < c->num_views ? "a tensor" : "a view");
            pthread_mutex_unlock(&kvd_lock);
        }
        kvd_kernel_fault(c, RT_AICORE_EXCEPTION);
        return NULL;
    }
    kvd_trail_add(v->block, v->base + offset, (size_t)bytes, v->written);
    return v->base + offset;
}

int64_t kvd_index(struct call *c, struct view *v, int64_t position) {
    int64_t element = 0;
    for (int i = v->t.rank - 1; i >= 0; i--) {
        element += position % v->t.dims[i] * v->t.strides[i];
        position /= v->t.dims[i];
    }
    unsigned char *at = kvd_at(c, v, element, kvd_bits(v->t.dtype) / 8);
    if (!at) return -1;
    if (v->t.dtype == INT32) {
        int32_t x;
        memcpy(&x, at, 4);
        return x;
    }
    int64_t x;
    memcpy(&x, at, 8);
    return x;
}

void kvd_copy(struct call *c, struct view *dst, int64_t to, int64_t dst_step, struct view *src,
                int64_t from, int64_t src_step, int64_t n) {
    int64_t bits = kvd_bits(dst->t.dtype);
    if (dst_step == 1 && src_step == 1) {
        unsigned char *write = kvd_at(c, dst, to, n * bits / 8);
        unsigned char *read = write ? kvd_at(c, src, from, n * bits / 8) : NULL;
        if (read) memmove(write, read, (size_t)(n * bits / 8));
        return;
    }
    for (int64_t i = 0; i < n && !c->fault; i++) {
        unsigned char *write = kvd_at(c, dst, to + i * dst_step, bits / 8);
        unsigned char *read = write ? kvd_at(c, src, from + i * src_step, bits / 8) : NULL;
        if (read) memmove(write, read, (size_t)bits / 8);
    }
}

bool kvd_same_dims(const struct tensor *t, int rank, ...) {
    va_list list;
    va_start(list, rank);
    bool same = t->rank == rank;
    for (int i = 0; i < rank; i++) {
        int64_t wanted = va_arg(list, int64_t);
        same = same && (wanted < 0 || t->dims[i] == wanted);
    }
    va_end(list);
    return same;
}
