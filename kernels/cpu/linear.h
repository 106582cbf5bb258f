/* y[M,N] = x[M,K] W[N,K]^T for one instruction set.
 *
 * For each output: acc = 0; for k in order: acc = fma(x[k], w[k], acc), with w as formats.h has it. Up to DIRECT_ROWS rows are multiplied straight from the packed weights (bytes moved: the weights once). More rows
 * expand a tile of MICRO_GROUPS x 16 outputs once and run a register-blocked kernel over it; same sums, same bits.
 */

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

INLINE void direct(const int F, const int M, const int G, const zj_matrix *w, int group, const float *x, int ldx,
                   float *y, int ldy, int add) {
    V acc[DIRECT_ROWS][GROUPS_MAX];
    const sink to = {.x = x, .ldx = ldx, .acc = acc};
    const size_t stride = group_bytes(w);
    UNROLL for (int r = 0; r < M; r++) UNROLL for (int g = 0; g < G; g++) acc[r][g] = v_zero();
    walk(F, M, G, (const uint8_t *)w->data + (size_t)group * stride, stride, w->k, &to);
    UNROLL for (int r = 0; r < M; r++) UNROLL for (int g = 0; g < G; g++) {
        int n = (group + g) * ZJ_LANES;
        put(y + (size_t)r * ldy + n, acc[r][g], w->n - n, add);
    }
}

/* Each a function of its own: side by side in one they are too much for the compiler to keep the sums in registers. */
#define DIRECT(F, M)                                                                                             \
    static __attribute__((noinline)) void direct_##F##_##M(const zj_matrix *w, int group, int groups,            \
                                                           const float *x, int ldx, float *y, int ldy, int add) { \
        for (; groups >= DIRECT_GROUPS(M); groups -= DIRECT_GROUPS(M), group += DIRECT_GROUPS(M))                \
            direct(F, M, DIRECT_GROUPS(M), w, group, x, ldx, y, ldy, add);                                       \
        for (; groups > 0; groups--, group++) direct(F, M, 1, w, group, x, ldx, y, ldy, add);                    \
    }
#if DIRECT_ROWS == 8
#define EACH_ROWS(DO, F) DO(F, 1) DO(F, 2) DO(F, 3) DO(F, 4) DO(F, 5) DO(F, 6) DO(F, 7) DO(F, 8)
#else
#define EACH_ROWS(DO, F) DO(F, 1) DO(F, 2) DO(F, 3) DO(F, 4)
#endif
#define DIRECT_FORMAT(F) EACH_ROWS(DIRECT, F)
EACH_FORMAT(DIRECT_FORMAT)

typedef void (*direct_rows)(const zj_matrix *w, int group, int groups, const float *x, int ldx, float *y, int ldy,
                            int add);
#define NAME(F, M) direct_##F##_##M,
#define ENTRY(F) [F] = {EACH_ROWS(NAME, F)},
static const direct_rows direct_by_rows[ZJ_FORMATS][DIRECT_ROWS] = {EACH_FORMAT(ENTRY)};

/* --- through an expanded tile [K][G * 16] --- */

INLINE void micro(const int M, const int G, const float *tile, int K, const float *x, int ldx, float *y, int ldy,
                  int lanes, int add) {
    V acc[MICRO_ROWS][MICRO_GROUPS];
    UNROLL for (int r = 0; r < M; r++)
        UNROLL for (int g = 0; g < G; g++) acc[r][g] = v_zero();
    for (int k = 0; k < K; k++, tile += G * ZJ_LANES) {
        V weight[MICRO_GROUPS];
        UNROLL for (int g = 0; g < G; g++) weight[g] = v_load(tile + g * ZJ_LANES);
        UNROLL for (int r = 0; r < M; r++) {
            V value = v_set1(x[(size_t)r * ldx + k]);
            UNROLL for (int g = 0; g < G; g++) acc[r][g] = v_fma(value, weight[g], acc[r][g]);
        }
    }
    UNROLL for (int r = 0; r < M; r++)
        UNROLL for (int g = 0; g < G; g++) put(y + (size_t)r * ldy + g * ZJ_LANES, acc[r][g], lanes - g * ZJ_LANES, add);
}

/* Functions of their own, for the same reason. */
#define MICRO(M)                                                                                                  \
    static __attribute__((noinline)) void micro_##M(const float *tile, int K, const float *x, int ldx, float *y,  \
                                                    int ldy, int lanes, int add) {                                \
        micro(M, MICRO_GROUPS, tile, K, x, ldx, y, ldy, lanes, add);                                              \
    }                                                                                                             \
    static __attribute__((noinline)) void single_##M(const float *tile, int K, const float *x, int ldx, float *y, \
                                                     int ldy, int lanes, int add) {                               \
        micro(M, 1, tile, K, x, ldx, y, ldy, lanes, add);                                                         \
    }
MICRO(1)
MICRO(2)
MICRO(3)
MICRO(4)
#if MICRO_ROWS > 4
MICRO(5)
MICRO(6)
#endif
#if MICRO_ROWS > 6
MICRO(7)
MICRO(8)
#endif

typedef void (*micro_rows)(const float *tile, int K, const float *x, int ldx, float *y, int ldy, int lanes, int add);
static const micro_rows micro_by_rows[2][MICRO_ROWS] = {
#if MICRO_ROWS == 8
    {single_1, single_2, single_3, single_4, single_5, single_6, single_7, single_8},
    {micro_1, micro_2, micro_3, micro_4, micro_5, micro_6, micro_7, micro_8},
#elif MICRO_ROWS == 6
    {single_1, single_2, single_3, single_4, single_5, single_6},
    {micro_1, micro_2, micro_3, micro_4, micro_5, micro_6},
#else
    {single_1, single_2, single_3, single_4},
    {micro_1, micro_2, micro_3, micro_4},
#endif
};

/* `full`: a tile of MICRO_GROUPS, else of one group. */
static void rows_of_tile(int full, const float *tile, int K, const float *x, int ldx, int rows, float *y, int ldy,
                         int lanes, int add) {
    while (rows > 0) {
        int pass = rows < MICRO_ROWS ? rows : MICRO_ROWS;
        /* What is left in two passes of like size: one of a row or two would wait for its own sums. */
        if (rows > MICRO_ROWS && rows < 2 * MICRO_ROWS) pass = (rows + 1) / 2;
        micro_by_rows[full][pass - 1](tile, K, x, ldx, y, ldy, lanes, add);
        rows -= pass, x += (size_t)pass * ldx, y += (size_t)pass * ldy;
    }
}

static void tile_full(const zj_matrix *w, int group, const float *x, int ldx, int rows, float *y, int ldy, int add,
                      float *tile) {
    expand(MICRO_GROUPS, w, group, tile);
    rows_of_tile(1, tile, w->k, x, ldx, rows, y, ldy, w->n - group * ZJ_LANES, add);
}

static void tile_single(const zj_matrix *w, int group, const float *x, int ldx, int rows, float *y, int ldy, int add,
                        float *tile) {
    expand(1, w, group, tile);
    rows_of_tile(0, tile, w->k, x, ldx, rows, y, ldy, w->n - group * ZJ_LANES, add);
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
        direct_by_rows[w->format][rows - 1](w, group, groups, x, job->ldx, y, job->ldy, job->add);
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
