/* SPDX-License-Identifier: Apache-2.0
 *
 * The copies that depend on the instruction set, one table per set.  All give the same bytes.
 *
 * stream: like memcpy, but writes whole 64-byte lines past the cache.  A store that does not first
 *         read the line it overwrites moves two bytes of memory traffic per byte instead of three.
 * tile:   n_tokens x n_columns cells of 32 bytes from tokens (rows) to FRACTAL_NZ columns, in which
 *         the tokens of a column lie one after the other; column by column, so that lines fill.
 * fence:  orders streamed stores before whatever says that the work is done.
 */
#ifndef KVCORE_ISA_H
#define KVCORE_ISA_H

#include <stdint.h>
#include <string.h>

#define KV_LINE 64
#define KV_CELL 32

typedef struct {
    const char *name;
    void (*stream)(char *dst, const char *src, int64_t n);
    void (*tile)(char *page, int64_t column_step, const char *tok, int64_t tok_stride,
                 int64_t n_tokens, int64_t n_columns);
    void (*fence)(void);
} kv_isa;

static void kv_plain_stream(char *dst, const char *src, int64_t n) { memcpy(dst, src, (size_t)n); }
static void kv_plain_fence(void) {}

static void kv_plain_tile(char *page, int64_t column_step, const char *tok, int64_t tok_stride,
                          int64_t n_tokens, int64_t n_columns)
{
    for (int64_t c = 0; c < n_columns; c++) {
        char *dst = page + c * column_step;
        const char *src = tok + c * KV_CELL;
        for (int64_t t = 0; t < n_tokens; t++)
            memcpy(dst + t * KV_CELL, src + t * tok_stride, KV_CELL);
    }
}

/* Bytes up to the first line border of dst; n when there is no whole line. */
static inline int64_t kv_head(const char *dst, int64_t n)
{
    int64_t head = (int64_t)(-(uintptr_t)dst & (KV_LINE - 1));
    return n - head < KV_LINE ? n : head;
}

#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
#define KV_X86 1
#include <immintrin.h>

static void kv_sse_fence(void) { _mm_sfence(); }

__attribute__((target("avx2")))
static void kv_avx2_stream(char *dst, const char *src, int64_t n)
{
    int64_t i = kv_head(dst, n);
    if (i)
        memcpy(dst, src, (size_t)i);
    for (; i + KV_LINE <= n; i += KV_LINE) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(src + i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(src + i + 32));
        _mm256_stream_si256((__m256i *)(dst + i), a);
        _mm256_stream_si256((__m256i *)(dst + i + 32), b);
    }
    if (i < n)
        memcpy(dst + i, src + i, (size_t)(n - i));
}

__attribute__((target("avx2")))
static void kv_avx2_tile(char *page, int64_t column_step, const char *tok, int64_t tok_stride,
                         int64_t n_tokens, int64_t n_columns)
{
    if (((uintptr_t)page | (uintptr_t)column_step) & (KV_CELL - 1)) {
        kv_plain_tile(page, column_step, tok, tok_stride, n_tokens, n_columns);
        return;
    }
    for (int64_t c = 0; c < n_columns; c++) {
        char *dst = page + c * column_step;
        const char *src = tok + c * KV_CELL;
        for (int64_t t = 0; t < n_tokens; t++)
            _mm256_stream_si256((__m256i *)(dst + t * KV_CELL),
                                _mm256_loadu_si256((const __m256i *)(src + t * tok_stride)));
    }
}

__attribute__((target("avx512f")))
static void kv_avx512_stream(char *dst, const char *src, int64_t n)
{
    int64_t i = kv_head(dst, n);
    if (i)
        memcpy(dst, src, (size_t)i);
    for (; i + KV_LINE <= n; i += KV_LINE) {
        /* The hardware prefetcher stops at a page; a few lines ahead bridges it. */
        _mm_prefetch(src + i + 2048, _MM_HINT_T0);
        _mm512_stream_si512((__m512i *)(dst + i), _mm512_loadu_si512((const void *)(src + i)));
    }
    if (i < n)
        memcpy(dst + i, src + i, (size_t)(n - i));
}

