"""The file of API keys: who may use the server, and how much.

A line is `NAME:KEY`, or `NAME:sha256:DIGEST` where only the digest is kept, and limits behind it:
`laptop:sha256:9f86… requests=60 tokens=100000 streams=4`. A name may have several keys; its limits hold for all of
them together. A digest is enough for keys that are drawn: of 256 random bits nothing can be guessed.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
import string
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from zjournal.errors import ConfigFault

FILE_BYTES_MAX = 1 << 20
CHARS_MIN = 16
CHARS_MAX = 512
KEY_BYTES = 32  # of a key that is drawn
PREFIX = "zj-"  # it begins with, so that scanners for leaked keys can tell one
HASHED = "sha256:"
LIMIT_MAX = 10**12
SPACE = string.whitespace + "\ufeff"  # around a line; a byte order mark may stand before the first
FRESH_NS = 2_000_000_000  # since a file was written: it may be written again, and look the same

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LIMIT = re.compile(r"([a-z]+)=([0-9]{1,13})")


@dataclasses.dataclass(frozen=True)
class Limits:
    """What all keys of a name may use together; 0: as much as they like."""

    requests: int = 0  # a minute
    tokens: int = 0  # a minute, of prompts and answers
    streams: int = 0  # answers at the same time, streamed or not


class ApiKeys:
    """The accepted keys as digests, so that no dump, repr or traceback can show one."""

    def __init__(self, names: Mapping[bytes, str], limits: Mapping[str, Limits] | None = None) -> None:
        """`names` by digest, `limits` by name."""
        self._names = dict(names)
        self._limits = dict(limits or {})

    def name_of(self, key: str) -> str | None:
        """The name beside this key, or None for a key that is not accepted."""
        return self._names.get(digest(key))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(set(self._names.values())))

    def limits(self, name: str) -> Limits:
        """What this name may use."""
        return self._limits.get(name, Limits())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ApiKeys):
            return NotImplemented
        return (self._names, self._limits) == (other._names, other._limits)

    __hash__ = None  # type: ignore[assignment]

    def count(self, name: str) -> int:
        """How many keys this name has."""
        return sum(one == name for one in self._names.values())


class KeyFile:
    """The keys of a file as it is now; it may change while a server runs."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigFault as `read`."""
        self._path = path
        self._seen = _mark(path)
        self.keys = read(path)

    def changed(self) -> bool:
        """Reads the file again if it was written to; whether the keys are other ones now.

        Raises ConfigFault where it cannot be read: `keys` stay as they were.
        """
        mark = _mark(self._path)
        if mark == self._seen:
            return False
        try:
            found = read(self._path)
        finally:
            self._seen = mark
        if found == self.keys:
            return False
        self.keys = found
        return True


def _mark(path: Path) -> tuple[int, ...]:
    """What is another one after each time that the file was written; () where there is none.

    While it is fresh it is another one each time: a file may be written twice within one tick of its clock.
    """
    try:
        found = path.stat()
    except OSError:
        return ()
    fresh = abs(time.time_ns() - found.st_mtime_ns) < FRESH_NS
    mark = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return (*mark, time.monotonic_ns()) if fresh else mark


