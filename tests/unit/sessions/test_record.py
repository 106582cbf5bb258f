"""Records: whatever the body, the tokens and the spans are, they come back; and a text stands once."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zjournal.dialects.prompt import Span
from zjournal.sessions import record
from zjournal.sessions.record import Record, pack

LONG = "a text that is long enough to be referred to, "
ODD = (LONG + "é\u2028\U0001f600/", LONG + '"\\\n\t\x01\x7f', "  " + LONG + "\n")
texts = st.sampled_from(["short", LONG, *ODD]) | st.text()


def spelled(ids: Any) -> bytes:
    """A token is a byte."""
    return bytes(list(ids))


def nothing(response: str) -> tuple[int, ...]:
    return ()


class Prompt:
    """Made of (path, text); a text of the template has the path ""."""

    def __init__(self, *parts: tuple[str, str]) -> None:
        self.ids: list[int] = []
        self.spans: list[Span] = []
        for path, text in parts:
            if text:
                start = len(self.ids)
                self.ids += text.encode("utf-8", "replace")
                self.spans.append(Span(start, len(self.ids), path))


def back(data: bytes, outputs: Any = nothing) -> tuple[bytes, list[int], tuple[Span, ...]]:
    found = Record(data, outputs)
    return found.body(spelled), list(found.ids()), found.spans


def chat(*said: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in said]


@given(st.lists(texts, max_size=5), st.booleans(), st.sampled_from([(",", ":"), (", ", ": ")]), st.booleans())
def test_any_body_comes_back(said: list[str], ascii_only: bool, separators: tuple[str, str], known: bool) -> None:
    said = [text.encode("utf-8", "replace").decode() for text in said]
    body = json.dumps({"messages": chat(*said)}, ensure_ascii=ascii_only, separators=separators).encode()
    prompt = Prompt(*(part for k, text in enumerate(said) for part in (("", "<u>"), (f"messages[{k}].content", text))))
    data = pack(body, prompt.ids, prompt.spans, spelled if known else None, nothing)
    assert back(data) == (body, prompt.ids, tuple(prompt.spans))


@given(st.binary(max_size=60))
def test_a_body_that_is_no_json_comes_back(body: bytes) -> None:
    prompt = Prompt(("", LONG))
    assert back(pack(body, prompt.ids, prompt.spans, spelled, nothing)) == (body, prompt.ids, tuple(prompt.spans))


@pytest.mark.parametrize("ascii_only", [False, True])
def test_a_text_stands_once(ascii_only: bool) -> None:
    """As the tokens; also where the template trims it, where it stands twice, and in a call's arguments."""
    long = LONG + "é\n"
    call = {"function": {"name": "run", "arguments": long}}
    messages = [*chat(long, "  " + long, long), {"role": "assistant", "tool_calls": [call]}]
    body = json.dumps({"messages": messages, "tools": [LONG]}, ensure_ascii=ascii_only).encode()
    prompt = Prompt(
        ("messages[0].content", long),
        ("", "<u>"),
        ("messages[1].content", "  " + long),
        ("messages[2].content", "x" + long + "y"),  # tokens that reach beyond the text
        ("messages[3].tool_calls[0].function", "<call>" + long + "</call>"),
    )
    data = pack(body, prompt.ids, prompt.spans, spelled, nothing)
    assert back(data) == (body, prompt.ids, tuple(prompt.spans))
    packed = record._decode(data)
    assert len(packed.references) == 4 * 4
    assert packed.skeleton.count(LONG.encode()) == 1, "only what is not in the prompt is left"


def test_an_output_is_not_repeated() -> None:
    """Neither its tokens nor, where the client resends it, its text; one that the client changed is the client's."""
    outputs = {"r1": list(LONG.encode() + b"<end>"), "r2": list(b"what the client has changed since, a long text")}
    messages = [*chat("hi"), *chat(LONG), *chat("what the client has changed SINCE, a long text"), *chat("go")]
    body = json.dumps({"messages": messages}).encode()
    prompt = Prompt(
        ("messages[0].content", "hi"), ("response:r1", LONG), ("messages[2].content", "changed"), ("", "<a>")
    )

    def find(response: str) -> list[int]:
        return outputs.get(response, [])

    data = pack(body, prompt.ids, prompt.spans, spelled, find)
    assert back(data, find) == (body, prompt.ids, tuple(prompt.spans))
    packed = record._decode(data)
    assert LONG.encode() not in packed.skeleton and len(packed.low) == 2 * len("hi" + "changed" + "<a>")
    assert pack(body, prompt.ids, prompt.spans, spelled, nothing) != data
    with pytest.raises(ValueError, match="shorter than its prompt says"):
        Record(data, nothing).ids()
    with pytest.raises(ValueError, match="come out as it was"):
        Record(data, lambda response: [120] * 99).body(spelled)


