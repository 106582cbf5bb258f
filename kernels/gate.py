"""The gate of a feed-forward: act(gate) * up, with SiLU, or GELU in its tanh approximation.

    gate_up  [rows, 2 * ffn] bf16 (or fp16, fp32): the gate in the first half of a row, up in the second
    returns  [rows, ffn]

silu(g) = g / (1 + e^-g); gelu(g) = g / (1 + e^-2u), 2u = 2 sqrt(2 / pi) (g + 0.044715 g^3), which is
0.5 g (1 + tanh u). Bytes: 6 * rows * ffn in bf16 (4 read, 2 written). Computed in fp32, rounded once. Element by
element, so a value's bits depend on nothing beside it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from zjournal.kernels.build import NUMERICS, Build
from zjournal.kernels.numbers import narrow

KINDS = ("silu", "gelu_tanh")
_BLOCK, _WARPS = 2048, 8


def gated(gate_up: torch.Tensor, kind: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """[rows, ffn] of gate_up [rows, 2 * ffn], whose rows may stand apart."""
    rows, width = gate_up.shape
    assert kind in KINDS and width % 2 == 0 and gate_up.stride(1) == 1, (kind, gate_up.shape, gate_up.stride())
    ffn = width // 2
    out = gate_up.new_empty(rows, ffn) if out is None else out
    assert out.shape == (rows, ffn) and out.stride(1) == 1, (out.shape, out.stride())
    if out.numel():
        grid = (rows * triton.cdiv(ffn, _BLOCK),)
        strides = gate_up.stride(0), out.stride(0)
        _gated[grid](gate_up, out, ffn, *strides, GELU=kind == "gelu_tanh", BLOCK=_BLOCK, num_warps=_WARPS, **NUMERICS)
    return out


def reference(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """The same in torch, in gate_up's type (give it fp64 for a judge)."""
    gate, up = gate_up.chunk(2, -1)
    return (F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="tanh")) * up


@triton.jit
def _gated(gate_up_ptr, out_ptr, ffn, gate_up_row, out_row, GELU: tl.constexpr, BLOCK: tl.constexpr):
    # One axis: the second of a grid ends at 65,535, and a prefill can have more rows.
    blocks = tl.cdiv(ffn, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)  # rows times their stride can pass 2^31
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < ffn
    start = gate_up_ptr + row * gate_up_row
    gate = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + ffn + column, mask=inside, other=0.0).to(tl.float32)
    steep = gate * (1.5957691216057308 + 0.07135481627159958 * gate * gate) if GELU else gate
    result = gate / (1.0 + tl.exp(-steep)) * up
    tl.store(out_ptr + row * out_row + column, narrow(result, out_ptr.dtype.element_ty), mask=inside)


def builds() -> list[Build]:
    """Both activations; the width is no part of the code."""
    signature = {"gate_up_ptr": "*bf16", "out_ptr": "*bf16", "ffn": "i32:16"}
    signature |= {"gate_up_row": "i32:16", "out_row": "i32:16"}
    return [
        Build(f"gate.{kind}", _gated, signature, {"GELU": kind == "gelu_tanh", "BLOCK": _BLOCK}, _WARPS)
        for kind in KINDS
    ]
