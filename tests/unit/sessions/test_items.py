"""An assistant's turn in one form, however a client sends it back, and what of it was changed."""

from __future__ import annotations

import pytest

from zjournal import ask
from zjournal.sessions import identity
from zjournal.sessions.items import change, digests, items_of, orphaned, thoughts_of, units, unrepeated

START = b"start"


def user(text: str) -> ask.Message:
    return ask.Message("user", (ask.Text(text),))


def said(*texts: str) -> ask.Message:
    return ask.Message("assistant", tuple(map(ask.Text, texts)))


def thought(text: str) -> ask.Thought:
    return ask.Thought((ask.Text(text),))


def call(name: str, arguments: str = "{}", call_id: str = "") -> ask.Call:
    return ask.Call(call_id or f"id-{name}", name, arguments)


def last(*items: ask.Item) -> bytes:
    return digests(units(items), START)[-1]


DELTAS = [
    ask.ReasoningDelta("Let me "),
    ask.ReasoningDelta("see."),
    ask.TextDelta("Look"),
    ask.CallStarted(0, "a"),
    ask.CallArguments(0, '{"x"'),
    ask.CallArguments(0, ": 1}"),
    ask.CallEnded(0),
    ask.TextDelta("ing."),
    ask.CallStarted(1, "b", False),
    ask.CallEnded(1, truncated=True),
]


def test_deltas_become_the_items_that_a_client_sees() -> None:
    items = items_of(DELTAS, lambda index: f"call_{index}", "path")
    assert items == (
        ask.Message("assistant", (ask.Text("Looking.", "path"),)),
        ask.Call("call_0", "a", '{"x": 1}', "path"),
        ask.Call("call_1", "b", "", "path"),
    )
    assert thoughts_of(DELTAS) == "Let me see."
    assert items_of([], str) == (said(""),)
    assert items_of(DELTAS[3:7], str) == (ask.Call("0", "a", '{"x": 1}'),)


def test_a_turn_has_one_form_whatever_its_protocol_makes_of_it() -> None:
    """Chat has one text and then calls; Responses has items in the order in which they were said."""
    chat = last(user("q"), said("Looking."), call("a"), call("b"))
    responses = [user("q"), thought("Hm."), said("Look"), call("a"), thought("So."), said("ing."), call("b")]
    assert last(*responses) == chat
    (asked, turn) = units(responses)
    assert (asked.said, turn.said, turn.start, turn.end, turn.thoughts) == (False, True, 1, 7, "Hm.So.")
    assert turn.items == (said("Looking."), call("a"), call("b"))
    assert last(*responses[:-1]) != chat


def test_answers_that_follow_each_other_stay_apart() -> None:
    assert [unit.items for unit in units([said("A"), thought("t"), said("B")])] == [(said("A"),), (said("B"),)]
    assert last(said("A"), said("B")) != last(said("AB"))


def test_a_turn_of_thoughts_alone_is_an_empty_answer() -> None:
    assert last(user("q"), thought("Hm.")) == last(user("q"), said(""))
    assert last(user("q"), call("a")) == last(user("q"), said(""), call("a"))


def test_an_output_counts_as_its_items() -> None:
    output = ask.Output("r", items_of(DELTAS, str), b"", "Let me see.")
    assert last(user("q"), output, user("x")) == last(user("q"), *items_of(DELTAS, str), user("x"))
    assert [unit.said for unit in units([output, user("x")])] == [True, False]


def test_the_digest_of_nothing_is_the_start() -> None:
    assert digests(units([]), START) == [START]


OURS = ask.Output("r", (said("Two files."), call("a", '{"x": 1, "y": [2.50]}'), call("b")), b"", "Hm.")


