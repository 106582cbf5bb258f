"""Which refusals are told, which are counted, and what a line may hold."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zjournal.api import refusals
from zjournal.api.refusals import FAULT, KEY_NAME, TEXT_CHARS_MAX, WINDOW_S, Refusal, Tally
from zjournal.errors import BadRequest, Forbidden, Unavailable

ONE = Refusal("POST", "/v1/responses", 400, "invalid_request", "input[0].role", "req_1", "laptop")


def scope(path: str = "/v1/responses", **known: Any) -> Any:
    headers = [(b"Authorization", b"Bearer zj-mine-and-secret"), (b"x-api-key", b"another-secret")]
    return {"path": path, "headers": headers, "zj_request_id": "req_7", **known}


def test_a_line_says_who_asked_for_what_and_why_not() -> None:
    assert ONE.line == ("refused: POST /v1/responses 400 invalid_request param=input[0].role key=laptop request=req_1")
    assert refusals.unread(400, "invalid_request").line == "refused: - - 400 invalid_request key=- request=-"


@given(st.text())
def test_a_client_cannot_write_a_line_of_its_own(text: str) -> None:
    told = refusals.shown(text)
    assert told.isascii() and all(0x20 < ord(character) < 0x7F for character in told)
    assert len(told) <= 10 * TEXT_CHARS_MAX + 3
    if len(text) <= TEXT_CHARS_MAX:
        assert told.encode().decode("unicode_escape") == text, "nothing is lost"
    else:
        assert told.endswith("...")


def test_the_first_of_a_name_and_code_is_told_and_the_others_are_counted() -> None:
    tally = Tally()
    other_code = Refusal("POST", "/v1/responses", 429, "rate_limit_exceeded", None, "req_2", "laptop")
    other_key = Refusal("POST", "/v1/responses", 400, "invalid_request", None, "req_3", "ci")
    assert [tally.take(one, 10.0) for one in (ONE, other_code, other_key)] == [
        *(one.line for one in (ONE, other_code, other_key))
    ]
    assert [tally.take(ONE, 10.0 + at / 100) for at in range(99)] == [None] * 99
    assert tally.take(other_key, 10.5) is None
    assert list(tally.due(10.99)) == []
    assert list(tally.due(10.0 + WINDOW_S)) == [
        "refused: 99 more within 1 s: invalid_request key=laptop",
        "refused: 1 more within 1 s: invalid_request key=ci",
    ]
    assert len(tally) == 0
    assert tally.take(ONE, 11.5) == ONE.line, "a new second"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 0.7)), max_size=60))
def test_each_refusal_is_told_or_counted_once(asked: list[tuple[str, float]]) -> None:
    tally, now, told = Tally(), 0.0, 0

    def counted(lines: Any) -> int:
        return sum(int(line.split()[1]) for line in lines)

    lines_at: dict[str, list[float]] = {}
    for name, pause in asked:
        now += pause
        told += counted(tally.due(now))
        if tally.take(Refusal("GET", "/", 401, "invalid_api_key", key=name), now) is not None:
            told += 1
            lines_at.setdefault(name, []).append(now)
    assert told + counted(tally.due(float("inf"))) == len(asked)
    for times in lines_at.values():
        assert all(later - earlier >= WINDOW_S for earlier, later in pairwise(times))


@pytest.mark.parametrize(
    ("status", "fault", "told"),
    [
        (200, None, False),
        (400, BadRequest("x"), True),
        (405, None, True),
        (499, None, False),
        (500, BadRequest("x"), False),
        (503, Unavailable("x"), True),
        (503, None, False),
    ],
)
def test_what_counts_as_refused(status: int, fault: Any, told: bool) -> None:
    found = refusals.of(scope(**{FAULT: fault}), status, "GET")
    assert (found is not None) == told


def test_the_key_that_came_with_a_request_is_never_told() -> None:
    path = "/v1/responses/zj-mine-and-secret/another-secret"
    fault = BadRequest("x", param="metadata.another-secret")
    found = refusals.of(scope(path, **{FAULT: fault, KEY_NAME: "laptop"}), 400, "POST")
    assert found is not None
    assert found.line == (
        "refused: POST /v1/responses/[removed]/[removed] 400 invalid_request "
        "param=metadata.[removed] key=laptop request=req_7"
    )


def test_who_is_not_known_has_no_name() -> None:
    found = refusals.of(scope(**{FAULT: Forbidden("x"), KEY_NAME: ""}), 403, "GET")
    assert found is not None and (found.key, found.code, found.param) == ("-", "forbidden", None)
