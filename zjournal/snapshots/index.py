"""The index of the snapshots: which chunks are on disk, which continue which, and what of a prompt they hold.

It is built from rows that the journal tells, and looks at no folder. The chunks of a namespace form a tree; a
snapshot is a mark at the chunk where it ends, and needs that chunk and all before it. A chunk that no snapshot needs
is not in the index. So what branches and sessions share is there once, and is counted by what continues it.

The way down is found by the chain of hashes, 256 tokens a step. From the deepest chunk on, the best continuation is
found to the single token: children are sorted by the marks of their blocks, four bytes each, so that those with
the most blocks in common lie side by side, however many there are; of them the headers are read, the latest first.
Neither hash nor mark proves a hit. Who restores compares the tokens (`ChunkFile.prove`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from zjournal.snapshots import format
from zjournal.snapshots.format import BLOCK_TOKENS, CHUNK_TOKENS, CHUNK_TOKENS_BYTES, MARK_BYTES, PLAIN, TOKEN_BYTES

CANDIDATES_MAX = 8  # headers read for one lookup; of more children with as many blocks in common the latest are taken
GROUP_MAX = 256  # children that are looked at for these
TOKENS_KNOWN_MAX = 4096  # chunks whose tokens are remembered, 1 KiB each
NEAR_TOKENS_MIN = 1024
NEAR_PART_MIN = 0.9
NEAR_STEPS_MAX = 1024  # chunks looked at to name a snapshot that was nearly met
USES_MAX = 8  # restores that count for what a chunk is worth

TokensOf = Callable[["Chunk"], "bytes | None"]


class Row(NamedTuple):
    """A chunk as the journal tells it. `file_bytes` is the size of its file, `marks` are those of its tokens."""

    hash: bytes
    parent: bytes
    tokens: int
    file_bytes: int
    marks: bytes
    plain: bool = True  # its tokens say everything: `extra` is PLAIN


@dataclass(eq=False, slots=True)
class Chunk:
    """A chunk on disk."""

    hash: bytes
    namespace: bytes
    parent: Chunk | None  # None: its parent is the root
    start: int
    tokens: int
    file_bytes: int
    marks: bytes
    plain: bool
    used_us: int
    made: int  # chunks are numbered in the order in which they came
    uses: int = 0
    bad: bool = False  # its file was refused; it waits to be written again
    children: list[tuple[bytes, bytes, Chunk]] | None = None  # (marks, hash, chunk), sorted
    ends: dict[str, Snapshot] | None = None  # snapshots that end here

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.start + self.tokens

    @property
    def held(self) -> int:
        """Bytes that it takes in its place; none if its file was refused, for then it was put aside, or is missing."""
        return 0 if self.bad else self.file_bytes

    @property
    def needed(self) -> bool:
        return bool(self.children or self.ends)

    def path(self) -> Iterator[Chunk]:
        """Yields this chunk and all before it, the last first."""
        at: Chunk | None = self
        while at is not None:
            yield at
            at = at.parent


@dataclass(eq=False, slots=True)
class Snapshot:
    """What restores a terminal state, or what is left of it: the chunks up to `chunk`.

    `kept`: the session went on from here, and its next turn began with so many tokens of it; None: it did not yet.
    """

    name: str
    session: str
    chunk: Chunk
    made_us: int
    pinned: bool = False
    kept: int | None = None

    @property
    def tokens(self) -> int:
        return self.chunk.end


class Near(NamedTuple):
    """A snapshot that was nearly met: the prompt is another one from token `at` on, of the snapshot's `tokens`."""

    snapshot: str
    at: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Found:
    """What of a prompt is on disk: all of `chunks`, then the first `partial_tokens` of `partial`."""

    chunks: tuple[Chunk, ...]
    partial: Chunk | None
    partial_tokens: int
    near: Near | None = None

    @property
    def tokens(self) -> int:
        return len(self.chunks) * CHUNK_TOKENS + self.partial_tokens


@dataclass(eq=False, slots=True)
class _Tree:
    """The chunks of a namespace that have no parent."""

    children: list[tuple[bytes, bytes, Chunk]] = field(default_factory=list)


