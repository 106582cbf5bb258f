"""Has an operation done by whoever owns the journal: the server that runs, else this process.

A running server is asked through `admin.sock`. Without one this process takes the lock of the data directory and runs
the same function. A server that is just starting or stopping is waited for. A replay asks that server's engine, or one
that is started for it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from zjournal.config import Config
from zjournal.errors import DataDirLocked, Unavailable

if TYPE_CHECKING:
    import msgspec

    from zjournal.link.admin import Outcome
    from zjournal.sessions.replay import Replay, Replayed

OWNER_S_MAX = 10.0  # how long an owner of the directory may take to answer or to go
RETRY_S = 0.05
READ_BYTES = 1 << 16

R = TypeVar("R", bound="msgspec.Struct")


def perform(config: Config, name: str, arguments: msgspec.Struct, result: type[R]) -> R:
    """Runs the operation `name` of sessions.operations; returns its result, which is a `result`.

    Raises the operation's Fault wherever it ran, JournalFault where there is no journal, DataDirLocked when the
    directory's owner does not answer, Unavailable when the server went away before it answered.
    """
    import msgspec

    from zjournal.sessions.operations import OPERATIONS

    assert OPERATIONS[name].result is result, name
    packed = msgspec.msgpack.encode(arguments)
    return msgspec.msgpack.decode(_by_owner(config, name, packed, lambda: _run_here(config, name, packed)), type=result)


def replay(config: Config, arguments: Replay) -> Replayed:
    """Runs the operation `sessions.replay` on the engine of the server that runs, else on one of its own.

    Raises as `perform`, and where no server runs ModelFault and EngineStartFault for the model that is configured.
    """
    import msgspec

    from zjournal.sessions.replay import Replayed

    def here() -> bytes:
        from zjournal import alone

        return alone.replay(config, arguments)

    packed = msgspec.msgpack.encode(arguments)
    return msgspec.msgpack.decode(_by_owner(config, "sessions.replay", packed, here), type=Replayed)


def _by_owner(config: Config, name: str, packed: bytes, here: Callable[[], bytes]) -> bytes:
    """The result in msgpack: of the server that runs, else of `here`, which takes the directory's lock."""
    until = time.monotonic() + OWNER_S_MAX
    while (answer := _ask_server(config, name, packed)) is None:
        try:
            return here()
        except DataDirLocked:
            if time.monotonic() > until:
                raise
        time.sleep(RETRY_S)
    return answer


def _run_here(config: Config, name: str, packed: bytes) -> bytes:
    from zjournal.journal import database, datadir
    from zjournal.journal.log import Journal
    from zjournal.sessions.operations import OPERATIONS, run
    from zjournal.sessions.snapshots import Unlinking, reconciled

    if not OPERATIONS[name].creates:
        database.open_reader(config.data_dir).close()  # raises where there is no journal: none shall be made
    strict = not OPERATIONS[name].repairs  # as a server does at its start
    with (
        datadir.lock(config.data_dir),
        Journal.open(config.data_dir, checkpoint=config.checkpoint, log_limit=config.wal_max, strict=strict) as journal,
    ):
        if strict:
            journal.recover()  # what a killed server left open has ended, and must not look as if it ran
        if name == "snapshots.gc":
            reconciled(journal, config.data_dir)  # what a kill has left, or somebody has put there or taken away
        unlinking = Unlinking(journal, config.data_dir)
        try:
            return run(journal, name, packed)
        finally:
            unlinking.close()  # what was given up is durable by now


def _ask_server(config: Config, name: str, packed: bytes) -> bytes | None:
    """The result in msgpack; None when no server listens."""
    import msgspec

    from zjournal.link import admin

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            with admin.address(config.data_dir) as address:
                sock.connect(address)
        except OSError:
            return None
        outcome = _exchange(sock, admin.frame(admin.Call(admin.VERSION, name, msgspec.Raw(packed))))
    if outcome.failure is not None:
        raise admin.fault_of(outcome.failure)
    return bytes(outcome.result)


def _exchange(sock: socket.socket, call: bytes) -> Outcome:
    from zjournal.link import admin

    try:
        sock.sendall(call)
        length = admin.length_of(_read(sock, admin.LENGTH_BYTES))
        return admin.decode_outcome(_read(sock, length))
    except OSError:
        raise Unavailable(
            "the server went away before it answered; look with `zj sessions list`, and try again"
        ) from None


def _read(sock: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = sock.recv(min(length - len(data), READ_BYTES))
        if not part:
            raise ConnectionResetError
        data += part
    return bytes(data)
