"""The ChatML dialect, to the byte."""

from __future__ import annotations

import pytest

from zjournal import ask
from zjournal.dialects.base import Dialect, Piece
from zjournal.dialects.chatml import ChatML
from zjournal.errors import BadRequest

TOOL = ask.ToolSpec("get", "Gets é", b'{"type":"object","properties":{"b":{"type":"string"},"a":{}}}', "tools[0]")
DIALECT: Dialect = ChatML()


def text(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def test_instruct():
    bare = ask.ToolSpec("bare", path="tools[1]")
    assert text(DIALECT.instruct([TOOL, bare])) == (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        '{"type": "function", "function": {"name": "get", "description": "Gets é", "parameters": '
        '{"type": "object", "properties": {"b": {"type": "string"}, "a": {}}}}}\n'
        '{"type": "function", "function": {"name": "bare", "parameters": {}}}\n'
        "</tools>\n\nFor each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def test_only_the_clients_part_is_untrusted():
    pieces = DIALECT.instruct([TOOL])
    assert [piece.path for piece in pieces if not piece.trusted] == ["tools[0]"]


def test_calls_keep_the_clients_arguments():
    first = ask.Call("c1", "f", '{ "z":1,"a":"\\u00e9" }', "p1")
    second = ask.Call("c2", 'q"', "", "p2")
    pieces = DIALECT.calls([], [first, second])
    assert text(pieces) == (
        '<tool_call>\n{"name": "f", "arguments": { "z":1,"a":"\\u00e9" }}\n</tool_call>\n'
        '<tool_call>\n{"name": "q\\"", "arguments": {}}\n</tool_call>'
    )
    assert [piece.path for piece in pieces if not piece.trusted] == ["p1", "p2"]
    assert text(DIALECT.calls([Piece("Sure.")], [first])).startswith("Sure.\n<tool_call>\n{")
    assert text(DIALECT.calls([Piece("")], [first])).startswith("<tool_call>\n{")


def test_results_are_one_turn():
    one = ask.Result("c1", (ask.Text("a", "p1"), ask.Text("b", "p2")))
    two = ask.Result("c2", ())
    pieces = DIALECT.results([one, two])
    expected = "<tool_response>\nab\n</tool_response>\n<tool_response>\n\n</tool_response>"
    assert text(pieces) == expected
    assert [piece.path for piece in pieces if not piece.trusted] == ["p1", "p2"]


@pytest.mark.parametrize(
    "parameters",
    [b"", b"[]", b"3", b"null", b"{", b'{"a": NaN}', b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b'{"a": "\xff"}'],
)
def test_malformed_parameters_are_refused_with_their_path(parameters):
    with pytest.raises(BadRequest) as caught:
        DIALECT.instruct([ask.ToolSpec("f", None, parameters, "tools[4]")])
    assert caught.value.param == "tools[4]"


def test_parser_passes_text_through():
    parser = DIALECT.parser()
    assert parser.feed(b"<tool_call>") == [ask.TextDelta("<tool_call>")]
    assert parser.feed(b"") == []
    assert parser.feed("é".encode()[:1]) == []
    assert parser.end() == [ask.TextDelta("\ufffd")]
