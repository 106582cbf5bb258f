/* The kernels in plain C: for any machine, and the judge of the others. */
#include "zjcpu.h"

#define INLINE static inline __attribute__((always_inline))

#include "vec_portable.h"

#include "isa.h"

ISA_TABLE(zj_isa_portable, "portable");
