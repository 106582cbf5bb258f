"""The depth of a body, by its brackets: against a reader that counts as it decodes."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zjournal.api import nesting
from zjournal.errors import BadRequest

TEXTS = st.text(st.sampled_from('[]{}"\\\n\u2028aé'), max_size=12)
VALUES = st.recursive(
    TEXTS | st.none() | st.integers(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def depth_of(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


def refused(body: bytes) -> bool:
    try:
        nesting.check(body)
    except BadRequest as fault:
        assert str(nesting.JSON_DEPTH_MAX) in fault.message
        return True
    return False


@given(VALUES, st.integers(0, nesting.JSON_DEPTH_MAX + 2), st.booleans())
def test_it_is_the_depth_of_what_is_decoded(value, above, ascii_only):
    for _ in range(above):
        value = [value, "]"] if above % 2 else {"a": value, "[": "\\"}
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert refused(body) == (depth_of(value) > nesting.JSON_DEPTH_MAX)


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_the_limit_itself_is_in(opening):
    closing = {b"[": b"]", b'{"a":': b"}"}[opening]
    for depth in (nesting.JSON_DEPTH_MAX, nesting.JSON_DEPTH_MAX + 1):
        assert refused(opening * depth + b"1" + closing * depth) == (depth > nesting.JSON_DEPTH_MAX)
    assert refused(opening * 1_000_000), "whole or not"


def test_what_stands_in_a_string_does_not_count():
    assert not refused(json.dumps({"arguments": "[" * 10_000, "more": [["\\", '"[' * 500]]}).encode())


@pytest.mark.parametrize(
    ("place", "within"),
    [('{"a":%s,"a":1}', 1), ('{"a":1,"a":%s}', 1), ('[{"a":%s,"a":1}]', 2), ('{"x":[1,{"b":%s,"b":[]}]}', 3)],
)
def test_a_member_that_another_one_of_its_name_hides_counts(place, within):
    for more in (0, 1):
        depth = nesting.JSON_DEPTH_MAX - within + more
        assert refused((place % ("[" * depth + "]" * depth)).encode()) == bool(more)


@pytest.mark.parametrize("indent", [None, 1])
def test_long_texts_full_of_brackets_are_no_depth(indent):
    """What is surely right is told from its shape, however the body is laid out."""
    messages = [{"role": "user", "content": [{"type": "text", "text": ("[{" * 3_000) + f'\\"{n}'}]} for n in range(40)]
    body = {"messages": messages, "tools": [{"name": "]" * 9_000}]}
    assert not refused(json.dumps(body, indent=indent).encode())
    deep: list = []
    for _ in range(nesting.JSON_DEPTH_MAX - 5):
        deep = [deep]
    messages[7]["content"].append(deep)  # in the body, the list, the message and its content
    for expected in (False, True):
        assert refused(json.dumps(body, indent=indent).encode()) is expected
        messages[7]["content"][-1] = [deep]


@pytest.mark.parametrize(("opening", "part"), [(b"[", b"1"), (b"[", b"[]"), (b"{", b'"a":1')])
def test_a_body_of_very_many_parts_is_not_taken_apart(opening, part, monkeypatch):
    """Each part would be an object: a body of numbers alone took a hundred times as long as its brackets do."""
    closing = {b"[": b"]", b"{": b"}"}[opening]
    taken = []

    def apart(decode):
        return lambda value: taken.append(len(parts := decode(value))) or parts

    monkeypatch.setattr(nesting, "_elements", apart(nesting._elements))
    monkeypatch.setattr(nesting, "_members", apart(nesting._members))
    for count in (nesting.PARTS_MAX, nesting.PARTS_MAX + 1):
        for above in (nesting.JSON_DEPTH_MAX - 1 - part.count(b"["), nesting.JSON_DEPTH_MAX):
            many = opening + b",".join([part] * count) + closing
            body = b'{"m":' + many + b',"d":' + b"[" * above + b"]" * above + b"}"
            assert refused(body) == (above == nesting.JSON_DEPTH_MAX)
            assert not taken, "one more of the body itself"
    assert not refused(opening + b",".join([part] * nesting.PARTS_MAX) + closing)
    assert taken


@given(st.text(st.sampled_from('\\\\\\\\"[a'), max_size=30).map(str.encode), st.integers(2, 6))
def test_escapes_are_left_out_wherever_a_block_ends(body, size):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(nesting, "BLOCK_BYTES", size)
        blocks = list(nesting._blocks(body))
    assert b"".join(blocks) == body and all(len(block) <= size for block in blocks)
    assert b"".join(map(nesting._unescaped, blocks)) == re.sub(rb"\\.?", b"", body)


@pytest.mark.parametrize("end", [b"", b'"', b"]]", b"\xff", b'{"a":1,}'])
def test_what_is_no_json_is_judged_by_its_brackets(end):
    assert refused(b"[" * (nesting.JSON_DEPTH_MAX + 1) + end)
    assert not refused(b"[" * 100 + end)
