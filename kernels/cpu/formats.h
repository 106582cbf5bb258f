/* What each packed format of zjcpu.h holds, as fp32: one walk over k, in order, for every kernel that reads weights.
 *
 * A weight is w = fma(code, scale, minimum), rounded once, as the file's dequantisation rounds it: a code of 4 to 8 bits
 * times a half, times a small scale of 6 or 8 bits, has at most 23 bits and is exact. Where the codes count from -8 or
 * -16, the minimum is that times the scale, and the sum is exact too.
 */

#define GROUPS_MAX 6 /* arrays have constant sizes, so that they become registers */
#define AHEAD 4      /* blocks of 32 k that are prefetched: several short streams defeat the hardware here */

INLINE size_t group_bytes(const zj_matrix *w) {
    const zj_format *f = &zj_formats[w->format];
    return (size_t)(w->k / f->values) * (size_t)f->bytes;
}

INLINE int groups_of(const zj_matrix *w) { return (w->n + ZJ_LANES - 1) / ZJ_LANES; }

/* Where a walk's weights go: into the sums of M rows, or, with M = 0, to a tile [K][G * 16]. */
typedef struct {
    const float *x;
    int ldx;
    V (*acc)[GROUPS_MAX];
    float *tile;
} sink;

INLINE void give(const int M, const int G, const sink *to, size_t k, int g, V weight) {
    if (M == 0) v_store(to->tile + (k * G + g) * ZJ_LANES, weight);
    UNROLL for (int r = 0; r < M; r++)
        to->acc[r][g] = v_fma(v_set1(to->x[(size_t)r * to->ldx + k]), weight, to->acc[r][g]);
}

INLINE V plain(const int F, const uint8_t *w) {
    if (F == ZJ_F32) return v_load((const float *)w);
    return F == ZJ_F16 ? v_half((const uint16_t *)w) : v_bfloat((const uint16_t *)w);
}

/* Scale and minimum of a run of 32: `small` is where it begins, `head` where its K-quant block does. */
INLINE void scales(const int F, const uint8_t *head, const uint8_t *small, V *scale, V *minimum) {
    if (F == ZJ_Q4_K || F == ZJ_Q5_K) {
        *scale = v_mul(v_half((const uint16_t *)head), v_uint8(small));
        *minimum = v_mul(v_half((const uint16_t *)(head + 32)), v_uint8(small + ZJ_LANES));
        return;
    }
    *scale = v_half((const uint16_t *)small);
    if (F == ZJ_Q4_1 || F == ZJ_Q5_1) *minimum = v_half((const uint16_t *)(small + 32));
    if (F == ZJ_Q4_0) *minimum = v_mul(*scale, v_set1(-8.0f));
    if (F == ZJ_Q5_0) *minimum = v_mul(*scale, v_set1(-16.0f));
}

INLINE I word_at(const uint8_t *codes, int word) { return i_load((const uint32_t *)(codes + word * ZJ_LANES * 4)); }

/* The codes in the top bits of words, lowest first: k = 30 and k = 31 of code5, k = 15 of code6. */
INLINE I top5_first(I a, I b, I c) {
    return i_or(i_or(i_right(a, 30), i_left(i_right(b, 30), 2)), i_left(i_right(c, 30), 4)); /* bit 5 is not read */
}
INLINE I top5_second(I c, I d, I e) {
    return i_or(i_or(i_right(c, 31), i_left(i_right(d, 30), 1)), i_left(i_right(e, 30), 3));
}
INLINE I top6(I a, I b, I c) {
    return i_or(i_or(i_right(a, 30), i_left(i_right(b, 30), 2)), i_left(i_right(c, 30), 4));
}

/* The i-th of the codes in one word of each of G groups: with few registers, all of one group before the next, so that
 * one group's scale and word are alive at a time. The order of a sum is k's own either way. */
