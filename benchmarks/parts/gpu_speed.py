"""How fast each kernel is, beside the card's copy bandwidth and its peak in matrix products, both measured here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.parts.gpu import BLOCK_TOKENS, Run
from benchmarks.parts.gpu_numbers import stored
from benchmarks.parts.table import Line
from zjournal.kernels.attention_decode import decode
from zjournal.kernels.attention_prefill import prefill
from zjournal.kernels.blocks import gather, scatter
from zjournal.kernels.matmul import linear, linear_fast
from zjournal.kernels.sample import sample

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # of an 8B model, as the next
HIDDEN, FFN, VOCAB = 4096, 14336, 128256


def kernels(run: Run) -> None:
    """A line for each kernel and size."""
    bandwidth, peak = copy_bandwidth(run), bf16_peak(run)
    for what, lines in (
        ("decode attention", _decode),
        ("gather and scatter", _moves),
        ("prefill attention", _prefill),
        ("matrix products", _products),
        ("packed matrix products", _packed),
        ("draws", _draw),
    ):
        with run.attempt(f"speed: {what}"):
            lines(run, bandwidth, peak)


def copy_bandwidth(run: Run) -> float:
    """Bytes per second, read and written, of a copy within the device's memory."""
    if "copy_bandwidth" in run.figures:  # an earlier process has measured it
        return run.figures["copy_bandwidth"]
    size = 1 << 16 if run.dry else 4 << 30
    source = torch.empty(size, dtype=torch.uint8, device=run.device.where).fill_(1)
    target = torch.empty_like(source)
    rate = 2 * size / run.device_seconds(lambda: target.copy_(source))
    run.say(Line("copy within the device", f"{rate / 1e9:,.0f} GB/s"), copy_bandwidth=rate)
    return rate


def bf16_peak(run: Run) -> float:
    """Operations per second of the library's best matrix product."""
    best = run.figures.get("bf16_peak", 0.0)
    if best:
        return best
    for size in (64,) if run.dry else (4096, 8192):
        a, b = run.random(size, size, seed=1), run.random(size, size, seed=2)
        best = max(best, 2 * size**3 / run.device_seconds(partial(torch.mm, a, b)))
    run.say(Line("bf16 matrix product, library", f"{best / 1e12:,.0f} Tflop/s"), bf16_peak=best)
    return best


def _decode(run: Run, bandwidth: float, peak: float) -> None:
    for batch, context in ((2, 40),) if run.dry else ((32, 8192), (1, 8192), (1, 65536), (64, 1024)):
        what = f"decode attention, batch {batch}, context {context:,}"
        if not run.lets(what):
            continue
        rate = _decode_rate(run, batch, context)
        target = (">= 0.80 of copy", rate / bandwidth >= 0.8) if (batch, context) == (32, 8192) else ("", None)
        _say(run, what, rate, bandwidth, *target)


