// SPDX-License-Identifier: Apache-2.0
// Events (section 1.6, 5.8).  Recording takes the event first, waiting takes the stream first.
#include "machine.h"

#include <stdlib.h>

enum { MAX_EVENTS = 65536 };  // 5.8

static int num_events;

static int create(void **event, enum event_made made, uint32_t flags) {
    if (!event) return violate(INVALID_PARAM, "1.6", "event is NULL");
    *event = NULL;
    if (!flags || flags & ~0x7Bu) return violate(RT_PARAM_INVALID, "2", "flag %#x", flags);
    if ((flags & EVENT_EXTERNAL && flags != EVENT_EXTERNAL) || (flags & EVENT_IPC && flags != EVENT_IPC))
        return violate(RT_PARAM_INVALID, "2", "flag %#x: EXTERNAL and IPC are not OR-able", flags);
    if (num_events >= MAX_EVENTS) return error(RT_NO_EVENT, "%d events", num_events);
    struct event *e = kvd_create(H_EVENT, sizeof *e);
    e->made = made;
    e->flags = flags;
    num_events++;
    *event = e;
    return OK;
}

int aclrtCreateEvent(void **event) {
    int code = enter("aclrtCreateEvent", RUNTIME, "%p", (void *)event);
    return leave(code ? code : create(event, BY_CREATE, EVENT_SYNC | EVENT_TIME_LINE));
}

int aclrtCreateEventWithFlag(void **event, uint32_t flag) {
    int code = enter("aclrtCreateEventWithFlag", RUNTIME, "%#x", flag);
    return leave(code ? code : create(event, BY_FLAG, flag));
}

int aclrtCreateEventExWithFlag(void **event, uint32_t flag) {
    int code = enter("aclrtCreateEventExWithFlag", RUNTIME, "%#x", flag);
    return leave(code ? code : create(event, BY_EX, flag));
}

static void clear(struct event *e) {
    if (e->last) kvd_drop_recording(e->last);
    e->last = NULL;
    e->captured_by = 0;
}

int aclrtDestroyEvent(void *event) {
    int code = enter("aclrtDestroyEvent", RUNTIME | AFTER, "%p", event);
    if (code) return leave(code);
    struct event *e = kvd_check(event, H_EVENT, "event");
    if (!e) return leave(RT_INVALID_HANDLE);
    clear(e);
    if (e->last_wait) kvd_drop_recording(e->last_wait);
    num_events--;
    kvd_destroy(e);
    return leave(OK);
}

// -- recording ------------------------------------------------------------------------------------------------

struct search {
    uint64_t serial;
    struct graph *found;
};

static void pick_graph(void *graph, void *data) {
    struct graph *g = graph;
    struct search *search = data;
    if (g->handle.serial == search->serial) search->found = g;
}

static struct graph *capturing(const struct event *e) {  // the graph being captured, or NULL
    struct search search = {e->captured_by, NULL};
    if (e->captured_by) kvd_each(H_GRAPH, pick_graph, &search);
    return search.found && search.found->capturing ? search.found : NULL;
}

static int complete_now(struct task *t) {  // of an external record in a graph
    pthread_mutex_lock(&kvd_lock);
    struct recording *r = t->data;
    kvd_complete(r, OK);
    pthread_mutex_unlock(&kvd_lock);
    return OK;
}

static void drop_data(struct task *t) { kvd_drop_recording(t->data); }

