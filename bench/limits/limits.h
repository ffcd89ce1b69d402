/* SPDX-License-Identifier: Apache-2.0
 *
 * What the programs in this folder share: tokens and a cache in memory like that of large numpy
 * arrays, slots at random, and a table of medians, each beside the first function's.  x86-64 with
 * AVX-512.  A program defines SLOTS, the rows of its cache, before.
 */
#ifndef KVCORE_LIMITS_H
#define KVCORE_LIMITS_H

#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define AVX512 __attribute__((target("avx512f,avx512bw")))
#define OFF 16 /* large arrays of numpy begin as far behind a line */

enum { ROUNDS = 21, MOST = 12 };
enum { TOKENS = 16384, ROW = 2048, LANES = 2 }; /* a lane each for K and V */

static int64_t slots[SLOTS]; /* each once; token t goes to slots[t] */
static char *src, *dst, *cache;

static inline char *token(int lane, long t) { return src + OFF + ((long)lane * TOKENS + t) * ROW; }
static void copy(void) { memcpy(dst + OFF, src + OFF, (size_t)LANES * TOKENS * ROW); }

typedef struct {
    const char *name;
    void (*run)(void);
} kv_way;

static inline void ask(const char *p) { __asm__ volatile("prefetchw %0" ::"m"(*p)); }

/* The first n bytes of a line, n from 0 to 63. */
AVX512 static inline void part(char *dst, const char *src, long n)
{
    __mmask64 first = ((uint64_t)1 << n) - 1;
    _mm512_mask_storeu_epi8(dst, first, _mm512_maskz_loadu_epi8(first, src));
}

/* Whole lines past the cache, what is left at either end by ordinary stores. */
AVX512 static inline void stream(char *dst, const char *src, long n)
{
    long i = -(uintptr_t)dst & 63;
    part(dst, src, i);
    for (; i + 64 <= n; i += 64) {
        __builtin_prefetch(src + i + 4096, 0, 2);
        _mm512_stream_si512((__m512i *)(dst + i), _mm512_loadu_si512(src + i));
    }
    part(dst + i, src + i, n - i);
}

static char *memory(size_t size)
{
    char *p = mmap(NULL, size + 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        exit(1);
    madvise(p, size + 8192, MADV_HUGEPAGE);
    memset(p, 1, size + 8192);
    return p;
}

/* The slots in a random order. */
static void shuffle(void)
{
    srand(7);
    for (long i = 0; i < SLOTS; i++)
        slots[i] = i;
    for (long i = SLOTS - 1; i > 0; i--) {
        long j = ((long)rand() << 15 ^ rand()) % (i + 1);
        int64_t kept = slots[i];
        slots[i] = slots[j];
        slots[j] = kept;
    }
}

/* The tokens by slot. */
static inline void order_by_slot(int32_t *order)
{
    static int32_t at[SLOTS];
    long n = 0;
    memset(at, -1, sizeof at);
    for (int32_t t = 0; t < TOKENS; t++)
        at[slots[t]] = t;
    for (long slot = 0; slot < SLOTS; slot++)
        if (at[slot] >= 0)
            order[n++] = at[slot];
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Makes the arrays and calls the functions in turn, many rounds. */
static int report(const kv_way *ways, int n)
{
    static double times[MOST][ROUNDS];
    src = memory((size_t)LANES * TOKENS * ROW);
    dst = memory((size_t)LANES * TOKENS * ROW);
    cache = memory((size_t)LANES * SLOTS * ROW);
    shuffle();
    for (int round = 0; round < ROUNDS; round++)
        for (int k = 0; k < n; k++) {
            double start = now();
            ways[k].run();
            _mm_sfence();
            times[k][round] = now() - start;
        }
    for (int k = 0; k < n; k++) {
        qsort(times[k], ROUNDS, sizeof(double), ascending);
        printf("%-52s %7.2f ms  %.2fx\n", ways[k].name, times[k][ROUNDS / 2] * 1e3,
               times[k][ROUNDS / 2] / times[0][ROUNDS / 2]);
    }
    return 0;
}

#endif
