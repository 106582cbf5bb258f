/* What is done to one row by itself: norm, rotation, SiLU, GELU; and the exponential that softmax shares with it. */

/* exp(x) within 2 ulp for -87 <= x <= 88; below it 0, above it exp(88). The same operations, so the same bits,
 * everywhere: x = n ln2 + r, |r| <= 0.35, exp(r) by its Taylor polynomial of degree 7 (errs by 5e-9), times 2^n. */
INLINE V v_exp(V x) {
    const V low = v_set1(-87.0f), magic = v_set1(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    V bounded = v_min(v_max(x, low), v_set1(88.0f));
    V t = v_fma(bounded, v_set1(1.44269504088896341f), magic);
    V n = v_sub(t, magic);
    /* ln2 in two parts; the first has few enough bits for its product with n to be exact */
    V r = v_fma(n, v_set1(-0.693145751953125f), bounded);
    r = v_fma(n, v_set1(-1.42860682030941723e-6f), r);
    V p = v_set1(1.0f / 5040);
    p = v_fma(p, r, v_set1(1.0f / 720));
    p = v_fma(p, r, v_set1(1.0f / 120));
    p = v_fma(p, r, v_set1(1.0f / 24));
    p = v_fma(p, r, v_set1(1.0f / 6));
    p = v_fma(p, r, v_set1(0.5f));
    p = v_fma(p, r, v_set1(1.0f));
    p = v_fma(p, r, v_set1(1.0f));
    return v_zero_below(x, low, v_mul(p, v_pow2(t)));
}

/* Sum of 16 lanes as one fixed tree: halves onto halves. */
INLINE float v_sum(V a) {
    float f[ZJ_LANES];
    v_store(f, a);
    for (int half = ZJ_LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) f[i] += f[i + half];
    return f[0];
}

/* y = x / sqrt(mean(x^2) + eps) * weight; width is a multiple of 16. */
static void norm(const float *x, const float *weight, float eps, int width, float *y) {
    V square = v_zero();
    for (int i = 0; i < width; i += ZJ_LANES) square = v_fma(v_load(x + i), v_load(x + i), square);
    V scale = v_set1(1.0f / sqrtf(v_sum(square) / (float)width + eps));
    for (int i = 0; i < width; i += ZJ_LANES) v_store(y + i, v_mul(v_mul(v_load(x + i), scale), v_load(weight + i)));
}

/* gate = gate / (1 + exp(-gate)) * up; width is a multiple of 16. */
static void silu_mul(float *gate, const float *up, int width) {
    for (int i = 0; i < width; i += ZJ_LANES) {
        V g = v_load(gate + i);
        V sigmoid = v_add(v_set1(1.0f), v_exp(v_sub(v_zero(), g)));
        v_store(gate + i, v_mul(v_div(g, sigmoid), v_load(up + i)));
    }
}

/* The tanh approximation of GELU, 0.5 g (1 + tanh(u)), u = sqrt(2/pi) (g + 0.044715 g^3); it is g / (1 + exp(-2u)). */
static void gelu_mul(float *gate, const float *up, int width) {
    const V linear = v_set1(1.5957691216057308f), cubic = v_set1(0.07135481627159958f);
    for (int i = 0; i < width; i += ZJ_LANES) {
        V g = v_load(gate + i);
        V twice_u = v_mul(g, v_fma(v_mul(g, g), cubic, linear));
        V sigmoid = v_add(v_set1(1.0f), v_exp(v_sub(v_zero(), twice_u)));
        v_store(gate + i, v_mul(v_div(g, sigmoid), v_load(up + i)));
    }
}

/* Rotates the pairs (2i, 2i + 1) of each head by the row's angles: GGUF's order for the llama family. */
static void rotate(float *x, int heads, int head_dim, int rope_dim, const float *cos, const float *sin) {
    for (int h = 0; h < heads; h++, x += head_dim)
        for (int i = 0; i < rope_dim / 2; i++) {
            float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * cos[i] - b * sin[i];
            x[2 * i + 1] = a * sin[i] + b * cos[i];
        }
}
