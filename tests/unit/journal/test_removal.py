"""Removing sessions and turns: all or nothing, never what runs or is pinned, and a shared parent keeps its content."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.journal.facts import accepted, finished, open_journal, session, whole_turn
from zjournal.errors import BadRequest, JournalFault, NotFound
from zjournal.journal import removal, retention
from zjournal.journal.events import PayloadErased, SessionDeleted
from zjournal.journal.log import Journal
from zjournal.journal.transaction import ParentErased
from zjournal.journal.verify import verify


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with open_journal(tmp_path / "data") as opened:
        for name in ("s1", "s2"):
            opened.append([session(name)]).result()
        yield opened
        assert verify(tmp_path / "data").fault is None


def _erased(journal: Journal) -> set[str]:
    return {fact.event.response for fact in journal.read() if isinstance(fact.event, PayloadErased)}


def _contents(journal: Journal) -> int:
    with journal.transaction() as db:
        return db.execute("SELECT count(*) FROM content").fetchone()[0]


def test_a_session_goes_with_all_its_turns(journal: Journal) -> None:
    journal.append(whole_turn(journal, "r1")).result()
    journal.append(whole_turn(journal, "r2", parent="r1")).result()
    journal.append(whole_turn(journal, "u1", parent="r2", stored=False)).result()
    with journal.transaction() as db:
        (stored,) = db.execute("SELECT sum(length(data)) FROM content").fetchone()
    removed = removal.remove_session(journal, "s1", removal.ASKED)
    assert removed == removal.Removed(turns=3, erased=3, kept=(), bytes=stored + 3 * (16 + 8))
    assert _contents(journal) == 0
    assert [row.session for row in journal.sessions()] == ["s2"]
    events = [fact.event for fact in journal.read()]
    assert SessionDeleted(tenant="local", session="s1", cause="deleted") in events
    with pytest.raises(NotFound):
        removal.remove_session(journal, "s1", removal.ASKED)


def test_more_turns_than_one_transaction_takes(journal: Journal) -> None:
    count = retention.SWEEP_TURNS_MAX * 2 + 3
    parent = ""
    for k in range(count):
        journal.append(whole_turn(journal, f"r{k}", parent=parent))
        parent = f"r{k}"
    assert removal.remove_session(journal, "s1", removal.ASKED).erased == count
    assert _contents(journal) == 0


def test_a_shared_parent_keeps_its_content_until_the_branch_goes(journal: Journal) -> None:
    journal.append(whole_turn(journal, "r1")).result()
    journal.append(whole_turn(journal, "r2", parent="r1")).result()
    journal.append(whole_turn(journal, "b1", parent="r1", session="s2")).result()
    removed = removal.remove_session(journal, "s1", removal.ASKED)
    assert (removed.turns, removed.erased, removed.kept) == (2, 1, ("r1",))
    assert _erased(journal) == {"r2"}
    raw = b"the record of r1"
    assert journal.content("local", journal.digest("local", raw)) == raw
    removal.remove_session(journal, "s2", removal.ASKED)
    assert _erased(journal) == {"r2", "b1", "r1"}
    assert _contents(journal) == 0


def test_cascade_takes_the_branch_with_it(journal: Journal) -> None:
    journal.append(whole_turn(journal, "r1")).result()
    journal.append(whole_turn(journal, "b1", parent="r1", session="s2")).result()
    journal.append(whole_turn(journal, "c1", session="s2")).result()
    assert removal.remove_session(journal, "s1", removal.ASKED, cascade=True).erased == 2
    assert _erased(journal) == {"r1", "b1"}
    turn = journal.turn("c1")
    assert turn is not None and turn.status == "completed"


def test_cascade_takes_a_session_that_was_removed_before(journal: Journal) -> None:
    journal.append(whole_turn(journal, "r1")).result()
    journal.append(whole_turn(journal, "b1", parent="r1", session="s2")).result()
    assert removal.remove_session(journal, "s1", removal.ASKED).kept == ("r1",)
    with pytest.raises(NotFound):
        removal.remove_session(journal, "s1", removal.ASKED)
    assert removal.remove_session(journal, "s1", removal.ASKED, cascade=True).kept == ()
    assert _erased(journal) == {"r1", "b1"}
    told = [fact.event for fact in journal.read() if isinstance(fact.event, SessionDeleted)]
    assert len(told) == 1, "it is said once"


def test_one_turn_alone_or_with_what_continues_it(journal: Journal) -> None:
    for name, parent in (("r1", ""), ("r2", "r1"), ("r3", "r2")):
        journal.append(whole_turn(journal, name, parent=parent)).result()
    removed = removal.remove_turn(journal, "r2")
    assert (removed.turns, removed.erased, removed.kept) == (1, 0, ("r2",))
    with pytest.raises(NotFound):
        removal.remove_turn(journal, "r2")
    removed = removal.remove_turn(journal, "r2", cascade=True)
    assert removed.erased == 2
    assert _erased(journal) == {"r2", "r3"}


@pytest.mark.parametrize("cascade", [False, True])
def test_what_runs_is_never_touched(journal: Journal, cascade: bool) -> None:
    journal.append(whole_turn(journal, "r1")).result()
    journal.append(accepted(journal, "r2", parent="r1")).result()
    head = journal.head
    with pytest.raises(BadRequest, match="r2 is running"):
        removal.remove_session(journal, "s1", removal.ASKED, cascade=cascade)
    assert journal.head == head
    journal.append([finished("r2")]).result()
    assert removal.remove_session(journal, "s1", removal.ASKED).erased == 2


def test_what_is_pinned_is_never_touched(journal: Journal) -> None:
    journal.append(whole_turn(journal, "r1")).result()
    removal.pin(journal, "s1", True)
    removal.pin(journal, "s1", True)
    for remove in (
        lambda: removal.remove_session(journal, "s1", removal.PRUNED),
        lambda: removal.remove_turn(journal, "r1"),
    ):
        with pytest.raises(BadRequest, match="pinned"):
            remove()
    removal.pin(journal, "s1", False)
    assert removal.remove_session(journal, "s1", removal.ASKED).erased == 1
    assert [str(fact.event.__struct_config__.tag) for fact in journal.read()].count("session_pinned.1") == 1
    with pytest.raises(NotFound):
        removal.pin(journal, "s1", True)


def test_a_session_that_was_used_since_it_was_looked_at_stays(journal: Journal) -> None:
    journal.append(whole_turn(journal, "r1")).result()
    seen = journal.session("s1")
    assert seen is not None
    journal.append(whole_turn(journal, "r2", parent="r1")).result()
    with pytest.raises(BadRequest, match="used meanwhile"):
        removal.remove_session(journal, "s1", removal.PRUNED, last_seq=seen.last_seq)
    assert _erased(journal) == set()


def test_nothing_can_be_added_to_a_session_that_went(journal: Journal) -> None:
    journal.append(whole_turn(journal, "r1")).result()
    removal.remove_session(journal, "s1", removal.ASKED)
    with pytest.raises(ParentErased):
        journal.append(accepted(journal, "r2")).result()
    assert journal.turn("r2") is None
    assert journal.find_session("local", b"") is None


def test_what_a_kill_left_is_swept(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    journal.append(whole_turn(journal, "r1")).result()

    def killed(*_: object, **__: object) -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr(removal, "_erase", killed)
    with pytest.raises(RuntimeError, match="killed"):
        removal.remove_session(journal, "s1", removal.ASKED)
    assert _contents(journal) > 0
    assert retention.sweep(journal, 0, 0) == 1
    assert _contents(journal) == 0


def test_the_projections_follow_from_the_facts(journal: Journal) -> None:
    journal.append(whole_turn(journal, "r1")).result()
    removal.pin(journal, "s2", True)
    removal.remove_session(journal, "s1", removal.ASKED)
    before = [journal.session(name) for name in ("s1", "s2")]
    journal.rebuild()
    assert [journal.session(name) for name in ("s1", "s2")] == before
    assert [row and (row.pinned, row.deleted) for row in before] == [None, (True, False)]


def test_a_damaged_content_does_not_stand_in_the_way(journal: Journal) -> None:
    journal.append(whole_turn(journal, "r1")).result()
    journal.run(lambda tx: tx.db.execute("UPDATE content SET data = x'00'")).result()
    with pytest.raises(JournalFault):
        journal.content("local", journal.digest("local", b"the raw body of r1"))
    removal.remove_session(journal, "s1", removal.ASKED)
    assert _contents(journal) == 0
