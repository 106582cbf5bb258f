"""Compaction: the room goes back to the disk, every fact stays, and a full disk is told before anything is done."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.unit.journal.facts import open_journal, session, whole_turn
from zjournal.config import sqlite_temporary_dir
from zjournal.errors import DataDirFault
from zjournal.journal import compact, removal
from zjournal.journal.verify import verify


def test_room_goes_back_to_the_disk_and_facts_stay(tmp_path: Path) -> None:
    with open_journal(tmp_path / "data") as journal:
        for name in ("s1", "s2"):
            journal.append([session(name)]).result()
            prompt = random.Random(name).randbytes(1 << 20)
            journal.append(whole_turn(journal, "r" + name, session=name, record=prompt)).result()
        removal.remove_session(journal, "s1", removal.ASKED)
        facts = journal.read()
        done = compact.compact(journal)
        assert done.before - done.after > 900_000
        assert done.scrubbed
        assert journal.path.stat().st_size == done.after
        assert journal.read() == facts
        journal.append(whole_turn(journal, "later", session="s2", parent="rs2")).result()
    assert verify(tmp_path / "data").fault is None


def test_a_disk_without_room_is_told_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        free: int

    with open_journal(tmp_path / "data") as journal:
        size = journal.path.stat().st_size
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 20))
        with pytest.raises(DataDirFault, match="free space"):
            compact.compact(journal)
        assert journal.path.stat().st_size == size
        monkeypatch.undo()
        compact.compact(journal)


def test_where_sqlite_puts_temporary_files(tmp_path: Path) -> None:
    assert sqlite_temporary_dir({"SQLITE_TMPDIR": str(tmp_path), "TMPDIR": "/"}) == tmp_path
    assert sqlite_temporary_dir({"SQLITE_TMPDIR": str(tmp_path / "none"), "TMPDIR": str(tmp_path)}) == tmp_path
