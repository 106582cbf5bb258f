"""What a step costs in the scheduler, with a model that takes no time: the decisions, the cache, and nothing else.

Milliseconds of processor time per step at 32 running requests: decode alone, a few with guesses, with prompts beside
them; and with 10, 1,000 and 10,000 states kept, where requests come and go and what is worth least is given up.

    python benchmarks/scheduler.py [--quick]
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from zjournal.engine.scheduler import Limits, Plan, Scheduler
from zjournal.engine.sequence import Sampled
from zjournal.link import wire

RUNNING = 32
STEP_TOKENS = 512
CONTEXT = 200_000
PROMPT = 2_000
STATE_TOKENS = 64
STATES = (10, 1_000, 10_000)
STEP_MS_MUST = 1.0
STATES_RATIO_MUST = 1.5
GREEDY = wire.Sampling(0.0, 1.0, 0, 0)


class Right:
    """Guesses what the model will say: always the same token."""

    def propose(self, request: str, ids: Sequence[int], prompt: int, most: int) -> Sequence[int]:
        return [7] * most

    def verified(self, request: str, drafted: int, accepted: int) -> None: ...

    def end(self, request: str) -> None: ...


class Load:
    """A scheduler whose model says 7 for ever; counts the time of plan and apply."""

    def __init__(self, blocks: int, drafts_max: int = 0) -> None:
        limits = Limits(CONTEXT, RUNNING, STEP_TOKENS, queue_max=100_000, drafts_max=drafts_max)
        self.scheduler = Scheduler(limits, blocks, lambda token: b"x", Right() if drafts_max else None)
        self.dice = random.Random(1)
        self.names = itertools.count()
        self.spent_ms: list[float] = []

    def ask(self, prompt: int, output: int) -> None:
        self.scheduler.submit(
            wire.Generate(
                request=str(next(self.names)),
                tokens=wire.pack_ids(self.dice.choices(range(30_000), k=prompt)),
                namespace="n",
                sampling=GREEDY,
                max_tokens=output,
            ),
            0,
        )

    def step(self) -> None:
        started = time.thread_time()
        plan: Plan = self.scheduler.plan(0)
        between = time.thread_time()
        results = [
            Sampled((*part.tokens[len(part.tokens) - part.drafts :], 7))
            for part in plan.slices
            if part.sampling is not None
        ]
        resumed = time.thread_time()
        self.scheduler.apply(plan, results, 0)
        self.spent_ms.append((time.thread_time() - resumed + between - started) * 1000)

    def settle(self) -> None:
        """Runs until nobody waits any more and all prompts are read, and forgets what that cost."""
        while any(one.pending > 1 for one in self.scheduler._running.values()) or self.scheduler.gauges().waiting:
            self.step()
        gc.collect()
        gc.freeze()  # as the worker does
        self.spent_ms.clear()

    def keep(self, states: int) -> None:
        """Fills the cache with terminal states that share nothing."""
        for _ in range(states):
            self.ask(STATE_TOKENS, 1)
        while not self.scheduler.idle:
            self.step()
        assert self.scheduler.gauges().states == states


def decoding(steps: int, running: int, drafts_max: int) -> list[float]:
    load = Load(RUNNING * 400, drafts_max)
    for _ in range(running):
        load.ask(PROMPT, steps * (drafts_max + 1) + 500)
    load.settle()
    for _ in range(steps):
        load.step()
    return load.spent_ms


def reading(steps: int) -> list[float]:
    load = Load(RUNNING * 400 + 8 * 4000)
    for _ in range(RUNNING - 8):
        load.ask(PROMPT, 10 * steps + 500)
    load.settle()
    for _ in range(8):
        load.ask(STEP_TOKENS * steps // 8 + 1000, 8)
    for _ in range(steps):
        load.step()
    return load.spent_ms


def beside_states(states: int, steps: int) -> list[float]:
    """The pool holds the states and what runs, so that every block that is taken has to be given up by another one."""
    load = Load(states * (STATE_TOKENS // 16) + RUNNING * 8)
    load.keep(states)
    for _ in range(RUNNING):
        load.ask(STATE_TOKENS, 24)
    load.settle()
    for _ in range(steps):
        if load.scheduler.gauges().running < RUNNING:
            for _ in range(RUNNING - load.scheduler.gauges().running):
                load.ask(STATE_TOKENS, load.dice.randint(8, 24))
        load.step()
    return load.spent_ms


def main() -> None:
    steps = 60 if "--quick" in sys.argv else 400
    gc.disable()
    print(f"{'ms per step':48}{'median':>9}{'p99':>9}   must reach")
    for what, spent in (
        (f"{RUNNING} decode at {PROMPT} tokens", decoding(steps, RUNNING, 0)),
        ("4 decode, 16 guesses in all", decoding(steps, 4, 19)),
        (f"{RUNNING - 8} decode, 8 prompts are read", reading(steps)),
    ):
        median = statistics.median(spent)
        verdict = "reached" if median < STEP_MS_MUST else "MISSED"
        print(f"{what:48}{median:>9.3f}{_p99(spent):>9.3f}   under {STEP_MS_MUST:g} ms: {verdict}")
    first = 0.0
    for states in STATES:
        median = statistics.median(spent := beside_states(states, steps))
        first = first or median
        ratio = median / first
        verdict = "reached" if ratio <= STATES_RATIO_MUST else "MISSED"
        what = f"{RUNNING} that come and go, {states:,} states"
        print(
            f"{what:48}{median:>9.3f}{_p99(spent):>9.3f}   {ratio:.2f} of the first, {STATES_RATIO_MUST:g}: {verdict}"
        )


def _p99(spent: list[float]) -> float:
    return sorted(spent)[int(len(spent) * 0.99)]


if __name__ == "__main__":
    main()
