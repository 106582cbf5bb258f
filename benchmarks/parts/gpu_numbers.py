"""Are the kernels' numbers right, against fp64, and are they the same bits whatever else is computed beside them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
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
from zjournal.kernels.embed import dequantise, embed
from zjournal.kernels.gate import gated
from zjournal.kernels.matmul import linear
from zjournal.kernels.rmsnorm import rmsnorm
from zjournal.kernels.rope_cache import rope_and_write
from zjournal.kernels.sample import reference as sample_reference
from zjournal.kernels.sample import sample

ULP = 2.0**-8  # of bf16: a half is the error of one rounding
ROUNDINGS_MAX = 2.0  # in these units, of the largest value; a sum that loses its terms is far beyond
RUNS = 1000
Check = tuple[str, torch.Tensor, torch.Tensor]  # what, ours, fp64; integers must be equal
Draw = Callable[[random.Random], torch.Tensor]  # the bits of one row, in company that chance picks
EDGES = (1, 16, 17, 32, 33, 64, 65, 128, 129, 260, 2048)  # rows at which a product takes another tile


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
        with run.attempt(f"right: {what}"):
            errors = _errors(run, what, checks)
            worst, of = max((error, name) for name, error in errors.items())
            if wrong := [f"{name} {error:.2g}" for name, error in errors.items() if not error <= ROUNDINGS_MAX]:
                of = "; ".join(wrong)
            target = f"<= {ROUNDINGS_MAX:g} ulp of fp64"
            line = Line(f"right: {what}", f"{worst:.2f} ulp", of, None, target, not wrong)
            run.say(line, **{f"ulp {what}": worst, **{f"ulp {name}": error for name, error in errors.items()}})


def _errors(run: Run, what: str, checks: Callable[[Run], Iterator[Check]]) -> dict[str, float]:
    """Of each check, by its name. One that cannot be computed ends the others of its kind, so the last is named."""
    found: dict[str, float] = {}
    for name, ours, expected in checks(run):
        found[name] = _error(ours, expected)
        run.write(f"right: {what}, behind {name}")
    return found


def _error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """In units of bf16's rounding of the largest value; endless where integers differ, or where there is no number."""
    assert ours.shape == expected.shape, (ours.shape, expected.shape)
    if not ours.is_floating_point():
        return 0.0 if torch.equal(ours.long(), expected.long()) else float("inf")
    if not torch.isfinite(ours).all():
        return float("inf")
    return float((ours.double() - expected.double()).abs().max() / expected.double().abs().max()) / ULP


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
    held = stored(run, "Q4_0" if run.dry else "Q4_K", 50, 256)
    yield "embed packed", embed(tokens, held), packed.unpack(held)[tokens.long()]
    yield "expand", dequantise(held, 3, 40), packed.unpack(held)[3:43]
    yield from _rotation(run, heads, normed=False)
    yield from _rotation(run, heads, normed=True)


