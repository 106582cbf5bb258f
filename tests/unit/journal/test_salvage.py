"""Salvage: whatever was damaged, the copy is a whole journal, holds what can be proved, and says what it lost."""

from __future__ import annotations

import random
import shutil
import sqlite3
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.property.test_journal import COLUMNS, _damaged
from tests.unit.journal.facts import open_journal, sampled, session, whole_turn
from zjournal.errors import JournalFault, OutputFault
from zjournal.journal.events import EngineStarted, Fact, Recorded
from zjournal.journal.log import Journal
from zjournal.journal.reader import Reader
from zjournal.journal.salvage import Salvaged, salvage
from zjournal.journal.verify import verify

VOCABULARY, TEMPLATE = b"words", b"a template"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine's start, two sessions, a turn and its child, and a third turn that still runs."""
    path = tmp_path_factory.mktemp("original") / "data"
    with open_journal(path) as journal:
        journal.tenant("server")
        started = EngineStarted(
            tenant="server",
            pid=1,
            model="m",
            fingerprint="f",
            kernels="k",
            context=1,
            kv_tokens=1,
            vocabulary=journal.digest("server", VOCABULARY),
            template=journal.digest("server", TEMPLATE),
        )
        journal.append([Fact(started, contents=(VOCABULARY, TEMPLATE))]).result()
        journal.append([session("s1", key=b"k"), *whole_turn(journal, "r1"), session("s2")]).result()
        journal.append(whole_turn(journal, "r2", parent="r1", record=b"another prompt")).result()
        journal.append([*whole_turn(journal, "r3", session="s2", record=b"a third")[:3], sampled("r3", 0)]).result()
    return path


@pytest.fixture
def data_dir(tmp_path: Path, original: Path) -> Path:
    return shutil.copytree(original, tmp_path / "data")


def _facts(data_dir: Path) -> list[Recorded]:
    with Reader.open(data_dir) as reader:
        return reader.read()


def _salvaged(data_dir: Path, *statements: str) -> Salvaged:
    db = sqlite3.connect(data_dir / "journal.db", isolation_level=None)
    for statement in statements:
        assert db.execute(statement).rowcount != 0, statement
    db.close()
    before = (data_dir / "journal.db").read_bytes()
    done = salvage(data_dir, data_dir.parent / "out")
    assert (data_dir / "journal.db").read_bytes() == before
    assert verify(data_dir.parent / "out").fault is None
    return done


def test_a_whole_journal_is_copied_whole(data_dir: Path) -> None:
    done = _salvaged(data_dir)
    assert done.whole
    assert (done.facts, done.turns, done.contents) == (len(_facts(data_dir)), 3, 5)
    out = Path(done.path)
    assert _facts(out) == _facts(data_dir)
    with Reader.open(data_dir) as old, Reader.open(out) as new:
        assert (old.id, old.secret, old.turn("r2"), old.sessions()) == (
            new.id,
            new.secret,
            new.turn("r2"),
            new.sessions(),
        )
        prompt = b"another prompt"
        assert new.content("local", new.digest("local", prompt)) == prompt


def test_it_can_be_served_and_goes_on(data_dir: Path) -> None:
    done = _salvaged(data_dir, "UPDATE event SET time = time - 1 WHERE seq = 9")
    out = Path(done.path)
    with Journal.open(out) as journal:
        journal.recover()
        journal.append([session("s9")]).result()
    assert verify(out).clean


def test_facts_behind_a_break_are_listed(data_dir: Path) -> None:
    done = _salvaged(data_dir, "UPDATE event SET time = time - 1 WHERE seq = 9")
    last = len(_facts(data_dir))
    assert done.facts == 8
    assert done.reason == "fact 9: its link does not follow from its columns and the link before it"
    # Fact 10 follows from the link that stands in fact 9, but nobody can prove that one.
    assert [(lost.first, lost.last, lost.intact) for lost in done.lost_facts] == [(9, last, True)]
    assert done.lost_turns == ("r2", "r3")
    assert _facts(Path(done.path)) == _facts(data_dir)[:8]


def test_a_missing_fact(data_dir: Path) -> None:
    done = _salvaged(data_dir, "DELETE FROM event WHERE seq = 9")
    assert done.facts == 8
    assert "facts 9 to 9 are missing" in done.reason
    assert (done.lost_facts[0].first, done.lost_facts[0].intact) == (10, True)


def test_a_lost_payload_erases_its_turn(data_dir: Path) -> None:
    done = _salvaged(data_dir, "UPDATE event SET payload = zeroblob(24) WHERE tag = 'tokens_sampled' AND seq < 8")
    assert not done.whole
    assert (done.reason, done.lost_facts) == ("", ())
    assert done.erased == ("r1",)
    with Reader.open(Path(done.path)) as reader:
        lost, kept = reader.turn("r1"), reader.turn("r2")
        assert lost is not None and kept is not None
        assert (lost.erased, kept.erased) == (True, False)
        last = reader.read(done.facts)[0].event
        assert (last.response, last.cause) == ("r1", "lost")  # type: ignore[union-attr]


def test_a_lost_content_erases_the_turns_that_hold_it(data_dir: Path) -> None:
    with Reader.open(data_dir) as reader:
        digest = reader.digest("local", b"another prompt")
    done = _salvaged(data_dir, f"UPDATE content SET data = zeroblob(9) WHERE digest = x'{digest.hex()}'")
    assert (done.erased, done.lost_contents) == (("r2",), 1)
    with pytest.raises(JournalFault, match="is not in the journal"), Reader.open(Path(done.path)) as reader:
        reader.content("local", digest)


