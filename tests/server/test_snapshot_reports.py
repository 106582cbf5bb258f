"""Field reports about snapshots, each with its own input, on real processes: lost, grown, foreign, half-written."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.serving import Server, happened, scripted, until, zj
from zjournal.journal import snapshots
from zjournal.journal.events import (
    CacheBackedUp,
    CacheMatched,
    CachePurged,
    CacheQuarantined,
    CacheReconciled,
)
from zjournal.journal.reader import Reader
from zjournal.sessions import snapshots as files


def text(count: int, name: str) -> str:
    return " ".join(f"{name}{number}" for number in range(count))


def disk_bytes(data_dir: Path) -> int:
    total = 0
    for path in files.folder_of(data_dir).rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue  # it went meanwhile
    return total


def names(data_dir: Path) -> set[str]:
    return {path.stem for path in files.folder_of(data_dir).glob("*/*/*.zjc")}


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
        assert {one.cause for one in happened(server.data_dir, CachePurged)} <= {"quota", "stale"}
        assert any(one.cause == "quota" for one in happened(server.data_dir, CachePurged))
        server.kill()
        gone, before = len(happened(server.data_dir, CachePurged)), names(server.data_dir)
        scripted(tmp_path, {"text": "Other words."})  # another model under the same name
        server.flags[1] = str(limit // 2)
        server.start()
        until(lambda: disk_bytes(server.data_dir) <= limit // 2)
        purged = happened(server.data_dir, CachePurged)
        assert len(purged) > gone
        told = {hash_.hex() for one in purged for hash_ in one.hashes}
        assert before - names(server.data_dir) <= told, "each that goes is told"
        assert server.terminate() == 0
    where = ("--limit", str(limit // 4), "--json", "--data-dir", str(tmp_path / "data"))
    predicted = [one["hash"] for one in json.loads(zj("snapshots", "gc", *where).stdout)["deletions"]]
    assert zj("snapshots", "gc", "--yes", *where).returncode == 0
    done = [one for one in happened(tmp_path / "data", CachePurged) if one.cause == "gc"]
    assert predicted and sorted(hash_.hex() for one in done for hash_ in one.hashes) == sorted(predicted)
    assert disk_bytes(tmp_path / "data") <= limit // 4


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
        until(lambda: written(server.data_dir, other))
        (matched,) = [one for one in happened(server.data_dir, CacheMatched) if one.response == other["id"]]
        assert (matched.cached, matched.reason) == (0, "fingerprint: weights")
        shown = zj("snapshots", "gc", "--limit", "1", "--json", "--data-dir", str(server.data_dir))
        whys = [one["reason"] for one in json.loads(shown.stdout)["deletions"]]
        assert whys[0] == "foreign" and "foreign" not in whys[whys.count("foreign") :], "what is stale goes first"
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
        until(lambda: any(one.leftovers == 1 for one in happened(server.data_dir, CacheReconciled)))
        assert not leftover.exists()
        assert server.post("/v1/responses", {"model": "default", **asked}).status_code == 200


def test_o14_r22_snapshots_grow_with_what_is_new_and_go_with_their_session(tmp_path: Path) -> None:
    """Field reports O14 and R22: each request resends all history. What is written are the new tokens and a tail.

    After the session was deleted and the journal compacted, no file is left, and no row.
    """
    with Server(tmp_path / "data", model=scripted(tmp_path, {"text": "Yes, and no."})) as server:
        history: list[dict[str, str]] = []
        responses, prompts = [], []
        for turn in range(24):
            history = [*history, {"role": "user", "content": text(40, f"t{turn}x")}]
            answer = server.respond(input=history)
            history = [*history, {"role": "assistant", "content": answer["output"][0]["content"][0]["text"]}]
            until(lambda answer=answer: written(server.data_dir, answer))  # type: ignore[misc]
            responses.append(answer["id"])
            prompts.append(answer["usage"]["input_tokens"])
        told = happened(server.data_dir, CacheBackedUp)
        for before, now, response in zip([0, *prompts], prompts, responses, strict=False):
            new = sum(chunk.tokens for one in told if one.response == response for chunk in one.chunks)
            assert new <= now - before + 2 * 255 + 20, "the new ones, and a tail of less than a chunk"
        total = sum(chunk.tokens for one in told for chunk in one.chunks)
        assert total < 0.2 * sum(prompts), "a whole prefix for each turn would be all of it"
        most = (prompts[-1] // 256 + 3) * max(chunk.file_bytes for one in told for chunk in one.chunks)
        until(lambda: disk_bytes(server.data_dir) <= most)
        where = ("--data-dir", str(server.data_dir))
        with Reader.open(server.data_dir) as reader:
            turn = reader.turn(responses[-1])
            assert turn is not None
        assert zj("sessions", "delete", turn.session, "--yes", *where).returncode == 0
        until(lambda: disk_bytes(server.data_dir) == 0)
        assert server.terminate() == 0
        assert zj("journal", "compact", *where).returncode == 0
    with Reader.open(tmp_path / "data") as reader:
        assert snapshots.totals(reader) == snapshots.Totals(0, 0, 0, 0)


@pytest.mark.parametrize("place", ["header", "data"])
def test_o16_a_file_with_one_flipped_bit_is_met_once(tmp_path: Path, place: str) -> None:
    """Field report O16: the request that meets it ends 200 by computing, and no second one meets it."""
    with Server(tmp_path / "data", model=scripted(tmp_path, {"text": "Yes."})) as server:
        asked = {"input": text(400, "w")}
        answer = server.respond(**asked)
        until(lambda: written(server.data_dir, answer))
        server.kill()
        paths = sorted(files.folder_of(server.data_dir).glob("*/*/*.zjc"))
        for path in paths:
            data = bytearray(path.read_bytes())
            data[{"header": 300, "data": 4096 + 17}[place]] ^= 4
            path.write_bytes(data)
        server.start()
        told = [server.respond(**asked) for _ in range(3)]
        assert {one["status"] for one in told} == {"completed"}
        assert [cached(one) > 0 for one in told] == [False, True, True]
        until(lambda: written(server.data_dir, told[0]))
        server.restart()
        assert cached(server.respond(**asked)) > 0, "it was written again"
        refused = [one.file for one in happened(server.data_dir, CacheQuarantined)]
        assert refused and len(refused) == len(set(refused))


def test_o16_killed_while_it_writes_again_and_again(tmp_path: Path) -> None:
    """Field report O16: kill -9 in the middle of snapshots; each start serves, and at the end the folder is clean."""
    model = scripted(tmp_path, {"text": "word " * 400, "delay_ms": 10})
    with Server(tmp_path / "data", model=model) as server:
        for number in range(3):
            body = {"model": "default", "input": text(500, f"k{number}x"), "stream": True}
            with server.http.stream("POST", "/v1/responses", json=body) as told:
                lines = told.iter_lines()
                folder = files.folder_of(server.data_dir)
                before = len(list(folder.rglob("*.zjc")))
                while len(list(folder.rglob("*.zjc"))) == before:  # the prompt's chunks are being written
                    next(lines)
                server.kill()
            server.start()
        answer = server.respond(input=text(300, "last"))
        until(lambda: written(server.data_dir, answer))
        assert server.terminate() == 0
        where = ("--data-dir", str(server.data_dir))
        assert zj("snapshots", "verify", "--deep", *where).returncode == 0
        assert zj("journal", "verify", "--deep", *where).returncode == 0
        assert zj("snapshots", "gc", "--yes", *where).returncode == 0
    with Reader.open(tmp_path / "data") as reader:
        known = {row.hash.hex() for page in snapshots.chunks(reader) for row in page}
    assert {path.stem for path in files.folder_of(tmp_path / "data").rglob("*.zjc")} == known
    assert not list(files.folder_of(tmp_path / "data").rglob("*.part"))
