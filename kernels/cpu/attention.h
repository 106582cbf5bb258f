/* Paged causal attention, prefill and decode alike.
 *
 * The positions 0..p of a row are cut into segments of 64, aligned to position 0. In a segment: scores are q.k summed
 * over the head dimension in order (16 positions at once, K is stored [dim][16]); max; p = exp(score - max); the sum of
 * p in 16 lanes; p V summed over positions in order. Segments are then folded one after the other into (max, sum, out).
 * What a row gets depends on its position and its keys alone: rows that share a pass over K and V only share the
 * loads. Few rows over a long context are cut into runs of segments (`split`), whose results are folded in the
 * same order by attend_fold. A window cuts positions off at the low end: segments wholly outside are not read.
 * Bytes moved per row and layer in decode: 8 * kv_heads * head_dim for each position.
 */

#define QUERIES_PASS 6 /* queries in one pass over K and V */

typedef struct {
    float max;
    float sum[ZJ_LANES];
} softmax;

INLINE const float *value_row(const float *const *blocks, int t, int head_dim) {
    return blocks[t / ZJ_BLOCK_TOKENS] + (size_t)head_dim * (ZJ_BLOCK_TOKENS + t % ZJ_BLOCK_TOKENS);
}

/* Positions that are seen of one segment: from `from` to below `end`. */
typedef struct {
    int from, end;
} span;

/* The positions `see` of a segment for Q queries. Result in `state` [Q] and `out` [Q][head_dim].
 * `blocks`: of this segment, then of the one that will be read next: with `ask` its lines are asked for while these are
 * summed, because blocks lie anywhere and the hardware does not look ahead past a page. */
INLINE void segment(const int Q, const int ask, const float *const *q, const float *const *blocks, span see, int head_dim,
                    float scale, softmax *state, float *const *out) {
    float score[QUERIES_PASS][ZJ_SEGMENT];
    const int block_from = see.from / ZJ_BLOCK_TOKENS;
    const int block_end = (see.end + ZJ_BLOCK_TOKENS - 1) / ZJ_BLOCK_TOKENS;
    int b = block_from;
    V factor = v_set1(scale);
#define SCORES(B)                                                                                       \
    for (; b + (B) <= block_end; b += (B)) {                                                          \
        V acc[QUERIES_PASS][B];                                                                         \
        UNROLL for (int i = 0; i < Q; i++) UNROLL for (int j = 0; j < (B); j++) acc[i][j] = v_zero();   \
        for (int d = 0; d < head_dim; d++) {                                                            \
            V key[B];                                                                                   \
            UNROLL for (int j = 0; ask && j < (B); j++)                                                 \
                __builtin_prefetch(blocks[ZJ_SEGMENT_BLOCKS + b + j] + d * ZJ_BLOCK_TOKENS);            \
            UNROLL for (int j = 0; j < (B); j++) key[j] = v_load(blocks[b + j] + d * ZJ_BLOCK_TOKENS);  \
            UNROLL for (int i = 0; i < Q; i++) {                                                        \
                V value = v_set1(q[i][d]);                                                              \
                UNROLL for (int j = 0; j < (B); j++) acc[i][j] = v_fma(value, key[j], acc[i][j]);       \
            }                                                                                           \
        }                                                                                               \
        UNROLL for (int i = 0; i < Q; i++) UNROLL for (int j = 0; j < (B); j++)                         \
            v_store(&score[i][(b + j) * ZJ_BLOCK_TOKENS], v_mul(acc[i][j], factor));                    \
    }
    SCORES(ATTEND_VECTORS)
    SCORES(1)
#undef SCORES
    for (int i = 0; i < Q; i++) {
        V top = v_set1(-INFINITY), sum = v_zero();
        for (int j = block_from; j < block_end; j++) {
            float *s = &score[i][j * ZJ_BLOCK_TOKENS];
            int lanes = see.end - j * ZJ_BLOCK_TOKENS, unseen = see.from - j * ZJ_BLOCK_TOKENS;
            if (lanes < ZJ_BLOCK_TOKENS) v_store(s, v_first(lanes, v_load(s), v_set1(-INFINITY)));
            if (unseen > 0) v_store(s, v_first(unseen, v_set1(-INFINITY), v_load(s)));
            top = v_max(top, v_load(s));
        }
        state[i].max = v_hmax(top);
        top = v_set1(state[i].max);
        for (int j = block_from; j < block_end; j++) {
            float *s = &score[i][j * ZJ_BLOCK_TOKENS];
            V p = v_exp(v_sub(v_load(s), top));
            v_store(s, p);
            sum = v_add(sum, p);
        }
        v_store(state[i].sum, sum);
    }
    int d = 0;
#define VALUES(B)                                                                                       \
    for (; d + (B) * ZJ_LANES <= head_dim; d += (B) * ZJ_LANES) {                                       \
        V acc[QUERIES_PASS][B];                                                                         \
        UNROLL for (int i = 0; i < Q; i++) UNROLL for (int j = 0; j < (B); j++) acc[i][j] = v_zero();   \
        for (int t = see.from; t < see.end; t++) {                                                           \
            const float *row = value_row(blocks, t, head_dim) + d;                                      \
            V value[B];                                                                                 \
            UNROLL for (int j = 0; ask && j < (B); j++)                                                 \
                __builtin_prefetch(value_row(blocks + ZJ_SEGMENT_BLOCKS, t, head_dim) + d + j * ZJ_LANES);                  \
            UNROLL for (int j = 0; j < (B); j++) value[j] = v_load(row + j * ZJ_LANES);                 \
            UNROLL for (int i = 0; i < Q; i++) {                                                        \
                V p = v_set1(score[i][t]);                                                              \
                UNROLL for (int j = 0; j < (B); j++) acc[i][j] = v_fma(p, value[j], acc[i][j]);         \
            }                                                                                           \
        }                                                                                               \
        UNROLL for (int i = 0; i < Q; i++) UNROLL for (int j = 0; j < (B); j++)                         \
            v_store(out[i] + d + j * ZJ_LANES, acc[i][j]);                                              \
    }
    VALUES(ATTEND_VECTORS)
    VALUES(1)
#undef VALUES
}

