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


def _mixed(chance: random.Random) -> list[Bare]:
    """Facts of three responses, some without payloads, some whose payload is gone."""
    names = [b"resp_" + chance.randbytes(16).hex().encode() for _ in range(3)]
    salts: dict[bytes, bytes] = {}
    facts: list[Bare] = []
    for k in range(12):
        name = chance.choice(names)
        payload, sha = None, None
        if k % 3 == 0:
            salt = salts.get(name) or chance.randbytes(chain.SALT_BYTES)
            salts[name] = chain.next_salt(salt)
            payload = salt + chance.randbytes(4 * chance.randint(1, 3))
        elif k % 5 == 0:
            sha = chance.randbytes(32)
        body = b"x" + name + b"y" * chance.randint(0, 5) + (name if k % 4 == 0 else b"")
        facts.append(Bare(k + 1, 1_000 + k, "t" if k % 2 else "u.v", 1, body, payload, sha))
    return facts


def test_a_flipped_bit_gives_an_error_or_the_same_facts() -> None:
    """Every single bit of a segment as it is stored."""
    facts = _mixed(random.Random(5))
    packed = segments.pack(facts)
    same = 0
    for bit in range(8 * len(packed)):
        changed = bytearray(packed)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            assert segments.unpack(bytes(changed), 1, len(facts)) == facts
            same += 1
        except ValueError:
            continue
    assert same < 8  # bits of the frame's header that mean nothing


_PLAIN = zstandard.ZstdDecompressor().decompress(segments.pack(_mixed(random.Random(5))))
_NUMBERS = st.sampled_from([-(1 << 63), -1, 0, 1, 255, 1 << 31, 1 << 32, 1 << 62, (1 << 63) - 1, (1 << 64) - 1])


def _change(value: object, data: st.DataObject) -> object:
    """One thing in a column, wherever it stands, becomes another one."""
    if isinstance(value, list) and value:
        at = data.draw(st.integers(0, len(value) - 1))
        return [*value[:at], _change(value[at], data), *value[at + 1 :]]
    if isinstance(value, int):
        return data.draw(_NUMBERS)
    if isinstance(value, bytes):
        start = data.draw(st.integers(0, len(value)))
        return value[:start] + data.draw(st.binary(max_size=3)) + value[data.draw(st.integers(start, len(value))) :]
    return data.draw(st.text(max_size=9) | st.sampled_from(["t.4294967296", "t.-1", "t." + "9" * 30, "t.1.1"]))


@given(st.data())
def test_columns_that_lie_give_an_error_or_facts_that_the_link_refutes(data: st.DataObject) -> None:
    """Behind a checksum that is right: nothing but ValueError comes out, and no fact that is not one."""
    facts = _mixed(random.Random(5))
    columns = msgspec.msgpack.decode(_PLAIN)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(columns) - 1))
        columns[at] = _change(columns[at], data)
    packed = zstandard.ZstdCompressor().compress(msgspec.msgpack.encode(columns))
    right = segments.linked(facts, b"l" * 32)[-1][-1]
    try:
        told = segments.unpack(packed, 1, len(facts))
    except ValueError:
        return
    assert [fact.seq for fact in told] == list(range(1, len(facts) + 1))
    link = segments.linked(told, b"l" * 32)[-1][-1]
    same = [(f.tag, f.version, f.time, f.body, f.payload) for f in told] == [
        (f.tag, f.version, f.time, f.body, f.payload) for f in facts
    ]
    assert same or link != right


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
    assert [fact.payload for fact in journal.read() if fact.payload != b""][-1] is None
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


def test_without_silence_facts_are_packed_apart_and_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit waits for it, so it takes a small part of the time, and more of it the more facts are waiting."""
    monkeypatch.setattr(log, "SEAL_FACTS", 5)
    monkeypatch.setattr(log, "SEAL_WAITING_MAX", 10)
    monkeypatch.setattr(log, "SEAL_CLOSING_FACTS", 1 << 30)
    monkeypatch.setattr(log, "IDLE_S", 3600.0)  # there is no silence
    with open_journal(tmp_path / "data") as journal:
        journal.append([session("s1"), *accepted(journal, "r1")]).result()
        sealed = []
        for number in range(600):
            journal.append([sampled("r1", number)]).result()
            sealed.append(_lying(journal)[0])
    counts = [len(segments) for segments in sealed]
    assert counts[0] == 0
    assert counts[-1] > 1
    assert {last - first + 1 for first, last in sealed[-1]} == {5}, "the last one is not filled up"
    assert counts[-1] * 5 < 300, "most wait: by the test's clock packing takes as long as an append"
    gaps = [counts.index(count + 1) - counts.index(count) for count in range(1, counts[-1])]
    assert gaps[0] > gaps[-1], "the rest becomes shorter"
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
    with pytest.raises(JournalFault, match="cannot be packed: fact 3: its link does not follow"):
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
