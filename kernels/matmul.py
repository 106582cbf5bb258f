"""The row-invariant matrix product: y = x W^T + b, where a row's bits do not depend on how many rows stand beside it.

x [rows, k] bf16, W [n, k] bf16 (or `Packed`, see matmul_packed.py), b [n], y [rows, n] bf16 or fp32; sums in fp32, k
strictly in order.

    y[r, o] = round(sum over k of W[o, k] * x[r, k] + b[o])

Moved per call: 2 n k bytes of weights for each tile of rows (all rows of a decode step are one), 2 rows k of x for
each tile of outputs, mostly from the second cache, and 2 rows n of y. Operations: 2 rows n k.

Why the bits cannot change with the number of rows. The outputs lie on the side of the tensor core's tile that is always
64 (or 128) wide, and the rows on the side that may be 16 to 256. So a GPU of compute capability 9.0 multiplies one row
and 4,096 rows with the same instruction, wgmma m64nXk16, where X only counts rows; it never falls back to mma.sync for
small counts, whose inner order of summation is another unit's and is nowhere documented. Capability 8.0 has
mma.sync m16n8k16 alone, 10.0 tcgen05.mma; a test reads that from the code compiled for each. Each instruction adds 16
products to the accumulator, in the order of k; there is no split of k and no choice made by timing. What the count of
rows does choose is how many outputs and rows a block of threads takes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from . import matmul_packed
from .build import NUMERICS, Build
from .embed import dequantise
from .numbers import dot
from .packed import Packed, unpack
from .tiles import GROUP, MULTIPROCESSORS, Tile, store_tile, tile_of, tiles_of

BLOCK_K = 64
EXPANDED_MAX = 64 << 20  # bytes of bf16 that a packed matrix is expanded to at once


DECODE = (Tile(64, 16, 4, 8), Tile(64, 32, 4, 6), Tile(64, 64, 4, 5), Tile(64, 128, 4, 4))
PREFILL = (Tile(128, 256, 8, 3), Tile(128, 128, 8, 4))
TILES = (*DECODE, *PREFILL)


def tile_for(rows: int, n: int) -> Tile:
    """The smallest tile that holds all rows; for many rows the largest that still gives every multiprocessor work."""
    for tile in DECODE:
        if rows <= tile.rows:
            return tile
    for tile in PREFILL:
        if tiles_of(tile, rows, n) >= MULTIPROCESSORS:
            return tile
    return DECODE[-1]


@triton.jit(do_not_specialize=["rows"])  # one row, 16 rows and others: the same code
def _linear_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    rows,
    n,
    k,
    x_stride,
    w_stride,
    y_stride,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    output_tile, row_tile = tile_of(tl.program_id(0), rows, n, BLOCK_N, BLOCK_R, GROUP)
    outputs = output_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = row_tile * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_K)
    # Past the last output the last one is read again: no mask in the loop, and the result is not stored.
    w_ptrs = w_ptr + tl.minimum(outputs, n - 1).to(tl.int64)[:, None] * w_stride + column[None, :]
    x_ptrs = x_ptr + row.to(tl.int64)[None, :] * x_stride + column[:, None]
    there = (row < rows)[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_R), dtype=tl.float32)
    for start in range(0, k, BLOCK_K):
        if EVEN_K:
            w = tl.load(w_ptrs)
            x = tl.load(x_ptrs, mask=there, other=0.0)
        else:
            inside = column < k - start
            w = tl.load(w_ptrs, mask=inside[None, :], other=0.0)
            x = tl.load(x_ptrs, mask=there & inside[:, None], other=0.0)
        acc = dot(w, x, acc)
        w_ptrs += BLOCK_K
        x_ptrs += BLOCK_K
    store_tile(acc, bias_ptr, y_ptr, outputs, row, rows, n, y_stride)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | Packed,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """x bf16 [rows, k] times weight bf16 [n, k] transposed, plus bias [n] (bf16 or fp32): [rows, n].

    Returned in `out_dtype` (bf16 or fp32) or written to `out`, which may be columns of a wider tensor. A row has the
    same bits in any batch.
    """
    assert x.dtype == torch.bfloat16 and x.dim() == 2 and x.stride(1) == 1, (x.dtype, x.shape, x.stride())
    rows, n = x.shape[0], weight.n if isinstance(weight, Packed) else weight.shape[0]
    out = result(x, n, out, out_dtype)
    assert bias is None or (bias.shape == (n,) and bias.is_contiguous()), (bias.shape, n)
    if rows == 0:
        return out
    if not isinstance(weight, Packed):
        return _launch(x, weight, bias, out)
    if rows <= matmul_packed.ROWS_MAX or not weight.spec.group:
        return matmul_packed.launch(x, weight, bias, out)
    for first, values in _expanded(weight):
        end = first + values.shape[0]
        _launch(x, values, None if bias is None else bias[first:end], out[:, first:end])
    return out


def linear_fast(
    x: torch.Tensor,
    weight: torch.Tensor | Packed,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The same by torch's own product: faster for many rows, but a row's bits depend on how many there are. Packed
    weights of few rows stay with the packed kernel: expanding them would take longer than the product."""
    if isinstance(weight, Packed):
        if x.shape[0] <= matmul_packed.ROWS_MAX or not weight.spec.group:
            return linear(x, weight, bias, out, out_dtype)
        out = result(x, weight.n, out, out_dtype)
        for first, values in _expanded(weight):
            end = first + values.shape[0]
            out[:, first:end] = _torch_linear(x, values, None if bias is None else bias[first:end], out.dtype)
        return out
    if out is None:
        return _torch_linear(x, weight, bias, out_dtype)
    return result(x, weight.shape[0], out, out_dtype).copy_(_torch_linear(x, weight, bias, out.dtype))


