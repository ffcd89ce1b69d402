// SPDX-License-Identifier: Apache-2.0
// Live handles, broken rules, recorded calls, failures that tests order, and the texts of errors.
#include "machine.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

pthread_mutex_t kvd_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int waiting;

static const char *const kind_names[H_KINDS] = {
    "context", "stream", "stream_config", "event", "graph", "task_group", "tensor", "int_array",
    "tensor_list", "executor", "physical",
    "scalar",
};

// -- handles ----------------------------------------------------------------------------------------
// A handle is looked up by its address and never read before it is known to live.  Freed ones wait
// in a ring, so that their addresses are not soon used again and a late use is called by its name.

enum { BUCKETS = 1 << 12, RING = 1 << 11 };

static struct handle *buckets[BUCKETS], *oldest[H_KINDS], *newest[H_KINDS];
static struct { struct handle *at; enum kind kind; } ring[RING];
static size_t ring_next, live[H_KINDS];
static uint64_t serial;

static size_t bucket(const void *address) {
    return (size_t)(((uintptr_t)address >> 4) * 0x9E3779B97F4A7C15ull >> 52);
}

static struct handle *find(const void *address) {
    struct handle *h = buckets[bucket(address)];
    while (h && (const void *)h != address) h = h->next;
    return h;
}

void *kvd_create(enum kind kind, size_t size) {
    struct handle *h = calloc(1, size);
    if (!h) abort();
    h->kind = kind;
    h->serial = ++serial;
    h->next = buckets[bucket(h)];
    buckets[bucket(h)] = h;
    h->before = newest[kind];
    *(h->before ? &h->before->after : &oldest[kind]) = h;
    newest[kind] = h;
    live[kind]++;
    return h;
}

void kvd_destroy(void *handle) {
    struct handle *h = handle, **link = &buckets[bucket(h)];
    while (*link != h) link = &(*link)->next;
    *link = h->next;
    *(h->before ? &h->before->after : &oldest[h->kind]) = h->after;
    *(h->after ? &h->after->before : &newest[h->kind]) = h->before;
    live[h->kind]--;
    free(ring[ring_next].at);
    ring[ring_next].at = h;
    ring[ring_next].kind = h->kind;
    ring_next = (ring_next + 1) % RING;
}

bool kvd_is_live(const void *address, enum kind kind, uint64_t wanted) {
    struct handle *h = find(address);
    return h && h->kind == kind && (!wanted || h->serial == wanted);
}

void *kvd_check(const void *address, enum kind kind, const char *argument) {
    struct handle *h = find(address);
    if (h && h->kind == kind) return h;
    const char *what = address ? "no handle of any kind" : "NULL", *freed = "";
    if (h) what = kind_names[h->kind];
    for (size_t i = 0; !h && address && i < RING; i++) {
        if (ring[i].at == address) {
            what = kind_names[ring[i].kind];
            freed = " that was destroyed";
        }
    }
    kvd_violate(RT_INVALID_HANDLE, "ABI conventions", "%s: expected a live %s, got %s%s",
                  argument, kind_names[kind], what, freed);
    return NULL;
}

void kvd_each(enum kind kind, void (*visit)(void *, void *), void *data) {
    for (struct handle *h = oldest[kind], *after; h; h = after) {
        after = h->after;
        visit(h, data);
    }
}

// -- texts a caller gets: each thread its own, good until the next ------------------------------------

struct text {
    char *bytes;
    size_t used, room;
};

static _Thread_local struct text answer;

static void add(struct text *t, const char *line) {
    size_t n = strlen(line);
    if (t->used + n + 2 > t->room) {
        t->room = 2 * (t->used + n) + 256;
        t->bytes = realloc(t->bytes, t->room);
        if (!t->bytes) abort();
    }
    if (t->used) t->bytes[t->used++] = '\n';
    memcpy(t->bytes + t->used, line, n + 1);
    t->used += n;
}

static const char *finished(struct text *t) {
    if (!t->bytes) add(t, "");
    if (!t->used) t->bytes[0] = 0;
    return t->bytes;
}

// -- calls ------------------------------------------------------------------------------------------

enum { CALLS = 1 << 12, CALL_TEXT = 200 };

static struct { char text[CALL_TEXT]; const char *symbol; } calls[CALLS];
static uint64_t num_calls;
static struct { const char *symbol; uint64_t count; } totals[512];

static _Thread_local const char *symbol_now = "";
static _Thread_local uint64_t call_now;
static _Thread_local int forced_now, after_now;

const char *kvd_symbol(void) { return symbol_now; }
// -- texts that stay --------------------------------------------------------------------------------

static struct { const char **texts; size_t used, room; } interned;

