/* SPDX-License-Identifier: Apache-2.0
 *
 * Means over windows of tokens.  Each element is summed in token order, from +0.0 (integers: from
 * 0, modulo 2^32), and divided once by the number of tokens; the result is rounded once.
 *
 * The sums are exact to the bit on every machine: an element's own additions are never
 * reassociated, since loops run over elements inside and over tokens outside; there is no product
 * that could be contracted into an addition (float16's denormals are scaled exactly); and
 * kv_float_begin sets the rounding mode and keeps denormals, whatever the thread had set.
 *
 * means_loops.h holds the loops and is compiled once for each instruction set.
 */
#ifndef KVCORE_MEANS_H
#define KVCORE_MEANS_H

#include <float.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif !defined(__aarch64__)
#include <fenv.h>
#endif

#if FLT_EVAL_METHOD != 0
#error "float arithmetic must be done in float: on 32-bit x86 compile with -msse2 -mfpmath=sse"
#endif

/* Stored items: at any address, and whatever type the memory was written with. */
#define KV_STORED __attribute__((aligned(1), may_alias))
typedef uint8_t kv_u8;
typedef int8_t kv_i8;
typedef uint16_t KV_STORED kv_u16;
typedef int16_t KV_STORED kv_i16;
typedef uint32_t KV_STORED kv_u32;
typedef uint32_t __attribute__((may_alias)) kv_sum32; /* the float sums used as integers */

/* Adds n_tokens rows of packed items, step bytes apart, to sums. ahead: where to prefetch, in
   bytes from the row being read; 0: nowhere. */
typedef void (*kv_add)(float *sums, const char *src, int64_t step, int64_t n_tokens, int64_t items,
                       int64_t ahead);
/* Writes sums / count as packed items. */
typedef void (*kv_mean)(char *out, const float *sums, int64_t items, int64_t count);

/* The types that have a mean.  The place of a type in this list is the number that kv_pick takes. */
#define KV_EACH_TYPE(DO)                                                                           \
    DO(float16) DO(bfloat16) DO(float32) DO(hifloat8) DO(float8_e5m2) DO(float8_e4m3fn)            \
    DO(int8) DO(int16) DO(int32) DO(uint8) DO(uint16) DO(uint32)
#define KV_TYPE_NAME(type) #type " "
static const char kv_type_names[] = KV_EACH_TYPE(KV_TYPE_NAME);

static inline float kv_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t kv_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

/* -- stored item to float ------------------------------------------------------------------- */

static inline float kv_from_float16(uint16_t h)
{
    uint32_t rest = h & 0x7fff;
    /* Both exact. The denormal is made from an integer: a float32 denormal on the way would cost
       a hundred cycles on many CPUs. Masks, since compilers do not vectorise a choice of floats. */
    uint32_t normal = (rest << 13) + (112u << 23) + ((0u - (rest >= 0x7c00)) & 112u << 23);
    uint32_t denormal = kv_bits((float)(int32_t)(rest & 0x3ff) * 0x1p-24f);
    uint32_t mask = 0u - (rest >= 0x400);
    return kv_float((normal & mask) | (denormal & ~mask) | (uint32_t)(h & 0x8000) << 16);
}

static inline float kv_from_bfloat16(uint16_t h) { return kv_float((uint32_t)h << 16); }

static inline float kv_from_float32(uint32_t bits) { return kv_float(bits); }

/* float8_e5m2 is the upper half of a float16. */
static inline float kv_from_float8_e5m2(uint8_t c) { return kv_from_float16((uint16_t)(c << 8)); }

/* float8_e4m3fn's magnitude, put where float16 has its own, is 2^8 too small; exact. */
static inline uint16_t kv_float8_e4m3fn_half(uint8_t c)
{
    uint32_t nan = 0u - ((c & 0x7f) == 0x7f);
    return (uint16_t)((c & 0x80) << 8 | (c & 0x7f) << 7 | (nan & 0x7e00));
}

static inline float kv_from_float8_e4m3fn(uint8_t c)
{
    return kv_from_float16(kv_float8_e4m3fn_half(c)) * 0x1p8f;
}

