"""The same operators in torch: the judge of the C kernels, and what runs where there are none.

A row's bits must not depend on the rows beside it, so every matrix product has a fixed shape: linear layers take
tiles of 16 rows, attention takes 16 rows against segments of 256 positions aligned to position 0. What is
missing is padded and masked. Slow for a single row, but exact in the same sense.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

TILE_ROWS = 16
SEGMENT = 256
BLOCK_TOKENS = 16
NUMERICS = "torch-fixed-1"
LAYOUT = "block.layer.kv.head.16.f32-1"


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, k] times weight [n, k] transposed, plus bias [n], in tiles of 16 rows."""
    rows = x.shape[0]
    padded = F.pad(x, (0, 0, 0, -rows % TILE_ROWS))
    out = torch.cat([F.linear(tile, weight) for tile in padded.split(TILE_ROWS)])[:rows]
    return out if bias is None else out + bias


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis of x [..., width]: of rows, or of each head of [rows, heads, head_dim]."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    return gate / (1 + torch.exp(-gate)) * up


def gelu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up, with GELU's tanh approximation, 0.5 g (1 + tanh(u)) = g / (1 + exp(-2u))."""
    twice_u = gate * (1.5957691216057308 + 0.07135481627159958 * gate * gate)
    return gate / (1 + torch.exp(-twice_u)) * up


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (2i, 2i + 1) of x [rows, heads, head_dim] by angles [rows, rope_dim / 2]; the rest stays."""
    width = 2 * cos.shape[1]
    a, b = x[..., 0:width:2], x[..., 1:width:2]
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((turned, x[..., width:]), -1)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, scale: float | None = None, window: int = 0
) -> torch.Tensor:
    """Causal attention of q [rows, heads, head_dim] at positions `first`, … over k, v [positions, kv_heads, head_dim].

    `scale` of the scores: head_dim^-0.5 if it is not given. `window`: a row sees that many positions, its own the
    last; 0: all. Returns [rows, heads, head_dim].
    """
    rows, heads, head_dim = q.shape
    scale = head_dim**-0.5 if scale is None else scale
    positions, kv_heads, _ = k.shape
    share = heads // kv_heads
    pad = (0, 0, 0, 0, 0, -positions % SEGMENT)
    keys = F.pad(k, pad).permute(1, 2, 0).contiguous()  # [kv_heads, head_dim, positions]
    values = F.pad(v, pad).permute(1, 0, 2).contiguous()
    out = []
    for at in range(0, rows, TILE_ROWS):
        tile = F.pad(q[at : at + TILE_ROWS], (0, 0, 0, 0, 0, -min(TILE_ROWS, rows - at) % TILE_ROWS))
        grouped = tile.view(TILE_ROWS, kv_heads, share, head_dim).permute(1, 0, 2, 3).reshape(kv_heads, -1, head_dim)
        row_position = first + at + torch.arange(TILE_ROWS).repeat_interleave(share)
        last = min(first + at + TILE_ROWS, positions)
        mixed = _fold(grouped.contiguous(), keys, values, row_position, last, scale, window)
        out.append(mixed.view(kv_heads, TILE_ROWS, share, head_dim).permute(1, 0, 2, 3).reshape(TILE_ROWS, heads, -1))
    return torch.cat(out)[:rows]


def _fold(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    row_position: torch.Tensor,
    last: int,
    scale: float,
    window: int,
) -> torch.Tensor:
    """One tile over its segments, each folded into (max, sum, out). q: [kv_heads, tile rows * share, head_dim].

    Segments below every row's window are left out: they would change nothing.
    """
    whole = q.new_full((*q.shape[:2], 1), -torch.inf)
    total, out = torch.zeros_like(whole), torch.zeros_like(q)
    lowest = max(int(row_position[0]) + 1 - window, 0) if window else 0
    for start in range(lowest // SEGMENT * SEGMENT, last, SEGMENT):
        position = torch.arange(start, start + SEGMENT)
        seen = row_position[:, None] >= position
        if window:
            seen &= row_position[:, None] < position + window
        scores = torch.bmm(q, keys[:, :, start : start + SEGMENT].contiguous()) * scale
        scores = scores.masked_fill(~seen, -torch.inf)
        top = torch.maximum(whole, scores.amax(-1, keepdim=True))
        # A row that sees nothing of a segment keeps what it has: factor 1, weights 0. One that saw none yet has 0.
        base = top.masked_fill(top == -torch.inf, 0.0)
        p = torch.exp(scores - base)
        factor = torch.exp(whole - base)
        total = total * factor + p.sum(-1, keepdim=True)
        out = out * factor + torch.bmm(p, values[:, start : start + SEGMENT].contiguous())
        whole = top
    return out / total