__attribute__((target("avx512f")))
static void kv_avx512_tile(char *page, int64_t column_step, const char *tok, int64_t tok_stride,
                           int64_t n_tokens, int64_t n_columns)
{
    /* Whole lines of two tokens need line-aligned pairs; otherwise the 32-byte form. */
    if ((((uintptr_t)page | (uintptr_t)column_step) & (KV_LINE - 1)) || n_tokens < 2) {
        kv_avx2_tile(page, column_step, tok, tok_stride, n_tokens, n_columns);
        return;
    }
    for (int64_t c = 0; c < n_columns; c++) {
        char *dst = page + c * column_step;
        const char *src = tok + c * KV_CELL;
        int64_t t = 0;
        for (; t + 2 <= n_tokens; t += 2) {
            __m256i a = _mm256_loadu_si256((const __m256i *)(src + t * tok_stride));
            __m256i b = _mm256_loadu_si256((const __m256i *)(src + (t + 1) * tok_stride));
            _mm512_stream_si512((__m512i *)(dst + t * KV_CELL),
                                _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
        }
        if (t < n_tokens)
            _mm256_stream_si256((__m256i *)(dst + t * KV_CELL),
                                _mm256_loadu_si256((const __m256i *)(src + t * tok_stride)));
    }
}
#endif

#if defined(__aarch64__) && defined(__GNUC__)
#define KV_ARM 1
#include <arm_neon.h>

static void kv_neon_fence(void) { __asm__ volatile("dmb ishst" ::: "memory"); }

/* STNP: a pair of 16-byte registers with the non-temporal hint. */
static inline void kv_stnp(char *dst, uint8x16_t a, uint8x16_t b)
{
    __asm__ volatile("stnp %q1, %q2, [%0]" ::"r"(dst), "w"(a), "w"(b) : "memory");
}

static void kv_neon_stream(char *dst, const char *src, int64_t n)
{
    int64_t i = kv_head(dst, n);
    if (i)
        memcpy(dst, src, (size_t)i);
    for (; i + KV_LINE <= n; i += KV_LINE) {
        uint8x16_t a = vld1q_u8((const uint8_t *)(src + i));
        uint8x16_t b = vld1q_u8((const uint8_t *)(src + i + 16));
        uint8x16_t c = vld1q_u8((const uint8_t *)(src + i + 32));
        uint8x16_t d = vld1q_u8((const uint8_t *)(src + i + 48));
        kv_stnp(dst + i, a, b);
        kv_stnp(dst + i + 32, c, d);
    }
    if (i < n)
        memcpy(dst + i, src + i, (size_t)(n - i));
}

static void kv_neon_tile(char *page, int64_t column_step, const char *tok, int64_t tok_stride,
                         int64_t n_tokens, int64_t n_columns)
{
    for (int64_t c = 0; c < n_columns; c++) {
        char *dst = page + c * column_step;
        const char *src = tok + c * KV_CELL;
        for (int64_t t = 0; t < n_tokens; t++) {
            const uint8_t *cell = (const uint8_t *)(src + t * tok_stride);
            kv_stnp(dst + t * KV_CELL, vld1q_u8(cell), vld1q_u8(cell + 16));
        }
    }
}
#endif

/* Best first; the portable set is always last. */
static const kv_isa kv_isas[] = {
#ifdef KV_X86
    {"avx512", kv_avx512_stream, kv_avx512_tile, kv_sse_fence},
    {"avx2", kv_avx2_stream, kv_avx2_tile, kv_sse_fence},
#endif
#ifdef KV_ARM
    {"neon", kv_neon_stream, kv_neon_tile, kv_neon_fence},
#endif
    {"portable", kv_plain_stream, kv_plain_tile, kv_plain_fence},
};
#define KV_N_ISAS ((int)(sizeof(kv_isas) / sizeof(kv_isas[0])))

static int kv_isa_runs(int i)
{
#ifdef KV_X86
    if (i == 0)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx2");
    if (i == 1)
        return __builtin_cpu_supports("avx2");
#endif
    (void)i;
    return 1;
}

#endif
