"""`zj sessions export` and `import`, `zj journal backup` and `stats`: what they take, print and leave behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Zj
from tests.unit.sessions.talk import Talk


@pytest.fixture
def talked(tmp_path: Path) -> tuple[str, str]:
    """Flags that name a data directory with a session of three turns."""
    with Talk(tmp_path / "talk") as talk:
        talk.open("s_1")
        talk.turn("resp_1", "one", "uno")
        talk.turn("resp_2", "two", "dos", previous="resp_1")
        talk.turn("resp_3", "three", "tres", previous="resp_2")
    return "--data-dir", str(tmp_path / "talk")


def facts(out: str) -> list[str]:
    lines = [json.loads(line) for line in out.splitlines()]
    return [line["body"]["response"] for line in lines if line.get("body", {}).get("t") == "request_accepted.1"]


def test_export_by_any_name_and_range(zj: Zj, talked: tuple[str, str]) -> None:
    whole = zj("sessions", "export", "s_1", *talked)
    assert (whole.code, whole.err) == (0, "")
    assert facts(whole.out) == ["resp_1", "resp_2", "resp_3"]
    assert zj("sessions", "export", "resp_2", *talked).out == whole.out, "a response means its session"
    assert facts(zj("sessions", "export", "s_1", "--turns", "2", *talked).out) == ["resp_1", "resp_2"]
    page = zj("sessions", "export", "s_1", "--turns", "2:3", "--format", "md", *talked).out
    assert "one" not in page and "tres" in page


@pytest.mark.parametrize("turns", ["0", "4", "2:1", "1:9", "x", ":", "1:2:3", "-1"])
def test_a_range_that_is_none(zj: Zj, talked: tuple[str, str], turns: str) -> None:
    done = zj("sessions", "export", "s_1", f"--turns={turns}", *talked)
    assert done.code == 1 and "it has 3" in done.err


def test_export_to_a_file(zj: Zj, talked: tuple[str, str], tmp_path: Path) -> None:
    done = zj("sessions", "export", "s_1", "-o", "out.jsonl", *talked)
    size = (tmp_path / "out.jsonl").stat().st_size
    assert done.out == f"{tmp_path}/out.jsonl: 3 turns of s_1, {size:,} bytes\n"
    again = zj("sessions", "export", "s_1", "-o", "out.jsonl", *talked)
    assert again.code == 73 and "exists already" in again.err
    assert zj("sessions", "export", "s_1", "--format", "pdf", *talked).code == 1
    assert zj("sessions", "export", "nobody", *talked).code == 1


def test_import_says_what_became_of_the_file(zj: Zj, talked: tuple[str, str], tmp_path: Path) -> None:
    assert zj("sessions", "export", "s_1", "-o", "out.jsonl", *talked).code == 0
    there = "--data-dir", str(tmp_path / "there")
    assert zj("sessions", "import", "out.jsonl", *there).out == "s_1: 3 turns imported for local\n"
    again = zj("sessions", "import", "out.jsonl", *there)
    assert again.out == "s_1: 0 turns imported for local, 3 were here already\n"
    told = zj("sessions", "import", "out.jsonl", "--json", *there).json
    assert told == {"session": "s_1", "tenant": "local", "turns": 0, "known": 3, "erased": 0}
    other = zj("sessions", "import", "out.jsonl", "--tenant", "alice", *there)
    assert other.code == 65 and "taken here by another turn" in other.err
    assert zj("sessions", "import", "absent", *there).code == 65


def test_backup_says_what_it_made(zj: Zj, talked: tuple[str, str], tmp_path: Path) -> None:
    told = zj("journal", "backup", "copy.db", "--json", *talked).json
    assert isinstance(told, dict)
    assert told["bytes"] == (tmp_path / "copy.db").stat().st_size
    assert told["facts"] == told["head"] > 0
    again = zj("journal", "backup", "copy.db", *talked)
    assert again.code == 73 and "exists already" in again.err
    assert zj("journal", "backup", "new.db", "--data-dir", str(tmp_path / "nowhere")).code == 65
    assert not (tmp_path / "nowhere").exists()


def test_stats_for_people_and_programs(zj: Zj, talked: tuple[str, str]) -> None:
    told = zj("journal", "stats", "--json", *talked).json
    assert isinstance(told, dict)
    assert told["rows"]["turn"] == 3
    assert told["facts"]["request_accepted.1"]["rows"] == 3
    assert told["largest"][0]["session"] == "s_1"
    shown = zj("journal", "stats", *talked).out
    for word in ("event", "request_accepted.1", "vocabulary", "s_1", f"{told['file_bytes']:,} bytes"):
        assert word in shown
