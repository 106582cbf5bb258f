"""O28 beside a running server: what was deleted is in no file and no memory, and what continues it lives on."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from pathlib import Path

import msgspec
import pytest
import zstandard

from tests.serving import Server, scripted, until, zj
from zjournal.journal.events import TokensSampled
from zjournal.journal.reader import Reader
from zjournal.link import admin
from zjournal.sessions.makers import Makers
from zjournal.sessions.records import Records

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
FRAME_BYTES = 1 << 20
WORDS = "canary-5d41-{} and some more words, so that no compression hides them"


@pytest.fixture
def server(tmp_path: Path) -> Server:
    turns = [{"text": WORDS.format("sampled")}, {"text": "a plain answer"}]
    return Server(tmp_path / "data", model=scripted(tmp_path, *turns))


def _files_with(folder: Path, text: bytes) -> list[str]:
    return [path.name for path in folder.iterdir() if path.is_file() and text in path.read_bytes()]


def _first_session(server: Server) -> dict:
    (session,) = json.loads(zj("sessions", "list", "--json", "--data-dir", str(server.data_dir)).stdout)
    return session


def test_deleted_text_is_in_no_file_and_in_no_answer(server: Server) -> None:
    with server:
        tool = {"type": "function", "name": "t", "description": WORDS.format("tool"), "parameters": {}}
        kept = server.respond(input="What stays?", tools=[tool])
        asked = server.respond(input=WORDS.format("message"), tools=[tool], previous_response_id=kept["id"])
        bodies, stored = _contents(server.data_dir, [kept["id"], asked["id"]])
        assert all(WORDS.format(word).encode() in bodies for word in ("tool", "message"))
        assert len(stored) >= 2 and all(_files_with(server.data_dir, part) for part in stored)
        ids = _sampled(server.data_dir, kept["id"])
        assert len(ids) > 40
        assert _files_with(server.data_dir, ids)
        where = ("--data-dir", str(server.data_dir))
        shown = zj("sessions", "delete", kept["id"], "--cascade", *where)
        assert "nothing was deleted" in shown.stdout, shown.stderr
        done = zj("sessions", "delete", kept["id"], "--cascade", "--yes", "--json", *where)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)["deleted"]
        assert (report["turns"], report["kept"], report["scrubbed"]) == (2, 0, True)
        assert report["bytes"] > 0
        assert not any(_told(server.data_dir, word) for word in ("canary-5d41", "What stays?"))
        assert not any(_files_with(server.data_dir, part) for part in [ids, *stored])
        for answer in (kept, asked):
            assert server.http.get(f"/v1/responses/{answer['id']}").status_code == 404
            again = server.post(
                "/v1/responses", {"model": "default", "input": "go on", "previous_response_id": answer["id"]}
            )
            assert (again.status_code, again.json()["error"]["code"]) == (400, "previous_response_not_found")
        verified = zj("journal", "verify", *where)
        assert verified.returncode == 0, verified.stdout
        compacted = zj("journal", "compact", "--json", *where)
        assert compacted.returncode == 0, compacted.stderr
        assert json.loads(compacted.stdout)["scrubbed"] is True
        assert server.respond(input="Still there?")["status"] == "completed"


def _contents(data_dir: Path, responses: list[str]) -> tuple[bytes, list[bytes]]:
    """The bodies of these responses, one after another, and pieces of what is stored for them, as it is stored."""
    with Reader.open(data_dir) as reader:
        records = Records(reader, Makers(reader))
        turns = [turn for response in responses if (turn := reader.turn(response)) is not None]
        bodies = b"".join(records.body(turn) for turn in turns)
        with reader.transaction() as db:
            rows = db.execute("SELECT data FROM content WHERE tenant = 'local'").fetchall()
    return bodies, [data[at : at + 48] for (data,) in rows for at in (16, len(data) // 2) if len(data) > at + 48]


def _sampled(data_dir: Path, response: str) -> bytes:
    """The longest run of packed tokens among the facts of a response."""
    with Reader.open(data_dir) as reader:
        facts = reader.read_response(response)
    return max((fact.payload or b"" for fact in facts if isinstance(fact.event, TokensSampled)), key=len)


def _told(data_dir: Path, text: str) -> bool:
    """Whether a text stands in any file, as it is or in a compressed content, whatever the page it lies in is for."""
    wanted = text.encode()
    for path in data_dir.iterdir():
        data = path.read_bytes() if path.is_file() else b""
        if wanted in data:
            return True
        at = data.find(ZSTD_MAGIC)
        while at >= 0:
            with contextlib.suppress(zstandard.ZstdError):
                if wanted in zstandard.ZstdDecompressor().decompressobj().decompress(data[at : at + FRAME_BYTES]):
                    return True
            at = data.find(ZSTD_MAGIC, at + 1)
    return False


def test_a_living_branch_goes_on_when_its_beginning_was_deleted(server: Server) -> None:
    with server:
        first = server.respond(input="one")
        branch = server.respond(input="two", previous_response_id=first["id"])
        where = ("--data-dir", str(server.data_dir))
        done = zj("sessions", "delete", first["id"], "--yes", *where)
        assert done.returncode == 0, done.stderr
        assert "1 turn hidden whose text stays" in done.stdout
        assert server.http.get(f"/v1/responses/{first['id']}").status_code == 404
        third = server.respond(input="three", previous_response_id=branch["id"])
        assert third["usage"]["input_tokens"] > branch["usage"]["input_tokens"]
        assert zj("journal", "verify", *where).returncode == 0


def test_a_replay_keeps_text_until_the_advice_is_followed(server: Server) -> None:
    """What the plan, and each answer behind it, says to do next does it: at the end the text is gone."""

    def held() -> list[int]:
        tables = ("session", "turn", "content")
        with Reader.open(server.data_dir) as reader, reader.transaction() as db:
            return [db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables]

    with server:
        where = ("--data-dir", str(server.data_dir))
        before = held()
        first = server.respond(input=WORDS.format("message"))
        server.respond(input="and?", previous_response_id=first["id"])
        session = _first_session(server)["session"]
        done = zj("replay", session, "--json", *where)
        replay, again = (found := json.loads(done.stdout))["replay"], found["turns"][0]["replay"]
        listed = {
            one["session"]: one["replay_of"] for one in json.loads(zj("sessions", "list", "--json", *where).stdout)
        }
        assert listed == {session: None, replay: session}
        assert f"replay of {session}" in zj("sessions", "list", *where).stdout
        plan = zj("sessions", "delete", session, *where).stdout
        assert f"1 turn would be hidden whose text stays: 1 turn of {replay} is built on it" in plan
        assert f"`zj sessions delete {replay}` deletes it too" in plan
        hidden = json.loads(zj("sessions", "delete", session, "--yes", "--json", *where).stdout)
        assert (hidden["kept"], hidden["deleted"]["kept"]) == (1, 1)
        assert zj("sessions", "delete", session, *where).returncode == 1
        taken = zj("sessions", "delete", session, "--cascade", "--yes", "--json", *where)
        assert taken.returncode == 0, taken.stderr
        assert json.loads(taken.stdout)["deleted"]["kept"] == 0
        assert json.loads(taken.stdout)["replays"] == [replay]
        said = server.http.get(f"/v1/responses/{again}/input_items").text
        assert WORDS.format("message") in said, "the first turn of the replay is still there"
        assert zj("sessions", "delete", replay, "--yes", *where).returncode == 0
        assert not _told(server.data_dir, "canary-5d41")
        assert held() == before, "nothing is kept, hidden or not"
        assert zj("journal", "verify", *where).returncode == 0


def test_the_device_forgets_as_well(server: Server) -> None:
    with server:
        words = " ".join(f"word{k}" for k in range(200))
        first = server.respond(input=words)
        again = server.respond(input=words)
        assert again["usage"]["input_tokens_details"]["cached_tokens"] > 100
        where = ("--data-dir", str(server.data_dir))
        for answer in (first, again):
            assert zj("sessions", "delete", answer["id"], "--yes", *where).returncode == 0
        after = server.respond(input=words)
        # The beginning that the template gives every prompt may be kept for nobody.
        assert after["usage"]["input_tokens_details"]["cached_tokens"] < 16


def test_a_session_that_runs_is_left_and_refused(tmp_path: Path) -> None:
    turn = {"text": "slow " * 500, "delay_ms": 50}
    with Server(tmp_path / "data", model=scripted(tmp_path, turn)) as server:
        body = {"model": "default", "input": "go", "stream": True}
        where = ("--data-dir", str(server.data_dir))
        with server.http.stream("POST", "/v1/responses", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            session = _first_session(server)["session"]
            refused = zj("sessions", "delete", session, "--yes", *where)
            assert (refused.returncode, "is running" in refused.stderr) == (1, True)
            plan = json.loads(zj("sessions", "prune", "--id", session, "--yes", "--json", *where).stdout)
            assert [(row["action"], row["reason"]) for row in plan["sessions"]] == [("keep", "running")]
            assert plan["deleted"] is None


def test_a_name_whose_session_was_deleted_opens_a_new_one(server: Server) -> None:
    with server:
        where = ("--data-dir", str(server.data_dir))
        server.respond(input="one", prompt_cache_key="mine")
        first = _first_session(server)["session"]
        assert zj("sessions", "delete", first, "--yes", *where).returncode == 0
        server.respond(input="two", prompt_cache_key="mine")
        second = _first_session(server)["session"]
        assert second != first


def test_admin_socket_is_private_and_refuses_what_it_does_not_know(server: Server) -> None:
    with server:
        path = server.data_dir / admin.SOCKET_FILE
        assert path.stat().st_mode & 0o777 == 0o600
        for call, word in (
            (admin.Call(admin.VERSION + 1, "journal.compact", msgspec.Raw(b"\x80")), "version"),
            (admin.Call(admin.VERSION, "nonsense", msgspec.Raw(b"\x80")), "no operation"),
            (admin.Call(admin.VERSION, "sessions.delete", msgspec.Raw(b"\x80")), "cannot be read"),
        ):
            outcome = _exchange(path, admin.frame(call))
            assert outcome.failure is not None and word in outcome.failure.message
        for rubbish in (b"\xff\xff\xff\xff", struct.pack("<I", 3) + b"abc"):
            outcome = _exchange(path, rubbish)
            assert outcome.failure is not None and outcome.failure.kind == "BadRequest"
        assert server.terminate() == 0
        assert not path.exists()


def _exchange(path: Path, data: bytes) -> admin.Outcome:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(str(path))
        sock.sendall(data)
        with sock.makefile("rb") as file:
            return admin.decode_outcome(file.read(admin.length_of(file.read(admin.LENGTH_BYTES))))


def test_a_killed_server_leaves_a_socket_that_stands_in_nobodys_way(server: Server) -> None:
    with server:
        answer = server.respond(input="one")
        server.kill()
        where = ("--data-dir", str(server.data_dir))
        assert (server.data_dir / admin.SOCKET_FILE).exists()
        done = zj("sessions", "delete", answer["id"], "--yes", *where)
        assert done.returncode == 0, done.stderr
        server.start()
        assert server.http.get(f"/v1/responses/{answer['id']}").status_code == 404
        assert zj("sessions", "pin", _first_session(server)["session"], *where).returncode == 0


def test_a_cap_on_age_is_kept_from_the_start_on(server: Server) -> None:
    with server:
        answer = server.respond(input="one")
        assert server.terminate() == 0
        server.flags += ["--journal-max-age", "1ms"]
        server.start()
        with Reader.open(server.data_dir) as reader:
            until(lambda: reader.sessions() == [])
        assert server.http.get(f"/v1/responses/{answer['id']}").status_code == 404
        assert "unused for 1ms" in server.log.read_text()