def test_a_lost_tenant_takes_its_contents_and_not_its_facts(data_dir: Path) -> None:
    done = _salvaged(data_dir, "UPDATE tenant SET secret = zeroblob(32) WHERE id = 'local'")
    assert done.facts == len(_facts(data_dir))
    assert done.erased == ("r1", "r2", "r3")


def test_a_lost_vocabulary(data_dir: Path) -> None:
    done = _salvaged(data_dir, "DELETE FROM content WHERE tenant = 'server' AND size = 5")
    assert (done.erased, done.lost_contents) == (("",), 1)


def test_lost_projections_cost_nothing(data_dir: Path) -> None:
    done = _salvaged(data_dir, "DROP TABLE turn", "UPDATE session SET turns = 9")
    assert done.whole
    assert done.turns == 3


def test_a_cut_tail_is_said(data_dir: Path) -> None:
    last = len(_facts(data_dir))
    done = _salvaged(data_dir, f"DELETE FROM event WHERE seq > {last - 2}")
    assert done.facts == last - 2
    assert done.reason == f"facts {last - 1} to {last} cannot be read"
    assert [(lost.first, lost.last) for lost in done.lost_facts] == [(last - 1, last)]


def test_a_lost_identity_is_the_end(data_dir: Path) -> None:
    with pytest.raises(JournalFault, match="nothing in it can be proved; restore it from a backup"):
        _salvaged(data_dir, "DELETE FROM meta WHERE key = 'secret'")
    assert not (data_dir.parent / "out").exists()
    assert not (data_dir.parent / "out.part").exists()


def test_what_is_there_is_not_written_to(data_dir: Path) -> None:
    (data_dir.parent / "out").mkdir()
    (data_dir.parent / "out" / "mine").write_text("x")
    with pytest.raises(OutputFault, match="is not empty; name another"):
        _salvaged(data_dir)
    with pytest.raises(JournalFault, match="there is no journal here"):
        salvage(data_dir.parent / "nowhere", data_dir.parent / "other")


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    column=st.sampled_from([c for c in COLUMNS if c[0] != "meta"]), row=st.integers(0, 99), where=st.integers(0, 9_999)
)
def test_whatever_byte_is_damaged(original: Path, column: tuple[str, str], row: int, where: int) -> None:
    table, name = column
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(shutil.copytree(original, Path(folder) / "data"))
        db = sqlite3.connect(data_dir / "journal.db", isolation_level=None)
        key = db.execute(f"SELECT name FROM pragma_table_info('{table}') WHERE pk = 1").fetchone()[0]
        rows = db.execute(f"SELECT {key}, {name} FROM {table} WHERE length({name}) > 0 ORDER BY 1").fetchall()
        at, value = rows[row % len(rows)]
        db.execute(f"UPDATE {table} SET {name} = ? WHERE {key} = ?", (_damaged(value, where), at))
        db.close()
        out = Path(folder) / "out"
        done = salvage(data_dir, out)
        assert verify(out).fault is None
        assert done.whole == (table in ("turn", "session") or name == "refs" or (table, name) == ("content", "tenant"))
        copied = [(fact.seq, fact.time, fact.event) for fact in _facts(out)]
        assert copied[: done.facts] == [(fact.seq, fact.time, fact.event) for fact in _facts(original)][: done.facts]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(page=st.integers(1, 60), fill=st.integers(0, 255), size=st.integers(1, 4096))
def test_whatever_page_is_damaged(original: Path, page: int, fill: int, size: int) -> None:
    """A page that nobody can read costs what stood in it; only that of the schema or the identity costs everything."""
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(shutil.copytree(original, Path(folder) / "data"))
        data = bytearray((data_dir / "journal.db").read_bytes())
        at = page % (len(data) // 4096) * 4096
        data[at : at + size] = bytes([fill]) * size
        (data_dir / "journal.db").write_bytes(data)
        out = Path(folder) / "out"
        try:
            done = salvage(data_dir, out)
        except JournalFault as fault:
            assert str(data_dir) in fault.message
            assert not out.exists()
            return
        assert verify(out).fault is None
        copied = [(fact.seq, fact.time, fact.event) for fact in _facts(out)]
        assert copied[: done.facts] == [(fact.seq, fact.time, fact.event) for fact in _facts(original)][: done.facts]


def test_a_file_that_was_cut_off_gives_what_is_left(tmp_path: Path) -> None:
    """SQLite reads nothing of it any more; what stands in the pages that are there can be proved all the same."""
    data_dir = tmp_path / "data"
    with open_journal(data_dir) as journal:
        journal.append([session("s1"), *whole_turn(journal, "r1")]).result()
        for number in range(2, 100):
            record = random.Random(number).randbytes(3_000)
            journal.append(whole_turn(journal, f"r{number}", record=record)).result()
    file = data_dir / "journal.db"
    cut = file.read_bytes()[: -40 * 4096]
    file.write_bytes(cut)
    with pytest.raises(JournalFault, match=r"is damaged .*`zj journal salvage OUT`"):
        Journal.open(data_dir)
    done = salvage(data_dir, tmp_path / "out")
    assert (done.facts > 400, done.whole) == (True, False)
    assert verify(tmp_path / "out").clean
    assert file.read_bytes() == cut
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "out"]
