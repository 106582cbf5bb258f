"""The ChatML JSON dialect (Hermes, Qwen2.5, Qwen3): calls as JSON between `<tool_call>` tags.

The wording and every newline are those that the models were trained on. JSON is printed with `, ` and `: `,
non-ASCII as it is and keys in the client's order; a call's arguments are the client's string unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from zjournal import ask
from zjournal.dialects.base import Piece, pieces, tool_value

_BEFORE_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>"""
_AFTER_TOOLS = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


class ChatML:
    """The dialect. Calls that the model writes pass through as text: parsing them comes with the fences."""

    name = "chatml"

    def instruct(self, tools: Sequence[ask.ToolSpec]) -> list[Piece]:
        """One JSON object per line between `<tools>` tags."""
        parts = [Piece(_BEFORE_TOOLS, trusted=True)]
        for tool in tools:
            parts += [Piece("\n", trusted=True), Piece(_json(tool_value(tool)), tool.path)]
        return [*parts, Piece(_AFTER_TOOLS, trusted=True)]

    def calls(self, content: Sequence[Piece], calls: Sequence[ask.Call]) -> list[Piece]:
        """One newline stands between calls and after content that is not empty; no arguments are written `{}`."""
        parts = list(content)
        for call in calls:
            arguments = call.arguments if call.arguments.strip() else "{}"
            body = f'{{"name": {_json(call.name)}, "arguments": {arguments}}}'
            parts.append(Piece("\n<tool_call>\n" if any(p.text for p in parts) else "<tool_call>\n", trusted=True))
            parts += [Piece(body, call.path), Piece("\n</tool_call>", trusted=True)]
        return parts

    def results(self, results: Sequence[ask.Result]) -> list[Piece]:
        """Each result in its own tags, joined by a newline."""
        parts: list[Piece] = []
        for result in results:
            parts.append(Piece("\n<tool_response>\n" if parts else "<tool_response>\n", trusted=True))
            parts += [*pieces(result.parts), Piece("\n</tool_response>", trusted=True)]
        return parts

    def parser(self) -> TextParser:
        """A parser that yields all text as it comes."""
        return TextParser()


class TextParser:
    """All that the model writes is text of the message."""

    def feed(self, text: str) -> list[ask.Delta]:
        """One delta, if there is text."""
        return [ask.TextDelta(text)] if text else []

    def end(self) -> list[ask.Delta]:
        """Nothing is ever held back."""
        return []


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
