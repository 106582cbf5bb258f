"""Who holds a journal's log: the processes with a read lock on its index, as Linux tells them.

SQLite takes POSIX locks on bytes of `journal.db-shm`: a reader holds one of five marks, shared, as long as its
transaction is open. /proc/locks names pid, device and inode of every lock. Its device numbers are not those of stat(2)
on every file system, so a process counts as well when it has the file open. Elsewhere than on Linux nobody is found.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LOCKS = Path("/proc/locks")
LOCKS_BYTES_MAX = 16 << 20
READ_MARKS = range(123, 128)  # the lock bytes of the five read marks, see "WAL-Index File Format" of SQLite
_STATES = {"T": "stopped", "t": "traced", "Z": "ended", "D": "waiting for a disk"}


class Lock(NamedTuple):
    """A line of /proc/locks: who locks which bytes of which file. `device` is (major, minor)."""

    pid: int
    device: tuple[int, int]
    inode: int
    first: int
    last: int


class Holder(NamedTuple):
    """A process that holds a read mark."""

    pid: int
    name: str  # of the program; "" if that may not be known
    state: str  # such as "stopped"; "" for one that runs

    def __str__(self) -> str:
        about = ", ".join(part for part in (self.name, self.state) if part)
        return f"process {self.pid}" + (f" ({about})" if about else "")


def parse(text: str) -> Iterator[Lock]:
    """The POSIX locks in the text of /proc/locks that are held; those that wait, and lines of other kinds, are not."""
    for line in text.splitlines():
        fields = line.split()
        if len(fields) != 8 or fields[1] != "POSIX":
            continue
        try:
            major, minor, inode = fields[5].split(":")
            last = 1 << 62 if fields[7] == "EOF" else int(fields[7])
            yield Lock(int(fields[4]), (int(major, 16), int(minor, 16)), int(inode), int(fields[6]), last)
        except ValueError:
            continue


def holding(index: Path) -> dict[int, frozenset[int]]:
    """The pids that hold read marks of a log's index (a `-shm` file), each with its marks (0 to 4)."""
    try:
        status = index.stat()
        with LOCKS.open(encoding="utf-8", errors="replace") as file:
            locks = list(parse(file.read(LOCKS_BYTES_MAX)))
    except OSError:
        return {}
    device = os.major(status.st_dev), os.minor(status.st_dev)
    found: dict[int, set[int]] = {}
    for lock in locks:
        marks = {at - READ_MARKS.start for at in READ_MARKS if lock.first <= at <= lock.last}
        if marks and lock.inode == status.st_ino and (lock.device == device or _has_open(lock.pid, index)):
            found.setdefault(lock.pid, set()).update(marks)
    return {pid: frozenset(marks) for pid, marks in found.items()}


def describe(pid: int) -> Holder:
    """Name and state of a process, as far as they may be known."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return Holder(pid, "", "")
    return Holder(pid, name, _STATES.get(state, ""))


def _has_open(pid: int, path: Path) -> bool:
    wanted = os.path.realpath(path)
    try:
        links = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for link in links:
        try:
            if os.readlink(f"/proc/{pid}/fd/{link}") == wanted:
                return True
        except OSError:
            continue
    return False
