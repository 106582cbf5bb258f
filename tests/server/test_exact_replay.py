"""Tool loops on a real server: what a model said is in the next prompt as it was sampled, whatever clients make of it.

Field reports O08, O09, R03, R24 and that of ds4: a client that strips thoughts and encodes calls anew made the server
prefill the whole loop again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.server.test_restart import verify
from tests.serving import Server, scripted, zj
from zjournal.journal import events
from zjournal.journal.reader import Reader
from zjournal.link import wire
from zjournal.sessions.makers import Makers
from zjournal.sessions.records import Records

TOOL = {"type": "object", "properties": {"path": {"type": "string"}, "edits": {"type": "array"}}}
EDIT = '{"path":"notes/tea.md","edits":[{"new_string":"oolong","old_string":"sencha"}], "n": 1.50}'
LOOK = '{"path": "notes/tea.md"}'
THOUGHTS = "The user wants oolong, so I read the file, and then I change it; that is all there is to do here. "


def called(arguments: str, name: str = "edit") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def thinking(number: int, text: str) -> str:
    return f"<think>\n{THOUGHTS}{number}\n</think>\n\n{text}"


ROUNDS = (
    thinking(1, called(LOOK)),
    thinking(2, f"I change it.\n{called(EDIT)}"),
    thinking(3, f"{called(LOOK)}\n{called(EDIT)}"),
    thinking(4, called("{}", "list")),
    thinking(5, "It is oolong now."),
)


O08 = '{"path":"notes/tea.md","edits":[{"new_string":"oolong","old_string":"sencha"}]}'  # the report's own input
EMPTY = "<think>\n\n</think>\n\n"
MORE = (*ROUNDS, thinking(6, called(LOOK)), thinking(7, "Well."), thinking(8, "Well, well."))

# What the model says to whom, in order: the name stands in brackets in the first message.
SAID: dict[str, tuple[str, ...]] = {
    **{f"ds4, {change}": ROUNDS for change in ("as_it_is", "stripped")},
    **dict.fromkeys(("arguments of call 0", "name of call 1", "order of calls", "call ids"), ROUNDS),
    "in part": (thinking(1, f"{called(LOOK)}\n{called(EDIT)}"), "Done.", "And more."),
    "other thoughts": ROUNDS,
    "o08": (called(O08), "Done."),
    **{f"o09, {change}": MORE for change in ("as_it_is", "stripped", "_emptied")},
    "o09, thinking off": (EMPTY + called(LOOK), EMPTY + "One.", EMPTY + "Two.", EMPTY + "Three."),
    "r03": ("One.", "Two.", "Three."),
    "r24": (ROUNDS[0], "Well.", "Well.", "Well."),
    "killed": ROUNDS[:2],
    "compacted": (*ROUNDS, "Well."),
    "kept": MORE,
    **dict.fromkeys(("forked", "left out", "faithful"), ROUNDS),
    **dict.fromkeys(("chained", "resent", "resent without thoughts"), ROUNDS),
    "resent, then chained": (*ROUNDS[:2], "Done."),
    "both protocols": (ROUNDS[1], "Done."),
    "two tenants": (ROUNDS[0], "Done.", "Done."),
}


class Agent:
    """A Chat Completions client in a tool loop; `change` is what it makes of each answer that it sends back."""

    def __init__(
        self, server: Server, change: Callable[[dict[str, Any]], dict[str, Any]], name: str, **more: Any
    ) -> None:
        """`name`, one of SAID, stands at the beginning, so that agents share no more than the tools."""
        self._server = server
        self._change = change
        tools = [{"type": "function", "function": {"name": name, "parameters": TOOL}} for name in ("edit", "list")]
        self._more = {"model": "default", "tools": tools, **more}
        first = f"[{name}] Make it oolong. " + "Be careful. " * 20
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": first}]
        self.answers: list[dict[str, Any]] = []

    def ask(self) -> dict[str, Any]:
        reply = self._server.post("/v1/chat/completions", {**self._more, "messages": self.messages})
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        self.answers.append(answer)
        message = answer["choices"][0]["message"]
        self.messages.append(self._change(json.loads(json.dumps(message))))
        return message

    def loop(self) -> None:
        """Rounds until the model calls no tool."""
        while calls := self.ask().get("tool_calls"):
            sent = self.messages[-1].get("tool_calls") or []
            assert len(sent) == len(calls)
            self.messages += [
                {"role": "tool", "tool_call_id": c["id"], "content": f"Result {c['id'][-4:]}."} for c in sent
            ]

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})


def as_it_is(message: dict[str, Any]) -> dict[str, Any]:
    return message


def stripped(message: dict[str, Any]) -> dict[str, Any]:
    """Without thoughts, and calls in another encoding: keys sorted, other white space, other numbers."""
    message.pop("reasoning_content", None)
    for call in message.get("tool_calls") or []:
        value = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(value, sort_keys=True, indent=1, ensure_ascii=True)
    return message


def serve(folder: Path, *flags: str) -> Server:
    """A server, not started, whose model says to each agent what SAID has for its name."""
    turns = ({"text": text, "when": f"[{name}]"} for name, texts in SAID.items() for text in texts)
    return Server(folder / "data", *flags, model=scripted(folder, *turns, dialect="chatml+think"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all tests of the default setting: to start one takes longer than most tests."""
    with serve(tmp_path_factory.mktemp("replay")) as running:
        yield running
        assert running.terminate() == 0
        verify(running.data_dir)


