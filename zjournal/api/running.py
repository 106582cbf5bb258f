"""The running responses: what the engine says of them becomes facts, and followers hear of it.

The order is the promise: tokens are journaled in batches beside the stream, and the end of a response is
durable before anyone is told. Where the journal cannot be written, the response fails, its client is told so, and
its last facts are owed: they are written as soon as the journal takes them. All methods run on the event loop.

`running_one` is the state of one response, `running_checks` looks at its results beside the event loop,
`running_record` writes its facts and owes those that were refused, and `running_engine` is the engine's life.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from zjournal import ask, errors
from zjournal.api import running_checks, said
from zjournal.api.metrics import Metrics
from zjournal.api.running_engine import EngineLife
from zjournal.api.running_one import ANSWER, Running
from zjournal.api.running_record import Recorder
from zjournal.api.snapshots import MESSAGES, Snapshots
from zjournal.api.sse import Cut
from zjournal.journal import events
from zjournal.journal.log import Journal
from zjournal.journal.written import Written
from zjournal.link import wire
from zjournal.link.client import EngineClient
from zjournal.sessions import forks, identity
from zjournal.sessions.fences import Check
from zjournal.sessions.follow import Tail, ended_at
from zjournal.sessions.items import items_of
from zjournal.sessions.reading import Terms
from zjournal.sessions.served import Served

FLUSH_TOKENS = 64  # promise 3
FLUSH_S = 0.05
KEEP_ALIVE_S = 10.0  # silence after which clients are told that their response lives; they give up after 15 s or more
STOPPED = "The server stopped before this response was finished; ask again."

log = logging.getLogger("zjournal.api")

# What the engine says of one response.
Said = wire.Matched | wire.Restored | wire.NearMiss | wire.Tokens | wire.Looped | wire.Finished | wire.Failed

_CHANGES: dict[str, type[events.CacheAdmitted | events.CacheEvicted]] = {
    "admit": events.CacheAdmitted,
    "evict": events.CacheEvicted,
}


class Runs:
    """Owns the running responses. Listens to the engine (see link.client.Listener)."""

    def __init__(
        self,
        journal: Journal,
        metrics: Metrics,
        unstored_retention_s: float,
        snapshots: Snapshots,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self._journal = journal
        self._snapshots = snapshots
        self._metrics = metrics
        self._keep_alive_s = keep_alive_s
        self._parking = False
        self._running: dict[str, Running] = {}
        self._recorder = Recorder(journal, unstored_retention_s, self._lost)
        self._life = EngineLife(journal, self._recorder, metrics, snapshots)
        # Hears of tokens that were read or written, by tenant.
        self.spent: Callable[[str, int], None] = lambda tenant, tokens: None
        self.idle = asyncio.Event()
        self.idle.set()

    def serve(self, served: Served, engine: EngineClient) -> None:
        """Sets the model's API side and the engine."""
        self._life.serve(served, engine)

    @property
    def ready(self) -> wire.Ready | None:
        """What the engine said of itself, once its start is durable."""
        return self._life.ready

    @property
    def progress(self) -> float:
        """How much of the model the engine has loaded, of 1."""
        return self._life.progress

    @property
    def broken(self) -> wire.Broken | None:
        """Why the engine will never be ready."""
        return self._life.broken

    @property
    def broke(self) -> asyncio.Event:
        """Set with `broken`."""
        return self._life.broke

    @property
    def up(self) -> asyncio.Event:
        """Set when an engine first became ready."""
        return self._life.up

    def __len__(self) -> int:
        return len(self._running)

    def count(self, tenant: str) -> int:
        """How many answers are being made for a tenant; the choices of one request are one answer."""
        own = [running.accepted for running in self._running.values() if running.accepted.tenant == tenant]
        return len({accepted.first or accepted.response for accepted in own})

    def __contains__(self, response: str) -> bool:
        return response in self._running

    def tail(self, response: str) -> Tail | None:
        """The tail of a response whose facts are not all durable: it is running, or its end is owed."""
        running = self._running.get(response)
        return running.tail if running else self._recorder.owed(response)

    def begin(
        self,
        accepted: events.RequestAccepted,
        prompt: int,
        terms: Terms,
        ask: wire.Generate,
        check: Check | None = None,
    ) -> Tail:
        """Starts a response whose acceptance is durable; returns what followers read."""
        served, client = self._life.served, self._life.client
        assert served is not None
        secret = identity.item_secret(self._journal.secret, accepted.response)
        running = Running(accepted, prompt, served.model.reader(terms), secret, check)
        self._running[accepted.response] = running
        self._metrics.running(len(self._running))
        if not accepted.choice:  # the others' prompt is the same one
            self.spent(accepted.tenant, prompt)
        self.idle.clear()
        if self._life.ready is None or client is None:  # it died while the request was being written down
            self._fail(running, "engine_error", "The engine stopped before the request began.")
        else:
            client.generate(ask)
        return running.tail

    def keep_alive(self, now: float) -> None:
        """Tells the clients of responses that have been silent for `keep_alive_s` that these live. Call it often.

        `now` is on the clock of time.monotonic. What is told is a fact first, at a fixed place in the answer.
        """
        for running in list(self._running.values()):
            if now - running.heard >= self._keep_alive_s and not running.ending:
                running.heard = now
                self._waited(running)

    def _waited(self, running: Running) -> None:
        tail = running.tail
        waiting = ask.Waiting(len(tail.ids), running.read, running.prompt, queued=tail.progress is None)
        tail.waits.append(waiting)
        told = len(tail.waits)

        def durable() -> None:
            tail.waited = max(tail.waited, told)
            tail.wake()

        self._recorder.record(running, [said.waited(running.accepted, waiting)], durable)

    def reader_cut(self, tenant: str, response: str, cut: Cut) -> None:
        """Writes down that a client of the response did not read and was cut."""
        log.warning(
            "%s: its client read nothing for %.0f s and was cut, %d bytes behind", *(response, cut.silent_s, cut.unread)
        )
        self._metrics.reader_cut()
        event = events.ReaderCut(
            tenant=tenant, response=response, unread=cut.unread, silent_us=round(cut.silent_s * 1_000_000)
        )
        running = self._running.get(response)
        if running is not None and not running.ending:
            self._recorder.record(running, [events.Fact(event)], lambda: None)
        else:
            self._recorder.when_durable([events.Fact(event)], lambda: None, lambda fault: None)

    def cancel(self, response: str) -> None:
        """Gives up a response; what is not running is ignored."""
        if self._life.client is not None and response in self._running:
            self._life.client.cancel(response)

    def abandon(self, choices: Sequence[events.RequestAccepted], ends: list[events.Fact], written: Written) -> None:
        """Writes down the `ends` of a request that ended before it began, once its acceptance is `written`."""
        self._recorder.abandon(choices, ends, written)

    def hold(self, response: str) -> None:
        """An unstored response can be continued until it is released."""
        self._recorder.hold(response)

    @property
    def held(self) -> frozenset[str]:
        """The responses that are held now."""
        return self._recorder.held

    def release(self, responses: Sequence[str]) -> None:
        """Unstored responses, the oldest first, cannot be continued any more; those that are not held are ignored."""
        for response in reversed(responses):
            self._recorder.release(response, response not in self._running)

    def forget(self, responses: tuple[str, ...]) -> None:
        """Gives up what the engine keeps of responses whose content was erased."""
        if self._life.client is not None and responses:
            self._life.client.forget(responses)

    def park(self) -> None:
        """Ends whatever still runs, for the server stops. What is computed is kept for who asks again.

        It ends as failed: that is what clients try again.
        """
        self._parking = True
        for response, running in list(self._running.items()):
            if self._life.client is not None and not running.ending:
                self._life.client.cancel(response, keep=True)

    def give_up(self) -> None:
        """Ends whatever still runs without waiting for the engine, which did not answer."""
        for running in list(self._running.values()):
            self._fail(running, errors.Unavailable.code, STOPPED)

    # --- what the engine says ---------------------------------------------------------------------------

    def engine_loading(self, progress: float) -> None:
        self._life.progress = progress

    def engine_ready(self, ready: wire.Ready, pid: int) -> None:
        self._life.came(ready, pid)

    def engine_broken(self, broken: wire.Broken) -> None:
        self._life.could_not_start(broken)

    def engine_crashed(self, pid: int, status: int, running: tuple[str, ...]) -> None:
        self._life.crashed(pid, status, running)
        for response in running:
            if response in self._running:  # it may have ended already, when the journal failed under it
                message = "The engine stopped while this response was running."
                self._fail(self._running[response], "engine_error", message)

    def engine_stopped(self, pid: int, status: int) -> None:
        self._life.stopped(pid, status)

    def engine_said(self, message: wire.FromEngine) -> None:
        match message:
            case wire.CacheChanged():
                self._cache_changed(message)
            case wire.Gauges():
                self._metrics.gauges(message)
            case wire.Reading(prompts=prompts):
                for request, done in prompts:
                    if (read := self._running.get(request)) is not None:
                        read.read = max(read.read, done)  # it falls back where its memory was needed
            case (
                wire.Matched()
                | wire.Restored()
                | wire.NearMiss()
                | wire.Tokens()
                | wire.Looped()
                | wire.Finished()
                | wire.Failed()
            ):
                running = self._running.get(message.request)
                if running is not None and not running.ending:  # else the journal failed under it and it was told so
                    self._hear(running, message)
            case _:
                assert isinstance(message, MESSAGES), message
                self._snapshots.said(message)

    def _hear(self, running: Running, message: Said) -> None:
        """Takes what the engine says of one response; a fault of ours in it ends that response and no other."""
        try:
            self._response_said(running, message)
        except Exception:
            log.exception("%s: what the engine said of it could not be told", running.accepted.response)
            self.cancel(running.accepted.response)
            self._fail(running, "server_error", "The server failed on this response.")

    def _response_said(self, running: Running, message: Said) -> None:
        match message:
            case wire.Restored() | wire.NearMiss():
                if isinstance(message, wire.NearMiss):
                    log.info(
                        "%s left the snapshot of %s at token %d of %d; `zj sessions diff` of the two shows why",
                        *(message.request, message.nearest, message.position, message.tokens),
                    )
                event = said.of_disk(running.accepted.tenant, message)
                self._recorder.record(running, [events.Fact(event)], lambda: None)
            case wire.Matched():
                self._matched(running, message)
            case wire.Tokens():
                self._tokens(running, message)
            case wire.Looped():
                self._looped(running, message)
            case wire.Finished(reason="cancelled") if self._parking:
                self._fail(running, errors.Unavailable.code, STOPPED)
            case wire.Finished():
                self._finish(running, message)
            case wire.Failed():
                self._fail(running, message.code, message.message)

    def _cache_changed(self, message: wire.CacheChanged) -> None:
        kind = _CHANGES[message.change]
        event = kind(
            response=message.request, namespace=message.namespace, tokens=message.tokens, blocks=message.blocks
        )
        client = self._life.client
        assert client is not None
        self._recorder.when_durable([events.Fact(event)], lambda: client.committed(message.fact), lambda fault: None)

    def _matched(self, running: Running, message: wire.Matched) -> None:
        running.cached = running.read = message.cached
        running.tail.progress = ask.Progress(message.cached, message.prompt)
        running.tail.admitted = len(running.tail.waits)
        running.matched = said.matched(running.accepted.tenant, message)

        def durable() -> None:
            running.matched = None

        self._recorder.record(running, [events.Fact(running.matched)], durable)
        self._metrics.matched(message)
        if running.accepted.forks or message.reason == forks.FORKED:
            loop = asyncio.get_running_loop()
            loop.run_in_executor(None, self._count_fork, running.accepted, running.matched)  # it reads the journal
        running.tail.wake()

    def _count_fork(self, accepted: events.RequestAccepted, matched: events.CacheMatched) -> None:
        try:
            nearest = self._journal.turn(matched.nearest) if matched.nearest else None
            parent = self._journal.turn(accepted.parent) if accepted.parent else None
        except errors.Fault as fault:
            log.warning("%s: why its prompt parted cannot be counted: %s", accepted.response, fault.message)
            return
        cause = forks.cause(accepted, matched, nearest, parent)
        if cause is not None:
            self._metrics.forked(cause)

    def _tokens(self, running: Running, message: wire.Tokens) -> None:
        tail = running.tail
        if running.warms:
            return  # the engine has to sample one, to come to an end
        assert message.position == len(tail.ids), (message.position, len(tail.ids))
        if running.first_token is None:
            running.first_token = time.monotonic()
            running.read = running.prompt
            self._metrics.ttft(running.first_token - running.started)
        ids = wire.unpack_ids(message.ids)
        tail.ids.extend(ids)
        if message.logprobs:
            tail.logprobs.extend(wire.cut_logprobs(message.logprobs, len(ids)))
        assert len(tail.logprobs) == (len(tail.ids) if running.accepted.logprobs >= 0 else 0)
        for token in ids:
            running.hear(running.reader.feed(token))
        running_checks.look(running, self._looked_at)
        if len(tail.ids) - running.flushed >= FLUSH_TOKENS or running.told > running.calls:
            self._flush(running)
        elif running.timer is None:
            running.timer = asyncio.get_running_loop().call_later(FLUSH_S, self._flush, running)
        tail.wake()

    def _looped(self, running: Running, message: wire.Looped) -> None:
        """Writes down what the guard met and did."""
        log.info(
            "%s: the guard has %s at token %d: a %s of %d tokens, %d times from token %d on",
            *(message.request, message.action, message.at, message.kind, message.period, message.times, message.begin),
        )
        self._recorder.record(running, [events.Fact(said.looped(running.accepted.tenant, message))], lambda: None)
        self._metrics.looped(message)

    def _take_unflushed(self, running: Running) -> list[events.Fact]:
        if running.timer is not None:
            running.timer.cancel()
            running.timer = None
        called = running_checks.called(running, self._journal.secret)
        facts = [*said.sampled(running.accepted, running.tail, running.flushed), *called]
        running.flushed = len(running.tail.ids)
        running.calls += len(called)
        for fact in called:
            self._metrics.called("faulty" if fact.payload else "whole")
        return facts

    def _looked_at(self, running: Running) -> None:
        """Goes on with what waited for a result that was looked at."""
        if running.told > running.calls:
            self._flush(running)
        if running.finished is not None:
            self._finish_looked_at(running, running.finished)

    def _flush(self, running: Running) -> None:
        """Hands the tokens since the last flush to the journal."""
        facts = self._take_unflushed(running)
        upto, calls = running.flushed, running.calls
        if not facts:
            return

        def durable() -> None:
            running.tail.durable = max(running.tail.durable, upto)
            running.tail.calls = max(running.tail.calls, calls)
            running.tail.wake()

        self._recorder.record(running, facts, durable)

    def _finish(self, running: Running, message: wire.Finished) -> None:
        assert message.output == len(running.tail.ids) or running.warms, (message.output, len(running.tail.ids))
        running.hear(running.reader.end())
        running_checks.look(running, self._looked_at)
        running_checks.look_at_answer(running, self._looked_at)
        running.finished = message
        self._finish_looked_at(running, message)

    def _finish_looked_at(self, running: Running, message: wire.Finished) -> None:
        """Ends a response, unless something in it is still looked at: then it is called again."""
        if running.looking:
            return
        accepted = running.accepted
        reason = "stop" if running.warms and message.reason == "length" else message.reason
        answer = () if running.warms else items_of(running.deltas, running.call_id)
        finished = events.ResponseFinished(
            tenant=accepted.tenant,
            response=accepted.response,
            reason=reason,
            output=len(running.tail.ids),
            # A turn of a replay has no history before it: nothing shall be taken for a continuation of it.
            history=identity.history(accepted.history, answer) if accepted.history else b"",
            queue_us=message.queue_us,
            prefill_us=message.prefill_us,
            decode_us=message.decode_us,
        )
        end = ask.Ended(reason, running.usage, ended_at(accepted, finished))  # type: ignore[arg-type]
        self._end(running, finished, end, running.wrong.get(ANSWER, "").encode("utf-8", "backslashreplace"))

    def _fail(self, running: Running, code: str, message: str) -> None:
        accepted = running.accepted
        failed = events.ResponseFailed(tenant=accepted.tenant, response=accepted.response, code=code, message=message)
        self._end(running, failed, ask.Broke(code, message, running.usage))

    def _end(self, running: Running, event: events.AnyEvent, end: ask.Ended | ask.Broke, payload: bytes = b"") -> None:
        """Commits the end, then tells it."""
        if running.ending:
            return
        running.ending = True
        facts = [*self._take_unflushed(running), events.Fact(event, payload)]

        def durable() -> None:
            running.tail.calls = running.calls
            self._ended(running, end)
            self._recorder.erase_unkept(running)

        self._recorder.record(running, facts, durable)

    def _ended(self, running: Running, end: ask.Ended | ask.Broke) -> None:
        self._log_end(running, end)
        running.tail.durable = len(running.tail.ids)
        running.tail.end = end
        self._running.pop(running.accepted.response, None)
        self._metrics.running(len(self._running))
        self._metrics.ended(end)
        self.spent(running.accepted.tenant, end.usage.output)
        running.tail.wake()
        if not self._running:
            self.idle.set()

    def _log_end(self, running: Running, end: ask.Ended | ask.Broke) -> None:
        """One line for each response, with numbers and no content."""
        outcome = end.reason if isinstance(end, ask.Ended) else f"failed ({end.code})"
        ttft = "none" if running.first_token is None else f"{(running.first_token - running.started) * 1000:.0f} ms"
        log.info(
            "%s %s: prompt %d, cached %d, output %d, TTFT %s, %.2f s in all",
            running.accepted.response,
            outcome,
            running.prompt,
            running.cached,
            len(running.tail.ids),
            ttft,
            time.monotonic() - running.started,
        )

    def _lost(self, running: Running, end: ask.Broke) -> None:
        """The journal failed under a response, which is owed its last facts now."""
        self.cancel(running.accepted.response)
        self._ended(running, end)
