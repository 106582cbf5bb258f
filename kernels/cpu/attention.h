/* Paged causal attention, prefill and decode alike.
 *
 * The positions 0..p of a row are cut into segments of 64, aligned to position 0. In a segment: scores are q.k summed
 * over the head dimension in order (16 positions at once, K is stored [dim][16]); max; p = exp(score - max); the sum of
 * p in 16 lanes; p V summed over positions in order. Segments are then folded one after the other into (max, sum, out).
 * What a row gets depends on its position and its keys alone: rows that share a pass over K and V only share the
 * loads. A few rows over a long context are cut into runs of segments (`split`), whose results are folded in the
 * same order by attend_fold.
 * Bytes moved per row and layer in decode: 8 * kv_heads * head_dim for each position.
 */

#define QUERIES_PASS 6 /* queries in one pass over K and V */

typedef struct {
    float max;
    float sum[ZJ_LANES];
} softmax;

/* The first `count` positions of a segment for Q queries. Result in `state` [Q] and `out` [Q][head_dim]. */
INLINE void segment(const int Q, const float *const *q, const float *const *blocks, int count, int head_dim,
                    float scale, softmax *state, float *const *out) {
    float score[QUERIES_PASS][ZJ_SEGMENT];
    int block_count = (count + ZJ_BLOCK_TOKENS - 1) / ZJ_BLOCK_TOKENS, b = 0;
    V factor = v_set1(scale);
#define SCORES(B)                                                                                       \
    for (; b + (B) <= block_count; b += (B)) {                                                          \
        V acc[QUERIES_PASS][B];                                                                         \
        UNROLL for (int i = 0; i < Q; i++) UNROLL for (int j = 0; j < (B); j++) acc[i][j] = v_zero();   \
        for (int d = 0; d < head_dim; d++) {                                                            \
            V key[B];                                                                                   \
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
        for (int j = 0; j < block_count; j++) {
            float *s = &score[i][j * ZJ_BLOCK_TOKENS];
            int lanes = count - j * ZJ_BLOCK_TOKENS;
            if (lanes < ZJ_BLOCK_TOKENS) v_store(s, v_first(lanes, v_load(s), v_set1(-INFINITY)));
            top = v_max(top, v_load(s));
        }
        state[i].max = v_hmax(top);
        top = v_set1(state[i].max);
        for (int j = 0; j < block_count; j++) {
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
        for (int t = 0; t < count; t++) {                                                               \
            const float *row = blocks[t / ZJ_BLOCK_TOKENS] + (size_t)head_dim * ZJ_BLOCK_TOKENS         \
                             + (size_t)(t % ZJ_BLOCK_TOKENS) * head_dim + d;                            \
            V value[B];                                                                                 \
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

/* Six queries in one pass, the rest by three, two or one. */
#define SEGMENT_OF(Q)                                                                                                  \
    static void segment_##Q(const float *const *q, const float *const *blocks, int count, int head_dim, float scale,   \
                            softmax *state, float *const *out) {                                                       \
        segment(Q, q, blocks, count, head_dim, scale, state, out);                                                     \
    }
SEGMENT_OF(1)
SEGMENT_OF(2)
SEGMENT_OF(3)
SEGMENT_OF(6)

static void segment_any(int queries, const float *const *q, const float *const *blocks, int count, int head_dim,
                        float scale, softmax *state, float *const *out) {
    int i = 0;
    for (; i + 6 <= queries; i += 6) segment_6(q + i, blocks, count, head_dim, scale, state + i, out + i);
    for (; i + 3 <= queries; i += 3) segment_3(q + i, blocks, count, head_dim, scale, state + i, out + i);
    if (queries - i == 2) segment_2(q + i, blocks, count, head_dim, scale, state + i, out + i);
    if (queries - i == 1) segment_1(q + i, blocks, count, head_dim, scale, state + i, out + i);
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

INLINE void blocks_of(const zj_attend_job *job, int row, int kv_head, int segment_index, int count,
                      const float **blocks) {
    const zj_model *m = job->model;
    size_t head_floats = (size_t)2 * m->head_dim * ZJ_BLOCK_TOKENS;
    size_t block_floats = head_floats * m->kv_heads * m->layers;
    const int32_t *table = job->batch->table + (size_t)job->batch->sequence[row] * job->batch->table_stride;
    for (int b = 0; b * ZJ_BLOCK_TOKENS < count; b++)
        blocks[b] = job->batch->kv + (size_t)table[segment_index * (ZJ_SEGMENT / ZJ_BLOCK_TOKENS) + b] * block_floats
                  + ((size_t)job->layer * m->kv_heads + kv_head) * head_floats;
}

/* One tile and one kv head over all its segments. */
static void attend_tile(const zj_attend_job *job, const zj_tile *tile, int kv_head) {
    const zj_model *m = job->model;
    const int head_dim = m->head_dim, share = m->heads / m->kv_heads, queries = tile->rows * share;
    const float *q[ZJ_QUERIES_MAX], *blocks[ZJ_SEGMENT / ZJ_BLOCK_TOKENS];
    float *out[ZJ_QUERIES_MAX], *part_out[ZJ_QUERIES_MAX];
    softmax whole[ZJ_QUERIES_MAX], part[ZJ_QUERIES_MAX];
    float spare[(size_t)queries * head_dim];
    for (int i = 0; i < queries; i++) {
        int row = tile->row + i / share, head = kv_head * share + i % share;
        q[i] = job->q + (size_t)row * job->ldq + (size_t)head * head_dim;
        out[i] = job->out + ((size_t)row * m->heads + head) * head_dim;
        part_out[i] = spare + (size_t)i * head_dim;
    }
    /* The segments that every row of the tile sees in full are shared; the last, partial ones are done row by row. */
    int shared = (job->batch->position[tile->row] + 1) / ZJ_SEGMENT;
    for (int s = 0; s < shared; s++) {
        blocks_of(job, tile->row, kv_head, s, ZJ_SEGMENT, blocks);
        segment_any(queries, q, blocks, ZJ_SEGMENT, head_dim, m->scale, s ? part : whole, s ? part_out : out);
        for (int i = 0; s && i < queries; i++) fold(&whole[i], out[i], &part[i], part_out[i], head_dim);
    }
    for (int r = 0; r < tile->rows; r++) {
        int positions = job->batch->position[tile->row + r] + 1, at = r * share;
        for (int s = shared; s * ZJ_SEGMENT < positions; s++) {
            int count = positions - s * ZJ_SEGMENT < ZJ_SEGMENT ? positions - s * ZJ_SEGMENT : ZJ_SEGMENT;
            blocks_of(job, tile->row, kv_head, s, count, blocks);
            segment_any(share, q + at, blocks, count, head_dim, m->scale, (s ? part : whole) + at,
                        (s ? part_out : out) + at);
            for (int i = at; s && i < at + share; i++) fold(&whole[i], out[i], &part[i], part_out[i], head_dim);
        }
    }
    for (int i = 0; i < queries; i++) finish(&whole[i], out[i], head_dim);
}

/* A run of segments of one row; each segment's result goes to `partial`, to be folded in order later. */
static void attend_run(const zj_attend_job *job, int tile, int kv_head, int run) {
    const zj_model *m = job->model;
    const int row = job->tile[tile].row, head_dim = m->head_dim, share = m->heads / m->kv_heads;
    const float *q[ZJ_QUERIES_MAX], *blocks[ZJ_SEGMENT / ZJ_BLOCK_TOKENS];
    float *out[ZJ_QUERIES_MAX];
    softmax part[ZJ_QUERIES_MAX];
    int positions = job->batch->position[row] + 1;
    for (int s = run * job->split_segments; s < (run + 1) * job->split_segments && s * ZJ_SEGMENT < positions; s++) {
        int count = positions - s * ZJ_SEGMENT < ZJ_SEGMENT ? positions - s * ZJ_SEGMENT : ZJ_SEGMENT;
        float *record[ZJ_QUERIES_MAX];
        for (int i = 0; i < share; i++) {
            int head = kv_head * share + i;
            record[i] = job->partial + ((size_t)tile * m->heads + head) * job->partial_floats
                      + (size_t)s * (sizeof(softmax) / sizeof(float) + head_dim);
            out[i] = record[i] + sizeof(softmax) / sizeof(float);
            q[i] = job->q + (size_t)row * job->ldq + (size_t)head * head_dim;
        }
        blocks_of(job, row, kv_head, s, count, blocks);
        segment_any(share, q, blocks, count, head_dim, m->scale, part, out);
        for (int i = 0; i < share; i++) memcpy(record[i], &part[i], sizeof part[i]);
    }
}

static void attend_fold(const zj_attend_job *job, int tile, int kv_head) {
    const zj_model *m = job->model;
    const int row = job->tile[tile].row, share = m->heads / m->kv_heads;
    const size_t record_floats = sizeof(softmax) / sizeof(float) + m->head_dim;
    int positions = job->batch->position[row] + 1;
    for (int head = kv_head * share; head < (kv_head + 1) * share; head++) {
        const float *record = job->partial + ((size_t)tile * m->heads + head) * job->partial_floats;
        float *out = job->out + ((size_t)row * m->heads + head) * m->head_dim;
        softmax whole, part;
        memcpy(&whole, record, sizeof whole);
        memcpy(out, record + sizeof(softmax) / sizeof(float), sizeof(float) * m->head_dim);
        for (int s = 1; s * ZJ_SEGMENT < positions; s++) {
            memcpy(&part, record + s * record_floats, sizeof part);
            fold(&whole, out, &part, record + s * record_floats + sizeof(softmax) / sizeof(float), m->head_dim);
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
        attend_run(job, rest / job->split, kv_head, rest % job->split);
}
