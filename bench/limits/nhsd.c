/* SPDX-License-Identifier: Apache-2.0
 *
 * What bounds NHSD writes at random slots: cc -O2 -o nhsd nhsd.c && ./nhsd
 *
 * 16,384 tokens of 8 pieces of 256 bytes (K and V) go to random slots of 32,768.  A piece that begins
 * on a line is four whole lines, which streaming stores write without reading them first.  A piece that
 * begins 16 bytes after a line, as in every large numpy array, borrows part of a line at either end;
 * those must be read and written back, and no other store avoids it without touching the neighbours'
 * bytes.  Tokens by slot share the borrowed lines of neighbours.  The last function writes and
 * borrows as many lines as that, but in ascending order, with neither slots nor an order to follow.
 */
enum { SLOTS = 32768 };
#include "limits.h"

enum { BLOCK = 128, HEADS = 8, PIECE = ROW / HEADS };

static int32_t order[TOKENS];

static char *place(int lane, int64_t slot)
{
    return cache + OFF + ((long)lane * SLOTS + slot / BLOCK * BLOCK) * ROW + slot % BLOCK * PIECE;
}

static void ordinary_stores(void)
{
    for (int lane = 0; lane < 2; lane++)
        for (long t = 0; t < TOKENS; t++)
            for (long h = 0; h < HEADS; h++)
                memcpy(place(lane, slots[t]) + h * BLOCK * PIECE, token(lane, t) + h * PIECE, PIECE);
}

static void on_lines(void)
{
    for (int lane = 0; lane < 2; lane++)
        for (long t = 0; t < TOKENS; t++)
            for (long h = 0; h < HEADS; h++)
                stream(place(lane, slots[t]) - OFF + h * BLOCK * PIECE, token(lane, t) + h * PIECE, PIECE);
}

static inline void by_token(int asking)
{
    for (int lane = 0; lane < 2; lane++)
        for (long t = 0; t < TOKENS; t++) {
            char *later = place(lane, slots[t + 1 < TOKENS ? t + 1 : t]);
            for (long h = 0; h < HEADS; h++) {
                if (asking) {
                    ask(later + h * BLOCK * PIECE);
                    ask(later + h * BLOCK * PIECE + PIECE - 1);
                }
                stream(place(lane, slots[t]) + h * BLOCK * PIECE, token(lane, t) + h * PIECE, PIECE);
            }
        }
}
static void off_lines(void) { by_token(0); }
static void off_lines_asked(void) { by_token(1); }

/* A run of n neighbours is one piece for each head; the lines within it are whole. */
AVX512 static void write_run(int lane, const int32_t *run, long n, const int32_t *later)
{
    for (long h = 0; h < HEADS; h++) {
        char *to = place(lane, slots[run[0]]) + h * BLOCK * PIECE;
        const char *from = token(lane, run[0]) + h * PIECE;
        long head = 64 - OFF;
        if (later) {
            char *next = place(lane, slots[*later]) + h * BLOCK * PIECE;
            ask(next);
            ask(next + PIECE - 1);
            for (int line = 0; line < PIECE; line += 64)
                __builtin_prefetch(token(lane, *later) + h * PIECE + line, 0, 3);
        }
        part(to, from, head);
        for (long t = 0; t < n; t++, to += PIECE) {
            long i = t ? OFF * 3 : head;
            for (; i + 64 <= PIECE; i += 64)
                _mm512_stream_si512((__m512i *)(to + i), _mm512_loadu_si512(from + i));
            if (t + 1 == n) {
                part(to + i, from + i, PIECE - i);
            } else { /* the line that two neighbours share */
                const char *next = token(lane, run[t + 1]) + h * PIECE;
                __mmask64 first = ((uint64_t)1 << OFF) - 1;
                __m512i line = _mm512_maskz_loadu_epi8(first, from + i);
                line = _mm512_mask_loadu_epi8(line, ~first, next - OFF);
                _mm512_stream_si512((__m512i *)(to + i), line);
                from = next;
            }
        }
    }
}

static void by_slot(void)
{
    order_by_slot(order);
    for (int lane = 0; lane < 2; lane++)
        for (long p = 0, q; p < TOKENS; p = q) {
            for (q = p + 1; q < TOKENS && slots[order[q]] == slots[order[q - 1]] + 1
                            && slots[order[q]] % BLOCK; q++)
                ;
            write_run(lane, order + p, q - p, q < TOKENS ? order + q : NULL);
        }
}

/* Half of the slots are written, so a run is two pieces long on average: seven whole lines, two parts. */
AVX512 static void in_sequence(void)
{
    const char *from = src + OFF;
    char *to = cache;
    for (long pair = 0; pair < (long)TOKENS * HEADS; pair++, from += 2 * PIECE, to += 4 * PIECE) {
        part(to + OFF, from, 64 - OFF);
        for (int i = 64; i < 2 * PIECE; i += 64)
            _mm512_stream_si512((__m512i *)(to + i), _mm512_loadu_si512(from + i - OFF));
        part(to + 2 * PIECE, from + 2 * PIECE - OFF, OFF);
    }
}

int main(void)
{
    const kv_way ways[] = {{"memcpy of the same bytes", copy},
                           {"ordinary stores", ordinary_stores},
                           {"streaming, pieces on lines", on_lines},
                           {"streaming, pieces off lines", off_lines},
                           {"the same, borrowed lines asked for", off_lines_asked},
                           {"the same by slot, shared lines written whole", by_slot},
                           {"as many lines in ascending order, without slots", in_sequence}};
    return report(ways, sizeof ways / sizeof *ways);
}
