"""The running responses: what the engine says of them becomes facts, and followers hear of it.

The order is the promise: tokens are journaled in batches beside the stream, and the end of a response is
durable before anyone is told. Where the journal cannot be written, the response fails, its client is told so, and
its last facts are owed: they are written as soon as the journal takes them. All methods run on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from zjournal import ask, errors
from zjournal.api import said
from zjournal.api.metrics import Metrics
from zjournal.api.snapshots import MESSAGES, Snapshots
from zjournal.api.sse import Cut
from zjournal.journal import events, retention
from zjournal.journal.log import SERVER_TENANT, Journal
from zjournal.journal.written import Written
from zjournal.link import wire
from zjournal.link.client import EngineClient
from zjournal.sessions import identity
from zjournal.sessions.fences import Check
from zjournal.sessions.follow import Reader, Tail, ended_at
from zjournal.sessions.items import items_of
from zjournal.sessions.reading import Terms
from zjournal.sessions.served import Served

FLUSH_TOKENS = 64  # promise 3
FLUSH_S = 0.05
KEEP_ALIVE_S = 10.0  # silence after which clients are told that their response lives; they give up after 15 s or more
STOPPED = "The server stopped before this response was finished; ask again."
ANSWER = -1  # in place of a call's index: the text of the answer
UNCHECKED = "it was not checked"
OWED_RETRY_S = 1.0  # how often facts that the journal refused are offered again

log = logging.getLogger("zjournal.api")

# What the engine says of one response.
Said = wire.Matched | wire.Restored | wire.NearMiss | wire.Tokens | wire.Looped | wire.Finished | wire.Failed

_CHANGES: dict[str, type[events.CacheAdmitted | events.CacheEvicted]] = {
    "admit": events.CacheAdmitted,
    "evict": events.CacheEvicted,
}


class Running:
    """One response between its acceptance and its end; owned by `Runs`."""

    def __init__(
        self, accepted: events.RequestAccepted, prompt: int, reader: Reader, secret: bytes, check: Check | None = None
    ) -> None:
        """`secret` is the response's own, which ids of its calls are made of."""
        self.accepted = accepted
        self.check = check
        self.tail = Tail()
        self.reader = reader
        self.secret = secret
        self.deltas: list[ask.Delta] = []  # what it has said by now
        self.whole: list[ask.CallEnded] = []  # the calls in it that are whole
        self.calls = 0  # of them, those whose facts were handed to the journal
        self.looked = 0  # of them, those that `check` has or needs not
        self.looking: set[int] = set()  # the calls, or ANSWER, that a thread looks at
        self.wrong: dict[int, str] = {}  # what was found wrong with them
        self.finished: wire.Finished | None = None  # it ends once nothing is looked at any more
        self.started = time.monotonic()
        self.heard = self.started  # when there was something to tell of it last
        self.read = 0  # prompt tokens that have KV
        self.first_token: float | None = None
        self.prompt = prompt
        self.cached = 0
        self.flushed = 0  # tokens handed to the journal
        self.timer: asyncio.TimerHandle | None = None
        self.ending = False
        self.lost = False  # a fact of it could not be written
        self.matched: events.CacheMatched | None = None  # while it is not durable
        self.last: Written | None = None  # the append before the next one

    @property
    def usage(self) -> ask.Usage:
        return ask.Usage(self.prompt, self.cached, len(self.tail.ids))

    @property
    def warms(self) -> bool:
        """Whether it only reads its prompt, for a request to come."""
        return self.accepted.max_tokens == 0

    def hear(self, deltas: list[ask.Delta]) -> None:
        """What it says next."""
        self.deltas += deltas
        if deltas:
            self.heard = time.monotonic()
        self.whole += [delta for delta in deltas if isinstance(delta, ask.CallEnded) and not delta.truncated]

    @property
    def told(self) -> int:
        """How many of its whole calls can become facts: not those that are still looked at, nor any behind."""
        return next((n for n, one in enumerate(self.whole) if one.index in self.looking), len(self.whole))

    def call_id(self, index: int) -> str:
        """The id of one of its calls."""
        return identity.call_id(self.secret, self.accepted.response, index)


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
        self._unstored_retention_s = unstored_retention_s
        self._keep_alive_s = keep_alive_s
        self._parking = False
        self._running: dict[str, Running] = {}
        self._owed: dict[str, Running] = {}  # ended and told so; the journal does not know their end yet
        self._served: Served | None = None
        self._engine: EngineClient | None = None
        self._coming: tuple[wire.Ready, int] | None = None  # the engine that is up, and its pid
        self.ready: wire.Ready | None = None  # what it said, once its start is durable
        self.progress = 0.0
        self.broken: wire.Broken | None = None
        # Hears of tokens that were read or written, by tenant.
        self.spent: Callable[[str, int], None] = lambda tenant, tokens: None
        self.broke = asyncio.Event()
        self.up = asyncio.Event()  # set when an engine first became ready
        self.idle = asyncio.Event()
        self.idle.set()
        journal.tenant(SERVER_TENANT)  # made here, so that it is known wherever a start is journaled

    def serve(self, served: Served, engine: EngineClient) -> None:
        """Sets the model's API side and the engine."""
        self._served = served
        self._engine = engine
        self._record_start()

    def __len__(self) -> int:
        return len(self._running)

    def count(self, tenant: str) -> int:
        """How many of them are a tenant's."""
        return sum(running.accepted.tenant == tenant for running in self._running.values())

    def __contains__(self, response: str) -> bool:
        return response in self._running

    def tail(self, response: str) -> Tail | None:
        """The tail of a response whose facts are not all durable: it is running, or its end is owed."""
        running = self._running.get(response) or self._owed.get(response)
        return running.tail if running else None

    def begin(
        self,
        accepted: events.RequestAccepted,
        prompt: int,
        terms: Terms,
        ask: wire.Generate,
        check: Check | None = None,
    ) -> Tail:
        """Starts a response whose acceptance is durable; returns what followers read."""
        assert self._served is not None
        secret = identity.item_secret(self._journal.secret, accepted.response)
        running = Running(accepted, prompt, self._served.model.reader(terms), secret, check)
        self._running[accepted.response] = running
        self._metrics.running(len(self._running))
        self.spent(accepted.tenant, prompt)
        self.idle.clear()
        if self.ready is None or self._engine is None:  # it died while the request was being written down
            self._fail(running, "engine_error", "The engine stopped before the request began.")
        else:
            self._engine.generate(ask)
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

        self._record(running, [said.waited(running.accepted, waiting)], durable)

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
            self._record(running, [events.Fact(event)], lambda: None)
        else:
            self._when_durable([events.Fact(event)], lambda: None, lambda fault: None)

    def cancel(self, response: str) -> None:
        """Gives up a response; what is not running is ignored."""
        if self._engine is not None and response in self._running:
            self._engine.cancel(response)

    def forget(self, responses: tuple[str, ...]) -> None:
        """Gives up what the engine keeps of responses whose content was erased."""
        if self._engine is not None and responses:
            self._engine.forget(responses)

    def park(self) -> None:
        """Ends whatever still runs, for the server stops. What is computed is kept for who asks again.

        It ends as failed: that is what clients try again.
        """
        self._parking = True
        for response, running in list(self._running.items()):
            if self._engine is not None and not running.ending:
                self._engine.cancel(response, keep=True)

    def give_up(self) -> None:
        """Ends whatever still runs without waiting for the engine, which did not answer."""
        for running in list(self._running.values()):
            self._fail(running, errors.Unavailable.code, STOPPED)

    # --- what the engine says ---------------------------------------------------------------------------

    def engine_loading(self, progress: float) -> None:
        self.progress = progress

    def engine_ready(self, ready: wire.Ready, pid: int) -> None:
        self._coming = ready, pid
        self._record_start()
        log.info(
            "engine ready: pid %d, %s, context %d, KV %d tokens", pid, ready.kernels, ready.context, ready.kv_tokens
        )
        if ready.kernels.startswith("torch"):
            log.warning("without the C kernels this is many times slower; install a C compiler, then zjournal again")
        if ready.kv_tokens < ready.context:
            log.warning(
                "the KV memory holds %d tokens: longer requests are refused, though the context is %d; see kv_memory",
                ready.kv_tokens,
                ready.context,
            )

    def _record_start(self) -> None:
        """Journals the start of the engine, once the tokenizer is known as well; then requests may come.

        So whatever was rendered can be read with what the last start before it names.
        """
        coming, served = self._coming, self._served
        if coming is None or served is None:
            return
        ready, pid = coming
        vocabulary, template = served.vocabulary, served.template.source.encode()
        started = events.EngineStarted(
            tenant=SERVER_TENANT,
            pid=pid,
            model=served.id,
            fingerprint=ready.fingerprint,
            kernels=ready.kernels,
            context=ready.context,
            kv_tokens=ready.kv_tokens,
            vocabulary=self._journal.digest(SERVER_TENANT, vocabulary),
            template=self._journal.digest(SERVER_TENANT, template),
            parts=tuple(sorted(ready.parts.items())),
            unstable=served.unstable,
        )

        def durable() -> None:
            if self._coming is coming:  # else it has died meanwhile
                self.ready = ready
                self.up.set()
                self._snapshots.engine_ready(started)

        def again() -> None:
            if self._coming is coming:
                self._record_start()

        def refused(fault: errors.Fault) -> None:
            log.error("the start of the engine could not be journaled: %s", fault.message)
            asyncio.get_running_loop().call_later(OWED_RETRY_S, again)

        self._when_durable([events.Fact(started, contents=(vocabulary, template))], durable, refused)

    def engine_broken(self, broken: wire.Broken) -> None:
        self.broken = broken
        self.ready = self._coming = None
        self.broke.set()

    def engine_crashed(self, pid: int, status: int, running: tuple[str, ...]) -> None:
        self.ready = self._coming = None
        self.progress = 0.0
        self._snapshots.engine_gone()
        self._journal.append([events.Fact(events.EngineCrashed(pid=pid, status=status, running=running))])
        self._metrics.engine_crashed()
        for response in running:
            if response in self._running:  # it may have ended already, when the journal failed under it
                message = "The engine stopped while this response was running."
                self._fail(self._running[response], "engine_error", message)

    def engine_stopped(self, pid: int, status: int) -> None:
        """It ended as asked. One whose start is not durable leaves no trace of its end either."""
        started = self.ready is not None
        self.ready = self._coming = None
        if started:
            self._journal.append([events.Fact(events.EngineStopped(pid=pid, status=status))])

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
                self._record(running, [events.Fact(said.of_disk(running.accepted.tenant, message))], lambda: None)
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
        engine = self._engine
        assert engine is not None
        self._when_durable([events.Fact(event)], lambda: engine.committed(message.fact), lambda fault: None)

    def _matched(self, running: Running, message: wire.Matched) -> None:
        running.cached = running.read = message.cached
        running.tail.progress = ask.Progress(message.cached, message.prompt)
        running.tail.admitted = len(running.tail.waits)
        running.matched = said.matched(running.accepted.tenant, message)

        def durable() -> None:
            running.matched = None

        self._record(running, [events.Fact(running.matched)], durable)
        self._metrics.matched(message)
        running.tail.wake()

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
        self._look(running)
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
        self._record(running, [events.Fact(said.looped(running.accepted.tenant, message))], lambda: None)
        self._metrics.looped(message)

    def _take_unflushed(self, running: Running) -> list[events.Fact]:
        if running.timer is not None:
            running.timer.cancel()
            running.timer = None
        facts = [*said.sampled(running.accepted, running.tail, running.flushed), *self._called(running)]
        running.flushed = len(running.tail.ids)
        return facts

    def _called(self, running: Running) -> list[events.Fact]:
        """The facts of the calls that are whole and are no facts yet."""
        tenant, response = running.accepted.tenant, running.accepted.response
        facts = []
        whole = running.whole if running.ending else running.whole[: running.told]
        for ended in whole[running.calls :]:
            key = identity.call_key(self._journal.secret, tenant, running.call_id(ended.index))
            called = events.ToolCalled(tenant=tenant, response=response, call=key, index=ended.index)
            unknown = UNCHECKED if ended.index in running.looking else ""  # it ends without having been looked at
            wrong = ended.fault or running.wrong.get(ended.index, unknown)
            facts.append(events.Fact(called, payload=wrong.encode("utf-8", "backslashreplace")))
            self._metrics.called("faulty" if wrong else "whole")
        running.calls += len(facts)
        return facts

    def _look(self, running: Running) -> None:
        """Has calls that are whole looked at."""
        check = running.check
        for ended in running.whole[running.looked :]:
            if check is not None and not ended.fault and check.concerns(running.deltas, ended.index):
                self._beside(running, ended.index, partial(check.call, tuple(running.deltas), ended.index))
        running.looked = len(running.whole)

    def _beside(self, running: Running, index: int, work: Callable[[], str]) -> None:
        """Looks at a call or the answer in a thread: a client's schema or grammar must hold up nobody else."""

        def done(found: asyncio.Future[str]) -> None:
            running.looking.discard(index)
            if running.ending or found.cancelled():
                return
            error = found.exception()
            if error is not None:
                log.error("%s: a result could not be checked", running.accepted.response, exc_info=error)
            running.wrong[index] = UNCHECKED if error is not None else found.result()
            if running.told > running.calls:
                self._flush(running)
            if running.finished is not None:
                self._finish_looked_at(running, running.finished)

        running.looking.add(index)
        asyncio.get_running_loop().run_in_executor(None, work).add_done_callback(done)

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

        self._record(running, facts, durable)

    def _finish(self, running: Running, message: wire.Finished) -> None:
        assert message.output == len(running.tail.ids) or running.warms, (message.output, len(running.tail.ids))
        running.hear(running.reader.end())
        self._look(running)
        check = running.check
        if check is not None and check.format is not None:
            self._beside(running, ANSWER, partial(check.answer, tuple(running.deltas)))
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
            self._erase_unkept(running)

        self._record(running, facts, durable)

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

    def _erase_unkept(self, running: Running) -> None:
        """An unstored response goes at once where none is retained; its end must be durable."""
        if not running.accepted.stored and self._unstored_retention_s == 0:
            retention.erase(self._journal, running.accepted.response, retention.CAUSE_UNSTORED)

    # --- what the journal says --------------------------------------------------------------------------

    def _record(self, running: Running, facts: list[events.Fact], durable: Callable[[], None]) -> None:
        """Appends facts of one response; none is written after one that was lost."""
        running.last = self._when_durable(
            facts, durable, lambda fault: self._journal_failed(running, fault), running.last
        )

    def _journal_failed(self, running: Running, fault: errors.Fault) -> None:
        """Facts of this response could not be written: it must not go on as if they had been."""
        if running.lost:
            return
        running.lost = running.ending = True
        response = running.accepted.response
        log.error("%s: the journal failed: %s", response, fault.message)
        self.cancel(response)
        end = ask.Broke(fault.code, fault.message, running.usage)
        # What is durable now stays so, and no more will be: the facts that are owed begin there.
        owed = self._owed_facts(running, end)
        self._owed[response] = running
        self._ended(running, end)
        self._settle_later(response, owed)

    def _owed_facts(self, running: Running, end: ask.Broke) -> list[events.Fact]:
        """What is missing in the journal for it to tell of this response what its client was told."""
        tenant, response = running.accepted.tenant, running.accepted.response
        facts = [] if running.matched is None else [events.Fact(running.matched)]
        facts += said.sampled(running.accepted, running.tail, running.tail.durable)
        failed = events.ResponseFailed(tenant=tenant, response=response, code=end.code, message=end.message)
        return [*facts, events.Fact(failed)]

    def _settle_later(self, response: str, owed: list[events.Fact]) -> None:
        """Offers owed facts to the journal until it takes them. A restart before that ends the response as well."""
        running = self._owed[response]

        def settled() -> None:
            del self._owed[response]
            self._erase_unkept(running)

        def offer() -> None:
            self._when_durable(owed, settled, lambda fault: self._settle_later(response, owed))

        asyncio.get_running_loop().call_later(OWED_RETRY_S, offer)

    def _when_durable(
        self,
        facts: list[events.Fact],
        then: Callable[[], None],
        otherwise: Callable[[errors.Fault], None],
        after: Written | None = None,
    ) -> Written:
        """Appends, and calls back on the event loop after the commit, or with the fault. `after` as in the journal."""

        def done(written: Written) -> None:
            error = written.exception()
            if error is None:
                then()
            elif isinstance(error, errors.Fault):
                otherwise(error)
            else:
                otherwise(errors.JournalUnavailable(str(error)))

        written = self._journal.append_soon(facts, after=after)
        written.add_done_callback(done)
        return written
