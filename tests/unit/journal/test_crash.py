"""SIGKILL at random moments: what was acknowledged is there, and the journal is clean."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zjournal.journal import datadir
from zjournal.journal.events import PayloadErased
from zjournal.journal.log import Journal
from zjournal.journal.verify import verify

ROOT = Path(__file__).parents[3]

# Appends as fast as it can, from four threads, and says each number after it was acknowledged.
CHILD = """
import sys, threading
from pathlib import Path
from tests.unit.journal.facts import whole_turn, session
from zjournal.journal import datadir, retention
from zjournal.journal.log import Journal

data_dir = Path(sys.argv[1])
held = datadir.lock(data_dir)
journal = Journal.open(data_dir)
journal.tenant("local")
journal.recover()
start = journal.head

def work(thread):
    name = f"s{start}_{thread}"
    journal.append([session(name)]).result()
    for k in range(100_000):
        response = f"r{start}_{thread}_{k}"
        facts = whole_turn(journal, response, session=name)
        journal.append(facts[:3]).result()
        seq = journal.append(facts[3:]).result()
        sys.stdout.write(f"{seq} {response}\\n")
        sys.stdout.flush()
        if k % 5 == 4:
            retention.delete(journal, "local", response).result()

for thread in range(4):
    threading.Thread(target=work, args=(thread,), daemon=True).start()
sys.stdin.read()
"""


@pytest.mark.parametrize("seed", range(5))
def test_acknowledged_facts_survive_a_kill(tmp_path: Path, seed: int) -> None:
    data_dir = tmp_path / "data"
    chance = random.Random(seed)
    acknowledged: dict[str, int] = {}
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(data_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert process.stdout is not None
        for _ in range(chance.randrange(1, 60)):
            seq, response = process.stdout.readline().split()
            acknowledged[response] = int(seq)
        process.send_signal(signal.SIGKILL)
        told, _ = process.communicate()
        # The last line may be cut in its middle.
        for line in told.splitlines(keepends=True):
            if line.endswith("\n"):
                acknowledged[line.split()[1]] = int(line.split()[0])
        report = verify(data_dir)
        assert report.fault is None
        assert report.head >= max(acknowledged.values())
    with datadir.lock(data_dir), Journal.open(data_dir) as journal:
        erased = {fact.event.response for fact in journal.before(journal.head + 1, PayloadErased)}
        for response, seq in acknowledged.items():
            turn = journal.turn(response)
            if turn is None:  # deleted and erased: its facts are all that stays
                assert response in erased
                continue
            assert turn.last_seq == seq
            assert turn.status in ("completed", "deleted")
        journal.recover()
        assert journal.running() == []
    assert verify(data_dir).clean
