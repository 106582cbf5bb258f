"""The model's part about KV on disk: chunks and snapshots, as the facts say, and what an engine may say of them.

As docs/snapshots.md has it, once more and without any of its code.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Sequence
from typing import NamedTuple

from zjournal.journal import events, snapshots
from zjournal.journal.events import AnyEvent
from zjournal.journal.reader import Reader

ROOT = bytes(32)
CHUNK_TOKENS = 256


class Mismatch(Exception):
    """The journal tells something else than the model."""


class Chunk(NamedTuple):
    """One chunk. `bad`: its file was refused or is missing, and was not written again."""

    space: bytes
    parent: bytes
    tokens: int
    file_bytes: int
    bad: bool = False


class Snapshot(NamedTuple):
    """One snapshot: where it ends."""

    space: bytes
    end: bytes
    tokens: int
    pinned: bool = False


class Kept:
    """What is on disk."""

    def __init__(self) -> None:
        self.chunks: dict[bytes, Chunk] = {}  # by hash
        self.snapshots: dict[str, Snapshot] = {}  # by response

    def copy(self) -> Kept:
        other = Kept()
        other.chunks = dict(self.chunks)
        other.snapshots = dict(self.snapshots)
        return other

    def path(self, end: bytes) -> list[bytes]:
        """The chunks up to this one, the first one first."""
        found: list[bytes] = []
        while end != ROOT:
            found.append(end)
            end = self.chunks[end].parent
        return found[::-1]

    # --- what may happen ------------------------------------------------------------------------------

    def released(self, end: bytes) -> list[bytes]:
        """What nothing needs any more of the chunks up to where a snapshot has ended."""
        gone: list[bytes] = []
        while end in self.chunks and not self._children(end) - set(gone):
            if any(one.end == end for one in self.snapshots.values()):
                break
            gone.append(end)
            end = self.chunks[end].parent
        return gone

    def collected(self, space: bytes, hashes: Sequence[bytes]) -> list[bytes]:
        """Which of these chunks go when somebody gives them up by hand."""
        gone: list[bytes] = []
        for hash_ in hashes:
            there = self.chunks.get(hash_)
            if there is not None and there.space == space and not self._children(hash_) - set(gone):
                gone += [] if self._is_pinned(hash_) else [hash_]
        return gone

    def purged(self, space: bytes, gone: Sequence[bytes], cause: str) -> events.CachePurged:
        """The fact that these chunks are given up."""
        size = sum(self.chunks[hash_].file_bytes for hash_ in gone if not self.chunks[hash_].bad)
        return events.CachePurged(space=space, hashes=tuple(gone), file_bytes=size, cause=cause)

    def check_backed_up(self, event: events.CacheBackedUp, state: Sequence[int]) -> None:
        """Raises Mismatch if it is not these tokens that were backed up, or if they stand on nothing."""
        right = _chain(event.space, state[: event.tokens])
        told = {chunk.hash: chunk for chunk in event.chunks}
        for hash_, (parent, tokens) in right.items():
            there = self.chunks.get(hash_)
            known = there is not None and (there.space, there.parent, there.tokens) == (event.space, parent, tokens)
            if not known and (hash_ not in told or told[hash_].tokens != tokens):
                raise Mismatch(f"{event.response} was backed up, and a chunk that it stands on is not there")
        if not told.keys() <= right.keys() or event.end != list(right)[-1]:
            raise Mismatch(f"{event.response} was backed up with other chunks than its own")

    def allow(self, event: AnyEvent, damaged: Collection[bytes]) -> None:
        """Raises Mismatch if the engine may not say this. `damaged`: chunks whose files were tampered with."""
        match event:
            case events.CachePurged():
                self._allow_purge(event)
            case events.CacheQuarantined():
                if event.hash not in damaged:
                    raise Mismatch(f"a good file was refused: {event}")
            case events.CacheReconciled():
                if not set(event.missing) <= set(damaged):
                    raise Mismatch(f"acknowledged chunks are missing: {event}")
            case events.CacheRestored():
                if event.end not in self.chunks:
                    raise Mismatch(f"what is not there was restored: {event}")
            case events.CacheStopped() | events.CacheResumed():
                pass
            case _:
                raise Mismatch(f"the engine appended {event}")

    def _allow_purge(self, event: events.CachePurged) -> None:
        if event.cause not in ("quota", "stale"):
            raise Mismatch(f"the engine gave chunks up as {event.cause}")
        gone: set[bytes] = set()
        for hash_ in event.hashes:
            if hash_ not in self.chunks or self._children(hash_) - gone or self._is_pinned(hash_):
                raise Mismatch(f"a chunk that must stay was given up: {event}")
            gone.add(hash_)

    def _children(self, hash_: bytes) -> set[bytes]:
        return {child for child, chunk in self.chunks.items() if chunk.parent == hash_}

    def _is_pinned(self, hash_: bytes) -> bool:
        return any(one.end == hash_ and one.pinned for one in self.snapshots.values())

    # --- the fold -------------------------------------------------------------------------------------

    def add(self, event: AnyEvent) -> None:
        match event:
            case events.CacheBackedUp():
                before = b""
                for chunk in event.chunks:
                    parent = chunk.parent or before
                    self.chunks[chunk.hash] = Chunk(event.space, parent, chunk.tokens, chunk.file_bytes)
                    before = chunk.hash
                there = self.snapshots.get(event.response)
                pinned = there is not None and there.pinned
                self.snapshots[event.response] = Snapshot(event.space, event.end, event.tokens, pinned)
            case events.CachePurged():
                for hash_ in event.hashes:
                    self._drop(hash_)
            case events.CacheQuarantined() | events.CacheReconciled():
                for hash_ in [event.hash] if isinstance(event, events.CacheQuarantined) else event.missing:
                    if hash_ in self.chunks:
                        self.chunks[hash_] = self.chunks[hash_]._replace(bad=True)
            case events.SnapshotPinned() | events.SnapshotUnpinned():
                pinned = isinstance(event, events.SnapshotPinned)
                self.snapshots[event.response] = self.snapshots[event.response]._replace(pinned=pinned)
            case events.PayloadErased():
                self.snapshots.pop(event.response, None)

    def _drop(self, hash_: bytes) -> None:
        """A snapshot whose last chunk goes ends one earlier, unless it would say nothing new there."""
        chunk = self.chunks.pop(hash_)
        needed = bool(self._children(chunk.parent)) or any(one.end == chunk.parent for one in self.snapshots.values())
        for name, one in list(self.snapshots.items()):
            if one.end == hash_:
                if chunk.parent == ROOT or (needed and not one.pinned):
                    del self.snapshots[name]
                else:
                    self.snapshots[name] = one._replace(end=chunk.parent, tokens=one.tokens - chunk.tokens)

    # --- what the journal must tell -------------------------------------------------------------------

    def compare(self, reader: Reader) -> None:
        """Raises Mismatch at what the journal tells differently."""
        told = {
            row.hash: Chunk(row.space, row.parent, row.tokens, row.file_bytes, row.bad)
            for page in snapshots.chunks(reader)
            for row in page
        }
        if told != self.chunks:
            raise Mismatch(f"chunks: {told}, not {self.chunks}")
        ends = {
            row.response: Snapshot(row.space, row.end, row.tokens, row.pinned)
            for page in snapshots.snapshots(reader)
            for row, _ in page
        }
        if ends != self.snapshots:
            raise Mismatch(f"snapshots: {ends}, not {self.snapshots}")


def _chain(space: bytes, state: Sequence[int]) -> dict[bytes, tuple[bytes, int]]:
    """The chunks of a state: hash, and its parent and number of tokens."""
    found: dict[bytes, tuple[bytes, int]] = {}
    parent = ROOT
    for at in range(0, len(state), CHUNK_TOKENS):
        part = state[at : at + CHUNK_TOKENS]
        hash_ = hashlib.sha256(parent + space + bytes(32) + struct.pack(f"<{len(part)}I", *part)).digest()
        found[hash_] = parent, len(part)
        parent = hash_
    return found
