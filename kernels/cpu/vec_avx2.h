/* Sixteen fp32 lanes in two AVX2 registers. */
#include <immintrin.h>

typedef struct {
    __m256 a, b;
} V;
typedef struct {
    __m256i a, b;
} I;

#define MICRO_ROWS 6
#define MICRO_GROUPS 1
#define DIRECT_ROWS 4
#define DIRECT_GROUPS(rows) ((rows) == 1 ? 2 : 1)
#define FEW_REGISTERS 1
#define ATTEND_VECTORS 1

#define EACH(expression_a, expression_b) ((V){expression_a, expression_b})
INLINE V v_zero(void) { return EACH(_mm256_setzero_ps(), _mm256_setzero_ps()); }
INLINE V v_set1(float x) { return EACH(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
INLINE V v_load(const float *p) { return EACH(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
INLINE void v_store(float *p, V x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
INLINE V v_fma(V x, V y, V z) { return EACH(_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)); }
INLINE V v_add(V x, V y) { return EACH(_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)); }
INLINE V v_sub(V x, V y) { return EACH(_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)); }
INLINE V v_mul(V x, V y) { return EACH(_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)); }
INLINE V v_div(V x, V y) { return EACH(_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)); }
INLINE V v_max(V x, V y) { return EACH(_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)); }
INLINE V v_min(V x, V y) { return EACH(_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)); }
/* where x < y: 0, else z */
INLINE V v_zero_below(V x, V y, V z) {
    return EACH(_mm256_and_ps(_mm256_cmp_ps(x.a, y.a, _CMP_NLT_UQ), z.a),
                _mm256_and_ps(_mm256_cmp_ps(x.b, y.b, _CMP_NLT_UQ), z.b));
}
/* x in lanes below count, else y */
INLINE V v_first(int count, V x, V y) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256 a = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane));
    __m256 b = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count - 8), lane));
    return EACH(_mm256_blendv_ps(y.a, x.a, a), _mm256_blendv_ps(y.b, x.b, b));
}
INLINE __m256 pow2_half(__m256 t) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(t), 23),
                                                _mm256_set1_epi32(127 << 23)));
}
/* 2^n, where the low bits of t hold n (see v_exp) */
INLINE V v_pow2(V t) { return EACH(pow2_half(t.a), pow2_half(t.b)); }
INLINE float v_hmax(V x) {
    __m256 m = _mm256_max_ps(x.a, x.b);
    __m128 n = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    n = _mm_max_ps(n, _mm_movehl_ps(n, n));
    return _mm_cvtss_f32(_mm_max_ss(n, _mm_shuffle_ps(n, n, 1)));
}
INLINE V v_half(const uint16_t *p) {
    return EACH(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8))));
}
INLINE V v_int8(const int8_t *p) {
    return EACH(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8)))));
}
INLINE I i_load(const uint32_t *p) {
    return (I){_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 8))};
}
INLINE V v_bfloat(const uint16_t *p) {
    __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    __m256i b = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p + 8)));
    return EACH(_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)));
}
INLINE V v_uint8(const uint8_t *p) {
    return EACH(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p))),
                _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8)))));
}
INLINE V code(I word, int shift, int mask) {
    const __m256i bits = _mm256_set1_epi32(mask);
    return EACH(_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(word.a, shift), bits)),
                _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(word.b, shift), bits)));
}
/* the unsigned 4 or 5 bits, and the signed 6, at `shift` of each lane as a float */
INLINE V v_code4(I word, int shift) { return code(word, shift, 15); }
INLINE V v_code5(I word, int shift) { return code(word, shift, 31); }
INLINE V v_code6(I word, int shift) {
    return EACH(_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(word.a, 26 - shift), 26)),
                _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(word.b, 26 - shift), 26)));
}
INLINE I i_or(I x, I y) { return (I){_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
INLINE I i_left(I x, int shift) { return (I){_mm256_slli_epi32(x.a, shift), _mm256_slli_epi32(x.b, shift)}; }
INLINE I i_right(I x, int shift) { return (I){_mm256_srli_epi32(x.a, shift), _mm256_srli_epi32(x.b, shift)}; }
