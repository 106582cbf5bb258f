"""Are the kernels' numbers right, against fp64, and are they the same bits whatever else is computed beside them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.parts import gpu
from benchmarks.parts.gpu import BLOCK_TOKENS, Run, Shape
from benchmarks.parts.table import Line
from zjournal.engine.graphs import Graphs
from zjournal.engine.models import forward as passes
from zjournal.kernels import packed
from zjournal.kernels.attention_decode import decode
from zjournal.kernels.attention_prefill import prefill
from zjournal.kernels.blocks import gather, scatter
from zjournal.kernels.embed import embed
from zjournal.kernels.gate import gated
from zjournal.kernels.matmul import linear
from zjournal.kernels.rmsnorm import rmsnorm
from zjournal.kernels.rope_cache import rope_and_write
from zjournal.kernels.sample import sample

ULP = 2.0**-8  # of bf16: a half is the error of one rounding
ROUNDINGS_MAX = 2.0  # in these units, of the largest value; a sum that loses its terms is far beyond
RUNS = 1000
Check = tuple[str, torch.Tensor, torch.Tensor]  # what, ours, fp64


def right(run: Run) -> None:
    """One line for each kernel: its largest error, in units of bf16's rounding of the largest value."""
    for what, checks in (
        ("norms, gate, rotation, embedding", _rows),
        ("matrix products", _products),
        ("attention", _attention),
        ("gather, scatter, draw", _moves),
    ):
        if not run.lets(what):
            continue
        worst, of = 0.0, ""
        for name, ours, expected in checks(run):
            wrong = (ours.double() - expected.double()).abs().max() / expected.double().abs().max()
            error = float(wrong) / ULP if torch.isfinite(ours).all() else float("inf")
            worst, of = max((worst, of), (error, name))
        reached = worst <= ROUNDINGS_MAX
        line = Line(f"right: {what}", f"{worst:.2f} ulp", of, None, f"<= {ROUNDINGS_MAX:g} ulp of fp64", reached)
        run.say(line, **{f"ulp {what}": worst})


def _rows(run: Run) -> Iterator[Check]:
    width, heads = (96, 3) if run.dry else (4096, 32)
    x, residual = run.random(5, width, seed=1), run.random(5, width, seed=2)
    weight = torch.rand(width, device=run.device.where) + 0.5
    normed, summed = rmsnorm(x, weight, 1e-5, residual=residual)
    yield "sum", summed, x.double() + residual.double()
    wide = summed.double()
    yield "norm", normed, wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    both = run.random(5, 2 * width, seed=3)
    gate, up = both.double().chunk(2, -1)
    yield "silu", gated(both, "silu"), F.silu(gate) * up
    yield "gelu", gated(both, "gelu_tanh"), F.gelu(gate, approximate="tanh") * up
    table = run.random(50, width, seed=4)
    tokens = run.whole([3, 49, 0])
    yield "embed", embed(tokens, table), table[tokens.long()].double()
    yield from _rotation(run, heads)


def _rotation(run: Run, heads: int) -> Iterator[Check]:
    head_dim, kv_heads, rows = 32 if run.dry else 128, 1, 4
    qkv = run.random(rows, (heads + 2 * kv_heads) * head_dim, seed=5)
    before = qkv.double().view(rows, -1, head_dim)
    cos, sin = gpu.angles(run, head_dim, 64)
    position, sequence = run.whole([14, 15, 16, 17]), run.whole([0] * rows)
    pages = torch.full((3, 2, 2, kv_heads, BLOCK_TOKENS, head_dim), torch.nan, device=run.device.where)
    pages = pages.to(torch.bfloat16)
    rope_and_write(qkv, position, sequence, run.whole([[2, 0]]), cos, sin, pages, 1, heads, kv_heads)
    c, s = (part.double()[position.long()][:, None] for part in (cos, sin))
    a, b = before[:, : heads + kv_heads].chunk(2, -1)
    turned = torch.cat([a * c - b * s, b * c + a * s], -1)
    yield "rotated q", qkv.view(rows, -1, head_dim)[:, :heads], turned[:, :heads]
    blocks, slots = [2, 2, 0, 0], [14, 15, 0, 1]
    yield "rotated k", pages[blocks, 1, 0, :, slots], turned[:, heads:]
    yield "written v", pages[blocks, 1, 1, :, slots], before[:, heads + kv_heads :]


def _products(run: Run) -> Iterator[Check]:
    n, k = (80, 256) if run.dry else (1536, 4096)
    weight, bias = run.random(n, k, seed=6, scale=k**-0.5), run.random(n, seed=7).float()
    for rows in (1, 17) if run.dry else (1, 7, 64, 300):
        x = run.random(rows, k, seed=rows)
        expected = x.double() @ weight.double().T
        yield f"bf16 {rows} rows", linear(x, weight, bias), expected + bias.double()
        yield f"logits {rows} rows", linear(x, weight, out_dtype=torch.float32), expected
    for kind in ("Q4_0", "Q8_0") if run.dry else ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K"):
        held = stored(run, kind, n, k)
        wide = packed.unpack(held).to(torch.bfloat16).double()
        for rows in (3,) if run.dry else (1, 130):
            x = run.random(rows, k, seed=rows)
            yield f"{kind} {rows} rows", linear(x, held), x.double() @ wide.T


