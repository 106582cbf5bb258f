"""What the engine says of the disk becomes facts, and it hears what came of it, and what others give up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.unit.api.test_running import until
from tests.unit.journal.facts import open_journal, session, whole_turn
from tests.unit.journal.stored import back_up, ends, hashes, known
from tests.unit.journal.test_dependent import freed, full
from tests.unit.snapshots import chunks
from tests.unit.snapshots.chunks import NAMESPACE, tokens
from zjournal.api import snapshots as api
from zjournal.api.metrics import Metrics
from zjournal.api.snapshots import Snapshots
from zjournal.journal import events, removal, retention, snapshots
from zjournal.journal.log import Journal
from zjournal.link import wire
from zjournal.sessions import identity
from zjournal.sessions import snapshots as files
from zjournal.snapshots import format
from zjournal.snapshots.folder import Folder

ONE = tokens(612, 1)


class Engine:
    """An engine that only hears."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def committed(self, fact: int) -> None:
        self.heard.append(fact)

    def tell(self, message: object) -> None:
        self.heard.append(message)


def said(fact: int, request: str, data: bytes, there: int = 0, **more: int) -> wire.BackedUp:
    """A state is on disk whose first `there` chunks were before."""
    whole = chunks.split(data)
    new = tuple(wire.Chunk(one.hash, one.parent, one.count, 4096, format.marks(one.tokens)) for one in whole[there:])
    where = {"namespace": "n", "space": NAMESPACE, "tokens": len(data) // 4, "end": whole[-1].hash}
    return wire.BackedUp(fact=fact, request=request, chunks=new, write_us=3, **where, **more)  # type: ignore[arg-type]


def play(tmp_path: Path, main: Callable[[Journal, Snapshots, Engine], Awaitable[None]], on: bool = True) -> None:
    async def run(journal: Journal) -> None:
        line, engine = Snapshots(journal, Metrics(), tmp_path, on=on), Engine()
        line.serve(engine)  # type: ignore[arg-type]
        try:
            await main(journal, line, engine)
        finally:
            await asyncio.wait_for(line.close(), 60)

    with open_journal(tmp_path) as journal:
        journal.append([session("s1"), *whole_turn(journal, "r1"), *whole_turn(journal, "r2")]).result()
        asyncio.run(run(journal))


def test_a_snapshot_is_answered_once_it_is_durable_and_in_order(tmp_path: Path) -> None:
    async def main(journal: Journal, line: Snapshots, engine: Engine) -> None:
        line.said(said(1, "r1", ONE[: 512 * 4]))
        line.said(said(2, "r1", ONE, 2))
        line.said(said(3, "nobody", ONE, 2))
        gone = tuple(hashes(ONE)[2:])
        plan = {"space": NAMESPACE, "requests": ("r1",), "file_bytes": 4096, "cause": "quota"}
        line.said(wire.PurgePlanned(fact=4, hashes=gone, **plan))  # type: ignore[arg-type]
        line.said(wire.PurgePlanned(fact=5, hashes=(hashes(ONE)[0],), **plan))  # type: ignore[arg-type]
        await until(lambda: len(engine.heard) == 5)
        assert engine.heard == [1, 2, wire.Refused(3), 4, wire.Refused(5)]
        assert ends(journal) == {"r1": (hashes(ONE)[1], 512)}
        told = [fact.event for fact in journal.read() if isinstance(fact.event, events.CacheBackedUp)]
        assert [chunk.parent for chunk in told[0].chunks] == [format.ROOT, b""], "a parent before its child is not told"

    play(tmp_path, main)


def test_a_full_disk_makes_the_engine_wait_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "RETRY_S", 0.01)
    failed: list[int] = []

    async def main(journal: Journal, line: Snapshots, engine: Engine) -> None:
        full(journal)
        monkeypatch.setattr(api.log, "error", lambda *_: failed.append(1))
        data = tokens(256 * 600, 7)  # more marks than the file has room for
        line.said(said(1, "r1", data))
        await until(lambda: len(failed) > 1)
        assert engine.heard == []
        freed(journal)
        await until(lambda: engine.heard == [1])
        assert len(known(journal)) == 600

    play(tmp_path, main)


def test_what_a_dead_engine_said_is_not_written_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "RETRY_S", 0.01)
    failed: list[int] = []

    async def main(journal: Journal, line: Snapshots, engine: Engine) -> None:
        full(journal)
        monkeypatch.setattr(api.log, "error", lambda *_: failed.append(1))
        line.said(said(1, "r1", tokens(256 * 600, 7)))
        await until(lambda: len(failed) > 1)
        line.engine_gone()
        freed(journal)
        pages = [page async for page in line.known()]
        assert pages == [wire.Known(space=b"", last=True)]
        assert engine.heard == [] and known(journal) == {}

    play(tmp_path, main)