def digest(key: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def draw() -> str:
    """A new key."""
    return PREFIX + base64.urlsafe_b64encode(secrets.token_bytes(KEY_BYTES)).rstrip(b"=").decode()


def read(path: Path) -> ApiKeys:
    """Reads the file; blank lines and lines that start with # are skipped.

    Raises ConfigFault, which names the line and never shows a key.
    """
    known = _read(path)
    if not known.names:
        raise ConfigFault(f"api_key_file {path}: no keys in it; zj keys add NAME makes one", param="api_key_file")
    return known


def _read(path: Path) -> ApiKeys:
    """As `read`; a file may have no keys yet."""
    names: dict[bytes, str] = {}
    limits: dict[str, Limits] = {}
    for number, line in enumerate(_content(path).decode("utf-8-sig", "replace").splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        try:
            name, known, allowed = _parse(line)
            if known in names:
                raise _Wrong("the same key stands twice")
            if allowed != Limits() and limits.setdefault(name, allowed) != allowed:
                raise _Wrong(f"{name} has other limits above; they hold for all of its keys")
        except _Wrong as wrong:
            raise ConfigFault(f"api_key_file {path}:{number}: {wrong}", param="api_key_file") from None
        names[known] = name
    return ApiKeys(names, limits)


def add(path: Path, name: str, limits: Limits) -> str:
    """Draws a key for `name`, writes its digest behind the others, and returns the key, which is kept nowhere.

    Makes the file where there is none. Raises ConfigFault.
    """
    problem = _name_problem(name)
    if problem:
        raise ConfigFault(f"{name!r}: {problem}", param="name")
    key = draw()
    with _locked(path, os.O_RDWR | os.O_CREAT | os.O_APPEND) as file:
        known = _read(path)
        had = known.limits(name)
        if Limits() not in (had, limits) and had != limits:
            raise ConfigFault(f"{name} has other limits in {path}; they hold for all of its keys", param="name")
        line = f"{name}:{HASHED}{digest(key).hex()}{_told(limits)}\n"
        size = os.fstat(file).st_size
        whole = not size or os.pread(file, 1, size - 1) == b"\n"
        added = line.encode() if whole else b"\n" + line.encode()
        if os.write(file, added) != len(added):
            os.ftruncate(file, size)
            raise ConfigFault(f"api_key_file {path}: {os.strerror(errno.ENOSPC)}", param="api_key_file")
        os.fsync(file)
    return key


def remove(path: Path, name: str, keep_last: bool = False) -> int:
    """Takes the keys of `name` out of the file, and returns how many there were. Nobody sees half of it.

    With `keep_last` the one that stands last stays, and the limits of the name with it. All other lines stay as they
    are. Raises ConfigFault: there is nothing to remove, or nobody would be left.
    """
    with _locked(path, os.O_RDWR) as file:
        known = read(path)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ConfigFault(f"api_key_file {path}: no file that can be written anew", param="api_key_file")
        lines = _content(path).decode("utf-8", "surrogateescape").splitlines(keepends=True)
        own = [at for at, line in enumerate(lines) if _name_in(line) == name]
        if not own:
            raise ConfigFault(f"{name!r} has no key in {path}", param="name")
        if keep_last:
            kept, limits = own.pop(), known.limits(name)
            if not own:
                raise ConfigFault(f"{name} has one key in {path}, and the last one is to be kept", param="name")
            if limits != Limits() and _parse(lines[kept].strip(SPACE))[2] != limits:
                lines[kept] = f"{lines[kept].rstrip()}{_told(limits)}\n"
        elif known.names == (name,):
            # A server that runs does not believe a file without keys: it would go on with those that it has.
            reason = f"the keys of {name} are the only ones in {path}"
            raise ConfigFault(f"{reason}; add one for somebody else first, or stop the server", param="name")
        left = "".join(line for at, line in enumerate(lines) if at not in own)
        _replace(path, file, left.encode("utf-8", "surrogateescape"))
    return len(own)


def _told(limits: Limits) -> str:
    """Limits as they stand behind a key."""
    told = [f" {field.name}={value}" for field in dataclasses.fields(Limits) if (value := getattr(limits, field.name))]
    return "".join(told)


def _name_in(line: str) -> str:
    """Whose key stands in a line of a file that was read; "" where there is none."""
    text = line.strip(SPACE)
    return "" if not text or text.startswith("#") else text.partition(":")[0].strip()


@contextlib.contextmanager
def _locked(path: Path, flags: int) -> Iterator[int]:
    """The open file, for one command at a time. Raises ConfigFault for what the system refuses.

    The lock is on the file itself, which a command before us may have replaced while we waited for it.
    """
    try:
        while True:
            file = os.open(path, flags | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                if os.path.samestat(os.fstat(file), path.stat()):
                    yield file
                    return
            finally:
                os.close(file)
    except OSError as error:
        raise ConfigFault(f"api_key_file {path}: {error.strerror}", param="api_key_file") from None


def _replace(path: Path, old: int, content: bytes) -> None:
    """Puts a file with this content in the place of the `old` one, with its owner and mode. A link to it stays one."""
    real = Path(os.path.realpath(path))
    was = os.fstat(old)
    with tempfile.NamedTemporaryFile(dir=real.parent, prefix=f".{real.name}.", delete=False) as new:
        try:
            if (was.st_uid, was.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(new.fileno(), was.st_uid, was.st_gid)
            os.fchmod(new.fileno(), stat.S_IMODE(was.st_mode))
            new.write(content)
            new.flush()
            os.fsync(new.fileno())
            os.replace(new.name, real)
        except BaseException:
            os.unlink(new.name)
            raise
    folder = os.open(real.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class _Wrong(ValueError):
    """What is wrong with a line; it shows no key."""


def _content(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigFault(f"api_key_file {path}: {error.strerror}", param="api_key_file") from None
    if stat.S_ISREG(mode) and mode & 0o077:
        raise ConfigFault(f"api_key_file {path}: other users can read it; run: chmod 600 {path}", param="api_key_file")
    if len(raw) > FILE_BYTES_MAX:
        raise ConfigFault(f"api_key_file {path}: larger than {FILE_BYTES_MAX} bytes", param="api_key_file")
    return raw


def _parse(line: str) -> tuple[str, bytes, Limits]:
    """Name, digest and limits of a line. Raises _Wrong."""
    name, _, rest = (part.strip() for part in line.partition(":"))
    key, _, told = rest.partition(" ")
    if not key:
        raise _Wrong("not of the form name:key")
    if problem := _name_problem(name):
        raise _Wrong(problem)
    limits = _limits(told.split())
    if key.startswith(HASHED):
        hexed = key.removeprefix(HASHED).lower()
        if not _DIGEST.fullmatch(hexed):
            raise _Wrong(f"{HASHED} needs 64 hexadecimal digits")
        return name, bytes.fromhex(hexed), limits
    if not CHARS_MIN <= len(key) <= CHARS_MAX:
        raise _Wrong(f"a key has {CHARS_MIN} to {CHARS_MAX} characters, this one {len(key)}")
    if not re.fullmatch(r"[!-~]+", key):
        raise _Wrong("a key is printable ASCII without spaces")
    return name, digest(key), limits


def _limits(words: list[str]) -> Limits:
    known = [field.name for field in dataclasses.fields(Limits)]
    found: dict[str, int] = {}
    for word in words:
        match = _LIMIT.fullmatch(word)
        if match is None or match[1] not in known:
            raise _Wrong(f"behind a key there may be {', '.join(f'{name}=NUMBER' for name in known)}")
        if match[1] in found:
            raise _Wrong(f"{match[1]} stands twice")
        if not 0 < int(match[2]) <= LIMIT_MAX:
            raise _Wrong(f"{match[1]} is not between 1 and {LIMIT_MAX}; left out it is no limit")
        found[match[1]] = int(match[2])
    return Limits(**found)


def _name_problem(name: str) -> str | None:
    if name == "local":
        return "the name local is taken by the server without keys; choose another"
    if name == "server":
        return "the name server is taken by the server itself; choose another"
    if not _NAME.fullmatch(name):
        return "a name is up to 64 letters, digits, dots, dashes and underscores"
    return None