@pytest.mark.parametrize(
    ("theirs", "changed"),
    [
        ([*OURS.items], ""),
        ([thought("Hm."), *OURS.items], ""),
        ([thought(""), *OURS.items], ""),  # O09, variant C
        ([said("Two files."), call("a", '{"y":[2.5],"x":1.0}'), call("b", "")], ""),  # O08: equal JSON
        ([said("Two"), call("a", '{"y":[2.5],"x":1.0}'), said(" files."), call("b")], ""),
        ([thought("No."), *OURS.items], "thoughts"),
        ([said("Two files"), *OURS.items[1:]], "text"),
        ([said("Two  files. "), *OURS.items[1:]], "white space of the text"),
        ([*OURS.items[1:]], "text"),
        ([said("Two files."), call("a", '{"x": 2, "y": [2.5]}'), call("b")], "arguments of call 0"),
        ([said("Two files."), call("a", '{"x": "1", "y": [2.5]}'), call("b")], "arguments of call 0"),
        ([said("Two files."), call("a", '{"x": 9, "x": 1, "y": [2.5]}'), call("b")], "arguments of call 0"),
        ([said("Two files."), OURS.items[1], call("c", "{}", "id-b")], "name of call 1"),
        ([said("Two files."), OURS.items[2], OURS.items[1]], "order of calls"),
        ([said("Two files."), OURS.items[1]], "calls left out"),
        ([*OURS.items, call("c")], "calls added"),
        ([*OURS.items, OURS.items[1]], "calls repeated"),
        ([said("Two files."), call("a", '{"x": 1, "y": [2.5]}', "x1"), call("b", "{}", "x2")], "call ids"),
        ([said("Other."), call("a", "{}"), call("b")], "arguments of call 0, text"),
    ],
)
def test_what_a_client_changed(theirs: list[ask.Item], changed: str) -> None:
    (unit,) = units(theirs)
    assert change(OURS, unit) == changed
    same = identity.history(START, unit.items) == identity.history(START, OURS.items)
    assert same == (changed in ("", "thoughts")), "what has the same digest is the same, but for thoughts"


def test_an_answer_that_is_not_there_was_left_out() -> None:
    assert change(OURS, None) == "left out"


# --- results and repeats ------------------------------------------------------------------------------


def result(call_id: str, text: str = "1", path: str = "input[0]") -> ask.Result:
    return ask.Result(call_id, (ask.Text(text),), path)


MADE = ask.Output("resp_1", (said("Looking."), call("a"), call("b")), b"", "Let me see.")


@pytest.mark.parametrize("continues", [False, True])
def test_a_result_must_have_its_call_somewhere(continues: bool) -> None:
    known = [result("id-a"), result("id-b"), result("id-c")]
    assert orphaned([user("x"), MADE, call("c"), *known], known, continues) is None
    lost = result("id-d")
    assert orphaned([user("x"), MADE, *known[:2], lost], [*known[:2], lost], continues) is lost
    assert orphaned([user("x"), lost], [ask.Result("id-d")], continues) is None, "that protocol does not say so"


def test_what_a_crash_left_in_the_middle_of_a_history_is_no_fault() -> None:
    lost = result("id-d")
    history = [lost, user("go on")]
    assert orphaned(history, history, continues=False) is None
    assert orphaned(history, history, continues=True) is lost


def test_items_that_the_conversation_has_are_taken_once() -> None:
    earlier = [user("x"), MADE]
    new = [result("id-a"), result("id-b"), user("and?")]
    repeated = [thought("Let me see."), said("Looking."), call("a"), call("b")]
    assert unrepeated(earlier, [*repeated, *new]) == tuple(new)
    assert unrepeated(earlier, [call("b"), call("a"), *new]) == tuple(new)
    assert unrepeated([*earlier, new[0]], [call("a"), *new]) == tuple(new[1:])
    changed = result("id-a", "2")
    assert unrepeated([*earlier, new[0]], [call("a"), changed]) == (changed,), "it says something else"


def test_without_a_repeated_call_nothing_is_left_out() -> None:
    items = (said("Looking."), thought("Let me see."), call("c"), result("id-c"), user("x"))
    assert unrepeated([user("x"), MADE, result("id-a")], items) == items
    other = (said("Something else."), call("a"))
    assert unrepeated([user("x"), MADE], other) == (said("Something else."),)
