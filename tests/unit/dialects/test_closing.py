"""Bare values that end with ordinary text: the terminals against what they are to mean, and what they cost."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from tests.unit.dialects.fencing import accepts, fence, matcher, tool
from zjournal.dialects.fences import custom
from zjournal.dialects.fences.closing import Closing
from zjournal.dialects.fences.lark import Writer
from zjournal.dialects.fences.trees import Trees
from zjournal.errors import BadRequest

TAG, END = "</parameter>", "\n</parameter>\n"
FOLLOWED = ("<parameter=", "</function>")
CLOSING = Closing(TAG, END, FOLLOWED)
SPACE = r"[\s\x1c-\x1f]*"
NULL, OBJECT = rf"{SPACE}null{SPACE}", rf"{SPACE}\{{(?s:.*)"
HELD = re.compile(rf"{TAG}\s*({'|'.join(FOLLOWED)})", re.IGNORECASE)
PIECES = (
    *("a", "b", "\n", "<", "</", "/", " ", "\t", TAG, f"\n{TAG}", f"{TAG}\n", "</PARAMETER>", "\n</Parameter>\n"),
    *("<parameter=", "</function>", "<parameter", "</func", "</functıon>", "</paramet", "é", "漢", "\u2003", "null"),
    *("{", "<<", "param", "\x1c", ">", "=", "<a>", "x" * 20),
)
# What is kept, what it must not look like, scalars, words: as Closing.terminals has them; and the same for Python.
VALUES = {
    "any": (((),), (), (), ()),
    "to 30": ((("(?s:.{0,30})",),), (), (), ()),
    "to 120": ((("(?s:.{0,120})",),), (), (), ()),
    "to 5": ((("(?s:.{0,5})",),), (), (), ()),
    "20 to 200": ((("(?s:.{20,200})",),), (), (), ()),
    "from 3": ((("(?s:.{3,})",),), (), (), ()),
    "or null": (((),), (NULL, OBJECT), ("null",), ()),
    "to 40 or null": ((("(?s:.{0,40})",),), (NULL, OBJECT), ("null",), ()),
    "pattern": ((("(?s:.*)(<[a-z]+>)(?s:.*)",),), (), (), ()),
    "both": ((("(a|b|<)*", "(?s:.{0,9})"),), (), (), ()),
    "words": (((), ("(?s:.{0,9})",)), (), (), ("a<b", "", "12")),
}


def _grammar(name: str) -> str:
    kept, unlike, scalars, words = VALUES[name]
    bodies = CLOSING.terminals(words, kept, unlike, scalars)
    lines = "".join(f"T{at}: {body}\n" for at, body in enumerate(bodies))
    return f'%llguidance {{}}\nstart: v "<NEXT>"\nv: {" | ".join(f"T{at}" for at in range(len(bodies)))}\n{lines}'


def _means(name: str, value: str) -> bool:
    kept, unlike, scalars, words = VALUES[name]
    if (value + END).index(END) < len(value) or HELD.search(value):
        return False
    free = any(all(re.fullmatch(one, value) for one in each) for each in kept)
    free = free and not any(re.fullmatch(one, value) for one in unlike)
    return free or value in words or any(re.fullmatch(one, value) for one in scalars)


def _accepts(one: LLMatcher, text: str) -> bool:
    data = text.encode()
    return one.try_consume_tokens([byte + 1 for byte in data]) == len(data) and one.is_accepting()


@pytest.mark.parametrize("name", VALUES)
@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=9))
def test_the_terminals_say_what_a_value_is(name: str, pieces: Sequence[str]) -> None:
    value = "".join(pieces)
    assert _accepts(custom.matcher(_grammar(name)), value + END + "<NEXT>") == _means(name, value)


@pytest.mark.parametrize(("least", "most"), [(0, 3), (0, 12), (2, 40), (30, 60), (0, 100)])
def test_counted_strings_of_json_are_those_of_the_grammar_engine_without_the_tag(least: int, most: int) -> None:
    schema = {"type": "string", "minLength": least, "maxLength": most}
    grammars = []
    for whole in (False, True):
        writer = Writer({})
        trees = Trees(writer, (TAG,))
        writer.raw("start", trees.whole(schema, {}) if whole else trees.of(schema, {}))
        grammars.append(writer.finished())
    assert "%json" in grammars[1] and "%json" not in grammars[0]
    dice = random.Random(most)
    right = ["a", "é", "漢", "<", "</", "/", "parameter>", "</par", "<<", r"\n", r"\"", r"\\", r"\u001f"]
    pieces = [*right * 8, TAG, "</PARAMETER>", r"\u00e9", r"\/", '"', "\n", "\x7f"]
    engines = [custom.matcher(grammar) for grammar in grammars]
    accepted = 0
    for _ in range(60):
        text = f'"{"".join(dice.choice(pieces) for _ in range(dice.randint(0, most // 2 + 3)))}"'
        ours, theirs = (_accepts(engine.deep_copy(), text) for engine in engines)
        assert ours == theirs, text
        accepted += ours
    assert accepted


@pytest.mark.parametrize(
    "value",
    [
        "Off-DeleteEnvironment variable</parameter></function",
        "Text error trying to over shoot original component arguments and expecting\n</parameter",
        "x" * 90 + "</parameter>\t\t\t\t",
        "<" * 100,
    ],
)
def test_a_bounded_value_that_almost_ends_does_not_break_the_engine(value: str) -> None:
    """The first two came up in hot generations: "too many expressions constructed", at the limits it has by itself."""
    schema = {"type": "object", "properties": {"path": {"type": "string", "maxLength": 120}}, "required": ["path"]}
    built = fence("qwen-xml-text", [tool("edit_file", schema)])
    assert built.bounds is not None
    one = matcher("qwen-xml-text", built.bounds.grammar).deep_copy()
    text = f"<tool_call>\n<function=edit_file>\n<parameter=path>\n{value}.{END}</function>\n</tool_call>"
    for byte in text.encode():
        one.compute_bitmask()
        assert one.consume_token(byte + 1), one.get_error()
    assert one.is_accepting()


@pytest.mark.parametrize("name", ["qwen-xml", "qwen-xml-text"])
@pytest.mark.parametrize(("least", "most"), [(0, 0), (0, 7), (0, 100_000), (0, 1 << 31), (2000, None), (900, 5000)])
def test_lengths_of_any_size_are_counted(name: str, least: int, most: int | None) -> None:
    bounds = {"minLength": least} | ({} if most is None else {"maxLength": most})
    built = fence(name, [tool("f", {"properties": {"a": {"type": "string", **bounds}}, "required": ["a"]})])
    assert not built.warnings
    for length in {least, min(least + 1, most or least)}:
        value = ("<" * length)[: length // 2].ljust(length, "é")
        assert accepts(name, built, f"<tool_call>\n<function=f>\n<parameter=a>\n{value}{END}</function>\n</tool_call>")
    if least:
        short = "x" * (least - 1)
        text = f"<tool_call>\n<function=f>\n<parameter=a>\n{short}{END}</function>\n</tool_call>"
        assert not accepts(name, built, text)


@pytest.mark.parametrize("strict", [False, True])
def test_a_least_length_that_cannot_be_counted_is_told(strict: bool) -> None:
    schema = {"properties": {"a": {"type": "string", "minLength": 2001}}, "required": ["a"]}
    if strict:
        with pytest.raises(BadRequest, match="2000 characters") as error:
            fence("qwen-xml", [tool("f", schema, strict=True)])
        assert error.value.param == "tools[0].parameters.properties.a.minLength"
        return
    assert fence("qwen-xml", [tool("f", schema)]).loose == ("tools[0].parameters.properties.a.minLength",)
