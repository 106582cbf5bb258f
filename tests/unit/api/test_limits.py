"""What a key's name may use: buckets that fill evenly, on a clock of the test."""

import pytest

from zjournal.api.limits import Allowance, Bucket, headers
from zjournal.errors import RateLimited
from zjournal.keys import Limits


def refused(allowance: Allowance, running: int, now: float) -> RateLimited:
    with pytest.raises(RateLimited) as caught:
        allowance.enter(running, now)
    assert caught.value.status == 429
    return caught.value


def test_requests_come_back_evenly() -> None:
    allowance = Allowance(Limits(requests=6), 100.0)
    for _ in range(6):
        allowance.enter(0, 100.0)
    fault = refused(allowance, 0, 100.5)
    assert (fault.limit, fault.retry_after_s) == ("requests", 10)
    assert "try again in 10s" in fault.message
    refused(allowance, 0, 109.9)
    allowance.enter(0, 110.0)
    refused(allowance, 0, 111.0)
    for _ in range(6):
        allowance.enter(0, 1000.0)
    refused(allowance, 0, 1000.0)


def test_tokens_are_paid_after_they_were_used() -> None:
    allowance = Allowance(Limits(tokens=600), 0.0)
    allowance.enter(0, 0.0)
    allowance.spend(1100, 0.0)
    assert refused(allowance, 0, 0.0).retry_after_s == 51
    assert refused(allowance, 0, 50.0).retry_after_s == 1
    allowance.enter(0, 50.2)


def test_a_refused_request_takes_nothing() -> None:
    allowance = Allowance(Limits(requests=2, streams=1), 0.0)
    allowance.enter(0, 0.0)
    for _ in range(5):
        assert refused(allowance, 1, 0.0).limit == "streams"
    allowance.enter(0, 0.0)


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = Bucket(60, 10.0)
    bucket.take(60, 10.0)
    assert bucket.left(5.0) == 0.0
    assert bucket.left(11.0) == 1.0


def test_headers_as_both_protocols_have_them() -> None:
    allowance = Allowance(Limits(requests=60, tokens=6000), 0.0)
    allowance.enter(0, 0.0)
    allowance.spend(9000, 0.0)
    told = dict(headers(allowance.told(0.0)))
    assert told == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"59",
        b"x-ratelimit-reset-requests": b"1s",
        b"x-ratelimit-limit-tokens": b"6000",
        b"x-ratelimit-remaining-tokens": b"0",
        b"x-ratelimit-reset-tokens": b"90s",
    }
    assert dict(headers(allowance.told(0.5)))[b"x-ratelimit-reset-requests"] == b"500ms"
    told = dict(headers(allowance.told(1.0), wall=0.0))
    assert told[b"anthropic-ratelimit-tokens-reset"] == b"1970-01-01T00:01:29Z"
    assert told[b"anthropic-ratelimit-requests-remaining"] == b"60"


def test_without_limits_nothing_is_told() -> None:
    allowance = Allowance(Limits(streams=2), 0.0)
    assert allowance.told(0.0) == []
    allowance.enter(1, 0.0)
