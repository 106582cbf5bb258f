"""What decode and prefill attention share: the arithmetic of one split of the keys, and how splits are folded.

The positions that a row sees are cut into splits of 512, aligned to position 0, and a split into tiles of `kv`.

    tile of a split   s = q k,  m' = max(m, s),  p = 2^((s - m') c),  a = 2^((m - m') c)
                      total = a total + sum p,  out = a out + p v                     with c = scale * log2(e)
    fold of splits    m' = max(M, m),  a = 2^((M - m') c),  b = 2^((m - m') c)
                      Total = a Total + b total,  Out = a Out + b out
    at the end        Out / Total

Splits are folded in order, the later one second. So a row's bits depend on its position, its query and its keys:
not on how many splits run at once, on the rows beside it, or on where a prompt was cut. To keep this where two
kernels are compiled around it, each step is elementwise, or a maximum, or a product of the tensor cores, which adds up
over k in order. The sum of p is such a product too, with columns of ones: a reduction's order would follow the
layout of registers. A multiplication whose result is added is written as an fma, so that no compiler has the choice.
What a row does not see of a tile changes nothing: p = 0 and a = 1. Where nothing was seen, m = -inf and total = 0.

The query heads of one KV head are rows of one product, padded to `rows`. Hopper and Blackwell have their own products
from 64 rows on; decode pads to that many, so that it runs the instruction that prefill runs. Decode can afford it:
64 rows are 64 operations for each byte of bf16 KV, and the machines have 150 to 250.

KV pages are [blocks, layers, 2, kv_heads, 16, head_dim], keys before values: bf16, float8_e4m3fn, or fp32 for tests.
Head sizes are multiples of 16 up to 256; inside they are padded to a power of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from zjournal.kernels.numbers import INTERPRETED, narrow

BLOCK_TOKENS = 16
SPLIT = 512  # positions that have a softmax of their own
HEAD_DIM_MAX = 256
GROUP_MAX = 64  # query heads that share one KV head
TOKENS, SPAN = tl.constexpr(BLOCK_TOKENS), tl.constexpr(SPLIT)  # the same, as kernels want them
ARITHMETIC = "split512.tile64-32.1"  # of the numerics of KV; changes whenever a row's bits do
PAGE_DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn)


@dataclass(frozen=True)
class Tiles:
    """The sizes of a compiled kernel. `kv` is part of the numerics, the others are not.

    rows: query rows of a product. kv: positions of a tile. part: columns of the result that one block of threads makes.
    """

    rows: int
    kv: int
    part: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Served:
    """A model's attention that is compiled in CI, or in the long sweep. `pages`: triton's name of their dtype."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    windowed: bool = False
    pages: str = "bf16"
    sweep: bool = False
    capabilities: tuple[tuple[int, ...], ...] = ((80,), (90,), (100,))  # each has tiles of its own

    def tiles(self, capability: int) -> tuple[Tiles, Tiles]:
        """Of decode and of prefill."""
        group, float8 = self.heads // self.kv_heads, self.pages != "bf16"
        return tiles(self.head_dim, group, torch.bfloat16, capability, windowed=self.windowed, float8=float8)

    def sizes(self) -> dict[str, int]:
        """The constants of both kernels, as `constants` makes them of tensors."""
        return _sizes(self.heads, self.kv_heads, self.head_dim, self.layers)


SERVED = (
    Served("smollm2-135m", 9, 3, 64, 30),
    Served("llama3-8b", 32, 8, 128, 32),
    Served("llama3-8b-fp8", 32, 8, 128, 32, pages="fp8e4nv", capabilities=((90,), (100,))),
    Served("gemma3-4b-local", 8, 4, 256, 34, windowed=True),
    Served("gemma3-4b", 8, 4, 256, 34, sweep=True),
    Served("head80", 32, 32, 80, 32, sweep=True),
    Served("head96", 32, 32, 96, 32, sweep=True),
    Served("head96-group8", 32, 4, 96, 32, sweep=True),
    Served("mistral-7b", 32, 8, 128, 32, windowed=True, sweep=True),
    Served("group64", 64, 1, 128, 32, sweep=True),
    Served("fp8-256", 8, 4, 256, 34, windowed=True, pages="fp8e4nv", sweep=True, capabilities=((90,), (100,))),
)


def _sizes(heads: int, kv_heads: int, head_dim: int, layers: int) -> dict[str, int]:
    layer = 2 * kv_heads * BLOCK_TOKENS * head_dim
    return {
        "BLOCK_STRIDE": layers * layer,
        "LAYER_STRIDE": layer,
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "WIDTH": triton.next_power_of_2(head_dim),
    }