/* Six queries in one pass, the rest by three, two or one; the first pass asks for what comes next. */
#define SEGMENT_OF(Q)                                                                                                  \
    static void segment_##Q(int i, const float *const *q, const float *const *blocks, span see, int head_dim,          \
                            float scale, softmax *state, float *const *out) {                                          \
        if (i)                                                                                                         \
            segment(Q, 0, q + i, blocks, see, head_dim, scale, state + i, out + i);                                    \
        else                                                                                                           \
            segment(Q, 1, q, blocks, see, head_dim, scale, state, out);                                                \
    }
SEGMENT_OF(1)
SEGMENT_OF(2)
SEGMENT_OF(3)
SEGMENT_OF(6)

static void segment_any(int queries, const float *const *q, const float *const *blocks, span see, int head_dim,
                        float scale, softmax *state, float *const *out) {
    int i = 0;
    for (; i + 6 <= queries; i += 6) segment_6(i, q, blocks, see, head_dim, scale, state, out);
    for (; i + 3 <= queries; i += 3) segment_3(i, q, blocks, see, head_dim, scale, state, out);
    if (queries - i == 2) segment_2(i, q, blocks, see, head_dim, scale, state, out);
    if (queries - i == 1) segment_1(i, q, blocks, see, head_dim, scale, state, out);
}

/* Folds a segment's result into the whole: the later one second, always. */
INLINE void fold(softmax *whole, float *out, const softmax *part, const float *part_out, int head_dim) {
    float max = whole->max > part->max ? whole->max : part->max;
    float exponents[ZJ_LANES] = {whole->max - max, part->max - max}, factors[ZJ_LANES];
    v_store(factors, v_exp(v_load(exponents)));
    V a = v_set1(factors[0]), b = v_set1(factors[1]);
    whole->max = max;
    v_store(whole->sum, v_fma(v_load(whole->sum), a, v_mul(v_load(part->sum), b)));
    for (int d = 0; d < head_dim; d += ZJ_LANES)
        v_store(out + d, v_fma(v_load(out + d), a, v_mul(v_load(part_out + d), b)));
}

INLINE void finish(const softmax *whole, float *out, int head_dim) {
    V scale = v_set1(1.0f / v_sum(v_load(whole->sum)));
    for (int d = 0; d < head_dim; d += ZJ_LANES) v_store(out + d, v_mul(v_load(out + d), scale));
}

