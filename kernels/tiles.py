"""What one block of threads of a matrix product computes, which tile that is, and how it is stored.

Outputs lie on the side of the tensor core's tile that is 64 or 128 wide at every count of rows, rows on the other (why:
matmul.py). So a tile's size changes which block computes a number, and never how.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from .numbers import narrow

GROUP = 8  # tiles of outputs that share their tiles of rows in the second cache
MULTIPROCESSORS = 132  # H100 and H200; only a tile's size hangs on it


@dataclass(frozen=True)
class Tile:
    """`outputs` by `rows`, and how it is launched."""

    outputs: int
    rows: int
    warps: int
    stages: int


def tiles_of(tile: Tile, rows: int, n: int) -> int:
    """How many of them cover [rows, n]."""
    return -(-rows // tile.rows) * -(-n // tile.outputs)


@triton.jit
def tile_of(program, rows, n, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr):
    """The tile of outputs and of rows of a program: GROUP tiles of outputs go through all tiles of rows together."""
    output_tiles = tl.cdiv(n, BLOCK_N)
    row_tiles = tl.cdiv(rows, BLOCK_R)
    group = program // (GROUP * row_tiles)
    width = tl.minimum(output_tiles - group * GROUP, GROUP)
    inside = program % (GROUP * row_tiles)
    return group * GROUP + inside % width, inside // width


@triton.jit
def store_tile(acc, bias_ptr, y_ptr, outputs, row, rows, n, y_stride):
    """Adds the bias, rounds once and stores [outputs, rows] as y [rows, n]."""
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + outputs, mask=outputs < n, other=0.0).to(tl.float32)
        acc += bias[:, None]
    y_ptrs = y_ptr + row.to(tl.int64)[None, :] * y_stride + outputs[:, None]
    mask = (row < rows)[None, :] & (outputs < n)[:, None]
    tl.store(y_ptrs, narrow(acc, y_ptr.dtype.element_ty), mask=mask)
