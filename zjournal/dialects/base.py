"""What every dialect can do: instruct, render calls, render results, and parse what the model writes.

The four belong together, for they must be inverse to each other. Rendering yields pieces that say who wrote
them: a dialect's own tags may become control tokens, a client's text never.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import msgspec

from zjournal import ask
from zjournal.errors import BadRequest


class Piece(msgspec.Struct, frozen=True):
    """Text and where it came from. `trusted`: written by us or the model's maker, not by a client."""

    text: str
    path: str = ""
    trusted: bool = False


class Parser(Protocol):
    """Turns a model's text, however it is cut, into deltas."""

    def feed(self, text: str) -> list[ask.Delta]:
        """The deltas that `text` completes."""

    def end(self) -> list[ask.Delta]:
        """The deltas that were held back."""


class Dialect(Protocol):
    """How a model family writes tools. Stateless."""

    @property
    def name(self) -> str:
        """The stable name that the journal records."""

    def instruct(self, tools: Sequence[ask.ToolSpec]) -> list[Piece]:
        """What to append to the system message so that the model knows the tools; not empty."""

    def calls(self, content: Sequence[Piece], calls: Sequence[ask.Call]) -> list[Piece]:
        """The text of an assistant turn that says `content` and makes `calls` (at least one)."""

    def results(self, results: Sequence[ask.Result]) -> list[Piece]:
        """The text of the user turn that brings consecutive `results` (at least one)."""

    def parser(self) -> Parser:
        """A parser for one response."""


def pieces(texts: Sequence[ask.Text]) -> list[Piece]:
    """A client's texts as pieces."""
    return [Piece(part.text, part.path) for part in texts]


def tool_value(tool: ask.ToolSpec) -> dict[str, Any]:
    """The tool as the JSON object that models are trained on; keys stand in the client's order.

    Raises BadRequest if the parameters are not a JSON object.
    """
    parameters = parse_json(tool.parameters, tool.path)
    if not isinstance(parameters, dict):
        raise BadRequest("the parameters of a function are a JSON object", param=tool.path or None)
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": {**function, "parameters": parameters}}


def parse_json(text: str | bytes, path: str) -> Any:
    """The JSON value. Raises BadRequest, also for NaN, Infinity and what is nested too deep or too long a number."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"not valid JSON: {error}", param=path or None) from error
