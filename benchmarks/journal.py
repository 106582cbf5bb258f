"""How fast the journal appends: token facts in groups, content-bearing facts, and what 64 waiting producers wait.

The peers are measured in the same run on the same disk: bare fdatasync for latency, and bare SQLite without chain and
fold, with the same rows and groups, for the rate.

    python benchmarks/journal.py [DIRECTORY]
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from zjournal.journal.events import Fact, RequestAccepted, SessionOpened, TokensSampled
from zjournal.journal.log import Journal
from zjournal.journal.verify import verify

GROUP = 512
TOKEN_GROUPS = 150
CONTENT_GROUPS = 12
PRODUCERS = 64
PRODUCER_APPENDS = 30
FSYNCS = 200
IN_FLIGHT = 8  # groups that wait at a time


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        sync_p50, sync_p99 = _syncs(Path(folder))
        bare = _bare_sqlite(Path(folder))
        with Journal.open(Path(folder) / "data") as journal:
            journal.tenant("local")
            journal.append([Fact(SessionOpened(tenant="local", session="s1"))]).result()
            journal.append([_request(journal, "resp_0")]).result()
            tokens = _tokens(journal)
            contents = _contents(journal)
            p50, p99 = _producers(journal)
            started = time.perf_counter()
            facts = journal.rebuild()
            rebuild = facts / (time.perf_counter() - started)
            started = time.perf_counter()
            report = verify(Path(folder) / "data")
            walked = report.facts / (time.perf_counter() - started)
            assert report.clean, report.fault
    rows = [
        ("token facts/s, groups of 512", f"{tokens:,.0f}", f"bare SQLite {bare:,.0f}", f"{tokens / bare:.2f}"),
        ("content-bearing facts/s, 1 KiB", f"{contents:,.0f}", "", ""),
        ("64 waiting producers, p50 ms", f"{p50:.2f}", f"fdatasync p50 {sync_p50:.2f}", f"{p50 / sync_p50:.2f}"),
        ("64 waiting producers, p99 ms", f"{p99:.2f}", f"fdatasync p99 {sync_p99:.2f}", f"{p99 / sync_p99:.2f}"),
        ("rebuild, facts/s", f"{rebuild:,.0f}", "", ""),
        ("verify, facts/s", f"{walked:,.0f}", "", ""),
    ]
    for row in [("what", "journal", "peer in this run", "ratio"), *rows]:
        print(f"{row[0]:<32}{row[1]:>12}  {row[2]:<24}{row[3]:>6}")


def _request(journal: Journal, response: str) -> Fact:
    """A request with its own 1 KiB body, half of which compresses."""
    raw = secrets.token_bytes(512) + b"the same words again and again. " * 16
    event = RequestAccepted(
        tenant="local",
        response=response,
        session="s1",
        protocol="responses",
        model="smollm2",
        namespace="benchmark",
        stored=True,
        stream=True,
        created=0,
        record=journal.digest("local", raw),
        dialect="chatml.1",
        encoder=1,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        seed=0,
        max_tokens=1,
    )
    return Fact(event, contents=(raw,))


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


def _tokens(journal: Journal) -> float:
    facts = [
        Fact(TokensSampled(tenant="local", response="resp_0", position=at, count=1), payload=b"\x01\x02\x00\x00")
        for at in range(GROUP)
    ]
    return _rate(TOKEN_GROUPS, lambda _: journal.append(facts))


def _contents(journal: Journal) -> float:
    groups = [[_request(journal, f"resp_{g}_{k}") for k in range(GROUP)] for g in range(CONTENT_GROUPS)]
    return _rate(CONTENT_GROUPS, lambda group: journal.append(groups[group]))


def _producers(journal: Journal) -> tuple[float, float]:
    """Milliseconds from append to acknowledgement when 64 threads each wait for their own."""
    waits: list[float] = []

    def produce() -> None:
        fact = Fact(TokensSampled(tenant="local", response="resp_0", position=0, count=1), payload=b"\x01\x00\x00\x00")
        for _ in range(PRODUCER_APPENDS):
            started = time.perf_counter()
            journal.append([fact]).result()
            waits.append((time.perf_counter() - started) * 1_000)

    threads = [threading.Thread(target=produce) for _ in range(PRODUCERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return _quantiles(waits)


def _quantiles(values: list[float]) -> tuple[float, float]:
    values.sort()
    return values[len(values) // 2], values[len(values) * 99 // 100]


def _syncs(folder: Path) -> tuple[float, float]:
    """Milliseconds of one 4 KiB append with fdatasync."""
    waits = []
    with (folder / "sync").open("wb", buffering=0) as file:
        for _ in range(FSYNCS):
            started = time.perf_counter()
            file.write(bytes(4096))
            os.fdatasync(file.fileno())
            waits.append((time.perf_counter() - started) * 1_000)
    return _quantiles(waits)


def _bare_sqlite(folder: Path) -> float:
    """Rows of the same sizes in the same groups, without encoding, salt, chain and fold."""
    db = sqlite3.connect(folder / "bare.db", isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute(
        "CREATE TABLE event (seq INTEGER PRIMARY KEY, time INTEGER, tag TEXT, version INTEGER, body BLOB,"
        " payload BLOB, payload_sha BLOB, link BLOB)"
    )
    row = (0, "tokens_sampled", 1, bytes(90), bytes(20), bytes(32), bytes(32))
    started = time.perf_counter()
    for _ in range(TOKEN_GROUPS):
        db.execute("BEGIN IMMEDIATE")
        db.executemany("INSERT INTO event VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)", [row] * GROUP)
        db.execute("COMMIT")
    rate = TOKEN_GROUPS * GROUP / (time.perf_counter() - started)
    db.close()
    return rate


if __name__ == "__main__":
    main()
