"""What backing up costs: those who decode meanwhile, and bytes on disk where branches share a parent.

The model decodes by turns with nothing written and with a state being written beside it, in the same process, on the
threads that a server has. Bytes are those of the files as they would be, for KV of SmolLM2-135M.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from pathlib import Path

from parts.table import Line
from tests.smollm2 import path as model_path
from tests.unit.engine.tiers import Tiered, tokens
from zjournal.engine.cache.snapshots import Settings, Snapshots
from zjournal.engine.runner import Runner
from zjournal.engine.scheduler import Limits, Scheduler
from zjournal.link import wire
from zjournal.snapshots import format

BLOCK_BYTES = 30 * 3 * 2 * 64 * 16 * 4
PARENT, BRANCHES, OWN = 6000, 10, 300
BRANCHES_MUST, DECODING_MUST = 1.2, 0.95
STATE_TOKENS, QUICK_STATE_TOKENS = 1024, 512
STEPS, QUICK_STEPS = 256, 64
ROUNDS, QUICK_ROUNDS = 5, 2


def branches(folder: Path, quick: bool) -> list[Line]:
    """Ten branches from one parent; the KV is made up, the chunks are not."""
    engine = Tiered(folder / "s", blocks=2048)
    parent = tokens(PARENT, 0)
    engine.serve("parent", parent, says=(1,))
    alone = _file_bytes(engine)
    for branch in range(BRANCHES):
        engine.serve(f"b{branch}", [*parent, *tokens(OWN - 1, 1 + branch)], says=(1,))
    # What the parent and the branches' own tokens would take in one piece.
    pieces = alone + BRANCHES * (format.HEADER_BYTES + format.blocks_for(OWN) * BLOCK_BYTES)
    ratio = _file_bytes(engine) / pieces
    most = f"at most {BRANCHES_MUST:g}"
    what = f"SSD bytes of {BRANCHES} branches of {OWN} from {PARENT:,} tokens"
    peer = f"parent and their own tokens: {pieces / 1e6:,.0f} MB"
    return [Line(what, f"{_file_bytes(engine) / 1e6:,.0f} MB", peer, ratio, most, ratio <= BRANCHES_MUST)]


def _file_bytes(engine: Tiered) -> int:
    kept = engine.snapshots.shelf.index.chunks.values()
    return sum(format.HEADER_BYTES + format.blocks_for(one.tokens) * BLOCK_BYTES for one in kept)


class _Decoding:
    """One stream that decodes for ever, beside a state that lies in memory."""

    def __init__(self, state: int) -> None:
        kv_bytes = (state + 8192) // 16 * BLOCK_BYTES
        self.runner = Runner.load(wire.Start(model=str(model_path()), kv_bytes=kv_bytes, context=8192), lambda _: None)
        self.scheduler = Scheduler(Limits(8192, 4, 512), self.runner.block_count, lambda _: b"x")
        dice = random.Random(1)
        self.state = dice.choices(range(1000, 40_000), k=state)
        self._ask("state", self.state, 1)
        while not self.scheduler.idle:
            self.step()
        self._ask("stream", dice.choices(range(1000, 40_000), k=64), 8000)
        for _ in range(8):
            self.step()

    def _ask(self, request: str, prompt: list[int], output: int) -> None:
        sampling = wire.Sampling(0.0, 1.0, 0, 0)
        packed = wire.pack_ids(prompt)
        self.scheduler.submit(
            wire.Generate(request=request, tokens=packed, namespace="n", sampling=sampling, max_tokens=output), 0
        )

    def step(self) -> None:
        plan = self.scheduler.plan(0)
        self.scheduler.apply(plan, self.runner.step(plan.slices), 0)

    def rate(self, steps: int, snapshots: Snapshots | None) -> tuple[float, float]:
        """Tokens per second over so many steps, and megabytes written meanwhile."""
        written = 0
        if snapshots is not None:
            snapshots.ended("state", "s", "n", wire.pack_ids(self.state))
        began = time.perf_counter()
        for _ in range(steps):
            if snapshots is not None:
                snapshots.settle()
                snapshots.pump(idle=False)
                for event in snapshots.take_events():
                    if isinstance(event, wire.BackedUp):
                        written += sum(chunk.file_bytes for chunk in event.chunks)
                        snapshots.take(wire.Committed(event.fact))
            self.step()
        return steps / (time.perf_counter() - began), written / 1e6


def decoding(folder: Path, quick: bool) -> list[Line]:
    """Windows of decode steps by turns: nothing written, and a state written beside them.

    The stream gets longer and so slower from window to window: each is compared with the mean of its neighbours.
    """
    run = _Decoding(QUICK_STATE_TOKENS if quick else STATE_TOKENS)
    steps = QUICK_STEPS if quick else STEPS
    alone, beside, megabytes = [run.rate(steps, None)[0]], [], []
    for number in range(QUICK_ROUNDS if quick else ROUNDS):
        made = _snapshots(folder / str(number), run)
        rate, written = run.rate(steps, made)
        beside.append(rate)
        megabytes.append(written)
        made.close()
        alone.append(run.rate(steps, None)[0])
    run.runner.close()
    ratio = statistics.median(2 * b / sum(a) for a, b in zip(itertools.pairwise(alone), beside, strict=True))
    return [
        Line(
            f"decoding while {statistics.median(megabytes):,.0f} MB are backed up, {steps} tokens",
            f"{statistics.median(beside):.1f} tok/s",
            f"nothing written: {statistics.median(alone):.1f} tok/s",
            ratio,
            f"at least {DECODING_MUST:g}",
            ratio >= DECODING_MUST,
        )
    ]


def _snapshots(folder: Path, run: _Decoding) -> Snapshots:
    settings = Settings(folder, bytes(32), 1 << 40, "raw")
    made = Snapshots(settings, run.scheduler._residency, run.runner, itertools.count(1), _clock, _clock)
    made.take(wire.Known(space=bytes(32), last=True))
    return made


def _clock() -> int:
    return time.monotonic_ns() // 1000
