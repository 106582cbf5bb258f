"""Messages end to end, with the official client on loopback: threads, exact counts, reuse, and the journal."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import beta_tool
from pydantic import BaseModel

from tests.server.test_restart import verify
from tests.serving import Server, saying, scripted, zj
from zjournal.journal.events import RequestAccepted
from zjournal.journal.reader import Reader
from zjournal.sessions.makers import Makers
from zjournal.sessions.records import Records

PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOLS: Any = [{"name": "ls", "description": "Lists a folder.", "input_schema": PARAMETERS}]
LINE = "x-anthropic-billing-header: cc_version=9.9.9; cc_entrypoint=cli; cch={};"
RULES = "Answer in one short line, and never mention the weather in the harbour. " * 20
PNG = base64.b64encode(b"\x89PNG" + bytes(range(256)) * 40).decode()
CALL = '<tool_call>\n{"name": "ls", "arguments": {"path": "a"}}\n</tool_call>'
THREE = "\n".join(CALL.replace('"a"', f'"{name}"') for name in "abc")
CUT = '<tool_call>\n{"name": "ls", "arguments": {"path": "the far side of the old harbour, where "}}\n</tool_call>'

# What the model says, by the words that a prompt ends with; the first that stands in it counts.
SAID = {
    "Error: no such folder": "I see.",
    "listed: boats": "Three boats.",
    "say thought": f"<think>\nFirst I look.\n</think>\n\nLet me look.\n{CALL}",
    "say three": THREE,
    "say cut": CUT,
    "say stop": "One END two",
    "say json": '{"name": "Osprey", "length": 9}',
    "call ls": CALL,
}
TIMES = 12  # that each of them can be said


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("messages")
    turns = saying(SAID, TIMES)
    turns.append({"text": "It breaks.", "when": "say broken", "fail_after": 2})
    turns.append({"text": "The tide is low."})
    with Server(folder / "data", model=scripted(folder, *turns, dialect="chatml+think")) as running:
        yield running
        running.kill()
        verify(folder / "data")


@pytest.fixture
def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="unused", max_retries=0)


def say(server: Server, *messages: Any, expect: int = 200, headers: Any = None, **more: Any) -> dict[str, Any]:
    """POST /v1/messages; each message is a pair of role and content."""
    body = {"model": "default", "max_tokens": 200, "messages": [{"role": r, "content": c} for r, c in messages], **more}
    answer = server.post("/v1/messages?beta=true", body, headers=headers)
    assert answer.status_code == expect, answer.text
    return answer.json()


def count(server: Server, *messages: Any, **more: Any) -> int:
    body = {"model": "default", "messages": [{"role": r, "content": c} for r, c in messages], **more}
    answer = server.post("/v1/messages/count_tokens?beta=true", body)
    assert answer.status_code == 200, answer.text
    assert set(answer.json()) == {"input_tokens"}
    return answer.json()["input_tokens"]


def prompt(message: dict[str, Any]) -> int:
    usage = message["usage"]
    return usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]


def cached(message: dict[str, Any]) -> int:
    return message["usage"]["cache_read_input_tokens"]


def accepted(server: Server, response: str) -> RequestAccepted:
    """The fact that accepted a request."""
    with Reader.open(server.data_dir) as reader:
        event = reader.read_response(response)[0].event
    assert isinstance(event, RequestAccepted)
    return event


# --- threads ------------------------------------------------------------------------------------------


def test_threads_go_on_after_kill_9(server: Server, ask: Any) -> None:
    client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="unused", max_retries=0)
    thread = client.beta.messages.thread(model="default", max_tokens=100, system=RULES, tools=TOOLS, messages=[])
    first = thread.send({"role": "user", "content": ask("My boat is called Osprey.")})
    server.restart()
    second = thread.send({"role": "user", "content": "call ls"})
    assert [block.type for block in second.content] == ["tool_use"]  # the tools are still those of the thread
    server.restart()
    result = {"type": "tool_result", "tool_use_id": second.content[0].id, "content": "listed: boats"}
    third = thread.send({"role": "user", "content": [result]})
    assert third.content[0].text == "Three boats."
    assert thread.previous_message_id == third.id
    sizes = [prompt(message.to_dict()) + message.usage.output_tokens for message in (first, second, third)]
    assert prompt(second.to_dict()) > sizes[0]
    assert prompt(third.to_dict()) > sizes[1]
    with Reader.open(server.data_dir) as reader:
        rows = [reader.turn(message.id) for message in (first, second, third)]
    assert [row.parent for row in rows if row] == ["", first.id, second.id]
    assert len({row.session for row in rows if row}) == 1


def thread_error(server: Server, previous: str, expect: int, headers: Any = None, **more: Any) -> str:
    thread = {"type": "continue", "previous_message_id": previous}
    told = say(server, ("user", "go on"), thread=thread, expect=expect, headers=headers, **more)
    return told["error"]["details"]["error_code"]


def test_each_reply_is_continued_once(server: Server, ask: Any) -> None:
    first = say(server, ("user", ask("begin")), thread={"type": "create"}, tools=TOOLS)
    held = {"type": "continue", "previous_message_id": first["id"]}
    say(server, ("user", "go on"), thread=held)
    assert thread_error(server, first["id"], 400) == "thread_already_continued"
    server.restart()
    assert thread_error(server, first["id"], 400) == "thread_already_continued"
    # Who sends all of it again does not continue the thread: it may be told twice.
    history = [("user", ask("begin")), ("assistant", first["content"]), ("user", "go on")]
    assert say(server, *history, tools=TOOLS)["content"] == first["content"]


def test_what_is_no_thread_is_not_found(server: Server, ask: Any) -> None:
    plain = say(server, ("user", ask("begin")))
    response = server.respond(input=ask("begin"))
    for previous in (plain["id"], response["id"], "msg_" + "0" * 32, "anything"):
        assert thread_error(server, previous, 404) == "thread_not_found"
    begun = say(server, ("user", ask("delete me")), thread={"type": "create"})
    done = zj("sessions", "delete", begun["id"], "--yes", "--data-dir", str(server.data_dir))
    assert done.returncode == 0, done.stdout + done.stderr
    assert thread_error(server, begun["id"], 404) == "thread_not_found"


def test_what_belongs_to_the_thread_is_not_said_again(server: Server, ask: Any) -> None:
    first = say(server, ("user", ask("begin")), thread={"type": "create"}, tools=TOOLS, system=RULES)
    for again in ({"tools": TOOLS}, {"system": RULES}):
        assert thread_error(server, first["id"], 400, **again) == "thread_fingerprint_mismatch"
    held = {"type": "continue", "previous_message_id": first["id"]}
    assert say(server, ("user", "call ls"), thread=held)["stop_reason"] == "tool_use"


def test_a_continuation_that_failed_may_be_tried_again(server: Server, ask: Any) -> None:
    first = say(server, ("user", ask("begin")), thread={"type": "create"})
    held = {"type": "continue", "previous_message_id": first["id"]}
    broken = say(server, ("user", "say broken"), thread=held, expect=500)
    assert broken["error"]["type"] == "api_error"
    assert say(server, ("user", "go on"), thread=held)["content"][0]["text"] == "The tide is low."


def test_o25_a_thread_belongs_to_its_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a:sk-first-key-0123456789\nb:sk-second-key-0123456789\n")
    keys.chmod(0o600)
    with Server(tmp_path / "data", "--api-key-file", str(keys), model=scripted(tmp_path, {"text": "Ok."})) as server:
        mine, other = {"x-api-key": "sk-first-key-0123456789"}, {"authorization": "Bearer sk-second-key-0123456789"}
        server.http.headers.update(mine)
        first = say(server, ("user", "begin"), thread={"type": "create"})
        del server.http.headers["x-api-key"]
        assert thread_error(server, first["id"], 404, headers=other) == "thread_not_found"
        told = say(server, ("user", "x"), headers=other, diagnostics={"previous_message_id": first["id"]})
        assert told["diagnostics"]["cache_miss_reason"] == {"type": "previous_message_not_found"}
        held = {"type": "continue", "previous_message_id": first["id"]}
        assert say(server, ("user", "go on"), headers=mine, thread=held)["content"][0]["text"] == "Ok."


def test_of_two_that_continue_at_once_one_is_refused(tmp_path: Path) -> None:
    slow = {"text": "Slow.", "when": "slowly", "prefill_ms_per_1k": 20_000}
    with Server(tmp_path / "data", model=scripted(tmp_path, slow, {"text": "Ok."})) as server:
        first = say(server, ("user", "begin"), thread={"type": "create"})
        held = {"type": "continue", "previous_message_id": first["id"]}
        body = {"model": "default", "max_tokens": 9, "stream": True, "thread": held}
        body["messages"] = [{"role": "user", "content": "slowly"}]
        with server.http.stream("POST", "/v1/messages", json=body) as running:
            assert running.status_code == 200  # it is accepted
            with httpx.Client(base_url=server.http.base_url, timeout=30) as second:
                refused = second.post("/v1/messages", json={**body, "stream": False})
            assert refused.status_code == 400
            assert refused.json()["error"]["details"] == {"error_code": "thread_continue_in_flight"}
            running.read()
        assert thread_error(server, first["id"], 400) == "thread_already_continued"


def test_the_tool_runner_threads_by_itself(server: Server, client: anthropic.Anthropic, ask: Any) -> None:
    ran: list[str] = []

    @beta_tool
    def ls(path: str) -> str:
        """Lists a folder."""
        ran.append(path)
        return "listed: boats"

    words: Any = [{"role": "user", "content": ask("say thought")}]
    runner = client.beta.messages.tool_runner(model="default", max_tokens=200, messages=words, tools=[ls], system=RULES)
    first, last = list(runner)
    assert ran == ["a"]
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert last.content[0].text == "Three boats."
    assert accepted(server, last.id).previous == first.id
    # All but the result is reused: the prompt, and what was said, thoughts included.
    assert cached(last.to_dict()) >= prompt(first.to_dict()) + first.usage.output_tokens - 1


# --- counts and reuse ---------------------------------------------------------------------------------

RICH: Any = [
    ("user", [{"type": "text", "text": "look"}, {"type": "image", "source": {"type": "base64", "data": PNG}}]),
    ("system", [{"type": "text", "text": "Helpers: painter, cook."}]),
    (
        "assistant",
        [
            {"type": "thinking", "thinking": "A chart.", "signature": "s"},
            {"type": "text", "text": "Hm."},
            {"type": "tool_use", "id": "toolu_1", "name": "ls", "input": {"path": "b"}},
        ],
    ),
    ("user", [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "no such folder", "is_error": True}]),
]


def test_count_tokens_is_the_real_prompt(server: Server, ask: Any) -> None:
    more = {"system": [{"type": "text", "text": LINE.format("a")}, {"type": "text", "text": RULES}], "tools": TOOLS}
    cases: list[Any] = [
        ([("user", ask("hi"))], {}),
        ([("user", ask("hi"))], more),
        ([*RICH], {**more, "thinking": {"type": "adaptive"}}),
        ([*RICH, ("system", "Be quick.")], {**more, "tool_choice": {"type": "none"}}),
    ]
    for messages, options in cases:
        counted = count(server, *messages, **options)
        assert counted == prompt(say(server, *messages, **options))
        assert count(server, *messages, **options) == counted


def test_count_tokens_knows_what_the_chain_puts_back(server: Server, ask: Any) -> None:
    """Thoughts that a client leaves out of its history are in the prompt, so they are in the number."""
    options: Any = {"tools": TOOLS, "thinking": {"type": "adaptive", "display": "omitted"}}
    user = ("user", ask("say thought"))
    first = say(server, user, **options)
    assert first["content"][0] == {"type": "thinking", "thinking": "", "signature": first["content"][0]["signature"]}
    result = {"type": "tool_result", "tool_use_id": first["content"][-1]["id"], "content": "listed: boats"}
    history = [user, ("assistant", first["content"]), ("user", [result])]
    counted = count(server, *history, **options)
    second = say(server, *history, **options)
    assert counted == prompt(second)
    assert cached(second) >= prompt(first) + first["usage"]["output_tokens"] - 1
    assert accepted(server, second["id"]).restored == 1


def test_o02_an_image_in_a_result_is_a_few_tokens(server: Server, ask: Any) -> None:
    call = ("assistant", [{"type": "tool_use", "id": "toolu_9", "name": "view", "input": {}}])
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
    result = {"type": "tool_result", "tool_use_id": "toolu_9", "content": [{"type": "text", "text": "1 file"}, image]}
    first = say(server, ("user", ask("look")), call, ("user", [result]))
    assert prompt(first) < 200
    with Reader.open(server.data_dir) as reader:
        row = reader.turn(first["id"])
    assert row is not None
    assert row.prompt == prompt(first)


def test_o03_a_system_message_in_the_middle_stays_there(server: Server, ask: Any) -> None:
    system = "You keep a lighthouse log. " * 20
    opening = [("user", ask("hello")), ("system", "Helpers: painter, cook.")]
    first = say(server, *opening, system=system)
    then = [*opening, ("assistant", first["content"]), ("system", "Reminder: list is empty."), ("user", "next entry")]
    second = say(server, *then, system=system)
    assert cached(second) >= prompt(first)
    # As a string or as a list, with marks or without: the same tokens.
    marked = [{"type": "text", "text": "Helpers: painter, cook.", "cache_control": {"type": "ephemeral"}}]
    again = say(server, then[0], ("system", marked), *then[2:], system=system)
    assert prompt(again) == prompt(second)
    assert cached(again) == prompt(again) - 1


def test_o07_the_attribution_line_costs_nothing(server: Server, ask: Any) -> None:
    def turn(cch: str, *messages: Any) -> dict[str, Any]:
        blocks = [{"type": "text", "text": LINE.format(cch)}, {"type": "text", "text": RULES}]
        return say(server, *messages, system=blocks)

    user = ("user", ask("go"))
    first = turn("aaaa1", user)
    second = turn("bbbb2", user, ("assistant", first["content"]), ("user", "on"))
    assert cached(second) >= prompt(first) + first["usage"]["output_tokens"] - 1
    assert accepted(server, second["id"]).ignored == ("attribution_line",)
    with Reader.open(server.data_dir) as reader:
        row = reader.turn(second["id"])
        assert row is not None
        assert b"cch=bbbb2" in Records(reader, Makers(reader)).body(row)  # which is kept as it came
    quoted = say(server, ("user", [{"type": "text", "text": ask(LINE.format("cccc3"))}]))
    assert accepted(server, quoted["id"]).ignored == ()


def test_the_attribution_line_can_be_kept(tmp_path: Path) -> None:
    model = scripted(tmp_path, {"text": "Ok."})
    with Server(tmp_path / "data", "--attribution-line", "keep", model=model) as server:
        blocks = [{"type": "text", "text": LINE.format("a")}, {"type": "text", "text": RULES}]
        kept, other = say(server, ("user", "x"), system=blocks), say(server, ("user", "x"), system=RULES)
        assert prompt(kept) > prompt(other)
        assert accepted(server, kept["id"]).ignored == ()
        assert count(server, ("user", "x"), system=blocks) == prompt(kept)


def test_the_same_body_without_streaming_is_the_same_prompt(server: Server, ask: Any) -> None:
    body = {"model": "default", "max_tokens": 50, "messages": [{"role": "user", "content": ask("hi")}], "system": RULES}
    events = list(server.events("/v1/messages?beta=true", {**body, "stream": True}))
    start = events[0]["message"]
    assert [event["type"] for event in (events[0], events[-2], events[-1])] == [
        *("message_start", "message_delta", "message_stop")
    ]
    whole = server.post("/v1/messages?beta=true", body).json()
    assert prompt(start) == prompt({"usage": events[-2]["usage"]}) == prompt(whole)
    assert cached(whole) == prompt(whole) - 1
    assert start["usage"]["cache_read_input_tokens"] == events[-2]["usage"]["cache_read_input_tokens"]


def test_r05_no_output_is_asked_for_to_warm_the_cache(server: Server, ask: Any) -> None:
    body = ("user", ask("warm"))
    warmed = say(server, body, system=RULES, max_tokens=0)
    assert (warmed["content"], warmed["stop_reason"]) == ([], "max_tokens")
    assert warmed["usage"]["output_tokens"] == 0
    assert cached(say(server, body, system=RULES)) == prompt(warmed) - 1


def test_an_answer_goes_on_where_it_was_cut(server: Server, ask: Any) -> None:
    user = ("user", ask("the tide?"))
    cut = say(server, user, max_tokens=3)
    assert cut["stop_reason"] == "max_tokens"
    history = [user, ("assistant", cut["content"])]
    more = say(server, *history)
    assert prompt(more) == prompt(cut) + 3  # the very tokens
    assert cached(more) >= prompt(cut) + 2
    assert count(server, *history) == prompt(more)
    other = say(server, user, ("assistant", "Sir, the "))
    assert prompt(other) > prompt(cut)
    assert cached(other) >= prompt(cut) - 1


# --- answers ------------------------------------------------------------------------------------------


def test_o23_a_call_that_is_cut_is_not_one_to_run(server: Server, client: anthropic.Anthropic, ask: Any) -> None:
    user: Any = {"role": "user", "content": ask("say cut")}
    body: Any = {"model": "default", "max_tokens": 22, "messages": [user], "tools": TOOLS}
    whole = client.messages.create(**body)
    with client.messages.stream(**body) as stream:
        final = stream.get_final_message()
    for message in (whole, final):
        assert message.stop_reason == "max_tokens"
        assert [block.type for block in message.content] == ["tool_use"]
        assert message.content[0].input == {}
    said = ("assistant", whole.to_dict()["content"])
    say(server, ("user", user["content"]), said, ("user", "hm"), tools=TOOLS)


def test_o24_parallel_calls_are_apart(client: anthropic.Anthropic, ask: Any) -> None:
    body: Any = {"model": "default", "max_tokens": 300, "tools": TOOLS}
    body["messages"] = [{"role": "user", "content": ask("say three")}]
    whole = client.messages.create(**body)
    with client.messages.stream(**body) as stream:
        final = stream.get_final_message()
    for message in (whole, final):
        assert [block.input for block in message.content] == [{"path": name} for name in "abc"]
        assert len({block.id for block in message.content}) == 3
        assert message.stop_reason == "tool_use"


def test_the_stop_sequence_that_was_met_is_named(server: Server, ask: Any) -> None:
    body: Any = {"stop_sequences": ["two", "END"]}
    told = say(server, ("user", ask("say stop")), **body)
    assert (told["content"][0]["text"], told["stop_reason"], told["stop_sequence"]) == ("One ", "stop_sequence", "END")
    events = list(server.events("/v1/messages", {**_body(ask("say stop")), **body, "stream": True}))
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}


def _body(words: str) -> dict[str, Any]:
    return {"model": "default", "max_tokens": 100, "messages": [{"role": "user", "content": words}]}


class Boat(BaseModel):
    name: str
    length: int


def test_the_form_of_an_answer(client: anthropic.Anthropic, ask: Any) -> None:
    words: Any = [{"role": "user", "content": ask("say json")}]
    parsed = client.messages.parse(model="default", max_tokens=60, messages=words, output_format=Boat)
    assert parsed.parsed_output == Boat(name="Osprey", length=9)
    thread = client.beta.messages.thread(model="default", max_tokens=60, output_format=Boat, messages=[])
    assert thread.parse(words[0]).parsed_output == Boat(name="Osprey", length=9)


def test_thoughts_can_be_shown_left_out_or_not_told_at_all(server: Server, ask: Any) -> None:
    def thoughts(**thinking: Any) -> list[str]:
        told = say(server, ("user", ask("say thought")), tools=TOOLS, **thinking)
        return [block["thinking"] for block in told["content"] if block["type"] == "thinking"]

    assert thoughts() == thoughts(thinking={"type": "adaptive"}) == ["First I look."]
    assert thoughts(thinking={"type": "adaptive", "display": "omitted"}) == [""]
    assert thoughts(thinking={"type": "disabled"}) == []


def test_r24_an_orphan_is_named_and_a_call_without_a_result_is_not_refused(server: Server, ask: Any) -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_gone", "content": "x"}
    told = say(server, ("user", ask("hi")), ("user", [result]), expect=400)
    assert told["error"]["message"].startswith("messages.1.content.0.tool_use_id: ")
    assert "toolu_gone" in told["error"]["message"]
    call = {"type": "tool_use", "id": "toolu_lost", "name": "ls", "input": {}}
    say(server, ("user", ask("hi")), ("assistant", [call]), ("user", "never mind"), tools=TOOLS)


def test_text_that_is_no_unicode_is_refused_where_it_stands(server: Server, ask: Any) -> None:
    call = {"type": "tool_use", "id": "c", "name": "ls", "input": {"path": "LONE"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
    bodies: list[Any] = [
        {"messages": [{"role": "user", "content": "LONE"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "LONE"}]}]},
        {"messages": [{"role": "user", "content": "hi"}], "system": "LONE"},
        {"messages": [{"role": "user", "content": "hi"}], "tools": [{"name": "LONE", "input_schema": {}}]},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "LONE"}]},
        {"messages": [{"role": r, "content": [b]} for r, b in (("assistant", call), ("user", result))]},
    ]
    for body in bodies:
        raw = json.dumps({"model": "default", "max_tokens": 9, **body}).encode()
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            told = server.http.post(path, content=raw.replace(b"LONE", b"\\ud800"))
            assert told.status_code == 400, (body, told.text)
            assert told.json()["error"]["type"] == "invalid_request_error"
            broken = server.http.post(path, content=raw.replace(b"LONE", b"\xff"))
            assert broken.status_code == 400, (body, broken.text)
        zero = server.http.post("/v1/messages", content=raw.replace(b"LONE", b"a\\u0000b"))
        assert zero.status_code == (400 if "tools" in body else 200), (
            body,
            zero.text,
        )  # no name has a control character
    assert say(server, ("user", ask("hi")))["type"] == "message"


def test_o01_tools_of_other_servers_are_left_out_and_told(server: Server, ask: Any) -> None:
    alien = {"type": "web_search_20260209", "name": "web_search"}
    plain = say(server, ("user", ask("hi")), tools=TOOLS)
    mixed = say(server, ("user", ask("hi")), tools=[alien, *TOOLS])
    assert prompt(mixed) == prompt(plain)
    assert cached(mixed) == prompt(plain) - 1
    assert accepted(server, mixed["id"]).skipped == ("web_search_20260209",)
    assert f"{mixed['id']}: no model is told of web_search_20260209" in server.log.read_text()


def test_what_is_too_long_is_told_with_its_numbers(tmp_path: Path) -> None:
    with Server(tmp_path / "data", model=scripted(tmp_path, {"text": "Ok."}, context=500)) as server:
        small = say(server, ("user", "hi"))
        asked = say(server, ("user", "hi"), max_tokens=480, expect=400)
        assert asked["error"]["message"].startswith(
            f"input length and `max_tokens` exceed context limit: {prompt(small)} + 480 > 500"
        )
        words = RULES + RULES[:1000]
        counted = count(server, ("user", words))
        assert counted > 500
        long = say(server, ("user", words), expect=400)
        assert long["error"]["message"] == f"prompt is too long: {counted} tokens > 500 maximum"
        huge = say(server, ("user", RULES * 400), expect=400)
        found = re.fullmatch(r"prompt is too long: at least (\d+) tokens > 500 maximum", huge["error"]["message"])
        assert found and 500 < int(found[1]) <= 400 * count(server, ("user", RULES))


# --- diagnostics --------------------------------------------------------------------------------------


def test_why_the_cache_missed(server: Server, ask: Any) -> None:
    def turn(previous: Any, *messages: Any, **more: Any) -> dict[str, Any]:
        options = {"system": RULES, "tools": TOOLS, **more}
        return say(server, *messages, diagnostics={"previous_message_id": previous}, **options)

    def reason(previous: Any, *messages: Any, **more: Any) -> Any:
        told = turn(previous, *messages, **more)["diagnostics"]
        return told and told["cache_miss_reason"]

    user = ("user", ask("go") + RULES)
    first = turn(None, user)
    assert first["diagnostics"] is None
    behind = [user, ("assistant", first["content"]), ("user", "on")]
    assert reason(first["id"], *behind) is None
    assert reason(first["id"], *behind, system=RULES + "!")["type"] == "system_changed"
    assert reason(first["id"], *behind, tools=[{**TOOLS[0], "name": "list"}])["type"] == "tools_changed"
    changed = reason(first["id"], ("user", ask("no") + RULES), ("assistant", first["content"]), ("user", "on"))
    assert changed["type"] == "messages_changed"
    assert 0 < changed["cache_missed_input_tokens"] < prompt(first)
    for odd in ("resp_x", "", "msg_" + "0" * 32, 7, ["x"]):
        assert reason(odd, *behind) == {"type": "previous_message_not_found"}
    body = {**_body(ask("stream")), "diagnostics": {"previous_message_id": first["id"]}, "stream": True}
    start = next(server.events("/v1/messages", body))["message"]
    assert start["diagnostics"]["cache_miss_reason"]["type"] == "system_changed"


# --- the journal --------------------------------------------------------------------------------------


def test_turns_of_one_session_by_its_name(server: Server, ask: Any) -> None:
    by_header = {"x-claude-code-session-id": "a-session-of-mine"}
    first = say(server, ("user", ask("one")), headers=by_header)
    named = {"user_id": json.dumps({"device_id": "d", "session_id": "a-session-of-mine"})}
    second = say(server, ("user", ask("two")), metadata=named)
    shown = zj("sessions", "show", second["id"], "--json", "--data-dir", str(server.data_dir))
    turns = json.loads(shown.stdout)["turns"]
    assert [turn["response"] for turn in turns] == [first["id"], second["id"]]
    assert {turn["protocol"] for turn in turns} == {"messages"}


def test_a_thread_is_shown_compared_and_replayed(server: Server, ask: Any) -> None:
    """The tools of a continuation are those of its thread, wherever it is read again."""
    first = say(server, ("user", ask("begin")), thread={"type": "create"}, system=RULES, tools=TOOLS)
    held = {"type": "continue", "previous_message_id": first["id"]}
    second = say(server, ("user", "call ls"), thread=held)
    where = ("--data-dir", str(server.data_dir))
    page = zj("sessions", "export", second["id"], "--format", "md", *where)
    assert page.returncode == 0, page.stderr
    assert "never mention the weather" in page.stdout
    assert f"tool call {second['content'][0]['id']}: ls" in page.stdout
    other = say(server, ("user", ask("begin")), system=RULES + "!", tools=TOOLS)
    told = json.loads(zj("sessions", "diff", second["id"], other["id"], "--json", *where).stdout)
    assert (told["verdict"], told["a"]["path"], told["a"]["turn"]) == ("client-changed", "system", first["id"])
    assert told["a"]["role"] == told["b"]["role"] == "system"
    replayed = zj("replay", second["id"], "--json", *where)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


def test_a_thread_moves_to_another_machine(server: Server, tmp_path: Path, ask: Any) -> None:
    first = say(server, ("user", ask("call ls")), thread={"type": "create"}, tools=TOOLS, stop_sequences=["nowhere"])
    result = {"type": "tool_result", "tool_use_id": first["content"][0]["id"], "content": "say stop"}
    held = {"type": "continue", "previous_message_id": first["id"]}
    second = say(server, ("user", [result]), thread=held, stop_sequences=["END"])
    assert second["content"] == [{"type": "text", "text": "One "}]
    file = tmp_path / "session.jsonl"
    done = zj("sessions", "export", second["id"], "--output", str(file), "--data-dir", str(server.data_dir))
    assert done.returncode == 0, done.stderr
    there = tmp_path / "there"
    brought = zj("sessions", "import", str(file), "--data-dir", str(there))
    assert brought.returncode == 0, brought.stdout + brought.stderr
    with Server(there, model=scripted(tmp_path, {"text": "Here."}, dialect="chatml+think")) as other:
        assert thread_error(other, first["id"], 400) == "thread_already_continued"
        more = {"type": "continue", "previous_message_id": second["id"]}
        third = say(other, ("user", "go on"), thread=more)
        assert third["content"][0]["text"] == "Here."
        assert prompt(third) > prompt(second)
        history = [("user", ask("call ls")), ("assistant", first["content"]), ("user", [result])]
        assert count(other, *history, ("assistant", second["content"]), ("user", "go on"), tools=TOOLS) == prompt(third)
