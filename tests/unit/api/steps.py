"""Answers for tests of encoders: any steps, told as a stream or folded into one body, and where the goldens lie."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from hypothesis import strategies as st

from zjournal.api.http import Answer, Encoder
from zjournal.ask import CallArguments, CallEnded, CallStarted, ReasoningDelta, Step, TextDelta

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "api"
A = TypeVar("A", bound=Answer)

# What an answer says, part by part: what kind each is, and its text in pieces.
RUNS = st.lists(
    st.tuples(st.sampled_from(["text", "thought", "call", "cut"]), st.lists(st.text(min_size=1), max_size=3)),
    max_size=5,
)


def steps_of(runs: Sequence[tuple[str, Sequence[str]]]) -> tuple[list[Step], int]:
    """The steps that say RUNS, and how many calls are in them."""
    steps: list[Step] = []
    index = 0
    for kind, texts in runs:
        if kind in ("text", "thought"):
            steps += [TextDelta(text) if kind == "text" else ReasoningDelta(text) for text in texts]
        else:
            steps += [CallStarted(index, "f"), *(CallArguments(index, text) for text in texts)]
            steps.append(CallEnded(index, truncated=kind == "cut"))
            index += 1
    return steps, index


def frames(encoder: Encoder, steps: Sequence[Step]) -> list[bytes]:
    """The frames of a stream."""
    told = encoder.begin()
    for step in steps:
        told += encoder.feed(step)
    return told


def taken(answer: A, steps: Sequence[Step]) -> A:
    """The answer, once it has all steps."""
    for step in steps:
        answer.take(step)
    return answer


def pretty(body: bytes) -> bytes:
    """As goldens have it."""
    return msgspec.json.format(body, indent=2) + b"\n"
