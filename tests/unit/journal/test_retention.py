"""Erasure: what goes, what stays for a descendant, and that the chain verifies afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.journal.facts import accepted, finished, open_journal, sampled, session, whole_turn
from zjournal.errors import JournalFault
from zjournal.journal import removal, retention
from zjournal.journal.events import PayloadErased
from zjournal.journal.log import Journal
from zjournal.journal.verify import verify

RAW = b"canary-7f31: the body that must go, long enough that no compression can hide it in a table"


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with open_journal(tmp_path / "data") as opened:
        opened.append([session("s1")]).result()
        yield opened
        assert verify(tmp_path / "data").fault is None


def _erased(journal: Journal) -> list[str]:
    return [fact.event.response for fact in journal.read() if isinstance(fact.event, PayloadErased)]


def _contents(journal: Journal) -> int:
    with journal.transaction() as db:
        return db.execute("SELECT count(*) FROM content").fetchone()[0]


def test_delete_removes_payload_and_contents_and_keeps_numbers(journal: Journal) -> None:
    journal.append(whole_turn(journal, "r1")).result()
    before = [(fact.seq, fact.event) for fact in journal.read()]
    assert _contents(journal) == 1
    assert retention.delete(journal, "local", "r1").result() is True
    assert _contents(journal) == 0
    assert journal.turn("r1") is None
    assert [(fact.seq, fact.event) for fact in journal.read()[: len(before)]] == before
    assert len([fact for fact in journal.read() if fact.payload is None]) == 1
    assert _erased(journal) == ["r1"]
    with pytest.raises(JournalFault, match="erased"):
        journal.content("local", journal.digest("local", b"the record of r1"))


def test_a_deleted_turn_has_a_row_as_long_as_its_content_is_needed(journal: Journal) -> None:
    """And none when it is erased, in whichever order that comes; a deleted session goes with its last turn."""
    journal.append(whole_turn(journal, "r1")).result()
    journal.append(whole_turn(journal, "r2", parent="r1", stored=False)).result()
    assert retention.delete(journal, "local", "r1").result()
    turn = journal.turn("r1")
    assert turn is not None and (turn.status, turn.erased) == ("deleted", False)
    assert retention.erase(journal, "r2", retention.CAUSE_UNSTORED).result() == ("r2", "r1")
    assert journal.turn("r1") is None
    kept, opened = journal.turn("r2"), journal.session("s1")
    assert kept is not None and kept.erased
    assert opened is not None and opened.turns == 1
    removal.remove_session(journal, "s1", removal.ASKED)
    assert (journal.turn("r2"), journal.session("s1")) == (None, None)


def test_a_session_whose_turns_were_deleted_one_by_one_goes_at_once(journal: Journal) -> None:
    journal.append(whole_turn(journal, "r1")).result()
    assert retention.delete(journal, "local", "r1").result()
    opened = journal.session("s1")
    assert opened is not None and (opened.turns, opened.deleted) == (0, False)
    journal.append(whole_turn(journal, "r2")).result()
    assert retention.delete(journal, "local", "r2").result()
    removal.remove_session(journal, "s1", removal.ASKED)
    assert journal.session("s1") is None


def test_erased_bytes_are_in_no_file(journal: Journal) -> None:
    token = (0xC0FFEE11).to_bytes(4, "little") * 8
    facts = whole_turn(journal, "r1", record=RAW)
    facts[3] = type(facts[3])(facts[3].event, payload=token)
    journal.append(facts).result()
    files = [path for path in journal.path.parent.iterdir() if path.name.startswith("journal")]
    assert any(token in path.read_bytes() for path in files)
    retention.delete(journal, "local", "r1").result()
    for path in files:
        assert token not in path.read_bytes(), path.name
        assert RAW[:12] not in path.read_bytes(), path.name


def test_shared_content_stays_while_another_turn_holds_it(journal: Journal) -> None:
    shared = b"a record that two turns share"
    journal.append([*whole_turn(journal, "r1", record=shared), *whole_turn(journal, "r2", record=shared)]).result()
    retention.delete(journal, "local", "r1").result()
    assert journal.content("local", journal.digest("local", shared)) == shared
    retention.delete(journal, "local", "r2").result()
    with pytest.raises(JournalFault):
        journal.content("local", journal.digest("local", shared))


def test_a_turn_with_a_descendant_is_only_hidden_and_goes_with_the_last(journal: Journal) -> None:
    journal.append(whole_turn(journal, "r1")).result()
    journal.append(whole_turn(journal, "r2", parent="r1")).result()
    journal.append(whole_turn(journal, "r3", parent="r1")).result()
    assert retention.delete(journal, "local", "r1").result() is True
    assert _erased(journal) == []
    retention.delete(journal, "local", "r2").result()
    assert _erased(journal) == ["r2"]
    retention.delete(journal, "local", "r3").result()
    assert _erased(journal) == ["r2", "r3", "r1"]
    assert _contents(journal) == 0


def test_a_surviving_ancestor_is_not_taken_along(journal: Journal) -> None:
    journal.append(whole_turn(journal, "r1")).result()
    journal.append(whole_turn(journal, "r2", parent="r1")).result()
    retention.delete(journal, "local", "r2").result()
    assert _erased(journal) == ["r2"]


def test_what_cannot_be_deleted(journal: Journal) -> None:
    journal.append([*whole_turn(journal, "r1"), *whole_turn(journal, "u1", stored=False)]).result()
    assert retention.delete(journal, "someone", "r1").result() is False
    assert retention.delete(journal, "local", "r9").result() is False
    assert retention.delete(journal, "local", "u1").result() is False
    assert retention.delete(journal, "local", "r1").result() is True
    assert retention.delete(journal, "local", "r1").result() is False


def test_a_running_turn_is_hidden_now_and_swept_at_its_end(journal: Journal) -> None:
    journal.append([*accepted(journal, "r1"), sampled("r1", 0)]).result()
    assert retention.delete(journal, "local", "r1").result() is True
    assert retention.sweep(journal, 0, 0) == 0
    journal.append([sampled("r1", 1), finished("r1")]).result()
    assert retention.sweep(journal, 0, 0) == 1
    assert [fact.payload for fact in journal.read() if fact.payload != b""] == [None, None]


def test_unstored_turns_go_when_they_are_due(journal: Journal) -> None:
    journal.append([*whole_turn(journal, "u1", stored=False), *whole_turn(journal, "r1")]).result()
    turn = journal.turn("u1")
    assert turn is not None
    assert turn.finished_us is not None
    assert retention.sweep(journal, turn.finished_us + 6_999_999, 7) == 0
    assert retention.sweep(journal, turn.finished_us + 7_000_000, 7) == 1
    assert _erased(journal) == ["u1"]
    assert retention.sweep(journal, turn.finished_us + 7_000_000, 7) == 0


def test_what_is_held_stays_and_keeps_nothing_else(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "SWEEP_TURNS_MAX", 1)
    names = [f"u{number}" for number in range(5)]
    for name in names:
        journal.append(whole_turn(journal, name, stored=False)).result()
    assert retention.sweep(journal, 1 << 60, 0, frozenset(names[:3])) == 2
    assert _erased(journal) == names[3:]
    assert retention.sweep(journal, 1 << 60, 0) == 3


def test_unstored_turns_of_a_clock_that_was_ahead_go_as_well(journal: Journal) -> None:
    journal.append([*whole_turn(journal, "u1", stored=False), *whole_turn(journal, "r1")]).result()
    turn = journal.turn("u1")
    assert turn is not None and turn.finished_us is not None
    assert retention.sweep(journal, turn.finished_us - 7_000_000, 7) == 0
    assert retention.sweep(journal, turn.finished_us - 7_000_001, 7) == 1
    assert _erased(journal) == ["u1"]


def test_a_chain_of_unstored_turns_goes_from_its_end(journal: Journal) -> None:
    parent = ""
    for k in range(5):
        journal.append(whole_turn(journal, f"u{k}", parent=parent, stored=False)).result()
        parent = f"u{k}"
    now = journal.read()[-1].time
    assert retention.sweep(journal, now, 0) == 5
    assert _erased(journal) == ["u4", "u3", "u2", "u1", "u0"]


def test_unstored_turns_above_one_that_goes_go_with_it_but_for_what_is_held(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They could not go before: this one was built on them."""
    parent = "r0"
    journal.append(whole_turn(journal, parent)).result()
    for k in range(6):
        journal.append(whole_turn(journal, f"u{k}", parent=parent, stored=False)).result()
        parent = f"u{k}"
    assert retention.erase_unstored(journal, "u2", ()).result() == "", "it has a child"
    assert _erased(journal) == []
    assert retention.erase_unstored(journal, "u5", {"u3"}).result() == ""
    assert _erased(journal) == ["u5", "u4"]
    monkeypatch.setattr(retention, "SWEEP_TURNS_MAX", 2)
    assert retention.erase_unstored(journal, "u3", ()).result() == "u1", "not all in one transaction"
    assert _erased(journal) == ["u5", "u4", "u3", "u2"]
    assert retention.erase_unstored(journal, "u1", ()).result() == "r0"
    assert retention.erase_unstored(journal, "r0", ()).result() == "", "it is stored"
    assert _erased(journal) == ["u5", "u4", "u3", "u2", "u1", "u0"]
    assert retention.erase_unstored(journal, "none", ()).result() == ""


def test_a_deleted_turn_goes_with_the_unstored_one_that_needed_it(journal: Journal) -> None:
    journal.append(whole_turn(journal, "r0")).result()
    journal.append(whole_turn(journal, "u0", parent="r0", stored=False)).result()
    assert retention.delete(journal, "local", "r0").result()
    assert _erased(journal) == []
    assert retention.erase_unstored(journal, "u0", ()).result() == ""
    assert _erased(journal) == ["u0", "r0"]


def test_erase_by_name(journal: Journal) -> None:
    journal.append(whole_turn(journal, "u1", stored=False)).result()
    assert retention.erase(journal, "u1", retention.CAUSE_UNSTORED).result() == ("u1",)
    assert retention.erase(journal, "u1", retention.CAUSE_UNSTORED).result() == ()
    assert retention.erase(journal, "none", retention.CAUSE_UNSTORED).result() == ()
    event = journal.read()[-1].event
    assert event == PayloadErased(tenant="local", response="u1", cause="unstored")
