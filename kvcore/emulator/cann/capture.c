// SPDX-License-Identifier: Apache-2.0
// Capture and replay (section 1.8).  A graph keeps its tasks in the order they were captured, which
// respects every dependency; a replay runs them one after the other.
#include "machine.h"

#include <stdio.h>
#include <stdlib.h>

static _Thread_local int thread_mode = MODE_GLOBAL;

int kvd_capture_task(struct stream *s, struct task *t) {
    struct graph *g = s->capture;
    if (g->invalid) {
        kvd_drop_task(t);
        return error(RT_CAPTURE_INVALIDATED, "the capture is invalid");
    }
    if (g->count == g->room) {
        g->room = 2 * g->room + 16;
        g->nodes = realloc(g->nodes, (size_t)g->room * sizeof *g->nodes);
        if (!g->nodes) abort();
    }
    g->nodes[g->count] = (struct node){t, s->capture_tail, -1};
    s->capture_tail = g->count++;
    return OK;
}

void kvd_invalidate(struct graph *g) { g->invalid = true; }

static void pick_refusing(void *graph, void *data) {
    struct graph *g = graph, **found = data;
    if (!g->capturing || g->mode == MODE_RELAXED) return;
    bool mine = pthread_equal(g->thread, pthread_self());
    // By the thread's own mode: GLOBAL is refused for any global capture, THREAD_LOCAL for its own.
    if (mine || (g->mode == MODE_GLOBAL && thread_mode == MODE_GLOBAL)) *found = g;
}

int kvd_callback_refuses(void) {
    if (kvd_in_callback() != REPORTED_CALLBACK) return OK;
    return violate(RT_INTERNAL, "1.7", "a synchronous call in a callback, for which a stream waits");
}

// Every call that waits asks here first, or kvd_callback_refuses where captures have another rule.
int kvd_capture_refuses(void) {
    int code = kvd_callback_refuses();
    if (code) return code;
    struct graph *found = NULL;
    if (thread_mode != MODE_RELAXED) kvd_each(H_GRAPH, pick_refusing, &found);
    if (!found) return OK;
    kvd_invalidate(found);
    return violate(RT_CAPTURE_MODE, "1.8", "a synchronous call during a capture");
}

int aclmdlRICaptureBegin(void *stream, int mode) {
    int code = enter("aclmdlRICaptureBegin", RUNTIME, "%p, %d", stream, mode);
    struct stream *s = code ? NULL : kvd_stream(stream, &code);
    if (!s) return leave(code);
    if (!stream) return leave(violate(RT_PARAM_INVALID, "1.8", "the default stream"));
    if (mode < 0 || mode > 2) return leave(violate(RT_PARAM_INVALID, "2", "mode %d", mode));
    if (s->capture) return leave(violate(RT_STREAM_CAPTURED, "1.8", "the stream is captured already"));
    struct graph *g = kvd_create(H_GRAPH, sizeof *g);
    g->origin = s;
    g->mode = mode;
    g->thread = pthread_self();
    g->capturing = true;
    g->group_start = -1;
    s->capture = g;
    s->capture_tail = -1;
    return leave(OK);
}

static void leave_capture(void *stream, void *graph) {
    struct stream *s = stream;
    if (s->capture != graph) return;
    s->capture = NULL;
    s->capture_tail = -1;
}

static bool joined(struct graph *g, int tail) {  // whether the origin's last node follows all others
    bool *seen = calloc((size_t)g->count + 1, 1);
    if (!seen) abort();
    if (tail >= 0) seen[tail] = true;
    bool all = true;
    for (int i = g->count - 1; i >= 0; i--) {  // dependencies point backwards
        if (!seen[i]) all = false;
        if (seen[i] && g->nodes[i].before >= 0) seen[g->nodes[i].before] = true;
        if (seen[i] && g->nodes[i].joins >= 0) seen[g->nodes[i].joins] = true;
    }
    free(seen);
    return all;
}

static void drop_group(void *group, void *graph) {
    if (((struct task_group *)group)->serial == ((struct graph *)graph)->handle.serial)
        kvd_destroy(group);
}

void kvd_free_graph(struct graph *g) {
    kvd_journal_mark(ENTRY_FORGET, g->handle.serial);
    kvd_each(H_TASK_GROUP, drop_group, g);
    for (int i = 0; i < g->count; i++) kvd_drop_task(g->nodes[i].task);
    free(g->nodes);
    kvd_destroy(g);
}

