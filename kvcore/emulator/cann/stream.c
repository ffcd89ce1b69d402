// SPDX-License-Identifier: Apache-2.0
// Streams (section 1.5, 5.8): a thread each, first in first out.  Unless it is eager, a stream
// does its work as late as the interface allows: when a thread or stream waits for it.  So a missing
// wait, or memory freed too soon, shows on every run and not only on an unlucky one.
//
// For programs (kvdouble_patience) a clock lets streams begin as well, one to two ticks after a launch,
// so that work goes on by itself.  A launch still wakes no thread, which makes it cheap, and tasks of
// Python's do not compete with the program for the interpreter while it launches more.
//
// For programs, too, a thread that waits for a stream runs its tasks itself while the stream's thread
// does nothing (kvd_help): two switches between threads take longer than a small task.
#include "machine.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_STREAMS = 1984 };  // 5.8

static int num_streams;

uint64_t kvd_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void kvd_deadline(struct timespec *at, int64_t ms) {
    clock_gettime(CLOCK_REALTIME, at);
    at->tv_sec += ms / 1000;
    at->tv_nsec += ms % 1000 * 1000000;
    if (at->tv_nsec >= 1000000000) at->tv_sec++, at->tv_nsec -= 1000000000;
}

// -- tasks --------------------------------------------------------------------------------------------------

struct task *kvd_new_task(int (*run)(struct task *)) {
    struct task *t = calloc(1, sizeof *t);
    if (!t) abort();
    t->run = run;
    t->symbol = kvd_symbol();
    t->line = kvd_line();
    t->refs = 1;
    return t;
}

void kvd_drop_task(struct task *t) {
    if (--t->refs) return;
    if (t->release) t->release(t);
    for (int i = 0; i < t->num_touches; i++) kvd_drop_block(t->touches[i].block);
    if (t->record) kvd_drop_recording(t->record);
    if (t->wait) kvd_drop_recording(t->wait);
    free(t->touches);
    free(t);
}

void kvd_room_for_touches(struct task *t, size_t more) {
    if (!more) return;
    t->room_touches = t->num_touches + (int)more;
    t->touches = realloc(t->touches, (size_t)t->room_touches * sizeof *t->touches);
    if (!t->touches) abort();
}

int kvd_touch(struct task *t, const void *address, size_t size, bool write, const char *what) {
    struct block *b;
    enum place place = kvd_find(address, &b);
    if (place == PAGEABLE) return OK;
    if (!b)
        return violate(RT_PARAM_INVALID, "5.1", "%s: device address %p is not allocated (any more)",
                       what, address);
    size_t offset = (uintptr_t)address - b->start;
    if (!kvd_fits(b, offset, size))
        return violate(RT_PARAM_INVALID, "5.3", "%s: %zu bytes at offset %zu leave the memory of %zu",
                       what, size, offset, b->size);
    if (t->num_touches == t->room_touches) kvd_room_for_touches(t, t->num_touches ? t->num_touches : 4);
    t->touches[t->num_touches++] = (struct touch){b, offset, size, write, write};
    b->refs++;
    return OK;
}

static void note(struct past *past, uint64_t stream, uint64_t position) {
    int i = 0;
    while (i < past->count && past->of[i].stream != stream) i++;
    if (i == past->count) {
        past->of = realloc(past->of, (size_t)(i + 1) * sizeof *past->of);
        if (!past->of) abort();
        past->of[past->count++].stream = stream;
        past->of[i].position = 0;
    }
    if (past->of[i].position < position) past->of[i].position = position;
}

void kvd_join(struct past *past, const struct past *other) {
    for (int i = 0; i < other->count; i++) note(past, other->of[i].stream, other->of[i].position);
}

void kvd_join_stream(struct past *past, const struct stream *s) {
    kvd_join(past, &s->past);
    note(past, s->handle.serial, s->enqueued);
}

uint64_t kvd_position_before(const struct past *past, const struct stream *s) {
    for (int i = 0; i < past->count; i++)
        if (past->of[i].stream == s->handle.serial) return past->of[i].position;
    return 0;
}

struct recording *kvd_new_recording(void) {
    struct recording *r = calloc(1, sizeof *r);
    if (!r) abort();
    r->refs = 1;
    return r;
}

