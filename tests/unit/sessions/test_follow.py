"""Facts to deltas: nothing told before it may be, nothing lost, and the same deltas however tokens were batched."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zjournal import ask
from zjournal.checkpoint import gguf, locate
from zjournal.checkpoint.tokenizer import Tokenizer
from zjournal.dialects.chatml import ChatML
from zjournal.journal import events
from zjournal.link import wire
from zjournal.sessions import follow, vocabulary
from zjournal.sessions.reading import Model, Terms, recorded_model

USAGE = ask.Usage(3, 0, 0)
END = ask.Ended("stop", USAGE)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = locate.locate(None, tmp_path_factory.mktemp("cache")).path
    return Tokenizer.from_header(gguf.read_header(path))


def reader(tokenizer: Tokenizer, *stop: str, tools: tuple[ask.ToolSpec, ...] = (), begun: str = "") -> follow.Reader:
    """Of a model that writes thoughts, with tags that are ordinary text."""
    model = Model.today(tokenizer, ChatML(tokenizer, thinks=True), frozenset(tokenizer.eos_ids))
    return model.reader(Terms(tools, stop, begun))


def read_text(ids: list[int], with_reader: follow.Reader) -> str:
    return follow.text_of([delta for token in ids for delta in with_reader.feed(token)] + with_reader.end())


async def collect(tail: follow.Tail, with_reader: follow.Reader) -> list[ask.Step]:
    return [step async for step in follow.follow(tail, with_reader)]


def text_of(steps: list[ask.Step]) -> str:
    return follow.text_of([step for step in steps if isinstance(step, ask.Delta)])


def test_tokens_run_at_most_64_ahead_of_what_is_durable(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        tail = follow.Tail()
        ids = tokenizer.encode(" a" * 200)
        told: list[ask.Step] = []

        async def listen() -> None:
            async for step in follow.follow(tail, reader(tokenizer)):
                told.append(step)

        async def turns() -> None:
            for _ in range(2 + len(ids) // follow.PAUSE_TOKENS):  # as often as the follower lets others go first
                await asyncio.sleep(0)

        listening = asyncio.create_task(listen())
        tail.ids.extend(ids)
        tail.wake()
        await turns()
        assert len(text_of(told)) == len(" a") * follow.AHEAD_TOKENS
        tail.durable = 100
        tail.wake()
        await turns()
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
    assert read_text(ids, reader(tokenizer)) == "bye"


def test_a_character_that_never_came_whole_is_shown_as_such(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é☃")[:-1]
    assert read_text(ids, reader(tokenizer)).endswith("�")


# --- logprobs -----------------------------------------------------------------------------------------


def entry(token: int, *others: int) -> bytes:
    """Logprobs by which a token can be known again."""
    return wire.pack_logprobs(-float(token % 1000), [(other, -1.0 - at) for at, other in enumerate(others)])


def told_logprobs(steps: list[ask.Step]) -> list[ask.Logprob]:
    return [one for step in steps if isinstance(step, ask.TextDelta) for one in step.logprobs]


def feed_all(to: follow.Reader, ids: list[int]) -> list[ask.Step]:
    return [step for token in ids for step in to.feed(token, entry(token, 5, token))] + to.end()


@settings(max_examples=100, deadline=None)
@given(text=st.text("ab é☃𝄞\n1", max_size=40), stop=st.sampled_from(["", "ab", "é", "☃☃"]), ended=st.booleans())
def test_logprobs_are_told_for_the_tokens_that_the_text_begins_with(
    tokenizer: Tokenizer, text: str, stop: str, ended: bool
) -> None:
    ids = [*tokenizer.encode(text), *([tokenizer.eos_ids[0]] if ended else [])]
    steps = feed_all(reader(tokenizer, *([stop] if stop else [])), ids)
    visible = text.partition(stop)[0] if stop else text
    assert text_of(steps) == visible
    expected, before = [], 0
    for token in tokenizer.encode(text):
        if before < len(visible.encode()):
            expected.append(token)
        before += len(tokenizer.token_bytes(token))
    found = told_logprobs(steps)
    assert [one.token for one in found] == [tokenizer.token_bytes(token) for token in expected]
    assert [one.logprob for one in found] == [-float(token % 1000) for token in expected]
    for token, one in zip(expected, found, strict=True):
        assert one.top == ((tokenizer.token_bytes(5), -1.0), (tokenizer.token_bytes(token), -2.0))


@settings(max_examples=50, deadline=None)
@given(text=st.text("ab é☃𝄞\n1", max_size=40))
def test_a_delta_brings_the_logprobs_of_its_own_text(tokenizer: Tokenizer, text: str) -> None:
    """By each delta's end no byte was told without the logprobs of its token, and no token before its first byte."""
    said = known = 0
    for step in feed_all(reader(tokenizer), tokenizer.encode(text)):
        assert isinstance(step, ask.TextDelta)
        assert step.text
        said += len(step.text.encode())
        known += sum(len(one.token) for one in step.logprobs)
        assert known >= said