@triton.jit
def operand(x, dtype: tl.constexpr):
    """What `product` takes. The interpreter cannot multiply bf16: it has the same numbers as fp32."""
    if INTERPRETED:
        if x.dtype == tl.bfloat16:
            return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        return x.to(tl.float32)
    return x.to(dtype)


@triton.jit
def product(a, b, acc):
    """acc + a b. In the interpreter the sum is made in fp64, because numpy's order depends on a row's place."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float64), b.to(tl.float64), acc.to(tl.float64)).to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def held(position, low, high, WINDOWED: tl.constexpr):
    """Which positions stand in [low, high), where all are known to be from `low` on if there is no window."""
    if WINDOWED:
        return (position >= low) & (position < high)
    return position < high


@triton.jit
def attend_split(
    q,
    row_end,
    window,
    low,
    high,
    keys_ptr,
    values_ptr,
    table_ptr,
    factor,
    columns,
    BLOCK_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PART: tl.constexpr,
    KV_TILE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """One split, or what stands in [low, high) of it, for q [rows, width]. Row i sees what is before row_end[i].

    Nothing outside [low, high) is read. Without MASKED every row sees all of it; without WINDOWED `low` is a multiple
    of KV_TILE and every row sees from there. Returns, in fp32, max [rows], total [rows] and out [rows, width].
    """
    ahead = tl.arange(0, KV_TILE)
    column = tl.arange(0, q.shape[1])
    part = tl.arange(0, PART)
    inside = ahead % TOKENS * HEAD_DIM
    dtype: tl.constexpr = q.dtype
    q = operand(q, dtype)
    # Columns of ones that add up p, the least that a product has: tcgen05.mma of 128 rows takes no fewer than 16.
    ONES: tl.constexpr = 8 if q.shape[0] <= 64 else 16
    ones = tl.full([KV_TILE, ONES], 1.0, q.dtype)
    top = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[0], ONES], tl.float32)
    out = tl.zeros([q.shape[0], PART], tl.float32)
    first = low // KV_TILE * KV_TILE
    # The numbers of a tile's blocks are read one tile ahead: then its keys are asked for without waiting for them.
    block = tl.load(table_ptr + (first + ahead) // TOKENS, mask=held(first + ahead, low, high, WINDOWED), other=0)
    for start in tl.range(first, high, KV_TILE):
        position = start + ahead
        there = held(position, low, high, WINDOWED)[:, None]
        at = (block.to(tl.int64) * BLOCK_STRIDE + inside)[:, None]
        following = position + KV_TILE
        block = tl.load(table_ptr + following // TOKENS, mask=held(following, low, high, WINDOWED), other=0)
        k = tl.load(keys_ptr + (at + column[None, :]), mask=there & (column < HEAD_DIM)[None, :], other=0.0)
        s = product(q, tl.trans(operand(k, dtype)), tl.zeros([q.shape[0], KV_TILE], tl.float32))
        if MASKED:
            if WINDOWED:
                behind = row_end[:, None] - 1 - position[None, :]
                seen = behind.to(tl.uint32, bitcast=True) < window  # a negative number is a large one
            else:
                seen = position[None, :] < row_end[:, None]
            s = tl.where(seen, s, float("-inf"))
        raised = tl.maximum(top, tl.max(s, 1))
        base = tl.where(raised == float("-inf"), 0.0, raised)
        p = operand(narrow(tl.exp2(tl.fma(s, factor, (-base * factor)[:, None])), dtype), dtype)
        shrink = tl.exp2((top - base) * factor)[:, None]
        v = tl.load(values_ptr + (at + part[None, :]), mask=there & (part < columns)[None, :], other=0.0)
        total = product(p, ones, total * shrink)
        out = product(p, operand(v, dtype), out * shrink)
        top = raised
    return top, tl.max(total, 1), out


@triton.jit
def fold(whole_top, whole_total, whole, top, total, out, factor):
    """The earlier splits and the next one. Returns max, total and out of both."""
    raised = tl.maximum(whole_top, top)
    base = tl.where(raised == float("-inf"), 0.0, raised)
    a = tl.exp2((whole_top - base) * factor)
    b = tl.exp2((top - base) * factor)
    whole_total = tl.fma(whole_total, a, total * b)
    if len(top.shape) < len(out.shape):
        a, b = a[:, None], b[:, None]
    return raised, whole_total, tl.fma(whole, a, out * b)


@triton.jit
def finish(total, out, value_scale):
    """The row's result; zeros where it has seen nothing."""
    weight = value_scale / tl.where(total == 0.0, 1.0, total)
    if len(total.shape) < len(out.shape):
        weight = weight[:, None]
    return out * weight


