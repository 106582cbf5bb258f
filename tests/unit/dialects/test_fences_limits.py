"""Schemas and grammars of a few bytes that cost the grammar engine more than it counts: none may hold up a server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.dialects.fencing import accepts, fence, tool
from tests.unit.dialects.outputs import DIALECTS, dialect, write
from zjournal import ask
from zjournal.dialects.fences import costs, schema, validate
from zjournal.dialects.fences.build import SCHEMA_BYTES_MAX, TOOLS_MAX, build
from zjournal.dialects.fences.custom import CROSSED_MAX, check
from zjournal.errors import BadRequest

NAMES = list(DIALECTS)


def wide(count: int, required: int = 0) -> dict[str, Any]:
    keys = [f"p{n}" for n in range(count)]
    return {"properties": {key: {"type": "integer"} for key in keys}, "required": keys[:required]}


@pytest.mark.parametrize("name", NAMES)
def test_a_tool_has_a_limit_of_parameters(name: str) -> None:
    """The engine walks rules by recursion: 3,000 of them in a chain ended the process."""
    built = fence(name, [tool("t", wide(schema.MEMBERS_MAX, 2))])
    assert built.loose == ()
    for count in (schema.MEMBERS_MAX + 1, 5_000):
        with pytest.raises(BadRequest) as caught:
            fence(name, [tool("t", wide(count))])
        assert caught.value.param == "tools[0].parameters"


@pytest.mark.parametrize("name", NAMES)
def test_wide_objects_keep_their_order_and_their_required_members(name: str) -> None:
    inner = {"type": "object", **wide(65, 2), "additionalProperties": {"type": "string"}}
    built = fence(name, [tool("t", {"properties": {"a": inner}, "required": ["a"]})])

    def takes(text: str) -> bool:
        return accepts(name, built, write(dialect(name), dialect(name).calls([], [ask.Call("", "t", text, "")])))

    for value in (
        {"p0": 1, "p1": 1},
        {"p0": 1, "p1": 1, "p2": 1},
        {"p0": 1, "p1": 1, "p33": 1, "p64": 1},
        {f"p{n}": 1 for n in range(65)},
        {"p0": 1, "p1": 1, "p64": 1, "q": "x", "r": "y"},
        {"p0": 1, "p1": 1, "q": "x"},
    ):
        assert takes(json.dumps({"a": value}, separators=(",", ":"))), value
    for value in ({}, {"p0": 1}, {"p1": 1}, {"p1": 1, "p0": 1}, {"p0": 1, "p1": 1, "p64": 1, "p33": 1}, {"q": "x"}):
        assert not takes(json.dumps({"a": value}, separators=(",", ":"))), value
    assert not takes('{"a":{"p0":1,"p1":1,"p2":1,"p2":1}}')


def test_a_nested_object_of_too_many_members_is_open() -> None:
    told = {"properties": {"a": {"type": "object", **wide(schema.MEMBERS_MAX + 1)}}}
    assert fence("chatml", [tool("t", told)]).loose == ("tools[0].parameters.properties.a.properties",)
    with pytest.raises(BadRequest) as caught:
        fence("chatml", [tool("t", told, strict=True)])
    assert caught.value.param == "tools[0].parameters.properties.a.properties"


PATTERNS = [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(30)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("told", "path"),
    [
        ({"properties": {"a": {"allOf": PATTERNS}}}, "properties.a.allOf"),
        (
            {
                "properties": {"a": {"allOf": [{"$ref": f"#/$defs/d{n}"} for n in range(30)]}},
                "$defs": {f"d{n}": one for n, one in enumerate(PATTERNS)},
            },
            "properties.a.allOf",
        ),
        (
            {
                "properties": {"a": {"$ref": "#/$defs/d0"}},
                "$defs": {
                    **{f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(30)},
                    "d30": {"type": "string"},
                },
            },
            "",
        ),
        ({"properties": {"a": {"type": "integer", "multipleOf": 999_999_937}}}, "properties.a.multipleOf"),
    ],
)
def test_what_no_limit_of_the_engine_would_end_is_left_out(name: str, told: Any, path: str) -> None:
    assert [one for one in fence(name, [tool("t", told)]).loose if one.startswith(f"tools[0].parameters.{path}")]


def test_more_parts_than_the_engine_has_symbols_are_refused_with_the_request() -> None:
    """And not by a response that fails once it has begun."""
    kinds = {"type": ["string", "integer", "null"]}
    tools = [tool(f"t{n}", {"properties": {f"p{n}_{at}": kinds for at in range(40)}}) for n in range(300)]
    with pytest.raises(BadRequest, match="too many parts"):
        fence("glm-4.5", tools)


def test_there_are_limits_of_tools_and_of_the_bytes_of_their_schemas() -> None:
    long = {"description": "a" * SCHEMA_BYTES_MAX}
    form = ask.Format("json_schema", "x", json.dumps(long).encode(), path="text.format")
    fence("chatml", [tool(f"t{n}", {}) for n in range(TOOLS_MAX)])
    for tools, asked, path in (
        ([tool(f"t{n}", {}) for n in range(TOOLS_MAX + 1)], None, "tools"),
        ([tool("t", long)], None, "tools"),
        ([], form, "text.format.schema"),
    ):
        with pytest.raises(BadRequest) as caught:
            fence("chatml", tools, ask.ToolChoice(), asked)
        assert caught.value.param == path


@pytest.mark.parametrize("sign", ["&", "~"])
def test_a_grammar_of_a_clients_own_has_a_limit_of_terms_that_cross(sign: str) -> None:
    """Those in quotes and in comments are none."""

    def read(count: int) -> None:
        terms = [f"{'~' if sign == '~' else ''}/[a-z{n}]+/" for n in range(count + (sign == "&"))]
        text = f'start: A "{sign}" // {sign}\nA: ' + (" & " if sign == "&" else " | ").join(terms)
        check(ask.Grammar("lark", text, "g"))

    read(CROSSED_MAX)
    with pytest.raises(BadRequest, match=f"more than {CROSSED_MAX}") as caught:
        read(CROSSED_MAX + 1)
    assert caught.value.param == "g"


@pytest.mark.parametrize(
    "definition",
    [
        "start: A\nA: " + " & ".join(f"/(.|\\n)*a.{{{n}}}b(.|\\n)*/" for n in range(20)),
        'start: %json {"allOf": []}',
        'start: %regex { "substring_words": "a b" }',
    ],
)
def test_a_grammar_of_a_clients_own_has_no_work_without_an_end(definition: str) -> None:
    own = ask.ToolSpec("t", None, b"{}", "tools[0]", kind="custom", grammar=ask.Grammar("lark", definition, "g"))
    with pytest.raises(BadRequest) as caught:
        build([own], ask.ToolChoice("required"), None, dialect("glm-4.5"), {})
    assert caught.value.param == "g"


def test_looking_at_a_result_has_a_limit_of_comparisons() -> None:
    """Lists that cannot be sorted are compared each with each, by the thread that serves."""
    many = json.dumps([[n] if n % 2 else {"a": n} for n in range(4_000)])
    assert validate.fault(b'{"uniqueItems": true}', many) == "it is too long to be checked"
    assert "non-unique" in validate.fault(b'{"uniqueItems": true}', "[[1], {}, [1]]")
    words = json.dumps({"items": {"enum": [[n] for n in range(10_000)]}}).encode()
    assert validate.fault(words, json.dumps([[9_999]] * 100)) == "it is too long to be checked"


DEAR = ("a.{40}b", ".*a.{40}b.*c.{40}d", "^[ab]*a[ab]{18}$", "(x|y).{30}z", r"\d.{30}x", "a" + "." * 30 + "b")


@pytest.mark.parametrize("pattern", DEAR)
@pytest.mark.parametrize("name", ["chatml", "glm-4.5", "qwen-xml"])
def test_a_pattern_with_too_many_states_is_left_out(name: str, pattern: str) -> None:
    """Such a fence compiled at once, and broke off with the answer half said."""
    told = {"properties": {"a": {"type": "string", "pattern": pattern, "maxLength": 90}}, "required": ["a"]}
    built = fence(name, [tool("t", told)])
    assert built.loose == ("tools[0].parameters.properties.a.pattern",)
    assert "too many states" in built.warnings[0]
    assert fence(name, [tool("t", told)]) == built, "a replay derives it again"
    with pytest.raises(BadRequest) as caught:
        fence(name, [tool("t", told, strict=True)])
    assert caught.value.param == "tools[0].parameters.properties.a.pattern"


@pytest.mark.parametrize(
    "pattern",
    [
        r"^\d{3}-\d{3}-\d{4}$",
        r"^[A-Za-z0-9_.-]{1,64}@[a-z0-9.-]{1,255}$",
        "^[a-z]{0,5000}$",
        "foo.{20}bar",
        "^.{1,100}:.{1,100}$",
        "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
        r"^(?:25[0-5]|2[0-4]\d|1?\d?\d)(?:\.(?:25[0-5]|2[0-4]\d|1?\d?\d)){3}$",
        r"^v?\d+\.\d+\.\d+(-[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?$",
    ],
)
def test_patterns_of_everyday_are_kept(pattern: str) -> None:
    assert fence("chatml", [tool("t", {"properties": {"a": {"type": "string", "pattern": pattern}}})]).loose == ()


def test_patterns_that_cost_too_much_are_tried_only_so_often() -> None:
    patterns = [f"a.{{{40 + n}}}b" for n in range(costs.DEAR_MAX + 1)]
    told = {"properties": {f"p{n}": {"type": "string", "pattern": one} for n, one in enumerate([*patterns, "^a{3}$"])}}
    built = fence("chatml", [tool("t", told)])
    assert built.loose == tuple(f"tools[0].parameters.properties.p{n}.pattern" for n in range(costs.DEAR_MAX + 2))
    assert [("was not tried" in one) for one in built.warnings] == [False] * costs.DEAR_MAX + [True] * 2


def test_names_of_members_are_tried_as_well() -> None:
    told = {"properties": {"a": {"type": "object", "patternProperties": {"^x": {}, "a.{40}b": {"type": "integer"}}}}}
    assert fence("chatml", [tool("t", told)]).loose == ("tools[0].parameters.properties.a.patternProperties",)


@pytest.mark.parametrize("key", ["enum", "const"])
def test_a_value_of_an_enumeration_has_a_limit(key: str) -> None:
    for length, loose in ((schema.WORD_CHARACTERS_MAX, False), (schema.WORD_CHARACTERS_MAX + 1, True)):
        value: Any = "x" * length
        built = fence("glm-4.5", [tool("t", {"properties": {"a": {key: [value] if key == "enum" else value}}})])
        assert built.loose == ((f"tools[0].parameters.properties.a.{key}",) if loose else ())


def test_many_words_and_many_definitions_are_no_fault() -> None:
    """Each once had every tool of its request refused, with an error that was not true."""
    words = {"properties": {"a": {"enum": [f"value number {n}" for n in range(2_000)]}}, "required": ["a"]}
    assert fence("qwen-xml", [tool("t", words)]).loose == ()
    defs = {f"d{n}": {"type": "string", "pattern": f"^a.{{{n}}}b$"} for n in range(30)}
    told = {"properties": {f"x{n}": {"$ref": f"#/$defs/d{n}"} for n in range(30)}, "$defs": defs}
    assert fence("qwen-xml", [tool("t", told)]).loose == ()


@pytest.mark.parametrize(
    ("syntax", "definition"),
    [
        ("lark", 'start: "a"{1000000000}'),
        ("lark", "start: /(?s:.*)a.{40}b/"),
        ("regex", "(?s:.*)a.{40}b"),
    ],
)
def test_a_grammar_of_a_clients_own_that_costs_too_much_is_refused(syntax: Any, definition: str) -> None:
    grammar = ask.Grammar(syntax, definition, path="tools[0].format.definition")
    one = ask.ToolSpec("t", kind="custom", grammar=grammar, path="tools[0]")
    with pytest.raises(BadRequest) as caught:
        fence("glm-4.5", [one])
    assert caught.value.param == "tools[0].format.definition"
    assert "too many" in caught.value.message.lower()


def test_an_expression_has_a_limit_of_repetitions() -> None:
    """20,000 of them took half a minute to walk through, and a second for each mask."""
    told = {"properties": {"a": {"type": "string", "pattern": "a?" * 20_000 + "a" * 20_000}}}
    built = fence("chatml", [tool("t", told)])
    assert built.loose == ("tools[0].parameters.properties.a.pattern",)
    assert "repetitions" in built.warnings[0]
