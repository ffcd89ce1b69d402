/* SPDX-License-Identifier: Apache-2.0
 *
 * Lets one allocation of a process fail, for tests of what a call does then: loaded before the C
 * library (LD_PRELOAD), it stands in front of whatever allocator comes next.  kv_fail_begin(n)
 * starts to count on the calling thread, and the n-th allocation from there on (0 is the first) is
 * refused; kv_fail_end() stops, and says how many there were.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <string.h>

static void *(*next_malloc)(size_t);
static void *(*next_calloc)(size_t, size_t);
static void *(*next_realloc)(void *, size_t);

static _Thread_local long at = -1, seen;
static _Thread_local int counting;

/* dlsym itself may ask for memory before the next allocator is known. */
static char early[4096];
static size_t early_used;

static void find(void)
{
    next_calloc = dlsym(RTLD_NEXT, "calloc");
    next_malloc = dlsym(RTLD_NEXT, "malloc");
    next_realloc = dlsym(RTLD_NEXT, "realloc");
}

static int refused(void)
{
    if (!counting || seen++ != at)
        return 0;
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t size)
{
    if (!next_malloc)
        find();
    return refused() ? NULL : next_malloc(size);
}

void *calloc(size_t n, size_t size)
{
    if (!next_calloc) {
        size_t room = (n * size + 15) & ~(size_t)15;
        if (early_used + room > sizeof early)
            return NULL;
        early_used += room;
        return early + early_used - room;
    }
    return refused() ? NULL : next_calloc(n, size);
}

void *realloc(void *p, size_t size)
{
    if (!next_realloc)
        find();
    return refused() ? NULL : next_realloc(p, size);
}

void kv_fail_begin(long n)
{
    at = n;
    seen = 0;
    counting = 1;
}

long kv_fail_end(void)
{
    counting = 0;
    return seen;
}
