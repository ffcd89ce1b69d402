/* SPDX-License-Identifier: Apache-2.0
 *
 * What bounds NHSD writes: cc -O2 -o nhsd nhsd.c && ./nhsd   (x86-64 with AVX-512)
 *
 * 16,384 tokens of 8 pieces of 256 bytes (K and V) go to random slots. A piece that begins on a
 * line is four whole lines, which streaming stores write without reading them first. A piece that
 * begins 16 bytes after a line, as in every large numpy array, borrows part of a line at either end:
 * those two of five lines must be read and written back, and no other store avoids it without
 * touching bytes of the neighbouring rows.  Each variant is printed beside a copy of the same bytes.
 */
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { TOKENS = 16384, SLOTS = 32768, BLOCK = 128, HEADS = 8, PIECE = 256, ROW = HEADS * PIECE };
enum { ROUNDS = 15, VARIANTS = 5 };

static int64_t slots[SLOTS];

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static char *place(char *cache, int64_t slot)
{
    return cache + slot / BLOCK * BLOCK * ROW + slot % BLOCK * PIECE;
}

__attribute__((target("avx512f"))) static void stream_lines(char *dst, const char *src, long n)
{
    for (long i = 0; i < n; i += 64)
        _mm512_stream_si512((__m512i *)(dst + i), _mm512_loadu_si512(src + i));
}

static void whole_lines(char *cache, const char *src)
{
    for (long t = 0; t < TOKENS; t++)
        for (long h = 0; h < HEADS; h++)
            stream_lines(place(cache, slots[t]) + h * BLOCK * PIECE, src + t * ROW + h * PIECE, PIECE);
}

/* ask: prefetch the borrowed lines of the next token's piece */
static void borrowed_lines(char *cache, const char *src, int ask)
{
    for (long t = 0; t < TOKENS; t++) {
        char *later = place(cache, slots[t + 1 < TOKENS ? t + 1 : t]);
        for (long h = 0; h < HEADS; h++) {
            char *dst = place(cache, slots[t]) + h * BLOCK * PIECE;
            const char *piece = src + t * ROW + h * PIECE;
            long head = -(uintptr_t)dst & 63;
            if (ask) {
                __builtin_prefetch(later + h * BLOCK * PIECE, 1, 3);
                __builtin_prefetch(later + h * BLOCK * PIECE + PIECE - 1, 1, 3);
            }
            memcpy(dst, piece, head);
            stream_lines(dst + head, piece + head, (PIECE - head) & ~63L);
            memcpy(dst + PIECE - (64 - head), piece + PIECE - (64 - head), 64 - head);
        }
    }
}

static void ordinary_stores(char *cache, const char *src)
{
    for (long t = 0; t < TOKENS; t++)
        for (long h = 0; h < HEADS; h++)
            memcpy(place(cache, slots[t]) + h * BLOCK * PIECE, src + t * ROW + h * PIECE, PIECE);
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static char *memory(size_t size)
{
    char *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        exit(1);
    madvise(p, size, MADV_HUGEPAGE);
    memset(p, 1, size);
    return p;
}

int main(void)
{
    static double times[VARIANTS][ROUNDS];
    const char *names[VARIANTS] = {"memcpy of the same bytes", "streaming, pieces on lines",
                                   "streaming, 16 bytes off", "the same, borrowed lines asked for",
                                   "ordinary stores, 16 bytes off"};
    size_t bytes = 2L * TOKENS * ROW, size = 2L * SLOTS * ROW;
    char *src = memory(bytes), *dst = memory(bytes), *cache = memory(size + 4096);
    if (!__builtin_cpu_supports("avx512f"))
        return puts("this CPU has no AVX-512") < 0;
    for (int64_t i = 0; i < SLOTS; i++)
        slots[i] = i;
    srand(7);
    for (int64_t i = SLOTS - 1; i > 0; i--) {
        int64_t j = ((int64_t)rand() << 15 ^ rand()) % (i + 1), kept = slots[i];
        slots[i] = slots[j];
        slots[j] = kept;
    }
    for (int round = 0; round < ROUNDS; round++)
        for (int v = 0; v < VARIANTS; v++) {
            double start = now();
            for (int lane = 0; lane < 2; lane++) {
                char *c = cache + (size_t)lane * SLOTS * ROW, *s = src + (size_t)lane * TOKENS * ROW;
                if (v == 0)
                    memcpy(dst + (size_t)lane * TOKENS * ROW, s, bytes / 2);
                else if (v == 1)
                    whole_lines(c, s);
                else if (v == 4)
                    ordinary_stores(c + 16, s);
                else
                    borrowed_lines(c + 16, s, v == 3);
            }
            _mm_sfence();
            times[v][round] = now() - start;
        }
    for (int v = 0; v < VARIANTS; v++)
        qsort(times[v], ROUNDS, sizeof(double), ascending);
    for (int v = 0; v < VARIANTS; v++)
        printf("%-36s %7.2f ms  %.2fx\n", names[v], times[v][ROUNDS / 2] * 1e3,
               times[v][ROUNDS / 2] / times[0][ROUNDS / 2]);
    return 0;
}
