"""Folder against index: which files no snapshot names, which were left half-written, and which are missing.

It runs beside everything else, a few entries at a time, and only tells. A file that is named is never told of as an
orphan: it is asked for after it was seen, and what is younger than the walk may be a chunk whose event is still on
its way. Whoever deletes an orphan asks once more.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from zjournal.errors import ChunkFault
from zjournal.snapshots import format
from zjournal.snapshots.folder import QUARANTINE, Folder

STEP_ENTRIES = 256  # entries looked at between two pauses

# The bytes of a chunk that the index has, by the name of its namespace's folder and its hash; None for any other.
NamedBytes = Callable[[str, bytes], "int | None"]
# Whether the index has a chunk of this hash, be it one whose file was refused: then what was put aside of it stays.
Known = Callable[[bytes], bool]


class Kind(StrEnum):
    """What is not as it should be."""

    ORPHAN = "orphan"  # a chunk's file that no snapshot names, in its place or in quarantine
    LEFTOVER = "leftover"  # a file that was being written when the process ended
    STRANGE = "strange"  # no name of ours, or no regular file: nobody's business, never touched
    MISSING = "missing"  # a chunk that is named, without a file
    RESIZED = "resized"  # a chunk that is named, with a file of another size


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing found. `path` is relative to the folder; `hash` is that of a chunk, b"" where there is none."""

    kind: Kind
    path: str
    file_bytes: int
    hash: bytes = b""

    @property
    def aside(self) -> bool:
        """Whether it lies in quarantine."""
        return self.path.startswith(QUARANTINE + "/")


@dataclass(slots=True)
class Totals:
    """What the walk has seen so far."""

    files: int = 0
    disk_bytes: int = 0  # of all files, as they fill blocks of the disk
    aside: int = 0  # files in quarantine, which are in `files` as well
    aside_bytes: int = 0  # of these files


def walk(folder: Folder, named: NamedBytes, known: Known, before_ns: int, totals: Totals) -> Iterator[list[Finding]]:
    """Yields what is found in the folder, after every few entries; an empty list is a pause.

    Files changed at `before_ns` (of the wall clock) or later are counted and left alone, but for what lies in
    quarantine. Raises OSError if a folder cannot be read.
    """
    found: list[Finding] = []
    for number, (names, name, state) in enumerate(_entries(folder), 1):
        totals.files += 1
        totals.disk_bytes += state.st_blocks * 512
        totals.aside += names == (QUARANTINE,)
        totals.aside_bytes += state.st_size if names == (QUARANTINE,) else 0
        if names == (QUARANTINE,):
            finding = _look_aside(name, state, known)
        else:
            finding = _look(names, name, state, named, before_ns)
        if finding is not None:
            found.append(finding)
        if number % STEP_ENTRIES == 0:
            yield found
            found = []
    yield found


def absent(folder: Folder, chunks: Iterable[tuple[bytes, bytes, int]], named: NamedBytes) -> Iterator[list[Finding]]:
    """Yields which of the chunks (namespace, hash, bytes) have no file of that size, after every few of them.

    Each is asked for once more, since it may have gone with its event meanwhile. Raises SnapshotFault.
    """
    found: list[Finding] = []
    for number, (namespace, hash_, size) in enumerate(chunks, 1):
        place, fan = format.folders(namespace, hash_)
        try:
            there = folder.size(namespace, hash_)
        except ChunkFault:  # a link, or no regular file
            there = None
        if there != size and named(place, hash_) == size:
            kind = Kind.MISSING if there is None else Kind.RESIZED
            found.append(Finding(kind, f"{place}/{fan}/{format.file_name(hash_)}", there or 0, hash_))
        if number % STEP_ENTRIES == 0:
            yield found
            found = []
    yield found


def remove(folder: Folder, finding: Finding) -> bool:
    """Unlinks a leftover or an orphan, whose absence from the index the caller has just made sure of.

    False if it is gone already. Raises OSError.
    """
    assert finding.kind in (Kind.ORPHAN, Kind.LEFTOVER), finding
    *names, name = finding.path.split("/")
    try:
        place = folder.open_folder(*names)
        try:
            os.unlink(name, dir_fd=place)
        finally:
            os.close(place)
    except FileNotFoundError:
        return False
    return True


def _entries(folder: Folder) -> Iterator[tuple[tuple[str, ...], str, os.stat_result]]:
    """Yields everything in the folder but the folders of ours: those it lies in, its name and its state.

    Links are never followed.
    """
    for name, state in _scan(folder, ()):
        if not stat.S_ISDIR(state.st_mode):
            yield (), name, state
        elif name == QUARANTINE:
            yield from (((name,), *one) for one in _scan(folder, (name,)))
        elif not format.is_folder(name, 0):
            yield (), name, state
        else:
            yield from _in_namespace(folder, name)


def _in_namespace(folder: Folder, outer: str) -> Iterator[tuple[tuple[str, ...], str, os.stat_result]]:
    for name, state in _scan(folder, (outer,)):
        if stat.S_ISDIR(state.st_mode) and format.is_folder(name, 1):
            yield from (((outer, name), *one) for one in _scan(folder, (outer, name)))
        else:
            yield (outer,), name, state


def _scan(folder: Folder, names: tuple[str, ...]) -> list[tuple[str, os.stat_result]]:
    """The entries of one folder, sorted; what goes meanwhile is left out."""
    found: list[tuple[str, os.stat_result]] = []
    try:
        descriptor = folder.open_folder(*names)
    except FileNotFoundError:
        return found
    try:
        with os.scandir(descriptor) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    found.append((entry.name, entry.stat(follow_symlinks=False)))
    finally:
        os.close(descriptor)
    return sorted(found, key=lambda one: one[0])


def _look(
    names: tuple[str, ...], name: str, state: os.stat_result, named: NamedBytes, before_ns: int
) -> Finding | None:
    """What is to be said of one entry, None if it is as it should be."""
    path = "/".join((*names, name))
    size = state.st_size
    hash_ = format.named(name)
    regular = stat.S_ISREG(state.st_mode)
    in_place = len(names) == 2 and (hash_ is None or hash_.hex()[:2] == names[1])
    if regular and in_place and hash_ is None and format.is_part(name):
        return Finding(Kind.LEFTOVER, path, size) if state.st_mtime_ns < before_ns else None
    if not regular or not in_place or hash_ is None:
        return Finding(Kind.STRANGE, path, size)
    told = named(names[0], hash_)
    if told is None:
        return Finding(Kind.ORPHAN, path, size, hash_) if state.st_ctime_ns < before_ns else None
    return None


def _look_aside(name: str, state: os.stat_result, known: Known) -> Finding | None:
    """What is to be said of one entry of the quarantine.

    It holds tokens and KV like any other, so it must not outlive them: whoever gave its chunk up was killed meanwhile.
    """
    hash_ = format.named(name)
    if hash_ is None or stat.S_ISDIR(state.st_mode) or known(hash_):
        return None
    return Finding(Kind.ORPHAN, f"{QUARANTINE}/{name}", state.st_size, hash_)
