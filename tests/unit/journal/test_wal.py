"""The log's size: our own checkpoints, readers in the way, other programs' checkpoints, and a log that is gone."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.journal.facts import accepted, open_journal, session, ticking
from tests.unit.journal.test_holders import READ
from zjournal.errors import JournalUnavailable
from zjournal.journal import holders, wal
from zjournal.journal.log import Journal
from zjournal.journal.reader import READ_S_MAX, Pace, Reader, some
from zjournal.journal.verify import verify

BODY_BYTES = 200_000

FOREIGN = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
print(db.execute("SELECT count(*) FROM event").fetchone()[0])
db.close()
"""


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A program that opens a read transaction on the first line of its input, and ends on the second."""
    command = [sys.executable, "-c", f"import sys; sys.stdin.readline()\n{READ}", str(tmp_path / "data" / "journal.db")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def _say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def _start_reading(process: subprocess.Popen[str]) -> None:
    _say(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "reading\n"


def _grow(journal: Journal, upto: int, total: int = 200 << 20) -> int:
    """Appends large requests until the log has reached a size, or so many bytes; returns the largest size seen."""
    largest = 0
    for number in range(total // BODY_BYTES):
        largest = max(largest, journal.log_bytes)
        if largest >= upto:
            return largest
        facts = accepted(journal, f"r{number}", record=os.urandom(BODY_BYTES))
        journal.append(facts).result()
    return largest


def _settled(journal: Journal) -> None:
    """Waits for what the writer does after a commit."""
    for _ in range(2):
        journal.run(lambda _: None).result()


def test_the_log_is_emptied_without_readers(tmp_path: Path) -> None:
    with open_journal(tmp_path / "data") as journal:
        journal.append([session("s1")]).result()
        largest = _grow(journal, wal.PATIENT_BYTES, total=50 << 20)
        assert wal.CHECKPOINT_BYTES <= largest < wal.PATIENT_BYTES, "it was emptied before that, many times over"
        assert (tmp_path / "data" / "journal.db").stat().st_size > 40 << 20
    assert verify(tmp_path / "data").clean


def test_the_log_stays_small_beside_readers_that_overlap(tmp_path: Path) -> None:
    """There is always a reader of ours; each lets go in time, and that is enough."""
    with open_journal(tmp_path / "data") as journal:
        journal.append([session("s1")]).result()
        stop = threading.Event()

        def read() -> None:
            with Reader.open(tmp_path / "data") as reader:
                while not stop.is_set():
                    with reader.transaction() as db:
                        db.execute("SELECT count(*) FROM event").fetchone()
                        stop.wait(READ_S_MAX / 2)

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        largest = _grow(journal, wal.LOG_BYTES_MAX, total=80 << 20)
        stop.set()
        for reader in readers:
            reader.join()
        assert largest < wal.LOG_BYTES_MAX
        assert journal.blocker_pid == 0


@pytest.mark.skipif(not holders.LOCKS.exists(), reason="there is no /proc/locks")
def test_a_stopped_reader_is_named_and_new_requests_are_refused(
    tmp_path: Path, foreign: subprocess.Popen[str], caplog: pytest.LogCaptureFixture
) -> None:
    limit = 24 << 20
    clock = ticking(10_000)
    with caplog.at_level(logging.INFO), Journal.open(tmp_path / "data", clock=clock, log_limit=limit) as journal:
        journal.tenant("local")
        journal.append([session("s1")]).result()
        _start_reading(foreign)
        os.kill(foreign.pid, signal.SIGSTOP)
        journal.check_room()
        _grow(journal, limit)
        _settled(journal)
        with pytest.raises(JournalUnavailable) as refused:
            journal.check_room()
        assert refused.value.retry_after_s
        assert f"has reached 24MiB: process {foreign.pid} (python" in refused.value.message
        assert "stopped) holds a read transaction on it" in refused.value.message
        assert journal.blocker_pid == foreign.pid
        journal.append([session("s2")]).result()  # what runs goes on
        os.kill(foreign.pid, signal.SIGCONT)
        _say(foreign)
        foreign.wait(60)
        for number in range(100):
            journal.append([session(f"t{number}")]).result()
            _settled(journal)
            if journal.blocker_pid == 0:
                break
        assert journal.blocker_pid == 0
        journal.check_room()
        assert journal.log_bytes < wal.CHECKPOINT_BYTES
    assert f"cannot be emptied: process {foreign.pid}" in caplog.text
    assert "New requests are refused." in caplog.text
    assert "requests are taken" in caplog.text


def test_erased_content_leaves_the_log_when_a_reader_lets_go(tmp_path: Path) -> None:
    with open_journal(tmp_path / "data") as journal, Reader.open(tmp_path / "data") as reader:
        secret = os.urandom(32).hex().encode()
        with reader.transaction() as db:
            db.execute("SELECT count(*) FROM event").fetchone()
            journal.append([session("s1"), *accepted(journal, "r1", record=secret)]).result()
            journal.run(lambda tx: tx.db.execute("SELECT 1").fetchone(), scrub=True).result()
            assert not journal.scrubbed
            assert journal.log_bytes > 0
        for _ in range(100):
            if journal.scrubbed:
                break
            with journal._wake:
                journal._wake.wait(0.1)
        assert journal.scrubbed
        assert journal.log_bytes == 0


def test_external_checkpoints_are_left_to_others(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with Journal.open(data_dir, clock=ticking(), checkpoint=wal.EXTERNAL, log_limit=12 << 20) as journal:
        journal.tenant("local")
        journal.append([session("s1")]).result()
        _grow(journal, 12 << 20)
        with pytest.raises(JournalUnavailable, match="nobody checkpoints it"):
            journal.check_room()
        journal.run(lambda tx: None, scrub=True).result()
        assert journal.log_bytes >= 12 << 20
        assert not journal.scrubbed
        other = sqlite3.connect(data_dir / "journal.db", isolation_level=None)
        assert other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
        other.close()
        journal.check_room()
        journal.append([session("s2")]).result()
        left = journal.log_bytes
    assert (data_dir / "journal.db-wal").stat().st_size == left, "closing does not empty it either"
    with Journal.open(data_dir) as journal:
        assert journal.session("s2") is not None


def test_another_program_that_opens_and_closes_the_journal_takes_nothing_along(tmp_path: Path) -> None:
    """Closing the database file drops this process's locks on it, if that is not done through SQLite.

    Then the other program takes itself for the last one and removes the log that the writer goes on to write to.
    """
    data_dir = tmp_path / "data"
    with open_journal(data_dir) as journal, Reader.open(data_dir) as reader:
        journal.append([session("s1")]).result()
        assert reader.head == 1
        assert verify(data_dir).clean
        command = [sys.executable, "-c", FOREIGN, str(journal.path)]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "1\n"
        journal.append([session("s2")]).result()
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "2\n"


def test_a_log_that_was_removed_is_noticed_before_anyone_is_told(tmp_path: Path) -> None:
    with open_journal(tmp_path / "data") as journal:
        journal.append([session("s1")]).result()
        (tmp_path / "data" / "journal.db-wal").unlink()
        for name in ("s2", "s3"):
            with pytest.raises(JournalUnavailable, match="was removed under the server; restart it"):
                journal.append([session(name)]).result()


def test_a_long_read_is_cut_into_short_ones() -> None:
    pace = Pace(10_000)
    for seconds, rows in ((READ_S_MAX, 2_000), (READ_S_MAX * 100, 100), (0.0, 200)):
        pace._started = time.monotonic() - seconds
        pace.__exit__()
        assert rows * 0.9 <= pace.rows <= rows * 1.1


def test_some_rows_and_not_all_when_it_takes_long() -> None:
    db = sqlite3.connect(":memory:")
    numbers = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < ?) SELECT x FROM n"
    assert some(db.execute(numbers, (3,))) == [(1,), (2,), (3,)]
    assert some(db.execute(numbers, (0,))) == [(1,)]
    long = some(db.execute(numbers, (1 << 40,)))
    assert 0 < len(long) < 1 << 30
    db.close()
