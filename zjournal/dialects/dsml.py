"""DeepSeek's markup for calls, DSML: V3.2, V4 and V4.1, which differ in the names of their tags.

Strings stand bare and without any escape, other values as JSON; an attribute says which. The marker in each tag is
a token of its own, so a text that spells a tag is only text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from zjournal import ask
from zjournal.dialects import scan, tagged, values
from zjournal.dialects.base import Parser, Piece, Reasoning, TextParser, function_value, pieces, to_json
from zjournal.dialects.form import Form, Tagged
from zjournal.dialects.literals import Literals, Tokens

MARKER = "｜DSML｜"


class Version(msgspec.Struct, frozen=True):
    """What differs between the versions: the name of the block, what stands behind each marker, and results."""

    name: str
    block: str
    space: str = ""
    kept: bool = False  # whether thoughts stay where tools are
    old: bool = False  # the instructions and results of V3.2


V32 = Version("dsml-v3.2", "function_calls", old=True)
V4 = Version("dsml-v4", "tool_calls", kept=True)
V41 = Version("dsml-v4.1", "calls", " ", kept=True)

_EXAMPLE = """<{m}{block}>
<{m}invoke name="$TOOL_NAME">
<{m}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{m}parameter>
...
</{m}invoke>
<{m}invoke name="$TOOL_NAME2">
...
</{m}invoke>
</{m}{block}>"""
_BEFORE = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<{m}{block}>" block like the following:

{example}

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside \
<think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""
_AFTER = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
_BEFORE_OLD = """## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<{m}{block}>" block like the following as part of your reply to the user:
{example}

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:

<{m}{block}>
...
</{m}{block}>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
"""
_AFTER_OLD = "\n</functions>\n"


class Dsml:
    """The dialect in one version."""

    def __init__(self, tokenizer: Tokens, version: Version = V4) -> None:
        """Raises ModelFault if the tokenizer has no token for the marker or for the tags of thoughts."""
        self.name = version.name
        self.reasoning: Reasoning | None = Reasoning(kept="with_tools" if version.kept else "after_user")
        self._version = version
        self._m = m = MARKER + version.space
        literals = Literals(self.name, tokenizer, (), (MARKER, self.reasoning.opening, self.reasoning.closing))
        self.literals: Mapping[str, tuple[int, ...]] = literals.ids
        tags = _tags(literals, m, version.block)
        closings = (tags.value_closing, tags.call_closing, f"</{m}{version.block}>")
        opens = (f"<{m}{version.block}>", tags.head_begins)
        shape = scan.Shape(literals, self.reasoning, opens, closings, tags.layout)
        self._grammar = tagged.Grammar(tags, literals, shape)
        self.form: Form = _form(m, version.block)

    def instruct(self, tools: Sequence[ask.ToolSpec]) -> list[Piece]:
        """The functions, one JSON object a line, in the wording of the version."""
        before, after = (_BEFORE_OLD, _AFTER_OLD) if self._version.old else (_BEFORE, _AFTER)
        names = {"m": self._m, "block": self._version.block}
        example = _EXAMPLE.format(**names)
        if self._version.old:
            example = example.replace("TOOL_NAME", "FUNCTION_NAME")
        parts = [Piece(before.format(example=example, **names), trusted=True)]
        for index, tool in enumerate(tools):
            parts += [Piece("\n" if index else "", trusted=True), Piece(to_json(function_value(tool)), tool.path)]
        return [*parts, Piece(after, trusted=True)]

    def calls(self, content: Sequence[Piece], calls: Sequence[ask.Call]) -> list[Piece]:
        """One block. A call without arguments has an empty line in it, as the models' own encoder writes it."""
        m, block = self._m, self._version.block
        parts = [*content, Piece(f"\n\n<{m}{block}>\n", trusted=True)]
        for index, call in enumerate(calls):
            parts.append(Piece(("\n" if index else "") + f'<{m}invoke name="', trusted=True))
            parts += [Piece(call.name, call.path), Piece('">\n', trusted=True)]
            for place, (key, raw) in enumerate(values.members(call.arguments)):
                text = values.text_of(raw)
                parts.append(Piece(("\n" if place else "") + f'<{m}parameter name="', trusted=True))
                string = "false" if text is None else "true"
                parts += [Piece(key, call.path), Piece(f'" string="{string}">', trusted=True)]
                parts += [Piece(raw if text is None else text, call.path), Piece(f"</{m}parameter>", trusted=True)]
            parts.append(Piece(f"\n</{m}invoke>", trusted=True))
        return [*parts, Piece(f"\n</{m}{block}>", trusted=True)]

    def results(self, results: Sequence[ask.Result]) -> list[Piece]:
        """V3.2: one block of results. Later: each in its own tags, an empty line between them."""
        old = self._version.old
        parts = [Piece("\n\n<function_results>" if old else "", trusted=True)]
        tag, first, gap = ("result", "\n", "\n") if old else ("tool_result", "", "\n\n")
        for index, result in enumerate(results):
            parts.append(Piece(f"{gap if index else first}<{tag}>", trusted=True))
            parts += [*pieces(result.parts), Piece(f"</{tag}>", trusted=True)]
        return [*parts, Piece("\n</function_results>" if old else "", trusted=True)]

    def parser(self, tools: Sequence[ask.ToolSpec] | None = None, *, in_tags: bool = False) -> Parser:
        """See base.Dialect."""
        return TextParser() if tools is None else tagged.TaggedParser(self._grammar, tools)


def _form(m: str, block: str) -> Tagged:
    name = scan.NAME_CHARACTERS_MAX
    return Tagged(
        triggers=(f"<{MARKER}",),
        lead=2,
        opening=f"<{m}{block}>\n",
        closing=f"\n</{m}{block}>",
        gap="\n",
        head=(f'<{m}invoke name="', '">\n'),
        tail=f"</{m}invoke>",
        parameter=f'<{m}parameter name="',
        string='" string="true">',
        other='" string="false">',
        end=f"</{m}parameter>\n",
        empty="\n",
        name=rf'[^"\n]{{1,{name}}}',
        key=rf'[^"\n]{{0,{name}}}',
    )


def _tags(literals: Literals, m: str, block: str) -> tagged.Tags:
    marker = literals.inner(m)
    name = scan.NAME_CHARACTERS_MAX
    return tagged.Tags(
        head=rf'<{marker}invoke\s+name="(?P<name>[^"\n]{{1,{name}}})"\s*>',
        parameter=rf'<{marker}parameter\s+name="(?P<key>[^"\n]{{0,{name}}})"(?:\s+string="(?P<string>true|false)")?\s*>',
        head_begins=f"<{m}invoke",
        parameter_begins=f"<{m}parameter",
        value_closing=f"</{m}parameter>",
        call_closing=f"</{m}invoke>",
        block=f"<{m}{block}>",
        block_closing=f"</{m}{block}>",
        layout="\n\n",
    )