class Index:
    """All snapshots of a data directory. One owner: not for two threads at once."""

    def __init__(self) -> None:
        self._chunks: dict[bytes, Chunk] = {}
        self._trees: dict[bytes, _Tree] = {}
        self._snapshots: dict[str, Snapshot] = {}
        self._known: OrderedDict[bytes, bytes] = OrderedDict()  # tokens of chunks whose headers were read
        self._made = 0
        self.file_bytes = 0  # of all files but those that were refused
        self.bad: set[bytes] = set()  # chunks whose files were refused

    @property
    def chunks(self) -> Mapping[bytes, Chunk]:
        return MappingProxyType(self._chunks)

    @property
    def snapshots(self) -> Mapping[str, Snapshot]:
        return MappingProxyType(self._snapshots)

    # --- changing ----------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        session: str,
        namespace: bytes,
        end: bytes,
        rows: Iterable[Row],
        now_us: int,
    ) -> Snapshot:
        """A snapshot was committed that ends with chunk `end`. `rows`: its new chunks, each behind its parent.

        A row of a chunk that is there already counts as written anew. Raises ValueError, and changes nothing, if
        the rows do not lead from what is there to `end`.
        """
        if name in self._snapshots:
            raise ValueError(f"there is a snapshot {name} already")
        fresh = self._checked(namespace, end, rows)
        for row in fresh:
            self._put(namespace, row, now_us)
        chunk = self._chunks[end]
        snapshot = Snapshot(name, session, chunk, now_us)
        chunk.ends = {} if chunk.ends is None else chunk.ends
        chunk.ends[name] = snapshot
        self._snapshots[name] = snapshot
        chunk.used_us = max(chunk.used_us, now_us)
        return snapshot

    def remove(self, name: str) -> list[Chunk]:
        """A snapshot goes. Returns the chunks that nothing needs any more, the last first; they are forgotten."""
        snapshot = self._snapshots.pop(name)
        ends = snapshot.chunk.ends
        assert ends is not None
        del ends[name]
        gone = []
        at: Chunk | None = snapshot.chunk
        while at is not None and not at.needed:
            gone.append(at)
            self._forget(at)
            at = at.parent
        return gone

    def drop(self, hash_: bytes) -> list[str]:
        """A chunk goes that nothing continues. A snapshot that ended with it ends one chunk before.

        Where other snapshots need that one as well, or there is none, it is gone: it would say nothing new. Returns
        the names of those.
        """
        chunk = self._chunks[hash_]
        assert not chunk.children, "chunks go from the end"
        before, ends = chunk.parent, chunk.ends or {}
        self._forget(chunk)
        if before is None or before.needed:
            moved: dict[str, Snapshot] = {name: one for name, one in ends.items() if before and one.pinned}
        else:
            moved = dict(ends)
        gone = [name for name in ends if name not in moved]
        for name in gone:
            del self._snapshots[name]
        for name, one in moved.items():
            assert before is not None
            one.chunk = before
            before.ends = {} if before.ends is None else before.ends
            before.ends[name] = one
        return gone

    def refuse(self, hash_: bytes) -> None:
        """A chunk's file was found bad or missing: nothing is found in it or behind it until it is written again."""
        chunk = self._chunks[hash_]
        self.file_bytes -= chunk.held
        chunk.bad = True
        self.bad.add(hash_)
        self._known.pop(hash_, None)

    def pin(self, name: str, pinned: bool) -> None:
        """What is pinned never goes by itself."""
        self._snapshots[name].pinned = pinned

    def went_on(self, name: str, kept: int) -> None:
        """The session's next turn began with the first `kept` tokens of this snapshot, if it is still there.

        Of several next turns the one counts that kept most.
        """
        snapshot = self._snapshots.get(name)
        if snapshot is not None:
            snapshot.kept = max(kept, snapshot.kept or 0)

    def used(self, found: Found, now_us: int) -> None:
        """What was found was restored."""
        last = found.partial or (found.chunks[-1] if found.chunks else None)
        for chunk in last.path() if last else ():
            chunk.uses = min(chunk.uses + 1, USES_MAX)
            chunk.used_us = max(chunk.used_us, now_us)

    # --- finding -----------------------------------------------------------------------------------------

    def covered(self, namespace: bytes, tokens: bytes, extras: Mapping[int, bytes] = MappingProxyType({})) -> int:
        """How many of the packed tokens of a state are on disk in full chunks: from there on it has to be written."""
        return len(self._whole(namespace, tokens, len(tokens), extras)) * CHUNK_TOKENS

    def find(
        self,
        namespace: bytes,
        prompt: bytes,
        tokens_of: TokensOf,
        extras: Mapping[int, bytes] = MappingProxyType({}),
    ) -> Found:
        """The longest beginning of a packed prompt that is on disk; its last token is never reused, as in memory.

        `tokens_of` reads the tokens of a chunk from its header, None if that fails; what it told is remembered.
        `extras`: `extra` of the prompt's chunks by their number, where it is not PLAIN.
        """
        usable = max(len(prompt) - TOKEN_BYTES, 0)
        chunks = self._whole(namespace, prompt, usable, extras)
        at = len(chunks) * CHUNK_TOKENS_BYTES
        children = self._below(namespace, chunks)
        want = prompt[at : min(at + CHUNK_TOKENS_BYTES, usable)]
        if len(chunks) in extras:
            children = []  # a chunk with an image in it is met whole or not at all
        partial, shared = self._continuation(children, want, tokens_of)
        found = Found(tuple(chunks), partial, shared)
        if found.tokens < NEAR_TOKENS_MIN or found.tokens * TOKEN_BYTES >= usable:
            return found
        return Found(found.chunks, partial, shared, self._near(found))

    def _whole(self, namespace: bytes, packed: bytes, usable: int, extras: Mapping[int, bytes]) -> list[Chunk]:
        """The full chunks that `packed` begins with, within its first `usable` bytes."""
        chunks: list[Chunk] = []
        hash_ = format.ROOT
        for at in range(0, usable - CHUNK_TOKENS_BYTES + 1, CHUNK_TOKENS_BYTES):
            tokens = packed[at : at + CHUNK_TOKENS_BYTES]
            longer = format.chain(hash_, namespace, extras.get(len(chunks), PLAIN), tokens)
            chunk = self._chunks.get(longer)
            if chunk is None or chunk.bad:
                break
            chunks.append(chunk)
            hash_ = longer
        return chunks

    def _below(self, namespace: bytes, chunks: list[Chunk]) -> list[tuple[bytes, bytes, Chunk]]:
        if chunks:
            return chunks[-1].children or []
        tree = self._trees.get(namespace)
        return tree.children if tree else []

    def _continuation(
        self, children: list[tuple[bytes, bytes, Chunk]], want: bytes, tokens_of: TokensOf
    ) -> tuple[Chunk | None, int]:
        """The child that shares the longest beginning with `want`, and its length in tokens."""
        if not children or not want:
            return None, 0
        best, length, reads = None, 0, CANDIDATES_MAX
        for blocks, group in _groups(children, format.marks(want)):
            if (blocks + 1) * BLOCK_TOKENS <= length or not reads:
                break  # the rest share less than what is found; a mark may lie, so the first group need not hold it
            latest = sorted((one for one in group if one.plain and not one.bad), key=lambda one: -one.made)[:reads]
            reads -= len(latest)
            for chunk in latest:
                tokens = self._tokens(chunk, tokens_of)
                shared = shared_tokens(tokens, want) if tokens is not None else 0
                if shared > length:
                    best, length = chunk, shared
        return best, length

    def _tokens(self, chunk: Chunk, tokens_of: TokensOf) -> bytes | None:
        known = self._known.get(chunk.hash)
        if known is not None:
            self._known.move_to_end(chunk.hash)
            return known
        told = tokens_of(chunk)
        if told is not None:
            self._known[chunk.hash] = told
            if len(self._known) > TOKENS_KNOWN_MAX:
                self._known.popitem(last=False)
        return told

    def _near(self, found: Found) -> Near | None:
        """The snapshot that was nearly met, the shortest one if there are several."""
        top = found.partial or found.chunks[-1]
        most = found.tokens / NEAR_PART_MIN
        best: Snapshot | None = None
        todo = [top]
        for _ in range(NEAR_STEPS_MAX):
            if not todo:
                break
            chunk = todo.pop()
            if found.tokens < chunk.end < most and chunk.ends and (best is None or chunk.end < best.tokens):
                best = next(reversed(chunk.ends.values()))
            if chunk.end < most:
                todo.extend(child for _, _, child in chunk.children or ())
        return None if best is None else Near(best.name, found.tokens, best.tokens)

    # --- parts -------------------------------------------------------------------------------------------

    def _checked(self, namespace: bytes, end: bytes, rows: Iterable[Row]) -> list[Row]:
        """The rows, which lead to `end`. Raises ValueError."""
        fresh: dict[bytes, Row] = {}
        for row in rows:
            before = fresh.get(row.parent)
            there = self._chunks.get(row.parent)
            known = self._chunks.get(row.hash)
            if before is None and there is None and row.parent != format.ROOT:
                raise ValueError(f"chunk {row.hash.hex()} continues none that is known")
            if (before.tokens if before else there.tokens if there else CHUNK_TOKENS) != CHUNK_TOKENS:
                raise ValueError(f"chunk {row.hash.hex()} continues a tail")
            if any(one is not None and one.namespace != namespace for one in (there, known)):
                raise ValueError(f"chunk {row.hash.hex()} belongs to another namespace")
            if not 0 < row.tokens <= CHUNK_TOKENS or len(row.marks) != row.tokens // BLOCK_TOKENS * MARK_BYTES:
                raise ValueError(f"chunk {row.hash.hex()} has {row.tokens} tokens and {len(row.marks)} bytes of marks")
            if row.file_bytes <= 0 or row.hash in fresh or len(row.hash) != format.DIGEST_BYTES:
                raise ValueError(f"chunk {row.hash.hex()} has {row.file_bytes} bytes, or is told of twice")
            if known is not None and self._parent(row.hash) != row.parent:
                raise ValueError(f"chunk {row.hash.hex()} is known with another parent")
            fresh[row.hash] = row
        if end not in fresh and (end not in self._chunks or self._chunks[end].namespace != namespace):
            raise ValueError(f"chunk {end.hex()}, the snapshot's end, is not known")
        left, at = len(fresh), end
        while left and at != format.ROOT:
            new = fresh.get(at)
            left -= new is not None
            at = new.parent if new else self._parent(at)
        if left:
            raise ValueError("there are chunks that the snapshot does not need")
        return list(fresh.values())

    def _parent(self, hash_: bytes) -> bytes:
        parent = self._chunks[hash_].parent
        return format.ROOT if parent is None else parent.hash

    def _put(self, namespace: bytes, row: Row, now_us: int) -> None:
        """Adds a chunk, or renews the one that is there."""
        known = self._chunks.get(row.hash)
        if known is not None:
            self.file_bytes += row.file_bytes - known.held
            known.file_bytes, known.bad, known.used_us = row.file_bytes, False, max(known.used_us, now_us)
            self.bad.discard(row.hash)
            return
        parent = self._chunks.get(row.parent)
        start = 0 if parent is None else parent.end
        self._made += 1
        chunk = Chunk(
            row.hash, namespace, parent, start, row.tokens, row.file_bytes, row.marks, row.plain, now_us, self._made
        )
        self._chunks[row.hash] = chunk
        self.file_bytes += row.file_bytes
        if parent is None:
            siblings = self._trees.setdefault(namespace, _Tree()).children
        else:
            parent.children = siblings = [] if parent.children is None else parent.children
        insort(siblings, (row.marks, row.hash, chunk))

    def _forget(self, chunk: Chunk) -> None:
        """Takes a chunk out that nothing continues."""
        assert not chunk.children
        siblings = self._siblings(chunk)
        at = bisect_left(siblings, (chunk.marks, chunk.hash))  # type: ignore[type-var]
        assert siblings[at][2] is chunk
        del siblings[at]
        if chunk.parent is None and not siblings:
            del self._trees[chunk.namespace]
        del self._chunks[chunk.hash]
        self._known.pop(chunk.hash, None)
        self.bad.discard(chunk.hash)
        self.file_bytes -= chunk.held

    def _siblings(self, chunk: Chunk) -> list[tuple[bytes, bytes, Chunk]]:
        """The chunks that continue the same one, itself among them."""
        if chunk.parent is None:
            return self._trees[chunk.namespace].children
        assert chunk.parent.children is not None
        return chunk.parent.children

    def neighbours(self, chunk: Chunk, without: Collection[bytes]) -> list[Chunk]:
        """The one or two siblings that share most of its beginning, by their marks; not those `without`.

        Behind too many of these none is looked for.
        """
        siblings = self._siblings(chunk)
        at = bisect_left(siblings, (chunk.marks, chunk.hash))  # type: ignore[type-var]
        sides = (range(at - 1, max(at - 1 - GROUP_MAX, -1), -1), range(at + 1, min(at + 1 + GROUP_MAX, len(siblings))))
        nearest = (next((siblings[one][2] for one in side if siblings[one][1] not in without), None) for side in sides)
        return [one for one in nearest if one is not None]

    # --- checking ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Asserts every invariant."""
        seen: set[bytes] = set()
        todo: list[tuple[Chunk | None, bytes, Chunk]] = []
        for namespace, tree in self._trees.items():
            assert tree.children and tree.children == sorted(tree.children, key=lambda one: one[:2])
            todo += [(None, namespace, one) for _, _, one in tree.children]
        while todo:
            parent, namespace, chunk = todo.pop()
            assert chunk.hash not in seen and self._chunks[chunk.hash] is chunk
            seen.add(chunk.hash)
            assert chunk.parent is parent and chunk.namespace == namespace
            assert chunk.start == (parent.end if parent else 0) and 0 < chunk.tokens <= CHUNK_TOKENS
            assert len(chunk.marks) == chunk.tokens // BLOCK_TOKENS * MARK_BYTES
            assert chunk.needed, "a chunk that nothing needs"
            assert not chunk.children or chunk.tokens == CHUNK_TOKENS, "a tail is continued"
            children = chunk.children or []
            assert children == sorted(children, key=lambda one: one[:2])
            assert all((marks, hash_) == (one.marks, one.hash) for marks, hash_, one in children)
            todo += [(chunk, namespace, one) for _, _, one in children]
            for name, snapshot in (chunk.ends or {}).items():
                assert self._snapshots[name] is snapshot and snapshot.chunk is chunk and snapshot.name == name
        assert seen == self._chunks.keys()
        assert self.file_bytes == sum(one.held for one in self._chunks.values())
        assert all(name in (one.chunk.ends or {}) for name, one in self._snapshots.items())
        assert self.bad == {one.hash for one in self._chunks.values() if one.bad}
        assert len(self._known) <= TOKENS_KNOWN_MAX and self._known.keys() <= self._chunks.keys()


