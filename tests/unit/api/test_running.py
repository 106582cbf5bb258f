"""Running responses when the journal cannot be written: the client hears the end, and the journal catches up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from tests.unit.journal.facts import accepted, open_journal, session
from tests.unit.journal.test_dependent import FILLING, freed, full
from zjournal import ask
from zjournal.api import running, running_checks, running_record
from zjournal.api.metrics import Metrics
from zjournal.api.running import Runs
from zjournal.api.snapshots import Snapshots
from zjournal.api.sse import Cut
from zjournal.dialects.chatml import ChatML
from zjournal.journal.events import LoopMet, ReaderCut, RequestAccepted, ResponseFinished, ResponseWaited, ToolCalled
from zjournal.journal.log import Journal
from zjournal.journal.verify import verify
from zjournal.link import wire
from zjournal.sessions import identity
from zjournal.sessions.fences import Check
from zjournal.sessions.follow import Tail, follow, recorded_tail
from zjournal.sessions.items import items_of
from zjournal.sessions.reading import Model, Terms
from zjournal.sessions.vocabulary import Tokens

WAIT_S = 60.0


class Engine:
    """An engine that only hears."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []
        self.kept: list[str] = []

    def generate(self, message: wire.Generate) -> None:
        pass

    def cancel(self, response: str, keep: bool = False) -> None:
        self.cancelled.append(response)
        self.kept += [response] if keep else []


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.005)


TEXTS = {1: b"<tool_call>", 2: b"</tool_call>", 3: b'{"name": "ls", "arguments": {}}', 4: b'{"name": "l'}
TEXTS |= {
    5: b'{"name": "ls", "arguments": {"path": "a',
    6: b'{"name": "ls", "arguments": {a}}',
    7: b'{"name": "ls", "argu',
}
CONTROL = frozenset({1, 2})
TOOLS = (ask.ToolSpec("ls"),)


class Served:
    """The API side of a model with a few tokens; the others are all an `a`."""

    model = Model(
        lambda token: TEXTS.get(token, b"a"),
        CONTROL,
        ChatML(Tokens({TEXTS[token].decode(): token for token in CONTROL})),
    )


def begin(
    runs: Runs,
    journal: Journal,
    response: str,
    tools: tuple[ask.ToolSpec, ...] = (),
    check: Check | None = None,
    stored: bool = True,
) -> None:
    facts = accepted(journal, response, stored=stored)
    journal.append(facts).result()
    request = facts[0].event
    assert isinstance(request, RequestAccepted)
    sampling = wire.Sampling(0.0, 1.0, 0, 7)
    generate = wire.Generate(request=response, tokens=b"", namespace="n", sampling=sampling, max_tokens=9)
    runs.begin(request, 4, Terms(tools), generate, check)


def runs_of(journal: Journal, engine: Engine) -> Runs:
    runs = Runs(journal, metrics := Metrics(), 60, Snapshots(journal, metrics, journal.path.parent, on=False))
    runs._life.ready = wire.Ready(fingerprint="f", kernels="k", context=1000, kv_tokens=1000)
    runs._life.client = engine  # type: ignore[assignment]
    runs._life.served = Served()  # type: ignore[assignment]
    return runs


def test_a_full_disk_fails_the_response_and_its_end_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_record, "OWED_RETRY_S", 0.02)

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


