"""Bad input of the journal's files: each is refused by `zj serve` with path, reason and next step, and not changed."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.serving import scripted, zj
from tests.unit.journal.facts import open_journal, session, whole_turn
from zjournal.journal.headfile import HEAD_FILE

FILE_OF_LOCK = "zjournal.lock"  # a server that looks at a directory takes it, and leaves its file


def _journal(data_dir: Path) -> None:
    with open_journal(data_dir) as journal:
        journal.append([session("s1"), *whole_turn(journal, "r1"), *whole_turn(journal, "r2")]).result()


def _sql(*statements: str) -> Callable[[Path], None]:
    def damage(data_dir: Path) -> None:
        _journal(data_dir)
        db = sqlite3.connect(data_dir / "journal.db", isolation_level=None)
        for statement in statements:
            db.execute(statement)
        db.close()

    return damage


def _foreign(data_dir: Path) -> None:
    data_dir.mkdir(mode=0o700)
    db = sqlite3.connect(data_dir / "journal.db", isolation_level=None)
    db.execute("CREATE TABLE event (x)")
    db.close()


def _text(data_dir: Path) -> None:
    data_dir.mkdir(mode=0o700)
    (data_dir / "journal.db").write_text("notes of somebody " * 100)


def _read_only(data_dir: Path) -> None:
    _journal(data_dir)
    (data_dir / "journal.db").chmod(0o400)


def _unwritable(data_dir: Path) -> None:
    _journal(data_dir)
    data_dir.chmod(0o500)


def _of_another_user(data_dir: Path) -> None:
    _journal(data_dir)
    os.chown(data_dir / "journal.db", 12345, -1)


def _in_the_folder_of_another_user(data_dir: Path) -> None:
    _journal(data_dir)
    os.chown(data_dir, 12345, -1)


def _corrupt(data_dir: Path) -> None:
    _journal(data_dir)
    data = bytearray((data_dir / "journal.db").read_bytes())
    page = data.find(b"response_finished") // 4096
    data[page * 4096 : page * 4096 + 64] = b"\xff" * 64
    (data_dir / "journal.db").write_bytes(data)


CASES = {
    "newer": (_sql("PRAGMA user_version = 99"), 65, "has schema version 99", "use the newer zjournal"),
    "foreign": (_foreign, 65, "is an SQLite file of another program", "--data-dir"),
    "text": (_text, 65, "is not an SQLite file", "move it away"),
    "read-only": (_read_only, 65, "is read-only", "chmod u+w"),
    "unwritable": (_unwritable, 73, "is not writable", "chmod u+rwx"),
    "corrupt": (_corrupt, 65, "is damaged", "zj journal salvage OUT"),
    "broken chain": (
        _sql("UPDATE event SET time = time - 1 WHERE seq = 8"),
        65,
        "its chain is broken at fact 8",
        "zj journal salvage OUT",
    ),
    "cut tail": (
        _sql("DELETE FROM event WHERE seq > 6", "DELETE FROM turn WHERE response = 'r2'"),
        65,
        f"its end is missing: it has 6 facts, and {HEAD_FILE} has seen 11",
        "zj journal salvage OUT",
    ),
    "no version": (
        _sql("PRAGMA user_version = 0"),
        65,
        "has schema version 0, and this zjournal reads 1",
        "zj journal salvage OUT",
    ),
    "trigger": (
        _sql("CREATE TRIGGER spy AFTER INSERT ON event BEGIN DELETE FROM turn; END"),
        65,
        "has a trigger 'spy' on table event",
        "drop it with the program that made it",
    ),
    "projections": (
        _sql("DELETE FROM turn WHERE response = 'r2'"),
        65,
        "its projections do not follow from its facts",
        "zj journal rebuild",
    ),
}
OWNERS = {
    "owner": (_of_another_user, 65, "belongs to user 12345", "run as that user"),
    "folder's owner": (_in_the_folder_of_another_user, 73, "belongs to user 12345", "run as that user"),
}


def _state(data_dir: Path) -> dict[str, tuple[str, int]]:
    return {
        path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mode)
        for path in data_dir.iterdir()
        if path.name != FILE_OF_LOCK
    }


def _check(tmp_path: Path, damage: Callable[[Path], None], code: int, reason: str, step: str) -> None:
    data_dir = tmp_path / "data"
    damage(data_dir)
    before = _state(data_dir)
    model = scripted(tmp_path, {"text": "x"})
    done = zj("serve", "--port", "0", "--data-dir", str(data_dir), "--model", model)
    assert done.returncode == code, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("zj: ")]
    assert len(lines) == 1
    assert str(data_dir) in lines[0]
    assert reason in lines[0]
    assert step in lines[0]
    assert "Traceback" not in done.stderr
    left = {name: state for name, state in _state(data_dir).items() if not name.endswith(("-wal", "-shm"))}
    assert left == {name: state for name, state in before.items() if not name.endswith(("-wal", "-shm"))}


CHANGING = (
    ("sessions", "delete", "s1", "--yes"),
    ("sessions", "pin", "s1"),
    ("journal", "compact"),
)


@pytest.mark.parametrize("command", CHANGING, ids=lambda command: command[1])
@pytest.mark.parametrize("case", ["newer", "read-only", "unwritable", "corrupt", "trigger", "projections"])
def test_commands_change_nothing_of_a_bad_file(tmp_path: Path, case: str, command: tuple[str, ...]) -> None:
    """Without a server a command is refused for the same reasons, and in the same words."""
    damage, code, reason, step = CASES[case]
    data_dir = tmp_path / "data"
    damage(data_dir)
    before = _state(data_dir)
    done = zj(*command, "--data-dir", str(data_dir))
    assert done.returncode == code, done.stdout + done.stderr
    assert reason in done.stderr and step in done.stderr and str(data_dir) in done.stderr
    assert "Traceback" not in done.stderr
    after = {name: state for name, state in _state(data_dir).items() if not name.endswith(("-wal", "-shm"))}
    assert after == {name: state for name, state in before.items() if not name.endswith(("-wal", "-shm"))}


def test_a_newer_journal_is_told_by_its_first_bytes(tmp_path: Path) -> None:
    """Not even SQLite's own files appear beside it."""
    data_dir = tmp_path / "data"
    CASES["newer"][0](data_dir)
    before = _state(data_dir)
    for command in (("sessions", "list"), ("journal", "verify"), ("journal", "salvage", str(tmp_path / "out"))):
        done = zj(*command, "--data-dir", str(data_dir))
        assert (done.returncode, "use the newer zjournal" in done.stderr) == (65, True), done.stderr
    assert _state(data_dir) == before
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", CASES)
def test_a_bad_file_is_one_line_and_stays_as_it_is(tmp_path: Path, case: str) -> None:
    _check(tmp_path, *CASES[case])


@pytest.mark.skipif(os.geteuid() != 0, reason="files can only be given away by root")
@pytest.mark.parametrize("case", OWNERS)
def test_a_file_of_another_user(tmp_path: Path, case: str) -> None:
    _check(tmp_path, *OWNERS[case])
