"""Messages bodies become Asks with the paths they came from; what is wrong is named, what is unknown passes."""

import base64
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zjournal.api import blobs, failure
from zjournal.api.messages import request
from zjournal.ask import Call, Format, Message, Result, Text, Thought, ToolChoice, ToolSpec
from zjournal.errors import BadRequest, ThreadMismatch

USER = [{"role": "user", "content": "hi"}]
TOOL = {"name": "ls", "description": "Lists.", "input_schema": {"type": "object"}}
LINE = "x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch=a1b2;"


def decoded(headers=None, **body):
    attribution = body.pop("attribution", False)
    raw = json.dumps({"model": "m", "max_tokens": 50, "messages": USER, **body}).encode()
    return request.decode(raw, headers or {}, attribution=attribution)


def refused(**body) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        decoded(**body)
    return caught.value


# --- items --------------------------------------------------------------------------------------------


def test_items_carry_their_paths():
    said = [
        {"type": "thinking", "thinking": "Hm.", "signature": "of another server"},
        {"type": "text", "text": "I "},
        {"type": "text", "text": "look."},
        {"type": "tool_use", "id": "c1", "name": "ls", "input": {"path": "a"}},
    ]
    came = [
        {"type": "tool_result", "tool_use_id": "c1", "content": "3 boats", "is_error": False},
        {"type": "text", "text": "Go on."},
    ]
    asked = decoded(
        system="Be brief.",
        messages=[
            {"role": "user", "content": "hi"},
            {"role": "system", "content": [{"type": "text", "text": "Helpers: cook."}]},
            {"role": "assistant", "content": said},
            {"role": "user", "content": came},
        ],
    )
    assert asked.items == (
        Message("system", (Text("Be brief.", "system"),)),
        Message("user", (Text("hi", "messages[0].content"),)),
        Message("system", (Text("Helpers: cook.", "messages[1].content[0].text"),)),
        Thought((Text("Hm.", "messages[2].content[0].thinking"),)),
        Message(
            "assistant",
            (Text("I ", "messages[2].content[1].text"), Text("look.", "messages[2].content[2].text")),
        ),
        Call("c1", "ls", '{"path": "a"}', "messages[2].content[3]"),
        Result("c1", (Text("3 boats", "messages[3].content[0].content"),), "messages[3].content[0]"),
        Message("user", (Text("Go on.", "messages[3].content[1].text"),)),
    )
    assert (asked.protocol, asked.max_tokens, asked.store, asked.stream) == ("messages", 50, True, False)


@pytest.mark.parametrize("role", ["user", "system", "assistant"])
def test_a_string_and_its_list_of_one_are_the_same_text(role):
    behind = [{"role": "user", "content": "go"}]
    as_text = decoded(messages=[*USER, {"role": role, "content": "so\n\u00e9"}, *behind])
    block = {"type": "text", "text": "so\n\u00e9", "cache_control": {"type": "ephemeral"}}
    as_list = decoded(messages=[*USER, {"role": role, "content": [block]}, *behind])
    assert [item.text for item in as_text.items] == [item.text for item in as_list.items]
    assert [type(item) for item in as_text.items] == [type(item) for item in as_list.items]


def test_cache_control_may_stand_anywhere_and_changes_nothing():
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}

    def asked(more):
        return decoded(
            **more,
            system=[{"type": "text", "text": "Be brief.", **more}],
            tools=[{**TOOL, **more}],
            messages=[
                {"role": "user", "content": [{"type": "text", "text": "hi", **more}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": "s", **more},
                        {"type": "tool_use", "id": "c", "name": "ls", "input": {}, **more},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [], **more}]},
            ],
        )

    assert asked(mark) == asked({})


def test_results_of_every_form():
    def parts(**result):
        block = {"type": "tool_result", "tool_use_id": "c", **result}
        (item,) = decoded(messages=[{"role": "user", "content": [block]}]).items
        return "".join(part.text for part in item.parts)

    assert parts() == parts(content="") == parts(content=[]) == ""
    assert parts(content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "ab"
    assert parts(content="no such file", is_error=True) == "Error: no such file"
    assert parts(content=[{"type": "tool_reference", "tool_name": "ls"}]) == "[tool: ls]"
    found = {"type": "search_result", "title": "Tides", "source": "u", "content": [{"type": "text", "text": "low"}]}
    assert parts(content=[found]) == "Tides\nu\nlow"


def test_changes_of_tools_are_told_where_they_stand():
    changes = [
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "ls"}},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "cat"}},
    ]
    asked = decoded(messages=[*USER, {"role": "system", "content": changes}, *USER], tools=[TOOL])
    assert asked.items[1].text == "[tool added: ls][tool removed: cat]"
    inline = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": TOOL}}
    assert (
        refused(messages=[*USER, {"role": "system", "content": [inline]}]).param == "messages[1].content[0].tool.type"
    )


