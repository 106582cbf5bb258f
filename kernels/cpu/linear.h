/* y[M,N] = x[M,K] W[N,K]^T for one instruction set.
 *
 * For each output: acc = 0; for k in order: acc = fma(x[k], w[k], acc), with w = fma(q, scale, minimum) exactly as the
 * file's dequantisation rounds it (the product of a 4- or 8-bit integer and a half is exact in fp32). Up to
 * DIRECT_ROWS rows are multiplied straight from the packed weights (bytes moved: the weights once). More rows
 * expand a tile of MICRO_GROUPS x 16 outputs once and run a register-blocked kernel over it; same sums, same bits.
 */

#define GROUPS_MAX 6 /* arrays have constant sizes, so that they become registers */
#define AHEAD 4      /* blocks of 32 k that are prefetched: several short streams defeat the hardware here */

INLINE size_t group_bytes(const zj_matrix *w) {
    size_t k = (size_t)w->k;
    return w->format == ZJ_F32 ? k * ZJ_LANES * 4 : k / 32 * (w->format == ZJ_Q4 ? ZJ_Q4_BYTES : ZJ_Q8_BYTES);
}

INLINE int groups_of(const zj_matrix *w) { return (w->n + ZJ_LANES - 1) / ZJ_LANES; }

INLINE void put(float *y, V acc, int lanes, int add) {
    float spare[ZJ_LANES];
    if (lanes >= ZJ_LANES) {
        v_store(y, add ? v_add(v_load(y), acc) : acc);
        return;
    }
    v_store(spare, acc);
    for (int i = 0; i < lanes; i++) y[i] = add ? y[i] + spare[i] : spare[i];
}

/* --- straight from the packed weights: M rows, G groups, both constant after inlining --- */

INLINE void direct_f32(const int M, const int G, const float *w, size_t stride, int K, const float *x, int ldx,
                       V (*acc)[GROUPS_MAX]) {
    for (int k = 0; k < K; k++)
#pragma GCC unroll 8
        for (int g = 0; g < G; g++) {
            V weight = v_load(w + g * stride + (size_t)k * ZJ_LANES);
#pragma GCC unroll 8
            for (int r = 0; r < M; r++) acc[r][g] = v_fma(v_set1(x[(size_t)r * ldx + k]), weight, acc[r][g]);
        }
}

INLINE void direct_q4(const int M, const int G, const uint8_t *w, size_t stride, int K, const float *x, int ldx,
                      V (*acc)[GROUPS_MAX]) {
    for (int k = 0; k < K; k += 32, w += ZJ_Q4_BYTES) {
        V scale[GROUPS_MAX], minimum[GROUPS_MAX];
#pragma GCC unroll 8
        for (int g = 0; g < G; g++) {
            scale[g] = v_half((const uint16_t *)(w + g * stride));
            minimum[g] = v_half((const uint16_t *)(w + g * stride + 32));
            for (int line = 0; line < ZJ_Q4_BYTES; line += 64)
                __builtin_prefetch(w + g * stride + AHEAD * ZJ_Q4_BYTES + line);
        }
        for (int c = 0; c < 4; c++) {
            I word[GROUPS_MAX];
#pragma GCC unroll 8
            for (int g = 0; g < G; g++) word[g] = i_load((const uint32_t *)(w + g * stride + 64 + c * 64));
            const float *xc = x + k + c * 8;
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++)
#pragma GCC unroll 8
                for (int g = 0; g < G; g++) {
                    V weight = v_fma(v_nibble(word[g], 4 * j), scale[g], minimum[g]);
#pragma GCC unroll 8
                    for (int r = 0; r < M; r++) acc[r][g] = v_fma(v_set1(xc[(size_t)r * ldx + j]), weight, acc[r][g]);
                }
        }
    }
}

INLINE void direct_q8(const int M, const int G, const uint8_t *w, size_t stride, int K, const float *x, int ldx,
                      V (*acc)[GROUPS_MAX]) {
    for (int k = 0; k < K; k += 32, w += ZJ_Q8_BYTES) {
        V scale[GROUPS_MAX];
#pragma GCC unroll 8
        for (int g = 0; g < G; g++) {
            scale[g] = v_half((const uint16_t *)(w + g * stride));
            for (int line = 0; line < ZJ_Q8_BYTES; line += 64)
                __builtin_prefetch(w + g * stride + AHEAD * ZJ_Q8_BYTES + line);
        }
#pragma GCC unroll 4
        for (int j = 0; j < 32; j++)
#pragma GCC unroll 8
            for (int g = 0; g < G; g++) {
                V weight = v_mul(v_int8((const int8_t *)(w + g * stride + 32 + j * ZJ_LANES)), scale[g]);
#pragma GCC unroll 8
                for (int r = 0; r < M; r++) acc[r][g] = v_fma(v_set1(x[(size_t)r * ldx + k + j]), weight, acc[r][g]);
            }
    }
}

