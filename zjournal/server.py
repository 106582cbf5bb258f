"""The composition root: data directory, journal, engine process, app; and their end in the right order.

What can be wrong is looked at first and costs no model load: configuration, model header, data directory,
port. Then the port is bound, the engine is spawned, and the app answers `/livez` while the model loads.
At SIGTERM or SIGINT the server takes no more requests, lets the running ones finish within the drain
timeout, parks the rest (its KV is on disk for who asks again), and leaves with status 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zjournal import collector, errors, keys, loops
from zjournal.checkpoint import hub
from zjournal.checkpoint.download import Meter
from zjournal.config import Config, version
from zjournal.journal import caps, datadir, events, retention
from zjournal.journal.log import Journal, wall_clock_us
from zjournal.link import logs, wire
from zjournal.link.client import EngineClient
from zjournal.sessions import identity, snapshots
from zjournal.sessions.served import ModelChoice, Served, choose

if TYPE_CHECKING:
    from zjournal.api.replays import Replays
    from zjournal.api.running import Runs
    from zjournal.api.submit import Desk

PROGRESS_EVERY_S = 5.0
KEEP_ALIVE_EVERY_S = 1.0  # how often it is looked whether there is somebody to tell
SWEEP_EVERY_S = 3600.0
CAP_EVERY_S = 60.0
CAP_PAUSE_S = 2.0  # between two rounds when the first was not enough
BACKLOG = 256
SWITCH_S = 0.001  # that a thread may keep the interpreter from others, in place of 5 ms: tokens are told every few
PROBES_MAX = 1024  # requests of replays, which wait beside those of clients
PREFILL_TOKENS = 512  # in one step, beside a token of each running response
LAST_RESPONSE_GRACE_S = 5.0  # for bytes of finished responses to leave

log = logging.getLogger("zjournal.server")


def run(config: Config) -> int:
    """Serves until a signal. Returns the exit status; raises a Fault when it cannot start."""
    logs.configure(config.log_level, config.log_format)
    choice = chosen(config)
    with datadir.lock(config.data_dir), _bind(config.host, config.port) as listening:
        journal = Journal.open(config.data_dir, checkpoint=config.checkpoint, log_limit=config.wal_max, strict=True)
        try:
            return _event_loop(_Server(config, choice, journal, listening))
        finally:
            journal.close()


def chosen(config: Config) -> ModelChoice:
    """The model that the configuration names. Raises ModelFault, or ConfigFault for a context that it does not have."""
    choice = choose(config.model, config.cache_dir, config.rope, lambda name: _fetch(name, config))
    longest = max(choice.context, choice.context_limit)
    if config.context > longest:
        raise errors.ConfigFault(
            f"context {config.context} ({config.origins['context']}) is more than the {longest} tokens "
            f"that {choice.path.name} was made for; --rope can stretch it",
            param="context",
        )
    return choice


def _fetch(name: hub.HubName, config: Config) -> Path:
    """Brings a model from the hub, and says how far it is every few seconds."""
    log.info("fetching %s into %s", name, config.cache_dir)
    meter = Meter(time.monotonic())
    told = 0.0

    def progress(done: int, total: int | None) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= PROGRESS_EVERY_S or done == total:
            told = now
            log.info("%s: %s", name, meter.line(done, total, now))

    return hub.pull(name, config.cache_dir, progress)


def _event_loop(server: _Server) -> int:
    import uvloop

    sys.setswitchinterval(SWITCH_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(server.serve())


@contextlib.contextmanager
def _bind(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket; raises PortInUse or ConfigFault."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise errors.PortInUse(f"Port {port} on {host} is in use; choose another with --port.") from None
            raise errors.ConfigFault(f"Cannot listen on {host}:{port}: {error.strerror}.") from None
        listening.listen(BACKLOG)
        listening.setblocking(False)
        yield listening
    finally:
        listening.close()


class _Server:
    """The running server; owns everything between the bound port and the exit status."""

    def __init__(self, config: Config, choice: ModelChoice, journal: Journal, listening: socket.socket) -> None:
        self._config = config
        self._choice = choice
        self._journal = journal
        self._listening = listening
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._replays: Replays | None = None
        self._fault: errors.Fault | None = None  # why the server cannot go on

    async def serve(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        self._write_start()
        for turn in self._journal.recover():
            log.warning("%s was running when the server stopped; it is failed now", turn.response)
        with collector.paused():
            from zjournal.api.admin import AdminSocket
            from zjournal.api.metrics import Metrics
            from zjournal.api.recorded import DECODERS
            from zjournal.api.replays import Probes, Replays
            from zjournal.api.running import Runs
            from zjournal.api.snapshots import Snapshots
            from zjournal.api.submit import Desk

        known = keys.KeyFile(self._config.api_key_file) if self._config.api_key_file else None
        metrics = Metrics()
        journal = self._journal
        metrics.journal(lambda: journal.log_bytes, lambda: journal.blocker_pid, lambda: journal.file_bytes)
        start = engine_start(self._config, self._choice, self._journal.secret)
        states = Snapshots(self._journal, metrics, self._config.data_dir, on=bool(start.snapshots))
        runs = Runs(self._journal, metrics, self._config.unstored_retention, states, self._config.keep_alive)
        desk = Desk(
            self._journal,
            runs,
            metrics,
            known,
            DECODERS,
            self._config.max_requests,
            guard=loops.limits(self._config.guard),
            reasoning_replay=self._config.reasoning_replay,
            attribution=self._config.attribution_line == "keep",
        )
        probes = Probes(runs)
        engine = EngineClient(start, probes, states.known)
        states.serve(engine)
        states.tidy()
        engine.start()
        self._replays = replays = Replays(self._journal, runs, probes, str(self._choice.path), DECODERS)
        upkeep = (self._sweep(runs), self._cap(), self._keep_alive(runs))
        vital = (self._load(desk, runs, engine), engine.watch(), self._watch(runs), *upkeep)
        tasks = [loop.create_task(self._live(work)) for work in vital]
        try:
            async with AdminSocket(self._journal, self._config.data_dir, {"sessions.replay": replays.run}).listening():
                return await self._serve_http(desk, runs)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await engine.stop()
            await states.close()
            desk.refused.close()
            self._journal.append([events.Fact(events.ServerStopped())])

    def _write_start(self) -> None:
        """The first facts. Raises JournalFault: a journal that cannot be written takes no requests, so say it now."""
        facts = [events.Fact(events.ServerStarted(version=version(), pid=os.getpid()))]
        before = self._journal.unended_start()
        if before is not None:
            started, pid = before
            log.warning("the server before this one (pid %d) left no orderly end", pid)
            facts.insert(0, events.Fact(events.ServerCrashed(pid=pid, started=started)))
        try:
            self._journal.append(facts).result()
        except errors.JournalUnavailable as fault:
            reason = fault.message.removesuffix(".")
            step = "check the disk and its free space, and start again"
            raise errors.JournalFault(f"{self._journal.path}: {reason}; {step}") from None

    def _signalled(self) -> None:
        """The first signal asks for an orderly end, a second one for a quick one."""
        (self._hurry if self._stop.is_set() else self._stop).set()

    async def _serve_http(self, desk: Desk, runs: Runs) -> int:
        with collector.paused():
            import uvicorn

            from zjournal.api.app import create_app
            from zjournal.api.intake import bounded
            from zjournal.api.websocket_intake import PING_S, ping_timeout_s, watched

        class Quiet(uvicorn.Server):
            """Leaves the signals to us: uvicorn would close the port before the drain."""

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        config, port = self._config, self._listening.getsockname()[1]
        sockets = config.websocket == "on"
        app = create_app(desk, host=config.host, port=port, body_max=config.body_max, websocket=sockets)
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="on",
            http=bounded(config.reader_timeout, desk.refused),
            timeout_graceful_shutdown=int(LAST_RESPONSE_GRACE_S),
            ws=watched(config.reader_timeout, desk.refused),
            ws_max_size=config.body_max,
            ws_ping_interval=PING_S,
            ws_ping_timeout=ping_timeout_s(config.reader_timeout),
            server_header=False,
        )
        server = Quiet(settings)
        serving = asyncio.create_task(server.serve(sockets=[self._listening]))
        host, port = self._listening.getsockname()[:2]
        log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            await self._drain(desk, runs)
        stopping.cancel()
        server.should_exit = True
        await serving
        if self._fault is not None:
            raise self._fault
        return 0

    async def _drain(self, desk: Desk, runs: Runs) -> None:
        """Lets what runs finish within the limit, then parks it."""
        desk.drain()
        if self._replays is not None:
            self._replays.stop()
        log.info("stopping: waiting up to %.0f s for running responses", self._config.drain_timeout)
        waiting = {asyncio.create_task(desk.wait_idle()), asyncio.create_task(self._hurry.wait())}
        done, pending = await asyncio.wait(
            waiting, timeout=self._config.drain_timeout, return_when=asyncio.FIRST_COMPLETED
        )
        for task in pending:
            task.cancel()
        if not done or self._hurry.is_set():
            log.warning("parking the responses that still run")
            runs.park()
            try:
                await asyncio.wait_for(desk.wait_idle(), LAST_RESPONSE_GRACE_S)
            except TimeoutError:  # the engine does not answer; the clients shall have an end all the same
                runs.give_up()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(desk.wait_idle(), LAST_RESPONSE_GRACE_S)

    async def _live(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a task that the server cannot do without: a fault in it ends the server instead of getting lost."""
        try:
            await work
        except errors.Fault as fault:
            self._fault = fault
        except Exception as error:
            log.exception("a task that the server needs has failed")
            self._fault = errors.Fault(f"the server has failed ({type(error).__name__}: {error})")
            self._hurry.set()  # what runs may wait for the task for ever
        if self._fault is not None:
            self._stop.set()

    async def _load(self, desk: Desk, runs: Runs, engine: EngineClient) -> None:
        """Loads the model's API side (tokenizer, template) beside the engine's load."""
        served = await asyncio.to_thread(Served.load, self._choice, self._config.dialect)
        if served.guessed:
            log.info(
                "%s does not say how it writes tool calls: %s is explained to it; see the setting `dialect`",
                *(served.id, served.dialect.name),
            )
        if served.unstable:
            log.info("prompts that are not the beginning of the next one: %s", "; ".join(served.unstable))
        runs.serve(served, engine)
        desk.serve(served)
        if self._replays is not None:
            self._replays.serve(served, engine)
        collector.settle()

    async def _watch(self, runs: Runs) -> None:
        """Ends the server when the engine says that the model cannot be loaded: better now than at each request."""
        await runs.broke.wait()
        assert runs.broken is not None
        raise errors.EngineStartFault(runs.broken.message)

    async def _keep_alive(self, runs: Runs) -> None:
        """Has clients told that their responses live, where there is nothing else to tell."""
        while True:
            await asyncio.sleep(min(KEEP_ALIVE_EVERY_S, self._config.keep_alive / 2))
            runs.keep_alive(time.monotonic())

    async def _sweep(self, runs: Runs) -> None:
        """Erases what is due: deleted turns, and unstored ones that are older than their retention."""
        while True:
            try:
                kept_s = int(self._config.unstored_retention)
                await asyncio.to_thread(retention.sweep, self._journal, wall_clock_us(), kept_s, runs.held)
            except errors.Fault as fault:
                log.error("the sweep of unstored turns failed: %s", fault.message)
            await asyncio.sleep(SWEEP_EVERY_S)

    async def _cap(self) -> None:
        """Keeps the journal within its caps, where any are set."""
        limits = caps.Limits(self._config.journal_max_bytes, self._config.journal_max_age)
        while limits.any:
            more = False
            try:
                more = await asyncio.to_thread(caps.enforce, self._journal, limits, wall_clock_us())
            except errors.Fault as fault:
                log.error("the journal cannot be kept within its caps: %s", fault.message)
            await asyncio.sleep(CAP_PAUSE_S if more else CAP_EVERY_S)


def engine_start(config: Config, choice: ModelChoice, secret: bytes) -> wire.Start:
    """The engine's first message, as the configuration has it. `secret` is the journal's."""
    on = config.snapshots == "on"
    return wire.Start(
        model=str(choice.path),
        scripted=choice.scripted,
        tokenizer=str(choice.file.path),
        weights=config.weights,
        device=config.device,
        fast=config.fast,
        kv_dtype=config.kv_dtype,
        threads=config.threads,
        context=config.context,
        rope=config.rope,
        cache_dir=str(config.cache_dir),
        kv_bytes=config.kv_memory,
        snapshots=str(snapshots.folder_of(config.data_dir)) if on else "",
        snapshot_key=identity.snapshot_key(secret),
        snapshot_limit=config.snapshot_limit,
        snapshot_codec=config.snapshot_codec,
        snapshot_restore=config.snapshot_restore,
        host_cache=config.host_cache if on else 0,
        max_running=config.max_running,
        queue_max=config.max_requests + PROBES_MAX,
        speculation=config.speculation,
        log_level=config.log_level,
        log_format=config.log_format,
        prefill_tokens=max(PREFILL_TOKENS, 2 * config.max_running),
    )
