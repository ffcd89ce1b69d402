/* SPDX-License-Identifier: Apache-2.0
 *
 * What a store to a line costs by its kind, lines at random over 128 MiB:
 *
 *     cc -O2 -mavx2 -o lines bench/limits/lines.c && ./lines
 *
 * The kinds of CPU differ here, and with them the best way to write the ends of rows: where a
 * non-temporal store to part of a line is cheap they go past the cache too (docs/performance.md).
 * Medians of 15 rounds; the functions run in turn, so what else the machine does hits all of them.
 */
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LINE = 64, SPAN = 1 << 21, LINES = 1 << 18, AHEAD = 16, ROUNDS = 15 };

static char *memory;
static uint32_t place[LINES + AHEAD];

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}

static uint64_t next(void)
{
    static uint64_t state = 88172645463325252ull;
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

static char *line(int i) { return memory + (int64_t)LINE * place[i]; }

static void ask(char *p) { __asm__ volatile("prefetchw %0" ::"m"(*p)); }

#define KIND(name, asked, store)                                                                   \
    static void name(void)                                                                         \
    {                                                                                              \
        const __m128i half = _mm_set1_epi8(3);                                                     \
        const __m256i whole = _mm256_set1_epi8(3);                                                 \
        (void)half, (void)whole;                                                                   \
        for (int i = 0; i < LINES; i++) {                                                          \
            char *p = line(i);                                                                     \
            if (asked)                                                                             \
                ask(line(i + AHEAD));                                                              \
            store;                                                                                 \
        }                                                                                          \
        _mm_sfence();                                                                              \
    }

KIND(ordinary_16, 0, _mm_store_si128((__m128i *)p, half))
KIND(ordinary_16_asked, 1, _mm_store_si128((__m128i *)p, half))
KIND(ordinary_64, 0, _mm256_store_si256((__m256i *)p, whole); _mm256_store_si256((__m256i *)(p + 32), whole))
KIND(past_8, 0, _mm_stream_si64((long long *)p, 3))
KIND(past_16, 0, _mm_stream_si128((__m128i *)p, half))
KIND(past_16_asked, 1, _mm_stream_si128((__m128i *)p, half))
KIND(past_48, 0, _mm_stream_si128((__m128i *)p, half); _mm_stream_si128((__m128i *)(p + 16), half);
     _mm_stream_si128((__m128i *)(p + 32), half))
KIND(past_64, 0, _mm256_stream_si256((__m256i *)p, whole); _mm256_stream_si256((__m256i *)(p + 32), whole))

static const struct {
    const char *name;
    void (*run)(void);
} kinds[] = {
    {"ordinary, 16 bytes", ordinary_16},
    {"the same, asked for 16 lines ahead", ordinary_16_asked},
    {"ordinary, a whole line", ordinary_64},
    {"non-temporal, 8 bytes", past_8},
    {"non-temporal, 16 bytes", past_16},
    {"the same, asked for 16 lines ahead", past_16_asked},
    {"non-temporal, three times 16 bytes", past_48},
    {"non-temporal, a whole line", past_64},
};
enum { KINDS = sizeof kinds / sizeof *kinds };

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(void)
{
    static double times[KINDS][ROUNDS];
    memory = aligned_alloc(4096, (size_t)SPAN * LINE);
    if (!memory)
        return 1;
    memset(memory, 1, (size_t)SPAN * LINE);
    for (int i = 0; i < LINES + AHEAD; i++)
        place[i] = next() % SPAN;
    for (int round = -1; round < ROUNDS; round++) {
        for (int k = 0; k < KINDS; k++) {
            double start = now();
            kinds[k].run();
            if (round >= 0)
                times[k][round] = (now() - start) / LINES;
        }
    }
    for (int k = 0; k < KINDS; k++) {
        qsort(times[k], ROUNDS, sizeof(double), ascending);
        printf("%-36s %6.2f ns a line\n", kinds[k].name, times[k][ROUNDS / 2]);
    }
    return 0;
}