void kvd_drop_recording(struct recording *r) {
    if (--r->refs) return;
    kvd_journal_mark(ENTRY_DROP, r->mark);
    free(r->past.of);
    free(r);
}

static void wake_blocked(void *stream, void *unused) {
    struct stream *s = stream;
    (void)unused;
    if (s->blocked) pthread_cond_signal(&s->wake);
}

void kvd_complete(struct recording *r, int code) {
    r->time_ns = kvd_now_ns();
    r->error = code;
    r->stream = NULL;
    r->done = true;
    kvd_each(H_STREAM, wake_blocked, NULL);
    kvd_notify();
}

static void wake(void *stream, void *unused) {
    (void)unused;
    pthread_cond_signal(&((struct stream *)stream)->wake);
}

void kvd_wake_all(void) {
    kvd_each(H_STREAM, wake, NULL);
    kvd_notify();
}

void kvd_count(struct task *t, int by) {
    for (int i = 0; i < t->num_touches; i++) t->touches[i].block->pending += by;
    if (!t->graph) return;
    t->graph->running += by;
    for (int i = 0; i < t->graph->count; i++)
        if (t->graph->nodes[i].task != t) kvd_count(t->graph->nodes[i].task, by);
}

// -- the thread -----------------------------------------------------------------------------------------------

static bool any_dead(struct task *t) {
    for (int i = 0; i < t->num_touches; i++) {
        struct touch *one = &t->touches[i];
        if (one->block->dead || !kvd_fits(one->block, one->start, one->size)) return true;
    }
    for (int i = 0; t->graph && i < t->graph->count; i++)
        if (any_dead(t->graph->nodes[i].task)) return true;
    return false;
}

static _Thread_local char *fault_text;  // of the task that this thread runs

void kvd_fault_text(const char *text) {
    free(fault_text);
    fault_text = strdup(text);
}

static _Thread_local struct stream *working;

bool kvd_in_stream(void) { return working != NULL; }

bool kvd_aborting(void) { return working && working->aborting; }

bool kvd_pause(const struct task *task) {
    if (working) working->pauses = task;
    return !working || !task || working->hopeless != task;
}

// Runs the first task of the stream, and lets the lock go meanwhile.
static void step(struct stream *s) {
    struct task *t = s->head;
    int code = 0;
    bool ran = false;
    s->busy = true;
    kvd_set_task(t->number);
    kvd_trail_begin(t->late);
    bool skip = s->aborting || (s->error && s->stop_on_error);
    if (!skip && t->fault) code = t->fault;
    else if (!skip && t == s->hopeless) code = kvd_gave_up(t);
    else if (!skip && any_dead(t)) code = RT_AICORE_EXCEPTION;
    else if (!skip && t->run) {
        pthread_mutex_unlock(&kvd_lock);
        code = t->run(t);
        pthread_mutex_lock(&kvd_lock);
        ran = true;
    }
    if (!ran) kvd_skip_nodes(t, 0);
    kvd_set_task(0);
    if (t->late) kvd_journal_done(t->number, t->id, skip ? RT_AICORE_EXCEPTION : code);
    kvd_trail_end();
    s->hopeless = NULL;
    if (code && !s->error) {
        s->error = code;
        free(s->error_text);
        s->error_text = fault_text;
        fault_text = NULL;
    }
    if (t->record) kvd_complete(t->record, s->error);
    s->head = t->next;
    if (!s->head) s->tail = NULL;
    kvd_count(t, -1);
    kvd_drop_task(t);
    s->done++;
    s->busy = false;
    kvd_notify();
}

static void *work(void *argument) {
    struct stream *s = working = argument;
    pthread_mutex_lock(&kvd_lock);
    for (;;) {
        struct task *t = s->head;
        bool may = !s->busy && (!kvd_settings.hold || s->aborting);
        may = may && (kvd_settings.eager || s->aborting || s->done < s->allowed);
        if (!t && s->closing) break;
        if (t && may && t->wait && !t->wait->done && !s->aborting && s->hopeless != t) {
            // What it waits for may go on, and no more than that.
            if (t->wait->stream) kvd_allow(t->wait->stream, t->wait->position);
            may = t->wait->done;
            if (!may) s->pauses = t;
        }
        if (!t || !may) {
            s->blocked = t != NULL;
            pthread_cond_wait(&s->wake, &kvd_lock);
            s->blocked = false;
            s->pauses = NULL;
            continue;
        }
        step(s);
    }
    pthread_mutex_unlock(&kvd_lock);
    kvd_leave_python();
    return NULL;
}

