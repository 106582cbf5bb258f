"""Parsers of calls: what each form means, what is tolerated, and the bugs that others had.

Where a test names a report or a bug (O.., R.., or the tracker's number), it is the input of that one. `everywhere`
also cuts each output at every byte.
"""

from __future__ import annotations

import json

import pytest

from tests.unit.dialects.outputs import (
    DIALECTS,
    bytewise,
    calls_of,
    dialect,
    everywhere,
    parse,
    said,
    text_of,
    thoughts_of,
    tool,
    write,
)
from zjournal import ask
from zjournal.dialects.base import Piece, prime

FIELDS = {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}, "note": {}}
TOOLS = [
    tool("get_weather", FIELDS),
    tool("noop"),
    tool("edit", {"path": {"type": "string"}, "text": {"type": "string"}}),
]
EVERY = pytest.mark.parametrize("name", DIALECTS)
HERMES = pytest.mark.parametrize("name", ["chatml", "chatml-text"])
DSML = pytest.mark.parametrize("name", ["dsml-v3.2", "dsml-v4", "dsml-v4.1"])
GLM = pytest.mark.parametrize("name", ["glm-4.5", "glm-4.7"])
CODER = pytest.mark.parametrize("name", ["qwen-xml", "qwen-xml-text"])
THINKS = pytest.mark.parametrize("name", [name for name in DIALECTS if name != "llama3"])

WEATHER = {
    "chatml": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "glm-4.5": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
    "glm-4.7": "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>",
    "dsml-v4": (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    ),
    "qwen-xml": "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
    "llama3": '{"name": "get_weather", "parameters": {"city": "Rome"}}',
}
WEATHER["chatml-text"], WEATHER["qwen-xml-text"] = WEATHER["chatml"], WEATHER["qwen-xml"]
WEATHER["dsml-v3.2"] = WEATHER["dsml-v4"].replace("tool_calls", "function_calls")
WEATHER["dsml-v4.1"] = WEATHER["dsml-v4"].replace("tool_calls", "calls").replace("｜DSML｜", "｜DSML｜ ")
LAYOUT = {"chatml": "\n", "chatml-text": "\n", "glm-4.5": "\n", "glm-4.7": "", "llama3": ""}  # others: an empty line


def told(name: str, text: str, tools=TOOLS) -> list[ask.Delta]:
    return everywhere(dialect(name), tools, said(dialect(name), text))


def dsml(name: str, text: str) -> str:
    """A text in V4's tags as the version `name` has it."""
    text = text.replace("tool_calls>", {"dsml-v3.2": "function_calls>", "dsml-v4.1": "calls>"}.get(name, "tool_calls>"))
    return text.replace("｜DSML｜", "｜DSML｜ ") if name == "dsml-v4.1" else text


# --- to the byte --------------------------------------------------------------------------------------------


@EVERY
def test_rendering_is_what_models_write(name):
    call = ask.Call("c", "get_weather", '{"city":"Rome"}', "p")
    expected = WEATHER[name].replace('{"city": "Rome"}', '{"city":"Rome"}')
    gap = "" if name in ("llama3", "qwen-xml", "qwen-xml-text", "chatml", "chatml-text") else LAYOUT.get(name, "\n\n")
    pieces = dialect(name).calls([], [call])
    assert "".join(piece.text for piece in pieces) == gap + expected
    assert {piece.path for piece in pieces if not piece.trusted} == {"p"}
    assert not [piece for piece in pieces if piece.trusted and "Rome" in piece.text]


@EVERY
def test_layout_before_a_call_is_not_content(name):
    spoken = dialect(name)
    tokens = write(spoken, spoken.calls([Piece("Sure.\n")], [ask.Call("c", "get_weather", '{"city": "Rome"}')]))
    deltas = everywhere(spoken, TOOLS, tokens)
    assert text_of(deltas) == "Sure.\n"
    assert calls_of(deltas) == [("get_weather", {"city": "Rome"})]