INLINE void direct(const int M, const int G, const zj_matrix *w, int group, const float *x, int ldx, float *y,
                   int ldy, int add) {
    V acc[DIRECT_ROWS][GROUPS_MAX];
    size_t stride = group_bytes(w);
    const uint8_t *data = (const uint8_t *)w->data + group * stride;
#pragma GCC unroll 8
    for (int r = 0; r < M; r++)
#pragma GCC unroll 8
        for (int g = 0; g < G; g++) acc[r][g] = v_zero();
    if (w->format == ZJ_Q4)
        direct_q4(M, G, data, stride, w->k, x, ldx, acc);
    else if (w->format == ZJ_Q8)
        direct_q8(M, G, data, stride, w->k, x, ldx, acc);
    else
        direct_f32(M, G, (const float *)data, stride / 4, w->k, x, ldx, acc);
#pragma GCC unroll 8
    for (int r = 0; r < M; r++)
#pragma GCC unroll 8
        for (int g = 0; g < G; g++) {
            int n = (group + g) * ZJ_LANES;
            put(y + (size_t)r * ldy + n, acc[r][g], w->n - n, add);
        }
}

#define DIRECT(M)                                                                                             \
    static void direct_##M(const zj_matrix *w, int group, int groups, const float *x, int ldx, float *y, int ldy, \
                           int add) { \
        for (; groups >= DIRECT_GROUPS(M); groups -= DIRECT_GROUPS(M), group += DIRECT_GROUPS(M))             \
            direct(M, DIRECT_GROUPS(M), w, group, x, ldx, y, ldy, add);                                       \
        for (; groups > 0; groups--, group++) direct(M, 1, w, group, x, ldx, y, ldy, add);                    \
    }
DIRECT(1)
DIRECT(2)
DIRECT(3)
DIRECT(4)
#if DIRECT_ROWS == 8
DIRECT(5)
DIRECT(6)
DIRECT(7)
DIRECT(8)
#endif

typedef void (*direct_rows)(const zj_matrix *w, int group, int groups, const float *x, int ldx, float *y, int ldy,
                            int add);
static const direct_rows direct_by_rows[DIRECT_ROWS] = {
    direct_1, direct_2, direct_3, direct_4,
#if DIRECT_ROWS == 8
    direct_5, direct_6, direct_7, direct_8,
#endif
};

/* --- through an expanded tile [K][G * 16] --- */

INLINE void expand(const int G, const zj_matrix *w, int group, float *tile) {
    size_t stride = group_bytes(w);
    for (int g = 0; g < G; g++) {
        const uint8_t *data = (const uint8_t *)w->data + (group + g) * stride;
        float *out = tile + g * ZJ_LANES;
        if (w->format == ZJ_F32) {
            for (int k = 0; k < w->k; k++, out += G * ZJ_LANES)
                v_store(out, v_load((const float *)data + (size_t)k * ZJ_LANES));
            continue;
        }
        for (int k = 0; k < w->k; k += 32) {
            V scale = v_half((const uint16_t *)data);
            if (w->format == ZJ_Q8) {
                for (int j = 0; j < 32; j++, out += G * ZJ_LANES)
                    v_store(out, v_mul(v_int8((const int8_t *)(data + 32 + j * ZJ_LANES)), scale));
                data += ZJ_Q8_BYTES;
                continue;
            }
            V minimum = v_half((const uint16_t *)(data + 32));
            for (int c = 0; c < 4; c++) {
                I word = i_load((const uint32_t *)(data + 64 + c * 64));
#pragma GCC unroll 8
                for (int j = 0; j < 8; j++, out += G * ZJ_LANES)
                    v_store(out, v_fma(v_nibble(word, 4 * j), scale, minimum));
            }
            data += ZJ_Q4_BYTES;
        }
    }
}

