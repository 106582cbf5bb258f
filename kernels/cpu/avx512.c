/* The kernels compiled for AVX-512; chosen at run time (zjcpu.c). */
#if defined(__x86_64__)
#include "zjcpu.h"

#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define TARGET __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")))
#pragma clang attribute push(TARGET, apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif

#include "vec_avx512.h"

#include "isa.h"

ISA_TABLE(zj_isa_avx512, "avx512");

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
