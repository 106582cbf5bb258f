"""What fences let through, in every dialect: right calls in any order, and nothing that a parser would stumble over."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.dialects.fencing import accepts, control, engine, fence, ids, matcher, tool, walk
from tests.unit.dialects.outputs import DIALECTS, Token, calls_of, dialect, parse, text_of, write
from zjournal import ask
from zjournal.dialects.fences import validate
from zjournal.dialects.fences.build import build
from zjournal.errors import BadRequest

NAMES = list(DIALECTS)
TYPELESS = [name for name in NAMES if name.startswith(("glm", "qwen"))]  # the schema tells what a value is
JSON = [name for name in NAMES if name.startswith(("chatml", "llama3"))]
TAGGED = [name for name in NAMES if name not in JSON]

WEATHER = tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            "opts": {
                "type": "object",
                "properties": {
                    "note": {"type": "string"},
                    "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
                },
                "additionalProperties": False,
            },
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
)
TIME = tool(
    "get_time",
    {"properties": {"tz": {"type": "string", "pattern": "^[A-Z][a-z]+/[A-Z][a-z_]+$"}}, "required": ["tz"]},
)
NOOP = tool("noop", {})
TREE = tool(
    "tree",
    {
        "type": "object",
        "properties": {"root": {"$ref": "#/$defs/n"}},
        "required": ["root"],
        "$defs": {
            "n": {
                "type": "object",
                "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
                "required": ["v"],
                "additionalProperties": False,
            }
        },
    },
)
MIXED = tool(
    "mixed",
    {
        "type": "object",
        "properties": {
            "maybe": {"type": ["string", "null"]},
            "either": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "integer"}]},
            "any": {},
            "one_of": {"enum": ["x", "null", None, 3]},
            "flag": {"type": "boolean"},
            "day": {"type": "string", "format": "date"},
        },
    },
)
TOOLS = [WEATHER, TIME, NOOP, TREE, MIXED]
CITY = {"city": "a", "unit": "celsius"}
ODD = 'a < b && </x> "q" \\n é 漢字 😀\n\nline'


def rendered(name: str, *calls: tuple[str, Any]) -> list[Token]:
    """Calls as the dialect writes them."""
    said = [ask.Call(f"c{at}", one, json.dumps(given, ensure_ascii=False)) for at, (one, given) in enumerate(calls)]
    return write(dialect(name), dialect(name).calls([], said))


def lets(name: str, *calls: tuple[str, Any], tools: list[ask.ToolSpec] | None = None, **more: Any) -> bool:
    """Whether the fence of a required call lets these through."""
    return accepts(name, fence(name, tools or TOOLS, **more), rendered(name, *calls))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "calls",
    [
        [("get_weather", {"city": "Paris", "unit": "celsius"})],
        [("get_weather", {"unit": "celsius", "city": "Paris"})],
        [("get_weather", {"days": 14, **CITY})],
        [("get_weather", {"city": "", "unit": "celsius"})],
        [("get_weather", {"city": ODD, "unit": "celsius", "opts": {"note": "x\ny", "tags": ["a", "b"]}})],
        [("get_time", {"tz": "Europe/Rome"})],
        [("noop", {})],
        [("noop", {}), ("get_time", {"tz": "Europe/Rome"}), ("noop", {})],
        [("tree", {"root": {"v": 1, "kids": [{"v": 2, "kids": [{"v": 3}]}]}})],
        [("mixed", {})],
        [("mixed", {"maybe": None})],
        [("mixed", {"maybe": "nullx", "either": "abcd"})],
        [("mixed", {"either": 12, "any": [1, {"a": None}], "one_of": None, "flag": True})],
        [("mixed", {"any": "text", "one_of": 3, "day": "2026-02-03"})],
        [("mixed", {"any": {"a": "b"}, "one_of": "x"})],
    ],
)
def test_right_calls_are_let_through_and_parsed(name: str, calls: list[tuple[str, Any]]) -> None:
    assert lets(name, *calls)
    assert calls_of(parse(dialect(name), TOOLS, rendered(name, *calls))) == calls


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "call",
    [
        ("get_weather", {"unit": "celsius"}),
        ("get_weather", {"city": "a", "unit": "kelvin"}),
        ("get_weather", {"days": 15, **CITY}),
        ("get_weather", {"other": 1, **CITY}),
        ("get_weather", {**CITY, "opts": {"notes": "x"}}),
        ("get_weather", {**CITY, "opts": {"tags": ["a", "b", "c", "d"]}}),
        ("get_time", {"tz": "Europe/rome"}),
        ("get_time", {}),
        ("noop", {"a": 1}),
        ("tree", {"root": {"v": 1, "kids": [{"v": 2, "kids": [{}]}]}}),
        ("mixed", {"either": "abcde"}),
        ("mixed", {"either": 1.5}),
        ("mixed", {"one_of": "y"}),
        ("mixed", {"day": "2026-13-03"}),
        ("mixed", {"flag": 1}),
        ("get_weathers", CITY),  # a name that nearly is one (bug 22)
        ("get", CITY),
    ],
)
def test_wrong_calls_are_not(name: str, call: tuple[str, Any]) -> None:
    assert not lets(name, call)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in TYPELESS])
def test_a_number_is_not_said_as_a_string(name: str) -> None:
    assert not lets(name, ("get_weather", {**CITY, "days": "14"}))


@pytest.mark.parametrize("name", JSON)
def test_a_parameter_comes_once(name: str) -> None:
    text = {"chatml": '<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>'}
    form = text.get(name.removesuffix("-text"), '{"name": "get_weather", "parameters": %s}')
    built = fence(name, TOOLS)
    assert accepts(name, built, form % '{"city": "a", "unit": "celsius"}')
    assert not accepts(name, built, form % '{"city": "a", "city": "b", "unit": "celsius"}')
    assert not accepts(name, built, form % '{"city": "a", "city": "b"}')


@pytest.mark.parametrize("name", TAGGED)
def test_a_parameter_comes_once_in_tags(name: str) -> None:
    one, none = rendered(name, ("get_time", {"tz": "Europe/Rome"})), rendered(name, ("get_time", {}))
    begin = next(at for at, (a, b) in enumerate(zip(one, none, strict=False)) if a != b)
    end = next(at for at, (a, b) in enumerate(zip(one[::-1], none[::-1], strict=False)) if a != b)
    assert accepts(name, fence(name, TOOLS), one)
    assert not accepts(name, fence(name, TOOLS), [*one[: len(one) - end], *one[begin:]])


@pytest.mark.parametrize("name", NAMES)
def test_the_choice_binds(name: str) -> None:
    noop, time = ("noop", {}), ("get_time", {"tz": "Europe/Rome"})
    assert lets(name, noop, time)
    assert not lets(name, noop, time, choice=ask.ToolChoice("required", parallel=False))
    assert lets(name, noop, time, choice=ask.ToolChoice("required", most=2))
    assert not lets(name, noop, time, noop, choice=ask.ToolChoice("required", most=2))
    assert not lets(name, noop, time, choice=ask.ToolChoice("required", most=1))
    assert lets(name, time, choice=ask.ToolChoice("required", ("get_time",)))
    assert not lets(name, noop, choice=ask.ToolChoice("required", ("get_time",)))
    assert not accepts(name, fence(name, TOOLS), "")
    assert not accepts(name, fence(name, TOOLS), "I would rather talk.")


@pytest.mark.parametrize("name", NAMES)
def test_allowed_tools_and_one_call_alone_bind_under_auto(name: str) -> None:
    """Also where a call begins as text does: the parser knows all tools, and must not find one that is not allowed."""
    noop, time = rendered(name, ("noop", {})), rendered(name, ("get_time", {"tz": "Europe/Rome"}))
    both = rendered(name, ("noop", {}), ("noop", {}))
    alone, calls, other = (b"".join(data for data, _ in tokens).decode().lstrip("\n") for tokens in (noop, both, time))
    built = fence(name, TOOLS, ask.ToolChoice("auto", ("noop",)))
    assert accepts(name, built, alone) and accepts(name, built, calls)
    assert not accepts(name, built, other)
    assert not accepts(name, fence(name, TOOLS, ask.ToolChoice("auto", ("noop",), parallel=False)), calls)


@pytest.mark.parametrize("name", NAMES)
def test_no_choice_of_a_tool_that_is_none(name: str) -> None:
    with pytest.raises(BadRequest, match="no tool 'rm'") as caught:
        fence(name, TOOLS, ask.ToolChoice("required", ("rm",)))
    assert caught.value.param == "tool_choice"
    with pytest.raises(BadRequest, match="a call is required"):
        fence(name, [], ask.ToolChoice("required"))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "llama3"])
def test_auto_begins_at_the_trigger(name: str) -> None:
    built = fence(name, TOOLS, ask.ToolChoice("auto"))
    bounds = built.bounds
    assert bounds is not None and not bounds.whole and bounds.triggers
    tokens = rendered(name, ("noop", {}), ("get_time", {"tz": "Europe/Rome"}))
    text = b"".join(data for data, _ in tokens).decode().lstrip("\n")
    assert text.startswith(bounds.triggers[0][0])
    assert accepts(name, built, text)
    assert not accepts(name, built, "Well. " + text)  # the engine feeds it from the trigger on
    assert not accepts(name, built, text.replace("get_time", "get_tim"))


def test_llama3_text_is_free_until_it_is_a_call() -> None:
    built = fence("llama3", TOOLS, ask.ToolChoice("auto"))
    assert built.bounds is not None and built.bounds.whole
    for text in (
        *(
            "",
            "Hello {",
            '{"a": 1}',
            '{"name": "bob", "parameters": {}}',
            '{"name": "noop", "x": 1}',
            '{"type": "object"}',
        ),
        *('{"name": "noop", "parameters": {}}', '{"name" : "noop" ,\n"parameters":{}}'),
        'Sure.<|python_tag|>{"name": "noop", "parameters": {}}; {"name": "noop", "parameters": {}}',
    ):
        assert accepts("llama3", built, text), text
    for text in (
        *(
            '{"name": "get_weather", "parameters": {"city": "a"}}',
            '{"name": "noop"}',
            '{"parameters": {}, "name": "noop"}',
        ),
        *('{"type": "function", "name": "noop", "parameters": {}}', '<|python_tag|>{"name": "no", "parameters": {}}'),
    ):
        assert not accepts("llama3", built, text), text


@pytest.mark.parametrize("name", NAMES)
def test_no_fence_where_nothing_is_to_be_kept(name: str) -> None:
    plain = fence(name, [], ask.ToolChoice("auto")).bounds
    assert (plain is None) == (dialect(name).reasoning is None)
    assert plain is None or not (plain.grammar or plain.triggers or plain.banned or plain.whole)
    none = fence(name, TOOLS, ask.ToolChoice("none")).bounds
    tags = [i for tag, i in control(name).items() if "think" not in tag]
    assert (list(none.banned) if none is not None else []) == sorted(tags)  # bug 59
    assert none is None or not (none.grammar or none.triggers)


# --- what random outputs show -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(2))
def test_whatever_is_let_through_parses_and_validates(name: str, seed: int) -> None:
    built = fence(name, TOOLS)
    ended = [output for at in range(5) if (output := walk(name, built, seed * 100 + at)) is not None]
    assert ended
    for tokens in ended:
        deltas = parse(dialect(name), TOOLS, tokens)
        assert not text_of(deltas).strip()
        calls = calls_of(deltas)
        assert calls
        for called, given in calls:
            one = next(each for each in TOOLS if each.name == called)
            assert not validate.fault(one.parameters, json.dumps(given))


# --- instructive bugs of others ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", ["x </tool_call> y", "} ]}", "</parameter>", "</｜DSML｜parameter>", "<|im_end|>"])
def test_closing_tags_and_braces_in_strings_are_data(name: str, value: str) -> None:  # bugs 11 to 14
    call = ("get_weather", {"city": value, "unit": "celsius"})
    built, tokens = fence(name, TOOLS), rendered(name, call)
    assert accepts(name, built, tokens)
    assert calls_of(parse(dialect(name), TOOLS, tokens)) == [call]


@pytest.mark.parametrize("name", ["qwen-xml", "qwen-xml-text"])
@pytest.mark.parametrize(
    "value", ["a</parameter>\n<parameter=x", "</PARAMETER> </function>", "</parameter></functıon>"]
)
def test_what_would_end_a_value_is_kept_out_of_it(name: str, value: str) -> None:  # bug 14
    assert not lets(name, ("get_weather", {"city": value, "unit": "celsius"}))
    inner = {"note": value.replace("ı", "i")}
    assert not lets(name, ("get_weather", {**CITY, "opts": inner}))
    assert lets(name, ("get_weather", {**CITY, "opts": {"note": "<</paramet <p></p> </parameterx".replace("rx", "x")}}))


@pytest.mark.parametrize("name", [name for name in NAMES if control(name)])
def test_control_tokens_are_in_no_value(name: str) -> None:  # bug 15
    tokens = rendered(name, ("get_weather", CITY))
    at = next(at for at, (data, special) in enumerate(tokens) if not special and b"celsius" in data)
    split = tokens[at][0].index(b"celsius") + 3
    for tag in control(name):
        data = tokens[at][0]
        spoiled = [*tokens[:at], (data[:split], False), (tag.encode(), True), (data[split:], False), *tokens[at + 1 :]]
        assert not accepts(name, fence(name, TOOLS), spoiled), tag


@pytest.mark.parametrize("name", JSON)
def test_white_space_between_json_ends(name: str) -> None:  # bug 26
    text = "".join(data.decode() for data, _ in rendered(name, ("get_weather", CITY)))
    built = fence(name, TOOLS)
    assert accepts(name, built, text.replace(', "unit"', ',\n    "unit"'))
    assert not accepts(name, built, text.replace(', "unit"', ',  "unit"'))
    assert not accepts(name, built, text.replace(', "unit"', "," + "\n" * 2 + '"unit"'))
    nested = '{"city": "a", "unit": "celsius", "opts": {\n  "note":"x"}}'
    assert accepts(name, built, text.replace('{"city": "a", "unit": "celsius"}', nested))
    assert not accepts(name, built, text.replace('{"city": "a", "unit": "celsius"}', nested.replace("\n", "\n\n")))


@pytest.mark.parametrize("name", NAMES)
def test_numbers_end(name: str) -> None:  # bug 26, of digits
    one = tool(
        "f", {"properties": {"i": {"type": "integer"}, "n": {"type": "number"}, "m": {"type": ["integer", "string"]}}}
    )
    assert lets(name, ("f", {"i": 10**39, "n": 6.02e23, "m": -(10**39)}), tools=[one])
    assert not lets(name, ("f", {"i": 10**40}), tools=[one])
    assert not lets(name, ("f", {"n": 10**40}), tools=[one])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("parameters", [{}, {"type": "object"}, {"type": "object", "properties": {}}])
def test_tools_without_parameters(name: str, parameters: Any) -> None:  # bugs 30 and 43
    one = tool("ping", parameters, strict=True)
    assert lets(name, ("ping", {}), tools=[one])
    assert lets(name, ("ping", {}), ("ping", {}), tools=[one])
    assert not lets(name, ("ping", {"a": 1}), tools=[one])


@pytest.mark.parametrize("name", NAMES)
def test_another_dialect_cannot_be_begun_inside_a_call(name: str) -> None:  # bugs 40 and 56
    for other in NAMES:
        if dialect(other).name != dialect(name).name:
            tokens = [
                (data, special and data.decode() in control(name)) for data, special in rendered(other, ("noop", {}))
            ]
            assert not accepts(name, fence(name, TOOLS), tokens), other


@pytest.mark.parametrize("name", NAMES)
def test_no_wrapper_around_the_arguments(name: str) -> None:  # bug 42
    assert not lets(name, ("get_weather", {"arguments": CITY}))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a"},
        {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1},
        {"type": "object", "properties": {"x": {"$ref": "#/properties/x"}}, "required": ["x"]},
        {"type": "string", "minLength": 3, "maxLength": 1},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "boolean", "enum": ["yes"]},
        False,
    ],
)
def test_what_allows_no_value_is_found(name: str, schema: Any) -> None:  # bug 44
    parameters = {
        "type": "object",
        "properties": {"x": schema},
        "required": ["x"],
        "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}},
    }
    with pytest.raises(BadRequest, match=r"'hopeless' can never be called") as caught:
        fence(name, [NOOP, tool("hopeless", parameters, path="tools[1].function")])
    assert caught.value.param == "tools[1].function.parameters.properties.x"


@pytest.mark.parametrize("name", NAMES)
def test_recursion_that_ends_is_none_of_these(name: str) -> None:
    deep: Any = {"v": 1}
    for _ in range(40):
        deep = {"v": 1, "kids": [deep]}
    assert lets(name, ("tree", {"root": deep}))


@pytest.mark.parametrize("name", NAMES)
def test_pattern_and_length_both_hold(name: str) -> None:  # bug 45
    one = tool("f", {"properties": {"s": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}}})
    assert lets(name, ("f", {"s": "abc"}), tools=[one])
    assert not lets(name, ("f", {"s": "abcd"}), tools=[one])
    assert not lets(name, ("f", {"s": "ABC"}), tools=[one])
    words = tool(
        "f", {"properties": {"s": {"type": "string", "enum": ["ab", "abc", "A"], "maxLength": 2, "pattern": "a"}}}
    )
    assert [text for text in ("ab", "abc", "A") if lets(name, ("f", {"s": text}), tools=[words])] == ["ab"]
    loose = tool("f", {"properties": {"s": {"type": "string", "pattern": "b|^c", "minLength": 2}}})
    assert [text for text in ("b", "ab", "cx", "xc") if lets(name, ("f", {"s": text}), tools=[loose])] == ["ab", "cx"]


def test_the_grammar_names_no_id_beyond_the_tags() -> None:  # bug 50, as far as it is a grammar's
    built = fence("glm-4.7", TOOLS)
    assert built.bounds is not None
    one = matcher("glm-4.7", built.bounds.grammar).deep_copy()
    mask = int.from_bytes(one.compute_bitmask(), "little")
    assert mask >> engine("glm-4.7").vocab_size == 0
    assert [i for i in range(engine("glm-4.7").vocab_size) if mask >> i & 1] == [control("glm-4.7")["<tool_call>"]]


# --- schemas that cannot be kept --------------------------------------------------------------------------

REFUSED: list[tuple[Any, str]] = [
    ({"not": {"type": "string"}}, ".not"),
    ({"type": "array", "uniqueItems": True}, ".uniqueItems"),
    ({"type": "array", "items": {"if": {}, "then": {}}}, ".items.if"),
    ({"anyOf": [{"type": "null"}, {"type": "object", "propertyNames": {}}]}, ".anyOf[1].propertyNames"),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, ".oneOf"),
    ({"$ref": "https://example.com/schema.json"}, ".$ref"),
    ({"type": "dict"}, ".type"),
    ({"type": "string", "pattern": "^(?!a)b"}, ".pattern"),
    ({"type": "object", "properties": {"y": {"items": {"pattern": "(?<=x)y"}}}}, ".properties.y.items.pattern"),
]


@pytest.mark.parametrize("name", ["chatml", "dsml-v4", "glm-4.7", "qwen-xml", "llama3"])
@pytest.mark.parametrize(("schema", "where"), REFUSED)
def test_strict_schemas_are_kept_or_refused(name: str, schema: Any, where: str) -> None:
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    with pytest.raises(BadRequest) as caught:
        fence(name, [NOOP, tool("f", parameters, strict=True, path="tools[2].function")])
    assert caught.value.param is not None
    assert caught.value.param.startswith("tools[2].function.parameters.properties.x")
    if not (where == ".pattern" and name not in JSON):  # there the whole parameter is at fault
        assert caught.value.param == f"tools[2].function.parameters.properties.x{where}"
    built = fence(name, [NOOP, tool("f", parameters, path="tools[2].function")])
    assert built.warnings
    assert all("tools[2].function.parameters" in warning for warning in built.warnings)


def test_only_that_value_is_free() -> None:
    properties = {"x": {"type": "string", "pattern": "^(?!a)b"}, "y": {"type": "integer"}}
    one = tool("f", {"properties": properties, "required": ["y"]})
    for name in NAMES:
        assert lets(name, ("f", {"x": "anything", "y": 1}), tools=[one])
        assert not lets(name, ("f", {"x": "anything"}), tools=[one])
        assert not lets(name, ("f", {"x": "anything", "y": "a"}), tools=[one])


def test_a_result_is_checked_against_the_whole_schema() -> None:
    one = tool("f", {"properties": {"x": {"type": "array", "uniqueItems": True}}})
    assert validate.arguments(one, '{"x": [1, 2]}') == ""
    assert "non-unique" in validate.arguments(one, '{"x": [1, 1]}')
    assert validate.arguments(one, '{"x": [1') == "it is no JSON"


def test_a_check_is_bounded_and_fetches_nothing() -> None:
    defs: dict[str, Any] = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    doubling = tool("f", {"$ref": "#/$defs/d0", "$defs": {**defs, "d40": {"not": {"required": ["a"]}}}})
    assert validate.arguments(doubling, "{}") == "it is too long to be checked"
    slow = tool("f", {"properties": {"x": {"pattern": "^(a+)+$"}}})
    assert validate.arguments(slow, json.dumps({"x": "a" * 40 + "b"})) == ""  # patterns are not tried
    assert validate.arguments(tool("f", {"$ref": "http://127.0.0.1:9/x"}), "{}") == ""
    assert validate.arguments(tool("f", {"type": "dict"}), "{}") == ""


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([tool("f", {}), tool("f", {}, path="tools[1]")], "tools[1].name"),
        ([tool("two words", {})], "tools[0].name"),
        ([tool('a"b', {})], "tools[0].name"),
        ([tool("x" * 129, {})], "tools[0].name"),
        ([tool("", {})], "tools[0].name"),
        ([ask.ToolSpec("f", None, b" " * (1 << 20) + b"{}", "tools[0]")], "tools"),
        ([tool(f"f{n}", {}) for n in range(513)], "tools"),
    ],
)
def test_limits_and_names(tools: list[ask.ToolSpec], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        fence("chatml", tools)
    assert caught.value.param == param


def test_a_schema_too_deep_is_refused() -> None:
    deep: Any = {"type": "string"}
    for _ in range(100):
        deep = {"type": "array", "items": deep}
    with pytest.raises(BadRequest, match="too deep"):
        fence("chatml", [tool("f", {"properties": {"x": deep}})])


def test_a_chain_of_definitions_is_a_fault_of_the_request_if_it_is_too_long() -> None:
    count = 500
    defs: dict[str, Any] = {f"d{n}": {"properties": {"x": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(count)}
    defs[f"d{count}"] = {"type": "null"}
    inner = {"properties": {f"d{n}": {"$ref": f"#/$defs/d{n}"} for n in range(count, -1, -1)}, "required": ["d0"]}
    with pytest.raises(BadRequest, match="nested too deep"):
        fence("chatml", [tool("f", {"properties": {"o": inner}, "$defs": defs})])


@pytest.mark.parametrize("name", NAMES)
def test_more_parameters_than_bits_come_in_order(name: str) -> None:
    keys = [f"p{n}" for n in range(70)]
    one = tool("f", {"properties": {key: {"type": "integer"} for key in keys}, "required": ["p3", "p60"]})
    assert lets(name, ("f", {"p3": 1, "p60": 2}), tools=[one])
    assert lets(name, ("f", {"p3": 1, "p60": 2, "p0": 3, "p69": 4}), tools=[one])
    assert not lets(name, ("f", {"p3": 1, "p0": 3}), tools=[one])
    assert not lets(name, ("f", {"p3": 1, "p60": 2, "p69": 3, "p0": 4}), tools=[one])


@pytest.mark.parametrize("name", NAMES)
def test_other_keys_only_where_the_schema_says_so(name: str) -> None:
    one = tool("f", {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "integer"}})
    assert lets(name, ("f", {"a": 1}), tools=[one])
    assert lets(name, ("f", {"b": 1, "a": 1}), tools=[one])
    assert not lets(name, ("f", {"b": "x"}), tools=[one])
    assert lets(name, ("f", {"b": 1, "c": 2}), tools=[one]) == (name in JSON)
    free = tool("f", {"type": "object", "additionalProperties": True})
    assert lets(name, ("f", {"b": [1]}), tools=[free])
    assert lets(name, ("f", {}), tools=[free])


@pytest.mark.parametrize("name", NAMES)
def test_a_required_key_that_is_not_described_is_free(name: str) -> None:
    one = tool("f", {"required": ["x"]})
    assert lets(name, ("f", {"x": {"a": [1]}}), tools=[one])
    assert not lets(name, ("f", {}), tools=[one])


@pytest.mark.parametrize("name", ["qwen-xml", "dsml-v4"])
def test_a_key_that_the_dialect_cannot_say(name: str) -> None:
    key = 'a"\nb<'
    with pytest.raises(BadRequest, match="can never be called"):
        fence(name, [tool("f", {"properties": {key: {}}, "required": [key]})])
    built = fence(name, [tool("f", {"properties": {key: {}, "c": {}}})])
    assert len(built.warnings) == 1 and "cannot say" in built.warnings[0]
    assert accepts(name, built, rendered(name, ("f", {"c": 1})))


# --- custom tools -----------------------------------------------------------------------------------------

PARAMETERS = (
    b'{"type":"object","properties":{"input":{"type":"string"}},"required":["input"],"additionalProperties":false}'
)


def own(grammar: ask.Grammar | None) -> ask.ToolSpec:
    return ask.ToolSpec("sql", None, PARAMETERS, "tools[0]", kind="custom", grammar=grammar)


@pytest.mark.parametrize("name", NAMES)
def test_custom_tools(name: str) -> None:
    free, told = own(None), own(ask.Grammar("regex", "[a-z]+\\d{2}", "tools[0].format"))
    assert lets(name, ("sql", {"input": 'SELECT "a"\n;'}), tools=[free])
    assert lets(name, ("sql", {"input": "ab12"}), tools=[told])
    assert not lets(name, ("sql", {"input": "ab1"}), tools=[told])
    assert not lets(name, ("sql", {}), tools=[told])


@pytest.mark.parametrize("name", NAMES)
def test_custom_tools_with_lark(name: str) -> None:
    one = own(ask.Grammar("lark", 'start: "begin" LINE+ "end"\nLINE: /[a-z ]*\\n/', "tools[0].format"))
    built = fence(name, [one])
    right, wrong = ("sql", {"input": "beginx\ny z\nend"}), ("sql", {"input": "begin"})
    assert accepts(name, built, rendered(name, right))
    kept = name.startswith("glm")
    assert bool(built.warnings) != kept
    assert accepts(name, built, rendered(name, wrong)) != kept
    assert validate.arguments(one, json.dumps(right[1])) == ""
    assert "not of its grammar" in validate.arguments(one, json.dumps(wrong[1]))


@pytest.mark.parametrize(
    "grammar",
    [
        ask.Grammar("lark", "start: <[5]>", "tools[0].format"),
        ask.Grammar("lark", "start: <tool_call>", "tools[0].format"),
        ask.Grammar("lark", 'start: "a" } \nx: %lark { start: "b"', "tools[0].format"),
        ask.Grammar("lark", "start: nothing", "tools[0].format"),
        ask.Grammar("lark", 'start: "\ud800"', "tools[0].format"),
        ask.Grammar("regex", "(", "tools[0].format"),
        ask.Grammar("regex", "(?=a)", "tools[0].format"),
        ask.Grammar("lark", 'start: "' + "a" * (1 << 16) + '"', "tools[0].format"),
    ],
)
def test_a_grammar_that_is_none_or_reaches_too_far(grammar: ask.Grammar) -> None:
    for name in ("chatml", "glm-4.7"):
        with pytest.raises(BadRequest) as caught:
            fence(name, [own(grammar)])
        assert caught.value.param == "tools[0].format"


# --- formats ----------------------------------------------------------------------------------------------

SHAPE: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["a", "n"],
}
FORMAT = ask.Format("json_schema", "x", json.dumps(SHAPE).encode(), path="response_format.json_schema")


@pytest.mark.parametrize("name", NAMES)
def test_a_format_binds_the_whole_answer(name: str) -> None:
    built = fence(name, [], ask.ToolChoice(), FORMAT)
    assert built.bounds is not None and built.bounds.whole
    for text in ('{"a": "x", "n": 1}', '{"a":"x","n":1}', '{\n  "a": "x",\n  "n": 1\n}'):
        assert accepts(name, built, text)
    for text in ('{"a": "x"}', '{"a": "x", "n": 1, "z": 2}', "x", '{"a": "x", "n": 1} ok', '```{"a": "x", "n": 1}```'):
        assert not accepts(name, built, text)
    assert not accepts(name, built, '{"n": 1, "a": "x"}')  # in the order of the schema
    optional = {"properties": {"o": {"type": "integer"}, **SHAPE["properties"]}, "required": ["a"]}
    told = ask.Format("json_schema", "x", json.dumps({"type": "object", **optional}).encode(), path="text.format")
    for text, right in (('{"o": 1, "a": "x", "n": 2}', True), ('{"a": "x"}', True), ('{"o": 1}', False), ("{}", False)):
        assert accepts(name, fence(name, [], ask.ToolChoice(), told), text) == right
    free = fence(name, [], ask.ToolChoice(), ask.Format("json_object", path="text.format"))
    assert accepts(name, free, '{"x": [1, {"y": null}]}')
    assert not accepts(name, free, "[1]")


@pytest.mark.parametrize("name", NAMES)
def test_with_tools_it_is_a_call_or_the_format(name: str) -> None:
    built = fence(name, TOOLS, ask.ToolChoice("auto"), FORMAT)
    assert accepts(name, built, '{"a": "x", "n": 1}')
    tag = "<|python_tag|>" if name == "llama3" else ""
    call = "".join(data.decode() for data, _ in rendered(name, ("noop", {})))
    assert accepts(name, built, tag + call)
    assert not accepts(name, built, "Hello")
    assert not accepts(name, fence(name, TOOLS, ask.ToolChoice("required"), FORMAT), '{"a": "x", "n": 1}')
    for tag, i in built.bounds.triggers if built.bounds is not None else ():
        if i < 0 and "｜" not in tag:  # as text in a string, the parser would take it for a call
            assert not accepts(name, built, json.dumps({"a": f"x{tag.upper()}", "n": 1}))
            assert accepts(name, built, json.dumps({"a": f"x{tag[:-1]}", "n": 1}))


def test_a_format_is_strict_or_checked() -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}).encode()
    strict = ask.Format("json_schema", "x", schema, True, "text.format")
    with pytest.raises(BadRequest) as caught:
        fence("chatml", [], ask.ToolChoice(), strict)
    assert caught.value.param == "text.format.schema.properties.a.uniqueItems"
    loose = fence("chatml", [], ask.ToolChoice(), ask.Format("json_schema", "x", schema, False, "text.format"))
    assert len(loose.warnings) == 1
    with pytest.raises(BadRequest, match="allows no value"):
        fence("chatml", [], ask.ToolChoice(), ask.Format("json_schema", "x", b"false", False, "text.format"))


# --- thoughts ---------------------------------------------------------------------------------------------


def test_what_the_prompt_has_begun() -> None:
    for begun, opened in (("", False), ("<think>\n", True), ("<think>\n\n</think>\n\n", False)):
        bounds = fence("chatml", TOOLS, begun=begun).bounds
        assert bounds is not None and bounds.begun is opened
        assert bounds.thoughts == (("<think>", 259), ("</think>", 260))
    assert accepts("chatml", fence("chatml", TOOLS), [(b"\n\n", False), *rendered("chatml", ("noop", {}))])


def test_the_same_request_gives_the_same_grammar() -> None:
    once, twice = (build(TOOLS, ask.ToolChoice(), None, dialect("glm-4.7"), control("glm-4.7")) for _ in range(2))
    assert once == twice
    assert ids("glm-4.7", [(b"<tool_call>", True)]) == [control("glm-4.7")["<tool_call>"]]
