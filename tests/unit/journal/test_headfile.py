"""The head outside the database: bytes, pace, and what a start makes of it."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.journal.facts import START_US, open_journal, session, ticking
from zjournal.errors import JournalFault
from zjournal.journal import headfile, quick
from zjournal.journal.chain import Head
from zjournal.journal.headfile import HEAD_FILE, Broken, Extent, HeadFile, Witness
from zjournal.journal.log import Journal
from zjournal.journal.salvage import salvage
from zjournal.journal.verify import verify

WITNESS = Witness(bytes(range(16)), Head(258, b"\x22" * 32, START_US), Extent(b"\x33" * 8, 44))


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A closed journal of three facts."""
    with open_journal(tmp_path / "data") as journal:
        journal.append([session(name) for name in ("s1", "s2", "s3")]).result()
    return tmp_path / "data"


def test_the_worked_example() -> None:
    """As in docs/journal.md."""
    assert headfile.encode(WITNESS).hex() == (
        "7a6a6865616400000000000100010203"
        "0405060708090a0b0c0d0e0f00000000"
        "00000102" + "22" * 32 + "00060a24181e4000"
        "33333333333333330000002c"
        "9356e06fa726e806123fad5af04862ff50aa11c968eda96e2c45f85684b91d19"
    )


def test_round_trip() -> None:
    assert headfile.decode(headfile.encode(WITNESS)) == WITNESS


@given(st.binary(max_size=2 * headfile.BYTES))
def test_any_bytes_are_refused_or_are_the_file_itself(data: bytes) -> None:
    try:
        assert headfile.encode(headfile.decode(data)) == data
    except Broken as broken:
        assert str(broken)


@given(at=st.integers(0, headfile.BYTES - 1), mask=st.integers(1, 255), cut=st.integers(0, headfile.BYTES))
def test_any_damage_is_noticed(at: int, mask: int, cut: int) -> None:
    data = bytearray(headfile.encode(WITNESS))
    data[at] ^= mask
    for bad in (bytes(data), bytes(data)[:cut], bytes(data) + b"\x00"):
        with pytest.raises(Broken):
            headfile.decode(bad)


def test_it_names_the_end_when_the_journal_is_closed(data_dir: Path) -> None:
    witness = headfile.read(data_dir)
    with Journal.open(data_dir) as journal:
        assert witness is not None
        assert (witness.journal, witness.head.seq) == (journal.id, 3)
    assert (data_dir / HEAD_FILE).stat().st_mode & 0o777 == 0o600


def test_it_is_written_at_most_once_a_second(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "data", clock=ticking(step_us=100_000)) as journal:
        seen = set()
        for number in range(40):
            journal.append([session(f"s{number}")]).result()
            journal.run(lambda _: None).result()  # by then the work after that commit is done
            witness = headfile.read(tmp_path / "data")
            assert witness is not None
            assert journal.head - witness.head.seq <= 11
            seen.add(witness.head.seq)
        assert 2 <= len(seen) <= 12


def test_a_clock_that_is_set_back_does_not_stop_it(tmp_path: Path) -> None:
    file = HeadFile(tmp_path, bytes(16))
    for seq, now in ((1, START_US), (2, START_US + 10), (3, START_US - 10_000_000)):
        file.note(Head(seq, bytes(32), now), now)
    witness = headfile.read(tmp_path)
    assert witness is not None
    assert witness.head.seq == 3


def test_an_idle_journal_writes_what_is_left(tmp_path: Path) -> None:
    """The last commits of a burst do not wait for the next burst."""
    with Journal.open(tmp_path / "data", clock=ticking(step_us=400_000)) as journal:
        for name in ("s1", "s2"):
            journal.append([session(name)]).result()
        for _ in range(100):
            with journal._wake:
                journal._wake.wait(0.1)
            witness = headfile.read(tmp_path / "data")
            if witness is not None and witness.head.seq == 2:
                return
        raise AssertionError("the head was never written")


