"""Who holds the log, as /proc/locks tells it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.journal.facts import open_journal, session
from zjournal.journal import holders
from zjournal.journal.holders import Lock

TEXT = """\
1: POSIX  ADVISORY  READ 26769 fe:00:2163153 128 128
2: POSIX  ADVISORY  WRITE 12 00:3c:77 124 125
2: -> POSIX  ADVISORY  WRITE 13 00:3c:77 124 125
3: FLOCK  ADVISORY  WRITE 14 fe:00:9 0 EOF
4: OFDLCK ADVISORY  READ -1 fe:00:9 0 EOF
5: POSIX  ADVISORY  READ 15 fe:00:9 0 EOF
6: POSIX  ADVISORY  READ x fe:00:9 0 EOF
half a line
"""

READ = """
import sqlite3, sys
db = sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True, isolation_level=None)
db.execute("BEGIN"); db.execute("SELECT count(*) FROM event").fetchone()
print("reading", flush=True); sys.stdin.readline()
"""


def test_parse() -> None:
    assert list(holders.parse(TEXT)) == [
        Lock(26769, (0xFE, 0), 2163153, 128, 128),
        Lock(12, (0, 0x3C), 77, 124, 125),
        Lock(15, (0xFE, 0), 9, 0, 1 << 62),
    ]


@pytest.mark.skipif(not holders.LOCKS.exists(), reason="there is no /proc/locks")
def test_a_reader_is_found_with_its_name_and_state(tmp_path: Path) -> None:
    with open_journal(tmp_path / "data") as journal:
        journal.append([session("s1")]).result()
        index = tmp_path / "data" / "journal.db-shm"
        assert holders.holding(index) == {}
        command = [sys.executable, "-c", READ, str(journal.path)]
        reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert reader.stdout is not None
        reader.stdout.readline()
        (pid,) = holders.holding(index)
        assert pid == reader.pid
        assert holders.describe(pid).name.startswith("python")
        reader.communicate("\n")
        assert holders.holding(index) == {}


def test_what_is_gone_is_no_error(tmp_path: Path) -> None:
    assert holders.holding(tmp_path / "nothing") == {}
    assert str(holders.describe(2**22 + 1)) == f"process {2**22 + 1}"
    assert holders.describe(os.getpid()).state == ""