/* kvcore.hifloat8 defines the format; it fills these tables through kv_set_hifloat8. */
static float kv_hifloat8_values[256];
static uint32_t kv_hifloat8_limits[127]; /* midpoints of neighbouring magnitudes, as float bits */
static uint8_t kv_hifloat8_codes[128];   /* the code of each magnitude, ascending               */
static uint16_t kv_hifloat8_halves[128]; /* the upper halves of the values below 0x80: bfloat16 */

static void kv_set_hifloat8(const float *values, const uint32_t *limits, const uint8_t *codes)
{
    memcpy(kv_hifloat8_values, values, sizeof kv_hifloat8_values);
    memcpy(kv_hifloat8_limits, limits, sizeof kv_hifloat8_limits);
    memcpy(kv_hifloat8_codes, codes, sizeof kv_hifloat8_codes);
    for (int code = 0; code < 128; code++)
        kv_hifloat8_halves[code] = (uint16_t)(kv_bits(values[code]) >> 16);
}

static inline float kv_from_hifloat8(uint8_t c) { return kv_hifloat8_values[c]; }

/* -- float to stored item --------------------------------------------------------------------- */

/* The magnitude's code: nearest, ties to even, with `mantissa` stored bits and the smallest normal
   exponent `least`. top: the code at which everything overflows (infinity; NaN where a type has no
   infinity). Without branches, so that compilers vectorise it. */
static inline uint32_t kv_round(uint32_t bits, int mantissa, int least, uint32_t top, uint32_t nan)
{
    uint32_t magnitude = bits & 0x7fffffff;
    int exponent = (int)(magnitude >> 23) - 127;
    int above = exponent > least ? exponent - least : 0;
    int shift = 23 - mantissa + (exponent < least ? least - exponent : 0);
    shift = shift < 25 ? shift : 25; /* there all is less than half of the smallest denormal */
    uint32_t significand = (magnitude & 0x7fffff) | 0x800000;
    uint32_t rest = significand & ((1u << shift) - 1), half = 1u << (shift - 1);
    uint32_t code = significand >> shift;
    code += (rest > half) | ((rest == half) & code);
    /* The hidden bit counts as one exponent more, and so does a carry. */
    code += (uint32_t)above << mantissa;
    code = code < top ? code : top;
    return magnitude > 0x7f800000 ? nan : code;
}

static inline uint16_t kv_to_float16(float value)
{
    uint32_t bits = kv_bits(value);
    return (uint16_t)(kv_round(bits, 10, -14, 0x7c00, 0x7e00) | (bits >> 16 & 0x8000));
}

static inline uint16_t kv_to_bfloat16(float value)
{
    uint32_t bits = kv_bits(value), nan = 0u - ((bits & 0x7fffffff) > 0x7f800000);
    uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1); /* a NaN may wrap here */
    return (uint16_t)(((rounded & ~nan) | ((bits | 0x400000) & nan)) >> 16);
}

static inline uint32_t kv_to_float32(float value) { return kv_bits(value); }

static inline uint8_t kv_to_float8_e5m2(float value)
{
    uint32_t bits = kv_bits(value);
    return (uint8_t)(kv_round(bits, 2, -14, 0x7c, 0x7e) | (bits >> 24 & 0x80));
}

static inline uint8_t kv_to_float8_e4m3fn(float value)
{
    uint32_t bits = kv_bits(value);
    return (uint8_t)(kv_round(bits, 3, -6, 0x7f, 0x7f) | (bits >> 24 & 0x80));
}

static inline uint8_t kv_to_hifloat8(float value)
{
    uint32_t bits = kv_bits(value), magnitude = bits & 0x7fffffff;
    int below = 0, above = 127;
    if (magnitude > 0x7f800000)
        return 0x80;
    while (below < above) { /* positive floats are ordered as their bits; a tie goes away from 0 */
        int middle = (below + above) / 2;
        if (kv_hifloat8_limits[middle] <= magnitude)
            below = middle + 1;
        else
            above = middle;
    }
    /* There is one zero: 0x80 is NaN. */
    return kv_hifloat8_codes[below] ? (uint8_t)(kv_hifloat8_codes[below] | (bits >> 24 & 0x80)) : 0;
}