def test_a_flipped_bit_gives_an_error_or_the_same_body() -> None:
    """Every single bit. What else a record says is guarded by the digest that is its name."""
    said = (LONG, "é " + LONG, "short")
    body = json.dumps({"messages": chat(*said)}, ensure_ascii=False).encode()
    prompt = Prompt(*((f"messages[{k}].content", text) for k, text in enumerate(said)), ("response:r1", "ab"))
    outputs = {"r1": list(b"ab")}
    data = pack(body, prompt.ids, prompt.spans, spelled, lambda name: outputs.get(name, ()))
    refused = 0
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            found = Record(bytes(changed), lambda name: outputs.get(name, ()))
            found.ids()
            assert found.body(spelled) == body
        except ValueError:
            refused += 1
    assert refused > 4 * len(data)


@given(st.binary(max_size=80))
def test_bytes_of_any_kind_are_no_record(junk: bytes) -> None:
    with pytest.raises(ValueError, match=r"read|fit|cut|cover|version|come out|refers|shorter"):
        Record(junk, nothing).body(spelled)


def test_tokens_beyond_two_bytes() -> None:
    ids = [0, 65_535, 65_536, 151_000, (1 << 20) - 1]
    data = pack(b"{}", ids, [Span(0, 5, "")], None, nothing)
    assert list(Record(data, nothing).ids()) == ids


def test_without_a_vocabulary_nothing_is_made_up() -> None:
    prompt = Prompt(("messages[0].content", LONG))
    data = pack(json.dumps({"messages": chat(LONG)}).encode(), prompt.ids, prompt.spans, spelled, nothing)
    with pytest.raises(ValueError, match="no vocabulary"):
        Record(data, nothing).body(None)
    with pytest.raises(ValueError, match="come out as it was"):
        Record(data, nothing).body(lambda ids: spelled(ids).upper())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"references": (0, 9, 0, 0)}, "span that is not there"),
        ({"references": (0, -1, 0, 0)}, "span that is not there"),
        ({"references": (-1, 0, 0, 0)}, "span that is not there"),
        ({"references": (0, 0, 0)}, "fit together"),
        ({"skeleton": b""}, "come out"),
        ({"check": b""}, "come out"),
        ({"lengths": (3,)}, "cover"),
        ({"paths": ()}, "fit together"),
        ({"high": b"1"}, "are cut"),
        ({"version": 2}, "version 2"),
    ],
)
def test_a_damaged_record_is_refused(change: dict[str, Any], said: str) -> None:
    prompt = Prompt(("input", LONG))
    data = pack(json.dumps({"input": LONG}).encode(), prompt.ids, prompt.spans, spelled, nothing)
    damaged = msgspec.msgpack.encode(msgspec.structs.replace(record._decode(data), **change))
    with pytest.raises(ValueError, match=said):
        back(damaged)


def test_an_answer_that_was_written_anew_stands_once() -> None:
    """Its text is among the tokens, under the name of its response and not of a place in the body."""
    said = LONG + "as it was said."
    body = json.dumps({"messages": [*chat("q"), {"role": "assistant", "content": said}, *chat("r")]}).encode()
    prompt = Prompt(("", "<u>"), ("messages[0].content", "q"), ("", "<a>"), ("response[resp_1]", said), ("", "<u>r"))
    data = pack(body, prompt.ids, prompt.spans, spelled, nothing)
    assert back(data) == (body, prompt.ids, tuple(prompt.spans))
    assert data.count(LONG.encode()) == 0 and bytes(prompt.ids).count(LONG.encode()) == 1


