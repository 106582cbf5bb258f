"""One step of a decoder on a device: which kernel follows which. Imports torch and kernels alone.

    x = embed(token)
    per layer: qkv = norm(x) Wqkv; rotate, write K and V; attend; x += o Wo; x += act(norm(x) Wgu) Wd
    logits = norm(x)[want] Whead

Sums into the residual stream are made by the next norm's kernel, so that the stream is read and written once for
each. What a row gets depends on its own sequence alone, bit for bit, where every kernel of `Ops` keeps that; those of
`exact()` do. Nothing here looks at a device's numbers, so a pass can be captured as a graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

ALIGN = 4  # int32 values: what a kernel is handed begins at 16 bytes, as it does where it has memory of its own
EXACT_NUMERICS = "triton-exact-1"  # changes whenever a bit of KV or logits does
FAST_NUMERICS = "triton-cublas-1"

Matrix = Any  # bf16 [n, k], or kernels.packed.Packed


class Shape(Protocol):
    """The sizes and flags that are computed; checkpoint.decoder.Decoder is one."""

    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def eps(self) -> float: ...
    @property
    def scale(self) -> float: ...
    @property
    def embed_scale(self) -> float: ...
    @property
    def activation(self) -> Any: ...  # silu or gelu_tanh

    def window(self, layer: int) -> int: ...

    def is_local(self, layer: int) -> bool: ...


@dataclass(frozen=True)
class Ops:
    """The kernels of a pass, by their launchers; see their files."""

    embed: Callable[..., torch.Tensor]
    rmsnorm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rope_and_write: Callable[..., None]
    decode: Callable[..., torch.Tensor]
    prefill: Callable[..., torch.Tensor]
    gated: Callable[..., torch.Tensor]
    linear: Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Linear:
    """One matrix product, in one part or, where a file stores its rows in several types, in one for each."""

    parts: Sequence[Matrix]
    widths: Sequence[int]  # outputs of each
    bias: torch.Tensor | None = None  # [outputs of all]


@dataclass(frozen=True)
class Layer:
    """A layer's weights. Norms are fp32, with any offset added."""

    attn_norm: torch.Tensor
    qkv: Linear
    o: Linear
    ffn_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    head_norms: tuple[torch.Tensor, torch.Tensor] | None = None
    post_attn_norm: torch.Tensor | None = None
    post_ffn_norm: torch.Tensor | None = None


@dataclass(frozen=True)
class Loaded:
    """A model on its device. Angles are (cos, sin), fp32 [context, rope_dim / 2]."""

    shape: Shape
    ops: Ops
    embed: Matrix
    layers: Sequence[Layer]
    out_norm: torch.Tensor
    head: Linear
    angles: tuple[torch.Tensor, torch.Tensor]
    angles_local: tuple[torch.Tensor, torch.Tensor]


class Sizes(NamedTuple):
    """What the host knows of a step. `singles`: sequences at its beginning that have one row each."""

    rows: int
    sequences: int
    singles: int
    width: int  # of the block table
    wanted: int


class Step(NamedTuple):
    """A step's numbers on the device, int32; see decoder.Batch. `lengths` [singles]: positions that each row sees.

    A row that is there only to fill a graph has token and position -1: it reads and writes nothing.
    `starts` [others + 1]: the first row of each sequence that is no single, counted from the first of them.
    """

    sizes: Sizes
    token: torch.Tensor
    position: torch.Tensor
    sequence: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    want: torch.Tensor
    table: torch.Tensor


def pack(
    token: torch.Tensor, position: torch.Tensor, sequence: torch.Tensor, table: torch.Tensor, want: torch.Tensor
) -> tuple[Sizes, torch.Tensor]:
    """A batch (see decoder.Batch), on the host, as one int32 tensor, so that one copy brings it to the device."""
    sequences, width = table.shape
    counts = torch.bincount(sequence, minlength=sequences)
    singles = int((counts == 1).int().cumprod(0).sum())
    others = counts[singles:]
    sizes = Sizes(token.shape[0], sequences, singles, width, want.shape[0])
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), others.cumsum(0)))
    sections = (token, position, sequence, position[:singles] + 1, starts, want, table.reshape(-1))
    assert tuple(one.shape[0] for one in sections) == _lengths(sizes)
    return sizes, torch.cat([F.pad(one.int(), (0, -one.shape[0] % ALIGN)) for one in sections])