void kvd_allow(struct stream *s, uint64_t position) {
    if (s->allowed >= position) return;
    s->allowed = position;
    if (s->head) pthread_cond_signal(&s->wake);
}

// A wait or a replay is left to the stream's thread, and so are functions of the program.
static bool is_for_waiters(const struct task *t) {
    if (!t || (t->run && t->runs == BY_ITS_STREAM)) return false;
    return !t->wait || t->wait->done;
}

uint64_t kvdouble_num_helped;  // tasks that threads ran that waited for them

void kvd_help(struct stream *s, uint64_t position) {
    if (!kvd_settings.patience_ns || kvd_settings.hold || s->busy || s->aborting) return;
    if (working || kvdouble_task() || kvd_in_callback() != NO_CALLBACK) return;
    if (s->done >= position || !is_for_waiters(s->head)) return;
    const char *symbol = kvd_symbol();
    kvd_let_python();
    void *state = kvd_swap_python(NULL);  // what a task calls must not take it back
    bool asked = false;
    while (s->done < position && !s->busy && !s->aborting && is_for_waiters(s->head)) {
        if (!asked && s->head->runs == BY_PYTHON_WAITERS) {
            s->busy = asked = true;
            pthread_mutex_unlock(&kvd_lock);
            bool may = kvd_may_run_python();
            pthread_mutex_lock(&kvd_lock);
            s->busy = false;
            if (!may) break;
        }
        kvdouble_num_helped += s->head->run != NULL;
        step(s);
    }
    kvd_swap_python(state);
    kvd_set_symbol(symbol);
    if (s->head && s->done < s->allowed) pthread_cond_signal(&s->wake);
}

// -- the clock ------------------------------------------------------------------------------------------------

static pthread_cond_t clock_wake = PTHREAD_COND_INITIALIZER;
static bool clock_runs, clock_ticks;

static void tick_of(void *stream, void *more) {
    struct stream *s = stream;
    kvd_allow(s, s->seen);
    s->seen = s->enqueued;
    if (s->allowed < s->enqueued) *(bool *)more = true;
}

static void *tick(void *unused) {
    pthread_mutex_lock(&kvd_lock);
    for (;;) {
        while (!clock_ticks) pthread_cond_wait(&clock_wake, &kvd_lock);
        uint64_t ns = kvd_settings.patience_ns;
        struct timespec pause = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
        pthread_mutex_unlock(&kvd_lock);
        nanosleep(&pause, NULL);
        pthread_mutex_lock(&kvd_lock);
        clock_ticks = false;
        kvd_each(H_STREAM, tick_of, &clock_ticks);
    }
    return unused;
}

static void start_clock(void) {
    clock_ticks = true;
    pthread_t thread;
    if (clock_runs) pthread_cond_signal(&clock_wake);
    else if (pthread_create(&thread, NULL, tick, NULL)) abort();
    else pthread_detach(thread);
    clock_runs = true;
}

void kvd_forget_clock(void) {
    clock_runs = clock_ticks = false;
    pthread_cond_init(&clock_wake, NULL);
}

// A stream's queue is as long as on a device; a launch on a full one waits.
enum { DEPTH = 4096 };

static void make_room(struct stream *s) {
    if (s->enqueued - s->done < DEPTH) return;
    uint64_t serial = s->handle.serial, position = s->enqueued - DEPTH / 2;
    kvd_allow(s, position);
    while (kvd_is_live(s, H_STREAM, serial) && s->done < position)
        kvd_wait_for_streams(NULL);
}

struct clash {
    struct stream *stream;
    struct task *task;
};

static void find_clash(void *stream, void *data) {
    struct stream *other = stream;
    struct clash *c = data;
    if (other == c->stream) return;
    uint64_t before = kvd_position_before(&c->stream->past, other);
    for (struct task *t = other->head; t; t = t->next) {
        if (t->workspace != c->task->workspace || t->position <= before) continue;
        if (t->workspace_start >= c->task->workspace_start + c->task->workspace_size) continue;
        if (c->task->workspace_start >= t->workspace_start + t->workspace_size) continue;
        violate(OK, "5.3", "the workspace is in use by a task of another stream, and no event orders them");
        return;
    }
}

