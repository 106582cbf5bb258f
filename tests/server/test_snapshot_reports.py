"""Field reports about snapshots, each with its own input, on real processes: lost, grown, foreign, half-written."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serving import Server, scripted
from zjournal.journal import snapshots
from zjournal.journal.events import CachePurged, CacheReconciled
from zjournal.journal.reader import Reader
from zjournal.sessions import snapshots as files

WAIT_S = 30.0


def text(count: int, name: str) -> str:
    return " ".join(f"{name}{number}" for number in range(count))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


def disk_bytes(data_dir: Path) -> int:
    total = 0
    for path in files.folder_of(data_dir).rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue  # it went meanwhile
    return total


def facts(data_dir: Path, kind: type) -> list[Any]:
    with Reader.open(data_dir) as reader:
        found, after = [], 0
        while page := reader.read(after):
            found += [fact.event for fact in page if isinstance(fact.event, kind)]
            after = page[-1].seq
    return found


def written(data_dir: Path, answer: dict[str, Any]) -> bool:
    """Whether all that a response left behind is on disk."""
    with Reader.open(data_dir) as reader:
        found = snapshots.snapshot(reader, answer["id"])
    usage = answer["usage"]
    return found is not None and found.tokens >= usage["input_tokens"] + usage["output_tokens"] - 1


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["input_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("kill", [True, False])
def test_o12_r14_a_session_that_began_after_another_is_found_after_a_restart(tmp_path: Path, kill: bool) -> None:
    """Field reports O12 and R14: the second session of a process, resent in full."""
    with Server(tmp_path / "data", model=scripted(tmp_path, {"text": "Yes, and no."})) as server:
        for session, turns in (("a", 3), ("b", 4)):
            history: list[dict[str, str]] = []
            for turn in range(turns):
                history = [*history, {"role": "user", "content": text(150, f"{session}{turn}x")}]
                answer = server.respond(input=history)
                said = answer["output"][0]["content"][0]["text"]
                history = [*history, {"role": "assistant", "content": said}]
        if kill:
            until(lambda: written(server.data_dir, answer))
            server.restart()
        else:
            assert server.terminate() == 0
            server.start()
        resent = server.respond(input=[*history, {"role": "user", "content": "And now?"}])
        before = answer["usage"]["input_tokens"]
        assert cached(resent) >= 0.95 * before


def test_o13_the_limit_holds_while_writing_and_after_a_restart(tmp_path: Path) -> None:
    """Field report O13: more is produced than fits; then a smaller limit, and KV of a model that is gone."""
    limit = 2 << 20
    model = scripted(tmp_path, {"text": "Yes."})
    with Server(tmp_path / "data", "--snapshot-limit", str(limit), model=model) as server:
        for session in range(14):
            answer = server.respond(input=text(400, f"s{session}x"))
            assert disk_bytes(server.data_dir) <= limit
        until(lambda: written(server.data_dir, answer))
        assert {one.cause for one in facts(server.data_dir, CachePurged)} <= {"quota", "stale"}
        assert any(one.cause == "quota" for one in facts(server.data_dir, CachePurged))
        server.kill()
        gone = len(facts(server.data_dir, CachePurged))
        scripted(tmp_path, {"text": "Other words."})  # another model under the same name
        server.flags[1] = str(limit // 2)
        server.start()
        until(lambda: disk_bytes(server.data_dir) <= limit // 2)
        assert len(facts(server.data_dir, CachePurged)) > gone


def test_o15_other_weights_under_the_same_name_meet_nothing(tmp_path: Path) -> None:
    """Field report O15: the answer is that of a cold run, and what was there goes first when room is needed."""
    model = scripted(tmp_path, {"text": "Old words."})
    with Server(tmp_path / "data", model=model) as server:
        asked = {"input": text(400, "w")}
        answer = server.respond(**asked)
        until(lambda: written(server.data_dir, answer))
        assert server.terminate() == 0
        scripted(tmp_path, {"text": "New words."})
        server.start()
        other = server.respond(**asked)
        assert cached(other) == 0
        assert other["output"][0]["content"][0]["text"] == "New words."
        scripted(tmp_path, {"text": "Old words."})
        os.utime(tmp_path / "turns.json", (1, 1))  # a touched file of the same bytes is the same model
        server.restart()
        assert cached(server.respond(**asked)) > 0


def test_a_folder_that_cannot_be_used_stops_nothing_but_snapshots(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir(mode=0o700)
    with Server(data_dir, model=scripted(tmp_path, {"text": "Yes."})) as server:
        server.respond(input="one")
        assert server.terminate() == 0
        shutil.rmtree(files.folder_of(data_dir))
        files.folder_of(data_dir).write_text("a file in its place")
        server.start()
        assert server.respond(input=text(400, "w"))["status"] == "completed"
        assert server.terminate() == 0


def test_o16_what_a_kill_leaves_half_written_goes_and_is_counted(tmp_path: Path) -> None:
    """Field report O16: leftovers, and files cut to half; the retries are answered and the files met once."""
    with Server(tmp_path / "data", model=scripted(tmp_path, {"text": "Yes."})) as server:
        asked = {"input": text(400, "w")}
        answer = server.respond(**asked)
        until(lambda: written(server.data_dir, answer))
        server.kill()
        chunk = min(files.folder_of(server.data_dir).glob("*/*/*.zjc"), key=lambda path: path.stat().st_size)
        for path in files.folder_of(server.data_dir).glob("*/*/*.zjc"):
            os.truncate(path, path.stat().st_size // 2)
        leftover = chunk.with_name(f"{chunk.stem}.{'0' * 16}.part")
        leftover.write_bytes(b"half")
        os.utime(leftover, (1, 1))
        server.start()
        for _ in range(2):
            again = server.respond(**asked)
            assert again["status"] == "completed"
        until(lambda: any(one.leftovers == 1 for one in facts(server.data_dir, CacheReconciled)))
        assert not leftover.exists()
        assert server.post("/v1/responses", {"model": "default", **asked}).status_code == 200
