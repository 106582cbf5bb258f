"""Whether SQLite's own structures are whole: at once where nobody writes, else in short pieces.

SQLite's integrity check reads the whole file in one transaction. Beside a server that would keep the log from being
emptied for as long as it takes. There each row is looked up through each index of its table instead, page by page; the
trees themselves are read by whoever walks facts and contents.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import NamedTuple

from zjournal.journal.reader import Pace, Reader

TABLES = ("content", "session", "turn")  # those with indexes; the few rows of the others are read whole


class _Index(NamedTuple):
    table: str
    name: str
    keys: tuple[str, ...]  # columns or expressions
    where: str  # of a partial index, else "1"


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
        keys = tuple(row[2] for row in db.execute(f"PRAGMA index_info('{name}')"))
        (sql,) = db.execute("SELECT sql FROM sqlite_schema WHERE name = ?", (name,)).fetchone()
        body, _, where = (sql or "").partition(" WHERE ")
        if None in keys:  # an expression has no name; an index of ours has one at most
            keys = (body.split("(", 1)[1].rsplit(")", 1)[0],)
        yield _Index(table, name, keys, where if partial else "1")


def _unknown_row(index: _Index) -> str:
    keys = ", ".join(f"{key} AS key{number}" for number, key in enumerate(index.keys))
    same = " AND ".join(f"{key} IS a.key{number}" for number, key in enumerate(index.keys))
    rows = (
        f"SELECT rowid AS number, {keys} FROM {index.table} NOT INDEXED"
        f" WHERE rowid > ? AND rowid <= ? AND ({index.where})"
    )
    known = f"SELECT 1 FROM {index.table} INDEXED BY {index.name} WHERE {same} AND rowid = a.number AND ({index.where})"
    return f"SELECT a.number FROM ({rows}) AS a WHERE NOT EXISTS ({known}) LIMIT 1"
