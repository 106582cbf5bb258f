"""The API's side of the snapshots: what the engine says of them becomes facts, in order, and it hears what came of it.

The engine publishes a snapshot, and unlinks a file, only after the fact is durable. So its messages wait here in line:
they are looked at and written in one transaction as many as there are, and while the journal cannot be written they
wait on. What an engine said that has died meanwhile is dropped: its files are orphans, which the next one finds.

The other way, whatever else gives chunks up or pins them (a deletion, a command) is told to the engine once it is
durable; without an engine that has the folder, the files are unlinked here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from zjournal import errors
from zjournal.api.metrics import Metrics
from zjournal.journal import events, kept, snapshots
from zjournal.journal.log import Journal
from zjournal.journal.transaction import Transaction
from zjournal.link import wire
from zjournal.link.client import EngineClient
from zjournal.sessions import snapshots as files

BATCH = 64  # messages in one transaction
RETRY_S = 1.0
BY_ENGINE = (snapshots.QUOTA, snapshots.STALE, snapshots.REPLACED)  # causes of purges that the engine knows of

Message = wire.BackedUp | wire.PurgePlanned | wire.Quarantined | wire.SnapshotsOff | wire.SnapshotsOn | wire.Reconciled
MESSAGES = (
    wire.BackedUp,
    wire.PurgePlanned,
    wire.Quarantined,
    wire.SnapshotsOff,
    wire.SnapshotsOn,
    wire.Reconciled,
)
_Heard = (
    events.CachePurged
    | events.PayloadErased
    | events.SnapshotPinned
    | events.SnapshotUnpinned
    | events.SessionPinned
    | events.SessionUnpinned
)
_PIN_FACTS = (events.SnapshotPinned, events.SnapshotUnpinned, events.SessionPinned, events.SessionUnpinned)

log = logging.getLogger("zjournal.api")


class Outcome(msgspec.Struct, frozen=True):
    """What became of a message. `pinned`: it is a snapshot of a pinned session."""

    written: bool
    pinned: bool = False


class Snapshots:
    """Owns the line of messages between an engine and the journal. All methods run on the event loop."""

    def __init__(self, journal: Journal, metrics: Metrics, data_dir: Path, *, on: bool) -> None:
        """`on`: the engine has the folder of the snapshots."""
        self._journal = journal
        self._metrics = metrics
        self._data_dir = data_dir
        self._on = on
        self._engine: EngineClient | None = None
        self._waiting: deque[Message] = deque()
        self._life = 0  # of engines: what one said is not answered to the next
        self._news = asyncio.Event()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._others: set[asyncio.Task[None]] = set()
        self._unsubscribe: Callable[[], None] = lambda: None

    def serve(self, engine: EngineClient) -> None:
        """Sets the engine and begins."""
        self._engine = engine
        loop = asyncio.get_running_loop()

        def hear(facts: Sequence[events.Recorded]) -> None:  # on the writer's thread
            told = [
                fact.event
                for fact in facts
                if isinstance(fact.event, (events.CachePurged, events.PayloadErased, *_PIN_FACTS))
            ]
            if told:
                loop.call_soon_threadsafe(self._hear, told)

        self._unsubscribe = self._journal.subscribe(hear)
        self._task = loop.create_task(self._write(), name="snapshots")

    def tidy(self) -> None:
        """Removes what a kill has left of what was given up, where no engine has the folder to do that."""
        if not self._on:
            self._spawn(self._reconcile())

    async def close(self) -> None:
        """Writes what waits, as far as the journal takes it, and ends."""
        self._stopping.set()
        self._news.set()
        if self._task is not None:
            await self._task
        self._unsubscribe()
        while self._others:
            await asyncio.gather(*self._others, return_exceptions=True)

    # --- what the engine says ---------------------------------------------------------------------------

    def said(self, message: Message) -> None:
        """Takes a message of the engine; it is answered once its fact is durable."""
        self._waiting.append(message)
        self._quiet.clear()
        self._news.set()

    def engine_ready(self, started: events.EngineStarted) -> None:
        """Tells the engine which of what it knows belongs to others, and what has changed since."""
        if self._on:
            self._spawn(self._tell_foreign(started))

    def engine_gone(self) -> None:
        """The engine has ended: nobody waits for what it said, and nothing of it may be written any more."""
        self._life += 1
        self._waiting.clear()

    async def known(self) -> AsyncIterator[wire.Known]:
        """What a new engine must know, read once what an earlier one said is settled."""
        await self._quiet.wait()
        chunks, states = snapshots.chunks(self._journal), snapshots.snapshots(self._journal)
        while (rows := await asyncio.to_thread(next, chunks, None)) is not None:
            for known in _known_chunks(rows):
                yield known
        while (found := await asyncio.to_thread(next, states, None)) is not None:
            for known in _known_snapshots(found):
                yield known
        speed = await asyncio.to_thread(files.speed, self._journal)
        speeds = () if speed is None else (wire.Speed(*speed),)
        yield wire.Known(space=b"", last=True, speeds=speeds)

    # --- what the journal takes -------------------------------------------------------------------------

    async def _write(self) -> None:
        """Writes what waits until the end."""
        while True:
            if not self._waiting:
                self._quiet.set()
                if self._stopping.is_set():
                    return
                self._news.clear()
                await self._news.wait()
                continue
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), BATCH))]
            life = self._life
            outcomes = await self._written(batch, life)
            if life == self._life:
                for message, outcome in zip(batch, outcomes, strict=False):
                    self._answer(message, outcome)

    async def _written(self, batch: list[Message], life: int) -> list[Outcome]:
        """What became of each; fewer, if the engine is gone before the journal takes them."""
        while life == self._life:
            try:
                work = self._journal.run(lambda tx: [_apply(tx, message) for message in batch])
                return await asyncio.wrap_future(work)
            except errors.JournalUnavailable as fault:
                if self._stopping.is_set():
                    return []
                log.error("what is on disk cannot be written down: %s", fault.message)
                await self._pause()
            except Exception:  # our bug, or the engine's: nothing of this message is published
                log.exception("the engine said something wrong of its snapshots")
                if len(batch) == 1:
                    return [Outcome(False)]
                return [outcome for message in batch for outcome in await self._written([message], life)]
        return []

    async def _pause(self) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), RETRY_S)
        except TimeoutError:
            return

    def _answer(self, message: Message, outcome: Outcome) -> None:
        engine = self._engine
        assert engine is not None
        match message:
            case wire.BackedUp() | wire.PurgePlanned():
                if outcome.written:
                    engine.committed(message.fact)
                else:
                    engine.tell(wire.Refused(message.fact))
                if outcome.pinned and isinstance(message, wire.BackedUp):
                    engine.tell(wire.Pin(message.request, True))
            case wire.Quarantined():
                log.warning("%s was refused and put aside: %s", message.file, message.reason)
            case wire.SnapshotsOff():
                log.error("nothing is backed up any more: %s", message.message)
                self._metrics.backups(False)
            case wire.SnapshotsOn():
                log.warning("states are backed up again")
                self._metrics.backups(True)
            case wire.Reconciled():
                _log_reconciled(message)

    # --- what the journal says --------------------------------------------------------------------------

    def _hear(self, told: Sequence[_Heard]) -> None:
        """Something was given up or pinned."""
        purged = [event for event in told if isinstance(event, events.CachePurged)]
        for event in purged:
            self._metrics.purged(event.cause, len(event.hashes))
        if not self._on:
            gone = [(event.space, hash_) for event in purged for hash_ in event.hashes]
            if gone:
                self._spawn(self._unlink(gone))
            return
        engine = self._engine
        assert engine is not None
        erased = tuple(event.response for event in told if isinstance(event, events.PayloadErased))
        if erased:
            engine.tell(wire.Purge(b"", (), erased, snapshots.DELETED))
        for event in purged:
            if event.cause not in BY_ENGINE:
                engine.tell(wire.Purge(event.space, event.hashes, (), event.cause))
        pins = [event for event in told if isinstance(event, _PIN_FACTS)]
        if pins:
            self._spawn(self._tell_pins(pins))

    async def _unlink(self, gone: list[files.Gone]) -> None:
        try:
            await asyncio.to_thread(files.unlink, files.folder_of(self._data_dir), gone)
        except errors.Fault as fault:
            log.error("files of deleted snapshots cannot be removed: %s", fault.message)

    async def _reconcile(self) -> None:
        try:
            await asyncio.to_thread(files.reconciled, self._journal, self._data_dir)
        except errors.Fault as fault:
            log.error("the folder of the snapshots cannot be looked through: %s", fault.message)

    async def _tell_pins(self, pins: Sequence[events.AnyEvent]) -> None:
        """Tells what is pinned now of what these facts are about."""
        responses = {
            event.response for event in pins if isinstance(event, events.SnapshotPinned | events.SnapshotUnpinned)
        }
        sessions = {event.session for event in pins if isinstance(event, events.SessionPinned | events.SessionUnpinned)}
        found = await asyncio.to_thread(lambda: list(snapshots.snapshots(self._journal)))
        assert self._engine is not None
        for row, of_session in (pair for page in found for pair in page):
            if row.response in responses or row.session in sessions:
                self._engine.tell(wire.Pin(row.response, row.pinned or of_session))

    async def _tell_foreign(self, started: events.EngineStarted) -> None:
        found = await asyncio.to_thread(lambda: [row for page in snapshots.snapshots(self._journal) for row, _ in page])
        spaces = files.foreign_to(started.fingerprint, found)
        stale = await asyncio.to_thread(files.stale, self._journal, started, found) if spaces else ()
        assert self._engine is not None
        self._engine.tell(wire.Foreign(tuple(sorted(spaces)), stale))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._others.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._others.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("the snapshots: %s", task.exception(), exc_info=task.exception())


def _known_chunks(page: Sequence[kept.ChunkRow]) -> Iterator[wire.Known]:
    """A page of chunks as messages, one for each space in it."""
    chunks: dict[bytes, list[wire.Chunk]] = {}
    for one in page:
        told = (one.hash, one.parent, one.tokens, one.file_bytes, one.marks, one.plain, one.bad, one.used_us, one.uses)
        chunks.setdefault(one.space, []).append(wire.Chunk(*told))
    for space, rows in chunks.items():
        yield wire.Known(space=space, chunks=tuple(rows))


def _known_snapshots(page: Sequence[tuple[kept.SnapshotRow, bool]]) -> Iterator[wire.Known]:
    """A page of snapshots, each with whether its session is pinned, as messages, one for each space in it."""
    states: dict[bytes, list[wire.Snapshot]] = {}
    for one, of_session in page:
        pinned = one.pinned or of_session
        told = (one.response, one.session, one.end, one.tokens, one.made_us, pinned, one.kept)
        states.setdefault(one.space, []).append(wire.Snapshot(*told))
    for space, rows in states.items():
        yield wire.Known(space=space, snapshots=tuple(rows))


def _apply(tx: Transaction, message: Message) -> Outcome:
    """Appends the facts of a message. On the writer's thread."""
    match message:
        case wire.BackedUp():
            return _back_up(tx, message)
        case wire.PurgePlanned():
            done = snapshots.purge(tx, message.space, message.hashes, message.cause, whole=True)
            return Outcome(not done.left)
        case wire.Quarantined():
            event: events.AnyEvent = events.CacheQuarantined(
                file=message.file, hash=message.hash, space=message.space, reason=message.reason
            )
        case wire.SnapshotsOff():
            event = events.CacheStopped(reason=message.reason, message=message.message)
        case wire.SnapshotsOn():
            event = events.CacheResumed()
        case wire.Reconciled():
            if not (message.orphans or message.leftovers or message.missing):
                return Outcome(True)
            event = events.CacheReconciled(
                files=message.files,
                orphans=message.orphans,
                leftovers=message.leftovers,
                strange=message.strange,
                file_bytes=message.file_bytes,
                missing=tuple(hash_ for _, hash_ in message.missing),
            )
    tx.append([events.Fact(event)])
    return Outcome(True)


