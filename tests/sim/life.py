"""One life: a forked process that opens the real journal on the failing disk and does what the driver tells it.

It runs no two things at once: a batch waits behind a gate on the writer thread until all of it is queued, so what is
committed together does not depend on timing, and changes of the disk have the same numbers each time.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from tests.sim import model
from tests.sim.disk import Rule, Shim
from zjournal.errors import Fault, JournalUnavailable
from zjournal.journal import datadir, retention
from zjournal.journal.events import Fact, Recorded
from zjournal.journal.log import Journal
from zjournal.journal.transaction import ParentErased, Transaction


class Batch(NamedTuple):
    """Commands that are queued before the first of them is committed. `now` in microseconds."""

    now: int
    commands: tuple[model.Command, ...]


class Read(NamedTuple):
    """Asks for the facts after a number."""

    after: int


class Hold(NamedTuple):
    """Opens a read transaction that stays open, or ends it."""

    on: bool


class Die(NamedTuple):
    """SIGKILL now, inside the transaction of an append, or after its commit and before anyone is told."""

    how: str
    now: int
    facts: tuple[Fact, ...]


class Close(NamedTuple):
    pass


class Outcome(NamedTuple):
    """What became of a command: ok, unavailable, fault, wrong, or error (which nothing excuses)."""

    kind: str
    value: Any = None


class Answer(NamedTuple):
    """To each message. `fired` counts the faults of this life so far, `changes` those of the disk."""

    outcomes: tuple[Outcome, ...]
    changes: int
    fired: int


class Birth(NamedTuple):
    """What a life is made of. `log` None: without the shim."""

    root: Path
    data_dir: Path
    log: Path | None
    rules: tuple[Rule, ...]
    seed: str
    now: int
    checkpoint_pages: int


def live(birth: Birth, channel: Connection) -> None:
    """The life's whole course; never returns."""
    status = 1
    try:
        _Life(birth, channel).run()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


class _Life:
    def __init__(self, birth: Birth, channel: Connection) -> None:
        self._birth = birth
        self._channel = channel
        self._now = birth.now
        self._shim = Shim(birth.root, birth.log, birth.rules) if birth.log else None
        self._held: AbstractContextManager | None = None

    def run(self) -> None:
        opened = _outcome(self._open)
        self._answer([opened._replace(value=None) if opened.kind == "ok" else opened])
        if opened.kind != "ok":
            return
        self._journal, self._lock = opened.value
        while True:
            message = self._channel.recv()
            match message:
                case Batch():
                    self._now = message.now
                    outcomes = self._batch(message.commands)
                    _settle(self._journal)
                    self._answer(outcomes)
                case Read(after):
                    self._answer([_outcome(lambda after=after: self._read(after))])  # type: ignore[misc]
                case Hold(on):
                    self._answer([_outcome(lambda on=on: self._hold(on))])  # type: ignore[misc]
                case Die():
                    self._now = message.now
                    self._die(message)
                case Close():
                    self._answer([_outcome(self._close)])
                    return

    def _answer(self, outcomes: Sequence[Outcome]) -> None:
        changes, fired = self._shim.counts() if self._shim else (0, 0)
        self._channel.send(Answer(tuple(outcomes), changes, fired))

    # --- as the server does it ------------------------------------------------------------------------

    def _open(self) -> tuple[Journal, datadir.Lock]:
        chance = random.Random(self._birth.seed)
        lock = datadir.lock(self._birth.data_dir)
        journal = Journal.open(self._birth.data_dir, clock=lambda: self._now, entropy=chance.randbytes)
        pages = self._birth.checkpoint_pages
        journal.run(lambda tx: tx.db.execute(f"PRAGMA wal_autocheckpoint = {pages}").fetchall()).exception()
        _settle(journal)
        return journal, lock

    def _batch(self, commands: Sequence[model.Command]) -> list[Outcome]:
        if len(commands) == 1:
            return [_outcome(lambda: self._start(commands[0])())]
        gate = threading.Event()
        held = self._journal.run(lambda _: gate.wait())
        waits = [self._start(command) for command in commands]
        gate.set()
        held.exception()
        return [_outcome(wait) for wait in waits]

    def _start(self, command: model.Command) -> Callable[[], Any]:
        """Begins a command; returns how to wait for it. What has no future cannot stand in a batch of several."""
        journal = self._journal
        match command:
            case model.Append(facts):
                return journal.append(facts).result
            case model.Delete(tenant, response):
                return retention.delete(journal, tenant, response).result
            case model.Erase(response, cause):
                return retention.erase(journal, response, cause).result
            case model.Sweep(retention_s):
                return lambda: retention.sweep(journal, self._now, retention_s)
            case model.Recover():
                return lambda: [turn.response for turn in journal.recover()]
            case model.Rebuild():
                return lambda: journal.rebuild() and None
            case model.TenantNamed(name):
                return lambda: journal.tenant(name)

    def _read(self, after: int) -> list[Recorded]:
        return self._journal.read(after)

    def _hold(self, on: bool) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            held.__exit__(None, None, None)
        if on:
            transaction = self._journal.transaction()
            transaction.__enter__().execute("SELECT count(*) FROM event").fetchone()
            self._held = transaction

    def _die(self, order: Die) -> None:
        if order.how == "inside":

            def work(tx: Transaction) -> None:
                tx.append(order.facts)
                _kill()

            self._journal.run(work).exception()
        elif order.how == "untold":
            self._journal.subscribe(lambda _: _kill())
            self._journal.append(order.facts).exception()
        _kill()

    def _close(self) -> None:
        self._hold(False)
        self._journal.close()
        self._lock.release()


def _settle(journal: Journal) -> None:
    """Waits for what the writer does after it has told of a commit: it must not run beside the next step.

    The first empty transaction may be followed by such work itself, when the clock has moved; not so the second.
    """
    for _ in range(2):
        journal.run(lambda _: None).exception()


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _outcome(work: Callable[[], Any]) -> Outcome:
    try:
        return Outcome("ok", work())
    except JournalUnavailable as fault:
        return Outcome("unavailable", fault.message)
    except Fault as fault:
        return Outcome("fault", fault.message)
    except (AssertionError, ParentErased) as error:
        return Outcome("wrong", str(error))
    except Exception:
        return Outcome("error", traceback.format_exc())
