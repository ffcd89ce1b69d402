// SPDX-License-Identifier: Apache-2.0
// Update of captured tasks (section 1.8).  What is launched on a stream between the beginning and the end
// of an update is not run: its tasks take the place of a group's, in stream order, so replays launched
// before keep what they had as far as events order them.  The operators, their number, and the shapes
// and types of their tensors stay; addresses and values are new.
#include "machine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TEXT = 1024 };

struct update {
    struct task_group group;  // as it was at the beginning
    struct task **tasks;
    int given;
    bool refused;
};

size_t kvdouble_num_updates;  // open ones; Python looks at it before it asks for one stream

static void describe(const struct task *t, char *text, size_t size) {
    if (t->describe) {
        t->describe(t, text, size);
        return;
    }
    int n = snprintf(text, size, "%s", t->symbol);
    for (int i = 0; i < t->num_touches && n < (int)size; i++)
        n += snprintf(text + n, size - (size_t)n, "%s%zu bytes", i ? ", " : " of ", t->touches[i].size);
}

static struct graph *graph_of(const struct task_group *group) {
    return kvd_is_live(group->graph, H_GRAPH, group->serial) ? group->graph : NULL;
}

int kvd_update_task(struct stream *s, struct task *t) {
    struct update *u = s->update;
    struct graph *g = graph_of(&u->group);
    int code = OK;
    if (!g) code = error(RT_PARAM_INVALID, "the graph of the task group is gone");
    else if (u->given == u->group.count)
        code = error(RT_PARAM_INVALID, "an update launches %s, and the task group has %d task%s only", t->symbol,
                     u->group.count, u->group.count == 1 ? "" : "s");
    else {
        char was[TEXT], is[TEXT];
        describe(g->nodes[u->group.first + u->given].task, was, sizeof was);
        describe(t, is, sizeof is);
        if (strcmp(was, is))
            code = error(RT_PARAM_INVALID, "an update keeps operators and shapes: captured was %s, launched is %s",
                         was, is);
    }
    if (code) {
        u->refused = true;
        kvd_drop_task(t);
        return code;
    }
    u->tasks[u->given++] = t;
    return OK;
}

static void free_update(struct update *u) {
    for (int i = 0; i < u->given; i++) kvd_drop_task(u->tasks[i]);
    free(u->tasks);
    free(u);
}

void kvd_drop_update(struct stream *s) {
    if (!s->update) return;
    free_update(s->update);
    s->update = NULL;
    kvdouble_num_updates--;
}

static void release(struct task *t) { free_update(t->data); }

static int exchange(struct task *t) {
    struct update *u = t->data;
    pthread_mutex_lock(&kvd_lock);
    struct graph *g = graph_of(&u->group);
    for (int i = 0; g && i < u->given; i++) {
        struct node *node = &g->nodes[u->group.first + i];
        struct task *old = node->task;
        if (g->running) {  // replays in flight have counted what they touch
            kvd_count(old, -g->running);
            kvd_count(u->tasks[i], g->running);
        }
        node->task = u->tasks[i];
        if (old->replaying) old->replaced = true;
        else kvd_drop_task(old);
    }
    if (g) u->given = 0;
    pthread_mutex_unlock(&kvd_lock);
    return OK;
}

int aclmdlRICaptureTaskUpdateBegin(void *stream, void *group) {
    int code = enter("aclmdlRICaptureTaskUpdateBegin", RUNTIME, "%p, %p", stream, group);
    struct stream *s = code ? NULL : kvd_stream(stream, &code);
    if (!s) return leave(code);
    struct task_group *given = kvd_check(group, H_TASK_GROUP, "handle");
    if (!given) return leave(RT_INVALID_HANDLE);
    if (s->capture) return leave(violate(RT_STREAM_CAPTURED, "1.8", "the stream is being captured"));
    if (s->update) return leave(violate(RT_CAPTURE_UNMATCHED, "1.8", "the stream is updating already"));
    struct graph *g = graph_of(given);
    if (!g) return leave(violate(RT_PARAM_INVALID, "1.8", "the graph of the task group is gone"));
    if (g->capturing) return leave(violate(RT_PARAM_INVALID, "1.8", "the graph is being captured"));
    s->update = calloc(1, sizeof *s->update);
    if (!s->update) abort();
    s->update->group = *given;
    s->update->tasks = calloc((size_t)given->count + 1, sizeof *s->update->tasks);
    if (!s->update->tasks) abort();
    kvdouble_num_updates++;
    return leave(OK);
}

int aclmdlRICaptureTaskUpdateEnd(void *stream) {
    int code = enter("aclmdlRICaptureTaskUpdateEnd", RUNTIME, "%p", stream);
    struct stream *s = code ? NULL : kvd_stream(stream, &code);
    if (!s) return leave(code);
    struct update *u = s->update;
    if (!u) return leave(violate(RT_CAPTURE_UNMATCHED, "1.8", "the stream is not updating"));
    if (u->refused) code = error(RT_PARAM_INVALID, "a task of the update was refused; the graph stays as it was");
    else if (u->given != u->group.count)
        code = error(RT_PARAM_INVALID, "an update launched %d of the %d tasks of its group; the graph stays as it was",
                     u->given, u->group.count);
    if (code) {
        kvd_drop_update(s);
        return leave(code);
    }
    s->update = NULL;
    kvdouble_num_updates--;
    struct task *t = kvd_new_task(exchange);
    t->data = u;
    t->release = release;
    return leave(kvd_launch(s, t));
}

// Whether what is launched on the stream replaces captured tasks.
bool kvdouble_updates(const void *stream) {
    int code = 0;
    pthread_mutex_lock(&kvd_lock);
    struct stream *s = kvd_context() ? kvd_stream(stream, &code) : NULL;
    bool updates = s && s->update;
    pthread_mutex_unlock(&kvd_lock);
    return updates;
}
