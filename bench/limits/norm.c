/* SPDX-License-Identifier: Apache-2.0
 *
 * What bounds Norm writes at random slots: cc -O2 -o norm norm.c && ./norm
 *
 * 16,384 rows of 2 KiB (K and V) go to random rows of 65,536.  The last of the streaming functions
 * writes the same bytes one behind the other: no row's ends, no slots.  Rows by memcpy is what numpy
 * does, so its time over the streaming ones' is the most that can be gained on numpy.
 */
enum { SLOTS = 65536 };
#include "limits.h"

static char *row(int lane, long t) { return cache + OFF + ((long)lane * SLOTS + slots[t]) * ROW; }

static void rows_by_memcpy(void)
{
    for (int lane = 0; lane < 2; lane++)
        for (long t = 0; t < TOKENS; t++)
            memcpy(row(lane, t), token(lane, t), ROW);
}

static inline void write_row(int lane, long t)
{
    if (t + 2 < TOKENS) {
        ask(row(lane, t + 2));
        ask(row(lane, t + 2) + ROW - 1);
    }
    stream(row(lane, t), token(lane, t), ROW);
}

static void streaming(void)
{
    for (int lane = 0; lane < 2; lane++)
        for (long t = 0; t < TOKENS; t++)
            write_row(lane, t);
}

static void streaming_in_turn(void)
{
    for (long t = 0; t < TOKENS; t++)
        for (int lane = 0; lane < 2; lane++)
            write_row(lane, t);
}

static void streaming_on_lines(void)
{
    for (int lane = 0; lane < 2; lane++)
        for (long t = 0; t < TOKENS; t++)
            stream(row(lane, t) - OFF, token(lane, t), ROW);
}

static void streaming_in_sequence(void) { stream(cache + OFF, src + OFF, 2L * TOKENS * ROW); }

int main(void)
{
    const kv_way ways[] = {{"memcpy of the same bytes", copy},
                           {"rows by memcpy, as numpy does", rows_by_memcpy},
                           {"streaming, all of K, then all of V", streaming},
                           {"streaming, K and V in turn", streaming_in_turn},
                           {"streaming, rows on lines", streaming_on_lines},
                           {"streaming, one piece without slots", streaming_in_sequence}};
    return report(ways, sizeof ways / sizeof *ways);
}