def unpack(sizes: Sizes, packed: torch.Tensor) -> Step:
    """The same, as views of what `pack` gave and what has been copied to the device since."""
    at = 0
    views: list[torch.Tensor] = []
    for length in _lengths(sizes):
        views.append(packed[at : at + length])
        at += -(-length // ALIGN) * ALIGN
    assert at == packed.shape[0], (at, packed.shape)
    token, position, sequence, lengths, starts, want, table = views
    wide = table.view(sizes.sequences, sizes.width)
    return Step(sizes, token, position, sequence, lengths, starts, want, wide)


def _lengths(sizes: Sizes) -> tuple[int, ...]:
    rows, sequences, singles, width, wanted = sizes
    return (rows, rows, rows, singles, sequences - singles + 1, wanted, sequences * width)


@torch.no_grad()
def forward(model: Loaded, step: Step, pages: torch.Tensor) -> torch.Tensor:
    """Computes the rows, stores their KV in `pages` [blocks, layers, 2, kv_heads, 16, head_dim].

    Returns logits, fp32 [wanted, vocab].
    """
    ops, shape = model.ops, model.shape
    x = ops.embed(step.token, model.embed, scale=shape.embed_scale)
    normed, x = ops.rmsnorm(x, model.layers[0].attn_norm, shape.eps)
    for index, layer in enumerate(model.layers):
        added = _apply(ops, _mix(model, step, pages, layer, normed, index), layer.o)
        added = _after(ops, added, layer.post_attn_norm, shape.eps)
        normed, x = ops.rmsnorm(added, layer.ffn_norm, shape.eps, residual=x)
        joined = ops.gated(_apply(ops, normed, layer.gate_up), shape.activation)
        added = _after(ops, _apply(ops, joined, layer.down), layer.post_ffn_norm, shape.eps)
        last = index + 1 == len(model.layers)
        following = model.out_norm if last else model.layers[index + 1].attn_norm
        normed, x = ops.rmsnorm(added, following, shape.eps, residual=x)
    if not step.sizes.wanted:
        return normed.new_empty((0, shape.vocab), dtype=torch.float32)
    return _apply(ops, normed.index_select(0, step.want), model.head, torch.float32)


def _mix(
    model: Loaded, step: Step, pages: torch.Tensor, layer: Layer, normed: torch.Tensor, index: int
) -> torch.Tensor:
    """Attention without its output projection: bf16 [rows, heads * head_dim]."""
    shape, ops = model.shape, model.ops
    rows, singles = step.sizes.rows, step.sizes.singles
    qkv = _apply(ops, normed, layer.qkv)
    cos, sin = model.angles_local if shape.is_local(index) else model.angles
    norms = (*layer.head_norms, shape.eps) if layer.head_norms is not None else None
    where = (step.position, step.sequence, step.table)
    ops.rope_and_write(qkv, *where, cos, sin, pages, index, shape.heads, shape.kv_heads, head_norms=norms)
    q = qkv[:, : shape.heads * shape.head_dim].view(rows, shape.heads, shape.head_dim)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    seen = (shape.scale, shape.window(index))
    if singles:
        ops.decode(q[:singles], pages, index, step.table[:singles], step.lengths, *seen, out=out[:singles])
    if singles < step.sizes.sequences:
        table, position = step.table[singles:], step.position[singles:]
        ops.prefill(q[singles:], pages, index, table, step.starts, position, *seen, out=out[singles:])
    return out.view(rows, -1)


def _apply(ops: Ops, x: torch.Tensor, weights: Linear, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """x [rows, k] times the parts' rows, side by side."""
    if len(weights.parts) == 1:
        return ops.linear(x, weights.parts[0], weights.bias, out_dtype=dtype)
    out = x.new_empty((x.shape[0], sum(weights.widths)), dtype=dtype)
    at = 0
    for part, width in zip(weights.parts, weights.widths, strict=True):
        bias = weights.bias[at : at + width] if weights.bias is not None else None
        ops.linear(x, part, bias, out=out[:, at : at + width], out_dtype=dtype)
        at += width
    return out


def _after(ops: Ops, added: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return added if weight is None else ops.rmsnorm(added, weight, eps)[0]


def exact() -> Ops:
    """The kernels whose rows do not depend on each other."""
    from zjournal.kernels.attention_decode import decode
    from zjournal.kernels.attention_prefill import prefill
    from zjournal.kernels.embed import embed
    from zjournal.kernels.gate import gated
    from zjournal.kernels.matmul import linear
    from zjournal.kernels.rmsnorm import rmsnorm
    from zjournal.kernels.rope_cache import rope_and_write

    return Ops(embed, rmsnorm, rope_and_write, decode, prefill, gated, linear)


def fast() -> Ops:
    """The same with torch's library for the matrix products: a row's bits depend on how many others there are."""
    from zjournal.kernels.matmul import linear_fast

    return dataclasses.replace(exact(), linear=linear_fast)
