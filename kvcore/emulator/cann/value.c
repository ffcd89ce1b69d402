// SPDX-License-Identifier: Apache-2.0
// Words of device memory that one stream writes and another waits for: torch_npu makes its external
// events of them, by which a graph waits for what is done after its replay was launched.
#include "machine.h"

#include <stdlib.h>
#include <string.h>

enum { AT_LEAST, EQUAL, ANY_BIT, NO_BIT, KINDS };  // what a word is compared for

struct word {
    unsigned char *bytes;
    uint64_t value;
    uint32_t kind;
};

static int write_word(struct task *t) {
    const struct word *w = t->data;
    pthread_mutex_lock(&kvd_lock);
    memcpy(w->bytes, &w->value, sizeof w->value);
    kvd_notify();
    pthread_mutex_unlock(&kvd_lock);
    return OK;
}

static bool would_hold(const struct word *w, uint64_t found) {
    if (w->kind == AT_LEAST) return (int64_t)(found - w->value) >= 0;
    if (w->kind == EQUAL) return found == w->value;
    if (w->kind == ANY_BIT) return (found & w->value) != 0;
    return ~(found | w->value) != 0;
}

static bool holds(const struct word *w) {
    uint64_t found;
    memcpy(&found, w->bytes, sizeof found);
    return would_hold(w, found);
}

bool kvd_word_holds(const struct task *wait) { return holds(wait->data); }

static void let_on(void *stream, void *unused) {
    struct stream *s = stream;
    (void)unused;
    kvd_allow(s, s->enqueued);
}

// Which stream will write is not known, so all may go on; a later launch is seen a moment later.
static int wait_for_word(struct task *t) {
    const struct word *w = t->data;
    pthread_mutex_lock(&kvd_lock);
    while (!holds(w) && !kvd_aborting() && kvd_pause(t)) {
        kvd_each(H_STREAM, let_on, NULL);
        struct timespec at;
        kvd_deadline(&at, 1);
        kvd_wait(&at);
    }
    kvd_pause(NULL);
    int code = holds(w) || kvd_aborting() ? OK : kvd_gave_up(t);
    pthread_mutex_unlock(&kvd_lock);
    return code;
}

bool kvd_word_ends(const struct task *write, const struct task *wait) {
    if (write->run != write_word || wait->run != wait_for_word) return false;
    const struct word *by = write->data, *w = wait->data;
    return by->bytes == w->bytes && would_hold(w, by->value);
}

static void free_data(struct task *t) { free(t->data); }

static int launch(void *address, uint64_t value, uint32_t kind, void *stream,
                  int (*run)(struct task *), bool write) {
    int code = 0;
    struct stream *s = kvd_stream(stream, &code);
    if (!s) return code;
    struct block *b;
    if (kvd_find(address, &b) != DEVICE || (uintptr_t)address % sizeof value)
        return violate(RT_PARAM_INVALID, "1.6", "devAddr %p is no aligned word of device memory", address);
    if (kind >= (write ? 1 : KINDS)) return violate(RT_PARAM_INVALID, "1.6", "flag %u", kind);
    struct task *t = kvd_new_task(run);
    // The block is noted so that it is not freed under the task; the value orders writer and waiter.
    code = kvd_touch(t, address, sizeof value, false, "devAddr");
    struct word *w = code ? NULL : malloc(sizeof *w);
    if (!w && !code) abort();
    if (code) {
        kvd_drop_task(t);
        return code;
    }
    *w = (struct word){b->bytes + ((uintptr_t)address - b->start), value, kind};
    t->data = w;
    t->release = free_data;
    return kvd_launch(s, t);
}

int aclrtValueWrite(void *address, uint64_t value, uint32_t flag, void *stream) {
    int code = enter("aclrtValueWrite", RUNTIME, "%p, %llu, %u, %p", address, (unsigned long long)value, flag,
                     stream);
    return leave(code ? code : launch(address, value, flag, stream, write_word, true));
}

int aclrtValueWait(void *address, uint64_t value, uint32_t flag, void *stream) {
    int code = enter("aclrtValueWait", RUNTIME, "%p, %llu, %u, %p", address, (unsigned long long)value, flag,
                     stream);
    return leave(code ? code : launch(address, value, flag, stream, wait_for_word, false));
}
