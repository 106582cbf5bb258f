"""The prompts of one step: how many tokens of whose are computed, and who waits for what another one is computing."""

from __future__ import annotations

from zjournal.engine.cache.blocks import BLOCK_TOKENS
from zjournal.engine.sequence import Sequence
from zjournal.engine.shares import shares

BACKGROUND_PART = 8  # background prompts get at least one of so many tokens of what prompts get


def share(reading: list[Sequence], budget: int, step: int) -> dict[str, int]:
    """Tokens of each request's prompt in this step: fair between sessions, then within each; background last.

    `step` is the number of the step: where `budget` is too little for two, background prompts have one in so many.
    """
    front = [one for one in reading if not one.background]
    back = [one for one in reading if one.background]
    if budget >= 2 * BLOCK_TOKENS:
        kept = max(budget // BACKGROUND_PART, BLOCK_TOKENS)
    else:
        kept = budget if step % BACKGROUND_PART == 0 else 0
    chunks = _split(front, budget - min(kept, sum(one.pending for one in back)))
    return chunks | _split(back, budget - sum(chunks.values()))


def follows(one: Sequence, leader: Sequence) -> bool:
    """Whether the block that `leader` is computing is one that `one` could use as well."""
    end = leader.computed // BLOCK_TOKENS * BLOCK_TOKENS + BLOCK_TOKENS
    if one.namespace != leader.namespace or end >= len(one.ids) or end > len(leader.ids):
        return False
    last = end - BLOCK_TOKENS
    return one.ids[last:end] == leader.ids[last:end] and one.ids[:last].tobytes() == leader.ids[:last].tobytes()


def _split(reading: list[Sequence], budget: int) -> dict[str, int]:
    """`budget` tokens for the prompts that are read: equal shares for sessions, and within each for its requests."""
    sessions: dict[str, list[Sequence]] = {}
    for one in sorted(reading, key=lambda one: (one.served_step, one.rank)):  # those that were left out go first
        sessions.setdefault(one.session, []).append(one)
    parts = shares(budget, [sum(one.pending for one in ones) for ones in sessions.values()], BLOCK_TOKENS)
    chunks: dict[str, int] = {}
    for ones, part in zip(sessions.values(), parts, strict=True):
        given = shares(part, [one.pending for one in ones], BLOCK_TOKENS)
        chunks |= {one.request: tokens for one, tokens in zip(ones, given, strict=True) if tokens}
    return chunks
