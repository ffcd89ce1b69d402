/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs every instruction set this CPU has against plain byte loops: streams of all short lengths and
 * alignments, joined rows, runs and scattered cells of FRACTAL_NZ, and the order by slot.  Prints the sets that
 * were checked; the first wrong byte ends it.
 */
#include <stdio.h>
#include <stdlib.h>

#include "isa.h"

static unsigned state = 12345;
static unsigned next(void) { return (state = state * 1103515245u + 12345u) >> 8; }

static void fail(const char *what, const char *set, long a, long b)
{
    fprintf(stderr, "%s of %s: wrong bytes (%ld, %ld)\n", what, set, a, b);
    exit(1);
}

static void check_stream(const kv_isa *isa)
{
    enum { SIZE = 1024 };
    _Alignas(64) static char dst[SIZE], want[SIZE], src[SIZE], kept[SIZE];
    for (int at = 0; at < 64; at += 1) {
        for (int n = 0; n <= 400; n += 1 + at % 3) {
            for (int i = 0; i < SIZE; i++) {
                src[i] = (char)next();
                kept[i] = want[i] = (char)next();
            }
            for (int i = 0; i < n; i++)
                want[at + i] = src[(at * 7) % 64 + i];
            void (*const copies[])(char *, const char *, int64_t) = {isa->stream, isa->row, isa->copy};
            for (int k = 0; k < 3; k++) {
                memcpy(dst, kept, SIZE);
                copies[k](dst + at, src + (at * 7) % 64, n);
                isa->fence();
                if (memcmp(dst, want, SIZE))
                    fail(k == 0 ? "stream" : k == 1 ? "row" : "copy", isa->name, at, n);
            }
        }
    }
}

static void check_join(const kv_isa *isa)
{
    enum { TOKENS = 5, MOST = 400 };
    static char src[TOKENS * MOST + 64];
    _Alignas(64) static char dst[TOKENS * MOST + 128], want[TOKENS * MOST + 128];
    for (int at = 0; at < 64; at += at < 4 ? 1 : 5) {
        for (int bytes = 64; bytes <= MOST; bytes += 1 + bytes % 7) {
            int n = 1 + (at + bytes) % TOKENS;
            const char *toks[TOKENS];
            for (unsigned i = 0; i < sizeof src; i++)
                src[i] = (char)next();
            for (unsigned i = 0; i < sizeof dst; i++)
                dst[i] = want[i] = (char)next();
            for (int t = 0; t < n; t++) {
                toks[t] = src + (t * 3 % TOKENS) * MOST;
                memcpy(want + at + t * bytes, toks[t] + 9, (size_t)bytes);
            }
            isa->join(dst + at, toks, 9, n, bytes);
            isa->fence();
            if (memcmp(dst, want, sizeof dst))
                fail("join", isa->name, at, bytes);
        }
    }
}

static void check_run(const kv_isa *isa)
{
    enum { TOKENS = 70, COLUMNS = 5, STRIDE = COLUMNS * KV_CELL + 24, MOST = 80 * KV_CELL };
    static char src[TOKENS * STRIDE + 64];
    _Alignas(64) static char dst[COLUMNS * MOST + 256], want[COLUMNS * MOST + 256];
    static const int less[5] = {0, KV_CELL / 2, KV_CELL, 8, 1};
    const char *toks[TOKENS];
    char *pages[TOKENS];
    for (int at = 0; at < 64; at += at < 4 ? 1 : 4) {
        for (int n = 1; n <= TOKENS; n += 3) {
            int columns = 1 + (n + at) % (COLUMNS - 1), step = MOST - less[(n + at) / 4 % 5];
            for (unsigned i = 0; i < sizeof src; i++)
                src[i] = (char)next();
            for (unsigned i = 0; i < sizeof dst; i++)
                dst[i] = want[i] = (char)next();
            for (int t = 0; t < n; t++) {
                toks[t] = src + (t * 37 % TOKENS) * STRIDE;
                pages[t] = dst + at + t * KV_CELL;
            }
            for (int c = 0; c < columns; c++)
                for (int t = 0; t < n; t++)
                    memcpy(want + at + c * step + t * KV_CELL, toks[t] + 8 + c * KV_CELL, KV_CELL);
            if (n & 2)
                isa->run(dst + at, step, toks, 8, n, columns);
            else if (n & 4)
                kv_cells(pages, 0, step, toks, 8, n, columns);
            else
                isa->cells(pages, 0, step, toks, toks, 8, n, n & 8 ? n : 0, columns);
            isa->fence();
            if (memcmp(dst, want, sizeof dst))
                fail(n & 2 ? "run" : "cells", isa->name, at, n);
        }
    }
}

static void check_order(void)
{
    enum { N = 3000 };
    static int64_t slots[N];
    static int32_t order[N], spare[N];
    for (int64_t bound = 1; bound < (int64_t)1 << 40; bound = bound * 37 + 1) {
        for (int i = 0; i < N; i++)
            slots[i] = next() % 5 == 0 ? -1 : (int64_t)((((uint64_t)next() << 24) + next()) % (uint64_t)bound);
        int64_t used = kv_order_by_slot(slots, N, bound, order, spare), seen = 0;
        for (int i = 0; i < N; i++)
            seen += slots[i] >= 0;
        if (used != seen)
            fail("order", "count", used, seen);
        for (int64_t i = 1; i < used; i++) {
            int64_t a = slots[order[i - 1]], b = slots[order[i]];
            if (a > b || (a == b && order[i - 1] >= order[i]))
                fail("order", "place", i, b);
        }
    }
}

int main(void)
{
    check_order();
    for (int i = 0; i < KV_N_ISAS; i++) {
        if (!kv_isa_runs(i))
            continue;
        check_stream(&kv_isas[i]);
        check_join(&kv_isas[i]);
        check_run(&kv_isas[i]);
        printf("%s\n", kv_isas[i].name);
    }
    return 0;
}
