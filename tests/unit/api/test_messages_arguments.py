"""The input of a call: pieces that are always the beginning of one JSON object, whatever the model writes."""

import json

import jiter
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zjournal.api.messages.arguments import UNPARSED, Input

GOOD = (
    "{}",
    '{"a": 1}',
    ' { "x" : [ ] , "y" : [ [ ] , { } ] } \n',
    '{"a": [1, {"b": "x\\n\\u00e9\\"", "c": null}], "d": -1.5e3, "e": true}',
    '{"a": "\U0001f600\\ud83d\\ude00", "k": {}}',
)
BAD = (
    *("[1,2]", "null", "x", '"text"', "{,}", '{"a": 1,}', '{"a": [1,}', '{"a" 1}', '{"a": tru}', '{"a": 01}'),
    *('{"a": 1} x', '{"a": 1}}', '{"a": "b\nc"}', '{"a": "\\x"}', '{"a": "\\u12g4"}', '{"a": "b" "c"}', '{"a": 1.}'),
    *('{"a": -}', '{"a": {"b": [1, "x\\', '{"a": {"b": [1, "x', '{"a": nul', '{"a"', '{"a": 1, "b"', '{"a": [tr'),
)


def told(text: str, cuts=(), truncated: bool = False) -> tuple[str, dict]:
    """What is told of arguments that come in pieces, and the input at the end; each beginning must parse as one."""
    taken = Input()
    pieces = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        pieces.append(taken.feed(text[start:end]))
        if "".join(pieces).strip():
            jiter.from_json("".join(pieces).encode(), partial_mode=True)
    pieces.append(taken.end(truncated))
    return "".join(pieces), taken.value()


def cuts_of(data: st.DataObject, text: str) -> list[int]:
    return sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))


@given(st.data())
def test_sound_arguments_are_told_as_they_are(data):
    text = data.draw(st.sampled_from(GOOD))
    whole, value = told(text, cuts_of(data, text))
    assert json.loads(whole) == value == json.loads(text)
    assert whole == text.rstrip()


def test_no_arguments_are_an_empty_object():
    for text in ("", "  \n"):
        whole, value = told(text)
        assert json.loads(whole) == value == {}


@given(st.data())
def test_arguments_that_are_no_object_are_a_text_in_one(data):
    text = data.draw(st.sampled_from(BAD))
    whole, value = told(text, cuts_of(data, text))
    assert json.loads(whole) == value
    assert value[UNPARSED] == text


@pytest.mark.parametrize("text", GOOD)
def test_a_call_that_was_cut_stays_open(text):
    for cut in range(len(text.strip())):
        whole, value = told(text[:cut], truncated=True)
        assert whole == text[:cut]
        with pytest.raises(ValueError):
            json.loads(whole)
        assert value.items() <= json.loads(text).items() or set(value) <= set(json.loads(text))


def test_of_a_call_that_was_cut_the_whole_members_count():
    assert told('{"path": "a", "lines": [1, 2, 3], "to": "the ', truncated=True)[1] == {"path": "a", "lines": [1, 2, 3]}
    assert told('{"path": "the far side of the', truncated=True)[1] == {}


@given(st.text(alphabet='{}[]":,\\u01e-.truefalsn \n', max_size=14), st.data())
def test_whatever_the_model_writes_an_object_is_told(text, data):
    text = "{" + text
    whole, value = told(text, cuts_of(data, text))
    try:
        sound = json.loads(text)
    except ValueError:
        sound = None
    assert json.loads(whole) == value
    assert value == sound if isinstance(sound, dict) else value[UNPARSED] == text
