"""What the journal's room is said to be taken by is what is there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.journal.facts import open_journal, session, whole_turn
from zjournal.journal import retention, stats
from zjournal.journal.reader import Reader


@pytest.fixture(autouse=True, params=[2_000, 3])
def pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "PAGE_ROWS", request.param)


def test_every_row_and_byte_is_counted_once(tmp_path: Path) -> None:
    with open_journal(tmp_path / "data") as journal:
        journal.append([session("s1"), session("s2")])
        journal.append(whole_turn(journal, "r1", record=b"x" * 50_000))
        journal.append(whole_turn(journal, "r2", parent="r1"))
        journal.append(whole_turn(journal, "r3", session="s2", record=b"the record of r2")).result()
        found = stats.stats(journal)
        with journal.transaction() as db:
            tables = ("event", "segment", "content", "turn", "session", "snapshot", "chunk", "tenant")
            rows = {name: db.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables}
            stored, plain = db.execute("SELECT sum(length(data)), sum(size) FROM content").fetchone()
            bodies, payloads = db.execute("SELECT sum(length(body)), sum(length(payload)) FROM event").fetchone()
        assert found.rows == rows
        assert sum(kind.rows for kind in found.facts.values()) == rows["event"]
        assert sum(kind.bytes for kind in found.facts.values()) > bodies + payloads + 40 * rows["event"]
        assert sum(kind.rows for kind in found.contents.values()) == rows["content"]
        assert sum(kind.bytes for kind in found.contents.values()) == stored
        assert sum(kind.plain for kind in found.contents.values()) == plain
        assert found.contents["record"].plain > 50_000
        # A record that two turns share counts for the first.
        assert found.contents["record"].rows == 2
        assert [(size.session, size.turns) for size in found.largest] == [("s1", 2), ("s2", 1)]
        assert found.file_bytes > found.rest_bytes > 0
        assert found.wal_bytes == (tmp_path / "data" / "journal.db-wal").stat().st_size


def test_what_was_erased_counts_no_more(tmp_path: Path) -> None:
    with open_journal(tmp_path / "data") as journal:
        journal.append([session("s1")])
        journal.append(whole_turn(journal, "r1", record=os.urandom(50_000))).result()
        before = stats.stats(journal)
        retention.delete(journal, "local", "r1").result()
        after = stats.stats(journal)
    assert before.contents and not after.contents
    assert after.largest[0].bytes < before.largest[0].bytes
    assert after.free_bytes > before.free_bytes


def test_an_empty_journal(tmp_path: Path) -> None:
    open_journal(tmp_path / "data").close()
    with Reader.open(tmp_path / "data") as reader:
        found = stats.stats(reader)
    assert (found.facts, found.contents, found.largest) == ({}, {}, ())
