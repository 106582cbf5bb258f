/* The C ABI of the CPU kernels: packing at load, one call for a whole step, and one call for each kernel alone.
 *
 * `zj_forward` is the decoder of the llama family, its layers in reading order. All functions return 0, or -1 when
 * memory is short. A context is used by one thread at a time.
 */
#include "zjcpu.h"

#include <stdlib.h>
#include <string.h>

#define ROWS_SERIAL 3   /* with so few rows, waking the others costs more than norms and rotations do */
#define ROWS_GRAIN 8
#define TASKS_A_THREAD 8 /* of attention: so that none waits long for the last */
#define PACK_GRAIN 64 /* whole groups of 16 */

typedef struct {
    zj_pool *pool;
    const zj_isa *isa;
    float *arena;
    size_t arena_floats;
} zj_context;

float zj_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023, bits;
    float value;
    if (exponent == 31) {
        bits = sign | 0x7f800000 | fraction << 13;
    } else if (exponent) {
        bits = sign | (exponent + 112) << 23 | fraction << 13;
    } else { /* subnormal: fraction * 2^-24 */
        value = (float)fraction * 5.9604644775390625e-8f;
        memcpy(&bits, &value, 4);
        bits |= sign;
    }
    memcpy(&value, &bits, 4);
    return value;
}

/* --- context --- */

/* The named instruction set if this CPU has it, the best one for "", else NULL. */
static const zj_isa *find_isa(const char *name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512 && (!*name || !strcmp(name, "avx512"))) return &zj_isa_avx512;
    if (avx2 && (!*name || !strcmp(name, "avx2"))) return &zj_isa_avx2;
#endif
    return !*name || !strcmp(name, "portable") ? &zj_isa_portable : NULL;
}

void zj_close(zj_context *context) {
    if (!context) return;
    if (context->pool) zj_pool_free(context->pool);
    free(context->arena);
    free(context);
}

zj_context *zj_open(int threads, const char *isa) {
    const zj_isa *found = find_isa(isa);
    zj_context *context = found ? calloc(1, sizeof *context) : NULL;
    if (!context) return NULL;
    context->isa = found;
    context->pool = zj_pool_new(threads);
    if (context->pool) return context;
    zj_close(context);
    return NULL;
}

const char *zj_isa_name(const zj_context *context) { return context->isa->name; }

static float *reserve(zj_context *context, size_t floats) {
    if (floats <= context->arena_floats) return context->arena;
    free(context->arena);
    context->arena_floats = 0;
    context->arena = aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64);
    if (context->arena) context->arena_floats = floats;
    return context->arena;
}

static size_t round16(size_t floats) { return (floats + 15) / 16 * 16; }

/* --- packing: the file's rows [n][k] into groups of 16 outputs; `packed` is zeroed and large enough --- */

int64_t zj_packed_bytes(int format, int n, int k) {
    const zj_format *f = &zj_formats[format];
    return (int64_t)((n + ZJ_LANES - 1) / ZJ_LANES) * (k / f->values) * f->bytes;
}

typedef struct {
    int format, n, k;
    const uint8_t *rows;
    uint8_t *packed;
} pack_job;

static void pack_task(void *argument, int index, int worker) {
    const pack_job *job = argument;
    int first = index * PACK_GRAIN, end = first + PACK_GRAIN < job->n ? first + PACK_GRAIN : job->n;
    (void)worker;
    zj_pack_rows(job->format, job->rows, first, end, job->k, job->packed);
}

/* `rows`: [n][k] as a GGUF stores them. `packed`: zj_packed_bytes of zeros. */
void zj_pack(zj_context *context, int format, const void *rows, int n, int k, void *packed) {
    pack_job job = {format, n, k, rows, packed};
    zj_pool_run(context->pool, pack_task, &job, (n + PACK_GRAIN - 1) / PACK_GRAIN);
}

/* --- regions over rows --- */

typedef struct {
    const zj_isa *isa;
    const zj_model *model;
    const zj_batch *batch;
    const zj_layer *layer;
    int layer_index, rows;
    float *x, *a, *b;        /* meaning depends on the task */
    int ldb;
    const float *weight;
    const int32_t *pick;
} rows_job;

