"""Part a: how fast the journal appends, and how long 64 producers wait until their facts are durable.

The peer is plain SQLite on the same disk: the very rows that the journal wrote, the same pragmas, one bare executemany
in each transaction, without encoding, chain, salt and fold. The unit of latency is such a transaction with 64 of these
rows, begun and committed by one thread with nobody beside it; what one fdatasync takes is shown as well.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import uvloop

from parts.table import Line, quantiles
from tests.unit.journal import facts
from zjournal.journal import wal
from zjournal.journal.events import Fact, SessionOpened
from zjournal.journal.log import Journal

GROUP = 512
PRODUCERS = 64
IN_FLIGHT = 8  # groups that wait at a time
TOKENS_MUST, CONTENTS_MUST = 50_000, 15_000  # per second
SYNCS_MUST = 3.0  # p99 of a wait, in p99 of the unit
_EVENT = "seq, time, tag, version, body, payload, payload_sha, link"
_CONTENT = "digest, tenant, size, refs, base, depth, data"


class Size(NamedTuple):
    """How much is measured."""

    token_groups: int
    content_groups: int
    rounds: int  # appends of each producer
    syncs: int


FULL, QUICK = Size(300, 24, 400, 2_000), Size(20, 2, 20, 50)


def lines(folder: Path, quick: bool) -> list[Line]:
    """Measures in `folder`, on whose file system it depends."""
    size = QUICK if quick else FULL
    with Journal.open(folder / "data") as journal:
        journal.tenant("local")
        journal.append([Fact(SessionOpened(tenant="local", session="s1"))]).result()
        journal.append([_request(journal, "resp_0")]).result()
        tokens = _tokens(journal, size.token_groups)
        contents = _contents(journal, size.content_groups)
        events, kept = _written(journal)
    plain = _Plain(folder / "bare.db")
    bare_tokens = plain.rate(size.token_groups, events["tokens_sampled"], [])
    bare_contents = plain.rate(size.content_groups, events["request_accepted"], kept)
    rows = events["tokens_sampled"]
    with Journal.open(folder / "data") as journal:
        # By turns, so that what else the disk has to do meets all of them alike.
        waits: dict[str, list[float]] = {"sync": [], "bare": [], "loop": [], "threads": []}
        for _ in range(4):
            waits["sync"] += _syncs(folder / "sync", size.syncs // 4)
            waits["bare"] += plain.waits(size.syncs // 4, rows[:PRODUCERS])
            waits["loop"] += _loop_producers(journal, max(size.rounds // 4, 1))
            waits["threads"] += _thread_producers(journal, max(size.rounds // 16, 1))
    plain.close()
    return [
        _rate_line("token facts/s in groups of 512", tokens, bare_tokens, TOKENS_MUST),
        _rate_line("content-bearing facts/s, 1 KiB each", contents, bare_contents, CONTENTS_MUST),
        *_latency_lines({name: quantiles(values) for name, values in waits.items()}),
    ]


def _rate_line(what: str, ours: float, bare: float, must: int) -> Line:
    peer = f"plain SQLite, same rows: {bare:,.0f}"
    return Line(what, f"{ours:,.0f}", peer, ours / bare, f"at least {must:,}", ours >= must)


def _latency_lines(waits: dict[str, tuple[float, float]]) -> list[Line]:
    sync, unit = waits["sync"], waits["bare"]
    found = [Line("one plain SQLite commit of 64 rows, p50 ms", f"{unit[0]:.2f}", f"fdatasync alone: {sync[0]:.2f}")]
    found.append(Line("the same, p99 ms", f"{unit[1]:.2f}", f"fdatasync alone: {sync[1]:.2f}"))
    for name, who in (("loop", "64 waiting producers on an event loop"), ("threads", "64 waiting threads")):
        p50, p99 = waits[name]
        found.append(Line(f"{who}, p50 ms", f"{p50:.2f}", f"plain commit p50: {unit[0]:.2f}", p50 / unit[0]))
        line = Line(f"{who}, p99 ms", f"{p99:.2f}", f"plain commit p99: {unit[1]:.2f}", p99 / unit[1])
        if name == "loop":  # as the server has it; threads that all wait are not in it
            line = line._replace(target=f"below {SYNCS_MUST:g} commits", reached=p99 / unit[1] < SYNCS_MUST)
            of_sync = Line("the same", f"{p99:.2f}", f"fdatasync alone, p99: {sync[1]:.2f}", p99 / sync[1])
            of_sync = of_sync._replace(target=f"below {SYNCS_MUST:g}", reached=p99 / sync[1] < SYNCS_MUST)
            found += [line, of_sync]
        else:
            found.append(line)
    return found


# --- ours -----------------------------------------------------------------------------------------------


def _request(journal: Journal, response: str) -> Fact:
    """A request with its own 1 KiB record, half of which compresses."""
    record = secrets.token_bytes(512) + b"the same words again and again. " * 16
    return facts.accepted(journal, response, record=record)[0]


def _sampled(position: int) -> Fact:
    return facts.sampled("resp_0", position)


def _rate(groups: int, make: Callable[[int], Future[int]]) -> float:
    waiting: deque[Future[int]] = deque()
    started = time.perf_counter()
    for group in range(groups):
        waiting.append(make(group))
        if len(waiting) >= IN_FLIGHT:
            waiting.popleft().result()
    for future in waiting:
        future.result()
    return groups * GROUP / (time.perf_counter() - started)


def _tokens(journal: Journal, groups: int) -> float:
    group = [_sampled(at) for at in range(GROUP)]
    return _rate(groups, lambda _: journal.append(group))


def _contents(journal: Journal, groups: int) -> float:
    made = [[_request(journal, f"resp_{g}_{k}") for k in range(GROUP)] for g in range(groups)]
    return _rate(groups, lambda group: journal.append(made[group]))


def _loop_producers(journal: Journal, rounds: int) -> list[float]:
    """Milliseconds from append to acknowledgement when 64 tasks of one loop each wait for their own, as in a server."""
    waits: list[float] = []

    async def produce() -> None:
        for at in range(rounds):
            fact = _sampled(at)
            started = time.perf_counter()
            await journal.append_soon([fact])
            waits.append((time.perf_counter() - started) * 1_000)

    async def all_of_them() -> None:
        await asyncio.gather(*(produce() for _ in range(PRODUCERS)))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(all_of_them())
    return waits


def _thread_producers(journal: Journal, rounds: int) -> list[float]:
    """The same by 64 threads."""
    waits: list[float] = []

    def produce() -> None:
        for at in range(rounds):
            fact = _sampled(at)
            started = time.perf_counter()
            journal.append([fact]).result()
            waits.append((time.perf_counter() - started) * 1_000)

    threads = [threading.Thread(target=produce) for _ in range(PRODUCERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return waits


# --- the peer -------------------------------------------------------------------------------------------


def _written(journal: Journal) -> tuple[dict[str, list[tuple]], list[tuple]]:
    """A group of rows of each kind as the journal has just written them, and a group of its contents."""
    with journal.transaction() as db:
        query = f"SELECT {_EVENT} FROM event WHERE tag = ? ORDER BY seq DESC LIMIT ?"
        events = {tag: db.execute(query, (tag, GROUP)).fetchall() for tag in ("tokens_sampled", "request_accepted")}
        contents = db.execute(f"SELECT {_CONTENT} FROM content ORDER BY id DESC LIMIT ?", (GROUP,)).fetchall()
    assert all(len(rows) == GROUP for rows in (*events.values(), contents))
    return events, contents


class _Plain:
    """SQLite with our pragmas and nothing else."""

    def __init__(self, path: Path) -> None:
        self._log = path.with_name(path.name + "-wal")
        self._db = db = sqlite3.connect(path, isolation_level=None)
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA secure_delete = ON")
        db.execute("PRAGMA wal_autocheckpoint = 0")
        db.execute(
            "CREATE TABLE event (seq INTEGER PRIMARY KEY, time INTEGER, tag TEXT, version INTEGER, body BLOB,"
            " payload BLOB, payload_sha BLOB, link BLOB)"
        )
        db.execute(
            "CREATE TABLE content (id INTEGER PRIMARY KEY, digest BLOB, tenant TEXT, size INTEGER, refs INTEGER,"
            " base INTEGER, depth INTEGER, data BLOB)"
        )

    def close(self) -> None:
        self._db.close()

    def _commit(self, events: list[tuple], contents: list[tuple]) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany("INSERT INTO event VALUES (?, ?, ?, ?, ?, ?, ?, ?)", events)
        if contents:
            self._db.executemany("INSERT INTO content VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)", contents)
        self._db.execute("COMMIT")

    def _upkeep(self) -> None:
        """Empties the log as often as the journal does, between two commits and not within one."""
        if self._log.stat().st_size > wal.CHECKPOINT_BYTES:
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def rate(self, groups: int, events: list[tuple], contents: list[tuple]) -> float:
        """Rows of `event` per second, each with one of `content` where there are any."""
        unnumbered = [(None, *row[1:]) for row in events]
        started = time.perf_counter()
        for _ in range(groups):
            self._commit(unnumbered, contents)
            self._upkeep()
        return groups * len(events) / (time.perf_counter() - started)

    def waits(self, count: int, events: list[tuple]) -> list[float]:
        """Milliseconds of `count` commits of these rows."""
        unnumbered = [(None, *row[1:]) for row in events]
        found = []
        for _ in range(count):
            started = time.perf_counter()
            self._commit(unnumbered, [])
            found.append((time.perf_counter() - started) * 1_000)
            self._upkeep()
        return found


def _syncs(path: Path, count: int) -> list[float]:
    """Milliseconds of `count` appends of 4 KiB with fdatasync."""
    waits = []
    with path.open("wb", buffering=0) as file:
        for _ in range(count):
            started = time.perf_counter()
            file.write(bytes(4096))
            os.fdatasync(file.fileno())
            waits.append((time.perf_counter() - started) * 1_000)
    return waits
