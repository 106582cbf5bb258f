"""The engine's life as the API knows it: it loads, its start is made a fact, then requests may come, until it ends."""

from __future__ import annotations

import asyncio
import logging

from zjournal import errors
from zjournal.api.metrics import Metrics
from zjournal.api.running_record import Recorder
from zjournal.api.snapshots import Snapshots
from zjournal.journal import events
from zjournal.journal.log import SERVER_TENANT, Journal
from zjournal.link import wire
from zjournal.link.client import EngineClient
from zjournal.sessions.served import Served

log = logging.getLogger("zjournal.api")


class EngineLife:
    """Owns what is known of the engine that runs now. All methods run on the event loop."""

    def __init__(self, journal: Journal, recorder: Recorder, metrics: Metrics, snapshots: Snapshots) -> None:
        self._journal = journal
        self._recorder = recorder
        self._metrics = metrics
        self._snapshots = snapshots
        self._coming: tuple[wire.Ready, int] | None = None  # the engine that is up, and its pid
        self.served: Served | None = None
        self.client: EngineClient | None = None
        self.ready: wire.Ready | None = None  # what it said, once its start is durable
        self.progress = 0.0
        self.broken: wire.Broken | None = None
        self.broke = asyncio.Event()
        self.up = asyncio.Event()  # set when an engine first became ready
        journal.tenant(SERVER_TENANT)  # made here, so that it is known wherever a start is journaled

    def serve(self, served: Served, client: EngineClient) -> None:
        """Sets the model's API side and the engine."""
        self.served, self.client = served, client
        self._record_start()

    def came(self, ready: wire.Ready, pid: int) -> None:
        """It is ready to be asked."""
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
        coming, served = self._coming, self.served
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
            self._recorder.again(again)

        self._recorder.when_durable([events.Fact(started, contents=(vocabulary, template))], durable, refused)

    def could_not_start(self, broken: wire.Broken) -> None:
        """It will never be ready."""
        self.broken = broken
        self.ready = self._coming = None
        self.broke.set()

    def crashed(self, pid: int, status: int, running: tuple[str, ...]) -> None:
        """It ended unasked, under these responses."""
        self.ready = self._coming = None
        self.progress = 0.0
        self._snapshots.engine_gone()
        self._journal.append([events.Fact(events.EngineCrashed(pid=pid, status=status, running=running))])
        self._metrics.engine_crashed()

    def stopped(self, pid: int, status: int) -> None:
        """It ended as asked. One whose start is not durable leaves no trace of its end either."""
        started = self.ready is not None
        self.ready = self._coming = None
        if started:
            self._journal.append([events.Fact(events.EngineStopped(pid=pid, status=status))])
