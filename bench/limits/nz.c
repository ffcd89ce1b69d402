/* SPDX-License-Identifier: Apache-2.0
 *
 * What bounds FRACTAL_NZ writes at random slots: cc -O2 -o nz nz.c && ./nz
 *
 * 16,384 tokens of 64 cells of 32 bytes (K and V) go to half of 32,768 slots.  In each column the cells
 * of neighbouring slots lie side by side; 16 bytes after a line, a line holds one cell and half of two
 * others.  With half of the slots written at random, seven of eight lines are touched and one of eight
 * is written whole: the others must be read and written back.  The last function touches as many
 * lines in ascending order, with neither slots nor columns to follow.
 */
enum { SLOTS = 32768 };
#include "limits.h"

enum { BLOCK = 128, CELL = 32, COLUMNS = ROW / CELL };
enum { WINDOW = 32, COLUMN = BLOCK * CELL };

static int32_t order[TOKENS];

static char *place(int lane, int64_t slot)
{
    return cache + OFF + ((long)lane * SLOTS + slot / BLOCK * BLOCK) * ROW + slot % BLOCK * CELL;
}

static void by_token(void)
{
    for (int lane = 0; lane < 2; lane++)
        for (long t = 0; t < TOKENS; t++)
            for (long c = 0; c < COLUMNS; c++)
                memcpy(place(lane, slots[t]) + c * COLUMN, token(lane, t) + c * CELL, CELL);
}

/* Tokens by slot, some at a time, column by column, lines asked for two columns ahead. */
static void by_slot(void)
{
    order_by_slot(order);
    for (int lane = 0; lane < 2; lane++)
        for (long p = 0; p < TOKENS; p += WINDOW) {
            char *to[WINDOW];
            const char *from[WINDOW];
            for (long t = 0; t < WINDOW; t++) {
                to[t] = place(lane, slots[order[p + t]]);
                from[t] = token(lane, order[p + t]);
                if (p + WINDOW < TOKENS)
                    for (long line = 0; line < ROW; line += 64)
                        __builtin_prefetch(token(lane, order[p + WINDOW + t]) + line, 0, 3);
            }
            for (long c = 0; c < COLUMNS; c++)
                for (long t = 0; t < WINDOW; t++) {
                    if (c + 2 < COLUMNS)
                        ask(to[t] + (c + 2) * COLUMN);
                    memcpy(to[t] + c * COLUMN, from[t] + c * CELL, CELL);
                }
        }
}

static void in_sequence(void)
{
    const char *from = src + OFF;
    char *to = cache + OFF;
    for (long group = 0; group < 2L * SLOTS * ROW / 512; group++, from += 256, to += 512)
        for (int line = 0; line < 7; line++)
            memcpy(to + 64 * line, from + CELL * line, CELL);
}

int main(void)
{
    const kv_way ways[] = {{"memcpy of the same bytes", copy},
                           {"token by token", by_token},
                           {"by slot, column by column", by_slot},
                           {"as many lines in ascending order, without slots", in_sequence}};
    return report(ways, sizeof ways / sizeof *ways);
}
