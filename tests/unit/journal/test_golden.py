"""Journals of each released schema open for ever: migrated, verified, read, and folded to the same rows (R17)."""

from __future__ import annotations

import json
import sqlite3
import typing
from pathlib import Path
from typing import Any

import pytest

from tests.golden import make
from tests.unit.journal.facts import whole_turn
from zjournal.errors import JournalFault
from zjournal.journal.chain import TAGS
from zjournal.journal.database import SCHEMA_VERSION
from zjournal.journal.events import AnyEvent
from zjournal.journal.log import Journal
from zjournal.journal.reader import Reader
from zjournal.journal.verify import verify

STALE = "the format has changed: with a schema that was never released, run python -m tests.golden.make"


def _compare(data_dir: Path, expected: dict[str, Any]) -> None:
    """Today's fold against a recorded one; columns and kinds of later releases do not count."""
    told = make.fold(data_dir)
    for name in ("head", "link", "contents", "erased"):
        assert told[name] == expected[name], STALE
    assert [list(fact) for fact in told["facts"]] == expected["facts"], STALE
    for table in ("session", "turn", "chunk", "snapshot"):
        rows = [
            {name: row[name] for name in recorded} for row, recorded in zip(told[table], expected[table], strict=True)
        ]
        assert rows == expected[table], STALE


@pytest.mark.parametrize("schema", range(1, SCHEMA_VERSION + 1))
def test_r17_a_journal_of_each_schema_opens_and_tells_the_same(tmp_path: Path, schema: int) -> None:
    """Field report R17: after an upgrade the server does not start ("no such column"), or lists nothing."""
    data_dir = tmp_path / "data"
    make.unpack(make.JOURNALS / f"{schema}.db.zst", data_dir)
    expected = json.loads((make.JOURNALS / f"{schema}.json").read_text())
    with Journal.open(data_dir) as journal:
        assert journal.sessions(), "the list is not empty after an upgrade"
    _compare(data_dir, expected)
    with Journal.open(data_dir) as journal:
        journal.rebuild()
    _compare(data_dir, expected)
    with Journal.open(data_dir) as journal:
        journal.append(whole_turn(journal, "new", parent="r1")).result()
    assert verify(data_dir).fault is None


def test_the_golden_journal_holds_every_kind_of_fact(tmp_path: Path) -> None:
    make.build(tmp_path / "data")
    rows = make.fold(tmp_path / "data")
    kinds = {TAGS[kind][0] for kind in typing.get_args(AnyEvent)}
    assert {name for _, _, name, _ in rows["facts"]} == kinds
    assert {row["status"] for row in rows["turn"]} == {
        "running",
        "completed",
        "incomplete",
        "cancelled",
        "failed",
        "deleted",
    }
    make.build(tmp_path / "again")
    assert make.fold(tmp_path / "again") == rows


def test_a_released_golden_is_never_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "RELEASED", SCHEMA_VERSION)
    before = {path: path.read_bytes() for path in make.JOURNALS.iterdir()}
    assert make.main() == 1
    assert {path: path.read_bytes() for path in make.JOURNALS.iterdir()} == before


def test_r17_a_reader_of_an_older_journal_says_what_to_do(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    make.build(data_dir)
    db = sqlite3.connect(data_dir / "journal.db")
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION - 1}")
    db.close()
    with pytest.raises(JournalFault, match=f"schema version {SCHEMA_VERSION - 1}, .* start the server"):
        Reader.open(data_dir)
