"""A reader that is stopped in the middle of its read, and a disk that is full: real processes, a real small disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.test_restart import verify
from tests.serving import WAIT_S_MAX, Server, scripted

ROOT = Path(__file__).parents[2]
DISK_BYTES = 12 << 20
FILL_BYTES = 64 << 10
ASKS_MAX = 40
ASK_S_MAX = 5.0  # far below this without a stall; the writer's own patience with a foreign lock is as long

READ = """
import sys
from pathlib import Path
from zjournal.journal.reader import Reader
with Reader.open(Path(sys.argv[1])) as reader, reader.transaction() as db:
    print(db.execute("SELECT count(*) FROM event").fetchone()[0], flush=True)
    sys.stdin.readline()
    print(db.execute("SELECT count(*) FROM event").fetchone()[0], flush=True)
"""


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that opens a read transaction on its first line of input, and counts facts again on the second."""
    command = [sys.executable, "-c", f"import sys; sys.stdin.readline()\n{READ}", str(tmp_path / "data")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    yield process
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()


def _tell(process: subprocess.Popen[str]) -> int:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def test_a_stopped_reader_holds_up_nobody(tmp_path: Path, reader: subprocess.Popen[str]) -> None:
    """SIGSTOP under an open read transaction: requests, chains and erasures go on at their own pace."""
    model = scripted(tmp_path, {"text": "word " * 40})
    with Server(tmp_path / "data", model=model) as server:
        previous = server.respond(input="before")["id"]
        seen = _tell(reader)
        os.kill(reader.pid, signal.SIGSTOP)
        slowest = 0.0
        for number in range(12):
            started = time.monotonic()
            answer = server.respond(input=f"turn {number} " + "x" * 20_000, previous_response_id=previous)
            previous = answer["id"]
            hidden = server.respond(input=f"aside {number}")["id"]
            assert server.http.delete(f"/v1/responses/{hidden}").status_code == 200
            slowest = max(slowest, time.monotonic() - started)
        assert slowest < ASK_S_MAX
        verify(tmp_path / "data")
        os.kill(reader.pid, signal.SIGCONT)
        assert _tell(reader) == seen, "the reader saw two states in one transaction"
        assert reader.wait(WAIT_S_MAX) == 0
        assert server.http.get(f"/v1/responses/{previous}").status_code == 200
        assert server.terminate() == 0
    log = (tmp_path / "data.log").read_text()
    assert "Traceback" not in log
    assert "cannot be written" not in log
    verify(tmp_path / "data")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with little room; skips where it cannot be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    try:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "zjournal-test", place], capture_output=True, text=True
        )
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted: {mounted.stderr.strip()}")
    yield place
    left = subprocess.run(["umount", place], capture_output=True, text=True)
    if left.returncode != 0:
        subprocess.run(["umount", "--lazy", place], check=True)  # no later test finds it
    assert left.returncode == 0, f"something still holds its files: {left.stderr}"


def _fill(path: Path) -> None:
    """Takes the last byte of the disk."""
    with path.open("ab", buffering=0) as file:
        size = FILL_BYTES
        while size:
            try:
                if file.write(bytes(size)) < size:
                    size //= 2
            except OSError:
                size //= 2


def _ask_until_refused(server: Server) -> httpx.Response:
    """The log may have room of its own left; what is asked is large and new, so it does not last."""
    for number in range(ASKS_MAX):
        text = os.urandom(30_000).hex()
        answer = server.post("/v1/responses", {"model": "default", "input": f"{number} {text}"})
        if answer.status_code != 200:
            return answer
    raise AssertionError("the disk never filled")


def _sampled(server: Server) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    counts = [float(line.split()[-1]) for line in lines if line.startswith("zj_") and "output" in line]
    assert counts
    return sum(counts)


def test_a_full_disk_is_503_before_anything_is_generated_and_passes(tmp_path: Path, small_disk: Path) -> None:
    """What was told stays, the refusal says when to come back, and the same server goes on once there is room."""
    data_dir = small_disk / "data"
    with Server(data_dir, model=scripted(tmp_path, {"text": "Noted."})) as server:
        server.log = tmp_path / "server.log"
        first = server.respond(input="remember this")
        _fill(small_disk / "filler")
        refused = _ask_until_refused(server)
        assert refused.status_code == 503, refused.text
        assert refused.json()["error"]["code"] == "journal_unavailable"
        assert int(refused.headers["retry-after"]) > 0
        generated = _sampled(server)
        streamed = server.post("/v1/responses", {"model": "default", "input": os.urandom(30_000).hex(), "stream": True})
        assert streamed.status_code == 503, "an error after the first event is one that a client cannot retry"
        assert _sampled(server) == generated
        assert server.http.get("/livez").status_code == 200
        assert server.http.get(f"/v1/responses/{first['id']}").json() == first
        verify(data_dir)

        (small_disk / "filler").unlink()
        second = server.respond(input="and now?", previous_response_id=first["id"])
        assert second["status"] == "completed"
        assert server.terminate() == 0
        verify(data_dir)
        server.start()
        assert server.http.get(f"/v1/responses/{second['id']}").json() == second


def test_a_start_on_a_full_disk_says_so_and_harms_nothing(tmp_path: Path, small_disk: Path) -> None:
    data_dir = small_disk / "data"
    with Server(data_dir, model=scripted(tmp_path, {"text": "Noted."})) as server:
        first = server.respond(input="remember this")
        server.kill()
        _fill(small_disk / "filler")
        server.log = tmp_path / "full.log"
        server.spawn()
        assert server.process is not None
        status = server.process.wait(30)
        assert status == 65, server.log.read_text()
        assert "database or disk is full" in server.log.read_text()
        assert f"{data_dir}/journal.db" in server.log.read_text()
        assert "free space" in server.log.read_text()
        assert "Traceback" not in server.log.read_text()
        (small_disk / "filler").unlink()
        server.start()
        assert server.http.get(f"/v1/responses/{first['id']}").json() == first
    verify(data_dir)