def _decode_rate(run: Run, batch: int, context: int) -> float:
    """Bytes of KV that are read, per second."""
    heads, kv_heads, head_dim = (4, 2, 16) if run.dry else (HEADS, KV_HEADS, HEAD_DIM)
    width = -(-context // BLOCK_TOKENS)
    pages = run.random(batch * width, 1, 2, kv_heads, BLOCK_TOKENS, head_dim, seed=3)
    order = torch.randperm(batch * width).int().view(batch, width).to(run.device.where)
    q, lengths = run.random(batch, heads, head_dim, seed=4), run.whole([context] * batch)
    out = torch.empty_like(q)
    took = run.device_seconds(lambda: decode(q, pages, 0, order, lengths, head_dim**-0.5, out=out))
    return 2 * batch * context * kv_heads * head_dim * 2 / took


def _say(run: Run, what: str, rate: float, bandwidth: float, target: str, reached: bool | None) -> None:
    peer = f"copy {bandwidth / 1e9:,.0f} GB/s"
    line = Line(what, f"{rate / 1e9:,.0f} GB/s", peer, rate / bandwidth, target, None if run.dry else reached)
    run.say(line, **{what: rate / bandwidth})


def _moves(run: Run, bandwidth: float, peak: float) -> None:
    blocks, block_bytes = (8, 2048) if run.dry else (4096, 2 << 20)
    if not run.lets("gather and scatter of blocks"):
        return
    pages = torch.zeros((blocks, block_bytes // 2), dtype=torch.bfloat16, device=run.device.where)
    ids = torch.randperm(blocks)[: blocks // 4].int().to(run.device.where)
    staging = torch.empty((len(ids), block_bytes), dtype=torch.uint8, device=run.device.where)
    for name, move in (("gather", gather), ("scatter", scatter)):
        took = run.device_seconds(partial(move, pages, ids, staging))
        rate = 2 * staging.numel() / took
        _say(run, f"{name} of {len(ids)} blocks", rate, bandwidth, ">= 0.70 of copy", rate / bandwidth >= 0.7)


def _prefill(run: Run, bandwidth: float, peak: float) -> None:
    for rows, context in ((8, 24),) if run.dry else ((2048, 2048), (2048, 8192), (2048, 65536)):
        what = f"prefill attention, {rows:,} rows behind {context - rows:,}"
        if not run.lets(what):
            continue
        rate, library = _prefill_rates(run, rows, context)
        share = f"SDPA {library / 1e12:,.0f} Tflop/s; {rate / peak:.2f} of the peak"
        figures = {what: rate / library} if library else {}
        line = Line(what, f"{rate / 1e12:,.0f} Tflop/s", share, rate / library if library else None)
        run.say(line, **figures, **{f"{what}, of peak": rate / peak})


def _prefill_rates(run: Run, rows: int, context: int) -> tuple[float, float]:
    """Operations per second, ours and the library's; 0 where that fails, for ours shall be told all the same."""
    heads, kv_heads, head_dim = (4, 2, 16) if run.dry else (HEADS, KV_HEADS, HEAD_DIM)
    width = -(-context // BLOCK_TOKENS)
    pages = run.random(width, 1, 2, kv_heads, BLOCK_TOKENS, head_dim, seed=5)
    table = torch.randperm(width).int()[None].to(run.device.where)
    q, position = run.random(rows, heads, head_dim, seed=6), run.whole(range(context - rows, context))
    out, starts, scale = torch.empty_like(q), run.whole([0, rows]), head_dim**-0.5
    ours = run.device_seconds(lambda: prefill(q, pages, 0, table, starts, position, scale, out=out), 3, 3)
    work = 4 * heads * head_dim * (rows * context - rows * (rows - 1) / 2)
    library = 0.0
    with run.attempt(f"SDPA, {rows:,} rows behind {context - rows:,}"):
        library = work / run.device_seconds(_library(run, q, context), 3, 3)
    return work / ours, library


def _library(run: Run, q: torch.Tensor, context: int) -> Callable[[], torch.Tensor]:
    """torch's attention over KV that lies in one piece; its causal mask begins at the last rows."""
    from torch.nn.attention.bias import causal_lower_right

    rows, heads, head_dim = q.shape
    k, v = (run.random(1, heads, context, head_dim, seed=seed) for seed in (7, 8))  # heads repeated: it wants that
    query, bias = q.transpose(0, 1)[None].contiguous(), causal_lower_right(rows, context)
    return lambda: F.scaled_dot_product_attention(query, k, v, attn_mask=bias)


def _shapes(run: Run) -> Iterator[tuple[str, int, int]]:
    yield from (("toy", 96, 64),) if run.dry else (("gate and up", 2 * FFN, HIDDEN), ("down", HIDDEN, FFN))


def _products(run: Run, bandwidth: float, peak: float) -> None:
    for name, n, k in _shapes(run):
        weight = run.random(n, k, seed=9, scale=k**-0.5)
        for rows in (1, 20) if run.dry else (1, 16, 64, 256, 2048):
            what = f"matrix product, {name}, {rows:,} rows"
            if not run.lets(what):
                continue
            x = run.random(rows, k, seed=10)
            took = run.device_seconds(partial(linear, x, weight))
            library = run.device_seconds(partial(linear_fast, x, weight))
            floor = max(2 * n * k / bandwidth, 2 * rows * n * k / peak)
            peer = f"library {library * 1e6:,.0f} us; floor {floor * 1e6:,.0f} us"
            figures = {what: library / took, f"{what}, of floor": floor / took}
            run.say(Line(what, f"{took * 1e6:,.0f} us", peer, library / took), **figures)


def _packed(run: Run, bandwidth: float, peak: float) -> None:
    for name, n, k in (("toy", 48, 256),) if run.dry else (("down", HIDDEN, FFN),):
        for kind in ("Q4_0",) if run.dry else ("Q4_0", "Q4_K", "Q6_K", "Q8_0"):
            held = stored(run, kind, n, k)
            for rows in (1,) if run.dry else (1, 16, 2048):
                what = f"{kind} matrix product, {name}, {rows:,} rows"
                if not run.lets(what):
                    continue
                x = run.random(rows, k, seed=11)
                took = run.device_seconds(partial(linear, x, held))
                floor = max(held.nbytes / bandwidth, 2 * rows * n * k / peak)
                line = Line(what, f"{took * 1e6:,.0f} us", f"floor {floor * 1e6:,.0f} us", floor / took)
                run.say(line, **{what: floor / took})


def _draw(run: Run, bandwidth: float, peak: float) -> None:
    rows, vocab = (2, 300) if run.dry else (64, VOCAB)
    if not run.lets("draw"):
        return
    logits = run.random(rows, vocab, seed=12).float()
    ones, seeds, numbers = torch.ones(rows, device=run.device.where), torch.arange(rows), run.whole([0] * rows)
    seeds = seeds.to(run.device.where)
    top_k = run.whole([50] * rows)
    for name, settings in (("", (None, None, None)), (", top-k and top-p", (top_k, ones * 0.9, None))):
        took = run.device_seconds(partial(sample, logits, None, ones, *settings, seeds, numbers))
        what = f"draw of {rows} rows of {vocab:,}{name}"
        floor = logits.numel() * 4 / bandwidth
        run.say(Line(what, f"{took * 1e6:,.0f} us", f"one pass {floor * 1e6:,.0f} us"), **{what: took})
