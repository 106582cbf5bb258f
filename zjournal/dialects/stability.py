"""Whether each prompt of a conversation begins with the one before it and the answer that was sampled for that.

Proved by rendering small conversations turn by turn, as a model's template and dialect write them. What is no
beginning of the next prompt leaves the cache there, so every exception has to be known. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from zjournal import ask
from zjournal.checkpoint.template import Template
from zjournal.checkpoint.tokenizer import Tokenizer
from zjournal.dialects.base import Dialect, Piece
from zjournal.dialects.prompt import assemble, pack, write
from zjournal.errors import BadRequest

SHOWN_TOKENS = 6  # of each side where two prompts part
_SCHEMA = b'{"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}}'
_TOOLS = (ask.ToolSpec("read_file", "Reads a file.", _SCHEMA), ask.ToolSpec("list_files", "Lists files.", _SCHEMA))


class Said(msgspec.Struct, frozen=True):
    """An answer in a probe."""

    text: str = ""
    calls: tuple[ask.Call, ...] = ()
    thoughts: str = ""


class Probe(msgspec.Struct, frozen=True):
    """A conversation: what is said to the model and what it says. `resent`: the client sends answers as its own."""

    name: str
    items: tuple[ask.Message | ask.Result | Said, ...]
    tools: bool = False
    instructions: bool = False
    resent: bool = False


class Finding(msgspec.Struct, frozen=True):
    """What a probe showed. `parts`: where a prompt is not the beginning of the next, "" if each is.

    `refused`: why the template does not render it at all.
    """

    name: str
    parts: str = ""
    refused: str = ""

    @property
    def told(self) -> str:
        """One line, without line breaks."""
        return f"{self.name}: {self.parts or self.refused or 'ok'}"


def _user(text: str) -> ask.Message:
    return ask.Message("user", (ask.Text(text),))


def _call(number: int, name: str, arguments: str) -> ask.Call:
    return ask.Call(f"call_{number}", name, arguments)


def _result(number: int) -> ask.Result:
    return ask.Result(f"call_{number}", (ask.Text(f"The result {number}."),))


def probes(thinks: bool) -> Iterator[Probe]:
    """The conversations that are tried."""
    first = _call(1, "read_file", '{"path": "a b.txt", "lines": 12}')
    second, third = _call(2, "list_files", "{}"), _call(3, "read_file", '{"lines": 3, "path": "é <|x|>\\n"}')
    ask_1, ask_2, ask_3 = _user("Hello there."), _user("And now?"), _user("Thanks.")
    rounds = (ask_1, Said("", (first,)), _result(1), Said("Let me see.", (second,)), _result(2), Said("Done."), ask_2)
    yield Probe("text", (ask_1, Said("Hi."), ask_2, Said("Well, \n\n then."), ask_3))
    yield Probe("system", (ask_1, Said("Hi."), ask_2), instructions=True)
    yield Probe("calls", rounds, tools=True)
    yield Probe("parallel", (ask_1, Said("", (first, third)), _result(1), _result(3), Said("Done."), ask_2), tools=True)
    if thinks:
        yield Probe("thoughts", (ask_1, Said("Hi.", thoughts="Greet."), ask_2))
        thinking = (ask_1, Said("", (first,), "Look."), _result(1), Said("", (second,), "Hm."), _result(2))
        yield Probe("thoughts in a tool loop", thinking, tools=True)
        yield Probe("thoughts behind a tool loop", (*thinking, Said("Done.", thoughts="So."), ask_2), tools=True)
    yield Probe("resent text", (ask_1, Said("Hi."), ask_2, Said("Well."), ask_3), resent=True)
    yield Probe("resent calls", rounds, tools=True, resent=True)


def prove(template: Template, tokenizer: Tokenizer, dialect: Dialect) -> list[Finding]:
    """What each probe shows."""
    return [_tried(probe, template, tokenizer, dialect) for probe in probes(dialect.reasoning is not None)]


def exceptions(findings: Sequence[Finding]) -> tuple[str, ...]:
    """The probes that did not come out well, and why."""
    return tuple(finding.told for finding in findings if finding.parts or finding.refused)


def _tried(probe: Probe, template: Template, tokenizer: Tokenizer, dialect: Dialect) -> Finding:
    items: list[ask.Item] = []
    before: list[int] = []
    tools = _TOOLS if probe.tools else ()
    instructions = ask.Text("Be brief.") if probe.instructions else None
    for number, step in enumerate((*probe.items, Said())):
        if not isinstance(step, Said):
            items.append(step)
            continue
        asked = _ask(items, instructions, tools)
        try:
            ids = assemble(asked, template, tokenizer, dialect).ids
        except BadRequest as refusal:
            return Finding(probe.name, refused=" ".join(refusal.message.split()))
        if ids[: len(before)] != before:
            return Finding(probe.name, parts=_parts(tokenizer, before, ids))
        tokens = _sampled(step, ids, tokenizer, dialect)
        if probe.resent:
            before = ids
            items += _items(step)
        else:
            before = [*ids, *tokens]
            items.append(ask.Output(f"r{number}", _items(step), pack(tokens), step.thoughts))
    return Finding(probe.name)


def _items(said: Said) -> tuple[ask.Message | ask.Call, ...]:
    message = ask.Message("assistant", (ask.Text(said.text),))
    return (message, *said.calls) if said.text or not said.calls else said.calls


def _ask(items: Sequence[ask.Item], instructions: ask.Text | None, tools: tuple[ask.ToolSpec, ...]) -> ask.Ask:
    return ask.Ask(protocol="chat", model="m", items=tuple(items), instructions=instructions, tools=tools)


def _sampled(said: Said, prompt: Sequence[int], tokenizer: Tokenizer, dialect: Dialect) -> list[int]:
    """What a model would have sampled behind this prompt, as the dialect writes it; it may think there already."""
    content = [Piece(said.text)]
    pieces = dialect.calls(content, said.calls) if said.calls else content
    reasoning = dialect.reasoning
    if reasoning is not None:
        begun = reasoning.begun(tokenizer.decode(prompt[-SHOWN_TOKENS:]))
        opening, thoughts, closing = reasoning.written(said.thoughts)
        if reasoning.closing not in begun and (said.thoughts or begun):
            pieces = [*([] if begun else [opening]), thoughts, closing, *pieces]
    return write(pieces, tokenizer)


def _parts(tokenizer: Tokenizer, wanted: Sequence[int], found: Sequence[int]) -> str:
    """Where two prompts part, and what stands there."""
    pairs = enumerate(zip(wanted, found, strict=False))
    at = next((at for at, (one, other) in pairs if one != other), min(len(wanted), len(found)))
    before, after = (repr(tokenizer.decode(ids[at : at + SHOWN_TOKENS])) for ids in (wanted, found))
    return f"token {at} of {len(wanted)}: {before} was there, then {after}"
