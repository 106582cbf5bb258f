"""Input items of Responses: namespaces, tools in the input, echoed items of any kind, and settings that stand there."""

import json
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zjournal.api import compaction, responses, responses_echo
from zjournal.ask import Call, Message, Result, Text, ToolChoice
from zjournal.errors import BadRequest

SECRET = b"s" * 32
USER = {"role": "user", "content": "hi"}
FUNCTION = {"type": "function", "name": "height", "description": "Of the tide.", "parameters": {"type": "object"}}
TIDE = {"type": "namespace", "name": "tide", "description": "All about tides.", "tools": [FUNCTION]}


def ask(*items, **body):
    return responses.decode(json.dumps({"model": "m", "input": [USER, *items], **body}).encode(), {})


def items(*given):
    return ask(*given).items[1:]


# --- tools --------------------------------------------------------------------------------------------


def test_a_namespace_is_told_in_joined_names_and_before_its_first_tool():
    custom = {"type": "custom", "name": "patch"}
    found = ask(tools=[{**TIDE, "tools": [FUNCTION, custom]}]).tools
    assert [tool.name for tool in found] == ["tide__height", "tide__patch"]
    assert [tool.namespace for tool in found] == ["tide", "tide"]
    assert found[0].description == "All about tides.\n\nOf the tide."
    assert found[1].description is None
    assert [tool.path for tool in found] == ["tools[0].tools[0]", "tools[0].tools[1]"]


@pytest.mark.parametrize(
    ("namespace", "name", "kept"),
    [("mcp__fs__", "mcp__fs__height", "mcp__fs__"), ("functions", "height", ""), ("a.b", "a.b__height", "a.b")],
)
def test_names_of_namespaces(namespace, name, kept):
    (tool,) = ask(tools=[{**TIDE, "name": namespace}]).tools
    assert (tool.name, tool.namespace) == (name, kept)


def test_two_tools_with_one_name_for_the_model_are_refused():
    with pytest.raises(BadRequest, match="tide__height") as fault:
        ask(tools=[{**FUNCTION, "name": "tide__height"}, TIDE])
    assert fault.value.param == "tools[1].tools[0].name"
    with pytest.raises(BadRequest) as fault:
        ask(tools=[{**TIDE, "tools": [TIDE]}])
    assert fault.value.param == "tools[0].tools[0].tools[0]"


def test_choices_name_tools_of_namespaces():
    named = {"type": "function", "name": "height", "namespace": "tide"}
    assert ask(tools=[TIDE], tool_choice=named).choice == ToolChoice("required", ("tide__height",), parallel=False)
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "tide"}]}
    assert ask(tools=[TIDE, FUNCTION], tool_choice=allowed).choice == ToolChoice("auto", ("tide__height",))
    with pytest.raises(BadRequest) as fault:
        ask(tools=[TIDE], tool_choice={"type": "function", "name": "height"})
    assert fault.value.param == "tool_choice.name"


def test_the_most_calls_of_an_answer():
    assert ask(tools=[FUNCTION], max_tool_calls=1).choice == ToolChoice("auto", most=1)
    assert ask(tools=[FUNCTION], max_tool_calls=2).choice.again == "{0,1}"
    assert ask(tools=[FUNCTION], max_tool_calls=1_000_000).choice == ToolChoice("auto")
    assert ask(tools=[FUNCTION], max_tool_calls=2, parallel_tool_calls=False).choice.again == ""
    with pytest.raises(BadRequest) as fault:
        ask(max_tool_calls=0)
    assert fault.value.param == "max_tool_calls"


def test_tools_in_the_input_are_tools_and_no_message():
    lite = {
        "type": "additional_tools",
        "role": "developer",
        "tools": [{**TIDE, "name": "functions"}, {"type": "web_x"}],
    }
    found = ask(lite, {"role": "developer", "content": "Rules."}, tools=[{**FUNCTION, "name": "first"}])
    assert [tool.name for tool in found.tools] == ["first", "height"]
    assert found.tools[1].path == "input[1].tools[0].tools[0]"
    assert found.items[1:] == (Message("developer", (Text("Rules.", "input[2].content"),)),)
    assert found.skipped == ("web_x",)