def test_a_fault_of_ours_ends_the_response_that_it_is_in_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once went up to the event loop, and all clients were lost; the one that resent met it again."""

    async def main(journal: Journal) -> None:
        engine = Engine()
        runs = runs_of(journal, engine)
        begin(runs, journal, "r1")
        begin(runs, journal, "r2")
        held = {name: runs.tail(name) for name in ("r1", "r2")}
        with monkeypatch.context() as broken:
            broken.setattr(running, "items_of", lambda *_: 1 // 0)
            runs.engine_said(wire.Tokens("r1", 0, wire.pack_ids([9, 9])))
            runs.engine_said(wire.Finished(request="r1", reason="stop", output=2))
        runs.engine_said(wire.Tokens("r2", 0, wire.pack_ids([9])))
        runs.engine_said(wire.Finished(request="r2", reason="stop", output=1))
        tails = [held["r1"], held["r2"]]
        await until(lambda: all(tail is not None and tail.end is not None for tail in tails))
        first, second = (tail.end for tail in tails if tail is not None)
        assert isinstance(first, ask.Broke) and first.code == "server_error"
        assert isinstance(second, ask.Ended) and second.reason == "stop"
        assert engine.cancelled == ["r1"] and len(runs) == 0
        kinds = [type(fact.event).__name__ for fact in journal.read_response("r1")]
        assert kinds[-2:] == ["TokensSampled", "ResponseFailed"]

    with open_journal(tmp_path) as journal:
        journal.append([session("s1")]).result()
        asyncio.run(main(journal))


class Slow(Check, frozen=True):
    """A check that takes its time."""

    def call(self, deltas: Sequence[ask.Delta], index: int) -> str:
        assert threading.current_thread() is not threading.main_thread()
        assert LET.wait(WAIT_S)
        return super().call(deltas, index)

    def answer(self, deltas: Sequence[ask.Delta]) -> str:
        return f"not that: {len(deltas)}"


LET = threading.Event()
LOOSE = ask.ToolSpec("ls", parameters=b'{"required": ["path"], "not": {}}')


def test_calls_are_looked_at_beside_the_event_loop_and_told_in_order(tmp_path: Path) -> None:
    async def main(journal: Journal) -> None:
        LET.clear()
        runs = runs_of(journal, Engine())
        begin(runs, journal, "r1", (LOOSE,), Slow((LOOSE,), ask.Format("json_object")))
        tail = runs.tail("r1")
        assert tail is not None
        runs.engine_said(wire.Tokens("r1", 0, wire.pack_ids([1, 3, 2, 1, 3, 2, 9])))
        runs.engine_said(wire.Finished(request="r1", reason="stop", output=7))
        await until(lambda: tail.durable == 7)
        assert tail.calls == 0 and tail.end is None, "no call is told before it is written down"
        LET.set()
        await until(lambda: tail.end is not None)
        assert tail.calls == 2 and len(runs) == 0

    with open_journal(tmp_path) as journal:
        journal.append([session("s1")]).result()
        asyncio.run(main(journal))
        facts = list(journal.read())
        called = [(fact.event.index, fact.payload) for fact in facts if isinstance(fact.event, ToolCalled)]
        assert [index for index, _ in called] == [0, 1]
        assert all(b"required property" in payload for _, payload in called)
        assert isinstance(facts[-1].event, ResponseFinished) and facts[-1].payload.startswith(b"not that")


def test_what_is_not_looked_at_when_a_response_fails_is_told_so(tmp_path: Path) -> None:
    async def main(journal: Journal) -> None:
        LET.clear()
        runs = runs_of(journal, Engine())
        begin(runs, journal, "r1", (LOOSE,), Slow((LOOSE,), None))
        tail = runs.tail("r1")
        assert tail is not None
        runs.engine_said(wire.Tokens("r1", 0, wire.pack_ids([1, 3, 2])))
        runs.engine_said(wire.Failed("r1", "engine_error", "gone"))
        await until(lambda: tail.end is not None)
        LET.set()

    with open_journal(tmp_path) as journal:
        journal.append([session("s1")]).result()
        asyncio.run(main(journal))
        payloads = [fact.payload for fact in journal.read() if isinstance(fact.event, ToolCalled)]
        assert payloads == [running_checks.UNCHECKED.encode()]


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


def test_what_the_guard_did_is_a_fact_and_a_loop_is_an_end(tmp_path: Path) -> None:
    async def main(journal: Journal) -> None:
        runs = runs_of(journal, Engine())
        begin(runs, journal, "r1")
        runs.engine_said(wire.Tokens("r1", 0, wire.pack_ids([5] * 9)))
        told = {"request": "r1", "kind": "token", "period": 1}
        runs.engine_said(wire.Looped(**told, action="excluded", at=8, begin=0, times=8))
        runs.engine_said(wire.Looped(**told, action="ended", at=9, begin=1, times=8))
        runs.engine_said(wire.Finished(request="r1", reason="loop", output=9))
        await until(lambda: (turn := journal.turn("r1")) is not None and turn.finished_us is not None)
        met = [fact.event for fact in journal.read() if isinstance(fact.event, LoopMet)]
        assert [(one.action, one.at, one.begin, one.times) for one in met] == [
            ("excluded", 8, 0, 8),
            ("ended", 9, 1, 8),
        ]
        turn = journal.turn("r1")
        assert turn is not None and (turn.status, turn.reason) == ("incomplete", "loop")

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


# --- tool calls ---------------------------------------------------------------------------------------


async def told_by(tail: Tail) -> list[ask.Step]:
    return [step async for step in follow(tail, Served.model.reader(Terms(TOOLS)))]


def called(journal: Journal, response: str = "r1") -> list[ToolCalled]:
    found = [fact.event for fact in journal.read() if isinstance(fact.event, ToolCalled)]
    return [event for event in found if event.response == response]


def test_a_call_is_a_fact_before_it_is_told_to_be_whole(tmp_path: Path) -> None:
    async def main(journal: Journal) -> None:
        runs = runs_of(journal, Engine())
        begin(runs, journal, "r1", TOOLS)
        tail = runs.tail("r1")
        assert tail is not None
        told: list[ask.Step] = []

        async def listen() -> None:
            async for step in follow(tail, Served.model.reader(Terms(TOOLS))):
                if isinstance(step, ask.CallEnded):
                    assert len(called(journal)) > step.index, "told before it was written down"
                told.append(step)

        listening = asyncio.create_task(listen())
        runs.engine_said(wire.Tokens("r1", 0, wire.pack_ids([1, 3, 2])))
        await until(lambda: listening.done() or any(isinstance(step, ask.CallEnded) for step in told))
        assert not listening.done(), listening.result()
        assert tail.end is None
        runs.engine_said(wire.Tokens("r1", 3, wire.pack_ids([1, 3])))  # without its closing tag, so it may go on
        runs.engine_said(wire.Finished(request="r1", reason="stop", output=5))
        await listening
        assert [step for step in told if isinstance(step, ask.CallEnded)] == [ask.CallEnded(0), ask.CallEnded(1)]
        secret = identity.item_secret(journal.secret, "r1")
        ids = [identity.call_id(secret, "r1", index) for index in (0, 1)]
        keys = [identity.call_key(journal.secret, "local", call_id) for call_id in ids]
        assert [(event.call, event.index) for event in called(journal)] == [(keys[0], 0), (keys[1], 1)]
        items = items_of([step for step in told if isinstance(step, ask.Delta)], ids.__getitem__)
        assert [item.call_id for item in items if isinstance(item, ask.Call)] == ids
        facts = journal.read_response("r1")
        assert await told_by(recorded_tail(facts)) == told

    with open_journal(tmp_path) as journal:
        journal.append([session("s1")]).result()
        asyncio.run(main(journal))


@pytest.mark.parametrize("reason", ["length", "stop", "cancelled"])
def test_a_call_that_was_cut_is_no_fact_and_is_told_as_cut(tmp_path: Path, reason: str) -> None:
    async def main(journal: Journal) -> None:
        runs = runs_of(journal, Engine())
        begin(runs, journal, "r1", TOOLS)
        tail = runs.tail("r1")
        assert tail is not None
        runs.engine_said(wire.Tokens("r1", 0, wire.pack_ids([1, 3, 2, 1, 4])))
        runs.engine_said(wire.Finished(request="r1", reason=reason, output=5))
        ends = [step for step in await told_by(tail) if isinstance(step, ask.CallEnded)]
        assert [end.truncated for end in ends] == [False]  # half a name is no call: it is told as text
        for name, token in (("r2", 5), ("r3", 7)):
            begin(runs, journal, name, TOOLS)
            other = runs.tail(name)
            assert other is not None
            runs.engine_said(wire.Tokens(name, 0, wire.pack_ids([1, token])))
            runs.engine_said(wire.Finished(request=name, reason=reason, output=2))
            ends = [step for step in await told_by(other) if isinstance(step, ask.CallEnded)]
            assert [(end.index, end.truncated) for end in ends] == [(0, True)]
            assert not called(journal, name)
        assert len(called(journal)) == 1

    with open_journal(tmp_path) as journal:
        journal.append([session("s1")]).result()
        asyncio.run(main(journal))


def test_a_call_whose_fact_was_lost_is_told_as_cut_then_and_ever_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_record, "OWED_RETRY_S", 0.02)

    async def main(journal: Journal) -> None:
        runs = runs_of(journal, Engine())
        begin(runs, journal, "r1", TOOLS)
        full(journal)
        runs.engine_said(wire.Tokens("r1", 0, wire.pack_ids([1, 3, 2, *[9] * FILLING])))
        tail = runs.tail("r1")
        assert tail is not None
        told = await told_by(tail)
        assert [step.truncated for step in told if isinstance(step, ask.CallEnded)] == [True]
        freed(journal)
        await until(lambda: runs.tail("r1") is None)
        again = await told_by(recorded_tail(journal.read_response("r1")))
        assert again[:-1] == told[:-1]
        assert not called(journal)

    with open_journal(tmp_path) as journal:
        journal.append([session("s1")]).result()
        asyncio.run(main(journal))


def test_what_was_wrong_with_a_call_is_written_down_where_it_can_be_erased(tmp_path: Path) -> None:
    async def main(journal: Journal) -> None:
        runs = runs_of(journal, Engine())
        begin(runs, journal, "r1", TOOLS)
        runs.engine_said(wire.Tokens("r1", 0, wire.pack_ids([1, 6, 2])))
        runs.engine_said(wire.Finished(request="r1", reason="stop", output=3))
        await until(lambda: (turn := journal.turn("r1")) is not None and turn.finished_us is not None)
        payloads = [fact.payload for fact in journal.read_response("r1") if isinstance(fact.event, ToolCalled)]
        assert payloads == [b"the arguments are not JSON"]

    with open_journal(tmp_path) as journal:
        journal.append([session("s1")]).result()
        asyncio.run(main(journal))


# --- silence ------------------------------------------------------------------------------------------


def waited(journal: Journal, response: str = "r1") -> list[tuple[int, int, bool]]:
    found = [fact.event for fact in journal.read() if isinstance(fact.event, ResponseWaited)]
    return [(event.position, event.done, event.queued) for event in found if event.response == response]


def test_silence_in_queue_prompt_and_answer_is_told_and_told_again_at_the_same_place(tmp_path: Path) -> None:
    async def main(journal: Journal) -> None:
        runs = runs_of(journal, Engine())
        begin(runs, journal, "r1")
        tail = runs.tail("r1")
        assert tail is not None
        live = asyncio.create_task(told_by(tail))
        now = time.monotonic()
        runs.keep_alive(now + running.KEEP_ALIVE_S / 2)
        assert tail.waits == [], "it has not been silent for long"
        runs.keep_alive(now + 11)
        runs.keep_alive(now + 12)
        await until(lambda: tail.waited == 1)
        runs.engine_said(wire.Matched("r1", cached=1, prompt=4))
        runs.engine_said(wire.Reading((("r1", 3), ("r0", 9))))
        runs.keep_alive(now + 22)
        # The token comes before the fact is durable: it is told behind it all the same.
        runs.engine_said(wire.Tokens("r1", 0, wire.pack_ids([9, 9])))
        runs.keep_alive(time.monotonic() + 11)
        runs.engine_said(wire.Tokens("r1", 2, wire.pack_ids([9])))
        runs.engine_said(wire.Finished(request="r1", reason="length", output=3, queue_us=1, prefill_us=1, decode_us=1))
        steps = await asyncio.wait_for(live, WAIT_S)
        a = ask.TextDelta("a")
        assert steps[:-1] == [
            ask.Waiting(0, 0, 4, queued=True),
            ask.Progress(1, 4),
            ask.Waiting(0, 3, 4),
            a,
            a,
            ask.Waiting(2, 4, 4),
            a,
        ]
        assert waited(journal) == [(0, 0, True), (0, 3, False), (2, 4, False)]
        assert await told_by(tail) == steps
        again = recorded_tail(journal.read_response("r1"))
        assert (await told_by(again))[:-1] == steps[:-1]
        runs.keep_alive(now + 99)
        assert len(waited(journal)) == 3, "it has ended"

    with open_journal(tmp_path) as journal:
        journal.append([session("s1")]).result()
        asyncio.run(main(journal))


def test_a_sign_of_life_that_cannot_be_written_is_never_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_record, "OWED_RETRY_S", 60)

    async def main(journal: Journal) -> None:
        runs = runs_of(journal, Engine())
        begin(runs, journal, "r1")
        tail = runs.tail("r1")
        assert tail is not None
        runs.engine_said(wire.Matched("r1", cached=1, prompt=4))
        full(journal)
        runs.engine_said(wire.Tokens("r1", 0, wire.pack_ids([9] * FILLING)))
        runs.keep_alive(time.monotonic() + 11)
        await until(lambda: tail.end is not None)
        assert len(tail.waits) == 1
        steps = await told_by(tail)
        assert not [step for step in steps if isinstance(step, ask.Waiting)]
        assert isinstance(steps[-1], ask.Broke)

    with open_journal(tmp_path) as journal:
        journal.append([session("s1")]).result()
        asyncio.run(main(journal))


def test_a_reader_that_was_cut_is_a_fact_while_its_response_runs_and_after(tmp_path: Path) -> None:
    async def main(journal: Journal) -> None:
        runs = runs_of(journal, Engine())
        begin(runs, journal, "r1")
        runs.reader_cut("local", "r1", Cut(70_000, 61.5))
        runs.engine_said(wire.Failed("r1", "engine_error", "It broke."))
        await until(lambda: (turn := journal.turn("r1")) is not None and turn.finished_us is not None)
        runs.reader_cut("local", "r1", Cut(3, 60.0))

        def cuts() -> list[ReaderCut]:
            return [fact.event for fact in journal.read() if isinstance(fact.event, ReaderCut)]

        await until(lambda: len(cuts()) == 2)
        assert [(cut.unread, cut.silent_us) for cut in cuts()] == [(70_000, 61_500_000), (3, 60_000_000)]
        assert isinstance(recorded_tail(journal.read_response("r1")).end, ask.Broke)

    with open_journal(tmp_path) as journal:
        journal.append([session("s1")]).result()
        asyncio.run(main(journal))


def test_what_is_parked_ends_as_failed_and_its_work_is_kept(tmp_path: Path) -> None:
    async def main(journal: Journal) -> None:
        engine = Engine()
        runs = runs_of(journal, engine)
        for response in ("r1", "r2"):
            begin(runs, journal, response)
        tails = [tail for response in ("r1", "r2") if (tail := runs.tail(response)) is not None]
        runs.cancel("r2")
        runs.engine_said(wire.Finished(request="r2", reason="cancelled", output=0))
        runs.engine_said(wire.Tokens("r1", 0, wire.pack_ids([9])))
        runs.park()
        assert engine.kept == ["r1"]
        runs.engine_said(wire.Finished(request="r1", reason="cancelled", output=1))
        await until(lambda: all(tail.end is not None for tail in tails))
        failed, cancelled = (tail.end for tail in tails)
        assert isinstance(failed, ask.Broke) and failed.code == "server_unavailable"
        assert failed.usage.output == 1
        assert isinstance(cancelled, ask.Ended) and cancelled.reason == "cancelled"

    with open_journal(tmp_path) as journal:
        journal.append([session("s1")]).result()
        asyncio.run(main(journal))


# --- warm-ups -----------------------------------------------------------------------------------------


def test_a_warm_up_ends_without_the_token_that_the_engine_had_to_sample(tmp_path: Path) -> None:
    async def main(journal: Journal) -> None:
        runs = runs_of(journal, Engine())
        facts = accepted(journal, "r1")
        request = facts[0].event
        assert isinstance(request, RequestAccepted)
        request = msgspec.structs.replace(request, max_tokens=0, history=b"h" * 16)
        journal.append([msgspec.structs.replace(facts[0], event=request), *facts[1:]]).result()
        sampling = wire.Sampling(0.0, 1.0, 0, 7)
        generate = wire.Generate(request="r1", tokens=b"", namespace="n", sampling=sampling, max_tokens=1)
        tail = runs.begin(request, 4, Terms(), generate)
        runs.engine_said(wire.Matched("r1", cached=1, prompt=4))
        runs.engine_said(wire.Tokens("r1", 0, wire.pack_ids([9])))
        runs.engine_said(wire.Finished(request="r1", reason="length", output=1, queue_us=1, prefill_us=1, decode_us=1))
        await until(lambda: tail.end is not None)
        assert tail.ids == []
        assert isinstance(tail.end, ask.Ended)
        assert (tail.end.reason, tail.end.usage) == ("stop", ask.Usage(4, 1, 0))
        turn = journal.turn("r1")
        assert turn is not None
        assert (turn.status, turn.output, turn.history) == ("completed", 0, b"h" * 16)

    with open_journal(tmp_path) as journal:
        journal.append([session("s1")]).result()
        asyncio.run(main(journal))


@pytest.mark.parametrize("held", [True, False])
def test_what_is_held_is_erased_when_it_is_released_and_not_at_its_end(tmp_path: Path, held: bool) -> None:
    async def main(journal: Journal) -> None:
        runs = Runs(journal, metrics := Metrics(), 0, Snapshots(journal, metrics, journal.path.parent, on=False))
        runs._life.ready = wire.Ready(fingerprint="f", kernels="k", context=1000, kv_tokens=1000)
        runs._life.client, runs._life.served = Engine(), Served()  # type: ignore[assignment]
        begin(runs, journal, "r1", stored=False)
        if held:
            runs.hold("r1")
        tail = runs.tail("r1")
        runs.engine_said(wire.Finished(request="r1", reason="stop", output=0))
        await until(lambda: tail is not None and tail.end is not None)

        def erased() -> bool:
            turn = journal.turn("r1")
            return turn is None or turn.erased

        if held:
            await asyncio.to_thread(journal.append([session("s2")]).result)  # behind whatever its end has asked for
            assert not erased() and runs.held == {"r1"}
            runs.release(["r1"])
        await until(erased)
        assert runs.held == frozenset()
        runs.release(["r1", "never"])

    with open_journal(tmp_path) as journal:
        journal.append([session("s1")]).result()
        asyncio.run(main(journal))
    assert verify(tmp_path).fault is None
