"""What was erased does not live on in the memory of a reader that was reading it at that very moment."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.unit.journal.facts import open_journal, sampled, session, whole_turn
from zjournal.journal import content, retention, rows
from zjournal.journal.log import Journal

RECORD = b"a record that is long enough to be remembered, " * 9


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """One turn, all of it packed, and nothing remembered yet."""
    journal = open_journal(tmp_path / "data")
    journal.append([session("s1"), *whole_turn(journal, "r1", record=RECORD)]).result()
    while journal.seal():
        pass
    journal._plains.clear()
    return journal


def _payloads(journal: Journal) -> list[bytes]:
    known = journal._unpacked._known.values()
    return [fact.payload for facts in known for fact in facts if fact.payload is not None]


def _while_reading(journal: Journal, name: str, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the turn be deleted after the reader's transaction has seen it, and before it does anything with that."""
    original: Callable = getattr(module, name)

    def reading(db: sqlite3.Connection, *arguments: Any, **named: Any) -> Any:
        found = original(db, *arguments, **named)
        monkeypatch.setattr(module, name, original)
        assert retention.delete(journal, "local", "r1").result()
        return found

    monkeypatch.setattr(module, name, reading)


def test_facts_of_a_segment(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [fact.payload for fact in journal.read() if fact.payload] != []
    assert _payloads(journal) != []
    journal._unpacked.clear()
    _while_reading(journal, "find", rows, monkeypatch)
    journal.read()  # tells what it saw, as any reader that was a little faster would have
    assert _payloads(journal) == []
    assert [fact.payload for fact in journal.read() if fact.payload] == []
    assert _payloads(journal) == []


def test_a_content(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = journal.digest("local", RECORD)
    assert journal.content("local", digest) == RECORD
    assert journal._plains.get(digest) == RECORD
    journal._plains.clear()
    _while_reading(journal, "stored", content, monkeypatch)
    assert journal.content("local", digest) == RECORD
    assert journal._plains.get(digest) is None


def test_a_content_of_a_transaction_that_began_before_the_erasure(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Erasures are counted from before the transaction saw anything: one right behind its beginning counts."""
    digest = journal.digest("local", RECORD)
    original = journal.transaction

    @contextmanager
    def beginning() -> Iterator[sqlite3.Connection]:
        monkeypatch.undo()
        with original() as db:
            db.execute("SELECT count(*) FROM content").fetchone()
            assert retention.delete(journal, "local", "r1").result()
            yield db

    monkeypatch.setattr(journal, "transaction", beginning)
    assert journal.content("local", digest) == RECORD
    assert journal._plains.get(digest) is None


def test_salts_go_with_the_payloads(journal: Journal) -> None:
    """With the salt and the digest that stays, a short content could be guessed."""
    journal.append([*whole_turn(journal, "r2", parent="r1")[:3], sampled("r2", 0)]).result()
    assert {"r1", "r2"} <= journal._salts.keys()
    assert retention.delete(journal, "local", "r1").result()
    assert "r1" not in journal._salts
