"""The plan of a run, drawn from its seed before anything runs: lives, faults, and what the traffic is made of.

A life is one process that opens the journal, works and ends. Weights differ from seed to seed, so that some runs are
all erasures and others all large contents: that finds more than one mixture for all.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from tests.sim.disk import KILLS, Rule

STEPS = 120
STEPS_MIN = 12
LIFE_STEPS_MEAN = 18
CHANGES_OF_CREATION = 140  # about as many changes of the disk does it take to make a journal
CHANGES_OF_OPENING = 12  # and as many to open one and to write down the start

# How a life ends when no fault kills it before: closed; killed between two steps, inside a transaction, or after
# a commit and before anyone is told of it.
ENDS = ("close", "kill", "inside", "untold")
KINDS = (
    "open",
    "sample",
    "end",
    "delete",
    "erase",
    "sweep",
    "rebuild",
    "wrong",
    "tenant",
    "hold",
    "jump",
    "group",
    "seal",
    "silence",
    "compact",
    "prune",
    "export",
    "serve",
    "attend",
    "engine",
    "damage",
    "pin",
    "collect",
)


class Sealing(NamedTuple):
    """When facts are packed into segments, and how many: a run has too few for the journal's own numbers."""

    facts: int  # that wait before a moment of silence packs them, and that are packed at a time
    waiting: int  # from here on they are packed without silence
    segment: int  # in one segment

    def __str__(self) -> str:
        return f"{self.facts} of {self.waiting} in {self.segment}"


class Life(NamedTuple):
    """One process. `power`: the machine's power goes with it, whatever ended it."""

    steps: int
    rules: tuple[Rule, ...]
    end: str
    power: bool
    checkpoint_pages: int
    sealing: Sealing
    chunks: int  # about so many have room on disk

    def __str__(self) -> str:
        faults = ", ".join(
            f"{rule.action} at {rule.first}" + f" x{rule.times}" * (rule.times > 1) for rule in self.rules
        )
        power = " and the power" if self.power else ""
        how = f"checkpoint at {self.checkpoint_pages}, seals {self.sealing}, {self.chunks} chunks"
        return f"{self.steps} steps, ends by {self.end}{power}, {how}: {faults or '-'}"


class Plan(NamedTuple):
    """What a seed stands for."""

    seed: int
    lives: tuple[Life, ...]
    weights: dict[str, int]
    large: float  # share of contents that span many pages

    def __str__(self) -> str:
        weights = " ".join(f"{kind}:{weight}" for kind, weight in self.weights.items())
        lives = "\n".join(f"  life {number}: {life}" for number, life in enumerate(self.lives))
        return f"seed {self.seed}\n  traffic {weights} large:{self.large}\n{lives}"


def draw(seed: int, steps: int = STEPS) -> Plan:
    """The plan of a seed. Pure."""
    chance = random.Random(f"plan {seed}")
    weights = {kind: chance.choice((1, 2, 4, 8)) for kind in KINDS}
    for kind in ("open", "sample", "end"):
        weights[kind] += 6
    for kind in ("rebuild", "wrong", "tenant", "hold", "jump", "seal", "silence", "compact", "export"):
        weights[kind] = chance.choice((0, 1, 2))
    for kind in ("engine", "damage", "attend"):
        weights[kind] = chance.choice((0, 2, 4))
    for kind in ("pin", "collect"):
        weights[kind] = chance.choice((0, 1, 2))
    weights["serve"] = chance.choice((2, 6, 12))
    lives: list[Life] = []
    left = max(steps, STEPS_MIN)
    while left > 0:
        count = min(left, chance.randint(1, 2 * LIFE_STEPS_MEAN))
        lives.append(_life(chance, count, first=not lives))
        left -= count
    return Plan(seed, tuple(lives), weights, chance.choice((0.0, 0.05, 0.3)))


def _life(chance: random.Random, steps: int, first: bool) -> Life:
    before = CHANGES_OF_CREATION if first else CHANGES_OF_OPENING
    rules: list[Rule] = []
    for _ in range(chance.choice((0, 0, 1, 1, 2, 4))):
        rules += _faults(chance, _place(chance, before, steps))
    if chance.random() < 0.5:
        rules.append(Rule(_place(chance, before, steps), 1, chance.choice(KILLS)))
    pages = chance.choice((4, 16, 64, 1_000))
    sealing = Sealing(chance.choice((5, 20, 60)), chance.choice((10, 40, 1 << 16)), chance.choice((7, 30, 2_048)))
    power = chance.random() < 0.5
    return Life(steps, tuple(sorted(rules)), chance.choice(ENDS), power, pages, sealing, chance.choice((4, 8, 1_000)))


def _place(chance: random.Random, before: int, steps: int) -> int:
    """The number of a change: mostly of the work, at times of the opening before it. A step makes some ten changes."""
    return chance.randrange(before) if chance.random() < 0.1 else before + chance.randrange(steps * 10)


def _faults(chance: random.Random, at: int) -> list[Rule]:
    match chance.choice(("eio", "sync_eio", "enospc", "short", "short_enospc")):
        case "enospc":
            return [Rule(at, chance.choice((1, 3, 12, 40)), "enospc")]
        case "short":
            return [Rule(at, chance.choice((1, 2, 8)), "short")]
        case "short_enospc":
            return [Rule(at, 1, "short"), Rule(at + 1, chance.choice((1, 5)), "enospc")]
        case action:
            return [Rule(at, chance.choice((1, 1, 3)), action)]
