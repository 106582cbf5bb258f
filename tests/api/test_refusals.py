"""Refused requests leave a line of the log each, whatever refused them, and a flood of them leaves a count."""

import asyncio
import json
import logging
import re
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect

from tests.api.desk import FakeDesk, answer
from tests.api.serving import serving
from zjournal import errors
from zjournal.api import refusals
from zjournal.api.intake import HEAD_BYTES_MAX, bounded
from zjournal.api.websocket_intake import watched

WAIT_S = 30.0
KEY = {"authorization": "Bearer sk-a"}
BODY = {"model": "smol", "input": "a secret of the client"}
CHAT = {"model": "smol", "messages": [{"role": "user", "content": "hi"}]}
LINE = re.compile(r"refused: (\S+) (\S+) (\d+) (\S+)(?: param=(\S+))? key=(\S+) request=(\S+)")

Told = list[tuple[str, ...]]


def run(desk: FakeDesk, script: Any, caplog: pytest.LogCaptureFixture, **options: Any) -> Told:
    """What the log has of refusals after `script(client, url)`, as groups of LINE."""
    caplog.set_level(logging.INFO, "zjournal.api")
    protocol, ws = bounded(60.0, desk.refused), watched(60.0, desk.refused)

    async def main() -> None:
        served = serving(desk, protocol=protocol, ws=ws, **options)
        async with served as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
            await asyncio.wait_for(script(client, url), WAIT_S)
        desk.refused.close()

    asyncio.run(main())
    lines = [message for record in caplog.records if (message := record.getMessage()).startswith("refused")]
    assert "secret" not in "".join(lines) and "sk-a" not in "".join(lines)
    return [LINE.fullmatch(line).groups("") for line in lines if line.split()[2] != "more"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("request_", "fault", "told"),
    [
        (("POST", "/v1/responses", {"headers": KEY, "json": {**BODY, "temperature": "hot"}}), None,
         ("POST", "/v1/responses", "400", "invalid_request", "temperature", "a")),
        (("POST", "/v1/chat/completions", {"headers": KEY, "content": b"{\"secret"}), None,
         ("POST", "/v1/chat/completions", "400", "invalid_request", "", "a")),
        (("POST", "/v1/responses?key=secret", {"json": BODY}), None,
         ("POST", "/v1/responses", "401", "invalid_api_key", "", "-")),
        (("POST", "/v1/messages", {"headers": {"x-api-key": "wrong-and-secret"}, "json": CHAT}), None,
         ("POST", "/v1/messages", "401", "invalid_api_key", "", "-")),
        (("GET", "/v1/models", {"headers": {"host": "secret.example"}}), None,
         ("GET", "/v1/models", "403", "forbidden", "", "-")),
        (("GET", "/v1/models/other", {"headers": KEY}), None,
         ("GET", "/v1/models/other", "404", "model_not_found", "model", "a")),
        (("POST", "/v1/chat/completions", {"headers": KEY, "json": CHAT}), errors.ModelNotFound("x", param="model"),
         ("POST", "/v1/chat/completions", "404", "model_not_found", "model", "a")),
        (("HEAD", "/nowhere", {}), None, ("HEAD", "/nowhere", "404", "not_found", "", "-")),
        (("PUT", "/v1/responses", {}), None, ("PUT", "/v1/responses", "405", "invalid_request", "", "-")),
        (("POST", "/v1/responses", {"headers": KEY, "json": {**BODY, "input": "x" * 5000}}), None,
         ("POST", "/v1/responses", "413", "request_too_large", "", "a")),
        (("POST", "/v1/responses", {"headers": {**KEY, "content-encoding": "gzip"}, "json": BODY}), None,
         ("POST", "/v1/responses", "415", "unsupported_encoding", "", "a")),
        (("POST", "/v1/responses", {"headers": KEY, "json": BODY}), errors.RateLimited("x", "streams", 1),
         ("POST", "/v1/responses", "429", "rate_limit_exceeded", "", "a")),
        (("POST", "/v1/responses", {"headers": KEY, "json": BODY}), errors.Unavailable("x"),
         ("POST", "/v1/responses", "503", "server_unavailable", "", "a")),
        (("GET", "/nowhere%0Aforged%20line%1b[2J", {}), None,
         ("GET", r"/nowhere\nforged\x20line\x1b[2J", "404", "not_found", "", "-")),
    ],
)  # fmt: skip
def test_a_refusal_leaves_a_line(
    request_: tuple, fault: Any, told: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    method, path, options = request_
    ids = []

    async def script(client: httpx.AsyncClient, url: str) -> None:
        reply = await client.request(method, path, **options)
        ids.append((str(reply.status_code), reply.headers["x-request-id"]))

    desk = FakeDesk(answer("a"), keys=True, fault=fault)
    assert run(desk, script, caplog, body_max=2000) == [(*told, ids[0][1])]
    assert ids[0][0] == told[2]


def test_what_is_answered_leaves_none(caplog: pytest.LogCaptureFixture) -> None:
    async def script(client: httpx.AsyncClient, url: str) -> None:
        for path in ("/", "/livez", "/readyz", "/v1/models"):
            assert (await client.get(path, headers=KEY)).is_success
        assert (await client.post("/v1/responses", json=BODY, headers=KEY)).is_success

    assert run(FakeDesk(answer("a"), keys=True), script, caplog) == []


def test_a_probe_of_a_server_that_loads_is_no_refusal(caplog: pytest.LogCaptureFixture) -> None:
    desk = FakeDesk([], keys=True)
    desk.state = ("loading", 0.1)

    async def script(client: httpx.AsyncClient, url: str) -> None:
        assert (await client.get("/readyz")).status_code == 503

    assert run(desk, script, caplog) == []


def test_a_flood_leaves_a_line_and_a_count(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 with a wrong key, and one with a right key among them. Of time nothing is awaited: it stands still."""
    desk = FakeDesk([], keys=True)
    desk.refused = refusals.Refusals(clock=lambda: 5.0)

    async def script(client: httpx.AsyncClient, url: str) -> None:
        for index in range(200):
            assert (await client.post(f"/v1/responses?{index}", json=BODY)).status_code == 401
        assert (await client.post("/v1/responses", json={}, headers=KEY)).status_code == 400

    told = run(desk, script, caplog)
    assert [line[2:6] for line in told] == [
        ("401", "invalid_api_key", "", "-"),
        ("400", "invalid_request", "model", "a"),
    ]
    counts = [record.getMessage() for record in caplog.records if " more within " in record.getMessage()]
    assert counts == ["refused: 199 more within 1 s: invalid_api_key key=-"]


def test_the_count_comes_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody has to be refused again for what was counted to be told."""
    caplog.set_level(logging.INFO, "zjournal.api")
    counted = asyncio.Event()

    class Hears(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if " more within " in record.getMessage():
                counted.set()

    handler = Hears()
    logging.getLogger("zjournal.api").addHandler(handler)

    async def main() -> None:
        told = refusals.Refusals()
        for _ in range(3):
            told.tell(refusals.unread(400, "invalid_request"))
        await asyncio.wait_for(counted.wait(), WAIT_S)

    try:
        asyncio.run(main())
    finally:
        logging.getLogger("zjournal.api").removeHandler(handler)
    assert [record.getMessage() for record in caplog.records] == [
        "refused: - - 400 invalid_request key=- request=-",
        "refused: 2 more within 1 s: invalid_request key=-",
    ]


@pytest.mark.parametrize(
    "sent",
    [b"secret nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nsecret: " + b"x" * HEAD_BYTES_MAX],
)
def test_what_is_no_request_is_told_too(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def script(client: httpx.AsyncClient, url: str) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(sent)
        assert b" 400 " in await reader.readline()
        writer.close()

    assert run(FakeDesk([]), script, caplog) == [("-", "-", "400", "invalid_request", "", "-", "-")]


def test_sockets_are_told_before_and_after_their_upgrade(caplog: pytest.LogCaptureFixture) -> None:
    async def script(client: httpx.AsyncClient, url: str) -> None:
        uri = url.replace("http", "ws", 1) + "/v1/responses"
        with pytest.raises(Exception, match="401"):
            await connect(uri, proxy=None, open_timeout=WAIT_S)
        async with connect(uri, proxy=None, open_timeout=WAIT_S, additional_headers=KEY) as opened:
            for text in ('{"type": "response.create", "model": 5}', json.dumps({"type": "response.create", **BODY})):
                await opened.send(text)
                while json.loads(await opened.recv())["type"] not in ("error", "response.completed"):
                    pass

    before, after = run(FakeDesk(answer("a"), keys=True), script, caplog)
    assert before[:6] == ("GET", "/v1/responses", "401", "invalid_api_key", "", "-")
    assert after[:6] == ("WEBSOCKET", "/v1/responses", "400", "invalid_request", "model", "a")
    assert before[6].startswith("req_") and after[6].startswith("req_") and before[6] != after[6]
