"""What is deleted when the snapshots must become smaller, in which order, why, and what it costs to compute it again.

Pure: it changes neither index nor disk, and the same index, time and numbers give the same plan. Chunks go from the
ends of the branches inwards, so what several share goes last, and a long session gives up its end before its
beginning. First goes what is worth nothing: KV of weights that are not loaded, chunks that cannot be read, tails that
the next turn did not keep or that another chunk repeats. Of the rest the chunk goes first that saves least
computation for its bytes, weighed by how often and how lately it was restored; sessions that are live come last, and
what is pinned or about to be read stays.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import IntEnum

from zjournal.snapshots.format import BLOCK_TOKENS, MARK_BYTES
from zjournal.snapshots.index import Chunk, Index, Snapshot, shared_marks

HALF_LIFE_US = 6 * 3600 * 1_000_000  # a chunk that was not used for so long is worth half
HALVINGS_MAX = 60
WANTED_STEPS_MAX = 256  # chunks looked at to make sure that what repeats another one is wanted itself
ATTENTION_TOKENS = 2048  # the depth at which a token's attention costs as much as all the rest of it


class Why(IntEnum):
    """Why a chunk goes; in this order."""

    FOREIGN = 0  # of a namespace that is not in use: other weights, template, dtype
    BAD = 1  # its file, or one before it, was refused or is missing
    ABANDONED = 2  # the next turn did not keep what it holds
    SUPERSEDED = 3  # another chunk repeats what is useful of it
    LEAST = 4  # it saves least for its bytes
    LIVE = 5  # the same, but of a session that is live
    ASKED = 6  # somebody named it


def _never(namespace: bytes) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Rates:
    """What was measured: prompt tokens computed per second, at depth 0."""

    prefill_tokens_s: float

    def recompute_s(self, start: int, tokens: int) -> float:
        """Seconds to compute the KV of so many tokens behind the first `start`."""
        return tokens / self.prefill_tokens_s * (1 + (start + tokens / 2) / ATTENTION_TOKENS)


@dataclass(frozen=True, slots=True)
class Deletion:
    """A chunk that goes. `recompute_s` is lost with it; `snapshots` end one chunk earlier, or are gone.

    `file_bytes` are those that become free: none where the file was refused before.
    """

    hash: bytes
    namespace: bytes
    start: int
    tokens: int
    file_bytes: int
    why: Why
    recompute_s: float
    snapshots: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The deletions, in order: each chunk behind those that continue it. `fits`: with them there is room."""

    deletions: tuple[Deletion, ...]
    freed: int
    fits: bool


@dataclass(frozen=True, slots=True)
class Stakes:
    """What must be known beside the index.

    `live`: sessions that run or are expected back; `keep`: hashes of chunks that are about to be read or continued;
    `foreign`: whether a namespace is not in use.
    """

    now_us: int
    rates: Rates
    live: Collection[str] = frozenset()
    keep: Collection[bytes] = frozenset()
    foreign: Callable[[bytes], bool] = _never


def limit_of(quota: int, held: int, free: int, floor: int) -> int:
    """The most bytes that snapshots may take: the quota, and less where `free` bytes of disk would fall below `floor`.

    `held` are the bytes that they take now. It may be negative: then nothing fits.
    """
    return min(quota, held + free - floor)


def make_room(
    index: Index,
    need: int,
    limit: int,
    stakes: Stakes,
    other: int = 0,
    worth: float = float("inf"),
    live_worth: float = float("inf"),
) -> Plan:
    """What goes so that `need` more bytes fit under `limit`.

    `other`: bytes on disk that are not in the index: being written, put aside, not yet reconciled. `worth`: what the
    new bytes are worth, as `worth_of` says; nothing that is worth more goes for them, and the plan may not fit;
    `live_worth`: the same, against what a live session may come back for. A plan
    that does not fit is not worth doing for the sake of `need`, only where the limit is passed already.
    """
    assert need >= 0 and other >= 0
    over = index.file_bytes + other + need - limit
    return _Planner(index, stakes).run(over, Why.LIVE, worth, live_worth)