def shared_tokens(a: bytes, b: bytes) -> int:
    """How many tokens two packed runs have in common from their start."""
    end = min(len(a), len(b))
    if a[:end] == b[:end]:
        return end // TOKEN_BYTES
    low, high = 0, end  # the first `low` bytes are equal, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low // TOKEN_BYTES


def shared_marks(a: bytes, b: bytes) -> int:
    """How many marks two runs of them have in common from their start."""
    return shared_tokens(a, b)


def _groups(children: list[tuple[bytes, bytes, Chunk]], want: bytes) -> Iterator[tuple[int, list[Chunk]]]:
    """Yields the children that have the most blocks in common with `want`, and how many, then those with fewer.

    They are sorted, so each group lies around the place where `want` would stand.
    """
    low = high = bisect_left(children, (want,))  # type: ignore[type-var]
    while low > 0 or high < len(children):
        left = shared_marks(children[low - 1][0], want) if low > 0 else -1
        right = shared_marks(children[high][0], want) if high < len(children) else -1
        blocks = max(left, right)
        group: list[Chunk] = []
        while low > 0 and shared_marks(children[low - 1][0], want) == blocks and len(group) < GROUP_MAX // 2:
            low -= 1
            group.append(children[low][2])
        while high < len(children) and shared_marks(children[high][0], want) == blocks and len(group) < GROUP_MAX:
            group.append(children[high][2])
            high += 1
        yield blocks, group