static int record(void *event, void *stream, uint32_t flag) {
    int code = 0;
    struct event *e = kvd_check(event, H_EVENT, "event (the first argument)");
    if (!e) return RT_INVALID_HANDLE;
    struct stream *s = kvd_stream(stream, &code);
    if (!s) return code;
    if (flag > 1) return violate(RT_PARAM_INVALID, "2", "flag %u", flag);
    struct recording *r = kvd_new_recording();
    struct task *t = kvd_new_task(NULL);
    if (s->capture && !flag) {
        kvd_drop_recording(r);
        struct graph *g = s->capture;
        code = kvd_launch(s, t);
        if (code) return code;
        clear(e);
        e->captured_by = g->handle.serial;
        e->captured_node = s->capture_tail;
        return OK;
    }
    if (s->capture) {  // external: made at every replay
        t->run = complete_now;
        t->data = r;
        t->release = drop_data;
        t->external = true;
        r->refs++;
        code = kvd_launch(s, t);
    } else {
        r->refs++;
        t->record = r;
        r->stream = s;
        r->position = s->enqueued + 1;
        kvd_join_stream(&r->past, s);
        code = kvd_launch(s, t);
        if (!code) kvd_journal_stream(ENTRY_MARK, s, r->mark = kvd_next_mark());
    }
    if (code) {
        kvd_drop_recording(r);
        return code;
    }
    clear(e);
    e->last = r;
    return OK;
}

int aclrtRecordEvent(void *event, void *stream) {
    int code = enter("aclrtRecordEvent", RUNTIME, "%p, %p", event, stream);
    return leave(code ? code : record(event, stream, 0));
}

int aclrtRecordEventWithFlag(void *event, void *stream, uint32_t flag) {
    int code = enter("aclrtRecordEventWithFlag", RUNTIME, "%p, %p, %u", event, stream, flag);
    return leave(code ? code : record(event, stream, flag));
}

int aclrtResetEvent(void *event, void *stream) {
    int code = enter("aclrtResetEvent", RUNTIME, "%p, %p", event, stream);
    if (code) return leave(code);
    struct event *e = kvd_check(event, H_EVENT, "event (the first argument)");
    if (!e) return leave(RT_INVALID_HANDLE);
    struct stream *s = kvd_stream(stream, &code);
    if (!s) return leave(code);
    if (e->made != BY_FLAG)  // 1.6
        return leave(violate(RT_PARAM_INVALID, "5.8", "only for events of aclrtCreateEventWithFlag"));
    code = kvd_launch(s, kvd_new_task(NULL));
    if (!code) clear(e);  // a later wait or query finds it not recorded
    return leave(code);
}

// -- waiting ----------------------------------------------------------------------------------------------------

static int wait(void *stream, void *event, int64_t timeout_s, uint32_t flag) {
    int code = 0;
    if (kvd_is_live(stream, H_EVENT, 0))
        return violate(RT_INVALID_HANDLE, "1.6", "stream (the first argument): got an event");
    struct stream *s = kvd_stream(stream, &code);
    if (!s) return code;
    struct event *e = kvd_check(event, H_EVENT, "event (the second argument)");
    if (!e) return RT_INVALID_HANDLE;
    if (flag > 1 || timeout_s < 0)
        return violate(RT_PARAM_INVALID, "1.6", "flag %u, timeout %d", flag, (int)timeout_s);
    if (!(e->flags & (EVENT_SYNC | EVENT_EXTERNAL | EVENT_IPC)))
        return violate(RT_PARAM_INVALID, "5.8", "the event has no flag SYNC: %#x", e->flags);
    struct graph *g = capturing(e);
    if (g && !flag) {  // the stream joins the capture
        if (s->capture && s->capture != g) {
            kvd_invalidate(g);
            return violate(RT_CAPTURE_DEPENDENCY, "1.8", "the event belongs to another capture");
        }
        if (!s->capture) {
            s->capture = g;
            s->capture_tail = -1;
        }
        struct task *t = kvd_new_task(NULL);
        code = kvd_launch(s, t);
        if (!code) g->nodes[g->count - 1].joins = e->captured_node;
        return code;
    }
    if (e->captured_by && !flag)
        return violate(RT_EVENT_CAPTURED, "1.8", "the event was recorded in a capture");
    if (s->capture && !flag) {
        kvd_invalidate(s->capture);
        return violate(RT_CAPTURE_DEPENDENCY, "1.8", "the event was recorded outside of the capture");
    }
    struct task *t = kvd_new_task(NULL);
    if (e->last) {
        e->last->refs++;
        t->wait = e->last;
        t->external = flag;
        kvd_join(&s->past, &e->last->past);
    }
    if (e->last_wait) kvd_drop_recording(e->last_wait);
    e->last_wait = kvd_new_recording();
    if (!s->capture) {
        e->last_wait->refs++;
        t->record = e->last_wait;
        e->last_wait->stream = s;
        e->last_wait->position = s->enqueued + 1;
    }
    code = kvd_launch(s, t);
    if (code || s->capture) return code;
    if (e->last) {
        if (!e->last->mark) e->last->mark = kvd_next_mark();  // of a replay that is still to come
        kvd_journal_stream(ENTRY_WAIT, s, e->last->mark);
    }
    kvd_journal_stream(ENTRY_MARK, s, e->last_wait->mark = kvd_next_mark());
    return code;
}