def test_words_and_results_stay_in_their_order():
    blocks = [
        {"type": "text", "text": "before"},
        {"type": "tool_result", "tool_use_id": "c", "content": "r"},
        {"type": "text", "text": "behind"},
    ]
    items = decoded(messages=[{"role": "user", "content": blocks}]).items
    assert [(type(item), item.text) for item in items] == [(Message, "before"), (Result, "r"), (Message, "behind")]


def test_images_and_files_are_told_of_and_never_read():
    data = bytes(range(256))
    text = base64.b64encode(data).decode()

    def told(block):
        return decoded(messages=[{"role": "user", "content": [block]}]).items[0].text

    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": text}}
    placeholder = blobs.placeholder("image", "image/png", data)
    assert told(image) == placeholder
    assert placeholder.startswith("[image: image/png, 256 bytes, sha256 ")
    assert text[:40] not in placeholder
    assert told({"type": "image", "source": {"type": "url", "url": f"data:image/png;base64,{text}"}}) == placeholder
    wrapped = "\n".join(text[at : at + 76] for at in range(0, len(text), 76))
    assert told({**image, "source": {**image["source"], "data": wrapped}}) == placeholder
    other = base64.b64encode(data[::-1]).decode()
    assert told({**image, "source": {**image["source"], "data": other}}) != placeholder
    assert "example" not in told({"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}})
    plain = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "words"}}
    assert told(plain) == "T\nwords"
    inner = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "in"}, image]}}
    assert told(inner) == f"in{placeholder}"
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": text}}
    assert told(pdf).startswith("[document: application/pdf, 256 bytes, ")
    result = {"type": "tool_result", "tool_use_id": "c", "content": [image]}
    assert told(result) == placeholder


