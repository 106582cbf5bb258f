"""What an administrator can have done to a journal: plain functions from a journal and arguments to a result.

Each runs in whichever process owns the journal: the server, asked through `admin.sock`, or the command itself where
no server runs. Both go through `run`, so an operation cannot behave differently beside a server, and each that has
succeeded is a fact. Functions may wait for commits; they run in a thread of their own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import msgspec

from zjournal import errors
from zjournal.journal import backup, compact, events, removal
from zjournal.journal import snapshots as journaled
from zjournal.journal.log import Journal
from zjournal.sessions import importing, replay, snapshots

SCRUB_S_MAX = 3.0
SCRUB_LOOK_S = 0.05


class Operation(NamedTuple):
    """One operation. `creates`: it may be run where there is no journal yet, and makes one.

    `repairs`: it does not rely on what the projections say, and may be run where they are wrong.
    """

    arguments: type[msgspec.Struct]
    result: type[msgspec.Struct]
    function: Callable[[Journal, Any], msgspec.Struct]
    creates: bool = False
    repairs: bool = False


class Nothing(msgspec.Struct, frozen=True):
    """No arguments, or nothing to tell."""


class DeleteSession(msgspec.Struct, frozen=True):
    """One session by its whole id; `cascade`: and the turns of other sessions that continue it."""

    session: str
    cascade: bool = False


class DeleteTurn(msgspec.Struct, frozen=True):
    """One turn by its whole response id; `cascade`: and all turns that continue it."""

    response: str
    cascade: bool = False


class Chosen(msgspec.Struct, frozen=True):
    """A session as the plan saw it: it is left if it was used since."""

    session: str
    last_seq: int


class Prune(msgspec.Struct, frozen=True):
    """The sessions of a plan that are to go."""

    sessions: tuple[Chosen, ...]


class Pin(msgspec.Struct, frozen=True):
    """One session by its whole id, and whether it is to be pinned."""

    session: str
    pinned: bool


class Backup(msgspec.Struct, frozen=True):
    """The file to make, by its whole path."""

    path: str


class Left(msgspec.Struct, frozen=True):
    """A session that was to go and stayed."""

    session: str
    reason: str


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    """What went. `bytes`: payloads and contents as they were stored; `scrubbed`: also from the write-ahead log."""

    sessions: int = 0
    turns: int = 0  # that are hidden now
    kept: int = 0  # of these, those whose content stays for turns that were not deleted
    bytes: int = 0
    scrubbed: bool = True
    left: tuple[Left, ...] = ()


def _delete_session(journal: Journal, arguments: DeleteSession) -> Deleted:
    removed = removal.remove_session(journal, arguments.session, removal.ASKED, cascade=arguments.cascade)
    return Deleted(
        sessions=1, turns=removed.turns, kept=len(removed.kept), bytes=removed.bytes, scrubbed=_wait_scrubbed(journal)
    )


def _delete_turn(journal: Journal, arguments: DeleteTurn) -> Deleted:
    removed = removal.remove_turn(journal, arguments.response, cascade=arguments.cascade)
    return Deleted(turns=removed.turns, kept=len(removed.kept), bytes=removed.bytes, scrubbed=_wait_scrubbed(journal))


def _prune(journal: Journal, arguments: Prune) -> Deleted:
    done: list[removal.Removed] = []
    left: list[Left] = []
    for chosen in arguments.sessions:
        try:
            done.append(removal.remove_session(journal, chosen.session, removal.PRUNED, last_seq=chosen.last_seq))
        except (errors.NotFound, errors.BadRequest) as fault:  # since the plan was made
            left.append(Left(chosen.session, fault.message))
    kept = [response for removed in done for response in removed.kept]  # some of them went with a later session
    return Deleted(
        sessions=len(done),
        turns=sum(removed.turns for removed in done),
        kept=sum(1 for turn in map(journal.turn, kept) if turn is not None and not turn.erased),
        bytes=sum(removed.bytes for removed in done),
        scrubbed=_wait_scrubbed(journal),
        left=tuple(left),
    )


def _pin(journal: Journal, arguments: Pin) -> Nothing:
    removal.pin(journal, arguments.session, arguments.pinned)
    return Nothing()


def _compact(journal: Journal, arguments: Nothing) -> compact.Compacted:
    return compact.compact(journal)


def _backup(journal: Journal, arguments: Backup) -> backup.Copied:
    return backup.backup(journal, Path(arguments.path))


def _pin_snapshot(journal: Journal, arguments: snapshots.PinSnapshot) -> Nothing:
    journaled.pin(journal, arguments.response, arguments.pinned)
    return Nothing()


def _wait_scrubbed(journal: Journal) -> bool:
    """Whether the write-ahead log is free of what was erased; waits a little for readers to let go of it."""
    until = time.monotonic() + SCRUB_S_MAX
    while not journal.scrubbed and time.monotonic() < until:
        time.sleep(SCRUB_LOOK_S)
    return journal.scrubbed


class WithEngine(NamedTuple):
    """An operation that asks the engine: it runs where the engine is spoken to (api.replays)."""

    arguments: type[msgspec.Struct]
    result: type[msgspec.Struct]


WITH_ENGINE: Mapping[str, WithEngine] = MappingProxyType(
    {"sessions.replay": WithEngine(replay.Replay, replay.Replayed)}
)


class Rebuilt(msgspec.Struct, frozen=True):
    """How many facts were folded."""

    facts: int


def _rebuild(journal: Journal, _: Nothing) -> Rebuilt:
    return Rebuilt(journal.rebuild())


OPERATIONS: Mapping[str, Operation] = MappingProxyType(
    {
        "sessions.delete": Operation(DeleteSession, Deleted, _delete_session),
        "sessions.delete_turn": Operation(DeleteTurn, Deleted, _delete_turn),
        "sessions.prune": Operation(Prune, Deleted, _prune),
        "sessions.pin": Operation(Pin, Nothing, _pin),
        "snapshots.gc": Operation(snapshots.Collect, snapshots.Collected, snapshots.collect),
        "snapshots.pin": Operation(snapshots.PinSnapshot, Nothing, _pin_snapshot),
        "sessions.import": Operation(importing.ImportFile, importing.Imported, importing.import_file, creates=True),
        "journal.backup": Operation(Backup, backup.Copied, _backup, repairs=True),
        "journal.compact": Operation(Nothing, compact.Compacted, _compact),
        "journal.rebuild": Operation(Nothing, Rebuilt, _rebuild, repairs=True),
    }
)


def run(journal: Journal, name: str, arguments: bytes) -> bytes:
    """Runs an operation on arguments in msgpack; gives its result in msgpack, once that is a fact.

    Raises what the operation raises, and BadRequest for a name or arguments that this version does not know.
    """
    operation = OPERATIONS.get(name)
    if operation is None:
        known = ", ".join((*OPERATIONS, *WITH_ENGINE))
        raise errors.BadRequest(f"there is no operation {name!r}; known are {known}")
    result = operation.function(journal, decode(name, operation.arguments, arguments))
    assert isinstance(result, operation.result), (name, result)
    return done(journal, name, result)


A = TypeVar("A", bound=msgspec.Struct)


def decode(name: str, kind: type[A], arguments: bytes) -> A:
    """The arguments of an operation. Raises BadRequest."""
    try:
        return msgspec.msgpack.decode(arguments, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise errors.BadRequest(f"the arguments of {name} cannot be read: {error}") from None


def done(journal: Journal, name: str, result: msgspec.Struct) -> bytes:
    """The result of an operation in msgpack, once that it has succeeded is a fact. Waits for the commit."""
    journal.append([events.Fact(events.AdminActed(action=name, pid=os.getpid()))]).result()
    return msgspec.msgpack.encode(result)
