"""The journal's log beside readers, with real processes: who blocks it is named, and its size stays bounded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.test_restart import verify
from tests.serving import Server, scripted, until, zj
from zjournal.journal import holders
from zjournal.journal.wal import LOG_BYTES_MAX

ROOT = Path(__file__).parents[2]
STREAMS, TURNS = 32, 6
LIMIT_MIB = 4
BODY_BYTES = 60_000
REQUESTS_MAX = 200

HOLD = """
import sys
from pathlib import Path
from zjournal.journal.reader import Reader
with Reader.open(Path(sys.argv[1])) as reader, reader.transaction() as db:
    db.execute("SELECT count(*) FROM event").fetchone()
    print("reading", flush=True)
    sys.stdin.readline()
"""

# What an export and a list do, over and over: every fact, every session, each turn's contents.
LOOP = """
import sys
from pathlib import Path
from zjournal.journal.reader import Reader
rounds = 0
print("reading", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    with Reader.open(Path(sys.argv[1])) as reader:
        after = 0
        while page := reader.read(after):
            after = page[-1].seq
        for session in reader.sessions():
            for turn in reader.turns(session.session):
                reader.read_response(turn.response)
    rounds += 1
print(rounds)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that opens a read transaction on the first line of its input, and ends on the second."""
    command = [sys.executable, "-c", f"import sys; sys.stdin.readline()\n{HOLD}", str(tmp_path / "data")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    yield process
    process.kill()
    process.communicate()


def _metric(server: Server, name: str) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(name + " "))


def _ask(server: Server) -> httpx.Response:
    return server.post("/v1/responses", {"model": "default", "input": os.urandom(BODY_BYTES // 2).hex(), "store": True})


@pytest.mark.skipif(not holders.LOCKS.exists(), reason="there is no /proc/locks")
def test_a_stopped_reader_is_named_and_from_the_limit_on_new_requests_are_refused(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    slow = {"when": "slow", "text": "word " * 150, "delay_ms": 20}
    model = scripted(tmp_path, slow, {"text": "Noted."}, context=2_000_000)
    with Server(tmp_path / "data", "--wal-max", f"{LIMIT_MIB}MiB", model=model) as server:
        server.respond(input="before")
        assert holder.stdin is not None and holder.stdout is not None
        holder.stdin.write("\n")
        holder.stdin.flush()
        holder.stdout.readline()
        os.kill(holder.pid, signal.SIGSTOP)
        running = server.events("/v1/responses", {"model": "default", "input": "slow", "stream": True})
        next(running)
        for _ in range(REQUESTS_MAX):
            refused = _ask(server)
            if refused.status_code != 200:
                break
        assert refused.status_code == 503, refused.text
        assert refused.json()["error"]["code"] == "journal_unavailable"
        assert f"process {holder.pid} (python" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 0
        assert _metric(server, "zj_journal_blocking_reader_pid") == holder.pid
        assert _metric(server, "zj_journal_wal_bytes") >= LIMIT_MIB << 20
        assert list(running)[-1]["type"] == "response.completed", "what runs goes on"

        os.kill(holder.pid, signal.SIGCONT)
        holder.communicate("\n")
        until(lambda: _metric(server, "zj_journal_wal_bytes") < LIMIT_MIB << 18)  # an idle server looks by itself
        assert _ask(server).status_code == 200
        assert _metric(server, "zj_journal_blocking_reader_pid") == 0
        assert server.terminate() == 0
    log = (tmp_path / "data.log").read_text()
    assert f"cannot be emptied: process {holder.pid}" in log
    assert "Traceback" not in log
    verify(tmp_path / "data")


def test_o17_parallel_streams_beside_looping_readers(tmp_path: Path) -> None:
    """Field report O17: 32 streams while the journal is read and verified in a loop: no error, no lost event."""
    model = scripted(tmp_path, {"text": "word " * 20}, context=2_000_000)
    with Server(tmp_path / "data", model=model) as server:
        server.respond(input="first")
        command = [sys.executable, "-c", f"import select\n{LOOP}", str(tmp_path / "data")]
        loop = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert loop.stdout is not None
        loop.stdout.readline()
        faults: list[object] = []
        largest = [0.0]

        def stream(number: int) -> None:
            previous = None
            for turn in range(TURNS):
                body = {"model": "default", "input": f"{number}.{turn} " + "x" * 5_000, "stream": True}
                seen = list(
                    server.events("/v1/responses", body | ({"previous_response_id": previous} if previous else {}))
                )
                numbers = [event["sequence_number"] for event in seen]
                if seen[-1]["type"] != "response.completed" or numbers != list(range(len(seen))):
                    faults.append(seen[-1])
                previous = seen[-1]["response"]["id"]

        threads = [threading.Thread(target=stream, args=(number,)) for number in range(STREAMS)]
        for thread in threads:
            thread.start()
        listed = 0
        while any(thread.is_alive() for thread in threads):
            largest[0] = max(largest[0], _metric(server, "zj_journal_wal_bytes"))
            done = zj("sessions", "list", "--json", "--data-dir", str(tmp_path / "data"))
            assert done.returncode == 0, done.stderr
            listed += 1
        rounds = int(loop.communicate("\n")[0].split()[-1])
        assert not faults
        assert rounds and listed
        assert largest[0] < LOG_BYTES_MAX
        done = zj("journal", "verify", "--json", "--data-dir", str(tmp_path / "data"))
        assert done.returncode == 0, done.stdout
        assert server.terminate() == 0
    assert "Traceback" not in (tmp_path / "data.log").read_text()
    verify(tmp_path / "data")


def test_a_rebuild_beside_a_server_that_goes_on(tmp_path: Path) -> None:
    with Server(tmp_path / "data", model=scripted(tmp_path, {"text": "Noted."})) as server:
        first = server.respond(input="first")
        server.respond(input="second", previous_response_id=first["id"])
        done = zj("journal", "rebuild", "--json", "--data-dir", str(tmp_path / "data"))
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["facts"] > 8
        third = server.respond(input="third", previous_response_id=first["id"])
        assert server.http.get(f"/v1/responses/{third['id']}").json() == third
        verify(tmp_path / "data")
        assert server.terminate() == 0
