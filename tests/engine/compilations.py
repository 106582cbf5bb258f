"""Which compilations steps need, without a card and without compiling: `python -m tests.engine.compilations`.

triton is told of a card that is not there, and where it would compile, the key of the compilation is written down and
nothing is launched. Models have real shapes and no numbers. Prints JSON: for each model, how many compilations a start
makes, and those that random steps ask for behind it. Not in a process with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from zjournal.checkpoint.decoder import Decoder, Rope
from zjournal.engine.device import Host
from zjournal.engine.device_runner import DeviceRunner, Kernels, _singles, _warm
from zjournal.engine.models import forward as passes
from zjournal.engine.models.decoder import BLOCK_TOKENS, Batch
from zjournal.engine.models.forward import Layer, Linear, Loaded, Matrix
from zjournal.engine.models.triton import TritonDecoder
from zjournal.kernels import packed
from zjournal.kernels.blocks import gather, scatter
from zjournal.kernels.sample import sample

STEPS, STEP_TOKENS, SPECULATION = 60, 2048, 5
LIMITS = ((32768, 8), (1024, 40))  # context, requests at once: a context shorter than a step is a case of its own
BF16 = {"qk": "", "v": "", "o": "", "gate_up": "", "down": "", "head": ""}
# What is told of each: layers have other widths, products with a bias, kinds mixed in one product, windows.
MODELS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "qwen2": ({"sizes": (3584, 18944, 28, 4, 128, 152064), "qkv_bias": True}, BF16),
    "q4_k_m": (
        {"sizes": (4096, 14336, 32, 8, 128, 128256)},
        {"qk": "Q4_K", "v": "Q6_K", "o": "Q4_K", "gate_up": "Q4_K", "down": "Q6_K", "head": "Q6_K"},
    ),
    "gemma3": (
        {"sizes": (2560, 10240, 8, 4, 256, 262208), "head_norms": True, "post_norms": True, "windows": (1024, 0)},
        BF16,
    ),
}


class _Card:
    """As much of a driver as a launch asks for before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def matrix(kind: str, n: int, k: int) -> Matrix:
    """Memory that nobody writes to, bf16 or packed."""
    if not kind:
        return torch.empty(n, k, dtype=torch.bfloat16)
    spec, step = packed.KINDS[kind], packed.step_of(k)
    scales = torch.uint8 if spec.mins else torch.int8

    def array(width: int, dtype: torch.dtype, steps: int = k // step) -> torch.Tensor:
        return torch.empty((steps, n, width), dtype=dtype)

    return packed.Packed(
        kind,
        n,
        k,
        step,
        array(step * spec.low_bits // 8, torch.uint8),
        array(step // spec.group, scales),
        array(step * spec.high_bits // 8, torch.uint8) if spec.high_bits else None,
        array(step // spec.group, scales) if spec.mins else None,
        array(2, torch.float16, k // packed.SUPER),
    )


def model(sizes: tuple[int, ...], kinds: Mapping[str, str], context: int, **flags: Any) -> TritonDecoder:
    """A decoder of two layers without a file behind it."""
    hidden, ffn, heads, kv_heads, head_dim, vocab = sizes
    rope = Rope(dim=head_dim, base=1e4)
    widths = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "hidden": hidden, "ffn": ffn, "vocab": vocab}
    common = {"family": "x", "layers": 2, "context": context, "eps": 1e-5, "rope": rope, "scale": 1.0}
    shape = Decoder(**common, **widths, **flags)
    q, kv = heads * head_dim, kv_heads * head_dim
    rows = (q + 2 * kv,) if kinds["qk"] == kinds["v"] else (q, kv, kv)
    of_qkv = [kinds["qk"]] * (len(rows) - 1) + [kinds["v"]]

    def layer() -> Layer:
        def norm(there: bool, width: int = hidden) -> torch.Tensor | None:
            return torch.empty(width) if there else None

        def linear(kind: str, n: int, k: int) -> Linear:
            return Linear((matrix(kinds[kind], n, k),), (n,))

        parts = [matrix(kind, n, hidden) for kind, n in zip(of_qkv, rows, strict=True)]
        heads_normed = (torch.empty(head_dim), torch.empty(head_dim)) if shape.head_norms else None
        return Layer(
            torch.empty(hidden),
            Linear(parts, rows, norm(shape.qkv_bias, sum(rows))),
            linear("o", hidden, q),
            torch.empty(hidden),
            linear("gate_up", 2 * ffn, hidden),
            linear("down", hidden, ffn),
            heads_normed,
            norm(shape.post_norms),
            norm(shape.post_norms),
        )

    head, angles = matrix(kinds["head"], vocab, hidden), (torch.empty(context, head_dim // 2),) * 2
    made = TritonDecoder.__new__(TritonDecoder)  # its own way is over a checkpoint's file
    made.shape, made.device, made.name, made.layout, made._kv = shape, torch.device("cpu"), "", "", torch.bfloat16
    layers = [layer() for _ in range(shape.layers)]
    made.loaded = Loaded(
        shape, passes.exact(), head, layers, torch.empty(hidden), Linear((head,), (vocab,)), angles, angles
    )
    return made


def step(chance: random.Random, context: int, running: int) -> Batch:
    """Decodes, guesses and pieces of prompts, as many as a step may have."""
    lengths = [1] * chance.randint(1, running)
    left = STEP_TOKENS - len(lengths)
    for at in range(len(lengths)):
        more = min(chance.choice((0, 0, 1, 5, 30, 100, 300, 900, 1500)), left, context - 1)
        lengths[at] += more
        left -= more
    starts = [chance.choice((0, chance.randint(0, context - length))) for length in lengths]
    counts = torch.tensor(lengths)
    position = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)]).int()
    sequence = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(counts)
    width = max(-(-(start + n) // BLOCK_TOKENS) for start, n in zip(starts, lengths, strict=True))
    ends = (counts.cumsum(0) - 1).int()[: chance.randint(0, len(lengths))]
    guesses = torch.zeros(SPECULATION if len(ends) else 0, dtype=torch.int32)
    table = torch.zeros((len(lengths), width), dtype=torch.int32)
    return Batch(torch.ones_like(position), position, sequence, table, torch.cat((guesses, ends)))


def late(name: str, context: int, running: int) -> tuple[int, list[str]]:
    """How many compilations a start makes, and the kernels that are compiled behind it."""
    flags, kinds = MODELS[name]
    found: dict[tuple[str, str], None] = {}

    def note(self: JITFunction, key: str, *_: object) -> None:
        found[self.fn.__name__, key] = None

    JITFunction._do_compile = note
    made = model(kinds=kinds, context=context, **flags)
    rows = max(running, SPECULATION + 1)
    _warm(Host(), made, context, STEP_TOKENS, rows, running + SPECULATION)
    runner = DeviceRunner(Host(), Kernels(gather, scatter, sample), made, context, 4, rows, "", {})
    runner.warm()
    before, chance = len(found), random.Random(context)
    for _ in range(STEPS):
        batch = _singles(step(chance, context, running), rows)
        whole = batch.table.shape[0] == batch.token.shape[0]
        if not whole or runner._graphs.run(batch.token, batch.position, batch.table) is None:
            made.forward(batch, runner._pages)
    runner.close()
    return before, [kernel for kernel, _ in list(found)[before:]]


if __name__ == "__main__":
    assert not triton.knobs.runtime.interpret
    driver.set_active(_Card())
    told = {f"{name}, {context}": late(name, context, running) for name in MODELS for context, running in LIMITS}
    json.dump(told, sys.stdout)
