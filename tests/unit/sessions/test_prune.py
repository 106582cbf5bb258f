"""O28: twelve sessions, and exactly those that a filter names go; what runs, is pinned or shared does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.journal.facts import START_US, accepted, failed, open_journal, session, whole_turn
from zjournal.errors import BadRequest
from zjournal.journal import removal
from zjournal.journal.compact import bytes_in_use
from zjournal.journal.events import Fact, RequestAccepted
from zjournal.journal.log import Journal
from zjournal.journal.verify import verify
from zjournal.sessions.operations import OPERATIONS, Chosen, Prune, run
from zjournal.sessions.prune import DELETE, FITS, KEEP, PINNED, RUNNING, Filters, plan

NAMES = [f"s{k:02d}" for k in range(12)]
EMPTY, PINNED_ONE, OPEN, BRANCHED, OTHER_MODEL = "s03", "s05", "s07", "s01", "s08"


def _of_model(facts: list[Fact], model: str) -> list[Fact]:
    import msgspec

    first, *rest = facts
    assert isinstance(first.event, RequestAccepted)
    return [msgspec.structs.replace(first, event=msgspec.structs.replace(first.event, model=model)), *rest]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    """Twelve sessions, the lower the number the older; s02 branches off s01."""
    with open_journal(tmp_path / "data") as opened:
        for k, name in enumerate(NAMES):
            opened.append([session(name)]).result()
            prompt = f"the prompt of {name} ".encode() * (k + 1)
            more = {"session": name, "record": prompt}
            if name == EMPTY:
                opened.append([*accepted(opened, f"r{k}", **more), failed(f"r{k}")]).result()
            elif name == OPEN:
                opened.append(accepted(opened, f"r{k}", **more)).result()
            elif name == "s02":
                opened.append(whole_turn(opened, f"r{k}", parent="r1", **more)).result()
            elif name == OTHER_MODEL:
                opened.append(_of_model(whole_turn(opened, f"r{k}", **more), "other")).result()
            else:
                opened.append(whole_turn(opened, f"r{k}", **more)).result()
        removal.pin(opened, PINNED_ONE, True)
        yield opened
        assert verify(tmp_path / "data").fault is None


def _last_us(journal: Journal, name: str) -> int:
    found = journal.session(name)
    assert found is not None
    return found.last_us


def _actions(journal: Journal, filters: Filters) -> dict[str, str]:
    return {row.session: row.reason or row.action for row in plan(journal, filters).rows}


def test_a_filter_takes_what_it_names_and_nothing_else(journal: Journal) -> None:
    every = dict.fromkeys(NAMES, DELETE) | {PINNED_ONE: PINNED, OPEN: RUNNING}
    cutoff = _last_us(journal, "s06")
    cases = [
        (Filters(before_us=1 << 62), every),
        (Filters(before_us=cutoff), {name: every[name] for name in NAMES[:6]}),
        (Filters(before_us=START_US), {}),
        (Filters(model="smollm2"), {name: every[name] for name in NAMES if name != OTHER_MODEL}),
        (Filters(model="other"), {OTHER_MODEL: DELETE}),
        (Filters(model="oth"), {}),
        (Filters(ids=(BRANCHED, PINNED_ONE)), {BRANCHED: DELETE, PINNED_ONE: PINNED}),
        (Filters(empty=True), {EMPTY: DELETE, OPEN: RUNNING}),
        (Filters(empty=True, before_us=cutoff), {EMPTY: DELETE}),
    ]
    head = journal.head
    for filters, wanted in cases:
        assert _actions(journal, filters) == wanted, filters
    assert journal.head == head


def test_the_plan_says_to_the_byte_what_goes(journal: Journal) -> None:
    found = plan(journal, Filters(before_us=1 << 62))
    assert [row.session for row in found.rows] == NAMES
    assert all(row.bytes > 0 for row in found.chosen)
    chosen = Prune(tuple(Chosen(row.session, row.last_seq) for row in found.chosen))
    done = OPERATIONS["sessions.prune"].function(journal, chosen)
    assert (done.sessions, done.kept, done.left) == (10, 0, ())
    assert done.bytes == found.bytes
    assert [row.session for row in journal.sessions()] == [OPEN, PINNED_ONE]


def test_the_plan_knows_that_packed_facts_give_back_little(journal: Journal) -> None:
    """A digest takes the place of each payload; what counts is by how much the segments become shorter."""
    loose = plan(journal, Filters(before_us=1 << 62)).bytes
    while journal.seal():
        pass
    found = plan(journal, Filters(before_us=1 << 62))
    assert found.bytes < loose
    chosen = Prune(tuple(Chosen(row.session, row.last_seq) for row in found.chosen))
    done = OPERATIONS["sessions.prune"].function(journal, chosen)
    assert abs(done.bytes - found.bytes) < 0.2 * found.bytes


def test_a_shared_parent_is_not_counted_and_keeps_its_rows(journal: Journal) -> None:
    (row,) = plan(journal, Filters(ids=(BRANCHED,))).rows
    assert (row.action, row.bytes) == (DELETE, 0)
    both = plan(journal, Filters(ids=(BRANCHED, "s02")))
    assert all(row.bytes > 0 for row in both.rows)
    done = OPERATIONS["sessions.prune"].function(journal, Prune((Chosen(row.session, row.last_seq),)))
    assert (done.sessions, done.kept, done.bytes) == (1, 1, 0)
    turn = journal.turn("r1")
    assert turn is not None and (turn.status, turn.erased) == ("deleted", False)


def test_max_bytes_takes_the_oldest_until_it_fits(journal: Journal) -> None:
    with journal.transaction() as db:
        held = bytes_in_use(db)
    everything = plan(journal, Filters(before_us=1 << 62))
    first_two = sum(row.bytes for row in everything.chosen[:2])
    found = plan(journal, Filters(max_bytes=held - first_two))
    assert [row.session for row in found.chosen] == [row.session for row in everything.chosen[:2]]
    assert {row.reason for row in found.rows if row.action == KEEP} == {FITS, PINNED, RUNNING}
    assert plan(journal, Filters(max_bytes=held)).chosen == ()
    assert len(plan(journal, Filters(max_bytes=0)).chosen) == 10


def test_what_was_used_since_the_plan_stays(journal: Journal) -> None:
    found = plan(journal, Filters(ids=("s09", "s10")))
    journal.append(whole_turn(journal, "late", session="s09", parent="r9")).result()
    done = OPERATIONS["sessions.prune"].function(
        journal, Prune(tuple(Chosen(row.session, row.last_seq) for row in found.chosen))
    )
    assert (done.sessions, [left.session for left in done.left]) == (1, ["s09"])


def test_an_operation_is_a_fact_only_if_it_was_done(journal: Journal) -> None:
    import msgspec

    head = journal.head
    with pytest.raises(BadRequest, match="pinned"):
        run(journal, "sessions.delete", msgspec.msgpack.encode({"session": PINNED_ONE}))
    with pytest.raises(BadRequest, match="no operation"):
        run(journal, "sessions.dream", b"\x80")
    with pytest.raises(BadRequest, match="cannot be read"):
        run(journal, "sessions.delete", msgspec.msgpack.encode({"session": 7}))
    assert journal.head == head
    run(journal, "sessions.delete", msgspec.msgpack.encode({"session": "s11"}))
    assert journal.read(journal.head - 1)[0].event.action == "sessions.delete"  # type: ignore[union-attr]