#define UNROLL_ALL _Pragma("GCC unroll 48")
#if FEW_REGISTERS
#define IN_WORD(i, codes, G) ((i) % (codes))
#define OF_GROUP(i, codes, G) ((i) / (codes))
#else
#define IN_WORD(i, codes, G) ((i) / (G))
#define OF_GROUP(i, codes, G) ((i) % (G))
#endif

/* A run of 32 with codes of 4 bits. */
INLINE void run4(const int M, const int G, const uint8_t *codes, size_t stride, size_t k, const V *scale,
                 const V *minimum, const sink *to) {
#pragma GCC unroll 1 /* all of them in a row are too much */
    for (int c = 0; c < 4; c++) {
        I word[GROUPS_MAX];
        UNROLL for (int g = 0; g < G; g++) word[g] = word_at(codes + g * stride, c);
        UNROLL_ALL for (int i = 0; i < 8 * G; i++) {
            const int j = IN_WORD(i, 8, G), g = OF_GROUP(i, 8, G);
            give(M, G, to, k + c * 8 + j, g, v_fma(v_code4(word[g], 4 * j), scale[g], minimum[g]));
        }
    }
}

/* Of 5 bits. */
INLINE void run5(const int M, const int G, const uint8_t *codes, size_t stride, size_t k, const V *scale,
                 const V *minimum, const sink *to) {
#pragma GCC unroll 1
    for (int c = 0; c < 5; c++) {
        I word[GROUPS_MAX];
        UNROLL for (int g = 0; g < G; g++) word[g] = word_at(codes + g * stride, c);
        UNROLL_ALL for (int i = 0; i < 6 * G; i++) {
            const int j = IN_WORD(i, 6, G), g = OF_GROUP(i, 6, G);
            give(M, G, to, k + c * 6 + j, g, v_fma(v_code5(word[g], 5 * j), scale[g], minimum[g]));
        }
    }
    for (int j = 0; j < 2; j++)
        UNROLL for (int g = 0; g < G; g++) {
            const uint8_t *words = codes + g * stride;
            I code = j == 0 ? top5_first(word_at(words, 0), word_at(words, 1), word_at(words, 2))
                            : top5_second(word_at(words, 2), word_at(words, 3), word_at(words, 4));
            give(M, G, to, k + 30 + j, g, v_fma(v_code5(code, 0), scale[g], minimum[g]));
        }
}

/* Of 6 bits: two runs of 16, each with a scale. */
INLINE void run6(const int M, const int G, const uint8_t *head, const uint8_t *small, size_t stride, size_t k,
                 const sink *to) {
    for (int h = 0; h < 2; h++, k += 16) {
        const uint8_t *codes = small + 2 * ZJ_LANES + h * 3 * ZJ_LANES * 4;
        V scale[GROUPS_MAX];
        UNROLL for (int g = 0; g < G; g++)
            scale[g] = v_mul(v_half((const uint16_t *)(head + g * stride)),
                             v_int8((const int8_t *)(small + g * stride + h * ZJ_LANES)));
#pragma GCC unroll 1
        for (int c = 0; c < 3; c++) {
            I word[GROUPS_MAX];
            UNROLL for (int g = 0; g < G; g++) word[g] = word_at(codes + g * stride, c);
            UNROLL_ALL for (int i = 0; i < 5 * G; i++) {
                const int j = IN_WORD(i, 5, G), g = OF_GROUP(i, 5, G);
                give(M, G, to, k + c * 5 + j, g, v_mul(v_code6(word[g], 6 * j), scale[g]));
            }
        }
        UNROLL for (int g = 0; g < G; g++) {
            const uint8_t *words = codes + g * stride;
            I code = top6(word_at(words, 0), word_at(words, 1), word_at(words, 2));
            give(M, G, to, k + 15, g, v_mul(v_code6(code, 0), scale[g]));
        }
    }
}