@given(st.text("ab", max_size=300), st.text("ab", max_size=100), st.integers(0, 300))
def test_a_text_is_found_where_it_stands_first(data: str, wanted: str, start: int) -> None:
    found = record._find(data.encode(), wanted.encode(), start)
    assert found == data.encode().find(wanted.encode(), start)


def test_a_text_that_begins_in_many_places_is_found() -> None:
    data = b"a" * 40 + (b"a" * 40 + b"b") * 50 + b"a" * 33 + b"c"
    assert record._find(data, b"a" * 33 + b"c", 0) == len(data) - 34
    assert record._find(data, b"a" * 33 + b"d", 0) == -1


def test_strings_are_found_in_the_order_of_the_document() -> None:
    value = {"a": LONG, "b": [1, None, "short", LONG + "1", {"c": LONG + "2", "d": {}}], "e": {"f": [[LONG + "3"]]}}
    paths = ["a", "b[3]", "b[4].c", "e.f[0][0]"]
    assert record._strings(value, "", 64) == list(zip(paths, [LONG, LONG + "1", LONG + "2", LONG + "3"], strict=True))
    assert record._strings(value, "", 2) == [("a", LONG), ("b[3]", LONG + "1")]
    assert record._strings(LONG, "", 0) == [("", LONG)]


# --- a body in outline --------------------------------------------------------------------------------

MARK = "7f3a"


def filled(value: Any, found: Record, tokens: int) -> Any:
    """An outline's value with the beginnings of its texts in the place of their marks."""
    if isinstance(value, str) and value.startswith(MARK):
        return found.beginning(int(value.removeprefix(MARK).removesuffix(MARK)), spelled, tokens)
    if isinstance(value, dict):
        return {key: filled(inner, found, tokens) for key, inner in value.items()}
    return [filled(inner, found, tokens) for inner in value] if isinstance(value, list) else value


@given(st.lists(texts, max_size=5), st.booleans(), st.integers(0, 60), st.sampled_from(["", "x"]))
def test_an_outline_has_a_mark_for_each_text_and_the_beginning_of_each(
    said: list[str], ascii_only: bool, tokens: int, around: str
) -> None:
    said = [text.encode("utf-8", "replace").decode() for text in said if not text.startswith(MARK)]
    body = json.dumps({"messages": chat(*said)}, ensure_ascii=ascii_only).encode()
    paths = [(f"messages[{k}].content", f"{around}{text}{around * 3}") for k, text in enumerate(said)]
    found = Record(pack(body, *(lambda made: (made.ids, made.spans))(Prompt(*paths)), spelled, nothing), nothing)
    outline = found.outline(MARK)
    assert all(text.encode() not in outline for text in said if LONG in text)
    whole = filled(json.loads(outline), found, 1 << 20)
    assert [message["role"] for message in whole["messages"]] == ["user"] * len(said)
    for text, message, short in zip(
        said, whole["messages"], filled(json.loads(outline), found, tokens)["messages"], strict=True
    ):
        if isinstance(message["content"], str):
            assert message["content"] == text == short["content"]
        else:
            assert message["content"] == text.encode()
            assert text.encode().startswith(short["content"])
            assert len(short["content"]) >= min(tokens, len(text.encode()))


def test_a_mark_within_a_string_ends_before_what_follows() -> None:
    """The prompt says only the second message, and its text is first met within the other one."""
    prompt = Prompt(("messages[1].content", LONG))
    body = json.dumps({"messages": chat(f"so {LONG}5 apples ", LONG)}).encode()
    found = Record(pack(body, prompt.ids, prompt.spans, spelled, nothing), nothing)
    assert json.loads(found.outline(MARK)) == {"messages": chat(f"so {MARK}0{MARK}5 apples ", LONG)}


def test_a_text_that_is_not_there_is_named() -> None:
    prompt = Prompt(("messages[0].content", LONG))
    found = Record(
        pack(json.dumps({"messages": chat(LONG)}).encode(), prompt.ids, prompt.spans, spelled, nothing), nothing
    )
    assert found.beginning(0, spelled, 6) == LONG[:6].encode()
    for number in (-1, 1, 7):
        with pytest.raises(ValueError, match="no such text"):
            found.beginning(number, spelled, 6)
    with pytest.raises(ValueError, match="vocabulary"):
        found.beginning(0, None, 6)
