/* SPDX-License-Identifier: Apache-2.0
 *
 * The copies that depend on the instruction set, one table per set.  All give the same bytes.
 *
 * stream: like memcpy, but writes whole 64-byte lines past the cache.  A store that does not first
 *         read the line it overwrites moves two bytes of memory traffic per byte instead of three.
 * row:    stream for a row that lies alone: nothing after it is prefetched.
 * copy:   ordinary stores, for rows that stay in the cache.
 * join:   n tokens whose rows lie one behind the other, which need not begin on a line: the lines that
 *         two of them share are put together and streamed whole. bytes of a row: 64 at the least.
 * run:    n tokens whose rows lie side by side in each FRACTAL_NZ column of 32-byte cells, in whole
 *         lines past the cache (nz_runs.h).
 * cells:  n tokens' cells anywhere, see kv_cells; the rows of n_later others are read soon.
 * fence:  orders streamed stores before whatever says that the work is done.
 */
#ifndef KVCORE_ISA_H
#define KVCORE_ISA_H

#include <stdint.h>
#include <string.h>

#define KV_LINE 64
#define KV_CELL 32
#define KV_HALF 16

typedef struct {
    const char *name;
    const char *path; /* what is stored past the cache, how far ahead sources are prefetched: below */
    void (*stream)(char *dst, const char *src, int64_t n);
    void (*row)(char *dst, const char *src, int64_t n);
    void (*copy)(char *dst, const char *src, int64_t n);
    void (*join)(char *dst, const char *const *toks, int64_t at, int64_t n, int64_t bytes);
    void (*run)(char *page, int64_t column_step, const char *const *toks, int64_t at, int64_t n,
                int64_t n_columns); /* a token's first cell lies at toks[t] + at */
    void (*cells)(char *const *pages, int64_t page_at, int64_t column_step, const char *const *toks,
                  const char *const *later, int64_t at, int64_t n, int64_t n_later, int64_t n_columns);
    void (*fence)(void);
    int32_t asks;     /* tokens ahead at which lines that rows share are prefetched; 0: not at all */
    int32_t by_token; /* whether rows are best written in the tokens' order, not in that of slots */
} kv_isa;

/* The paths.  "lines": whole lines are stored past the cache, the ends of rows are not.  "near": the
 * same, with sources prefetched into the first-level cache and no calls of memcpy for the ends.  "all":
 * the ends of rows are stored past it, too.  The last two are in past_cache.h. */

/* Prefetch a line that is written soon: its latency is most of what a scattered store costs.
 * (PREFETCHW is in every 64-bit x86, as a no-op at the least; the compiler takes it for newer ones.) */
#if defined(__x86_64__)
#define kv_will_write(p) __asm__ volatile("prefetchw %0" ::"m"(*(const char *)(p)))
#else
#define kv_will_write(p) __builtin_prefetch((p), 1, 3)
#endif
#define kv_will_read(p) __builtin_prefetch((p), 0, 3)

static void kv_plain_stream(char *dst, const char *src, int64_t n) { memcpy(dst, src, (size_t)n); }
static void kv_plain_fence(void) {}

static void kv_plain_join(char *dst, const char *const *toks, int64_t at, int64_t n, int64_t bytes)
{
    for (int64_t t = 0; t < n; t++)
        memcpy(dst + t * bytes, toks[t] + at, (size_t)bytes);
}

/* Cells at any place: pages[t] + page_at is token t's cell in the first column.  Ordinary stores, two
 * columns after their lines were prefetched. */
static inline void kv_cells(char *const *pages, int64_t page_at, int64_t column_step,
                            const char *const *toks, int64_t at, int64_t n, int64_t n_columns)
{
    for (int64_t c = 0; c < n_columns; c++, at += KV_CELL) {
        int64_t here = page_at + c * column_step, ahead = here + 2 * column_step;
        if (c + 2 < n_columns) {
            for (int64_t t = 0; t < n; t++) {
                kv_will_write(pages[t] + ahead);
                memcpy(pages[t] + here, toks[t] + at, KV_CELL);
            }
        } else {
            for (int64_t t = 0; t < n; t++)
                memcpy(pages[t] + here, toks[t] + at, KV_CELL);
        }
    }
}

static void kv_plain_cells(char *const *pages, int64_t page_at, int64_t column_step,
                           const char *const *toks, const char *const *later, int64_t at, int64_t n,
                           int64_t n_later, int64_t n_columns)
{
    for (int64_t t = 0; t < n_later; t++)
        for (int64_t line = 0; line < n_columns * KV_CELL; line += KV_LINE)
            kv_will_read(later[t] + at + line);
    kv_cells(pages, page_at, column_step, toks, at, n, n_columns);
}

/* Order tokens by slot, stable; tokens with a negative slot are left out.  order and spare: n
 * int32 each.  Returns how many tokens are in the order. */