static size_t slot_of(const char *text) {
    uint64_t hash = 0xCBF29CE484222325ull;  // FNV-1a
    for (const char *c = text; *c; c++) hash = (hash ^ (unsigned char)*c) * 0x100000001B3ull;
    size_t i = (size_t)hash & (interned.room - 1);
    while (interned.texts[i] && strcmp(interned.texts[i], text)) i = (i + 1) & (interned.room - 1);
    return i;
}

const char *kvd_intern(const char *text) {
    if (2 * interned.used >= interned.room) {
        const char **old = interned.texts;
        size_t room = interned.room;
        interned.room = room ? 2 * room : 256;
        interned.texts = calloc(interned.room, sizeof *old);
        if (!interned.texts) abort();
        for (size_t i = 0; i < room; i++)
            if (old[i]) interned.texts[slot_of(old[i])] = old[i];
        free(old);
    }
    size_t i = slot_of(text);
    if (!interned.texts[i]) {
        interned.texts[i] = strdup(text);
        if (!interned.texts[i]) abort();
        interned.used++;
    }
    return interned.texts[i];
}

long kvd_pid(void) { return (long)getpid(); }
void kvd_set_symbol(const char *symbol) { symbol_now = symbol; }
int kvd_forced(void) { return forced_now; }

static uint64_t *total(const char *symbol) {
    for (size_t i = 0; i < 512; i++) {
        if (!totals[i].symbol) totals[i].symbol = symbol;
        if (totals[i].symbol == symbol || !strcmp(totals[i].symbol, symbol)) return &totals[i].count;
    }
    abort();
}

// -- faults to order --------------------------------------------------------------------------------

enum { ORDERS = 64 };

struct order {
    char symbol[80];
    int nth, code;  // nth 0: every call
    bool async;
};
static struct order orders[ORDERS];
static int num_orders;
static uint64_t random_state;
static int random_per_million;

static int ordered(const char *symbol, bool async) {
    for (int i = 0; i < num_orders; i++) {
        struct order *o = &orders[i];
        if (o->async != async || strcmp(o->symbol, symbol)) continue;
        if (o->nth == 0) return o->code;
        if (--o->nth > 0) continue;
        int code = o->code;
        *o = orders[--num_orders];
        return code;
    }
    return 0;
}

static int drawn(const char *symbol, bool async) {
    if (!random_per_million) return 0;
    random_state ^= random_state << 13;  // xorshift
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    if ((int)(random_state % 1000000) >= random_per_million) return 0;
    if (async) return RT_AICORE_EXCEPTION;
    static const char *const never[] = {  // these have no failure a caller could meet
        "aclGetRecentErrMsg", "aclrtGetSocName", "aclInit", "aclFinalize", "aclDataTypeSize",
        "aclrtPeekAtLastError", "aclrtGetLastError", "aclrtSetDevice", "aclFinalizeReference",
    };
    for (size_t i = 0; i < sizeof never / sizeof *never; i++)
        if (!strcmp(never[i], symbol)) return 0;
    static const int phase_one[] = {NN_TILING_ERROR, NN_INNER_NULLPTR, RT_MEMORY_ALLOCATION};
    if (strstr(symbol, "GetWorkspaceSize")) return phase_one[random_state / 1000000 % 3];
    if (!strncmp(symbol, "aclnn", 5)) return NN_INNER_ERROR;
    if (strstr(symbol, "Malloc")) return RT_MEMORY_ALLOCATION;
    return strncmp(symbol, "aclrt", 5) ? NN_RUNTIME_ERROR : RT_INTERNAL;
}

int kvd_async_fault(const char *symbol) {
    int code = ordered(symbol, true);
    return code ? code : drawn(symbol, true);
}

// -- errors and violations ----------------------------------------------------------------------------

static _Thread_local char message[1024], given[1024];
static _Thread_local bool has_message;
static _Thread_local int last_error;
static struct text violations;
static size_t num_violations;

static void say(int code, const char *format, va_list list) {
    int n = snprintf(message, sizeof message, "EZ9999: %s: ", symbol_now);
    vsnprintf(message + n, sizeof message - (size_t)n - 16, format, list);
    size_t used = strlen(message);
    snprintf(message + used, sizeof message - used, " (%d)", code);
    has_message = true;
}

int kvd_error(int code, const char *format, ...) {
    va_list list;
    va_start(list, format);
    say(code, format, list);
    va_end(list);
    return code;
}

int kvd_violate(int code, const char *section, const char *format, ...) {
    va_list list;
    va_start(list, format);
    say(code, format, list);
    va_end(list);
    char line[1200];
    snprintf(line, sizeof line, "[%s] %s", section, message + 8);
    if (num_violations < 1000) add(&violations, line);
    kvd_journal_violation(section, message + 8);
    num_violations++;
    return code;
}