def tiles(
    head_dim: int, group: int, dtype: torch.dtype, capability: int, *, windowed: bool = False, float8: bool = False
) -> tuple[Tiles, Tiles]:
    """The tiles of decode and of prefill on a GPU of compute capability 10 * major + minor; `kv` is that of both.

    `group`: query heads of a KV head. `float8`: what the pages hold. Chosen so that nothing spills, and two blocks of
    decode fit a multiprocessor. Head size 256 has half the columns in a block where the registers do not hold all; its
    scores are then computed twice. float32 is for tests: small tiles.
    """
    width = triton.next_power_of_2(head_dim)
    if dtype == torch.float32:
        return (Tiles(64, 32, width, 8, 1),) * 2
    hopper = capability // 10 == 9
    if hopper or capability // 10 in (10, 11):
        if width <= 128:
            rows = 64 if windowed and not hopper else 128
            return Tiles(64, 64, width, 4, 3), Tiles(rows, 64, width, 8, 3)
        return Tiles(64, 32, width, 8, 3), Tiles(64, 32, width if hopper and not float8 else 128, 8, 3)
    rows, warps = (16, 4) if group <= 16 else (64, 8)
    if width <= 128:
        return Tiles(rows, 64, width, warps, 3), Tiles(64, 64, width, 8, 3)
    return Tiles(rows, 32, width, warps, 3), Tiles(64, 32, 128, 8, 3)


def tiles_for(q: torch.Tensor, pages: torch.Tensor, window: int) -> tuple[Tiles, Tiles]:
    """The tiles for these tensors on their device."""
    _, heads, head_dim = q.shape
    capability, float8 = capability_of(q.device), pages.dtype == torch.float8_e4m3fn
    return tiles(head_dim, heads // pages.shape[3], q.dtype, capability, windowed=window > 0, float8=float8)


def capability_of(device: torch.device) -> int:
    """Of the device that the tensors are on; the interpreter takes Hopper's tiles."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def constants(
    q: torch.Tensor, pages: torch.Tensor, layer: int, out: torch.Tensor | None
) -> tuple[dict[str, int], torch.Tensor]:
    """The constants that both kernels take, and the result's tensor. Asserts the shapes; strides of rows are free."""
    _, heads, head_dim = q.shape
    _, layers, two, kv_heads, tokens, page_dim = pages.shape
    assert (two, tokens, page_dim) == (2, BLOCK_TOKENS, head_dim), (pages.shape, q.shape)
    assert pages.is_contiguous() and pages.dtype in PAGE_DTYPES, pages.dtype
    assert heads % kv_heads == 0 and heads // kv_heads <= GROUP_MAX, (heads, kv_heads)
    assert head_dim % 16 == 0 and head_dim <= HEAD_DIM_MAX, head_dim
    assert 0 <= layer < layers, layer
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    for each in (q, out):
        assert each.shape == q.shape and each.dtype == q.dtype and each.stride()[1:] == (head_dim, 1), each.stride()
    return _sizes(heads, kv_heads, head_dim, layers), out


def score_factor(scale: float, key_scale: float) -> float:
    """What a product of query and stored key is multiplied by to be an exponent of two."""
    assert scale > 0 and key_scale > 0, (scale, key_scale)
    return scale * key_scale * math.log2(math.e)


def attention_reference(
    q: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    table: torch.Tensor,
    position: torch.Tensor,
    scale: float,
    window: int = 0,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> torch.Tensor:
    """Each row on its own in float64: q [rows, heads, head_dim] at `position` [rows], its blocks in `table`.

    Returns float64 of q's shape; zeros for a row at position -1.
    """
    rows, heads, _ = q.shape
    share = heads // pages.shape[3]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for row in range(rows):
        last = int(position[row])
        first = max(last + 1 - window, 0) if window else 0
        at = torch.arange(first, last + 1, device=q.device)
        if not len(at):
            continue
        blocks = table[row, at // BLOCK_TOKENS].long()
        k, v = (pages[blocks, layer, kind, :, at % BLOCK_TOKENS].double() for kind in (0, 1))
        k, v = (part.repeat_interleave(share, 1) for part in (k * key_scale, v * value_scale))
        weights = (torch.einsum("hd,phd->hp", q[row].double(), k) * scale).softmax(-1)
        out[row] = torch.einsum("hp,phd->hd", weights, v)
    return out
