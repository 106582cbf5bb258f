"""What can be asked of the snapshots, for api and cli: which there are, what would go, what is wrong with the files.

The journal says what there is; files are looked at only where they are verified, and unlinked only after the commit
that gives them up, by the engine, or here where none has the folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from zjournal.errors import ChunkFault, JournalFault, SnapshotFault
from zjournal.journal import snapshots
from zjournal.journal.events import CachePurged, CacheReconciled, EngineStarted, Fact, Recorded
from zjournal.journal.kept import ROOT, ChunkRow, SnapshotRow
from zjournal.journal.log import Journal
from zjournal.journal.reader import Reader
from zjournal.link import wire
from zjournal.sessions import identity, replay
from zjournal.snapshots import chunk as chunkfile
from zjournal.snapshots import format, loading, plan, reconcile
from zjournal.snapshots.folder import Folder
from zjournal.snapshots.index import Index

FOLDER = "snapshots"  # in the data directory
PREFILL_TOKENS_S = 300.0  # what a small model on a CPU does: only for a journal in which nothing was measured
MEASURED_TURNS = 64  # the latest ones, of which the rate is taken
MEASURED_TOKENS_MIN = 64  # computed in a turn, for it to count
LIVE_US = 3600 * 1_000_000  # a session that was used within the last hour is expected back
GC_CHUNKS_MAX = 100_000  # in one operation
STALE_MAX = 64  # spaces of other models of which the engine hears what has changed

Gone = tuple[bytes, bytes]  # space and hash of a chunk that was given up


class Doomed(msgspec.Struct, frozen=True):
    """Chunks of one space that a plan gives up, each behind those that continue it."""

    space: bytes
    hashes: tuple[bytes, ...]


class Collect(msgspec.Struct, frozen=True):
    """The chunks of a plan that are to go."""

    doomed: tuple[Doomed, ...]


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """What went. `left`: chunks that had to stay: pinned meanwhile, or continued by what is new."""

    chunks: int = 0
    left: int = 0
    file_bytes: int = 0


class PinSnapshot(msgspec.Struct, frozen=True):
    """One snapshot by the whole id of its response, and whether it is to be pinned."""

    response: str
    pinned: bool


class Wrong(msgspec.Struct, frozen=True):
    """A file that is not what the journal says."""

    file: str
    reason: str


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What was looked at. `deep`: all bytes of all files, else their headers and sizes."""

    chunks: int
    snapshots: int
    file_bytes: int
    bad: int  # chunks whose files were refused or missing before, and are known to be
    deep: bool
    fault: Wrong | None  # the first one

    @property
    def clean(self) -> bool:
        return self.fault is None


# --- what there is ---------------------------------------------------------------------------------------


def load(reader: Reader) -> tuple[Index, dict[str, SnapshotRow]]:
    """The index as the engine would have it, and the snapshots by their responses. Raises JournalFault."""
    chunks: dict[bytes, list[ChunkRow]] = {}
    rows: dict[bytes, list[tuple[SnapshotRow, bool]]] = {}
    for page in snapshots.chunks(reader):
        for one in page:
            chunks.setdefault(one.space, []).append(one)
    for found in snapshots.snapshots(reader):
        for row, pinned in found:
            rows.setdefault(row.space, []).append((row, row.pinned or pinned))
    index = Index()
    for space, own in rows.items():
        named = [(row.response, row, pinned) for row, pinned in own]
        wrong = loading.load(index, space, chunks.get(space, []), named)
        if wrong:
            raise JournalFault(
                f"{reader.path}: the snapshot of {wrong[0]} does not follow from its chunks; `zj journal rebuild` "
                "makes the rows anew from the facts"
            )
    return index, {row.response: row for own in rows.values() for row, _ in own}


def rates(reader: Reader) -> plan.Rates:
    """Prompt tokens per second at depth 0, from the latest turns that computed enough of them."""
    return _rates(reader, 0) or plan.Rates(PREFILL_TOKENS_S)


