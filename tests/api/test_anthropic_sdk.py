"""The official Anthropic client against the app: streams, accumulators, error classes, retries, headers."""

import asyncio
import json

import anthropic
import httpx
import pytest

from tests.api.desk import FakeDesk, answer
from tests.api.serving import serving
from zjournal import errors
from zjournal.ask import (
    Broke,
    CallArguments,
    CallEnded,
    CallStarted,
    Ended,
    Progress,
    ReasoningDelta,
    TextDelta,
    Usage,
    Waiting,
)

MESSAGES = [{"role": "user", "content": "hi"}]
BODY = {"model": "smol", "max_tokens": 50, "messages": MESSAGES}
WAIT_S = 60.0
TOOL = {"name": "ls", "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}}}
CALLING = [
    Waiting(0, 0, 12, True),
    Progress(4, 12),
    Waiting(0, 8, 12),
    ReasoningDelta("Let me look."),
    TextDelta("I look."),
    CallStarted(0, "ls"),
    CallArguments(0, '{"path": '),
    CallArguments(0, '"a"}'),
    CallEnded(0),
    CallStarted(1, "ls"),
    CallArguments(1, "no JSON"),
    CallEnded(1, fault="no JSON"),
    Ended("stop", Usage(12, 4, 20, 7), at=1),
]


def run(desk: FakeDesk, script, **options):
    async def main():
        async with (
            serving(desk) as url,
            anthropic.AsyncAnthropic(base_url=url, api_key="sk-a", **{"max_retries": 0, **options}) as client,
        ):
            return await asyncio.wait_for(script(client), WAIT_S)

    return asyncio.run(main())


def plain(desk: FakeDesk, script, **options):
    async def main():
        async with (
            serving(desk, **options) as url,
            httpx.AsyncClient(base_url=url, trust_env=False, timeout=WAIT_S) as client,
        ):
            return await asyncio.wait_for(script(client), WAIT_S)

    return asyncio.run(main())


def test_whole_and_streamed_agree():
    async def script(client):
        whole = await client.messages.create(**BODY)
        async with client.messages.stream(**BODY) as stream:
            texts = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
        return whole, texts, final, stream.request_id

    whole, texts, final, request_id = run(FakeDesk(answer("Tide", " is", " low")), script)
    assert "".join(texts) == whole.content[0].text == final.content[0].text == "Tide is low"
    assert whole.usage == final.usage
    assert whole.usage.input_tokens + whole.usage.cache_read_input_tokens == 12
    assert whole.stop_reason == final.stop_reason == "end_turn"
    assert whole._request_id.startswith("req_")
    assert request_id.startswith("req_")
    assert whole.id.startswith("msg_")


@pytest.mark.parametrize("beta", [False, True])
def test_o06_the_accumulators_take_thoughts_text_and_calls(beta):
    async def script(client):
        messages = client.beta.messages if beta else client.messages
        whole = await messages.create(**BODY, tools=[TOOL])
        async with messages.stream(**BODY, tools=[TOOL]) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_message()
        return whole, kinds, final

    whole, kinds, final = run(FakeDesk(CALLING), script)
    for message in (whole, final):
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert message.content[0].signature
        assert message.content[2].input == {"path": "a"}
        assert message.content[3].input == {"unparsed_arguments": "no JSON"}
        assert message.stop_reason == "tool_use"
        assert message.usage.output_tokens_details.thinking_tokens == 7
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]


def test_counting():
    async def script(client):
        counted = await client.messages.count_tokens(model="smol", messages=MESSAGES, system="Be brief.")
        return counted, await client.beta.messages.count_tokens(model="smol", messages=MESSAGES)

    desk = FakeDesk(answer("a"))
    first, second = run(desk, script)
    assert (first.input_tokens, second.input_tokens) == (len("hiBe brief."), len("hi"))
    assert desk.turns == {}


FAULTS = [
    (errors.BadRequest("No.", param="messages[0].content"), anthropic.BadRequestError, "invalid_request_error"),
    (errors.Unauthorized("No."), anthropic.AuthenticationError, "authentication_error"),
    (errors.Forbidden("No."), anthropic.PermissionDeniedError, "permission_error"),
    (errors.ModelNotFound("No.", param="model"), anthropic.NotFoundError, "not_found_error"),
    (errors.BodyTooLarge("No."), anthropic.APIStatusError, "request_too_large"),
    (errors.Overloaded("No."), anthropic.RateLimitError, "rate_limit_error"),
    (errors.EngineFailed("No."), anthropic.InternalServerError, "api_error"),
    (errors.Unavailable("No."), anthropic.APIStatusError, "overloaded_error"),
]