int aclmdlRICaptureEnd(void *stream, void **graph) {
    int code = enter("aclmdlRICaptureEnd", RUNTIME | AFTER, "%p", stream);
    struct stream *s = code ? NULL : kvd_stream(stream, &code);
    if (!s) return leave(code);
    if (!graph) return leave(violate(RT_PARAM_INVALID, "1.8", "modelRI is NULL"));
    *graph = NULL;
    struct graph *g = s->capture;
    if (!g) return leave(violate(RT_STREAM_NOT_CAPTURED, "1.8", "the stream is not captured"));
    if (g->origin != s)
        return leave(violate(RT_CAPTURE_UNMATCHED, "1.8", "the capture began on another stream"));
    if (g->mode != MODE_RELAXED && !pthread_equal(g->thread, pthread_self()))
        return leave(violate(RT_CAPTURE_WRONG_THREAD, "1.8", "another thread began the capture"));
    int tail = s->capture_tail;
    if (g->invalid) code = error(RT_CAPTURE_INVALIDATED, "the capture is invalid");
    else if (g->group_start >= 0) code = violate(RT_CAPTURE_UNMATCHED, "1.8", "an open task group");
    else if (!joined(g, tail))
        code = violate(RT_STREAM_UNJOINED, "1.8", "a forked stream was not joined");
    else code = kvd_forced();
    g->capturing = false;
    kvd_each(H_STREAM, leave_capture, g);
    if (code) kvd_free_graph(g);
    else kvd_journal_graph(*graph = g);
    return leave(code);
}

int aclmdlRICaptureGetInfo(void *stream, int *status, void **graph) {
    int code = enter("aclmdlRICaptureGetInfo", RUNTIME, "%p", stream);
    struct stream *s = code ? NULL : kvd_stream(stream, &code);
    if (!s) return leave(code);
    struct graph *g = s->capture;
    if (status) *status = !g ? CAPTURE_NONE : g->invalid ? CAPTURE_INVALIDATED : CAPTURE_ACTIVE;
    if (graph) *graph = g;
    return leave(OK);
}

int aclmdlRICaptureThreadExchangeMode(int *mode) {
    int code = enter("aclmdlRICaptureThreadExchangeMode", INIT, "%d", mode ? *mode : -1);
    if (code) return leave(code);
    if (!mode || *mode < 0 || *mode > 2) return leave(violate(RT_PARAM_INVALID, "2", "mode"));
    int before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return leave(OK);
}

// -- replay -----------------------------------------------------------------------------------------------------

static int run_nodes(struct task *t) {
    struct graph *g = t->graph;
    for (int i = 0; i < g->count; i++) {
        // An update may replace a task while the replay waits in front of it.
        struct recording *wait = g->nodes[i].task->wait;
        if (wait) {  // external
            pthread_mutex_lock(&kvd_lock);
            const struct task *node = g->nodes[i].task;
            while (!wait->done && !kvd_aborting() && kvd_pause(node)) {
                if (wait->stream) kvd_allow(wait->stream, wait->position);
                if (!wait->done) kvd_wait(NULL);
            }
            kvd_pause(NULL);
            int lost = wait->done || kvd_aborting() ? OK : kvd_gave_up(node);
            if (lost) kvd_skip_nodes(t, i);
            pthread_mutex_unlock(&kvd_lock);
            if (lost) return lost;
        }
        pthread_mutex_lock(&kvd_lock);
        struct task *node = g->nodes[i].task;
        node->replaying = true;
        int fault = kvd_async_fault(node->symbol);
        pthread_mutex_unlock(&kvd_lock);
        kvd_set_task(t->number + 1 + (uint64_t)i);
        kvd_trail_begin(node->late);
        int code = fault ? fault : node->run ? node->run(node) : OK;
        pthread_mutex_lock(&kvd_lock);
        kvd_journal_done(t->number + 1 + (uint64_t)i, node->id, code);
        kvd_trail_end();
        node->replaying = false;
        if (node->replaced) kvd_drop_task(node);
        if (code) kvd_skip_nodes(t, i + 1);
        pthread_mutex_unlock(&kvd_lock);
        if (code) return code;
    }
    return OK;
}

// For the journal: nodes from there on do not run.
void kvd_skip_nodes(const struct task *t, int first) {
    for (int i = first; t->graph && i < t->graph->count; i++)
        kvd_journal_done(t->number + 1 + (uint64_t)i, 0, RT_AICORE_EXCEPTION);
}

static struct graph *whole(void *graph, int *code) {
    struct graph *g = kvd_check(graph, H_GRAPH, "modelRI");
    if (!g) *code = RT_INVALID_HANDLE;
    else if (g->capturing) *code = violate(RT_PARAM_INVALID, "1.8", "the graph is being captured");
    return *code ? NULL : g;
}

static int check_buffers(struct graph *g) {
    for (int i = 0; i < g->count; i++)
        for (int k = 0; k < g->nodes[i].task->num_touches; k++)
            if (g->nodes[i].task->touches[k].block->dead)
                return violate(RT_PARAM_INVALID, "1.8",
                               "memory used by a captured %s was freed", g->nodes[i].task->symbol);
    return OK;
}

