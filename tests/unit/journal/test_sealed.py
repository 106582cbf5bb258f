"""Journals whose facts are packed: whatever reads, copies, proves or saves them works on segments as on rows."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.journal.facts import finished, open_journal, sampled, session, whole_turn
from zjournal.errors import JournalFault, JournalUnavailable
from zjournal.journal import backup, log, quick, retention, segments, stats
from zjournal.journal.events import Recorded
from zjournal.journal.log import Journal
from zjournal.journal.reader import Reader
from zjournal.journal.salvage import salvage
from zjournal.journal.verify import verify

SEGMENT_FACTS = 9
TURNS = 6


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Turns in three segments and some rows; one of them erased in its segment, and records stored as deltas."""
    path = tmp_path_factory.mktemp("original") / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "FACTS_MAX", SEGMENT_FACTS)
        patch.setattr(log, "SEAL_CLOSING_FACTS", 1 << 30)
        with open_journal(path) as journal:
            journal.append([session("s1"), session("s2")]).result()
            journal.append([*whole_turn(journal, "leaf"), *whole_turn(journal, "other", session="s2")]).result()
            base = b""
            for turn in range(TURNS):
                name, parent = f"r{turn}", f"r{turn - 1}" if turn else ""
                record = b"".join(b"what turn %d said, and more of it; " % k * 9 for k in range(turn + 1))
                facts = whole_turn(journal, name, parent=parent, record=record, base=base)
                base = journal.digest("local", record)
                journal.append(facts).result()
            for _ in range(3):
                assert journal.seal(SEGMENT_FACTS) == SEGMENT_FACTS
            for name in ("leaf", f"r{TURNS - 1}"):
                assert retention.delete(journal, "local", name).result()
    return path


def _rows(journal: Reader) -> int:
    with journal.transaction() as db:
        return db.execute("SELECT count(*) FROM event").fetchone()[0]


@pytest.fixture
def data_dir(tmp_path: Path, original: Path) -> Path:
    return shutil.copytree(original, tmp_path / "data")


def _facts(data_dir: Path) -> list[Recorded]:
    with Reader.open(data_dir) as reader:
        return reader.read()


def _spans(data_dir: Path) -> list[tuple[int, int, int]]:
    with Reader.open(data_dir) as reader, reader.transaction() as db:
        return db.execute("SELECT first, last, length(data) FROM segment ORDER BY last").fetchall()