def test_tools_of_a_continued_body_come_behind_the_items_and_once():
    lite = {"type": "additional_tools", "role": "developer", "tools": [TIDE]}

    def inherited(given, before):
        raw, previous = (json.dumps({"model": "m", "input": one}).encode() for one in (given, before))
        return json.loads(responses_echo.inherits(raw, previous))["input"]

    assert inherited([USER], [lite, USER]) == [USER, lite]
    assert inherited("hi", [lite]) == [USER, lite]
    assert inherited([], [USER, lite]) == [lite]
    assert inherited([lite, USER], [lite]) == [lite, USER]
    trigger = {"type": "compaction_trigger"}
    assert inherited([USER, trigger], [lite]) == [USER, lite, trigger]
    assert inherited([USER], "additional_tools") == [USER]


# --- what is echoed -----------------------------------------------------------------------------------


def test_a_namespaced_call_is_echoed_under_its_joined_name():
    call = {"type": "function_call", "call_id": "c", "name": "height", "namespace": "tide", "arguments": "{}"}
    assert items(call) == (Call("c", "tide__height", "{}", "input[1]"),)
    assert items({**call, "namespace": "functions"}) == (Call("c", "height", "{}", "input[1]"),)
    custom = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "namespace": "tide", "input": "x"}
    assert items(custom) == (Call("c", "tide__patch", '{"input": "x"}', "input[1]"),)


ECHOED = [
    (
        {"type": "local_shell_call", "id": "l", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
        (Call("c", "local_shell", '{"type": "exec", "command": ["ls"]}', "input[1]"),),
    ),
    (
        {"type": "local_shell_call_output", "id": "c", "output": "a b"},
        (Result("c", (Text("a b", "input[1].output"),)),),
    ),
    (
        {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a", "stderr": ""}]},
        (Result("c", (Text('[{"stdout": "a", "stderr": ""}]', "input[1].output"),)),),
    ),
    (
        {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "a"}},
        (Call("c", "apply_patch", '{"type": "delete_file", "path": "a"}', "input[1]"),),
    ),
    (
        {"type": "apply_patch_call_output", "call_id": "c", "status": "failed"},
        (Result("c", (Text("failed", "input[1].status"),)),),
    ),
    (
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "q"}},
        (Call("ws", "web_search", '{"type": "search", "query": "q"}', "input[1]"),),
    ),
    (
        {"type": "file_search_call", "id": "fs", "queries": ["q"], "results": [{"text": "found"}]},
        (
            Call("fs", "file_search", '{"queries": ["q"]}', "input[1]"),
            Result("fs", (Text("found", "input[1].results"),)),
        ),
    ),
    (
        {"type": "code_interpreter_call", "id": "ci", "code": "1", "outputs": [{"type": "image", "url": "data:x;,y"}]},
        (
            Call("ci", "code_interpreter", '{"code": "1"}', "input[1]"),
            Result("ci", (Text('[{"type": "image", "url": "[image]"}]', "input[1].outputs"),)),
        ),
    ),
    (
        {"type": "mcp_call", "id": "m", "server_label": "fs", "name": "read", "arguments": '{"p":1}', "output": "text"},
        (Call("m", "fs__read", '{"p":1}', "input[1]"), Result("m", (Text("text", "input[1].output"),))),
    ),
    (
        {"type": "mcp_call", "id": "m", "server_label": "fs", "name": "read", "arguments": "{}", "error": "no"},
        (Call("m", "fs__read", "{}", "input[1]"), Result("m", (Text("no", "input[1].error"),))),
    ),
    (
        {"type": "image_generation_call", "id": "ig", "status": "completed", "result": "AAAA" * 99},
        (Call("ig", "image_generation", "{}", "input[1]"), Result("ig", (Text("[image]", "input[1]"),))),
    ),
    (
        {"type": "tool_search_call", "call_id": "t", "arguments": {"q": "x"}},
        (Call("t", "tool_search", '{"q": "x"}', "input[1]"),),
    ),
    ({"type": "computer_call_output", "call_id": "c", "output": {}}, (Result("c", (Text("[image]", "input[1]"),)),)),
    (
        {"type": "agent_message", "author": "a", "content": [{"type": "input_text", "text": "done"}]},
        (Message("user", (Text("done", "input[1].content"),)),),
    ),
    ({"type": "mcp_list_tools", "id": "l", "server_label": "fs", "tools": []}, ()),
    ({"type": "mcp_approval_request", "id": "a"}, ()),
]


@pytest.mark.parametrize(("item", "found"), ECHOED, ids=[item["type"] for item, _ in ECHOED])
def test_items_of_other_tools_are_told_as_calls_and_results(item, found):
    asked = ask(item)
    assert asked.items[1:] == found
    assert asked.skipped == ()