def speed(reader: Reader) -> tuple[str, float] | None:
    """The fingerprint of the engine that made the latest such turn, and its prompt tokens per second at depth 0."""
    query = "SELECT max(accepted_seq) FROM turn WHERE prefill_us > 0 AND prompt - cached >= ?"
    with reader.transaction() as db:
        (seq,) = db.execute(query, (MEASURED_TOKENS_MIN,)).fetchone()
    start = None if seq is None else next(reader.before(seq, EngineStarted), None)
    if start is None:
        return None
    assert isinstance(start.event, EngineStarted)
    found = _rates(reader, start.seq)
    return None if found is None else (start.event.fingerprint, found.prefill_tokens_s)


def _rates(reader: Reader, after: int) -> plan.Rates | None:
    """From turns that were accepted after this fact; None if none was measured."""
    query = (
        "SELECT prompt, cached, prefill_us FROM turn WHERE prefill_us > 0 AND prompt - cached >= ?"
        " AND accepted_seq > ? ORDER BY accepted_seq DESC LIMIT ?"
    )
    with reader.transaction() as db:
        found = db.execute(query, (MEASURED_TOKENS_MIN, after, MEASURED_TURNS)).fetchall()
    if not found:
        return None
    flat = plan.Rates(1.0)  # seconds at one token a second: how much work it was
    work = sum(flat.recompute_s(cached, prompt - cached) for prompt, cached, _ in found)
    return plan.Rates(work / (sum(took for _, _, took in found) / 1e6))


def foreign(reader: Reader, rows: Iterable[SnapshotRow]) -> frozenset[bytes]:
    """Spaces of other weights, templates or kernels than those of the engine that started last."""
    started = next((fact.event for fact in reader.before(reader.head + 1, EngineStarted)), None)
    if not isinstance(started, EngineStarted):
        return frozenset()
    return foreign_to(started.fingerprint, rows)


def foreign_to(fingerprint: str, rows: Iterable[SnapshotRow]) -> frozenset[bytes]:
    """Spaces that an engine of this fingerprint does not use."""
    return frozenset(
        row.space for row in rows if row.namespace.split(".")[0] != identity.namespace(fingerprint, row.tenant)
    )


def stale(reader: Reader, started: EngineStarted, rows: Sequence[SnapshotRow]) -> tuple[wire.Stale, ...]:
    """What has changed between the engines that wrote foreign snapshots and the one that has started; the latest ones.

    `rows` in order of their making. Who wrote a snapshot is who ran when it was made. Raises JournalFault.
    """
    others = foreign_to(started.fingerprint, rows)
    latest = {row.space: row for row in rows if row.space in others}
    now = replay.parts_of(started)
    told: list[wire.Stale] = []
    for row in list(latest.values())[-STALE_MAX:]:
        base, _, salt = row.namespace.partition(".")
        maker = reader.engine_before(row.made_seq)
        sure = maker is not None and identity.namespace(maker.fingerprint, row.tenant) == base
        parts = replay.parts_that_differ(maker if sure else None, now, started.fingerprint)
        today = identity.kv_namespace(identity.namespace(started.fingerprint, row.tenant), salt)
        told.append(wire.Stale(row.space, today, ", ".join(part.name for part in parts)))
    return tuple(told)


def plan_collection(
    reader: Reader, limit: int, now_us: int, aside: int = 0
) -> tuple[plan.Plan, Index, dict[str, SnapshotRow]]:
    """What goes so that the files take `limit` bytes at most, and what is worth nothing anyway.

    `aside`: bytes in quarantine, which count into the limit.
    """
    index, rows = load(reader)
    live = {row.session for row in rows.values()}
    live = {
        name
        for name in live
        if (found := reader.session(name)) is not None and (now_us - found.last_us < LIVE_US or _runs(reader, name))
    }
    others = foreign(reader, rows.values())
    stakes = plan.Stakes(now_us, rates(reader), live, frozenset(), others.__contains__)
    swept = plan.sweep(index, stakes)
    plan.apply(index, swept)
    room = plan.make_room(index, 0, limit, stakes, aside)
    plan.apply(index, room)
    return plan.Plan(swept.deletions + room.deletions, swept.freed + room.freed, room.fits), index, rows


