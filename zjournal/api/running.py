"""The running responses: what the engine says of them becomes facts, and followers hear of it.

The order is the promise: tokens are journaled in batches beside the stream, and the end of a response is
durable before anyone is told. All methods run on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future

from zjournal import ask, errors
from zjournal.api.metrics import Metrics
from zjournal.journal import events, retention
from zjournal.journal.log import Journal
from zjournal.link import wire
from zjournal.link.client import EngineClient
from zjournal.sessions import identity
from zjournal.sessions.follow import Reader, Tail, ended_at, read_text, reader
from zjournal.sessions.served import Served

FLUSH_TOKENS = 64  # promise 3
FLUSH_S = 0.05

log = logging.getLogger("zjournal.api")

_CHANGES: dict[str, type[events.CacheAdmitted | events.CacheEvicted]] = {
    "admit": events.CacheAdmitted,
    "evict": events.CacheEvicted,
}


class Running:
    """One response between its acceptance and its end; owned by `Runs`."""

    def __init__(self, accepted: events.RequestAccepted, prompt: int, stop: tuple[str, ...]) -> None:
        self.accepted = accepted
        self.tail = Tail()
        self.stop = stop
        self.started = time.monotonic()
        self.first_token: float | None = None
        self.prompt = prompt
        self.cached = 0
        self.flushed = 0  # tokens handed to the journal
        self.timer: asyncio.TimerHandle | None = None
        self.ending = False

    @property
    def usage(self) -> ask.Usage:
        return ask.Usage(self.prompt, self.cached, len(self.tail.ids))


class Runs:
    """Owns the running responses. Listens to the engine (see link.client.Listener)."""

    def __init__(self, journal: Journal, metrics: Metrics, unstored_retention_s: float) -> None:
        self._journal = journal
        self._metrics = metrics
        self._unstored_retention_s = unstored_retention_s
        self._running: dict[str, Running] = {}
        self._served: Served | None = None
        self._engine: EngineClient | None = None
        self.ready: wire.Ready | None = None
        self.progress = 0.0
        self.broken: wire.Broken | None = None
        self.broke = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()

    def serve(self, served: Served, engine: EngineClient) -> None:
        """Sets the model's API side and the engine."""
        self._served = served
        self._engine = engine

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, response: str) -> bool:
        return response in self._running

    def tail(self, response: str) -> Tail | None:
        """The growing tail of a running response."""
        running = self._running.get(response)
        return running.tail if running else None

    def reader(self, stop: tuple[str, ...]) -> Reader:
        """A reader of one response's tokens."""
        assert self._served is not None
        return reader(self._served.tokenizer, self._served.dialect, self._served.end_tokens, stop)

    def begin(self, accepted: events.RequestAccepted, prompt: int, stop: tuple[str, ...], ask: wire.Generate) -> None:
        """Starts a response whose acceptance is durable."""
        running = Running(accepted, prompt, stop)
        self._running[accepted.response] = running
        self._metrics.running(len(self._running))
        self.idle.clear()
        if self.ready is None or self._engine is None:  # it died while the request was being written down
            self._fail(running, "engine_error", "The engine stopped before the request began.")
        else:
            self._engine.generate(ask)

    def cancel(self, response: str) -> None:
        """Gives up a response; what is not running is ignored."""
        if self._engine is not None and response in self._running:
            self._engine.cancel(response)

    def cancel_all(self) -> None:
        """Gives up whatever still runs."""
        for response in list(self._running):
            self.cancel(response)

    # --- what the engine says ---------------------------------------------------------------------------

    def engine_loading(self, progress: float) -> None:
        self.progress = progress

    def engine_ready(self, ready: wire.Ready, pid: int) -> None:
        self.ready = ready
        started = events.EngineStarted(
            pid=pid,
            model=self._served.id if self._served else "",
            fingerprint=ready.fingerprint,
            kernels=ready.kernels,
            context=ready.context,
            kv_tokens=ready.kv_tokens,
        )
        self._journal.append([events.Fact(started)])
        log.info(
            "engine ready: pid %d, %s, context %d, KV %d tokens", pid, ready.kernels, ready.context, ready.kv_tokens
        )

    def engine_broken(self, broken: wire.Broken) -> None:
        self.broken = broken
        self.ready = None
        self.broke.set()

    def engine_crashed(self, pid: int, status: int, running: tuple[str, ...]) -> None:
        self.ready = None
        self.progress = 0.0
        self._journal.append([events.Fact(events.EngineCrashed(pid=pid, status=status, running=running))])
        self._metrics.engine_crashed()
        for response in running:
            if response in self._running:  # it may have ended already, when the journal failed under it
                message = "The engine stopped while this response was running."
                self._fail(self._running[response], "engine_error", message)

    def engine_said(self, message: wire.FromEngine) -> None:
        match message:
            case wire.CacheChanged():
                self._cache_changed(message)
            case wire.Gauges():
                self._metrics.gauges(message)
            case wire.Matched() | wire.Tokens() | wire.Finished() | wire.Failed():
                running = self._running.get(message.request)
                if running is not None and not running.ending:  # else the journal failed under it and it was told so
                    self._response_said(running, message)
            case _:
                raise AssertionError(message)

    def _response_said(
        self, running: Running, message: wire.Matched | wire.Tokens | wire.Finished | wire.Failed
    ) -> None:
        match message:
            case wire.Matched():
                self._matched(running, message)
            case wire.Tokens():
                self._tokens(running, message)
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
        running.cached = message.cached
        running.tail.progress = ask.Progress(message.cached, message.prompt)
        matched = events.CacheMatched(
            tenant=running.accepted.tenant,
            response=message.request,
            tier=message.tier,
            cached=message.cached,
            prompt=message.prompt,
        )
        self._journal.append([events.Fact(matched)])
        self._metrics.matched(message.cached, message.prompt - message.cached)
        running.tail.wake()

    def _tokens(self, running: Running, message: wire.Tokens) -> None:
        tail = running.tail
        assert message.position == len(tail.ids), (message.position, len(tail.ids))
        if running.first_token is None:
            running.first_token = time.monotonic()
            self._metrics.ttft(running.first_token - running.started)
        ids = wire.unpack_ids(message.ids)
        tail.ids.extend(ids)
        if len(tail.ids) - running.flushed >= FLUSH_TOKENS:
            self._flush(running)
        elif running.timer is None:
            running.timer = asyncio.get_running_loop().call_later(FLUSH_S, self._flush, running)
        tail.wake()

    def _take_unflushed(self, running: Running) -> list[events.Fact]:
        if running.timer is not None:
            running.timer.cancel()
            running.timer = None
        ids = running.tail.ids[running.flushed :]
        if not ids:
            return []
        sampled = events.TokensSampled(
            tenant=running.accepted.tenant,
            response=running.accepted.response,
            position=running.flushed,
            count=len(ids),
        )
        running.flushed = len(running.tail.ids)
        return [events.Fact(sampled, payload=wire.pack_ids(ids))]

    def _flush(self, running: Running) -> None:
        """Hands the tokens since the last flush to the journal."""
        facts = self._take_unflushed(running)
        upto = running.flushed
        if not facts:
            return

        def durable() -> None:
            running.tail.durable = max(running.tail.durable, upto)
            running.tail.wake()

        self._when_durable(facts, durable, lambda fault: self._journal_failed(running, fault))

    def _finish(self, running: Running, message: wire.Finished) -> None:
        accepted = running.accepted
        assert message.output == len(running.tail.ids), (message.output, len(running.tail.ids))
        text = read_text(running.tail.ids, self.reader(running.stop))
        answer = ask.Message("assistant", (ask.Text(text),))
        finished = events.ResponseFinished(
            tenant=accepted.tenant,
            response=accepted.response,
            reason=message.reason,
            output=message.output,
            history=identity.history_step(accepted.history, answer),
            queue_us=message.queue_us,
            prefill_us=message.prefill_us,
            decode_us=message.decode_us,
        )
        end = ask.Ended(message.reason, running.usage, ended_at(accepted, finished))  # type: ignore[arg-type]
        self._end(running, finished, end)

    def _fail(self, running: Running, code: str, message: str) -> None:
        accepted = running.accepted
        failed = events.ResponseFailed(tenant=accepted.tenant, response=accepted.response, code=code, message=message)
        self._end(running, failed, ask.Broke(code, message, running.usage))

    def _end(self, running: Running, event: events.AnyEvent, end: ask.Ended | ask.Broke) -> None:
        """Commits the end, then tells it."""
        if running.ending:
            return
        running.ending = True
        facts = [*self._take_unflushed(running), events.Fact(event)]
        self._when_durable(
            facts,
            lambda: self._ended(running, end),
            lambda fault: self._ended(running, ask.Broke(fault.code, fault.message, running.usage)),
        )

    def _ended(self, running: Running, end: ask.Ended | ask.Broke) -> None:
        running.tail.durable = len(running.tail.ids)
        running.tail.end = end
        self._running.pop(running.accepted.response, None)
        self._metrics.running(len(self._running))
        self._metrics.ended(end)
        running.tail.wake()
        if not self._running:
            self.idle.set()
        if not running.accepted.stored and self._unstored_retention_s == 0:
            retention.erase(self._journal, running.accepted.response, retention.CAUSE_UNSTORED)

    def _journal_failed(self, running: Running, fault: errors.Fault) -> None:
        """Facts of this response could not be written: it must not go on as if they had been."""
        log.error("%s: the journal failed: %s", running.accepted.response, fault.message)
        self.cancel(running.accepted.response)
        if not running.ending:
            running.ending = True
            self._ended(running, ask.Broke(fault.code, fault.message, running.usage))

    def _when_durable(
        self, facts: list[events.Fact], then: Callable[[], None], otherwise: Callable[[errors.Fault], None]
    ) -> None:
        """Appends, and calls back on the event loop after the commit, or with the fault."""
        loop = asyncio.get_running_loop()

        def done(future: Future) -> None:
            error = future.exception()
            if error is None:
                loop.call_soon_threadsafe(then)
            elif isinstance(error, errors.Fault):
                loop.call_soon_threadsafe(otherwise, error)
            else:
                loop.call_soon_threadsafe(otherwise, errors.JournalUnavailable(str(error)))

        self._journal.append(facts).add_done_callback(done)