typedef void (*rows_task)(rows_job *job, int row);

typedef struct {
    rows_job *job;
    rows_task task;
} rows_region;

static void run_rows(void *argument, int index, int worker) {
    rows_region *region = argument;
    (void)worker;
    for (int row = index * ROWS_GRAIN; row < (index + 1) * ROWS_GRAIN && row < region->job->rows; row++)
        region->task(region->job, row);
}

static void each_row(zj_context *context, rows_job *job, rows_task task) {
    if (job->rows <= ROWS_SERIAL) {
        for (int row = 0; row < job->rows; row++) task(job, row);
        return;
    }
    rows_region region = {job, task};
    zj_pool_run(context->pool, run_rows, &region, (job->rows + ROWS_GRAIN - 1) / ROWS_GRAIN);
}

static void scale_row(float *x, int width, float factor) {
    if (factor == 0.0f) return;
    for (int i = 0; i < width; i++) x[i] *= factor;
}

static void add_row(float *x, const float *y, int width) {
    for (int i = 0; y && i < width; i++) x[i] += y[i];
}

static void embed_row(rows_job *job, int row) {
    const zj_model *m = job->model;
    float *x = job->x + (size_t)row * m->hidden;
    job->isa->unpack(&m->embed, job->batch->token[row], x);
    scale_row(x, m->hidden, m->embed_scale);
}

static void norm_row(rows_job *job, int row) {
    size_t width = (size_t)job->model->hidden, from = job->pick ? (size_t)job->pick[row] : (size_t)row;
    job->isa->norm(job->x + from * width, job->weight, job->model->eps, (int)width, job->a + row * width);
}

/* x += norm(a) */
static void post_norm_row(rows_job *job, int row) {
    const int width = job->model->hidden;
    float *a = job->a + (size_t)row * width;
    job->isa->norm(a, job->weight, job->model->eps, width, a);
    add_row(job->x + (size_t)row * width, a, width);
}

static void norm_heads(const rows_job *job, float *x, int heads, const float *weight) {
    const zj_model *m = job->model;
    for (int h = 0; weight && h < heads; h++, x += m->head_dim) job->isa->norm(x, weight, m->eps, m->head_dim, x);
}

/* Adds biases, norms and rotates q and k of a row, and puts k and v into the row's place in its block.
 * b: [rows][q, k, v]. */
static void store_row(rows_job *job, int row) {
    const zj_model *m = job->model;
    const zj_layer *layer = job->layer;
    const zj_batch *batch = job->batch;
    const int q_width = m->heads * m->head_dim, kv_width = m->kv_heads * m->head_dim;
    int position = batch->position[row], at = position % ZJ_BLOCK_TOKENS, half = m->rope_dim / 2;
    const float *cos = (layer->local ? m->cos_local : m->cos) + (size_t)position * half;
    const float *sin = (layer->local ? m->sin_local : m->sin) + (size_t)position * half;
    float *q = job->b + (size_t)row * job->ldb, *k = q + q_width, *v = k + kv_width;
    add_row(q, layer->q_bias, q_width);
    add_row(k, layer->k_bias, kv_width);
    add_row(v, layer->v_bias, kv_width);
    norm_heads(job, q, m->heads, layer->q_norm);
    norm_heads(job, k, m->kv_heads, layer->k_norm);
    job->isa->rotate(q, m->heads + m->kv_heads, m->head_dim, m->rope_dim, cos, sin);
    int block = batch->table[(size_t)batch->sequence[row] * batch->table_stride + position / ZJ_BLOCK_TOKENS];
    size_t half_floats = (size_t)m->head_dim * ZJ_BLOCK_TOKENS;
    float *to = batch->kv + ((size_t)block * m->layers + job->layer_index) * m->kv_heads * 2 * half_floats;
    for (int h = 0; h < m->kv_heads; h++, to += 2 * half_floats, k += m->head_dim, v += m->head_dim) {
        for (int d = 0; d < m->head_dim; d++) to[d * ZJ_BLOCK_TOKENS + at] = k[d];
        memcpy(to + half_floats + (size_t)at * m->head_dim, v, sizeof(float) * m->head_dim);
    }
}