def _rotation(run: Run, heads: int, normed: bool) -> Iterator[Check]:
    head_dim, kv_heads, rows = 32 if run.dry else 128, 1, 4
    qkv = run.random(rows, (heads + 2 * kv_heads) * head_dim, seed=5)
    before = qkv.double().view(rows, -1, head_dim)
    cos, sin = gpu.angles(run, head_dim, 64)
    position, sequence = run.whole([14, 15, 16, 17]), run.whole([0] * rows)
    pages = torch.full((3, 2, 2, kv_heads, BLOCK_TOKENS, head_dim), torch.nan, device=run.device.where)
    narrow, pages = pages.to(torch.float8_e4m3fn), pages.to(torch.bfloat16)
    weights = torch.rand((2, head_dim), device=run.device.where) + 0.5
    norms = (weights[0], weights[1], 1e-5) if normed else None
    rest = (position, sequence, run.whole([[2, 0]]), cos, sin)
    if run.float8:
        rope_and_write(qkv.clone(), *rest, narrow, 1, heads, kv_heads, norms)
    rope_and_write(qkv, *rest, pages, 1, heads, kv_heads, norms)
    if normed:
        both = before[:, : heads + kv_heads]
        both *= torch.rsqrt(both.square().mean(-1, keepdim=True) + 1e-5)
        both *= weights.double().repeat_interleave(torch.tensor([heads, kv_heads], device=run.device.where), 0)
    c, s = (part.double()[position.long()][:, None] for part in (cos, sin))
    a, b = before[:, : heads + kv_heads].chunk(2, -1)
    turned = torch.cat([a * c - b * s, b * c + a * s], -1)
    yield "rotated q", qkv.view(rows, -1, head_dim)[:, :heads], turned[:, :heads]
    blocks, slots = [2, 2, 0, 0], [14, 15, 0, 1]
    yield "rotated k", pages[blocks, 1, 0, :, slots], turned[:, heads:]
    written = pages[blocks, 1, 1, :, slots]
    yield "written v", written.view(torch.int16), qkv.view(rows, -1, head_dim)[:, heads + kv_heads :].view(torch.int16)
    if run.float8:
        rounded = written.to(torch.float8_e4m3fn).view(torch.uint8)
        yield "written v, fp8", narrow.view(torch.uint8)[blocks, 1, 1, :, slots], rounded


def _products(run: Run) -> Iterator[Check]:
    n, k = (80, 256) if run.dry else (1536, 4096)
    weight, bias = run.random(n, k, seed=6, scale=k**-0.5), run.random(n, seed=7).float()
    for rows in (1, 17) if run.dry else (1, 7, 64, 300):
        x = run.random(rows, k, seed=rows)
        expected = x.double() @ weight.double().T
        yield f"bf16 {rows} rows", linear(x, weight, bias), expected + bias.double()
        yield f"logits {rows} rows", linear(x, weight, out_dtype=torch.float32), expected
    for kind in ("Q4_0", "INT8") if run.dry else packed.KINDS:
        held = stored(run, kind, n, k)
        values = packed.unpack(held)
        wide = (values.to(torch.bfloat16) if held.spec.group else values).double()
        for rows in (3,) if run.dry else (1, 130):
            x = run.random(rows, k, seed=rows)
            yield f"{kind} {rows} rows", linear(x, held), x.double() @ wide.T


def stored(run: Run, kind: str, n: int, k: int) -> packed.Packed:
    """A matrix as a file stores it: random codes, and scales that are numbers."""
    if kind == "INT8":
        return packed.quantise_int8(run.random(n, k, seed=8, scale=k**-0.5))
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
    window: int = 0
    pages: torch.dtype = torch.bfloat16


def _cases(run: Run) -> list[_Case]:
    float8 = torch.float8_e4m3fn
    if run.dry:
        return [_Case(6, 2, 32, 21), _Case(2, 1, 48, 40, 17, float8)]
    found = [_Case(32, 8, 128, 1500), _Case(9, 3, 64, 2047), _Case(8, 4, 256, 1300, 512), _Case(8, 4, 256, 1300)]
    found += [_Case(32, 32, 80, 530), _Case(32, 32, 96, 530), _Case(64, 1, 128, 600), _Case(32, 8, 128, 1300, 512)]
    return [*found, *([_Case(32, 8, 128, 1500, 0, float8), _Case(8, 4, 256, 1300, 512, float8)] if run.float8 else [])]