/* -- additions and means, once for each instruction set ----------------------------------------- */

/* The place may lie behind the array: a prefetch faults nowhere. */
static inline void kv_fetch(const char *src, int64_t ahead, int64_t nbytes)
{
    for (int64_t at = 0; at < nbytes; at += 64)
        __builtin_prefetch((const void *)((uintptr_t)src + (uintptr_t)(ahead + at)), 0, 2);
}

#define KV_TARGET
#define KV_NAME(name) name##_portable
#include "means_loops.h"
#undef KV_TARGET
#undef KV_NAME

#if defined(__x86_64__)
#define KV_F16C 8
#define KV_TARGET __attribute__((target("avx2,f16c")))
#define KV_NAME(name) name##_avx2
#include "means_loops.h"
#undef KV_TARGET
#undef KV_NAME
#undef KV_F16C

#define KV_F16C 16
#define KV_TARGET __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq")))
#define KV_NAME(name) name##_avx512
#include "means_loops.h"
#undef KV_TARGET
#undef KV_NAME
#undef KV_F16C
#endif

/* The functions for a type and the instruction set of that name (isa.h). They need features that the
   sets of isa.h do not include, so these are tested for here; nearly all CPUs have them. */
static int kv_has_f16c;

static void kv_pick(int type, const char *isa, kv_add *add, kv_mean *mean)
{
    *add = kv_adders_portable[type];
    *mean = kv_means_portable[type];
#if defined(__x86_64__)
    if (strncmp(isa, "avx", 3) != 0 || !kv_has_f16c)
        return;
    *add = kv_adders_avx2[type];
    *mean = kv_means_avx2[type];
    if (strcmp(isa, "avx512") == 0 && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
        *add = kv_adders_avx512[type];
        *mean = kv_means_avx512[type];
    }
#else
    (void)isa;
#endif
}

/* Call this once, before anything else here. */
static void kv_means_begin(void)
{
#if defined(__x86_64__)
    unsigned a, b, c = 0, d; /* asked once: in a virtual machine it takes microseconds */
    kv_has_f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
#endif
}

/* -- the floating-point environment ------------------------------------------------------------- */

#if defined(__x86_64__)
typedef unsigned kv_float_mode;
static inline void kv_float_begin(kv_float_mode *saved)
{
    *saved = _mm_getcsr();
    _mm_setcsr(0x1f80); /* nearest, denormals kept, no traps */
}
static inline void kv_float_end(const kv_float_mode *saved) { _mm_setcsr(*saved); }
#elif defined(__aarch64__)
typedef uint64_t kv_float_mode;
static inline void kv_float_begin(kv_float_mode *saved)
{
    uint64_t usual = 0;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(*saved));
    __asm__ __volatile__("msr fpcr, %0" : : "r"(usual) : "memory");
}
static inline void kv_float_end(const kv_float_mode *saved)
{
    __asm__ __volatile__("msr fpcr, %0" : : "r"(*saved) : "memory");
}
#else
typedef fenv_t kv_float_mode;
static inline void kv_float_begin(kv_float_mode *saved)
{
    fegetenv(saved);
    fesetenv(FE_DFL_ENV);
}
static inline void kv_float_end(const kv_float_mode *saved) { fesetenv(saved); }
#endif

/* -- rows --------------------------------------------------------------------------------------- */

static inline void kv_row(char *dst, const char *src, int64_t n) { memcpy(dst, src, (size_t)n); }

/* Past the caches. stream writes whole lines past them, and the parts of lines at both ends in the
   ordinary way; but rows follow one another, and 16 bytes at a time a line that two rows share is
   complete before it is written. */
static inline void kv_row_streamed(char *dst, const char *src, int64_t n,
                                   void (*stream)(char *, const char *, int64_t))
{
#if defined(__x86_64__)
    if ((((uintptr_t)dst | (uintptr_t)n) & 15) == 0) {
        for (int64_t at = 0; at < n; at += 16)
            _mm_stream_si128((__m128i *)(dst + at), _mm_loadu_si128((const __m128i *)(src + at)));
        return;
    }
#endif
    stream(dst, src, n);
}

#endif
