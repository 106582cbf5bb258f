"""Sessions keep their KV over kill -9; what is deleted or collected goes from the disk, beside a server and without."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.serving import Server, happened, scripted, until, zj
from zjournal.journal import snapshots
from zjournal.journal.events import CacheBackedUp, CachePurged, CacheQuarantined, CacheReconciled, CacheRestored
from zjournal.journal.reader import Reader
from zjournal.sessions import snapshots as files

LONG = " ".join(f"word{number}" for number in range(600))  # more than two chunks of tokens


@pytest.fixture
def server(tmp_path: Path) -> Server:
    turns = [{"text": f"answer {number}"} for number in range(8)]
    return Server(tmp_path / "data", model=scripted(tmp_path, *turns))


def stored(data_dir: Path, response: str) -> int:
    """Tokens of a response's snapshot; 0 if it has none."""
    with Reader.open(data_dir) as reader:
        found = snapshots.snapshot(reader, response)
        return found.tokens if found else 0


def whole(data_dir: Path, response: str) -> bool:
    """Whether all that the response left behind is on disk: all tokens but the last, whose KV was never computed."""
    with Reader.open(data_dir) as reader:
        turn = reader.turn(response)
    assert turn is not None
    return stored(data_dir, response) >= turn.prompt + turn.output - 1


def names(data_dir: Path) -> set[str]:
    return {path.stem for path in files.folder_of(data_dir).rglob("*.zjc")}


def named(data_dir: Path) -> set[str]:
    with Reader.open(data_dir) as reader:
        return {row.hash.hex() for page in snapshots.chunks(reader) for row in page}


def bad(data_dir: Path) -> int:
    with Reader.open(data_dir) as reader:
        return snapshots.totals(reader).bad


def turns(data_dir: Path, response: str) -> dict[str, Any]:
    shown = zj("sessions", "show", response, "--json", "--data-dir", str(data_dir))
    assert shown.returncode == 0, shown.stderr
    return {turn["response"]: turn for turn in json.loads(shown.stdout)["turns"]}


def clean(data_dir: Path) -> bool:
    done = zj("journal", "verify", "--deep", "--data-dir", str(data_dir))
    assert done.returncode == 0, done.stdout + done.stderr
    return True


@pytest.mark.parametrize("kill", [True, False])
def test_a_session_comes_back_from_disk_after_a_restart(server: Server, kill: bool) -> None:
    with server:
        first = server.respond(input=LONG)
        until(lambda: whole(server.data_dir, first["id"]))
        if kill:
            server.restart()
        else:
            assert server.terminate() == 0
            server.start()
        second = server.respond(input="go on", previous_response_id=first["id"])
        shown = turns(server.data_dir, second["id"])[second["id"]]
        cached = second["usage"]["input_tokens_details"]["cached_tokens"]
        assert shown["cached_by_tier"] == {"device": 0, "host": 0, "ssd": cached}
        tree = zj("sessions", "show", second["id"], "--data-dir", str(server.data_dir)).stdout
        assert f"cached {cached} ({shown['cache_reason']}, {cached} from ssd)" in tree
        reached = first["usage"]["input_tokens"] + first["usage"]["output_tokens"] - 1
        assert cached >= reached - 16, "all but a part of a block"
        (restored,) = happened(server.data_dir, CacheRestored)
        assert (restored.tier, restored.tokens, restored.response) == ("ssd", cached, second["id"])
        metrics = server.http.get("/metrics").text
        assert f'zj_prompt_tokens_total{{source="ssd"}} {cached}.0' in metrics
        until(lambda: whole(server.data_dir, second["id"]))
        told = [len(event.chunks) for event in happened(server.data_dir, CacheBackedUp)]
        assert sum(told) <= len(named(server.data_dir)) + len(told), "chunks on disk are not written again"
    assert clean(server.data_dir)


def test_an_engine_that_died_alone_is_told_what_is_on_disk(server: Server) -> None:
    with server:
        first = server.respond(input=LONG)
        gone = server.respond(input="something else: " + LONG)
        for answer in (first, gone):
            until(lambda answer=answer: whole(server.data_dir, answer["id"]))  # type: ignore[misc]
        (engine,) = server.children()
        os.kill(engine, signal.SIGKILL)
        assert server.http.delete(f"/v1/responses/{gone['id']}").status_code == 200
        server.wait_ready()
        until(lambda: server.children() not in ([], [engine]))
        server.wait_ready()
        second = server.respond(input="go on", previous_response_id=first["id"])
        assert turns(server.data_dir, second["id"])[second["id"]]["cached_by_tier"]["ssd"] > 512
        until(lambda: names(server.data_dir) == named(server.data_dir))
    assert clean(server.data_dir)


def test_delete_takes_the_files_beside_a_server(server: Server) -> None:
    with server:
        first = server.respond(input=LONG)
        other = server.respond(input=LONG + " and another end")
        for answer in (first, other):
            until(lambda answer=answer: whole(server.data_dir, answer["id"]))  # type: ignore[misc]
        assert server.http.delete(f"/v1/responses/{other['id']}").status_code == 200
        until(lambda: names(server.data_dir) == named(server.data_dir))
        assert stored(server.data_dir, other["id"]) == 0 and stored(server.data_dir, first["id"])
        assert [event.cause for event in happened(server.data_dir, CachePurged)] == ["deleted"]
        assert zj("sessions", "delete", first["id"], "--yes", "--data-dir", str(server.data_dir)).returncode == 0
        until(lambda: not names(server.data_dir))
        again = server.respond(input=LONG)
        assert again["usage"]["input_tokens_details"]["cached_tokens"] == 0
    assert clean(server.data_dir)


