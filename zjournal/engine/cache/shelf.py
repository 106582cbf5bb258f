"""What lies on disk, what is on its way there or away from it, and what the journal has said of it.

The index is built from what the journal tells, and changed only by what it has committed: a snapshot is found after
its fact is durable, and a file is unlinked after the fact that gives it up is. Between deciding and committing, chunks
that are to go are found by nobody, and chunks that are written are counted against the limit before their first byte.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from zjournal.engine.cache.disk import Disk
from zjournal.engine.cache.gate import Gate
from zjournal.engine.cache.host import HostCache
from zjournal.engine.cache.leaving import Leaving
from zjournal.errors import ChunkFault, SnapshotFault
from zjournal.link import wire
from zjournal.snapshots import format, loading, plan
from zjournal.snapshots.folder import Folder
from zjournal.snapshots.format import Reason
from zjournal.snapshots.index import Chunk, Index, Row

LIVE_US = 1_800_000_000  # a session counts as live for half an hour after its last request
LIVE_MAX = 4096
FREE_BYTES_MIN = 256 << 20  # of the disk, for the journal beside them: nothing is written that leaves less
# A state that a turn has just left is so much more likely to be asked for than another. A choice, no measurement: it
# displaces what was restored up to three times, or what saves four times as much for its bytes.
FRESH_WORTH = 4
# Against a live session it counts less: a turn has just left that as well. With twice the average of its own n tokens
# it displaces the end of m others if m < n + 2,048, so never that of a much longer session.
LIVE_WORTH = 2
ROOM_PART = 32  # where room must be made, a part of so many of the limit is made at once: a plan takes 25 ms of 100,000
SPACES_KNOWN_MAX = 4096  # digests of namespaces that are remembered
TOKENS_KNOWN_MAX = 4096  # chunks written here whose tokens are remembered, 1 KiB each
_FULL = (errno.ENOSPC, errno.EDQUOT)
IN_ITS_PLACE = (errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST)  # there is a folder of a chunk's name
_BEFORE_IT = (errno.ENOTDIR, errno.ELOOP)  # a file or a link where a chunk's folder belongs

QUOTA, STALE = "quota", "stale"  # why chunks go

log = logging.getLogger("zjournal.engine")


class Standing(Enum):
    """What is to be done about a chunk that a state needs."""

    ABSENT = auto()
    BUSY = auto()  # it is being written or given up: ask again later
    THERE = auto()  # on disk, and in the journal or on its way there


class Room(Enum):
    """Whether so many bytes may be written."""

    FREE = auto()
    LATER = auto()  # when what is going has gone
    NONE = auto()


@dataclass(frozen=True, slots=True)
class Settings:
    """`limit`: bytes of all files in the folder. `codec`: raw, zstd or auto. `host_bytes`: 0 for none.

    `always`: what is on disk is read back, however long it takes.
    """

    folder: Path
    key: bytes
    limit: int
    codec: str = "auto"
    host_bytes: int = 0
    always: bool = False


@dataclass(frozen=True, slots=True)
class Told:
    """A snapshot that the journal has not committed yet."""

    request: str
    session: str
    space: bytes
    end: bytes
    rows: tuple[Row, ...]
    tokens: tuple[bytes, ...]  # those of each row


@dataclass(frozen=True, slots=True)
class _Going:
    """Chunks that go once the journal has committed it."""

    space: bytes
    hashes: tuple[bytes, ...]


@dataclass(slots=True)
class _Page:
    """What the journal has told so far of one space, at the start."""

    chunks: list[wire.Chunk] = field(default_factory=list)
    snapshots: list[wire.Snapshot] = field(default_factory=list)


class Shelf:
    """The folder, the index and the journal's word. One thread; the files are its disk's business."""

    def __init__(
        self, settings: Settings, disk: Disk, facts: Iterator[int], wall: Callable[[], int], gate: Gate
    ) -> None:
        """`wall` gives microseconds since 1970. Raises SnapshotFault if there can be no such folder."""
        self.settings = settings
        self.folder = Folder(settings.folder)
        self.disk = disk
        self.index = Index()
        self.host = HostCache(settings.host_bytes)
        self.gate = gate
        self.wall = wall
        self.events: list[wire.FromEngine] = []
        self.writing: dict[bytes, int] = {}  # chunks that are being written or not told yet, and their bytes
        self.reading: Counter[bytes] = Counter()  # chunks that are being read
        self.growing: Callable[[], Collection[bytes]] = tuple  # chunks that something is, or will be, written behind
        self.loaded = False  # the journal has told all it knows
        self.probing = False  # the disk's rate is being measured: what depends on it waits
        self._when_probed: list[Callable[[], None]] = []
        self.swept = False  # the folder was looked through: all its bytes are known
        self._facts = facts
        self._told: dict[int, Told | _Going] = {}
        self._told_bytes: dict[bytes, int] = {}
        self._going: set[bytes] = set()
        self.leaving = Leaving(self.folder, disk, settings.limit)
        self._pages: dict[bytes, _Page] = {}
        self._foreign: frozenset[bytes] = frozenset()
        self._stale: tuple[wire.Stale, ...] = ()
        self._live: OrderedDict[str, int] = OrderedDict()
        self._tokens: OrderedDict[bytes, bytes] = OrderedDict()  # of chunks that were written here
        self._spaces: dict[str, bytes] = {}
        self._disk_bytes: int | None = None  # bytes of our files and those that are free, together

    def space(self, namespace: str) -> bytes:
        """The digest that stands for a namespace on disk."""
        known = self._spaces.get(namespace)
        if known is None:
            if len(self._spaces) >= SPACES_KNOWN_MAX:
                self._spaces.clear()
            known = self._spaces[namespace] = format.digest("kv", namespace, self.settings.key.hex())
        return known

    @property
    def used(self) -> int:
        """Bytes of all files, each once: those being written or unlinked, put aside, or left over, as well."""
        return self._coming + self.index.file_bytes + self.leaving.soon

    @property
    def facts_open(self) -> int:
        """Facts that the journal has not answered yet."""
        return len(self._told)

    @property
    def _coming(self) -> int:
        return sum(self.writing.values()) + sum(self._told_bytes.values()) + self.leaving.stays

    # --- what the journal says ---------------------------------------------------------------------------

    def known(self, page: wire.Known) -> None:
        """Takes a page of what is on disk; with the last one the index is built."""
        kept = self._pages.setdefault(page.space, _Page())
        kept.chunks += page.chunks
        kept.snapshots += page.snapshots
        if page.last:
            for space, whole in self._pages.items():
                self._load(space, whole)
            self._pages = {}
            self.loaded = True
            self.measured(self.measure())

    def _load(self, space: bytes, page: _Page) -> None:
        snapshots = [(one.request, one, one.pinned) for one in page.snapshots]
        wrong = loading.load(self.index, space, page.chunks, snapshots)
        if wrong:
            log.error("%d snapshots do not follow from the chunks that the journal knows: %s", len(wrong), wrong[:8])

    def foreign(self, message: wire.Foreign) -> None:
        """What no request will ask for as long as this model is loaded. Room for a lower limit is made only now."""
        self._foreign = frozenset(message.spaces)
        self._stale = message.stale
        if self.loaded and self.used > self.limit:
            self._make_room(0, float("inf"))

    def stale(self, namespace: str, prompt: bytes, more_than: int) -> str:
        """What has changed of the model since KV of a packed prompt was written; "" if nothing of that is known.

        It must be more than so many tokens of it, in whole chunks: for less, files would have to be read.
        """
        own = (one for one in self._stale if one.namespace == namespace)
        return next((one.differs for one in own if self.index.covered(one.space, prompt) > more_than), "")

    def committed(self, fact: int) -> Told | None:
        """The journal has a fact. Returns the snapshot, if it was one; other facts are nobody's here."""
        told = self._told.pop(fact, None)
        if isinstance(told, _Going):
            self._go(told)
            return None
        if told is not None:
            self._forget_told(told)
            self._publish(told)
        return told

    def refused(self, fact: int) -> Told | None:
        """The journal will never have a fact: what was written for it goes, what was to go for it stays.

        Returns the snapshot, if it was one.
        """
        told = self._told.pop(fact, None)
        if isinstance(told, _Going):
            self._going.difference_update(told.hashes)
            return None
        if told is not None:
            self._forget_told(told)
            gone = {row.hash: row.file_bytes for row in told.rows if row.hash not in self.index.chunks}
            self.unlink(told.space, gone)
        return told

    def pin(self, message: wire.Pin) -> None:
        if message.request in self.index.snapshots:
            self.index.pin(message.request, message.pinned)

    def purge(self, message: wire.Purge) -> None:
        """The journal has given chunks and snapshots up: they are not found any more, and their files go.

        The snapshots may be of any space; the hashes are of the one that the message names.
        """
        gone: dict[bytes, dict[bytes, int]] = {message.space: dict.fromkeys(message.hashes, 0)}
        for request in message.requests:
            if request in self.index.snapshots:
                for chunk in self.index.remove(request):
                    gone.setdefault(chunk.namespace, {})[chunk.hash] = chunk.held
        for hash_ in message.hashes:
            there = self.index.chunks.get(hash_)
            if there is not None and not there.children:
                gone[message.space][hash_] = there.held
                self.index.drop(hash_)
        for space, sizes in gone.items():
            self.unlink(space, {hash_: size for hash_, size in sizes.items() if hash_ not in self.index.chunks})

    # --- for those who write -----------------------------------------------------------------------------

    def standing(self, hash_: bytes) -> Standing:
        """What is to be done about a chunk."""
        if hash_ in self.writing or hash_ in self._going or self.leaving.busy(hash_):
            return Standing.BUSY
        chunk = self.index.chunks.get(hash_)
        if hash_ in self._told_bytes or (chunk is not None and not chunk.bad):
            return Standing.THERE
        return Standing.ABSENT

    def tell(self, event: wire.BackedUp, session: str, rows: tuple[Row, ...], tokens: tuple[bytes, ...]) -> None:
        """Tells the journal of a snapshot whose files are on disk; `tokens` are those of the new chunks."""
        self._told[event.fact] = Told(event.request, session, event.space, event.end, rows, tokens)
        for row in rows:
            del self.writing[row.hash]
            self._told_bytes[row.hash] = row.file_bytes
            self.leaving.written(row.hash)
        self.events.append(event)

    def next_fact(self) -> int:
        return next(self._facts)

    @property
    def limit(self) -> int:
        """Bytes that all files may have now: less than what is set where the disk is nearly full."""
        if self._disk_bytes is None:  # the disk does not say
            return self.settings.limit
        return plan.limit_of(self.settings.limit, 0, self._disk_bytes, FREE_BYTES_MIN)

    def room(self, size: int, start: int, tokens: int, whole: tuple[int, int]) -> Room:
        """Whether a new chunk of at most `size` bytes may be written; if need be, others are given up for it.

        It counts as the average of its state at least, of which `whole` are tokens and bytes: what begins a state is
        worth what is to stand on it, and a tail does not go for being short.
        """
        if self.used + size <= self.limit:
            return Room.FREE
        if self.used - self._leaving + size <= self.limit:
            return Room.LATER
        rates = self.gate.rates
        worth = max(plan.worth_of(rates, start, tokens, size), plan.worth_of(rates, 0, *whole))
        many = max(size, self.settings.limit // ROOM_PART)
        if self._make_room(many, worth) or self._make_room(size, worth):
            return Room.LATER
        self.disk.write(self.measure, lambda free: self.measured(free if isinstance(free, int) else None))
        return Room.NONE

    def touch(self, session: str) -> None:
        """A request of this session is here."""
        self._live[session] = self.wall()
        self._live.move_to_end(session)
        if len(self._live) > LIVE_MAX:
            self._live.popitem(last=False)

    def measured(self, free: int | None) -> None:
        """What the disk has free just now. With our files it stays the same, until others write or delete there."""
        self._disk_bytes = self._disk_bytes if free is None else self.used + free

    def measure(self) -> int | None:
        """Bytes that the disk has free; for any thread. None if it does not say."""
        try:
            state = os.fstatvfs(self.folder.descriptor)
        except OSError:
            return None
        return state.f_bavail * state.f_frsize

    def after_probe(self, work: Callable[[], None]) -> None:
        """Does something once the disk's rate is known."""
        assert self.probing
        self._when_probed.append(work)

    def probed(self) -> None:
        """The disk's rate is known now, as far as it can be."""
        self.probing = False
        waiting, self._when_probed = self._when_probed, []
        for work in waiting:
            work()

    def release(self, hash_: bytes) -> None:
        """A chunk is not read any more, by one of those who did."""
        self.reading[hash_] -= 1
        if not self.reading[hash_]:
            del self.reading[hash_]

    # --- bad files ---------------------------------------------------------------------------------------

    def found_bad(self, space: bytes, hash_: bytes, fault: SnapshotFault) -> bool:
        """A chunk could not be used. If that is its file's fault it is put aside, once; whether it was."""
        if not isinstance(fault, ChunkFault):
            return False
        self.host.drop((hash_,))
        chunk = self.index.chunks.get(hash_)
        if chunk is None or chunk.bad or hash_ in self._going:
            return False  # told already, or given up meanwhile
        self.index.refuse(hash_)
        self.events.append(wire.Quarantined(format.file_name(hash_), hash_, space, str(fault.reason)))
        if fault.reason != Reason.MISSING:
            self.leaving.put_aside(space, hash_, chunk.file_bytes)
        return True

    # --- giving up ---------------------------------------------------------------------------------------

    def plan_purge(self, space: bytes, hashes: Collection[bytes], cause: str) -> None:
        """Tells the journal that chunks are to go, each behind those that continue it."""
        fact = self.next_fact()
        chunks = [self.index.chunks[hash_] for hash_ in hashes]
        requests = sorted({name for chunk in chunks for name in chunk.ends or ()})
        size = sum(chunk.held for chunk in chunks)
        self._told[fact] = _Going(space, tuple(hashes))
        self._going.update(hashes)
        self.events.append(
            wire.PurgePlanned(
                fact=fact, space=space, hashes=tuple(hashes), requests=tuple(requests), file_bytes=size, cause=cause
            )
        )

    def may_go(self, chunk: Chunk) -> bool:
        """Whether a chunk may be given up just now."""
        busy = any(chunk.hash in some for some in (self._going, self.reading, self.growing()))
        return not busy and not chunk.children and not any(one.pinned for one in (chunk.ends or {}).values())

    def tokens(self, hash_: bytes) -> bytes | None:
        """The tokens of a chunk, if it was written here lately."""
        return self._tokens.get(hash_)

    def is_going(self, chunk: Chunk) -> bool:
        """Whether a chunk is to go, and so is not found any more."""
        return chunk.hash in self._going

    def unlink(self, space: bytes, sizes: Mapping[bytes, int]) -> None:
        """Unlinks files that the journal does not name any more, of so many bytes; those in quarantine as well."""
        self.host.drop(sizes.keys())
        for hash_ in sizes:
            self._tokens.pop(hash_, None)
        names = {hash_: size for hash_, size in sizes.items() if hash_ not in self.writing}
        if names:
            self.leaving.unlink(space, names)

    @property
    def _leaving(self) -> int:
        """Bytes that will be free soon."""
        going = sum(self.index.chunks[hash_].held for hash_ in self._going if hash_ in self.index.chunks)
        return going + self.leaving.soon

    def _make_room(self, size: int, worth: float) -> bool:
        """Plans what goes for `size` more bytes, if that is worth it; whether anything goes."""
        stakes = plan.Stakes(
            self.wall(),
            self.gate.rates,
            live={session for session, at in self._live.items() if at > self.wall() - LIVE_US},
            keep={*self._going, *self.reading, *self.growing(), *self._parents_told()},
            foreign=self._foreign.__contains__,
        )
        other = self._coming + self.leaving.soon - self._leaving
        left = self.limit - min(other, 0)
        found = plan.make_room(self.index, size, left, stakes, max(other, 0), FRESH_WORTH * worth, LIVE_WORTH * worth)
        if not found.deletions or not (found.fits or size == 0):
            return False
        spaces: dict[bytes, list[bytes]] = {}
        for deletion in found.deletions:
            spaces.setdefault(deletion.namespace, []).append(deletion.hash)
        for space, hashes in spaces.items():
            self.plan_purge(space, hashes, QUOTA)
        return True

    def _parents_told(self) -> Iterator[bytes]:
        for told in self._told.values():
            if isinstance(told, Told):
                yield told.end
                yield from (row.parent for row in told.rows)

    def _go(self, going: _Going) -> None:
        """The journal has given chunks up."""
        self._going.difference_update(going.hashes)
        gone = {}
        for hash_ in going.hashes:
            chunk = self.index.chunks.get(hash_)
            if chunk is not None and not chunk.children:
                gone[hash_] = chunk.held
                self.index.drop(hash_)
        self.unlink(going.space, gone)

    def _forget_told(self, told: Told) -> None:
        for row in told.rows:
            self._told_bytes.pop(row.hash, None)

    def _publish(self, told: Told) -> None:
        """From now on the snapshot is found. It takes the place of the one its request had, which is shorter."""
        now_us = self.wall()
        before = self.index.snapshots.get(told.request)
        kept_name = told.request + "\0"  # what keeps the former chunks while the name changes hands
        if before is not None:
            self.index.add(kept_name, before.session, told.space, before.chunk.hash, (), before.made_us)
            self.index.remove(told.request)
        for row, tokens in zip(told.rows, told.tokens, strict=True):
            self._tokens[row.hash] = tokens
            if len(self._tokens) > TOKENS_KNOWN_MAX:
                self._tokens.popitem(last=False)
        made = self.index.add(told.request, told.session, told.space, told.end, told.rows, now_us)
        if before is not None:
            made.pinned, made.kept = before.pinned, before.kept
            gone = self.index.remove(kept_name)
            self.unlink(told.space, {chunk.hash: chunk.held for chunk in gone})

    # --- looking ------------------------------------------------------------------------------------------

    def named(self, place: str, hash_: bytes) -> int | None:
        """The bytes of a chunk's file that somebody knows, None if nobody does; for any thread."""
        chunk = self.index.chunks.get(hash_)
        if chunk is not None and not chunk.bad:
            return chunk.file_bytes
        for known in (self.writing, self._told_bytes):
            if hash_ in known:
                return known.get(hash_, 0)
        return self.leaving.named(hash_)

    def audit(self) -> None:
        """Asserts the invariants that cost little."""
        self.host.check()
        assert not self.writing.keys() & self._told_bytes.keys()
        self.leaving.audit()
        assert self.index.file_bytes >= 0 and self.used >= 0

    def check(self) -> None:
        """Asserts every invariant; looks at every chunk."""
        self.audit()
        self.index.check()


def is_full(fault: SnapshotFault) -> bool:
    """Whether the disk has no room, or its owner may not use more."""
    return getattr(fault, "errno", None) in _FULL


def is_of_place(fault: SnapshotFault) -> bool:
    """Whether something else lies where a chunk belongs, or its folder."""
    return fault.errno in IN_ITS_PLACE or fault.errno in _BEFORE_IT
