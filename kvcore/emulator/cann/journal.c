// SPDX-License-Identifier: Apache-2.0
// The journal: what was launched, recorded, waited for, touched and broken, in the order in which the
// calls were made.  Python reads it and finds the races (../_races.pyx); the machine only writes,
// so that no call of the interface waits for the interpreter.
//
// Bytes that an operator's indices choose are known when it has run: such a task is entered as "late",
// and what it touched follows with ENTRY_DONE.
#include "machine.h"

#include <stdlib.h>
#include <string.h>

static bool on;
static struct buffers {
    struct entry *entries;
    struct range *ranges;
    size_t num_entries, room_entries, num_ranges, room_ranges;
} buffers[2];
static int filling;
static uint64_t last_mark, last_task;

static _Thread_local uint64_t line_now;
static _Thread_local struct trail trail;

bool kvd_journal_on(void) { return on; }
uint64_t kvd_line(void) { return line_now; }
uint64_t kvd_next_mark(void) { return ++last_mark; }

uint64_t kvd_next_tasks(uint64_t count) {
    uint64_t first = last_task + 1;
    last_task += count;
    return first;
}

static struct entry *add(enum entry_kind kind, const char *symbol) {
    struct buffers *b = &buffers[filling];
    if (b->num_entries == b->room_entries) {
        b->room_entries = 2 * b->room_entries + 256;
        b->entries = realloc(b->entries, b->room_entries * sizeof *b->entries);
        if (!b->entries) abort();
    }
    struct entry *e = &b->entries[b->num_entries++];
    *e = (struct entry){.kind = kind, .line = line_now, .symbol = symbol,
                        .first_range = b->num_ranges, .thread = (uint64_t)pthread_self()};
    return e;
}

static void add_range(struct entry *e, uint64_t start, uint64_t size, uint64_t flags) {
    struct buffers *b = &buffers[filling];
    if (b->num_ranges == b->room_ranges) {
        b->room_ranges = 2 * b->room_ranges + 1024;
        b->ranges = realloc(b->ranges, b->room_ranges * sizeof *b->ranges);
        if (!b->ranges) abort();
    }
    b->ranges[b->num_ranges++] = (struct range){start, start + size, flags};
    e->num_ranges++;
}

// Bytes have one address here, whichever way they are reached: a device's view of host memory counts
// as the host memory.
static uint64_t address(const struct block *b, size_t offset) {
    return (b->place == DEVICE ? b->start : (uintptr_t)b->bytes) + offset;
}

void kvd_journal_task(const struct task *t, uint64_t number, const struct stream *s, uint64_t parent) {
    if (!on) return;
    struct entry *e = add(ENTRY_TASK, t->symbol);
    e->line = t->line;
    e->number = number;
    e->stream = s->handle.serial;
    e->device = (uint64_t)s->context->device;
    e->id = t->id;
    e->late = t->late;
    e->mark = parent;
    for (int i = 0; i < t->num_touches; i++) {
        const struct touch *one = &t->touches[i];
        if (one->size) add_range(e, address(one->block, one->start), one->size, one->flags);
    }
}

void kvd_journal_done(uint64_t number, uint64_t id, int code) {
    if (!on) return;
    struct entry *e = add(ENTRY_DONE, "");
    e->number = number;
    e->id = id;
    e->code = code;
    for (size_t i = 0; i < trail.count; i++) {
        const struct range *r = &trail.ranges[i];
        add_range(e, r->start, r->end - r->start, r->flags);
    }
}

void kvd_journal_stream(enum entry_kind kind, const struct stream *s, uint64_t mark) {
    if (!on) return;
    struct entry *e = add(kind, kvd_symbol());
    e->mark = mark;
    e->stream = s->handle.serial;
    e->device = (uint64_t)s->context->device;
}

void kvd_journal_mark(enum entry_kind kind, uint64_t mark) {
    if (on && mark) add(kind, kvd_symbol())->mark = mark;
}

// A synchronous call touches memory at this place of the journal.
struct entry *kvd_journal_host(void) { return on ? add(ENTRY_HOST, kvd_symbol()) : NULL; }

void kvd_journal_range(struct entry *e, const void *at, size_t size, bool write) {
    struct block *b;
    if (!e || !size) return;
    if (kvd_find(at, &b) == PAGEABLE) return;
    if (b) add_range(e, address(b, (uintptr_t)at - b->start), size, write);
}

void kvd_journal_block(enum entry_kind kind, const struct block *b, size_t offset, size_t size) {
    if (!on) return;
    struct entry *e = add(kind, kvd_symbol());
    e->code = (int)b->place;
    add_range(e, address(b, offset), size, 1);
}

