"""The app over a socket: status codes, error bodies, guards, probes, deletion, and clients that leave."""

import asyncio
import json

import httpx
import pytest

from tests.api.desk import CREATED, FakeDesk, answer
from tests.api.serving import serving
from zjournal import errors
from zjournal.api import responses
from zjournal.ask import Broke, TextDelta, Usage

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
BODIES = {
    CHAT: {"model": "smol", "messages": [{"role": "user", "content": "hi"}]},
    RESPONSES: {"model": "smol", "input": "hi"},
}
BOTH = pytest.mark.parametrize("path", [CHAT, RESPONSES])
WAIT_S = 60


def client_of(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=WAIT_S)


def run(desk: FakeDesk, script, **options):
    """Runs `script(client)` against the served desk."""

    async def main():
        async with serving(desk, **options) as url, client_of(url) as client:
            return await asyncio.wait_for(script(client), WAIT_S)

    return asyncio.run(main())


def refused(desk: FakeDesk, path: str, **body) -> tuple[httpx.Response, dict]:
    reply = run(desk, lambda client: client.post(path, json={**BODIES[path], **body}))
    assert reply.headers["content-type"] == "application/json"
    assert set(reply.json()) == {"error"}
    return reply, reply.json()["error"]


# --- answers ------------------------------------------------------------------------------------------


@BOTH
def test_answers_carry_an_id_of_the_request(path):
    desk = FakeDesk(answer("a"))
    reply = run(desk, lambda client: client.post(path, json=BODIES[path]))
    assert reply.status_code == 200
    assert reply.headers["x-request-id"].startswith("req_")
    assert desk.cancelled == []


@BOTH
def test_stream_headers(path):
    desk = FakeDesk(answer("a", "b"))
    reply = run(desk, lambda client: client.post(path, json={**BODIES[path], "stream": True}))
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-request-id"].startswith("req_")
    assert reply.text.endswith("data: [DONE]\n\n")
    assert desk.cancelled == []


def test_a_stored_response_is_the_same_object_until_it_is_deleted():
    async def script(client):
        created = (await client.post(RESPONSES, json=BODIES[RESPONSES])).json()
        path = f"{RESPONSES}/{created['id']}"
        read = await client.get(path)
        assert read.json() == created
        assert (await client.get(path, params={"stream": "false", "include[]": "x"})).status_code == 200
        gone = await client.delete(path)
        assert gone.status_code == 200
        assert gone.json() == {"id": created["id"], "object": "response", "deleted": True}
        return [await client.get(path), await client.delete(path)]

    for reply in run(FakeDesk(answer("a")), script):
        assert reply.status_code == 404
        assert reply.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=maybe", "stream"),
        ("starting_after=3", "starting_after"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("include_obfuscation=2", "include_obfuscation"),
    ],
)
def test_what_is_wrong_with_how_a_response_is_asked_for_is_named(query, param):
    async def script(client):
        created = (await client.post(RESPONSES, json=BODIES[RESPONSES])).json()
        return await client.get(f"{RESPONSES}/{created['id']}?{query}")

    reply = run(FakeDesk(answer("a")), script)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_unstored_foreign_and_chat_ids_do_not_exist():
    async def script(client):
        a, b = {"authorization": "Bearer sk-a"}, {"x-api-key": "sk-b"}
        hidden = (await client.post(RESPONSES, json={**BODIES[RESPONSES], "store": False}, headers=a)).json()["id"]
        mine = (await client.post(RESPONSES, json=BODIES[RESPONSES], headers=a)).json()["id"]
        chat = (await client.post(CHAT, json=BODIES[CHAT], headers=a)).json()["id"]
        assert (await client.get(f"{RESPONSES}/{mine}", headers=a)).status_code == 200
        tries = [(hidden, a), (mine, b), (chat, a), ("resp_none", a)]
        return [await client.get(f"{RESPONSES}/{name}", headers=key) for name, key in tries]

    replies = run(FakeDesk(answer("a"), keys=True), script)
    assert [reply.status_code for reply in replies] == [404] * 4
    assert len({json.dumps(reply.json()).replace(reply.url.path[14:], "") for reply in replies}) == 1


def test_models():
    async def script(client):
        names = ["smol", "org/smol", "gpt-4o", "none"]
        return [await client.get("/v1/models"), *[await client.get(f"/v1/models/{name}") for name in names]]

    listing, *single, none = run(FakeDesk([]), script)
    [card] = listing.json()["data"]
    assert (card["id"], card["created"], card["max_input_tokens"]) == ("smol", CREATED, 8192)
    assert card["aliases"] == ["org/smol", "gpt-4o"]
    assert [reply.json() for reply in single] == listing.json()["data"] * 3
    assert none.status_code == 404
    assert none.json()["error"]["code"] == "model_not_found"


