/* The kernels of one instruction set: the bodies over whatever V means, and their table. */
#define UNROLL _Pragma("GCC unroll 8")

#include "rows.h"
#include "formats.h"
#include "linear.h"
#include "attention.h"

#define ISA_TABLE(symbol, text)                                                                          \
    const zj_isa symbol = {text, MICRO_GROUPS, linear_plan, linear_task, attend_task, attend_fold, norm, \
                           {silu_mul, gelu_mul}, rotate, unpack}
