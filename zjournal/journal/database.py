"""The SQLite file: made, recognised, opened. Nothing is written to a file before it is known to be our journal.

A new journal is built beside its place and renamed, so `journal.db` is whole or absent, whenever the power goes.
A file is recognised by the application id in its first 100 bytes, read without SQLite, which could otherwise roll
a foreign database's log forward. But nobody may open and close the file like that while this process has it open as a
database: closing drops all locks that the process has on it (POSIX), and the next program that opens the journal and
ends would take itself for the last one, and remove the log under the writer.

WAL and synchronous=FULL: a commit that returned survives the power.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from zjournal.errors import JournalFault
from zjournal.journal.datadir import FILE_MODE, JOURNAL_FILE

APPLICATION_ID = 0x7A6A6E6C  # "zjnl"
SCHEMA_VERSION = 1  # number of steps in zjournal.migrations
BUSY_MS = 5_000  # for a foreign writer, such as a shell that someone opened on the journal
SALVAGE_STEP = "restore it from a backup, or copy what can be proved with `zj journal salvage OUT`"
_MAGIC = b"SQLite format 3\x00"
_HEADER_BYTES = 100
_PART_FILE = "journal.db.new"
_PART_BYTES = 1 << 20  # of the log, read and written at once
# What a damaged file makes of a query: Python cannot always decode what SQLite says of a schema that is rubbish.
DAMAGES = (sqlite3.Error, UnicodeDecodeError)
_TABLES = ("segment", "content", "event", "meta", "session", "tenant", "turn", "chunk", "snapshot", "backup")


class Identity(NamedTuple):
    """What table `meta` says: which journal this is."""

    id: bytes  # 16 random bytes
    secret: bytes  # 32 random bytes: item ids are derived from it


def open_writer(data_dir: Path, entropy: Callable[[int], bytes] = secrets.token_bytes) -> sqlite3.Connection:
    """Opens the journal of a locked, prepared directory for its only writer, and makes or migrates it if necessary.

    Raises JournalFault (path, reason, next step) for a file that is foreign, newer, damaged or read-only.
    """
    path = data_dir / JOURNAL_FILE
    if path.exists():
        identify(path)
        _private(path)
    else:
        _create(data_dir, entropy)
    try:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_MS / 1000)
    except sqlite3.Error as error:
        raise damage(path, error) from None
    try:
        _refuse_newer(db, path)
        _configure(db)
        check_triggers(db, path)
        _migrate(db)
        _refuse_older(db, path, "no step of the schema changes that")
        check_schema(db, path)
        # Asks for the write lock, so that a read-only file is found now and not by the first request.
        db.execute("BEGIN IMMEDIATE")
        _restate_log(path)
        db.execute("ROLLBACK")
    except DAMAGES as error:
        let_go(db, path)
        raise damage(path, error) from None
    except BaseException:
        let_go(db, path)
        raise
    return db


def open_reader(data_dir: Path) -> sqlite3.Connection:
    """A read-only connection, beside a running server or without one. Raises JournalFault."""
    path = data_dir / JOURNAL_FILE
    if not _there(path):
        raise fault(path, "there is no journal here", "start a server with this --data-dir first, or name another")
    identify(path, writing=False)
    try:
        db = connect_reader(path)
    except sqlite3.Error as error:
        raise damage(path, error) from None
    try:
        _refuse_newer(db, path)
        _refuse_older(db, path)
        check_schema(db, path)
    except DAMAGES as error:
        db.close()
        raise damage(path, error) from None
    except BaseException:
        db.close()
        raise
    return db


def identify(path: Path, *, writing: bool = True) -> None:
    """Raises JournalFault unless the file's first bytes are those of a journal of ours. Reads 100 bytes."""
    try:
        status = path.stat()
    except OSError as error:
        raise fault(path, f"cannot be read ({error.strerror})", "check its owner and mode") from None
    if not stat.S_ISREG(status.st_mode):
        raise fault(path, "is not a file", "move it away, or choose another --data-dir")
    if writing and status.st_uid != os.geteuid():
        step = "run as that user, or change the owner"
        raise fault(path, f"belongs to user {status.st_uid}, not to {os.geteuid()}", step)
    if not os.access(path, os.R_OK):
        raise fault(path, "cannot be read (Permission denied)", "check its owner and mode")
    if status.st_size < _HEADER_BYTES:
        raise fault(path, "is cut off: it has no whole header", "restore it from a backup, or move it away")
    try:
        first = header(path, status)
    except OSError as error:
        raise fault(path, f"cannot be read ({error.strerror})", "check its owner and mode") from None
    if not first.startswith(_MAGIC):
        raise fault(path, "is not an SQLite file", "move it away, or choose another --data-dir")
    if int.from_bytes(first[68:72]) != APPLICATION_ID:
        raise fault(path, "is an SQLite file of another program", "move it away, or choose another --data-dir")
    version = int.from_bytes(first[60:64])
    if version > SCHEMA_VERSION:  # known before SQLite, which would put its files beside it
        raise _newer(path, version)
    if writing and not (status.st_mode & stat.S_IWUSR and os.access(path, os.W_OK)):
        raise fault(path, "is read-only", "run chmod u+w on it, or choose another --data-dir")