static void gate_row(rows_job *job, int row) {
    float *gate = job->b + (size_t)row * job->ldb;
    job->isa->gate_mul[job->model->activation](gate, gate + job->model->ffn, job->model->ffn);
}

static void logits_row(rows_job *job, int row) {
    scale_row(job->a + (size_t)row * job->model->head.n, job->model->head.n, job->model->logit_scale);
}

/* --- the parts of a step --- */

static void linear(zj_context *context, zj_linear_job *job) {
    context->isa->linear_plan(job, zj_pool_threads(context->pool));
    int tiles = 0;
    for (int p = 0; p < job->parts; p++) tiles += job->tiles[p];
    zj_pool_run(context->pool, context->isa->linear_task, job, tiles * job->row_chunks);
}

/* Rows of one sequence, up to ZJ_TILE_ROWS or as many as fit, make a tile. Returns the number of tiles. */
static int make_tiles(const zj_model *m, const zj_batch *batch, zj_tile *tile) {
    int most = ZJ_QUERIES_MAX / (m->heads / m->kv_heads), tiles = 0;
    if (most > ZJ_TILE_ROWS) most = ZJ_TILE_ROWS;
    for (int row = 0; row < batch->rows; tiles++) {
        int count = 1;
        while (count < most && row + count < batch->rows && batch->sequence[row + count] == batch->sequence[row])
            count++;
        tile[tiles] = (zj_tile){row, count};
        row += count;
    }
    return tiles;
}

/* The segments from the first that a tile sees to its last. */
static int tile_segments(const zj_attend_job *job, const zj_tile *tile) {
    int first = job->window ? job->batch->position[tile->row] + 1 - job->window : 0;
    int last = job->batch->position[tile->row + tile->rows - 1];
    return last / ZJ_SEGMENT + 1 - (first > 0 ? first / ZJ_SEGMENT : 0);
}

/* Decides for the layer's window how the tiles are cut into tasks. Returns the floats that partial results need. */
static size_t plan_attention(zj_attend_job *job, int window, int threads) {
    const zj_model *m = job->model;
    int segments = 0, tasks = job->tiles * m->kv_heads;
    job->window = window, job->split = 1;
    if (threads == 1 || tasks >= TASKS_A_THREAD * threads) return 0;
    for (int tile = 0; tile < job->tiles; tile++) {
        int count = tile_segments(job, &job->tile[tile]);
        if (count > segments) segments = count;
    }
    if (segments < 2) return 0;
    int wanted = (TASKS_A_THREAD * threads + tasks - 1) / tasks;
    job->split_segments = (segments + wanted - 1) / wanted;
    job->split = (segments + job->split_segments - 1) / job->split_segments;
    if (job->split == 1) return 0;
    job->partial_floats = round16((size_t)job->split * job->split_segments * (1 + ZJ_LANES + m->head_dim));
    return job->partial_floats * job->batch->rows * m->heads;
}

static void attend(zj_context *context, zj_attend_job *job) {
    int heads = job->tiles * job->model->kv_heads;
    zj_pool_run(context->pool, context->isa->attend_task, job, heads * job->split);
    if (job->split == 1) return;
    if (job->batch->rows <= ROWS_SERIAL) {
        for (int index = 0; index < heads; index++) context->isa->attend_fold(job, index, 0);
        return;
    }
    zj_pool_run(context->pool, context->isa->attend_fold, job, heads);
}

static size_t scratch_floats(const zj_context *context, int k) {
    return (size_t)context->isa->tile_groups * ZJ_LANES * k;
}

/* --- the decoder --- */

typedef struct {
    float *x, *normed, *qkv, *mixed, *wide, *scratch, *partial;
    size_t scratch_floats;
} buffers;

