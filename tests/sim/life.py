"""One life: a forked process that opens the real journal on the failing disk and does what the driver tells it.

It runs no two things at once: a batch waits behind a gate on the writer thread until all of it is queued, so what is
committed together does not depend on timing, and changes of the disk have the same numbers each time.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from tests.sim import model
from tests.sim.disk import Rule, Shim
from tests.sim.plan import Sealing
from tests.sim.tier import Ask, Served, Tier
from tests.unit.engine.tiers import FILE_BYTES
from zjournal import ask
from zjournal.errors import Fault, JournalUnavailable
from zjournal.journal import compact, datadir, log, removal, retention, segments, snapshots, wal
from zjournal.journal.events import Fact, Recorded
from zjournal.journal.log import Journal
from zjournal.journal.transaction import ParentErased, Transaction
from zjournal.sessions import snapshots as files
from zjournal.sessions import transfer

PAGE_BYTES = 4_096
SILENCE_S = 0.005  # in place of the journal's own pause, for which a run has no time
DECODERS = {
    "responses": lambda body: ask.Ask(protocol="responses", model="m", items=())
}  # the traffic's bodies hold no items


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


class Silence(NamedTuple):
    """Lets time pass, up to `now`, in which nothing is asked."""

    now: int


class Serve(NamedTuple):
    """Lets the engine hear of what was written since, and do what is asked. The first one starts an engine."""

    now: int
    ask: Ask | None = None


class Engine(NamedTuple):
    """The engine dies, and nothing else."""


class Heard(NamedTuple):
    """Before the answer: what the engine has told the journal in one commit."""

    facts: tuple[Recorded, ...]


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
    sealing: Sealing
    chunks: int


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
        self._silence: int | None = None
        self._journal: Journal | None = None
        self._tier: Tier | None = None
        self._told: list[Recorded] = []  # that the engine has not heard of
        log.IDLE_S = SILENCE_S
        # Limits that a run would never reach. This process is ours alone.
        log.SEAL_FACTS, log.SEAL_WAITING_MAX, segments.FACTS_MAX = birth.sealing
        wal.CHECKPOINT_BYTES = wal.STEP_BYTES = birth.checkpoint_pages * PAGE_BYTES
        wal.PATIENT_BYTES = wal.REFUSE_BYTES  # waiting for a reader takes longer than a run
        self._shim = Shim(birth.root, birth.log, birth.rules) if birth.log else None
        self._held: AbstractContextManager | None = None

    def run(self) -> None:
        opened = _outcome(self._open)
        self._answer([opened._replace(value=None) if opened.kind == "ok" else opened])
        if opened.kind != "ok":
            return
        self._journal, self._lock = opened.value
        self._journal.subscribe(self._told.extend)
        while True:
            match message := self._channel.recv():
                case Batch():
                    self._now = message.now
                    outcomes = self._batch(message.commands)
                    _settle(self._journal)
                    self._answer(outcomes)
                case Read(after):
                    self._answer([_outcome(lambda after=after: self._read(after))])  # type: ignore[misc]
                case Silence(now):
                    self._answer([_outcome(lambda now=now: self._wait(now))])  # type: ignore[misc]
                case Hold(on):
                    self._answer([_outcome(lambda on=on: self._hold(on))])  # type: ignore[misc]
                case Serve():
                    self._now = message.now
                    self._answer([_outcome(lambda message=message: self._serve(message))])  # type: ignore[misc]
                case Engine():
                    self._drop_engine()
                    self._answer([Outcome("ok")])
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
        os.urandom = chance.randbytes  # the names of files that are being written
        lock = datadir.lock(self._birth.data_dir)
        journal = self._journal = Journal.open(self._birth.data_dir, clock=self._clock, entropy=chance.randbytes)
        _settle(journal)
        return journal, lock

    def _clock(self) -> int:
        """For the writer no time passes between commits, but in a silence: else what it does would depend on timing."""
        if threading.current_thread().name != log.WRITER_THREAD:
            return self._now
        if self._silence is not None:
            return self._silence
        return self._journal._upkept_us if self._journal else 0

    def _wait(self, now: int) -> None:
        """A silence, until the writer has done what it does in one."""
        journal = self._open_journal
        self._now = self._silence = now
        while journal._idle_s is not None and journal._upkept_us != now:
            time.sleep(SILENCE_S / 5)
        self._silence = None
        _settle(journal)

    @property
    def _open_journal(self) -> Journal:
        assert self._journal is not None
        return self._journal

    def _batch(self, commands: Sequence[model.Command]) -> list[Outcome]:
        if len(commands) == 1:
            return [_outcome(lambda: self._start(commands[0])())]
        gate = threading.Event()
        held = self._open_journal.run(lambda _: gate.wait())
        waits = [self._start(command) for command in commands]
        gate.set()
        held.exception()
        return [_outcome(wait) for wait in waits]

    def _start(self, command: model.Command) -> Callable[[], Any]:
        """Begins a command; returns how to wait for it. What has no future cannot stand in a batch of several."""
        journal = self._open_journal
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
                return lambda: _nothing(journal.rebuild())
            case model.TenantNamed(name):
                return lambda: journal.tenant(name)
            case model.Seal(limit):
                return lambda: _nothing(journal.seal(limit))
            case model.Compact():
                return lambda: _nothing(compact.compact(journal))
            case model.Prune(session, last_seq):
                return lambda: self._prune(session, last_seq)
            case model.Export(session):
                return lambda: self._export(session)
            case model.Pin(response, pinned):
                return lambda: snapshots.pin(journal, response, pinned)  # type: ignore[func-returns-value]
            case model.Collect(space, hashes):
                doomed = files.Collect((files.Doomed(space, hashes),))
                return lambda: files.collect(journal, doomed).chunks

    def _prune(self, session: str, last_seq: int) -> list[str]:
        removed = removal.remove_session(self._open_journal, session, removal.PRUNED, last_seq=last_seq)
        return [str(removed.turns), str(removed.erased), *removed.kept]

    def _export(self, session: str) -> bytes:
        journal = self._open_journal
        found = journal.session(session)
        assert found is not None
        selection = transfer.Selection.of(journal, found, journal.turns(session))
        return b"".join(transfer.export(journal, selection, DECODERS))

    # --- the engine -----------------------------------------------------------------------------------

    def _serve(self, order: Serve) -> Served:
        told, self._told[:] = tuple(self._told), []
        if self._tier is None:
            folder = files.folder_of(self._birth.data_dir)
            self._tier = Tier(folder, self._open_journal, self._birth.chunks * FILE_BYTES, self._pass_on)
        else:
            self._tier.listen(told)
        self._tier.at(order.now)
        return self._tier.serve_one(order.ask)

    def _pass_on(self) -> None:
        """What the engine has written is told before it acts on it: from then on it must be there."""
        facts, self._told[:] = tuple(self._told), []
        if facts:
            self._channel.send(Heard(facts))

    def _drop_engine(self) -> None:
        if self._tier is not None:
            self._tier.close()
            self._tier = None

    # --- reading, and the end -------------------------------------------------------------------------

    def _read(self, after: int) -> list[Recorded]:
        return self._open_journal.read(after)

    def _hold(self, on: bool) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            held.__exit__(None, None, None)
        if on:
            transaction = self._open_journal.transaction()
            transaction.__enter__().execute("SELECT count(*) FROM event").fetchone()
            self._held = transaction

    def _die(self, order: Die) -> None:
        if order.how == "inside":

            def work(tx: Transaction) -> None:
                tx.append(order.facts)
                _kill()

            self._open_journal.run(work).exception()
        elif order.how == "untold":
            self._open_journal.subscribe(lambda _: _kill())
            self._open_journal.append(order.facts).exception()
        _kill()

    def _close(self) -> None:
        self._drop_engine()
        self._hold(False)
        self._open_journal.close()
        self._lock.release()


def _settle(journal: Journal) -> None:
    """Waits for what the writer does after it has told of a commit: it must not run beside the next step.

    The first empty transaction may be followed by such work itself, when the clock has moved; not so the second.
    """
    for _ in range(2):
        journal.run(lambda _: None).exception()


def _nothing(_: object) -> None:
    """What a command returns that the model cannot predict."""


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
