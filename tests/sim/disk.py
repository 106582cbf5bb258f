"""The disk under simulation: builds and arms the shim, reads its log, and works out what a loss of power leaves.

A file has what is durable and a list of changes that wait for a sync; so has the list of names. A sync makes the
waiting changes of one file durable. When the power goes, names keep a beginning of their changes (file systems journal
them in order), while of a file's changes any part may have reached the disk, in sectors, whatever their order. A sync
that failed loses some of what waited for good, and no later sync brings it back, as Linux does it.
"""

from __future__ import annotations

import ctypes
import enum
import os
import random
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("shim.c")
SECTOR_BYTES = 512
ACTIONS = ("", "eio", "enospc", "short", "sync_eio", "kill_before", "kill_mid", "kill_after")
KILLS = ACTIONS[5:]
_RECORD = struct.Struct("=IIQQ")


class Op(enum.IntEnum):
    """What a record of the log is; as in the shim."""

    CREATE = 1
    WRITE = 2
    TRUNCATE = 3
    SYNC = 4
    SYNC_FAILED = 5
    RENAME = 6
    UNLINK = 7
    MKDIR = 8


class Rule(NamedTuple):
    """From change number `first` of a life on, the next `times` changes that `action` can hit go wrong."""

    first: int
    times: int
    action: str


class _Rule(ctypes.Structure):
    _fields_ = (("first", ctypes.c_uint64), ("times", ctypes.c_uint64), ("action", ctypes.c_uint64))


def build(folder: Path) -> Path | None:
    """Compiles the shim; None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / "shim.so"
    command = [
        compiler,
        "-O1",
        "-Wall",
        "-Werror",
        "-shared",
        "-fPIC",
        "-o",
        str(library),
        str(SOURCE),
        "-ldl",
        "-lpthread",
    ]
    subprocess.run(command, check=True)
    return library


def preloaded() -> bool:
    """Whether this process runs with the shim."""
    return hasattr(ctypes.CDLL(None), "sim_arm")


class Shim:
    """The handle inside a process that runs with the shim: faults and the log, for everything below `root`."""

    def __init__(self, root: Path, log: Path, rules: Sequence[Rule]) -> None:
        library = ctypes.CDLL(None)
        library.sim_changes.restype = library.sim_fired.restype = ctypes.c_uint64
        self._library = library
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        values = [_Rule(rule.first, rule.times, ACTIONS.index(rule.action)) for rule in rules]
        armed = library.sim_arm(os.fsencode(root), descriptor, (_Rule * len(values))(*values), len(values))
        assert armed == 0, "the root's path or the number of rules is over the limit"

    def counts(self) -> tuple[int, int]:
        """Changes so far, and how many of them went wrong on order."""
        return self._library.sim_changes(), self._library.sim_fired()


class Change(NamedTuple):
    """One record of the log. `offset` of a write, or the length after a truncation; `data` is a rename's new path."""

    op: Op
    path: str
    offset: int
    data: bytes


def read_log(log: Path) -> Iterator[Change]:
    data = log.read_bytes()
    at = 0
    while at < len(data):
        op, path_bytes, offset, data_bytes = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        path = data[at : at + path_bytes].decode()
        at += path_bytes
        yield Change(Op(op), path, offset, data[at : at + data_bytes])
        at += data_bytes


class _File:
    """What is durable of one file, and what waits."""

    def __init__(self, data: bytes = b"") -> None:
        self.durable = bytearray(data)
        self.waiting: list[Change] = []


