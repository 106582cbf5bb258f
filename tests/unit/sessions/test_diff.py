"""The core of the diff: where prompts part, whose change it was, and what comes after. A token is a byte here."""

from __future__ import annotations

import random
import time
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zjournal.link import wire
from zjournal.sessions import diff, vocabulary
from zjournal.sessions.diff import Diff, Rendered, Source, compare

BYTES = vocabulary.Vocabulary(vocabulary.pack([*(bytes([byte]) for byte in range(256)), b"ab"]))
LONG = "A reminder that is long enough to be known again wherever it stands."

EQUAL_JSON = "equal JSON, other bytes: the client spelled the same value in another way"
SAMPLED = "<think>\nHm.\n</think>\n\nWell."

Part = str | tuple[str, Any]


def prompt(*parts: Part | tuple[str, Any, str], template: bytes = b"", ids: list[int] | None = None) -> Rendered:
    """A prompt of template texts, and of (path, value) or (path, value, role); a value is rendered as it is spelled."""
    tokens = bytearray()
    sources = []
    for part in parts:
        path, value, role = (*part, "user")[:3] if isinstance(part, tuple) else ("", part, "")
        text = value if isinstance(value, str) else str(value)
        start = len(tokens)
        tokens += text.encode()
        sources.append(Source(start, len(tokens), path, "resp_1" if path else "", role, value if path else None))
    packed = wire.pack_ids(list(tokens) if ids is None else ids)
    return Rendered(
        ids=packed, sources=tuple(sources), vocabulary=BYTES, vocabulary_name=b"bytes", template_name=template
    )


def message(index: int, text: str, role: str = "user") -> tuple[str, str, str]:
    return f"messages[{index}].content", text, role


def run(a: Rendered, b: Rendered, context: int = 4) -> Diff:
    return compare(a, b, context)


@pytest.mark.parametrize(
    ("path", "value", "verdict", "reason"),
    [
        ("messages[1].content", "Well.", "client-changed", "the client left out the thoughts of an answer"),
        ("response[resp_1]", "Well.", "render-changed", "the dialect does not keep its thoughts any longer"),
        ("response[resp_1]", SAMPLED, "render-changed", "as sampled on one side and as text on the other"),
        ("response[resp_2]", "Well.", "client-changed", "the clients continued different answers"),
        ("messages[1].content", "Well?", "client-changed", "the client's texts differ"),
        ("messages[1].reasoning_content", "Other.", "client-changed", "the client's texts differ"),
    ],
)
def test_an_answer_and_what_stands_in_its_place(path: str, value: str, verdict: str, reason: str) -> None:
    """O09: who left the thoughts out, the client or the template."""
    sampled = prompt("<a>", ("response:resp_1", SAMPLED, "assistant"), "<end>")
    other = prompt("<a>", (path, value, "assistant"), "<u>" if value == SAMPLED else "<end>")
    if value == SAMPLED:  # the same text in other tokens
        other = msgspec.structs.replace(other, ids=wire.pack_ids([*b"<a>", *SAMPLED.encode()[:-2], 256, *b"<u>"]))
    for a, b in ((sampled, other), (other, sampled)):
        found = run(a, b)
        assert (found.verdict, reason in found.reason) == (verdict, True), found.reason


def test_what_the_journal_knows_of_a_change_is_told() -> None:
    sampled = prompt("<a>", ("response:resp_1", SAMPLED, "assistant"), "<end>")
    other = prompt("<a>", ("messages[1].tool_calls[0].function", {"name": "f"}, "assistant"), "<end>")
    other = msgspec.structs.replace(other, changed={"resp_1": "arguments of call 0"})
    for a, b in ((sampled, other), (other, sampled)):
        found = run(a, b)
        assert found.reason == "the client changed an answer that it sent back: arguments of call 0"
        assert found.verdict == "client-changed"


def test_the_same_prompt_is_identical() -> None:
    found = run(prompt("<u>", message(0, "hello")), prompt("<u>", message(0, "hello")))
    assert (found.verdict, found.forked, found.shared, found.lost) == ("identical", False, 8, 0)
    assert found.a.token is None
    assert (found.a.before, found.a.after) == (b"ello", b"")


