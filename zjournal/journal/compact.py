"""Compaction: gives the room of what was erased back to the disk.

The writer rewrites the database with VACUUM. Nothing is written meanwhile, and requests wait; readers go on. The new
database goes through the write-ahead log, which is emptied behind it, so a kill at any moment leaves the old or the
new one, whole. For a while the disk holds the database three times: the old one, a temporary one, and the log.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path

import msgspec

from zjournal.config import show_size, sqlite_temporary_dir
from zjournal.errors import DataDirFault
from zjournal.journal.log import Journal

MARGIN_BYTES = 16 << 20  # that stay free beside it, for the facts of other requests


class Compacted(msgspec.Struct, frozen=True):
    """Bytes of the database and its log on the disk. `scrubbed`: the log holds nothing old any more."""

    before: int
    after: int
    scrubbed: bool

    @property
    def freed(self) -> int:
        """What came back to the disk; below 0 where more was written meanwhile than came back."""
        return self.before - self.after


def compact(journal: Journal) -> Compacted:
    """Rewrites the journal without gaps. Waits for it. Raises DataDirFault when the disk has no room for that."""
    before = _on_disk(journal.path)
    while journal.seal():  # what is packed takes less room
        pass

    def work(db: sqlite3.Connection) -> None:
        _check_room(bytes_in_use(db), journal.path.parent, sqlite_temporary_dir(os.environ))
        db.execute("VACUUM")

    journal.run_bare(work).result()
    return Compacted(before, _on_disk(journal.path), journal.scrubbed)


def bytes_in_use(db: sqlite3.Connection) -> int:
    """The bytes of the database that hold something: its pages without the free ones."""
    pages, free, size = (
        db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size


def _check_room(needed: int, data_dir: Path, temporary: Path) -> None:
    """Raises DataDirFault unless there is room for a copy in both places, or for two in one."""
    shared = data_dir.stat().st_dev == temporary.stat().st_dev
    for folder, copies in ((data_dir, 2 if shared else 1), (temporary, 2 if shared else 1)):
        wanted = needed * copies + MARGIN_BYTES
        free = shutil.disk_usage(folder).free
        if free < wanted:
            raise DataDirFault(
                f"{folder}: compaction needs {_mib(wanted)} of free space here, and there are {_mib(free)}; "
                "make room, or set SQLITE_TMPDIR to a folder on another disk"
            )


def _on_disk(path: Path) -> int:
    files = (path, path.with_name(path.name + "-wal"))
    return sum(file.stat().st_size for file in files if file.exists())


def _mib(size: int) -> str:
    return show_size(max(size >> 20, 1) << 20)
