/* SPDX-License-Identifier: Apache-2.0
 *
 * The AVX-512 instructions that the kernels use, in portable C: SIMDe's where version 0.7.4 has them,
 * the others here.  tests/tools/avx512_in_c.py puts these in the place of the compiler's own.  A
 * store that has to be aligned ends the process where it is not, as the CPU would.
 */
#ifndef KVCORE_AVX512_IN_C_H
#define KVCORE_AVX512_IN_C_H

#include <immintrin.h>
#include <simde/x86/avx512.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef simde__m512i c512i;
typedef simde__m512 c512;
typedef simde__mmask64 cmmask64;
typedef simde__mmask32 cmmask32;

#define c512_add_ps simde_mm512_add_ps
#define c512_mul_ps simde_mm512_mul_ps
#define c512_set1_ps simde_mm512_set1_ps
#define c512_loadu_ps simde_mm512_loadu_ps
#define c512_storeu_ps simde_mm512_storeu_ps
#define c512_castsi512_ps simde_mm512_castsi512_ps
#define c512_loadu_si512 simde_mm512_loadu_si512
#define c512_storeu_si512 simde_mm512_storeu_si512
#define c512_and_si512 simde_mm512_and_si512
#define c512_or_si512 simde_mm512_or_si512
#define c512_set1_epi16 simde_mm512_set1_epi16
#define c512_setr_epi64 simde_mm512_setr_epi64
#define c512_slli_epi16 simde_mm512_slli_epi16
#define c512_slli_epi32 simde_mm512_slli_epi32
#define c512_mask_mov_epi16 simde_mm512_mask_mov_epi16
#define c512_test_epi16_mask simde_mm512_test_epi16_mask
#define c512_permutex2var_epi16 simde_mm512_permutex2var_epi16
#define c512_permutex2var_epi64 simde_mm512_permutex2var_epi64
#define c512_shuffle_i64x2 simde_mm512_shuffle_i64x2

/* A byte that its mask leaves out is neither read nor written. */
static inline void c512_mask_storeu_epi8(void *dst, uint64_t mask, c512i value)
{
    char bytes[64];
    memcpy(bytes, &value, 64);
    for (int i = 0; i < 64; i++)
        if (mask >> i & 1)
            ((char *)dst)[i] = bytes[i];
}

static inline c512i c512_mask_loadu_epi8(c512i value, uint64_t mask, const void *src)
{
    char bytes[64];
    memcpy(bytes, &value, 64);
    for (int i = 0; i < 64; i++)
        if (mask >> i & 1)
            bytes[i] = ((const char *)src)[i];
    memcpy(&value, bytes, 64);
    return value;
}

static inline c512i c512_maskz_loadu_epi8(uint64_t mask, const void *src)
{
    c512i zero;
    memset(&zero, 0, 64);
    return c512_mask_loadu_epi8(zero, mask, src);
}

static inline void c512_store_si512(void *dst, c512i value)
{
    if ((uintptr_t)dst & 63)
        abort();
    memcpy(dst, &value, 64);
}

static inline void c512_stream_si512(void *dst, c512i value) { c512_store_si512(dst, value); }

static inline cmmask32 c512_cmpeq_epi16_mask(c512i a, c512i b)
{
    uint16_t x[32], y[32];
    memcpy(x, &a, 64);
    memcpy(y, &b, 64);
    cmmask32 mask = 0;
    for (int i = 0; i < 32; i++)
        mask |= (cmmask32)(x[i] == y[i]) << i;
    return mask;
}

#define C512_WIDEN(name, narrow, wide, n)                                                          \
    static inline c512i name(__m256i value)                                                        \
    {                                                                                              \
        narrow from[n];                                                                            \
        wide to[n];                                                                                \
        memcpy(from, &value, 32);                                                                  \
        for (int i = 0; i < n; i++)                                                                \
            to[i] = from[i];                                                                       \
        c512i result;                                                                              \
        memcpy(&result, to, 64);                                                                   \
        return result;                                                                             \
    }
C512_WIDEN(c512_cvtepu16_epi32, uint16_t, uint32_t, 16)
C512_WIDEN(c512_cvtepu8_epi16, uint8_t, uint16_t, 32)

static inline c512 c512_cvtph_ps(__m256i value)
{
    __m256 halves[2] = {_mm256_cvtph_ps(_mm256_castsi256_si128(value)),
                        _mm256_cvtph_ps(_mm256_extracti128_si256(value, 1))};
    c512 result;
    memcpy(&result, halves, 64);
    return result;
}

static inline __m256i c512_extracti64x4_epi64(c512i value, int half)
{
    __m256i result;
    memcpy(&result, (const char *)&value + 32 * half, 32);
    return result;
}

static inline __m256i c512_castsi512_si256(c512i value) { return c512_extracti64x4_epi64(value, 0); }

#endif
