"""Segments: facts that are packed are the facts that they were, wherever they are read."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.journal.facts import accepted, finished, open_journal, sampled, session, ticking, whole_turn
from zjournal.errors import JournalFault
from zjournal.journal import chain, log, retention, rows, segments
from zjournal.journal.chain import Head
from zjournal.journal.events import Fact, ServerStarted, ServerStopped
from zjournal.journal.log import Journal
from zjournal.journal.segments import Bare
from zjournal.journal.verify import verify

NAME = b"resp_" + b"0123456789abcdef" * 2
bodies = st.lists(st.sampled_from([NAME, b"chatcmpl-" + NAME[5:], b"\x00", b"body", NAME[:-1]]), max_size=4).map(
    b"".join
)
payloads = st.none() | st.binary(min_size=17, max_size=40)
bare = st.tuples(
    st.integers(0, 1 << 62), st.sampled_from(["a", "b.c"]), st.integers(1, 3), bodies, payloads, st.booleans()
)


@given(st.lists(bare, min_size=1, max_size=20), st.integers(1, 1 << 40))
def test_any_facts_come_back(made: list[tuple], first: int) -> None:
    facts = []
    for k, (time, tag, version, body, payload, gone) in enumerate(made):
        sha = b"s" * 32 if gone and payload is None else None
        facts.append(Bare(first + k, time, tag, version, body, payload, sha))
    assert segments.unpack(segments.pack(facts), first, first + len(facts) - 1) == facts


def test_salts_that_follow_from_each_other_are_not_stored() -> None:
    chance = random.Random(1)

    def facts(chained: bool) -> list[Bare]:
        salt, made = chance.randbytes(16), []
        for k in range(100):
            made.append(Bare(k + 1, k, "t", 1, NAME, salt + b"1234", None))
            salt = chain.next_salt(salt) if chained else chance.randbytes(16)
        return made

    assert len(segments.pack(facts(True))) + 99 * 16 < len(segments.pack(facts(False))) + 100


@pytest.mark.parametrize("column", range(len(segments._Packed.__struct_fields__)))
def test_a_damaged_segment_is_refused(column: int) -> None:
    facts = [Bare(k + 1, k, "t", 1, NAME + b"x", b"s" * 16 + b"12\0\0", None) for k in range(3)]
    facts.append(Bare(4, 4, "t", 1, b"", None, b"g" * 32))
    columns = msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(segments.pack(facts)))
    value = columns[column]
    empty = 9 if isinstance(value, int) else type(value)()
    if value == empty:
        columns[column] = b"\x01" * 8  # where nothing belongs
    else:
        columns[column] = empty
    packed = zstandard.ZstdCompressor().compress(msgspec.msgpack.encode(columns))
    with pytest.raises(ValueError, match=r"fit|hold|read"):
        segments.unpack(packed, 1, 4)
    with pytest.raises(ValueError, match="does not hold"):
        segments.unpack(segments.pack(facts), 1, 5)
    with pytest.raises(ValueError, match="cannot be read"):
        segments.unpack(segments.pack(facts)[:-3], 1, 4)


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Journal:
    monkeypatch.setattr(segments, "FACTS_MAX", 7)
    monkeypatch.setattr(log, "SEAL_FACTS", 5)
    monkeypatch.setattr(log, "SEAL_CLOSING_FACTS", 1 << 30)
    journal = open_journal(tmp_path / "data")
    journal.append([session("s1"), *whole_turn(journal, "r1"), session("s2"), Fact(ServerStarted(version="1", pid=7))])
    journal.append(whole_turn(journal, "r2", parent="r1")).result()
    return journal


def _lying(journal: Journal) -> tuple[list[tuple[int, int]], int]:
    with journal.transaction() as db:
        packed = db.execute("SELECT first, last FROM segment ORDER BY last").fetchall()
        return packed, db.execute("SELECT count(*) FROM event").fetchone()[0]


def test_facts_are_the_same_wherever_they_lie(journal: Journal) -> None:
    def told() -> list[object]:
        facts = journal.read()
        parts = [journal.read(after, 2) for after in range(journal.head)]
        turns = [journal.read_response(name) for name in ("r1", "r2")]
        return [facts, parts, turns, journal.head, journal.engine_before(99), journal.unended_start()]

    before = told()
    assert len(before[0]) == 13  # type: ignore[arg-type]
    while journal.seal():
        assert told() == before
    assert _lying(journal) == ([(1, 7), (8, 13)], 0)
    assert verify(journal.path.parent).clean
    assert journal.rebuild() == 13
    assert told() == before
    journal.append([Fact(ServerStopped())]).result()
    assert journal.unended_start() is None
    journal.close()
    with Journal.open(journal.path.parent, clock=ticking()) as again:
        assert again.read()[:-1] == before[0]
    assert verify(journal.path.parent).clean


def test_a_journal_whose_facts_are_all_packed_goes_on(journal: Journal) -> None:
    while journal.seal():
        pass
    link = journal._head.link
    journal.close()
    with Journal.open(journal.path.parent, clock=ticking()) as again:
        assert (again.head, again._head.link) == (13, link)
        again.append(whole_turn(again, "r3", parent="r2")).result()
        assert [fact.seq for fact in again.read_response("r3")] == [14, 15, 16, 17, 18]
    assert verify(journal.path.parent).clean


def test_erasure_reaches_into_segments(journal: Journal) -> None:
    while journal.seal():
        pass
    assert retention.delete(journal, "local", "r2").result()
    assert [fact.payload for fact in journal.read_response("r2") if fact.payload != b""] == [None]
    assert [fact.payload for fact in journal.read_response("r1") if fact.payload] != []
    assert retention.delete(journal, "local", "r1").result()
    assert [fact.payload for fact in journal.read() if fact.payload != b""] == [None, None]
    assert verify(journal.path.parent).clean
    while journal.seal():
        pass
    assert verify(journal.path.parent).clean


def test_packing_waits_for_silence_and_goes_on_by_itself(tmp_path: Path) -> None:
    with open_journal(tmp_path / "data") as journal:
        journal.append([session("s1"), *accepted(journal, "r1")]).result()
        journal.append([sampled("r1", k) for k in range(log.SEAL_FACTS)]).result()
        journal._writer.join(0.01)  # gives it time; what it does meanwhile is its own choice
    with Journal.open(tmp_path / "data", clock=ticking()) as journal:
        (packed, left) = _lying(journal)
        assert packed[-1][1] > log.SEAL_FACTS - log.SEAL_CLOSING_FACTS
        assert packed[-1][1] + left == log.SEAL_FACTS + 3
        journal.append([finished("r1", output=log.SEAL_FACTS)]).result()
    assert verify(tmp_path / "data").clean


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("UPDATE segment SET data = zeroblob(99) WHERE first = 8", "event 8"),
        ("UPDATE segment SET data = (SELECT data FROM segment WHERE first = 1) WHERE first = 8", "event 8"),
        ("UPDATE segment SET link = zeroblob(32) WHERE first = 8", "event 8"),
        ("DELETE FROM segment WHERE first = 1", "event 8"),
        ("UPDATE segment SET first = 9 WHERE first = 8", "event 9"),
    ],
)
def test_damage_is_named_and_not_packed_again(journal: Journal, statement: str, said: str) -> None:
    while journal.seal():
        pass
    journal.close()
    db = sqlite3.connect(journal.path, isolation_level=None)
    db.execute(statement)
    db.close()
    fault = verify(journal.path.parent).fault
    assert fault is not None and f"{fault.where} {fault.seq}" == said
    with pytest.raises(JournalFault, match=r"fact 8|fact 9|chain is broken"):
        Journal.open(journal.path.parent, clock=ticking())


def test_a_broken_row_stays_where_it_is(journal: Journal) -> None:
    journal.run(lambda tx: tx.db.execute("UPDATE event SET time = time + 1 WHERE seq = 3")).result()
    with pytest.raises(ValueError, match="fact 3: its link does not follow"):
        journal.seal()
    assert _lying(journal) == ([], 13)
    journal._seal()  # the journal's own try is logged, and not repeated at once
    assert journal._unsealed == 0
    journal.close()


def test_links_are_found_wherever_they_lie(journal: Journal) -> None:
    with journal.transaction() as db:
        links = [row[0] for row in db.execute("SELECT link FROM event ORDER BY seq")]
    genesis = chain.genesis(journal.id, journal.secret)
    for _ in range(4):
        with journal.transaction() as db:
            assert [rows.link_at(db, seq, genesis) for seq in range(1, 15)] == [*links, None]
            for count in (1, 3, 20):
                head, last = rows.tail(db, count, genesis)
                assert isinstance(head, Head) and len(last) >= min(count, 13)
                assert [row[7] for row in last] == links[-len(last) :]
        journal.seal()
    journal.close()