def facts(server: Server, response: str) -> list[Any]:
    with Reader.open(server.data_dir) as reader:
        return [fact.event for fact in reader.read_response(response)]


def accepted(server: Server, answer: dict[str, Any]) -> events.RequestAccepted:
    found = facts(server, answer["id"])[0]
    assert isinstance(found, events.RequestAccepted)
    return found


def prompt(server: Server, answer: dict[str, Any]) -> tuple[list[int], str]:
    """The prompt of an answer as the journal has it: ids and text."""
    with Reader.open(server.data_dir) as reader:
        turn = reader.turn(answer["id"])
        assert turn is not None
        records = Records(reader, Makers(reader))
        ids, _ = records.prompt(turn)
        vocabulary = records.vocabulary(turn)
        assert vocabulary is not None
        return list(ids), vocabulary.decode(ids).decode()


def sampled(server: Server, answer: dict[str, Any]) -> list[int]:
    with Reader.open(server.data_dir) as reader:
        found = reader.read_response(answer["id"])
        return [
            i for f in found if isinstance(f.event, events.TokensSampled) for i in wire.unpack_ids(f.payload or b"")
        ]


def diff(server: Server, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """What `zj sessions diff` says of two forked prompts."""
    done = zj("sessions", "diff", a["id"], b["id"], "--json", "--data-dir", str(server.data_dir))
    assert done.returncode == 1, done.stdout + done.stderr
    return json.loads(done.stdout)


def assert_only_deltas(server: Server, answers: list[dict[str, Any]]) -> None:
    """Each prompt begins with the one before it and all that was sampled behind that, and exactly that was cached."""
    for before, after in pairwise(answers):
        wanted = prompt(server, before)[0] + sampled(server, before)
        ids, _ = prompt(server, after)
        assert ids[: len(wanted)] == wanted
        matched = next(event for event in facts(server, after["id"]) if isinstance(event, events.CacheMatched))
        usage = after["usage"]
        assert matched.cached == usage["prompt_tokens_details"]["cached_tokens"]
        assert matched.nearest == before["id"]
        # The last sampled token ends the turn; its KV is computed only when something follows.
        assert len(wanted) - matched.cached in (0, 1), (len(wanted), matched)


@pytest.mark.parametrize("change", [as_it_is, stripped], ids=lambda change: change.__name__)
def test_ds4_four_tool_rounds_prefill_only_what_is_new(server: Server, change: Any) -> None:
    """The report of ds4, O08 and O09 (variants A and B): thoughts left out, calls with sorted keys and other spaces."""
    agent = Agent(server, change, f"ds4, {change.__name__}")
    agent.loop()
    assert [len(a["choices"][0]["message"].get("tool_calls") or []) for a in agent.answers] == [1, 1, 2, 1, 0]
    assert agent.answers[1]["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == EDIT
    assert THOUGHTS in agent.answers[1]["choices"][0]["message"]["reasoning_content"]
    assert_only_deltas(server, agent.answers)
    restored = [accepted(server, answer).restored for answer in agent.answers]
    assert restored == ([0, 1, 2, 3, 4] if change is stripped else [0] * 5)
    assert not any(accepted(server, answer).forks for answer in agent.answers)
    assert {accepted(server, answer).reasoning_replay for answer in agent.answers} == {"auto"}


def changing(index: int, change: Callable[[list[dict[str, Any]]], None]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A client that changes the calls of its answer `index`, and keeps to what it made of it."""
    count = 0

    def changed(message: dict[str, Any]) -> dict[str, Any]:
        nonlocal count
        if count == index:
            change(message["tool_calls"])
        count += 1
        return message

    return changed


def _other_value(calls: list[dict[str, Any]]) -> None:
    calls[0]["function"]["arguments"] = EDIT.replace("oolong", "assam")


def _other_name(calls: list[dict[str, Any]]) -> None:
    calls[1]["function"]["name"] = "list"


def _other_order(calls: list[dict[str, Any]]) -> None:
    calls.reverse()


def _other_ids(calls: list[dict[str, Any]]) -> None:
    for number, call in enumerate(calls):
        call["id"] = f"toolu_{number}"


CHANGES = (
    (1, _other_value, "arguments of call 0", '"new_string":"assam"'),
    (2, _other_name, "name of call 1", '{"name": "list", "arguments": {"path":"notes/tea.md"'),
    (2, _other_order, "order of calls", f"{called(EDIT)}\n{called(LOOK)}"),
    (2, _other_ids, "call ids", f"{called(LOOK)}\n{called(EDIT)}"),
)


def test_what_a_client_changed_is_rendered_as_sent_and_the_fork_is_recorded(server: Server) -> None:
    agents = [Agent(server, changing(index, change), told) for index, change, told, _ in CHANGES]
    for agent in agents:
        agent.loop()
    for agent, (index, _, told, seen) in zip(agents, CHANGES, strict=True):
        assert_only_deltas(server, agent.answers[: index + 1])
        forked, later = agent.answers[index + 1], agent.answers[index + 2 :]
        assert accepted(server, forked).forks == ((agent.answers[index]["id"], told),)
        assert seen in prompt(server, forked)[1]
        shared = forked["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert shared >= agent.answers[index]["usage"]["prompt_tokens"], "all but the answer itself"
        assert [accepted(server, answer).forks for answer in later] == [()] * (3 - index), "told once"
        assert_only_deltas(server, agent.answers[index + 1 :])


def test_a_set_of_parallel_calls_in_part_is_a_change(server: Server) -> None:
    agent = Agent(server, as_it_is, "in part")
    _, second = agent.ask()["tool_calls"]
    for kept, told in (([second], "calls left out"), ([], "left out")):
        if kept:
            last = {"role": "assistant", "content": None, "tool_calls": kept}
            agent.messages[1:] = [last, {"role": "tool", "tool_call_id": second["id"], "content": "R"}]
        else:  # a result without its call would be refused
            agent.messages[1:] = [{"role": "user", "content": "No."}]
        agent.ask()
        assert accepted(server, agent.answers[-1]).forks == ((agent.answers[0]["id"], told),)


def test_thoughts_that_a_client_changed_are_its_own(server: Server) -> None:
    def other(message: dict[str, Any]) -> dict[str, Any]:
        return {**message, "reasoning_content": "Something else."}

    agent = Agent(server, other, "other thoughts")
    agent.loop()
    last = agent.answers[-1]
    assert [accepted(server, answer).forks for answer in agent.answers[1:]] == [
        ((answer["id"], "thoughts"),) for answer in agent.answers[:-1]
    ]
    text = prompt(server, last)[1]
    assert "<think>\nSomething else.\n</think>\n\n<tool_call>" in text and THOUGHTS not in text


def test_o08_sorted_keys_and_other_spaces_reuse_the_answer(server: Server) -> None:
    """Field report O08, with its own input; a tool's schema keeps the client's order of keys."""
    sent = '{"edits": [{"old_string": "sencha", "new_string": "oolong"}], "path": "notes/tea.md"}'

    def sorted_keys(message: dict[str, Any]) -> dict[str, Any]:
        for call in message.get("tool_calls") or []:
            assert call["function"]["arguments"] == O08
            call["function"]["arguments"] = sent
        return message

    agent = Agent(server, sorted_keys, "o08")
    agent.loop()
    assert_only_deltas(server, agent.answers)
    text = prompt(server, agent.answers[1])[1]
    assert O08 in text and sent not in text
    assert '{"type": "object", "properties": {"path": {"type": "string"}, "edits": {"type": "array"}}}' in text


def _loop_then_human(server: Server, change: Any, name: str) -> Agent:
    agent = Agent(server, change, name)
    agent.loop()
    agent.say("Thank you. And now?")
    agent.loop()
    agent.say("And then?")
    agent.ask()
    return agent


def _emptied(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "reasoning_content": ""}


VARIANTS = (as_it_is, stripped, _emptied)


def test_o09_a_human_turn_leaves_thoughts_out_as_the_dialect_does(server: Server) -> None:
    """Field report O09, variants A to C: never from 0, told in the journal, and the same prompt whatever was sent."""
    for change in VARIANTS:
        _assert_thoughts_left_out(server, _loop_then_human(server, change, f"o09, {change.__name__}"))
    with Reader.open(server.data_dir) as reader:
        started = reader.engine_before(reader.head + 1)
    assert [line.partition(":")[0] for line in started.unstable] == ["thoughts", "thoughts behind a tool loop"]
    assert "prompts that are not the beginning of the next one: thoughts: token " in server.log.read_text()


def _assert_thoughts_left_out(server: Server, agent: Agent) -> None:
    loop, human, second = agent.answers[:5], agent.answers[5:7], agent.answers[7:]
    assert_only_deltas(server, loop)
    assert_only_deltas(server, human)
    assert [accepted(server, answer).rewritten for answer in agent.answers] == [0] * 5 + [5, 5, 7]
    head = loop[0]["usage"]["prompt_tokens"]
    assert human[0]["usage"]["prompt_tokens_details"]["cached_tokens"] >= head, "up to the first answer with thoughts"
    cached = second[0]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= human[0]["usage"]["prompt_tokens"], "what was written anew stays so"
    assert THOUGHTS not in prompt(server, second[0])[1]
    told = diff(server, loop[-1], human[0])
    assert (told["verdict"], told["a"]["path"]) == ("render-changed", f"response:{loop[0]['id']}")
    assert "does not keep its thoughts any longer (template dropped)" in told["reason"]


class Settings(NamedTuple):
    """Agents on one journal under two settings; `forked` met both, two answers under `all` and one under `off`."""

    server: Server
    kept: Agent
    forked: Agent
    left_out: Agent
    faithful: Agent


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    with serve(tmp_path_factory.mktemp("settings"), "--reasoning-replay", "all") as server:
        kept = _loop_then_human(server, stripped, "kept")
        forked = Agent(server, stripped, "forked")
        for _ in range(2):
            (call,) = forked.ask()["tool_calls"]
            forked.messages.append({"role": "tool", "tool_call_id": call["id"], "content": "R"})
        server.flags[server.flags.index("all")] = "off"
        server.restart()
        forked.ask()
        left_out, faithful = Agent(server, stripped, "left out"), Agent(server, as_it_is, "faithful")
        left_out.loop()
        faithful.loop()
        assert server.terminate() == 0
        yield Settings(server, kept, forked, left_out, faithful)


def test_o09_all_thoughts_can_be_kept(settings: Settings) -> None:
    """The setting `all`: what was sampled stays as it is, and a human turn costs nothing."""
    server, agent = settings.server, settings.kept
    assert_only_deltas(server, agent.answers)
    assert {accepted(server, answer).reasoning_replay for answer in agent.answers} == {"all"}
    assert {accepted(server, answer).rewritten for answer in agent.answers} == {0}


def test_o09_thoughts_that_a_client_left_out_stay_out_if_that_is_wanted(settings: Settings) -> None:
    """The setting `off`: what the client has is what the model sees; what it sends back is replayed all the same."""
    server, agent, faithful = settings.server, settings.left_out, settings.faithful
    assert THOUGHTS not in prompt(server, agent.answers[-1])[1]
    for before, after in pairwise(agent.answers):
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] >= before["usage"]["prompt_tokens"]
    assert {accepted(server, answer).restored for answer in agent.answers} == {0}
    assert {accepted(server, answer).forks for answer in agent.answers} == {()}
    assert_only_deltas(server, faithful.answers)
    assert {accepted(server, answer).reasoning_replay for answer in faithful.answers} == {"off"}


def test_o09_the_diff_says_that_the_client_left_thoughts_out(settings: Settings) -> None:
    told = diff(settings.server, *settings.forked.answers[1:])
    assert (told["verdict"], told["reason"]) == ("client-changed", "the client left out the thoughts of an answer")
    assert told["b"]["path"] == "messages[1].tool_calls[0].function"


def test_o09_thinking_off_reuses_all(server: Server) -> None:
    """Field report O09, variant D: an empty pair of tags was sampled, and stays in the prompt."""
    agent = Agent(server, stripped, "o09, thinking off")
    agent.loop()
    for text in ("And now?", "And then?"):
        agent.say(text)
        agent.ask()
    assert_only_deltas(server, agent.answers)
    assert prompt(server, agent.answers[-1])[1].count(EMPTY) == 3


def test_r03_another_effort_is_the_same_prompt(server: Server) -> None:
    """Field report R03: the effort stood in the prompt's head, and changing it cost 54 s in place of 5."""
    agent = Agent(server, as_it_is, "r03")
    for effort in ("low", "high", "none"):
        agent._more["reasoning_effort"] = effort
        agent.ask()
        agent.say("And now?")
    assert_only_deltas(server, agent.answers)


def test_after_a_kill_the_loop_goes_on_where_it_was(server: Server) -> None:
    agent = Agent(server, stripped, "killed")
    agent.ask()
    server.restart()
    calls = agent.answers[0]["choices"][0]["message"]["tool_calls"]
    agent.messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": "R"})
    agent.ask()
    wanted = prompt(server, agent.answers[0])[0] + sampled(server, agent.answers[0])
    assert prompt(server, agent.answers[1])[0][: len(wanted)] == wanted
    assert accepted(server, agent.answers[1]).restored == 1
    assert accepted(server, agent.answers[1]).parent == agent.answers[0]["id"]


def test_an_answer_is_known_by_its_calls_where_what_stood_before_it_was_changed(server: Server) -> None:
    """A compacted history: no digest of it is known, the calls in it are; and it does not need the old turn to live."""
    agent = Agent(server, stripped, "compacted")
    agent.loop()
    agent.messages[0] = {"role": "user", "content": "In short, [compacted]: make it oolong."}
    agent.messages[-1:] = [{"role": "user", "content": "Go on."}]
    agent._more["prompt_cache_key"] = "another"
    agent.ask()
    last = agent.answers[-1]
    assert (accepted(server, last).parent, accepted(server, last).forks) == ("", ())
    flags = ("--data-dir", str(server.data_dir))
    sessions = {turn.session for turn in _turns(server, agent.answers)}
    assert len(sessions) == 2
    first = next(turn.session for turn in _turns(server, agent.answers[:1]))
    ids, text = prompt(server, last)
    assert '"new_string":"oolong","old_string":"sencha"' in text, "as it was sampled"
    assert zj("sessions", "delete", first, "--yes", *flags).returncode == 0
    assert prompt(server, last) == (ids, text)


def _turns(server: Server, answers: list[dict[str, Any]]) -> list[Any]:
    with Reader.open(server.data_dir) as reader:
        return [reader.turn(answer["id"]) for answer in answers]


def test_r24_orphans_are_taken(server: Server) -> None:
    """Field report R24: a call without its result or a result without its call made each later request a 400."""
    agent = Agent(server, as_it_is, "r24")
    call = agent.ask()["tool_calls"][0]
    agent.say("Are you there?")
    agent.ask()
    wanted = prompt(server, agent.answers[0])[0]
    assert prompt(server, agent.answers[1])[0][: len(wanted)] == wanted
    assert called(LOOK) in prompt(server, agent.answers[1])[1]
    orphan = {"role": "tool", "tool_call_id": "nobody", "content": "a result of nothing"}
    agent.messages[1:] = [orphan, {"role": "user", "content": "And now?"}]
    agent.ask()
    assert "a result of nothing" in prompt(server, agent.answers[2])[1]
    items = [
        {"type": "function_call", "call_id": call["id"], "name": "edit", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "nobody", "output": "a result of nothing"},
    ]
    assert server.respond(input=[*items, {"role": "user", "content": "[r24]"}])["status"] == "completed"


# --- Responses ----------------------------------------------------------------------------------------

FUNCTIONS = [{"type": "function", "name": name, "parameters": TOOL} for name in ("edit", "list")]


WAYS = ("chained", "resent", "resent without thoughts")


@pytest.mark.parametrize("how", WAYS)
def test_the_same_on_responses(server: Server, how: str) -> None:
    """By `previous_response_id`, and with all items sent again, with the reasoning items and without."""
    answers = _on_responses(server, how)
    assert len(answers) == 5
    for before, after in pairwise(answers):
        wanted = prompt(server, before)[0] + sampled(server, before)
        assert prompt(server, after)[0][: len(wanted)] == wanted
        assert len(wanted) - after["usage"]["input_tokens_details"]["cached_tokens"] in (0, 1)
        assert accepted(server, after).parent == before["id"]
    restored = [accepted(server, answer).restored for answer in answers]
    assert restored == ([0, 1, 2, 3, 4] if how == "resent without thoughts" else [0] * 5)


def _on_responses(server: Server, how: str) -> list[dict[str, Any]]:
    """The answers of a tool loop."""
    history: list[dict[str, Any]] = [{"role": "user", "content": f"[{how}] Make it oolong."}]
    previous: dict[str, Any] = {}
    sent = history
    answers = []
    while True:
        answer = server.respond(input=sent, tools=FUNCTIONS, **previous)
        answers.append(answer)
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        if not calls:
            return answers
        results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "R"} for call in calls]
        for item in answer["output"]:
            if item["type"] == "function_call":
                item = {**item, "arguments": json.dumps(json.loads(item["arguments"]), sort_keys=True)}
            if item["type"] != "reasoning" or how == "resent":
                history.append(item)
        history += results
        if how == "chained":
            sent, previous = results, {"previous_response_id": answer["id"]}


def test_a_history_that_was_resent_and_then_chained_is_replayed_as_it_was(server: Server) -> None:
    user = {"role": "user", "content": "[resent, then chained] Make it oolong."}
    first = server.respond(input=[user], tools=FUNCTIONS)
    call = next(item for item in first["output"] if item["type"] == "function_call")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "R"}
    second = server.respond(input=[user, call, result], tools=FUNCTIONS)
    call = next(item for item in second["output"] if item["type"] == "function_call")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "R"}
    third = server.respond(input=[result], previous_response_id=second["id"], tools=FUNCTIONS)
    for before, after in ((first, second), (second, third)):
        wanted = prompt(server, before)[0] + sampled(server, before)
        assert prompt(server, after)[0][: len(wanted)] == wanted


