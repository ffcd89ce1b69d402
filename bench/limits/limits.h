/* SPDX-License-Identifier: Apache-2.0
 *
 * What the programs in this folder share: memory like that of a large numpy array, slots at random,
 * and a table of medians, each beside the first function's.  x86-64 with AVX-512.
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

/* The first n of the slots 0 .. n_slots-1 in a random order. */
static void shuffle(int64_t *slots, long n_slots)
{
    srand(7);
    for (long i = 0; i < n_slots; i++)
        slots[i] = i;
    for (long i = n_slots - 1; i > 0; i--) {
        long j = ((long)rand() << 15 ^ rand()) % (i + 1);
        int64_t kept = slots[i];
        slots[i] = slots[j];
        slots[j] = kept;
    }
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

/* Calls them in turn, many rounds. */
static int report(const kv_way *ways, int n)
{
    static double times[MOST][ROUNDS];
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
