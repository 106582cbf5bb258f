"""The fold: what each fact does to `turn` and `session`, and the questions that are asked of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.journal.facts import (
    START_US,
    accepted,
    failed,
    finished,
    matched,
    open_journal,
    sampled,
    session,
    whole_turn,
)
from zjournal.journal import reader
from zjournal.journal.events import Fact, Recorded, ResponseDeleted
from zjournal.journal.log import Journal
from zjournal.journal.projections import Turn, effects


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with open_journal(tmp_path / "data") as opened:
        opened.append([session("s1", key=b"key")]).result()
        yield opened


def _turn(journal: Journal, response: str) -> Turn:
    turn = journal.turn(response)
    assert turn is not None
    return turn


def test_a_turn_from_acceptance_to_end(journal: Journal) -> None:
    journal.append(accepted(journal, "r1", record=b"p" * 40)).result()
    turn = _turn(journal, "r1")
    assert (turn.status, turn.prompt, turn.finished_us, turn.ttft_us) == ("running", 4, None, None)
    assert (turn.accepted_seq, turn.last_seq, turn.created) == (2, 3, START_US // 1_000_000)
    journal.append([matched("r1", 7), sampled("r1", 0, 2), sampled("r1", 2)]).result()
    turn = _turn(journal, "r1")
    assert (turn.cached, turn.output, turn.last_seq) == (7, 3, 6)
    assert turn.ttft_us == journal.read()[-2].time - turn.accepted_us > 0
    journal.append([finished("r1", output=3, history=b"h")]).result()
    turn = _turn(journal, "r1")
    assert (turn.status, turn.reason, turn.output, turn.history) == ("completed", "stop", 3, b"h")
    assert (turn.queue_us, turn.prefill_us, turn.decode_us, turn.ttft_us) == (10, 200, 3_000, 210)
    assert (turn.last_seq, turn.finished_us) == (7, journal.read()[-1].time)


@pytest.mark.parametrize(
    ("reason", "status"),
    [("stop", "completed"), ("stop_string", "completed"), ("length", "incomplete"), ("cancelled", "cancelled")],
)
def test_status_of_each_end(journal: Journal, reason: str, status: str) -> None:
    journal.append([*accepted(journal, "r1"), finished("r1", reason)]).result()
    assert (_turn(journal, "r1").status, _turn(journal, "r1").reason) == (status, reason)


def test_the_first_end_counts(journal: Journal) -> None:
    journal.append([*accepted(journal, "r1"), failed("r1"), finished("r1")]).result()
    turn = _turn(journal, "r1")
    assert (turn.status, turn.code, turn.message) == ("failed", "engine_error", "It died.")


def test_deleted_stays_deleted(journal: Journal) -> None:
    delete = Fact(ResponseDeleted(tenant="local", response="r1"))
    journal.append([*accepted(journal, "r1"), delete]).result()
    assert journal.running() == []
    journal.append([finished("r1")]).result()
    turn = _turn(journal, "r1")
    assert turn.status == "deleted"
    assert turn.finished_us is not None


def test_session(journal: Journal) -> None:
    journal.append(whole_turn(journal, "r1")).result()
    journal.append(accepted(journal, "r2", parent="r1")).result()
    (found,) = journal.sessions()
    assert (found.session, found.turns, found.key, found.opened_seq) == ("s1", 2, b"key", 1)
    assert found.last_us == _turn(journal, "r2").accepted_us
    assert [turn.response for turn in journal.turns("s1")] == ["r1", "r2"]
    assert _turn(journal, "r2").parent == "r1"
    assert journal.session("s1") == found
    assert journal.session("s9") is None


def test_sessions_by_activity_in_pages(journal: Journal) -> None:
    journal.append([session("s2"), session("s3")]).result()
    journal.append(whole_turn(journal, "r1", session="s1")).result()
    assert [found.session for found in journal.sessions()] == ["s1", "s3", "s2"]
    first = journal.sessions(limit=2)
    rest = journal.sessions(limit=2, before=first[-1].last_seq)
    assert [found.session for found in rest] == ["s2"]


def test_names_by_their_beginning(journal: Journal) -> None:
    journal.append([session("s22"), session("t1"), *accepted(journal, "r12")]).result()
    assert [found.session for found in journal.sessions_named("t")] == ["t1"]
    assert len(journal.sessions_named("s")) == 2
    assert journal.sessions_named("s%") == []
    assert [turn.response for turn in journal.turns_named("r1")] == ["r12"]


def test_find_session_by_key(journal: Journal) -> None:
    journal.append([session("s2", key=b"other"), session("s3", key=b"key"), session("s4")]).result()
    found = journal.find_session("local", b"key")
    assert found is not None
    assert found.session == "s3"
    assert journal.find_session("someone", b"key") is None
    assert journal.find_session("local", b"") is None


def test_find_by_history(journal: Journal) -> None:
    other = journal.tenant("alice").id
    for name, history in (("r1", b"short"), ("r2", b"long"), ("r3", b"long"), ("r4", b"long"), ("r5", b"")):
        journal.append([*accepted(journal, name), finished(name, history=history)]).result()
    journal.append([Fact(ResponseDeleted(tenant="local", response="r4"))]).result()
    journal.append([*accepted(journal, "x1", tenant=other), finished("x1", history=b"theirs", tenant=other)]).result()

    def find(*digests: bytes) -> str | None:
        turn = journal.find_by_history("local", digests)
        return None if turn is None else turn.response

    assert find(b"longest", b"long", b"short") == "r3"  # the longest that is there; its newest visible turn
    assert find(b"short", b"long") == "r1"
    assert find(b"theirs") is None
    assert find(b"") is None
    assert find() is None


def test_a_request_sent_a_thousand_times_is_found_without_reading_a_thousand_turns(journal: Journal) -> None:
    """The cost of one more must not follow the number of those before it."""
    for number in range(1_000):
        name = f"same{number}"
        journal.append([*accepted(journal, name, record=b"same"), finished(name, history=b"history")])
    journal.run(lambda tx: None).result()
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1

    with journal.transaction() as db:
        db.set_progress_handler(count, 10)
    found = journal.find_by_history("local", [b"longer", b"history"])
    assert found is not None
    assert found.response == "same999"
    assert steps < 100, "it looks at one turn, not at all of them"


def test_sampled_tokens_are_summed_per_response() -> None:
    facts = [Recorded(seq, 100 + seq, sampled("ab"[seq % 2], seq).event) for seq in range(10)]
    found = list(effects(facts))
    assert [values for _, values in found] == [(5, 8, 100, "a", "a"), (5, 9, 101, "b", "b")]


def test_rebuild_gives_the_same_rows(journal: Journal) -> None:
    journal.append([*whole_turn(journal, "r1"), *accepted(journal, "r2"), sampled("r2", 0), failed("r2")]).result()
    before = journal.turns("s1"), journal.sessions()
    journal.run(lambda tx: tx.db.execute("UPDATE turn SET output = 99, status = 'x'")).result()
    assert journal.turns("s1") != before[0]
    assert journal.rebuild() == journal.head
    assert (journal.turns("s1"), journal.sessions()) == before


def test_a_line_of_turns_is_what_parent_after_parent_gives(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "TURNS_PAGE", 3)
    before = ""
    for number in range(8):
        journal.append(accepted(journal, f"r{number}", parent=before)).result()
        before = f"r{number}"
    names = [f"r{number}" for number in reversed(range(8))]
    assert list(journal.line("r7", 100)) == [journal.turn(name) for name in names]
    for limit in (1, 3, 4, 8):
        assert [turn.response for turn in journal.line("r7", limit)] == names[:limit]
    assert [turn.response for turn in journal.line("r2", 100)] == ["r2", "r1", "r0"]
    assert list(journal.line("", 9)) == list(journal.line("unknown", 9)) == []