int aclrtStreamWaitEvent(void *stream, void *event) {
    int code = enter("aclrtStreamWaitEvent", RUNTIME, "%p, %p", stream, event);
    return leave(code ? code : wait(stream, event, 0, 0));
}

int aclrtStreamWaitEventWithTimeout(void *stream, void *event, int32_t timeout_s) {
    int code = enter("aclrtStreamWaitEventWithTimeout", RUNTIME, "%p, %p, %d", stream, event, timeout_s);
    return leave(code ? code : wait(stream, event, timeout_s, 0));
}

int aclrtStreamWaitEventWithFlag(void *stream, void *event, uint32_t timeout_s, uint32_t flag) {
    int code = enter("aclrtStreamWaitEventWithFlag", RUNTIME, "%p, %p, %u, %u", stream, event, timeout_s,
                     flag);
    return leave(code ? code : wait(stream, event, timeout_s, flag));
}

// -- asking -----------------------------------------------------------------------------------------------------

static struct event *ask(void *event, void *answer, int *code) {
    struct event *e = kvd_check(event, H_EVENT, "event");
    if (!e) *code = RT_INVALID_HANDLE;
    else if (!answer) *code = violate(INVALID_PARAM, "1.6", "the answer is NULL");
    else if (e->captured_by)
        *code = violate(RT_EVENT_CAPTURED, "1.8", "the event was recorded in a capture");
    return *code ? NULL : e;
}

static bool complete(struct event *e) {
    if (!e->last) return e->made == BY_EX;  // 5.8: a never-recorded Ex event reports COMPLETE
    bool done = e->last->done;
    if (!done && e->last->stream) kvd_allow(e->last->stream, e->last->position);
    if (done) kvd_journal_mark(ENTRY_JOIN, e->last->mark);
    return done;
}

int aclrtQueryEventStatus(void *event, int *status) {
    int code = enter("aclrtQueryEventStatus", RUNTIME, "%p", event);
    struct event *e = code ? NULL : ask(event, status, &code);
    if (!e) return leave(code);
    *status = complete(e);  // 2: aclrtEventRecordedStatus NOT_READY 0, COMPLETE 1
    return leave(OK);
}

int aclrtQueryEvent(void *event, int *status) {
    int code = enter("aclrtQueryEvent", RUNTIME, "%p", event);
    struct event *e = code ? NULL : ask(event, status, &code);
    if (!e) return leave(code);
    if (e->made == BY_EX) return leave(violate(RT_PARAM_INVALID, "5.8", "not for Ex events"));
    *status = !complete(e);  // 2: aclrtEventStatus COMPLETE 0, NOT_READY 1
    return leave(OK);
}

int aclrtQueryEventWaitStatus(void *event, int *status) {
    int code = enter("aclrtQueryEventWaitStatus", RUNTIME, "%p", event);
    struct event *e = code ? NULL : ask(event, status, &code);
    if (!e) return leave(code);
    if (e->made == BY_EX) return leave(violate(RT_PARAM_INVALID, "5.8", "not for Ex events"));
    struct recording *r = e->last_wait;
    *status = r && !r->done;  // 2: COMPLETE 0, NOT_READY 1
    if (*status && r->stream) kvd_allow(r->stream, r->position);
    if (r && !*status) kvd_journal_mark(ENTRY_JOIN, r->mark);
    return leave(OK);
}

