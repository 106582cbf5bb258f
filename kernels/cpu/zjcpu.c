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
    int64_t groups = (n + ZJ_LANES - 1) / ZJ_LANES;
    if (format == ZJ_F32) return groups * k * ZJ_LANES * 4;
    return groups * (k / 32) * (format == ZJ_Q4 ? ZJ_Q4_BYTES : ZJ_Q8_BYTES);
}

void zj_pack_f32(const float *rows, int n, int k, float *packed) {
    for (int i = 0; i < n; i++)
        for (int j = 0; j < k; j++)
            packed[((size_t)(i / ZJ_LANES) * k + j) * ZJ_LANES + i % ZJ_LANES] = rows[(size_t)i * k + j];
}

/* GGUF Q4_1: { half scale, half minimum, 16 bytes }; byte i holds k = i (low nibble) and k = i + 16 (high). */
void zj_pack_q4_1(const uint8_t *rows, int n, int k, uint8_t *packed) {
    for (int i = 0; i < n; i++)
        for (int b = 0; b < k / 32; b++, rows += 20) {
            uint8_t *to = packed + ((size_t)(i / ZJ_LANES) * (k / 32) + b) * ZJ_Q4_BYTES;
            int lane = i % ZJ_LANES;
            memcpy(to + 2 * lane, rows, 2);
            memcpy(to + 32 + 2 * lane, rows + 2, 2);
            uint32_t *word = (uint32_t *)(to + 64);
            for (int j = 0; j < 32; j++) {
                uint32_t nibble = j < 16 ? rows[4 + j] & 15 : rows[4 + j - 16] >> 4;
                word[j / 8 * ZJ_LANES + lane] |= nibble << 4 * (j % 8);
            }
        }
}

/* GGUF Q8_0: { half scale, 32 int8 }. */
void zj_pack_q8_0(const uint8_t *rows, int n, int k, uint8_t *packed) {
    for (int i = 0; i < n; i++)
        for (int b = 0; b < k / 32; b++, rows += 34) {
            uint8_t *to = packed + ((size_t)(i / ZJ_LANES) * (k / 32) + b) * ZJ_Q8_BYTES;
            memcpy(to + 2 * (i % ZJ_LANES), rows, 2);
            for (int j = 0; j < 32; j++) to[32 + j * ZJ_LANES + i % ZJ_LANES] = rows[2 + j];
        }
}

/* --- regions over rows --- */