def test_gc_and_pins_beside_a_server(server: Server) -> None:
    where = ("--data-dir", str(server.data_dir))
    with server:
        kept = server.respond(input=LONG)
        other = server.respond(input="something else: " + LONG)
        for answer in (kept, other):
            until(lambda answer=answer: whole(server.data_dir, answer["id"]))  # type: ignore[misc]
        assert zj("snapshots", "pin", kept["id"][:20], *where).returncode == 0
        plan = json.loads(zj("snapshots", "gc", "--limit", "0", "--json", *where).stdout)
        assert {name for one in plan["deletions"] for name in one["snapshots"]} == {other["id"]}
        done = json.loads(zj("snapshots", "gc", "--limit", "0", "--yes", "--json", *where).stdout)
        assert done["collected"]["chunks"] == len(plan["deletions"]) > 0
        until(lambda: names(server.data_dir) == named(server.data_dir))
        assert stored(server.data_dir, kept["id"]) and not stored(server.data_dir, other["id"])
        server.restart()
        second = server.respond(input="go on", previous_response_id=kept["id"])
        assert second["usage"]["input_tokens_details"]["cached_tokens"] > 512
    assert clean(server.data_dir)


def test_a_bad_file_is_put_aside_once_and_the_answer_is_right(server: Server) -> None:
    with server:
        first = server.respond(input=LONG)
        until(lambda: whole(server.data_dir, first["id"]))
        server.kill()
        path = next(files.folder_of(server.data_dir).glob("*/*/*.zjc"))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        server.start()
        second = server.respond(input="go on", previous_response_id=first["id"])
        assert second["status"] == "completed"
        (event,) = happened(server.data_dir, CacheQuarantined)
        assert (event.file, event.hash.hex()) == (path.name, path.stem)
        until((files.folder_of(server.data_dir) / "quarantine" / path.name).exists)  # moved once the fact is durable
        server.respond(input="and on", previous_response_id=second["id"])
        assert len(happened(server.data_dir, CacheQuarantined)) == 1


def test_a_start_removes_what_nothing_names_and_tells_what_is_missing(server: Server) -> None:
    with server:
        first = server.respond(input=LONG)
        until(lambda: whole(server.data_dir, first["id"]))
        server.kill()
        folder = files.folder_of(server.data_dir)
        lost, *_ = sorted(folder.glob("*/*/*.zjc"))
        orphan = lost.with_name(lost.name[:2] + "0" * 62 + ".zjc")
        lost.rename(orphan)
        part = lost.with_name(lost.stem + "." + "0" * 16 + ".part")
        part.write_bytes(b"cut")
        server.start()
        until(lambda: bool(happened(server.data_dir, CacheReconciled)))
        (event,) = happened(server.data_dir, CacheReconciled)
        assert (event.orphans, event.leftovers, event.missing) == (1, 1, (bytes.fromhex(lost.stem),))
        until(lambda: not orphan.exists() and not part.exists())
        second = server.respond(input=LONG)
        assert second["status"] == "completed"
        until(lambda: lost.exists())  # it was computed again, and written again
        until(lambda: not bad(server.data_dir))
    assert clean(server.data_dir)


def test_off_writes_nothing_and_still_deletes(server: Server) -> None:
    with server:
        first = server.respond(input=LONG)
        until(lambda: whole(server.data_dir, first["id"]))
        assert server.terminate() == 0
        server.flags += ["--snapshots", "off"]
        server.start()
        before = names(server.data_dir)
        second = server.respond(input="go on", previous_response_id=first["id"])
        assert second["usage"]["input_tokens_details"]["cached_tokens"] == 0
        assert names(server.data_dir) == before and before
        for answer in (second, first):
            assert server.http.delete(f"/v1/responses/{answer['id']}").status_code == 200
        until(lambda: not names(server.data_dir))
        assert server.terminate() == 0
    assert clean(server.data_dir)


@pytest.mark.parametrize("changes", ["question", "answer"])
def test_a_near_miss_is_explained_by_the_tokens(server: Server, changes: str) -> None:
    """A client that edits the end of what it sends again leaves the snapshot there, and diff says where and why."""
    where = ("--data-dir", str(server.data_dir))
    long = f"{LONG} {LONG}"
    with server:
        first = server.respond(input=[{"role": "user", "content": f"{long} first"}])
        until(lambda: whole(server.data_dir, first["id"]))
        server.restart()
        said = first["output"][0]["content"][0]["text"]
        ending, answer = ("second", said) if changes == "question" else ("first", "another one")
        second = server.respond(
            input=[
                {"role": "user", "content": f"{long} {ending}"},
                {"role": "assistant", "content": answer},
                {"role": "user", "content": "go on"},
            ]
        )
        done = zj("sessions", "diff", first["id"], second["id"], "--json", *where)
        found = json.loads(done.stdout)
        near = found["near_miss"]
        assert near["response"] == first["id"] and near["tokens"] == stored(server.data_dir, first["id"])
        if changes == "question":
            assert (near["reason"], done.returncode) == ("where the prompts part", 1)
            assert near["at_token"] == found["shared_tokens"]
        else:
            assert (near["reason"], done.returncode) == ("in A's answer, which B does not have as it was sampled", 0)
            assert near["at_token"] >= found["a"]["tokens"]
        shown = turns(server.data_dir, second["id"])[second["id"]]["near_miss"]
        assert shown == {key: near[key] for key in ("response", "at_token", "tokens")}
