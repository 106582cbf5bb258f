"""Lists of input items: their ids, their parts, and pages of them in both directions."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zjournal.api import responses_list
from zjournal.api.responses_list import Page
from zjournal.errors import BadRequest


def listed(given_input):
    raw = json.dumps({"input": given_input}).encode()
    return list(responses_list.items(raw, lambda index, prefix: f"{prefix}_{-index}"))


def test_every_item_has_a_type_an_id_and_parts():
    assert listed("hi") == [
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "hi"}],
            "id": "msg_1",
            "status": "completed",
        }
    ]
    said, call, trigger = (
        {"role": "assistant", "content": "yo", "id": "msg_own"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "compaction_trigger"},
    )
    found = listed([said, call, trigger])
    assert [item["id"] for item in found] == ["msg_own", "fc_2"]
    assert found[0]["content"] == [{"type": "output_text", "text": "yo", "annotations": []}]


ITEMS = [{"id": f"i{index}"} for index in range(7)]


@given(st.integers(1, 8), st.sampled_from(["asc", "desc"]))
def test_pages_joined_are_the_list(limit, order):
    found, after = [], ""
    for _ in range(len(ITEMS) + 1):
        page = Page(after=after, limit=limit, order=order).of(ITEMS)
        found += page["data"]
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
        after = page["last_id"]
        if not page["has_more"]:
            break
    assert found == (ITEMS if order == "asc" else ITEMS[::-1])


def test_a_page_before_an_item_and_an_empty_one():
    assert [item["id"] for item in Page(before="i3", order="asc").of(ITEMS)["data"]] == ["i0", "i1", "i2"]
    empty = Page(after="i0").of(ITEMS)
    assert (empty["data"], empty["first_id"], empty["last_id"], empty["has_more"]) == ([], None, None, False)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "101"}, "limit"),
        ({"limit": "-1"}, "limit"),
        ({"limit": "٣"}, "limit"),
        ({"order": "up"}, "order"),
    ],
)
def test_what_is_wrong_with_a_query_is_named(query, param):
    with pytest.raises(BadRequest) as fault:
        Page.asked(query)
    assert fault.value.param == param


def test_an_id_that_is_not_in_the_list_is_named():
    for name in ("after", "before"):
        with pytest.raises(BadRequest) as fault:
            Page(**{name: "x"}).of(ITEMS)
        assert fault.value.param == name


def test_flags_and_numbers():
    assert responses_list.flag({"stream": "True"}, "stream")
    assert not responses_list.flag({}, "stream")
    assert responses_list.number({"n": "12"}, "n", -1) == 12
    assert responses_list.number({}, "n", -1) == -1
    for value in ("-1", "x", "99999999999999999999", "²", "0" * 5000):
        with pytest.raises(BadRequest):
            responses_list.number({"n": value}, "n", -1)
    with pytest.raises(BadRequest):
        responses_list.flag({"stream": "yes"}, "stream")
