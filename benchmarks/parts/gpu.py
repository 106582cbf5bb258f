"""What the parts of benchmarks/gpu.py share: the device, the time that is left, the table's lines, a random model."""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.parts import table
from zjournal.engine.device import Device
from zjournal.engine.models import forward as passes
from zjournal.engine.models.forward import Layer, Linear, Loaded, Ops

BLOCK_TOKENS = 16
ROPE_BASE = 500_000.0
SAID_MAX = 200  # of what an exception says


class Sick(BaseException):
    """A kernel has broken the process's hold on the card: nothing runs there any more. No `attempt` may swallow it."""


@dataclass
class Run:
    """One run of the script. `until`: the clock's time at which no other part begins; figures go to the JSON.

    All that is known is written to `into` as it comes, so that a process that hangs or dies takes nothing with it. The
    next one is given `earlier`, does not begin again what was begun, and goes on.
    """

    device: Device
    dry: bool
    until: float
    into: Path | None = None
    figures: dict[str, float] = field(default_factory=dict)
    lines: list[table.Line] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=dict)
    begun: list[str] = field(default_factory=list)
    at: str = ""  # what is being done
    told: dict[str, Any] = field(default_factory=dict)  # more for the JSON
    _before: frozenset[str] = frozenset()
    _part_until: float = 0.0

    def resume(self, earlier: dict[str, Any]) -> None:
        """Goes on where a process before this one ended."""
        self.lines = [table.Line(**line) for line in earlier["lines"]]
        self.figures, self.skipped, self.spent = earlier["figures"], earlier["skipped"], earlier["seconds"]
        self.begun = earlier["begun"]
        self._before = frozenset(self.begun)

    @contextlib.contextmanager
    def part(self, name: str, seconds: float) -> Iterator[None]:
        """One part, with its share of the time; `lets` says whether there is some left."""
        begun, before = time.monotonic(), self.spent.get(name, 0.0)
        self._part_until = min(begun + seconds - before, self.until)
        print(f"-- {name}, up to {max(self._part_until - begun, 0):.0f} s", flush=True)
        self.write(name)
        try:
            yield
        finally:
            self.spent[name] = before + time.monotonic() - begun
            self.write(name)

    def in_time(self, what: str) -> bool:
        """Whether there is time for it; what was left out is told at the end."""
        if time.monotonic() < self._part_until:
            return True
        if what not in self.skipped:
            self.skipped.append(what)
        return False

    def lets(self, what: str) -> bool:
        """Whether it is to be done now: there is time for it, and no earlier process has begun it. Once for each."""
        if what in self._before or not self.in_time(what):
            return False
        self.begun.append(what)
        self.write(what)
        return True

    def write(self, at: str) -> None:
        """Says what is done next, and keeps what is known."""
        self.at = at
        if self.into is None:
            return
        told = self.told | {"device": self.device.name, "dry": self.dry, "figures": self.figures}
        told |= {"skipped": self.skipped, "seconds": self.spent, "begun": self.begun, "at": at}
        told["lines"] = [line._asdict() for line in self.lines]
        written = self.into.with_suffix(".part")
        written.write_text(json.dumps(told, indent=1) + "\n")
        os.replace(written, self.into)

    @contextlib.contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """What fails is a line that is not reached, and the rest goes on: the next run may be far off. Raises Sick
        where the card answers nothing any more."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            told = " ".join(f"{type(error).__name__}: {error}".split())
            self.say(table.Line(what, "failed", told[:SAID_MAX], None, "runs", False))
            if not self._is_well():
                raise Sick(what) from error

    def _is_well(self) -> bool:
        try:
            return bool(torch.ones(1, device=self.device.where).item())
        except RuntimeError:
            return False

    @property
    def float8(self) -> bool:
        """Whether pages may hold e4m3."""
        return self.dry or torch.cuda.get_device_capability(self.device.where) >= (8, 9)

    def say(self, line: table.Line, **figures: float) -> None:
        """Prints a line at once, as what comes later may fail."""
        self.lines.append(line)
        self.figures |= figures
        print(table.text(line), flush=True)
        self.write(self.at)

    def seconds(self, work: Callable[[], object], tries: int = 5, each: int = 10) -> float:
        """Seconds of one call as the host makes it, the median of `tries` times `each` of them."""
        tries, each = (1, 1) if self.dry else (tries, each)
        if not self.dry:
            work()
        taken = []
        for _ in range(tries):
            self.device.mark().wait()
            begun = time.perf_counter()
            for _ in range(each):
                work()
            self.device.mark().wait()
            taken.append((time.perf_counter() - begun) / each)
        return sorted(taken)[tries // 2]

    def device_seconds(self, work: Callable[[], torch.Tensor], tries: int = 5, each: int = 10) -> float:
        """The same without the host: the calls are one graph."""
        each = 1 if self.dry else each

        def many() -> torch.Tensor:
            for _ in range(each - 1):
                work()
            return work()

        replay, _ = self.device.graph(many)
        return self.seconds(replay, tries, 1) / each

    def random(self, *size: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
        """bf16, normally distributed, on the device."""
        generator = torch.Generator(self.device.where).manual_seed(seed)
        made = torch.randn(size, generator=generator, device=self.device.where, dtype=torch.float32)
        return made.mul_(scale).to(torch.bfloat16)

    def whole(self, *values: object) -> torch.Tensor:
        """int32 on the device."""
        return torch.tensor(*values, dtype=torch.int32, device=self.device.where)


@dataclass(frozen=True)
class Shape:
    """The sizes of a llama; see forward.Shape."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float = 1e-5
    embed_scale: float = 1.0
    activation: str = "silu"

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def block_bytes(self) -> int:
        """A block's KV in all layers, bf16."""
        return BLOCK_TOKENS * self.layers * 2 * self.kv_heads * self.head_dim * 2

    @property
    def weight_bytes(self) -> int:
        """What a decode step reads of the weights: all but the embedding, bf16."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return 2 * (self.layers * (attention + 3 * self.hidden * self.ffn) + self.vocab * self.hidden)

    def window(self, layer: int) -> int:
        return 0

    def is_local(self, layer: int) -> bool:
        return False


LLAMA_8B = Shape(32, 4096, 14336, 32, 8, 128, 128256)
TOY = Shape(2, 64, 96, 4, 2, 16, 96)


def angles(run: Run, head_dim: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, fp32 [context, head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    turned = torch.arange(context, dtype=torch.float64)[:, None] / ROPE_BASE**exponents
    return turned.cos().float().to(run.device.where), turned.sin().float().to(run.device.where)


def model(run: Run, shape: Shape, ops: Ops, context: int) -> Loaded:
    """Random weights, of a size that keeps the stream from growing."""
    ones = torch.ones(shape.hidden, device=run.device.where)

    def linear(out: int, width: int, seed: int) -> Linear:
        return Linear((run.random(out, width, seed=seed, scale=width**-0.5),), (out,))

    layers = []
    for index in range(shape.layers):
        qkv = linear((shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.hidden, 4 * index)
        o = linear(shape.hidden, shape.heads * shape.head_dim, 4 * index + 1)
        gate_up = linear(2 * shape.ffn, shape.hidden, 4 * index + 2)
        layers.append(Layer(ones, qkv, o, ones, gate_up, linear(shape.hidden, shape.ffn, 4 * index + 3)))
    embed = run.random(shape.vocab, shape.hidden, seed=1 << 20)
    turned = angles(run, shape.head_dim, context)
    return Loaded(shape, ops, embed, layers, ones, linear(shape.vocab, shape.hidden, 1 << 21), turned, turned)


def pages(run: Run, shape: Shape, blocks: int) -> torch.Tensor:
    """KV of so many blocks, all of it zero."""
    size = (blocks, shape.layers, 2, shape.kv_heads, BLOCK_TOKENS, shape.head_dim)
    return torch.zeros(size, dtype=torch.bfloat16, device=run.device.where)


def step(
    run: Run, token: torch.Tensor, position: torch.Tensor, sequence: torch.Tensor, table: torch.Tensor, want: list
):
    """A step's numbers, from the host to the device."""
    sizes, numbers = passes.pack(token, position, sequence, table, torch.tensor(want, dtype=torch.int32))
    return passes.unpack(sizes, run.device.upload(numbers))
