"""A backup is the whole journal at one moment, private, and never in the place of another file."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import threading
from pathlib import Path

import pytest

from tests.unit.journal.facts import open_journal, session, whole_turn
from zjournal.errors import Fault, JournalUnavailable, OutputFault
from zjournal.journal import backup as module
from zjournal.journal import log
from zjournal.journal.backup import backup
from zjournal.journal.log import Journal
from zjournal.journal.output import new_file
from zjournal.journal.reader import Reader
from zjournal.journal.verify import verify

MEANWHILE = 12  # turns that are committed while a copy is made


def restored(copy: Path, folder: Path) -> Path:
    """The copy as the journal of a data directory, as docs/backup.md says."""
    folder.mkdir(mode=0o700)
    shutil.copy2(copy, folder / "journal.db")
    return folder


def filled(data_dir: Path, turns: int = 3) -> Journal:
    journal = open_journal(data_dir)
    journal.append([session("s1")])
    for number in range(turns):
        journal.append(whole_turn(journal, f"r{number}", record=os.urandom(30_000)))
    journal.run(lambda tx: None).result()
    return journal


def test_it_is_the_journal(tmp_path: Path) -> None:
    with filled(tmp_path / "data") as journal:
        copied = backup(journal, tmp_path / "copy.db")
        assert copied.head == copied.facts == journal.head
        assert copied.bytes == (tmp_path / "copy.db").stat().st_size
        assert stat.S_IMODE((tmp_path / "copy.db").stat().st_mode) == 0o600
        assert sorted(os.listdir(tmp_path)) == ["copy.db", "data"], "nothing is left beside it"
        report = verify(restored(tmp_path / "copy.db", tmp_path / "again"))
        assert report.fault is None
        assert (report.head, report.link) == (copied.head, copied.link)
        with Reader.open(tmp_path / "again") as reader:
            assert reader.read() == journal.read()
    with open_journal(tmp_path / "again") as journal:  # and it can be gone on with
        journal.append(whole_turn(journal, "later")).result()
    assert verify(tmp_path / "again").fault is None


def test_writers_go_on_meanwhile_and_it_is_of_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "COPY_STEP_PAGES", 1)
    write_waiting, came = log.Journal._write_waiting, []

    def with_a_turn_that_just_came(journal: log.Journal) -> None:
        """A producer that is heard between two steps of the copy, whatever the scheduler does."""
        if len(came) < MEANWHILE:
            came.append(journal.append(whole_turn(journal, f"x{len(came)}", record=os.urandom(9_000))))
        write_waiting(journal)

    monkeypatch.setattr(log.Journal, "_write_waiting", with_a_turn_that_just_came)
    with filled(tmp_path / "data", turns=30) as journal:
        before = journal.head
        copied = backup(journal, tmp_path / "copy.db")
        assert len(came) == MEANWHILE and all(append.done() for append in came), "they did not wait for the copy"
        assert copied.head == came[-1].result() > before, "what was committed during the copy is in it"
        assert verify(restored(tmp_path / "copy.db", tmp_path / "again")).head == copied.head
        assert verify(tmp_path / "again").fault is None


def test_what_exists_is_never_replaced(tmp_path: Path) -> None:
    with filled(tmp_path / "data") as journal:
        (tmp_path / "copy.db").write_text("precious")
        (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
        for name in ("copy.db", "dangling", "data"):
            with pytest.raises(OutputFault, match="exists already"):
                backup(journal, tmp_path / name)
        assert (tmp_path / "copy.db").read_text() == "precious"
        with pytest.raises(OutputFault, match="No such file"):
            backup(journal, tmp_path / "no" / "copy.db")


def test_a_name_that_is_taken_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(OutputFault, match="exists already"), new_file(tmp_path / "f") as part:
        part.write_text("ours")
        (tmp_path / "f").write_text("theirs")
    assert (tmp_path / "f").read_text() == "theirs"
    assert os.listdir(tmp_path) == ["f"]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sqlite3.connect

    def small(*arguments: object, **more: object) -> sqlite3.Connection:
        db = connect(*arguments, **more)  # type: ignore[call-overload]
        db.execute("PRAGMA max_page_count = 3")
        return db

    with filled(tmp_path / "data") as journal:
        head = journal.head
        monkeypatch.setattr(module.sqlite3, "connect", small)
        with pytest.raises(OutputFault, match="full"):
            backup(journal, tmp_path / "copy.db")
        monkeypatch.undo()
        assert os.listdir(tmp_path) == ["data"]
        journal.append(whole_turn(journal, "later")).result()  # the journal itself is not hurt
        assert journal.head > head


def test_closing_the_journal_gives_it_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "COPY_STEP_PAGES", 1)
    journal = filled(tmp_path / "data", turns=30)
    began, caught = threading.Event(), []
    write = journal._write_waiting

    def told() -> None:
        began.set()
        write()

    monkeypatch.setattr(journal, "_write_waiting", told)

    def work() -> None:
        try:
            backup(journal, tmp_path / "copy.db")
        except Fault as fault:
            caught.append(fault)

    copying = threading.Thread(target=work)
    copying.start()
    began.wait()
    journal.close()
    copying.join()
    assert (tmp_path / "copy.db").exists() or isinstance(caught[0], JournalUnavailable)
    assert not list(tmp_path.glob("*.part"))


def test_two_at_a_time_are_made_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "COPY_STEP_PAGES", 1)
    with filled(tmp_path / "data") as journal:
        copies = [threading.Thread(target=backup, args=(journal, tmp_path / f"{n}.db")) for n in range(2)]
        for copy in copies:
            copy.start()
        for copy in copies:
            copy.join()
        for number in range(2):
            assert verify(restored(tmp_path / f"{number}.db", tmp_path / f"r{number}")).fault is None


def test_a_copy_of_database_and_log_is_a_consistent_beginning(tmp_path: Path) -> None:
    """What tools that copy files do (Litestream among them): a read transaction keeps the log as it is meanwhile."""
    with filled(tmp_path / "data") as journal:
        with journal.transaction() as db:
            held = db.execute("SELECT max(seq) FROM event").fetchone()[0]
            journal.append(whole_turn(journal, "meanwhile")).result()  # goes into the log, behind what is held
            copy = tmp_path / "copy"
            copy.mkdir(mode=0o700)
            for name in ("journal.db", "journal.db-wal"):
                shutil.copy2(tmp_path / "data" / name, copy / name)
                journal.append(whole_turn(journal, f"after {name}")).result()
        report = verify(copy)
        assert report.fault is None
        assert held <= report.head < journal.head
        log_bytes = (copy / "journal.db-wal").read_bytes()
    # Cut anywhere, as a copy that was cut off would be: the commits that are whole are there, and nothing else.
    for cut in range(0, len(log_bytes), max(len(log_bytes) // 12, 1)):
        again = tmp_path / f"cut{cut}"
        again.mkdir(mode=0o700)
        shutil.copy2(copy / "journal.db", again / "journal.db")
        (again / "journal.db-wal").write_bytes(log_bytes[:cut])
        part = verify(again)
        assert part.fault is None
        assert part.head <= report.head