uint64_t kvd_last_launch_ns;

int kvd_launch(struct stream *s, struct task *t) {
    if (s->capture) return kvd_capture_task(s, t);
    if (s->update) return kvd_update_task(s, t);
    t->fault = kvd_async_fault(t->symbol);
    if (kvd_settings.poison && s->error && !t->record) {
        kvd_drop_task(t);
        return error(s->error, "an earlier task failed");  // 2: the context is usually unusable
    }
    if (!s->started) {
        s->started = true;
        if (pthread_create(&s->thread, NULL, work, s)) abort();
    }
    if (kvd_settings.patience_ns) make_room(s);
    struct clash clash = {s, t};
    if (t->workspace) kvd_each(H_STREAM, find_clash, &clash);
    kvd_last_launch_ns = kvd_now_ns();
    t->position = s->enqueued + 1;
    t->number = kvd_next_tasks(t->graph ? 1 + (uint64_t)t->graph->count : 1);
    if (t->graph) kvd_journal_replay(t, s);
    else if (t->run) kvd_journal_task(t, t->number, s, 0);
    kvd_count(t, 1);
    if (s->tail) s->tail->next = t;
    else s->head = t;
    s->tail = t;
    s->enqueued++;
    if (kvd_settings.eager || s->allowed >= s->enqueued) pthread_cond_signal(&s->wake);
    else if (kvd_settings.patience_ns && !clock_ticks) start_clock();
    return OK;
}

static bool overlaps(const struct task *t, const struct block *b, size_t start, size_t size,
                     bool write) {
    for (int i = 0; i < t->num_touches; i++) {
        const struct touch *one = &t->touches[i];
        if (one->block == b && (write || one->write) && one->start < start + size &&
            start < one->start + one->size)
            return true;
    }
    for (int i = 0; t->graph && i < t->graph->count; i++)
        if (overlaps(t->graph->nodes[i].task, b, start, size, write)) return true;
    return false;
}

struct pending {
    struct block *block;
    size_t start, size;
    bool write;
    struct task *found;
};

static void find_pending(void *stream, void *data) {
    struct pending *p = data;
    for (struct task *t = ((struct stream *)stream)->head; t && !p->found; t = t->next)
        if (overlaps(t, p->block, p->start, p->size, p->write)) p->found = t;
}

struct task *kvd_pending(const void *address, size_t size, bool write) {
    struct pending p = {.size = size, .write = write};
    kvd_find(address, &p.block);
    if (!p.block || !p.block->pending) return NULL;
    p.start = (uintptr_t)address - p.block->start;
    kvd_each(H_STREAM, find_pending, &p);
    return p.found;
}

bool kvd_drain(struct stream *s, uint64_t position, int64_t timeout_ms) {
    uint64_t serial = s->handle.serial, mark = kvd_next_mark();
    bool passed = true;
    kvd_journal_stream(ENTRY_MARK, s, mark);
    if (timeout_ms < 0) kvd_help(s, position);
    kvd_allow(s, position);
    struct timespec at;
    if (timeout_ms >= 0) kvd_deadline(&at, timeout_ms);
    while (passed && kvd_is_live(s, H_STREAM, serial) && s->done < position)
        passed = kvd_wait_for_streams(timeout_ms < 0 ? NULL : &at) || s->done >= position;
    if (passed) kvd_journal_mark(ENTRY_JOIN, mark);
    kvd_journal_mark(ENTRY_DROP, mark);
    return passed;
}

void kvd_close_stream(struct stream *s, bool drop_work) {
    if (s->capture) kvd_invalidate(s->capture);
    kvd_drop_update(s);
    s->closing = true;
    s->aborting = s->aborting || drop_work;
    kvd_allow(s, UINT64_MAX);
    pthread_cond_signal(&s->wake);
    kvd_notify();
    while (s->started && s->head && !kvd_settings.hold) kvd_wait_for_streams(NULL);
    if (s->started) {
        kvd_let_python();
        pthread_mutex_unlock(&kvd_lock);
        pthread_join(s->thread, NULL);
        pthread_mutex_lock(&kvd_lock);
    }
    if (s->context->default_stream == s) s->context->default_stream = NULL;
    else num_streams--;
    free(s->past.of);
    pthread_cond_destroy(&s->wake);
    free(s->error_text);
    kvd_destroy(s);
}

