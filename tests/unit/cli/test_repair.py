"""`zj journal verify --quick`, `rebuild` and `salvage`: what they print and how they end."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from tests.unit.cli.conftest import Zj


def _damage(data_dir: Path, statement: str) -> None:
    db = sqlite3.connect(data_dir / "journal.db", isolation_level=None)
    assert db.execute(statement).rowcount == 1
    db.close()


def test_quick(zj: Zj, data_dir: Path) -> None:
    done = zj("journal", "verify", "--quick", "--data-dir", str(data_dir))
    assert (done.code, done.err) == (0, "")
    assert "its end is clean; head 23" in done.out
    assert zj("journal", "verify", "--quick", "--json", "--data-dir", str(data_dir)).json["head"] == 23
    _damage(data_dir, "UPDATE event SET time = time - 1 WHERE seq = 20")
    done = zj("journal", "verify", "--quick", "--data-dir", str(data_dir))
    assert (done.code, done.out) == (65, "")
    assert "its chain is broken at fact 20" in done.err
    assert len(done.err.splitlines()) == 1
    done = zj("journal", "verify", "--quick", "--json", "--data-dir", str(data_dir))
    assert (done.code, done.json["clean"]) == (65, False)


def test_rebuild(zj: Zj, data_dir: Path) -> None:
    _damage(data_dir, "UPDATE turn SET status = 'failed', finished_us = NULL WHERE response = 'resp_a2'")
    assert zj("journal", "verify", "--data-dir", str(data_dir)).code == 1
    done = zj("journal", "rebuild", "--data-dir", str(data_dir))
    assert (done.code, done.out) == (0, "23 facts folded\n")
    assert zj("journal", "verify", "--data-dir", str(data_dir)).code == 0
    assert zj("journal", "rebuild", "--json", "--data-dir", str(data_dir)).json == {"facts": 24}  # and the operation
    assert zj("journal", "rebuild", "--data-dir", str(data_dir / "nowhere")).code == 65


def test_salvage(zj: Zj, data_dir: Path, tmp_path: Path) -> None:
    done = zj("journal", "salvage", str(tmp_path / "whole"), "--data-dir", str(data_dir))
    assert done.code == 0
    assert "23 facts, 5 turns, 0 contents copied; it verifies" in done.out
    _damage(data_dir, "UPDATE event SET time = time - 1 WHERE seq = 19")
    done = zj("journal", "salvage", str(tmp_path / "part"), "--data-dir", str(data_dir))
    assert done.code == 1
    assert "the proved part ends there: fact 19: its link does not follow" in done.out
    assert "lost: facts 19 to 23 (follow from each other, but not from what is proved)" in done.out
    assert "lost: turn resp_c1" in done.out
    assert zj("journal", "verify", "--data-dir", str(tmp_path / "part")).code == 0
    again = zj("journal", "salvage", str(tmp_path / "part"), "--json", "--data-dir", str(data_dir))
    assert again.code == 73
    assert "is not empty; name another directory" in again.err
    told = zj("journal", "salvage", str(tmp_path / "more"), "--json", "--data-dir", str(data_dir))
    assert (told.code, told.json["whole"], told.json["facts"]) == (1, False, 18)
