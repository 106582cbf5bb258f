"""Verification names the first break, whatever was changed, and changes nothing itself."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from tests.unit.journal.facts import accepted, failed, open_journal, sampled, session, whole_turn
from zjournal.errors import JournalFault
from zjournal.journal import datadir, retention
from zjournal.journal.log import Journal
from zjournal.journal.reader import Reader
from zjournal.journal.verify import Report, verify


@pytest.fixture
def data_dir(tmp_path: Path, original: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(original, tmp_path / "data")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed journal: two sessions, a turn, its deleted child, an open turn."""
    path = tmp_path_factory.mktemp("original") / "data"
    with open_journal(path) as journal:
        journal.append([session("s1"), *whole_turn(journal, "r1"), session("s2", key=b"k")]).result()
        journal.append(whole_turn(journal, "r2", parent="r1")).result()
        retention.delete(journal, "local", "r2").result()
        journal.append([*accepted(journal, "r3", session="s2"), sampled("r3", 0)]).result()
    return path


def _after(data_dir: Path, *statements: str) -> Report:
    db = sqlite3.connect(data_dir / "journal.db", isolation_level=None)
    for statement in statements:
        db.execute(statement)
    db.close()
    return verify(data_dir)


def _reason(report: Report) -> str:
    assert report.fault is not None
    assert not report.clean
    return f"{report.fault.where} {report.fault.seq}: {report.fault.reason}"


def test_clean(data_dir: Path) -> None:
    before = (data_dir / "journal.db").read_bytes()
    steps: list[tuple[int, int]] = []
    report = verify(data_dir, lambda done, total: steps.append((done, total)))
    assert report.clean
    assert (report.facts, report.turns, report.sessions, report.erased) == (17, 2, 2, 1)
    assert report.contents == 2
    assert steps[-1] == (19, 19)
    assert (data_dir / "journal.db").read_bytes() == before


def test_empty(tmp_path: Path) -> None:
    open_journal(tmp_path / "data").close()
    report = verify(tmp_path / "data")
    assert (report.clean, report.facts) == (True, 0)


def test_beside_a_writer(data_dir: Path) -> None:
    with open_journal(data_dir) as journal:
        futures = [journal.append([sampled("r3", k)]) for k in range(1, 50)]
        report = verify(data_dir)
        assert report.clean
        assert [future.result() for future in futures][-1] == journal.head
        journal.append([failed("r3")]).result()
        assert verify(data_dir).head == journal.head


def test_no_journal(tmp_path: Path) -> None:
    with pytest.raises(JournalFault):
        verify(tmp_path)


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("DELETE FROM event WHERE seq = 3", "event 4: facts 3 to 3 are missing"),
        ("UPDATE event SET payload = NULL WHERE seq = 5", "event 5: its payload is gone, and no fact says"),
        (
            "UPDATE event SET payload = CAST(payload || x'00' AS BLOB) WHERE seq = 5",
            "event 5: its payload does",
        ),
        ("UPDATE event SET body = CAST(body AS TEXT) WHERE seq = 2", "event 2: column body holds a str"),
        ("DELETE FROM content WHERE id = (SELECT min(id) FROM content)", "is missing: facts refer to it"),
        ("DELETE FROM content", "is missing: facts refer to it"),
        ("UPDATE content SET refs = refs + 1", "its reference count"),
        ("UPDATE content SET tenant = 'x'", "belongs to no tenant"),
        ("UPDATE content SET size = size + 1", "its frame holds"),
        ("UPDATE tenant SET name = 'x'", "does not match its seal"),
        ("UPDATE tenant SET secret = zeroblob(32)", "does not match its seal"),
        ("UPDATE meta SET value = zeroblob(32) WHERE key = 'secret'", "event 1: its link"),
        ("UPDATE meta SET value = zeroblob(16) WHERE key = 'id'", "event 1: its link"),
        ("UPDATE turn SET output = 5 WHERE response = 'r1'", "turn r1: column output is 5, and the facts say 2"),
        ("UPDATE turn SET ttft_us = 210.5 WHERE response = 'r1'", "turn r1: column ttft_us is 210.5"),
        ("UPDATE turn SET model = CAST(model AS BLOB)", "turn r1: column model is b'smollm2'"),
        ("DELETE FROM turn WHERE response = 'r3'", "turn r3 is missing"),
        ("DELETE FROM turn WHERE response = 'r1'", "does not follow from the facts"),
        ("UPDATE session SET turns = 7 WHERE session = 's2'", "session s2: column turns is 7"),
        ("INSERT INTO session VALUES (99, 'x', '', x'', 0, 0, 0, 0, 0, 0)", "row 99 of table session"),
    ],
)
def test_a_change_is_named(data_dir: Path, statement: str, reason: str) -> None:
    assert reason in _reason(_after(data_dir, statement))