@EVERY
def test_o24_parallel_calls_count_from_zero(name):
    """dynamo 4723, LibreChat 260. White space between and behind them is no content, as ds4's tests have it."""
    spoken = dialect(name)
    calls = [ask.Call(str(i), called, "{}") for i, called in enumerate(["noop", "get_weather", "noop"])]
    tokens = [*write(spoken, spoken.calls([], calls)), (b"\n \n", False)]
    deltas = everywhere(spoken, TOOLS, tokens)
    assert calls_of(deltas) == [("noop", {}), ("get_weather", {}), ("noop", {})]
    assert [delta.index for delta in deltas if isinstance(delta, ask.CallStarted)] == [0, 1, 2]
    assert text_of(deltas) == ""


@EVERY
def test_o23_a_call_cut_by_max_tokens_is_told_to_be_truncated(name):
    """vllm 53269, 58228; exo 1725: also where the model itself ended inside the call."""
    text = WEATHER[name]
    deltas = told(name, text[: text.index("ome")])
    assert deltas[0] == ask.CallStarted(0, "get_weather")
    assert deltas[-1] == ask.CallEnded(0, truncated=True)
    with pytest.raises(ValueError):
        json.loads("".join(delta.text for delta in deltas if isinstance(delta, ask.CallArguments)))


@EVERY
def test_o23_a_call_cut_behind_its_name_is_a_call_and_before_it_text(name):
    """Whatever of the markup came: a client that is told text would show it, or send it back as the model's words."""
    text, whole = WEATHER[name], False
    tokens = bytewise(said(dialect(name), text))
    for end in range(1, len(tokens)):
        deltas = parse(dialect(name), TOOLS, tokens[:end])
        so_far = b"".join(data for data, _ in tokens[:end])
        if so_far.endswith(b"Rome"):
            break
        if whole or deltas != [ask.TextDelta(so_far.decode("utf-8", "replace"))]:
            whole = True
            assert deltas[0] == ask.CallStarted(0, "get_weather"), so_far
            assert deltas[-1] == ask.CallEnded(0, truncated=True)
            assert text_of(deltas) == ""
    assert whole
    if name == "llama3":  # where nothing but a brace says that it is a call, more must be there
        text = f"<|python_tag|>{text}"
    if name.startswith(("chatml", "llama3")):
        begun = text[: text.index(",")]
        assert told(name, begun) == [ask.CallStarted(0, "get_weather"), ask.CallEnded(0, truncated=True)]
        other = f'{begun}, "arguments"'.replace("get_weather", "get_wether")
        assert told(name, other)[0] == ask.CallStarted(0, "get_wether", known=False)
        assert told(name, f'{begun}, "id') == [ask.TextDelta(f'{begun}, "id')]


@EVERY
def test_o23_arguments_that_are_no_json_can_be_said_again(name):
    spoken = dialect(name)
    pieces = spoken.calls([], [ask.Call("c", "get_weather", '{"city": "Ro', "p")])
    assert "Ro" in "".join(piece.text for piece in pieces if piece.path == "p")


RESULTS = {
    "chatml": "<tool_response>\na</tool_call>\n</tool_response>\n<tool_response>\nb\n</tool_response>",
    "glm-4.5": "\n<tool_response>\na</tool_call>\n</tool_response>\n<tool_response>\nb\n</tool_response>",
    "glm-4.7": "<tool_response>a</tool_call></tool_response><tool_response>b</tool_response>",
    "dsml-v3.2": "\n\n<function_results>\n<result>a</tool_call></result>\n<result>b</result>\n</function_results>",
    "dsml-v4": "<tool_result>a</tool_call></tool_result>\n\n<tool_result>b</tool_result>",
    "llama3": '{"output": "a</tool_call>"}\n{"output": "b"}',
}
for same, other in (
    ("chatml-text", "chatml"),
    ("qwen-xml", "chatml"),
    ("qwen-xml-text", "chatml"),
    ("dsml-v4.1", "dsml-v4"),
):
    RESULTS[same] = RESULTS[other]


@EVERY
def test_r24_results_are_written_whether_or_not_their_calls_are_there(name):
    results = [
        ask.Result("c", (ask.Text("a", "p1"), ask.Text("</tool_call>", "p1"))),
        ask.Result("d", (ask.Text("b", "p2"),)),
    ]
    pieces = dialect(name).results(results)
    assert "".join(piece.text for piece in pieces) == RESULTS[name]
    assert {piece.path for piece in pieces if not piece.trusted} == {"p1", "p2"}
    assert not [piece for piece in pieces if piece.trusted and "</tool_call>" in piece.text]


