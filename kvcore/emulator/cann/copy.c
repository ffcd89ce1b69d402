// SPDX-License-Identifier: Apache-2.0
// Copies and fills (section 1.4, 5.8).  The addresses decide, not the kind.
#include "machine.h"

#include <stdlib.h>
#include <string.h>

static size_t num_blocking;  // asynchronous copies that pageable memory made synchronous (5.8)

struct piece {
    unsigned char *dst;
    const unsigned char *src;  // NULL: fill
    size_t width, height, dst_pitch, src_pitch;
    int value;
};

struct pieces {
    size_t count;
    struct piece piece[];
};

static void move(const struct piece *p) {
    for (size_t row = 0; row < p->height; row++) {
        unsigned char *dst = p->dst + row * p->dst_pitch;
        if (p->src) memmove(dst, p->src + row * p->src_pitch, p->width);
        else memset(dst, p->value, p->width);
    }
}

static int run(struct task *t) {
    struct pieces *all = t->data;
    for (size_t i = 0; i < all->count; i++) move(&all->piece[i]);
    return OK;
}

static void free_pieces(struct task *t) { free(t->data); }

// Where the bytes are; span: how many from there belong to the call.
static int locate(const void *address, size_t span, const char *what, enum place *place,
                  unsigned char **bytes) {
    struct block *b;
    if (!address) return violate(RT_PARAM_INVALID, "1.4", "%s is NULL", what);
    *place = kvd_find(address, &b);
    *bytes = (unsigned char *)(uintptr_t)address;
    if (*place == PAGEABLE) return OK;
    if (*place == SWAPPED)  // 5.9: for kernels, not for aclrtMemcpy
        return violate(RT_INVALID_MEMORY_TYPE, "5.9",
                       "%s is the device's view of host memory: copies take the host pointer", what);
    if (!b)
        return violate(RT_PARAM_INVALID, "1.4", "%s: device address %p is not allocated (any more)",
                       what, address);
    size_t offset = (uintptr_t)address - b->start;
    if (!kvd_fits(b, offset, span))
        return violate(RT_PARAM_INVALID, "1.4", "%s: %zu bytes at offset %zu leave the memory of %zu",
                       what, span, offset, b->size);
    *bytes = b->bytes + offset;
    return OK;
}

static bool on_host(enum place p) { return p == PAGEABLE || p == PINNED; }

// 5.8: a synchronous copy or fill does not wait for streams, so none may still use these bytes: two
// readers are no fault, nor is another part of one allocation.
static void check_idle(const void *address, size_t size, bool write, const char *what) {
    if (kvd_journal_on()) return;  // the order of the launches decides, not what has passed by now
    struct task *t = kvd_pending(address, size, write);
    if (t)
        violate(OK, "5.8", "%s: a launched %s still uses this memory, and the call waits for no stream",
                what, t->symbol);
}

static int check_copy(void *dst, size_t dst_span, const void *src, size_t src_span, int kind,
                      enum place place[2], struct piece *piece) {
    unsigned char *from;
    int code = locate(dst, dst_span, "dst", &place[0], &piece->dst);
    if (!code) code = locate(src, src_span, "src", &place[1], &from);
    if (code) return code;
    piece->src = from;
    if (kind < 0 || kind > KIND_LAST) return violate(RT_PARAM_INVALID, "2", "kind %d", kind);
    return OK;
}

// 5.8: aclrtMemcpy ignores the kind; in asynchronous copies a kind that contradicts the addresses is
// a fault.
static int check_kind(const enum place place[2], int kind) {
    int true_kind = on_host(place[0]) ? (on_host(place[1]) ? H2H : D2H)
                                      : (on_host(place[1]) ? H2D : D2D);
    if (true_kind == H2H) return violate(RT_FEATURE_NOT_SUPPORT, "5.8", "host to host, asynchronous");
    if (kind <= D2D && kind != true_kind)
        return violate(RT_PARAM_INVALID, "1.4", "kind %d, but the addresses say %d", kind, true_kind);
    return OK;
}

static int now(struct piece *piece, void *dst, size_t dst_span, const void *src, size_t src_span) {
    int code = kvd_capture_refuses();
    if (code || kvd_forced()) return code;
    struct entry *e = kvd_journal_host();
    kvd_journal_range(e, dst, dst_span, true);
    kvd_journal_range(e, src, src_span, false);
    move(piece);  // 5.8: does not wait for streams
    return OK;
}

// Takes the pieces.  pageable: the call returns when the copy is done (5.8).
static int later(void *stream, struct pieces *all, struct task *t, bool pageable) {
    int code = 0;
    t->data = all;
    t->release = free_pieces;
    t->runs = BY_WAITERS;
    struct stream *s = kvd_stream(stream, &code);
    if (s && pageable && s->capture)  // 1.8
        code = violate(RT_PARAM_INVALID, "1.8", "pageable memory on a captured stream");
    else if (s && pageable && kvd_capture_refuses())  // 1.8: it becomes a synchronous copy
        code = violate(RT_CAPTURE_BLOCK_ASYNC, "1.8", "pageable memory during a capture");
    if (code || !s) {
        kvd_drop_task(t);
        return code;
    }
    code = kvd_launch(s, t);
    if (!code && pageable) {
        num_blocking++;
        kvd_drain(s, s->enqueued, -1);
    }
    return code;
}

