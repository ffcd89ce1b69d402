/* SPDX-License-Identifier: Apache-2.0
 *
 * FRACTAL_NZ, runs: n tokens whose 32-byte cells lie side by side in each column.
 *
 * Each column is written in whole lines past the cache; arrays of numpy begin 16 bytes after a line,
 * so a line is put together from 16-byte halves of cells.  A group of a few lines is written in every
 * column before the next group: the tokens of a group are then read from the first-level cache, of
 * which rows a power of two apart share a few sets only.  A longer group is slower for that, a shorter
 * one since the lines of a column are neighbours in memory.
 */
#ifndef KVCORE_NZ_RUNS_H
#define KVCORE_NZ_RUNS_H

#define KV_GROUP 8               /* lines */
#define KV_LINE_HALVES (KV_LINE / 16) /* halves in a line */
#define KV_GROUP_TOKENS (KV_GROUP * KV_LINE / KV_CELL)

/* A run written cell by cell, one group of tokens at a time. */
#define KV_RUN_OF_CELLS(name, move)                                                                \
    static void name(char *page, int64_t column_step, const char *const *toks, int64_t at,         \
                     int64_t n, int64_t n_columns)                                                 \
    {                                                                                              \
        for (int64_t from = 0; from < n; from += KV_GROUP_TOKENS) {                                \
            int64_t to = n - from < KV_GROUP_TOKENS ? n : from + KV_GROUP_TOKENS;                  \
            for (int64_t c = 0; c < n_columns; c++)                                                \
                for (int64_t t = from; t < to; t++)                                                \
                    move(page + c * column_step + t * KV_CELL, toks[t] + at + c * KV_CELL);        \
        }                                                                                          \
    }

static inline void kv_plain_cell(char *dst, const char *src) { memcpy(dst, src, KV_CELL); }

KV_RUN_OF_CELLS(kv_plain_run, kv_plain_cell)

#ifdef KV_ARM
static inline void kv_neon_cell(char *dst, const char *src)
{
    kv_stnp(dst, vld1q_u8((const uint8_t *)src), vld1q_u8((const uint8_t *)src + 16));
}

KV_RUN_OF_CELLS(kv_neon_run, kv_neon_cell)
#endif

#ifdef KV_X86
/* Halves 0 .. 2n-1 of a column: half u is the (u & 1)th of token u / 2. */
#define KV_LOAD_HALF(toks, at, u) \
    _mm_loadu_si128((const __m128i *)((toks)[(u) >> 1] + (at) + ((u) & 1) * KV_HALF))

static inline void kv_store_halves(char *dst, const char *const *toks, int64_t at, int64_t from,
                                   int64_t to)
{
    for (int64_t u = from; u < to; u++)
        _mm_storeu_si128((__m128i *)(dst + u * KV_HALF), KV_LOAD_HALF(toks, at, u));
}

/* Halves of a column of n tokens before its first whole line. */
static inline int64_t kv_halves_before(const char *dst, int64_t n)
{
    int64_t u = (int64_t)(-(uintptr_t)dst & (KV_LINE - 1)) / KV_HALF;
    return u < 2 * n ? u : 2 * n;
}

__attribute__((target("avx2")))
static void kv_avx2_run(char *page, int64_t column_step, const char *const *toks, int64_t at,
                        int64_t n, int64_t n_columns)
{
    if (((uintptr_t)page | (uintptr_t)column_step) & (KV_HALF - 1)) { /* of every column */
        kv_plain_run(page, column_step, toks, at, n, n_columns);
        return;
    }
    for (int64_t first = 0; first <= n / 2; first += KV_GROUP) {
        int last = first + KV_GROUP > n / 2; /* a column has n / 2 whole lines at the most */
        for (int64_t c = 0; c < n_columns; c++) {
            char *dst = page + c * column_step;
            int64_t cell = at + c * KV_CELL, head = kv_halves_before(dst, n);
            int64_t lines = (2 * n - head) / KV_LINE_HALVES;
            int64_t end = lines < first + KV_GROUP ? lines : first + KV_GROUP;
            if (first == 0) {
                if (c + 2 < n_columns)
                    kv_will_write(dst + 2 * column_step);
                kv_store_halves(dst, toks, cell, 0, head);
            }
            if (last && c + 2 < n_columns)
                kv_will_write(dst + 2 * column_step + n * KV_CELL - 1);
            for (int64_t line = first; line < end; line++) {
                int64_t u = head + line * KV_LINE_HALVES;
                __m256i a = _mm256_inserti128_si256(_mm256_castsi128_si256(KV_LOAD_HALF(toks, cell, u)),
                                                    KV_LOAD_HALF(toks, cell, u + 1), 1);
                __m256i b = _mm256_inserti128_si256(_mm256_castsi128_si256(KV_LOAD_HALF(toks, cell, u + 2)),
                                                    KV_LOAD_HALF(toks, cell, u + 3), 1);
                _mm256_stream_si256((__m256i *)(dst + u * KV_HALF), a);
                _mm256_stream_si256((__m256i *)(dst + u * KV_HALF + 32), b);
            }
            if (last)
                kv_store_halves(dst, toks, cell, head + lines * KV_LINE_HALVES, 2 * n);
        }
    }
}

