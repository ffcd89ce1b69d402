/* SPDX-License-Identifier: Apache-2.0
 *
 * A lane is one cache with its source: how to find token i on the linear side, slot s on the
 * paged side, and the pieces of one token.  Kernels know nothing else, neither dtypes nor
 * layouts.  All offsets are 64-bit bytes.
 */
#ifndef KVCORE_LANES_H
#define KVCORE_LANES_H

#include <stdint.h>
#include <string.h>
#ifdef KVCORE_DEBUG
#include <stdio.h>
#include <stdlib.h>
#endif

typedef struct {
    char *tok;              /* linear side: token i at tok + (i / tok_inner) * tok_outer_stride */
    int64_t tok_inner;      /*                        + (i % tok_inner) * tok_stride            */
    int64_t tok_outer_stride; /* tok_inner == 0: one level, tok + i * tok_stride                */
    int64_t tok_stride;
    char *page;             /* paged side: slot s at page + (s / block_size) * block_stride     */
    int64_t block_size;     /*                          + (s % block_size) * row_stride         */
    int64_t block_stride;   /* flat: block_stride == block_size * row_stride, no division       */
    int64_t row_stride;
    int32_t flat;
    int32_t shift;          /* log2(block_size) where that is whole, else -1                    */
    int32_t levels;         /* piece loops in use, outermost first; 0 = a token is one piece    */
    int32_t tiled;          /* FRACTAL_NZ: innermost pieces are 32-byte columns                 */
    int64_t n[3];           /* pieces per level                                                 */
    int64_t tok_step[3];    /* byte step per level on either side                               */
    int64_t page_step[3];
    int64_t bytes;          /* bytes of one piece                                               */
    int64_t token_bytes;    /* bytes of one token over all pieces                               */
    const char *tok_lo, *tok_hi, *page_lo, *page_hi; /* extents, for the debug build            */
} kv_lane;

static inline char *kv_tok(const kv_lane *lane, int64_t i)
{
    if (lane->tok_inner == 0)
        return lane->tok + i * lane->tok_stride;
    return lane->tok + (i / lane->tok_inner) * lane->tok_outer_stride
                     + (i % lane->tok_inner) * lane->tok_stride;
}

static inline char *kv_page(const kv_lane *lane, int64_t slot)
{
    if (lane->flat)
        return lane->page + slot * lane->row_stride;
    if (lane->shift >= 0)
        return lane->page + (slot >> lane->shift) * lane->block_stride
                          + (slot & (lane->block_size - 1)) * lane->row_stride;
    return lane->page + (slot / lane->block_size) * lane->block_stride
                      + (slot % lane->block_size) * lane->row_stride;
}

#ifdef KVCORE_DEBUG
static inline void kv_inside(const char *lo, const char *hi, const char *p, int64_t n, const char *what)
{
    if (n > 0 && (p < lo || p + n > hi)) {
        fprintf(stderr, "kvcore debug build: %s access of %lld bytes at %+lld outside [0, %lld)\n",
                what, (long long)n, (long long)(p - lo), (long long)(hi - lo));
        abort();
    }
}
#else
#define kv_inside(lo, hi, p, n, what) ((void)0)
#endif

/* The compiler turns the constant sizes into plain register moves. */
static inline void kv_copy(char *dst, const char *src, int64_t n)
{
    switch (n) {
    case 1: *dst = *src; return;
    case 2: memcpy(dst, src, 2); return;
    case 4: memcpy(dst, src, 4); return;
    case 8: memcpy(dst, src, 8); return;
    case 16: memcpy(dst, src, 16); return;
    case 32: memcpy(dst, src, 32); return;
    case 64: memcpy(dst, src, 64); return;
    default: memcpy(dst, src, (size_t)n);
    }
}

#endif
