"""The matrix product of matmul.py over weights that stay quantised in device memory (layout: packed.py).

    w[o, k] = bf16((code - offset) * scale + min)      y[r, o] = round(sum over k of w[o, k] * x[r, k] + b[o])

A tile of weights is expanded in registers, in fp32, rounded once to bf16 and handed to the tensor core from there.
So the sum is that of the bf16 kernel over the expanded matrix: the same instruction, the same order of k. INT8 alone is
`y = round(scale[o] * sum over k of code[o, k] * x[r, k] + b[o])`, whose weights are not rounded.

Moved per call: n k (bits per weight) / 8 bytes of weights for each tile of rows, and x and y as there. Expanding takes
6 (Q8_0) to 10 (Q6_K) instructions per weight and lane, whatever the rows: up to ROWS_MAX rows it is done here; beyond,
the launcher of matmul.py expands the matrix into bf16 once and multiplies that.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from .build import NUMERICS, Build
from .numbers import dot, narrow
from .packed import KINDS, Kind, Packed, signature, weight_tile
from .tiles import GROUP, Tile, store_tile, tile_of, tiles_of

ROWS_MAX = 64  # more rows are multiplied with an expanded matrix
REGISTERS_MAX = 255  # or ptxas spills two to six of them to let one block more live on a multiprocessor
TILES = (Tile(64, 16, 4, 6), Tile(64, 32, 4, 4), Tile(64, 64, 4, 3))
WIDE = Tile(64, 128, 8, 3)  # INT8 of many rows: it is never expanded


def tile_for(spec: Kind, rows: int) -> Tile:
    """The smallest tile that holds all rows, else the largest of that kind."""
    tiles = TILES if spec.group else (*TILES, WIDE)
    return next((tile for tile in tiles if rows <= tile.rows), tiles[-1])


@triton.jit(do_not_specialize=["rows"])
def _packed_kernel(
    x_ptr,
    low_ptr,
    high_ptr,
    scales_ptr,
    mins_ptr,
    supers_ptr,
    bias_ptr,
    y_ptr,
    rows,
    n,
    k,
    x_stride,
    y_stride,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    WEIGHTS_PER_SCALE: tl.constexpr,
    EVEN_K: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP: tl.constexpr,
):
    output_tile, row_tile = tile_of(tl.program_id(0), rows, n, BLOCK_N, BLOCK_R, GROUP)
    outputs = output_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = row_tile * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, STEP)
    stored = tl.minimum(outputs, n - 1).to(tl.int64)
    x_ptrs = x_ptr + row.to(tl.int64)[None, :] * x_stride + column[:, None]
    there = (row < rows)[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_R), dtype=tl.float32)
    for step in range(tl.cdiv(k, STEP)):
        if EVEN_K:
            x = tl.load(x_ptrs, mask=there, other=0.0)
        else:  # the weights past k are 0
            x = tl.load(x_ptrs, mask=there & (column < k - step * STEP)[:, None], other=0.0)
        w = weight_tile(
            low_ptr,
            high_ptr,
            scales_ptr,
            mins_ptr,
            supers_ptr,
            step,
            stored,
            n,
            BLOCK_N,
            STEP,
            LOW_BITS,
            HIGH_BITS,
            OFFSET,
            WEIGHTS_PER_SCALE,
        )
        acc = dot(narrow(w, tl.bfloat16), x, acc)
        x_ptrs += STEP
    if WEIGHTS_PER_SCALE == 0:
        acc *= tl.load(scales_ptr + stored)[:, None]
    store_tile(acc, bias_ptr, y_ptr, outputs, row, rows, n, y_stride)


def launch(x: torch.Tensor, weight: Packed, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """x bf16 [rows, k], rows > 0, into `out` [rows, n]; what matmul.linear has checked."""
    rows, k = x.shape
    assert k == weight.k, (k, weight.k)
    tile = tile_for(weight.spec, rows)
    _packed_kernel[(tiles_of(tile, rows, weight.n),)](
        x,
        weight.low,
        weight.high,
        weight.scales,
        weight.mins,
        weight.supers,
        bias,
        out,
        rows,
        weight.n,
        k,
        x.stride(0),
        out.stride(0),
        **_constants(weight.spec, k, weight.step, tile),
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=REGISTERS_MAX,
        **NUMERICS,
    )
    return out


def _constants(spec: Kind, k: int, step: int, tile: Tile) -> dict[str, int | bool]:
    return {
        "LOW_BITS": spec.low_bits,
        "HIGH_BITS": spec.high_bits,
        "OFFSET": spec.offset,
        "WEIGHTS_PER_SCALE": spec.group,
        "EVEN_K": k % step == 0,
        "STEP": step,
        "BLOCK_N": tile.outputs,
        "BLOCK_R": tile.rows,
        "GROUP": GROUP,
    }


def builds() -> Iterator[Build]:
    """All kinds, tiles and steps; the few that are not left to the long sweep are the usual ones and the largest."""
    one_row = [(kind, TILES[0], 128) for kind in ("Q4_1", "Q8_0", "Q4_K")]
    chosen = [*one_row, ("Q4_K", TILES[-1], 128), ("Q6_K", TILES[-1], 128), ("INT8", WIDE, 128)]
    for kind, spec in KINDS.items():
        for tile in TILES if spec.group else (*TILES, WIDE):
            for step in (128,) if spec.supers else (128, 64):
                yield _build(kind, tile, step, sweep=(kind, tile, step) not in chosen)


def _build(kind: str, tile: Tile, step: int, sweep: bool) -> Build:
    types, absent = signature(kind)
    sizes = {"rows": "i32", "n": "i32:16", "k": "i32:16", "x_stride": "i32:16", "y_stride": "i32:16"}
    return Build(
        name=f"matmul_packed-{kind}-{tile.outputs}x{tile.rows}-{step}",
        kernel=_packed_kernel,
        signature={"x_ptr": "*bf16", "y_ptr": "*bf16", **sizes, **types},
        constexprs={"bias_ptr": None, **absent, **_constants(KINDS[kind], step, step, tile)},
        num_warps=tile.warps,
        num_stages=tile.stages,
        dot=True,
        sweep=sweep,
        maxnreg=REGISTERS_MAX,
    )
