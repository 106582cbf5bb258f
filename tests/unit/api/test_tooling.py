"""Tools, tool_choice and formats of both protocols: what is asked for, or the path of what cannot be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zjournal.api import chat, responses
from zjournal.api.custom import Input
from zjournal.api.tooling import arguments_of
from zjournal.ask import Ask, Call, Format, Grammar, Result, ToolChoice, ToolSpec
from zjournal.errors import BadRequest

CUSTOM = b'{"type":"object","properties":{"input":{"type":"string"}},"required":["input"],"additionalProperties":false}'
SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}


def chat_ask(**body: Any) -> Ask:
    tools = [
        {"type": "function", "function": {"name": "ls", "strict": True}},
        {"type": "web_search"},
        {"type": "custom", "custom": {"name": "patch"}},
    ]
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": tools, **body}
    return chat.decode(json.dumps(asked).encode(), {})


def responses_ask(**body: Any) -> Ask:
    tools = [
        {"type": "function", "name": "ls", "strict": True},
        {"type": "web_search"},
        {"type": "custom", "name": "patch"},
    ]
    return responses.decode(json.dumps({"model": "m", "input": "hi", "tools": tools, **body}).encode(), {})


def nested(value: Any) -> Any:
    """A tool, or what names one, as Chat spells it."""
    kind = value["type"]
    return {"type": kind, kind: {key: inner for key, inner in value.items() if key != "type"}}


@pytest.mark.parametrize("asked", [chat_ask, responses_ask])
def test_how_tools_may_be_called(asked: Any) -> None:
    assert asked().choice == ToolChoice()
    assert asked(tool_choice=None).choice == ToolChoice()
    assert asked(tool_choice="none").choice == ToolChoice("none")
    assert asked(tool_choice="required", parallel_tool_calls=False).choice == ToolChoice("required", parallel=False)


@pytest.mark.parametrize("kind, name", [("function", "ls"), ("custom", "patch")])
def test_a_named_tool_must_be_called_and_once(kind: str, name: str) -> None:
    flat = {"type": kind, "name": name}
    assert responses_ask(tool_choice=flat).choice == ToolChoice("required", (name,), parallel=False)
    assert chat_ask(tool_choice=nested(flat)).choice == ToolChoice("required", (name,), parallel=False)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_leave_out_what_is_not_run_here(mode: Any) -> None:
    tools = [{"type": "function", "name": "ls"}, {"type": "web_search"}, {"type": "custom", "name": "patch"}]
    flat = {"type": "allowed_tools", "mode": mode, "tools": tools}
    assert responses_ask(tool_choice=flat).choice == ToolChoice(mode, ("ls", "patch"))
    inner = [nested(tool) if tool["type"] != "web_search" else tool for tool in tools]
    asked = chat_ask(tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": inner}})
    assert asked.choice == ToolChoice(mode, ("ls", "patch"))


def test_where_nothing_is_allowed_nothing_can_be_called() -> None:
    only_hosted = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    assert responses_ask(tool_choice=only_hosted).choice == ToolChoice("none")


def test_a_custom_tool_is_told_as_a_function_of_one_text() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
    asked = responses_ask(tools=[{"type": "custom", "name": "p", "description": "d", "format": grammar}])
    said = Grammar("lark", "start: /x/", "tools[0].format")
    assert asked.tools == (ToolSpec("p", "d", CUSTOM, "tools[0]", False, "custom", said),)
    inner = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "x+"}}
    asked = chat_ask(tools=[{"type": "custom", "custom": {"name": "p", "format": inner}}])
    said = Grammar("regex", "x+", "tools[0].custom.format.grammar")
    assert asked.tools == (ToolSpec("p", None, CUSTOM, "tools[0].custom", False, "custom", said),)
    assert responses_ask(tools=[{"type": "custom", "name": "p", "format": {"type": "text"}}]).tools[0].grammar is None


@pytest.mark.parametrize("asked", [chat_ask, responses_ask])
def test_strict_is_asked_for_by_the_word_only(asked: Any) -> None:
    assert [tool.strict for tool in asked().tools] == [True, False]


def test_the_form_of_the_text() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    raw = json.dumps(SCHEMA).encode()
    assert responses_ask(text={"format": schema}).format == Format("json_schema", "n", raw, True, "text.format")
    assert chat_ask(response_format=nested(schema)).format == Format(
        "json_schema", "n", raw, True, "response_format.json_schema"
    )
    assert responses_ask(text={"format": {"type": "json_object"}}).format == Format("json_object", path="text.format")
    assert chat_ask(response_format={"type": "json_object"}).format == Format("json_object", path="response_format")
    for nothing in (None, {"type": "text"}):
        assert responses_ask(text={"format": nothing}).format is None
        assert chat_ask(response_format=nothing).format is None


def test_custom_calls_come_back_as_what_the_model_wrote() -> None:
    asked = responses_ask(
        input=[
            {"type": "custom_tool_call", "id": "ctc_1", "call_id": "c", "name": "patch", "input": 'a "☃"\n'},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
        ]
    )
    assert asked.items[0] == Call("c", "patch", '{"input": "a \\"☃\\"\\n"}', "input[0]")
    assert isinstance(asked.items[1], Result)
    called = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "x"}}
    asked = chat_ask(messages=[{"role": "assistant", "tool_calls": [called]}])
    assert asked.items == (Call("c", "patch", '{"input": "x"}', "messages[0].tool_calls[0].custom"),)


def test_an_id_stands_once_in_a_turn_and_may_come_again_in_another() -> None:
    """O24: duplicate ids from the client's history are refused with a clear path."""

    def called(*ids: str) -> dict[str, Any]:
        calls = [{"id": name, "type": "function", "function": {"name": "ls", "arguments": "{}"}} for name in ids]
        return {"role": "assistant", "content": None, "tool_calls": calls}

    result = {"role": "tool", "tool_call_id": "a", "content": "x"}
    assert len(chat_ask(messages=[called("a"), result, called("a", "b"), result]).items) == 5
    with pytest.raises(BadRequest) as caught:
        chat_ask(messages=[called("a"), result, called("a", "b", "a")])
    assert caught.value.param == "messages[2].tool_calls[2].id"
    call = {"type": "function_call", "call_id": "a", "name": "ls", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "a", "output": "x"}
    assert len(responses_ask(input=[call, output, call, output]).items) == 4
    with pytest.raises(BadRequest) as caught:
        responses_ask(input=[call, {"role": "assistant", "content": "and"}, call, output])
    assert caught.value.param == "input[2].call_id"


