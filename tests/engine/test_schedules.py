"""Bits over random schedules: batches, chunks at any place, hits, copies, preemptions, guesses and cancels change none.

The real scheduler drives the real runner over a small model. Each request's logits, token by token, must be bit for
bit those that it gets alone in a cold engine.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests import native
from tests.engine import toy
from zjournal.engine.decoding.speculation import PromptLookup
from zjournal.engine.runner import Runner
from zjournal.engine.scheduler import Limits, Scheduler
from zjournal.engine.sequence import BLOCK_TOKENS, Sampled
from zjournal.kernels import cpu
from zjournal.link import wire

BLOCK_BYTES = BLOCK_TOKENS * toy.LAYERS * 2 * toy.KV_HEADS * toy.HEAD_DIM * 4
REQUESTS = 24
DRAFTS_MAX = 6
SCARCE = (0, 1, 2, 3, 4, 6, 7)  # seeds whose requests do not find room all at once


class Engine:
    """A worker without a socket; keeps the logits that gave each token."""

    def __init__(self, path: Path, blocks: int, max_running: int, step_tokens: int, drafts_max: int) -> None:
        start = wire.Start(model=str(path), threads=2, kv_bytes=blocks * BLOCK_BYTES)
        self.runner = Runner.load(start, lambda _: None)
        limits = Limits(toy.CONTEXT, max_running, step_tokens, 100, drafts_max)
        drafter = PromptLookup(drafts_max) if drafts_max else None
        self.scheduler = Scheduler(limits, blocks, lambda token: bytes([token]), drafter)
        self.rows: dict[str, list[bytes]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.seen: Counter[str] = Counter()

    def submit(self, ask: wire.Generate) -> None:
        self.rows[ask.request], self.tokens[ask.request] = [], []
        assert self.scheduler.submit(ask, 0) == []

    def step(self) -> None:
        plan = self.scheduler.plan(0)
        for copy in plan.copies:
            self.runner.copy_block(copy.source, copy.target, copy.count)
        rows = iter(self.runner.logits(plan.slices).numpy())
        results = self.runner.step(plan.slices)  # the same again: KV is written with the same bits
        left = iter(results)
        for part in plan.slices:
            if part.sampling is not None:
                result = next(left)
                assert isinstance(result, Sampled)
                given = [next(rows) for _ in range(part.drafts + 1)][: len(result.tokens)]
                self.rows[part.request] += [np.ascontiguousarray(row).tobytes() for row in given]
        self.tell(plan.events)
        self.tell(self.scheduler.apply(plan, results, 0))
        self.scheduler.check()

    def tell(self, events: list[wire.FromEngine]) -> None:
        for event in events:
            match event:
                case wire.Tokens():
                    self.tokens[event.request] += wire.unpack_ids(event.ids)
                case wire.Matched():
                    self.seen["cached"] += event.cached

    def run(self) -> None:
        while not self.scheduler.idle:
            self.step()


def asks(dice: random.Random) -> list[wire.Generate]:
    made: list[wire.Generate] = []
    prompts: list[list[int]] = [[]]
    for number in range(REQUESTS):
        base = dice.choice(prompts)
        fresh = [dice.randrange(toy.VOCAB) for _ in range(dice.choice([1, 15, 16, 17, 50, 90]))]
        prompt = [*base[: dice.randint(0, len(base))], *fresh][:200]
        prompts.append(prompt)
        made.append(
            wire.Generate(
                request=str(number),
                session=dice.choice(["", "s", "t"]),
                background=dice.random() < 0.3,
                tokens=wire.pack_ids(prompt),
                namespace="n",
                sampling=wire.Sampling(dice.choice([0.0, 1.0]), 0.95, 40, number, repetition_penalty=1.1),
                max_tokens=dice.choice([1, 10, 60]),
                end_tokens=(5,),
            )
        )
    return made


@pytest.mark.parametrize("seed", range(8))
def test_no_schedule_changes_a_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    found = native.library()
    monkeypatch.setattr(cpu, "open_library", lambda: (found, ""))
    path = toy.write(tmp_path / "toy.gguf")
    dice = random.Random(seed)
    requests = asks(dice)
    busy = Engine(path, 20, dice.randint(3, 6), dice.choice([24, 40, 64]), DRAFTS_MAX * (seed % 2 + 1))
    cancelled = set()
    waiting = list(requests)
    while waiting or not busy.scheduler.idle:
        if waiting and dice.random() < 0.3:
            busy.submit(waiting.pop(0))
        if dice.random() < 0.02 and busy.scheduler._running:
            request = dice.choice(list(busy.scheduler._running))
            cancelled.add(request)
            busy.tell(busy.scheduler.cancel(request, 0))
        if not busy.scheduler.idle:
            busy.step()
    for ask in requests:
        alone = Engine(path, 24, 1, 256, 0)
        alone.submit(ask)
        alone.run()
        told = len(busy.tokens[ask.request])
        assert busy.tokens[ask.request] == alone.tokens[ask.request][:told]
        assert told == len(alone.tokens[ask.request]) or ask.request in cancelled
        assert busy.rows[ask.request][:told] == alone.rows[ask.request][:told], f"the logits of {ask.request} differ"
        alone.runner.close()
    assert seed not in SCARCE or busy.scheduler.gauges().preemptions > 0
    assert busy.seen["cached"] > 0
    busy.runner.close()
