"""What is told while it is said: the bugs that others' streaming parsers had, each with its tracker's number.

The deltas that come of a token are looked at here, not only what they are when joined.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence

import pytest

from tests.unit.dialects.outputs import (
    DIALECTS,
    Token,
    bytewise,
    calls_of,
    dialect,
    everywhere,
    join,
    joined,
    parse,
    said,
    text_of,
    tool,
    write,
)
from zjournal import ask
from zjournal.dialects.base import Piece

TOOLS = [
    tool("noop"),
    tool("get_weather", {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}}),
]
EVERY = pytest.mark.parametrize("name", DIALECTS)
HERMES = pytest.mark.parametrize("name", ["chatml", "chatml-text"])
BY_TEXT = pytest.mark.parametrize("name", ["chatml-text", "qwen-xml-text", "llama3"])  # no tag of theirs parts a piece
ROME = {"city": "Rome", "days": 3, "tags": ["a", "]"]}


def output(name: str, *calls: tuple[str, object], content: str = "") -> list[Token]:
    """An answer as the dialect writes it."""
    told = [ask.Call(f"c{at}", called, json.dumps(given)) for at, (called, given) in enumerate(calls)]
    return write(dialect(name), dialect(name).calls([Piece(content)] if content else [], told))


def pieces(tokens: Sequence[Token], size: int) -> Iterator[Token]:
    """The same in pieces of `size` bytes; a control token is one."""
    for data, control in join(tokens):
        yield from [(data, True)] if control else [(data[at : at + size], False) for at in range(0, len(data), size)]


def told_of(deltas: Sequence[ask.Delta]) -> tuple[str, dict[int, str]]:
    """The text, and the arguments of each call."""
    arguments: dict[int, str] = {}
    for delta in deltas:
        if isinstance(delta, ask.CallArguments):
            arguments[delta.index] = arguments.get(delta.index, "") + delta.text
    return text_of(deltas), arguments


@EVERY
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_vllm_53227_and_51701_no_part_of_a_tag_is_ever_told(name: str, size: int) -> None:
    """Neither as text nor inside arguments, at no moment: what was told is the beginning of what is told in the end."""
    tokens = output(name, ("get_weather", ROME), ("noop", {}), content="So.")
    parser, deltas = dialect(name).parser(TOOLS), list[ask.Delta]()
    text, arguments = told_of(parse(dialect(name), TOOLS, tokens))
    assert text == "So." and json.loads(arguments[0]) == ROME and json.loads(arguments[1]) == {}
    for data, control in pieces(tokens, size):
        deltas += parser.feed(data, control)
        so_far, begun = told_of(deltas)
        assert text.startswith(so_far)
        assert all(arguments[index].startswith(one) for index, one in begun.items())
    assert joined(deltas + parser.end()) == parse(dialect(name), TOOLS, tokens)


@BY_TEXT
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_vllm_57551_a_marker_in_pieces_is_no_text(name: str, size: int) -> None:
    content = "" if name == "llama3" else "So."
    deltas = parse(dialect(name), TOOLS, list(pieces(output(name, ("noop", {}), content=content), size)))
    assert text_of(deltas) == content
    assert calls_of(deltas) == [("noop", {})]


@EVERY
def test_sglang_35564_letter_by_letter_is_as_whole(name: str) -> None:
    """There calls were lost, numbers became strings and indexes moved."""
    deltas = parse(dialect(name), TOOLS, bytewise(output(name, ("get_weather", ROME), ("get_weather", ROME))))
    assert calls_of(deltas) == [("get_weather", ROME)] * 2
    assert [delta.index for delta in deltas if isinstance(delta, ask.CallStarted)] == [0, 1]


@BY_TEXT
def test_sglang_37634_two_calls_in_one_increment(name: str) -> None:
    """vllm 48020 and 38168 too: a whole call, from its first tag to its last, is one piece. A guess that was right."""
    (piece,) = join(output(name, ("get_weather", ROME), ("noop", {}), ("get_weather", ROME)))
    deltas = joined(dialect(name).parser(TOOLS).feed(*piece))
    if name == "llama3":  # what may still go on is told at the end
        deltas = parse(dialect(name), TOOLS, [piece])
    assert calls_of(deltas) == [("get_weather", ROME), ("noop", {}), ("get_weather", ROME)]


@EVERY
def test_sglang_31915_nothing_is_lost_at_the_end_of_any_chunking(name: str) -> None:
    """There 71 to 91 % of random chunkings lost data, for nobody asked what was held back."""
    tail = "" if name == "llama3" else " Is 2 <"
    tokens = [*output(name, ("get_weather", ROME), content="So."), (tail.encode(), False)]
    expected = parse(dialect(name), TOOLS, tokens)
    assert text_of(expected) == f"So.{tail}"
    dice = random.Random(31915)
    for _ in range(40):
        cut: list[Token] = []
        for data, control in join(tokens):
            while data:
                size = len(data) if control else dice.randint(1, 40)
                cut.append((data[:size], control))
                data = data[size:]
        assert parse(dialect(name), TOOLS, cut) == expected


@EVERY
def test_sglang_35625_the_index_is_the_place_in_the_answer(name: str) -> None:
    """Not in the list of tools: two calls of one tool must not be one, nor the first begin at 1."""
    deltas = everywhere(dialect(name), TOOLS, output(name, ("get_weather", ROME), ("noop", {}), ("get_weather", {})))
    started = [(delta.index, delta.name) for delta in deltas if isinstance(delta, ask.CallStarted)]
    assert started == [(0, "get_weather"), (1, "noop"), (2, "get_weather")]


@EVERY
def test_vllm_37385_and_36410_arguments_are_told_once(name: str) -> None:
    """There the last delta held all of them again, or they came as an object and as a string."""
    given = {"city": "Rome and Oslo"}
    for tokens in (output(name, ("get_weather", given)), bytewise(output(name, ("get_weather", given)))):
        _, arguments = told_of(parse(dialect(name), TOOLS, tokens))
        assert arguments[0].count("Rome") == arguments[0].count("city") == 1
        assert json.loads(arguments[0]) == given


@HERMES
@pytest.mark.parametrize(
    "arguments",
    [
        '{"city": "\\ud83d\\ude00!"}',
        '{"city": "😀!"}',
        '"{\\"city\\": \\"\\ud83d\\ude00!\\"}"',  # encoded twice, the escapes in the outer string
        '"{\\"city\\": \\"\\\\ud83d\\\\ude00!\\"}"',  # and in the inner one
    ],
)
def test_openclaw_115536_half_of_a_surrogate_pair_never_leaks(name: str, arguments: str) -> None:
    text = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    tokens = said(dialect(name), text)
    assert calls_of(everywhere(dialect(name), TOOLS, tokens)) == [("get_weather", {"city": "😀!"})]
    parser = dialect(name).parser(TOOLS)
    for data, control in bytewise(tokens):
        for delta in parser.feed(data, control):
            if isinstance(delta, ask.CallArguments):
                assert delta.text.encode().decode() == delta.text, "what cannot be sent is not told"


@HERMES
@pytest.mark.parametrize("spelled", ["é", "\\u00e9", "\\u00E9", "\\/", "/"])
def test_vllm_17704_and_46308_escapes_are_the_models_own(name: str, spelled: str) -> None:
    """There what was left to tell was found by comparing two spellings of one text."""
    text = f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "a{spelled}b"}}}}\n</tool_call>'
    _, arguments = told_of(everywhere(dialect(name), TOOLS, said(dialect(name), text)))
    assert arguments == {0: f'{{"city": "a{spelled}b"}}'}


@EVERY
def test_drama_llama_23_and_vmlx_swift_201_a_history_keeps_order_and_spelling(name: str) -> None:
    """There another order of keys, or other white space in JSON, made each prompt a new one."""
    arguments = '{"tags":[1,  2.0], "days": 1.50,"city":  "é"}'
    call = ask.Call("c", "get_weather", arguments, "p")
    written = "".join(piece.text for piece in dialect(name).calls([], [call]))
    places = [written.index(key) for key in ("tags", "days", "city")]
    assert places == sorted(places)
    assert "1.50" in written and "é" in written
    spoken_json = name.startswith(("chatml", "llama3"))
    assert (arguments if spoken_json else "[1, 2.0]") in written, "inner values in tags have one spelling"


@EVERY
def test_exo_2281_and_vllm_50768_an_id_says_nothing_but_itself(name: str) -> None:
    """Kimi's ids hold the function's name, and a client that writes its own loses it. Ours do not stand in a prompt."""
    first, other = (
        dialect(name).calls([], [ask.Call(one, "noop", "{}", "p")]) for one in ("functions.rm:7", "toolu_01-x")
    )
    assert first == other
    assert "rm" not in "".join(piece.text for piece in first)
    one, two = (dialect(name).results([ask.Result(i, (ask.Text("R"),))]) for i in ("functions.rm:7", "toolu_01-x"))
    assert one == two


@EVERY
def test_harmony_38_headers_of_a_family_that_is_not_spoken_are_text(name: str) -> None:
    """harmony 38, vllm 51977, llama.cpp 27720: a header that was not understood took the whole turn with it."""
    text = (
        "<|channel|>commentary to=functions.noop <|constrain|>json<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>final to=<|message|>So."
    )
    assert everywhere(dialect(name), TOOLS, said(dialect(name), text)) == [ask.TextDelta(text)]
