"""Several choices, and calls of the older kind: from the steps of each choice to bytes, with a golden.

After a wanted change: `python -m tests.unit.api.test_chat_choices` writes the golden again; read the difference.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.api.desk import CREATED, Turn, item_id
from tests.unit.api.steps import GOLDEN, RUNS, pretty, steps_of
from zjournal.api import chat, chat_answer
from zjournal.ask import Broke, CallArguments, CallEnded, CallStarted, Ended, Step, TextDelta, Usage
from zjournal.sessions.reading import Terms

ASK = {"model": "smol", "messages": [{"role": "user", "content": "hi"}], "stream": True}
FUNCTIONS = {**ASK, "functions": [{"name": "ls", "parameters": {"type": "object"}}]}


class Course(msgspec.Struct):
    """The golden's case: a request, and steps with the choice that each belongs to."""

    request: msgspec.Raw
    steps: list[tuple[int, Step]]


def turn_of(raw: bytes) -> Turn:
    asked = chat.decode(raw, {})
    terms = Terms.of(asked, "")
    first, *others = (
        Turn(f"chatcmpl-012{index}", CREATED, "smol", raw, True, "local", terms=terms) for index in range(asked.choices)
    )
    return msgspec.structs.replace(first, others=tuple(others))


def streamed(raw: bytes, steps: Sequence[tuple[int, Step]]) -> bytes:
    encoder = chat_answer.Encoder(turn_of(raw), item_id)
    told = encoder.begin()
    for at, (index, step) in enumerate(steps):
        assert not encoder.over, at
        told += encoder.feed(step, index)
    assert encoder.over
    return b"".join(told)


def folded(raw: bytes, steps: Sequence[tuple[int, Step]]) -> bytes:
    answer = chat_answer.Answer(turn_of(raw), item_id)
    for index, step in steps:
        answer.take(step, index)
    assert answer.whole
    return answer.body()


def chunks_of(stream: bytes) -> list[dict]:
    frames = stream.decode().split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(text.removeprefix("data: ")) for text in frames[:-2]]


GOLD = msgspec.json.decode((GOLDEN / "choices.json").read_bytes(), type=Course)


def test_golden() -> None:
    raw = bytes(GOLD.request)
    assert streamed(raw, GOLD.steps) == (GOLDEN / "choices.sse").read_bytes()
    assert pretty(folded(raw, GOLD.steps)) == (GOLDEN / "choices.body.json").read_bytes()


def test_the_golden_fits_the_published_types() -> None:
    raw = bytes(GOLD.request)
    whole = ChatCompletion.model_validate_json(folded(raw, GOLD.steps))
    chunks = [ChatCompletionChunk.model_validate(chunk) for chunk in chunks_of(streamed(raw, GOLD.steps))]
    assert [choice.finish_reason for choice in whole.choices] == ["length", "tool_calls"]
    assert whole.usage is not None and chunks[-1].usage == whole.usage
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (12, 9, 21)
    assert whole.usage.prompt_tokens_details.cached_tokens == 4, "as choice 0 met the prompt"
    assert {chunk.id for chunk in chunks} == {whole.id}


@given(st.lists(RUNS, min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_stream_and_body_agree_for_any_choices_in_any_order(runs: list, random: object) -> None:
    raw = json.dumps({**ASK, "n": len(runs), "stream_options": {"include_usage": True}}).encode()
    queues = [[*steps_of(one)[0], Ended("stop", Usage(9, 3, 2))] for one in runs]
    order = [index for index, queue in enumerate(queues) for _ in queue]
    random.shuffle(order)  # type: ignore[attr-defined]
    steps = [(index, queues[index].pop(0)) for index in order]
    body = json.loads(folded(raw, steps))
    chunks = chunks_of(streamed(raw, steps))
    assert body["usage"] == chunks[-1]["usage"]
    for index, choice in enumerate(body["choices"]):
        own = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
        assert choice["index"] == index and own[0]["delta"] == {"role": "assistant", "content": ""}
        message, said = choice["message"], "".join(part["delta"].get("content") or "" for part in own)
        assert said == (message["content"] or "")
        thoughts = "".join(part["delta"].get("reasoning_content", "") for part in own)
        assert thoughts == message.get("reasoning_content", "")
        calls = [call for part in own for call in part["delta"].get("tool_calls", ())]
        told = [call["id"] for call in calls if "id" in call]
        assert told == [call["id"] for call in message.get("tool_calls", ())]
        assert [part["finish_reason"] for part in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]


@pytest.mark.parametrize("ended", [False, True])
def test_one_that_fails_ends_the_answer(ended: bool) -> None:
    raw = json.dumps({**ASK, "n": 2}).encode()
    steps: list[tuple[int, Step]] = [(1, TextDelta("a"))]
    if ended:
        steps.append((0, Ended("stop", Usage(9, 3, 2))))
    steps.append((1, Broke("engine_error", "It died.", Usage(9, 3, 1))))
    *_, last = chunks_of(streamed(raw, steps))
    assert last["error"]["message"] == "It died."
    answer = chat_answer.Answer(turn_of(raw), item_id)
    for index, step in steps:
        answer.take(step, index)
    assert answer.fault is not None and not answer.whole


def test_a_call_of_the_older_kind_has_no_id_and_no_index() -> None:
    raw = json.dumps(FUNCTIONS).encode()
    said: list[Step] = [CallStarted(0, "ls"), CallArguments(0, '{"a":'), CallArguments(0, ' "b"}'), CallEnded(0)]
    steps = [(0, step) for step in (*said, Ended("stop", Usage(9, 3, 2)))]
    (choice,) = json.loads(folded(raw, steps))["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["content"] is None and "tool_calls" not in choice["message"]
    assert choice["message"]["function_call"] == {"name": "ls", "arguments": '{"a": "b"}'}
    parts = [chunk["choices"][0] for chunk in chunks_of(streamed(raw, steps))]
    assert [part["delta"] for part in parts] == [
        {"role": "assistant", "content": ""},
        {"function_call": {"name": "ls", "arguments": ""}},
        {"function_call": {"arguments": '{"a":'}},
        {"function_call": {"arguments": ' "b"}'}},
        {},
    ]
    assert parts[-1]["finish_reason"] == "function_call"


def test_a_cut_call_of_the_older_kind_is_none_to_run() -> None:
    raw = json.dumps(FUNCTIONS).encode()
    said: list[Step] = [CallStarted(0, "ls"), CallArguments(0, '{"a'), CallEnded(0, truncated=True)]
    for reason, told in (("length", "length"), ("stop", "stop")):
        steps = [(0, step) for step in (*said, Ended(reason, Usage(9, 3, 2)))]  # type: ignore[arg-type]
        assert json.loads(folded(raw, steps))["choices"][0]["finish_reason"] == told


if __name__ == "__main__":
    (GOLDEN / "choices.sse").write_bytes(streamed(bytes(GOLD.request), GOLD.steps))
    (GOLDEN / "choices.body.json").write_bytes(pretty(folded(bytes(GOLD.request), GOLD.steps)))
