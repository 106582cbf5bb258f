"""What is opened, what is refused, and that a refused file is not touched."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.journal.facts import finished, open_journal, session, whole_turn
from zjournal.errors import JournalFault
from zjournal.journal import database, retention
from zjournal.journal.log import Journal
from zjournal.journal.reader import Reader
from zjournal.journal.salvage import salvage

ROOT = Path(__file__).parents[3]


def _state(data_dir: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in data_dir.iterdir()}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def _refused(data_dir: Path, reason: str) -> None:
    before = _state(data_dir)
    with pytest.raises(JournalFault) as refused:
        Journal.open(data_dir)
    assert reason in refused.value.message
    assert str(data_dir) in refused.value.message
    assert ";" in refused.value.message, "a next step is told"
    assert _state(data_dir) == before


def test_files_are_private(data_dir: Path) -> None:
    with open_journal(data_dir) as journal:
        for _ in range(2):  # what comes after a commit is done, and no file is on its way
            journal.run(lambda _: None).result()
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in data_dir.iterdir()}
    assert modes.keys() >= {"journal.db", "journal.db-wal", "journal.db-shm"}
    assert set(modes.values()) == {0o600}, modes  # the head file, which may be there already, is as private


def test_open_files_are_closed_to_others(data_dir: Path) -> None:
    open_journal(data_dir).close()
    (data_dir / "journal.db").chmod(0o644)
    Journal.open(data_dir).close()
    assert stat.S_IMODE((data_dir / "journal.db").stat().st_mode) == 0o600


def test_pragmas(data_dir: Path) -> None:
    with open_journal(data_dir) as journal:
        names = ("journal_mode", "synchronous", "secure_delete", "application_id", "user_version")
        values = [journal._db.execute(f"PRAGMA {name}").fetchone()[0] for name in names]
    assert values == ["wal", 2, 1, database.APPLICATION_ID, database.SCHEMA_VERSION]


def test_event_has_no_secondary_index(data_dir: Path) -> None:
    with open_journal(data_dir) as journal, journal.transaction() as db:
        assert db.execute("PRAGMA index_list('event')").fetchall() == []


def test_schema_version_counts_the_steps() -> None:
    from zjournal.migrations import migrations

    assert len(migrations.pending(__import__("sqlite_utils").Database(memory=True))) == database.SCHEMA_VERSION


def test_plain_migrations_cannot_be_imported() -> None:
    ended = subprocess.run([sys.executable, "-c", "import migrations"], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 1
    assert "import zjournal.migrations" in ended.stderr


def test_a_second_open_imports_no_migrations(data_dir: Path) -> None:
    open_journal(data_dir).close()
    code = (
        "import sys; from pathlib import Path; from zjournal.journal.log import Journal\n"
        "Journal.open(Path(sys.argv[1])).close(); assert 'sqlite_utils' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(data_dir)], check=True, cwd=ROOT)


def test_not_sqlite(data_dir: Path) -> None:
    (data_dir / "journal.db").write_bytes(b"x" * 5_000)
    _refused(data_dir, "is not an SQLite file")


@pytest.mark.parametrize("size", [0, 50])
def test_cut_off(data_dir: Path, size: int) -> None:
    (data_dir / "journal.db").write_bytes(b"SQLite format 3\x00"[:size].ljust(size, b"\x00"))
    _refused(data_dir, "is cut off")


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_foreign_sqlite(data_dir: Path, mode: str) -> None:
    db = sqlite3.connect(data_dir / "journal.db")
    db.execute(f"PRAGMA journal_mode = {mode}")
    db.execute("CREATE TABLE event (x)")
    db.commit()
    _refused(data_dir, "is an SQLite file of another program")
    db.close()


def test_newer_schema(data_dir: Path) -> None:
    open_journal(data_dir).close()
    db = sqlite3.connect(data_dir / "journal.db")
    db.execute(f"PRAGMA user_version = {database.SCHEMA_VERSION + 1}")
    db.close()
    with pytest.raises(JournalFault, match="has schema version 2, and this zjournal knows 1; use the newer"):
        Journal.open(data_dir)
    with pytest.raises(JournalFault, match="schema version"):
        Reader.open(data_dir)


def test_read_only_file(data_dir: Path) -> None:
    open_journal(data_dir).close()
    (data_dir / "journal.db").chmod(0o400)
    _refused(data_dir, "is read-only")


def test_missing_table(data_dir: Path) -> None:
    open_journal(data_dir).close()
    db = sqlite3.connect(data_dir / "journal.db")
    db.execute("DROP TABLE turn")
    db.close()
    with pytest.raises(JournalFault, match="has no table turn"):
        Journal.open(data_dir)


def test_lost_identity(data_dir: Path) -> None:
    open_journal(data_dir).close()
    db = sqlite3.connect(data_dir / "journal.db", isolation_level=None)
    db.execute("DELETE FROM meta WHERE key = 'secret'")
    db.close()
    with pytest.raises(JournalFault, match="lost its identity"):
        Journal.open(data_dir)


def test_log_without_its_database(data_dir: Path) -> None:
    (data_dir / "journal.db-wal").write_bytes(b"left")
    _refused(data_dir, "belongs to a journal.db that is gone")


def test_a_start_that_was_killed_while_making_the_file(data_dir: Path) -> None:
    (data_dir / "journal.db.new").write_bytes(b"half a database")
    open_journal(data_dir).close()
    assert not (data_dir / "journal.db.new").exists()


def test_corrupt_pages(data_dir: Path) -> None:
    with open_journal(data_dir) as journal:
        journal.append([session("s1"), *whole_turn(journal, "r1")]).result()
    data = bytearray((data_dir / "journal.db").read_bytes())
    data[4096:] = b"\xa5" * (len(data) - 4096)
    (data_dir / "journal.db").write_bytes(data)
    with pytest.raises(JournalFault, match=r"is damaged|is broken"):
        Journal.open(data_dir)


def test_a_schema_that_is_no_text_is_damage(data_dir: Path) -> None:
    """SQLite quotes it in its error, which Python then cannot decode."""
    open_journal(data_dir).close()
    data = bytearray((data_dir / "journal.db").read_bytes())
    at = data.index(b"tableturnturn")
    data[at : at + 13] = b"\x89" * 13
    (data_dir / "journal.db").write_bytes(data)
    for attempt in (
        lambda: Journal.open(data_dir),
        lambda: Reader.open(data_dir),
        lambda: salvage(data_dir, data_dir.parent / "out"),
    ):
        with pytest.raises(JournalFault, match=r"is damaged|cannot be read at all"):
            attempt()


def test_a_broken_end_of_the_chain_is_refused(data_dir: Path) -> None:
    with open_journal(data_dir) as journal:
        journal.append([session("s1"), *whole_turn(journal, "r1"), finished("r1")]).result()
    db = sqlite3.connect(data_dir / "journal.db", isolation_level=None)
    db.execute("UPDATE event SET time = time + 1 WHERE seq = 5")
    db.close()
    with pytest.raises(JournalFault, match="its chain is broken at fact 5: its link"):
        Journal.open(data_dir)


def test_reader_needs_a_journal(data_dir: Path) -> None:
    with pytest.raises(JournalFault, match="there is no journal here"):
        Reader.open(data_dir)
    assert list(data_dir.iterdir()) == []


def test_reader_beside_and_after_the_writer(data_dir: Path) -> None:
    with open_journal(data_dir) as journal, Reader.open(data_dir) as reader:
        journal.append([session("s1")]).result()
        assert reader.head == 1
    with Reader.open(data_dir) as reader:
        assert [fact.seq for fact in reader.read()] == [1]
        assert (reader.id, reader.secret) == (journal.id, journal.secret)


def test_no_question_scans_a_table(data_dir: Path) -> None:
    """Every query that is asked while serving or sweeping finds its rows by an index.

    The indexes of open and of deleted turns hold nothing else, and are read whole.
    """
    with open_journal(data_dir) as journal:
        journal.append([session("s1", key=b"k"), *whole_turn(journal, "r1")]).result()
        asked: list[str] = []
        with journal.transaction() as db:
            db.set_trace_callback(asked.append)
        journal.turn("r1")
        journal.turns("s1")
        journal.running()
        journal.find_by_history("local", [b"x"])
        journal.find_by_request("local", [b"x"])
        journal.newest("s1")
        journal.session("s1")
        journal.sessions()
        journal.sessions_named("s")
        journal.turns_named("r")
        journal.find_session("local", b"k")
        journal.read()
        journal.read_response("r1")
        journal.content("local", journal.digest("local", b"the record of r1"))
        retention.sweep(journal, 1 << 60, 0)
        queries = [text for text in asked if text.startswith("SELECT")]
        assert len(queries) > 12
        with journal.transaction() as db:
            db.set_trace_callback(None)
            for query in queries:
                for *_, step in db.execute("EXPLAIN QUERY PLAN " + query):
                    whole = step.endswith(("INDEX turn_open", "INDEX turn_deleted"))
                    assert whole or "SCAN" not in step, (query, step)


def test_reader_of_a_directory_that_cannot_be_entered(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(path: object, **_: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", closed)
    with pytest.raises(JournalFault, match="cannot be reached"):
        Reader.open(data_dir)
