// SPDX-License-Identifier: Apache-2.0
// Queues that can never run.  A wait for an event or a word is for something that was launched, or
// will be.  What is launched only behind the wait itself, or behind another that waits for this one,
// never comes: found as soon as the host waits for it.  What nobody has launched could still come from
// another thread: found when nothing was launched for a while.  Then the wait is given up as a failed
// task, and the thread that waited gets the error instead of hanging.
#include "machine.h"

#include <stdio.h>

enum { LOOK_MS = 50, SEEN = 64 };

static bool over(const struct task *t) { return t->wait ? t->wait->done : kvd_word_holds(t); }

static bool blocked(const struct stream *s) { return s->pauses && s->hopeless != s->pauses && !over(s->pauses); }

struct survey {
    struct stream *streams[SEEN];
    int count;
    bool moving;
};

static void survey_of(void *stream, void *data) {
    struct stream *s = stream;
    struct survey *all = data;
    if (!s->head) return;
    if (!blocked(s)) {
        bool may = s->busy || kvd_settings.eager || s->aborting || s->done < s->allowed || s->pauses;
        all->moving = all->moving || may;
    } else if (all->count < SEEN) {
        all->streams[all->count++] = s;
    }
}

static bool ends(const struct task *t, const struct task *wait) {
    if (t == wait) return false;
    if (wait->wait ? t->record == wait->wait || (t->external && t->data == wait->wait)
                   : kvd_word_ends(t, wait))
        return true;
    for (int i = 0; t->graph && i < t->graph->count; i++)
        if (ends(t->graph->nodes[i].task, wait)) return true;
    return false;
}

struct owner {
    const struct task *wait;
    struct stream *found;
};

static void find_owner(void *stream, void *data) {
    struct stream *s = stream;
    struct owner *o = data;
    for (struct task *t = s->head; t && !o->found; t = t->next)
        if (ends(t, o->wait)) o->found = s;
}

// The stream in whose queue the end of a blocked stream's wait lies; NULL: it was not launched yet.
static struct stream *waits_for(const struct stream *s) {
    struct owner o = {s->pauses, NULL};
    kvd_each(H_STREAM, find_owner, &o);
    return o.found;
}

static void give_up(struct stream *s, const char *why) {
    const struct task *t = s->pauses;
    s->hopeless = t;
    uint64_t line = kvdouble_line(0);
    kvdouble_line(t->line ? t->line : line);
    const char *symbol = kvd_symbol();
    kvd_set_symbol(t->symbol);
    violate(OK, "1.6", "the queue can never run: %s", why);
    kvd_set_symbol(symbol);
    kvdouble_line(line);
    pthread_cond_signal(&s->wake);
    kvd_notify();
}

static void look(void) {
    struct survey all = {.count = 0};
    if (kvd_settings.hold) return;
    kvd_each(H_STREAM, survey_of, &all);
    if (all.moving || !all.count) return;
    struct stream *lost = NULL;
    for (int i = 0; i < all.count; i++) {
        struct stream *s = all.streams[i], *next = s;
        int steps = 0;
        do next = waits_for(next);
        while (next && next != s && blocked(next) && ++steps < all.count);
        if (next && !blocked(next)) {  // nothing else would let it run
            kvd_allow(next, next->enqueued);
            return;
        }
        if (next == s) {
            char why[96];
            snprintf(why, sizeof why, "%d of them wait for each other in a circle", steps + 1);
            give_up(s, steps ? why : "what it waits for comes only behind this wait");
            return;  // the others may get on now
        }
        if (!next && !lost) lost = s;
    }
    while (lost && waits_for(lost)) lost = waits_for(lost);
    if (lost && kvd_now_ns() - kvd_last_launch_ns >= kvd_settings.give_up_ns)
        give_up(lost, "nobody has launched what it waits for");
}

// As kvd_wait, for what streams do.
bool kvd_wait_for_streams(const struct timespec *deadline) {
    struct timespec soon;
    look();
    if (deadline) return kvd_wait(deadline);  // it ends by itself
    kvd_deadline(&soon, LOOK_MS);
    kvd_wait(&soon);
    return true;
}

int kvd_gave_up(const struct task *t) {
    char text[200];
    snprintf(text, sizeof text, "%s: its queue could never run, and the wait was given up", t->symbol);
    kvd_fault_text(text);
    return RT_TASK_TIMEOUT;
}

void kvdouble_give_up(uint64_t ns) {
    pthread_mutex_lock(&kvd_lock);
    kvd_settings.give_up_ns = ns;
    pthread_mutex_unlock(&kvd_lock);
}
