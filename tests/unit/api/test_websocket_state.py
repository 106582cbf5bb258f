"""A socket as a state machine: what a message asks for, whose turn it is, and what can be continued."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zjournal.api import responses
from zjournal.api.websocket_state import Bounds, Create, Local, Session, Steer, error, not_steered, read
from zjournal.errors import BadRequest, ConnectionLimit, Fault, Overloaded, RateLimited

SMALL = Bounds(waiting=2, waiting_bytes=100, local=3, local_bytes=100, life_s=60.0)


def create(**body: Any) -> str:
    return json.dumps({"type": "response.create", **body})


def one(name: str) -> Create:
    return Create(name.encode())


# --- messages ----------------------------------------------------------------------------------------


def test_a_request_is_the_body_that_it_would_have_over_http() -> None:
    told = read(create(model="m", input="hi", stream=True, stream_options={"x": 1}, background=True, store=False))
    assert isinstance(told, Create)
    assert json.loads(told.body) == {"model": "m", "input": "hi", "store": False}
    assert told.previous == ""
    assert responses.decode(told.body, {}).store is False


def test_what_stands_in_the_body_stays_byte_for_byte() -> None:
    schema = '{"b": 1.0,  "a":\t2}'
    told = read('{"type" : "response.create", "tools":[' + schema + '], "input":"\\u00e9 \u00e9"}')
    assert isinstance(told, Create)
    assert schema.encode() in told.body and b"\\u00e9 \xc3\xa9" in told.body


def test_the_response_that_is_continued_is_known_before_the_rest_is_read() -> None:
    told = read(create(previous_response_id="resp_1", model=7))
    assert isinstance(told, Create) and told.previous == "resp_1"
    other = read(create(previous_response_id=7))
    assert isinstance(other, Create) and other.previous == ""


@pytest.mark.parametrize(
    ("text", "param"),
    [
        (None, None),
        ("", None),
        ("{", None),
        ("[]", None),
        ("null", None),
        ("{}", "type"),
        ('{"type": 1}', "type"),
        ('{"type": ""}', "type"),
        ('{"type": "response.cancel"}', "type"),
        ('{"type": "response.create", "stream_id": "a"}', "stream_id"),
        ('{"type": "response.create", "stream_id": 7}', "stream_id"),
        ('{"type": "response.steer", "input": "x"}', "previous_response_id"),
        ('{"type": "response.steer", "previous_response_id": "resp_1"}', "input"),
        ('{"type": "response.create", "input": ' + "[" * 100_000 + "]" * 100_000 + "}", None),
    ],
)
def test_a_message_that_asks_for_nothing_known_names_what_is_wrong(text: str | None, param: str | None) -> None:
    with pytest.raises(BadRequest) as caught:
        read(text)
    assert caught.value.param == param


def test_a_lane_that_is_left_out_is_none() -> None:
    assert isinstance(read(create(stream_id=None, model="m")), Create)


def test_input_for_a_running_response_comes_back_untouched() -> None:
    given = [{"type": "message", "role": "user", "content": "wait"}]
    steer = read(json.dumps({"type": "response.steer", "previous_response_id": "resp_1", "input": given}))
    assert isinstance(steer, Steer)
    told = json.loads(not_steered(steer))
    assert told["type"] == "response.steer.failed"
    assert told["error"]["code"] == "steering_not_supported"
    assert told["steer"] == {"previous_response_id": "resp_1", "input": given}


def test_an_error_has_a_status_and_what_a_client_needs_to_try_again() -> None:
    assert json.loads(error(BadRequest("No.", param="input"))) == {
        "type": "error",
        "status": 400,
        "error": {"type": "invalid_request_error", "code": "invalid_request", "message": "No.", "param": "input"},
    }
    later = json.loads(error(RateLimited("Later.", "requests", 7)))
    assert (later["status"], later["headers"]) == (429, {"retry-after": "7"})


@given(st.text() | st.binary().map(lambda data: data.decode("latin-1")))
def test_no_text_breaks_the_reader(text: str) -> None:
    with contextlib.suppress(BadRequest):
        assert isinstance(read(text), Create | Steer)


# --- one at a time -----------------------------------------------------------------------------------


def test_requests_are_answered_one_by_one_in_their_order_faults_too() -> None:
    session = Session(0.0, SMALL)
    fault = BadRequest("No.")
    for asked in (one("a"), fault):
        assert session.take(asked, 10) is None
    assert session.next(1.0) == one("a")
    assert session.busy
    session.answered()
    assert session.next(2.0) is fault
    session.answered()
    assert session.next(3.0) is None
    assert not session.busy


def test_behind_the_one_that_is_answered_only_so_many_wait() -> None:
    session = Session(0.0, SMALL)
    assert session.take(one("a"), 10) is None
    session.next(0.0)
    assert [session.take(one(name), 10) for name in "bc"] == [None, None]
    refused = session.take(one("d"), 10)
    assert isinstance(refused, Overloaded) and refused.status == 429
    session.answered()
    assert session.next(0.0) == one("b")
    assert session.take(one("e"), 10) is None, "there is room again"
    assert isinstance(session.take(one("f"), 10), Overloaded)


def test_those_that_wait_have_only_so_many_bytes() -> None:
    session = Session(0.0, SMALL)
    assert session.take(one("a"), 1000) is None, "alone it may be as long as a message may"
    session.next(0.0)
    assert session.take(one("b"), 60) is None
    assert isinstance(session.take(one("c"), 41), Overloaded)
    assert session.take(one("c"), 40) is None


def test_once_the_last_message_is_on_its_way_the_next_request_is_welcome() -> None:
    session = Session(0.0, Bounds(waiting=0))
    assert session.take(one("a"), 1) is None
    session.next(0.0)
    assert isinstance(session.take(one("b"), 1), Overloaded)
    session.answered()
    assert session.take(one("b"), 1) is None


def test_after_its_time_a_socket_takes_nothing_and_says_so_by_its_code() -> None:
    session = Session(100.0, SMALL)
    session.take(one("a"), 1)
    assert session.left_s(101.0) == 59.0
    assert session.next(159.9) == one("a")
    session.answered()
    session.take(one("b"), 1)
    over = session.next(160.0)
    assert isinstance(over, ConnectionLimit)
    assert json.loads(error(over))["error"]["code"] == "websocket_connection_limit_reached"
    assert json.loads(error(over))["status"] == 400
    assert session.left_s(161.0) == 0.0
    assert Bounds().life_s == 3600.0


# --- unstored responses ------------------------------------------------------------------------------


def ask(**body: Any) -> Any:
    return responses.decode(json.dumps({"model": "m", "input": "x", **body}).encode(), {})


def test_an_unstored_response_is_continued_where_it_was_made_and_nowhere_else() -> None:
    here, elsewhere = Local(3, 100), Local(3, 100)
    here.add("resp_1", 10)
    assert here.continued(ask(previous_response_id="resp_1", store=False)).local
    assert not elsewhere.continued(ask(previous_response_id="resp_1", store=False)).local
    assert not here.continued(ask(previous_response_id="resp_2", store=False)).local
    assert not here.continued(ask(store=False)).local


def test_what_is_stored_may_not_depend_on_what_is_not() -> None:
    local = Local(3, 100)
    local.add("resp_1", 10)
    with pytest.raises(BadRequest) as caught:
        local.continued(ask(previous_response_id="resp_1"))
    assert caught.value.param == "store" and "resp_1" in caught.value.message
    assert not local.continued(ask(previous_response_id="resp_2")).local, "that one may well be stored"


def test_the_oldest_goes_for_a_new_one_and_use_makes_young() -> None:
    local = Local(3, 100)
    for name in "abc":
        assert local.add(name, 10) == []
    local.continued(ask(previous_response_id="a", store=False))
    assert local.add("d", 10) == ["b"]
    assert local.add("e", 85) == ["c", "a"], "by their bytes as well"
    assert local.add("f", 1000) == ["d", "e", "f"], "what is too large by itself is not kept"
    assert len(local) == 0
    assert local.add("g", 100) == [], "and counts no more"


def test_what_is_dropped_is_gone_once() -> None:
    local = Local(3, 100)
    local.add("a", 60)
    local.add("b", 10)
    assert local.drop("a") == ["a"]
    assert local.drop("a") == local.drop("") == []
    assert local.add("c", 90) == []
    assert local.clear() == ["b", "c"]
    assert local.clear() == []


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 120), st.booleans()), max_size=60))
def test_the_bounds_hold_whatever_comes(steps: list[tuple[str, int, bool]]) -> None:
    local, sizes = Local(3, 100), {}
    for name, size, add in steps:
        if add and name not in local:
            sizes[name] = size
            gone = local.add(name, size)
        else:
            gone = local.drop(name)
        for one in gone:
            del sizes[one]
        assert len(local) == len(sizes) <= 3 and sum(sizes.values()) <= 100
        assert all(name in local for name in sizes)


def test_every_fault_can_be_told() -> None:
    faults: list[type[Fault]] = [Fault]
    while faults:
        kind = faults.pop()
        faults += kind.__subclasses__()
        if kind.__init__ is Fault.__init__:
            assert json.loads(error(kind("What?")))["status"] == kind.status
