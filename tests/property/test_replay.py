"""Exact replay: whatever a client makes of an answer, it is replayed as sampled if it is equal, and as sent if not."""

from __future__ import annotations

import copy
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.unit.sessions.loop import Asked, Loop, Said

Message = dict[str, Any]
EXAMPLES = 30

TEXTS = st.sampled_from(["", "Well.", " Let me\n\nsee: a < b ", "é漢😀", "</tool>", "{", "<|im_end|>"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 10**20) | st.sampled_from([0.5, 1e30, -2.25]) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=5,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["path", "text", "é"]), VALUES, max_size=3)


@st.composite
def said(draw: st.DrawFn) -> Said:
    calls = draw(st.lists(st.tuples(st.sampled_from("fg"), ARGUMENTS), max_size=3))
    gap = draw(st.sampled_from([(", ", ": "), (",", ":"), (" , ", " : ")]))
    spelled = tuple(
        (name, json.dumps(value, ensure_ascii=draw(st.booleans()), separators=gap)) for name, value in calls
    )
    found = Said(draw(TEXTS), spelled, draw(st.sampled_from(["", "Hm.", "I think\n\nso "])))
    assume(found.text or found.calls or found.thoughts)  # an answer without a token leaves no trace in a prompt
    return found


def _respelled(message: Message) -> Message:
    """The same values in another spelling."""
    for call in message.get("tool_calls", []):
        function = call["function"]
        pairs = list(json.loads(function["arguments"]).items())
        random.Random(1).shuffle(pairs)
        function["arguments"] = json.dumps(dict(pairs), indent=1)
    return message


def _without_thoughts(message: Message) -> Message:
    message.pop("reasoning_content", None)
    return message


def _in_parts(message: Message) -> Message:
    """The text in two parts."""
    text = message["content"]
    if text:
        parts = (text[: len(text) // 2], text[len(text) // 2 :])
        message["content"] = [{"type": "text", "text": part} for part in parts]
    return message


def _empty_text(message: Message) -> Message:
    message["content"] = message["content"] or ""
    return message


def _other_text(message: Message) -> Message:
    message["content"] = (message["content"] or "") + "!"
    return message


def _other_thoughts(message: Message) -> Message:
    message["reasoning_content"] = message.get("reasoning_content", "") + "?"
    return message


def _other_argument(message: Message) -> Message | None:
    calls = message.get("tool_calls")
    if not calls:
        return None
    value = json.loads(calls[-1]["function"]["arguments"])
    calls[-1]["function"]["arguments"] = json.dumps({**value, "path": "another"})
    return message


def _another_order(message: Message) -> Message | None:
    calls = message.get("tool_calls", [])
    calls.reverse()
    return message if len(calls) > 1 else None


def _fewer_calls(message: Message) -> Message | None:
    return message if len(message.get("tool_calls", [])) > 1 and message["tool_calls"].pop(0) else None


def _other_ids(message: Message) -> Message | None:
    for index, call in enumerate(message.get("tool_calls", [])):
        call["id"] = f"call_{index}"
    return message if message.get("tool_calls") else None


EQUAL = (copy.deepcopy, _respelled, _without_thoughts, _in_parts, _empty_text)
CHANGED = (_other_text, _other_thoughts, _other_argument, _another_order, _fewer_calls, _other_ids)
Step = tuple[Said, tuple[Callable[[Message], Message | None], ...], bool]
STEPS = st.lists(
    st.tuples(
        said(),
        st.lists(st.sampled_from(EQUAL), max_size=3, unique=True).map(tuple)
        | st.sampled_from(CHANGED).map(lambda one: (one,)),
        st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS)
def test_what_is_equal_is_replayed_and_what_is_changed_is_as_sent(steps: list[Step]) -> None:
    with tempfile.TemporaryDirectory() as folder, Loop(Path(folder) / "data", all_thoughts=True) as loop:
        messages: list[Message] = [{"role": "user", "content": "Begin."}]
        equal: set[str] = set()
        forks: list[str] = []
        for answer, changes, speaks in steps:
            asked = loop.ask(messages, answer)
            assert asked.replayed == equal
            assert [response for response, _ in asked.place.replayed.forks] == forks
            sent, same = _sent(asked.message, changes)
            messages += [sent, *_results(sent)] if not speaks else [sent, {"role": "user", "content": "And now?"}]
            equal |= {asked.response} if same else set()
            forks = [] if same else [asked.response]
            assert_goes_on(loop, asked, messages, same)
        everything = loop.ask(messages)
        assert everything.replayed == equal
        assert loop.ask(messages).prompt == everything.prompt, "sent again"


def _sent(message: Message, changes: tuple[Callable[[Message], Message | None], ...]) -> tuple[Message, bool]:
    """What the client sends back, and whether it is equal to what it got."""
    found = copy.deepcopy(message)
    for change in changes:
        changed = change(copy.deepcopy(found))
        if changed is None:
            return found, True  # there was nothing to change
        found = changed
    return found, all(change in EQUAL for change in changes)


def _results(message: Message) -> list[Message]:
    calls = message.get("tool_calls") or []
    found = [{"role": "tool", "tool_call_id": call["id"], "content": f"result {i}"} for i, call in enumerate(calls)]
    return found or [{"role": "user", "content": "Go on."}]


def assert_goes_on(loop: Loop, asked: Asked, messages: list[Message], same: bool) -> None:
    """The next prompt begins with the one before it, and with all that was sampled if nothing of it was changed."""
    after = loop.ask(messages)
    wanted = asked.whole if same else asked.prompt.ids
    assert after.prompt.ids[: len(wanted)] == wanted
    assert after.place.parent == asked.response