@EVERY
def test_instructions_hold_each_tool_in_the_clients_spelling_of_keys(name):
    one = ask.ToolSpec("get", "Gets é", b'{"type":"object","properties":{"b":{"type":"string"},"a":{}}}', "tools[0]")
    pieces = dialect(name).instruct([one, ask.ToolSpec("bare", path="tools[1]")])
    first, second = (piece for piece in pieces if not piece.trusted)
    assert (first.path, second.path) == ("tools[0]", "tools[1]")
    function = json.loads(first.text)
    assert list(function.get("function", function)["parameters"]["properties"]) == ["b", "a"]
    assert "é" in first.text
    told = "".join(piece.text for piece in pieces if piece.trusted)
    opening = WEATHER[name].split("get_weather")[0].strip()
    assert opening.split("\n")[0] in told or name == "llama3"


@pytest.mark.parametrize("name", [name for name in DIALECTS if name not in ("chatml", "chatml-text", "llama3")])
def test_r25_arguments_that_are_a_string_of_json_are_written_as_its_members(name):
    spoken = dialect(name)
    one, two = (spoken.calls([], [ask.Call("c", "f", text)]) for text in ('{"city": "R"}', '"{\\"city\\": \\"R\\"}"'))
    assert one == two


# --- what is streamed, and when -----------------------------------------------------------------------------


@EVERY
def test_arguments_come_with_the_tokens(name):
    """vllm 42878: arguments told only at the end are no stream."""
    spoken = dialect(name)
    content = "line\n" * 50
    call = ask.Call("c", "edit", json.dumps({"path": "a", "text": content}))
    parser = spoken.parser(TOOLS)
    seen = 0
    for data, control in bytewise(write(spoken, spoken.calls([], [call]))):
        seen += sum(isinstance(delta, ask.CallArguments) for delta in parser.feed(data, control))
    assert seen > 150


@EVERY
def test_only_a_possible_half_tag_is_held_back(name):
    parser = dialect(name).parser(TOOLS)
    assert text_of(parser.feed(b"if a <b")) == "if a <b"
    assert text_of(parser.feed(b" && c <")) + text_of(parser.feed(b"= d")) == " && c <= d"


@EVERY
def test_vllm_41240_held_text_is_told_at_the_end(name):
    for tail in ("2 <", "a <tool_ca", "x\n\n", "</", "<｜DSML", "\n"):
        assert text_of(told(name, f"It is {tail}")) == f"It is {tail}"


@EVERY
@pytest.mark.parametrize("text", ["😀é漢", "a\n漢", "<é", "</😀"])
def test_a_cut_character_never_leaks(name, text):
    """lucebox 641."""
    assert text_of(told(name, text)) == text
    spoken = dialect(name)
    deltas = everywhere(
        spoken, TOOLS, write(spoken, spoken.calls([], [ask.Call("c", "edit", json.dumps({"text": text}))]))
    )
    assert calls_of(deltas) == [("edit", {"text": text})]


def test_bytes_that_are_no_utf8_become_replacement_characters():
    spoken = dialect("chatml")
    tokens = [
        (b"a\xe6", False),
        (b"<tool_call>", True),
        (b'{"name": "noop"}', False),
        (b"</tool_call>", True),
        (b"\xe6", False),
    ]
    deltas = parse(spoken, TOOLS, tokens)
    assert text_of(deltas) == "a\ufffd\ufffd"
    assert calls_of(deltas) == [("noop", {})]


# --- tags that are data ---------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize(
    "inside", ["</tool_call>", "}", "<|im_end|>", "</think>", "</arg_value>", "</｜DSML｜parameter>", "<a>"]
)
def test_a_closing_tag_in_a_string_is_data(name, inside):
    """sglang 28698, hermes-agent 22696, ollama 12017, Rapid-MLX 1552, hcx-vllm-plugin 5."""
    spoken = dialect(name)
    call = ask.Call("c", "edit", json.dumps({"text": f"a {inside}\n{inside} b\n"}, ensure_ascii=False))
    deltas = everywhere(spoken, TOOLS, write(spoken, spoken.calls([], [call, call])))
    assert calls_of(deltas) == [("edit", json.loads(call.arguments))] * 2


