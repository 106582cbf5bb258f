/* Sixteen fp32 lanes in plain C. On aarch64 the compiler makes NEON of these loops. */
#include <math.h>
#include <string.h>

typedef struct {
    float f[16];
} V;
typedef struct {
    uint32_t u[16];
} I;

#define MICRO_ROWS 4
#define MICRO_GROUPS 1
#define DIRECT_ROWS 4
#define DIRECT_GROUPS(rows) 1
#define FEW_REGISTERS 1
#define ATTEND_VECTORS 1

#define LANES(expression)                     \
    V r;                                      \
    for (int i = 0; i < 16; i++) r.f[i] = (expression); \
    return r
INLINE V v_zero(void) { LANES(0.0f); }
INLINE V v_set1(float x) { LANES(x); }
INLINE V v_load(const float *p) { LANES(p[i]); }
INLINE void v_store(float *p, V x) { memcpy(p, x.f, sizeof x.f); }
INLINE V v_fma(V x, V y, V z) { LANES(fmaf(x.f[i], y.f[i], z.f[i])); }
INLINE V v_add(V x, V y) { LANES(x.f[i] + y.f[i]); }
INLINE V v_sub(V x, V y) { LANES(x.f[i] - y.f[i]); }
INLINE V v_mul(V x, V y) { LANES(x.f[i] * y.f[i]); }
INLINE V v_div(V x, V y) { LANES(x.f[i] / y.f[i]); }
INLINE V v_max(V x, V y) { LANES(x.f[i] > y.f[i] ? x.f[i] : y.f[i]); }
INLINE V v_min(V x, V y) { LANES(x.f[i] < y.f[i] ? x.f[i] : y.f[i]); }
/* where x < y: 0, else z */
INLINE V v_zero_below(V x, V y, V z) { LANES(x.f[i] < y.f[i] ? 0.0f : z.f[i]); }
/* x in lanes below count, else y */
INLINE V v_first(int count, V x, V y) { LANES(i < count ? x.f[i] : y.f[i]); }
/* 2^n, where the low bits of t hold n (see v_exp) */
INLINE V v_pow2(V t) {
    V r;
    uint32_t u[16];
    memcpy(u, t.f, sizeof u);
    for (int i = 0; i < 16; i++) u[i] = (u[i] << 23) + (127u << 23);
    memcpy(r.f, u, sizeof u);
    return r;
}
INLINE float v_hmax(V x) {
    float m = x.f[0];
    for (int i = 1; i < 16; i++) m = m > x.f[i] ? m : x.f[i];
    return m;
}
INLINE V v_half(const uint16_t *p) { LANES(zj_half(p[i])); }
INLINE V v_int8(const int8_t *p) { LANES((float)p[i]); }
INLINE I i_load(const uint32_t *p) {
    I r;
    memcpy(r.u, p, sizeof r.u);
    return r;
}
INLINE V v_bfloat(const uint16_t *p) {
    V r;
    uint32_t u[16];
    for (int i = 0; i < 16; i++) u[i] = (uint32_t)p[i] << 16;
    memcpy(r.f, u, sizeof u);
    return r;
}
INLINE V v_uint8(const uint8_t *p) { LANES((float)p[i]); }
/* the unsigned 4 or 5 bits, and the signed 6, at `shift` of each lane as a float */
INLINE V v_code4(I word, int shift) { LANES((float)((word.u[i] >> shift) & 15)); }
INLINE V v_code5(I word, int shift) { LANES((float)((word.u[i] >> shift) & 31)); }
INLINE V v_code6(I word, int shift) { LANES((float)((int)(((word.u[i] >> shift) & 63) ^ 32) - 32)); }
#define WORDS(expression)                     \
    I r;                                      \
    for (int i = 0; i < 16; i++) r.u[i] = (expression); \
    return r
INLINE I i_or(I x, I y) { WORDS(x.u[i] | y.u[i]); }
INLINE I i_left(I x, int shift) { WORDS(x.u[i] << shift); }
INLINE I i_right(I x, int shift) { WORDS(x.u[i] >> shift); }