// 2: asynchronous errors surface at the next synchronise; here once, unless poisoned.
int kvd_take_error(struct stream *s) {
    int code = s->error;
    if (!kvd_settings.poison) s->error = 0;
    return code ? error(code, "%s", s->error_text ? s->error_text : "a task of the stream failed") : OK;
}

// -- making and finding -----------------------------------------------------------------------------------------

static struct stream *make(struct context *c) {
    struct stream *s = kvd_create(H_STREAM, sizeof *s);
    s->context = c;
    s->capture_tail = -1;
    pthread_cond_init(&s->wake, NULL);
    return s;
}

struct stream *kvd_stream(const void *address, int *code) {
    struct context *c = kvd_context();
    if (!address) {  // 5.8: the context's default stream
        if (!c->default_stream) c->default_stream = make(c);
        return c->default_stream;
    }
    struct stream *s = kvd_check(address, H_STREAM, "stream");
    if (!s) *code = RT_INVALID_HANDLE;
    else if (s->context != c)
        *code = violate(RT_STREAM_CONTEXT, "5.8", "the stream belongs to another context");
    return *code ? NULL : s;
}

static int create_stream(void **stream, uint32_t priority, uint32_t flags) {
    if (!stream) return violate(INVALID_PARAM, "1.5", "stream is NULL");
    *stream = NULL;
    if (priority > 7) return violate(RT_PARAM_INVALID, "1.5", "priority %u", priority);
    if (flags & ~0x3Fu) return violate(RT_PARAM_INVALID, "2", "flag %#x", flags);
    if (num_streams >= MAX_STREAMS) return error(RT_NO_STREAM, "%d streams", num_streams);
    struct stream *s = make(kvd_context());
    s->priority = priority;
    s->flags = flags;
    num_streams++;
    *stream = s;
    return OK;
}

int aclrtCreateStream(void **stream) {
    int code = enter("aclrtCreateStream", RUNTIME, "%p", (void *)stream);
    return leave(code ? code : create_stream(stream, 0, 0));
}

int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag) {
    int code = enter("aclrtCreateStreamWithConfig", RUNTIME, "%u, %#x", priority, flag);
    return leave(code ? code : create_stream(stream, priority, flag));
}

struct stream_config {
    struct handle handle;
    uint32_t values[8];
};

void *aclrtCreateStreamConfigHandle(void) {
    int code = enter("aclrtCreateStreamConfigHandle", INIT, "%s", "");
    void *h = code ? NULL : kvd_create(H_STREAM_CONFIG, sizeof(struct stream_config));
    leave(code);
    return h;
}

int aclrtSetStreamConfigOpt(void *handle, int attribute, const void *value, size_t size) {
    int code = enter("aclrtSetStreamConfigOpt", INIT, "%d, %zu", attribute, size);
    if (code) return leave(code);
    struct stream_config *c = kvd_check(handle, H_STREAM_CONFIG, "handle");
    if (!c) return leave(RT_INVALID_HANDLE);
    if (attribute < 0 || attribute > 7 || !value || size < 4)
        return leave(violate(RT_PARAM_INVALID, "1.5", "attribute %d of %zu bytes", attribute, size));
    memcpy(&c->values[attribute], value, 4);
    return leave(OK);
}

int aclrtCreateStreamV2(void **stream, const void *handle) {
    int code = enter("aclrtCreateStreamV2", RUNTIME, "%p", handle);
    if (code) return leave(code);
    if (handle && !kvd_check(handle, H_STREAM_CONFIG, "handle")) return leave(RT_INVALID_HANDLE);
    return leave(create_stream(stream, 0, 0));
}

int aclrtDestroyStreamConfigHandle(void *handle) {
    int code = enter("aclrtDestroyStreamConfigHandle", INIT | AFTER, "%p", handle);
    if (code) return leave(code);
    if (!kvd_check(handle, H_STREAM_CONFIG, "handle")) return leave(RT_INVALID_HANDLE);
    kvd_destroy(handle);
    return leave(OK);
}

// -- ending ---------------------------------------------------------------------------------------------------

