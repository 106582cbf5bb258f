"""Rotation of queries and keys, and the write of keys and values into their pages, in one pass over q, k and v.

    head x of q or k:   x = x * rsqrt(mean(x^2) + eps) * weight                            if heads are normed
                        (x[i], x[i + h]) = (x[i] cos - x[i + h] sin, x[i + h] cos + x[i] sin)   i < h = rope_dim / 2
    pages[table[sequence, p / 16], layer, kind, kv_head, p % 16] = k or v / its scale      at p = position

qkv [rows, (heads + 2 * kv_heads) * head_dim], the heads of q, then of k, then of v; q is rotated in place, k and v
stay. cos and sin fp32 [context, rope_dim / 2], with any amplitude in them; dimensions from rope_dim on are copied.
All of it is computed in fp32 and rounded once. A block of threads has some heads of one row: a row's bits do not
depend on others. A row at position -1 is left out: nothing of it is read or written.

Bytes moved: qkv read once, q written once, k and v written once to their pages: 4 * (heads + 2 * kv_heads) * head_dim
per row in bf16. Operations: nothing beside that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from zjournal.kernels.attention import BLOCK_TOKENS, PAGE_DTYPES, TOKENS
from zjournal.kernels.build import NUMERICS, Build
from zjournal.kernels.numbers import INTERPRETED, narrow

ELEMENTS = 1024  # of one block of threads
FLOAT8_MAX = 448.0  # of e4m3fn


@triton.jit
def to_page(x, dtype: tl.constexpr):
    """fp32 as a page holds it, rounded to the nearest even; what is too large for float8 becomes its largest number."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        if INTERPRETED:  # it cuts off: round here to what float8 holds, by adding the number whose last bit is as large
            size = tl.maximum(tl.abs(x), 0.015625).to(tl.uint32, bitcast=True) & 0x7F800000
            step = (size + (20 << 23)).to(tl.float32, bitcast=True) * 1.5
            x = tl.where(x == x, (x + step) - step, x)
        return x.to(dtype)
    return narrow(x, dtype)