def test_more_at_the_end_is_append_only_both_ways() -> None:
    short, long = prompt("<u>", message(0, "hello"), "<a>"), prompt("<u>", message(0, "hello"), "<a>", "yes<u>")
    found = run(short, long)
    assert (found.verdict, found.forked, found.shared, found.lost) == ("append-only", False, 11, 0)
    assert (found.b.after, found.reason) == (b"yes<", "B goes on for 6 tokens")
    assert run(long, short).reason == "B is A without its last 6 tokens"


def test_a_changed_text_is_the_clients() -> None:
    found = run(prompt("<u>", message(0, "it is 10:41"), "<a>"), prompt("<u>", message(0, "it is 10:52"), "<a>"))
    assert (found.verdict, found.shared, found.byte) == ("client-changed", 12, 12)
    assert (found.a.path, found.b.path, found.a.role, found.a.turn) == (*["messages[0].content"] * 2, "user", "resp_1")
    assert (found.a.before, found.a.after, found.b.after) == (b" 10:", b"41<a", b"52<a")
    assert (found.a.token, found.b.token) == (ord("4"), ord("5"))
    assert found.lost == found.a.tokens - 12


def test_a_text_that_goes_on_is_the_clients() -> None:
    """At the fork one side is in the template already; the text before it is what was changed."""
    for pair in [("low", "lowest"), ("lowest", "low")]:
        found = run(*(prompt("<u>", message(0, text), "<a>") for text in pair))
        assert (found.verdict, found.a.path, found.b.path) == ("client-changed", *["messages[0].content"] * 2)


def test_the_same_text_in_another_rendering_is_not_the_clients() -> None:
    a, b = prompt("<u>", message(0, "hello"), "<a>"), prompt("<user>", message(0, "hello"), "<a>")
    found = run(a, b)
    assert (found.verdict, found.a.path) == ("render-changed", "messages[0].content")
    assert found.reason.endswith("its rendering differs")
    end = run(prompt(message(0, "hello"), "<a>"), prompt(message(0, "hello"), "<b>"))  # behind all texts
    assert (end.verdict, end.a.path) == ("render-changed", "")
    assert run(a, prompt("<user>", message(0, "hello"), template=b"new")).reason.endswith("chat template is another")


def test_the_same_text_in_other_tokens_is_not_the_clients() -> None:
    found = run(prompt(message(0, "ab")), prompt(message(0, "ab"), ids=[256]))
    assert (found.verdict, found.shared, found.byte) == ("render-changed", 0, None)
    tokens = Source(0, 1, "response:resp_0", "resp_0", "assistant", "ab")
    sampled = Rendered(ids=wire.pack_ids([256]), sources=(tokens,), vocabulary=BYTES, vocabulary_name=b"bytes")
    found = run(sampled, prompt(message(0, "ab", "assistant")))
    assert found.verdict == "render-changed"
    assert "as sampled on one side" in found.reason


def test_another_role_or_one_message_more_is_the_clients() -> None:
    found = run(prompt("<user>", message(0, "hi")), prompt("<system>", message(0, "hi", "system")))
    assert (found.verdict, found.reason) == ("client-changed", "the client says the same text as system, not user")
    found = run(prompt(message(0, "hi"), "<a>"), prompt(message(0, "hi"), "<u>", message(1, "ho"), "<a>"))
    assert (found.verdict, found.a.path, found.b.path) == ("client-changed", "", "messages[1].content")


def test_developer_and_system_are_one_role() -> None:
    found = run(prompt("<1>", message(0, "hi", "developer")), prompt("<2>", message(0, "hi", "system")))
    assert found.verdict == "render-changed"


def test_another_answer_is_the_clients_choice() -> None:
    answers = [
        Source(0, 3, f"response:resp_{k}", f"resp_{k}", "assistant", text) for k, text in enumerate(["low", "lie"])
    ]
    a, b = (
        Rendered(ids=wire.pack_ids(list(answer.value.encode())), sources=(answer,), vocabulary_name=b"")
        for answer in answers
    )
    found = run(a, b)
    assert (found.verdict, found.shared, found.byte, found.a.after) == ("client-changed", 1, None, None)
    assert found.reason == "the clients continued different answers"


