// SPDX-License-Identifier: Apache-2.0
// Host functions and callbacks in stream order (section 1.7).
#include "machine.h"

#include <stdlib.h>

typedef void (*function)(void *data);

struct report {
    struct report *next;
    function fn;
    void *data;
    bool block, done, lost;
    pthread_t thread;
    uint64_t number;  // of the task
    int refs;
};

struct subscription {
    struct subscription *next;
    pthread_t thread;
    struct stream *stream;
    uint64_t serial;
};

static struct report *reports;  // to run, oldest first
static struct subscription *subscriptions;

static void call(function fn, void *data, enum callback_kind kind) {
    kvd_set_in_callback(kind);
    fn(data);
    kvd_set_in_callback(NO_CALLBACK);
}

struct host_function {
    function fn;
    void *data;
};

static int run_host_function(struct task *t) {
    struct host_function *f = t->data;
    call(f->fn, f->data, HOST_FUNCTION);
    return OK;
}

static void free_data(struct task *t) { free(t->data); }

int aclrtLaunchHostFunc(void *stream, function fn, void *data) {
    int code = enter("aclrtLaunchHostFunc", RUNTIME, "%p", stream);
    struct stream *s = code ? NULL : kvd_stream(stream, &code);
    if (!s) return leave(code);
    if (!fn) return leave(violate(RT_PARAM_INVALID, "1.7", "fn is NULL"));
    if (s->used_callback || s->subscribed)
        return leave(violate(RT_PARAM_INVALID, "1.7", "the stream uses aclrtLaunchCallback: not both"));
    s->used_host_func = true;
    struct host_function *f = malloc(sizeof *f);
    if (!f) abort();
    *f = (struct host_function){fn, data};
    struct task *t = kvd_new_task(run_host_function);
    t->late = true;
    t->data = f;
    t->release = free_data;
    code = kvd_launch(s, t);
    if (!code && !s->capture) kvd_allow(s, s->enqueued);  // another stream or thread may wait for it
    return leave(code);
}

// -- callbacks: run by the thread that subscribed ---------------------------------------------------------------

struct callback {
    function fn;
    void *data;
    bool block;
    pthread_t thread;
};

static void drop_report(struct report *r);

// Each run of the task has a report of its own, since a graph may run it again.
static int post(struct task *t) {
    struct callback *c = t->data;
    struct report *r = calloc(1, sizeof *r);
    if (!r) abort();
    *r = (struct report){.fn = c->fn, .data = c->data, .block = c->block, .thread = c->thread,
                         .number = kvdouble_task(), .refs = 2};
    pthread_mutex_lock(&kvd_lock);
    struct report **last = &reports;
    while (*last) last = &(*last)->next;
    *last = r;
    kvd_notify();
    while (r->block && !r->done && !r->lost) kvd_wait(NULL);
    drop_report(r);
    pthread_mutex_unlock(&kvd_lock);
    return OK;
}

static void drop_report(struct report *r) {
    if (!--r->refs) free(r);
}

static struct subscription **subscribed(struct stream *s) {
    struct subscription **at = &subscriptions;
    while (*at && ((*at)->stream != s || (*at)->serial != s->handle.serial)) at = &(*at)->next;
    return at;
}

int aclrtLaunchCallback(function fn, void *data, int block, void *stream) {
    int code = enter("aclrtLaunchCallback", RUNTIME, "%d, %p", block, stream);
    struct stream *s = code ? NULL : kvd_stream(stream, &code);
    if (!s) return leave(code);
    if (!fn || block < 0 || block > 1) return leave(violate(RT_PARAM_INVALID, "1.7", "fn, blockType"));
    if (s->used_host_func)
        return leave(violate(RT_PARAM_INVALID, "1.7", "the stream uses aclrtLaunchHostFunc: not both"));
    struct subscription *sub = *subscribed(s);
    if (!sub) return leave(violate(RT_STREAM_NO_CB_REG, "1.7", "the stream is not subscribed"));
    s->used_callback = true;
    struct callback *c = calloc(1, sizeof *c);
    if (!c) abort();
    *c = (struct callback){fn, data, block, sub->thread};
    struct task *t = kvd_new_task(post);
    t->late = true;
    t->data = c;
    t->release = free_data;
    code = kvd_launch(s, t);
    if (!code && !s->capture) kvd_allow(s, s->enqueued);
    return leave(code);
}

int aclrtSubscribeReport(uint64_t thread, void *stream) {
    int code = enter("aclrtSubscribeReport", RUNTIME, "%p", stream);
    struct stream *s = code ? NULL : kvd_stream(stream, &code);
    if (!s) return leave(code);
    if (s->used_host_func)
        return leave(violate(RT_PARAM_INVALID, "1.7", "the stream uses aclrtLaunchHostFunc: not both"));
    if (s->subscribed) return leave(violate(RT_PARAM_INVALID, "1.7", "subscribed already"));
    struct subscription *sub = calloc(1, sizeof *sub);
    if (!sub) abort();
    *sub = (struct subscription){subscriptions, (pthread_t)thread, s, s->handle.serial};
    subscriptions = sub;
    s->subscribed = true;
    return leave(OK);
}

int aclrtUnSubscribeReport(uint64_t thread, void *stream) {
    int code = enter("aclrtUnSubscribeReport", RUNTIME | AFTER, "%p", stream);
    struct stream *s = code ? NULL : kvd_stream(stream, &code);
    if (!s) return leave(code);
    struct subscription **at = subscribed(s), *sub = *at;
    if (!sub || !pthread_equal(sub->thread, (pthread_t)thread))
        return leave(violate(RT_STREAM_NO_CB_REG, "1.7", "not subscribed by that thread"));
    *at = sub->next;
    free(sub);
    s->subscribed = false;
    return leave(OK);
}

int aclrtProcessReport(int32_t timeout_ms) {
    int code = enter("aclrtProcessReport", RUNTIME, "%d", timeout_ms);
    if (code) return leave(code);
    if (timeout_ms < -1) return leave(violate(RT_PARAM_INVALID, "1.7", "timeout %d", timeout_ms));
    struct subscription *sub = subscriptions;
    while (sub && !pthread_equal(sub->thread, pthread_self())) sub = sub->next;
    if (!sub)  // torch_npu's thread asks before anybody has subscribed
        return leave(error(RT_STREAM_NO_CB_REG, "not the thread that is subscribed"));
    struct timespec at;
    if (timeout_ms >= 0) kvd_deadline(&at, timeout_ms);
    for (;;) {
        struct report **link = &reports;
        while (*link && !pthread_equal((*link)->thread, pthread_self())) link = &(*link)->next;
        struct report *r = *link;
        if (r) {
            *link = r->next;
            pthread_mutex_unlock(&kvd_lock);
            kvd_take_python();
            kvd_set_task(r->number);
            call(r->fn, r->data, REPORTED_CALLBACK);
            kvd_set_task(0);
            pthread_mutex_lock(&kvd_lock);
            r->done = true;
            drop_report(r);
            kvd_notify();
            return leave(OK);
        }
        if (!kvd_wait(timeout_ms < 0 ? NULL : &at))
            return leave(error(RT_REPORT_TIMEOUT, "nothing to run in %d ms", timeout_ms));
    }
}
