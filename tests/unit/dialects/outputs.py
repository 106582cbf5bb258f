"""Outputs of models for the tests of dialects: tokenizers with tags as tokens or as text, and ways to cut a text."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from zjournal import ask
from zjournal.checkpoint.tokenizer import Tokenizer
from zjournal.checkpoint.words import CONTROL, NORMAL
from zjournal.dialects import dsml, glm, llama3
from zjournal.dialects.base import Dialect, Piece
from zjournal.dialects.chatml import ChatML
from zjournal.dialects.qwen_xml import QwenXml

Token = tuple[bytes, bool]  # its bytes, and whether it is a control token
THOUGHTS = ("<think>", "</think>")


@functools.cache
def tokenizer(*control: str) -> Tokenizer:
    """A byte-level tokenizer: one token for each byte, and the given control tokens."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    alphabet = [chr(byte) for byte in plain] + [chr(0x100 + n) for n in range(len(others))]
    kinds = [NORMAL] * len(alphabet) + [CONTROL] * len(control)
    return Tokenizer.byte_level([*alphabet, *control], kinds, [], "default")


# Every dialect, with its tags as tokens where it can have them, and as text where it can.
DIALECTS: dict[str, Callable[[], Dialect]] = {
    "chatml": lambda: ChatML(tokenizer("<tool_call>", "</tool_call>", *THOUGHTS), thinks=True),
    "chatml-text": lambda: ChatML(tokenizer(), thinks=True),
    "glm-4.5": lambda: glm.Glm(tokenizer(*glm.TAGS, *THOUGHTS), newlines=True),
    "glm-4.7": lambda: glm.Glm(tokenizer(*glm.TAGS, *THOUGHTS)),
    "dsml-v3.2": lambda: dsml.Dsml(tokenizer(dsml.MARKER, *THOUGHTS), dsml.V32),
    "dsml-v4": lambda: dsml.Dsml(tokenizer(dsml.MARKER, *THOUGHTS), dsml.V4),
    "dsml-v4.1": lambda: dsml.Dsml(tokenizer(dsml.MARKER, *THOUGHTS), dsml.V41),
    "qwen-xml": lambda: QwenXml(tokenizer("<tool_call>", "</tool_call>", *THOUGHTS), thinks=True),
    "qwen-xml-text": lambda: QwenXml(tokenizer(), thinks=True),
    "llama3": lambda: llama3.Llama3(tokenizer(llama3.TAG)),
}


@functools.cache
def dialect(name: str) -> Dialect:
    return DIALECTS[name]()


def tool(name: str, properties: dict[str, Any] | None = None, **more: Any) -> ask.ToolSpec:
    parameters = {"type": "object", "properties": properties or {}, **more}
    return ask.ToolSpec(name, None, json.dumps(parameters).encode())


def write(dialect: Dialect, pieces: Iterable[Piece]) -> list[Token]:
    """Pieces as tokens: tags that are tokens in what is trusted, all the rest as its UTF-8, in one piece."""
    tokens: list[Token] = []
    for piece in pieces:
        tokens += said(dialect, piece.text) if piece.trusted else [(piece.text.encode("utf-8", "surrogatepass"), False)]
    return tokens


def said(dialect: Dialect, text: str) -> list[Token]:
    """What a model writes, its tags as tokens where they are."""
    tags = sorted((tag for tag, ids in dialect.literals.items() if len(ids) == 1), key=len, reverse=True)
    tokens: list[Token] = [(text.encode(), False)]
    for tag in tags:
        tokens = [part for token in tokens for part in _parted(token, tag.encode())]
    return tokens


def _parted(token: Token, tag: bytes) -> Iterator[Token]:
    if token[1]:
        yield token
        return
    first, *others = token[0].split(tag)
    yield (first, False)
    for other in others:
        yield (tag, True)
        yield (other, False)


def halves(tokens: Sequence[Token]) -> Iterator[list[Token]]:
    """Every way to cut one token in two, anywhere in its bytes; all that is before and behind comes in one piece."""
    joined = join(tokens)
    for index, (data, control) in enumerate(joined):
        if not control:
            for at in range(1, len(data)):
                yield [*joined[:index], (data[:at], False), (data[at:], False), *joined[index + 1 :]]


def bytewise(tokens: Sequence[Token]) -> list[Token]:
    """Each byte a token of its own."""
    return [
        part
        for data, control in tokens
        for part in ([(data, True)] if control else [(data[i : i + 1], False) for i in range(len(data))])
    ]


def join(tokens: Sequence[Token]) -> list[Token]:
    """Text between two control tokens in one piece."""
    joined: list[Token] = []
    for data, control in tokens:
        if joined and not control and not joined[-1][1]:
            joined[-1] = (joined[-1][0] + data, False)
        else:
            joined.append((data, control))
    return joined


def parse(
    dialect: Dialect, tools: Sequence[ask.ToolSpec], tokens: Iterable[Token], ends: bool = True
) -> list[ask.Delta]:
    """The deltas, those of a kind joined."""
    parser = dialect.parser(tools)
    deltas = [delta for data, control in tokens for delta in parser.feed(data, control)]
    return joined(deltas + (parser.end() if ends else []))


def joined(deltas: Iterable[ask.Delta]) -> list[ask.Delta]:
    """Deltas in the form that does not depend on how the output was cut."""
    out: list[ask.Delta] = []
    for delta in deltas:
        before = out[-1] if out else None
        match before, delta:
            case ask.TextDelta(text=one), ask.TextDelta(text=two):
                out[-1] = ask.TextDelta(one + two)
            case ask.ReasoningDelta(text=one), ask.ReasoningDelta(text=two):
                out[-1] = ask.ReasoningDelta(one + two)
            case ask.CallArguments(index=index, text=one), ask.CallArguments(text=two):
                out[-1] = ask.CallArguments(index, one + two)
            case _:
                out.append(delta)
    return out


def text_of(deltas: Iterable[ask.Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, ask.TextDelta))


def thoughts_of(deltas: Iterable[ask.Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, ask.ReasoningDelta))


def calls_of(deltas: Sequence[ask.Delta]) -> list[tuple[str, Any]]:
    """Names and arguments, the latter as JSON values; asserts that the events of each call are in order and sound."""
    found: list[tuple[str, Any]] = []
    for index, call in enumerate(delta for delta in deltas if isinstance(delta, ask.CallStarted)):
        assert call.index == index
        arguments = "".join(d.text for d in deltas if isinstance(d, ask.CallArguments) and d.index == index)
        ends = [d for d in deltas if isinstance(d, ask.CallEnded) and d.index == index]
        assert ends == [ask.CallEnded(index)], ends
        assert deltas.index(call) < deltas.index(ends[0])
        found.append((call.name, json.loads(arguments)))
    return found


def everywhere(dialect: Dialect, tools: Sequence[ask.ToolSpec], tokens: Sequence[Token]) -> list[ask.Delta]:
    """The deltas; asserts that they are the same for every cut in two and byte by byte."""
    expected = parse(dialect, tools, join(tokens))
    assert parse(dialect, tools, bytewise(tokens)) == expected
    for cut in halves(tokens):
        assert parse(dialect, tools, cut) == expected, cut
    return expected