BAD_CHOICES: list[tuple[Any, str, str]] = [  # as Responses spells it; the paths of both
    ("any", "tool_choice", "tool_choice"),
    (5, "tool_choice", "tool_choice"),
    ({"name": "ls"}, "tool_choice.type", ""),
    ({"type": "web_search"}, "tool_choice.type", "tool_choice.type"),
    ({"type": "function", "name": "rm"}, "tool_choice.name", "tool_choice.function.name"),
    ({"type": "custom", "name": "ls"}, "tool_choice.name", "tool_choice.custom.name"),
    ({"type": "function"}, "tool_choice.name", "tool_choice.function.name"),
    ({"type": "function", "name": ""}, "tool_choice.name", "tool_choice.function.name"),
    (
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
        "tool_choice.tools",
        "tool_choice.allowed_tools.tools",
    ),
    ({"type": "allowed_tools", "mode": "some", "tools": []}, "tool_choice.mode", "tool_choice.allowed_tools.mode"),
    ({"type": "allowed_tools", "mode": "auto"}, "tool_choice.tools", "tool_choice.allowed_tools.tools"),
]


@pytest.mark.parametrize(("choice", "flat", "deep"), BAD_CHOICES, ids=lambda value: str(value)[:50])
def test_a_choice_that_cannot_be_is_named(choice: Any, flat: str, deep: str) -> None:
    with pytest.raises(BadRequest) as caught:
        responses_ask(tool_choice=choice)
    assert caught.value.param == flat
    if deep:
        with pytest.raises(BadRequest) as caught:
            chat_ask(tool_choice=nested(choice) if isinstance(choice, dict) else choice)
        assert caught.value.param == deep


