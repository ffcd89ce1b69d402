/* SPDX-License-Identifier: Apache-2.0
 *
 * The loops of means.h for one instruction set: KV_TARGET is the functions' attribute,
 * KV_NAME(name) their names, KV_F16C the floats one conversion from float16 makes (undefined:
 * none).  Included once for each, hence no guard.
 */

#define KV_ADD(type, stored, sum, value)                                                           \
    KV_TARGET static void KV_NAME(kv_add_##type)(float *sums_, const char *src, int64_t step,      \
                                                 int64_t n_tokens, int64_t items, int64_t ahead)   \
    {                                                                                              \
        sum *restrict sums = (sum *)sums_;                                                         \
        for (int64_t t = 0; t < n_tokens; t++, src += step) {                                      \
            const stored *restrict item = (const stored *)src;                                     \
            if (ahead)                                                                             \
                kv_fetch(src, ahead, items * (int64_t)sizeof(stored));                             \
            for (int64_t e = 0; e < items; e++)                                                    \
                sums[e] += value(item[e]);                                                         \
        }                                                                                          \
    }

KV_ADD(bfloat16, kv_u16, float, kv_from_bfloat16)
KV_ADD(float32, kv_u32, float, kv_from_float32)
KV_ADD(int8, kv_i8, kv_sum32, (uint32_t))
KV_ADD(int16, kv_i16, kv_sum32, (uint32_t))
KV_ADD(int32, kv_u32, kv_sum32, (uint32_t))
KV_ADD(uint8, kv_u8, kv_sum32, (uint32_t))
KV_ADD(uint16, kv_u16, kv_sum32, (uint32_t))
KV_ADD(uint32, kv_u32, kv_sum32, (uint32_t))

#ifndef KV_F16C
KV_ADD(float16, kv_u16, float, kv_from_float16)
KV_ADD(float8_e5m2, kv_u8, float, kv_from_float8_e5m2)
KV_ADD(float8_e4m3fn, kv_u8, float, kv_from_float8_e4m3fn)
#else
/* KV_F16C items at a time are widened to float16, then converted to float and, where factor is not 1,
   multiplied by it: a power of two. */
#if KV_F16C == 16
#define KV_HALVES __m256i
#define KV_LOAD16(p) _mm256_loadu_si256((const __m256i *)(p))
#define KV_LOAD8(p) _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(p)))
#define KV_E5M2(x) _mm256_slli_epi16(x, 8)
#define KV_E4M3FN(x)                                                                               \
    _mm256_or_si256(                                                                               \
        _mm256_or_si256(_mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x80)), 8),        \
                        _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x7f)), 7)),       \
        _mm256_and_si256(                                                                          \
            _mm256_cmpeq_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x7f)),                       \
                               _mm256_set1_epi16(0x7f)),                                           \
            _mm256_set1_epi16(0x7e00)))
#define KV_FLOATS __m512
#define KV_CONVERT(x) _mm512_cvtph_ps(x)
#define KV_TIMES(x, y) _mm512_mul_ps(x, _mm512_set1_ps(y))
#define KV_PLUS(p, x) _mm512_storeu_ps(p, _mm512_add_ps(_mm512_loadu_ps(p), x))
#else
#define KV_HALVES __m128i
#define KV_LOAD16(p) _mm_loadu_si128((const __m128i *)(p))
#define KV_LOAD8(p) _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(p)))
#define KV_E5M2(x) _mm_slli_epi16(x, 8)
#define KV_E4M3FN(x)                                                                               \
    _mm_or_si128(_mm_or_si128(_mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x80)), 8),           \
                              _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x7f)), 7)),          \
                 _mm_and_si128(_mm_cmpeq_epi16(_mm_and_si128(x, _mm_set1_epi16(0x7f)),             \
                                               _mm_set1_epi16(0x7f)),                              \
                               _mm_set1_epi16(0x7e00)))
#define KV_FLOATS __m256
#define KV_CONVERT(x) _mm256_cvtph_ps(x)
#define KV_TIMES(x, y) _mm256_mul_ps(x, _mm256_set1_ps(y))
#define KV_PLUS(p, x) _mm256_storeu_ps(p, _mm256_add_ps(_mm256_loadu_ps(p), x))
#endif
#define KV_SAME(x) (x)

#define KV_ADD_HALVES(type, stored, load, halves, factor)                                          \
    KV_TARGET static void KV_NAME(kv_add_##type)(float *restrict sums, const char *src,            \
                                                 int64_t step, int64_t n_tokens, int64_t items,    \
                                                 int64_t ahead)                                    \
    {                                                                                              \
        for (int64_t t = 0; t < n_tokens; t++, src += step) {                                      \
            const stored *item = (const stored *)src;                                              \
            int64_t e = 0;                                                                         \
            if (ahead)                                                                             \
                kv_fetch(src, ahead, items * (int64_t)sizeof(stored));                             \
            for (; e + KV_F16C <= items; e += KV_F16C) {                                           \
                KV_HALVES wide = load(item + e);                                                   \
                KV_FLOATS value = KV_CONVERT(halves(wide));                                        \
                if ((factor) != 1.0f)                                                              \
                    value = KV_TIMES(value, factor);                                               \
                KV_PLUS(sums + e, value);                                                          \
            }                                                                                      \
            for (; e < items; e++)                                                                 \
                sums[e] += kv_from_##type(item[e]);                                                \
        }                                                                                          \
    }

