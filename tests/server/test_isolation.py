"""Who may see what: keys, foreign hosts and origins, hidden turns."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path

import httpx
import pytest

from tests.server.test_restart import verify
from tests.serving import Server, scripted, until

K1, K2 = "first-key-0123456789", "second-key-0123456789"


@pytest.fixture
def keyed(tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text(f"alice:{K1}\nbob:{K2}\n")
    keys.chmod(0o600)
    model = scripted(tmp_path, {"text": "Ok."})
    with Server(tmp_path / "data", "--api-key-file", str(keys), model=model) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_o25_a_foreign_id_is_as_one_that_never_was(keyed: Server) -> None:
    """Field report O25: another key gets, byte for byte, what it gets for an id that does not exist."""
    body = {"model": "default", "input": "mine"}
    first = keyed.post("/v1/responses", body, headers=bearer(K1)).json()["id"]
    second = keyed.post("/v1/responses", body | {"previous_response_id": first}, headers=bearer(K1)).json()["id"]
    unknown = "resp_" + "0" * 32
    for foreign in (first, second):
        for method in ("GET", "DELETE"):
            theirs = keyed.http.request(method, f"/v1/responses/{foreign}", headers=bearer(K2))
            never = keyed.http.request(method, f"/v1/responses/{unknown}", headers=bearer(K2))
            assert theirs.status_code == never.status_code == 404
            assert theirs.text.replace(foreign, "X") == never.text.replace(unknown, "X")
        theirs = keyed.post("/v1/responses", body | {"previous_response_id": foreign}, headers=bearer(K2))
        never = keyed.post("/v1/responses", body | {"previous_response_id": unknown}, headers=bearer(K2))
        assert theirs.status_code == never.status_code == 400
        assert theirs.text.replace(foreign, "X") == never.text.replace(unknown, "X")
    assert keyed.http.get(f"/v1/responses/{second}", headers=bearer(K1)).status_code == 200


FOREIGN = [
    ("GET", "/v1/responses/ID?stream=true", None),
    ("GET", "/v1/responses/ID/input_items", None),
    ("POST", "/v1/responses/ID/cancel", {}),
    ("POST", "/v1/responses/compact", {"model": "default", "previous_response_id": "ID"}),
    ("POST", "/v1/responses/input_tokens", {"model": "default", "input": "x", "previous_response_id": "ID"}),
    (
        "POST",
        "/v1/responses",
        {"model": "default", "input": "x", "prompt_cache_options": {"comparison_response_id": "ID"}},
    ),
]
MESSAGES = {"model": "default", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
OF_MESSAGES = [
    ("POST", "/v1/messages", {**MESSAGES, "thread": {"type": "continue", "previous_message_id": "ID"}}),
    ("POST", "/v1/messages", {**MESSAGES, "diagnostics": {"previous_message_id": "ID"}}),
]


# Ids of what is new, times, and what the second of two equal requests finds in the cache.
ANY = re.compile(r'(req|msg|resp|item)_[0-9a-f]+|"(created|completed|[a-z_]*(cached|input)_[a-z_]*)(_at)?":[0-9]+')


def told(answer: httpx.Response, name: str) -> tuple[int, str]:
    """What an answer says, without what differs between any two of them."""
    text = answer.text.replace(name, "ID")
    return answer.status_code, ANY.sub("", text)


@pytest.mark.parametrize(("method", "path", "body"), FOREIGN + OF_MESSAGES)
def test_o25_no_route_tells_a_foreign_id_from_one_that_never_was(
    keyed: Server, method: str, path: str, body: dict | None
) -> None:
    if path == "/v1/messages":
        made = keyed.post(path, MESSAGES | {"thread": {"type": "create"}}, headers=bearer(K1))
        unknown = "msg_" + "0" * 32
    else:
        made = keyed.post("/v1/responses", {"model": "default", "input": "mine"}, headers=bearer(K1))
        unknown = "resp_" + "0" * 32
    assert made.status_code == 200, made.text
    foreign = made.json()["id"]

    def ask(name: str) -> tuple[int, str]:
        filled = None if body is None else json.loads(json.dumps(body).replace("ID", name))
        return told(keyed.http.request(method, path.replace("ID", name), json=filled, headers=bearer(K2)), name)

    assert ask(foreign) == ask(unknown)


def test_a_response_continues_no_answer_of_another_protocol(keyed: Server) -> None:
    """There it has no items that could be listed or compacted; so it is as one that never was, as it is to GET."""
    said = {"model": "default", "messages": [{"role": "user", "content": "heron"}], "max_tokens": 9}
    for path in ("/v1/chat/completions", "/v1/messages"):
        name = keyed.post(path, said, headers=bearer(K1)).json()["id"]
        for route in ("", "/input_tokens", "/compact"):
            body = {"model": "default", "input": "x", "previous_response_id": name}
            refused = keyed.post("/v1/responses" + route, body, headers=bearer(K1))
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "previous_response_not_found")
        assert keyed.http.get(f"/v1/responses/{name}", headers=bearer(K1)).status_code == 404


def test_a_prefix_is_not_shared_between_keys(keyed: Server) -> None:
    """R19: what another key has cached is not even faster."""
    body = {"model": "default", "input": "a long and shared beginning " * 20}
    keyed.post("/v1/responses", body, headers=bearer(K1))
    own = keyed.post("/v1/responses", body, headers=bearer(K1)).json()
    foreign = keyed.post("/v1/responses", body, headers=bearer(K2)).json()
    assert own["usage"]["input_tokens_details"]["cached_tokens"] > 0
    assert foreign["usage"]["input_tokens_details"]["cached_tokens"] == 0


def test_a_salt_keeps_cached_prefixes_apart_and_conversations_together(keyed: Server) -> None:
    def ask(salt: str | None, **more: str) -> tuple[str, int]:
        body = {"model": "default", "input": "a long and shared beginning " * 20, **more}
        answer = keyed.post("/v1/responses", body | ({"cache_salt": salt} if salt else {}), headers=bearer(K1)).json()
        return answer["id"], answer["usage"]["input_tokens_details"]["cached_tokens"]

    first, cached = ask("one")
    assert cached == 0
    assert ask("one")[1] > 0
    assert ask("two")[1] == ask(None)[1] == 0
    assert ask("one", previous_response_id=first)[1] > 100, "the chain and its KV"
    assert ask("three", previous_response_id=first)[1] == 0, "the chain, and none of its KV"
    assert keyed.http.get(f"/v1/responses/{first}", headers=bearer(K1)).status_code == 200
    refused = keyed.post("/v1/responses", {"model": "default", "input": "x", "cache_salt": ""}, headers=bearer(K1))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")


def test_r28_both_key_headers_work_and_none_is_401(keyed: Server) -> None:
    """Field report R28."""
    body = {"model": "default", "input": "x"}
    assert keyed.post("/v1/responses", body, headers=bearer(K1)).status_code == 200
    assert keyed.post("/v1/responses", body, headers={"x-api-key": K1}).status_code == 200
    for headers in ({}, bearer("wrong-key-0123456789"), {"x-api-key": "wrong-key-0123456789"}):
        refused = keyed.post("/v1/responses", body, headers=headers)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
    for path in ("/livez", "/readyz", "/health"):
        assert keyed.http.get(path).status_code == 200


def test_no_key_is_ever_written(keyed: Server) -> None:
    keyed.post("/v1/responses", {"model": "default", "input": "x"}, headers=bearer(K1))
    keyed.post("/v1/responses", {"model": "default", "input": "x"}, headers={"x-api-key": "wrong-" + K2})
    keyed.kill()
    for path in [*keyed.data_dir.rglob("*"), keyed.log]:
        if path.is_file():
            data = path.read_bytes()
            assert K1.encode() not in data and K2.encode() not in data, path


def test_o26_a_web_page_cannot_drive_the_server(tmp_path: Path) -> None:
    """Field report O26: a foreign Host or Origin is refused before any work."""
    with Server(tmp_path / "data", model=scripted(tmp_path, {"text": "Ok."})) as server:
        body = {"model": "default", "input": "x"}
        good = [
            {},
            {"origin": f"http://localhost:{server.port}"},
            {"origin": f"http://127.0.0.1:{server.port}"},
            {"host": f"localhost:{server.port}"},
            {"host": f"[::1]:{server.port}"},
        ]
        bad = [{"host": "evil.example"}, {"origin": "https://evil.example"}, {"origin": "null"}]
        for headers in good:
            assert server.post("/v1/responses", body, headers=headers).status_code == 200, headers
        for headers in bad:
            for answer in (
                server.post("/v1/responses", body, headers=headers),
                server.http.get("/metrics", headers=headers),
                server.http.options("/v1/responses", headers=headers | {"access-control-request-method": "POST"}),
            ):
                assert answer.status_code == 403, headers
                assert "access-control-allow-origin" not in answer.headers


def test_unstored_turns_lose_their_content_after_the_retention(tmp_path: Path) -> None:
    """Promise 14: with a retention of 0 only digests and counts stay, and the chain still verifies."""
    secret = "a sentence that nobody else would write"
    model = scripted(tmp_path, {"text": "an answer of its own kind"})
    with Server(tmp_path / "data", "--unstored-retention", "0", model=model) as server:
        server.respond(input=secret, store=False)
        kept = server.respond(input="to be kept")
        until(lambda: _payloads_of_unstored(server.data_dir) == 0)
        assert server.http.get(f"/v1/responses/{kept['id']}").json() == kept
        server.terminate()
    verify(tmp_path / "data")


def _payloads_of_unstored(data_dir: Path) -> int:
    with sqlite3.connect(f"file:{data_dir / 'journal.db'}?mode=ro", uri=True) as db:
        return db.execute("select count(*) from turn where stored = 0 and not erased").fetchone()[0]


def test_an_open_address_needs_keys(tmp_path: Path) -> None:
    from tests.serving import zj

    done = zj("serve", "--host", "0.0.0.0", "--port", "0", "--data-dir", str(tmp_path / "data"))
    assert done.returncode == 78
    assert "api-key-file" in done.stderr


def test_bad_bodies_name_the_field(tmp_path: Path) -> None:
    with Server(tmp_path / "data", model=scripted(tmp_path, {"text": "Ok."})) as server:
        part = b'{"model":"default","messages":[{"role":"user","content":[{"type":"text","text":3}]}]}'
        few = b'{"model":"default","messages":[{"role":"user","content":"x"}],"max_tokens":-1}'
        bad: list[tuple[str, bytes, str | None]] = [
            ("/v1/responses", b"{", None),
            ("/v1/responses", b"", None),
            ("/v1/responses", b"[]", None),
            ("/v1/responses", b'{"input":"x"}', "model"),
            ("/v1/responses", b'{"model":"default","input":7}', "input"),
            ("/v1/responses", b'{"model":"nobody","input":"x"}', "model"),
            ("/v1/chat/completions", b'{"model":"default"}', "messages"),
            ("/v1/chat/completions", part, "messages[0].content[0].text"),
            ("/v1/chat/completions", few, "max_tokens"),
        ]
        for path, raw, param in bad:
            answer = server.http.post(path, content=raw, headers={"content-type": "application/json"})
            assert answer.status_code == (404 if b"nobody" in raw else 400), (raw, answer.text)
            assert answer.json()["error"]["param"] == param, (raw, answer.text)
        before = server.http.get("/metrics").text
        assert 'zj_requests_total{api="responses",status="400"}' in before
    with sqlite3.connect(f"file:{tmp_path / 'data' / 'journal.db'}?mode=ro", uri=True) as db:
        assert db.execute("select count(*) from turn").fetchone()[0] == 0  # counted, not journaled
