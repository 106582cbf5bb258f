"""Facts to deltas: nothing told before it may be, nothing lost, and the same deltas however tokens were batched."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zjournal import ask
from zjournal.checkpoint import gguf, locate
from zjournal.checkpoint.tokenizer import Tokenizer
from zjournal.dialects.chatml import ChatML
from zjournal.journal import events
from zjournal.link import wire
from zjournal.sessions import follow

USAGE = ask.Usage(3, 0, 0)
END = ask.Ended("stop", USAGE)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = locate.locate(None, tmp_path_factory.mktemp("cache")).path
    return Tokenizer.from_header(gguf.read_header(path))


def reader(tokenizer: Tokenizer, *stop: str) -> follow.Reader:
    return follow.reader(tokenizer, ChatML(), frozenset(tokenizer.eos_ids), stop)


async def collect(tail: follow.Tail, with_reader: follow.Reader) -> list[ask.Step]:
    return [step async for step in follow.follow(tail, with_reader)]


def text_of(steps: list[ask.Step]) -> str:
    return "".join(step.text for step in steps if isinstance(step, ask.TextDelta))


def test_tokens_run_at_most_64_ahead_of_what_is_durable(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        tail = follow.Tail()
        ids = tokenizer.encode(" a" * 200)
        told: list[ask.Step] = []

        async def listen() -> None:
            async for step in follow.follow(tail, reader(tokenizer)):
                told.append(step)

        listening = asyncio.create_task(listen())
        tail.ids.extend(ids)
        tail.wake()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(text_of(told)) == len(" a") * follow.AHEAD_TOKENS
        tail.durable = 100
        tail.wake()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(text_of(told)) == len(" a") * (100 + follow.AHEAD_TOKENS)
        tail.durable, tail.end = len(ids), END
        tail.wake()
        await listening
        assert text_of(told) == " a" * 200
        assert told[-1] == END

    asyncio.run(run())


@settings(max_examples=60, deadline=None)
@given(
    text=st.text("ab é☃𝄞\n1", max_size=60),
    cuts=st.lists(st.integers(1, 9), min_size=1),
    stop=st.sampled_from(["", "ab", "é"]),
)
def test_the_steps_do_not_depend_on_the_batches(tokenizer: Tokenizer, text: str, cuts: list[int], stop: str) -> None:
    ids = tokenizer.encode(text)
    stops = (stop,) if stop else ()

    async def batched() -> list[ask.Step]:
        tail = follow.Tail()
        task = asyncio.create_task(collect(tail, reader(tokenizer, *stops)))
        at = step = 0
        while at < len(ids):
            size = cuts[step % len(cuts)]
            tail.ids.extend(ids[at : at + size])
            tail.durable = at
            tail.wake()
            await asyncio.sleep(0)
            at, step = at + size, step + 1
        tail.durable, tail.end = len(ids), END
        tail.wake()
        return await task

    whole = follow.Tail()
    whole.ids, whole.durable, whole.end = ids, len(ids), END
    expected = asyncio.run(collect(whole, reader(tokenizer, *stops)))
    assert asyncio.run(batched()) == expected
    assert text_of(expected) == (text.partition(stop)[0] if stop else text)


def test_a_recorded_tail_is_the_fold_of_the_facts() -> None:
    def at(seq: int, event: events.AnyEvent, payload: bytes = b"") -> events.Recorded:
        return events.Recorded(seq, seq, event, payload)

    tail = follow.recorded_tail(
        [
            at(1, events.PromptRendered(response="r", count=7)),
            at(2, events.CacheMatched(response="r", tier="device", cached=4, prompt=7)),
            at(3, events.TokensSampled(response="r", position=0, count=2), wire.pack_ids([5, 6])),
            at(4, events.TokensSampled(response="r", position=2, count=1), wire.pack_ids([2])),
            at(
                5,
                events.ResponseFinished(response="r", reason="stop", output=3, queue_us=0, prefill_us=0, decode_us=0),
            ),
        ]
    )
    assert tail.ids == [5, 6, 2]
    assert tail.progress == ask.Progress(4, 7)
    assert tail.end == ask.Ended("stop", ask.Usage(7, 4, 3))


def test_end_tokens_are_not_text(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("bye"), tokenizer.control["<|im_end|>"]]
    assert follow.read_text(ids, reader(tokenizer)) == "bye"


def test_a_character_that_never_came_whole_is_shown_as_such(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é☃")[:-1]
    assert follow.read_text(ids, reader(tokenizer)).endswith("�")
