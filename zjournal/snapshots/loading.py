"""The index from what the journal has: rows of chunks and of snapshots, one space at a time.

The rows may be of any type that has these fields. What they do not agree on is left out, and told: an index that
is whole is worth more than one that names everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from zjournal.snapshots import format
from zjournal.snapshots.format import BLOCK_TOKENS, MARK_BYTES
from zjournal.snapshots.index import USES_MAX, Index, Row


class KnownChunk(Protocol):
    """A chunk; `marks` may be empty where they are not known."""

    @property
    def hash(self) -> bytes: ...
    @property
    def parent(self) -> bytes: ...
    @property
    def tokens(self) -> int: ...
    @property
    def file_bytes(self) -> int: ...
    @property
    def marks(self) -> bytes: ...
    @property
    def plain(self) -> bool: ...
    @property
    def bad(self) -> bool: ...
    @property
    def used_us(self) -> int: ...
    @property
    def uses(self) -> int: ...


class KnownSnapshot(Protocol):
    """A snapshot; `kept` is -1 where the session did not go on yet."""

    @property
    def session(self) -> str: ...
    @property
    def end(self) -> bytes: ...
    @property
    def made_us(self) -> int: ...
    @property
    def kept(self) -> int: ...


def load(
    index: Index,
    space: bytes,
    chunks: Sequence[KnownChunk],
    snapshots: Iterable[tuple[str, KnownSnapshot, bool]],
) -> list[str]:
    """Adds what is known of one space; `snapshots` are name, row and whether it is pinned, in order of their making.

    Each chunk comes behind its parent. Returns the names of snapshots that do not follow from the chunks.
    """
    rows = {chunk.hash: chunk for chunk in chunks}
    wrong: list[str] = []
    for name, one, pinned in snapshots:
        try:
            index.add(name, one.session, space, one.end, _fresh(index, rows, one.end), one.made_us)
        except ValueError:
            wrong.append(name)
            continue
        index.pin(name, pinned)
        if one.kept >= 0:
            index.went_on(name, one.kept)
    _mark(index, chunks)
    return wrong


def _fresh(index: Index, rows: Mapping[bytes, KnownChunk], end: bytes) -> list[Row]:
    """The chunks up to `end` that the index does not have yet, the first one first."""
    fresh: list[Row] = []
    at = end
    while at != format.ROOT and at not in index.chunks and (chunk := rows.get(at)) is not None:
        marks = chunk.marks or bytes(chunk.tokens // BLOCK_TOKENS * MARK_BYTES)
        fresh.append(Row(chunk.hash, chunk.parent, chunk.tokens, chunk.file_bytes, marks, chunk.plain))
        at = chunk.parent
    return fresh[::-1]


def _mark(index: Index, chunks: Sequence[KnownChunk]) -> None:
    """Carries over what the rows know of use and damage: a restore used the chunks before the one it ended with too."""
    used: dict[bytes, tuple[int, int]] = {}
    for chunk in reversed(chunks):
        there = index.chunks.get(chunk.hash)
        if there is None:
            continue
        behind_us, behind = used.pop(chunk.hash, (0, 0))
        there.used_us = max(chunk.used_us, behind_us)
        there.uses = min(chunk.uses + behind, USES_MAX)
        if chunk.parent != format.ROOT:
            before_us, before = used.get(chunk.parent, (0, 0))
            used[chunk.parent] = max(before_us, there.used_us), min(before + there.uses, USES_MAX)
        if chunk.bad:
            index.refuse(chunk.hash)
