"""GLM's calls: keys and values in tags. GLM-4.5 and 4.6 write a newline between them, 4.7 and 5 none.

Values carry no type: strings stand bare, the rest as JSON, and the schema tells which is meant (values.py). Each tag
is a token of its own, so a text that spells a tag is only text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zjournal import ask
from zjournal.dialects import scan, tagged, values
from zjournal.dialects.base import Parser, Piece, Reasoning, TextParser, pieces, to_json, tool_value
from zjournal.dialects.form import Form, Tagged
from zjournal.dialects.literals import Literals, Tokens

TAGS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_THOUGHTS = ("<think>", "</think>")

_BEFORE = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_AFTER = """</tools>

For each function call, output the function name and arguments within the following XML format:
"""
_FORM = (
    "<tool_call>{function-name}|<arg_key>{arg-key-1}</arg_key>|<arg_value>{arg-value-1}</arg_value>|"
    "<arg_key>{arg-key-2}</arg_key>|<arg_value>{arg-value-2}</arg_value>|...|</tool_call>"
)


class Glm:
    """The dialect. `newlines`: that of GLM-4.5 and 4.6."""

    def __init__(self, tokenizer: Tokens, newlines: bool = False) -> None:
        """Raises ModelFault if the tokenizer has no token for a tag."""
        self.name = "glm-4.5" if newlines else "glm-4.7"
        self._n = n = "\n" if newlines else ""
        after = n  # between the closing tag of thoughts and the answer
        self.reasoning: Reasoning | None = Reasoning(after=after, kept="after_user" if newlines else "all")
        literals = Literals(self.name, tokenizer, (), (*TAGS, *_THOUGHTS))
        self.literals: Mapping[str, tuple[int, ...]] = literals.ids
        shape = scan.Shape(literals, self.reasoning, TAGS[:1], (TAGS[1], *TAGS[2:]), n)
        self._grammar = tagged.Grammar(_tags(literals), literals, shape)
        self.form: Form = _form(n)

    def instruct(self, tools: Sequence[ask.ToolSpec]) -> list[Piece]:
        """One JSON object per line between `<tools>` tags."""
        parts = [Piece(_BEFORE, trusted=True)]
        for tool in tools:
            parts += [Piece(to_json(tool_value(tool)), tool.path), Piece("\n", trusted=True)]
        return [*parts, Piece(_AFTER + _FORM.replace("|", self._n), trusted=True)]

    def calls(self, content: Sequence[Piece], calls: Sequence[ask.Call]) -> list[Piece]:
        """The calls one after another; with newlines, one before each call and one behind each part of it."""
        n = self._n
        parts = list(content)
        for call in calls:
            parts += [Piece(f"{n}<tool_call>", trusted=True), Piece(call.name, call.path), Piece(n, trusted=True)]
            for key, raw in values.members(call.arguments):
                text = values.text_of(raw)
                parts += [Piece("<arg_key>", trusted=True), Piece(key, call.path)]
                parts += [Piece(f"</arg_key>{n}<arg_value>", trusted=True)]
                parts += [Piece(raw if text is None else text, call.path), Piece(f"</arg_value>{n}", trusted=True)]
            parts.append(Piece("</tool_call>", trusted=True))
        return parts

    def results(self, results: Sequence[ask.Result]) -> list[Piece]:
        """Each result in its own tags."""
        n = self._n
        parts: list[Piece] = []
        for result in results:
            parts.append(Piece(f"{n}<tool_response>{n}", trusted=True))
            parts += [*pieces(result.parts), Piece(f"{n}</tool_response>", trusted=True)]
        return parts

    def parser(self, tools: Sequence[ask.ToolSpec] | None = None, *, in_tags: bool = False) -> Parser:
        """See base.Dialect."""
        return TextParser() if tools is None else tagged.TaggedParser(self._grammar, tools)


def _form(n: str) -> Tagged:
    longest = scan.NAME_CHARACTERS_MAX
    return Tagged(
        triggers=TAGS[:1],
        lead=len(n),
        gap=n,
        head=("<tool_call>", n),
        tail="</tool_call>",
        parameter="<arg_key>",
        string=f"</arg_key>{n}<arg_value>",
        other=f"</arg_key>{n}<arg_value>",
        end=f"</arg_value>{n}",
        name=rf"[^<>\s]{{1,{longest}}}",
        key=rf"(?s:.){{0,{longest}}}",
    )


def _tags(literals: Literals) -> tagged.Tags:
    opening, closing, key, key_end, value, _ = map(literals.inner, TAGS)
    name, marks = scan.NAME_CHARACTERS_MAX, f"{opening}{closing}{key}{key_end}{value}"
    return tagged.Tags(
        head=rf"{opening}\s*(?P<name>[^<>\s{marks}]{{1,{name}}})\s*(?=[{key}{closing}])",
        parameter=rf"{key}(?P<key>[^{marks}]{{0,{name}}}){key_end}\s*{value}",
        head_begins="<tool_call>",
        parameter_begins="<arg_key>",
        value_closing="</arg_value>",
        call_closing="</tool_call>",
    )