def test_the_tool_that_is_not_there_is_named_where_it_stands() -> None:
    tools = [{"type": "function", "name": "ls"}, {"type": "function", "name": "rm"}]
    with pytest.raises(BadRequest, match="'rm', and `tools` has no function") as caught:
        responses_ask(tool_choice={"type": "allowed_tools", "mode": "auto", "tools": tools})
    assert caught.value.param == "tool_choice.tools[1].name"
    inner = {"mode": "auto", "tools": [nested(tool) for tool in tools]}
    with pytest.raises(BadRequest) as caught:
        chat_ask(tool_choice={"type": "allowed_tools", "allowed_tools": inner})
    assert caught.value.param == "tool_choice.allowed_tools.tools[1].function.name"


@pytest.mark.parametrize("asked", [chat_ask, responses_ask])
def test_a_call_cannot_be_required_where_there_is_nothing_to_call(asked: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        asked(tools=[{"type": "web_search"}], tool_choice="required")
    assert caught.value.param == "tool_choice"


BAD_FORMATS: list[tuple[Any, str]] = [  # behind `response_format` and `text.format`
    ("json", ""),
    ({"schema": {}}, ".type"),
    ({"type": "grammar"}, ".type"),
]
BAD_SCHEMAS: list[tuple[Any, str]] = [
    ({"type": "json_schema", "schema": {}}, ".name"),
    ({"type": "json_schema", "name": "n"}, ".schema"),
    ({"type": "json_schema", "name": "n", "schema": [1]}, ".schema"),
    ({"type": "json_schema", "name": "n", "schema": {}, "strict": 1}, ".strict"),
]


@pytest.mark.parametrize(("form", "path"), [*BAD_FORMATS, *BAD_SCHEMAS], ids=lambda value: str(value)[:50])
def test_a_form_that_cannot_be_is_named(form: Any, path: str) -> None:
    with pytest.raises(BadRequest) as caught:
        responses_ask(text={"format": form})
    assert caught.value.param == f"text.format{path}"
    deep = (form, path) not in BAD_FORMATS
    with pytest.raises(BadRequest) as caught:
        chat_ask(response_format=nested(form) if deep else form)
    assert caught.value.param == f"response_format{'.json_schema' * deep}{path}"


@pytest.mark.parametrize(
    ("form", "path"),
    [
        ({"type": "grammar"}, "syntax"),
        ({"type": "grammar", "syntax": "lark"}, "definition"),
        ({"type": "grammar", "syntax": "bnf", "definition": "x"}, "syntax"),
        ({"type": "yaml"}, "type"),
    ],
)
def test_a_grammar_that_is_not_whole_is_named(form: Any, path: str) -> None:
    with pytest.raises(BadRequest) as caught:
        responses_ask(tools=[{"type": "custom", "name": "p", "format": form}])
    assert caught.value.param == f"tools[0].format.{path}"


# --- the input of custom tools ------------------------------------------------------------------------


def told(arguments: str, cuts: list[int]) -> list[str]:
    taker, at, parts = Input(), 0, []
    for number in range(len(arguments) + 1):
        size = cuts[number % len(cuts)]
        parts.append(taker.feed(arguments[at : at + size]))
        at += size
    return [*parts, taker.end()]


@given(
    text=st.text('ab"\\\n/u{}é☃𝄞', max_size=30), ascii_only=st.booleans(), cuts=st.lists(st.integers(1, 7), min_size=1)
)
def test_the_input_is_the_text_however_it_is_spelled_and_cut(text: str, ascii_only: bool, cuts: list[int]) -> None:
    assert "".join(told(json.dumps({"input": text}, ensure_ascii=ascii_only), cuts)) == text
    assert "".join(told(arguments_of(text), cuts)) == text


def test_the_input_is_told_as_it_comes() -> None:
    assert told('{"input": "abc\\u00e9', [1])[-8:] == ["", "", "", "", "", "é", "", ""]
    assert told('{"input": "abc', [12]) == ["a", "bc", *[""] * 14]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "cut', "cut"),
        ('{"input": "cut\\u26', "cut\\u26"),
        ('{"why": 1, "input": "late"}', "late"),
        ('{"input": 5}', '{"input": 5}'),
        ("[1]", "[1]"),
        ("{", "{"),
        ('{"input": "\\ud83dx"}', "�x"),
    ],
)
def test_arguments_of_another_form_are_not_lost(arguments: str, text: str) -> None:
    assert "".join(told(arguments, [3])) == text