void kvd_journal_graph(const struct graph *g) {
    for (int i = 0; on && i < g->count; i++) {
        struct entry *e = add(ENTRY_NODE, g->nodes[i].task->symbol);
        e->line = g->nodes[i].task->line;
        e->number = g->handle.serial;
        e->mark = (uint64_t)(g->nodes[i].before + 1);
        e->stream = (uint64_t)(g->nodes[i].joins + 1);
    }
}

// A replay runs one node after the other; what an external event orders is entered where it stands.
void kvd_journal_replay(const struct task *t, const struct stream *s) {
    if (!on) return;
    kvd_journal_stream(ENTRY_GRAPH, s, t->graph->handle.serial);
    buffers[filling].entries[buffers[filling].num_entries - 1].number = t->number;
    for (int i = 0; i < t->graph->count; i++) {
        struct task *node = t->graph->nodes[i].task;
        if (node->wait) {
            if (!node->wait->mark) node->wait->mark = kvd_next_mark();
            kvd_journal_stream(ENTRY_WAIT, s, node->wait->mark);
        }
        if (node->external && !node->wait && node->data) {
            struct recording *r = node->data;
            if (!r->mark) r->mark = kvd_next_mark();
            kvd_journal_stream(ENTRY_MARK, s, r->mark);
        } else if (node->run) {
            kvd_journal_task(node, t->number + 1 + (uint64_t)i, s, t->graph->handle.serial);
        }
    }
}

void kvd_journal_violation(const char *section, const char *text) {
    if (!on) return;
    struct entry *e = add(ENTRY_RULE, kvd_symbol());
    e->text = strdup(text);
    e->section = kvd_intern(section);
}

// -- what a task touches as it runs -------------------------------------------------------------------

void kvd_trail_begin(bool wanted) {
    trail.wanted = wanted && on;
    trail.count = 0;
    trail.last[0] = trail.last[1] = SIZE_MAX;
}

void kvd_trail_end(void) { trail.wanted = false; }

void kvd_trail_add(const struct block *b, const unsigned char *at, size_t size, bool write) {
    if (!trail.wanted || !size) return;
    uint64_t start = address(b, (size_t)(at - b->bytes));
    size_t last = trail.last[write];
    if (last != SIZE_MAX && trail.ranges[last].end == start) {  // the next elements, most often
        trail.ranges[last].end = start + size;
        return;
    }
    if (trail.count == trail.room) {
        trail.room = 2 * trail.room + 64;
        trail.ranges = realloc(trail.ranges, trail.room * sizeof *trail.ranges);
        if (!trail.ranges) abort();
    }
    trail.last[write] = trail.count;
    trail.ranges[trail.count++] = (struct range){start, start + size, write};
}

// -- control ------------------------------------------------------------------------------------------

void kvdouble_journal(bool wanted) {
    pthread_mutex_lock(&kvd_lock);
    on = wanted;
    pthread_mutex_unlock(&kvd_lock);
}

// The line of Python, as a number, that this thread's calls come from; returns the one before.
uint64_t kvdouble_line(uint64_t line) {
    uint64_t before = line_now;
    line_now = line;
    return before;
}

static _Thread_local uint64_t task_now;
void kvd_set_task(uint64_t number) { task_now = number; }
uint64_t kvdouble_task(void) { return task_now; }  // that this thread runs, 0: none

// What was written since the last call: good until the next, which frees the texts.
size_t kvdouble_read_journal(struct entry **entries, struct range **ranges) {
    pthread_mutex_lock(&kvd_lock);
    struct buffers *full = &buffers[filling];
    if (!full->num_entries) {
        pthread_mutex_unlock(&kvd_lock);
        return 0;
    }
    filling ^= 1;
    struct buffers *empty = &buffers[filling];
    for (size_t i = 0; i < empty->num_entries; i++) free(empty->entries[i].text);
    empty->num_entries = empty->num_ranges = 0;
    if (empty->room_ranges > 1 << 16) {  // given back after a rare large task
        free(empty->ranges);
        empty->ranges = NULL;
        empty->room_ranges = 0;
    }
    *entries = full->entries;
    *ranges = full->ranges;
    size_t n = full->num_entries;
    pthread_mutex_unlock(&kvd_lock);
    return n;
}

void kvd_forget_journal(void) {  // in a forked child
    for (int i = 0; i < 2; i++) buffers[i].num_entries = buffers[i].num_ranges = 0;
}