@triton.jit(
    do_not_specialize=["table_stride", "layer"],
    do_not_specialize_on_alignment=["position_ptr", "sequence_ptr", "table_ptr"],
)
def _rope_and_write(
    qkv_ptr,
    position_ptr,
    sequence_ptr,
    table_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    pages_ptr,
    qkv_stride,
    table_stride,
    layer,
    eps,
    key_scale,
    value_scale,
    BLOCK_STRIDE: tl.constexpr,
    LAYER_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_WIDTH: tl.constexpr,
    REST_WIDTH: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    NORMED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(position_ptr + row)
    if position < 0:
        return
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    is_q = (head < HEADS)[:, None]
    is_v = (head >= HEADS + KV_HEADS)[:, None]
    real = (head < HEADS + 2 * KV_HEADS)[:, None]
    i = tl.arange(0, HALF_WIDTH)[None, :]
    half = i < HALF
    rest = 2 * HALF + tl.arange(0, REST_WIDTH)[None, :]
    of_rest = rest < HEAD_DIM
    at = qkv_ptr + row * qkv_stride + (head * HEAD_DIM)[:, None]
    a = tl.load(at + i, mask=real & half, other=0.0).to(tl.float32)
    b = tl.load(at + HALF + i, mask=real & half, other=0.0).to(tl.float32)
    c = tl.load(at + rest, mask=real & of_rest, other=0.0).to(tl.float32)  # left out where there is no rest
    if NORMED:
        squares = tl.sum(tl.fma(a, a, b * b), 1) + tl.sum(c * c, 1)
        factor = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        a = tl.where(is_v, a, a * factor * head_weight(q_norm_ptr, k_norm_ptr, i, half, is_q))
        b = tl.where(is_v, b, b * factor * head_weight(q_norm_ptr, k_norm_ptr, HALF + i, half, is_q))
        c = tl.where(is_v, c, c * factor * head_weight(q_norm_ptr, k_norm_ptr, rest, of_rest, is_q))
    cos = tl.load(cos_ptr + position.to(tl.int64) * HALF + i, mask=half, other=0.0)
    sin = tl.load(sin_ptr + position.to(tl.int64) * HALF + i, mask=half, other=0.0)
    turned_a = tl.where(is_v, a, tl.fma(a, cos, -(b * sin)))
    turned_b = tl.where(is_v, b, tl.fma(b, cos, a * sin))

    sequence = tl.load(sequence_ptr + row).to(tl.int64)
    block = tl.load(table_ptr + sequence * table_stride + position // TOKENS).to(tl.int64)
    page = pages_ptr + block * BLOCK_STRIDE + layer.to(tl.int64) * LAYER_STRIDE
    # The heads of v follow those of k, in a page as in a row.
    page += (head - HEADS)[:, None] * (TOKENS * HEAD_DIM) + position % TOKENS * HEAD_DIM
    kept = real & (head >= HEADS)[:, None]
    per_scale = 1.0 / tl.where(is_v, value_scale, key_scale)
    q_type: tl.constexpr = qkv_ptr.dtype.element_ty
    page_type: tl.constexpr = pages_ptr.dtype.element_ty
    tl.store(at + i, narrow(turned_a, q_type), mask=is_q & half)
    tl.store(at + HALF + i, narrow(turned_b, q_type), mask=is_q & half)
    tl.store(page + i, to_page(turned_a * per_scale, page_type), mask=kept & half)
    tl.store(page + HALF + i, to_page(turned_b * per_scale, page_type), mask=kept & half)
    if 2 * HALF < HEAD_DIM:
        tl.store(at + rest, narrow(c, q_type), mask=is_q & of_rest)
        tl.store(page + rest, to_page(c * per_scale, page_type), mask=kept & of_rest)


@triton.jit
def head_weight(q_norm_ptr, k_norm_ptr, at, mask, is_q):
    """The norm's weights of the columns `at` for heads of q and of k."""
    q = tl.load(q_norm_ptr + at, mask=mask, other=0.0).to(tl.float32)
    k = tl.load(k_norm_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return tl.where(is_q, q, k)


def rope_and_write(
    qkv: torch.Tensor,
    position: torch.Tensor,
    sequence: torch.Tensor,
    table: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    heads: int,
    kv_heads: int,
    head_norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Rotates q of qkv [rows, (heads + 2 * kv_heads) * head_dim] in place, and writes k, rotated, and v to `pages`.

    `position`, `sequence` int32 [rows]; `table` int32 [sequences, width]; cos, sin fp32 [context, rope_dim / 2].
    `head_norms`: the weights [head_dim] of q and k, and epsilon. The scales divide what pages of float8 get.
    """
    rows, total = qkv.shape
    _, layers, two, page_heads, tokens, head_dim = pages.shape
    half = cos.shape[1]
    assert (two, page_heads, tokens) == (2, kv_heads, BLOCK_TOKENS), pages.shape
    assert total == (heads + 2 * kv_heads) * head_dim and qkv.stride(1) == 1, (qkv.shape, qkv.stride())
    assert pages.is_contiguous() and pages.dtype in PAGE_DTYPES and 0 <= layer < layers, (pages.dtype, layer)
    assert position.shape == sequence.shape == (rows,) and table.stride(1) == 1
    assert position.is_contiguous() and sequence.is_contiguous()
    assert position.dtype == sequence.dtype == table.dtype == torch.int32
    assert cos.shape == sin.shape and cos.dtype == sin.dtype == torch.float32 and 2 * half <= head_dim
    assert cos.is_contiguous() and sin.is_contiguous()
    if rows == 0:
        return
    q_norm, k_norm, eps = head_norms or (None, None, 0.0)
    sizes = _sizes(heads, kv_heads, head_dim, half, layers)
    _rope_and_write[(rows, -(-(heads + 2 * kv_heads) // sizes["HEAD_TILE"]))](
        qkv,
        position,
        sequence,
        table,
        cos,
        sin,
        q_norm,
        k_norm,
        pages,
        qkv.stride(0),
        table.stride(0),
        layer,
        eps,
        key_scale,
        value_scale,
        **sizes,
        NORMED=head_norms is not None,
        **NUMERICS,
    )


def _sizes(heads: int, kv_heads: int, head_dim: int, half: int, layers: int) -> dict[str, int]:
    half_width = triton.next_power_of_2(half)
    rest_width = triton.next_power_of_2(max(head_dim - 2 * half, 1))
    layer = 2 * kv_heads * BLOCK_TOKENS * head_dim
    return {
        "BLOCK_STRIDE": layers * layer,
        "LAYER_STRIDE": layer,
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "HALF": half,
        "HALF_WIDTH": half_width,
        "REST_WIDTH": rest_width,
        "HEAD_TILE": max(1, ELEMENTS // triton.next_power_of_2(head_dim)),
    }


def rope_and_write_reference(
    qkv: torch.Tensor,
    position: torch.Tensor,
    sequence: torch.Tensor,
    table: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    heads: int,
    kv_heads: int,
    head_norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """The same in torch, in float64, rounded to the dtypes of `qkv` and `pages`."""
    kept = position >= 0
    rows = qkv[kept].double().unflatten(1, (heads + 2 * kv_heads, -1))
    q, k, v = rows.split([heads, kv_heads, kv_heads], 1)
    if head_norms is not None:
        q, k = (
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + head_norms[2]) * weight.double()
            for x, weight in zip((q, k), head_norms[:2], strict=True)
        )
    at = position[kept].long()
    turn_cos, turn_sin = (angles[at].double()[:, None] for angles in (cos, sin))
    half = cos.shape[1]

    def turn(x: torch.Tensor) -> torch.Tensor:
        a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
        return torch.cat((a * turn_cos - b * turn_sin, b * turn_cos + a * turn_sin, rest), -1)

    blocks = table[sequence[kept].long(), at // BLOCK_TOKENS].long()
    for kind, (x, scale) in enumerate(((turn(k), key_scale), (v, value_scale))):
        pages[blocks, layer, kind, :, at % BLOCK_TOKENS] = _rounded(x / scale, pages.dtype)
    qkv[kept, : q.shape[1] * q.shape[2]] = turn(q).flatten(1).to(qkv.dtype)


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float8_e4m3fn:
        x = x.clamp(-FLOAT8_MAX, FLOAT8_MAX)
    return x.float().to(dtype)


def builds() -> list[Build]:
    """The served shapes: plain, with normed heads (Qwen3, Gemma 3), a part rotated, pages of float8."""
    served = (
        ("smollm2-135m", 9, 3, 64, 32, False, "bf16"),
        ("llama3-8b", 32, 8, 128, 64, False, "bf16"),
        ("qwen3-8b", 32, 8, 128, 64, True, "bf16"),
        ("gemma3-4b", 8, 4, 256, 128, True, "bf16"),
        ("head80-rope32", 32, 32, 80, 16, False, "bf16"),
        ("llama3-8b-fp8", 32, 8, 128, 64, False, "fp8e4nv"),
    )
    found = []
    for name, heads, kv_heads, head_dim, half, normed, pages in served:
        norms = ("q_norm_ptr", "k_norm_ptr")
        found.append(
            Build(
                name=f"rope_cache.{name}",
                kernel=_rope_and_write,
                signature={
                    "qkv_ptr": "*bf16",
                    **dict.fromkeys(("position_ptr", "sequence_ptr", "table_ptr"), "*i32:1"),
                    **dict.fromkeys(("cos_ptr", "sin_ptr", *(norms if normed else ())), "*fp32"),
                    "pages_ptr": f"*{pages}",
                    "qkv_stride": "i32:16",
                    **dict.fromkeys(("table_stride", "layer"), "i32"),
                    **dict.fromkeys(("eps", "key_scale", "value_scale"), "fp32"),
                },
                constexprs={
                    **_sizes(heads, kv_heads, head_dim, half, 32),
                    **({} if normed else dict.fromkeys(norms)),
                    "NORMED": normed,
                },
                capabilities=(90, 100) if pages == "fp8e4nv" else (80, 90, 100),
            )
        )
    return found
