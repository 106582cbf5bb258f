"""The data directory: private, ours, and owned by one server at a time."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from zjournal.errors import DataDirFault, DataDirLocked
from zjournal.journal import datadir

HOLD = """
import sys
from pathlib import Path
from zjournal.journal import datadir
held = datadir.lock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""

ROOT = Path(__file__).parents[3]


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _holder(data_dir: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(data_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_directory_is_made_private(tmp_path: Path) -> None:
    with datadir.lock(tmp_path / "a" / "b"):
        assert _mode(tmp_path / "a" / "b") == 0o700
        assert _mode(tmp_path / "a" / "b" / datadir.LOCK_FILE) == 0o600
        assert (tmp_path / "a" / "b" / datadir.LOCK_FILE).read_text() == f"{os.getpid()}\n"


def test_second_server_is_refused_with_the_pid_and_changes_nothing(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    process = _holder(tmp_path)
    try:
        tmp_path.chmod(0o755)  # the refusal comes before the mode is mended
        before = [(path.name, path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.iterdir()]
        with pytest.raises(DataDirLocked) as refused:
            datadir.lock(tmp_path)
        assert f"pid {process.pid}" in refused.value.message
        assert str(tmp_path) in refused.value.message
        assert datadir.owner(tmp_path) == process.pid
        assert before == [(path.name, path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.iterdir()]
        assert _mode(tmp_path) == 0o755
    finally:
        process.kill()
        process.communicate()


def test_a_kill_leaves_no_lock_behind(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    process = _holder(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert datadir.owner(tmp_path) is None
    datadir.lock(tmp_path).release()


def test_the_lock_is_not_inherited_by_a_child(tmp_path: Path) -> None:
    held = datadir.lock(tmp_path / "data")
    command = [sys.executable, "-c", "print('up', flush=True); input()"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        assert held._descriptor is not None
        os.close(held._descriptor)  # what a kill does; release() would unlock for the child as well
        assert datadir.owner(tmp_path / "data") is None
    finally:
        child.communicate(b"\n")


def test_release_frees(tmp_path: Path) -> None:
    first = datadir.lock(tmp_path / "data")
    with pytest.raises(DataDirLocked):
        datadir.lock(tmp_path / "data")
    first.release()
    first.release()
    datadir.lock(tmp_path / "data").release()


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataDirFault, match="is not a directory; choose another"):
        datadir.prepare(tmp_path / "file")


def test_a_directory_below_a_file_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataDirFault, match="cannot be made"):
        datadir.prepare(tmp_path / "file" / "below")


def test_someone_elses_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(DataDirFault, match="belongs to user"):
        datadir.prepare(tmp_path)


def test_unwritable_directory(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o500)
    with pytest.raises(DataDirFault, match="is not writable; run chmod"):
        datadir.lock(tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []


def test_open_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(DataDirFault, match="holds other files"):
        datadir.lock(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    assert _mode(tmp_path) == 0o755


def test_open_directory_of_ours_is_closed(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir(mode=0o755)
    datadir.prepare(tmp_path / "empty")
    assert _mode(tmp_path / "empty") == 0o700


def test_a_directory_that_cannot_be_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(path: object, **_: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", closed)
    with pytest.raises(DataDirFault, match="Permission denied"):
        datadir.lock(tmp_path / "data")