def test_a_new_engine_hears_all_that_is_known(tmp_path: Path) -> None:
    async def main(journal: Journal, line: Snapshots, engine: Engine) -> None:
        back_up(journal, "r1", ONE)
        back_up(journal, "r2", ONE[: 300 * 4])
        removal.pin(journal, "s1", True)
        pages = [page async for page in line.known()]
        assert [page.last for page in pages] == [False, False, True]
        rows = [(one.hash, one.parent, one.tokens, len(one.marks)) for one in pages[0].chunks]
        own = chunks.split(ONE[: 300 * 4])[-1]
        assert rows == [
            *((one.hash, one.parent, one.count, one.count // 16 * 4) for one in chunks.split(ONE)),
            (own.hash, own.parent, 44, 8),
        ]
        assert [(one.request, one.end, one.tokens, one.pinned) for one in pages[1].snapshots] == [
            ("r1", hashes(ONE)[-1], 612, True),
            ("r2", own.hash, 300, True),
        ]
        line.engine_ready(events.EngineStarted(pid=1, model="m", fingerprint="f", kernels="k", context=1, kv_tokens=1))
        stale = wire.Stale(NAMESPACE, identity.namespace("f", "local"), "fingerprint")
        await until(lambda: wire.Foreign((NAMESPACE,), (stale,)) in engine.heard)
        assert identity.namespace("f", "local") != "n"

    play(tmp_path, main)


def test_the_engine_hears_what_others_give_up_and_pin(tmp_path: Path) -> None:
    async def main(journal: Journal, line: Snapshots, engine: Engine) -> None:
        line.said(said(1, "r1", ONE))
        line.said(said(2, "r2", ONE[: 512 * 4] + tokens(9, 5), 2))
        await until(lambda: engine.heard == [1, 2])
        await asyncio.to_thread(snapshots.pin, journal, "r2", True)
        await until(lambda: engine.heard[2:] == [wire.Pin("r2", True)])
        await asyncio.to_thread(removal.pin, journal, "s1", True)
        await until(lambda: engine.heard[3:] == [wire.Pin("r1", True), wire.Pin("r2", True)])
        line.said(said(3, "r1", ONE + tokens(9, 6), 2))  # of a pinned session
        await until(lambda: len(engine.heard) == 7)
        assert engine.heard[5:] == [3, wire.Pin("r1", True)], "and of the chunk that it replaces the engine knows"
        await asyncio.to_thread(retention.delete(journal, "local", "r1").result)
        last = chunks.split(ONE + tokens(9, 6))[-1].hash
        await until(lambda: len(engine.heard) == 9)
        assert engine.heard[7:] == [
            wire.Purge(b"", (), ("r1",), "deleted"),
            wire.Purge(NAMESPACE, (last,), (), "deleted"),
        ]

    play(tmp_path, main)


def test_without_an_engine_that_has_the_folder_the_files_go_here(tmp_path: Path) -> None:
    async def main(journal: Journal, line: Snapshots, engine: Engine) -> None:
        with Folder(files.folder_of(tmp_path)) as folder:
            for one in chunks.split(ONE):
                chunks.store(folder, one)
            bad = chunks.split(ONE)[-1]
            assert folder.quarantine(NAMESPACE, bad.hash)
        back_up(journal, "r1", ONE)
        await asyncio.to_thread(retention.delete(journal, "local", "r1").result)
        await until(lambda: not list(files.folder_of(tmp_path).rglob("*.zjc")))
        assert engine.heard == []

    play(tmp_path, main, on=False)


def test_what_the_engine_says_of_files_and_of_the_disk_are_facts(tmp_path: Path) -> None:
    async def main(journal: Journal, line: Snapshots, engine: Engine) -> None:
        line.said(said(1, "r1", ONE))
        line.said(wire.Quarantined("x.zjc", hashes(ONE)[-1], NAMESPACE, "section"))
        line.said(wire.SnapshotsOff("no_space", "the disk is full"))
        line.said(wire.SnapshotsOn())
        line.said(wire.Reconciled(files=9))  # nothing was wrong: no fact
        line.said(wire.Reconciled(missing=((NAMESPACE, hashes(ONE)[0]),), orphans=2, file_bytes=7))
        await until(lambda: snapshots.totals(journal).bad == 2)
        kinds = [type(fact.event) for fact in journal.read()][-4:]
        assert kinds == [
            events.CacheQuarantined,
            events.CacheStopped,
            events.CacheResumed,
            events.CacheReconciled,
        ]

    play(tmp_path, main)