static inline int64_t kv_order_by_slot(const int64_t *slots, int64_t n, int64_t num_slots,
                                       int32_t *order, int32_t *spare)
{
    int64_t used = 0;
    for (int64_t i = 0; i < n; i++)
        if (slots[i] >= 0)
            order[used++] = (int32_t)i;
    for (int shift = 0; shift < 63 && (num_slots - 1) >> shift; shift += 11) {
        int64_t start[2048] = {0};
        for (int64_t i = 0; i < used; i++)
            start[(slots[order[i]] >> shift) & 2047]++;
        int64_t sum = 0;
        for (int k = 0; k < 2048; k++) {
            int64_t count = start[k];
            start[k] = sum;
            sum += count;
        }
        for (int64_t i = 0; i < used; i++)
            spare[start[(slots[order[i]] >> shift) & 2047]++] = order[i];
        memcpy(order, spare, (size_t)used * sizeof(int32_t));
    }
    return used;
}

/* Bytes up to the first line border of dst; n when there is no whole line. */
static inline int64_t kv_head(const char *dst, int64_t n)
{
    int64_t head = (int64_t)(-(uintptr_t)dst & (KV_LINE - 1));
    return n - head < KV_LINE ? n : head;
}

/* join by the stream function of the same set: lines that two rows share are assembled on the stack. */
#define KV_JOIN(name, stream)                                                                      \
    static void name(char *dst, const char *const *toks, int64_t at, int64_t n, int64_t bytes)     \
    {                                                                                              \
        _Alignas(KV_LINE) char line[KV_LINE];                                                      \
        int64_t kept = 0; /* bytes of the previous token that are held in `line` */                \
        for (int64_t t = 0; t < n; t++, dst += bytes) {                                            \
            const char *src = toks[t] + at;                                                        \
            int64_t head = (int64_t)(-(uintptr_t)dst & (KV_LINE - 1));                             \
            int64_t body = (bytes - head) & ~(int64_t)(KV_LINE - 1);                               \
            int64_t rest = bytes - head - body;                                                    \
            if (kept) {                                                                            \
                memcpy(line + kept, src, (size_t)head);                                            \
                stream(dst - kept, line, KV_LINE);                                                 \
            } else if (head) {                                                                     \
                memcpy(dst, src, (size_t)head);                                                    \
            }                                                                                      \
            stream(dst + head, src + head, body);                                                  \
            kept = t + 1 < n ? rest : 0;                                                           \
            if (rest)                                                                              \
                memcpy(t + 1 < n ? line : dst + head + body, src + head + body, (size_t)rest);     \
        }                                                                                          \
    }

#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
#define KV_X86 1
#include <immintrin.h>

/* How far ahead of a streaming copy its source is prefetched into the second-level cache: the
 * processor's own prefetcher stops at a page. */
#define KV_SOURCE_AHEAD 4096
/* The same into the first-level cache, for CPUs where that is faster. */
#define KV_SOURCE_NEAR 8192

static void kv_sse_fence(void) { _mm_sfence(); }

/* A copy that streams whole lines, with ``ahead`` (of src and i) before the stores of each. */
#define KV_AVX2_MOVE(name, ahead)                                                                  \
    __attribute__((target("avx2"))) static void name(char *dst, const char *src, int64_t n)        \
    {                                                                                              \
        int64_t i = kv_head(dst, n);                                                               \
        if (i)                                                                                     \
            memcpy(dst, src, (size_t)i);                                                           \
        for (; i + KV_LINE <= n; i += KV_LINE) {                                                   \
            __m256i a = _mm256_loadu_si256((const __m256i *)(src + i));                            \
            __m256i b = _mm256_loadu_si256((const __m256i *)(src + i + 32));                       \
            ahead;                                                                                 \
            _mm256_stream_si256((__m256i *)(dst + i), a);                                          \
            _mm256_stream_si256((__m256i *)(dst + i + 32), b);                                     \
        }                                                                                          \
        if (i < n)                                                                                 \
            memcpy(dst + i, src + i, (size_t)(n - i));                                             \
    }

KV_AVX2_MOVE(kv_avx2_stream, _mm_prefetch(src + i + KV_SOURCE_AHEAD, _MM_HINT_T1))
KV_AVX2_MOVE(kv_avx2_row, (void)0)

KV_JOIN(kv_avx2_join, kv_avx2_row)

#define KV_AVX512 __attribute__((target("avx512f,avx512bw")))

/* The first n bytes of a line, n from 0 to 63. */
#define KV_FIRST(n) ((__mmask64)(((uint64_t)1 << (n)) - 1))

KV_AVX512 static inline void kv_part(char *dst, const char *src, int64_t n)
{
    _mm512_mask_storeu_epi8(dst, KV_FIRST(n), _mm512_maskz_loadu_epi8(KV_FIRST(n), src));
}

#define KV_LOAD_LINE(src) _mm512_loadu_si512((const void *)(src))

KV_AVX512 static inline int64_t kv_lines(char *dst, const char *src, int64_t i, int64_t n)
{
    for (; i + KV_LINE <= n; i += KV_LINE)
        _mm512_stream_si512((__m512i *)(dst + i), KV_LOAD_LINE(src + i));
    return i;
}

