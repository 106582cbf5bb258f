"""Step 1: facts, contents, the projections, tenants and the journal's own identity. docs/journal.md explains them.

`event` has no secondary index on purpose: one halves the rate at which token facts can be appended. `content` is a
rowid table, because a WITHOUT ROWID one would drag its blobs through the interior pages of the tree; its rows refer to
each other by `id`, which VACUUM keeps. The projections take the sequence number of their first fact as rowid, so that
every index ends in journal order without saying so. Indexes hold parts of names and digests, for whole ones would take
more room than the rows.
"""

from __future__ import annotations

import sqlite3

from sqlite_utils import Database, Migrations

SCHEMA = (
    "PRAGMA application_id = 0x7A6A6E6C",  # "zjnl"
    "PRAGMA user_version = 1",
    """
    CREATE TABLE meta (
        key TEXT PRIMARY KEY,
        value BLOB NOT NULL
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE tenant (
        id TEXT PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        secret BLOB NOT NULL,
        seal BLOB NOT NULL
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE event (
        seq INTEGER PRIMARY KEY,
        time INTEGER NOT NULL,
        tag TEXT NOT NULL,
        version INTEGER NOT NULL,
        body BLOB NOT NULL,
        payload BLOB,
        payload_sha BLOB,
        link BLOB NOT NULL
    )
    """,
    """
    CREATE TABLE segment (
        last INTEGER PRIMARY KEY,
        first INTEGER NOT NULL,
        link BLOB NOT NULL,
        tags TEXT NOT NULL,
        data BLOB NOT NULL
    )
    """,
    """
    CREATE TABLE content (
        id INTEGER PRIMARY KEY,
        digest BLOB NOT NULL,
        tenant TEXT NOT NULL,
        size INTEGER NOT NULL,
        refs INTEGER NOT NULL,
        base INTEGER,
        depth INTEGER NOT NULL,
        data BLOB NOT NULL
    )
    """,
    "CREATE UNIQUE INDEX content_digest ON content (substr(digest, 1, 8))",
    "CREATE INDEX content_base ON content (base) WHERE base IS NOT NULL",
    """
    CREATE TABLE session (
        opened_seq INTEGER PRIMARY KEY,
        session TEXT NOT NULL UNIQUE,
        tenant TEXT NOT NULL,
        key BLOB NOT NULL,
        opened_us INTEGER NOT NULL,
        turns INTEGER NOT NULL,
        last_seq INTEGER NOT NULL,
        last_us INTEGER NOT NULL,
        pinned INTEGER NOT NULL,
        deleted INTEGER NOT NULL
    )
    """,
    "CREATE INDEX session_key ON session (tenant, key) WHERE key != x''",
    "CREATE INDEX session_last ON session (last_seq)",
    """
    CREATE TABLE turn (
        accepted_seq INTEGER PRIMARY KEY,
        response TEXT NOT NULL,
        session TEXT NOT NULL,
        parent TEXT NOT NULL,
        tenant TEXT NOT NULL,
        protocol TEXT NOT NULL,
        model TEXT NOT NULL,
        stored INTEGER NOT NULL,
        created INTEGER NOT NULL,
        accepted_us INTEGER NOT NULL,
        finished_us INTEGER,
        status TEXT NOT NULL,
        reason TEXT NOT NULL,
        last_seq INTEGER NOT NULL,
        prompt INTEGER NOT NULL,
        cached INTEGER NOT NULL,
        restored INTEGER NOT NULL,
        restored_host INTEGER NOT NULL,
        cache_reason TEXT NOT NULL,
        output INTEGER NOT NULL,
        queue_us INTEGER NOT NULL,
        prefill_us INTEGER NOT NULL,
        decode_us INTEGER NOT NULL,
        ttft_us INTEGER,
        history BLOB NOT NULL,
        asked BLOB NOT NULL,
        erased INTEGER NOT NULL,
        code TEXT NOT NULL,
        message TEXT NOT NULL
    )
    """,
    """
    CREATE TABLE chunk (
        number INTEGER PRIMARY KEY,
        hash BLOB NOT NULL,
        space BLOB NOT NULL,
        parent BLOB NOT NULL,
        tokens INTEGER NOT NULL,
        file_bytes INTEGER NOT NULL,
        marks BLOB NOT NULL,
        plain INTEGER NOT NULL,
        bad INTEGER NOT NULL,
        used_us INTEGER NOT NULL,
        uses INTEGER NOT NULL
    )
    """,
    """
    CREATE TABLE snapshot (
        made_seq INTEGER PRIMARY KEY,
        response TEXT NOT NULL,
        session TEXT NOT NULL,
        tenant TEXT NOT NULL,
        namespace TEXT NOT NULL,
        space BLOB NOT NULL,
        end_hash BLOB NOT NULL,
        tokens INTEGER NOT NULL,
        made_us INTEGER NOT NULL,
        pinned INTEGER NOT NULL,
        kept INTEGER NOT NULL
    )
    """,
    """
    CREATE TABLE backup (
        seq INTEGER PRIMARY KEY,
        response TEXT NOT NULL
    )
    """,
    "CREATE UNIQUE INDEX turn_response ON turn (substr(response, 1, 25))",
    "CREATE INDEX turn_session ON turn (substr(session, 1, 10))",
    "CREATE INDEX turn_parent ON turn (substr(parent, -8)) WHERE parent != ''",
    "CREATE INDEX turn_history ON turn (substr(history, 1, 6)) WHERE history != x''",
    "CREATE INDEX turn_asked ON turn (substr(asked, 1, 6)) WHERE asked != x''",
    "CREATE INDEX turn_open ON turn (accepted_seq) WHERE finished_us IS NULL",
    "CREATE INDEX turn_unstored ON turn (finished_us) WHERE stored = 0 AND erased = 0",
    "CREATE INDEX turn_deleted ON turn (accepted_seq) WHERE status = 'deleted' AND erased = 0",
    "CREATE UNIQUE INDEX chunk_hash ON chunk (substr(hash, 1, 8))",
    "CREATE INDEX chunk_parent ON chunk (substr(parent, 1, 8))",
    "CREATE UNIQUE INDEX snapshot_response ON snapshot (substr(response, 1, 25))",
    "CREATE INDEX snapshot_end ON snapshot (substr(end_hash, 1, 8))",
    "CREATE INDEX backup_response ON backup (substr(response, 1, 25))",
)


def register(migrations: Migrations) -> None:
    """Adds this step."""

    @migrations(name="m0001_journal")
    def apply(db: Database) -> None:
        connection: sqlite3.Connection = db.conn
        for statement in SCHEMA:
            connection.execute(statement)