def _back_up(tx: Transaction, message: wire.BackedUp) -> Outcome:
    event = events.CacheBackedUp(
        response=message.request,
        namespace=message.namespace,
        space=message.space,
        tokens=message.tokens,
        end=message.end,
        chunks=_told(message.chunks),
        write_us=message.write_us,
        kept=message.kept,
    )
    written = snapshots.back_up(tx, event, b"".join(chunk.marks for chunk in message.chunks))
    return Outcome(written, written and snapshots.is_pinned(tx, message.end))


def _told(chunks: Sequence[wire.Chunk]) -> tuple[events.Chunk, ...]:
    """The chunks as a fact has them: a parent that stands before its child is not told."""
    told: list[events.Chunk] = []
    before = b""
    for one in chunks:
        parent = b"" if one.parent == before else one.parent
        told.append(events.Chunk(one.hash, parent, one.tokens, one.file_bytes, one.plain))
        before = one.hash
    return tuple(told)


def _log_reconciled(message: wire.Reconciled) -> None:
    removed = message.orphans + message.leftovers
    if removed or message.missing or message.strange:
        log.warning(
            "snapshots: %d files looked at; %d that nothing names removed (%d bytes), %d missing, %d that are not ours",
            message.files,
            removed,
            message.file_bytes,
            len(message.missing),
            message.strange,
        )
