"""A second, smaller composition root: the journal and an engine without HTTP, for a command that has to ask one.

It starts what server.py starts, in the same order, all but the app: lock, journal, engine process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import msgspec

from zjournal import errors
from zjournal.config import Config
from zjournal.journal import database, datadir
from zjournal.journal.log import Journal
from zjournal.link.client import EngineClient
from zjournal.server import chosen, engine_start
from zjournal.sessions import operations
from zjournal.sessions.replay import Replay, Replayed
from zjournal.sessions.served import ModelChoice, Served

if TYPE_CHECKING:
    from zjournal.api.replays import Replays
    from zjournal.api.running import Runs

QUIET = "warning"  # log level of an engine beside whose command nothing else should be printed


def replay(config: Config, arguments: Replay) -> bytes:
    """The operation `sessions.replay` where no server runs; its result in msgpack.

    Raises JournalFault where there is no journal, DataDirLocked when somebody owns the directory, EngineStartFault when
    the model cannot be loaded, and what api.replays raises.
    """
    if config.origins["log_level"] == "default":
        config = dataclasses.replace(config, log_level=QUIET)
    choice = chosen(config)
    database.open_reader(config.data_dir).close()  # raises where there is no journal: none shall be made
    with (
        datadir.lock(config.data_dir),
        Journal.open(config.data_dir, checkpoint=config.checkpoint, log_limit=config.wal_max, strict=True) as journal,
    ):
        journal.recover()  # what a killed server left open has ended, and must not look as if it ran
        return operations.done(journal, "sessions.replay", asyncio.run(_replay(config, choice, journal, arguments)))


async def _replay(config: Config, choice: ModelChoice, journal: Journal, arguments: Replay) -> Replayed:
    async with _replays(config, choice, journal) as replays:  # it follows the settings that were given
        return await replays.run(msgspec.structs.replace(arguments, settings=()))


@contextlib.asynccontextmanager
async def _replays(config: Config, choice: ModelChoice, journal: Journal) -> AsyncIterator[Replays]:
    """An engine that is ready, and what asks it; at the end of the body it is stopped."""
    from zjournal.api.metrics import Metrics
    from zjournal.api.recorded import DECODERS
    from zjournal.api.replays import Probes, Replays
    from zjournal.api.running import Runs
    from zjournal.api.snapshots import Snapshots

    metrics = Metrics()
    start = engine_start(config, choice, journal.secret)
    states = Snapshots(journal, metrics, config.data_dir, on=bool(start.snapshots))
    runs = Runs(journal, metrics, config.unstored_retention, states)
    probes = Probes(runs)
    engine = EngineClient(start, probes, states.known)
    states.serve(engine)
    engine.start()
    try:
        served = await asyncio.to_thread(Served.load, choice, config.dialect)
        runs.serve(served, engine)
        await _up(runs, engine)
        replays = Replays(journal, runs, probes, str(choice.path), DECODERS)
        replays.serve(served, engine)
        yield replays
    finally:
        await engine.stop()
        await states.close()


async def _up(runs: Runs, engine: EngineClient) -> None:
    """Returns once the engine takes requests. Raises EngineStartFault when it never will."""
    waits = [asyncio.ensure_future(wait) for wait in (runs.up.wait(), runs.broke.wait(), engine.watch())]
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in done:
            wait.result()  # raises what went wrong in the client itself
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
    if runs.broken is not None:
        raise errors.EngineStartFault(runs.broken.message)