def test_what_only_another_server_can_read_is_left_out_and_named():
    blocks = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "So."},
    ]
    asked = decoded(
        messages=[*USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": [{"type": "new_2031"}]}],
        tools=[{"type": "web_search_20260209", "name": "web_search"}, TOOL, {**TOOL, "name": "b", "type": "custom"}],
        mcp_servers=[{"type": "url", "url": "https://x", "name": "x"}],
    )
    assert [item.text for item in asked.items] == ["hi", "So.", "[new_2031]"]
    assert [tool.name for tool in asked.tools] == ["ls", "b"]
    assert set(asked.skipped) == {
        *("server_tool_use", "redacted_thinking", "new_2031"),
        *("web_search_20260209", "mcp_servers"),
    }


def test_a_body_of_the_future_passes():
    asked = decoded(
        headers={"anthropic-beta": "unheard-of-2031-01-01"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        service_tier="standard_only",
        speed="fast",
        inference_geo="eu",
        container=None,
        fallbacks=[{"model": "x"}],
        metadata={"user_id": "u", "more": 1},
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi", "future": [1]}], "id": "x"}],
        unheard_of={"deep": [1, 2]},
    )
    assert asked.items[0].text == "hi"


# --- settings -----------------------------------------------------------------------------------------


def test_tools_and_choices():
    tools = [{**TOOL, "input_schema": {"b": 1, "a": 2}, "strict": True, "defer_loading": True}]
    asked = decoded(tools=tools, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert asked.tools == (ToolSpec("ls", "Lists.", b'{"b": 1, "a": 2}', "tools[0]", True),)
    assert asked.choice == ToolChoice("required", None, False)
    assert decoded(tools=tools, tool_choice={"type": "tool", "name": "ls"}).choice == ToolChoice("required", ("ls",))
    assert decoded(tools=tools, tool_choice={"type": "none"}).choice == ToolChoice("none")
    assert decoded(tools=tools, tool_choice=None).choice == decoded(tools=tools).choice == ToolChoice()


@pytest.mark.parametrize(
    ("body", "at"),
    [
        (
            {"output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {"a": 1}}}},
            "output_config.format",
        ),
        ({"output_format": {"type": "json_schema", "schema": {"a": 1}}}, "output_format"),
    ],
)
def test_the_form_of_the_answer(body, at):
    assert decoded(**body).format == Format("json_schema", "output", b'{"a": 1}', False, at)
    assert decoded(output_config={"effort": "low"}).format is None


def test_sampling_and_stops():
    asked = decoded(temperature=0.5, top_p=0.9, top_k=40, stop_sequences=["END", "\n\n"], stream=True)
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.top_k) == (0.5, 0.9, 40)
    assert (asked.stop, asked.stream) == (("END", "\n\n"), True)


@pytest.mark.parametrize(
    ("headers", "user", "key"),
    [
        ({"x-claude-code-session-id": "h"}, '{"session_id": "s"}', "h"),
        ({}, '{"session_id": "s", "device_id": "d"}', "s"),
        ({}, "user_0a_account__session_5b5c6d2e-0000-4000-8000-1234567890ab", "5b5c6d2e-0000-4000-8000-1234567890ab"),
        ({}, "somebody", None),
        ({}, "{not json", None),
        ({}, None, None),
    ],
)
def test_the_name_of_the_session(headers, user, key):
    assert decoded(headers=headers, metadata={"user_id": user}).session_key == key


def test_a_last_message_of_the_assistant_is_gone_on_with():
    assert decoded(messages=[*USER, {"role": "assistant", "content": "Well, "}]).goes_on
    assert not decoded().goes_on


def test_no_tokens_at_all_only_warm_the_cache():
    assert decoded(max_tokens=0).warm
    assert not decoded().warm


# --- the attribution line -----------------------------------------------------------------------------


def test_o07_the_attribution_line_is_no_part_of_the_prompt():
    rules = {"type": "text", "text": "Rules."}
    asked = decoded(system=[{"type": "text", "text": LINE, "cache_control": None}, rules])
    assert asked.items[0] == Message("system", (Text("Rules.", "system[1].text"),))
    assert asked.ignored == ("attribution_line",)
    again = decoded(system=[{"type": "text", "text": LINE.replace("a1b2", "c3d4")}, rules])
    assert again == asked
    kept = decoded(system=[{"type": "text", "text": LINE}, rules], attribution=True)
    assert (kept.items[0].text, kept.ignored) == (LINE + "Rules.", ())
    alone = decoded(system=[{"type": "text", "text": LINE}])
    assert (alone.items[0].text, alone.ignored) == ("hi", ("attribution_line",))


@pytest.mark.parametrize(
    "system",
    [
        LINE,  # a string is what somebody wrote
        [{"type": "text", "text": "Rules."}, {"type": "text", "text": LINE}],
        [{"type": "text", "text": LINE + "\nYou are a helper."}],
        [{"type": "text", "text": "x-anthropic-billing-header: what is this?"}],
        [{"type": "text", "text": "see x-anthropic-billing-header: cc_version=2;"}],
    ],
)
def test_only_a_whole_first_block_of_that_form_is_one(system):
    asked = decoded(system=system)
    whole = system if isinstance(system, str) else "".join(block["text"] for block in system)
    assert (asked.items[0].text, asked.ignored) == (whole, ())


def test_in_the_users_own_words_it_stays():
    asked = decoded(messages=[{"role": "user", "content": [{"type": "text", "text": LINE}]}])
    assert (asked.items[0].text, asked.ignored) == (LINE, ())


# --- threads ------------------------------------------------------------------------------------------


def test_a_continuation_gets_the_tools_of_its_thread():
    created = b'{"model": "m", "tools": [{"name":"ls","input_schema":{"b":1,"a":2}}], "thread": {"type": "create"}}'
    raw = b' {"model": "m", "max_tokens": 9, "messages": [], "thread": {"type": "continue"} }\n'
    whole = request.joined(raw, created)
    assert json.loads(whole) == {**json.loads(raw), "tools": json.loads(created)["tools"]}
    assert b'{"b":1,"a":2}' in whole
    assert request.joined(whole.replace(b',"tools"', b',"other"'), b'{"tools":null}').endswith(b"}")
    assert request.joined(raw, b"{}") == raw
    for name in ("tools", "system"):
        with pytest.raises(ThreadMismatch, match=f"`{name}`"):
            request.joined(json.dumps({name: [], "messages": []}).encode(), created)


def test_the_previous_message():
    assert decoded(thread={"type": "create"}).previous is None
    assert decoded(thread={"type": "continue", "previous_message_id": "msg_1"}).previous == "msg_1"
    assert refused(thread={"type": "continue"}).param == "thread.previous_message_id"
    assert refused(thread={"type": "fork"}).param == "thread.type"


@pytest.mark.parametrize("previous", ["msg_1", "", "anything", 7, ["x"], None])
def test_diagnostics_take_an_id_of_any_form(previous):
    raw = json.dumps({"diagnostics": {"previous_message_id": previous}}).encode()
    assert request.diagnostics(raw).previous_message_id == previous
    assert request.diagnostics(b"{}") is None


# --- what is refused ----------------------------------------------------------------------------------


def block(**fields):
    return {"messages": [{"role": "user", "content": [fields]}]}


@pytest.mark.parametrize(
    ("body", "at"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"model": 3}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        (block(type="text"), "messages.0.content.0.text"),
        (block(type="text", text=5), "messages.0.content.0.text"),
        (block(text="x"), "messages.0.content.0.type"),
        (block(type="tool_result"), "messages.0.content.0.tool_use_id"),
        (block(type="tool_result", tool_use_id="c", content=7), "messages.0.content.0.content"),
        (block(type="tool_result", tool_use_id="c", content=[{"type": "text"}]), "messages.0.content.0.content.0.text"),
        (block(type="tool_use", id="c", name="f", input={}), "messages.0.content.0.type"),
        (block(type="image"), "messages.0.content.0.source"),
        (block(type="image", source={"type": "base64"}), "messages.0.content.0.source.data"),
        (block(type="image", source={"type": "base64", "data": "%"}), "messages.0.content.0.source.data"),
        (block(type="image", source={"type": "file", "file_id": "f"}), "messages.0.content.0.source.file_id"),
        (block(type="image", source={"type": "moon"}), "messages.0.content.0.source.type"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "text", "text": 5}]}, "system.0.text"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"name": "f", "input_schema": []}]}, "tools.0.input_schema"),
        ({"tools": [TOOL, TOOL]}, "tools.1.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool", "name": "ls"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences.1"),
        ({"temperature": 3}, "temperature"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "max_tokens"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"stop": ["x"]}, "stop"),
        ({"metadata": "me"}, "metadata"),
        ({"stream": "yes"}, "stream"),
        (
            {"messages": [*USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f"}]}]},
            "messages.1",
        ),
    ],
)
def test_what_is_wrong_is_named_in_the_protocols_own_way(body, at):
    told = failure.anthropic_error(refused(**body), "req_1")
    assert set(told) == {"type", "error", "request_id"}
    assert (told["type"], told["request_id"], told["error"]["type"]) == ("error", "req_1", "invalid_request_error")
    assert told["error"]["message"].startswith(f"{at}: ")


def test_calls_of_one_turn_have_ids_of_their_own():
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    fault = refused(messages=[*USER, {"role": "assistant", "content": [call, call]}, *USER])
    assert fault.param == "messages[1].content[1].id"
    decoded(
        messages=[
            *USER,
            {"role": "assistant", "content": [call]},
            *USER,
            {"role": "assistant", "content": [call]},
            *USER,
        ]
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(["type", "text", "content", "role", "source", "id", "name", "input", "tool_use_id", "thinking"])
BLOCKS = st.dictionaries(
    KEYS, st.sampled_from(["text", "tool_use", "tool_result", "image", "user", "system"]) | JSON, max_size=5
)


@settings(max_examples=200)
@given(
    messages=JSON | st.lists(BLOCKS | st.fixed_dictionaries({"role": st.just("user"), "content": st.lists(BLOCKS)})),
    system=JSON | st.lists(BLOCKS),
    tools=JSON | st.lists(BLOCKS),
)
def test_any_body_is_read_or_refused(messages, system, tools):
    try:
        asked = decoded(messages=messages, system=system, tools=tools)
    except BadRequest as fault:
        assert fault.message
    else:
        assert asked.items
