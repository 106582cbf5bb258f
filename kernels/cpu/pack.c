/* GGUF blocks into the packed layouts of zjcpu.h, once at load, values unchanged. Source: ggml's block structures. */
#include "zjcpu.h"

#include <string.h>

#define SUPER 256

static uint16_t u16_at(const uint8_t *p) {
    uint16_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

static uint32_t u32_at(const uint8_t *p) {
    uint32_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

/* Sets bits of one output's words: [word][16], zero before. */
static void or_bits(uint8_t *words, int word, int lane, int shift, uint32_t bits) {
    uint8_t *at = words + ((size_t)word * ZJ_LANES + lane) * 4;
    uint32_t value = u32_at(at) | bits << shift;
    memcpy(at, &value, sizeof value);
}

static void put_code4(uint8_t *words, int lane, const uint8_t *q) {
    for (int j = 0; j < 32; j++) or_bits(words, j / 8, lane, 4 * (j % 8), q[j]);
}

static void put_code5(uint8_t *words, int lane, const uint8_t *q) {
    for (int j = 0; j < 30; j++) or_bits(words, j / 6, lane, 5 * (j % 6), q[j]);
    unsigned last = q[30] | (unsigned)q[31] << 5;
    for (int word = 0; word < 5; word++) or_bits(words, word, lane, 30, last >> 2 * word & 3);
}

static void put_code6(uint8_t *words, int lane, const uint8_t *q) { /* 16 of them */
    for (int j = 0; j < 15; j++) or_bits(words, j / 5, lane, 6 * (j % 5), q[j]);
    for (int word = 0; word < 3; word++) or_bits(words, word, lane, 30, q[15] >> 2 * word & 3u);
}

/* Byte j holds k = j (low nibble) and k = j + 16 (high); `high`: bit k is the fifth bit of k. */
static void nibbles(const uint8_t *from, uint32_t high, uint8_t *q) {
    for (int j = 0; j < 16; j++) {
        q[j] = (uint8_t)((from[j] & 15) | (high >> j & 1) << 4);
        q[j + 16] = (uint8_t)(from[j] >> 4 | (high >> (j + 16) & 1) << 4);
    }
}

/* Q4_0, Q4_1: { half scale; [half minimum;] 16 bytes }. Q5_0, Q5_1: uint32 of fifth bits before the bytes. */
static void pack_small(int format, const uint8_t *from, int lane, uint8_t *to) {
    const zj_format *f = &zj_formats[format];
    uint8_t q[32];
    uint32_t high = 0;
    memcpy(to + 2 * lane, from, 2);
    if (f->small == 64) memcpy(to + 32 + 2 * lane, from + 2, 2);
    from += f->small / 16;
    if (f->bits == 5) high = u32_at(from), from += 4;
    nibbles(from, high, q);
    (f->bits == 5 ? put_code5 : put_code4)(to + f->small, lane, q);
}

/* The 6-bit scale and minimum of run s of a K-quant: 8 of each in 12 bytes. */
static void small_scales(const uint8_t *from, int s, uint8_t *scale, uint8_t *minimum) {
    *scale = (uint8_t)(s < 4 ? from[s] & 63 : (from[s + 4] & 15) | from[s - 4] >> 6 << 4);
    *minimum = (uint8_t)(s < 4 ? from[s + 4] & 63 : from[s + 4] >> 4 | from[s] >> 6 << 4);
}

/* Q4_K: { half scale, half minimum, 12 bytes of small scales, 128 nibbles in pairs of runs }; Q5_K: 32 bytes of fifth
 * bits before the nibbles, bit s of byte l for run s. The minimum is subtracted there and added here. */
static void pack_k45(int format, const uint8_t *from, int lane, uint8_t *to) {
    const zj_format *f = &zj_formats[format];
    const uint8_t *high = from + 16, *low = high + (f->bits == 5 ? 32 : 0);
    uint16_t negated = u16_at(from + 2) ^ 0x8000;
    memcpy(to + 2 * lane, from, 2);
    memcpy(to + 32 + 2 * lane, &negated, 2);
    to += f->head;
    for (int s = 0; s < 8; s++, to += (f->bytes - f->head) / 8) {
        uint8_t q[32];
        small_scales(from + 4, s, to + lane, to + ZJ_LANES + lane);
        for (int j = 0; j < 32; j++) {
            q[j] = low[s / 2 * 32 + j] >> 4 * (s % 2) & 15;
            if (f->bits == 5) q[j] |= (uint8_t)((high[j] >> s & 1) << 4);
        }
        (f->bits == 5 ? put_code5 : put_code4)(to + f->small, lane, q);
    }
}

/* Q6_K: { 128 bytes of low nibbles, 64 of high pairs, int8 scale[16], half scale }; codes count from -32. */
static void pack_k6(const uint8_t *from, int lane, uint8_t *to) {
    const uint8_t *high = from + 128;
    const zj_format *f = &zj_formats[ZJ_Q6_K];
    memcpy(to + 2 * lane, from + 208, 2);
    to += f->head;
    for (int s = 0; s < 8; s++, to += (f->bytes - f->head) / 8) { /* run s: quarter s % 4 of half s / 4 */
        uint8_t q[32];
        for (int j = 0; j < 32; j++) {
            unsigned low = from[s / 4 * 64 + s % 2 * 32 + j] >> (s % 4 / 2 * 4) & 15u;
            unsigned pair = high[s / 4 * 32 + j] >> (s % 4 * 2) & 3u;
            q[j] = (uint8_t)(((low | pair << 4) - 32) & 63);
        }
        for (int h = 0; h < 2; h++) {
            to[h * ZJ_LANES + lane] = from[192 + 2 * s + h];
            put_code6(to + f->small + h * 3 * ZJ_LANES * 4, lane, q + 16 * h);
        }
    }
}

/* Rows `first` to `end` of a matrix [.., k]. Rows of one group of 16 must be packed by one thread. */
void zj_pack_rows(int format, const uint8_t *rows, int first, int end, int k, uint8_t *packed) {
    const zj_format *f = &zj_formats[format];
    const int blocks = k / f->values, size = f->file_bytes;
    for (int row = first; row < end; row++) {
        const uint8_t *from = rows + (size_t)row * blocks * size;
        uint8_t *to = packed + (size_t)(row / ZJ_LANES) * blocks * f->bytes;
        int lane = row % ZJ_LANES;
        for (int b = 0; b < blocks; b++, from += size, to += f->bytes) {
            if (f->bits == 0) {
                memcpy(to + size * lane, from, (size_t)size);
            } else if (format == ZJ_Q8_0) {
                memcpy(to + 2 * lane, from, 2);
                for (int j = 0; j < 32; j++) to[f->small + j * ZJ_LANES + lane] = from[2 + j];
            } else if (format == ZJ_Q6_K) {
                pack_k6(from, lane, to);
            } else if (f->values == SUPER) {
                pack_k45(format, from, lane, to);
            } else {
                pack_small(format, from, lane, to);
            }
        }
    }
}