/* What row `row` sees of segment `index`; empty if nothing. */
INLINE span seen(const zj_attend_job *job, int row, int index) {
    int end = job->batch->position[row] + 1 - index * ZJ_SEGMENT, from = job->window ? end - job->window : 0;
    return (span){from > 0 ? from : 0, end < ZJ_SEGMENT ? end : ZJ_SEGMENT};
}

/* The first segment that a row sees, and one past its last. */
INLINE int first_segment(const zj_attend_job *job, int row) {
    int from = job->window ? job->batch->position[row] + 1 - job->window : 0;
    return from > 0 ? from / ZJ_SEGMENT : 0;
}
INLINE int end_segment(const zj_attend_job *job, int row) { return job->batch->position[row] / ZJ_SEGMENT + 1; }

/* The blocks of segment `index` that hold what stands before `end`, and as many of the next one, up to the last that
 * the row sees; where there is none, this segment's own: asking for those again costs nothing. */
INLINE void blocks_of(const zj_attend_job *job, int row, int kv_head, int index, int end, const float **blocks) {
    const int last = job->batch->position[row] / ZJ_BLOCK_TOKENS;
    const zj_model *m = job->model;
    size_t head_floats = (size_t)2 * m->head_dim * ZJ_BLOCK_TOKENS;
    size_t block_floats = head_floats * m->kv_heads * m->layers;
    const int32_t *table = job->batch->table + (size_t)job->batch->sequence[row] * job->batch->table_stride;
    const float *kv = job->batch->kv + ((size_t)job->layer * m->kv_heads + kv_head) * head_floats;
    for (int b = 0; b * ZJ_BLOCK_TOKENS < end; b++) {
        int at = index * ZJ_SEGMENT_BLOCKS + b, next = at + ZJ_SEGMENT_BLOCKS;
        blocks[b] = kv + (size_t)table[at] * block_floats;
        blocks[ZJ_SEGMENT_BLOCKS + b] = next <= last ? kv + (size_t)table[next] * block_floats : blocks[b];
    }
}

/* One segment for the rows of a tile that see some of it: together if all see the whole, else row by row. */
INLINE void tile_segment(const zj_attend_job *job, const zj_tile *tile, int kv_head, int index, const float *const *q,
                         softmax *state, float *const *out) {
    const zj_model *m = job->model;
    const int share = m->heads / m->kv_heads;
    const float *blocks[2 * ZJ_SEGMENT_BLOCKS];
    span lowest = seen(job, tile->row, index), highest = seen(job, tile->row + tile->rows - 1, index);
    if (lowest.end == ZJ_SEGMENT && highest.from == 0) {
        blocks_of(job, tile->row, kv_head, index, ZJ_SEGMENT, blocks);
        segment_any(tile->rows * share, q, blocks, lowest, m->head_dim, m->scale, state, out);
        return;
    }
    for (int r = 0, at = 0; r < tile->rows; r++, at += share) {
        span see = seen(job, tile->row + r, index);
        if (see.from >= see.end) continue;
        blocks_of(job, tile->row, kv_head, index, see.end, blocks);
        segment_any(share, q + at, blocks, see, m->head_dim, m->scale, state + at, out + at);
    }
}

INLINE void queries_of(const zj_attend_job *job, const zj_tile *tile, int kv_head, const float **q) {
    const zj_model *m = job->model;
    const int share = m->heads / m->kv_heads;
    for (int i = 0; i < tile->rows * share; i++)
        q[i] = job->q + (size_t)(tile->row + i / share) * job->ldq
             + (size_t)(kv_head * share + i % share) * m->head_dim;
}