# --- errors -------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fault",
    [
        errors.ContextTooLong("too long", param="input"),
        errors.PreviousResponseNotFound("no such response", param="previous_response_id"),
        errors.ModelNotFound("no such model", param="model"),
        errors.Overloaded("full"),
        errors.Unavailable("loading"),
        errors.JournalUnavailable("disk full"),
    ],
)
def test_faults_of_submitting_are_json_with_their_status(path, stream, fault):
    reply, error = refused(FakeDesk([], fault=fault), path, stream=stream)
    assert reply.status_code == fault.status
    assert error == {"message": fault.message, "type": fault.kind, "param": fault.param, "code": fault.code}
    retry = None if fault.retry_after_s is None else str(fault.retry_after_s)
    assert reply.headers.get("retry-after") == retry


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_field_is_named(path, stream):
    reply, error = refused(FakeDesk([]), path, stream=stream, temperature="hot")
    assert (reply.status_code, error["param"], error["code"]) == (400, "temperature", "invalid_request")


@BOTH
def test_a_failure_before_the_first_byte_has_its_status(path):
    reply, error = refused(FakeDesk([Broke("engine_error", "It died.", Usage(1, 0, 0))]), path)
    assert (reply.status_code, error["code"], error["message"]) == (500, "engine_error", "It died.")


@BOTH
@pytest.mark.parametrize("cause", [Broke("engine_error", "x", Usage(1, 0, 1)), errors.JournalUnavailable("x")])
def test_a_failure_inside_a_stream_ends_it_in_its_protocol(path, cause):
    desk = FakeDesk([TextDelta("a"), cause])
    reply = run(desk, lambda client: client.post(path, json={**BODIES[path], "stream": True}))
    assert reply.status_code == 200
    *_, last, done, rest = reply.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert ("event: response.failed" in last) if path == RESPONSES else ('{"error":' in last)


@BOTH
def test_our_own_bug_is_a_500_with_the_id_and_without_its_text(path, caplog):
    reply, error = refused(FakeDesk([], fault=ZeroDivisionError("secret")), path)
    assert reply.status_code == 500
    assert reply.headers["x-request-id"] in error["message"]
    assert "secret" not in reply.text
    assert "ZeroDivisionError" in caplog.text


def test_paths_and_methods_that_do_not_exist():
    async def script(client):
        return [
            await client.get("/v1/nothing"),
            await client.post("/api/event_logging/batch", content=b"x"),
            await client.get(CHAT),
            await client.put("/v1/models"),
        ]

    replies = run(FakeDesk([]), script)
    assert [reply.status_code for reply in replies] == [404, 404, 405, 405]
    assert replies[2].headers["allow"]
    assert all(reply.json()["error"]["message"] for reply in replies)


@BOTH
def test_a_body_over_the_limit(path):
    async def script(client):
        async def pieces():
            for _ in range(3):
                yield b" " * 600

        return [await client.post(path, content=b" " * 1025), await client.post(path, content=pieces())]

    for reply in run(FakeDesk([]), script, body_max=1024):
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "request_too_large"


def test_keys():
    async def script(client):
        tries = [{}, {"authorization": "Bearer no"}, {"x-api-key": "no"}, {"authorization": "Basic sk-a"}]
        good = [{"authorization": "Bearer sk-a"}, {"authorization": "bearer sk-a"}, {"x-api-key": "sk-b"}]
        paths = ["/v1/models", "/metrics", f"{RESPONSES}/resp_1"]
        bad = [await client.get(path, headers=headers) for path in paths for headers in tries]
        bad += [await client.post(path, json=BODIES[path]) for path in BODIES]
        probes = [await client.get(path) for path in ("/", "/livez", "/readyz", "/health")]
        return bad, [await client.get("/v1/models", headers=headers) for headers in good] + probes

    bad, good = run(FakeDesk([], keys=True), script)
    assert {reply.status_code for reply in bad} == {401}
    assert bad[0].json()["error"]["code"] == "invalid_api_key"
    assert {reply.status_code for reply in good} == {200}


# --- guards and probes --------------------------------------------------------------------------------


def test_foreign_hosts_and_origins_are_refused_before_any_work():
    desk = FakeDesk(answer("a"))

    async def script(client):
        foreign = [{"host": "evil.example"}, {"origin": "https://evil.example"}, {"origin": "null"}]
        paths = [CHAT, "/metrics", "/livez", "/v1/models", "/nothing"]
        bad = [await client.post(path, json=BODIES[CHAT], headers=headers) for path in paths for headers in foreign]
        bad.append(await client.options(CHAT, headers={"origin": "https://evil.example"}))
        good = await client.post(CHAT, json=BODIES[CHAT], headers={"origin": "http://localhost:3000"})
        return bad, good

    bad, good = run(desk, script)
    assert {reply.status_code for reply in bad} == {403}
    assert good.status_code == 200
    assert len(desk.asks) == 1
    for reply in [*bad, good]:
        assert not [name for name in reply.headers if name.startswith("access-control")]
        assert reply.headers["x-request-id"]


