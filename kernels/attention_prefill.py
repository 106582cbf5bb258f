"""Paged causal attention of many rows of a sequence: a prompt, a piece of one, or several sequences' pieces.

    out[row, head] = softmax(scale * q[row, head] K[head / group]^T) V[head / group]   over positions 0..p of the row,
                     or the last `window` of them

q, out [rows, heads, head_dim]; starts int32 [sequences + 1]; position int32 [rows], consecutive in a sequence; table
int32 [sequences, width]; pages as in attention.py, whose arithmetic this is. One block of threads takes `rows / group`
rows of a sequence with all query heads of one KV head, and goes over its splits in order. What it computes for a row
are the numbers that decode computes: the bits are equal, for any cut of a prompt and any company.

Splits that every row of the block sees whole need no mask and have a loop without; a window keeps to one loop.
Blocks of threads with the longest way start first.

Bytes moved: q and out once; K and V of the context once for every `rows / group` rows, from L2 if they fit it.
Operations: 4 * heads * head_dim for each row and position it sees, on the tensor cores; half of a square for a prompt.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from zjournal.kernels import attention
from zjournal.kernels.attention import SPAN, TOKENS, Tiles, attend_split, finish, fold
from zjournal.kernels.build import NUMERICS, Build
from zjournal.kernels.numbers import narrow

REGISTERS_MAX = 255  # of a thread: told, or ptxas spills some to make room for one more block


@triton.jit
def find_rows(starts_ptr, position_ptr, sequences, tile, TILE: tl.constexpr):
    """A tile's sequence, its first row, its last, and the first's position; a first beyond the last if it has no rows.

    Sequence i has the tiles from starts[i] // TILE + i on, enough for its rows.
    """
    left = tile * 0
    right = left + sequences
    while right - left > 1:
        middle = (left + right) // 2
        if tl.load(starts_ptr + middle) // TILE + middle <= tile:
            left = middle
        else:
            right = middle
    begin = tl.load(starts_ptr + left)
    first = begin + (tile - begin // TILE - left) * TILE
    last = tl.minimum(first + TILE, tl.load(starts_ptr + left + 1)) - 1
    return left, first, last, tl.load(position_ptr + first, mask=first <= last, other=-1)


@triton.jit
def attend_seen(
    q,
    row_end,
    start,
    end,
    window,
    keys_ptr,
    values_ptr,
    table_ptr,
    factor,
    columns,
    BLOCK_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PART: tl.constexpr,
    KV_TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """All splits of rows at the positions from `start` to below `end`. Returns total [rows] and out [rows, PART]."""
    top = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    out = tl.zeros([q.shape[0], PART], tl.float32)
    low = tl.maximum(start + 1 - window, 0) if WINDOWED else start * 0
    # The splits that every row sees whole, then those that need a mask; with a window, all of them do.
    rest = low // SPAN * SPAN if WINDOWED else (start + 1) // SPAN * SPAN
    for MASKED in tl.static_range(1 if WINDOWED else 0, 2):
        for split in tl.range(rest if MASKED else low, end if MASKED else rest, SPAN):
            part_top, part_total, part = attend_split(
                q,
                row_end,
                window,
                tl.maximum(split, low),
                tl.minimum(split + SPAN, end),
                keys_ptr,
                values_ptr,
                table_ptr,
                factor,
                columns,
                BLOCK_STRIDE,
                HEAD_DIM,
                PART,
                KV_TILE,
                MASKED,
                WINDOWED,
            )
            top, total, out = fold(top, total, out, part_top, part_total, part, factor)
    return total, out


@triton.jit(
    do_not_specialize=["sequences", "table_stride", "layer", "window"],
    do_not_specialize_on_alignment=["table_ptr", "starts_ptr", "position_ptr"],
)
def _attend_rows(
    q_ptr,
    out_ptr,
    pages_ptr,
    table_ptr,
    starts_ptr,
    position_ptr,
    sequences,
    q_stride,
    out_stride,
    table_stride,
    layer,
    window,
    factor,
    value_scale,
    BLOCK_STRIDE: tl.constexpr,
    LAYER_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    KV_TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TILE: tl.constexpr = ROWS // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    from_column = tl.program_id(2) * PART
    sequence, first, last, start = find_rows(starts_ptr, position_ptr, sequences, tile, TILE)
    if first > last:
        return
    r = tl.arange(0, ROWS)
    row = first + r // GROUP
    real = (r < TILE * GROUP) & (row <= last)
    at = (kv_head * GROUP + r % GROUP) * HEAD_DIM
    column = tl.arange(0, WIDTH)
    there = real[:, None] & (column < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + (row.to(tl.int64) * q_stride + at)[:, None] + column[None, :], mask=there, other=0.0)
    keys = pages_ptr + layer.to(tl.int64) * LAYER_STRIDE + kv_head * (TOKENS * HEAD_DIM)
    total, out = attend_seen(
        q,
        tl.where(real, start + row - first + 1, 0),
        start,
        start + last - first + 1,
        window,
        keys,
        keys + LAYER_STRIDE // 2 + from_column,
        table_ptr + sequence.to(tl.int64) * table_stride,
        factor,
        HEAD_DIM - from_column,
        BLOCK_STRIDE,
        HEAD_DIM,
        PART,
        KV_TILE,
        WINDOWED,
    )
    column = from_column + tl.arange(0, PART)
    there = real[:, None] & (column < HEAD_DIM)[None, :]
    place = (row.to(tl.int64) * out_stride + at)[:, None] + column[None, :]
    out = narrow(finish(total, out, value_scale), out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, out, mask=there)


def prefill(
    q: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    table: torch.Tensor,
    starts: torch.Tensor,
    position: torch.Tensor,
    scale: float,
    window: int = 0,
    out: torch.Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    *,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Attention of q [rows, heads, head_dim]. Rows starts[i] to starts[i + 1] are of sequence i, blocks table[i].

    A sequence may have no rows. A row's own key and those before it are in the pages. A sequence at position -1 gets
    zeros in its one row. `key_scale` and `value_scale` multiply what pages of float8 hold. `tiles` is for tests: no bit
    depends on it but by `tiles.kv`.
    """
    rows, heads, head_dim = q.shape
    sizes, out = attention.constants(q, pages, layer, out)
    sequences = table.shape[0]
    assert starts.shape == (sequences + 1,) and position.shape == (rows,), (starts.shape, position.shape)
    assert starts.is_contiguous() and position.is_contiguous() and table.stride(1) == 1
    assert table.dtype == starts.dtype == position.dtype == torch.int32, (table.dtype, starts.dtype, position.dtype)
    if rows == 0:
        return out
    kv_heads = sizes["KV_HEADS"]
    group = heads // kv_heads
    tiles = tiles or attention.tiles_for(q, pages, window)[1]
    assert tiles.rows >= group, tiles
    grid = (rows // (tiles.rows // group) + sequences, kv_heads, -(-head_dim // tiles.part))
    _attend_rows[grid](
        q,
        out,
        pages,
        table,
        starts,
        position,
        sequences,
        q.stride(0),
        out.stride(0),
        table.stride(0),
        layer,
        window,
        attention.score_factor(scale, key_scale),
        value_scale,
        **sizes,
        PART=tiles.part,
        ROWS=tiles.rows,
        KV_TILE=tiles.kv,
        WINDOWED=window > 0,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        maxnreg=REGISTERS_MAX,
        **NUMERICS,
    )
    return out


def prefill_reference(
    q: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    table: torch.Tensor,
    starts: torch.Tensor,
    position: torch.Tensor,
    scale: float,
    window: int = 0,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> torch.Tensor:
    """The same in float64, row by row."""
    table = table.repeat_interleave(starts.diff().long(), 0)
    return attention.attention_reference(
        q, pages, layer, table, position, scale, window, key_scale=key_scale, value_scale=value_scale
    )


def builds() -> list[Build]:
    """Prefill of the served shapes."""
    found = []
    for served in attention.SERVED:
        for capabilities in served.capabilities:
            tiles = served.tiles(capabilities[0])[1]
            found.append(
                Build(
                    name=f"attention_prefill.{served.name}.{capabilities[0]}",
                    kernel=_attend_rows,
                    signature={
                        **dict.fromkeys(("q_ptr", "out_ptr"), "*bf16"),
                        "pages_ptr": f"*{served.pages}",
                        **dict.fromkeys(("table_ptr", "starts_ptr", "position_ptr"), "*i32:1"),
                        **dict.fromkeys(("q_stride", "out_stride"), "i32:16"),
                        **dict.fromkeys(("sequences", "table_stride", "layer", "window"), "i32"),
                        **dict.fromkeys(("factor", "value_scale"), "fp32"),
                    },
                    constexprs={
                        **served.sizes(),
                        "PART": tiles.part,
                        "ROWS": tiles.rows,
                        "KV_TILE": tiles.kv,
                        "WINDOWED": served.windowed,
                    },
                    num_warps=tiles.warps,
                    num_stages=tiles.stages,
                    maxnreg=REGISTERS_MAX,
                    dot=True,
                    sweep=served.sweep,
                    capabilities=capabilities,
                )
            )
    return found