KV_ADD_HALVES(float16, kv_u16, KV_LOAD16, KV_SAME, 1.0f)
KV_ADD_HALVES(float8_e5m2, kv_u8, KV_LOAD8, KV_E5M2, 1.0f)
KV_ADD_HALVES(float8_e4m3fn, kv_u8, KV_LOAD8, KV_E4M3FN, 0x1p8f)
#undef KV_ADD_HALVES
#undef KV_HALVES
#undef KV_LOAD16
#undef KV_LOAD8
#undef KV_E5M2
#undef KV_E4M3FN
#undef KV_FLOATS
#undef KV_CONVERT
#undef KV_TIMES
#undef KV_PLUS
#undef KV_SAME
#endif

#if defined(KV_F16C) && KV_F16C == 16
/* A value's upper half is looked up among 128, by two permutations of 64 words each. */
KV_TARGET static void KV_NAME(kv_add_hifloat8)(float *restrict sums, const char *src, int64_t step,
                                               int64_t n_tokens, int64_t items, int64_t ahead)
{
    const __m512i table0 = _mm512_loadu_si512(kv_hifloat8_halves);
    const __m512i table1 = _mm512_loadu_si512(kv_hifloat8_halves + 32);
    const __m512i table2 = _mm512_loadu_si512(kv_hifloat8_halves + 64);
    const __m512i table3 = _mm512_loadu_si512(kv_hifloat8_halves + 96);
    for (int64_t t = 0; t < n_tokens; t++, src += step) {
        int64_t e = 0;
        if (ahead)
            kv_fetch(src, ahead, items);
        for (; e + 32 <= items; e += 32) {
            __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(src + e)));
            __m512i low = _mm512_permutex2var_epi16(table0, code, table1);
            __m512i high = _mm512_permutex2var_epi16(table2, code, table3);
            __mmask32 upper = _mm512_test_epi16_mask(code, _mm512_set1_epi16(0x40));
            __mmask32 nan = _mm512_cmpeq_epi16_mask(code, _mm512_set1_epi16(0x80));
            __m512i half = _mm512_mask_mov_epi16(low, upper, high);
            half = _mm512_or_si512(
                half, _mm512_slli_epi16(_mm512_and_si512(code, _mm512_set1_epi16(0x80)), 8));
            half = _mm512_mask_mov_epi16(half, nan, _mm512_set1_epi16(0x7fc0));
            for (int part = 0; part < 2; part++) {
                __m256i words = part ? _mm512_extracti64x4_epi64(half, 1)
                                     : _mm512_castsi512_si256(half);
                __m512i value = _mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16);
                float *sum = sums + e + 16 * part;
                _mm512_storeu_ps(sum, _mm512_add_ps(_mm512_loadu_ps(sum),
                                                    _mm512_castsi512_ps(value)));
            }
        }
        for (; e < items; e++)
            sums[e] += kv_from_hifloat8((uint8_t)src[e]);
    }
}
#else
KV_ADD(hifloat8, kv_u8, float, kv_from_hifloat8)
#endif

#define KV_ADDER(type) KV_NAME(kv_add_##type),
static const kv_add KV_NAME(kv_adders)[] = {KV_EACH_TYPE(KV_ADDER)};
#undef KV_ADDER
#undef KV_ADD

#define KV_MEAN_FLOAT(type, stored)                                                                \
    KV_TARGET static void KV_NAME(kv_mean_##type)(char *restrict out, const float *restrict sums,  \
                                                  int64_t items, int64_t count)                    \
    {                                                                                              \
        const float divisor = (float)count;                                                        \
        for (int64_t e = 0; e < items; e++)                                                        \
            ((stored *)out)[e] = kv_to_##type(sums[e] / divisor);                                  \
    }

/* Through doubles, which vectorise; exact: a sum below 2^32 makes a quotient off by less than
   2^-20 / count, and one that is not whole lies at least 1 / count from every whole number. */
#define KV_MEAN_INT(type, stored, sum)                                                             \
    KV_TARGET static void KV_NAME(kv_mean_##type)(char *restrict out, const float *restrict sums,  \
                                                  int64_t items, int64_t count)                    \
    {                                                                                              \
        const double divisor = (double)count;                                                      \
        for (int64_t e = 0; e < items; e++)                                                        \
            ((stored *)out)[e] = (stored)(sum)((double)(sum)((const kv_sum32 *)sums)[e] / divisor); \
    }

KV_MEAN_FLOAT(float16, kv_u16)
KV_MEAN_FLOAT(bfloat16, kv_u16)
KV_MEAN_FLOAT(float32, kv_u32)
KV_MEAN_FLOAT(hifloat8, kv_u8)
KV_MEAN_FLOAT(float8_e5m2, kv_u8)
KV_MEAN_FLOAT(float8_e4m3fn, kv_u8)
KV_MEAN_INT(int8, kv_u8, int32_t)
KV_MEAN_INT(int16, kv_u16, int32_t)
KV_MEAN_INT(int32, kv_u32, int32_t)
KV_MEAN_INT(uint8, kv_u8, uint32_t)
KV_MEAN_INT(uint16, kv_u16, uint32_t)
KV_MEAN_INT(uint32, kv_u32, uint32_t)

#define KV_DIVIDER(type) KV_NAME(kv_mean_##type),
static const kv_mean KV_NAME(kv_means)[] = {KV_EACH_TYPE(KV_DIVIDER)};
#undef KV_DIVIDER
#undef KV_MEAN_FLOAT
#undef KV_MEAN_INT