INLINE void micro(const int M, const int G, const float *tile, int K, const float *x, int ldx, float *y, int ldy,
                  int lanes, int add) {
    V acc[MICRO_ROWS][MICRO_GROUPS];
#pragma GCC unroll 8
    for (int r = 0; r < M; r++)
#pragma GCC unroll 8
        for (int g = 0; g < G; g++) acc[r][g] = v_zero();
    for (int k = 0; k < K; k++, tile += G * ZJ_LANES) {
        V weight[MICRO_GROUPS];
#pragma GCC unroll 8
        for (int g = 0; g < G; g++) weight[g] = v_load(tile + g * ZJ_LANES);
#pragma GCC unroll 8
        for (int r = 0; r < M; r++) {
            V value = v_set1(x[(size_t)r * ldx + k]);
#pragma GCC unroll 8
            for (int g = 0; g < G; g++) acc[r][g] = v_fma(value, weight[g], acc[r][g]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < M; r++)
#pragma GCC unroll 8
        for (int g = 0; g < G; g++) put(y + (size_t)r * ldy + g * ZJ_LANES, acc[r][g], lanes - g * ZJ_LANES, add);
}

INLINE void rows_of_tile(const int G, const float *tile, int K, const float *x, int ldx, int rows, float *y, int ldy,
                         int lanes, int add) {
    for (; rows >= MICRO_ROWS; rows -= MICRO_ROWS, x += (size_t)MICRO_ROWS * ldx, y += (size_t)MICRO_ROWS * ldy)
        micro(MICRO_ROWS, G, tile, K, x, ldx, y, ldy, lanes, add);
    for (; rows >= 4; rows -= 4, x += (size_t)4 * ldx, y += (size_t)4 * ldy)
        micro(4, G, tile, K, x, ldx, y, ldy, lanes, add);
    for (; rows > 0; rows--, x += ldx, y += ldy) micro(1, G, tile, K, x, ldx, y, ldy, lanes, add);
}

static void tile_full(const zj_matrix *w, int group, const float *x, int ldx, int rows, float *y, int ldy, int add,
                      float *tile) {
    expand(MICRO_GROUPS, w, group, tile);
    rows_of_tile(MICRO_GROUPS, tile, w->k, x, ldx, rows, y, ldy, w->n - group * ZJ_LANES, add);
}

static void tile_single(const zj_matrix *w, int group, const float *x, int ldx, int rows, float *y, int ldy, int add,
                        float *tile) {
    expand(1, w, group, tile);
    rows_of_tile(1, tile, w->k, x, ldx, rows, y, ldy, w->n - group * ZJ_LANES, add);
}

/* --- the region: tasks are (tile of outputs, chunk of rows) --- */

static void linear_plan(zj_linear_job *job, int threads) {
    job->tile_groups = job->rows <= DIRECT_ROWS ? DIRECT_GROUPS(job->rows) : MICRO_GROUPS;
    int tiles = 0;
    for (int p = 0; p < job->parts; p++) {
        job->tiles[p] = (groups_of(job->matrix[p]) + job->tile_groups - 1) / job->tile_groups;
        tiles += job->tiles[p];
    }
    /* Few tiles for many threads: cut the rows as well; a tile is then expanded more than once. */
    job->row_chunk = job->rows;
    if (tiles < 4 * threads && job->rows > 2 * ZJ_LANES) {
        int chunks = (4 * threads + tiles - 1) / tiles;
        int chunk = (job->rows + chunks - 1) / chunks;
        chunk = (chunk + MICRO_ROWS - 1) / MICRO_ROWS * MICRO_ROWS;
        job->row_chunk = chunk < 48 ? 48 : chunk;
    }
    job->row_chunks = (job->rows + job->row_chunk - 1) / job->row_chunk;
}

static void linear_task(void *argument, int index, int worker) {
    zj_linear_job *job = argument;
    int part = 0, chunk = index % job->row_chunks, tile = index / job->row_chunks;
    while (tile >= job->tiles[part]) tile -= job->tiles[part++];
    const zj_matrix *w = job->matrix[part];
    int row = chunk * job->row_chunk, rows = job->rows - row;
    if (rows > job->row_chunk) rows = job->row_chunk;
    int group = tile * job->tile_groups, groups = groups_of(w) - group;
    if (groups > job->tile_groups) groups = job->tile_groups;
    const float *x = job->x + (size_t)row * job->ldx;
    float *y = job->y[part] + (size_t)row * job->ldy;
    if (job->rows <= DIRECT_ROWS) {
        direct_by_rows[rows - 1](w, group, groups, x, job->ldx, y, job->ldy, job->add);
        return;
    }
    float *scratch = job->scratch + (size_t)worker * job->scratch_floats;
    y += (size_t)group * ZJ_LANES;
    if (groups == MICRO_GROUPS) {
        tile_full(w, group, x, job->ldx, rows, y, job->ldy, job->add, scratch);
        return;
    }
    for (int g = 0; g < groups; g++, y += ZJ_LANES)
        tile_single(w, group + g, x, job->ldx, rows, y, job->ldy, job->add, scratch);
}

static void unpack(const zj_matrix *w, int row, float *out) {
    size_t stride = group_bytes(w);
    const uint8_t *data = (const uint8_t *)w->data + row / ZJ_LANES * stride;
    int lane = row % ZJ_LANES;
    if (w->format == ZJ_F32) {
        for (int k = 0; k < w->k; k++) out[k] = ((const float *)data)[(size_t)k * ZJ_LANES + lane];
        return;
    }
    for (int k = 0; k < w->k; k += 32) {
        float scale = zj_half(((const uint16_t *)data)[lane]);
        if (w->format == ZJ_Q8) {
            for (int j = 0; j < 32; j++) out[k + j] = (float)(int8_t)data[32 + j * ZJ_LANES + lane] * scale;
            data += ZJ_Q8_BYTES;
            continue;
        }
        float minimum = zj_half(((const uint16_t *)(data + 32))[lane]);
        const uint32_t *word = (const uint32_t *)(data + 64);
        for (int j = 0; j < 32; j++) /* the product is exact, so one rounding as in an fma */
            out[k + j] = (float)(word[j / 8 * ZJ_LANES + lane] >> 4 * (j % 8) & 15) * scale + minimum;
        data += ZJ_Q4_BYTES;
    }
}
