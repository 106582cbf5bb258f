"""`zj sessions delete`, `prune`, `pin`, `zj journal compact` without a server: plan first, then only with --yes."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Zj
from zjournal.cli import admin as asking
from zjournal.cli import remove
from zjournal.cli.sessions import NAMED_MAX
from zjournal.journal import datadir
from zjournal.journal.datadir import JOURNAL_FILE
from zjournal.journal.reader import Reader
from zjournal.sessions.linked import Ties


@pytest.fixture
def where(data_dir: Path) -> tuple[str, str]:
    return ("--data-dir", str(data_dir))


def _left(data_dir: Path) -> list[str]:
    with Reader.open(data_dir) as reader:
        return [row.session for row in reader.sessions()]


def test_delete_is_a_dry_run_without_yes(zj: Zj, data_dir: Path, where: tuple[str, str]) -> None:
    done = zj("sessions", "delete", "ses_t", *where)
    assert (done.code, done.out) == (
        0,
        "would delete session ses_two with 1 turn\nnothing was deleted; add --yes to do it\n",
    )
    assert len(_left(data_dir)) == 2
    done = zj("sessions", "delete", "ses_t", "--yes", *where)
    assert done.code == 0 and done.out.startswith("deleted session ses_two with 1 turn\n")
    assert _left(data_dir) == ["ses_one"]
    again = zj("sessions", "delete", "ses_two", "--yes", *where)
    assert (again.code, "no session or response" in again.err) == (1, True)


def test_delete_one_turn_or_all_that_continues_it(zj: Zj, where: tuple[str, str]) -> None:
    assert zj("sessions", "delete", "resp_", *where).code == 1
    done = zj("sessions", "delete", "resp_b2", "--yes", "--json", *where)
    assert done.json["response"] == "resp_b2"  # type: ignore[index]
    assert done.json["deleted"]["kept"] == 1  # type: ignore[index]
    done = zj("sessions", "delete", "resp_a1", "--cascade", "--yes", "--json", *where)
    assert (done.json["deleted"]["turns"], done.json["deleted"]["kept"]) == (4, 0)  # type: ignore[index]
    assert zj("sessions", "delete", "resp_a1", *where).code == 1
    assert zj("sessions", "delete", "nothing", *where).code == 1


REPLAY = (
    "replay rep_one is a session of its own and keeps what its prompts hold; "
    "`zj sessions delete rep_one` deletes it too\n"
)


def _turns(data_dir: Path, *sessions: str) -> list[str]:
    with Reader.open(data_dir) as reader:
        return [turn.response for session in sessions for turn in reader.turns(session)]


def test_the_plan_names_what_stays_for_whom(zj: Zj, replayed_dir: Path) -> None:
    where = ("--data-dir", str(replayed_dir))
    stays = "whose text stays: 2 turns of rep_one are built on it (--cascade deletes those too)\n"
    plan = zj("sessions", "delete", "ses_one", *where)
    assert plan.out == (
        f"would delete session ses_one with 4 turns\n2 turns would be hidden {stays}{REPLAY}"
        "nothing was deleted; add --yes to do it\n"
    )
    told = zj("sessions", "delete", "ses_one", "--json", *where).json
    assert told == {
        "session": "ses_one",
        "response": None,
        "kept": 2,
        "continued_by": [{"session": "rep_one", "turn_count": 2}],
        "replays": ["rep_one"],
        "deleted": None,
    }
    done = zj("sessions", "delete", "ses_one", "--yes", *where)
    assert f"2 turns hidden {stays}" in done.out and done.out.endswith(REPLAY)
    assert _turns(replayed_dir, "ses_one") == ["resp_a1", "resp_b2"], "as the plan said"


def test_the_plan_of_a_cascade_names_what_it_takes(zj: Zj, replayed_dir: Path) -> None:
    where = ("--data-dir", str(replayed_dir))
    plan = zj("sessions", "delete", "resp_a1", "--cascade", *where)
    assert plan.out == (
        "would delete turn resp_a1 of session ses_one, and what continues it: 3 turns of ses_one, 2 turns of rep_one\n"
        f"{REPLAY}nothing was deleted; add --yes to do it\n"
    )
    done = zj("sessions", "delete", "resp_a1", "--cascade", "--yes", "--json", *where)
    assert (done.json["deleted"]["turns"], done.json["deleted"]["kept"]) == (6, 0)  # type: ignore[index]
    assert _turns(replayed_dir, "ses_one", "rep_one") == ["resp_r1"]


@pytest.mark.parametrize("name, turns", [("ses_one", "2 turns"), ("resp_b2", "1 turn")])
def test_a_cascade_takes_what_was_hidden_before(zj: Zj, replayed_dir: Path, name: str, turns: str) -> None:
    where = ("--data-dir", str(replayed_dir))
    assert zj("sessions", "delete", "ses_one", "--yes", *where).code == 0
    again = zj("sessions", "delete", name, "--yes", *where)
    assert again.code == 1
    assert f"{name} was deleted before; its text stays, hidden: {turns} of rep_one " in again.err
    plan = zj("sessions", "delete", name, "--cascade", *where)
    assert "hidden, and what continues" in plan.out.splitlines()[0], plan.err
    done = zj("sessions", "delete", name, "--cascade", "--yes", *where)
    assert (done.code, "text stays" in done.out) == (0, False), done.err
    left = [] if name == "ses_one" else ["resp_a1", "resp_r2"]
    assert sorted(_turns(replayed_dir, "ses_one", "rep_one")) == sorted(["resp_r1", *left])
    assert zj("sessions", "delete", "rep_one", "--yes", *where).code == 0
    assert _turns(replayed_dir, "ses_one", "rep_one") == [], "with the replay the rest goes"
    assert zj("sessions", "delete", "ses_one", "--cascade", *where).code == 1
    assert zj("journal", "verify", *where).code == 0


def test_many_sessions_and_replays_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"s_{k}" for k in range(NAMED_MAX + 2)]
    ties = Ties(kept=1, continued=dict.fromkeys(names, 2), replays=tuple(names))
    assert remove._by_session(ties).endswith(f"2 turns of s_{NAMED_MAX - 1}, 4 turns of 2 more sessions")
    remove._tell_replays(ties)
    said = capsys.readouterr().out.splitlines()
    assert (len(said), said[-1]) == (NAMED_MAX + 1, "and 2 more replays; `zj sessions list` names them")


def test_damage_hides_replays_but_not_the_way(zj: Zj, replayed_dir: Path) -> None:
    where = ("--data-dir", str(replayed_dir))
    with contextlib.closing(sqlite3.connect(replayed_dir / JOURNAL_FILE)) as db, db:
        assert db.execute("UPDATE event SET body = x'00' WHERE tag LIKE 'session_replayed%'").rowcount == 1
    for command, said in (("list", "not every replay could be told"), ("delete", "not every replay of it")):
        done = zj("sessions", command, *(["ses_one"] if command == "delete" else []), *where)
        assert (done.code, said in done.err, "run `zj journal verify`" in done.err) == (0, True, True)
        assert "ses_one" in done.out


def test_bare_prune_is_refused(zj: Zj, where: tuple[str, str]) -> None:
    done = zj("sessions", "prune", "--yes", *where)
    assert (done.code, "prune needs a filter" in done.err) == (2, True)


@pytest.mark.parametrize(
    "bad", [("--older-than", "soon"), ("--before", "yesterday"), ("--max-bytes", "much"), ("--before", "2026-13-01")]
)
def test_a_bad_filter_is_wrong_usage(zj: Zj, where: tuple[str, str], bad: tuple[str, str]) -> None:
    done = zj("sessions", "prune", *bad, "--yes", *where)
    assert (done.code, bad[0] in done.err) == (2, True)


def test_prune_shows_a_plan_and_deletes_with_yes(zj: Zj, data_dir: Path, where: tuple[str, str]) -> None:
    assert zj("sessions", "pin", "ses_two", *where).out == "ses_two is pinned\n"
    done = zj("sessions", "prune", "--before", "2027-06-01", *where)
    assert done.code == 0
    assert "ses_one" in done.out and "keep: pinned" in done.out
    assert "1 session to delete" in done.out and "nothing was deleted" in done.out
    assert len(_left(data_dir)) == 2
    done = zj("sessions", "prune", "--before", "2027-06-01", "--yes", "--json", *where)
    assert done.json["deleted"]["sessions"] == 1  # type: ignore[index]
    assert _left(data_dir) == ["ses_two"]
    assert zj("sessions", "prune", "--before", "1999-01-01", *where).out == "no session matches\n"
    assert zj("sessions", "unpin", "ses_two", "--json", *where).json == {"session": "ses_two", "pinned": False}
    assert zj("journal", "verify", *where).code == 0


def test_older_than_counts_from_now(zj: Zj, data_dir: Path, where: tuple[str, str]) -> None:
    # The sessions of this journal are of January 2027.
    done = zj("sessions", "prune", "--older-than", "36500d", "--yes", *where)
    assert (done.code, done.out) == (0, "no session matches\n")
    assert len(_left(data_dir)) == 2


def test_compact_says_before_and_after(zj: Zj, where: tuple[str, str]) -> None:
    done = zj("journal", "compact", "--json", *where)
    assert done.code == 0
    assert done.json["scrubbed"] is True  # type: ignore[index]


def test_no_journal_is_made_where_there_is_none(zj: Zj, tmp_path: Path) -> None:
    done = zj("journal", "compact", "--data-dir", str(tmp_path / "none"))
    assert (done.code, "no journal" in done.err) == (65, True)
    assert not (tmp_path / "none").exists()


def test_an_owner_that_does_not_answer_is_named(
    zj: Zj, data_dir: Path, where: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "OWNER_S_MAX", 0.1)
    with datadir.lock(data_dir):
        done = zj("journal", "compact", *where)
    assert (done.code, "using this data directory" in done.err) == (75, True)