@CODER
def test_rapid_mlx_1552_a_closing_tag_in_a_file_is_data(name):
    text = "<parameter=x>\n1\n</parameter>\nis how it looks: </parameter>, or\n</parameter>"
    spoken = dialect(name)
    deltas = everywhere(
        spoken, TOOLS, write(spoken, spoken.calls([], [ask.Call("c", "edit", json.dumps({"text": text}))]))
    )
    assert calls_of(deltas) == [("edit", {"text": text})]


@pytest.mark.parametrize("name", ["chatml", "glm-4.5", "glm-4.7", "qwen-xml"])
def test_a_tag_spelled_in_ordinary_tokens_is_text(name):
    """It cannot be what the model was trained to say, and a client's text may hold it."""
    spelled = [(WEATHER[name].encode(), False)]
    deltas = everywhere(dialect(name), TOOLS, spelled)
    if name == "qwen-xml":  # only the outer tag is a token; a known name in the inner one is enough
        assert calls_of(deltas) == [("get_weather", {"city": "Rome"})]
    else:
        assert deltas == [ask.TextDelta(WEATHER[name])]


@EVERY
def test_without_tools_a_call_is_text(name):
    assert told(name, f"See: {WEATHER[name]}", tools=[]) == [ask.TextDelta(f"See: {WEATHER[name]}")]


# --- names and types ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in DIALECTS if name != "llama3"])
def test_koboldcpp_2467_an_unknown_name_is_what_the_model_said(name):
    deltas = told(name, WEATHER[name].replace("get_weather", "get_wether"))
    assert deltas[0] == ask.CallStarted(0, "get_wether", known=False)
    assert calls_of(deltas) == [("get_wether", {"city": "Rome"})]


def test_llama3_json_that_is_no_call_is_text():
    """Nothing but the brace says that it is one, so the name must be known and nothing stand beside it."""
    for text in (
        '{"name": "Bob", "age": 3}',
        '{"name": "Bob", "parameters": {}}',
        '{"answer": 42}',
        '{"name": "get_weather", "city": "Rome"}',
        "{}",
        "{",
        '{"name": 3, "parameters": {}}',
        ' \n[{"name": "noop", "parameters": {}}]',
    ):
        assert told("llama3", text) == [ask.TextDelta(text)]


def test_llama3_a_tag_makes_an_unknown_name_a_call():
    deltas = told("llama3", 'Well.<|python_tag|>{"name": "other", "parameters": {}}')
    assert text_of(deltas) == "Well."
    assert calls_of(deltas) == [("other", {})]
    code = "<|python_tag|>print(1)"
    assert told("llama3", code) == [ask.TextDelta(code)]