def stored(run: Run, kind: str, n: int, k: int) -> packed.Packed:
    """A matrix as a file stores it: random codes, and scales that are numbers."""
    spec = packed.KINDS[kind]
    count = n * k // spec.values
    generator = torch.Generator(run.device.where).manual_seed(8)
    size = (count, spec.block)
    blocks = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8, device=run.device.where)
    scale = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8).to(run.device.where)
    at = spec.block - 2 if kind == "Q6_K" else 0
    blocks[:, at : at + 2] = scale
    if spec.mins:
        blocks[:, 2:4] = scale
    return packed.pack(kind, blocks.view(n, -1), n, k)


class _Case(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    length: int
    window: int


def _attention(run: Run) -> Iterator[Check]:
    cases = [_Case(32, 8, 128, 1500, 0), _Case(9, 3, 64, 2047, 0), _Case(8, 4, 256, 1300, 512), _Case(8, 2, 80, 530, 0)]
    if run.dry:
        cases = [_Case(6, 2, 32, 21, 0), _Case(2, 1, 48, 40, 17)]
    for case in cases:
        heads, kv_heads, head_dim, length, window = case
        width = -(-length // BLOCK_TOKENS)
        blocks = torch.randperm(width + 2)[:width].to(run.device.where)
        pages = run.random(width + 2, 1, 2, kv_heads, BLOCK_TOKENS, head_dim, seed=9)
        pages[blocks[-1], :, :, :, (length - 1) % BLOCK_TOKENS + 1 :] = torch.nan  # what nobody has written
        rows = 3
        q = run.random(rows, heads, head_dim, seed=10)
        keys, values = pages[blocks, 0].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length].double()
        expected = torch.stack([_attend(q[r], keys, values, length - rows + r + 1, window) for r in range(rows)])
        table, scale = blocks.int()[None], head_dim**-0.5
        position = run.whole(range(length - rows, length))
        found = prefill(q, pages, 0, table, run.whole([0, rows]), position, scale, window)
        yield f"prefill {tuple(case)}", found, expected
        last = decode(q[-1:], pages, 0, table, run.whole([length]), scale, window)
        yield f"decode {tuple(case)}", last, expected[-1:]


def _attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: int, window: int) -> torch.Tensor:
    """One row in fp64: q [heads, head_dim] over the positions [seen] of keys and values [all, kv_heads, head_dim]."""
    low = max(seen - window, 0) if window else 0
    share = q.shape[0] // keys.shape[1]
    k, v = (part[low:seen].repeat_interleave(share, 1) for part in (keys, values))
    scores = torch.einsum("hd,thd->ht", q.double(), k) * q.shape[-1] ** -0.5
    return torch.einsum("ht,thd->hd", scores.softmax(-1), v)