static int destroy_stream(void *stream, bool force) {
    int code = 0;
    if (!stream) return violate(RT_PARAM_INVALID, "1.5", "stream is NULL");
    struct stream *s = kvd_stream(stream, &code);
    if (!s) return code;
    if (s == s->context->default_stream)
        return violate(RT_PARAM_INVALID, "1.5", "the default stream is the context's");
    if (s->capture) violate(OK, "1.8", "the stream is captured");
    if (s->subscribed) violate(OK, "1.7", "the stream is subscribed");
    kvd_close_stream(s, force);  // 5.8: waits for completion
    return OK;
}

int aclrtDestroyStream(void *stream) {
    int code = enter("aclrtDestroyStream", RUNTIME | AFTER, "%p", stream);
    return leave(code ? code : destroy_stream(stream, false));
}

int aclrtDestroyStreamForce(void *stream) {
    int code = enter("aclrtDestroyStreamForce", RUNTIME | AFTER, "%p", stream);
    return leave(code ? code : destroy_stream(stream, true));
}

int aclrtStreamAbort(void *stream) {
    int code = enter("aclrtStreamAbort", RUNTIME | AFTER, "%p", stream);
    struct stream *s = code ? NULL : kvd_stream(stream, &code);
    if (!s) return leave(code);
    uint64_t serial = s->handle.serial;
    s->aborting = true;
    pthread_cond_signal(&s->wake);
    kvd_drain(s, s->enqueued, -1);
    if (kvd_is_live(s, H_STREAM, serial)) s->aborting = false;
    return leave(OK);
}

// -- waiting ----------------------------------------------------------------------------------------------------

static int synchronize(void *stream, int32_t timeout_ms) {
    int code = 0;
    struct stream *s = kvd_stream(stream, &code);
    if (!s) return code;
    if (timeout_ms < -1)  // 1.5
        return violate(RT_PARAM_INVALID, "1.5", "timeout %d", timeout_ms);
    if (s->capture) {
        kvd_invalidate(s->capture);
        return violate(RT_STREAM_CAPTURED, "1.8", "the stream is being captured");
    }
    uint64_t serial = s->handle.serial;
    int refused = kvd_callback_refuses();
    if (refused) return refused;
    if (!kvd_drain(s, s->enqueued, timeout_ms))
        return error(RT_STREAM_SYNC_TIMEOUT, "not complete in %d ms", timeout_ms);
    if (!kvd_is_live(s, H_STREAM, serial))
        return violate(RT_INVALID_HANDLE, "1.5", "the stream was destroyed meanwhile");
    return kvd_take_error(s);
}

int aclrtSynchronizeStream(void *stream) {
    int code = enter("aclrtSynchronizeStream", RUNTIME | AFTER, "%p", stream);
    return leave(code ? code : synchronize(stream, -1));
}

int aclrtSynchronizeStreamWithTimeout(void *stream, int32_t ms) {
    int code = enter("aclrtSynchronizeStreamWithTimeout", RUNTIME | AFTER, "%p, %d", stream, ms);
    return leave(code ? code : synchronize(stream, ms));
}

struct round {
    int device;
    uint64_t below;  // serials seen so far
    struct stream *next;
};

static void pick(void *stream, void *data) {
    struct stream *s = stream;
    struct round *r = data;
    if (s->context->device != r->device || s->handle.serial <= r->below) return;
    if (!r->next || s->handle.serial < r->next->handle.serial) r->next = s;
}

static int sync_device(int device, int64_t timeout_ms) {
    int first = kvd_capture_refuses();
    if (first) return first;
    struct round r = {device, 0, NULL};
    for (;;) {
        r.next = NULL;
        kvd_each(H_STREAM, pick, &r);
        struct stream *s = r.next;
        if (!s) return first;
        r.below = s->handle.serial;
        if (s->capture) continue;
        if (!kvd_drain(s, s->enqueued, timeout_ms))
            return error(RT_STREAM_SYNC_TIMEOUT, "not complete in time");
        if (!kvd_is_live(s, H_STREAM, r.below)) continue;
        int code = kvd_take_error(s);
        if (!first) first = code;
    }
}

// For the frees that wait: errors stay for the next synchronise.
static void keep(void *stream, void *data) {
    (void)data;
    struct stream *s = stream;
    kvd_allow(s, s->enqueued);
}