// -- fork -------------------------------------------------------------------------------------------
// A child has none of the machine's threads.  Where no device was open it starts afresh; otherwise
// every call that needs a device is refused, and those that wait, free or end do nothing: a child that
// works without the device ends as torch_npu ends.

static bool forked;
enum { NOTHING_THERE = INT_MIN };  // the call would wait for, free or end what is the parent's

int kvdouble_forked(void) { return forked; }

static void before_fork(void) { pthread_mutex_lock(&kvd_lock); }
static void in_parent(void) { pthread_mutex_unlock(&kvd_lock); }

static void in_child(void) {
    pthread_mutex_init(&kvd_lock, NULL);
    pthread_cond_init(&changed, NULL);
    waiting = 0;
    forked = forked || kvd_any_open();
    kvd_forget_clock();
    kvd_forget_journal();
    if (!forked) kvd_remap_memory();
}

__attribute__((constructor)) static void mind_forks(void) {
    pthread_atfork(before_fork, in_parent, in_child);
}

// -- the frame of a call --------------------------------------------------------------------------------

static void record(const char *symbol, const char *format, va_list list) {
    ++*total(symbol);
    call_now = ++num_calls;
    char *text = calls[call_now % CALLS].text;
    calls[call_now % CALLS].symbol = symbol;
    int n = snprintf(text, CALL_TEXT, "%s(", symbol);
    n += vsnprintf(text + n, CALL_TEXT - (size_t)n - 24, format, list);
    if (n > CALL_TEXT - 25) n = CALL_TEXT - 25;
    snprintf(text + n, 24, ")");
}

int kvd_enter(const char *symbol, unsigned needs, const char *format, ...) {
    pthread_mutex_lock(&kvd_lock);
    symbol_now = symbol;
    forced_now = after_now = 0;
    if (given[0]) memset(given, '#', strlen(given));  // 5.6: a text is good until the next call
    if (!kvd_settings.quiet) {
        va_list list;
        va_start(list, format);
        record(symbol, format, list);
        va_end(list);
    }
    if (forked && needs & AFTER) return NOTHING_THERE;
    if (forked && !(needs & CALLABLE))
        return kvd_error(RT_CONTEXT_NULL, "this process was forked after its parent had opened a device "
                         "(aclrtSetDevice), and a device is not inherited; fork before that, or spawn");
    if (!(needs & CALLABLE) && kvd_in_callback() == HOST_FUNCTION)
        return kvd_violate(RT_INTERNAL, "1.7",
                             "called from a host function, which must not call the interface");
    if ((needs & INIT) && !kvd_initialized()) {
        if (kvd_torn_down()) return kvd_error(UNINITIALIZE, "finalized by another party");
        return kvd_violate(UNINITIALIZE, "5.1", "called before aclInit or after aclFinalize");
    }
    if ((needs & CONTEXT) && !kvd_context())
        return kvd_violate(RT_CONTEXT_NULL, "5.1", "this thread has no device set");
    forced_now = ordered(symbol, false);
    if (!forced_now) forced_now = drawn(symbol, false);
    if (!forced_now) return OK;
    after_now = needs & AFTER ? forced_now : 0;
    kvd_error(forced_now, "ordered to fail");
    return after_now ? OK : forced_now;
}

int kvd_leave(int code) {
    if (code == NOTHING_THERE) code = OK;
    if (code == OK && after_now) code = after_now;
    if (!kvd_settings.quiet && calls[call_now % CALLS].symbol == symbol_now && code) {
        char *text = calls[call_now % CALLS].text;
        size_t n = strlen(text);
        snprintf(text + n, CALL_TEXT - n, " -> %d", code);
    }
    if (code) last_error = code;
    pthread_mutex_unlock(&kvd_lock);
    kvd_take_python();
    return code;
}

bool kvd_wait(const struct timespec *deadline) {
    kvd_let_python();
    waiting++;
    int code = deadline ? pthread_cond_timedwait(&changed, &kvd_lock, deadline)
                        : pthread_cond_wait(&changed, &kvd_lock);
    waiting--;
    return code != ETIMEDOUT;
}

void kvd_notify(void) {
    if (waiting) pthread_cond_broadcast(&changed);
}

// 1.2: NULL if none; reading clears; thread-level.
const char *aclGetRecentErrMsg(void) {
    int code = kvd_enter("aclGetRecentErrMsg", CALLABLE, "%s", "");
    bool any = has_message && !code;
    if (any) memcpy(given, message, sizeof given);
    has_message = false;
    kvd_leave(OK);
    return any ? given : NULL;
}

