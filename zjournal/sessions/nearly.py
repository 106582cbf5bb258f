"""Near misses: a turn whose prompt left a snapshot shortly before its end, as the engine told it at admission."""

from __future__ import annotations

from zjournal.journal.events import CacheMatched, CacheNearlyMet
from zjournal.journal.projections import Turn
from zjournal.journal.reader import Reader
from zjournal.sessions.diff import Diff
from zjournal.snapshots.index import NEAR_TOKENS_MIN

PAGE_FACTS = 64  # the fact stands shortly behind the turn's acceptance, among those of others


def near_miss(reader: Reader, turn: Turn) -> CacheNearlyMet | None:
    """The snapshot that the turn's prompt nearly met; None if there was none. Raises JournalFault."""
    if turn.prompt <= NEAR_TOKENS_MIN:
        return None
    at = turn.accepted_seq
    while at < turn.last_seq and (facts := reader.read(at, PAGE_FACTS, turn.last_seq)):
        for fact in facts:
            if isinstance(fact.event, CacheNearlyMet | CacheMatched) and fact.event.response == turn.response:
                return fact.event if isinstance(fact.event, CacheNearlyMet) else None
        at = facts[-1].seq
    return None


def why(near: CacheNearlyMet, diff: Diff, turns: tuple[Turn, Turn]) -> str:
    """Why the snapshot was left where it was, by the comparison of two turns, of which the second one left it."""
    a, b = turns
    if near.nearest != a.response or not diff.comparable:
        return f"`zj sessions diff {near.nearest} {b.response}` tells why"
    if near.position >= diff.a.tokens:
        return "in A's answer, which B does not have as it was sampled"
    if near.position == diff.shared:
        return "where the prompts part"
    return "before the prompts part: the rest of a block was not looked for"
