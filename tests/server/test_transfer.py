"""Backup, export and import beside real servers: nothing of it disturbs what is served, and a session can move."""

from __future__ import annotations

import json
import os
import shutil
import stat
import threading
from pathlib import Path

from tests.server.test_restart import verify
from tests.serving import Server, scripted, zj

STREAMS = 32
TURNS = 4


def told(done: object) -> dict:
    assert done.returncode == 0, done.stderr  # type: ignore[attr-defined]
    return json.loads(done.stdout)  # type: ignore[attr-defined]


def test_a_conversation_moves_to_another_machine_and_back(tmp_path: Path) -> None:
    model = scripted(tmp_path, {"text": "Noted."}, {"text": "Osprey."}, {"text": "Yes."})
    here, there, file = ("--data-dir", str(tmp_path / "a")), ("--data-dir", str(tmp_path / "b")), tmp_path / "s.jsonl"
    with Server(tmp_path / "a", model=model) as server:
        first = server.respond(input="My boat is called Osprey.")
        second = server.respond(input="What is it called?", previous_response_id=first["id"])
        done = zj("sessions", "export", second["id"][:14], "-o", str(file), *here)
        assert done.returncode == 0, done.stderr
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert zj("sessions", "export", second["id"], "-o", str(file), *here).returncode == 73
        # Deterministic, whether it goes to a file or a pipe.
        assert zj("sessions", "export", second["id"], *here).stdout == file.read_text()

    with Server(tmp_path / "b", model=model) as server:
        imported = told(zj("sessions", "import", str(file), "--json", *there))  # by the server that runs
        assert (imported["turns"], imported["known"]) == (2, 0)
        for response in (first, second):
            assert server.http.get(f"/v1/responses/{response['id']}").json() == response
        third = server.respond(input="Are you sure?", previous_response_id=second["id"])
        assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"] + second["usage"]["output_tokens"]
        assert told(zj("sessions", "import", str(file), "--json", *there))["turns"] == 0
        longer = zj("sessions", "export", third["id"], *there).stdout
    verify(tmp_path / "b")

    (tmp_path / "longer").write_text(longer)
    back = told(zj("sessions", "import", str(tmp_path / "longer"), "--json", *here))  # no server runs
    assert (back["turns"], back["known"]) == (1, 2)
    verify(tmp_path / "a")
    with Server(tmp_path / "a", model=model) as server:
        assert server.http.get(f"/v1/responses/{third['id']}").json() == third
    page = zj("sessions", "export", third["id"], "--format", "md", "--turns", "2:3", *here).stdout
    assert "What is it called?" in page and "Osprey." in page and "Are you sure?" in page
    assert "My boat" not in page


def test_an_import_where_no_journal_is_makes_one(tmp_path: Path) -> None:
    with Server(tmp_path / "a", model=scripted(tmp_path, {"text": "Noted."})) as server:
        first = server.respond(input="Remember me.")
        (tmp_path / "f").write_text(zj("sessions", "export", first["id"], "--data-dir", str(tmp_path / "a")).stdout)
    new = ("--data-dir", str(tmp_path / "new"))
    assert told(zj("sessions", "import", str(tmp_path / "f"), "--json", "--tenant", "alice", *new))["turns"] == 1
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    verify(tmp_path / "new")
    bad = zj("sessions", "import", str(tmp_path / "turns.json"), *new)
    assert bad.returncode == 65 and bad.stderr.count("\n") == 1, bad.stderr


def test_o17_readers_and_backups_in_a_loop_disturb_nobody(tmp_path: Path) -> None:
    """Field report O17: 32 streams while list, export, stats and backup run in a loop. No error, nothing lost."""
    model = scripted(tmp_path, {"text": "word " * 40})
    data = ("--data-dir", str(tmp_path / "data"))
    with Server(tmp_path / "data", "--max-running", "8", model=model) as server:
        start = server.respond(input="Begin.")
        ends: list[str] = []
        stop = threading.Event()
        failures: list[str] = []

        def stream(number: int) -> None:
            previous = start["id"]
            for turn in range(TURNS):
                body = {
                    "model": "default",
                    "input": f"{number}.{turn}",
                    "previous_response_id": previous,
                    "stream": True,
                }
                events = list(server.events("/v1/responses", body))
                if events[-1]["type"] != "response.completed":
                    failures.append(json.dumps(events[-1]))
                    return
                previous = events[-1]["response"]["id"]
            ends.append(previous)

        def look() -> None:
            turn = 0
            while not stop.is_set():
                turn += 1
                for command in (
                    ("sessions", "list", "--json"),
                    ("sessions", "export", start["id"]),
                    ("journal", "backup", str(tmp_path / f"copy{turn}.db")),
                    ("journal", "stats", "--json"),
                ):
                    done = zj(*command, *data)
                    if done.returncode != 0:
                        failures.append(done.stderr)

        looking = threading.Thread(target=look)
        streams = [threading.Thread(target=stream, args=(number,)) for number in range(STREAMS)]
        looking.start()
        for thread in streams:
            thread.start()
        for thread in streams:
            thread.join()
        stop.set()
        looking.join()
        assert not failures
        assert len(ends) == STREAMS
        export = zj("sessions", "export", start["id"], *data)
        accepted = [line for line in export.stdout.splitlines() if '"t":"request_accepted.1"' in line]
        assert len(accepted) == 1 + STREAMS * TURNS, "neither lost nor doubled"
    verify(tmp_path / "data")
    copies = sorted(tmp_path.glob("copy*.db"), key=os.path.getmtime)
    assert copies
    (tmp_path / "again").mkdir(mode=0o700)
    shutil.copy2(copies[-1], tmp_path / "again" / "journal.db")
    verify(tmp_path / "again")
