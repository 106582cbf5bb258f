"""RMSNorm of rows, with the residual stream added first.

    s = x + residual,   y = s / sqrt(mean(s^2) + eps) * (weight + offset)

    x, residual  [rows, width] bf16 (or fp16, fp32); or [rows, heads, width] with any strides but the last
    weight       [width] bf16 or fp32; `offset` is 1 for weights that are stored less one
    returns      (y, s) in x's type

Bytes: 2 read and 2 written per value and element of 2 bytes: 8 * rows * width with a residual, 4 without. Sums are
fp32. `s` is rounded to its type before it is squared, so that whoever reads it again gets the same y. One tile holds a
whole row and its size depends on the width alone, so a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from zjournal.kernels.build import NUMERICS, Build
from zjournal.kernels.numbers import narrow

WIDTH_MAX = 16384  # a row stays in registers
_TILE = 1024  # values of narrow rows that one program takes


def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    offset: float = 0.0,
    out: tuple[torch.Tensor, torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, summed). Without a residual `summed` is x itself. `out`: where both go, strides as they like but the
    last; the second may be `residual` or x, and None without a residual."""
    width = x.shape[-1]
    assert x.dim() in (2, 3) and 0 < width <= WIDTH_MAX, x.shape
    assert weight.shape == (width,) and weight.stride(0) == 1, weight.shape
    normed, summed = out if out else (torch.empty_like(x, memory_format=torch.contiguous_format), None)
    if residual is None:
        summed = x
    elif summed is None:
        summed = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, inner = x.numel() // width, x.shape[1] if x.dim() == 3 else 1
    others = (normed, summed) if residual is None else (normed, summed, residual)
    for each in (x, *others):
        assert each.shape == x.shape and (each.stride(-1) == 1 or width == 1), (each.shape, each.stride())
    if rows == 0:
        return normed, summed
    tile_rows, block, warps = tiles(width)
    _rmsnorm[(triton.cdiv(rows, tile_rows),)](
        x,
        residual,
        weight,
        normed,
        None if residual is None else summed,
        rows,
        *_strides(x),
        *_strides(x if residual is None else residual),
        *_strides(normed),
        *_strides(summed),
        eps,
        offset,
        inner=inner,
        width=width,
        TILE_ROWS=tile_rows,
        BLOCK=block,
        num_warps=warps,
        **NUMERICS,
    )
    return normed, summed


def reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in torch, computed in the type of `weight` (give it fp64 for a judge)."""
    summed = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    wide = summed.to(torch.promote_types(weight.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (weight + offset)
    return normed.to(x.dtype) if weight.dtype != torch.float64 else normed, summed


@triton.jit(do_not_specialize=["rows"])
def _rmsnorm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    summed_ptr,
    rows,
    x_row,
    x_head,
    residual_row,
    residual_head,
    normed_row,
    normed_head,
    summed_row,
    summed_head,
    eps,
    offset,
    inner: tl.constexpr,
    width: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    outer = (row // inner).to(tl.int64)[:, None]  # rows times their stride can pass 2^31
    head = (row % inner)[:, None]
    value = tl.load(x_ptr + outer * x_row + head * x_head + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        at = outer * residual_row + head * residual_head + column[None, :]
        value += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        stored = narrow(value, summed_ptr.dtype.element_ty)
        tl.store(summed_ptr + outer * summed_row + head * summed_head + column[None, :], stored, mask=inside)
        value = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / width + eps)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32) + offset
    result = value * scale[:, None] * weight[None, :]
    at = outer * normed_row + head * normed_head + column[None, :]
    tl.store(normed_ptr + at, narrow(result, normed_ptr.dtype.element_ty), mask=inside)


def tiles(width: int) -> tuple[int, int, int]:
    """Rows of a program, the padded width, warps: a function of the width alone."""
    block = triton.next_power_of_2(width)
    tile_rows = max(_TILE // block, 1)
    return tile_rows, block, min(max(tile_rows * block // 512, 1), 16)


def _strides(x: torch.Tensor) -> tuple[int, int]:
    return x.stride(0), x.stride(1) if x.dim() == 3 else 0


def builds() -> list[Build]:
    """Hidden widths of the served models with a residual, head norms without."""
    found = []
    for name, width, inner, residual, sweep in (
        ("576", 576, 1, True, False),
        ("1152", 1152, 1, True, True),
        ("2560", 2560, 1, True, True),
        ("4096", 4096, 1, True, False),
        ("8192", 8192, 1, True, True),
        ("16384", 16384, 1, True, False),
        ("heads.64", 64, 9, False, True),
        ("heads.128", 128, 32, False, False),
        ("heads.256", 256, 4, False, True),
    ):
        tile_rows, block, warps = tiles(width)
        strides = ("x_row", "residual_row", "normed_row", "summed_row", "x_head", "normed_head")
        signature = {"x_ptr": "*bf16", "weight_ptr": "*fp32", "normed_ptr": "*bf16", "rows": "i32"}
        signature |= dict.fromkeys(strides, "i32:16") | {"eps": "fp32", "offset": "fp32"}
        signature |= {"residual_head": "i32:16", "summed_head": "i32:16"}
        constexprs: dict[str, int | None] = {"inner": inner, "width": width, "TILE_ROWS": tile_rows, "BLOCK": block}
        if residual:
            signature |= {"residual_ptr": "*bf16", "summed_ptr": "*bf16"}
        else:
            constexprs |= {"residual_ptr": None, "summed_ptr": None}
        found.append(Build(f"rmsnorm.{name}", _rmsnorm, signature, constexprs, warps, sweep=sweep))
    return found