INLINE void run8(const int M, const int G, const uint8_t *codes, size_t stride, size_t k, const V *scale,
                 const sink *to) {
#pragma GCC unroll 4
    for (int j = 0; j < 32; j++)
        UNROLL for (int g = 0; g < G; g++)
            give(M, G, to, k + j, g, v_mul(v_int8((const int8_t *)(codes + g * stride + j * ZJ_LANES)), scale[g]));
}

/* All weights of G groups from `w` on, k in order, to the sink. F, M and G are constants after inlining. */
INLINE void walk(const int F, const int M, const int G, const uint8_t *w, size_t stride, int K, const sink *to) {
    const int bits = zj_formats[F].bits, small = zj_formats[F].small, head_bytes = zj_formats[F].head;
    const int runs = zj_formats[F].values / 32, run_bytes = runs ? (zj_formats[F].bytes - head_bytes) / runs : 0;
    if (bits == 0) {
        for (int k = 0; k < K; k++, w += zj_formats[F].bytes)
            UNROLL for (int g = 0; g < G; g++) give(M, G, to, k, g, plain(F, w + g * stride));
        return;
    }
    const uint8_t *head = w;
    for (int k = 0; k < K; k += 32, w += run_bytes) {
        if (runs > 1 && k % 256 == 0) head = w, w += head_bytes;
        V scale[GROUPS_MAX], minimum[GROUPS_MAX];
        UNROLL for (int g = 0; g < G; g++) {
            if (bits != 6) scales(F, head + g * stride, w + g * stride, &scale[g], &minimum[g]);
            for (int line = 0; M && line < run_bytes; line += 64)
                __builtin_prefetch(w + g * stride + AHEAD * run_bytes + line);
        }
        if (bits == 4) run4(M, G, w + small, stride, (size_t)k, scale, minimum, to);
        if (bits == 5) run5(M, G, w + small, stride, (size_t)k, scale, minimum, to);
        if (bits == 6) run6(M, G, head, w, stride, (size_t)k, to);
        if (bits == 8) run8(M, G, w + small, stride, (size_t)k, scale, to);
    }
}

#define EACH_FORMAT(DO)                                                                               \
    DO(ZJ_F32) DO(ZJ_F16) DO(ZJ_BF16) DO(ZJ_Q4_0) DO(ZJ_Q4_1) DO(ZJ_Q5_0) DO(ZJ_Q5_1) DO(ZJ_Q8_0) \
    DO(ZJ_Q4_K) DO(ZJ_Q5_K) DO(ZJ_Q6_K)

/* G groups of a matrix of any format into a tile [K][G * 16]. */
INLINE void expand(const int G, const zj_matrix *w, int group, float *tile) {
    const size_t stride = group_bytes(w);
    const uint8_t *data = (const uint8_t *)w->data + (size_t)group * stride;
    const sink to = {.tile = tile};
    switch (w->format) {
#define CASE(F)                                   \
    case F:                                       \
        walk(F, 0, G, data, stride, w->k, &to);   \
        break;
        EACH_FORMAT(CASE)
#undef CASE
    }
}

/* One row of the matrix: its group is expanded a block at a time and the row's lane taken. */
static void unpack(const zj_matrix *w, int row, float *out) {
    float tile[256 * ZJ_LANES];
    const zj_format *f = &zj_formats[w->format];
    const int step = f->values == 1 ? 32 : f->values;
    const size_t step_bytes = (size_t)(step / f->values) * (size_t)f->bytes;
    zj_matrix part = {.format = w->format, .n = ZJ_LANES};
    part.data = (const uint8_t *)w->data + (size_t)(row / ZJ_LANES) * group_bytes(w);
    for (int k = 0; k < w->k; k += step, part.data = (const uint8_t *)part.data + step_bytes) {
        part.k = w->k - k < step ? w->k - k : step;
        expand(1, &part, 0, tile);
        for (int j = 0; j < part.k; j++) out[k + j] = tile[j * ZJ_LANES + row % ZJ_LANES];
    }
}
