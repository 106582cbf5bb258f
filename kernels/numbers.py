"""bf16 that is the same under triton's interpreter as on a GPU: rounding and matrix products.

The interpreter keeps bf16 as raw 16-bit integers. It cuts an fp32 off where a GPU rounds to the nearest even, and its
`tl.dot` multiplies the raw integers. `narrow` and `dot` do there, by hand, what a GPU does by itself; on a GPU they are
`.to` and `tl.dot` and nothing else.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Whether kernels run under TRITON_INTERPRET=1. Fixed when triton is imported, as the interpreter itself.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """fp32 `x` as `dtype` (fp32 or bf16), rounded to the nearest even; NaN stays NaN."""
    if dtype == tl.bfloat16 and INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b for bf16 `a` [m, k] and `b` [k, n], fp32 `acc`. A product of two bf16 numbers is exact in fp32.

    Interpreted, products are added one after the other in the order of k: numpy's own product has another order for
    each shape, and threads that wait for each other.
    """
    if INTERPRETED:
        # By hand: the interpreter's own conversion takes many passes and loses the smallest numbers.
        left = (a.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        right = (b.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        # triton has no tensors of more than 2^20 elements: large tiles are multiplied 16 values of k at a time.
        K: tl.constexpr = a.shape[1]
        PART: tl.constexpr = K if a.shape[0] * K * b.shape[1] <= 1 << 20 else 16
        parts = tl.arange(0, K // PART)
        left = left.reshape(a.shape[0], K // PART, PART)
        right = right.reshape(K // PART, PART, b.shape[1])
        first = (tl.arange(0, PART) == 0)[None, :, None]
        for part in tl.static_range(K // PART):
            x = tl.sum(tl.where((parts == part)[None, :, None], left, 0.0), 1)
            y = tl.sum(tl.where((parts == part)[:, None, None], right, 0.0), 0)
            products = x[:, :, None] * y[None, :, :]
            acc = tl.sum(tl.where(first, products + acc[:, None, :], products), 1)
        return acc
    return tl.dot(a, b, acc)
