"""Properties of the journal: the fold does not depend on grouping, erasure keeps the proof, any damage is named."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.unit.journal.facts import (
    accepted,
    failed,
    finished,
    matched,
    open_journal,
    sampled,
    session,
    whole_turn,
)
from zjournal.journal import retention
from zjournal.journal.events import Fact, ResponseDeleted
from zjournal.journal.log import Journal
from zjournal.journal.projections import effects
from zjournal.journal.verify import verify

NAMES = ("r0", "r1", "r2", "r3")

# A step is something that happens to one of four responses, in any order, sensible or not.
steps = st.lists(
    st.tuples(
        st.sampled_from(["accept", "match", "sample", "finish", "cancel", "fail", "delete", "erase"]),
        st.integers(0, 3),
        st.integers(0, 4),
    ),
    max_size=40,
)
cuts = st.lists(st.integers(1, 7), min_size=1, max_size=8)


def _fact_of(step: str, name: str, number: int) -> Fact | None:
    match step:
        case "match":
            return matched(name, number)
        case "sample":
            return sampled(name, number, number + 1)
        case "finish":
            return finished(name, "stop" if number else "length", number, bytes([number]))
        case "cancel":
            return finished(name, "cancelled", number)
        case "fail":
            return failed(name)
        case "delete":
            return Fact(ResponseDeleted(tenant="local", response=name))
    return None


def _play(journal: Journal, script: list[tuple[str, int, int]], sizes: list[int]) -> None:
    """Appends the script's facts in calls of the given sizes; erasures run between calls."""
    seen: set[str] = set()
    waiting: list[Fact] = [session("s0"), session("s1")]
    calls = 0
    for step, which, number in script:
        name = NAMES[which]
        if step == "accept" and name not in seen:
            seen.add(name)
            parent = NAMES[number] if number < 4 and NAMES[number] in seen and number != which else ""
            more = {"session": f"s{number % 2}", "parent": parent, "stored": number != 3}
            waiting += accepted(journal, name, **more)  # type: ignore[arg-type]
        elif step == "erase":
            if waiting:
                journal.append(waiting)
            waiting = []
            retention.erase(journal, name, retention.CAUSE_DELETED).result()
        elif (fact := _fact_of(step, name, number)) is not None:
            waiting.append(fact)
        if len(waiting) >= sizes[calls % len(sizes)]:
            journal.append(waiting)
            waiting = []
            calls += 1
    if waiting:
        journal.append(waiting)
    journal.run(lambda _: None).result()  # by then all of them are committed


def _rows(journal: Journal) -> tuple[list, list]:
    with journal.transaction() as db:
        turns = db.execute("SELECT * FROM turn ORDER BY accepted_seq").fetchall()
        return turns, db.execute("SELECT * FROM session ORDER BY opened_seq").fetchall()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(script=steps, sizes=cuts)
