"""Caps: the oldest go first, a round at a time, and never what runs, is pinned, or was used just now."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.journal.facts import accepted, open_journal, session, whole_turn
from zjournal.journal import caps, removal
from zjournal.journal.caps import Limits
from zjournal.journal.compact import bytes_in_use
from zjournal.journal.events import SessionDeleted
from zjournal.journal.log import Journal

HOUR_US = 3_600_000_000


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with open_journal(tmp_path / "data") as opened:
        yield opened


def _fill(journal: Journal, count: int, size: int = 20_000) -> None:
    import random

    for k in range(count):
        journal.append([session(f"s{k}")]).result()
        prompt = random.Random(k).randbytes(size)
        journal.append(whole_turn(journal, f"r{k}", session=f"s{k}", record=prompt)).result()


def _names(journal: Journal) -> list[str]:
    return [row.session for row in journal.sessions()][::-1]


def _now(journal: Journal) -> int:
    return journal.read(journal.head - 1)[0].time


def test_size_cap_takes_the_oldest_until_it_fits(journal: Journal, caplog: pytest.LogCaptureFixture) -> None:
    _fill(journal, 8)
    with journal.transaction() as db:
        held = bytes_in_use(db)
    caplog.set_level(logging.INFO)
    limits = Limits(held - 80_000, 0)
    assert caps.enforce(journal, limits, _now(journal) + 2 * HOUR_US) is False
    left = _names(journal)
    assert left == [f"s{k}" for k in range(8 - len(left), 8)]
    assert 4 <= len(left) <= 6
    with journal.transaction() as db:
        assert bytes_in_use(db) <= limits.max_bytes
    gone = [fact.event for fact in journal.read() if isinstance(fact.event, SessionDeleted)]
    assert [(event.session, event.cause) for event in gone] == [(f"s{k}", "size_cap") for k in range(8 - len(left))]
    assert sum("deleted" in record.message for record in caplog.records) == len(gone)


def test_age_cap_goes_round_by_round(journal: Journal) -> None:
    _fill(journal, caps.ROUND_SESSIONS_MAX + 3, size=10)
    limits = Limits(0, 60.0)
    assert caps.enforce(journal, limits, _now(journal)) is False
    assert len(_names(journal)) == caps.ROUND_SESSIONS_MAX + 3
    late = _now(journal) + 61_000_000
    assert caps.enforce(journal, limits, late) is True
    assert len(_names(journal)) == 3
    assert caps.enforce(journal, limits, late) is False
    assert _names(journal) == []


def test_a_session_used_just_now_is_not_taken_for_its_size(journal: Journal, caplog: pytest.LogCaptureFixture) -> None:
    _fill(journal, 3)
    assert caps.enforce(journal, Limits(1, 0), _now(journal) + HOUR_US // 2) is False
    assert len(_names(journal)) == 3
    assert "no session may go" in caplog.text


@settings(max_examples=15, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(["ended", "running", "pinned"]), min_size=1, max_size=8),
    max_bytes=st.sampled_from([0, 1, 1 << 40]),
    max_age_s=st.sampled_from([0.0, 1e-6, 1e6]),
)
def test_what_runs_or_is_pinned_is_never_touched(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[str], max_bytes: int, max_age_s: float
) -> None:
    with open_journal(tmp_path_factory.mktemp("caps") / "data") as journal:
        for k, kind in enumerate(kinds):
            journal.append([session(f"s{k}")])
            make = accepted if kind == "running" else whole_turn
            journal.append(make(journal, f"r{k}", session=f"s{k}")).result()
            if kind == "pinned":
                removal.pin(journal, f"s{k}", True)
        limits = Limits(max_bytes, max_age_s)
        while caps.enforce(journal, limits, _now(journal) + 2 * HOUR_US):
            pass
        left = set(_names(journal))
        kept = {f"s{k}" for k, kind in enumerate(kinds) if kind != "ended"}
        assert kept <= left
        if max_bytes == 1 or max_age_s == 1e-6:
            assert kept == left
        else:
            assert len(left) == len(kinds)