static int synchronize(void *event, int32_t timeout_ms) {
    int code = 0;
    struct event *e = ask(event, event, &code);
    if (!e) return code;
    if (timeout_ms < -1) return violate(RT_PARAM_INVALID, "1.6", "timeout %d", timeout_ms);
    struct recording *r = e->last;
    if (!r) return OK;
    r->refs++;
    struct timespec at;
    if (timeout_ms >= 0) kvd_deadline(&at, timeout_ms);
    if (!r->done && r->stream && timeout_ms < 0) kvd_help(r->stream, r->position);
    if (!r->done && r->stream) kvd_allow(r->stream, r->position);
    while (!r->done && !code) {
        if (!kvd_wait_for_streams(timeout_ms < 0 ? NULL : &at) && !r->done)
            code = error(RT_EVENT_SYNC_TIMEOUT, "not complete in %d ms", timeout_ms);
    }
    if (!code) kvd_journal_mark(ENTRY_JOIN, r->mark);
    if (!code && r->error) code = error(r->error, "a task before the event failed");
    kvd_drop_recording(r);
    return code;
}

int aclrtSynchronizeEvent(void *event) {
    int code = enter("aclrtSynchronizeEvent", RUNTIME | AFTER, "%p", event);
    return leave(code ? code : synchronize(event, -1));
}

int aclrtSynchronizeEventWithTimeout(void *event, int32_t ms) {
    int code = enter("aclrtSynchronizeEventWithTimeout", RUNTIME | AFTER, "%p, %d", event, ms);
    return leave(code ? code : synchronize(event, ms));
}

static int timed(struct event *e) {
    if (!(e->flags & EVENT_TIME_LINE))
        return violate(RT_PARAM_INVALID, "5.8", "the event has no flag TIME_LINE: %#x", e->flags);
    if (!e->last || !e->last->done) return error(RT_EVENT_NOT_COMPLETE, "the event is not complete");
    return OK;
}

int aclrtEventElapsedTime(float *ms, void *start, void *end) {
    int code = enter("aclrtEventElapsedTime", RUNTIME, "%p, %p", start, end);
    struct event *a = code ? NULL : ask(start, ms, &code), *b = a ? ask(end, ms, &code) : NULL;
    if (!code) code = timed(a);
    if (!code) code = timed(b);
    if (code) return leave(code);
    *ms = (float)((double)(int64_t)(b->last->time_ns - a->last->time_ns) / 1e6);
    return leave(OK);
}

// The last record in the journal, 0: there is none.
uint64_t kvdouble_event_mark(const void *event) {
    pthread_mutex_lock(&kvd_lock);
    const struct event *e = kvd_is_live(event, H_EVENT, 0) ? event : NULL;
    uint64_t mark = e && e->last ? e->last->mark : 0;
    pthread_mutex_unlock(&kvd_lock);
    return mark;
}

int aclrtEventGetTimestamp(void *event, uint64_t *timestamp) {
    int code = enter("aclrtEventGetTimestamp", RUNTIME, "%p", event);
    struct event *e = code ? NULL : ask(event, timestamp, &code);
    if (!code) code = timed(e);
    if (code) return leave(code);
    *timestamp = e->last->time_ns / 1000;
    return leave(OK);
}

// torch_npu's process group sets it before anything else.
int aclrtSetOpWaitTimeout(uint32_t seconds) {
    int code = enter("aclrtSetOpWaitTimeout", CALLABLE, "%u", seconds);
    return leave(code);
}

int aclrtGetEventAvailNum(uint32_t *count) {
    int code = enter("aclrtGetEventAvailNum", RUNTIME, "%s", "");
    if (code) return leave(code);
    if (!count) return leave(violate(INVALID_PARAM, "1.6", "count is NULL"));
    *count = (uint32_t)(MAX_EVENTS - num_events);
    return leave(OK);
}

void kvd_forget_events(void) { num_events = 0; }