def reference(x: torch.Tensor, weight: torch.Tensor | Packed, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The judge: fp64 [rows, n], weights rounded to bf16 as the tensor cores take them (INT8: as they are)."""
    if isinstance(weight, Packed):
        values = unpack(weight)
        weight = values if not weight.spec.group else values.bfloat16()
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


def result(x: torch.Tensor, n: int, out: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """`out`, checked, or memory for it."""
    if out is None:
        return torch.empty(x.shape[0], n, dtype=out_dtype, device=x.device)
    assert out.shape == (x.shape[0], n) and out.stride(1) == 1, (out.shape, out.stride(), n)
    assert out.dtype in (torch.bfloat16, torch.float32), out.dtype
    return out


def tiles_taken(rows: int, weight: torch.Tensor | Packed) -> set[Tile]:
    """What `linear` needs compiled for this weight and so many rows."""
    if not isinstance(weight, Packed):
        return {tile_for(rows, weight.shape[0])}
    if rows <= matmul_packed.ROWS_MAX or not weight.spec.group:
        return {matmul_packed.tile_for(weight.spec, rows)}
    return {tile_for(rows, count) for _, count in _parts(weight)}


def _parts(weight: Packed) -> Iterator[tuple[int, int]]:
    """The outputs that are expanded at once: the first, and how many."""
    at_once = max(EXPANDED_MAX // (2 * weight.k) // 128 * 128, 128)
    for first in range(0, weight.n, at_once):
        yield first, min(at_once, weight.n - first)


def _expanded(weight: Packed) -> Iterator[tuple[int, torch.Tensor]]:
    """The matrix in bf16, a few outputs after the other: (first output, [outputs, k])."""
    for first, count in _parts(weight):
        yield first, dequantise(weight, first, count)


def _torch_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bfloat16:
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))
    # Logits: the sums themselves, not rounded to bf16 first.
    sums = torch.mm(x, weight.T, out_dtype=dtype) if x.is_cuda else x.float() @ weight.float().T
    return sums if bias is None else sums + bias.float()


def _launch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    rows, k = x.shape
    n = weight.shape[0]
    assert weight.dtype == torch.bfloat16 and weight.shape == (n, k) and weight.stride(1) == 1, (weight.shape, k)
    tile = tile_for(rows, n)
    _linear_kernel[(tiles_of(tile, rows, n),)](
        x,
        weight,
        bias,
        out,
        rows,
        n,
        k,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        EVEN_K=k % BLOCK_K == 0,
        BLOCK_N=tile.outputs,
        BLOCK_R=tile.rows,
        BLOCK_K=BLOCK_K,
        GROUP=GROUP,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **NUMERICS,
    )
    return out


def builds() -> Iterator[Build]:
    """Every tile; logits in fp32; a bias; and a k that no step divides, which no served model has."""
    few = (TILES[0], TILES[3], TILES[4])  # what a decode step and a prompt take; the others are left to the long sweep
    for tile in TILES:
        yield _build("", tile, {"y_ptr": "*bf16"}, {"bias_ptr": None, "EVEN_K": True}, sweep=tile not in few)
        yield _build("-logits", tile, {"y_ptr": "*fp32"}, {"bias_ptr": None, "EVEN_K": True}, sweep=True)
        yield _build("-bias", tile, {"y_ptr": "*bf16", "bias_ptr": "*bf16"}, {"EVEN_K": True}, sweep=tile != TILES[-1])
        yield _build("-odd", tile, {"y_ptr": "*bf16"}, {"bias_ptr": None, "EVEN_K": False}, sweep=True)


def _build(suffix: str, tile: Tile, types: dict[str, str], constants: dict, sweep: bool = False) -> Build:
    sizes = dict.fromkeys(("n", "k", "x_stride", "w_stride", "y_stride"), "i32:16")
    return Build(
        name=f"matmul-{tile.outputs}x{tile.rows}{suffix}",
        kernel=_linear_kernel,
        signature={"x_ptr": "*bf16", "w_ptr": "*bf16", "rows": "i32", **sizes, **types},
        constexprs={"BLOCK_N": tile.outputs, "BLOCK_R": tile.rows, "BLOCK_K": BLOCK_K, "GROUP": GROUP, **constants},
        num_warps=tile.warps,
        num_stages=tile.stages,
        dot=True,
        sweep=sweep,
    )
