"""Names that must come out the same when derived again."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zjournal import ask
from zjournal.sessions import identity

SECRET = b"s" * 32


def user(*parts: str) -> ask.Message:
    return ask.Message("user", tuple(ask.Text(part, f"p{i}") for i, part in enumerate(parts)))


def test_item_ids_are_stable_and_depend_on_every_part() -> None:
    def made(secret: bytes, response: str, index: int, prefix: str) -> str:
        return identity.item_id(identity.item_secret(secret, response), index, prefix)

    name = made(SECRET, "resp_1", 0, "msg")
    assert name == made(SECRET, "resp_1", 0, "msg")
    assert name.startswith("msg_")
    others = {
        made(b"t" * 32, "resp_1", 0, "msg"),
        made(SECRET, "resp_2", 0, "msg"),
        made(SECRET, "resp_1", 1, "msg"),
        made(SECRET, "resp_1", 0, "fc"),
    }
    assert len({name, *others}) == 5


def test_namespaces_differ_by_tenant_and_model() -> None:
    assert len({identity.namespace(model, tenant) for model in "ab" for tenant in "xy"}) == 4


def test_a_salt_narrows_the_namespace_and_cannot_be_guessed_back() -> None:
    salts = {identity.salt(secret, tenant, name) for secret in (SECRET, b"t" * 32) for tenant in "xy" for name in "ab"}
    assert len(salts) == 8
    namespace = identity.namespace("model", "x")
    assert identity.kv_namespace(namespace, identity.salt(SECRET, "x", None)) == namespace
    assert len({identity.kv_namespace(namespace, salt) for salt in salts}) == 8
    assert all(salt != "a" for salt in salts) and identity.salt(SECRET, "x", "\ud800")


def test_how_a_text_was_cut_into_parts_does_not_count() -> None:
    start = identity.history_start(SECRET)
    assert identity.history(start, [user("hello world")]) == identity.history(start, [user("hello", " world")])


def test_an_output_counts_as_what_the_client_saw_of_it() -> None:
    start = identity.history_start(SECRET)
    seen = ask.Message("assistant", (ask.Text("yes"),))
    output = ask.Output("resp_1", (seen,), b"\1\0\0\0")
    assert identity.history(start, [user("x"), output]) == identity.history(start, [user("x"), seen])


texts = st.text(max_size=6)
items = st.one_of(
    st.builds(user, texts),
    st.builds(lambda text: ask.Message("assistant", (ask.Text(text),)), texts),
    st.builds(ask.Call, texts, texts, texts),
    st.builds(lambda name, text: ask.Result(name, (ask.Text(text),)), texts, texts),
)


@given(st.lists(items, max_size=4), st.lists(items, max_size=4))
def test_equal_digests_mean_equal_histories(a: list[ask.Item], b: list[ask.Item]) -> None:
    start = identity.history_start(SECRET)

    def plain(found: list[ask.Item]) -> list:
        return [
            (type(item), getattr(item, "role", ""), item.text if hasattr(item, "text") else one(item)) for item in found
        ]

    def one(item: ask.Item) -> object:
        call = isinstance(item, ask.Call)
        return (item.call_id, item.name, identity.canonical(item.arguments)) if call else item.text

    def calls(found: list[ask.Item]) -> list:
        return [item.call_id for item in found if isinstance(item, ask.Result)]

    same = plain(a) == plain(b) and calls(a) == calls(b)
    assert (identity.history(start, a) == identity.history(start, b)) == same


def test_a_call_is_named_by_a_key_that_depends_on_every_part() -> None:
    key = identity.call_key(SECRET, "local", "call_1")
    assert len(key) == identity.CALL_KEY_BYTES
    others = [(b"t" * 32, "local", "call_1"), (SECRET, "t_1", "call_1"), (SECRET, "local", "call_2")]
    assert len({key, *(identity.call_key(*parts) for parts in others)}) == 4


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1, "b": {"c": [1, 2]}}', '{"b":{"c":[1,2]},"a":1}'),
        ('{"a": 1.50}', '{"a": 15e-1}'),
        ('{"a": 10000000000000000000000}', '{"a": 1e22}'),  # as JavaScript writes it
        ('{"a": -0}', '{"a": 0}'),
        ('{"a": "\\u00e9\\/"}', '{"a": "é/"}'),
        ("", "{}"),
        (" \n", "{ }"),
    ],
)
def test_arguments_that_are_equal_as_json_are_equal(one: str, other: str) -> None:
    assert identity.canonical(one) == identity.canonical(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1}', '{"a": "1"}'),
        ('{"a": 1}', '{"a": true}'),
        ('{"a": 0}', '{"a": null}'),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"a": 12345678901234567890}', '{"a": 12345678901234567000}'),
        ('{"a": ""}', '{"a": " "}'),
        ('{"a": "1e0"}', '{"a": 1}'),
        ('{"a": {}}', '{"a": []}'),
        ('{"a": 1, "a": 2}', '{"a": 2}'),  # a key twice: some readers have the first
        ('{"a": [{"b": 2, "b": 2}]}', '{"a": [{"b": 2}]}'),
        ('{"a"', '{"a" '),  # no JSON: as it is
        ("NaN", "[NaN]"),
        ('{"é": 1}', '{"e\u0301": 1}'),  # another spelling of the letter is another text
    ],
)
def test_arguments_that_differ_are_not(one: str, other: str) -> None:
    assert identity.canonical(one) != identity.canonical(other)


def test_arguments_beyond_all_measure_are_compared_as_text() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    for text in (deep, '{"a": 1e999999999999999999999}', "[" * 70 + "1.0" + "]" * 70):
        assert identity.canonical(text) == text
    assert identity.canonical('{"a": 1e999999}') == '{"a":1e999999}'
    half = '{"a": "\\ud800"}'  # half of a surrogate pair, which models and clients may escape
    assert identity.canonical(half).encode()
    assert identity.history_step(b"", ask.Call("c", "f", half, "")) != identity.history_step(
        b"", ask.Call("c", "f", "", "")
    )


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.decimals(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def _dumped(value: Any, reverse: bool) -> str:
    """JSON with numbers as Decimal prints them, and keys in one order or the other."""
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, list):
        return "[" + ",".join(_dumped(inner, reverse) for inner in value) + "]"
    if isinstance(value, dict):
        keys = sorted(value, reverse=reverse)
        return "{" + " ,".join(f"{json.dumps(key)}: {_dumped(value[key], reverse)}" for key in keys) + "}"
    return json.dumps(value, ensure_ascii=reverse)


def _read(text: str) -> Any:
    """The value, in which a number is not equal to a boolean."""
    number = lambda digits: ("number", Decimal(digits))  # noqa: E731
    return json.loads(text, parse_int=number, parse_float=number)


@given(json_values)
def test_one_spelling_for_each_value_that_says_the_same(value: Any) -> None:
    found = identity.canonical(_dumped(value, True))
    assert found == identity.canonical(_dumped(value, False)) == identity.canonical(found)
    assert _read(found) == _read(_dumped(value, True))


def test_a_call_id_tells_where_to_look_and_cannot_be_made_up() -> None:
    for protocol in ("chat", "responses", "messages"):
        response = identity.response_id(protocol, bytes(range(16)))
        secret = identity.item_secret(SECRET, response)
        made = identity.call_id(secret, response, 0)
        assert response[: identity.RESPONSE_KEY_CHARACTERS] in identity.responses_of_call(made)
        assert made == identity.call_id(secret, response, 0)
        assert made.startswith("call_") and len(made) <= 64, "the longest that clients take"
        others = {identity.call_id(secret, response, 1), identity.call_id(b"t" * 32, response, 0)}
        assert len({made, *others}) == 3
    for foreign in ("", "call_1", "toolu_" + "a" * 44, "call_" + "a" * 44):
        assert identity.responses_of_call(foreign) == ()