def plan_removal(reader: Reader, responses: Sequence[str]) -> tuple[plan.Plan, Index]:
    """What goes so that nothing is left that the snapshots of these responses alone need."""
    index, _ = load(reader)
    there = [response for response in responses if response in index.snapshots]  # some may have gone meanwhile
    found = plan.remove(index, there, rates(reader))
    plan.apply(index, found)
    return found, index


def _runs(reader: Reader, session: str) -> bool:
    newest = reader.newest(session)
    return newest is not None and newest.finished_us is None


def doomed(found: plan.Plan) -> Iterator[Collect]:
    """The plan as arguments of the operation, in parts."""
    for at in range(0, len(found.deletions), GC_CHUNKS_MAX):
        by_space: dict[bytes, list[bytes]] = {}
        for one in found.deletions[at : at + GC_CHUNKS_MAX]:
            by_space.setdefault(one.namespace, []).append(one.hash)
        yield Collect(tuple(Doomed(space, tuple(hashes)) for space, hashes in by_space.items()))


# --- operations ------------------------------------------------------------------------------------------


def collect(journal: Journal, arguments: Collect) -> Collected:
    """Gives up chunks by hand; the files go after that."""
    chunks = left = size = 0
    for one in arguments.doomed:
        done = journal.run(
            lambda tx, one=one: snapshots.purge(tx, one.space, one.hashes, snapshots.GC, whole=False)  # type: ignore[misc]
        ).result()
        chunks, left, size = chunks + len(done.hashes), left + len(done.left), size + done.file_bytes
    return Collected(chunks=chunks, left=left, file_bytes=size)


# --- files -----------------------------------------------------------------------------------------------


def folder_of(data_dir: Path) -> Path:
    """Where the files of a data directory lie."""
    return data_dir / FOLDER


def aside_bytes(data_dir: Path) -> int:
    """Bytes of the files that were put aside. Raises SnapshotFault."""
    path = folder_of(data_dir)
    if not path.is_dir():
        return 0
    with Folder(path) as folder:
        return folder.aside_bytes()


def given_up(facts: Sequence[Recorded]) -> list[Gone]:
    """The chunks that these facts give up."""
    return [
        (fact.event.space, hash_)
        for fact in facts
        if isinstance(fact.event, CachePurged)
        for hash_ in fact.event.hashes
    ]


class Unlinking:
    """Hears of what a journal gives up, and unlinks it when asked: for who owns the journal and has no engine."""

    def __init__(self, journal: Journal, data_dir: Path) -> None:
        self._path = folder_of(data_dir)
        self._gone: list[Gone] = []
        self._unsubscribe = journal.subscribe(lambda facts: self._gone.extend(given_up(facts)))

    def close(self) -> None:
        """Unlinks, and hears no more."""
        self._unsubscribe()
        self.unlink()

    def unlink(self) -> int:
        """Unlinks what was given up since the last call; returns how many files. Raises SnapshotFault."""
        gone, self._gone = self._gone, []
        return unlink(self._path, gone)


def unlink(path: Path, gone: Sequence[Gone]) -> int:
    """Unlinks files of chunks that no fact names any more, in the quarantine as well. Raises SnapshotFault."""
    if not gone or not path.is_dir():
        return 0
    with Folder(path) as folder:
        return sum(folder.erase(space, hash_) for space, hash_ in gone)


def reconciled(journal: Journal, data_dir: Path) -> CacheReconciled | None:
    """Compares the folder with the journal and unlinks what no fact names; None where there is no folder.

    For who owns the journal and has no engine. Raises SnapshotFault.
    """
    path = folder_of(data_dir)
    if not path.is_dir():
        return None
    sizes: dict[bytes, ChunkRow] = {one.hash: one for page in snapshots.chunks(journal) for one in page}

    def named(space: str, hash_: bytes) -> int | None:
        row = sizes.get(hash_)
        known = row is not None and not row.bad and row.space.hex().startswith(space)
        return row.file_bytes if row is not None and known else None

    with Folder(path) as folder:
        folder.lock()
        try:
            return _reconcile(journal, folder, sizes, named)
        except OSError as error:
            raise SnapshotFault(f"{path}: {error.strerror or error}", errno=error.errno or 0) from error