def test_a_relinked_change_shows_in_the_projection(data_dir: Path) -> None:
    """Whoever recomputes all links still has to make the projections agree; here they did not."""
    from zjournal.journal import chain
    from zjournal.journal.reader import Reader

    with Reader.open(data_dir) as reader, reader.transaction() as db:
        rows = db.execute(f"SELECT {chain.COLUMNS} FROM event ORDER BY seq").fetchall()
        head = chain.genesis(reader.id, reader.secret)
    db = sqlite3.connect(data_dir / "journal.db", isolation_level=None)
    for seq, time, tag, version, body, _, sha, _ in rows:
        time += 1
        head = chain.Head(seq, chain.link(head.link, seq, tag, version, time, body, sha), time)
        db.execute("UPDATE event SET time = ?, link = ? WHERE seq = ?", (time, head.link, seq))
    db.close()
    assert "head None: its fact 17 is not the one that journal.head has seen" in _reason(verify(data_dir))
    (data_dir / "journal.head").unlink()
    assert "column accepted_us" in _reason(verify(data_dir))


def test_a_body_of_another_kind(data_dir: Path) -> None:
    from zjournal.journal import chain

    with open_journal(data_dir) as journal:
        head = journal._head
        body = journal.run(lambda tx: tx.db.execute("SELECT body FROM event WHERE seq = 1").fetchone()[0]).result()
        link = chain.link(head.link, head.seq + 1, "server_stopped", 1, head.time, body, None)
        row = (head.seq + 1, head.time, "server_stopped", 1, body, None, None, link)
        insert = f"INSERT INTO event ({chain.COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        journal.run(lambda tx: tx.db.execute(insert, row)).result()
    assert "its body is of another kind than server_stopped.1" in _reason(verify(data_dir))


def test_a_damaged_page_is_named(data_dir: Path) -> None:
    path = data_dir / "journal.db"
    data = bytearray(path.read_bytes())
    page = data.find(b"session_opened") // 4096
    data[page * 4096 : page * 4096 + 64] = b"\xff" * 64
    path.write_bytes(data)
    report = verify(data_dir)
    assert report.fault is not None
    assert report.fault.where == "file"


FOREIGN = {
    "a trigger": (
        ("CREATE TRIGGER spy AFTER INSERT ON event BEGIN UPDATE event SET body = x'' WHERE seq = new.seq; END",),
        "there is a trigger 'spy' in it that is not of zjournal",
    ),
    "a table": (("CREATE TABLE notes (x)",), "there is a table 'notes' in it that is not of zjournal"),
    "a view": (("CREATE VIEW prompts AS SELECT body FROM event",), "there is a view 'prompts' in it"),
    "an index": (("CREATE INDEX fast ON turn (model)",), "there is an index 'fast' in it"),
    "no index": (("DROP INDEX turn_open",), "index turn_open is missing"),
    "another index": (
        ("DROP INDEX turn_open", "CREATE INDEX turn_open ON turn (accepted_seq)"),
        "index turn_open is not as zjournal makes it",
    ),
    "another column": (("ALTER TABLE tenant ADD COLUMN mail TEXT",), "table tenant is not as zjournal makes it"),
    "a step": (
        ("INSERT INTO _sqlite_migrations (migration_set, name) VALUES ('zjournal', 'm0009_later')",),
        "lists other steps than those of this schema",
    ),
    "another step": (("UPDATE _sqlite_migrations SET name = 'm0002'",), "lists other steps"),
    "no steps": (("DELETE FROM _sqlite_migrations",), "lists other steps"),
    "no list": (("DROP TABLE _sqlite_migrations",), "no such table: _sqlite_migrations"),
}


@pytest.mark.parametrize("case", FOREIGN)
@pytest.mark.parametrize("served", [False, True])
def test_what_is_not_ours_is_named(data_dir: Path, case: str, served: bool) -> None:
    statements, reason = FOREIGN[case]
    if served:
        with datadir.lock(data_dir):
            report = _after(data_dir, *statements)
    else:
        report = _after(data_dir, *statements)
    assert report.fault is not None and report.fault.where == "file"
    assert reason in report.fault.reason


def test_what_litestream_and_analyze_leave_is_no_break(data_dir: Path) -> None:
    report = _after(
        data_dir,
        "CREATE TABLE _litestream_seq (id INTEGER PRIMARY KEY, seq INTEGER)",
        "CREATE TABLE _litestream_lock (id INTEGER)",
        "ANALYZE",
    )
    assert report.clean, report.fault


def test_a_foreign_trigger_is_not_served(data_dir: Path) -> None:
    """It could change what is written; reading it is as safe as before."""
    _after(data_dir, "CREATE TRIGGER spy AFTER INSERT ON event BEGIN DELETE FROM turn; END")
    before = (data_dir / "journal.db").read_bytes()
    with pytest.raises(JournalFault, match=r"has a trigger 'spy' on table event, .*; drop it"):
        Journal.open(data_dir)
    assert (data_dir / "journal.db").read_bytes() == before
    with Reader.open(data_dir) as reader:
        assert reader.sessions()