class Disk:
    """What is durable below a root, as far as the log tells. `lying`: syncs are promised and not done."""

    def __init__(self, chance: random.Random, home: str, lying: bool = False) -> None:
        """`home` is a folder below the root that has always been there."""
        self._chance = chance
        self._lying = lying
        self._files: dict[str, _File | None] = {home: None}  # as the running machine sees them; None is a folder
        self._names: dict[str, _File | None] = {home: None}  # as they are durable
        self._moves: dict[str, list[Change]] = {}  # changes of names that wait, by folder
        self._made: dict[int, _File | None] = {}  # what a waiting creation made, by the id of its Change

    def replay(self, log: Path) -> None:
        """Takes the changes of a life."""
        for change in read_log(log):
            self._take(change)

    def lose_power(self, root: Path) -> str:
        """Leaves below `root` what the disk would hold after a loss of power; returns how it chose."""
        kept = dropped = 0
        for moves in self._moves.values():
            stay = self._chance.randint(0, len(moves))
            for change in moves[:stay]:
                self._settle_name(change)
            kept, dropped = kept + stay, dropped + len(moves) - stay
        self._moves.clear()
        ways = []
        for file in {id(file): file for file in self._names.values() if file is not None}.values():
            if file.waiting:
                ways.append(self._tear(file))
        self._write(root)
        self._files = dict(self._names)
        return f"names kept {kept} lost {dropped}; files {', '.join(ways) or 'whole'}"

    # --- one change -----------------------------------------------------------------------------------

    def _take(self, change: Change) -> None:
        match change.op:
            case Op.CREATE | Op.MKDIR:
                self._files[change.path] = self._made[id(change)] = _File() if change.op == Op.CREATE else None
                self._move(change)
            case Op.RENAME:
                self._files[change.data.decode()] = self._files.pop(change.path)
                self._move(change)
            case Op.UNLINK:
                del self._files[change.path]
                self._move(change)
            case Op.SYNC:
                self._sync(change.path)
            case Op.SYNC_FAILED:
                self._sync_failed(change.path)
            case Op.WRITE | Op.TRUNCATE:
                file = self._files[change.path]
                assert file is not None
                file.waiting.append(change)

    def _move(self, change: Change) -> None:
        self._moves.setdefault(os.path.dirname(change.path), []).append(change)

    def _sync(self, path: str) -> None:
        if self._lying:
            return
        file = self._files.get(path)
        if file is None:  # a folder, or the root itself
            for change in self._moves.pop(path, []):
                self._settle_name(change)
            return
        for change in file.waiting:
            _settle(file, change)
        file.waiting.clear()

    def _sync_failed(self, path: str) -> None:
        """Part of it reached the disk all the same, and the rest never will."""
        file = self._files.get(path)
        if file is None:
            return  # names wait on: a journaling file system stops at such an error, or has them later
        for change in file.waiting:
            if self._chance.random() < 0.5:
                _settle(file, change)
        file.waiting.clear()

    def _settle_name(self, change: Change) -> None:
        match change.op:
            case Op.CREATE | Op.MKDIR:
                self._names[change.path] = self._made.pop(id(change))
            case Op.RENAME:
                if change.path in self._names:
                    self._names[change.data.decode()] = self._names.pop(change.path)
            case Op.UNLINK:
                self._names.pop(change.path, None)

    # --- the loss -------------------------------------------------------------------------------------

    def _tear(self, file: _File) -> str:
        way = self._chance.choice(("none", "all", "beginning", "sectors"))
        changes = file.waiting
        if way == "none":
            changes = []
        elif way == "beginning":  # cut at an arbitrary byte of an arbitrary write
            changes = changes[: self._chance.randint(0, len(changes))]
            if changes and changes[-1].op == Op.WRITE:
                last = changes[-1]
                changes = [*changes[:-1], last._replace(data=last.data[: self._chance.randint(0, len(last.data))])]
        elif way == "sectors":
            changes = [part for change in changes for part in _sectors(change) if self._chance.random() < 0.6]
        for change in changes:
            _settle(file, change)
        file.waiting.clear()
        return way

    def _write(self, root: Path) -> None:
        shutil.rmtree(root)
        root.mkdir(0o700)
        for path, file in sorted(self._names.items()):
            place = root / path
            if not place.parent.is_dir():
                continue  # its folder's name was lost, and so is it
            if file is None:
                place.mkdir(0o700)
            else:
                place.write_bytes(file.durable)
                place.chmod(0o600)
        self._names = {path: file for path, file in self._names.items() if (root / path).exists()}


def _settle(file: _File, change: Change) -> None:
    if change.op == Op.TRUNCATE:
        del file.durable[change.offset :]
        file.durable.extend(bytes(change.offset - len(file.durable)))
        return
    gap = change.offset - len(file.durable)
    if gap > 0:
        file.durable.extend(bytes(gap))
    file.durable[change.offset : change.offset + len(change.data)] = change.data


def _sectors(change: Change) -> Iterator[Change]:
    if change.op != Op.WRITE:
        yield change
        return
    at = 0
    while at < len(change.data):
        size = SECTOR_BYTES - (change.offset + at) % SECTOR_BYTES
        yield change._replace(offset=change.offset + at, data=change.data[at : at + size])
        at += size
