"""Dialects: parsing undoes rendering, nothing depends on how the output is cut, and nothing that was said is lost."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.unit.dialects.outputs import (
    DIALECTS,
    Token,
    bytewise,
    calls_of,
    dialect,
    join,
    parse,
    said,
    text_of,
    tool,
    write,
)
from zjournal import ask
from zjournal.dialects.base import Piece

EXAMPLES = 25  # of each dialect
SPELLS_TAGS = ("chatml-text", "qwen-xml-text")  # their tags are text, so content must not hold any
BARE_KEYS = ("qwen-xml", "qwen-xml-text", "dsml-v3.2", "dsml-v4", "dsml-v4.1")  # a key stands in a tag
SCHEMA_TYPES = ("qwen-xml", "qwen-xml-text", "glm-4.5", "glm-4.7")  # values carry no type

LIKE_TAGS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<function=f>", "</function>", "<parameter=p>"),
    *("</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<｜DSML｜tool_calls>", "<｜DSML｜"),
    *("</｜DSML｜parameter>", "</｜DSML｜invoke>", '<｜DSML｜invoke name="f">', "<|python_tag|>", "&lt;tool_call&gt;"),
    *(
        "<",
        "</",
        "｜",
        "<|im_end|>",
        "{",
        "}",
        '"',
        "\\",
        "\n",
        "\n\n",
        " ",
        "null",
        "123",
        '{"name": "f"}',
        "é",
        "漢字",
        "😀",
    ),
]
TEXTS = st.lists(st.sampled_from(LIKE_TAGS) | st.text(st.characters(codec="utf-8"), max_size=6), max_size=6).map(
    "".join
)
NUMBERS = st.sampled_from(["0", "-0", "1", "-17", "1.50", "1e5", "2E-7", "10000000000000000000000", "0.1000"])


@st.composite
def values(draw: st.DrawFn, depth: int = 2) -> str:
    """The text of a JSON value, spelled in one of many ways."""
    kind = draw(st.sampled_from(["text", "number", "other", *(["list", "object"] if depth else [])]))
    gap = draw(st.sampled_from(["", " ", "\n  "]))
    if kind == "text":
        return json.dumps(draw(TEXTS), ensure_ascii=draw(st.booleans()))
    if kind == "number":
        return draw(NUMBERS)
    if kind == "other":
        return draw(st.sampled_from(["true", "false", "null"]))
    inner = draw(st.lists(values(depth=depth - 1), max_size=3))
    if kind == "list":
        return "[" + gap + f",{gap}".join(inner) + "]"
    return "{" + f",{gap}".join(f"{json.dumps(draw(TEXTS))}{gap}:{gap}{value}" for value in inner) + "}"


def read(arguments: str) -> Any:
    """Arguments as a value that tells `1.50` from `1.5` and from `"1.50"`, and knows the order of keys."""
    number = lambda text: ("number", text)  # noqa: E731
    return json.loads(
        arguments, parse_int=number, parse_float=number, object_pairs_hook=lambda pairs: ("object", pairs)
    )


def schema_of(arguments: str) -> dict[str, Any]:
    names = {str: "string", bool: "boolean", type(None): "null", list: "array", dict: "object", int: "number"}
    return {key: {"type": names.get(type(value), "number")} for key, value in json.loads(arguments).items()}


def arguments_of(deltas: list[ask.Delta], index: int) -> str:
    return "".join(d.text for d in deltas if isinstance(d, ask.CallArguments) and d.index == index)


@pytest.mark.parametrize("name", DIALECTS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(st.data())
def test_parsing_undoes_rendering(name: str, data: st.DataObject) -> None:
    spoken = dialect(name)
    keys = st.text("abc_é-.", min_size=1, max_size=4) if name in BARE_KEYS else TEXTS
    found = data.draw(st.lists(st.dictionaries(keys, values(), max_size=4), min_size=1, max_size=3))
    arguments = ["{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in one.items()) + "}" for one in found]
    content = data.draw(TEXTS)
    assume(name not in SPELLS_TAGS or "<" not in content)
    if name.startswith("qwen"):
        assume(not any("</parameter>" in json.dumps(read(one), ensure_ascii=False) for one in arguments))
    calls = [ask.Call(f"c{i}", f"f{i}.x", one) for i, one in enumerate(arguments)]
    tools = [tool(call.name, schema_of(call.arguments)) for call in calls]
    tokens = write(spoken, spoken.calls([Piece(content)], calls))
    for cut in (join(tokens), bytewise(tokens)):
        deltas = parse(spoken, tools, cut)
        assert text_of(deltas) == content
        assert [called for called, _ in calls_of(deltas)] == [call.name for call in calls]
        for i, one in enumerate(arguments):
            assert read(arguments_of(deltas, i)) == read(one)


@st.composite
def outputs(draw: st.DrawFn, name: str) -> list[Token]:
    """Whatever a model may write: pieces of markup, whole and broken, JSON and prose, in any order."""
    markup = [
        *(
            '<tool_call>\n{"name": "f", "arguments": {"a": "',
            '{"name": "f"',
            '"arguments": {"a": [1, "x"]}',
            "}\n</tool_call>",
        ),
        *(
            '"b": 3',
            ", ",
            ": ",
            "<tool_call>f\n",
            "<function=f>\n",
            "<parameter=a>\n",
            "\n</parameter>\n",
            "</function>\n",
        ),
        *("<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "<tool_call>\n", "<TOOL_CALL>", "</Function>"),
        *('<｜DSML｜invoke name="f">\n', "<｜DSML｜tool_calls>\n", "<｜DSML｜ calls>", '<｜DSML｜ invoke name="f">'),
        *(
            '<｜DSML｜parameter name="a" string="true">',
            '<｜DSML｜parameter name="a" string="False">',
            "</｜DSML｜parameter>\n",
        ),
        *(
            "</｜DSML｜invoke>\n",
            "</｜DSML｜tool_calls>",
            "<|python_tag|>",
            '; {"name": "f", "parameters": {}}',
            "x",
            "\t",
            " " * 300,
            "1",
        ),
    ]
    parts = draw(st.lists(st.sampled_from(markup) | st.sampled_from(LIKE_TAGS), max_size=14))
    return said(dialect(name), "".join(parts))


@pytest.mark.parametrize("name", DIALECTS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(st.data())
def test_no_cut_changes_what_is_told(name: str, data: st.DataObject) -> None:
    spoken = dialect(name)
    tokens = data.draw(outputs(name))
    tools = [tool("f", {"a": {"type": "string"}, "b": {"type": "integer"}})]
    expected = parse(spoken, tools, join(tokens))
    assert parse(spoken, tools, bytewise(tokens)) == expected
    rng = random.Random(data.draw(st.integers(0, 1 << 16)))
    for _ in range(4):
        cut: list[Token] = []
        for token, control in join(tokens):
            at = 0
            while at < len(token) or control:
                size = len(token) if control else rng.randint(1, 12)
                cut.append((token[at : at + size], control))
                at += size
                if control:
                    break
        assert parse(spoken, tools, cut) == expected
    if not any(isinstance(delta, ask.CallStarted) for delta in expected):
        assert_all_told(expected, tokens)
    for delta in expected:
        if isinstance(delta, ask.CallEnded) and not (delta.truncated or delta.fault):
            assert isinstance(json.loads(arguments_of(expected, delta.index)), dict)


@pytest.mark.parametrize("name", DIALECTS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(st.data())
def test_without_tools_nothing_is_lost(name: str, data: st.DataObject) -> None:
    """Only the tags of thoughts and the layout beside them are no text."""
    spoken = dialect(name)
    tokens = data.draw(outputs(name))
    deltas = parse(spoken, [], tokens)
    assert not any(isinstance(delta, ask.CallStarted) for delta in deltas)
    whole = b"".join(token for token, _ in tokens).decode()
    if "<think>" not in whole:
        assert text_of(deltas) == whole
    assert_all_told(deltas, tokens)


def assert_all_told(deltas: list[ask.Delta], tokens: list[Token]) -> None:
    """Only the tags of thoughts, and the layout beside them, are not told."""
    whole = b"".join(token for token, _ in tokens).decode()
    told = "".join(delta.text for delta in deltas if isinstance(delta, ask.TextDelta | ask.ReasoningDelta))
    beside = re.compile(r"[</think>\s]")  # the letters of the tags
    assert beside.sub("", told) == beside.sub("", whole)


@pytest.mark.parametrize("name", DIALECTS)
def test_every_cut_off_output_says_so(name: str) -> None:
    """O23: whatever the last byte is, a call that is not told to be truncated has sound arguments."""
    spoken = dialect(name)
    tools = [tool("f", {"a": {"type": "string"}, "n": {"type": "array"}, "i": {"type": "integer"}})]
    calls = [ask.Call("c", "f", '{"a": "x </b> é\\n", "n": [1, {"k": "v"}], "i": 12}'), ask.Call("d", "f", "{}")]
    tokens = bytewise(write(spoken, spoken.calls([Piece("Well.")], calls)))
    told = 0
    for end in range(len(tokens)):
        deltas = parse(spoken, tools, tokens[:end])
        ends = [delta for delta in deltas if isinstance(delta, ask.CallEnded)]
        assert len(ends) == sum(isinstance(delta, ask.CallStarted) for delta in deltas)
        for call in ends:
            assert not call.fault or call.truncated
            if call.truncated:
                told += 1
                assert call is ends[-1]
            else:
                assert json.loads(arguments_of(deltas, call.index)) == json.loads(calls[call.index].arguments)
    assert told > 20
