/* What the C kernels of the CPU path share: shapes in memory, the thread pool, and the table of one instruction set.
 *
 * One arithmetic for all: fp32, and every sum is `acc = fma(x, w, acc)` with its index strictly in order. So AVX-512,
 * AVX2 and plain C give the same bits, and a row's result depends on nothing but that row: not on the rows beside it,
 * not on the number of threads, not on how a prompt was cut into steps.
 */
#ifndef ZJCPU_H
#define ZJCPU_H

#include <stddef.h>
#include <stdint.h>

#define ZJ_LANES 16          /* outputs side by side in a packed weight, and positions in a KV block */
#define ZJ_BLOCK_TOKENS 16
#define ZJ_SEGMENT 64        /* positions whose softmax is summed before it is folded into the whole */
#define ZJ_QUERIES_MAX 64    /* query heads x rows of one attention tile */
#define ZJ_TILE_ROWS 8       /* rows of one sequence that share a pass over its keys */
#define ZJ_PARTS_MAX 3       /* matrices that read the same input in one parallel region */

/* Packed weights, in groups of 16 outputs (the last group is padded with zeros):
 * F32: [group][k][16] float
 * Q4:  [group][k/32] { half scale[16]; half minimum[16]; uint32 word[4][16] }, nibble j of word[c][n] is k = 8c + j
 * Q8:  [group][k/32] { half scale[16]; int8 q[32][16] }
 */
enum { ZJ_F32 = 0, ZJ_Q4 = 1, ZJ_Q8 = 2 };
#define ZJ_Q4_BYTES 320
#define ZJ_Q8_BYTES 544

typedef struct {
    int32_t format, n, k, unused;
    const void *data;
} zj_matrix;

typedef struct {
    zj_matrix q, k, v, o, gate, up, down;
    const float *attn_norm, *ffn_norm; /* [hidden] */
} zj_layer;

typedef struct {
    int32_t layers, hidden, ffn, heads, kv_heads, head_dim, rope_dim, unused;
    float eps, scale;             /* scale: of attention scores, 1/sqrt(head_dim) */
    const float *cos, *sin;       /* [context][rope_dim/2] */
    const float *out_norm;        /* [hidden] */
    zj_matrix embed, head;        /* both [vocab, hidden] */
    const zj_layer *layer;
} zj_model;

/* One step. Row i is the token at `position[i]` of sequence `sequence[i]`; rows of one sequence stand together, in
 * order. `table` is [sequences][table_stride] block numbers. `kv` is [block][layer][kv_head] { K [head_dim][16];
 * V [16][head_dim] }. Logits are computed for the rows named in `want`. */
typedef struct {
    int32_t rows, wanted, table_stride, unused;
    const int32_t *token, *position, *sequence, *table, *want;
    float *kv;
    float *logits;                /* [wanted][vocab] */
} zj_batch;

/* --- thread pool (pool.c) --- */

typedef struct zj_pool zj_pool;
typedef void (*zj_task)(void *job, int index, int worker);
zj_pool *zj_pool_new(int threads);
void zj_pool_free(zj_pool *pool);
int zj_pool_threads(const zj_pool *pool);
void zj_pool_run(zj_pool *pool, zj_task task, void *job, int count); /* returns when all `count` tasks are done */

/* --- jobs: the arguments of one parallel region --- */

typedef struct {
    int parts;
    const zj_matrix *matrix[ZJ_PARTS_MAX];
    float *y[ZJ_PARTS_MAX];       /* row stride ldy */
    int tiles[ZJ_PARTS_MAX];      /* set by linear_plan */
    const float *x;               /* [rows][ldx] */
    int rows, ldx, ldy, add;      /* add: y += x W^T, else y = x W^T */
    int row_chunk, row_chunks, tile_groups;
    float *scratch;               /* one expanded tile per worker */
    size_t scratch_floats;
} zj_linear_job;

typedef struct {
    int row, rows;                /* rows of one sequence, adjacent */
} zj_tile;

typedef struct {
    const zj_model *model;
    const zj_batch *batch;
    int layer;
    const float *q;               /* [rows][ldq], rotated */
    int ldq;
    float *out;                   /* [rows][heads * head_dim] */
    const zj_tile *tile;
    int tiles;
    int split;                    /* tasks per (tile, kv head), each a run of segments; 1: no partial results */
    int split_segments;
    float *partial;               /* [tile][head][split_segments * split] { max, sum[16], out[head_dim] } */
    size_t partial_floats;        /* of one (tile, head) */
} zj_attend_job;

typedef struct {
    const char *name;
    int tile_groups;              /* groups of 16 outputs that one expanded tile holds */
    void (*linear_plan)(zj_linear_job *job, int threads);
    void (*linear_task)(void *job, int index, int worker);
    void (*attend_task)(void *job, int index, int worker);
    void (*attend_fold)(const zj_attend_job *job, int tile, int kv_head);
    void (*norm)(const float *x, const float *weight, float eps, int width, float *y);
    void (*silu_mul)(float *gate, const float *up, int width); /* gate = silu(gate) * up */
    void (*rotate)(float *x, int heads, int head_dim, int rope_dim, const float *cos, const float *sin);
    void (*unpack)(const zj_matrix *w, int row, float *out);   /* one row of the matrix */
} zj_isa;

extern const zj_isa zj_isa_portable;
#if defined(__x86_64__)
extern const zj_isa zj_isa_avx2, zj_isa_avx512;
#endif

float zj_half(uint16_t half); /* IEEE half to float, exactly */

#endif
