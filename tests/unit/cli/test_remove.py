"""`zj sessions delete`, `prune`, `pin`, `zj journal compact` without a server: plan first, then only with --yes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli.conftest import Zj
from zjournal.cli import admin as asking
from zjournal.journal import datadir
from zjournal.journal.reader import Reader


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