/* One tile and one kv head over all its segments. */
static void attend_tile(const zj_attend_job *job, const zj_tile *tile, int kv_head) {
    const zj_model *m = job->model;
    const int head_dim = m->head_dim, share = m->heads / m->kv_heads, queries = tile->rows * share;
    const int first = first_segment(job, tile->row), end = end_segment(job, tile->row + tile->rows - 1);
    const float *q[ZJ_QUERIES_MAX];
    float *out[ZJ_QUERIES_MAX], *part_out[ZJ_QUERIES_MAX];
    softmax whole[ZJ_QUERIES_MAX], part[ZJ_QUERIES_MAX];
    float spare[(size_t)queries * head_dim];
    queries_of(job, tile, kv_head, q);
    for (int i = 0; i < queries; i++) {
        out[i] = job->out + ((size_t)(tile->row + i / share) * m->heads + kv_head * share + i % share) * head_dim;
        part_out[i] = spare + (size_t)i * head_dim;
    }
    for (int s = first; s < end; s++) {
        tile_segment(job, tile, kv_head, s, q, part, part_out);
        for (int i = 0; i < queries; i++) {
            int row = tile->row + i / share, row_first = first_segment(job, row);
            if (s < row_first || s >= end_segment(job, row)) continue;
            if (s == row_first) {
                whole[i] = part[i];
                memcpy(out[i], part_out[i], sizeof(float) * head_dim);
            } else {
                fold(&whole[i], out[i], &part[i], part_out[i], head_dim);
            }
        }
    }
    for (int i = 0; i < queries; i++) finish(&whole[i], out[i], head_dim);
}

/* Where the result of (row, head) for segment `index` of its tile stands, while it waits to be folded. */
INLINE float *record_of(const zj_attend_job *job, int row, int head, int index) {
    return job->partial + ((size_t)row * job->model->heads + head) * job->partial_floats
         + (size_t)index * (sizeof(softmax) / sizeof(float) + job->model->head_dim);
}

/* A run of segments of one tile; each segment's results go to `partial`, to be folded in order later. */
static void attend_run(const zj_attend_job *job, const zj_tile *tile, int kv_head, int run) {
    const zj_model *m = job->model;
    const int share = m->heads / m->kv_heads, queries = tile->rows * share;
    const int first = first_segment(job, tile->row), end = end_segment(job, tile->row + tile->rows - 1);
    const float *q[ZJ_QUERIES_MAX];
    float *record[ZJ_QUERIES_MAX], *out[ZJ_QUERIES_MAX];
    softmax part[ZJ_QUERIES_MAX];
    queries_of(job, tile, kv_head, q);
    for (int s = run * job->split_segments; s < (run + 1) * job->split_segments && first + s < end; s++) {
        for (int i = 0; i < queries; i++) {
            record[i] = record_of(job, tile->row + i / share, kv_head * share + i % share, s);
            out[i] = record[i] + sizeof(softmax) / sizeof(float);
        }
        tile_segment(job, tile, kv_head, first + s, q, part, out);
        for (int i = 0; i < queries; i++) { /* what was not computed is not read either */
            int row = tile->row + i / share;
            if (first + s >= first_segment(job, row) && first + s < end_segment(job, row))
                memcpy(record[i], &part[i], sizeof part[i]);
        }
    }
}

/* Folds the results of one tile and kv head. */
static void attend_fold(void *argument, int index, int worker) {
    const zj_attend_job *job = argument;
    const zj_model *m = job->model;
    const zj_tile *tile = &job->tile[index / m->kv_heads];
    const int kv_head = index % m->kv_heads, share = m->heads / m->kv_heads, first = first_segment(job, tile->row);
    (void)worker;
    for (int i = 0; i < tile->rows * share; i++) {
        const int row = tile->row + i / share, head = kv_head * share + i % share;
        float *out = job->out + ((size_t)row * m->heads + head) * m->head_dim;
        softmax whole = {0}, part;
        for (int s = first_segment(job, row); s < end_segment(job, row); s++) {
            const float *record = record_of(job, row, head, s - first);
            const float *part_out = record + sizeof(softmax) / sizeof(float);
            memcpy(&part, record, sizeof part);
            if (s == first_segment(job, row)) {
                whole = part;
                memcpy(out, part_out, sizeof(float) * m->head_dim);
            } else {
                fold(&whole, out, &part, part_out, m->head_dim);
            }
        }
        finish(&whole, out, m->head_dim);
    }
}

static void attend_task(void *argument, int index, int worker) {
    const zj_attend_job *job = argument;
    (void)worker;
    int kv_head = index % job->model->kv_heads, rest = index / job->model->kv_heads;
    if (job->split == 1)
        attend_tile(job, &job->tile[rest], kv_head);
    else
        attend_run(job, &job->tile[rest / job->split], kv_head, rest % job->split);
}
