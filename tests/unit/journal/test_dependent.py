"""Appends that build on others: none after one that was lost, on what was erased, or on what is not ours."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from tests.unit.journal.facts import accepted, open_journal, sampled, session, whole_turn
from zjournal.errors import JournalUnavailable
from zjournal.journal import retention
from zjournal.journal.log import Journal
from zjournal.journal.transaction import ParentErased
from zjournal.journal.verify import verify

FILLING = 200_000  # bytes of a payload that no small journal has room for


def full(journal: Journal) -> None:
    """Makes the journal a full disk, as SQLite sees it."""
    journal.run(lambda tx: tx.db.execute("PRAGMA max_page_count = 1").fetchone()).result()


def freed(journal: Journal) -> None:
    journal.run(lambda tx: tx.db.execute("PRAGMA max_page_count = 1000000").fetchone()).result()


def test_what_builds_on_a_lost_append_is_lost_even_when_there_is_room_again(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.append([session("s1"), *accepted(journal, "r1")]).result()
        full(journal)
        lost = journal.append([sampled("r1", 0, FILLING // 4)])
        with pytest.raises(JournalUnavailable, match="full"):
            lost.result()
        freed(journal)
        second = journal.append([sampled("r1", FILLING // 4)], after=lost)
        third = journal.append([sampled("r1", FILLING // 4 + 1)], after=second)
        for orphan in (second, third):
            with pytest.raises(JournalUnavailable, match="before these are missing"):
                orphan.result()
        fresh = journal.append([sampled("r1", 0)])
        assert journal.append([sampled("r1", 1)], after=fresh).result() == fresh.result() + 1
        turn = journal.turn("r1")
        assert turn is not None and turn.output == 2
    assert verify(tmp_path).fault is None


def test_a_turn_cannot_continue_one_that_was_erased_meanwhile(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.append([session("s1"), *whole_turn(journal, "r1")]).result()
        assert retention.delete(journal, "local", "r1").result()
        child = journal.append(accepted(journal, "r2", parent="r1"))
        other = journal.append(accepted(journal, "r3"))
        with pytest.raises(ParentErased):
            child.result()
        other.result()
        assert journal.turn("r2") is None
        assert journal.turn("r3") is not None
    assert verify(tmp_path).fault is None


def test_a_turn_may_continue_one_that_is_only_hidden(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.append([session("s1"), *whole_turn(journal, "r1"), *whole_turn(journal, "r2", parent="r1")]).result()
        assert retention.delete(journal, "local", "r1").result()
        journal.append(accepted(journal, "r3", parent="r1")).result()
    assert verify(tmp_path).fault is None


@pytest.mark.parametrize(
    ("change", "sealed"), [("added", False), ("added", True), ("gone", False), ("replaced", False)]
)
def test_facts_that_another_program_changed_are_not_built_on(tmp_path: Path, change: str, sealed: bool) -> None:
    with open_journal(tmp_path) as journal:
        journal.append([session("s1"), *whole_turn(journal, "r1"), *whole_turn(journal, "r2")]).result()
        if sealed:
            journal.seal()
        head = journal.head
        where = "seq = (SELECT max(seq) FROM event)"
        columns = "time, tag, version, body, payload, payload_sha, link"
        statement = {
            "added": f"INSERT INTO event SELECT {head + 1}, {columns} FROM kept",
            "gone": f"DELETE FROM event WHERE seq = {head}",
            "replaced": f"UPDATE event SET link = zeroblob(32) WHERE seq = {head}",
        }[change]
        other = sqlite3.connect(tmp_path / "journal.db", isolation_level=None)
        other.execute(f"CREATE TEMP TABLE kept AS SELECT * FROM event WHERE {where}")
        if sealed:
            row = (head, 0, "t", 1, b"", None, None, b"")
            other.execute("INSERT INTO kept VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        assert other.execute(statement).rowcount == 1
        for _ in range(2):
            with pytest.raises(JournalUnavailable, match="Another program has changed the facts"):
                journal.append(whole_turn(journal, "r3")).result()
        assert journal.head == head
        if change == "added":  # whoever takes it back is forgiven
            other.execute(f"DELETE FROM event WHERE seq = {head + 1}")
            journal.append(whole_turn(journal, "r3")).result()
        other.close()


def test_tables_that_another_program_keeps_disturb_nobody(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.append([session("s1"), *whole_turn(journal, "r1")]).result()
        other = sqlite3.connect(tmp_path / "journal.db", isolation_level=None)
        other.execute("CREATE TABLE _litestream_seq (id INTEGER PRIMARY KEY, seq INTEGER)")
        journal.append(whole_turn(journal, "r2")).result()
        other.execute("INSERT INTO _litestream_seq VALUES (1, 1)")
        other.close()
        journal.append(whole_turn(journal, "r3")).result()
    assert verify(tmp_path).clean