def test_without_logprobs_none_are_told(tokenizer: Tokenizer) -> None:
    to = reader(tokenizer)
    steps = [step for token in tokenizer.encode("a tide") for step in to.feed(token)] + to.end()
    assert steps
    assert told_logprobs(steps) == []


def test_a_recorded_tail_has_the_logprobs_of_its_facts() -> None:
    entries = [entry(token, 1, 2, 3) for token in (7, 8, 9)]
    facts = [
        events.TokensSampled(response="r", position=0, count=2),
        events.TokensSampled(response="r", position=2, count=1),
        events.ResponseFinished(response="r", reason="stop", output=3, queue_us=0, prefill_us=0, decode_us=0),
    ]
    payloads = [wire.pack_sampled([7, 8], entries[:2]), wire.pack_sampled([9], entries[2:]), b""]
    records = [
        events.Recorded(at, at, fact, payload) for at, (fact, payload) in enumerate(zip(facts, payloads, strict=True))
    ]
    tail = follow.recorded_tail(records)
    assert (tail.ids, tail.logprobs) == ([7, 8, 9], entries)
    without = follow.without_end(tail)
    assert (without.ids, without.logprobs) == ([7, 8], entries[:2])


# --- thoughts and calls -------------------------------------------------------------------------------

TOOLS = (ask.ToolSpec("ls"),)
SPOKEN = (
    '<think>\nFirst I look. </think>\n\nLet me <see>.\n<tool_call>\n{"name": "ls", "arguments": {"path": "a☃"}}\n'
    '</tool_call>\n<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
)


@pytest.mark.parametrize("stop", [(), ("never said",), ("☃☃", "</tool_call>>")])
def test_thoughts_text_and_calls_are_told_apart_also_behind_stop_strings(
    tokenizer: Tokenizer, stop: tuple[str, ...]
) -> None:
    to = reader(tokenizer, *stop, tools=TOOLS)
    steps = feed_all(to, tokenizer.encode(SPOKEN))
    assert "".join(step.text for step in steps if isinstance(step, ask.ReasoningDelta)) == "First I look. "
    assert text_of(steps) == "Let me <see>."
    assert [step for step in steps if isinstance(step, ask.CallStarted)] == [
        ask.CallStarted(0, "ls"),
        ask.CallStarted(1, "ls"),
    ]
    arguments = ["".join(s.text for s in steps if isinstance(s, ask.CallArguments) and s.index == i) for i in (0, 1)]
    assert arguments == ['{"path": "a☃"}', "{}"]
    assert [step for step in steps if isinstance(step, ask.CallEnded)] == [ask.CallEnded(0), ask.CallEnded(1)]
    assert to.reasoning == len(tokenizer.encode("<think>\nFirst I look. "))


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(1, 9), min_size=1), stop=st.sampled_from(["", "see", '"path', "</tool_call>\n<"]))
def test_the_steps_of_calls_do_not_depend_on_the_batches(tokenizer: Tokenizer, cuts: list[int], stop: str) -> None:
    ids = tokenizer.encode(SPOKEN)
    stops = (stop,) if stop else ()

    async def batched() -> list[ask.Step]:
        tail = follow.Tail()
        task = asyncio.create_task(collect(tail, reader(tokenizer, *stops, tools=TOOLS)))
        at = step = 0
        while at < len(ids):
            size = cuts[step % len(cuts)]
            tail.ids.extend(ids[at : at + size])
            tail.durable, tail.calls = at, step
            tail.wake()
            await asyncio.sleep(0)
            at, step = at + size, step + 1
        tail.durable, tail.calls, tail.end = len(ids), 2, END
        tail.wake()
        return await task

    whole = follow.Tail()
    whole.ids, whole.durable, whole.calls, whole.end = ids, len(ids), 2, END
    expected = asyncio.run(collect(whole, reader(tokenizer, *stops, tools=TOOLS)))
    assert asyncio.run(batched()) == expected
    said = SPOKEN.partition(stop)[0] if stop else SPOKEN
    whole_calls = said.count("}}\n")
    ends = [step.truncated for step in expected if isinstance(step, ask.CallEnded)]
    assert ends == [False] * whole_calls + [True] * (len(ends) - whole_calls)