def _flip(data_dir: Path, last: int, bit: int) -> None:
    """Turns one bit of a segment's data over, in the database's file."""
    db = sqlite3.connect(data_dir / "journal.db", isolation_level=None)
    (data,) = db.execute("SELECT data FROM segment WHERE last = ?", (last,)).fetchone()
    changed = bytearray(data)
    changed[bit // 8 % len(data)] ^= 1 << bit % 8
    db.execute("UPDATE segment SET data = ? WHERE last = ?", (bytes(changed), last))
    db.close()


def test_the_journal_of_these_tests_is_what_they_need(original: Path) -> None:
    spans = _spans(original)
    assert len(spans) >= 3
    assert spans[0][0] == 1 and spans[-1][1] < len(_facts(original))
    erased = [fact.seq for fact in _facts(original) if fact.payload is None]
    assert erased and erased[0] <= spans[-1][1]
    assert verify(original).clean
    quick.prove(original)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(segment=st.integers(0, 2), bit=st.integers(0, 8 * 4_096))
def test_a_flipped_bit_is_named_and_what_is_before_it_is_saved(
    original: Path, tmp_path_factory: pytest.TempPathFactory, segment: int, bit: int
) -> None:
    data_dir = shutil.copytree(original, tmp_path_factory.mktemp("flipped") / "data")
    right = _facts(data_dir)
    first, last, _ = _spans(data_dir)[segment]
    _flip(data_dir, last, bit)
    try:
        told = _facts(data_dir)
    except JournalFault as fault:
        assert f"fact {first} cannot be read" in fault.message
        assert "zj journal verify" in fault.message
    else:  # a bit that means nothing: the same facts, or none
        assert told == right
        assert verify(data_dir).clean
        return
    broken = verify(data_dir).fault
    assert broken is not None and (broken.where, broken.seq) == ("event", first)
    assert "the segment that begins with it is damaged" in broken.reason
    with pytest.raises(JournalFault, match=rf"chain is broken at fact {first}: the segment"):
        quick.prove(data_dir)
    done = salvage(data_dir, data_dir.parent / "out")
    assert verify(data_dir.parent / "out").clean
    saved = _facts(data_dir.parent / "out")
    assert done.facts == first - 1 and not done.whole
    assert [fact.event for fact in saved[: first - 1]] == [fact.event for fact in right[: first - 1]]
    for fact, was in zip(saved[: first - 1], right, strict=False):
        assert fact.payload in (was.payload, None)
    assert f"fact {first}" in done.reason
    lost = [seq for part in done.lost_facts for seq in range(part.first, part.last + 1)]
    assert set(range(last + 1, len(right) + 1)) <= set(lost)


@pytest.mark.parametrize("segment", [0, 1, 2])
def test_rows_behind_a_lost_segment_are_listed_and_not_copied(data_dir: Path, segment: int) -> None:
    first, last, _ = _spans(data_dir)[segment]
    right = _facts(data_dir)
    db = sqlite3.connect(data_dir / "journal.db", isolation_level=None)
    db.execute("DELETE FROM segment WHERE last = ?", (last,))
    db.close()
    assert not verify(data_dir).clean
    done = salvage(data_dir, data_dir.parent / "out")
    assert verify(data_dir.parent / "out").clean
    assert done.facts == first - 1
    assert done.lost_facts[-1].last == len(right) and done.lost_facts[-1].intact
    assert set(done.lost_turns) <= {f"r{turn}" for turn in range(TURNS)} | {"leaf", "other"}


def test_a_whole_journal_is_salvaged_whole_and_goes_on(data_dir: Path) -> None:
    right = _facts(data_dir)
    done = salvage(data_dir, data_dir.parent / "out")
    assert done.whole and done.facts == len(right)
    assert _facts(data_dir.parent / "out") == right
    with Journal.open(data_dir.parent / "out") as journal:
        while journal.seal():
            pass
        assert journal.read() == right
        assert _rows(journal) == 0
    assert verify(data_dir.parent / "out").clean


def test_damage_in_an_early_segment_is_not_a_starts_business(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start reads the end; the whole proof is `verify`. What is read of the damage is refused, and not served."""
    monkeypatch.setattr(quick, "OPEN_FACTS", 4)
    monkeypatch.setattr(quick.checked_head, "__defaults__", (4,))
    _flip(data_dir, SEGMENT_FACTS, 8 * 40)
    assert not verify(data_dir).clean
    with Journal.open(data_dir) as journal:
        with pytest.raises(JournalFault, match="fact 1 cannot be read: the segment that begins with it is damaged"):
            journal.read_response("other")
        journal.append([session("s9")]).result()
        with pytest.raises(JournalFault, match="fact 1 cannot be read"):
            stats.stats(journal)


def test_a_damaged_last_segment_is_not_filled_up_nor_erased_in(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be packed stays in rows, and what cannot be erased is not said to be."""
    monkeypatch.setattr(log, "SEAL_CLOSING_FACTS", 1 << 30)
    with Journal.open(data_dir) as journal:
        cut = "UPDATE segment SET data = substr(data, 1, 30)"
        journal.run(lambda tx: tx.db.execute(cut)).result()
        before = _rows(journal)
        with pytest.raises(JournalFault, match=r"fact 19 cannot be read: the segment .* is damaged"):
            journal.seal()
        assert _rows(journal) == before
        with pytest.raises(JournalFault, match=r"fact 1 cannot be read: the segment .* is damaged"):
            retention.erase(journal, "other", "deleted").result()
        journal.append([session("s9")]).result()  # the writer goes on
        assert journal.session("s9") is not None
    broken = verify(data_dir).fault
    assert broken is not None and broken.seq == 1


def test_a_backup_holds_the_segments(data_dir: Path, tmp_path: Path) -> None:
    with Journal.open(data_dir) as journal:
        copied = backup.backup(journal, tmp_path / "backup.db")
        assert copied.facts == journal.head
        right = journal.read()
    home = tmp_path / "restored"
    home.mkdir(mode=0o700)
    shutil.copy(tmp_path / "backup.db", home / "journal.db")
    (home / "journal.db").chmod(0o600)
    assert verify(home).clean
    assert _facts(home) == right
    assert len(_spans(home)) >= 3


@pytest.mark.parametrize("page", [2_000, 5])
def test_every_byte_of_a_segment_is_somebodys(data_dir: Path, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "PAGE_ROWS", page)
    with Reader.open(data_dir) as reader:
        found = stats.stats(reader)
        with reader.transaction() as db:
            packed = db.execute("SELECT sum(length(data)) FROM segment").fetchone()[0]
            rows = db.execute("SELECT sum(length(body)), count(*) FROM event").fetchone()
    facts = len(_facts(data_dir))
    assert sum(kind.rows for kind in found.facts.values()) == facts
    assert found.rows["event"] == rows[1] and found.rows["segment"] == len(_spans(data_dir))
    told = sum(kind.bytes for kind in found.facts.values())
    assert packed + rows[0] < told < packed + rows[0] + 400 * rows[1]


def test_a_segment_of_other_limits_is_filled_up_and_erased_in(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later version may have smaller segments: those that are there are cut, with their links."""
    monkeypatch.setattr(segments, "FACTS_MAX", 4)
    monkeypatch.setattr(log, "SEAL_CLOSING_FACTS", 1 << 30)
    with Journal.open(data_dir) as journal:
        right = journal.read()
        assert retention.delete(journal, "local", f"r{TURNS - 2}").result()  # packs a segment of more than four again
        right = journal.read()
        while journal.seal():
            pass
        assert journal.read() == right
    assert verify(data_dir).clean
    assert [last - first + 1 for first, last, _ in _spans(data_dir)][-3:-1] == [4, 4]


def test_a_clock_that_was_set_back_does_not_stop_the_packing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "SEAL_WAITING_MAX", 4)
    monkeypatch.setattr(log, "SEAL_FACTS", 3)
    monkeypatch.setattr(log, "SEAL_CLOSING_FACTS", 1 << 30)
    now = [2_000_000_000_000_000]
    with Journal.open(tmp_path / "data", clock=lambda: now[0]) as journal:
        journal.tenant("local")
        journal.append([session("s1"), *whole_turn(journal, "r1")]).result()
        now[0] -= 86_400_000_000
        for k in range(4):
            journal.append([sampled("r1", k), finished("r1")]).result()
        journal.run(lambda tx: None).result()  # what comes after the commit before is done
        assert _rows(journal) < 8
    assert verify(tmp_path / "data").clean


def test_nobody_waits_for_a_writer_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug of ours ends the writer: what waits and what comes later is told so, and the journal is whole."""
    journal = open_journal(tmp_path / "data")
    journal.append([session("s1")]).result()

    def fails(now: int, idle: bool = False) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(journal._wal, "upkeep", fails)
    assert journal.append([session("s2")]).result() == 2  # it was durable before
    journal._writer.join()
    with pytest.raises(JournalUnavailable, match="writer has failed; restart"):
        journal.append([session("s3")]).result()
    journal.close()
    assert [fact.seq for fact in _facts(tmp_path / "data")] == [1, 2]
    assert verify(tmp_path / "data").clean
