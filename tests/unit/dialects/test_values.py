"""Arguments between JSON and a dialect's own form."""

from __future__ import annotations

import functools
import json

import pytest

from zjournal.dialects import values


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", []),
        (" {} ", []),
        ('{"b":1.50,"a":{"y":[1,2],"x":"\\u00e9"}}', [("b", "1.50"), ("a", '{"y": [1, 2], "x": "é"}')]),
        ('{"a": "x, y: {z}"}', [("a", '"x, y: {z}"')]),
        ('{"a": 1, "a": 2}', [("a", "2")]),
        ('{"a": "\\ud83d\\ude00 \\/"}', [("a", '"😀 /"')]),
        ('{"a": "\\ud83d"}', [("a", '"\\ud83d"')]),
        ('"{\\"a\\": 1}"', [("a", "1")]),
        ('{"a": 1', [("arguments", '"{\\"a\\": 1"')]),
        ("[1]", [("arguments", '"[1]"')]),
        ('{"a": NaN}', [("arguments", '"{\\"a\\": NaN}"')]),
        ('"text"', [("arguments", '"\\"text\\""')]),
        ("[" * 100_000, [("arguments", f'"{"[" * 100_000}"')]),
    ],
)
def test_members(arguments, expected):
    assert values.members(arguments) == expected
    for _, raw in expected:
        json.loads(raw)


def test_only_whole_strings_are_bare():
    assert values.text_of('"a\\n"') == "a\n"
    assert values.text_of("12") is None
    assert values.text_of('"\\ud83d"') is None


def test_a_schema_that_recurses_or_is_odd_allows_what_it_does_not_forbid():
    every = values.TYPES
    wide = {"anyOf": [{"anyOf": [{"$ref": "#"} for _ in range(300)]} for _ in range(300)]}
    assert values.allowed(wide, wide) == every  # once each, or it would take hours
    deep = functools.reduce(lambda inner, _: {"anyOf": [inner]}, range(5000), {"type": "null"})
    assert values.allowed(deep, deep) == every
    assert values.allowed({"type": [["null"], "null"]}, {}) == {"null"}
    assert values.allowed({"$ref": "#/nowhere"}, {}) == every
    assert values.allowed({"$ref": "other.json#/x"}, {}) == every
    assert values.allowed({"$ref": "#/a~1b/c"}, {"a/b": {"c": {"type": "null"}}}) == {"null"}
    assert values.allowed({"type": 3}, {}) == every
    assert values.allowed({"type": "dict"}, {}) == every
    assert values.allowed({"type": "string", "const": 1}, {}) == every  # nothing would fit
    assert values.allowed(None, {}) == every


def test_whole_numbers_are_numbers():
    assert values.allowed({"type": "integer", "enum": [1, 2]}, {}) == {"integer"}
    assert values.allowed({"type": "number", "allOf": [{"type": "integer"}]}, {}) == {"integer"}
    assert values.allowed({"const": 1.5}, {}) == {"integer", "number"}
    assert values.fits(1.0, frozenset(("integer",)))
    assert not values.fits(True, frozenset(("integer", "number")))