void kvd_sync_all(int device) {
    struct round r = {device, 0, NULL};
    kvd_each(H_STREAM, keep, NULL);
    for (;;) {
        r.next = NULL;
        kvd_each(H_STREAM, pick, &r);
        if (!r.next) return;
        r.below = r.next->handle.serial;
        if (!r.next->capture) kvd_drain(r.next, r.next->enqueued, -1);
    }
}

// Waits for every device; what failed is reported by the program's own next wait.
void kvdouble_drain(void) {
    pthread_mutex_lock(&kvd_lock);
    for (int device = 0; device < kvd_settings.devices && !kvdouble_forked(); device++)
        kvd_sync_all(device);
    pthread_mutex_unlock(&kvd_lock);
    kvd_take_python();
}

int aclrtSynchronizeDevice(void) {
    int code = enter("aclrtSynchronizeDevice", RUNTIME | AFTER, "%s", "");
    return leave(code ? code : sync_device(kvd_context()->device, -1));
}

int aclrtSynchronizeDeviceWithTimeout(int32_t ms) {
    int code = enter("aclrtSynchronizeDeviceWithTimeout", RUNTIME | AFTER, "%d", ms);
    if (code) return leave(code);
    if (ms < -1) return leave(violate(RT_PARAM_INVALID, "1.5", "timeout %d", ms));
    return leave(sync_device(kvd_context()->device, ms));
}

int aclrtStreamQuery(void *stream, int *status) {
    int code = enter("aclrtStreamQuery", RUNTIME, "%p", stream);
    struct stream *s = code ? NULL : kvd_stream(stream, &code);
    if (!s) return leave(code);
    if (!status) return leave(violate(INVALID_PARAM, "1.5", "status is NULL"));
    if (s->capture) {
        kvd_invalidate(s->capture);
        return leave(violate(RT_STREAM_CAPTURED, "1.8", "the stream is being captured"));
    }
    *status = s->done < s->enqueued;  // 2: StreamStatus COMPLETE 0, NOT_READY 1
    if (!*status) kvd_drain(s, s->enqueued, -1);  // for the journal: the host knows now
    kvd_allow(s, s->enqueued);
    return leave(OK);
}

// -- attributes ---------------------------------------------------------------------------------------------------

static int get(const char *symbol, void *stream, uint32_t *value, bool flags) {
    int code = enter(symbol, RUNTIME, "%p", stream);
    struct stream *s = code ? NULL : kvd_stream(stream, &code);
    if (!s) return leave(code);
    if (!value) return leave(violate(INVALID_PARAM, "1.5", "value is NULL"));
    *value = flags ? s->flags : s->priority;
    return leave(OK);
}

int aclrtStreamGetPriority(void *stream, uint32_t *priority) {
    return get("aclrtStreamGetPriority", stream, priority, false);
}

int aclrtStreamGetFlags(void *stream, uint32_t *flags) {
    return get("aclrtStreamGetFlags", stream, flags, true);
}

int aclrtSetStreamFailureMode(void *stream, uint64_t mode) {
    int code = enter("aclrtSetStreamFailureMode", RUNTIME, "%p, %d", stream, (int)mode);
    if (code) return leave(code);
    if (!stream) return leave(violate(RT_PARAM_INVALID, "1.5", "stream is NULL"));
    struct stream *s = kvd_stream(stream, &code);
    if (!s) return leave(code);
    if (mode > 1) return leave(violate(RT_PARAM_INVALID, "2", "failure mode %d", (int)mode));
    s->stop_on_error = mode == 1;
    return leave(OK);
}

int aclrtDeviceGetStreamPriorityRange(int32_t *least, int32_t *greatest) {
    int code = enter("aclrtDeviceGetStreamPriorityRange", RUNTIME, "%s", "");
    if (code) return leave(code);
    if (!least || !greatest) return leave(violate(INVALID_PARAM, "1.5", "NULL"));
    *least = 7, *greatest = 0;
    return leave(OK);
}

int aclrtGetStreamAvailableNum(uint32_t *count) {
    int code = enter("aclrtGetStreamAvailableNum", RUNTIME, "%s", "");
    if (code) return leave(code);
    if (!count) return leave(violate(INVALID_PARAM, "1.5", "count is NULL"));
    *count = (uint32_t)(MAX_STREAMS - num_streams);
    return leave(OK);
}
