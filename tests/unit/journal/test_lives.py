"""Which server's life has no end: what a start finds out about the one before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.journal.facts import open_journal, sampled, session, whole_turn
from zjournal.journal import reader
from zjournal.journal.events import Fact, ServerCrashed, ServerStarted, ServerStopped

START = Fact(ServerStarted(version="1", pid=7))
STOP = Fact(ServerStopped())
CRASH = Fact(ServerCrashed(pid=7, started=1))


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        ([], None),
        ([session("s")], None),  # imported, never served
        ([START], (1, 7)),
        ([START, session("s")], (1, 7)),
        ([START, STOP], None),
        ([START, STOP, session("s"), session("s2")], None),  # a command without a server
        ([START, STOP, START, session("s")], (3, 7)),
        ([START, CRASH, START], (3, 7)),
        ([START, CRASH], None),
    ],
)
@pytest.mark.parametrize("page", [1, 2, 20_000])
def test_the_last_life_without_an_end_is_found(
    tmp_path: Path, facts: list[Fact], found: tuple[int, int] | None, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "SCAN_FACTS", page)
    with open_journal(tmp_path) as journal:
        if facts:
            journal.append(facts).result()
        assert journal.unended_start() == found


def test_a_long_life_is_not_searched_to_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "SCAN_FACTS", 2)
    with open_journal(tmp_path) as journal:
        journal.append([START, session("s1"), *whole_turn(journal, "r1"), sampled("r1", 2)]).result()
        head = journal.head
        monkeypatch.setattr(reader, "LIFE_SCAN_FACTS", head)
        assert journal.unended_start() == (1, 7)
        monkeypatch.setattr(reader, "LIFE_SCAN_FACTS", head - 1)
        assert journal.unended_start() == (0, 0)
