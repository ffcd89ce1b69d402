/* SPDX-License-Identifier: Apache-2.0
 *
 * Counts what a process holds from malloc, for tests of how much memory a call takes: loaded before
 * the C library (LD_PRELOAD), it stands in front of glibc's allocator.  kv_count_begin() starts from
 * nothing; kv_count_peak() is the most that was held at once since, in bytes, over all threads.
 */
#include <errno.h>
#include <malloc.h>
#include <stddef.h>

extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t n, size_t size);
extern void *__libc_realloc(void *p, size_t size);
extern void *__libc_memalign(size_t alignment, size_t size);
extern void __libc_free(void *p);

static long held, peak;

static void *add(void *p)
{
    if (p) {
        long now = __atomic_add_fetch(&held, (long)malloc_usable_size(p), __ATOMIC_RELAXED);
        long most = __atomic_load_n(&peak, __ATOMIC_RELAXED);
        while (now > most
               && !__atomic_compare_exchange_n(&peak, &most, now, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            ;
    }
    return p;
}

static void drop(void *p)
{
    if (p)
        __atomic_sub_fetch(&held, (long)malloc_usable_size(p), __ATOMIC_RELAXED);
}

void *malloc(size_t size) { return add(__libc_malloc(size)); }
void *calloc(size_t n, size_t size) { return add(__libc_calloc(n, size)); }
void *memalign(size_t alignment, size_t size) { return add(__libc_memalign(alignment, size)); }
void *aligned_alloc(size_t alignment, size_t size) { return add(__libc_memalign(alignment, size)); }
int posix_memalign(void **out, size_t alignment, size_t size)
{
    void *p = memalign(alignment, size);
    if (p)
        *out = p;
    return p ? 0 : ENOMEM;
}

void *realloc(void *p, size_t size)
{
    size_t before = p ? malloc_usable_size(p) : 0;
    void *q = __libc_realloc(p, size);
    if (q || !size) {
        __atomic_sub_fetch(&held, (long)before, __ATOMIC_RELAXED);
        add(q);
    }
    return q;
}

void free(void *p)
{
    drop(p);
    __libc_free(p);
}

void kv_count_begin(void)
{
    __atomic_store_n(&held, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&peak, 0, __ATOMIC_RELAXED);
}

long kv_count_peak(void) { return __atomic_load_n(&peak, __ATOMIC_RELAXED); }