@pytest.mark.parametrize("name", ["glm-4.5", "glm-4.7", "qwen-xml"])
@pytest.mark.parametrize(
    ("schema", "said_value", "meant"),
    [
        ({"type": "string"}, "123", "123"),
        ({"type": "string"}, " null ", " null "),
        ({"type": "integer"}, "123", 123),
        ({"type": "integer"}, " 12\n", 12),
        ({"type": "integer"}, "twelve", "twelve"),  # told as it is: the client's validation says more
        ({"type": "boolean"}, "True", True),
        ({"type": "number"}, "1e3", 1000),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": ["string", "null"]}, "Smith", "Smith"),  # vllm 40195: it became `Smithh"`
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "12", 12),
        ({"enum": ["a", "1"]}, "1", "1"),
        ({"const": 1}, "1", 1),
        ({"type": "array"}, '["a", "]]"]', ["a", "]]"]),  # vllm 40195: it ended in `]]`
        ({"$ref": "#/$defs/s"}, "5", "5"),
        ({"$ref": "#"}, "5", "5"),  # xgrammar 890: it recurses
        ({"allOf": [{"type": ["string", "integer"]}, {"type": "integer"}]}, "5", 5),
        ({}, "{", "{"),
        ({}, '{"a": 1}', {"a": 1}),
        (True, "x", "x"),
    ],
)
def test_the_schema_says_what_a_bare_value_means(name, schema, said_value, meant):
    inner = "\n" if name == "qwen-xml" else ""
    text = WEATHER[name].replace(f"{inner}Rome{inner}", f"{inner}{said_value}{inner}")
    tools = [
        tool("get_weather", {"city": schema}, **{"$defs": {"s": {"type": "string"}}, "type": ["object", "string"]})
    ]
    assert calls_of(told(name, text, tools)) == [("get_weather", {"city": meant})]


@DSML
def test_dsml_the_attribute_says_what_a_value_means(name):
    text = WEATHER[name]
    for attribute, value, meant in (
        ("true", "12", "12"),
        ("false", "12", 12),
        ("False", "[1]", [1]),
        ("false", "Rome", "Rome"),  # mislabelled
        ("true", "&amp; &lt;/x", "&amp; &lt;/x"),  # ds4 took escapes for others' characters
    ):
        one = text.replace('string="true">Rome', f'string="{attribute}">{value}')
        assert calls_of(told(name, one)) == [("get_weather", {"city": meant})]
    assert calls_of(told(name, text.replace(' string="true">Rome', ">12"))) == [("get_weather", {"city": "12"})]


def test_vllm_48846_indentation_is_data():
    code = "    def f():\n        return 1\n\n"
    for name in ("qwen-xml", "glm-4.5", "dsml-v4"):
        spoken = dialect(name)
        call = ask.Call("c", "edit", json.dumps({"text": code}))
        assert calls_of(parse(spoken, TOOLS, write(spoken, spoken.calls([], [call])))) == [("edit", {"text": code})]


@HERMES
def test_numbers_and_spelling_are_the_models_own(name):
    arguments = '{ "z":1.50,  "a" : "\\u00e9", "n": 1e400 }'
    deltas = told(name, f'<tool_call>\n{{"name": "noop", "arguments": {arguments}}}\n</tool_call>')
    assert "".join(delta.text for delta in deltas if isinstance(delta, ask.CallArguments)) == arguments


# --- thoughts ----------------------------------------------------------------------------------------------


@THINKS
def test_r26_thoughts_then_a_call(name):
    spoken = dialect(name)
    assert spoken.reasoning is not None
    tokens = write(spoken, spoken.reasoning.written("I look.\nThen I say.\n"))
    tokens += write(spoken, spoken.calls([Piece("Wait.")], [ask.Call("c", "noop", "{}")]))
    deltas = everywhere(spoken, TOOLS, tokens)
    assert thoughts_of(deltas) == "I look.\nThen I say.\n"
    assert text_of(deltas) == "Wait."
    assert calls_of(deltas) == [("noop", {})]


@THINKS
def test_ds4_318_a_call_among_thoughts_is_a_thought(name):
    deltas = told(name, f"<think>I could say {WEATHER[name]} or not.</think>Done.")
    assert thoughts_of(deltas) == f"I could say {WEATHER[name]} or not."
    assert text_of(deltas) == "Done."
    assert not [delta for delta in deltas if isinstance(delta, ask.CallStarted)]


@THINKS
def test_the_prompt_may_have_begun_the_thoughts(name):
    spoken = dialect(name)
    assert spoken.reasoning is not None
    silent = "".join(piece.text for piece in spoken.reasoning.written(""))
    behind = spoken.reasoning.closing + spoken.reasoning.after
    opening = spoken.reasoning.opening + spoken.reasoning.inside
    for prompt, thinks in ((f"…{opening}", True), (f"…{silent}", False), (f"…{behind}", False), ("…", False)):
        begun = spoken.reasoning.begun(prompt)
        parser = spoken.parser(TOOLS)
        prime(parser, said(spoken, begun))
        deltas = parser.feed(b"hm")
        assert deltas == [ask.ReasoningDelta("hm") if thinks else ask.TextDelta("hm")]


@THINKS
def test_vllm_40911_half_of_a_tag_never_leaks_when_thoughts_end(name):
    deltas = told(name, f"<think>a < b</think>{LAYOUT.get(name, '')}{WEATHER[name]}")
    assert thoughts_of(deltas) == "a < b"
    assert text_of(deltas) == ""
    assert calls_of(deltas) == [("get_weather", {"city": "Rome"})]


def test_a_spelled_think_tag_opens_thoughts_only_at_the_beginning():
    assert thoughts_of(told("chatml-text", "\n<think>\na\n</think>\n\nb")) == "a"
    text = "The tag <think> opens, </think> closes."
    assert told("chatml-text", text) == [ask.TextDelta(text)]


def test_thoughts_that_never_end_are_thoughts():
    """dynamo 7418."""
    assert told("glm-4.7", "<think>and so on") == [ask.ReasoningDelta("and so on")]


@pytest.mark.parametrize(
    ("name", "behind", "tools", "kept"),
    [
        ("dsml-v4", False, True, True),
        ("dsml-v4", False, False, False),
        ("dsml-v3.2", False, True, False),
        ("glm-4.7", False, False, True),
        ("glm-4.5", False, True, False),
        ("chatml", True, False, True),
        ("chatml", False, True, False),
    ],
)
def test_o09_which_thoughts_stay_in_the_prompt(name, behind, tools, kept):
    """vllm 30490 and dynamo 7418: the wrong rule cost a model 5 points of 62 in a test of agents."""
    reasoning = dialect(name).reasoning
    assert reasoning is not None
    assert reasoning.keeps(behind, tools) is kept


# --- what is tolerated without a fence -----------------------------------------------------------------------


@EVERY
def test_prose_between_and_behind_calls_is_text(name):
    gap = "" if name == "llama3" else LAYOUT.get(name, "\n\n")
    more = WEATHER[name] if name != "llama3" else "<|python_tag|>" + WEATHER[name]
    deltas = told(name, f"A.{gap}{more}\nB.{gap}{more} C.")
    assert text_of(deltas) == "A.\nB. C."
    assert calls_of(deltas) == [("get_weather", {"city": "Rome"})] * 2


@pytest.mark.parametrize("name", ["chatml-text", "qwen-xml", "qwen-xml-text", "dsml-v4"])
def test_the_case_of_a_tag_does_not_matter(name):
    text = WEATHER[name]
    for tag in ("tool_call", "tool_calls", "invoke", "function", "parameter"):
        if f"<{tag}>" not in text or name != "qwen-xml":
            text = text.replace(tag, tag.upper())
    assert calls_of(told(name, text)) == [("get_weather", {"city": "Rome"})]


@EVERY
def test_an_escaped_tag_is_text(name):
    text = WEATHER[name].replace("<", "&lt;") if name != "llama3" else "&lt;|python_tag|>"
    assert told(name, text) == [ask.TextDelta(text)]


@pytest.mark.parametrize("name", ["chatml", "chatml-text", "qwen-xml", "glm-4.7", "glm-4.5"])
def test_a_closing_tag_that_closes_nothing(name):
    """Behind a call it is dropped, before one it is text."""
    deltas = told(name, f"{WEATHER[name]}\n</tool_call>\nso.")
    assert text_of(deltas) == "\nso."
    assert calls_of(deltas) == [("get_weather", {"city": "Rome"})]
    assert told(name, "a </tool_call> b") == [ask.TextDelta("a </tool_call> b")]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nget_weather(city)\n</tool_call>",
        '<tool_call>\n{"arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>\n{"name": null, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"function": {"name": "noop"}}\n</tool_call>',
        '<tool_call>\n[{"name": "noop"}]\n</tool_call>',
        "<tool_call></tool_call>",
        '<tool_call>\n{"name": "no',
        "<tool_call>",
    ],
)
@HERMES
def test_a_call_without_a_name_is_text_to_the_byte(name, text):
    """Never guessed, never lost."""
    assert told(name, f"a\n{text}") == [ask.TextDelta(f"a\n{text}")]
    assert text_of(told(name, f"{WEATHER[name]}\n{text} b.")) == f"\n{text} b."


@HERMES
@pytest.mark.parametrize(
    ("inner", "meant"),
    [
        ('{"arguments": {"city": "R"}, "name": "get_weather"}', {"city": "R"}),  # the keys in the other order
        ('{"name": "get_weather", "parameters": {"city": "R"}}', {"city": "R"}),
        ('{"type": "function", "name": "get_weather", "arguments": {"city": "R"}}', {"city": "R"}),
        ('{"name":"get_weather","arguments":{"city":"R"}}', {"city": "R"}),
        ('{\n  "name" : "get_weather" ,\n  "arguments" : {\n"city": "R"}\n}', {"city": "R"}),
        ('{"name": "get_weather", "arguments": "{\\"city\\": \\"R\\"}"}', {"city": "R"}),  # encoded twice
        ('{"arguments": "{\\"city\\": \\"R\\"}", "name": "get_weather"}', {"city": "R"}),
        ('{"name": "get_weather", "arguments": null}', {}),
        ('{"name": "get_weather"}', {}),
        ('{"name": "get_weather", "arguments": {"city": "a\nb\tc"}}', {"city": "a\nb\tc"}),  # no JSON, but plain enough
    ],
)
def test_forms_of_json_that_models_write(name, inner, meant):
    assert calls_of(told(name, f"<tool_call>\n{inner}\n</tool_call>")) == [("get_weather", meant)]
    assert calls_of(told(name, f"<tool_call>{inner}</tool_call>")) == [("get_weather", meant)]


@HERMES
def test_two_objects_between_the_same_tags_are_two_calls(name):
    one = '{"name": "noop", "arguments": {}}'
    assert calls_of(told(name, f"<tool_call>\n{one}\n{one}\n</tool_call>")) == [("noop", {})] * 2
    assert calls_of(told(name, f"<tool_call>\n{one}\n<tool_call>\n{one}\n</tool_call>")) == [("noop", {})] * 2
    assert calls_of(told(name, f"<tool_call>\n{one}")) == [("noop", {})]  # whole, though the tag is missing


@HERMES
@pytest.mark.parametrize(
    ("inner", "fault"),
    [
        ('{"name": "noop", "arguments": {"a": 1}}}', "more closing braces"),
        ('{"name": "noop", "arguments": [1]}', "not a JSON object"),
        ('{"name": "noop", "arguments": 12}', "not a JSON object"),
        ('{"name": "noop", "arguments": {"a": nil}}', "not JSON"),
        ('{"name": "noop", "arguments": {"a": 1}', "not closed"),
        ('{"name": "noop", "arguments": {"a": 1}, "id": "x"}', "other keys"),
        ('{"name": "noop", "id": {"b": 1}, "arguments": {"a": 1}}', "other keys"),
    ],
)
def test_a_fault_of_form_is_told_with_the_call(name, inner, fault):
    deltas = told(name, f"<tool_call>\n{inner}\n</tool_call>\nB.")
    assert deltas[0] == ask.CallStarted(0, "noop")
    (end,) = (delta for delta in deltas if isinstance(delta, ask.CallEnded))
    assert fault in end.fault
    assert not end.truncated
    assert text_of(deltas) == "\nB."


def test_a_closing_token_ends_a_call_whatever_is_open():
    """Where the tag is a token, a string that was not closed takes nothing of what follows with it."""
    call = '<tool_call>\n{"name": "noop", "arguments": {"a": "b}}\n</tool_call>'
    deltas = told("chatml", f"{call}\n{WEATHER['chatml']}")
    ends = [delta for delta in deltas if isinstance(delta, ask.CallEnded)]
    assert [bool(end.fault) for end in ends] == [True, False]
    assert not ends[0].truncated


@DSML
def test_sglang_40236_loose_dsml(name):
    """Blocks without their opening, without new lines, without closings; but never a call without a known name."""
    invoke = '<｜DSML｜invoke name="noop">\n</｜DSML｜invoke>'
    for text in (
        invoke,
        invoke.replace("\n", ""),
        f"<｜DSML｜tool_calls>{invoke}</｜DSML｜tool_calls>",
        f"<｜DSML｜tool_calls>\n{invoke}",
    ):
        assert calls_of(told(name, dsml(name, text))) == [("noop", {})]
    unknown = dsml(name, invoke.replace("noop", "rm"))
    assert told(name, unknown) == [ask.TextDelta(unknown)]
    open_call = dsml(name, f'<｜DSML｜tool_calls>\n<｜DSML｜invoke name="noop">\n{invoke}\n</｜DSML｜tool_calls>')
    ends = [delta for delta in told(name, open_call) if isinstance(delta, ask.CallEnded)]
    assert [end.fault for end in ends] == ["the call is not closed", ""]


@DSML
@pytest.mark.parametrize("other", ["dsml-v3.2", "dsml-v4", "dsml-v4.1"])
def test_xgrammar_885_a_block_of_another_version_is_text(name, other):
    """Unless a tool has the name and the tags of a call are this version's: then it needs no block."""
    unknown = WEATHER[other].replace("get_weather", "x")
    calls = [delta for delta in told(name, unknown) if isinstance(delta, ask.CallStarted)]
    assert calls == ([ask.CallStarted(0, "x", known=False)] if name == other else [])
    if name != other:
        assert told(name, unknown) == [ask.TextDelta(unknown)]
    known = [("get_weather", {"city": "Rome"})]
    spaced = "dsml-v4.1" in (name, other) and name != other
    assert calls_of(told(name, WEATHER[other])) == ([] if spaced else known)


@DSML
def test_dsml_a_call_without_arguments_may_have_an_empty_line(name):
    for gap in ("\n", "\n\n", ""):
        text = dsml(
            name, f'\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="noop">{gap}</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
        )
        assert told(name, text) == [ask.CallStarted(0, "noop"), ask.CallArguments(0, "{}"), ask.CallEnded(0)]


@DSML
def test_dsml_a_parameter_twice_is_a_fault(name):
    parameter = '<｜DSML｜parameter name="city" string="true">R</｜DSML｜parameter>\n'
    text = dsml(name, f'<｜DSML｜invoke name="noop">\n{parameter}{parameter}</｜DSML｜invoke>')
    (end,) = (delta for delta in told(name, text) if isinstance(delta, ask.CallEnded))
    assert "given twice" in end.fault


@GLM
def test_ds4_42_another_dialect_in_the_middle_of_a_call(name):
    """What was said inside is not lost in silence, the call ends where its tag says, and no markup is a name."""
    text = "<tool_call>get_weather<parameter=city>Rome</parameter></tool_call>Done."
    assert told(name, text) == [ask.TextDelta(text)]
    text = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>R</arg_value><x>1</x></tool_call>Done."
    (end,) = (delta for delta in told(name, text) if isinstance(delta, ask.CallEnded))
    assert end.fault == "there is text between the parameters"


@GLM
def test_a_value_that_is_not_closed_ends_at_the_next_tag(name):
    text = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>R<arg_key>days</arg_key><arg_value>1</tool_call>"
    deltas = told(name, text)
    arguments = "".join(delta.text for delta in deltas if isinstance(delta, ask.CallArguments))
    assert json.loads(arguments) == {"city": "R", "days": 1}
    (end,) = (delta for delta in deltas if isinstance(delta, ask.CallEnded))
    assert "not closed" in end.fault


@CODER
def test_llama_cpp_26763_missing_newlines(name):
    parameters = "<parameter=city>R</parameter><parameter=days>\n1</parameter>"
    one = f"<tool_call><function=get_weather>{parameters}</function></tool_call>"
    assert calls_of(told(name, one * 2)) == [("get_weather", {"city": "R", "days": 1})] * 2


@CODER
def test_llama_cpp_19503_a_known_name_makes_a_call_without_its_outer_tag(name):
    bare = "<function=get_weather>\n<parameter=city>\nR\n</parameter>\n</function>"
    assert calls_of(told(name, bare)) == [("get_weather", {"city": "R"})]
    for text in ("Use <function=name> here.", "a functional <function", bare.replace("get_weather", "list")):
        assert told(name, text) == [ask.TextDelta(text)]


@EVERY
def test_a_name_of_any_length_takes_no_more_than_its_limit(name):
    """What goes on for ever without a name is text in the end, not memory."""
    if name == "llama3" or name.startswith("chatml"):
        return  # their object is held until it is whole
    text = WEATHER[name].replace("get_weather", "x" * 5000)
    spoken = dialect(name)
    for tokens in (said(spoken, text), bytewise(said(spoken, text))):
        assert text_of(parse(spoken, TOOLS, tokens)).count("x") == 5000
