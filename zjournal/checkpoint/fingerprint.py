"""Which weights a file holds: the sha256 of its content, remembered so that only a changed file is read again.

The identity is the content alone: a touched or moved file keeps its fingerprint, other weights under the
same name do not. What is remembered is found by path and trusted only while inode, size, mtime and ctime are
unchanged; ctime cannot be set back, so weights swapped in place with their old mtime are noticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

import msgspec

from zjournal.errors import ModelFault

DIGESTS_FILE = "digests.json"
DIGESTS_MAX = 64
_READ_BYTES = 1 << 20


class _Known(msgspec.Struct, frozen=True):
    state: tuple[int, int, int, int]  # inode, size, mtime_ns, ctime_ns
    sha256: str


def fingerprint(path: str | Path, cache_dir: Path | None, start: int = 0) -> str:
    """The sha256 of the file from byte `start` on, 64 hex digits. Raises ModelFault if it cannot be read.

    A cache directory that cannot be written, or None, costs time at the next start and nothing else.
    """
    path = Path(path).resolve()
    try:
        state = _state(path)
        known = {} if cache_dir is None else _load(cache_dir)
        key = f"{path}@{start}" if start else str(path)
        found = known.get(key)
        if found is not None and found.state == state:
            return found.sha256
        with open(path, "rb") as file:
            file.seek(start)
            digest = hashlib.sha256()
            while block := file.read(_READ_BYTES):
                digest.update(block)
        unchanged = _state(path) == state
    except OSError as error:
        raise ModelFault(f"{path}: {error.strerror or error}") from error
    if unchanged and cache_dir is not None:
        known.pop(key, None)
        known[key] = _Known(state, digest.hexdigest())
        with contextlib.suppress(OSError):
            _save(cache_dir, known)
    return digest.hexdigest()


def _state(path: Path) -> tuple[int, int, int, int]:
    status = os.stat(path)
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _load(cache_dir: Path) -> dict[str, _Known]:
    try:
        return msgspec.json.decode((cache_dir / DIGESTS_FILE).read_bytes(), type=dict[str, _Known])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return {}  # missing or damaged: read the weights again


def _save(cache_dir: Path, known: dict[str, _Known]) -> None:
    while len(known) > DIGESTS_MAX:
        del known[next(iter(known))]  # the oldest
    cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=cache_dir, prefix=DIGESTS_FILE)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.encode(known))
        os.replace(name, cache_dir / DIGESTS_FILE)
    except BaseException:
        os.unlink(name)
        raise
