"""Rows of the embedding, and packed matrices in bf16: y[i] = bf16(scale * table[token[i]]).

tokens int32 [rows], table bf16 [vocabulary, hidden] or `Packed`, y bf16 [rows, hidden]. A token of -1 gives zeros (the
padded rows of a graph). A packed weight is expanded in fp32, exactly, then rounded once.

Moved: the table's bytes of these rows and 2 rows hidden of y: for a decode step, little beside the launch itself.
`dequantise` is the same over all outputs of a matrix in order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from .build import NUMERICS, Build
from .numbers import narrow
from .packed import KINDS, Packed, signature, unpack, weight_tile

BLOCK_ROWS = 16
BLOCK_COLUMNS = 128


@triton.jit(do_not_specialize=["rows"])
def _embed_kernel(
    tokens_ptr,
    table_ptr,
    y_ptr,
    rows,
    hidden,
    table_stride,
    y_stride,
    scale,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens_ptr + row, mask=row < rows, other=-1)
    inside = (column < hidden)[None, :]
    source = table_ptr + token.to(tl.int64)[:, None] * table_stride + column[None, :]
    values = tl.load(source, mask=(token >= 0)[:, None] & inside, other=0.0).to(tl.float32) * scale
    target = y_ptr + row.to(tl.int64)[:, None] * y_stride + column[None, :]
    tl.store(target, narrow(values, tl.bfloat16), mask=(row < rows)[:, None] & inside)


@triton.jit(do_not_specialize=["rows", "first"])
def _embed_packed_kernel(
    tokens_ptr,
    low_ptr,
    high_ptr,
    scales_ptr,
    mins_ptr,
    supers_ptr,
    y_ptr,
    rows,
    n,
    hidden,
    y_stride,
    scale,
    first,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    WEIGHTS_PER_SCALE: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * STEP + tl.arange(0, STEP)
    if tokens_ptr is None:
        token = tl.minimum(first + row, n - 1)
    else:
        token = tl.load(tokens_ptr + row, mask=row < rows, other=-1)
    stored = tl.maximum(token, 0).to(tl.int64)
    values = weight_tile(
        low_ptr,
        high_ptr,
        scales_ptr,
        mins_ptr,
        supers_ptr,
        tl.program_id(1),
        stored,
        n,
        BLOCK_R,
        STEP,
        LOW_BITS,
        HIGH_BITS,
        OFFSET,
        WEIGHTS_PER_SCALE,
    )
    if WEIGHTS_PER_SCALE == 0:
        values *= tl.load(scales_ptr + stored)[:, None]
    values = tl.where((token >= 0)[:, None], values * scale, 0.0)
    target = y_ptr + row.to(tl.int64)[:, None] * y_stride + column[None, :]
    tl.store(target, narrow(values, tl.bfloat16), mask=(row < rows)[:, None] & (column < hidden)[None, :])


def embed(
    tokens: torch.Tensor, weight: torch.Tensor | Packed, scale: float = 1.0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows `tokens` (int32 [rows], from -1 to the vocabulary's size) of `weight` times `scale`: bf16 [rows, hidden]."""
    assert tokens.dtype == torch.int32 and tokens.dim() == 1 and tokens.is_contiguous(), (tokens.dtype, tokens.shape)
    if isinstance(weight, Packed):
        return _launch_packed(tokens, weight, scale, 0, tokens.shape[0], out)
    assert weight.dtype == torch.bfloat16 and weight.stride(1) == 1, (weight.dtype, weight.stride())
    rows, hidden = tokens.shape[0], weight.shape[1]
    out = _result(rows, hidden, out, tokens.device)
    if rows:
        _embed_kernel[(triton.cdiv(rows, BLOCK_ROWS), triton.cdiv(hidden, BLOCK_COLUMNS))](
            tokens,
            weight,
            out,
            rows,
            hidden,
            weight.stride(0),
            out.stride(0),
            float(scale),
            BLOCK_R=BLOCK_ROWS,
            BLOCK=BLOCK_COLUMNS,
            **NUMERICS,
        )
    return out


def dequantise(weight: Packed, first: int, count: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Outputs first, first + 1, … of a packed matrix, bf16 [count, k]: fp32 values rounded once."""
    assert first >= 0 and first + count <= weight.n, (first, count, weight.n)
    return _launch_packed(None, weight, 1.0, first, count, out)


def reference(tokens: torch.Tensor, weight: torch.Tensor | Packed, scale: float = 1.0) -> torch.Tensor:
    """The same in torch."""
    table = unpack(weight) if isinstance(weight, Packed) else weight.float()
    there = (tokens >= 0)[:, None]
    return torch.where(there, table[tokens.clamp(min=0).long()] * scale, 0.0).bfloat16()


def _result(rows: int, hidden: int, out: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    if out is None:
        return torch.empty(rows, hidden, dtype=torch.bfloat16, device=device)
    assert out.shape == (rows, hidden) and out.dtype == torch.bfloat16 and out.stride(1) == 1, (out.shape, out.dtype)
    return out


def _launch_packed(
    tokens: torch.Tensor | None, weight: Packed, scale: float, first: int, rows: int, out: torch.Tensor | None
) -> torch.Tensor:
    out, spec = _result(rows, weight.k, out, weight.device), weight.spec
    if rows == 0:
        return out
    _embed_packed_kernel[(triton.cdiv(rows, BLOCK_ROWS), weight.steps)](
        tokens,
        weight.low,
        weight.high,
        weight.scales,
        weight.mins,
        weight.supers,
        out,
        rows,
        weight.n,
        weight.k,
        out.stride(0),
        float(scale),
        first,
        LOW_BITS=spec.low_bits,
        HIGH_BITS=spec.high_bits,
        OFFSET=spec.offset,
        WEIGHTS_PER_SCALE=spec.group,
        STEP=weight.step,
        BLOCK_R=BLOCK_ROWS,
        **NUMERICS,
    )
    return out


def builds() -> Iterator[Build]:
    """Rows of a bf16 table; rows and whole matrices of each packed kind."""
    sizes = {"rows": "i32", "hidden": "i32:16", "y_stride": "i32:16", "scale": "fp32"}
    yield Build(
        name="embed-bf16",
        kernel=_embed_kernel,
        signature={"tokens_ptr": "*i32", "table_ptr": "*bf16", "y_ptr": "*bf16", "table_stride": "i32:16", **sizes},
        constexprs={"BLOCK_R": BLOCK_ROWS, "BLOCK": BLOCK_COLUMNS},
    )
    for kind, spec in KINDS.items():
        types, absent = signature(kind)
        for whole in (False, True):
            constants: dict[str, int | None] = {
                "LOW_BITS": spec.low_bits,
                "HIGH_BITS": spec.high_bits,
                "OFFSET": spec.offset,
            }
            constants |= {"WEIGHTS_PER_SCALE": spec.group, "STEP": 128, "BLOCK_R": BLOCK_ROWS, **absent}
            tokens = {} if whole else {"tokens_ptr": "*i32"}
            yield Build(
                name=f"{'dequantise' if whole else 'embed'}-{kind}",
                kernel=_embed_packed_kernel,
                signature={"y_ptr": "*bf16", "n": "i32:16", "first": "i32", **sizes, **types, **tokens},
                constexprs=constants | ({"tokens_ptr": None} if whole else {}),
                sweep=(kind, whole) not in (("Q4_1", False), ("Q6_K", True)),
            )
