"""Qwen3-Coder's calls, also those of Qwen3.5 and 3.6: the function's and each parameter's name stand in the tag.

Values carry no type: strings stand bare, the rest as JSON, and the schema tells which is meant (values.py). One newline
on each side of a value is layout. Only `<tool_call>` and its closing are tokens; the other tags are ordinary text. So
the closing tag of a value counts only where another tag of a call follows it, and a string that holds both is the one
thing that this dialect cannot say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zjournal import ask
from zjournal.dialects import scan, tagged, values
from zjournal.dialects.base import Parser, Piece, Reasoning, TextParser, listed, responses
from zjournal.dialects.form import Form, Tagged
from zjournal.dialects.literals import Literals, Tokens

_TEXT_TAGS = ("<function=", "</function>", "<parameter=", "</parameter>")
_MAYBE_TOKENS = ("<tool_call>", "</tool_call>", "<think>", "</think>")

_BEFORE = "# Tools\n\nYou have access to the following functions:\n\n<tools>"
_AFTER = """
</tools>

If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within \
<tool_call></tool_call> XML tags
- Required parameters MUST be specified
- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT after
- If there is no function call available, answer the question like normal with your current knowledge and do not tell \
the user about function calls
</IMPORTANT>"""

_NAME = scan.NAME_CHARACTERS_MAX
_FORM = Tagged(
    triggers=("<tool_call>", "<function="),
    lead=2,
    gap="\n",
    head=("<tool_call>\n<function=", ">\n"),
    tail="</function>\n</tool_call>",
    parameter="<parameter=",
    string=">\n",
    other=">\n",
    end="\n</parameter>\n",
    name=rf"[^<>\s]{{1,{_NAME}}}",
    key=rf"[^<>\n]{{1,{_NAME}}}",
    value_closing="</parameter>",
    followed=("<parameter=", "</function>", "</tool_call>"),
    loose=("<tool_call>\n", "\n</tool_call>"),
)


class QwenXml:
    """The dialect. `thinks`: whether the model writes thoughts."""

    name = "qwen-xml"
    form: Form = _FORM

    def __init__(self, tokenizer: Tokens, thinks: bool = False) -> None:
        """Raises ModelFault if the tokenizer has no text for a tag."""
        self.reasoning: Reasoning | None = Reasoning(inside="\n", after="\n\n") if thinks else None
        literals = Literals(self.name, tokenizer, (*_MAYBE_TOKENS, *_TEXT_TAGS))
        self.literals: Mapping[str, tuple[int, ...]] = literals.ids
        opens, closings = ("<tool_call>", "<function="), ("</tool_call>", "</function>", "</parameter>")
        shape = scan.Shape(literals, self.reasoning, opens, closings, "\n\n")
        self._grammar = tagged.Grammar(_tags(), literals, shape)

    def instruct(self, tools: Sequence[ask.ToolSpec]) -> list[Piece]:
        """One JSON object per line between `<tools>` tags."""
        return [Piece(_BEFORE, trusted=True), *listed(tools), Piece(_AFTER, trusted=True)]

    def calls(self, content: Sequence[Piece], calls: Sequence[ask.Call]) -> list[Piece]:
        """An empty line stands between content and the first call, a newline between calls."""
        parts = list(content)
        said = any(piece.text for piece in content)
        for index, call in enumerate(calls):
            gap = "\n" if index else "\n\n" if said else ""
            parts += [Piece(f"{gap}<tool_call>\n<function=", trusted=True), Piece(call.name, call.path)]
            parts.append(Piece(">\n", trusted=True))
            for key, raw in values.members(call.arguments):
                text = values.text_of(raw)
                parts += [Piece("<parameter=", trusted=True), Piece(key, call.path), Piece(">\n", trusted=True)]
                parts += [Piece(raw if text is None else text, call.path), Piece("\n</parameter>\n", trusted=True)]
            parts.append(Piece("</function>\n</tool_call>", trusted=True))
        return parts

    def results(self, results: Sequence[ask.Result]) -> list[Piece]:
        """Each result in its own tags, joined by a newline."""
        return responses(results)

    def parser(self, tools: Sequence[ask.ToolSpec] | None = None, *, in_tags: bool = False) -> Parser:
        """See base.Dialect."""
        return TextParser() if tools is None else tagged.TaggedParser(self._grammar, tools)


def _tags() -> tagged.Tags:
    name = scan.NAME_CHARACTERS_MAX
    return tagged.Tags(
        head=rf"<function=\s*(?P<name>[^<>\s]{{1,{name}}})\s*>",
        parameter=rf"<parameter=(?P<key>[^<>\n]{{1,{name}}})>",
        head_begins="<function=",
        parameter_begins="<parameter=",
        value_closing="</parameter>",
        call_closing="</function>",
        block="<tool_call>",
        block_closing="</tool_call>",
        layout="\n\n",
        inside="\n",
        followed=("<parameter=", "</function>", "</tool_call>"),
    )