typedef struct {
    const zj_isa *isa;
    const zj_model *model;
    const zj_batch *batch;
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

static void embed_row(rows_job *job, int row) {
    job->isa->unpack(&job->model->embed, job->batch->token[row], job->x + (size_t)row * job->model->hidden);
}

static void norm_row(rows_job *job, int row) {
    size_t width = (size_t)job->model->hidden, from = job->pick ? (size_t)job->pick[row] : (size_t)row;
    job->isa->norm(job->x + from * width, job->weight, job->model->eps, (int)width, job->a + row * width);
}

/* Rotates q and k of a row and puts k and v into the row's place in its block. a: [rows][q, k, v]. */
static void store_row(rows_job *job, int row) {
    const zj_model *m = job->model;
    const zj_batch *batch = job->batch;
    int position = batch->position[row], at = position % ZJ_BLOCK_TOKENS, half = m->rope_dim / 2;
    const float *cos = m->cos + (size_t)position * half, *sin = m->sin + (size_t)position * half;
    float *q = job->b + (size_t)row * job->ldb, *k = q + m->heads * m->head_dim, *v = k + m->kv_heads * m->head_dim;
    job->isa->rotate(q, m->heads + m->kv_heads, m->head_dim, m->rope_dim, cos, sin);
    int block = batch->table[(size_t)batch->sequence[row] * batch->table_stride + position / ZJ_BLOCK_TOKENS];
    size_t half_floats = (size_t)m->head_dim * ZJ_BLOCK_TOKENS;
    float *to = batch->kv + ((size_t)block * m->layers + job->layer_index) * m->kv_heads * 2 * half_floats;
    for (int h = 0; h < m->kv_heads; h++, to += 2 * half_floats, k += m->head_dim, v += m->head_dim) {
        for (int d = 0; d < m->head_dim; d++) to[d * ZJ_BLOCK_TOKENS + at] = k[d];
        memcpy(to + half_floats + (size_t)at * m->head_dim, v, sizeof(float) * m->head_dim);
    }
}

static void silu_row(rows_job *job, int row) {
    float *gate = job->b + (size_t)row * job->ldb;
    job->isa->silu_mul(gate, gate + job->model->ffn, job->model->ffn);
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

/* Decides how the tiles are cut into tasks. Returns the floats that partial results need. */
static size_t plan_attention(zj_attend_job *job, int threads) {
    const zj_model *m = job->model;
    int last = 0;
    for (int row = 0; row < job->batch->rows; row++)
        if (job->batch->position[row] > last) last = job->batch->position[row];
    int segments = last / ZJ_SEGMENT + 1, tasks = job->tiles * m->kv_heads;
    job->split = 1;
    if (threads == 1 || job->tiles != job->batch->rows || tasks >= 8 * threads || segments < 2) return 0;
    int wanted = (8 * threads + tasks - 1) / tasks;
    job->split_segments = (segments + wanted - 1) / wanted;
    job->split = (segments + job->split_segments - 1) / job->split_segments;
    if (job->split == 1) return 0;
    job->partial_floats = round16((size_t)job->split * job->split_segments * (1 + ZJ_LANES + m->head_dim));
    return job->partial_floats * job->tiles * m->heads;
}

static void attend(zj_context *context, zj_attend_job *job) {
    int kv_heads = job->model->kv_heads;
    zj_pool_run(context->pool, context->isa->attend_task, job, job->tiles * kv_heads * job->split);
    for (int tile = 0; job->split > 1 && tile < job->tiles; tile++)
        for (int kv_head = 0; kv_head < kv_heads; kv_head++) context->isa->attend_fold(job, tile, kv_head);
}

static size_t scratch_floats(const zj_context *context, int k) {
    return (size_t)context->isa->tile_groups * ZJ_LANES * k;
}

/* --- the decoder --- */

typedef struct {
    float *x, *normed, *qkv, *mixed, *wide, *scratch, *partial;
    size_t scratch_floats;
} buffers;

static void run_layer(zj_context *context, const zj_model *m, const zj_batch *batch, zj_attend_job *attention,
                      const buffers *f, int index) {
    const zj_layer *layer = &m->layer[index];
    const int q_width = m->heads * m->head_dim, kv_width = m->kv_heads * m->head_dim;
    const int qkv_width = q_width + 2 * kv_width;
    rows_job rows = {.isa = context->isa, .model = m, .batch = batch, .layer_index = index, .rows = batch->rows};
    rows.x = f->x;
    zj_linear_job job = {.rows = batch->rows, .scratch = f->scratch, .scratch_floats = f->scratch_floats};

    rows.a = f->normed, rows.weight = layer->attn_norm;
    each_row(context, &rows, norm_row);
    job.parts = 3, job.x = f->normed, job.ldx = m->hidden, job.ldy = qkv_width;
    job.matrix[0] = &layer->q, job.y[0] = f->qkv;
    job.matrix[1] = &layer->k, job.y[1] = f->qkv + q_width;
    job.matrix[2] = &layer->v, job.y[2] = f->qkv + q_width + kv_width;
    linear(context, &job);

    rows.b = f->qkv, rows.ldb = qkv_width;
    each_row(context, &rows, store_row);
    attention->layer = index;
    attend(context, attention);
    job.parts = 1, job.x = f->mixed, job.ldx = q_width, job.ldy = m->hidden, job.add = 1;
    job.matrix[0] = &layer->o, job.y[0] = f->x;
    linear(context, &job);

    rows.weight = layer->ffn_norm;
    each_row(context, &rows, norm_row);
    job.parts = 2, job.x = f->normed, job.ldx = m->hidden, job.ldy = 2 * m->ffn, job.add = 0;
    job.matrix[0] = &layer->gate, job.y[0] = f->wide;
    job.matrix[1] = &layer->up, job.y[1] = f->wide + m->ffn;
    linear(context, &job);

    rows.b = f->wide, rows.ldb = 2 * m->ffn;
    each_row(context, &rows, silu_row);
    job.parts = 1, job.x = f->wide, job.ldx = 2 * m->ffn, job.ldy = m->hidden, job.add = 1;
    job.matrix[0] = &layer->down, job.y[0] = f->x;
    linear(context, &job);
}

int zj_forward(zj_context *context, const zj_model *m, const zj_batch *batch) {
    const size_t n = (size_t)batch->rows, q_width = (size_t)m->heads * m->head_dim;
    const size_t qkv_width = q_width + 2 * (size_t)m->kv_heads * m->head_dim;
    int widest = m->ffn > m->hidden ? m->ffn : m->hidden;
    if ((int)q_width > widest) widest = (int)q_width;
    zj_tile *tile = malloc(sizeof *tile * (n ? n : 1));
    if (!tile) return -1;
    zj_attend_job attention = {.model = m, .batch = batch, .tile = tile, .tiles = make_tiles(m, batch, tile)};
    size_t partial = plan_attention(&attention, zj_pool_threads(context->pool));
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

void zj_silu_mul(zj_context *context, float *gate, const float *up, int width) {
    context->isa->silu_mul(gate, up, width);
}

/* qkv: [rows][q, k, v], changed in place; k and v go to the pages of layer `layer`. */
void zj_rotate_store(zj_context *context, const zj_model *m, const zj_batch *batch, int layer, float *qkv) {
    rows_job rows = {.isa = context->isa, .model = m, .batch = batch, .layer_index = layer, .rows = batch->rows};
    rows.b = qkv;
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
    size_t partial = plan_attention(&job, zj_pool_threads(context->pool));
    job.partial = partial ? reserve(context, partial) : NULL;
    int failed = partial && !job.partial;
    if (!failed) attend(context, &job);
    free(tile);
    return failed ? -1 : 0;
}