@example(script=[("accept", 0, 0), ("finish", 0, 0), ("erase", 0, 0)], sizes=[1])
def test_rebuild_gives_the_same_rows_and_verify_stays_clean(
    script: list[tuple[str, int, int]], sizes: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder, open_journal(Path(folder) / "data") as journal:
        _play(journal, script, sizes)
        before = _rows(journal)
        assert verify(Path(folder) / "data").fault is None
        journal.rebuild()
        assert _rows(journal) == before
        # One by one, which is what the fold means, gives what the groups gave.
        fold = sqlite3.connect(":memory:")
        with journal.transaction() as db:
            own = "sql IS NOT NULL AND name NOT LIKE 'sqlite_%'"
            for (text,) in db.execute(f"SELECT sql FROM sqlite_schema WHERE {own} ORDER BY type DESC"):  # tables first
                fold.execute(text)
        for fact in journal.read():
            for sql, values in effects([fact]):
                fold.execute(sql, values)
        assert fold.execute("SELECT * FROM turn ORDER BY accepted_seq").fetchall() == before[0]
        assert fold.execute("SELECT * FROM session ORDER BY opened_seq").fetchall() == before[1]
        fold.close()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    parents=st.lists(st.integers(-1, 6), min_size=1, max_size=7),
    order=st.permutations(range(7)),
)
def test_whatever_the_tree_deleting_all_of_it_leaves_nothing(parents: list[int], order: list[int]) -> None:
    """And on the way no surviving turn loses anything that its prompt is built on."""
    with tempfile.TemporaryDirectory() as folder, open_journal(Path(folder) / "data") as journal:
        journal.append([session("s1")])
        up = {k: parent if 0 <= parent < k else -1 for k, parent in enumerate(parents)}
        for k, parent in up.items():
            facts = whole_turn(journal, f"t{k}", parent=f"t{parent}" if parent >= 0 else "", record=b"p%d" % k)
            journal.append(facts).result()
        alive = set(up)
        for k in (k for k in order if k in up):
            assert retention.delete(journal, "local", f"t{k}").result()
            alive.discard(k)
            needed = set()
            for at in alive:
                while at >= 0:
                    needed.add(at)
                    at = up[at]
            for at in up:
                turn = journal.turn(f"t{at}")
                assert (turn is None) == (at not in needed), "a deleted turn has a row until it is erased"
                if at in needed:
                    record = b"p%d" % at
                    assert journal.content("local", journal.digest("local", record)) == record
        with journal.transaction() as db:
            assert db.execute("SELECT count(*) FROM content").fetchone() == (0,)
            assert db.execute("SELECT count(payload) FROM event").fetchone() == (0,)
        assert verify(Path(folder) / "data").fault is None


COLUMNS = [
    *[("event", name) for name in ("time", "tag", "version", "body", "payload", "payload_sha", "link")],
    *[("content", name) for name in ("digest", "tenant", "size", "refs", "data")],
    *[("tenant", name) for name in ("id", "name", "secret", "seal")],
    ("meta", "value"),
    *[("turn", name) for name in ("response", "parent", "status", "prompt", "last_seq", "ttft_us", "history")],
    *[("session", name) for name in ("session", "tenant", "key", "turns", "last_us")],
]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal in which every kind of row stands."""
    path = tmp_path_factory.mktemp("original") / "data"
    with open_journal(path) as journal:
        journal.append([session("s1", key=b"k"), *whole_turn(journal, "r1"), session("s2")]).result()
        journal.append(whole_turn(journal, "r2", parent="r1")).result()
        retention.delete(journal, "local", "r2").result()
        journal.append([*accepted(journal, "r3", session="s2", parent="r1"), sampled("r3", 0)]).result()
    assert verify(path).clean
    return path


def _damaged(value: object, where: int) -> object:
    """The value with one byte inverted; a number with one bit."""
    if isinstance(value, int):
        return value ^ (1 << (where % 40))
    data = bytearray(value.encode() if isinstance(value, str) else value)  # type: ignore[arg-type]
    data[where % len(data)] ^= 0xFF if isinstance(value, bytes) else 0x10
    return data.decode() if isinstance(value, str) else bytes(data)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(column=st.sampled_from(COLUMNS), row=st.integers(0, 99), where=st.integers(0, 9_999))
def test_damage_to_any_byte_of_any_column_is_named(
    original: Path, column: tuple[str, str], row: int, where: int
) -> None:
    table, name = column
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(shutil.copytree(original, Path(folder) / "data"))
        db = sqlite3.connect(data_dir / "journal.db", isolation_level=None)
        key = db.execute(f"SELECT name FROM pragma_table_info('{table}') WHERE pk = 1").fetchone()[0]
        rows = db.execute(f"SELECT {key}, {name} FROM {table} WHERE length({name}) > 0 ORDER BY 1").fetchall()
        at, value = rows[row % len(rows)]
        db.execute(f"UPDATE {table} SET {name} = ? WHERE {key} = ?", (_damaged(value, where), at))
        db.close()
        fault = verify(data_dir).fault
        assert fault is not None, (table, name, at)
        if table == "event":
            assert (fault.where, fault.seq) == ("event", at)
