"""What every dialect can do: instruct, render calls, render results, and parse what the model writes.

The four belong together, for they must be inverse to each other. Rendering yields pieces that say who wrote
them: a dialect's own tags may become control tokens, a client's text never. docs/dialects.md has the rules.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NoReturn, Protocol

import msgspec

from zjournal import ask
from zjournal.dialects.form import Form
from zjournal.errors import BadRequest


class Piece(msgspec.Struct, frozen=True):
    """Text and where it came from. `trusted`: written by us or the model's maker, not by a client."""

    text: str
    path: str = ""
    trusted: bool = False


class Reasoning(msgspec.Struct, frozen=True):
    """How a model writes its thoughts, and which earlier ones stay in the prompt.

    `inside` is layout behind the opening and before the closing tag, `after` what follows the closing one: dropped if
    it is there, to the character. `kept`: `all` thoughts stay, those `after_user` (behind the last user message), or
    all `with_tools` and else those after the user. What is dropped is where the next prompt leaves the cache (O09).
    """

    opening: str = "<think>"
    closing: str = "</think>"
    inside: str = ""
    after: str = ""
    kept: Literal["all", "after_user", "with_tools"] = "after_user"

    def keeps(self, behind_user: bool, tools: bool) -> bool:
        """Whether the thoughts of an assistant's turn stay in the prompt. `behind_user`: no user message follows it."""
        return behind_user or self.kept == "all" or (self.kept == "with_tools" and tools)

    def written(self, text: str, path: str = "") -> list[Piece]:
        """The thoughts in their tags."""
        opening = Piece(self.opening + self.inside, trusted=True)
        return [opening, Piece(text, path), Piece(self.inside + self.closing + self.after, trusted=True)]

    def begun(self, prompt: str) -> str:
        """What a prompt's last words have already said of the answer: from the last opening tag on, or "".

        `prompt` is what the template writes behind the last message. A parser that is fed the tokens of this first,
        and whose deltas for them are thrown away, knows whether the model is thinking.
        """
        opened, closed = prompt.rfind(self.opening), prompt.rfind(self.closing)
        if opened < 0 and closed >= 0:
            return self.opening + prompt[closed:]  # DeepSeek's way to say that there are no thoughts
        return prompt[opened:] if opened >= 0 else ""


class Parser(Protocol):
    """Turns what a model writes into deltas, token by token; the deltas, joined, do not depend on where tokens end."""

    def feed(self, data: bytes, control: bool = False) -> list[ask.Delta]:
        """The deltas that a token completes: `data` are its bytes, `control` says that it is a control token."""

    def end(self) -> list[ask.Delta]:
        """The deltas that were held back; an open call is told to be truncated."""


class Dialect(Protocol):
    """How a model family writes tools. Stateless."""

    @property
    def name(self) -> str:
        """The stable name that the journal records."""

    @property
    def literals(self) -> Mapping[str, tuple[int, ...]]:
        """The dialect's tags and the ids that the active tokenizer has for each; one id is a token of its own."""

    @property
    def reasoning(self) -> Reasoning | None:
        """How the model thinks; None: it does not."""

    @property
    def form(self) -> Form:
        """How calls are written, as data; a grammar of them is made from it (fences/)."""

    def instruct(self, tools: Sequence[ask.ToolSpec]) -> list[Piece]:
        """What to append to the system message so that the model knows the tools; not empty."""

    def calls(self, content: Sequence[Piece], calls: Sequence[ask.Call]) -> list[Piece]:
        """The text of an assistant turn that says `content` and makes `calls` (at least one)."""

    def results(self, results: Sequence[ask.Result]) -> list[Piece]:
        """The text of the user turn that brings consecutive `results` (at least one)."""

    def parser(self, tools: Sequence[ask.ToolSpec] | None = None, *, in_tags: bool = False) -> Parser:
        """A parser for one response. Without tools there are no calls: what looks like one is text.

        None: nothing is parsed at all, thoughts and calls are text as the model wrote them. `in_tags`: only what
        stands in the dialect's tags is a call, for the text may be JSON that looks like one.
        """


class TextParser:
    """All that the model writes is text of the message; what is no UTF-8 becomes U+FFFD."""

    def __init__(self) -> None:
        self._pending = b""  # of a character that is not complete yet

    def feed(self, data: bytes, control: bool = False) -> list[ask.Delta]:
        """One delta, if there is a whole character."""
        data = self._pending + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return [ask.TextDelta(text)] if text else []

    def end(self) -> list[ask.Delta]:
        """U+FFFD for an incomplete character."""
        pending, self._pending = self._pending, b""
        return [ask.TextDelta(pending.decode("utf-8", "replace"))] if pending else []


def prime(parser: Parser, tokens: Iterable[tuple[bytes, bool]]) -> None:
    """Feeds what the prompt has already said of the answer, see Reasoning.begun; it is told to nobody."""
    for data, control in tokens:
        parser.feed(data, control)


def pieces(texts: Sequence[ask.Text]) -> list[Piece]:
    """A client's texts as pieces."""
    return [Piece(part.text, part.path) for part in texts]


def listed(tools: Sequence[ask.ToolSpec]) -> list[Piece]:
    """Each tool on a line of its own, as JSON."""
    parts: list[Piece] = []
    for tool in tools:
        parts += [Piece("\n", trusted=True), Piece(to_json(tool_value(tool)), tool.path)]
    return parts


def responses(results: Sequence[ask.Result]) -> list[Piece]:
    """Each result in the Qwen family's tags, joined by a newline."""
    parts: list[Piece] = []
    for result in results:
        parts.append(Piece("\n<tool_response>\n" if parts else "<tool_response>\n", trusted=True))
        parts += [*pieces(result.parts), Piece("\n</tool_response>", trusted=True)]
    return parts


def function_value(tool: ask.ToolSpec) -> dict[str, Any]:
    """The function as a JSON object; keys stand in the client's order.

    Raises BadRequest if the parameters are not a JSON object.
    """
    parameters = parse_json(tool.parameters, tool.path)
    if not isinstance(parameters, dict):
        raise BadRequest("the parameters of a function are a JSON object", param=tool.path or None)
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    return {**function, "parameters": parameters}


def tool_value(tool: ask.ToolSpec) -> dict[str, Any]:
    """The tool as the JSON object that most models are trained on. Raises BadRequest as `function_value`."""
    return {"type": "function", "function": function_value(tool)}


def to_json(value: object) -> str:
    """JSON as models are trained on it: `, ` and `: `, non-ASCII as it is."""
    return json.dumps(value, ensure_ascii=False)


def parse_json(text: str | bytes, path: str) -> Any:
    """The JSON value. Raises BadRequest, also for NaN, Infinity and what is nested too deep or too long a number."""
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"not valid JSON: {error}", param=path or None) from error


def refuse_constant(constant: str) -> NoReturn:
    """For `parse_constant` of json.loads."""
    raise ValueError(f"{constant} is not JSON")