def test_what_is_not_proved_is_unknown() -> None:
    gone = run(prompt(("input", "one")), prompt(Source(0, 3, "x").path or "two"))
    assert gone.verdict == "client-changed"  # B's conversation has ended
    a = prompt(message(0, "one"))
    b = Rendered(
        ids=wire.pack_ids(list(b"two")), sources=(Source(0, 3, "messages[0].content"),), vocabulary_name=b"bytes"
    )
    assert run(a, b).verdict == "unknown"
    shifted = run(prompt("<1>", message(0, "hi")), prompt("<2>", message(1, "hi")))
    assert (shifted.verdict, shifted.reason[:13]) == ("unknown", "the same text")


def test_other_vocabularies_cannot_be_compared() -> None:
    a, b = prompt(message(0, "hi")), Rendered(ids=b"", sources=(), vocabulary_name=b"other")
    found = run(a, b)
    assert (found.verdict, found.comparable, found.forked, found.byte) == ("unknown", False, True, None)


@pytest.mark.parametrize(
    ("old", "new", "suffix", "reason"),
    [
        ({"name": "a", "d": "x"}, {"name": "a", "d": "y"}, ".d", "the client's texts differ"),
        ({"a": {"b": [1, {"c": 2}]}}, {"a": {"b": [1, {"c": 3}]}}, ".a.b[1].c", "the client's texts differ"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "", EQUAL_JSON),
        ({"a": 1, "b": 2}, {"a": 2, "b": 3}, "", "the client's texts differ"),
        ('{"a":1,"b":2}', '{"b": 2, "a": 1}', "", EQUAL_JSON),
        ('{"a":1}', '{"a": 1}', "", EQUAL_JSON),
        ({"name": "f", "arguments": '{"a":1.0}'}, {"name": "f", "arguments": '{"a": 1}'}, ".arguments", EQUAL_JSON),
        ("reply", "reply\n", "", "the client's texts differ in white space only"),
        ("{no json", "{no  JSON", "", "the client's texts differ"),
    ],
)
def test_how_two_values_differ(old: Any, new: Any, suffix: str, reason: str) -> None:
    found = run(prompt(("tools[2]", old, ""), "<end>"), prompt(("tools[2]", new, ""), "<end>"))
    assert (found.verdict, found.a.path, found.b.path) == ("client-changed", *[f"tools[2]{suffix}"] * 2)
    assert found.reason == reason


def test_an_insertion_a_deletion_and_a_replacement() -> None:
    rest = "and all of this is as it was before"
    without, more, other = (prompt(message(0, f"status: {text}{rest}")) for text in ("", "dirty ", "clean! "))
    insertion, deletion = run(without, more).resync, run(more, without).resync
    assert insertion is not None and deletion is not None
    assert (insertion.kind, insertion.removed, insertion.inserted, insertion.matching) == ("insertion", 0, 6, len(rest))
    assert (deletion.kind, deletion.removed, deletion.inserted, deletion.matching) == ("deletion", 6, 0, len(rest))
    replaced = run(more, other).resync
    assert replaced is not None
    assert (replaced.kind, replaced.removed, replaced.inserted) == ("replacement", 5, 6)  # both have the space


def test_a_short_text_matches_again_where_it_is_whole() -> None:
    found = run(
        prompt(message(0, "10:41"), "<u>", message(1, "go")), prompt(message(0, "10:52"), "<u>", message(1, "go"))
    )
    assert found.resync is not None
    assert (found.resync.removed, found.resync.inserted, found.resync.matching) == (5, 5, 2)


def test_nothing_behind_the_fork_may_match() -> None:
    assert run(prompt(message(0, "one")), prompt(message(0, "two"))).resync is None


def test_the_search_for_a_match_is_bounded() -> None:
    tail = "0123456789abcdef" * 4
    a, b = prompt(message(0, "x" * 50 + tail)), prompt(message(0, "y" * 50 + tail))
    assert run(a, b).resync is not None
    with patch.object(diff, "RESYNC_SEARCH_MAX", 50):
        assert run(a, b).resync is None


