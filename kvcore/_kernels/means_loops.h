/* SPDX-License-Identifier: Apache-2.0
 *
 * The additions of means.h for one instruction set: KV_TARGET is the functions' attribute,
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
KV_ADD(hifloat8, kv_u8, float, kv_from_hifloat8)
KV_ADD(float8_e5m2, kv_u8, float, kv_from_float8_e5m2)
KV_ADD(float8_e4m3fn, kv_u8, float, kv_from_float8_e4m3fn)
KV_ADD(int8, kv_i8, kv_sum32, (uint32_t))
KV_ADD(int16, kv_i16, kv_sum32, (uint32_t))
KV_ADD(uint8, kv_u8, kv_sum32, (uint32_t))
KV_ADD(uint16, kv_u16, kv_sum32, (uint32_t))
KV_ADD(uint32, kv_u32, kv_sum32, (uint32_t))

#ifndef KV_F16C
KV_ADD(float16, kv_u16, float, kv_from_float16)
#else
KV_TARGET static void KV_NAME(kv_add_float16)(float *restrict sums, const char *src, int64_t step,
                                              int64_t n_tokens, int64_t items, int64_t ahead)
{
    for (int64_t t = 0; t < n_tokens; t++, src += step) {
        int64_t e = 0;
        if (ahead)
            kv_fetch(src, ahead, items * 2);
        for (; e + KV_F16C <= items; e += KV_F16C) {
#if KV_F16C == 16
            __m512 item = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(src + 2 * e)));
            _mm512_storeu_ps(sums + e, _mm512_add_ps(_mm512_loadu_ps(sums + e), item));
#else
            __m256 item = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(src + 2 * e)));
            _mm256_storeu_ps(sums + e, _mm256_add_ps(_mm256_loadu_ps(sums + e), item));
#endif
        }
        for (; e < items; e++)
            sums[e] += kv_from_float16(((const kv_u16 *)src)[e]);
    }
}
#endif

static const kv_add KV_NAME(kv_adders)[KV_MEANS] = {
    KV_NAME(kv_add_float16), KV_NAME(kv_add_bfloat16), KV_NAME(kv_add_float32),
    KV_NAME(kv_add_hifloat8), KV_NAME(kv_add_float8_e5m2), KV_NAME(kv_add_float8_e4m3fn),
    KV_NAME(kv_add_int8), KV_NAME(kv_add_int16), KV_NAME(kv_add_uint32),
    KV_NAME(kv_add_uint8), KV_NAME(kv_add_uint16), KV_NAME(kv_add_uint32),
};

#undef KV_ADD
