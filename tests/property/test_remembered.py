"""A history that comes again, changed in the middle or not, becomes what it becomes without any memory.

An agent's conversation is kept on a real journal. Before each request the client may change what was said: an
argument, the order of its keys, a call, a result, the tools, the first message. Then it is placed, rendered and packed
twice: by what remembers all the requests before it, and by what remembers nothing.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import smollm2
from tests.unit.sessions.loop import DIALECT, TOKENIZER, TOOLS, WORDS, Loop, Said
from zjournal.api.recorded import DECODERS
from zjournal.checkpoint.template import Template
from zjournal.dialects.encoding import encodings
from zjournal.dialects.prompt import Prompt, assemble
from zjournal.errors import ContextTooLong
from zjournal.sessions.record import Record, pack, packings
from zjournal.sessions.vocabulary import Vocabulary

LONG = "a long text, of which more than a few words are in the prompt"
NATIVE = Template(
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}:{{ c.function.arguments | tojson }}]"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPELLED = Vocabulary(WORDS).decode

Messages = list[dict[str, Any]]


def _calls(messages: Messages) -> list[dict[str, Any]]:
    return [call["function"] for message in messages for call in message.get("tool_calls", ())]


def _edit_argument(messages: Messages, at: int, tools: Messages) -> None:
    if calls := _calls(messages):
        calls[at % len(calls)]["arguments"] = json.dumps({"path": f"other {at}", "<|im_end|>": [at]})


def _reverse_keys(messages: Messages, at: int, tools: Messages) -> None:
    if calls := _calls(messages):
        call = calls[at % len(calls)]
        call["arguments"] = json.dumps(dict(reversed(json.loads(call["arguments"]).items())), indent=at % 3)


def _drop_call(messages: Messages, at: int, tools: Messages) -> None:
    makers = [index for index, message in enumerate(messages) if message.get("tool_calls")]
    if makers:
        index = makers[at % len(makers)]
        made = {call["id"] for call in messages[index]["tool_calls"]}
        messages[:] = [m for k, m in enumerate(messages) if k != index and m.get("tool_call_id") not in made]


def _drop_message(messages: Messages, at: int, tools: Messages) -> None:
    del messages[at % len(messages)]


def _edit_text(messages: Messages, at: int, tools: Messages) -> None:
    messages[at % len(messages)]["content"] = f"changed {at} <|im_start|> {LONG}"


def _say_again(messages: Messages, at: int, tools: Messages) -> None:
    messages.insert(at % len(messages), {"role": "user", "content": f"in between {LONG}"})


def _cut(messages: Messages, at: int, tools: Messages) -> None:
    del messages[at % len(messages) + 1 :]


def _drop_tool(messages: Messages, at: int, tools: Messages) -> None:
    if tools:
        del tools[at % len(tools)]


def _nothing(messages: Messages, at: int, tools: Messages) -> None:
    pass


EDITS: Sequence[Callable[[Messages, int, Messages], None]] = (
    _edit_argument,
    _reverse_keys,
    _drop_call,
    _drop_message,
    _edit_text,
    _say_again,
    _cut,
    _drop_tool,
    _nothing,
)
STEPS = st.tuples(
    st.sampled_from(EDITS) | st.just(_nothing),
    st.integers(0, 30),
    st.integers(0, 2),  # calls in the answer
    st.sampled_from(["", "Let me see.", LONG, "é <|im_end|> 漢字"]),  # its text
    st.integers(0, 400) | st.none(),  # tokens that fit
)


class Twice:
    """Makes prompts and records twice, and compares."""

    def __init__(self, loop: Loop, template: Template) -> None:
        self._loop, self._template = loop, template
        self._encodings, self._packings = encodings(), packings()

    def check(self, raw: bytes, limit: int | None) -> None:
        loop, tenant = self._loop, self._loop.tenant
        request = DECODERS["chat"](raw)
        warm, cold = loop.chains.place(request, tenant), loop.fresh().place(request, tenant)
        assert msgspec.structs.replace(warm, base=b"") == msgspec.structs.replace(cold, base=b"")  # only storage
        whole = msgspec.structs.replace(request, items=cold.items)
        for most in (limit, None):
            known = self._encodings.of(tenant)
            found = _told(lambda k=known, m=most: assemble(whole, self._template, TOKENIZER, DIALECT, m, known=k))
            expected = _told(lambda m=most: assemble(whole, self._template, TOKENIZER, DIALECT, m))
            assert found == expected
        assert isinstance(expected, Prompt)
        ids, spans, outputs = expected.tokens, expected.spans, cold.outputs()
        record = Record(pack(raw, ids, spans, SPELLED, outputs, self._packings.of(tenant)), outputs)
        assert (record.body(SPELLED), record.ids(), record.spans) == (raw, ids, spans)


def _told(make: Callable[[], Prompt]) -> Prompt | tuple[str, int]:
    try:
        return make()
    except ContextTooLong as fault:
        return fault.message, fault.least


@settings(deadline=None, max_examples=25)  # each has a journal of its own
@given(st.lists(STEPS, min_size=2, max_size=7), st.booleans())
def test_a_history_becomes_the_same_with_and_without_a_memory(steps: list[Any], native: bool) -> None:
    template = NATIVE if native else smollm2.template()
    with tempfile.TemporaryDirectory() as folder, Loop(Path(folder) / "data") as loop:
        twice = Twice(loop, template)
        tools = [dict(tool) for tool in TOOLS]
        messages: Messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": LONG}]
        for number, (edit, at, calls, text, limit) in enumerate(steps):
            edit(messages, at, tools)
            messages = messages or [{"role": "user", "content": "Hello?"}]
            twice.check(json.dumps({"model": "m", "messages": messages, "tools": tools}).encode(), limit)
            made = tuple(("fg"[k], json.dumps({"path": f"{number} {k}", "lines": [number]})) for k in range(calls))
            asked = loop.ask(messages, Said(text, made))
            messages = json.loads(json.dumps([*messages, asked.message]))
            results = [call["id"] for call in messages[-1].get("tool_calls", ())]
            messages += [{"role": "tool", "tool_call_id": name, "content": f"{name}: {LONG}"} for name in results]
            messages += [] if results else [{"role": "user", "content": f"and {number}?"}]


def test_a_history_that_only_grows_is_told_apart_encoded_and_packed_from_its_new_end_on(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Else the test above would show nothing."""
    encoded: list[str] = []
    encode = TOKENIZER.encode_with_offsets
    monkeypatch.setattr(TOKENIZER, "encode_with_offsets", lambda text: encoded.append(text) or encode(text))
    with Loop(tmp_path / "data") as loop:
        twice = Twice(loop, smollm2.template())
        messages: Messages = [{"role": "user", "content": LONG}]
        for number in range(6):
            asked = loop.ask(messages, Said("", (("f", json.dumps({"path": f"{number} {LONG}"})),)))
            (call,) = asked.message["tool_calls"]
            result = {"role": "tool", "tool_call_id": call["id"], "content": f"{number}: {LONG}"}
            messages = [*messages, asked.message, result]
            raw = json.dumps({"model": "m", "messages": messages, "tools": TOOLS}).encode()
            before = len(encoded)
            twice.check(raw, None)
            texts = encoded[before:]
            again = sum(f"{number}: {LONG}" in text for text in texts)
            assert again == 1 + 2, "the new result: once by what remembers, each time by what does not"
            if number:
                assert sum("0: " + LONG in text for text in texts) == 2, "the first result: only by what does not"
        history = loop.chains._histories.longest(loop.tenant, DECODERS["chat"](raw).items)
        packed = twice._packings._kept[-1].value
    assert len(twice._encodings) == len(twice._packings) == 1
    assert history.length == len(DECODERS["chat"](raw).items)
    assert packed.body == raw and len(packed.reached) >= 6