def test_that_a_call_is_whole_waits_for_its_fact_and_what_follows_waits_behind_it(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        tail = follow.Tail()
        told: list[ask.Step] = []

        async def listen() -> None:
            async for step in follow.follow(tail, reader(tokenizer, tools=TOOLS)):
                told.append(step)

        listening = asyncio.create_task(listen())
        tail.ids.extend(tokenizer.encode(SPOKEN))
        tail.wake()
        for _ in range(5):
            await asyncio.sleep(0)
        assert isinstance(told[-1], ask.CallArguments)
        tail.durable, tail.calls = len(tail.ids), 1
        tail.wake()
        for _ in range(5):
            await asyncio.sleep(0)
        assert [step for step in told if isinstance(step, ask.CallEnded)] == [ask.CallEnded(0)]
        tail.end = ask.Broke("journal_unavailable", "x", USAGE)  # the fact of the second was lost
        tail.wake()
        await listening
        assert [step.truncated for step in told if isinstance(step, ask.CallEnded)] == [False, True]

    asyncio.run(run())


def test_the_end_tells_how_many_tokens_were_thoughts(tokenizer: Tokenizer) -> None:
    tail = follow.Tail()
    tail.ids = tokenizer.encode(SPOKEN)
    tail.durable, tail.calls, tail.end = len(tail.ids), 2, END
    to = reader(tokenizer, tools=TOOLS)
    *_, end = asyncio.run(collect(tail, to))
    assert isinstance(end, ask.Ended) and 0 < end.usage.reasoning == to.reasoning < len(tail.ids)


def test_what_the_prompt_has_begun_is_gone_on_with(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("First.\n</think>\n\nLow.")
    for begun, thoughts, text in (("<think>\n", "First.", "Low."), ("", "", "First.\n</think>\n\nLow.")):
        steps = feed_all(reader(tokenizer, begun=begun), ids)
        assert "".join(step.text for step in steps if isinstance(step, ask.ReasoningDelta)) == thoughts
        assert text_of(steps) == text
    closed = feed_all(reader(tokenizer, begun="<think>\n\n</think>\n\n"), tokenizer.encode("Low."))
    assert text_of(closed) == "Low."


def test_logprobs_are_those_of_the_text_and_of_nothing_beside_it(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(SPOKEN)
    steps = feed_all(reader(tokenizer, tools=TOOLS), ids)
    found = b"".join(one.token for one in told_logprobs(steps))
    assert found == b"Let me <see>."
    assert all(one.token for one in told_logprobs(steps))


class Spoken:
    """A vocabulary with tags that are tokens."""

    words = (b"<tool_call>", b"</tool_call>", b'{"name": "ls", ', b'"arguments": {}}', b"<tool", b"_call>", b"say ")

    def reader(self, *stop: str) -> follow.Reader:
        words = vocabulary.Vocabulary(vocabulary.pack(self.words, (0, 1)))
        return recorded_model(words, "chatml").reader(Terms(TOOLS, stop))


@pytest.mark.parametrize("stop", [(), ("unsaid",), ("tool_call>x",)])
def test_only_the_token_is_a_tag_also_behind_stop_strings(stop: tuple[str, ...]) -> None:
    """What spells the tag in other tokens is data, and stop strings that hold bytes back do not change it."""
    to = Spoken().reader(*stop)
    steps = [delta for token in (6, 4, 5, 0, 2, 3, 1) for delta in to.feed(token)] + to.end()
    assert text_of(steps) == "say <tool_call>"
    assert [step.name for step in steps if isinstance(step, ask.CallStarted)] == ["ls"]


def test_a_stop_string_inside_a_tag_ends_the_text_before_it() -> None:
    to = Spoken().reader("call>{")
    steps = [delta for token in (6, 0, 2) for delta in to.feed(token)] + to.end()
    assert text_of(steps) == "say <tool_"


def test_others_have_their_turn_while_a_long_answer_is_told_again(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        tail = follow.Tail()
        tail.ids.extend(tokenizer.encode(" a" * 10 * follow.PAUSE_TOKENS))
        tail.durable, tail.end = len(tail.ids), END
        told: list[ask.Step] = []
        seen: list[int] = []

        async def listen() -> None:
            async for step in follow.follow(tail, reader(tokenizer)):
                told.append(step)

        listening = asyncio.create_task(listen())
        while not listening.done():
            await asyncio.sleep(0)
            seen.append(len(told))
        assert len(seen) >= 10
        assert all(after - before <= follow.PAUSE_TOKENS + 1 for before, after in itertools.pairwise(seen))

    asyncio.run(run())


def test_all_who_wait_are_woken_and_who_leaves_leaves_nothing_behind() -> None:
    async def run() -> None:
        tail = follow.Tail()
        waiting = [asyncio.ensure_future(tail.wait()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        await asyncio.wait([waiting[1]])
        assert len(tail._waiters) == 2
        tail.wake()
        await asyncio.wait_for(asyncio.gather(waiting[0], waiting[2]), 30)
        assert waiting[1].cancelled()
        assert not tail._waiters

    asyncio.run(run())


def test_one_who_is_cancelled_as_it_is_woken_is_cancelled() -> None:
    async def run() -> None:
        tail = follow.Tail()
        waiting = asyncio.ensure_future(tail.wait())
        await asyncio.sleep(0)
        waiting.cancel()
        tail.wake()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        tail.wake()

    asyncio.run(run())
