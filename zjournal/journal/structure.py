"""Whether SQLite's own structures are whole: at once where nobody writes, else in short pieces.

SQLite's integrity check reads the whole file in one transaction. Beside a server that would keep the log from being
emptied for as long as it takes. There each row is looked up through each index of its table instead, page by page; the
trees themselves are read by whoever walks facts and contents.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from typing import NamedTuple

from zjournal.journal import database
from zjournal.journal.reader import Pace, Reader

MIGRATIONS = "_sqlite_migrations"
STEPS = [("zjournal", "m0001_journal")]  # of the schema, in order
LITESTREAM = ("_litestream_seq", "_litestream_lock")
_CALL = re.compile(r"\bsubstr\(")  # the only function in them
TABLES = (
    "content",
    "session",
    "turn",
    "chunk",
    "snapshot",
    "backup",
)  # those with indexes; the few rows of the others are read whole


class _Index(NamedTuple):
    table: str
    name: str
    terms: tuple[str, ...]  # columns, and expressions in which `{row}` stands before each column
    where: str  # of a partial index, else "1"


def schema_fault(reader: Reader) -> str | None:
    """The first table, index, trigger or view that is not ours, is missing or was changed; None if there is none."""
    own = database.own_schema()
    with reader.transaction() as db:
        found = {
            (kind, name): sql for kind, name, sql in db.execute("SELECT type, name, sql FROM sqlite_schema ORDER BY 2")
        }
        steps = db.execute("SELECT migration_set, name FROM _sqlite_migrations ORDER BY id").fetchall()
    for (kind, name), sql in found.items():
        if (kind, name) not in own and not _of_a_known_program(kind, name):
            return f"there is {'an' if kind == 'index' else 'a'} {kind} {name!r} in it that is not of zjournal"
        # The library that keeps the list of steps makes its table as it likes.
        if (kind, name) in own and MIGRATIONS not in name and sql != own[kind, name]:
            return f"{kind} {name} is not as zjournal makes it"
    for kind, name in own.keys() - found.keys():
        if MIGRATIONS not in name:
            return f"{kind} {name} is missing"
    if steps != STEPS:
        return f"table {MIGRATIONS} lists other steps than those of this schema: {steps}"
    return None


def _of_a_known_program(kind: str, name: str) -> bool:
    """What Litestream and SQLite's ANALYZE keep in a database: tables that change nothing in ours."""
    return kind == "table" and (name in LITESTREAM or name.startswith("sqlite_stat"))


def whole_fault(reader: Reader) -> str | None:
    """What SQLite's integrity check finds first; None if nothing. One read transaction, as long as it takes."""
    with reader.transaction() as db:
        (found,) = db.execute("PRAGMA integrity_check(1)").fetchone()
    return None if found == "ok" else f"SQLite finds: {found}"


def paged_fault(reader: Reader) -> str | None:
    """The first row that an index does not know; None if all are known. Short read transactions."""
    with reader.transaction() as db:
        indexes = [index for table in TABLES for index in _indexes(db, table)]
    for index in indexes:
        query = _unknown_row(index)
        after, pace = 0, Pace()
        while True:
            with pace, reader.transaction() as db:
                (last,) = db.execute(f"SELECT max(rowid) FROM {index.table}").fetchone()
                upto = after + pace.rows
                row = db.execute(query, (after, upto)).fetchone()
            if row is not None:
                return f"row {row[0]} of table {index.table} is missing from its index {index.name}"
            if upto >= (last or 0):
                break
            after = upto
    return None


def _indexes(db: sqlite3.Connection, table: str) -> Iterator[_Index]:
    for _, name, _, _, partial in db.execute(f"PRAGMA index_list({table})").fetchall():
        columns = [row[2] for row in db.execute(f"PRAGMA index_info('{name}')")]
        (sql,) = db.execute("SELECT sql FROM sqlite_schema WHERE name = ?", (name,)).fetchone()
        where = "1"
        if partial:
            sql, where = sql.split(" WHERE ", 1)
        if None in columns:  # an expression; our indexes have no more than one
            terms: tuple[str, ...] = (_CALL.sub("substr({row}.", sql[sql.index("(") + 1 : sql.rindex(")")]),)
        else:
            terms = tuple(f"{{row}}.{column}" for column in columns)
        yield _Index(table, name, terms, where)


def _unknown_row(index: _Index) -> str:
    same = " AND ".join(f"{term.format(row='b')} IS {term.format(row='a')}" for term in index.terms)
    known = (
        f"SELECT 1 FROM {index.table} AS b INDEXED BY {index.name}"
        f" WHERE {same} AND b.rowid = a.rowid AND ({index.where})"
    )
    return (
        f"SELECT a.rowid FROM {index.table} AS a NOT INDEXED"
        f" WHERE a.rowid > ? AND a.rowid <= ? AND ({index.where}) AND NOT EXISTS ({known}) LIMIT 1"
    )