def _reconcile(
    journal: Journal, folder: Folder, sizes: Mapping[bytes, ChunkRow], named: reconcile.NamedBytes
) -> CacheReconciled:
    totals = reconcile.Totals()
    counts = dict.fromkeys(reconcile.Kind, 0)
    freed = 0
    for findings in reconcile.walk(folder, named, sizes.__contains__, time.time_ns(), totals):
        for finding in findings:
            if finding.kind in (reconcile.Kind.ORPHAN, reconcile.Kind.LEFTOVER):
                if not reconcile.remove(folder, finding):
                    continue
                freed += finding.file_bytes
            counts[finding.kind] += 1
    expected = [(row.space, row.hash, row.file_bytes) for row in sizes.values() if not row.bad]
    missing = [one.hash for found in reconcile.absent(folder, expected, named) for one in found]
    event = CacheReconciled(
        files=totals.files,
        orphans=counts[reconcile.Kind.ORPHAN],
        leftovers=counts[reconcile.Kind.LEFTOVER],
        strange=counts[reconcile.Kind.STRANGE],
        file_bytes=freed,
        missing=tuple(missing),
    )
    if event.orphans or event.leftovers or event.missing:
        journal.append([Fact(event)]).result()
    return event


def verify(
    reader: Reader, data_dir: Path, deep: bool, progress: Callable[[int, int], None] = lambda done, total: None
) -> Checked:
    """Compares each file with the journal, up to the first that is wrong: there, header, own hash, parent, size.

    Beside a server too: what was given up meanwhile is passed over. Raises SnapshotFault where the system refuses.
    """
    told = snapshots.totals(reader)
    path = folder_of(data_dir)
    if not path.is_dir():
        fault = Wrong(str(path), "is missing") if told.chunks > told.bad else None
        return Checked(chunks=0, snapshots=told.snapshots, file_bytes=0, bad=told.bad, deep=deep, fault=fault)
    chunks = bad = size = 0
    fault = None
    ends: dict[bytes, int] = {ROOT: 0}  # position behind each chunk
    with Folder(path) as folder:
        for page in snapshots.chunks(reader):
            for row in page:
                ends[row.hash] = ends.get(row.parent, 0) + row.tokens
                if row.bad:
                    bad += 1
                    continue
                reason = _file_fault(folder, row, ends[row.hash] - row.tokens, deep)
                if reason is not None and _still(reader, row):
                    fault = Wrong(str(folder.where(row.space, row.hash)), reason)
                    break
                chunks, size = chunks + 1, size + row.file_bytes
                progress(chunks, told.chunks)
            if fault is not None:
                break
    return Checked(chunks=chunks, snapshots=told.snapshots, file_bytes=size, bad=bad, deep=deep, fault=fault)


def _still(reader: Reader, row: ChunkRow) -> bool:
    """Whether the journal says of a chunk what it said before: a server may have given it up or put it aside."""
    now = snapshots.has(reader, row.hash)
    return now is not None and not now.bad and now.file_bytes == row.file_bytes


def _file_fault(folder: Folder, row: ChunkRow, start: int, deep: bool) -> str | None:
    """What is wrong with a chunk's file, as half a sentence; None if nothing is."""
    try:
        header = (chunkfile.verify if deep else chunkfile.read_header)(folder, row.space, row.hash)
    except ChunkFault as refused:
        return refused.message.removeprefix(str(folder.where(row.space, row.hash))).strip(": ")
    chunk = header.chunk
    if chunk.parent != row.parent or chunk.start != start:
        return "continues another chunk than the journal says"
    if chunk.count != row.tokens or header.file_bytes != row.file_bytes:
        return f"has {chunk.count} tokens and {header.file_bytes} bytes; in the journal {row.tokens}, {row.file_bytes}"
    if row.marks and row.plain and format.marks(chunk.tokens) != row.marks:
        return "has other tokens than the journal's marks"
    return None
