/* Sixteen fp32 lanes in one AVX-512 register. */
#include <immintrin.h>

typedef __m512 V;
typedef __m512i I;

#define MICRO_ROWS 8
#define MICRO_GROUPS 3
#define DIRECT_ROWS 8
#define DIRECT_GROUPS(rows) ((rows) <= 2 ? 6 : (rows) <= 4 ? 3 : 2)
#define FEW_REGISTERS 0
#define ATTEND_VECTORS 4

INLINE V v_zero(void) { return _mm512_setzero_ps(); }
INLINE V v_set1(float x) { return _mm512_set1_ps(x); }
INLINE V v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, V a) { _mm512_storeu_ps(p, a); }
INLINE V v_fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
INLINE V v_add(V a, V b) { return _mm512_add_ps(a, b); }
INLINE V v_sub(V a, V b) { return _mm512_sub_ps(a, b); }
INLINE V v_mul(V a, V b) { return _mm512_mul_ps(a, b); }
INLINE V v_div(V a, V b) { return _mm512_div_ps(a, b); }
INLINE V v_max(V a, V b) { return _mm512_max_ps(a, b); }
INLINE V v_min(V a, V b) { return _mm512_min_ps(a, b); }
/* where a < b: 0, else c */
INLINE V v_zero_below(V a, V b, V c) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ), c); }
/* a in lanes below count, else b */
INLINE V v_first(int count, V a, V b) { return _mm512_mask_mov_ps(b, (__mmask16)((1u << count) - 1), a); }
/* 2^n, where the low bits of t hold n (see v_exp) */
INLINE V v_pow2(V t) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(t), 23),
                                                _mm512_set1_epi32(127 << 23)));
}
INLINE float v_hmax(V a) { return _mm512_reduce_max_ps(a); }
INLINE V v_half(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE V v_int8(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE I i_load(const uint32_t *p) { return _mm512_loadu_si512(p); }
INLINE V v_bfloat(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
INLINE V v_uint8(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
/* The unsigned 4 or 5 bits at `shift` of each lane as a float: table look-ups that read only so many low bits of their
 * index. */
INLINE V v_code4(I word, int shift) {
    const V table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(word, (unsigned)shift), table);
}
INLINE V v_code5(I word, int shift) {
    const V low = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const V high = _mm512_setr_ps(16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
    return _mm512_permutex2var_ps(low, _mm512_srli_epi32(word, (unsigned)shift), high);
}
/* the signed 6 bits */
INLINE V v_code6(I word, int shift) {
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(word, 26 - (unsigned)shift), 26));
}
INLINE I i_or(I a, I b) { return _mm512_or_si512(a, b); }
INLINE I i_left(I a, int shift) { return _mm512_slli_epi32(a, (unsigned)shift); }
INLINE I i_right(I a, int shift) { return _mm512_srli_epi32(a, (unsigned)shift); }
