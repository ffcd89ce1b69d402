/* SPDX-License-Identifier: Apache-2.0
 *
 * The paths of x86-64 that some CPUs take instead of isa.h's: "near" and "all".
 *
 * "all": every byte of a row is stored past the cache, its ends too.
 * On Zen 5 a masked or ordinary store to part of a line costs a read of that line, twice what a
 * non-temporal store of 16, 8 or 4 bytes costs, which reads nothing; and prefetching the line makes it
 * slower still.  (On Zen 3 it is the other way round: 12.7 against 6.1 ns a line, where a whole line
 * past the cache takes 6.5.)  So only sources are prefetched, and rows are written token by token:
 * lines that two rows share need not be assembled first.  Ends below 4 bytes are ordinary stores.  A
 * store of n bytes past the cache needs an address that is a multiple of n.
 *
 * "near": ends by ordinary stores, whose lines are prefetched six tokens ahead, which is fastest on
 * Zen 3.
 */
#ifndef KVCORE_PAST_CACHE_H
#define KVCORE_PAST_CACHE_H

#if defined(KV_X86) && defined(__x86_64__)
#define KV_PAST_CACHE 1

#define KV_PAST_GROUP 16    /* tokens of a FRACTAL_NZ run that are written in every column together */

static inline void kv_past_byte(char *dst, const char *src, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        dst[i] = src[i];
}

static inline void kv_past_4(char *dst, const char *src)
{
    int32_t word;
    memcpy(&word, src, 4);
    _mm_stream_si32((int *)(void *)dst, word);
}

static inline void kv_past_8(char *dst, const char *src)
{
    long long word;
    memcpy(&word, src, 8);
    _mm_stream_si64((long long *)(void *)dst, word);
}

static inline void kv_past_16(char *dst, const char *src)
{
    _mm_stream_si128((__m128i *)(void *)dst, _mm_loadu_si128((const __m128i *)(const void *)src));
}

/* Copy n bytes at any alignment. */
static inline void kv_past_part(char *dst, const char *src, int64_t n)
{
    int64_t i = (int64_t)(-(uintptr_t)dst & 3);
    if (i > n)
        i = n;
    kv_past_byte(dst, src, i);
    if (n - i >= 4 && (uintptr_t)(dst + i) & 4) {
        kv_past_4(dst + i, src + i);
        i += 4;
    }
    if (n - i >= 8 && (uintptr_t)(dst + i) & 8) {
        kv_past_8(dst + i, src + i);
        i += 8;
    }
    for (; n - i >= 16; i += 16)
        kv_past_16(dst + i, src + i);
    /* Less than 16 bytes are left; unless there are none, dst + i is a multiple of the next size. */
    if (n - i >= 8 && !((uintptr_t)(dst + i) & 7)) {
        kv_past_8(dst + i, src + i);
        i += 8;
    }
    if (n - i >= 4 && !((uintptr_t)(dst + i) & 3)) {
        kv_past_4(dst + i, src + i);
        i += 4;
    }
    kv_past_byte(dst + i, src + i, n - i);
}

/* The same by ordinary stores; a call of memcpy takes longer. */
static inline void kv_near_part(char *dst, const char *src, int64_t n)
{
    int64_t i = 0;
    for (; n - i >= 16; i += 16)
        memcpy(dst + i, src + i, 16);
    if (n - i >= 8) {
        memcpy(dst + i, src + i, 8);
        i += 8;
    }
    if (n - i >= 4) {
        memcpy(dst + i, src + i, 4);
        i += 4;
    }
    kv_past_byte(dst + i, src + i, n - i);
}

/* A copy that streams whole lines by ``line`` and moves both ends by ``part``. */
#define KV_PAST_MOVE(name, target_isa, part, line)                                                 \
    __attribute__((target(target_isa))) static void name(char *dst, const char *src, int64_t n)    \
    {                                                                                              \
        int64_t i = (int64_t)(-(uintptr_t)dst & (KV_LINE - 1));                                    \
        if (i > n)                                                                                 \
            i = n;                                                                                 \
        if (i)                                                                                     \
            part(dst, src, i);                                                                     \
        for (; i + KV_LINE <= n; i += KV_LINE) {                                                   \
            line;                                                                                  \
        }                                                                                          \
        if (i < n)                                                                                 \
            part(dst + i, src + i, n - i);                                                         \
    }

#define KV_PAST_LINE_AVX2                                                                          \
    __m256i a = _mm256_loadu_si256((const __m256i *)(src + i));                                    \
    __m256i b = _mm256_loadu_si256((const __m256i *)(src + i + 32));                               \
    _mm256_stream_si256((__m256i *)(dst + i), a);                                                  \
    _mm256_stream_si256((__m256i *)(dst + i + 32), b)
#define KV_PAST_LINE_AVX512 _mm512_stream_si512((__m512i *)(dst + i), KV_LOAD_LINE(src + i))
#define KV_PAST_ASK _mm_prefetch(src + i + KV_SOURCE_NEAR, _MM_HINT_T0)

