"""The official OpenAI client against the app: streams, accumulators, error classes."""

import asyncio

import openai
import pytest

from tests.api.desk import FakeDesk, answer
from tests.api.serving import serving
from zjournal import errors
from zjournal.ask import Broke, TextDelta, Usage, Waiting

MESSAGES = [{"role": "user", "content": "hi"}]
FAILING = [TextDelta("a"), Broke("engine_error", "It died.", Usage(1, 0, 1))]


def run(desk: FakeDesk, script):
    async def main():
        async with (
            serving(desk) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-a", max_retries=0) as client,
        ):
            return await asyncio.wait_for(script(client), 60)

    return asyncio.run(main())


def test_chat_whole_and_streamed_agree():
    async def script(client):
        whole = await client.chat.completions.create(model="smol", messages=MESSAGES)
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="smol", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
            )
        ]
        return whole, chunks

    whole, chunks = run(FakeDesk(answer("Tide", " is", " low")), script)
    assert whole.choices[0].message.content == "Tide is low"
    assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == "Tide is low"
    assert chunks[-1].usage == whole.usage
    assert whole.usage.prompt_tokens_details.cached_tokens == 4


def test_the_chat_accumulator():
    async def script(client):
        async with client.chat.completions.stream(model="smol", messages=MESSAGES) as stream:
            async for _ in stream:
                pass
            return await stream.get_final_completion()

    final = run(FakeDesk(answer("Tide", " is low")), script)
    assert final.choices[0].message.content == "Tide is low"
    assert final.choices[0].finish_reason == "stop"
    with pytest.raises(openai.LengthFinishReasonError):
        run(FakeDesk(answer("Tide", " is low", reason="length")), script)


def test_several_choices_whole_streamed_and_accumulated():
    async def script(client):
        asked = {"model": "smol", "messages": MESSAGES, "n": 3}
        whole = await client.chat.completions.create(**asked)
        async with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
            async for _ in stream:
                pass
            return whole, await stream.get_final_completion()

    desk = FakeDesk(answer("Tide", " is low"))
    for final in run(desk, script):
        assert [(choice.index, choice.message.content) for choice in final.choices] == [
            (index, "Tide is low") for index in range(3)
        ]
        assert (final.usage.prompt_tokens, final.usage.completion_tokens, final.usage.total_tokens) == (12, 9, 21)
    assert {ask.choices for ask in desk.asks} == {3}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "steps", [FAILING, [TextDelta("a"), errors.Unavailable("It died.")]], ids=["a fact", "a fault"]
)
def test_a_choice_that_fails_fails_them_all(stream, steps):
    async def script(client):
        with pytest.raises(openai.APIError, match="It died"):
            told = await client.chat.completions.create(model="smol", messages=MESSAGES, n=2, stream=stream)
            async for _ in told:
                pass

    desk = FakeDesk(steps)
    run(desk, script)
    (turn,) = desk.turns.values()
    assert sorted(desk.cancelled) == sorted(one.response for one in turn.choices)


def test_the_responses_accumulator_agrees_with_create_and_retrieve():
    async def script(client):
        async with client.responses.stream(model="smol", input="hi") as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        stored = await client.responses.retrieve(final.id)
        whole = await client.responses.create(model="smol", input="hi")
        await client.responses.delete(final.id)
        return kinds, final, stored, whole

    kinds, final, stored, whole = run(FakeDesk(answer("Tide", " is", " low")), script)
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert final.output_text == stored.output_text == whole.output_text == "Tide is low"
    assert stored.model_dump(warnings=False).keys() >= {"id", "usage", "output"}
    assert final.id == stored.id != whole.id
    assert final.usage == stored.usage == whole.usage
    assert final.output[0].id == stored.output[0].id


def test_signs_of_life_change_nothing_of_what_is_accumulated():
    first, *rest = answer("Tide", " is", " low")
    steps = [Waiting(0, 0, 12, queued=True), first, Waiting(0, 8, 12), *rest[:2], Waiting(2, 12, 12), *rest[2:]]

    async def script(client):
        async with client.responses.stream(model="smol", input="hi") as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        async with client.chat.completions.stream(model="smol", messages=MESSAGES) as stream:
            async for _ in stream:
                pass
            return kinds, final, await stream.get_final_completion()

    kinds, responses, chat = run(FakeDesk(steps), script)
    assert kinds.count("response.in_progress") == 4
    assert responses.output_text == chat.choices[0].message.content == "Tide is low"


@pytest.mark.parametrize("texts", [[], [""], ["\u2028", "\r\n\n", "\x85", "data: [DONE]\n\n"]])
def test_odd_texts_pass_the_accumulator(texts):
    async def script(client):
        async with client.responses.stream(model="smol", input="hi") as stream:
            return await stream.get_final_response()

    assert run(FakeDesk(answer(*texts)), script).output_text == "".join(texts)


def test_a_cut_answer_is_incomplete():
    async def script(client):
        stream = await client.responses.create(model="smol", input="hi", stream=True)
        return [event async for event in stream]

    last = run(FakeDesk(answer("Tide", reason="length")), script)[-1]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert last.response.output[0].status == "incomplete"


def test_a_failing_responses_stream_says_so_in_an_event():
    async def script(client):
        return [event async for event in await client.responses.create(model="smol", input="hi", stream=True)]

    last = run(FakeDesk(FAILING), script)[-1]
    assert last.type == "response.failed"
    assert (last.response.error.code, last.response.error.message) == ("server_error", "It died.")


def test_a_failing_chat_stream_raises():
    async def script(client):
        async for _ in await client.chat.completions.create(model="smol", messages=MESSAGES, stream=True):
            pass

    with pytest.raises(openai.APIError, match="It died"):
        run(FakeDesk(FAILING), script)


@pytest.mark.parametrize(
    ("fault", "raised"),
    [
        (errors.ContextTooLong("long", param="input"), openai.BadRequestError),
        (errors.PreviousResponseNotFound("no", param="previous_response_id"), openai.BadRequestError),
        (errors.Unauthorized("no"), openai.AuthenticationError),
        (errors.Forbidden("no"), openai.PermissionDeniedError),
        (errors.ModelNotFound("no", param="model"), openai.NotFoundError),
        (errors.Overloaded("full"), openai.RateLimitError),
        (errors.Unavailable("loading"), openai.InternalServerError),
    ],
)
def test_error_classes(fault, raised):
    async def script(client):
        with pytest.raises(raised) as chat:
            await client.chat.completions.create(model="smol", messages=MESSAGES, stream=True)
        with pytest.raises(raised) as responses:
            await client.responses.create(model="smol", input="hi")
        return chat.value, responses.value

    for error in run(FakeDesk([], fault=fault), script):
        assert (error.code, error.param, error.type) == (fault.code, fault.param, fault.kind)
        assert error.request_id.startswith("req_")


def test_models():
    async def script(client):
        return [model async for model in client.models.list()], await client.models.retrieve("gpt-4o")

    models, one = run(FakeDesk([]), script)
    assert [model.id for model in models] == [one.id] == ["smol"]
