"""A consistent copy of the journal in one file, made while it is written to.

SQLite's backup runs on the writer's own connection, a few pages at a time, and what waits is committed in between. A
page that changes after it was copied is copied again by SQLite, so the copy is the journal as it is at the end, and
no read transaction keeps the write-ahead log from being reset.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec

from zjournal.errors import Fault, OutputFault
from zjournal.journal import database, quick
from zjournal.journal.log import Journal
from zjournal.journal.output import new_file


class Copied(msgspec.Struct, frozen=True):
    """What was made: `head` is the number of the last fact in it, `link` its link in hex."""

    path: str
    bytes: int
    facts: int
    head: int
    link: str


def backup(journal: Journal, path: Path) -> Copied:
    """Writes the whole journal to `path`, which must not exist: mode 0600, synced, to be used as a `journal.db`.

    Waits for the writer: for a thread that may. Raises OutputFault, JournalUnavailable when the journal is closed.
    """
    with new_file(path) as part:
        target = sqlite3.connect(part, isolation_level=None, check_same_thread=False)
        try:
            # Nobody sees the file before it is whole and synced, so nothing of it needs a journal of its own.
            target.execute("PRAGMA synchronous = OFF")
            journal.copy(target).result()
        except OutputFault as fault:
            raise OutputFault(f"{path}: {fault.message}") from None
        finally:
            target.close()
        return _look(part, path)


def _look(part: Path, path: Path) -> Copied:
    """Opens the copy as a stranger would and tells what is in it."""
    try:
        database.identify(part)
        # immutable: no log and no shared memory are made beside it.
        db = sqlite3.connect(part.absolute().as_uri() + "?mode=ro&immutable=1", uri=True)
        try:
            head = quick.checked_head(db, path, database.identity(db, path), facts=1)
        finally:
            db.close()
    except (sqlite3.Error, Fault) as error:
        raise OutputFault(f"{path}: the copy cannot be read back ({error}); check the disk") from None
    return Copied(str(path), part.stat().st_size, head.seq, head.seq, head.link.hex() if head.seq else "")