def _attention(run: Run) -> Iterator[Check]:
    for case in _cases(run):
        heads, kv_heads, head_dim, length, window, dtype = case
        width = -(-length // BLOCK_TOKENS)
        blocks = torch.randperm(width + 2)[:width].to(run.device.where)
        pages = run.random(width + 2, 1, 2, kv_heads, BLOCK_TOKENS, head_dim, seed=9)
        pages[blocks[-1], :, :, :, (length - 1) % BLOCK_TOKENS + 1 :] = torch.nan  # what nobody has written
        pages = pages.to(dtype)
        rows = 3
        q = run.random(rows, heads, head_dim, seed=10)
        keys, values = pages.double()[blocks, 0].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length]
        expected = torch.stack([_attend(q[r], keys, values, length - rows + r + 1, window) for r in range(rows)])
        table, scale = blocks.int()[None], head_dim**-0.5
        position = run.whole(range(length - rows, length))
        found = prefill(q, pages, 0, table, run.whole([0, rows]), position, scale, window)
        told = ", ".join(map(str, case))
        yield f"prefill {told}", found, expected
        last = decode(q[-1:], pages, 0, table, run.whole([length]), scale, window)
        yield f"decode {told}", last, expected[-1:]


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
    yield "scatter", target.view(torch.int16), expected.view(torch.int16)
    vocab = 300 if run.dry else 128256
    logits = run.random(4, vocab, seed=12).float()
    zeros, seeds = torch.zeros(4, device=run.device.where), torch.arange(4, device=run.device.where)
    best = sample(logits, None, zeros, None, None, None, seeds, run.whole([0] * 4))
    yield "greedy", best, logits.argmax(-1)
    mask = torch.zeros((4, -(-vocab // 32)), dtype=torch.int32, device=run.device.where)
    mask[:, 2] = 1 << 5
    only = sample(logits, mask, zeros + 1, None, None, None, seeds, run.whole([0] * 4))
    yield "masked", only, torch.full_like(only, 69)
    given = _asked(run, 4 if run.dry else 32, vocab)
    yield "drawn", sample(*given), sample_reference(*given)


def _asked(run: Run, rows: int, vocab: int) -> tuple[torch.Tensor, ...]:
    """Arguments of `sample`: random rows, each with settings of its own."""
    logits, there = run.random(rows, vocab, seed=19, scale=3.0).float(), {"device": run.device.where}
    mask = torch.full((rows, -(-vocab // 32)), 0x7FFFFFFE, dtype=torch.int32, **there)
    row = torch.arange(rows, **there)
    temperature, top_k = (row % 3).float() * 0.7, (row * 7 % 50).int()
    top_p, min_p = 1.0 - (row % 5).float() * 0.15, (row % 2).float() * 0.01
    return logits, mask, temperature, top_k, top_p, min_p, row * 1_000_003, (row * 11).int()


# --- the same each time ---------------------------------------------------------------------------------


def same(run: Run) -> None:
    """A row's bits over many runs, each in other company: one line for each kernel and one for the model."""
    runs = 4 if run.dry else RUNS
    work: list[tuple[str, Callable[[], Draw], int]] = [
        ("matrix product", lambda: _product_of(run), runs),
        ("draw", lambda: _draw_of(run), runs),
        ("model, graphs, chunks", lambda: _model_of(run), 2 if run.dry else runs // 10),
    ]
    for kind in ("Q4_0",) if run.dry else ("Q4_K", "Q6_K", "Q8_0", "INT8"):
        made = partial(_packed_of, run, kind)
        work.append((f"{kind} matrix product, packed and expanded", made, 2 if run.dry else runs // 4))
    for at, case in enumerate(_cases(run)[:1] if run.dry else _cases(run)):
        told = ", ".join(map(str, case))
        work.append((f"attention {told}", partial(_attention_of, run, case), runs // 4 if at else runs))
    for what, make, count in work:
        if run.lets(what):
            with run.attempt(f"same: {what}"):
                _repeat(run, what, make(), count)


def _repeat(run: Run, what: str, draw: Draw, runs: int) -> None:
    first, others, done = draw(random.Random(0)).clone(), 0, 1
    for seed in range(1, runs):
        if not run.in_time(f"some of {runs} runs of {what}"):
            break
        if seed % 50 == 0:
            run.write(f"same: {what}, run {seed}")
        others += not torch.equal(draw(random.Random(seed)).view(torch.uint8), first.view(torch.uint8))
        done += 1
    line = Line(f"same: {what}", f"{done} runs", f"{others} with other bits", None, "one bit pattern", others == 0)
    run.say(line, **{f"other bits {what}": others, f"runs {what}": done})


def _product_of(run: Run) -> Draw:
    n, k = (48, 64) if run.dry else (4096, 4096)
    weight, row = run.random(n, k, seed=13), run.random(k, seed=14)
    company = run.random(40 if run.dry else max(EDGES), k, seed=15)

    def draw(chance: random.Random) -> torch.Tensor:
        x, at = _among(chance, company, row)
        return linear(x, weight)[at]

    return draw


def _among(chance: random.Random, company: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The row anywhere among so many others that a tile's limit is as likely as any number."""
    edges = [rows for rows in EDGES if rows <= len(company)]
    rows = chance.choice(edges) if chance.random() < 0.5 else chance.randint(1, len(company))
    at = chance.randrange(rows)
    x = company[:rows].clone()
    x[at] = row
    return x, at


def _packed_of(run: Run, kind: str) -> Draw:
    """INT8 is not the same expanded: its scale is applied to the sum."""
    n, k = (48, 96) if run.dry else (4096, 4096)
    held, row = stored(run, kind, n, k), run.random(k, seed=14)
    expanded = dequantise(held, 0, n) if held.spec.group else held
    company = run.random(20 if run.dry else 300, k, seed=15)

    def draw(chance: random.Random) -> torch.Tensor:
        x, at = _among(chance, company, row)
        return linear(x, chance.choice((held, expanded)))[at]

    return draw


def _draw_of(run: Run) -> Draw:
    vocab, most = (300, 3) if run.dry else (128256, 64)
    own, others = _asked(run, 5, vocab), _asked(run, most, vocab)

    def draw(chance: random.Random) -> torch.Tensor:
        rows = chance.randint(1, most)
        at = chance.randrange(rows)
        given = [every[:rows].clone() for every in others]
        for every, one in zip(given, own, strict=True):
            every[at] = one[4]
        return sample(*given)[at : at + 1]

    return draw


def _attention_of(run: Run, case: _Case) -> Draw:
    """The last row of a context: by decode in any batch, by prefill inside any chunk."""
    heads, kv_heads, head_dim, length, window, dtype = case
    width = -(-length // BLOCK_TOKENS)
    blocks = 3 * width
    pages = run.random(blocks, 1, 2, kv_heads, BLOCK_TOKENS, head_dim, seed=16).to(dtype)
    kept, q = pages[:width].clone(), run.random(heads, head_dim, seed=17)
    scale = head_dim**-0.5

    def draw(chance: random.Random) -> torch.Tensor:
        own = chance.sample(range(blocks), width)  # the same KV elsewhere
        pages.view(torch.uint8)[own] = kept.view(torch.uint8)
        rows = chance.randint(1, 4 if run.dry else 40)
        at = chance.randrange(rows)
        queries = run.random(rows, heads, head_dim, seed=chance.randrange(1 << 30))
        queries[at] = q
        if chance.random() < 0.5:  # among others, each at a place of its own
            table = run.whole([own if row == at else chance.choices(range(blocks), k=width) for row in range(rows)])
            lengths = run.whole([length if row == at else chance.randint(1, length) for row in range(rows)])
            return decode(queries, pages, 0, table, lengths, scale, window)[at]
        position = run.whole([length - 1 - at + row for row in range(rows)])  # inside a chunk
        wide = run.whole([own + [own[0]] * -(-rows // BLOCK_TOKENS)])
        return prefill(queries, pages, 0, wide, run.whole([0, rows]), position, scale, window)[at]

    return draw


def _model_of(run: Run) -> Draw:
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
