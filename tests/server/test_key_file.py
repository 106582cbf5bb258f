"""The file of keys changes while the server runs: who may enter, and what is counted, follow it without a restart."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.serving import Server, scripted, until, zj
from tests.sockets import Socket
from zjournal import keys
from zjournal.keys import Limits

MODELS = "/v1/models"


def status(server: Server, key: str) -> int:
    return server.http.get(MODELS, headers={"x-api-key": key}).status_code


def write(file: Path, text: str) -> None:
    """As an editor does: a new file in the place of the old one."""
    new = file.with_name("new")
    new.touch(0o600)
    new.write_text(text)
    new.rename(file)


def test_keys_come_and_go_while_the_server_runs(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    old, stays = keys.add(file, "old", Limits()), keys.add(file, "stays", Limits())
    with Server(tmp_path / "data", "--api-key-file", str(file), model=scripted(tmp_path, {"text": "Ok."})) as server:
        assert (status(server, old), status(server, stays)) == (200, 200)
        both = file.read_text()
        body = {"model": "default", "input": "hi"}
        mine = server.post("/v1/responses", body, headers={"x-api-key": stays}).json()["id"]

        added = keys.add(file, "later", Limits(requests=5))
        until(lambda: status(server, added) == 200)
        told = server.post("/v1/responses", body, headers={"x-api-key": added}).headers
        assert told["x-ratelimit-limit-requests"] == "5"

        write(file, both.splitlines()[1] + "\n")
        until(lambda: status(server, old) == 401)
        assert (status(server, added), status(server, stays)) == (401, 200)
        assert server.http.get(f"/v1/responses/{mine}", headers={"x-api-key": stays}).status_code == 200

        write(file, "this is no file of keys\n")
        until(lambda: status(server, stays) == 200 and "not of the form name:key" in server.log.read_text())
        assert (status(server, old), status(server, stays)) == (401, 200), "what was read before it goes on"
        assert stays not in server.log.read_text()
        file.unlink()
        until(lambda: status(server, stays) == 200 and "No such file" in server.log.read_text())
        assert status(server, stays) == 200

        write(file, both)
        until(lambda: status(server, old) == 200)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses/input_tokens", {"model": "default", "input": "hi"}),
        ("/v1/messages/count_tokens", {"model": "claude-x", "messages": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_counting_is_a_request_too(tmp_path: Path, path: str, body: dict) -> None:
    file = tmp_path / "keys"
    key = keys.add(file, "few", Limits(requests=2, streams=1))
    with Server(tmp_path / "data", "--api-key-file", str(file), model=scripted(tmp_path, {"text": "Ok."})) as server:
        headers = {"x-api-key": key}
        first = server.post(path, body, headers=headers)
        assert first.status_code == 200, first.text
        last = server.post(path, body, headers=headers)
        assert last.status_code == 200
        refused = server.post(path, body, headers=headers)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        kind = {"rate_limit_error", "rate_limit_exceeded"}
        assert kind & {refused.json()["error"].get("type"), refused.json()["error"].get("code")}
        names = [name for name in refused.headers if "ratelimit" in name and "remaining" in name]
        assert [refused.headers[name] for name in names] == ["0"]
        assert 'zj_limited_total{limit="requests"} 1.0' in server.http.get("/metrics", headers=headers).text


def test_a_socket_asks_for_its_key_at_every_request(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    gone, stays = keys.add(file, "gone", Limits()), keys.add(file, "stays", Limits())
    model = scripted(tmp_path, {"text": "Ok."})
    with Server(tmp_path / "data", "--api-key-file", str(file), model=model) as server:
        with Socket(server.port, {"authorization": f"Bearer {gone}"}) as socket:
            assert socket.answer(input="hi")[-1]["type"] == "response.completed"
            write(file, file.read_text().splitlines()[1] + "\n")
            until(lambda: status(server, gone) == 401)
            last = socket.answer(input="hi")[-1]
            assert (last["type"], last["status"], last["error"]["code"]) == ("error", 401, "invalid_api_key")
        assert status(server, stays) == 200


def test_who_is_removed_is_refused_and_what_was_begun_is_told_to_its_end(tmp_path: Path) -> None:
    """An open stream goes on; its engine stands still until the key works no more."""
    file = tmp_path / "keys"
    gone, stays = keys.add(file, "gone", Limits()), keys.add(file, "stays", Limits())
    model = scripted(tmp_path, {"text": "word " * 60, "delay_ms": 20.0})
    with Server(tmp_path / "data", "--api-key-file", str(file), model=model) as server:
        body = {"model": "default", "input": "slow", "stream": True}
        with server.http.stream("POST", "/v1/responses", json=body, headers={"x-api-key": gone}) as answer:
            lines = answer.iter_lines()
            while "output_text.delta" not in next(lines):
                pass
            (engine,) = server.children()
            os.kill(engine, signal.SIGSTOP)
            try:
                done = zj("keys", "remove", "gone", "--api-key-file", str(file))
                assert done.returncode == 0 and "1 key of gone removed" in done.stdout, done.stderr
                until(lambda: status(server, gone) == 401)
            finally:
                os.kill(engine, signal.SIGCONT)
            rest = "\n".join(lines)
        assert rest.count("output_text.delta") > 1 and "response.completed" in rest and "response.failed" not in rest
        assert status(server, stays) == 200
        again = keys.add(file, "gone", Limits())
        until(lambda: status(server, again) == 200)
    sessions = zj("sessions", "list", "--json", "--data-dir", str(server.data_dir))
    assert [row["owner_name"] for row in json.loads(sessions.stdout)] == ["gone"], "what it stored is its own still"