/* x += what a layer computed from `from` [rows][ldx] by `matrix`, through the norm `post` if there is one. */
static void add_to_stream(zj_context *context, rows_job *rows, zj_linear_job *job, const zj_matrix *matrix,
                          const float *from, int ldx, const float *post) {
    job->parts = 1, job->x = from, job->ldx = ldx, job->ldy = rows->model->hidden;
    job->matrix[0] = matrix, job->y[0] = post ? rows->a : rows->x, job->add = !post;
    linear(context, job);
    rows->weight = post;
    if (post) each_row(context, rows, post_norm_row);
}

static void run_layer(zj_context *context, const zj_model *m, const zj_batch *batch, zj_attend_job *attention,
                      const buffers *f, int index) {
    const zj_layer *layer = &m->layer[index];
    const int q_width = m->heads * m->head_dim, kv_width = m->kv_heads * m->head_dim;
    const int qkv_width = q_width + 2 * kv_width;
    rows_job rows = {.isa = context->isa, .model = m, .batch = batch, .rows = batch->rows, .x = f->x, .a = f->normed};
    rows.layer = layer, rows.layer_index = index;
    zj_linear_job job = {.rows = batch->rows, .scratch = f->scratch, .scratch_floats = f->scratch_floats};

    rows.weight = layer->attn_norm;
    each_row(context, &rows, norm_row);
    job.parts = 3, job.x = f->normed, job.ldx = m->hidden, job.ldy = qkv_width, job.add = 0;
    job.matrix[0] = &layer->q, job.y[0] = f->qkv;
    job.matrix[1] = &layer->k, job.y[1] = f->qkv + q_width;
    job.matrix[2] = &layer->v, job.y[2] = f->qkv + q_width + kv_width;
    linear(context, &job);

    rows.b = f->qkv, rows.ldb = qkv_width;
    each_row(context, &rows, store_row);
    attention->layer = index;
    plan_attention(attention, layer->window, zj_pool_threads(context->pool));
    attend(context, attention);
    add_to_stream(context, &rows, &job, &layer->o, f->mixed, q_width, layer->post_attn_norm);

    rows.weight = layer->ffn_norm;
    each_row(context, &rows, norm_row);
    job.parts = 2, job.x = f->normed, job.ldx = m->hidden, job.ldy = 2 * m->ffn, job.add = 0;
    job.matrix[0] = &layer->gate, job.y[0] = f->wide;
    job.matrix[1] = &layer->up, job.y[1] = f->wide + m->ffn;
    linear(context, &job);

    rows.b = f->wide, rows.ldb = 2 * m->ffn;
    each_row(context, &rows, gate_row);
    add_to_stream(context, &rows, &job, &layer->down, f->wide, 2 * m->ffn, layer->post_ffn_norm);
}

