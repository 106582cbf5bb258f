"""The head outside the database: `journal.head` remembers how far the journal had come, so that a cut tail shows.

It is written after a commit, unsynced, at most once a second and at the end, and renamed into its place. So it may be
behind the journal, missing, or after a loss of power broken, and all that is harmless. It can never be ahead of a
journal that has kept its promise. docs/journal.md shows it byte by byte.

It also remembers how long the write-ahead log was, synced, before each checkpoint. For what a checkpoint has carried
into the database fits the whole log only: with a log that has lost its end, pages of different times would be read as
one state, and that need not show.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from zjournal.journal import database
from zjournal.journal.chain import Head
from zjournal.journal.datadir import FILE_MODE

HEAD_FILE = "journal.head"
EVERY_US = 1_000_000
VERSION = 1
_MAGIC = b"zjhead\x00\x00"
_FIELDS = struct.Struct(">8sI16sQ32sQ8sI")
BYTES = _FIELDS.size + hashlib.sha256().digest_size
_PART_FILE = "journal.head.new"

_log = logging.getLogger(__name__)


class Extent(NamedTuple):
    """How long a write-ahead log is: the pages that are committed in it, since it was begun with these salts."""

    salts: bytes
    pages: int


NO_LOG = Extent(bytes(8), 0)


class Witness(NamedTuple):
    """What the file says: of which journal (its id), how far that had come, and how long its log was."""

    journal: bytes
    head: Head
    log: Extent = NO_LOG


class Broken(ValueError):
    """The file says nothing; the reason is half a sentence."""


def encode(witness: Witness) -> bytes:
    """The file's bytes."""
    head = witness.head
    data = _FIELDS.pack(_MAGIC, VERSION, witness.journal, head.seq, head.link, head.time, *witness.log)
    return data + hashlib.sha256(data).digest()


def decode(data: bytes) -> Witness:
    """The inverse of encode. Raises Broken for any other bytes."""
    if len(data) != BYTES:
        raise Broken(f"has {len(data)} bytes, not {BYTES}")
    magic, version, journal, seq, link, time, salts, pages = _FIELDS.unpack_from(data)
    if magic != _MAGIC:
        raise Broken("does not begin as such a file does")
    if hashlib.sha256(data[: _FIELDS.size]).digest() != data[_FIELDS.size :]:
        raise Broken("does not match its checksum")
    if version != VERSION:
        raise Broken(f"has version {version}, and this zjournal knows {VERSION}")
    return Witness(journal, Head(seq, link, time), Extent(salts, pages))


def read(data_dir: Path) -> Witness | None:
    """What the file of a data directory says; None, which is logged, where it says nothing. Changes nothing."""
    path = data_dir / HEAD_FILE
    try:
        with path.open("rb") as file:
            return decode(file.read(BYTES + 1))
    except FileNotFoundError:
        _log.warning("%s is missing: a cut-off end of the journal would not show", path)
    except (OSError, Broken) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        _log.warning("%s says nothing (%s): a cut-off end of the journal would not show", path, reason)
    return None


def fault_of(seen: Witness, journal: bytes, head: int, link: bytes | None) -> str | None:
    """Why a journal with this id and `head` facts is not the one that was seen, as half a sentence; None if it may be.

    `link` is the journal's own link of fact `seen.head.seq`, None if it has no such fact.
    """
    if seen.journal != journal:
        return f"is another journal than the one that {HEAD_FILE} was written for"
    if seen.head.seq > head:
        return f"its end is missing: it has {head} facts, and {HEAD_FILE} has seen {seen.head.seq}"
    if seen.head.seq and link != seen.head.link:
        return f"its fact {seen.head.seq} is not the one that {HEAD_FILE} has seen"
    return None


def log_fault_of(seen: Witness, log: Extent) -> str | None:
    """Why a log is not as it was seen, as half a sentence; None if it may be, or was begun since."""
    if log.salts != seen.log.salts or log.pages >= seen.log.pages:
        return None
    return f"the end of its log is missing: that has {log.pages} pages, and {HEAD_FILE} has seen {seen.log.pages}"


class HeadFile:
    """Writes the file of an open journal. All methods belong to the writer thread."""

    def __init__(self, data_dir: Path, journal: bytes) -> None:
        self._path, self._part = data_dir / HEAD_FILE, data_dir / _PART_FILE
        self._journal = journal
        self._written: Head | None = None
        self._synced: tuple[int, Extent] | None = None
        self._tried_us: int | None = None
        self._failed = False

    def pending(self, head: Head) -> bool:
        """Whether the file does not name this head yet."""
        return self._written is None or self._written.seq != head.seq

    def note(self, head: Head, now_us: int, log: Callable[[], Extent] = lambda: NO_LOG) -> None:
        """Writes, unless that was done less than a second ago. A clock that has been set back is no reason to wait."""
        if self.pending(head) and (self._tried_us is None or not 0 <= now_us - self._tried_us < EVERY_US):
            self._tried_us = now_us
            self.write(head, log())

    def write(self, head: Head, log: Extent = NO_LOG, *, sync: bool = False) -> None:
        """Writes now, if there is anything new. `sync`: so that a loss of power leaves it, or a later one.

        A disk that refuses is no reason to refuse facts: the file stays behind, and that is logged.
        """
        if self._synced == (head.seq, log) or not (sync or self.pending(head)):
            return
        try:
            with contextlib.suppress(FileNotFoundError):
                self._part.unlink()
            descriptor = os.open(self._part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE)
            try:
                data = encode(Witness(self._journal, head, log))
                if os.write(descriptor, data) != len(data):
                    raise OSError("the disk is full")
                if sync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            self._part.rename(self._path)
            if sync:
                database.sync(self._path.parent)
                self._synced = head.seq, log
        except OSError as error:
            if not self._failed:
                _log.warning("%s cannot be written: %s", self._path, error)
            self._failed = True
        else:
            self._written, self._failed = head, False