def test_a_disk_that_refuses_is_no_reason_to_refuse_facts(
    data_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        return 1

    with Journal.open(data_dir, clock=ticking(2_000_000)) as journal:
        monkeypatch.setattr(headfile.os, "write", full)
        for name in ("a", "b", "c"):
            journal.append([session(name)]).result()
        journal.run(lambda _: None).result()
    assert [record.message for record in caplog.records if "cannot be written" in record.message] == [
        f"{data_dir / HEAD_FILE} cannot be written: the disk is full"
    ]
    monkeypatch.undo()
    Journal.open(data_dir).close()


def test_a_cut_tail_is_refused(data_dir: Path) -> None:
    """Facts that are cut off cleanly, with their effects, and nothing in the database shows it."""
    db = sqlite3.connect(data_dir / "journal.db", isolation_level=None)
    db.execute("DELETE FROM event WHERE seq = 3")
    db.execute("DELETE FROM session WHERE opened_seq = 3")
    db.close()
    with pytest.raises(JournalFault) as refused:
        Journal.open(data_dir)
    assert "its end is missing: it has 2 facts, and journal.head has seen 3" in refused.value.message
    assert "zj journal salvage OUT" in refused.value.message
    assert "remove journal.head" in refused.value.message
    (data_dir / HEAD_FILE).unlink()
    Journal.open(data_dir).close()


def test_another_history_is_refused(data_dir: Path) -> None:
    with Journal.open(data_dir) as journal:
        identity = journal.id
    HeadFile(data_dir, identity).write(Head(2, bytes(32), START_US))
    with pytest.raises(JournalFault, match=r"its fact 2 is not the one that journal\.head has seen"):
        Journal.open(data_dir)


def test_another_journal_is_refused(data_dir: Path) -> None:
    HeadFile(data_dir, bytes(16)).write(Head(1, bytes(32), START_US))
    with pytest.raises(JournalFault, match=r"is another journal than the one that journal\.head was written for"):
        Journal.open(data_dir)


@pytest.mark.parametrize("content", [None, b"", b"\x00" * headfile.BYTES, b"x" * 5_000])
def test_a_missing_or_broken_file_is_a_warning(
    data_dir: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A loss of power can leave anything of it; the next commit makes it anew."""
    (data_dir / HEAD_FILE).unlink()
    if content is not None:
        (data_dir / HEAD_FILE).write_bytes(content)
    with caplog.at_level(logging.WARNING), Journal.open(data_dir) as journal:
        journal.append([session("s4")]).result()
    assert "would not show" in caplog.text
    witness = headfile.read(data_dir)
    assert witness is not None
    assert witness.head.seq == 4


def _killed(data_dir: Path, cut: Path, tail_bytes: int) -> None:
    """What a kill would leave of an open journal, in another place, its log shorter by so many bytes."""
    cut.mkdir(mode=0o700)
    for name in ("journal.db", "journal.db-wal", HEAD_FILE):
        (cut / name).write_bytes((data_dir / name).read_bytes())
        (cut / name).chmod(0o600)
    with (cut / "journal.db-wal").open("r+b") as log:
        log.truncate((cut / "journal.db-wal").stat().st_size - tail_bytes)


def test_a_log_that_lost_its_end_behind_a_checkpoint_is_refused(tmp_path: Path) -> None:
    """Its pages and those of the database are of different times. A reader keeps the log; no fact need be missing."""
    data_dir = tmp_path / "data"
    with open_journal(data_dir) as journal, journal.transaction() as db:
        db.execute("SELECT count(*) FROM event").fetchone()
        for name in ("s1", "s2", "s3"):
            journal.append([session(name)]).result()
        journal.run(lambda _: None, scrub=True).result()  # a checkpoint, as far as the reader allows
        assert not journal.scrubbed
        witness = headfile.read(data_dir)
        assert witness is not None and witness.log.pages > 3
        assert (witness.head.seq, witness.log) == (3, journal._wal.extent)
        _killed(data_dir, tmp_path / "whole", 0)
        _killed(data_dir, tmp_path / "cut", 1)
    Journal.open(tmp_path / "whole").close()
    for look in (Journal.open, quick.prove):
        with pytest.raises(JournalFault, match=r"the end of its log is missing: that has \d+ pages, and journal\.head"):
            look(tmp_path / "cut")
    fault = verify(tmp_path / "cut").fault
    assert fault is not None and fault.where == "head" and "the end of its log is missing" in fault.reason
    done = salvage(tmp_path / "cut", tmp_path / "out")
    assert "facts 3 to 3 cannot be read" in done.reason and not done.whole


def test_a_log_that_was_begun_anew_is_none_that_was_cut(tmp_path: Path) -> None:
    with open_journal(tmp_path / "data") as journal:
        for _ in range(5):
            journal.append([session(f"s{journal.head}")]).result()
        journal.run(lambda _: None, scrub=True).result()
        assert journal.scrubbed
        journal.append([session("later")]).result()
        journal.run(lambda _: None).result()
        _killed(tmp_path / "data", tmp_path / "killed", 0)
    with Journal.open(tmp_path / "killed") as journal:
        assert journal.head == 6
    assert verify(tmp_path / "killed").clean
