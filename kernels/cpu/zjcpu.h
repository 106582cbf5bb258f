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
#define ZJ_SEGMENT_BLOCKS (ZJ_SEGMENT / ZJ_BLOCK_TOKENS)
#define ZJ_QUERIES_MAX 64    /* query heads x rows of one attention tile */
#define ZJ_TILE_ROWS 8       /* rows of one sequence that share a pass over its keys */
#define ZJ_PARTS_MAX 3       /* matrices that read the same input in one parallel region */

/* Packed weights, in groups of 16 outputs (the last group is padded with zeros). A group is a run of blocks; what stands
 * as x[16] is of 16 outputs. The blocks keep the values and, but for a byte per small scale of Q4_K and Q5_K, the size
 * that GGUF gives them.
 * F32, F16, BF16: [k] { value[16] }
 * Q4_0: [k/32] { half scale[16]; uint32 code4[4][16] }
 * Q4_1: [k/32] { half scale[16]; half minimum[16]; uint32 code4[4][16] }
 * Q5_0: [k/32] { half scale[16]; uint32 code5[5][16] }
 * Q5_1: [k/32] { half scale[16]; half minimum[16]; uint32 code5[5][16] }
 * Q8_0: [k/32] { half scale[16]; int8 code[32][16] }
 * Q4_K: [k/256] { half scale[16]; half minimum[16], negated; [8] { uint8 scale[16]; uint8 minimum[16]; code4[4][16] } }
 * Q5_K: the same with code5[5][16]
 * Q6_K: [k/256] { half scale[16]; [8] { int8 scale[2][16]; uint32 code6[2][3][16] } }
 * code4: bits 4i of word c are k = 8c + i.
 * code5: bits 5i of word c are k = 6c + i, and the top bits of the five words are k = 30 and 31, lowest first.
 * code6, signed: bits 6i of word c are k = 5c + i, and the top bits of the three words are k = 15, lowest first. */
enum {
    ZJ_F32, ZJ_Q4_1, ZJ_Q8_0, ZJ_F16, ZJ_BF16, ZJ_Q4_0, ZJ_Q5_0, ZJ_Q5_1, ZJ_Q4_K, ZJ_Q5_K, ZJ_Q6_K, ZJ_FORMATS
};

typedef struct {
    int values;      /* k that one block covers */
    int file_bytes;  /* of a block of one output in a GGUF */
    int bytes;       /* of a packed block of 16 outputs */
    int head;        /* of them before the first run of 32 (K-quants) */
    int small;       /* of a run of 32 (or of the block), before its codes */
    int bits;        /* of a code; 0: plain numbers */
} zj_format;

/* Here, so that it folds into constants. */
static const zj_format zj_formats[ZJ_FORMATS] = {
    [ZJ_F32] = {1, 4, 64, 0, 0, 0},           [ZJ_F16] = {1, 2, 32, 0, 0, 0},
    [ZJ_BF16] = {1, 2, 32, 0, 0, 0},          [ZJ_Q4_0] = {32, 18, 288, 0, 32, 4},
    [ZJ_Q4_1] = {32, 20, 320, 0, 64, 4},      [ZJ_Q5_0] = {32, 22, 352, 0, 32, 5},
    [ZJ_Q5_1] = {32, 24, 384, 0, 64, 5},      [ZJ_Q8_0] = {32, 34, 544, 0, 32, 8},
    [ZJ_Q4_K] = {256, 144, 2368, 64, 32, 4},  [ZJ_Q5_K] = {256, 176, 2880, 64, 32, 5},
    [ZJ_Q6_K] = {256, 210, 3360, 32, 32, 6},
};

typedef struct {
    int32_t format, n, k, unused;
    const void *data;
} zj_matrix;

typedef struct {
    zj_matrix q, k, v, o, gate, up, down;
    const float *attn_norm, *ffn_norm;             /* [hidden] */
    /* Each may be NULL: that step is left out. */
    const float *q_bias, *k_bias, *v_bias;         /* [n of q, k, v] */
    const float *q_norm, *k_norm;                  /* [head_dim]: each head, before its rotation */
    const float *post_attn_norm, *post_ffn_norm;   /* [hidden]: what attention and feed-forward add to the stream */
    int32_t window;                                /* a row sees that many positions, its own the last; 0: all */
    int32_t local;                                 /* 1: rotate by the local angles of the model */
} zj_layer;

enum { ZJ_SILU = 0, ZJ_GELU_TANH = 1 };

typedef struct {
    int32_t layers, hidden, ffn, heads, kv_heads, head_dim, rope_dim, activation;
    float eps, scale;             /* scale: of attention scores, 1/sqrt(head_dim) */
    const float *cos, *sin;       /* [context][rope_dim/2] */
    const float *out_norm;        /* [hidden] */
    zj_matrix embed, head;        /* both [vocab, hidden] */
    const zj_layer *layer;
    const float *cos_local, *sin_local; /* as cos and sin, of the layers that say so */
    float embed_scale, logit_scale;     /* factors of the embedding's rows and of the logits; 0: none */
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
    int layer, window;            /* window: see zj_layer */
    const float *q;               /* [rows][ldq], rotated */
    int ldq;
    float *out;                   /* [rows][heads * head_dim] */
    const zj_tile *tile;
    int tiles;
    int split;                    /* tasks per (tile, kv head), each a run of segments; 1: no partial results */
    int split_segments;
    float *partial;               /* [row][head][segment of its tile] { max, sum[16], out[head_dim] } */
    size_t partial_floats;        /* of one (row, head) */
} zj_attend_job;

typedef struct {
    const char *name;
    int tile_groups;              /* groups of 16 outputs that one expanded tile holds */
    void (*linear_plan)(zj_linear_job *job, int threads);
    void (*linear_task)(void *job, int index, int worker);
    void (*attend_task)(void *job, int index, int worker);
    void (*attend_fold)(void *job, int index, int worker);     /* after attend_task, where split > 1 */
    void (*norm)(const float *x, const float *weight, float eps, int width, float *y);
    void (*gate_mul[2])(float *gate, const float *up, int width); /* by activation: gate = act(gate) * up */
    void (*rotate)(float *x, int heads, int head_dim, int rope_dim, const float *cos, const float *sin);
    void (*unpack)(const zj_matrix *w, int row, float *out);   /* one row of the matrix */
} zj_isa;

extern const zj_isa zj_isa_portable;
#if defined(__x86_64__)
extern const zj_isa zj_isa_avx2, zj_isa_avx512;
#endif

void zj_pack_rows(int format, const uint8_t *rows, int first, int end, int k, uint8_t *packed); /* pack.c */
float zj_half(uint16_t half); /* IEEE half to float, exactly */

#endif
