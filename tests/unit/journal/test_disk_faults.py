"""What the simulation found: a disk that refuses, at the start and at the end, is a typed fault and loses nothing."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from tests.unit.journal.facts import open_journal, session, whole_turn
from zjournal.errors import DataDirFault, JournalFault
from zjournal.journal import database, datadir
from zjournal.journal.log import Journal


def _refuse(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The inodes that were synced through Python."""
    inodes: list[int] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        inodes.append(os.fstat(descriptor).st_ino)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return inodes


def test_the_directory_of_a_new_journal_is_as_durable_as_its_facts(tmp_path: Path, synced: list[int]) -> None:
    """The names of all folders above it are synced before there can be a fact; later starts need not do it."""
    data_dir = tmp_path / "a" / "b" / "data"
    datadir.prepare(data_dir)
    assert {folder.stat().st_ino for folder in (tmp_path, tmp_path / "a", tmp_path / "a" / "b")} <= set(synced)
    open_journal(data_dir).close()
    synced.clear()
    datadir.prepare(data_dir)
    assert not synced


def test_a_start_on_a_full_disk_is_a_fault_and_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", _refuse)
        with pytest.raises(DataDirFault, match="No space left") as refused:
            datadir.lock(tmp_path / "data")
    assert str(tmp_path / "data") in refused.value.message
    assert datadir.owner(tmp_path / "data") is None
    datadir.lock(tmp_path / "data").release()


def test_a_bad_disk_does_not_keep_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = datadir.lock(tmp_path / "data")
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", _refuse)
        held.release()
    assert datadir.owner(tmp_path / "data") is None


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """A journal whose facts are all in its log, as a kill leaves them."""
    with open_journal(tmp_path / "running") as journal:
        journal.append([session("s1"), *whole_turn(journal, "r1")]).result()
        return Path(shutil.copytree(tmp_path / "running", tmp_path / "crashed"))


def test_what_a_start_finds_in_the_log_is_durable_before_it_is_told(crashed: Path, synced: list[int]) -> None:
    """Bytes that a failed sync left in memory alone are written again: a later sync would not write them."""
    log = crashed / "journal.db-wal"
    before = log.read_bytes()
    assert before
    written: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        real = os.pwrite

        def pwrite(descriptor: int, data: bytes, offset: int) -> int:
            if os.fstat(descriptor).st_ino == log.stat().st_ino:
                written.append(len(data))
            return real(descriptor, data, offset)

        patch.setattr(os, "pwrite", pwrite)
        db = database.open_writer(crashed)
    assert sum(written) == len(before)
    assert log.stat().st_ino in synced
    assert log.read_bytes() == before
    db.close()
    with Journal.open(crashed) as journal:
        assert [fact.seq for fact in journal.read()] == list(range(1, 7))


def test_a_log_that_cannot_be_made_durable_is_not_told(crashed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (crashed / "journal.db-wal").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", _refuse)
        with pytest.raises(JournalFault, match="No space left") as refused:
            Journal.open(crashed)
    assert "journal.db" in refused.value.message
    assert (crashed / "journal.db-wal").read_bytes() == before
    Journal.open(crashed).close()


@pytest.mark.parametrize("text", ["disk I/O error", "database or disk is full"])
def test_a_bad_disk_is_not_called_a_damaged_journal(text: str) -> None:
    """Nobody should restore a backup over a journal that is whole."""
    message = database.damage(Path("journal.db"), sqlite3.OperationalError(text)).message
    assert "damaged" not in message
    assert "backup" not in message
    assert "free space" in message