int zj_forward(zj_context *context, const zj_model *m, const zj_batch *batch) {
    const size_t n = (size_t)batch->rows, q_width = (size_t)m->heads * m->head_dim;
    const size_t qkv_width = q_width + 2 * (size_t)m->kv_heads * m->head_dim;
    int widest = m->ffn > m->hidden ? m->ffn : m->hidden;
    if ((int)q_width > widest) widest = (int)q_width;
    zj_tile *tile = malloc(sizeof *tile * (n ? n : 1));
    if (!tile) return -1;
    zj_attend_job attention = {.model = m, .batch = batch, .tile = tile, .tiles = make_tiles(m, batch, tile)};
    size_t partial = 0;
    for (int index = 0; index < m->layers; index++) {
        size_t floats = plan_attention(&attention, m->layer[index].window, zj_pool_threads(context->pool));
        if (floats > partial) partial = floats;
    }
    buffers f = {.scratch_floats = scratch_floats(context, widest)};
    size_t sizes[] = {n * m->hidden, n * m->hidden, n * qkv_width, n * q_width, n * 2 * m->ffn, partial,
                      f.scratch_floats * zj_pool_threads(context->pool)};
    float **places[] = {&f.x, &f.normed, &f.qkv, &f.mixed, &f.wide, &f.partial, &f.scratch};
    size_t total = 0;
    for (int i = 0; i < 7; i++) total += round16(sizes[i]);
    float *at = reserve(context, total);
    if (!at) {
        free(tile);
        return -1;
    }
    for (int i = 0; i < 7; at += round16(sizes[i]), i++) *places[i] = at;
    attention.q = f.qkv, attention.ldq = (int)qkv_width, attention.out = f.mixed, attention.partial = f.partial;

    rows_job rows = {.isa = context->isa, .model = m, .batch = batch, .rows = batch->rows, .x = f.x};
    each_row(context, &rows, embed_row);
    for (int index = 0; index < m->layers; index++) run_layer(context, m, batch, &attention, &f, index);
    if (batch->wanted) { /* only the rows whose logits are wanted pass the head */
        rows.rows = batch->wanted, rows.pick = batch->want, rows.a = f.normed, rows.weight = m->out_norm;
        each_row(context, &rows, norm_row);
        zj_linear_job head = {.parts = 1, .rows = batch->wanted, .x = f.normed, .ldx = m->hidden, .ldy = m->head.n};
        head.matrix[0] = &m->head, head.y[0] = batch->logits;
        head.scratch = f.scratch, head.scratch_floats = f.scratch_floats;
        linear(context, &head);
        rows.pick = NULL, rows.a = batch->logits;
        if (m->logit_scale != 0.0f) each_row(context, &rows, logits_row);
    }
    free(tile);
    return 0;
}

/* --- each kernel alone, for tests --- */

int zj_linear(zj_context *context, const zj_matrix *w, const float *x, int rows, float *y, int add) {
    size_t floats = round16(scratch_floats(context, w->k));
    float *scratch = reserve(context, floats * zj_pool_threads(context->pool));
    if (!scratch) return -1;
    zj_linear_job job = {.parts = 1, .matrix = {w}, .y = {y}, .x = x, .rows = rows, .add = add};
    job.ldx = w->k, job.ldy = w->n;
    job.scratch = scratch, job.scratch_floats = floats;
    linear(context, &job);
    return 0;
}

void zj_unpack(zj_context *context, const zj_matrix *w, float *out) {
    for (int row = 0; row < w->n; row++) context->isa->unpack(w, row, out + (size_t)row * w->k);
}

void zj_norm(zj_context *context, const float *x, const float *weight, float eps, int rows, int width, float *y) {
    for (int row = 0; row < rows; row++)
        context->isa->norm(x + (size_t)row * width, weight, eps, width, y + (size_t)row * width);
}

void zj_gate_mul(zj_context *context, int activation, float *gate, const float *up, int width) {
    context->isa->gate_mul[activation](gate, up, width);
}

/* qkv: [rows][q, k, v], changed in place; k and v go to the pages of the model's layer `index`. */
void zj_rotate_store(zj_context *context, const zj_model *m, const zj_batch *batch, int index, float *qkv) {
    rows_job rows = {.isa = context->isa, .model = m, .batch = batch, .rows = batch->rows, .b = qkv};
    rows.layer = &m->layer[index], rows.layer_index = index;
    rows.ldb = (m->heads + 2 * m->kv_heads) * m->head_dim;
    each_row(context, &rows, store_row);
}

/* q: [rows][heads * head_dim], rotated; out: the same shape. */
int zj_attend(zj_context *context, const zj_model *m, const zj_batch *batch, int layer, const float *q, float *out) {
    zj_tile *tile = malloc(sizeof *tile * (batch->rows ? (size_t)batch->rows : 1));
    if (!tile) return -1;
    zj_attend_job job = {.model = m, .batch = batch, .layer = layer, .q = q, .out = out, .tile = tile};
    job.ldq = m->heads * m->head_dim;
    job.tiles = make_tiles(m, batch, tile);
    size_t partial = plan_attention(&job, m->layer[layer].window, zj_pool_threads(context->pool));
    job.partial = partial ? reserve(context, partial) : NULL;
    int failed = partial && !job.partial;
    if (!failed) attend(context, &job);
    free(tile);
    return failed ? -1 : 0;
}
