"""Speculation on an edit-and-echo workload: a model that repeats a file from its prompt, with changes of its own.

The prompt holds a file of some 1,500 tokens and the beginning of its repetition; greedy, so that what comes out is the
same with and without guesses, which is checked. Scheduler, sampler and model are the real ones; sockets are not there.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from zjournal.checkpoint.gguf import read_header
from zjournal.checkpoint.tokenizer import Tokenizer
from zjournal.engine.decoding.speculation import PromptLookup
from zjournal.engine.runner import Runner
from zjournal.engine.scheduler import Limits, Scheduler
from zjournal.link import wire

OUTPUT = 256  # tokens
GIVEN = 244  # characters of the repetition that are given: without them a small model talks about the file instead
PAIRS = 3  # runs with and without guesses, in turn
MUST = 1.5
NAMES = (
    "harbour tide anchor keel mast rudder buoy pilot ferry cargo crane quay dock lamp signal chart depth wind sail hull"
)
_numbers = itertools.count()


class Run(NamedTuple):
    """Tokens of one answer, seconds from its first to its last, steps, and guesses made and right."""

    ids: list[int]
    seconds: float
    steps: int
    drafted: int
    accepted: int


class _Counting(PromptLookup):
    """Prompt lookup that counts."""

    drafted = accepted = 0

    def verified(self, request: str, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.accepted += accepted
        super().verified(request, drafted, accepted)


def file_text() -> str:
    """A file of small functions, the same each time."""
    names, chance = NAMES.split(), random.Random(5)
    functions = []
    for name in names:
        one, two, three = (names[chance.randrange(len(names))] for _ in range(3))
        functions.append(
            f"def {name}_of({one}, {two}=0):\n"
            f'    """Returns the {name} of a {one}, at most {two} of them."""\n'
            f"    if {one} is None:\n"
            f'        raise ValueError("no {one} given")\n'
            f"    total = {chance.randrange(2, 90)} * {two} + len({one})\n"
            f"    return {three}_table[total % {chance.randrange(3, 99)}]\n"
        )
    return "\n\n".join(functions)


def prompt_of(path: Path) -> list[int]:
    """The prompt's tokens, by the tokenizer of a GGUF with ChatML."""
    text = file_text()
    asked = "Repeat the following Python file exactly, without any change:\n\n" + text
    whole = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{text[:GIVEN]}"
    return list(Tokenizer.from_header(read_header(path)).encode_trusted(whole))


def measure(runner: Runner, prompt: list[int], drafts_max: int) -> Run:
    """One answer, alone in the engine."""
    drafter = _Counting(drafts_max) if drafts_max else None
    scheduler = Scheduler(Limits(runner.context, 8, 512, drafts_max=drafts_max), runner.block_count, _no_bytes, drafter)
    request = f"echo-{next(_numbers)}"
    sampling = wire.Sampling(0.0, 1.0, 0, 0)
    scheduler.submit(
        wire.Generate(
            request=request, tokens=wire.pack_ids(prompt), namespace="n", sampling=sampling, max_tokens=OUTPUT
        ),
        0,
    )
    ids: list[int] = []
    steps, first = 0, 0.0
    while not scheduler.idle:
        plan = scheduler.plan(0)
        for copy in plan.copies:
            runner.copy_block(copy.source, copy.target, copy.count)
        told = scheduler.apply(plan, runner.step(plan.slices), 0)
        for event in told:
            if isinstance(event, wire.Tokens):
                ids += wire.unpack_ids(event.ids)
        steps += bool(first)
        first = first or (time.perf_counter() if ids else 0.0)
    seconds = time.perf_counter() - first
    return Run(ids, seconds, steps, drafter.drafted if drafter else 0, drafter.accepted if drafter else 0)


def _no_bytes(token: int) -> bytes:
    return b""


def lines(runner: Runner, path: Path, drafts: tuple[int, ...], tell: Callable[[str], None] = print) -> None:
    """Prints, for each number of guesses, tokens per second and the ratio to none, of the best of PAIRS runs."""
    prompt = prompt_of(path)
    runs: dict[int, list[Run]] = {most: [] for most in (0, *drafts)}
    for _ in range(PAIRS):
        for most, done in runs.items():
            done.append(measure(runner, prompt, most))
    best = {most: min(done, key=lambda run: run.seconds) for most, done in runs.items()}
    plain = best[0]
    tell(f"\nan edit and echo of {len(prompt)} tokens, {len(plain.ids)} said, one stream")
    tell(f"{'guesses':>10}{'tok/s':>10}{'ratio':>8}{'steps':>8}{'right':>14}   must reach")
    for most, run in best.items():
        assert run.ids == plain.ids, "guesses changed the answer"
        ratio = plain.seconds / run.seconds
        right = f"{run.accepted} of {run.drafted}" if run.drafted else ""
        verdict = f"   {MUST} times: {'reached' if ratio >= MUST else 'MISSED'}" if most else ""
        tell(f"{most:>10}{len(run.ids) / run.seconds:>10,.1f}{ratio:>8.2f}{run.steps:>8}{right:>14}{verdict}")