def test_o10_a_block_that_moved_back() -> None:
    a = prompt(message(0, "guide"), message(1, LONG), message(2, "start"), "<a>")
    b = prompt(message(0, "guide"), message(2, "start"), "<a>", message(3, "yes"), "<u>", message(4, LONG), "<a>")
    found = run(a, b)
    assert found.moved is not None and found.resync is not None
    assert (found.moved.old, found.moved.new, found.moved.text) == ("messages[1].content", "messages[4].content", LONG)
    assert (found.resync.kind, found.resync.removed) == ("deletion", len(LONG))
    back = run(b, a)
    assert back.moved is not None and back.resync is not None
    assert (back.moved.old, back.moved.new) == ("messages[4].content", "messages[1].content")
    assert (back.resync.kind, back.resync.inserted) == ("insertion", len(LONG))


def test_what_an_insertion_shifts_has_not_moved() -> None:
    rest = [LONG, "and more"]
    a = prompt("<u>", *(message(k, text) for k, text in enumerate(rest, 1)), "<a>")
    b = prompt("<u>", message(1, "new"), *(message(k, text) for k, text in enumerate(rest, 2)), "<a>")
    for found, kind in ((run(a, b), "insertion"), (run(b, a), "deletion")):
        assert found.moved is None
        assert found.resync is not None and found.resync.kind == kind
    last = run(prompt("<u>", message(1, LONG), "<a>"), prompt("<u>", message(1, "new"), message(2, LONG), "<a>"))
    assert last.moved is None


def test_a_short_text_elsewhere_has_not_moved() -> None:
    found = run(prompt(message(0, "ok"), message(1, "no")), prompt(message(0, "no"), message(1, "ok"), "<a>"))
    assert found.moved is None


tokens = st.lists(st.integers(0, 2), max_size=40)


@given(tokens, tokens, tokens)
def test_fork_and_match_are_those_of_a_plain_search(start: list[int], left: list[int], right: list[int]) -> None:
    a, b = start + left, start + right
    ends = [Source(0, len(ids), "input", "r", "user", str(ids)) for ids in (a, b)]
    with patch.object(diff, "RESYNC_TOKENS", 4):
        found = run(*(Rendered(ids=wire.pack_ids(ids), sources=(end,)) for ids, end in zip((a, b), ends, strict=True)))
    shared = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert found.shared == shared
    if not found.forked:
        assert a[:shared] == b[:shared] and shared in (len(a), len(b))
        return
    distances = [
        (i + j, i, j)
        for i in range(len(a) - shared - 3)
        for j in range(len(b) - shared - 3)
        if a[shared + i : shared + i + 4] == b[shared + j : shared + j + 4]
    ]
    assert (found.resync is None) == (not distances)
    if found.resync is not None:
        i, j, count = found.resync.removed, found.resync.inserted, found.resync.matching
        assert i + j == min(distances)[0]
        assert a[shared + i : shared + i + count] == b[shared + j : shared + j + count]
        assert a[shared + i + count : shared + i + count + 1] != b[shared + j + count : shared + j + count + 1] or (
            shared + i + count == len(a) and shared + j + count == len(b)
        )


@pytest.mark.parametrize("rest", ["same", "other"])
def test_two_prompts_of_150_000_tokens_take_under_a_second(rest: str) -> None:
    chance = random.Random(3)
    texts = [bytes(chance.choices(range(97, 123), k=300)).decode() for _ in range(500)]
    others = texts if rest == "same" else [text.upper() for text in texts]
    a = prompt("<s>", message(0, "10:41:07"), *(message(k, text) for k, text in enumerate(texts, 1)))
    b = prompt("<s>", message(0, "10:41:39"), *(message(k, text) for k, text in enumerate(others, 1)))
    assert a.count > 150_000
    before = time.process_time()
    found = run(a, b)
    assert time.process_time() - before < 1.0
    assert found.shared == 9
    assert (found.resync is not None) == (rest == "same")
