"""The ChatML JSON dialect (Hermes, Qwen2.5, Qwen3): calls as JSON between `<tool_call>` tags.

The wording and every newline are those that the models were trained on. JSON is printed with `, ` and `: `,
non-ASCII as it is and keys in the client's order; a call's arguments are the client's string unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zjournal import ask
from zjournal.dialects import objects, scan
from zjournal.dialects.base import Parser, Piece, Reasoning, TextParser, listed, responses, to_json
from zjournal.dialects.form import Form, Objects
from zjournal.dialects.literals import Literals, Tokens

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
_TAGS = ("<tool_call>", "</tool_call>")
_THOUGHTS = ("<think>", "</think>")


class ChatML:
    """The dialect. `thinks`: whether the model writes thoughts."""

    name = "chatml"
    form: Form = Objects(triggers=_TAGS[:1], lead=1, opening="<tool_call>\n", closing="\n</tool_call>", gap="\n")

    def __init__(self, tokenizer: Tokens | None = None, thinks: bool = False) -> None:
        """Without a tokenizer every tag is text. Raises ModelFault if the tokenizer has no text for a tag."""
        self.reasoning: Reasoning | None = Reasoning(inside="\n", after="\n\n") if thinks else None
        literals = Literals(self.name, tokenizer, (*_TAGS, *_THOUGHTS) if thinks else _TAGS)
        self.literals: Mapping[str, tuple[int, ...]] = literals.ids
        self._shape = scan.Shape(literals, self.reasoning, _TAGS[:1], _TAGS[1:], "\n")

    def instruct(self, tools: Sequence[ask.ToolSpec]) -> list[Piece]:
        """One JSON object per line between `<tools>` tags."""
        return [Piece(_BEFORE_TOOLS, trusted=True), *listed(tools), Piece(_AFTER_TOOLS, trusted=True)]

    def calls(self, content: Sequence[Piece], calls: Sequence[ask.Call]) -> list[Piece]:
        """One newline stands between calls and after content that is not empty; no arguments are written `{}`."""
        parts = list(content)
        for call in calls:
            arguments = call.arguments if call.arguments.strip() else "{}"
            body = f'{{"name": {to_json(call.name)}, "arguments": {arguments}}}'
            parts.append(Piece("\n<tool_call>\n" if any(p.text for p in parts) else "<tool_call>\n", trusted=True))
            parts += [Piece(body, call.path), Piece("\n</tool_call>", trusted=True)]
        return parts

    def results(self, results: Sequence[ask.Result]) -> list[Piece]:
        """Each result in its own tags, joined by a newline."""
        return responses(results)

    def parser(self, tools: Sequence[ask.ToolSpec] | None = None, *, in_tags: bool = False) -> Parser:
        """See base.Dialect."""
        return TextParser() if tools is None else objects.ObjectParser(self._shape, tools, _TAGS[1])
