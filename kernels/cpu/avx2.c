/* The kernels compiled for AVX2 with FMA and F16C; chosen at run time (zjcpu.c). */
#if defined(__x86_64__)
#include "zjcpu.h"

#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define TARGET __attribute__((target("avx2,fma,f16c")))
#pragma clang attribute push(TARGET, apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include "vec_avx2.h"

#include "isa.h"

ISA_TABLE(zj_isa_avx2, "avx2");

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