/* Two columns at a time, which are one line of a token: whole lines of both are put together from the
 * lines of two tokens, or of three where a line begins in the middle of a cell. */
KV_AVX512 static void kv_avx512_run(char *page, int64_t column_step, const char *const *toks, int64_t at,
                                    int64_t n, int64_t n_columns)
{
    int64_t head = kv_halves_before(page, n), lines = (2 * n - head) / KV_LINE_HALVES;
    int64_t tail = head + lines * KV_LINE_HALVES, pairs = n_columns & ~(int64_t)1, last;
    if ((uintptr_t)page & (KV_HALF - 1) || column_step & (KV_LINE - 1)) {
        kv_avx2_run(page, column_step, toks, at, n, n_columns);
        return;
    }
    /* Words of 8 bytes: 0 to 7 of the first, 8 to 15 of the second. */
    const __m512i middle = _mm512_setr_epi64(2, 3, 8, 9, 10, 11, 0, 0);
    const __m512i middle_1 = _mm512_setr_epi64(6, 7, 12, 13, 14, 15, 0, 0);
    const __m512i end = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 8, 9);
    const __m512i end_1 = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 12, 13);
    for (int64_t first = 0, more = 1; more; first = last) {
        last = lines - first < KV_GROUP ? lines : first + KV_GROUP;
        more = last < lines;
        for (int64_t c = 0; c < pairs; c += 2) {
            char *dst = page + c * column_step, *dst_1 = dst + column_step;
            int64_t cell = at + c * KV_CELL, t = (head + first * KV_LINE_HALVES) >> 1;
            if (first == 0) {
                if (c + 4 < pairs) {
                    kv_will_write(dst + 4 * column_step);
                    kv_will_write(dst_1 + 4 * column_step);
                }
                kv_store_halves(dst, toks, cell, 0, head);
                kv_store_halves(dst_1, toks, cell + KV_CELL, 0, head);
            }
            if (last == lines && c + 4 < pairs) {
                kv_will_write(dst + 4 * column_step + n * KV_CELL - 1);
                kv_will_write(dst_1 + 4 * column_step + n * KV_CELL - 1);
            }
            if (head & 1 && first < last) {
                __m512i a = KV_LOAD_LINE(toks[t] + cell);
                for (int64_t line = first; line < last; line++, t += 2) {
                    int64_t to = (head + line * KV_LINE_HALVES) * KV_HALF;
                    __m512i b = KV_LOAD_LINE(toks[t + 1] + cell), d = KV_LOAD_LINE(toks[t + 2] + cell);
                    __m512i ab = _mm512_permutex2var_epi64(a, middle, b);
                    __m512i ab_1 = _mm512_permutex2var_epi64(a, middle_1, b);
                    _mm512_stream_si512((__m512i *)(dst + to), _mm512_permutex2var_epi64(ab, end, d));
                    _mm512_stream_si512((__m512i *)(dst_1 + to), _mm512_permutex2var_epi64(ab_1, end_1, d));
                    a = d;
                }
            } else {
                for (int64_t line = first; line < last; line++, t += 2) {
                    int64_t to = (head + line * KV_LINE_HALVES) * KV_HALF;
                    __m512i a = KV_LOAD_LINE(toks[t] + cell), b = KV_LOAD_LINE(toks[t + 1] + cell);
                    _mm512_stream_si512((__m512i *)(dst + to), _mm512_shuffle_i64x2(a, b, 0x44));
                    _mm512_stream_si512((__m512i *)(dst_1 + to), _mm512_shuffle_i64x2(a, b, 0xee));
                }
            }
            if (last == lines) {
                kv_store_halves(dst, toks, cell, tail, 2 * n);
                kv_store_halves(dst_1, toks, cell + KV_CELL, tail, 2 * n);
            }
        }
    }
    if (pairs < n_columns)
        kv_avx2_run(page + pairs * column_step, column_step, toks, at + pairs * KV_CELL, n, 1);
}
#endif

#endif