int aclrtPeekAtLastError(int level) {
    kvd_enter("aclrtPeekAtLastError", CALLABLE, "%d", level);
    int code = last_error;
    kvd_leave(OK);
    return code;
}

int aclrtGetLastError(int level) {
    kvd_enter("aclrtGetLastError", CALLABLE, "%d", level);
    int code = last_error;
    kvd_leave(OK);
    last_error = 0;
    return code;
}

// -- control ----------------------------------------------------------------------------------------------

static void hold(void) { pthread_mutex_lock(&kvd_lock); }
static void let(void) { pthread_mutex_unlock(&kvd_lock); }

const char *kvdouble_violations(void) {
    hold();
    answer.used = 0;
    add(&answer, finished(&violations));
    let();
    return finished(&answer);
}

size_t kvdouble_num_violations(void) {
    hold();
    size_t n = num_violations;
    let();
    return n;
}

void kvdouble_forgive(void) {
    hold();
    violations.used = num_violations = 0;
    let();
}

const char *kvdouble_calls(void) {
    hold();
    answer.used = 0;
    uint64_t first = num_calls > CALLS ? num_calls - CALLS + 1 : 1;
    for (uint64_t i = first; i <= num_calls; i++) add(&answer, calls[i % CALLS].text);
    let();
    return finished(&answer);
}

uint64_t kvdouble_num_calls(const char *symbol) {
    hold();
    uint64_t n = num_calls;
    if (symbol) {
        n = 0;
        for (size_t i = 0; i < 512 && totals[i].symbol; i++)
            if (!strcmp(totals[i].symbol, symbol)) n = totals[i].count;
    }
    let();
    return n;
}

void kvdouble_forget_calls(void) {
    hold();
    num_calls = 0;
    memset(totals, 0, sizeof totals);
    let();
}

static const struct { const char *name; enum place place; } places[] = {
    {"device_memory", DEVICE}, {"host_memory", PINNED}, {"registration", SWAPPED},
};

// NULL: everything but contexts and their default streams, which aclrtResetDevice takes along.
static void is_default(void *stream, void *count) {
    struct stream *s = stream;
    if (s->context->default_stream == s) ++*(size_t *)count;
}

size_t kvdouble_live_handles(const char *kind) {
    hold();
    size_t n = 0, defaults = 0;
    kvd_each(H_STREAM, is_default, &defaults);
    for (int i = 0; i < H_KINDS; i++) {
        size_t here = live[i] - (i == H_STREAM ? defaults : 0);
        if (kind ? !strcmp(kind, kind_names[i]) : i != H_CONTEXT) n += here;
    }
    for (int i = 0; i < 3; i++)
        if (!kind || !strcmp(kind, places[i].name)) n += kvd_live_blocks(places[i].place);
    let();
    return n;
}

const char *kvdouble_live_text(void) {
    hold();
    answer.used = 0;
    char line[80];
    for (int i = 0; i < H_KINDS; i++) {
        snprintf(line, sizeof line, "%s %zu", kind_names[i], live[i]);
        if (live[i]) add(&answer, line);
    }
    for (int i = 0; i < 3; i++) {
        size_t n = kvd_live_blocks(places[i].place);
        snprintf(line, sizeof line, "%s %zu", places[i].name, n);
        if (n) add(&answer, line);
    }
    let();
    return finished(&answer);
}

static void order(const char *symbol, int nth, int code, bool async) {
    hold();
    if (num_orders < ORDERS) {
        struct order *o = &orders[num_orders++];
        snprintf(o->symbol, sizeof o->symbol, "%s", symbol);
        o->nth = nth;
        o->code = code;
        o->async = async;
    }
    let();
}

void kvdouble_fail(const char *symbol, int nth, int code) { order(symbol, nth, code, false); }
void kvdouble_fail_async(const char *symbol, int nth, int code) { order(symbol, nth, code, true); }

void kvdouble_fail_at_random(uint64_t seed, int per_million) {
    hold();
    random_state = seed * 2 + 0x9E3779B97F4A7C15ull;
    random_per_million = per_million;
    let();
}

void kvdouble_fail_never(void) {
    hold();
    num_orders = random_per_million = 0;
    let();
}

static void destroy_any(void *handle, void *unused) {
    (void)unused;
    kvd_destroy(handle);
}

// Everything as when the library was loaded; work in flight is dropped.
void kvdouble_reset(void) {
    kvdouble_fail_never();
    hold();
    kvd_reset_devices();
    for (int kind = 0; kind < H_KINDS; kind++) kvd_each((enum kind)kind, destroy_any, NULL);
    kvd_reset_memory();
    let();
    has_message = false;  // of the calling thread
    last_error = 0;
    kvdouble_forgive();
    kvdouble_forget_calls();
    kvdouble_num_blocking();
}
