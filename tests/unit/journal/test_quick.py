"""What a start looks at: the end of the chain, the head file, and whether the projections can be right."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from tests.unit.journal.facts import open_journal, sampled, session, whole_turn
from zjournal.errors import JournalFault
from zjournal.journal import quick
from zjournal.journal.log import Journal
from zjournal.journal.verify import verify


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "data"
    with open_journal(path) as journal:
        journal.append([session("s1"), *whole_turn(journal, "r1"), session("s2")]).result()
        journal.append(whole_turn(journal, "r2", session="s2")).result()
    return path


@pytest.fixture
def data_dir(tmp_path: Path, original: Path) -> Path:
    return shutil.copytree(original, tmp_path / "data")


def test_clean(data_dir: Path) -> None:
    report = verify(data_dir)
    head = quick.prove(data_dir)
    assert (head.seq, head.link.hex()) == (report.head, report.link)


def test_empty(tmp_path: Path) -> None:
    open_journal(tmp_path / "data").close()
    assert quick.prove(tmp_path / "data").seq == 0


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("DELETE FROM turn WHERE response = 'r1'", "table turn has 1 rows, and the sessions count 2"),
        ("DELETE FROM session WHERE session = 's1'", "table turn has 2 rows, and the sessions count 1"),
        ("UPDATE session SET last_seq = 99 WHERE session = 's1'", "has gone to fact 99, and the facts end at"),
        ("UPDATE turn SET accepted_seq = 3 WHERE response = 'r1'", "turn r1 of fact 2 is missing"),
        ("UPDATE turn SET finished_us = NULL WHERE response = 'r2'", "turn r2 has no end, and fact"),
    ],
)
def test_projections_that_cannot_be_right_are_told_and_folded_again(
    data_dir: Path, statement: str, reason: str
) -> None:
    before = verify(data_dir)
    db = sqlite3.connect(data_dir / "journal.db", isolation_level=None)
    assert db.execute(statement).rowcount == 1
    db.close()
    with pytest.raises(JournalFault) as refused:
        quick.prove(data_dir)
    assert reason in refused.value.message
    assert "zj journal rebuild" in refused.value.message
    with Journal.open(data_dir) as journal:
        journal.rebuild()
        quick.check_projections(journal)
    assert verify(data_dir) == before


@pytest.mark.parametrize("change", ["name = 'other'", "secret = zeroblob(32)", "seal = x''", "name = 7"])
def test_a_tenant_that_is_not_what_was_sealed_is_told(data_dir: Path, change: str) -> None:
    """Else its owner would find an empty journal, and nobody would say a word."""
    db = sqlite3.connect(data_dir / "journal.db", isolation_level=None)
    assert db.execute(f"UPDATE tenant SET {change} WHERE id = 'local'").rowcount == 1
    db.close()
    with pytest.raises(JournalFault, match=r"the row of tenant 'local' does not match its seal; .*salvage"):
        quick.prove(data_dir)
    with pytest.raises(JournalFault, match="does not match its seal"):
        Journal.open(data_dir, strict=True)


def test_a_broken_index_is_made_anew(data_dir: Path) -> None:
    """An index that has lost an entry: found beside a server as well, where each row is looked up."""
    from zjournal.journal import datadir, structure
    from zjournal.journal.reader import Reader

    db = sqlite3.connect(data_dir / "journal.db", isolation_level=None)
    (page,) = db.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'turn_session'").fetchone()
    db.close()
    data = bytearray((data_dir / "journal.db").read_bytes())
    at = (page - 1) * 4096
    data[at + 3 : at + 5] = (1).to_bytes(2)  # of two cells one is left
    (data_dir / "journal.db").write_bytes(data)
    with Reader.open(data_dir) as reader:
        assert "missing from its index turn_session" in (structure.paged_fault(reader) or "")
        assert "SQLite finds" in (structure.whole_fault(reader) or "")
    with datadir.lock(data_dir), Journal.open(data_dir) as journal:
        fault = verify(data_dir).fault
        assert fault is not None
        assert "missing from its index turn_session" in fault.reason
        journal.rebuild()
        assert verify(data_dir).clean
    assert verify(data_dir).clean


def test_only_the_end_of_a_long_chain_is_read(tmp_path: Path) -> None:
    with open_journal(tmp_path / "data") as journal:
        journal.append([session("s1"), *whole_turn(journal, "r1")]).result()
        for at in range(5):
            journal.append([sampled("r1", 2 + at * 1_000 + k) for k in range(1_000)]).result()
    db = sqlite3.connect(tmp_path / "data" / "journal.db", isolation_level=None)
    db.execute("UPDATE segment SET data = zeroblob(9) WHERE first = 1")
    db.close()
    quick.prove(tmp_path / "data")
    assert not verify(tmp_path / "data").clean
    db = sqlite3.connect(tmp_path / "data" / "journal.db", isolation_level=None)
    db.execute("UPDATE segment SET data = zeroblob(9) WHERE first = 2049")
    db.close()
    with pytest.raises(JournalFault, match="its chain is broken at fact 2049"):
        quick.prove(tmp_path / "data")
    Journal.open(tmp_path / "data").close()