def header(path: Path, status: os.stat_result) -> bytes:
    """The first bytes of a file, by a descriptor that this process has on it already and keeps; else by a new one."""
    held = held_bytes(status, _HEADER_BYTES)
    if held is not None:
        return held
    with path.open("rb") as file:
        return file.read(_HEADER_BYTES)


def held_bytes(status: os.stat_result, size: int) -> bytes | None:
    """The first bytes of a file, by a descriptor that this process has on it already and keeps; None without one."""
    descriptors = os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else []
    for name in descriptors:
        try:
            if os.path.samestat(os.fstat(int(name)), status):
                return os.pread(int(name), size, 0)
        except OSError:  # closed meanwhile, as that of the list itself
            continue
    return None


def identity(db: sqlite3.Connection, path: Path) -> Identity:
    """Reads table `meta`. Raises JournalFault when it is incomplete."""
    rows = dict(db.execute("SELECT key, value FROM meta"))
    if not all(isinstance(rows.get(key), bytes) for key in Identity._fields):
        raise fault(path, "has lost its identity (table meta): nothing in it can be proved", "restore it from a backup")
    return Identity(rows["id"], rows["secret"])


def check_schema(db: sqlite3.Connection, path: Path) -> None:
    """Raises JournalFault when a table is missing."""
    names = {name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    missing = [name for name in _TABLES if name not in names]
    if missing:
        raise fault(path, f"has no table {missing[0]}", SALVAGE_STEP)


def check_triggers(db: sqlite3.Connection, path: Path) -> None:
    """Raises JournalFault when somebody has put a trigger into the database: it could change what we write."""
    row = db.execute("SELECT name, tbl_name FROM sqlite_schema WHERE type = 'trigger' LIMIT 1").fetchone()
    if row is not None:
        reason = f"has a trigger {row[0]!r} on table {row[1]}, which is not of zjournal and may change what is written"
        raise fault(path, reason, "drop it with the program that made it, then run `zj journal verify`")


def own_schema() -> dict[tuple[str, str], str | None]:
    """What is in a database of ours, by type and name: the SQL that made it, None where SQLite made it by itself."""
    db = sqlite3.connect(":memory:", isolation_level=None)
    try:
        _migrate(db)
        return {(kind, name): sql for kind, name, sql in db.execute("SELECT type, name, sql FROM sqlite_schema")}
    finally:
        db.close()


def fault(path: Path, reason: str, step: str) -> JournalFault:
    """One sentence for a person: path, reason, next step."""
    return JournalFault(f"{path}: {reason}; {step}")


def damage(path: Path, error: Exception) -> JournalFault:
    """An error of SQLite at open, as a fault."""
    text = str(error)
    if "disk I/O error" in text or "disk is full" in text:
        return fault(path, f"cannot be read or written ({text})", "check the disk and its free space, and try again")
    if "readonly" in text or "unable to open" in text:
        step = "check owner and mode of it and its directory, and the disk's free space"
        return fault(path, f"cannot be opened for writing ({text})", step)
    if "locked" in text:
        return fault(path, "is held by another program", "close the program that has it open, and try again")
    return fault(path, f"is damaged ({text})", SALVAGE_STEP)


def _create(data_dir: Path, entropy: Callable[[int], bytes]) -> None:
    path, part = data_dir / JOURNAL_FILE, data_dir / _PART_FILE
    for suffix in ("-wal", "-shm", "-journal"):
        left = data_dir / (JOURNAL_FILE + suffix)
        if left.exists():
            step = f"bring {JOURNAL_FILE} back, or move the file away"
            raise fault(left, f"belongs to a {JOURNAL_FILE} that is gone", step)
    try:
        part.unlink(missing_ok=True)  # left by a start that was killed here; never held a fact
        os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE))
        db = sqlite3.connect(part, isolation_level=None)
        try:
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # what sealing and erasure free can be given back
            _migrate(db)
            rows = Identity(entropy(16), entropy(32))._asdict().items()
            db.executemany("INSERT INTO meta (key, value) VALUES (?, ?)", rows)
            db.execute("PRAGMA journal_mode = WAL")
        finally:
            db.close()
        sync(part)
        part.rename(path)
        sync(data_dir)
    except (OSError, sqlite3.Error) as error:
        raise fault(path, f"cannot be made ({error})", "check the disk's space and the directory's mode") from None