size_t kvdouble_num_blocking(void) {
    pthread_mutex_lock(&kvd_lock);
    size_t n = num_blocking;
    num_blocking = 0;
    pthread_mutex_unlock(&kvd_lock);
    return n;
}

static struct pieces *new_pieces(size_t count) {
    struct pieces *all = calloc(1, sizeof *all + count * sizeof *all->piece);
    if (!all) abort();
    all->count = count;
    return all;
}

// -- one range ------------------------------------------------------------------------------------------------

static int check_count(size_t most, size_t count) {
    if (count > most)
        return violate(RT_PARAM_INVALID, "1.4", "count %zu is over destMax %zu", count, most);
    return OK;
}

int aclrtMemcpy(void *dst, size_t most, const void *src, size_t count, int kind) {
    int code = enter("aclrtMemcpy", RUNTIME, "%p, %zu, %p, %zu, %d", dst, most, src, count, kind);
    enum place place[2];
    struct piece piece = {.width = count, .height = 1};
    if (!code) code = check_count(most, count);
    if (!code) code = check_copy(dst, most, src, count, kind, place, &piece);
    if (!code) check_idle(dst, count, true, "dst"), check_idle(src, count, false, "src");
    return leave(code ? code : now(&piece, dst, count, src, count));
}

static int copy_later(struct piece *piece, void *dst, size_t dst_span, const void *src,
                      size_t src_span, int kind, void *stream) {
    enum place place[2];
    int code = check_copy(dst, dst_span, src, src_span, kind, place, piece);
    if (!code) code = check_kind(place, kind);
    if (code) return code;
    struct pieces *all = new_pieces(1);
    all->piece[0] = *piece;
    struct task *t = kvd_new_task(run);
    // Each row of a copy in two dimensions by itself: the bytes between rows may not be the caller's.
    if (piece->height > 1024) {
        kvd_touch(t, dst, dst_span, true, "dst");
        kvd_touch(t, src, src_span, false, "src");
        for (int i = 0; i < t->num_touches; i++) t->touches[i].flags |= RANGE_SPAN;
    }
    for (size_t row = 0; row < piece->height && piece->height <= 1024; row++) {
        kvd_touch(t, (char *)dst + row * piece->dst_pitch, piece->width, true, "dst");
        kvd_touch(t, (const char *)src + row * piece->src_pitch, piece->width, false, "src");
    }
    return later(stream, all, t, place[0] == PAGEABLE || place[1] == PAGEABLE);
}

int kvd_copy_later(void *dst, const void *src, size_t size, void *stream) {
    struct piece piece = {.width = size, .height = 1};
    return copy_later(&piece, dst, size, src, size, KIND_LAST, stream);
}

int aclrtMemcpyAsync(void *dst, size_t most, const void *src, size_t count, int kind, void *stream) {
    int code = enter("aclrtMemcpyAsync", RUNTIME, "%p, %zu, %p, %zu, %d, %p", dst, most, src, count,
                     kind, stream);
    struct piece piece = {.width = count, .height = 1};
    if (!code) code = check_count(most, count);
    return leave(code ? code : copy_later(&piece, dst, most, src, count, kind, stream));
}

// The limits are those of the function's manual page, which also says that CANN before 9.0 copies
// between host and device alone.
static int check_2d(struct piece *p, int kind, size_t *dst_span, size_t *src_span) {
    if (kvd_settings.quirk_no_2d && kind == D2D) return INVALID_PARAM;
    if (p->width > 5000000 || p->height > 5242880)
        return violate(INVALID_PARAM, "1.4", "width %zu or height %zu is over the limit", p->width,
                       p->height);
    if (!p->width || !p->height || p->width > p->dst_pitch || p->width > p->src_pitch)
        return violate(RT_PARAM_INVALID, "1.4", "width %zu, height %zu, pitches %zu and %zu", p->width,
                       p->height, p->dst_pitch, p->src_pitch);
    *dst_span = (p->height - 1) * p->dst_pitch + p->width;
    *src_span = (p->height - 1) * p->src_pitch + p->width;
    return OK;
}

int aclrtMemcpy2d(void *dst, size_t dpitch, const void *src, size_t spitch, size_t width,
                  size_t height, int kind) {
    int code = enter("aclrtMemcpy2d", RUNTIME, "%p, %zu, %p, %zu, %zu, %zu, %d", dst, dpitch, src,
                     spitch, width, height, kind);
    struct piece piece = {.width = width, .height = height, .dst_pitch = dpitch, .src_pitch = spitch};
    size_t spans[2];
    enum place place[2];
    if (!code) code = check_2d(&piece, kind, &spans[0], &spans[1]);
    if (!code) code = check_copy(dst, spans[0], src, spans[1], kind, place, &piece);
    if (!code) check_idle(dst, spans[0], true, "dst"), check_idle(src, spans[1], false, "src");
    return leave(code ? code : now(&piece, dst, spans[0], src, spans[1]));
}

