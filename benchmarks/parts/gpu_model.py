"""A whole model with random weights: decode with and without graphs, the first token, restore against computing again.

Shapes are those of an 8B Llama. What is timed is what the engine does in a step: numbers up, the pass, the draw, ids
back; not the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.parts import gpu
from benchmarks.parts.gpu import BLOCK_TOKENS, Run, Shape
from benchmarks.parts.gpu_speed import copy_bandwidth
from benchmarks.parts.table import Line
from zjournal.engine.device import INTO
from zjournal.engine.graphs import Graphs
from zjournal.engine.models import forward as passes
from zjournal.engine.models.forward import Loaded
from zjournal.kernels.blocks import scatter
from zjournal.kernels.sample import sample

CONTEXT = 1024  # tokens that each request of a decode batch has
STEP_TOKENS = 2048  # of a prompt in one step, as the engine has it
CHUNK_BLOCKS = 16  # of a snapshot's file


def model(run: Run) -> None:
    """All lines of the model."""
    if not run.in_time("model"):
        return
    shape = gpu.TOY if run.dry else gpu.LLAMA_8B
    batches = (1, 3) if run.dry else (1, 2, 4, 8, 16, 32, 64)
    context = 20 if run.dry else CONTEXT
    prompts = (20,) if run.dry else (8192, 65536)
    width = -(-max(context, *prompts) // BLOCK_TOKENS)
    blocks = max(width, batches[-1] * -(-context // BLOCK_TOKENS))
    held = gpu.model(run, shape, passes.exact(), max(context, *prompts))
    fast = Loaded(**(vars(held) | {"ops": passes.fast()}))
    pages = gpu.pages(run, shape, blocks)
    bandwidth = copy_bandwidth(run)
    with run.attempt("decode steps"):
        _decode(run, shape, held, fast, pages, batches, context, bandwidth)
    for prompt in prompts:
        with run.attempt(f"first token, prompt of {prompt:,}"):
            _prompt(run, shape, held, fast, pages, prompt)


def _decode(
    run: Run,
    shape: Shape,
    held: Loaded,
    fast: Loaded,
    pages: torch.Tensor,
    batches: tuple[int, ...],
    context: int,
    bandwidth: float,
) -> None:
    """Steps of one token for each request: exact with a graph, beside exact without one and fast with one."""
    width = -(-context // BLOCK_TOKENS)
    graphs = Graphs(run.device, held, pages, batches[-1], width)
    of_fast = Graphs(run.device, fast, pages, batches[-1], width)
    for batch in batches:
        what = f"decode step, batch {batch}, context {context:,}"
        if not run.lets(what):
            continue
        numbers = _numbers(batch, context, width)
        exact = run.seconds(_step(run, lambda numbers=numbers: graphs.run(*numbers)))
        other = run.seconds(_step(run, lambda numbers=numbers: of_fast.run(*numbers)))
        plain = run.seconds(_step(run, lambda numbers=numbers: _plain(run, held, pages, numbers)), 3, 3)
        floor = (shape.weight_bytes + batch * context * shape.block_bytes / BLOCK_TOKENS) / bandwidth
        single = batch == 1 and not run.dry
        ours = f"{batch / exact:,.0f} tok/s"
        peer = f"bytes over copy {floor * 1e3:.2f} ms; ours {exact * 1e3:.2f} ms"
        target = ("<= 1.25", exact / floor <= 1.25) if single else ("", None)
        run.say(
            Line(what, ours, peer, exact / floor, *target), **{what: batch / exact, f"{what}, of floor": exact / floor}
        )
        peer = f"without a graph {batch / plain:,.0f} tok/s"
        run.say(Line(f"{what}, graph", ours, peer, plain / exact), **{f"{what}, graph": plain / exact})
        cost = None if run.dry else exact / other <= 1.35
        peer = f"fast {batch / other:,.0f} tok/s"
        run.say(
            Line(f"{what}, exact", ours, peer, exact / other, "<= 1.35 of fast", cost),
            **{f"{what}, exact": exact / other},
        )


def _numbers(batch: int, context: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """token, position, table of requests whose last token is decoded, each over blocks of its own."""
    table = torch.arange(batch * width, dtype=torch.int32).view(batch, width)
    return torch.ones(batch, dtype=torch.int32), torch.full((batch,), context - 1, dtype=torch.int32), table


def _plain(run: Run, held: Loaded, pages: torch.Tensor, numbers: tuple[torch.Tensor, ...]) -> torch.Tensor:
    token, position, table = numbers
    rows = torch.arange(len(token), dtype=torch.int32)
    return passes.forward(held, gpu.step(run, token, position, rows, table, rows.tolist()), pages)


def _step(run: Run, compute: Callable[[], torch.Tensor | None]) -> Callable[[], None]:
    """A step with its draw, and the wait for the ids."""

    def work() -> None:
        logits = compute()
        assert logits is not None
        rows = logits.shape[0]
        settings = (torch.zeros(rows), torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int32))
        temperature, seed, number = map(run.device.upload, settings)
        drawn = sample(logits, None, temperature, None, None, None, seed, number)
        run.device.host(rows, dtype=torch.int32).copy_(drawn, non_blocking=True)
        run.device.mark().wait()

    return work


def _prompt(run: Run, shape: Shape, held: Loaded, fast: Loaded, pages: torch.Tensor, tokens: int) -> None:
    """The first token behind a prompt, exact and fast; and the same KV brought back from pinned memory."""
    what = f"first token, prompt of {tokens:,}"
    if not run.lets(what):
        return
    exact = run.seconds(lambda: _prefill(run, held, pages, tokens), 1, 1)
    other = run.seconds(lambda: _prefill(run, fast, pages, tokens), 1, 1)
    cost = None if run.dry else exact / other <= 1.35
    line = Line(what, f"{exact * 1e3:,.0f} ms", f"fast {other * 1e3:,.0f} ms", exact / other, "<= 1.35 of fast", cost)
    run.say(line, **{what: exact, f"{what}, exact": exact / other})
    took = run.seconds(lambda: _restore(run, pages, tokens), 3, 1)
    size = -(-tokens // BLOCK_TOKENS) * shape.block_bytes
    what = f"restore of {tokens:,} tokens from pinned memory"
    peer = f"{size / took / 1e9:,.1f} GB/s; computed again {exact * 1e3:,.0f} ms"
    run.say(Line(what, f"{took * 1e3:,.0f} ms", peer, exact / took), **{what: took, f"{what}, times": exact / took})


def _prefill(run: Run, held: Loaded, pages: torch.Tensor, tokens: int) -> None:
    most = 16 if run.dry else STEP_TOKENS
    table = torch.arange(-(-tokens // BLOCK_TOKENS), dtype=torch.int32)[None]
    for start in range(0, tokens, most):
        position = torch.arange(start, min(start + most, tokens), dtype=torch.int32)
        want = [len(position) - 1] if start + most >= tokens else []
        zeros = torch.zeros_like(position)
        step = gpu.step(run, zeros, position, zeros, table[:, : -(-(start + len(position)) // BLOCK_TOKENS)], want)
        passes.forward(held, step, pages)


def _restore(run: Run, pages: torch.Tensor, tokens: int) -> None:
    """As the engine does it: chunk by chunk to the device and into the blocks, beside the kernels."""
    block_bytes = pages[0].numel() * pages.element_size()
    host = run.device.host(CHUNK_BLOCKS, block_bytes, dtype=torch.uint8)
    there = torch.empty((CHUNK_BLOCKS, block_bytes), dtype=torch.uint8, device=run.device.where)
    blocks = -(-tokens // BLOCK_TOKENS)
    behind = run.device.mark()
    with run.device.beside(INTO, behind):
        for first in range(0, blocks, CHUNK_BLOCKS):
            count = min(CHUNK_BLOCKS, blocks - first)
            ids = run.device.upload(torch.arange(first, first + count, dtype=torch.int32))
            there[:count].copy_(host[:count], non_blocking=True)
            scatter(pages, ids, there[:count])
        done = run.device.mark()
    done.wait()