/* A copy whose whole lines are moved by ``line`` (of dst, src and i), its ends by masked stores. */
#define KV_AVX512_MOVE(name, line)                                                                 \
    KV_AVX512 static void name(char *dst, const char *src, int64_t n)                              \
    {                                                                                              \
        int64_t i = (int64_t)(-(uintptr_t)dst & (KV_LINE - 1));                                    \
        if (n < i + KV_LINE) {                                                                     \
            memcpy(dst, src, (size_t)n);                                                           \
            return;                                                                                \
        }                                                                                          \
        kv_part(dst, src, i);                                                                      \
        for (; i + KV_LINE <= n; i += KV_LINE) {                                                   \
            line;                                                                                  \
        }                                                                                          \
        kv_part(dst + i, src + i, n - i);                                                          \
    }

KV_AVX512_MOVE(kv_avx512_stream,
               _mm_prefetch(src + i + KV_SOURCE_AHEAD, _MM_HINT_T1);
               _mm512_stream_si512((__m512i *)(dst + i), KV_LOAD_LINE(src + i)))
KV_AVX512_MOVE(kv_avx512_row, _mm512_stream_si512((__m512i *)(dst + i), KV_LOAD_LINE(src + i)))
KV_AVX512_MOVE(kv_avx512_copy, _mm512_store_si512((void *)(dst + i), KV_LOAD_LINE(src + i)))

KV_AVX512 static void kv_avx512_join(char *dst, const char *const *toks, int64_t at, int64_t n,
                                     int64_t bytes)
{
    const char *src = toks[0] + at;
    int64_t head = (int64_t)(-(uintptr_t)dst & (KV_LINE - 1));
    kv_part(dst, src, head);
    for (int64_t t = 1;; t++, dst += bytes) {
        int64_t end = kv_lines(dst, src, head, bytes), rest = bytes - end;
        if (t == n) {
            kv_part(dst + end, src + end, rest);
            return;
        }
        head = 0;
        if (rest) {
            /* The end of this token and the beginning of the next; the load begins before it, but
               what is masked out is not read. */
            __m512i line = _mm512_maskz_loadu_epi8(KV_FIRST(rest), src + end);
            line = _mm512_mask_loadu_epi8(line, ~KV_FIRST(rest), toks[t] + at - rest);
            _mm512_stream_si512((__m512i *)(dst + end), line);
            head = KV_LINE - rest;
        }
        src = toks[t] + at;
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

KV_JOIN(kv_neon_join, kv_neon_stream)
#endif

#include "nz_runs.h"
#include "past_cache.h"

/* Sets best first, the portable one last; of each set the path "lines" first. */
static const kv_isa kv_isas[] = {
#ifdef KV_X86
    {"avx512", "lines", kv_avx512_stream, kv_avx512_row, kv_avx512_copy, kv_avx512_join, kv_avx512_run,
     kv_plain_cells, kv_sse_fence, 2, 0},
#ifdef KV_PAST_CACHE
    {"avx512", "near", kv_avx512_near, kv_avx512_near_row, kv_avx512_copy, kv_avx512_join, kv_avx512_run,
     kv_plain_cells, kv_sse_fence, 6, 0},
    {"avx512", "all", kv_avx512_past, kv_avx512_past_row, kv_avx512_past_copy, kv_avx512_past_join,
     kv_past_run, kv_past_cells, kv_sse_fence, 0, 1},
#endif
    {"avx2", "lines", kv_avx2_stream, kv_avx2_row, kv_plain_stream, kv_avx2_join, kv_avx2_run,
     kv_plain_cells, kv_sse_fence, 2, 0},
#ifdef KV_PAST_CACHE
    {"avx2", "near", kv_avx2_near, kv_avx2_near_row, kv_plain_stream, kv_avx2_join, kv_avx2_run,
     kv_plain_cells, kv_sse_fence, 6, 0},
    {"avx2", "all", kv_avx2_past, kv_avx2_past_row, kv_plain_stream, kv_avx2_past_join, kv_past_run,
     kv_past_cells, kv_sse_fence, 0, 1},
#endif
#endif
#ifdef KV_ARM
    {"neon", "lines", kv_neon_stream, kv_neon_stream, kv_plain_stream, kv_neon_join, kv_neon_run,
     kv_plain_cells, kv_neon_fence, 2, 0},
#endif
    {"portable", "lines", kv_plain_stream, kv_plain_stream, kv_plain_stream, kv_plain_join,
     kv_plain_run, kv_plain_cells, kv_plain_fence, 2, 0},
};
#define KV_N_ISAS ((int)(sizeof(kv_isas) / sizeof(kv_isas[0])))

static int kv_isa_runs(int i)
{
#ifdef KV_X86
    if (!strcmp(kv_isas[i].name, "avx512"))
        return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx2");
    if (!strcmp(kv_isas[i].name, "avx2"))
        return __builtin_cpu_supports("avx2");
#endif
    (void)i;
    return 1;
}

#endif