int aclmdlRIExecuteAsync(void *graph, void *stream) {
    int code = enter("aclmdlRIExecuteAsync", RUNTIME, "%p, %p", graph, stream);
    struct graph *g = code ? NULL : whole(graph, &code);
    struct stream *s = g ? kvd_stream(stream, &code) : NULL;
    if (!s) return leave(code);
    if (s->capture) {
        kvd_invalidate(s->capture);
        return leave(violate(RT_STREAM_CAPTURED, "1.8", "a replay inside a capture"));
    }
    code = check_buffers(g);
    if (code) return leave(code);
    struct task *t = kvd_new_task(run_nodes);
    t->graph = g;
    return leave(kvd_launch(s, t));
}

int aclmdlRIExecute(void *graph, int32_t timeout_ms) {
    int code = enter("aclmdlRIExecute", RUNTIME, "%p, %d", graph, timeout_ms);
    struct graph *g = code ? NULL : whole(graph, &code);
    if (g && timeout_ms < -1) code = violate(RT_PARAM_INVALID, "1.8", "timeout %d", timeout_ms);
    if (!code) code = kvd_capture_refuses();
    if (!code) code = check_buffers(g);
    struct stream *s = code ? NULL : kvd_stream(NULL, &code);
    if (!s) return leave(code);
    struct task *t = kvd_new_task(run_nodes);
    t->graph = g;
    code = kvd_launch(s, t);
    if (code) return leave(code);
    if (!kvd_drain(s, s->enqueued, timeout_ms))
        return leave(error(RT_STREAM_SYNC_TIMEOUT, "not complete in %d ms", timeout_ms));
    return leave(kvd_take_error(s));
}

int aclmdlRIDestroy(void *graph) {
    int code = enter("aclmdlRIDestroy", RUNTIME | AFTER, "%p", graph);
    struct graph *g = code ? NULL : whole(graph, &code);
    if (!g) return leave(code);
    if (g->running) return leave(violate(RT_MODEL_RUNNING, "1.8", "the graph is running"));
    kvd_free_graph(g);
    return leave(OK);
}

int aclmdlRIAbort(void *graph) {
    int code = enter("aclmdlRIAbort", RUNTIME | AFTER, "%p", graph);
    if (!code) whole(graph, &code);
    return leave(code);
}

// -- task groups --------------------------------------------------------------------------------------------------

int aclmdlRICaptureTaskGrpBegin(void *stream) {
    int code = enter("aclmdlRICaptureTaskGrpBegin", RUNTIME, "%p", stream);
    struct stream *s = code ? NULL : kvd_stream(stream, &code);
    if (!s) return leave(code);
    if (!s->capture) return leave(violate(RT_STREAM_NOT_CAPTURED, "1.8", "the stream is not captured"));
    if (s->capture->group_start >= 0) return leave(violate(RT_CAPTURE_UNMATCHED, "1.8", "open already"));
    s->capture->group_start = s->capture->count;
    return leave(OK);
}

int aclmdlRICaptureTaskGrpEnd(void *stream, void **group) {
    int code = enter("aclmdlRICaptureTaskGrpEnd", RUNTIME, "%p", stream);
    struct stream *s = code ? NULL : kvd_stream(stream, &code);
    if (!s) return leave(code);
    if (!group) return leave(violate(RT_PARAM_INVALID, "1.8", "grp is NULL"));
    if (!s->capture || s->capture->group_start < 0)
        return leave(violate(RT_CAPTURE_UNMATCHED, "1.8", "no open task group"));
    struct task_group *t = kvd_create(H_TASK_GROUP, sizeof *t);
    t->graph = s->capture;
    t->serial = s->capture->handle.serial;
    t->first = s->capture->group_start;
    t->count = s->capture->count - t->first;
    s->capture->group_start = -1;
    *group = t;
    return leave(OK);
}

int aclmdlRIDebugJsonPrint(void *graph, const char *path, uint32_t flags) {
    int code = enter("aclmdlRIDebugJsonPrint", RUNTIME, "%p, %s, %u", graph, path ? path : "NULL", flags);
    struct graph *g = code ? NULL : whole(graph, &code);
    if (!g) return leave(code);
    FILE *file = path ? fopen(path, "w") : NULL;
    if (!file) return leave(violate(RT_PARAM_INVALID, "1.8", "path"));
    fprintf(file, "[");
    for (int i = 0; i < g->count; i++)
        fprintf(file,
                "%s{\"name\": \"%s\", \"ph\": \"X\", \"ts\": %d, \"dur\": 1, \"pid\": 0, \"tid\": 0}",
                i ? ", " : "", g->nodes[i].task->symbol, i);
    fprintf(file, "]\n");
    fclose(file);
    return leave(OK);
}
