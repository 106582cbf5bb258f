"""`zj keys`: a key is shown once."""

from __future__ import annotations

from pathlib import Path

from tests.unit.cli.conftest import Zj
from zjournal import keys


def test_a_key_is_drawn_printed_and_kept_as_a_digest(zj: Zj, tmp_path: Path) -> None:
    done = zj("keys", "add", "laptop", "--requests", "60", "--api-key-file", "keys")
    assert done.code == 0
    key = done.out.strip()
    assert key.startswith("zj-") and done.out == f"{key}\n"
    assert str(tmp_path / "keys") in done.err and key not in done.err
    assert keys.read(tmp_path / "keys").name_of(key) == "laptop"
    told = zj("keys", "add", "ci", "--json", "--api-key-file", "keys").json
    assert isinstance(told, dict) and keys.read(tmp_path / "keys").name_of(told["key"]) == "ci"
    listed = zj("keys", "list", "--json", "--api-key-file", "keys").json
    assert listed == [
        {"name": "ci", "keys": 1, "requests": 0, "tokens": 0, "streams": 0},
        {"name": "laptop", "keys": 1, "requests": 60, "tokens": 0, "streams": 0},
    ]
    lines = zj("keys", "list", "--api-key-file", "keys").out.splitlines()
    assert [line.split() for line in lines][-1] == ["laptop", "1", "60", "-", "-"]


def test_where_there_is_no_file_it_is_asked_for(zj: Zj) -> None:
    for command in (("add", "laptop"), ("list",)):
        done = zj("keys", *command)
        assert (done.code, done.out) == (78, "")
        assert "--api-key-file" in done.err
    assert zj("keys", "add", "local", "--api-key-file", "keys").code == 78


def test_a_name_is_removed_or_all_but_its_last_key(zj: Zj, tmp_path: Path) -> None:
    where = ("--api-key-file", "keys")
    for name in ("laptop", "ci", "ci", "ci"):
        assert zj("keys", "add", name, *where).code == 0
    told = zj("keys", "remove", "ci", "--keep-last", "--json", *where).json
    assert told == {"name": "ci", "removed": 2, "file": str(tmp_path / "keys")}
    done = zj("keys", "remove", "ci", *where)
    assert done.code == 0 and done.out.startswith("1 key of ci removed from ")
    assert keys.read(tmp_path / "keys").names == ("laptop",)
    for name, why in (("ci", "no key"), ("laptop", "the only ones")):
        done = zj("keys", "remove", name, *where)
        assert (done.code, done.out) == (78, "") and why in done.err
