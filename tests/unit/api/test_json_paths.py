"""What is wrong in a JSON text is found by its path, also where the decoder does not tell it."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zjournal.api import chat, fields, json_paths, responses
from zjournal.api.messages import request
from zjournal.errors import BadRequest

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
RESPONSES = {"model": "m", "input": "x"}
ALL = ((chat.decode, CHAT), (responses.decode, RESPONSES), (request.decode, {**CHAT, "max_tokens": 9}))
each = pytest.mark.parametrize(("decode", "base"), ALL, ids=("chat", "responses", "messages"))


def refused(decode, raw):
    with pytest.raises(BadRequest) as caught:
        decode(raw if isinstance(raw, bytes) else json.dumps(raw).encode(), {})
    return caught.value


@each
def test_values_in_maps_are_named_by_their_keys(decode, base):
    many = {str(k): 1 for k in range(1000)}
    assert refused(decode, {**base, "logit_bias": {**many, "1017": "x", "1018": "y"}}).param == "logit_bias.1017"
    assert refused(decode, {**base, "logit_bias": {"5": 1, "17": 900}}).param == "logit_bias.17"
    assert refused(decode, {**base, "logit_bias": {"a" * 100: "x"}}).param == f"logit_bias.{'a' * 64}…"
    assert refused(decode, {**base, "logit_bias": {"": "x"}}).param == 'logit_bias[""]'
    fault = refused(decode, {**base, "logit_bias": {'a`b "\n' * 100: "x"}})
    assert fault.param.startswith('logit_bias["a\\u0060b \\"\\na\\u0060b') and fault.param.endswith('…"]')
    assert len(fault.param) < 200
    assert "expected `float`, got `str`" in fault.message
    if decode is not request.decode:  # there `metadata` has one field that is known, and may have others
        assert refused(decode, {**base, "metadata": {"b": "c", "a": 1}}).param == "metadata.a"
        assert refused(decode, {**base, "metadata": {"b": "c", "a": "v" * 513}}).param == "metadata.a"


@each
def test_what_is_beyond_the_search_is_named_by_its_map(decode, base):
    over = {str(k): 1 for k in range(json_paths.KEYS_MAX)} | {"x": "y"}
    assert refused(decode, {**base, "logit_bias": over}).param == "logit_bias"
    twice = json.dumps({**base, "logit_bias": {"5": 1}}).encode().replace(b'"5": 1', b'"5": "x", "5": 1')
    assert refused(decode, twice).param == "logit_bias"


@each
@pytest.mark.parametrize(
    ("text", "half"),
    [
        (rb"\ud800", rb"\ud800"),
        (rb"\udc00", rb"\udc00"),
        (rb"\uD83Dx", rb"\uD83D"),
        (rb"x\ud83d and so on", rb"\ud83d"),
        (rb"\ud83d\ud83d\udea2", rb"\ud83d"),
        (rb"\ud83d\udea2\udea2", rb"\udea2"),
        (rb"\\\ud800", rb"\ud800"),
        (rb"\\ud83d\udea2", rb"\udea2"),
    ],
)
def test_half_of_a_surrogate_pair_is_told_with_its_path_and_byte(decode, base, text, half):
    name = "input" if decode is responses.decode else "messages[0].content"
    raw = json.dumps(base).encode().replace(b'"x"', b'"%b"' % text)
    fault = refused(decode, raw)
    assert fault.param == name
    byte = raw.rindex(half) if text == rb"\ud83d\udea2\udea2" else raw.index(half)
    assert f"`{half.decode()}` at byte {byte} is half of a surrogate pair" in fault.message
    unknown = json.dumps({**base, "future": [1, {"a": "HERE"}]}).encode().replace(b"HERE", text)
    assert refused(decode, unknown).param == "future[1].a"
    of_key = json.dumps({**base, "future": [1, {"HERE": "a"}]}).encode().replace(b"HERE", text)
    assert refused(decode, of_key).param == "future[1]"
    twice = raw[:-1] + b', "user": "%b", "user": "x"}' % text
    assert refused(decode, twice).param == name
    big = json.dumps({**base, "future": "a" * json_paths.SEARCHED_BYTES_MAX}).encode().replace(b'"x"', b'"%b"' % text)
    assert (refused(decode, big).param, "at byte" in refused(decode, big).message) == (None, True)


@given(st.lists(st.sampled_from(["\\ud83d", "\\udea2", "\\\\", '\\"', "\\u0041", "\\\\ud83d", "u", "x"]), max_size=12))
def test_a_half_is_found_where_the_decoder_finds_one(pieces):
    raw = '{{"a":["{}"]}}'.format("".join(pieces)).encode()
    half = json_paths.lone_surrogate(raw)
    try:
        msgspec.json.decode(raw)
    except msgspec.DecodeError:
        assert half is not None and half.path == "a[0]"
        assert raw[half.byte :].startswith(half.escape.encode())
    else:
        assert half is None


def test_other_faults_keep_their_sentences():
    for raw in (b'{"model":"m', b'{"a":"\\ux"}', b"{'a':1}"):
        with pytest.raises(BadRequest) as caught:
            fields.parse(fields.any_decoder, raw)
        assert "surrogate" not in caught.value.message