@pytest.mark.parametrize(("fault", "kind", "type_"), FAULTS, ids=[type_ for _, _, type_ in FAULTS])
def test_each_fault_has_its_class_and_shape(fault, kind, type_):
    async def script(client):
        with pytest.raises(kind) as caught:
            await client.messages.create(**BODY)
        return caught.value

    told = run(FakeDesk([], fault=fault), script)
    assert told.status_code == fault.status
    assert told.body["type"] == "error"
    assert told.body["error"]["type"] == type_
    assert told.body["request_id"] == told.response.headers["request-id"] == told.response.headers["x-request-id"]
    if fault.retry_after_s is not None:
        assert told.response.headers["retry-after"] == str(fault.retry_after_s)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (errors.ContextTooLong("x", prompt=9000, limit=8192), "prompt is too long: 9000 tokens > 8192 maximum"),
        (errors.ContextTooLong("More than fit.", limit=8192), "prompt is too long: "),
        (
            errors.ContextTooLong("x", prompt=6000, asked=4000, limit=8192),
            "input length and `max_tokens` exceed context limit: 6000 + 4000 > 8192, ",
        ),
        (errors.ThreadNotFound("Gone."), "Gone."),
    ],
)
def test_what_is_too_long_is_told_in_the_words_that_agents_look_for(fault, words):
    reply = plain(FakeDesk([], fault=fault), lambda client: client.post("/v1/messages?beta=true", json=BODY))
    assert reply.json()["error"]["message"].startswith(words)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (errors.ThreadNotFound("x"), anthropic.NotFoundError),
        (errors.ThreadContinued("x"), anthropic.BadRequestError),
        (errors.ThreadInFlight("x"), anthropic.BadRequestError),
        (errors.ThreadMismatch("x"), anthropic.BadRequestError),
    ],
)
def test_thread_errors_have_their_code(fault, kind):
    async def script(client):
        with pytest.raises(kind) as caught:
            await client.messages.create(**BODY)
        return caught.value

    told = run(FakeDesk([], fault=fault), script)
    assert told.body["error"]["details"] == {"error_code": fault.code}
    assert told.error_code == fault.code


def test_r11_a_failure_in_the_stream_is_raised():
    async def script(client):
        with pytest.raises(anthropic.APIStatusError, match="It died") as caught:
            async with client.messages.stream(**BODY) as stream:
                async for _ in stream:
                    pass
        return caught.value

    steps = [Progress(0, 3), TextDelta("a"), Broke("engine_error", "It died.", Usage(1, 0, 1))]
    told = run(FakeDesk(steps), script)
    assert told.body["error"]["type"] == "api_error"
    assert told.body["request_id"].startswith("req_")


def test_the_client_retries_what_may_pass():
    class Busy(FakeDesk):
        refusals = 2

        async def submit(self, *arguments):
            if self.refusals:
                self.refusals -= 1
                raise errors.Overloaded("Full.")
            return await super().submit(*arguments)

    desk = Busy(answer("Tide"))
    told = run(desk, lambda client: client.messages.create(**BODY), max_retries=2)
    assert (told.content[0].text, len(desk.asks)) == ("Tide", 1)


@pytest.mark.parametrize("headers", [{"x-api-key": "sk-a"}, {"authorization": "Bearer sk-a"}])
def test_r28_either_header_carries_the_key(headers):
    desk = FakeDesk(answer("Tide"), keys=True)
    assert plain(desk, lambda client: client.post("/v1/messages", json=BODY, headers=headers)).status_code == 200
    reply = plain(desk, lambda client: client.post("/v1/messages", json=BODY))
    assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error")


def test_r07_what_agents_look_for_first_is_there():
    async def script(client):
        return [
            await client.head("/"),
            await client.get("/api/hello"),
            await client.head("/api/hello"),
            await client.post("/api/event_logging/batch", json={}),
            await client.post("/v1/messages/batches", json={}, headers={"anthropic-version": "2023-06-01"}),
            await client.get("/v1/messages"),
        ]

    replies = plain(FakeDesk([]), script)
    assert [reply.status_code for reply in replies] == [200, 200, 200, 404, 404, 405]
    assert [reply.json()["type"] for reply in replies[4:]] == ["error", "error"]
    assert replies[4].json()["error"]["type"] == "not_found_error"


def test_errors_have_the_shape_of_the_client_that_asks():
    async def script(client):
        mine = await client.get("/v1/nothing", headers={"anthropic-version": "2023-06-01"})
        return mine, await client.get("/v1/nothing")

    mine, other = plain(FakeDesk([]), script)
    assert (mine.json()["type"], set(other.json())) == ("error", {"error"})


def test_too_large_a_body_and_no_json_are_told_in_this_shape():
    async def script(client):
        return [
            await client.post("/v1/messages", json={**BODY, "system": "x" * 3000}),
            await client.post("/v1/messages", content=b"{no"),
            await client.post("/v1/messages", content=b""),
            await client.post("/v1/messages", content=json.dumps(BODY).encode().replace(b"hi", b"\xff")),
            await client.post("/v1/messages", headers={"host": "evil.example"}, json=BODY),
        ]

    replies = plain(FakeDesk(answer("a")), script, body_max=2000)
    assert [reply.status_code for reply in replies] == [413, 400, 400, 400, 403]
    kinds = [reply.json()["error"]["type"] for reply in replies]
    assert kinds == ["request_too_large", *["invalid_request_error"] * 3, "permission_error"]


def test_o19_a_client_that_leaves_cancels_its_answer():
    async def script(client):
        async with client.stream("POST", "/v1/messages", json={**BODY, "stream": True}) as reply:
            async for line in reply.aiter_lines():
                if "text_delta" in line:
                    break
        await desk.cancel_seen.wait()

    desk = FakeDesk([Progress(0, 3), TextDelta("a"), asyncio.Event(), TextDelta("b")])
    plain(desk, script)
    assert desk.cancelled == [next(iter(desk.turns))]
