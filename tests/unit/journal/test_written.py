"""Appends of an event loop: told once they are durable, all of a commit at once, and not before."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from tests.unit.journal.facts import open_journal, sampled, session
from tests.unit.journal.test_dependent import freed, full
from zjournal.errors import JournalUnavailable
from zjournal.journal.events import Fact, SessionOpened
from zjournal.journal.log import Journal
from zjournal.journal.written import Written, tell


def test_appends_of_a_loop_are_numbered_in_order_and_durable(tmp_path: Path) -> None:
    async def main(journal: Journal) -> None:
        written = [journal.append_soon([session(f"s{number}")]) for number in range(50)]
        numbers = [await one for one in written]
        assert numbers == list(range(numbers[0], numbers[0] + 50))
        assert [await one for one in written] == numbers  # again, and told already
        assert journal.head == numbers[-1]

    with open_journal(tmp_path / "data") as journal:
        asyncio.run(main(journal))
    with Journal.open(tmp_path / "data") as journal:
        assert [fact.event.session for fact in journal.read() if isinstance(fact.event, SessionOpened)] == [
            f"s{number}" for number in range(50)
        ]


def test_callbacks_run_on_the_loop_in_order_of_the_facts(tmp_path: Path) -> None:
    async def main(journal: Journal) -> None:
        told: list[tuple[int, int]] = []
        for number in range(20):
            written = journal.append_soon([session(f"s{number}")])
            written.add_done_callback(lambda _, number=number: told.append((number, threading.get_ident())))
        await written
        assert told == [(number, threading.get_ident()) for number in range(20)]
        late: list[Written] = []
        written.add_done_callback(late.append)
        assert late == []  # never from within the call
        await asyncio.sleep(0)
        assert late == [written]

    with open_journal(tmp_path / "data") as journal:
        asyncio.run(main(journal))


def test_who_waits_may_give_up_and_the_fact_stays(tmp_path: Path) -> None:
    async def main(journal: Journal) -> None:
        written = journal.append_soon([session("s1")])
        waiting = asyncio.ensure_future(written)
        other = asyncio.ensure_future(written)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await other == journal.head
        assert journal.session("s1") is not None

    with open_journal(tmp_path / "data") as journal:
        asyncio.run(main(journal))


def test_a_full_disk_is_told_and_what_builds_on_it_is_an_orphan(tmp_path: Path) -> None:
    async def main(journal: Journal) -> None:
        full(journal)
        first = journal.append_soon([session("s1", key=bytes(1 << 20))])
        second = journal.append_soon([session("s2")], after=first)
        with pytest.raises(JournalUnavailable, match="full"):
            await first
        freed(journal)
        with pytest.raises(JournalUnavailable, match=r"full|missing"):
            await second
        assert await journal.append_soon([session("s3")]) == journal.head
        with pytest.raises(JournalUnavailable, match="missing"):
            await journal.append_soon([session("s4")], after=first)
        journal.close()
        with pytest.raises(JournalUnavailable, match="closed"):
            await journal.append_soon([session("s5")])

    with open_journal(tmp_path / "data") as journal:
        asyncio.run(main(journal))


def test_wrong_facts_fail_alone(tmp_path: Path) -> None:
    async def main(journal: Journal) -> None:
        right, wrong = journal.append_soon([session("s1")]), journal.append_soon([Fact(session("s1").event)])
        also = journal.append_soon([sampled("r1", 0)])
        assert await right < await also
        with pytest.raises(Exception, match="UNIQUE"):
            await wrong

    with open_journal(tmp_path / "data") as journal:
        asyncio.run(main(journal))


def test_a_closed_loop_does_not_hold_up_the_writer(tmp_path: Path) -> None:
    async def gone(journal: Journal) -> Written:
        return journal.append_soon([session("s1")])

    with open_journal(tmp_path / "data") as journal:
        left = asyncio.run(gone(journal))
        journal.append([session("s2")]).result()
        assert left.done() and left.exception() is None


def test_a_callback_that_fails_keeps_nobody_from_being_told() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        faults: list[dict] = []
        loop.set_exception_handler(lambda _, context: faults.append(context))
        one, two = Written(loop), Written(loop)
        one.add_done_callback(lambda _: 1 // 0)
        for written in (one, two):
            written.set_result(7)
        tell([one, two])
        assert await two == 7
        assert isinstance(faults[0]["exception"], ZeroDivisionError)

    asyncio.run(main())