int aclrtMemcpy2dAsync(void *dst, size_t dpitch, const void *src, size_t spitch, size_t width,
                       size_t height, int kind, void *stream) {
    int code = enter("aclrtMemcpy2dAsync", RUNTIME, "%p, %zu, %p, %zu, %zu, %zu, %d, %p", dst, dpitch,
                     src, spitch, width, height, kind, stream);
    struct piece piece = {.width = width, .height = height, .dst_pitch = dpitch, .src_pitch = spitch};
    size_t spans[2];
    if (!code) code = check_2d(&piece, kind, &spans[0], &spans[1]);
    return leave(code ? code : copy_later(&piece, dst, spans[0], src, spans[1], kind, stream));
}

// -- fills ----------------------------------------------------------------------------------------------------

int aclrtMemset(void *p, size_t most, int32_t value, size_t count) {
    int code = enter("aclrtMemset", RUNTIME, "%p, %zu, %d, %zu", p, most, value, count);
    enum place place;
    struct piece piece = {.width = count, .height = 1, .value = value};
    if (!code) code = check_count(most, count);
    if (!code) code = locate(p, most, "p", &place, &piece.dst);
    if (!code) check_idle(p, count, true, "p");
    return leave(code ? code : now(&piece, p, count, NULL, 0));
}

int aclrtMemsetAsync(void *p, size_t most, int32_t value, size_t count, void *stream) {
    int code = enter("aclrtMemsetAsync", RUNTIME, "%p, %zu, %d, %zu, %p", p, most, value, count,
                     stream);
    enum place place;
    struct piece piece = {.width = count, .height = 1, .value = value};
    if (!code) code = check_count(most, count);
    if (!code) code = locate(p, most, "p", &place, &piece.dst);
    if (code) return leave(code);
    struct pieces *all = new_pieces(1);
    all->piece[0] = piece;
    struct task *t = kvd_new_task(run);
    kvd_touch(t, p, count, true, "p");
    return leave(later(stream, all, t, place == PAGEABLE));
}

// -- many ranges ----------------------------------------------------------------------------------------------

static bool fits(const mem_location *location, enum place place) {
    return location->type == (on_host(place) ? LOCATION_HOST : LOCATION_DEVICE);
}

int aclrtMemcpyBatchAsync(void **dsts, size_t *most, void **srcs, size_t *sizes, size_t n,
                          batch_attribute *attrs, size_t *starts, size_t num_attrs, size_t *fail,
                          void *stream) {
    int code = enter("aclrtMemcpyBatchAsync", RUNTIME, "%zu copies, %zu attributes, %p", n, num_attrs,
                     stream);
    if (code) return leave(code);
    if (!dsts || !most || !srcs || !sizes || !attrs || !starts || !fail)
        return leave(violate(RT_PARAM_INVALID, "1.4", "an array is NULL"));
    *fail = SIZE_MAX;
    if (!n || !num_attrs || num_attrs > n || starts[0] != 0)
        return leave(violate(RT_PARAM_INVALID, "1.4", "%zu copies, %zu attributes", n, num_attrs));
    struct pieces *all = new_pieces(n);
    struct task *t = kvd_new_task(run);
    size_t attribute = 0;
    for (size_t i = 0; i < n && !code; i++) {
        if (attribute + 1 < num_attrs && starts[attribute + 1] <= starts[attribute])
            code = violate(RT_PARAM_INVALID, "1.4", "attrsIdx does not ascend");
        if (attribute + 1 < num_attrs && starts[attribute + 1] == i) attribute++;
        enum place place[2];
        struct piece *piece = &all->piece[i];
        piece->width = sizes[i];
        piece->height = 1;
        if (!code) code = check_count(most[i], sizes[i]);
        if (!code) code = check_copy(dsts[i], most[i], srcs[i], sizes[i], KIND_LAST, place, piece);
        if (!code) code = check_kind(place, KIND_LAST);
        if (!code && (place[0] == PAGEABLE || place[1] == PAGEABLE))
            code = violate(RT_PARAM_INVALID, "5.8", "copy %zu: pageable host memory", i);
        if (!code && (!fits(&attrs[attribute].dst, place[0]) || !fits(&attrs[attribute].src, place[1])))
            code = violate(RT_PARAM_INVALID, "1.4", "copy %zu: not where attribute %zu says", i,
                           attribute);
        if (code) *fail = i;
        else {
            kvd_touch(t, dsts[i], sizes[i], true, "dst");
            kvd_touch(t, srcs[i], sizes[i], false, "src");
        }
    }
    if (code) {
        t->data = all;
        t->release = free_pieces;
        kvd_drop_task(t);
        return leave(code);
    }
    return leave(later(stream, all, t, false));
}