def sweep(index: Index, stakes: Stakes) -> Plan:
    """What is worth nothing, whether there is room or not; KV of other weights stays, they may come back."""
    return _Planner(index, replace(stakes, foreign=_never)).run(None, Why.SUPERSEDED, float("inf"))


def remove(index: Index, names: Collection[str], rates: Rates) -> Plan:
    """What these snapshots alone need, whatever it is worth; what is pinned stays. `fits`: all of it goes."""
    return _Planner(index, Stakes(0, rates)).drop(names)


def worth_of(rates: Rates, start: int, tokens: int, size: int) -> float:
    """What a new chunk is worth: seconds of computation per byte."""
    return rates.recompute_s(start, tokens) / size


def apply(index: Index, plan: Plan) -> None:
    """Takes the chunks of a plan out of the index, which must be as it was."""
    for deletion in plan.deletions:
        index.drop(deletion.hash)


class _Planner:
    """Plays the deletions through, beside the index."""

    def __init__(self, index: Index, stakes: Stakes) -> None:
        self._index, self._stakes = index, stakes
        self._gone: set[bytes] = set()
        self._left: dict[bytes, int] = {}  # children that are left, where some are gone
        self._moved: dict[bytes, dict[str, Snapshot]] = {}  # snapshots that end there instead, where they moved
        self._behind_bad = self._find_behind_bad()

    def run(self, over: int | None, last: Why, worth: float, live_worth: float = float("inf")) -> Plan:
        """Deletes until `over` bytes are freed (None: as long as there is something up to `last`)."""
        deletions: list[Deletion] = []
        freed = 0
        if over is not None and over <= 0:
            return Plan((), 0, True)
        queue = [entry for chunk in self._index.chunks.values() if (entry := self._entry(chunk))]
        heapq.heapify(queue)
        while queue and (over is None or freed < over):
            entry = heapq.heappop(queue)
            why, score, _, _, chunk = entry
            again = self._entry(chunk)
            if again is None:
                continue
            if again > entry:  # what repeated it has gone
                heapq.heappush(queue, again)
                continue
            if why > last or (why is Why.LEAST and score > worth) or (why is Why.LIVE and score > live_worth):
                break
            deletions.append(self._deletion(chunk, why))
            freed += chunk.held
            before = self._delete(chunk)
            if before is not None and (entry_before := self._entry(before)):
                heapq.heappush(queue, entry_before)
        return Plan(tuple(deletions), freed, over is None or freed >= over)

    def drop(self, names: Collection[str]) -> Plan:
        """Deletes what only these snapshots need, each from its end."""
        deletions: list[Deletion] = []
        whole = True
        for name in names:
            end = self._index.snapshots[name].chunk
            if any(one.pinned for one in (end.ends or {}).values()):
                whole = False
                continue
            at: Chunk | None = end
            while at is not None and self._alone(at, names):
                deletions.append(self._deletion(at, Why.ASKED))
                at = self._delete(at)
        return Plan(tuple(deletions), sum(one.file_bytes for one in deletions), whole)

    def _alone(self, chunk: Chunk, names: Collection[str]) -> bool:
        """Whether nothing but these snapshots needs a chunk, so far."""
        left = self._left.get(chunk.hash, len(chunk.children or ()))
        return not left and chunk.hash not in self._gone and self._ends(chunk).keys() <= set(names)

    def _entry(self, chunk: Chunk) -> tuple[Why, float, int, int, Chunk] | None:
        """Where a chunk stands in the queue; None if it may not go (yet)."""
        if self._left.get(chunk.hash, len(chunk.children or ())) or chunk.hash in self._stakes.keep:
            return None
        ends = self._ends(chunk)
        if any(one.pinned for one in ends.values()):
            return None
        useful = self._useful(chunk, ends)
        why = self._why(chunk, ends, useful)
        if why < Why.LEAST:
            return why, 0.0, chunk.used_us, chunk.made, chunk
        age_us = max(self._stakes.now_us - chunk.used_us, 0)
        lost_s = self._stakes.rates.recompute_s(chunk.start, useful) * (1 + chunk.uses)
        score = lost_s * 0.5 ** min(age_us / HALF_LIFE_US, HALVINGS_MAX) / chunk.file_bytes
        return why, score, chunk.used_us, chunk.made, chunk

    def _why(self, chunk: Chunk, ends: dict[str, Snapshot], useful: int) -> Why:
        if self._stakes.foreign(chunk.namespace):
            return Why.FOREIGN
        if chunk.hash in self._behind_bad:
            return Why.BAD
        if useful == 0:
            return Why.ABANDONED
        live = any(one.session in self._stakes.live for one in ends.values())
        went_on = all(one.kept is not None for one in ends.values())
        if (went_on or not live) and self._repeated(chunk, useful):
            return Why.SUPERSEDED
        return Why.LIVE if live else Why.LEAST

    def _useful(self, chunk: Chunk, ends: dict[str, Snapshot]) -> int:
        """The tokens of a last chunk that a session may come back for."""
        upto = max((chunk.end if one.kept is None else one.kept for one in ends.values()), default=chunk.end)
        return max(min(upto, chunk.end) - chunk.start, 0)

    def _repeated(self, chunk: Chunk, useful: int) -> bool:
        """Whether a sibling holds its useful tokens, but for a part of a block at most."""
        blocks = useful // BLOCK_TOKENS
        wanted = chunk.marks[: blocks * MARK_BYTES]
        return any(
            one.tokens >= useful
            and shared_marks(one.marks, wanted) == blocks
            and one.hash not in self._behind_bad
            and one.plain
            and chunk.plain
            and self._wanted(one, one.start + useful)
            for one in self._index.neighbours(chunk, self._gone)
        )

    def _wanted(self, top: Chunk, upto: int) -> bool:
        """Whether a session may come back for the first `upto` tokens of what goes through `top`, so that it stays."""
        todo = [top]
        for _ in range(WANTED_STEPS_MAX):
            if not todo:
                break
            chunk = todo.pop()
            if any(one.kept is None or one.kept >= upto for one in self._ends(chunk).values()):
                return True
            todo.extend(child for _, _, child in chunk.children or () if child.hash not in self._gone)
        return False

    def _ends(self, chunk: Chunk) -> dict[str, Snapshot]:
        return self._moved.get(chunk.hash, chunk.ends or {})

    def _deletion(self, chunk: Chunk, why: Why) -> Deletion:
        ends = self._ends(chunk)
        useful = 0 if why in (Why.FOREIGN, Why.BAD, Why.SUPERSEDED) else self._useful(chunk, ends)
        cost_s = self._stakes.rates.recompute_s(chunk.start, useful)
        where = (chunk.hash, chunk.namespace, chunk.start, chunk.tokens, chunk.held)
        return Deletion(*where, why, cost_s, tuple(sorted(ends)))

    def _delete(self, chunk: Chunk) -> Chunk | None:
        """Plays what `Index.drop` does; returns the chunk before."""
        self._gone.add(chunk.hash)
        before = chunk.parent
        if before is None:
            return None
        left = self._left.get(before.hash, len(before.children or ())) - 1
        self._left[before.hash] = left
        if left == 0 and not self._ends(before):
            self._moved[before.hash] = self._ends(chunk)
        return before

    def _find_behind_bad(self) -> set[bytes]:
        """The chunks that cannot be restored, because they or one before them was refused."""
        found: set[bytes] = set()
        todo = [self._index.chunks[hash_] for hash_ in self._index.bad]
        while todo:
            chunk = todo.pop()
            if chunk.hash not in found:
                found.add(chunk.hash)
                todo.extend(child for _, _, child in chunk.children or ())
        return found