@pytest.mark.parametrize(("state", "status"), [("loading", 503), ("ready", 200), ("draining", 503), ("failed", 503)])
def test_ready_is_not_the_same_as_up(state, status):
    desk = FakeDesk([])
    desk.state = (state, 0.4)

    async def script(client):
        return [await client.request(how, path) for how in ("GET", "HEAD") for path in ("/readyz", "/health", "/livez")]

    replies = run(desk, script)
    assert [reply.status_code for reply in replies] == [status, status, 200] * 2
    assert replies[0].json() == {"status": state, "progress": 0.4}
    assert [reply.content for reply in replies[3:]] == [b""] * 3


def test_head_of_the_root():
    reply = run(FakeDesk([]), lambda client: client.head("/"))
    assert (reply.status_code, reply.content) == (200, b"")


def test_metrics_count_answers_and_refusals_but_no_probes():
    async def script(client):
        await client.post(CHAT, json=BODIES[CHAT])
        await client.post(CHAT, json={})
        await client.post(RESPONSES, json=BODIES[RESPONSES], headers={"host": "evil.example"})
        await client.get("/v1/nothing")
        await client.get("/livez")
        return await client.get("/metrics")

    reply = run(FakeDesk(answer("a")), script)
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    counted = {line for line in reply.text.splitlines() if line.startswith("zj_requests_total{")}
    assert counted == {
        'zj_requests_total{api="chat",status="200"} 1.0',
        'zj_requests_total{api="chat",status="400"} 1.0',
        'zj_requests_total{api="responses",status="403"} 1.0',
        'zj_requests_total{api="other",status="404"} 1.0',
    }


# --- clients that leave -------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_turn(path, stream):
    desk = FakeDesk([TextDelta("a"), asyncio.Event()])

    async def script(client):
        call = asyncio.create_task(client.post(path, json={**BODIES[path], "stream": stream}))
        await desk.told.wait()
        assert desk.cancelled == []
        call.cancel()
        await desk.cancel_seen.wait()

    run(desk, script)
    assert desk.cancelled == list(desk.turns)


def test_reading_a_running_response_answers_at_once():
    desk = FakeDesk([TextDelta("a"), asyncio.Event()])

    async def script(client):
        turn = await desk.submit(_ask(), json.dumps(BODIES[RESPONSES]).encode(), "local", 1)
        return await client.get(f"{RESPONSES}/{turn.response}")

    got = run(desk, script)
    assert got.status_code == 200
    assert (got.json()["status"], got.json()["output"], got.json()["usage"]) == ("in_progress", [], None)
    assert desk.cancelled == []


def test_each_event_is_its_own_chunk():
    gates = [asyncio.Event() for _ in range(3)]
    steps = [step for gate, text in zip(gates, "abc", strict=True) for step in (gate, TextDelta(text))]
    desk = FakeDesk([*steps, *answer()[1:]])

    async def script(client):
        seen = []
        async with client.stream("POST", CHAT, json={**BODIES[CHAT], "stream": True}) as reply:
            async for chunk in reply.aiter_raw():
                seen.append(chunk)
                if gates:
                    gates.pop(0).set()
        return seen

    chunks = run(desk, script)
    assert all(chunk.endswith(b"\n\n") for chunk in chunks)
    assert [chunk.count(b"data: ") for chunk in chunks[:3]] == [1, 1, 1]  # each went out before the next was made


def _ask():
    return responses.decode(json.dumps(BODIES[RESPONSES]).encode(), {})


def test_a_client_that_has_the_list_of_models_need_not_have_it_again():
    async def script(client):
        first = await client.get("/v1/models")
        known = {"if-none-match": f'W/"x", {first.headers["etag"]}'}
        return first, await client.get("/v1/models", headers=known), await client.get("/v1/models/smol", headers=known)

    first, same, other = run(FakeDesk([]), script)
    assert (first.status_code, same.status_code, other.status_code) == (200, 304, 200)
    assert same.content == b"" and same.headers["etag"] == first.headers["etag"] != other.headers["etag"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("HEAD", "/", 200),
        ("HEAD", "/api/hello", 200),
        ("GET", "/api/hello", 200),
        ("POST", "/api/event_logging/batch", 404),
        ("GET", "/favicon.ico", 404),
        ("GET", "/v1/unheard", 404),
        ("POST", "/v1/completions", 404),
        ("POST", "/v1/messages/batches", 404),
        ("DELETE", "/v1/models", 405),
    ],
)
def test_r07_what_clients_look_for_is_answered_shortly(method, path, status):
    """R07: there, or not there; never 200 for what is not, and never a page."""
    reply = run(FakeDesk([], keys=True), lambda client: client.request(method, path))
    assert reply.status_code == status
    assert reply.headers["x-request-id"] == reply.headers["request-id"]
    if status != 200:
        assert reply.json()["error"]["message"]


def test_an_upgrade_to_websocket_is_told_to_go_on_over_http():
    """426 is the one status at which Codex does so at once."""
    headers = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    reply = run(FakeDesk([]), lambda client: client.get("/v1/responses", headers=headers))
    assert reply.status_code == 426
    assert reply.json()["error"]["type"] == "invalid_request_error"