def _moves(run: Run) -> Iterator[Check]:
    pages = run.random(7, 2, 2, 1, BLOCK_TOKENS, 32, seed=11)
    bytes_ = pages.view(7, -1).view(torch.uint8)
    ids = run.whole([5, 0, 3])
    staging = torch.zeros((3, bytes_.shape[1]), dtype=torch.uint8, device=run.device.where)
    yield "gather", gather(pages, ids, staging), bytes_[ids.long()]
    target = torch.zeros_like(pages)
    scatter(target, ids, staging)
    expected = torch.zeros_like(pages)
    expected[ids.long()] = pages[ids.long()]
    yield "scatter", target, expected
    vocab = 300 if run.dry else 128256
    logits = run.random(4, vocab, seed=12).float()
    zeros, seeds = torch.zeros(4, device=run.device.where), torch.arange(4, device=run.device.where)
    best = sample(logits, None, zeros, None, None, None, seeds, run.whole([0] * 4))
    yield "greedy", best, logits.argmax(-1)
    mask = torch.zeros((4, -(-vocab // 32)), dtype=torch.int32, device=run.device.where)
    mask[:, 2] = 1 << 5
    only = sample(logits, mask, zeros + 1, None, None, None, seeds, run.whole([0] * 4))
    yield "masked", only, torch.full_like(only, 69)


# --- the same each time ---------------------------------------------------------------------------------


def same(run: Run) -> None:
    """A row's bits over many runs, each in other company: one line for each kernel and one for the model."""
    runs = 4 if run.dry else RUNS
    for what, make, count in (
        ("matrix product", _product_of, runs),
        ("attention, decode and prefill", _attention_of, runs),
        ("model, graphs, chunks", _model_of, 2 if run.dry else runs // 10),
    ):
        if run.lets(what):
            _repeat(run, what, make(run), count)


def _repeat(run: Run, what: str, draw: Callable[[random.Random], torch.Tensor], runs: int) -> None:
    first, others, done = draw(random.Random(0)).clone(), 0, 1
    for seed in range(1, runs):
        if not run.lets(f"{runs - seed} runs of {what}"):
            break
        others += not torch.equal(draw(random.Random(seed)).view(torch.uint8), first.view(torch.uint8))
        done += 1
    line = Line(f"same: {what}", f"{done} runs", f"{others} with other bits", None, "one bit pattern", others == 0)
    run.say(line, **{f"other bits {what}": others, f"runs {what}": done})


def _product_of(run: Run) -> Callable[[random.Random], torch.Tensor]:
    n, k = (48, 64) if run.dry else (4096, 4096)
    weight, row = run.random(n, k, seed=13), run.random(k, seed=14)
    company = run.random(40 if run.dry else 700, k, seed=15)

    def draw(chance: random.Random) -> torch.Tensor:
        rows = chance.randint(1, len(company))
        at = chance.randrange(rows)
        x = company[:rows].clone()
        x[at] = row
        return linear(x, weight)[at]

    return draw


def _attention_of(run: Run) -> Callable[[random.Random], torch.Tensor]:
    heads, kv_heads, head_dim, length, blocks = (4, 2, 16, 40, 12) if run.dry else (32, 8, 128, 3000, 1000)
    width = -(-length // BLOCK_TOKENS)
    pages = run.random(blocks, 1, 2, kv_heads, BLOCK_TOKENS, head_dim, seed=16)
    kept, q = pages[:width].clone(), run.random(heads, head_dim, seed=17)
    scale = head_dim**-0.5

    def draw(chance: random.Random) -> torch.Tensor:
        own = chance.sample(range(blocks), width)  # the same KV elsewhere
        pages[own] = kept
        rows = chance.randint(1, 4 if run.dry else 40)
        at = chance.randrange(rows)
        queries = run.random(rows, heads, head_dim, seed=chance.randrange(1 << 30))
        queries[at] = q
        if chance.random() < 0.5:  # among others, each at a place of its own
            table = run.whole([own if row == at else chance.choices(range(blocks), k=width) for row in range(rows)])
            lengths = run.whole([length if row == at else chance.randint(1, length) for row in range(rows)])
            return decode(queries, pages, 0, table, lengths, scale)[at]
        position = run.whole([length - 1 - at + row for row in range(rows)])  # inside a chunk
        wide = run.whole([own + [own[0]] * -(-rows // BLOCK_TOKENS)])
        return prefill(queries, pages, 0, wide, run.whole([0, rows]), position, scale)[at]

    return draw


def _model_of(run: Run) -> Callable[[random.Random], torch.Tensor]:
    """The logits behind one prompt: in random chunks, then decoded in random company, by a graph or without."""
    shape = gpu.TOY if run.dry else Shape(2, 1024, 2816, 8, 2, 128, 4096)
    length, blocks, most = (35, 9, 3) if run.dry else (700, 400, 16)
    width = -(-length // BLOCK_TOKENS)
    held = gpu.model(run, shape, passes.exact(), length + BLOCK_TOKENS)
    pages = gpu.pages(run, shape, blocks)
    graphs = Graphs(run.device, held, pages, most, width)
    prompt = torch.randint(0, shape.vocab, (length,), generator=torch.Generator().manual_seed(18), dtype=torch.int32)

    def draw(chance: random.Random) -> torch.Tensor:
        own = torch.tensor(chance.sample(range(blocks), width), dtype=torch.int32)
        cuts = sorted({0, length - 1, *chance.sample(range(1, length - 1), chance.randint(0, 3))})
        for start, end in itertools.pairwise(cuts):
            rows = torch.arange(start, end, dtype=torch.int32)
            step = gpu.step(run, prompt[start:end], rows, torch.zeros_like(rows), own[None], [])
            passes.forward(held, step, pages)
        rows = chance.randint(1, most)
        at = chance.randrange(rows)
        free = [block for block in range(blocks) if block not in set(own.tolist())]
        table = torch.tensor([[chance.choice(free)] * width for _ in range(rows)], dtype=torch.int32)
        table[at] = own
        token = torch.tensor(chance.choices(range(shape.vocab), k=rows), dtype=torch.int32)
        position = torch.tensor([chance.randrange(length) for _ in range(rows)], dtype=torch.int32)
        token[at], position[at] = prompt[-1], length - 1
        if chance.random() < 0.5:
            found = graphs.run(token, position, table)
            assert found is not None
            return found[at].clone()
        sequence = torch.arange(rows, dtype=torch.int32)
        step = gpu.step(run, token, position, sequence, table, list(range(rows)))
        return passes.forward(held, step, pages)[at]

    return draw