def _migrate(db: sqlite3.Connection) -> None:
    if db.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION:
        return
    # Imported only for a new or older journal: they cost a quarter of a second and 15 MiB.
    from sqlite_utils import Database

    from zjournal.migrations import migrations

    migrations.apply(Database(db, execute_plugins=False))


def _refuse_newer(db: sqlite3.Connection, path: Path) -> None:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:  # in the log, and not in the file yet
        raise _newer(path, version)


def _newer(path: Path, version: int) -> JournalFault:
    reason = f"has schema version {version}, and this zjournal knows {SCHEMA_VERSION}"
    return fault(path, reason, "use the newer zjournal that wrote it")


def _refuse_older(db: sqlite3.Connection, path: Path, reason: str = "") -> None:
    """A reader cannot migrate; without this it would stumble over a missing column. `reason`: why nobody can."""
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version < SCHEMA_VERSION:
        told = f"has schema version {version}, and this zjournal reads {SCHEMA_VERSION}"
        if reason:
            raise fault(path, f"{told}: {reason}", SALVAGE_STEP)
        raise fault(path, told, "start the server on it once, which brings it up to date")


def _configure(db: sqlite3.Connection) -> None:
    mode = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    assert mode == "wal", mode
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA fullfsync = ON")  # without it macOS only hands the data to the drive
    db.execute("PRAGMA secure_delete = ON")  # erased content is overwritten in the file, not only unlinked


def connect_reader(path: Path) -> sqlite3.Connection:
    """A read-only connection, to a file that may be anything."""
    uri = path.absolute().as_uri() + "?mode=ro"
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=BUSY_MS / 1000)


def let_go(db: sqlite3.Connection, path: Path) -> None:
    """Closes without the checkpoint that the last connection would make: a file that is refused stays as it is.

    A log that could not be made durable must not be copied into the database either: what the power then leaves of
    the two would not fit together. A reader that is open meanwhile stands in the way, and cannot do it itself.
    """
    guard = None
    try:
        guard = connect_reader(path)
        guard.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except DAMAGES:
        pass  # what cannot be read cannot be copied either
    finally:
        db.close()
        if guard is not None:
            guard.close()


def _restate_log(path: Path) -> None:
    """Writes the bytes of the write-ahead log again where they stand, and syncs them. Needs the write lock.

    What a process reads there after a crash may be in memory alone: a sync that failed has marked pages as clean that
    never reached the disk, and no later sync would write them. New commits go behind them, and would be lost with them.
    """
    try:
        descriptor = os.open(path.with_name(path.name + "-wal"), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        raise fault(path, f"its log cannot be opened ({error.strerror})", "check owner and mode of it") from None
    try:
        at = 0
        while part := os.pread(descriptor, _PART_BYTES, at):
            at += os.pwrite(descriptor, part, at)
        os.fsync(descriptor)
    except OSError as error:
        raise fault(
            path, f"its log cannot be written ({error.strerror})", "check the disk and its free space"
        ) from None
    finally:
        os.close(descriptor)


def _there(path: Path) -> bool:
    """Whether the file exists. Raises JournalFault if that cannot be known, because its folder is closed to us."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise fault(
            path, f"cannot be reached ({error.strerror})", "run as its owner, or check the folder's mode"
        ) from None
    return True


def _private(path: Path) -> None:
    # SQLite gives -wal and -shm the mode of the database.
    for suffix in ("", "-wal", "-shm"):
        file = path.with_name(path.name + suffix)
        if file.exists() and stat.S_IMODE(file.stat().st_mode) & 0o077:
            file.chmod(FILE_MODE)


def sync(path: Path) -> None:
    """Makes a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