def test_what_was_said_in_one_protocol_is_known_in_the_other(server: Server) -> None:
    agent = Agent(server, stripped, "both protocols")
    call = agent.ask()["tool_calls"][0]
    answer = server.respond(
        input=[
            {"role": "user", "content": agent.messages[0]["content"]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "I change it."}]},
            {
                "type": "function_call",
                "call_id": call["id"],
                "name": "edit",
                "arguments": call["function"]["arguments"],
            },
            {"type": "function_call_output", "call_id": call["id"], "output": "R"},
        ],
        tools=FUNCTIONS,
    )
    assert accepted(server, answer).parent == agent.answers[0]["id"]
    assert accepted(server, answer).restored == 1
    wanted = prompt(server, agent.answers[0])[0] + sampled(server, agent.answers[0])
    assert prompt(server, answer)[0][: len(wanted)] == wanted


def test_call_ids_of_another_tenant_mean_nothing(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a:sk-aaaaaaaaaaaaaaaa\nb:sk-bbbbbbbbbbbbbbbb\n")
    keys.chmod(0o600)
    with serve(tmp_path, "--api-key-file", str(keys)) as server:
        _assert_only_the_owner_has_its_thoughts_back(server)


def _assert_only_the_owner_has_its_thoughts_back(server: Server) -> None:
    first_words = {"role": "user", "content": "[two tenants] Make it oolong."}
    body: dict[str, Any] = {"model": "default", "messages": [first_words]}
    body["tools"] = [{"type": "function", "function": {"name": "edit", "parameters": TOOL}}]
    mine = {"Authorization": "Bearer sk-aaaaaaaaaaaaaaaa"}
    first = server.post("/v1/chat/completions", body, headers=mine).json()
    message = stripped(first["choices"][0]["message"])
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "R"}
    body["messages"] = [{"role": "user", "content": "[two tenants] Something else."}, message, result]
    for key, thoughts in (("sk-bbbbbbbbbbbbbbbb", False), ("sk-aaaaaaaaaaaaaaaa", True)):
        answer = server.post("/v1/chat/completions", body, headers={"x-api-key": key}).json()
        assert (THOUGHTS in prompt(server, answer)[1]) == thoughts
        assert accepted(server, answer).forks == ()
