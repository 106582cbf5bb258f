"""Bodies become Asks with the paths they came from; what is wrong or cannot be honoured is named."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zjournal.api import chat, responses, responses_echo
from zjournal.ask import CHOICES_MAX, Call, Message, Result, Sampling, Text, Thought, ToolSpec
from zjournal.errors import BadRequest

USER = [{"role": "user", "content": "hi"}]


def chat_ask(headers=None, **body):
    return chat.decode(json.dumps({"model": "m", "messages": USER, **body}).encode(), headers or {})


def responses_ask(headers=None, **body):
    return responses.decode(json.dumps({"model": "m", "input": "hi", **body}).encode(), headers or {})


# --- what is honoured ---------------------------------------------------------------------------------


def test_chat_items_carry_their_paths():
    ask = chat_ask(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
            {"role": "assistant", "content": "done", "reasoning_content": "never mind"},
        ]
    )
    assert ask.items == (
        Message("system", (Text("Be brief.", "messages[0].content"),)),
        Message("user", (Text("a", "messages[1].content[0].text"), Text("b", "messages[1].content[1].text"))),
        Call("c1", "f", '{"b": 1}', "messages[2].tool_calls[0].function"),
        Result("c1", (Text("42", "messages[3].content"),), "messages[3]"),
        Thought((Text("never mind", "messages[4].reasoning_content"),)),
        Message("assistant", (Text("done", "messages[4].content"),)),
    )


def test_names_of_participants_are_accepted_and_change_nothing():
    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    named = [{**message, "name": "ann"} for message in plain]
    assert chat_ask(messages=named).items == chat_ask(messages=plain).items


@pytest.mark.parametrize(
    ("more", "thoughts"),
    [
        ({"reasoning": "Hm."}, (Thought((Text("Hm.", "messages[0].reasoning"),)),)),
        ({"reasoning": "Hm.", "reasoning_content": "Hm."}, (Thought((Text("Hm.", "messages[0].reasoning_content"),)),)),
        ({"reasoning_content": ""}, ()),
        ({"reasoning_content": None, "reasoning": None}, ()),
    ],
)
def test_thoughts_that_a_chat_client_sends_back_come_before_what_was_said(more, thoughts):
    ask = chat_ask(messages=[{"role": "assistant", "content": "done", **more}])
    assert ask.items == (*thoughts, Message("assistant", (Text("done", "messages[0].content"),)))


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "a", "reasoning_content": "b"}, "messages[0].reasoning_content"),
        ({"role": "assistant", "content": "a", "reasoning_content": "b", "reasoning": "c"}, "messages[0].reasoning"),
        ({"role": "assistant", "content": "a", "reasoning_content": {"b": 1}}, "messages[0].reasoning_content"),
    ],
)
def test_thoughts_that_cannot_be_are_refused(message, param):
    with pytest.raises(BadRequest) as caught:
        chat_ask(messages=[message])
    assert caught.value.param == param


def test_thoughts_among_responses_items():
    content = [{"type": "reasoning_text", "text": "Hm."}, {"type": "reasoning_text", "text": ""}]
    told = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "S"}], "content": content}
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    ask = responses_ask(input=[told, call])
    assert ask.items == (Thought((Text("Hm.", "input[0].content[0].text"),)), Call("c1", "f", "{}", "input[1]"))
    with pytest.raises(BadRequest) as caught:
        responses_ask(input=[{**told, "content": [{"type": "reasoning_text"}]}, call])
    assert caught.value.param == "input[0].content[0].text"


def test_responses_items_carry_their_paths_and_need_no_type_id_or_status():
    ask = responses_ask(
        instructions="Be brief.",
        previous_response_id="resp_1",
        input=[
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": None},
            {"role": "assistant", "content": [{"type": "output_text", "text": "yo", "annotations": []}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "not json"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "1 file"}]},
            {"type": "function_call_output", "call_id": "c2", "output": "plain"},
            {"type": "future_item_2031", "role": 7},
            {"type": "message", "id": "msg_1", "status": "completed", "role": "developer", "content": "x"},
        ],
    )
    assert ask.instructions == Text("Be brief.", "instructions")
    assert ask.previous == "resp_1"
    assert ask.items == (
        Message("user", (Text("hi", "input[0].content"),)),
        Message("assistant", (Text("yo", "input[2].content[0].text"),)),
        Call("c1", "f", "not json", "input[3]"),
        Result("c1", (Text("1 file", "input[4].output[0].text"),), "input[4]"),
        Result("c2", (Text("plain", "input[5].output"),), "input[5]"),
        Message("developer", (Text("x", "input[7].content"),)),
    )


def test_a_string_input_is_one_user_message():
    assert responses_ask(input="hello").items == (Message("user", (Text("hello", "input"),)),)


def test_unknown_tool_types_are_skipped_and_parameters_keep_their_bytes():
    raw = b"""{"model":"m","stream":true,"input":"hi","tools":[
      {"type":"function","name":"z","parameters":{"type": "object","b":1,"a":2}},
      {"type":"web_search"},{"type":"local_shell"},
      {"type":"namespace","name":"tide","tools":[{"type":"function","name":"h"}]},
      {"type":"future_tool_2031","name":{"x":1}},
      {"type":"function","name":"y","description":"d","parameters":null}]}"""
    ask = responses.decode(raw, {})
    assert ask.tools == (
        ToolSpec("z", None, b'{"type": "object","b":1,"a":2}', "tools[0]"),
        ToolSpec("tide__h", None, b"{}", "tools[3].tools[0]", namespace="tide"),
        ToolSpec("y", "d", b"{}", "tools[5]"),
    )
    assert ask.skipped == ("web_search", "local_shell", "future_tool_2031")


def test_chat_tools_stand_one_level_deeper():
    ask = chat_ask(tools=[{"type": "future", "custom": {}}, {"type": "function", "function": {"name": "f"}}])
    assert ask.tools == (ToolSpec("f", None, b"{}", "tools[1].function"),)


@pytest.mark.parametrize("decoded", [chat_ask, responses_ask])
def test_sampling_and_defaults(decoded):
    assert decoded().sampling == Sampling(1.0, 1.0, 0, None)
    ask = decoded(temperature=0, top_p=0.5, top_k=7, seed=-3, stop=["a", "b"], stream=True, store=False)
    assert ask.sampling == Sampling(0.0, 0.5, 7, -3)
    assert (ask.stop, ask.stream, ask.store, ask.max_tokens) == (("a", "b"), True, False, None)
    assert decoded(stop="x").stop == ("x",)
    assert decoded(stop=None).stop == ()


EVERY_SETTING = {
    "temperature": 1.5,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.1,
    "seed": 3,
    "repetition_penalty": 1.2,
    "presence_penalty": -2,
    "frequency_penalty": 2,
    "logit_bias": {"5": -100, "0": 1.5},
    "min_tokens": 4,
}


@pytest.mark.parametrize("decoded", [chat_ask, responses_ask])
def test_every_setting_is_carried(decoded):
    assert decoded(**EVERY_SETTING).sampling == Sampling(
        temperature=1.5,
        top_p=0.5,
        top_k=7,
        seed=3,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias=((0, 1.5), (5, -100.0)),
        min_tokens=4,
    )
    assert decoded(**dict.fromkeys(EVERY_SETTING)).sampling == Sampling()
    assert decoded(top_k=-1, logit_bias={}).sampling == Sampling()


def test_logprobs_are_asked_for_in_each_protocols_way():
    assert chat_ask(logprobs=False, top_logprobs=0).sampling.logprobs == -1
    assert chat_ask(logprobs=True).sampling.logprobs == 0
    assert chat_ask(logprobs=True, top_logprobs=20).sampling.logprobs == 20
    assert responses_ask(top_logprobs=0, include=["reasoning.encrypted_content"]).sampling.logprobs == -1
    assert responses_ask(include=["message.output_text.logprobs"]).sampling.logprobs == 0
    assert responses_ask(include=["message.output_text.logprobs"], top_logprobs=2).sampling.logprobs == 2
    assert responses_ask(top_logprobs=3).sampling.logprobs == 3


def test_limits_on_output():
    assert chat_ask(max_tokens=5).max_tokens == 5
    assert chat_ask(max_completion_tokens=6).max_tokens == 6
    assert chat_ask(max_completion_tokens=6, max_tokens=6).max_tokens == 6
    assert responses_ask(max_output_tokens=7).max_tokens == 7


@pytest.mark.parametrize("decoded", [chat_ask, responses_ask])
def test_the_salt_of_the_cache(decoded):
    assert decoded().cache_salt is None
    assert decoded(cache_salt="s" * 256).cache_salt == "s" * 256
    for bad in ("", "s" * 257, 5):
        with pytest.raises(BadRequest) as caught:
            decoded(cache_salt=bad)
        assert caught.value.param == "cache_salt"


@pytest.mark.parametrize("decoded", [chat_ask, responses_ask])
def test_the_first_name_of_the_session_counts(decoded):
    assert decoded().session_key is None
    assert decoded(prompt_cache_key="k").session_key == "k"
    assert decoded({"session_id": "s"}, prompt_cache_key="k").session_key == "s"
    assert decoded({"x-session-id": "t", "session-id": "u"}).session_key == "u"
    assert decoded({"x-claude-code-session-id": "c", "session-id": "u"}).session_key == "c"


def test_what_codex_sends_is_accepted():
    ask = responses_ask(
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        client_metadata={"a": 1},
        text={"verbosity": "low"},
        service_tier="auto",
        some_field_of_the_future={"x": [1]},
    )
    assert not ask.store


# --- what is refused ----------------------------------------------------------------------------------

SETTINGS_BAD = [
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 11}, "repetition_penalty"),
    ({"presence_penalty": -2.1}, "presence_penalty"),
    ({"frequency_penalty": 2.1}, "frequency_penalty"),
    ({"frequency_penalty": "much"}, "frequency_penalty"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"top_logprobs": -1}, "top_logprobs"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"logit_bias": {"the": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"05": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 100.5}}, "logit_bias.5"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    ({"seed": 2**63}, "seed"),
]


@pytest.mark.parametrize(("body", "param"), SETTINGS_BAD, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("decoded", [chat_ask, responses_ask])
def test_a_setting_out_of_its_range_is_named(decoded, body, param):
    with pytest.raises(BadRequest) as caught:
        decoded(**body)
    assert caught.value.param == param
    assert param.partition(".")[0] in caught.value.message


CHAT_BAD = [
    ({"model": None}, "model"),
    ({"model": ""}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [*USER, {"role": "user", "content": [{"type": "video_url"}]}]}, "messages[1].content[0]"),
    ({"messages": [{"role": "tools", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": "x",
                    "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": ""}}],
                }
            ]
        },
        "messages[0].tool_calls",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]}]},
        "messages[0].tool_calls[0].function",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "custom": {"name": "f"}}]}]},
        "messages[0].tool_calls[0].custom.input",
    ),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"seed": 2**63}, "seed"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ["x", ""]}, "stop[1]"),
    ({"stop": "x" * 257}, "stop"),
    ({"n": 0}, "n"),
    ({"n": CHOICES_MAX + 1}, "n"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url"),
    ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages[0].content[0].file"),
    (
        {"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]},
        "messages[0].content[0].file.file_data",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "?"}}]}]},
        "messages[0].content[0].input_audio.data",
    ),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].name"),
    ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio"),
    ({"messages": [{"role": "user", "content": "x", "refusal": "no"}]}, "messages[0].refusal"),
    (
        {"messages": [{"role": "user", "content": "x", "function_call": {"name": "f", "arguments": ""}}]},
        "messages[0].function_call",
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "function_call": {"name": "f", "arguments": ""},
                    "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": ""}}],
                }
            ]
        },
        "messages[0].function_call",
    ),
    ({"functions": [{"description": "f"}]}, "functions[0].name"),
    ({"functions": [{"name": "f"}], "tools": [{"type": "function", "function": {"name": "f"}}]}, "functions"),
    ({"functions": [{"name": "f"}], "tool_choice": "auto"}, "functions"),
    ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call.name"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"functions": [{"name": "f"}], "function_call": "required"}, "function_call"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}], "function_call": "none"}, "function_call"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
    ({"prompt_cache_options": {"comparison_response_id": "r"}}, "prompt_cache_options.comparison_response_id"),
    ({"generate": False}, "generate"),
    ({"verbosity": "loud"}, "verbosity"),
    ({"reasoning_effort": 3}, "reasoning_effort"),
    ({"prediction": {"type": "guess", "content": ""}}, "prediction.type"),
    ({"user": 7}, "user"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 3, "logprobs": False}, "top_logprobs"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"parameters": {}}}]}, "tools[0].function.name"),
    ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]}, "tools[0].function.parameters"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    ({"stream": "yes"}, "stream"),
]

RESPONSES_BAD = [
    ({"model": 3}, "model"),
    ({"input": 3}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"type": "reasoning"}]}, "input"),
    ({"input": [3]}, "input[0]"),
    ({"input": [{"type": 3}]}, "input[0].type"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_video"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"role": "user", "content": [{"type": "refusal", "text": "x"}]}]}, "input[0].content[0].refusal"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}]},
        "input[0].output[0].image_url",
    ),
    ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input[0].input"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
    ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"instructions": ["x"]}, "instructions"),
    ({"previous_response_id": 5}, "previous_response_id"),
    ({"background": True, "store": False}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity"),
    ({"tools": [{"type": "function", "parameters": {}}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "f", "parameters": "x"}]}, "tools[0].parameters"),
    ({"metadata": {"k" * 65: "v"}}, "metadata"),
    ({"metadata": {"k": "v" * 513}}, "metadata.k"),
    ({"reasoning": "high"}, "reasoning"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
]


@pytest.mark.parametrize(("body", "param"), CHAT_BAD, ids=lambda value: str(value)[:60])
def test_chat_names_what_is_wrong(body, param):
    with pytest.raises(BadRequest) as caught:
        chat_ask(**body)
    assert caught.value.param == param
    assert param.split("[")[0] in caught.value.message


@pytest.mark.parametrize(("body", "param"), RESPONSES_BAD, ids=lambda value: str(value)[:60])
def test_responses_names_what_is_wrong(body, param):
    with pytest.raises(BadRequest) as caught:
        responses_ask(**body)
    assert caught.value.param == param
    assert param.split("[")[0] in caught.value.message


@pytest.mark.parametrize("decode", [chat.decode, responses.decode])
@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"hello", None),
        (b"[]", None),
        (b"null", None),
        (b"{}", "model"),
        (b'{"model":"\xff"}', None),
        (b'{"model":"\\ud800"}', "model"),
        (b'{"model":' + b"[" * 100_000, "model"),
        (b'{"x":' + b"[" * 100_000, None),
        (b'{"model":"m","messages":[],"input":"x","tools":[{"type":"function","name":"f","parameters":{"a":"\xff"},'
         b'"function":{"name":"f","parameters":{"a":"\xff"}}}]}', ...),
    ],
)  # fmt: skip
def test_bodies_that_are_no_request(decode, raw, param):
    with pytest.raises(BadRequest) as caught:
        decode(raw, {})
    if param is not ...:
        assert caught.value.param == param


def test_an_empty_input_may_continue_a_chain():
    assert responses_ask(input=[], previous_response_id="resp_1").items == ()


# --- anything at all ----------------------------------------------------------------------------------

_STRUCTS = (chat._Body, responses._Body, responses_echo.Echo)
KEYS = sorted({name for struct in _STRUCTS for name in struct.__struct_fields__})
SMALL = ["type", "role", "content", "text", "function", "name", "parameters", "arguments", "output", "call_id", "id"]
WORDS = ["user", "assistant", "tool", "message", "function", "function_call", "function_call_output", "input_text", "m"]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(WORDS) | st.text()
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(SMALL), inner, max_size=5),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6))
def test_only_bad_request_escapes(body):
    raw = json.dumps({"model": "m", "input": "x", "messages": USER, **body}).encode()
    for decode in (chat.decode, responses.decode):
        try:
            ask = decode(raw, {})
        except BadRequest as fault:
            assert fault.message
        else:
            assert ask.model


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.integers(min_value=0, max_value=120))
def test_only_bad_request_escapes_from_damaged_bytes(noise, at):
    sound = b'{"model":"m","input":[{"role":"user","content":"hi"}],"messages":[{"role":"user","content":"hi"}]}'
    for decode in (chat.decode, responses.decode):
        try:
            decode(sound[:at] + noise + sound[at:], {})
        except BadRequest as fault:
            assert fault.message


# --- who asks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [chat_ask, responses_ask])
def test_who_asks_is_kept_by_a_few_headers(ask):
    headers = {
        "user-agent": "a/1",
        "originator": "cli",
        "session_id": "s7",
        "x-client-request-id": "r9",
        "accept": "*/*",
    }
    assert ask(headers).client == (("user-agent", "a/1"), ("originator", "cli"), ("session_id", "s7"))
    assert ask().client == ()
    assert ask({"user-agent": "x" * 5000}).client == (("user-agent", "x" * 256),)


@pytest.mark.parametrize(
    "value",
    [
        "agent k-123456",
        "agent z-654321",
        "Bearer abcdef",
        "agent (Basic YTpi)",
        "agent token=abc",
        "agent api_key: abc",
        "https://me:word@example.org/agent",
        "sk-live-1234",
    ],
)
def test_a_header_that_may_hold_a_credential_is_not_kept(value):
    keys = {"authorization": "Bearer k-123456", "x-api-key": "z-654321"}
    assert chat_ask({**keys, "user-agent": value, "session-id": value, "originator": "o"}).client == (
        ("originator", "o"),
    )


@pytest.mark.parametrize("value", ["openai-python/1.0 (token counting)", "task-sketch/2", "curl/8.5.0", "Basically/1"])
def test_a_usual_header_is_kept(value):
    assert chat_ask({"authorization": "Bearer k-123456", "user-agent": value}).client
