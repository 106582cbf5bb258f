"""Paged attention of rows that stand alone: one query per sequence over its whole context.

    out[row, head] = softmax(scale * q[row, head] K[head / group]^T) V[head / group]   over the row's last `window`
                     positions (0: all), the row's own included

q, out [rows, heads, head_dim]; table int32 [rows, width]; lengths int32 [rows]; pages as in attention.py, whose
arithmetic this is. The first kernel makes one record (max, total, out in fp32) for each split of 512 positions, the
second folds a row's records in order. The size of a split is fixed, their number follows from the row's length: so a
row's bits depend on its own context alone, however many splits run at once.

The first kernel's grid is fixed, two blocks of threads per multiprocessor; each takes every n-th split of all there
are. CUDA graphs can hold it whatever the lengths are, and a wide table costs no programs that find nothing to do.

Bytes moved: each position once, 2 * kv_heads * head_dim * size of an element; and for each split 8 * heads *
(head_dim + 2) for its record, written and read: 1.6 % of bf16 KV with 4 query heads to a KV head.
Operations: 4 * heads * head_dim per position; the tensor cores do rows / group times as many.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from zjournal.kernels import attention
from zjournal.kernels.attention import SPAN, SPLIT, TOKENS, Tiles, attend_split, finish, fold
from zjournal.kernels.build import NUMERICS, Build
from zjournal.kernels.numbers import INTERPRETED, narrow

ROWS_MAX = 1024  # of one call: every block of threads looks at all lengths
PROGRAMS_PER_PROCESSOR = 2
PROGRAMS_INTERPRETED = 3  # there is no multiprocessor to fill
AHEAD = 8  # records that are asked for at once, at most


@triton.jit
def first_split(length, window, WINDOWED: tl.constexpr):
    """The first split that a row of `length` positions sees."""
    if WINDOWED:
        return tl.maximum(length - window, 0) // SPAN
    return length * 0


@triton.jit
def count_splits(lengths_ptr, rows, longest, window, BATCH: tl.constexpr, WINDOWED: tl.constexpr):
    """How many splits each row has, and how many all rows up to it have, both [BATCH].

    A row that is longer than its table has none: _fold_splits makes NaN of it.
    """
    row = tl.arange(0, BATCH)
    lengths = tl.load(lengths_ptr + row, mask=row < rows, other=0)
    lengths = tl.where(lengths > longest, 0, lengths)
    counts = (lengths + SPAN - 1) // SPAN - first_split(lengths, window, WINDOWED)
    return counts, tl.cumsum(counts, 0)


@triton.jit(
    do_not_specialize=["rows", "table_stride", "splits", "longest", "layer", "window"],
    do_not_specialize_on_alignment=["table_ptr", "lengths_ptr"],
)
def _attend_splits(
    q_ptr,
    tops_ptr,
    totals_ptr,
    outs_ptr,
    pages_ptr,
    table_ptr,
    lengths_ptr,
    rows,
    q_stride,
    table_stride,
    splits,
    longest,
    layer,
    window,
    factor,
    BLOCK_STRIDE: tl.constexpr,
    LAYER_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KV_TILE: tl.constexpr,
    BATCH: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    counts, until = count_splits(lengths_ptr, rows, longest, window, BATCH, WINDOWED)
    r = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    there = (r < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    for item in tl.range(tl.program_id(0), tl.sum(counts, 0) * KV_HEADS, tl.num_programs(0)):
        kv_head = item % KV_HEADS
        number = item // KV_HEADS
        row = tl.sum((until <= number).to(tl.int32), 0)
        length = tl.load(lengths_ptr + row)
        split = number - tl.sum(tl.where(until <= number, counts, 0), 0) + first_split(length, window, WINDOWED)
        low = split * SPAN
        high = tl.minimum(low + SPAN, length)
        if WINDOWED:
            low = tl.maximum(low, length - window)
        head = kv_head * GROUP + r
        at = (head * HEAD_DIM)[:, None] + column[None, :]
        q = tl.load(q_ptr + row.to(tl.int64) * q_stride + at, mask=there, other=0.0)
        keys = pages_ptr + layer.to(tl.int64) * LAYER_STRIDE + kv_head * (TOKENS * HEAD_DIM)
        top, total, out = attend_split(
            q,
            tl.zeros([ROWS], tl.int32) + length,
            window,
            low,
            high,
            keys,
            keys + LAYER_STRIDE // 2,
            table_ptr + row.to(tl.int64) * table_stride,
            factor,
            HEAD_DIM,
            BLOCK_STRIDE,
            HEAD_DIM,
            WIDTH,
            KV_TILE,
            True,
            WINDOWED,
        )
        record = (row.to(tl.int64) * splits + split) * HEADS + head
        tl.store(tops_ptr + record, top, mask=r < GROUP)
        tl.store(totals_ptr + record, total, mask=r < GROUP)
        tl.store(outs_ptr + (record * HEAD_DIM)[:, None] + column[None, :], out, mask=there)


@triton.jit(do_not_specialize=["splits", "longest", "window"], do_not_specialize_on_alignment=["lengths_ptr"])
def _fold_splits(
    out_ptr,
    tops_ptr,
    totals_ptr,
    outs_ptr,
    lengths_ptr,
    out_stride,
    splits,
    longest,
    window,
    factor,
    value_scale,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    AHEAD: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, WIDTH)
    length = tl.load(lengths_ptr + row)
    end = (length + SPAN - 1) // SPAN
    # Max and total stand in every lane, so that even the interpreter's exponential is that of the other kernels.
    top = tl.full([WIDTH], float("-inf"), tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    out = tl.zeros([WIDTH], tl.float32)
    last = tl.where(length > longest, 0, end)
    for begin in tl.range(first_split(length, window, WINDOWED), last, AHEAD):
        for ahead in tl.static_range(AHEAD):
            split = begin + ahead
            record = (row * splits + split) * HEADS + head
            inside = column < tl.where(split < last, HEAD_DIM, 0)
            part_top = tl.load(tops_ptr + record + column * 0, mask=inside, other=float("-inf"))
            part_total = tl.load(totals_ptr + record + column * 0, mask=inside, other=0.0)
            part = tl.load(outs_ptr + record * HEAD_DIM + column, mask=inside, other=0.0)
            top, total, out = fold(top, total, out, part_top, part_total, part, factor)
    out = finish(total, out, value_scale)
    out = tl.where(length > longest, float("nan"), out)
    at = row * out_stride + head * HEAD_DIM + column
    tl.store(out_ptr + at, narrow(out, out_ptr.dtype.element_ty), mask=column < HEAD_DIM)


def decode(
    q: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int = 0,
    out: torch.Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    *,
    tiles: Tiles | None = None,
    programs: int = 0,
) -> torch.Tensor:
    """Attention of q [rows, heads, head_dim] over the first lengths[i] positions of row i's blocks table[i].

    A row of length 0 gets zeros and reads nothing; one that is longer than its table gets NaN. `key_scale` and
    `value_scale` multiply what pages of float8 hold. `tiles` and `programs` are for tests: no bit depends on them
    but by `tiles.kv`. Temporary memory: `scratch_bytes`.
    """
    rows, heads, _ = q.shape
    sizes, out = attention.constants(q, pages, layer, out)
    assert rows <= ROWS_MAX, rows
    assert table.shape[0] == lengths.shape[0] == rows and table.stride(1) == 1, (table.shape, table.stride())
    assert table.dtype == lengths.dtype == torch.int32 and lengths.is_contiguous(), (table.dtype, lengths.dtype)
    if rows == 0:
        return out
    tiles = tiles or attention.tiles_for(q, pages, window)[0]
    assert tiles.part == sizes["WIDTH"] and tiles.rows >= heads // sizes["KV_HEADS"], tiles
    records = _records(q, table.shape[1])
    longest = table.shape[1] * attention.BLOCK_TOKENS
    splits = records[0].shape[1]
    factor = attention.score_factor(scale, key_scale)
    _attend_splits[(min(programs or _programs(q.device), rows * splits * sizes["KV_HEADS"]),)](
        q,
        *records,
        pages,
        table,
        lengths,
        rows,
        q.stride(0),
        table.stride(0),
        splits,
        longest,
        layer,
        window,
        factor,
        **sizes,
        ROWS=tiles.rows,
        KV_TILE=tiles.kv,
        BATCH=_batch(rows),
        WINDOWED=window > 0,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **NUMERICS,
    )
    _fold(out, records, lengths, longest, window, factor, value_scale)
    return out


def _records(q: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for max and total [rows, splits, heads] and out [rows, splits, heads, head_dim], fp32."""
    rows, heads, head_dim = q.shape
    shape = (rows, -(-width * attention.BLOCK_TOKENS // SPLIT), heads)
    count = math.prod(shape)
    room = -(-count // 4) * 4  # so that each begins at 16 bytes: where one does not, another kernel is compiled
    memory = torch.empty(room * (head_dim + 2), dtype=torch.float32, device=q.device)
    outs, tops, totals = (
        part[:size]
        for part, size in zip(
            memory.split([room * head_dim, room, room]), (count * head_dim, count, count), strict=True
        )
    )
    return tops.view(shape), totals.view(shape), outs.view(*shape, head_dim)


def _fold(
    out: torch.Tensor,
    records: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    lengths: torch.Tensor,
    longest: int,
    window: int,
    factor: float,
    value_scale: float,
) -> None:
    rows, heads, head_dim = out.shape
    splits = records[0].shape[1]
    _fold_splits[(rows, heads)](
        out,
        *records,
        lengths,
        out.stride(0),
        splits,
        longest,
        window,
        factor,
        value_scale,
        HEADS=heads,
        HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        AHEAD=_ahead(splits),
        WINDOWED=window > 0,
        num_warps=_fold_warps(head_dim),
        **NUMERICS,
    )


def scratch_bytes(rows: int, heads: int, head_dim: int, width: int) -> int:
    """What `decode` allocates for a table [rows, width]."""
    records = rows * heads * -(-width * attention.BLOCK_TOKENS // SPLIT)
    return 4 * (-(-records // 4) * 4) * (head_dim + 2)


def _batch(rows: int) -> int:
    """Few sizes, so that few kernels are compiled."""
    return 128 if rows <= 128 else ROWS_MAX


def _ahead(splits: int) -> int:
    """Always the same where it is compiled, so that no table's width waits for it; interpreted, each costs its time."""
    return triton.next_power_of_2(min(splits, AHEAD)) if INTERPRETED.value else AHEAD


def _fold_warps(head_dim: int) -> int:
    return max(1, triton.next_power_of_2(head_dim) // 128)


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return PROGRAMS_INTERPRETED
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def decode_reference(
    q: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int = 0,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> torch.Tensor:
    """The same in float64, row by row."""
    return attention.attention_reference(
        q, pages, layer, table, lengths - 1, scale, window, key_scale=key_scale, value_scale=value_scale
    )


def builds() -> list[Build]:
    """Decode of the served shapes, and its fold."""
    found = []
    for served in attention.SERVED:
        for capabilities in served.capabilities:
            tiles = served.tiles(capabilities[0])[0]
            found.append(
                Build(
                    name=f"attention_decode.{served.name}.{capabilities[0]}",
                    kernel=_attend_splits,
                    signature={
                        "q_ptr": "*bf16",
                        "tops_ptr": "*fp32",
                        "totals_ptr": "*fp32",
                        "outs_ptr": "*fp32",
                        "pages_ptr": f"*{served.pages}",
                        **dict.fromkeys(("table_ptr", "lengths_ptr"), "*i32:1"),
                        "q_stride": "i32:16",
                        **dict.fromkeys(("rows", "table_stride", "splits", "longest", "layer", "window"), "i32"),
                        "factor": "fp32",
                    },
                    constexprs={
                        **served.sizes(),
                        "ROWS": tiles.rows,
                        "KV_TILE": tiles.kv,
                        "BATCH": _batch(64),
                        "WINDOWED": served.windowed,
                    },
                    num_warps=tiles.warps,
                    num_stages=tiles.stages,
                    dot=True,
                    sweep=served.sweep,
                    capabilities=capabilities,
                )
            )
    for head_dim, windowed in ((64, False), (128, False), (256, True)):
        found.append(
            Build(
                name=f"attention_decode.fold.{head_dim}",
                kernel=_fold_splits,
                signature={
                    "out_ptr": "*bf16",
                    **dict.fromkeys(("tops_ptr", "totals_ptr", "outs_ptr"), "*fp32"),
                    "lengths_ptr": "*i32:1",
                    "out_stride": "i32:16",
                    **dict.fromkeys(("splits", "longest", "window"), "i32"),
                    **dict.fromkeys(("factor", "value_scale"), "fp32"),
                },
                constexprs={
                    "HEADS": 32,
                    "HEAD_DIM": head_dim,
                    "WIDTH": head_dim,
                    "AHEAD": AHEAD,
                    "WINDOWED": windowed,
                },
                num_warps=_fold_warps(head_dim),
            )
        )
    return found
