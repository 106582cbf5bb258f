"""The writer: order, groups, durability before telling, faults, and an orderly end."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.unit.journal.facts import (
    START_US,
    accepted,
    finished,
    matched,
    open_journal,
    sampled,
    session,
    ticking,
    whole_turn,
)
from zjournal.errors import JournalFault, JournalUnavailable
from zjournal.journal import log
from zjournal.journal.events import Fact, Recorded, ResponseFailed, ServerStarted
from zjournal.journal.log import Journal
from zjournal.journal.transaction import Transaction
from zjournal.journal.verify import verify


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with open_journal(tmp_path / "data") as opened:
        yield opened


def _held(journal: Journal) -> threading.Event:
    """Keeps the writer busy until the event is set, so that what is appended meanwhile waits together."""
    started, go = threading.Event(), threading.Event()

    def work(_: Transaction) -> None:
        started.set()
        assert go.wait(60)

    journal.run(work)
    assert started.wait(60)
    return go


def test_what_is_appended_is_read(journal: Journal) -> None:
    facts = [session("s1"), *whole_turn(journal, "r1")]
    assert journal.append(facts).result() == 6
    assert journal.head == 6
    read = journal.read()
    assert [fact.seq for fact in read] == [1, 2, 3, 4, 5, 6]
    assert [fact.event for fact in read] == [fact.event for fact in facts]
    assert [fact.payload for fact in read] == [fact.payload for fact in facts]


def test_read_in_pages(journal: Journal) -> None:
    journal.append([session(f"s{k}") for k in range(10)]).result()
    assert [fact.seq for fact in journal.read(after=3, limit=4)] == [4, 5, 6, 7]
    assert [fact.seq for fact in journal.read(after=3, limit=4, upto=5)] == [4, 5]
    assert [fact.seq for fact in journal.read(after=8)] == [9, 10]
    assert journal.read(after=10) == []
    assert journal.read(after=3, upto=2) == []


def test_what_waits_is_committed_as_one_group_in_order(journal: Journal) -> None:
    commits: list[list[int]] = []
    journal.subscribe(lambda facts: commits.append([fact.seq for fact in facts]))
    go = _held(journal)
    futures = [journal.append([session(f"s{k}a"), session(f"s{k}b")]) for k in range(20)]
    go.set()
    assert [future.result() for future in futures] == [2 * k + 2 for k in range(20)]
    assert commits == [list(range(1, 41))]


def test_a_group_is_bounded(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "GROUP_FACTS_MAX", 8)
    commits: list[int] = []
    journal.subscribe(lambda facts: commits.append(len(facts)))
    go = _held(journal)
    futures = [journal.append([session(f"s{k}{n}") for n in range(3)]) for k in range(4)]
    futures.append(journal.append([session(f"t{n}") for n in range(20)]))  # one call is never cut
    go.set()
    assert [future.result() for future in futures] == [3, 6, 9, 12, 32]
    assert commits == [6, 6, 20]


def test_durable_before_told(journal: Journal) -> None:
    seen: list[tuple[str, int]] = []
    other = sqlite3.connect(f"file:{journal.path}?mode=ro", uri=True, check_same_thread=False)

    def count() -> int:
        return other.execute("SELECT count(*) FROM event").fetchone()[0]

    journal.subscribe(lambda _: seen.append(("subscriber", count())))
    future = journal.append([session("s1"), session("s2")])
    future.add_done_callback(lambda _: seen.append(("caller", count())))
    future.result()
    journal.close()
    other.close()
    assert seen[0] == ("subscriber", 2)
    assert ("caller", 2) in seen


def test_wrong_facts_fail_alone(journal: Journal) -> None:
    go = _held(journal)
    before = journal.append([session("s1")])
    twice = journal.append([session("s2"), session("s1")])
    unnamed = journal.append([Fact(session("s3").event, contents=(b"x",))])
    after = journal.append([session("s4")])
    go.set()
    assert before.result() == 1
    assert after.result() == 2
    with pytest.raises(sqlite3.IntegrityError):
        twice.result()
    with pytest.raises(AssertionError, match="refers to no content"):
        unnamed.result()
    assert [fact.event.session for fact in journal.read()] == ["s1", "s4"]  # type: ignore[union-attr]
    assert verify(journal.path.parent).clean


def test_full_disk_fails_the_group_and_the_writer_goes_on(journal: Journal) -> None:
    journal.append([session("s1"), *accepted(journal, "r1")]).result()

    def limit(pages: int) -> None:
        journal.run(lambda tx: tx.db.execute(f"PRAGMA max_page_count = {pages}").fetchone()).result()

    pages = journal.run(lambda tx: tx.db.execute("PRAGMA page_count").fetchone()[0]).result()
    limit(pages)
    go = _held(journal)
    large = [Fact(sampled("r1", 0).event, payload=b"x" * 100_000)]
    futures = [journal.append(large), journal.append([session("s2")])]
    go.set()
    for future in futures:
        with pytest.raises(JournalUnavailable, match="database or disk is full") as unavailable:
            future.result()
        assert (unavailable.value.status, unavailable.value.retry_after_s) == (503, 5)
    assert journal.head == 3
    limit(1_000_000)
    assert journal.append(large).result() == 4
    assert verify(journal.path.parent).clean


def test_time_never_goes_back(tmp_path: Path) -> None:
    times = iter([START_US, START_US - 50, START_US - 60, START_US + 5])
    with Journal.open(tmp_path, clock=lambda: next(times)) as journal:
        for k in range(4):
            journal.append([session(f"s{k}")]).result()
        assert [fact.time for fact in journal.read()] == [START_US, START_US, START_US, START_US + 5]
    with Journal.open(tmp_path, clock=lambda: 1) as journal:
        journal.append([session("s9")]).result()
        assert journal.read()[-1].time == START_US + 5


def test_close_drains_and_ends(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    go = _held(journal)
    futures = [journal.append([session(f"s{k}")]) for k in range(5)]
    closing = threading.Thread(target=journal.close)
    closing.start()
    go.set()
    closing.join(60)
    assert [future.result(0) for future in futures] == [1, 2, 3, 4, 5]
    with pytest.raises(JournalUnavailable, match="closed"):
        journal.append([session("late")]).result()


def test_a_stalled_disk_is_refused_not_buffered_for_ever(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "QUEUE_FACTS_MAX", 4)
    go = _held(journal)
    fits = journal.append([session(f"s{k}") for k in range(4)])
    too_much = journal.append([session("s5")])
    with pytest.raises(JournalUnavailable, match="cannot keep up"):
        too_much.result(0)
    go.set()
    assert fits.result() == 4
    assert journal.append([session("s5")]).result() == 5


def test_a_client_that_goes_away_unmakes_nothing(journal: Journal) -> None:
    async def main() -> None:
        go = _held(journal)
        waiting = asyncio.wrap_future(journal.append([session("s1")]))
        waiting.cancel()
        go.set()
        assert await asyncio.wrap_future(journal.append([session("s2")])) == 2

    asyncio.run(main())
    assert journal.head == 2


def test_a_failing_subscriber_harms_nobody(journal: Journal) -> None:
    seen: list[int] = []

    def fails(_: Sequence[Recorded]) -> None:
        raise RuntimeError("a follower's bug")

    journal.subscribe(fails)
    unsubscribe = journal.subscribe(lambda facts: seen.extend(fact.seq for fact in facts))
    assert journal.append([session("s1")]).result() == 1
    unsubscribe()
    assert journal.append([session("s2")]).result() == 2
    assert seen == [1]


def test_run_rolls_back_what_it_raises(journal: Journal) -> None:
    def work(tx: Transaction) -> None:
        tx.append([session("s1")])
        assert tx.db.execute("SELECT count(*) FROM session").fetchone() == (1,)
        raise JournalFault("no")

    with pytest.raises(JournalFault):
        journal.run(work).result()
    assert journal.read() == []
    assert journal.sessions() == []
    assert journal.append([session("s1")]).result() == 1


def test_follow_reads_then_waits_until_close(tmp_path: Path) -> None:
    async def main() -> list[int]:
        journal = open_journal(tmp_path)
        journal.append([session("s1"), session("s2"), session("s3")]).result()
        seen: list[int] = []
        three, five = asyncio.Event(), asyncio.Event()

        async def follow() -> None:
            async for fact in journal.follow(after=1):
                seen.append(fact.seq)
                {3: three, 5: five}.get(fact.seq, asyncio.Event()).set()

        following = asyncio.create_task(follow())
        await asyncio.wait_for(three.wait(), 60)
        journal.append([session("s4")])
        journal.append([session("s5")])
        await asyncio.wait_for(five.wait(), 60)
        await asyncio.to_thread(journal.close)
        await asyncio.wait_for(following, 60)
        return seen

    assert asyncio.run(main()) == [2, 3, 4, 5]


def test_read_response_finds_its_own_facts_among_others(journal: Journal) -> None:
    journal.append([session("s1"), *accepted(journal, "resp_1")]).result()
    journal.append([*accepted(journal, "resp_12", parent="resp_1"), sampled("resp_12", 0)]).result()
    journal.append([sampled("resp_1", 0), sampled("resp_12", 1), finished("resp_1"), matched("resp_12")]).result()
    own = journal.read_response("resp_1")
    assert [(fact.seq, type(fact.event).__name__) for fact in own] == [
        (2, "RequestAccepted"),
        (3, "PromptRendered"),
        (7, "TokensSampled"),
        (9, "ResponseFinished"),
    ]
    assert [fact.seq for fact in journal.read_response("resp_1", after=3)] == [7, 9]
    assert [fact.seq for fact in journal.read_response("resp_12")] == [4, 5, 6, 8, 10]
    assert journal.read_response("resp_") == []


def test_tenants_last(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        local, alice = journal.tenant("local"), journal.tenant("alice")
        assert (local.id, alice.name) == ("local", "alice")
        assert alice.id.startswith("t_")
        assert len({local.secret, alice.secret, journal.secret}) == 3
        assert journal.digest(alice.id, b"x") != journal.digest("local", b"x")
        identity = journal.id, journal.secret
    with Journal.open(tmp_path) as journal:
        assert (journal.tenant("local"), journal.tenant("alice")) == (local, alice)
        assert (journal.id, journal.secret) == identity
        with pytest.raises(JournalFault, match="no tenant t_unknown"):
            journal.digest("t_unknown", b"x")


def test_recover_ends_what_a_crash_left_open(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.append([session("s1"), *whole_turn(journal, "r1"), *accepted(journal, "r2"), sampled("r2", 0)]).result()
    with Journal.open(tmp_path, clock=ticking()) as journal:
        assert [turn.response for turn in journal.running()] == ["r2"]
        (left,) = journal.recover()
        assert (left.response, left.status, left.output) == ("r2", "running", 1)
        event = journal.read()[-1].event
        assert event == ResponseFailed(tenant="local", response="r2", code="server_error", message=log.CRASH_MESSAGE)
        turn = journal.turn("r2")
        assert turn is not None
        assert (turn.status, turn.code, turn.message) == ("failed", "server_error", log.CRASH_MESSAGE)
        assert journal.running() == []
        assert journal.recover() == []


def test_stored_payload_is_salted(journal: Journal) -> None:
    journal.append([session("s1"), *accepted(journal, "r1"), sampled("r1", 0), sampled("r1", 0)]).result()
    with journal.transaction() as db:
        (one, two) = [payload for (payload,) in db.execute("SELECT payload FROM event WHERE payload IS NOT NULL")]
    assert one[16:] == two[16:] == (1000).to_bytes(4, "little")
    assert one[:16] != two[:16]


def test_a_fact_of_the_server_itself(journal: Journal) -> None:
    journal.append([Fact(ServerStarted(version="0.1.0", pid=7))]).result()
    with journal.transaction() as db:
        assert db.execute("SELECT tag, version FROM event").fetchall() == [("server_started", 1)]