KV_PAST_MOVE(kv_avx2_past, "avx2", kv_past_part, KV_PAST_ASK; KV_PAST_LINE_AVX2)
KV_PAST_MOVE(kv_avx2_past_row, "avx2", kv_past_part, KV_PAST_LINE_AVX2)
KV_PAST_MOVE(kv_avx2_near, "avx2", kv_near_part, KV_PAST_ASK; KV_PAST_LINE_AVX2)
KV_PAST_MOVE(kv_avx2_near_row, "avx2", kv_near_part, KV_PAST_LINE_AVX2)
KV_PAST_MOVE(kv_avx512_past, "avx512f,avx512bw", kv_past_part, KV_PAST_ASK; KV_PAST_LINE_AVX512)
KV_PAST_MOVE(kv_avx512_past_row, "avx512f,avx512bw", kv_past_part, KV_PAST_LINE_AVX512)
KV_PAST_MOVE(kv_avx512_near, "avx512f,avx512bw", kv_near_part, KV_PAST_ASK; KV_PAST_LINE_AVX512)
KV_PAST_MOVE(kv_avx512_near_row, "avx512f,avx512bw", kv_near_part, KV_PAST_LINE_AVX512)

/* Rows one behind the other: the processor's write-combining buffer joins their ends to whole lines. */
#define KV_PAST_JOIN(name, move)                                                                   \
    static void name(char *dst, const char *const *toks, int64_t at, int64_t n, int64_t bytes)     \
    {                                                                                              \
        for (int64_t t = 0; t < n; t++)                                                            \
            move(dst + t * bytes, toks[t] + at, bytes);                                            \
    }

KV_PAST_JOIN(kv_avx2_past_join, kv_avx2_past_row)
KV_PAST_JOIN(kv_avx512_past_join, kv_avx512_past_row)

/* Ordinary stores: whole lines at once, and ends that overlap them instead of masks. */
KV_AVX512 static void kv_avx512_past_copy(char *dst, const char *src, int64_t n)
{
    int64_t i = (int64_t)(-(uintptr_t)dst & (KV_LINE - 1));
    if (n < i + KV_LINE) {
        memcpy(dst, src, (size_t)n);
        return;
    }
    _mm512_storeu_si512((void *)dst, KV_LOAD_LINE(src));
    for (; i + KV_LINE <= n; i += KV_LINE)
        _mm512_store_si512((void *)(dst + i), KV_LOAD_LINE(src + i));
    if (i < n)
        _mm512_storeu_si512((void *)(dst + n - KV_LINE), KV_LOAD_LINE(src + n - KV_LINE));
}

/* Prefetch piece ``part`` of ``parts`` of the rows of n tokens, ``bytes`` bytes each, row by row. */
static inline void kv_past_ask(const char *const *later, int64_t at, int64_t n, int64_t bytes,
                               int64_t part, int64_t parts)
{
    int64_t lines = (bytes + KV_LINE - 1) / KV_LINE, all = n * lines;
    for (int64_t i = all * part / parts; i < all * (part + 1) / parts; i++)
        _mm_prefetch(later[i / lines] + at + i % lines * KV_LINE, _MM_HINT_T0);
}

static void kv_past_cells(char *const *pages, int64_t page_at, int64_t column_step,
                          const char *const *toks, const char *const *later, int64_t at, int64_t n,
                          int64_t n_later, int64_t n_columns)
{
    for (int64_t c = 0; c < n_columns; c++) {
        int64_t here = page_at + c * column_step, cell = at + c * KV_CELL;
        if (n_later)
            kv_past_ask(later, at, n_later, n_columns * KV_CELL, c, n_columns);
        for (int64_t t = 0; t < n; t++) {
            char *dst = pages[t] + here;
            const char *src = toks[t] + cell;
            if ((uintptr_t)dst & (KV_HALF - 1)) {
                memcpy(dst, src, KV_CELL);
            } else {
                kv_past_16(dst, src);
                kv_past_16(dst + KV_HALF, src + KV_HALF);
            }
        }
    }
}

/* Cells of a run: half lines that the processor's write-combining buffer joins, a group of tokens at a
 * time, while the next group's rows are prefetched one after the other. */
static void kv_past_run(char *page, int64_t column_step, const char *const *toks, int64_t at, int64_t n,
                        int64_t n_columns)
{
    if (((uintptr_t)page | (uintptr_t)column_step) & (KV_HALF - 1)) {
        kv_plain_run(page, column_step, toks, at, n, n_columns);
        return;
    }
    for (int64_t from = 0; from < n; from += KV_PAST_GROUP) {
        int64_t to = n - from < KV_PAST_GROUP ? n : from + KV_PAST_GROUP;
        int64_t next = n - to < KV_PAST_GROUP ? n - to : KV_PAST_GROUP;
        for (int64_t c = 0; c < n_columns; c++) {
            char *dst = page + c * column_step;
            if (next)
                kv_past_ask(toks + to, at, next, n_columns * KV_CELL, c, n_columns);
            for (int64_t t = from; t < to; t++) {
                kv_past_16(dst + t * KV_CELL, toks[t] + at + c * KV_CELL);
                kv_past_16(dst + t * KV_CELL + KV_HALF, toks[t] + at + c * KV_CELL + KV_HALF);
            }
        }
    }
}
#endif

#endif
