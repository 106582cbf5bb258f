"""Running responses when the journal cannot be written: the client hears the end, and the journal catches up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.journal.facts import accepted, open_journal, session
from tests.unit.journal.test_dependent import FILLING, freed, full
from zjournal import ask
from zjournal.api import running
from zjournal.api.metrics import Metrics
from zjournal.api.running import Runs
from zjournal.api.snapshots import Snapshots
from zjournal.journal.events import RequestAccepted
from zjournal.journal.log import Journal
from zjournal.journal.verify import verify
from zjournal.link import wire

WAIT_S = 10.0


class Engine:
    """An engine that only hears."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []

    def generate(self, message: wire.Generate) -> None:
        pass

    def cancel(self, response: str) -> None:
        self.cancelled.append(response)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.005)


def begin(runs: Runs, journal: Journal, response: str) -> None:
    facts = accepted(journal, response)
    journal.append(facts).result()
    request = facts[0].event
    assert isinstance(request, RequestAccepted)
    sampling = wire.Sampling(0.0, 1.0, 0, 7)
    generate = wire.Generate(request=response, tokens=b"", namespace="n", sampling=sampling, max_tokens=9)
    runs.begin(request, 4, (), generate)


def runs_of(journal: Journal, engine: Engine) -> Runs:
    runs = Runs(journal, metrics := Metrics(), 60, Snapshots(journal, metrics, journal.path.parent, on=False))
    runs.ready = wire.Ready(fingerprint="f", kernels="k", context=1000, kv_tokens=1000)
    runs._engine = engine  # type: ignore[assignment]
    return runs


def test_a_full_disk_fails_the_response_and_its_end_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "OWED_RETRY_S", 0.02)

    async def main(journal: Journal) -> None:
        engine = Engine()
        runs = runs_of(journal, engine)
        begin(runs, journal, "r1")
        full(journal)
        runs.engine_said(wire.Matched("r1", cached=3, prompt=4))
        runs.engine_said(wire.Tokens("r1", 0, wire.pack_ids(range(FILLING))))
        tail = runs.tail("r1")
        assert tail is not None
        await until(lambda: tail.end is not None)
        assert isinstance(tail.end, ask.Broke)
        assert tail.end.code == "journal_unavailable"
        assert tail.end.usage == ask.Usage(prompt=4, cached=3, output=FILLING)
        assert engine.cancelled == ["r1"]
        assert len(runs) == 0 and runs.idle.is_set()
        assert runs.tail("r1") is tail, "who asks meanwhile must not wait for facts that nobody writes"
        turn = journal.turn("r1")
        assert turn is not None and turn.status == "running"

        freed(journal)
        await until(lambda: runs.tail("r1") is None)
        turn = journal.turn("r1")
        assert turn is not None
        assert (turn.status, turn.code) == ("failed", "journal_unavailable")
        assert (turn.prompt, turn.cached, turn.output) == (4, 3, FILLING)

    with open_journal(tmp_path) as journal:
        journal.append([session("s1")]).result()
        asyncio.run(main(journal))
    assert verify(tmp_path).fault is None


def test_an_end_is_not_written_after_tokens_that_were_lost(tmp_path: Path) -> None:
    """The disk is full for one moment, between a batch of tokens and the end."""

    async def main(journal: Journal) -> None:
        runs = runs_of(journal, Engine())
        begin(runs, journal, "r1")
        full(journal)
        runs.engine_said(wire.Tokens("r1", 0, wire.pack_ids(range(FILLING))))
        freed(journal)  # waits for the writer; what it said about the tokens is not heard here before the end
        runs.engine_said(wire.Failed("r1", "engine_error", "It broke."))
        tail = runs.tail("r1")
        assert tail is not None
        await until(lambda: tail.end is not None)
        assert isinstance(tail.end, ask.Broke) and tail.end.code == "journal_unavailable"
        turn = journal.turn("r1")
        assert turn is not None and turn.status == "running" and turn.output == 0

    with open_journal(tmp_path) as journal:
        journal.append([session("s1")]).result()
        asyncio.run(main(journal))
    assert verify(tmp_path).fault is None


def test_giving_up_ends_what_the_engine_does_not_answer_for(tmp_path: Path) -> None:
    async def main(journal: Journal) -> None:
        runs = runs_of(journal, Engine())
        begin(runs, journal, "r1")
        tail = runs.tail("r1")
        assert tail is not None
        runs.give_up()
        await until(lambda: tail.end is not None)
        assert isinstance(tail.end, ask.Broke) and tail.end.code == "server_unavailable"
        turn = journal.turn("r1")
        assert turn is not None and turn.status == "failed"

    with open_journal(tmp_path) as journal:
        journal.append([session("s1")]).result()
        asyncio.run(main(journal))


def test_what_the_disk_gave_is_written_before_the_match_that_counts_it(tmp_path: Path) -> None:
    async def main(journal: Journal) -> None:
        runs = runs_of(journal, Engine())
        begin(runs, journal, "r1")
        runs.engine_said(wire.NearMiss("r1", "r0", 1500, 1600))
        shares = {"space": b"s" * 32, "end": b"e" * 32, "estimate_us": 5, "recompute_us": 50}
        for tier, tokens in (("ssd", 1144), ("host", 256)):
            runs.engine_said(
                wire.Restored(request="r1", tier=tier, tokens=tokens, file_bytes=9, read_us=4, **shares)  # type: ignore[arg-type]
            )
        runs.engine_said(wire.Matched("r1", 1500, 1700, "host", "forked", "r0", restored=1400, restored_host=256))
        runs.engine_said(wire.Failed("r1", "engine_error", "It broke."))
        await until(lambda: (turn := journal.turn("r1")) is not None and turn.finished_us is not None)
        told = [fact.event for fact in journal.read() if fact.event.tenant == "local"][3:]
        assert [type(event).__name__ for event in told] == [
            "CacheNearlyMet",
            "CacheRestored",
            "CacheRestored",
            "CacheMatched",
            "ResponseFailed",
        ]
        turn = journal.turn("r1")
        assert turn is not None and (turn.cached, turn.restored, turn.restored_host) == (1500, 1400, 256)

    with open_journal(tmp_path) as journal:
        journal.append([session("s1")]).result()
        asyncio.run(main(journal))