def test_items_that_nobody_knows_are_left_out_and_named_once():
    asked = ask({"type": "future_item", "x": 1}, {"type": "future_item"}, {"type": "reasoning", "summary": []})
    assert asked.items[1:] == ()
    assert asked.skipped == ("future_item",)


_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=6,
)
_FIELDS = [
    "id",
    "call_id",
    "action",
    "operation",
    "arguments",
    "output",
    "outputs",
    "results",
    "content",
    "code",
    "name",
]


@settings(deadline=None)
@given(st.sampled_from([item["type"] for item, _ in ECHOED]), st.dictionaries(st.sampled_from(_FIELDS), _ANY))
def test_an_echo_never_ends_a_conversation(kind, values):
    for item in items({"type": kind, **values}):
        assert item.text is not None if isinstance(item, Message | Result) else item.call_id


# --- settings, and compaction -------------------------------------------------------------------------


def test_the_last_update_of_the_configuration_sets_the_format_unless_the_request_does():
    update = {"type": "configuration_update", "text": {"format": {"type": "json_object"}}}
    assert ask(update).format.kind == "json_object"
    assert ask(update).format.path == "input[1].text.format"
    assert ask(update, {**update, "text": {"format": {"type": "text"}}}).format is None
    assert ask(update, text={"format": {"type": "text"}}).format is None
    assert ask({"type": "configuration_update", "reasoning": {"effort": "low"}}).format is None
    with pytest.raises(BadRequest) as fault:
        ask({**update, "text": {"format": {"type": "json_schema"}}})
    assert fault.value.param == "input[1].text.format.name"


def test_a_compaction_is_a_message_with_what_it_holds_and_must_be_proved():
    blob = compaction.seal("The boat is Osprey. ☃", SECRET, "local")
    asked = ask({"type": "compaction", "id": "cmp_1", "encrypted_content": blob})
    (message,) = asked.items[1:]
    assert message.role == "user"
    assert message.text.endswith("The boat is Osprey. ☃")
    (sealed,) = asked.sealed
    compaction.genuine(sealed.blob, sealed.path, SECRET, "local")
    assert sealed.path == "input[1].encrypted_content"


BASE64 = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"


@pytest.mark.parametrize("change", ["secret", "tenant", "text", "cut", "version", "not ascii", "padded", "respelt"])
def test_a_compaction_of_another_server_key_or_text_is_refused(change):
    blob = compaction.seal("The boat is Osprey.", SECRET, "local")
    body, mac = blob.removeprefix(compaction.PREFIX).split(".")
    other = compaction.seal("The boat is Heron.", SECRET, "local").removeprefix(compaction.PREFIX).split(".")[0]
    changed = {
        "text": f"{compaction.PREFIX}{other}.{mac}",
        "cut": blob[:-1],
        "version": f"zj2.{body}.{mac}",
        "not ascii": f"{compaction.PREFIX}{body}.é",
        "padded": blob + "=",  # base64 of the same bytes
        "respelt": blob[:-1] + BASE64[BASE64.index(blob[-1]) + 1],  # likewise: its last bits say nothing
    }.get(change, blob)
    with pytest.raises(BadRequest) as fault:
        compaction.told(changed, "at")
        tenant, secret = ("other" if change == "tenant" else "local"), (b"x" if change == "secret" else SECRET)
        compaction.genuine(changed, "at", secret, tenant)
    assert fault.value.param == "at"


def test_the_wish_for_a_compaction_stands_last_and_forbids_calls():
    asked = ask({"type": "compaction_trigger"}, tools=[FUNCTION], tool_choice="required")
    assert asked.items[-1] == Message("user", (Text(compaction.ASKED, "input[1]"),))
    assert asked.choice == ToolChoice("none")
    assert [tool.name for tool in asked.tools] == ["height"], "the prompt's beginning stays what it was"
    with pytest.raises(BadRequest) as fault:
        ask({"type": "compaction_trigger"}, USER)
    assert fault.value.param == "input[1]"


def test_a_warm_up_samples_nothing():
    for body in ({"generate": False}, {"prompt_cache_options": {"prewarm": True}}):
        asked = ask(**body, min_tokens=5, stop="x", max_output_tokens=9, top_logprobs=2)
        assert asked.warm
        assert (asked.sampling.min_tokens, asked.sampling.logprobs, asked.stop, asked.max_tokens) == (0, -1, (), None)
    assert not ask(generate=True, prompt_cache_options={"prewarm": False}).warm
